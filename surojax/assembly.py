"""Assembly: from a model, a placement, an optimizer and a mesh to all that a run is made of; no array exists yet.

`assemble` takes frozen dataclasses and works without a config: tests, benchmarks and notebooks call it.
`from_config` reads them from a checked ConfigDict: `train` builds what it says, the planner adds up its bytes. The mesh
may be abstract.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from surojax.config import fields as configs
from surojax.models.families import FAMILIES
from surojax.models.model import Compute, Model, Recompute
from surojax.numerics import fp8
from surojax.numerics.recipes import Precision
from surojax.optim import optimizer as optim
from surojax.optim.optimizers import OPTIMIZERS
from surojax.parallel import collectives
from surojax.placement.home import DEVICE
from surojax.placement.layout import layouts
from surojax.placement.mesh import SHARD
from surojax.placement.table import SETTINGS, Mesh, Placement, place
from surojax.step import train_step as step
from surojax.step.spec import Engine
from surojax.step.state import TrainState, init_state, load_state
from surojax.step.state_plan import state_plan

# What makes XLA overlap copies and communication with computation. The engine lets all of a layer's copies and gathers
# start with the layer (engine.py); with XLA's defaults each was still started and waited for in one place, most of them
# after the layer's last matrix product. Read from the schedules compiled for an RTX 4090 and an H200 (jax 0.12,
# 2026-11-21; docs/LOG.md); not timed on a GPU yet.
SCHEDULE: dict[str, str | bool | int] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,  # off by default, whatever the documentation says
    "xla_gpu_experimental_parallel_async_compute_limit": 32,  # host copies in flight: all of a layer's; by default 1
    "xla_gpu_all_gather_combine_threshold_bytes": 1 << 32,  # a layer's gathers are one, which overlaps all of a layer
}

# Percent of a GPU's memory that XLA lets a program's temporaries have, 95 by default; beyond it operations are computed
# again and copies are not started ahead. It counts temporaries in host memory (accumulators, residuals) as if they were
# on the device, so they are added to the limit. Qwen-32B, all offloaded, on 4 RTX 4090: 4,284 operations a step were
# computed again, none with it (jax 0.12; arguments in host memory are not counted, whatever their size).
# The percentage is of what the arguments leave of the memory XLA plans with, and without a GPU that is 80 % of it
# (GetSchedulerMemoryLimit in XLA's gpu_hlo_schedule.cc): for Llama-7B at ZeRO-3 on 4 RTX 4090 2.7 GiB of 6.4, so that
# it computed 2,499 operations again and gathered weights without overlapping anything.
MEMORY_LIMIT = "xla_gpu_memory_limit_slop_factor"


# Recipes fp8_*: products of one operand with several (queries, keys, values) stay apart. Merged into one, XLA copies
# weights together and results apart, 290 MiB for a 7B block of 2048 tokens whose products move 104. In 16 bits it costs
# as much, but there copies overlap worse without it (docs/LOG.md).
APART: dict[str, str | bool | int] = {"xla_gpu_dot_merger_threshold_mb": 0}


def schedule_options(precision: Precision) -> dict[str, str | bool | int]:
    """XLA options that schedule a step on a GPU."""
    return SCHEDULE | (APART if precision.fp8 else {})


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A run: its model, optimizer, the plan of its state, and the engine that works on it."""

    model: Model
    optimizer: optim.Optimizer
    plan: TrainState
    engine: Engine
    mesh: Mesh

    @property
    def params(self) -> dict:
        """The model's `Param`s by section."""
        return self.model.params

    def init_state(self, seed: int) -> TrainState:
        """A new state, each array created in its own sharding and memory."""
        return init_state(self.model, self.plan, self.optimizer, seed)

    def load_state(self, layer: Callable, outer: Callable) -> TrainState:
        """A new state with weights that are read layer by layer; see `state.load_state`."""
        return load_state(self.model, self.plan, self.optimizer, layer, outer)

    def train_step(self):
        """See `step.make_train_step`."""
        return step.make_train_step(self.engine, self.optimizer, self.plan, self.mesh)

    def compiler_options(
        self, platform: str, *, memory_bytes: int | None = None, plans_with: float = 1.0, host_temporaries: int = 0
    ) -> dict[str, str | bool | int]:
        """XLA options to compile the steps with, for devices of this platform, "gpu" or "cpu".

        memory_bytes: that JAX has on a GPU; plans_with: the part of it that XLA plans with; host_temporaries: bytes in
        host memory that a step allocates there; see `MEMORY_LIMIT`. Left out, nothing is corrected.
        """
        schedule, limit = schedule_options(self.model.precision) if platform == "gpu" else {}, {}
        if platform == "gpu" and memory_bytes:
            state = self.state_bytes()
            left = plans_with * memory_bytes - state
            wanted = 0.95 * memory_bytes - state + 2 * host_temporaries
            limit = {MEMORY_LIMIT: math.ceil(100 * wanted / left) if left > 0 else 95}
        return schedule | limit | collectives.compiler_options(self.engine.table.copy_engine)

    def state_bytes(self) -> int:
        """Bytes of the state in the device memory of one GPU."""
        arrays = [x for x in jax.tree.leaves(self.plan) if isinstance(x, jax.ShapeDtypeStruct)]  # not in files
        found = [x for x in arrays if x.sharding.memory_kind in (None, DEVICE.memory_kind)]
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in found)

    def eval_step(self):
        """See `step.make_eval_step`."""
        return step.make_eval_step(self.engine, self.plan, self.mesh)


def assemble(
    model: Model,
    *,
    table: Placement,
    optimizer: optim.Optimizer,
    mesh: Mesh,
    recompute_block: bool = True,
    lmhead_chunks: int = 1,
    z_loss: float = 0.0,
) -> Assembly:
    """A run of this model. Raises ConfigError for a table that does not fit the model or the mesh."""
    of_classes = layouts(model.params, table, mesh)
    engine = Engine(model, table, of_classes, recompute_block, lmhead_chunks, z_loss)
    precision = model.precision
    history = None
    if precision.delayed:
        history = fp8.history_shape(model.num_layers, model.sites, precision.amax_history)
    plan = state_plan(model, table, of_classes, optimizer, mesh, history=history)
    return Assembly(model, optimizer, plan, engine, mesh)


def from_config(c: configs.Config, mesh: Mesh, total_steps: int) -> Assembly:
    """The run of a checked config on a mesh, with a schedule for `total_steps`."""
    settings = {name: c[name] for name in SETTINGS}
    return assemble(
        model(c),
        table=place(**settings, num_shards=mesh.shape[SHARD]),
        optimizer=_optimizer(c, total_steps),
        mesh=mesh,
        recompute_block=c.recompute_block,
        lmhead_chunks=c.lmhead_chunks,
        z_loss=c.z_loss,
    )


def architecture(c: configs.Config) -> Any:
    """The frozen architecture of a checked config: of a Llama, a `LlamaConfig`."""
    settings = c.model.to_dict() | {"head_dim": configs.head_dim(c)}
    return FAMILIES[settings.pop("model_type")].architecture(settings)


def compute(c: configs.Config) -> Compute:
    """How a checked config computes its model."""
    return Compute(
        attention=c.attention,
        recompute=Recompute(**{name.removeprefix("recompute_"): c[name] for name in configs.RECOMPUTE_PARTS}),
        precision=Precision(
            recipe=c.recipe,
            matmul_dtype=c.matmul_dtype,
            gradient_dtype=c.gradient_dtype,
            amax_history=c.fp8_amax_history,
            margin=c.fp8_margin,
            skip_first=c.skip_quant_first_layers,
            skip_last=c.skip_quant_last_layers,
            kernels=c.kernels,
            block_scaled_products=c.block_scaled_products,
        ),
    )


def model(c: configs.Config) -> Model:
    """The model of a checked config."""
    return FAMILIES[c.model.model_type].build(architecture(c), compute(c))


def _schedule(c: configs.Config, peak: float, total_steps: int) -> optim.Schedule:
    return optim.learning_rate_schedule(
        c.lr_scheduler_type,
        peak=peak,
        total_steps=total_steps,
        warmup_steps=configs.warmup_steps(c, total_steps),
        cooldown_steps=c.cooldown_steps,
        final_fraction=c.final_lr_fraction,
    )


def _optimizer(c: configs.Config, total_steps: int) -> optim.Optimizer:
    """The optimizer that a config asks for, with its settings."""
    rate = lambda peak: _schedule(c, peak, total_steps)
    settings = {
        "b1": c.adamw_beta1,
        "b2": c.adamw_beta2,
        "eps": c.adamw_epsilon,
        "weight_decay": c.weight_decay,
        "max_grad_norm": c.max_grad_norm,
        "m_dtype": c.opt_m_dtype,
        "v_dtype": c.opt_v_dtype,
    }
    if c.optimizer == "normuon":
        settings |= {
            "matrices": rate(c.muon_learning_rate or c.learning_rate),
            "momentum": c.muon_momentum,
            "beta2": c.muon_beta2,
            "steps": c.muon_ns_steps,
        }
    if c.optimizer == "adamw8bit":
        settings["implementation"] = compute(c).precision.implementation
    return OPTIMIZERS[c.optimizer](rate(c.learning_rate), **settings)
