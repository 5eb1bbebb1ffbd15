"""Compares training under every setting of memory and parallelism with training without it."""
