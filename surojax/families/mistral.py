"""Mistral (a window in every layer), Ministral 3 (queries that grow with their position), and both in Mistral 3."""

from typing import Any

from surojax.errors import ConfigError
from surojax.families import rope_keys, window_keys
from surojax.families.family import LLAMA_DEFAULTS, ImageTextFamily, ModelFamily


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    window = {"sliding_window": fields["sliding_window"] or None}
    return {"head_dim": fields["head_dim"]} | window | rope_keys.write_rope(fields)


MISTRAL = ModelFamily(
    model_type="mistral",
    transformers_class="MistralForCausalLM",
    classifier="MistralForSequenceClassification",
    defaults=LLAMA_DEFAULTS | {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096},
    write=_write,
)

BETA = "llama_4_scaling_beta"  # in rope_parameters; the `model` field is rope_llama_4_scaling_beta


def _read_ministral3(given: dict[str, Any]) -> dict[str, Any]:
    window = window_keys.said_window(given)
    types = window_keys.said_layer_types(given, window)
    if types and window and window_keys.FULL in types:
        raise ConfigError(
            "model_path: config.json: layer_types: expected sliding_attention in every layer, got full_attention, "
            "which transformers does not read for ministral3; remove it if every layer has the window"
        )
    rope = rope_keys.said(given)
    rope.pop("max_position_embeddings", None)  # says again what config.json says
    beta = rope.pop(BETA, 0.0)
    fields = window_keys.window_fields(given, window, types) | rope_keys.rope_fields(given, rope)
    if beta:
        original = rope_keys.original_length(given, rope)
        fields |= {f"rope_{BETA}": beta, "rope_original_max_position_embeddings": original}
    return fields


def _write_ministral3(fields: dict[str, Any]) -> dict[str, Any]:
    keys = _write(fields) | {"pad_token_id": None}  # the class's own may be beyond the vocabulary
    beta = fields[f"rope_{BETA}"]
    if beta and keys["rope_scaling"]:
        keys["rope_scaling"] |= {BETA: beta}
    return keys


MINISTRAL3 = ModelFamily(
    model_type="ministral3",
    transformers_class="Ministral3ForCausalLM",
    classifier="Ministral3ForSequenceClassification",
    defaults=MISTRAL.defaults
    | {
        "vocab_size": 131072,
        "num_hidden_layers": 34,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            BETA: 0.1,
        },
    },
    read=_read_ministral3,
    write=_write_ministral3,
)


def _check_text(text: dict[str, Any]) -> None:
    types = text.get("layer_types")
    if text["model_type"] == "mistral" and types and text.get("sliding_window", 4096) and window_keys.FULL in types:
        raise ConfigError(
            "model_path: config.json: text_config: layer_types: expected sliding_attention in every layer, got "
            "full_attention, which transformers does not read for mistral3; remove it if every layer has the window"
        )


MISTRAL3 = ImageTextFamily(model_type="mistral3", text_types=("mistral", "ministral3"), check_text=_check_text)
