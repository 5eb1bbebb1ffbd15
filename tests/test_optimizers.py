"""Every optimizer in a whole training step: placements and numbers of devices change nothing, checkpoints move."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import numpy as np
import pytest
from small import CONFIG, Small, quick_at, tokens

from surojax.errors import CheckpointError
from surojax.memory.nvme import claim
from surojax.optim import normuon as muon, optimizer as optim
from surojax.optim.adamw import adamw
from surojax.optim.adamw8bit import adamw8bit
from surojax.run.checkpoint import Checkpoints
from surojax.run.restore import restore

OFFLOADED: dict[str, Any] = {"offload_optimizer": True, "offload_master": True}
OPTIMIZERS: dict[str, Any] = {"adamw8bit": adamw8bit, "normuon": muon.normuon}  # adamw: all other tests'
BATCHES = [tokens(2, 8, 16, seed=i) for i in range(3)]


WORDS = dataclasses.replace(CONFIG, vocab_size=512)  # embedding and head are updated in several parts


@functools.cache
def trained(name: str, devices: int = 1, *, as_users_compile: bool = False, **placed) -> tuple:
    """(curve, state) after three steps."""
    small = Small(devices, optimizer=OPTIMIZERS.get(name, adamw), **placed)
    if as_users_compile:
        small.compile_as_users_do(BATCHES[0])
    curve = small.train(BATCHES)
    for x in jax.tree.leaves(small.state):
        by_index = {}
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(by_index.setdefault(str(shard.index), shard.data), shard.data)
    return curve, jax.device_get(small.state)


def same(a, b):
    chex.assert_trees_all_equal(a, b)


@pytest.mark.parametrize(
    "name, master, devices",
    quick_at([("adamw8bit", "float32", 4)]),
)
def test_offloading_changes_no_bit(name, master, devices):
    """Also of what is rounded at random: host memory is updated in parts of other sizes, with the same bits."""
    kind = {"config": WORDS, "master_dtype": master, "as_users_compile": True}
    plain, offloaded = (trained(name, devices, **kind, **placed) for placed in ({}, OFFLOADED))
    assert plain[0] == offloaded[0]
    same(plain[1].master, offloaded[1].master)
    same(plain[1].moments, offloaded[1].moments)


@pytest.mark.parametrize(
    "devices, layers, placed",
    quick_at(
        [
            (8, 3, {"zero_level": 3, "replicate": 2} | OFFLOADED),  # a device without a layer
            # groups of two, one of which is resident; rounded at random
            (4, 6, {"resident_layers": 2, "offload_weights": True, "zero_level": 3, "master_dtype": "bfloat16"}),
            (8, 4, {"zero_level": 1, "tp_size": 2}),  # both dimensions of a matrix are divided
        ],
    ),
)
def test_devices_that_divide_the_orthogonalisation_compute_what_each_would_alone(devices, layers, placed, monkeypatch):
    """To the bit: layers in groups, one on each device, and every layer gathered on all devices."""
    how = placed | {"config": dataclasses.replace(CONFIG, num_hidden_layers=layers), "optimizer": muon.normuon}
    in_groups = Small(devices, **how)
    found = in_groups.train(BATCHES[:2])
    monkeypatch.setattr(optim, "layers_together", lambda *_: 1)
    alone = Small(devices, **how)
    assert found == alone.train(BATCHES[:2])
    same(in_groups.state, alone.state)


@pytest.mark.full
def test_a_large_embedding_is_updated_in_parts_to_the_same_bits():
    """In host memory it is: 256 words are four parts, none larger than a matrix of a block, `[80, 32]`."""
    large = dataclasses.replace(CONFIG, vocab_size=256, num_hidden_layers=1)
    plain, offloaded = (Small(config=large, master_dtype="bfloat16", **placed) for placed in ({}, OFFLOADED))
    program = offloaded.step.lower(offloaded.plan, *offloaded.put(BATCHES[0])).as_text()
    assert "tensor<4x64x32xbf16>" in program and "tensor<1x256x32xbf16>" not in program
    for small in (plain, offloaded):
        small.compile_as_users_do(BATCHES[0])
    assert plain.train(BATCHES[:2]) == offloaded.train(BATCHES[:2])
    same(jax.device_get(plain.state.master), jax.device_get(offloaded.state.master))


@pytest.mark.full
def test_files_change_no_bit_of_what_is_rounded_at_random(tmp_path):
    """A layer's tensors are counted alike where they are updated together and one after the other."""
    options = {"config": dataclasses.replace(CONFIG, num_hidden_layers=2), "master_dtype": "bfloat16"}
    plain = Small(**options)
    in_files = Small(offload_optimizer="nvme", nvme_path=str(tmp_path), **options)
    with claim(in_files.run.store):
        assert in_files.train(BATCHES[:2]) == plain.train(BATCHES[:2])
    same(jax.device_get(in_files.state.master), jax.device_get(plain.state.master))


@pytest.mark.parametrize(
    "name, devices, placed",
    [("normuon", 8, {"zero_level": 2, "replicate": 2}), ("adamw8bit", 8, {"zero_level": 3})],
    ids=["normuon 2x4 zero 2", "adamw8bit 8 zero 3"],
)
@pytest.mark.full
def test_devices_and_levels_change_rounding_only(name, devices, placed):
    """Sums of gradients in another order: 1e-6 of each. Adam's first steps divide such differences by small roots, and
    8-bit codes are rounded the other way where a number is that near to its random threshold; bound: that of verify."""
    curve, one = trained(name, devices, **placed), trained(name)
    np.testing.assert_allclose(curve[0], one[0], rtol=1e-4)
    if name == "adamw8bit":  # codes are rounded at random, each shard's with the numbers that one device draws
        codes = zip(*(jax.tree.leaves(run[1].moments) for run in (curve, one)), strict=True)
        same_codes = [np.mean(a == b) for a, b in codes if a.dtype in (np.int8, np.uint8)]
        assert len(same_codes) == 18 and min(same_codes) > 0.97, same_codes


@pytest.mark.full
def test_a_checkpoint_moves_from_one_device_to_four(tmp_path):
    """Every array of the state is restored as it was, into shards, and training continues from it."""
    one = Small(1, optimizer=adamw8bit)
    one.train(BATCHES[:2])
    with Checkpoints(tmp_path, save_total_limit=1) as checkpoints:
        checkpoints.save(one.state, {"step": 2})
    before = jax.device_get(one.state)
    four = Small(4, optimizer=adamw8bit, zero_level=3, offload_optimizer=True)
    assert checkpoints.last is not None
    four.state = restore(checkpoints.last, four.plan)
    same(jax.device_get(four.state.moments), before.moments)
    same(jax.device_get(four.state.master), before.master)
    shard = four.state.moments["blocks"]["mlp"]["w_up"].m.sharding.shard_shape((3, 80, 32))
    assert shard == (3, 20, 32)
    np.testing.assert_allclose(four.train(BATCHES[2:]), one.train(BATCHES[2:]), rtol=1e-4)


WIDE = dataclasses.replace(CONFIG, intermediate_size=96)  # three devices cut the columns of w_down `[32, 96]`
SIXES = [tokens(2, 6, 16, seed=i) for i in range(3)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.full
def test_a_last_dimension_is_sharded(name):
    """As above; 8-bit blocks end where the shards do, so that they are other blocks: 3 % of other noise in an update
    (pallas_kernels/adamw8bit_update.py), measured 2e-7 of losses and gradient norms in three steps; bound: verify's."""
    one, three = (Small(n, config=WIDE, optimizer=OPTIMIZERS[name]) for n in (1, 3))
    specs = jax.tree.map(lambda x: x.sharding.spec, three.plan.moments["blocks"]["mlp"]["w_down"])
    assert specs.m == jax.P(None, None, "dp_shard")
    np.testing.assert_allclose(three.train(SIXES), one.train(SIXES), rtol=1e-4)


@pytest.mark.full
def test_states_of_another_layout_are_reblocked_and_of_another_optimizer_refused(tmp_path):
    """Three blocks in a row become one: each code is off by at most half of its new step."""
    one, three = (Small(n, config=WIDE, optimizer=adamw8bit) for n in (1, 3))
    rng = np.random.default_rng(0)

    def drawn(x):
        top = np.iinfo(x.dtype).max if np.issubdtype(x.dtype, np.integer) else 1e-4
        numbers = (top * rng.uniform(-1 if x.dtype == np.int8 else 0, 1, x.shape)).astype(x.dtype)
        return jax.device_put(numbers, x.sharding)

    three.state = three.state._replace(moments=jax.tree.map(drawn, three.state.moments))
    with Checkpoints(tmp_path, save_total_limit=1) as checkpoints:
        checkpoints.save(three.state, {"step": 1})
    assert checkpoints.last is not None
    states = three.state, restore(checkpoints.last, one.plan)
    old, new = (state.moments["blocks"]["mlp"]["w_down"] for state in states)
    scales = [np.asarray(x.m_scale) for x in (old, new)]
    wide, narrow = sorted(scales, key=np.size)
    np.testing.assert_array_equal(wide[..., 0], np.max(narrow, axis=-1))
    of_old, of_new = (
        np.asarray(x.m, np.float32) * np.sqrt(np.repeat(scale, 96 // scale.shape[-1], -1))
        for x, scale in zip((old, new), scales, strict=True)
    )
    assert np.any(of_old != of_new)
    assert np.all(np.abs(of_old - of_new) <= 0.5001 * np.sqrt(scales[1]))
    with pytest.raises(CheckpointError, match="expected the state of the same optimizer, got that of another"):
        restore(checkpoints.last, Small(1, config=WIDE).plan)
