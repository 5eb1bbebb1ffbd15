"""Tensor parallelism: the engine equals `jax.grad` of the plain model on one device, and moves what it should.

The oracle, its batch and the bound are those of tests/test_engine.py.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
import pytest
from layouts import check_a_run_goes_on, config_of_a_run
from small import CONFIG, Small, needs, tokens
from test_engine import QWEN

from surojax.assembly.from_config import from_config
from surojax.config import checks
from surojax.config.fields import default_config, mesh_sizes
from surojax.errors import ConfigError
from surojax.models import decoder_model
from surojax.models.model import Compute
from surojax.numerics.recipes import Precision
from surojax.optim.optimizer import UpdateContext, _seed
from surojax.parallel import operands, tensor
from surojax.placement.layout import layouts
from surojax.placement.mesh import KV_HEADS, SAME_KV_HEADS, SHARD, TENSOR, abstract_mesh, data_parallel, mesh_shape
from surojax.placement.table import Storage, place
from surojax.planner import hlo, step_collectives, traffic

OFFLOADS = ("offload_residual", "offload_optimizer", "offload_master", "offload_grads", "offload_weights")
ALL: dict[str, Any] = dict.fromkeys(OFFLOADS, True)
# One key/value head, biases, qk-norm, a tied table, heads that are wider than hidden_size / heads.
ONE_KV_HEAD = dataclasses.replace(QWEN, num_key_value_heads=1, num_hidden_layers=2)
# Products by their own vjp, in a dtype that changes nothing.
IN_FLOAT32 = Compute(precision=Precision(matmul_dtype="float32"))
PLACED = {
    "1kv-2x2-zero3-saved": (ONE_KV_HEAD, 4, {"tp_size": 2, "zero_level": 3}, False),
    "2kv-tp4-matmul_dtype": (CONFIG, 4, {"tp_size": 4, "compute": IN_FLOAT32}, True),
    "3x2": (CONFIG, 6, {"tp_size": 2}, False),
}


@functools.cache
def packed():
    """Rows of several documents, some of which begin at, one before and one after the edges of devices' parts.

    The second half of every row has no label, so half of the devices count none.
    """
    inputs, labels = tokens(2, 8, 24)
    labels[..., 12:] = -1
    firsts = [(0, 6, 12, 18), (0, 5, 11, 17), (0, 7, 13, 19), (0, 1, 23)]
    rows = [max(x for x in firsts[i % 4] if x <= s) for i in range(8) for s in range(24)]
    starts = np.broadcast_to(np.int32(rows).reshape(8, 24), inputs.shape)
    return inputs, labels, starts


def moves_what_is_said(small: Small):
    """The compiled step's collectives of groups, on 24 tokens in two microbatches, have the textbook's bytes."""
    batch = jax.ShapeDtypeStruct((2, data_parallel(small.mesh), 24), np.int32)
    text = small.step.lower(small.plan, batch, batch).compile().as_text()
    found = {(x.op, x.axis): x.bytes for x in hlo.collectives([(hlo.parse_module(text), 1)], small.mesh.shape)}
    of_group = traffic.BatchShape(sequences=1, sequence_len=24, microbatches=2)
    expected = step_collectives.collective_bytes(small.run, of_group)
    of_tp = {key: size for key, size in expected.items() if "tp" in key[1]}
    assert {op for op, _ in of_tp} - {"all-to-all"} == {"all-gather", "reduce-scatter", "all-reduce"}
    for key, size in of_tp.items():
        assert found[key] == pytest.approx(size, rel=0.02, abs=100), key


def test_no_device_has_whole_logits():
    """Nor a whole table: of 96 words, no array of the step has the words of both devices."""
    config = dataclasses.replace(CONFIG, vocab_size=96, num_hidden_layers=1)
    small = Small(2, config=config, tp_size=2)
    batch = jax.ShapeDtypeStruct((1, 2, 24), np.int32)
    text = small.step.lower(small.plan, batch, batch).as_text()
    found = re.findall(r"tensor<([\dx]+)x\w+>", text)
    inside = [shape.split("x") for shape in found]
    assert ["48", "32"] in inside and ["24", "48"] not in inside
    assert {"96"} & {size for shape in inside for size in shape} <= {"96"}  # the arguments of the program itself
    (body,) = re.findall(r"sdy.manual_computation.*?\n(.*)", text, re.S)
    assert not re.search(r"tensor<(?:\d+x)*96x", body.partition("sdy.return")[0])


def test_layouts():
    """A product's dimension is divided by `tp` first and by `dp_shard` after it; keys of one head are shared."""
    mesh = abstract_mesh(8, tp_size=4, kv_heads=2)
    found = layouts(decoder_model.build(CONFIG).params, place(Storage(zero_level=3), num_shards=2), mesh)
    attention, mlp = found.weights["blocks"]["attention"], found.weights["blocks"]["mlp"]
    both = (KV_HEADS, SAME_KV_HEADS)
    assert attention["wq"].computed == jax.P(both) and attention["wq"].stored == jax.P((*both, SHARD))
    assert attention["wk"].computed == jax.P(KV_HEADS) and attention["wk"].stored == jax.P((KV_HEADS, SHARD))
    assert mlp["w_down"].computed == jax.P(None, both) and mlp["w_down"].stored == jax.P(SHARD, both)
    assert found.weights["outer"]["embed"].computed == jax.P(both)
    assert found.weights["blocks"]["mlp_norm"].computed_axes == ()
    with pytest.raises(
        ConfigError, match=r"tp_size: expected a divisor of attention\.wk's 16 kv_heads, got 3; lower it"
    ):
        layouts(decoder_model.build(CONFIG).params, place(Storage(), num_shards=1), abstract_mesh(3, tp_size=3))


def test_meshes():
    """Sizes of one are not in the mesh, so programs without tensor parallelism are what they were."""
    assert mesh_shape(8) == {"dp_replicate": 1, "dp_shard": 8} and list(mesh_shape(8)) == ["dp_replicate", "dp_shard"]
    assert mesh_shape(8, tp_size=2, kv_heads=2) == {"dp_replicate": 1, "dp_shard": 4, "tp": 2}
    assert mesh_shape(8, tp_size=8, kv_heads=2) == {"dp_replicate": 1, "dp_shard": 1, "tp": 2, "tp_rep": 4}
    assert mesh_shape(4, tp_size=4, kv_heads=1) == {"dp_replicate": 1, "dp_shard": 1, "tp_rep": 4}
    with pytest.raises(
        ConfigError, match=r"^dp_replicate_size x tp_size: expected a divisor of the 8 devices in use, got"
    ):
        mesh_shape(8, tp_size=3)
    with pytest.raises(
        ConfigError, match="x dp_shard_size x tp_size: expected 8, the devices in use, got 1 x 2 x 2 = 4"
    ):
        mesh_shape(8, tp_size=2, dp_shard_size=2)


REFUSED = [
    ({"recipe": "nvfp4", "model.intermediate_size": 64}, "model.intermediate_size: expected a multiple of 32 on each"),
    ({"recipe": "fp8_current", "model.intermediate_size": 96}, "model.intermediate_size: expected a multiple of 16 on"),
    ({"memcpy_send_recv": True}, "memcpy_send_recv: expected False with tp_size=4"),
    ({"model.vocab_size": 1002}, "model.vocab_size: expected a multiple of tp_size=4.*use 1004"),
    ({"model.intermediate_size": 99}, "model.intermediate_size: expected a multiple of tp_size=4"),
    (
        {"model.num_attention_heads": 6, "model.num_key_value_heads": 3},
        "model.num_attention_heads: expected a multiple",
    ),
    ({"model.num_attention_heads": 12, "model.num_key_value_heads": 6}, "model.num_key_value_heads: .* or a divisor"),
    ({"sequence_len": 30}, "sequence_len: expected a multiple of tp_size=4.*use 32"),
    ({"lmhead_chunks": 512}, "lmhead_chunks: expected a divisor of .* / tp_size = 128"),
]


def test_heads_that_no_group_can_share_are_refused_where_the_mesh_is_made():
    with pytest.raises(ConfigError, match=r"^tp_size: expected a multiple or a divisor of 6 key/value heads, got 4"):
        mesh_shape(4, tp_size=4, kv_heads=6)


@pytest.mark.parametrize("changes, said", REFUSED, ids=[next(iter(changes)) for changes, _ in REFUSED])
def test_what_is_not_built_is_refused(changes, said):
    c = default_config()
    c.update({"gpus": 4, "tp_size": 4})
    c.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=f"^{said}") as error:
        checks.check(c)
    assert "\n" not in str(error.value)


def test_groups_move_what_the_formulas_say():
    """Per layer and microbatch, a recomputed block gathers its inputs six times and scatters five: by hand, 2 x 4 GPUs.

    Of the last axis' two devices that share keys and values each has the gradient of its own queries.
    """
    L, D, F, V, S, K = 3, 32, 96, 64, 16, 4
    c = default_config()
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L}
    c.model.update(sizes | {"num_attention_heads": 4, "num_key_value_heads": 2})
    c.update({"gpus": 8, "tp_size": 4, "zero_level": 3, "sequence_len": S, "model_dtype": "bfloat16"})
    run = from_config(c, abstract_mesh(8, **mesh_sizes(c)), total_steps=10)
    found = step_collectives.collective_bytes(run, traffic.BatchShape(sequences=1, sequence_len=S, microbatches=K))
    x = 3 * S // 4 * D * 2  # what three others send or get of a sequence in bfloat16
    ids = 3 * S // 4 * 4
    blocks = L * ((2 * D * D + 3 * D * F) // 4 + 2 * D * D // 2 // 2 + 2 * D)
    outer = 2 * V * D // 4 + D
    assert found == {
        ("all-gather", "tp+tp_rep"): K * (L * 6 * x + 2 * x + 2 * ids),
        ("reduce-scatter", "tp+tp_rep"): K * (L * 5 * x + 2 * x),
        ("all-reduce", "tp+tp_rep"): K * (2 * 2 * ids + 2 * 3 * (L * 2 * D + D) * 2 // 4),
        ("all-reduce", "tp_rep"): K * L * 2 * (D // 4 * D) * 2,
        ("all-gather", "dp_shard"): (2 * K * 2 * blocks + 2 * outer) // 2,
        ("reduce-scatter", "dp_shard"): (K * 2 * blocks + 4 * outer) // 2,
    }


@pytest.mark.full
def test_a_compiled_step_moves_what_the_formulas_say():
    """On virtual CPU devices, in float32, with more key/value heads and with fewer than devices: within 2 %."""
    for tp_size in (2, 4):
        moves_what_is_said(Small(8, tp_size=tp_size, zero_level=3, lmhead_chunks=2))


@pytest.mark.full
def test_a_run_goes_on_under_another_layout(tmp_path):
    """On one device, then on four that share each sequence, then on one again: the same samples, step by step."""
    check_a_run_goes_on(config_of_a_run(tmp_path), tmp_path, {"gpus": 4, "tp_size": 2, "cp_size": 2})


def test_every_shard_rounds_with_numbers_of_its_own():
    """And what devices store together they round alike: the numbers of a norm vary over `dp_shard` only."""
    small = Small(8, tp_size=4)
    mlp = small.engine.layouts.master["blocks"]["mlp"]

    def firsts(name: str, layout) -> set[int]:
        context = UpdateContext({"step": np.int32(1)})
        f = lambda: _seed(small.engine.params["blocks"]["mlp"][name], layout, context, 8)[None]
        out = jax.P(layout.stored_axes)
        seeds = jax.jit(jax.shard_map(f, mesh=small.mesh, in_specs=(), out_specs=out))()
        return {int(first) for _, first in seeds}

    assert firsts("w_up", mlp["w_up"]) == firsts("w_down", mlp["w_down"]) == {8 * i for i in range(8)}
    norm = small.engine.layouts.master["blocks"]["mlp_norm"]
    assert norm.stored_axes == (SHARD,) and firsts("w_up", norm) == {0, 8}


def test_without_a_group_nothing_is_communicated():
    x = np.ones((2, 4), np.float32)
    for function in (tensor.own_part, tensor.all_gather_sequence, tensor.reduce_scatter_sequence):
        assert function(x) is x
    assert not tensor.is_divided("heads")


@needs(4)
def test_what_the_devices_of_a_group_have_together():
    """Two key/value heads on four devices. The gradient of a product that two of them have is summed on the first."""
    mesh = jax.make_mesh((2, 2), TENSOR, devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def of_group(x, same):
        slope = lambda *axes: jax.grad(lambda y: (x * operands.summed_before_rounding(y, axes)).sum())(x)
        gradients = [slope("kv_heads", "embed"), slope("heads", "embed"), slope("embed", "heads")]
        whole = tensor.all_gather_sequence(x[None])
        own = tensor.reduce_scatter_sequence(whole)
        largest = tensor.largest_of_group(x), tensor.largest_of_group(same)
        return *gradients, own[0], tensor.own_part(same[None])[0], *largest

    x, same = np.float32([1, 5, 2, 7]), np.float32([3, 1, 4, 2])
    each, all_alike = jax.P(TENSOR), jax.P()
    specs = {"in_specs": (each, all_alike), "out_specs": (each,) * 5 + (all_alike,) * 2, "mesh": mesh}
    shared, own, inputs, summed, part, largest, unchanged = jax.jit(jax.shard_map(of_group, **specs))(x, same)
    assert shared.tolist() == [6, 0, 9, 0]  # of (1, 5) and of (2, 7)
    assert own.tolist() == inputs.tolist() == x.tolist()
    assert summed.tolist() == (4 * x).tolist() and part.tolist() == same.tolist()
    assert float(largest[0]) == 7 and unchanged.tolist() == same.tolist()
    assert tensor.reduce_scatter_sequence(x) is x and tensor.all_gather_sequence(x) is x and not tensor.in_group()
