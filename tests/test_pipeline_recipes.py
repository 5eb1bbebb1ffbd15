"""Pipeline parallelism with recipes and optimizers, context parallelism with optimizers: they equal one device.

A stage computes whole tensors of a microbatch, so every scale is that of one device, and every number that is rounded
to 8 or 4 bits too, but for float32 sums in another order (tests/test_tensor_parallel_recipes.py).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from small import CONFIG, Small, quick_at, tokens, worst_relative
from test_engine import ORDER_OF_SUMS
from test_pipeline import ALL, ONE_BACK, without_padding
from test_tensor_parallel_recipes import EXTRAS, in_recipe

from surojax.models.decoder_config import DecoderConfig
from surojax.optim.adamw8bit import adamw8bit
from surojax.optim.normuon import normuon
from surojax.placement.layout import batch_sharding, specs
from surojax.step.state import Progress
from surojax.step.train_step import passes

BLOCKS = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=128, head_dim=32)  # in blocks of 32
DIVIDED = dataclasses.replace(CONFIG, intermediate_size=256)  # in blocks of 256
BATCHES = [tokens(2, 8, 24, seed=i) for i in range(5)]
RECIPES: list[tuple[DecoderConfig, str, dict[str, Any]]] = [
    (EXTRAS, "fp8_hybrid", {"recompute_block": False, **ONE_BACK}),
    (EXTRAS, "fp8_current", {}),
    (BLOCKS, "mxfp8", ONE_BACK),
    (BLOCKS, "nvfp4", {}),
]

SKIPPED = {"fp8_current": {"skip_first": 1}}  # layers in bf16, so that the two stages have layers of other kinds


def first_step(small: Small) -> Callable[..., tuple[float, dict, np.ndarray | None]]:
    """A compiled function (history, batch) -> (loss, whole gradients, new history)."""

    def gradients(weights, history, *batch):
        found = passes(small.mesh).loss_and_gradients(small.engine, weights, *batch, progress=Progress(3, history))
        return found.loss, found.grads, found.progress.history

    spec = jax.tree.map(lambda x: x.sharding.spec, (small.plan.weights, small.plan.history))
    token_spec = batch_sharding(small.mesh).spec
    out = (jax.P(), specs(small.engine.layouts.master), spec[1])
    f = jax.jit(jax.shard_map(gradients, mesh=small.mesh, in_specs=(*spec, token_spec, token_spec), out_specs=out))

    def of_batch(history, batch):
        loss, grads, history = jax.device_get(f(small.state.weights, history, *small.put(batch)))
        return float(loss), grads, history

    return of_batch


@pytest.mark.parametrize("config, recipe, placed", quick_at(RECIPES))
@pytest.mark.full
def test_recipes_equal_one_device(config, recipe, placed):
    """Three layers over two stages. In some of four batches no number lies at a border, as in groups of `tp`.

    The history begins with another magnitude for each layer and site, many of them too small, so that a stage that took
    another layer's would clip other numbers.
    """
    compute = in_recipe(recipe, **SKIPPED.get(recipe, {}))
    one, two = (Small(n, config=config, compute=compute, **of) for n, of in ((1, {}), (2, {"pp_size": 2, **placed})))
    history = one.plan.history
    if history is not None:
        of_sites = np.exp2(np.random.default_rng(0).integers(-9, 6, history.shape[:2])).astype(np.float32)
        history = np.broadcast_to(of_sites[..., None], history.shape)
    of_one, of_two = first_step(one), first_step(two)
    errors = []
    for seed in range(4):
        batch = tokens(3, 4, 16, seed=seed)
        loss, grads, observed = of_one(history, batch)
        found_loss, found_grads, found = of_two(history, batch)
        assert found_loss == pytest.approx(loss, rel=1e-3)
        errors.append(worst_relative(without_padding(found_grads, config), grads))
        if observed is not None and errors[-1] < ORDER_OF_SUMS:
            np.testing.assert_allclose(found, observed, rtol=1e-6)
            assert (observed[..., 0] > 0).all()
    assert min(errors) < ORDER_OF_SUMS and max(errors) < 0.2, errors


@functools.cache
def on_one_device(optimizer) -> list[tuple[float, float]]:
    """Losses and gradient norms of the batches."""
    return Small(config=DIVIDED, optimizer=optimizer).train(BATCHES)


@pytest.mark.parametrize(("optimizer", "axis"), [(normuon, "pp_size"), (adamw8bit, "cp_size")])
@pytest.mark.full
def test_optimizers_equal_one_device(optimizer, axis):
    """And they are the same to the bit with everything in host memory; padding stays zeros in every moment."""
    how: Any = {"config": DIVIDED, "optimizer": optimizer, axis: 2, "zero_level": 3}
    exact = len(BATCHES) if optimizer is normuon else 2  # adamw8bit rounds at random: test_tensor_parallel_recipes.py
    expected = on_one_device(optimizer)
    small = Small(4, **how)
    found = small.train(BATCHES)
    np.testing.assert_allclose(found[:exact], expected[:exact], rtol=ORDER_OF_SUMS)
    np.testing.assert_allclose(found, expected, rtol=5e-3)
    for state in (small.state.weights, small.state.master, small.state.moments):
        without_padding(state, DIVIDED)
    assert Small(4, **how, **ALL).train(BATCHES) == found
