"""Reduction of gradients: push adds a layer's gradient to its accumulator, finish sums the local rest over devices.

    before layer l computes:     sums = read_accumulator(l)       if accumulators are in host memory
    after it:                    push(sums, dw, l)                reduce-scatter (ZeRO-2 and 3), add, write
    in the last microbatch:      push also sums over all devices what is still local (ZeRO-1, replicas)
    after the backward pass:     finish                           embedding and final norm, global norm

Accumulators in host memory lag by one layer: the sums of the layer that was differentiated last are `deferred`, and are
copied out while the next one computes.

The embedding's and the head's gradients are summed over devices once, by finish. Summing the head's in parts during the
last backward pass would hide a transfer of 0.6 % of a step at most, and costs more than it hides: behind it, XLA waits
for the MLP's reduce-scatter earlier (docs/LOG.md, 2026-11-22).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import allocate, index_in_loop, parts, read, write
from surojax.models.model import Segment
from surojax.numerics.quantize import dequantise_all
from surojax.parallel import collectives
from surojax.parallel.collectives import Squares, varying
from surojax.placement.layout import Layout
from surojax.placement.mesh import DATA, REPLICATE, SHARD
from surojax.placement.param import OUTER
from surojax.step.spec import Engine
from surojax.step.weights import Layer, fetch


class LayerSums(NamedTuple):
    """Sums of the gradients of a segment's layers.

    stack: trees `[L, ...]` in their home. deferred: sums of one layer in flight to host memory; None if the stack is in
    device memory.
    """

    stack: Any
    deferred: Any


class Accumulators(NamedTuple):
    """Sums of gradients in a step.

    layers: by segment. outer: of the outer layers, sharded as their weights are.
    """

    layers: dict[str, LayerSums]
    outer: dict

    def with_layers(self, name: str, **changed) -> "Accumulators":
        """The accumulators with fields of a segment's `LayerSums` replaced."""
        return self._replace(layers=self.layers | {name: self.layers[name]._replace(**changed)})


def add(tree, more):
    """Accumulators plus gradients, in the accumulators' dtype."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), tree, more)


def accumulators(engine: Engine, weights) -> Accumulators:
    """Zeros: the layers' as the placement says, the outer ones as their weights (summed over devices once per step).

    In host memory the layers' may hold anything; see `push`.
    """
    row = engine.table.grads
    layers = {segment.name: new_sums(engine, segment, weights[segment.name]) for segment in engine.model.segments}

    def zeros(w: jax.Array, layout: Layout) -> jax.Array:
        return varying(jnp.zeros(w.shape, row.dtype), (*DATA, *layout.computed_axes))

    outer = jax.tree.map(zeros, weights[OUTER], engine.layouts.weights[OUTER])
    return Accumulators(layers, outer)


def new_sums(engine: Engine, segment: Segment, weights) -> LayerSums:
    """Zeros for a segment. weights: its stacks."""
    row = engine.table.grads
    layouts = engine.layouts.grads[segment.name]
    stack = parts(weights)[0].stack

    def gradient_of_layer():
        w = dequantise_all(fetch(engine, segment, stack, 0, segment.variants[0]), engine.table.weights.dtype)
        return collectives.reduce_scatter(w, segment.params, layouts) if row.sharded else w

    def axes(layout: Layout) -> tuple[str, ...]:
        # A replicated array of sharded accumulators is summed over dp_shard at every push, so it is the same there.
        data = (REPLICATE,) if row.sharded and layout.sharded_dim is None else DATA
        return (*data, *layout.computed_axes)

    def zeros(*lead: int):
        def one(g, layout):
            return varying(jnp.zeros((*lead, *g.shape), row.dtype), axes(layout))

        return jax.tree.map(one, of_layer, layouts)

    of_layer = jax.eval_shape(gradient_of_layer)
    return LayerSums(allocate(zeros(segment.num_layers), row.home), zeros() if row.home.streamed else None)


def read_accumulator(engine: Engine, segment: Segment, grads: Accumulators, l: jax.Array):
    """(accumulators, the sums of a segment's layer l): read before layer l computes if they are in host memory.

    The deferred sums, of the layer before this one in the backward pass, are copied out now.
    """
    sums = grads.layers[segment.name]
    if sums.deferred is None:
        return grads, None
    stack = write(sums.stack, sums.deferred, l + 1)
    return grads.with_layers(segment.name, stack=stack), read(stack, l)


def begin_backward(segment: Segment, grads: Accumulators, microbatch: jax.Array | int) -> Accumulators:
    """The accumulators that a backward pass begins with, in which the last layer's sums are the deferred ones.

    The first layer of the pass writes them where they are already: the layer behind the last one is the last one. The
    sums that were deferred, of layer 0 in the microbatch before, are copied out. microbatch: the loop's counter.
    """
    sums = grads.layers[segment.name]
    if sums.deferred is None:
        return grads
    stack = write(sums.stack, sums.deferred, index_in_loop(0, microbatch))
    last = read(stack, index_in_loop(segment.num_layers - 1, microbatch))
    return grads.with_layers(segment.name, stack=stack, deferred=last)


def push(
    engine: Engine,
    segment: Segment,
    grads: Accumulators,
    sums,
    dw,
    layer: Layer,
    *,
    first: jax.Array | bool,
    last: bool,
):
    """(accumulators with a layer's gradient added to its `sums` from `read_accumulator`, Squares of the result).

    first: first microbatch, start from zero, since accumulators in host memory may hold anything. last: last
    microbatch, also sum over devices what is still local.
    """
    table = engine.table
    layouts = engine.layouts.master[segment.name]
    if table.grads.sharded:
        dw = collectives.reduce_scatter_in_turn(dw, segment.params, layouts, table.reduce)
    stack = grads.layers[segment.name].stack
    streamed = table.grads.home.streamed

    def from_zero(x):
        return jnp.where(first, jnp.zeros_like(x), x)

    old = jax.tree.map(from_zero, sums) if streamed else read(stack, layer.index)
    sums = add(old, dw)
    if last:
        if sums_in_last_microbatch(engine) and not table.grads.sharded:
            sums = collectives.reduce_scatter_in_turn(sums, segment.params, layouts, table.reduce)
        sums = collectives.add_up(sums, REPLICATE)
    # As in the update, a barrier between reads and writes keeps XLA from copying the whole stack.
    sums = jax.lax.optimization_barrier(sums)
    squares = collectives.sum_of_squares(sums, layouts) if last else collectives.no_squares()
    sums = varying(sums, DATA if replicated_stacks(engine) else (REPLICATE,))  # typed like layers that still differ
    if streamed:
        return grads.with_layers(segment.name, deferred=sums), squares
    return grads.with_layers(segment.name, stack=write(stack, sums, layer.index)), squares


def sums_in_last_microbatch(engine: Engine) -> bool:
    """Whether the last microbatch is peeled off the loop, to sum over devices what the others leave local.

    At ZeRO-2 and 3 without replicas they leave nothing local. There it saves memory: of two microbatches, no loop is
    left, and so no zeros for the first (7B on four GPUs: 0.5 GiB; docs/LOG.md, 2026-11-22).
    """
    table = engine.table
    in_shards = table.grads.sharded and table.outer.sharded
    return bool(collectives.active(REPLICATE) or (collectives.active(SHARD) and not in_shards))


def replicated_stacks(engine: Engine) -> bool:
    """Whether every device has whole accumulators; `push` leaves the shards of their sums at the beginning of each."""
    return bool(collectives.active(SHARD)) and not engine.table.grads.sharded


def sum_outer(engine: Engine, name: str, grad: jax.Array):
    """The sum over all devices of an outer layer's gradient: the shard of this device."""
    if SHARD not in engine.layouts.weights[OUTER][name].computed_axes:  # else no other device has its rows: outer.py
        reduce = engine.table.reduce
        reduce = "all_to_all" if reduce == "int8" else reduce  # sent once a step: not in 8 bits
        grad = collectives.reduce_scatter(grad, engine.params[OUTER][name], engine.layouts.master[OUTER][name], reduce)
    return collectives.add_up(grad, REPLICATE)


def finish(engine: Engine, grads: Accumulators, squares: Squares):
    """(gradients summed over all devices, by section, as the shards that the optimizer updates; global norm).

    squares: of the layers' accumulators, which `push` has completed.
    """
    outer = {name: sum_outer(engine, name, grad) for name, grad in grads.outer.items()}
    done: dict[str, Any] = {OUTER: outer}
    for name, sums in grads.layers.items():
        stack = sums.stack
        if sums.deferred is not None:
            stack = write(stack, sums.deferred, 0)  # the backward pass ends with layer 0
        stack = collectives.same(stack, REPLICATE)
        if replicated_stacks(engine):
            stack = jax.tree.map(_shard_in_stack, stack, engine.layouts.master[name])
        done[name] = stack
    squares = add(squares, collectives.sum_of_squares(outer, engine.layouts.master[OUTER]))
    return done, collectives.norm(squares)


def _shard_in_stack(stack: jax.Array, layout):
    """The shards of the sums in a stack of accumulators."""
    dim = layout.sharded_dim
    if dim is None:
        return collectives.same(stack, SHARD)
    axis = dim + 1  # behind the axis of layers
    return jax.lax.slice_in_dim(stack, 0, stack.shape[axis] // jax.lax.axis_size(SHARD), axis=axis)
