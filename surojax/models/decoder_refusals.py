"""Pairs of the decoder's options, the `model` fields of a config, that do not go together."""

import dataclasses
from typing import Any

from surojax.models.decoder_config import ATTENTION, DELTA, GLOBAL, LATENT, MAMBA, SLIDING
from surojax.models.operations import RELU2
from surojax.models.rotary import ROPE_USES
from surojax.refusals.features import (
    BY_LAYER,
    EXPERTS,
    FP8,
    cudnn,
    no_experts,
    no_window,
    persistent,
    stages,
    tokens_sent,
)
from surojax.refusals.pairs import OUT
from surojax.refusals.refusal import (
    Feature,
    Refusal,
    clause_of,
    is_above,
    is_off,
    is_on,
    is_one_of,
    is_other_than,
    is_set,
    refuse_each,
)

BETA = "model.rope_llama_4_scaling_beta"


def _unused_of_rope(name: str) -> Refusal:
    """Makes the row that refuses a field of rotary scaling with the kinds of scaling that do not read the field."""
    kinds = tuple(kind for kind, names in ROPE_USES.items() if name not in names)
    other = is_one_of("model.rope_scaling", *kinds)
    example: Any = {
        "truncate": False,
        "original_max_position_embeddings": 512,
        "low_freq_factor": 2.0,
        "beta_slow": 2.0,
    }.get(name, 8.0)
    needs = {"model.rope_scaling": next(kind for kind in ROPE_USES if kind not in kinds), "model.rope_factor": 2.0}
    if name == "original_max_position_embeddings":
        other = dataclasses.replace(
            other,
            name=f"{other.name}, and {BETA}=0",
            fields=(*other.fields, BETA),
            holds=lambda s, _: s["model.rope_scaling"] in kinds and not s[BETA],
        )
    feature = is_set(f"model.rope_{name}", example, needs)
    return Refusal(feature, other, "which does not use it", "leave it out, or set model.rope_scaling")


def _without_mixer(mixer: str) -> Feature:
    """The feature of models without this mixer."""
    return Feature(
        f"model.layer_types without {mixer}",
        ("model.layer_types",),
        lambda s, _: mixer not in s["model.layer_types"],
        clause_of("model.layer_types"),
        "",
        {"model.layer_types": ""},
    )


IN_ONE_GROUP = EXPERTS | {"gradient_accumulation_steps": 1}
experts = is_above("model.num_experts", 0, **{"model.num_experts_per_tok": 1})
router_losses = (
    is_set("router_aux_loss_coef", 0.01, IN_ONE_GROUP),
    is_set("router_z_loss_coef", 0.001, IN_ONE_GROUP),
)
one_purpose = is_on("model.one_purpose")
without_gate = is_one_of("model.hidden_act", RELU2)
sigmoid = is_set("model.scoring_func", "sigmoid", EXPERTS)
shared = is_set("model.n_shared_experts", 1, EXPERTS)
shared_width = is_set("model.moe_shared_intermediate_size", 64, EXPERTS)
gated_shared = is_set("model.shared_expert_intermediate_size", 64, EXPERTS)
dense_first = is_set("model.first_k_dense_replace", 1, EXPERTS)
# Fields that a model without experts does not read.
OF_EXPERTS = (
    is_set("model.num_experts_per_tok", 2, EXPERTS),
    is_set("model.moe_intermediate_size", 64, EXPERTS),
    is_on("model.norm_topk_prob", **EXPERTS),
    is_on("model.expert_bias", **EXPERTS),
    is_on("model.experts_beside_mlp", **EXPERTS),
    sigmoid,
    is_set("model.routed_scaling_factor", 2.5, EXPERTS),
    shared,
    shared_width,
    gated_shared,
    dense_first,
    is_set("model.n_group", 2, EXPERTS),
    is_set("model.topk_group", 2, EXPERTS | {"model.n_group": 2}),
    *router_losses,
    tokens_sent,
)
OF_PLAIN_MLPS = ("model.n_shared_experts", "model.moe_shared_intermediate_size", "model.first_k_dense_replace")
no_plain_mlp = Feature(
    "model.num_experts > 0 without an MLP for all tokens",
    ("model.num_experts", *OF_PLAIN_MLPS),
    lambda s, _: s["model.num_experts"] > 0 and not any(s[name] for name in OF_PLAIN_MLPS),
    lambda s: f"with num_experts={s['model.num_experts']} and no MLP for all tokens",
    "0",
    EXPERTS,
)
stages_of_several = Feature(
    "pp_size > 1 with layers of several mixers",
    ("pp_size", "model.layer_types"),
    lambda s, _: s["pp_size"] > 1 and len({name.strip() for name in s["model.layer_types"].split(",")}) > 1,
    lambda s: f"with pp_size={s['pp_size']} and model.layer_types={s['model.layer_types']!r}",
    "1",
    {"model.layer_types": "conv,full_attention", "model.num_hidden_layers": 4, "pp_size": 2},
)
no_delta = _without_mixer(DELTA)
WITH_DELTA: Any = {"model.layer_types": f"{DELTA},{ATTENTION}", "model.num_hidden_layers": 4}
OF_DELTA = (
    is_set("model.linear_num_key_heads", 8, WITH_DELTA),
    is_set("model.linear_num_value_heads", 16, WITH_DELTA),
    is_set("model.linear_key_head_dim", 64, WITH_DELTA),
    is_set("model.linear_value_head_dim", 64, WITH_DELTA),
    is_set("model.linear_conv_kernel_dim", 3, WITH_DELTA),
    is_on("model.linear_fused_projections", **WITH_DELTA),
)
delta = Feature(
    f"model.layer_types with {DELTA}",
    ("model.layer_types",),
    lambda s, _: DELTA in s["model.layer_types"],
    clause_of("model.layer_types"),
    "''",
    WITH_DELTA,
)
WITH_MAMBA: Any = {"model.layer_types": f"{MAMBA},{ATTENTION}", "model.num_hidden_layers": 4}
OF_MAMBA = (
    is_set("model.mamba_n_heads", 64, WITH_MAMBA),
    is_set("model.mamba_d_head", 32, WITH_MAMBA),
    is_set("model.mamba_d_state", 64, WITH_MAMBA),
    is_set("model.mamba_n_groups", 8, WITH_MAMBA),
    is_set("model.mamba_d_conv", 3, WITH_MAMBA),
    is_off("model.mamba_conv_bias", **WITH_MAMBA),
    is_set("model.mamba_dt_min", 0.001, WITH_MAMBA),
    is_set("model.mamba_dt_max", 0.1, WITH_MAMBA),
)
no_mamba = dataclasses.replace(
    no_delta, name=f"model.layer_types without {MAMBA}", holds=lambda s, _: MAMBA not in s["model.layer_types"]
)
mamba = dataclasses.replace(
    delta,
    name=f"model.layer_types with {MAMBA}",
    holds=lambda s, _: MAMBA in s["model.layer_types"],
    example=WITH_MAMBA,
)
WITH_LATENT: Any = {"model.layer_types": LATENT}
latent = Feature(
    f"model.layer_types with {LATENT}",
    ("model.layer_types",),
    lambda s, _: LATENT in s["model.layer_types"],
    clause_of("model.layer_types"),
    "''",
    WITH_LATENT,
)
no_latent = _without_mixer(LATENT)
all_latent = dataclasses.replace(
    latent,
    name=f"model.layer_types with {LATENT} and without {ATTENTION}",
    holds=lambda s, _: LATENT in s["model.layer_types"] and ATTENTION not in s["model.layer_types"],
)
latent_in_context = dataclasses.replace(
    latent,
    name=f"{latent.name} and cp_size > 1",
    fields=(*latent.fields, "cp_size"),
    holds=lambda s, _: LATENT in s["model.layer_types"] and s["cp_size"] > 1,
    clause=lambda s: f"with {LATENT} and cp_size={s['cp_size']}",
    example=WITH_LATENT | {"cp_size": 2},
)
YARN: Any = {"model.rope_scaling": "yarn", "model.rope_factor": 2.0}
LATENT_HEADS = {"model.qk_nope_head_dim": 32, "model.qk_rope_head_dim": 32, "model.v_head_dim": 64}  # alike, for cuDNN
OF_LATENT = (
    is_set("model.q_lora_rank", 64, WITH_LATENT),
    is_set("model.kv_lora_rank", 64, WITH_LATENT),
    *(is_set(name, size, WITH_LATENT | LATENT_HEADS) for name, size in LATENT_HEADS.items()),
    is_off("model.rope_interleave", **WITH_LATENT),
    scores_of_yarn := is_set("model.rope_mscale_all_dim", 1.0, WITH_LATENT | YARN),
)
WINDOW: Any = {"model.sliding_window": 64}
SLIDES: Any = {"model.layer_types": f"{SLIDING},{GLOBAL}", "model.num_hidden_layers": 4} | WINDOW
slides = Feature(
    f"model.layer_types with {SLIDING}",
    ("model.layer_types",),
    lambda s, _: SLIDING in s["model.layer_types"],
    clause_of("model.layer_types"),
    "''",
    SLIDES,
)
slides_alone = dataclasses.replace(
    slides,
    name=f"model.layer_types with {SLIDING} or {GLOBAL}, and without {ATTENTION}",
    holds=lambda s, _: (
        bool(mixers := {*s["model.layer_types"].split(",")})
        and ATTENTION not in mixers
        and bool({SLIDING, GLOBAL} & mixers)
    ),
)
OF_GLOBAL = (
    is_set("model.global_head_dim", 32, SLIDES),
    is_set("model.num_global_key_value_heads", 2, SLIDES),
    is_on("model.attention_k_eq_v", **SLIDES),
)
not_sliding = dataclasses.replace(
    slides,
    name=f"model.layer_types with others than {SLIDING} and {GLOBAL}",
    holds=lambda s, _: not {name.strip() for name in s["model.layer_types"].split(",")} <= {SLIDING, GLOBAL},
    example={"model.layer_types": ""},
)
shares = is_set("model.num_kv_shared_layers", 2, SLIDES)
layer_input = is_set("model.hidden_size_per_layer_input", 64)
double_wide = is_on("model.use_double_wide_mlp", **SLIDES | {"model.num_kv_shared_layers": 2})
rows_of_input = is_set("model.vocab_size_per_layer_input", 512, {"model.hidden_size_per_layer_input": 64})
# Fields that give every n-th layer with attention something else.
EVERY_NTH = (
    is_set("model.sliding_window_pattern", 2, WINDOW),
    is_set("model.no_rope_layer_interval", 2),
)
# Fields that layers with latent attention alone do not read.
OF_ATTENTION = (
    is_set("model.head_dim", 32),
    is_set("model.rope_partial_rotary_factor", 0.5),
    is_set("model.rope_local_base_freq", 1e4, WINDOW),
    is_set("model.no_rope_layer_interval", 2),
    is_set("model.query_pre_attn_scalar", 16.0),
    is_set("model.attn_logit_softcapping", 50.0),
    is_set("model.sliding_window", 64),
    is_set("model.sliding_window_pattern", 2, WINDOW),
    is_on("model.attention_sinks"),
    is_on("model.attn_output_gate"),
    is_on("model.attn_gate_proj"),
    is_on("model.qk_norm"),
    is_on("model.qk_norm_weightless"),
    is_on("model.qk_norm_whole"),
    is_on("model.v_norm_weightless"),
    is_on("model.norm_plus_one"),
)
SANDWICH: Any = {"model.sandwich_norms": True}
no_sandwich = is_off("model.sandwich_norms")
no_nth_layer = Feature(
    "model.sliding_window_pattern=0 and model.no_rope_layer_interval=0",
    ("model.sliding_window_pattern", "model.no_rope_layer_interval"),
    lambda s, _: not s["model.sliding_window_pattern"] and not s["model.no_rope_layer_interval"],
    lambda s: "with sliding_window_pattern=0 and no_rope_layer_interval=0",
    "",
    {"model.sliding_window_pattern": 0, "model.no_rope_layer_interval": 0},
)
several_groups = Feature(
    "microbatches_per_fetch other than gradient_accumulation_steps",
    ("microbatches_per_fetch", "gradient_accumulation_steps", "pp_size", *BY_LAYER),
    lambda s, _: (
        s["microbatches_per_fetch"] != s["gradient_accumulation_steps"]
        and s["pp_size"] == 1
        and all(s[name] != "nvme" for name in BY_LAYER)
    ),
    lambda s: f"with microbatches_per_fetch={s['microbatches_per_fetch']}",
    "gradient_accumulation_steps",
    {"microbatches_per_fetch": 1, "gradient_accumulation_steps": 2},
)
whole_norm = is_on("model.qk_norm_whole")
weightless_norm = is_on("model.qk_norm_weightless")
sinks = is_on("model.attention_sinks")
experts_in_fp8 = Feature(
    "model.num_experts > 0 with recipe=fp8_hybrid or fp8_current",
    ("model.num_experts", "recipe"),
    lambda s, _: s["model.num_experts"] > 0 and s["recipe"] in FP8,
    lambda s: f"with num_experts={s['model.num_experts']} and recipe={s['recipe']!r}",
    "0",
    EXPERTS | {"recipe": "fp8_current"},
)
OF_ROPE = dict.fromkeys(name for names in ROPE_USES.values() for name in names)
REFUSALS = (
    *map(_unused_of_rope, OF_ROPE),
    *refuse_each(OF_EXPERTS, no_experts, "which does not use it", "leave it out, or set model.num_experts"),
    *refuse_each(
        router_losses,
        is_set("pp_schedule", "1f1b", {"pp_size": 2}),
        "which goes backward before it has seen all tokens of a step",
        "leave it out, or set pp_schedule='gpipe'",
    ),
    *(
        Refusal(several_groups, loss, "which is of all tokens of a step", "set it to gradient_accumulation_steps")
        for loss in router_losses
    ),
    Refusal(router_losses[1], sigmoid, "which has no softmax", "leave it out"),
    Refusal(is_set("master_dtype", "bfloat16"), sigmoid, "whose bias of the choice is float32", "set it to 'float32'"),
    *refuse_each(
        (
            shared,
            gated_shared,
            sigmoid,
            is_on("model.expert_bias", **EXPERTS),
            is_other_than("recipe", "bf16", "mxfp8"),
        ),
        is_on("model.experts_beside_mlp", **EXPERTS),
        "with which it is not built",
        "leave one of them out",
    ),
    Refusal(gated_shared, shared, "with which it is not built", "leave one of them out"),
    Refusal(gated_shared, shared_width, "with which it is not built", "leave one of them out"),
    Refusal(shared, shared_width, "which is the width of all of them", "leave one of them out"),
    Refusal(is_on("model.mlp_joined"), no_plain_mlp, "which does not use it", "leave it out"),
    Refusal(is_on("model.mlp_joined"), without_gate, "which has no gate", "leave one of them out"),
    Refusal(is_on("model.expert_bias", **EXPERTS), without_gate, "with which it is not built", "leave it out"),
    Refusal(gated_shared, without_gate, "with which it is not built", "leave one of them out"),
    *refuse_each(
        (is_on("model.sandwich_norms"), dense_first),
        one_purpose,
        "with which it is not built",
        "leave one of them out",
    ),
    Refusal(is_on("model.expert_bias", **EXPERTS), sigmoid, "with which it is not built", "leave one of them out"),
    *refuse_each(OF_DELTA, no_delta, "which does not use it", f"leave it out, or put {DELTA} into model.layer_types"),
    Refusal(is_set("master_dtype", "bfloat16"), delta, "whose decays are float32", "set it to 'float32'"),
    *refuse_each(OF_MAMBA, no_mamba, "which does not use it", f"leave it out, or put {MAMBA} into model.layer_types"),
    Refusal(is_set("master_dtype", "bfloat16"), mamba, "whose decays are float32", "set it to 'float32'"),
    *refuse_each(
        (is_on("offload_weights"), is_on("offload_grads", zero_level=2), is_on("offload_residual")),
        stages_of_several,
        "since XLA would copy some of a stage's layers by kernels instead of copy engines",
        "leave it out, or set pp_size=1",
    ),
    *refuse_each(
        OF_LATENT, no_latent, "which does not use it", f"leave it out, or put {LATENT} into model.layer_types"
    ),
    Refusal(
        scores_of_yarn,
        is_one_of("model.rope_scaling", *(kind for kind in ROPE_USES if kind != "yarn")),
        "which does not use it",
        "leave it out, or set model.rope_scaling='yarn'",
    ),
    *refuse_each(OF_ATTENTION, all_latent, "which does not use it", "leave it out"),
    *refuse_each(
        OF_GLOBAL,
        _without_mixer(GLOBAL),
        "which does not use it",
        f"leave it out, or put {GLOBAL} into model.layer_types",
    ),
    Refusal(shares, not_sliding, "which have no keys that others read", "leave it out, or name these alone there"),
    Refusal(double_wide, is_one_of("model.num_kv_shared_layers", 0), "whose layers it is of", "leave it out"),
    Refusal(rows_of_input, is_one_of("model.hidden_size_per_layer_input", 0), "which does not use it", "leave it out"),
    *refuse_each(
        (is_set("tp_size", 2), is_set("pp_size", 2)),
        shares,
        "whose keys and values go from layer to layer with all heads",
        "leave it out, or use cp_size",
    ),
    *refuse_each(
        (is_set("tp_size", 2), one_purpose, is_one_of("model.hidden_act", RELU2, "clamped_swiglu")),
        layer_input,
        "with which it is not built",
        "leave one of them out",
    ),
    *refuse_each(
        (is_on("model.attn_gate_proj"), is_on("model.attn_output_gate"), whole_norm),
        shares,
        "with which it is not built",
        "leave one of them out",
    ),
    *refuse_each(EVERY_NTH, slides_alone, "which says of each layer what it is", "leave it out"),
    Refusal(slides, no_window, "", "set model.sliding_window"),
    Refusal(
        is_set("cp_method", "ring", {"cp_size": 2}),
        latent_in_context,
        "whose latents are gathered while each GPU has a part of the heads",
        "set cp_method='ulysses'",
    ),
    Refusal(
        is_other_than("recipe", "bf16", "fp8_current"),
        latent_in_context,
        "whose GPUs expand the latents for their own heads alone",
        "set recipe='bf16', or leave cp_size out",
    ),
    Refusal(dense_first, stages, "whose layers are equal", "leave it out, or set pp_size=1"),
    Refusal(sinks, cudnn, "whose log-sum-exp jax does not give", "set attention='auto'"),
    Refusal(whole_norm, is_on("model.qk_norm"), "which norms them by head", "leave one of them out"),
    Refusal(weightless_norm, is_on("model.qk_norm"), "which has weights", "leave one of them out"),
    Refusal(whole_norm, weightless_norm, "which norms them by head", "leave one of them out"),
    Refusal(
        is_on("model.attn_gate_proj"), is_on("model.attn_output_gate"), "which is another gate", "leave one of them out"
    ),
    Refusal(
        is_off("model.input_norms", **SANDWICH),
        no_sandwich,
        "without which a layer has no norms",
        "set model.sandwich_norms=True",
    ),
    Refusal(
        is_set("model.post_norm_eps", 1e-8, SANDWICH),
        no_sandwich,
        "which does not use it",
        "leave it out, or set model.sandwich_norms=True",
    ),
    Refusal(
        is_on("model.plain_final_norm", **{"model.norm_plus_one": True}),
        is_off("model.norm_plus_one"),
        "which does not use it",
        "leave it out, or set model.norm_plus_one=True",
    ),
    Refusal(
        is_on("model.layers_from_last", **{"model.no_rope_layer_interval": 2}),
        no_nth_layer,
        "which counts no layers",
        "leave it out, or set one of them",
    ),
    Refusal(whole_norm, is_on("model.attn_output_gate"), "with which it is not built", "leave one of them out"),
    Refusal(whole_norm, is_on("model.norm_plus_one"), "with which it is not built", "leave one of them out"),
    Refusal(persistent, experts_in_fp8, "whose products quantise the matrices of one expert", OUT),
)
