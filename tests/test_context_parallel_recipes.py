"""Context parallelism with recipes in 8 and 4 bits: as on one device.

Under fp8_* devices that share a sequence are like those of data parallelism: each makes the scales of its own tokens.
Scales are powers of two, so numbers are rounded as on one device, but for those below the range of a smaller scale.
nvfp4's scales are no powers of two: they are made of the largest magnitude on any of the devices.
"""

import dataclasses

import jax.numpy as jnp
import pytest
from small import Small, worst_relative
from test_engine import ORDER_OF_SUMS
from test_tensor_parallel_recipes import EXTRAS, FLAT, first_steps, in_recipe, on_one_device

from pallas_kernels import nvfp4_format

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


@pytest.mark.full
def test_nvfp4_equals_one_device_but_for_random_numbers(monkeypatch):
    """Losses do not depend on random numbers. With the same ones everywhere gradients are those of one device, since
    each device has 16 tokens of a sequence, a group that is rotated, and scales are those of all tokens. As in other
    recipes, in some of six batches no number lies at a border of 4 bits, which are a quarter away.
    """
    monkeypatch.setattr(nvfp4_format.plain, "random_bits", lambda seed, index: jnp.uint32(0x80008000) | index & 0)
    expected = first_steps(Small(config=FLAT, compute=in_recipe("nvfp4")), 32)
    small = Small(4, cp_size=2, tp_size=2, config=FLAT, compute=in_recipe("nvfp4"))
    pairs = list(zip(first_steps(small, 32), expected, strict=True))
    errors = [worst_relative(found.grads, expected.grads) for found, expected in pairs]
    assert min(errors) < ORDER_OF_SUMS and max(errors) < 0.1, errors
    for found, expected in pairs:
        assert found.loss == pytest.approx(expected.loss, rel=ORDER_OF_SUMS)
