"""Llama 1 to 3: the decoder with none of its options."""

from typing import Any

from surojax.families import rope_keys
from surojax.families.family import LLAMA_DEFAULTS, WITHOUT_WINDOW, Gguf, ModelFamily


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    return {"head_dim": fields["head_dim"], "attention_bias": False, "mlp_bias": False} | rope_keys.write_rope(fields)


LLAMA = ModelFamily(
    model_type="llama",
    transformers_class="LlamaForCausalLM",
    classifier="LlamaForSequenceClassification",
    defaults=LLAMA_DEFAULTS,
    required=WITHOUT_WINDOW,
    write=_write,
    gguf=Gguf(
        neighbours=True,
        llama3_rope={"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ),
)
