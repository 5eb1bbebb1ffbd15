"""The optimizer chain against optax's own, schedules at their corners, and updates layer by layer."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import REPLICATED, declared, new_moments

from surojax.optim import lion, normuon as muon, optimizer as optim
from surojax.optim.adamw import adamw
from surojax.optim.adamw8bit import adamw8bit
from surojax.optim.learning_rate import learning_rate_schedule
from surojax.placement.layout import Layout
from surojax.placement.mesh import DATA, SHARD, make_mesh
from surojax.placement.param import Kind, Param


def tree(seed: int, layers: int = 3) -> dict:
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    normal = lambda *shape: jax.random.normal(next(keys), shape)
    return {
        "blocks": {"w": normal(layers, 8, 4), "norm": normal(layers, 4)},
        "outer": {"embed": normal(16, 4), "norm": normal(4)},
    }


def by_layers(optimizer, grads, moments, master, norm, steps_done=0, layers: int = 3):
    """(moments, master) after `apply` for every layer and the outer parameters, as the step does it."""
    return _compiled(optimizer, layers)(grads, moments, master, jnp.float32(norm), jnp.int32(steps_done))


@functools.cache
def _compiled(optimizer, layers: int):
    return jax.jit(functools.partial(_by_layers, optimizer, layers))


def _by_layers(optimizer, layers: int, grads, moments, master, norm, steps_done):
    params, done = declared(master), []
    scalars = optim.scalars(optimizer, steps_done, norm)

    def update(part, grads, moments, master, layer):
        at = optim.UpdateContext(scalars, layer)

        def one(param, p, g, state):
            return optim.apply(optimizer, param, REPLICATED, p, g, state, at, "float32")[1:]

        found = jax.tree.map(one, params[part], master, grads, moments)
        take = lambda i: jax.tree.map(lambda _, pair: pair[i], params[part], found)
        return take(1), take(0)

    for l in range(layers):
        read = lambda t, l=l: jax.tree.map(lambda x: x[l], t["blocks"])
        done.append(update("blocks", read(grads), read(moments), read(master), l))
    blocks = jax.tree.map(lambda *x: jnp.stack(x), *done)
    outer = update("outer", grads["outer"], moments["outer"], master["outer"], 0)
    return tuple({"blocks": b, "outer": o} for b, o in zip(blocks, outer, strict=True))


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_layer_by_layer_equals_optax_on_the_whole(max_grad_norm):
    """Ten steps of optax's clip + adamw on the whole tree; the same formulas, rounded in another order."""
    schedule = learning_rate_schedule("cosine", peak=1e-2, total_steps=10, warmup_steps=3)
    ours = adamw(schedule, weight_decay=0.1, max_grad_norm=max_grad_norm)
    mask = {"blocks": {"w": True, "norm": False}, "outer": {"embed": True, "norm": False}}
    clip = optax.clip_by_global_norm(max_grad_norm) if max_grad_norm else optax.identity()
    theirs = optax.chain(clip, optax.adamw(schedule, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=mask))
    params = expected = tree(0)
    moments, state = new_moments(ours, params), theirs.init(params)
    update = jax.jit(theirs.update)
    for i in range(10):
        grads = tree(i + 1)
        moments, params = by_layers(ours, grads, moments, params, optax.tree.norm(grads), i)
        updates, state = update(grads, state, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), params, expected)


def test_decay_is_on_matrices_only():
    optimizer = adamw(optax.constant_schedule(0.1), weight_decay=0.5)
    params = tree(0)
    zero = jax.tree.map(jnp.zeros_like, params)
    _, new = by_layers(optimizer, zero, new_moments(optimizer, params), params, jnp.float32(0))
    np.testing.assert_allclose(new["blocks"]["w"], params["blocks"]["w"] * 0.95, rtol=1e-6)
    np.testing.assert_array_equal(new["blocks"]["norm"], params["blocks"]["norm"])
    np.testing.assert_array_equal(new["outer"]["norm"], params["outer"]["norm"])


def test_moments_have_their_own_dtypes():
    optimizer = adamw(optax.constant_schedule(0.1), m_dtype="bfloat16", v_dtype="float32")
    params = tree(0)
    moments, _ = by_layers(optimizer, tree(1), new_moments(optimizer, params), params, jnp.float32(1))
    adam = moments["blocks"]["w"][1]
    assert adam.m.dtype == jnp.bfloat16 and adam.v.dtype == jnp.float32
    assert adam.m.shape == (3, 8, 4)


def test_bfloat16_gradients_are_updated_in_float32():
    optimizer = adamw(optax.constant_schedule(1e-3), max_grad_norm=0)
    params, grads = tree(0), jax.tree.map(lambda g: g.astype(jnp.bfloat16), tree(1))
    exact = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    results = [by_layers(optimizer, g, new_moments(optimizer, params), params, 1.0)[1] for g in (grads, exact)]
    chex.assert_trees_all_equal(*results)


def test_bfloat16_weights_decay_as_float32_ones():
    """0.1 is 0.1001 in bfloat16: 7.7e-4 more. With no gradient all of the update is the decay."""
    optimizer = adamw(optax.constant_schedule(1.0), weight_decay=0.1, max_grad_norm=0)
    p = jnp.linspace(0.5, 2, 64, dtype=jnp.bfloat16).reshape(8, 8)
    zero = jnp.zeros((8, 8))
    state = optimizer.matrices.init(p.shape, 1)
    scalars = optimizer.scalars(jnp.int32(0), jnp.float32(1))
    kept = {}

    def rounded(new, dtype, tensor):
        kept["new"] = new
        return new.astype(dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim, "rounded", rounded)
        optimizer.matrices.apply(p, zero, state, optim.TensorContext(scalars, REPLICATED, jnp.zeros(2)), None)
    exact = np.asarray(p, np.float64) * (1 - 0.1)
    np.testing.assert_allclose(kept["new"], exact, rtol=1e-6)


@pytest.mark.full(after=2)
@pytest.mark.parametrize("make", [adamw, muon.normuon, adamw8bit, lion.lion])
def test_small_updates_of_bfloat16_are_not_lost(make):
    """Steps of 2^-12 from 1.0, whose neighbour is 2^-8 below, for 100 steps. Each moves with a probability of 1/16: in
    standard deviations, a mean over 192 numbers is off by 2.8 % of the way; 5 of those."""
    lr, steps = 2.0**-12, 100
    optimizer = make(optax.constant_schedule(lr), weight_decay=0.0, max_grad_norm=0)
    ones = jax.tree.map(jnp.ones_like, tree(0) | {"blocks": {"w": jnp.ones((3, 8, 8)), "norm": jnp.ones((3, 64))}})
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), ones)
    moments = new_moments(optimizer, params)
    step = jax.jit(lambda moments, params, done: by_layers(optimizer, ones, moments, params, 1, done))
    for i in range(steps):
        moments, params = step(moments, params, i)
    assert params["blocks"]["norm"].dtype == jnp.bfloat16
    moved = 1 - params["blocks"]["norm"].astype(jnp.float32)
    assert float(moved.mean()) == pytest.approx(lr * steps, rel=0.14)
    assert len(np.unique(moved[0])) > 3 and not np.array_equal(moved[0], moved[1])  # layers draw numbers of their own
    of_matrices = 1 - params["blocks"]["w"].astype(jnp.float32)
    assert float(of_matrices.mean()) > lr * steps / 20  # NorMuon's steps are 0.2 lr in root mean square


def handing(apply) -> optim.Optimizer:
    """An optimizer with this rule for every tensor, and no state."""
    rule = optim.UpdateRule(lambda shape, shards: (), lambda layout: (), apply)
    return optim.Optimizer(rule, rule, rule, rule, lambda *_: {})


def seeds_of(part: str, layer: int, step: int, tensors: int = 3) -> list[tuple[int, int]]:
    """What `apply` hands to the rules of so many tensors as seeds."""
    handed = []

    def apply(p, g, state, tensor, dtype):
        handed.append(tuple(tensor.seed.tolist()))
        return p, p, state

    arrays = {"blocks": [jnp.zeros((1, 4, 4))] * tensors, "outer": [jnp.zeros((4, 4))] * tensors}
    at = optim.UpdateContext({"step": jnp.int32(step)}, layer)
    for param in declared(arrays)[part]:
        x = jnp.zeros((4, 4))
        optim.apply(handing(apply), param, REPLICATED, x, x, (), at, "float32")
    return handed


def test_every_tensor_layer_and_step_has_a_stream_of_its_own():
    """All tensors are of one shape, so nothing but the seed tells them apart; each stream begins at number 0."""
    seeds = [seed for step in (1, 2, 3) for layer in (0, 1, 2) for seed in seeds_of("blocks", layer, step)]
    seeds += [seed for step in (1, 2, 3) for seed in seeds_of("outer", 0, step)]
    assert len(set(seeds)) == len(seeds) and {first for _, first in seeds} == {0}


@pytest.mark.parametrize("replicas", (1, 2))
def test_shards_and_parts_of_them_draw_the_numbers_of_the_whole(replicas):
    """A matrix cut over 4 devices, each shard in one piece or in two: the bits of rounding are those of one device,
    and the same on every replica."""
    mesh = make_mesh(jax.devices()[: 4 * replicas], dp_replicate_size=replicas)
    x = 1 + jax.random.uniform(jax.random.key(0), (16, 8)) * 2**-7
    scalars = {"step": jnp.int32(5)}

    param = Param("embed", (16, 8), ("vocab", "embed"), Kind.TABLE, stream=3)
    optimizer = handing(lambda p, g, state, tensor, dtype: (optim.rounded(g, jnp.bfloat16, tensor), p, state))

    def rounded(x, layout, part=(0, 1)):
        at = optim.UpdateContext(scalars, part=part)
        return optim.apply(optimizer, param, layout, x, x, (), at, "float32")[0]

    sharded = Layout(jax.P(SHARD), jax.P())

    def on_device(x):
        halves = [rounded(half, sharded, (k, 2)) for k, half in enumerate(jnp.split(x, 2))]
        return rounded(x, sharded)[None], jnp.concatenate(halves)[None]

    out = jax.P(DATA[0] if replicas > 1 else None, SHARD)
    run = jax.shard_map(on_device, mesh=mesh, in_specs=jax.P(SHARD), out_specs=out, check_vma=False)
    expected = np.asarray(rounded(x, REPLICATED))
    up = expected.astype(np.float32) > np.asarray(x)
    assert 0.2 < up.mean() < 0.8 and not np.array_equal(up[:4], up[4:8])  # shards differ from one another
    for found in jax.jit(run)(x):
        assert found.shape == (replicas, 16, 8)
        for replica in found:
            np.testing.assert_array_equal(replica, expected)


def rates(kind, **options) -> np.ndarray:
    schedule = learning_rate_schedule(kind, peak=1.0, total_steps=100, **options)
    return np.array([float(schedule(jnp.int32(i))) for i in range(100)])


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_decaying_schedules(kind):
    lr = rates(kind, warmup_steps=10, final_fraction=0.1)
    np.testing.assert_allclose(lr[:10], np.arange(1, 11) / 10, rtol=1e-5)  # no step is wasted on a rate of zero
    assert lr[10] == pytest.approx(1.0) and lr[99] == pytest.approx(0.1, rel=1e-4)
    assert np.all(np.diff(lr[10:]) <= 0)
    done = 22 / 89  # of the way from the first step at the peak, 10, to the last, 99
    fraction = (1 + np.cos(np.pi * done)) / 2 if kind == "cosine" else 1 - done
    assert lr[32] == pytest.approx(0.1 + 0.9 * fraction, rel=1e-5)


def test_wsd_is_flat_then_falls():
    lr = rates("wsd", warmup_steps=10, cooldown_steps=20, final_fraction=0.1)
    np.testing.assert_allclose(lr[9:80], 1.0)
    assert lr[99] == pytest.approx(0.1) and np.all(np.diff(lr[79:]) < 0)
    assert lr[80] == pytest.approx(1 - 0.9 / 20) and lr[89] == pytest.approx(1 - 0.9 / 2)


@pytest.mark.parametrize("cooldown, last", [(0, [1, 1, 1]), (1, [1, 1, 0.1]), (2, [1, 0.55, 0.1])])
def test_wsd_ends_at_the_final_rate(cooldown, last):
    np.testing.assert_allclose(rates("wsd", cooldown_steps=cooldown, final_fraction=0.1)[-3:], last, rtol=1e-6)


def test_without_warmup_the_first_step_is_at_the_peak():
    assert rates("linear")[0] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="cosine, linear, wsd"):
        rates("exponential")


def test_eps_is_added_to_the_root():
    """Gradients as small as eps move a weight by half a learning rate."""
    optimizer = adamw(optax.constant_schedule(1e-2), eps=1e-8, weight_decay=0.0, max_grad_norm=0)
    params, grads = tree(0), jax.tree.map(lambda p: jnp.full_like(p, 1e-8), tree(0))
    _, new = by_layers(optimizer, grads, new_moments(optimizer, params), params, 1.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b - 0.5e-2, atol=1e-6), new, params)


def test_gradients_are_only_scaled_down():
    factors = [float(optim.clip_factor(1.0, jnp.float32(norm))) for norm in (0.0, 0.5, 1.0, 4.0)]
    assert factors == [1, 1, 1, 0.25]
    assert optim.clip_factor(0.0, jnp.float32(4.0)) == 1
