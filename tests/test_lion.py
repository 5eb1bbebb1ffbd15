"""Lion is optax's, whatever is sharded, offloaded or in files; the config says its options."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import check_checkpoint_moves
from small import CONFIG, Small, needs, new_moments, quick_at, tokens
from test_optim import by_layers, tree

from surojax.config import checks
from surojax.config.fields import default_config, flat
from surojax.errors import ConfigError
from surojax.optim import lion
from surojax.optim.optimizers import build_optimizer

BATCHES = [tokens(2, 4, 16, seed=seed) for seed in range(3)]
OFFLOADED = {"offload_master": True, "offload_optimizer": True, "offload_weights": True, "offload_grads": True}


@pytest.mark.full
@pytest.mark.parametrize("m_dtype", quick_at([("float32",), ("bfloat16",)], 1))
def test_it_is_optax_lion(m_dtype):
    """Ten steps of optax's clip and lion on the whole tree, with the config's settings.

    A sign that rounding turns moves a number by twice the learning rate, 0.01. With a momentum in bfloat16 optax also
    rounds its product with b1, which turns a few of 12,800 signs.
    """
    c = default_config()
    c.update({"optimizer": "lion", "lion_beta1": 0.8, "lion_beta2": 0.95, "weight_decay": 0.3, "max_grad_norm": 2.0})
    c.update({"learning_rate": 0.01, "opt_m_dtype": m_dtype})
    checks.check(c)
    ours = build_optimizer("lion", flat(c), optax.constant_schedule)
    mask = {"blocks": {"w": True, "norm": False}, "outer": {"embed": True, "norm": False}}
    settings = {"b1": 0.8, "b2": 0.95, "weight_decay": 0.3, "mask": mask, "mu_dtype": m_dtype}
    theirs = optax.chain(optax.clip_by_global_norm(2.0), optax.lion(0.01, **settings))
    params = expected = tree(0)
    moments, state = new_moments(ours, params), theirs.init(params)
    for i in range(10):
        grads = tree(i + 1)
        assert optax.tree.norm(grads) > 2
        moments, params = by_layers(ours, grads, moments, params, optax.tree.norm(grads), i)
        updates, state = theirs.update(grads, state, expected)
        expected = optax.apply_updates(expected, updates)
    assert {x.dtype for x in jax.tree.leaves(moments)} == {jnp.dtype(m_dtype)}
    differences = [np.abs(np.asarray(a) - b) for a, b in zip(*map(jax.tree.leaves, (params, expected)), strict=True)]
    turned = np.mean(np.concatenate([(x > 1e-5).ravel() for x in differences]))
    assert turned == 0 if m_dtype == "float32" else turned < 0.02


def small(devices: int = 1, **placed) -> Small:
    """Compiled as users do: sums of products are rounded alike in programs of both placements."""
    made = Small(devices, optimizer=lion.lion, **placed)
    made.compile_as_users_do(BATCHES[0])
    return made


@needs(4)
@pytest.mark.full
def test_shards_have_the_losses_of_one_device():
    """1e-4: a gradient near zero whose sum is rounded to the other sign moves its weight the other way."""
    expected = Small(optimizer=lion.lion).train(BATCHES)
    found = Small(4, optimizer=lion.lion, zero_level=3, **OFFLOADED).train(BATCHES)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@needs(4)
@pytest.mark.full
def test_a_checkpoint_moves_from_one_device_to_four(tmp_path):
    one = Small(optimizer=lion.lion)
    one.train(BATCHES[:1])
    check_checkpoint_moves(one, Small(4, optimizer=lion.lion, zero_level=3, **OFFLOADED), tmp_path)


def test_its_state_is_half_of_adamws():
    def numbers(of: Small) -> int:
        return sum(x.size for x in jax.tree.leaves(of.plan.moments))

    assert numbers(Small(optimizer=lion.lion)) == numbers(Small()) / 2 > CONFIG.vocab_size


@pytest.mark.parametrize(
    "changes, said",
    [
        (
            {"optimizer": "lion", "adamw_beta1": 0.8},
            "adamw_beta1: expected 0.9 with optimizer='lion', which does not use",
        ),
        ({"optimizer": "lion", "opt_v_dtype": "bfloat16"}, "opt_v_dtype: expected 'float32' with optimizer='lion'"),
        ({"lion_beta2": 0.9}, "lion_beta2: expected 0.99 with optimizer='adamw', which does not use it"),
        ({"optimizer": "lion", "lion_beta1": 1.0}, "lion_beta1: expected 0 or more and below 1 in float32, got 1.0"),
    ],
)
def test_options_of_others_are_refused_by_name(changes, said):
    c = default_config()
    c.update(changes)
    with pytest.raises(ConfigError, match=f"^{said}"):
        checks.check(c)
