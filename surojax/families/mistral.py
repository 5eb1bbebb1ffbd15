"""Mistral (a window in every layer), Ministral 3 (queries that grow with their position), and what is in Mistral 3."""

from typing import Any

from surojax.errors import ConfigError
from surojax.families import rope_keys, window_keys
from surojax.families.family import LLAMA_DEFAULTS, Gguf, ImageTextFamily, ModelFamily


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

# In rope_parameters; the `model` fields have "rope_" before these names.
BETA, ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"


def read_growing(given: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Reads the `model` fields of a rotary embedding with queries that grow. rope: `rope_parameters`.

    Raises ConfigError if it lacks what transformers needs.
    """
    rope = {key: value for key, value in rope.items() if key != "max_position_embeddings"}  # config.json says it too
    for key in (BETA, ORIGINAL):
        if rope.get(key) is None:
            raise ConfigError(
                f"model_path: config.json: rope_parameters: expected {key}, without which transformers does not "
                f"compute {given['model_type']}, got none; add it ({BETA} is 0 for queries that do not grow)"
            )
    beta = rope.pop(BETA)
    original = rope[ORIGINAL]
    if rope.get("rope_type", rope.get("type", "default")) in ("default", "linear"):
        del rope[ORIGINAL]  # of the queries alone
    grow = {f"rope_{BETA}": beta, f"rope_{ORIGINAL}": original} if beta else {}
    return rope_keys.rope_fields(given, rope) | grow


def _read_ministral3(given: dict[str, Any]) -> dict[str, Any]:
    return window_keys.read_everywhere(given) | read_growing(given, rope_keys.said(given))


def _write_ministral3(fields: dict[str, Any]) -> dict[str, Any]:
    keys = _write(fields) | {"pad_token_id": None}  # the class's own may be beyond the vocabulary
    beta = fields[f"rope_{BETA}"]
    if beta and keys["rope_scaling"]:
        keys["rope_scaling"] |= {BETA: beta}
    return keys


TEMPERATURE, STRETCH = "temperature_scale", "yarn_log_multiplier"  # of GGUF files; no keys of config.json


def _before_writing(config: dict[str, Any]) -> dict[str, Any]:
    """Adds what GGUF files say apart from the rotary embedding."""
    return config | {TEMPERATURE: (config["rope_scaling"] or {}).get(BETA), STRETCH: None}


def _after_reading(config: dict[str, Any]) -> dict[str, Any]:
    """Puts the growth of queries into the rotary embedding, and what llama.cpp divides YaRN's factor by.

    Raises ConfigError for queries that grow by positions that no rotary embedding counts.
    """
    config = dict(config)
    beta, stretch, scaling = config.pop(TEMPERATURE), config.pop(STRETCH), config["rope_scaling"]
    if not scaling or scaling["rope_type"] != "yarn":
        raise ConfigError(
            "model_path: rope.scaling.type: expected yarn for mistral3, whose queries grow by its original length, got "
            f"{scaling and scaling['rope_type']}; fetch the model as safetensors"
        )
    mscales = {"mscale": 1.0, "mscale_all_dim": stretch} if stretch else {}
    return config | {"rope_scaling": scaling | mscales | {BETA: beta}}


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
    gguf=Gguf(
        architecture="mistral3",
        neighbours=True,
        sizes={"attention.temperature_scale": TEMPERATURE, "rope.scaling.yarn_log_multiplier": STRETCH},
        defaults={"attention.temperature_scale": 0.0, "rope.scaling.yarn_log_multiplier": 0.0},
        before_writing=_before_writing,
        after_reading=_after_reading,
    ),
)


MISTRAL3 = ImageTextFamily(model_type="mistral3", text_types=("mistral", "ministral3", "mistral4"))
