"""Layers in files: nothing changes, nothing is lost, and what cannot work is refused before it begins."""

import dataclasses
import errno
import functools
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import psutil
import pytest
from small import CONFIG, TABLES, Small, quick_at, stored, tokens

from surojax import default_config, read_metrics
from surojax.assembly.from_config import from_config
from surojax.config import checks, flags
from surojax.config.changes import changed
from surojax.errors import CheckpointError, ConfigError
from surojax.memory import layer_file, nvme, striped
from surojax.memory.aligned import ALIGN, Buffers
from surojax.memory.in_file import InFile, InFiles, only_layer, own_layers
from surojax.memory.layer_file import NvmeError, Store
from surojax.memory.striped import Busy, StripedFile
from surojax.models.decoder_config import DecoderConfig
from surojax.placement import table as placement
from surojax.placement.home import DEVICE, HOST, NVME
from surojax.placement.layout import batch_sharding
from surojax.placement.mesh import abstract_mesh, make_mesh
from surojax.planner import footprint
from surojax.planner.traffic import BatchShape
from surojax.run import checkpoint, on_disk
from surojax.run.checkpoint import Checkpoints
from surojax.run.metrics import TIMINGS
from surojax.run.restore import check_restorable, restore
from surojax.step.file_step import UpdatingRounds
from surojax.step.state_plan import bytes_per_device
from surojax.train import main

BATCHES = [tokens(2, 8, 24, seed=i) for i in range(10)]
BOTH = {"offload_optimizer": "nvme", "offload_master": "nvme"}
REST = dict.fromkeys(("offload_residual", "offload_grads", "offload_weights"), True)


# ----------------------------------------------------------------- the same numbers


@functools.cache
def in_memory(devices: int, config: DecoderConfig, options: tuple) -> list[tuple[float, float]]:
    return Small(devices, config=config, **dict(options)).train(BATCHES)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Small:
    """Compiled once for the tests that only need some run with both in files, on one device."""
    return Small(config=TABLES, nvme_path=str(tmp_path_factory.mktemp("nvme")), **BOTH)


@pytest.fixture
def small(compiled) -> Small:
    """The same with a new state."""
    compiled.state = compiled.drawn()
    return compiled


def folder_of(small: Small) -> Path:
    return small.run.store.folder


@pytest.mark.parametrize(
    "devices, options, offloaded",
    quick_at(
        [
            (1, {}, {"offload_optimizer": "nvme"}),
            (4, {"zero_level": 3}, BOTH | REST | {"resident_layers": 1}),
        ]
    ),
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else str(x),
)
def test_layers_in_files_change_no_bit(tmp_path, devices, options, offloaded):
    """Ten steps against the run with everything on the device: the same arithmetic in the same order."""
    config = TABLES if devices == 1 else CONFIG
    small = Small(devices, config=config, nvme_path=str(tmp_path), **options, **offloaded)
    assert small.train(BATCHES) == in_memory(devices, config, tuple(options.items()))
    master, outer = small.state.master["blocks"], small.state.master["outer"]
    in_files = [isinstance(x, InFile) for x in (*jax.tree.leaves(master), outer["embed"], outer["head"])]
    assert all(in_files) == any(in_files) == (offloaded.get("offload_master") == "nvme")


@pytest.mark.parametrize(
    "layers, devices, placed",
    [
        (3, 2, {"master_dtype": "bfloat16"}),  # rounded at random, by the number of the layer
        (7, 8, {"zero_level": 3, "pp_size": 4, "pp_schedule": "1f1b"}),
    ],
    ids=["uneven", "uneven-pp4-zero3"],
)
@pytest.mark.full
def test_stages_update_their_layers_in_files_together(tmp_path, layers, devices, placed):
    """Five steps to the bit. Padding has no record, and its state stays zeros in memory too."""
    config = dataclasses.replace(TABLES, num_hidden_layers=layers)
    placed = {"pp_size": 2, **placed}
    in_host = Small(devices, config=config, offload_optimizer=True, offload_master=True, **placed)
    (tmp_path / "stages").mkdir()
    small = Small(devices, config=config, nvme_path=str(tmp_path / "stages"), **BOTH, **placed)
    for each in (small, in_host):
        each.compile_as_users_do(BATCHES[0])
    assert small.train(BATCHES[:5]) == in_host.train(BATCHES[:5])
    assert len(small.run.store.places.layers) == layers
    for ours, theirs in zip(jax.tree.leaves(small.state.moments), jax.tree.leaves(in_host.state.moments), strict=True):
        np.testing.assert_array_equal(stored(ours), theirs)


@pytest.mark.full
def test_stages_that_are_not_full_restore_from_files_into_memory_and_back(tmp_path):
    """A checkpoint of files has zeros for padding, which stages in memory read."""
    kind: dict[str, Any] = {"config": dataclasses.replace(TABLES, num_hidden_layers=3), "pp_size": 2}
    (tmp_path / "stages").mkdir()
    in_files = Small(2, nvme_path=str(tmp_path / "stages"), **BOTH, **kind)
    in_host = Small(2, offload_optimizer=True, offload_master=True, **kind)
    saved = save(tmp_path / "files", in_files.state, 0, in_files.run.layers)
    there = restore(saved, in_host.plan, in_host.run.layers)
    assert_same(there, in_files.state)
    back = save(tmp_path / "host", there, 0, in_host.run.layers)
    assert_same(restore(back, in_files.plan, in_files.run.layers), there)
    other = Small(config=dataclasses.replace(kind["config"], intermediate_size=96))  # fewer entries, and another width
    with pytest.raises(CheckpointError, match=r"cannot be read .*w_(gate|up|down).*96"):
        check_restorable(saved, other.plan, other.run.layers)


@pytest.mark.full
def test_a_checkpoint_of_stages_restores_without_stages_and_back(tmp_path, monkeypatch):
    """All in files. The checksums are the same, and so is the step that follows, padding or not, after an update that
    ended when some stages' layers were written."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=3)
    (tmp_path / "stages").mkdir()
    small = Small(4, config=config, nvme_path=str(tmp_path / "stages"), pp_size=2, zero_level=3, **BOTH)
    small.train(BATCHES[:2])
    one = Small(config=config, nvme_path=str(tmp_path), **BOTH)
    folder = save(tmp_path / "saved", small.state, 2, small.run.layers)
    one.state = restore(folder, one.plan, one.run.layers)
    folder = save(tmp_path / "back", one.state, 2, one.run.layers)
    expected = small.train(BATCHES[2:3])
    plain = Store.write

    def write(store, l, *args):
        if l == 2:  # layer 0 of the second stage, in a round with layer 0 of the first
            raise NvmeError("the run ends here")
        plain(store, l, *args)

    with monkeypatch.context() as patch, pytest.raises(NvmeError):
        patch.setattr(Store, "write", write)
        small.train(BATCHES[3:4])
    assert small.run.store.interrupted() == 4
    small.state = restore(folder, small.plan, small.run.layers)
    sums = [on_disk.read_meta(on_disk.find(tmp_path / x))["checksums"] for x in ("saved", "back")]
    assert sums[0] == sums[1]
    assert small.train(BATCHES[2:3]) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_the_layer_of_one_stage_is_read_to_the_bit(dtype):
    """Also a negative zero and a NaN, which sums would lose."""
    layer = np.arange(8).astype(jax.numpy.dtype(dtype)).reshape(2, 4)
    if dtype != "uint8":
        layer[0, :2] = -0.0, np.nan
    round_of_stages = np.stack([np.zeros_like(layer), layer, np.zeros_like(layer)])
    device = jax.NamedSharding(jax.make_mesh((1,), ("pp",)), jax.P())
    found = jax.jit(only_layer, static_argnums=1)(round_of_stages, device)
    assert found.dtype == layer.dtype and np.asarray(found).tobytes() == layer.tobytes()


@pytest.mark.full
def test_how_long_files_were_busy():
    """Counted once where threads overlap, and up to now while one is at it."""
    busy = Busy()
    assert busy.seconds == 0.0
    with busy:
        time.sleep(0.02)
        with busy:
            pass
        until_now = busy.seconds
        assert until_now >= 0.02
    ended = busy.seconds
    assert ended >= until_now
    time.sleep(0.01)
    assert busy.seconds == ended


def test_three_layers_are_in_memory_and_disk_and_device_work_together(small, monkeypatch):
    """Counted from the begin of a layer's read to the end of its write, which waits here for the next read to begin."""
    small.train(BATCHES[:1])
    L, lock, held, order = CONFIG.num_hidden_layers, threading.Lock(), [0], []
    begun, plain_read, plain_write = [threading.Event() for _ in range(L)], UpdatingRounds.read, UpdatingRounds.write

    def read(step, number):
        with lock:
            held.append(held[-1] + 1)
        begun[number.l].set()
        return plain_read(step, number)

    def write(step, number, layer):
        l = number.l
        assert l + 1 == L or begun[l + 1].wait(60), "the next layer is read only after this one is written"
        plain_write(step, number, layer)
        order.append(l)
        with lock:
            held.append(held[-1] - 1)

    monkeypatch.setattr(UpdatingRounds, "read", read), monkeypatch.setattr(UpdatingRounds, "write", write)
    small.train(BATCHES[1:2])
    assert order == list(range(L)) and 2 <= max(held) <= 3 and held[-1] == 0


def test_the_update_copies_no_stack(small):
    """Stacks in memory are written in place, as in the loops of the step that is one program."""
    batch = jax.ShapeDtypeStruct((2, 8, 24), np.int32, sharding=batch_sharding(small.mesh))
    gradients, outer, update = small.step.programs(batch, batch)
    assert (gradients.times, outer.times, update.times) == (1, 4, CONFIG.num_hidden_layers)
    text = update.function.lower(*update.arguments).compile().as_text()
    stacks = {",".join(map(str, p.shape)) for p in jax.tree.leaves(small.plan.weights["blocks"])}
    assert stacks and not set(re.findall(r"= f32\[([\d,]+)\]\S* copy\(", text)) & stacks


def test_the_memory_that_is_counted(tmp_path):
    """Layers and tables are in files; of the outer layers, the final norm alone is in host memory."""
    small = Small(4, zero_level=3, config=TABLES, nvme_path=str(tmp_path), **BOTH)
    size, plan = bytes_per_device, small.plan
    in_memory = Small(1, config=TABLES).plan
    state = sum(size((tree["blocks"], tree["outer"] | {"norm": {}})) for tree in (in_memory.master, in_memory.moments))
    assert size(plan, NVME) * 4 == state
    assert size((plan.master["blocks"], plan.moments["blocks"]), HOST) == 0
    assert size((plan.master["outer"], plan.moments["outer"]), HOST) == 3 * 4 * CONFIG.hidden_size // 4
    files = InFiles((plan.master, plan.moments)).stacks
    assert state <= small.run.store.places.bytes <= state + ALIGN * sum(file.layers for file in files)

    c = small_config(tmp_path)
    run = from_config(c, make_mesh(jax.devices()[:1]), total_steps=9)

    def of_layers(plan) -> int:
        return size((plan.master["blocks"], plan.moments["blocks"]), NVME)

    host = footprint.estimate_host(run, BatchShape(1, 32, 2))
    tables = size(run.plan, NVME) - of_layers(run.plan)
    assert c.model.vocab_size * c.model.hidden_size * 2 * 12 == tables
    pieces = run.plan.master["outer"]["embed"].layers
    in_flight = max(of_layers(run.plan) // c.model.num_hidden_layers, tables // pieces)
    assert host["layers from files"] == footprint.NVME_LAYERS * in_flight
    stages = from_config(small_config(tmp_path, gpus=2, pp_size=2), abstract_mesh(2, pp_size=2), total_steps=9)
    assert of_layers(stages.plan) == of_layers(run.plan) * 2 // 3  # two of three layers; the other stage has the third
    host = footprint.estimate_host(stages, BatchShape(1, 32, 2))
    assert host["layers from files"] == footprint.NVME_LAYERS * in_flight
    assert stages.store.places.record_bytes == run.store.places.record_bytes
    assert "layers from files" not in footprint.estimate_host(
        from_config(default_config(), run.mesh, total_steps=9), BatchShape(1, 32, 2)
    )


# ----------------------------------------------------------------- checkpoints


def values(state) -> dict[str, np.ndarray]:
    """Every array of master weights, moments and work weights by name, wherever it rests."""
    leaves = jax.tree_util.tree_leaves_with_path({"m": state.master, "o": state.moments, "w": state.weights})
    return {jax.tree_util.keystr(path): stored(x) for path, x in leaves} | {"step": np.asarray(state.step)}


def assert_same(a, b) -> None:
    a, b = values(a), values(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def save(folder: Path, state, step: int, layers: dict[str, int] | None = None) -> Path:
    with Checkpoints(folder, save_total_limit=1) as checkpoints:
        checkpoints.save(state, {"step": step} | ({"layers": layers} if layers else {}))
    assert checkpoints.last is not None
    return checkpoints.last


PLACES: dict[str, tuple[int, dict]] = {
    "device": (1, {}),
    "host": (8, {"zero_level": 2, "offload_optimizer": True, "offload_master": True}),
    "nvme": (1, BOTH),
    "nvme 4": (4, {"zero_level": 3, "offload_weights": True, **BOTH}),
}


@pytest.mark.full
def test_a_checkpoint_of_every_placement_restores_under_every_other(tmp_path):
    """From each to the next, all around: values to the bit, and the checksums of the arrays are the same numbers."""
    smalls = {}
    for name, (devices, placed) in PLACES.items():
        (tmp_path / name).mkdir()
        path = {"nvme_path": str(tmp_path / name)} if "nvme" in name else {}
        smalls[name] = Small(
            devices, config=TABLES, m_dtype="bfloat16", model_dtype="bfloat16", seed=len(smalls), **path, **placed
        )
    first = smalls["device"]
    first.train(BATCHES[:2])
    state, sums = first.state, []
    for i, name in enumerate(["nvme 4", "nvme", "host", "nvme", "nvme 4", "device"]):
        path = save(tmp_path / f"saved-{i}", state, 2)
        sums.append(on_disk.read_meta(path)["checksums"])
        state = restore(path, smalls[name].plan)
        assert_same(state, first.state)
    assert all(s == sums[0] for s in sums)

    smalls["nvme"].state = restore(path, smalls["nvme"].plan)
    assert smalls["nvme"].train(BATCHES[2:4]) == first.train(BATCHES[2:4])


def test_a_damaged_layer_is_found_when_it_is_read_from_the_file(small, tmp_path, monkeypatch):
    path = save(tmp_path / "saved", small.state, 0)
    plain = Store.read
    monkeypatch.setattr(Store, "read", lambda store, l, *where: (x := plain(store, l, *where)) + x.dtype.type(l == 2))
    with pytest.raises(CheckpointError, match=r"cannot be read \(master/blocks/.* damaged"):
        restore(path, small.plan)


@pytest.mark.full
def test_the_next_update_waits_until_a_checkpoint_is_read(small, tmp_path, monkeypatch):
    """The checkpoint is written in the background while gradients are computed; the file changes after that."""
    small.train(BATCHES[:1])
    expected, plain = values(small.state), InFile.read
    monkeypatch.setattr(InFile, "read", lambda file, l: time.sleep(0.005) or plain(file, l))
    with Checkpoints(tmp_path / "saved", save_total_limit=1) as checkpoints:
        checkpoints.save(small.state, {"step": 1})
        small.train(BATCHES[1:3])
    monkeypatch.undo()
    found = values(restore(tmp_path / "saved/checkpoints/1", Small(config=TABLES).plan))
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_an_update_waits_for_every_item_that_a_checkpoint_reads(small):
    """Master weights and moments are two items, read one beside the other, in either order."""
    store = small.run.store
    for first in (0, 1):
        holds = [store.hold(), store.hold()]
        with ThreadPoolExecutor(1) as thread:
            begins = thread.submit(store.begin_update, 1)
            holds[first].set_result(None)
            with pytest.raises(TimeoutError):
                begins.result(timeout=0.05)
            holds[1 - first].set_result(None)
            begins.result(timeout=10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # as in test_checkpoint
@pytest.mark.usefixtures("orbax_fails")
def test_a_checkpoint_that_cannot_be_written_does_not_block_the_next_update(small, tmp_path, monkeypatch):
    plain, plain_own, of_update = InFile.read, InFile.read_own, threading.local()

    def read_own(file, layers):
        of_update.reads = True
        return plain_own(file, layers)

    def read(file, l):
        if getattr(of_update, "reads", False):
            return plain(file, l)
        raise OSError(errno.EIO, "Input/output error")

    checkpoints = Checkpoints(tmp_path / "saved", save_total_limit=1)
    monkeypatch.setattr(checkpoint, "checksums", lambda **_: ({}, []))
    monkeypatch.setattr(InFile, "read", read), monkeypatch.setattr(InFile, "read_own", read_own)
    with pytest.raises(CheckpointError, match="Input/output error"), checkpoints:
        checkpoints.save(small.state, {"step": 1})
        small.train(BATCHES[:1])  # it would wait for ever here


# ----------------------------------------------------------------- refused


def small_config(folder: Path | str, **changes):
    c = default_config()
    c.model.vocab_size, c.model.hidden_size, c.model.intermediate_size = 320, 32, 64
    c.model.num_hidden_layers, c.model.num_attention_heads, c.model.num_key_value_heads = 3, 2, 1
    c.offload_optimizer = c.offload_master = "nvme"
    c.nvme_path = str(folder)
    c.update(changes)
    return c


def test_the_settings_in_config_files_flags_and_checkpoints(tmp_path, capsys):
    (tmp_path / "c.py").write_text(
        "from surojax import default_config\n\ndef get_config():\n    return default_config()\n"
    )
    parse = lambda *argv: flags.parse_flags(
        ["--config", str(tmp_path / "c.py"), *argv], __import__("argparse").ArgumentParser()
    )[0]
    for text, value in [("nvme", "nvme"), ("NVMe", "nvme"), ("true", True), ("off", False)]:
        c = parse(f"--config.offload_master={text}", f"--config.nvme_path={'x' if value == 'nvme' else ''}")
        checks.check(c)
        assert c.offload_master is value or c.offload_master == "nvme" == value
        assert checks.restored_config(json.loads(json.dumps(c.to_dict()))).to_dict() == c.to_dict()
        assert changed(c, {"offload_master": True}).offload_master is True and c.offload_master == value
    with pytest.raises(ConfigError, match="expected true or false or nvme, got 'disk'"):
        parse("--config.offload_optimizer=disk")
    for wrong in ("disk", 1, None, 2.0):
        c = default_config()
        c.offload_optimizer = wrong
        with pytest.raises(ConfigError, match=f"offload_optimizer: expected true or false or 'nvme', got {wrong!r}"):
            checks.check(c)
    c = default_config()
    c.offload_quants = True
    with pytest.raises(TypeError):
        c.offload_quants = "nvme"
    assert "--config.offload_master=False\n        master weights" in flags.describe_fields()


def test_settings_that_do_not_go_together():
    place = lambda **settings: placement.place(placement.Storage(**settings), num_shards=1)
    with pytest.raises(ConfigError, match="nvme_path: expected a folder with offload_master='nvme', got ''; set it"):
        place(offload_master="nvme")
    with pytest.raises(ConfigError, match=r"nvme_path: expected '' with nothing .*set offload_optimizer='nvme'"):
        place(nvme_path="x", offload_master=True)
    with pytest.raises(ConfigError, match="offload_optimizer: expected true or false or 'nvme', got 'disk'"):
        place(offload_optimizer="disk", nvme_path="x")


def store(folder: Path | str) -> Store:
    return from_config(small_config(folder), make_mesh(jax.devices()[:1]), total_steps=9).store


def test_folders_that_will_not_do(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for folder, message in [
        (tmp_path / "missing", r"expected a folder, got '.*missing' \(nothing there\); create it, or choose"),
        (tmp_path / "file", r"expected a folder, got '.*file' \(a file\)"),
        (Path("/proc"), r"expected a folder that can be written, got '/proc' \("),
    ]:
        with pytest.raises(ConfigError, match=f"nvme_path: {message}"):
            nvme.check_folders(store(folder))
    nvme.check_folders(store(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    free = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(
        ConfigError,
        match=r"nvme_path: needs [1-9][\d.]* [KM]iB in .*, where 9\.77 KiB are free; free some.*some in host",
    ):
        nvme.check_folders(store(tmp_path))
    (tmp_path / layer_file.FILE).write_bytes(bytes(store(tmp_path).places.bytes))
    os.sync()
    nvme.check_folders(store(tmp_path))  # the room that an earlier run took counts


def test_room_is_taken_before_the_first_step(tmp_path, monkeypatch):
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        reason = os.strerror(number)

        def full(*_, number=number, reason=reason):
            raise OSError(number, reason)

        with (
            monkeypatch.context() as patch,
            pytest.raises(ConfigError, match=rf"expected room for .*{reason}; free some.*in host"),
        ):
            patch.setattr(os, "posix_fallocate", full)
            nvme.claim(store(tmp_path)).__enter__()
    with nvme.claim(one := store(tmp_path)) as claimed:
        assert min(claimed.reads, claimed.writes) > 0 and claimed.line.startswith(
            f"nvme: {layer_file.readable_bytes(one.places.bytes)} in {tmp_path}, read at "
        )
        file = os.stat(tmp_path / layer_file.FILE)
        assert file.st_size == one.places.bytes and file.st_blocks * 512 >= one.places.bytes


def test_what_is_kept_in_memory(tmp_path, monkeypatch):
    """Refused if the machine has not so much; said beside the files; with all of it no disk is measured."""

    def keeping(gib: float) -> Store:
        c = small_config(tmp_path)
        c.files_in_memory = gib
        return from_config(c, make_mesh(jax.devices()[:1]), total_steps=9).store

    whole = store(tmp_path).places.bytes
    some, everything = keeping(whole / 4 / 2**30), keeping(1)
    with nvme.claim(some) as claimed:
        assert (
            f"{layer_file.readable_bytes(some.places.bytes)} in {tmp_path}, "
            f"{layer_file.readable_bytes(some.places.kept)} kept" in claimed.line
        )
        assert os.stat(tmp_path / layer_file.FILE).st_size == some.places.bytes < whole - 0.2 * whole
    with nvme.claim(everything) as claimed:
        assert (
            claimed.line
            == f"nvme: nothing in files, {layer_file.readable_bytes(everything.places.kept)} kept in host memory"
        )
        assert claimed.reads == claimed.writes == math.inf and everything.places.bytes == 0
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=everything.places.kept - 1, total=2**40)
    )
    with pytest.raises(ConfigError, match=r"^files_in_memory: expected at most .* free, .*iB, got .*iB kept; lower it"):
        nvme.check_folders(everything)


@pytest.mark.full
def test_ten_thousand_arrays_take_no_memory_and_no_descriptors(tmp_path):
    """400 layers of 25 arrays: the file is there in seconds, and a step more changes neither memory nor descriptors."""
    store = Store(tmp_path, 400)
    places = [store.places.reserve(ALIGN, "moments") for _ in range(25)]
    process = psutil.Process()
    started = time.perf_counter()
    assert not store.file.paths[1:] and time.perf_counter() - started < 10
    used = []
    for step in range(3):
        array = np.full(ALIGN, step, np.uint8)
        for l, place in itertools.product(range(400), places):
            store.write(l, place, array)
        for l, place in itertools.product(range(400), places):
            assert store.read(l, place, (ALIGN,), array.dtype)[-1] == step
        used.append((process.num_fds(), process.memory_info().rss))
    (descriptors, memory), _, last = used
    assert last[0] == descriptors and last[1] - memory < 4 * 2**20
    store.close()


def test_no_process_takes_room_before_all_have_measured_it(tmp_path, monkeypatch):
    one = store(tmp_path / "process-0")
    measured = []

    def all_are_here(_: str) -> None:
        measured.append(one.path.exists())

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(nvme, "processes_here", lambda: 2)
    monkeypatch.setattr(nvme.multihost_utils, "sync_global_devices", all_are_here)
    with nvme.claim(one):
        assert measured == [False] and one.path.exists()


def test_one_run_at_a_time(tmp_path):
    message = f"is used by another run \\(process {os.getpid()}\\); choose another"
    with nvme.claim(store(tmp_path)), pytest.raises(ConfigError, match=message):
        nvme.claim(store(tmp_path)).__enter__()
    with nvme.claim(store(tmp_path)):
        pass


def test_slow_disks(tmp_path):
    one = store(tmp_path)
    both = functools.partial(nvme.describe_disk_time, one)
    in_half_a_second = 4 * one.places.bytes  # bytes/s, however few these are
    assert both(in_half_a_second, in_half_a_second).startswith("nvme: ")
    assert both(one.places.bytes / 15, one.places.bytes / 5).startswith("warning: slow disk, nvme: ")
    assert both(one.places.bytes / 15, one.places.bytes / 5).count("20.0 s of reads and writes a step") == 1
    with pytest.raises(ConfigError, match=r"expected a disk that is fast enough, got .* 2\.0 hours a step; choose"):
        both(one.places.bytes / 3600, one.places.bytes / 3600)


def test_train_says_it_in_one_line_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some words\n" * 2000)
    text = RUN.format(data="text.txt", folder=str(tmp_path), nvme=str(tmp_path / "nvme"))
    (tmp_path / "config.py").write_text(text)

    def error() -> str:
        with pytest.raises(SystemExit) as caught:
            main(["--config", "config.py"])
        assert not (tmp_path / "run").exists()
        return str(caught.value.code)

    assert error().startswith("surojax.train: error: nvme_path: expected a folder, got ")
    (tmp_path / "nvme").mkdir()
    with nvme.claim(store(tmp_path / "nvme")):
        assert "is used by another run" in error()


# ----------------------------------------------------------------- a disk that fails


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_a_write_that_fails_in_a_step_names_the_file(small, tmp_path, monkeypatch, number):
    small.train(BATCHES[:1])
    plain, left = os.pwrite, [40]  # in the middle of an update: a layer has 27 arrays

    def write(*args):
        left[0] -= 1
        if left[0] == 0:
            raise OSError(number, os.strerror(number))
        return plain(*args)

    with monkeypatch.context() as patch, pytest.raises(NvmeError) as caught:
        patch.setattr(os, "pwrite", write)
        small.train(BATCHES[1:2])
    for expected in (f"could not write {folder_of(small)}/layers.bin", os.strerror(number), "no checkpoint is"):
        assert expected in str(caught.value)
    assert small.run.store.interrupted() == 2


def test_an_error_when_the_kernel_writes_pages_is_seen_before_the_next_update(small, tmp_path, monkeypatch):

    def fail(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    small.train(BATCHES[:1])
    before = small.run.store.path.read_bytes()
    with pytest.raises(NvmeError, match=r"could not write .*Input/output error"):
        small.train(BATCHES[1:2])
    assert small.run.store.path.read_bytes() == before


def test_a_file_that_something_else_cut_short(small):
    os.truncate(small.run.store.path, 10_000)
    with pytest.raises(NvmeError, match=r"could not use .*it has 10,000 bytes in place of"):
        small.train(BATCHES[:1])


def test_layers_larger_than_a_request_are_read_and_written_in_pieces(small, monkeypatch):
    monkeypatch.setattr(striped, "STRIPE", ALIGN)
    file = small.plan.master["blocks"]["mlp"]["w_up"]
    before = {l: file.read(l) for l in range(3)}
    assert file.layer_bytes > 2 * ALIGN
    file.write(1, before[1] + 1)
    for l in range(3):
        np.testing.assert_array_equal(file.read(l), before[l] + (l == 1))


def test_stripes_of_a_file():
    """Each byte is in one of the files, once; a request is in one stripe."""
    for n, size in [(1, 5), (2, 5), (3, 10), (3, 12)]:
        whole = StripedFile([Path(str(i)) for i in range(n)])
        stripe = striped.STRIPE
        sizes = whole.sizes(size * stripe + 4096)
        assert sum(sizes) == size * stripe + 4096 and sizes[size % n] % stripe == 4096
    assert whole.spans(0, 10) == [(0, 10)] and whole.spans(stripe - 4, 10) == [(0, 4), (4, 6)]
    assert whole.spans(stripe, 2 * stripe) == [(0, stripe), (stripe, stripe)]
    alone = StripedFile([Path("alone")])  # has no stripes: requests are as large as they may be
    assert alone.spans(stripe - 4, 10) == [(0, 10)] and alone.spans(5, stripe + 1) == [(0, stripe), (stripe, 1)]


@pytest.mark.full
def test_a_file_over_two_folders_holds_the_same(tmp_path, monkeypatch):
    """Stripes of a page, so that every array is in both: the same training, and both files have half of the bytes."""
    monkeypatch.setattr(striped, "STRIPE", ALIGN)
    two = [tmp_path / "one", tmp_path / "two"]
    for folder in two:
        folder.mkdir()
    runs = [Small(nvme_path=path, **BOTH) for path in (", ".join(map(str, two)), str(tmp_path))]
    with nvme.claim(runs[0].run.store) as claimed, nvme.claim(runs[1].run.store):
        assert f"in {two[0]}, {two[1]}, read at" in claimed.line
        assert runs[0].train(BATCHES[:3]) == runs[1].train(BATCHES[:3])
        with pytest.raises(ConfigError, match=r"two is used by another run"), nvme.claim(store(two[1])):
            pass
    sizes = [(folder / layer_file.FILE).stat().st_size for folder in two]
    assert sum(sizes) == runs[0].run.store.places.bytes and abs(sizes[0] - sizes[1]) <= ALIGN
    os.truncate(two[1] / layer_file.FILE, 0)
    with pytest.raises(
        NvmeError, match=r"could not use .*/two/layers.bin \(it has 0 bytes in place of [\d,]+: something else"
    ):
        runs[0].train(BATCHES[3:4])


def test_several_folders_that_will_not_do(tmp_path, monkeypatch):
    (tmp_path / "one").mkdir()
    for given, message in [
        (f"{tmp_path}/one, {tmp_path}/missing", r"expected a folder, got '.*/missing' \(nothing there\)"),
        ("~nobody-here/x", r"expected a folder, got '.*/~nobody-here/x' \(nothing there\)"),
        (f"{tmp_path}/one,{tmp_path}/one/", r"expected folders that differ, got .*/one, .*/one; name each once"),
    ]:
        with pytest.raises(ConfigError, match=f"nvme_path: {message}"):
            nvme.check_folders(store(given))
    both = store(f"{tmp_path}/one,{tmp_path}")
    free = shutil.disk_usage(tmp_path)._replace(free=both.places.bytes - 1)  # of one disk, of which each takes a part
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(
        ConfigError, match=f"nvme_path: needs {layer_file.readable_bytes(both.places.bytes)} in .* are free"
    ):
        nvme.check_folders(both)


def test_a_buffer_is_used_again_when_its_last_view_is_gone():
    buffers = Buffers()
    first = buffers.take(2 * ALIGN)
    first[:] = 7
    view, where = first[:5].view(np.int8).reshape(5, 1), first.ctypes.data
    del first
    assert where % ALIGN == 0 and buffers.take(2 * ALIGN).ctypes.data != where and (view == 7).all()
    del view
    assert where in {buffer.ctypes.data for buffer in [buffers.take(2 * ALIGN) for _ in range(3)]}
    # Of many sizes: pieces of layers are cut where their stripes end.
    others = {buffers.take(n * ALIGN).ctypes.data for n in range(129, 257)}
    assert len(others) == 1 and buffers.take(130 * ALIGN).size == 130 * ALIGN


@pytest.mark.full
def test_a_file_system_that_refuses_direct_access(tmp_path, monkeypatch):
    """As tmpfs does: the file goes through the page cache and does not stay there; the line about the disk says so."""
    plain, pages = os.open, []

    def refusing(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(path, flags, *mode)

    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, size, what: pages.append((at, size)))
    small = Small(nvme_path=str(tmp_path), **BOTH)
    with nvme.claim(small.run.store) as claimed:
        assert "refuses direct access" in claimed.line
        pages.clear()
        small.train(BATCHES[:1])
        small.run.store.settle()
    assert (0, 0) in pages and len(pages) > 2 * CONFIG.num_hidden_layers  # all that was written, and each piece read
    monkeypatch.undo()
    monkeypatch.setattr(os, "posix_fadvise", None)
    direct = Small(nvme_path=str(tmp_path), **BOTH)
    with nvme.claim(direct.run.store) as claimed:
        assert direct.run.store.file.is_direct and "refuses" not in claimed.line


class Shards:
    """A sharding of a round over four devices of two processes, that exists without them.

    starts: of each device's rows of a layer. stages: of each device.
    """

    def __init__(self, starts: list[int], stages: list[int]):
        rows = zip(stages, starts, strict=True)
        self.indices = [(slice(stage, stage + 1), slice(start, start + 2), slice(None)) for stage, start in rows]

    def devices_indices_map(self, shape) -> dict:
        return {Device(i // 2, i): index for i, index in enumerate(self.indices)}

    def shard_shape(self, shape) -> tuple[int, ...]:
        return (1, 2, *shape[2:]) if len(shape) == 3 else (2, *shape[1:])


class Device(NamedTuple):
    process_index: int
    number: int


@pytest.mark.parametrize(
    "starts, stored, firsts",
    [([0, 2, 4, 6], [4, 5, 6, 7], [True, True]), ([0, 2, 0, 2], [0, 1, 2, 3], [False, False])],
)
def test_a_process_stores_the_parts_that_its_devices_hold(tmp_path, monkeypatch, starts, stored, firsts):
    """Process 1 of two: of a layer whose rows are sharded over both, and of one that both have. A checkpoint has every
    part once."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    sharding = Shards(starts, [0] * 4)
    monkeypatch.setattr(InFile, "layer_sharding", lambda file, home: sharding)
    monkeypatch.setattr(InFile, "round_sharding", lambda file, home: sharding)
    store = Store(tmp_path, 3)
    file = InFile(store, "master", (3, 8, 5), "float32", SimpleNamespace(spec=jax.P()))
    assert store.folder == tmp_path / "process-1" and file.stored_shape(0) == (2, 2, 5)
    (parts,) = file.parts
    assert [part.first for part in parts.values()] == firsts
    store.folder.mkdir()
    layer = np.random.default_rng(0).standard_normal((8, 5), np.float32)
    file.write(1, file.stored_of(1, layer))
    np.testing.assert_array_equal(file.read(1).reshape(4, 5), layer[stored])
    assert store.path.stat().st_size == store.places.bytes == 3 * 4096
    store.close()


def test_parts_of_layers_go_to_the_devices_and_back(tmp_path, monkeypatch):
    """All eight devices are of one process of two here, so that it has all parts of both stages."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("pp", "a", "b"))
    store = Store(tmp_path, 3, own_layers(mesh, 3))
    file = InFile(store, "master", (4, 8, 4), "float32", jax.NamedSharding(mesh, jax.P("pp", "b", "a")))
    layers = np.random.default_rng(0).standard_normal((3, 8, 4), np.float32)
    layers[2, 0] = -0.0
    store.folder.mkdir()
    for l, layer in enumerate(layers):
        file.write(l, file.stored_of(l, layer))
        rounds = file.on_devices(file.read_own([l]), HOST)
        of_every_stage = jax.jit(only_layer, static_argnums=1)(rounds, file.layer_sharding(DEVICE))
        np.testing.assert_array_equal(np.asarray(of_every_stage).view(np.uint32), layer.view(np.uint32))
        (stored,) = file.from_devices(rounds, [l])
        np.testing.assert_array_equal(stored, file.read(l))
    array = file.on_devices({l: file.read(l) for l in (0, 2)}, DEVICE)
    np.testing.assert_array_equal(np.asarray(array), layers[[0, 2]])
    for l, stored in zip((0, 2), file.from_devices(array, (0, 2)), strict=True):
        np.testing.assert_array_equal(stored, file.read(l))
    assert not np.any(file.read(3)) and file.read_own([3]) == {}, "padding is in no file"
    store.close()


def test_a_process_stores_the_layers_of_its_stages(tmp_path, monkeypatch):
    """Process 1 of two has the second of two stages, which is not full: the last layers, and no padding."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    devices = np.array([SimpleNamespace(process_index=i // 2) for i in range(4)]).reshape(2, 2)
    mesh = SimpleNamespace(shape={"pp": 2, "a": 2}, axis_names=("pp", "a"), devices=devices)
    assert own_layers(mesh, 5) == [3, 4]
    sharding = Shards([0, 2, 0, 2], [0, 0, 1, 1])
    monkeypatch.setattr(InFile, "layer_sharding", lambda file, home: sharding)
    monkeypatch.setattr(InFile, "round_sharding", lambda file, home: sharding)
    store = Store(tmp_path, 5, own_layers(mesh, 5))
    file = InFile(store, "master", (6, 4, 5), "float32", SimpleNamespace(spec=jax.P("pp"), mesh=mesh))
    assert file.stored_shape(3) == (2, 2, 5) and file.stored_shape(0) == (0, 2, 5)
    assert all(part.first for part in file.parts[1].values())
    store.folder.mkdir()
    layer = np.random.default_rng(0).standard_normal((4, 5), np.float32)
    file.write(4, file.stored_of(4, layer))
    np.testing.assert_array_equal(file.read(4).reshape(4, 5), layer)
    with pytest.raises(IndexError, match=r"layer: expected one of \[3, 4\], got 0"):
        file.read(0)
    assert store.path.stat().st_size == store.places.bytes == 2 * 4096
    store.close()


def test_a_closed_store_reads_on_but_never_shortens_what_another_run_made(small):
    store, file = small.run.store, small.plan.master["blocks"]["mlp"]["w_up"]
    before = file.read(2)
    store.close()
    os.truncate(store.path, store.places.bytes + 8192)
    np.testing.assert_array_equal(file.read(2), before)
    assert store.path.stat().st_size == store.places.bytes + 8192


# ----------------------------------------------------------------- killed

RUN = """
from surojax import default_config

def get_config():
    c = default_config()
    c.data, c.output_dir, c.nvme_path = {data!r}, {folder!r} + "/run", {nvme!r}
    c.offload_optimizer = c.offload_master = "nvme" if c.nvme_path else False
    c.model.vocab_size, c.model.hidden_size, c.model.intermediate_size = 320, 32, 64
    c.model.num_hidden_layers, c.model.num_attention_heads, c.model.num_key_value_heads = 4, 2, 1
    c.model_dtype, c.sequence_len, c.per_device_batch_size = "float32", 32, 8
    c.max_steps, c.learning_rate, c.warmup_steps = 12, 1e-2, 2
    c.eval_steps, c.eval_batches, c.save_steps, c.save_total_limit = 4, 2, 3, 9
    c.sample_tokens = 0
    return c
"""

# When it has written so many arrays of the file since its first step began, the process is killed, or the disk is full.
END = """
import errno, os, signal, sys
import surojax.train
from surojax.memory.layer_file import Store

plain, count = os.pwrite, [None]
begin = Store.begin_update

def update(*args):
    count[0] = count[0] or 0
    begin(*args)

def write(*args):
    if count[0] is not None:
        count[0] += 1
        if count[0] == {writes}:
            {end}
    return plain(*args)

Store.begin_update, os.pwrite = update, write
sys.modules["surojax.train"].main(sys.argv[1:])
"""
ARRAYS = 4 * 27 + 5 * 6  # that a step of such a run writes: of its layers, and of pieces of embedding and head
KILLED, FULL = "os.kill(os.getpid(), signal.SIGKILL)", "raise OSError(errno.ENOSPC, 'No space left on device')"


def records(folder: Path) -> list[dict]:
    """What metrics.jsonl says, but for timings."""
    return [{k: v for k, v in r.items() if k not in TIMINGS} for r in read_metrics(folder / "metrics.jsonl")]


def runs(tmp_path: Path, monkeypatch, *more: str, slots: int = 1):
    """A function (folder, folder of the file or "", command) -> (exit code, output), which trains with these flags."""
    (tmp_path / "text.txt").write_text("".join(chr(97 + i * i % 23) + " \n"[i % 41 == 0] for i in range(40_000)))
    (tmp_path / "nvme").mkdir()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

    def run(folder: Path, nvme_path: str, *command: str) -> tuple[int, str]:
        folder.mkdir(exist_ok=True)
        text = RUN.format(data=str(tmp_path / "text.txt"), folder=str(folder), nvme=nvme_path)
        (folder / "config.py").write_text(text)
        fields = [*more, f"--config.nvme_slots={slots}"] if nvme_path else more
        argv = [sys.executable, *command, "--config", str(folder / "config.py"), *fields]
        done = subprocess.run(argv, timeout=300, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.full
def test_killed_within_updates_it_ends_with_the_losses_of_a_run_in_memory(tmp_path, monkeypatch):
    """SIGKILL in the middle of an update, before the first checkpoint and after it, then a full disk."""
    run = runs(tmp_path, monkeypatch)
    whole, killed, disk = tmp_path / "whole", tmp_path / "killed", str(tmp_path / "nvme")
    assert run(whole, "", "-m", "surojax.train")[0] == 0
    rng = np.random.default_rng(0)
    for steps, end in [(1, KILLED), (5, KILLED), (2, FULL)]:
        writes = steps * ARRAYS + int(rng.integers(1, ARRAYS))
        code, text = run(killed, disk, "-c", END.format(writes=writes, end=end))
        last = json.loads((tmp_path / "nvme" / layer_file.MARKER).read_text())
        found = on_disk.find(killed / "run")
        assert last["state"] == "updating" and (steps == 2 or last["step"] == steps + 1)
        assert code == (-signal.SIGKILL if end == KILLED else 1), text
    full = f"surojax.train: error: nvme_path: could not write {disk}/layers.bin (No space left on device); its content"
    assert full in text and "the next start continues from the last one; when that is repaired, continue with" in text
    code, text = run(killed, disk, "-m", "surojax.train")
    assert code == 0, text
    goes_on = f"continuing from {found.name}" if found else "there is no checkpoint, so this starts anew"
    assert f"the last run ended within the update of step {last['step']}, what it left is not used: {goes_on}" in text
    assert records(killed / "run") == records(whole / "run")


def test_bytes_are_read_in_their_unit():
    sizes = {
        2**30: "1.00 GiB",
        2**30 - 1: "1,024.00 MiB",
        2**20: "1.00 MiB",
        2**20 - 1: "1,024.00 KiB",
        512: "0.50 KiB",
    }
    assert {size: layer_file.readable_bytes(size) for size in sizes} == sizes
