"""Fetch: a layer's weights, from where they are stored to what products read, ahead of the layer that needs them.

Two stages, each a layer ahead of the next (`passes.fetched`): copy the layer's shards to device memory, and all-gather
them. Weights that were sent in 8 bits are then dequantised. Those that rest in a base format are dequantised when their
layer begins, so that those on their way take 4 or 8 bits.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import LayerStack, index_in_loop, on_device, parts, read
from surojax.models.model import Segment, Variant
from surojax.models.order import LayerLoop, LayerRef, loops_of
from surojax.numerics import base_formats
from surojax.numerics.quantized import dequantise_all, largest_magnitude, quantise, quantise_whole
from surojax.parallel import collectives
from surojax.parallel.tensor import largest_of_group
from surojax.placement.param import Kind, Param
from surojax.placement.table import Placement
from surojax.step.spec import Engine
from surojax.step.stream import Flight, Layer, comes_in_pairs, hides_transfers, over


class Gather(NamedTuple):
    """Converts a segment's stored weights to the arrays that products read: copy in, quantise, all-gather.

    params: of a layer. layouts: of its weights.
    """

    table: Placement
    params: Any
    layouts: Any

    @classmethod
    def of(cls, engine: Engine, segment: Segment) -> "Gather":
        """Makes the gather for a segment of an engine's model."""
        return cls(engine.table, segment.params, engine.layouts.weights[segment.name])

    def fetch(self, stack, l: jax.Array | int, variant: Variant):
        """Copies in layer l of a stack and all-gathers its weights to what products read."""
        return self.of_layer(read(stack, l), variant)

    def of_layer(self, w, variant: Variant):
        """All-gathers a layer's weights to what products read, from this device's stored shards."""
        return self.to_compute_with(self.all_gather(self.to_gather(w, variant)), variant)

    def copy_in(self, stack, l: jax.Array | int, variant: Variant):
        """This device's shards of layer l of a stack, in device memory, in the format of the all-gather."""
        return self.to_gather(read(stack, l), variant)

    def to_gather(self, w, variant: Variant):
        """This device's shards of a layer's weights, quantised if the all-gather is in 8 bits.

        Layers in which the recipe is disabled keep their weights in 16 bits if the recipe is in float8. Codes of a base
        are sent as they are.
        """
        table = self.table
        if table.persistent_quants or not (table.quantises_shards and self.in_8_bits(variant)):
            return w
        return quantised_matrices(self.params, w, table)

    def in_8_bits(self, variant: Variant) -> bool:
        """True if the matrices of a layer of this variant are quantised before products read them."""
        table = self.table
        return bool(table.quants.dtype) and (variant.recipe_enabled or not table.one_scale)

    def all_gather(self, shards):
        """All-gathers the shards of `to_gather`. Dequantises 8-bit blocks; float8 with one scale stays float8."""
        w = collectives.all_gather(shards, self.layouts)
        return w if self.table.one_scale else dequantise_all(w, self.table.weights.dtype)

    def to_compute_with(self, w, variant: Variant):
        """Converts a layer's gathered weights to what its products read: the work dtype, or float8 with one scale."""
        table = self.table
        numbers = base_formats.dequantise_all(w, table.weights.dtype)
        if table.quantises_shards or not self.in_8_bits(variant):
            return numbers
        return quantise_with_one_scale(self.params, numbers, table.quants.dtype, largest_of_group)


def quantised_matrices(params, w, table: Placement):
    """Quantises every matrix of a layer's weights; vectors are unchanged.

    With one scale per matrix (recipes fp8_*), all shards of a matrix have the same scale, from one collective with a
    number per matrix. Otherwise each block of a row has a scale.
    """
    if table.one_scale:
        return quantise_with_one_scale(params, w, table.quants.dtype)

    def quantise_matrix(param: Param, x):
        return quantise(x, table.quants.dtype) if param.kind is Kind.MATRIX else x

    return jax.tree.map(quantise_matrix, params, w)


def quantise_with_one_scale(params, w, dtype, largest_of: Callable = collectives.largest_of_shards):
    """Quantises every matrix of a layer's weights, or of this device's shards, with one scale per matrix.

    Experts' matrices are unchanged: the grouped product quantises them. largest_of: maxima over the devices that
    have parts of the matrices.
    """
    leaves, structure = jax.tree.flatten(w)
    leaf_params = structure.flatten_up_to(params)
    which = [i for i, param in enumerate(leaf_params) if param.kind is Kind.MATRIX and not param.of_experts]
    absmax = largest_of(jnp.stack([largest_magnitude(leaves[i]) for i in which]))
    for i, largest in zip(which, absmax, strict=True):
        leaves[i] = quantise_whole(leaves[i], dtype, largest)
    return jax.tree.unflatten(structure, leaves)


class Fetch:
    """Moves the weights of a segment's layers in one loop: the lane "weights" of a pass.

    What is prefetched is a tuple: the next layer's weights, then, if weights rest in shards in host memory, the shards
    of the layer after it. Beyond the last layer of a pass the last one is fetched again, with which the pass in the
    other direction begins.
    """

    def __init__(self, gather: Gather, part: LayerStack, loop: LayerLoop, segment: str, *, recomputed: bool):
        """part: the stack that holds these layers. recomputed: the backward pass computes blocks again."""
        self.gather = gather
        self.loop = loop
        self.layers = loop.layers[segment]
        self.variant = loop.variant(segment)
        self.part = part
        self.recomputed = recomputed
        self.on_device = on_device(part.stack)
        self.stages = gather.table.weights.sharded + (not self.on_device)
        own = (variant for kind, variant in loop.places(reverse=False) if kind == segment)
        assert len({variant.recipe_enabled for variant in own}) == 1

    def copy_in(self, l):
        """This device's shards of layer l. A stack in host memory is sliced at an offset that is linear in l."""
        if self.on_device:
            l = jnp.clip(l, self.layers.start, self.layers.stop - 1)
        return self.gather.copy_in(self.part.stack, l - self.part.start, self.variant)

    def first(self, *, reverse: bool = False, after: Any = ()) -> tuple:
        """Prefetches the first layers of a pass in this direction.

        after: results of the pass before it, if its program has one; see `collectives.behind`.
        """
        return tuple(self._stage(i, self._first(reverse), reverse, after) for i in range(self.stages))

    def begin_pass(self, prefetched: tuple, counter: jax.Array | int, *, reverse: bool) -> tuple:
        """The prefetched layers at the start of a pass, from what the pass in the other direction prefetched last.

        A slice beyond the end of a stack in host memory is the layer at that end. It is right if the loop ends there;
        the rest is fetched again. counter: of the loop around the passes.
        """
        if self.on_device:
            return prefetched
        layers = self.layers
        at_end = layers.stop == self.part.stop if reverse else layers.start == self.part.start
        right = int(at_end)
        first = index_in_loop(self._first(reverse), counter)
        return (*prefetched[:right], *(self._stage(i, first, reverse) for i in range(right, self.stages)))

    def first_shards(self, *, reverse: bool) -> tuple:
        """Shards in device memory of the first layers of a pass, if they rest in host memory: for `from_shards`."""
        first, step = self._first(reverse), -1 if reverse else 1
        return () if self.on_device else tuple(self.copy_in(self._near(first + i * step)) for i in range(self.stages))

    def from_shards(self, shards: tuple, *, reverse: bool) -> tuple:
        """Prefetches as `first` does, from the shards that `first_shards` has copied in."""
        return (self.gather.all_gather(shards[0]), *shards[1:]) if shards else self.first(reverse=reverse)

    def arrive(self, flight: Flight, layer: Layer) -> tuple[Any, Flight]:
        """Returns (the layer's weights to compute with, the flight while it computes). early: prefetched weights."""
        l = layer.in_turn if self.on_device else layer.index  # XLA does not find linear what is behind a barrier
        copied = self.copy_in(l + self.stages * layer.step)
        if self.stages == 0:
            return self.gather.to_compute_with(self.gather.all_gather(copied), layer.variant), flight
        w, *shards = flight.early
        arriving = (self.gather.all_gather(shards[0]), copied) if shards else (self.gather.all_gather(copied),)
        return self.gather.to_compute_with(w, layer.variant), Flight(early=arriving)

    def layers_in_body(self, tokens: int, *, reverse: bool) -> int:
        """The number of layers in a loop's body: a multiple of the variants' period. tokens: of the pass.

        With one layer, XLA copies what is prefetched into the carry; two exchange their places in device memory. But
        their transfers overlap less (docs/log, 2026-11-22). So weights copied in from host memory come in pairs
        backward only, and all-gathered ones if the pass is long enough for them all the same.
        """
        period = self.loop.period
        if self.stages != 1 or not comes_in_pairs(len(self.loop.kinds), period, odd=self.on_device):
            return period
        in_pairs = self.recomputed and hides_transfers(tokens) if self.on_device else reverse
        return 2 if in_pairs else period

    def _first(self, reverse: bool) -> int:
        return self.layers.stop - 1 if reverse else self.layers.start

    def _near(self, l: int) -> int:
        """Clamps l to the layers of the loop."""
        return min(max(l, self.layers.start), self.layers.stop - 1)

    def _stage(self, i: int, first: jax.Array | int, reverse: bool, after: Any = ()):
        """Prefetches before layer `first`: its weights (i = 0), or the next layer's shards (i = 1)."""
        if i:
            return self.copy_in(first + (-1 if reverse else 1))
        return self.gather.all_gather(collectives.behind(after, self.copy_in(first)))


class Layers:
    """Loops over the layers of a stretch of segments (`Model.stretches`) and prefetches their weights.

    loops: in the order of the model. fetches: by segment, of the loops that have layers of it.
    """

    def __init__(self, engine: Engine, segments: Sequence[Segment], stacks: dict[str, Any]):
        """stacks: the segments' work weights, by name."""
        self.segments = {segment.name: segment for segment in segments}
        self.gathers = {name: Gather.of(engine, segment) for name, segment in self.segments.items()}
        of_segments = {name: parts(stacks[name]) for name in self.segments}
        self.loops = loops_over(segments, of_segments)
        self.fetches = {name: self._fetches(name, of_segments[name], engine) for name in self.segments}

    def _fetches(self, segment: str, stacks: list[LayerStack], engine: Engine) -> dict[int, Fetch]:
        """Makes a `Fetch` for each loop with layers of a segment."""
        fetches = {}
        for i, loop in enumerate(self.loops):
            if segment in loop.layers:
                part = next(part for part in stacks if loop.layers[segment].start < part.stop)
                gather = self.gathers[segment]
                fetches[i] = Fetch(gather, part, loop, segment, recomputed=engine.recompute_block)
        return fetches

    def fetch_first(self, segment: str, variant: Variant):
        """Fetches a segment's first weights as for a layer of this variant; all its layers have the same shapes."""
        first = next(iter(self.fetches[segment].values()))
        return self.gathers[segment].fetch(first.part.stack, 0, variant)

    def first(self, *, reverse: bool = False, after: Any = ()) -> dict[str, dict[int, tuple]]:
        """Prefetches the first layers of a pass, by segment, for each loop. Arguments as those of `Fetch.first`."""
        return {
            name: {i: fetch.first(reverse=reverse, after=after) for i, fetch in fetches.items()}
            for name, fetches in self.fetches.items()
        }

    def begin_pass(
        self, segment: str, prefetched: dict[int, tuple], counter: jax.Array | int, *, reverse: bool
    ) -> dict[int, tuple]:
        """A segment's prefetched layers at the start of a pass, see `Fetch.begin_pass`."""
        fetches = self.fetches[segment]
        return {i: fetches[i].begin_pass(early, counter, reverse=reverse) for i, early in prefetched.items()}

    def over(
        self,
        bodies: dict[str, Callable],
        carry: Any,
        lanes: dict[str, dict[str, Any]],
        flights: dict[str, dict[str, Any]],
        *,
        tokens: int = 0,
        reverse: bool = False,
        counter: jax.Array | int = 0,
    ) -> tuple[Any, dict[str, dict[str, Any]]]:
        """`stream.over` for every layer, with a lane "weights" besides these lanes. All but `carry` is by segment.

        tokens: of all microbatches on this device, see `Fetch.layers_in_body`. counter: of the loop around the pass.
        """
        prefetched = {name: dict(flights[name]["weights"]) for name in self.segments}
        flights = {name: dict(flights[name]) for name in self.segments}
        for i, loop in sorted(enumerate(self.loops), key=lambda pair: pair[0], reverse=reverse):
            fetches = {name: self.fetches[name][i] for name in loop.layers}
            one = next(iter(fetches.values()))
            carry, done = over(
                loop,
                {name: {"weights": fetch} | lanes.get(name, {}) for name, fetch in fetches.items()},
                bodies,
                carry,
                {name: flights[name] | {"weights": Flight(early=prefetched[name][i])} for name in fetches},
                reverse=reverse,
                in_body=one.layers_in_body(tokens, reverse=reverse) if loop.has_one_kind else None,
                fixed=functools.partial(index_in_loop, counter=counter),
            )
            for name in fetches:
                prefetched[name][i] = done[name]["weights"].early
                flights[name] = done[name]
        return carry, {name: flights[name] | {"weights": prefetched[name]} for name in flights}


def loops_over(segments: Sequence[Segment], stacks: dict[str, list[LayerStack]]) -> list[LayerLoop]:
    """The loops over the layers of a stretch of segments, in the order of the model. stacks: by segment, its parts."""
    layers = {
        number: LayerRef(segment.name, index, variant)
        for segment in segments
        for index, (number, variant) in enumerate(zip(segment.numbers, segment.variants, strict=True))
    }
    ends = {name: [part.stop for part in of_segment[:-1]] for name, of_segment in stacks.items()}
    return loops_of([layers[number] for number in sorted(layers)], ends, min(layers))
