"""Where the layers and tables of a run are that it stores: in its file, in one slot or two, or in host memory.

    record of layer 0: array 0, array 1, ...    record of layer 1: ...    pieces of table 0: ...    others

All arrays of a layer are one record, so that a layer is read as a whole; layers of one segment of the model have
records of equal size. A piece of a table is handled as a layer is (in_file.py). Some bytes may stay in host memory: the
first ones of each array, of as many arrays as there is memory for, and of all layers alike, so that the disks have as
much to do in each layer of a pass. Rows of the placement table that a kill must not take (`IN_SLOTS`) have twice the
room with two slots, and none in host memory.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from surojax.memory.aligned import ALIGN, aligned
from surojax.offloads import IN_SLOTS, TO_FILES

MEASURED = 256 << 20  # bytes after which the rate of a disk is known


@dataclasses.dataclass(eq=False)
class Place:
    """The room for one array of each layer, or of each piece of a table.

    row: of the placement table. size: bytes. name: unique among arrays of layers, or of pieces. records: the index of
    each layer of a segment, or piece, of which the file has room. first: number of the segment's first layer. slots: 2
    if a kill must not take it. kept: the number of leading bytes that are in host memory. offset: position in the file
    of the other bytes of index 0. stride: from there to the next index. memory: the kept bytes of each layer or piece.
    """

    row: str
    size: int
    name: str
    records: dict[int, int]
    first: int = 0
    slots: int = 1
    kept: int = 0
    offset: int = 0
    stride: int = 0
    memory: dict[int, np.ndarray] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def in_file(self) -> int:
        """Bytes of a layer that are in the file."""
        return self.size - self.kept

    @property
    def slot_bytes(self) -> int:
        """Bytes of a record from one slot to the next."""
        return aligned(self.in_file)

    def begin(self, l: int) -> int:
        """Offset in the file of layer or piece l, of its first slot. Raises IndexError."""
        if l not in self.records:
            raise IndexError(f"layer: expected one of {list(self.records)}, got {l}")
        return self.offset + self.records[l] * self.stride


class Places:
    """The places of all arrays of a store.

    of_layers: of arrays of each layer; of_pieces: of each piece of a table; others: of arrays that are in memory, kept
    in the file for a start after a kill. layers: numbers of those that have a record. record_bytes: of a layer of each
    segment, by the number of its first layer.
    """

    def __init__(self, layers: Iterable[int], *, in_memory: int, slots: int):
        """layers: those that have a record. in_memory: bytes that stay in host memory. slots: of rows in slots."""
        self.layers = list(layers)
        self.record_bytes: dict[int, int] = {}
        self.of_layers: list[Place] = []
        self.of_pieces: list[Place] = []
        self.others: list[Place] = []
        self.end = 0  # bytes of the file that are for arrays
        self._in_memory = in_memory
        self._slots = slots

    def reserve(self, size: int, row: str, segment: range | None = None) -> Place:
        """Reserves `size` bytes of each layer for an array of this row, before anything is written.

        segment: the numbers of the layers that have the array; None: all have it.
        """
        own = [l for l in self.layers if segment is None or l in segment]
        first = segment.start if segment else 0
        self.of_layers.append(
            self._place(size, row, f"{len(self.of_layers)}", {l - first: i for i, l in enumerate(own)}, first)
        )
        self._arrange()
        return self.of_layers[-1]

    def reserve_pieces(self, size: int, row: str, pieces: int) -> Place:
        """Reserves `size` bytes for each of so many pieces of a table."""
        name = f"table-{len(self.of_pieces)}"
        self.of_pieces.append(self._place(size, row, name, {k: k for k in range(pieces)}))
        self._arrange()
        return self.of_pieces[-1]

    def _place(self, size: int, row: str, name: str, records: dict[int, int], first: int = 0) -> Place:
        return Place(row, size, name, records, first, self._slots if row in IN_SLOTS else 1)

    def reserve_others(self, sizes: Iterable[int]) -> None:
        """Reserves two slots of so many bytes each for arrays that are in memory, behind all others."""
        self.others = [Place("outer", size, f"other-{i}", {0: 0}, slots=2) for i, size in enumerate(sizes)]
        self._arrange()

    def _arrange(self) -> None:
        """Decides what stays in memory, and where in the file everything else is."""
        left = self._in_memory
        of_state = [*self.of_layers, *self.of_pieces]
        for place in sorted(of_state, key=lambda place: TO_FILES.index(place.row), reverse=True):
            wanted = place.size if place.slots == 1 else 0
            of_each = left // max(1, len(place.records))
            place.kept = wanted if wanted <= of_each else of_each // ALIGN * ALIGN
            left -= place.kept * len(place.records)
        offset = 0
        for first in dict.fromkeys(place.first for place in self.of_layers):
            places = [place for place in self.of_layers if place.first == first]
            stride = self.record_bytes[first] = sum(place.slots * place.slot_bytes for place in places)
            begin = offset
            for place in places:
                place.offset, place.stride = begin, stride
                begin += place.slots * place.slot_bytes
            offset += len(places[0].records) * stride
        for place in (*self.of_pieces, *self.others):
            place.offset, place.stride = offset, place.slots * place.slot_bytes
            offset += len(place.records) * place.stride
        self.end = offset

    @property
    def all(self) -> list[Place]:
        """Room for whatever there is."""
        return [*self.of_layers, *self.of_pieces, *self.others]

    @property
    def is_empty(self) -> bool:
        """True if nothing is stored: there is no file then."""
        return not self.of_layers and not self.of_pieces

    @property
    def kept(self) -> int:
        """Bytes that stay in host memory."""
        return sum(len(place.records) * place.kept for place in self.all)

    @property
    def bytes(self) -> int:
        """Size of the file. With two slots its end is for measuring the disk, which must not change the others."""
        return self.end + (min(MEASURED, self.end) if self._slots == 2 else 0)

    @property
    def written(self) -> int:
        """Bytes of the file that a step replaces: of one slot."""
        return self.end - sum(len(place.records) * place.slot_bytes for place in self.all if place.slots == 2)

    @property
    def unused(self) -> tuple[int, int]:
        """(offset, bytes) of a part of the file that may be overwritten before a state is in it."""
        return (self.end, self.bytes - self.end) if self._slots == 2 else (0, self.bytes)

    @property
    def layout(self) -> list:
        """Sizes and places of all arrays."""
        places = [[place.row, place.size, place.slots, place.kept, len(place.records)] for place in self.all]
        return [self.layers, places]
