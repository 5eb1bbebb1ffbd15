"""Residual addition, RMSNorm and absmax in one pass over memory, with the FP8 cast where its scale is known.

    total = x + residual, rounded to the dtype of x                            (x where there is no residual)
    y = total * rsqrt(mean(total^2) + eps) * scale                             (Zhang and Sennrich 2019)

Backward, with n = total * r, r = rsqrt(...), g = dy * scale, means over a row:

    dx = r * (g - n * mean(g * n)) + d_total,        d_scale = sum over rows of dy * n

Dtypes: arithmetic is float32, of the rounded total. y has the dtype of x, or is FP8: clip(y / out_scale) to the largest
number of the dtype, as y * (1 / out_scale). dx has the dtype of total, d_scale is float32. `absmax` is of y and dx as
stored, except where y is FP8: then of the float32 values before the division by out_scale.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation, need

if TYPE_CHECKING:
    from jaxtyping import Array, Float

f32 = jnp.float32
FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)
FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)


class Normed(NamedTuple):
    """y and total `[..., D]`, absmax of y `[]` float32."""

    y: jax.Array
    absmax: jax.Array
    total: jax.Array


class Grads(NamedTuple):
    """dx `[..., D]`, d_scale `[D]` float32, absmax of dx `[]` float32."""

    dx: jax.Array
    d_scale: jax.Array
    absmax: jax.Array


# --- reference --------------------------------------------------------------------------------------------------------


def _forward_xla(x, scale, residual, out_scale, eps: float, out_dtype) -> Normed:
    total = x if residual is None else (x.astype(f32) + residual.astype(f32)).astype(x.dtype)
    t = total.astype(f32)
    y = t * jax.lax.rsqrt(jnp.mean(t * t, axis=-1, keepdims=True) + eps) * _last(scale, t)
    if out_scale is None:
        y = y.astype(x.dtype)
        return Normed(y, jnp.max(jnp.abs(y)).astype(f32), total)
    limit = dispatch.largest(out_dtype)
    return Normed(jnp.clip(y * (1 / out_scale), -limit, limit).astype(out_dtype), jnp.max(jnp.abs(y)), total)


def _backward_xla(dy, total, scale, d_total, eps: float) -> Grads:
    t, dy = total.astype(f32), dy.astype(f32)
    r = jax.lax.rsqrt(jnp.mean(t * t, axis=-1, keepdims=True) + eps)
    n, g = t * r, dy * _last(scale, t)
    dx = r * (g - n * jnp.mean(g * n, axis=-1, keepdims=True))
    if d_total is not None:
        dx = dx + d_total.astype(f32)
    dx = dx.astype(total.dtype)
    return Grads(dx, jnp.sum(dy * n, axis=tuple(range(n.ndim - 1))), jnp.max(jnp.abs(dx)).astype(f32))


def _last(scale, like):
    """scale `[D]` in float32, as `[1, ..., 1, D]`: of the rank of like."""
    return jnp.expand_dims(scale.astype(f32), tuple(range(like.ndim - 1)))


# --- public -----------------------------------------------------------------------------------------------------------


def forward(
    x: Float[Array, "*rows D"],
    scale: Float[Array, "D"],
    residual: Float[Array, "*rows D"] | None = None,
    *,
    eps: float,
    out_dtype=None,
    out_scale: Float[Array, ""] | None = None,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Normed:
    """`Normed(y, absmax, total)` of x `[..., D]`, in bf16, float16 or float32, and of residual in the same dtype.

    y is in the dtype of x, or cast to out_dtype (float8_e4m3fn or float8_e5m2), divided by out_scale, float32 `[]`.
    No derivative is defined: `rms_norm` has one. Raises ValueError for shapes and dtypes other than these,
    NotImplementedError where implementation="mosaic" and the kernel cannot.
    """
    _check("rms_norm.forward", x, scale, residual=residual)
    need((out_dtype is None) == (out_scale is None), "rms_norm.forward", "out_dtype and out_scale", "both or none",
         f"out_dtype={out_dtype} and out_scale={out_scale}")  # fmt: skip
    if out_scale is not None:
        need(out_dtype in FP8, "rms_norm.forward", "out_dtype", "float8_e4m3fn or float8_e5m2", out_dtype)
        got = f"{out_scale.dtype} {out_scale.shape}"
        need(out_scale.shape == () and out_scale.dtype == f32, "rms_norm.forward", "out_scale", "float32 ()", got)
    if dispatch.choose("rms_norm.forward", implementation) == "mosaic":
        raise NotImplementedError("rms_norm.forward: not built yet")
    return _forward_xla(x, scale, residual, out_scale, eps, out_dtype)


def backward(
    dy: Float[Array, "*rows D"],
    total: Float[Array, "*rows D"],
    scale: Float[Array, "D"],
    d_total: Float[Array, "*rows D"] | None = None,
    *,
    eps: float,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Grads:
    """`Grads(dx, d_scale, absmax)`: of total `[..., D]`, with d_total added to dx, and of scale, given that of y."""
    _check("rms_norm.backward", total, scale, dy=dy, d_total=d_total)
    if dispatch.choose("rms_norm.backward", implementation) == "mosaic":
        raise NotImplementedError("rms_norm.backward: not built yet")
    return _backward_xla(dy, total, scale, d_total, eps)


def rms_norm(
    x: Float[Array, "*rows D"],
    scale: Float[Array, "D"],
    residual: Float[Array, "*rows D"] | None = None,
    *,
    eps: float = 1e-6,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Array | tuple[Array, Array]:
    """y, or (y, total) where there is a residual; differentiable. Inputs and errors as `forward`.

    The backward pass saves total and scale only. Inside `jax.shard_map(check_vma=True)` a scale that is the same on
    all devices gets the sum of their gradients.
    """
    _check("rms_norm", x, scale, residual=residual)
    scale = _vary_like(scale, x)
    if residual is None:
        return _normed(x, scale, eps, implementation, interpret)
    return _added(x, scale, residual, eps, implementation, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _normed(x, scale, eps, implementation, interpret):
    return forward(x, scale, eps=eps, implementation=implementation, interpret=interpret).y


def _normed_fwd(x, scale, *static):
    return _normed(x, scale, *static), (x, scale)


def _normed_bwd(eps, implementation, interpret, saved, dy):
    total, scale = saved
    grads = backward(dy, total, scale, eps=eps, implementation=implementation, interpret=interpret)
    return grads.dx, grads.d_scale.astype(scale.dtype)


_normed.defvjp(_normed_fwd, _normed_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _added(x, scale, residual, eps, implementation, interpret):
    y, _, total = forward(x, scale, residual, eps=eps, implementation=implementation, interpret=interpret)
    return y, total


def _added_fwd(x, scale, residual, *static):
    y, total = _added(x, scale, residual, *static)
    return (y, total), (total, scale)


def _added_bwd(eps, implementation, interpret, saved, cotangents):
    (total, scale), (dy, d_total) = saved, cotangents
    grads = backward(dy, total, scale, d_total, eps=eps, implementation=implementation, interpret=interpret)
    return grads.dx, grads.d_scale.astype(scale.dtype), grads.dx


_added.defvjp(_added_fwd, _added_bwd)


def _vary_like(a, x):
    """a, varying over the mesh axes that x varies over, so that its gradient is summed over them."""
    axes = tuple(dispatch._varying(x) - dispatch._varying(a))
    return jax.lax.pcast(a, axes, to="varying") if axes else a


def _check(op: str, x, scale, **like_x) -> None:
    need(x.ndim >= 1 and x.size > 0, op, "x", "[..., D], not empty", x.shape)
    need(x.dtype in FLOATS, op, "dtype of x", "bfloat16, float16 or float32", x.dtype)
    need(scale.shape == x.shape[-1:], op, "shape of scale", x.shape[-1:], scale.shape)
    need(scale.dtype in FLOATS, op, "dtype of scale", "bfloat16, float16 or float32", scale.dtype)
    for name, a in like_x.items():
        if a is not None:
            need(a.shape == x.shape and a.dtype == x.dtype, op, name, f"{x.dtype} {x.shape}", f"{a.dtype} {a.shape}")
