"""Qwen 2 and 2.5 (a bias on queries, keys and values), and Qwen 3 (norms of each head's queries and keys)."""

from typing import Any

from surojax.families import rope_keys, window_keys
from surojax.families.family import LLAMA_DEFAULTS, Gguf, ModelFamily


def _read(given: dict[str, Any]) -> dict[str, Any]:
    """The `model` fields; a window only with use_sliding_window, and not in the first max_window_layers layers."""
    used = window_keys.is_used(given)
    window = window_keys.said_window(given, used=used)
    without = window_keys.NO_SUCH_NUMBER if used else "use_sliding_window false"
    types = window_keys.said_layer_types(given, window, without)
    if types is None and window:
        layers = given["num_hidden_layers"]
        first = given.get("max_window_layers", 28)
        full = [window_keys.FULL] * max(0, min(first, layers))
        types = full + [window_keys.SLIDING] * (layers - max(0, first))
    return window_keys.window_fields(given, window, types) | rope_keys.read_rope(given)


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    window = window_keys.write_used(fields)
    return (window and window | {"max_window_layers": 0}) | rope_keys.write_rope(fields)


def _write_qwen3(fields: dict[str, Any]) -> dict[str, Any]:
    # Its attention_bias is of all four projections; our option of that name is Qwen 2's, of three.
    return {"head_dim": fields["head_dim"], "attention_bias": False} | _write(fields)


QWEN2 = ModelFamily(
    model_type="qwen2",
    transformers_class="Qwen2ForCausalLM",
    defaults=LLAMA_DEFAULTS
    | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "sliding_window": 4096},
    required={"use_mrope": (False, None)},  # positions of images; Qwen2.5's config.json says it
    options={"attention_bias": True},
    read=_read,
    write=_write,
    gguf=Gguf(),
)
QWEN3 = ModelFamily(
    model_type="qwen3",
    transformers_class="Qwen3ForCausalLM",
    defaults=QWEN2.defaults | {"head_dim": 128},
    options={"qk_norm": True},
    read=_read,
    write=_write_qwen3,
    gguf=Gguf(),
)
