"""Qwen3.5 and Qwen3-Next: gated delta nets, and every few layers attention with a gate (models/kinds/gated_delta.py).

Qwen3.5 is dense or has experts in every layer; Qwen3-Next has experts, and its delta nets two matrices of projections.

Files of models with images have the language model's tensors under `model.language_model.`; `model.visual.` is the
image encoder, and `mtp.` predicts further tokens. Neither is trained.
"""

from typing import Any

from surojax.errors import ConfigError
from surojax.families import mixer_keys, qwen3_5_gguf, rope_keys
from surojax.families.family import (
    EXPERT_TENSOR_NAMES,
    LLAMA_DEFAULTS,
    SIZES,
    TENSOR_NAMES,
    ImageTextFamily,
    ModelFamily,
    in_safetensors,
)
from surojax.families.olmoe import OF_TRAINING
from surojax.families.qwen import WITHOUT_EXPERTS, layers_without_experts
from surojax.families.qwen3_5_gguf import GATED_SHARED, INTERVAL
from surojax.families.rope_keys import PARTIAL
from surojax.models.decoder_config import ATTENTION, DELTA
from surojax.models.kinds import targets
from surojax.models.kinds.experts import Experts
from surojax.models.kinds.gated_delta import GatedDelta
from surojax.models.kinds.gated_mlp import SwiGLU

OF_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
# Of experts, and of the one that every token uses.
EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
# Three positions of a token, which are equal in a text.
OF_IMAGES = ("mrope_section", "mrope_interleaved")


def _layer_types(given: dict[str, Any]) -> list[str]:
    """Reads each layer's type: `layer_types`, or attention every few layers."""
    types = given.get("layer_types")
    if types is None:
        every = given[INTERVAL]
        if every < 1:
            raise ConfigError(f"model_path: config.json: {INTERVAL}: expected 1 or more, got {every}; fetch it again")
        types = [DELTA if (l + 1) % every else ATTENTION for l in range(given["num_hidden_layers"])]
    return types


def _read(given: dict[str, Any]) -> dict[str, Any]:
    types = _layer_types(given)
    fields = {"layer_types": mixer_keys.read_layer_types(given, types, (ATTENTION, DELTA))}
    fields |= rope_keys.read_partial_rope(given, OF_IMAGES)
    return fields if DELTA in types else fields | OF_DELTA  # without such layers their sizes say nothing


def _read_next(given: dict[str, Any]) -> dict[str, Any]:
    fields = {"first_k_dense_replace": layers_without_experts(given)} | _read(given)
    return fields | {"linear_fused_projections": DELTA in _layer_types(given)}


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    own = {
        "head_dim": fields["head_dim"],
        "attention_bias": False,
        "layer_types": mixer_keys.types_of(fields),
        PARTIAL: fields[f"rope_{PARTIAL}"],
    }
    return own | {name: fields[name] for name in OF_DELTA} | rope_keys.write_rope(fields)


def _write_experts(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in EXPERT_SIZES} | _write(fields)


def _write_next(fields: dict[str, Any]) -> dict[str, Any]:
    dense = {"decoder_sparse_step": 1, WITHOUT_EXPERTS: list(range(fields["first_k_dense_replace"]))}
    return {"norm_topk_prob": fields["norm_topk_prob"]} | dense | _write_experts(fields)


DEFAULTS = (
    LLAMA_DEFAULTS
    | OF_DELTA
    | {
        "vocab_size": 248320,
        "num_attention_heads": 16,
        "head_dim": 256,
        PARTIAL: 0.25,
        INTERVAL: 4,
        "mtp_num_hidden_layers": 0,
        "mtp_use_dedicated_embeddings": False,
    }
)
DEFAULTS_OF_EXPERTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "router_aux_loss_coef": 0.001,
}
REQUIRED: dict[str, tuple] = {
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "output_gate_type": (
        "swish",
        "silu",
        None,
    ),  # the gate of delta nets in Qwen3.8; transformers computes nothing else
    "sliding_window": (None,),
}
OPTIONS: dict[str, Any] = {"qk_norm": True, "norm_plus_one": True, "attn_output_gate": True}
NAMES_OF_EXPERTS = EXPERT_TENSOR_NAMES | in_safetensors(Experts, *GATED_SHARED) | in_safetensors(GatedDelta)


QWEN3_5 = ModelFamily(
    model_type="qwen3_5_text",
    transformers_class="Qwen3_5ForCausalLM",
    classifier="Qwen3_5TextForSequenceClassification",
    defaults=DEFAULTS | {"intermediate_size": 12288, "num_key_value_heads": 4},
    sizes=(*SIZES, *OF_DELTA),
    required=REQUIRED,
    options=OPTIONS,
    read=_read,
    write=_write,
    tensors=TENSOR_NAMES | in_safetensors(GatedDelta),
    further_tensors="mtp.",
    gguf=qwen3_5_gguf.DENSE,
)
QWEN3_5_IMAGES = ImageTextFamily(model_type="qwen3_5", text_types=("qwen3_5_text",))
QWEN3_5_MOE = ModelFamily(
    model_type="qwen3_5_moe_text",
    transformers_class="Qwen3_5MoeForCausalLM",
    defaults=DEFAULTS
    | OF_TRAINING
    | DEFAULTS_OF_EXPERTS
    # There is no MLP of this width, which other classes would have.
    | {"intermediate_size": 0, "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8},
    sizes=(*(name for name in SIZES if name != "intermediate_size"), *OF_DELTA, *EXPERT_SIZES),
    required=REQUIRED | {"norm_topk_prob": (True,), "decoder_sparse_step": (1,)},
    options=OPTIONS | {"norm_topk_prob": True},
    read=_read,
    write=_write_experts,
    tensors=NAMES_OF_EXPERTS,
    further_tensors="mtp.",
    gguf=qwen3_5_gguf.WITH_EXPERTS,
)
QWEN3_5_MOE_IMAGES = ImageTextFamily(model_type="qwen3_5_moe", text_types=("qwen3_5_moe_text",))
QWEN3_NEXT = ModelFamily(
    model_type="qwen3_next",
    transformers_class="Qwen3NextForCausalLM",
    classifier="Qwen3NextForSequenceClassification",
    defaults=DEFAULTS
    | OF_TRAINING
    | DEFAULTS_OF_EXPERTS
    | {
        "vocab_size": 151936,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        WITHOUT_EXPERTS: None,
    },
    sizes=(*SIZES, *OF_DELTA, *EXPERT_SIZES, "norm_topk_prob"),
    required=REQUIRED | {"decoder_sparse_step": (1,)},
    options=OPTIONS,
    read=_read_next,
    write=_write_next,
    tensors=NAMES_OF_EXPERTS
    | {targets.WITHOUT_EXPERTS + ours: theirs for ours, theirs in in_safetensors(SwiGLU).items()},
    further_tensors="mtp.",
    gguf=qwen3_5_gguf.NEXT,
)
