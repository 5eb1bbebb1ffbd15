"""The file on an NVMe disk that training state is stored in: a record per layer.

    <nvme_path>/layers.bin     one record per layer: all its tensors that are stored here
    <nvme_path>/layers.json    state of the last run: {"step": n, "state": "updating" or "clean"}
    <nvme_path>/layers.lock    locked while a run uses the folder

In several folders layers.bin is striped over all of them (striped.py), and layers.json is in the first one.
Reads and writes are split into pieces for several threads, since a disk needs several requests in flight to be fast.
A store may keep some bytes in host memory: the first ones of each array, of as many arrays as there is memory for, and
of all layers alike, so that the disks have as much to do in each layer of a pass.
Several processes have a folder <nvme_path>/process-<i> each. What is in a record: memory/in_file.py.

**The file is never trusted at start.** It is updated in place, so a run that is killed within an update leaves a
mixture of two steps. The next start rewrites all of it, from the last checkpoint or from the seed; layers.json only
serves to say what happened.

**Direct.** Reads and writes go past the page cache, from and to aligned buffers (aligned.py): on two cores a file of 8
GB was written at 5.5 GB/s with 0.03 CPU seconds a GB, and through the cache at 0.45 GB/s with 2.8 (docs/LOG.md,
2026-11-24). Where the file system refuses that, as tmpfs does, they go through the cache. The disk is asked to keep
what was written after each update, while the next gradients are computed.
"""

import contextlib
import dataclasses
import errno
import functools
import json
import math
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from surojax.errors import ConfigError
from surojax.memory.aligned import ALIGN, Buffers, aligned
from surojax.memory.striped import StripedFile
from surojax.placement.table import TO_FILES
from surojax.untrusted import expanded

FILE, MARKER, LOCK = "layers.bin", "layers.json", "layers.lock"
THREADS = 8  # requests in flight, in each direction and for each folder
ARRAYS = 4  # of a layer, that are read or written at a time
MAKE_ROOM = (
    "free some, choose another folder, or keep some in host memory (files_in_memory=GIB, or offload_master=True in "
    "place of 'nvme'); what is stored in 16 bits takes half, but that is another training (opt_m_dtype, "
    "opt_v_dtype, and last master_dtype)"
)


@dataclasses.dataclass(eq=False)
class Place:
    """Room for an array of each layer.

    row: of the placement table. size: bytes. kept: how many of them, from the first on, are in host memory. offset: of
    the others in the record of a layer. memory: the kept bytes of each layer.
    """

    row: str
    size: int
    kept: int = 0
    offset: int = 0
    memory: dict[int, np.ndarray] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def in_file(self) -> int:
        """Bytes of a layer that are in the file."""
        return self.size - self.kept


class NvmeError(OSError):
    """The file cannot be read or written any more. Its content is lost, the checkpoints are not."""


class Store:
    """The file of a run; none if nothing is stored in it. The first use opens it; it stays open until `close`.

    folders: over which it is striped; folder: the first of them, which has the marker. records: by the number of a
    layer of which the file has a record, the number of that record. record: bytes of each.
    """

    def __init__(self, folder: str | Path, num_layers: int, layers: Iterable[int] | None = None, *, in_memory: int = 0):
        """folder: or several, see `folders`. layers: those of which this process stores parts, see `own_layers`; None:
        all. in_memory: bytes that are kept in host memory."""
        own = f"process-{jax.process_index()}" if jax.process_count() > 1 else ""
        self.folders = [given / own for given in folders(folder)]
        self.folder = self.folders[0]
        self.num_layers = num_layers
        self.records = {l: i for i, l in enumerate(range(num_layers) if layers is None else layers)}
        self.path = self.folder / FILE
        self.record = 0
        self._in_memory = in_memory
        self._places: list[Place] = []
        self._file = StripedFile([folder / FILE for folder in self.folders])
        self._opening = threading.Lock()
        self._buffers = Buffers()
        self._made = False
        self._synced: Future | None = None
        self._copied: list[Future] = []

    def reserve(self, size: int, row: str) -> Place:
        """Reserves `size` bytes of each layer for an array of this row, before anything is written."""
        self._places.append(Place(row, size))
        left = self._in_memory // max(1, len(self.records))
        for place in sorted(self._places, key=lambda place: TO_FILES.index(place.row), reverse=True):
            place.kept = place.size if place.size <= left else left // ALIGN * ALIGN
            left -= place.kept
        self.record = 0
        for place in self._places:
            place.offset = self.record
            self.record += aligned(place.in_file)
        return self._places[-1]

    @property
    def is_empty(self) -> bool:
        """True if nothing is stored in it: there is no file then."""
        return not self._places

    @property
    def kept(self) -> int:
        """Bytes that are kept in host memory."""
        return len(self.records) * sum(place.kept for place in self._places)

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return len(self.records) * self.record

    @property
    def sizes(self) -> list[int]:
        """Bytes of it in each of the folders."""
        return self._file.sizes(self.bytes)

    @functools.cached_property
    def _pools(self) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
        """(threads that read, threads that write)."""
        threads = THREADS * len(self.folders)
        return ThreadPoolExecutor(threads, "nvme-read"), ThreadPoolExecutor(threads, "nvme-write")

    @functools.cached_property
    def of_arrays(self) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
        """(threads that read, threads that write) several arrays of a layer at a time, so that pieces are in flight."""
        return ThreadPoolExecutor(ARRAYS, "nvme-arrays-read"), ThreadPoolExecutor(ARRAYS, "nvme-arrays-write")

    @property
    def file(self) -> StripedFile:
        """The open file. The first use allocates its full size, so that a full disk is found. Raises ConfigError."""
        with self._opening:
            if not self._file.is_open:
                self._open()
        return self._file

    def _open(self) -> None:
        takes_room = not self._made  # opened again after `close`: another run may use the file by now
        try:
            self._file.open(self.bytes, takes_room=takes_room)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise ConfigError(
                    f"nvme_path: cannot open {error.filename} ({error.strerror}); choose another folder"
                ) from error
            folder = Path(error.filename).parent
            raise ConfigError(
                f"nvme_path: expected room for {gib(self.bytes)} in {folder}, got: {error.strerror}; {MAKE_ROOM}"
            ) from error
        self._made = True

    def close(self) -> None:
        """Waits for requests in flight and closes the file; a later read opens it again."""
        for pool in (*self.__dict__.pop("of_arrays", ()), *self.__dict__.pop("_pools", ())):
            pool.shutdown()
        self._file.close()

    # -- Layers ------------------------------------------------------------------------------------------------------

    def read(self, l: int, place: Place, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The array of layer l at this place. Raises NvmeError."""
        begin = self._record_start(l) + place.offset
        size = math.prod(shape) * dtype.itemsize
        raw = self._buffers.take(aligned(size))
        kept = min(place.kept, size)
        if kept:
            raw[:kept] = self._memory(l, place)[:kept]
        if kept < size:
            self.read_file(raw[kept:], begin)
        return raw[:size].view(dtype).reshape(shape)

    def write(self, l: int, place: Place, array: np.ndarray) -> None:
        """Replaces what `read` returns for this place. Raises NvmeError."""
        begin = self._record_start(l) + place.offset
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        kept = min(place.kept, raw.size)
        if kept:
            self._memory(l, place)[:kept] = raw[:kept]
        if kept < raw.size:
            self.write_file(raw[kept:], begin)

    def _memory(self, l: int, place: Place) -> np.ndarray:
        """The bytes of layer l at this place that are in host memory."""
        if l not in place.memory:
            place.memory[l] = np.zeros(place.kept, np.uint8)
        return place.memory[l]

    def read_file(self, raw: np.ndarray, begin: int) -> None:
        """Fills an array of bytes, aligned as `aligned.Buffers` are, with what is in the file from `begin` on."""

        def piece(start: int, length: int) -> None:
            self.file.read(memoryview(raw)[start : start + length], begin + start)

        self._each_piece(0, piece, begin, raw.size, "read")

    def write_file(self, raw: np.ndarray, begin: int) -> None:
        """Replaces what is in the file from `begin` on by these bytes."""

        def piece(start: int, length: int) -> None:
            part = raw[start : start + length]
            buffer = self._buffers.take(aligned(part.size))
            buffer[: part.size] = part
            self.file.write(memoryview(buffer), begin + start)

        self._each_piece(1, piece, begin, raw.size, "write")

    def _record_start(self, l: int) -> int:
        """Offset in the file of the record of layer l."""
        if l not in self.records:
            raise IndexError(f"layer: expected one of {list(self.records)}, got {l}")
        return self.records[l] * self.record

    def _each_piece(self, pool: int, piece: Callable[[int, int], None], begin: int, size: int, what: str) -> None:
        """Calls piece(offset, bytes) for each part of `size` bytes, by threads of _pools[pool] if there are several.

        begin: where they are in the file.
        """
        with self.explained(what):
            spans = self._file.spans(begin, size)
            if len(spans) == 1:
                piece(*spans[0])
            else:
                list(self._pools[pool].map(piece, *zip(*spans, strict=True)))

    @contextlib.contextmanager
    def explained(self, what: str):
        """Turns an error of the disk into an NvmeError that names the file and what is not lost."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise NvmeError(
                f"nvme_path: could not {what} {error.filename or self.path} ({reason}); its content is lost, but no "
                "checkpoint is: the next start continues from the last one"
            ) from error

    # -- Steps -------------------------------------------------------------------------------------------------------

    def begin_update(self, step: int) -> None:
        """Waits until the last update is on the disk and no checkpoint reads the file, then marks it as updating.

        Like `end_update`, it does nothing for an empty store.
        """
        if self.is_empty:
            return
        self.settle()
        while self._copied:
            self._copied.pop().exception()  # a checkpoint that could not be written says so itself
        self._mark(step, "updating")

    def end_update(self, step: int) -> None:
        """Marks the file as clean (all of it is from this step) and begins to force it to the disk."""
        if self.is_empty:
            return
        self._mark(step, "clean")
        self._synced = self._pools[1].submit(self.file.sync)

    def settle(self) -> None:
        """Waits until the last update is on the disk. Raises NvmeError if it cannot be written there."""
        synced, self._synced = self._synced, None
        if synced is not None:
            with self.explained("write"):
                synced.result()

    def hold(self) -> Future:
        """A future that the caller completes when it has read the file; no update begins before."""
        self._copied.append(Future())
        return self._copied[-1]

    def _mark(self, step: int, state: str) -> None:
        """Writes layers.json."""
        with self.explained("write"):
            new = self.folder / f"{MARKER}.new"
            new.write_text(json.dumps({"step": step, "state": state}))
            new.replace(self.folder / MARKER)  # atomic: a kill leaves the old file or the new one

    def interrupted(self) -> int | None:
        """The step in whose update the last run was interrupted, None if it was not."""
        if self.is_empty:
            return None
        try:
            last = json.loads((self.folder / MARKER).read_text())
            return int(last["step"]) if last["state"] == "updating" else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def folders(given: str | Path) -> list[Path]:
    """The absolute paths of a folder, or of several with commas between them. Raises ConfigError, see `expanded`."""
    return [expanded(one.strip()).absolute() for one in str(given).split(",")]


def gib(size: int) -> str:
    """Bytes as text, in the largest of GiB, MiB and KiB that there is one of."""
    for name, unit in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size / 2**10:,.2f} KiB"
