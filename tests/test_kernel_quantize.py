"""Quantisation kernels in the interpreter against their references: equal to the bit, as no sum is taken anywhere.

What the references themselves promise (rounding, clipping, expectations) is checked against numpy and by counting.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import KERNEL, REFERENCE, paired

from pallas_kernels import dispatch, fp8_format, quantize as q
from pallas_kernels.shapes import MODELS
from surojax.numerics.quantized import Quantized, dequantise, quantise

pytestmark = [pytest.mark.gpu, pytest.mark.full(after=1)]
f32, bf16, u32 = jnp.float32, jnp.bfloat16, jnp.uint32
E4M3, E5M2 = fp8_format.FP8
# For shapes that a kernel does not serve, which on a GPU is said.
left_to_xla = pytest.mark.filterwarnings("ignore:.*using XLA's instead")
SPECIAL = (
    0.0,
    -0.0,
    np.nan,
    np.inf,
    -np.inf,
    1e-30,
    -3e38,
    448.0,
    464.0,
    57344.0,
    61440.0,
    2.0**-9,
    2.0**-10,
    2.0**-17,
)


def normal(shape, dtype=f32, seed=0):
    """Normal numbers of many sizes, with the special ones first."""
    x = np.random.default_rng(seed).standard_normal(shape) * 2.0 ** np.linspace(-12, 6, shape[-1])
    x.reshape(-1)[: min(len(SPECIAL), x.size)] = SPECIAL[: x.size]
    return jnp.asarray(x.astype(np.float32).astype(dtype))


def finite(shape, dtype=f32, seed=0):
    x = np.nan_to_num(np.asarray(normal(shape, seed=seed)), nan=1.0, posinf=2.0, neginf=-2.0)
    return jnp.asarray(x.astype(dtype))


def same_bits(ours, expected):
    """Equal dtypes, shapes and bits; NaN of any payload equals NaN."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32)
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.signbit(a)[a == 0], np.signbit(b)[b == 0])


def pair(f, *arrays, **how):
    """Kernel and reference, each jitted."""
    kernel, reference = (jax.jit(functools.partial(f, **how, **which)) for which in (KERNEL, REFERENCE))
    return kernel(*arrays), reference(*arrays)


@pytest.fixture
def no_instructions(monkeypatch):
    """As on an A100: FP8 is made and read with integers."""
    monkeypatch.setattr(fp8_format, "has_instructions", lambda: False)


# --- FP8 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", fp8_format.FP8)
def test_fp8_codes_are_those_of_the_cast(dtype):
    """Every bfloat16, the numbers half way between two neighbours of FP8, and those beside them."""
    every = jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), bf16).astype(f32)
    numbers = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    half = (numbers[1:] + numbers[:-1]) / 2
    x = jnp.concatenate([every, *(jnp.asarray(np.nextafter(half, to)) for to in (half, np.inf, -np.inf))])
    x = jnp.clip(x, -dispatch.largest(dtype), dispatch.largest(dtype))
    known = ~np.isnan(x)
    expected = np.asarray(x)[known].astype(dtype).view(np.uint8)
    codes = jax.jit(functools.partial(fp8_format.code, dtype=dtype))(x)
    np.testing.assert_array_equal(np.asarray(codes)[known], expected)
    np.testing.assert_array_equal(np.asarray(x.astype(dtype)).view(np.uint8)[known], expected)
    assert np.isnan(jax.jit(functools.partial(fp8_format.value, dtype=dtype))(codes)[~known]).all()


@pytest.mark.parametrize("dtype", fp8_format.FP8)
def test_fp8_values(dtype):
    expected = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    found = jax.jit(functools.partial(fp8_format.value, dtype=dtype))(jnp.arange(256, dtype=u32))
    np.testing.assert_array_equal(found, expected)


# --- per tensor -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape, dtype", paired([(3, 768), (2, 3584), (2, 5, 128), (384,)], [bf16, f32]))
def test_absmax_and_cast(shape, dtype):
    x, scale = normal(shape, dtype), f32(0.3)
    same_bits(*pair(q.absmax, finite(shape, dtype)))
    assert jnp.isnan(pair(q.absmax, x)[0]) and pair(q.absmax, finite(shape).at[..., 1].set(-jnp.inf))[0] == jnp.inf
    for target in fp8_format.FP8:
        same_bits(*pair(lambda x, s, target=target, **how: q.cast(x, s, target, **how), x, scale))


@left_to_xla
@pytest.mark.parametrize("n", [128, 4096, 2**16])
def test_nothing_loses_nan(n):
    """jnp.max does, on CPUs, from 4096 numbers on."""
    for at in (0, 5, n - 1):
        x = jnp.ones((3, n)).at[1, at].set(jnp.nan)
        assert jnp.isnan(jax.jit(q.absmax)(x))
        scales = jax.jit(functools.partial(q.quantize_blocks, dtype=jnp.int8))(x).scales
        assert jnp.isnan(scales).sum() == 1 and jnp.isnan(scales[1, at // 128])


@left_to_xla
def test_cast_clips_and_keeps_nan():
    x = jnp.asarray([jnp.nan, jnp.inf, -jnp.inf, 1e6, 2.0, -0.0], f32)
    for dtype, top in ((E4M3, 448), (E5M2, 57344)):
        y = np.asarray(q.cast(x, f32(0.5), dtype).astype(f32))
        np.testing.assert_array_equal(y, [np.nan, top, -top, top, 4, 0])


@pytest.mark.parametrize("shape, dtype", paired([(128, 256), (64, 64), (192, 320), (2, 64, 128)], [bf16, f32]))
def test_cast_transpose(shape, dtype):
    x, scale = finite(shape, dtype), f32(0.01)
    for target in fp8_format.FP8:
        ours, reference = pair(lambda x, s, target=target, **how: q.cast_transpose(x, s, target, **how), x, scale)
        same_bits(ours, reference)
        same_bits(ours.values, jax.jit(functools.partial(q.cast, dtype=target))(x, scale))
        same_bits(ours.transposed, np.asarray(ours.values).reshape(-1, shape[-1]).T)
        same_bits(ours.absmax, jax.jit(q.absmax)(x))


@pytest.mark.parametrize("name", ["cast_transpose", "absmax"])
def test_the_largest_number_counts_wherever_it_is(name):
    """In each of four rows that a word has numbers of, and in the last; of either sign."""
    call = q.absmax if name == "absmax" else lambda x, **how: q.cast_transpose(x, f32(1), E4M3, **how).absmax
    largest = jax.jit(functools.partial(call, **KERNEL))
    for row, column in ((0, 0), (1, 127), (2, 64), (3, 1), (127, 126)):
        x = jnp.full((128, 128), 0.5, bf16).at[row, column].set(2.0 if row % 2 else -2.0)
        assert float(largest(x)) == 2.0, (row, column)


@pytest.mark.parametrize(
    "shape, dtype",
    paired([(128, 128), (64, 192), (320, 64), (128, MODELS["llama1b"].hidden)], [E4M3, E5M2, jnp.dtype(jnp.int8)]),
)
def test_transpose(shape, dtype):
    bits = jax.random.bits(jax.random.key(1), shape, jnp.uint8)
    x8 = jax.lax.bitcast_convert_type(bits, dtype)
    ours = jax.lax.bitcast_convert_type(q.transpose(x8, **KERNEL), jnp.uint8)
    np.testing.assert_array_equal(ours, np.asarray(bits).T)


@pytest.mark.full
@pytest.mark.parametrize("dtype", fp8_format.FP8)
def test_without_instructions(no_instructions, dtype):
    x, scale = normal((64, 256)), f32(0.01)
    same_bits(*pair(lambda x, s, **how: q.cast(x, s, dtype, **how), x, scale))
    same_bits(*pair(lambda x, s, **how: q.cast_transpose(x, s, dtype, **how), x, scale))
    blocks, reference = pair(lambda x, **how: q.quantize_blocks(x, dtype, **how), x)
    same_bits(blocks, reference)
    same_bits(*pair(lambda v, s, **how: q.dequantize_blocks(q.BlockQuantized(v, s), f32, **how), *blocks))


# --- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape, dtype", paired([(8, 128), (2, 4, 768), (3, 2048)], [jnp.int8, E4M3, E5M2]))
def test_blocks(shape, dtype):
    """Special numbers, zeros and the smallest numbers included."""
    x = normal(shape, bf16).at[-1].set(0).at[..., -1, :64].set(1e-38) if len(shape) < 3 else finite(shape)
    blocks, reference = pair(lambda x, **how: q.quantize_blocks(x, dtype, **how), x)
    same_bits(blocks, reference)
    for wide in (bf16, f32):
        back = lambda v, s, wide=wide, **how: q.dequantize_blocks(q.BlockQuantized(v, s), wide, **how)
        same_bits(*pair(back, *blocks))


@left_to_xla
@pytest.mark.parametrize("dtype", [jnp.int8, E4M3])
@pytest.mark.parametrize("shape, block", [((5, 384), 128), ((4, 480), 96), ((2, 3, 40), 40), ((0, 256), 128)])
def test_blocks_are_those_of_surojax(shape, block, dtype):
    """The formula that surojax.quantize had before it called this, jitted, and what it returns now."""
    x = jnp.zeros(shape, bf16) if 0 in shape else finite(shape, bf16, seed=3)
    ours = q.quantize_blocks(x, dtype, block)
    same_bits(tuple(ours), tuple(divided(x, jnp.dtype(dtype), block)))
    same_bits(tuple(ours), tuple(quantise(x, dtype, block)))
    same_bits(q.dequantize_blocks(ours, bf16), dequantise(Quantized(*ours), bf16))


@functools.partial(jax.jit, static_argnums=(1, 2))
def divided(x, dtype, block):
    x = x.astype(f32).reshape(*x.shape[:-1], x.shape[-1] // block, block)
    largest = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    scales = jnp.maximum(jnp.max(jnp.abs(x), axis=-1) / largest, jnp.finfo(f32).tiny)
    x = x / scales[..., None]
    x = jnp.round(x) if dtype == jnp.int8 else x
    return x.astype(dtype).reshape(*x.shape[:-2], x.shape[-2] * block), scales


# --- stochastic rounding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 768), (2, 2, 640), (128,)])
def test_stochastic_round(shape):
    x = normal(shape)
    ours, reference = pair(q.stochastic_round, x, jnp.int32(-5), offset=2**32 - 100)
    same_bits(ours, reference)
    low = np.asarray(x.astype(f32)).view(np.uint32) & 0xFFFF
    moved = np.asarray(ours.astype(f32)).view(np.uint32) & 0xFFFF
    assert (moved == 0).all() and (low != 0).any()
    nan, inf = jnp.isnan(x), jnp.isinf(x)
    assert jnp.isnan(ours[nan]).all() and (ours[inf] == x[inf]).all()


@pytest.mark.parametrize("x", [1.001, -3.1415927, 1e-30, 6.5e37])
def test_rounding_is_unbiased(x):
    """All 2^16 random numbers, each once: the mean of the results is x itself, exactly."""
    x = np.float32(x)
    bits = jnp.arange(2**16, dtype=u32) << u32(16)
    rounded = jax.jit(q.round_with)(np.full(2**16, x), bits)
    assert np.mean(np.asarray(rounded.astype(f32)), dtype=np.float64) == np.float64(x)
    assert len(np.unique(np.asarray(rounded.astype(f32)))) == 2


def test_stochastic_mean():
    """2^16 numbers of one value: the mean is off by at most 5 standard deviations of the binomial distribution."""
    low, step = np.float64(1.0), 2.0**-7
    x = jnp.full(2**16, low + step * 0.3, f32)
    p = (np.float64(x[0]) - low) / step
    for seed in range(4):
        mean = np.mean(np.asarray(jax.jit(q.stochastic_round)(x, jnp.uint32(seed)).astype(f32)), dtype=np.float64)
        assert abs((mean - low) / step - p) < 5 * np.sqrt(p * (1 - p) / 2**16)


def test_offset_continues_the_counter():
    """A matrix rounded in two parts is the matrix rounded at once: shards give the same weights as one device."""
    x, seed = normal((4, 256)), jnp.int32(7)
    rounded = jax.jit(q.stochastic_round)
    whole = np.asarray(rounded(x, seed))
    same_bits((rounded(x[:2], seed), rounded(x[2:], seed, jnp.int32(512))), (whole[:2], whole[2:]))


def test_an_offset_counts_modulo_32_bits():
    """As a number and as an array of either dtype: int32 arrays hold those from 2^31 on as negative ones."""
    x, seed = normal((4, 256)), jnp.int32(7)
    expected = q.stochastic_round(x, seed, 2**32 - 100)
    for offset in (jnp.uint32(2**32 - 100), jnp.int32(-100)):
        same_bits(q.stochastic_round(x, seed, offset), expected)


def test_random_bits():
    """The integers are what they were (a changed hash changes every run), and look random in every bit."""
    bits = np.asarray(q.random_bits(jnp.int32(1), jnp.arange(2**16, dtype=u32)))
    assert bits[:4].tolist() == GOLDEN
    for other in (q.random_bits(jnp.int32(2), jnp.arange(2**16, dtype=u32)), np.roll(bits, 1), bits >> 16):
        flips = np.unpackbits((bits ^ np.asarray(other)).view(np.uint8)).mean()
        # 2^21 fair coins: 5 standard deviations. (bits ^ bits >> 16: the upper half flips with itself.)
        assert abs(flips - 0.5) < 5 * 0.5 / 2**10
    ones = ((bits[:, None] >> np.arange(32, dtype=np.uint32)) & 1).mean(axis=0)
    assert (abs(ones - 0.5) < 5 * 0.5 / 2**8).all()


GOLDEN = [3283721713, 1479341789, 1843144633, 2033393127]  # of seed 1, indices 0..3

# --- what is refused --------------------------------------------------------------------------------------------------

X, SCALE = jnp.ones((64, 128)), f32(1)
CODES = X.astype(E4M3)


@pytest.mark.full(after=100)  # refused in milliseconds
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: q.absmax(jnp.ones(4, jnp.int32)), "expected bfloat16, float16 or float32, not empty, got int32"),
        (lambda: q.absmax(jnp.ones((0, 4))), r"got float32 \(0, 4\)"),
        (lambda: q.absmax(X, implementation="triton"), "implementation: expected one of"),
        (lambda: q.cast(X, SCALE, bf16), "dtype: expected one of float8_e4m3fn, float8_e5m2, got bfloat16"),
        (lambda: q.cast(X, 1.0, E4M3), r"scale: expected float32 \[\]"),
        (lambda: q.cast(X, jnp.ones(2), E4M3), r"scale: expected float32 \[\], got float32 \(2,\)"),
        (lambda: q.cast_transpose(X[0], SCALE, E4M3), r"two dimensions or more, got \(128,\)"),
        (lambda: q.cast_transpose(X, SCALE, jnp.int8), "dtype: expected one of"),
        (lambda: q.transpose(X), r"x8: expected \[M, N\] of 8 bits, got float32 \(64, 128\)"),
        (lambda: q.quantize_blocks(X, bf16), "dtype: expected one of int8"),
        (lambda: q.quantize_blocks(X, jnp.int8, 96), r"block: expected a divisor of n, \(128,\), got 96"),
        (lambda: q.quantize_blocks(X, jnp.int8, 0), r"block: expected a divisor of n, \(128,\), got 0"),
        (lambda: q.quantize_blocks(X[0, 0], jnp.int8, 1), r"block: expected a divisor of n, \(\), got 1"),
        (lambda: q.transpose(CODES[0]), r"x8: expected \[M, N\] of 8 bits, got float8_e4m3fn \(128,\)"),
        *(
            (
                lambda scales=scales: q.dequantize_blocks(q.BlockQuantized(CODES, scales), bf16),
                "scales: expected float32",
            )
            for scales in (X[0], X[:2, :2], X[:, :0], X[:, :2].astype(bf16))
        ),
        (lambda: q.stochastic_round(X, jnp.zeros(2, jnp.int32)), r"seed: expected int32 or uint32 \[\]"),
        (lambda: q.dequantize_blocks(q.BlockQuantized(X, X), bf16), "dtype of values: expected int8"),
        (lambda: q.dequantize_blocks(q.quantize_blocks(X, jnp.int8), jnp.int8), "dtype: expected bfloat16"),
        (lambda: q.dequantize_blocks(q.BlockQuantized(X.astype(E4M3), X[:, :3]), bf16), "scales: expected float32"),
        (lambda: q.stochastic_round(X.astype(bf16), jnp.int32(1)), "x: expected float32"),
        (lambda: q.stochastic_round(X[:0], jnp.int32(1)), r"x: expected float32, not empty, got float32 \(0, 128\)"),
        (lambda: q.stochastic_round(X, f32(1)), r"seed: expected int32 or uint32 \[\]"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
def test_the_smallest_arrays(shape):
    x = jnp.full(shape, -2.0, f32)
    assert float(q.absmax(x)) == 2.0 and float(q.stochastic_round(x, jnp.int32(1)).sum()) == -2.0
    assert float(q.cast(x, f32(1), E4M3).astype(f32).sum()) == -2.0


@pytest.mark.parametrize(
    "call",
    [
        lambda x, **how: q.absmax(x[:, :100], **how),
        lambda x, **how: q.cast(x[:, :100], SCALE, E4M3, **how),
        lambda x, **how: q.cast_transpose(x[:, :96], SCALE, E4M3, **how),
        lambda x, **how: q.transpose(x[:32].astype(jnp.int8), **how),
        lambda x, **how: q.quantize_blocks(x[:, :64], jnp.int8, 64, **how),
        lambda x, **how: q.stochastic_round(x[:, :100], jnp.int32(0), **how),
    ],
)
def test_what_the_kernels_cannot(call, monkeypatch):
    """Asked for, a kernel refuses; where it would have been chosen, the reference runs and says so."""
    x = finite((63, 128))
    with pytest.raises(NotImplementedError, match=r"the kernel needs .*, got .*; use implementation=None"):
        call(x, implementation="mosaic")
    monkeypatch.setattr(dispatch, "automatic", lambda device=None: "mosaic")
    dispatch._say_once.cache_clear()
    with pytest.warns(UserWarning, match="using XLA's instead"):
        found = call(x)
    same_bits(found, call(x, implementation="xla"))
