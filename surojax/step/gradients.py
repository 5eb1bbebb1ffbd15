"""Reduction of gradients: push adds a layer's gradient to its accumulator, finish sums what is left over devices.

    before layer l computes:     sums = read_accumulator(l)       if accumulators are in host memory
    after it:                    push(sums, dw, l)                reduce-scatter (ZeRO-2 and 3), add, write
    in the last microbatch:      push also sums over all devices what is still local (ZeRO-1, replicas)
    after the backward pass:     finish                           embedding and final norm, global norm

Accumulators in host memory lag by one layer: the sums of the layer that was differentiated last are `deferred`, and are
copied out while the next one computes.

**The head's gradient beside the blocks.** It is complete before the last microbatch's backward pass begins, and large.
Where it is to be summed over devices, that is done in as many parts as there are layers, one beside each layer
(`HeadParts`), so that it overlaps their computation.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import allocate, parts, read, write
from surojax.numerics.quantize import dequantise_all
from surojax.parallel import collectives
from surojax.parallel.collectives import Squares, varying
from surojax.placement.mesh import DATA, REPLICATE, SHARD
from surojax.step.spec import Engine
from surojax.step.weights import fetch


class Accumulators(NamedTuple):
    """Sums of gradients in a step.

    blocks: stacks `[L, ...]` in their home. outer: of the outer layers, cut as their weights are. deferred: sums of one
    layer on their way to host memory; None in device memory. head: the head's gradient summed over devices, as far as
    the last microbatch has come; None without `HeadParts`.
    """

    blocks: Any
    outer: dict
    deferred: Any
    head: Any = None


def add(tree, more):
    """Accumulators plus gradients, in the accumulators' dtype."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), tree, more)


def accumulators(engine: Engine, weights) -> Accumulators:
    """Zeros: the blocks' as the placement says, the outer ones as their weights (summed once per step).

    In host memory the blocks' may hold anything; see `push`.
    """
    row = engine.table.grads
    layouts = engine.layouts.grads["blocks"]
    num_layers = engine.model.num_layers
    stack = parts(weights["blocks"])[0].stack

    def gradient_of_layer():
        w = dequantise_all(fetch(engine, stack, 0), engine.table.weights.dtype)
        return collectives.reduce_scatter(w, layouts) if row.sharded else w

    def axes(layout):
        # A replicated array of sharded accumulators is summed over dp_shard at every push, so it is the same there.
        return (REPLICATE,) if row.sharded and layout.sharded_dim is None else DATA

    def zeros(*lead: int):
        one = lambda g, layout: varying(jnp.zeros((*lead, *g.shape), row.dtype), axes(layout))
        return jax.tree.map(one, of_layer, layouts)

    of_layer = jax.eval_shape(gradient_of_layer)
    outer = jax.tree.map(lambda w: varying(jnp.zeros(w.shape, row.dtype)), weights["outer"])
    blocks = allocate(zeros(num_layers), row.home)
    return Accumulators(blocks, outer, zeros() if row.home == "host" else None)


def read_accumulator(engine: Engine, grads: Accumulators, l: jax.Array):
    """(accumulators, what they hold of layer l): asked for before layer l computes if they are in host memory.

    The deferred sums, of the layer before this one in the backward pass, are copied out now.
    """
    if engine.table.grads.home == "device":
        return grads, None
    grads = flush_deferred(grads, (l + 1) % engine.model.num_layers)
    return grads, read(grads.blocks, l)


def push(engine: Engine, grads: Accumulators, sums, dw, l: jax.Array, *, first: jax.Array | bool, last: bool):
    """(accumulators with the gradient of layer l added to its `sums` from `read_accumulator`, Squares of the result).

    first: first microbatch, start from zero, since accumulators in host memory may hold anything. last: last
    microbatch, also sum over devices what is still local.
    """
    table = engine.table
    layouts = engine.layouts.master["blocks"]
    head_part = HeadParts(engine, grads).part(l) if grads.head is not None else None
    reduced_head = None
    if table.grads.sharded:
        dw, reduced_head = collectives.reduce_scatter_in_turn(dw, layouts, table.reduce, head_part)
    in_host = table.grads.home == "host"
    from_zero = lambda x: jnp.where(first, jnp.zeros_like(x), x)
    old = jax.tree.map(from_zero, sums) if in_host else read(grads.blocks, l)
    sums = add(old, dw)
    if last:
        if sums_in_last_microbatch(engine) and not table.grads.sharded:
            sums, reduced_head = collectives.reduce_scatter_in_turn(sums, layouts, table.reduce, head_part)
        sums = collectives.add_up(sums, REPLICATE)
    if reduced_head is not None:
        grads = HeadParts(engine, grads).write(reduced_head, l)
    # As in the update, a barrier between reads and writes keeps XLA from copying the whole stack.
    sums = jax.lax.optimization_barrier(sums)
    squares = collectives.sum_of_squares(sums, layouts) if last else collectives.no_squares()
    sums = varying(sums, DATA if replicated_stacks(engine) else (REPLICATE,))  # typed like layers that still differ
    if in_host:
        return grads._replace(deferred=sums), squares
    return grads._replace(blocks=write(grads.blocks, sums, l)), squares


def flush_deferred(grads: Accumulators, l: jax.Array | int) -> Accumulators:
    """Accumulators with the deferred sums written to layer l."""
    if grads.deferred is None:
        return grads
    return grads._replace(blocks=write(grads.blocks, grads.deferred, l))


def sums_in_last_microbatch(engine: Engine) -> bool:
    """Whether a step's last microbatch sums over devices what the others leave local."""
    table = engine.table
    in_shards = table.grads.sharded and table.outer.sharded
    return bool(collectives.active(REPLICATE) or (collectives.active(SHARD) and not in_shards))


def replicated_stacks(engine: Engine) -> bool:
    """Whether every device has whole accumulators; `push` leaves the shards of their sums at the beginning of each."""
    return bool(collectives.active(SHARD)) and not engine.table.grads.sharded


def sum_outer(engine: Engine, name: str, grad: jax.Array):
    """The sum over all devices of an outer layer's gradient, or of some of its rows: the shard of this device."""
    if engine.layouts.weights["outer"][name].computed == jax.P():  # else its rows are this device's alone: outer.py
        reduce = engine.table.reduce
        reduce = "all_to_all" if reduce == "int8" else reduce  # sent once a step: not in 8 bits
        grad = collectives.reduce_scatter(grad, engine.layouts.master["outer"][name], reduce)
    return collectives.add_up(grad, REPLICATE)


class HeadParts:
    """The head's gradient in as many parts as there are layers, each summed over devices beside one of them.

    Parts have equal numbers of rows; if layers do not divide the rows, the last parts repeat some.
    """

    def __init__(self, engine: Engine, grads: Accumulators):
        self.engine = engine
        self.grads = grads
        self.name = engine.model.head
        self.rows = grads.head.shape[0]
        self.size = -(-self.rows // engine.model.num_layers)

    @staticmethod
    def begin(engine: Engine, grads: Accumulators) -> Accumulators:
        """Accumulators with room for the sums, if the last microbatch is to make them.

        If the embedding is the head, its gradient is complete only after the backward pass: `finish` sums it.
        """
        head = engine.model.head
        if not sums_in_last_microbatch(engine) or head == "embed":
            return grads
        like = jax.eval_shape(functools.partial(sum_outer, engine, head), grads.outer[head])
        room = varying(jnp.zeros(like.shape, like.dtype), tuple(like.manual_axis_type.varying))
        return grads._replace(head=room)

    def start(self, l: jax.Array):
        """The first row of part l."""
        return jnp.minimum(l * self.size, self.rows - self.size)

    def part(self, l: jax.Array):
        """(part l of the local gradient, the function that sums it over devices)."""
        grad = self.grads.outer[self.name]
        by_shard = grad.reshape(-1, self.rows, grad.shape[1])
        part = jax.lax.dynamic_slice_in_dim(by_shard, self.start(l), self.size, 1)
        return part.reshape(-1, grad.shape[1]), functools.partial(sum_outer, self.engine, self.name)

    def write(self, summed: jax.Array, l: jax.Array) -> Accumulators:
        """Accumulators with part l of the sums."""
        return self.grads._replace(head=jax.lax.dynamic_update_slice_in_dim(self.grads.head, summed, self.start(l), 0))


def finish(engine: Engine, grads: Accumulators, squares: Squares):
    """(gradients summed over all devices `{"blocks", "outer"}`, as the shards that the optimizer updates; global norm).

    squares: of the blocks' accumulators, which `push` has completed.
    """
    grads = flush_deferred(grads, 0)  # the backward pass ends with layer 0
    summed = {} if grads.head is None else {engine.model.head: grads.head}
    outer = {
        name: summed[name] if name in summed else sum_outer(engine, name, grad) for name, grad in grads.outer.items()
    }
    blocks = collectives.same(grads.blocks, REPLICATE)
    if replicated_stacks(engine):
        blocks = jax.tree.map(_shard_in_stack, blocks, engine.layouts.master["blocks"])
    squares = add(squares, collectives.sum_of_squares(outer, engine.layouts.master["outer"]))
    return {"blocks": blocks, "outer": outer}, collectives.norm(squares)


def _shard_in_stack(stack: jax.Array, layout):
    """The shards of the sums in a stack of accumulators."""
    dim = layout.sharded_dim
    if dim is None:
        return collectives.same(stack, SHARD)
    axis = dim + 1  # behind the axis of layers
    return jax.lax.slice_in_dim(stack, 0, stack.shape[axis] // jax.lax.axis_size(SHARD), axis=axis)
