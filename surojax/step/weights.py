"""Fetch: a layer's weights, from where they are stored to what products read, ahead of the layer that needs them.

Three stages: copy the layer's shards to device memory, all-gather them, dequantise them. What is on its way travels in
the carry of the loops over layers, so that copies and all-gathers overlap the computation of earlier layers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import Part, parts, read
from surojax.numerics.quantize import dequantise_all, largest_magnitude, quantise, quantise_whole
from surojax.parallel import collectives
from surojax.placement.param import Kind
from surojax.placement.table import Placement
from surojax.step.spec import Engine


def fetch(engine: Engine, stack, l: jax.Array | int, recipe_enabled: bool = True):
    """The weights of layer l of a stack, as its products read them."""
    return all_gather_weights(engine, copy_in(engine, stack, l, recipe_enabled))


def copy_in(engine: Engine, stack, l: jax.Array | int, recipe_enabled: bool = True):
    """This device's shards of layer l, copied to device memory, and quantised if the all-gather is in 8 bits.

    recipe_enabled: whether the recipe holds in this layer; if not, weights of fp8 recipes stay in 16 bits.
    """
    w = read(stack, l)
    table = engine.table
    if table.persistent_quants or not table.quants.dtype or (table.one_scale and not recipe_enabled):
        return w
    return quantised(engine.params["blocks"], w, table)


def quantised(params, w, table: Placement):
    """A layer's weights with every matrix as a `Quantized`; vectors stay as they are.

    With one scale for a matrix (recipes fp8_*), shards get the scales of whole matrices, shared in one transfer of a
    number for each matrix. Else blocks of rows have scales of their own.
    """
    if table.one_scale:
        return quantise_with_one_scale(params, w, table.quants.dtype)
    quantise_matrix = lambda param, x: quantise(x, table.quants.dtype) if param.kind is Kind.MATRIX else x
    return jax.tree.map(quantise_matrix, params, w)


def quantise_with_one_scale(params, w, dtype):
    """A layer's weights, or this device's shards of them, with every matrix as a `Quantized` with one scale."""
    leaves, structure = jax.tree.flatten(w)
    which = [i for i, param in enumerate(structure.flatten_up_to(params)) if param.kind is Kind.MATRIX]
    absmax = collectives.largest_of_shards(jnp.stack([largest_magnitude(leaves[i]) for i in which]))
    for i, largest in zip(which, absmax, strict=True):
        leaves[i] = quantise_whole(leaves[i], dtype, largest)
    return jax.tree.unflatten(structure, leaves)


def all_gather_weights(engine: Engine, shards):
    """The weights of a layer to compute with, from what `copy_in` returns."""
    w = collectives.all_gather(shards, engine.layouts.weights["blocks"])
    return w if engine.table.one_scale else dequantise_all(w, engine.table.weights.dtype)


class Prefetch:
    """Fetches the weights of one part of the layers early.

    A microbatch passes the positions 0 to 2n - 1: n layers forward, then backward; what follows is the next one's
    forward pass. Weights that are stored in shards, or in host memory, are fetched one position early; those that are
    stored in shards in host memory are copied in two positions early and gathered one position early, so that neither
    waits.
    """

    def __init__(self, copy_in: Callable, gather: Callable, part: Part, layers: range, *, stages: int):
        """copy_in: (stack, number in it) -> shards of a layer; gather: from these to weights to compute with."""
        self._copy_in = copy_in
        self.gather = gather
        self.part = part
        self.layers = layers
        self.n = len(layers)
        self.stages = stages

    def copy_in(self, p):
        """The first stage of the fetch for position p."""
        p %= 2 * self.n
        l = self.layers.start - self.part.start + jnp.minimum(p, 2 * self.n - 1 - p)
        return self._copy_in(self.part.stack, l)

    def first(self):
        """What is prefetched before position 0: the result of each stage."""
        done = (lambda: self.gather(self.copy_in(0)), lambda: self.copy_in(1))
        return tuple(stage() for stage in done[: self.stages])

    def take(self, prefetched, p):
        """(weights of position p, what is prefetched afterwards: the next positions' stages)."""
        if self.stages == 2:
            w, shards = prefetched
            return w, (self.gather(shards), self.copy_in(p + 2))
        if self.stages == 1:
            return prefetched[0], (self.gather(self.copy_in(p + 1)),)
        return self.gather(self.copy_in(p)), ()


class Layer(NamedTuple):
    """One layer in a loop: its number, whether the recipe holds in it (static), its weights."""

    number: Any
    recipe_enabled: bool
    weights: Any


class Layers:
    """Loops over the layers; each layer's weights are fetched before they are needed, if fetching takes time.

    What is prefetched of later layers travels in the loops' carry, for each part of the layers: those that are stored
    in one memory (`host.parts`) and that the recipe treats alike.
    """

    def __init__(self, engine: Engine, blocks):
        """blocks: the work weights of the blocks."""
        table = engine.table
        found = parts(blocks)
        in_host = "host" in (table.weights.home, table.quants.home)  # of two parts the last
        gather = functools.partial(all_gather_weights, engine)
        self.prefetches: list[Prefetch] = []
        self.recipe_enabled: list[bool] = []
        for part in found:
            stages = table.weights.sharded + (in_host and part is found[-1])
            for start, stop, enabled in engine.model.precision.ranges(engine.model.num_layers):
                layers = range(max(start, part.start), min(stop, part.stop))
                if layers:
                    copy = functools.partial(copy_in, engine, recipe_enabled=enabled)
                    self.prefetches.append(Prefetch(copy, gather, part, layers, stages=stages))
                    self.recipe_enabled.append(enabled)

    def first(self) -> list:
        """What is prefetched before a forward pass."""
        return [prefetch.first() for prefetch in self.prefetches]

    def loop(self, function: Callable, carry, prefetched: list, *, reverse: bool = False):
        """(carry, prefetched) after (carry, prefetched) = function(Layer, prefetched, carry) for every layer."""
        prefetched = list(prefetched)
        for i, prefetch in sorted(enumerate(self.prefetches), key=lambda pair: pair[0], reverse=reverse):

            def one(k, carry, prefetch=prefetch, enabled=self.recipe_enabled[i]):
                carry, prefetched = carry
                layers, n = prefetch.layers, prefetch.n
                w, prefetched = prefetch.take(prefetched, n + k if reverse else k)
                number = layers.stop - 1 - k if reverse else layers.start + k
                return function(Layer(number, enabled, w), prefetched, carry)

            carry, prefetched[i] = jax.lax.fori_loop(0, prefetch.n, one, (carry, prefetched[i]))
        return carry, prefetched
