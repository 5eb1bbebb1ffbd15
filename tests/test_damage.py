"""Files that the run itself writes, damaged while it goes on: found before a step or a checkpoint uses them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small import TABLES, Small, tokens
from test_nvme import BOTH, save

from surojax.errors import CheckpointError
from surojax.memory import striped
from surojax.memory.layer_file import FILE, NvmeError, Store
from surojax.run import checkpoint, on_disk
from surojax.run.checkpoint import Checkpoints

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
