"""Translates a Hugging Face `config.json` to the `model` fields of a config.

What a config.json means is declared by its family (surojax/families). A key that is not declared there is refused with
its name, so a model is never computed with less than its config says.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

from surojax.errors import ConfigError, shown
from surojax.exchange import compressed, missing, parts
from surojax.exchange.hub import FOLDER, OF_MODEL
from surojax.families import rope_keys
from surojax.families.family import REQUIRED, ModelFamily
from surojax.families.neutral import NEUTRAL, OFF, UNREAD, is_empty
from surojax.families.registry import ALIASES, FAMILIES, IMAGE_TEXT_FAMILIES
from surojax.sizes import check_largest
from surojax.untrusted import check_there, expanded, read_json


def read_config(folder: str | Path) -> dict[str, Any]:
    """Reads the config.json of a model's folder; of an image-text model only the language model's section.

    Raises ConfigError if there is none, or it cannot be read.
    """
    config = read_whole_config(folder)
    return parts.text_config(config) if parts.has_parts(config) else config


def read_whole_config(folder: str | Path, name: str = "config.json") -> dict[str, Any]:
    """Reads the entire config.json of a model's folder. Raises ConfigError if the file is missing or unreadable."""
    file = expanded(folder) / name
    try:
        config = read_json(file)
    except OSError as error:
        check_there("model_path", folder, FOLDER, OF_MODEL)
        instead = missing.held_instead(file.parent)
        got = f" with {instead}" if instead else f" ({error.strerror}); {OF_MODEL}"
        raise ConfigError(f"model_path: expected {FOLDER}, got {str(folder)!r}{got}") from error
    except ValueError as error:
        raise ConfigError(f"model_path: cannot read {file} ({error}); fetch it again") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model_path: expected an object in {file}, got {type(config).__name__}; fetch it again")
    family = config.get("model_type")
    return config | {"model_type": ALIASES[family]} if isinstance(family, str) and family in ALIASES else config


def labels_of(config: dict[str, Any]) -> int:
    """The number of labels of a model for sequence classification; 0: a language model."""
    classes = config.get("architectures")
    if not isinstance(classes, list) or not any(str(name).endswith("ForSequenceClassification") for name in classes):
        return 0
    names = config.get("id2label")
    # Of two labels, which is the default, transformers writes no names.
    return len(names) if isinstance(names, dict) else config.get("num_labels", 2)


def model_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Translates a config.json to `model` fields.

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
    """Translates a config.json to `model` fields; raises Python's own errors for values of wrong types."""
    name = config.get("model_type")
    if "text_config" in config:
        raise ConfigError(
            f"model_path: expected a text model, or model_type {', '.join(IMAGE_TEXT_FAMILIES)} with a text_config, "
            f"got {name!r} with one; give a folder with the text model alone"
        )
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(
            f"model_path: expected model_type {', '.join(FAMILIES)}, got {shown(name, 80)}; other "
            "architectures are not known"
        )
    family = FAMILIES[name]
    required = OFF | REQUIRED | family.required
    said = {key for key, value in config.items() if not is_empty(value)}
    if unknown := sorted(said - {*family.defaults, *required, *NEUTRAL}):
        raise ConfigError(
            f"model_path: config.json has {', '.join(unknown)}, which may change what the model computes and is not "
            f"known for {name}; remove it if transformers computes the same without it"
        )
    for key, allowed in required.items():
        is_off = key in OFF and key not in said
        if key in config and not any(_is_same(config[key], value) for value in allowed) and not is_off:
            expected = [*allowed, None][0]
            raise ConfigError(
                f"model_path: config.json: {key}: expected {expected!r}, got {config[key]!r}; nothing else is "
                f"computed for {name}"
            )
    _check_types(config, family)
    _check_numbers({key: value for key, value in config.items() if key not in UNREAD | {*UNLIMITED}}, family)
    float8_scales(config)
    given = family.defaults | config
    check_largest(given, "model_path: config.json: ")
    given["rope_parameters"] = rope_keys.parameters(config, family.defaults)
    sizes = {name: 0 if given[name] is None else given[name] for name in family.sizes}
    sizes["num_key_value_heads"] = given["num_key_value_heads"] or given["num_attention_heads"]
    fields = sizes | family.read(given) | family.options | {"model_type": family.architecture.name}
    if labels := labels_of(config):
        fields |= {"num_labels": labels, "tie_word_embeddings": False}
    return fields


# Sizes of which 0 means here that config.json has none, and those that may be null there.
NOT_ZERO = ("head_dim", "num_attention_heads", "num_key_value_heads", "query_pre_attn_scalar", "moe_intermediate_size")
OR_NULL = ("head_dim", "num_key_value_heads", "attn_logit_softcapping", "final_logit_softcapping", "n_shared_experts")

# Keys whose type no default says: those of neutral.READ, and of families in which null is a default.
TYPES = {
    "max_position_embeddings": int,
    "partial_rotary_factor": float,
    "use_sliding_window": bool,
    "tie_embedding": bool,
    "max_window_layers": int,
    "n_group": int,
    "topk_group": int,
    "num_experts_per_tok": int,
    "bos_token_id": int,
    "pad_token_id": int,
    "rope_parameters": dict,
    "rope_scaling": dict,
    "per_layer_config": dict,
}
LISTS = (
    "mlp_only_layers",
    "no_rope_layers",
    "layer_types",
    "full_attn_idxs",
    "mlp_layer_types",
    "layer_rope_theta",
    "layers_block_type",
    "mtp_layers_block_type",
)
WORDS = {bool: "true or false", int: "a whole number", float: "a number", list: "a list", dict: "an object"}


def _check_types(config: dict[str, Any], family: ModelFamily) -> None:
    """Raises ConfigError for a truth value or a text in place of a number, and the like, as transformers 5 does."""
    kinds = {key: float if default is None else type(default) for key, default in family.defaults.items()}
    kinds |= TYPES | dict.fromkeys(LISTS, list)
    values = {key: (config[key], kind) for key, kind in kinds.items() if kind in WORDS and key in config}
    for key in ("rope_parameters", "rope_scaling"):
        values |= _types_of_rope(config.get(key), key)
    for key, (value, kind) in values.items():
        fits = value is None or type(value) is kind or (kind is float and type(value) is int)
        if not fits or (isinstance(value, list) and bool in map(type, value)):
            raise ConfigError(
                f"model_path: config.json: {key}: expected {WORDS[kind]}, got {shown(value)}; fetch it again"
            )


def _types_of_rope(rope: Any, place: str) -> dict[str, tuple[Any, type]]:
    """{place: (value, type that it must have)} of a rotary embedding's numbers, also of one for each type of layers."""
    found = {}
    for key, value in rope.items() if isinstance(rope, dict) else ():
        if isinstance(value, dict):
            found |= _types_of_rope(value, f"{place}.{key}")
        elif key not in ("rope_type", "type") and not isinstance(value, list):
            found[f"{place}.{key}"] = (value, bool if key in ("truncate", "mrope_interleaved") else float)
    return found


def _is_same(value: Any, allowed: Any) -> bool:
    """True for an equal value that is no truth value in place of a number, nor the reverse."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


UNLIMITED = ("time_step_limit",)  # keys whose numbers may be infinite
MOST = 1e15  # of a number, whose square float32 holds with what it is multiplied by


def _check_numbers(config: dict[str, Any], family: ModelFamily) -> None:
    """Raises ConfigError for NaN, infinities, huge numbers, null, and sizes of 0 that would be read as none."""
    for key, value in config.items():
        numbers = _numbers(value)
        if any(not math.isfinite(number) for number in numbers):
            expected, got = "finite numbers", shown(value)
        elif key in family.sizes and any(abs(number) > MOST for number in numbers):
            expected, got = f"at most {MOST:g}", repr(value)
        elif key in NOT_ZERO and key in family.sizes and value == 0:
            expected, got = "more than 0", repr(value)
        elif value is None and key in family.sizes and key not in OR_NULL:
            expected, got = "a number", "null"
        else:
            continue
        raise ConfigError(f"model_path: config.json: {key}: expected {expected}, got {got}; fetch it again")


def _numbers(value: Any) -> list[float]:
    """Collects the floats in nested lists and objects."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return [number for each in inner for number in _numbers(each)]
    return [value] if isinstance(value, float) else []


class Float8Scales(NamedTuple):
    """Sizes (rows, columns) of a float8 matrix' blocks with one scale, and the suffix of the scales' tensor name.

    block: None: a matrix, of experts each one's, has one scale.
    """

    block: tuple[int, int] | None
    suffix: str


def float8_scales(config: dict[str, Any]) -> Float8Scales | None:
    """Reads how float8 matrices are scaled from a config.json; None if the weights are not in float8.

    Raises ConfigError for quantised weights of a kind that is not read.
    """
    entry = config.get("quantization_config")
    if entry is None:
        return None
    method = entry.get("quant_method") if isinstance(entry, dict) else entry
    if method == "mxfp4":
        return None  # of which tensors say what they are, see stored_mxfp4.py
    if method == "bitsandbytes" and entry.get("load_in_4bit") is True and entry.get("bnb_4bit_quant_type") == "nf4":
        return None  # every matrix says how it is quantised, see bitsandbytes.py
    block = entry.get("weight_block_size") if method == "fp8" else None
    if method == "fp8" and "weight_block_size" in entry and block is None:
        return Float8Scales(None, "_scale_inv")
    if isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block):
        return Float8Scales((block[0], block[1]), "_scale_inv")
    got = repr(method)
    if method == "fp8":
        got = f"{method!r} with {shown(block)}" if "weight_block_size" in entry else f"{method!r} without it"
    if method == "bitsandbytes":
        got = f"{method!r} in fp4 or 8 bits"
    if method == compressed.METHOD:
        try:
            block = compressed.fp8_block(entry)
            return Float8Scales(block, compressed.FP8_SCALES) if block else None  # NVFP4 says itself what it is
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            got = f"{method!r} of another kind ({shown(error)})"
    raise ConfigError(
        "model_path: config.json: quantization_config: expected none, quant_method 'mxfp4', 'fp8' with "
        f"weight_block_size, 'bitsandbytes' with bnb_4bit_quant_type 'nf4', or {compressed.METHOD!r} in blocks of "
        f"float8 or in NVFP4, got {got}; fetch the model before it was quantised"
    )
