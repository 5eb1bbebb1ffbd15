"""Checks the adapters' settings (models/lora.py): names of matrices, ranks and sizes."""

from collections.abc import Collection

from surojax.config.fields import Config, head_dim
from surojax.errors import need
from surojax.models.lora import ALL_LINEAR, OF_MLP, SAVED, TARGETS, linear_targets
from surojax.refusals.features import OF_ADAPTERS

FIELDS = tuple(feature.field for feature in OF_ADAPTERS)


def check_adapters(c: Config) -> None:
    """Raises ConfigError for a wrong name of a matrix, or a wrong rank of adapters."""
    if not c.lora:
        return
    _check_names(c.lora_target_modules, "lora_target_modules", TARGETS, ALL_LINEAR)
    _check_names(c.modules_to_save, "modules_to_save", SAVED, "")
    _check_rank(c)
    if c.model.num_experts and (names := OF_MLP.keys() & _targets(c)):
        _check_of_experts(c, names)


def _targets(c: Config) -> list[str]:
    """Returns PEFT's names of the matrices that have adapters."""
    if c.lora_target_modules == ALL_LINEAR:
        return list(linear_targets(experts=c.model.num_experts > 0))
    return [name.strip() for name in c.lora_target_modules.split(",")]


def _check_of_experts(c: Config, names: Collection[str]) -> None:
    """Raises ConfigError for experts' adapters that PEFT does not have: it adapts gate and up together."""
    pair = {"gate_proj", "up_proj"}
    together = "gate_proj and up_proj together, since PEFT has one adapter of both"
    need(len(pair & set(names)) != 1, "lora_target_modules", together, c.lora_target_modules, "name the other one too")
    for field, off in {"use_dora": False, "lora_dropout": 0.0}.items():
        expected = f"{off} with adapters of experts, as in PEFT"
        need(c[field] == off, field, expected, c[field], f"leave it out, or take {min(names)} out of them")


def _check_names(value: str, field: str, known: Collection[str], alone: str) -> None:
    """Raises ConfigError unless the value is `alone`, or a list of known names."""
    if value == alone:
        return
    for name in value.split(","):
        also = f", or {alone!r}" if alone else ""
        need(name.strip() in known, field, f"names among {', '.join(known)}{also}", name.strip(), "correct it")


def _check_rank(c: Config) -> None:
    m = c.model
    width = m.moe_intermediate_size if m.num_experts and m.moe_intermediate_size else m.intermediate_size
    heads = m.num_attention_heads * head_dim(c)
    key_rows = m.num_key_value_heads * head_dim(c)
    smallest: dict[str, int] = {
        "q_proj": min(m.hidden_size, heads),
        "k_proj": min(m.hidden_size, key_rows),
        "v_proj": min(m.hidden_size, key_rows),
        "o_proj": min(m.hidden_size, heads),
    } | dict.fromkeys(OF_MLP, min(m.hidden_size, width))
    for name in _targets(c):
        expected = f"at most {smallest[name]}, the smaller side of {name}"
        need(c.lora_rank <= smallest[name], "lora_rank", expected, c.lora_rank, "lower it")
