"""The gated delta rule (models/delta_rule.py) against its recurrence, token by token, in float64.

Every row of a batch is a case: a border at each position, strong decays, beta of 0 and 1, one key for all tokens.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import quick_at

from surojax.models import delta_rule
from surojax.models.delta_rule import LONG_AGO, ChunkSizes, Tokens, gated_delta_rule

K, R, KEY, VALUE = 2, 2, 4, 3
T = 23
SMALL = ChunkSizes(chunk=4, chunks=3)  # two groups, the second with padding
EXACT = 1e-11  # relative to the largest number; float64 has 1e-16, and one key for all tokens costs digits


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64():
        yield


def drawn(rows: int, length: int = T, seed: int = 0) -> tuple[Tokens, jax.Array]:
    """(tokens, state before them)."""
    normal = np.random.default_rng(seed).standard_normal
    heads = (rows, length, K, R)
    g, beta = -np.logaddexp(0, normal(heads)), 1 / (1 + np.exp(-normal(heads)))
    q, k = normal((2, rows, length, K, KEY))
    tokens = Tokens(q, k, normal((*heads, VALUE)), g, beta)
    return jax.tree.map(jnp.asarray, (tokens, normal((rows, K, R, KEY, VALUE))))


def starts_of(borders: list[int], length: int = T) -> np.ndarray:
    """The document before the first border began before these tokens."""
    starts = np.full(length, LONG_AGO, np.int32)
    for border in borders:
        starts[border:] = border
    return starts


BORDERS = [[], *([t] for t in range(T)), *([t, t + 1] for t in range(T - 1)), list(range(T)), [0, 5, 6, 16]]


def cases() -> tuple[Tokens, np.ndarray, jax.Array]:
    """(tokens, starts, state before): a row for each case."""
    plain = len(BORDERS)
    tokens, state = drawn(plain + 5)
    q, k, v, g, beta = map(np.array, tokens)
    g[plain] *= 100.0
    g[plain + 1, 3] = -25.0
    beta[plain + 2], beta[plain + 3 :] = 0.0, 1.0
    k[plain + 4], g[plain + 4] = k[plain + 4, :1], 0.0
    starts = np.stack([starts_of(borders) for borders in [*BORDERS, [11], *[[]] * 4]])
    return jax.tree.map(jnp.asarray, Tokens(q, k, v, g, beta)), starts, state


def recurrence(tokens: Tokens, starts, state, corrects: bool = True):
    """The rule as it is written, a token at a time; or without its correction, with keys of any length."""

    def unit(x):
        return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

    q, k = (unit(tokens.q) / np.sqrt(KEY), unit(tokens.k)) if corrects else (tokens.q, tokens.k)

    def token(h, x):
        q, k, v, g, beta, is_first = x
        h = jnp.where(is_first[:, None, None, None, None], 0, h) * jnp.exp(g)[..., None, None]
        new = beta[..., None] * (v - corrects * jnp.einsum("bKk,bKrkv->bKrv", k, h))
        h = h + jnp.einsum("bKk,bKrv->bKrkv", k, new)
        return h, jnp.einsum("bKk,bKrkv->bKrv", q, h)

    is_first = starts == np.arange(starts.shape[1])[None]
    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, tokens.v, tokens.g, tokens.beta, is_first))
    state, out = jax.lax.scan(token, state, by_token)
    return jnp.moveaxis(out, 0, 1), state


def with_gradients(rule):
    """Compiled: (tokens, starts, state) -> (results, gradients of a sum of them with weights)."""

    @jax.jit
    def both(tokens, starts, state):
        results, pullback = jax.vjp(lambda tokens, state: rule(tokens, starts, state), tokens, state)
        weights = np.random.default_rng(9)
        cotangents = jax.tree.map(lambda x: jnp.asarray(weights.standard_normal(x.shape), x.dtype), results)
        return results, pullback(cotangents)

    return both


@functools.cache
def expected(corrects: bool = True) -> Any:
    return jax.tree.map(np.asarray, with_gradients(functools.partial(recurrence, corrects=corrects))(*cases()))


def assert_close(found, expected, exact: float = EXACT) -> None:
    """Each row by itself."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x).reshape(len(x), -1) for x in (a, b))
        assert a.dtype == b.dtype and np.isfinite(a).all()
        assert (np.abs(a - b) <= exact * np.maximum(np.abs(b).max(axis=1, keepdims=True), 1)).all()


def check_cases(rule=gated_delta_rule) -> None:
    assert_close(with_gradients(functools.partial(rule, sizes=SMALL))(*cases()), expected())


def test_equals_the_recurrence():
    """Outputs, state and all gradients."""
    check_cases()


@pytest.mark.full
def test_equals_the_recurrence_without_the_correction():
    """That of Mamba2, at every border too."""
    rule = functools.partial(gated_delta_rule, sizes=SMALL._replace(corrects=False))
    assert_close(with_gradients(rule)(*cases()), expected(corrects=False), 1e-12)


def check_one_key(rule=gated_delta_rule) -> None:
    """In chunks of 64, whose inverses are made of blocks of 16; the length is odd."""
    tokens, state = drawn(2, length=67)
    one = tokens._replace(k=jnp.broadcast_to(tokens.k[:, :1], tokens.k.shape), g=0 * tokens.g, beta=1 + 0 * tokens.beta)
    rows = jax.tree.map(lambda a, b: jnp.concatenate([a[:1], b[1:]]), tokens, one)
    starts = np.stack([starts_of([3, 65], 67), starts_of([], 67)])
    of_chunks = functools.partial(rule, sizes=ChunkSizes(chunk=64, chunks=2))
    assert_close(with_gradients(of_chunks)(rows, starts, state), with_gradients(recurrence)(rows, starts, state))


def test_one_key_for_all_tokens():
    check_one_key()


def check_spike(rule=gated_delta_rule) -> None:
    """In float32: a sum with a decay of e^-5000 in it would lose the digits of the weak decays after it."""
    tokens, state = drawn(1, length=90)
    g = np.array(tokens.g) * 0.02
    g[:, 3] = -5000.0
    tokens = tokens._replace(g=jnp.asarray(g))
    starts = np.zeros((1, 90), np.int32)
    out, _ = jax.jit(recurrence)(tokens, starts, state)
    in_float32 = jax.tree.map(lambda x: x.astype(jnp.float32), (tokens, state))
    found, _ = jax.jit(rule)(in_float32[0], starts, in_float32[1])
    assert np.abs(found - out).max() <= 3e-6 * np.abs(out).max()


def test_strong_decays_take_no_digits_from_weak_ones():
    check_spike()


def check_overflow(rule=gated_delta_rule) -> None:
    """In float32: above the diagonal e^180 is infinite, and infinity times 0 is no gradient."""
    tokens, state = jax.tree.map(lambda x: x.astype(jnp.float32), drawn(1, length=8))
    tokens = tokens._replace(g=jnp.full_like(tokens.g, -40.0))
    both = with_gradients(functools.partial(rule, sizes=ChunkSizes(8, 1)))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(both(tokens, np.zeros((1, 8), np.int32), state)))


def test_strong_decays_overflow_nowhere():
    check_overflow()


def test_nothing_passes_a_border():
    """To the bit, whatever stands before it."""
    tokens, state = drawn(1)
    starts = starts_of([7])[None]
    other = jax.tree.map(lambda x: x.at[:, :7].add(1.0), tokens)._replace(g=tokens.g)
    rule = jax.jit(functools.partial(gated_delta_rule, sizes=SMALL))
    (out, after), (same, also) = rule(tokens, starts, state), rule(other, starts, 5 * state)
    np.testing.assert_array_equal(out[:, 7:], same[:, 7:])
    np.testing.assert_array_equal(after, also)
    assert np.abs(out[:, :7] - same[:, :7]).max() > 0.1


def check_slopes(rule=gated_delta_rule) -> None:
    """By finite differences, along a direction drawn for each input."""
    tokens, state = drawn(1, length=9)
    starts = starts_of([4], 9)[None]

    @jax.jit
    def value(tokens, state):
        out, after = rule(tokens, starts, state, ChunkSizes(4, 2))
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(after))

    arrays = (*tokens, state)
    grads = jax.jit(jax.grad(lambda *arrays: value(Tokens(*arrays[:5]), arrays[5]), argnums=range(6)))(*arrays)
    for i, (x, grad) in enumerate(zip(arrays, grads, strict=True)):
        way = np.random.default_rng(i).standard_normal(x.shape)

        def at(step, i=i, x=x, way=way):
            moved = [*arrays[:i], x + step * way, *arrays[i + 1 :]]
            return float(value(Tokens(*moved[:5]), moved[5]))

        slope = (at(1e-5) - at(-1e-5)) / 2e-5
        assert abs(slope - float(jnp.sum(grad * way))) <= 1e-8 * max(abs(slope), 1)


@pytest.mark.full
def test_gradients_are_slopes():
    check_slopes()


@pytest.mark.full
@pytest.mark.parametrize("corrects", [True, False])
def test_pieces_hand_on_the_state(corrects):
    """As sampling does, and with gradients back through the states."""
    tokens, state = drawn(1)
    starts = starts_of([0, 9, 16])[None]

    def pieces(tokens, starts, state):
        outs = []
        for start, stop in ((0, 5), (5, 6), (6, 16), (16, T)):
            own = jax.tree.map(lambda x, start=start, stop=stop: x[:, start:stop], tokens)
            sizes = delta_rule.chosen_sizes(own, None, corrects=corrects)
            out, state = gated_delta_rule(own, starts[:, start:stop] - start, state, sizes)
            outs.append(out)
        return jnp.concatenate(outs, axis=1), state

    by_token = functools.partial(recurrence, corrects=corrects)
    assert_close(with_gradients(pieces)(tokens, starts, state), with_gradients(by_token)(tokens, starts, state))


MISTAKES = {
    "pairs of other documents": (
        "is_earlier & (token_11C[..., None, :] >= starts_BNC[..., None])",
        "is_earlier",
        "cases",
    ),
    "a state enters other documents": ("masked(G, starts_BNC < 0)", "masked(G, starts_BNC < 9**9)", "cases"),
    "other documents leave": ("token_11C >= last)", "token_11C >= last - 1)", "cases"),
    "a state goes through a border": ("[..., -1:], last < 0", "[..., -1:], last < 9**9", "cases"),
    "a decay too many": ("masked(G[..., -1:] - G,", "masked(G[..., -1:] - G + g_BNKrC,", "cases"),
    "no state after a group": ("return after, (out, state)", "return state, (out, state)", "cases"),
    "no gradient of a state": ("return d_state, d_tokens", "return 0 * d_state, d_tokens", "cases"),
    "no mask before exp": ("jnp.exp(jnp.where(is_own, exponent, 0))", "jnp.exp(exponent)", "overflow"),
    "no floor": ("jnp.maximum(g_BNKrC, FLOOR)", "g_BNKrC", "spike"),
    "the series": ("    C = S.shape[-1]\n", "    C = 0 * S.shape[-1]\n    return series(S)\n", "one_key"),
}
CHECKS = {"cases": check_cases, "spike": check_spike, "overflow": check_overflow, "one_key": check_one_key}


def series(S):
    """(I - S)(I + S^2)(I + S^4)..."""
    S = jnp.tril(S, -1)
    X, power = jnp.broadcast_to(jnp.eye(S.shape[-1]), S.shape) - S, S @ S
    for _ in range(5):
        X, power = X + X @ power, power @ power
    return X


def rule_with(old: str, new: str):
    """The rule of the module's source with another text."""
    source = Path(delta_rule.__file__).read_text()
    assert source.count(old) == 1
    namespace = {"__name__": delta_rule.__name__, "series": series}
    exec(compile(source.replace(old, new), delta_rule.__file__, "exec"), namespace)
    return namespace["gated_delta_rule"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_can_be_made(mistake):
    rule_with(*MISTAKES[mistake][:2])


@pytest.mark.parametrize("mistake", quick_at([(mistake,) for mistake in MISTAKES], *range(3, 9)))
def test_a_mistake_is_noticed(mistake):
    *texts, check = MISTAKES[mistake]
    with pytest.raises(AssertionError):
        CHECKS[check](rule_with(*texts))
