"""The update: applies the optimizer to shards of master weights and moments, one tensor after another.

If a tensor's state is in device memory, all its layers are updated at once; if any of it is in host memory, one layer
at a time. New work weights are made from the new master weights, all-gathered unless the work weights are sharded.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import LayerStack, balanced, join_parts, on_device, parts, read
from surojax.numerics.quantized import is_quantized, work_copy
from surojax.numerics.rounding import materialised
from surojax.optim import optimizer as optim
from surojax.optim.optimizer import Optimizer, Scalars, UpdateContext, UpdateRule
from surojax.parallel import collectives
from surojax.parallel.collectives import varying
from surojax.placement.layout import Layout
from surojax.placement.param import OUTER, Kind, Param, part_of, with_part
from surojax.sizes import row_parts
from surojax.step import passes
from surojax.step.passes import Lane
from surojax.step.spec import Engine
from surojax.step.state import Progress, TensorState, TrainState, from_sections, section
from surojax.step.stream import Flight, Stream, sweep


class Tensor(NamedTuple):
    """A tensor to update: its declaration, layouts, old state and gradient.

    param: its declaration. dtype: of its work weights before they are quantised. A segment's tensor has all layers.
    """

    param: Param
    optimizer: Optimizer
    master_layout: Layout
    weights_layout: Layout
    dtype: str
    state: TensorState
    grad: Any

    @property
    def rule(self) -> UpdateRule:
        """The optimizer's rule for this tensor."""
        return self.optimizer.rule(self.param)

    @property
    def how(self) -> tuple[Optimizer, Param, Layout]:
        """The leading arguments of `optim.apply` and the optimizer's other functions."""
        return self.optimizer, self.param, self.master_layout

    def updated(self, master, moments, grad, context: UpdateContext) -> TensorState:
        """Updates one layer of the tensor, or an outer tensor. master, moments, grad: in device memory."""
        work, master, moments = optim.apply(*self.how, master, grad, moments, context, self.dtype)
        return TensorState(self.work_weights(work), master, moments)

    def work_weights(self, work: jax.Array):
        """Makes work weights from updated shards: all-gathered if stored replicated, quantised like the old ones."""
        work = collectives.reshard(work, self.master_layout, self.weights_layout)
        return work_copy(work, parts(self.state.weights)[0].stack, self.dtype, collectives.largest_of_shards)


class Update:
    """Updates a training state, one tensor after another."""

    def __init__(self, engine: Engine, optimizer: Optimizer):
        self.optimizer = optimizer
        self.segments = [segment.name for segment in engine.model.segments]
        self.params = engine.params
        self.layouts = engine.layouts
        self.dtype = engine.table.weights.dtype  # of work weights before they are quantised
        self.lanes = {lane.row: lane for lane in passes.update(engine.table).lanes}
        self.lanes["layer"] = Lane("layer", reads=True)  # the layers' numbers

    def scalars(self, step: jax.Array, norm: jax.Array) -> Scalars:
        """Scalars that the updates of all tensors share. step: the number of updates before. norm: of all gradients."""
        return optim.scalars(self.optimizer, step, norm)

    @jax.named_scope("update")
    def everything(self, state: TrainState, grads, scalars: Scalars, progress: Progress) -> TrainState:
        """The state after one optimizer step; runs per device on shards, one tensor after another.

        progress: with the number of updates before.
        """
        sections: dict[str, TensorState] = {}
        done: list[TensorState] = []  # of all segments
        for name in self.segments:
            old = section(state, name)
            before = len(done)
            for tensor in self.tensors(name, old, grads[name]):
                done.append(update_layers(in_turn(tensor, done), scalars, self.lanes))
            sections[name] = as_trees(done[before:], old)
        sections[OUTER] = self.outer(section(state, OUTER), grads[OUTER], scalars, largest=self.largest_in_layer(grads))
        return from_sections(progress.next(), sections)

    def largest_in_layer(self, grads) -> int:
        """Elements of the largest tensor of a layer. grads: by section, of this device."""
        stacks = jax.tree.leaves([grads[name] for name in self.segments])
        return max(stack.size // len(stack) for stack in stacks)

    def outer(self, old: TensorState, grads, scalars: Scalars, *, largest: int) -> TensorState:
        """The state of the outer layers after one optimizer step, each array in its home.

        A tensor whose state is in host memory is updated in parts of at most `largest` elements, see
        `largest_in_layer`.
        """
        done: list[TensorState] = []
        for tensor in self.tensors(OUTER, old, grads):
            tensor = in_turn(tensor, done)
            state = tensor.state
            if on_device((state.master, state.moments)):
                done.append(tensor.updated(state.master, state.moments, tensor.grad, UpdateContext(scalars, 0)))
            else:
                done.append(update_in_parts(tensor, scalars, self.lanes, largest))
        return as_trees(done, old)

    def layer(self, name: str, old: TensorState, grads, context: UpdateContext) -> TensorState:
        """Updates one layer of a section, or one part of the rows of outer tensors, in device memory.

        old: its master weights and moments, and work weights that the new ones are quantised like. Barriers before and
        after it end the reads of a stack before the writes begin; without them XLA copies the whole stack.
        """
        (master, moments), grads = materialised(((old.master, old.moments), grads))
        old = TensorState(old.weights, master, moments)
        tensors = self.tensors(name, old, grads)
        return materialised(
            as_trees([x.updated(x.state.master, x.state.moments, x.grad, context) for x in tensors], old)
        )

    def tensors(self, name: str, old: TensorState, grads) -> list[Tensor]:
        """The tensors of a section that are trained, from the trees of its state and gradients."""
        leaves, structure = jax.tree.flatten(old.master)
        layouts = self.layouts.master[name], self.layouts.weights[name]
        trees = (self.params[name], *layouts, old.weights, old.moments, grads)
        rows = zip(leaves, *(structure.flatten_up_to(part_of(tree, old.master)) for tree in trees), strict=True)
        tensors = []
        for master, param, master_layout, weights_layout, weights, moments, grad in rows:
            state = TensorState(weights, master, moments)
            dtype = param.dtype or self.dtype
            tensors.append(Tensor(param, self.optimizer, master_layout, weights_layout, dtype, state, grad))
        return tensors


def in_turn(tensor: Tensor, done: list[TensorState]) -> Tensor:
    """Returns the tensor behind a barrier, so that it is updated after the last tensor of `done`.

    Without an order, the last layers of all tensors would be in device memory at once.
    """
    if not done:
        return tensor
    done[-1], (state, grad) = jax.lax.optimization_barrier((done[-1], (tensor.state, tensor.grad)))
    return tensor._replace(state=state, grad=grad)


def as_trees(done: list[TensorState], old: TensorState) -> TensorState:
    """Builds the trees of the new state from updated tensors: the inverse of `tensors`."""
    structure = jax.tree.structure(old.master)
    weights, master, moments = (structure.unflatten([tensor[i] for tensor in done]) for i in range(3))
    return TensorState(with_part(old.weights, weights), master, moments)


def update_layers(tensor: Tensor, scalars: Scalars, lanes: dict[str, Lane]) -> TensorState:
    """Updates all layers of a segment's tensor. lanes: see `Update`."""
    weights, master, moments = tensor.state
    layers = collectives.first_layer(len(master)) + jnp.arange(len(master))

    def work_of_layer(values):
        return {"weights": tensor.work_weights(values["master"].astype(tensor.dtype))}

    if on_device((master, moments, tensor.grad)):
        # All layers in one pass, if the rule allows it: a loop would copy each slice before overwriting it.
        # as_updated: the pass itself returns the new work weights, in the form in which they are stored.
        as_updated = tensor.master_layout.stored == tensor.weights_layout.stored
        as_updated = as_updated and on_device(weights) and not is_quantized(weights)
        apply_to_stack = tensor.rule.apply_to_stack(master, moments)
        if apply_to_stack:
            size = master.size // len(master)
            context = optim.stack_context(tensor.param, tensor.master_layout, UpdateContext(scalars, layers), size)
            dtype = tensor.dtype if as_updated else None
            work, master, moments = apply_to_stack(master, tensor.grad, moments, context, dtype)
            if not as_updated:
                only_read = lanes | {"master": lanes["master"]._replace(writes=False, behind=0)}
                work, _ = sweep_parts(only_read, work_of_layer, weights, {"master": master})
            return TensorState(work, master, moments)
    together = segment_layers_together(tensor)
    stacks = {"master": master, "moments": moments, "grads": tensor.grad, "layer": layers}
    if together > 1:
        return update_groups(tensor, scalars, lanes, stacks, together)

    def layer(values):
        context = UpdateContext(scalars, values["layer"])
        return tensor.updated(values["master"], values["moments"], values["grads"], context)._asdict()

    work, stacks = sweep_parts(lanes, layer, weights, stacks)
    return TensorState(work, stacks["master"], stacks["moments"])


def segment_layers_together(tensor: Tensor) -> int:
    """The number of layers of a segment's tensor that are updated together."""
    layers_by_part = [part.stop - part.start for part in parts(tensor.state.weights)]
    devices = collectives.device_number(*tensor.master_layout.stored_axes)[1]
    return optim.layers_together(tensor.rule, layers_by_part, devices)


def update_groups(
    tensor: Tensor, scalars: Scalars, lanes: dict[str, Lane], stacks: dict[str, Any], together: int
) -> TensorState:
    """Updates a segment's tensor, `together` layers at a time. stacks: see `update_layers`."""

    def grouped(tree):
        return jax.tree.map(lambda x: x.reshape(-1, together, *x.shape[1:]), tree)

    def single(tree):
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)

    def group(values):
        context = UpdateContext(scalars, values["layer"])
        old = values["master"], values["grads"], values["moments"]
        work, *new = optim.apply_to_group(*tensor.how, *old, context, tensor.dtype)
        return {"weights": jax.vmap(tensor.work_weights)(work)} | dict(zip(("master", "moments"), new, strict=True))

    work, stacks = sweep_parts(lanes, group, grouped(tensor.state.weights), grouped(stacks))
    return TensorState(single(work), single(stacks["master"]), single(stacks["moments"]))


def sweep_parts(lanes: dict[str, Lane], function: Callable, weights, stacks: dict[str, Any]) -> tuple[Any, dict]:
    """Runs `sweep_part` for each part of the work weights in order; returns (weights, stacks)."""
    done = []
    for part in parts(weights):
        if done:
            # The sweep reads what the one before wrote last. If XLA (0.12) sees that, it crashes.
            stacks = jax.lax.optimization_barrier(stacks)
        stack, stacks = sweep_part(lanes, function, part, stacks)
        done.append(stack)
    return join_parts(done), stacks


def sweep_part(
    lanes: dict[str, Lane], function: Callable, part: LayerStack, stacks: dict[str, Any]
) -> tuple[Any, dict]:
    """Computes results = function(values) for each layer of a part of the work weights; returns (weights, stacks).

    lanes: of "weights" and of each of the stacks, whose layers function reads and returns by these names, as the lanes
    say. Layer l has index l - part.start in the stacks of the part, and index l in the others.
    """
    is_streamed = not on_device((part.stack, stacks))
    written = [name for name in stacks if lanes[name].writes]
    order = balanced([stacks[name] for name in written], [stacks[name] for name in stacks if name not in written])

    def in_step(lane: Lane) -> Lane:
        """Returns the lane, which reads ahead and writes behind only if stacks are in host memory."""
        return lane._replace(ahead=lane.reads and is_streamed, behind=lane.writes and is_streamed)

    streams = {"weights": Stream(in_step(lanes["weights"]), lambda l: l - part.start)}
    for name, stack in stacks.items():
        leaves = len(jax.tree.leaves(stack)) if name in written else 0
        streams[name] = Stream(in_step(lanes[name]), are_read_first=order[:leaves])
        order = order[leaves:]
    # Zeros are written where the first layer's weights follow.
    late = jax.tree.map(jnp.zeros_like, read(part.stack, 0)) if streams["weights"].lane.behind else None
    flights = {"weights": Flight(part.stack, late=late)}
    flights |= {name: streams[name].begin(stack, part.start) for name, stack in stacks.items()}

    def body(values, carry: None):
        # The barrier ends the reads before the writes begin; without it XLA fuses slices of the old stack into the
        # function and then has to copy the entire stack, once a layer.
        if is_streamed:
            values = dict(zip(values, materialised(list(values.values())), strict=True))
            results = function(values)
            return carry, dict(zip(results, materialised(list(results.values())), strict=True))
        return carry, function(values | materialised({name: values[name] for name in written}))

    last = part.stop - 1
    in_body = 2 if is_streamed and part.stop - part.start >= 4 else 1
    _, flights = sweep(range(part.start, part.stop), streams, body, None, flights, in_body=in_body)
    ended = {name: stream.end(flights[name], last) for name, stream in streams.items()}
    return ended.pop("weights"), ended


def update_in_parts(tensor: Tensor, scalars: Scalars, lanes: dict[str, Lane], largest: int) -> TensorState:
    """Updates an outer tensor in groups of rows with at most `largest` elements each."""
    weights, master, moments = tensor.state
    rows = master.shape[0]
    n = 1 if tensor.param.kind is Kind.VECTOR else row_parts(rows, master.size, largest)

    def split(x):
        return x.reshape(n, -1, *x.shape[1:])

    def join(stack, x):
        return stack.reshape(x.shape)

    def update_part(values):
        context = UpdateContext(scalars, part=(values["layer"], n))
        old = values["master"], values["grads"], values["moments"]
        work, *new = optim.apply(*tensor.how, *old, context, weights.dtype)
        return {"weights": work} | dict(zip(("master", "moments"), new, strict=True))

    if tensor.master_layout.stored == tensor.weights_layout.stored:
        work = split(weights)
    else:
        work = varying(jnp.zeros(jax.eval_shape(split, master).shape, weights.dtype), tensor.master_layout.stored_axes)
    stacks = jax.tree.map(split, {"master": master, "moments": moments, "grads": tensor.grad})
    work, new = sweep_part(lanes, update_part, LayerStack(work, 0, n), stacks | {"layer": jnp.arange(n)})
    work = collectives.reshard(join(work, master), tensor.master_layout, tensor.weights_layout)
    return TensorState(work, *jax.tree.map(join, (new["master"], new["moments"]), (master, moments)))
