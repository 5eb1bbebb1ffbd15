"""Muse-Glimmer-30B, all weights, on one GPU of 24 GB with 384 GiB of host memory: everything offloaded.

    surojax train --config muse_glimmer_30b --config.model_path=MODEL --config.data=chats.jsonl

As compiled for an RTX 4090, not run: 16.2 GiB, 311.8 GiB of host memory, and 39.5 s a step of 16,384 tokens, of which
11.7 s are the update. On a GPU of 32 GB set overlap_update, which hides that: 26.1 GiB, 23.6 s on an RTX 5090.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/muse_glimmer_30b"
    c.model.vocab_size = 202048
    c.model.hidden_size = 6656
    c.model.intermediate_size = 19968
    c.model.num_hidden_layers = 52
    c.model.num_attention_heads = 32
    c.model.num_key_value_heads = 2
    c.model.head_dim = 128
    c.model.sliding_window = 2048
    c.model.sliding_window_pattern = 4
    c.model.no_rope_layer_interval = 4
    c.model.layers_from_last = True
    c.model.attn_gate_proj = True
    c.model.qk_norm_weightless = True
    c.model.embedding_norm = True
    c.model.norm_plus_one = True
    c.model.plain_final_norm = True
    c.model.sandwich_norms = True
    c.model.post_norm_eps = 1e-8
    c.model.query_pre_attn_scalar = 128 / 3.87**2  # qk_scale_factor
    c.model.logits_scaling = 1 / 0.19611613513818404  # output_multiplier
    c.model.final_logit_softcapping = 20.0
    c.sequence_len = 2048
    c.per_device_batch_size = 1
    c.gradient_accumulation_steps = 8
    c.microbatches_per_fetch = 8
    c.lmhead_chunks = 16
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
