"""A training step for a state that is partly stored in a file on NVMe.

The step has one program for the gradients and one for the update of a layer, which the host runs for one layer after
another (by_host.py).

The stages of `pp` update a layer each at a time, in a round: layer l of every stage's stacks. The last rounds may have
none of the last stage, whose padding there (step/padding.py) is zeros before and after.
"""

import copy
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import Part, joined, parts, put, read, write
from surojax.memory.in_file import InFiles
from surojax.numerics.rounding import materialised
from surojax.optim.optimizer import UpdateContext
from surojax.parallel import collectives
from surojax.parallel.schedule import layers_of_stage
from surojax.placement.home import DEVICE, HOST
from surojax.placement.mesh import pipeline_stages
from surojax.placement.param import OUTER
from surojax.step.by_host import by_host
from surojax.step.metrics import metrics_of
from surojax.step.state import TensorState, TrainState, from_sections, section
from surojax.step.step_parts import StepParts
from surojax.step.update import as_trees


class Program(NamedTuple):
    """One of the programs that make up a step.

    function: jitted. arguments: planned arrays. times: number of runs in a step. others: planned state that is in
    memory while the program runs but is no argument of it. layers_read: number of layers from the file that are in host
    memory while the program runs, in addition to arguments and results: a prefetched one, and during the update one
    that is being written back.
    """

    function: Any
    arguments: tuple
    times: int
    others: Any = ()
    layers_read: int = 0


class FileStep:
    """The step of `train_step.make_train_step` for a state that is partly stored in a file; it has several programs.

    gradients: (outer state, step, history, block weights, *batch) -> (outer state, step, history, metrics,
    update_inputs). It computes the gradients of all layers and updates the outer layers. batch: see
    `Engine.batch_arrays`.

    update_inputs: {"grads", "scalars", "l"}, the inputs that the update of each layer needs; l starts at 0.

    updates: one program for each of `host.parts` of the work weights: (work weights, stacks, layer, update_inputs) ->
    (work weights, stacks, layer, l + 1). It runs `update.update_tensor` on layer l of every stage. `stacks` are the
    master weights and moments in memory, updated in place; `layer` are those of the round from the file, arrays
    `[stages, ...]`, which are written back.

    Host memory has four layers of the file (`by_host`). Layer 0 is prefetched while the gradients are computed. A
    layer's copies to and from the device do not overlap with those of the next layer; disks are slower than these.
    """

    def __init__(self, step: StepParts):
        self.step = step
        plan = self.plan = step.plan
        model = step.engine.model
        self.stages = pipeline_stages(step.mesh)
        self.rounds = layers_of_stage(model.num_layers, self.stages)
        (self.segment,) = model.segments  # `state_plan` refuses several
        self.state = InFiles(tuple(self._section(plan)[1:]))  # of (master, moments)
        self.update_inputs = self._plan_update_inputs()
        self.gradients: Any = self._gradients()
        self.updates: list[Any] = [self._update(part) for part in parts(self._section(plan).weights)]

    def _section(self, state: TrainState) -> TensorState:
        """The part of a state, or of a plan, that belongs to the layers."""
        return section(state, self.segment.name)

    def __call__(self, state: TrainState, *batch):
        """Runs a step. Raises NvmeError if the file cannot be read or written; the state cannot be used after that."""
        step = int(jax.device_get(state.step)) + 1
        old = self._section(state)
        stacks = self.state.in_memory((old.master, old.moments))
        weights = [part.stack for part in parts(old.weights)]
        part_of_round = [i for i, part in enumerate(parts(old.weights)) for _ in self._rounds(part)]
        on_virtual_devices = jax.default_backend() == "cpu" and self.step.mesh.size > 1
        results: Any = None

        def begin() -> None:
            nonlocal results
            results = self.gradients(section(state, OUTER), state.step, state.history, old.weights, *batch)
            self.state.store.begin_update(step)

        def update(l: int, layer):
            nonlocal stacks
            i = part_of_round[l]
            *_, update_inputs = results
            weights[i], stacks, layer, update_inputs["l"] = self.updates[i](weights[i], stacks, layer, update_inputs)
            if on_virtual_devices:  # several programs with collectives in flight can block each other
                jax.block_until_ready(weights[i])
            return layer

        by_host(range(self.rounds), self._read, update, self._write, begin=begin)
        self.state.store.end_update(step)
        outer, steps_done, history, metrics, _ = results
        master, moments = self.state.joined(stacks, self.state.files((old.master, old.moments)))
        sections = {self.segment.name: TensorState(joined(weights), master, moments), OUTER: outer}
        return from_sections(steps_done, sections, history), metrics

    def programs(self, *batch) -> list[Program]:
        """All programs of a step, with planned arrays as arguments."""
        plan = self.plan
        layers = self._section(plan)
        not_layers = (section(plan, OUTER), plan.step, plan.history)
        in_memory = self.state.in_memory((layers.master, layers.moments))
        arguments = (*not_layers, layers.weights, *batch)
        found = [Program(self.gradients, arguments, 1, in_memory, layers_read=1)]
        weight_parts = parts(layers.weights)
        for update, part in zip(self.updates, weight_parts, strict=True):
            other_weights = [other.stack for other in weight_parts if other.start != part.start]
            times = len(self._rounds(part))
            found.append(Program(update, self._arguments(part), times, (not_layers, other_weights), layers_read=2))
        return found

    def lower(self, plan: TrainState, *batch) -> "FileStep":
        """The step with all programs lowered. plan: the one that the step was made from."""
        assert jax.tree.structure(plan) == jax.tree.structure(self.plan), "a step is lowered for its own plan"
        return self._with([x.function.lower(*x.arguments) for x in self.programs(*batch)])

    def compile(self, compiler_options=None) -> "FileStep":
        """The lowered step, compiled."""
        return self._with([lowered.compile(compiler_options) for lowered in (self.gradients, *self.updates)])

    def memory_analysis(self) -> None:
        """None, because a step of several programs has no single answer: ask `gradients` and each of `updates`."""

    def _with(self, programs: list) -> "FileStep":
        """A copy of this step with these programs: `gradients`, then `updates`."""
        step = copy.copy(self)
        step.gradients, *step.updates = programs
        return step

    def _read(self, l: int) -> list[jax.Array]:
        """Reads layer l of every stage from the file into pinned host memory."""
        return self.state.read(self.state.layers_of_round(l))

    def _write(self, l: int, layer: list[jax.Array]) -> None:
        """Writes layer l of every stage to the file."""
        self.state.write(self.state.layers_of_round(l), layer)

    def _rounds(self, part: Part) -> range:
        """The layers of each stage whose work weights are in this part."""
        return range(part.start // self.stages, part.stop // self.stages)

    def _gradients(self):
        """The jitted program `gradients`."""
        update = self.step.update

        def per_device(outer, step, history, blocks, *batch):
            weights = {self.segment.name: blocks, OUTER: outer.weights}
            found = self.step.gradients(weights, *batch, history=history, step=step)
            scalars = update.scalars(step, found.norm)
            metrics = metrics_of(found, scalars["lr"])
            outer = update.outer(outer, found.grads, scalars)
            update_inputs = {"grads": found.grads[self.segment.name], "scalars": scalars, "l": jnp.int32(0)}
            return outer, step + 1, found.history, metrics, update_inputs

        donated = (section(self.plan, OUTER), self.plan.step, self.plan.history)
        arguments = (*donated, self._section(self.plan).weights)
        results = (*donated, self.step.metrics, self.update_inputs)
        return self.step.program(per_device, arguments, results, donated=(0, 1, 2))

    def _update(self, part: Part):
        """The jitted program of `updates` for the layers of this part of the work weights."""

        def per_device(weights, stacks, layer, update_inputs):
            l = update_inputs["l"]
            old = self.state.joined(read(stacks, l), [x[0] for x in put(layer, DEVICE)])
            # The barrier ends the reads before the writes begin, as in `update.sweep_part`.
            (master, moments), grads = materialised((old, read(update_inputs["grads"], l)))
            state = TensorState(weights, master, moments)
            done = []
            context = UpdateContext(update_inputs["scalars"], collectives.first_layer(self.rounds) + l)
            for tensor in self.step.update.tensors(self.segment.name, state, grads):
                done.append(tensor.updated(tensor.state.master, tensor.state.moments, tensor.grad, context))
            work, *new = materialised(tuple(as_trees(done, state)))
            stacks = write(stacks, self.state.in_memory(tuple(new)), l)
            layer = put([x[None] for x in self.state.files(tuple(new))], HOST)
            return write(weights, work, l - part.start // self.stages), stacks, layer, l + 1

        arguments = self._arguments(part)
        results = (*arguments[:3], self.plan.step)
        return self.step.program(per_device, arguments, results, batch=False, donated=(0, 1))

    def _arguments(self, part: Part) -> tuple:
        """The planned arguments of the update of this part: `jax.ShapeDtypeStruct`s."""
        stacks = self.state.in_memory(tuple(self._section(self.plan)[1:]))
        return part.stack, stacks, self.state.planned_round(HOST), self.update_inputs

    def _plan_update_inputs(self) -> dict:
        """The plan of `update_inputs`."""
        plan = self.plan

        def replicated(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=plan.step.sharding)

        norm = jax.ShapeDtypeStruct((), jnp.float32)
        scalars = jax.tree.map(replicated, jax.eval_shape(self.step.update.scalars, plan.step, norm))
        grads = self.step.planned_gradients(self.segment.name)
        return {"grads": grads, "scalars": scalars, "l": replicated(plan.step)}
