"""Latent attention and sigmoid or softmax routers: GLM-4.7-Flash, DeepSeek-V2 and DeepSeek-V3 (and Kimi K2's layers).

Three spellings of one architecture (models/kinds/latent_attention.py). transformers' DeepSeek-V2 never divides the
weights of the chosen experts by their sum, and always rotates neighbouring channels.
"""

from typing import Any

from surojax.errors import ConfigError
from surojax.families import deepseek_gguf, rope_keys, window_keys
from surojax.families.family import (
    LLAMA_DEFAULTS,
    SHARED_EXPERT_TENSOR_NAMES,
    SIZES,
    WITHOUT_WINDOW,
    ModelFamily,
    in_safetensors,
)
from surojax.models.decoder_config import LATENT
from surojax.models.kinds.latent_attention import LatentAttention
from surojax.models.kinds.self_attention import Attention

OF_HEADS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OF_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor", "n_shared_experts")
OF_ALL = (*(name for name in SIZES if name != "head_dim"), *OF_HEADS, *OF_EXPERTS, "attention_bias")
# Settings of the routers' training, and of how their class divides experts over GPUs.
OF_TRAINING: dict[str, Any] = {
    "output_router_logits": False,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "ep_size": 1,
    "qk_head_dim": None,
}
DENSE = "first_k_dense_replace"
BY_LAYER = "mlp_layer_types"
ALL_DIM = "mscale_all_dim"
REQUIRED = WITHOUT_WINDOW | {"attention_bias": (False, True), "moe_layer_freq": (1,)}


def refuse_key(key: str, expected: str, got: Any, change: str) -> None:
    """Raises the ConfigError about a key of config.json."""
    raise ConfigError(f"model_path: config.json: {key}: expected {expected}, got {got!r}; {change}")


def _read(given: dict[str, Any]) -> dict[str, Any]:
    """Reads the `model` fields that the families spell alike."""
    if given.get("head_dim") not in (None, given["qk_rope_head_dim"]):
        expected = f"qk_rope_head_dim={given['qk_rope_head_dim']}"
        refuse_key("head_dim", expected, given["head_dim"], f"remove it: {given['model_type']} has no other heads")
    return read_latent(given, rope_keys.read_rope(given))


def read_latent(given: dict[str, Any], rope_fields: dict[str, Any]) -> dict[str, Any]:
    """Reads the `model` fields of latent attention, with those of the rotary embedding but the factor of scores."""
    heads = given["num_attention_heads"]
    if given["num_key_value_heads"] not in (None, heads):
        refuse_key(
            "num_key_value_heads",
            f"num_attention_heads={heads}, since latents make keys and values of every head",
            given["num_key_value_heads"],
            "fetch it again",
        )
    if given["q_lora_rank"] == 0:
        refuse_key("q_lora_rank", "null, or more than 0", 0, "set it to null for queries of one matrix")
    fields = window_keys.read_everywhere(given) | rope_fields
    if scores := rope_keys.said(given).get(ALL_DIM):
        fields[f"rope_{ALL_DIM}"] = float(scores)
    return fields | {
        "num_experts": given["n_routed_experts"],
        "q_lora_rank": given["q_lora_rank"] or 0,
        "attention_out_bias": given["attention_bias"],
    }


def _read_glm(given: dict[str, Any]) -> dict[str, Any]:
    """Reads which layers have experts from `mlp_layer_types`, of which transformers' default is all but the first."""
    layers = given["num_hidden_layers"]
    types = given[BY_LAYER]
    if types is None:
        types = ["dense"] + ["sparse"] * (layers - 1)
    dense = types.count("dense")
    if types != ["dense"] * dense + ["sparse"] * (layers - dense):
        expected = f"'dense' for the first of {layers} layers and 'sparse' for the others"
        refuse_key(BY_LAYER, expected, types, "layers without experts between others are not computed")
    if given[DENSE] not in (None, dense):
        expected = f"{dense}, which follows from {BY_LAYER}, or from its default"
        refuse_key(DENSE, expected, given[DENSE], f"transformers does not read it: correct {BY_LAYER}")
    return _read(given) | {DENSE: dense} | _groups(given)


def _groups(given: dict[str, Any]) -> dict[str, Any]:
    for key in ("n_group", "topk_group"):
        if given[key] is None:
            refuse_key(key, "a number", None, "set it to 1 for experts in one group")
    return {"n_group": given["n_group"], "topk_group": given["topk_group"]}


def _read_v2(given: dict[str, Any]) -> dict[str, Any]:
    """Reads the groups of experts, which count with one of two methods."""
    method = given["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        refuse_key("topk_method", "'greedy' or 'group_limited_greedy'", method, "transformers computes no other")
    if given["hidden_size"] % given["num_attention_heads"]:
        expected = f"a multiple of num_attention_heads={given['num_attention_heads']}, as transformers' class asks for"
        refuse_key("hidden_size", expected, given["hidden_size"], "fetch it again")
    groups = {} if method == "greedy" else _groups(given)
    return _read(given) | groups | {"num_experts_per_tok": given["num_experts_per_tok"] or 0}


def _read_v3(given: dict[str, Any]) -> dict[str, Any]:
    return _read(given) | _groups(given)


def write(fields: dict[str, Any]) -> dict[str, Any]:
    """Writes the keys that the families spell alike."""
    rope = rope_keys.write_rope(fields)
    if fields[f"rope_{ALL_DIM}"] and rope["rope_scaling"]:
        rope["rope_scaling"][ALL_DIM] = fields[f"rope_{ALL_DIM}"]
    own = {
        "q_lora_rank": fields["q_lora_rank"] or None,
        "n_routed_experts": fields["num_experts"],
        "attention_bias": fields["attention_bias"],
        "n_group": fields["n_group"],
        "topk_group": fields["topk_group"],
    }
    return own | {name: fields[name] for name in (*OF_HEADS, *OF_EXPERTS)} | rope


def _write_sigmoid(fields: dict[str, Any]) -> dict[str, Any]:
    own = {name: fields[name] for name in ("norm_topk_prob", "rope_interleave", DENSE)}
    return write(fields) | own | {"num_nextn_predict_layers": 0}


def _write_glm(fields: dict[str, Any]) -> dict[str, Any]:
    dense, layers = fields[DENSE], fields["num_hidden_layers"]
    return _write_sigmoid(fields) | {BY_LAYER: ["dense"] * dense + ["sparse"] * (layers - dense)}


def _write_v2(fields: dict[str, Any]) -> dict[str, Any]:
    method = "greedy" if fields["n_group"] == 1 else "group_limited_greedy"
    return write(fields) | {"topk_method": method, DENSE: fields[DENSE], "norm_topk_prob": False}


NAMES = {
    ours: theirs for ours, theirs in SHARED_EXPERT_TENSOR_NAMES.items() if not ours.startswith(f"{Attention.name}.")
}
TENSORS = NAMES | in_safetensors(LatentAttention)
OF_SIGMOID: dict[str, tuple] = {"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)}

GLM4_MOE_LITE = ModelFamily(
    model_type="glm4_moe_lite",
    transformers_class="Glm4MoeLiteForCausalLM",
    defaults={key: value for key, value in LLAMA_DEFAULTS.items() if key != "head_dim"}
    | OF_TRAINING
    | {
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "rms_norm_eps": 1e-5,
        "head_dim": None,
        "n_shared_experts": 1,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.8,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "rope_interleave": True,
        "attention_bias": False,
        BY_LAYER: None,
        DENSE: None,
        "num_nextn_predict_layers": 1,
    },
    sizes=(*OF_ALL, "norm_topk_prob", "rope_interleave"),
    required=REQUIRED | OF_SIGMOID,
    options={"layer_types": LATENT, "scoring_func": "sigmoid"},
    read=_read_glm,
    write=_write_glm,
    tensors=TENSORS,
    gguf=deepseek_gguf.LATENT,
    further_layers="num_nextn_predict_layers",
)
DEEPSEEK_V2 = ModelFamily(
    model_type="deepseek_v2",
    transformers_class="DeepseekV2ForCausalLM",
    classifier="DeepseekV2ForSequenceClassification",
    defaults=LLAMA_DEFAULTS
    | OF_TRAINING
    | {
        "vocab_size": 102400,
        "moe_intermediate_size": 1407,
        DENSE: 0,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "num_experts_per_tok": None,
        "attention_bias": False,
    },
    sizes=(*(name for name in OF_ALL if name != "num_experts_per_tok"), DENSE),  # it has no default
    required=REQUIRED | {"scoring_func": ("softmax", None), "norm_topk_prob": (False, None)},
    options={"layer_types": LATENT},
    read=_read_v2,
    write=_write_v2,
    tensors=TENSORS,
    gguf=deepseek_gguf.LATENT,
)
DEEPSEEK_V3 = ModelFamily(
    model_type="deepseek_v3",
    transformers_class="DeepseekV3ForCausalLM",
    classifier="DeepseekV3ForSequenceClassification",
    defaults=LLAMA_DEFAULTS
    | OF_TRAINING
    | {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        DENSE: 3,
        "norm_topk_prob": True,
        "rope_interleave": True,
        "attention_bias": False,
        "num_nextn_predict_layers": 1,
    },
    sizes=(*OF_ALL, DENSE, "norm_topk_prob", "rope_interleave"),
    required=REQUIRED | OF_SIGMOID,
    options={"layer_types": LATENT, "scoring_func": "sigmoid"},
    read=_read_v3,
    write=_write_sigmoid,
    tensors=TENSORS,
    gguf=deepseek_gguf.LATENT,
    further_layers="num_nextn_predict_layers",
)
