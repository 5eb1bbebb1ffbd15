"""Attention sinks in every implementation, and the other options of gpt-oss' layers under every placement."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import KERNEL, normal, quick_at

from pallas_kernels import flash_attention as op
from surojax import ConfigError, default_config
from surojax.config.checks import check
from surojax.models.attention import attend, chosen_implementation
from surojax.models.operations import gated

pytestmark = pytest.mark.full(after=1)

ORDER_OF_SUMS = 2e-5
SINKS = np.array([2.0, -1.0, 0.5, 3.0], np.float32)


def with_one_more_column(q, k, v, sinks, starts, window: int, scale: float, softcap: float):
    """Softmax over the keys that a query sees and its head's sink, as one matrix of scores; float32."""
    S = q.shape[1]
    index = np.arange(S)
    seen = (index[None, :] <= index[:, None]) & (index[None, None, :] >= starts[:, :, None])
    seen &= index[None, :] > index[:, None] - (window or S)
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bshc,bthc->bhst", q, k) * scale
    scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bhst,bthc->bshc", weights, v)


def with_gradients(f, do, *operands):
    def both(do, *operands):
        o, vjp = jax.vjp(f, *operands)
        return o, *vjp(do.astype(o.dtype))

    return jax.jit(both)(do, *operands)


FAR = np.array([3e38, -1e4, 300.0, -3e38], np.float32)  # from all scores, on either side
# Lengths of documents, window, scale, softcap, sinks.
CASES = [([5, 11], 0, 0.5, 0.0, SINKS), ([16], 4, 0.35, 2.0, SINKS), ([5, 11], 0, 0.5, 0.0, FAR)]


def starts_of(lengths) -> np.ndarray:
    return np.repeat(np.cumsum(lengths) - lengths, lengths).astype(np.int32)[None]


@pytest.mark.parametrize("lengths, window, scale, softcap, sinks", CASES, ids=["near", "window", "far"])
def test_a_sink_is_one_more_score(lengths, window, scale, softcap, sinks):
    """By XLA and in the kernel's reference; a sink far below all scores changes nothing, one far above takes all."""
    starts = starts_of(lengths)
    q, k, v, do = (normal(i, (1, 16, n, 8)) for i, n in enumerate((4, 2, 2, 4)))
    rule = window, scale, softcap
    expected = with_gradients(lambda *x: with_one_more_column(*x, starts, *rule), do, q, k, v, jnp.asarray(sinks))
    how = {"window": window, "scale": scale, "softcap": softcap}
    by_xla = lambda q, k, v, sinks: attend(q, k, v, starts=starts, sinks=sinks, **how)
    reference = lambda q, k, v, sinks: op.attention(q, k, v, starts, sinks=sinks, implementation="xla", **how)
    for f in (by_xla, reference):
        found = with_gradients(f, do, q, k, v, jnp.asarray(sinks))
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, want, atol=5e-6)
    np.testing.assert_array_equal(by_xla(q, k, v, jnp.full(4, -1e30)), attend(q, k, v, starts=starts, **how))
    part = attend(q[:, 9:11], k, v, start=9, starts=starts[:, 9:11], sinks=jnp.asarray(sinks), **how)
    np.testing.assert_allclose(part, expected[0][:, 9:11], atol=5e-6)


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("lengths, window", quick_at([([20, 44], 0), ([70, 3, 77], 40)], 0))
def test_kernel(lengths, window):
    starts = starts_of(lengths)
    q, k, v, do = (normal(i, (1, starts.size, n, 16), jnp.bfloat16) for i, n in enumerate((4, 2, 2, 4)))
    rule = window, 0.25, 0.0
    kernel = lambda q, k, v, sinks: op.attention(q, k, v, starts, window=window, sinks=sinks, **KERNEL)
    found = jax.jit(functools.partial(with_gradients, kernel))(do, q, k, v, jnp.asarray(SINKS))
    expected = with_gradients(lambda *x: with_one_more_column(*x, starts, *rule), do, q, k, v, jnp.asarray(SINKS))
    for got, want in zip(found, expected, strict=True):
        # As in test_kernel_attention.py; the result is rounded once more, after its part without the sink.
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        np.testing.assert_allclose(got, want, rtol=2**-6, atol=2**-7 * np.abs(want).max())


def test_a_sink_beside_the_sums_of_a_kernel():
    """Output, log-sum-exp and the sinks' gradient in float64: near the scores, far from them, and of a query that sees
    no key."""
    rng = np.random.default_rng(0)
    o, do = rng.normal(size=(2, 1, 6, 4, 8)).astype(np.float32)
    lse = rng.normal(size=(1, 4, 6)).astype(np.float32) * 3
    lse[0, 0, 0] = -np.inf
    for sinks in (SINKS, FAR, np.float32([-1e4, 90, -90, 1e30])):
        with np.errstate(divide="ignore"):
            total = np.logaddexp(np.float64(lse), np.float64(sinks)[None, :, None])
        share = np.exp(np.float64(lse) - total)  # of the keys
        of_rows = share.transpose(0, 2, 1)[..., None]
        found_o, found_lse = jax.jit(op.add_sinks)(o, lse, sinks)
        np.testing.assert_allclose(found_o, o * of_rows, rtol=1e-5, atol=1e-30)
        np.testing.assert_allclose(found_lse, total, rtol=1e-6)
        delta = np.sum(do * o * of_rows, axis=-1).transpose(0, 2, 1)
        found = jax.jit(op.gradient_of_sinks)(sinks, found_lse, np.float32(delta))
        wanted = -np.sum(np.exp(np.float64(sinks)[None, :, None] - total) * delta, axis=(0, 2))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_what_sinks_give_has_the_dtype_of_what_they_take():
    o = jnp.ones((1, 2, 3, 4), jnp.bfloat16)
    lse = jnp.zeros((1, 3, 2))
    sinks = jnp.zeros(3, jnp.bfloat16)
    found_o, found_lse = jax.eval_shape(op.add_sinks, o, lse, sinks)
    assert (found_o.dtype, found_lse.dtype) == (o.dtype, lse.dtype)
    assert jax.eval_shape(op.gradient_of_sinks, sinks, found_lse, lse).dtype == sinks.dtype


def test_clamped_swiglu_is_that_of_gpt_oss():
    """Beyond the limits neither side has a gradient."""
    gate, up = jnp.float32([-9.0, -1.0, 3.0, 6.9, 8.0, 2.0, 2.0]), jnp.float32([1.0, 2.0, -3.0, 6.5, 1.0, 9.0, -9.0])
    found, slopes = jax.jit(jax.value_and_grad(lambda x: gated(*x, "clamped_swiglu").sum()))((gate, up))
    g, u = np.minimum(np.asarray(gate), 7), np.clip(np.asarray(up), -7, 7)
    np.testing.assert_allclose(found, ((u + 1) * g / (1 + np.exp(-1.702 * g))).sum(), rtol=1e-6)
    assert (np.asarray(slopes[0]) != 0).tolist() == [True, True, True, True, False, True, True]
    assert (np.asarray(slopes[1]) != 0).tolist() == [True, True, True, True, True, False, False]


def test_auto_and_refusals():
    assert chosen_implementation("auto", "bfloat16", 64, gpu=True, packed=False, sinks=True) == "mosaic"
    assert chosen_implementation("auto", "bfloat16", 64, gpu=True, packed=False, sinks=True, piece=512) == "cudnn"
    q = jnp.zeros((1, 8, 2, 8), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="cudnn attention: expected no sinks, got some; use attention='auto'"):
        attend(q, q, q, sinks=jnp.zeros(2), implementation="cudnn")
    c = default_config()
    c.update({"attention": "cudnn", "model_dtype": "bfloat16"})
    c.model.attention_sinks = True
    with pytest.raises(ConfigError, match=r"^model\.attention_sinks: expected False with attention='cudnn', whose"):
        check(c)
