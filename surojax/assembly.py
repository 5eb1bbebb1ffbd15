"""Assembly: makes the parts of a run from a model, a placement, an optimizer and a mesh. No array is created.

`assemble` takes frozen dataclasses and needs no config: tests, benchmarks and notebooks call it. `from_config` makes
these dataclasses from a checked ConfigDict: `train` runs the result, the planner adds up its bytes. The mesh can be
abstract.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from surojax.config import fields as configs
from surojax.config.checks import REFUSALS
from surojax.errors import ConfigError
from surojax.families.registry import ARCHITECTURES
from surojax.memory.host import parts
from surojax.memory.in_file import own_layers
from surojax.memory.layer_file import Store
from surojax.models.lora import Lora, saved_names, target_names
from surojax.models.model import Compute, Model, Recompute, Segment
from surojax.models.router_losses import RouterLosses
from surojax.numerics import fp8
from surojax.numerics.base_formats import Coded, is_coded
from surojax.numerics.recipes import Precision
from surojax.optim import optimizer as optim, optimizers
from surojax.optim.from_optax import MakeTransformation, from_optax
from surojax.optim.learning_rate import Schedule, learning_rate_schedule
from surojax.parallel import collectives
from surojax.placement.home import DEVICE, HOST
from surojax.placement.layout import layouts
from surojax.placement.mesh import data_parallel, pipeline_stages, shards
from surojax.placement.param import Param
from surojax.placement.table import SETTINGS, Mesh, Placement, Storage, place
from surojax.refusals.features import BY_LAYER, RECOMPUTE_PARTS
from surojax.refusals.refusal import about, refused
from surojax.step import complete, objectives, train_step as step
from surojax.step.layer_gradients import Files, planned_files
from surojax.step.objective import REFERENCE, CrossEntropy, LossOfLogits, Objective, OfSequences
from surojax.step.spec import Engine
from surojax.step.stage_layers import of_stage
from surojax.step.state import TrainState, init_state, load_state
from surojax.step.state_plan import bytes_per_device, state_plan, with_device_memory

OVERLAP = "overlap"  # xla_options: those below; else XLA's own defaults

# XLA options that overlap copies and communication with computation. In the engine's program all copies and all-gathers
# of a layer can start when the layer starts (engine.py). With XLA's defaults, each was nevertheless started and awaited
# at the same place in the schedule, most of them after the last matrix product of the layer. Source: schedules compiled
# for an RTX 4090 and an H200 (jax 0.12, 2026-11-21; docs/LOG.md). Not timed on a GPU yet.
SCHEDULE: dict[str, str | bool | int] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,  # False by default, although the documentation says otherwise
    "xla_gpu_experimental_parallel_async_compute_limit": 32,  # host copies in flight: all of a layer; 1 by default
    "xla_gpu_all_gather_combine_threshold_bytes": 1 << 32,  # one all-gather per layer, which overlaps with all of it
}
# XLA takes a collective to last as long as five products, and begins it so much earlier than it is awaited. Over PCI
# Express the link then rested for the first 4.5 of a layer's 60 ms backward (7B at ZeRO-3 on four RTX 4090). There is
# no option for that, but XLA reads a profile: this one has nothing but all-gathers, of eight products. Shards that come
# from host memory are not there as early: 70B with five offloads on 8 H100 gained nothing and needed 5.87 instead of
# 5.76 GiB, so they go without. What the profile lacks is estimated as before, which the check of measured profiles
# would call an error.
GATHERS: dict[str, str | bool | int] = {
    "xla_gpu_pgle_profile_file_or_directory_path": str(Path(__file__).with_name("gathers.pbtxt")),
    "xla_gpu_pgle_accuracy_checker": "PGLE_STRICTNESS_LEVEL_OFF",
}

# Percentage of a GPU's memory that XLA lets temporaries of a program use, 95 by default. Above this limit XLA
# recomputes operations and does not prefetch.
# XLA counts temporaries in host memory (accumulators, residuals) as device memory, so `compiler_options` adds them to
# the limit. Qwen-32B with everything offloaded, on 4 RTX 4090: 4,284 operations per step were recomputed without the
# correction and none with it (jax 0.12). Arguments in host memory are not counted, whatever their size, unless one loop
# writes to many of them: with overlap_update the state there is added too (7B with five offloads on one RTX 4090: 112
# operations without that, none with it).
# The percentage applies to the memory that XLA plans with, minus the arguments. Without a GPU, XLA plans with 80 % of
# the memory (GetSchedulerMemoryLimit in XLA's gpu_hlo_schedule.cc). Llama-7B at ZeRO-3 on 4 RTX 4090 then had 2.7 GiB
# instead of 6.4, so that XLA recomputed 2,499 operations and overlapped no all-gather of weights.
MEMORY_LIMIT = "xla_gpu_memory_limit_slop_factor"


# Recipes fp8_*: XLA does not merge products that share an operand (queries, keys, values). To merge them, XLA copies
# the weights into one array and the results out of one: 290 MiB for a 7B block of 2048 tokens, whose products read and
# write 104 MiB. In 16 bits merging costs as much, but there copies overlap worse without it (docs/LOG.md). Of experts
# it would merge gate and up for every block of rows: 2 % of a step of Qwen3-30B-A3B.
APART: dict[str, str | bool | int] = {"xla_gpu_dot_merger_threshold_mb": 0}


def schedule_options(model: Model) -> dict[str, str | bool | int]:
    """The XLA options that schedule a step of this model on a GPU."""
    has_experts = any(segment.statistics is not None for segment in model.segments)
    return SCHEDULE | (APART if model.precision.fp8 or has_experts else {})


@dataclasses.dataclass(frozen=True)
class Assembly:
    """The parts of a run.

    plan: of its training state. store: the file of the classes that are in one; an empty store if none is. files: what
    a step keeps there. xla_options: of a step on a GPU, a value of the field.
    """

    model: Model
    optimizer: optim.Optimizer
    plan: TrainState
    engine: Engine
    mesh: Mesh
    store: Store
    files: Files
    xla_options: str = OVERLAP

    @property
    def params(self) -> dict:
        """The model's `Param`s by section."""
        return self.model.params

    @property
    def layers(self) -> dict[str, int]:
        """The number of layers of each segment; its stacks may be padded, see step/padding.py."""
        return {segment.name: segment.num_layers for segment in self.model.segments}

    def init_state(self, seed: int) -> TrainState:
        """A new state, each array created in its own sharding and memory."""
        return init_state(self.model, self.plan, self.optimizer, seed)

    def load_state(
        self, layer: Callable, outer: Callable, seed: int = 0, *, reads_adapters: bool = False
    ) -> TrainState:
        """A new state with weights that are read layer by layer; see `state.load_state`."""
        of_run = self.model, self.plan, self.optimizer
        return load_state(*of_run, layer, outer, seed, reads_adapters=reads_adapters)

    def coded(self, segment: Segment, param: Param) -> Coded | None:
        """The planned stack of a parameter of a segment, if it rests in the base's format; else None."""
        if not self.engine.table.base_format:
            return None
        planned = parts(self.plan.weights[segment.name])[0].stack
        for key in param.name.split("."):
            planned = planned[key]
        return planned if is_coded(planned) else None

    def train_step(self):
        """See `step.make_train_step`."""
        return step.make_train_step(self.engine, self.optimizer, self.plan, self.mesh, self.files)

    def gradients(self):
        """See `step.make_gradients`."""
        return step.make_gradients(self.engine, self.optimizer, self.plan, self.mesh)

    def compiler_options(
        self, platform: str, *, memory_bytes: int | None = None, plans_with: float = 1.0, host_temporaries: int = 0
    ) -> dict[str, str | bool | int]:
        """The XLA options to compile the steps with, for devices of this platform, "gpu" or "cpu".

        memory_bytes: memory of a GPU that JAX can use. plans_with: the fraction of it that XLA plans with.
        host_temporaries: bytes of host memory that a step allocates. XLA's memory limit is corrected with these three,
        see `MEMORY_LIMIT`; without memory_bytes it is not changed. With xla_options="default" there are none but those
        of the copy engine settings.
        """
        if platform == "cpu":
            # With the collectives of a device in flight together, two cores deadlocked, and once read what was not
            # there yet (jaxlib 0.12, offloaded quants under tp).
            return {"xla_cpu_enable_concurrency_optimized_scheduler": False} if self.mesh.size > 1 else {}
        table = self.engine.table
        copy_engine_options = collectives.compiler_options(table.copy_engine)
        if self.xla_options != OVERLAP:
            return {**copy_engine_options}
        schedule = schedule_options(self.model)
        if table.weights.sharded and not table.streams_weights:
            schedule |= GATHERS
        limit = {}
        if memory_bytes:
            state = bytes_per_device(self.plan)
            left = plans_with * memory_bytes - state
            wanted = 0.95 * memory_bytes - state + 2 * host_temporaries
            if self.engine.overlap_update and not self.engine.table.in_files:
                wanted += bytes_per_device(self.plan, HOST)
            limit = {MEMORY_LIMIT: math.ceil(100 * wanted / left) if left > 0 else 95}
        return schedule | limit | copy_engine_options

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
    objective: Objective | OfSequences | None = None,
    auxiliary: Callable | None = None,
    reference: Model | None = None,
    packed: bool = False,
    microbatches_per_fetch: int = 1,
    overlap_update: bool = False,
    pp_schedule: str = "gpipe",
    locates_nonfinite: bool = False,
    batch: tuple[int, int, int] | None = None,
    xla_options: str = OVERLAP,
) -> Assembly:
    """Returns the parts of a run: its step, its evaluation, the plan of its state. No array is made.

    Raises ConfigError if the table does not fit the model or the mesh.

    batch: (microbatches, sequences of a microbatch on all devices, sequence length) of a step, which residuals in files
    are planned for. objective: None: cross-entropy with this z_loss. auxiliary, reference, recompute_block,
    lmhead_chunks, packed, microbatches_per_fetch, overlap_update, pp_schedule, locates_nonfinite: see `spec.Engine`.
    xla_options: see `Assembly`.
    """
    if pipeline_stages(mesh) > 1:
        of_stage(model, pipeline_stages(mesh))  # raises
    only_state_in_files = table.in_files and not table.by_layer
    if overlap_update and (table.grads.home == DEVICE or only_state_in_files or pipeline_stages(mesh) > 1):
        raise ConfigError(
            "overlap_update: expected offload_grads, not only state in files, and pp_size=1 with it, got True without; "
            "leave it out"
        )
    if table.by_layer and jax.process_count() > 1:
        raise ConfigError(
            "offload_weights, offload_grads, offload_residual: expected true or false with several processes, got "
            "'nvme', which is not built for them; set them to true"
        )
    if table.slots > 1 and jax.process_count() > 1:
        raise ConfigError(
            f"nvme_slots: expected 1 with several processes, whose files would have to agree on a step, got "
            f"{table.slots}; leave it out"
        )
    own = own_layers(mesh, model.num_layers)
    store = Store(table.folder, model.num_layers, own, in_memory=table.files_in_memory, slots=table.slots)
    of_classes = layouts(model.params, table, mesh)
    of_classes = with_device_memory(model, table, of_classes, optimizer, mesh, store)
    engine = Engine(
        model,
        table,
        of_classes,
        recompute_block=recompute_block,
        lmhead_chunks=lmhead_chunks,
        objective=objective or CrossEntropy(z_loss),
        auxiliary=auxiliary,
        reference=reference,
        packed=packed,
        microbatches_per_fetch=microbatches_per_fetch,
        overlap_update=overlap_update,
        pp_schedule=pp_schedule,
        locates_nonfinite=locates_nonfinite,
    )
    precision = model.precision
    history = None
    if precision.delayed:
        history = fp8.history_shape(model.num_layers, model.sites, precision.amax_history)
    plan = state_plan(model, table, of_classes, optimizer, mesh, store, history=history)
    complete.reserve(plan, store)
    files = planned_files(step.parts_of(engine, optimizer, plan, mesh), store, batch)
    return Assembly(model, optimizer, plan, engine, mesh, store, files, xla_options)


class Brought(NamedTuple):
    """What a caller brings in place of the config's optimizer, its objective, and the standard block.

    optimizer: a function of the learning rate that returns an elementwise transformation of optax, such as optax.lion.
    objective: what is minimised, of the labels of the data. block: a subclass of the architecture's block.
    """

    optimizer: MakeTransformation | None = None
    objective: Objective | None = None
    block: type | None = None


NOTHING = Brought()


def from_config(
    c: configs.Config, mesh: Mesh, total_steps: int, *, locates_nonfinite: bool = False, brought: Brought = NOTHING
) -> Assembly:
    """The parts of the run of a checked config on a mesh, with a learning rate schedule for `total_steps`.

    locates_nonfinite: see `spec.Engine`. Raises ConfigError if what the caller brought does not go with the config.
    """
    table = place(Storage(**{name: c[name] for name in SETTINGS}), num_shards=shards(mesh))
    objective = brought.objective or objectives.built(configs.flat(c))
    found = assemble(
        model(c, brought.block),
        table=table,
        optimizer=_optimizer(c, total_steps, brought.optimizer),
        mesh=mesh,
        recompute_block=c.recompute_block,
        lmhead_chunks=c.lmhead_chunks,
        objective=objective,
        auxiliary=_router_losses(c),
        reference=_reference(c, objective, table),
        packed=c.sample_packing,
        microbatches_per_fetch=c.gradient_accumulation_steps if table.by_layer else c.microbatches_per_fetch,
        overlap_update=updates_late(c),
        pp_schedule=c.pp_schedule,
        locates_nonfinite=locates_nonfinite,
        batch=(c.gradient_accumulation_steps, c.per_device_batch_size * data_parallel(mesh), c.sequence_len),
        xla_options=c.xla_options,
    )
    if brought.objective:
        check_objective(c, found.engine)
    return found


def updates_late(c: configs.Config) -> bool:
    """Returns True if layers are updated under the next step's forward pass.

    The config decides. If it says nothing, they are if programs of one layer read files meanwhile, and nothing refuses
    it.
    """
    if c.overlap_update is not None:
        return c.overlap_update
    by_layer = any(c[name] == "nvme" for name in BY_LAYER)
    late = configs.flat(c) | {"overlap_update": True}
    return by_layer and refused(late, configs.DEFAULTS, about("overlap_update", REFUSALS)) is None


def check_objective(c: configs.Config, engine: Engine) -> None:
    """Raises ConfigError if the objective that a caller brought does not go with a config."""
    if c.objective != objectives.CROSS_ENTROPY:
        raise ConfigError(
            f"objective: expected {objectives.CROSS_ENTROPY!r} with an objective of your own, got {c.objective!r}; "
            "leave it out"
        )
    if c.z_loss:
        raise ConfigError(f"z_loss: expected 0 with an objective of your own, got {c.z_loss}; leave it out")
    if others := set(engine.objective.targets) - {"labels"}:
        raise ConfigError(
            f"objective: expected targets among labels, which the data has, got {', '.join(sorted(others))}; "
            "train in a loop of your own with them"
        )
    if isinstance(engine.objective, LossOfLogits) and engine.vocabulary_axes:
        raise ConfigError(
            f"objective: expected a whole vocabulary on each device, got one sharded over "
            f"{', '.join(engine.vocabulary_axes)}; write an Objective that sums over these axes, or set tp_size=1"
        )


def _reference(c: configs.Config, objective: Objective | OfSequences, table: Placement) -> Model | None:
    """The model without adapters, if a step of a checked config computes it beside the one with them.

    A step does not if another adapter belongs to the reference, or an outer layer is trained, or stages or programs of
    one layer compute it: then its numbers are computed before training.
    """
    if not c.lora or c.precompute_ref_log_probs or REFERENCE not in objective.targets:
        return None
    if c.lora_adapter or c.modules_to_save or c.pp_size > 1 or table.by_layer:
        return None
    of_type = ARCHITECTURES[c.model.model_type]
    return of_type.build(dataclasses.replace(architecture(c), lora=None), compute(c), of_type.block)


def _router_losses(c: configs.Config) -> RouterLosses | None:
    """The losses of the routers of a checked config; None if it has none."""
    losses = RouterLosses(c.router_aux_loss_coef, c.router_z_loss_coef)
    return losses if losses != RouterLosses() else None


def architecture(c: configs.Config) -> Any:
    """The frozen architecture of a checked config, for example a `DecoderConfig`."""
    settings = c.model.to_dict() | {"head_dim": configs.head_dim(c)}
    found = ARCHITECTURES[settings.pop("model_type")].sizes(settings)
    return dataclasses.replace(found, lora=lora(c)) if c.lora else found


def lora(c: configs.Config) -> Lora:
    """The adapters of a checked config."""
    return Lora(
        rank=c.lora_rank,
        alpha=c.lora_alpha,
        targets=target_names(c.lora_target_modules, experts=c.model.num_experts > 0),
        saved=saved_names(c.modules_to_save),
        dtype=c.lora_dtype,
        rank_stabilised=c.use_rslora,
        magnitudes=c.use_dora,
        learning_rate_ratio=c.lora_plus_ratio,
        dropout=c.lora_dropout,
    )


def compute(c: configs.Config) -> Compute:
    """The `Compute` settings of a checked config."""
    return Compute(
        attention=c.attention,
        cp_method=c.cp_method,
        recompute=Recompute(**{name.removeprefix("recompute_"): c[name] for name in RECOMPUTE_PARTS}),
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
        sequence_chunks=c.sequence_chunks,
    )


def model(c: configs.Config, block: type | None = None) -> Model:
    """The model of a checked config. block: of `Brought`. Raises ConfigError if that does not go with the config."""
    of_type = ARCHITECTURES[c.model.model_type]
    if block is None:
        return of_type.build(architecture(c), compute(c), of_type.block)
    if not (isinstance(block, type) and issubclass(block, of_type.block)):
        raise ConfigError(f"block: expected a subclass of surojax.{of_type.block.__name__}, got {block!r}; derive it")
    if c.lora:
        raise ConfigError(
            "lora: expected False with a block of your own, for which no other program has adapters, got True; leave "
            "it out"
        )
    return of_type.build(architecture(c), compute(c), block)


def _schedule(c: configs.Config, peak: float, total_steps: int) -> Schedule:
    """The learning rate schedule of a config with this peak."""
    return learning_rate_schedule(
        c.lr_scheduler_type,
        peak=peak,
        total_steps=total_steps,
        warmup_steps=configs.warmup_steps(c, total_steps),
        cooldown_steps=c.cooldown_steps,
        final_fraction=c.final_lr_fraction,
    )


def _optimizer(c: configs.Config, total_steps: int, make: MakeTransformation | None) -> optim.Optimizer:
    """The optimizer of a config, or of a transformation with its learning rate and its clipping."""
    settings = configs.flat(c) | {"implementation": compute(c).precision.implementation}
    if make:
        for name in ("optimizer", "weight_decay", *(field.name for field in optimizers.SETTINGS)):
            if settings[name] != (default := configs.DEFAULTS[name]):
                raise ConfigError(
                    f"{name}: expected {default!r} with an optimizer of optax, which does not read it, got "
                    f"{settings[name]!r}; leave it out, and give it to the function"
                )
        return from_optax(make, _schedule(c, c.learning_rate, total_steps), max_grad_norm=c.max_grad_norm)
    return optimizers.built(c.optimizer, settings, lambda peak: _schedule(c, peak, total_steps))
