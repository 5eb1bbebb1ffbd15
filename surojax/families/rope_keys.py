"""Reads and writes the keys of `config.json` about the rotary embedding.

Two spellings are read and written: `rope_parameters` (transformers 5), and `rope_theta` beside `rope_scaling` (before).
"""

import math
from typing import Any

from surojax.errors import ConfigError
from surojax.families import window_keys
from surojax.models.rotary import ROPE_USES

PARTIAL = "partial_rotary_factor"
# Types of rotary embeddings that are not computed, and why.
REFUSED: dict[Any, str] = {
    "dynamic": ", whose frequencies follow the length of the text",
    "longrope": ", which has other frequencies for long texts than for short ones",
}


def parameters(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the `rope_parameters` in effect, from config.json or the family's class; None if `rope_scaling` applies.

    Raises ConfigError if config.json says two different things in the two spellings.
    """
    own = config.get("rope_parameters")
    if not (scaling := config.get("rope_scaling")):
        return defaults.get("rope_parameters") if own is None else own
    if own:
        _check_same(own, scaling, (defaults | config)["rope_theta"])
    return own  # and not those of the class


def _check_same(parameters: dict[str, Any], scaling: dict[str, Any], theta: float) -> None:
    """Raises ConfigError unless `rope_parameters` and `rope_scaling` of one config.json are equivalent.

    theta: the base beside them, which transformers takes with `rope_scaling` that has none, whatever else
    `rope_parameters` says; those of each layer type keep their own.
    """
    if _of_both(parameters) != _of_both(scaling):
        raise ConfigError("model_path: config.json: expected rope_scaling or rope_parameters, got both")
    used = scaling.get("rope_theta", theta)
    base = parameters.get("rope_theta", used)
    if base != used:
        raise ConfigError(
            f"model_path: config.json: rope_theta: expected the same with rope_scaling as in rope_parameters, got "
            f"{used!r} and {base!r}; remove rope_scaling if the latter is right"
        )


def _of_both(rope: dict[str, Any]) -> dict[str, Any]:
    """Reduces `rope_parameters` or `rope_scaling` to the entries that both spellings have, for a comparison."""
    rope = rope.get("full_attention", rope)
    entries = {"rope_type": rope.get("type", "default")} | rope
    return {name: entries[name] for name in entries if name not in ("type", "rope_theta", PARTIAL)}


def said(given: dict[str, Any]) -> dict[str, Any]:
    """Copies the `rope_parameters` of a config.json, else its `rope_scaling`."""
    return dict(given.get("rope_parameters") or given.get("rope_scaling") or {})


def read_rope(given: dict[str, Any]) -> dict[str, Any]:
    """Reads the `model` fields of a rotary embedding that is the same in every layer."""
    return rope_fields(given, said(given))


def read_partial_rope(given: dict[str, Any], ignored: tuple[str, ...] = ()) -> dict[str, Any]:
    """Reads the `model` fields of a rotary embedding of a part of each head, the same in every layer.

    given: has `partial_rotary_factor`, which counts if `rope_parameters` has none. ignored: keys of the latter that
    change nothing for texts.
    """
    rope = {key: value for key, value in said(given).items() if key not in ignored}
    beside = given[PARTIAL]
    own = rope.pop(PARTIAL, None)
    without = {key: value for key, value in given.items() if key != PARTIAL}
    return {f"rope_{PARTIAL}": float(beside if own is None else own)} | rope_fields(without, rope)


def rope_fields(given: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Translates `rope_parameters` to `model` fields.

    Raises ConfigError for a type that is not computed, and for other parameters than those of its type.
    """
    rope = dict(rope)
    base = rope.pop("rope_theta", given["rope_theta"])
    if base is None:
        raise ConfigError("model_path: config.json: rope_theta: expected a number, got null; fetch it again")
    fields: dict[str, Any] = {"rope_theta": float(base)}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    kind = "none" if kind in ("default", None) else kind
    if kind not in ROPE_USES:
        expected = ", ".join(("default", *(name for name in ROPE_USES if name != "none")))
        raise ConfigError(
            f"model_path: config.json: rope_type: expected {expected}, got {kind!r}{REFUSED.get(kind, '')}"
        )
    fields["rope_scaling"] = kind
    if kind == "yarn" and fields["rope_theta"] == 1:
        raise ConfigError(
            "model_path: config.json: rope_theta: expected another than 1 with rope_type yarn, which divides by its "
            "logarithm, got 1; correct it"
        )
    for fraction in (rope.pop(PARTIAL, None), given.get(PARTIAL)):
        if fraction not in (None, 1):
            raise ConfigError(
                f"model_path: config.json: {PARTIAL}: expected 1, got {fraction!r}, which transformers "
                f"does not compute for {given['model_type']}; remove it if the model was trained without it"
            )
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = original_length(given, rope)
    rope = _yarn(rope, given.get("max_position_embeddings")) if kind == "yarn" else rope
    names = sorted(name for name, value in rope.items() if value is not None)
    if set(names) != set(ROPE_USES[kind]):
        raise ConfigError(f"model_path: config.json: rope_type {kind}: expected {ROPE_USES[kind]}, got {names}")
    return fields | {f"rope_{name}": rope[name] for name in ROPE_USES[kind]}


# One rotary embedding for each type of layers, in `rope_parameters` of transformers 5.
FULL, SLIDING = window_keys.FULL, window_keys.SLIDING


def by_layer_type(given: dict[str, Any], base: float) -> tuple[float, dict[str, Any]]:
    """Returns (base of the layers with a window, `rope_parameters` of the others), of a family that has both.

    base: of layers with a window, if `rope_parameters` does not say it. Raises ConfigError for a spelling that
    transformers does not read, and for stretched positions in layers with a window.
    """
    rope, family = said(given), given["model_type"]
    if rope.keys() & {FULL, SLIDING}:
        local = dict(rope.pop(SLIDING, None) or {})
        full = dict(rope.pop(FULL, None) or {})
        base = local.pop("rope_theta", base)
        if local not in ({}, {"rope_type": "default"}) or rope:
            raise ConfigError(
                "model_path: config.json: rope_parameters: expected rope_type default for sliding_attention, and "
                f"nothing beside it and full_attention, got {local | rope}"
            )
        return base, full
    if given.get("rope_parameters"):
        raise ConfigError(
            f"model_path: config.json: rope_parameters: expected full_attention and sliding_attention for {family}, "
            f"got {', '.join(rope)}, which transformers does not read there; put them into full_attention"
        )
    if rope and "rope_type" not in rope:
        raise ConfigError(
            f"model_path: config.json: rope_scaling: expected rope_type, got {', '.join(rope)}, which transformers "
            f"does not read for {family}; name it rope_type"
        )
    return base, rope


def both_by_layer_type(config: dict[str, Any], base: float | None) -> dict[str, Any]:
    """`both_spellings` for a family with a rotary embedding for each type of layers.

    base: of layers with a window in a config of transformers 4; None: that of the other layers.
    """
    rope = config.get("rope_parameters")
    if rope is not None:
        return config | separate_keys(rope.get(FULL, rope))
    if base is None:
        return both_spellings(config)
    local = {"rope_type": "default", "rope_theta": base}
    return config | {"rope_parameters": {FULL: joined_keys(config), SLIDING: local}}


def original_length(given: dict[str, Any], rope: dict[str, Any]) -> int | None:
    """The context length before stretching, in tokens."""
    return rope.get("original_max_position_embeddings", given.get("max_position_embeddings"))


def _yarn(rope: dict[str, Any], longest: int | None) -> dict[str, Any]:
    """Fills in the YaRN parameters that transformers infers. longest: the new context length in tokens, if known."""
    settings = {"truncate": True} | rope
    original = settings.get("original_max_position_embeddings")
    if settings.get("factor") is None and longest and original:
        settings["factor"] = longest / original
    numerator = settings.pop("mscale", None)
    denominator = settings.pop("mscale_all_dim", None)
    magnitude = settings.get("attention_factor")
    if magnitude == 0:
        raise ConfigError(
            "model_path: config.json: attention_factor: expected more than 0, or null, which follows from the factor, "
            f"got {magnitude!r}; remove it"
        )
    if magnitude is None and numerator and denominator and settings.get("factor"):
        stretch = 0.1 * math.log(max(settings["factor"], 1))
        magnitude = (numerator * stretch + 1) / (denominator * stretch + 1)
    implied = 0.1 * math.log(max(settings.get("factor") or 1, 1)) + 1
    is_implied = magnitude is not None and math.isclose(magnitude, implied, rel_tol=1e-12)
    settings["attention_factor"] = 0.0 if is_implied else magnitude or 0.0
    settings["beta_fast"] = float(settings.get("beta_fast") or 32)
    settings["beta_slow"] = float(settings.get("beta_slow") or 1)
    return settings


def write_rope(fields: dict[str, Any]) -> dict[str, Any]:
    """Writes the `rope_scaling` of a model with these `model` fields; null if nothing is scaled."""
    kind = fields["rope_scaling"]
    if kind == "none":
        return {"rope_scaling": None}
    scaling = {"rope_type": kind} | {name: fields[f"rope_{name}"] for name in ROPE_USES[kind]}
    if not scaling.get("attention_factor", 1):
        del scaling["attention_factor"]  # it follows from the factor
    return {"rope_scaling": scaling}


def both_spellings(config: dict[str, Any]) -> dict[str, Any]:
    """Adds the rotary embedding's missing spelling: `rope_parameters` (transformers 5) or transformers 4's keys."""
    own = config.get("rope_parameters")
    if own is not None:
        return config | separate_keys(own)
    joined = joined_keys(config)
    return config | ({"rope_parameters": joined} if len(joined) > 1 else {})


def joined_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Converts transformers 4's keys to `rope_parameters`; only the type if there are no such keys."""
    scaling = dict(config.get("rope_scaling") or {})
    kind = scaling.pop("type", "default")
    beside = {key: config[key] for key in ("rope_theta", PARTIAL) if config.get(key) is not None}
    return {"rope_type": kind} | scaling | beside


def separate_keys(rope: dict[str, Any]) -> dict[str, Any]:
    """Converts `rope_parameters` to transformers 4's keys."""
    scaling = dict(rope)
    beside = {key: scaling.pop(key) for key in ("rope_theta", PARTIAL) if key in scaling}
    return beside | {"rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None}
