"""A small model whose sizes every row of the verifier can use: heads, widths and layers that its placements divide.

    surojax verify --config verify

trains it under every setting of memory and parallelism, on 8 virtual CPU devices if there are no GPUs, and compares.
"""

from surojax.config import default_config
from surojax.verification.settings import SEQUENCE_LEN, SIZES


def get_config():
    c = default_config()
    c.output_dir = "runs/verify"
    c.model.update(SIZES)
    c.model_dtype = "float32"  # CPUs have no fast bfloat16
    c.sequence_len = SEQUENCE_LEN
    c.per_device_batch_size = 8
    c.learning_rate = 1e-3  # at 1e-2 the first updates overshoot, and AdamW makes 2e-4 of another order of sums
    return c
