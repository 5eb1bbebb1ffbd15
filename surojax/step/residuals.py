"""Residuals: what the forward pass saves of each layer for the backward pass.

If blocks are recomputed, that is a block's input; else what the block's own reverse mode saves, except the weights,
which are fetched again.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import allocate, read, write
from surojax.models.model import Segment, Variant
from surojax.parallel.collectives import varying
from surojax.placement.home import Home
from surojax.placement.mesh import AXES
from surojax.step.spec import Engine
from surojax.step.weights import Layer


class Kept(NamedTuple):
    """Residuals in a loop's carry: stacks `[L, ...]`, and those of one layer that are deferred, if there are any."""

    stack: list[jax.Array]
    deferred: list[jax.Array] | None


class Residuals:
    """Writes and reads the residuals of a segment's layers.

    Stacks in host memory lag by one layer: the residuals of layer l - 1 are copied out while layer l computes, and
    copied in while layer l + 1 is differentiated. The last layer's never leave the device: the backward pass begins
    with them. Layer 0 has none before it: zeros are written to its place, and then its own. In device memory nothing is
    deferred.
    """

    def __init__(self, num_layers: int, home: Home, saved: dict[Variant, Any]):
        """saved: the abstract residuals of a layer of each variant; their arrays have the same shapes."""
        self.num_layers = num_layers
        self.home = home
        self.structures = {variant: jax.tree.structure(of_variant) for variant, of_variant in saved.items()}
        shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(of_variant)] for of_variant in saved.values()]
        assert all(one == shapes[0] for one in shapes), "variants of a segment save arrays of different shapes"
        self.shapes = shapes[0]

    def zeros(self, *lead: int) -> list[jax.Array]:
        """The arrays of a layer; lead: dimensions before theirs."""
        return [varying(jnp.zeros((*lead, *shape), dtype), AXES) for shape, dtype in self.shapes]

    def stacks(self, microbatches: int) -> list[list[jax.Array]]:
        """A stack for each microbatch of a group. Every group writes over what the one before it has read."""
        return allocate([self.zeros(self.num_layers) for _ in range(microbatches)], self.home)

    def first(self, stack: list[jax.Array]) -> Kept:
        """The residuals in the carry before layer 0."""
        return Kept(stack, self.zeros() if self.home.streamed else None)

    def keep(self, kept: Kept, values, l) -> Kept:
        """The carry with the residuals of layer l in it."""
        arrays = jax.tree.leaves(values)
        if kept.deferred is not None:
            return Kept(write(kept.stack, kept.deferred, l - 1), varying(arrays, AXES))
        return Kept(write(kept.stack, arrays, l), None)

    def take(self, kept: Kept, l, variant: Variant):
        """(residuals of layer l, the carry with those of the layer below in flight to the device)."""
        structure = self.structures[variant]
        if kept.deferred is not None:
            below = read(kept.stack, l - 1)
            return structure.unflatten(kept.deferred), kept._replace(deferred=below)
        return structure.unflatten(read(kept.stack, l)), kept


class Slot:
    """The residuals of one microbatch, in stacks that have those of several; see `Residuals`.

    In host memory, a slot begins with an entry that belongs to no layer: these stacks lag by one layer, so the first
    layer writes and reads there.
    """

    def __init__(self, residuals: Residuals, start: jax.Array, step: jax.Array | int = 1):
        """start: index of the first layer in the stacks. step: from layer to layer; 0: all layers write to one entry,
        which nothing needs."""
        self.residuals = residuals
        self.start = start
        self.step = step

    def keep(self, kept: Kept, values, l) -> Kept:
        """See `Residuals.keep`."""
        return self.residuals.keep(kept, values, self._entry(l))

    def take(self, kept: Kept, l, variant: Variant):
        """See `Residuals.take`."""
        return self.residuals.take(kept, self._entry(l), variant)

    def begin_backward(self, stack: list[jax.Array]) -> Kept:
        """The residuals in the carry before the last layer, which the forward pass has left in the stacks."""
        return Kept(stack, read(stack, self._last()) if self.residuals.home.streamed else None)

    def end_forward(self, kept: Kept) -> list[jax.Array]:
        """The stacks, with the last layer's residuals too."""
        return kept.stack if kept.deferred is None else write(kept.stack, kept.deferred, self._last())

    def _entry(self, l) -> jax.Array:
        """The index of layer l in the stacks."""
        return self.start + l * self.step

    def _last(self) -> jax.Array:
        return self._entry(self.residuals.num_layers - 1)


def block_forward(engine: Engine, segment: Segment, layer: Layer, x_BSD: jax.Array, recipe_inputs, starts_BS):
    """((the block of x, its auxiliary loss), residuals: x itself if the block is recomputed)."""
    if engine.recompute_block:
        return segment.block(layer.weights, x_BSD, recipe_inputs, layer.variant, starts_BS), x_BSD
    return segment.block_forward(layer.weights, x_BSD, recipe_inputs, layer.variant, starts_BS)


def block_backward(engine: Engine, segment: Segment, layer: Layer, saved, d_result, recipe_inputs, starts_BS):
    """(dw, dx, observed) from the residuals, see `Segment`."""
    if engine.recompute_block:
        saved = segment.block_forward(layer.weights, saved, recipe_inputs, layer.variant, starts_BS)[1]
    return segment.block_backward(layer.weights, saved, d_result, recipe_inputs, layer.variant, starts_BS)
