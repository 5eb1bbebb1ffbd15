"""OLMoE: experts in every layer, and norms of queries and keys over all heads together."""

from typing import Any

from surojax.errors import ConfigError
from surojax.families.family import (
    EXPERT_GGUF_NAMES,
    EXPERT_GGUF_SIZES,
    EXPERT_TENSOR_NAMES,
    LLAMA_DEFAULTS,
    SIZES,
    WITHOUT_WINDOW,
    Gguf,
    ModelFamily,
    read_keys,
)
from surojax.families.rope_keys import write_rope

# Keys of config.json that are `model` fields, in the families with experts.
OF_EXPERTS = ("num_experts", "num_experts_per_tok", "norm_topk_prob")
# Losses of the routers are a matter of training: `router_aux_loss_coef` of the config says them here.
OF_TRAINING = {"output_router_logits": False, "router_aux_loss_coef": 0.01}


def _read(given: dict[str, Any]) -> dict[str, Any]:
    """Reads the rotary embedding. Raises ConfigError for a head_dim, which transformers' attention does not read."""
    channels = given["hidden_size"] // given["num_attention_heads"]
    if given["head_dim"] not in (None, channels):
        raise ConfigError(
            f"model_path: config.json: head_dim: expected {channels}, which is hidden_size / num_attention_heads, got "
            f"{given['head_dim']!r}, which transformers does not compute for olmoe; remove it"
        )
    return read_keys(given)


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    return (
        {name: fields[name] for name in OF_EXPERTS} | {"clip_qkv": None, "attention_bias": False} | write_rope(fields)
    )


OLMOE = ModelFamily(
    model_type="olmoe",
    transformers_class="OlmoeForCausalLM",
    defaults=LLAMA_DEFAULTS
    | OF_TRAINING
    | {
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    sizes=(*SIZES, *OF_EXPERTS),
    required=WITHOUT_WINDOW | {"clip_qkv": (None,)},
    options={"qk_norm_whole": True},
    read=_read,
    write=_write,
    tensors=EXPERT_TENSOR_NAMES,
    gguf=Gguf(names=EXPERT_GGUF_NAMES, sizes=EXPERT_GGUF_SIZES, implied={"norm_topk_prob": False}),
)
