"""The model of tiny.py with eight experts in place of each MLP, of which every byte uses two: 2.5M parameters.

    surojax train --config tiny_moe

Two experts together are as wide as the MLP of tiny.py, so that as many parameters compute. Expect 2.08 bits per byte on
held-out files at the end, where tiny.py has 2.16 on the same text, in one and a half times its time on two CPU cores.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/tiny_moe"
    c.data = "stdlib"
    c.model.vocab_size = 320  # 256 bytes, the end of a document, and room to a multiple of 64
    c.model.hidden_size = 128
    c.model.intermediate_size = 352
    c.model.num_experts = 8
    c.model.num_experts_per_tok = 2
    c.model.moe_intermediate_size = 176  # half of intermediate_size
    c.model.norm_topk_prob = True
    c.router_aux_loss_coef = 0.1
    c.model.num_hidden_layers = 4
    c.model.num_attention_heads = 2
    c.model.num_key_value_heads = 2
    c.model_dtype = "float32"  # CPUs have no fast bfloat16
    c.sequence_len = 128
    c.per_device_batch_size = 16
    c.max_steps = 600
    c.eval_steps = 100
    c.save_steps = 200
    c.learning_rate = 2e-3  # an expert has a quarter of the tokens; at 4e-3 layers collapse in the first steps
    c.warmup_ratio = 0.05  # of max_steps, also where --config.max_steps is another number
    return c
