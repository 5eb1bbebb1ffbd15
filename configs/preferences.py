"""Trains the model at `model_path` on pairs of a chosen and a rejected answer: DPO of all weights, or of adapters.

    surojax train --config preferences --config.model_path=MODEL --config.data=pairs.jsonl

A row has prompt, chosen and rejected, see docs/preferences.md. --config.objective names another loss, such as
"reward", which makes a reward model.
"""

from surojax import default_config


def get_config():
    c = default_config()
    c.output_dir = "runs/preferences"
    c.objective = "dpo"
    c.sequence_len = 2048
    c.per_device_batch_size = 2  # one pair
    c.gradient_accumulation_steps = 8
    c.lmhead_chunks = 8
    c.learning_rate = 1e-6  # for all weights; adapters take about ten times as much
    c.warmup_ratio = 0.1
    c.weight_decay = 0.0
    return c
