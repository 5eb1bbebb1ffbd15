"""Checks of the decoder's options, the `model` fields of a config: sizes, windows, rotary embedding, recipes."""

import math

from surojax.config.fields import Config, default_config, head_dim
from surojax.errors import need
from surojax.models.attention import fits_mosaic
from surojax.models.decoder_fp8 import NOT_COMPUTED
from surojax.models.rotary import ROPE_USES


def check_decoder(c: Config) -> None:
    """Checks what several `model` fields say together. Raises ConfigError for the first that is wrong."""
    m = c.model
    heads = m.num_attention_heads
    kv = m.num_key_value_heads
    near = math.gcd(heads, kv)
    need(heads % kv == 0, "model.num_key_value_heads", f"a divisor of num_attention_heads={heads}", kv, f"use {near}")
    if not m.head_dim:
        expected = f"a multiple of num_attention_heads={heads}"
        need(m.hidden_size % heads == 0, "model.hidden_size", expected, m.hidden_size, "or set model.head_dim")
    h = head_dim(c)
    need(h % 2 == 0, "model.head_dim", "an even number, since channels rotate in pairs", h, f"use {h + 1}")
    if c.attention == "cudnn":
        expected = "'auto', 'mosaic' or 'xla' with sample_packing"
        need(not c.sample_packing, "attention", expected, c.attention, "cuDNN does not separate documents")
        change = "set attention='xla', or change it"
        need(c.model_dtype == "bfloat16", "model_dtype", "bfloat16 with attention='cudnn'", c.model_dtype, change)
        need(h % 8 == 0 and h <= 256, "model.head_dim", "a multiple of 8 up to 256 with cudnn", h, change)
        cap = m.attn_logit_softcapping
        change = "set attention='auto'"
        need(not cap, "model.attn_logit_softcapping", "0 with attention='cudnn', which has no softcap", cap, change)
    if c.attention == "mosaic":
        expected = "bfloat16 heads of a multiple of 16 up to 128 channels with attention='mosaic'"
        change = "use attention='auto'"
        need(fits_mosaic(c.model_dtype, h), "model.head_dim", expected, f"{c.model_dtype} of {h}", change)
    _check_layers(c)
    _check_rope(c, h)


def _check_layers(c: Config) -> None:
    """Checks the fields that say which layers are different."""
    m = c.model
    layers = m.num_hidden_layers
    name = "model.sliding_window_pattern"
    pattern = m.sliding_window_pattern
    if not m.sliding_window:
        need(pattern == 0, name, "0 without a window", pattern, "set model.sliding_window, or leave it out")
        base = m.rope_local_base_freq
        change = "set model.sliding_window, or leave it out"
        need(base == 0, "model.rope_local_base_freq", "0 without a window, whose layers use it", base, change)
    elif pattern:
        expected = f"2 to num_hidden_layers={layers}, or 0"
        change = "0 gives all layers the window; to give it to none, leave model.sliding_window out"
        need(2 <= pattern <= layers, name, expected, pattern, change)
    interval = m.no_rope_layer_interval
    expected = f"at most num_hidden_layers={layers}, since it is the first layer without rotary embedding"
    need(interval <= layers, "model.no_rope_layer_interval", expected, interval, "lower it; 0 = no such layer")


def _check_rope(c: Config, h: int) -> None:
    """Checks the rotary embedding's fields. h: channels of a head."""
    m = c.model
    kind = m.rope_scaling
    defaults = default_config().model
    used = {*ROPE_USES[kind], *(("original_max_position_embeddings",) if m.rope_llama_4_scaling_beta else ())}
    for name in (f"rope_{field}" for fields in ROPE_USES.values() for field in fields if field not in used):
        expected = f"{defaults[name]} with rope_scaling={kind!r}, which does not use it"
        need(m[name] == defaults[name], f"model.{name}", expected, m[name], "leave it out, or set model.rope_scaling")
    if kind != "none":
        change = "it is the new context length divided by the old one"
        need(m.rope_factor > 1, "model.rope_factor", f"more than 1 with rope_scaling={kind!r}", m.rope_factor, change)
    if m.rope_llama_4_scaling_beta:
        alike = not m.rope_local_base_freq and not m.no_rope_layer_interval
        expected = "0 with rope_local_base_freq or no_rope_layer_interval: it is of layers that all rotate alike"
        need(alike, "model.rope_llama_4_scaling_beta", expected, m.rope_llama_4_scaling_beta, "leave one of them out")
    low = m.rope_low_freq_factor
    high = m.rope_high_freq_factor
    need(low > 0, "model.rope_low_freq_factor", "more than 0", low, "Llama 3 uses 1")
    need(high > low, "model.rope_high_freq_factor", f"more than rope_low_freq_factor={low}", high, "Llama 3 uses 4")
    slow = m.rope_beta_slow
    fast = m.rope_beta_fast
    need(fast > slow, "model.rope_beta_fast", f"more than rope_beta_slow={slow}", fast, "32 and 1 are usual")
    name = "model.rope_partial_rotary_factor"
    fraction = m.rope_partial_rotary_factor
    turned = int(h * fraction)
    expected = f"a fraction up to 1 that leaves an even number of the {h} channels of a head"
    change = "channels rotate in pairs; 1 = all of them"
    need(fraction <= 1 and turned > 0 and turned % 2 == 0, name, expected, fraction, change)


def check_decoder_in_fp8(c: Config) -> None:
    """Raises ConfigError for a block that is not written out in float8."""
    defaults = default_config().model
    for name in NOT_COMPUTED:
        expected = f"{defaults[name]!r} with recipe={c.recipe!r}, whose blocks are written out without it"
        change = "use recipe='mxfp8', 'nvfp4' or 'bf16'"
        need(c.model[name] == defaults[name], f"model.{name}", expected, c.model[name], change)
