"""Hugging Face's models: from a `config.json` to the `model` fields of a config, and from its names of tensors to ours.

A key of `config.json` that would change the arithmetic and is not known here is refused with its name, so a model is
never computed with less than its config says. Keys may be absent if they have the value of transformers' config class;
`DEFAULTS` has those of each family. Both spellings of the rotary embedding are read: `rope_parameters` (transformers 5)
and `rope_theta` with `rope_scaling` (before).
"""

import json
from pathlib import Path
from typing import Any

from surojax.errors import ConfigError
from surojax.models.operations import ROPE_USES

# The values that transformers' config classes give to keys that config.json leaves out.
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as query heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "sliding_window": None,
}
MISTRAL = LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096}
QWEN2 = LLAMA | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "sliding_window": 4096}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN2 | {"head_dim": 128},
}
# The `model` fields that a family implies.
IMPLIED: dict[str, dict[str, Any]] = {"qwen2": {"attention_bias": True}, "qwen3": {"qk_norm": True}}
# Keys that must have one of these values, since nothing else is computed here.
REQUIRED: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1,),
}
# Keys that do not change the arithmetic, or that are read for another key.
OTHERS = frozenset(
    "architectures model_type torch_dtype dtype transformers_version use_cache max_position_embeddings _name_or_path "
    "bos_token_id eos_token_id pad_token_id rope_parameters rope_scaling use_sliding_window max_window_layers "
    "layer_types output_attentions output_hidden_states return_dict chunk_size_feed_forward is_encoder_decoder "
    "id2label label2id problem_type quantization_config".split()
)
SIZES = tuple(name for name in LLAMA if name not in ("rope_theta", "sliding_window"))

# Our names of tensors, and theirs; `{l}` is the number of the layer.
LAYER = "model.layers.{l}."
NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": LAYER + "input_layernorm.weight",
    "mlp_norm": LAYER + "post_attention_layernorm.weight",
    "attention.wq": LAYER + "self_attn.q_proj.weight",
    "attention.wk": LAYER + "self_attn.k_proj.weight",
    "attention.wv": LAYER + "self_attn.v_proj.weight",
    "attention.wo": LAYER + "self_attn.o_proj.weight",
    "attention.bq": LAYER + "self_attn.q_proj.bias",
    "attention.bk": LAYER + "self_attn.k_proj.bias",
    "attention.bv": LAYER + "self_attn.v_proj.bias",
    "attention.q_norm": LAYER + "self_attn.q_norm.weight",
    "attention.k_norm": LAYER + "self_attn.k_norm.weight",
    "mlp.w_gate": LAYER + "mlp.gate_proj.weight",
    "mlp.w_up": LAYER + "mlp.up_proj.weight",
    "mlp.w_down": LAYER + "mlp.down_proj.weight",
}


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of a model's folder. Raises ConfigError if there is none, or it cannot be read."""
    file = Path(folder).expanduser() / "config.json"
    try:
        found = json.loads(file.read_text())
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
    """The `model` fields of a config.json. Raises ConfigError for a family, a key or a value that is not computed."""
    family = config.get("model_type")
    if family not in DEFAULTS:
        raise ConfigError(
            f"model_path: expected model_type {', '.join(DEFAULTS)}, got {family!r}; other architectures are not known"
        )
    known = {*DEFAULTS[family], *REQUIRED, *OTHERS}
    if unknown := sorted(config.keys() - known):
        raise ConfigError(
            f"model_path: config.json has {', '.join(unknown)}, which may change what the model computes and is not "
            f"known for {family}"
        )
    for key, allowed in REQUIRED.items():
        if key in config and config[key] not in allowed:
            raise ConfigError(f"model_path: config.json: {key}: expected {allowed[0]!r}, got {config[key]!r}")
    block_size(config)
    given = DEFAULTS[family] | config
    found = {name: given[name] for name in SIZES}
    found["num_key_value_heads"] = given["num_key_value_heads"] or given["num_attention_heads"]
    found["head_dim"] = given["head_dim"] or 0
    return found | _rope(given) | _window(family, given) | IMPLIED.get(family, {}) | {"model_type": "llama"}


def _rope(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of the rotary embedding."""
    rope = dict(given.get("rope_parameters") or given.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", given["rope_theta"])
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    kind = "none" if kind in ("default", None) else kind
    if kind not in ROPE_USES:
        expected = ", ".join(("default", *(name for name in ROPE_USES if name != "none")))
        raise ConfigError(f"model_path: config.json: rope_type: expected {expected}, got {kind!r}")
    if rope.pop("partial_rotary_factor", 1) != 1 or rope.keys() - set(ROPE_USES[kind]):
        raise ConfigError(f"model_path: config.json: rope_type {kind}: expected {ROPE_USES[kind]}, got {sorted(rope)}")
    found = {"rope_theta": float(theta), "rope_scaling": kind}
    if kind == "llama3":
        rope.setdefault("original_max_position_embeddings", given.get("max_position_embeddings"))
    return found | {f"rope_{name}": rope[name] for name in ROPE_USES[kind]}


def _window(family: str, given: dict[str, Any]) -> dict[str, int]:
    """The fields of the sliding window."""
    window = given["sliding_window"]
    if family in ("qwen2", "qwen3") and not given.get("use_sliding_window", False):
        window = None
    layers = given["num_hidden_layers"]
    types = given.get("layer_types")
    if types is None and window and family in ("qwen2", "qwen3"):
        first = given.get("max_window_layers", 28)
        types = ["full_attention"] * min(first, layers) + ["sliding_attention"] * (layers - first)
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


def block_size(config: dict[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the blocks of a float8 matrix that have one scale; None if no weights are quantised.

    Raises ConfigError for quantised weights of another kind.
    """
    found = config.get("quantization_config")
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found
    block = found.get("weight_block_size") if method == "fp8" else None
    if isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block):
        return block[0], block[1]
    got = f"{method!r} without it" if method == "fp8" else repr(method)
    raise ConfigError(
        "model_path: config.json: quantization_config: expected none, or quant_method 'fp8' with weight_block_size, "
        f"got {got}; fetch the model before it was quantised"
    )
