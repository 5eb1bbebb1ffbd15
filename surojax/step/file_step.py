"""A training step with tensor classes in a file on NVMe.

The step has a program for the gradients, or programs of a layer for them (layer_gradients.py), and one for the update
of a layer, which the host runs for one layer after another (by_host.py). Embedding and head are updated before the
layers are; if their state is in files, in pieces (tables.py).

The stages of `pp` update a layer each at a time, in a round: layer l of every stage's stacks. The last rounds may have
none of the last stage, whose padding there (step/padding.py) is zeros before and after.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from surojax.memory.host import put, read, write_layer
from surojax.memory.in_file import InFiles
from surojax.numerics.rounding import materialised
from surojax.optim.optimizer import UpdateContext
from surojax.parallel import collectives
from surojax.parallel.schedule import layers_of_stage
from surojax.placement.home import DEVICE, HOST
from surojax.placement.mesh import pipeline_stages
from surojax.placement.param import OUTER, part_of, with_part
from surojax.step import complete
from surojax.step.between import in_rounds
from surojax.step.by_host import by_host
from surojax.step.state import TensorState, TrainState, from_sections, section
from surojax.step.state_plan import bytes_per_device
from surojax.step.step_metrics import metrics_of
from surojax.step.step_parts import Program, StepParts
from surojax.step.tables import Tables, planned_gradients, without_tables
from surojax.step.update import as_trees
from surojax.step.work_weights import WorkWeights


class WholeGradients:
    """The gradients of all layers by one program, which also updates the outer layers, but for tables in files.

    Accumulators are stacks in memory, part of `update_inputs`.
    """

    def __init__(self, step: StepParts):
        self.step = step
        (self.segment,) = step.engine.model.segments
        grads = step.planned_gradients(self.segment.name)
        self.update_inputs = {"grads": grads, "scalars": step.planned_scalars(), "l": step.plan.step}
        self.of_tables = planned_gradients(step)
        self.program: Any = self._program()

    def __call__(self, *arguments):
        """See `FileStep.gradients`."""
        return self.program(*arguments)

    def programs(self, *arguments) -> list[Program]:
        """The program with planned arguments."""
        return [Program(self.program, arguments, 1)]

    def functions(self) -> list:
        """The functions of `programs`, in their order."""
        return [self.program]

    def lowered(self, *arguments) -> "WholeGradients":
        """A copy with the program lowered for planned arguments."""
        return self._with(self.program.lower(*arguments))

    def compiled(self, compiler_options=None) -> "WholeGradients":
        """A copy of the lowered program, compiled."""
        return self._with(self.program.compile(compiler_options))

    def _with(self, program) -> "WholeGradients":
        new = copy.copy(self)
        new.program = program
        return new

    def read(self, l: int) -> tuple:
        """Returns (): this step's gradients are in `update_inputs`."""
        return ()

    def of_layer(self, update_inputs, layer, l):
        """The gradients of layer l, in device memory. Inside `jit`."""
        return read(update_inputs["grads"], l)

    def planned_grads(self) -> tuple:
        """The plan of what `read` returns."""
        return ()

    @property
    def file_bytes(self) -> int:
        """0: no gradients are in files."""
        return 0

    def others_of_update(self) -> tuple:
        """Returns (): gradients are arguments of the update's program, see `LayerGradients`."""
        return ()

    def _program(self):
        update = self.step.update
        plan = self.step.plan

        def per_device(outer, step, history, blocks, *batch):
            weights = {self.segment.name: blocks, OUTER: outer.weights}
            gradients = self.step.gradients(weights, *batch, history=history, step=step)
            scalars = update.scalars(step, gradients.norm)
            largest = update.largest_in_layer(gradients.grads)
            outer = update.outer(outer, gradients.grads[OUTER], scalars, largest=largest)
            update_inputs = {"grads": gradients.grads[self.segment.name], "scalars": scalars, "l": jnp.int32(0)}
            of_tables = part_of(gradients.grads[OUTER], self.of_tables)
            return outer, step + 1, gradients.history, metrics_of(gradients, scalars["lr"]), update_inputs, of_tables

        donated = (without_tables(section(plan, OUTER)), plan.step, plan.history)
        arguments = (*donated, plan.weights[self.segment.name])
        results = (*donated, self.step.metrics, self.update_inputs, self.of_tables)
        return self.step.program(per_device, arguments, results, donated=(0, 1, 2))


class PendingUpdate(NamedTuple):
    """A training state whose outer layers are updated, but for tables in files, and whose other layers are not yet.

    update_inputs, of_tables: see `FileStep`. step: the number of the update.
    """

    state: TrainState
    update_inputs: dict[str, Any]
    of_tables: dict[str, jax.Array]
    step: int


class ToFiles(NamedTuple):
    """A layer's rounds to write to files after its update: master weights, moments and work weights."""

    state: list[jax.Array]
    weights: list[jax.Array]


class FileStep:
    """The step of `train_step.make_train_step` with tensor classes in files; it has several programs.

    gradients: (outer state, step, history, block weights, *batch) -> (outer state, step, history, metrics,
    update_inputs, of_tables). It computes the gradients of all layers and updates the outer layers, but for `tables`:
    `WholeGradients` by one program; `LayerGradients` by programs of a layer, and it takes `UpdatingRounds` in place of
    block weights, too. batch: see `Engine.batch_arrays`.

    update_inputs: {"grads", "scalars", "l"}, the inputs that the update of each layer needs; l starts at 0.

    tables: those of embedding and head whose state is in files. of_tables: their gradients.

    updates: one program for each of the parts of the work weights that are trained (`WorkWeights`): (work weights,
    stacks, layer, gradients, update_inputs) -> (work weights, stacks, (layer, work weights for files), l + 1). It runs
    `Tensor.updated` on layer l of every stage. `stacks` are the master weights and moments in memory, updated in place,
    as work weights in memory are; `layer` are those of the round from the file, arrays `[stages, ...]`, which are
    written back; gradients: those of the layer that are not in update_inputs.

    Host memory has four layers of the state from the file (`by_host`). A program of one layer copies it to and from the
    device, so that these copies do not overlap with the next layer's products. What `device_memory` has room for is put
    on the device a layer early instead.

    With `Engine.overlap_update` a step leaves its update pending, as an `overlap.OverlappedStep` does, and the next one
    updates each layer before its first forward pass computes it: while that computes, files are read and written.
    """

    def __init__(self, step: StepParts, gradients: Any):
        self.step = step
        self.gradients = gradients
        plan = self.plan = step.plan
        model = step.engine.model
        self.stages = pipeline_stages(step.mesh)
        self.rounds = layers_of_stage(model.num_layers, self.stages)
        (self.segment,) = model.segments  # `state_plan` refuses several
        weights, *state = self._section(plan)
        self.state = InFiles(tuple(state))  # of (master, moments)
        self.store = InFiles(plan).store
        self.weights = WorkWeights(part_of(weights, self._section(plan).master), self.stages)
        read = self.state.planned_round(HOST), gradients.planned_grads()
        self.arriving, self.early = on_their_way(read, step.engine.table.device_memory)
        self.tables = Tables(step)
        self.updates: list[Any] = [self._update(number) for number in range(len(self.weights.parts))]
        self._planned: list[Program] = []  # `programs`, once the step is lowered

    def _section(self, state: TrainState) -> TensorState:
        """The part of a state, or of a plan, that belongs to the layers."""
        return section(state, self.segment.name)

    def __call__(self, state: TrainState | PendingUpdate, *batch):
        """Runs a step. Raises NvmeError if a file cannot be read or written; the state cannot be used after that."""
        late = None
        if isinstance(state, PendingUpdate):
            late = UpdatingRounds(self, state)
            state = late.state
        number = int(jax.device_get(state.step)) + 1
        layers, outer = self._section(state), section(state, OUTER)
        arguments = without_tables(outer), state.step, state.history, late or layers.weights, *batch
        updated, steps_done, history, metrics, update_inputs, of_tables = self.gradients(*arguments)
        outer = TensorState(*map(with_part, outer, updated))
        sections = {self.segment.name: late.section() if late else layers, OUTER: outer}
        pending = PendingUpdate(from_sections(steps_done, sections, history), update_inputs, of_tables, number)
        return pending if self.step.engine.overlap_update else self.finish(pending), metrics

    def finish(self, pending: PendingUpdate) -> TrainState:
        """The state with its last update applied; its state is donated. Raises NvmeError."""
        layers = UpdatingRounds(self, pending)
        layers.over_all(layers.update, layers.write)
        state = layers.state
        sections = {self.segment.name: layers.section(), OUTER: section(state, OUTER)}
        return from_sections(state.step, sections, state.history)

    def programs(self, *batch) -> list[Program]:
        """All programs of a step, with planned arrays as arguments."""
        early = self.state.planned_round(HOST)
        overlaps = self.step.engine.overlap_update
        updates, in_flight = [], []
        for number, update in enumerate(self.updates):
            late = early, self.weights.files[number].planned_round(HOST)
            others = early, self.early, late, self.gradients.others_of_update()
            rounds = len(self.weights.layers[number])
            read = self.state.round_file_bytes + self.gradients.file_bytes
            written = self.state.round_file_bytes + self.weights.files[number].round_file_bytes
            name = "forward" if overlaps else "update"
            updates.append(Program(update, self._arguments(number), rounds, others, name, read, written, self.early))
            in_flight.append((others, late))
        gradients = self.gradients.programs(*self._arguments_of_gradients(batch))
        if overlaps:  # the programs of a forward pass have an update's layers beside them, and the other way around
            most = max(in_flight, key=bytes_per_device)
            _, moving, sent, *_ = next(x for x in gradients if x.name == "forward").arguments
            updates = [x._replace(others=(x.others, moving, sent)) for x in updates]
            gradients = [x._replace(others=(x.others, most), read=0) if x.name == "forward" else x for x in gradients]
        else:  # the first layer is read while gradients are computed
            gradients = [x._replace(others=(x.others, early, self.early)) for x in gradients]
        grads = self.gradients
        of_layers = grads.others_of_update(), grads.planned_grads(), grads.update_inputs["grads"]
        return [self._with_state(x) for x in (*gradients, *self.tables.programs(of_layers), *updates)]

    def _with_state(self, program: Program) -> Program:
        """Adds the planned state that is no argument of this program to its other arrays in memory."""
        arguments = {id(x) for x in jax.tree.leaves(program.arguments)}
        state = [x for x in jax.tree.leaves(self.plan) if id(x) not in arguments]
        return program._replace(others=(program.others, state))

    def lower(self, plan: TrainState, *batch) -> "FileStep":
        """The step with all programs lowered. plan: the one that the step was made from."""
        assert jax.tree.structure(plan) == jax.tree.structure(self.plan), "a step is lowered for its own plan"
        gradients = self.gradients.lowered(*self._arguments_of_gradients(batch))
        updates = [x.lower(*self._arguments(number)) for number, x in enumerate(self.updates)]
        lowered = self._with(gradients, self.tables.lowered(), updates)
        lowered._planned = self.programs(*batch)
        return lowered

    def compile(self, compiler_options=None) -> "FileStep":
        """The lowered step, compiled."""
        updates = [update.compile(compiler_options) for update in self.updates]
        return self._with(self.gradients.compiled(compiler_options), self.tables.compiled(compiler_options), updates)

    def compiled_programs(self) -> list[Program]:
        """All programs of a lowered and compiled step, with planned arrays as arguments."""
        functions = [*self.gradients.functions(), *self.tables.functions(), *self.updates]
        return [x._replace(function=function) for x, function in zip(self._planned, functions, strict=True)]

    def memory_analysis(self) -> None:
        """None, because a step of several programs has no single answer: ask each of `programs`."""

    def _with(self, gradients, tables: Tables, updates: list) -> "FileStep":
        """A copy of this step with these programs."""
        step = copy.copy(self)
        step.gradients = gradients
        step.tables = tables
        step.updates = updates
        return step

    def _arguments_of_gradients(self, batch: tuple) -> tuple:
        """The planned arguments of `gradients`."""
        plan = self.plan
        outer = without_tables(section(plan, OUTER))
        return outer, plan.step, plan.history, self._section(plan).weights, *batch

    def _update(self, number: int):
        """The jitted program of `updates` for the layers of this part of the work weights."""

        def per_device(work, stacks, layer, gradients, update_inputs):
            l = update_inputs["l"]
            old = self.state.joined(read(stacks, l), [x[0] for x in put(layer, DEVICE)])
            # The barrier ends the reads before the writes begin, as in `update.sweep_part`.
            (master, moments), grads = materialised((old, self.gradients.of_layer(update_inputs, gradients, l)))
            state = TensorState(self.weights.like(number, work), master, moments)
            done = []
            context = UpdateContext(update_inputs["scalars"], collectives.first_layer(self.rounds) + l)
            for tensor in self.step.update.tensors(self.segment.name, state, grads):
                done.append(tensor.updated(tensor.state.master, tensor.state.moments, tensor.grad, context))
            weights, *new = materialised(tuple(as_trees(done, state)))
            stacks = write_layer(stacks, self.state.in_memory(tuple(new)), l)
            work, weight_rounds = self.weights.replaced(number, work, weights, l)
            return work, stacks, put((in_rounds(self.state.files(tuple(new))), weight_rounds), HOST), l + 1

        work, stacks, layer, *_ = arguments = self._arguments(number)
        to_files = layer, self.weights.files[number].planned_round(HOST)
        results = work, stacks, to_files, self.plan.step
        return self.step.program(per_device, arguments, results, batch=False, donated=(0, 1))

    def _arguments(self, number: int) -> tuple:
        """The planned arguments of the update of this part: `jax.ShapeDtypeStruct`s."""
        work, _ = self.weights.planned(number)
        stacks = self.state.in_memory(tuple(self._section(self.plan)[1:]))
        return work, stacks, *self.arriving, self.gradients.update_inputs


def on_their_way(planned, device_memory: int) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """Chooses the arrays of a layer that are copied to the device before the program of its update.

    They are the largest of those in host memory, of device_memory bytes on each device at most. planned: a tree of
    arrays. Returns (the tree with these arrays on the device, these arrays).
    """
    arrays, structure = jax.tree.flatten(planned)
    early = []
    for i in sorted(range(len(arrays)), key=lambda i: -bytes_per_device(arrays[i], HOST)):
        if 0 < (size := bytes_per_device(arrays[i], HOST)) <= device_memory:
            device_memory -= size
            sharding = arrays[i].sharding.with_memory_kind(DEVICE.memory_kind)
            arrays[i] = jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype, sharding=sharding)
            early.append(arrays[i])
    return structure.unflatten(arrays), early


class UpdatingRounds:
    """The layers of a state while the host updates one after another: a round, which is a layer of every stage.

    It begins with the update of the tables in files. state: with all outer layers updated. work: the stacks in memory
    of each part of the work weights, up to date for the layers before.
    """

    def __init__(self, step: FileStep, pending: PendingUpdate):
        """Raises NvmeError."""
        self.step = step
        self.number = pending.step
        self.layers = section(pending.state, step.segment.name)  # as before the update
        self.inputs = dict(pending.update_inputs)
        step.store.begin_update(self.number)
        self.state = self._with_tables(pending)
        self.stacks = step.state.in_memory((self.layers.master, self.layers.moments))
        self.work = step.weights.in_memory(part_of(self.layers.weights, self.layers.master))

    def _with_tables(self, pending: PendingUpdate) -> TrainState:
        """The state with the tables in files updated."""
        state = pending.state
        outer = section(state, OUTER)
        outer = self.step.tables.updated(outer, pending.of_tables, self.inputs["scalars"], self.inputs["l"])
        return from_sections(state.step, {self.step.segment.name: self.layers, OUTER: outer}, state.history)

    def over_all(self, compute: Callable[[int, Any], Any], write: Callable[[int, Any], None]) -> None:
        """A pass over all layers that updates them, see `by_host`; `read` reads. Raises NvmeError."""
        by_host(range(self.step.rounds), self.read, compute, write)
        self.step.store.end_update(self.number, self.kept)

    def kept(self) -> list[np.ndarray]:
        """The shards of the state after its update that are in memory, for a store with two slots."""
        sections = {self.step.segment.name: self.section(), OUTER: section(self.state, OUTER)}
        return complete.reserved_shards(from_sections(self.state.step, sections, self.state.history))

    def read(self, l: int) -> tuple:
        """(state, gradients) of layer l of every stage, on their way to `FileStep.arriving`. Raises NvmeError."""
        state = self.step.state
        layer = state.read(state.layers_of_round(l)), self.step.gradients.read(l)
        return (
            jax.device_put(layer, jax.tree.map(lambda x: x.sharding, self.step.arriving)) if self.step.early else layer
        )

    def update(self, l: int, arrived: tuple) -> ToFiles:
        """Updates layer l from what `read` returned."""
        step = self.step
        i = step.weights.part_of[l]
        arguments = self.work[i], self.stacks, *arrived, self.inputs
        self.work[i], self.stacks, to_files, self.inputs["l"] = step.updates[i](*arguments)
        if jax.default_backend() == "cpu" and step.step.mesh.size > 1:
            jax.block_until_ready(to_files)  # several programs with collectives in flight can block each other
        return ToFiles(*to_files)

    def write(self, l: int, to_files: ToFiles) -> None:
        """Writes layer l of every stage, and its work weights, to the file. Raises NvmeError."""
        state = self.step.state
        state.write(state.layers_of_round(l), to_files.state)
        self.step.weights.write(l, to_files.weights)

    def section(self) -> TensorState:
        """The layers' TensorState after the update."""
        step, old = self.step, self.layers
        master, moments = step.state.joined(self.stacks, step.state.files((old.master, old.moments)))
        return TensorState(with_part(old.weights, step.weights.joined(self.work)), master, moments)
