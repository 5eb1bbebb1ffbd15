"""A trained model in use: forward passes, sampling with a cache, scores of given texts."""
