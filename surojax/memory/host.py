"""Pinned host memory inside a compiled program: stacks of layers stored there, and copies to and from the device.

XLA makes each read or write an asynchronous copy of that part only: reading layer l of a stack in host memory copies
one layer. An array's type says which memory it is in, so code that reads and writes layers need not know.

A copy engine does it only if XLA proves that the offset is linear in the loop's counter. Otherwise a kernel does, whose
threads wait for host memory on the multiprocessors that the loop's products need (docs/log, 2026-11-22). So loops
that read ahead or write behind name layer l + 1 or l - 1 as it is, although the last or first one lies beyond the
stack: a modulo, minimum or maximum is not linear, nor is what is behind a barrier, and slices clamp their index anyway.
For a fixed layer inside a loop there is `index_in_loop`, and `exchange_in_halves` if nobody knows how often it runs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.numerics.rounding import materialised
from surojax.placement import cuda_plugin
from surojax.placement.home import DEVICE, Home

# XLA of the CUDA plugin 0.11 takes offsets as linear without regard to the stack's ends. That of 0.12 clamps what it
# copies.
COPY_ENGINES_CLAMP = cuda_plugin.plugin_version() >= (0, 12)


class Split(NamedTuple):
    """A stack of layers in two parts: the first layers in device memory, the others in host memory."""

    resident: Any
    streamed: Any


class LayerStack(NamedTuple):
    """Stacks `[stop - start, ...]` of layers `start` to `stop` - 1 of a model or a stage, all in one memory."""

    stack: Any
    start: int
    stop: int


def parts(tree) -> list[LayerStack]:
    """Returns the parts of work weights: two for a tree of `Split`s (device, host), one for a tree of stacks.

    Loops over layers process one part after another, so that the compiler knows which memory each loop reads.
    """

    def is_split(x) -> bool:
        return isinstance(x, Split)

    has_splits = any(map(is_split, jax.tree.leaves(tree, is_leaf=is_split)))
    trees = [jax.tree.map(lambda x, i=i: x[i], tree, is_leaf=is_split) for i in (0, 1)] if has_splits else [tree]
    layer_stacks = []
    start = 0
    for stacks in trees:
        stop = start + jax.tree.leaves(stacks)[0].shape[0]
        layer_stacks.append(LayerStack(stacks, start, stop))
        start = stop
    return layer_stacks


def join_parts(trees: Sequence):
    """Joins the trees of the parts to a tree of `Split`s, or returns the only one: the inverse of `parts`."""
    return jax.tree.map(lambda *x: Split(*x), *trees) if len(trees) > 1 else trees[0]


def put(tree, home: Home):
    """Moves the arrays of a tree to this memory."""
    return jax.tree.map(lambda x: move(x, home.space), tree)


def allocate(tree, homes: Any):
    """Allocates a tree of zeros in these homes: one home, or a tree of homes.

    In host memory the values are undefined: write each layer before a read.

    XLA's host offloader (GPUs, jax 0.12) replaces a constant in host memory that layers are written into by
    `AllocateBuffer`, which leaves it uninitialised. Equal constants would share one buffer and be copied from it
    (5.8 GiB a step for Llama-7B's accumulators), so arrays get different constants: 100 of them, fewer in 8 bits, two
    of bools.
    """
    leaves, structure = jax.tree.flatten(tree)
    leaf_homes = [homes] * len(leaves) if isinstance(homes, Home) else structure.flatten_up_to(homes)
    pairs = zip(leaves, leaf_homes, strict=True)
    # A bool (routers save some) plus a number would be an int32.
    moved = [put((x + i % 100).astype(x.dtype), home) if home.streamed else x for i, (x, home) in enumerate(pairs)]
    return jax.tree.unflatten(structure, moved)


def move(x: jax.Array, space) -> jax.Array:
    """Moves x to this memory space; returns x itself if it is there already."""
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)


def read(tree, l: jax.Array | int):
    """Layer l of stacked arrays `[L, ...]`, or the one nearest to it, in device memory."""

    def one(x):
        layer = jax.lax.dynamic_index_in_dim(x, _index(x, l), 0, keepdims=False, allow_negative_indices=False)
        return move(layer, DEVICE.space)

    return jax.tree.map(one, tree)


def write_layer(tree, new, l: jax.Array | int):
    """Replaces layer l, or the layer nearest to l, of stacked arrays by `new`, in the stacks' own memory.

    In place if the compiler can.
    """

    def one(x, layer):
        layer = move(layer.astype(x.dtype), jax.typeof(x).memory_space)
        return jax.lax.dynamic_update_index_in_dim(x, layer, _index(x, l), 0, allow_negative_indices=False)

    return jax.tree.map(one, tree, new)


def _index(stack: jax.Array, l: jax.Array | int) -> jax.Array | int:
    """Returns the index at which to slice a stack for the layer nearest to l: l itself, if slices clamp it."""
    if COPY_ENGINES_CLAMP or jax.typeof(stack).memory_space == DEVICE.space:
        return l
    return jnp.clip(l, 0, len(stack) - 1)


def index_in_loop(l: int, counter: jax.Array | int) -> jax.Array:
    """Index l, computed from the counter of the loop around it: a constant is not an offset that XLA finds linear."""
    return l + jnp.minimum(counter, 0)


def on_device(tree) -> bool:
    """True if every array of a tree is in device memory."""
    return all(jax.typeof(x).memory_space == DEVICE.space for x in jax.tree.leaves(tree))


def balanced(stacks, inputs) -> list[bool]:
    """Chooses `are_read_first` of `exchange`: half of the bytes are read before they are written, half after.

    inputs: further stacks, which are only read.
    """

    def in_host(x) -> int:
        return 0 if on_device(x) else x.nbytes

    sizes = [in_host(x) for x in jax.tree.leaves(stacks)]
    excess = -sum(in_host(x) for x in jax.tree.leaves(inputs))  # bytes written first beyond those that are read first
    are_read_first = [False] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        are_read_first[i] = excess > 0
        excess += -sizes[i] if are_read_first[i] else sizes[i]
    return are_read_first


def exchange(stacks, new, before, after, *, are_read_first: Sequence[bool] = ()):
    """(stacks with the layer nearest to `before` replaced by `new`, the layer nearest to `after`).

    The two are different layers, or the same layer if its values already equal `new`. A stack is not read and written
    at the same time. are_read_first: of each stack, whether it is read before it is written; else every second one is.
    So both directions of the host link are busy.
    """

    def write_first(x, y):
        x = write_layer(x, y, before)
        return x, read(x, after)

    def read_first(x, y):
        # The barrier ends the read before the write begins; without it XLA copies the entire stack.
        next_layer, y = jax.lax.optimization_barrier((read(x, after), y))
        return write_layer(x, y, before), next_layer

    leaves, structure = jax.tree.flatten(stacks)
    are_read_first = are_read_first or [i % 2 == 1 for i in range(len(leaves))]
    order = [read_first if is_read_first else write_first for is_read_first in are_read_first]
    pairs = zip(order, leaves, jax.tree.leaves(new), strict=True)
    pairs = [in_this_order(x, y) for in_this_order, x, y in pairs]
    return tuple(structure.unflatten([pair[i] for pair in pairs]) for i in (0, 1))


def exchange_in_halves(stacks, new, before: int, after: int):
    """`exchange` of two different layers, by copy engines inside a loop whose number of rounds XLA does not know.

    Neither its counter nor those of the loops around it make an offset linear there (docs/performance.md). So halves of
    layers are copied, in a loop of two rounds. Layers that have no halves are copied by kernels.
    """
    leaves, structure = jax.tree.flatten(stacks)
    if any(stack.ndim < 2 or stack.shape[1] % 2 for stack in leaves):
        return exchange(stacks, new, before, after)

    def of_stack(x):
        return x.reshape(2 * len(x), x.shape[1] // 2, *x.shape[2:])

    def half(i, carry):
        halves, layer = carry
        halves, copied = exchange(halves, materialised(read(layer, i)), 2 * before + i, 2 * after + i)
        return halves, write_layer(layer, copied, i)

    halves = [of_stack(x) for x in leaves]
    layer = [x.reshape(2, -1, *x.shape[1:]) for x in jax.tree.leaves(new)]
    halves, layer = jax.lax.fori_loop(0, 2, half, (halves, layer))
    stacks = structure.unflatten([x.reshape(stack.shape) for x, stack in zip(halves, leaves, strict=True)])
    return stacks, structure.unflatten([x.reshape(stack.shape[1:]) for x, stack in zip(layer, leaves, strict=True)])
