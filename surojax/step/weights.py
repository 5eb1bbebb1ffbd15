"""Fetch: a layer's weights, from where they are stored to what products read, ahead of the layer that needs them.

Three stages: copy the layer's shards to device memory, all-gather them, dequantise them. Weights in flight are in the
carry of the loops over layers, so that copies and all-gathers overlap the computation of earlier layers. Those that
rest in a base format are dequantised when their layer begins, so that those in flight take 4 or 8 bits.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import Part, index_in_loop, on_device, parts, read
from surojax.models.model import Segment, Variant, loop_over, runs
from surojax.numerics import base_formats
from surojax.numerics.quantize import dequantise_all, largest_magnitude, quantise, quantise_whole
from surojax.parallel import collectives
from surojax.placement.param import Kind, Param
from surojax.placement.table import Placement
from surojax.step.spec import Engine

# Tokens whose forward pass lasts about as long as the transfers of an update beside it: 2 FLOPs a parameter and token
# at 140 TFLOP/s, 10 bytes a parameter each way at 22 GB/s (RTX 4090). All-gathers take a third of that.
HIDING_TOKENS = 1 << 15


def hides_transfers(tokens: int) -> bool:
    """True if a pass over so many tokens lasts longer than the transfers beside it."""
    return tokens >= HIDING_TOKENS


def fetch(engine: Engine, segment: Segment, stack, l: jax.Array | int, variant: Variant):
    """The weights of layer l of a stack, as its products read them."""
    w = all_gather_weights(engine, segment, copy_in(engine, segment, stack, l, variant))
    return base_formats.dequantise_all(w, engine.table.weights.dtype)


def copy_in(engine: Engine, segment: Segment, stack, l: jax.Array | int, variant: Variant):
    """This device's shards of layer l of a stack, in device memory, quantised if the all-gather is in 8 bits."""
    return in_gather_format(engine, segment, read(stack, l), variant)


def in_gather_format(engine: Engine, segment: Segment, w, variant: Variant):
    """This device's shards of a layer's weights, quantised if the all-gather is in 8 bits.

    Layers in which the recipe is disabled keep their weights in 16 bits if the recipe is in float8.
    """
    table = engine.table
    if table.persistent_quants or not table.quants.dtype or (table.one_scale and not variant.recipe_enabled):
        return w
    return quantised(segment.params, w, table)


def quantised(params, w, table: Placement):
    """A layer's weights with every matrix as a `Quantized`; vectors are unchanged.

    With one scale per matrix (recipes fp8_*), all shards of a matrix have the same scale, from one collective with a
    number per matrix. Otherwise each block of a row has a scale.
    """
    if table.one_scale:
        return quantise_with_one_scale(params, w, table.quants.dtype)

    def quantise_matrix(param: Param, x):
        return quantise(x, table.quants.dtype) if param.kind is Kind.MATRIX else x

    return jax.tree.map(quantise_matrix, params, w)


def quantise_with_one_scale(params, w, dtype):
    """A layer's weights, or this device's shards of them, with every matrix as a `Quantized` with one scale."""
    leaves, structure = jax.tree.flatten(w)
    which = [i for i, param in enumerate(structure.flatten_up_to(params)) if param.kind is Kind.MATRIX]
    absmax = collectives.largest_of_shards(jnp.stack([largest_magnitude(leaves[i]) for i in which]))
    for i, largest in zip(which, absmax, strict=True):
        leaves[i] = quantise_whole(leaves[i], dtype, largest)
    return jax.tree.unflatten(structure, leaves)


def all_gather_weights(engine: Engine, segment: Segment, shards):
    """The weights of a layer to compute with, or Codeds of them, from the shards that `copy_in` returns."""
    w = collectives.all_gather(shards, engine.layouts.weights[segment.name])
    return w if engine.table.one_scale else dequantise_all(w, engine.table.weights.dtype)


class Layer(NamedTuple):
    """One layer in a loop.

    index: in its segment's stacks. number: in the model. variant: static. weights: to compute with.
    """

    index: Any
    number: Any
    variant: Variant
    weights: Any


def comes_in_pairs(n: int, period: int, *, odd: bool = False) -> bool:
    """True if a loop over n layers may have two of them in its body. odd: n may be odd.

    What is left of an odd number is unrolled. Two layers without a loop crash XLA (jax 0.12).
    """
    return period == 1 and n >= 4 and (odd or n % 2 == 0)


class Prefetch:
    """Fetches the weights of a run of layers early.

    A group of microbatches passes the positions 0 to 2n - 1: n layers forward, then backward; the positions after that
    are the next one's forward pass.

    Weights that are stored in shards, or in host memory, are fetched one position early; those that are stored in
    shards in host memory are copied in two positions early and gathered one position early, so that neither waits.
    """

    def __init__(self, engine: Engine, segment: Segment, part: Part, layers: range, period: int, *, stages: int):
        """part: the stack that holds these layers; period: of their variants, see `model.runs`."""
        self.part = part
        self.layers = layers
        self.n = len(layers)
        self.period = period
        self.stages = stages
        self.variants = segment.variants[layers.start : layers.stop]
        self.gather = functools.partial(all_gather_weights, engine, segment)
        self._copy_in = functools.partial(copy_in, engine, segment, part.stack, variant=self.variants[0])
        self.on_device = on_device(part.stack)
        self.recomputes = engine.recompute_block
        assert len({variant.recipe_enabled for variant in self.variants}) == 1

    def copy_in(self, p):
        """The first stage of the fetch for position p."""
        p %= 2 * self.n
        return self._copy_in(self._in_part(jnp.minimum(p, 2 * self.n - 1 - p)))

    def _in_part(self, l):
        """The index in the part's stack of the l-th of these layers."""
        return self.layers.start - self.part.start + l

    def copy_in_ahead(self, p, *, reverse: bool):
        """The first stage of the fetch for position p, from the loop of the pass before it.

        In host memory the layer's index is linear in p (memory/host.py), as if the pass went on beyond its last layer.
        """
        if self.on_device:
            return self.copy_in(p)
        return self._copy_in(self._in_part(2 * self.n - 1 - p if reverse else p))

    def first(self, *, reverse: bool = False):
        """The results of each stage that are prefetched before the forward pass or, if reverse, the backward pass."""
        p = self.n if reverse else 0
        return tuple(self._prefetched(i, p) for i in range(self.stages))

    def first_shards(self, *, reverse: bool):
        """Shards in device memory of the first positions of a pass, if they rest in host memory: for `from_shards`."""
        p = self.n if reverse else 0
        return () if self.on_device else tuple(self.copy_in(p + i) for i in range(self.stages))

    def from_shards(self, shards, *, reverse: bool):
        """Returns what `first` does, from the shards that `first_shards` has copied in."""
        return (self.gather(shards[0]), *shards[1:]) if shards else self.first(reverse=reverse)

    def _prefetched(self, i: int, p: jax.Array | int):
        """The i-th of what is prefetched before position p: its weights, then the next position's shards."""
        return self.copy_in(p + 1) if i else self.gather(self.copy_in(p))

    def turn(self, prefetched, group, *, reverse: bool):
        """The prefetched values when a pass begins: what the pass before read beyond its last layer is fetched again.

        Only a slice at the end of the stack is right: clamped, it is the last layer, with which the next pass begins.
        group: the counter of the loop around it.
        """
        if self.on_device:
            return prefetched
        at_end = self.layers.stop == self.part.stop if reverse else self.layers.start == self.part.start
        right = int(at_end)
        p = index_in_loop(self.n if reverse else 0, group)
        return (*prefetched[:right], *(self._prefetched(i, p) for i in range(right, self.stages)))

    def layers_in_body(self, tokens: int, *, reverse: bool) -> int:
        """The number of layers in a loop's body: a multiple of the variants' period. tokens: of the pass.

        With one layer, XLA copies what is prefetched into the carry; two exchange their places in device memory. But
        their transfers overlap less (docs/LOG.md, 2026-11-22). So weights copied in from host memory come in pairs
        backward only, and all-gathered ones if the pass is long enough for them all the same.
        """
        if self.stages != 1 or not comes_in_pairs(self.n, self.period, odd=self.on_device):
            return self.period
        in_pairs = self.recomputes and hides_transfers(tokens) if self.on_device else reverse
        return 2 if in_pairs else self.period

    def take(self, prefetched, p, *, reverse: bool):
        """(weights of position p, what is prefetched afterwards: the next positions' stages)."""
        if self.stages == 2:
            w, shards = prefetched
            return w, (self.gather(shards), self.copy_in_ahead(p + 2, reverse=reverse))
        if self.stages == 1:
            return prefetched[0], (self.gather(self.copy_in_ahead(p + 1, reverse=reverse)),)
        return self.gather(self.copy_in(p)), ()


class Layers:
    """Loops over a segment's layers; each layer's weights are fetched before they are needed, if fetching takes time.

    Later layers' weights in flight are in the loops' carry, for each loop: layers that are stored in one memory
    (`host.parts`) and whose variants repeat.
    """

    def __init__(self, engine: Engine, segment: Segment, stacks):
        """stacks: the segment's work weights."""
        self.segment = segment
        table = engine.table
        self.dtype = table.weights.dtype
        self.prefetches: list[Prefetch] = []
        for part in parts(stacks):
            stages = table.weights.sharded + (not on_device(part.stack))
            for run in runs(segment.variants[part.start : part.stop]):
                layers = range(part.start + run.start, part.start + run.stop)
                self.prefetches.append(Prefetch(engine, segment, part, layers, run.period, stages=stages))

    def first(self, *, reverse: bool = False) -> list:
        """Weights that are prefetched before a forward pass, or before a backward pass."""
        return [prefetch.first(reverse=reverse) for prefetch in self.prefetches]

    def first_shards(self, *, reverse: bool) -> list:
        """Shards of the first layers of every pass in this direction, in device memory, see `Prefetch.first_shards`."""
        return [prefetch.first_shards(reverse=reverse) for prefetch in self.prefetches]

    def from_shards(self, shards: list, *, reverse: bool) -> list:
        """Returns what `first` does, from the shards of `first_shards`."""
        pairs = zip(self.prefetches, shards, strict=True)
        return [prefetch.from_shards(of_loop, reverse=reverse) for prefetch, of_loop in pairs]

    def turn(self, prefetched: list, group, *, reverse: bool) -> list:
        """The prefetched values of each loop when a pass begins, see `Prefetch.turn`."""
        pairs = zip(self.prefetches, prefetched, strict=True)
        return [prefetch.turn(early, group, reverse=reverse) for prefetch, early in pairs]

    def loop(
        self,
        function: Callable,
        carry,
        prefetched: list,
        *,
        tokens: int = 0,
        reverse: bool = False,
        counter: jax.Array | int = 0,
    ):
        """(carry, prefetched) after (carry, prefetched) = function(Layer, prefetched, carry) for every layer.

        tokens: of all microbatches on this device, see `Prefetch.layers_in_body`. counter: of the loop around this one.
        """
        prefetched = list(prefetched)
        fixed = functools.partial(index_in_loop, counter=counter)
        for i, prefetch in sorted(enumerate(self.prefetches), key=lambda pair: pair[0], reverse=reverse):

            def one(k, in_turn, variant: Variant, carry, prefetch=prefetch):
                """The k-th layer of this loop, whose variant is known. in_turn: see `loop_over`."""
                carry, prefetched = carry
                layers = prefetch.layers
                p = in_turn if prefetch.on_device else k  # XLA does not find linear what is behind a barrier
                w, prefetched = prefetch.take(prefetched, prefetch.n + p if reverse else p, reverse=reverse)
                index = layers.stop - 1 - k if reverse else layers.start + k
                return function(self._layer(index, variant, w), prefetched, carry)

            in_order = prefetch.variants[::-1] if reverse else prefetch.variants
            period = prefetch.layers_in_body(tokens, reverse=reverse)
            carry, prefetched[i] = loop_over(in_order, period, one, (carry, prefetched[i]), fixed)
        return carry, prefetched

    def _layer(self, index, variant: Variant, w) -> Layer:
        """A layer to compute with. w: its weights, or codes of them."""
        number = index + self.segment.start if self.segment.start else index
        return Layer(index, number, variant, base_formats.dequantise_all(w, self.dtype))
