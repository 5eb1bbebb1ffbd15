"""Reduction of gradients: `push` completes a layer's sums, `reduced` sums the local rest over devices.

    before layer l computes:     its sums are read
    after each microbatch of it: sums = accumulated(sums, dw)     reduce-scatter (ZeRO-2 and 3), add
    after all in a group:        the sums are written; push, in the last group, first sums over all devices what is
                                 still local (ZeRO-1, replicas)
    after the backward pass:     reduced                          embedding and final norm, global norm

Accumulators in host memory lag by one layer: the sums of the layer that was differentiated last are copied out while
the next one computes.

The embedding's and the head's gradients are summed over devices once, by `reduced`. Summing the head's in parts during
the last backward pass would hide a transfer of 0.6 % of a step at most, and costs more than it hides: behind it, XLA
waits for the MLP's reduce-scatter earlier (docs/log, 2026-11-22).
"""

from typing import Any

import jax
import jax.numpy as jnp

from surojax.memory.host import allocate, index_in_loop, read, write_layer
from surojax.models.model import Segment
from surojax.models.order import loops_of, order_of
from surojax.numerics.quantized import dequantise_all
from surojax.parallel import collectives
from surojax.parallel.collectives import Squares, varying
from surojax.placement.layout import Layout
from surojax.placement.mesh import REPLICATE, SHARDS, TOKENS
from surojax.placement.param import OUTER, Kind, part_of
from surojax.placement.table import Placement
from surojax.step.passes import Lane
from surojax.step.spec import Engine
from surojax.step.stream import Flight, Stream, over

GRADS = Stream(Lane("grads", reads=True, writes=True))  # of stacks on the device, or after the last backward pass


def add(tree, more):
    """Adds gradients to accumulators, in the accumulators' dtype."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), tree, more)


class Sums:
    """Accumulates a segment's gradients: zeros, additions of microbatches, and the reduction over devices.

    in_place: see `sums_in_place`. replicated: see `replicated_stacks`.
    """

    def __init__(self, engine: Engine, segment: Segment):
        self.table = engine.table
        self.params = segment.trained_params
        self.num_layers = segment.num_layers
        self.layouts = engine.layouts.grads[segment.name]
        self.of_shards = engine.layouts.master[segment.name]
        self.in_place = sums_in_place(engine)
        self.replicated = replicated_stacks(engine.table)

    def new(self, weights, used=None) -> Flight:
        """Makes zeroed accumulators of all layers. weights: one layer's, as products read them, or their types.

        In host memory their content may be anything, since the first group does not read it. used: old stacks to reuse.
        """
        home = self.table.grads.home
        if used is not None:
            stacks = jax.tree.map(lambda x, layout: varying(x, self._axes(layout)), used, self.layouts)
            return Flight(stacks, late=self.of_layer(weights))
        homes = jax.tree.map(lambda layout: layout.home, self.layouts)
        stacks = allocate(self.of_layer(weights, self.num_layers), homes)
        return Flight(stacks, late=self.of_layer(weights) if home.streamed else None)

    def of_layer(self, weights, *lead: int):
        """Makes zeroed accumulators of one layer. weights: see `new`. lead: sizes of leading dimensions to add."""

        def gradients(weights):
            w = dequantise_all(part_of(weights, self.layouts), self.table.weights.dtype)
            if self.table.grads.sharded:
                return collectives.reduce_scatter(w, self.params, self.layouts)
            return w

        def zeros(g, layout: Layout) -> jax.Array:
            return varying(jnp.zeros((*lead, *g.shape), self.table.grads.dtype), self._axes(layout))

        return jax.tree.map(zeros, jax.eval_shape(gradients, weights), self.layouts)

    def _axes(self, layout: Layout) -> tuple[str, ...]:
        """The mesh axes over which a layer's accumulators differ."""
        # A replicated array of sharded accumulators is summed over dp_shard and cp at every push: it is the same there.
        data = (REPLICATE,) if self.table.grads.sharded and layout.sharded_dim is None else TOKENS
        return (*data, *layout.layers, *layout.computed_axes)

    def accumulated(self, sums, dw):
        """Adds a microbatch's gradients to a layer's accumulators, reduce-scattered first if these are sharded."""
        if self.table.grads.sharded:
            dw = collectives.reduce_scatter_in_turn(dw, self.params, self.of_shards, self.table.reduce)
        return add(sums, dw)

    def before_backward(self, sums: Flight, group: jax.Array | int, *, first: bool) -> Flight:
        """The flight at the start of a backward pass: the last layer's accumulators are waiting to be written.

        The pass before left layer 0's sums, which are copied out. The last layer's are read, and the pass, which begins
        by writing what is late, writes them back unchanged. The first group reads nothing: it writes zeros to the last
        layer, and the sums of that layer afterwards. group: the loop's counter.
        """
        if sums.late is None or first:
            return sums
        stack = write_layer(sums.stack, sums.late, index_in_loop(0, group))
        return Flight(stack, late=read(stack, index_in_loop(self.num_layers - 1, group)))

    def push(self, sums, *, last: bool) -> tuple[Any, Squares]:
        """Completes a layer's sums after a group of microbatches; returns (sums to write, their Squares).

        If sums are made in place, `reduced` computes their Squares. last: last group, also sum over devices what is
        still local.
        """
        if last:
            if self.replicated:
                sums = collectives.reduce_scatter_in_turn(sums, self.params, self.of_shards, self.table.reduce)
            sums = collectives.add_up(sums, REPLICATE)
        if not self.in_place:
            # As in the update, a barrier between reads and writes keeps XLA from copying the whole stack.
            sums = jax.lax.optimization_barrier(sums)
        squares = collectives.no_squares()
        if last and not self.in_place:
            squares = collectives.sum_of_squares(sums, self.of_shards)
        # Typed like layers that still differ.
        return varying(sums, TOKENS if self.replicated else (REPLICATE,)), squares

    def shards(self, sums: Flight) -> Any:
        """Converts the stacks after the last backward pass to the shards that the optimizer updates."""
        stack = sums.stack
        if sums.late is not None:
            stack = write_layer(stack, sums.late, 0)  # the backward pass ends with layer 0
        stack = collectives.same(stack, REPLICATE)
        return jax.tree.map(_shard_in_stack, stack, self.of_shards) if self.replicated else stack

    def shards_of_layer(self, sums) -> Any:
        """Converts a layer's sums after the last `push` to the shards that the optimizer updates."""

        def shard(x: jax.Array, layout: Layout) -> jax.Array:
            replicated = self.replicated and layout.sharded_dim is None
            return collectives.same(x, REPLICATE, *(layout.shards if replicated else ()))

        return jax.tree.map(shard, sums, self.of_shards)


def outer_sums(engine: Engine, weights: dict) -> dict:
    """Makes zeroed accumulators of embedding and head, sharded as their weights."""
    layouts = engine.layouts.grads[OUTER]

    def zeros(w: jax.Array, layout: Layout) -> jax.Array:
        return varying(jnp.zeros(w.shape, engine.table.grads.dtype), (*TOKENS, *layout.computed_axes))

    return jax.tree.map(zeros, part_of(weights, layouts), layouts)


def reduce_behind(dw, before):
    """Returns both behind a barrier, so that a layer's first reduction starts after `before` is computed."""
    leaves, structure = jax.tree.flatten(dw)
    first = collectives.reduced_in_order(leaves)[0]
    leaves[first], before = jax.lax.optimization_barrier((leaves[first], before))
    return structure.unflatten(leaves), before


def starts_in_first_group(table: Placement) -> bool:
    """True if the first group of microbatches is peeled off the loop, so that it need not read the accumulators.

    From device memory that costs little. From host memory, 7B on one RTX 4090 would read 13 GB, 0.5 s.
    """
    return table.grads.home.streamed


def peels_last_group(table: Placement) -> bool:
    """True if the last group is peeled off the loop, to reduce over devices what the other groups leave local.

    At ZeRO-2 and 3 without replicas they leave nothing local. Without `shard_outer` it saves memory there all the same:
    of two groups, no loop is left, and so no zeros for the first (7B on four GPUs: 0.5 GiB; docs/log, 2026-11-22).
    """
    in_shards = table.grads.sharded and table.outer.sharded
    return bool(collectives.active(REPLICATE) or (collectives.active(*SHARDS) and not in_shards))


def leaves_sums_local(table: Placement) -> bool:
    """True if layers' sums are still local to a device when all microbatches are done, until `push` adds them up."""
    return bool(replicated_stacks(table) or collectives.active(REPLICATE))


def sums_in_place(engine: Engine) -> bool:
    """True if the products that compute gradients also add them to the accumulators, unsharded and on the device.

    A product can write its result into a layer of a stack if nothing else reads the result (docs/performance.md). So
    `reduced` computes the sum of squares then, once a step. Gradients of adapters are too small to gain by that, and so
    is the loop over them in `reduced`: XLA:CPU compiles a small loop to one function, whose sums LLVM vectorises in
    another order than it does where accumulators are in host memory. Programs of one layer have no stack to add to.
    """
    row = engine.table.grads
    matrices = any(p.kind is Kind.MATRIX for s in engine.model.segments for p in jax.tree.leaves(s.trained_params))
    return matrices and not row.sharded and not row.home.streamed and not engine.table.by_layer


def squares_in_place(engine: Engine, squares: Squares, stacks: dict[str, Any]) -> Squares:
    """Adds the `Squares` of all layers' gradients to `squares`, in the order of the backward pass.

    stacks: the gradients of all layers, by segment. Layers of several segments in turn are squared in turn, so that the
    sum is the one that `push` makes where gradients are in host memory.
    """

    def body_of(name: str):
        def body(_, values, squares: Squares, flights):
            of_layer = collectives.sum_of_squares(values["grads"], engine.layouts.master[name], in_memory=True)
            return add(squares, of_layer), {}, flights

        return body

    for stretch in reversed(engine.model.stretches):
        kinds = dict(sorted((number, segment.name) for segment in stretch for number in segment.numbers))
        for loop in reversed(loops_of(order_of([*kinds.values()]))):
            lanes = {name: {"grads": GRADS} for name in loop.layers}
            bodies = {name: body_of(name) for name in loop.layers}
            flights = {name: {"grads": Flight(stacks[name])} for name in loop.layers}
            squares, _ = over(loop, lanes, bodies, squares, flights, reverse=True)
    return squares


def replicated_stacks(table: Placement) -> bool:
    """True if accumulators are unsharded; after the last `push`, the first part of each holds the reduced shard."""
    return bool(collectives.active(*SHARDS)) and not table.grads.sharded


def sum_outer(engine: Engine, name: str, grad: jax.Array):
    """Reduces an outer layer's gradient over all devices and returns this device's shard."""
    computed_axes = engine.layouts.weights[OUTER][name].computed_axes
    if not set(SHARDS) & set(computed_axes):  # else no other device has its rows: outer.py
        reduce = engine.table.reduce
        reduce = "all_to_all" if reduce == "int8" else reduce  # sent once a step: not in 8 bits
        grad = collectives.reduce_scatter(grad, engine.params[OUTER][name], engine.layouts.master[OUTER][name], reduce)
    return collectives.add_up(grad, REPLICATE)


def reduced(
    engine: Engine, sums_of: dict[str, Sums], accumulators: dict[str, Flight], d_outer: dict, squares: Squares
) -> tuple[dict[str, Any], jax.Array]:
    """Returns (gradients by section, as the shards that the optimizer updates; their global norm), over all devices.

    sums_of, accumulators: by segment, with the flight of the lane "grads". d_outer: accumulators of the outer layers.
    squares: of the layers' accumulators, from `push`; zeros for segments that sum in place.
    """
    outer = {name: sum_outer(engine, name, grad) for name, grad in d_outer.items()}
    grads: dict[str, Any] = {OUTER: outer} | {name: sums_of[name].shards(x) for name, x in accumulators.items()}
    if any(sums.in_place for sums in sums_of.values()):
        squares = squares_in_place(engine, squares, grads)
    squares = add(squares, collectives.sum_of_squares(outer, engine.layouts.master[OUTER]))
    return grads, collectives.norm(squares)


def _shard_in_stack(stack: jax.Array, layout):
    """Slices this device's shards out of a stack of unsharded accumulators."""
    dim = layout.sharded_dim
    if dim is None:
        return collectives.same(stack, *layout.shards)
    axis = dim + 1  # behind the axis of layers
    _, devices = collectives.device_number(*layout.shards)
    return jax.lax.slice_in_dim(stack, 0, stack.shape[axis] // devices, axis=axis)
