"""Mistral Small 4 (119B) on one GPU of 24 GB: adapters on a base in NF4, not on its experts.

    surojax train --config mistral_small_4 --config.model_path=MODEL --config.data=chats.jsonl

A token uses 4 of the 128 experts of a layer, and one more that all tokens use. The base rests in host memory, and a
layer of it is on the GPU while it computes. MODEL has 16 bits: of the published one in float8, which is 121 GB, make it
with `surojax convert --checkpoint PUBLISHED --out MODEL --dtype bfloat16`. As compiled for an RTX 4090, not
run: 19.1 GiB, 56.9 GiB of host memory, and 11.5 s a step of 16,384 tokens; set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/mistral_small_4"
    c.model.vocab_size = 131072
    c.model.hidden_size = 4096
    c.model.intermediate_size = 12288
    c.model.num_hidden_layers = 36
    c.model.layer_types = "latent_attention"
    c.model.num_attention_heads = 32
    c.model.num_key_value_heads = 32
    c.model.q_lora_rank = 1024
    c.model.kv_lora_rank = 256
    c.model.qk_nope_head_dim = 64
    c.model.qk_rope_head_dim = 64
    c.model.v_head_dim = 128
    c.model.num_experts = 128
    c.model.num_experts_per_tok = 4
    c.model.moe_intermediate_size = 2048
    c.model.n_shared_experts = 1
    c.model.norm_topk_prob = True
    c.model.rms_norm_eps = 1e-6
    c.model.rope_scaling = "yarn"
    c.model.rope_factor = 128.0
    c.model.rope_original_max_position_embeddings = 8192
    c.model.rope_attention_factor = 1.0
    c.model.rope_mscale_all_dim = 1.0
    c.model.rope_llama_4_scaling_beta = 0.1
    c.sequence_len = 2048
    c.per_device_batch_size = 8
    c.lmhead_chunks = 64
    c.lora = True
    c.lora_rank = 16
    c.lora_alpha = 32.0
    c.qlora_bnb = True
    c.offload_weights = True
    c.learning_rate = 2e-4
    c.warmup_ratio = 0.03
    return c
