"""The update of one layer of a segment with state in files: a program, which the host runs for one after another."""

from typing import Any

import jax

from surojax.memory.host import move, put, read, write_layer
from surojax.memory.in_file import InFiles, home_of
from surojax.models.model import Segment
from surojax.optim.optimizer import UpdateContext
from surojax.parallel import collectives
from surojax.parallel.schedule import layers_of_stage
from surojax.placement.home import DEVICE, HOST
from surojax.placement.mesh import pipeline_stages
from surojax.placement.param import part_of
from surojax.step.between import in_rounds
from surojax.step.several_programs import Program
from surojax.step.state import TensorState, section
from surojax.step.state_plan import bytes_per_device
from surojax.step.step_gradients import StepGradients
from surojax.step.step_parts import StepParts
from surojax.step.work_weights import WorkWeights


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
