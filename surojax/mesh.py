"""The device mesh and the names of its axes.

Data-parallel devices form a grid `dp_replicate x dp_shard`: the batch is split over both, sharded state over `dp_shard`
only, so every row of the grid holds one whole copy of it (HSDP when both are larger than one).
"""

from collections.abc import Sequence

import jax
import numpy as np

from surojax.errors import ConfigError

REPLICATE, SHARD = "dp_replicate", "dp_shard"
DATA = (REPLICATE, SHARD)


def find_devices(gpus: int) -> list[jax.Device]:
    """The first `gpus` devices of the default backend, all of them for 0. Raises ConfigError if there are fewer."""
    devices = jax.devices()
    if gpus > len(devices):
        kind = devices[0].device_kind
        hint = f" (virtual ones: XLA_FLAGS=--xla_force_host_platform_device_count={gpus})" if kind == "cpu" else ""
        raise ConfigError(
            f"gpus: expected at most {len(devices)} ({kind}), got {gpus}; lower it or use 0 for all{hint}"
        )
    return devices[: gpus or len(devices)]


def make_mesh(
    devices: Sequence[jax.Device], *, dp_replicate_size: int = 1, dp_shard_size: int = -1
) -> jax.sharding.Mesh:
    """A mesh over the devices. Raises ConfigError when the sizes do not multiply to their number."""
    n = len(devices)
    if dp_shard_size == -1:
        if n % dp_replicate_size:
            raise ConfigError(
                f"dp_replicate_size: expected a divisor of the {n} devices, got {dp_replicate_size}; change gpus or it"
            )
        dp_shard_size = n // dp_replicate_size
    if dp_replicate_size * dp_shard_size != n:
        sizes = f"{dp_replicate_size} x {dp_shard_size}"
        raise ConfigError(
            f"dp_replicate_size x dp_shard_size: expected {n} (the devices in use), got {sizes}; use -1 for one"
        )
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.sharding.Mesh(np.array(devices).reshape(dp_replicate_size, dp_shard_size), DATA, axis_types=auto)
