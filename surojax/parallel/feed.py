"""Arrays over the devices of several processes, from values in the memory of each.

With one process this is `jax.device_put`. With several it is not: JAX then compares the values of all processes first,
which sends them over the network.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils


def from_host(tree, shardings):
    """Arrays in these shardings from numpy arrays that are the same in every process. No process sends any."""

    def put(x, sharding):
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree, shardings)


def to_host(tree):
    """Numpy arrays, in every process, from arrays that may be divided over the devices of several processes."""

    def copied(x: jax.Array) -> np.ndarray:
        return np.asarray(x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(copied, tree)


class Feed:
    """Puts training batches [A, B, S] on the devices. Each process has the rows of B that its own devices need.

    rows: their numbers; None: there is one process, which has all of them.
    """

    def __init__(self, sharding: jax.NamedSharding, batch_size: int):
        self.sharding = sharding
        self.batch_size = batch_size
        self.rows: np.ndarray | None = None
        if not sharding.is_fully_addressable:
            indices = sharding.addressable_devices_indices_map((1, batch_size, 1)).values()
            self.rows = np.unique(np.concatenate([self._numbers(index) for index in indices if index]))

    def _numbers(self, index: tuple[slice, ...]) -> np.ndarray:
        return np.arange(*index[1].indices(self.batch_size))

    def put(self, arrays: list[np.ndarray]) -> list[jax.Array]:
        """The arrays [A, number of `rows`, S] of this process as parts of arrays [A, B, S]."""
        if self.rows is None:
            return jax.device_put(arrays, self.sharding)
        return [self._put(x, self.rows) for x in arrays]

    def _put(self, x: np.ndarray, rows: np.ndarray) -> jax.Array:
        shape = (x.shape[0], self.batch_size, *x.shape[2:])

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index
            return x[:, np.searchsorted(rows, self._numbers(index))]

        return jax.make_array_from_callback(shape, self.sharding, part)
