"""Tests run on 8 virtual CPU devices, which execute collectives and memory kinds for real.

Only `pytest -m gpu -n 0` leaves JAX the GPUs of the machine, for the tests marked so: the kernels', compiled then, and
tests/test_on_gpu.py.
"""

import contextlib
import gc
import os
import threading

import pytest


def pytest_configure(config):
    """Before any test module, and with it JAX, is imported."""
    if config.option.markexpr != "gpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Programs here run once, for milliseconds. Compiling them takes less than half the time without LLVM's
        # expensive passes, and in one piece.
        os.environ["XLA_FLAGS"] = (
            "--xla_force_host_platform_device_count=8"
            " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
            " --xla_cpu_parallel_codegen_split_count=1"
        )
        gc.set_threshold(100_000)  # tracing makes many objects, of which hardly any is garbage
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        if worker and hasattr(os, "sched_setaffinity"):
            # A tenth less CPU time where XLA's threads do not run into those of the other workers.
            number, count = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, cores[number % count % len(cores) :: count])
    import jax

    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def orbax_fails():
    """For tests in which a read or write fails: what orbax was doing beside it ends, and is collected, within the test.

    Else its event loop's remains are found in whichever test collects garbage next, and fail that one. The test needs
    `filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")` as well, which counts for its end too.
    """
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        with contextlib.suppress(Exception):  # orbax's threads raise what ended them
            thread.join(10)
    gc.collect()
