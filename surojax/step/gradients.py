"""Reduction of gradients: push adds a layer's gradient to its accumulator, finish sums the local rest over devices.

    before layer l computes:     sums = read_accumulator(l)
    after each microbatch of it: sums = accumulate(sums, dw)      reduce-scatter (ZeRO-2 and 3), add
    after all in a group:        push(sums, l)                    write
    in the last group:           push also sums over all devices what is still local (ZeRO-1, replicas)
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
from surojax.placement.mesh import REPLICATE, SHARDS, TOKENS
from surojax.placement.param import OUTER, Kind, part_of
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


def accumulators(engine: Engine, weights, used: dict | None = None) -> Accumulators:
    """Zeros for all that is trained: the layers' as the placement says, the outer ones as their weights (summed over
    devices once per step).

    In host memory the layers' may hold anything; see `read_accumulator`. used: by segment, stacks there to write over.
    """
    row = engine.table.grads
    layers = {
        segment.name: new_sums(engine, segment, weights[segment.name], used and used[segment.name])
        for segment in engine.model.segments
    }

    def zeros(w: jax.Array, layout: Layout) -> jax.Array:
        return varying(jnp.zeros(w.shape, row.dtype), (*TOKENS, *layout.computed_axes))

    layouts = engine.layouts.grads[OUTER]
    outer = jax.tree.map(zeros, part_of(weights[OUTER], layouts), layouts)
    return Accumulators(layers, outer)


def new_sums(engine: Engine, segment: Segment, weights, used=None) -> LayerSums:
    """Zeros for a segment. weights: its stacks. used: see `accumulators`."""
    row = engine.table.grads
    layouts = engine.layouts.grads[segment.name]
    stack = parts(weights)[0].stack

    def gradient_of_layer():
        w = part_of(fetch(engine, segment, stack, 0, segment.variants[0]), layouts)
        w = dequantise_all(w, engine.table.weights.dtype)
        return collectives.reduce_scatter(w, segment.trained_params, layouts) if row.sharded else w

    def axes(layout: Layout) -> tuple[str, ...]:
        # A replicated array of sharded accumulators is summed over dp_shard and cp at every push: it is the same there.
        data = (REPLICATE,) if row.sharded and layout.sharded_dim is None else TOKENS
        return (*data, *layout.layers, *layout.computed_axes)

    def zeros(*lead: int):
        def one(g, layout):
            return varying(jnp.zeros((*lead, *g.shape), row.dtype), axes(layout))

        return jax.tree.map(one, of_layer, layouts)

    of_layer = jax.eval_shape(gradient_of_layer)
    if used is not None:
        return LayerSums(jax.tree.map(lambda x, layout: varying(x, axes(layout)), used, layouts), zeros())
    return LayerSums(allocate(zeros(segment.num_layers), row.home), zeros() if row.home.streamed else None)


def read_accumulator(segment: Segment, grads: Accumulators, l: jax.Array, *, first: bool):
    """(accumulators, the sums of a segment's layer l to add gradients to).

    In host memory, the deferred sums, of the layer before this one in the backward pass, are copied out now. first:
    first group of microbatches, which begins with zeros and reads nothing: host memory may hold anything.
    """
    sums = grads.layers[segment.name]
    if sums.deferred is None:
        return grads, read(sums.stack, l)
    stack = write(sums.stack, sums.deferred, l + 1)
    old = jax.tree.map(jnp.zeros_like, sums.deferred) if first else read(stack, l)
    return grads.with_layers(segment.name, stack=stack), old


def accumulate(engine: Engine, segment: Segment, sums, dw):
    """A layer's sums plus its gradients in a microbatch, which are reduce-scattered if accumulators are sharded."""
    table = engine.table
    if table.grads.sharded:
        layouts = engine.layouts.master[segment.name]
        dw = collectives.reduce_scatter_in_turn(dw, segment.trained_params, layouts, table.reduce)
    return add(sums, dw)


def reduce_behind(dw, before):
    """(a layer's gradients, `before`), of which the gradient that is reduced first is known only when `before` is."""
    leaves, structure = jax.tree.flatten(dw)
    first = collectives.reduced_in_order(leaves)[0]
    leaves[first], before = jax.lax.optimization_barrier((leaves[first], before))
    return structure.unflatten(leaves), before


def begin_backward(segment: Segment, grads: Accumulators, group: jax.Array | int, *, first: bool) -> Accumulators:
    """The accumulators that a backward pass begins with, in which the last layer's sums are the deferred ones.

    The pass before left layer 0's sums deferred, which are copied out. The last layer's are read, and the pass, which
    begins by copying out what is deferred, writes them back unchanged. The first group reads nothing: it writes zeros
    to the last layer, and the sums of that layer afterwards. group: the loop's counter.
    """
    sums = grads.layers[segment.name]
    if sums.deferred is None or first:
        return grads
    stack = write(sums.stack, sums.deferred, index_in_loop(0, group))
    last = read(stack, index_in_loop(segment.num_layers - 1, group))
    return grads.with_layers(segment.name, stack=stack, deferred=last)


def push(engine: Engine, segment: Segment, grads: Accumulators, sums, layer: Layer, *, last: bool):
    """(accumulators with a layer's `sums` after a group of microbatches, Squares of these).

    If sums are made in place, `finish` computes their Squares. last: last group, also sum over devices what is still
    local.
    """
    table = engine.table
    layouts = engine.layouts.master[segment.name]
    stack = grads.layers[segment.name].stack
    if last:
        if replicated_stacks(engine):
            sums = collectives.reduce_scatter_in_turn(sums, segment.trained_params, layouts, table.reduce)
        sums = collectives.add_up(sums, REPLICATE)
    in_place = sums_in_place(engine)
    if not in_place:
        # As in the update, a barrier between reads and writes keeps XLA from copying the whole stack.
        sums = jax.lax.optimization_barrier(sums)
    squares = collectives.sum_of_squares(sums, layouts) if last and not in_place else collectives.no_squares()
    sums = varying(sums, TOKENS if replicated_stacks(engine) else (REPLICATE,))  # typed like layers that still differ
    if table.grads.home.streamed:
        return grads.with_layers(segment.name, deferred=sums), squares
    return grads.with_layers(segment.name, stack=write(stack, sums, layer.index)), squares


def starts_in_first_group(engine: Engine) -> bool:
    """Whether the first group of microbatches is peeled off the loop, so that it need not read the accumulators.

    From device memory that costs little. From host memory, 7B on one RTX 4090 would read 13 GB, 0.5 s.
    """
    return engine.table.grads.home.streamed


def peels_last_group(engine: Engine) -> bool:
    """True if the last group of microbatches is peeled off the loop, to sum over devices what the others leave local.

    At ZeRO-2 and 3 without replicas they leave nothing local. Without `shard_outer` it saves memory there all the same:
    of two groups, no loop is left, and so no zeros for the first (7B on four GPUs: 0.5 GiB; docs/LOG.md, 2026-11-22).
    """
    table = engine.table
    in_shards = table.grads.sharded and table.outer.sharded
    return bool(collectives.active(REPLICATE) or (collectives.active(*SHARDS) and not in_shards))


def leaves_sums_local(engine: Engine) -> bool:
    """True if layers' sums are still local to a device when all microbatches are done, until `push` adds them up."""
    return bool(replicated_stacks(engine) or collectives.active(REPLICATE))


def sums_in_place(engine: Engine) -> bool:
    """Whether the products that make gradients also add them to the accumulators, which are whole and on the device.

    A product can write its result into a layer of a stack if nothing else reads the result (docs/performance.md). So
    `finish` computes the sum of squares then, once a step. Gradients of adapters are too small to gain by that, and so
    is the loop over them in `finish`: XLA:CPU compiles a small loop to one function, whose sums LLVM vectorises in
    another order than it does where accumulators are in host memory.
    """
    row = engine.table.grads
    matrices = any(p.kind is Kind.MATRIX for s in engine.model.segments for p in jax.tree.leaves(s.trained_params))
    return matrices and not row.sharded and not row.home.streamed


def replicated_stacks(engine: Engine) -> bool:
    """Whether every device has whole accumulators; `push` leaves the shards of their sums at the beginning of each."""
    return bool(collectives.active(*SHARDS)) and not engine.table.grads.sharded


def sum_outer(engine: Engine, name: str, grad: jax.Array):
    """The sum over all devices of an outer layer's gradient: the shard of this device."""
    computed_axes = engine.layouts.weights[OUTER][name].computed_axes
    if not set(SHARDS) & set(computed_axes):  # else no other device has its rows: outer.py
        reduce = engine.table.reduce
        reduce = "all_to_all" if reduce == "int8" else reduce  # sent once a step: not in 8 bits
        grad = collectives.reduce_scatter(grad, engine.params[OUTER][name], engine.layouts.master[OUTER][name], reduce)
    return collectives.add_up(grad, REPLICATE)


def finish(engine: Engine, grads: Accumulators, squares: Squares):
    """(gradients summed over all devices, by section, as the shards that the optimizer updates; global norm).

    squares: of the layers' accumulators, which `push` has completed; none of them if it sums in place.
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
    if sums_in_place(engine):
        for name in reversed(grads.layers):
            squares = _add_squares(squares, done[name], engine.layouts.master[name])
    squares = add(squares, collectives.sum_of_squares(outer, engine.layouts.master[OUTER]))
    return done, collectives.norm(squares)


def _add_squares(squares: Squares, stacks, layouts) -> Squares:
    """The sum of `squares` and the `Squares` of a segment's layers, added in the order of the backward pass."""
    n = jax.tree.leaves(stacks)[0].shape[0]

    def layer(i, squares: Squares) -> Squares:
        return add(squares, collectives.sum_of_squares(read(stacks, n - 1 - i), layouts, in_memory=True))

    return jax.lax.fori_loop(0, n, layer, squares)


def _shard_in_stack(stack: jax.Array, layout):
    """The shards of the sums in a stack of accumulators."""
    dim = layout.sharded_dim
    if dim is None:
        return collectives.same(stack, *SHARDS)
    axis = dim + 1  # behind the axis of layers
    _, devices = collectives.device_number(*SHARDS)
    return jax.lax.slice_in_dim(stack, 0, stack.shape[axis] // devices, axis=axis)
