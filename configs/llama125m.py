"""Llama with the sizes of GPT-2 small (134M parameters): a first run on one GPU of 8 GB or more.

    surojax train --config llama125m --config.data='text/*.txt' --config.tokenizer=tokenizer.json

`--config.data=stdlib --config.model.vocab_size=320` in their place tries it on this Python's own source code, in bytes.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/llama125m"
    c.model.vocab_size = 32000
    c.model.hidden_size = 768
    c.model.intermediate_size = 2048
    c.model.num_hidden_layers = 12
    c.model.num_attention_heads = 12
    c.model.num_key_value_heads = 12
    c.sequence_len = 1024
    c.per_device_batch_size = 8
    c.gradient_accumulation_steps = 8
    c.lmhead_chunks = 8
    c.learning_rate = 6e-4
    c.warmup_ratio = 0.05
    return c
