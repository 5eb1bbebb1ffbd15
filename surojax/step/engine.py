"""Forward and backward, written out layer by layer: fetch the weights, compute, push the gradients.

    for each group of microbatches:
        each:                         x = embed(tokens)
        for l in layers:              w = fetch(l);  each: save x;  x = block(w, x)
        each:                         loss, dx = head(x)
        for l in reversed(layers):    w = fetch(l);  each: dw, dx = vjp(block)(w, saved x)(dx);  sums += dw
                                      push(l, sums)
        each:                         push(embedding, dx)
    finish: sum over devices the gradients that are still local: embedding, final norm and head

The layers are those of one segment of the model after another. The head computes in slices of tokens, and adds its
gradient to the accumulators. Two groups may be peeled off the loop: the first, which need not read accumulators in host
memory, and the last, in which push also sums over devices what the others leave local. The loops over layers are in
blocks.py, fetch in weights.py, save in residuals.py, push and finish in gradients.py, embedding and head in outer.py.

A group has `microbatches_per_fetch` microbatches. A layer's weights are fetched once for all of them, and so are its
accumulators if they are in host memory: fewer transfers, more residuals. Gradients are added in the same order with
groups of any size, so results are the same to the bit, but for a head that is also the embedding: its matrix gets the
gradients of all heads of a group before those of its embeddings. The microbatches of a group are unrolled in the loops
over layers: XLA keeps no all-gather in flight across an inner loop (docs/LOG.md, 2026-11-22). A microbatch's gradients
are reduced while the next one's block is recomputed.

Why not `jax.grad` of the whole model: it holds all gathered weights, or a whole tree of gradients, at once. Here one
layer's weights and gradients exist at a time, whatever the placement.

Without recomputation the residuals are those of the block's own reverse mode, except the weights, which are fetched
again: `jax.vjp(saveable_args=...)` leaves them out. What moves, how early and how late, is declared in passes.py, and
stream.py has the loop that moves it. A transfer that depends on a layer's computation cannot overlap all of that
computation, so only the reduce-scatter of its gradients depends on it.

Everything here runs inside `jax.shard_map` over all mesh axes: arrays are one device's part. Data-parallel
communication is only in `fetch`, `push` and `finish`; that of tensor and context parallelism is only in blocks
(parallel/tensor.py, parallel/context.py) and in outer.py. Labels were shifted before a device takes its part of a
sequence.

Shape suffixes: A microbatches, B local batch, S sequence (or its part, see outer.py), D hidden size, N tokens.
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
from surojax.parallel.context import of_each_chunk, own_tokens
from surojax.parallel.tensor import own_part
from surojax.placement.mesh import AXES, DATA, TOKENS
from surojax.placement.param import OUTER
from surojax.step.blocks import Backward, Group, Microbatch, backward, forward, in_turn
from surojax.step.gradients import (
    Accumulators,
    accumulators,
    add,
    begin_backward,
    finish,
    peels_last_group,
    starts_in_first_group,
)
from surojax.step.metrics import Finite, all_finite, and_activations, and_gradients
from surojax.step.outer import embed, head, loss, push_embed
from surojax.step.residuals import Residuals, block_forward
from surojax.step.spec import Engine
from surojax.step.state import TensorState
from surojax.step.stream import Flight, Layer
from surojax.step.weights import Layers, fetch

__all__ = ["Engine", "Gradients", "evaluate", "loss_and_gradients"]


class Gradients(NamedTuple):
    """What forward and backward leave for the update.

    loss: mean in nats per label over all microbatches and devices, plus the mean of the blocks' auxiliary losses.
    grads: as `gradients.finish` leaves them. norm: the global norm of these. history: of recipe fp8_hybrid, else None.
    updated: by segment, the TensorState after the update of `updating`; None without it. finite: see `metrics`.
    """

    loss: jax.Array
    grads: dict
    norm: jax.Array
    history: Any
    updated: dict[str, TensorState] | None = None
    finite: Finite | None = None


class StepInputs(NamedTuple):
    """What all groups of microbatches of a step read.

    batch: the arrays `[A, B, S]` of `Engine.batch_arrays` by name. outer: weights of the outer layers. segments: by
    name. recipe_inputs: see `recipe_inputs_of`. scale: of the loss in the gradients. d_auxiliary: gradient of every
    auxiliary loss, or None.
    """

    batch: dict[str, jax.Array]
    outer: dict
    segments: dict[str, Layers]
    recipe_inputs: Callable
    scale: jax.Array
    d_auxiliary: jax.Array | None


class GroupCarry(NamedTuple):
    """The carry of the loop over groups of microbatches.

    flights: by segment, those of the lanes "weights" (prefetched for the next forward pass), "residuals" (stacks, which
    every group writes anew) and "grads". d_outer: accumulators of the outer layers. loss: summed so far, on this
    device; auxiliary: likewise, None if no block has one. squares: of the accumulators, complete after the last group.
    observed: largest magnitudes so far, for delayed scales. finite: see `metrics`.
    """

    flights: dict[str, dict[str, Any]]
    d_outer: dict
    loss: jax.Array
    auxiliary: jax.Array | None
    squares: Squares
    observed: Any
    finite: Finite | None


def loss_and_gradients(
    engine: Engine,
    weights,
    *batch_ABS: jax.Array,
    history=None,
    step=0,
    updating: dict[str, Any] | None = None,
) -> Gradients:
    """Loss and gradients of all microbatches and devices.

    batch_ABS: the arrays `[A, B, S]` of `Engine.batch_arrays`. The loss is divided by the number of its terms on all
    devices, so the result does not depend on how a batch is split into microbatches.
    history: largest magnitudes in the last steps, see `fp8.history_shape`, which this step adds its own to; None for
    recipes that have none. step: number of the step, int32, which random numbers of a recipe follow from.
    updating: by segment, `overlap.UpdatingLayers`, which the first group's forward pass updates; None if `weights` are
    up to date.
    """
    model = engine.model
    batch = dict(zip(engine.batch_arrays, batch_ABS, strict=True))
    microbatches = batch["inputs"].shape[0]
    group_size = engine.microbatches_per_fetch
    groups, left_over = divmod(microbatches, group_size)
    assert not left_over, f"expected a multiple of {group_size} microbatches, got {microbatches}"
    scale = 1.0 / jnp.maximum(count(engine, batch), 1).astype(jnp.float32)
    has_auxiliary = any(segment.has_auxiliary_loss for segment in model.segments)
    auxiliary_scale = 1.0 / (microbatches * collectives.device_number(*TOKENS)[1])
    step_inputs = StepInputs(
        batch=batch,
        outer=varying(weights[OUTER]),
        segments=layers_of(engine, weights),
        recipe_inputs=recipe_inputs_of(engine, history, step, microbatches, scale),
        scale=scale,
        d_auxiliary=varying(jnp.float32(auxiliary_scale)) if has_auxiliary else None,
    )
    residuals = residuals_of_segments(engine, step_inputs)
    updated = None
    sums = accumulators(engine, weights, updating and {name: layers.grads for name, layers in updating.items()})
    carry = GroupCarry(
        flights={
            name: {
                "weights": layers.first(),
                "residuals": Flight(residuals[name].stacks(group_size)),
                "grads": sums.layers[name],
            }
            for name, layers in step_inputs.segments.items()
        },
        d_outer=sums.outer,
        loss=varying(jnp.float32(0), AXES),
        auxiliary=varying(jnp.float32(0)) if has_auxiliary else None,
        squares=collectives.no_squares(),
        observed=varying(new_observed(history), AXES),
        finite=all_finite(engine),
    )
    peeled = peels_last_group(engine)
    begin = 0
    if starts_in_first_group(engine):
        carry, updated = first_group(engine, step_inputs, residuals, carry, updating, last=groups == 1)
        weights = weights | {name: state.weights for name, state in (updated or {}).items()}
        # Without a loop, XLA would fetch for the next group during this one: 0.16 GiB for 7B on four GPUs.
        carry, (batch, weights) = in_turn(carry, (step_inputs.batch, weights))
        step_inputs = step_inputs._replace(batch=batch, segments=layers_of(engine, weights))
        begin = 1
    end = max(begin, groups - peeled)
    if begin < end:
        looped = functools.partial(group, engine, step_inputs, residuals, first=False, last=not peeled)
        carry = jax.lax.fori_loop(begin, end, looped, carry)
    if end < groups:
        carry = group(engine, step_inputs, residuals, groups - 1, carry, first=False, last=True)
    loss = collectives.add_up(carry.loss, *AXES) * scale
    if carry.auxiliary is not None:
        loss = loss + collectives.add_up(carry.auxiliary, *TOKENS) * auxiliary_scale
    sums = Accumulators({name: flights["grads"] for name, flights in carry.flights.items()}, carry.d_outer)
    grads, norm = finish(engine, sums, carry.squares)
    history = extended(history, collectives.largest_of_devices(carry.observed))
    return Gradients(loss, grads, norm, history, updated, carry.finite)


def group(
    engine: Engine,
    step_inputs: StepInputs,
    residuals: dict[str, Residuals],
    g: jax.Array | int,
    carry: GroupCarry,
    *,
    first: bool,
    last: bool,
) -> GroupCarry:
    """The carry after group g of microbatches: forward and backward. first, last: group of the step."""
    current = group_of(engine, step_inputs, g, first=first, last=last)
    carry, xs_BSD = group_forward(engine, step_inputs, residuals, current, carry)
    return group_backward(engine, step_inputs, residuals, current, carry, xs_BSD)


def first_group(
    engine: Engine,
    step_inputs: StepInputs,
    residuals: dict[str, Residuals],
    carry: GroupCarry,
    updating: dict[str, Any] | None,
    *,
    last: bool,
) -> tuple[GroupCarry, dict[str, TensorState] | None]:
    """(the carry after the step's first group, which updates the layers of `updating`; their new state by segment)."""
    if not updating:
        return group(engine, step_inputs, residuals, 0, carry, first=True, last=last), None
    current = group_of(engine, step_inputs, 0, first=True, last=last)
    carry, xs_BSD = group_forward(engine, step_inputs._replace(segments=updating), residuals, current, carry)
    updated = {name: flights["weights"] for name, flights in carry.flights.items()}
    new_layers = layers_of(engine, {name: state.weights for name, state in updated.items()})
    prefetched = {name: {"weights": layers.first(reverse=True)} for name, layers in new_layers.items()}
    carry = carry._replace(flights={name: flights | prefetched[name] for name, flights in carry.flights.items()})
    step_inputs = step_inputs._replace(segments=new_layers)
    return group_backward(engine, step_inputs, residuals, current, carry, xs_BSD), updated


def group_of(engine: Engine, step_inputs: StepInputs, g: jax.Array | int, *, first: bool, last: bool) -> Group:
    """Group g of microbatches."""
    n = engine.microbatches_per_fetch
    return Group(g, [microbatch_of(engine, step_inputs, g * n + i) for i in range(n)], first, last)


def microbatch_of(engine: Engine, step_inputs: StepInputs, a: jax.Array | int) -> Microbatch:
    """Microbatch a."""
    batch_BS = read(step_inputs.batch, a)
    recipe_inputs = functools.partial(step_inputs.recipe_inputs, a)
    inputs_BS, targets = own_slices(engine, batch_BS)
    return Microbatch(inputs_BS, targets, batch_BS.get("starts"), recipe_inputs)


def group_forward(
    engine: Engine, step_inputs: StepInputs, residuals: dict[str, Residuals], current: Group, carry: GroupCarry
) -> tuple[GroupCarry, list[jax.Array]]:
    """(the carry, results of the last layer) after the forward pass of each segment."""
    xs_BSD = [embedded(engine, step_inputs.outer, each) for each in current.microbatches]
    auxiliary = []  # by segment, of each microbatch
    done = {}
    for name, layers in step_inputs.segments.items():
        flights = carry.flights[name]
        moving = {
            "weights": layers.turn(flights["weights"], current.number, reverse=False),
            "residuals": residuals[name].before_forward(flights["residuals"].stack),
        }
        results, moving = forward(engine, layers, xs_BSD, current, residuals[name], moving)
        xs_BSD = results.xs_BSD
        auxiliary.append(results.auxiliary)
        done[name] = flights | moving
    total = carry.auxiliary
    for of_microbatch in zip(*auxiliary, strict=True):
        for of_segment in of_microbatch:
            total = total if of_segment is None else add(total, of_segment)
    return carry._replace(flights=done, auxiliary=total), xs_BSD


def group_heads(
    engine: Engine, step_inputs: StepInputs, current: Group, carry: GroupCarry, xs_BSD: list[jax.Array]
) -> tuple[GroupCarry, list[jax.Array]]:
    """(the carry with losses and the heads' gradients, gradients of xs_BSD: the results of the last layer)."""
    losses = []
    dxs_BSD = []
    d_outer = carry.d_outer
    for each, x_BSD in zip(current.microbatches, xs_BSD, strict=True):
        loss, dx_BSD, d_outer = head_of_microbatch(engine, step_inputs, each, x_BSD, d_outer)
        losses.append(loss)
        dxs_BSD.append(dx_BSD)
    finite = and_activations(carry.finite, xs_BSD)
    return carry._replace(d_outer=d_outer, loss=sum(losses, carry.loss), finite=finite), dxs_BSD


def head_of_microbatch(engine: Engine, step_inputs: StepInputs, each: Microbatch, x_BSD: jax.Array, d_outer: dict):
    """(loss, d loss / dx, gradients of the outer layers with those of the head)."""
    return head(
        engine.objective,
        engine.model,
        step_inputs.outer,
        d_outer,
        x_BSD,
        each.targets,
        step_inputs.scale,
        chunks=engine.lmhead_chunks,
        axes=engine.vocabulary_axes,
    )


def group_backward(
    engine: Engine,
    step_inputs: StepInputs,
    residuals: dict[str, Residuals],
    current: Group,
    carry: GroupCarry,
    xs_BSD: list[jax.Array],
) -> GroupCarry:
    """The carry after heads, the blocks of all segments in reverse, and the embedding's gradients."""
    carry, dxs_BSD = group_heads(engine, step_inputs, current, carry, xs_BSD)
    done = Backward(dxs_BSD, collectives.no_squares(), carry.observed)
    flights_of = {}
    for name, layers in reversed(step_inputs.segments.items()):
        flights = carry.flights[name]
        moving = {
            "weights": layers.turn(flights["weights"], current.number, reverse=True),
            "residuals": residuals[name].before_backward(flights["residuals"]),
            "grads": begin_backward(layers.segment, flights["grads"], current.number, first=current.first),
        }
        done, moving = backward(engine, layers, done, step_inputs.d_auxiliary, current, residuals[name], moving)
        flights_of[name] = moving | {"residuals": Flight(moving["residuals"].stack)}
    d_outer = carry.d_outer
    for each, dx_BSD in zip(current.microbatches, done.dxs_BSD, strict=True):
        d_outer = push_embed(d_outer, each.inputs_BS, dx_BSD, engine.vocabulary_axes, engine.model.embedding_scale)
    finite = and_gradients(carry.finite, done.dxs_BSD)
    return carry._replace(
        flights=flights_of, d_outer=d_outer, squares=done.squares, observed=done.observed, finite=finite
    )


def layers_of(engine: Engine, weights) -> dict[str, Layers]:
    """The `Layers` of each segment. weights: by section."""
    return {segment.name: Layers(engine, segment, weights[segment.name]) for segment in engine.model.segments}


def embedded(engine: Engine, outer, each: Microbatch) -> jax.Array:
    """The embeddings of a microbatch's tokens."""
    return embed(outer, each.inputs_BS, engine.vocabulary_axes, engine.model.embedding_scale)


def own_slice(engine: Engine, x_BS: jax.Array) -> jax.Array:
    """The columns of whole sequences whose activations are on this device."""
    compute = engine.model.compute

    def own_columns(x_BS: jax.Array) -> jax.Array:
        return own_part(own_tokens(x_BS, compute.cp_method))

    return of_each_chunk(own_columns, x_BS, compute.sequence_chunks)


def own_slices(engine: Engine, batch_BS: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(inputs, the objective's arrays by name) of the tokens whose activations are on this device."""
    targets = {name: own_slice(engine, batch_BS[name]) for name in engine.objective.targets}
    return own_slice(engine, batch_BS["inputs"]), targets


def recipe_inputs_of(engine: Engine, history, step, microbatches: int, scale: jax.Array) -> Callable:
    """A function (microbatch a, number of a layer) -> `recipe_inputs` of a `Segment`'s block.

    scale: of the loss in the gradient, which tells the first step how large gradients may be.
    """
    model = engine.model
    precision = model.precision
    if precision.delayed:
        scales = delayed_scales(history, model.sites, precision.margin, scale)
        return lambda a, l: scales[l]
    if model.draws:
        device, devices = collectives.device_number(*TOKENS)

        def word(i) -> jax.Array:
            return jnp.asarray(i, jnp.uint32)

        def seed(a, l) -> jax.Array:
            return ((word(step) * microbatches + word(a)) * model.num_layers + word(l)) * devices + word(device)

        return seed
    return lambda a, l: None


def residuals_of_segments(engine: Engine, step_inputs: StepInputs) -> dict[str, Residuals]:
    """The residuals of each segment's layers in a microbatch."""
    each = microbatch_of(engine, step_inputs, 0)
    segments = step_inputs.segments.items()
    return {name: residuals_of(engine, layers, step_inputs.outer, each) for name, layers in segments}


def residuals_of(
    engine: Engine, layers: Layers, outer, each: Microbatch, variants: tuple[Variant, ...] = ()
) -> Residuals:
    """The residuals of a segment's layers in a microbatch. variants: that they may have; (): those that they have."""
    segment = layers.segment

    def of_variant(variant: Variant):
        stack = layers.fetches[0].part.stack  # all layers of a segment have the same shapes
        layer = Layer(0, 0, segment.start, variant, 1)
        x_BSD = embedded(engine, outer, each)
        inputs = each.recipe_inputs(layer.number)
        w = fetch(engine, segment, stack, 0, variant)
        return block_forward(engine, segment, layer, w, x_BSD, inputs, each.starts_BS)[1]

    saved = {
        variant: jax.eval_shape(functools.partial(of_variant, variant))
        for variant in variants or dict.fromkeys(segment.variants)
    }
    return Residuals(segment.num_layers, engine.table.residuals.home, saved)


def evaluate(engine: Engine, weights, *batch_BS: jax.Array):
    """(summed loss, number of its terms) over all devices; forward only, without auxiliary losses.

    batch_BS: the arrays `[B, S]` of `Engine.batch_arrays`.
    """
    batch = dict(zip(engine.batch_arrays, batch_BS, strict=True))
    inputs_BS, targets = own_slices(engine, batch)
    starts_BS = batch.get("starts")
    outer = varying(weights[OUTER])
    axes = engine.vocabulary_axes
    x_BSD = embed(outer, inputs_BS, axes, engine.model.embedding_scale)
    for segment in engine.model.segments:
        layers = Layers(engine, segment, weights[segment.name])

        def block(layer: Layer, values, x_BSD, flights, segment=segment):
            return segment.block(values["weights"], x_BSD, None, layer.variant, starts_BS)[0], {}, flights

        x_BSD, _ = layers.over(block, x_BSD, {}, {"weights": layers.first()})
    total = loss(engine.objective, engine.model, outer, x_BSD, targets, chunks=engine.lmhead_chunks, axes=axes)
    return collectives.add_up(total, *AXES), count(engine, batch)


def count(engine: Engine, batch: dict[str, jax.Array]) -> jax.Array:
    """The number of terms of the objective, on all devices together. batch: of whole sequences."""
    return collectives.add_up(engine.objective.count({k: batch[k] for k in engine.objective.targets}), *DATA)
