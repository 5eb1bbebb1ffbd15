"""Hugging Face's models: from a `config.json` to the `model` fields of a config, and from its names of tensors to ours.

A key of `config.json` that would change the arithmetic and is not known here is refused with its name, so a model is
never computed with less than its config says. Keys may be absent if they have the value of transformers' config class;
`families.DEFAULTS` has those of each family. Both spellings of the rotary embedding are read: `rope_parameters`
(transformers 5), and `rope_theta` with `rope_scaling` and `rope_local_base_freq` (before).
"""

import math
from pathlib import Path
from typing import Any

from surojax.errors import ConfigError, shown
from surojax.exchange import parts
from surojax.exchange.families import DEFAULTS, IMPLIED, OTHERS, REFUSED_ROPE, REQUIRED, REQUIRED_OF, SIZES
from surojax.models.rotary import ROPE_USES
from surojax.sizes import check_largest
from surojax.untrusted import expanded, read_json


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of a model's folder, or what it says of the language model if that is one of several parts.

    Raises ConfigError if there is none, or it cannot be read.
    """
    found = read_whole_config(folder)
    return parts.text_config(found) if parts.has_parts(found) else found


def read_whole_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of a model's folder as it is. Raises ConfigError if there is none, or it cannot be read."""
    file = expanded(folder) / "config.json"
    try:
        found = read_json(file)
    except OSError as error:
        raise ConfigError(
            f"model_path: expected a folder with config.json, got {str(folder)!r} ({error.strerror}); give the folder "
            "of a Hugging Face model"
        ) from error
    except ValueError as error:
        raise ConfigError(f"model_path: cannot read {file} ({error}); fetch it again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"model_path: expected an object in {file}, got {type(found).__name__}; fetch it again")
    return found


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """The `model` fields of a config.json.

    Raises ConfigError for a family, a key or a value that is not computed, and for a value of another type.
    """
    try:
        return _settings(config)
    except ConfigError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"model_path: config.json: expected values as transformers writes them, got one of another type "
            f"({type(error).__name__}: {str(error)[:200]}); fetch it again"
        ) from error


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """The same; what Python raises for values of other types."""
    family = config.get("model_type")
    if "text_config" in config:
        raise ConfigError(
            f"model_path: expected a text model, or model_type {' or '.join(parts.FAMILIES)} with a text_config, got "
            f"{family!r} with one; give a folder with the text model alone"
        )
    if family not in DEFAULTS:
        raise ConfigError(
            f"model_path: expected model_type {', '.join(DEFAULTS)}, got {family!r}; other architectures are not known"
        )
    required = REQUIRED | REQUIRED_OF.get(family, {})
    known = {*DEFAULTS[family], *required, *OTHERS}
    if unknown := sorted(config.keys() - known):
        raise ConfigError(
            f"model_path: config.json has {', '.join(unknown)}, which may change what the model computes and is not "
            f"known for {family}"
        )
    for key, allowed in required.items():
        if key in config and config[key] not in allowed:
            raise ConfigError(
                f"model_path: config.json: {key}: expected {allowed[0]!r}, got {config[key]!r}; nothing else is "
                f"computed for {family}"
            )
    block_size(config)
    _check_caps(config)
    given = DEFAULTS[family] | config
    check_largest(given, "model_path: config.json: ")
    for key in ("tie_word_embeddings", "use_sliding_window"):
        if not isinstance(given.get(key, False), bool | None):
            raise ConfigError(f"model_path: config.json: {key}: expected true or false, got {shown(given[key])}")
    if config.get("rope_parameters") is None:
        given["rope_parameters"] = DEFAULTS[family].get("rope_parameters")
    if scaling := config.get("rope_scaling"):
        parameters = config.get("rope_parameters")
        if parameters:
            _check_both_ropes(parameters, scaling, given["rope_theta"])
        given["rope_parameters"] = parameters  # and not those of the class
    found = {name: 0 if given[name] is None else given[name] for name in SIZES if name in given}
    found["num_key_value_heads"] = given["num_key_value_heads"] or given["num_attention_heads"]
    found |= _window(family, given)
    found |= _rope(family, given, windows=found["sliding_window"] > 0)
    return found | _layers_without_rope(given) | IMPLIED.get(family, {}) | {"model_type": "llama"}


def _check_caps(config: dict[str, Any]) -> None:
    """Raises ConfigError for a cap of 0, by which transformers divides."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key) == 0:
            raise ConfigError(
                f"model_path: config.json: {key}: expected more than 0, or null for none, got {config[key]!r}, by "
                "which transformers divides; set it to null if the model was trained without it"
            )


def _check_both_ropes(parameters: dict[str, Any], scaling: dict[str, Any], theta: float) -> None:
    """Raises ConfigError unless `rope_parameters` and `rope_scaling` of one config.json say the same.

    theta: the base beside them, which transformers takes with `rope_scaling` that has none, whatever else
    `rope_parameters` says; those of each layer type keep their own.
    """
    if _of_scaling(parameters) != _of_scaling(scaling):
        raise ConfigError("model_path: config.json: expected rope_scaling or rope_parameters, got both")
    used = scaling.get("rope_theta", theta)
    said = parameters.get("rope_theta", used)
    if said != used:
        raise ConfigError(
            f"model_path: config.json: rope_theta: expected the same with rope_scaling as in rope_parameters, got "
            f"{used!r} and {said!r}; remove rope_scaling if the latter is right"
        )


def _of_scaling(rope: dict[str, Any]) -> dict[str, Any]:
    """What `rope_scaling` and `rope_parameters` both say, if a config.json has both."""
    rope = rope.get("full_attention", rope)
    found = {"rope_type": rope.get("type", "default")} | rope
    return {name: found[name] for name in found if name not in ("type", "rope_theta", "partial_rotary_factor")}


def _rope(family: str, given: dict[str, Any], *, windows: bool) -> dict[str, Any]:
    """The fields of the rotary embedding. windows: some layers have a window."""
    rope = dict(given.get("rope_parameters") or given.get("rope_scaling") or {})
    found = {}
    if "rope_local_base_freq" in given:
        base = given["rope_local_base_freq"]
        if rope.keys() & {"full_attention", "sliding_attention"}:
            base, rope = _rope_by_layer_type(rope, base)
        elif given.get("rope_parameters"):
            raise ConfigError(
                f"model_path: config.json: rope_parameters: expected full_attention and sliding_attention for "
                f"{family}, got {', '.join(rope)}, which transformers does not read there; put them into full_attention"
            )
        elif rope and "rope_type" not in rope:
            raise ConfigError(
                f"model_path: config.json: rope_scaling: expected rope_type, got {', '.join(rope)}, which transformers "
                f"does not read for {family}; name it rope_type"
            )
        found["rope_local_base_freq"] = float(base) if windows else 0.0
    found["rope_theta"] = float(rope.pop("rope_theta", given["rope_theta"]))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    kind = "none" if kind in ("default", None) else kind
    if kind not in ROPE_USES:
        expected = ", ".join(("default", *(name for name in ROPE_USES if name != "none")))
        raise ConfigError(
            f"model_path: config.json: rope_type: expected {expected}, got {kind!r}{REFUSED_ROPE.get(kind, '')}"
        )
    found["rope_scaling"] = kind
    for fraction in (rope.pop("partial_rotary_factor", None), given.get("partial_rotary_factor")):
        if fraction not in (None, 1):
            raise ConfigError(
                f"model_path: config.json: partial_rotary_factor: expected 1, got {fraction!r}, which transformers "
                f"does not compute for {family}; remove it if the model was trained without it"
            )
    longest = given.get("max_position_embeddings")
    original = rope.get("original_max_position_embeddings", longest)
    if family == "ministral3":
        rope.pop("max_position_embeddings", None)  # says again what config.json says
        if beta := rope.pop("llama_4_scaling_beta", 0.0):
            found |= {"rope_llama_4_scaling_beta": beta, "rope_original_max_position_embeddings": original}
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = original
    rope = _yarn(rope, longest) if kind == "yarn" else rope
    said = sorted(name for name, value in rope.items() if value is not None)
    if set(said) != set(ROPE_USES[kind]):
        raise ConfigError(f"model_path: config.json: rope_type {kind}: expected {ROPE_USES[kind]}, got {said}")
    return found | {f"rope_{name}": rope[name] for name in ROPE_USES[kind]}


def _rope_by_layer_type(rope: dict[str, Any], base: float) -> tuple[float, dict[str, Any]]:
    """(base in layers with a window, parameters of the others). base: in layers with a window if nothing is said."""
    local = dict(rope.pop("sliding_attention", None) or {})
    full = dict(rope.pop("full_attention", None) or {})
    base = local.pop("rope_theta", base)
    if local not in ({}, {"rope_type": "default"}) or rope:
        raise ConfigError(
            "model_path: config.json: rope_parameters: expected rope_type default for sliding_attention, and nothing "
            f"beside it and full_attention, got {local | rope}"
        )
    return base, full


def _yarn(rope: dict[str, Any], longest: int | None) -> dict[str, Any]:
    """YaRN's parameters with all that transformers infers. longest: the new context length, if it is known."""
    found = {"truncate": True} | rope
    original = found.get("original_max_position_embeddings")
    if found.get("factor") is None and longest and original:
        found["factor"] = longest / original
    numerator = found.pop("mscale", None)
    denominator = found.pop("mscale_all_dim", None)
    magnitude = found.get("attention_factor")
    if magnitude == 0:
        raise ConfigError(
            "model_path: config.json: attention_factor: expected more than 0, or null, which follows from the factor, "
            f"got {magnitude!r}; remove it"
        )
    if magnitude is None and numerator and denominator and found.get("factor"):
        stretch = 0.1 * math.log(max(found["factor"], 1))
        magnitude = (numerator * stretch + 1) / (denominator * stretch + 1)
    found["attention_factor"] = magnitude or 0.0
    found["beta_fast"] = float(found.get("beta_fast") or 32)
    found["beta_slow"] = float(found.get("beta_slow") or 1)
    return found


def _layers_without_rope(given: dict[str, Any]) -> dict[str, int]:
    """The field of the layers without rotary embedding."""
    if "no_rope_layer_interval" not in given:
        return {}
    layers = given["num_hidden_layers"]
    without = _is_without_rope(given)
    for n in range(layers + 1):
        if without == [n > 0 and (l + 1) % n == 0 for l in range(layers)]:
            return {"no_rope_layer_interval": n}
    raise ConfigError(
        "model_path: config.json: no_rope_layers: expected 0 for every n-th layer and 1 for the others, got "
        f"{given['no_rope_layers']}"
    )


def _is_without_rope(given: dict[str, Any]) -> list[bool]:
    """Whether each layer is without rotary embedding."""
    layers = given["num_hidden_layers"]
    interval = given["no_rope_layer_interval"]
    rotated = given["no_rope_layers"]  # 1 for a layer with rotary embedding
    if rotated is None:
        return [interval > 0 and (l + 1) % interval == 0 for l in range(layers)]
    return [not has for has in rotated[:layers]]


def _window(family: str, given: dict[str, Any]) -> dict[str, int]:
    """The fields of the sliding window."""
    window = given["sliding_window"]
    layers = given["num_hidden_layers"]
    types = given.get("layer_types")
    of_masks = types if family == "smollm3" else None  # its masks follow layer_types whatever else is said
    if type(given.get("use_sliding_window", False)) is not bool or type(window) is bool:
        raise TypeError("use_sliding_window and sliding_window: expected true or false, and a number")
    unused = family in ("qwen2", "qwen3", "smollm3") and not given.get("use_sliding_window", False)
    if unused and of_masks is None:
        window = None
    if window == 0:
        raise ConfigError(
            "model_path: config.json: sliding_window: expected more than 0, or null for none, got 0, with which "
            "transformers attends to nothing; set it to null if the model was trained without it"
        )
    if types is not None:
        _check_layer_types(family, types, layers, window, unused=unused)
    if types is None and window and family in ("qwen2", "qwen3"):
        first = given.get("max_window_layers", 28)
        types = ["full_attention"] * max(0, min(first, layers)) + ["sliding_attention"] * (layers - max(0, first))
    if types is None and family == "smollm3":
        types = ["sliding_attention" if without else "full_attention" for without in _is_without_rope(given)]
    if types is None and "sliding_window_pattern" in given:
        n = given["sliding_window_pattern"]
        # transformers has 2 for Gemma 2, whatever its config.json says.
        if not n or (family == "gemma2" and n != 2):
            expected = 2 if family == "gemma2" else "1 or more"
            raise ConfigError(
                f"model_path: config.json: sliding_window_pattern: expected {expected}, got {n!r}, which transformers "
                f"does not compute for {family}; say layer_types in its place"
            )
        types = ["sliding_attention" if (l + 1) % n else "full_attention" for l in range(layers)]
    if not window or (types and all(kind == "full_attention" for kind in types)):
        return {"sliding_window": 0, "sliding_window_pattern": 0}
    for pattern in range(layers + 1):
        full = [pattern > 1 and (l + 1) % pattern == 0 for l in range(layers)]
        if types is None or types == ["full_attention" if x else "sliding_attention" for x in full]:
            return {"sliding_window": window, "sliding_window_pattern": pattern}
    raise ConfigError(
        "model_path: config.json: layer_types: expected every n-th layer with full_attention and the others with "
        f"sliding_attention, got {types}"
    )


def _check_layer_types(family: str, types: list[str], layers: int, window: int | None, *, unused: bool) -> None:
    """Raises ConfigError for `layer_types` that transformers refuses, or does not read.

    window: of the layers with sliding attention; None: there is none. unused: use_sliding_window is false.
    """
    if len(types) != layers:
        raise ConfigError(
            f"model_path: config.json: layer_types: expected one for each of num_hidden_layers={layers}, got "
            f"{len(types)}; fetch it again"
        )
    if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise ConfigError(
            f"model_path: config.json: layer_types: expected full_attention and sliding_attention, got {unknown[0]!r}; "
            f"nothing else is computed for {family}"
        )
    if not window and "sliding_attention" in types:
        why = "use_sliding_window false" if unused else "no such number"
        raise ConfigError(
            f"model_path: config.json: sliding_window: expected a number, since layer_types has sliding_attention, got "
            f"{why}; fetch it again"
        )
    if family == "ministral3" and window and "full_attention" in types:
        raise ConfigError(
            "model_path: config.json: layer_types: expected sliding_attention in every layer, got full_attention, "
            "which transformers does not read for ministral3; remove it if every layer has the window"
        )


def block_size(config: dict[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the blocks of a float8 matrix that have one scale; None if no weights are quantised.

    Raises ConfigError for quantised weights of another kind.
    """
    found = config.get("quantization_config")
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found
    if method == "bitsandbytes" and found.get("load_in_4bit") is True and found.get("bnb_4bit_quant_type") == "nf4":
        return None  # every matrix says how it is quantised, see bitsandbytes.py
    block = found.get("weight_block_size") if method == "fp8" else None
    if isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block):
        return block[0], block[1]
    got = f"{method!r} without it" if method == "fp8" else repr(method)
    raise ConfigError(
        "model_path: config.json: quantization_config: expected none, quant_method 'fp8' with weight_block_size, or "
        f"'bitsandbytes' with bnb_4bit_quant_type 'nf4', got {got}; fetch the model before it was quantised"
    )
