"""Granite in GGUF files, of which llama.cpp has three architectures with the same multipliers.

Files of models with Mamba2 are `granitehybrid`; those with attention alone are `granite`, or `granitemoe` with experts,
beside which Granite-4 has an MLP. The two matrices that are one in Granite-4's own files are apart. Queries and keys
are not rotated if `rope.scaling.finetuned` is false, but for `granitemoe`, in which llama.cpp always rotates them.
"""

from typing import Any

import numpy as np

from surojax.errors import ConfigError
from surojax.families import mamba_gguf, mamba_keys, mixer_keys
from surojax.families.family import EXPERT_GGUF_NAMES, GGUF_LAYER, GGUF_NAMES, Gguf, GgufParts

MOE, HYBRID = "granitemoe", "granitemoehybrid"  # values of model_type
OF_MAMBA = {x: x for x in ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")}
POSITIONS, SHARED, EXPERTS = "position_embedding_type", "shared_intermediate_size", "num_local_experts"
ATTENTION, MAMBA = "attention", "mamba"  # in layer_types
ROTATES = "rope_finetuned"  # no key of config.json


def _before_writing(config: dict[str, Any]) -> dict[str, Any]:
    """Adds what files say in place of keys of config.json."""
    config = config | {ROTATES: None if config.get(POSITIONS, "rope") == "rope" else False}
    if config["model_type"] == MOE:
        return config | {SHARED: None}
    if not config[EXPERTS]:
        config |= {"intermediate_size": config[SHARED], SHARED: None, EXPERTS: None, "num_experts_per_tok": None}
    if MAMBA not in config["layer_types"]:
        return config
    return mamba_gguf.before_writing(mixer_keys.heads_of_layers(config, (ATTENTION,)), OF_MAMBA)


def _after_reading(config: dict[str, Any]) -> dict[str, Any]:
    """Adds what config.json says in place of keys of files. Raises ConfigError if llama.cpp computes otherwise."""
    rotates = bool(config[ROTATES])
    config = {key: value for key, value in config.items() if key != ROTATES}
    has_experts, has_mamba = bool(config.get(EXPERTS)), mamba_gguf.INNER in config
    if has_experts and not has_mamba:
        if not rotates:
            raise ConfigError(
                "model_path: rope.scaling.finetuned: expected true for granitemoe, whose queries and keys llama.cpp "
                "rotates in any case, got false; fetch the model as safetensors"
            )
        if not config[SHARED]:
            return {key: value for key, value in config.items() if key != SHARED} | {"model_type": MOE}
    if not has_experts:
        config |= {SHARED: config["intermediate_size"], EXPERTS: 0, "num_experts_per_tok": 0}
    config |= {"model_type": HYBRID, POSITIONS: "rope" if rotates else "nope"}
    if not has_mamba:
        return config | {"layer_types": [ATTENTION] * config["num_hidden_layers"]}
    expand = {"mamba_expand": config[mamba_gguf.INNER] // config["hidden_size"]}
    return mixer_keys.types_of_heads(mamba_gguf.after_reading(config, OF_MAMBA), MAMBA, ATTENTION) | expand


def _in_two(whole: str, *theirs: str) -> dict[str, GgufParts]:
    """How files have the matrix of gate and up, by our name of it."""
    return {
        whole: GgufParts(
            names=tuple(GGUF_LAYER + name for name in theirs),
            shape=lambda config: (2 * config[SHARED], config["hidden_size"]),
            shapes=lambda config: [(config[SHARED], config["hidden_size"])] * 2,
            divide=lambda x, config: np.split(x, 2),
            join=lambda parts, config: np.concatenate(parts),
        )
    }


MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "rope.scaling.finetuned": ROTATES,
}
SIZES_OF_EXPERTS = {
    "expert_count": EXPERTS,
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_feed_forward_length": SHARED,
}
JOINED_NAMES = {
    "mlp.w_in": GGUF_LAYER + "ffn_gate_up.weight",  # a name for `parts`: files have two tensors
    "mlp.w_out": GGUF_LAYER + "ffn_down.weight",
}
SHARED_NAMES = {
    "mlp.shared.w_in": GGUF_LAYER + "ffn_gate_up_shexp.weight",  # likewise
    "mlp.shared.w_out": GGUF_LAYER + "ffn_down_shexp.weight",
}
WITHOUT_MLP = {name: theirs for name, theirs in GGUF_NAMES.items() if not name.startswith("mlp.")}
OF_JOINED = _in_two("mlp.w_in", "ffn_gate.weight", "ffn_up.weight")
OF_SHARED = _in_two("mlp.shared.w_in", "ffn_gate_shexp.weight", "ffn_up_shexp.weight")
WITHOUT_EXPERTS = {name: 0 for name in SIZES_OF_EXPERTS}
ALWAYS: dict[str, Any] = {"neighbours": True, "before_writing": _before_writing, "after_reading": _after_reading}
ROTATED = {"rope.scaling.finetuned": True}

DENSE = Gguf(
    architecture="granite",
    describes=lambda config: MAMBA not in config["layer_types"] and not config[EXPERTS],
    names=WITHOUT_MLP | JOINED_NAMES,
    sizes=MULTIPLIERS,
    defaults=ROTATED,
    parts=OF_JOINED,
    **ALWAYS,
)
WITH_EXPERTS = Gguf(
    architecture="granitemoe",
    describes=lambda config: MAMBA not in config.get("layer_types", ()),
    names=EXPERT_GGUF_NAMES | SHARED_NAMES,
    sizes=MULTIPLIERS | SIZES_OF_EXPERTS,
    defaults=ROTATED | {"expert_shared_feed_forward_length": 0},
    parts=OF_SHARED,
    **ALWAYS,
)
WITH_MAMBA = Gguf(
    architecture="granitehybrid",
    describes=lambda config: MAMBA in config["layer_types"],
    names=EXPERT_GGUF_NAMES | JOINED_NAMES | SHARED_NAMES | mamba_gguf.NAMES,
    sizes=MULTIPLIERS | SIZES_OF_EXPERTS | mamba_gguf.sizes(OF_MAMBA),
    defaults=ROTATED | WITHOUT_EXPERTS,
    implied={mamba_keys.LIMITS: mamba_keys.UNLIMITED, "mamba_conv_bias": True},
    by_layer=("attention.head_count_kv",),
    transforms=mamba_gguf.TRANSFORMS,
    parts=OF_JOINED | OF_SHARED | mamba_gguf.reshaped(OF_MAMBA),
    **ALWAYS,
)
