"""Qwen3.5-35B-A3B on one GPU of 24 GB: adapters of attention and delta nets, a base in NF4 in host memory.

    surojax train --config qwen3_5_35b_a3b --config.model_path=MODEL --config.data=chats.jsonl

A token uses 8 of the 256 experts of a layer, and one more that all tokens use. As compiled for an RTX 4090, not run:
13.9 GiB, 16.4 GiB of host memory, and 8.7 s a step of 16,384 tokens; 8.8, 17.6 GiB and 10.7 s of 8,192 of an RTX 4070
(12 GB) with --config.per_device_batch_size=4 --config.offload_residual.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/qwen3_5_35b_a3b"
    c.model.vocab_size = 248320
    c.model.hidden_size = 2048
    c.model.num_experts = 256
    c.model.num_experts_per_tok = 8
    c.model.moe_intermediate_size = 512
    c.model.intermediate_size = 512
    c.model.shared_expert_intermediate_size = 512
    c.model.norm_topk_prob = True
    c.model.num_hidden_layers = 40
    c.model.layer_types = "linear_attention,linear_attention,linear_attention,full_attention"
    c.model.num_attention_heads = 16
    c.model.num_key_value_heads = 2
    c.model.head_dim = 256
    c.model.qk_norm = True
    c.model.norm_plus_one = True
    c.model.attn_output_gate = True
    c.model.rope_theta = 1e7
    c.model.rope_partial_rotary_factor = 0.25
    c.model.rms_norm_eps = 1e-6
    c.sequence_len = 2048
    c.per_device_batch_size = 8
    c.lmhead_chunks = 64
    c.lora = True
    c.lora_rank = 16
    c.lora_alpha = 32.0
    c.qlora_bnb = True
    c.offload_weights = True
    c.learning_rate = 2e-4
    c.warmup_ratio = 0.03
    return c
