"""Files that the run itself writes, damaged while it goes on: found before a step or a checkpoint uses them."""

import fcntl
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small import TABLES, Small, tokens
from test_nvme import BOTH, save

from surojax.errors import CheckpointError, ConfigError
from surojax.memory import nvme, striped
from surojax.memory.layer_file import FILE, LOCK, MARKER, NvmeError, Store
from surojax.memory.slots import TABLE
from surojax.run import checkpoint, on_disk
from surojax.run.checkpoint import Checkpoints
from surojax.run.restore import restore

SIZE = 5 * 4096 + 100  # bytes of an array of a layer
BATCHES = [tokens(2, 8, 24, seed=i) for i in range(3)]
ALL = dict.fromkeys(("offload_residual", "offload_grads", "offload_weights"), "nvme") | BOTH


def array(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 255, SIZE, np.uint8)


def written(folders: list[Path], slots: int) -> Store:
    """A store with three layers of an array and three pieces of a table, after two updates."""
    store = Store(",".join(map(str, folders)), 3, slots=slots)
    store.places.reserve(SIZE, "master")
    store.places.reserve_pieces(SIZE, "master", 3)
    for step in (1, 2):
        store.begin_update(step)
        for number, place in enumerate((*store.places.of_layers, *store.places.of_pieces)):
            for l in range(3):
                store.write(l, place, array(100 * step + 10 * number + l))
        store.end_update(step)
    store.settle()
    return store


def read_all(store: Store) -> None:
    for place in (*store.places.of_layers, *store.places.of_pieces):
        for l in range(3):
            store.read(l, place, (SIZE,), np.dtype(np.uint8))


def spoiled(whole: bytearray, begin: int, other: int, old: bytes) -> dict[str, bytearray]:
    """A file's bytes, damaged in each way. begin, other: of two records. old: what the first one had a step before."""
    flipped = bytearray(whole)
    for i in range(200):
        flipped[(i * 7919) % len(flipped)] ^= 1 << i % 8
    damaged = {"200 bits": flipped}
    for name, at, new in [
        ("a bit", begin + 9, bytes([whole[begin + 9] ^ 1])),
        ("the last bit", begin + SIZE - 1, bytes([whole[begin + SIZE - 1] ^ 128])),
        ("zeros in a page", begin + 4096, bytes(4096)),
        ("a page that moved", begin, whole[begin + 4096 : begin + 8192] + whole[begin : begin + 4096]),
        ("an older content", begin, old),
        ("an older page", begin + 4096, old[4096:8192]),
        ("another layer", begin, whole[other : other + SIZE]),
    ]:
        damaged[name] = bytearray(whole)
        damaged[name][at : at + len(new)] = new
    return damaged


WAYS = list(spoiled(bytearray(4 * SIZE), 0, 2 * SIZE, bytes(SIZE)))


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("of_table", [False, True], ids=["layer", "table"])
@pytest.mark.parametrize("way", WAYS)
def test_damaged_content_is_found_when_it_is_read(tmp_path, way, slots, of_table):
    store = written([tmp_path], slots)
    place = (store.places.of_pieces if of_table else store.places.of_layers)[0]
    read_all(store)
    begin, other = store._begin(1, place), store._begin(2, place)
    old = array(100 + 10 * of_table + 1).tobytes()
    damaged = spoiled(bytearray((tmp_path / FILE).read_bytes()), begin, other, old)[way]
    with (tmp_path / FILE).open("r+b") as file:  # the same file: the run has it open
        file.write(damaged)
    what = "piece 1 of embedding and head" if of_table else "layer 1"
    what = r"(layer|piece) \d.*" if way == "200 bits" else what.replace("and", "or")
    line = (
        rf"^nvme_path: {tmp_path}/{FILE} is damaged: {what} \(master\) is not what this run wrote there; [^\n]*; its "
    )
    with pytest.raises(NvmeError, match=line + "content is lost, but no checkpoint is: the next start continues from"):
        read_all(store)
    store.close()


def test_an_undamaged_part_of_a_damaged_file_is_read(tmp_path):
    """And what is written anew is right again."""
    store = written([tmp_path], 1)
    (place,) = store.places.of_layers
    with (tmp_path / FILE).open("r+b") as file:
        file.seek(store._begin(1, place))
        file.write(b"damage")
    np.testing.assert_array_equal(store.read(0, place, (SIZE,), np.dtype(np.uint8)), array(200))
    with pytest.raises(NvmeError):
        store.read(1, place, (SIZE,), np.dtype(np.uint8))
    store.write(1, place, array(7))
    np.testing.assert_array_equal(store.read(1, place, (SIZE,), np.dtype(np.uint8)), array(7))
    store.close()


def in_place_of(file: Path) -> None:
    shutil.copy(file, f"{file}.copy")
    os.replace(f"{file}.copy", file)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "shorter": (lambda file: os.truncate(file, 4096), r"it has 4,096 bytes in place of [\d,]+: something else wrote"),
    "empty": (lambda file: os.truncate(file, 0), "it has 0 bytes in place of"),
    "longer": (lambda file: os.truncate(file, 10**7), "it has 10,000,000 bytes in place of"),
    "another file": (in_place_of, "something put another file in its place"),
    "a link": (
        lambda file: (file.rename(f"{file}.1"), file.symlink_to(f"{file}.1")),
        "something put another file in its place",
    ),
    "removed": (lambda file: file.unlink(), "something removed it"),
    "folder removed": (lambda file: shutil.rmtree(file.parent), "something removed it"),
}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("way", CHANGES)
def test_another_file_or_size_is_found_before_an_update(tmp_path, monkeypatch, way, number):
    """In the folder that it happened in, of two."""
    monkeypatch.setattr(striped, "STRIPE", 4096)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    store = written(folders, 1)
    change, said = CHANGES[way]
    change(folders[number] / FILE)
    with pytest.raises(NvmeError, match=rf"nvme_path: could not use {folders[number]}/{FILE} \({said}"):
        store.begin_update(3)
    store.close()


def test_the_damaged_file_of_several_is_named(tmp_path, monkeypatch):
    """If a layer is in one stripe; else those that it is in."""
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for folder in folders:
        folder.mkdir()
    for stripe, named in ((8 * 4096, "b/layers.bin"), (4 * 4096, "b/layers.bin or .*c/layers.bin")):
        monkeypatch.setattr(striped, "STRIPE", stripe)
        store = Store(",".join(map(str, folders)), 3)
        store.places.reserve(stripe if stripe == 8 * 4096 else 2 * stripe, "master")
        (place,) = store.places.of_layers
        for l in range(3):
            store.write(l, place, np.full(place.size, l + 1, np.uint8))
        l = 1 if stripe == 8 * 4096 else 2  # the second layer is stripe 1, the third stripes 4 and 5
        with (folders[1] / FILE).open("r+b") as file:
            file.seek(0 if l == 1 else stripe)
            file.write(b"damage")
        with pytest.raises(NvmeError, match=rf"nvme_path: [^ ]*{named} is damaged: layer {l} "):
            store.read(l, place, (place.size,), np.dtype(np.uint8))
        store.close()


@pytest.mark.full(after=1)
@pytest.mark.parametrize("placed", [BOTH, ALL], ids=["state", "all"])
def test_no_step_and_no_checkpoint_is_made_of_a_damaged_file(tmp_path, placed):
    """All classes in files, each byte of the file changed: the next step fails, and so does a checkpoint."""
    disk = tmp_path / "disk"
    disk.mkdir()
    small = Small(config=TABLES, nvme_path=str(disk), batch=BATCHES[0][0].shape, **placed)
    small.train(BATCHES[:1])
    state = small.state
    places = small.run.store.places.all
    assert small.run.store._sums.keys() == {f"{l}/{place.name}" for place in places for l in place.records}
    saved = save(tmp_path / "run", state, 1)
    sums = on_disk.read_meta(saved)["checksums"]
    content = bytearray((disk / FILE).read_bytes())
    content[::4096] = bytes(x ^ 4 for x in content[::4096])
    with (disk / FILE).open("r+b") as file:
        file.write(content)
    with (
        pytest.raises((NvmeError, CheckpointError), match=r"is damaged: .* is not what this run wrote there"),
        Checkpoints(tmp_path / "run", save_total_limit=1) as checkpoints,
    ):
        checkpoints.save(state, {"step": 2})
    assert on_disk.find(tmp_path / "run") == saved and on_disk.read_meta(saved)["checksums"] == sums
    with pytest.raises(NvmeError, match="is damaged"):
        small.train(BATCHES[1:2])


def test_a_file_that_is_damaged_while_a_checkpoint_is_written_leaves_none(tmp_path, monkeypatch):
    """After its checksums were computed: what is written is compared too."""
    disk = tmp_path / "disk"
    disk.mkdir()
    small = Small(config=TABLES, nvme_path=str(disk), **BOTH)
    small.train(BATCHES[:1])
    plain = checkpoint.checksums

    def then_damaged(**trees):
        found = plain(**trees)
        with (disk / FILE).open("r+b") as file:
            file.seek(small.run.store.places.of_layers[0].begin(2))
            file.write(b"damage")
        return found

    monkeypatch.setattr(checkpoint, "checksums", then_damaged)
    with (
        pytest.raises((NvmeError, CheckpointError), match=r"is damaged: layer 2 .* is not what this run wrote there"),
        Checkpoints(tmp_path / "run", save_total_limit=1) as checkpoints,
    ):
        checkpoints.save(small.state, {"step": 1})
    assert on_disk.find(tmp_path / "run") is None


# -- Folders that cannot be used --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [",", "a,", ",a", "a,,b", " ", "a, ,b"])
def test_an_empty_folder_among_several_is_refused(given):
    """It would be the current folder."""
    with pytest.raises(ConfigError, match=r"^nvme_path: expected folders with commas between them, got .*leave the"):
        Store(given, 1)


def opened(*folders: Path) -> Store:
    for folder in folders:
        folder.mkdir(exist_ok=True)
    store = Store(",".join(map(str, folders)), 1, slots=2)
    store.places.reserve(SIZE, "master")
    return store


@pytest.mark.parametrize("name", [FILE, MARKER, LOCK, TABLE])
@pytest.mark.parametrize("kind", ["link", "broken link", "pipe", "folder"])
def test_what_is_no_file_is_refused_in_any_folder(tmp_path, name, kind):
    """A link is not followed: what it leads to is not overwritten; a pipe is not waited for."""
    store = opened(tmp_path / "a", tmp_path / "b")
    mine, place = tmp_path / "mine", tmp_path / "b" / name
    mine.write_text("my own")
    if kind in ("link", "broken link"):
        place.symlink_to(mine if kind == "link" else tmp_path / "none")
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir()
    what = "it is a symbolic link, and what" if "link" in kind else "it is a folder, a pipe or a device"
    with pytest.raises(ConfigError, match=rf"nvme_path: expected a folder that can be written, .*{place}: {what}"):
        nvme.check_folders(store)
    with pytest.raises((ConfigError, OSError), match=what), nvme.claim(store):
        pass
    assert mine.read_text() == "my own" and not (tmp_path / "none").exists()


def test_a_folder_that_is_in_use_is_said_before_its_table_is_read(tmp_path):
    """So nobody is told to delete the table of a run that goes on. A start that looks does not end another's."""
    store = opened(tmp_path / "a", tmp_path / "b")
    for _ in range(2):
        nvme.check_folders(store)
        assert not any((tmp_path / "b").iterdir())
    with nvme.claim(store), pytest.raises(ConfigError, match=rf"^nvme_path: {tmp_path}/a is used by another run"):
        nvme.check_folders(opened(tmp_path / "c", tmp_path / "a"))
    looks = os.open(tmp_path / "a" / LOCK, os.O_RDONLY)
    fcntl.flock(looks, fcntl.LOCK_SH)
    timer = threading.Timer(0.03, os.close, [looks])
    timer.start()
    with nvme.claim(opened(tmp_path / "a")):
        timer.join()


def test_a_state_that_another_run_replaced_meanwhile_is_not_continued(tmp_path):
    store = opened(tmp_path / "a")
    with nvme.claim(store):
        for l, place in enumerate(store.places.of_layers):
            store.write(l, place, array(1))
        store.begin_update(1)
        store.end_update(1)
        store.reported({"step": 1})
    with nvme.claim(opened(tmp_path / "a"), goes_on={"step": 1}):
        pass
    replaced = pytest.raises(ConfigError, match=r"another run used .* while this one started; start again")
    with replaced, nvme.claim(opened(tmp_path / "a"), goes_on={"step": 2}):
        pass

    def refuses() -> None:
        raise ConfigError("of another run")

    with pytest.raises(ConfigError, match="of another run"), nvme.claim(opened(tmp_path / "a"), check=refuses):
        pass
    assert opened(tmp_path / "a").kept_progress() == {"step": 1}


@pytest.mark.parametrize("slots", [[0, 1], [2, 1], [0, -1], [0], "01", [True, 1]])
def test_a_table_that_is_none_is_not_continued(tmp_path, slots):
    store = opened(tmp_path / "a")
    with nvme.claim(store):
        store.write(0, store.places.of_layers[0], array(1))
        store.begin_update(1)
        store.end_update(1)
        store.reported({"step": 1})
    table = json.loads((tmp_path / "a" / TABLE).read_text())
    for pieces, right in (({"0/0": slots}, slots == [0, 1]), ({"1/0": slots}, False), ({}, False)):
        (tmp_path / "a" / TABLE).write_text(json.dumps(table | {"pieces": pieces}))
        assert (store.kept_progress() is not None) == right
    (tmp_path / "a" / TABLE).write_text(json.dumps(table)[:-1] + ', "layout": 1}')
    assert store.kept_progress() is None  # a key that is there twice


def small_disk(folder: Path, size: str) -> None:
    """Mounts a file system of so many bytes, where the system lets a test."""
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True
        ).returncode
    ):
        pytest.skip("needs the right to mount a file system")


@pytest.fixture
def full(tmp_path):
    """A folder with room for 256 KiB."""
    small_disk(tmp_path / "full", "256k")
    yield tmp_path / "full"
    subprocess.run(["umount", "-l", str(tmp_path / "full")], check=True)


def test_a_full_second_folder_is_named(full, tmp_path, monkeypatch):
    monkeypatch.setattr(striped, "STRIPE", 4096)
    store = opened(tmp_path / "a", full)
    store.places.reserve(200 * 4096, "master")
    with pytest.raises(ConfigError, match=rf"^nvme_path: needs [\d.]+ [KM]iB in {full}, where 256.00 KiB are free"):
        nvme.check_folders(store)
    monkeypatch.setattr(nvme, "check_folders", lambda store: None)  # it is filled after that
    said = rf"expected room for [\d.]+ MiB in {full}, got: No space left on device"
    with pytest.raises(ConfigError, match=said), nvme.claim(store):
        pass
    assert (tmp_path / "a" / FILE).stat().st_size == 0


def test_a_disk_that_is_full_in_mid_run_is_named_with_the_file(full):
    """Of what is not allocated at start: marker and table. The file itself has its room."""
    store = opened(full)
    with nvme.claim(store):
        store.write(0, store.places.of_layers[0], array(1))
        (full / "more").write_bytes(bytes(shutil.disk_usage(full).free))
        with pytest.raises(NvmeError, match=rf"could not write {full}/{MARKER} \(No space left on device\)"):
            store.begin_update(1)
        np.testing.assert_array_equal(store.read(0, store.places.of_layers[0], (SIZE,), np.dtype(np.uint8)), array(1))


def test_a_read_only_folder_is_refused(full, tmp_path):
    subprocess.run(["mount", "-o", "remount,ro", str(full)], check=True)
    with pytest.raises(ConfigError, match=rf"expected a folder that can be written, got '{full}' \(.*Read-only file s"):
        nvme.check_folders(opened(tmp_path / "a", full))


def test_a_second_disk_that_fails_is_named(tmp_path, monkeypatch):
    store = written([tmp_path], 1)
    store.close()
    store = opened(tmp_path / "a", tmp_path / "b")
    with nvme.claim(store):
        plain, (_, second) = os.fdatasync, store.file._fds
        monkeypatch.setattr(os, "fdatasync", lambda fd: os.fsync(10**6) if fd == second else plain(fd))
        with pytest.raises(NvmeError, match=rf"could not write {tmp_path}/b/{FILE} \(Bad file descriptor\)"):
            store.end_update(1)
            store.settle()


# -- Checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["manifest.ocdbt", "d/*"])
def test_a_damaged_checkpoint_is_one_line_and_no_traceback(tmp_path, capfd, what):
    """Also those that orbax's reads print which have not ended yet; the files' own sums are left out here."""
    small = Small()
    saved = save(tmp_path, small.state, 1)
    (saved / on_disk.FILES).write_text("{}")
    for file in (saved / "master").glob(what):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"cannot be read .*there is no other beside it") as caught:
        restore(saved, small.plan)
    assert "Error:" not in str(caught.value)
    time.sleep(0.1)
    assert "Traceback" not in capfd.readouterr().err
