"""OLMoE-1B-7B, all of it trained on one GPU of 12 GB: 6.9B parameters, of which a token uses 1.3B.

    surojax train --config olmoe --config.model_path=MODEL --config.data=chats.jsonl

Everything rests in host memory and comes to the GPU layer by layer (117 GiB; `surojax fit` finds what less takes). All
experts of a layer are needed for any batch, so that a fetch serves four microbatches.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/olmoe"
    c.model.vocab_size = 50304
    c.model.hidden_size = 2048
    c.model.intermediate_size = 1024
    c.model.num_experts = 64
    c.model.num_experts_per_tok = 8
    c.model.num_hidden_layers = 16
    c.model.num_attention_heads = 16
    c.model.num_key_value_heads = 16
    c.model.qk_norm_whole = True
    c.sequence_len = 2048
    c.per_device_batch_size = 4
    c.gradient_accumulation_steps = 4
    c.microbatches_per_fetch = 4
    c.lmhead_chunks = 16
    c.router_aux_loss_coef = 0.01
    c.router_z_loss_coef = 0.001
    c.offload_optimizer = True
    c.offload_master = True
    c.offload_grads = True
    c.offload_weights = True
    c.offload_residual = True
    c.learning_rate = 2e-5
    c.warmup_ratio = 0.03
    return c
