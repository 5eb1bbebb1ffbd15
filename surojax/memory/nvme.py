"""Training state in a file: stacks of layers that rest on an NVMe disk, of which a layer at a time is in memory.

    <nvme_path>/layers.bin     record 0, record 1, ...: all that layer l keeps here (master weights, moments), in a row
    <nvme_path>/layers.json    what the last run was doing: {"step": n, "state": "updating" or "clean"}
    <nvme_path>/layers.lock    held while a run uses the folder

The plan and the state hold an `InFile` where an array would be. One record per layer, so that a layer is one read and
one write; each is cut into pieces for several threads, since a disk needs several requests at a time to be fast.
The file has the layers whole, whatever the number of devices, and exists once: one process drives all devices here.

**The file is never trusted at start.** It is updated in place, so a run that is killed within an update leaves a
mixture of two steps. The next start writes all of it anew, from the last checkpoint or from the seed; layers.json only
serves to say what happened.

**Page cache.** Reads and writes go through it. What was written is forced to the disk after each update, while the
next gradients are computed: an error of the disk is seen before anything builds on it, and memory holds no more than
one step's writes that are not on the disk. Pages that are on the disk cost nothing, the kernel gives them to whoever
needs memory; as long as there is plenty, reads come from it and the disk is only written to.
"""

import contextlib
import functools
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from surojax.errors import ConfigError
from surojax.memory.lock import locked
from surojax.placement.home import Home

FILE, MARKER, LOCK = "layers.bin", "layers.json", "layers.lock"
ALIGN = 4096  # bytes: records start at pages of the disk, leaves within one at a 64th of it
PIECE = 16 << 20  # bytes of one request
THREADS = 4  # requests at a time, in each direction
SLOW_MIB_S = 500  # below it a disk is called slow; SATA disks reach this, NVMe disks 1,000 and more
UNUSABLE_S = 3600  # an update that takes longer than this is refused
GiB, MiB = 2**30, 2**20
MAKE_ROOM = (
    "free some, choose another folder, or keep one of both in host memory (offload_optimizer=True, "
    "offload_master=True); what is stored in 16 bits takes half, but that is another training (opt_m_dtype, "
    "opt_v_dtype, and last master_dtype)"
)


class NvmeError(OSError):
    """The file cannot be read or written any more; what it held is lost, the checkpoints are not."""


class InFile:
    """A stack `[L, ...]` in a file: what the plan and the state hold in place of an array.

    shape, dtype: of the whole stack. sharding: of the stack as it would be on the devices; a layer is placed like it.
    It can be read as long as no other run uses the folder.
    """

    def __init__(self, store: "Store", shape: tuple[int, ...], dtype, sharding: jax.NamedSharding):
        self.store, self.shape, self.dtype = store, shape, np.dtype(dtype)
        self.spec = jax.P(*sharding.spec[1:])  # of a layer
        self.sharding = sharding
        self.offset = store.reserve(self.layer_bytes)

    def __repr__(self):
        return f"InFile(shape={self.shape}, dtype={self.dtype}, file={self.store.path})"

    @property
    def ndim(self) -> int:
        """Dimensions, the layer axis included."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements of the stack."""
        return math.prod(self.shape)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def layer_sharding(self, home: Home) -> jax.NamedSharding:
        """Sharding of one layer `[...]` in this memory."""
        return jax.NamedSharding(self.sharding.mesh, self.spec, memory_kind=home.memory_kind)

    def read(self, l: int) -> np.ndarray:
        """Layer l. Raises NvmeError."""
        return self.store.read(l, [self])[0]

    def write(self, l: int, layer: np.ndarray) -> None:
        """Replace layer l. Raises NvmeError."""
        self.store.write(l, [self], [layer])


class Store:
    """The file of a run; see the module. Nothing is opened before it is used, and then stays open until `close`."""

    def __init__(self, folder: str | Path, num_layers: int):
        self.folder, self.num_layers = Path(folder).expanduser().absolute(), num_layers
        self.path = self.folder / FILE
        self.record = 0
        self._made = False
        self._synced: Future | None = None
        self._copied: list[Future] = []

    def reserve(self, size: int) -> int:
        """The offset of `size` new bytes in each record."""
        offset, self.record = self.record, self.record + -(-size // 64) * 64
        return offset

    @property
    def bytes(self) -> int:
        """Of the whole file."""
        return self.num_layers * self._stride

    @property
    def _stride(self) -> int:
        return -(-self.record // ALIGN) * ALIGN

    @functools.cached_property
    def _pools(self) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
        return ThreadPoolExecutor(THREADS, "nvme-read"), ThreadPoolExecutor(THREADS, "nvme-write")

    @functools.cached_property
    def fd(self) -> int:
        """The open file, which is given all its room the first time: a full disk is found here. Raises ConfigError."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"nvme_path: cannot open {self.path} ({error.strerror}); choose another folder"
            ) from error
        if self._made:  # it may be another run's by now
            return fd
        try:
            os.ftruncate(fd, self.bytes)
            os.posix_fallocate(fd, 0, self.bytes)
            self._made = True
        except OSError as error:
            os.ftruncate(fd, 0)
            os.close(fd)
            raise ConfigError(
                f"nvme_path: expected room for {gib(self.bytes)} in {self.folder}, got: {error.strerror}; {MAKE_ROOM}"
            ) from error
        return fd

    def close(self) -> None:
        """Wait for what is under way and close the file; a later read opens it again."""
        for pool in self.__dict__.pop("_pools", ()):
            pool.shutdown()
        if "fd" in self.__dict__:
            os.close(self.__dict__.pop("fd"))

    # -- Layers ------------------------------------------------------------------------------------------------------

    def read(self, l: int, leaves: Iterable[InFile]) -> list[np.ndarray]:
        """Layer l of these stacks. Raises NvmeError."""
        return [self._read_one(leaf, l) for leaf in leaves]

    def _read_one(self, leaf: InFile, l: int) -> np.ndarray:
        raw = np.empty(leaf.layer_bytes, np.uint8)

        def piece(start: int) -> None:
            view, at = memoryview(raw)[start : start + PIECE], self._start(leaf, l) + start
            while view:
                n = os.preadv(self.fd, [view], at)
                if n == 0:
                    raise OSError("it is shorter than it was made: something else wrote to it")
                view, at = view[n:], at + n

        self._each_piece(0, piece, raw.size, "read")
        return raw.view(leaf.dtype).reshape(leaf.shape[1:])

    def write(self, l: int, leaves: Iterable[InFile], layers: Iterable[np.ndarray]) -> None:
        """Replace layer l of these stacks. Raises NvmeError."""
        for leaf, layer in zip(leaves, layers, strict=True):
            assert layer.shape == leaf.shape[1:] and layer.dtype == leaf.dtype, (leaf, layer.shape, layer.dtype)
            raw = np.ascontiguousarray(layer).reshape(-1).view(np.uint8)

            def piece(start: int, raw=raw, leaf=leaf) -> None:
                view, at = memoryview(raw)[start : start + PIECE], self._start(leaf, l) + start
                while view:
                    n = os.pwrite(self.fd, view, at)
                    view, at = view[n:], at + n

            self._each_piece(1, piece, raw.size, "write")

    def _start(self, leaf: InFile, l: int) -> int:
        if not 0 <= l < self.num_layers:
            raise IndexError(f"layer: expected 0 to {self.num_layers - 1}, got {l}")
        return l * self._stride + leaf.offset

    def _each_piece(self, pool: int, piece, size: int, what: str) -> None:
        with self._explained(what):
            if size <= PIECE:
                piece(0)
            else:
                list(self._pools[pool].map(piece, range(0, size, PIECE)))

    @contextlib.contextmanager
    def _explained(self, what: str):
        """Errors of the disk say which file, and what of the run is whole."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise NvmeError(
                f"nvme_path: could not {what} {self.path} ({reason}); its content is lost, but no checkpoint is: "
                "the next start continues from the last one"
            ) from error

    # -- Steps -------------------------------------------------------------------------------------------------------

    def begin_update(self, step: int) -> None:
        """Wait until the last update is on the disk and no checkpoint reads any more; then note what happens."""
        self.settle()
        while self._copied:
            self._copied.pop().exception()  # a checkpoint that could not be written says so itself
        self._mark(step, "updating")

    def end_update(self, step: int) -> None:
        """Note that the file holds one step, and begin to force it to the disk."""
        self._mark(step, "clean")
        self._synced = self._pools[1].submit(os.fdatasync, self.fd)

    def settle(self) -> None:
        """Wait until the last update is on the disk. Raises NvmeError when it cannot be written there."""
        synced, self._synced = self._synced, None
        if synced is not None:
            with self._explained("write"):
                synced.result()

    def hold(self) -> Future:
        """No update begins before this is given a result: something reads the file."""
        self._copied.append(Future())
        return self._copied[-1]

    def _mark(self, step: int, state: str) -> None:
        with self._explained("write"):
            new = self.folder / f"{MARKER}.new"
            new.write_text(json.dumps({"step": step, "state": state}))
            new.replace(self.folder / MARKER)  # a kill leaves the old one or this one, never half of one

    def interrupted(self) -> int | None:
        """The step within whose update the last run here ended, None when it did not."""
        try:
            last = json.loads((self.folder / MARKER).read_text())
            return int(last["step"]) if last["state"] == "updating" else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def store_of(plan: Any) -> Store | None:
    """The store that a plan or a state keeps layers in; None when all of it is in memory."""
    return next((x.store for x in jax.tree.leaves(plan) if isinstance(x, InFile)), None)


def check(store: Store | None) -> None:
    """What can be checked before anything is built, leaving nothing behind. Raises ConfigError."""
    if store is None:
        return
    if jax.process_count() > 1:
        raise ConfigError(
            f"nvme_path: expected one process that drives all devices, got {jax.process_count()}; use pinned host "
            "memory (offload_optimizer=True, offload_master=True)"
        )
    folder, change = store.folder, "choose a folder on an NVMe disk"
    if not folder.is_dir():
        what = "a file" if folder.exists() else "nothing there"
        raise ConfigError(f"nvme_path: expected a folder, got {str(folder)!r} ({what}); create it, or {change}")
    try:
        tempfile.TemporaryFile(dir=folder).close()
        there = os.stat(store.path).st_blocks * 512 if store.path.exists() else 0
        free = shutil.disk_usage(folder).free + there  # what an earlier run left is used again
    except OSError as error:
        raise ConfigError(
            f"nvme_path: expected a folder that can be written, got {str(folder)!r} ({error.strerror}); {change}"
        ) from error
    if store.bytes > free:
        raise ConfigError(f"nvme_path: needs {gib(store.bytes)} in {folder}, where {gib(free)} are free; {MAKE_ROOM}")


@contextlib.contextmanager
def claim(store: Store):
    """Within it the folder is this run's and the file has its room; gives a line about it to print.

    Raises ConfigError when another run uses the folder, there is no room, or the disk is too slow to be of use.
    """
    check(store)
    with locked(store.folder / LOCK, "nvme_path"), contextlib.closing(store):
        yield describe(store, write_rate(store))


def describe(store: Store, rate: float) -> str:
    """What an update will cost at `rate` bytes/s. Raises ConfigError when it is more than an hour."""
    seconds = 2 * store.bytes / rate
    text = f"nvme: {gib(store.bytes)} in {store.folder}, written at {rate / MiB:,.0f} MiB/s"
    if seconds > UNUSABLE_S:
        raise ConfigError(
            f"nvme_path: expected a disk that is fast enough, got {rate / MiB:,.1f} MiB/s in {store.folder}, where an "
            f"update reads and writes {gib(store.bytes)} each: {seconds / 3600:,.1f} hours a step; choose another disk"
        )
    text += f": updates take {seconds:,.1f} s a step, unless the page cache holds it"
    slow = rate < SLOW_MIB_S * MiB and seconds > 1
    return f"warning: slow disk, {text}; gradient_accumulation_steps makes them rarer" if slow else text


def write_rate(store: Store, limit: int = 256 * MiB, seconds: float = 2.0) -> float:
    """Bytes per second that reach the disk, measured over up to `limit` bytes at the start of the file."""
    data, written, start = memoryview(np.random.default_rng(0).bytes(min(PIECE, store.bytes))), 0, time.perf_counter()
    with store._explained("write"):
        while written < min(limit, store.bytes) and time.perf_counter() - start < seconds:
            written += os.pwrite(store.fd, data[: store.bytes - written], written)
            os.fdatasync(store.fd)
    return written / (time.perf_counter() - start)


def gib(size: int) -> str:
    """Bytes in GiB."""
    return f"{size / GiB:,.2f} GiB"
