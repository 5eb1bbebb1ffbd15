"""QLoRA: a frozen base in few bits trains as LoRA does beside the same numbers in 32 bits, wherever it is stored."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import numpy as np
import pytest
from small import CONFIG, Small, needs, target_names, tokens

from surojax import ConfigError
from surojax.models.lora import Lora
from surojax.models.model import Compute
from surojax.numerics import base_formats
from surojax.numerics.recipes import Precision
from surojax.optim.adamw import adamw
from surojax.planner.footprint import estimate
from surojax.planner.traffic import BatchShape

LORA = Lora(rank=4, alpha=8.0, targets=target_names("all-linear"))
# Rows of one to four blocks of NF4, and of one or two of FP8.
SMALL = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=256, head_dim=32, lora=LORA)
BATCHES = [tokens(1, 4, 32, seed=i) for i in range(3)]
OFFLOADED = {"zero_level": 3, "offload_weights": True, "offload_grads": True, "offload_optimizer": True}


def dequantised(weights):
    """The frozen matrices as numbers."""
    one = jax.jit(jax.vmap(lambda q: base_formats.dequantise(q, "float32")))
    is_coded = base_formats.is_coded
    return jax.tree.map(lambda x: one(x) if is_coded(x) else x, jax.device_get(weights), is_leaf=is_coded)


# AdamW divides a gradient near 0, of which much is rounding, by its own size. With this epsilon it does not.
ADAMW = functools.partial(adamw, eps=1e-3)


def after(run: Small):
    """(losses and norms of the steps, all adapters after them)."""
    return run.train(BATCHES), jax.device_get(run.state.master)


@functools.cache
def of_numbers(setting: str, recipe: str = "bf16"):
    """A run in few bits on one device, and LoRA beside the dequantised numbers."""
    how: Any = {"config": SMALL, "compute": Compute(precision=Precision(recipe)), "optimizer": ADAMW}
    quantised = Small(**how, **{setting: True})
    plain = Small(**how)
    plain.state = jax.device_put(
        jax.device_get(quantised.state)._replace(weights=dequantised(quantised.state.weights)),
        jax.tree.map(lambda p: p.sharding, plain.plan),
    )
    return after(quantised), after(plain)


@pytest.mark.full
@pytest.mark.parametrize("setting", ["qlora_bnb", "qlora_fp8", "qlora_fp4"])
def test_it_is_lora_beside_the_dequantised_numbers(setting):
    quantised, plain = of_numbers(setting)
    chex.assert_trees_all_close(quantised, plain, rtol=1e-5, atol=1e-7)
    assert len({loss for loss, _ in plain[0]}) == 3


@pytest.mark.full
@pytest.mark.parametrize("setting, recipe", [("qlora_bnb", "fp8_current"), ("qlora_fp8", "fp8_hybrid")])
def test_its_numbers_are_quantised_again_for_products_in_float8(setting, recipe):
    """With one scale for a matrix, which a shard of codes could not know before it is gathered."""
    quantised, plain = of_numbers(setting, recipe)
    assert quantised[0] == plain[0] != of_numbers(setting)[0][0]
    how: Any = {"config": SMALL, "compute": Compute(precision=Precision(recipe)), "optimizer": ADAMW, setting: True}
    losses = Small(4, **how, **OFFLOADED | {"tp_size": 2}).train(BATCHES)
    np.testing.assert_allclose(losses[0], quantised[0][0], rtol=5e-3)  # of gradients some lie at borders of float8


@needs(8)
@pytest.mark.parametrize(
    "setting, devices, placed",
    [
        ("qlora_bnb", 4, OFFLOADED),
        ("qlora_fp8", 4, {"tp_size": 2, "zero_level": 3}),
    ],
)
@pytest.mark.full
def test_where_it_is_stored_changes_nothing(setting, devices, placed):
    found = after(Small(devices, config=SMALL, optimizer=ADAMW, **{setting: True}, **placed))
    expected = of_numbers(setting)[0]
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-4)  # sums in another order
    chex.assert_trees_all_close(found[1], expected[1], rtol=0, atol=1e-6)  # a step moves a number by up to 1e-2


HEADS, KEYS = 4 * 32, 2 * 32
ROWS = 3 * (HEADS + 2 * KEYS + 64 + 2 * 256 + 64)  # of all matrices of three layers
NUMBERS = 3 * 64 * (2 * HEADS + 2 * KEYS + 3 * 256)


@pytest.mark.parametrize(
    "setting, devices, bytes_of_all",
    [
        ("qlora_bnb", 1, NUMBERS // 2 + NUMBERS // 64 + 5 * ROWS + 4 * 3 * len(LORA.targets)),
        # Blocks of q, k, v, o, gate, up, down; on four devices tiles have the rows of one.
        ("qlora_fp8", 1, NUMBERS + 4 * 3 * (1 + 1 + 1 + 1 + 2 + 2 + 2)),
        ("qlora_fp8", 4, NUMBERS + 4 * 3 * (4 + 4 + 4 + 4 + 4 + 4 + 8)),
        ("qlora_fp4", 1, NUMBERS // 2 + NUMBERS // 16 + 4 * 3 * len(LORA.targets)),
    ],
)
def test_every_frozen_matrix_takes_as_many_bytes_as_its_format(setting, devices, bytes_of_all):
    run = Small(devices, config=SMALL, model_dtype="bfloat16", zero_level=3, **{setting: True})
    planned = jax.tree.leaves(run.plan.weights["blocks"], is_leaf=base_formats.is_coded)
    stacks = [x for x in planned if base_formats.is_coded(x)]
    assert len(stacks) == len(LORA.targets)
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stacks)) == bytes_of_all


@pytest.mark.full
@needs(4)
def test_what_is_planned_is_built():
    run = Small(4, config=SMALL, model_dtype="bfloat16", zero_level=3, qlora_fp8=True)
    built = run.init().weights
    chex.assert_trees_all_equal_shapes_and_dtypes(run.plan.weights, built)
    on_first = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(built))
    rows = estimate(run.run, BatchShape(4, 32, 1))
    assert rows["weights"] + rows["outer"] == on_first


@pytest.mark.parametrize(
    "setting, block, sizes",
    [
        ("qlora_bnb", 64, {"intermediate_size": 96}),
        ("qlora_fp4", 16, {"intermediate_size": 72}),
        ("qlora_bnb", 64, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}),
    ],
)
def test_rows_that_are_no_blocks_are_refused_by_name(setting, block, sizes):
    config = dataclasses.replace(SMALL, **sizes)
    rows = next(size for name, size in sizes.items() if "intermediate" in name)
    refused = rf"^{setting}: expected rows of a multiple of {block} .*got mlp.w_down with rows of {rows};"
    with pytest.raises(ConfigError, match=refused):
        Small(config=config, **{setting: True})
