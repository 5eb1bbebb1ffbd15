"""Tests run on 8 virtual CPU devices, which execute collectives and memory kinds for real."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Programs here run once, for milliseconds: compiling them without LLVM's expensive passes halves the time of the tests.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8"
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
