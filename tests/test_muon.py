"""NorMuon: the orthogonalisation against a singular value decomposition, and its rule against the paper's formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import REPLICATED, new_moments
from test_optim import by_layers, tree

from surojax.optim import normuon as muon, optimizer as optim
from surojax.optim.adamw import adamw

orthogonalised = jax.jit(muon.orthogonalised, static_argnums=1)


def matrix(m: int, k: int, values=None, seed: int = 0) -> np.ndarray:
    """A random matrix, with these singular values if they are given."""
    x = np.random.default_rng(seed).standard_normal((m, k))
    if values is None:
        return x.astype(np.float32)
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    return ((u * values) @ vt).astype(np.float32)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (32, 32), (1, 8), (7, 1)])
def test_singular_values_become_one(shape):
    """Polar Express with 8 steps: what is left of its error is below float32's for values of 1e-2 of the norm on."""
    n = min(shape)
    x = matrix(*shape, values=np.geomspace(1, 0.05, n))
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    np.testing.assert_allclose(orthogonalised(x, 8), u @ vt, atol=2e-5)


def test_five_steps_leave_values_near_one():
    """Values of 1e-3 of the norm and more end in the interval that the paper gives for 5 steps: 1 +- 0.16."""
    x = matrix(24, 40, values=np.geomspace(0.5, 2e-3, 24))
    values = np.linalg.svd(np.asarray(orthogonalised(x)), compute_uv=False)
    assert values.min() > 0.84 and values.max() < 1.16


def test_each_step_leaves_the_least_deviation():
    """A best composition for values from 1e-3 to 1 is as far above 1 as it is below; six steps are bfloat16's."""
    x, largest = np.geomspace(1e-3, 1, 20001), []
    for a, b, c in muon.POLAR_EXPRESS:
        x = a * x + b * x**3 + c * x**5
        largest.append(np.abs(x - 1).max())
        assert x.min() + x.max() == pytest.approx(2, abs=1e-4)
    assert largest == sorted(largest, reverse=True) and largest[4] > 2**-8 > largest[5] > 1e-5 > largest[6]
    safe = muon.coefficients(9)
    assert len(safe) == 9 and safe[7:] == [muon.POLAR_EXPRESS[-1]] * 2 and muon.coefficients(2) == safe[:2]
    for row, plain in zip(safe[:7], muon.POLAR_EXPRESS, strict=False):  # of values that are 1 % too large
        x = np.linspace(0, 1.01, 11)
        of_row, of_plain = (a * y + b * y**3 + c * y**5 for (a, b, c), y in ((row, x), (plain, x / 1.01)))
        np.testing.assert_allclose(of_row, of_plain)


def test_scale_does_not_matter_and_zeros_stay():
    x = jnp.asarray(matrix(8, 24))
    np.testing.assert_allclose(orthogonalised(x * 2.0**-60), orthogonalised(x), rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(orthogonalised(jnp.zeros_like(x)), 0)


def test_bfloat16_is_near_float32():
    """Rounding of 2^-9, which grows with small singular values, stays below the 0.16 that five steps leave anyway;
    measured 0.03."""
    x = jnp.asarray(matrix(64, 128)).astype(jnp.bfloat16)
    low, high = orthogonalised(x), orthogonalised(x.astype(jnp.float32))
    assert low.dtype == jnp.float32
    assert float(jnp.linalg.norm(low - high) / jnp.linalg.norm(high)) < 0.16


def written_out(grads, w, *, lr, b1, b2, decay) -> np.ndarray:
    """The formulas of the paper in float64, with an exact polar factor. lr: of all steps, or one of each."""
    w, m, v = np.asarray(w, np.float64), 0.0, 0.0
    for g, rate in zip(grads, np.broadcast_to(lr, len(grads)), strict=True):
        m = b1 * m + (1 - b1) * np.asarray(g, np.float64)
        u, _, vt = np.linalg.svd(m, full_matrices=False)
        o = u @ vt
        v = b2 * v + (1 - b2) * np.mean(o**2, axis=1, keepdims=True)
        o = o / np.sqrt(v)
        o = o * 0.2 * np.sqrt(o.size) / np.linalg.norm(o)
        w = w - rate * (o + decay * w * (o * w > 0))
    return w


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_the_rule_is_that_of_the_paper(shape):
    """Four steps, with 10 steps of the orthogonalisation, so that it is exact to float32 for these matrices. Only of a
    tall one do rows differ in size once it is orthogonal."""
    options = dict(b1=0.9, b2=0.8, decay=0.3)
    optimizer = muon.normuon(
        optax.constant_schedule(1.0),
        matrices=optax.constant_schedule(0.05),
        momentum=0.9,
        beta2=0.8,
        steps=10,
        weight_decay=0.3,
        max_grad_norm=0,
    )
    w, grads = matrix(*shape), [matrix(*shape, seed=i) for i in range(1, 5)]
    found, state = by_the_rule(optimizer, w, grads, norms=[1.0] * 4)
    np.testing.assert_allclose(found, written_out(grads, w, lr=0.05, **options), atol=2e-5)
    assert state.rows.shape == shape[:1]


def test_matrices_follow_a_schedule_of_their_own():
    """The first update has the schedule's value at 0, and is the last to; moments do not depend on it."""
    rates = [0.0, 0.05, 0.02]
    optimizer = muon.normuon(
        optax.constant_schedule(1.0),
        matrices=lambda done: jnp.asarray(rates)[done],
        momentum=0.9,
        beta2=0.8,
        steps=10,
        weight_decay=0.3,
        max_grad_norm=0,
    )
    w, grads = matrix(6, 10), [matrix(6, 10, seed=i) for i in range(1, 4)]
    for n in range(1, 4):
        found, _ = by_the_rule(optimizer, w, grads[:n], norms=[1.0] * n)
        expected = written_out(grads[:n], w, lr=rates[:n], b1=0.9, b2=0.8, decay=0.3)
        np.testing.assert_allclose(found, expected, atol=2e-5)


def by_the_rule(optimizer, w, grads, norms) -> tuple:
    """(the matrix, its state) after a step for each gradient; norms: what the global norm is said to be."""
    rule, found = optimizer.matrices, jnp.asarray(w)
    state = rule.init(found.shape, 1)

    @jax.jit
    def apply(found, g, state, i, norm):
        tensor = optim.TensorContext(optim.scalars(optimizer, i, norm), REPLICATED, jnp.zeros(2, jnp.uint32))
        return rule.apply(found, g, state, tensor, "float32")[1:]

    for i, (g, norm) in enumerate(zip(grads, norms, strict=True)):
        found, state = apply(found, g, state, jnp.int32(i), jnp.float32(norm))
    return found, state


def test_gradients_are_clipped():
    """By the global norm: of two gradients in the momentum, the second one counts a quarter."""
    optimizer = muon.normuon(
        optax.constant_schedule(0.05), momentum=0.9, beta2=0.8, steps=10, weight_decay=0.3, max_grad_norm=1.0
    )
    w, (a, b) = matrix(6, 10), (matrix(6, 10, seed=i) for i in (1, 2))
    found, _ = by_the_rule(optimizer, w, [a, b], norms=[1.0, 4.0])
    expected = written_out([a, b / 4], w, lr=0.05, b1=0.9, b2=0.8, decay=0.3)
    np.testing.assert_allclose(found, expected, atol=2e-5)  # as above


def test_the_size_of_an_update_is_that_of_adamw():
    optimizer = muon.normuon(optax.constant_schedule(0.1), weight_decay=0.0)
    params = tree(0)
    moments = new_moments(optimizer, params)
    _, new = by_layers(optimizer, tree(1), moments, params, jnp.float32(1))
    moved = np.asarray(new["blocks"]["w"] - params["blocks"]["w"])
    np.testing.assert_allclose(np.sqrt(np.mean(moved**2, axis=(1, 2))), 0.1 * muon.RMS, rtol=1e-4)


def test_all_but_the_blocks_matrices_are_adamw():
    ours, plain = muon.normuon(optax.constant_schedule(0.1)), adamw(optax.constant_schedule(0.1))
    new = []
    for optimizer in (ours, plain):
        params = tree(0)
        new.append(by_layers(optimizer, tree(1), new_moments(optimizer, params), params, jnp.float32(3))[1])
    for part, name in (("outer", "embed"), ("outer", "norm"), ("blocks", "norm")):
        np.testing.assert_array_equal(new[0][part][name], new[1][part][name])
    assert not np.allclose(new[0]["blocks"]["w"], new[1]["blocks"]["w"])


def test_moments_take_their_dtype():
    moments = new_moments(muon.normuon(optax.constant_schedule(0.1), m_dtype="bfloat16"), tree(0))
    assert moments["blocks"]["w"].m.dtype == jnp.bfloat16
    assert jax.tree.map(jnp.shape, moments["blocks"]["w"]) == muon.Momentum((3, 8, 4), (3, 8))


@pytest.mark.parametrize(
    "parts, devices, expected",
    [((32,), 4, 4), ((30,), 8, 6), ((2, 6), 4, 2), ((3,), 8, 3), ((31,), 8, 1), ((8,), 1, 1)],
)
def test_as_many_layers_are_updated_together_as_devices_divide(parts, devices, expected):
    matrices = muon.normuon(optax.constant_schedule(0.1)).matrices
    assert optim.layers_together(matrices, parts, devices) == expected
    assert optim.layers_together(adamw(optax.constant_schedule(0.1)).matrices, parts, devices) == 1
