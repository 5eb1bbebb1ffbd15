"""Checks of the decoder's options, the `model` fields of a config: sizes, windows, rotary embedding, recipes."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from pallas_kernels.flash_attention import HEADS
from surojax.errors import need
from surojax.models import decoder_config
from surojax.models.attention import fits_cudnn, fits_mosaic
from surojax.models.decoder import MIXERS
from surojax.models.decoder_config import ATTENTION, DELTA, GLOBAL, LATENT, MAMBA, MLP, SHARED, SLIDING, channels
from surojax.models.kinds.experts import SIGMOID
from surojax.models.operations import RELU2
from surojax.models.rotary import PROPORTIONAL, ROPE_USES
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


def check_decoder(c) -> None:
    """Checks `model` fields against each other. Raises ConfigError for the first that is wrong."""
    m = c.model
    heads = m.num_attention_heads
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        near = math.gcd(heads, m[name])
        need(
            m[name] == 0 or heads % m[name] == 0,
            f"model.{name}",
            f"a divisor of num_attention_heads={heads}",
            m[name],
            f"use {near}",
        )
    _check_mixers(c)
    mixers = mixers_of(m)
    if LATENT in mixers:
        _check_latent(c)
    if LATENT not in mixers or mixers & {ATTENTION, SLIDING}:
        _check_heads(c, "model.head_dim", channels(m))
    if GLOBAL in mixers:
        _check_heads(
            c, "model.global_head_dim" if m.global_head_dim else "model.head_dim", m.global_head_dim or channels(m)
        )
    _check_layers(c)
    _check_experts(c)
    _check_scaling(c)


def _check_heads(c, field: str, h: int) -> None:
    """Checks the h channels of a head, which this field says, and those of them that rotate."""
    m = c.model
    heads = m.num_attention_heads
    if not m.head_dim:
        expected = f"a multiple of num_attention_heads={heads}"
        need(m.hidden_size % heads == 0, "model.hidden_size", expected, m.hidden_size, "or set model.head_dim")
    need(h % 2 == 0, field, "an even number, since channels rotate in pairs", h, f"use {h + 1}")
    if c.attention == "cudnn":
        change = "set attention='xla', or change it"
        need(h % 8 == 0 and h <= 256, field, "a multiple of 8 up to 256 with cudnn", h, change)
    if c.attention == "mosaic":
        expected = f"{HEADS} with attention='mosaic'"
        change = "use attention='auto'"
        need(fits_mosaic(c.model_dtype, h), field, expected, f"{c.model_dtype} of {h}", change)
    name = "model.rope_partial_rotary_factor"
    fraction = m.rope_partial_rotary_factor
    turned = 2 if m.rope_scaling == PROPORTIONAL else int(h * fraction)  # whose pairs may be none
    expected = f"a fraction up to 1 that leaves an even number of the {h} channels of a head"
    change = "channels rotate in pairs; 1 = all of them"
    need(fraction <= 1 and turned > 0 and turned % 2 == 0, name, expected, fraction, change)


def _check_latent(c) -> None:
    """Checks the channels of latent attention's heads."""
    m = c.model
    rotating = m.qk_rope_head_dim
    expected = "an even number, since channels rotate in pairs"
    need(rotating % 2 == 0, "model.qk_rope_head_dim", expected, rotating, f"use {rotating + 1}")
    sizes = m.qk_nope_head_dim + rotating, m.v_head_dim
    fits = {"cudnn": fits_cudnn(c.model_dtype, *sizes, hopper=True), "mosaic": fits_mosaic(c.model_dtype, *sizes)}
    name = "model.qk_nope_head_dim + model.qk_rope_head_dim and model.v_head_dim"
    expected = f"sizes that attention={c.attention!r} takes"
    need(fits.get(c.attention, True), name, expected, f"{c.model_dtype} of {sizes}", "use attention='auto'")


def mixers_of(settings: Mapping[str, Any]) -> set[str]:
    """The mixers of a model's layers. settings: its `model` fields."""
    return {name.strip() for name in settings["layer_types"].split(",") if name} or {ATTENTION}


def _check_mixers(c) -> None:
    """Checks layer_types, the mixers of the layers."""
    types = c.model.layer_types.split(",") if c.model.layer_types else []
    known = (
        *(name for name in MIXERS if name not in SHARED.values()),
        *((MLP, decoder_config.EXPERTS) if c.model.one_purpose else ()),
    )
    expected = f"mixers of layers, separated by commas: {', '.join(known)}"
    for name in types:
        need(name.strip() in known, "model.layer_types", expected, name.strip() or c.model.layer_types, "correct it")
    has_experts = decoder_config.EXPERTS in mixers_of(c.model)
    ok = not c.model.one_purpose or has_experts == bool(c.model.num_experts)
    expected = f"{'more than' if has_experts else ''} 0 with layer_types={c.model.layer_types!r}"
    need(ok, "model.num_experts", expected.strip(), c.model.num_experts, "name layers of experts there, or none")
    layers = c.model.num_hidden_layers
    expected = f"at most num_hidden_layers={layers} mixers, which repeat"
    need(len(types) <= layers, "model.layer_types", expected, len(types), "leave some out")
    _check_shared(c.model, types)
    keys, values = c.model.linear_num_key_heads, c.model.linear_num_value_heads
    expected = f"a multiple of linear_num_key_heads={keys}, each of which several share"
    need(values % keys == 0, "model.linear_num_value_heads", expected, values, f"use {keys * max(values // keys, 1)}")
    heads, groups = c.model.mamba_n_heads, c.model.mamba_n_groups
    expected = f"a multiple of mamba_n_groups={groups}, of equal size"
    need(heads % groups == 0, "model.mamba_n_heads", expected, heads, f"use {groups * max(heads // groups, 1)}")
    least, most = c.model.mamba_dt_min, c.model.mamba_dt_max
    expected = f"0, or more than mamba_dt_min={least}"
    need(most == 0 or most > least, "model.mamba_dt_max", expected, most, "raise it; 0 = without a limit")


def _check_shared(m, types: list[str]) -> None:
    """Checks the layers that share keys and values, and the rows of the layers' own tables."""
    layers, shared = m.num_hidden_layers, m.num_kv_shared_layers
    expected = f"fewer than num_hidden_layers={layers}"
    need(shared < layers, "model.num_kv_shared_layers", expected, shared, "lower it")
    own = {types[l % len(types)] for l in range(layers - shared)} if types else {""}
    lacking = sorted({*types} - own)
    expected = f"fewer layers, so that one with layer_types {', '.join(lacking)} is before them, whose keys they read"
    need(not shared or not lacking, "model.num_kv_shared_layers", expected, shared, "lower it")
    rows = m.vocab_size_per_layer_input
    expected = f"0, or vocab_size={m.vocab_size} or more, a row of each token"
    need(not rows or rows >= m.vocab_size, "model.vocab_size_per_layer_input", expected, rows, "use 0")


def _check_layers(c) -> None:
    """Checks sliding_window_pattern and no_rope_layer_interval, which make every n-th layer different."""
    m = c.model
    layers = m.num_hidden_layers
    name = "model.sliding_window_pattern"
    pattern = m.sliding_window_pattern
    if pattern:
        expected = f"2 to num_hidden_layers={layers}, or 0"
        change = "0 gives all layers the window; to give it to none, leave model.sliding_window out"
        need(2 <= pattern <= layers, name, expected, pattern, change)
    interval = m.no_rope_layer_interval
    expected = f"at most num_hidden_layers={layers}, since it is the first layer without rotary embedding"
    need(interval <= layers, "model.no_rope_layer_interval", expected, interval, "lower it; 0 = no such layer")


def _check_experts(c) -> None:
    """Checks the number of experts per token, and of layers without experts."""
    m = c.model
    chosen = m.num_experts_per_tok
    if m.num_experts:
        expected = f"1 to num_experts={m.num_experts}"
        need(1 <= chosen <= m.num_experts, "model.num_experts_per_tok", expected, chosen, "8 of 64 is usual")
        expected = f"fewer than num_hidden_layers={m.num_hidden_layers}"
        dense = m.first_k_dense_replace
        need(dense < m.num_hidden_layers, "model.first_k_dense_replace", expected, dense, "set model.num_experts=0")
        _check_groups(m)


def _check_groups(m) -> None:
    """Checks the groups of a model's experts."""
    groups, experts = m.n_group, m.num_experts
    expected = f"a divisor of num_experts={experts}"
    need(experts % groups == 0, "model.n_group", expected, groups, f"use {math.gcd(experts, groups)}")
    size = experts // groups
    two = groups == 1 or size > 1 or m.scoring_func != SIGMOID
    need(two, "model.n_group", "groups of two experts or more, whose two best are added up", groups, "lower it")
    chosen = m.topk_group
    need(chosen <= groups, "model.topk_group", f"at most n_group={groups}", chosen, f"use {groups}")
    most = chosen * size
    expected = f"at most {most}, which are in topk_group={chosen} of n_group={groups} groups"
    need(m.num_experts_per_tok <= most, "model.num_experts_per_tok", expected, m.num_experts_per_tok, f"use {most}")


def _check_scaling(c) -> None:
    """Checks the fields of the rotary embedding's scaling."""
    m = c.model
    kind = m.rope_scaling
    if kind == PROPORTIONAL:
        need(m.rope_factor > 0, "model.rope_factor", f"more than 0 with rope_scaling={kind!r}", m.rope_factor, "use 1")
    elif kind != "none":
        change = "it is the new context length divided by the old one"
        need(m.rope_factor > 1, "model.rope_factor", f"more than 1 with rope_scaling={kind!r}", m.rope_factor, change)
    low = m.rope_low_freq_factor
    high = m.rope_high_freq_factor
    need(low > 0, "model.rope_low_freq_factor", "more than 0", low, "Llama 3 uses 1")
    need(high > low, "model.rope_high_freq_factor", f"more than rope_low_freq_factor={low}", high, "Llama 3 uses 4")
    slow = m.rope_beta_slow
    fast = m.rope_beta_fast
    need(fast > slow, "model.rope_beta_fast", f"more than rope_beta_slow={slow}", fast, "32 and 1 are usual")


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
OF_LATENT = (
    is_set("model.q_lora_rank", 64, WITH_LATENT),
    is_set("model.kv_lora_rank", 64, WITH_LATENT),
    is_set("model.qk_nope_head_dim", 32, WITH_LATENT),
    is_set("model.qk_rope_head_dim", 32, WITH_LATENT),
    is_set("model.v_head_dim", 64, WITH_LATENT),
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
    is_set("model.rope_llama_4_scaling_beta", 0.1),
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
        (is_on("model.sandwich_norms"), dense_first, is_set("pp_size", 2)),
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
