"""llama7b on 1 x NVIDIA GeForce RTX 4090, as surojax.fit found it on 2026-11-25.

    python -m surojax.train --config llama7b_1xrtx4090.py

Needs 20.9 GiB on each GPU and 63.6 GiB of host memory; predicted 3,868 ms a step, 1,059 tokens/s per GPU.
Set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment: JAX takes 0.75 by itself.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/llama7b"
    c.sequence_len = 2048
    c.per_device_batch_size = 2
    c.model.hidden_size = 4096
    c.model.intermediate_size = 11008
    c.model.num_hidden_layers = 32
    c.model.num_attention_heads = 32
    c.model.num_key_value_heads = 32
    c.accum_dtype = "bfloat16"
    c.opt_m_dtype = "bfloat16"
    c.opt_v_dtype = "bfloat16"
    c.offload_optimizer = True
    c.offload_master = True
    c.offload_grads = True
    c.offload_weights = True
    c.device_memory = 11.0
    c.recompute_block = False
    c.recompute_norm = True
    c.recompute_ffn = True
    c.recompute_att = True
    c.overlap_update = True
    c.warmup_ratio = 0.03
    return c
