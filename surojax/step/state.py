"""The training state: what a step takes and returns."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import joined, parts, put, read, write
from surojax.memory.nvme import InFile, store_of
from surojax.models.model import Model, Segment
from surojax.numerics.quantize import work_copy
from surojax.optim import optimizer as optim
from surojax.placement.home import DEVICE
from surojax.placement.param import OUTER


class TrainState(NamedTuple):
    """Everything that changes from step to step. weights, master and moments are dicts by section of the model: stacks
    `[L, ...]` of each segment's layers, and the outer parameters.

    `weights` is always `master` cast to the work dtype, quantised from there with `persistent_quants`, so checkpoints
    hold `master` only. Randomness has no state: every draw is derived from the run's seed (weights, order of the data)
    or from the step (rounding), and a position.
    """

    step: Any  # int32 scalar: optimizer steps done
    weights: Any
    master: Any
    moments: Any
    history: Any = None  # largest magnitudes in the last steps, fp8.history_shape; None for recipes without


class TensorState(NamedTuple):
    """State of one tensor, or trees of the state of several."""

    weights: Any  # work weights
    master: Any
    moments: Any


def section(state: TrainState, name: str) -> TensorState:
    """The state of a section; also of a plan."""
    return TensorState(state.weights[name], state.master[name], state.moments[name])


def from_sections(step, sections: dict[str, TensorState], history) -> TrainState:
    """A state of the states of its sections."""
    weights, master, moments = (
        {name: of_section[i] for name, of_section in sections.items()} for i in range(len(TensorState._fields))
    )
    return TrainState(step, weights, master, moments, history)


def segment_names(tree: dict) -> list[str]:
    """The sections of layers of a tree by section, in order."""
    return [name for name in tree if name != OUTER]


def new_history(plan: TrainState):
    """An empty history as planned, or None."""
    return jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), plan.history)


def specs_of(plan):
    """The PartitionSpecs of a plan's leaves."""
    return jax.tree.map(lambda x: x.sharding.spec, plan)


def shardings(plan):
    """The shardings of a plan's leaves."""
    return jax.tree.map(lambda x: x.sharding, plan)


def cast(tree, plan):
    """Arrays in the dtypes and shardings of a plan, in device memory, inside `jit`."""

    def one(x, p):
        return jax.lax.with_sharding_constraint(x.astype(p.dtype), p.sharding.with_memory_kind(DEVICE.memory_kind))

    return jax.tree.map(one, tree, plan)


def layer_of(plan):
    """The plan of one layer, in device memory, from that of stacked arrays `[L, ...]`."""

    def one(x):
        sharding = x.sharding.with_memory_kind(DEVICE.memory_kind)
        if isinstance(sharding, jax.NamedSharding):  # one of a single device has no spec
            sharding = sharding.update(spec=jax.P(*sharding.spec[1:]))
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)

    return jax.tree.map(one, plan)


def build_stacks(weights, others, layer: Callable):
    """Stacked (work weights, other arrays) as planned, inside `jit`, from a function l -> those of layer l: only one
    layer at a time is anywhere but where the stack rests."""
    leaves, structure = jax.tree.flatten((weights, others))
    # A constant for each, not zeros: see `host.allocate`. Every layer of them is written.
    fill = [jax.device_put(jnp.full(p.shape, i % 100, p.dtype), p.sharding) for i, p in enumerate(leaves)]
    new, built = jax.tree.unflatten(structure, fill)
    of_layer, stacks = (layer_of(parts(weights)[0].stack), layer_of(others)), []
    for part in parts(new):

        def one(l, carry, start=part.start):
            work, rest = cast(layer(l), of_layer)
            return write(carry[0], work, l - start), write(carry[1], rest, l)

        stack, built = jax.lax.fori_loop(part.start, part.stop, one, (part.stack, built))
        stacks.append(stack)
    return joined(stacks), built


def work_function(weights, dtype) -> Callable:
    """A function of the master weights of a layer to what its work weights are cast from: quantised if those are.

    weights: the plan of the segment's stacks. dtype: of weights that are not quantised.
    """
    like = parts(weights)[0].stack
    return lambda master: work_copy(master, like, dtype)


def work_dtype(plan: TrainState):
    """The dtype of work weights that are not quantised."""
    return jax.tree.leaves(plan.weights[OUTER])[0].dtype


def work_weights(master, plan: TrainState):
    """The work copy of master weights, inside `jit`, a layer at a time."""
    weights = {}
    for name in segment_names(plan.weights):
        work = work_function(plan.weights[name], work_dtype(plan))

        def layer(l, work=work, stacks=master[name]):
            return work(read(stacks, l)), ()

        weights[name], _ = build_stacks(plan.weights[name], (), layer)
    return weights | {OUTER: cast(put(master[OUTER], DEVICE), plan.weights[OUTER])}


def init_state(model: Model, plan: TrainState, optimizer: optim.Optimizer, seed: int) -> TrainState:
    """A new state, each array created in its own sharding and memory; see `init_program`."""
    if store_of(plan) is None:
        return init_program(model, plan, optimizer)(seed)
    sections: dict[str, TensorState] = {}
    for segment in model.segments:
        layer = jax.jit(init_layer_function(segment, plan, optimizer))
        weights, *others = section(plan, segment.name)
        stacks, (master, moments) = fill_layers(weights, tuple(others), functools.partial(layer, seed))
        sections[segment.name] = TensorState(stacks, master, moments)
    outer = jax.jit(init_outer_function(model, plan, optimizer), out_shardings=shardings(section(plan, OUTER)))
    sections[OUTER] = outer(seed)
    step = jax.device_put(jnp.int32(0), plan.step.sharding)
    history = jax.device_put(new_history(plan), shardings(plan.history))
    return from_sections(step, sections, history)


def init_program(model: Model, plan: TrainState, optimizer: optim.Optimizer) -> Callable:
    """A jitted seed -> TrainState that draws the blocks layer by layer.

    A tensor that is planned in shards is never unsharded on a device, and of one that is planned for host memory, one
    layer at a time is on the device.
    """

    def build(seed):
        sections = {}
        for segment in model.segments:
            layer = init_layer_function(segment, plan, optimizer)
            weights, *others = section(plan, segment.name)
            weights, (master, moments) = build_stacks(weights, tuple(others), functools.partial(layer, seed))
            sections[segment.name] = TensorState(weights, master, moments)
        sections[OUTER] = init_outer_function(model, plan, optimizer)(seed)
        return from_sections(jnp.int32(0), sections, new_history(plan))

    return jax.jit(build, out_shardings=shardings(plan))


def load_state(
    model: Model, plan: TrainState, optimizer: optim.Optimizer, layer: Callable, outer: Callable
) -> TrainState:
    """A new state with these weights, read layer by layer, so that host memory holds one layer of them at a time.

    layer: (segment, l) -> the numpy arrays of its layer l; outer: model -> those of the outer layers. Arrays are placed
    as planned, each device's shard alone.
    """
    sections: dict[str, TensorState] = {}
    for segment in model.segments:
        weights, *others = section(plan, segment.name)
        master_plan = layer_of(plan.master[segment.name])
        work = work_function(plan.weights[segment.name], work_dtype(plan))

        def placed(arrays, segment=segment, work=work, master_plan=master_plan):
            master, moments = new_master(optimizer, segment.params, arrays, master_plan)
            return work(master), (master, moments)

        placed = jax.jit(placed)

        def of_layer(l: int, segment=segment, placed=placed, master_plan=master_plan):
            return placed(jax.device_put(layer(segment, l), shardings(master_plan)))

        stacks, (master, moments) = fill_layers(weights, tuple(others), of_layer)
        sections[segment.name] = TensorState(stacks, master, moments)

    def placed_outer(arrays):
        master, moments = new_master(optimizer, model.outer_params, arrays, plan.master[OUTER])
        return TensorState(cast(master, plan.weights[OUTER]), master, moments)

    on_device = jax.tree.map(lambda p: p.sharding.with_memory_kind(DEVICE.memory_kind), plan.master[OUTER])
    arrays = jax.device_put(outer(model), on_device)
    sections[OUTER] = jax.jit(placed_outer, out_shardings=shardings(section(plan, OUTER)))(arrays)
    step = jax.device_put(jnp.int32(0), plan.step.sharding)
    history = jax.device_put(new_history(plan), shardings(plan.history))
    return from_sections(step, sections, history)


def new_master(optimizer: optim.Optimizer, params, drawn, master_plan):
    """(master weights, moments) of new parameters, in the master's sharding."""
    master = cast(drawn, master_plan)
    return master, optim.init(optimizer, params, master, master_plan)


def init_layer_function(segment: Segment, plan: TrainState, optimizer: optim.Optimizer) -> Callable:
    """A function (seed, l) -> (what work weights are cast from, (master weights, moments)) of a new layer."""
    master_plan = layer_of(plan.master[segment.name])
    work = work_function(plan.weights[segment.name], work_dtype(plan))

    def layer(seed, l):
        master, moments = new_master(optimizer, segment.params, segment.init(seed, l), master_plan)
        return work(master), (master, moments)

    return layer


def init_outer_function(model: Model, plan: TrainState, optimizer: optim.Optimizer) -> Callable:
    """A function seed -> TensorState of new outer layers."""

    def outer(seed):
        master, moments = new_master(optimizer, model.outer_params, model.init_outer(seed), plan.master[OUTER])
        return TensorState(cast(master, plan.weights[OUTER]), master, moments)

    return outer


def fill_layers(weights, others, layer: Callable):
    """Stacked (work weights, other arrays) as planned, in memory and in files (nvme.py), from a function l -> those of
    layer l, which is called for one layer after another: `build_stacks` outside `jit`.

    Raises NvmeError when a file cannot be written.
    """
    leaves, structure = jax.tree.flatten(others)
    in_file = [isinstance(x, InFile) for x in leaves]
    pick = lambda leaves, want: [x for x, f in zip(leaves, in_file, strict=True) if f == want]
    planned, files, stacks = pick(leaves, False), pick(leaves, True), []
    zeros = lambda p: jax.device_put(jnp.zeros(p.shape, p.dtype), p.sharding)
    empty = lambda plan: jax.jit(lambda: jax.tree.map(zeros, plan), out_shardings=shardings(plan))()
    built = empty(planned)
    for part in parts(weights):

        def replace(stack, built, work, rest, l, start=part.start):
            return write(stack, work, l - start), write(built, rest, l)

        where = shardings(part.stack), shardings(planned)
        replace = jax.jit(replace, donate_argnums=(0, 1), out_shardings=where)
        stack = empty(part.stack)
        for l in range(part.start, part.stop):
            work, new = layer(l)
            new = structure.flatten_up_to(new)
            stack, built = jax.block_until_ready(replace(stack, built, work, pick(new, False), l))
            for file, x in zip(files, pick(new, True), strict=True):
                file.write(l, jax.device_get(x))
        stacks.append(stack)
    built, files = iter(built), iter(files)
    return joined(stacks), structure.unflatten([next(files if f else built) for f in in_file])
