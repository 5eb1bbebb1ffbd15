"""Host memory inside a compiled program: stacks of layers that rest there, and the copies to and from the device.

XLA makes each of them an asynchronous copy of the part that is asked for: reading layer l of a stack that rests in host
memory moves one layer. An array's type says where it is, so code that reads and writes layers need not know.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.numerics.rounding import materialised
from surojax.placement.home import DEVICE, Home


class Split(NamedTuple):
    """A stack of layers in two: the first of them in device memory, the others in host memory."""

    resident: Any
    streamed: Any


class Part(NamedTuple):
    """Layers `start` to `stop` - 1 of a model, a tree of stacks in one memory."""

    stack: Any
    start: int
    stop: int


def parts(tree) -> list[Part]:
    """The one part of a tree of stacks, or the two of a tree of `Split`s. Loops over layers go over one part after
    another, so that which memory is read is known to the compiler."""
    split = lambda x: isinstance(x, Split)
    two = any(map(split, jax.tree.leaves(tree, is_leaf=split)))
    trees = [jax.tree.map(lambda x, i=i: x[i], tree, is_leaf=split) for i in (0, 1)] if two else [tree]
    found, start = [], 0
    for one in trees:
        stop = start + jax.tree.leaves(one)[0].shape[0]
        found.append(Part(one, start, stop))
        start = stop
    return found


def joined(trees: Sequence):
    """The inverse of `parts`."""
    return jax.tree.map(lambda *x: Split(*x), *trees) if len(trees) > 1 else trees[0]


def put(tree, home: Home):
    """The values in that memory."""
    return jax.tree.map(lambda x: move(x, home.space), tree)


def allocate(tree, home: Home):
    """Zeros put into that memory; in host memory they may hold anything, so write each layer before it is read.

    XLA's host offloader (GPUs, jax 0.12) replaces a constant there that layers are written into by `AllocateBuffer`,
    which fills nothing. Equal constants would share one and be copied from it, 5.8 GiB a step for Llama-7B's
    accumulators, so every array gets a constant of its own.
    """
    if not home.streamed:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    return put(jax.tree.unflatten(structure, [x + i % 100 for i, x in enumerate(leaves)]), home)


def move(x: jax.Array, space) -> jax.Array:
    """x in a memory space; nothing happens where it is there already."""
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)


def read(tree, l: jax.Array | int):
    """Layer l of stacked arrays `[L, ...]`, in device memory."""
    one = lambda x: jax.lax.dynamic_index_in_dim(x, l, 0, keepdims=False, allow_negative_indices=False)
    return jax.tree.map(lambda x: move(one(x), DEVICE.space), tree)


def write(tree, new, l: jax.Array | int):
    """Stacked arrays with layer l replaced, in the memory where they rest, in place when the compiler can."""

    def one(x, y):
        y = move(y.astype(x.dtype), jax.typeof(x).memory_space)
        return jax.lax.dynamic_update_index_in_dim(x, y, l, 0, allow_negative_indices=False)

    return jax.tree.map(one, tree, new)


def on_device(tree) -> bool:
    """True if every array of a tree is in device memory."""
    return all(jax.typeof(x).memory_space == DEVICE.space for x in jax.tree.leaves(tree))


class SweepCarry(NamedTuple):
    """The carry of `sweep` over layers in host memory, at the begin of layer l.

    outputs, state: the stacks, up to date but for layer l - 1. arguments: of the function for layer l, in device
    memory. results: of the function for layer l - 1, on their way to host memory.
    """

    outputs: Any
    state: Any
    arguments: tuple
    results: tuple


def sweep(function, outputs, state, inputs, start: int, stop: int):
    """(outputs, state) after (output, state) = function(state, input) of each layer from `start` to `stop` - 1.

    Layer l is number l - start of the stacks `outputs`, number l of the stacks `state` and `inputs`. If some of them
    are in host memory, layer l - 1 is copied out and layer l + 1 is copied in while layer l computes; three layers are
    on the device.
    """
    n = stop - start
    if on_device((outputs, state, inputs)):

        def update(l, stacks):
            outputs, state = stacks
            # The barrier ends the reads before the writes begin; without it XLA fuses slices of the old stack into
            # the function and then has to copy the whole stack, once a layer.
            output, new = function(materialised(read(state, l)), read(inputs, l))
            return write(outputs, output, l - start), write(state, new, l)

        return jax.lax.fori_loop(start, stop, update, (outputs, state))

    def layer(i, carry: SweepCarry) -> SweepCarry:
        # What is in the carry is in memory, but a loop over one layer ends up as no loop.
        arguments = materialised(carry.arguments)
        before = (i - 1) % n
        after = jnp.minimum(i + 1, n - 1)
        output, new = carry.results
        outputs = write(carry.outputs, output, before)
        state, copied_in = _exchange(carry.state, new, start + before, start + after)
        following = (copied_in, read(inputs, start + after))
        return SweepCarry(outputs, state, following, materialised(function(*arguments)))

    last = read(outputs, n - 1), read(state, stop - 1)  # the first results to be written are what is there
    carry = SweepCarry(outputs, state, read((state, inputs), start), last)
    carry = jax.lax.fori_loop(0, n, layer, carry)
    output, new = carry.results
    return write(carry.outputs, output, n - 1), write(carry.state, new, stop - 1)


def _exchange(stacks, new, before, after):
    """(stacks with layer `before` replaced by `new`, their layer `after`); two layers, or one with these values.

    A stack is either read or written at a time. Every other one is read first, so that both directions of the link to
    the host are busy.
    """

    def write_first(x, y):
        x = write(x, y, before)
        return x, read(x, after)

    def read_first(x, y):
        # The barrier says that the read ends before the write begins; without it XLA copies the whole stack.
        coming, y = jax.lax.optimization_barrier((read(x, after), y))
        return write(x, y, before), coming

    leaves, structure = jax.tree.flatten(stacks)
    pairs = zip(leaves, jax.tree.leaves(new), strict=True)
    pairs = [(read_first if i % 2 else write_first)(x, y) for i, (x, y) in enumerate(pairs)]
    return tuple(structure.unflatten([pair[i] for pair in pairs]) for i in (0, 1))
