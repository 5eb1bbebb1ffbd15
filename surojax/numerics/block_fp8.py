"""FP8 with a scale for each block of 128 x 128 numbers: the layout of published checkpoints (DeepSeek-V3, Qwen3).

A block is 128 rows of 128 neighbours, or less at the ends of a matrix [out, in]:

    number = code * scale        code: e4m3, up to 448; scale: float32, largest magnitude of the block / 448

That is 1 byte a number and 4 bytes a block (arXiv:2412.19437, section 3.3). Checkpoints name the scales
`weight_scale_inv`.

So that every shard of a matrix is complete, a `BlockFp8` repeats the scales until none belongs to two devices: it has
one for each tile of gcd(128, rows of a device) x gcd(128, columns of a device) numbers. Nothing is repeated if devices
have multiples of 128 of both. Blocks are those of the whole matrix, so codes do not depend on the devices.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import fp8_format

BLOCK = 128  # rows, and columns, with one scale
LARGEST = 448.0  # of e4m3


class BlockFp8(NamedTuple):
    """A matrix [out, in] in FP8 with a scale for each tile; several have dimensions in front."""

    codes: Any  # float8_e4m3fn [..., out, in]
    scales: Any  # float32 [..., out / tile's rows, in / tile's columns]


def planned(shape: tuple[int, ...], divided: tuple[int, int] = (1, 1)) -> BlockFp8:
    """Shapes and dtypes of matrices `[..., out, in]`, each sharded into parts by (rows, columns)."""
    *several, rows, columns = shape
    tile = [math.gcd(BLOCK, n // parts) for n, parts in zip((rows, columns), divided, strict=True)]
    scales = jax.ShapeDtypeStruct((*several, rows // tile[0], columns // tile[1]), jnp.float32)
    return BlockFp8(jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn), scales)


def quantise(w: jax.Array, like: BlockFp8) -> BlockFp8:
    """Quantises a matrix [out, in]. like: as planned for it. A block with NaN or infinity is not finite afterwards."""
    return from_blocks(*in_blocks(w), like)


def in_blocks(w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(codes [out, in], scales of blocks [out / 128, in / 128], rounded up) of a matrix, as checkpoints have them."""
    rows, columns = w.shape
    padded = jnp.pad(w.astype(jnp.float32), ((0, -rows % BLOCK), (0, -columns % BLOCK)))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    absmax = fp8_format.from_ordered(jnp.max(fp8_format.ordered(blocks), axis=(1, 3)))
    scales = jnp.maximum(absmax, jnp.finfo(jnp.float32).tiny * LARGEST) * np.float32(1 / LARGEST)
    codes = jnp.clip(blocks * (1 / scales)[:, None, :, None], -LARGEST, LARGEST)
    codes = fp8_format.to_e4m3(codes).reshape(padded.shape)[:rows, :columns]
    return codes.astype(jnp.float8_e4m3fn), scales


def from_blocks(codes, scales, like: BlockFp8) -> BlockFp8:
    """A BlockFp8 from codes [out, in] and the scales of blocks, as checkpoints have them: numpy arrays, or jax's."""
    scales_of = zip(like.scales.shape[-2:], _tile(like), strict=True)
    row_blocks, column_blocks = (np.arange(n) * tile // BLOCK for n, tile in scales_of)
    return BlockFp8(codes, scales[row_blocks[:, None], column_blocks])


def dequantise(q: BlockFp8, dtype) -> jax.Array:
    """Dequantises a BlockFp8, or a shard of one, to `[out, in]` in `dtype`; products are in float32."""
    rows, columns = _tile(q)
    tiles = q.codes.astype(jnp.float32).reshape(q.scales.shape[0], rows, q.scales.shape[1], columns)
    return (tiles * q.scales[:, None, :, None]).astype(dtype).reshape(q.codes.shape)


def _tile(q: BlockFp8) -> tuple[int, int]:
    """Rows and columns of the numbers that have one scale."""
    rows, columns = (n // scales for n, scales in zip(q.codes.shape[-2:], q.scales.shape[-2:], strict=True))
    return rows, columns
