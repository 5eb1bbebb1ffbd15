"""Reads and writes the key `layer_types` of `config.json` if it names each layer's mixer."""

from collections.abc import Sequence
from typing import Any

from surojax.errors import ConfigError
from surojax.models.decoder_config import ATTENTION


def read_layer_types(given: dict[str, Any], types: list[str], mixers: Sequence[str]) -> str:
    """Returns the `model` field of these layers' mixers. Raises ConfigError for other mixers, or another number."""
    layers = given["num_hidden_layers"]
    if len(types) != layers or not set(types) <= set(mixers):
        raise ConfigError(
            f"model_path: config.json: layer_types: expected {' or '.join(mixers)} for each of {layers} layers, got "
            f"{str(types)[:200]}; nothing else is computed for {given['model_type']}"
        )
    return as_field(types)


def as_field(types: list[str]) -> str:
    """The `layer_types` of a config for these layers: their shortest repeating pattern; "" if all have attention."""
    if set(types) <= {ATTENTION}:
        return ""
    repeats = (n for n in range(1, len(types) + 1) if all(types[l] == types[l % n] for l in range(len(types))))
    return ",".join(types[: next(repeats)])


def types_of(fields: dict[str, Any]) -> list[str]:
    """The mixer of each layer from `model` fields: the inverse of `as_field`."""
    types = [name.strip() for name in fields["layer_types"].split(",")] if fields["layer_types"] else [ATTENTION]
    return [types[l % len(types)] for l in range(fields["num_hidden_layers"])]
