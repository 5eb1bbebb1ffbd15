"""Attention of a piece of queries to a piece of keys of the same length, forward and backward, by XLA or a kernel.

A pair is computed by XLA, with float32 scores `[B, H, t, u]` in memory, by cuDNN, or by our kernel
(pallas_kernels/flash_attention.py), both without them. Each gives softmax-weighted values and their log-sum-exp.
`merged_pairs` makes of two such results that of all their keys (Liu et al. 2023, arXiv:2310.01889, from the online
softmax of Milakov and Gimelshein 2018).

Reverse mode is that of FlashAttention: p = exp(s - lse) with the log-sum-exp of *all* keys, so a pair's gradients need
nothing of other pairs. XLA and our kernel sum products in float32 and return these sums. cuDNN rounds the results of a
pair to 16 bits; sums of several pairs are float32 all the same.

Shape suffixes: B batch, t and u tokens of a piece of queries and of keys, H query heads, K key/value heads, G query
heads that share one, h head dimension.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, flash_attention as kernel
from pallas_kernels.flash_attention import HIDDEN, ScoreSettings
from surojax.models import cudnn

f32 = jnp.float32


class Queries(NamedTuple):
    """A piece of queries. index: positions in the sequence. first: position of the first key that each query sees,
    `[1, t]` if all rows are alike."""

    q_BtKGh: jax.Array
    index_t: jax.Array
    first_Bt: jax.Array


class Keys(NamedTuple):
    """A piece of keys and values. index: positions in the sequence."""

    k_BuKh: jax.Array
    v_BuKh: jax.Array
    index_u: jax.Array


class Attended(NamedTuple):
    """Attention to some of the keys: values weighted by the scores' softmax, and log(sum(exp(score))), float32."""

    y_BtKGh: jax.Array
    lse_BKGt: jax.Array


class Slopes(NamedTuple):
    """Inputs of the backward pass for a piece of queries. y, lse: over all keys. delta: sum of dy * y over channels."""

    dy_BtKGh: jax.Array
    y_BtKGh: jax.Array
    lse_BKGt: jax.Array
    delta_BKGt: jax.Array


class Pair(NamedTuple):
    """Static arguments of a pair of pieces. by: "xla", "cudnn" or "mosaic".

    own: the keys are those of the queries' own tokens, else none comes after a query. all_seen: neither documents nor
    windows hide a key that comes before a query.
    """

    by: str
    rule: ScoreSettings
    own: bool
    all_seen: bool


def attended(queries: Queries, keys: Keys, pair: Pair) -> Attended:
    """Computes attention of a piece of queries to a piece of keys. A query that sees none of these keys gets y = 0."""
    return {"xla": _by_xla, "cudnn": _by_cudnn, "mosaic": _by_mosaic}[pair.by](queries, keys, pair)


def pair_gradients(queries: Queries, keys: Keys, slopes: Slopes, pair: Pair) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes (dq `[B, t, K, G, h]`, dk, dv) of the attention of one piece to another, float32."""
    backward = {"xla": _backward_by_xla, "cudnn": _backward_by_cudnn, "mosaic": _backward_by_mosaic}[pair.by]
    return backward(queries, keys, slopes, pair)


def merged_pairs(one: Attended, other: Attended) -> Attended:
    """Merges attention to two sets of keys: a weighted mean with one product in its sum (see numerics/rounding.py)."""
    lse_BKGt = jnp.logaddexp(one.lse_BKGt, other.lse_BKGt)
    weight_BtKG1 = _over_channels(jnp.exp(one.lse_BKGt - lse_BKGt))
    return Attended(other.y_BtKGh + weight_BtKG1 * (one.y_BtKGh - other.y_BtKGh), lse_BKGt)


def _over_channels(x_BKGt: jax.Array) -> jax.Array:
    """Reorders `[B, K, G, t]` to `[B, t, K, G, 1]`, to multiply it with values per channel."""
    return jnp.moveaxis(x_BKGt, 3, 1)[..., None]


# --- which -----------------------------------------------------------------------------------------------------------


def chosen_for_pairs(
    implementation: str,
    dtype,
    head_dim: int,
    tokens: int,
    *,
    gpu: bool,
    all_seen: bool,
    softcap: bool,
    hopper: bool = False,
) -> str:
    """The implementation that "auto" selects for pieces of `tokens` tokens, with heads of this dtype and size.

    On a GPU this is cuDNN without documents, windows and softcaps, else our kernel, if they support the heads.
    hopper: of a GPU of sm_90, on which cuDNN has heads of up to 256 channels.
    Raises NotImplementedError for "cudnn" or "mosaic" if that one does not support them.
    """
    half = jnp.dtype(dtype) in kernel.HALF
    largest = 256 if hopper else 128
    takes = {
        "xla": True,
        "cudnn": half and head_dim % 8 == 0 and head_dim <= largest and tokens % 2 == 0 and all_seen and not softcap,
        "mosaic": kernel.fits_part(dtype, head_dim, tokens),
    }
    if implementation == "auto":
        return next(by for by in ("cudnn", "mosaic", "xla") if takes[by] and (gpu or by == "xla"))
    if not takes[implementation]:
        expected = {
            "cudnn": f"16-bit heads of 8, 16, .. {largest} channels, an even number of tokens, "
            "no documents, window or softcap",
            "mosaic": f"{kernel.HEADS}, a multiple of {kernel.ROWS} tokens",
        }
        got = f"{dtype} of {head_dim}, {tokens} tokens"
        got += ("" if all_seen else ", documents or a window") + (", a softcap" if softcap else "")
        raise dispatch.Unserved(
            f"{implementation} attention of pieces: expected {expected[implementation]}, got {got}; "
            "use attention='auto'"
        )
    return implementation


# --- by XLA ----------------------------------------------------------------------------------------------------------


def _is_masked(pair: Pair) -> bool:
    """True if some queries do not attend to some keys."""
    return pair.own or not pair.all_seen


def _seen(queries: Queries, keys: Keys) -> jax.Array:
    """A mask `[B, 1, 1, t, u]`: True if a query attends to a key."""
    up_to_own_tu = keys.index_u[None, :] <= queries.index_t[:, None]
    seen_Btu = up_to_own_tu[None] & (keys.index_u[None, None, :] >= queries.first_Bt[:, :, None])
    return seen_Btu[:, None, None]


def _scores(queries: Queries, keys: Keys, rule: ScoreSettings) -> jax.Array:
    """Computes attention scores, float32 `[B, K, G, t, u]`."""
    products = jnp.einsum("BtKGh,BuKh->BKGtu", queries.q_BtKGh, keys.k_BuKh, preferred_element_type=f32)
    # The condition changes no value. It stands between a product and the difference that it enters.
    return jnp.where(products == 0, products, rule.score(products))


def _exponentials(scores_BKGtu: jax.Array, less_BKGt: jax.Array, queries: Queries, keys: Keys, pair: Pair):
    """Returns exp(scores - less), 0 for keys that a query does not attend to."""
    p_BKGtu = jnp.exp(scores_BKGtu - less_BKGt[..., None])
    return jnp.where(_seen(queries, keys), p_BKGtu, 0.0) if _is_masked(pair) else p_BKGtu


def _by_xla(queries: Queries, keys: Keys, pair: Pair) -> Attended:
    s_BKGtu = _scores(queries, keys, pair.rule)
    s_BKGtu = jnp.where(_seen(queries, keys), s_BKGtu, HIDDEN) if _is_masked(pair) else s_BKGtu
    top_BKGt = jnp.max(s_BKGtu, axis=-1)
    p_BKGtu = _exponentials(s_BKGtu, top_BKGt, queries, keys, pair)
    total_BKGt = jnp.sum(p_BKGtu, axis=-1)
    some_BKGt = jnp.where(total_BKGt == 0, 1.0, total_BKGt)
    v = keys.v_BuKh
    y_BtKGh = jnp.einsum("BKGtu,BuKh->BtKGh", p_BKGtu.astype(v.dtype), v, preferred_element_type=f32)
    return Attended(y_BtKGh / _over_channels(some_BKGt), top_BKGt + jnp.log(some_BKGt))


def _backward_by_xla(queries: Queries, keys: Keys, slopes: Slopes, pair: Pair):
    dtype = queries.q_BtKGh.dtype
    s_BKGtu = _scores(queries, keys, pair.rule)
    p_BKGtu = _exponentials(s_BKGtu, slopes.lse_BKGt, queries, keys, pair)
    dp_BKGtu = jnp.einsum("BtKGh,BuKh->BKGtu", slopes.dy_BtKGh, keys.v_BuKh, preferred_element_type=f32)
    ds_BKGtu = (p_BKGtu * (dp_BKGtu - slopes.delta_BKGt[..., None]) * pair.rule.slope(s_BKGtu)).astype(dtype)
    sums: Any = {"preferred_element_type": f32}
    dq_BtKGh = jnp.einsum("BKGtu,BuKh->BtKGh", ds_BKGtu, keys.k_BuKh, **sums)
    dk_BuKh = jnp.einsum("BKGtu,BtKGh->BuKh", ds_BKGtu, queries.q_BtKGh, **sums)
    dv_BuKh = jnp.einsum("BKGtu,BtKGh->BuKh", p_BKGtu.astype(dtype), slopes.dy_BtKGh, **sums)
    return dq_BtKGh, dk_BuKh, dv_BuKh


# --- by kernels, whose query heads are one dimension ------------------------------------------------------------------


def _heads(x_BtKGh: jax.Array) -> jax.Array:
    """Merges the head dimensions K and G: `[B, t, H, h]`."""
    B, t, _, _, h = x_BtKGh.shape
    return x_BtKGh.reshape(B, t, -1, h)


def _rows(x_BKGt: jax.Array) -> jax.Array:
    """Merges the head dimensions K and G: `[B, H, t]`."""
    B, _, _, t = x_BKGt.shape
    return x_BKGt.reshape(B, -1, t)


def _grouped(y_BtHh: jax.Array, lse_BHt: jax.Array, like: Queries) -> Attended:
    """Reshapes a kernel's result to `Attended`."""
    B, t, K, G, _ = like.q_BtKGh.shape
    return Attended(y_BtHh.reshape(like.q_BtKGh.shape).astype(f32), lse_BHt.reshape(B, K, G, t))


def _by_cudnn(queries: Queries, keys: Keys, pair: Pair) -> Attended:
    operands = _heads(queries.q_BtKGh), keys.k_BuKh, keys.v_BuKh
    return _grouped(*cudnn.forward_part(*operands, pair.rule.scale, causal=pair.own), queries)


def _backward_by_cudnn(queries: Queries, keys: Keys, slopes: Slopes, pair: Pair):
    operands = _heads(queries.q_BtKGh), keys.k_BuKh, keys.v_BuKh
    rows = _rows(slopes.lse_BKGt), _heads(slopes.y_BtKGh), _heads(slopes.dy_BtKGh)
    dq, dk, dv = cudnn.backward_part(*operands, *rows, pair.rule.scale, causal=pair.own)
    return dq.reshape(queries.q_BtKGh.shape).astype(f32), dk.astype(f32), dv.astype(f32)


def _first_of_part(queries: Queries, keys: Keys) -> jax.Array:
    """Index, within this piece, of the first key that each query sees, int32 `[B, t]`; the piece's length if none."""
    B, t = queries.q_BtKGh.shape[:2]
    first_Bt = jnp.clip(queries.first_Bt - keys.index_u[0], 0, len(keys.index_u))
    return jnp.broadcast_to(first_Bt, (B, t)).astype(jnp.int32)


def _by_mosaic(queries: Queries, keys: Keys, pair: Pair) -> Attended:
    operands = _heads(queries.q_BtKGh), keys.k_BuKh, keys.v_BuKh, _first_of_part(queries, keys)
    return _grouped(*kernel.forward_part(*operands, pair.rule, causal=pair.own), queries)


def _backward_by_mosaic(queries: Queries, keys: Keys, slopes: Slopes, pair: Pair):
    operands = _heads(queries.q_BtKGh), keys.k_BuKh, keys.v_BuKh, _first_of_part(queries, keys)
    rows = _rows(slopes.lse_BKGt), _rows(slopes.delta_BKGt), _heads(slopes.dy_BtKGh)
    dq, dk, dv = kernel.backward_part(*operands, *rows, pair.rule, causal=pair.own)
    return dq.reshape(queries.q_BtKGh.shape), dk, dv
