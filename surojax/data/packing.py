"""Which examples share a row of `sequence_len` tokens: best fit, planned for the whole corpus from lengths alone.

A streaming packer (grain's) decides while it reads: its open rows are part of the position in the data, and the rows
depend on where it started. Here the plan is a pure function of (lengths, sequence_len). The position in the data stays
one integer, the number of rows consumed: it does not depend on the batch size, and a resumed run reads nothing twice.
It also packs better, since it knows all lengths.

Best fit decreasing (Johnson, 1973): the examples from the longest to the shortest, each into the row whose free space
is the smallest that suffices, or into a new one. Examples of one length are placed together, so the loop runs over
distinct lengths and free spaces, of which there are at most `sequence_len`; the rest is numpy.
"""

import bisect
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Pieces(NamedTuple):
    """Contiguous spans of a corpus, each of at most a row's length.

    starts: int64 [pieces], index of the first token. lengths: int64 [pieces]. num_long: examples that were longer.
    """

    starts: np.ndarray
    lengths: np.ndarray
    num_long: int


def pieces(offsets: np.ndarray, sequence_len: int, *, on_long: str, continues: bool) -> Pieces:
    """Returns the spans of all examples that fit into rows of `sequence_len` tokens.

    offsets: int64 [examples + 1]. on_long: what becomes of a longer example, "cut" or "drop". continues: what is cut
    off continues in further pieces (text); otherwise it is lost (a conversation, whose end means little alone).
    """
    lengths = np.diff(offsets)
    starts = np.asarray(offsets[:-1])[lengths > 0]
    lengths = lengths[lengths > 0]
    is_long = lengths > sequence_len
    num_long = int(is_long.sum())
    if on_long == "drop":
        return Pieces(starts[~is_long], lengths[~is_long], num_long)
    if not continues:
        return Pieces(starts, np.minimum(lengths, sequence_len), num_long)
    counts = -(-lengths // sequence_len)
    first = np.cumsum(counts) - counts  # index of each example's first piece
    number = np.arange(counts.sum()) - np.repeat(first, counts)  # number of each piece within its example
    begins = np.repeat(starts, counts) + number * sequence_len
    left = np.repeat(lengths, counts) - number * sequence_len
    return Pieces(begins, np.minimum(left, sequence_len), num_long)


@dataclass(frozen=True, eq=False)
class Plan:
    """Rows of pieces. Row r holds the pieces `members[bounds[r] : bounds[r + 1]]`, in the order of the corpus.

    members: int64 [pieces]. bounds: int64 [rows + 1]. padding: share of positions that no piece fills.
    """

    members: np.ndarray
    bounds: np.ndarray
    padding: float

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def row(self, r: int) -> np.ndarray:
        """Returns the pieces of row r, int64."""
        return self.members[self.bounds[r] : self.bounds[r + 1]]


def one_per_row(lengths: np.ndarray, sequence_len: int) -> Plan:
    """Returns the plan in which each piece has a row to itself."""
    return _plan(np.arange(len(lengths)), lengths, sequence_len)


def best_fit(lengths: np.ndarray, sequence_len: int) -> Plan:
    """Returns the plan of best fit decreasing. lengths: int [pieces], from 1 to `sequence_len`."""
    order = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), np.int64)
    rows = _Rows(sequence_len)
    start = 0
    values, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        row_of[order[start : start + count]] = rows.place(length, count)
        start += count
    return _plan(row_of, lengths, sequence_len)


class _Rows:
    """Open rows by their free space, oldest first."""

    def __init__(self, sequence_len: int):
        self.sequence_len = sequence_len
        self.num_rows = 0
        self.spaces: list[int] = []  # free spaces that occur, ascending
        self.rows: dict[int, list[np.ndarray]] = {}  # numbers of the rows with that space

    def place(self, length: int, count: int) -> np.ndarray:
        """Places `count` pieces of one length, longest lengths first; returns the row of each, int64 [count].

        A row with the tightest space takes pieces until none fits: after each its space is smaller, so tighter still.
        """
        placed = []
        while count:
            space, rows = self._tightest(length, count)
            per_row = space // length
            chosen = np.repeat(rows, per_row)[:count]
            placed.append(chosen)
            count -= len(chosen)
            in_last = len(chosen) - per_row * (len(rows) - 1)
            self._add(space - per_row * length, rows[:-1])
            self._add(space - in_last * length, rows[-1:])
        return np.concatenate(placed)

    def _tightest(self, length: int, count: int) -> tuple[int, np.ndarray]:
        """Removes and returns as many rows as `count` pieces need of those with the smallest space that suffices."""
        i = bisect.bisect_left(self.spaces, length)
        if i == len(self.spaces):
            opened = math.ceil(count / (self.sequence_len // length))
            self.num_rows += opened
            return self.sequence_len, np.arange(self.num_rows - opened, self.num_rows)
        space = self.spaces.pop(i)
        rows = np.concatenate(self.rows.pop(space))
        needed = math.ceil(count / (space // length))
        self._add(space, rows[needed:])
        return space, rows[:needed]

    def _add(self, space: int, rows: np.ndarray) -> None:
        if not space or not len(rows):
            return
        if space not in self.rows:
            bisect.insort(self.spaces, space)
            self.rows[space] = []
        self.rows[space].append(rows)


def _plan(row_of: np.ndarray, lengths: np.ndarray, sequence_len: int) -> Plan:
    """row_of: the row of each piece; rows are numbered from 0 without gaps."""
    counts = np.bincount(row_of)
    bounds = np.concatenate([[0], np.cumsum(counts)])
    size = len(counts) * sequence_len
    padding = 1 - int(lengths.sum()) / size if size else 0.0
    return Plan(np.argsort(row_of, kind="stable"), bounds, padding)
