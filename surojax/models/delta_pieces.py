"""The gated delta rule over the devices of `cp`: each piece of a row (row_pieces.py) goes on from the state before it.

    forward:   own = map of the tokens of each piece;  before = state before each, from the maps of all;  the rule
    backward:  c = gradient of `before` by the outputs alone;  d_after of each piece, from (M^T, c) of all;  the rule's

A device sends the others one map for each of its pieces, k (k + v) float32 a head (k (1 + v) without the correction),
forward and backward. So all devices know the states between all pieces, and none waits for another one's tokens.

Shape suffixes: see delta_rule.py.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation
from pallas_kernels.manual_axes import mark_varying, varying_axes
from surojax.models.delta_rule import (
    Affine,
    ChunkSizes,
    Tokens,
    all_in_groups,
    chosen_sizes,
    chunk_maps,
    gated_delta_rule,
    gradients_in_groups,
    group_forward,
    mapped,
    prepared,
    rule_backward,
    rule_forward,
)
from surojax.models.row_pieces import RowPieces
from surojax.parallel import context
from surojax.parallel.context import Method


def rule_of_pieces(
    method: Method,
    tokens: Tokens,
    starts: jax.Array | None = None,
    state: jax.Array | None = None,
    sizes: ChunkSizes | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes `gated_delta_rule` of pieces, which are the rows of `tokens`; without `cp` each is a row.

    state: before the first token of all devices, a row for each sequence. All devices of `cp` have it, and the state
    after the last token, and the gradients of both.
    """
    if not context.is_divided():
        return gated_delta_rule(tokens, starts, state, sizes, implementation)
    sizes = sizes or chosen_sizes(tokens, implementation)
    sizes, *arguments = prepared(tokens, starts, state, sizes, RowPieces(method, 0).per_row)
    return _rule_of_pieces(sizes, method, *arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rule_of_pieces(sizes: ChunkSizes, method: Method, tokens: Tokens, starts: jax.Array, state: jax.Array):
    return _forward(sizes, method, tokens, starts, state)[0]


def _forward(sizes, method, tokens, starts, state):
    own = map_of(sizes, tokens, starts)
    before, after = states_between(sizes, method, own, state)
    (out, _), saved = rule_forward(sizes, tokens, starts, before)
    return (out, after), (saved, own.M)


def _backward(sizes, method, saved, cotangents):
    saved, M = saved
    d_out, d_state = cotangents
    own = Affine(M.swapaxes(-1, -2) if sizes.corrects else M, _gradient_of_state(sizes, saved, d_out))
    d_after, d_state = states_between(sizes, method, own, d_state, reverse=True)
    d_tokens, _, _ = rule_backward(sizes, saved, (d_out, d_after))
    return d_tokens, None, d_state


_rule_of_pieces.defvjp(_forward, _backward)


def map_of(sizes: ChunkSizes, tokens: Tokens, starts: jax.Array) -> Affine:
    """Returns the map of the state by all tokens of each row."""
    if sizes.kernel:
        return _map_by_kernels(sizes, tokens, starts)
    B, _, K, r, v = tokens.v.shape
    k = tokens.k.shape[-1]
    columns = k if sizes.corrects else 1  # of M

    def chunk(h, own: Affine):
        to_the_right = [(0, 0)] * 4 + [(columns, 0)]
        return mapped(sizes, Affine(own.M, jnp.pad(own.B, to_the_right)), h), None

    def group(h, x):
        states, _ = chunk_maps(sizes, *x)
        of_chunks = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), states)
        return jax.lax.scan(chunk, h, of_chunks, unroll=True)[0], None

    groups = all_in_groups(sizes, tokens, starts)
    wide = jnp.promote_types(tokens.v.dtype, jnp.float32)
    one = jnp.eye(k, dtype=wide) if sizes.corrects else jnp.ones((k, 1), wide)
    begin = jnp.broadcast_to(jnp.pad(one, [(0, 0), (0, v)]), (B, K, r, k, columns + v))
    h, _ = jax.lax.scan(group, mark_varying(begin, varying_axes(tokens.v)), groups)
    return Affine(h[..., :columns], h[..., columns:])


def _map_by_kernels(sizes: ChunkSizes, tokens: Tokens, starts: jax.Array) -> Affine:
    """M is what becomes of each unit vector if tokens have no values; B is what they write if there is no state."""
    B, T, K, r, v = tokens.v.shape
    k = tokens.k.shape[-1]
    wide = jnp.promote_types(tokens.v.dtype, jnp.float32)
    axes = varying_axes(tokens.v)
    eye = mark_varying(jnp.broadcast_to(jnp.eye(k, dtype=wide), (B, K, r, k, k)), axes)
    no_values = tokens._replace(v=mark_varying(jnp.zeros((B, T, K, r, k), tokens.v.dtype), axes))
    (_, M), _ = rule_forward(sizes, no_values, starts, eye)
    (_, written), _ = rule_forward(sizes, tokens, starts, mark_varying(jnp.zeros((B, K, r, k, v), wide), axes))
    return Affine(M, written)


def states_between(
    sizes: ChunkSizes, method: Method, own: Affine, state: jax.Array, *, reverse: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns (the state before each of this device's pieces, the state after all pieces). own: maps of its pieces.

    state: before all pieces. reverse: from the last piece to the first one.
    """
    pieces = RowPieces(method, 0)
    columns = own.M.shape[-1]

    def step(h, both):
        return mapped(sizes, Affine(both[..., :columns], both[..., columns:]), h), h

    of_all = pieces.by_text(jnp.concatenate(own, axis=-1))  # one collective
    after, before = jax.lax.scan(step, state, of_all, reverse=reverse)
    return pieces.own(before), after


def _gradient_of_state(sizes: ChunkSizes, saved, d_out: jax.Array) -> jax.Array:
    """Returns the gradient of the state before each row, of the outputs alone. saved: of `rule_forward`."""
    tokens, starts, before = saved

    def step(d_state, group):
        tokens, starts, state, d_out = group
        _, vjp = jax.vjp(lambda state: group_forward(sizes, tokens, starts, state), state)
        return vjp((d_out, d_state))[0], None

    groups = (*all_in_groups(sizes, tokens, starts), before, gradients_in_groups(sizes, d_out, tokens))
    return jax.lax.scan(step, jnp.zeros_like(before[0]), groups, reverse=True)[0]
