"""Runs layers forward and backward, each layer for all microbatches of a group; see engine.py.

Shape suffixes: B local batch, S sequence (or its part, see outer.py), D hidden size.
"""

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from surojax.memory.host import read
from surojax.models.model import Segment, Variant
from surojax.step import passes
from surojax.step.batch import Group, Microbatch
from surojax.step.gradients import Sums, reduce_behind
from surojax.step.in_place import run_in_place, saves_in_place
from surojax.step.outer import OuterLayers
from surojax.step.residuals import Residuals
from surojax.step.spec import Engine
from surojax.step.stream import Flight, Layer, Stream
from surojax.step.totals import LayerTotals, Totals
from surojax.step.verbs import LayerVerbs
from surojax.step.weights import Layers


class SegmentBlocks:
    """Computes one layer of a segment in a pass, for all microbatches of a group.

    residuals, sums: its layers' saved activations and gradients. verbs: what one layer computes.
    """

    def __init__(self, engine: Engine, layers: Layers, segment: Segment, residuals: Residuals):
        self.segment = segment
        self.residuals = residuals
        self.verbs = LayerVerbs.of(engine, segment)
        self.sums = Sums(engine, segment)
        self.weights = jax.eval_shape(lambda: layers.fetch_first(segment.name, segment.variants[0]))
        self.forward_lanes = passes.forward_pass(engine.table)
        self.backward_lanes = passes.backward_pass(engine.table)
        weights = engine.table.weights
        self.gathers = weights.sharded
        self.recomputes = engine.recompute_block
        self.copies_in = weights.home.streamed
        self.in_place = saves_in_place(engine)

    def new_sums(self, used=None) -> Flight:
        """Makes zeroed accumulators of gradients, see `Sums.new`."""
        return self.sums.new(self.weights, used)

    def forward(self, group: Group, index: Callable) -> Callable:
        """The body of `stream.over` in a forward pass of a group; its carry is (xs_BSD, totals), see `Blocks`.

        index: a function from a layer's index in its segment to that in the stacks of residuals.
        """

        def body(layer: Layer, values, carry: tuple[list[jax.Array], Totals], flights):
            xs_BSD, totals = list(carry[0]), carry[1]
            where = layer.number, layer.variant
            residuals: list[list[jax.Array]] = []
            of_layer = LayerTotals()
            for i, each in enumerate(group.microbatches):
                if i:
                    xs_BSD[i], xs_BSD[i - 1] = in_turn(xs_BSD[i], xs_BSD[i - 1])
                arguments = values["weights"], xs_BSD[i], *where, each
                if self.in_place:
                    xs_BSD[i], more, flights = self.forward_in_place(i, arguments, flights, index(layer.index))
                else:
                    xs_BSD[i], saved, more = self.verbs.forward(*arguments)
                    if self.gathers and not self.recomputes:
                        # Residuals are written after the next weights are gathered, or the scheduler puts the gather
                        # behind.
                        saved, flights = behind_weights(saved, flights)
                    residuals.append(self.residuals.arrays(saved))
                of_layer = of_layer.plus(more)
            size = len(group.microbatches)
            for i, each in enumerate(group.microbatches[: len(xs_BSD) - size], size):
                xs_BSD[i], xs_BSD[i - 1] = in_turn(xs_BSD[i], xs_BSD[i - 1])
                xs_BSD[i] = self.verbs.infer_reference(values["weights"], xs_BSD[i], *where, each)
            totals = totals.plus(of_layer, self.segment.name, layer.index, layer.number)
            return (xs_BSD, totals), {} if self.in_place else {"residuals": residuals}, flights

        return body

    def forward_in_place(
        self, i: int, arguments: tuple, flights: dict[str, Any], index: Any
    ) -> tuple[jax.Array, LayerTotals, dict[str, Any]]:
        """Computes a layer for microbatch i of the group and writes its residuals into the stacks.

        Returns (the layer's output, what it adds to totals, the flights). arguments: those of `LayerVerbs.forward`.
        index: the layer's index in the stacks.
        """
        w, x_BSD, *others = arguments

        def run(w, x_BSD):
            x_BSD, saved, more = self.verbs.forward(w, x_BSD, *others)
            return (x_BSD, more), self.residuals.arrays(saved)

        flight = flights["residuals"]
        stacks = list(flight.stack)
        (x_BSD, more), stacks[i] = run_in_place(run, (w, x_BSD), stacks[i], index)
        return x_BSD, more, flights | {"residuals": flight._replace(stack=stacks)}

    def reads_sums(self, group: Group) -> bool:
        """False if the group's pass begins with zeros in place of accumulators in host memory."""
        return not group.first or self.backward_lanes.lane("grads").behind == 0

    def backward(self, group: Group, d_statistics: Any) -> Callable:
        """The body of `stream.over` in a backward pass of a group; its carry is (dxs_BSD, totals), see `Blocks`."""
        reads_sums = self.reads_sums(group)

        def body(layer: Layer, values, carry: tuple[list[jax.Array], Totals], flights):
            dxs_BSD, totals = list(carry[0]), carry[1]
            sums = values["grads"] if reads_sums else jax.tree.map(jnp.zeros_like, flights["grads"].late)
            d_counted = None if d_statistics is None else read(d_statistics, layer.index)
            of_layer = LayerTotals()
            for i, (each, arrays) in enumerate(zip(group.microbatches, values["residuals"], strict=True)):
                saved = self.residuals.of(arrays, layer.variant)
                if i:
                    saved, dxs_BSD[i - 1] = in_turn(saved, dxs_BSD[i - 1])
                    dxs_BSD[i], sums = in_turn(dxs_BSD[i], sums)
                where = layer.number, layer.variant, each
                dw, dxs_BSD[i], more = self.verbs.backward(values["weights"], saved, dxs_BSD[i], d_counted, *where)
                if not i and self.recomputes and self.gathers:
                    dw, flights = self.behind_arrivals(dw, flights)
                sums = self.sums.accumulated(sums, dw)
                of_layer = of_layer.plus(more)
            sums, squares = self.sums.push(sums, last=group.last)
            of_layer = of_layer._replace(squares=squares)
            totals = totals.plus(of_layer, self.segment.name, layer.index, layer.number)
            return (dxs_BSD, totals), {"grads": sums}, flights

        return body

    def behind_arrivals(self, dw, flights: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns (dw, flights) behind a barrier: the next layer's weights arrive before any gradient is reduced.

        Else the scheduler puts them behind the last one. Nothing that computes waits for them. With weights from the
        host, residuals may be later, for less memory.
        """
        flight = flights["residuals"]
        next_weights, *further = flights["weights"].early
        next_residuals = None if self.copies_in else flight.early
        dw, (next_weights, arrived) = reduce_behind(dw, (next_weights, next_residuals))
        flight = flight._replace(early=arrived) if arrived is not None else flight
        return dw, with_weights(flights, (next_weights, *further)) | {"residuals": flight}


class Blocks:
    """Runs the layers of a stretch of segments forward and backward, see `Model.stretches`.

    layers: the loops over them, with the lane of weights. of: what one layer does, by segment.
    """

    def __init__(self, engine: Engine, layers: Layers, residuals: dict[str, Residuals]):
        """residuals: by segment."""
        self.layers = layers
        self.of = {
            name: SegmentBlocks(engine, layers, segment, residuals[name]) for name, segment in layers.segments.items()
        }

    def with_layers(self, layers: Any) -> "Blocks":
        """Copies the blocks with other weights. layers: `Layers`, or `overlap.UpdatingLayers`."""
        new = copy.copy(self)
        new.layers = layers
        return new

    @jax.named_scope("forward")
    def forward(
        self,
        xs_BSD: list[jax.Array],
        totals: Totals,
        group: Group,
        flights: dict[str, dict[str, Any]],
        index: Callable[[str], Callable] = lambda name: lambda l: l,
    ) -> tuple[list[jax.Array], Totals, dict[str, dict[str, Any]]]:
        """Runs all blocks for each microbatch of a group; returns (outputs, totals, flights).

        xs_BSD: with a reference, those of its pass over the same microbatches follow, of which nothing is saved.
        totals: those that `totals.FORWARD` names. flights: by segment, of the lanes "weights" and "residuals". index:
        of a layer in the stacks of residuals of a segment, as a function of its name.
        """
        bodies = {name: blocks.forward(group, index(name)) for name, blocks in self.of.items()}
        lanes = {
            name: {"residuals": Stream(blocks.forward_lanes.lane("residuals"), index(name))}
            for name, blocks in self.of.items()
        }
        options = {"tokens": tokens_of(xs_BSD), "counter": group.number}
        (xs_BSD, totals), flights = self.layers.over(bodies, (xs_BSD, totals), lanes, flights, **options)
        return xs_BSD, totals, flights

    @jax.named_scope("backward")
    def backward(
        self,
        dxs_BSD: list[jax.Array],
        totals: Totals,
        group: Group,
        flights: dict[str, dict[str, Any]],
        d_statistics: dict[str, Any],
        index: Callable[[str], Callable] = lambda name: lambda l: l,
    ) -> tuple[list[jax.Array], Totals, dict[str, dict[str, Any]]]:
        """Runs all blocks in reverse for each microbatch of a group; returns (gradients of inputs, totals, flights).

        totals: those that `totals.BACKWARD` names. flights: by segment, of the lanes "weights", "residuals" and
        "grads". d_statistics: by segment, gradients of the totals' statistics `[L, ...]`; {} without an auxiliary loss.
        The first group reads no accumulators that are in host memory. index: see `forward`.
        """
        bodies = {name: blocks.backward(group, d_statistics.get(name)) for name, blocks in self.of.items()}
        lanes = {
            name: {
                "residuals": Stream(blocks.backward_lanes.lane("residuals"), index(name)),
                "grads": Stream(blocks.backward_lanes.lane("grads")._replace(reads=blocks.reads_sums(group))),
            }
            for name, blocks in self.of.items()
        }
        options = {"tokens": tokens_of(dxs_BSD), "reverse": True, "counter": group.number}
        (dxs_BSD, totals), flights = self.layers.over(bodies, (dxs_BSD, totals), lanes, flights, **options)
        return dxs_BSD, totals, flights


def infer(layers: Layers, verbs: dict[str, LayerVerbs], xs_BSD: list[jax.Array], each: Microbatch) -> list[jax.Array]:
    """Runs all blocks of a stretch of segments for one microbatch, forward only, and returns their outputs.

    verbs: by segment. xs_BSD: x, and that of the reference if there is one.
    """

    def of_segment(verbs: LayerVerbs) -> Callable:
        def body(layer: Layer, values, xs_BSD: list[jax.Array], flights):
            w, where = values["weights"], (layer.number, layer.variant, each)
            x_BSD = verbs.infer(w, xs_BSD[0], *where)
            return [x_BSD, *(verbs.infer_reference(w, other, *where) for other in xs_BSD[1:])], {}, flights

        return body

    bodies = {name: of_segment(of) for name, of in verbs.items()}
    flights = {name: {"weights": early} for name, early in layers.first().items()}
    return layers.over(bodies, xs_BSD, {}, flights)[0]


def residuals_of(
    engine: Engine,
    layers: Layers,
    segment: Segment,
    outer: OuterLayers,
    each: Microbatch,
    variants: tuple[Variant, ...] = (),
) -> Residuals:
    """Plans the residuals (saved activations) of a segment's layers in one microbatch.

    variants: the variants that layers may have; (): the segment's own.
    """
    verbs = LayerVerbs.of(engine, segment)

    def save(variant: Variant):
        x_BSD = outer.embed(each.inputs_BS)
        w = layers.fetch_first(segment.name, variant)
        return verbs.forward(w, x_BSD, segment.numbers[0], variant, each)[1]

    return Residuals(segment.num_layers, engine.table.residuals.home, save, variants or segment.variants)


def behind_weights(x, flights: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns (x, flights) behind a barrier: nothing reads x before the next layer's weights have arrived."""
    next_weights, *further = flights["weights"].early
    x, next_weights = jax.lax.optimization_barrier((x, next_weights))
    return x, with_weights(flights, (next_weights, *further))


def with_weights(flights: dict[str, Any], early: tuple) -> dict[str, Any]:
    """Replaces the prefetched weights in the flights."""
    return flights | {"weights": flights["weights"]._replace(early=early)}


def tokens_of(xs_BSD: list[jax.Array]) -> int:
    """Counts the tokens of several microbatches' activations."""
    return sum(x_BSD.shape[0] * x_BSD.shape[1] for x_BSD in xs_BSD)


def in_turn(x, before):
    """Returns both behind one barrier, so that readers of x are computed after `before`."""
    return jax.lax.optimization_barrier((x, before))
