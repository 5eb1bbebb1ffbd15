"""Mistakes that other trainers made without an error: when they divided work over GPUs, and with experts; a test each.

Most are tests of one axis, in its file: TESTS names them. Here are those of all axes: their oracle is the plain model
on one device, as in tests/test_engine.py.
"""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from small import CONFIG, Small, plain_loss, tokens, worst_relative
from test_engine import ORDER_OF_SUMS, engine_gradients

from surojax.models.model import Compute
from surojax.parallel import context
from surojax.parallel.context import METHODS
from surojax.placement.mesh import CONTEXT, make_mesh
from surojax.run.checkpoint import Checkpoints
from surojax.run.nonfinite import NonFiniteLoss, check_finite
from surojax.run.on_disk import find
from surojax.run.restore import restore

HERE = "test_silent_mistakes.py"
TESTS = {  # mistake: tests that fail with it
    "labels are shifted after sequences are divided": (
        f"{HERE}::test_labels_are_shifted_before_sequences_are_divided",
        "test_drawn.py::test_gradients_are_those_of_the_plain_model",
    ),
    "a rank without one counted token": (
        f"{HERE}::test_a_rank_without_one_counted_token_and_documents_that_do_not_meet",
        "test_context_parallel.py::test_documents_end_at_any_place_of_a_devices_part",
        "test_drawn.py::test_gradients_are_those_of_the_plain_model",
        "test_pipeline.py::test_documents_end_at_any_place_of_a_stages_part",
        "test_engine.py::test_all_labels_ignored_is_zero_not_nan",
    ),
    "replicated parameters count several times in the gradient norm": (  # they compare the norm too
        "test_drawn.py::test_gradients_are_those_of_the_plain_model",
        "test_engine.py::test_equals_grad_of_the_plain_model",
    ),
    "qk-norm and norm weights under sequence parallelism": (  # qwen on meshes with tp
        "test_drawn.py::test_gradients_are_those_of_the_plain_model",
    ),
    "tied embeddings, with stages and shards": (  # qwen and gemma
        "test_drawn.py::test_gradients_are_those_of_the_plain_model",
    ),
    "a vocabulary that tp_size x pp_size does not divide": (  # is refused
        "test_tensor_parallel.py::test_what_is_not_built_is_refused",
        "test_pipeline.py::test_what_is_not_built_is_refused",
    ),
    "dq and dk of a ring in which all keys of a hop are hidden": (
        "test_context_parallel.py::test_nothing_crosses_the_edge_of_a_document",
    ),
    "documents that end at, before and after the edge of a device's tokens": (
        f"{HERE}::test_a_rank_without_one_counted_token_and_documents_that_do_not_meet",
        "test_context_parallel.py::test_nothing_crosses_the_edge_of_a_document",
    ),
    "a NaN on one rank, which goes on without the others": (
        f"{HERE}::test_a_nan_on_one_rank_stops_all",
        "test_train.py::test_a_loss_that_is_not_finite_ends_the_run",
    ),
    "a checkpoint under another layout, and back": (
        f"{HERE}::test_a_checkpoint_goes_round_all_axes_and_trains_on_to_the_bit",
        "test_checkpoint.py::test_a_state_moves_from_one_device_to_eight_and_back",
        "test_tensor_parallel.py::test_a_run_goes_on_under_another_layout",  # these two: data position
        "test_pipeline.py::test_a_run_goes_on_with_stages_and_without",
    ),
    "a collective that is left out": (
        "test_verify_mutants.py::test_every_collective_of_a_row_is_needed",
    ),
}  # fmt: skip
OF_EXPERTS = {  # likewise; `MISTAKES` of test_experts.py and test_glm.py make some of them in our source
    "softmax twice in the balance loss": ("test_experts.py::test_a_mistake_is_noticed",),
    "a balance loss without a gradient, or with one that grows with the devices": (
        "test_experts.py::test_a_mistake_is_noticed",
        "test_experts.py::test_losses_of_routers_are_of_a_whole_step",
    ),
    "losses of routers in an evaluation": ("test_experts.py::test_statistics_are_sums_over_tokens_that_count",),
    "padding is counted": (
        "test_experts.py::test_a_mistake_is_noticed",
        "test_experts.py::test_statistics_are_sums_over_tokens_that_count",
    ),
    "losses of routers of each microbatch": ("test_experts.py::test_losses_of_routers_are_of_a_whole_step",),
    "recomputation chooses other experts": ("test_experts.py::test_recomputation_takes_the_experts_that_were_chosen",),
    "counts doubled by recomputation": ("test_experts.py::test_statistics_are_sums_over_tokens_that_count",),
    "a gradient norm without experts": ("test_experts.py::test_losses_of_routers_are_of_a_whole_step",),
    "groups of rows that are not aligned": (
        "test_experts.py::test_a_mistake_is_noticed",
        "test_experts.py::test_blocks_have_room_however_choices_fall",
    ),
    "rows that nobody wrote": (
        "test_experts.py::test_a_mistake_is_noticed",
        "test_experts.py::test_every_choice_is_computed",
    ),
    "top-k before or after the softmax, renormalised or not": (
        "test_experts.py::test_equals_transformers",
        "test_experts.py::test_a_mistake_is_noticed",
        "test_glm.py::test_a_mistake_is_noticed",
    ),
    "gate and up interleaved or stacked, clamp, alpha, biases": (
        "test_experts.py::test_a_mistake_with_gpt_oss_is_noticed",
        "test_sinks.py::test_clamped_swiglu_is_that_of_gpt_oss",
    ),
    "experts under the other layout of keys are left random": (
        "test_experts.py::test_equals_transformers",
        "test_experts.py::test_files_without_all_experts_are_refused",
    ),
    "adapters freeze experts without a word": ("test_expert_adapters.py::test_a_run_that_freezes_experts_says_so",),
    "merging writes the base": ("test_expert_adapters.py::test_merging_adds_to_what_was_multiplied",),
    "a collective waits for experts without a token": (
        "test_experts.py::test_devices_whose_experts_have_no_token",
        "test_expert_parallelism.py::test_tokens_reach_the_devices_of_their_experts_and_sums_come_back",
    ),
}  # fmt: skip

TWO = dataclasses.replace(CONFIG, num_hidden_layers=2)
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"devices": 4, "zero_level": 3},
    "hsdp": {"devices": 4, "zero_level": 3, "replicate": 2},
    "tp": {"devices": 4, "zero_level": 3, "tp_size": 2},
    "pp": {"devices": 4, "zero_level": 3, "pp_size": 2},
    **{
        f"cp-{method}": {"devices": 4, "zero_level": 3, "cp_size": 2, "compute": Compute(cp_method=method)}
        for method in METHODS
    },
}


def test_each_mistake_has_its_tests():
    folder = Path(__file__).parent
    assert len(OF_EXPERTS) == 16
    for names in (TESTS | OF_EXPERTS).values():
        for name in names:
            file, _, function = name.partition("::")
            assert re.search(rf"^def {function}\(", (folder / file).read_text(), re.MULTILINE), name


@pytest.mark.full(after=1)
@pytest.mark.parametrize("method", METHODS)
def test_labels_are_shifted_before_sequences_are_divided(method):
    """Wherever a device's tokens are in their sequence, each has the following one of the whole sequence as label."""
    cp_size = 4
    mesh = make_mesh(jax.devices()[:cp_size], cp_size=cp_size)
    ids = np.arange(100, 148, dtype=np.int32).reshape(2, 24)
    labels = np.concatenate([ids[:, 1:], np.full((2, 1), -1, np.int32)], axis=1)
    columns = np.broadcast_to(np.arange(24, dtype=np.int32), ids.shape)

    def per_device(*arrays):
        return [context.own_tokens(x, method)[None] for x in arrays], context.own_index(6, method)[None]

    divided = jax.shard_map(per_device, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(CONTEXT))
    (own_ids, own_labels, own_columns), index = jax.tree.map(np.asarray, jax.jit(divided)(ids, labels, columns))
    assert sorted(own_ids.ravel()) == list(range(100, 148))
    np.testing.assert_array_equal(own_columns, np.broadcast_to(index[:, None], own_columns.shape))
    np.testing.assert_array_equal(own_labels, np.where(own_columns == 23, -1, own_ids + 1))


@functools.cache
def two_documents():
    """(inputs, labels, starts) `[4, 4, 24]`, last tokens of the first documents.

    Only the first document of a row has labels, whose tokens are below 32; the second has the others. Rows 0 and 1, of
    the first devices, have no labels at all, nor has the first microbatch.
    """
    inputs, labels = tokens(4, 4, 24, vocab_size=32)
    last = np.array([11, 10, 12, 5, 6, 17, 18, 11, 12, 10, 5, 11, 6, 12, 10, 11]).reshape(4, 4, 1)
    column = np.arange(24)
    in_second = column > last
    inputs = np.where(in_second, inputs + 32, inputs).astype(np.int32)
    labels = np.where(column >= last, np.int32(-1), labels)
    labels[:, :2] = -1
    labels[0] = -1
    return inputs, labels, np.where(in_second, last + 1, 0).astype(np.int32)


@pytest.mark.full
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "zero3"])  # of which hsdp is two
def test_a_rank_without_one_counted_token_and_documents_that_do_not_meet(layout):
    """Every gradient is that of the plain model; that of document A's loss by B's embeddings is 0, not a small number.

    Document A ends at, one before and one after the edges of devices' parts of a sequence.
    """
    batch = two_documents()
    small = Small(config=TWO, recompute_block=False, packed=True, **LAYOUTS[layout])
    params = jax.tree.map(np.asarray, small.state.weights)
    expected, expected_grads = jax.jit(jax.value_and_grad(plain_loss(TWO)))(params, *batch)
    loss, grads = engine_gradients(small, batch)
    assert loss == pytest.approx(float(expected), rel=ORDER_OF_SUMS)
    assert worst_relative(grads, expected_grads) < ORDER_OF_SUMS
    of_embedding = np.asarray(grads["outer"]["embed"])
    assert np.all(of_embedding[32:] == 0) and np.all(of_embedding[np.unique(batch[0][batch[1] >= 0])].any(axis=1))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["hsdp", "cp-ring"])
def test_a_nan_on_one_rank_stops_all(layout):
    """A token whose embedding is NaN is in one sequence: every device reads a loss or a norm that is not finite."""
    small = Small(config=TWO, **LAYOUTS[layout])
    inputs, labels = tokens(2, 4, 24, vocab_size=63)
    inputs[1, 3, 20] = 63

    state = small.state
    table = np.array(state.weights["outer"]["embed"])
    table[63] = np.nan
    poisoned = jax.device_put(table, state.weights["outer"]["embed"].sharding)
    outer = state.weights["outer"] | {"embed": poisoned}
    state = state._replace(weights=state.weights | {"outer": outer})
    _, metrics = small.step(state, *small.put((inputs, labels)))
    for device in range(4):
        loss, norm = (float(metrics[name].addressable_shards[device].data) for name in ("loss", "grad_norm"))
        with pytest.raises(NonFiniteLoss):
            check_finite(1, loss, norm, None)


@pytest.mark.full
def test_a_checkpoint_goes_round_all_axes_and_trains_on_to_the_bit(tmp_path):
    """Weights, moments and the random numbers of rounding: after the way round, a step is that of a run that stayed."""
    kind: dict[str, Any] = {"config": TWO, "model_dtype": "bfloat16", "master_dtype": "bfloat16", "m_dtype": "bfloat16"}
    sizes = {"tp": {"tp_size": 2}, "cp": {"cp_size": 2, "replicate": 2}, "pp": {"pp_size": 2, "tp_size": 2}}
    layouts = {name: Small(8, zero_level=3, **kind, **size) for name, size in sizes.items()}
    first = layouts["tp"]
    first.train([tokens(2, 8, 24)])
    state = jax.tree.map(np.asarray, first.state)
    stayed = first.train([tokens(2, 8, 24, seed=1)])
    ends = jax.tree.map(np.asarray, first.state)
    moved = jax.device_put(state, jax.tree.map(lambda x: x.sharding, first.plan))
    for name in ("tp", "cp", "pp"):
        with Checkpoints(tmp_path / name, save_total_limit=1) as checkpoints:
            checkpoints.save(moved, {"step": 1})
        following = {"tp": "cp", "cp": "pp", "pp": "tp"}[name]
        moved = restore(find(tmp_path / name), layouts[following].plan)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), moved, state)
    first.state = moved
    assert first.train([tokens(2, 8, 24, seed=1)]) == stayed
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), first.state, ends)
