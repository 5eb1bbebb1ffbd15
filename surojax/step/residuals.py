"""Residuals: what the forward pass saves of each layer for the backward pass."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import allocate, read, write
from surojax.parallel.collectives import varying
from surojax.placement.table import Home


class Kept(NamedTuple):
    """Residuals in a loop's carry: a stack `[L, ...]`, and one layer's that are deferred, None without."""

    stack: Any
    deferred: Any


class Residuals:
    """Writes and reads the residuals of layers.

    A stack in host memory lags by one layer: the residuals of layer l - 1 are copied out while layer l computes, and
    copied in while layer l + 1 is differentiated. The last layer's never leave the device: the backward pass begins
    with them. In device memory nothing is deferred.
    """

    def __init__(self, num_layers: int, home: Home, like):
        """like: shapes of the residuals of a layer."""
        self.num_layers = num_layers
        self.structure = like
        self.in_host = home == "host"
        self.home: Home = home

    def first(self) -> Kept:
        """Before layer 0."""

        def zeros(*lead: int):
            return jax.tree.map(lambda s: varying(jnp.zeros((*lead, *s.shape), s.dtype)), self.structure)

        return Kept(allocate(zeros(self.num_layers), self.home), zeros() if self.in_host else None)

    def keep(self, kept: Kept, values, l) -> Kept:
        """After the forward pass of layer l, which leaves these values."""
        values = jax.tree.unflatten(jax.tree.structure(self.structure), jax.tree.leaves(values))
        if self.in_host:
            return Kept(write(kept.stack, kept.deferred, (l - 1) % self.num_layers), varying(values))
        return Kept(write(kept.stack, values, l), None)

    def take(self, stack, deferred, l):
        """(values of layer l; deferred: those of the layer below it, on their way to the device)."""
        if self.in_host:
            return deferred, read(stack, jnp.maximum(l - 1, 0))
        return read(stack, l), None
