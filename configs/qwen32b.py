"""Qwen2.5-32B sizes (32.8B parameters): fp32 master weights; bf16 work weights, moments and accumulators.

    surojax plan --config qwen32b --gpu rtx4090 --config.gpus=4 --config.zero_level=3 \
        --config.shard_outer --config.offload_residual --config.offload_optimizer --config.offload_master \
        --config.offload_grads --config.offload_weights

The same settings with `surojax.train` fit four GPUs of 8 GB, as far as the device memory of a step goes: 4.7 GiB on
each, 93 GiB of host memory for each.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/qwen32b"
    c.model.vocab_size = 152064
    c.model.hidden_size = 5120
    c.model.intermediate_size = 27648
    c.model.num_hidden_layers = 64
    c.model.num_attention_heads = 40
    c.model.num_key_value_heads = 8
    c.model.attention_bias = True
    c.model.rope_theta = 1e6
    c.model.rms_norm_eps = 1e-6
    c.sequence_len = 2048
    c.per_device_batch_size = 2
    c.lmhead_chunks = 16
    c.accum_dtype = "bfloat16"
    c.opt_m_dtype = "bfloat16"
    c.opt_v_dtype = "bfloat16"
    c.learning_rate = 1e-4
    c.warmup_ratio = 0.03
    return c
