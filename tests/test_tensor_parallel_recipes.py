"""Tensor parallelism with recipes, optimizers and transfers in 8 bits: a group equals one device with the same setting.

The scale of an operand must be that of one device exactly, since the rounding to 8 bits would hide a wrong one. Then
both round the same numbers, but for a float32 sum in another order that lies at the border between two of them.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from small import CONFIG, Small, quick_at, tokens, worst_relative
from test_engine import ORDER_OF_SUMS
from test_tensor_parallel import ALL, moves_what_is_said

from surojax.models import llama_fp8
from surojax.models.llama_fp8 import SITE_NAMES
from surojax.models.model import Compute
from surojax.numerics.fp8 import E4M3
from surojax.numerics.quantize import scale_for
from surojax.numerics.recipes import Precision
from surojax.placement.layout import batch_sharding, specs
from surojax.step.engine import loss_and_gradients

WIDE = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=160, head_dim=16)
EXTRAS = dataclasses.replace(WIDE, attention_bias=True, qk_norm=True)
ONE_KV_HEAD = dataclasses.replace(EXTRAS, num_key_value_heads=1, num_hidden_layers=2)


def in_recipe(recipe: str, **options) -> Compute:
    return Compute(precision=Precision(recipe=recipe, **options))


class FirstStep(NamedTuple):
    """What a device finds in a step from a new state."""

    loss: float
    grads: Any  # whole
    observed: np.ndarray | None  # largest magnitudes `[layers, sites]`


def first_steps(small: Small) -> list[FirstStep]:
    """Of several batches."""
    plan = small.plan

    def gradients(weights, history, *batch):
        found = loss_and_gradients(small.engine, weights, *batch, history=history)
        return found.loss, found.grads, found.history

    spec = jax.tree.map(lambda x: x.sharding.spec, (plan.weights, plan.history))
    token_spec = batch_sharding(small.mesh).spec
    out = (jax.P(), specs(small.engine.layouts.master), spec[1])
    f = jax.jit(jax.shard_map(gradients, mesh=small.mesh, in_specs=(*spec, token_spec, token_spec), out_specs=out))
    done = []
    for seed in range(6):
        batch = small.put(tokens(2, 4, 16, seed=seed))
        loss, grads, history = jax.device_get(f(small.state.weights, small.state.history, *batch))
        done.append(FirstStep(float(loss), grads, None if history is None else history[..., 0]))
    return done


@functools.cache
def on_one_device(config, recipe: str) -> list[FirstStep]:
    return first_steps(Small(config=config, compute=in_recipe(recipe)))


FP8 = [  # (model, recipe, devices of a group, placement)
    (ONE_KV_HEAD, "fp8_hybrid", 2, {"recompute_block": False}),
    (EXTRAS, "fp8_hybrid", 4, {}),
    (WIDE, "fp8_current", 2, {"recompute_block": False}),
    (EXTRAS, "fp8_current", 4, {}),
]


@pytest.mark.parametrize("config, recipe, tp_size, placed", quick_at(FP8, 0))
def test_float8_equals_one_device(config, recipe, tp_size, placed):
    """In some of six batches no number lies at a border of float8, where the last bit of a sum decides. Then all
    gradients agree to 1e-5, and observed magnitudes to float32's rounding; their scales are equal."""
    small = Small(tp_size, tp_size=tp_size, config=config, compute=in_recipe(recipe), **placed)
    pairs = list(zip(first_steps(small), on_one_device(config, recipe), strict=True))
    errors = [worst_relative(found.grads, expected.grads) for found, expected in pairs]
    assert min(errors) < ORDER_OF_SUMS and max(errors) < 0.1, errors
    found, expected = pairs[int(np.argmin(errors))]
    assert found.loss == pytest.approx(expected.loss, rel=ORDER_OF_SUMS)
    if expected.observed is not None:
        assert (expected.observed > 0).all()
        np.testing.assert_allclose(found.observed, expected.observed, rtol=1e-6)
        np.testing.assert_array_equal(scale_for(found.observed, E4M3), scale_for(expected.observed, E4M3))


def scaled_by(small: Small, monkeypatch) -> np.ndarray:
    """The largest magnitudes that scales were made of in a step, sorted, each once."""
    found = set()

    def recorded(absmax, *how):
        jax.debug.callback(lambda x: found.add(float(x)), absmax)
        return scale_for(absmax, *how)

    monkeypatch.setattr(llama_fp8, "scale_for", recorded)
    jax.block_until_ready(small.step(small.state, *small.put(tokens(1, 1, 16))))
    jax.effects_barrier()
    return np.sort(list(found))


def test_scales_are_made_of_the_magnitudes_of_a_whole_tensor(monkeypatch):
    """Of fp8_current, which keeps no history. Rounded with the scale of a part, nearly all numbers would be the same."""
    how: Any = {"config": dataclasses.replace(ONE_KV_HEAD, num_hidden_layers=1), "compute": in_recipe("fp8_current")}
    expected = scaled_by(Small(**how), monkeypatch)
    found = scaled_by(Small(2, tp_size=2, **how), monkeypatch)
    assert len(expected) == len(SITE_NAMES)
    nearest = expected[np.abs(found[:, None] - expected[None, :]).argmin(axis=1)]
    np.testing.assert_allclose(found, nearest, rtol=1e-6)


@pytest.mark.full
def test_steps_in_float8():
    """2 x 2 x 2 devices against 4 without groups, and the same offloaded, to the bit.

    From the second step on weights differ in their last bits, and some are rounded to a neighbour in float8.
    """
    batches = [tokens(2, 8, 16, seed=i) for i in range(4)]
    how: Any = {"config": ONE_KV_HEAD, "compute": in_recipe("fp8_hybrid"), "zero_level": 3, "replicate": 2}
    expected = Small(4, **how).train(batches)
    found = Small(8, tp_size=2, **how).train(batches)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    np.testing.assert_allclose(found, expected, rtol=5e-3)
    quants = {"persistent_quants": True, "offload_quants": True}
    assert Small(8, tp_size=2, **how, **ALL, **quants).train(batches) == found


@pytest.mark.full
def test_groups_gather_operands_in_8_bits():
    moves_what_is_said(Small(8, tp_size=4, config=WIDE, compute=in_recipe("fp8_hybrid"), zero_level=3))
