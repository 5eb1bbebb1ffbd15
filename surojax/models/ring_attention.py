"""Causal attention of this device's queries to the keys of all devices of `cp`: methods allgather and ring.

Each device has two pieces of consecutive tokens of every sequence, early and late, in zig-zag order
(parallel/context.py). Its queries see the keys of a device in a *hop*. Of the four pairs of pieces of queries and keys,

    own keys:           early x early (half of it), late x early, late x late (half of it)
    a device before it: early x early, late x early
    a device after it:  late x early, late x late

are computed (ring_pairs.py), so that every hop costs the same on all devices. With allgather a device has the keys of
all others from the beginning; with ring it passes on those that it has received, while it computes with them.

Reverse mode is written out: differentiating the hops one by one would need the gradient of each log-sum-exp. Results
and gradients are summed over hops in float32. dk and dv of a block of keys travel with it around the ring; with
allgather they are reduce-scattered.

Shape suffixes: B batch, s this device's tokens of a sequence, t and u tokens of a piece of queries and of keys, H query
heads, K key/value heads, G query heads that share one, h head dimension.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention import ScoreSettings, add_sinks, gradient_of_sinks
from pallas_kernels.manual_axes import mark_varying, varying_axes
from surojax.models.ring_pairs import Keys, Pair, Queries, Slopes, attended, merged_pairs, pair_gradients
from surojax.parallel import context
from surojax.parallel.context import Method

f32 = jnp.float32


class RingOptions(NamedTuple):
    """Static arguments of ring attention. by, all_seen: of every pair of pieces, see `Pair`."""

    method: Method
    by: str
    rule: ScoreSettings
    all_seen: bool

    def pair(self, *, own: bool = False) -> Pair:
        """The static arguments of a pair of pieces. own: see `Pair`."""
        return Pair(self.by, self.rule, own, self.all_seen)


# --- a hop ------------------------------------------------------------------------------------------------------------


def _halves(x, axis: int = 1):
    """Splits an array `[B, s, ...]` into its early and its late piece."""
    early, late = jnp.split(x, 2, axis=axis)
    return early, late


def _queries(q_BsHh: jax.Array, kv_heads: int, starts_BS, how: RingOptions) -> tuple[Queries, Queries]:
    """Splits this device's queries into the early and the late piece, with their positions."""
    B, s, H, h = q_BsHh.shape
    index_s = context.own_index(s, how.method)
    first_Bs = jnp.zeros((1, s), jnp.int32) if starts_BS is None else context.own_tokens(starts_BS, how.method)
    if how.rule.window:
        first_Bs = jnp.maximum(first_Bs, index_s[None, :] - (how.rule.window - 1))
    q_BsKGh = q_BsHh.reshape(B, s, kv_heads, H // kv_heads, h)
    early, late = zip(_halves(q_BsKGh), _halves(index_s, 0), _halves(first_Bs), strict=True)
    return Queries(*early), Queries(*late)


def _keys(k_BsKh: jax.Array, v_BsKh: jax.Array, owner: jax.Array | int) -> tuple[Keys, Keys]:
    """Splits the keys and values of device `owner` into the early and the late piece, with their positions."""
    _, devices = context.device()
    length = k_BsKh.shape[1] // 2
    index = jnp.arange(length, dtype=jnp.int32)
    starts = owner * length, (2 * devices - 1 - owner) * length
    early, late = zip(_halves(k_BsKh), _halves(v_BsKh), (start + index for start in starts), strict=True)
    return Keys(*early), Keys(*late)


def _either(first: jax.Array, one, other):
    """Selects one of two trees at run time: `one` if `first`, else `other`."""
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), one, other)


def _in_turn(tree):
    """Puts a hop's keys and the sums so far behind one barrier, so that scores of one hop at a time are in memory."""
    return jax.lax.optimization_barrier(tree)


def _hops(k_BsKh: jax.Array, v_BsKh: jax.Array, method: Method) -> Iterator[tuple[jax.Array, list[jax.Array]]]:
    """Yields (number of a device, its keys and values) for every other device.

    Keys and values travel in one array. As two, XLA joins a later hop of one with an earlier hop of the other, which
    then waits. ring: the next block is on its way while one is computed with.
    """
    number, devices = context.device()
    owners = [jnp.asarray(number - hop) % devices for hop in range(1, devices)]
    own = _joined(k_BsKh, v_BsKh)
    if method == "allgather":
        everyone = context.all_gather(own)
        for owner in owners:
            yield owner, jnp.split(context.of_device(everyone, owner), 2, axis=2)
        return
    block = context.to_next_device(own)
    for i, owner in enumerate(owners):
        following = context.to_next_device(block) if i < len(owners) - 1 else block
        yield owner, jnp.split(block, 2, axis=2)
        block = following


def _joined(k_BsKh: jax.Array, v_BsKh: jax.Array) -> jax.Array:
    """Concatenates keys and values, or their gradients, along the heads `[B, s, 2 K, h]`."""
    return jnp.concatenate([k_BsKh, v_BsKh], axis=2)


# --- all keys ---------------------------------------------------------------------------------------------------------


def ring_attention(
    q_BsHh: jax.Array,
    k_BsKh: jax.Array,
    v_BsKh: jax.Array,
    starts_BS: jax.Array | None,
    *,
    method: Method,
    rule: ScoreSettings,
    by: str,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Causal attention `[B, s, H, h]` of this device's queries to the keys of all devices, differentiable.

    starts: of documents, of whole rows; None: a row is one document. by: what computes a pair of pieces. sinks: see
    `attention.attend`.
    """
    axes = frozenset[str]().union(*(varying_axes(x) for x in (q_BsHh, k_BsKh, v_BsKh)))
    q_BsHh, k_BsKh, v_BsKh = (mark_varying(x, axes) for x in (q_BsHh, k_BsKh, v_BsKh))
    how = RingOptions(method, by, rule, all_seen=starts_BS is None and not rule.window)
    sinks_H = sinks_H if sinks_H is None else mark_varying(sinks_H, axes)
    return _ring_attention(q_BsHh, k_BsKh, v_BsKh, starts_BS, sinks_H, how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _ring_attention(q_BsHh, k_BsKh, v_BsKh, starts_BS, sinks_H, how: RingOptions):
    return _forward(q_BsHh, k_BsKh, v_BsKh, starts_BS, sinks_H, how)[0]


def _forward(q_BsHh, k_BsKh, v_BsKh, starts_BS, sinks_H, how: RingOptions):
    number, _ = context.device()
    hops = _hops(k_BsKh, v_BsKh, how.method)
    early, late = _queries(q_BsHh, k_BsKh.shape[2], starts_BS, how)
    own_early, own_late = _keys(k_BsKh, v_BsKh, number)
    earlier = how.pair()
    own = how.pair(own=True)
    y_early = attended(early, own_early, own)
    y_late = merged_pairs(attended(late, own_late, own), attended(late, own_early, earlier))
    for owner, block in hops:
        (k, v), y_early, y_late = _in_turn((block, y_early, y_late))
        early_keys, late_keys = _keys(k, v, owner)
        before = owner < number
        y_late = merged_pairs(y_late, attended(late, early_keys, earlier))
        queries = _either(before, early, late)
        y_second = attended(queries, _either(before, early_keys, late_keys), earlier)
        total = merged_pairs(_either(before, y_early, y_late), y_second)
        y_early = _either(before, total, y_early)
        y_late = _either(before, y_late, total)
    y_BsHh = jnp.concatenate([y_early.y_BtKGh, y_late.y_BtKGh], axis=1).reshape(q_BsHh.shape)
    lse_BKGs = jnp.concatenate([y_early.lse_BKGt, y_late.lse_BKGt], axis=-1)
    if sinks_H is not None:
        y_BsHh, lse_BHs = add_sinks(y_BsHh, _of_heads(lse_BKGs), sinks_H)
        lse_BKGs = lse_BHs.reshape(lse_BKGs.shape)
    y_BsHh = y_BsHh.astype(q_BsHh.dtype)
    return y_BsHh, (q_BsHh, k_BsKh, v_BsKh, starts_BS, sinks_H, y_BsHh, lse_BKGs)


def _of_heads(x_BKGs: jax.Array) -> jax.Array:
    """Merges the head dimensions K and G: `[B, H, s]`."""
    B, K, G, s = x_BKGs.shape
    return x_BKGs.reshape(B, K * G, s)


def _backward(how: RingOptions, saved, dy_BsHh):
    q_BsHh, k_BsKh, v_BsKh, starts_BS, sinks_H, y_BsHh, lse_BKGs = saved
    number, _ = context.device()
    hops = _hops(k_BsKh, v_BsKh, how.method)
    early, late = _queries(q_BsHh, k_BsKh.shape[2], starts_BS, how)
    B, s, K, h = k_BsKh.shape
    grouped = (B, s, K, -1, h)
    delta_BsKG = jnp.sum(y_BsHh.astype(f32) * dy_BsHh, axis=-1).reshape(B, s, K, -1)
    delta_BKGs = jnp.moveaxis(delta_BsKG, 1, 3)
    d_sinks = None if sinks_H is None else gradient_of_sinks(sinks_H, _of_heads(lse_BKGs), _of_heads(delta_BKGs))
    arrays = dy_BsHh.reshape(grouped), y_BsHh.reshape(grouped), lse_BKGs, delta_BKGs
    halves = zip(*(_halves(x, axis) for x, axis in zip(arrays, (1, 1, 3, 3), strict=True)), strict=True)
    early_slopes, late_slopes = (Slopes(*half) for half in halves)
    earlier = how.pair()
    own = how.pair(own=True)

    def hop_gradients(owner, k, v, *, is_own: bool):
        """Returns (dq of the early piece, dq of the late piece, dk and dv of a hop's keys in one array)."""
        early_keys, late_keys = _keys(k, v, owner)
        dq_late, *d_early = pair_gradients(late, early_keys, late_slopes, earlier)
        if is_own:
            dq_early, *more = pair_gradients(early, early_keys, early_slopes, own)
            dq_more, *d_late = pair_gradients(late, late_keys, late_slopes, own)
            d_early = [a + b for a, b in zip(d_early, more, strict=True)]
            dq_late = dq_late + dq_more
        else:
            before = owner < number
            queries, slopes = _either(before, (early, early_slopes), (late, late_slopes))
            keys = _either(before, early_keys, late_keys)
            dq, *d_keys = pair_gradients(queries, keys, slopes, earlier)
            zeros = jax.tree.map(jnp.zeros_like, (dq, d_keys))
            dq_early, more = _either(before, (dq, d_keys), zeros)
            dq_more, d_late = _either(before, zeros, (dq, d_keys))
            d_early = [a + b for a, b in zip(d_early, more, strict=True)]
            dq_late = dq_late + dq_more
        return dq_early, dq_late, jnp.concatenate([_joined(*d_early), _joined(*d_late)], axis=1)

    dq_early, dq_late, d_block = hop_gradients(number, k_BsKh, v_BsKh, is_own=True)
    collected = context.Collected(d_block, how.method)
    for owner, block in hops:
        (k, v), dq_early, dq_late = _in_turn((block, dq_early, dq_late))
        more_early, more_late, d_block = hop_gradients(owner, k, v, is_own=False)
        dq_early, dq_late = dq_early + more_early, dq_late + more_late
        collected.add(d_block)
    dk_BsKh, dv_BsKh = jnp.split(collected.sums(k_BsKh.dtype), 2, axis=2)
    dq_BsHh = jnp.concatenate([dq_early, dq_late], axis=1).reshape(q_BsHh.shape)
    return dq_BsHh.astype(q_BsHh.dtype), dk_BsKh, dv_BsKh, None, d_sinks


_ring_attention.defvjp(_forward, _backward)
