"""Tests run on 8 virtual CPU devices, which execute collectives and memory kinds for real."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
