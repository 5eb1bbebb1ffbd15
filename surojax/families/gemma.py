"""Gemma 2 and 3: norms also after attention and MLP, softcaps, and layers with and without a window.

Gemma 3's layers with a window have a rotary embedding of their own; it is also part of models with an image encoder.
"""

from collections.abc import Callable
from typing import Any

from surojax.errors import ConfigError
from surojax.families import gemma_gguf, rope_keys, window_keys
from surojax.families.family import LAYER, LLAMA_DEFAULTS, SIZES, TENSOR_NAMES, ImageTextFamily, ModelFamily

ACTIVATION = "gelu_pytorch_tanh"
OPTIONS = {"norm_plus_one": True, "sandwich_norms": True, "scale_embedding": True, "hidden_act": ACTIVATION}
OWN_SIZES = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
REQUIRED = {
    "hidden_act": (ACTIVATION,),
    "hidden_activation": (ACTIVATION,),
    "use_bidirectional_attention": (False, None),
}
TENSORS = TENSOR_NAMES | {
    "attention_out_norm": LAYER + "post_attention_layernorm.weight",
    "mlp_norm": LAYER + "pre_feedforward_layernorm.weight",
    "mlp_out_norm": LAYER + "post_feedforward_layernorm.weight",
}


def _read_window(given: dict[str, Any], patterns: str, is_computed: Callable[[int], bool]) -> dict[str, int]:
    """Reads the `model` fields of the window; without layer_types, every sliding_window_pattern-th layer has no window.

    patterns, is_computed: the numbers that transformers computes, in words and as a function.
    """
    window = window_keys.need_window(given, window_keys.said_window(given))
    types = window_keys.said_layer_types(given, window)
    if types is None:
        n = given["sliding_window_pattern"]
        if not n or not is_computed(n):
            raise ConfigError(
                f"model_path: config.json: sliding_window_pattern: expected {patterns}, got {n!r}, which transformers "
                f"does not compute for {given['model_type']}; say layer_types in its place"
            )
        types = window_keys.every_nth_full(given["num_hidden_layers"], n)
    return window_keys.window_fields(given, window, types)


CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def check_caps(given: dict[str, Any], *keys: str) -> None:
    """Raises ConfigError for a softcap of 0, by which transformers divides."""
    for key in keys:
        if given[key] == 0:
            raise ConfigError(
                f"model_path: config.json: {key}: expected more than 0, or null for none, got {given[key]!r}, by "
                "which transformers divides; set it to null if the model was trained without it"
            )


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "head_dim": fields["head_dim"],
        "attention_bias": False,
        "pad_token_id": None,  # the classes' own may be beyond the vocabulary
        "hidden_act": ACTIVATION,
        "hidden_activation": ACTIVATION,
        "query_pre_attn_scalar": fields["query_pre_attn_scalar"],
        "final_logit_softcapping": fields["final_logit_softcapping"] or None,
        "sliding_window": fields["sliding_window"] or 4096,  # transformers makes a mask of it even if no layer has one
        "layer_types": window_keys.write_layer_types(fields),
    } | rope_keys.write_rope(fields)


# --- Gemma 2 ----------------------------------------------------------------------------------------------------------


def _read_gemma2(given: dict[str, Any]) -> dict[str, Any]:
    check_caps(given, *CAPS)
    window = _read_window(given, "2", lambda n: n == 2)  # transformers has 2, whatever config.json says
    return window | rope_keys.read_rope(given)


def _write_gemma2(fields: dict[str, Any]) -> dict[str, Any]:
    return _write(fields) | {"attn_logit_softcapping": fields["attn_logit_softcapping"] or None}


GEMMA2 = ModelFamily(
    model_type="gemma2",
    transformers_class="Gemma2ForCausalLM",
    classifier="Gemma2ForSequenceClassification",
    defaults=LLAMA_DEFAULTS
    | {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    sizes=SIZES + OWN_SIZES,
    required=REQUIRED | {"sliding_window_size": (4096,)},  # in gemma-2-9b; transformers does not read it
    options=OPTIONS,
    read=_read_gemma2,
    write=_write_gemma2,
    tensors=TENSORS,
    gguf=gemma_gguf.OF_GEMMA2,
)

# --- Gemma 3 ----------------------------------------------------------------------------------------------------------

LOCAL_BASE = "rope_local_base_freq"  # in transformers 4 the base of layers with a window


def _read_gemma3(given: dict[str, Any]) -> dict[str, Any]:
    check_caps(given, *CAPS)
    window_fields = _read_window(given, "1 or more", lambda n: True)
    base, rope = rope_keys.by_layer_type(given, given[LOCAL_BASE])
    local = {LOCAL_BASE: float(base) if window_fields["sliding_window"] else 0.0}
    return window_fields | local | rope_keys.rope_fields(given, rope)


def _write_gemma3(fields: dict[str, Any]) -> dict[str, Any]:
    return _write(fields) | {LOCAL_BASE: fields[LOCAL_BASE] or fields["rope_theta"]}


def _both_ropes(config: dict[str, Any]) -> dict[str, Any]:
    of_class = GEMMA3.defaults[LOCAL_BASE] if len(rope_keys.joined_keys(config)) > 1 else None  # beside other keys
    both = rope_keys.both_by_layer_type(config, config.get(LOCAL_BASE, of_class))
    base = (config.get("rope_parameters") or {}).get(rope_keys.SLIDING, {}).get("rope_theta")
    return both | ({} if base is None else {LOCAL_BASE: base})


GEMMA3 = ModelFamily(
    model_type="gemma3_text",
    transformers_class="Gemma3ForCausalLM",
    classifier="Gemma3TextForSequenceClassification",
    defaults=GEMMA2.defaults
    | {
        "vocab_size": 262208,
        "rope_theta": 1e6,
        LOCAL_BASE: 10000.0,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    sizes=SIZES + OWN_SIZES,
    required=REQUIRED | {"attn_logit_softcapping": (None,)},  # transformers does not compute it
    options=OPTIONS | {"qk_norm": True},
    read=_read_gemma3,
    write=_write_gemma3,
    both_ropes=_both_ropes,
    tensors=TENSORS,
    gguf=gemma_gguf.OF_GEMMA3,
)


def _check_text(text: dict[str, Any]) -> None:
    if text.get("final_logit_softcapping"):
        raise ConfigError(
            "model_path: config.json: text_config: expected final_logit_softcapping None, got "
            f"{text['final_logit_softcapping']!r}, which transformers does not compute for gemma3; remove it if the "
            "model was trained without it"
        )


GEMMA3_IMAGES = ImageTextFamily(model_type="gemma3", text_types=("gemma3_text",), check_text=_check_text)
