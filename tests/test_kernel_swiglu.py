"""The SwiGLU kernels in the interpreter against the reference in jnp, and the reference against autodiff in float64.

Kernel and reference evaluate the same float32 formula, but exp may be another approximation where it is fused: 1e-6 of
a result for its few roundings. Stored in bfloat16 (or FP8) that moves a number across at most one rounding boundary:
2^-8 (2^-3, 2^-2) of it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import KERNEL, REFERENCE, normal

from pallas_kernels import dispatch, fp8_format, swiglu
from pallas_kernels.shapes import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.full(after=1)]
f32, bf16 = jnp.float32, jnp.bfloat16
E4M3, E5M2 = fp8_format.FP8
ROUNDING = {f32: 1e-6, bf16: 2.0**-8, E4M3.type: 2.0**-3, E5M2.type: 2.0**-2}


def example(shape, dtype=bf16, count=2):
    """Numbers from saturated gates to small ones."""
    numbers = 4 * np.asarray(normal(sum(shape), (count, *shape)))
    return [jnp.asarray(x.astype(dtype)) for x in numbers]


def close(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        tiny = 2.0**-16 if a.dtype in fp8_format.FP8 else 1e-6  # where FP8 numbers are subnormal the step is constant
        # On a GPU, XLA takes the largest magnitude of numbers before it rounds them to bfloat16.
        rtol = ROUNDING[a.dtype.type] if a.ndim or jax.default_backend() == "cpu" else ROUNDING[bf16]
        np.testing.assert_allclose(a.astype(f32), b.astype(f32), rtol=rtol, atol=tiny)


def pair(f, *arrays, **how):
    """Kernel and reference, each jitted."""
    kernel, reference = (jax.jit(functools.partial(f, **how, **which)) for which in (KERNEL, REFERENCE))
    return kernel(*arrays), reference(*arrays)


WIDTHS = [(2, m.intermediate) for m in (MODELS["gpt2"], MODELS["llama7b"], MODELS["qwen7b"])]


@pytest.mark.parametrize("shape, dtype", [*((s, bf16) for s in WIDTHS), ((2, 3, 640), f32), ((128,), jnp.float32)])
def test_forward(shape, dtype):
    ours, reference = pair(swiglu.forward, *example(shape, dtype))
    close(ours, reference)
    assert ours.absmax == jnp.max(jnp.abs(ours.y.astype(f32)))  # of what is stored, exactly


@pytest.mark.parametrize("shape, dtype", [*((s, bf16) for s in WIDTHS), ((2, 3, 640), f32)])
def test_backward(shape, dtype):
    ours, reference = pair(swiglu.backward, *example(shape, dtype, 3))
    close(ours, reference)
    assert ours.absmax_gate == jnp.max(jnp.abs(ours.d_gate.astype(f32)))
    assert ours.absmax_up == jnp.max(jnp.abs(ours.d_up.astype(f32)))


@pytest.mark.parametrize("instructions", [True, False])
@pytest.mark.parametrize("target", fp8_format.FP8)
def test_fp8_results(target, instructions, monkeypatch):
    """Scaled so that some are clipped; absmax is that of the float32 values; also as on a GPU without FP8."""
    monkeypatch.setattr(fp8_format, "has_instructions", lambda: instructions)
    dy, gate, up = example((2, 768), bf16, 3)
    scales = f32(20 / dispatch.largest(target)), f32(10 / dispatch.largest(target))
    forward = lambda g, u, s, **how: swiglu.forward(g, u, out_dtype=target, out_scale=s, **how)
    ours, reference = pair(forward, gate, up, scales[0])
    close(ours, reference)
    assert ours.y.dtype == target and jnp.max(jnp.abs(ours.y.astype(f32))) == dispatch.largest(target)
    wide = jax.jit(swiglu.forward)(gate.astype(f32), up.astype(f32))
    close([ours.absmax], [wide.absmax])
    assert wide.absmax > 20
    backward = lambda d, g, u, a, b, **how: swiglu.backward(d, g, u, out_dtype=target, out_scales=(a, b), **how)
    ours, reference = pair(backward, dy, gate, up, *scales)
    close(ours, reference)
    wide = jax.jit(swiglu.backward)(*(x.astype(f32) for x in (dy, gate, up)))
    close([ours.absmax_gate, ours.absmax_up], [wide.absmax_gate, wide.absmax_up])
    # Each gradient with its own scale: the numbers that were not clipped come back within FP8's rounding.
    for name, scale in zip(("d_gate", "d_up"), scales, strict=True):
        y, x8 = getattr(wide, name), getattr(ours, name).astype(f32) * scale
        kept = (abs(y) < scale * dispatch.largest(target)) & (abs(y) > 0.01)
        np.testing.assert_allclose(x8[kept], y[kept], rtol=ROUNDING[target.type] / 2 + 1e-6)


@pytest.mark.parametrize("how", [KERNEL, REFERENCE])
def test_gradients(how):
    """Forward and backward against autodiff of jax.nn.silu(gate) * up in float64."""
    dy, gate, up = example((3, 128), f32, 3)
    y = jax.jit(functools.partial(swiglu.forward, **how))(gate, up).y
    d_gate, d_up, *_ = jax.jit(functools.partial(swiglu.backward, **how))(dy, gate, up)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in (gate, up, dy)]
        plain = lambda g, u: g / (1 + jnp.exp(-g)) * u
        expected, of_dy = jax.jit(lambda g, u, dy: (plain(g, u), jax.vjp(plain, g, u)[1](dy)))(*wide)
        expected = [np.asarray(x) for x in (expected, *of_dy)]
    # 1 + gate (1 - s) cancels where it crosses zero: an error of a few float32 roundings of dy up there, 1e-5 at most.
    for ours, true in zip((y, d_gate, d_up), expected, strict=True):
        np.testing.assert_allclose(ours, true, rtol=2e-6, atol=1e-5)


def test_extremes():
    """Saturated gates give the limits, not NaN; NaN and infinity are seen by absmax."""
    gate = jnp.asarray([-1e4, -100, 0, 100, 1e4] * 128, f32)
    ones = jnp.ones_like(gate)
    for how in (KERNEL, REFERENCE):
        forward, backward = (jax.jit(functools.partial(f, **how)) for f in (swiglu.forward, swiglu.backward))
        y = forward(gate, ones).y[:5]
        np.testing.assert_allclose(y, [0, 0, 0, 100, 1e4], atol=1e-30)
        grads = backward(ones, gate, ones)
        np.testing.assert_allclose(grads.d_gate[:5], [0, 0, 0.5, 1, 1], atol=1e-30)
        assert jnp.isnan(forward(gate.at[7].set(jnp.nan), ones).absmax)
        assert forward(gate.at[8].set(jnp.inf), ones).absmax == jnp.inf


X, SCALE = jnp.ones((2, 128), bf16), f32(1)


@pytest.mark.full(after=100)  # refused in milliseconds
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: swiglu.forward(X, X[:1]), r"shape of up: expected that of gate, \(2, 128\), got \(1, 128\)"),
        (lambda: swiglu.forward(X, X.astype(f32)), "dtype of up: expected that of gate, bfloat16, got float32"),
        (lambda: swiglu.forward(X.astype(jnp.int32), X), "dtype of gate: expected .*, got int32"),
        (lambda: swiglu.forward(X, X, out_dtype=jnp.int8, out_scale=SCALE), "out_dtype: expected None, float8_e4m3fn"),
        (lambda: swiglu.forward(X, X, out_dtype=E4M3), r"scale: expected float32 \[\] with out_dtype"),
        (lambda: swiglu.forward(X, X, out_scale=SCALE), r"scale: expected .* None without, got float32 \(\)"),
        (lambda: swiglu.backward(X[:1], X, X), r"shape of dy: .* got \(1, 128\)"),
        (lambda: swiglu.backward(X, X, X, out_dtype=E5M2, out_scales=(SCALE,)), "out_scales: expected two"),
        (lambda: swiglu.backward(X, X, X, out_dtype=E5M2, out_scales=(SCALE, None)), r"scale: expected float32 \[\]"),
        (lambda: swiglu.forward(X, X, implementation="cuda"), "implementation: expected one of"),
        (lambda: swiglu.forward(X[:0], X[:0]), r"not empty, got \(0, 128\)"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_what_the_kernels_cannot(monkeypatch):
    """Asked for, a kernel refuses odd sizes; where it would have been chosen, the reference runs and says so."""
    gate, up = example((3, 100))
    with pytest.raises(NotImplementedError, match=r"needs a multiple of 128 numbers.*, got \(3, 100\)"):
        swiglu.forward(gate, up, implementation="mosaic")
    monkeypatch.setattr(dispatch, "automatic", lambda device=None: "mosaic")
    dispatch._say_once.cache_clear()
    with pytest.warns(UserWarning, match="using XLA's instead"):
        y = swiglu.forward(gate, up).y
    np.testing.assert_array_equal(y, swiglu.forward(gate, up, implementation="xla").y)
