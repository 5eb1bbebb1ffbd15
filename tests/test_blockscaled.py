"""MXFP8 and NVFP4: the formats against numpy, rounding without bias, gradients, and what GPUs would run."""

import functools
import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import small
from small import quick_at

from pallas_kernels import fp8_format, mx, nvfp4_format, nvfp4_quantize
from pallas_kernels.quantize import random_bits
from surojax.numerics import blockscaled as bs
from surojax.planner import aot

pytestmark = pytest.mark.full(after=1)

TOKENS, IN, OUT = 160, 192, 256
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def normal(seed, *shape, dtype=jnp.float32):
    return small.normal(seed, shape, dtype)


def outliers(seed, *shape):
    """Numbers over 60 binades, and a block of zeros: every branch of the scales."""
    x = np.array(normal(seed, *shape)) * np.exp2(np.random.default_rng(seed).integers(-30, 30, shape))
    x[0, :32] = 0
    return x.astype(np.float32)


def relative_error(got, exact):
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    return np.linalg.norm(got - exact) / np.linalg.norm(exact)


def numbers(q):
    scale = 1.0 if q.tensor_scale is None else np.float64(q.tensor_scale)
    return np.float64(bs.dequantise(q)) * scale


# -- The formats, against numpy with ml_dtypes' casts --


def numpy_mxfp8(x):
    blocks = np.float64(x).reshape(x.shape[0], -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    mantissa, exponent = np.frexp(largest)  # largest = mantissa * 2^exponent, 0.5 <= mantissa < 1; 448 = 0.875 * 2^9
    exponent = np.where(largest == 0, -126, np.maximum(exponent - 9 + (mantissa > 0.875), -126))
    values = (blocks / 2.0**exponent).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return values.reshape(x.shape).astype(np.float32), 2.0 ** exponent[..., 0]


def nearest_e2m1(x):
    return np.float32(x).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)


def numpy_nvfp4(x, rows):
    """Blocks of `rows` x 16. The paper's formulas, in float32 and the order of the code, or ties fall differently."""
    x = np.float32(x)
    tensor_scale = np.abs(x).max() * np.float32(1 / 2688)
    blocks = x.reshape(x.shape[0] // rows, rows, -1, 16)
    ideal = np.abs(blocks).max((1, 3), keepdims=True) * (np.float32(1) / (np.float32(6) * tensor_scale))
    scales = np.minimum(ideal, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    with np.errstate(divide="ignore"):
        inverse = np.where(scales == 0, np.float32(0), np.float32(1) / scales * (np.float32(1) / tensor_scale))
    values = nearest_e2m1(np.clip(blocks * inverse, -6, 6)).reshape(x.shape)
    return values, np.repeat(scales[:, 0, :, 0], rows, axis=0), tensor_scale


@pytest.mark.parametrize("make", (normal, outliers))
def test_mxfp8_is_numpys(make):
    x = make(0, 64, 128)
    values, scales = numpy_mxfp8(x)
    q = jax.jit(bs.quantise_mxfp8)(x)
    np.testing.assert_array_equal(q.values, values)
    np.testing.assert_array_equal(q.scales, scales)
    assert np.abs(values).max() <= 448


@pytest.mark.parametrize(
    "largest, scale", [(448.0, 1.0), (448.0001, 2.0), (224.0, 0.5), (1.75, 2.0**-8), (1.0, 2.0**-8)]
)
def test_mxfp8_scale_is_the_smallest_that_clips_nothing(largest, scale):
    q = jax.jit(bs.quantise_mxfp8)(np.full((1, 32), largest, np.float32))
    assert q.scales[0, 0] == scale


@pytest.mark.parametrize("make", (normal, outliers))
def test_nvfp4_is_numpys(make):
    x = make(1, 64, 128)
    for q, expected in (
        (jax.jit(bs.quantise_nvfp4)(x), numpy_nvfp4(x, 1)),
        (jax.jit(bs.quantise_nvfp4_weights)(x)[0], numpy_nvfp4(x, 16)),
    ):
        for a, b in zip(q, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_weights_are_the_same_numbers_in_both_directions():
    rows, columns = jax.jit(bs.quantise_nvfp4_weights)(normal(2, 64, 128))
    np.testing.assert_array_equal(numbers(rows), numbers(columns).T)


@pytest.mark.parametrize("values", (False, True))
def test_rounding_to_e4m3_is_the_cast(values):
    """All float32 between neighbours' middles would be too many: every e4m3 number, middles, and their neighbours."""
    every = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = (every[1:] + every[:-1]) / 2
    x = np.concatenate([every, *(np.nextafter(middles, np.float32(to)) for to in (0, 1e9)), middles])
    x = -x if values else x
    np.testing.assert_array_equal(jax.jit(fp8_format.to_e4m3)(x), x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    to_e2m1 = jax.jit(lambda x: nvfp4_format.rounded_to_e2m1(x, jnp.float32(1), None))
    np.testing.assert_array_equal(to_e2m1(x), nearest_e2m1(np.clip(x, -6, 6)))


def test_rounding_up_to_e4m3_is_the_next_number():
    every = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    below = np.nextafter(every, np.float32(0))
    np.testing.assert_array_equal(jax.jit(fp8_format.up_to_e4m3)(np.concatenate([every, below])), np.tile(every, 2))


@pytest.mark.parametrize("bad", (np.nan, np.inf))
def test_what_is_not_finite_is_not_lost(bad):
    x = np.array(normal(3, 4, 64))
    x[1, 5] = bad
    quantisers = bs.quantise_mxfp8, bs.quantise_nvfp4, lambda x: bs.quantise_nvfp4(x, jnp.uint32(0))
    squares = jax.jit(lambda x: [bs.product(q, q, jnp.float32, True) for q in (f(x) for f in quantisers)])
    for y in squares(x):
        assert not np.isfinite(y[1]).any()


# -- Stochastic rounding --


def test_stochastic_rounding_is_right_on_average():
    x = np.linspace(-6, 6, 97, dtype=np.float32)
    n = 1 << 14
    places, seeds = jnp.arange(97, dtype=jnp.uint32), jnp.arange(n, dtype=jnp.uint32)
    rounded = lambda dither: nvfp4_format.rounded_to_e2m1(jnp.asarray(x), jnp.float32(1), dither)
    of_seed = lambda seed: [rounded(dither) for dither in nvfp4_format.dithers(seed, places)]
    both = jax.jit(jax.vmap(of_seed))(seeds[::2])
    draws = np.concatenate(np.float64(both))
    below = np.array([np.max(np.append(GRID, -GRID)[np.append(GRID, -GRID) <= v]) for v in x])
    above = np.array([np.min(np.append(GRID, -GRID)[np.append(GRID, -GRID) >= v]) for v in x])
    assert ((draws == below) | (draws == above)).all()
    # The mean of n draws that differ from x by (below - x) or (above - x): 5 standard deviations, 97 times.
    deviation = np.sqrt((above - x) * (x - below) / n)
    assert (np.abs(draws.mean(0) - x) <= 5 * deviation + 1e-6).all()


@pytest.mark.full
def test_gradient_of_inputs_is_right_on_average():
    """Also that of the block's largest numbers, which a block scale rounded to nearest would clip."""
    n = 512
    g, w = normal(4, 32, 64), normal(5, 64, 32)
    x = jnp.zeros((32, 32))
    exact = np.float64(g) @ numbers(bs.quantise_nvfp4_weights(w)[0])
    dx = lambda seed: jax.vjp(lambda x: bs.nvfp4_linear(x, w, seed, emulate=True), x)[1](g)[0]
    draws = np.float64(jax.jit(jax.vmap(dx))(jnp.arange(n, dtype=jnp.uint32)))
    deviation = draws.std(0) / np.sqrt(n)
    score = (draws.mean(0) - exact) / deviation
    assert np.abs(score).max() < 5  # 1024 numbers that are about normal: beyond 5 once in 1700 times
    assert abs(np.sqrt((score**2).mean()) - 1) < 0.15  # and not far too good either: 1024 of them, 2 % each way

    largest = np.zeros((16, 64), np.float32)
    largest[:, ::16] = np.linspace(1, 1.9, 64).reshape(16, 4)  # each block's only number, for any mantissa
    q = jax.vmap(lambda seed: bs.dequantise(s := bs.quantise_nvfp4(largest, seed)) * s.tensor_scale)
    mean = np.float64(q(jnp.arange(4096, dtype=jnp.uint32))).mean(0)
    # Between 4 and 6 a draw is at most 1/3 of the number away from it: deviation at most 1/6, of the mean 0.26 %.
    np.testing.assert_allclose(mean[:, ::16], largest[:, ::16], rtol=5 * 0.0026)


def test_random_numbers_are_uniform_and_differ_with_the_seed():
    index = jnp.arange(2**15, dtype=jnp.uint32).reshape(256, 128)
    dithers = jax.jit(nvfp4_format.dithers)
    pairs = ((np.float64(u) for u in dithers(jnp.uint32(seed), index)) for seed in (1, 2))
    a, b = (np.stack([*two], axis=-1).reshape(256, 256) + 0.5 for two in pairs)
    for u in (a, b):
        counts = np.histogram(u, 64, (0, 1))[0]
        assert ((counts - 1024) ** 2 / 1024).sum() < 63 + 5 * np.sqrt(2 * 63)  # chi-square with 63 degrees of freedom
    neighbours = (a[:, 1:], a[:, :-1]), (a[1:], a[:-1]), (a, b)
    for x, y in neighbours:
        assert abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) < 5 / 256  # of 2^16 pairs: deviation 1/256


# -- The random Hadamard transform --

rotate = jax.jit(nvfp4_format.rotate)


def test_rotation_leaves_the_product_as_it_is():
    x, g = (np.float32(np.random.default_rng(s).integers(-8, 9, (64, 48))) for s in (0, 1))
    for seed in (0, 7):
        rotated = [rotate(jnp.asarray(t), jnp.uint32(seed)) for t in (g, x)]
        # Small whole numbers and quarters of their sums: every step is exact in float32.
        np.testing.assert_array_equal(rotated[0] @ rotated[1].T, g.T @ x)
        signs = 1 - 2 * (int(random_bits(jnp.uint32(seed), jnp.uint32(0))) >> np.arange(16) & 1)
        hadamard = np.array([[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)]) / 4
        expected = np.einsum("akn,k,kj->naj", x.reshape(4, 16, 48), signs, hadamard).reshape(48, 64)
        np.testing.assert_array_equal(rotated[1], expected)


def test_rotation_spreads_an_outlier_and_depends_on_the_seed():
    x = np.eye(16, dtype=np.float32)[:, 3:4]
    np.testing.assert_array_equal(np.abs(rotate(x, jnp.uint32(0))), np.full((1, 16), 0.25))
    y = normal(6, 16, 1)
    assert not np.array_equal(rotate(y, jnp.uint32(0)), rotate(y, jnp.uint32(1)))


# -- Linear layers --


def linear(name, emulate=True, frozen=False):
    if name == "mxfp8":
        return lambda x, w: bs.mxfp8_linear(x, w, emulate=emulate, frozen=frozen)
    return lambda x, w: bs.nvfp4_linear(x, w, jnp.uint32(3), salt=2, emulate=emulate, frozen=frozen)


def products(name, emulate=True, tokens=TOKENS, dtype=jnp.float32, frozen=False):
    """y, dx and dw, and the arguments."""
    x, w, g = normal(7, tokens, IN, dtype=dtype), normal(8, OUT, IN, dtype=dtype), normal(9, tokens, OUT, dtype=dtype)

    @jax.jit
    def run(x, w, g):
        y, backward = jax.vjp(linear(name, emulate, frozen), x, w)
        return y, *backward(g)

    return run(x, w, g), (x, w, g)


def exact(x, w, g):
    x, w, g = np.float64(x), np.float64(w), np.float64(g)
    return x @ w.T, g @ w, g.T @ x


# The error of a Gaussian operand, relative to it (root of mean squares). MXFP8: steps of 2^(e-3) for numbers from 2^e
# to 2^(e+1), each step's error evenly spread; scales are powers of two and change none of that. NVFP4: no such formula;
# `numpy_nvfp4` on 16 million other numbers, 1 x 16 and 16 x 16; stochastic: the variance (above - v) (v - below) there.
MXFP8 = math.sqrt(
    sum(4.0 ** (e - 3) / 12 * (math.erf(2 ** (e + 0.5)) - math.erf(2 ** (e - 0.5))) for e in range(-20, 4))
)
ROWS, SQUARES, STOCHASTIC = 0.0951, 0.1113, 0.148
ERRORS = {"mxfp8": [(MXFP8, MXFP8)] * 3, "nvfp4": [(ROWS, SQUARES), (STOCHASTIC, SQUARES), (STOCHASTIC, ROWS)]}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_the_products_are_those_of_the_operands(name):
    got, args = products(name)
    for y, right, (a, b) in zip(got, exact(*args), ERRORS[name], strict=True):
        # Errors of two operands, independent, add up in squares. 4 %: for these few numbers they vary by about 1 %.
        assert relative_error(y, right) == pytest.approx(np.sqrt(a**2 + b**2 + (a * b) ** 2), rel=0.04)


@pytest.mark.parametrize("name", ERRORS)
def test_a_frozen_matrix_changes_no_bit_of_the_other_products(name):
    (y, dx, _), _ = products(name)
    found, _ = products(name, frozen=True)
    np.testing.assert_array_equal(found[0], y)
    np.testing.assert_array_equal(found[1], dx)
    assert not found[2].any()


@pytest.mark.parametrize("name", ERRORS)
def test_emulated_and_real_products_have_the_same_operands(name, monkeypatch):
    """jax.nn.scaled_matmul takes the emulation's numbers; on CPU it dequantises them."""
    taken = []
    real = jax.nn.scaled_matmul

    def spy(*args, **options):
        taken.append(args)
        return real(*args, **options)

    monkeypatch.setattr(jax.nn, "scaled_matmul", spy)
    quantise = jax.jit(bs.quantise_mxfp8 if name == "mxfp8" else bs.quantise_nvfp4)
    q = [quantise(normal(s, 64, 96)) for s in (0, 1)]
    bs.product(*q, jnp.float32, False)
    for i in (0, 1):
        np.testing.assert_array_equal(np.float32(taken[0][i][0]), q[i].values)
        np.testing.assert_array_equal(np.float32(taken[0][2 + i][0]), q[i].scales)
    dtypes = [x.dtype for x in taken[0]]
    if name == "mxfp8":
        assert dtypes == [jnp.float8_e4m3fn] * 2 + [jnp.float8_e8m0fnu] * 2
    else:
        assert dtypes == [jnp.float4_e2m1fn] * 2 + [jnp.float8_e4m3fn] * 2
    for emulated, found in zip(products(name)[0], products(name, emulate=False)[0], strict=True):
        # The same exact products, added up in another order: float32 rounding of sums of at most 256 numbers.
        np.testing.assert_allclose(emulated, found, rtol=1e-5, atol=1e-5 * np.abs(found).max())


@pytest.mark.full
@pytest.mark.parametrize("kernels, tokens", quick_at([("mosaic", 128), ("mosaic", 64), ("auto", 128), ("auto", 21)], 0))
def test_the_kernels_change_nothing(kernels, tokens, monkeypatch):
    """mxfp8_linear with operands made by `pallas_kernels.mx`, in Pallas' interpreter or by the reference (auto)."""
    made, taken, real = [], [], jax.nn.scaled_matmul

    def spied(name):
        f = getattr(mx, name)
        how = {"interpret": True} if kernels == "mosaic" else {}
        monkeypatch.setattr(mx, name, lambda x, **more: made.append((name, x.shape)) or f(x, **more, **how))

    def product(*args, **options):
        taken.append([x.dtype for x in args])
        return real(*args, **options)

    for name in ("quantize", "quantize_transposed", "quantize_both"):
        spied(name)
    monkeypatch.setattr(jax.nn, "scaled_matmul", product)
    x, w, g = normal(7, tokens, 64), normal(8, 128, 64), normal(9, tokens, 128)

    def all_three(**how):
        @jax.jit
        def run(x, w, g):
            y, backward = jax.vjp(lambda x, w: bs.mxfp8_linear(x, w, **how), x, w)
            return y, *backward(g)

        return run(x, w, g)

    implementation = None if kernels == "auto" else kernels
    found, left = all_three(implementation=implementation), list(made)
    filled = -(-tokens // 128) * 128
    both = (
        [("quantize_both", g.shape)]
        if tokens == filled
        else [("quantize", g.shape), ("quantize_transposed", (filled, 128))]
    )
    columns = [("quantize_transposed", w.shape), ("quantize_transposed", (filled, 64))]
    assert left == [("quantize", x.shape), ("quantize", w.shape), *both, *columns]
    assert taken == [[jnp.float8_e4m3fn] * 2 + [jnp.float8_e8m0fnu] * 2] * 3
    for a, b in zip(found, all_three(), strict=True):
        np.testing.assert_array_equal(a, b)  # the same operands to the bit, and the same products of them
    emulated = all_three(implementation=implementation, emulate=True)
    assert made == left  # emulated products keep their float32 operands
    for a, b in zip(emulated, all_three(emulate=True), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.full
@pytest.mark.parametrize("tokens", quick_at([(128,), (21,)], 0))
def test_the_kernels_of_nvfp4_change_nothing(tokens, monkeypatch):
    """nvfp4_linear with what `pallas_kernels.nvfp4_quantize` makes, here by its references, and from which arrays."""
    made = []

    def spied(name, f):
        monkeypatch.setattr(
            nvfp4_quantize, name, lambda x, *args, **how: made.append((name, x.shape)) or f(x, *args, **how)
        )

    for name in ("", "_rotated", "_both", "_weights", "_weights_transposed"):
        spied(f"quantize{name}", getattr(nvfp4_quantize, f"quantize{name}"))
    x, w, g = normal(7, tokens, 64), normal(8, 128, 64), normal(9, tokens, 128)

    def all_three(x, w, g, **how):
        run = lambda x, w: bs.nvfp4_linear(x, w, jnp.uint32(3), **how)
        y, backward = jax.vjp(run, x, w)
        return y, *backward(g)

    found = jax.jit(functools.partial(all_three, implementation=None))(x, w, g)
    both = [("quantize_both", g.shape)]
    if tokens == 21:
        both = [("quantize", g.shape), ("quantize_rotated", (128, 128))]
    forward = [("quantize", x.shape), ("quantize_weights", w.shape)]
    assert made == [*forward, *both, ("quantize_rotated", (128, 64)), ("quantize_weights_transposed", w.shape)]
    for a, b in zip(found, jax.jit(all_three)(x, w, g), strict=True):
        np.testing.assert_array_equal(a, b)  # the same operands to the bit, and the same products of them
    made.clear()
    jax.eval_shape(functools.partial(all_three, implementation=None, emulate=True), x, w, g)
    assert not made  # emulated products keep their float32 operands


@pytest.mark.parametrize("name", ERRORS)
def test_results_have_the_dtypes_of_their_arguments(name):
    half = products(name, dtype=jnp.bfloat16)[0]
    assert [y.dtype for y in half] == [jnp.bfloat16] * 3
    full = products(name)[0]
    for y, z, (a, b) in zip(half, full, ERRORS[name], strict=True):
        # Rounding the arguments to 8 bits may move numbers to the neighbour in the format: less than its own error.
        assert relative_error(y, z) < np.sqrt(a**2 + b**2)


@pytest.mark.parametrize("name", ERRORS)
def test_tokens_are_filled_up_to_blocks(name):
    x, w, g = normal(7, 3, 7, IN), normal(8, OUT, IN), normal(9, 3, 7, OUT)
    run = lambda x, g: jax.vjp(linear(name), x, w)[1](g)
    fill = lambda t: jnp.pad(t.reshape(21, -1), ((0, 11), (0, 0)))
    (dx, dw), (dx_filled, dw_filled) = jax.jit(lambda x, g: (run(x, g), run(fill(x), fill(g))))(x, g)
    np.testing.assert_array_equal(dx.reshape(21, -1), dx_filled[:21])
    np.testing.assert_array_equal(dw, dw_filled)


@pytest.mark.full
def test_only_gradients_depend_on_seed_and_salt():
    x, w, g = normal(7, 32, IN), normal(8, OUT, IN), normal(9, 32, OUT)

    @functools.partial(jax.jit, static_argnums=1)
    def run(seed, salt):
        y, backward = jax.vjp(lambda x, w: bs.nvfp4_linear(x, w, seed, salt=salt, emulate=True), x, w)
        return y, *backward(g)

    first, again, *others = (run(jnp.int32(seed), salt) for seed, salt in ((0, 0), (0, 0), (1, 0), (0, 1)))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    for other in others:
        np.testing.assert_array_equal(first[0], other[0])
        assert not np.array_equal(first[1], other[1])
        assert not np.array_equal(first[2], other[2])


@pytest.mark.parametrize("name", ERRORS)
def test_under_shard_map_weight_gradients_are_added_up(name):
    """Tokens split over devices, weights not: the gradient of the weights is the sum, as of any linear layer."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
    x, w, g = normal(7, 64, IN), normal(8, OUT, IN), normal(9, 64, OUT)
    both = jax.jit(
        jax.shard_map(
            lambda x, w, g: jax.vjp(linear(name), x, w)[1](g),
            mesh=mesh,
            in_specs=(jax.P("d"), jax.P(), jax.P("d")),
            out_specs=(jax.P("d"), jax.P()),
        )
    )(x, w, g)
    half = jax.jit(lambda x, w, g: jax.vjp(linear(name), x, w)[1](g))
    halves = [half(x[h], w, g[h]) for h in (slice(32), slice(32, 64))]
    np.testing.assert_allclose(both[0], np.concatenate([h[0] for h in halves]), rtol=1e-6, atol=1e-4)
    np.testing.assert_allclose(both[1], halves[0][1] + halves[1][1], rtol=1e-6, atol=1e-4)


@pytest.mark.full(after=99)
@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize(
    "x, w, words",
    [
        ((4, 48), (64, 48), r"multiples of 32 as out and in, got \[64, 48\]"),
        ((4, 64), (40, 64), r"multiples of 32 as out and in, got \[40, 64\]"),
        ((4, 64), (64, 32), r"x \[..., in\] and w \[out, in\], got \[4, 64\] and \[64, 32\]"),
        ((), (64, 32), r"x \[..., in\] and w \[out, in\], got \[\] and \[64, 32\]"),
        ((4, 64), (2, 64, 64), r"x \[..., in\] and w \[out, in\], got \[4, 64\] and \[2, 64, 64\]"),
    ],
)
def test_other_widths_are_refused(name, x, w, words):
    with pytest.raises(ValueError, match=words):
        linear(name)(jnp.zeros(x), jnp.zeros(w))


def test_scales_of_kernels_are_in_8_bits_already():
    scales = jnp.float32([2.0**-127, 0.5, 1, 2.0**100, jnp.nan])
    in_8_bits = scales.astype(jnp.float8_e8m0fnu)
    for found in (bs._e8m0(scales[1:]), bs._e8m0(in_8_bits)[1:]):
        assert found.dtype == in_8_bits.dtype and np.array_equal(np.float32(found), scales[1:], equal_nan=True)


def test_other_seeds_are_refused():
    for seed in (jnp.zeros(2, jnp.uint32), jnp.float32(0)):
        with pytest.raises(ValueError, match="seed: expected a uint32 or int32"):
            bs.nvfp4_linear(jnp.zeros((4, 32)), jnp.zeros((32, 32)), seed, emulate=True)


# -- What a GPU would run --

COMPILE = """
import json, re, sys
import jax, jax.numpy as jnp, numpy as np
from surojax.planner import aot
from surojax.numerics import blockscaled as bs

mesh = jax.sharding.Mesh(np.array(aot.devices(sys.argv[1], 2)), ("d",))
on = lambda p: jax.NamedSharding(mesh.abstract_mesh, p)
shape = lambda s, p, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype, sharding=on(p))
T = jax.P("d")
kernels, tokens, i, o = sys.argv[2], *map(int, sys.argv[3:])


def run(x, w, g, seed):
    results = []
    mxfp8 = lambda x, w: bs.mxfp8_linear(x, w, implementation=None if kernels == "auto" else kernels)
    nvfp4 = lambda x, w: bs.nvfp4_linear(x, w, seed, implementation=None if kernels == "auto" else kernels)
    for f in (mxfp8, nvfp4):
        y, backward = jax.vjp(f, x, w)
        results += [y, *backward(g)]
    return results


split = jax.shard_map(run, mesh=mesh, in_specs=(T, jax.P(), T, jax.P()), out_specs=[T, T, jax.P()] * 2)
jitted = jax.jit(split, out_shardings=[on(T), on(T), on(jax.P())] * 2)
seed = shape((), jax.P(), jnp.uint32)
args = shape((2, tokens, i), T), shape((o, i), jax.P()), shape((2, tokens, o), T), seed
text = aot.compile_for(jitted, args, mesh).text
calls = re.findall(r'= \\((\\w+)\\[[^=]*custom-call\\(.*custom_call_target="__cudnn.blockScaledDot"', text)
print(json.dumps([sorted(calls), len(re.findall(r" dot\\(", text)), text.count('custom_call_target="mosaic_gpu')]))
"""


@pytest.mark.skipif(not aot.available(), reason=f"no compiler for GPUs here: {aot.EXTRA}")
@pytest.mark.parametrize(
    # Made by kernels: of MXFP8 x and w, either way, and g; the odd weight's rows. Of NVFP4 the same, by two each.
    "gpu, kernels, sizes, made",
    [
        ("b200", "mosaic", (512, 1024, 2048), 5 + 10),
        ("rtx5090", "auto", (17, 96, 160), 1),
        ("b200", "xla", (64, 96, 160), 0),
    ],
)
@pytest.mark.full
def test_all_three_products_are_block_scaled_on_blackwell(gpu, kernels, sizes, made):
    """In a process of its own, since a process compiles for one kind of GPU; within shard_map, on two of them."""
    command = [sys.executable, "-c", COMPILE, gpu, kernels, *map(str, sizes)]
    done = subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    calls, dots, fused = json.loads(done.stdout.splitlines()[-1])
    assert calls == ["bf16"] * 3 + ["f32"] * 3  # MXFP8's results, and NVFP4's, whose tensor scale is yet to come
    assert (dots, fused) == (0, made)
