"""The loops over a segment's layers, forward and backward, each layer for all microbatches of a group; see engine.py.

Shape suffixes: B local batch, S sequence (or its part, see outer.py), D hidden size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.parallel.collectives import Squares, varying
from surojax.step.gradients import (
    Accumulators,
    accumulate,
    add,
    push,
    read_accumulator,
    reduce_behind,
)
from surojax.step.residuals import Kept, Residuals, Slot, block_backward, block_forward
from surojax.step.spec import Engine
from surojax.step.weights import Layer, Layers


class Microbatch(NamedTuple):
    """The inputs of a pass over layers, of one microbatch.

    inputs_BS, labels_BS: of this device's tokens. starts_BS: of the documents of whole sequences, None if the engine is
    not packed. recipe_inputs: a function of the number of a layer.
    """

    inputs_BS: jax.Array
    labels_BS: jax.Array
    starts_BS: jax.Array | None
    recipe_inputs: Callable


class Group(NamedTuple):
    """Microbatches for which a layer is fetched once. first, last: of the step's groups."""

    number: jax.Array | int
    microbatches: list[Microbatch]
    first: bool
    last: bool


class ForwardCarry(NamedTuple):
    """The carry of the loop over layers forward, of a microbatch: x, sum of auxiliary losses, residuals."""

    x_BSD: jax.Array
    auxiliary: jax.Array | None
    kept: Kept


class Forward(NamedTuple):
    """Results of a segment's forward pass, for each microbatch of a group.

    prefetched: as the layers' `loop` returns it, weights of the backward pass; from `UpdatingLayers` the new state.
    """

    microbatches: list[ForwardCarry]
    prefetched: Any


class BackwardCarry(NamedTuple):
    """The carry of the loop over layers backward.

    dxs_BSD: for each microbatch. d_auxiliary: gradient of every auxiliary loss, None if there is none. deferred: for
    each microbatch, residuals of the layer below, in flight to the device.
    """

    dxs_BSD: list[jax.Array]
    d_auxiliary: jax.Array | None
    grads: Accumulators
    squares: Squares
    deferred: list
    observed: Any


@jax.named_scope("forward")
def forward(
    engine: Engine,
    layers: Layers,
    xs_BSD: list[jax.Array],
    prefetched,
    group: Group,
    residuals: Residuals | Slot,
    kept: list[Kept],
) -> Forward:
    """All blocks of a segment, for each microbatch of a group with its x. kept: before layer 0."""
    segment = layers.segment

    def block_of(each: Microbatch, layer: Layer, carry: ForwardCarry, prefetched):
        """(carry, prefetched) after the layer's block."""
        inputs = each.recipe_inputs(layer.number)
        (x_BSD, auxiliary), values = block_forward(engine, segment, layer, carry.x_BSD, inputs, each.starts_BS)
        if engine.table.weights.sharded and not engine.recompute_block:
            # Residuals are written after the next weights are gathered, or the scheduler puts the gather behind them.
            values, gathered = jax.lax.optimization_barrier((values, prefetched[0]))
            prefetched = gathered, *prefetched[1:]
        kept = residuals.keep(carry.kept, values, layer.index)
        return ForwardCarry(x_BSD, add(carry.auxiliary, auxiliary), kept), prefetched

    def one(layer: Layer, prefetched, carries: list[ForwardCarry]):
        done: list[ForwardCarry] = []
        for each, carry in zip(group.microbatches, carries, strict=True):
            if done:
                x_BSD, before = in_turn(carry.x_BSD, done[-1].x_BSD)
                carry = carry._replace(x_BSD=x_BSD)
                done[-1] = done[-1]._replace(x_BSD=before)
            carry, prefetched = block_of(each, layer, carry, prefetched)
            done.append(carry)
        return done, prefetched

    auxiliary = varying(jnp.float32(0)) if segment.has_auxiliary_loss else None
    carries = [ForwardCarry(x_BSD, auxiliary, of) for x_BSD, of in zip(xs_BSD, kept, strict=True)]
    done, prefetched = layers.loop(one, carries, prefetched, tokens=tokens_of(xs_BSD), counter=group.number)
    return Forward(done, prefetched)


@jax.named_scope("backward")
def backward(
    engine: Engine,
    layers: Layers,
    carry: BackwardCarry,
    prefetched,
    group: Group,
    residuals: Residuals | Slot,
    kept: list[Kept],
):
    """(BackwardCarry, prefetched) after all blocks of a segment in reverse, for each microbatch of a group.

    kept: after the forward pass. `read_accumulator` and `push` say what the first and last group do.
    """
    segment = layers.segment

    def one(layer: Layer, prefetched, carry: BackwardCarry):
        l = layer.index
        taken = [
            residuals.take(of_microbatch._replace(deferred=deferred), l, layer.variant)
            for of_microbatch, deferred in zip(kept, carry.deferred, strict=True)
        ]
        grads, sums = read_accumulator(segment, carry.grads, l, first=group.first)
        deferred = [of_microbatch.deferred for _, of_microbatch in taken]
        dxs_BSD = list(carry.dxs_BSD)
        d_auxiliary = carry.d_auxiliary if segment.has_auxiliary_loss else None
        observed = carry.observed
        for i, (each, (saved, _)) in enumerate(zip(group.microbatches, taken, strict=True)):
            if i:
                saved, dxs_BSD[i - 1] = in_turn(saved, dxs_BSD[i - 1])
                dxs_BSD[i], sums = in_turn(dxs_BSD[i], sums)
            d_result = dxs_BSD[i], d_auxiliary
            inputs = each.recipe_inputs(layer.number)
            dw, dxs_BSD[i], seen = block_backward(engine, segment, layer, saved, d_result, inputs, each.starts_BS)
            if not i and engine.recompute_block and engine.table.weights.sharded:
                # The next layer's weights and residuals arrive before the first gradient is reduced, or the scheduler
                # puts them behind the last one. Nothing that computes waits for them. With weights from the host,
                # residuals may be later, for less memory.
                arriving = [] if engine.table.weights.home.streamed else deferred
                dw, (gathered, arriving) = reduce_behind(dw, (prefetched[0], arriving))
                deferred = arriving or deferred
                prefetched = gathered, *prefetched[1:]
            sums = accumulate(engine, segment, sums, dw)
            observed = and_observed(observed, seen, layer)
        grads, squares = push(engine, segment, grads, sums, layer, last=group.last)
        squares = add(carry.squares, squares)
        return BackwardCarry(dxs_BSD, carry.d_auxiliary, grads, squares, deferred, observed), prefetched

    carry = carry._replace(deferred=[of_microbatch.deferred for of_microbatch in kept])
    done, prefetched = layers.loop(
        one, carry, prefetched, tokens=tokens_of(carry.dxs_BSD), reverse=True, counter=group.number
    )
    return done._replace(deferred=[]), prefetched


def and_observed(observed, seen, layer: Layer):
    """Largest magnitudes so far, and of a layer's products in this microbatch."""
    return jax.tree.map(lambda old, new: old.at[layer.number].max(new), observed, seen)


def tokens_of(xs_BSD: list[jax.Array]) -> int:
    """The number of tokens of these activations."""
    return sum(x_BSD.shape[0] * x_BSD.shape[1] for x_BSD in xs_BSD)


def in_turn(x, before):
    """(x, what was computed before it), both known only when both are, so that one is computed after the other."""
    return jax.lax.optimization_barrier((x, before))
