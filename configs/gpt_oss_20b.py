"""gpt-oss-20b on one GPU of 24 GB: adapters of the attention, experts frozen in MXFP4 as they are published.

    surojax train --config gpt_oss_20b --config.model_path=MODEL --config.data=chats.jsonl

A token uses 4 of the 32 experts of a layer, so 3.6B of 20.9B parameters compute. What is not of experts is in bfloat16.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/gpt_oss_20b"
    c.model.vocab_size = 201088
    c.model.hidden_size = 2880
    c.model.intermediate_size = 2880
    c.model.num_experts = 32
    c.model.num_experts_per_tok = 4
    c.model.norm_topk_prob = True
    c.model.expert_bias = True
    c.model.hidden_act = "clamped_swiglu"
    c.model.num_hidden_layers = 24
    c.model.num_attention_heads = 64
    c.model.num_key_value_heads = 8
    c.model.head_dim = 64
    c.model.attention_bias = True
    c.model.attention_out_bias = True
    c.model.attention_sinks = True
    c.model.sliding_window = 128
    c.model.sliding_window_pattern = 2
    c.model.rope_theta = 150000.0
    c.model.rope_scaling = "yarn"
    c.model.rope_factor = 32.0
    c.model.rope_original_max_position_embeddings = 4096
    c.model.rope_truncate = False
    c.sequence_len = 2048
    c.per_device_batch_size = 8
    c.lmhead_chunks = 64
    c.lora = True
    c.lora_rank = 16
    c.lora_alpha = 32.0
    c.qlora_mxfp4 = True
    c.learning_rate = 2e-4
    c.warmup_ratio = 0.03
    return c
