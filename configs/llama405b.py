"""Llama-3.1-405B sizes (405.9B parameters): fp32 master weights; bf16 work weights, moments and accumulators.

    surojax plan --config llama405b --gpu h100 --config.gpus=128 --config.tp_size=8 \
        --config.zero_level=3

Predicted for these 16 machines of eight GPUs: 42.9 GiB of each GPU, 10.4 s for a step of 16 sequences of 8192.
Eight machines have room with pipeline stages and `--config.optimizer=adamw8bit`, or with residuals in host memory:

    surojax plan --config llama405b --gpu h100 --config.gpus=64 --config.tp_size=8 \
        --config.pp_size=2 --config.pp_schedule=1f1b --config.zero_level=3 \
        --config.gradient_accumulation_steps=16 --config.optimizer=adamw8bit

Predicted: 69.0 GiB of each GPU, 69.4 s for a step of 64 sequences. docs/scaling.md compares layouts.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/llama405b"
    c.model.vocab_size = 128256
    c.model.hidden_size = 16384
    c.model.intermediate_size = 53248
    c.model.num_hidden_layers = 126
    c.model.num_attention_heads = 128
    c.model.num_key_value_heads = 8
    c.model.rope_theta = 5e5
    c.sequence_len = 8192
    c.per_device_batch_size = 1
    c.lmhead_chunks = 16
    c.accum_dtype = "bfloat16"
    c.opt_m_dtype = "bfloat16"
    c.opt_v_dtype = "bfloat16"
    c.learning_rate = 8e-5
    c.warmup_ratio = 0.03
    return c
