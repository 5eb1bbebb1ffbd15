"""The device mesh and the names of its axes.

Data-parallel devices form a grid `dp_replicate x dp_shard`. The batch is sharded over both axes. State is sharded over
`dp_shard` only, so that each row of the grid stores one complete copy. If both axes are larger than 1, this is HSDP.
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from surojax.errors import ConfigError

REPLICATE = "dp_replicate"
SHARD = "dp_shard"
DATA = (REPLICATE, SHARD)


def find_devices(gpus: int) -> list:
    """The first `gpus` devices of the default backend; 0: all of them. Raises ConfigError if there are fewer."""
    expect_no_cuda_without_driver()
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200] or f"JAX_PLATFORMS={jax.config.jax_platforms}"
        change = "install what drives them (pip install 'surojax[cuda]'), or set JAX_PLATFORMS=cpu"
        raise ConfigError(f"gpus: expected devices that JAX can use, got none ({reason}); {change}") from error
    if gpus > len(devices):
        kind = devices[0].device_kind
        hint = f" (virtual ones: XLA_FLAGS=--xla_force_host_platform_device_count={gpus})" if kind == "cpu" else ""
        raise ConfigError(
            f"gpus: expected at most {len(devices)} ({kind}), got {gpus}; lower it or use 0 for all{hint}"
        )
    return devices[: gpus or len(devices)]


def mesh_shape(n: int, *, dp_replicate_size: int = 1, dp_shard_size: int = -1) -> tuple[int, int]:
    """(dp_replicate, dp_shard) of n devices. dp_shard_size: -1: n / dp_replicate_size.

    Raises ConfigError if the product of the sizes is not n.
    """
    replicate = dp_replicate_size
    shard = dp_shard_size
    if shard == -1 and n % replicate:
        change = f"use {math.gcd(n, replicate)}, or gpus={math.ceil(n / replicate) * replicate}"
        raise ConfigError(f"dp_replicate_size: expected a divisor of the {n} devices in use, got {replicate}; {change}")
    if shard == -1:
        shard = n // replicate
    if replicate * shard != n:
        change = f"set gpus={replicate * shard}, or leave dp_shard_size out"
        sizes = f"{replicate} x {shard} = {replicate * shard}"
        raise ConfigError(f"dp_replicate_size x dp_shard_size: expected {n}, the devices in use, got {sizes}; {change}")
    return replicate, shard


def has_driver() -> bool:
    """True if NVIDIA's driver is installed."""
    return any(map(Path.exists, (Path("/dev/nvidiactl"), Path("/dev/dxg"))))  # Linux, and WSL


def expect_no_cuda_without_driver() -> None:
    """Hides JAX's log of a CUDA plugin that cannot start, if NVIDIA's driver is not installed.

    The plugin is installed without the driver to compile for GPUs on a machine that has none (planner/aot.py).
    """
    if not has_driver():
        logging.getLogger("jax._src.xla_bridge").addFilter(_no_plugin_error)


def _no_plugin_error(record: logging.LogRecord) -> bool:
    return "plugin configuration error" not in str(record.msg)


def make_mesh(devices: Sequence, *, dp_replicate_size: int = 1, dp_shard_size: int = -1) -> jax.sharding.Mesh:
    """A mesh over the devices. Raises ConfigError if the product of the sizes is not their number."""
    shape = mesh_shape(len(devices), dp_replicate_size=dp_replicate_size, dp_shard_size=dp_shard_size)
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.sharding.Mesh(np.array(devices).reshape(shape), DATA, axis_types=auto)
