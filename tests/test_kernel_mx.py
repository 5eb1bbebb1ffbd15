"""MXFP8 quantisation in the interpreter against its reference, and that against surojax.blockscaled: equal to the bit.

What surojax.blockscaled promises (the smallest scale that clips nothing, nearest rounding) is checked against numpy in
test_blockscaled.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import KERNEL, REFERENCE, paired

from pallas_kernels import dispatch, fp8_format, mx
from pallas_kernels.shapes import MODELS
from surojax.numerics import blockscaled as bs

pytestmark = [pytest.mark.gpu, pytest.mark.full(after=1)]
f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
FLOATS = (bf16, f16, f32)


def normal(shape, dtype=bf16, seed=0):
    """Normal numbers of many sizes; blocks of zeros and of the smallest numbers; largest ones that decide a scale."""
    x = np.random.default_rng(seed).standard_normal(shape) * 2.0 ** np.linspace(-12, 6, shape[-1])
    rows = x.reshape(-1, shape[-1])
    rows[:32, :32] = 0
    rows[-1, :32], rows[:32, -1] = -0.0, float(jnp.finfo(dtype).tiny)
    rows[-3:, -32:] *= 2.0**-8
    rows[-3:, -1] = 448 * 2.0**-8, 450 * 2.0**-8, -1.75 * 2.0**-8
    return jnp.asarray(x.astype(np.float32).astype(dtype))


def bits(found):
    return [np.asarray(x).view(np.uint8) for x in jax.tree.leaves(found)]


def same_bits(ours, expected):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
    for a, b in zip(bits(ours), bits(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def run(f, x, how):
    return jax.jit(functools.partial(f, **how))(x)


@jax.jit
def quantised(x):
    """What surojax.blockscaled has always given to products."""
    q = bs.quantise_mxfp8(x)
    return mx.MX(q.values.astype(fp8_format.E4M3), bs._e8m0(q.scales))


@pytest.fixture
def no_instructions(monkeypatch):
    """As on an A100: FP8 is made with integers."""
    monkeypatch.setattr(fp8_format, "has_instructions", lambda: False)


# --- kernels and references -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, dtype", paired([(32, 32), (3, 5, 1024), (96, 352), (8, MODELS["llama7b"].hidden)], FLOATS)
)
def test_rows(shape, dtype):
    x = normal(shape, dtype)
    ours = run(mx.quantize, x, KERNEL)
    same_bits(ours, run(mx.quantize, x, REFERENCE))
    same_bits([y.reshape(-1, y.shape[-1]) for y in ours], list(quantised(x.reshape(-1, shape[-1]))))


@pytest.mark.parametrize("shape, dtype", paired([(128, 64), (128, MODELS["gpt2"].hidden), (256, 192)], FLOATS))
def test_columns_and_both(shape, dtype):
    x = normal(shape, dtype)
    both, columns = run(mx.quantize_both, x, KERNEL), run(mx.quantize_transposed, x, KERNEL)
    same_bits(both, run(mx.quantize_both, x, REFERENCE))
    same_bits(columns, run(mx.quantize_transposed, x, REFERENCE))
    same_bits(both, (quantised(x), quantised(x.T)))
    same_bits(columns, both[1])


@pytest.mark.full
@pytest.mark.parametrize("how", [KERNEL, REFERENCE])
def test_every_number_of_a_dtype(how):
    """All finite bfloat16, 32 to a block with their neighbours, then with numbers of all sizes beside them."""
    every = jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), bf16)
    every = jnp.where(jnp.isfinite(every), every, 0).reshape(-1, 128)
    # XLA on CPUs takes subnormal float32 for zero or not, from program to program: GPUs do not. Left to the last test.
    every = jnp.where(jnp.abs(every) < jnp.finfo(f32).tiny, 0, every)
    for x in (every, every.T):
        same_bits(run(mx.quantize, x, how), quantised(x))
        same_bits(run(mx.quantize_both, x, how), (quantised(x), quantised(x.T)))


@pytest.mark.parametrize("how", [KERNEL, REFERENCE])
def test_middles_are_rounded_to_even(how):
    """Float32 half way between two e4m3 numbers and beside it, in blocks whose scale is 1."""
    numbers = np.arange(127, dtype=np.uint8).view(fp8_format.E4M3).astype(np.float32)
    half = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([half, np.nextafter(half, np.float32(0)), np.nextafter(half, np.float32(1e9)), -half])
    x = np.resize(x, (124, 31))  # more than there are; each once at least
    x = jnp.asarray(np.concatenate([np.full((124, 1), 448, np.float32), x], axis=1))
    x = jnp.concatenate([x, x[:4]])
    rows, columns = (run(mx.quantize, x, how), run(mx.quantize_transposed, jnp.tile(x.T, (4, 1)), how))
    assert (np.asarray(rows.scales, np.float32) == 1).all()
    np.testing.assert_array_equal(
        np.asarray(rows.values, np.float32), np.asarray(x).astype(fp8_format.E4M3).astype(np.float32)
    )
    same_bits(columns.values[:, :32], rows.values)


@pytest.mark.full
def test_without_instructions(no_instructions):
    x = normal((128, 128))
    same_bits(run(mx.quantize, x, KERNEL), quantised(x))
    same_bits(run(mx.quantize_both, x, KERNEL), (quantised(x), quantised(x.T)))


@pytest.mark.full
@pytest.mark.parametrize("how", [KERNEL, REFERENCE])
def test_what_is_not_finite(how):
    """Its blocks get NaN as scale, the others what they had; values beside a NaN do not matter, but are the same."""
    x = normal((128, 128), f32)
    at = (0, 37, 37, 127), (0, 70, 5, 127)
    spoiled = x.at[at].set(jnp.asarray([np.nan, np.inf, np.nan, -np.inf]))
    found = run(mx.quantize_both, spoiled, how)
    same_bits(found, run(mx.quantize_both, spoiled, REFERENCE))
    same_bits(found, (run(mx.quantize, spoiled, how), run(mx.quantize_transposed, spoiled, how)))
    for q, y, (i, k) in zip(found, (x, x.T), (at, at[::-1]), strict=True):
        nan, expected = np.isnan(np.asarray(q.scales, np.float32)), quantised(y)
        assert nan[i, np.asarray(k) // 32].all() and nan.sum() == 4
        np.testing.assert_array_equal(bits(q.scales)[0][~nan], bits(expected.scales)[0][~nan])
        values = np.repeat(~nan, 32, axis=1)
        np.testing.assert_array_equal(bits(q.values)[0][values], bits(expected.values)[0][values])


@pytest.mark.full
@pytest.mark.parametrize("how", [KERNEL, REFERENCE])
def test_subnormal_numbers(how):
    """The scale stays 2^-126: they are below 1 then, and on GPUs rounded to what e4m3 has there.

    XLA on CPUs may take them for zero, so that values are one of the two.
    """
    x = np.full((128, 64), 2.0**-130, np.float32)
    rows, columns = run(mx.quantize_both, jnp.asarray(x), how)
    assert (bits(rows.scales)[0] == 1).all() and (bits(columns.scales)[0] == 1).all()
    for q in (rows, columns):
        assert np.isin(np.asarray(q.values, np.float32), (0, 2.0**-4)).all()


# --- what is refused --------------------------------------------------------------------------------------------------

X = jnp.ones((128, 128))


@pytest.mark.full(after=100)  # refused in milliseconds
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: mx.quantize(X.astype(jnp.int32)), "dtype of x: expected bfloat16, float16 or float32, got int32"),
        (lambda: mx.quantize(X[:, :40]), r"x: expected \[..., N\], N a multiple of 32, got \(128, 40\)"),
        (lambda: mx.quantize(f32(1)), r"x: expected \[..., N\], N a multiple of 32, got \(\)"),
        (lambda: mx.quantize(X, implementation="triton"), "mx.quantize: implementation: expected one of"),
        (lambda: mx.quantize_transposed(X[:40]), r"x: expected \[M, N\], M a multiple of 32, got \(40, 128\)"),
        (lambda: mx.quantize_transposed(X[None]), r"x: expected \[M, N\], M a multiple of 32, got \(1, 128, 128\)"),
        (lambda: mx.quantize_transposed(f32(1)), r"x: expected \[M, N\], M a multiple of 32, got \(\)"),
        (lambda: mx.quantize_both(X[0]), r"x: expected \[M, N\], multiples of 32, got \(128,\)"),
        (lambda: mx.quantize_both(X[:, :40]), r"x: expected \[M, N\], multiples of 32, got \(128, 40\)"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.full
@pytest.mark.parametrize(
    "call",
    [
        lambda x, **how: mx.quantize(x[:31, :32], **how),
        lambda x, **how: mx.quantize(x[:0], **how),
        lambda x, **how: mx.quantize_transposed(x[:64], **how),
        lambda x, **how: mx.quantize_transposed(x[:, :48], **how),
        lambda x, **how: mx.quantize_both(x[:, :96], **how),
    ],
)
def test_what_the_kernels_cannot(call, monkeypatch):
    """Asked for, a kernel refuses; where it would have been chosen, the reference runs and says so."""
    x = normal((128, 128))
    with pytest.raises(NotImplementedError, match=r"the kernel needs .*, got .*; use implementation=None"):
        call(x, implementation="mosaic")
    monkeypatch.setattr(dispatch, "automatic", lambda device=None: "mosaic")
    dispatch._say_once.cache_clear()
    with pytest.warns(UserWarning, match="using XLA's instead"):
        found = call(x)
    same_bits(found, call(x, implementation="xla"))
