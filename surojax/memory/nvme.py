"""The folder on an NVMe disk (`nvme_path`) that a run stores state in: checked, claimed, and its speed measured."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from surojax.cluster.hosts import processes_here
from surojax.errors import ConfigError
from surojax.memory.layer_file import LOCK, MAKE_ROOM, PIECE, Store, gib
from surojax.memory.lock import locked

SLOW_MIB_S = 500  # slower disks are reported as slow; SATA disks reach this, NVMe disks 1,000 and more
UNUSABLE_S = 3600  # an update that takes longer than this is refused
MiB = 2**20


def check(store: Store) -> None:
    """Checks the folder of a store and its free space before anything is built; leaves no file. Raises ConfigError.

    Every process has to call it: those of one machine may share a disk, which has to have room for all of them.
    """
    if store.is_empty:
        return
    several = jax.process_count() > 1
    folder = store.folder.parent if several else store.folder
    change = "choose a folder on an NVMe disk"
    sharing = processes_here()
    if not folder.is_dir():
        what = "a file" if folder.exists() else "nothing there"
        raise ConfigError(f"nvme_path: expected a folder, got {str(folder)!r} ({what}); create it, or {change}")
    try:
        store.folder.mkdir(exist_ok=True)
        tempfile.TemporaryFile(dir=store.folder).close()
        reused = os.stat(store.path).st_blocks * 512 if store.path.exists() else 0  # the file of an earlier run
        free = shutil.disk_usage(folder).free + reused * sharing
    except OSError as error:
        raise ConfigError(
            f"nvme_path: expected a folder that can be written, got {str(folder)!r} ({error.strerror}); {change}"
        ) from error
    if store.bytes * sharing > free:
        of = f" for {sharing} processes" if sharing > 1 else ""
        raise ConfigError(
            f"nvme_path: needs {gib(store.bytes * sharing)}{of} in {folder}, where {gib(free)} are free; {MAKE_ROOM}"
        )


@contextlib.contextmanager
def claim(store: Store) -> Iterator[str]:
    """Locks the folder and allocates the file, within a `with` statement; yields a line about the disk to print.

    It is "" for an empty store. Raises ConfigError if another run uses the folder, the disk is full, or it is too slow
    to be of use.
    """
    if store.is_empty:
        yield ""
        return
    check(store)
    if jax.process_count() > 1:  # none takes room on a disk that they share before all have measured what is free
        multihost_utils.sync_global_devices("surojax: room for nvme_path is measured")
    with locked(store.folder / LOCK, "nvme_path"), contextlib.closing(store):
        yield describe(store, write_rate(store))


def describe(store: Store, rate: float) -> str:
    """A line that says how long a step reads and writes at `rate` bytes/s. Raises ConfigError if that is over an hour.

    Each class is read and written once a step, but for weights: they are read twice, and not written if frozen.
    """
    seconds = 2 * store.bytes / rate
    text = f"nvme: {gib(store.bytes)} in {store.folder}, written at {rate / MiB:,.0f} MiB/s"
    if seconds > UNUSABLE_S:
        raise ConfigError(
            f"nvme_path: expected a disk that is fast enough, got {rate / MiB:,.1f} MiB/s in {store.folder}, where a "
            f"step reads and writes {gib(store.bytes)} each: {seconds / 3600:,.1f} hours a step; choose another disk"
        )
    text += f": {seconds:,.1f} s of reads and writes a step, unless the page cache holds it"
    slow = rate < SLOW_MIB_S * MiB and seconds > 1
    return f"warning: slow disk, {text}; gradient_accumulation_steps makes them rarer" if slow else text


def write_rate(store: Store, limit: int = 256 * MiB, seconds: float = 2.0) -> float:
    """Bytes per second written to the disk, measured with up to `limit` bytes at the start of the file."""
    data = memoryview(np.random.default_rng(0).bytes(min(PIECE, store.bytes)))
    written = 0
    start = time.perf_counter()
    with store.explained("write"):
        while written < min(limit, store.bytes) and time.perf_counter() - start < seconds:
            written += os.pwrite(store.fd, data[: store.bytes - written], written)
            os.fdatasync(store.fd)
    return written / (time.perf_counter() - start)
