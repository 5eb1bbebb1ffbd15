"""MXFP4 at rest: 4 bits a number, and a power of two for each 32 neighbours of a row (OCP Microscaling Formats 1.0).

    number = NUMBERS[code] * 2^(scale - 127)        code: e2m1, up to 6; scale: e8m0, 255 is NaN

Two codes are in one byte, the first in the low half. That is 0.5 bytes a number, and 1/32 for the scales. gpt-oss is
published so: its experts alone, whose attention, router, embedding and head are in 16 bits. So this format is of
experts alone; others of 4 bits (nf4.py, nvfp4.py) are for any matrix.

A block's scale is the smallest with which its largest number is at most 6, so that none is cut off. Numbers that come
from a matrix in this format are the same after they are quantised again, though codes and scales may differ.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import fp8_format, nvfp4_format
from surojax.numerics.nvfp4 import NUMBERS

BLOCK = 32  # numbers with one scale
NOT_FINITE = 255  # the scale of a block with NaN or infinity
LARGEST_SCALE = 252  # with which 6 is finite in float32
SIX = 0x00400000  # mantissa of 6 = 1.5 x 4


class Mxfp4(NamedTuple):
    """A matrix [out, in] in MXFP4; several have dimensions in front. Every row, and part of whole blocks, is complete.

    codes: of numbers 2 i (low half) and 2 i + 1.
    """

    codes: Any  # uint8 [..., out, in / 2]
    scales: Any  # uint8 [..., out, in / 32]


def planned(shape: tuple[int, ...], divided: tuple[int, int] = (1, 1)) -> Mxfp4:
    """Shapes and dtypes of matrices `[..., out, in]`, however they are divided."""
    del divided
    *rows, columns = shape
    return Mxfp4(
        jax.ShapeDtypeStruct((*rows, columns // 2), jnp.uint8),
        jax.ShapeDtypeStruct((*rows, columns // BLOCK), jnp.uint8),
    )


def quantise(w: jax.Array, like: Mxfp4) -> Mxfp4:
    """Quantises a matrix [out, in], `in` a multiple of 32. A block with NaN or infinity is NaN."""
    del like
    blocks = w.astype(jnp.float32).reshape(w.shape[0], -1, BLOCK)
    top = jnp.max(fp8_format.ordered(blocks), axis=-1)
    exponent = (top >> 23) - 2 + ((top & 0x007FFFFF) > SIX)
    scales = jnp.where(top < nvfp4_format.INFINITE, jnp.clip(exponent, 1, LARGEST_SCALE + 1), NOT_FINITE)
    inverse = fp8_format.power_of_two(jnp.maximum(254 - scales, 0).astype(jnp.uint32))
    codes = nvfp4_format.codes(blocks, inverse[..., None], None).astype(jnp.uint8).reshape(w.shape[0], -1, 2)
    return Mxfp4(codes[..., 0] | codes[..., 1] << 4, scales.astype(jnp.uint8))


def dequantise(q: Mxfp4, dtype) -> jax.Array:
    """Dequantises an Mxfp4, or a shard of one, to `[out, in]` in `dtype`: exact in bfloat16 and float32.

    The scale 2^-127, which float32 has as a subnormal number only, counts as 0.
    """
    rows, row_blocks = q.scales.shape
    codes = (q.codes[..., None] >> np.array([[[0, 4]]], np.uint8) & 15).reshape(rows, row_blocks, BLOCK)  # see nf4.py
    numbers = jnp.asarray(NUMBERS).at[codes].get(mode="promise_in_bounds")
    scales = jnp.where(q.scales == NOT_FINITE, jnp.nan, fp8_format.power_of_two(q.scales.astype(jnp.uint32)))
    return (numbers * scales[..., None]).astype(dtype).reshape(rows, row_blocks * BLOCK)
