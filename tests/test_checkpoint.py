"""Checkpoints: what comes back is what was saved, to the bit, on any mesh; what damages one is found and named."""

import contextlib
import errno
import importlib.metadata
import json
import os
import re
import resource
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from small import CONFIG, normal, paired, quick_at

from surojax.assembly.assemble import assemble
from surojax.config.checks import restored_config
from surojax.errors import CheckpointError, ConfigError
from surojax.memory.host import move
from surojax.models import decoder_model
from surojax.optim.adamw import adamw
from surojax.own_files import check_form
from surojax.placement import table as placement
from surojax.placement.home import DEVICE
from surojax.placement.mesh import make_mesh
from surojax.run import checkpoint, on_disk, restore as restoring, stored
from surojax.run.checkpoint import Checkpoints
from surojax.run.checksum import checksums
from surojax.run.on_disk import find, read_meta, steps_in
from surojax.run.restore import check_restorable, restore, restore_weights
from surojax.run.stored import StoredMaster
from surojax.step import state

# When a read or a write fails, those beside it still answer to orbax's event loop, which is closed by then.
IGNORED = "ignore::pytest.PytestUnraisableExceptionWarning"
ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def toy(seed: int = 0, size: int = 3000) -> state.TrainState:
    """A state that needs no compilation, with a float32 array, a bfloat16 one, and an integer."""
    a, b = normal(seed, (2, 3, size // 3))
    master = {"blocks": {"a": a}, "outer": {"b": b.astype(jnp.bfloat16)}}
    weights = jax.tree.map(lambda m: jnp.array(m, jnp.bfloat16, copy=True), master)
    return state.TrainState(
        jnp.int32(seed), weights, master, {"blocks": {"m": a + b}, "outer": {"count": jnp.int32(seed)}}
    )


def plan_of(arrays) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)


def newest(folder: Path) -> Path:
    found = find(folder)
    assert found is not None
    return found


def write(folder: Path, *steps: int, limit: int = 9) -> list[Path]:
    """Checkpoints of toy states at these steps."""
    with Checkpoints(folder, save_total_limit=limit) as checkpoints:
        for step in steps:
            checkpoints.save(toy(step), {"step": step})
    return steps_in(folder / on_disk.FOLDER)


def assert_same(found, expected):
    """To the bit: nothing is computed between saving and restoring."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ----------------------------------------------------------------- what comes back


def small_plan(devices: int, **placed) -> state.TrainState:
    """The plan of the tests' small model, in two float dtypes."""
    mesh = make_mesh(jax.devices()[:devices])
    table = placement.place(placement.Storage(model_dtype="bfloat16", **placed), num_shards=devices)
    optimizer = adamw(lambda _: jnp.float32(1e-3), m_dtype="bfloat16")
    return assemble(decoder_model.build(CONFIG), table, optimizer, mesh).plan


OFFLOADED: dict[str, Any] = {"offload_master": True, "offload_optimizer": True, "offload_weights": True}


@pytest.mark.parametrize(
    "placed",
    quick_at([({"zero_level": 1},), ({"zero_level": 2},), ({"zero_level": 3},), ({"zero_level": 3, **OFFLOADED},)], 3),
    ids=["1", "2", "3", "3 offloaded"],
)
def test_a_state_moves_from_one_device_to_eight_and_back(tmp_path, placed):
    rng = np.random.default_rng(0)
    one, eight = small_plan(1), small_plan(8, **placed)
    put = lambda x, p: jax.device_put(np.asarray(x).astype(p.dtype), p.sharding)
    saved = jax.tree.map(lambda p: put(rng.standard_normal(p.shape) * 9, p), one)
    weights = jax.tree.map(put, saved.master, one.weights)
    saved = saved._replace(step=jnp.int32(5), weights=weights)
    with Checkpoints(tmp_path / "one", save_total_limit=1) as checkpoints:
        checkpoints.save(saved, {"step": 5})
    there = restore(newest(tmp_path / "one"), eight)
    assert jax.tree.map(lambda x: x.sharding, there) == state.shardings(eight)
    assert len(there.master["blocks"]["mlp"]["w_up"].sharding.device_set) == 8
    assert there.weights["blocks"]["mlp"]["w_up"].sharding.is_fully_replicated == (placed["zero_level"] < 3)
    assert_same(there, saved)

    with Checkpoints(tmp_path / "eight", save_total_limit=1) as checkpoints:
        checkpoints.save(there, {"step": 5})
    assert_same(restore(newest(tmp_path / "eight"), one), saved)


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_later_steps_do_not_reach_a_checkpoint_that_is_still_being_written(tmp_path, memory):
    """The step updates its state in place while the writer works."""
    current = jax.device_put(toy(1, 600_000), ONE.with_memory_kind(memory))
    expected = jax.tree.map(np.array, current)
    add = lambda x: move(move(x, DEVICE.space) + x.dtype.type(1), jax.typeof(x).memory_space)
    advance = jax.jit(lambda s: jax.tree.map(add, s), donate_argnums=0)
    with Checkpoints(tmp_path, save_total_limit=1) as checkpoints:
        checkpoints.save(current, {"step": 1})
        for _ in range(5):
            current = advance(current)
        jax.block_until_ready(current)
    assert_same(restore(newest(tmp_path), plan_of(current)), expected)


def test_without_memory_for_a_copy_the_write_ends_before_the_next_step(tmp_path, monkeypatch):
    current = jax.device_put(toy(1), ONE.with_memory_kind("pinned_host"))
    expected = jax.tree.map(np.array, current)
    size = sum(x.nbytes for x in jax.tree.leaves((current.master, current.moments)))
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=size))
    monkeypatch.setattr(checkpoint, "_apart", lambda tree: pytest.fail("a copy was made"))
    with Checkpoints(tmp_path, save_total_limit=1) as checkpoints:
        checkpoints.save(current, {"step": 1})
        assert newest(tmp_path).name == "1" and not checkpoints.manager.is_saving_in_progress()
        assert_same(restore(newest(tmp_path), plan_of(current)), expected)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=2 * size))
        with pytest.raises(pytest.fail.Exception, match="a copy was made"):
            checkpoints.save(current, {"step": 2})


def test_weights_alone_come_back_in_the_work_dtype(tmp_path):
    (path,) = write(tmp_path, 1)
    assert_same(restore_weights(path, plan_of(toy(1).weights)), toy(1).weights)


def test_a_dtype_may_change_on_the_way(tmp_path):
    (path,) = write(tmp_path, 1)
    plan = plan_of(toy(1))
    other = {"blocks": {"a": jnp.bfloat16}, "outer": {"b": jnp.float32}}
    master = jax.tree.map(lambda x, d: jax.ShapeDtypeStruct(x.shape, d, sharding=ONE), plan.master, other)
    found = restore(path, plan._replace(master=master, weights=master))
    expected = jax.tree.map(lambda x, dtype: x.astype(dtype), toy(1).master, other)
    assert_same(found, toy(1)._replace(master=expected, weights=expected))


@pytest.mark.parametrize("length", [2, 4, 6])
def test_a_history_of_another_length(tmp_path, length):
    """The newest entries come first and are kept; what is not there is 0, nothing observed."""
    history = 1 + jnp.arange(24, dtype=jnp.float32).reshape(2, 3, 4)
    with Checkpoints(tmp_path, save_total_limit=1) as checkpoints:
        checkpoints.save(toy(1)._replace(history=history), {"step": 1})
    wanted = jax.ShapeDtypeStruct((2, 3, length), jnp.float32, sharding=ONE)
    found = restore(newest(tmp_path), plan_of(toy(1))._replace(history=wanted)).history
    kept = min(length, 4)
    np.testing.assert_array_equal(found[..., :kept], history[..., :kept])
    assert found.shape == wanted.shape and not found[..., kept:].any()


def test_what_a_plan_contradicts_is_found_without_reading_an_array(tmp_path, monkeypatch):
    """Before anything is compiled, that is: names, numbers of layers, shapes, sites of a history."""
    history = jnp.zeros((2, 3, 4))
    with Checkpoints(tmp_path, save_total_limit=1) as checkpoints:
        checkpoints.save(toy(1)._replace(history=history), {"step": 1})
    monkeypatch.setattr(restoring, "_load", lambda *_: pytest.fail("read"))
    plan = plan_of(toy(1)._replace(history=history))
    path = newest(tmp_path)
    check_restorable(path, plan)
    longer = jax.ShapeDtypeStruct((2, 3, 9), jnp.float32, sharding=ONE)
    check_restorable(path, plan._replace(history=longer))
    check_restorable(path, plan._replace(history=None))
    (without,) = write(tmp_path / "without", 1)
    check_restorable(without, plan)
    other = plan_of(toy(1, size=3030))
    for wrong, message in [
        (plan._replace(master=other.master), r"master/blocks.a: expected shape \(3, 1010\), got \(3, 1000\)"),
        (plan._replace(moments=other.moments), r"moments/blocks.m: expected shape \(3, 1010\), got \(3, 1000\)"),
        (plan._replace(master=plan.master | {"more": {"x": history}}), "master: expected more.x, got none"),
        (plan._replace(moments={"blocks": {"n": history}}), r"same optimizer.* \(only the checkpoint has blocks.m\)"),
        (plan._replace(moments=plan.moments | {"a": {"x": history}}), r"same optimizer.* \(only this run has a.x\)"),
        (plan._replace(history=jnp.zeros((2, 5, 4))), r"history: expected layers x sites \(2, 5\), got \(2, 3\)"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            check_restorable(path, wrong)
    with pytest.raises(CheckpointError, match="expected 2 layers, got 3"):
        check_restorable(path, plan, {"blocks": 2})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="expected 2 layers, got 3"):
        restore(path, plan, {"blocks": 2})


def test_only_the_newest_are_kept(tmp_path):
    assert [p.name for p in write(tmp_path, 2, 4, 6, 8, 10, limit=2)] == ["8", "10"]
    assert find(tmp_path) == find(tmp_path / "checkpoints") == find(tmp_path / "checkpoints/10")
    assert find(tmp_path / "elsewhere") is None
    assert json.loads((newest(tmp_path) / "meta/metadata").read_text())["step"] == 10


def test_what_a_kill_left_behind_is_no_checkpoint_and_is_removed(tmp_path):
    path, other = write(tmp_path, 1, 2)
    half = path.with_name("3.orbax-checkpoint-tmp")
    shutil.copytree(other, half)
    shutil.rmtree(path / "master")  # killed while it was being deleted, as the oldest
    assert find(tmp_path) == other
    assert [p.name for p in write(tmp_path, 3, limit=2)] == ["2", "3"]
    assert not half.exists()
    assert_same(restore(newest(tmp_path), plan_of(toy(3))), toy(3))


# ----------------------------------------------------------------- damage


def big_file(path: Path) -> Path:
    return max((p for p in (path / "master").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(file: Path, at: float) -> None:
    """Change one bit, at this fraction of the file."""
    content = bytearray(file.read_bytes())
    content[int(at * len(content))] ^= 4
    file.write_bytes(content)


DAMAGE = {
    "one bit": lambda f: flip(f, 0.5),
    "cut short": lambda f: f.write_bytes(f.read_bytes()[: f.stat().st_size // 2]),
    "missing": lambda f: f.unlink(),
}


@pytest.mark.parametrize(
    "damage, which", paired([*DAMAGE], ["largest", "meta/metadata", "master/manifest.ocdbt", "moments/_METADATA"])
)
def test_a_damaged_file_is_named_and_so_is_the_next_checkpoint(tmp_path, damage, which):
    older, path = write(tmp_path, 1, 2)
    file = big_file(path) if which == "largest" else path / which
    DAMAGE[damage](file)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        restore(path, plan_of(toy(2)))
    for expected in (str(path), file.name, f"to continue from {older}, move it away"):
        assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path) == before
    assert_same(restore(older, plan_of(toy(1))), toy(1))


@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.usefixtures("orbax_fails")
@pytest.mark.parametrize("at", [0.2, 0.4, 0.6, 0.8])
def test_a_bit_in_a_file_too_large_to_read_twice_is_found(tmp_path, at, monkeypatch):
    """Without the checksums of the arrays most of these come back as numbers: see the next test."""
    monkeypatch.setattr(on_disk, "SMALL", -1)
    (path,) = write(tmp_path, 1)
    flip(big_file(path), at)
    with pytest.raises(CheckpointError, match=r"checkpoints/1 cannot be read \(.*there is no other beside it"):
        restore(path, plan_of(toy(1)))
    try:
        found = restore_weights(path, plan_of(toy(1).weights))
    except CheckpointError:
        return
    assert_same(found, toy(1).weights)  # the bit was lost in rounding to bfloat16


def test_orbax_itself_does_not_notice(tmp_path, monkeypatch):
    """Why there are checksums; when this fails, orbax has its own, and ours can go."""
    monkeypatch.setattr(on_disk, "SMALL", -1)  # of no file, whatever sizes orbax cuts
    monkeypatch.setattr(restoring, "_verify", lambda *_, **__: None)
    (path,) = write(tmp_path, 1)
    flip(big_file(path), 0.5)
    found = restore(path, plan_of(toy(1)))
    assert any(
        np.any(np.asarray(a) != np.asarray(b)) for a, b in zip(*map(jax.tree.leaves, (found, toy(1))), strict=True)
    )


def test_a_damaged_array_is_named(tmp_path, monkeypatch):
    (path,) = write(tmp_path, 1)
    wrong = {
        name: value + 1 if name == "moments/blocks/m float32" else value
        for name, value in read_meta(path)["checksums"].items()
    }
    monkeypatch.setattr(restoring, "read_meta", lambda path: {"step": 1, "checksums": wrong})
    with pytest.raises(CheckpointError, match=r"moments/blocks/m float32 is damaged"):
        restore(path, plan_of(toy(1)))
    for name in sorted(wrong)[:2]:
        wrong[name] += 1
    with pytest.raises(CheckpointError, match=r"and 2 more are damaged"):
        restore(path, plan_of(toy(1)))


def test_a_checksum_sees_every_word_and_its_place_but_not_the_sharding():
    x = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    value = lambda x: checksums(x=x)[0]
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8):
        whole = jnp.asarray(x * 50, dtype)
        rows = jax.NamedSharding(jax.make_mesh((8,), ("rows",)), jax.P("rows"))
        assert value(whole) == value(jax.device_put(whole, rows)) == value(whole + 0)
        for i, j in np.ndindex(8, 6):
            assert value(whole.at[i, j].add(1)) != value(whole)
    host = jax.device_put(x, ONE.with_memory_kind("pinned_host"))
    (by_layer,) = checksums(x={"blocks": {"y": host}})[0].values()
    assert [by_layer] == [*value(jnp.asarray(x)).values()]
    assert value(jnp.asarray(x)) != value(jnp.asarray(x[::-1])) != value(jnp.asarray(x[:, ::-1]))
    assert checksums(good=jnp.ones(3), bad=jnp.array([1.0, jnp.nan]), worse=jnp.array([jnp.inf]))[1] == [
        "bad float32",
        "worse float32",
    ]


# ----------------------------------------------------------------- what cannot be written


def test_a_disk_without_room_is_seen_before_writing(tmp_path, monkeypatch):
    with Checkpoints(tmp_path, save_total_limit=2) as checkpoints:
        checkpoints.save(toy(1), {"step": 1})
        checkpoints.wait()
        before = contents(tmp_path)
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
        with pytest.raises(
            CheckpointError, match=r"no room .* step 2 .* 0.0 MiB are free; .*; last checkpoint: .*checkpoints/1$"
        ):
            checkpoints.save(toy(2), {"step": 2})
    assert contents(tmp_path) == before


@contextlib.contextmanager
def full_disk():
    """Files of more than 20,000 bytes cannot be written: a write fails in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    threads = set(threading.enumerate())
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
        for thread in set(threading.enumerate()) - threads:  # the writes beside it: here the process lives on
            with contextlib.suppress(Exception):
                thread.join()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.usefixtures("orbax_fails")
def test_a_write_that_fails_says_so_and_leaves_the_older_ones_to_go_on_from(tmp_path):
    write(tmp_path, 1, 2, limit=2)
    before = contents(tmp_path)
    checkpoints = Checkpoints(tmp_path, save_total_limit=2)
    with full_disk(), pytest.raises(CheckpointError) as caught, checkpoints:
        checkpoints.save(toy(3, 90_000), {"step": 3})
        for _ in range(1000):
            time.sleep(0.01)  # a step
            checkpoints.check()
    for expected in (f"could not write checkpoint {tmp_path}/checkpoints/3", "File too large", "last checkpoint: "):
        assert expected in str(caught.value)
    assert str(caught.value).endswith("checkpoints/2")
    assert {k: v for k, v in contents(tmp_path).items() if "orbax-checkpoint-tmp" not in k} == before

    assert [p.name for p in write(tmp_path, 3, limit=2)] == ["2", "3"]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]
    assert_same(restore(newest(tmp_path), plan_of(toy(3))), toy(3))


def test_a_failed_write_does_not_hide_what_ended_the_run(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "list_files", fail)
    with pytest.raises(ZeroDivisionError) as caught, Checkpoints(tmp_path, save_total_limit=2) as checkpoints:
        checkpoints.save(toy(1), {"step": 1})
        raise ZeroDivisionError
    assert "No space left on device" in caught.value.__notes__[0]
    assert find(tmp_path) is None


FULL = "the disk or a quota may be full"


@pytest.mark.parametrize(
    "number, change", [(errno.ENOSPC, FULL), (errno.EDQUOT, FULL), (errno.EMFILE, "raise the limit that `ulimit -n`")]
)
def test_writes_after_a_failed_one_succeed(tmp_path, monkeypatch, number, change):
    """With the folder of the failed write beside them: of the same step, and of another."""

    def fail(_):
        raise OSError(number, os.strerror(number))

    with Checkpoints(tmp_path, save_total_limit=9) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "list_files", fail)
            checkpoints.save(toy(1), {"step": 1})
            with pytest.raises(CheckpointError, match=rf"1 \(.*{os.strerror(number)}.*; {change}"):
                checkpoints.wait()
        assert (tmp_path / "checkpoints/1.orbax-checkpoint-tmp").is_dir() and checkpoints.last is None
        checkpoints.save(toy(2), {"step": 2})
        checkpoints.wait()
    assert_same(restore(newest(tmp_path), plan_of(toy(2))), toy(2))
    assert (tmp_path / "checkpoints/2/files.json").is_file()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_not_written(tmp_path, bad):
    write(tmp_path, 1)
    before = contents(tmp_path)
    broken = toy(2)
    broken.moments["blocks"]["m"] = broken.moments["blocks"]["m"].at[1, 7].set(bad)
    expected = r"step 2 was written: moments/blocks/m float32 .*; last .*checkpoints/1$"
    with Checkpoints(tmp_path, save_total_limit=2) as checkpoints, pytest.raises(CheckpointError, match=expected):
        checkpoints.save(broken, {"step": 2})
    assert contents(tmp_path) == before


def test_a_pipe_in_a_checkpoint_is_not_waited_for(tmp_path):
    """Though `files.json` lists none: whoever means harm writes it."""
    (path,) = write(tmp_path, 1)
    (path / on_disk.FILES).write_text("{}")
    read_meta(path)
    file = next(file for file in path.rglob("*") if file.name.startswith("manifest"))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(file.relative_to(path)))} is a pipe or a device"):
        read_meta(path)


def test_a_checkpoint_says_which_version_wrote_it(tmp_path):
    """And so does the error about one that does not fit, or whose config has other fields."""
    (path,) = write(tmp_path, 1)
    version = importlib.metadata.version("surojax")
    meta = read_meta(path)
    assert meta["version"] == version
    plan = plan_of(toy())._replace(
        moments=plan_of({"blocks": toy().moments["blocks"], "outer": {"other": jnp.int32(0)}})
    )
    with pytest.raises(CheckpointError, match=f"use version {re.escape(version)} of surojax, which wrote it if it is"):
        restore(path, plan)
    assert "before 0.2" in on_disk.written_by({})
    with pytest.raises(ConfigError, match=f"; use version {re.escape(version)} of surojax, which wrote it$"):
        restored_config({"no_such_field": 1}, on_disk.written_by(meta))


def test_a_checkpoint_may_be_called_otherwise(tmp_path):
    """A copy of it; one that has another step's number is none of that step, and a file is no checkpoint."""
    (path,) = write(tmp_path, 1)
    for name in ("copy", "2"):
        shutil.copytree(path, tmp_path / name)
    assert read_meta(tmp_path / "copy")["step"] == 1
    with pytest.raises(CheckpointError, match=r"step: expected 2, the name of its folder, got 1"):
        read_meta(tmp_path / "2")
    (path.parent / "7").write_text("")
    assert find(tmp_path) == path


def test_a_long_reason_keeps_its_ends():
    for length, is_cut in ((400, False), (401, True)):
        text = f"{'a' * 150}{'b' * (length - 380)}{'c' * 230}"
        assert on_disk._reason(OSError(text)) == (f"{'a' * 150} ... {'c' * 230}" if is_cut else text)


# ----------------------------------------------------------------- read while a run prunes


def test_a_checkpoint_that_is_read_is_not_pruned(tmp_path):
    """Until its reader is done; a reader may be another process, whose lock ends with it."""
    with Checkpoints(tmp_path, save_total_limit=1) as checkpoints:
        save = lambda step: (checkpoints.save(toy(step), {"step": step}), checkpoints.wait())
        save(1)
        held = on_disk.hold(tmp_path)
        assert held is not None and held.path.name == "1"
        save(2), save(3)
        assert [p.name for p in steps_in(tmp_path / on_disk.FOLDER)] == ["1", "3"]
        assert_same(restore(held.path, plan_of(toy(1))).master, toy(1).master)
        held.close()
        master = StoredMaster(newest(tmp_path))  # as `convert` reads, a layer at a time
        save(4)
        assert [p.name for p in steps_in(tmp_path / on_disk.FOLDER)] == ["3", "4"]
        np.testing.assert_array_equal(master.read("blocks.a", 1), toy(3).master["blocks"]["a"][1])
        del master
        save(5)
        assert [p.name for p in steps_in(tmp_path / on_disk.FOLDER)] == ["5"]


def test_a_checkpoint_that_is_removed_while_it_is_read_is_replaced_by_the_newest(tmp_path):
    """With save_total_limit=1, a run has decided to remove one when it begins to write the next."""
    first, second = write(tmp_path, 1, 2)
    second.rename(tmp_path / "written later")
    read = []

    def reads(path: Path):
        read.append(path.name)
        if path == first:
            (tmp_path / "written later").rename(second)
            shutil.rmtree(first)
        return read_meta(path)["step"]

    assert on_disk.read_newest(tmp_path, reads) == 2 and read == ["1", "2"]
    with pytest.raises(CheckpointError, match=r"checkpoints/1 is no longer there; read the newest of its run"):
        read_meta(first)
    shutil.rmtree(second / "master")
    with pytest.raises(CheckpointError, match="checkpoints/2 cannot be read"):  # damaged, not removed: an error
        on_disk.read_newest(tmp_path, lambda path: restore(path, plan_of(toy(2))))
    assert on_disk.read_newest(tmp_path / "nothing", reads) is None


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.uint8])
def test_layers_that_are_read_apart_have_the_checksum_of_the_whole(dtype, monkeypatch):
    """As devices compute it, whatever the size of the pieces; an element elsewhere, or another one, changes it."""
    x = np.asarray(jnp.asarray(np.random.default_rng(0).integers(0, 200, (3, 4, 5)), dtype))
    (expected,) = checksums(master={"blocks": {"a": jnp.asarray(x)}})[0].values()
    for piece in (1 << 22, 7):
        monkeypatch.setattr(stored, "PIECE", piece)
        found = [stored._sum(layer, 20 * l) for l, layer in enumerate(x)]
        assert all(0 <= of_layer < 2**32 for of_layer in found) and sum(found) % 2**32 == expected
    assert stored._sum(x[0], 0) != stored._sum(x[0], 20) and stored._sum(x[0], 0) != stored._sum(x[0].T, 0)


@pytest.mark.parametrize("name", ["step", "samples", "config", "tokenizer", "data"])
def test_what_a_run_writes_beside_a_checkpoint_is_of_its_form(name):
    """`layers` may be missing: older versions had no padding."""
    meta = {"step": 1, "samples": 2, "config": {"resume_from_checkpoint": "auto"}, "tokenizer": "bytes", "data": "x"}
    check_form(meta, on_disk.OF_A_RUN, "metadata")
    check_form(meta | {"layers": {"blocks": 3}}, on_disk.OF_A_RUN, "metadata")
    for bad in ({k: v for k, v in meta.items() if k != name}, meta | {name: [1]}, meta | {name: -1}):
        with pytest.raises(ValueError, match=name):
            check_form(bad, on_disk.OF_A_RUN, "metadata")
    with pytest.raises(ValueError, match="layers"):
        check_form(meta | {"layers": {"blocks": -3}}, on_disk.OF_A_RUN, "metadata")
