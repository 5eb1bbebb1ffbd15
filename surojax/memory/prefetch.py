"""What travels while layers compute: weights that are fetched early, activations that leave late.

In between they are in the carry of the engine's loops (engine.py says why): as what is `held` (weights) or `late`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from surojax.memory.host import Home, Part, allocate, read, write
from surojax.parallel.collectives import varying


class Ahead:
    """Fetches the weights of one part of the layers early.

    A microbatch passes the positions 0 to 2n - 1: n layers forward, then backward; what follows is the next one's
    forward pass. Weights that rest in shards, or in host memory, are fetched one position early; those that rest in
    shards in host memory are brought two positions early and gathered one position early, so that neither waits.
    """

    def __init__(self, bring: Callable, whole: Callable, part: Part, layers: range, *, stages: int):
        """bring: (stack, number in it) -> a layer as it travels; whole: from that to weights to compute with."""
        self._bring, self.whole, self.part, self.layers = bring, whole, part, layers
        self.n, self.stages = len(layers), stages

    def bring(self, p):
        """The first half of the fetch for position p."""
        p %= 2 * self.n
        l = self.layers.start - self.part.start + jnp.minimum(p, 2 * self.n - 1 - p)
        return self._bring(self.part.stack, l)

    def first(self):
        """What is held before position 0: for each stage what it has done."""
        done = (lambda: self.whole(self.bring(0)), lambda: self.bring(1))
        return tuple(stage() for stage in done[: self.stages])

    def take(self, held, p):
        """(weights of position p, what is held afterwards: those of the next positions, on their way)."""
        if self.stages == 2:
            w, shards = held
            return w, (self.whole(shards), self.bring(p + 2))
        if self.stages == 1:
            return held[0], (self.whole(self.bring(p + 1)),)
        return self.whole(self.bring(p)), ()


class Saved:
    """What the forward pass saves for the backward pass: a stack `[L, ...]`, and one layer's values that are `late`.

    A stack in host memory lags by one layer: the values of layer l - 1 leave for it while layer l computes, and come
    back while layer l + 1 is differentiated. The last layer's are never there: the backward pass begins with them.
    Elsewhere nothing is late.
    """

    def __init__(self, num_layers: int, home: Home, like):
        """like: shapes of what is saved of a layer."""
        self.L, self.structure, self.host = num_layers, like, home == "host"
        self.home: Home = home

    def first(self):
        """(stack, late) before layer 0."""
        zeros = lambda *lead: jax.tree.map(lambda s: varying(jnp.zeros((*lead, *s.shape), s.dtype)), self.structure)
        return allocate(zeros(self.L), self.home), zeros() if self.host else None

    def keep(self, stack, late, values, l):
        """(stack, late) after the forward pass of layer l."""
        values = jax.tree.unflatten(jax.tree.structure(self.structure), jax.tree.leaves(values))
        if self.host:
            return write(stack, late, (l - 1) % self.L), varying(values)
        return write(stack, values, l), None

    def take(self, stack, late, l):
        """(values of layer l, late: those of the layer below it, on their way)."""
        return (late, read(stack, jnp.maximum(l - 1, 0))) if self.host else (read(stack, l), None)
