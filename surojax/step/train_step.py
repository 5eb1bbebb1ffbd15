"""One optimizer step, and one evaluation batch, as compiled programs over the mesh.

A step is `engine.loss_and_gradients`, the optimizer's `scalars`, and `update.update`. All of it is one program, unless
master weights or moments are in a file (memory/in_file.py). Then it is a `file_step.FileStep` of several programs.
With `Engine.overlap_update` it is an `overlap.OverlappedStep`, whose updates come a step late: see `up_to_date`.
"""

from collections.abc import Callable
from typing import Any

import jax

from surojax.memory.in_file import store_of
from surojax.optim import optimizer as optim
from surojax.optim.optimizer import Optimizer
from surojax.placement.layout import batch_sharding
from surojax.placement.mesh import pipeline_stages
from surojax.placement.table import Mesh
from surojax.step import engine as whole_model, pipeline
from surojax.step.file_step import FileStep
from surojax.step.metrics import metrics_of, plan_metrics
from surojax.step.overlap import OverlappedStep, Pending
from surojax.step.spec import Engine
from surojax.step.state import TrainState, shardings, specs_of
from surojax.step.update import update


def passes(mesh: Mesh):
    """The module with forward and backward passes for a mesh."""
    return pipeline if pipeline_stages(mesh) > 1 else whole_model


def make_train_step(engine: Engine, optimizer: Optimizer, plan: TrainState, mesh: Mesh) -> Callable:
    """A jitted (state, inputs `[A, B, S]`, labels) -> (state, {"loss", "grad_norm", "lr"}), see `metrics`.

    A packed engine's step has one more argument: starts; see `Engine.batch_arrays`.
    The state is donated: its arrays are updated in place. loss: mean over all labels of the batch, in nats. grad_norm:
    the global norm before clipping. lr: the learning rate of this step. If layers are in a file, the result is a
    `FileStep`, which is called, lowered and compiled in the same way; and so is an `OverlappedStep`.
    """
    if store_of(plan) is not None:
        return FileStep(engine, optimizer, plan, mesh, passes(mesh).loss_and_gradients)
    if engine.overlap_update:
        return OverlappedStep(engine, optimizer, plan, mesh, whole_model.loss_and_gradients)

    def per_device(state: TrainState, *batch):
        found = passes(mesh).loss_and_gradients(engine, state.weights, *batch, history=state.history, step=state.step)
        scalars = optim.scalars(optimizer, state.step, found.norm)
        metrics = metrics_of(found, scalars["lr"])
        return update(engine, optimizer, state, found.grads, scalars, found.history), metrics

    spec = specs_of(plan)
    tokens = [batch_sharding(mesh).spec for _ in engine.batch_arrays]
    results = (plan, plan_metrics(engine, mesh))
    step = jax.shard_map(per_device, mesh=mesh, in_specs=(spec, *tokens), out_specs=specs_of(results))
    return jax.jit(step, donate_argnums=0, out_shardings=shardings(results))


def up_to_date(step: Any, state: TrainState | Pending) -> TrainState:
    """The state that a step returned, with all updates applied. step: the compiled step, to which it is donated."""
    return step.finish(state) if isinstance(state, Pending) else state


def make_eval_step(engine: Engine, plan: TrainState, mesh: Mesh) -> Callable:
    """A jitted (weights, inputs `[B, S]`, labels) -> (summed loss in nats, number of labels).

    A packed engine's step has one more argument: starts.
    """
    tokens = [batch_sharding(mesh, accumulated=False).spec for _ in engine.batch_arrays]

    def per_device(weights, *batch):
        return passes(mesh).evaluate(engine, weights, *batch)

    in_specs = (specs_of(plan.weights), *tokens)
    return jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=in_specs, out_specs=jax.P()))
