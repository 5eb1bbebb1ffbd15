"""Writes an entry of the cache: two threads encode groups of items, while this thread reads and writes.

A Hugging Face tokenizer uses all cores within a group; while one group's ids become an array, the other is encoded. At
most four groups are in memory.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from tqdm import tqdm

from surojax.data.cache import NO_ROOM, NoRoom, PartWriter
from surojax.data.data_rows import BadRow, BlankRow
from surojax.data.entries import HELD_OUT, TRAIN
from surojax.data.examples import Example
from surojax.data.items import Item, Source, Unit, hold_out
from surojax.errors import ConfigError
from surojax.resources import cores

# Long texts are encoded in pieces (`texts.PIECE_CHARS`), one core each, and two groups at a time: a group has pieces
# for half of the cores, half a MiB and 2,048 units for each core.
_GROUP_BYTES = cores() << 19
_GROUP_UNITS = cores() << 11  # a tokenizer takes a quarter longer for each of 15,000 short texts at a time
# What an entry's meta data say of rows that were left out: how many, and where the first one is.
LEFT_OUT = ("skipped", "first_skipped", "blank", "first_blank")
_ENCODING = 2  # groups that are encoded at a time


class ItemEncoder[T, U](Protocol):
    """Makes examples from items: the interface of `documents.TextEncoder` and `examples.Encoder`.

    is_text: items are plain text, whose bytes are counted. fingerprint: of all that tokens depend on besides items.
    """

    @property
    def is_text(self) -> bool: ...

    @property
    def fingerprint(self) -> str: ...

    def split(self, item: Item[T]) -> tuple[Item[T], Item[T]] | None:
        """Splits a source's only item into its beginning and its end, see `hold_out`; None if it cannot be split."""
        ...

    def units(self, item: Item[T]) -> Iterable[Unit[U]]:
        """Splits an item into the parts that are encoded separately; together they make one example."""
        ...

    def encode(self, units: list[U | BadRow], /) -> Sequence[Example | BadRow]:
        """Returns for each unit its example, or a `BadRow` with the reason why there is none."""
        ...


class _Marked(NamedTuple):
    """A unit with its item, and whether the item is held out for evaluation."""

    unit: Unit
    item: Item
    is_held_out: bool


def write_entry(
    folder: Path,
    *,
    source: Source,
    encoder: ItemEncoder,
    vocab_size: int,
    fraction: float,
    on_bad_row: str,
    source_bytes: int,
) -> dict[str, Any]:
    """Encodes the items of a source into `folder`; returns the meta data.

    fraction: of the items that are held out. on_bad_row: see `prepare.load_dataset`. source_bytes: of all files.

    Raises ConfigError if no item remains, or none to train on or to evaluate on.
    """
    without = _LeftOut(on_bad_row)
    items = without.others(source.items(fraction > 0))
    marked = hold_out(items, fraction, encoder.split) if fraction else ((item, False) for item in items)
    numbers = {False: 0, True: 0} if fraction else {False: 0}  # units of each part, by whether it is held out
    with _Parts(folder, vocab_size, name=source.name, holds_out=bool(fraction), source_bytes=source_bytes) as parts:
        for group, encoded in _in_threads(_groups(marked, encoder), encoder):
            good: list[tuple[_Marked, Example]] = []
            for unit, example in zip(group, encoded, strict=True):
                if isinstance(example, BadRow):
                    without.skip(example)
                else:
                    good.append((unit, example))
            for is_held_out in numbers:
                of_part = [x for x in good if x[0].is_held_out == is_held_out]
                numbers[is_held_out] += len(of_part)
                parts.append(is_held_out, of_part, encoder.is_text)
            parts.bytes_read += sum(member.unit.num_bytes for member in group)
        parts_meta = parts.finish()
    skipped = str(without)
    if not any(numbers.values()):
        fate = f", {skipped}; correct them" if without.skipped or without.blank else "; add some, or name other data"
        raise ConfigError(f"{source.name}: expected {source.what} that can be used, got none{fate}")
    if not all(numbers.values()):
        raise ConfigError(
            f"{source.name}: expected at least two different {source.what} that can be used, to train on one part and "
            f"evaluate on the other, got {numbers[False]:,} to train on and {numbers[True]:,} to evaluate on, "
            f"{skipped}; add or correct {source.what}, or set {source.instead}"
        )
    return {"parts": parts_meta, **{name: getattr(without, name) for name in LEFT_OUT}}


class _LeftOut:
    """Counts the rows that are left out. Attributes: LEFT_OUT.

    on_bad_row: "error" raises ConfigError for the first row that cannot be used.
    """

    def __init__(self, on_bad_row: str):
        self.ends = on_bad_row == "error"
        self.skipped = self.blank = 0
        self.first_skipped = self.first_blank = ""

    def others(self, items: Iterable[Item | BlankRow]) -> Iterator[Item]:
        """Yields the items that are not blank."""
        for item in items:
            if isinstance(item, BlankRow):
                self.blank += 1
                self.first_blank = self.first_blank or item.where
            else:
                yield item

    def skip(self, row: BadRow) -> None:
        """Counts a row that cannot be used."""
        if self.ends:
            raise ConfigError(f"{row.where}: {row.reason}")
        self.skipped += 1
        self.first_skipped = self.first_skipped or f"{row.where}: {row.reason}"

    def __str__(self) -> str:
        text = f"{self.skipped:,} skipped" + (f" ({self.first_skipped})" if self.first_skipped else "")
        return text + (f", {self.blank:,} without text ({self.first_blank})" if self.blank else "")


class _Parts:
    """Writers for the parts of an entry, with a progress bar on a terminal. A context manager."""

    def __init__(self, folder: Path, vocab_size: int, *, name: str, holds_out: bool, source_bytes: int):
        dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
        names = (TRAIN, HELD_OUT) if holds_out else (TRAIN,)
        self.source_bytes = source_bytes
        self.bytes_read = 0
        self.parts = {part: PartWriter(folder / part, dtype) for part in names}
        self.bar = tqdm(desc=f"tokenising {name}", unit=" tokens", unit_scale=True, leave=False, disable=None)

    def __enter__(self) -> "_Parts":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.bar.close()
        for part in self.parts.values():
            part.close()
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise NoRoom(error, self._needed()) from error

    def append(self, is_held_out: bool, examples: "list[tuple[_Marked, Example]]", is_text: bool) -> None:
        """Appends encoded units to a part in one call: a call for each would take as long as the tokenizer."""
        if not examples:
            return
        ids = np.concatenate([example.ids for _, example in examples])
        trained = None
        if any(example.trained is not None for _, example in examples):
            trained = np.concatenate([_trained(example) for _, example in examples])
        ends = np.cumsum([len(example.ids) for _, example in examples])
        is_last = np.array([marked.unit.is_last for marked, _ in examples])
        num_bytes = sum(marked.item.num_bytes for marked, _ in examples if marked.unit.is_last) if is_text else 0
        part = self.parts[HELD_OUT if is_held_out else TRAIN]
        within = [
            np.array(example.ends) + end - len(example.ids)
            for (_, example), end in zip(examples, ends, strict=True)
            if example.ends
        ]
        names = examples[0][1].numbers
        numbers = {name: np.concatenate([example.numbers[name] for _, example in examples]) for name in names}
        all_ends = np.sort(np.concatenate([ends[is_last], *within]))
        part.append(ids, trained, ends=all_ends, num_bytes=num_bytes, numbers=numbers)
        self.bar.update(len(ids))

    def finish(self) -> dict[str, Any]:
        """Completes all files; returns the parts' meta data."""
        return {name: part.finish() for name, part in self.parts.items()}

    def _needed(self) -> str:
        """Estimates the entry's size in words, from the share of the source that was read before the disk was full."""
        written = sum(part.num_bytes_written for part in self.parts.values())
        share = min(self.bytes_read / self.source_bytes, 1.0) if self.source_bytes else 0.0
        return f"about {written / share / 2**20:,.1f} MiB" if share else "more room"


def _trained(example: Example) -> np.ndarray:
    return np.ones(len(example.ids), np.bool_) if example.trained is None else example.trained


def _groups(marked: Iterable[tuple[Item, bool]], encoder: ItemEncoder) -> Iterator[list[_Marked]]:
    """Collects consecutive units into groups of _GROUP_BYTES bytes or _GROUP_UNITS units; the last is smaller."""
    group: list[_Marked] = []
    total = 0
    for item, is_held_out in marked:
        for unit in encoder.units(item):
            group.append(_Marked(unit, item, is_held_out))
            total += unit.num_bytes
            if total >= _GROUP_BYTES or len(group) == _GROUP_UNITS:
                yield group
                group = []
                total = 0
    if group:
        yield group


def _in_threads(
    groups: Iterable[list[_Marked]], encoder: ItemEncoder
) -> Iterator[tuple[list[_Marked], Sequence[Example | BadRow]]]:
    """Yields each group with its encoded examples, in order; the next groups are encoded meanwhile."""
    with ThreadPoolExecutor(_ENCODING) as threads:
        pending: deque[tuple[list[_Marked], Future[Sequence[Example | BadRow]]]] = deque()
        try:
            for group in groups:
                pending.append((group, threads.submit(encoder.encode, [member.unit.content for member in group])))
                if len(pending) > _ENCODING:
                    first, encoded = pending.popleft()
                    yield first, encoded.result()
            while pending:
                first, encoded = pending.popleft()
                yield first, encoded.result()
        finally:
            for _, encoded in pending:
                encoded.cancel()
