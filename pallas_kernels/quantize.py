"""Fewer bits: absmax, casts to FP8 (with the transposed copy), block-wise 8 bits, stochastic rounding to bfloat16.

Per tensor:   x8 = clip(x * (1 / scale), -max, max) in e4m3 (max 448) or e5m2 (max 57344); scale is a float32 [] that is
              known before. absmax is that of x before the cast, for the scale of the next step.
Transposed:   FP8 matrix products of cuBLASLt contract the last dimension of both operands, so the products of a weight's
              gradient need x8 in both layouts: `cast_transpose` writes both from one read.
Block-wise:   `block` neighbours of the last dimension share one float32 scale, absmax / max of the dtype (127 for int8);
              NaN or infinity makes its whole block not finite.
Stochastic:   16 random bits are added below the mantissa of a bfloat16, then the low half is cut: the expectation is x.

dtype promise: arithmetic is float32, rounding is to nearest even, once. Every function gives the same bits in its
reference and its kernel. NaN stays NaN. None has a vjp: they are called inside hand-written ones.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, shapes
from pallas_kernels.dispatch import Implementation

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

f32, u32 = jnp.float32, jnp.uint32
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
FP8 = (E4M3, E5M2)
BLOCK = 128


class Cast(NamedTuple):
    """What `cast_transpose` returns."""

    values: jax.Array  # [M, N]
    transposed: jax.Array  # [N, M]
    absmax: jax.Array  # float32 [], of x


class Blocks(NamedTuple):
    """Numbers in 8 bits: number i of a row is values[i] * scales[i // block]."""

    values: jax.Array  # [..., n]
    scales: jax.Array  # float32 [..., n / block]


def absmax_xla(x):
    """Largest magnitude, float32 []."""
    return jnp.max(jnp.abs(x.astype(f32)))


def cast_xla(x, scale, dtype):
    """x * (1 / scale), clipped to what dtype holds."""
    top = dispatch.largest(dtype)
    return jnp.clip(x.astype(f32) * (1 / scale), -top, top).astype(dtype)


def quantize_blocks_xla(x, dtype, block):
    """Scales are divided by, not multiplied with their reciprocal: a block's largest number is exactly the dtype's."""
    x = x.astype(f32).reshape(*x.shape[:-1], -1, block)
    top = 127.0 if dtype == jnp.int8 else dispatch.largest(dtype)
    # The floor keeps the scale of a block of zeros, or of numbers near the smallest there are, from being zero.
    scales = jnp.maximum(jnp.max(jnp.abs(x), axis=-1) / top, jnp.finfo(f32).tiny)
    x = x / scales[..., None]
    x = jnp.round(x) if dtype == jnp.int8 else x
    return Blocks(x.astype(dtype).reshape(*x.shape[:-2], -1), scales)


def dequantize_blocks_xla(blocks, dtype):
    """Multiplied in float32."""
    x = blocks.values.astype(f32).reshape(*blocks.scales.shape, -1)
    return (x * blocks.scales[..., None]).reshape(blocks.values.shape).astype(dtype)


def random_bits(seed: Int[Array, ""], index: Int[Array, "*b"]) -> Int[Array, "*b"]:
    """32 random bits (uint32) for every index, a counter: the same integers on every device, inside and outside kernels.

    Two rounds of a mixing function with low bias (Wellons, "Prospecting for hash functions", 2018), the seed added
    before each: streams of two seeds are not permutations of each other. seed and index: int32 or uint32.
    """
    seed, index = seed.astype(u32), index.astype(u32)
    first = _mix(seed + u32(0x9E3779B9))
    return _mix(_mix(index + first) + _mix(first ^ u32(0x85EBCA6B)))


def _mix(x):
    """A bijection of uint32."""
    x = (x ^ (x >> u32(16))) * u32(0x7FEB352D)
    x = (x ^ (x >> u32(15))) * u32(0x846CA68B)
    return x ^ (x >> u32(16))


def round_with(x: Float[Array, "*b"], bits: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """float32 x as bfloat16, rounded away from zero where the 16 bits cut off exceed random ones (top half of bits).

    Usable inside kernels. NaN and infinity stay; what is above the largest bfloat16 may become infinity.
    """
    raw = jax.lax.bitcast_convert_type(x, u32)
    rounded = (raw + (bits >> u32(16))) & u32(0xFFFF0000)
    finite = (raw & u32(0x7F800000)) != u32(0x7F800000)
    return jnp.where(finite, jax.lax.bitcast_convert_type(rounded, f32), x).astype(jnp.bfloat16)


def stochastic_round_xla(x, seed, offset):
    """Number i of the flattened x takes bits i + offset."""
    index = jax.lax.iota(u32, x.size).reshape(x.shape) + jnp.asarray(offset, u32)
    return round_with(x, random_bits(seed, index))


def absmax(x: Float[Array, "*b"], *, implementation: Implementation = None, interpret: bool = False) -> Float[Array, ""]:
    """Largest magnitude of x, float32 []; NaN where x has one."""
    return absmax_xla(x)


def cast(
    x: Float[Array, "*b"],
    scale: Float[Array, ""],
    dtype,
    *,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Float[Array, "*b"]:
    """clip(x / scale, -max, max) in e4m3 or e5m2; scale: float32 []."""
    return cast_xla(x, scale, dtype)


def cast_transpose(
    x: Float[Array, "*M N"],
    scale: Float[Array, ""],
    dtype,
    *,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Cast:
    """x as `cast` gives it, its transpose and the absmax of x, from one read; leading dimensions are flattened to M."""
    values = cast_xla(x, scale, dtype)
    flat = values.reshape(-1, x.shape[-1])
    return Cast(values, flat.T, absmax_xla(x))


def transpose(
    x8: Float[Array, "M N"], *, implementation: Implementation = None, interpret: bool = False
) -> Float[Array, "N M"]:
    """The transpose of a matrix of 8-bit numbers."""
    return x8.T


def quantize_blocks(
    x: Float[Array, "*b n"], dtype, block: int = BLOCK, *, implementation: Implementation = None, interpret: bool = False
) -> Blocks:
    """x in int8, e4m3 or e5m2 with a float32 scale for every `block` numbers of a row."""
    return quantize_blocks_xla(x, jnp.dtype(dtype), block)


def dequantize_blocks(
    blocks: Blocks, dtype, *, implementation: Implementation = None, interpret: bool = False
) -> Float[Array, "*b n"]:
    """The numbers again, in `dtype`; multiplied in float32."""
    return dequantize_blocks_xla(blocks, dtype)


def stochastic_round(
    x: Float[Array, "*b"],
    seed: Int[Array, ""],
    offset: int | Int[Array, ""] = 0,
    *,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Float[Array, "*b"]:
    """float32 x as bfloat16, up or down at random so that the expectation is x; bits `offset`, offset + 1, ... of seed."""
    return stochastic_round_xla(x, seed, offset)
