"""Models with several mixers under every axis: gradients are those of the plain model, packed documents included.

The mixers alone, in float64, are in tests/test_row_pieces.py.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from small import CONFIG, Small, needs, plain_loss, tokens, vectors_drawn, worst_relative
from test_engine import ORDER_OF_SUMS, engine_gradients

from surojax.models import decoder_model
from surojax.models.model import Compute

SIZES = dataclasses.replace(
    CONFIG,
    qk_norm=True,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=4,
)
CONV, DELTA, FULL = "conv", "linear_attention", "full_attention"
ALL = dict.fromkeys([f"offload_{x}" for x in ("residual", "optimizer", "master", "grads", "weights")], True)
STATE: dict[str, Any] = {"offload_optimizer": True, "offload_master": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Borders at, one before and one after the edges of the pieces that two and four devices, and chunks, have of 16 tokens.
STARTS = np.zeros((8, 16), np.int32)
for row, border in enumerate((3, 4, 5, 7, 8, 9, 11, 12)):
    STARTS[row, border:] = border
    STARTS[row, border + 1 :] = border + 1

CASES: dict[str, tuple[tuple[str, ...], dict[str, Any], int, dict[str, Any], dict[str, Any]]] = {
    "ring, offloads": ((DELTA, FULL, CONV), {}, 4, {"cp_size": 2, "zero_level": 3, **ALL}, {"cp_method": "ring"}),
    "allgather 4, tp": ((DELTA, FULL, CONV), {}, 8, {"cp_size": 4, "tp_size": 2}, {"cp_method": "allgather"}),
    "ulysses 4": ((DELTA, CONV, FULL), {}, 4, {"cp_size": 4, "zero_level": 2}, {}),
    "chunks": ((DELTA, FULL, CONV), {}, 1, {}, {"sequence_chunks": 4}),
    "chunks, ulysses, tp": (
        (DELTA, FULL, CONV),
        {},
        8,
        {"cp_size": 2, "tp_size": 2, "zero_level": 3, **ALL},
        {"sequence_chunks": 2},
    ),
    "stages": ((CONV, FULL) * 2, {}, 4, {"pp_size": 2, "zero_level": 3}, {}),
    "stages in other orders": (
        (CONV, CONV, FULL, FULL, CONV, CONV),
        {},
        2,
        {"pp_size": 2, "pp_schedule": "1f1b", **STATE},
        {},
    ),
    "stages, allgather": (
        (DELTA, FULL) * 2,
        {},
        4,
        {"pp_size": 2, "cp_size": 2},
        {"cp_method": "allgather"},
    ),
    "stages with experts": ((CONV, FULL) * 2, EXPERTS, 4, {"pp_size": 2, "zero_level": 3}, {}),
}


@needs(8)
@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_plain_model(case):
    types, changes, devices, placed, computed = CASES[case]
    config = dataclasses.replace(SIZES, num_hidden_layers=len(types), layer_types=",".join(types), **changes)
    compute = Compute(**computed)
    model = decoder_model.build(config, compute)
    small = Small(devices, model=model, config=config, compute=compute, packed=True, **placed)
    with vectors_drawn():
        params = model.init(0)
    inputs, labels = tokens(3, 8, 16)
    batch = inputs, labels, np.broadcast_to(STARTS, inputs.shape)
    expected = jax.jit(jax.value_and_grad(plain_loss(config)))(params, *batch)
    assert worst_relative(engine_gradients(small, batch), expected) < ORDER_OF_SUMS
