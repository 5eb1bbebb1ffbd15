"""Mixtral: Mistral's layers with experts, whose tensors have names of their own."""

from typing import Any

from surojax.families import rope_keys
from surojax.families.family import (
    BY_EXPERT,
    EXPERT_TENSOR_NAMES,
    EXPERTS,
    LAYER,
    LLAMA_DEFAULTS,
    SIZES,
    ModelFamily,
    read_keys,
)
from surojax.families.olmoe import OF_TRAINING

MODULE = "block_sparse_moe."
MOE = LAYER + MODULE


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    experts = {"num_local_experts": fields["num_experts"], "num_experts_per_tok": fields["num_experts_per_tok"]}
    widths = {"intermediate_size": fields["moe_intermediate_size"] or fields["intermediate_size"]}
    window = {"sliding_window": fields["sliding_window"] or None}
    return {"head_dim": fields["head_dim"]} | experts | widths | window | rope_keys.write_rope(fields)


def _read(given: dict[str, Any]) -> dict[str, Any]:
    return {"num_experts": given["num_local_experts"]} | read_keys(given)


MIXTRAL = ModelFamily(
    model_type="mixtral",
    transformers_class="MixtralForCausalLM",
    classifier="MixtralForSequenceClassification",
    defaults=LLAMA_DEFAULTS
    | OF_TRAINING
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    sizes=(*SIZES, "num_experts_per_tok"),
    required={"router_jitter_noise": (0.0,)},
    options={"norm_topk_prob": True},
    read=_read,
    write=_write,
    tensors=EXPERT_TENSOR_NAMES
    | {
        "mlp.router": MOE + "gate.weight",
        "mlp.w_gate": MOE + "experts.w1.weight",
        "mlp.w_up": MOE + "experts.w3.weight",
        "mlp.w_down": MOE + "experts.w2.weight",
    },
    # transformers 5 takes either name of the module, and all experts together in either.
    spellings={
        **{name.replace("mlp.", MODULE): name for name in (BY_EXPERT.gate_up, BY_EXPERT.down)},
        **{f"{EXPERTS}w{i}.weight": f"{MODULE}experts.w{i}.weight" for i in (1, 2, 3)},
    },
)
