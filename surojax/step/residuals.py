"""Residuals: what the forward pass saves of each layer for the backward pass.

If blocks are recomputed, that is a block's input; else what the block's own reverse mode saves, except the weights,
which are fetched again.

Stacks in host memory lag by one layer: the residuals of layer l - 1 are copied out while layer l computes, and copied
in while layer l + 1 is differentiated. The last layer's never leave the device: the backward pass begins with them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from surojax.memory.host import allocate
from surojax.models.model import ROUTES, Segment, Variant
from surojax.parallel.collectives import varying
from surojax.placement.home import Home
from surojax.placement.mesh import AXES
from surojax.step.stream import Flight


class Residuals:
    """Residuals (saved activations) of a segment's layers in a microbatch, and their stacks `[L, ...]`."""

    def __init__(self, num_layers: int, home: Home, save: Callable[[Variant], Any], variants: tuple[Variant, ...]):
        """save: variant -> saved activations of one layer, of the same shapes for all variants."""
        self.num_layers = num_layers
        self.home = home
        saved = {variant: jax.eval_shape(lambda variant=variant: save(variant)) for variant in dict.fromkeys(variants)}
        self.structures = {variant: jax.tree.structure(residuals) for variant, residuals in saved.items()}
        shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(residuals)] for residuals in saved.values()]
        assert all(one == shapes[0] for one in shapes), "variants of a segment save arrays of different shapes"
        self.shapes = shapes[0]

    def zeros(self, *lead: int) -> list[jax.Array]:
        """Zeros shaped like one layer's saved activations, with extra leading dimensions `lead`."""
        return [varying(jnp.zeros((*lead, *shape), dtype), AXES) for shape, dtype in self.shapes]

    def stacks(self, microbatches: int) -> list[list[jax.Array]]:
        """Makes stacks for each microbatch of a group. All groups share them."""
        return allocate([self.zeros(self.num_layers) for _ in range(microbatches)], self.home)

    def before_forward(self, stacks: list[list[jax.Array]]) -> Flight:
        """The flight before layer 0, to whose place zeros are written before its own residuals."""
        return Flight(stacks, late=[self.zeros() for _ in stacks] if self.home.streamed else None)

    @staticmethod
    def before_backward(flight: Flight) -> Flight:
        """The flight before the backward pass, from the one after the forward pass."""
        return Flight(flight.stack, early=flight.late)

    @staticmethod
    def arrays(saved: Any) -> list[jax.Array]:
        """Flattens a block's saved activations to a list of arrays."""
        return varying(jax.tree.leaves(saved), AXES)

    def of(self, arrays: list[jax.Array], variant: Variant) -> Any:
        """Rebuilds the saved activations of a block of this variant from its arrays."""
        return self.structures[variant].unflatten(arrays)


def recomputing_segment(segment: Segment) -> Segment:
    """Returns the segment with blocks that save only their input and are recomputed in the backward pass.

    With a router they also save what it decided.
    """

    def block_forward(w, x_BSD: jax.Array, recipe_inputs, variant: Variant, *token_inputs):
        x_of_next, routed = segment.block(w, x_BSD, recipe_inputs, variant, *token_inputs)
        return (x_of_next, routed), (x_BSD, routed and routed.decided)

    def block_backward(w, saved, d_result, recipe_inputs, variant: Variant, *token_inputs):
        x_BSD, decided = saved
        if decided is not None:
            starts_BS, routing = (*token_inputs, ROUTES)[:2]
            token_inputs = starts_BS, routing._replace(decided=decided)
        saved = segment.block_forward(w, x_BSD, recipe_inputs, variant, *token_inputs)[1]
        return segment.block_backward(w, saved, d_result, recipe_inputs, variant, *token_inputs)

    return dataclasses.replace(segment, block_forward=block_forward, block_backward=block_backward)
