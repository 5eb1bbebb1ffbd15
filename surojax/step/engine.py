"""Forward and backward, written out layer by layer: fetch the weights, compute, push the gradients.

    for each microbatch:
        x = embed(tokens)
        for l in layers:              w = fetch(l);  save x;  x = block(w, x)
        loss, dx = head(x)            in slices of tokens; its gradient goes into the accumulators
        for l in reversed(layers):    w = fetch(l);  dw, dx = vjp(block)(w, saved x)(dx);  push(l, dw)
        push(embedding, dx)
    finish: sum over devices the gradients that are still local: embedding, final norm and head

The layers are those of one segment of the model after another. The last microbatch is peeled off the loop if something
is to be summed over devices: push then also sums what the other microbatches leave local. fetch is in weights.py, save
in residuals.py, push and finish in gradients.py, embedding and head in outer.py.

Why not `jax.grad` of the whole model: it holds all gathered weights, or a whole tree of gradients, at once. Here one
layer's weights and gradients exist at a time, whatever the placement.

The loops carry stacked `[L, ...]` arrays and read or write layer l in place. `lax.scan` with xs/ys would copy the stack
(measured on compiled Llama-7B: 123 GiB instead of 85). Without recomputation the residuals are those of the block's own
reverse mode, except the weights, which are fetched again: `jax.vjp(saveable_args=...)` leaves them out.

Stacks may be in pinned host memory (`offload_*`): `read` copies one layer to the device, `write` copies it back. A
transfer that depends on a layer's computation cannot overlap all of that computation, so only the reduce-scatter of its
gradients depends on it. The inputs of a layer are prefetched one or two layers earlier, and its outputs are copied to
host memory while the next layer computes. Values in flight are in the loops' carry. XLA's scheduler then decides what
starts when (assembly.compiler_options; `hlo.overlaps` reads its decisions).

Everything here runs inside `jax.shard_map` over all mesh axes: arrays are one device's part. Data-parallel
communication is only in `fetch`, `push` and `finish`; tensor-parallel communication is only in blocks
(parallel/tensor.py) and in outer.py. Shape suffixes: A microbatches, B local batch, S sequence
(or its part, see outer.py), D hidden size, N tokens.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import read
from surojax.models.model import Variant
from surojax.numerics.fp8 import delayed_scales, extended, new_observed
from surojax.parallel import collectives
from surojax.parallel.collectives import Squares, varying
from surojax.parallel.tensor import own_part
from surojax.placement.mesh import AXES, DATA
from surojax.placement.param import OUTER
from surojax.step.gradients import (
    Accumulators,
    accumulators,
    add,
    begin_backward,
    finish,
    push,
    read_accumulator,
    sums_in_last_microbatch,
)
from surojax.step.outer import embed, head, loss, push_embed
from surojax.step.residuals import Kept, Residuals, block_backward, block_forward
from surojax.step.spec import Engine
from surojax.step.weights import Layer, Layers, fetch

__all__ = ["Engine", "Gradients", "evaluate", "loss_and_gradients"]


class Gradients(NamedTuple):
    """What forward and backward leave for the update.

    loss: mean in nats per label over all microbatches and devices, plus the mean of the blocks' auxiliary losses.
    grads: as `gradients.finish` leaves them. norm: the global norm of these. history: of recipe fp8_hybrid, else None.
    """

    loss: jax.Array
    grads: dict
    norm: jax.Array
    history: Any


class MicrobatchCarry(NamedTuple):
    """The carry of the loop over microbatches.

    loss: summed so far, on this device; auxiliary: likewise, None if no block has one. squares: of the accumulators,
    complete after the last microbatch. prefetched: by segment, weights of the next forward pass. observed: largest
    magnitudes so far, for delayed scales.
    """

    grads: Accumulators
    loss: jax.Array
    auxiliary: jax.Array | None
    squares: Squares
    prefetched: dict[str, list]
    observed: Any


class Forward(NamedTuple):
    """Results of a segment's forward pass: output, sum of auxiliary losses, residuals, and prefetched weights."""

    x_BSD: jax.Array
    auxiliary: jax.Array | None
    residuals: Residuals
    kept: Kept
    prefetched: list


class ForwardCarry(NamedTuple):
    """The carry of the loop over layers forward."""

    x_BSD: jax.Array
    auxiliary: jax.Array | None
    kept: Kept


class BackwardCarry(NamedTuple):
    """The carry of the loop over layers backward.

    d_auxiliary: gradient of every auxiliary loss, None if there is none. deferred: residuals of the layer below, in
    flight to the device.
    """

    dx_BSD: jax.Array
    d_auxiliary: jax.Array | None
    grads: Accumulators
    squares: Squares
    deferred: Any
    observed: Any


def loss_and_gradients(
    engine: Engine, weights, inputs_ABS: jax.Array, labels_ABS: jax.Array, starts_ABS=None, *, history=None, step=0
) -> Gradients:
    """Loss and gradients of all microbatches and devices.

    Labels < 0 are ignored and not counted, so the result does not depend on how a batch is split into microbatches.
    starts_ABS: of documents, if the engine is packed, see `Segment`; else None.
    history: largest magnitudes in the last steps, see `fp8.history_shape`, which this step adds its own to; None for
    recipes that have none. step: number of the step, int32, which random numbers of a recipe follow from.
    """
    model = engine.model
    microbatches = inputs_ABS.shape[0]
    scale = 1.0 / jnp.maximum(count(labels_ABS), 1).astype(jnp.float32)
    has_auxiliary = any(segment.has_auxiliary_loss for segment in model.segments)
    auxiliary_scale = 1.0 / (microbatches * collectives.device_number(*DATA)[1])
    d_auxiliary = varying(jnp.float32(auxiliary_scale)) if has_auxiliary else None
    outer = varying(weights[OUTER])
    axes = engine.vocabulary_axes
    segments = {segment.name: Layers(engine, segment, weights[segment.name]) for segment in model.segments}
    recipe_inputs = recipe_inputs_of(engine, history, step, microbatches, scale)

    def microbatch(a, carry: MicrobatchCarry, *, last: bool) -> MicrobatchCarry:
        inputs_BS, labels_BS, starts_BS = read((inputs_ABS, labels_ABS, starts_ABS), a)
        of_layer = functools.partial(recipe_inputs, a)
        inputs_BS = own_part(inputs_BS)
        labels_BS = own_part(labels_BS)
        x_BSD = embed(outer, inputs_BS, axes, model.embedding_scale)
        passes: dict[str, Forward] = {}
        for name, layers in segments.items():
            prefetched = layers.turn(carry.prefetched[name], a, reverse=False)
            passes[name] = forward(engine, layers, x_BSD, prefetched, of_layer, starts_BS)
            x_BSD = passes[name].x_BSD
        loss, dx_BSD, d_outer = head(
            model,
            outer,
            carry.grads.outer,
            x_BSD,
            labels_BS,
            scale,
            chunks=engine.lmhead_chunks,
            axes=axes,
            z_loss=engine.z_loss,
        )
        grads = carry.grads._replace(outer=d_outer)
        done = BackwardCarry(dx_BSD, d_auxiliary, grads, collectives.no_squares(), None, carry.observed)
        prefetched = {}
        for name, layers in reversed(segments.items()):
            push_layer = functools.partial(push, engine, layers.segment, first=a == 0, last=last)
            passed = passes[name]._replace(prefetched=layers.turn(passes[name].prefetched, a, reverse=True))
            done = done._replace(grads=begin_backward(layers.segment, done.grads, a))
            done, prefetched[name] = backward(engine, layers, done, passed, of_layer, push_layer, starts_BS)
        d_outer = push_embed(done.grads.outer, inputs_BS, done.dx_BSD, axes, model.embedding_scale)
        grads = done.grads._replace(outer=d_outer)
        auxiliary = [carry.auxiliary, *(passed.auxiliary for passed in passes.values() if passed.auxiliary is not None)]
        total = functools.reduce(add, auxiliary)
        return MicrobatchCarry(grads, carry.loss + loss, total, done.squares, prefetched, done.observed)

    carry = MicrobatchCarry(
        grads=accumulators(engine, weights),
        loss=varying(jnp.float32(0), AXES),
        auxiliary=varying(jnp.float32(0)) if has_auxiliary else None,
        squares=collectives.no_squares(),
        prefetched={name: layers.first() for name, layers in segments.items()},
        observed=varying(new_observed(history)),
    )
    peeled = sums_in_last_microbatch(engine)
    if peeled < microbatches:
        looped = functools.partial(microbatch, last=not peeled)
        carry = jax.lax.fori_loop(0, microbatches - peeled, looped, carry)
    if peeled:
        carry = microbatch(microbatches - 1, carry, last=True)
    loss = collectives.add_up(carry.loss, *AXES) * scale
    if carry.auxiliary is not None:
        loss = loss + collectives.add_up(carry.auxiliary, *DATA) * auxiliary_scale
    grads, norm = finish(engine, carry.grads, carry.squares)
    return Gradients(loss, grads, norm, extended(history, collectives.largest_of_devices(carry.observed)))


def recipe_inputs_of(engine: Engine, history, step, microbatches: int, scale: jax.Array) -> Callable:
    """A function (microbatch a, number of a layer) -> `recipe_inputs` of a `Segment`'s block.

    scale: of the loss in the gradient, which tells the first step how large gradients may be.
    """
    model = engine.model
    precision = model.precision
    if precision.delayed:
        scales = delayed_scales(history, model.sites, precision.margin, scale)
        return lambda a, l: scales[l]
    if precision.recipe == "nvfp4":
        device, devices = collectives.device_number(*DATA)

        def word(i) -> jax.Array:
            return jnp.asarray(i, jnp.uint32)

        def seed(a, l) -> jax.Array:
            return ((word(step) * microbatches + word(a)) * model.num_layers + word(l)) * devices + word(device)

        return seed
    return lambda a, l: None


@jax.named_scope("forward")
def forward(
    engine: Engine, layers: Layers, x_BSD: jax.Array, prefetched, recipe_inputs: Callable, starts_BS
) -> Forward:
    """All blocks of a segment. recipe_inputs: of the number of a layer."""
    segment = layers.segment

    def residuals_of(variant: Variant, x_BSD):
        stack = layers.prefetches[0].part.stack  # all layers of a segment have the same shapes
        layer = Layer(0, segment.start, variant, fetch(engine, segment, stack, 0, variant))
        return block_forward(engine, segment, layer, x_BSD, recipe_inputs(layer.number), starts_BS)[1]

    variants = dict.fromkeys(segment.variants)
    saved = {variant: jax.eval_shape(functools.partial(residuals_of, variant), x_BSD) for variant in variants}
    residuals = Residuals(segment.num_layers, engine.table.residuals.home, saved)

    def one(layer: Layer, prefetched, carry: ForwardCarry):
        inputs = recipe_inputs(layer.number)
        (x_BSD, auxiliary), values = block_forward(engine, segment, layer, carry.x_BSD, inputs, starts_BS)
        kept = residuals.keep(carry.kept, values, layer.index)
        return ForwardCarry(x_BSD, add(carry.auxiliary, auxiliary), kept), prefetched

    auxiliary = varying(jnp.float32(0)) if segment.has_auxiliary_loss else None
    done, prefetched = layers.loop(one, ForwardCarry(x_BSD, auxiliary, residuals.first()), prefetched)
    return Forward(done.x_BSD, done.auxiliary, residuals, done.kept, prefetched)


@jax.named_scope("backward")
def backward(
    engine: Engine,
    layers: Layers,
    carry: BackwardCarry,
    passed: Forward,
    recipe_inputs: Callable,
    push_layer: Callable,
    starts_BS,
):
    """(BackwardCarry, prefetched) after all blocks of a segment in reverse.

    passed: the segment's forward pass. push_layer: `push` of the segment in this microbatch.
    """
    segment = layers.segment

    def one(layer: Layer, prefetched, carry: BackwardCarry):
        l = layer.index
        saved, kept = passed.residuals.take(passed.kept._replace(deferred=carry.deferred), l, layer.variant)
        grads, sums = read_accumulator(engine, segment, carry.grads, l)
        dx_BSD = carry.dx_BSD
        if engine.recompute_block and engine.table.weights.sharded:
            # The next weights are gathered while the block is recomputed, gradients are reduced while it is
            # differentiated: one after the other, or the scheduler puts the gather behind the last gradient.
            dx_BSD, gathered = jax.lax.optimization_barrier((dx_BSD, prefetched[0]))
            prefetched = gathered, *prefetched[1:]
        d_result = dx_BSD, carry.d_auxiliary if segment.has_auxiliary_loss else None
        inputs = recipe_inputs(layer.number)
        dw, dx_BSD, seen = block_backward(engine, segment, layer, saved, d_result, inputs, starts_BS)
        grads, squares = push_layer(grads, sums, dw, layer)
        observed = jax.tree.map(lambda old, new: old.at[layer.number].max(new), carry.observed, seen)
        carry = carry._replace(dx_BSD=dx_BSD, grads=grads, squares=add(carry.squares, squares), observed=observed)
        return carry._replace(deferred=kept.deferred), prefetched

    carry = carry._replace(deferred=passed.kept.deferred)
    done, prefetched = layers.loop(one, carry, passed.prefetched, reverse=True)
    return done._replace(deferred=None), prefetched


def evaluate(engine: Engine, weights, inputs_BS: jax.Array, labels_BS: jax.Array, starts_BS=None):
    """(summed loss in nats, labels counted) over all devices; forward only, without auxiliary losses."""
    outer = varying(weights[OUTER])
    axes = engine.vocabulary_axes
    x_BSD = embed(outer, own_part(inputs_BS), axes, engine.model.embedding_scale)
    for segment in engine.model.segments:
        layers = Layers(engine, segment, weights[segment.name])

        def block(layer: Layer, prefetched, x_BSD, segment=segment):
            return segment.block(layer.weights, x_BSD, None, layer.variant, starts_BS)[0], prefetched

        x_BSD, _ = layers.loop(block, x_BSD, layers.first())
    total = loss(engine.model, outer, x_BSD, own_part(labels_BS), chunks=engine.lmhead_chunks, axes=axes)
    return collectives.add_up(total, *AXES), count(labels_BS)


def count(labels: jax.Array) -> jax.Array:
    """Labels that are not ignored, on all devices together."""
    return collectives.add_up(jnp.sum(labels >= 0, dtype=jnp.int32), *DATA)
