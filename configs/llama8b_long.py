"""Llama 3.1 8B sizes (8.0B parameters) on texts of 131,072 tokens, on one GPU of 24 GB with 118 GiB of host memory.

    surojax plan --config llama8b_long --gpu rtx4090

Everything that can be is in host memory, and blocks are computed in eight chunks of the sequence: 13.2 GiB on the
device instead of the 35.1 GiB of `--config.sequence_chunks=1`, in the same predicted time (282 s a step, MFU 0.42).
With `surojax.train`, add data and tokenizer, or `--config.model_path`.

    surojax plan --config llama8b_long --gpu h200 --config.gpus=8 --config.cp_size=8 \\
        --config.zero_level=3 --config.sequence_len=1048576

divides texts of a million tokens over eight GPUs: 9.3 GiB on each instead of 31.7 without chunks, 439 s a step.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/llama8b_long"
    c.model.vocab_size = 128256
    c.model.hidden_size = 4096
    c.model.intermediate_size = 14336
    c.model.num_hidden_layers = 32
    c.model.num_attention_heads = 32
    c.model.num_key_value_heads = 8
    c.model.rope_theta = 500000.0
    c.model.rope_scaling = "llama3"
    c.model.rope_factor = 8.0
    c.sequence_len = 131072
    c.sequence_chunks = 8
    c.lmhead_chunks = 128
    c.accum_dtype = "bfloat16"
    c.opt_m_dtype = "bfloat16"
    c.opt_v_dtype = "bfloat16"
    c.offload_residual = True
    c.offload_optimizer = True
    c.offload_master = True
    c.offload_grads = True
    c.offload_weights = True
    c.learning_rate = 1e-5
    c.warmup_ratio = 0.03
    return c
