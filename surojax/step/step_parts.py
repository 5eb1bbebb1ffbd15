"""The parts that all kinds of training steps share: gradients, update, and plans of arguments and results."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from surojax.placement.home import HOST
from surojax.placement.layout import Layout, batch_sharding, specs
from surojax.placement.table import Mesh
from surojax.step.spec import Engine
from surojax.step.state import TrainState, shardings, specs_of
from surojax.step.totals import plan_metrics
from surojax.step.update import Update


@dataclasses.dataclass(frozen=True)
class StepParts:
    """The parts of a training step.

    plan: of the training state. gradients: forward and backward of engine.py or pipeline.py, a function (weights,
    *batch, progress) -> `verbs.Gradients`, of what one device has. update: what follows.
    """

    engine: Engine
    mesh: Mesh
    plan: TrainState
    gradients: Callable
    update: Update

    @property
    def metrics(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Plans a step's metrics."""
        return plan_metrics(self.engine, self.mesh)

    @functools.cached_property
    def planned_gradients(self) -> dict[str, Any]:
        """The plan of gradients by section: sharded as master weights, the blocks' in the accumulators' home.

        What goes on to a file is in host memory.
        """
        row = self.engine.table.grads
        mesh = self.plan.step.sharding.mesh  # abstract if the devices to compile for are not there

        def one(master, spec, layout: Layout):
            home = HOST if layout.home.in_file else layout.home
            sharding = jax.NamedSharding(mesh, spec, memory_kind=home.memory_kind)
            return jax.ShapeDtypeStruct(master.shape, row.dtype, sharding=sharding)

        layouts = self.engine.layouts
        trees = self.plan.master, specs(layouts.master), layouts.grads
        return {name: jax.tree.map(one, *(tree[name] for tree in trees)) for name in self.plan.master}

    def planned_scalars(self):
        """Plans the results of `Update.scalars`."""
        scalars = jax.eval_shape(self.update.scalars, self.plan.step, jax.ShapeDtypeStruct((), jnp.float32))
        sharding = self.plan.step.sharding
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), scalars)

    def program(
        self, per_device: Callable, arguments: tuple, results: Any, donated: tuple[int, ...] = (), *, batch: bool = True
    ) -> Any:
        """Jits a function of these arguments, and of a step's batch unless batch=False; see `jitted`."""
        batch_arrays = len(self.engine.batch_arrays) if batch else 0
        return jitted(per_device, self.mesh, arguments, results, batch_arrays=batch_arrays, donated=donated)


def jitted(
    per_device: Callable,
    mesh: Mesh,
    arguments: tuple,
    results: Any = None,
    *,
    batch_arrays: int = 0,
    accumulated: bool = True,
    donated: tuple[int, ...] = (),
) -> Any:
    """Jits a function of these arguments and of a batch, over the mesh.

    arguments, results: their plans, whose shardings they have; results None: on every device the same. batch_arrays:
    their number, `[A, B, S]`, or `[B, S]` if not accumulated. donated: numbers of the arguments that are given away.
    """
    tokens = [batch_sharding(mesh, accumulated=accumulated).spec] * batch_arrays
    out_specs = jax.P() if results is None else specs_of(results)
    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=(*specs_of(arguments), *tokens), out_specs=out_specs)
    if results is None:
        return jax.jit(sharded)
    return jax.jit(sharded, donate_argnums=donated, out_shardings=shardings(results))
