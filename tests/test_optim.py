"""The optimizer chain against optax's own, schedules at their corners, and updates layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from surojax import muon, optim
from surojax.collectives import WHOLE


def tree(seed: int, layers: int = 3) -> dict:
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    normal = lambda *shape: jax.random.normal(next(keys), shape)
    return {
        "blocks": {"w": normal(layers, 8, 4), "norm": normal(layers, 4)},
        "outer": {"embed": normal(16, 4), "norm": normal(4)},
    }


def by_layers(optimizer, grads, moments, master, norm, steps_done=0, layers: int = 3):
    """(moments, master) after `apply` for every layer and the outer parameters, as the step does it."""
    done, whole = [], jax.tree.map(lambda _: WHOLE, master)
    scalars = optim.scalars(optimizer, jnp.int32(steps_done), jnp.float32(norm))
    for l in range(layers):
        read = lambda t, l=l: jax.tree.map(lambda x: x[l], t["blocks"])
        at = optim.At("blocks", scalars, whole["blocks"], l)
        done.append(optim.apply(optimizer, read(grads), read(moments), read(master), at)[1:])
    blocks = jax.tree.map(lambda *x: jnp.stack(x), *done)
    at = optim.At("outer", scalars, whole["outer"])
    outer = optim.apply(optimizer, grads["outer"], moments["outer"], master["outer"], at)[1:]
    return tuple({"blocks": b, "outer": o} for b, o in zip(blocks, outer, strict=True))


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_layer_by_layer_equals_optax_on_the_whole(max_grad_norm):
    """Ten steps of optax's clip + adamw on the whole tree; the same formulas, rounded in another order."""
    schedule = optim.learning_rate_schedule("cosine", peak=1e-2, total_steps=10, warmup_steps=3)
    ours = optim.adamw(schedule, weight_decay=0.1, max_grad_norm=max_grad_norm)
    mask = {"blocks": {"w": True, "norm": False}, "outer": {"embed": True, "norm": False}}
    clip = optax.clip_by_global_norm(max_grad_norm) if max_grad_norm else optax.identity()
    theirs = optax.chain(clip, optax.adamw(schedule, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=mask))
    params = expected = tree(0)
    moments, state = optim.init_moments(ours, params), theirs.init(params)
    for i in range(10):
        grads = tree(i + 1)
        moments, params = by_layers(ours, grads, moments, params, optax.tree.norm(grads), i)
        updates, state = theirs.update(grads, state, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), params, expected)


def test_decay_is_on_matrices_only():
    optimizer = optim.adamw(optax.constant_schedule(0.1), weight_decay=0.5)
    params = tree(0)
    zero = jax.tree.map(jnp.zeros_like, params)
    _, new = by_layers(optimizer, zero, optim.init_moments(optimizer, params), params, jnp.float32(0))
    np.testing.assert_allclose(new["blocks"]["w"], params["blocks"]["w"] * 0.95, rtol=1e-6)
    np.testing.assert_array_equal(new["blocks"]["norm"], params["blocks"]["norm"])
    np.testing.assert_array_equal(new["outer"]["norm"], params["outer"]["norm"])


def test_moments_have_their_own_dtypes():
    optimizer = optim.adamw(optax.constant_schedule(0.1), m_dtype="bfloat16", v_dtype="float32")
    params = tree(0)
    moments, _ = by_layers(optimizer, tree(1), optim.init_moments(optimizer, params), params, jnp.float32(1))
    adam = moments["blocks"]["w"][1]
    assert adam.m.dtype == jnp.bfloat16 and adam.v.dtype == jnp.float32
    assert adam.m.shape == (3, 8, 4)


def test_bfloat16_gradients_are_updated_in_float32():
    optimizer = optim.adamw(optax.constant_schedule(1e-3), max_grad_norm=0)
    params, grads = tree(0), jax.tree.map(lambda g: g.astype(jnp.bfloat16), tree(1))
    exact = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    results = [by_layers(optimizer, g, optim.init_moments(optimizer, params), params, 1.0)[1] for g in (grads, exact)]
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("make", [optim.adamw, optim.adamw8bit, muon.normuon])
def test_small_updates_of_bfloat16_are_not_lost(make):
    """Steps of 2^-12 from 1.0, whose neighbour is 2^-8 below, for 100 steps. Each moves with a probability of 1/16: in
    standard deviations, a mean over 192 numbers is off by 2.8 % of the way; 5 of those."""
    lr, steps = 2.0**-12, 100
    optimizer = make(optax.constant_schedule(lr), weight_decay=0.0, max_grad_norm=0)
    ones = jax.tree.map(jnp.ones_like, tree(0) | {"blocks": {"w": jnp.ones((3, 8, 8)), "norm": jnp.ones((3, 64))}})
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), ones)
    moments = optim.init_moments(optimizer, params)
    step = jax.jit(lambda moments, params, done: by_layers(optimizer, ones, moments, params, 1, done))
    for i in range(steps):
        moments, params = step(moments, params, i)
    assert params["blocks"]["norm"].dtype == jnp.bfloat16
    moved = 1 - params["blocks"]["norm"].astype(jnp.float32)
    assert float(moved.mean()) == pytest.approx(lr * steps, rel=0.14)
    assert len(np.unique(moved[0])) > 3 and not np.array_equal(moved[0], moved[1])  # layers draw numbers of their own
    of_matrices = 1 - params["blocks"]["w"].astype(jnp.float32)
    assert float(of_matrices.mean()) > lr * steps / 20  # NorMuon's steps are 0.2 lr in root mean square


def rates(kind, **options) -> np.ndarray:
    schedule = optim.learning_rate_schedule(kind, peak=1.0, total_steps=100, **options)
    return np.array([float(schedule(jnp.int32(i))) for i in range(100)])


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_decaying_schedules(kind):
    lr = rates(kind, warmup_steps=10, final_fraction=0.1)
    np.testing.assert_allclose(lr[:10], np.arange(1, 11) / 10, rtol=1e-5)  # no step is wasted on a rate of zero
    assert lr[10] == pytest.approx(1.0) and lr[99] == pytest.approx(0.1, rel=1e-4)
    assert np.all(np.diff(lr[10:]) <= 0)


def test_wsd_is_flat_then_falls():
    lr = rates("wsd", warmup_steps=10, cooldown_steps=20, final_fraction=0.1)
    np.testing.assert_allclose(lr[9:80], 1.0)
    assert lr[99] == pytest.approx(0.1) and np.all(np.diff(lr[79:]) < 0)


def test_without_warmup_the_first_step_is_at_the_peak():
    assert rates("linear")[0] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="cosine, linear or wsd"):
        rates("exponential")


def test_eps_is_added_to_the_root():
    """Gradients as small as eps move a weight by half a learning rate."""
    optimizer = optim.adamw(optax.constant_schedule(1e-2), eps=1e-8, weight_decay=0.0, max_grad_norm=0)
    params, grads = tree(0), jax.tree.map(lambda p: jnp.full_like(p, 1e-8), tree(0))
    _, new = by_layers(optimizer, grads, optim.init_moments(optimizer, params), params, 1.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b - 0.5e-2, atol=1e-6), new, params)


def test_gradients_are_only_scaled_down():
    factors = [float(optim.clip_factor(1.0, jnp.float32(norm))) for norm in (0.0, 0.5, 1.0, 4.0)]
    assert factors == [1, 1, 1, 0.25]
    assert optim.clip_factor(0.0, jnp.float32(4.0)) == 1
