"""The rotary kernel in Pallas' GPU interpreter against the reference, and that against the model's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import KERNEL, REFERENCE, needs, normal

from pallas_kernels import dispatch, rope as op, tiles
from surojax.models import rotary

pytestmark = [pytest.mark.gpu, pytest.mark.full(after=1)]
f32, bf16 = jnp.float32, jnp.bfloat16


def data(batch, S, H, K, h, dtype):
    q, k = (normal(n, (*batch, S, n, h), dtype) for n in (H, K))
    return q, k, *table(S, h)


def table(S, h):
    @jax.jit
    def of_positions():
        angle = jnp.arange(S, dtype=f32)[:, None] * rotary.rope_frequencies(h, 1e4, rotary.RopeScaling())[None]
        return jnp.cos(angle), jnp.sin(angle)

    return of_positions()


SIZES = [
    ((2,), 9, 12, 12, 64, bf16),  # gpt2
    ((1,), 5, 32, 8, 64, bf16),  # llama1b
    ((1,), 3, 28, 4, 128, f32),  # qwen7b: 4 positions of 4 heads are not there
    ((1,), 6, 40, 8, 128, bf16),  # qwen32b
    ((2, 2), 17, 7, 1, 64, bf16),  # one head is shared by all
    ((), 21, 5, 3, 80, bf16),
    ((1,), 19, 25, 25, 64, f32),  # 25 heads: the last tile of heads does some again
]


@pytest.mark.parametrize("sizes", SIZES)
def test_kernel(sizes):
    args = data(*sizes)
    got, expected = (jax.jit(lambda *a, how=how: op.forward(*a, **how))(*args) for how in (KERNEL, REFERENCE))
    # One float32 multiply-add, fused into one rounding or not: a number of bf16 away at most, 2^-7 of it; where the two
    # products cancel, the last bits of numbers up to 5.
    for g, e in zip(got[:2], expected[:2], strict=True):
        assert g.dtype == e.dtype and g.shape == e.shape
        g32, e32 = np.asarray(g).astype(np.float32), np.asarray(e).astype(np.float32)
        np.testing.assert_allclose(g32, e32, rtol=2**-7 if g.dtype == bf16 else 1e-6, atol=1e-6)
    for x, top in ((got.q, got.absmax_q), (got.k, got.absmax_k)):
        assert top.dtype == f32 and top.shape == () and top == np.abs(np.asarray(x)).max().astype(np.float32)


@pytest.mark.full
@pytest.mark.parametrize("how", [KERNEL, REFERENCE])
def test_rows_with_angles_of_their_own(how):
    """Bit for bit each row alone, forward and back."""
    q, k, cos, sin = data((3,), 9, 8, 4, 64, bf16)
    tables = [jnp.stack([jnp.roll(a, row, axis=0) for row in range(3)]) for a in (cos, sin)]
    both = lambda *a: jax.vjp(lambda q, k: op.rope(q, k, *a[2:], **how), *a[:2])[1](a[:2])
    for f in (lambda *a: op.forward(*a, **how)[:2], both):
        found = jax.jit(f)(q, k, *tables)
        for row in range(3):
            alone = jax.jit(f)(q[row : row + 1], k[row : row + 1], *(table[row] for table in tables))
            for got, expected in zip(found, alone, strict=True):
                np.testing.assert_array_equal(got[row : row + 1], expected)


@pytest.mark.parametrize("how", [KERNEL, REFERENCE])
def test_quarter_turns_are_exact(how):
    """With cos 0 and sin 1 halves are exchanged and one changes its sign; nothing is rounded."""
    q, k, cos, sin = data((1,), 8, 4, 2, 128, bf16)
    turn, turn_back = (jax.jit(functools.partial(op.forward, inverse=inverse, **how)) for inverse in (False, True))
    quarter = jnp.zeros_like(cos), jnp.ones_like(sin)
    turned = turn(q, k, *quarter)
    for x, y in ((q, turned.q), (k, turned.k)):
        first, second = jnp.split(x, 2, axis=-1)
        np.testing.assert_array_equal(y, jnp.concatenate([-second, first], axis=-1))
    back = turn_back(turned.q, turned.k, *quarter)
    np.testing.assert_array_equal(back.q, q)
    np.testing.assert_array_equal(back.k, k)


def test_as_the_model_does_it():
    q, k, cos, sin = data((2,), 9, 4, 2, 64, f32)
    rotated = jax.jit(functools.partial(op.rope, **REFERENCE))(q, k, cos, sin)
    of_model = jax.jit(lambda x: rotary.rope(x, jnp.arange(9), 1e4, rotary.RopeScaling()))
    for x, y in zip((q, k), rotated, strict=True):
        expected = of_model(x)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=2e-6)  # cosines from another program: their last bits


@pytest.mark.parametrize("how", [KERNEL, REFERENCE])
def test_gradients_are_those_of_autodiff(how):
    q, k, cos, sin = data((1,), 16, 5, 3, 80, f32)
    a, b = (normal(i, x.shape) for i, x in ((7, q), (8, k)))

    def plain(x):
        first, second = x[..., :40], x[..., 40:]
        c, s = cos[None, :, None], sin[None, :, None]
        return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1)

    def ours(q, k):
        y, z = op.rope(q, k, cos, sin, **how)
        return jnp.sum(y * a) + jnp.sum(z * b)

    got = jax.jit(jax.grad(ours, (0, 1)))(q, k)
    expected = jax.jit(jax.grad(lambda q, k: jnp.sum(plain(q) * a) + jnp.sum(plain(k) * b), (0, 1)))(q, k)
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-6, atol=1e-6)  # as in test_kernel


@pytest.mark.parametrize("how", [KERNEL, REFERENCE])
@pytest.mark.parametrize("length", [8, 128])
def test_nan_is_not_lost(length, how):
    """jnp.max does, on CPUs, from 4096 numbers on."""
    q, k, cos, sin = data((1,), length, 4, 2, 64, f32)
    forward = jax.jit(functools.partial(op.forward, **how))
    for name, args in (("q", (q.at[0, 5, 1, 7].set(jnp.nan), k)), ("k", (q, k.at[0, 5, 1, 7].set(jnp.nan)))):
        rotated = forward(*args, cos, sin)
        assert jnp.isnan(rotated.absmax_q) == (name == "q") and jnp.isnan(rotated.absmax_k) == (name == "k")


@needs(8)
def test_sharded_gradients():
    q, k, cos, sin = data((8,), 4, 2, 1, 64, f32)
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(q, k, cos, sin):
        y, z = op.rope(q, k, cos, sin)
        return jnp.sum(y**3) + jnp.sum(z**3)

    across = jax.shard_map(
        lambda *args: jax.lax.psum(loss(*args), "dp"), mesh=mesh,
        in_specs=(jax.P("dp"), jax.P("dp"), jax.P(), jax.P()), out_specs=jax.P(),
    )  # fmt: skip
    got, expected = (jax.jit(jax.grad(f, (0, 1)))(q, k, cos, sin) for f in (across, loss))
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-5)  # cubes, fused differently


z = lambda *shape, dtype=bf16: jnp.zeros(shape, dtype)


@pytest.mark.full(after=100)  # refused in milliseconds
@pytest.mark.parametrize(
    "args, message",
    [
        ((z(4, 2, 7), z(4, 2, 7), z(4, 3), z(4, 3)), "head dimension: expected an even number, got 7"),
        ((z(4, 8), z(4, 8), z(4, 4), z(4, 4)), r"q: expected \[..., S, heads, h\], not empty, got \(4, 8\)"),
        ((z(4, 2, 8), z(4, 0, 8), z(4, 4), z(4, 4)), r"k: expected \[..., S, heads, h\], not empty"),
        ((z(4, 2, 8), z(5, 2, 8), z(4, 4), z(4, 4)), r"shape of k: expected \(4, 'K', 8\), got \(5, 2, 8\)"),
        ((z(4, 2, 8), z(4, 2, 6), z(4, 4), z(4, 4)), r"shape of k: expected \(4, 'K', 8\), got \(4, 2, 6\)"),
        (
            (z(4, 2, 8), z(4, 2, 8, dtype=f32), z(4, 4), z(4, 4)),
            "dtype of k: expected bfloat16, that of q, got",
        ),
        ((z(4, 2, 8, dtype=jnp.int8), z(4, 2, 8), z(4, 4), z(4, 4)), "dtype of q: expected .* got int8"),
        ((z(4, 2, 8), z(4, 2, 8), z(4, 4), z(4, 4)), r"cos: expected float32 \(4, 4\), got bfloat16 \(4, 4\)"),
        ((z(4, 2, 8), z(4, 2, 8), z(4, 4, dtype=f32), z(3, 4, dtype=f32)), r"sin: expected float32 \(4, 4\), got .*3"),
    ],
)
def test_bad_input(args, message):
    for f in (op.forward, op.rope):
        with pytest.raises(ValueError, match=message):
            f(*args)


def test_what_the_kernel_cannot(monkeypatch):
    """One position of one head is less than 128 threads can share."""
    q, k, cos, sin = data((1,), 1, 1, 1, 64, bf16)
    with pytest.raises(NotImplementedError, match=r"got 1 positions, \(1, 1\) heads of 2 x 32 bfloat16"):
        op.forward(q, k, cos, sin, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="got 1 positions"):  # nor with angles of each row's own
        op.forward(q, k, cos[None], sin[None], implementation="mosaic")
    monkeypatch.setattr(dispatch, "automatic", lambda device=None: "mosaic")
    dispatch._say_once.cache_clear()
    with pytest.warns(UserWarning, match="using XLA's instead"):
        op.forward(q, k, cos, sin)
    op.forward(q, k, cos, sin)  # not said again: warnings are errors here


@pytest.mark.parametrize("length", [1, 5, 2048])
@pytest.mark.parametrize("counts", [(12, 12), (32, 8), (28, 4), (25, 25), (7, 1), (64, 8)])
@pytest.mark.parametrize("width", [32, 40, 64])
def test_tiles_fit(length, counts, width):
    try:
        cut = tiles.heads("test", length, counts, width, bf16)
    except NotImplementedError:
        assert length < 32 and min(counts) < 32
        return
    tile = cut.layout.to_mgpu().base_tile_shape
    assert cut.positions <= length and cut.heads <= min(counts)
    assert cut.positions % tile[0] == 0 and cut.heads % tile[1] == 0 and width % tile[2] == 0


@pytest.mark.parametrize("counts, most", [((12,), 4), ((8,), 8), ((16, 4), 4), ((3,), 1), ((6, 2), 2), ((32, 8), 8)])
@pytest.mark.parametrize("width", [64, 128])
def test_a_tile_has_as_many_heads_as_divide_their_numbers(counts, most, width):
    """With more, the last tile of a position would compute heads again; with fewer, there would be fewer programs."""
    tile = tiles.heads("op", 4096, counts, width, bf16)
    assert tile.heads == most
