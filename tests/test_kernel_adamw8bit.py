"""AdamW with 8-bit moments: the codes, the update against exact AdamW, known bad cases, and what is refused."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import KERNEL, REFERENCE, normal as numbers, quick_at

from pallas_kernels import adamw8bit_update as op

pytestmark = [pytest.mark.gpu, pytest.mark.full(after=1)]
HYPER: dict[str, Any] = dict(lr=1e-2, b1=0.9, b2=0.95, eps=1e-8, decay=0.1, grad_factor=1.0)


def hyper(t: int, **changes) -> jax.Array:
    h = HYPER | changes
    return op.Hyper(**h, c1=1 - h["b1"] ** t, c2=1 - h["b2"] ** t).vector()


def seed(t: int, first: int = 0) -> jax.Array:
    return jnp.array([t * 7919, first], jnp.uint32)


def seeds(t: int, n: int) -> jax.Array:
    """One for each matrix of a stack."""
    return jnp.stack([seed(10 * t + i, first=5 * i) for i in range(n)])


def run(grads, p, block=None, work_dtype=None, **changes):
    """The result after a step for each of the gradients."""
    state, step = op.zero_moments(p.shape, block), jax.jit(lambda *a: op.adamw8bit(*a, work_dtype=work_dtype))
    for t, g in enumerate(grads, 1):
        result = step(p, g, *state, hyper(t, **changes), seed(t))
        p, state = result.p, result[1:5]
    return result  # type: ignore[possibly-unbound]


def exact(grads, p, **changes):
    h = HYPER | changes
    p, m, v = np.asarray(p, np.float64), 0.0, 0.0
    for t, g in enumerate(grads, 1):
        g = np.asarray(g, np.float64) * h["grad_factor"]
        m, v = h["b1"] * m + (1 - h["b1"]) * g, h["b2"] * v + (1 - h["b2"]) * g * g
        update = m / (1 - h["b1"] ** t) / (np.sqrt(v / (1 - h["b2"] ** t)) + h["eps"])
        p = p - h["lr"] * (update + h["decay"] * p)
    return p


def normal(*shape: int, key: int = 0) -> jax.Array:
    return numbers(key, shape)


@pytest.mark.parametrize("top", [op.M_TOP, op.V_TOP])
def test_codes_come_back(top):
    """Every code is encoded as itself, whatever the random number: rounding is between neighbours only. A root that is
    off by one bit may make a number of exactly k^2 look like a bit less; then it is 1e-6 likely to be k - 1."""
    codes = jnp.arange(top + 1)
    decoded = jax.jit(lambda codes: op.decode(codes, jnp.float32(3.7), top))(codes)
    encode = jax.jit(lambda x, random: op.encode(x, jnp.float32(3.7), top, random))
    for random in (1 / 512, 0.5, 511 / 512):
        found = encode(decoded, jnp.float32(random))
        np.testing.assert_array_equal(found, codes)


def test_rounding_has_no_bias():
    """The mean over many random numbers is the number itself. Of 4096 draws with a probability of a half it is off by
    0.5 * step / 64 in standard deviations; 5 of those. Steps grow with the number, (2 low + 1) / 127^2: also of small
    ones, where 1 is much of them, and so would a bias be."""
    x = jnp.linspace(0, 1, 64)[:, None] ** 4
    random = jax.random.uniform(jax.random.key(0), (64, 4096))
    codes = jax.jit(lambda x, random: op.encode(x, jnp.float32(1), op.M_TOP, random))(x, random)
    mean = jax.jit(lambda codes: op.decode(codes, jnp.float32(1), op.M_TOP).mean(1))(codes)
    step = (2 * np.floor(127 * np.sqrt(x[:, 0])) + 1) / 127**2
    assert (np.abs(mean - x[:, 0]) <= 5 * 0.5 * step / 64 + 1e-6 * x[:, 0]).all()
    assert len(np.unique(codes[10])) == 2  # and it is rounding


@pytest.mark.parametrize("changes", [{}, {"grad_factor": 0.25}, {"b2": 0.999}, {"decay": 0.0}])
def test_the_first_step_is_that_of_adamw(changes):
    """Moments are rounded after they are used, so the first step sees none of it: float32 rounding only."""
    p, g = normal(4, 512), normal(4, 512, key=1)
    found = run([g], p, **changes)
    np.testing.assert_allclose(found.p, exact([g], p, **changes), rtol=2e-6, atol=1e-7)
    h = HYPER | changes  # the update hardly depends on the gradient's size, the moments do
    largest = h["grad_factor"] * np.abs(g).reshape(4, 2, 256).max(-1)
    np.testing.assert_allclose(found.m_scale, (1 - h["b1"]) * largest, rtol=2e-6)
    # 1 - 0.999 in float32 is off by 6e-8, its root by half of that relative to 0.001
    np.testing.assert_allclose(found.v_scale, np.sqrt(1 - h["b2"]) * largest, rtol=4e-5)


def test_many_steps_stay_near_adamw():
    """30 steps of noisy gradients. One update is off by 2.8 % (docstring of the op), and errors partly average out."""
    p = normal(8, 768)
    grads = [normal(8, 768, key=5) + normal(8, 768, key=10 + i) for i in range(30)]
    off, moved = run(grads, p).p - exact(grads, p), exact(grads, p) - np.asarray(p)
    rms = lambda x: float(np.sqrt(np.mean(np.square(x))))
    assert 0 < rms(off) < 0.028 * rms(moved)


@pytest.mark.full
def test_gradients_that_end_do_not_explode():
    """The known bad case: element 0 had gradients and has none any more, its neighbours go on. Rounded to nearest, m
    stands still where v goes on to vanish and steps grow to hundreds of lr; v = 0 beside it would give 1e8."""
    first, later = normal(1, 256, key=1), normal(1, 256, key=2).at[0, 0].set(0.0)
    state, p, largest = op.zero_moments((1, 256)), jnp.zeros((1, 256)), 0.0
    step = jax.jit(op.adamw8bit)
    for t in range(1, 801):
        new = step(p, first if t <= 5 else later, *state, hyper(t, decay=0.0), seed(t))
        largest = max(largest, float(jnp.abs(new.p - p)[0, 0])) if t > 5 else largest
        p, state = new.p, new[1:5]
    assert largest <= 5 * HYPER["lr"]
    assert int(state[2][0, 0]) >= 1  # v is not 0, since it was not 0


def test_tiny_and_huge_gradients_of_one_block():
    """12 orders of magnitude in one block: nothing is infinite, no step is larger than the docstring's bound."""
    g = jnp.logspace(-8, 4, 256)[None]
    p = jnp.zeros((1, 256))
    found = run([g, -g, 0 * g, g, 0 * g], p, decay=0.0)
    assert jnp.all(jnp.isfinite(found.p)) and float(jnp.abs(found.p).max()) < 5 * 5 * HYPER["lr"]


def test_a_block_without_gradients_only_decays():
    p, g = normal(2, 512), jnp.zeros((2, 512)).at[1, 256:].set(1.0)
    found = run([g], p)
    np.testing.assert_allclose(found.p[0], p[0] * (1 - 1e-3), rtol=1e-6)
    assert found.m_scale.tolist()[0] == [0, 0] and not found.v[0].any()


@pytest.mark.parametrize("what", [jnp.nan, -jnp.inf])
@pytest.mark.parametrize("shape", [(1, 512), (16, 4096)])  # XLA on CPUs loses NaN in maxima of 4096 numbers and more
def test_not_finite_gradients_are_not_lost(shape, what):
    """The number itself in that step, its whole block in the next one, and nothing else."""
    p, g = normal(*shape), jnp.ones(shape)
    bad = lambda x: np.argwhere(~np.isfinite(x)).tolist()
    found = run([g.at[0, 3].set(what)], p)
    assert bad(found.p) == [[0, 3]] and bad(found.m_scale) == bad(found.v_scale) == [[0, 0]]
    assert bad(run([g.at[0, 3].set(what), g], p).p) == [[0, i] for i in range(256)]


def test_bfloat16_is_rounded_without_bias():
    """lr is 1/16 of half a step of a bfloat16 of 1.0: to nearest, 200 steps leave 1.0 where it is."""
    p, g = jnp.ones((64, 256), jnp.bfloat16), jnp.ones((64, 256))
    lr = 2.0**-13
    found = run([g] * 200, p, lr=lr, decay=0.0).p.astype(jnp.float32)
    # Each step moves by 2^-8 (2^-9 below 1... half as large) with a probability; 16384 elements: mean within 1 %.
    np.testing.assert_allclose(float(jnp.mean(1 - found)), 200 * lr, rtol=0.02)


@pytest.mark.full
def test_shards_draw_what_the_whole_draws():
    """Rows in two halves, the second starting where the first ends: the same bits, in bfloat16 and in the codes."""
    p, g = normal(4, 512).astype(jnp.bfloat16), normal(4, 512, key=1)
    whole = op.adamw8bit(p, g, *op.zero_moments(p.shape), hyper(1), seed(1))
    for rows, first in ((slice(0, 2), 0), (slice(2, 4), 1024)):
        part = op.adamw8bit(p[rows], g[rows], *op.zero_moments((2, 512)), hyper(1), seed(1, first))
        chex.assert_trees_all_equal(part[:5], tuple(x[rows] for x in whole[:5]))


def test_the_work_copy_is_the_new_parameter():
    found = run([normal(2, 256, key=1)], normal(2, 256), work_dtype=jnp.bfloat16)
    np.testing.assert_array_equal(found.work, found.p.astype(jnp.bfloat16))


def test_blocks_are_divisors():
    sizes = {4096: 256, 11008: 256, 18944: 256, 352: 176, 80: 80, 300: 150, 100: 100, 514: 514, 31: 31, 1000: 250}
    sizes |= {n: 128 for n in (128, 384, 640, 896, 1152, 1408, 28672 // 32)}  # and not 192 or 224, larger but unserved
    assert {n: op.moment_block_size(n) for n in sizes} == sizes


@pytest.mark.parametrize("n", range(128, 1537, 128))
def test_the_kernel_serves_every_multiple_of_128(n):
    """With the blocks that the op chooses; nothing is computed."""
    args = jax.eval_shape(lambda: bad((2, n)))
    assert jax.eval_shape(lambda a: op.adamw8bit(**a, implementation="mosaic"), args).p.shape == (2, n)


def bad(shape=(2, 512), **changes) -> dict[str, Any]:
    """Good arguments for a matrix of this shape, with changes."""
    moments = dict(zip(("m", "m_scale", "v", "v_scale"), op.zero_moments(shape), strict=True))
    return {"p": jnp.zeros(shape), "g": jnp.zeros(shape), **moments, "h": hyper(1), "seed": seed(1)} | changes


@pytest.mark.full(after=100)  # refused in milliseconds
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"p": jnp.zeros((2, 512), jnp.float16)}, "p: expected float32 or bfloat16, got float16"),
        ({"p": jnp.zeros((0, 512))}, "p: expected a matrix that is not empty, got"),
        ({"p": jnp.zeros(())}, "p: expected a matrix that is not empty, got"),
        ({"g": jnp.zeros((2, 512), jnp.float16)}, "g: expected float32 or bfloat16, got float16"),
        ({"m_scale": jnp.zeros((2, 0))}, "m_scale: expected one for each block of a row"),
        ({"m_scale": jnp.zeros(())}, "m_scale: expected one for each block of a row"),
        ({"m_scale": jnp.zeros((3, 2))}, "m_scale: expected one for each block of a row"),
        ({"h": jnp.zeros(8, jnp.int32)}, r"h: expected float32 \[8\]"),
        ({"seed": jnp.zeros(3, jnp.uint32)}, r"seed: expected uint32 \[2\] or \[2, 2\], got uint32 \(3,\)"),
        ({"g": jnp.zeros((2, 256))}, r"g: expected the shape of p, \(2, 512\), got \(2, 256\)"),
        ({"m": jnp.zeros((2, 512))}, "m: expected int8, got float32"),
        ({"v": jnp.zeros((2, 512), jnp.int8)}, "v: expected uint8, got int8"),
        ({"m_scale": jnp.zeros((2, 3))}, "m_scale: expected one for each block of a row"),
        ({"v_scale": jnp.zeros((2, 4))}, "v_scale: expected one for each block of a row"),
        ({"h": jnp.zeros(7)}, r"h: expected float32 \[8\]"),
        ({"seed": jnp.zeros(2, jnp.int32)}, r"seed: expected uint32 \[2\] or \[2, 2\], got int32"),
        ({"implementation": "triton"}, "implementation: expected one of"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ValueError, match=f"adamw8bit: {message}"):
        op.adamw8bit(**bad(**changes))


@pytest.mark.parametrize(
    "shape, block, dtype, in_place",
    quick_at(
        [
            ((2, 4096), 256, jnp.float32, False),
            ((2, 4096), 256, jnp.bfloat16, True),
            ((1, 11008), 256, jnp.float32, True),
            ((3, 2, 384), 128, jnp.float32, True),
            ((3, 2, 384), 128, jnp.bfloat16, False),
        ],
        3,
    ),
)
def test_the_kernel_equals_the_reference(shape, block, dtype, in_place):
    """Two steps in the interpreter. Scales and numbers are off by float32 rounding, since products and sums may be
    contracted in one of them: 2 ulp. A code, or a bfloat16, may then be rounded to its other neighbour where it is that
    near to its random threshold: one in 10^5 is expected, one in 10^3 allowed."""
    p, g = normal(*shape).astype(dtype), normal(*shape, key=1).astype(dtype)
    work = jnp.bfloat16 if dtype == jnp.float32 else None
    how: Any = KERNEL | {"in_place": in_place}
    state = op.zero_moments(shape, block)
    both = [jax.jit(functools.partial(op.adamw8bit, work_dtype=work, **x)) for x in (REFERENCE, how)]
    for t in (1, 2):
        random = seeds(t, len(p)) if p.ndim > 2 else seed(t)
        expected, found = (update(p, g, *state, hyper(t), random) for update in both)
        np.testing.assert_allclose(found.m_scale, expected.m_scale, rtol=3e-7)
        np.testing.assert_allclose(found.v_scale, expected.v_scale, rtol=3e-7)
        for a, b in ((found.m, expected.m), (found.v, expected.v)):
            off = np.abs(a.astype(jnp.int32) - b.astype(jnp.int32))
            assert a.dtype == b.dtype and off.max() <= 1 and (off > 0).mean() < 1e-3
        a, b = found.p.astype(jnp.float32), expected.p.astype(jnp.float32)
        if dtype == jnp.float32:
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
            np.testing.assert_array_equal(found.work, found.p.astype(work))
        else:
            assert (a != b).mean() < 1e-3
            np.testing.assert_allclose(a, b, rtol=2.0**-7)
        p, state = expected.p, expected[1:5]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*using XLA's instead")  # on a GPU it is said
def test_odd_blocks_are_left_to_xla_unless_the_kernel_is_asked_for():
    a = bad((2, 300))
    assert op.adamw8bit(**a).p.shape == (2, 300)
    with pytest.raises(ValueError, match="block: expected a multiple of 128 for the kernel, got 150"):
        op.adamw8bit(**a, implementation="mosaic")


@pytest.mark.full
def test_a_stack_is_updated_as_its_matrices_are():
    """To the bit, with the seed of each; the kernel is held against this above."""
    p, g = normal(3, 2, 384), normal(3, 2, 384, key=1)
    m, m_scale, v, v_scale = op.adamw8bit(p, g, *op.zero_moments(p.shape), hyper(1), seed(1), **REFERENCE)[1:5]
    arrays, random = (p, g, m, m_scale, v, v_scale), seeds(2, 3)
    whole = op.adamw8bit(*arrays, hyper(2), random, work_dtype=jnp.bfloat16, **REFERENCE)
    for l in range(3):
        one = op.adamw8bit(*(x[l] for x in arrays), hyper(2), random[l], work_dtype=jnp.bfloat16, **REFERENCE)
        chex.assert_trees_all_equal(jax.tree.map(lambda x, l=l: x[l], whole), one)


@pytest.mark.full
def test_what_varies_over_a_mesh_is_updated_in_place():
    """Inside `shard_map`, where JAX takes no references to what differs between devices: to the same bits. That what is
    updated by gradients which differ does so too is still in its type. On one device: the interpreter runs on one."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    p, g, state = normal(2, 512), normal(2, 512, key=1), op.zero_moments((2, 512), 256)
    one = lambda p, g, *state: op.adamw8bit(p, g, *state, hyper(1), seed(1), in_place=True, **KERNEL)[:5]
    cut = lambda grads, rest: jax.shard_map(one, mesh=mesh, in_specs=(rest, grads, *[rest] * 4), out_specs=rest)
    run = lambda grads, rest: jax.jit(cut(grads, rest))(p, g, *state)
    chex.assert_trees_all_equal(run(jax.P("d"), jax.P("d")), one(p, g, *state))
    with pytest.raises(ValueError, match="out_specs"):
        run(jax.P("d"), jax.P())
