"""NF4: matrices in 4 bits with scales in 8, in the layout of bitsandbytes (QLoRA, Dettmers et al. 2023).

A matrix [out, in] is read row by row, in blocks of 64 neighbours. With m the largest magnitude of a block (its absmax):

    number = NUMBERS[code] * m           16 quantiles of the normal distribution, arXiv:2305.14314, appendix E
    m      = DYNAMIC[absmax] * M + offset    256 numbers of both signs over 7 decades, arXiv:1511.04561

offset is the mean of all m, and M the largest magnitude of m - offset in a group of 256 neighbouring blocks. Two codes
are in one byte, the first in the high half. Together that is 0.5 bytes a number, and 1/64 + 4/16384 for the scales.

Codes, absmax, M and offset are those of bitsandbytes' CUDA and torch kernels, which round to the nearest. Its kernel
for CPUs looks 8-bit codes up in a table of 65536 positions instead, so 1 in 600 of them is the second nearest.

A group goes on from one row to the next, unlike a block, since `in` is a multiple of 64. So that every shard of rows is
complete, an `Nf4` repeats for each row the M of the groups that the row touches, and where in its first group the row
begins. The same holds of every part of a row, for matrices that tp divides along their inputs. This costs 5 bytes a row
if no row crosses a group.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import fp8_format
from surojax.numerics.rounding import materialised

BLOCK = 64  # numbers with one absmax
GROUP = 256  # blocks with one scale of their absmax
NUMBERS = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)


def _dynamic() -> np.ndarray:
    """The 256 numbers of an absmax, in order: 0, 1, and in decade i of 7 from 1e-6 on, 2^i of each sign.

    In a decade they are the midpoints of equal steps from 0.1 to 1 of it, which torch counts from both ends with a step
    in float32.
    """
    numbers = [0.0, 1.0]
    for i in range(7):
        n = 2**i
        step = np.float64(np.float32(np.float32(0.9) / n))
        upward = np.arange(n + 1) * step + np.float32(0.1)
        edges = np.where(np.arange(n + 1) < (n + 1) // 2, upward, 1 - step * np.arange(n, -1, -1)).astype(np.float32)
        midpoints = (edges[:-1] + edges[1:]) / np.float32(2) * np.float32(10.0 ** (i - 6))
        numbers += [*midpoints, *-midpoints]
    return np.sort(np.array(numbers, np.float32))


DYNAMIC = _dynamic()


class Nf4(NamedTuple):
    """A matrix [out, in] in NF4; several have dimensions in front. Every row, and every shard of a row, is complete.

    codes: of numbers 2 i (high half) and 2 i + 1. absmax: codes of the blocks' absmax. group_absmax: M of the groups
    that each part of a row touches, in order; the last one is repeated. shift: blocks in the first of these groups
    before the part begins. offset: the mean absmax.
    """

    codes: Any  # uint8 [..., out, in / 2]
    absmax: Any  # uint8 [..., out, in / 64]
    group_absmax: Any  # float32 [..., out, parts x groups]
    shift: Any  # uint8 [..., out, parts]
    offset: Any  # float32 [...]


def _groups(blocks: int) -> int:
    """The most groups that one of the row parts of this many blocks touches."""
    last_shift = GROUP - math.gcd(blocks, GROUP)
    return (last_shift + blocks - 1) // GROUP + 1


def quantise(w: jax.Array, like: Nf4) -> Nf4:
    """Quantises a matrix [out, in]. like: as planned for it. NaN or infinity makes the offset not finite."""
    blocks = w.astype(jnp.float32).reshape(-1, BLOCK)
    absmax = fp8_format.absmax(blocks, axis=-1)
    # Rows have equally many blocks. A single sum over all blocks would lose more bits.
    offset = jnp.mean(jnp.mean(absmax.reshape(w.shape[0], -1), axis=-1))
    groups = jnp.pad(absmax - offset, (0, -absmax.size % GROUP)).reshape(-1, GROUP)
    group_absmax = fp8_format.absmax(groups, axis=-1)
    nearest = _nearest(groups, group_absmax, DYNAMIC).reshape(-1)[: absmax.size]
    codes = _nearest(blocks, absmax, NUMBERS).reshape(-1, 2)
    packed = codes[:, 0] << 4 | codes[:, 1]
    return from_flat(packed, nearest, group_absmax, offset, w.shape, like.shift.shape[-1])


def _nearest(x: jax.Array, absmax: jax.Array, numbers: np.ndarray) -> jax.Array:
    """The index of the number nearest to each x / absmax, uint8; the lower one of two. x: [n, k], absmax: [n]."""
    ratio = x * (1 / jnp.maximum(absmax, jnp.finfo(jnp.float32).tiny))[:, None]
    between = (numbers[:-1] + numbers[1:]) / np.float32(2)
    return jnp.searchsorted(between, jnp.clip(ratio, -1, 1), method="compare_all").astype(jnp.uint8)


def from_flat(packed, absmax, group_absmax, offset, shape: tuple[int, ...], parts: int) -> Nf4:
    """An Nf4 from the flat arrays of bitsandbytes: numpy arrays, or jax's.

    packed: uint8 [out x in / 2]. absmax: uint8 [out x in / 64]. group_absmax: float32 [groups]. offset: float32 [].
    """
    rows, columns = shape
    blocks = columns // BLOCK // parts  # of one part of a row
    begin = np.arange(rows * parts) * blocks
    touched = begin[:, None] // GROUP + np.arange(_groups(blocks))
    touched = np.minimum(touched, group_absmax.shape[0] - 1)
    shift = (begin % GROUP).astype(np.uint8)
    return Nf4(
        packed.reshape(rows, columns // 2),
        absmax.reshape(rows, columns // BLOCK),
        group_absmax[touched.reshape(rows, -1)],
        shift.reshape(rows, parts) if isinstance(packed, np.ndarray) else jnp.asarray(shift).reshape(rows, parts),
        offset,
    )


def dequantise(q: Nf4, dtype) -> jax.Array:
    """Dequantises an Nf4, or a shard of one, to `[out, in]` in `dtype`; products and a sum are in float32.

    The barriers keep the sum from being contracted with the product before it (numerics/rounding.py), so that the
    result is that of bitsandbytes to the bit.
    """
    rows, row_blocks = q.absmax.shape
    parts = q.shift.shape[-1]
    blocks = row_blocks // parts
    group_absmax = q.group_absmax.reshape(rows, parts, -1)
    if group_absmax.shape[-1] > 1:
        groups = (q.shift.astype(jnp.int32)[..., None] + jnp.arange(blocks)[None, None]) // GROUP
        group_absmax = jnp.take_along_axis(group_absmax, groups, axis=-1)
    relative = _look_up(DYNAMIC, q.absmax).reshape(rows, parts, blocks) * group_absmax
    absmax = materialised(materialised(relative) + q.offset)
    # Shifts, not a stack: XLA (jax 0.12) would write unpacked codes to memory and read them again.
    codes = (q.codes[..., None] >> np.array([[[4, 0]]], np.uint8) & 15).reshape(rows, row_blocks, BLOCK)
    numbers = _look_up(NUMBERS, codes) * absmax.reshape(rows, row_blocks, 1)
    return numbers.astype(dtype).reshape(rows, row_blocks * BLOCK)


def _look_up(numbers: np.ndarray, codes: jax.Array) -> jax.Array:
    return jnp.asarray(numbers).at[codes].get(mode="promise_in_bounds")


def planned(shape: tuple[int, ...], divided: tuple[int, int] = (1, 1)) -> Nf4:
    """Shapes and dtypes of matrices `[..., out, in]`, each sharded into parts by (rows, columns)."""
    *several, rows, columns = shape
    parts = divided[1]
    widths = (columns // 2, columns // BLOCK, parts * _groups(columns // BLOCK // parts), parts)
    dtypes = (jnp.uint8, jnp.uint8, jnp.float32, jnp.uint8)
    arrays = [jax.ShapeDtypeStruct((*several, rows, n), dtype) for n, dtype in zip(widths, dtypes, strict=True)]
    return Nf4(*[*arrays, jax.ShapeDtypeStruct(tuple(several), jnp.float32)])
