"""Block-wise 8-bit copies of matrices, which collectives send instead of 16-bit numbers.

A block is `block_size` neighbours along the last dimension with one float32 scale: absmax / 127 for int8 (uniform
steps), absmax / 448 for fp8, which is e4m3 (8 binades of normal numbers, 3 bits of mantissa). Both take 1 byte a number
and 4 bytes a block. They are used in the collectives of ZeRO++ (Wang et al. 2023, arXiv:2306.10209: qwZ for weights,
qgZ for gradients). As in that paper, small blocks make 8 bits accurate enough for training.

The error of a number x in a block of largest magnitude m, in addition to float32 rounding: int8 at most m / 254; fp8 at
most the larger of |x| / 16 and m / 458752 (448 * 2^10: half a step of e4m3's subnormal numbers).

NaN or infinity makes all numbers of its block not finite, so it is not lost. Blocks of zeros stay zeros.

A Quantized may also have one scale per matrix, which products in float8 need (fp8.py): see `quantise_whole`.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import quantize as kernels
from surojax.numerics import base_formats

BLOCK = 128
SMALLEST_BLOCK = 32  # the scales of smaller blocks would take more than an eighth of the memory of the values
DTYPES: dict[str, str] = {"fp8": "float8_e4m3fn", "int8": "int8"}
Format = Literal["fp8", "int8"]


class Quantized(NamedTuple):
    """A matrix in few bits with its scales.

    In blocks: number i of a row is values[i] * scales[i // block], times tensor_scale if there is one. With one scale
    per matrix: values * scales.
    """

    values: Any  # [..., n], int8, float8 or, with a tensor_scale, float4
    scales: Any  # [..., n / block], or with one scale per matrix [...] without the matrix's two dimensions
    tensor_scale: Any = None  # float32 []: of NVFP4

    @property
    def block(self) -> int:
        """Numbers per block."""
        return self.values.shape[-1] // self.scales.shape[-1]


def is_quantized(x) -> bool:
    """True for a Quantized. As `is_leaf` it makes a Quantized in a tree of weights one leaf, like an array."""
    return isinstance(x, Quantized)


def block_size(n: int) -> int:
    """Numbers per block in rows of n numbers: the largest divisor of n from 32 to 128, or n if there is none.

    Every block is full. So the shapes of a `Quantized` determine its blocks, and shards of a row can be concatenated.
    """
    return next((b for b in range(min(n, BLOCK), SMALLEST_BLOCK - 1, -1) if n % b == 0), n)


def quantise(x: jax.Array, dtype, block: int | None = None) -> Quantized:
    """Quantises x `[..., n]` to int8 or float8_e4m3fn. block: a divisor of n, `block_size(n)` if None."""
    block = block or block_size(x.shape[-1])
    return Quantized(*kernels.quantize_blocks(x, dtype, block, implementation="xla"))


def has_one_scale(q) -> bool:
    """Returns True if q is a Quantized with one scale for each matrix."""
    return is_quantized(q) and len(q.scales.shape) == len(q.values.shape) - 2


def scale_for(absmax: jax.Array, dtype, margin: int = 0) -> jax.Array:
    """The smallest power of two s with absmax x 2^margin / s within the range of `dtype`; elementwise.

    It is from 2^-60 to 2^60, so that the product of two scales is a finite float32 and not 0. An absmax of NaN or
    infinity gives a scale that is not finite, so it is not lost.
    """
    ratio = jnp.maximum(absmax.astype(jnp.float32) * (2.0**margin / float(jnp.finfo(dtype).max)), 2.0**-60)
    bits = jax.lax.bitcast_convert_type(ratio, jnp.uint32)
    up = (bits + jnp.uint32(0x7FFFFF)) & jnp.uint32(0x7F800000)  # the exponent, plus 1 if the mantissa is not 0
    scale = jax.lax.bitcast_convert_type(up, jnp.float32)
    return jnp.where(ratio < 2.0**60, jnp.minimum(scale, 2.0**60), ratio * jnp.inf)


def quantise_whole(x: jax.Array, dtype, absmax: jax.Array | None = None) -> Quantized:
    """Quantises matrices `[..., rows, columns]` to float8 with one power-of-two scale each (fp8.py says why).

    absmax: `[...]`, largest magnitude of each matrix; None: computed from x.
    """
    absmax = largest_magnitude(x) if absmax is None else absmax
    scales = scale_for(absmax, dtype)
    limit = float(jnp.finfo(dtype).max)
    values = x * (1 / scales)[..., None, None]
    return Quantized(jnp.clip(values, -limit, limit).astype(dtype), scales)


def largest_magnitude(x: jax.Array) -> jax.Array:
    """Largest magnitudes of matrices `[..., rows, columns]`: float32 `[...]`."""
    return jnp.max(jnp.abs(x), axis=(-2, -1)).astype(jnp.float32)


def dequantise(q: Quantized, dtype) -> jax.Array:
    """The numbers of a Quantized in `dtype`; values and scales are multiplied in float32."""
    if has_one_scale(q):
        return (q.values.astype(jnp.float32) * q.scales[..., None, None]).astype(dtype)
    return kernels.dequantize_blocks(kernels.BlockQuantized(q.values, q.scales), dtype, implementation="xla")


def dequantise_all(tree, dtype):
    """Dequantises every Quantized of a tree."""
    return jax.tree.map(lambda x: dequantise(x, dtype) if is_quantized(x) else x, tree, is_leaf=is_quantized)


def work_copy(weights, like, dtype, reduce=lambda absmax: absmax):
    """Casts master weights to the dtypes of `like`; quantises tensors that are a Quantized or a Coded in `like`.

    Numbers are rounded to `dtype`, the work dtype, before they are quantised: the result equals work weights that are
    quantised when they are fetched. `reduce_precision` rounds them, because XLA may drop a cast to 16 bits and back.
    reduce: from the largest magnitude of a shard to the largest magnitude of the matrix.
    """
    bits = jnp.finfo(dtype)

    def cast(like, x):
        if base_formats.is_coded(x):
            return x
        if not _is_rounded(like):
            return x.astype(like.dtype)
        x = jax.lax.reduce_precision(x.astype(jnp.float32), bits.nexp, bits.nmant)
        if base_formats.is_coded(like):
            return base_formats.quantise(x, like)
        if has_one_scale(like):
            return quantise_whole(x, like.values.dtype, reduce(largest_magnitude(x)))
        return quantise(x, like.values.dtype, like.values.shape[-1] // like.scales.shape[-1])

    return jax.tree.map(cast, like, weights, is_leaf=_is_rounded)


def _is_rounded(x) -> bool:
    return is_quantized(x) or base_formats.is_coded(x)


def planned(x: jax.ShapeDtypeStruct, dtype, block: int) -> Quantized:
    """Shapes and dtypes of `quantise(x, dtype, block)`, or of `quantise_whole(x, dtype)` if block is 0."""
    scales = (*x.shape[:-1], x.shape[-1] // block) if block else x.shape[:-2]
    return Quantized(jax.ShapeDtypeStruct(x.shape, dtype), jax.ShapeDtypeStruct(scales, jnp.float32))
