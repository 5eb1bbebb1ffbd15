"""Bytes that a step copies from and to host memory, added up by hand."""

import jax
import pytest

from surojax.assembly.from_config import from_config
from surojax.config.checks import check
from surojax.config.fields import default_config
from surojax.placement.mesh import DATA
from surojax.planner.traffic import BatchShape, host_bytes

# Parameters of three layers: q 32 x 32, k and v 16 x 32, o 32 x 32, three of 80 x 32 in the MLP, two norms.
BLOCKS = 3 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 80 * 32 + 2 * 32)


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
