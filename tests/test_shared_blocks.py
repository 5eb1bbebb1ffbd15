"""Checkpoints that share blocks with the run's file: the same arrays everywhere, and no room until an update."""

import shutil
import subprocess
from pathlib import Path

import jax
import pytest
from layouts import config_of_a_run
from small import TABLES, Small, stored
from test_nvme import BATCHES, BOTH, assert_same

from surojax.memory.in_file import InFile
from surojax.memory.striped import StripedFile
from surojax.run.checkpoint import Checkpoints
from surojax.run.restore import restore
from surojax.run.stored import StoredMaster
from surojax.train import train

SAID = "checkpoints share the blocks of nvme_path"


@pytest.fixture(scope="module")
def sharing(tmp_path_factory):
    """A folder on a file system whose files can share blocks."""
    folder = tmp_path_factory.mktemp("btrfs")
    disk, image = folder / "disk", folder / "image"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(512 << 20)
    if not shutil.which("mkfs.btrfs") or not shutil.which("mount"):
        pytest.skip("needs mkfs.btrfs and mount")
    subprocess.run(["mkfs.btrfs", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, disk], capture_output=True).returncode:
        pytest.skip("this process may not mount a file system")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def copied(self: StripedFile, at: int, size: int, path: Path) -> bool:
    """In place of `share` where blocks cannot be shared: a file of the same bytes."""
    with path.open("xb") as new, self.paths[0].open("rb") as file:
        file.seek(at)
        new.write(file.read(size))
    return True


def made(folder: Path) -> str:
    """Makes a folder, as a run does that claims it."""
    folder.mkdir()
    return str(folder)


def save(folder: Path, small: Small) -> Path:
    with Checkpoints(folder, save_total_limit=1, store=small.run.store) as checkpoints:
        checkpoints.save(small.state, {"step": int(jax.device_get(small.state.step))})
    assert checkpoints.last and checkpoints.shares_blocks == (not (checkpoints.last / "master/manifest.ocdbt").exists())
    return checkpoints.last


def chunks_of(path: Path, item: str) -> int:
    """Number of files with values of layers."""
    return sum(p.name[0].isdigit() for p in (path / item).glob("*blocks*/*"))


@pytest.mark.full
@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.full)])
def test_chunks_that_are_the_files_blocks_restore_in_every_placement(tmp_path, monkeypatch, slots):
    """From files into arrays of four devices and into other files; one layer at a time without a plan."""
    monkeypatch.setattr(StripedFile, "share", copied)
    placed = {"config": TABLES, "m_dtype": "bfloat16"}
    files = Small(nvme_path=made(tmp_path / "files"), nvme_slots=slots, **placed, **BOTH)
    files.train(BATCHES[:2])
    path = save(tmp_path, files)
    layers = TABLES.num_hidden_layers
    for item, tree in (("master", files.state.master), ("moments", files.state.moments)):
        stacks = [x for x in jax.tree.leaves(tree) if type(x) is InFile]
        assert chunks_of(path, item) == len(stacks) * layers > 0
    master = StoredMaster(path)
    wq = stored(files.state.master["blocks"]["attention"]["wq"])
    assert all((master.read("blocks.attention.wq", l) == wq[l]).all() for l in range(layers))
    for devices, others in ((4, {"zero_level": 3}), (1, BOTH | {"nvme_path": made(tmp_path / "others")})):
        other = Small(devices, **placed, **others)
        assert_same(restore(path, other.plan), files.state)


@pytest.mark.full
def test_a_checkpoint_takes_no_room_until_the_next_update(sharing):
    """On Btrfs: the blocks are those of the file, and an update of the file does not change the checkpoint."""
    files = Small(config=TABLES, nvme_path=made(sharing / "files"), **BOTH)
    files.train(BATCHES[:1])
    expected = {l: files.state.master["blocks"]["attention"]["wq"].read(l).copy() for l in range(2)}
    path = save(sharing, files)
    names = subprocess.run(["filefrag", "-v", *path.glob("m*/*blocks*/0.0*")], capture_output=True, text=True)
    assert names.stdout.count("shared") >= 3, names
    files.train(BATCHES[1:3])
    assert (files.state.master["blocks"]["attention"]["wq"].read(0) != expected[0]).any()
    master = StoredMaster(path)
    assert all((master.read("blocks.attention.wq", l) == expected[l]).all() for l in expected)
    restore(path, Small(config=TABLES).plan)  # holds every array against its checksum


@pytest.mark.parametrize("case", ["another-disk", "two-folders", "in-memory"])
@pytest.mark.full
def test_what_cannot_share_blocks_is_written(sharing, tmp_path, case):
    """A folder on another disk, stripes, and layers that are partly in host memory: the same checkpoint as ever."""
    folder = ",".join(made(sharing / f"{case}-{i}") for i in range(2 if case == "two-folders" else 1))
    small = Small(
        config=TABLES, nvme_path=folder, files_in_memory=(10**5 if case == "in-memory" else 0) / 2**30, **BOTH
    )
    small.train(BATCHES[:1])
    path = save(tmp_path if case == "another-disk" else sharing / case, small)
    assert (path / "master" / "manifest.ocdbt").exists() == (case != "in-memory")
    assert_same(restore(path, Small(config=TABLES).plan), small.state)


@pytest.mark.full
def test_a_run_says_that_it_shares_and_goes_on(sharing, tmp_path, capsys):
    """In files as in memory: a run that shares blocks is told so, and goes on from such a checkpoint to the bit."""
    c = config_of_a_run(tmp_path)
    histories = []
    for name in ("memory", "files"):
        c.output_dir = str((sharing if name == "files" else tmp_path) / name)
        if name == "files":
            c.offload_optimizer = c.offload_master = "nvme"
            c.nvme_path = made(sharing / "run-files")
        histories.append([])
        for steps in (2, 4):
            c.max_steps = steps
            histories[-1] += [(r["log"], r["loss"]) for r in train(c).history]
            assert capsys.readouterr().out.count(SAID) == (name == "files")
    assert histories[0] == histories[1]
