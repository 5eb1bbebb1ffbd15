"""Qwen 2 and 2.5 (a bias on queries, keys and values), and Qwen 3 (norms of each head's queries and keys; experts)."""

from typing import Any

from surojax.errors import ConfigError
from surojax.families import rope_keys, window_keys
from surojax.families.family import (
    EXPERT_GGUF_NAMES,
    EXPERT_GGUF_SIZES,
    EXPERT_TENSOR_NAMES,
    LLAMA_DEFAULTS,
    SIZES,
    Gguf,
    ModelFamily,
)
from surojax.families.olmoe import OF_EXPERTS, OF_TRAINING

WITHOUT_EXPERTS = "mlp_only_layers"  # numbers of the layers


def _read(given: dict[str, Any]) -> dict[str, Any]:
    """Reads the `model` fields; layers from max_window_layers on have a window if use_sliding_window is true."""
    used = window_keys.is_used(given)
    window = window_keys.said_window(given, used=used)
    without = window_keys.NO_SUCH_NUMBER if used else window_keys.UNUSED
    types = window_keys.said_layer_types(given, window, without)
    if types is None and window:
        layers = given["num_hidden_layers"]
        first = given.get("max_window_layers", 28)
        types = [window_keys.SLIDING if l >= first else window_keys.FULL for l in range(layers)]
    return window_keys.window_fields(given, window, types) | rope_keys.read_rope(given)


def _read_qwen3_moe(given: dict[str, Any]) -> dict[str, Any]:
    """Reads the `model` fields; transformers 5 writes the number of experts under another key.

    Every layer has the window if use_sliding_window is true: max_window_layers is not read, unlike Qwen 3's.
    """
    written = given["num_local_experts"]
    window = window_keys.read_everywhere(given, used=window_keys.is_used(given))
    fields = window | rope_keys.read_rope(given) | {"first_k_dense_replace": layers_without_experts(given)}
    return fields | ({} if written is None else {"num_experts": written})


def layers_without_experts(given: dict[str, Any]) -> int:
    """Reads how many first layers have no experts. Raises ConfigError if other layers have none."""
    dense = sorted(given[WITHOUT_EXPERTS] or [])
    if dense != list(range(len(dense))):
        raise ConfigError(
            f"model_path: config.json: {WITHOUT_EXPERTS}: expected the first layers, such as [0, 1], got {dense}; "
            "layers without experts between others are not computed"
        )
    return len(dense)


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    window = window_keys.write_used(fields, by_layer=True)
    return (window and window | {"max_window_layers": 0}) | rope_keys.write_rope(fields)


def _write_qwen3(fields: dict[str, Any]) -> dict[str, Any]:
    return _of_heads(fields) | _write(fields)


def _of_heads(fields: dict[str, Any]) -> dict[str, Any]:
    # Qwen 3's attention_bias is of all four projections; our option of that name is Qwen 2's, of three.
    return {"head_dim": fields["head_dim"], "attention_bias": False}


def _write_qwen3_moe(fields: dict[str, Any]) -> dict[str, Any]:
    every_other = {"decoder_sparse_step": 1, WITHOUT_EXPERTS: list(range(fields["first_k_dense_replace"]))}
    widths = {"moe_intermediate_size": fields["moe_intermediate_size"] or fields["intermediate_size"]}
    experts = {name: fields[name] for name in OF_EXPERTS} | widths | every_other
    window = window_keys.write_used(fields, by_layer=False)
    return _of_heads(fields) | experts | window | rope_keys.write_rope(fields)


QWEN2 = ModelFamily(
    model_type="qwen2",
    transformers_class="Qwen2ForCausalLM",
    classifier="Qwen2ForSequenceClassification",
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
    classifier="Qwen3ForSequenceClassification",
    defaults=QWEN2.defaults | {"head_dim": 128},
    options={"qk_norm": True},
    read=_read,
    write=_write_qwen3,
    gguf=Gguf(),
)
QWEN3_MOE = ModelFamily(
    model_type="qwen3_moe",
    transformers_class="Qwen3MoeForCausalLM",
    classifier="Qwen3MoeForSequenceClassification",
    defaults=QWEN3.defaults
    | OF_TRAINING
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_local_experts": None,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        WITHOUT_EXPERTS: None,
    },
    sizes=(*SIZES, *OF_EXPERTS, "moe_intermediate_size"),
    required={"decoder_sparse_step": (1,)},  # all other layers have experts
    options={"qk_norm": True},
    read=_read_qwen3_moe,
    write=_write_qwen3_moe,
    tensors=EXPERT_TENSOR_NAMES,
    gguf=Gguf(
        architecture="qwen3moe",
        names=EXPERT_GGUF_NAMES,
        sizes=EXPERT_GGUF_SIZES | {"expert_feed_forward_length": "moe_intermediate_size"},
        implied={"norm_topk_prob": True},
    ),
)
