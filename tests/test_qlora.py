"""QLoRA: a frozen base in NF4 trains as LoRA does beside the same numbers in 16 or 32 bits, wherever it is stored."""

import dataclasses

import chex
import jax
import pytest
from small import CONFIG, Small, needs, quick_at, tokens

from surojax import ConfigError
from surojax.models.lora import TARGETS, Lora
from surojax.numerics import nf4

LORA = Lora(rank=4, alpha=8.0, targets=tuple(TARGETS.values()))
# Rows of one or two blocks.
SMALL = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=128, head_dim=32, lora=LORA)
BATCHES = [tokens(1, 4, 32, seed=i) for i in range(3)]
OFFLOADED = {"zero_level": 3, "offload_weights": True, "offload_grads": True, "offload_optimizer": True}


def dequantised(weights):
    """The frozen matrices as numbers."""
    one = jax.jit(jax.vmap(lambda q: nf4.dequantise(q, "float32")))
    return jax.tree.map(lambda x: one(x) if nf4.is_nf4(x) else x, jax.device_get(weights), is_leaf=nf4.is_nf4)


def after(run: Small):
    """(losses and norms of the steps, all adapters after them)."""
    return run.train(BATCHES), jax.device_get(run.state.master)


@pytest.fixture(scope="module")
def of_numbers():
    """A run in 4 bits on one device, and LoRA beside the dequantised numbers."""
    quantised = Small(config=SMALL, qlora_bnb=True)
    plain = Small(config=SMALL)
    plain.state = jax.device_put(
        jax.device_get(quantised.state)._replace(weights=dequantised(quantised.state.weights)),
        jax.tree.map(lambda p: p.sharding, plain.plan),
    )
    return after(quantised), after(plain)


@pytest.mark.full
def test_it_is_lora_beside_the_dequantised_numbers(of_numbers):
    quantised, plain = of_numbers
    chex.assert_trees_all_close(quantised, plain, rtol=1e-5, atol=1e-7)
    assert len({loss for loss, _ in plain[0]}) == 3


@needs(8)
@pytest.mark.parametrize(
    "devices, placed",
    quick_at(
        [
            (4, OFFLOADED),
            (4, {"zero_level": 3}),
            (1, {"offload_weights": True, "resident_layers": 1}),
            (2, {"tp_size": 2}),
        ],
    ),
)
def test_where_it_is_stored_changes_nothing(of_numbers, devices, placed):
    run = Small(devices, config=SMALL, qlora_bnb=True, **placed)
    found = after(run)
    # Sums in another order; AdamW makes of them up to 1/500 of its steps of 1e-2.
    chex.assert_trees_all_close(found, of_numbers[0], rtol=2e-4, atol=2e-5)


def test_every_frozen_matrix_takes_half_a_byte_a_number():
    run = Small(config=SMALL, qlora_bnb=True, model_dtype="bfloat16")
    planned = jax.tree.leaves(run.plan.weights["blocks"], is_leaf=nf4.is_nf4)
    stacks = [x for x in planned if nf4.is_nf4(x)]
    assert len(stacks) == len(TARGETS)
    numbers = sum(2 * x.codes.size for x in stacks)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stacks))
    rows = sum(x.shift.size for x in stacks)
    assert size == numbers // 2 + numbers // 64 + 5 * rows + 4 * 3 * len(stacks)
    chex.assert_trees_all_equal_shapes_and_dtypes(run.plan.weights, run.init().weights)


def test_rows_that_are_no_blocks_are_refused_by_name():
    config = dataclasses.replace(SMALL, intermediate_size=96)
    with pytest.raises(
        ConfigError, match=r"^qlora_bnb: expected rows of a multiple of 64 .*got mlp.w_down with rows of 96"
    ):
        Small(config=config, qlora_bnb=True)
