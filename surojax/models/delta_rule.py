"""The gated delta rule, chunk by chunk (Yang et al. 2024, arXiv:2412.06464): the recurrence of Qwen3.5 and Qwen3-Next.

A head has a state h [k, v], in float32 at least. A token decays it, and writes what it does not yet say of its key:

    h <- e^g h;   h <- h + beta k (v - k^T h)^T;   o = q^T h

A chunk of C tokens is an affine map of the state, h' = M h + B, and so are its outputs, O = R h + O0:

    S = tril(beta K K^T * pair, -1);  [U | W] = (I + S)^-1 [beta V | beta enter K]
    B = (leave K)^T U;  M = through I - (leave K)^T W;  O0 = (Q K^T * pair) U;  R = enter Q - (Q K^T * pair) W

`pair` is the decay from token j to i, `enter` that from the chunk's start to i, `leave` that from j to the chunk's end,
`through` that of the whole chunk. A border between documents makes these four 0, and nothing else knows of it: neither
a state nor a gradient crosses one.

Without the correction it is the recurrence of Mamba2 (Dao and Gu 2024, arXiv:2405.21060), h <- e^g h + beta k v^T: keys
and queries have any length, W = 0 and U = beta V. There is no inverse, and M is a number.

A group of chunks is computed at once, then its states one after another. The backward pass keeps the inputs and the
state before each group, and computes a group's maps again. On GPUs pallas_kernels/gated_delta_chunks.py computes larger
groups, if the setting `kernels` says so: without maps, whose bytes take most of the time.

Shape suffixes: B batch, T tokens, G groups, N chunks of a group, C (also i, j) tokens of a chunk, K key heads, r value
heads of a key head, k channels of a key, v channels of a value.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, gated_delta_chunks
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_delta_chunks import FLOOR, Tokens, unit_length
from pallas_kernels.manual_axes import mark_varying, varying_axes
from surojax.models.kinds.sublayer import MovedBytes

CHUNK, CHUNKS = 128, 16
LONG_AGO = -(2**30)  # start of a document that began before these tokens
SMALL = 16  # tokens of a block whose inverse is made of whole matrices: fewer and larger kernels than of parts
KERNEL_CHUNKS = 128  # at most, of a group by the kernels: more save fewer states, and take more memory


class ChunkSizes(NamedTuple):
    """How the rule is computed.

    chunk: tokens of one, a power of 2. chunks: of a group. tf32: products read 10 bits of a mantissa. kernel: groups
    are computed by pallas_kernels/gated_delta_chunks.py, which has precisions of its own. interpret: in Pallas'
    interpreter. corrects: False: tokens write their values without the correction (Mamba2).
    """

    chunk: int = CHUNK
    chunks: int = CHUNKS
    tf32: bool = False
    kernel: bool = False
    interpret: bool = False
    corrects: bool = True

    @property
    def precision(self) -> Any:
        """The precision of the products."""
        return jax.lax.DotAlgorithmPreset.TF32_TF32_F32 if self.tf32 else jax.lax.Precision.HIGHEST


def moved_bytes(size: int, tokens: int, forward: int, backward: int) -> MovedBytes:
    """Returns the bytes that XLA's kernels read and write: `forward` and `backward` times `size`.

    tokens: of a row. backward: with the computation of a group's maps. Nothing is moved again for a recomputed block
    whose rows are one group: XLA computes its maps once for both.
    """
    return MovedBytes(forward * size, forward * size * (tokens > CHUNK * CHUNKS), backward * size)


class Affine(NamedTuple):
    """The map h -> M h + B. Without the correction M is one number for all channels `[..., 1, 1]`, or `[..., k, 1]`."""

    M: jax.Array
    B: jax.Array


def gated_delta_rule(
    tokens: Tokens,
    starts: jax.Array | None = None,
    state: jax.Array | None = None,
    sizes: ChunkSizes | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (outputs `[B, T, K, r, v]`, state after the last token `[B, K, r, k, v]`), in float32 at least.

    Queries and keys are divided by their lengths, and queries also by sqrt(k), if `sizes.corrects`.
    starts: int32 `[B, T]` or `[1, T]`, index among these tokens at which each token's document starts, negative if
    before them; None: all go on from `state`. state: before the first token; None: zeros. sizes: None: chosen here, by
    `implementation` among others: see pallas_kernels/dispatch.py.
    """
    return _rule(*prepared(tokens, starts, state, sizes or chosen_sizes(tokens, implementation)))


def chosen_sizes(tokens: Tokens, implementation: Implementation, *, corrects: bool = True) -> ChunkSizes:
    """The sizes for these tokens. Raises Unserved if the kernels were asked for and do not take the heads.

    corrects: see `ChunkSizes`; the kernels compute the rule with the correction alone.
    """
    T, key, value = tokens.v.shape[1], tokens.k.shape[-1], tokens.v.shape[-1]
    C = gated_delta_chunks.CHUNK
    if corrects and T >= C and gated_delta_chunks.serves(tokens.v.dtype, key, value, implementation):
        groups = -(-T // (C * KERNEL_CHUNKS))  # of equal size, so that little is added to the last one
        return ChunkSizes(C, -(-T // (C * groups)), kernel=True)
    tf32 = tokens.v.dtype.itemsize == 2 and dispatch.choose("delta_rule", None) == "mosaic"
    return ChunkSizes(min(CHUNK, 1 << (T - 1).bit_length()), CHUNKS, tf32, corrects=corrects)


def prepared(
    tokens: Tokens,
    starts: jax.Array | None,
    state: jax.Array | None,
    sizes: ChunkSizes,
    pieces: int = 1,
) -> tuple[ChunkSizes, Tokens, jax.Array, jax.Array]:
    """Fills in the arguments of `gated_delta_rule` that are None. pieces: rows of tokens for each row of the state."""
    B, T, K, r, v = tokens.v.shape
    wide = jnp.promote_types(tokens.v.dtype, jnp.float32)
    starts = jnp.full((1, T), LONG_AGO, jnp.int32) if starts is None else starts
    before = jnp.zeros((B // pieces, K, r, tokens.k.shape[-1], v), wide) if state is None else state
    axes = frozenset().union(*map(varying_axes, (*tokens, starts, before)))
    tokens, before = jax.tree.map(lambda x: mark_varying(x, axes), (tokens, before))
    return sizes, tokens, starts, before


# --- (I + S)^-1 -------------------------------------------------------------------------------------------------------


def inverse(S: jax.Array, precision: Any) -> jax.Array:
    """Computes (I + tril(S, -1))^-1 `[..., C, C]` by blocks: [[X, 0], [-Y S X, Y]] of the halves' inverses X and Y.

    The series (I - S)(I + S^2)(I + S^4)... has terms beyond float32 where the inverse has entries of at most 1.
    """
    times = functools.partial(jnp.einsum, "...ij,...jl->...il", precision=precision)
    C = S.shape[-1]
    if C > SMALL:
        h = C // 2
        halves = inverse(jnp.stack([S[..., :h, :h], S[..., h:, h:]]), precision)  # both at once
        lower = -times(halves[1], times(S[..., h:, :h], halves[0]))
        upper = jnp.concatenate([halves[0], jnp.zeros_like(lower)], axis=-1)
        return jnp.concatenate([upper, jnp.concatenate([lower, halves[1]], axis=-1)], axis=-2)
    row, column = jnp.arange(C)[:, None], jnp.arange(C)[None]
    X = jnp.broadcast_to(jnp.eye(C, dtype=S.dtype), S.shape)
    size = 1
    while size < C:
        is_below = (row // size == column // size + 1) & (column // size % 2 == 0)
        below = jnp.where(jnp.expand_dims(is_below, tuple(range(S.ndim - 2))), S, 0)
        X = X - times(X, times(below, X))
        size *= 2
    return X


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def solved(S: jax.Array, x: jax.Array, precision: Any) -> jax.Array:
    """Returns (I + tril(S, -1))^-1 x, whose backward pass reads the inverse and the result."""
    return _solved_forward(S, x, precision)[0]


def _solved_forward(S, x, precision):
    A = inverse(S, precision)
    y = jnp.einsum("...ij,...jx->...ix", A, x, precision=precision)
    return y, (A, y)


def _solved_backward(precision, saved, dy):
    A, y = saved
    dx = jnp.einsum("...ij,...ix->...jx", A, dy, precision=precision)
    return -jnp.tril(jnp.einsum("...ix,...jx->...ij", dx, y, precision=precision), -1), dx


solved.defvjp(_solved_forward, _solved_backward)


# --- a group of chunks ------------------------------------------------------------------------------------------------


def decays(g_BNKrC: jax.Array, starts_BNC: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns (pair `[..., i, j]`, enter `[..., i]`, leave `[..., j]`, through `[..., 1]`).

    starts: of documents, from the chunk's first token. Exponents are masked before exp, too: above the diagonal they
    are positive, and exp's overflow there makes the gradient NaN.
    """
    token_11C = jnp.arange(g_BNKrC.shape[-1])[None, None]
    G = jnp.cumsum(jnp.maximum(g_BNKrC, FLOOR), axis=-1)
    is_earlier = token_11C[..., None] >= token_11C[..., None, :]
    is_seen = is_earlier & (token_11C[..., None, :] >= starts_BNC[..., None])

    def masked(exponent, is_own):
        is_own = is_own[:, :, None, None]
        return jnp.where(is_own, jnp.exp(jnp.where(is_own, exponent, 0)), 0)

    last = starts_BNC[..., -1:]
    return (
        masked(G[..., :, None] - G[..., None, :], is_seen),
        masked(G, starts_BNC < 0),
        masked(G[..., -1:] - G, token_11C >= last),
        masked(G[..., -1:], last < 0),
    )


def chunk_maps(sizes: ChunkSizes, tokens: Tokens, starts_BNC: jax.Array) -> tuple[Affine, Affine]:
    """Returns (state's map (M, B), outputs' map (R, O0)) of each chunk. tokens: `[B, N, C, ...]`."""
    times = functools.partial(jnp.einsum, precision=sizes.precision)
    wide = jnp.promote_types(tokens.v.dtype, jnp.float32)
    q, k = (x.astype(wide).transpose(0, 1, 3, 2, 4) for x in (tokens.q, tokens.k))  # BNKCk
    v = tokens.v.astype(wide).transpose(0, 1, 3, 4, 2, 5)  # BNKrCv
    g, beta = (x.astype(wide).transpose(0, 1, 3, 4, 2) for x in (tokens.g, tokens.beta))  # BNKrC
    if sizes.corrects:
        q, k = unit_length(q) * q.shape[-1] ** -0.5, unit_length(k)
    pair, enter, leave, through = decays(g, starts_BNC)
    of_heads = k[:, :, :, None]
    leaving = leave[..., None] * of_heads
    weights = times("BNKik,BNKjk->BNKij", q, k)[:, :, :, None] * pair
    U = beta[..., None] * v
    M, R = through[..., None], enter[..., None] * q[:, :, :, None]
    if sizes.corrects:
        S = beta[..., None] * times("BNKik,BNKjk->BNKij", k, k)[:, :, :, None] * pair
        written = jnp.concatenate([U, (beta * enter)[..., None] * of_heads], axis=-1)
        U, W = jnp.split(solved(S, written, sizes.precision), [v.shape[-1]], axis=-1)
        eye = jnp.eye(k.shape[-1], dtype=wide)
        M = M * eye[None, None, None, None] - times("BNKrik,BNKril->BNKrkl", leaving, W)
        R = R - times("BNKrij,BNKrjk->BNKrik", weights, W)
    return (
        Affine(M, times("BNKrik,BNKriv->BNKrkv", leaving, U)),
        Affine(R, times("BNKrij,BNKrjv->BNKriv", weights, U)),
    )


def mapped(sizes: ChunkSizes, of_state: Affine, h: jax.Array) -> jax.Array:
    """Returns M h + B `[B, K, r, k, v]`."""
    if not sizes.corrects:
        return of_state.M * h + of_state.B
    return jnp.einsum("BKrkl,BKrlv->BKrkv", of_state.M, h, precision=sizes.precision) + of_state.B


def group_forward(sizes: ChunkSizes, tokens: Tokens, starts_BNC: jax.Array, state: jax.Array):
    """Returns (outputs `[B, N, C, K, r, v]`, state after) of a group of chunks. The kernels' outputs have v's dtype."""
    if sizes.kernel:
        return _group_by_kernels(sizes, tokens, starts_BNC, state)
    times = functools.partial(jnp.einsum, precision=sizes.precision)
    states, outputs = chunk_maps(sizes, tokens, starts_BNC)

    def step(h, chunk: Affine):
        return mapped(sizes, chunk, h), h

    of_chunks = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), states)
    # Unrolled: in a loop XLA copies the state, and slices the maps.
    state, before = jax.lax.scan(step, state, of_chunks, unroll=True)
    out = times("BNKrik,BNKrkv->BNKriv", outputs.M, jnp.moveaxis(before, 0, 1)) + outputs.B
    return out.transpose(0, 1, 4, 2, 3, 5), state


def _group_by_kernels(sizes: ChunkSizes, tokens: Tokens, starts_BNC: jax.Array, state: jax.Array):
    B, N, C = tokens.q.shape[:3]

    def flat(x):
        return x.reshape(len(x), N * C, *x.shape[3:])

    first = C * jnp.arange(N, dtype=starts_BNC.dtype)[None, :, None]
    how = {"implementation": "mosaic", "interpret": sizes.interpret, "chunk": C}
    out, state = gated_delta_chunks.gated_delta(jax.tree.map(flat, tokens), flat(starts_BNC + first), state, **how)
    return out.reshape(B, N, C, *out.shape[2:]), state


# --- all groups, one after another ------------------------------------------------------------------------------------


def in_groups(sizes: ChunkSizes, x_BT: jax.Array, mode: Any = "constant") -> jax.Array:
    """Splits tokens into `[G, B, N, C, ...]`, with zeros after the last one, which write nothing and decay nothing."""
    B, T = x_BT.shape[:2]
    N = min(sizes.chunks, -(-T // sizes.chunk))
    padding = [(0, 0), (0, -T % (N * sizes.chunk))] + [(0, 0)] * (x_BT.ndim - 2)
    x_BT = jnp.pad(x_BT, padding, mode)
    return jnp.moveaxis(x_BT.reshape(B, -1, N, sizes.chunk, *x_BT.shape[2:]), 1, 0)


def all_in_groups(sizes: ChunkSizes, tokens: Tokens, starts_BT: jax.Array) -> tuple[Tokens, jax.Array]:
    """Returns (tokens, starts from each chunk's first token), both `[G, B, N, C, ...]`."""
    starts = in_groups(sizes, starts_BT, "edge")
    G, _, N, C = starts.shape
    first = C * jnp.arange(G * N, dtype=starts.dtype).reshape(G, 1, N, 1)
    return jax.tree.map(lambda x: in_groups(sizes, x), tokens), starts - first


def gradients_in_groups(sizes: ChunkSizes, d_out: jax.Array, tokens: Tokens) -> jax.Array:
    """Splits the gradient of the outputs, in the dtype that a group has them in."""
    return in_groups(sizes, d_out.astype(tokens.v.dtype) if sizes.kernel else d_out)


def _of_tokens(x_GBNC: jax.Array, T: int) -> jax.Array:
    """Joins groups to `[B, T, ...]`."""
    return jnp.moveaxis(x_GBNC, 0, 1).reshape(x_GBNC.shape[1], -1, *x_GBNC.shape[4:])[:, :T]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rule(sizes: ChunkSizes, tokens: Tokens, starts_BT: jax.Array, state: jax.Array):
    return rule_forward(sizes, tokens, starts_BT, state)[0]


def rule_forward(sizes, tokens, starts_BT, state):
    def step(state, group):
        tokens, starts = group
        out, after = group_forward(sizes, tokens, starts, state)
        return after, (out, state)

    after, (out, before) = jax.lax.scan(step, state, all_in_groups(sizes, tokens, starts_BT))
    out = _of_tokens(out, tokens.q.shape[1]).astype(state.dtype)
    return (out, after), (tokens, starts_BT, before)


def rule_backward(sizes, saved, cotangents):
    tokens, starts_BT, before = saved
    d_out, d_state = cotangents
    T = tokens.q.shape[1]

    def step(d_state, group):
        tokens, starts, state, d_out = group
        _, vjp = jax.vjp(lambda tokens, state: group_forward(sizes, tokens, starts, state), tokens, state)
        d_tokens, d_state = vjp((d_out, d_state))
        return d_state, d_tokens

    groups = (*all_in_groups(sizes, tokens, starts_BT), before, gradients_in_groups(sizes, d_out, tokens))
    d_state, d_tokens = jax.lax.scan(step, d_state, groups, reverse=True)
    return jax.tree.map(lambda x: _of_tokens(x, T), d_tokens), None, d_state


_rule.defvjp(rule_forward, rule_backward)
