"""Checks of the adapters' settings (models/lora.py): their names and their sizes."""

from collections.abc import Collection

from surojax.config.fields import Config, head_dim
from surojax.errors import need
from surojax.models.lora import ALL_LINEAR, SAVED, linear_targets
from surojax.refusals import OF_ADAPTERS

FIELDS = tuple(feature.field for feature in OF_ADAPTERS)


def check_adapters(c: Config) -> None:
    """Raises ConfigError for a name or a size of adapters that is wrong."""
    if not c.lora:
        return
    _check_names(c.lora_target_modules, "lora_target_modules", _linear(c), ALL_LINEAR)
    _check_names(c.modules_to_save, "modules_to_save", SAVED, "")
    _check_rank(c)


def _linear(c: Config) -> Collection[str]:
    """PEFT's names of the matrices that may have adapters."""
    return linear_targets(experts=c.model.num_experts > 0)


def _check_names(value: str, field: str, known: Collection[str], alone: str) -> None:
    """Raises ConfigError unless the value is `alone`, or a list of known names."""
    if value == alone:
        return
    for name in value.split(","):
        also = f", or {alone!r}" if alone else ""
        need(name.strip() in known, field, f"names among {', '.join(known)}{also}", name.strip(), "correct it")


def _check_rank(c: Config) -> None:
    m = c.model
    heads = m.num_attention_heads * head_dim(c)
    key_rows = m.num_key_value_heads * head_dim(c)
    smallest = {
        "q_proj": min(m.hidden_size, heads),
        "k_proj": min(m.hidden_size, key_rows),
        "v_proj": min(m.hidden_size, key_rows),
        "o_proj": min(m.hidden_size, heads),
        "gate_proj": min(m.hidden_size, m.intermediate_size),
        "up_proj": min(m.hidden_size, m.intermediate_size),
        "down_proj": min(m.hidden_size, m.intermediate_size),
    }
    names = _linear(c) if c.lora_target_modules == ALL_LINEAR else map(str.strip, c.lora_target_modules.split(","))
    for name in names:
        expected = f"at most {smallest[name]}, the smaller side of {name}"
        need(c.lora_rank <= smallest[name], "lora_rank", expected, c.lora_rank, "lower it")
