"""Qwen3-30B-A3B on one GPU of 24 GB: adapters of the attention, experts and all else frozen in NF4.

    surojax train --config qwen3_30b_a3b --config.model_path=MODEL --config.data=chats.jsonl

A token uses 8 of the 128 experts of a layer, so 3.3B of 30.5B parameters compute. All of a step's tokens are in one
microbatch: the more tokens an expert has, the fewer times its matrices are read.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/qwen3_30b_a3b"
    c.model.vocab_size = 151936
    c.model.hidden_size = 2048
    c.model.intermediate_size = 6144
    c.model.num_experts = 128
    c.model.num_experts_per_tok = 8
    c.model.moe_intermediate_size = 768
    c.model.norm_topk_prob = True
    c.model.num_hidden_layers = 48
    c.model.num_attention_heads = 32
    c.model.num_key_value_heads = 4
    c.model.head_dim = 128
    c.model.qk_norm = True
    c.model.rms_norm_eps = 1e-6
    c.model.rope_theta = 1e6
    c.sequence_len = 2048
    c.per_device_batch_size = 8
    c.lmhead_chunks = 64
    c.lora = True
    c.lora_rank = 16
    c.lora_alpha = 32.0
    c.qlora_bnb = True
    c.learning_rate = 2e-4
    c.warmup_ratio = 0.03
    return c
