"""Hugging Face's families of models as tables: their keys of `config.json`, what these imply, and names of tensors.

`huggingface.py` reads a config.json by them. A key that is in none of these tables is refused.
"""

from typing import Any

import jax

# The values that transformers' config classes give to keys that config.json leaves out.
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as query heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "sliding_window": None,
}
MISTRAL = LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096}
MINISTRAL3 = MISTRAL | {
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
        "llama_4_scaling_beta": 0.1,
    },
}
QWEN2 = LLAMA | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "sliding_window": 4096}
SMOLLM3 = LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
    "no_rope_layers": None,  # every no_rope_layer_interval-th layer
    "no_rope_layer_interval": 4,
}
GEMMA2 = LLAMA | {
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
}
GEMMA3 = GEMMA2 | {
    "vocab_size": 262208,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "ministral3": MINISTRAL3,
    "qwen2": QWEN2,
    "qwen3": QWEN2 | {"head_dim": 128},
    "smollm3": SMOLLM3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
}
# The `model` fields that a family implies.
GEMMA = {"norm_plus_one": True, "sandwich_norms": True, "scale_embedding": True, "hidden_act": "gelu_pytorch_tanh"}
IMPLIED: dict[str, dict[str, Any]] = {
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"qk_norm": True},
}
# Keys that must have one of these values, since nothing else is computed here; and those of single families.
REQUIRED: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, None),
}
OF_GEMMA = {
    "hidden_act": ("gelu_pytorch_tanh",),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False, None),
}
REQUIRED_OF: dict[str, dict[str, tuple]] = {
    "llama": {"sliding_window": (None,)},  # transformers does not compute it
    "qwen2": {"use_mrope": (False, None)},  # positions of images; Qwen2.5's config.json says it
    "gemma2": OF_GEMMA | {"sliding_window_size": (4096,)},  # in gemma-2-9b; transformers does not read it
    "gemma3_text": OF_GEMMA | {"attn_logit_softcapping": (None,)},  # transformers does not compute it
}
# Keys that do not change the arithmetic, or that are read for another key.
OTHERS = frozenset(
    "architectures model_type torch_dtype dtype transformers_version use_cache max_position_embeddings _name_or_path "
    "bos_token_id eos_token_id pad_token_id rope_parameters rope_scaling partial_rotary_factor use_sliding_window "
    "max_window_layers layer_types output_attentions output_hidden_states return_dict chunk_size_feed_forward "
    "is_encoder_decoder id2label label2id problem_type pretraining_tp cache_implementation "
    "_sliding_window_pattern quantization_config _attn_implementation_autoset unsloth_version unsloth_fixed".split()
)
# Keys that are `model` fields with the same name and meaning; null means 0.
SIZES = (
    *(name for name in LLAMA if name not in ("rope_theta", "sliding_window")),
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
# Types of rotary embeddings that are not computed, and why.
REFUSED_ROPE = {
    "dynamic": ", whose frequencies follow the length of the text",
    "longrope": ", which has other frequencies for long texts than for short ones",
}

# Our names of tensors, and theirs; `{l}` is the number of the layer.
LAYER = "model.layers.{l}."
NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": LAYER + "input_layernorm.weight",
    "mlp_norm": LAYER + "post_attention_layernorm.weight",
    "attention.wq": LAYER + "self_attn.q_proj.weight",
    "attention.wk": LAYER + "self_attn.k_proj.weight",
    "attention.wv": LAYER + "self_attn.v_proj.weight",
    "attention.wo": LAYER + "self_attn.o_proj.weight",
    "attention.bq": LAYER + "self_attn.q_proj.bias",
    "attention.bk": LAYER + "self_attn.k_proj.bias",
    "attention.bv": LAYER + "self_attn.v_proj.bias",
    "attention.q_norm": LAYER + "self_attn.q_norm.weight",
    "attention.k_norm": LAYER + "self_attn.k_norm.weight",
    "mlp.w_gate": LAYER + "mlp.gate_proj.weight",
    "mlp.w_up": LAYER + "mlp.up_proj.weight",
    "mlp.w_down": LAYER + "mlp.down_proj.weight",
}
SANDWICH_NAMES = NAMES | {
    "attention_out_norm": LAYER + "post_attention_layernorm.weight",
    "mlp_norm": LAYER + "pre_feedforward_layernorm.weight",
    "mlp_out_norm": LAYER + "post_feedforward_layernorm.weight",
}


def tensor_names(params) -> dict[str, str]:
    """The names of tensors in a model with these `Param`s; Gemma's norms have others."""
    ours = {param.name for param in jax.tree.leaves(params)}
    return SANDWICH_NAMES if "attention_out_norm" in ours else NAMES
