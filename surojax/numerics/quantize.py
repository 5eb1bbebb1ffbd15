"""Block-wise 8-bit copies of matrices: what travels between devices instead of 16 bits.

A block is `block_size` neighbours along the last dimension with one float32 scale: absmax / 127 for int8 (uniform
steps), absmax / 448 for fp8, which is e4m3 (8 binades of normal numbers, 3 bits of mantissa). Both cost 1 byte a number
and 4 bytes a block. Used for the gathers of ZeRO++ (Wang et al. 2023, arXiv:2306.10209: qwZ for weights, qgZ for
gradients); there as here small blocks are what keeps 8 bits accurate enough to train with.

The error of a number x in a block of largest magnitude m, beside float32 rounding: int8 at most m / 254; fp8 at most
|x| / 16, or m / 458752 where that is more (448 * 2^10: half a step of its subnormal numbers).

NaN or infinity makes its whole block not finite, so it is not lost. Blocks of zeros stay zeros.

A Quantized may also have one scale for a whole matrix, as products in float8 need it (fp8.py): `quantise_whole`.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import quantize as kernels

BLOCK = 128
SMALLEST_BLOCK = 32  # scales of smaller ones would cost more than an eighth of the values
DTYPES: dict[str, str] = {"fp8": "float8_e4m3fn", "int8": "int8"}
Format = Literal["fp8", "int8"]


class Quantized(NamedTuple):
    """A matrix in 8 bits: number i of a row is values[i] * scales[i // block], or all are values * scales."""

    values: Any  # [..., n], int8 or float8_e4m3fn
    scales: Any  # [..., n / block], float32; one for a whole matrix: [...] without the matrix's two dimensions


def is_quantized(x) -> bool:
    """For `is_leaf`: trees of weights hold a Quantized where others hold an array."""
    return isinstance(x, Quantized)


def block_size(n: int) -> int:
    """Numbers in a block of rows of n: the largest divisor of n from 32 to 128, or n itself where there is none.

    Every block is full, so `Quantized` says by its shapes how it is cut, and shards of a row can be put together.
    """
    return next((b for b in range(min(n, BLOCK), SMALLEST_BLOCK - 1, -1) if n % b == 0), n)


def quantise(x: jax.Array, dtype, block: int | None = None) -> Quantized:
    """x `[..., n]` in int8 or float8_e4m3fn; blocks of `block_size(n)` unless `block`, a divisor of n, is given."""
    block = block or block_size(x.shape[-1])
    return Quantized(*kernels.quantize_blocks(x, dtype, block, implementation="xla"))


def has_one_scale(q) -> bool:
    """Whether a Quantized has one scale for a whole matrix."""
    return is_quantized(q) and len(q.scales.shape) == len(q.values.shape) - 2


def scale_for(absmax: jax.Array, dtype, margin: int = 0) -> jax.Array:
    """The smallest power of two that brings numbers up to `absmax` x 2^margin into the range of `dtype`; elementwise.

    Between 2^-60 and 2^60, so that products of two scales stay numbers. NaN and infinity give a scale that is not
    finite: they are not lost.
    """
    ratio = jnp.maximum(absmax.astype(jnp.float32) * (2.0**margin / float(jnp.finfo(dtype).max)), 2.0**-60)
    bits = jax.lax.bitcast_convert_type(ratio, jnp.uint32)
    up = (bits + jnp.uint32(0x7FFFFF)) & jnp.uint32(0x7F800000)  # the exponent, one more if there is a mantissa
    scale = jax.lax.bitcast_convert_type(up, jnp.float32)
    return jnp.where(ratio < 2.0**60, jnp.minimum(scale, 2.0**60), ratio * jnp.inf)


def quantise_whole(x: jax.Array, dtype, absmax: jax.Array | None = None) -> Quantized:
    """A matrix `[..., rows, columns]` in float8 with one scale, a power of two (fp8.py says why).

    absmax: largest magnitude of each matrix, measured if not given.
    """
    absmax = largest_magnitude(x) if absmax is None else absmax
    scales, limit = scale_for(absmax, dtype), float(jnp.finfo(dtype).max)
    values = x.astype(jnp.float32) * (1 / scales)[..., None, None]
    return Quantized(jnp.clip(values, -limit, limit).astype(dtype), scales)


def largest_magnitude(x: jax.Array) -> jax.Array:
    """Of a matrix `[..., rows, columns]`, float32 `[...]`."""
    return jnp.max(jnp.abs(x), axis=(-2, -1)).astype(jnp.float32)


def dequantise(q: Quantized, dtype) -> jax.Array:
    """The matrix again, in `dtype`; multiplied in float32."""
    if has_one_scale(q):
        return (q.values.astype(jnp.float32) * q.scales[..., None, None]).astype(dtype)
    return kernels.dequantize_blocks(kernels.Blocks(*q), dtype, implementation="xla")


def quantise_matrices(tree, dtype):
    """The weights of one layer with every matrix quantised; vectors stay as they are."""
    return jax.tree.map(lambda x: quantise(x, dtype) if x.ndim > 1 else x, tree)


def dequantise_all(tree, dtype):
    """A tree with every Quantized dequantised."""
    return jax.tree.map(lambda x: dequantise(x, dtype) if is_quantized(x) else x, tree, is_leaf=is_quantized)


def work_copy(weights, like, dtype, reduce=lambda absmax: absmax):
    """Weights in the form and dtypes of `like`: quantised where it holds a Quantized, whose blocks it follows.

    They are quantised from numbers rounded to `dtype`, the work dtype, as a fetch does it. `reduce_precision` and not a
    cast does that: XLA is free to drop a cast to 16 bits and back.
    reduce: from the largest magnitude of a shard to that of the whole matrix.
    """
    bits = jnp.finfo(dtype)

    def one(like, x):
        if is_quantized(like):
            x = jax.lax.reduce_precision(x.astype(jnp.float32), bits.nexp, bits.nmant)
            if has_one_scale(like):
                return quantise_whole(x, like.values.dtype, reduce(largest_magnitude(x)))
            return quantise(x, like.values.dtype, like.values.shape[-1] // like.scales.shape[-1])
        return x.astype(like.dtype)

    return jax.tree.map(one, like, weights, is_leaf=is_quantized)


def planned(x: jax.ShapeDtypeStruct, dtype, block: int) -> Quantized:
    """Shapes and dtypes of `quantise(x, dtype, block)`, of `quantise_whole` if block is 0."""
    scales = (*x.shape[:-1], x.shape[-1] // block) if block else x.shape[:-2]
    return Quantized(jax.ShapeDtypeStruct(x.shape, dtype), jax.ShapeDtypeStruct(scales, jnp.float32))
