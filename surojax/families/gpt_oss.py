"""gpt-oss: experts with biases, attention with sinks and biases, and a window in every other layer."""

from typing import Any

from surojax.families import rope_keys, window_keys
from surojax.families.family import (
    EXPERT_GGUF_NAMES,
    EXPERT_TENSOR_NAMES,
    EXPERTS,
    GGUF_LAYER,
    LAYER,
    NORM_AFTER_ATTENTION,
    SIZES,
    ExpertFiles,
    Gguf,
    ModelFamily,
)
from surojax.families.olmoe import OF_TRAINING

OPTIONS = {
    "attention_bias": True,
    "attention_out_bias": True,
    "attention_sinks": True,
    "expert_bias": True,
    "hidden_act": "clamped_swiglu",
    "norm_topk_prob": True,  # a softmax of the chosen logits is the softmax of all, divided by the sum of the chosen
}
SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
# In published files: other names of what num_experts_per_tok and rope_scaling say, which transformers does not read.
BESIDE = {"experts_per_token": None, "initial_context_length": None}


def _read(given: dict[str, Any]) -> dict[str, Any]:
    window = window_keys.need_window(given, window_keys.said_window(given))
    types = window_keys.said_layer_types(given, window)
    if types is None:
        types = window_keys.every_nth_full(given["num_hidden_layers"], 2)
    fields = window_keys.window_fields(given, window, types) | rope_keys.read_rope(given)
    return fields | {"num_experts": given["num_local_experts"]}


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    return (
        {
            "head_dim": fields["head_dim"],
            "attention_bias": True,
            "num_local_experts": fields["num_experts"],
            "num_experts_per_tok": fields["num_experts_per_tok"],
            "sliding_window": fields["sliding_window"]
            or 128,  # transformers makes a mask of it even if no layer has one
            "layer_types": window_keys.write_layer_types(fields),
        }
        | SWIGLU
        | rope_keys.write_rope(fields)
    )


GPT_OSS = ModelFamily(
    model_type="gpt_oss",
    transformers_class="GptOssForCausalLM",
    classifier="GptOssForSequenceClassification",
    defaults=OF_TRAINING
    | BESIDE
    | {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    sizes=(*SIZES, "num_experts_per_tok"),
    required={"attention_bias": (True,)} | {key: (value,) for key, value in SWIGLU.items()},
    options=OPTIONS,
    read=_read,
    write=_write,
    tensors=EXPERT_TENSOR_NAMES
    | {
        "attention.bo": LAYER + "self_attn.o_proj.bias",
        "attention.sinks": LAYER + "self_attn.sinks",
        "mlp.router": LAYER + "mlp.router.weight",
        "mlp.b_router": LAYER + "mlp.router.bias",
        "mlp.b_gate": LAYER + EXPERTS + "gate_proj.bias",
        "mlp.b_up": LAYER + EXPERTS + "up_proj.bias",
        "mlp.b_down": LAYER + EXPERTS + "down_proj.bias",
    },
    expert_files=ExpertFiles(only=True, transposed=True, interleaved=True),
    gguf=Gguf(
        architecture="gpt-oss",
        names=EXPERT_GGUF_NAMES
        | NORM_AFTER_ATTENTION
        | {
            "attention.bo": GGUF_LAYER + "attn_output.bias",
            "attention.sinks": GGUF_LAYER + "attn_sinks.weight",
            "mlp.b_router": GGUF_LAYER + "ffn_gate_inp.bias",
            "mlp.b_gate": GGUF_LAYER + "ffn_gate_exps.bias",
            "mlp.b_up": GGUF_LAYER + "ffn_up_exps.bias",
            "mlp.b_down": GGUF_LAYER + "ffn_down_exps.bias",
        },
        sizes={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        implied_rope={"truncate": False},  # llama.cpp rounds the bounds of YaRN's ramp all the same
    ),
)
