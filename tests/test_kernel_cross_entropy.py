"""The cross-entropy kernel in the interpreter against the reference in jnp, and the reference against jax.nn's.

Kernel and reference compute in float32 with sums in another order and exp(x) as 2^(x log2 e): the logarithm of a sum of
V terms, at most 20 here, is then off by a few float32 roundings, 2e-6 each; a softmax by that relative to itself. A
bfloat16 gradient is the same number rounded, so it may differ by one rounding, 2^-8 relative, where both lie beside a
boundary.
"""

import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from small import KERNEL, REFERENCE, normal, paired, quick_at

from pallas_kernels import cross_entropy as ce, long_rows
from pallas_kernels.shapes import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.full(after=1)]
f32, bf16 = jnp.float32, jnp.bfloat16
VOCABULARIES = sorted({m.vocab for m in MODELS.values()})
ROUNDING = 1e-5  # absolute, of logsumexp and losses; see above
RELATIVE = {f32: 1e-5, bf16: 2.0**-8}  # of gradients, to the softmax's size


def example(N: int, V: int, dtype=bf16, seed: int = 0):
    """(logits, labels with the first and last word, one in the middle, and an ignored one)."""
    logits = 3 * np.asarray(normal(seed + V, (N, V)))
    return jnp.asarray(logits.astype(dtype)), jnp.array(([V - 1, -1, V // 2, 0] * N)[:N], jnp.int32)


def assert_equal(ours: ce.Loss, expected: ce.Loss):
    for name in ("loss", "lse", "logprob"):
        np.testing.assert_allclose(getattr(ours, name), getattr(expected, name), rtol=0, atol=ROUNDING, err_msg=name)
    assert_gradient(ours.d_logits, expected.d_logits)


def assert_gradient(ours, expected):
    assert ours.dtype == expected.dtype and ours.shape == expected.shape
    rtol = RELATIVE[expected.dtype.type]
    # Beside the label, softmax - 1 cancels: there the error is that of a number of size 1.
    np.testing.assert_allclose(ours.astype(f32), expected.astype(f32), rtol=rtol, atol=1e-6)


def both(logits, labels, weight=0.5, **how):
    call = functools.partial(ce.loss_and_gradient, z_loss=how.pop("z_loss", 0.0))
    kernel = jax.jit(functools.partial(call, **KERNEL, **how))
    reference = jax.jit(functools.partial(call, implementation="xla"))
    return kernel(logits, labels, f32(weight)), reference(logits, labels, f32(weight))


ODD_SIZES = [(8, 1003), (3, 1003), (5, 97), (8, 2049), (4, 16387), (3, 4224), (4, 257), (2, 1)]  # rows, words


@pytest.mark.parametrize("V", quick_at([(V,) for V in VOCABULARIES]))
def test_real_vocabularies(V):
    assert_equal(*both(*example(2, V), in_place=V in VOCABULARIES[::2]))


@pytest.mark.parametrize("size, dtype", paired(ODD_SIZES, (bf16, bf16, f32)))
def test_odd_sizes(size, dtype):
    """Rows that begin at any word: all are read from and written to their own place."""
    assert_equal(*both(*example(*size, dtype), in_place=dtype is bf16, z_loss=1e-2))


@pytest.mark.full
@pytest.mark.parametrize("V", [16387, 16384 + 4096])
def test_nobody_reads_or_writes_what_another_warp_group_writes(V, monkeypatch):
    """In place, rows cut among four warp groups: the interpreter raises where two accesses are not ordered."""
    monkeypatch.setattr(plgpu, "InterpretGPUParams", functools.partial(plgpu.InterpretGPUParams, detect_races=True))
    assert long_rows.cut(2, V, 2).groups == 4
    assert_equal(*both(*example(2, V), in_place=True))


def test_cut():
    """Rounds of aligned vectors never leave the row, and edges hold the rest, wherever the row begins."""
    for V in (128, 129, 257, 1003, 2049, 16384, 16387, *VOCABULARIES):
        for N, itemsize in ((8, 2), (3, 2), (8, 4)):
            c = long_rows.cut(N, V, itemsize)
            words = c.groups * long_rows.LANES
            assert N % c.rows == 0 and (c.rows == 1 or c.rows * V % c.vec == 0 or c.rows == N)
            for r in range(N):
                first = r % c.rows * V
                begin = -(-first // c.vec) * c.vec if c.rows > 1 else first
                end = begin + c.rounds * c.span
                assert begin - first < c.vec and end <= first + V <= end + c.edges * words
                assert c.groups == 1 or c.edges * words <= V  # edges side by side: no two groups write a word


@pytest.mark.full
@pytest.mark.parametrize("dtype, z_loss", [(bf16, 0.0), (f32, 1e-2)])
def test_differentiable_row_by_row(dtype, z_loss):
    """`cross_entropy` against autodiff of jax.nn's logsumexp, with another cotangent in every row."""
    logits, labels = example(6, 1003, dtype)
    logits, labels = logits.reshape(2, 3, 1003), labels.reshape(2, 3)
    weight = jnp.arange(6, dtype=f32).reshape(2, 3) - 2

    def plain(logits):
        x = logits.astype(f32)
        lse = jax.nn.logsumexp(x, axis=-1)
        loss = lse - jnp.take_along_axis(x, jnp.maximum(labels, 0)[..., None], -1)[..., 0] + z_loss * lse**2
        return jnp.where(labels >= 0, loss, 0.0)

    expected, vjp = jax.vjp(plain, logits)
    for how in (KERNEL, REFERENCE):
        ours, our_vjp = jax.vjp(functools.partial(ce.cross_entropy, labels=labels, z_loss=z_loss, **how), logits)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=ROUNDING)
        for mine, theirs in zip(our_vjp(weight), vjp(weight), strict=True):
            # Weights up to 3 scale the gradient and with it what is left where it cancels.
            np.testing.assert_allclose(mine.astype(f32), theirs.astype(f32), rtol=RELATIVE[dtype], atol=4e-6)


@pytest.mark.parametrize("how", [KERNEL, REFERENCE], ids=["mosaic", "xla"])
def test_logprob(how):
    logits, labels = example(4, 4099)
    expected = jax.jit(lambda x: jax.nn.log_softmax(x.astype(f32))[jnp.arange(4), labels].at[1].set(0))(logits)
    logprob = lambda x: ce.logprob(x, labels, **how)
    found, gradient = (jax.jit(f)(logits) for f in (logprob, jax.grad(lambda x: logprob(x).sum())))
    np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDING)
    assert not gradient.any()


@pytest.mark.parametrize("how", [KERNEL, REFERENCE], ids=["mosaic", "xla"])
def test_ignored_and_impossible_labels(how):
    """Ignored rows are exactly zero; a label beyond the vocabulary is NaN in its own row and nowhere else."""
    logits, _ = example(3, 1003)
    labels = jnp.array([-100, 1003, 5], jnp.int32)
    out = jax.jit(functools.partial(ce.loss_and_gradient, **how))(logits, labels, f32(1))
    assert out.loss[0] == out.logprob[0] == 0 and not out.d_logits[0].any()
    assert jnp.isnan(out.loss[1]) and jnp.isnan(out.logprob[1]) and jnp.isfinite(out.loss[2])
    assert jnp.isfinite(out.d_logits.astype(f32)).all()


@pytest.mark.parametrize("how", [KERNEL, REFERENCE], ids=["mosaic", "xla"])
def test_extreme_logits(how):
    """Large logits do not overflow, words at minus infinity have no share, and NaN is not hidden."""
    logits = np.zeros((4, 1003), np.float32)
    logits[0], logits[1, :500], logits[2, 7], logits[3] = 1e4, -np.inf, np.nan, -1e4
    out = jax.jit(functools.partial(ce.loss_and_gradient, **how))(logits, np.full(4, 600, np.int32), f32(1))
    np.testing.assert_allclose(np.asarray(out.loss)[[0, 1, 3]], np.log([1003, 503, 1003]), rtol=0, atol=2e-3)
    assert not out.d_logits[1, :500].any() and jnp.isnan(out.loss[2])


def test_no_rows():
    out = ce.loss_and_gradient(jnp.zeros((0, 97)), jnp.zeros(0, jnp.int32), f32(1), **KERNEL)
    assert out.loss.shape == (0,) and out.d_logits.shape == (0, 97)


@pytest.mark.parametrize("how", [KERNEL, REFERENCE], ids=["mosaic", "xla"])
@pytest.mark.parametrize("weight", [0.25, np.float64(0.25)])
def test_weight_is_any_number(weight, how):
    logits, labels = example(2, 97)
    found, expected = (ce.loss_and_gradient(logits, labels, w, **how) for w in (weight, f32(0.25)))
    np.testing.assert_array_equal(found.d_logits, expected.d_logits)


@pytest.mark.full(after=100)  # refused in milliseconds
@pytest.mark.parametrize(
    "change, words",
    [
        (dict(logits=jnp.zeros((2, 8), jnp.float16)), "dtype of logits: expected float32 or bfloat16, got float16"),
        (dict(labels=jnp.zeros(3, jnp.int32)), r"labels: expected shape \(2,\), since logits are \(2, 8\), got \(3,\)"),
        (dict(labels=jnp.zeros(2)), "dtype of labels: expected int32, got float32"),
        (dict(logits=jnp.zeros(())), r"logits: expected shape \[..., V\] with V >= 1, got \(\)"),
        (dict(logits=jnp.zeros((2, 0))), r"logits: expected shape \[..., V\] with V >= 1, got \(2, 0\)"),
        (dict(z_loss="1"), "z_loss: expected a number, 0 or more, got 1"),
        (dict(weight=jnp.ones(2)), r"weight: expected one number, shape \(\), got \(2,\)"),
        (dict(z_loss=-1.0), "z_loss: expected a number, 0 or more, got -1.0"),
        (dict(implementation="cuda"), r"implementation: expected one of \(None, 'mosaic', 'xla'\), got 'cuda'"),
    ],
)
def test_bad_input(change, words):
    arguments = dict(logits=jnp.zeros((2, 8)), labels=jnp.zeros(2, jnp.int32), weight=f32(1)) | change
    with pytest.raises(ValueError, match=f"cross_entropy: {words}"):
        ce.loss_and_gradient(**arguments)


def test_too_many_odd_rows_are_refused_or_computed_by_xla():
    """Their places in memory are 32-bit numbers; nothing is allocated here."""
    logits, labels = jax.ShapeDtypeStruct((42733, 50257), bf16), jax.ShapeDtypeStruct((42733,), jnp.int32)
    with pytest.raises(NotImplementedError, match="make the number of rows a multiple of 8"):
        jax.eval_shape(functools.partial(ce.logprob, implementation="mosaic"), logits, labels)
    with warnings.catch_warnings(action="ignore"):  # on a GPU it says so
        assert jax.eval_shape(ce.logprob, logits, labels).shape == (42733,)


@pytest.mark.full
def test_in_place_where_jax_takes_no_references():
    """Inside `shard_map`, to what differs between devices; to the same bits. The interpreter runs on one device."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    f = lambda x, l, in_place: ce.loss_and_gradient(x, l, f32(1), in_place=in_place, **KERNEL)
    in_place = jax.shard_map(functools.partial(f, in_place=True), mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
    x, labels = example(4, 97)
    chex.assert_trees_all_equal(jax.jit(in_place)(x, labels), f(x, labels, in_place=False))


@pytest.mark.parametrize("how", [REFERENCE])
def test_cases_run(how):
    for case in ce.cases(MODELS["gpt2"]._replace(vocab=97), 4):
        args = [jnp.ones(a.shape, a.dtype) for a in case.args]
        assert case.bytes >= args[0].nbytes
        assert jax.tree.leaves(case.run(*args, **how))
