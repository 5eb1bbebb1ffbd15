"""Uses a trained model: forward passes, sampling with a key/value cache, scores of given texts."""
