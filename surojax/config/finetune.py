"""Fine-tunes the model at `model_path`: all of its weights on one GPU, or adapters with `--config.lora`."""

from surojax.config import default_config

RATE, RATE_OF_ADAPTERS = 2e-5, 2e-4  # learning rates; adapters start at nothing, and take about ten times as much


def get_config(lora: bool = False):
    c = default_config()
    c.output_dir = "runs/finetune"
    c.sample_packing = True
    c.sequence_len = 2048
    c.gradient_accumulation_steps = 4
    c.lmhead_chunks = 8
    c.lora = lora
    c.learning_rate = RATE_OF_ADAPTERS if lora else RATE
    c.warmup_ratio = 0.03
    c.weight_decay = 0.0
    return c
