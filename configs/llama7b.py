"""Llama-2-7B sizes (6.7B parameters): fp32 master weights; bf16 work weights, moments and accumulators.

    surojax train --config llama7b --config.gpus=4 --config.zero_level=3 \
        --config.data='text/*.jsonl' --config.tokenizer=tokenizer.json

needs 22.0 GiB on each of four GPUs: on 24 GB cards also set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 (JAX takes 75 % else).
`offload_residual`, `offload_optimizer`, `offload_master`, `offload_grads` and `offload_weights` move what rests to host
memory: with all of them the program for one RTX 4090 needs 2.6 GiB on the device and 75 GiB of host memory for a
step, and 1.5 GiB on the device to make the first weights.
On a machine that cannot hold it this ends in seconds and says what is missing.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/llama7b"
    c.model.vocab_size = 32000
    c.model.hidden_size = 4096
    c.model.intermediate_size = 11008
    c.model.num_hidden_layers = 32
    c.model.num_attention_heads = 32
    c.model.num_key_value_heads = 32
    c.sequence_len = 2048
    c.per_device_batch_size = 2
    c.lmhead_chunks = 16
    c.accum_dtype = "bfloat16"
    c.opt_m_dtype = "bfloat16"
    c.opt_v_dtype = "bfloat16"
    c.learning_rate = 3e-4
    c.warmup_ratio = 0.03
    return c
