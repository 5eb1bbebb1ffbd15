"""SwiGLU (Shazeer 2020, arXiv:2002.05202, section 2) without its matrix products: y = silu(gate) * up, in one pass.

    s = sigmoid(gate),  y = gate * s * up,
    d_up = dy * gate * s,  d_gate = dy * up * s * (1 + gate * (1 - s)).

dtype promise: gate, up and dy are read once, all arithmetic is float32, every result is rounded once and written once.
A result is stored in the dtype of gate, or in FP8 with a scale known before: clip(y * (1 / scale), -max, max). absmax is
the largest magnitude of what is stored, or of the float32 values before the cast where FP8 is stored: the next scale
can be taken from it. It is NaN where any value is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, shapes
from pallas_kernels.dispatch import Implementation
from pallas_kernels.quantize import FP8, absmax_xla, cast_xla

if TYPE_CHECKING:
    from jaxtyping import Array, Float

f32 = jnp.float32


class Gated(NamedTuple):
    """What `forward` returns."""

    y: jax.Array  # [..., D], dtype of gate or FP8
    absmax: jax.Array  # float32 []


class Grads(NamedTuple):
    """What `backward` returns."""

    d_gate: jax.Array  # [..., D], dtype of gate or FP8
    d_up: jax.Array
    absmax_gate: jax.Array  # float32 []
    absmax_up: jax.Array


def forward_math(gate, up):
    """silu(gate) * up, float32."""
    gate, up = gate.astype(f32), up.astype(f32)
    return gate / (1 + jnp.exp(-gate)) * up


def backward_math(dy, gate, up):
    """(d_gate, d_up), float32."""
    dy, gate, up = dy.astype(f32), gate.astype(f32), up.astype(f32)
    s = 1 / (1 + jnp.exp(-gate))
    return dy * up * s * (1 + gate * (1 - s)), dy * gate * s


def _store_xla(y, dtype, out_dtype, out_scale):
    """(y as stored, absmax)."""
    if out_dtype is None:
        y = y.astype(dtype)
        return y, absmax_xla(y)
    return cast_xla(y, out_scale, out_dtype), absmax_xla(y)


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

    Raises ValueError where shapes or dtypes differ, or out_dtype comes without out_scale.
    """
    _check("swiglu.forward", {"gate": gate, "up": up}, out_dtype, (out_scale,))
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
) -> Grads:
    """Gradients of gate and up and their absmax; in `out_dtype` with `out_scales` (of d_gate, of d_up) where given.

    Raises ValueError where shapes or dtypes differ, or out_dtype comes without two scales.
    """
    scales = (None, None) if out_scales is None else tuple(out_scales)
    dispatch.need(len(scales) == 2, "swiglu.backward", "out_scales", "two (of d_gate, of d_up)", len(scales))
    _check("swiglu.backward", {"gate": gate, "up": up, "dy": dy}, out_dtype, scales)
    d_gate, d_up = backward_math(dy, gate, up)
    d_gate, top_gate = _store_xla(d_gate, gate.dtype, out_dtype, scales[0])
    d_up, top_up = _store_xla(d_up, gate.dtype, out_dtype, scales[1])
    return Grads(d_gate, d_up, top_gate, top_up)


@jax.custom_vjp
def _swiglu(gate, up):
    return forward_math(gate, up)


def swiglu(
    gate: Float[Array, "*b D"],
    up: Float[Array, "*b D"],
    *,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Float[Array, "*b D"]:
    """silu(gate) * up in the dtype of gate; differentiable."""
    return forward(gate, up, implementation=implementation, interpret=interpret).y


def _check(op: str, arrays: dict, out_dtype, scales: tuple) -> None:
    """The errors of the caller."""
    gate = arrays["gate"]
    need = dispatch.need
    need(gate.dtype in (jnp.bfloat16, jnp.float16, f32), op, "dtype of gate", "a float of 16 or 32 bits", gate.dtype)
    for name, x in arrays.items():
        need(x.shape == gate.shape, op, f"shape of {name}", f"that of gate, {gate.shape}", x.shape)
        need(x.dtype == gate.dtype, op, f"dtype of {name}", f"that of gate, {gate.dtype}", x.dtype)
    need(out_dtype is None or jnp.dtype(out_dtype) in FP8, op, "out_dtype", f"None or one of {FP8}", out_dtype)
    for scale in scales:
        given = None if scale is None else (jnp.shape(scale), jnp.result_type(scale))
        if out_dtype is None:
            need(scale is None, op, "scale", "none, without out_dtype", given)
        else:
            need(given == ((), f32), op, "scale", "float32 [] with out_dtype", given)
