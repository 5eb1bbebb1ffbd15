"""The config: all fields by name, in the sections of the help, and sizes that follow from their values.

`default_config()` is locked, so a typo in a config file, a notebook or a flag is an error. `checks.check` refuses bad
values, and `flags` reads config files and command lines. Only the commands use the ConfigDict: the code below them
takes a `Model` (`from_config.model`), a `Placement` and keywords.
"""

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import ml_collections
from ml_collections import config_dict

from surojax.config.sections import (
    AdapterSettings,
    AdapterSources,
    DataSettings,
    ExecutionSettings,
    MeshSettings,
    ModelSettings,
    NumberSettings,
    ObjectiveSettings,
    OptimizerSettings,
    RecipeSettings,
    RunSettings,
    StartSettings,
)
from surojax.declared import DeclaredField, declared
from surojax.models.lora import Mlps
from surojax.objectives.objectives import SETTINGS as OBJECTIVE_SETTINGS
from surojax.optim.optimizer import MomentSettings
from surojax.optim.optimizers import OPTIMIZERS
from surojax.placement.table import Storage

if TYPE_CHECKING:
    from surojax.config.typed import Config as Config  # pyright: ignore[reportMissingModuleSource]: written by docs/pages.py
else:
    Config = ml_collections.ConfigDict


def _stored(*names: str) -> tuple[DeclaredField, ...]:
    """Selects fields of `Storage` that the help lists under other titles."""
    return tuple(field for field in declared(Storage) if field.name in names)


def _optimizer_settings() -> Iterator[DeclaredField]:
    """Yields the fields of all optimizers; the comment of `optimizer` lists the optimizers."""
    names = [f"{name} ({choice.summary})" if choice.summary else name for name, choice in OPTIMIZERS.items()]
    for field in declared(OptimizerSettings):
        yield field._replace(comment=", ".join(names)) if field.name == "optimizer" else field
    for choice in OPTIMIZERS.values():
        yield from declared(choice.options) if choice.options else ()


DTYPES = _stored("model_dtype", "master_dtype", "accum_dtype")
RECIPE = _stored("recipe")
FROZEN = _stored("qlora_bnb", "qlora_fp8", "qlora_fp4", "qlora_mxfp4")
# The title of each section of the help, and its fields.
SECTIONS: dict[str, tuple[DeclaredField, ...]] = {
    "Run": declared(RunSettings),
    "Data": declared(DataSettings),
    "Model": (*declared(StartSettings), *declared(ModelSettings, "model.")),
    "Numbers": (*DTYPES, *declared(MomentSettings), *declared(NumberSettings)),
    "Recipe: the blocks' matrix products": (*RECIPE, *declared(RecipeSettings)),
    "Adapters: low-rank updates of a frozen base": (*declared(AdapterSettings), *FROZEN, *declared(AdapterSources)),
    "Memory": (
        *(field for field in declared(Storage) if field not in (*DTYPES, *RECIPE, *FROZEN)),
        *declared(ExecutionSettings),
    ),
    "Mesh: GPUs = dp_replicate_size x dp_shard_size x cp_size x tp_size x pp_size": declared(MeshSettings),
    "Objective": (*declared(ObjectiveSettings), *OBJECTIVE_SETTINGS),
    "Optimizer": tuple(_optimizer_settings()),
}
FIELDS: dict[str, DeclaredField] = {field.name: field for fields in SECTIONS.values() for field in fields}
DEFAULTS: dict[str, Any] = {name: field.default for name, field in FIELDS.items()}


def default_config() -> Config:
    """Returns a config of all fields with their defaults; setting a field that does not exist is an error."""
    c: Any = ml_collections.ConfigDict()
    c.model = ml_collections.ConfigDict()
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


def no_field(name: str) -> str:
    """Returns the error message for an unknown field, with the field that was probably meant."""
    names = list(FIELDS)
    near = difflib.get_close_matches(name, [*names, *(n.removeprefix("model.") for n in names)], n=1, cutoff=0.67)
    full = near and (near[0] if near[0] in names else f"model.{near[0]}")
    return f"config has no field {name!r}: " + (f"did you mean {full!r}?" if full else "--help lists every field")


def head_dim(c: Config) -> int:
    """The number of channels of an attention head."""
    return c.model.head_dim or c.model.hidden_size // c.model.num_attention_heads


def mlps(c: Config) -> Mlps:
    """The kinds of MLPs in the model."""
    m = c.model
    return Mlps(m.num_experts > 0, m.n_shared_experts > 0, m.first_k_dense_replace > 0)


def mlp_widths(c: Config) -> dict[str, tuple[str, int]]:
    """{kind of MLP that the model has: (the field, or product of fields, that says its width; the width)}."""
    m = c.model
    dense = "model.intermediate_size", m.intermediate_size
    if not m.num_experts:
        return {"mlp": dense}
    expert = ("model.moe_intermediate_size", m.moe_intermediate_size) if m.moe_intermediate_size else dense
    kinds: dict[str, tuple[str, int]] = {"mlp.experts": expert}
    if m.n_shared_experts:
        name, width = expert
        kinds["mlp.shared_experts"] = f"model.n_shared_experts x {name}", m.n_shared_experts * width
    return kinds | ({"mlp": dense} if m.first_k_dense_replace else {})


def tokens_of_piece(c: Config) -> int:
    """The tokens in one of a device's two pieces of the sequence with cp_method allgather or ring; else 0."""
    return c.sequence_len // (2 * c.cp_size) if c.cp_size > 1 and c.cp_method != "ulysses" else 0


def gpus_per_sequence(c: Config) -> int:
    """The number of GPUs that share the same sequences: a batch is divided over groups of this size."""
    return c.cp_size * c.tp_size * c.pp_size


def mesh_sizes(c: Config) -> dict[str, int]:
    """The keyword arguments of `placement.mesh.mesh_shape`."""
    names = "dp_replicate_size", "dp_shard_size", "ep_size", "cp_size", "tp_size", "pp_size"
    return {name: c[name] for name in names} | {"kv_heads": c.model.num_key_value_heads}


def warmup_steps(c: Config, total_steps: int) -> int:
    """The number of warmup steps in a run of `total_steps`."""
    return c.warmup_steps or round(c.warmup_ratio * total_steps)
