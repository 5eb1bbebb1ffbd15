"""Nemotron-3 Nano 30B-A3B on one GPU of 24 GB: adapters of Mamba2, attention and shared experts, a base in NF4.

    surojax train --config nemotron3_nano --config.model_path=MODEL --config.data=chats.jsonl

A layer is Mamba2, experts, or attention; a token uses 6 of the 128 experts of a layer, and one more that all tokens
use. As compiled for an RTX 4090, not run: 10.0 GiB, 15.0 GiB of host memory, and 3.9 s a step of 8,192 tokens; all
resident, with --config.offload_weights=False --config.per_device_batch_size=1 --config.gradient_accumulation_steps=4,
19.6 GiB and 6.8 s; set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 for that.
"""

from surojax.config import default_config

LETTERS = {"M": "mamba2", "E": "experts", "*": "full_attention"}
PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


def get_config():
    c = default_config()
    c.output_dir = "runs/nemotron3_nano"
    c.model.vocab_size = 131072
    c.model.hidden_size = 2688
    c.model.num_hidden_layers = len(PATTERN)
    c.model.one_purpose = True
    c.model.layer_types = ",".join(LETTERS[letter] for letter in PATTERN)
    c.model.mamba_n_heads = 64
    c.model.mamba_d_head = 64
    c.model.mamba_d_state = 128
    c.model.mamba_n_groups = 8
    c.model.mamba_dt_min = 0.001
    c.model.num_attention_heads = 32
    c.model.num_key_value_heads = 2
    c.model.head_dim = 128
    c.model.no_rope_layer_interval = 1
    c.model.hidden_act = "relu2"
    c.model.num_experts = 128
    c.model.num_experts_per_tok = 6
    c.model.moe_intermediate_size = 1856
    c.model.intermediate_size = 1856
    c.model.moe_shared_intermediate_size = 3712
    c.model.scoring_func = "sigmoid"
    c.model.norm_topk_prob = True
    c.model.routed_scaling_factor = 2.5
    c.sequence_len = 2048
    c.per_device_batch_size = 4
    c.lmhead_chunks = 32
    c.lora = True
    c.lora_rank = 16
    c.lora_alpha = 32.0
    c.qlora_bnb = True
    c.offload_weights = True
    c.learning_rate = 2e-4
    c.warmup_ratio = 0.03
    return c
