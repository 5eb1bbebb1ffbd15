"""NVFP4 at rest: matrices in 4 bits with a scale for each 16 neighbours of a row (NVIDIA 2025, arXiv:2509.25149).

    number = NUMBERS[code] * scale * M        scale: e4m3, up to 448; M: float32, one for the matrix

M makes the largest scale 448, and a block's largest magnitude becomes about 6 scales: pallas_kernels/nvfp4_format.py
has the arithmetic, which the recipe `nvfp4` shares. Two codes are in one byte, the first in the low half, as in
published checkpoints. That is 0.5 bytes a number, and 1/16 for the scales. Unlike the recipe's matrices, which are
quantised along both of their dimensions, blocks are of single rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import nvfp4_format

BLOCK = nvfp4_format.BLOCK  # numbers with one scale
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
NUMBERS = np.concatenate([MAGNITUDES, -MAGNITUDES])  # e2m1: the sign is the highest of four bits


class Nvfp4(NamedTuple):
    """A matrix [out, in] in NVFP4; several have dimensions in front. Every row, and part of whole blocks, is complete.

    codes: of numbers 2 i (low half) and 2 i + 1.
    """

    codes: Any  # uint8 [..., out, in / 2]
    scales: Any  # float8_e4m3fn [..., out, in / 16]
    tensor_scale: Any  # float32 [...]


def planned(shape: tuple[int, ...], divided: tuple[int, int] = (1, 1)) -> Nvfp4:
    """Shapes and dtypes of matrices `[..., out, in]`, however they are divided."""
    del divided
    *several, rows, columns = shape
    return Nvfp4(
        jax.ShapeDtypeStruct((*several, rows, columns // 2), jnp.uint8),
        jax.ShapeDtypeStruct((*several, rows, columns // BLOCK), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct(tuple(several), jnp.float32),
    )


def quantise(w: jax.Array, like: Nvfp4 | None = None, *, largest: jax.Array | None = None) -> Nvfp4:
    """Quantises a matrix [out, in], `in` a multiple of 16. NaN or infinity makes the tensor scale not finite.

    largest: magnitude in all matrices that have the same tensor scale; None: in this one.
    """
    del like  # all matrices of a shape are alike
    whole = nvfp4_format.WHOLE if largest is None else nvfp4_format.OperandPart(largest=lambda absmax: largest)
    q = nvfp4_format.reference(w, part=whole)
    size = jnp.searchsorted(MAGNITUDES, jnp.abs(q.values), method="compare_all").astype(jnp.uint8)
    codes = (size | jnp.signbit(q.values).astype(jnp.uint8) << 3).reshape(w.shape[0], -1, 2)
    return Nvfp4(codes[..., 0] | codes[..., 1] << 4, q.scales.astype(jnp.float8_e4m3fn), q.tensor_scale)


def dequantise(q: Nvfp4, dtype) -> jax.Array:
    """Dequantises an Nvfp4, or a shard of one, to `[out, in]` in `dtype`.

    The first product is exact in float32, so each number is rounded twice: to float32, and to `dtype`.
    """
    rows, row_blocks = q.scales.shape
    codes = (q.codes[..., None] >> np.array([[[0, 4]]], np.uint8) & 15).reshape(rows, row_blocks, BLOCK)  # see nf4.py
    numbers = jnp.asarray(NUMBERS).at[codes].get(mode="promise_in_bounds")
    numbers = numbers * q.scales.astype(jnp.float32)[..., None] * q.tensor_scale
    return numbers.astype(dtype).reshape(rows, row_blocks * BLOCK)
