"""Two slots for what a kill must not take: the state of a run, as it was after its last complete update.

    <nvme_path>/state.json     the table: progress of the run, and for each piece its slot and its checksum

A piece is an array of a layer, or of rows of embedding or head, or a shard of what is in memory. An update reads one
slot of it and writes the other. Once all of it is on the disk, the table is written beside the old one, forced to the
disk and renamed. So the table always names pieces of one step, which nothing overwrites before the next table is there:
a run that is killed at any moment goes on from that step.

**Checksum.** CRC-32 of 4096 bytes: the sums, as 64-bit words, of all blocks of 4096 bytes. It notices any change within
one block, so a write that was lost or torn; it does not notice blocks of one piece that changed places. CRC-32 of all
bytes takes 0.72 CPU seconds a GB with zlib, this 0.15 (2 cores), as much as the file access itself may take.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from surojax.memory.aligned import ALIGN

TABLE = "state.json"


class Content(NamedTuple):
    """The newest content of a piece: the slot that it is in, 0 or 1, and its checksum."""

    slot: int
    checksum: int


def checksum(raw: np.ndarray) -> int:
    """The checksum of an array of bytes, see above."""
    whole = raw.size // ALIGN * ALIGN
    sums = raw[:whole].view(np.uint64).reshape(-1, ALIGN // 8).sum(0, dtype=np.uint64)
    return zlib.crc32(raw[whole:].tobytes(), zlib.crc32(sums.tobytes()))


def read_slot_table(folder: Path) -> dict[str, Any] | None:
    """The table in the folder of a file: {"layout", "progress", "pieces"}; None if there is none that can be read."""
    try:
        table = json.loads((folder / TABLE).read_text())
        return table if int(table["progress"]["step"]) > 0 and table["pieces"] and table["layout"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
        new = self.folder / f"{TABLE}.new"
        with new.open("w") as file:
            json.dump(table, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.folder / TABLE)
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        self.kept = table["pieces"]

    def load(self, table: dict[str, Any]) -> None:
        """Restores the pieces that a table names as the newest ones."""
        self.kept = {name: Content(*content) for name, content in table["pieces"].items()}
        self.newest = dict(self.kept)
