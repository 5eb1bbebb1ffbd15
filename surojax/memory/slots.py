"""Two slots for what a kill must not take: the state of a run, as it was after its last complete update.

    <nvme_path>/state.json     the table: progress of the run, and for each piece its slot and its checksum

A piece is an array of a layer, or of rows of embedding or head, or a shard of what is in memory. An update reads one
slot of it and writes the other. Once all of it is on the disk, the table is written beside the old one, forced to the
disk and renamed. So the table always names pieces of one step, which nothing overwrites before the next table is there:
a run that is killed at any moment goes on from that step.

**Checksum.** CRC-32 of one 64-bit number for each 4096 bytes: the sum of its 64-bit words. It notices a change of any
one word, a page that was lost or torn, zeros or an older content in place of a page, and pages that changed places; it
does not notice words of one page that did. CRC-32 of all bytes takes 0.47 CPU seconds a GB with zlib, and this 0.11,
the time to read them once from memory (2 cores of an EPYC; docs/log).
"""

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from surojax.memory.aligned import ALIGN
from surojax.own_files import read_own, write_whole

TABLE = "state.json"
MOST_BYTES = 1 << 28  # of the table: some hundred for a piece
SUMS = "page sums"  # name of the checksum's algorithm in a table


class Content(NamedTuple):
    """The newest content of a piece: the slot that it is in, 0 or 1, and its checksum."""

    slot: int
    checksum: int


# The form of the table, see own_files.py. The run whose progress it is checks the rest of that.
FORM = {"sums": str, "layout": list, "progress": {"step": range(1, 2**31)}, "pieces": {str: (range(2), range(2**32))}}


class PageSums:
    """The checksum of an array of bytes, see above, whose parts may be added by several threads in any order."""

    def __init__(self, size: int):
        self._sums = np.zeros(size // ALIGN, np.uint64)

    def add(self, start: int, part: np.ndarray) -> None:
        """Adds the bytes from `start`, a multiple of `ALIGN`. Any beyond the array's end are left out."""
        first = start // ALIGN
        pages = min(len(self._sums) - first, part.size // ALIGN)
        words = part[: pages * ALIGN].view(np.uint64).reshape(pages, ALIGN // 8)
        np.add.reduce(words, axis=1, out=self._sums[first : first + pages])

    def end(self, rest: np.ndarray) -> int:
        """The checksum, once all is added. rest: the bytes after the last whole page."""
        return zlib.crc32(rest.tobytes(), zlib.crc32(self._sums.tobytes()))


def read_slot_table(folder: Path) -> dict[str, Any] | None:
    """The table in the folder of a file, see `FORM`; None if there is none that can be read."""
    try:
        table = read_own(folder / TABLE, FORM, MOST_BYTES)
    except (OSError, ValueError):
        return None
    return table if table["pieces"] and table["sums"] == SUMS else None


class Slots:
    """The slots of a file's pieces, by the pieces' names.

    kept: what the table on the disk names. newest: what was written last.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.kept: dict[str, Content] = {}
        self.newest: dict[str, Content] = {}
        self._completed: tuple[int, dict[str, Content]] | None = None
        self._progress: dict[str, Any] = {}

    def free(self, piece: str) -> int:
        """The slot that may be written: not the one that the table names."""
        return 1 - self.kept[piece].slot if piece in self.kept else 0

    def completed(self, step: int) -> dict[str, Any] | None:
        """Records that the newest pieces are the state after this step; returns `_due()`."""
        self._completed = (step, dict(self.newest))
        return self._due()

    def reported(self, progress: dict[str, Any]) -> dict[str, Any] | None:
        """Records the progress of a run whose metrics are written up to its step; returns `_due()`."""
        self._progress = progress
        return self._due()

    def _due(self) -> dict[str, Any] | None:
        """The table to write, but for its layout: once a step is complete and all records before it are written."""
        if self._completed is None or self._completed[0] != self._progress.get("step"):
            return None
        (_, pieces), self._completed = self._completed, None
        return {"progress": self._progress, "pieces": pieces}

    def write(self, table: dict[str, Any]) -> None:
        """Replaces the table; a kill or a failure of power leaves the old one or the new one. Raises OSError."""
        write_whole(self.folder / TABLE, table | {"sums": SUMS}, lasts=True)
        self.kept = table["pieces"]

    def load(self, table: dict[str, Any]) -> None:
        """Restores the pieces that a table names as the newest ones."""
        self.kept = {name: Content(*content) for name, content in table["pieces"].items()}
        self.newest = dict(self.kept)
