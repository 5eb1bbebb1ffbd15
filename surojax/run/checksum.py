"""Checksums of arrays, computed on the devices, independent of sharding and memory tier."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from surojax.memory.by_host import by_host
from surojax.memory.host import move, read
from surojax.memory.in_file import InFile, InFiles, only_layer
from surojax.placement.home import DEVICE
from surojax.placement.param import OUTER


def name_of(path, separator: str = ".") -> str:
    """Returns the name of a leaf: the keys of its path, joined."""
    return jax.tree_util.keystr(path, simple=True, separator=separator)


def checksums(**trees) -> tuple[dict[str, int], list[str]]:
    """Returns ({"name dtype": checksum} of every array, names of the arrays that hold NaN or infinity)."""
    in_files = InFiles(trees)
    named = jax.tree_util.tree_map_with_path(lambda path, x: f"{name_of(path, '/')} {x.dtype}", trees)

    def fetch(name, x):
        _, *section_and_path = name.split("/")  # "master/blocks/attention/wq"; other arrays have no section
        stacked = len(section_and_path) > 1 and section_and_path[0] != OUTER
        return jax.device_get(jax.block_until_ready(_checksum(x, stacked=stacked)))

    # One program at a time: several with collectives in flight can block each other on virtual CPU devices. All of them
    # are done before the next step replaces the arrays, see `train_step.evaluated`.
    in_memory_sums = map(fetch, in_files.in_memory(named), in_files.in_memory(trees))
    results = in_files.joined(in_memory_sums, map(_checksum_of_file, in_files.files(trees)))
    names = jax.tree.leaves(named)
    sums, finite = zip(*jax.tree.structure(trees).flatten_up_to(results), strict=True)
    bad = [name for name, ok in zip(names, finite, strict=True) if not ok]
    return dict(zip(names, map(int, sums), strict=True)), bad


@functools.partial(jax.jit, static_argnames="stacked")
def _checksum(x: jax.Array, *, stacked: bool):
    """Returns (the sum over i of word i times 2 i + 1, modulo 2^32; whether all of x is finite).

    An integer sum does not depend on the order of its terms, and therefore not on the sharding. Odd factors are
    invertible modulo 2^32, so a change of one word always changes the sum. A random change of several words is missed
    with probability 2^-32. Stacks of layers in host memory are read one layer at a time, because the device may have no
    room for a stack.
    """

    def layer(l, before):
        total, finite = _checksum_part(read(x, l), _first_word(x.shape, l))
        return before[0] + total, before[1] & finite

    if stacked and jax.typeof(x).memory_space != DEVICE.space:
        return jax.lax.fori_loop(0, x.shape[0], layer, (jnp.uint32(0), jnp.bool(True)))
    return _checksum_part(move(x, DEVICE.space), 0)


def _checksum_of_file(file: InFile) -> tuple[int, bool]:
    """Computes `_checksum` of a stack or a table in a file, with one layer or piece at a time on the devices."""
    files = InFiles(file)
    blocks, between = file.blocks
    total_and_finite = [0, True]

    def add_layer(l: int, rounds: list[jax.Array]) -> None:
        start = np.uint32(file.first_element(l) % 2**32)
        sharding = file.layer_sharding(DEVICE)
        part = _checksum_of_layer(rounds[0], start, blocks=blocks, between=between, sharding=sharding)
        total, finite = jax.device_get(part)
        total_and_finite[:] = (total_and_finite[0] + int(total)) % 2**32, total_and_finite[1] and bool(finite)

    by_host(range(file.layers), lambda l: files.read([l]), add_layer)
    return total_and_finite[0], total_and_finite[1]


@functools.partial(jax.jit, static_argnames=("blocks", "between", "sharding"))
def _checksum_of_layer(x: jax.Array, start, *, blocks: int, between: int, sharding: jax.NamedSharding):
    """Computes the terms of `_checksum` for a layer, or a piece of a table, from the round that it was read in.

    start: index of the first word. blocks: contiguous runs in the array. between: words from one block to the next.
    """
    layer = only_layer(x, sharding)
    if blocks == 1:
        return _checksum_part(layer, start)
    return _checksum_part(layer.reshape(blocks, -1, *layer.shape[1:]), start, between)


def _first_word(shape: tuple[int, ...], l):
    """The index of layer l's first word in a stack, modulo 2^32."""
    return jnp.uint32(l) * jnp.uint32(math.prod(shape[1:]) % 2**32)


def _checksum_part(x: jax.Array, start, between: int | None = None):
    """Returns (the sum's terms from the words of x, the first of which has index `start`; whether x is finite).

    between: words from one entry of x to the next in the array; None: x is the whole array.
    """
    words = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    index = jnp.full(x.shape, start, jnp.uint32)
    stride = 1
    for d in reversed(range(x.ndim)):
        words_between = stride if d or between is None else between
        index += jnp.uint32(words_between % 2**32) * jax.lax.broadcasted_iota(jnp.uint32, x.shape, d)
        stride *= x.shape[d]
    return jnp.sum(words * (2 * index + 1), dtype=jnp.uint32), jnp.isfinite(x).all()
