"""An objective of another's: one class, given to the engine; nothing else knows of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG, Small

from surojax.objectives.objective import CrossEntropy
from surojax.step.train_step import make_train_step

A, B, S = 2, 8, 16


@dataclasses.dataclass(frozen=True)
class Regression:
    """Half the squared distance of every logit to a token's target, which is one number; no labels at all."""

    targets: tuple[str, ...] = ("heights", "used")

    def count(self, targets):
        return jnp.sum(targets["used"], dtype=jnp.int32)

    def _loss(self, model, used, x_ND, targets):
        logits = model.final(used, x_ND) @ used[model.head].T
        return jnp.sum(targets["used"][:, None] * (logits - targets["heights"][:, None]) ** 2) / 2

    def loss_and_gradients(self, model, used, trained, x_ND, targets, scale, axes):
        assert not axes
        loss, (d_used, dx_ND) = jax.value_and_grad(self._loss, argnums=(1, 2))(model, used, x_ND, targets)
        return loss, {name: scale * d_used[name] for name in trained}, scale * dx_ND

    def loss(self, model, outer, x_ND, targets, axes):
        return self._loss(model, outer, x_ND, targets)


def trained(**options) -> list[float]:
    small = Small(**options, config=CONFIG)
    run = small.run
    engine = dataclasses.replace(run.engine, objective=Regression())
    assert engine.batch_arrays == ("inputs", "heights", "used")
    step = make_train_step(engine, run.optimizer, run.plan, small.mesh)
    rng = np.random.default_rng(0)
    batch = [rng.integers(0, high, (A, B, S)).astype(np.int32) for high in (64, 5, 2)]
    losses = []
    state = small.state
    for _ in range(4):
        state, metrics = jax.block_until_ready(step(state, *small.put(batch)))
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.full
def test_another_objective_trains_the_same_on_several_devices():
    """Its arrays have other names, and its loss falls, alike on one device and on several."""
    alone = trained()
    assert alone[-1] < 0.9 * alone[0]
    np.testing.assert_allclose(trained(devices=4, zero_level=3, offload_weights=True), alone, rtol=1e-4)


def test_cross_entropy_is_the_default():
    small = Small()
    assert small.run.engine.objective == CrossEntropy() and small.run.engine.batch_arrays == ("inputs", "labels")
