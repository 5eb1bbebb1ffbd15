"""GLM-4 MoE (GLM-4.5): sigmoid routers with a bias for the choice, shared experts, first layers without experts."""

from typing import Any

from surojax.families import rope_keys, window_keys
from surojax.families.family import (
    LLAMA_DEFAULTS,
    NORM_AFTER_ATTENTION,
    SHARED_EXPERT_GGUF_NAMES,
    SHARED_EXPERT_TENSOR_NAMES,
    SIZES,
    WITHOUT_WINDOW,
    Gguf,
    ModelFamily,
)
from surojax.families.rope_keys import PARTIAL

OF_EXPERTS = (
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_shared_experts",
    "first_k_dense_replace",
    "n_group",
    "topk_group",
)


def _read(given: dict[str, Any]) -> dict[str, Any]:
    fields = {"num_experts": given["n_routed_experts"], "qk_norm": given["use_qk_norm"]}
    fields |= window_keys.read_everywhere(given)
    return fields | rope_keys.read_partial_rope(given)


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    own = {
        "head_dim": fields["head_dim"],
        "attention_bias": fields["attention_bias"],
        "use_qk_norm": fields["qk_norm"],
        "n_routed_experts": fields["num_experts"],
        PARTIAL: fields["rope_partial_rotary_factor"],
        "num_nextn_predict_layers": 0,
    }
    return own | {name: fields[name] for name in OF_EXPERTS} | rope_keys.write_rope(fields)


GLM4_MOE = ModelFamily(
    model_type="glm4_moe",
    transformers_class="Glm4MoeForCausalLM",
    defaults=LLAMA_DEFAULTS
    | {
        "vocab_size": 151552,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        PARTIAL: 0.5,
        "attention_bias": False,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "output_router_logits": False,
        "num_nextn_predict_layers": 1,
    },
    sizes=(*SIZES, *OF_EXPERTS, "attention_bias"),
    required=WITHOUT_WINDOW | {"attention_bias": (False, True)},
    options={"scoring_func": "sigmoid"},
    read=_read,
    write=_write,
    tensors=SHARED_EXPERT_TENSOR_NAMES,
    further_layers="num_nextn_predict_layers",
    gguf=Gguf(
        architecture="glm4moe",
        names=SHARED_EXPERT_GGUF_NAMES | NORM_AFTER_ATTENTION,
        sizes={
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "n_shared_experts",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        # 2: sigmoids.
        fixed={
            "expert_gating_func": 2,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
        },
        further_layers=True,
        unread={"nextn_predict_layers": 0},
        present={"attention_bias": "attention.bq", "use_qk_norm": "attention.q_norm"},
        partial_rotary=True,
    ),
)
