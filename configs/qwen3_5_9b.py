"""Qwen3.5-9B, all weights, on one GPU of 24 GB with 128 GiB of host memory: everything offloaded.

    surojax train --config qwen3_5_9b --config.model_path=MODEL --config.data=chats.jsonl

Three of four layers are gated delta nets. As compiled for an RTX 4090, not run: 19.7 GiB, 100.5 GiB of host memory, and
20.4 s a step of 32,768 tokens. With 64 GiB and disks, set offload_optimizer, offload_master and offload_grads to
"nvme", nvme_path to a folder of each disk, microbatches_per_fetch to 1, per_device_batch_size and
gradient_accumulation_steps to 4: 12.8 GiB, 28.4 GiB of host memory, and 27.0 s with two disks of 7 and 6 GB/s.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/qwen3_5_9b"
    c.model.vocab_size = 248320
    c.model.hidden_size = 4096
    c.model.intermediate_size = 12288
    c.model.num_hidden_layers = 32
    c.model.layer_types = "linear_attention,linear_attention,linear_attention,full_attention"
    c.model.num_attention_heads = 16
    c.model.num_key_value_heads = 4
    c.model.head_dim = 256
    c.model.qk_norm = True
    c.model.norm_plus_one = True
    c.model.attn_output_gate = True
    c.model.rope_theta = 1e7
    c.model.rope_partial_rotary_factor = 0.25
    c.model.rms_norm_eps = 1e-6
    c.sequence_len = 2048
    c.per_device_batch_size = 2
    c.gradient_accumulation_steps = 8
    c.microbatches_per_fetch = 8
    c.lmhead_chunks = 16
    c.accum_dtype = "bfloat16"
    c.opt_m_dtype = "bfloat16"
    c.opt_v_dtype = "bfloat16"
    c.offload_residual = True
    c.offload_optimizer = True
    c.offload_master = True
    c.offload_grads = True
    c.offload_weights = True
    c.overlap_update = True
    c.learning_rate = 1e-5
    c.warmup_ratio = 0.03
    return c
