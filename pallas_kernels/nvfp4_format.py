"""The NVFP4 format: e2m1 values, an e4m3 scale for every 16 neighbours along the dimension that a product sums over,
and a float32 scale for the tensor.

x[i, k] = values[i, k] * scales[i, k / 16] * tensor_scale (NVIDIA 2025, arXiv:2509.25149). The tensor scale makes the
largest block scale 448. A block's scale is its largest magnitude / 6, so that this number becomes 6, e2m1's largest.
With a seed, values are rounded stochastically and block scales are rounded up, since a scale rounded down would clip
the largest number. NaN or infinity anywhere makes the tensor scale not finite, and so every number.

`rotate` multiplies groups of 16 rows by diag(signs) H / 4, a random Hadamard matrix. The matrix is orthogonal: it does
not change the product of two operands that are rotated alike, and spreads outliers over a block. Numbers from 2^124 on
may overflow in it. Weights have one scale for 16 x 16 numbers, so that a matrix and its transpose are the same numbers.

This file has the arithmetic, which kernels (nvfp4_quantize.py) and references share, and the references. Arithmetic is
float32. Rotations are additions in one order and rounding consists of exact steps. Instead of divisions there are
products with reciprocals: those of e4m3 are from a table, those of tensor scales are computed outside of kernels. So
there is nothing that a GPU approximates or a compiler may contract, and kernels and references are equal to the bit.
Random numbers are hashes of the seed and the position of a pair of numbers, 16 bits for each: expectations are right
within 2^-17 of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels import fp8_format, quantize as plain
from pallas_kernels.fp8_format import E4M3

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

f32, i32, u32 = jnp.float32, jnp.int32, jnp.uint32
E2M1 = jnp.dtype(jnp.float4_e2m1fn)
BLOCK = 16
E4M3_MAX, E2M1_MAX = 448.0, 6.0
INFINITE = 0x7F800000  # `fp8.ordered` of infinity; NaN is above it
RECIPROCALS = [8 / (8 + m) for m in range(8)]  # of e4m3's mantissas
MAGIC = np.float32(1.5 * 2**23)  # its last bit is 1, and so is that of numbers near it


class NVFP4(NamedTuple):
    """An NVFP4 array: number (i, k) is values[i, k] * scales[i, k / 16] * tensor_scale."""

    values: jax.Array  # e2m1 [..., n]; float32 from the references
    scales: jax.Array  # e4m3 [..., n / 16]; float32 from the references
    tensor_scale: jax.Array  # float32 []


class OperandPart(NamedTuple):
    """Says which part of a matrix an array is, so that it is rounded as the whole matrix would be.

    Each of several devices has a part, which begins at a multiple of 16: no block lies in two parts.
    """

    largest: Callable = lambda absmax: absmax  # largest magnitudes of parts, float32 [...] -> those of matrices
    columns: int | None = None  # of the matrix; None: those of x
    first: Callable = lambda: u32(0)  # () -> index of x's first column, uint32 []


WHOLE = OperandPart()


# --- arithmetic of references and kernels -----------------------------------------------------------------------------


def hadamard(rows: list) -> list:
    """16 arrays multiplied by H / 4, H[i][j] = (-1)^popcount(i & j), in float32: four rounds of additions."""
    for distance in (1, 2, 4, 8):
        below = [rows[i - distance] if i & distance else rows[i] for i in range(BLOCK)]
        above = [rows[i] if i & distance else rows[i + distance] for i in range(BLOCK)]
        rows = [a - b if i & distance else a + b for i, (a, b) in enumerate(zip(below, above, strict=True))]
    return [row * f32(0.25) for row in rows]


def signed(x, signs, row: int):
    """x, negated if bit `row` of signs is 1."""
    return fp8_format.from_ordered(_bits(x) ^ (((signs >> u32(row)) & u32(1)) << u32(31)))


def _bits(x):
    return jax.lax.bitcast_convert_type(x, u32)


def factors(absmax):
    """(tensor scale, factor from a block's largest magnitude to its scale, reciprocal of the tensor scale).

    A lower bound of absmax keeps them finite for tensors of zeros.
    """
    scale = jnp.maximum(absmax, f32(2.0**-100)) * f32(1 / (E4M3_MAX * E2M1_MAX))
    finite = absmax < jnp.inf
    return scale, jnp.where(finite, 1 / (f32(E2M1_MAX) * scale), 0), jnp.where(finite, 1 / scale, 0)


def block_scales(top, factor, up: bool):
    """Scales of blocks as float32 that e4m3 can represent. top: `fp8.ordered` largest magnitudes; up: round up."""
    top = fp8_format.from_ordered(jnp.where(top < i32(INFINITE), top, i32(0)))
    ideal = jnp.minimum(top * factor, f32(E4M3_MAX))
    return fp8_format.up_to_e4m3(ideal) if up else fp8_format.to_e4m3(ideal)


def inverses(scale, reciprocal):
    """1 / (scale * tensor scale); 0 if the scale is 0: all numbers of such a block become 0."""
    bits = _bits(scale)
    mantissa_inverse = f32(RECIPROCALS[0])
    mantissa = bits & u32(7 << 20)
    for m, value in enumerate(RECIPROCALS[1:], 1):
        mantissa_inverse = jnp.where(mantissa == u32(m << 20), f32(value), mantissa_inverse)
    inverse = mantissa_inverse * fp8_format.power_of_two(u32(254) - (bits >> u32(23))) * reciprocal
    return jnp.where(scale == f32(0), f32(0), inverse)


def _steps(x, inverse, dither):
    """(|x * inverse|, at most 6, in steps of its binade, before rounding but with dither; the binade's exponent)."""
    size = jnp.abs(x * inverse)
    size = jnp.where(size < f32(E2M1_MAX), size, f32(E2M1_MAX))
    exponent = jnp.maximum(_bits(size) >> u32(23), u32(127))  # below 1 steps are those of [1, 2), 0.5
    steps = size * fp8_format.power_of_two(u32(255) - exponent)
    return (steps if dither is None else steps + dither), exponent


def rounded_to_e2m1(x, inverse, dither):
    """x * inverse rounded to e2m1, as float32."""
    steps, exponent = _steps(x, inverse, dither)
    size = jnp.abs(fp8_format.nearest(steps)) * fp8_format.power_of_two(exponent - u32(1))
    return jnp.where(_negative(x), -size, size)


def _negative(x):
    """True where the sign bit of x is set; False for NaN, whose sign differs between devices."""
    return _bits(x) - u32(1 << 31) <= u32(INFINITE)


def codes(x, inverse, dither):
    """The four bits of x * inverse rounded to e2m1, as uint32."""
    steps, exponent = _steps(x, inverse, dither)
    size = _bits(steps + MAGIC) + (exponent + exponent - u32(int(MAGIC.view(np.uint32)) + 2 * 127))
    return jnp.where(_negative(x), size + u32(8), size)


def dithers(seed, index):
    """Two random numbers for each index of a pair of numbers: see `_dither`."""
    random = plain.random_bits(seed, index)
    return _dither(random & u32(0xFFFF)), _dither(random >> u32(16))


def _dither(random):
    """A random number from (-1/2, 1/2), to add to steps before they are rounded to nearest. random: 16 random bits.

    It is an odd multiple of 2^-17.
    """
    return fp8_format.from_ordered((random << u32(7)) | u32(0x3F800040)) - f32(1.5)


# --- reference --------------------------------------------------------------------------------------------------------


def reference(x: Float[Array, "*M N"], seed: Int[Array, ""] | None = None, part: OperandPart = WHOLE) -> NVFP4:
    """`quantize` with results in float32 that the formats can represent: a cast to them changes no number."""
    blocks = x.astype(f32).reshape(-1, x.shape[-1] // BLOCK, BLOCK)
    number = jax.lax.broadcasted_iota(u32, (blocks.shape[0], x.shape[-1]), 0) * u32(part.columns or x.shape[-1])
    number = number + jax.lax.broadcasted_iota(u32, number.shape, 1) + part.first()
    q = _in_blocks(blocks, seed, (number >> u32(1)).reshape(blocks.shape), number.reshape(blocks.shape), part)
    return NVFP4(q.values.reshape(x.shape), q.scales.reshape(*x.shape[:-1], -1), q.tensor_scale)


def reference_rotated(
    x: Float[Array, "M N"], rotation: Int[Array, ""], seed: Int[Array, ""] | None = None, part: OperandPart = WHOLE
) -> NVFP4:
    """`quantize_rotated` with results in float32, as `reference`."""
    blocks = rotate(x, rotation).reshape(x.shape[1], -1, BLOCK)
    row, column = (jax.lax.broadcasted_iota(u32, x.shape[::-1], axis).reshape(blocks.shape) for axis in (0, 1))
    pair = (column >> u32(1)) * u32(part.columns or x.shape[1]) + row + part.first()
    q = _in_blocks(blocks, seed, pair, column, part)
    return NVFP4(q.values.reshape(x.shape[::-1]), q.scales, q.tensor_scale)


def reference_weights(w: Float[Array, "M N"], part: OperandPart = WHOLE) -> tuple[NVFP4, NVFP4]:
    """(`quantize_weights`, `quantize_weights_transposed`) with results in float32, as `reference`."""
    m, n = w.shape
    scale, factor, reciprocal = factors(part.largest(fp8_format.absmax(w)))
    blocks = w.astype(f32).reshape(m // BLOCK, BLOCK, n // BLOCK, BLOCK)
    scales = block_scales(jnp.max(fp8_format.ordered(blocks), axis=(1, 3)), factor, False)
    inverse = inverses(scales, reciprocal)

    def quantized(w, scales, inverse):
        blocks = w.astype(f32).reshape(scales.shape[0], BLOCK, -1, BLOCK)
        values = rounded_to_e2m1(blocks, inverse[:, None, :, None], None).reshape(w.shape)
        return NVFP4(values, jnp.repeat(scales, BLOCK, axis=0), scale)

    return quantized(w, scales, inverse), quantized(_transposed(w), scales.T, inverse.T)


def rotate(x: Float[Array, "M N"], rotation: Int[Array, ""]) -> Float[Array, "N M"]:
    """Multiplies each group of 16 rows of x by diag(signs) H / 4 and transposes; float32.

    The signs are 16 random bits of the seed `rotation`, uint32 or int32 [].
    """
    shape = x.shape[1], x.shape[0] // BLOCK, BLOCK
    place = jax.lax.broadcasted_iota(u32, shape, 2)
    y = _transposed(x).astype(f32).reshape(shape)
    y = fp8_format.from_ordered(_bits(y) ^ (((signs(rotation) >> place) & u32(1)) << u32(31)))
    for distance in (1, 2, 4, 8):  # `hadamard`, written so that XLA compiles it to two loops
        other = jnp.flip(y.reshape(*shape[:2], -1, 2, distance), axis=3).reshape(shape)
        y = jnp.where((place & u32(distance)) == u32(0), y + other, other - y)
        # On GPUs XLA stores y here anyway; on CPUs, without a barrier, every reader would compute all 15 additions.
        y = jax.lax.optimization_barrier(y) if distance == 2 else y
    return (y * f32(0.25)).reshape(x.shape[::-1])


def _transposed(x):
    """x^T, transposed in memory too; otherwise XLA reads columns of x in every loop that follows."""
    return with_layout_constraint(x.T, Layout(major_to_minor=(0, 1)))


def signs(rotation):
    """The random bits that a rotation takes its signs from, uint32 []."""
    return plain.random_bits(rotation, u32(0))


def _in_blocks(blocks, seed, pair, place, part: OperandPart) -> NVFP4:
    """Quantises float32 blocks along the last axis.

    pair: index of the pair of each number, for random numbers; place: its last bit says which of the pair it is.
    """
    scale, factor, reciprocal = factors(part.largest(fp8_format.absmax(blocks)))
    scales = block_scales(jnp.max(fp8_format.ordered(blocks), axis=-1), factor, seed is not None)
    dither = None
    if seed is not None:
        dither = _dither((plain.random_bits(seed, pair) >> ((place & u32(1)) << u32(4))) & u32(0xFFFF))
    inverse = inverses(scales, reciprocal)[..., None]
    return NVFP4(rounded_to_e2m1(blocks, inverse, dither), scales, scale)


def narrow(q: NVFP4) -> NVFP4:
    """The result of a reference in the dtypes of the format."""
    return NVFP4(q.values.astype(E2M1), q.scales.astype(E4M3), q.tensor_scale)
