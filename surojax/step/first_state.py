"""The training state before the first step: built one layer after another, each array in its own sharding and memory.

New states have random initial weights (`init_state`) or weights that are read (`load_state`). `work_weights` makes work
weights from master weights, as checkpoints do.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from surojax.memory.by_host import by_host
from surojax.memory.host import join_parts, parts, put, read, write_layer
from surojax.memory.in_file import InFiles, TableInFile, has_room
from surojax.models.model import Model, Segment
from surojax.numerics.base_formats import dequantise, is_coded
from surojax.numerics.quantized import work_copy
from surojax.optim import optimizer as optim
from surojax.parallel.feed import from_host
from surojax.placement.home import DEVICE, HOST
from surojax.placement.mesh import pipeline_stages
from surojax.placement.param import OUTER, base, part_of, trainable, with_part
from surojax.step import padding
from surojax.step.state import (
    Progress,
    TensorState,
    TrainState,
    cast_to_plan,
    from_sections,
    layer_of,
    section,
    segment_names,
    shardings,
    tables_in_files,
)


def new_history(plan: TrainState):
    """A history of zeros (nothing observed) as planned; None if none is planned."""
    return jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), plan.history)


def build_stacks(weights, others, layer: Callable, inputs: Callable[[int], Any]):
    """Stacked (work weights, other arrays), in memory and in files, of one layer after another (memory/by_host.py).

    weights, others: their plans. layer: a function (inputs, l) -> (work weights before the cast, other arrays) of layer
    l, compiled once for each part of the work weights. inputs: a function l -> inputs, which a thread calls while the
    layer before is built. Raises what that raises, and NvmeError if a file cannot be written.
    """
    in_files, part_files = InFiles(others), [InFiles(part.stack) for part in parts(weights)]
    in_memory = [files.in_memory(part.stack) for files, part in zip(part_files, parts(weights), strict=True)]
    stacks, built = allocated((in_memory, in_files.in_memory(others)))
    programs = [layer_program(part.stack, others, layer) for part in parts(weights)]
    order = entries(weights)

    def compute(number: int, layer_inputs):
        nonlocal built
        part, i, l = order[number]
        stacks[part], built, to_files = programs[part](stacks[part], built, layer_inputs, i, l)
        # On virtual CPU devices several programs with collectives in flight can block each other.
        return jax.block_until_ready((to_files, stacks[part], built))[0]

    def write_files(number: int, to_files) -> None:
        part, i, l = order[number]
        weight_rounds, other_rounds = to_files
        part_files[part].write([i], weight_rounds)
        in_files.write([l], other_rounds)

    by_host(range(len(order)), lambda number: inputs(order[number].l), compute, write_files)
    rows = zip(part_files, stacks, parts(weights), strict=True)
    work = join_parts([files.joined(stack, files.files(part.stack)) for files, stack, part in rows])
    return work, in_files.joined(built, in_files.files(others))


def layer_program(stack, others, layer: Callable) -> Callable:
    """A jitted (stacks, built, inputs, i, l) -> (stacks, built, rounds for files), which builds layer l.

    stack: the plan of a part of the work weights; stacks: those in memory, of which entry i is replaced. others, layer:
    see `build_stacks`. built: the other arrays that are in memory. Both are updated in place. rounds for files: of the
    work weights, and of the others.
    """
    in_files, weight_files = InFiles(others), InFiles(stack)
    layer_plan = layer_of((stack, others))

    def build(stacks, built, inputs, i, l):
        work, other = cast_to_plan(layer(inputs, l), layer_plan)
        to_files = weight_files.repeated(weight_files.files(work)), in_files.repeated(in_files.files(other))
        return (
            write_layer(stacks, weight_files.in_memory(work), i),
            write_layer(built, in_files.in_memory(other), l),
            to_files,
        )

    file_rounds = weight_files.planned_round(DEVICE), in_files.planned_round(DEVICE)
    planned = (weight_files.in_memory(stack), in_files.in_memory(others), file_rounds)
    return jax.jit(build, donate_argnums=(0, 1), out_shardings=shardings(planned))


def allocated(plan):
    """Stacks as planned, with a layer of zeros; every layer has to be written before it is read.

    XLA replaces a constant in host memory only if something is written into it, see `host.allocate`: without the layer
    of zeros, all of a stack would be in device memory first. Equal constants would be copied, hence i % 100.
    """

    def build():
        leaves, structure = jax.tree.flatten(plan)
        fill = [jax.device_put(jnp.full(p.shape, i % 100, p.dtype), p.sharding) for i, p in enumerate(leaves)]
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), layer_of(leaves))
        return structure.unflatten(write_layer(fill, cast_to_plan(zeros, layer_of(leaves)), 0))

    return jax.jit(build, out_shardings=shardings(plan))()


class Entry(NamedTuple):
    """An entry of stacked work weights in parts: entry i of a part is layer l of all stages' stacks."""

    part: int
    i: int
    l: int


def entries(weights) -> list[Entry]:
    """The entries of a segment's planned work weights, part by part.

    In a stage, a part's layers follow those of the part before it; in the part, they follow those of the stage before.
    """
    weight_parts = parts(weights)
    stages = stages_of(weight_parts[0].stack)
    layers_per_stage = weight_parts[-1].stop // stages
    order = []
    for number, part in enumerate(weight_parts):
        layers = (part.stop - part.start) // stages
        for i in range(part.stop - part.start):
            stage, l = divmod(i, layers)
            order.append(Entry(number, i, stage * layers_per_stage + part.start // stages + l))
    return order


def stages_of(plan) -> int:
    """The number of stages that planned stacks are divided over."""
    sharding = jax.tree.leaves(plan)[0].sharding
    return pipeline_stages(sharding.mesh) if isinstance(sharding, jax.NamedSharding) else 1


def work_function(weights, dtype) -> Callable:
    """Returns a function from a layer's master weights to the arrays that are cast to its work weights.

    These arrays are quantised if the work weights are. weights: the plan of the segment's work weights. dtype: of work
    weights that are not quantised.
    """
    like = parts(weights)[0].stack
    return lambda master: work_copy(master, like, dtype)


def work_dtype(plan: TrainState):
    """The dtype of work weights that are not quantised."""
    return (jax.tree.leaves(plan.weights[OUTER]) or jax.tree.leaves(plan.weights))[0].dtype


def work_weights(master, plan: TrainState) -> dict:
    """Work weights made from master weights, one layer at a time. plan: of what is trained."""
    weights = {}
    for name in segment_names(plan.weights):
        if not any(map(has_room, jax.tree.leaves(plan.weights[name]))):
            weights[name] = plan.weights[name]  # read from where master weights are
            continue
        in_files = InFiles(master[name])
        stacks = in_files.in_memory(master[name])
        work = work_function(plan.weights[name], work_dtype(plan))

        def layer(inputs, l, in_files=in_files, work=work):
            stacks, rounds = inputs
            return work(in_files.joined(read(stacks, l), in_files.on_every_stage(rounds))), ()

        def inputs(l: int, in_files=in_files, stacks=stacks):
            return stacks, in_files.read([l])

        weights[name], _ = build_stacks(plan.weights[name], (), layer, inputs)
    return weights | {OUTER: outer_work_weights(master[OUTER], plan.weights[OUTER])}


def outer_work_weights(master: dict, plan: dict) -> dict:
    """Work weights of the outer layers made from their master weights, of a table in a file one piece at a time."""

    def one(name: str):
        of_master, planned = master[name], plan[name]
        if not isinstance(of_master, TableInFile):
            return jax.jit(lambda x: cast_to_plan(put(x, DEVICE), planned), out_shardings=shardings(planned))(of_master)
        files = InFiles(of_master)

        def add_piece(table, rounds, k):
            piece = jax.lax.with_sharding_constraint(put(rounds[0][0], DEVICE), of_master.layer_sharding(DEVICE))
            return of_master.with_piece(table, piece.astype(planned.dtype), k)

        add = jax.jit(add_piece, donate_argnums=0, out_shardings=planned.sharding)
        table = jax.jit(lambda: jnp.zeros(planned.shape, planned.dtype), out_shardings=planned.sharding)()

        def compute(k: int, rounds: list[jax.Array]) -> None:
            nonlocal table
            # On virtual CPU devices several programs with collectives in flight can block each other.
            table = jax.block_until_ready(add(table, rounds, k))

        by_host(range(of_master.layers), lambda k: files.read([k]), compute)
        return table

    return {name: one(name) for name in plan}


def init_state(model: Model, plan: TrainState, optimizer: optim.Optimizer, seed: int) -> TrainState:
    """Builds a new state with random initial weights, see `new_state`."""

    def drawn(segment: Segment, seed, l):
        layer = segment.init(seed, l)
        stored = jax.tree.leaves(parts(plan.weights[segment.name])[0].stack, is_leaf=is_coded)
        if segment.with_adapters is None or not any(map(is_coded, stored)):
            return layer
        return with_new_adapters(segment, plan, part_of(layer, base(segment.params)), seed, l)

    def inputs(segment: Segment, l: int):
        return seed

    return new_state(model, plan, optimizer, inputs, drawn, seed, model.init_outer)


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
    memory holds two layers of them at a time. Each device receives its shards only. seed: of the adapters, and of the
    outer layers that are not read.
    """

    def inputs(segment: Segment, l: int):
        params = segment.params if reads_adapters else base(segment.params)
        planned = part_of(layer_of(initial_plan(plan, segment.name)), params)
        return put_planned(read_layer(segment, l) if l < segment.num_layers else padding.zeros(params), planned)

    def with_adapters(segment: Segment, layer, l):
        if segment.with_adapters is None or reads_adapters:
            return layer
        return with_new_adapters(segment, plan, layer, seed, l)

    read_arrays = read_outer(model)
    planned = part_of(tables_on_device(initial_plan(plan, OUTER)), read_arrays)
    on_device = jax.tree.map(lambda p: p.sharding.with_memory_kind(DEVICE.memory_kind), planned)
    outer = from_host(read_arrays, on_device)
    missing = model.outer_params.keys() - read_arrays.keys()

    def initial_outer(outer: dict) -> dict:
        return outer | {name: model.init_outer(seed)[name] for name in missing}

    return new_state(model, plan, optimizer, inputs, with_adapters, outer, initial_outer)


def new_state(
    model: Model,
    plan: TrainState,
    optimizer: optim.Optimizer,
    inputs: Callable,
    initial: Callable,
    outer_inputs,
    initial_outer: Callable,
) -> TrainState:
    """The state before the first step, built one layer after another, each array in its own sharding and memory.

    inputs: (segment, l) -> what the initial values of its layer l are made of. initial: (segment, inputs, l) -> initial
    values, inside `jit`. outer_inputs, initial_outer: of the outer layers. No device ever has all of a tensor that is
    planned as sharded. If a tensor is planned for host memory or a file, one layer of it at a time is in device memory.
    """
    sections = {}
    for segment in model.segments:
        planned = section(plan, segment.name)
        others = (planned.master, planned.moments)
        layer = layer_function(segment, plan, optimizer, functools.partial(initial, segment))
        weights, (master, moments) = build_stacks(planned.weights, others, layer, functools.partial(inputs, segment))
        sections[segment.name] = TensorState(weights, master, moments)

    sections[OUTER] = new_outer_state(model, section(plan, OUTER), optimizer, initial_outer, outer_inputs)
    step = from_host(np.int32(0), plan.step.sharding)
    return from_sections(Progress(step, from_host(new_history(plan), shardings(plan.history))), sections)


def initial_plan(plan: TrainState, name: str):
    """Plans a section's initial arrays: master weights of trained parameters, work weights of the others."""
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
    master = cast_to_plan(part_of(initial, master_plan), master_plan)
    return master, optim.init(optimizer, trainable(params), master, master_plan)


def layer_function(segment: Segment, plan: TrainState, optimizer: optim.Optimizer, initial: Callable) -> Callable:
    """Returns a function (inputs, l) -> (arrays to cast to work weights, (master weights, moments)) of layer l.

    initial: (inputs, l) -> initial values of layer l; those of an entry that is no layer are replaced by zeros.
    """
    master_plan = layer_of(plan.master[segment.name])
    work = work_function(plan.weights[segment.name], work_dtype(plan))
    is_padded = jax.tree.leaves(plan.master[segment.name])[0].shape[0] > segment.num_layers

    def layer(inputs, l):
        values = initial(inputs, l)
        if is_padded:
            values = padding.zeros_beyond(segment, l, values)
        master, moments = new_master(optimizer, segment.params, values, master_plan)
        return work(with_part(values, master)), (master, moments)

    return layer


def with_new_adapters(segment: Segment, plan: TrainState, layer, seed, l):
    """Adds fresh adapters to a base layer; DoRA magnitudes start as row norms of the (dequantised) matrix.

    layer: its matrices may be quantised.
    """
    assert segment.with_adapters is not None
    like = part_of(parts(plan.weights[segment.name])[0].stack, base(segment.params))
    dtype = work_dtype(plan)

    def as_read(like, stored):
        return dequantise(stored, dtype) if is_coded(like) else stored

    numbers = jax.tree.map(as_read, like, work_copy(layer, like, dtype), is_leaf=is_coded)
    return segment.with_adapters(layer, seed, l, numbers)


def new_outer_state(model: Model, plan: TensorState, optimizer: optim.Optimizer, initial: Callable, inputs):
    """The TensorState of the outer layers before the first step; tables in files are written a piece at a time.

    initial: inputs -> initial values, inside `jit`.
    """
    params = model.outer_params
    in_files = InFiles((plan.master, plan.moments))
    tables = tables_in_files(plan)
    on_device = tables_on_device(plan.master)

    def in_memory(inputs):
        values = initial(inputs)
        master, moments = new_master(optimizer, params, values, on_device)
        weights = cast_to_plan(with_part(values, master), plan.weights)
        return weights, in_files.in_memory((master, moments)), {name: master[name] for name in tables}

    def pieces(master, k):
        of_tables = {name: plan.master[name] for name in tables}, {name: plan.moments[name] for name in tables}
        new = new_master(optimizer, {name: params[name] for name in tables}, master, part_of(on_device, master))
        files = InFiles(of_tables)
        pairs = zip(files.stacks, files.files(new), strict=True)
        return [file.piece_of(x, k) for file, x in pairs if isinstance(file, TableInFile)]

    planned = plan.weights, in_files.in_memory((plan.master, plan.moments)), part_of(on_device, dict.fromkeys(tables))
    weights, arrays, of_tables = jax.jit(in_memory, out_shardings=shardings(planned))(inputs)
    if in_files.stacks:
        program = jax.jit(pieces, out_shardings=[x.sharding for x in in_files.planned_round(HOST)])
        number = in_files.stacks[0].layers

        def compute(k: int, _: None) -> list[jax.Array]:
            return jax.block_until_ready(program(of_tables, k))

        by_host(range(number), lambda k: None, compute, lambda k, rounds: in_files.write([k], rounds))
    master, moments = in_files.joined(arrays, in_files.stacks)
    return TensorState(weights, master, moments)


def tables_on_device(plan: dict) -> dict:
    """A plan of outer layers with tables on the devices in place of those in files."""
    return jax.tree.map(lambda x: x.planned_table if isinstance(x, TableInFile) else x, plan)
