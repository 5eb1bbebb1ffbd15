"""Packs examples into rows of `sequence_len` tokens by best fit, planned for the whole corpus from lengths alone.

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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_BLOCK = 1 << 18  # examples or pieces at a time, so that of all of them there are only results


class Pieces(NamedTuple):
    """Contiguous spans of a corpus, each of at most a row's length.

    starts: int64 [pieces], index of the first token. lengths: int32 [pieces]. num_long: examples that were longer.
    num_examples: those that the pieces are of.
    """

    starts: np.ndarray
    lengths: np.ndarray
    num_long: int
    num_examples: int


def row_pieces(offsets: np.ndarray, sequence_len: int, *, on_long: str, continues: bool) -> Pieces:
    """Returns the spans of all examples that fit into rows of `sequence_len` tokens.

    offsets: int64 [examples + 1]. on_long: what becomes of a longer example, "cut" or "drop". continues: what is cut
    off continues in further pieces (text); otherwise it is lost (a conversation, whose end means little alone).
    """
    num_pieces = sum(int(_counts(lengths, sequence_len, on_long, continues).sum()) for _, lengths in _blocks(offsets))
    starts = np.empty(num_pieces, np.int64)
    lengths = np.empty(num_pieces, np.int32)
    num_long = 0
    num_examples = 0
    done = 0
    for starts_of, lengths_of in _blocks(offsets):
        counts = _counts(lengths_of, sequence_len, on_long, continues)
        first = np.cumsum(counts) - counts  # index of each example's first piece
        number = np.arange(counts.sum()) - np.repeat(first, counts)  # number of each piece within its example
        here = slice(done, done + len(number))
        starts[here] = np.repeat(starts_of, counts) + number * sequence_len
        lengths[here] = np.minimum(np.repeat(lengths_of, counts) - number * sequence_len, sequence_len)
        num_long += int((lengths_of > sequence_len).sum())
        num_examples += int((counts > 0).sum())
        done = here.stop
    return Pieces(starts, lengths, num_long, num_examples)


def _blocks(offsets: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (starts, lengths) of a corpus' examples, block by block."""
    for start in range(0, len(offsets) - 1, _BLOCK):
        block = offsets[start : start + _BLOCK + 1]
        yield block[:-1], np.diff(block)


def _counts(lengths: np.ndarray, sequence_len: int, on_long: str, continues: bool) -> np.ndarray:
    """Returns the number of pieces into which each example is cut, see `row_pieces`."""
    if on_long == "drop":
        return ((lengths > 0) & (lengths <= sequence_len)).astype(np.int64)
    if not continues:
        return (lengths > 0).astype(np.int64)
    return -(-lengths // sequence_len)


@dataclass(frozen=True, eq=False)
class PackingPlan:
    """Rows of pieces. Row r holds the pieces `members[bounds[r] : bounds[r + 1]]`, in the order of the corpus.

    members: int32 [pieces]. bounds: int32 [rows + 1].
    """

    members: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def row(self, r: int) -> np.ndarray:
        """Returns the pieces of row r, int32."""
        return self.members[self.bounds[r] : self.bounds[r + 1]]


def one_per_row(lengths: np.ndarray, sequence_len: int) -> PackingPlan:
    """Returns the plan in which each piece has a row to itself. Arguments as of `best_fit`."""
    return _plan(np.arange(len(lengths), dtype=np.int32), len(lengths))


def best_fit(lengths: np.ndarray, sequence_len: int) -> PackingPlan:
    """Returns the plan of best fit decreasing. lengths: int [pieces], from 1 to `sequence_len`."""
    counts = _count(lengths, sequence_len + 1)
    by_length = _stable_order(lengths, counts)
    row_of = np.empty(len(lengths), np.int32)
    rows = _Rows(sequence_len)
    ends = np.cumsum(counts)
    for length in np.flatnonzero(counts)[::-1].tolist():
        placed = by_length[ends[length] - counts[length] : ends[length]]
        row_of[placed] = rows.place(length, len(placed))
    del by_length, placed
    return _plan(row_of, rows.num_rows)


class _Rows:
    """Open rows by their free space, oldest first."""

    def __init__(self, sequence_len: int):
        self.sequence_len = sequence_len
        self.num_rows = 0
        self.spaces: list[int] = []  # free spaces that occur, ascending
        self.rows: dict[int, list[np.ndarray]] = {}  # numbers of the rows with that space

    def place(self, length: int, count: int) -> np.ndarray:
        """Places `count` pieces of one length, longest lengths first; returns the row of each, int32 [count].

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
        """Removes and returns the rows with the smallest sufficient space, enough for `count` pieces."""
        i = bisect.bisect_left(self.spaces, length)
        if i == len(self.spaces):
            opened = math.ceil(count / (self.sequence_len // length))
            self.num_rows += opened
            return self.sequence_len, np.arange(self.num_rows - opened, self.num_rows, dtype=np.int32)
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


def _plan(row_of: np.ndarray, num_rows: int) -> PackingPlan:
    """Returns the plan with piece i in row row_of[i]; rows are numbered from 0 without gaps."""
    counts = _count(row_of, num_rows)
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return PackingPlan(_stable_order(row_of, counts), bounds)


def _count(keys: np.ndarray, num_keys: int) -> np.ndarray:
    """Returns how often each key occurs. `bincount` of all keys at once would make int64 of them."""
    counts = np.zeros(num_keys, np.int64)
    for start in range(0, len(keys), _BLOCK):
        counts += np.bincount(keys[start : start + _BLOCK], minlength=num_keys)
    return counts


def _stable_order(keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns `argsort(keys, kind="stable")` as int32, by counting. counts: how often each key is there."""
    order = np.empty(len(keys), np.int32)
    free = np.cumsum(counts) - counts  # where the next of each key goes
    for start in range(0, len(keys), _BLOCK):
        block = keys[start : start + _BLOCK]
        within = np.argsort(block, kind="stable")
        ascending = block[within]
        is_first = np.append(True, ascending[1:] != ascending[:-1])
        first = np.flatnonzero(is_first)
        lengths = np.diff(np.append(first, len(block)))
        number = np.arange(len(block)) - np.repeat(first, lengths)  # of each among the same keys of this block
        order[free[ascending] + number] = start + within
        free[ascending[first]] += lengths
    return order
