"""Llama 3.2 1B sizes (1.2B parameters, tied head): one 24 GB GPU with bfloat16 moments and accumulators, or more GPUs.

    surojax train --config llama1b --config.data='text/*.jsonl' --config.tokenizer=tokenizer.json

`tokenizer.json` is the model's own, from its Hugging Face repository.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/llama1b"
    c.model.vocab_size = 128256
    c.model.hidden_size = 2048
    c.model.intermediate_size = 8192
    c.model.num_hidden_layers = 16
    c.model.num_attention_heads = 32
    c.model.num_key_value_heads = 8
    c.model.head_dim = 64
    c.model.rope_theta = 500000.0
    c.model.rope_scaling = "llama3"
    c.model.rope_factor = 32.0
    c.model.tie_word_embeddings = True
    c.sequence_len = 2048
    c.per_device_batch_size = 2
    c.gradient_accumulation_steps = 8
    c.lmhead_chunks = 8
    c.accum_dtype = "bfloat16"
    c.opt_m_dtype = "bfloat16"
    c.opt_v_dtype = "bfloat16"
    c.learning_rate = 3e-4
    c.warmup_ratio = 0.03
    return c
