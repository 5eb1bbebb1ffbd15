"""Gemma 4 in GGUF files: norms with their own weights, and two sizes of heads.

`key_length` is that of layers without a window, `key_length_swa` of those with one, and `head_count_kv` is of each
layer. Keys of layers without a window whose values are of the same product have no `attn_v`. Channels that are not
rotated have frequencies that are divided by 1e30.

E2B and E4B: of the layers' own inputs the tables are one tensor, and so are the matrices. llama.cpp has in its code
which keys and values the last layers share: of those with a window the second but last layer's before them, of the
others the last one's.
"""

from typing import Any

import numpy as np

from surojax.errors import ConfigError
from surojax.families import mixer_keys
from surojax.families.family import GGUF_LAYER, GGUF_NAMES, NORMS_AFTER, Gguf
from surojax.families.rope_keys import PARTIAL
from surojax.families.window_keys import FULL, SLIDING
from surojax.models.channels import LAYER_INPUT_NORM
from surojax.models.rotary import PROPORTIONAL

HEAD_DIM, HEADS, SHARED = "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"
EMBEDDINGS, TABLE_ROWS = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
SHARED_LAYERS, DOUBLE, CAP = "num_kv_shared_layers", "use_double_wide_mlp", "final_logit_softcapping"
OF_EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")
# No keys of config.json:
WITH_VALUES = "layers_with_values"
LOCAL_BASE, LOCAL_DIM = "rope_freq_base_swa", "key_length_swa"
SAME = {  # keys that say a head's channels once more
    "attention.value_length": HEAD_DIM,
    "rope.dimension_count": HEAD_DIM,
    "attention.value_length_swa": LOCAL_DIM,
    "rope.dimension_count_swa": LOCAL_DIM,
}
HEADS_KEY, WIDTH_KEY = "attention.head_count_kv", "feed_forward_length"
WINDOWED, SHARED_KEY = "attention.sliding_window_pattern", "attention.shared_kv_layers"
UNROTATED = np.float32(1e30)


def _divisors(config: dict[str, Any]) -> np.ndarray | None:
    """Returns the divisors `[h / 2]` of the frequencies of layers without a window; None: there are none."""
    full, half = config["rope_parameters"][FULL], config[HEAD_DIM] // 2
    if full["rope_type"] != PROPORTIONAL:
        return None
    rotated = int(full[PARTIAL] * half)
    return np.where(np.arange(half) < rotated, np.float32(1), UNROTATED)


def _read_divisors(divisors_F: np.ndarray) -> dict[str, Any]:
    """The inverse of `_divisors`, as rope_scaling. Raises ConfigError for other numbers."""
    rotated = int((divisors_F == 1).sum())
    if (divisors_F[:rotated] != 1).any() or (divisors_F[rotated:] < UNROTATED).any():
        raise ConfigError(
            "model_path: rope_freqs.weight: expected ones, and 1e30 behind them for channels that are not rotated, got "
            "others; fetch the model as safetensors"
        )
    return {"rope_type": PROPORTIONAL, PARTIAL: rotated / len(divisors_F)}


def _before_writing(config: dict[str, Any]) -> dict[str, Any]:
    """Adds what files say in place of keys of config.json."""
    types, heads, width = config["layer_types"], config[mixer_keys.HEADS], config["intermediate_size"]
    of_full = config[HEADS] or heads
    shared = config.get(SHARED_LAYERS) or 0
    own = len(types) - shared
    said = config | {LOCAL_DIM: config["head_dim"]}
    return (
        said
        | {key: said[name] for key, name in SAME.items()}
        | {name: config[name] or None for name in OF_EXPERTS}
        | {
            mixer_keys.HEADS: [of_full if kind == FULL else heads for kind in types],
            LOCAL_BASE: config["rope_parameters"][SLIDING]["rope_theta"],
            CAP: config[CAP] or 0.0,  # llama.cpp takes 30 if the file says nothing
            WITH_VALUES: [l for l, kind in enumerate(types[:own]) if not (config[SHARED] and kind == FULL)],
            EMBEDDINGS: config.get(EMBEDDINGS) or 0,
            SHARED_LAYERS: shared,
            "intermediate_size": [width] * own + [2 * width] * shared if shared and config[DOUBLE] else width,
        }
    )


def _after_reading(config: dict[str, Any]) -> dict[str, Any]:
    """Reads what files say in place of keys of config.json. Raises ConfigError for what is not computed."""
    config = dict(config)
    for key, name in SAME.items():
        if (said := config.pop(key)) not in (0, config[name]):
            raise ConfigError(
                f"model_path: {key}: expected {config[name]}, as of keys, got {said}; fetch the file again"
            )
    types, heads, with_values = config["layer_types"], config[mixer_keys.HEADS], config.pop(WITH_VALUES)
    local, full = (
        mixer_keys.one_of([n for n, kind in zip(heads, types, strict=True) if kind == wanted], HEADS_KEY)
        for wanted in (SLIDING, FULL)
    )
    if SLIDING not in types:
        raise ConfigError(
            f"model_path: {WINDOWED}: expected a layer with a window, without which llama.cpp ends at a file of "
            "gemma4, got none; fetch the model as safetensors"
        )
    shared = config[SHARED_LAYERS]
    own = len(types) - shared
    if shared and types[max(own - 2, 0) : max(own, 0)] != [SLIDING, FULL]:
        raise ConfigError(
            f"model_path: {SHARED_KEY}: expected a layer with a window and then one without before those that share "
            f"keys and values, since llama.cpp gives them those of these two, got {shared} of {len(types)} layers; "
            "fetch the model as safetensors"
        )
    lacking = [l for l in range(own) if l not in with_values]
    if lacking and lacking != [l for l, kind in enumerate(types[:own]) if kind == FULL]:
        raise ConfigError(
            f"model_path: expected attn_v in every layer, or in all with a window and no other, got none in layers "
            f"{', '.join(map(str, lacking))}; such a model is not computed"
        )
    widths = config["intermediate_size"]
    width, of_shared = mixer_keys.one_of(widths[:own], WIDTH_KEY), mixer_keys.one_of(widths[own:], WIDTH_KEY)
    if of_shared not in (0, width, 2 * width):
        raise ConfigError(
            f"model_path: {WIDTH_KEY}: expected {width} or {2 * width} of layers that share keys and values, got "
            f"{of_shared}; such a model is not computed"
        )
    rope = {"rope_theta": config["rope_theta"]} | (config.pop("rope_scaling") or {"rope_type": "default"})
    of_full = {"head_dim": config[HEAD_DIM], "num_key_value_heads": full or local}
    return config | {
        "model_type": "gemma4_text",
        "intermediate_size": width,
        DOUBLE: of_shared > width,
        TABLE_ROWS: config["vocab_size"],
        mixer_keys.HEADS: local or full,
        "head_dim": config.pop(LOCAL_DIM),
        SHARED: bool(lacking),
        HEADS: full,
        "per_layer_config": {str(l): of_full for l, kind in enumerate(types) if kind == FULL},
        CAP: config[CAP] or None,
        "enable_moe_block": config["num_experts"] > 0,
        "rope_parameters": {
            FULL: rope,
            SLIDING: {"rope_type": "default", "rope_theta": config.pop(LOCAL_BASE)},
        },
    }


NORMS = {
    "mlp.mlp_out_norm": "post_ffw_norm_1.weight",
    "mlp.experts_norm": "pre_ffw_norm_2.weight",
    "mlp.experts_out_norm": "post_ffw_norm_2.weight",
}
EXPERTS = {
    "mlp.experts.router": "ffn_gate_inp.weight",
    "mlp.experts.router_scale": "ffn_gate_inp.scale",
    "mlp.experts.expert_scale": "ffn_down_exps.scale",
    "mlp.experts.w_gate": "ffn_gate_exps.weight",
    "mlp.experts.w_up": "ffn_up_exps.weight",
    "mlp.experts.w_down": "ffn_down_exps.weight",
}
INPUTS = {
    "layer_input.gate": "inp_gate.weight",
    "layer_input.projection": "proj.weight",
    "layer_input.norm": "post_norm.weight",
}
OF_ALL_LAYERS = {  # see exchange/joined_rows.py
    "layer_input.table": "per_layer_token_embd.weight[:, layer {l}]",
    "layer_input.model_projection": "per_layer_model_proj.weight[layer {l}]",
    LAYER_INPUT_NORM: "per_layer_proj_norm.weight",
}
OF_LAYER = {"layer_scalar": "layer_output_scale.weight"} | NORMS | EXPERTS | INPUTS
OF_GEMMA4 = Gguf(
    architecture="gemma4",
    names=GGUF_NAMES | NORMS_AFTER | {x: GGUF_LAYER + theirs for x, theirs in OF_LAYER.items()} | OF_ALL_LAYERS,
    sizes={
        "attention.key_length": HEAD_DIM,
        "attention.key_length_swa": LOCAL_DIM,
        **{key: key for key in SAME},
        "attention.sliding_window": "sliding_window",
        "rope.freq_base_swa": LOCAL_BASE,
        "embedding_length_per_layer_input": EMBEDDINGS,
        SHARED_KEY: SHARED_LAYERS,
        CAP: CAP,
        "expert_count": OF_EXPERTS[0],
        "expert_used_count": OF_EXPERTS[1],
        "expert_feed_forward_length": OF_EXPERTS[2],
    },
    layers_with={WITH_VALUES: "attention.wv"},
    by_layer=(HEADS_KEY, WIDTH_KEY),
    window_period=6,
    defaults={
        **dict.fromkeys(SAME, 0),
        "rope.freq_base_swa": 10000.0,
        "embedding_length_per_layer_input": 0,
        SHARED_KEY: 0,
        CAP: 30.0,
        "expert_count": 0,
        "expert_used_count": 0,
        "expert_feed_forward_length": 0,
    },
    divisors=_divisors,
    read_divisors=_read_divisors,
    before_writing=_before_writing,
    after_reading=_after_reading,
)
