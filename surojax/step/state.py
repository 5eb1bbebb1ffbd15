"""The training state: the argument and the result of a step."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from surojax.memory.host import Part, joined, parts, put, read, write
from surojax.memory.in_file import InFiles, store_of
from surojax.models.model import Model, Segment
from surojax.numerics.base_formats import dequantise, is_coded
from surojax.numerics.quantize import work_copy
from surojax.optim import optimizer as optim
from surojax.parallel.feed import from_host
from surojax.placement.home import DEVICE
from surojax.placement.mesh import pipeline_stages
from surojax.placement.param import OUTER, base, part_of, trainable, with_part
from surojax.step import padding


class TrainState(NamedTuple):
    """Everything that changes from step to step.

    weights, master and moments are dicts by section of the model. A segment has stacks `[L, ...]` of its layers.
    `weights` is always `master` cast to the work dtype, and with `persistent_quants` quantised after the cast, so
    checkpoints contain `master` only. What is not trained has `weights` alone, which no step changes. No random
    generator state is needed: random numbers are derived from a position and either the run's seed (initial weights,
    order of the data) or the step (rounding).
    """

    step: Any  # int32 scalar: number of optimizer steps done
    weights: Any
    master: Any
    moments: Any
    history: Any = None  # largest magnitudes in the last steps, see fp8.history_shape; None if the recipe has none


class TensorState(NamedTuple):
    """The state of one tensor, or three trees with the state of several tensors."""

    weights: Any  # work weights
    master: Any
    moments: Any


def section(state: TrainState, name: str) -> TensorState:
    """The part of a state, or of a plan, that belongs to this section."""
    return TensorState(state.weights[name], state.master[name], state.moments[name])


def from_sections(step, sections: dict[str, TensorState], history) -> TrainState:
    """The inverse of `section`: a state with these sections."""
    weights, master, moments = (
        {name: of_section[i] for name, of_section in sections.items()} for i in range(len(TensorState._fields))
    )
    return TrainState(step, weights, master, moments, history)


def segment_names(tree: dict) -> list[str]:
    """Names of the segments in a dict by section, in no particular order: all names except OUTER."""
    return [name for name in tree if name != OUTER]


def new_history(plan: TrainState):
    """A history of zeros (nothing observed) as planned; None if none is planned."""
    return jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), plan.history)


def specs_of(plan):
    """The PartitionSpecs of a plan's leaves."""
    return jax.tree.map(lambda x: x.sharding.spec, plan)


def shardings(plan):
    """The shardings of a plan's leaves."""
    return jax.tree.map(lambda x: x.sharding, plan)


def cast(tree, plan):
    """Casts arrays to the dtypes and shardings of a plan, in device memory, inside `jit`."""

    def one(x, p):
        return jax.lax.with_sharding_constraint(x.astype(p.dtype), p.sharding.with_memory_kind(DEVICE.memory_kind))

    return jax.tree.map(one, tree, plan)


def layer_of(plan):
    """The plan of one layer in device memory, from the plan of stacked arrays `[L, ...]`."""

    def one(x):
        sharding = x.sharding.with_memory_kind(DEVICE.memory_kind)
        if isinstance(sharding, jax.NamedSharding):  # the sharding of a single device has no spec
            sharding = sharding.update(spec=jax.P(*sharding.spec[1:]))
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)

    return jax.tree.map(one, plan)


def build_stacks(weights, others, layer: Callable):
    """Stacked (work weights, other arrays), inside `jit`.

    weights, others: their plans. layer: a function l -> (work weights before the cast, other arrays) of layer l.
    Each layer is written to the planned memory before the next one is made.
    """
    leaves, structure = jax.tree.flatten((weights, others))
    # Each array gets a different constant instead of zeros, see `host.allocate`. Every layer is overwritten below.
    fill = [jax.device_put(jnp.full(p.shape, i % 100, p.dtype), p.sharding) for i, p in enumerate(leaves)]
    new, built = jax.tree.unflatten(structure, fill)
    layer_plan = (layer_of(parts(weights)[0].stack), layer_of(others))
    stacks = []
    for part, planned in zip(parts(new), parts(weights), strict=True):
        number = numbers_of(planned, weights)

        def one(i, carry, start=part.start, number=number):
            stack, built = carry
            l = number(i)
            work, other = cast(layer(l), layer_plan)
            return write(stack, work, i - start), write(built, other, l)

        stack, built = jax.lax.fori_loop(part.start, part.stop, one, (part.stack, built))
        stacks.append(stack)
    return joined(stacks), built


def numbers_of(part: Part, weights) -> Callable:
    """A function from the index of an entry of a planned part of all stages' work weights to its number in all stacks.

    The index begins with part.start. In a stage, a part's layers follow those of the part before it; in the part, they
    follow those of the stage before. weights: the plan of the segment's work weights.
    """
    stages = stages_of(part.stack)
    entries = sum(other.stop - other.start for other in parts(weights)) // stages
    begin = part.start // stages
    layers = (part.stop - part.start) // stages
    if stages == 1 or layers == entries:
        return lambda i: i

    def number(i):
        stage, l = divmod(i - part.start, layers)
        return stage * entries + begin + l

    return number


def stages_of(plan) -> int:
    """The number of stages that planned stacks are divided over."""
    sharding = jax.tree.leaves(plan)[0].sharding
    return pipeline_stages(sharding.mesh) if isinstance(sharding, jax.NamedSharding) else 1


def work_function(weights, dtype) -> Callable:
    """A function from a layer's master weights to the arrays that its work weights are cast from.

    These arrays are quantised if the work weights are. weights: the plan of the segment's work weights. dtype: of work
    weights that are not quantised.
    """
    like = parts(weights)[0].stack
    return lambda master: work_copy(master, like, dtype)


def work_dtype(plan: TrainState):
    """The dtype of work weights that are not quantised."""
    return (jax.tree.leaves(plan.weights[OUTER]) or jax.tree.leaves(plan.weights))[0].dtype


def work_weights(master, plan: TrainState):
    """Work weights made from master weights, inside `jit`, one layer at a time. plan: of what is trained."""
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

    def layer_function(segment: Segment) -> Callable:
        return functools.partial(jax.jit(init_layer_function(segment, plan, optimizer)), seed)

    outer = jax.jit(init_outer_function(model, plan, optimizer), out_shardings=shardings(section(plan, OUTER)))
    return fill_state(model, plan, layer_function, outer(seed))


def init_program(model: Model, plan: TrainState, optimizer: optim.Optimizer) -> Callable:
    """A jitted function seed -> TrainState that initialises one layer after another.

    No device ever has all of a tensor that is planned as sharded. If a tensor is planned for host memory, one layer of
    it at a time is in device memory.
    """

    def build(seed):
        sections = {}
        for segment in model.segments:
            layer = init_layer_function(segment, plan, optimizer)
            planned = section(plan, segment.name)
            others = (planned.master, planned.moments)
            weights, (master, moments) = build_stacks(planned.weights, others, functools.partial(layer, seed))
            sections[segment.name] = TensorState(weights, master, moments)
        sections[OUTER] = init_outer_function(model, plan, optimizer)(seed)
        return from_sections(jnp.int32(0), sections, new_history(plan))

    return jax.jit(build, out_shardings=shardings(plan))


def load_state(
    model: Model,
    plan: TrainState,
    optimizer: optim.Optimizer,
    read_layer: Callable,
    read_outer: Callable,
    seed: int = 0,
    *,
    reads_adapters: bool = False,
) -> TrainState:
    """A new state with initial weights that are read one layer after another; adapters are drawn, or read with them.

    read_layer: (segment, l) -> numpy arrays of its layer l. read_outer: model -> numpy arrays of the outer layers. Host
    memory holds one layer of them at a time. Each device receives its shards only. seed: of the adapters.
    """

    def layer_function(segment: Segment) -> Callable:
        read_params = segment.params if reads_adapters else base(segment.params)
        planned = part_of(layer_of(initial_plan(plan, segment.name)), read_params)
        state_of = layer_state_function(segment, plan, optimizer)
        adds_adapters = segment.with_adapters is not None and not reads_adapters

        @jax.jit
        def new(read, l):
            return state_of(with_new_adapters(segment, plan, read, seed, l) if adds_adapters else read)

        def layer(l: int):
            if l < segment.num_layers:
                return new(put_planned(read_layer(segment, l), planned), l)
            everything = layer_of(initial_plan(plan, segment.name))
            return jax.jit(state_of)(put_planned(padding.zeros(segment.params), everything))

        return layer

    def state_of_outer(initial):
        return outer_state(model, plan, optimizer, initial)

    planned = initial_plan(plan, OUTER)
    on_device = jax.tree.map(lambda p: p.sharding.with_memory_kind(DEVICE.memory_kind), planned)
    initial = from_host(read_outer(model), on_device)
    outer = jax.jit(state_of_outer, out_shardings=shardings(section(plan, OUTER)))(initial)
    return fill_state(model, plan, layer_function, outer)


def fill_state(model: Model, plan: TrainState, layer_function: Callable, outer: TensorState) -> TrainState:
    """A state before the first step, filled outside `jit`; layer_function: of a segment, see `fill_layers`."""
    sections = {}
    for segment in model.segments:
        planned = section(plan, segment.name)
        others = (planned.master, planned.moments)
        weights, (master, moments) = fill_layers(planned.weights, others, layer_function(segment))
        sections[segment.name] = TensorState(weights, master, moments)
    step = from_host(np.int32(0), plan.step.sharding)
    history = from_host(new_history(plan), shardings(plan.history))
    return from_sections(step, sections | {OUTER: outer}, history)


def initial_plan(plan: TrainState, name: str):
    """The plan of a section's arrays from which its state is made: of master weights, or of weights without them."""
    weights = plan.weights[name] if name == OUTER else parts(plan.weights[name])[0].stack
    return with_part(weights, plan.master[name])


def put_planned(tree, plan):
    """Puts numpy arrays where they are planned, in device memory. For a planned Coded there may be one, or numbers."""

    def one(planned, x):
        if is_coded(planned) and not is_coded(x):
            return from_host(x, planned.codes.sharding)
        return from_host(x, shardings(planned))

    return jax.tree.map(one, plan, tree, is_leaf=is_coded)


def new_master(optimizer: optim.Optimizer, params, initial, master_plan):
    """(master weights, moments) of the trainable parameters of a tree with these initial values.

    They are in the shardings of the master weights.
    """
    master = cast(part_of(initial, master_plan), master_plan)
    return master, optim.init(optimizer, trainable(params), master, master_plan)


def layer_state_function(segment: Segment, plan: TrainState, optimizer: optim.Optimizer) -> Callable:
    """A function: initial values of a layer -> (arrays that work weights are cast from, (master weights, moments))."""
    master_plan = layer_of(plan.master[segment.name])
    work = work_function(plan.weights[segment.name], work_dtype(plan))

    def state_of(initial):
        master, moments = new_master(optimizer, segment.params, initial, master_plan)
        return work(with_part(initial, master)), (master, moments)

    return state_of


def with_new_adapters(segment: Segment, plan: TrainState, layer, seed, l):
    """The arrays of a layer of the base, with new adapters, of which DoRA's begin as lengths of what is multiplied.

    layer: its matrices may be quantised.
    """
    assert segment.with_adapters is not None
    like = part_of(parts(plan.weights[segment.name])[0].stack, base(segment.params))
    dtype = work_dtype(plan)

    def as_read(like, stored):
        return dequantise(stored, dtype) if is_coded(like) else stored

    numbers = jax.tree.map(as_read, like, work_copy(layer, like, dtype), is_leaf=is_coded)
    return segment.with_adapters(layer, seed, l, numbers)


def outer_state(model: Model, plan: TrainState, optimizer: optim.Optimizer, initial) -> TensorState:
    """The TensorState of the outer layers with these initial values."""
    master, moments = new_master(optimizer, model.outer_params, initial, plan.master[OUTER])
    return TensorState(cast(with_part(initial, master), plan.weights[OUTER]), master, moments)


def init_layer_function(segment: Segment, plan: TrainState, optimizer: optim.Optimizer) -> Callable:
    """A function (seed, l) -> the result of `layer_state_function` for a new layer, drawn at random."""
    state_of = layer_state_function(segment, plan, optimizer)
    entries = jax.tree.leaves(plan.master[segment.name])[0].shape[0]

    of_base = base(segment.params)
    is_quantised = any(map(is_coded, jax.tree.leaves(parts(plan.weights[segment.name])[0].stack, is_leaf=is_coded)))

    def state_of_new(seed, l):
        initial = segment.init(seed, l)
        if is_quantised and segment.with_adapters is not None:
            initial = with_new_adapters(segment, plan, part_of(initial, of_base), seed, l)
        return state_of(padding.zeros_beyond(segment, l, initial) if entries > segment.num_layers else initial)

    return state_of_new


def init_outer_function(model: Model, plan: TrainState, optimizer: optim.Optimizer) -> Callable:
    """A function seed -> initial TensorState of the outer layers."""
    return lambda seed: outer_state(model, plan, optimizer, model.init_outer(seed))


def fill_layers(weights, others, layer: Callable):
    """Stacked (work weights, other arrays), in memory and in files (in_file.py): `build_stacks` outside `jit`.

    weights, others: their plans. layer: a function l -> (work weights, other arrays) of layer l, which is called for
    one layer after another. Raises NvmeError if a file cannot be written.
    """
    stored = InFiles(others)

    def zeros(plan):
        """Arrays of zeros, created in the shardings of a plan."""

        def build():
            return jax.tree.map(lambda p: jax.device_put(jnp.zeros(p.shape, p.dtype), p.sharding), plan)

        return jax.jit(build, out_shardings=shardings(plan))()

    planned = stored.in_memory(others)
    files = stored.files(others)
    built = zeros(planned)
    stacks = []
    for part in parts(weights):
        number = numbers_of(part, weights)

        def replace(stack, built, work, new, i, l, start=part.start):
            return write(stack, work, i - start), write(built, new, l)

        out_shardings = (shardings(part.stack), shardings(planned))
        replace = jax.jit(replace, donate_argnums=(0, 1), out_shardings=out_shardings)
        stack = zeros(part.stack)
        for i in range(part.start, part.stop):
            l = number(i)
            work, new = layer(l)
            stack, built = jax.block_until_ready(replace(stack, built, work, stored.in_memory(new), i, l))
            for file, x in zip(files, stored.files(new), strict=True):
                if l in file.store.records:
                    file.write(l, file.from_every_stage(l, jax.device_put(x, file.layer_sharding(DEVICE))))
        stacks.append(stack)
    return joined(stacks), stored.joined(built, files)
