"""Where tensors rest changes nothing: every offload setting, alone and together, gives the same losses to the bit.

That each does, alone and all together, is in test_verify.
"""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG, Small, quick_at, tokens

from surojax.errors import ConfigError
from surojax.inference.sample import generate
from surojax.memory import host as offload
from surojax.models import decoder_model
from surojax.models.model import DEFAULT
from surojax.models.order import repeating
from surojax.placement import table as placement
from surojax.placement.home import DEVICE, HOST
from surojax.placement.layout import batch_sharding
from surojax.planner import layer_sizes
from surojax.run.checkpoint import Checkpoints
from surojax.run.on_disk import FOLDER, steps_in
from surojax.run.restore import restore
from surojax.step import train_step as step, update
from surojax.step.gradients import Sums
from surojax.step.state_plan import bytes_per_device

SETTINGS = ("offload_residual", "offload_optimizer", "offload_master", "offload_grads", "offload_weights")
ALL = dict.fromkeys(SETTINGS, True)
BATCHES = [tokens(2, 8, 24, seed=i) for i in range(10)]


@functools.cache
def plain(devices: int, recompute_block: bool) -> list[tuple[float, float]]:
    """Ten steps with everything on the device; ZeRO-3 where there are several."""
    level = 3 if devices > 1 else 1
    return Small(devices, zero_level=level, recompute_block=recompute_block).train(BATCHES)


PLACED = [(1, 0.3, True), (4, 0.6, True)]


@pytest.mark.parametrize("devices, part, overlaps", quick_at(PLACED))
def test_a_budget_of_device_memory_keeps_tensors_there_and_changes_no_bit(devices, part, overlaps):
    """A part of master weights and moments, or more than there is; gradients are kept with the update apart or not."""
    sharding = {"zero_level": 3 if devices > 1 else 1}
    batches = BATCHES[:3]
    in_host = Small(devices, **sharding, **ALL)
    stored = bytes_per_device((in_host.plan.master, in_host.plan.moments), HOST)
    budget = part * stored
    kept = Small(devices, **sharding, **ALL, overlap_update=overlaps, device_memory=budget / 2**30)
    assert kept.train(batches) == Small(devices, **sharding).train(batches)
    gradients = kept.run.engine.layouts.grads["blocks"]
    homes = {layout.home for layout in jax.tree.leaves(gradients)}
    if part > 1:
        assert homes == {DEVICE} and not bytes_per_device((kept.plan.master, kept.plan.moments), HOST)
        return
    state = kept.plan.master, kept.plan.moments
    accumulators = sum(
        size for home, size in layer_sizes.accumulators(kept.run, kept.run.model.segments[0]) if home == DEVICE
    )
    on_device = bytes_per_device(state, DEVICE) - bytes_per_device((in_host.plan.master, in_host.plan.moments), DEVICE)
    smallest = max(bytes_per_device(x, HOST) for x in jax.tree.leaves(state))
    assert homes == {DEVICE, HOST}
    assert budget - smallest < on_device + accumulators <= budget
    assert bytes_per_device(state, HOST) == stored - on_device


@pytest.mark.parametrize("devices", [4])
@pytest.mark.full
def test_runs_of_layers_inside_a_stack_fetch_their_own(devices):
    """A run ends inside its stack: what comes behind it there is not the layer that its next pass begins with."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=4, sliding_window=8, sliding_window_pattern=3)
    assert len(repeating(config.variants(DEFAULT.precision))) > 1
    options = {"config": config, "zero_level": 3 if devices > 1 else 1}
    expected = Small(devices, **options).train(BATCHES[:2])
    assert Small(devices, offload_weights=True, **options).train(BATCHES[:2]) == expected


@pytest.mark.parametrize("clamped_by_slices", [True, False])
def test_slices_beyond_a_stack_are_of_the_nearest_layer(monkeypatch, clamped_by_slices):
    """Whether slices clamp their index, or have to be told to, as with jaxlib 0.11."""
    monkeypatch.setattr(offload, "COPY_ENGINES_CLAMP", clamped_by_slices)
    stack = jnp.arange(8.0).reshape(4, 2)

    @jax.jit
    def at(l):
        host = offload.put(stack, HOST)
        return offload.read(host, l), offload.put(offload.write_layer(host, jnp.full(2, -1.0), l), DEVICE)

    for l, nearest in ((-1, 0), (0, 0), (2, 2), (3, 3), (4, 3)):
        layer, written = at(l)
        np.testing.assert_array_equal(layer, stack[nearest])
        np.testing.assert_array_equal(written, stack.at[nearest].set(-1.0))


@pytest.mark.full
def test_losses_are_the_same_if_slices_do_not_clamp(monkeypatch):
    """As with jaxlib 0.11: what is clamped here would otherwise be copied from beyond the stack."""
    monkeypatch.setattr(offload, "COPY_ENGINES_CLAMP", False)
    assert Small(4, zero_level=3, resident_layers=1, **ALL).train(BATCHES) == plain(4, True)


@pytest.mark.full
def test_resident_layers_in_evaluation_sampling_and_restored_checkpoints(tmp_path):
    """The same loss, text and arrays as with the weights in one stack."""
    found = []
    for placed in ({}, {"offload_weights": True, "resident_layers": 1}):
        small = Small(4, zero_level=3, **placed)
        evaluate = step.make_eval_step(small.engine, small.plan, small.mesh)
        sums, _ = evaluate(
            small.state.weights, *jax.device_put(tokens(8, 24), batch_sharding(small.mesh, accumulated=False))
        )
        text = list(
            generate(decoder_model.build(CONFIG), small.state.weights, np.array([3, 1, 4]), max_tokens=4, temperature=0)
        )
        found.append((float(sums["loss"]), text))
    assert found[0] == found[1]
    with Checkpoints(tmp_path, save_total_limit=1) as checkpoints:
        checkpoints.save(small.state, {"step": 0})
    restored = restore(steps_in(tmp_path / FOLDER)[0], small.plan)
    chex.assert_trees_all_equal(restored, small.state)


@pytest.mark.full
def test_accumulators_in_host_memory_need_not_start_as_zeros(monkeypatch):
    """On GPUs XLA leaves them as they are allocated: its host offloader replaces the zeros by `AllocateBuffer`."""

    def unfilled(*args):
        found = zeros(*args)
        return found._replace(stack=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), found.stack))

    zeros, expected = Sums.new, plain(4, True)[:2]
    monkeypatch.setattr(Sums, "new", unfilled)
    assert Small(4, zero_level=3, offload_grads=True).train(BATCHES[:2]) == expected


@pytest.mark.parametrize("replicate, level", quick_at([(4, 1)]))
def test_offloaded_gradients_under_other_meshes(replicate, level):
    """Groups with everything in host memory; float32 sums in another order than on one device."""
    devices = 4 if level == 1 else 8
    ours = Small(devices, replicate=replicate, zero_level=level, **ALL).train(BATCHES)
    np.testing.assert_allclose(ours, plain(1, True), rtol=1e-4)  # as in test_engine: AdamW amplifies rounding
    if replicate > 1:
        assert ours[:3] == Small(devices, replicate=replicate, zero_level=level).train(BATCHES[:3])


@pytest.mark.full
def test_offloaded_gradients_are_summed_over_replicas_once():
    """HSDP: one loop over layers, that of the norm, has the sum over dp_replicate; the update reads what it wrote."""
    small = Small(8, replicate=2, zero_level=3, **ALL)
    batch = [jax.ShapeDtypeStruct((2, 8, 24), np.int32, sharding=batch_sharding(small.mesh))] * 2
    text = small.step.lower(small.plan, *batch).compile().as_text()
    found = dict(re.findall(r"^%?([\w.\-]+) \(.*?\) -> .*? \{\n(.*?)^\}", text, flags=re.M | re.S))
    bodies = re.findall(r"body=%?([\w.\-]+)", text)
    assert len(bodies) >= 4 and sum("all-reduce(" in found[name] for name in bodies) == 1


@functools.cache
def whole(config) -> list[tuple[float, float]]:
    """Ten steps on one device."""
    return Small(config=config).train(BATCHES)


@pytest.mark.parametrize(
    "tied, options",
    quick_at([(True, {"replicate": 2, **ALL})]),
    ids=["tied-host"],
)
def test_sharded_outer_layers(tied, options):
    """A vocabulary split over devices: no device holds the embedding, and the sums come in another order."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    small = Small(8, config=config, zero_level=3, shard_outer=True, lmhead_chunks=2, **options)
    shards = 8 // options.get("replicate", 1)
    assert small.state.weights["outer"]["embed"].addressable_shards[0].data.shape == (64 // shards, 32)
    np.testing.assert_allclose(small.train(BATCHES), whole(config), rtol=1e-4)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_sweep_updates_every_layer(n):
    """Of stacks in host memory, in a loop with two layers in its body from four layers on; others are as they were."""
    weights, master, moments, grads = (np.arange(k, k + 3.0 * (n + 1)).reshape(n + 1, 3) for k in (0, 100, 200, 300))
    lanes = update.Update(
        *(lambda run: (run.engine, run.optimizer))(Small(offload_master=True, offload_weights=True))
    ).lanes

    def function(values):
        m = values["moments"] - values["grads"]
        return {"weights": values["master"] - m, "master": 2 * values["master"] + m, "moments": m}

    def swept(weights, stacks):
        part = offload.LayerStack(offload.put(weights, HOST), 1, n + 1)
        stacks["master"] = offload.put(stacks["master"], HOST)
        return offload.put(update.sweep_part(lanes, function, part, stacks), DEVICE)

    stacks = {"master": master, "moments": moments, "grads": grads}
    work, new = jax.jit(swept)(weights[1:], stacks)
    expected = function({name: stack[1:] for name, stack in stacks.items()})
    np.testing.assert_array_equal(work, expected["weights"])
    for name in ("master", "moments"):
        np.testing.assert_array_equal(new[name], np.concatenate([stacks[name][:1], expected[name]]))
    np.testing.assert_array_equal(new["grads"], grads)


@pytest.mark.parametrize("rows", [2, 3])
def test_two_layers_are_exchanged_in_halves(rows):
    """As `exchange` does. Layers of an odd number of rows have no halves."""
    stacks = [np.arange(4.0 * rows * 3).reshape(4, rows, 3), np.arange(4.0 * rows).reshape(4, rows)]
    new = [-stack[0] for stack in stacks]

    def exchanged(exchange, stacks, new):
        return offload.put(exchange(offload.put(stacks, HOST), new, 0, 3), DEVICE)

    expected, found = (
        jax.jit(functools.partial(exchanged, exchange))(stacks, new)
        for exchange in (offload.exchange, offload.exchange_in_halves)
    )
    jax.tree.map(np.testing.assert_array_equal, found, tuple(expected))
    np.testing.assert_array_equal(found[0][0][0], new[0])
    np.testing.assert_array_equal(found[1][0], stacks[0][3])


def test_new_stacks_have_the_types_that_are_asked_for():
    """Of bools too, which routers save: a sum of one and a number would be int32."""
    wanted = {dtype: jax.ShapeDtypeStruct((3, 4), dtype) for dtype in ("float32", "int8", "bool")}
    stacks = jax.jit(lambda: offload.allocate({name: jnp.zeros(x.shape, x.dtype) for name, x in wanted.items()}, HOST))
    jax.tree.map(lambda x, y: chex.assert_equal((x.shape, x.dtype), (y.shape, y.dtype)), stacks(), wanted)


@pytest.mark.full
def test_arrays_rest_where_the_table_says():
    small = Small(4, zero_level=3, **ALL)
    small.train(BATCHES[:1])
    kinds = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree)}
    state = small.state
    assert kinds(state.weights["blocks"]) == kinds(state.master) == {"pinned_host"}
    assert kinds(state.weights["outer"]) == {"device"}
    adam = state.moments["blocks"]["mlp"]["w_gate"][1]
    assert kinds(adam) == {"pinned_host"}
    size = bytes_per_device
    assert size(small.plan.master) == 0 and size(small.plan.master, HOST) == size(Small(4).plan.master)


def test_impossible_combinations_are_refused_with_the_fix():
    with pytest.raises(ConfigError, match="shard_gradients=True or zero_level=2"):
        placement.place(placement.Storage(offload_grads=True), num_shards=4)
    with pytest.raises(ConfigError, match=r"set shard_gradients=True$"):  # the level is set already
        placement.place(placement.Storage(offload_grads=True, zero_level=2, shard_gradients=False), num_shards=4)
    with pytest.raises(ConfigError, match="divides"):
        Small(5, shard_outer=True)
    with pytest.raises(ConfigError, match="leave it out, or set offload_weights=True"):
        placement.place(placement.Storage(resident_layers=1), num_shards=1)
    with pytest.raises(ConfigError, match="fewer than the 3 layers, got 3; leave it out with offload_weights=False"):
        Small(offload_weights=True, resident_layers=3)
    assert placement.place(placement.Storage(offload_grads=True), num_shards=1).grads.home == HOST


def test_a_layer_is_written_in_the_dtype_of_its_stack():
    stack = jnp.zeros((3, 2), jnp.bfloat16)
    for l, row in ((1, 1), (7, 2), (-1, 0)):  # or the layer nearest to it
        found = jax.jit(offload.write_layer)(stack, jnp.array([1.0, 1 + 2**-9], jnp.float32), l)
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found, np.eye(3)[:, [row, row]])
