"""Causal attention within the documents of a row: flash attention (Dao 2023, FlashAttention-2) with O(S) masks.

`starts[i]` is the index at which the document of token i starts. A query at i attends to the keys from first[i] to i,
where first[i] = max(starts[i], i - window + 1) with a window, else starts[i]. So one number per query is all of the
mask, and since first never decreases, tiles of keys before it, or of queries after the document, are skipped: the time
is that of the documents, not of the square of the row.

There may be more keys than queries: the S queries are then the last ones of T positions, and `starts` counts from the
first key. The loops over tiles of keys end with a query's own, so keys that causality hides cost nothing.

A part of the keys of some queries, such as those that another device has, is attended to by `forward_part`. With the
log-sum-exp of all keys, `backward_part` gives the exact gradients that come from the part.

    forward, per tile of queries:     s = score(q k^T), o = softmax(s) v, lse = log(sum(exp(s)))
    backward, per tile of queries:    p = exp(s - lse), ds = p (do v^T - sum(do o)) score', dq = ds k
    backward, per tile of keys:       dk = ds^T q, dv = p^T do, summed over the query heads that share them

score(x) is x scale, or softcap tanh(x scale / softcap) (Gemma 2).

A head may have a sink (gpt-oss): a logit in the softmax's denominator that belongs to no key. With it o and lse become

    lse' = log(exp(lse) + exp(sink)), o' = o exp(lse - lse'), dsink = -sum over queries of exp(sink - lse') sum(do o')

and the backward pass is the same with o' and lse' in place of o and lse. So no kernel knows of sinks.

Values may have fewer channels than queries and keys, or more. With more than 128 of either, a program computes a part
of the channels of its results, with whole scores: the results of a tile fit into registers so.

Nothing of size S x S is in memory. Dtypes: products of 16-bit operands are summed in float32; p and ds are rounded to
the dtype of q before they are multiplied; softmax is float32. Tensor cores read their second operand with neighbours of
the summed dimension in one register, so tensors that are summed over positions are transposed beforehand by XLA.

Shape suffixes: B batch, S positions of queries, T positions of keys, H query heads, K key/value heads, h head
dimension, v that of values.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import dispatch, tiles
from pallas_kernels.dispatch import Implementation, expect
from pallas_kernels.manual_axes import mark_varying, varying_axes
from pallas_kernels.mma import ROWS, WITHOUT_BARRIERS, Products
from pallas_kernels.shapes import Case, Sizes

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

f32 = jnp.float32
i32 = jnp.int32
HALF = (jnp.bfloat16, jnp.float16)
COLUMNS = 32  # of the tiles that it goes through
HIDDEN = -1e30  # the score of a key that is not seen; finite, so that a tile without any key leaves no NaN
PART = (
    128  # channels that a program computes at most: two gradients of a tile of keys with more do not fit into registers
)
LARGEST_HEAD = 2 * PART
WINDOW = "window_"  # in the names of the kernels' operations, with the window: what a program's FLOPs depend on
HEADS = f"16-bit heads of a multiple of 16 up to {PART} channels, of 32 up to {LARGEST_HEAD}"


def fits(dtype, head_dim: int, value_dim: int = 0) -> bool:
    """True if the kernel takes heads of this dtype and size; value_dim: of values, 0: the same."""
    sizes = head_dim, value_dim or head_dim
    return (
        jnp.dtype(dtype) in HALF
        and max(sizes) <= LARGEST_HEAD
        and not any(n % (16 * channel_parts(*sizes)) for n in sizes)
    )


def channel_parts(head_dim: int, value_dim: int) -> int:
    """Returns the number of parts of the channels; each part has its own programs."""
    return pl.cdiv(max(head_dim, value_dim), PART)


def multiplied_channels(head_dim: int, value_dim: int) -> tuple[int, int, int]:
    """Returns the channels of all products of the kernels of o, of dq, and of dk and dv; each part has the scores'."""
    parts = channel_parts(head_dim, value_dim)
    both = head_dim + value_dim
    return parts * head_dim + value_dim, parts * both + head_dim, (parts + 1) * both


def repeated_products(head_dim: int, value_dim: int) -> tuple[float, float]:
    """Returns the FLOPs of the kernels, (forward, backward), relative to those of two products and of five."""
    forward, *backward = multiplied_channels(head_dim, value_dim)
    both = head_dim + value_dim
    return forward / both, sum(backward) / (2.5 * both)


class ScoreSettings(NamedTuple):
    """The settings of `attention` that determine a score and how far back a query sees."""

    window: int
    scale: float
    softcap: float

    def score(self, x) -> jax.Array:
        """The scores of products x of queries and keys."""
        x = x * self.scale
        return self.softcap * jnp.tanh(x * (1 / self.softcap)) if self.softcap else x

    def slope(self, scores) -> Any:
        """The derivative of `score`, from its results."""
        if not self.softcap:
            return self.scale
        part = scores * (1 / self.softcap)
        return self.scale * (1 - part * part)


class Call(NamedTuple):
    """How a kernel is called: all its arguments but the arrays.

    offset: index of the first query's own key. dtype: of the results; None: that of the queries.
    """

    offset: int
    rule: ScoreSettings
    interpret: bool
    dtype: Any = None


def first_seen(starts_BS: jax.Array, window: int, offset: int) -> jax.Array:
    """The index of the first key that each query attends to, int32 `[B, S]`; it never decreases along a row.

    offset: index of the first query's own key.
    """
    if not window:
        return starts_BS
    index_1S = offset + jnp.arange(starts_BS.shape[1], dtype=i32)[None, :]
    return jnp.maximum(starts_BS, index_1S - (window - 1))


# --- reference --------------------------------------------------------------------------------------------------------


def reference(q, k, v, starts, rule: ScoreSettings, sinks=None) -> jax.Array:
    """Softmax over a mask `[B, S, T]`, in jnp."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    s = rule.score(jnp.einsum("bshc,bthc->bhst", q, k, preferred_element_type=f32))
    offset = k.shape[1] - q.shape[1]
    query = offset + jnp.arange(q.shape[1])
    key = jnp.arange(k.shape[1])
    first = first_seen(starts, rule.window, offset)
    seen = (key[None, None, :] <= query[None, :, None]) & (key[None, None, :] >= first[:, :, None])
    s = jnp.where(seen[:, None], s, HIDDEN)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[None, :, None, None], (*s.shape[:3], 1))
        s = jnp.concatenate([s, column], axis=-1)
    p = jax.nn.softmax(s, axis=-1)[..., : k.shape[1]]
    return jnp.einsum("bhst,bthc->bshc", p.astype(q.dtype), v, preferred_element_type=f32).astype(q.dtype)


# --- kernels ----------------------------------------------------------------------------------------------------------


def _spread(vector, like, axis: int) -> jax.Array:
    """A vector repeated to the shape of a tile, whose dimension `axis` it has."""
    return jax.lax.broadcast_in_dim(vector, like.shape, (axis,))


def _tiles_up_to(tile, offset: int, keys: int):
    """The number of tiles of keys up to the last key that a query of this tile sees. keys: how many there are."""
    if offset >= keys:
        return keys // COLUMNS
    return (tile + 1) * (ROWS // COLUMNS) + pl.cdiv(offset, COLUMNS)


def _launch(kernel, operands, out, grid, interpret: bool):
    return dispatch.launch(
        kernel,
        operands,
        op="attention",
        out=out,
        grid=grid,
        names=("tile", "head", "row"),
        interpret=interpret,
        compiler_params=WITHOUT_BARRIERS,
    )


def _program(parts: int):
    """(row of the batch, head, tile, part of the channels) of this program."""
    b, head, tile = (jax.lax.axis_index(name) for name in ("row", "head", "tile"))
    return (b, head, tile, 0) if parts == 1 else (b, head // parts, tile, head % parts)


def _channels(size: int, part) -> Any:
    """The slice of a part of this size."""
    return pl.ds(part * size, size)


def _forward_mosaic(q, k, v, first, call: Call) -> tuple[jax.Array, jax.Array]:
    """Runs the forward kernel: (o, lse `[B, H, S]`). A query that sees no key gets o = 0 and lse = HIDDEN."""
    B, S, H, h = q.shape
    group = H // k.shape[2]
    number = channel_parts(h, v.shape[3])
    width = v.shape[3] // number
    offset, rule, interpret, dtype = call
    products = Products(q.dtype, interpret)

    def kernel(q_ref, k_ref, vT_ref, first_ref, o_ref, lse_ref):
        b, head, tile, part = _program(number)
        shared = head // group
        rows = pl.ds(tile * ROWS, ROWS)
        q = products.rows(q_ref, (b, rows, head))
        first = products.vector(first_ref, (b, rows), 0)
        query = products.index((ROWS, COLUMNS), 0) + (tile * ROWS + offset)
        key = products.index((ROWS, COLUMNS), 1)

        def step(j, carry):
            o, top, total = carry
            columns = pl.ds(j * COLUMNS, COLUMNS)
            s = products.plus(products.filled(0, ROWS, COLUMNS), q, products.columns(k_ref, (b, columns, shared)))
            seen = (key + j * COLUMNS <= query) & (key + j * COLUMNS >= _spread(first, s, 0))
            s = jnp.where(seen, rule.score(s), HIDDEN)
            new = jnp.maximum(top, jnp.max(s, axis=1))
            shrunk = jnp.exp(top - new)
            p = jnp.where(seen, jnp.exp(s - _spread(new, s, 0)), 0.0)
            vT = products.columns(vT_ref, (b, shared, _channels(width, part), columns))
            o = products.plus(o * _spread(shrunk, o, 0), products.operand(p), vT)
            return o, new, total * shrunk + jnp.sum(p, axis=1)

        start = first_ref[b, tile * ROWS] // COLUMNS
        stop = _tiles_up_to(tile, offset, k.shape[1])
        carry = products.filled(0, ROWS, width), products.filled(HIDDEN, ROWS), products.filled(0, ROWS)
        o, top, total = jax.lax.fori_loop(start, stop, step, carry)
        total = jnp.where(total > 0, total, 1.0)
        tiles.store(o_ref, (b, rows, head, _channels(width, part)), (o / _spread(total, o, 0)).astype(o_ref.dtype))
        tiles.store(lse_ref, (b, head, rows), top + jnp.log(total))  # each part writes the same

    out = jax.ShapeDtypeStruct((B, S, H, v.shape[3]), dtype or q.dtype), jax.ShapeDtypeStruct((B, H, S), f32)
    return _launch(kernel, (q, k, _transposed(v), first), out, (S // ROWS, H * number, B), interpret)


def _queries_mosaic(q, k, v, first, lse, delta, do, call: Call) -> jax.Array:
    """Runs the kernel for dq: a program has a tile of queries, and goes through the keys that they see."""
    B, S, H, h = q.shape
    group = H // k.shape[2]
    number = channel_parts(h, v.shape[3])
    width = h // number
    offset, rule, interpret, dtype = call
    products = Products(q.dtype, interpret)

    def kernel(q_ref, do_ref, k_ref, kT_ref, v_ref, first_ref, lse_ref, delta_ref, dq_ref):
        b, head, tile, part = _program(number)
        shared = head // group
        rows = pl.ds(tile * ROWS, ROWS)
        q, do = (products.rows(ref, (b, rows, head)) for ref in (q_ref, do_ref))
        lse, delta = (products.vector(ref, (b, head, rows), 0) for ref in (lse_ref, delta_ref))
        first = products.vector(first_ref, (b, rows), 0)
        query = products.index((ROWS, COLUMNS), 0) + (tile * ROWS + offset)
        key = products.index((ROWS, COLUMNS), 1)

        def step(j, dq):
            columns = pl.ds(j * COLUMNS, COLUMNS)
            zero = products.filled(0, ROWS, COLUMNS)
            s = products.plus(zero, q, products.columns(k_ref, (b, columns, shared)))
            dp = products.plus(zero, do, products.columns(v_ref, (b, columns, shared)))
            seen = (key + j * COLUMNS <= query) & (key + j * COLUMNS >= _spread(first, s, 0))
            s = rule.score(s)
            p = jnp.where(seen, jnp.exp(s - _spread(lse, s, 0)), 0.0)
            ds = p * (dp - _spread(delta, dp, 0)) * rule.slope(s)
            kT = products.columns(kT_ref, (b, shared, _channels(width, part), columns))
            return products.plus(dq, products.operand(ds), kT)

        start = first_ref[b, tile * ROWS] // COLUMNS
        stop = _tiles_up_to(tile, offset, k.shape[1])
        dq = jax.lax.fori_loop(start, stop, step, products.filled(0, ROWS, width))
        tiles.store(dq_ref, (b, rows, head, _channels(width, part)), dq.astype(dq_ref.dtype))

    operands = q, do, k, _transposed(k), v, first, lse, delta
    out = jax.ShapeDtypeStruct(q.shape, dtype or q.dtype)
    return _launch(kernel, operands, out, (S // ROWS, H * number, B), interpret)


def _keys_mosaic(q, k, v, first, lse, delta, do, call: Call) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel for (dk, dv): a program has a tile of keys, and goes through all heads' queries that see them."""
    B, T, K, h = k.shape
    group = q.shape[2] // K
    number = channel_parts(h, v.shape[3])
    width_k, width_v = h // number, v.shape[3] // number
    offset, rule, interpret, dtype = call
    products = Products(q.dtype, interpret)
    # Queries before `ends` see a key of the tile or come before it; no later one does, since `first` never decreases.
    last_key = jnp.arange(ROWS - 1, T, ROWS, dtype=i32)
    ends = jnp.sum(first[:, None, :] <= last_key[None, :, None], axis=-1, dtype=i32)

    def kernel(k_ref, v_ref, q_ref, qT_ref, do_ref, doT_ref, first_ref, ends_ref, lse_ref, delta_ref, dk_ref, dv_ref):
        b, shared, tile, part = _program(number)
        rows = pl.ds(tile * ROWS, ROWS)
        k, v = (products.rows(ref, (b, rows, shared)) for ref in (k_ref, v_ref))
        key = products.index((ROWS, COLUMNS), 0) + tile * ROWS
        query = products.index((ROWS, COLUMNS), 1) + offset
        start = jnp.maximum(tile * ROWS - offset, 0) // COLUMNS
        count = (ends_ref[b, tile] + COLUMNS - 1) // COLUMNS - start

        def step(turn, carry):
            dk, dv = carry
            head = shared * group + turn // count
            j = start + turn % count
            columns = pl.ds(j * COLUMNS, COLUMNS)
            zero = products.filled(0, ROWS, COLUMNS)
            s = products.plus(zero, k, products.columns(q_ref, (b, columns, head)))
            dp = products.plus(zero, v, products.columns(do_ref, (b, columns, head)))
            first = products.vector(first_ref, (b, columns), 1)
            lse, delta = (products.vector(ref, (b, head, columns), 1) for ref in (lse_ref, delta_ref))
            seen = (key <= query + j * COLUMNS) & (key >= _spread(first, s, 1))
            s = rule.score(s)
            p = jnp.where(seen, jnp.exp(s - _spread(lse, s, 1)), 0.0)
            ds = p * (dp - _spread(delta, dp, 1)) * rule.slope(s)
            of_k, of_v = _channels(width_k, part), _channels(width_v, part)
            dv = products.plus(dv, products.operand(p), products.columns(doT_ref, (b, head, of_v, columns)))
            dk = products.plus(dk, products.operand(ds), products.columns(qT_ref, (b, head, of_k, columns)))
            return dk, dv

        carry = products.filled(0, ROWS, width_k), products.filled(0, ROWS, width_v)
        dk, dv = jax.lax.fori_loop(0, group * count, step, carry)
        tiles.store(dk_ref, (b, rows, shared, _channels(width_k, part)), dk.astype(dk_ref.dtype))
        tiles.store(dv_ref, (b, rows, shared, _channels(width_v, part)), dv.astype(dv_ref.dtype))

    out = tuple(jax.ShapeDtypeStruct(x.shape, dtype or x.dtype) for x in (k, v))
    operands = k, v, q, _transposed(q), do, _transposed(do), first, ends, lse, delta
    return _launch(kernel, operands, out, (T // ROWS, K * number, B), interpret)


def _transposed(x_BSHh: jax.Array) -> jax.Array:
    """`[B, H, h, S]`, in which neighbouring positions are neighbours in memory."""
    return x_BSHh.transpose(0, 2, 3, 1)


# --- sinks ------------------------------------------------------------------------------------------------------------


def add_sinks(
    o: Float[Array, "B S H h"], lse: Float[Array, "B H S"], sinks: Float[Array, " H"]
) -> tuple[Float[Array, "B S H h"], Float[Array, "B H S"]]:
    """Adds each head's sink to the denominator of a softmax: returns (o, lse) with sinks from o and lse without."""
    total = jnp.logaddexp(lse, sinks[None, :, None])
    kept = jnp.exp(lse - total).transpose(0, 2, 1)[..., None]
    return (o * kept).astype(o.dtype), total


def gradient_of_sinks(sinks: Float[Array, " H"], lse: Float[Array, "B H S"], delta: Float[Array, "B H S"]):
    """The gradient of the sinks `[H]`. lse: with the sinks. delta: sum(do * o) with these o."""
    share = jnp.exp(sinks[None, :, None] - lse)
    return -jnp.sum(share * delta, axis=(0, 2)).astype(sinks.dtype)


# --- public -----------------------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """Residuals: the operands, the result, and float32 `lse` `[B, H, S]`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    starts: jax.Array
    sinks: jax.Array | None
    o: jax.Array
    lse: jax.Array


def attention(
    q: Float[Array, "B S H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K v"],
    starts: Int[Array, "B S"],
    *,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Float[Array, " H"] | None = None,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Float[Array, "B S H v"]:
    """softmax(score(q k^T)) v over the keys of the query's document up to its own, differentiable; see above.

    The queries are the last S of the keys' T positions. starts: int32, indices among the keys, nondecreasing in a row.
    window: number of latest positions that a query attends to, its own included; 0: all. scale: None: 1 / sqrt(h).
    softcap: 0: none. sinks: see above; None: there are none. Raises ValueError for other shapes and dtypes, and
    dispatch.Unserved if implementation="mosaic" and the kernel does not take the heads, see HEADS.
    """
    _check(q, k, v, starts, window)
    rule = ScoreSettings(window, q.shape[-1] ** -0.5 if scale is None else scale, softcap)
    sizes = q.shape[-1], v.shape[-1]
    got = f"{q.dtype} of {sizes[0]}" + ("" if sizes[0] == sizes[1] else f", values of {sizes[1]}")
    if dispatch.runs_kernel("attention", implementation, fits(q.dtype, *sizes), f"expected {HEADS}", got):
        sinks = sinks if sinks is None else mark_varying(sinks, varying_axes(q))
        with jax.named_scope(f"{WINDOW}{window}"):
            return _attention(q, k, v, starts, sinks, rule, interpret)
    return reference(q, k, v, starts, rule, sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(q, k, v, starts, sinks, rule: ScoreSettings, interpret: bool):
    return _attention_fwd(q, k, v, starts, sinks, rule, interpret)[0]


def _attention_fwd(q, k, v, starts, sinks, rule: ScoreSettings, interpret: bool):
    S = q.shape[1]
    o, lse = _forward_mosaic(*_whole_tiles(q, k, v, starts, rule.window), Call(k.shape[1] - S, rule, interpret))
    o, lse = o[:, :S], lse[:, :, :S]
    if sinks is not None:
        o, lse = add_sinks(o, lse, sinks)
    return o, Saved(q, k, v, starts, sinks, o, lse)


def _attention_bwd(rule: ScoreSettings, interpret: bool, saved: Saved, do):
    S = do.shape[1]
    T = saved.k.shape[1]
    delta = jnp.einsum("bshc,bshc->bhs", saved.o, do, preferred_element_type=f32)
    d_sinks = None if saved.sinks is None else gradient_of_sinks(saved.sinks, saved.lse, delta)
    operands = _whole_tiles(saved.q, saved.k, saved.v, saved.starts, rule.window)
    extra = operands[0].shape[1] - S
    lse, delta = (_padded(x, 2, extra) for x in (saved.lse, delta))
    operands = *operands, lse, delta, _padded(do, 1, extra)
    call = Call(T - S, rule, interpret)
    dq = _queries_mosaic(*operands, call)
    dk, dv = _keys_mosaic(*operands, call)
    return dq[:, :S], dk[:, :T], dv[:, :T], None, d_sinks


_attention.defvjp(_attention_fwd, _attention_bwd)


def fits_part(dtype, head_dim: int, tokens: int) -> bool:
    """True if the kernels take parts with these numbers of queries and keys, and heads of this dtype and size."""
    return fits(dtype, head_dim) and tokens % ROWS == 0


def forward_part(
    q, k, v, first, rule: ScoreSettings, *, causal: bool, interpret: bool = False
) -> tuple[Float[Array, "B S H h"], Float[Array, "B H S"]]:
    """(softmax(score(q k^T)) v over a part of the keys, log-sum-exp of their scores), both float32.

    There are as many keys as queries, a multiple of ROWS. causal: the keys are those of the queries' own tokens; else
    none comes after a query. first: int32 `[B, S]`, the index of the first key that each query sees, S for none of
    them, never decreasing in a row; the rule's window is not read. Raises Unserved on a device that is no NVIDIA GPU.
    """
    return _forward_mosaic(q, k, v, first, Call(0 if causal else k.shape[1], rule, interpret, f32))


def backward_part(q, k, v, first, lse, delta, do, rule: ScoreSettings, *, causal: bool, interpret: bool = False):
    """(dq, dk, dv) that come from a part of the keys, float32.

    lse, delta: float32 `[B, H, S]` of *all* keys, log-sum-exp and sum(do * o). Others: as in `forward_part`.
    """
    operands = q, k, v, first, lse, delta, do
    call = Call(0 if causal else k.shape[1], rule, interpret, f32)
    return _queries_mosaic(*operands, call), *_keys_mosaic(*operands, call)


def _whole_tiles(q, k, v, starts, window: int) -> tuple[Any, Any, Any, Any]:
    """(q, k, v, first) with as many positions as whole tiles have. The added queries see themselves only."""
    B, S = starts.shape
    T = k.shape[1]
    extra = -S % ROWS
    first = first_seen(starts, window, T - S)
    if extra:
        added = jnp.arange(T, T + extra, dtype=i32)
        first = jnp.concatenate([first, jnp.broadcast_to(added[None, :], (B, extra))], axis=1)
    extra_keys = extra + -(T + extra) % ROWS
    return _padded(q, 1, extra), _padded(k, 1, extra_keys), _padded(v, 1, extra_keys), first


def _padded(x, axis: int, extra: int):
    """x with zeros added at the end of an axis."""
    return jnp.pad(x, [(0, extra if i == axis else 0) for i in range(x.ndim)]) if extra else x


def _check(q, k, v, starts, window: int) -> None:
    """Raises ValueError for wrong shapes and dtypes."""
    op = "attention"
    expect(q.ndim == 4 and q.size > 0, op, "q", "[B, S, H, h], not empty", q.shape)
    B, S, H, h = q.shape
    T = k.shape[1] if k.ndim == 4 else 0
    shaped = T >= S and k.shape == (B, T, k.shape[2], h) and H % k.shape[2] == 0
    expect(shaped, op, "k", (B, f"{S} or more", "K", h), k.shape)
    expect(v.shape[:3] == k.shape[:3] and v.ndim == 4, op, "v", (*k.shape[:3], "v"), v.shape)
    expect(q.dtype == k.dtype == v.dtype, op, "dtype of k and v", q.dtype, (k.dtype, v.dtype))
    expect(
        starts.shape == (B, S) and starts.dtype == i32,
        op,
        "starts",
        f"int32 {(B, S)}",
        f"{starts.dtype} {starts.shape}",
    )
    expect(window >= 0, op, "window", "0 or more", window)


# --- cases ------------------------------------------------------------------------------------------------------------


def reference_cases(sizes: Sizes, tokens: int, head_dim: int = 0, value_dim: int = 0) -> list[Case]:
    """Attention and its gradients at a model's sizes, rows of up to 2048 tokens in four documents.

    head_dim, value_dim: channels of keys and of values in place of the model's.

    They are no `cases`, which are passes that are timed by their bytes.
    """
    length = min(tokens, 2048)
    rows = tokens // length
    head_dim = head_dim or sizes.head_dim
    q, k, o, v = (
        jax.ShapeDtypeStruct((rows, length, heads, channels), jnp.bfloat16)
        for channels in (head_dim, value_dim or head_dim)
        for heads in (sizes.heads, sizes.kv_heads)
    )
    place = jnp.arange(length, dtype=i32)
    documents = jnp.broadcast_to(place - place % (length // 4), (rows, length))

    def within_documents(q, k, v, **how):
        return attention(q, k, v, documents, **how)

    def gradients(q, k, v, do, **how):
        return jax.vjp(functools.partial(within_documents, **how), q, k, v)[1](do)

    moved = 2 * (q.size + k.size + v.size + o.size)
    return [
        Case("attention.forward", within_documents, (q, k, v), moved),
        Case("attention.backward", gradients, (q, k, v, o), 2 * moved),
    ]
