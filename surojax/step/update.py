"""The update: applies the optimizer to shards of master weights and moments, one tensor after another.

If a tensor's state is in device memory, all its layers are updated at once; if any of it is in host memory, one layer
at a time. New work weights are made from the new master weights, all-gathered unless the work weights are sharded.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import Part, balanced, joined, on_device, parts, read
from surojax.numerics.quantize import is_quantized, work_copy
from surojax.numerics.rounding import materialised
from surojax.optim import optimizer as optim
from surojax.optim.optimizer import Optimizer, Scalars, UpdateContext
from surojax.parallel import collectives
from surojax.parallel.collectives import varying
from surojax.placement.layout import Layout
from surojax.placement.param import OUTER, Kind, Param, part_of, with_part
from surojax.sizes import divisor
from surojax.step import passes
from surojax.step.passes import Lane
from surojax.step.spec import Engine
from surojax.step.state import TensorState, TrainState, from_sections, section
from surojax.step.stream import Flight, Stream, sweep


class Tensor(NamedTuple):
    """A tensor to update: its declaration, layouts, old state and gradient. A segment's tensor has all layers."""

    param: Param
    master_layout: Layout
    weights_layout: Layout
    state: TensorState
    grad: Any


@jax.named_scope("update")
def update(engine: Engine, optimizer: Optimizer, state: TrainState, grads, scalars: Scalars, history) -> TrainState:
    """The state after one optimizer step; runs per device on shards, one tensor after another."""
    sections: dict[str, TensorState] = {}
    done: list[TensorState] = []  # of all segments
    for segment in engine.model.segments:
        old = section(state, segment.name)
        before = len(done)
        for tensor in tensors(engine, segment.name, old, grads[segment.name]):
            done.append(update_layers(engine, optimizer, in_turn(tensor, done), scalars))
        sections[segment.name] = as_trees(done[before:], old)
    sections[OUTER] = update_outer(engine, optimizer, section(state, OUTER), grads, scalars)
    return from_sections(state.step + 1, sections, history)


def tensors(engine: Engine, name: str, old: TensorState, grads) -> list[Tensor]:
    """The tensors of a section that are trained, from the trees of its state and gradients."""
    leaves, structure = jax.tree.flatten(old.master)
    layouts = engine.layouts
    trees = (engine.params[name], layouts.master[name], layouts.weights[name], old.weights, old.moments, grads)
    rows = zip(leaves, *(structure.flatten_up_to(part_of(tree, old.master)) for tree in trees), strict=True)
    return [
        Tensor(param, master_layout, weights_layout, TensorState(weights, master, moments), grad)
        for master, param, master_layout, weights_layout, weights, moments, grad in rows
    ]


def in_turn(tensor: Tensor, done: list[TensorState]) -> Tensor:
    """The tensor, unchanged, to be updated after the last one of `done`.

    Without an order, the last layers of all tensors would be in device memory at once.
    """
    if not done:
        return tensor
    done[-1], (state, grad) = jax.lax.optimization_barrier((done[-1], (tensor.state, tensor.grad)))
    return tensor._replace(state=state, grad=grad)


def as_trees(done: list[TensorState], old: TensorState) -> TensorState:
    """The inverse of `tensors`: the trees of the new state."""
    structure = jax.tree.structure(old.master)
    weights, master, moments = (structure.unflatten([tensor[i] for tensor in done]) for i in range(3))
    return TensorState(with_part(old.weights, weights), master, moments)


def update_layers(engine: Engine, optimizer: Optimizer, tensor: Tensor, scalars: Scalars) -> TensorState:
    """The state of a segment's tensor, all layers, after the update."""
    weights, master, moments = tensor.state
    lanes = lanes_of(engine)
    layers = collectives.first_layer(len(master)) + jnp.arange(len(master))
    like = parts(weights)[0].stack

    def work_of_layer(values):
        return {"weights": work_weights(engine, tensor, values["master"].astype(work_dtype(engine, tensor)), like)}

    if on_device((master, moments, tensor.grad)):
        # All layers in one pass, if the rule allows it: a loop would copy each slice before overwriting it.
        # as_updated: the pass itself returns the new work weights, in the form in which they are stored.
        as_updated = tensor.master_layout.stored == tensor.weights_layout.stored
        as_updated = as_updated and on_device(weights) and not is_quantized(weights)
        dtype = work_dtype(engine, tensor) if as_updated else None
        apply_to_stack = optimizer.rule(tensor.param).apply_to_stack(master, moments)
        if apply_to_stack:
            size = master.size // len(master)
            context = optim.stack_context(tensor.param, tensor.master_layout, UpdateContext(scalars, layers), size)
            work, master, moments = apply_to_stack(master, tensor.grad, moments, context, dtype)
            if not as_updated:
                only_read = lanes | {"master": lanes["master"]._replace(writes=False, behind=0)}
                work, _ = sweep_parts(only_read, work_of_layer, weights, {"master": master})
            return TensorState(work, master, moments)
    together = layers_together(optimizer, tensor)
    if together > 1:
        return update_groups(engine, optimizer, tensor, scalars, layers, together)

    def layer(values):
        old = values["master"], values["moments"]
        inputs = values["grads"], values["layer"]
        work, (master, moments) = update_tensor(engine, optimizer, tensor, scalars, like, old, inputs)
        return {"weights": work, "master": master, "moments": moments}

    stacks = {"master": master, "moments": moments, "grads": tensor.grad, "layer": layers}
    work, stacks = sweep_parts(lanes, layer, weights, stacks)
    return TensorState(work, stacks["master"], stacks["moments"])


def lanes_of(engine: Engine) -> dict[str, Lane]:
    """The lanes of an update by name; "layer" has the layers' numbers."""
    return {lane.row: lane for lane in passes.update(engine).lanes} | {"layer": Lane("layer", reads=True)}


def layers_together(optimizer: Optimizer, tensor: Tensor) -> int:
    """The number of layers of a segment's tensor that are updated together."""
    of_parts = [part.stop - part.start for part in parts(tensor.state.weights)]
    devices = collectives.device_number(*tensor.master_layout.stored_axes)[1]
    return optim.layers_together(optimizer.rule(tensor.param), of_parts, devices)


def update_groups(
    engine: Engine, optimizer: Optimizer, tensor: Tensor, scalars: Scalars, layers: jax.Array, together: int
) -> TensorState:
    """The state of a segment's tensor after an update of `together` layers at a time."""
    weights, master, moments = tensor.state
    layout = tensor.master_layout
    dtype = engine.table.weights.dtype

    def grouped(tree):
        return jax.tree.map(lambda x: x.reshape(-1, together, *x.shape[1:]), tree)

    def single(tree):
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)

    like = parts(weights)[0].stack

    def group(values):
        context = UpdateContext(scalars, values["layer"])
        work, *new = optim.apply_to_group(
            optimizer, tensor.param, layout, values["master"], values["grads"], values["moments"], context, dtype
        )
        work = jax.vmap(lambda layer: work_weights(engine, tensor, layer, like))(work)
        return {"weights": work} | dict(zip(("master", "moments"), new, strict=True))

    stacks = {"master": master, "moments": moments, "grads": tensor.grad, "layer": layers}
    work, stacks = sweep_parts(lanes_of(engine), group, grouped(weights), grouped(stacks))
    return TensorState(single(work), single(stacks["master"]), single(stacks["moments"]))


def update_tensor(engine: Engine, optimizer: Optimizer, tensor: Tensor, scalars: Scalars, like, old, inputs):
    """(work weights, (master weights, moments)) of one layer's tensor, or of an outer tensor, after the update.

    like: the old work weights, or anything of the same structure. old: (master weights, moments). inputs: (gradient,
    number of the layer). old and inputs are in device memory.
    """
    master, moments = old
    grad, layer = inputs
    dtype = work_dtype(engine, tensor)
    context = UpdateContext(scalars, layer)
    work, master, moments = optim.apply(
        optimizer, tensor.param, tensor.master_layout, master, grad, moments, context, dtype
    )
    return work_weights(engine, tensor, work, like), (master, moments)


def work_weights(engine: Engine, tensor: Tensor, work: jax.Array, like):
    """New work weights from shards of them: all-gathered if work weights are replicated, quantised if `like` is."""
    work = collectives.reshard(work, tensor.master_layout, tensor.weights_layout)
    return work_copy(work, like, engine.table.weights.dtype, collectives.largest_of_shards)


def work_dtype(engine: Engine, tensor: Tensor) -> str:
    """The dtype of a tensor's work weights before they are quantised."""
    return tensor.param.dtype or engine.table.weights.dtype


def sweep_parts(lanes: dict[str, Lane], function: Callable, weights, stacks: dict[str, Any]) -> tuple[Any, dict]:
    """(weights, stacks) after a `sweep_part` of each part of the work weights in turn."""
    done = []
    for part in parts(weights):
        if done:
            # The sweep reads what the one before wrote last. If XLA (0.12) sees that, it crashes.
            stacks = jax.lax.optimization_barrier(stacks)
        stack, stacks = sweep_part(lanes, function, part, stacks)
        done.append(stack)
    return joined(done), stacks


def sweep_part(lanes: dict[str, Lane], function: Callable, part: Part, stacks: dict[str, Any]) -> tuple[Any, dict]:
    """(weights, stacks) after results = function(values) of one layer of a part of the work weights after another.

    lanes: of "weights" and of each of the stacks, whose layers function reads and returns by these names, as the lanes
    say. Layer l has index l - part.start in the stacks of the part, and index l in the others.
    """
    is_streamed = not on_device((part.stack, stacks))
    written = [name for name in stacks if lanes[name].writes]
    order = balanced([stacks[name] for name in written], [stacks[name] for name in stacks if name not in written])

    def in_step(lane: Lane) -> Lane:
        """A lane that moves like those in host memory."""
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


def update_outer(engine: Engine, optimizer: Optimizer, old: TensorState, grads, scalars: Scalars) -> TensorState:
    """The state of the outer layers after one optimizer step, each array in its home.

    grads: of all sections. A tensor whose state is in host memory is updated in parts that are no larger than the
    largest tensor of a layer.
    """
    stacks = jax.tree.leaves([grads[segment.name] for segment in engine.model.segments])
    largest = max(stack.size // len(stack) for stack in stacks)
    done: list[TensorState] = []
    for tensor in tensors(engine, OUTER, old, grads[OUTER]):
        tensor = in_turn(tensor, done)
        state = tensor.state
        if on_device((state.master, state.moments)):
            old_state = (state.master, state.moments)
            inputs = (tensor.grad, 0)
            work, new = update_tensor(engine, optimizer, tensor, scalars, state.weights, old_state, inputs)
            done.append(TensorState(work, *new))
        else:
            done.append(update_in_parts(engine, optimizer, tensor, scalars, largest))
    return as_trees(done, old)


def update_in_parts(
    engine: Engine, optimizer: Optimizer, tensor: Tensor, scalars: Scalars, largest: int
) -> TensorState:
    """The state of an outer tensor after an update in parts: groups of rows with at most `largest` elements each."""
    weights, master, moments = tensor.state
    rows = master.shape[0]
    n = 1 if tensor.param.kind is Kind.VECTOR else divisor(rows, -(-master.size // largest))

    def split(x):
        return x.reshape(n, -1, *x.shape[1:])

    def join(stack, x):
        return stack.reshape(x.shape)

    def update_part(values):
        context = UpdateContext(scalars, part=(values["layer"], n))
        state = values["master"], values["grads"], values["moments"]
        work, *new = optim.apply(optimizer, tensor.param, tensor.master_layout, *state, context, weights.dtype)
        return {"weights": work} | dict(zip(("master", "moments"), new, strict=True))

    if tensor.master_layout.stored == tensor.weights_layout.stored:
        work = split(weights)
    else:
        work = varying(jnp.zeros(jax.eval_shape(split, master).shape, weights.dtype), tensor.master_layout.stored_axes)
    stacks = jax.tree.map(split, {"master": master, "moments": moments, "grads": tensor.grad})
    work, new = sweep_part(lanes_of(engine), update_part, Part(work, 0, n), stacks | {"layer": jnp.arange(n)})
    work = collectives.reshard(join(work, master), tensor.master_layout, tensor.weights_layout)
    return TensorState(work, *jax.tree.map(join, (new["master"], new["moments"]), (master, moments)))
