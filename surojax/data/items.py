"""Items that examples are made from; a hash of each item decides whether it is held out for evaluation.

The split is therefore equal on every machine and in every run, adding an example does not change the side of another
one, and all copies of an example are on one side.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from surojax.data.data_rows import BadRow, BlankRow

LEAST = 10  # items held out, or a tenth of all if that is less


class Item[T](NamedTuple):
    """A row or text to encode, or a row that cannot be used. key: 64-bit hash, 0 if nothing is held out.

    num_bytes: its length in UTF-8, of what is not text about that in a file.
    """

    content: T | BadRow
    key: int
    num_bytes: int


class Source(NamedTuple):
    """A source of items.

    key: all that the items depend on besides the content of the files, as JSON. items: yields them; its argument says
    whether their keys are needed. name; what: an item is called; instead: the setting that names other data to evaluate
    on; other_splits: splits of its folders that are not read: for messages.
    """

    name: str
    files: list[Path]
    key: dict[str, Any]
    items: Callable[[bool], Iterator[Item | BlankRow]]
    what: str
    instead: str
    other_splits: list[str]


class Unit[U](NamedTuple):
    """A text that is encoded in one call: an item, or a piece of a long item.

    content: for the encoder. num_bytes: as of an item. is_last: of its item.
    """

    content: U | BadRow
    num_bytes: int
    is_last: bool


def hold_out[T](
    items: Iterable[Item[T]], fraction: float, split: Callable[[Item[T]], tuple[Item[T], Item[T]] | None]
) -> Iterator[tuple[Item[T], bool]]:
    """Yields (item, whether it is held out: its key is below `fraction` * 2^64).

    If fewer than `LEAST` items and less than a tenth of all have such a key, those with the smallest keys are held out
    too, with their copies, up to the smaller number of both. If there is only one item, it is split and its end is held
    out. split: returns both parts, or None: then nothing is held out. A `BadRow`, which is no item to evaluate on, is
    passed on.
    """
    items = iter(items)
    first: list[Item[T]] = []
    for item in items:
        if isinstance(item.content, BadRow):
            yield item, False
        else:
            first.append(item)
        if len(first) == 2:
            break
    if len(first) == 1:
        yield from zip(split(first[0]) or first, (False, True), strict=False)
        return
    threshold = int(fraction * 2**64)
    count = held_out = 0
    smallest: dict[int, list[Item[T]]] = {}  # by key, in its order: not yielded before the number of items is known
    for item in chain(first, items):
        is_bad = isinstance(item.content, BadRow)
        count += not is_bad
        if is_bad or held_out >= LEAST or item.key < threshold:
            is_below = not is_bad and item.key < threshold
            held_out += is_below
            yield item, is_below
            continue
        smallest.setdefault(item.key, []).append(item)
        if len(smallest) > LEAST - held_out:
            yield from ((other, False) for other in smallest.pop(max(smallest)))
    needed = min(LEAST, math.ceil(count / 10))
    for key in sorted(smallest):
        fits = held_out < needed and (not held_out or held_out + len(smallest[key]) <= 2 * needed)
        held_out += fits * len(smallest[key])
        yield from ((item, fits) for item in smallest[key])


def new_hash(content: bytes = b"") -> hashlib.blake2b:
    """Starts an item's hash with `content`; the caller may add more before `item_key`."""
    return hashlib.blake2b(content, digest_size=8)


def item_key(digest: hashlib.blake2b) -> int:
    """Converts an item's finished hash to its key, an integer below 2^64."""
    return int.from_bytes(digest.digest(), "big")


def key_of_bad(row: BadRow) -> int:
    """Returns the key of a row that cannot be read."""
    return item_key(new_hash(row.reason.encode("utf-8", "backslashreplace")))


def json_of(record: Mapping[str, Any]) -> bytes:
    """Returns the JSON text of a record, from which the record's key is hashed."""
    return json.dumps(record, sort_keys=True, default=_plain).encode("utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    """Converts a value for JSON: an array to lists, since its text would omit numbers, anything else to a text."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
