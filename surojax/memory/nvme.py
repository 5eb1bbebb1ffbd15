"""The folders on NVMe disks (`nvme_path`) that a run stores layers in: checked, claimed, and their speed measured."""

import contextlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from surojax.cluster.hosts import processes_here
from surojax.errors import ConfigError
from surojax.memory.aligned import Buffers
from surojax.memory.layer_file import FILE, LOCK, MAKE_ROOM, MARKER, Store, readable_bytes
from surojax.memory.lock import check_regular, check_unlocked, locked
from surojax.memory.places import MEASURED
from surojax.memory.slots import TABLE
from surojax.memory.striped import STRIPE
from surojax.resources import free_memory

SLOW_MIB_S = 500  # slower disks are reported as slow; SATA disks reach this, NVMe disks 1,000 and more
MEASURED_S = 2.0  # seconds after which the rate of a disk is known
CHUNK = 8 * STRIPE  # bytes that are measured at once
UNUSABLE_S = 3600  # an update that takes longer than this is refused
MiB = 2**20


def check_folders(store: Store) -> None:
    """Checks the folders of a store, their free space and free memory before anything is built; leaves no file.
    Raises ConfigError.

    Every process has to call this: processes of one machine may share a disk, which needs room for all their files.
    """
    if store.is_empty:
        return
    several = jax.process_count() > 1
    sharing = processes_here()
    available = sharing * free_memory(sharing).size
    if store.places.kept * sharing > available:
        per_process = f" by each of {sharing} processes" if sharing > 1 else ""
        raise ConfigError(
            f"files_in_memory: expected at most what this machine has free, {readable_bytes(available)}, got "
            f"{readable_bytes(store.places.kept)} kept{per_process}; lower it, more is in files then"
        )
    change = "choose a folder on an NVMe disk"
    free: dict[int, int] = {}  # by the number of a disk
    needed: dict[int, int] = {}
    on_disk: dict[int, Path] = {}
    for own, size in zip(store.folders, store.sizes, strict=True):
        folder = own.parent if several else own
        if not folder.is_dir():
            what = "a file" if folder.exists() else "nothing there"
            raise ConfigError(f"nvme_path: expected a folder, got {str(folder)!r} ({what}); create it, or {change}")
        try:
            own.mkdir(exist_ok=True)
            for name in (FILE, MARKER, LOCK, TABLE):
                check_regular(own / name)
            check_unlocked(own / LOCK, "nvme_path")
            tempfile.TemporaryFile(dir=own).close()
            file = own / FILE
            reused = os.stat(file).st_blocks * 512 if file.exists() else 0  # the file of an earlier run
            disk = os.stat(folder).st_dev
            free[disk] = free.get(disk, shutil.disk_usage(folder).free) + reused * sharing
        except OSError as error:
            which = f"{error.filename}: " if Path(error.filename or "").parent == own else ""
            raise ConfigError(
                f"nvme_path: expected a folder that can be written, got {str(folder)!r} ({which}{error.strerror}); "
                f"{change}"
            ) from error
        needed[disk] = needed.get(disk, 0) + size * sharing
        on_disk.setdefault(disk, folder)
    if len({folder.resolve() for folder in store.folders}) < len(store.folders):
        given = ", ".join(map(str, store.folders))
        raise ConfigError(f"nvme_path: expected folders that differ, got {given}; name each once")
    for disk, size in needed.items():
        if size > free[disk]:
            for_whom = f" for {sharing} processes" if sharing > 1 else ""
            raise ConfigError(
                f"nvme_path: needs {readable_bytes(size)}{for_whom} in {on_disk[disk]}, "
                f"where {readable_bytes(free[disk])} are free; {MAKE_ROOM}"
            )


class Claimed(NamedTuple):
    """The disks of a store, ready for use. line: about them, to print. reads, writes: bytes per second, measured.

    Of an empty store, which needs none, the line is "". If all is kept in memory, no time is spent on disks.
    """

    line: str = ""
    reads: float = math.inf
    writes: float = math.inf


@contextlib.contextmanager
def claim(
    store: Store, *, goes_on: dict[str, Any] | None = None, check: Callable[[], None] = lambda: None
) -> Iterator[Claimed]:
    """Locks the folders and allocates the file, within a `with` statement.

    goes_on: progress of the state that the file has complete and the run continues from; None: the file forgets it.
    check: called once the folders are locked, before anything in them is replaced.
    Raises ConfigError if another run uses a folder, a file of that state is missing, a disk is full, or it is too slow
    to be of use.
    """
    if store.is_empty:
        yield Claimed()
        return
    check_folders(store)
    if jax.process_count() > 1:  # none takes room on a disk that they share before all have measured what is free
        multihost_utils.sync_global_devices("surojax: room for nvme_path is measured")
    with contextlib.ExitStack() as until_end:
        for folder in store.folders:
            until_end.enter_context(locked(folder / LOCK, "nvme_path"))
        until_end.enter_context(contextlib.closing(store))
        check()
        if goes_on and store.kept_progress() != goes_on:
            raise ConfigError(f"nvme_path: another run used {store.folder} while this one started; start again")
        if goes_on:
            store.check_there(goes_on["step"])
        else:
            store.forget()
        if store.places.bytes:
            writes, reads = write_rate(store), read_rate(store)
        else:
            writes = reads = math.inf
        yield Claimed(describe_disk_time(store, writes, reads), reads, writes)


def describe_disk_time(store: Store, writes: float, reads: float) -> str:
    """Describes how long a step reads and writes at so many bytes/s. Raises ConfigError if that is over an hour.

    Each class is read and written once a step, but for weights: they are read twice, and not written if frozen.
    """
    places = store.places
    kept = f", {readable_bytes(places.kept)} kept in host memory" if places.kept else ""
    if not places.bytes:
        return f"nvme: nothing in files{kept}"
    seconds = places.written / writes + places.written / reads
    rates = f"read at {reads / MiB:,.0f} MiB/s, written at {writes / MiB:,.0f}"
    folders = ", ".join(map(str, store.folders))
    text = f"nvme: {readable_bytes(places.bytes)} in {folders}{kept}, {rates}"
    if store.slots:
        text += ", two slots of the state"
    if seconds > UNUSABLE_S:
        raise ConfigError(
            f"nvme_path: expected a disk that is fast enough, got one {rates} in {folders}, where a step reads "
            f"and writes {readable_bytes(places.written)} each: {seconds / 3600:,.1f} hours a step; choose another disk"
        )
    text += f": {seconds:,.1f} s of reads and writes a step"
    if not store.file.is_direct:
        text += ", through the page cache: this file system refuses direct access"
    slow = min(writes, reads) < SLOW_MIB_S * MiB and seconds > 1
    return f"warning: slow disk, {text}; gradient_accumulation_steps makes them rarer" if slow else text


def write_rate(store: Store) -> float:
    """Bytes per second written to the disk as a step writes, measured where the file is unused. Raises NvmeError."""
    data = np.frombuffer(np.random.default_rng(0).bytes(min(CHUNK, store.places.unused[1])), np.uint8)

    def write(at: int, size: int) -> None:
        store.write_file(data[:size], at)

    def settle() -> None:
        with store.explained("write"):
            store.file.sync()

    return _rate(store, write, settle)


def read_rate(store: Store) -> float:
    """Bytes per second that `write_rate` has written, read as a step reads. Raises NvmeError."""
    raw = Buffers().take(CHUNK)
    return _rate(store, lambda at, size: store.read_file(raw[:size], at))


def _rate(store: Store, moves: Callable[[int, int], object], end: Callable[[], None] = lambda: None) -> float:
    """Measures bytes per second of moves(offset, bytes) over an unused part of the file, and of `end`."""
    begin, unused = store.places.unused
    done = 0
    start = time.perf_counter()
    while done < min(MEASURED, unused) and time.perf_counter() - start < MEASURED_S:
        size = min(CHUNK, unused - done)
        moves(begin + done, size)
        done += size
    end()
    return done / (time.perf_counter() - start)
