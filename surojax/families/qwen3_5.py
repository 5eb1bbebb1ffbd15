"""Qwen3.5, dense: gated delta nets, and every few layers attention with a gate (models/kinds/gated_delta.py).

Files of models with images have the language model's tensors under `model.language_model.`; `model.visual.` is the
image encoder, and `mtp.` predicts further tokens. Neither is trained.
"""

from typing import Any

from surojax.errors import ConfigError
from surojax.families import mixer_keys, rope_keys
from surojax.families.family import LLAMA_DEFAULTS, SIZES, TENSOR_NAMES, ImageTextFamily, ModelFamily, in_safetensors
from surojax.families.rope_keys import PARTIAL
from surojax.models.decoder_config import ATTENTION, DELTA
from surojax.models.kinds.gated_delta import GatedDelta

INTERVAL = "full_attention_interval"
OF_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
# Three positions of a token, which are equal in a text.
OF_IMAGES = ("mrope_section", "mrope_interleaved")


def _layer_types(given: dict[str, Any]) -> list[str]:
    """Reads each layer's type: `layer_types`, or attention every few layers."""
    types = given.get("layer_types")
    if types is None:
        every = given[INTERVAL]
        if every < 1:
            raise ConfigError(f"model_path: config.json: {INTERVAL}: expected 1 or more, got {every}; fetch it again")
        types = [DELTA if (l + 1) % every else ATTENTION for l in range(given["num_hidden_layers"])]
    return types


def _read(given: dict[str, Any]) -> dict[str, Any]:
    types = _layer_types(given)
    fields = {"layer_types": mixer_keys.read_layer_types(given, types, (ATTENTION, DELTA))}
    fields |= rope_keys.read_partial_rope(given, OF_IMAGES)
    return fields if DELTA in types else fields | OF_DELTA  # without such layers their sizes say nothing


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    own = {
        "head_dim": fields["head_dim"],
        "attention_bias": False,
        "layer_types": mixer_keys.types_of(fields),
        PARTIAL: fields[f"rope_{PARTIAL}"],
    }
    return own | {name: fields[name] for name in OF_DELTA} | rope_keys.write_rope(fields)


QWEN3_5 = ModelFamily(
    model_type="qwen3_5_text",
    transformers_class="Qwen3_5ForCausalLM",
    classifier="Qwen3_5TextForSequenceClassification",
    defaults=LLAMA_DEFAULTS
    | OF_DELTA
    | {
        "vocab_size": 248320,
        "intermediate_size": 12288,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        PARTIAL: 0.25,
        INTERVAL: 4,
        "mtp_num_hidden_layers": 0,
        "mtp_use_dedicated_embeddings": False,
    },
    sizes=(*SIZES, *OF_DELTA),
    required={"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",), "sliding_window": (None,)},
    options={"qk_norm": True, "norm_plus_one": True, "attn_output_gate": True},
    read=_read,
    write=_write,
    tensors=TENSOR_NAMES | in_safetensors(GatedDelta),
    further_tensors="mtp.",
)
QWEN3_5_IMAGES = ImageTextFamily(model_type="qwen3_5", text_types=("qwen3_5_text",))
