"""A first run: a 0.9M-parameter Llama learns Python source code, byte by byte, on two CPU cores in 2 to 4 minutes.

    surojax train --config tiny

Data: the source of this interpreter's own standard library; nothing is downloaded. Expect about 2.1 bits per byte on
held-out files at the end, and a continuation that looks like Python from a distance.
"""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/tiny"
    c.data = "stdlib"
    c.model.vocab_size = 320  # 256 bytes, the end of a document, and room to a multiple of 64
    c.model.hidden_size = 128
    c.model.intermediate_size = 352
    c.model.num_hidden_layers = 4
    c.model.num_attention_heads = 2
    c.model.num_key_value_heads = 2
    c.model_dtype = "float32"  # CPUs have no fast bfloat16
    c.sequence_len = 128
    c.per_device_batch_size = 16
    c.max_steps = 600
    c.eval_steps = 100
    c.save_steps = 200
    c.learning_rate = 4e-3
    c.warmup_ratio = 0.05  # of max_steps, also where --config.max_steps is another number
    return c
