"""Qwen3.5 and Qwen3-Next in GGUF files, as llama.cpp's converter writes them: in more than names unlike Hugging Face's.

The value heads of a gated delta net are in another order: in Hugging Face's, those that share a key head follow each
other; here the first of each key head come first, then the second of each. Decays are stored as -exp(A_log), weights of
the norms of (1 + w) with that 1, and convolutions without their axis of input channels.

Qwen3-Next's value heads stay in order; of its fused projection the gates are a tensor of their own, and the rest has
the rows of all queries, then of all keys, then of all values.

Layers have attention every few layers, which one number says. Sections of the rotary embedding divide it between the
three positions of a token of an image, which are equal in a text.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from surojax.errors import ConfigError
from surojax.families.family import (
    EXPERT_GGUF_NAMES,
    EXPERT_GGUF_SIZES,
    GGUF_LAYER,
    GGUF_NAMES,
    NORM_AFTER_ATTENTION,
    PLUS_ONE,
    Gguf,
    GgufParts,
    GgufTransform,
    in_gguf,
)
from surojax.models.decoder_config import ATTENTION
from surojax.models.kinds.experts import Experts
from surojax.models.kinds.gated_delta import GatedDelta

INTERVAL = "full_attention_interval"
INNER = "linear_inner_size"  # channels of all value heads; no key of config.json
LARGEST_EPS = 1e-5  # 1e-2 moved log-probabilities of a tiny drawn model by 1e-1, 1e-6 by 2e-5
GATED_SHARED = ("shared_expert.w_gate", "shared_expert.w_up", "shared_expert.w_down", "shared_expert_gate")


def before_writing(config: dict[str, Any]) -> dict[str, Any]:
    """Adds keys that files have in place of several of config.json.

    Layers that do not follow from `full_attention_interval` are noticed when the keys are read back.
    """
    types = config["layer_types"]
    every = types.index(ATTENTION) + 1 if ATTENTION in types else len(types) + 1
    inner = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    return config | {INTERVAL: every, INNER: inner}


def after_reading(config: dict[str, Any]) -> dict[str, Any]:
    """Computes a value head's channels. Raises ConfigError if heads do not divide those of all, or for other models."""
    inner, heads = config.pop(INNER), config["linear_num_value_heads"]
    if inner % heads:
        raise ConfigError(
            f"model_path: ssm.inner_size: expected a multiple of ssm.time_step_rank={heads}, got {inner}; fetch the "
            "file again"
        )
    keys, values = config["linear_key_head_dim"], inner // heads
    if keys != values:
        raise ConfigError(
            f"model_path: ssm.inner_size: expected {heads * keys}, since llama.cpp has heads of values as large as "
            f"those of keys, got {inner}; fetch the model as safetensors"
        )
    if config["rms_norm_eps"] > LARGEST_EPS:
        raise ConfigError(
            f"model_path: attention.layer_norm_rms_epsilon: expected at most {LARGEST_EPS:g}, which is the least "
            f"length of queries and keys in llama.cpp, got {config['rms_norm_eps']}; fetch the model as safetensors"
        )
    return config | {"linear_value_head_dim": values}


def sections(config: dict[str, Any], given: dict[str, Any]) -> list[int]:
    """The pairs of rotated channels with each of an image's three positions, which take turns, and 0.

    given: the model's own config.json, in which `mrope_section` says at most how many.
    """
    said = (given.get("rope_parameters") or given.get("rope_scaling") or {}).get("mrope_section", [11, 11, 10])
    pairs = int(config["head_dim"] * config["partial_rotary_factor"]) // 2
    height, width = (len(range(i, min(3 * said[i], pairs), 3)) for i in (1, 2))
    return [pairs - height - width, height, width, 0]


def _reordered(x: np.ndarray, config: dict[str, Any], axis: int, size: int, *, to_file: bool) -> np.ndarray:
    """Reorders the value heads of an axis. size: numbers of a head."""
    keys = config["linear_num_key_heads"]
    shared = config["linear_num_value_heads"] // keys
    heads = (keys, shared) if to_file else (shared, keys)
    apart = x.reshape(*x.shape[:axis], *heads, size, *x.shape[axis + 1 :])
    return np.ascontiguousarray(apart.swapaxes(axis, axis + 1)).reshape(x.shape)


def _of_heads(axis: int = 0, size: str = "") -> GgufTransform:
    """Makes the transform of a tensor with value heads along an axis.

    size: the key of config.json that says how many numbers a head has; "": 1.
    """

    def reorder(to_file: bool) -> Callable:
        return lambda x, config: _reordered(x, config, axis, config[size] if size else 1, to_file=to_file)

    return GgufTransform(reorder(True), reorder(False))


def _values(x: np.ndarray, config: dict[str, Any], *, to_file: bool) -> np.ndarray:
    """Reorders the rows of values, which follow those of queries and keys."""
    before = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = _reordered(x[before:], config, 0, config["linear_value_head_dim"], to_file=to_file)
    return np.concatenate([x[:before], values])


def _decays_from_file(x: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    if x.max() >= 0:
        raise ConfigError("model_path: ssm_a: expected numbers below 0, got others; fetch the file again")
    return np.log(-x)


def _sizes_of_fused(config: dict[str, Any]) -> tuple[int, list[int]]:
    """Returns (key heads, rows of each key head: of its query, its key, its values and their gates)."""
    keys, k = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    return keys, [k, k, values, values]


def _divide_fused(x: np.ndarray, config: dict[str, Any]) -> list[np.ndarray]:
    keys, sizes = _sizes_of_fused(config)
    by_head = np.split(x.reshape(keys, sum(sizes), -1), np.cumsum(sizes)[:-1], axis=1)
    *qkv, z = (rows.reshape(-1, x.shape[1]) for rows in by_head)
    return [np.concatenate(qkv), z]


def _join_fused(parts: list[np.ndarray], config: dict[str, Any]) -> np.ndarray:
    qkv, z = parts
    keys, sizes = _sizes_of_fused(config)
    rows = [*np.split(qkv, keys * np.cumsum(sizes[:2])), z]
    by_head = [x.reshape(keys, -1, qkv.shape[1]) for x in rows]
    return np.concatenate(by_head, axis=1).reshape(-1, qkv.shape[1])


def _shapes_of_fused(config: dict[str, Any]) -> list[tuple[int, ...]]:
    keys, (*qkv, z) = _sizes_of_fused(config)
    return [(keys * sum(qkv), config["hidden_size"]), (keys * z, config["hidden_size"])]


def _shape_of_fused(config: dict[str, Any]) -> tuple[int, ...]:
    keys, sizes = _sizes_of_fused(config)
    return (keys * sum(sizes), config["hidden_size"])


FUSED = GgufParts(
    names=(GGUF_LAYER + "attn_qkv.weight", GGUF_LAYER + "attn_gate.weight"),
    shape=_shape_of_fused,
    shapes=_shapes_of_fused,
    divide=_divide_fused,
    join=_join_fused,
)
HEADS = _of_heads()
ROWS = GgufTransform(
    lambda x, config: _values(x, config, to_file=True), lambda x, config: _values(x, config, to_file=False)
)
ONE_INPUT = GgufTransform(lambda x, config: x, lambda x, config: x, axis=1, dimensions=3)
ONE_ROW = GgufTransform(lambda x, config: x, lambda x, config: x, axis=0, dimensions=2)
DECAYS = GgufTransform(lambda x, config: -np.exp(x), _decays_from_file)
OF_BOTH = {
    **dict.fromkeys(("norm", "attention_norm", "mlp_norm", "attention.q_norm", "attention.k_norm"), PLUS_ONE),
    "delta.A_log": DECAYS,
    "delta.taps": ONE_INPUT,
    "mlp.shared_expert_gate": ONE_ROW,
}
TRANSFORMS = OF_BOTH | {
    "delta.wqkv": ROWS,
    "delta.wz": _of_heads(0, "linear_value_head_dim"),
    "delta.wo": _of_heads(1, "linear_value_head_dim"),
    **dict.fromkeys(("delta.wa", "delta.wb", "delta.dt_bias"), HEADS),
    "delta.A_log": GgufTransform(
        lambda x, config: HEADS.change(DECAYS.change(x, config), config),
        lambda x, config: DECAYS.back(HEADS.back(x, config), config),
    ),
    "delta.taps": ROWS._replace(axis=1, dimensions=3),
}
SIZES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": INNER,
    INTERVAL: INTERVAL,
}
HOW: dict[str, Any] = {
    "further_layers": True,
    "unread": {"nextn_predict_layers": 0, "rope.dimension_sections": sections},
    "partial_rotary": True,
    "before_writing": before_writing,
    "after_reading": after_reading,
}
DENSE = Gguf(
    architecture="qwen35",
    names=GGUF_NAMES | in_gguf(GatedDelta) | NORM_AFTER_ATTENTION,
    sizes=SIZES,
    defaults={INTERVAL: 4},
    transforms=TRANSFORMS,
    **HOW,
)
SIZES_OF_EXPERTS = (
    SIZES
    | EXPERT_GGUF_SIZES
    | {
        "feed_forward_length": "intermediate_size",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    }
)
NAMES_OF_EXPERTS = EXPERT_GGUF_NAMES | in_gguf(Experts, *GATED_SHARED) | in_gguf(GatedDelta) | NORM_AFTER_ATTENTION
WITH_EXPERTS = Gguf(
    architecture="qwen35moe",
    names=NAMES_OF_EXPERTS,
    sizes=SIZES_OF_EXPERTS,
    defaults={INTERVAL: 4, "feed_forward_length": 0},  # there is no MLP of that width
    transforms=TRANSFORMS,
    **HOW,
)
NEXT = Gguf(
    architecture="qwen3next",
    names=NAMES_OF_EXPERTS,
    sizes=SIZES_OF_EXPERTS,
    defaults={INTERVAL: 4},
    implied={"norm_topk_prob": True},
    transforms=OF_BOTH,
    parts={"delta.wqkvz": FUSED},
    **HOW | {"further_layers": False, "unread": {}},
)
