"""Latent attention in GGUF files, as llama.cpp's converter writes them: architecture `deepseek2`.

llama.cpp attends to the latents themselves. So files say that there is one key and value head, of the latent's size
(the key's with the rotary key); `key_length_mla` and `value_length_mla` are a head's real sizes. The matrix that
expands latents is two tensors: that of the keys `[heads, latent, n]`, transposed, and that of the values
`[heads, v, latent]`. Files from before 2025-04 have one matrix, and say all heads with their real sizes; they are read
too. Neighbouring channels are rotated together.

llama.cpp scales scores for stretched positions (YaRN) by `yarn_log_multiplier`, a tenth of `mscale_all_dim`, and never
queries and keys, so that `mscale` must be the same. In the norms of latents it adds what the model's other norms add,
and transformers 1e-6.
"""

from typing import Any

import numpy as np

from surojax.errors import ConfigError
from surojax.families.family import (
    GGUF_LAYER,
    SHARED_EXPERT_GGUF_NAMES,
    Gguf,
    GgufParts,
    in_gguf,
)
from surojax.models.kinds.latent_attention import LatentAttention
from surojax.models.kinds.self_attention import Attention

KEY, VALUE = "latent_key_length", "latent_value_length"  # no keys of config.json
KEY_MLA, VALUE_MLA, GATING, STRETCH = "key_length_mla", "value_length_mla", "gating", "yarn_log_multiplier"
LARGEST_EPS = 1e-5  # it moves log-probabilities of tiny random models by 1e-4; 1e-3 moves them by 1e-2, 1e-2 by 1e-1
SOFTMAX, SIGMOID = 1, 2  # values of expert_gating_func
AGAIN = "fetch the file again"


def before_writing(config: dict[str, Any]) -> dict[str, Any]:
    """Adds what files say in place of keys of config.json."""
    n, r = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    stretched = (config["rope_scaling"] or {}).get("mscale_all_dim")
    return config | {
        "num_key_value_heads": 1,
        KEY: config["kv_lora_rank"] + r,
        VALUE: config["kv_lora_rank"],
        KEY_MLA: n + r,
        VALUE_MLA: config["v_head_dim"],
        GATING: SOFTMAX if config["model_type"] in ("deepseek_v2", "mistral4") else SIGMOID,
        STRETCH: 0.1 * stretched if stretched else None,
    }


def after_reading(config: dict[str, Any]) -> dict[str, Any]:
    """Computes a head's sizes, and tells DeepSeek-V2 from V3 by the routers. Raises ConfigError for other files."""
    config = dict(config)
    key, value, key_mla, value_mla = (config.pop(name) for name in (KEY, VALUE, KEY_MLA, VALUE_MLA))
    gating, stretch = config.pop(GATING), config.pop(STRETCH)
    heads, own_heads = config["num_attention_heads"], config["num_key_value_heads"]
    r, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    whole = not key_mla  # files from before 2025-04 lack this key
    expected = (key, value, heads) if whole else (latent + r, latent, 1)
    h, v = (key, value) if whole else (key_mla, value_mla)
    if (key, value, own_heads) != expected or h <= r:
        raise ConfigError(
            f"model_path: attention.key_length, value_length and head_count_kv: expected {expected} of "
            f"{heads} heads with a latent of {latent} numbers, got {(key, value, own_heads)}; {AGAIN}"
        )
    if config["rms_norm_eps"] > LARGEST_EPS:
        raise ConfigError(
            f"model_path: attention.layer_norm_rms_epsilon: expected at most {LARGEST_EPS:g}, which llama.cpp adds in "
            f"the norms of latents too, in place of 1e-06, got {config['rms_norm_eps']}; fetch the model as safetensors"
        )
    if gating not in (SOFTMAX, SIGMOID):
        raise ConfigError(
            f"model_path: expert_gating_func: expected {SOFTMAX} (softmax) or {SIGMOID} (sigmoid), got {gating!r}; "
            "no other is computed"
        )
    if gating == SOFTMAX and config["n_group"] > 1:
        raise ConfigError(
            f"model_path: expert_group_count: expected 1 for routers with softmax, whose groups llama.cpp and "
            f"transformers choose differently, got {config['n_group']}; fetch the model as safetensors"
        )
    scaling = config["rope_scaling"]
    if scaling and scaling["rope_type"] == "yarn":
        if not stretch:
            raise ConfigError(
                "model_path: rope.scaling.yarn_log_multiplier: expected more than 0 for positions stretched by yarn, "
                "got 0, which llama.cpp and transformers compute differently; fetch the model as safetensors"
            )
        scale = round(10 * stretch, 6)
        config["rope_scaling"] = scaling | {"mscale": scale, "mscale_all_dim": scale}
    del config["head_dim"]
    return config | {
        "model_type": "deepseek_v3" if gating == SIGMOID else "deepseek_v2",
        "num_key_value_heads": heads,
        "qk_nope_head_dim": h - r,
        "v_head_dim": v,
        "q_lora_rank": config["q_lora_rank"] or None,
        "topk_method": "noaux_tc" if gating == SIGMOID else "greedy",
    }


def _shape(config: dict[str, Any]) -> tuple[int, ...]:
    """The shape of the matrix that expands latents: of each head the rows of its key, then those of its value."""
    n, v = config["qk_nope_head_dim"], config["v_head_dim"]
    return (config["num_attention_heads"] * (n + v), config["kv_lora_rank"])


def _shapes(config: dict[str, Any]) -> list[tuple[int, ...]]:
    heads, latent = config["num_attention_heads"], config["kv_lora_rank"]
    return [(heads, latent, config["qk_nope_head_dim"]), (heads, config["v_head_dim"], latent)]


def _divide(x: np.ndarray, config: dict[str, Any]) -> list[np.ndarray]:
    by_head = x.reshape(config["num_attention_heads"], -1, x.shape[1])
    n = config["qk_nope_head_dim"]
    return [np.ascontiguousarray(by_head[:, :n].swapaxes(1, 2)), np.ascontiguousarray(by_head[:, n:])]


def _join(parts: list[np.ndarray], config: dict[str, Any]) -> np.ndarray:
    keys, values = parts
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(_shape(config))


EXPANSION = GgufParts(
    names=(GGUF_LAYER + "attn_k_b.weight", GGUF_LAYER + "attn_v_b.weight"),
    shape=_shape,
    shapes=_shapes,
    divide=_divide,
    join=_join,
)
NAMES = {ours: theirs for ours, theirs in SHARED_EXPERT_GGUF_NAMES.items() if not ours.startswith(f"{Attention.name}.")}
LATENT = Gguf(
    architecture="deepseek2",
    names=NAMES | in_gguf(LatentAttention),
    sizes={
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.key_length": KEY,
        "attention.value_length": VALUE,
        "attention.key_length_mla": KEY_MLA,
        "attention.value_length_mla": VALUE_MLA,
        "rope.dimension_count": "qk_rope_head_dim",
        "rope.scaling.yarn_log_multiplier": STRETCH,
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
        "expert_gating_func": GATING,
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "leading_dense_block_count": "first_k_dense_replace",
    },
    defaults={
        "attention.q_lora_rank": 0,
        "attention.key_length_mla": 0,
        "attention.value_length_mla": 0,
        "rope.scaling.yarn_log_multiplier": 0,
        "expert_weights_norm": False,
        "expert_gating_func": SOFTMAX,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
    },
    parts={"latent.wkv_b": EXPANSION},
    before_writing=before_writing,
    after_reading=after_reading,
)
