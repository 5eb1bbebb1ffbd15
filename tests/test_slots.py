"""Two slots of the state in files: whenever a run is killed, the next start goes on from the last complete step."""

import errno
import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from small import TABLES, Small, quick_at, tokens
from test_models import toy
from test_nvme import ARRAYS, BOTH, END, FULL, KILLED, assert_same, records, runs

from surojax import default_config
from surojax.assembly.from_config import from_config
from surojax.errors import ConfigError
from surojax.memory import layer_file, nvme
from surojax.memory.layer_file import NvmeError, Store
from surojax.memory.slots import SUMS, TABLE, Content, PageSums, read_slot_table
from surojax.placement.home import NVME
from surojax.placement.mesh import make_mesh
from surojax.planner import footprint
from surojax.planner.traffic import BatchShape
from surojax.run import on_disk
from surojax.step.complete import complete_state
from surojax.training.resume import check_unfinished, find_resume, goes_on_in_files

BATCHES = [tokens(2, 8, 24, seed=i) for i in range(5)]
ALL = dict.fromkeys(("offload_residual", "offload_grads", "offload_weights"), "nvme") | BOTH
SIZE = 10_000  # bytes of an array of a layer, no multiple of a page


def opened(folder: Path) -> Store:
    """A store of two layers with an array that has slots, one that has none, and one of no layer."""
    store = Store(folder, 2, slots=2, in_memory=10**6)
    store.places.reserve(SIZE, "master")
    store.places.reserve(SIZE, "grads")
    store.places.reserve_others([300])
    return store


def array(seed: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def update(store: Store, step: int, layers: int = 2) -> None:
    """Writes the state of a step, or what a kill leaves: that of its first layers."""
    store.begin_update(step)
    for l in range(layers):
        for place in store.places.of_layers:
            store.write(l, place, array(10 * step + l))
    if layers == 2:
        store.end_update(step, lambda: [array(step, 300)])


@pytest.mark.parametrize("in_memory, kept", [(0, 0), (2 * 4096 + 5, 4096), (4 * 4096, 8192), (10**6, SIZE)])
def test_what_is_partly_in_memory_is_read_as_it_was_written(tmp_path, in_memory, kept):
    store = Store(tmp_path, 2, in_memory=in_memory)
    store.places.reserve(SIZE, "grads")
    (place,) = store.places.of_layers
    assert place.kept == kept
    for step in (1, 2):
        for l in range(2):
            store.write(l, place, array(10 * step + l))
        for l in range(2):
            found = store.read(l, place, (SIZE,), np.dtype(np.uint8))
            np.testing.assert_array_equal(found, array(10 * step + l))
    store.close()


def test_a_kill_leaves_the_state_of_the_last_complete_step(tmp_path):
    """Killed at every moment of a step; all it writes is what the table does not name."""
    store = opened(tmp_path)
    master, grads = store.places.of_layers
    assert (master.slots, master.kept) == (2, 0) and (grads.slots, grads.kept) == (1, SIZE)
    assert store.kept_progress() is None
    update(store, 1)
    store.settle()
    assert store.kept_progress() is None  # its records are not written yet
    store.reported({"step": 1})
    store.settle()
    for step in range(2, 6):
        update(store, step, layers=1)
        for _ in range(2):  # a start that is killed too changes nothing
            after = opened(tmp_path)
            assert after.kept_progress() == {"step": step - 1}
            (other,) = after.load()
            np.testing.assert_array_equal(other, array(step - 1, 300))
            for l in range(2):
                stored = after.read(l, after.places.of_layers[0], (SIZE,), np.dtype(np.uint8))
                np.testing.assert_array_equal(stored, array(10 * (step - 1) + l))
            after.write(0, after.places.of_layers[0], array(0))
            after.close()
        update(store, step)
        store.reported({"step": step})
        store.settle()
    store.close()


def test_a_state_is_kept_once_it_is_complete_and_reported_whichever_is_later(tmp_path):
    store = opened(tmp_path)
    for reported_first in (True, False):
        step = 1 + (store.kept_progress() or {"step": 0})["step"]
        if reported_first:
            store.reported({"step": step})
        update(store, step)
        if not reported_first:
            store.reported({"step": step - 1})  # of the step before: nothing to keep yet
            store.reported({"step": step})
        store.settle()
        assert store.kept_progress() == {"step": step}
    update(store, step + 1)
    update(store, step + 2)  # never reported: the one that was is still there, though no newer one can be had
    store.settle()
    assert store.kept_progress() == {"step": step}
    store.close()


def test_a_table_that_cannot_be_written_leaves_the_last_one(tmp_path, monkeypatch):
    store = opened(tmp_path)
    update(store, 1)
    store.reported({"step": 1})
    store.settle()

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path / TABLE))

    monkeypatch.setattr(os, "fsync", fails)
    update(store, 2)
    store.reported({"step": 2})
    with pytest.raises(NvmeError, match=r"could not write .*state.json \(Input/output error\).* or from the last step"):
        store.settle()
    monkeypatch.undo()
    store.close()
    after = opened(tmp_path)
    assert after.kept_progress() == {"step": 1}
    after.load()
    after.close()


@pytest.mark.parametrize("what", ["master", "other"])
def test_damage_is_found_before_a_run_goes_on(tmp_path, what):
    store = opened(tmp_path)
    update(store, 1)
    store.reported({"step": 1})
    store.close()
    at = SIZE // 2 if what == "master" else store.places.others[0].offset + 7
    with (tmp_path / layer_file.FILE).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    after = opened(tmp_path)
    with pytest.raises(NvmeError, match=r"has of step 1 is damaged \(piece .*\); delete .*state.json to continue from"):
        after.load()
    after.close()


def checksum(raw: np.ndarray, parts: list[int] | None = None) -> int:
    """parts: the pages at which parts begin, in the order in which they are added."""
    sums = PageSums(raw.size)
    starts = [0] if parts is None else parts
    for start in starts:
        stop = min((x for x in starts if x > start), default=raw.size)
        sums.add(4096 * start, raw[4096 * start :][: 4096 * (stop - start)])
    return sums.end(raw[raw.size // 4096 * 4096 :])


def test_checksums_notice_each_byte_and_lost_pages():
    raw = array(0, 3 * 4096 + 5)
    expected = checksum(raw)
    assert checksum(raw, [2, 0, 1]) == expected and checksum(raw[:0]) == 0
    for at in (0, 4095, 4096, 3 * 4096 - 1, 3 * 4096, raw.size - 1):
        other = raw.copy()
        other[at] ^= 128
        assert checksum(other) != expected
    lost = raw.copy()
    lost[4096:8192] = 0
    moved = np.concatenate([raw[4096:8192], raw[:4096], raw[8192:]])
    assert checksum(lost) != expected and checksum(raw[1:]) != expected and checksum(moved) != expected


def test_files_of_another_layout_or_a_damaged_table_are_none(tmp_path):
    store = opened(tmp_path)
    update(store, 1)
    store.reported({"step": 1})
    store.close()
    other = Store(tmp_path, 2, slots=2)
    other.places.reserve(SIZE + 1, "master")
    assert other.kept_progress() is None and opened(tmp_path).kept_progress() == {"step": 1}
    with nvme.claim(opened(tmp_path), goes_on={"step": 1}) as claimed:  # measuring the disk changes nothing of it
        assert "two slots of the state" in claimed.line
    after = opened(tmp_path)
    after.load()
    after.close()
    for text in ("", "{", "[]", '{"progress": {"step": 0}}', '{"progress": {"step": 1}, "pieces": {}, "layout": []}'):
        (tmp_path / TABLE).write_text(text)
        assert read_slot_table(tmp_path) is None
    with nvme.claim(opened(tmp_path)):
        assert not (tmp_path / TABLE).exists()


def test_whose_state_it_is(tmp_path, monkeypatch):
    """A run goes on from its own; that of another which has no checkpoint of it is not overwritten.

    Paths are absolute, so that it does not matter in which folder a start is.
    """
    c = default_config()
    own, disk = tmp_path / "own", tmp_path / "disk"
    store = opened(disk)
    progress = {
        "step": 5,
        "samples": 20,
        "tokenizer": "bytes",
        "data": "x",
        "output_dir": str(own),
        "config": {"output_dir": "own", "resume_from_checkpoint": "auto"},
    }
    for folder in (own, disk):
        folder.mkdir()
    table = {"sums": SUMS, "progress": progress, "pieces": {"a": Content(0, 1)}, "layout": [1]}
    (disk / TABLE).write_text(json.dumps(table))
    assert not goes_on_in_files(c, own, progress, 0)  # no record of its step: output_dir was emptied
    check_unfinished(store, tmp_path / "other")
    (own / "metrics.jsonl").write_text('{"log": "step", "step": 5}\n')
    (tmp_path / "link").symlink_to(own)
    (tmp_path / "elsewhere" / "own").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    for folder in (own, tmp_path / "link"):
        assert goes_on_in_files(c, folder, progress, 4) and not goes_on_in_files(c, folder, progress, 5)
        check_unfinished(store, folder)
    assert not goes_on_in_files(c, own, None, 0) and not goes_on_in_files(c, tmp_path, progress, 0)
    assert not goes_on_in_files(c, own, progress | {"output_dir": "own"}, 4)
    for damaged in ({"config": 1}, {"samples": -1}, {"tokenizer": None}, {"output_dir": 1}, {"step": 2**31}):
        assert not goes_on_in_files(c, own, progress | damaged, 4)
    c.resume_from_checkpoint = "no"
    assert not goes_on_in_files(c, own, progress, 4)
    start = own / on_disk.FOLDER / "4"
    began = progress | {"config": {"output_dir": "own", "resume_from_checkpoint": str(start)}}
    monkeypatch.chdir(own.parent)
    for _there in (False, True):  # a step, and "latest", are of output_dir's checkpoints
        for wanted in (
            "4",
            "own/checkpoints/4",
            "./own/checkpoints/../checkpoints/4/",
            f"{tmp_path}/link/checkpoints/4",
        ):
            c.resume_from_checkpoint = wanted
            assert goes_on_in_files(c, own, began, 4), wanted
        for wanted in ("5", "latest", "own/checkpoints/5", "own"):
            c.resume_from_checkpoint = wanted
            assert not goes_on_in_files(c, own, began, 4), wanted
        start.mkdir(parents=True, exist_ok=True)
    c.resume_from_checkpoint = "latest"
    assert goes_on_in_files(c, own, began | {"config": {"resume_from_checkpoint": "own/checkpoints"}}, 4)
    start.rmdir()
    start.parent.rmdir()
    c.resume_from_checkpoint = "7"
    with pytest.raises(ConfigError, match=r"got '7', which holds none \(.*/own/checkpoints/7\); correct it"):
        find_resume(c, own, {}, 1)
    c.resume_from_checkpoint = "no"
    with pytest.raises(ConfigError, match=r"has step 5 of the run in .*/own, whose last checkpoint is none; choose"):
        check_unfinished(store, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"has step 5 of the run in .*/own"):
        check_unfinished(store, tmp_path / "elsewhere" / "own")
    monkeypatch.chdir(disk)
    check_unfinished(Store("", 0), tmp_path / "other")  # without files, whatever is in the current folder
    (own / on_disk.FOLDER / "5").mkdir(parents=True)
    check_unfinished(store, tmp_path / "other")


@pytest.mark.parametrize(
    "devices, placed",
    quick_at(
        [
            (1, BOTH),
            (2, {"pp_size": 2} | BOTH),
            (1, ALL | {"overlap_update": True}),
            (1, ALL | {"model": toy()}),
        ],
        0,
    ),
)
def test_the_state_that_files_keep_is_that_of_the_step(tmp_path, devices, placed):
    """Three steps; the third is not reported, as if the run had been killed. Another one reads what is kept."""
    small = Small(devices, config=TABLES, nvme_path=str(tmp_path), nvme_slots=2, batch=BATCHES[0][0].shape, **placed)
    store = small.run.store
    late = placed.get("overlap_update", False)
    for step, batch in enumerate(BATCHES[:3], 1):
        small.train([batch])
        if step < 3:
            store.reported({"step": step})
    store.settle()
    again = Small(devices, config=TABLES, nvme_path=str(tmp_path), nvme_slots=2, batch=BATCHES[0][0].shape, **placed)
    assert again.run.store.kept_progress() == {"step": 2}
    state = complete_state(again.run.store, again.plan, 2)
    plain = Small(
        devices, config=TABLES, **{k: v for k, v in placed.items() if k in ("zero_level", "pp_size", "model")}
    )
    plain.train(BATCHES[:2])
    assert_same(state._replace(weights=()), plain.state._replace(weights=()))
    again.state = state
    assert again.train(BATCHES[2:4]) == plain.train(BATCHES[2:4])
    assert late or int(jax.device_get(again.state.step)) == 4


def test_what_is_planned_is_what_files_take(tmp_path):
    """Estimates have the disk's bytes, but for pages that are not full and what the disk is measured with."""
    c = default_config()
    c.model.vocab_size, c.model.num_hidden_layers = 512, 3
    c.offload_optimizer = c.offload_master = "nvme"
    c.nvme_path, c.nvme_slots = str(tmp_path), 2
    run = from_config(c, make_mesh(jax.devices()[:1]), total_steps=9)
    rows = footprint.by_class(run, BatchShape(1, 32, 2), "gpu")
    planned = sum(row[NVME.name] for row in rows.values())
    assert planned <= run.store.places.end < 1.01 * planned
    assert run.store.places.written < 0.51 * run.store.places.end and run.store.places.bytes <= 2 * run.store.places.end


@pytest.mark.full
def test_killed_within_updates_it_loses_one_step(tmp_path, monkeypatch):
    """SIGKILL in the middle of updates and a full disk, with no checkpoint but the last: no step is computed thrice."""
    run = runs(tmp_path, monkeypatch, "--config.save_steps=0", slots=2)
    whole, killed, disk = tmp_path / "whole", tmp_path / "killed", tmp_path / "nvme"
    assert run(whole, "", "-m", "surojax.train")[0] == 0
    done = 0
    for steps, end in [(2, KILLED), (3, FULL)]:
        code, text = run(killed, str(disk), "-c", END.format(writes=steps * (ARRAYS + 3) + 60, end=end))
        assert code == (-signal.SIGKILL if end == KILLED else 1), text
        assert ("continuing from step" in text) == (done > 0)
        last = max(r["step"] for r in records(killed / "run") if r["log"] == "step")
        table = read_slot_table(disk)
        assert table and table["progress"]["step"] >= last - 1 >= done
        done = table["progress"]["step"]
    code, text = run(killed, str(disk), "-m", "surojax.train")
    assert code == 0 and f"continuing from step {done}, which {disk} has complete" in text, text
    assert records(killed / "run") == records(whole / "run")
