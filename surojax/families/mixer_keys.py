"""Reads and writes the key `layer_types` of `config.json` if it names each layer's mixer."""

from collections.abc import Sequence
from typing import Any

from surojax.errors import ConfigError
from surojax.models.decoder_config import ATTENTION

HEADS = "num_key_value_heads"


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


def one_of(numbers: Sequence[int], key: str) -> int:
    """Returns the number that all layers with more than 0 have; 0 if none has. Raises ConfigError for several.

    key: of a GGUF file, for the message.
    """
    different = sorted({n for n in numbers if n})
    if len(different) > 1:
        raise ConfigError(
            f"model_path: {key}: expected the same or 0 in each layer, got {', '.join(map(str, different))}; such a "
            "model is not computed"
        )
    return different[0] if different else 0


def heads_of_layers(config: dict[str, Any], attention: Sequence[str]) -> dict[str, Any]:
    """Writes the key/value heads of each layer, 0 of one whose type is another than these, as GGUF files have them."""
    heads = config[HEADS]
    return config | {HEADS: [heads if name in attention else 0 for name in config["layer_types"]]}


def types_of_heads(config: dict[str, Any], without: str, attention: str = ATTENTION) -> dict[str, Any]:
    """Reads `layer_types` from the key/value heads of each layer: the inverse of `heads_of_layers`.

    without: the type of layers without heads. Raises ConfigError if others have different numbers of them.
    """
    heads = config[HEADS]
    number = one_of(heads, "attention.head_count_kv") or config["num_attention_heads"]
    return config | {HEADS: number, "layer_types": [attention if n else without for n in heads]}
