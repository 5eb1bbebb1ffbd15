"""Tests run on 8 virtual CPU devices, which execute collectives and memory kinds for real."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Programs here run once, for milliseconds: compiling them without LLVM's expensive passes halves the time of the tests.
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {FAST}"

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
