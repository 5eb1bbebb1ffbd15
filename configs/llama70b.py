"""Llama-3-70B sizes (70.6B parameters): fp32 master weights; bf16 work weights, moments and accumulators.

    surojax plan --config llama70b --gpu h100 --config.gpus=8 --config.zero_level=3 \
        --config.shard_outer --config.offload_residual --config.offload_optimizer --config.offload_master

The same settings with `surojax.train` fit eight GPUs of 80 GB: 38 GiB on each, 71 GiB of host memory for each. With
`offload_grads` and `offload_weights` as well they fit eight GPUs of 12 GB, as far as the device memory of a step goes:
6.1 GiB on each, 103 GiB of host memory for each.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/llama70b"
    c.model.vocab_size = 128256
    c.model.hidden_size = 8192
    c.model.intermediate_size = 28672
    c.model.num_hidden_layers = 80
    c.model.num_attention_heads = 64
    c.model.num_key_value_heads = 8
    c.model.rope_theta = 5e5
    c.sequence_len = 2048
    c.per_device_batch_size = 2
    c.lmhead_chunks = 16
    c.accum_dtype = "bfloat16"
    c.opt_m_dtype = "bfloat16"
    c.opt_v_dtype = "bfloat16"
    c.learning_rate = 1.5e-4
    c.warmup_ratio = 0.03
    return c
