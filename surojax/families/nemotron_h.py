"""Nemotron-H (Nemotron-3): layers of one purpose each, Mamba2, attention without rotary embedding, an MLP or experts.

MLPs and experts have no gate. transformers computes time steps of at least time_step_min, whatever time_step_limit
says, and the MLP that every token uses by moe_shared_expert_intermediate_size, whatever n_shared_experts says.
"""

from typing import Any

from surojax.families import mamba_keys, mixer_keys, nemotron_gguf, rope_keys
from surojax.families.family import (
    LLAMA_DEFAULTS,
    SHARED_EXPERT_TENSOR_NAMES,
    ExpertFiles,
    ModelFamily,
    in_safetensors,
)
from surojax.families.mamba_keys import UNLIMITED, need_key
from surojax.families.nemotron_gguf import OF_MAMBA
from surojax.models.decoder_config import ATTENTION, EXPERTS, MAMBA, MLP
from surojax.models.kinds.mamba2 import Mamba2
from surojax.models.kinds.self_attention import Attention
from surojax.models.kinds.targets import WITHOUT_EXPERTS
from surojax.models.operations import RELU2

# Layers in hybrid_override_pattern, and by their names in layers_block_type.
LETTERS = {"M": MAMBA, "E": EXPERTS, "*": ATTENTION, "-": MLP}
TYPES = {"mamba": MAMBA, "linear_attention": MAMBA, "attention": ATTENTION, "full_attention": ATTENTION}
TYPES |= {"moe": EXPERTS, "mlp": MLP}
WORDS = {MAMBA: "linear_attention", ATTENTION: "full_attention", EXPERTS: "moe", MLP: "mlp"}
DT_MIN = 0.001  # of the class
PATTERN, BLOCKS = "hybrid_override_pattern", "layers_block_type"
OF_EXPERTS = {
    "num_experts": "n_routed_experts",
    "moe_intermediate_size": "moe_intermediate_size",
    "moe_shared_intermediate_size": "moe_shared_expert_intermediate_size",
    "num_experts_per_tok": "num_experts_per_tok",
    "n_group": "n_group",
    "topk_group": "topk_group",
}
OF_ROUTERS = ("norm_topk_prob", "routed_scaling_factor")


def _types(given: dict[str, Any]) -> list[str]:
    """Reads each layer's purpose: layers_block_type, or layer_types, or hybrid_override_pattern."""
    types = given[BLOCKS] if given.get("layer_types") is None else given["layer_types"]
    if types is not None:
        for name in types:
            need_key(name in TYPES, BLOCKS, f"{', '.join(TYPES)} of each layer", name, "nothing else is computed here")
        return [TYPES[name] for name in types]
    pattern = given[PATTERN]
    need_key(isinstance(pattern, str) and set(pattern) <= {*LETTERS}, PATTERN, f"letters {' '.join(LETTERS)}", pattern)
    return [LETTERS[letter] for letter in pattern]


def _read(given: dict[str, Any]) -> dict[str, Any]:
    types = _types(given)
    need_key(len(types) > 0, BLOCKS, "a layer or more", types)
    rope = rope_keys.said(given)
    kind = rope.get("rope_type", rope.get("type", "default"))
    need_key(kind == "default", "rope_type", "default, since no layer has a rotary embedding", kind, "remove it")
    eps = given["layer_norm_epsilon"]
    need_key(type(eps) in (int, float) and eps > 0, "layer_norm_epsilon", "a number more than 0", eps)
    fields: dict[str, Any] = {
        "num_hidden_layers": len(types),
        "layer_types": mixer_keys.as_field(types),
        "rms_norm_eps": float(eps),
    }
    if MAMBA in types:
        bias, least = given["use_conv_bias"], given["time_step_min"]
        need_key(type(least) in (int, float) and least > 0, "time_step_min", "a number more than 0", least)
        mamba_keys.read_sizes(given, {"": "chunk_size"})  # of transformers' loop, which changes no result
        fields |= mamba_keys.read_sizes(given, OF_MAMBA)
        fields |= {"mamba_conv_bias": bool(bias), "mamba_dt_min": float(least)}
    if EXPERTS in types:
        fields |= mamba_keys.read_sizes(given, OF_EXPERTS) | {"scoring_func": "sigmoid"}
        factor = given["routed_scaling_factor"]
        need_key(type(factor) in (int, float) and factor > 0, "routed_scaling_factor", "a number more than 0", factor)
        fields |= {"routed_scaling_factor": float(factor), "norm_topk_prob": bool(given["norm_topk_prob"])}
    return fields


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    types = mixer_keys.types_of(fields)
    letters = {purpose: letter for letter, purpose in LETTERS.items()}
    own = {
        BLOCKS: [WORDS.get(purpose, purpose) for purpose in types],
        PATTERN: "".join(letters.get(purpose, "?") for purpose in types),
        "layer_norm_epsilon": fields["rms_norm_eps"],
        "head_dim": fields["head_dim"],
        "mlp_hidden_act": RELU2,
        "attention_bias": False,
        "mlp_bias": False,
        "use_bias": False,
        "use_conv_bias": fields["mamba_conv_bias"],
        "time_step_min": fields["mamba_dt_min"] or DT_MIN,
    }
    own |= {theirs: fields[ours] for ours, theirs in (OF_MAMBA | OF_EXPERTS).items() if fields[ours]}
    return own | {name: fields[name] for name in OF_ROUTERS}


def _both(config: dict[str, Any]) -> dict[str, Any]:
    """Leaves out the keys of a rotary embedding, which there is none of."""
    return {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}


BLOCK = "backbone.layers.{l}."
MIXER = BLOCK + "mixer."
NAMES = SHARED_EXPERT_TENSOR_NAMES | in_safetensors(Mamba2)
IN_BLOCKS = {
    "attention_norm": BLOCK + "norm.weight",
    **{
        f"{kind.name}.{ours}": MIXER + theirs.safetensors.partition(".")[2]
        for kind in (Mamba2, Attention)
        for ours, theirs in kind.tensors.items()
    },
    WITHOUT_EXPERTS + "mlp.w_up": MIXER + "up_proj.weight",
    WITHOUT_EXPERTS + "mlp.w_down": MIXER + "down_proj.weight",
    "mlp.router": MIXER + "gate.weight",
    "mlp.b_choice": MIXER + "gate.e_score_correction_bias",
    "mlp.w_up": MIXER + "experts.up_proj.weight",
    "mlp.w_down": MIXER + "experts.down_proj.weight",
    "mlp.shared.w_up": MIXER + "shared_experts.up_proj.weight",
    "mlp.shared.w_down": MIXER + "shared_experts.down_proj.weight",
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
SIZES += ("tie_word_embeddings", "initializer_range")
NEMOTRON_H = ModelFamily(
    model_type="nemotron_h",
    transformers_class="NemotronHForCausalLM",
    defaults={key: LLAMA_DEFAULTS[key] for key in ("tie_word_embeddings", "initializer_range", "num_attention_heads")}
    | {"rope_theta": 10000.0, "rms_norm_eps": 1e-5, "sliding_window": None}  # not read
    | {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_hidden_layers": None,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_norm_epsilon": 1e-5,
        BLOCKS: None,
        PATTERN: "ME*-",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "time_step_min": DT_MIN,
        "n_routed_experts": 8,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        # Not read by transformers' modules, or only where weights are drawn, or by kernels.
        "n_shared_experts": 1,
        "output_router_logits": False,
        "moe_shared_expert_overlap": True,
        "num_logits_to_keep": 1,
        "use_mamba_kernels": True,
        "mamba_ssm_cache_dtype": "float32",
        "mamba_proj_bias": False,
        "expand": 2,
        "chunk_size": 128,
        "time_step_max": 0.1,
        "time_step_floor": 1e-4,
        mamba_keys.LIMITS: UNLIMITED,
        "residual_in_fp32": False,
        "rescale_prenorm_residual": True,
        "hidden_dropout": 0.0,
        "num_nextn_predict_layers": 0,
        "mtp_layers_block_type": None,
        "mtp_hybrid_override_pattern": "",
    },
    sizes=SIZES,
    required={
        "tie_word_embeddings": (False,),  # its class has two tensors whatever it says
        "hidden_act": ("silu", RELU2),  # not read
        "mlp_hidden_act": (RELU2,),
        "mamba_hidden_act": ("silu",),
        "use_bias": (False,),
        "moe_latent_size": (None,),
    },
    options={"one_purpose": True, "hidden_act": RELU2, "no_rope_layer_interval": 1},
    read=_read,
    write=_write,
    both_ropes=_both,
    tensors=NAMES
    | IN_BLOCKS
    | {"embed": "backbone.embeddings.weight", "norm": "backbone.norm_f.weight", "head": "lm_head.weight"},
    canonical=NAMES,
    expert_files=ExpertFiles(module="mixer.experts"),
    root="backbone.",
    gguf=nemotron_gguf.DENSE,
    further_gguf=(nemotron_gguf.WITH_EXPERTS,),
    further_tensors="mtp.",
)
