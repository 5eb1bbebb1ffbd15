"""surojax: train language models that are larger than the GPUs they run on, in JAX."""
