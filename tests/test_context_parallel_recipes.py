"""Context parallelism with recipes in 8 bits: as on one device.

Devices that share a sequence are like those of data parallelism: each makes the scales of its own tokens. Scales are
powers of two, so numbers are rounded as on one device, but for those below the range of a smaller scale.
"""

import dataclasses

import pytest
from small import CONFIG, Small, worst_relative
from test_engine import ORDER_OF_SUMS
from test_tensor_parallel_recipes import EXTRAS, first_steps, in_recipe, on_one_device

FLAT = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=128, head_dim=32, num_hidden_layers=1)
CASES = [  # (cp_method, recipe, model, placement)
    ("ring", "fp8_hybrid", EXTRAS, {"recompute_block": False}),
    ("ulysses", "fp8_current", EXTRAS, {"tp_size": 2}),
    ("allgather", "mxfp8", FLAT, {}),
]


@pytest.mark.parametrize("method, recipe, config, placed", CASES)
@pytest.mark.full
def test_recipes_equal_one_device(method, recipe, config, placed):
    """In some of six batches no number lies at a border of 8 bits, as in tests/test_tensor_parallel_recipes.py."""
    compute = dataclasses.replace(in_recipe(recipe), cp_method=method)
    devices = 2 * placed.get("tp_size", 1)
    small = Small(devices, cp_size=2, config=config, compute=compute, zero_level=3, **placed)
    pairs = list(zip(first_steps(small), on_one_device(config, recipe), strict=True))
    errors = [worst_relative(found.grads, expected.grads) for found, expected in pairs]
    assert min(errors) < ORDER_OF_SUMS and max(errors) < 0.1, errors
    for found, expected in pairs:
        assert found.loss == pytest.approx(expected.loss, rel=ORDER_OF_SUMS)
