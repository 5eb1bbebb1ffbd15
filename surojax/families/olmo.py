"""OLMo 2 and 3: norms on the outputs of attention and MLP alone, and of queries and keys over all heads together.

OLMo 3 has layers with a window, whose rotary embedding is never stretched, and every few layers one without.
"""

from typing import Any

from surojax.errors import ConfigError
from surojax.families import rope_keys, window_keys
from surojax.families.family import (
    GGUF_NAMES,
    LAYER,
    LLAMA_DEFAULTS,
    NORMS_AFTER,
    TENSOR_NAMES,
    WITHOUT_WINDOW,
    Gguf,
    ModelFamily,
)

OPTIONS: dict[str, Any] = {"input_norms": False, "sandwich_norms": True, "qk_norm_whole": True}
INPUT_NORMS = ("attention_norm", "mlp_norm")  # norms that these models lack
TENSORS = {ours: theirs for ours, theirs in TENSOR_NAMES.items() if ours not in INPUT_NORMS} | {
    "attention_out_norm": LAYER + "post_attention_layernorm.weight",
    "mlp_out_norm": LAYER + "post_feedforward_layernorm.weight",
}
LOCAL_BASE = "rope_local_base_freq"
THETA = 500000.0  # base of layers with a window, unless config.json has one for them
PERIOD = 4  # one layer of so many has no window, unless config.json says which
WINDOW = 4096
DEFAULTS = LLAMA_DEFAULTS | {"vocab_size": 50304, "rms_norm_eps": 1e-5}


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    # The classes' own pad_token_id may be beyond the vocabulary.
    own = {"head_dim": fields["head_dim"], "attention_bias": False, "pad_token_id": None}
    return own | rope_keys.write_rope(fields)


def _read_olmo3(given: dict[str, Any]) -> dict[str, Any]:
    window = window_keys.need_window(given, window_keys.said_window(given))
    types = window_keys.said_layer_types(given, window)
    if types is None:
        types = window_keys.every_nth_full(given["num_hidden_layers"], PERIOD)
    fields = window_keys.window_fields(given, window, types)
    base, rope = rope_keys.by_layer_type(given, THETA)
    fields |= rope_keys.rope_fields(given, rope)
    is_same = fields["rope_scaling"] == "none" and base == fields["rope_theta"]
    return fields | {LOCAL_BASE: 0.0 if is_same or not fields["sliding_window"] else float(base)}


def _write_olmo3(fields: dict[str, Any]) -> dict[str, Any]:
    window = {
        "sliding_window": fields["sliding_window"] or WINDOW,
        "layer_types": window_keys.write_layer_types(fields),
    }
    own = _write(fields)
    full = rope_keys.joined_keys(own | {"rope_theta": fields["rope_theta"]})
    sliding = {"rope_type": "default", "rope_theta": fields[LOCAL_BASE] or fields["rope_theta"]}
    return own | window | {"rope_parameters": {window_keys.FULL: full, window_keys.SLIDING: sliding}}


def _before_writing(config: dict[str, Any]) -> dict[str, Any]:
    if config["tie_word_embeddings"]:
        raise ConfigError("tie_word_embeddings: llama.cpp has no olmo2 without a head of its own")
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise ConfigError("head_dim: llama.cpp's olmo2 takes hidden_size / num_attention_heads")
    slides = window_keys.SLIDING in config["layer_types"]
    return config if slides else config | {"sliding_window": 0}


def _after_reading(config: dict[str, Any]) -> dict[str, Any]:
    # llama.cpp rotates layers with a window by the same base as the others.
    sliding = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    ropes = {window_keys.FULL: rope_keys.joined_keys(config), window_keys.SLIDING: sliding}
    own = {"rope_parameters": ropes, "rope_scaling": None}
    return config | own | {"sliding_window": config["sliding_window"] or WINDOW}


OLMO2 = ModelFamily(
    model_type="olmo2",
    transformers_class="Olmo2ForCausalLM",
    classifier="Olmo2ForSequenceClassification",
    defaults=DEFAULTS,
    required=WITHOUT_WINDOW,
    options=OPTIONS,
    write=_write,
    tensors=TENSORS,
)
OLMO3 = ModelFamily(
    model_type="olmo3",
    transformers_class="Olmo3ForCausalLM",
    classifier="Olmo3ForSequenceClassification",
    defaults=DEFAULTS | {"rope_theta": THETA, "sliding_window": WINDOW},
    options=OPTIONS,
    read=_read_olmo3,
    write=_write_olmo3,
    both_ropes=lambda config: rope_keys.both_by_layer_type(config, THETA),
    tensors=TENSORS,
    gguf=Gguf(  # for OLMo 2 too, whose layers have no window
        architecture="olmo2",
        names={ours: theirs for ours, theirs in GGUF_NAMES.items() if ours not in INPUT_NORMS} | NORMS_AFTER,
        sizes={"attention.sliding_window": "sliding_window"},
        defaults={"attention.sliding_window": 0},
        window_period=PERIOD,
        before_writing=_before_writing,
        after_reading=_after_reading,
    ),
)
