"""FP8 numbers, e4m3 and e5m2 (Micikevicius et al. 2022, arXiv:2209.05433), inside and outside of kernels.

GPUs have instructions that convert them from compute capability 8.9 on. For older GPUs (A100) kernels compute the same
bits with integers: rounding to nearest even is `bits + half - 1 + odd` for normal numbers; for subnormal numbers it is
the addition of a float32 whose last bit is FP8's smallest step. Tracing finds out from `jax.default_device` whether the
GPU has the instructions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch

f32, u32 = jnp.float32, jnp.uint32
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
FP8 = (E4M3, E5M2)
FIRST = (8, 9)  # compute capability with instructions for FP8


def reference(x, scale, dtype):
    """clip(x * (1 / scale), -max, max) in e4m3 or e5m2: the same expression as in kernels, so the same bits."""
    return _clip(x.astype(f32) * (1 / scale), dtype).astype(dtype)


def absmax(x, axis: int | None = None):
    """Largest magnitudes, float32; NaN if x has one."""
    return from_ordered(jnp.max(ordered(x), axis=axis))


def ordered(x):
    """The bits of float32 magnitudes as int32, which have the same order, with NaN as the largest.

    Maxima are taken of these: XLA on CPUs (jax 0.11.2 and 0.12.0.1) loses NaN in maxima of 4096 floats or more.
    """
    return jax.lax.bitcast_convert_type(x.astype(f32), jnp.int32) & jnp.int32(0x7FFFFFFF)


def from_ordered(bits):
    """The inverse of `ordered`: float32 magnitudes."""
    return jax.lax.bitcast_convert_type(bits, f32)


def same_bits(x, dtype):
    """The bits of x as another dtype of the same width; no copy."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def is_scale(scale) -> bool:
    """Returns True if `scale` is a float32 array without dimensions."""
    return getattr(scale, "shape", None) == () and getattr(scale, "dtype", None) == f32


def dtype_and_shape(x) -> str:
    """dtype and shape of x as text, for errors."""
    return f"{x.dtype} {x.shape}" if hasattr(x, "dtype") else repr(x)


def store_dtype(dtype):
    """The dtype in which kernels read and write FP8: itself, or uint8 if the GPU has no instructions for FP8."""
    return dtype if has_instructions() else jnp.dtype(jnp.uint8)


def encode(x, inverse, dtype):
    """Inside a kernel: clip(x * inverse, -max, max), in `store_dtype(dtype)`. x: float32."""
    x = _clip(x * inverse, dtype)
    return x.astype(dtype) if has_instructions() else code(x, dtype).astype(jnp.uint8)


def decode(x8, dtype):
    """Inside a kernel: the float32 numbers of x8, which is FP8 in `store_dtype(dtype)`."""
    return x8.astype(f32) if has_instructions() else value(x8.astype(u32), dtype)


def as_stored(x8):
    """An FP8 array in the `store_dtype` that kernels read; no copy."""
    return jax.lax.bitcast_convert_type(x8, store_dtype(x8.dtype))


def has_instructions() -> bool:
    """Returns True if the GPU that the program is traced for has FP8 instructions, and for the interpreter."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    capability = dispatch.capability(device)
    return capability is None or capability >= FIRST


def code(x, dtype):
    """x rounded to FP8, to nearest even, as bits in a uint32 0..255. x: float32 in the range of dtype, or NaN."""
    bias, mantissa = _format(dtype)
    bits = jax.lax.bitcast_convert_type(x, u32)
    size = bits & u32(0x7FFFFFFF)
    cut = u32(23 - mantissa)
    normal = ((size + ((u32(1) << (cut - u32(1))) - u32(1)) + ((size >> cut) & u32(1))) >> cut) - u32(
        (127 - bias) << mantissa
    )
    magic = np.float32(2.0 ** (24 - bias - mantissa))  # its last bit is FP8's smallest step
    small = jax.lax.bitcast_convert_type(jnp.abs(x) + magic, u32) - u32(magic.view(np.uint32))
    magnitude = jnp.where(size < u32((128 - bias) << 23), small, normal)
    magnitude = jnp.where(size > u32(0x7F800000), u32(0x7F), magnitude)
    return magnitude | ((bits >> u32(24)) & u32(0x80))


def value(bits, dtype):
    """The float32 number of FP8 bits, uint32 0..255."""
    bias, mantissa = _format(dtype)
    size = bits & u32(0x7F)
    normal = jax.lax.bitcast_convert_type((size << u32(23 - mantissa)) + u32((127 - bias) << 23), f32)
    x = jnp.where(size < u32(1 << mantissa), size.astype(f32) * f32(2.0 ** (1 - bias - mantissa)), normal)
    if dtype == E4M3:
        x = jnp.where(size == u32(0x7F), f32(jnp.nan), x)
    else:
        x = jnp.where(size == u32(0x7C), f32(jnp.inf), jnp.where(size > u32(0x7C), f32(jnp.nan), x))
    return jnp.where((bits & u32(0x80)) != u32(0), -x, x)


def power_of_two(biased):
    """2^(biased - 127) exactly, for uint32 from 1 to 254; 255 gives infinity."""
    return from_ordered(biased << u32(23))


def nearest(x):
    """Whole numbers, ties to even."""
    return jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN)


def to_e4m3(x):
    """x rounded to e4m3 numbers, ties to even, as float32. x: float32 up to 448 in magnitude.

    Computed by arithmetic, because XLA may drop a cast to fewer bits and back (excess precision).
    """
    steps, step = _e4m3_steps(x)
    return nearest(steps) * step


def up_to_e4m3(x):
    """x rounded up to e4m3 numbers, at least 2^-9, as float32. x: positive float32 up to 448."""
    steps, step = _e4m3_steps(x)
    whole = nearest(steps)
    return jnp.maximum(jnp.where(whole < steps, whole + f32(1), whole) * step, f32(2.0**-9))


def _e4m3_steps(x):
    """(x / step, step); step: the distance of e4m3 numbers near x (3 bits of mantissa, subnormal below 2^-6)."""
    exponent = (jax.lax.bitcast_convert_type(x, u32) >> u32(23)) & u32(0xFF)
    step = jnp.maximum(exponent, u32(127 - 6)) - u32(3)
    return x * power_of_two(u32(254) - step), power_of_two(step)


def _format(dtype) -> tuple[int, int]:
    """(bias of the exponent, bits of the mantissa) of an FP8 dtype."""
    return (7, 3) if dtype == E4M3 else (15, 2)


def _clip(x, dtype):
    """x limited to the range of an FP8 dtype."""
    top = dispatch.largest(dtype)
    return jnp.clip(x, -top, top)
