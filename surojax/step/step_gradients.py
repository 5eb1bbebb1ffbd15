"""The gradients of a `file_step.FileStep`: by one program here, by programs of a layer in layer_gradients.py."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from surojax.memory.host import read
from surojax.placement.param import OUTER, part_of
from surojax.step.between import SegmentLayer
from surojax.step.several_programs import NO_BYTES, Program
from surojax.step.state import TensorState, section
from surojax.step.step_parts import StepParts
from surojax.step.tables import planned_gradients, without_tables
from surojax.step.verbs import Gradients


class StepGradients:
    """Base class: computes a step's gradients and updates embedding and head, but for tables with state in files.

    A call is (`SeveralPrograms.run`, outer state, progress, block weights by segment, *batch) -> (outer state,
    progress, metrics, update_inputs, of_tables); outer state and progress are donated. update_inputs: {"grads",
    "scalars", "l"}, read by the update of each layer; l starts at 0 in each segment. of_tables: gradients of tables
    with state in files.

    functions: the programs by name. largest: see `Update.outer`. Other methods say how the updates of layers read
    gradients: here they are stacks of all layers in memory, in update_inputs.
    """

    functions: dict[Any, Any]

    def __init__(self, step: StepParts, grads: dict[str, Any]):
        """grads: the plan of the gradients in update_inputs, by segment."""
        self.step = step
        self.update_inputs = {"grads": grads, "scalars": step.planned_scalars(), "l": step.plan.step}
        self.of_tables = planned_gradients(step)
        self.donated = without_tables(section(step.plan, OUTER)), step.plan.progress
        self.results = *self.donated, step.metrics, self.update_inputs, self.of_tables
        stacks = [step.planned_gradients[segment.name] for segment in step.engine.model.segments]
        self.largest = max(math.prod(x.sharding.shard_shape(x.shape)[1:]) for x in jax.tree.leaves(stacks))

    def __call__(self, run: Callable, *arguments: Any) -> tuple:
        """Computes the gradients of a step."""
        raise NotImplementedError

    def programs(self, *arguments: Any) -> list[Program]:
        """Plans the programs for planned arguments of a call, in the order of `functions`."""
        raise NotImplementedError

    def finished(self, outer: TensorState, gradients: Gradients) -> tuple:
        """The results of a call, inside its last program."""
        update, progress = self.step.update, gradients.progress
        scalars = update.scalars(progress.step, gradients.norm)
        outer = update.outer(outer, gradients.grads[OUTER], scalars, largest=self.largest)
        grads = {name: gradients.grads[name] for name in self.update_inputs["grads"]}
        update_inputs = {"grads": grads, "scalars": scalars, "l": jnp.int32(0)}
        of_tables = part_of(gradients.grads[OUTER], self.of_tables)
        return outer, progress.next(), gradients.reported(scalars["lr"]), update_inputs, of_tables

    def read(self, layer: SegmentLayer) -> Any:
        """Reads a layer's gradients that are not in update_inputs."""
        return ()

    def of_layer(self, segment: str, update_inputs: Any, layer: Any, l: Any) -> Any:
        """Returns layer l's gradients in device memory. layer: the result of `read`. Inside `jit`."""
        return read(update_inputs["grads"][segment], l)

    def planned_grads(self, segment: str) -> Any:
        """Plans the result of `read`."""
        return ()

    def file_bytes(self, segment: str) -> Counter[str]:
        """Bytes of a layer's gradients in files, by tensor class."""
        return NO_BYTES

    def others_of_update(self, segment: str) -> Any:
        """Plans gradients of other layers that are in memory while a layer is updated, but are no arguments of that."""
        return ()

    def in_memory(self) -> Any:
        """Plans all layers' gradients in memory."""
        return self.update_inputs["grads"]


class WholeGradients(StepGradients):
    """Computes the gradients of all layers in one program."""

    def __init__(self, step: StepParts):
        segments = [segment.name for segment in step.engine.model.segments]
        super().__init__(step, part_of(step.planned_gradients, dict.fromkeys(segments)))

        def per_device(outer, progress, blocks, *batch):
            weights = {**blocks, OUTER: outer.weights}
            gradients = step.gradients(weights, *batch, progress=progress)
            return self.finished(outer, gradients)

        arguments = *self.donated, {name: step.plan.weights[name] for name in segments}
        self.functions = {"gradients": step.program(per_device, arguments, self.results, donated=(0, 1))}

    def __call__(self, run: Callable, *arguments):
        """See `StepGradients`."""
        return run("gradients", *arguments)

    def programs(self, *arguments) -> list[Program]:
        """See `StepGradients`."""
        return [Program(self.functions["gradients"], arguments, 1)]
