"""The gated delta rule in chunks, with the state on chip (Yang et al. 2024, arXiv:2412.06464), forward and backward.

A head has a state h [k, v]. A token decays it, and writes the part of its value that the state lacks under its key:

    h <- e^g h;   h <- h + beta k (v - k^T h)^T;   o = q^T h

A chunk of C tokens, whose state before it is h, with D the gradient of the state after it:

    forward    S = tril(beta K K^T * pair, -1);  A = (I + S)^-1;  P = Q K^T * pair
               Y = beta (V - enter K h);  V' = A Y;  O = enter Q h + P V';  h <- through h + (leave K)^T V'
    backward   dV' = leave K D + P^T dO;  dY = A^T dV';  D <- through D + (enter Q)^T dO - (beta enter K)^T dY

`pair` is the decay from token j to i, `enter` that from the chunk's start to i, `leave` that from j to the chunk's end,
`through` that of the whole chunk. A border between documents makes these four 0; nothing else depends on it.

    matrices     A and P of all chunks at once
    forward      O, chunk after chunk: a program has some columns of the values of one head, and their state
    states       the same without O, for the backward pass: the state before each chunk, and V'
    reverse      D after each chunk, and dY, chunk after chunk from the last
    gradients    the gradients of all inputs, of all chunks at once

The backward pass keeps the inputs, A and P, and its working memory grows with the tokens. So the caller computes long
rows in parts that hand on the state, and computes them again for their backward pass, for which XLA drops `forward`.
Vectors of the tokens (decays, lengths of queries and keys) are made by XLA.

Dtypes: state, decays, inverse and sums in float32; products of 16-bit operands, tf32 within the inverse. A, P, V', dY
and the states of the backward pass are stored in the dtype of v. In the interpreter all may be float32 or float64.

The kernels are written in Pallas' Triton backend, which multiplies in tf32 and serves every GPU since sm_80 by one
source; Pallas' Mosaic has no tf32 there. JAX has announced its removal: without it the caller's own form runs.

Shape suffixes: B batch, T tokens, N chunks, C (also i, j) tokens of a chunk, K key heads, r value heads of a key head,
V = K r value heads, k channels of a key, v channels of a value.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, gated_delta_kernels as kernels, triton
from pallas_kernels.dispatch import Implementation, expect
from pallas_kernels.gated_delta_blocks import DeltaCall, Tokens
from pallas_kernels.gated_delta_kernels import EPS, FLOOR
from pallas_kernels.shapes import Case, Sizes

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

f32 = jnp.float32
CHUNK = 64  # tokens: A and P take 2 C numbers of each, the states 2 k v / C
CHANNELS = (16, 32, 64, 128)  # channels of a head that the kernels take: Triton's tiles have powers of two
HALF = (jnp.bfloat16, jnp.float16)


def fits(dtype, key: int, value: int) -> bool:
    """True if the kernels take heads of this dtype, with so many channels of keys and values."""
    return triton.AVAILABLE and jnp.dtype(dtype) in HALF and key in CHANNELS and value in CHANNELS


def serves(dtype, key: int, value: int, implementation: Implementation) -> bool:
    """True if the kernels run for such heads on the program's device. Raises Unserved if they cannot but must."""
    expected = f"expected 16-bit heads of {', '.join(map(str, CHANNELS))} channels"
    got = f"{jnp.dtype(dtype).name} of {key}, values of {value}"
    return dispatch.runs_kernel("gated_delta", implementation, fits(dtype, key, value), expected, got)


# --- reference --------------------------------------------------------------------------------------------------------


def unit_length(x: jax.Array) -> jax.Array:
    """Divides the last dimension by its length."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS)


def reference(tokens: Tokens, starts: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The recurrence, a token at a time; its backward pass saves a state for each CHUNK tokens."""
    T = tokens.q.shape[1]
    wide = state.dtype
    q, k, v, g, beta = (x.astype(wide) for x in tokens)
    q, k = unit_length(q) * q.shape[-1] ** -0.5, unit_length(k)
    is_first = jnp.broadcast_to(starts == jnp.arange(T)[None], q.shape[:2])

    def token(h, x):
        q, k, v, g, beta, is_first = x
        h = jnp.where(is_first[:, None, None, None, None], 0, h) * jnp.exp(g)[..., None, None]
        new = beta[..., None] * (v - jnp.einsum("bKk,bKrkv->bKrv", k, h))
        h = h + jnp.einsum("bKk,bKrv->bKrkv", k, new)
        return h, jnp.einsum("bKk,bKrkv->bKrv", q, h)

    @jax.checkpoint
    def chunk(h, xs):
        return jax.lax.scan(token, h, xs)

    whole = T - T % CHUNK
    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, g, beta, is_first))
    chunks = jax.tree.map(lambda x: x[:whole].reshape(-1, CHUNK, *x.shape[1:]), by_token)
    state, out = jax.lax.scan(chunk, state, chunks)
    state, rest = jax.lax.scan(token, state, jax.tree.map(lambda x: x[whole:], by_token))
    out = jnp.concatenate([out.reshape(whole, *rest.shape[1:]), rest])
    return jnp.moveaxis(out, 0, 1).astype(tokens.v.dtype), state


# --- public -----------------------------------------------------------------------------------------------------------


def gated_delta(
    tokens: Tokens,
    starts: Int[Array, "B T"],
    state: Float[Array, "B K r k v"],
    *,
    implementation: Implementation = None,
    interpret: bool = False,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B T K r v"], Float[Array, "B K r k v"]]:
    """Returns (outputs in the dtype of v, the state after the last token), differentiable in tokens and state.

    Queries and keys are divided by their lengths, and queries also by sqrt(k). starts: int32 `[B, T]` or `[1, T]`, the
    index among these tokens at which each token's document starts, negative if before them. state: before the first
    token, float32. chunk: a power of 2. Raises ValueError for
    other shapes, and dispatch.Unserved if implementation="mosaic" and the kernels do not take the heads, see `fits`.
    """
    _check("gated_delta", tokens, starts, state)
    by_kernel = interpret and implementation == "mosaic"  # the interpreter takes any heads
    if not (by_kernel or serves(tokens.v.dtype, tokens.k.shape[-1], tokens.v.shape[-1], implementation)):
        return reference(tokens, starts, state)
    T = tokens.q.shape[1]
    more = -T % chunk
    padded = jax.tree.map(lambda x: _padded(x, more), tokens)  # zeros write nothing and decay nothing
    out, after = _gated_delta(chunk, interpret, padded, _padded(starts, more, "edge"), state)
    return out[:, :T], after


def _padded(x, more: int, mode: Any = "constant"):
    """x with more tokens at the end."""
    return jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2), mode) if more else x


def _check(op: str, tokens: Tokens, starts, state) -> None:
    """Raises ValueError for wrong shapes."""
    expect(tokens.v.ndim == 5 and tokens.v.size > 0, op, "v", "[B, T, K, r, v], not empty", tokens.v.shape)
    B, T, K, r, v = tokens.v.shape
    k = tokens.k.shape[-1]
    for name, shape in (("q", (B, T, K, k)), ("k", (B, T, K, k)), ("g", (B, T, K, r)), ("beta", (B, T, K, r))):
        got = getattr(tokens, name).shape
        expect(got == shape, op, name, shape, got)
    expect(starts.shape in ((B, T), (1, T)), op, "starts", (B, T), starts.shape)
    expect(state.shape == (B, K, r, k, v), op, "state", (B, K, r, k, v), state.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated_delta(chunk: int, interpret: bool, tokens: Tokens, starts, state):
    return _fwd(chunk, interpret, tokens, starts, state)[0]


def _fwd(chunk: int, interpret: bool, tokens: Tokens, starts, state):
    x = kernels.vectors(tokens, starts, chunk, state.dtype)
    s = DeltaCall.of(tokens, chunk, state.dtype, interpret)
    A, P = kernels.chunk_matrices(tokens, x, s)
    out, after = kernels.forward(tokens, x, A, P, state.reshape(s.state.shape), s)
    return (out.reshape(tokens.v.shape), after.reshape(state.shape)), (tokens, x, A, P, state)


def _bwd(chunk: int, interpret: bool, saved, cotangents):
    tokens, x, A, P, state = saved
    s = DeltaCall.of(tokens, chunk, state.dtype, interpret)
    d_out, d_after = cotangents[0].reshape(s.values.shape), cotangents[1].reshape(s.state.shape)
    states, new = kernels.states(tokens, x, A, state.reshape(s.state.shape), s)
    D, dy, d_state = kernels.reverse(tokens, x, A, P, d_out, d_after, s)
    dq, dk, dv, dG, d_beta = kernels.gradients(tokens, x, states, new, D, dy, d_out, s)
    dg = jax.lax.cumsum(dG.reshape(s.B, s.V, s.N, s.C), axis=3, reverse=True).reshape(dG.shape)
    dg, d_beta = (jnp.moveaxis(y, -1, 1).reshape(tokens.g.shape) for y in (dg, d_beta))
    dg = jnp.where(tokens.g > FLOOR, dg, 0)
    d_tokens = Tokens(dq, dk, dv.reshape(tokens.v.shape), dg, d_beta)
    d_tokens = jax.tree.map(lambda dx, x: dx.astype(x.dtype), d_tokens, tokens)
    return d_tokens, None, d_state.reshape(state.shape)


_gated_delta.defvjp(_fwd, _bwd)


# --- cases ------------------------------------------------------------------------------------------------------------


def cases(sizes: Sizes, tokens: int) -> list[Case]:
    """The rule and its gradients at a model's width: value heads of 128, half as many key heads, four documents."""
    of_values = max(2, sizes.hidden // 128)
    K, r, k, T = of_values // 2, 2, 128, tokens
    half, single = (functools.partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.bfloat16, f32))
    q, v, g, state = half((1, T, K, k)), half((1, T, K, r, k)), single((1, T, K, r)), single((1, K, r, k, k))
    place = jnp.arange(T, dtype=jnp.int32)[None]

    def in_16_bits(results):  # as the operands of the kernels' products are
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), results)

    def rule(q, k, v, g, beta, state, **how):
        one = Tokens(q, k, v, -jax.nn.softplus(g), jax.nn.sigmoid(beta))
        starts = place - place % max(1, T // 4)
        return in_16_bits(gated_delta(one, starts, state, **how))

    def gradients(q, k, v, g, beta, state, d_out, **how):
        (_, after), vjp = jax.vjp(functools.partial(rule, **how), q, k, v, g, beta, state)
        return in_16_bits(vjp((d_out, jnp.zeros_like(after))))

    inputs = q, q, v, g, g, state
    of_inputs = sum(x.size * x.dtype.itemsize for x in inputs)
    out = 2 * v.size
    return [
        Case("forward", rule, inputs, of_inputs + out + 2 * state.size),
        Case("gradients", gradients, (*inputs, v), of_inputs + out + 2 * sum(x.size for x in inputs)),
    ]
