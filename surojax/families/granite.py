"""Granite-MoE: experts, and multipliers of embedding, attention scores, residual branches and logits."""

from typing import Any

from surojax.errors import ConfigError
from surojax.families import granite_gguf, rope_keys
from surojax.families.family import (
    EXPERT_TENSOR_NAMES,
    LAYER,
    LLAMA_DEFAULTS,
    SIZES,
    WITHOUT_WINDOW,
    ExpertFiles,
    ModelFamily,
    read_keys,
)
from surojax.families.olmoe import OF_TRAINING

MOE = "block_sparse_moe."
SMALLEST = 1e-15  # of attention_multiplier
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


def read_scores(given: dict[str, Any]) -> dict[str, Any]:
    """Reads attention_multiplier as the `model` field query_pre_attn_scalar, 1 / attention_multiplier^2.

    Raises ConfigError for a multiplier that this does not express: with another sign than +, or a square beyond floats.
    """
    multiplier = given["attention_multiplier"]
    if not SMALLEST <= multiplier <= 1 / SMALLEST:
        raise ConfigError(
            f"model_path: config.json: attention_multiplier: expected {SMALLEST:g} to {1 / SMALLEST:g}, got "
            f"{multiplier!r}; nothing else is computed for {given['model_type']}"
        )
    return {"query_pre_attn_scalar": multiplier**-2.0}


def write_scores(fields: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `read_scores`, to as many digits as come back the same."""
    return {"attention_multiplier": float(f"{fields['query_pre_attn_scalar'] ** -0.5:.15g}")}


def _read(given: dict[str, Any]) -> dict[str, Any]:
    return {"num_experts": given["num_local_experts"]} | read_scores(given) | read_keys(given)


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    return (
        {
            "num_local_experts": fields["num_experts"],
            "num_experts_per_tok": fields["num_experts_per_tok"],
            "attention_bias": False,
        }
        | write_scores(fields)
        | {name: fields[name] for name in MULTIPLIERS}
        | rope_keys.write_rope(fields)
    )


GRANITE_MOE = ModelFamily(
    model_type="granitemoe",
    transformers_class="GraniteMoeForCausalLM",
    defaults=LLAMA_DEFAULTS
    | OF_TRAINING
    | dict.fromkeys((*MULTIPLIERS, "attention_multiplier"), 1.0)
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    sizes=(*SIZES, *MULTIPLIERS, "num_experts_per_tok"),
    required=WITHOUT_WINDOW,
    options={"norm_topk_prob": True},  # a softmax of the chosen logits is that of all, divided by the chosen's sum
    read=_read,
    write=_write,
    tensors=EXPERT_TENSOR_NAMES | {"mlp.router": LAYER + MOE + "router.layer.weight"},
    spellings={
        MOE + "router.weight": MOE + "router.layer.weight",
        MOE + "experts.gate_up_proj": MOE + "input_linear.weight",
        MOE + "experts.down_proj": MOE + "output_linear.weight",
    },
    expert_files=ExpertFiles(
        MOE + "input_linear.weight", MOE + "output_linear.weight", only=True, module=MOE + "experts"
    ),
    gguf=granite_gguf.WITH_EXPERTS,
)
