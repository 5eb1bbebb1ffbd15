"""Reads the keys of `config.json` about Mamba2 that Granite-4-H and Nemotron-H share, whatever their names."""

import dataclasses
import math
from typing import Any

from surojax.errors import ConfigError, shown
from surojax.models.decoder_config import DecoderConfig

LIMITS = "time_step_limit"
INFINITY: Any = {"__float__": "Infinity"}  # as transformers 5 writes it
UNLIMITED: list[Any] = [0.0, INFINITY]
# `model` fields, without which a model has no such layers.
DEFAULTS = {field.name: field.default for field in dataclasses.fields(DecoderConfig) if field.name.startswith("mamba_")}


def need_key(ok: bool, key: str, expected: str, got: Any, change: str = "fetch it again") -> None:
    """Raises ConfigError unless a key of config.json is ok."""
    if not ok:
        raise ConfigError(f"model_path: config.json: {key}: expected {expected}, got {shown(got)}; {change}")


def read_sizes(given: dict[str, Any], names: dict[str, str]) -> dict[str, int]:
    """Reads whole numbers from 1 on. names: {`model` field: key}. Raises ConfigError for others."""
    for key in names.values():
        need_key(type(given[key]) is int and given[key] > 0, key, "a whole number from 1 on", given[key])
    return {field: given[key] for field, key in names.items()}


def read_limits(given: dict[str, Any]) -> tuple[float, float]:
    """Reads the limits of time steps as (least, most); most is 0 if there is none. Raises ConfigError for others."""
    said = given[LIMITS]
    numbers = [math.inf if x == INFINITY else x for x in said] if isinstance(said, list) else []
    ok = len(numbers) == 2 and all(type(x) in (int, float) for x in numbers) and 0 <= numbers[0] < numbers[1]
    need_key(ok and math.isfinite(numbers[0]), LIMITS, "two numbers from 0 on, the second one larger", said)
    least, most = map(float, numbers)
    return least, 0.0 if math.isinf(most) else most


def write_limits(least: float, most: float) -> list[Any]:
    """The inverse of `read_limits`."""
    return [least, most or INFINITY]
