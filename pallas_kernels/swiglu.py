"""SwiGLU (Shazeer 2020, arXiv:2002.05202, section 2) without its matrix products: y = silu(gate) * up, in one pass.

    s = sigmoid(gate),  y = gate * s * up,
    d_up = dy * gate * s,  d_gate = dy * up * s * (1 + gate * (1 - s)).

dtype promise: gate, up and dy are read once, all arithmetic is float32, every result is rounded once and written once.
A result is stored in the dtype of gate, or in FP8 as clip(y * (1 / scale), -max, max) with a scale known before. absmax
is the largest magnitude of the stored values. For FP8 it is that of the float32 values before the cast, so that the
next scale can be computed from it. It is NaN if any value is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, elementwise, fp8_format, shapes
from pallas_kernels.dispatch import Implementation

if TYPE_CHECKING:
    from jaxtyping import Array, Float

f32 = jnp.float32


class Gated(NamedTuple):
    """Results of `forward`."""

    y: jax.Array  # [..., D], dtype of gate or FP8
    absmax: jax.Array  # float32 []


class SwigluGrads(NamedTuple):
    """Results of `backward`."""

    d_gate: jax.Array  # [..., D], dtype of gate or FP8
    d_up: jax.Array
    absmax_gate: jax.Array  # float32 []
    absmax_up: jax.Array


def forward_math(gate, up):
    """silu(gate) * up, float32."""
    gate = gate.astype(f32)
    return gate * (1 / (1 + jnp.exp(-gate))) * up


def backward_math(dy, gate, up):
    """(d_gate, d_up), float32."""
    dy, gate = dy.astype(f32), gate.astype(f32)
    s = 1 / (1 + jnp.exp(-gate))
    return dy * up * s * (1 + gate * (1 - s)), dy * gate * s


# --- reference --------------------------------------------------------------------------------------------------------


def _store_xla(y, dtype, out_dtype, out_scale):
    """(y as stored, absmax)."""
    if out_dtype is None:
        y = y.astype(dtype)
        return y, fp8_format.absmax(y)
    return fp8_format.reference(y, out_scale, out_dtype), fp8_format.absmax(y)


# --- kernel -----------------------------------------------------------------------------------------------------------


def _run(math, arrays, out_dtype, scales, op: str, interpret: bool):
    """Runs the kernel: (results as stored, their absmax). math: `forward_math` or `backward_math`."""
    count = 1 if math is forward_math else 2
    dtype = jnp.dtype(out_dtype or arrays[0].dtype)

    def body(values, numbers, _):
        results = math(*values)
        results = results if count == 2 else (results,)
        if out_dtype is None:
            results = [y.astype(dtype) for y in results]
            return results, results
        stored = [fp8_format.encode(y, 1 / scale, dtype) for y, scale in zip(results, numbers, strict=True)]
        return stored, results

    written = dtype if out_dtype is None else fp8_format.store_dtype(dtype)
    numbers = () if out_dtype is None else scales
    results, tops = elementwise.run(body, arrays, numbers, [written] * count, count, op, interpret)
    return [y if y.dtype == dtype else jax.lax.bitcast_convert_type(y, dtype) for y in results], tops


# --- public -----------------------------------------------------------------------------------------------------------


def forward(
    gate: Float[Array, "*b D"],
    up: Float[Array, "*b D"],
    *,
    out_dtype=None,
    out_scale: Float[Array, ""] | None = None,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Gated:
    """silu(gate) * up in the dtype of gate, or in `out_dtype` (e4m3, e5m2) with `out_scale`, and its absmax.

    Raises ValueError if shapes or dtypes differ, or if only one of out_dtype and out_scale is passed.
    """
    op = "swiglu.forward"
    _check(op, {"gate": gate, "up": up}, out_dtype, (out_scale,))
    if dispatch.runs_kernel(op, implementation, elementwise.serves(gate), elementwise.NEEDS, gate.shape):
        (y,), (top,) = _run(forward_math, (gate, up), out_dtype, (out_scale,), op, interpret)
        return Gated(y, top)
    return Gated(*_store_xla(forward_math(gate, up), gate.dtype, out_dtype, out_scale))


def backward(
    dy: Float[Array, "*b D"],
    gate: Float[Array, "*b D"],
    up: Float[Array, "*b D"],
    *,
    out_dtype=None,
    out_scales: tuple[Float[Array, ""], Float[Array, ""]] | None = None,
    implementation: Implementation = None,
    interpret: bool = False,
) -> SwigluGrads:
    """Gradients of gate and up and their absmax; in the dtype of gate, or in `out_dtype` with `out_scales`.

    out_scales: (of d_gate, of d_up). Raises ValueError if shapes or dtypes differ, or if only one of out_dtype and
    out_scales is passed.
    """
    op = "swiglu.backward"
    scales = (None, None) if out_scales is None else tuple(out_scales)
    dispatch.expect(len(scales) == 2, op, "out_scales", "two (of d_gate, of d_up)", len(scales))
    _check(op, {"gate": gate, "up": up, "dy": dy}, out_dtype, scales)
    if dispatch.runs_kernel(op, implementation, elementwise.serves(gate), elementwise.NEEDS, gate.shape):
        grads, tops = _run(backward_math, (dy, gate, up), out_dtype, scales, op, interpret)
        return SwigluGrads(*grads, *tops)
    grads = zip(backward_math(dy, gate, up), scales, strict=True)
    (d_gate, top_gate), (d_up, top_up) = (_store_xla(y, gate.dtype, out_dtype, scale) for y, scale in grads)
    return SwigluGrads(d_gate, d_up, top_gate, top_up)


def _check(op: str, arrays: dict, out_dtype, scales: tuple) -> None:
    """Raises ValueError for wrong shapes, dtypes and scales."""
    gate = arrays["gate"]
    need = dispatch.expect
    need(gate.dtype in (jnp.bfloat16, jnp.float16, f32), op, "dtype of gate", "a float of 16 or 32 bits", gate.dtype)
    need(gate.size > 0, op, "gate", "an array, not empty", gate.shape)
    for name, x in arrays.items():
        need(x.shape == gate.shape, op, f"shape of {name}", f"that of gate, {gate.shape}", x.shape)
        need(x.dtype == gate.dtype, op, f"dtype of {name}", f"that of gate, {gate.dtype}", x.dtype)
    need(
        out_dtype is None or jnp.dtype(out_dtype) in fp8_format.FP8,
        op,
        "out_dtype",
        "None, float8_e4m3fn or float8_e5m2",
        out_dtype,
    )
    for scale in scales:
        fits = scale is None if out_dtype is None else fp8_format.is_scale(scale)
        need(fits, op, "scale", "float32 [] with out_dtype, None without", fp8_format.dtype_and_shape(scale))


def cases(sizes: shapes.Sizes, tokens: int) -> list[shapes.Case]:
    """Forward and backward, in bfloat16 and with e4m3 and e5m2 results."""
    n = tokens * sizes.intermediate
    x = jax.ShapeDtypeStruct((tokens, sizes.intermediate), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((), f32)

    def forward_fp8(gate, up, scale, **how):
        return forward(gate, up, out_dtype=fp8_format.E4M3, out_scale=scale, **how)

    def backward_fp8(dy, gate, up, a, b, **how):
        return backward(dy, gate, up, out_dtype=fp8_format.E5M2, out_scales=(a, b), **how)

    return [
        shapes.Case("forward", forward, (x, x), 6 * n),
        shapes.Case("forward_e4m3", forward_fp8, (x, x, scale), 5 * n),
        shapes.Case("backward", backward, (x, x, x), 10 * n),
        shapes.Case("backward_e5m2", backward_fp8, (x, x, x, scale, scale), 8 * n),
    ]
