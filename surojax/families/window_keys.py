"""Reads and writes the keys of `config.json` about sliding windows.

`layer_types` says which layers have the window. If it is not there, families differ: in most of them every layer has
it. Here it is every layer, or every layer but each n-th.
"""

from typing import Any

from surojax.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
NO_SUCH_NUMBER, UNUSED = "no such number", "use_sliding_window false"


def read_everywhere(given: dict[str, Any], *, used: bool = True) -> dict[str, int]:
    """Reads the `model` fields of a window that all layers have, whatever `layer_types` is, or none.

    used: if False, `sliding_window` is ignored. Raises ConfigError if `layer_types` disagrees.
    """
    window = said_window(given, used=used)
    types = said_layer_types(given, window, NO_SUCH_NUMBER if used else UNUSED)
    if window and types and FULL in types:
        raise ConfigError(
            "model_path: config.json: layer_types: expected sliding_attention in every layer, got full_attention, "
            f"which transformers does not read for {given['model_type']}; remove it if every layer has the window"
        )
    return window_fields(given, window, None)


def is_used(given: dict[str, Any]) -> bool:
    """True if use_sliding_window is true; False if the key is missing."""
    return bool(given.get("use_sliding_window", False))


def said_window(given: dict[str, Any], *, used: bool = True) -> int | None:
    """The sliding window in positions, None without one. used: if False, `sliding_window` is ignored.

    Raises ConfigError for 0 and less, and TypeError for values of another type.
    """
    window = given["sliding_window"]
    if type(given.get("use_sliding_window", False)) is not bool or type(window) is bool:
        raise TypeError("use_sliding_window and sliding_window: expected true or false, and a number")
    window = window if used else None
    if window is not None and window < 1:
        raise ConfigError(
            f"model_path: config.json: sliding_window: expected more than 0, or null for none, got {window}, with "
            "which transformers attends to nothing; set it to null if the model was trained without it"
        )
    return window


def need_window(given: dict[str, Any], window: int | None) -> int:
    """Returns the window of a family whose masks transformers makes of it even if no layer has one.

    Raises ConfigError for None.
    """
    if window is None:
        raise ConfigError(
            "model_path: config.json: sliding_window: expected a number, without which transformers does not compute "
            f"{given['model_type']}, got None; leave it out, or say full_attention of every layer in layer_types"
        )
    return window


def said_layer_types(given: dict[str, Any], window: int | None, without: str = NO_SUCH_NUMBER) -> list[str] | None:
    """The value of the key `layer_types`, None if it is missing.

    window: of the layers with sliding attention, None without one. without: the reason for None, for the message.
    Raises ConfigError for types that transformers refuses, and for others than these two.
    """
    types = given.get("layer_types")
    if types is None:
        return None
    layers = given["num_hidden_layers"]
    if len(types) != layers:
        raise ConfigError(
            f"model_path: config.json: layer_types: expected one for each of num_hidden_layers={layers}, got "
            f"{len(types)}; fetch it again"
        )
    if unknown := [kind for kind in types if kind not in (FULL, SLIDING)]:
        raise ConfigError(
            f"model_path: config.json: layer_types: expected full_attention and sliding_attention, got {unknown[0]!r}; "
            f"nothing else is computed for {given['model_type']}"
        )
    if not window and SLIDING in types:
        raise ConfigError(
            f"model_path: config.json: sliding_window: expected a number, since layer_types has sliding_attention, got "
            f"{without}; fetch it again"
        )
    return types


def window_fields(given: dict[str, Any], window: int | None, types: list[str] | None) -> dict[str, int]:
    """Returns the `model` fields of a window. types: of each layer; None: every layer has the window.

    Raises ConfigError unless every layer has the window, or every layer but each n-th.
    """
    layers = given["num_hidden_layers"]
    if not window or (types and all(kind == FULL for kind in types)):
        return {"sliding_window": 0, "sliding_window_pattern": 0}
    for pattern in range(layers + 1):
        full = [pattern > 1 and (l + 1) % pattern == 0 for l in range(layers)]
        if types is None or types == [FULL if x else SLIDING for x in full]:
            return {"sliding_window": window, "sliding_window_pattern": pattern}
    raise ConfigError(
        "model_path: config.json: layer_types: expected every n-th layer with full_attention and the others with "
        f"sliding_attention, got {types}"
    )


def every_nth_full(layers: int, n: int) -> list[str]:
    """Returns `layer_types` in which every n-th layer has no window."""
    return [SLIDING if (l + 1) % n else FULL for l in range(layers)]


def write_layer_types(fields: dict[str, Any]) -> list[str]:
    """Writes the `layer_types` of a model with these `model` fields."""
    layers = fields["num_hidden_layers"]
    if not fields["sliding_window"]:
        return [FULL] * layers
    pattern = fields["sliding_window_pattern"]
    return every_nth_full(layers, pattern) if pattern > 1 else [SLIDING] * layers


def write_used(fields: dict[str, Any], *, by_layer: bool) -> dict[str, Any]:
    """Writes the window for families that have use_sliding_window; {} without one. by_layer: also `layer_types`."""
    if not fields["sliding_window"]:
        return {}
    types = {"layer_types": write_layer_types(fields)} if by_layer else {}
    return {"use_sliding_window": True, "sliding_window": fields["sliding_window"]} | types
