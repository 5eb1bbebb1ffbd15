"""Residual addition, RMSNorm and absmax in one pass over memory, with the cast to FP8 if its scale is known.

    total = x + residual, rounded to the dtype of x                            (x if there is no residual)
    y = total * rsqrt(mean(total^2) + eps) * scale                             (Zhang and Sennrich 2019)

Backward, with n = total * r, r = rsqrt(...), g = dy * scale, means over a row:

    dx = r * (g - n * mean(g * n)) + d_total,        d_scale = sum over rows of dy * n

Dtypes: arithmetic is float32 and starts from the rounded total. y has the dtype of x, or is FP8: y * (1 / out_scale),
clipped to the largest number of the dtype. dx has the dtype of total, d_scale is float32. `absmax` is that of y or dx
as stored. If y is FP8, it is that of the float32 values before the division by out_scale.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, fp8_format, tiles
from pallas_kernels.dispatch import Implementation, expect
from pallas_kernels.manual_axes import mark_varying, varying_axes
from pallas_kernels.shapes import Case, Sizes

if TYPE_CHECKING:
    from jaxtyping import Array, Float

f32 = jnp.float32
FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)
PROGRAMS = 256  # most programs of a backward pass: each writes a float32 row of d_scale
ROWS_OF_A_PROGRAM = 8  # least rows that a program reads, so that it writes few rows of d_scale in comparison
# Mosaic's barriers around loads and stores are for kernels that read what they have written; these kernels do not.
NO_BARRIERS = {"compiler_params": plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=2**14)}


class Normed(NamedTuple):
    """y and total `[..., D]`, absmax of y `[]` float32."""

    y: jax.Array
    absmax: jax.Array
    total: jax.Array


class RmsNormGrads(NamedTuple):
    """dx `[..., D]`, d_scale `[D]` float32, absmax of dx `[]` float32."""

    dx: jax.Array
    d_scale: jax.Array
    absmax: jax.Array


# --- reference --------------------------------------------------------------------------------------------------------


def _forward_xla(x, scale, residual, out_scale, eps: float, out_dtype) -> Normed:
    total = x if residual is None else (x.astype(f32) + residual).astype(x.dtype)
    t = total.astype(f32)
    y = t * jax.lax.rsqrt(jnp.mean(t * t, axis=-1, keepdims=True) + eps) * _per_column(scale, t)
    if out_scale is None:
        y = y.astype(x.dtype)
        return Normed(y, fp8_format.absmax(y), total)
    return Normed(fp8_format.reference(y, out_scale, out_dtype), fp8_format.absmax(y), total)


def _backward_xla(dy, total, scale, d_total, eps: float) -> RmsNormGrads:
    t, dy = total.astype(f32), dy.astype(f32)
    r = jax.lax.rsqrt(jnp.mean(t * t, axis=-1, keepdims=True) + eps)
    n = t * r
    g = dy * _per_column(scale, t)
    dx = r * (g - n * jnp.mean(g * n, axis=-1, keepdims=True))
    if d_total is not None:
        dx = dx + d_total
    dx = dx.astype(total.dtype)
    return RmsNormGrads(dx, jnp.sum(dy * n, axis=tuple(range(n.ndim - 1))), fp8_format.absmax(dx))


def _per_column(scale, like):
    """scale `[D]` as float32 `[1, ..., 1, D]`, with the rank of `like`."""
    return jnp.expand_dims(scale, tuple(range(like.ndim - 1)))


# --- kernels ----------------------------------------------------------------------------------------------------------


def _forward_mosaic(
    x, scale, residual, out_scale, eps: float, out_dtype, tile: tiles.RowTile, interpret: bool
) -> Normed:
    """Runs the forward kernel: one program per tile of rows, which reads and writes every element once."""
    width = x.shape[-1]
    count = x.size // width
    y_dtype = x.dtype if out_scale is None else fp8_format.store_dtype(out_dtype)

    def kernel(*refs):
        refs = iter(refs)
        x_ref = next(refs)
        scale_ref = next(refs)
        residual_ref = next(refs) if residual is not None else None
        inverse_ref = next(refs) if out_scale is not None else None
        y_ref, absmax_ref, *total_ref = refs
        _, at = tiles.tile_at(jax.lax.axis_index("tile"), tile.rows, count)
        total = tiles.load(x_ref, at, tile.layout)
        if residual_ref is not None:
            total = (total.astype(f32) + tiles.load(residual_ref, at, tile.layout)).astype(x.dtype)
            tiles.store(total_ref[0], at, total)
        t = total.astype(f32)
        scale = plgpu.load(scale_ref, layout=tile.layout.reduce(0), optimized=False).astype(f32)
        y = t * _along_columns(_rms_inverse(t, eps), t) * _along_rows(scale, t)
        stored = y.astype(x.dtype) if inverse_ref is None else fp8_format.encode(y, inverse_ref[0], out_dtype)
        tiles.store(y_ref, at, stored)
        absmax = jnp.max(jnp.abs(y if inverse_ref is not None else stored.astype(f32)), axis=1)
        tiles.store(absmax_ref, at, absmax)

    inputs = [x.reshape(count, width), scale]
    out = [jax.ShapeDtypeStruct((count, width), y_dtype), jax.ShapeDtypeStruct((count,), f32)]
    if residual is not None:
        inputs.append(residual.reshape(count, width))
        out.append(jax.ShapeDtypeStruct((count, width), x.dtype))
    if out_scale is not None:
        inputs.append((1 / out_scale).reshape(1))
    y, absmax, *total = dispatch.launch(
        kernel,
        tuple(inputs),
        op="rms_norm.forward",
        out=out,
        grid=(tile.tiles,),
        names=("tile",),
        interpret=interpret,
        **NO_BARRIERS,
    )
    y = y if out_scale is None else jax.lax.bitcast_convert_type(y, out_dtype)
    return Normed(y.reshape(x.shape), jnp.max(absmax), total[0].reshape(x.shape) if total else x)


def _backward_mosaic(dy, total, scale, d_total, eps: float, tile: tiles.RowTile, interpret: bool) -> RmsNormGrads:
    """Runs the backward kernel: a program has every PROGRAMS-th tile of rows and sums its part of d_scale in registers.

    It prefetches its next tile before it computes with the current one, because few programs must keep the memory busy.
    """
    width = total.shape[-1]
    count = total.size // width
    programs = min(PROGRAMS, -(-count // max(tile.rows, ROWS_OF_A_PROGRAM)))
    prefetch = tile.rows * width // 128 <= tiles.COMFORTABLE  # else there are no registers for another tile
    inputs = tuple(a.reshape(count, width) for a in (dy, total, d_total) if a is not None)

    def kernel(scale_ref, *refs):
        input_refs = refs[: len(inputs)]
        dx_ref, part_ref, absmax_ref = refs[len(inputs) :]
        program = jax.lax.axis_index("program")
        steps = (tile.tiles - program + programs - 1) // programs

        def tile_number(step):
            return program + step * programs

        def start_and_rows(step):
            return tiles.tile_at(tile_number(step), tile.rows, count)

        def load_tile(step):
            return tuple(tiles.load(ref, start_and_rows(step)[1], tile.layout) for ref in input_refs)

        def zeros(shape, layout):
            return plgpu.layout_cast(jnp.zeros(shape, f32), layout)

        def step(i, carry):
            d_scale, absmax, *loaded = carry
            dy, t, *d_total = (a.astype(f32) for a in loaded or load_tile(i))
            loaded = load_tile(jnp.minimum(i + 1, steps - 1)) if prefetch else ()
            scale = plgpu.load(scale_ref, layout=tile.layout.reduce(0), optimized=False).astype(f32)
            r = _rms_inverse(t, eps)
            n = t * _along_columns(r, t)
            g = dy * _along_rows(scale, t)
            dx = _along_columns(r, t) * (g - n * _along_columns(jnp.sum(g * n, axis=1) / width, t))
            dx = (dx + d_total[0] if d_total else dx).astype(total.dtype)
            start, rows = start_and_rows(i)
            tiles.store(dx_ref, rows, dx)
            if count % tile.rows:  # the last tile overlaps the one before: rows of that one are not counted again
                row = start + plgpu.broadcasted_iota(jnp.int32, t.shape, 0, layout=tile.layout)
                n = jnp.where(row >= tile_number(i) * tile.rows, n, f32(0))
            return d_scale + dy * n, jnp.maximum(absmax, jnp.max(jnp.abs(dx.astype(f32)), axis=1)), *loaded

        carry = zeros((tile.rows, width), tile.layout), zeros((tile.rows,), tile.layout.reduce(1))
        carry = (*carry, *(load_tile(0) if prefetch else ()))
        d_scale, absmax, *_ = jax.lax.fori_loop(0, steps, step, carry)
        if tile.rows == 1:
            tiles.store(part_ref, pl.ds(program, 1), d_scale)
        else:
            tiles.store(part_ref, program, jnp.sum(d_scale, axis=0))
        tiles.store(absmax_ref, pl.ds(program * tile.rows, tile.rows), absmax)

    out = (
        jax.ShapeDtypeStruct((count, width), total.dtype),
        jax.ShapeDtypeStruct((programs, width), f32),
        jax.ShapeDtypeStruct((programs * tile.rows,), f32),
    )
    dx, parts, absmax = dispatch.launch(
        kernel,
        (scale, *inputs),
        op="rms_norm.backward",
        out=out,
        grid=(programs,),
        names=("program",),
        interpret=interpret,
        **NO_BARRIERS,
    )
    return RmsNormGrads(dx.reshape(total.shape), jnp.sum(parts, axis=0), jnp.max(absmax))


def _rms_inverse(t, eps: float):
    """1 / root mean square of each row of `[rows, width]`."""
    return jax.lax.rsqrt(jnp.sum(t * t, axis=1) / t.shape[1] + eps)


def _along_columns(row_values, like):
    """Values of rows, broadcast along the columns of `like`."""
    return jax.lax.broadcast_in_dim(row_values, like.shape, (0,))


def _along_rows(column_values, like):
    """Values of columns, broadcast along the rows of `like`."""
    return jax.lax.broadcast_in_dim(column_values, like.shape, (1,))


# --- public -----------------------------------------------------------------------------------------------------------


def forward(
    x: Float[Array, "*rows D"],
    scale: Float[Array, " D"],
    residual: Float[Array, "*rows D"] | None = None,
    *,
    eps: float,
    out_dtype=None,
    out_scale: Float[Array, ""] | None = None,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Normed:
    """`Normed(y, absmax, total)` of x `[..., D]` in bfloat16, float16 or float32, and a residual in the same dtype.

    y has the dtype of x. Or it is divided by out_scale, float32 `[]`, and cast to out_dtype (float8_e4m3fn or
    float8_e5m2). It has no derivative; `rms_norm` has one. Raises ValueError for other shapes and dtypes, and
    dispatch.Unserved if implementation="mosaic" and the kernel does not support the shape.
    """
    _check("rms_norm.forward", x, scale, residual=residual)
    expect((out_dtype is None) == (out_scale is None), "rms_norm.forward", "out_dtype and out_scale", "both or none",
         f"out_dtype={out_dtype} and out_scale={out_scale}")  # fmt: skip
    if out_scale is not None:
        expect(
            jnp.dtype(out_dtype) in fp8_format.FP8,
            "rms_norm.forward",
            "out_dtype",
            "float8_e4m3fn or float8_e5m2",
            out_dtype,
        )
        expect(
            fp8_format.is_scale(out_scale),
            "rms_norm.forward",
            "out_scale",
            "float32 []",
            fp8_format.dtype_and_shape(out_scale),
        )
    tile = _tiles_or_none("rms_norm.forward", implementation, x, added=False)
    if tile:
        return _forward_mosaic(x, scale, residual, out_scale, eps, out_dtype, tile, interpret)
    return _forward_xla(x, scale, residual, out_scale, eps, out_dtype)


def backward(
    dy: Float[Array, "*rows D"],
    total: Float[Array, "*rows D"],
    scale: Float[Array, " D"],
    d_total: Float[Array, "*rows D"] | None = None,
    *,
    eps: float,
    implementation: Implementation = None,
    interpret: bool = False,
) -> RmsNormGrads:
    """Gradients from the gradient dy of y. d_total: gradient of total, added to dx; None: 0."""
    _check("rms_norm.backward", total, scale, dy=dy, d_total=d_total)
    tile = _tiles_or_none("rms_norm.backward", implementation, total, added=True)
    if tile:
        return _backward_mosaic(dy, total, scale, d_total, eps, tile, interpret)
    return _backward_xla(dy, total, scale, d_total, eps)


def rms_norm(
    x: Float[Array, "*rows D"],
    scale: Float[Array, " D"],
    residual: Float[Array, "*rows D"] | None = None,
    *,
    eps: float = 1e-6,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Array | tuple[Array, Array]:
    """y, or (y, total) if there is a residual; differentiable. Inputs and errors are those of `forward`.

    Only total and scale are saved for the backward pass. Inside `jax.shard_map(check_vma=True)` the gradient of a
    replicated scale is summed over the devices.
    """
    _check("rms_norm", x, scale, residual=residual)
    scale = mark_varying(scale, varying_axes(x))  # so that its gradient is summed over the mesh
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
    total, scale = saved
    dy, d_total = cotangents
    grads = backward(dy, total, scale, d_total, eps=eps, implementation=implementation, interpret=interpret)
    return grads.dx, grads.d_scale.astype(scale.dtype), grads.dx


_added.defvjp(_added_fwd, _added_bwd)


def _tiles_or_none(op: str, implementation: Implementation, x, added: bool) -> tiles.RowTile | None:
    """Returns the tiles of the kernel, or None if the reference runs. added: see `tiles.row_tiles`."""
    if dispatch.choose(op, implementation) == "xla":
        return None
    return tiles.try_cut(implementation, tiles.row_tiles, op, x.size // x.shape[-1], x.shape[-1], x.dtype, added)


def _check(op: str, x, scale, **like_x) -> None:
    """Raises ValueError for wrong shapes and dtypes. like_x: arrays with the shape and dtype of x, or None."""
    expect(x.ndim >= 1 and x.size > 0, op, "x", "[..., D], not empty", x.shape)
    expect(x.dtype in FLOATS, op, "dtype of x", "bfloat16, float16 or float32", x.dtype)
    expect(scale.shape == x.shape[-1:], op, "shape of scale", x.shape[-1:], scale.shape)
    expect(scale.dtype in FLOATS, op, "dtype of scale", "bfloat16, float16 or float32", scale.dtype)
    for name, a in like_x.items():
        if a is not None:
            expect(a.shape == x.shape and a.dtype == x.dtype, op, name, f"{x.dtype} {x.shape}", f"{a.dtype} {a.shape}")


# --- cases ------------------------------------------------------------------------------------------------------------


def cases(sizes: Sizes, tokens: int) -> list[Case]:
    """The calls that a model of these sizes makes for this many tokens, in bfloat16 with a float32 scale."""
    D = sizes.hidden
    x = jax.ShapeDtypeStruct((tokens, D), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((D,), f32)
    out_scale = jax.ShapeDtypeStruct((), f32)
    n = tokens * D
    with_residual = functools.partial(forward, eps=1e-6)
    back = functools.partial(backward, eps=1e-6)

    def without_residual(x, scale, **how):
        return forward(x, scale, eps=1e-6, **how)[:2]  # total is x: not copied to a result

    def to_e4m3(x, scale, residual, out_scale, **how):
        return forward(x, scale, residual, eps=1e-6, out_dtype=jnp.float8_e4m3fn, out_scale=out_scale, **how)

    return [
        Case("rms_norm.forward", without_residual, (x, scale), 4 * n),
        Case("rms_norm.forward+residual", with_residual, (x, scale, x), 8 * n),
        Case("rms_norm.forward+residual+e4m3", to_e4m3, (x, scale, x, out_scale), 7 * n),
        Case("rms_norm.backward", back, (x, x, scale), 6 * n),
        Case("rms_norm.backward+residual", back, (x, x, scale, x), 8 * n),
    ]
