"""Sizes that no decoder has: each limit from both sides, and every word of its refusal."""

import re
from typing import Any

import pytest

from surojax.config.fields import default_config
from surojax.errors import ConfigError
from surojax.models.decoder_checks import check_decoder

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4}
LLAMA3 = {"rope_scaling": "llama3", "rope_factor": 8.0}
YARN = {"rope_scaling": "yarn", "rope_factor": 8.0}
CUDNN = {"attention": "cudnn", "num_attention_heads": 2, "num_key_value_heads": 2}
SLIDES = {"layer_types": "sliding_attention,global_attention", "sliding_window": 8, "num_hidden_layers": 5}
MOSAIC = {"attention": "mosaic", "model_dtype": "bfloat16"}
# (fields, the one that is wrong, accepted values, a refused value, the refusal)
LIMITS: list[tuple[dict[str, Any], str, tuple, Any, str]] = [
    (
        SLIDES,
        "num_kv_shared_layers",
        (0, 1, 2, 3),
        4,
        "fewer layers, so that one with layer_types global_attention is before them, whose keys they read, got 4; "
        "lower it",
    ),
    (
        SLIDES | {"layer_types": "conv,sliding_attention,full_attention,global_attention"},
        "num_kv_shared_layers",
        (0, 1),
        3,
        "fewer layers, so that one with layer_types full_attention, global_attention is before them, whose keys they "
        "read, got 3; lower it",
    ),
    (SLIDES, "num_kv_shared_layers", (3,), 5, "fewer than num_hidden_layers=5, got 5; lower it"),
    (
        {"vocab_size": 64, "hidden_size_per_layer_input": 4},
        "vocab_size_per_layer_input",
        (0, 64, 80),
        63,
        "0, or vocab_size=64 or more, a row of each token, got 63; use 0",
    ),
    (
        {"num_attention_heads": 8},
        "num_key_value_heads",
        (1, 2, 4, 8),
        6,
        "a divisor of num_attention_heads=8, got 6; use 2",
    ),
    (
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 0},
        "hidden_size",
        (64, 256),
        66,
        "a multiple of num_attention_heads=4, got 66; or set model.head_dim",
    ),
    (
        {"linear_num_key_heads": 4},
        "linear_num_value_heads",
        (4, 8),
        2,
        "a multiple of linear_num_key_heads=4, each of which several share, got 2; use 4",
    ),
    (
        {"linear_num_key_heads": 4},
        "linear_num_value_heads",
        (4,),
        10,
        "a multiple of linear_num_key_heads=4, each of which several share, got 10; use 8",
    ),
    ({"mamba_n_groups": 4}, "mamba_n_heads", (4, 8), 2, "a multiple of mamba_n_groups=4, of equal size, got 2; use 4"),
    ({"mamba_n_groups": 4}, "mamba_n_heads", (4,), 10, "a multiple of mamba_n_groups=4, of equal size, got 10; use 8"),
    (
        {"mamba_dt_min": 0.5},
        "mamba_dt_max",
        (0.0, 0.6),
        0.5,
        "0, or more than mamba_dt_min=0.5, got 0.5; raise it; 0 = without a limit",
    ),
    (
        {"num_hidden_layers": 3},
        "layer_types",
        ("full_attention, conv", ""),
        "full_attention,",
        "mixers of layers, separated by commas: full_attention, conv, linear_attention, latent_attention, mamba2, "
        "sliding_attention, global_attention, got 'full_attention,'; correct it",
    ),
    ({}, "head_dim", (16, 2), 15, "an even number, since channels rotate in pairs, got 15; use 16"),
    (
        CUDNN,
        "head_dim",
        (8, 256),
        264,
        "a multiple of 8 up to 256 with cudnn, got 264; set attention='xla', or change it",
    ),
    (
        CUDNN,
        "head_dim",
        (8, 64),
        12,
        "a multiple of 8 up to 256 with cudnn, got 12; set attention='xla', or change it",
    ),
    (
        MOSAIC,
        "head_dim",
        (16, 128, 160, 256),
        144,
        "16-bit heads of a multiple of 16 up to 128 channels, of 32 up to 256 with attention='mosaic', got "
        "'bfloat16 of 144'; "
        "use attention='auto'",
    ),
    (
        {"num_hidden_layers": 6, "sliding_window": 8},
        "sliding_window_pattern",
        (0, 2, 6),
        7,
        "2 to num_hidden_layers=6, or 0, got 7; 0 gives all layers the window; to give it to none, leave "
        "model.sliding_window out",
    ),
    (
        {"num_hidden_layers": 6, "sliding_window": 8},
        "sliding_window_pattern",
        (2,),
        1,
        "2 to num_hidden_layers=6, or 0, got 1; 0 gives all layers the window; to give it to none, leave "
        "model.sliding_window out",
    ),
    (
        {"num_hidden_layers": 6},
        "no_rope_layer_interval",
        (0, 1, 6),
        7,
        "at most num_hidden_layers=6, since it is the first layer without rotary embedding, got 7; lower it; 0 = no "
        "such layer",
    ),
    (MOE, "num_experts_per_tok", (1, 4), 5, "1 to num_experts=4, got 5; 8 of 64 is usual"),
    (
        MOE | {"scoring_func": "sigmoid", "num_experts_per_tok": 1},
        "n_group",
        (1, 2),
        4,
        "groups of two experts or more, whose two best are added up, got 4; lower it",
    ),
    (MOE | {"num_experts_per_tok": 1}, "n_group", (4,), 3, "a divisor of num_experts=4, got 3; use 1"),
    (
        {"num_experts": 1, "num_experts_per_tok": 1, "scoring_func": "sigmoid", "num_hidden_layers": 4},
        "n_group",
        (1,),
        2,
        "a divisor of num_experts=1, got 2; use 1",
    ),
    (MOE, "num_experts_per_tok", (1, 4), 0, "1 to num_experts=4, got 0; 8 of 64 is usual"),
    (
        MOE,
        "first_k_dense_replace",
        (0, 3),
        4,
        "fewer than num_hidden_layers=4, got 4; set model.num_experts=0",
    ),
    (
        {"rope_scaling": "linear"},
        "rope_factor",
        (1.01, 8.0),
        1.0,
        "more than 1 with rope_scaling='linear', got 1.0; it is the new context length divided by the old one",
    ),
    (LLAMA3, "rope_low_freq_factor", (0.5, 3.9), 0.0, "more than 0, got 0.0; Llama 3 uses 1"),
    (
        LLAMA3,
        "rope_high_freq_factor",
        (1.5, 4.0),
        1.0,
        "more than rope_low_freq_factor=1.0, got 1.0; Llama 3 uses 4",
    ),
    (YARN, "rope_beta_fast", (1.0, 32.0), 0.5, "rope_beta_slow=1.0 or more, got 0.5; 32 and 1 are usual"),
    (
        {"head_dim": 16},
        "rope_partial_rotary_factor",
        (1.0, 0.5, 0.125),
        1.5,
        "a fraction up to 1 that leaves an even number of the 16 channels of a head, got 1.5; channels rotate in "
        "pairs; 1 = all of them",
    ),
    (
        {"head_dim": 16},
        "rope_partial_rotary_factor",
        (0.25,),
        0.2,
        "a fraction up to 1 that leaves an even number of the 16 channels of a head, got 0.2; channels rotate in "
        "pairs; 1 = all of them",
    ),
    (
        {"head_dim": 16},
        "rope_partial_rotary_factor",
        (0.25,),
        0.05,
        "a fraction up to 1 that leaves an even number of the 16 channels of a head, got 0.05; channels rotate in "
        "pairs; 1 = all of them",
    ),
]


def config(fields: dict[str, Any]):
    c = default_config()
    for name, value in fields.items():
        owner = c if name in ("attention", "model_dtype") else c.model
        owner[name] = value
    return c


@pytest.mark.parametrize("fields, name, accepted, refused, said", LIMITS, ids=lambda x: str(x)[:40])
def test_a_limit_from_both_sides(fields, name, accepted, refused, said):
    for value in accepted:
        check_decoder(config(fields | {name: value}))
    with pytest.raises(ConfigError, match=rf"^{re.escape(f'model.{name}: expected {said}')}$"):
        check_decoder(config(fields | {name: refused}))
