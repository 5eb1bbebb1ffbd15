"""Saved activations that products write into their stacks: a step has the results of one that copies them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG, Small, needs, quick_at, tokens

from surojax.models import decoder_model
from surojax.step import blocks, in_place
from surojax.step.in_place import run_in_place


def test_what_is_saved_is_in_its_stack():
    """An argument, products of which one has no other reader, one saved twice, a number, and a constant."""
    constant = np.arange(3.0, dtype=np.float32)

    def f(x, w):
        product = w["w"] @ x
        other = jnp.sin(product) + constant
        last = w["w"] @ other
        saved = [x, product, other, other, jnp.float32(2), jnp.asarray(constant), last, jnp.arange(3) + 1]
        return {"sum": other + x, "none": None}, saved

    arguments = jnp.float32([1, 2, 3]), {"w": jnp.eye(3)[::-1]}
    stacks = [jnp.full((4, *saved.shape), -1, saved.dtype) for saved in f(*arguments)[1]]
    run = lambda stacks, l: run_in_place(f, arguments, stacks, l)
    results, written = jax.jit(run)(stacks, 2)
    expected, saved = f(*arguments)
    np.testing.assert_allclose(results["sum"], expected["sum"], rtol=1e-6)
    for stack, array in zip(written, saved, strict=True):
        np.testing.assert_allclose(stack[2], array, rtol=1e-6)
        assert (stack[np.array([0, 1, 3])] == -1).all()
    # The sine reads the product from its stack.
    equations = jax.make_jaxpr(run)(stacks, 2).jaxpr.eqns
    (sine,) = (equation for equation in equations if equation.primitive.name == "sin")
    (read,) = (equation for equation in equations if sine.invars[0] in equation.outvars)
    assert read.params["name"] == "dynamic_index_in_dim"


EXPERTS = dataclasses.replace(CONFIG, num_hidden_layers=4, num_experts=4, num_experts_per_tok=2)
HYBRID = dataclasses.replace(CONFIG, num_hidden_layers=4, layer_types="conv,full_attention")
STEPS = [
    (1, CONFIG, {"microbatches_per_fetch": 2}),
    (1, HYBRID, {"offload_weights": True, "resident_layers": 1, "offload_grads": True}),
    (1, EXPERTS, {"offload_optimizer": True, "offload_grads": True, "overlap_update": True}),
    (2, CONFIG, {"pp_size": 2}),
    (2, EXPERTS, {"tp_size": 2}),
]


@needs(2)
@pytest.mark.parametrize("devices, config, settings", quick_at(STEPS, 0))
def test_a_step_is_that_of_copies(monkeypatch, devices, config, settings):
    """Losses and gradient norms of three steps, and the state after them."""
    found, layers = [], []
    spied = lambda *arguments: layers.append(arguments) or run_in_place(*arguments)
    monkeypatch.setattr(blocks, "run_in_place", spied)
    for enabled in (False, True):
        monkeypatch.setattr(blocks, "saves_in_place", lambda engine, on=enabled: on)
        small = Small(devices, model=decoder_model.build(config), config=config, recompute_block=False, **settings)
        metrics = small.train(tokens(2, 4, 16, seed=seed) for seed in range(3))
        assert bool(layers) == enabled
        found.append((metrics, jax.device_get(jax.tree.leaves(small.state))))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)
    for x, y in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_where_it_is_done(monkeypatch):
    """On a GPU with the plugin 0.12, if residuals and weights are on the device, and not with exact bits."""
    at = lambda platform, version=(0, 12, 0, 1): (
        monkeypatch.setattr(in_place.dispatch, "target", lambda: type("", (), {"platform": platform})),
        monkeypatch.setattr(in_place.cuda_plugin, "plugin_version", lambda: version),
    )
    engine = lambda **settings: Small(1, **{"recompute_block": False, **settings}).engine
    at("gpu")
    assert in_place.saves_in_place(engine()) and in_place.saves_in_place(engine(xla_options="default"))
    others = {"recompute_block": True}, {"offload_residual": True}, {"xla_options": "exact"}, {"offload_weights": True}
    for settings in (*others, {"offload_grads": True, "offload_optimizer": True, "overlap_update": True}):
        assert not in_place.saves_in_place(engine(**settings)), settings
    sharded = Small(2, zero_level=3, recompute_block=False).engine
    assert not in_place.saves_in_place(sharded)
    at("gpu", (0, 11, 2))
    assert not in_place.saves_in_place(engine())
    at("cpu")
    assert not in_place.saves_in_place(engine())
