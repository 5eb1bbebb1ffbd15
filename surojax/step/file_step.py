"""A training step with tensor classes in a file on NVMe.

The step has a program for the gradients, or programs of a layer for them (layer_gradients.py), and one for the update
of a layer, which the host runs for one layer after another (memory/by_host.py). Embedding and head are updated before
the layers are; if their state is in files, in pieces (tables.py).

The stages of `pp` update a layer each at a time, in a round: layer l of every stage's stacks. The last rounds may have
none of the last stage, whose padding there (step/padding.py) is zeros before and after.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from surojax.memory.by_host import by_host
from surojax.memory.host import move, put, read, write_layer
from surojax.memory.in_file import InFiles, home_of
from surojax.models.model import Segment
from surojax.optim.optimizer import UpdateContext
from surojax.parallel import collectives
from surojax.parallel.schedule import layers_of_stage
from surojax.placement.home import DEVICE, HOST
from surojax.placement.mesh import pipeline_stages
from surojax.placement.param import OUTER, part_of, with_part
from surojax.step import complete
from surojax.step.between import SegmentLayer, WorkWeights, in_rounds
from surojax.step.several_programs import Program, SeveralPrograms
from surojax.step.state import TensorState, TrainState, from_sections, section
from surojax.step.state_plan import bytes_per_device
from surojax.step.step_gradients import StepGradients
from surojax.step.step_parts import StepParts
from surojax.step.tables import Tables, without_tables


class PendingUpdate(NamedTuple):
    """State with embedding and head updated (unless in files) and the layers' update pending.

    update_inputs, of_tables: see `StepGradients`. step: the number of the update.
    """

    state: TrainState
    update_inputs: dict[str, Any]
    of_tables: dict[str, jax.Array]
    step: int


class ToFiles(NamedTuple):
    """A layer's rounds to write to files after its update: master weights and moments, and `InFiles.written` of work
    weights."""

    state: list[jax.Array]
    weights: list[jax.Array | None]


class SegmentUpdate:
    """Updates a segment's layers, one of each stage of `pp` together: a round.

    state: of (master weights, moments). weights: those that are trained. functions: a program for each of their parts,
    by (segment, number): (work weights, stacks, layer, gradients, update_inputs) -> (work weights, stacks, (layer, work
    weights for files), l + 1). It runs `Update.layer` on layer l of every stage. `stacks` are the master weights and
    moments in memory, updated in place, as work weights in memory are; `layer` are those of the round from the file,
    arrays `[stages, ...]`, which are written back; gradients: those of the layer that are not in update_inputs, see
    `FileStep`.

    A program of one layer copies it to and from the device, so that these copies do not overlap with the next layer's
    products. What `device_memory` has room for is put on the device a layer early instead: `early` of `arriving`.
    """

    def __init__(self, step: StepParts, gradients: StepGradients, segment: Segment):
        self.step = step
        self.gradients = gradients
        self.name = segment.name
        self.planned = section(step.plan, segment.name)
        weights, *state = self.planned
        stages = pipeline_stages(step.mesh)
        self.rounds = layers_of_stage(segment.num_layers, stages)
        self.state = InFiles(tuple(state))
        self.weights = WorkWeights(part_of(weights, self.planned.master), stages)
        planned = self.state.planned_round(HOST), gradients.planned_grads(segment.name)
        self.arriving, self.early = on_their_way(planned, step.engine.table.device_memory)
        self.functions = {(self.name, number): self._program(number) for number in range(len(self.weights.parts))}

    def planned_programs(self, name: str) -> list[Program]:
        """The programs with planned arguments. name: of the pass that they belong to."""
        arriving = self.state.planned_round(HOST)
        programs = []
        for (_, number), function in self.functions.items():
            others = arriving, self.early, self.leaving(number), self.gradients.others_of_update(self.name)
            from_files = self.state.round_read + self.gradients.file_bytes(self.name)
            to_files = self.state.round_written + self.weights.files[number].round_written
            numbers = len(self.weights.layers[number]), others, name, from_files, to_files
            programs.append(Program(function, self.arguments(number), *numbers, self.early))
        return programs

    def leaving(self, number: int) -> tuple:
        """Plans what is on its way to files behind a layer of this part."""
        files = self.weights.files[number]
        return self.state.planned_round(HOST), files.written(files.planned_round(HOST))

    def arguments(self, number: int) -> tuple:
        """The planned arguments of the program of this part: `jax.ShapeDtypeStruct`s."""
        work, _ = self.weights.planned(number)
        stacks = self.state.in_memory(tuple(self.planned[1:]))
        return work, stacks, *self.arriving, self.gradients.update_inputs

    def _program(self, number: int):
        """The jitted program for the layers of this part of the work weights."""

        def per_device(work, stacks, layer, gradients, update_inputs):
            l = update_inputs["l"]
            old = self.state.joined(read(stacks, l), [x[0] for x in put(layer, DEVICE)])
            grads = self.gradients.of_layer(self.name, update_inputs, gradients, l)
            state = TensorState(self.weights.like(number, work), *old)
            context = UpdateContext(update_inputs["scalars"], collectives.first_layer(self.rounds) + l)
            weights, *new = self.step.update.layer(self.name, state, grads, context)
            stacks = write_layer(stacks, self.state.in_memory(tuple(new)), l)
            work, weight_rounds = self.weights.replaced(number, work, weights, l)
            rounds = put(in_rounds(self.state.files(tuple(new))), HOST)
            weight_rounds = [move(x, home_of(planned).space) for x, planned in zip(weight_rounds, leaving, strict=True)]
            return work, stacks, (rounds, weight_rounds), l + 1

        leaving = self.weights.files[number].planned_leaving()
        work, stacks, layer, *_ = arguments = self.arguments(number)
        to_files = layer, leaving
        results = work, stacks, to_files, self.step.plan.step
        return self.step.program(per_device, arguments, results, batch=False, donated=(0, 1))


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


class FileStep(SeveralPrograms):
    """The step of `train_step.make_train_step` with tensor classes in files; it has several programs.

    gradients: computes the gradients of all layers and updates embedding and head, but for `tables`:
    `WholeGradients` in one program, `LayerGradients` in programs of a layer. tables: those of embedding and head with
    state in files.

    updates: of the layers of each segment, by name. Host memory has four layers of the state from the file (`by_host`).

    With `Engine.overlap_update` a step leaves its update pending, as an `overlap.OverlappedStep` does, and the next one
    updates each layer before its first forward pass computes it: while that computes, files are read and written.
    """

    def __init__(self, step: StepParts, gradients: StepGradients):
        super().__init__(step.mesh, step.plan)
        self.step = step
        self.gradients = gradients
        self.store = InFiles(step.plan).store
        self.tables = Tables(step)
        segments = step.engine.model.segments
        self.updates = {segment.name: SegmentUpdate(step, gradients, segment) for segment in segments}
        number_of = {
            SegmentLayer(segment.name, l): segment.numbers[l]
            for segment in segments
            for l in range(self.updates[segment.name].rounds)
        }
        self.order = sorted(number_of, key=number_of.__getitem__)
        self.functions = gradients.functions | self.tables.functions
        for update in self.updates.values():
            self.functions |= update.functions

    def __call__(self, state: TrainState | PendingUpdate, *batch):
        """Runs a step. Raises NvmeError if a file cannot be read or written; the state cannot be used after that."""
        late = None
        if isinstance(state, PendingUpdate):
            late = UpdatingRounds(self, state)
            state = late.state
        number = int(jax.device_get(state.step)) + 1
        layers = {name: section(state, name) for name in self.updates}
        outer = section(state, OUTER)
        weights = {name: of_layers.weights for name, of_layers in layers.items()}
        arguments = without_tables(outer), state.progress, late or weights, *batch
        updated, progress, metrics, update_inputs, of_tables = self.gradients(self.run, *arguments)
        outer = TensorState(*map(with_part, outer, updated))
        sections = {**(late.sections() if late else layers), OUTER: outer}
        pending = PendingUpdate(from_sections(progress, sections), update_inputs, of_tables, number)
        return pending if self.step.engine.overlap_update else self.finish(pending), metrics

    def finish(self, pending: PendingUpdate) -> TrainState:
        """Applies the pending update and returns the state; what is pending is donated. Raises NvmeError."""
        layers = UpdatingRounds(self, pending)
        layers.over_all(lambda layer, arrived: layers.update(layer, arrived)[0], layers.write)
        state = layers.state
        return from_sections(state.progress, {**layers.sections(), OUTER: section(state, OUTER)})

    def programs(self, *batch) -> list[Program]:
        """See `SeveralPrograms`."""
        overlaps = self.step.engine.overlap_update
        of_segments = self.updates.values()
        updates = [x for update in of_segments for x in update.planned_programs("forward" if overlaps else "update")]
        gradients = self.gradients.programs(*self._arguments_of_gradients(batch))
        if overlaps:  # the programs of a forward pass have an update's layers beside them, and the other way around
            leaving = [update.leaving(number) for update in of_segments for _, number in update.functions]
            in_flight = [(x.others, late) for x, late in zip(updates, leaving, strict=True)]
            most = max(in_flight, key=lambda x: (bytes_per_device(x), bytes_per_device(x, HOST)))
            forward = next(x for x in gradients if x.name == "forward")
            _, activations, carried, *_ = forward.arguments
            residuals, _ = forward.others
            updates = [x._replace(others=(x.others, activations, carried, residuals)) for x in updates]
            gradients = [x._replace(others=(x.others, most)) if x.name == "forward" else x for x in gradients]
        else:  # the first layer is read while gradients are computed
            first = next(iter(of_segments))
            early = first.state.planned_round(HOST), first.early
            gradients = [x._replace(others=(x.others, early)) for x in gradients]
        return [self._with_state(x) for x in (*gradients, *self.tables.programs(self.gradients.in_memory()), *updates)]

    def _with_state(self, program: Program) -> Program:
        """Adds the planned state that is no argument of this program to its other arrays in memory."""
        arguments = {id(x) for x in jax.tree.leaves(program.arguments)}
        state = [x for x in jax.tree.leaves(self.plan) if id(x) not in arguments]
        return program._replace(others=(program.others, state))

    def _arguments_of_gradients(self, batch: tuple) -> tuple:
        """Plans the arguments of `gradients`."""
        plan = self.plan
        weights = {name: plan.weights[name] for name in self.updates}
        return without_tables(section(plan, OUTER)), plan.progress, weights, *batch


class UpdatingRounds:
    """Updates the layers of a state one round after another; a round is one layer of every stage of `pp`.

    It begins with the update of the tables in files. state: with all outer layers updated. work: by segment, the stacks
    in memory of each part of the work weights, up to date for the layers before.
    """

    def __init__(self, step: FileStep, pending: PendingUpdate):
        """Raises NvmeError."""
        self.step = step
        self.number = pending.step
        self.layers = {name: section(pending.state, name) for name in step.updates}  # as before the update
        self.inputs = dict(pending.update_inputs)
        self.zero = self.inputs["l"]
        self.next = dict.fromkeys(step.updates, self.zero)  # by segment, on the device
        step.store.begin_update(self.number)
        self.state = self._with_tables(pending)
        self.stacks, self.work = {}, {}
        for name, update in step.updates.items():
            weights, master, moments = self.layers[name]
            self.stacks[name] = update.state.in_memory((master, moments))
            self.work[name] = update.weights.in_memory(part_of(weights, master))

    def _with_tables(self, pending: PendingUpdate) -> TrainState:
        """Updates the tables in files and returns the state."""
        state = pending.state
        outer = section(state, OUTER)
        outer = self.step.tables.updated(self.step.run, outer, pending.of_tables, self.inputs["scalars"], self.zero)
        return from_sections(state.progress, {**self.layers, OUTER: outer})

    def over_all(self, compute: Callable[[SegmentLayer, Any], Any], write: Callable[[SegmentLayer, Any], None]) -> None:
        """Runs a pass over all layers that updates them, see `by_host`. Raises NvmeError."""
        by_host(self.step.order, self.read, compute, write)
        self.step.store.end_update(self.number, self.kept)

    def kept(self) -> list[np.ndarray]:
        """Returns the in-memory shards of the updated state, for a store with two slots."""
        sections = {**self.sections(), OUTER: section(self.state, OUTER)}
        return complete.reserved_shards(from_sections(self.state.progress, sections))

    def read(self, layer: SegmentLayer) -> tuple:
        """Reads (state, gradients) of a round and copies them as `SegmentUpdate.arriving` plans. Raises NvmeError."""
        update = self.step.updates[layer.segment]
        arrays = update.state.read(update.state.layers_of_round(layer.l)), self.step.gradients.read(layer)
        return jax.device_put(arrays, jax.tree.map(lambda x: x.sharding, update.arriving)) if update.early else arrays

    def update(self, layer: SegmentLayer, arrived: tuple) -> tuple[ToFiles, list[jax.Array]]:
        """Updates a layer from what `read` returned: (what to write, its work weights that are in files)."""
        name, l = layer
        update = self.step.updates[name]
        i = update.weights.part_of[l]
        arguments = self.work[name][i], self.stacks[name], *arrived, self.inputs | {"l": self.next[name]}
        results = self.step.run((name, i), *arguments)
        self.work[name][i], self.stacks[name], (new, weights), self.next[name] = results
        return ToFiles(new, update.weights.files[i].written(weights)), weights

    def write(self, layer: SegmentLayer, to_files: ToFiles) -> None:
        """Writes a layer of every stage, and its work weights, to the file. Raises NvmeError."""
        update = self.step.updates[layer.segment]
        update.state.write(update.state.layers_of_round(layer.l), to_files.state)
        update.weights.write(layer.l, to_files.weights)

    def sections(self) -> dict[str, TensorState]:
        """Returns the TensorState of each segment after the update."""
        return {name: self._section(name) for name in self.layers}

    def _section(self, name: str) -> TensorState:
        update, old = self.step.updates[name], self.layers[name]
        master, moments = update.state.joined(self.stacks[name], update.state.files((old.master, old.moments)))
        return TensorState(with_part(old.weights, update.weights.joined(self.work[name])), master, moments)
