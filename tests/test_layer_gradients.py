"""Gradients by programs of one layer: what a layer leaves for later rests in files, and no bit changes."""

import dataclasses
import functools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from small import AS_USERS_DO, CONFIG, TABLES, Small, quick_at, stored, target_names, tokens

from surojax.errors import ConfigError
from surojax.memory.aligned import ALIGN
from surojax.memory.in_file import InFile, home_of
from surojax.memory.layer_file import NvmeError, Store
from surojax.models.lora import Lora
from surojax.models.model import Compute
from surojax.models.router_losses import RouterLosses
from surojax.numerics.recipes import Precision
from surojax.offloads import TO_FILES
from surojax.optim import normuon as muon
from surojax.optim.adamw8bit import adamw8bit
from surojax.placement.home import DEVICE, HOST, NVME
from surojax.placement.layout import batch_sharding
from surojax.placement.param import OUTER
from surojax.planner import file_time, footprint
from surojax.planner.traffic import BatchShape
from surojax.step.between import WorkWeights, layers_in_order
from surojax.step.file_step import UpdatingRounds, on_their_way
from surojax.step.several_programs import SeveralPrograms
from surojax.step.state_plan import bytes_per_device, leaf_bytes
from surojax.step.train_step import evaluated, up_to_date

A, B, S = 3, 4, 16
IN_MEMORY: dict[str, Any] = {"offload_weights": True, "offload_grads": True}
RESIDUALS = {"offload_residual": "nvme"}
STEP = {"offload_grads": "nvme"} | RESIDUALS
WEIGHTS = {"offload_weights": "nvme"}
IN_16_BITS = {"model_dtype": "bfloat16", "master_dtype": "bfloat16", "m_dtype": "bfloat16"}
STATE = {"offload_master": "nvme", "offload_optimizer": "nvme"}
SOME_GIB = 0.0005  # a part of what these small models have in files
LATE: dict[str, Any] = {"overlap_update": True}  # updates under the next forward pass
# Rows that the blocks of NF4 divide.
WITH_ADAPTERS = dataclasses.replace(
    CONFIG, hidden_size=64, intermediate_size=256, head_dim=32, lora=Lora(4, 8.0, target_names("all-linear"))
)
EXPERTS = dataclasses.replace(TABLES, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=24)
FROZEN_BASE: dict[str, Any] = {"config": WITH_ADAPTERS, "offload_grads": False}


def recipe(name: str) -> dict[str, Any]:
    return {"compute": Compute(precision=Precision(recipe=name))}


def batches(packed: bool = False) -> list[tuple]:
    starts = np.broadcast_to(np.where(np.arange(S) < 7, 0, 7).astype(np.int32), (A, B, S))
    return [(*tokens(A, B, S, seed=seed), *[starts] * packed) for seed in range(3)]


def trained(devices: int, **placed) -> tuple[list, list]:
    """(loss and norm of three steps, weights, outer state and history after them), compiled as users do."""
    small = Small(devices, batch=(A, B, S), **({"config": TABLES} | placed))
    of_steps = batches(placed.get("packed", False))
    small.compile_as_users_do(of_steps[0])
    losses = small.train(of_steps)
    state = up_to_date(small.step, small.state)
    return losses, [
        stored(x) for x in jax.tree.leaves((state.weights, state.master[OUTER], state.moments[OUTER], state.history))
    ]


def check_bits(folder, devices: int, in_files: dict[str, Any], **placed) -> None:
    expected = trained(devices, microbatches_per_fetch=A, **(IN_MEMORY | placed))
    losses, state = trained(devices, nvme_path=str(folder), **(IN_MEMORY | placed | in_files))
    assert losses == expected[0]
    for x, y in zip(state, expected[1], strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.full
@pytest.mark.parametrize(
    "devices, placed, in_files",
    quick_at(
        [
            (1, {}, {"offload_grads": "nvme"}),
            (
                4,
                {"zero_level": 3, "tp_size": 2},
                LATE | WEIGHTS | {"offload_optimizer": "nvme", "device_memory": SOME_GIB},
            ),
            (4, FROZEN_BASE | {"qlora_fp4": True, "zero_level": 3}, WEIGHTS),
            (1, {"config": dataclasses.replace(TABLES, tie_word_embeddings=True)}, STEP | STATE),
            (1, {"optimizer": muon.normuon}, STEP | STATE),
            (2, {"optimizer": adamw8bit, "zero_level": 3, "shard_outer": True}, STEP | STATE),
            (4, {"zero_level": 3, "cp_size": 2, "packed": True}, STEP | STATE),
            (2, IN_16_BITS | {"zero_level": 3}, LATE | WEIGHTS | STEP | STATE | {"nvme_slots": 2}),
            (1, IN_16_BITS | {"resident_layers": 1}, WEIGHTS | STATE),
            (1, {"offload_grads": False}, WEIGHTS | STATE),
            (1, recipe("fp8_hybrid"), STEP | STATE),  # largest magnitudes of all microbatches
            (1, {"config": EXPERTS, "auxiliary": RouterLosses(0.5, 0.5)}, LATE | WEIGHTS | STEP | STATE),
        ],
        0,
    ),
)
def test_what_a_layer_leaves_rests_in_files_and_changes_no_bit(tmp_path, devices, placed, in_files):
    """Three steps of three microbatches beside the step that is one program, with a group of all microbatches.

    The state of embedding and head is in files in four pieces, or two."""
    check_bits(tmp_path, devices, in_files, **placed)


@pytest.mark.parametrize(
    "devices, placed",
    quick_at(
        [
            (1, {"resident_layers": 1}),
            (4, {"zero_level": 3, "cp_size": 2}),
        ]
    ),
)
def test_evaluation_reads_weights_from_files(tmp_path, devices, placed):
    """The loss of a batch beside that of weights in host memory: the same to the bit."""
    batch = [x[0] for x in batches(placed.get("packed", False))[0]]
    found = []
    for in_files in ({"offload_weights": True}, WEIGHTS | {"nvme_path": str(tmp_path)}):
        small = Small(devices, batch=(A, B, S), **(placed | in_files))
        on_devices = jax.device_put(batch, batch_sharding(small.mesh, accumulated=False))
        step = small.run.eval_step().lower(small.plan.weights, *on_devices).compile(AS_USERS_DO)
        pair = [on_devices, [*on_devices[1::-1], *on_devices[2:]]]  # labels as inputs: another batch
        found.append(jax.device_get(list(evaluated(step, small.drawn().weights, pair))))
    assert found[0] == found[1]


def test_room_is_reserved_for_every_class(tmp_path):
    small = Small(batch=(A, B, S), nvme_path=str(tmp_path), **(STEP | STATE))
    run = small.run
    rows = footprint.by_class(
        dataclasses.replace(run, engine=with_all_microbatches(run.engine)), BatchShape(B, S, A), "gpu"
    )
    stored = {name: row[NVME.name] for name, row in rows.items()}
    tables = 2 * CONFIG.vocab_size * CONFIG.hidden_size * 4
    assert stored["grads"] == stored["master"] - tables > 0 and stored["moments"] == 2 * stored["master"]
    assert stored["residuals"] == CONFIG.num_hidden_layers * A * B * S * CONFIG.hidden_size * 4
    arrays = len(jax.tree.leaves((run.files, run.plan.master, run.plan.moments)))
    assert (
        sum(stored.values())
        <= run.store.places.bytes
        < sum(stored.values()) + CONFIG.num_hidden_layers * arrays * ALIGN
    )
    assert not run.store.path.exists()


@pytest.mark.parametrize(
    "placed, apart",
    [({}, False), ({"model_dtype": "bfloat16"}, True), ({"resident_layers": 1}, True), (IN_16_BITS, False)],
    ids=["float32", "other-dtype", "resident", "bfloat16"],
)
def test_weights_that_are_the_master_weights_take_no_room(tmp_path, placed, apart):
    """In files and of one dtype they are the same numbers, which are written once and read where they are."""
    run = Small(batch=(A, B, S), nvme_path=str(tmp_path), **(IN_MEMORY | WEIGHTS | STATE | placed)).run
    rows = footprint.by_class(run, BatchShape(B, S, A), "gpu")
    assert ("weights" in {place.row for place in run.store.places.all}) == (rows["weights"][NVME.name] > 0) == apart
    weights = jax.tree.leaves(run.plan.weights["blocks"], is_leaf=lambda x: isinstance(x, InFile))
    assert all(x.source is None for x in weights if isinstance(x, InFile)) == apart


@pytest.mark.parametrize("gib", [0.0001, SOME_GIB, 1])
def test_files_that_are_kept_in_memory_are_smaller(tmp_path, gib):
    """The classes that wait longest for files come first, and the estimate knows as many bytes as the store."""
    run = Small(batch=(A, B, S), nvme_path=str(tmp_path), files_in_memory=gib, **(WEIGHTS | STEP | STATE)).run
    rows = footprint.by_class(
        dataclasses.replace(run, engine=with_all_microbatches(run.engine)), BatchShape(B, S, A), "gpu"
    )
    in_files = {name: row[NVME.name] for name, row in rows.items() if name in TO_FILES}
    stored = dict.fromkeys(TO_FILES, 0)
    for place in run.store.places.all:
        stored[place.row] += len(place.records) * place.in_file
    arrays = sum(len(place.records) for place in run.store.places.all)
    assert all(abs(in_files[row] - stored[row]) <= arrays * ALIGN for row in TO_FILES)
    assert sum(stored.values()) <= run.store.places.bytes < sum(stored.values()) + arrays * ALIGN
    assert run.store.places.kept <= gib * 2**30 < run.store.places.kept + arrays * ALIGN or gib == 1
    assert [stored[row] > 0 for row in TO_FILES] == sorted((stored[row] > 0 for row in TO_FILES), reverse=True)
    assert (run.store.places.bytes == 0) == (gib == 1)


def with_all_microbatches(engine):
    return dataclasses.replace(engine, microbatches_per_fetch=A)


@pytest.mark.full
@pytest.mark.parametrize("late", [{}, LATE], ids=str)
def test_what_is_in_memory_beside_a_program_is_planned(tmp_path, monkeypatch, late):
    """Every array larger than a batch that exists while a program runs is planned as its argument or beside it."""
    small = Small(batch=(A, B, S), nvme_path=str(tmp_path), **(IN_MEMORY | WEIGHTS | STEP | STATE | late))
    small.train(batches()[:2])
    shape = jax.ShapeDtypeStruct((A, B, S), np.int32, sharding=batch_sharding(small.mesh))
    planned = dict(zip(small.step.functions, small.step.programs(shape, shape), strict=True))
    assert len(planned) > 5
    unplanned = {}
    run = SeveralPrograms.run

    def observed(step, name, *arguments):
        new = (x for x in jax.live_arrays() if id(x) not in before and x.size > A * B * S)
        kinds = Counter((x.shape, x.dtype.name) for x in new)
        part = planned[name]
        kinds -= Counter((x.shape, x.dtype.name) for x in jax.tree.leaves((part.arguments, part.others)))
        if kinds:
            unplanned[name] = kinds
        return run(step, name, *arguments)

    before = {id(x) for x in jax.live_arrays()}
    monkeypatch.setattr(SeveralPrograms, "run", observed)
    small.train(batches()[2:])
    assert not unplanned


@pytest.mark.full
@pytest.mark.parametrize(
    "in_memory, late", quick_at([(0.0, {}), (0.0, LATE), (SOME_GIB, {}), (SOME_GIB, LATE)], 0, 3), ids=str
)
def test_a_step_reads_and_writes_what_is_planned(tmp_path, monkeypatch, late, in_memory):
    """Weights twice, gradients, residuals and state once; weights once if the forward pass makes them."""
    files = WEIGHTS | STEP | STATE | late | {"files_in_memory": in_memory}
    small = Small(batch=(A, B, S), nvme_path=str(tmp_path), **(IN_MEMORY | files))
    small.train(batches()[:1])
    moved, put = [0, 0], [0]
    read, write, on_device = Store.read, Store.write, WorkWeights.on_device

    def count_read(store, l, place, *of_array):
        array = read(store, l, place, *of_array)
        moved[0] += array.nbytes - place.kept
        return array

    def count_write(store, l, place, array):
        moved[1] += array.nbytes - place.kept
        write(store, l, place, array)

    def count_put(weights, l, rounds):
        put[0] += sum(x.nbytes for x in rounds if home_of(x) == HOST)
        return on_device(weights, l, rounds)

    monkeypatch.setattr(Store, "read", count_read), monkeypatch.setattr(Store, "write", count_write)
    monkeypatch.setattr(WorkWeights, "on_device", count_put)
    small.train(batches()[1:2])
    shape = jax.ShapeDtypeStruct((A, B, S), np.int32, sharding=batch_sharding(small.mesh))
    programs = small.step.programs(shape, shape)
    assert tuple(moved) == file_time.moved(programs)
    passes = {part.name for part in programs if part.name}
    assert passes == {"forward", "backward", "embedding and head", *([] if late else ["update"])}
    assert put[0] == sum(part.times * leaf_bytes(x) for part in programs for x in jax.tree.leaves(part.put))
    if in_memory:
        return
    plan = small.plan
    classes = (plan.weights["blocks"], plan.master, plan.moments)
    weights, *state = (bytes_per_device(tree, NVME) for tree in classes)
    others = sum(bytes_per_device(tree, NVME) for tree in small.run.files)
    read = (1 if late else 2) * weights + sum(state) + others
    assert tuple(moved) == (read, sum(state) + others)  # weights are the master weights, which are written once
    assert put[0] == (1 if late else 2) * weights  # on the device the update leaves them there


@pytest.mark.full
@pytest.mark.parametrize("part", [0.3, 2.0])
def test_a_budget_of_device_memory_is_room_for_the_layer_that_comes_next(tmp_path, monkeypatch, part):
    """The largest tensors of a layer, as many as fit, are put on the device before the program of its update."""
    files = IN_MEMORY | LATE | WEIGHTS | STEP | STATE
    plain = Small(batch=(A, B, S), nvme_path=str(tmp_path), **files)
    shape = jax.ShapeDtypeStruct((A, B, S), np.int32, sharding=batch_sharding(plain.mesh))
    of_layer = bytes_per_device(plain.step.programs(shape, shape)[-1].arguments[2:4], HOST)
    small = Small(batch=(A, B, S), nvme_path=str(tmp_path), **files, device_memory=part * of_layer / 2**30)
    update = small.step.programs(shape, shape)[-1]
    early = bytes_per_device(update.put)
    largest = max(leaf_bytes(x) for x in jax.tree.leaves(update.arguments[2:4]))
    assert min(part, 1) * of_layer - largest < early <= part * of_layer and (early == of_layer) == (part > 1)
    assert bytes_per_device(update.arguments[2:4], HOST) == of_layer - early
    space, more = (
        footprint.by_class(x.run, BatchShape(B, S, A), "gpu")["working space"][DEVICE.name] for x in (plain, small)
    )
    assert more - space == min(int(part * of_layer), of_layer)  # the estimate counts it
    read = UpdatingRounds.read
    homes = []

    def seen(rounds, l):
        arrived = read(rounds, l)
        homes.append(sum(x.nbytes for x in jax.tree.leaves(arrived) if x.sharding.memory_kind == DEVICE.memory_kind))
        return arrived

    monkeypatch.setattr(UpdatingRounds, "read", seen)
    small.train(batches()[:2])
    assert set(homes) == {early}


def test_a_disk_that_fails_ends_the_step(tmp_path, monkeypatch):
    """In the middle of either pass, in a thread that writes: the error is raised, and nothing waits for ever."""
    small = Small(batch=(A, B, S), nvme_path=str(tmp_path), **(IN_MEMORY | WEIGHTS | STEP | STATE))
    plain = Store.write
    for stacks in (small.run.files.residuals["blocks"], small.run.files.grads["blocks"]):
        lost = 1, jax.tree.leaves(stacks)[0].place

        def write(store, l, place, array, lost=lost):
            if (l, place) == lost:
                raise NvmeError("nvme_path: could not write")
            plain(store, l, place, array)

        monkeypatch.setattr(Store, "write", write)
        small.state = small.drawn()
        with pytest.raises(NvmeError, match="could not write"):
            small.train(batches()[:1])


def test_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", functools.partial(int, 2))
    with pytest.raises(
        ConfigError, match=r"offload_weights, offload_grads, offload_residual: .* several processes, got 'nvme'"
    ):
        Small(batch=(A, B, S), nvme_path=str(tmp_path), **STEP)


def test_the_largest_arrays_that_fit_are_on_the_device_a_layer_early():
    """Of those in host memory: 24 bytes leave room for 16, then for 8; the rest, and what is on the device, stays."""

    def planned(size: int, home):
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=home.memory_kind)
        return jax.ShapeDtypeStruct((size,), np.int8, sharding=sharding)

    arrays = {"a": planned(8, HOST), "b": planned(16, HOST), "c": planned(12, HOST), "d": planned(4, DEVICE)}
    placed, early = on_their_way(arrays, 24)
    assert {name: home_of(x) for name, x in placed.items()} == {"a": DEVICE, "b": DEVICE, "c": HOST, "d": DEVICE}
    assert [x.shape for x in early] == [(16,), (8,)]


def test_layers_of_several_segments_are_in_the_order_of_the_model():
    files = {
        "a": SimpleNamespace(segment=SimpleNamespace(numbers=(1, 3)), kinds=("x", "y")),
        "b": SimpleNamespace(segment=SimpleNamespace(numbers=(0, 2)), kinds=("z", "z")),
    }
    assert [*layers_in_order(files).items()] == [(("b", 0), "z"), (("a", 0), "x"), (("b", 1), "z"), (("a", 1), "y")]  # type: ignore[arg-type]
