"""The passes over a segment's layers, forward and backward, each layer for all microbatches of a group; see engine.py.

Shape suffixes: B local batch, S sequence (or its part, see outer.py), D hidden size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.parallel.collectives import Squares, varying
from surojax.step import passes
from surojax.step.gradients import accumulate, add, push, reduce_behind
from surojax.step.residuals import Residuals, block_backward, block_forward
from surojax.step.spec import Engine
from surojax.step.stream import Layer, Stream
from surojax.step.weights import Layers


class Microbatch(NamedTuple):
    """The inputs of a pass over layers, of one microbatch.

    inputs_BS, and targets: the objective's arrays by name, of this device's tokens. starts_BS: of the documents of
    whole sequences, None if the engine is not packed. recipe_inputs: a function of the number of a layer.
    """

    inputs_BS: jax.Array
    targets: dict[str, jax.Array]
    starts_BS: jax.Array | None
    recipe_inputs: Callable


class Group(NamedTuple):
    """Microbatches for which a layer is fetched once. first, last: of the step's groups."""

    number: jax.Array | int
    microbatches: list[Microbatch]
    first: bool
    last: bool


class Forward(NamedTuple):
    """The carry of a forward pass: for each microbatch of a group x, and the sum of auxiliary losses or None."""

    xs_BSD: list[jax.Array]
    auxiliary: list[jax.Array | None]


class Backward(NamedTuple):
    """The carry of a backward pass.

    dxs_BSD: for each microbatch of a group. squares: of the accumulators. observed: largest magnitudes so far.
    """

    dxs_BSD: list[jax.Array]
    squares: Squares
    observed: Any


@jax.named_scope("forward")
def forward(
    engine: Engine,
    layers: Layers,
    xs_BSD: list[jax.Array],
    group: Group,
    residuals: Residuals,
    flights: dict[str, Any],
    index: Callable = lambda l: l,
) -> tuple[Forward, dict[str, Any]]:
    """(results, flights) of all blocks of a segment, for each microbatch of a group with its x.

    flights: of the lanes "weights" and "residuals". index: of a layer in the stacks of residuals.
    """
    segment = layers.segment
    lanes = {"residuals": Stream(passes.forward(engine).lane("residuals"), index)}

    def body(layer: Layer, values, carry: Forward, flights):
        xs_BSD, auxiliary = list(carry.xs_BSD), list(carry.auxiliary)
        kept = []
        for i, each in enumerate(group.microbatches):
            if i:
                xs_BSD[i], xs_BSD[i - 1] = in_turn(xs_BSD[i], xs_BSD[i - 1])
            inputs = each.recipe_inputs(layer.number)
            result, saved = block_forward(engine, segment, layer, values["weights"], xs_BSD[i], inputs, each.starts_BS)
            if engine.table.weights.sharded and not engine.recompute_block:
                # Residuals are written after the next weights are gathered, or the scheduler puts the gather behind.
                saved, flights = behind_weights(saved, flights)
            kept.append(residuals.arrays(saved))
            xs_BSD[i] = result[0]
            auxiliary[i] = add(auxiliary[i], result[1])
        return Forward(xs_BSD, auxiliary), {"residuals": kept}, flights

    none = varying(jnp.float32(0)) if segment.has_auxiliary_loss else None
    carry = Forward(xs_BSD, [none for _ in xs_BSD])
    return layers.over(body, carry, lanes, flights, tokens=tokens_of(xs_BSD), counter=group.number)


@jax.named_scope("backward")
def backward(
    engine: Engine,
    layers: Layers,
    carry: Backward,
    d_auxiliary: jax.Array | None,
    group: Group,
    residuals: Residuals,
    flights: dict[str, Any],
    index: Callable = lambda l: l,
) -> tuple[Backward, dict[str, Any]]:
    """(carry, flights) after all blocks of a segment in reverse, for each microbatch of a group.

    d_auxiliary: gradient of every auxiliary loss, None if there is none. flights: of the lanes "weights", "residuals"
    and "grads". The first group reads no accumulators that rest in host memory. index: see `forward`.
    """
    segment = layers.segment
    declared = passes.backward(engine)
    sums_lane = declared.lane("grads")
    from_zeros = group.first and sums_lane.behind > 0
    lanes = {
        "residuals": Stream(declared.lane("residuals"), index),
        "grads": Stream(sums_lane._replace(reads=not from_zeros)),
    }
    d_auxiliary = d_auxiliary if segment.has_auxiliary_loss else None

    def body(layer: Layer, values, carry: Backward, flights):
        dxs_BSD = list(carry.dxs_BSD)
        observed = carry.observed
        sums = jax.tree.map(jnp.zeros_like, flights["grads"].late) if from_zeros else values["grads"]
        for i, (each, arrays) in enumerate(zip(group.microbatches, values["residuals"], strict=True)):
            saved = residuals.of(arrays, layer.variant)
            if i:
                saved, dxs_BSD[i - 1] = in_turn(saved, dxs_BSD[i - 1])
                dxs_BSD[i], sums = in_turn(dxs_BSD[i], sums)
            d_result = dxs_BSD[i], d_auxiliary
            inputs = each.recipe_inputs(layer.number)
            dw, dxs_BSD[i], seen = block_backward(
                engine, segment, layer, values["weights"], saved, d_result, inputs, each.starts_BS
            )
            if not i and engine.recompute_block and engine.table.weights.sharded:
                # The next layer's weights and residuals arrive before the first gradient is reduced, or the scheduler
                # puts them behind the last one. Nothing that computes waits for them. With weights from the host,
                # residuals may be later, for less memory.
                flight = flights["residuals"]
                next_weights, *further = flights["weights"].early
                next_residuals = None if engine.table.weights.home.streamed else flight.early
                dw, (next_weights, arrived) = reduce_behind(dw, (next_weights, next_residuals))
                flight = flight._replace(early=arrived) if arrived is not None else flight
                flights = with_weights(flights, (next_weights, *further)) | {"residuals": flight}
            sums = accumulate(engine, segment, sums, dw)
            observed = and_observed(observed, seen, layer)
        sums, squares = push(engine, segment, sums, last=group.last)
        return Backward(dxs_BSD, add(carry.squares, squares), observed), {"grads": sums}, flights

    return layers.over(body, carry, lanes, flights, tokens=tokens_of(carry.dxs_BSD), reverse=True, counter=group.number)


def behind_weights(x, flights: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(x, flights), of which x is known only when the next layer's weights are."""
    next_weights, *further = flights["weights"].early
    x, next_weights = jax.lax.optimization_barrier((x, next_weights))
    return x, with_weights(flights, (next_weights, *further))


def with_weights(flights: dict[str, Any], early: tuple) -> dict[str, Any]:
    """The flights with these weights on their way."""
    return flights | {"weights": flights["weights"]._replace(early=early)}


def and_observed(observed, seen, layer: Layer):
    """Largest magnitudes so far, and of a layer's products in this microbatch."""
    return jax.tree.map(lambda old, new: old.at[layer.number].max(new), observed, seen)


def tokens_of(xs_BSD: list[jax.Array]) -> int:
    """The number of tokens of these activations."""
    return sum(x_BSD.shape[0] * x_BSD.shape[1] for x_BSD in xs_BSD)


def in_turn(x, before):
    """(x, what was computed before it), both known only when both are, so that one is computed after the other."""
    return jax.lax.optimization_barrier((x, before))
