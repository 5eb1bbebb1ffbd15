"""NVFP4 quantisation in the interpreter against its reference: equal to the bit.

That the reference is the format, and rounds without bias, is checked against numpy in test_blockscaled.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import KERNEL, REFERENCE, quick_at

from pallas_kernels import dispatch, fp8_format, nvfp4_format, nvfp4_quantize
from pallas_kernels.shapes import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.full(after=1)]
f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
SHAPE = (256, 128)  # four programs of tiles
# Of a matrix of three times 64 columns, the last; the largest number is in another.
PART = nvfp4_format.OperandPart(
    lambda absmax: jnp.maximum(absmax, f32(4321)), columns=192, first=lambda: jnp.uint32(128)
)
ROTATION, SEEDS = jnp.uint32(11), (jnp.int32(5), jnp.uint32(6))


def normal(shape=SHAPE, dtype=bf16, seed=0):
    """Normal numbers of many sizes; blocks of zeros and of the smallest numbers, and an outlier."""
    x = np.random.default_rng(seed).standard_normal(shape) * 2.0 ** np.linspace(-12, 6, shape[-1])
    rows = x.reshape(-1, shape[-1])
    rows[:32, :16] = 0
    rows[-1, :16], rows[:16, -1] = -0.0, float(jnp.finfo(dtype).tiny)
    rows[-1, -2] = -3000
    return jnp.asarray(x.astype(np.float32).astype(dtype))


RUN = {
    "rows": nvfp4_quantize.quantize,
    "stochastic": lambda x, **how: nvfp4_quantize.quantize(x, SEEDS[0], **how),
    "rotated": lambda x, **how: nvfp4_quantize.quantize_rotated(x, ROTATION, **how),
    "both": lambda x, **how: nvfp4_quantize.quantize_both(x, ROTATION, SEEDS, **how),
    "weights": nvfp4_quantize.quantize_weights,
    "transposed": nvfp4_quantize.quantize_weights_transposed,
    "part": lambda x, **how: (
        nvfp4_quantize.quantize(x, SEEDS[0], part=PART, **how),
        nvfp4_quantize.quantize_both(x, ROTATION, SEEDS, part=PART, **how),
        nvfp4_quantize.quantize_weights(x, part=PART, **how),
    ),
}


@functools.cache
def jitted(name, kernel):
    """Compiled once a shape and dtype, which is what takes time."""
    return jax.jit(functools.partial(RUN[name], **(KERNEL if kernel else REFERENCE)))


def same_bits(ours, expected):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(*(np.atleast_1d(x).view(np.uint8) for x in (a, b)))


def matrices(found):
    return [found] if isinstance(found, nvfp4_format.NVFP4) else found


def agree(name, x):
    """What both make of x."""
    ours, expected = (jitted(name, kernel)(x) for kernel in (True, False))
    same_bits(ours, expected)
    return expected


# --- kernels and references -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, shape, dtype",
    [
        ("rows", (3, 5, 1024), bf16),
        ("stochastic", (8, MODELS["gpt2"].hidden), f16),
        ("stochastic", (64, 16), f32),
        ("rotated", (128, 64), f32),
        ("weights", (128, 192), f16),
        pytest.param("part", (128, 64), bf16, marks=pytest.mark.full),
    ],
)
def test_sizes_and_dtypes(name, shape, dtype):
    agree(name, normal(shape, dtype))


@pytest.mark.parametrize("name", quick_at([("stochastic",), ("both",), ("transposed",)], 0, 2))
def test_all_kinds_of_numbers(name):
    """Of many sizes; all bfloat16 up to 2^124, but for what XLA on CPUs may take for zero; zeros; subnormal ones."""
    every = jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), bf16)
    size = jnp.abs(every)
    every = jnp.where((size >= jnp.finfo(f32).tiny) & (size < 2.0**124), every, 0).reshape(2, *SHAPE)
    for x in (normal(), *every, jnp.zeros(SHAPE, bf16), jnp.full(SHAPE, 2.0**-130, bf16)):
        for q in matrices(agree(name, x)):
            assert np.isfinite(q.tensor_scale) and np.isfinite(np.float32(q.scales)).all()


@pytest.mark.parametrize("name", quick_at([("stochastic",), ("both",), ("transposed",)], 0, 2))
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_what_is_not_finite(name, bad):
    """The tensor scale says so, for all: what a product makes of it is not finite."""
    for q in matrices(agree(name, normal().at[37, 70].set(bad))):
        assert not np.isfinite(q.tensor_scale)


@pytest.mark.full
def test_without_instructions(monkeypatch):
    """As on an A100: scales are made with integers."""
    monkeypatch.setattr(fp8_format, "has_instructions", lambda: False)
    x = normal((128, 64))
    kernel = jax.jit(functools.partial(nvfp4_quantize.quantize_weights_transposed, **KERNEL))
    same_bits(kernel(x), jitted("transposed", False)(x))


def test_one_is_made_of_the_others():
    """`both` of its parts, w^T of w's numbers, and what is rotated of `rotate` and rows."""
    x = normal()
    rows, rotated = jitted("both", False)(x)
    same_bits(rows, jitted("stochastic", False)(x))
    same_bits(rotated, jax.jit(lambda x: nvfp4_quantize.quantize_rotated(x, ROTATION, SEEDS[1], **REFERENCE))(x))
    by_hand = jax.jit(lambda x: nvfp4_quantize.quantize(nvfp4_format.rotate(x, ROTATION), **REFERENCE))
    same_bits(jitted("rotated", False)(x), by_hand(x))
    w, turned = (jitted(name, False)(x) for name in ("weights", "transposed"))
    np.testing.assert_array_equal(np.float32(w.values), np.float32(turned.values).T)
    np.testing.assert_array_equal(np.float32(w.scales[::16]), np.float32(turned.scales[::16]).T)


@pytest.mark.full
def test_zeros_after_it_change_no_number():
    """Tokens are filled up to what kernels need: random numbers belong to places that are then the same."""
    x = normal((48, 64))
    short, long = (
        nvfp4_quantize.quantize_rotated(y, ROTATION, SEEDS[0], **REFERENCE) for y in (x, jnp.pad(x, ((0, 80), (0, 0))))
    )
    same_bits(short, nvfp4_format.NVFP4(long.values[:, :48], long.scales[:, :3], long.tensor_scale))


# --- what is refused --------------------------------------------------------------------------------------------------

X = jnp.ones((128, 128))


@pytest.mark.full(after=100)  # refused in milliseconds
@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: nvfp4_quantize.quantize(X.astype(jnp.int32)),
            "x: expected bfloat16, float16 or float32, not empty, got int32",
        ),
        (lambda: nvfp4_quantize.quantize(X[:0]), r"x: expected .* not empty, got float32 \(0, 128\)"),
        (lambda: nvfp4_quantize.quantize(X[:, :40]), r"x: expected \[..., N\], N a multiple of 16, got \(128, 40\)"),
        (lambda: nvfp4_quantize.quantize(f32(1)), r"x: expected \[..., N\], N a multiple of 16, got \(\)"),
        (lambda: nvfp4_quantize.quantize(X, f32(1)), r"seed: expected int32 or uint32 \[\], got float32 \(\)"),
        (lambda: nvfp4_quantize.quantize(X, jnp.zeros(2, jnp.int32)), r"seed: expected .* got int32 \(2,\)"),
        (lambda: nvfp4_quantize.quantize_both(X[:40], ROTATION, SEEDS), r"x: expected .*, got \(40, 128\)"),
        (lambda: nvfp4_quantize.quantize_weights(X[0]), r"w: expected \[M, N\], multiples of 16, got \(128,\)"),
        (lambda: nvfp4_quantize.quantize_weights(X[:40]), r"w: expected \[M, N\], multiples of 16, got \(40, 128\)"),
        (lambda: nvfp4_quantize.quantize(X, 3), r"seed: expected int32 or uint32 \[\], got 3"),
        (
            lambda: nvfp4_quantize.quantize(X, implementation="triton"),
            "nvfp4.quantize: implementation: expected one of",
        ),
        (
            lambda: nvfp4_quantize.quantize_rotated(X[:40], ROTATION),
            r"x: expected \[M, N\], M a multiple of 16, got \(40, 128\)",
        ),
        (
            lambda: nvfp4_quantize.quantize_rotated(X[None], ROTATION),
            r"x: expected \[M, N\], M .*, got \(1, 128, 128\)",
        ),
        (
            lambda: nvfp4_quantize.quantize_rotated(X, X),
            r"rotation: expected int32 or uint32 \[\], got float32 \(128, 128\)",
        ),
        (
            lambda: nvfp4_quantize.quantize_both(X[0], ROTATION, SEEDS),
            r"x: expected \[M, N\], multiples of 16, got \(128,\)",
        ),
        (lambda: nvfp4_quantize.quantize_both(X, ROTATION, (SEEDS[0], 2.0)), r"second: expected int32 .*, got 2.0"),
        (lambda: nvfp4_quantize.quantize_weights(X[:, :40]), r"w: expected \[M, N\], multiples of 16, got \(128, 40\)"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, **how: nvfp4_quantize.quantize(x[:31, :32], **how),
        lambda x, **how: nvfp4_quantize.quantize_rotated(x[:64], ROTATION, **how),
        lambda x, **how: nvfp4_quantize.quantize_both(x[:, :96], ROTATION, SEEDS, **how),
        lambda x, **how: nvfp4_quantize.quantize_weights(x[:, :48], **how),
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
        found = jax.eval_shape(call, x)
    assert [y.dtype for y in jax.tree.leaves(found)][:2] == [nvfp4_format.E2M1, fp8_format.E4M3]
