"""Gemma 4 31B, adapters of all matrices on a frozen base in NF4, on one GPU of 24 GB.

    surojax train --config gemma4_31b --config.model_path=MODEL --config.data=chats.jsonl

Five of six layers have a window of 1,024 tokens and heads of 256; the others heads of 512, which no flash attention
takes: XLA computes their attention, with S x S scores in memory. As compiled for an RTX 4090, not run: 21.4 GiB,
1.2 GiB of host memory, and 29.5 s a step of 16,384 tokens; set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/gemma4_31b"
    c.model.vocab_size = 262144
    c.model.hidden_size = 5376
    c.model.intermediate_size = 21504
    c.model.num_hidden_layers = 60
    c.model.layer_types = ",".join(["sliding_attention"] * 5 + ["global_attention"])
    c.model.num_attention_heads = 32
    c.model.num_key_value_heads = 16
    c.model.head_dim = 256
    c.model.global_head_dim = 512
    c.model.num_global_key_value_heads = 4
    c.model.attention_k_eq_v = True
    c.model.sliding_window = 1024
    c.model.rope_theta = 1e6
    c.model.rope_scaling = "proportional"
    c.model.rope_partial_rotary_factor = 0.25
    c.model.rope_local_base_freq = 1e4
    c.model.rms_norm_eps = 1e-6
    c.model.tie_word_embeddings = True
    c.model.qk_norm = True
    c.model.v_norm_weightless = True
    c.model.sandwich_norms = True
    c.model.layer_scalar = True
    c.model.scale_embedding = True
    c.model.query_pre_attn_scalar = 1.0
    c.model.final_logit_softcapping = 30.0
    c.model.hidden_act = "gelu_pytorch_tanh"
    c.lora = True
    c.qlora_bnb = True
    c.sequence_len = 2048
    c.gradient_accumulation_steps = 8
    c.lmhead_chunks = 32
    c.offload_residual = True
    c.learning_rate = 2e-4
    c.warmup_ratio = 0.03
    c.weight_decay = 0.0
    return c
