"""The config: all fields by name, in the sections of the help, and sizes that follow from their values.

`default_config()` is locked, so a typo in a config file, a notebook or a flag is an error. `checks.check` refuses bad
values, and `flags` reads config files and command lines. Only the commands use the ConfigDict: the code below them
takes a `Model` (`from_config.model`), a `Placement` and keywords.
"""

import fnmatch
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import ml_collections
from ml_collections import config_dict

from surojax.config.sections import (
    AdapterSettings,
    AdapterSources,
    BatchSettings,
    DataSettings,
    FamilySettings,
    MeshSettings,
    ObjectiveSettings,
    OptimizerSettings,
    RowSettings,
    RunSettings,
    StartSettings,
)
from surojax.declared import DeclaredField, Facts, declared, names_of
from surojax.errors import ConfigError, shown
from surojax.families.registry import ARCHITECTURES
from surojax.models.decoder_config import DecoderConfig
from surojax.models.kinds.sublayer import LayerKinds, Width
from surojax.models.lora import Lora
from surojax.models.model import Compute
from surojax.numerics.recipes import Precision
from surojax.objectives.objectives import SETTINGS as OBJECTIVE_SETTINGS
from surojax.offloads import OPTIONS, ROWS
from surojax.optim.optimizer import MomentSettings
from surojax.optim.optimizers import OPTIMIZERS
from surojax.option_names import no_field
from surojax.placement.table import Storage
from surojax.step.spec import StepSettings


class UnknownField(ConfigError, AttributeError, KeyError):
    """The config has no field of this name."""

    def __str__(self) -> str:
        return self.args[0]  # KeyError's is quoted


class WrongType(ConfigError, TypeError):
    """A value that a field's type does not take."""


if TYPE_CHECKING:
    from surojax.config.typed import Config as Config  # pyright: ignore[reportMissingModuleSource]: written by docs/pages.py
else:

    class Config(ml_collections.ConfigDict):
        """A locked ConfigDict whose errors are one line: the nearest field, or the type that was expected.

        Its `repr` has the fields that are not at their defaults, its `str` all of them.
        """

        def __repr__(self) -> str:
            before = "model." if "model" not in self else ""
            values = {name.removeprefix(before): value for name, value in flat(self).items()}
            changed = (f"{k}={v!r}" for k, v in values.items() if v != DEFAULTS.get(before + k, self))
            return f"Config({', '.join(changed)})"

        def __getattr__(self, name: str):
            if name.startswith("_"):  # a protocol of Python's, such as that of copies
                raise AttributeError(name)
            return self[name]

        def __setattr__(self, name: str, value) -> None:
            if name in self or not hasattr(ml_collections.ConfigDict, name):
                self[name] = value
            else:
                raise UnknownField(f"config has no field {name!r}, which is a method of a config")

        def __getitem__(self, name: str):
            if name not in self and "." not in name:
                raise UnknownField(no_field(name, FIELDS))
            return super().__getitem__(name)

        def __setitem__(self, name: str, value) -> None:
            if self.is_locked and name not in self:
                raise UnknownField(no_field(name, FIELDS))
            try:
                super().__setitem__(name, value)
            except TypeError:
                field = FIELDS.get(name) or FIELDS.get(f"model.{name}")
                expected, kind = (field.kind_in_words, field.kind) if field else ("fields of the model", dict)
                got = f"{shown(value, 60)} of type {type(value).__name__}"
                raise WrongType(f"{name}: expected {expected}, got {got}; its type is {kind.__name__}") from None


def _optimizer_settings() -> Iterator[DeclaredField]:
    """Yields the fields of all optimizers; the comment of `optimizer` lists the optimizers."""
    names = [f"{name} ({choice.summary})" if choice.summary else name for name, choice in OPTIMIZERS.items()]
    for field in declared(OptimizerSettings):
        yield field._replace(comment=", ".join(names)) if field.name == "optimizer" else field
    for choice in OPTIMIZERS.values():
        yield from declared(choice.options) if choice.options else ()


def _sections() -> dict[str, tuple[DeclaredField, ...]]:
    """Returns the title of each section of the help, and its fields."""
    sections = (AdapterSettings, Lora, Storage, MeshSettings, StepSettings, Compute)
    shared = {field.name: field for section in sections for field in declared(section)}  # by several titles

    def take(*patterns: str) -> tuple[DeclaredField, ...]:
        return tuple(shared.pop(name) for pattern in patterns for name in fnmatch.filter(list(shared), pattern))

    dtypes = take("model_dtype", "master_dtype", "accum_dtype")
    adapters = take("lora", "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", *names_of(Lora))
    mesh = take("dp_*", "ep_*", "tp_*", "cp_*", "pp_*")
    return {
        "Run": declared(RunSettings),
        "Data": declared(DataSettings) + take("sample_packing") + declared(RowSettings) + declared(BatchSettings),
        "Model": declared(StartSettings) + declared(FamilySettings, "model.") + declared(DecoderConfig, "model."),
        "Numbers": dtypes + declared(MomentSettings) + take("attention", "kernels"),
        "Recipe: the blocks' matrix products": take(*names_of(Precision)),
        "Adapters: low-rank updates of a frozen base": adapters + take("qlora_*") + declared(AdapterSources),
        "Memory": take("zero_level", "shard_*", *ROWS, *Storage.__annotations__, *OPTIONS)
        + take("recompute_*", "microbatches_per_fetch", "overlap_update", "sequence_chunks", "*"),
        "Mesh: GPUs = dp_replicate_size x dp_shard_size x cp_size x tp_size x pp_size": mesh,
        "Objective": declared(ObjectiveSettings) + OBJECTIVE_SETTINGS,
        "Optimizer": tuple(_optimizer_settings()),
    }


SECTIONS = _sections()
FIELDS: dict[str, DeclaredField] = {field.name: field for fields in SECTIONS.values() for field in fields}
DEFAULTS: dict[str, Any] = {name: field.default for name, field in FIELDS.items()}


def default_config() -> Config:
    """Returns a config of all fields with their defaults; setting a field that does not exist is an error."""
    c: Any = Config()
    c.model = Config()
    for name, field in FIELDS.items():
        section = c.model if name.startswith("model.") else c
        section[name.removeprefix("model.")] = _reference(field)
    return c.lock()


def _reference(field: DeclaredField) -> Any:
    """Returns a field's default, from which a ConfigDict takes the type. A field with words accepts several types."""
    if field.default is None:
        return config_dict.placeholder(bool)
    return config_dict.FieldReference(field.default, field_type=object) if field.words else field.default


def flat(c: Config) -> dict[str, Any]:
    """Returns {field name: value}; the names of the architecture's fields are `model.NAME`."""
    values = dict(c.items())
    model = values.pop("model", None)
    if not isinstance(model, ml_collections.ConfigDict):
        return values
    return values | {f"model.{name}": value for name, value in model.items()}


def not_default(c: Config) -> dict[str, Any]:
    """Returns {field name: value} of the fields that differ from their defaults."""
    return {name: value for name, value in flat(c).items() if value != DEFAULTS.get(name)}


def names_with(facts: Facts) -> frozenset[str]:
    """The names of the fields that may change any of these facts."""
    return frozenset(name for name, field in FIELDS.items() if field.facts & facts)


def set_fields(c: Config, facts: Facts) -> dict[str, Any]:
    """{name: value} of the fields that may change any of these facts and are set, that is differ from their defaults.

    As a key it stays the same when a later version adds a field.
    """
    values = flat(c)
    return {name: values[name] for name in sorted(names_with(facts)) if values[name] != DEFAULTS[name]}


def base_architecture(c: Config) -> Any:
    """Makes the frozen architecture of a config, without adapters, for example a `DecoderConfig`."""
    return _architecture(tuple(c.model.items()))[0]


def kinds(c: Config) -> dict[str, LayerKinds]:
    """The sublayers of the model's layers by segment, as declarations."""
    return _architecture(tuple(c.model.items()))[1]


@functools.lru_cache(maxsize=64)
def _architecture(fields: tuple[tuple[str, Any], ...]) -> tuple[Any, dict[str, LayerKinds]]:
    """Makes (sizes, sublayers) of these `model` fields; cached, since `fit` asks for the same model again and again."""
    settings = dict(fields)
    entry = ARCHITECTURES[settings.pop("model_type")]
    sizes = entry.sizes(settings)
    return sizes, entry.kinds(sizes)


def widths(c: Config) -> list[Width]:
    """The widths of the model's sublayers."""
    return list(dict.fromkeys(width for layer in kinds(c).values() for width in layer.widths()))


def tokens_of_piece(c: Config) -> int:
    """The tokens in one of a device's two pieces of the sequence with cp_method allgather or ring; else 0."""
    return c.sequence_len // (2 * c.cp_size) if c.cp_size > 1 and c.cp_method != "ulysses" else 0


SHARE_SEQUENCES = ("tp_size", "cp_size", "pp_size")


def gpus_per_sequence(c: Config) -> int:
    """The number of GPUs that share the same sequences: a batch is divided over groups of this size."""
    return math.prod(c[name] for name in SHARE_SEQUENCES)


def sequences_of_step(c: Config) -> int:
    """The sequences of a step on all GPUs."""
    return c.gpus // gpus_per_sequence(c) * c.per_device_batch_size * c.gradient_accumulation_steps


def tokens_of_step(c: Config) -> int:
    """The tokens of a step on all GPUs."""
    return sequences_of_step(c) * c.sequence_len


def mesh_sizes(c: Config) -> dict[str, int]:
    """The keyword arguments of `placement.mesh.mesh_shape`."""
    shared = [width.parts for width in widths(c) if width.shared]
    return {name: c[name] for name in names_of(MeshSettings)} | {"kv_heads": min(shared, default=0)}


def warmup_steps(c: Config, total_steps: int) -> int:
    """The number of warmup steps in a run of `total_steps`."""
    return c.warmup_steps or round(c.warmup_ratio * total_steps)
