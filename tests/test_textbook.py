"""What a step must move, against the formulas of ZeRO with numbers put in by hand; nothing is compiled.

tests/test_plan.py holds compiled steps against the same formulas.
"""

import jax
import pytest

from surojax.assembly.assemble import Assembly
from surojax.assembly.from_config import from_config
from surojax.config.fields import default_config, mesh_sizes
from surojax.placement.mesh import DATA, abstract_mesh
from surojax.planner import step_collectives, traffic

L, D, F, V = 3, 32, 96, 64
MATRICES, VECTORS = L * (4 * D * D + 3 * D * F), L * 2 * D  # as many key/value heads as query heads
BLOCKS, OUTER = MATRICES + VECTORS, 2 * V * D + D
K, N = 4, 4  # microbatches, GPUs of dp_shard; all dimensions divide by them


def assembled(replicate: int = 1, **changes) -> Assembly:
    """A run on N GPUs in each of so many replicas."""
    c = default_config()
    c.model.vocab_size, c.model.hidden_size, c.model.intermediate_size = V, D, F
    c.model.num_hidden_layers, c.model.num_attention_heads, c.model.num_key_value_heads = L, 4, 4
    c.update({"model_dtype": "bfloat16", "accum_dtype": "float32", "gpus": N * replicate, **changes})
    return from_config(c, jax.sharding.AbstractMesh((replicate, N), DATA), total_steps=10)


BATCH = traffic.BatchShape(sequences=1, sequence_len=16, microbatches=K)


def moved(replicate: int = 1, **changes) -> dict[tuple[str, str], int]:
    """Bytes of a step, by (collective, axis)."""
    return step_collectives.collective_bytes(assembled(replicate, **changes), BATCH)


@pytest.mark.parametrize(
    "level, gathered, reduced",
    [
        (1, 2 * BLOCKS, 4 * BLOCKS),  # new weights in bfloat16, accumulators in float32
        (2, 2 * BLOCKS, K * 2 * BLOCKS),  # every microbatch's gradients in bfloat16
        (3, 2 * K * 2 * BLOCKS, K * 2 * BLOCKS),  # weights both ways
    ],
)
def test_zero_levels(level, gathered, reduced):
    """The outer layers' new weights and gradients move once a step; a GPU sends three of four parts."""
    found = moved(zero_level=level)
    assert found == {
        ("all-gather", "dp_shard"): (gathered + 2 * OUTER) * 3 // 4,
        ("reduce-scatter", "dp_shard"): (reduced + 4 * OUTER) * 3 // 4,
    }


def test_groups_add_up_their_shards():
    """An all-reduce over two groups sends its operand once: a quarter of the parameters, in float32."""
    found = moved(replicate=2, zero_level=3)
    alone = moved(zero_level=3)
    assert found == alone | {("all-reduce", "dp_replicate"): 4 * (BLOCKS + OUTER) // N}


def test_numbers_in_8_bits():
    """Weights: a byte a number and 4 for a block of 32 (of D) or 96 (of F); gradients as well, vectors in float32."""
    scales = L * (4 * D * D + 2 * D * F) // 32 * 4 + L * D * F // 96 * 4
    found = moved(zero_level=3, zero_quantized_weights="fp8", zero_quantized_gradients=True)
    assert found == {
        ("all-gather", "dp_shard"): (2 * K * (MATRICES + scales + 2 * VECTORS) + 2 * OUTER) * 3 // 4,
        ("all-to-all", "dp_shard"): (K * (MATRICES + scales + 4 * VECTORS) + 4 * OUTER) * 3 // 4,
    }


def test_groups_of_microbatches_gather_once():
    """Weights both ways for each of two groups; gradients of every microbatch."""
    found = moved(zero_level=3, microbatches_per_fetch=2)
    assert found == {
        ("all-gather", "dp_shard"): (2 * (K // 2) * 2 * BLOCKS + 2 * OUTER) * 3 // 4,
        ("reduce-scatter", "dp_shard"): (K * 2 * BLOCKS + 4 * OUTER) * 3 // 4,
    }


@pytest.mark.parametrize("replicated", [True, False])
def test_copies_of_a_stage_to_and_from_the_host(replicated):
    """What a pass begins with is copied in once: a layer in each direction, or shards of two. Every backward pass moves
    accumulators of a layer more; they begin as zeros, are read for the norm, and written where sums were local."""
    rows = {"weights": {"host": 10**9, "nvme": 0}, "grads": {"host": 10**6, "nvme": 0}}
    rows |= {name: {"host": 0, "nvme": 0} for name in ("master", "moments", "residuals")}
    c = default_config()
    c.model.num_hidden_layers = 10
    c.update({"gpus": 4, "pp_size": 2, "zero_level": 3, "dp_replicate_size": 1 + replicated})
    c.update({"offload_weights": True, "offload_grads": True, "gradient_accumulation_steps": K})
    run = from_config(c, abstract_mesh(4, **mesh_sizes(c)), total_steps=10)
    read, written = traffic.host_bytes(run, BATCH, rows)
    first = 2 if replicated else 4
    assert read == (2 * K + first / 5) * 10**9 + (K * (1 + 1 / 5) + 2) * 10**6
    assert written == 10**9 + ((K + 1) * (1 + 1 / 5) + replicated) * 10**6


@pytest.mark.parametrize("group, overlap_update", [(1, False), (2, False), (2, True)])
def test_copies_to_and_from_the_host(group, overlap_update):
    """Weights twice a group of microbatches, but for a pass that updates them, and back once; gradients back every
    group, and read by the next group or the update; a group's residuals, which are in host memory together, both ways
    every group."""
    names = ("weights", "outer", "grads", "master", "moments", "residuals")
    rows = {name: {"device": 10**9, "host": 10**i, "nvme": 0} for i, name in enumerate(names)}
    rows["moments"]["nvme"] = 7
    groups = K // group
    offloaded = (
        {"zero_level": 2, "offload_grads": True, "offload_master": True, "overlap_update": True}
        if overlap_update
        else {}
    )
    run = assembled(microbatches_per_fetch=group, **offloaded)
    read, written = traffic.host_bytes(run, BATCH, rows)
    assert read == (2 * groups - overlap_update) * 1 + groups * 100 + 1000 + 10007 + groups * 10**5
    assert written == 1 + groups * 100 + 1000 + 10007 + groups * 10**5
