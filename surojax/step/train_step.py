"""One optimizer step, and one evaluation batch, as compiled programs over the mesh.

A step is `engine.loss_and_gradients` and an `update.Update`. All of it is one program, unless a class of tensors is in
a file (memory/in_file.py): then it is a `file_step.FileStep` of several programs. With `Engine.overlap_update` it is an
`overlap.OverlappedStep`, whose updates come a step late: see `up_to_date`.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from surojax.optim.optimizer import Optimizer
from surojax.placement.mesh import pipeline_stages
from surojax.placement.table import Mesh
from surojax.step import engine as whole_model, pipeline
from surojax.step.between import NO_FILES, StacksInFiles
from surojax.step.file_step import FileStep, PendingUpdate
from surojax.step.layer_evaluation import LayerEvaluation
from surojax.step.layer_gradients import LayerGradients
from surojax.step.overlap import OverlappedStep, Pending
from surojax.step.spec import Engine
from surojax.step.state import TrainState
from surojax.step.step_gradients import WholeGradients
from surojax.step.step_parts import StepParts, jitted
from surojax.step.update import Update

BATCHES_IN_FLIGHT = 16  # of an evaluation with weights in files: their activations are in device memory together


def passes(mesh: Mesh):
    """Returns the module with forward and backward passes for a mesh."""
    return pipeline if pipeline_stages(mesh) > 1 else whole_model


def make_step_parts(engine: Engine, optimizer: Optimizer, plan: TrainState, mesh: Mesh) -> StepParts:
    """Makes the parts of a step."""
    gradients = functools.partial(passes(mesh).loss_and_gradients, engine)
    return StepParts(engine, mesh, plan, gradients, Update(engine, optimizer))


def make_train_step(
    engine: Engine, optimizer: Optimizer, plan: TrainState, mesh: Mesh, files: StacksInFiles = NO_FILES
) -> Callable:
    """Makes a jitted (state, inputs `[A, B, S]`, labels) -> (state, {"loss", "grad_norm", "lr", ...}).

    Its other arguments are those of `Engine.batch_arrays`, and its metrics have the other means of the objective too.
    The state is donated: its arrays are updated in place. loss: mean over all labels of the batch, in nats. grad_norm:
    the global norm before clipping. lr: the learning rate of this step. If layers are in a file, the result is a
    `FileStep`, which is called, lowered and compiled in the same way; and so is an `OverlappedStep`. files: what a step
    keeps there.
    """
    step = make_step_parts(engine, optimizer, plan, mesh)
    gradients, update = step.gradients, step.update
    if engine.table.in_files:
        return FileStep(step, LayerGradients(step, files) if engine.table.by_layer else WholeGradients(step))
    if engine.overlap_update:
        return OverlappedStep(step)

    def per_device(state: TrainState, *batch):
        gradients_of_step = gradients(state.weights, *batch, progress=state.progress)
        scalars = update.scalars(state.step, gradients_of_step.norm)
        new = update.everything(state, gradients_of_step.grads, scalars, gradients_of_step.progress)
        return new, gradients_of_step.reported(scalars["lr"])

    return step.program(per_device, (plan,), (plan, step.metrics), donated=(0,))


def make_gradients(engine: Engine, optimizer: Optimizer, plan: TrainState, mesh: Mesh) -> Callable:
    """Makes a jitted (weights, progress, inputs `[A, B, S]`, labels) -> (loss, gradients by section) of a step.

    progress: `TrainState.progress`. The gradients are sharded as master weights, before clipping.
    """
    parts = make_step_parts(engine, optimizer, plan, mesh)

    def per_device(weights, progress, *batch):
        gradients = parts.gradients(weights, *batch, progress=progress)
        return gradients.loss, gradients.grads

    results = (parts.metrics["loss"], parts.planned_gradients)
    return parts.program(per_device, (plan.weights, plan.progress), results)


def up_to_date(step: Any, state: TrainState | Pending | PendingUpdate) -> TrainState:
    """Applies the pending update of a step's result, if any. step: the compiled step, to which the state is donated."""
    return state if isinstance(state, TrainState) else step.finish(state)


def evaluated(step: Any, weights: Any, batches: Iterable[tuple]) -> Iterator[tuple]:
    """Yields a compiled evaluation step's result for each batch. Weights in files are read once for several.

    All devices are done by then. To read a result waits for one of them, and on virtual CPU devices a training step
    that replaces the weights does not wait for the others, which read them.
    """
    if isinstance(step, LayerEvaluation):
        groups = itertools.batched(batches, BATCHES_IN_FLIGHT)
        results = itertools.chain.from_iterable(step.each(weights, together) for together in groups)
    else:
        results = (step(weights, *batch) for batch in batches)
    yield from map(jax.block_until_ready, results)


def make_eval_step(engine: Engine, plan: TrainState, mesh: Mesh) -> Any:
    """Makes a jitted (weights, inputs `[B, S]`, labels) -> ({"loss": summed, in nats, ...}, number of labels).

    Sums and number of terms are those of the objective, and the other arguments those of `Engine.batch_arrays`. With
    weights in files the result is a `LayerEvaluation`, which is called, lowered and compiled in the same way.
    """
    if engine.table.weights.home.in_file:
        return LayerEvaluation(engine, plan, mesh)

    def per_device(weights, *batch):
        return passes(mesh).evaluate(engine, weights, *batch)

    return jitted(per_device, mesh, (plan.weights,), batch_arrays=len(engine.batch_arrays), accumulated=False)
