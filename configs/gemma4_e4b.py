"""Gemma 4 E4B, all weights, on one GPU of 12 GB with 128 GiB of host memory: everything offloaded.

    surojax train --config gemma4_e4b --config.model_path=MODEL --config.data=chats.jsonl

Of 7.5B parameters 2.8B are the layers' tables, which rest in host memory with their layers. As compiled for an RTX
4070, not run: 8.8 GiB, 91.7 GiB of host memory, and 17.1 s a step of 16,384 tokens; set
XLA_PYTHON_CLIENT_MEM_FRACTION=0.95. With 64 GiB and disks, set offload_optimizer and offload_master to "nvme", and
nvme_path to a folder of each disk.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/gemma4_e4b"
    c.model.vocab_size = 262144
    c.model.hidden_size = 2560
    c.model.intermediate_size = 10240
    c.model.num_hidden_layers = 42
    c.model.layer_types = ",".join(["sliding_attention"] * 5 + ["global_attention"])
    c.model.num_attention_heads = 8
    c.model.num_key_value_heads = 2
    c.model.head_dim = 256
    c.model.global_head_dim = 512
    c.model.num_kv_shared_layers = 18
    c.model.hidden_size_per_layer_input = 256
    c.model.sliding_window = 512
    c.model.rope_theta = 1e6
    c.model.rope_scaling = "proportional"
    c.model.rope_partial_rotary_factor = 0.25
    c.model.rope_local_base_freq = 1e4
    c.model.rms_norm_eps = 1e-6
    c.model.tie_word_embeddings = True
    c.model.qk_norm = True
    c.model.v_norm_weightless = True
    c.model.sandwich_norms = True
    c.model.layer_scalar = True
    c.model.scale_embedding = True
    c.model.query_pre_attn_scalar = 1.0
    c.model.final_logit_softcapping = 30.0
    c.model.hidden_act = "gelu_pytorch_tanh"
    c.sequence_len = 2048
    c.per_device_batch_size = 4
    c.gradient_accumulation_steps = 2
    c.microbatches_per_fetch = 2
    c.lmhead_chunks = 32
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
