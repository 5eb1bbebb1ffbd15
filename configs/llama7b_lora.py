"""Llama-2-7B sizes with adapters of rank 16 on all matrices: 40M of 6.8B parameters are trained, on one 24 GB card.

    surojax train --config llama7b_lora --config.model_path=MODEL --config.data=chats.jsonl

MODEL may be of any size and family; its sizes replace these. The base is frozen: it has no gradients, master weights
or moments. With `offload_weights` it rests in host memory.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/llama7b_lora"
    c.model.vocab_size = 32000
    c.model.hidden_size = 4096
    c.model.intermediate_size = 11008
    c.model.num_hidden_layers = 32
    c.model.num_attention_heads = 32
    c.model.num_key_value_heads = 32
    c.sequence_len = 2048
    c.per_device_batch_size = 2
    c.lmhead_chunks = 16
    c.lora = True
    c.lora_rank = 16
    c.lora_alpha = 32.0
    c.learning_rate = 2e-4
    c.warmup_ratio = 0.03
    return c
