"""Checks of the decoder's options, the `model` fields of a config: sizes, windows, rotary embedding, recipes."""

import math
from collections.abc import Mapping
from typing import Any

from pallas_kernels.flash_attention import HEADS
from surojax.errors import need
from surojax.models import decoder_config
from surojax.models.attention import fits_cudnn, fits_mosaic
from surojax.models.decoder import MIXERS
from surojax.models.decoder_config import ATTENTION, GLOBAL, LATENT, MLP, SHARED, SLIDING, channels
from surojax.models.kinds.experts import SIGMOID
from surojax.models.rotary import PROPORTIONAL


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
    need(not lacking, "model.num_kv_shared_layers", expected, shared, "lower it")
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
    need(fast >= slow, "model.rope_beta_fast", f"rope_beta_slow={slow} or more", fast, "32 and 1 are usual")
