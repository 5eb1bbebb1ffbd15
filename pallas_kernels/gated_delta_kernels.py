"""The kernels of gated_delta_chunks.py, and the vectors that they read.

Shape suffixes: see gated_delta_chunks.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gated_delta_blocks import COLUMNS, DeltaCall, Tokens

EPS = 1e-6  # added to the squared lengths of queries and keys
FLOOR = -30.0  # least g: e^-30 is nothing, and sums of lower numbers would lose the digits of weak decays after them


# --- vectors ----------------------------------------------------------------------------------------------------------


class Vectors(NamedTuple):
    """Numbers of the tokens `[B, V, T]`, of tokens of key heads `[B, K, T]`, and of chunks `[B, V, N]`.

    sum: of g since the chunk's start. enter_q, enter_k, leave_k: the decays `enter` and `leave`, divided by the length
    of the query or key that they are multiplied with. of_query, of_key: what a query and a key are multiplied by.
    starts: `[B or 1, T]`, of documents, from each chunk's first token.
    """

    sum: jax.Array
    beta: jax.Array
    enter_q: jax.Array
    enter_k: jax.Array
    leave_k: jax.Array
    through: jax.Array
    of_query: jax.Array
    of_key: jax.Array
    starts: jax.Array


def vectors(tokens: Tokens, starts_BT: jax.Array, C: int, wide) -> Vectors:
    """Computes the `Vectors`."""
    B, T, K, r, _ = tokens.v.shape
    q, k, g, beta = (x.astype(wide) for x in (tokens.q, tokens.k, tokens.g, tokens.beta))
    of_query, of_key = (jnp.moveaxis(jax.lax.rsqrt(jnp.sum(x * x, axis=-1) + EPS), 1, -1) for x in (q, k))
    of_query = of_query * q.shape[-1] ** -0.5
    chunks = (B, K, r, T // C, C)
    g_BKrNC, beta_BKrNC = (jnp.moveaxis(x, 1, -1).reshape(chunks) for x in (g, beta))
    G = jnp.cumsum(jnp.maximum(g_BKrNC, FLOOR), axis=-1)
    first = C * jnp.arange(T // C, dtype=starts_BT.dtype)
    own = starts_BT.reshape(len(starts_BT), 1, 1, -1, C) - first[None, None, None, :, None]
    last = own[..., -1:]
    token = jnp.arange(C, dtype=starts_BT.dtype)[None, None, None, None]

    enter = jnp.where(own < 0, jnp.exp(G), 0)
    leave = jnp.where(token >= last, jnp.exp(G[..., -1:] - G), 0)
    through = jnp.where(last < 0, jnp.exp(G[..., -1:]), 0)
    length_q, length_k = (x.reshape(B, K, 1, -1, C) for x in (of_query, of_key))
    return Vectors(
        sum=G.reshape(B, K * r, T),
        beta=beta_BKrNC.reshape(B, K * r, T),
        enter_q=(enter * length_q).reshape(B, K * r, T),
        enter_k=(enter * length_k).reshape(B, K * r, T),
        leave_k=(leave * length_k).reshape(B, K * r, T),
        through=through.reshape(B, K * r, -1),
        of_query=of_query,
        of_key=of_key,
        starts=own.reshape(len(starts_BT), T),
    )


# --- kernels ----------------------------------------------------------------------------------------------------------


def seen_pairs(starts, C: int):
    """(pairs [i, j] of a chunk of which i sees j, rows, columns)."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))
    return (row >= column) & (column >= starts[:, None]), row, column


def decay_of_pairs(G, seen) -> jax.Array:
    """The decays from token j to i of a chunk, 0 if i does not see j: exp's overflow there has no gradient."""
    return jnp.where(seen, jnp.exp(G[:, None] - G[None, :]), 0)


def inverse_of_chunk(S, row, column, s: DeltaCall) -> jax.Array:
    """(I + S)^-1 of a strictly lower triangular S, by blocks: [[X, 0], [-Y S X, Y]] of the halves' inverses X and Y.

    All blocks of a size at once, by products of whole matrices.
    """

    def below(bits):  # of the diagonal's blocks of 2^bits
        return jnp.where((row >> bits == (column >> bits) + 1) & ((column >> bits) & 1 == 0), S, 0)

    X = jnp.where(row == column, 1, -below(0)).astype(s.wide)
    for bits in range(1, s.C.bit_length() - 1):
        X = X - s.wide_dot(X, s.wide_dot(below(bits), X))
    return X


def chunk_matrices(tokens: Tokens, x: Vectors, s: DeltaCall) -> tuple[jax.Array, ...]:
    """Returns (A, P) of all chunks, both `[B, V, T, C]`."""

    def kernel(q_ref, k_ref, G_ref, beta_ref, of_query_ref, of_key_ref, starts_ref, A_ref, P_ref):
        k, of_key = k_ref[...], of_key_ref[...]
        KK = s.dot(k, k.T) * of_key[:, None] * of_key[None, :]
        QK = s.dot(q_ref[...], k.T) * of_query_ref[...][:, None] * of_key[None, :]
        seen, row, column = seen_pairs(starts_ref[...], s.C)

        def head(j, _):
            pair = decay_of_pairs(G_ref[j], seen)
            S = jnp.where(row > column, beta_ref[j][:, None] * KK * pair, 0)
            A_ref[j] = inverse_of_chunk(S, row, column, s).astype(s.dtype)
            P_ref[j] = (QK * pair).astype(s.dtype)

        jax.lax.fori_loop(0, s.r, head, None)

    operands = [
        (tokens.q, s.keys_of_chunk), (tokens.k, s.keys_of_chunk),
        (x.sum, s.vector_of_chunk), (x.beta, s.vector_of_chunk),
        (x.of_query, s.key_vector_of_chunk), (x.of_key, s.key_vector_of_chunk),
        (x.starts, s.starts_of_chunk(len(x.starts))),
    ]  # fmt: skip
    results = [(s.squares, s.square_of_chunk)] * 2
    flops = 4 * s.C * s.k // s.r + 4 * s.C * s.C * (s.C.bit_length() - 2)
    return s.at_once(kernel, "matrices", operands, results, 4, flops)


def forward(tokens: Tokens, x: Vectors, A, P, state, s: DeltaCall) -> tuple[jax.Array, ...]:
    """Returns (O `[B, T, V, v]`, the state after the last token `[B, V, k, v]`)."""

    def kernel(
        q_ref, k_ref, v_ref, A_ref, P_ref, beta_ref, enter_q_ref, enter_k_ref, leave_ref, through_ref, state_ref,
        o_ref, after_ref,
    ):  # fmt: skip
        def step(n, h):
            at = pl.ds(n * s.C, s.C)
            k, before = k_ref[at], h.astype(s.dtype)
            Y = beta_ref[at][:, None] * (v_ref[at] - enter_k_ref[at][:, None] * s.dot(k, before))
            new = s.dot(A_ref[at], Y)
            o = enter_q_ref[at][:, None] * s.dot(q_ref[at], before) + s.dot(P_ref[at], new)
            o_ref[at] = o.astype(s.dtype)
            return through_ref[n] * h + s.dot(k.T, leave_ref[at][:, None] * new)

        after_ref[...] = jax.lax.fori_loop(0, s.N, step, state_ref[...])

    operands = [
        (tokens.q, s.all_keys), (tokens.k, s.all_keys), (tokens.v.reshape(s.values.shape), s.all_values),
        (A, s.all_squares), (P, s.all_squares),
        (x.beta, s.all_numbers), (x.enter_q, s.all_numbers), (x.enter_k, s.all_numbers), (x.leave_k, s.all_numbers),
        (x.through, s.all_chunks), (state, s.one_state),
    ]  # fmt: skip
    results = [(s.values, s.all_values), (s.state, s.one_state)]
    return s.in_order(kernel, "forward", operands, results, 6 * s.k * s.v + 4 * s.C * s.v)


def states(tokens: Tokens, x: Vectors, A, state, s: DeltaCall) -> tuple[jax.Array, ...]:
    """Returns (the state before each chunk `[B, V, N, k, v]`, V' `[B, T, V, v]`)."""

    def kernel(k_ref, v_ref, A_ref, beta_ref, enter_ref, leave_ref, through_ref, state_ref, states_ref, new_ref):
        def step(n, h):
            at = pl.ds(n * s.C, s.C)
            k, before = k_ref[at], h.astype(s.dtype)
            states_ref[n] = before
            Y = beta_ref[at][:, None] * (v_ref[at] - enter_ref[at][:, None] * s.dot(k, before))
            new = s.dot(A_ref[at], Y)
            new_ref[at] = new.astype(s.dtype)
            return through_ref[n] * h + s.dot(k.T, leave_ref[at][:, None] * new)

        jax.lax.fori_loop(0, s.N, step, state_ref[...])

    operands = [
        (tokens.k, s.all_keys), (tokens.v.reshape(s.values.shape), s.all_values), (A, s.all_squares),
        (x.beta, s.all_numbers), (x.enter_k, s.all_numbers), (x.leave_k, s.all_numbers),
        (x.through, s.all_chunks), (state, s.one_state),
    ]  # fmt: skip
    results = [(s.states, s.all_states), (s.values, s.all_values)]
    return s.in_order(kernel, "states", operands, results, 4 * s.k * s.v + 2 * s.C * s.v)


def reverse(tokens: Tokens, x: Vectors, A, P, d_out, d_after, s: DeltaCall) -> tuple[jax.Array, ...]:
    """Returns (D after each chunk `[B, V, N, k, v]`, dY `[B, T, V, v]`, the gradient of the first state)."""

    def kernel(
        q_ref, k_ref, do_ref, A_ref, P_ref, beta_ref, enter_q_ref, enter_k_ref, leave_ref, through_ref, d_after_ref,
        D_ref, dy_ref, d_state_ref,
    ):  # fmt: skip
        def step(i, D):
            n = s.N - 1 - i
            at = pl.ds(n * s.C, s.C)
            k, do, after = k_ref[at], do_ref[at], D.astype(s.dtype)
            D_ref[n] = after
            d_new = leave_ref[at][:, None] * s.dot(k, after) + s.dot(P_ref[at].T, do)
            dy = s.dot(A_ref[at].T, d_new)
            dy_ref[at] = dy.astype(s.dtype)
            D = through_ref[n] * D + s.dot(q_ref[at].T, enter_q_ref[at][:, None] * do)
            return D - s.dot(k.T, (beta_ref[at] * enter_k_ref[at])[:, None] * dy)

        d_state_ref[...] = jax.lax.fori_loop(0, s.N, step, d_after_ref[...])

    operands = [
        (tokens.q, s.all_keys), (tokens.k, s.all_keys), (d_out, s.all_values), (A, s.all_squares), (P, s.all_squares),
        (x.beta, s.all_numbers), (x.enter_q, s.all_numbers), (x.enter_k, s.all_numbers), (x.leave_k, s.all_numbers),
        (x.through, s.all_chunks), (d_after, s.one_state),
    ]  # fmt: skip
    results = [(s.states, s.all_states), (s.values, s.all_values), (s.state, s.one_state)]
    return s.in_order(kernel, "reverse", operands, results, 6 * s.k * s.v + 4 * s.C * s.v)


def gradients(tokens: Tokens, x: Vectors, states, new, D, dy, d_out, s: DeltaCall) -> tuple[jax.Array, ...]:
    """Returns the gradients of (q, k, v `[B, T, V, v]`, sums of g `[B, V, T]`, beta `[B, V, T]`)."""

    def along(x, y):  # products of the rows of two matrices
        return jnp.sum(x.astype(s.wide) * y, axis=1)

    def kernel(
        q_ref, k_ref, v_ref, do_ref, new_ref, dy_ref, h_ref, D_ref, G_ref, beta_ref, enter_q_ref, enter_k_ref,
        leave_ref, through_ref, of_query_ref, of_key_ref, starts_ref, dq_ref, dk_ref, dv_ref, dG_ref, d_beta_ref,
    ):  # fmt: skip
        of_query, of_key = of_query_ref[...], of_key_ref[...]
        seen, row, column = seen_pairs(starts_ref[...], s.C)
        width = math.gcd(s.v, COLUMNS)
        parts = [pl.ds(start, width) for start in range(0, s.v, width)]  # fewer numbers in registers at a time

        def head(j, carry):
            dq, dk = carry
            beta = beta_ref[j]
            pair = decay_of_pairs(G_ref[j], seen) * of_key[None, :]

            def with_values(x_ref, y_ref):  # [C, C]
                return sum(s.dot(x_ref[:, j, at], y_ref[:, j, at].T) for at in parts)

            def with_state(x_ref, h_ref):  # [C, k]
                return sum(s.dot(x_ref[:, j, at], h_ref[j, :, at].T) for at in parts)

            # Queries read the state and the values of the pairs.
            d_pair = of_query[:, None] * pair * with_values(do_ref, new_ref)
            of_q = enter_q_ref[j][:, None] * with_state(do_ref, h_ref) + s.dot(d_pair, k_ref[...])
            dG = along(q_ref[...], of_q)
            # Keys are rows of S and read the state: beta times `of_row`.
            d_square = jnp.where(row > column, -of_key[:, None] * pair * with_values(dy_ref, new_ref), 0)
            of_row = s.dot(d_square, k_ref[...]) - enter_k_ref[j][:, None] * with_state(dy_ref, h_ref)
            of_beta = along(k_ref[...], of_row)
            d_beta_ref[j] = of_beta + sum(along(dy_ref[:, j, at], v_ref[:, j, at]) for at in parts)
            for at in parts:
                dv_ref[:, j, at] = (beta[:, None] * dy_ref[:, j, at]).astype(s.dtype)
            dG = dG + beta * of_beta
            # Keys are columns of S and P and write to the state.
            leaving = leave_ref[j][:, None] * with_state(new_ref, D_ref)
            of_column = s.dot((beta[:, None] * d_square).T, k_ref[...]) + s.dot(d_pair.T, q_ref[...]) + leaving
            decayed = through_ref[j] * sum(jnp.sum(along(h_ref[j, :, at], D_ref[j, :, at])) for at in parts)
            last = jnp.sum(along(k_ref[...], leaving)) + decayed
            is_last = jax.lax.iota(jnp.int32, s.C) == s.C - 1
            dG_ref[j] = dG - along(k_ref[...], of_column) + jnp.where(is_last, last, 0)
            return dq + of_q, dk + beta[:, None] * of_row + of_column

        zero = jnp.zeros((s.C, s.k), s.wide)
        dq, dk = jax.lax.fori_loop(0, s.r, head, (zero, zero))
        of_unit = of_query * of_query * s.k
        for ref, x_ref, dx, square in ((dq_ref, q_ref, dq, of_unit), (dk_ref, k_ref, dk, of_key * of_key)):
            x = x_ref[...]
            ref[...] = (dx - (square * along(dx, x))[:, None] * x).astype(s.dtype)

    of_values = [tokens.v.reshape(s.values.shape), d_out, new, dy]
    operands = [
        (tokens.q, s.keys_of_chunk), (tokens.k, s.keys_of_chunk), *((y, s.values_of_chunk) for y in of_values),
        (states, s.states_of_chunk), (D, s.states_of_chunk),
        *((y, s.vector_of_chunk) for y in (x.sum, x.beta, x.enter_q, x.enter_k, x.leave_k)),
        (x.through, s.number_of_chunk), (x.of_query, s.key_vector_of_chunk), (x.of_key, s.key_vector_of_chunk),
        (x.starts, s.starts_of_chunk(len(x.starts))),
    ]  # fmt: skip
    keys = jax.ShapeDtypeStruct(tokens.k.shape, s.dtype)
    numbers = jax.ShapeDtypeStruct((s.B, s.V, s.T), s.wide)
    results = [
        (keys, s.keys_of_chunk), (keys, s.keys_of_chunk), (s.values, s.values_of_chunk),
        (numbers, s.vector_of_chunk), (numbers, s.vector_of_chunk),
    ]  # fmt: skip
    flops = 6 * s.k * s.v + 4 * s.C * s.v + 8 * s.C * s.k
    return s.at_once(kernel, "gradients", operands, results, 8, flops)
