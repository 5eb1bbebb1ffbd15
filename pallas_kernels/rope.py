"""Rotary position embedding of queries and keys in one pass over memory (Su et al. 2021, RoFormer).

Channel i of a head is paired with channel i + h/2. The pair is rotated by the angle of its position and frequency:

    first' = first * cos - second * sin,        second' = second * cos + first * sin

The backward pass rotates the gradients by the opposite angle, so with -sin. Dtypes: arithmetic is float32, with float32
cosines and sines; the results have the dtypes of q and k. `absmax_q` and `absmax_k` are those of the results as stored.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, fp8_format, tiles
from pallas_kernels.dispatch import Implementation, expect
from pallas_kernels.shapes import Case, Sizes

if TYPE_CHECKING:
    from jaxtyping import Array, Float

f32 = jnp.float32
FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


class Rotated(NamedTuple):
    """q `[..., S, H, h]`, k `[..., S, K, h]`, and the absmax of each, `[]` float32."""

    q: jax.Array
    k: jax.Array
    absmax_q: jax.Array
    absmax_k: jax.Array


# --- reference --------------------------------------------------------------------------------------------------------


def _rotate_xla(x, cos, sin):
    """(x rotated, its absmax)."""
    cos, sin = (jnp.expand_dims(a[:, None, :], tuple(range(x.ndim - 3))) for a in (cos, sin))
    first, second = jnp.split(x, 2, axis=-1)
    y = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return y, fp8_format.absmax(y)


def _forward_xla(q, k, cos, sin, inverse: bool) -> Rotated:
    sin = -sin if inverse else sin
    q, absmax_q = _rotate_xla(q, cos, sin)
    k, absmax_k = _rotate_xla(k, cos, sin)
    return Rotated(q, k, absmax_q, absmax_k)


# --- kernel -----------------------------------------------------------------------------------------------------------


def _forward_mosaic(q, k, cos, sin, inverse: bool, cut: tiles.HeadTile, interpret: bool) -> Rotated:
    """Runs the kernel: a program has a few positions and all heads, and keeps cosines and sines in registers."""
    S, _, h = q.shape[-3:]
    half = h // 2
    batch = math.prod(q.shape[:-3])

    def kernel(q_ref, k_ref, cos_ref, sin_ref, q_out, k_out, q_top, k_top):
        b = jax.lax.axis_index("batch")
        _, at = tiles.tile_at(jax.lax.axis_index("tile"), cut.positions, S)
        cos, sin = (tiles.load(ref, at, cut.layout.reduce(1)) for ref in (cos_ref, sin_ref))
        sin = -sin if inverse else sin
        for x_ref, out_ref, top_ref in ((q_ref, q_out, q_top), (k_ref, k_out, k_top)):
            count = x_ref.shape[2]
            size = cut.heads * min(cut.more, count // cut.heads)
            top: Any = None
            for i in range(-(-count // size)):
                heads = pl.ds(min(i * size, count - size), size)

                def half_from(start, heads=heads):
                    return b, at, heads, pl.ds(start, half)

                first, second = (tiles.load(x_ref, half_from(n), cut.layout).astype(f32) for n in (0, half))

                def over_heads(a, like=first):
                    return jax.lax.broadcast_in_dim(a, like.shape, (0, 2))

                for start, y in (
                    (0, first * over_heads(cos) - second * over_heads(sin)),
                    (half, second * over_heads(cos) + first * over_heads(sin)),
                ):
                    y = y.astype(q.dtype)
                    tiles.store(out_ref, half_from(start), y)
                    y = jnp.abs(y.astype(f32))
                    top = y if top is None else jnp.maximum(top, y)
            tiles.store(top_ref, (b, at), jnp.max(jnp.max(top, axis=2), axis=1))

    tops = jax.ShapeDtypeStruct((batch, S), f32)
    inputs = q.reshape(-1, *q.shape[-3:]), k.reshape(-1, *k.shape[-3:]), cos, sin
    q_out, k_out, top_q, top_k = dispatch.launch(
        kernel,
        inputs,
        op="rope",
        out=(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[:2]), tops, tops),
        grid=(batch, -(-S // cut.positions)),
        names=("batch", "tile"),
        interpret=interpret,
        # Mosaic's barriers around loads and stores are for kernels that read what they have written.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    return Rotated(q_out.reshape(q.shape), k_out.reshape(k.shape), jnp.max(top_q), jnp.max(top_k))


# --- public -----------------------------------------------------------------------------------------------------------


def forward(
    q: Float[Array, "*batch S H h"],
    k: Float[Array, "*batch S K h"],
    cos: Float[Array, "*rows S half"],
    sin: Float[Array, "*rows S half"],
    *,
    inverse: bool = False,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Rotated:
    """`Rotated(q, k, absmax_q, absmax_k)`: q and k rotated by the angles of their positions; inverse: rotated back.

    q `[..., S, H, h]` and k `[..., S, K, h]` in bfloat16, float16 or float32, h even; cos and sin float32 `[S, h / 2]`,
    or `[..., S, h / 2]` if rows have angles of their own, as several documents in a row do. It has no derivative;
    `rope` has one. Raises ValueError for other shapes and dtypes, and dispatch.Unserved if implementation="mosaic" and
    the kernel does not support the shape.
    """
    _check("rope", q, k, cos, sin)
    if cos.ndim > 2:  # one long row
        rotated = forward(
            *(x.reshape(-1, *x.shape[-2:]) for x in (q, k)),
            *(table.reshape(-1, table.shape[-1]) for table in (cos, sin)),
            inverse=inverse,
            implementation=implementation,
            interpret=interpret,
        )
        return rotated._replace(q=rotated.q.reshape(q.shape), k=rotated.k.reshape(k.shape))
    if dispatch.choose("rope", implementation) == "mosaic":
        sizes = q.shape[-3], (q.shape[-2], k.shape[-2]), q.shape[-1] // 2, q.dtype
        cut = tiles.try_cut(implementation, tiles.heads, "rope", *sizes)
        if cut:
            return _forward_mosaic(q, k, cos, sin, inverse, cut, interpret)
    return _forward_xla(q, k, cos, sin, inverse)


def rope(
    q: Float[Array, "*batch S H h"],
    k: Float[Array, "*batch S K h"],
    cos: Float[Array, "*rows S half"],
    sin: Float[Array, "*rows S half"],
    *,
    implementation: Implementation = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """q and k rotated, differentiable with respect to both; cos and sin are constants. Else like `forward`."""
    _check("rope", q, k, cos, sin)
    return _rope(q, k, jax.lax.stop_gradient(cos), jax.lax.stop_gradient(sin), implementation, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _rope(q, k, cos, sin, implementation, interpret):
    return forward(q, k, cos, sin, implementation=implementation, interpret=interpret)[:2]


def _rope_fwd(q, k, cos, sin, *static):
    return _rope(q, k, cos, sin, *static), (cos, sin)


def _rope_bwd(implementation, interpret, saved, cotangents):
    grads = forward(*cotangents, *saved, inverse=True, implementation=implementation, interpret=interpret)
    return grads.q, grads.k, None, None


_rope.defvjp(_rope_fwd, _rope_bwd)


def _check(op: str, q, k, cos, sin) -> None:
    """Raises ValueError for wrong shapes and dtypes."""
    for name, x in (("q", q), ("k", k)):
        expect(x.ndim >= 3 and x.size > 0, op, name, "[..., S, heads, h], not empty", x.shape)
        expect(x.dtype in FLOATS, op, f"dtype of {name}", "bfloat16, float16 or float32", x.dtype)
    expect(q.shape[-1] % 2 == 0, op, "head dimension", "an even number", q.shape[-1])
    expected = (*q.shape[:-2], "K", q.shape[-1])
    expect(k.shape[:-2] == q.shape[:-2] and k.shape[-1] == q.shape[-1], op, "shape of k", expected, k.shape)
    expect(k.dtype == q.dtype, op, "dtype of k", f"{q.dtype}, that of q", k.dtype)
    shared = (q.shape[-3], q.shape[-1] // 2)
    half = shared if cos.ndim <= 2 else (*q.shape[:-3], *shared)
    for name, a in (("cos", cos), ("sin", sin)):
        expect(a.shape == half and a.dtype == f32, op, name, f"float32 {half}", f"{a.dtype} {a.shape}")


# --- cases ------------------------------------------------------------------------------------------------------------


def cases(sizes: Sizes, tokens: int) -> list[Case]:
    """The calls that a model of these sizes makes for one sequence of this many tokens, in bfloat16."""
    q = jax.ShapeDtypeStruct((1, tokens, sizes.heads, sizes.head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, tokens, sizes.kv_heads, sizes.head_dim), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((tokens, sizes.head_dim // 2), f32)
    args = q, k, table, table
    moved = 4 * tokens * (sizes.heads + sizes.kv_heads) * sizes.head_dim + 4 * tokens * sizes.head_dim
    return [
        Case("rope.forward", forward, args, moved),
        Case("rope.backward", functools.partial(forward, inverse=True), args, moved),
    ]
