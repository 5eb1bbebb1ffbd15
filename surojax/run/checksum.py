"""Checksums of arrays, taken on the devices: the same numbers wherever these rest, and in whatever shards."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from surojax.memory.host import move, read
from surojax.memory.nvme import InFile
from surojax.placement.home import DEVICE


def name_of(path, separator: str = ".") -> str:
    """The name of a leaf: the keys that lead to it."""
    return jax.tree_util.keystr(path, simple=True, separator=separator)


def checksums(**trees) -> tuple[dict[str, int], list[str]]:
    """The checksum of every array by name and dtype, and the names of those that are not finite everywhere."""
    leaves = jax.tree_util.tree_leaves_with_path(trees)
    names = [f"{name_of(path, '/')} {x.dtype}" for path, x in leaves]
    # One at a time: several programs with collectives in flight can block each other on virtual CPU devices.
    fetch = lambda name, x: (
        _checksum_of_file(x) if isinstance(x, InFile) else jax.device_get(_checksum(x, stacked="/blocks/" in name))
    )
    sums, finite = zip(*(fetch(name, x) for name, (_, x) in zip(names, leaves, strict=True)), strict=True)
    bad = [name for name, ok in zip(names, finite, strict=True) if not ok]
    return dict(zip(names, map(int, sums), strict=True)), bad


@functools.partial(jax.jit, static_argnames="stacked")
def _checksum(x: jax.Array, *, stacked: bool):
    """(the sum over i of word i times 2 i + 1, modulo 2^32; whether all of x is finite).

    Integer sums do not depend on order, so not on the sharding. Odd factors are invertible, so any change of one word
    changes the sum, and of changes in several words all but one in 2^32 do. Stacks of layers in host memory are read a
    layer at a time: they may be there because the device has no room for them.
    """

    def layer(l, found):
        total, finite = _checksum_part(read(x, l), _first_word(x.shape, l))
        return found[0] + total, found[1] & finite

    if stacked and jax.typeof(x).memory_space != DEVICE.space:
        return jax.lax.fori_loop(0, x.shape[0], layer, (jnp.uint32(0), jnp.bool(True)))
    return _checksum_part(move(x, DEVICE.space), 0)


def _checksum_of_file(file: InFile) -> tuple[int, bool]:
    """The same of a stack in a file, each layer on one device in turn."""
    total, finite = 0, True
    for l in range(file.shape[0]):
        part = jax.device_get(_part_of_file(file.read(l), np.uint32(l), file.shape))
        total, finite = total + int(part[0]), finite and bool(part[1])
    return total % 2**32, finite


@functools.partial(jax.jit, static_argnames="shape")
def _part_of_file(x, l, shape):
    return _checksum_part(x, _first_word(shape, l))


def _first_word(shape: tuple[int, ...], l):
    """The index of the first word of layer l of a stack, modulo 2^32."""
    return jnp.uint32(l) * jnp.uint32(math.prod(shape[1:]) % 2**32)


def _checksum_part(x: jax.Array, start):
    """(the words' part of the sum, if the first has index `start`; whether they are finite)."""
    words = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    index, stride = jnp.full(x.shape, start, jnp.uint32), 1
    for d in reversed(range(x.ndim)):
        index += jnp.uint32(stride % 2**32) * jax.lax.broadcasted_iota(jnp.uint32, x.shape, d)
        stride *= x.shape[d]
    return jnp.sum(words * (2 * index + 1), dtype=jnp.uint32), jnp.isfinite(x).all()
