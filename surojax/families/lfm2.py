"""LFM2 (Liquid AI): layers of short convolutions, and some of attention; LFM2-MoE has sigmoid routers besides.

transformers adds 1e-6 to the sum that LFM2-MoE's chosen weights are divided by, which is not done here.
"""

from typing import Any

from surojax.errors import ConfigError
from surojax.families import mixer_keys, rope_keys
from surojax.families.family import (
    GGUF_NAMES,
    LAYER,
    LLAMA_DEFAULTS,
    SHARED_EXPERT_GGUF_NAMES,
    SHARED_EXPERT_TENSOR_NAMES,
    TENSOR_NAMES,
    WITHOUT_WINDOW,
    ExpertFiles,
    Gguf,
    ModelFamily,
    in_gguf,
    in_safetensors,
)
from surojax.models.decoder_config import ATTENTION
from surojax.models.kinds.short_conv import TAPS, ShortConv
from surojax.models.kinds.targets import WITHOUT_EXPERTS

CONV = "conv"
FORWARD = "feed_forward."
# Keys of the sizes of one MLP, which the class computes from them, and of no convolution but that of ShortConv.
OF_WIDTH = ("block_multiple_of", "block_ffn_dim_multiplier", "block_auto_adjust_ff_dim")
OF_CONV: dict[str, tuple] = {"conv_bias": (False,), "conv_L_cache": (TAPS,)}
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "initializer_range",
)
DEFAULTS: dict[str, Any] = (LLAMA_DEFAULTS | {"vocab_size": 65536, "num_key_value_heads": 8, "rope_theta": 1e6}) | {
    "norm_eps": 1e-5,
    "rms_norm_eps": None,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": TAPS,
    "theta": None,
}
OF_EXPERTS = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor")


def _layer_types(given: dict[str, Any]) -> str:
    """Reads which layers have attention: `layer_types`, or `full_attn_idxs`. Raises ConfigError for other layers."""
    layers = given["num_hidden_layers"]
    types = given.get("layer_types")
    if types is None:
        attending = given.get("full_attn_idxs")
        attending = range(layers) if attending is None else attending
        types = [ATTENTION if l in attending else CONV for l in range(layers)]
    return mixer_keys.read_layer_types(given, types, (ATTENTION, CONV))


def _read(given: dict[str, Any]) -> dict[str, Any]:
    if given["rms_norm_eps"] not in (None, given["norm_eps"]):
        raise ConfigError(
            f"model_path: config.json: rms_norm_eps: expected norm_eps={given['norm_eps']!r}, which transformers reads "
            f"in its place, got {given['rms_norm_eps']!r}; remove it"
        )
    fields = {"rms_norm_eps": float(given["norm_eps"]), "layer_types": _layer_types(given)}
    own = given.get("tie_embedding")
    tied = given["tie_word_embeddings"] if own is None else own
    rope = rope_keys.read_rope(given)
    if given["theta"] not in (None, rope["rope_theta"]):
        raise ConfigError(
            f"model_path: config.json: theta: expected rope_theta={rope['rope_theta']!r}, which transformers 5 reads "
            f"in its place, got {given['theta']!r}; set rope_theta to the base that the model was trained with"
        )
    return fields | {"tie_word_embeddings": tied} | rope


def _read_dense(given: dict[str, Any]) -> dict[str, Any]:
    width = given["intermediate_size"] if given["block_ff_dim"] is None else given["block_ff_dim"]
    if given["block_auto_adjust_ff_dim"]:
        width = int(2 * width / 3)
        if given["block_ffn_dim_multiplier"] is not None:
            width = int(given["block_ffn_dim_multiplier"] * width)
            multiple = given["block_multiple_of"]
            width = multiple * -(-width // multiple)
    return _read(given) | {"intermediate_size": width}


def _read_experts(given: dict[str, Any]) -> dict[str, Any]:
    if not given["use_expert_bias"]:
        raise ConfigError(
            "model_path: config.json: use_expert_bias: expected true, got false; sigmoid routers without a bias for "
            "the choice are not computed"
        )
    return _read(given) | {"first_k_dense_replace": given["num_dense_layers"]}


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    own = {
        "head_dim": fields["head_dim"],
        "norm_eps": fields["rms_norm_eps"],
        "layer_types": mixer_keys.types_of(fields),
        "conv_bias": False,
        "conv_L_cache": TAPS,
        "tie_embedding": fields["tie_word_embeddings"],
    }
    return own | rope_keys.write_rope(fields)


def _write_dense(fields: dict[str, Any]) -> dict[str, Any]:
    attending = [l for l, name in enumerate(mixer_keys.types_of(fields)) if name == ATTENTION]
    return _write(fields) | {
        "full_attn_idxs": attending,
        "block_ff_dim": fields["intermediate_size"],
        "block_auto_adjust_ff_dim": False,
    }


def _write_experts(fields: dict[str, Any]) -> dict[str, Any]:
    own = {name: fields[name] for name in OF_EXPERTS}
    return _write(fields) | own | {"num_dense_layers": fields["first_k_dense_replace"], "use_expert_bias": True}


CONVOLUTION = in_safetensors(ShortConv)
OWN_NAMES = {
    "norm": "model.embedding_norm.weight",
    "attention_norm": LAYER + "operator_norm.weight",
    "mlp_norm": LAYER + "ffn_norm.weight",
    "attention.wo": LAYER + "self_attn.out_proj.weight",
    "attention.q_norm": LAYER + "self_attn.q_layernorm.weight",
    "attention.k_norm": LAYER + "self_attn.k_layernorm.weight",
}
MATRICES = {"w_gate": "w1.weight", "w_up": "w3.weight", "w_down": "w2.weight"}
DENSE_NAMES = {f"mlp.{ours}": LAYER + FORWARD + theirs for ours, theirs in MATRICES.items()}
IN_GGUF = in_gguf(ShortConv) | {"norm": "token_embd_norm.weight"}
GGUF_SIZES = {"shortconv.l_cache": "conv_L_cache", "attention.layer_norm_rms_epsilon": "norm_eps"}
BY_LAYER: dict[str, Any] = {
    "by_layer": ("attention.head_count_kv",),
    "before_writing": lambda config: mixer_keys.heads_of_layers(config, (ATTENTION,)),
    "after_reading": lambda config: mixer_keys.types_of_heads(config, CONV),
}

LFM2 = ModelFamily(
    model_type="lfm2",
    transformers_class="Lfm2ForCausalLM",
    defaults=DEFAULTS
    | {
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "block_ff_dim": None,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": None,
    },
    sizes=SIZES,
    required=WITHOUT_WINDOW | OF_CONV,
    options={"qk_norm": True},
    read=_read_dense,
    write=_write_dense,
    tensors=TENSOR_NAMES | CONVOLUTION | OWN_NAMES | DENSE_NAMES,
    canonical=TENSOR_NAMES | CONVOLUTION,
    gguf=Gguf(
        names=GGUF_NAMES | IN_GGUF,
        sizes=GGUF_SIZES,
        implied={"block_auto_adjust_ff_dim": False},
        **BY_LAYER,
    ),
)
LFM2_MOE = ModelFamily(
    model_type="lfm2_moe",
    transformers_class="Lfm2MoeForCausalLM",
    defaults=DEFAULTS
    | {
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
        "output_router_logits": False,
    },
    sizes=(*SIZES, "intermediate_size", *OF_EXPERTS),
    required=WITHOUT_WINDOW | OF_CONV,
    options={"qk_norm": True, "scoring_func": "sigmoid"},
    read=_read_experts,
    write=_write_experts,
    tensors=SHARED_EXPERT_TENSOR_NAMES
    | CONVOLUTION
    | OWN_NAMES
    | {WITHOUT_EXPERTS + ours: theirs for ours, theirs in DENSE_NAMES.items()}
    | {f"mlp.{ours}": f"{LAYER}{FORWARD}experts.{theirs}" for ours, theirs in MATRICES.items()}
    | {"mlp.router": LAYER + FORWARD + "gate.weight", "mlp.b_choice": LAYER + FORWARD + "expert_bias"},
    canonical=SHARED_EXPERT_TENSOR_NAMES | CONVOLUTION,
    expert_files=ExpertFiles(
        FORWARD + "experts.gate_up_proj", FORWARD + "experts.down_proj", module=FORWARD + "experts"
    ),
    gguf=Gguf(
        architecture="lfm2moe",
        names=SHARED_EXPERT_GGUF_NAMES | IN_GGUF,
        sizes=GGUF_SIZES
        | {
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers",
        },
        fixed={"expert_gating_func": 2},  # sigmoids
        implied={"norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True},
        **BY_LAYER,
    ),
)
