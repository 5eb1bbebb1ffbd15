"""SmolLM 3: every n-th layer has no rotary embedding."""

from typing import Any

from surojax.errors import ConfigError
from surojax.families import rope_keys, window_keys
from surojax.families.family import LLAMA_DEFAULTS, Gguf, ModelFamily


def _read(given: dict[str, Any]) -> dict[str, Any]:
    return _read_window(given) | rope_keys.read_rope(given) | _read_layers_without_rope(given)


def _read_window(given: dict[str, Any]) -> dict[str, int]:
    """Reads the `model` fields of the window; `layer_types` takes precedence over use_sliding_window.

    Without layer_types, the layers without rotary embedding have the window, as in transformers' masks.
    """
    used = window_keys.is_used(given)
    window = window_keys.said_window(given, used=used or given.get("layer_types") is not None)
    without = window_keys.NO_SUCH_NUMBER if used else window_keys.UNUSED
    types = window_keys.said_layer_types(given, window, without)
    if types is None:
        types = [window_keys.SLIDING if without else window_keys.FULL for without in _is_without_rope(given)]
    return window_keys.window_fields(given, window, types)


def _read_layers_without_rope(given: dict[str, Any]) -> dict[str, int]:
    layers = given["num_hidden_layers"]
    without = _is_without_rope(given)
    for n in range(layers + 1):
        if without == [n > 0 and (l + 1) % n == 0 for l in range(layers)]:
            return {"no_rope_layer_interval": n}
    raise ConfigError(
        "model_path: config.json: no_rope_layers: expected 0 for every n-th layer and 1 for the others, got "
        f"{given['no_rope_layers']}"
    )


def _is_without_rope(given: dict[str, Any]) -> list[bool]:
    """Returns for each layer True if the layer has no rotary embedding."""
    layers = given["num_hidden_layers"]
    interval = given["no_rope_layer_interval"]
    rotated = given["no_rope_layers"]  # 1 for a layer with rotary embedding
    if rotated is None:
        if interval < 1:
            raise ConfigError(
                "model_path: config.json: no_rope_layer_interval: expected 1 or more without no_rope_layers, got "
                f"{interval}, by which transformers divides; say no_rope_layers, 1 for each layer with rotary embedding"
            )
        return [(l + 1) % interval == 0 for l in range(layers)]
    return [not has for has in rotated[:layers]]


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    interval = fields["no_rope_layer_interval"]
    layers = range(1, fields["num_hidden_layers"] + 1)
    keys = {
        "head_dim": fields["head_dim"],
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": None,  # the class's own may be beyond the vocabulary
        "no_rope_layers": [0 if interval and n % interval == 0 else 1 for n in layers],
        "no_rope_layer_interval": interval,
    }
    return keys | window_keys.write_used(fields, by_layer=True) | rope_keys.write_rope(fields)


SMOLLM3 = ModelFamily(
    model_type="smollm3",
    transformers_class="SmolLM3ForCausalLM",
    classifier="SmolLM3ForSequenceClassification",
    defaults=LLAMA_DEFAULTS
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "no_rope_layers": None,  # every no_rope_layer_interval-th layer
        "no_rope_layer_interval": 4,
    },
    read=_read,
    write=_write,
    gguf=Gguf(neighbours=True, implied={"no_rope_layer_interval": 4}),  # which llama.cpp has in its code
)
