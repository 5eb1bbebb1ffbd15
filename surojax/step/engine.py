"""Forward and backward, written out layer by layer: fetch the weights, compute, push the gradients.

    for each microbatch:
        x = embed(tokens)
        for l in layers:              w = fetch(l);  save x;  x = block(w, x)
        loss, dx = head(x)            in slices of tokens; its gradient goes into the accumulators
        for l in reversed(layers):    w = fetch(l);  dw, dx = vjp(block)(w, saved x)(dx);  push(l, dw)
        push(embedding, dx)
    the last microbatch is peeled off the loop if something is to be summed over devices: push then sums what the others
    leave local
    finish: sum over devices what is still local: the embedding and the final norm

fetch is weights.py, what is saved is residuals.py, push and finish are gradients.py, embedding and head are outer.py.

Why not `jax.grad` of the whole model: it holds all gathered weights, or a whole tree of gradients, at once. Here one
layer's weights and gradients exist at a time, whatever the placement.

The loops carry stacked `[L, ...]` arrays and read or write layer l in place. `lax.scan` with xs/ys would copy the stack
(measured on compiled Llama-7B: 123 GiB instead of 85). Without recomputation the residuals are those of the block's own
reverse mode, except the weights, which are fetched again: `jax.vjp(saveable_args=...)` leaves them out.

Stacks may be in pinned host memory (`offload_*`): `read` copies one layer to the device, `write` copies it back. A
transfer that depends on a layer's computation cannot overlap all of it, so only the reduce-scatter of its gradients
does: what a layer needs is asked for one or two layers earlier, and what it leaves in host memory is copied out while
the next one computes. In between it is in the loops' carry. XLA's scheduler then decides what starts when
(assembly.compiler_options; `hlo.overlaps` reads its decisions).

Everything here runs inside `jax.shard_map` over the data axes: arrays are one device's part. Communication is only in
`fetch`, `push` and `finish`. Shape suffixes: A microbatches, B local batch, S sequence, D hidden size, N tokens.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import read
from surojax.numerics.fp8 import delayed_scales, extended, new_observed
from surojax.parallel import collectives
from surojax.parallel.collectives import Squares, varying
from surojax.placement.mesh import DATA
from surojax.step.gradients import (
    Accumulators,
    HeadParts,
    accumulators,
    add,
    finish,
    push,
    read_accumulator,
    sums_in_last_microbatch,
)
from surojax.step.outer import embed, head, loss, push_embed
from surojax.step.residuals import Kept, Residuals
from surojax.step.spec import Engine
from surojax.step.weights import Layer, Layers, fetch

__all__ = ["Engine", "Gradients", "evaluate", "loss_and_gradients"]


class Gradients(NamedTuple):
    """What forward and backward leave for the update.

    loss: mean in nats per label over all microbatches and devices. grads: as `gradients.finish` leaves them. norm: the
    global norm of these. history: of recipe fp8_hybrid, else None.
    """

    loss: jax.Array
    grads: dict
    norm: jax.Array
    history: Any


class MicrobatchCarry(NamedTuple):
    """The carry of the loop over microbatches.

    loss: summed so far, on this device. squares: of the accumulators, complete after the last microbatch. prefetched:
    weights of the next forward pass. observed: largest magnitudes so far, for delayed scales.
    """

    grads: Accumulators
    loss: jax.Array
    squares: Squares
    prefetched: list
    observed: Any


class BackwardCarry(NamedTuple):
    """The carry of the loop over layers backward.

    deferred: residuals of the layer below, on their way to the device.
    """

    dx_BSD: jax.Array
    grads: Accumulators
    squares: Squares
    deferred: Any
    observed: Any


def loss_and_gradients(
    engine: Engine, weights, inputs_ABS: jax.Array, labels_ABS: jax.Array, *, history=None, step=0
) -> Gradients:
    """Loss and gradients of all microbatches and devices.

    Labels < 0 are ignored and not counted, so the result does not depend on how a batch is split into microbatches.
    history: largest magnitudes in the last steps, see `fp8.history_shape`, which this step adds its own to; None for
    recipes that have none. step: number of the step, int32, which random numbers of a recipe follow from.
    """
    model = engine.model
    scale = 1.0 / jnp.maximum(count(labels_ABS), 1).astype(jnp.float32)
    outer = varying(weights["outer"])
    layers = Layers(engine, weights["blocks"])
    sharded = engine.table.outer.sharded
    recipe_inputs = recipe_inputs_of(engine, history, step, inputs_ABS.shape[0], scale)

    def microbatch(a, carry: MicrobatchCarry, *, last: bool) -> MicrobatchCarry:
        inputs_BS, labels_BS = read((inputs_ABS, labels_ABS), a)
        of_layer = functools.partial(recipe_inputs, a)
        x_BSD = embed(outer, inputs_BS, sharded)
        x_BSD, residuals, kept, prefetched = forward(engine, layers, x_BSD, carry.prefetched, of_layer)
        loss, dx_BSD, d_outer = head(
            model,
            outer,
            carry.grads.outer,
            x_BSD,
            labels_BS,
            scale,
            chunks=engine.lmhead_chunks,
            sharded=sharded,
            z_loss=engine.z_loss,
        )
        grads = carry.grads._replace(outer=d_outer)
        grads = HeadParts.begin(engine, grads) if last else grads

        def backward(layer: Layer, prefetched, carry: BackwardCarry):
            l = layer.number
            saved, deferred = residuals.take(kept.stack, carry.deferred, l)
            grads, sums = read_accumulator(engine, carry.grads, l)
            dx_BSD = carry.dx_BSD
            if engine.recompute_block and engine.table.weights.sharded:
                # The next weights are gathered while the block is recomputed, gradients are reduced while it is
                # differentiated: one after the other, or the scheduler puts the gather behind the last gradient.
                dx_BSD, gathered = jax.lax.optimization_barrier((dx_BSD, prefetched[0]))
                prefetched = gathered, *prefetched[1:]
            dw, dx_BSD, seen = block_backward(engine, layer, saved, dx_BSD, of_layer(l))
            grads, squares = push(engine, grads, sums, dw, l, first=a == 0, last=last)
            observed = jax.tree.map(lambda old, new: old.at[l].max(new), carry.observed, seen)
            return BackwardCarry(dx_BSD, grads, add(carry.squares, squares), deferred, observed), prefetched

        start = BackwardCarry(dx_BSD, grads, collectives.no_squares(), kept.deferred, carry.observed)
        done, prefetched = layers.loop(backward, start, prefetched, reverse=True)
        d_outer = push_embed(done.grads.outer, inputs_BS, done.dx_BSD, sharded)
        grads = done.grads._replace(outer=d_outer)
        return MicrobatchCarry(grads, carry.loss + loss, done.squares, prefetched, done.observed)

    observed = varying(new_observed(history))
    zero = varying(jnp.float32(0))
    carry = MicrobatchCarry(accumulators(engine, weights), zero, collectives.no_squares(), layers.first(), observed)
    microbatches = inputs_ABS.shape[0]
    peeled = sums_in_last_microbatch(engine)
    if peeled < microbatches:
        looped = functools.partial(microbatch, last=not peeled)
        carry = jax.lax.fori_loop(0, microbatches - peeled, looped, carry)
    if peeled:
        carry = microbatch(microbatches - 1, carry, last=True)
    loss = collectives.add_up(carry.loss, *DATA) * scale
    grads, norm = finish(engine, carry.grads, carry.squares)
    return Gradients(loss, grads, norm, extended(history, collectives.largest_of_devices(carry.observed)))


def recipe_inputs_of(engine: Engine, history, step, microbatches: int, scale: jax.Array) -> Callable:
    """A function (microbatch a, layer l) -> `recipe_inputs` of `ModelFunctions`.

    scale: of the loss in the gradient, which tells the first step how large gradients may be.
    """
    precision = engine.model.precision
    num_layers = engine.model.num_layers
    if precision.delayed:
        scales = delayed_scales(history, precision.margin, scale)
        return lambda a, l: scales[l]
    if precision.recipe == "nvfp4":
        device, devices = collectives.device_number(*DATA)

        def word(i) -> jax.Array:
            return jnp.asarray(i, jnp.uint32)

        def seed(a, l) -> jax.Array:
            return ((word(step) * microbatches + word(a)) * num_layers + word(l)) * devices + word(device)

        return seed
    return lambda a, l: None


def block_forward(engine: Engine, layer: Layer, x_BSD: jax.Array, recipe_inputs):
    """(the block of x, residuals: x itself if the block is recomputed)."""
    model = engine.model
    if engine.recompute_block:
        return model.block(layer.weights, x_BSD, recipe_inputs, layer.recipe_enabled), x_BSD
    return model.block_forward(layer.weights, x_BSD, recipe_inputs, layer.recipe_enabled)


def block_backward(engine: Engine, layer: Layer, saved, dy_BSD: jax.Array, recipe_inputs):
    """(dw, dx, observed) from the residuals, see `ModelFunctions.block_backward`."""
    model = engine.model
    if engine.recompute_block:
        saved = model.block_forward(layer.weights, saved, recipe_inputs, layer.recipe_enabled)[1]
    return model.block_backward(layer.weights, saved, dy_BSD, recipe_inputs, layer.recipe_enabled)


def forward(engine: Engine, layers: Layers, x_BSD: jax.Array, prefetched, recipe_inputs: Callable):
    """All blocks: (output, Residuals, what they keep, prefetched). recipe_inputs: of a layer's number."""

    def residuals_of_layer(x_BSD):
        stack, enabled = layers.prefetches[0].part.stack, layers.recipe_enabled[0]
        layer = Layer(0, enabled, fetch(engine, stack, 0, enabled))  # all layers have the same shapes
        return block_forward(engine, layer, x_BSD, recipe_inputs(0))[1]

    residuals = Residuals(
        engine.model.num_layers, engine.table.residuals.home, jax.eval_shape(residuals_of_layer, x_BSD)
    )

    def one(layer: Layer, prefetched, carry: tuple[jax.Array, Kept]):
        x_BSD, kept = carry
        x_BSD, values = block_forward(engine, layer, x_BSD, recipe_inputs(layer.number))
        return (x_BSD, residuals.keep(kept, values, layer.number)), prefetched

    (x_BSD, kept), prefetched = layers.loop(one, (x_BSD, residuals.first()), prefetched)
    return x_BSD, residuals, kept, prefetched


def evaluate(engine: Engine, weights, inputs_BS: jax.Array, labels_BS: jax.Array):
    """(summed loss in nats, labels counted) over all devices; forward only."""
    model = engine.model
    outer = varying(weights["outer"])
    layers = Layers(engine, weights["blocks"])
    sharded = engine.table.outer.sharded

    def block(layer: Layer, prefetched, x_BSD):
        return model.block(layer.weights, x_BSD, None, layer.recipe_enabled), prefetched

    x_BSD, _ = layers.loop(block, embed(outer, inputs_BS, sharded), layers.first())
    total = loss(model, outer, x_BSD, labels_BS, chunks=engine.lmhead_chunks, sharded=sharded)
    return collectives.add_up(total, *DATA), count(labels_BS)


def count(labels: jax.Array) -> jax.Array:
    """Labels that are not ignored, on all devices together."""
    return collectives.add_up(jnp.sum(labels >= 0, dtype=jnp.int32), *DATA)
