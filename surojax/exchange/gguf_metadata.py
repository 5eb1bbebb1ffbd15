"""Translates the metadata of a GGUF file to a config.json, which `huggingface.model_fields` reads as any other.

gguf_export.py writes the same keys, with the tables here.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from surojax.errors import ConfigError
from surojax.exchange.gguf_file import AGAIN, FAMILIES, MODEL_TYPE_OF, Contents, read_numbers
from surojax.families.family import Gguf
from surojax.families.window_keys import FULL, SLIDING
from surojax.models.decoder_config import channels
from surojax.sizes import check_largest

FREQUENCIES = "rope_freqs.weight"  # divisors of the frequencies of rotary embeddings
# Keys of the metadata after the architecture's name, and theirs in config.json.
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
WHOLE = frozenset(SIZES) - {"attention.layer_norm_rms_epsilon", "rope.freq_base"}  # keys with whole numbers
ROTATED = "rope.dimension_count"  # number of channels of a head that are rotated
HEAD_DIM = ("attention.key_length", "attention.value_length", ROTATED)  # all are a head's channels
SCALING_TYPE = "rope.scaling.type"
# Factors of rotated channels: llama.cpp multiplies the factor that yarn implies by the first one. The second one equals
# attention_factor of config.json, and llama.cpp reads it in few architectures.
MAGNITUDE = "rope.scaling.attn_factor"
SAID_MAGNITUDE = "rope.scaling.yarn_attn_factor"
# Keys of the stretched positions, and theirs in rope_scaling.
SCALING = {"rope.scaling.factor": "factor", "rope.scaling.original_context_length": "original_max_position_embeddings"}
WINDOWED = "attention.sliding_window_pattern"  # a list of the layers that have the window, or n: each n-th has none
FURTHER = "nextn_predict_layers"  # layers for further tokens, which block_count includes
# Keys whose value must be this in families that have none of it.
OFF = {
    "expert_count": 0,
    "rope.scaling.yarn_beta_fast": 32,
    "rope.scaling.yarn_beta_slow": 1,
    "rope.scaling.yarn_ext_factor": 1,
}
OTHERS = frozenset(
    (
        *HEAD_DIM,
        SCALING_TYPE,
        *SCALING,
        MAGNITUDE,
        SAID_MAGNITUDE,
        *OFF,
        "rope.scaling.finetuned",
        "vocab_size",
        "expert_used_count",
    )
)


def metadata_config(contents: Contents, numbers: Mapping[str, np.ndarray] | None = None) -> dict[str, Any]:
    """Translates a file's metadata to a config.json. Raises ConfigError for a key that is missing or not known.

    numbers: of `FREQUENCIES` and the family's `filled` vectors, of a file that is not written yet.
    """
    read = functools.partial(read_numbers, contents) if numbers is None else numbers.__getitem__
    metadata = contents.metadata
    architecture = metadata["general.architecture"]
    given = {
        key.removeprefix(f"{architecture}."): shortest(value)
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    family = FAMILIES[architecture]
    all_sizes = {**SIZES, **family.sizes}
    known = {*all_sizes, *family.fixed, *family.unread, *OTHERS, *([WINDOWED] if family.window_period else [])}
    if unknown := sorted(given.keys() - known):
        raise ConfigError(
            f"model_path: {contents.path} has {', '.join(unknown)}, which may change what the model computes and is "
            f"not known for {architecture}"
        )
    given.setdefault("attention.head_count_kv", given.get("attention.head_count"))
    check_largest({"num_hidden_layers": given.get("block_count")}, f"model_path: {contents.path}: ")
    windows = _windows(contents, given, family.window_period) if family.window_period else {}
    given = {"rope.freq_base": 10000.0, **family.defaults} | given
    further = given.get(FURTHER, 0) if family.further_layers else 0
    if isinstance(given.get("block_count"), int) and isinstance(further, int):
        given["block_count"] -= further
    missing = [key for key in all_sizes if given.get(key) is None]
    names = family.names
    missing += [names[ours] for ours in ("embed", "norm") if names[ours] not in contents.tensors]
    if missing:
        raise ConfigError(f"model_path: expected {missing[0]} in {contents.path}, got none; {AGAIN}")
    rows = contents.tensors[names["embed"]].shape
    if len(rows) != 2:
        raise ConfigError(
            f"model_path: {contents.path}: {names['embed']}: expected shape [tokens, channels], got {[*rows]}; {AGAIN}"
        )
    sizes = {theirs: given[ours] for ours, theirs in all_sizes.items()}
    heads = [given[key] for key in ("attention.head_count", "attention.head_count_kv") if key not in family.by_layer]
    if several := [x for x in heads if not isinstance(x, int)]:
        raise ConfigError(f"model_path: {contents.path}: expected equal layers, got head counts {several[0]}")
    for ours, theirs in all_sizes.items():
        value = 1 if ours in family.by_layer else sizes[theirs]
        is_of_type = type(value) is int if ours in WHOLE else isinstance(value, int | float)
        if not (is_of_type and (value > 0 or (value == 0 and ours in family.sizes))):
            expected = "a positive number" if is_of_type else "a whole number" if ours in WHOLE else "a number"
            raise ConfigError(f"model_path: {contents.path}: {ours}: expected {expected}, got {value!r}; {AGAIN}")
    head_dim = given.get(HEAD_DIM[0]) or channels(sizes)
    check_largest(sizes | {"head_dim": head_dim}, f"model_path: {contents.path}: ")
    for ours in family.by_layer:
        theirs = all_sizes[ours]
        sizes[theirs] = _of_layers(contents, ours, sizes[theirs], sizes["num_hidden_layers"])
        check_largest({theirs: max(sizes[theirs])}, f"model_path: {contents.path}: ")
    if family.partial_rotary:
        sizes["partial_rotary_factor"] = given.pop(ROTATED, head_dim) / head_dim
    for key, expected in (dict.fromkeys(HEAD_DIM, head_dim) | OFF | dict(family.fixed)).items():
        if key not in family.sizes and given.get(key, expected) != expected:
            raise ConfigError(f"model_path: {contents.path}: {key}: expected {expected}, got {given[key]}")
    layers = range(sizes["num_hidden_layers"])
    tokens = {f"{name}_token_id": metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return family.after_reading(
        sizes
        | tokens
        | dict(family.implied)
        | {
            key: any(names[ours].format(l=l) in contents.tensors for l in layers)
            for key, ours in family.present.items()
        }
        | {
            key: [l for l in layers if names[ours].format(l=l) in contents.tensors]
            for key, ours in family.layers_with.items()
        }
        | _filled(contents, family, sizes["num_hidden_layers"], head_dim, read)
        | windows
        | {
            "model_type": MODEL_TYPE_OF[architecture],
            "head_dim": head_dim,
            "vocab_size": rows[0],
            "tie_word_embeddings": names["head"] not in contents.tensors,
            "rope_scaling": _rope_scaling(contents, read, given, sizes, head_dim),
        }
    )


def _windows(contents: Contents, given: dict[str, Any], period: int) -> dict[str, list[str]]:
    """Reads `layer_types` of layers with and without a window. period: each n-th has none if the file says nothing.

    Raises ConfigError for something else than a truth value for each layer, or a number of at least 1.
    """
    layers, said = given.get("block_count"), given.get(WINDOWED, period)
    layers = layers if isinstance(layers, int) else 0
    slides = [bool((l + 1) % said) for l in range(layers)] if type(said) is int and said > 0 else said
    if not given.get("attention.sliding_window"):
        slides = [False] * layers
    if not isinstance(slides, list) or len(slides) != layers:
        raise ConfigError(
            f"model_path: {contents.path}: {WINDOWED}: expected true or false for each of {layers} layers, got "
            f"{str(said)[:200]}; {AGAIN}"
        )
    return {"layer_types": [SLIDING if x else FULL for x in slides]}


def _of_layers(contents: Contents, name: str, said: Any, layers: int) -> list[int]:
    """Reads a number for each layer, or the same one for all. Raises ConfigError for something else."""
    numbers = said if isinstance(said, list) else [said] * layers
    if len(numbers) != layers or any(type(n) is not int or n < 0 for n in numbers):
        raise ConfigError(
            f"model_path: {contents.path}: {name}: expected a whole number from 0 on for each of {layers} layers, got "
            f"{str(said)[:200]}; {AGAIN}"
        )
    return numbers


def _filled(
    contents: Contents, family: Gguf, layers: int, head_dim: int, read: Callable[[str], np.ndarray]
) -> dict[str, float]:
    """Reads the keys of config.json that vectors of one number say, the same in all layers.

    Raises ConfigError for other vectors, or none.
    """
    found = {}
    for name, key in family.filled.items():
        vectors = [name.format(l=l) for l in range(layers)]
        if missing := next((vector for vector in vectors if vector not in contents.tensors), None):
            raise ConfigError(f"model_path: expected {missing} in {contents.path}, got none; {AGAIN}")
        numbers = [read(vector) for vector in vectors]
        first = float(numbers[0].flat[0]) if numbers[0].size else 1.0
        if any(x.shape != (head_dim,) or (x != (first if key else 1)).any() for x in numbers):
            expected = "one number" if key else "ones"
            raise ConfigError(
                f"model_path: {contents.path}: expected {expected} in every {name.format(l='N')}, got others; such a "
                "model is not computed"
            )
        found |= {key: shortest(first)} if key else {}
    return found


def shortest(value: Any) -> Any:
    """Returns the number with the fewest digits that rounds to this float32: 1e-5 instead of 9.99999975e-06."""
    return float(str(np.float32(value))) if type(value) is float else value


def _rope_scaling(
    contents: Contents, read: Callable[[str], np.ndarray], given: dict, sizes: dict, head_dim: int
) -> dict[str, Any] | None:
    """Translates the metadata to the rope_scaling of a config.json; None without scaling."""
    read_divisors = FAMILIES[contents.metadata["general.architecture"]].read_divisors
    if FREQUENCIES in contents.tensors and read_divisors:
        return read_divisors(read(FREQUENCIES).reshape(-1))
    if FREQUENCIES in contents.tensors:
        return _from_divisors(contents, read(FREQUENCIES), sizes["rope_theta"], head_dim)
    is_scaled = given.get("rope.scaling.factor") not in (None, 0, 1)
    kind = given.get(SCALING_TYPE, "linear" if is_scaled else "none")  # as llama.cpp takes a factor without a type
    if kind == "none":
        return None
    factor = given.get("rope.scaling.factor", 0)
    if kind in ("linear", "yarn") and not (type(factor) in (int, float) and factor > 0):
        raise ConfigError(
            f"model_path: {contents.path}: rope.scaling.factor: expected a number above 0 with {SCALING_TYPE} {kind}, "
            f"got {factor!r}; {AGAIN}"
        )
    scaling = {theirs: given.get(ours) for ours, theirs in SCALING.items()}
    if kind == "linear" or scaling["original_max_position_embeddings"] is None:
        del scaling["original_max_position_embeddings"]
    implied = FAMILIES[contents.metadata["general.architecture"]].implied_rope
    return {"rope_type": kind} | scaling | _magnitude(contents, given, scaling["factor"]) | dict(implied)


def implied_magnitude(factor: float) -> float:
    """The factor of rotated channels that YaRN implies by the factor of positions."""
    return 0.1 * math.log(max(factor, 1)) + 1


def _magnitude(contents: Contents, given: dict[str, Any], factor: float | None) -> dict[str, float]:
    """Reads YaRN's attention_factor, if it is another than the implied one.

    Raises ConfigError if the file says one that llama.cpp does not read there.
    """
    implied = implied_magnitude(factor or 1)
    said, times = given.get(SAID_MAGNITUDE, implied), given.get(MAGNITUDE, 1)
    if not math.isclose(said, implied, rel_tol=1e-5):
        raise ConfigError(
            f"model_path: {contents.path}: {SAID_MAGNITUDE}: expected {implied:.7g}, which follows from the factor "
            f"{factor}, got {said}, which llama.cpp does not compute; fetch the model as safetensors"
        )
    return {} if times == 1 else {"attention_factor": round(times * implied, 6)}


def rope_divisors(scaling: Mapping[str, float], theta: float, head_dim: int) -> np.ndarray:
    """Returns the numbers `[head_dim / 2]` by which rotary scaling of type llama3 divides the frequencies."""
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    wavelengths_F = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    kept_F = np.clip((scaling["original_max_position_embeddings"] / wavelengths_F - low) / (high - low), 0, 1)
    return 1 / (kept_F + (1 - kept_F) / scaling["factor"])


def _from_divisors(contents: Contents, divisors_F: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Finds the `llama3` rope_scaling whose frequency divisors equal the file's.

    Files have these numbers only. The family says the parameters; the factor is the largest divisor. Raises ConfigError
    if the divisors do not follow from them, or if the family has no such models.
    """
    architecture = contents.metadata["general.architecture"]
    known = FAMILIES[architecture].llama3_rope
    if known is None:
        raise ConfigError(
            f"model_path: {contents.path}: expected no {FREQUENCIES} in a model of {architecture}, got one; fetch the "
            "model as safetensors"
        )
    divisors_F = divisors_F.reshape(-1)
    factor = float(divisors_F.max())
    expected_F = rope_divisors({"factor": factor, **known}, theta, head_dim)
    if expected_F.shape != divisors_F.shape or not np.allclose(divisors_F, expected_F, rtol=1e-4):
        listed = ", ".join(f"{name} {value}" for name, value in known.items())
        raise ConfigError(
            f"model_path: {contents.path}: expected {FREQUENCIES} of {architecture} ({listed}), got others; fetch the "
            "model as safetensors"
        )
    return {"rope_type": "llama3", "factor": factor, **known}
