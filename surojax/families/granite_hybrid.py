"""Granite-4: layers of Mamba2 and of attention, Granite's multipliers, and an MLP that every token uses.

Models with experts have that MLP beside them.
"""

from typing import Any

from surojax.families import granite, granite_gguf, mamba_keys, mixer_keys, rope_keys
from surojax.families.family import (
    LAYER,
    LLAMA_DEFAULTS,
    SHARED_EXPERT_TENSOR_NAMES,
    SIZES,
    WITHOUT_WINDOW,
    ModelFamily,
    in_safetensors,
)
from surojax.families.granite import GRANITE_MOE, MOE, MULTIPLIERS
from surojax.families.granite_gguf import OF_MAMBA, POSITIONS, SHARED
from surojax.families.mamba_keys import LIMITS, UNLIMITED, need_key
from surojax.families.olmoe import OF_TRAINING
from surojax.models.decoder_config import ATTENTION, MAMBA
from surojax.models.kinds.joined_mlp import JoinedMlp
from surojax.models.kinds.mamba2 import Mamba2

TYPES = {"mamba": MAMBA, "linear_attention": MAMBA, "attention": ATTENTION, "full_attention": ATTENTION}


def _read(given: dict[str, Any]) -> dict[str, Any]:
    fields = granite.read_scores(given) | rope_keys.read_rope(given) | _read_mlps(given)
    types = given.get("layer_types")
    types = ["mamba"] * given["num_hidden_layers"] if types is None else types
    for name in types:
        need_key(
            name in TYPES, "layer_types", f"{', '.join(TYPES)} of each layer", name, "nothing else is computed here"
        )
    mixers = [TYPES[name] for name in types]
    fields["layer_types"] = mixer_keys.read_layer_types(given, mixers, (ATTENTION, MAMBA))
    positions = given[POSITIONS]
    need_key(isinstance(positions, str | None), POSITIONS, "rope, nope or null", positions)
    fields["no_rope_layer_interval"] = 0 if positions == "rope" else 1
    return fields | (_read_mamba(given) if MAMBA in mixers else {})


def _read_mlps(given: dict[str, Any]) -> dict[str, Any]:
    """Reads the widths: without experts of one MLP, else of an expert and of the MLP beside them."""
    shared, experts = given[SHARED], given["num_local_experts"]
    need_key(type(shared) is int and shared > 0, SHARED, "a whole number from 1 on", shared)
    if not experts:
        return {"num_experts": 0, "num_experts_per_tok": 0, "intermediate_size": shared, "norm_topk_prob": False}
    return {
        "num_experts": experts,
        "num_experts_per_tok": given["num_experts_per_tok"],
        "moe_intermediate_size": given["intermediate_size"],
        "moe_shared_intermediate_size": shared,
        "norm_topk_prob": True,  # a softmax of the chosen logits is that of all, divided by the chosen's sum
    }


def _read_mamba(given: dict[str, Any]) -> dict[str, Any]:
    inner = given["mamba_expand"] * given["hidden_size"]
    if given["mamba_d_head"] == "auto":
        given = given | {"mamba_d_head": inner // given["mamba_n_heads"]}
    mamba_keys.read_sizes(given, {"": "mamba_chunk_size"})  # of transformers' loop, which changes no result
    fields: dict[str, Any] = mamba_keys.read_sizes(given, OF_MAMBA)
    channels = fields["mamba_n_heads"] * fields["mamba_d_head"]
    expected = f"mamba_expand x hidden_size = mamba_n_heads x mamba_d_head = {channels}, as transformers asks for"
    need_key(inner == channels, "mamba_expand", expected, given["mamba_expand"])
    least, most = mamba_keys.read_limits(given)
    conv_bias = given["mamba_conv_bias"]
    need_key(isinstance(conv_bias, bool), "mamba_conv_bias", "true or false", conv_bias)
    return fields | {"mamba_conv_bias": conv_bias, "mamba_dt_min": least, "mamba_dt_max": most}


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    experts = fields["num_experts"]
    width = fields["moe_intermediate_size"] or fields["intermediate_size"]
    names = {MAMBA: "mamba", ATTENTION: "attention"}
    own = {
        "num_local_experts": experts,
        "num_experts_per_tok": fields["num_experts_per_tok"] or 1,
        "intermediate_size": width,
        SHARED: fields["moe_shared_intermediate_size"] if experts else fields["intermediate_size"],
        "attention_bias": False,
        "layer_types": [names.get(name, name) for name in mixer_keys.types_of(fields)],
        POSITIONS: "nope" if fields["no_rope_layer_interval"] else "rope",
        "mamba_expand": fields["mamba_n_heads"] * fields["mamba_d_head"] // fields["hidden_size"],
        "mamba_conv_bias": fields["mamba_conv_bias"],
        "mamba_proj_bias": False,
        LIMITS: mamba_keys.write_limits(fields["mamba_dt_min"], fields["mamba_dt_max"]),
    }
    own |= {name: fields[name] for name in (*OF_MAMBA, *MULTIPLIERS)}
    return own | granite.write_scores(fields) | rope_keys.write_rope(fields)


NAMES = SHARED_EXPERT_TENSOR_NAMES | in_safetensors(Mamba2) | in_safetensors(JoinedMlp)
GRANITE_HYBRID = ModelFamily(
    model_type="granitemoehybrid",
    transformers_class="GraniteMoeHybridForCausalLM",
    defaults=LLAMA_DEFAULTS
    | OF_TRAINING
    | dict.fromkeys((*MULTIPLIERS, "attention_multiplier"), 1.0)
    | {
        "router_aux_loss_coef": 0.001,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        SHARED: 1024,
        POSITIONS: "nope",  # its class has null, which says the same
        "init_method": "mup",  # of which weights training started with
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,  # of their kernels
        "mamba_conv_bias": True,
        LIMITS: UNLIMITED,
    },
    sizes=(*(name for name in SIZES if name != "intermediate_size"), *MULTIPLIERS),
    required=WITHOUT_WINDOW | {"mamba_proj_bias": (False,), "normalization_function": ("rmsnorm",)},
    options={"mlp_joined": True},
    read=_read,
    write=_write,
    tensors=NAMES | {"mlp.router": LAYER + MOE + "router.layer.weight"},
    canonical=NAMES,
    spellings=GRANITE_MOE.spellings,
    expert_files=GRANITE_MOE.expert_files,
    gguf=granite_gguf.WITH_MAMBA,
    further_gguf=(granite_gguf.DENSE, granite_gguf.WITH_EXPERTS),
)
