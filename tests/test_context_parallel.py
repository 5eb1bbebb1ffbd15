"""Context parallelism: the engine equals `jax.grad` of the plain model on one device, and moves what it should.

The oracle, its batch and the bound are those of tests/test_engine.py.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from small import CONFIG, Small, plain_loss, quick_at, tokens, worst_relative
from test_engine import GEMMA, ORDER_OF_SUMS, QWEN, SMOLLM, engine_gradients, reference

from surojax.models.model import Compute

OFFLOADS = ("offload_residual", "offload_optimizer", "offload_master", "offload_grads", "offload_weights")
ALL: dict[str, Any] = dict.fromkeys(OFFLOADS, True)
ONE_KV_HEAD = dataclasses.replace(QWEN, num_key_value_heads=1, num_hidden_layers=2)
ULYSSES = Compute(cp_method="ulysses")
ALLGATHER = Compute(cp_method="allgather")
RING = Compute(cp_method="ring")
PLACED = {  # (model, devices, placement, whether blocks are computed again)
    "ulysses-2": (CONFIG, 2, {"cp_size": 2, "zero_level": 3, "compute": ULYSSES}, False),
    "ulysses-2kv-4": (CONFIG, 4, {"cp_size": 4, "zero_level": 2, "compute": ULYSSES}, True),
    "ulysses-1kv-2x2": (ONE_KV_HEAD, 4, {"cp_size": 2, "zero_level": 3, "compute": ULYSSES}, False),
    "ulysses-gemma-2x2x2": (
        GEMMA,
        8,
        {"cp_size": 2, "replicate": 2, "zero_level": 3, "shard_outer": True, "compute": ULYSSES, **ALL},
        True,
    ),
    "ulysses-smollm-2x2": (SMOLLM, 4, {"cp_size": 2, "zero_level": 1, "compute": ULYSSES}, True),
    "ulysses-2x2x2-tp": (CONFIG, 8, {"cp_size": 2, "tp_size": 2, "zero_level": 3, "compute": ULYSSES}, True),
    "ulysses-all_to_all": (
        CONFIG,
        4,
        {"cp_size": 2, "zero_level": 3, "use_all_to_all_reduce": True, "compute": ULYSSES},
        True,
    ),
    "allgather-2": (CONFIG, 2, {"cp_size": 2, "zero_level": 3, "compute": ALLGATHER}, False),
    "ring-2": (CONFIG, 2, {"cp_size": 2, "zero_level": 3, "compute": RING}, False),
    "ring-4": (CONFIG, 4, {"cp_size": 4, "zero_level": 3, "compute": RING}, True),
    "allgather-4": (CONFIG, 4, {"cp_size": 4, "zero_level": 3, "compute": ALLGATHER}, True),
}


@pytest.mark.parametrize(
    "config, devices, placed, recompute_block", quick_at(list(PLACED.values()), 0), ids=PLACED.keys()
)
def test_equals_grad_of_the_plain_model(config, devices, placed, recompute_block):
    batch, loss, grads = reference(config)
    small = Small(devices, config=config, recompute_block=recompute_block, lmhead_chunks=2, **placed)
    ours, our_grads = engine_gradients(small, batch)
    assert ours == pytest.approx(float(loss), rel=ORDER_OF_SUMS)
    assert worst_relative(our_grads, grads) < ORDER_OF_SUMS
