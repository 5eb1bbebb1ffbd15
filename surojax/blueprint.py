"""From a checked config and a mesh to everything that a run is made of, drawn but not built: no array exists yet.

The commands share it: `train` builds what it says, `fit` adds up its bytes. The mesh may be abstract.
"""

import dataclasses

import optax

from surojax import collectives, config as configs, optim, placement, step
from surojax.engine import Engine
from surojax.mesh import SHARD
from surojax.models.llama import LlamaConfig, abstract_params, functions
from surojax.state import TrainState


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """A run: its model, optimizer, the plan of its state, and the engine that works on it."""

    model: LlamaConfig
    optimizer: optax.GradientTransformation
    schedule: optim.Schedule
    params: dict  # shapes of the float32 parameters
    plan: TrainState
    engine: Engine
    mesh: placement.Mesh

    def train_step(self):
        """See `step.make_train_step`."""
        return step.make_train_step(self.engine, self.optimizer, self.schedule, self.plan, self.mesh)

    @property
    def compiler_options(self) -> dict[str, str | bool]:
        """What to compile the steps with."""
        return collectives.compiler_options(self.engine.placement.copy_engine)

    def eval_step(self):
        """See `step.make_eval_step`."""
        return step.make_eval_step(self.engine, self.plan, self.mesh)


def draw(c: configs.Config, mesh: placement.Mesh, total_steps: int) -> Blueprint:
    """The blueprint of a checked config on a mesh, for a run of `total_steps`."""
    model = configs.model_config(c)
    schedule = optim.learning_rate_schedule(
        c.lr_scheduler_type,
        peak=c.learning_rate,
        total_steps=total_steps,
        warmup_steps=configs.warmup_steps(c, total_steps),
        cooldown_steps=c.cooldown_steps,
        final_fraction=c.final_lr_fraction,
    )
    optimizer = optim.adamw(
        schedule,
        b1=c.adamw_beta1,
        b2=c.adamw_beta2,
        eps=c.adamw_epsilon,
        weight_decay=c.weight_decay,
        max_grad_norm=c.max_grad_norm,
        m_dtype=c.opt_m_dtype,
        v_dtype=c.opt_v_dtype,
    )
    table = placement.place(**{name: c[name] for name in placement.SETTINGS}, num_shards=mesh.shape[SHARD])
    params, _ = abstract_params(model)
    dims = placement.shard_dims(params, mesh)
    resting = placement.resting_dims(params, dims, table)
    engine = Engine(functions(model), table, dims, resting, c.recompute_block, c.lmhead_chunks)
    return Blueprint(
        model, optimizer, schedule, params, placement.state_plan(params, table, optimizer, mesh), engine, mesh
    )
