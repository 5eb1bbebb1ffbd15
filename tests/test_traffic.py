"""Bytes in device memory that a step moves at least, added up by hand."""

import jax
import pytest

from surojax.assembly.from_config import from_config
from surojax.config.checks import check
from surojax.config.fields import default_config
from surojax.placement.mesh import DATA
from surojax.planner.traffic import BatchShape, device_traffic, host_bytes

# Parameters of three layers, q 32 x 32, k and v 16 x 32, o 32 x 32, three of 80 x 32 in the MLP, two norms; and of the
# embedding and the head, 64 words each, and the final norm.
BLOCKS = 3 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 80 * 32 + 2 * 32)
OUTER = 2 * 64 * 32 + 32
BATCH = BatchShape(sequences=2, sequence_len=24, microbatches=5)
RESIDUALS = 5 * 3 * 48 * 32 * 2  # of 5 microbatches, 3 layers, 48 tokens, 32 channels, in bfloat16
STATE = 4 + 2 + 4  # bytes of master weight, first and second moment


def traffic(devices: int = 1, **settings) -> int:
    c = default_config()
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3}
    c.model.update(sizes | {"num_attention_heads": 4, "num_key_value_heads": 2})
    c.update({"gpus": devices, "opt_m_dtype": "bfloat16"} | settings)
    check(c)
    return device_traffic(from_config(c, jax.sharding.AbstractMesh((1, devices), DATA), total_steps=10), BATCH)


@pytest.mark.parametrize("recompute_block, passes", [(True, 3), (False, 2)])
def test_on_one_device(recompute_block, passes):
    """Weights are read in every pass, gradients and residuals written and read, the state read and written."""
    weights = 5 * 2 * (passes * BLOCKS + 3 * OUTER)
    gradients = 5 * 2 * 4 * BLOCKS
    expected = weights + gradients + 2 * STATE * (BLOCKS + OUTER) + 2 * RESIDUALS
    assert traffic(recompute_block=recompute_block) == expected


def test_on_four_devices():
    """ZeRO-1 divides the state; with ZeRO-3 gradients too, and `shard_outer` divides embedding and head."""
    state = 2 * STATE * (BLOCKS + OUTER) / 4
    weights = lambda outer: 5 * 2 * (3 * BLOCKS + 3 * outer)
    gradients = 5 * 2 * 4 * BLOCKS
    assert traffic(4) == weights(OUTER) + gradients + state + 2 * RESIDUALS
    assert traffic(4, zero_level=3) == weights(OUTER) + gradients / 4 + state + 2 * RESIDUALS
    found = traffic(4, zero_level=3, shard_outer=True)
    assert found == weights(OUTER / 4) + gradients / 4 + state + 2 * RESIDUALS


@pytest.mark.parametrize("lora", [False, True])
def test_of_streamed_weights_the_trained_ones_are_written(lora):
    """Two of three microbatches share a fetch's group: all are read twice a group, adapters alone are written."""
    ADAPTERS = 3 * 4 * (32 + 32)  # rank 4, of q in three layers
    c = default_config()
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3}
    c.model.update(sizes | {"num_attention_heads": 4, "num_key_value_heads": 2})
    c.update({"offload_weights": True, "gradient_accumulation_steps": 4, "microbatches_per_fetch": 2})
    c.update({"lora": True, "lora_rank": 4, "lora_target_modules": "q_proj"} if lora else {})
    check(c)
    run = from_config(c, jax.sharding.AbstractMesh((1, 1), DATA), total_steps=10)
    nothing = {"host": 0, "nvme": 0}
    streamed = 2 * (BLOCKS + lora * ADAPTERS)
    rows = {name: nothing for name in ("master", "moments", "grads", "residuals")}
    batch = BatchShape(sequences=2, sequence_len=24, microbatches=4)
    read, written = host_bytes(run, batch, rows | {"weights": {"host": streamed, "nvme": 0}})
    assert (read, written) == (2 * 2 * streamed, 2 * ADAPTERS if lora else streamed)


def test_numbers_of_other_sizes():
    """Accumulators in 16 bits, float32 weights and residuals, and block weights that rest in 8 bits."""
    state = 2 * STATE * (BLOCKS + OUTER)
    weights, gradients = 5 * 2 * (3 * BLOCKS + 3 * OUTER), 5 * 2 * 4 * BLOCKS
    assert traffic(accum_dtype="bfloat16") == weights + gradients / 2 + state + 2 * RESIDUALS
    assert traffic(model_dtype="float32") == 2 * weights + gradients + state + 4 * RESIDUALS
    found = traffic(4, zero_level=3, zero_quantized_weights="fp8", persistent_quants=True)
    weights = 5 * (3 * BLOCKS + 2 * 3 * OUTER)
    assert found == weights + gradients / 4 + state / 4 + 2 * RESIDUALS
