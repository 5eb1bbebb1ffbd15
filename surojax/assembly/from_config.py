"""Makes the parts of a run from a checked config: model, optimizer, objective, and their assembly.

`train` runs the result, the planner adds up its bytes. The rooms below take what is made here, not the ConfigDict.
"""

import dataclasses
from typing import Any, NamedTuple

from surojax.assembly import own_parts
from surojax.assembly.assemble import Assembly, assemble
from surojax.config import fields as configs
from surojax.config.checks import REFUSALS
from surojax.declared import built
from surojax.errors import ConfigError
from surojax.families.registry import ARCHITECTURES
from surojax.models.kinds.targets import target_names
from surojax.models.lora import Lora, saved_names
from surojax.models.model import Compute, Model
from surojax.models.router_losses import RouterLosses
from surojax.objectives import objectives
from surojax.objectives.objective import REFERENCE, LossOfLogits, Objective, OfLogProbabilities
from surojax.objectives.teacher_states import with_teacher_head
from surojax.optim import optimizer as optim, optimizers
from surojax.optim.from_optax import MakeTransformation, from_optax
from surojax.optim.learning_rate import Schedule, learning_rate_schedule
from surojax.placement.mesh import data_parallel, shards
from surojax.placement.table import Mesh, Placement, Storage, place
from surojax.refusals.features import BY_LAYER
from surojax.refusals.refusal import about, refused
from surojax.step.spec import Engine, StepSettings


class Brought(NamedTuple):
    """A caller's replacements for the config's optimizer and objective, and for the standard block.

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
    """Assembles the run of a checked config on a mesh, with a learning rate schedule for `total_steps`.

    locates_nonfinite: see `spec.Engine`. Raises ConfigError if what the caller brought does not go with the config.
    """
    table = place(built(Storage, c), num_shards=shards(mesh))
    objective = brought.objective or objectives.build_objective(configs.flat(c))
    if brought.objective:
        own_parts.check_members(brought.objective)
    run_model = model(c, brought.block)
    if c.distill_hidden_size:
        run_model = with_teacher_head(run_model, c.distill_hidden_size)
    settings = built(
        StepSettings,
        configs.flat(c) | {"overlap_update": updates_late(c)},
        objective=objective,
        auxiliary=_router_losses(c),
        reference=_reference(c, objective, table),
        locates_nonfinite=locates_nonfinite,
    )
    if table.by_layer:
        settings = dataclasses.replace(settings, microbatches_per_fetch=c.gradient_accumulation_steps)
    batch = c.gradient_accumulation_steps, c.per_device_batch_size * data_parallel(mesh), c.sequence_len
    run = assemble(run_model, table, _optimizer(c, total_steps, brought.optimizer), mesh, settings, batch)
    if brought.objective:
        check_objective(c, run.engine)
        is_sharded = bool(run.engine.vocabulary_axes)
        own_parts.check_objective(brought.objective, run_model, c.model_dtype, is_sharded=is_sharded)
    if brought.block:
        own_parts.check_block(brought.block, run_model, c.model_dtype)
    return run


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
    """Raises ConfigError if a caller's objective does not go with a config."""
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


def _reference(c: configs.Config, objective: Objective | OfLogProbabilities, table: Placement) -> Model | None:
    """Makes the reference, the model without adapters, if a step of a checked config computes it too; else None.

    A step does not if another adapter belongs to the reference, or an outer layer is trained, or stages or programs of
    one layer compute it: then its numbers are computed before training.
    """
    if not c.lora or c.precompute_ref_log_probs or REFERENCE not in objective.targets:
        return None
    if c.lora_adapter or c.modules_to_save or c.pp_size > 1 or table.by_layer:
        return None
    entry = ARCHITECTURES[c.model.model_type]
    return entry.build(dataclasses.replace(architecture(c), lora=None), compute(c), entry.block)


def _router_losses(c: configs.Config) -> RouterLosses | None:
    """Makes the routers' auxiliary losses of a checked config; None without such losses."""
    losses = RouterLosses(c.router_aux_loss_coef, c.router_z_loss_coef)
    return losses if losses != RouterLosses() else None


def architecture(c: configs.Config) -> Any:
    """Makes the frozen architecture of a checked config with its adapters, for example a `DecoderConfig`."""
    sizes = configs.base_architecture(c)
    return dataclasses.replace(sizes, lora=lora(c)) if c.lora else sizes


def lora(c: configs.Config) -> Lora:
    """Makes the adapters' settings of a checked config."""
    saved = saved_names(c.modules_to_save, num_labels=c.model.num_labels)
    return built(Lora, c, targets=target_names(c.lora_target_modules, configs.kinds(c).values()), saved=saved)


def compute(c: configs.Config) -> Compute:
    """Makes the `Compute` settings of a checked config."""
    return built(Compute, c)


def model(c: configs.Config, block: type | None = None) -> Model:
    """Makes the model of a checked config. block: see `Brought`. Raises ConfigError if the block does not fit."""
    entry = ARCHITECTURES[c.model.model_type]
    if block is None:
        return entry.build(architecture(c), compute(c), entry.block)
    if not (isinstance(block, type) and issubclass(block, entry.block)):
        raise ConfigError(f"block: expected a subclass of surojax.{entry.block.__name__}, got {block!r}; derive it")
    if c.lora:
        raise ConfigError(
            "lora: expected False with a block of your own, for which no other program has adapters, got True; leave "
            "it out"
        )
    return own_parts.build_block(block, lambda: entry.build(architecture(c), compute(c), block))


def rate_schedule(c: configs.Config, peak: float, total_steps: int) -> Schedule:
    """Makes the learning rate schedule of a config, with this peak."""
    return learning_rate_schedule(
        c.lr_scheduler_type,
        peak=peak,
        total_steps=total_steps,
        warmup_steps=configs.warmup_steps(c, total_steps),
        cooldown_steps=c.cooldown_steps,
        final_fraction=c.final_lr_fraction,
    )


def _optimizer(c: configs.Config, total_steps: int, make: MakeTransformation | None) -> optim.Optimizer:
    """Makes the config's optimizer, or one from a caller's transformation, with the config's rate and clipping."""
    settings = configs.flat(c) | {"implementation": compute(c).precision.implementation}
    if make:
        for name in ("optimizer", "weight_decay", *(field.name for field in optimizers.SETTINGS)):
            default = configs.DEFAULTS[name]
            # Without decay the optimizer is the function's as well, and so configs/finetune.py has it.
            if settings[name] not in ((default, 0.0) if name == "weight_decay" else (default,)):
                raise ConfigError(
                    f"{name}: expected {default!r} with an optimizer of optax, which does not read it, got "
                    f"{settings[name]!r}; leave it out, and give it to the function"
                )
        return from_optax(make, rate_schedule(c, c.learning_rate, total_steps), max_grad_norm=c.max_grad_norm)
    return optimizers.build_optimizer(c.optimizer, settings, lambda peak: rate_schedule(c, peak, total_steps))
