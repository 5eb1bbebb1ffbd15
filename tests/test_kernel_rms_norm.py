"""RMSNorm's kernels in Pallas' GPU interpreter against the reference, and the reference against autodiff."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import KERNEL, REFERENCE, needs, normal

from pallas_kernels import dispatch, fp8_format, rms_norm as op, tiles

pytestmark = [pytest.mark.gpu, pytest.mark.full(after=1)]
f32, bf16 = jnp.float32, jnp.bfloat16
EPS = 1e-5
# The kernel adds up a row in another order: relative errors of some 1e-6 in float32, which move a value that lies
# between two numbers of bf16 to the other one, 2^-7 of it at most.
RTOL = {f32: 2e-5, bf16: 2**-7}


def data(shape, dtype, n=4):
    scale = 1 + np.asarray(normal(n, shape[-1:])) / 4
    return *(normal(seed, shape, dtype) for seed in range(n)), jnp.asarray(scale)


def close(got, expected, rtol, atol=0.0):
    assert got.dtype == expected.dtype and got.shape == expected.shape
    got, expected = (np.asarray(x).astype(np.float32) for x in (got, expected))
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)


SHAPES = [
    ((5, 768), bf16),  # gpt2
    ((3, 2048), bf16),  # llama1b
    ((2, 2, 3584), bf16),  # qwen7b
    ((2, 4096), f32),  # llama7b
    ((2, 8192), bf16),  # llama70b
    ((131, 32), bf16),
    ((70, 80), f32),
    ((37, 576), bf16),
    ((17, 1000), f32),
    ((17, 128), bf16),
]


@pytest.mark.parametrize("shape, dtype", SHAPES)
def test_forward(shape, dtype):
    x, residual, _, _, scale = data(shape, dtype)
    forward = functools.partial(op.forward, eps=EPS)
    got, expected = (jax.jit(functools.partial(forward, **how))(x, scale, residual) for how in (KERNEL, REFERENCE))
    close(got.y, expected.y, RTOL[dtype])
    np.testing.assert_array_equal(got.total, expected.total)
    assert got.absmax.dtype == f32 and got.absmax == jnp.max(jnp.abs(got.y)).astype(f32)


@pytest.mark.parametrize("shape, dtype", SHAPES)
def test_backward(shape, dtype):
    dy, total, d_total, _, scale = data(shape, dtype)
    args = dy, total, scale, d_total
    got, expected = (jax.jit(functools.partial(op.backward, eps=EPS, **how))(*args) for how in (KERNEL, REFERENCE))
    # dx and d_scale are sums of terms of size 1 that may cancel: errors are relative to the terms.
    close(got.dx, expected.dx, RTOL[dtype], 1e-5)
    close(got.d_scale, expected.d_scale, 2e-5, 5e-5)
    assert got.absmax.dtype == f32 and got.absmax == jnp.max(jnp.abs(got.dx)).astype(f32)


@pytest.mark.parametrize("dtype, instructions", [(jnp.float8_e4m3fn, True), (jnp.float8_e5m2, False)])
def test_fp8_is_exact_where_sums_are(dtype, instructions, monkeypatch):
    """Integers whose mean square is 4: sums do not round in any order, nor does the reciprocal root, whose last bit
    depends on the instruction that a processor has for it. So every bit must agree."""
    monkeypatch.setattr(fp8_format, "has_instructions", lambda: instructions)
    random = np.random.default_rng(0)
    magnitudes = np.repeat([4, 2, 0], [96, 384, 288])
    total = np.stack([random.permutation(magnitudes) for _ in range(6)]) * random.choice([-1, 1], (6, 768))
    residual = random.integers(-9, 10, (6, 768))
    x, residual = (jnp.asarray(a, bf16) for a in (total - residual, residual))
    scale = 1 + normal(2, (768,)) / 4
    cast = {"eps": 0.0, "out_dtype": dtype, "out_scale": f32(0.004)}  # with some values beyond e4m3's largest
    got, expected = (
        jax.jit(functools.partial(op.forward, **cast, **how))(x, scale, residual) for how in (KERNEL, REFERENCE)
    )
    bits = lambda a: np.asarray(jax.lax.bitcast_convert_type(a, jnp.uint8))
    np.testing.assert_array_equal(bits(got.y), bits(expected.y))
    assert got.y.dtype == dtype and got.absmax == expected.absmax  # of the values before the division
    largest = dispatch.largest(dtype)
    cut = jnp.max(jnp.abs(expected.y.astype(f32)))
    assert cut == largest if dtype == jnp.float8_e4m3fn else cut < largest


@pytest.mark.parametrize("shape, how", [((2, 256), KERNEL), ((16, 768), REFERENCE)])
def test_nan_is_not_lost(shape, how):
    """jnp.max does, on CPUs, from 4096 numbers on."""
    x, residual, dy, _, scale = data(shape, f32)
    x = x.at[1, 5].set(jnp.nan)
    cast = {"out_dtype": jnp.float8_e4m3fn, "out_scale": f32(0.01)}
    for f, *args in (
        (functools.partial(op.forward, eps=EPS, **how), x, scale, residual),
        (functools.partial(op.forward, eps=EPS, **cast, **how), x, scale, residual),
        (functools.partial(op.backward, eps=EPS, **how), dy, x, scale),
    ):
        assert jnp.isnan(jax.jit(f)(*args).absmax)


@pytest.mark.parametrize("shape, how", [((33, 80), REFERENCE), ((2, 3, 256), KERNEL)])
def test_gradients_are_those_of_autodiff(how, shape):
    x, residual, a, b, scale = data(shape, f32)

    def plain(x, scale, residual):
        t = x + residual
        y = t / jnp.sqrt(jnp.mean(t**2, axis=-1, keepdims=True) + EPS)
        return y * jnp.expand_dims(scale, tuple(range(x.ndim - 1))), t

    ours = functools.partial(op.rms_norm, eps=EPS, **how)
    loss = lambda f: lambda *args: sum(jnp.sum(y * w) for y, w in zip(f(*args), (a, b), strict=True))
    got, expected = (jax.jit(jax.grad(loss(f), (0, 1, 2)))(x, scale, residual) for f in (ours, plain))
    for g, e in zip(got, expected, strict=True):
        close(g, e, 2e-5, 5e-5)  # as in test_backward
    alone = lambda f: lambda x, scale: jnp.sum(f(x, scale) * a)
    got = jax.jit(jax.grad(alone(ours), (0, 1)))(x, scale)
    plain_alone = alone(lambda x, scale: plain(x, scale, jnp.zeros_like(x))[0])
    expected = jax.jit(jax.grad(plain_alone, (0, 1)))(x, scale)
    for g, e in zip(got, expected, strict=True):
        close(g, e, 2e-5, 5e-5)


def test_scale_in_bf16_gets_its_gradient_in_bf16():
    x, *_, scale = data((8, 128), bf16)
    gradients = jax.jit(jax.grad(lambda x, s: jnp.sum(op.rms_norm(x, s)).astype(f32), (0, 1)))
    dx, d_scale = gradients(x, scale.astype(bf16))
    assert dx.dtype == bf16 and d_scale.dtype == bf16


@needs(8)
def test_replicated_scale_gets_the_sum_of_all_devices_gradients():
    x, residual, a, b, scale = data((8, 4, 64), f32)
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(x, scale, residual, a, b):
        y, total = op.rms_norm(x, scale, residual)
        return jnp.sum(y * a + total * b)

    across = jax.shard_map(
        lambda *args: jax.lax.psum(loss(*args), "dp"), mesh=mesh,
        in_specs=(jax.P("dp"), jax.P(), *[jax.P("dp")] * 3), out_specs=jax.P(),
    )  # fmt: skip
    got, expected = (jax.jit(jax.grad(f, (0, 1, 2)))(x, scale, residual, a, b) for f in (across, loss))
    for g, e in zip(got, expected, strict=True):
        close(g, e, 1e-5, 1e-5)  # sums of 32 terms in another order


x_32 = jnp.zeros((4, 32), bf16)
ones = jnp.ones(32)


@pytest.mark.full(after=100)  # refused in milliseconds
@pytest.mark.parametrize(
    "args, more, message",
    [
        ((jnp.zeros((4, 32), jnp.int32), ones), {}, "dtype of x: expected bfloat16, float16 or float32, got int32"),
        ((x_32, jnp.ones(31)), {}, r"shape of scale: expected \(32,\), got \(31,\)"),
        ((x_32, jnp.ones(32, jnp.int8)), {}, "dtype of scale: expected .* got int8"),
        ((x_32, ones, x_32.astype(f32)), {}, r"residual: expected bfloat16 \(4, 32\), got float32 \(4, 32\)"),
        ((x_32, ones, x_32[:3]), {}, r"residual: expected bfloat16 \(4, 32\), got bfloat16 \(3, 32\)"),
        ((jnp.zeros((0, 32)), ones), {}, r"x: expected \[..., D\], not empty, got \(0, 32\)"),
        ((f32(1), ones), {}, r"x: expected \[..., D\], not empty, got \(\)"),
        ((x_32, ones), {"out_dtype": jnp.float8_e5m2}, "out_dtype and out_scale: expected both or none"),
        ((x_32, ones), {"out_dtype": bf16, "out_scale": f32(1)}, "out_dtype: expected float8_e4m3fn or float8_e5m2"),
        ((x_32, ones), {"out_dtype": jnp.float8_e5m2, "out_scale": ones}, r"out_scale: expected float32 \[\], got"),
        ((x_32, ones), {"out_dtype": jnp.float8_e5m2, "out_scale": 1.0}, r"out_scale: expected float32 \[\], got 1.0"),
        ((x_32, ones), {"implementation": "triton"}, "implementation: expected one of .* got 'triton'"),
    ],
)
def test_bad_input(args, more, message):
    with pytest.raises(ValueError, match=message):
        op.forward(*args, eps=EPS, **more)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 1), (1, 3)])
def test_the_smallest_shapes(shape):
    """A single number is normed to its sign times the scale."""
    x = jnp.full(shape, -2.0, f32)
    close(op.forward(x, 3 * jnp.ones(shape[-1:]), eps=0.0).y, -3.0 * np.ones(shape, np.float32), 1e-6)


def test_bad_gradients():
    with pytest.raises(ValueError, match=r"dy: expected bfloat16 \(4, 32\), got float32 \(4, 32\)"):
        op.backward(x_32.astype(f32), x_32, ones, eps=EPS)
    with pytest.raises(ValueError, match=r"d_total: expected bfloat16 \(4, 32\), got bfloat16 \(2, 32\)"):
        op.backward(x_32, x_32, ones, x_32[:2], eps=EPS)


@pytest.mark.parametrize("shape", [(64, 1001), (1, 80)])  # no power of two divides it; too few rows for 128 threads
def test_what_the_kernel_cannot(shape, monkeypatch):
    x, scale = jnp.ones(shape, bf16), jnp.ones(shape[-1])
    with pytest.raises(NotImplementedError, match=f"got {shape[0]} rows of {shape[1]} bfloat16"):
        op.forward(x, scale, eps=EPS, implementation="mosaic")
    monkeypatch.setattr(dispatch, "automatic", lambda device=None: "mosaic")
    dispatch._say_once.cache_clear()
    with pytest.warns(UserWarning, match="using XLA's instead"):
        first = op.forward(x, scale, eps=EPS)
    again = op.forward(x, scale, eps=EPS)  # not said again: warnings are errors here
    np.testing.assert_array_equal(first.y, again.y)


@pytest.mark.parametrize("count", [1, 3, 7, 2048])
@pytest.mark.parametrize("width", [64, 80, 128, 576, 768, 1000, 2048, 3584, 4096, 5120, 8192, 11008])
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_tiles_cover_the_rows(count, width, dtype):
    for added in (False, True):
        try:
            tile = tiles.row_tiles("test", count, width, dtype, added)
        except NotImplementedError:
            assert count < 16 and width % 128
            continue
        how = tile.layout.to_mgpu()
        assert tile.rows <= count <= tile.rows * tile.tiles < count + tile.rows
        assert tile.rows % how.base_tile_shape[0] == 0 and width % how.base_tile_shape[1] == 0
        assert how.vector_length * jnp.dtype(dtype).itemsize <= 16


@needs(8)
def test_kernels_trace_inside_shard_map():
    """With the types that `check_vma` wants of results and of gradients; compiled in tests/test_kernels_compile.py."""
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(x, scale):
        y, total = op.rms_norm(x, scale, x, implementation="mosaic")
        assert jax.typeof(y).manual_axis_type.varying == jax.typeof(total).manual_axis_type.varying == {"dp"}
        return jax.lax.psum(jnp.sum(y + total), "dp")

    across = jax.shard_map(loss, mesh=mesh, in_specs=(jax.P("dp"), jax.P()), out_specs=jax.P())
    x, scale = jax.ShapeDtypeStruct((32, 256), f32), jax.ShapeDtypeStruct((256,), f32)
    dx, d_scale = jax.eval_shape(jax.grad(across, (0, 1)), x, scale)
    assert dx.shape == x.shape and d_scale.shape == scale.shape
