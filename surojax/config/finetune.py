"""Fine-tunes the model at `model_path`: all of its weights on one GPU, or adapters with `--config.lora`."""

from surojax.config import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/finetune"
    c.sample_packing = True
    c.sequence_len = 2048
    c.gradient_accumulation_steps = 4
    c.lmhead_chunks = 8
    c.learning_rate = 2e-5  # for all weights; adapters take about ten times as much
    c.warmup_ratio = 0.03
    c.weight_decay = 0.0
    return c
