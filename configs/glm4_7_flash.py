"""GLM-4.7-Flash (29.9B), all weights, on one GPU of 24 GB: state in files on NVMe disks, residuals in host memory.

    surojax train --config glm4_7_flash --config.model_path=MODEL --config.data=chats.jsonl --config.nvme_path=FOLDERS

A token uses 4 of the 64 experts of a layer, and one more that all tokens use. FOLDERS: one on each disk, with commas
between them; together they take 498 GiB. As compiled for an RTX 4090, not run: 13.3 GiB, 43.6 GiB of host memory, and
170.8 s a step of 32,768 tokens with one disk of 7 GB/s (`surojax plan --config glm4_7_flash --gpu rtx4090 --disk 7/6`),
which wears the disk by 535 GB a step.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/glm4_7_flash"
    c.model.vocab_size = 154880
    c.model.hidden_size = 2048
    c.model.intermediate_size = 10240
    c.model.num_hidden_layers = 47
    c.model.layer_types = "latent_attention"
    c.model.num_attention_heads = 20
    c.model.num_key_value_heads = 20
    c.model.q_lora_rank = 768
    c.model.kv_lora_rank = 512
    c.model.qk_nope_head_dim = 192
    c.model.qk_rope_head_dim = 64
    c.model.v_head_dim = 256
    c.model.num_experts = 64
    c.model.num_experts_per_tok = 4
    c.model.moe_intermediate_size = 1536
    c.model.n_shared_experts = 1
    c.model.first_k_dense_replace = 1
    c.model.scoring_func = "sigmoid"
    c.model.norm_topk_prob = True
    c.model.routed_scaling_factor = 1.8
    c.model.rope_theta = 1e6
    c.sequence_len = 2048
    c.per_device_batch_size = 4
    c.gradient_accumulation_steps = 4
    c.lmhead_chunks = 32
    c.offload_residual = True
    c.offload_weights = "nvme"
    c.offload_grads = "nvme"
    c.offload_master = "nvme"
    c.offload_optimizer = "nvme"
    c.nvme_path = "nvme"
    c.learning_rate = 1e-5
    c.warmup_ratio = 0.03
    return c
