"""The file on an NVMe disk that training state is stored in: a record per layer, and pieces of tables.

    <nvme_path>/layers.bin     one record per layer: all its tensors that are stored here; then pieces of embedding and
                               head, if their state is stored here
    <nvme_path>/layers.json    state of the last run: {"step": n, "state": "updating" or "clean"}
    <nvme_path>/layers.lock    locked while a run uses the folder
    <nvme_path>/state.json     with two slots: which of them has what (slots.py)

In several folders layers.bin is striped over all of them (striped.py), and layers.json is in the first one.
Reads and writes are split into pieces for several threads, since a disk needs several requests in flight to be fast.
Several processes have a folder <nvme_path>/process-<i> each. Where what is in the file, and what of it stays in host
memory: places.py. What is in a record: in_file.py.

**With one slot the file is never trusted at start.** It is updated in place, so a run that is killed within an update
leaves a mixture of two steps. The next start rewrites all of it, from the last checkpoint or from the seed; layers.json
only serves to say what happened. With two slots the rows `IN_SLOTS` have twice the room, and the next start goes on
from the last complete step, see slots.py; they are never kept in host memory, which a kill takes.

**Damage is found when it is read.** The checksum of each array that is written stays in memory, and is compared with
that of what is read (slots.py). Before each update the files are checked to be the ones that were opened, with their
sizes. What stays in host memory is not compared.

**Direct.** Reads and writes go past the page cache, from and to aligned buffers (aligned.py): on two cores a file of 8
GB was written at 5.5 GB/s with 0.03 CPU seconds a GB, and through the cache at 0.45 GB/s with 2.8 (docs/log,
2026-11-24). Where the file system refuses that, as tmpfs does, they go through the cache. The disk is asked to keep
what was written after each update, while the next gradients are computed.
"""

import contextlib
import errno
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from surojax.errors import ConfigError
from surojax.memory.aligned import ALIGN, Buffers, aligned
from surojax.memory.places import Place, Places
from surojax.memory.slots import TABLE, Content, PageSums, Slots, read_slot_table
from surojax.memory.striped import StripedFile
from surojax.own_files import read_own, write_whole
from surojax.untrusted import expanded

FIRST = Content(0, 0)  # where a piece is that was never written
FILE, MARKER, LOCK = "layers.bin", "layers.json", "layers.lock"
MARKER_FORM = {"step": range(2**31), "state": str}
THREADS = 8  # requests in flight, in each direction and for each folder
IN_CACHE = 512 << 10  # bytes that a processor's core keeps in its cache
ARRAYS = 4  # of a layer, that are read or written at a time
LOST = "its content is lost, but no checkpoint is: the next start continues from the last one"
KEPT = ", or from the last step that is complete in the file"
MAKE_ROOM = (
    "free some, choose another folder, or keep some in host memory (files_in_memory=GIB, or offload_master=True in "
    "place of 'nvme'); what is stored in 16 bits takes half, but that is another training (opt_m_dtype, "
    "opt_v_dtype, and last master_dtype)"
)


class NvmeError(OSError):
    """The file cannot be read or written any more. Its content is lost, the checkpoints are not."""


class Store:
    """The file of a run's layers; no file if nothing is stored. The first use opens it; it stays open until `close`.

    folders: the folders that the file is striped over; folder: the first folder, which has the marker. places: where
    what is in it.
    """

    def __init__(
        self,
        folder: str | Path,
        num_layers: int,
        layers: Iterable[int] | None = None,
        *,
        in_memory: int = 0,
        slots: int = 1,
    ):
        """folder: or several, see `folders`. layers: those of which this process stores parts, see `own_layers`; None:
        all. in_memory: bytes that are kept in host memory. slots: 2 for a state that a kill does not take."""
        own = f"process-{jax.process_index()}" if jax.process_count() > 1 else ""
        self.folders = [given / own for given in folders(folder)]
        self.folder = self.folders[0]
        self.num_layers = num_layers
        self.path = self.folder / FILE
        self.slots = Slots(self.folder) if slots == 2 else None
        self.places = Places(range(num_layers) if layers is None else layers, in_memory=in_memory, slots=slots)
        self._file = StripedFile([folder / FILE for folder in self.folders])
        self._opening = threading.Lock()
        self._buffers = Buffers()
        self._made = False
        self._sums: dict[str, int] = {}  # of what the file has of each array of a layer or piece
        self._synced: Future | None = None
        self._copied: list[Future] = []

    @property
    def is_empty(self) -> bool:
        """True if nothing is stored in it: there is no file then."""
        return self.places.is_empty

    @property
    def busy_s(self) -> float:
        """Seconds in which the file was read or written, or both, until now."""
        return self._file.busy.seconds

    @property
    def sizes(self) -> list[int]:
        """Bytes of the file in each of the folders."""
        return self._file.sizes(self.places.bytes)

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
            self._file.open(self.places.bytes, takes_room=takes_room)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise ConfigError(
                    f"nvme_path: cannot open {error.filename} ({error.strerror}); choose another folder"
                ) from error
            folder = Path(error.filename).parent
            size = self.sizes[self.folders.index(folder)]
            raise ConfigError(
                f"nvme_path: expected room for {readable_bytes(size)} in {folder}, got: {error.strerror}; {MAKE_ROOM}"
            ) from error
        self._made = True

    def close(self) -> None:
        """Waits for requests in flight and closes the file; a later read opens it again."""
        for pool in (*self.__dict__.pop("of_arrays", ()), *self.__dict__.pop("_pools", ())):
            pool.shutdown()
        self._file.close()

    # -- Layers and pieces -------------------------------------------------------------------------------------------

    def read(self, l: int, place: Place, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The array of layer or piece l at this place. Raises NvmeError, also if it is not what was written there."""
        size = math.prod(shape) * dtype.itemsize
        begin = self._begin(l, place)
        raw = self._buffers.take(aligned(size))
        kept = min(place.kept, size)
        if kept:
            raw[:kept] = self._memory(l, place)[:kept]
        if kept < size:
            written = self._sums.get(f"{l}/{place.name}")
            if self.read_file(raw[kept:], begin, size - kept) != written and written is not None:
                raise self._damaged(l, place, begin)
        return raw[:size].view(dtype).reshape(shape)

    def _damaged(self, l: int, place: Place, begin: int) -> NvmeError:
        """The error about an array that is not what this run wrote. begin: where in the file it is."""
        files = " or ".join(map(str, self._file.paths_of(begin, place.in_file)))
        what = f"piece {l} of embedding or head" if place in self.places.of_pieces else f"layer {place.first + l}"
        return NvmeError(
            f"nvme_path: {files} is damaged: {what} ({place.row}) is not what this run wrote there; the disk fails, or "
            f"something else writes to it; {LOST}{KEPT if self.slots else ''}"
        )

    def _begin(self, l: int, place: Place) -> int:
        """Offset in the file of what is in it of layer or piece l, of the newest slot."""
        begin = place.begin(l)
        if self.slots and place.slots == 2:
            begin += self.slots.newest.get(f"{l}/{place.name}", FIRST).slot * place.slot_bytes
        return begin

    def share(self, l: int, place: Place, path: Path) -> bool:
        """Makes a file of the array of layer or piece l that shares its blocks; False if that cannot be.

        See `StripedFile.share`; what is partly in host memory has no blocks of its own either.
        """
        return not place.kept and self.file.share(self._begin(l, place), place.size, path)

    def shares_blocks_with(self, folder: Path) -> bool:
        """True if files in this folder, which exists, can share blocks of the file."""
        probe = folder / f"{FILE}.probe"
        probe.unlink(missing_ok=True)  # of a start that was killed
        can = not self.is_empty and self.file.share(0, ALIGN, probe)
        probe.unlink(missing_ok=True)
        return can

    def write(self, l: int, place: Place, array: np.ndarray) -> None:
        """Writes the array of layer or piece l at this place. Raises NvmeError."""
        begin = place.begin(l)
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if place.slots == 2:
            return self._write_slot(f"{l}/{place.name}", place, begin, raw)
        kept = min(place.kept, raw.size)
        if kept:
            self._memory(l, place)[:kept] = raw[:kept]
        if kept < raw.size:
            self._sums[f"{l}/{place.name}"] = self.write_file(raw[kept:], begin)

    def _write_slot(self, piece: str, place: Place, begin: int, raw: np.ndarray) -> None:
        """Writes a piece into its free slot. begin: of its first slot."""
        assert self.slots
        slot = self.slots.free(piece)
        self._sums[piece] = self.write_file(raw, begin + slot * place.slot_bytes)
        self.slots.newest[piece] = Content(slot, self._sums[piece])

    def _memory(self, l: int, place: Place) -> np.ndarray:
        """The bytes of layer or piece l at this place that are in host memory."""
        if l not in place.memory:
            place.memory[l] = np.zeros(place.kept, np.uint8)
        return place.memory[l]

    def read_file(self, raw: np.ndarray, begin: int, size: int | None = None) -> int:
        """Reads bytes from the file at offset `begin` into an array that is aligned as `aligned.Buffers` are.

        Returns the checksum of the first `size` of them, of all by default. The threads that read compute it, while
        others read.
        """
        size = raw.size if size is None else size
        sums = PageSums(size)

        def piece(start: int, length: int) -> None:
            self.file.read(memoryview(raw)[start : start + length], begin + start)
            sums.add(start, raw[start : start + length])

        self._each_piece(0, piece, begin, raw.size, "read")
        return sums.end(raw[size // ALIGN * ALIGN : size])

    def write_file(self, raw: np.ndarray, begin: int) -> int:
        """Writes these bytes to the file at offset `begin`; returns their checksum."""
        sums = PageSums(raw.size)

        def piece(start: int, length: int) -> None:
            buffer = self._buffers.take(aligned(length))
            for at in range(start, start + length, IN_CACHE):
                part = raw[at : min(at + IN_CACHE, start + length)]
                buffer[at - start :][: part.size] = part
                sums.add(at, part)  # while the processor's cache has it
            self.file.write(memoryview(buffer), begin + start)

        self._each_piece(1, piece, begin, raw.size, "write")
        return sums.end(raw[raw.size // ALIGN * ALIGN :])

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
                f"nvme_path: could not {what} {error.filename or self.path} ({reason}); "
                f"{LOST}{KEPT if self.slots else ''}"
            ) from error

    # -- Steps -------------------------------------------------------------------------------------------------------

    def begin_update(self, step: int) -> None:
        """Waits until the last update is on the disk and no checkpoint reads the file, then marks it as updating.

        Like `end_update`, it does nothing for an empty store.
        """
        if self.is_empty:
            return
        self.settle()
        with self.explained("use"):
            self.file.check_unchanged(self.places.bytes)
        while self._copied:
            self._copied.pop().exception()  # a checkpoint that could not be written says so itself
        self._mark(step, "updating")

    def end_update(self, step: int, others: Callable[[], Iterable[np.ndarray]] = tuple) -> None:
        """Marks the file as clean (all of it is from this step) and begins to force it to the disk.

        others: what `reserve_others` has room for, after the step; asked for with two slots only.
        """
        if self.is_empty:
            return
        table = None
        if self.slots:
            for place, array in zip(self.places.others, others(), strict=True):
                raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                self._write_slot(place.name, place, place.offset, raw)
            table = self.slots.completed(step)
        self._mark(step, "clean")
        self._synced = self._pools[1].submit(self._force, table)

    def reported(self, progress: dict[str, Any]) -> None:
        """Takes the progress of a run, {"step": n, ...}, all of whose records up to there are written.

        Does nothing with one slot. With two, the state after that step is what the next start goes on from, once it is
        complete in the file.
        """
        if self.slots and (table := self.slots.reported(progress)):
            before = self._synced
            self._synced = self._pools[1].submit(self._force, table, before)

    def _force(self, table: dict[str, Any] | None, before: Future | None = None) -> None:
        """Waits until the disk keeps what was written, and then writes this table. Raises OSError."""
        if before is None:
            self.file.sync()
        else:
            before.result()
        if table and self.slots:
            self.slots.write(table | {"layout": self.layout})

    @property
    def layout(self) -> list:
        """Sizes and places of all arrays: a file with an equal layout can be read as this one."""
        return [len(self.folders), *self.places.layout]

    def kept_progress(self) -> dict[str, Any] | None:
        """The progress of the run whose state the file has complete, as two slots keep it; None if it has none."""
        table = read_slot_table(self.folder) if self.slots and not self.is_empty else None
        is_own = table and table["layout"] == self.layout and table["pieces"].keys() == self._pieces().keys()
        return table["progress"] if table and is_own else None

    def check_there(self, step: int) -> None:
        """Raises ConfigError if a file of the state after this step is missing, or has another size."""
        for folder, size in zip(self.folders, self.sizes, strict=True):
            path = folder / FILE
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                got = "no such file" if found is None else f"{found:,}"
                raise ConfigError(
                    f"nvme_path: expected {path} with {size:,} bytes, since {self.folder / TABLE} has step {step}, got "
                    f"{got}; put it back, or delete {self.folder / TABLE} to continue from the last checkpoint"
                )

    def _pieces(self) -> dict[str, tuple[Place, int]]:
        """{name: (place, offset of its first slot)} of all that has two slots."""
        places = [place for place in (*self.places.of_layers, *self.places.of_pieces) if place.slots == 2]
        of_layers = {f"{l}/{place.name}": (place, place.begin(l)) for place in places for l in place.records}
        return of_layers | {place.name: (place, place.offset) for place in self.places.others}

    def load(self) -> list[np.ndarray]:
        """Selects the complete state in the file to be read; returns its arrays that belong to no layer, as bytes.

        Every piece is held against its checksum. Raises NvmeError if one is damaged.
        """
        slots = self.slots
        table = read_slot_table(self.folder)
        assert slots and table
        slots.load(table)
        pieces = self._pieces()
        self._sums = {name: content.checksum for name, content in slots.kept.items()}

        def check(name: str) -> np.ndarray:
            place, begin = pieces[name]
            content = slots.newest[name]
            raw = self._buffers.take(aligned(place.size))
            if self.read_file(raw, begin + content.slot * place.slot_bytes, place.size) != content.checksum:
                raise NvmeError(
                    f"nvme_path: what {self.path} has of step {table['progress']['step']} is damaged (piece {name}); "
                    f"delete {self.folder / TABLE} to continue from the last checkpoint"
                )
            return raw[: place.size]

        threads = self.of_arrays[0]
        others = [place.name for place in self.places.others]
        for names in itertools.batched((name for name in pieces if name not in others), ARRAYS):
            list(threads.map(check, names))
        return [check(name) for name in others]

    def forget(self) -> None:
        """Removes the table: the file is about to be overwritten. Raises NvmeError."""
        self._sums.clear()
        if not self.is_empty:
            with self.explained("write"):
                (self.folder / TABLE).unlink(missing_ok=True)

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
            write_whole(self.folder / MARKER, {"step": step, "state": state})

    def interrupted(self) -> int | None:
        """The step in whose update the last run was interrupted, None if it was not."""
        if self.is_empty:
            return None
        try:
            last = read_own(self.folder / MARKER, MARKER_FORM)
        except (OSError, ValueError):
            return None
        return last["step"] if last["state"] == "updating" else None


def folders(given: str | Path) -> list[Path]:
    """The absolute paths of a folder, or of several with commas between them; "": the current folder, of a store of
    nothing.

    Raises ConfigError for an empty one among them, which would be the current folder too, and as `expanded` does.
    """
    names = [one.strip() for one in str(given).split(",")]
    if str(given) and not all(names):
        raise ConfigError(
            f"nvme_path: expected folders with commas between them, got {str(given)!r}, one of which is empty; leave "
            "the comma out, or write . for the current folder"
        )
    return [expanded(name).absolute() for name in names]


def readable_bytes(size: int) -> str:
    """Formats bytes as text, in the largest unit of GiB, MiB and KiB that is not above them."""
    for name, unit in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size / 2**10:,.2f} KiB"
