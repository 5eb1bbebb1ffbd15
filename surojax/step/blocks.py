"""The passes over a segment's layers, forward and backward, each layer for all microbatches of a group; see engine.py.

Shape suffixes: B local batch, S sequence (or its part, see outer.py), D hidden size.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.models.lora import without_adapters
from surojax.models.model import Routed, Segment, Variant
from surojax.parallel.collectives import Squares, varying
from surojax.placement.mesh import AXES
from surojax.step import passes
from surojax.step.batch import Group, Microbatch
from surojax.step.gradients import Sums, add, reduce_behind
from surojax.step.outer import OuterLayers
from surojax.step.residuals import Residuals, recomputing_segment
from surojax.step.spec import Engine
from surojax.step.stream import Flight, Layer, Stream
from surojax.step.weights import Layers


class Backward(NamedTuple):
    """The carry of a backward pass.

    dxs_BSD: for each microbatch of a group. squares: of the accumulators. observed: largest magnitudes so far.
    """

    dxs_BSD: list[jax.Array]
    squares: Squares
    observed: Any


class Blocks:
    """Runs a segment's blocks forward and backward, with a lane for each class of tensors that they read and write.

    layers: the loops over them, with the lane of weights. residuals, sums: of what they save, and of their gradients.
    """

    def __init__(self, engine: Engine, layers: Layers, residuals: Residuals):
        self.layers = layers
        self.residuals = residuals
        segment = layers.segment
        self.reference = reference_block(engine, segment)
        self.segment = recomputing_segment(segment) if engine.recompute_block else segment
        self.sums = Sums(engine, segment)
        self.forward_lanes = passes.forward_pass(engine.table)
        self.backward_lanes = passes.backward_pass(engine.table)
        weights = engine.table.weights
        self.gathers = weights.sharded
        self.recomputes = engine.recompute_block
        self.copies_in = weights.home.streamed

    def with_layers(self, layers: Any) -> "Blocks":
        """A copy of the blocks with other weights. layers: `Layers`, or `overlap.UpdatingLayers`."""
        new = copy.copy(self)
        new.layers = layers
        return new

    def new_sums(self, used=None) -> Flight:
        """Zeroed accumulators of gradients before the first group, see `Sums.new`."""
        weights = jax.eval_shape(lambda: self.layers.fetch_first(self.segment.variants[0]))
        return self.sums.new(weights, used)

    @jax.named_scope("forward")
    def forward(
        self, xs_BSD: list[jax.Array], group: Group, flights: dict[str, Any], index: Callable = lambda l: l
    ) -> tuple[list[jax.Array], dict[str, Any]]:
        """(results, flights) of all blocks, for each microbatch of a group with its x.

        xs_BSD: with a reference, those of its pass over the same microbatches follow, of which nothing is saved.
        flights: of the lanes "weights" and "residuals", and "statistics" of a segment that has them: zeros, to which
        the layers' sums over the group are written. index: of a layer in the stacks of residuals.
        """
        segment = self.segment
        lanes = {"residuals": Stream(self.forward_lanes.lane("residuals"), index)}
        if segment.statistics is not None:
            lanes["statistics"] = Stream(passes.STATISTICS)

        def body(layer: Layer, values, carry: list[jax.Array], flights):
            xs_BSD = list(carry)
            kept = []
            statistics = None
            for i, each in enumerate(group.microbatches):
                if i:
                    xs_BSD[i], xs_BSD[i - 1] = in_turn(xs_BSD[i], xs_BSD[i - 1])
                inputs = each.recipe_inputs(layer.number)
                (x_BSD, routed), saved = segment.block_forward(
                    values["weights"], xs_BSD[i], inputs, layer.variant, *each.of_tokens(segment)
                )
                if self.gathers and not self.recomputes:
                    # Residuals are written after the next weights are gathered, or the scheduler puts the gather
                    # behind.
                    saved, flights = behind_weights(saved, flights)
                kept.append(self.residuals.arrays(saved))
                xs_BSD[i] = x_BSD
                statistics = plus_statistics(statistics, routed)
            for i, each in enumerate(group.microbatches[: len(xs_BSD) - len(group.microbatches)], len(kept)):
                xs_BSD[i], xs_BSD[i - 1] = in_turn(xs_BSD[i], xs_BSD[i - 1])
                xs_BSD[i] = self.reference(values["weights"], xs_BSD[i], layer, each)
            results = {"residuals": kept} | ({"statistics": statistics} if "statistics" in lanes else {})
            return xs_BSD, results, flights

        return self.layers.over(body, xs_BSD, lanes, flights, tokens=tokens_of(xs_BSD), counter=group.number)

    @jax.named_scope("backward")
    def backward(
        self,
        carry: Backward,
        group: Group,
        flights: dict[str, Any],
        index: Callable = lambda l: l,
    ) -> tuple[Backward, dict[str, Any]]:
        """(carry, flights) after all blocks in reverse, for each microbatch of a group.

        flights: of the lanes "weights", "residuals" and "grads", and "statistics" if these have gradients: of each
        layer's. The first group reads no accumulators that rest in host memory. index: see `forward`.
        """
        segment = self.segment
        sums_lane = self.backward_lanes.lane("grads")
        from_zeros = group.first and sums_lane.behind > 0
        lanes = {
            "residuals": Stream(self.backward_lanes.lane("residuals"), index),
            "grads": Stream(sums_lane._replace(reads=not from_zeros)),
        }
        if "statistics" in flights:
            lanes["statistics"] = Stream(passes.STATISTICS_GRADIENTS)

        def body(layer: Layer, values, carry: Backward, flights):
            dxs_BSD = list(carry.dxs_BSD)
            observed = carry.observed
            sums = jax.tree.map(jnp.zeros_like, flights["grads"].late) if from_zeros else values["grads"]
            for i, (each, arrays) in enumerate(zip(group.microbatches, values["residuals"], strict=True)):
                saved = self.residuals.of(arrays, layer.variant)
                if i:
                    saved, dxs_BSD[i - 1] = in_turn(saved, dxs_BSD[i - 1])
                    dxs_BSD[i], sums = in_turn(dxs_BSD[i], sums)
                d_result = dxs_BSD[i], values.get("statistics")
                inputs = each.recipe_inputs(layer.number)
                dw, dxs_BSD[i], seen = segment.block_backward(
                    values["weights"], saved, d_result, inputs, layer.variant, *each.of_tokens(segment)
                )
                if not i and self.recomputes and self.gathers:
                    dw, flights = self.behind_arrivals(dw, flights)
                sums = self.sums.accumulated(sums, dw)
                observed = and_observed(observed, seen, layer)
            sums, squares = self.sums.push(sums, last=group.last)
            return Backward(dxs_BSD, add(carry.squares, squares), observed), {"grads": sums}, flights

        tokens = tokens_of(carry.dxs_BSD)
        return self.layers.over(body, carry, lanes, flights, tokens=tokens, reverse=True, counter=group.number)

    def behind_arrivals(self, dw, flights: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """(a layer's gradients, flights): the next layer's weights and residuals arrive before any is reduced.

        Else the scheduler puts them behind the last one. Nothing that computes waits for them. With weights from the
        host, residuals may be later, for less memory.
        """
        flight = flights["residuals"]
        next_weights, *further = flights["weights"].early
        next_residuals = None if self.copies_in else flight.early
        dw, (next_weights, arrived) = reduce_behind(dw, (next_weights, next_residuals))
        flight = flight._replace(early=arrived) if arrived is not None else flight
        return dw, with_weights(flights, (next_weights, *further)) | {"residuals": flight}


def reference_block(engine: Engine, segment: Segment) -> Callable:
    """A function (weights, x, Layer, Microbatch) -> x of a layer without its adapters."""
    assert engine.reference is None or len(engine.reference.segments) == len(engine.model.segments)

    def block(w, x_BSD: jax.Array, layer: Layer, each: Microbatch) -> jax.Array:
        assert engine.reference is not None
        (without,) = (other for other in engine.reference.segments if other.name == segment.name)
        inputs = each.recipe_inputs(layer.number)
        return without.block(without_adapters(w), x_BSD, inputs, layer.variant, *each.of_tokens(without))[0]

    return block


def residuals_of(
    engine: Engine, layers: Layers, outer: OuterLayers, each: Microbatch, variants: tuple[Variant, ...] = ()
) -> Residuals:
    """Plans the residuals (saved activations) of a segment's layers in one microbatch.

    variants: the variants that layers may have; (): the segment's own.
    """
    segment = recomputing_segment(layers.segment) if engine.recompute_block else layers.segment

    def save(variant: Variant):
        inputs = each.recipe_inputs(segment.start)
        x_BSD = outer.embed(each.inputs_BS)
        w = layers.fetch_first(variant)
        return segment.block_forward(w, x_BSD, inputs, variant, *each.of_tokens(segment))[1]

    return Residuals(segment.num_layers, engine.table.residuals.home, save, variants or segment.variants)


def plus_statistics(sums, routed: Routed | None):
    """Adds a microbatch's statistics of a layer to their sums, which are None before the first microbatch."""
    if routed is None:
        return None
    new = varying(routed.statistics, AXES)
    return new if sums is None else jax.tree.map(jnp.add, sums, new)


def behind_weights(x, flights: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns (x, flights) behind a barrier: nothing reads x before the next layer's weights have arrived."""
    next_weights, *further = flights["weights"].early
    x, next_weights = jax.lax.optimization_barrier((x, next_weights))
    return x, with_weights(flights, (next_weights, *further))


def with_weights(flights: dict[str, Any], early: tuple) -> dict[str, Any]:
    """Replaces the prefetched weights in the flights."""
    return flights | {"weights": flights["weights"]._replace(early=early)}


def and_observed(observed, seen, layer: Layer):
    """Updates the largest magnitudes observed so far with a layer's products in this microbatch."""
    return jax.tree.map(lambda old, new: old.at[layer.number].max(new), observed, seen)


def tokens_of(xs_BSD: list[jax.Array]) -> int:
    """Counts the tokens of several microbatches' activations."""
    return sum(x_BSD.shape[0] * x_BSD.shape[1] for x_BSD in xs_BSD)


def in_turn(x, before):
    """Returns both behind one barrier, so that what reads x is computed after `before`."""
    return jax.lax.optimization_barrier((x, before))
