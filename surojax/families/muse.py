"""Muse-Glimmer: attention with a gate, norms without weights on queries, keys and embedding, every fourth layer full.

Layers without a window have no rotary embedding either; both are counted from the last layer. transformers has these
models only with their image encoder, which is not trained.

In GGUF files (llama.cpp's `muse-glimmer`, found by what it asks for and computes) the weightless norms of queries and
keys are vectors: of the factor of queries, and of ones. What follows a layer's window, its rotary embedding and the
1e-8 of the norms after attention and MLP, no key says.
"""

import math
from collections.abc import Callable
from typing import Any

from surojax.errors import ConfigError
from surojax.families import rope_keys, window_keys
from surojax.families.family import (
    GGUF_LAYER,
    GGUF_NAMES,
    LLAMA_DEFAULTS,
    NORMS_AFTER,
    PLUS_ONE,
    SIZES,
    Gguf,
    ImageTextFamily,
    ModelFamily,
)
from surojax.families.gemma import TENSORS
from surojax.models.decoder_config import channels

PERIOD = 4  # one layer of so many has no window, unless config.json says which
BASES = "layer_rope_theta"  # by layer, 0 for one without rotary embedding
CAP = "final_logit_softcapping"
# Factors of queries and of logits; a `model` field follows from each.
QUERIES, LOGITS = "qk_scale_factor", "output_multiplier"


def _nth_layers(layers: int, n: int, *, from_last: bool) -> list[bool]:
    """Returns for each layer whether it is an n-th one; 0: none is."""
    return [n > 0 and (layers - 1 - l if from_last else l + 1) % n == 0 for l in range(layers)]


def _read_layers(given: dict[str, Any], full: list[bool], unrotated: list[bool]) -> dict[str, Any]:
    """Reads which layers have no window, and which no rotary embedding. Raises ConfigError for other patterns."""
    layers = given["num_hidden_layers"]
    for from_last in (False, True):
        numbers = [
            next((n for n in range(layers + 1) if _nth_layers(layers, n, from_last=from_last) == marked), None)
            for marked in (full, unrotated)
        ]
        if None not in numbers:
            every = all(full)
            return {
                "sliding_window": 0 if every else given["sliding_window"],
                "sliding_window_pattern": 0 if every else numbers[0],
                "no_rope_layer_interval": numbers[1],
                "layers_from_last": from_last,
            }
    raise ConfigError(
        f"model_path: config.json: layer_types: expected every n-th layer with full_attention, and every m-th with "
        f"0 in {BASES}, both counted from the first layer or both from the last, got {given['layer_types']} and "
        f"{given[BASES]}; nothing else is computed for {given['model_type']}"
    )


def _read(given: dict[str, Any]) -> dict[str, Any]:
    for key in (QUERIES, LOGITS, CAP, "post_norm_eps"):
        if given[key] is None or given[key] <= 0:
            raise ConfigError(
                f"model_path: config.json: {key}: expected more than 0, got {given[key]!r}; fetch it again"
            )
    if given["hidden_size"] % given["num_attention_heads"]:
        raise ConfigError(
            f"model_path: config.json: hidden_size: expected a multiple of num_attention_heads="
            f"{given['num_attention_heads']}, as transformers' class asks for, got {given['hidden_size']}; fetch it "
            "again"
        )
    layers = given["num_hidden_layers"]
    rope = rope_keys.read_rope(given)
    window = window_keys.need_window(given, window_keys.said_window(given))
    types = window_keys.said_layer_types(given, window)
    last = _nth_layers(layers, PERIOD, from_last=True)
    full = last if types is None else [kind == window_keys.FULL for kind in types]
    return {
        **_read_layers(given, full, _without_rope(given, rope["rope_theta"], last)),
        "query_pre_attn_scalar": channels(given) / given[QUERIES] ** 2,
        "logits_scaling": 1 / given[LOGITS],
        **rope,
    }


def _without_rope(given: dict[str, Any], base: float, default: list[bool]) -> list[bool]:
    """Reads which layers have no rotary embedding. base: of all others, whatever `layer_rope_theta` says."""
    bases = given[BASES]
    if bases is None:
        return default
    layers = given["num_hidden_layers"]
    if len(bases) < layers or set(bases[:layers]) - {0, base}:
        raise ConfigError(
            f"model_path: config.json: {BASES}: expected 0 or rope_theta={base!r}, which transformers computes, for "
            f"each of {layers} layers, got {str(bases)[:200]}; set others to rope_theta"
        )
    return [not theta for theta in bases[:layers]]


def _shortest(number: float, is_same: Callable[[float], bool]) -> float:
    """Returns the number with the fewest digits, of at least 6, from which the field follows; else the number."""
    rounded = (float(f"{number:.{digits}g}") for digits in range(6, 18))
    return next(filter(is_same, rounded), number)


def _after_reading(config: dict[str, Any]) -> dict[str, Any]:
    """Adds the base of each layer's rotary embedding: 0 for those without a window."""
    bases = [0 if kind == window_keys.FULL else config["rope_theta"] for kind in config["layer_types"]]
    return config | {BASES: bases}


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    layers = fields["num_hidden_layers"]
    n, m = ("sliding_window_pattern", "no_rope_layer_interval")
    full, unrotated = (_nth_layers(layers, fields[x], from_last=fields["layers_from_last"]) for x in (n, m))
    slides, scalar, scaling = (fields[x] for x in ("sliding_window", "query_pre_attn_scalar", "logits_scaling"))
    return {
        "head_dim": fields["head_dim"],
        "attention_bias": False,
        "hidden_activation": "silu",
        "sliding_window": slides or 2048,
        "layer_types": [window_keys.FULL if x or not slides else window_keys.SLIDING for x in full],
        BASES: [0 if x else fields["rope_theta"] for x in unrotated],
        QUERIES: _shortest(math.sqrt(fields["head_dim"] / scalar), lambda x: fields["head_dim"] / x**2 == scalar),
        LOGITS: _shortest(1 / scaling, lambda x: 1 / x == scaling),
        CAP: fields[CAP],
        "post_norm_eps": fields["post_norm_eps"] or fields["rms_norm_eps"],
    } | rope_keys.write_rope(fields)


MUSE_GLIMMER = ModelFamily(
    model_type="muse_glimmer_text",
    transformers_class="",
    defaults=LLAMA_DEFAULTS
    | {
        "vocab_size": 202048,
        "hidden_size": 6656,
        "intermediate_size": 19968,
        "num_hidden_layers": 52,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": 2048,
        "post_norm_eps": 1e-8,
        CAP: 20.0,
        QUERIES: 3.87,
        LOGITS: 0.19611613513818404,
        BASES: None,
        "layer_types": None,
    },
    sizes=(*SIZES, "post_norm_eps", CAP),
    required={"hidden_activation": ("silu",)},
    options={
        "qk_norm_weightless": True,
        "attn_gate_proj": True,
        "norm_plus_one": True,
        "plain_final_norm": True,
        "sandwich_norms": True,
        "embedding_norm": True,
    },
    read=_read,
    write=_write,
    tensors=TENSORS,
    gguf=Gguf(
        architecture="muse-glimmer",
        neighbours=True,
        names=GGUF_NAMES | NORMS_AFTER | {"attention.wg": GGUF_LAYER + "attn_gate.weight"},
        sizes={"attention.sliding_window": "sliding_window", "logit_scale": LOGITS, CAP: CAP},
        implied={"post_norm_eps": 1e-8},
        window_period=PERIOD,
        transforms=dict.fromkeys(("attention_norm", "mlp_norm", *NORMS_AFTER), PLUS_ONE),
        filled={GGUF_LAYER + "attn_q_norm.weight": QUERIES, GGUF_LAYER + "attn_k_norm.weight": ""},
        after_reading=_after_reading,
    ),
)
MUSE_GLIMMER_IMAGES = ImageTextFamily(model_type="muse_glimmer", text_types=("muse_glimmer_text",))
