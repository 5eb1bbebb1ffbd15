"""Reads rows from a caller's Python object instead of files: texts, records, conversations, or token ids.

They are read more than once (for their hash, to be tokenised, and again when a run is resumed), so the object has to
give the same rows each time that it is iterated over: a list, an array, or an object whose `__iter__` starts anew.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from surojax.data.arrow_files import check_names
from surojax.data.data_rows import BadRow, DataRow
from surojax.data.items import json_of
from surojax.data.values import is_missing, plain, plain_row
from surojax.errors import ConfigError

NAME = "the rows given"  # as a path of a dataset, and in messages
TOKENS = "input_ids"  # the field of a row of token ids
REPEATS = "give a list, an array, or an object whose __iter__ starts anew with the same rows"


class GivenRows:
    """The rows of a caller's iterable.

    rows: of each a str, a mapping of fields as in a file, a list of messages, or token ids: a 1-D integer array or a
    list of int. An integer array `[rows, tokens]` has a row in each row, one `[tokens]` is one row. A table of pandas,
    polars or Arrow has its rows. Raises ConfigError for anything else, and for what can be iterated over only once.
    """

    def __init__(self, rows: Iterable[Any]):
        if isinstance(rows, np.ndarray) and rows.ndim == 1 and rows.dtype.kind in "iu":
            rows = rows[None]
        self._is_table = any(hasattr(rows, name) for name in ("columns", "column_names", "to_pylist"))
        rows = _rows_of_table(rows) if self._is_table else rows
        if isinstance(rows, Mapping):
            names = ", ".join(map(str, list(rows)[:4]))
            raise ConfigError(
                f"data: expected an iterable of rows, got {type(rows).__name__} of {names}; give one of its values, "
                "such as that of 'train', or put a row in a list"
            )
        if isinstance(rows, str | bytes | set | frozenset) or not isinstance(rows, Iterable):
            raise ConfigError(f"data: expected an iterable of rows, got {type(rows).__name__}; put it in a list")
        if iter(rows) is rows:
            raise ConfigError(f"data: expected rows that can be read again, got an iterator; {REPEATS}")
        self.rows = rows

    @cached_property
    def _fingerprint(self) -> str:
        """Hashes all rows, as the `datasets` library does."""
        digest = hashlib.sha256()
        for row in self._records():
            _add(digest, row)
        return digest.hexdigest()

    def read(self) -> Iterator[DataRow | BadRow]:
        """Yields the rows. Raises ConfigError at the end if they are not those that were read first."""
        digest = hashlib.sha256()
        for row in self._records():
            _add(digest, row)
            yield row
        if digest.hexdigest() != self._fingerprint:
            raise ConfigError(f"data: expected the same rows each time they are read, got others; {REPEATS}")

    def _records(self) -> Iterator[DataRow | BadRow]:
        for number, row in enumerate(self.rows, start=1):
            where = f"{NAME}, row {number}"
            if isinstance(row, str):
                yield DataRow({"text": row}, where)
            elif isinstance(row, Mapping):
                yield DataRow(plain_row(row, drops_nulls=self._is_table), where)
            elif isinstance(row, np.ndarray) or (isinstance(row, list | tuple) and row and isinstance(row[0], int)):
                yield DataRow({TOKENS: row}, where)
            elif isinstance(row, list | tuple) and row and isinstance(row[0], Mapping):
                yield DataRow({"messages": plain(row)}, where)
            elif is_missing(row):
                yield DataRow({"text": None}, where)
            else:
                expected = "expected a str, a mapping of fields, a list of messages, or token ids"
                yield BadRow(where, f"{expected}, got {type(row).__name__}; correct or remove the row")


def _rows_of_table(table: Any) -> Any:
    """Returns the rows of a table of pandas, polars or Arrow, which are iterated over by their columns.

    A set of the `datasets` library is iterated over by its rows, and returned as it is.
    """
    if hasattr(table, "to_dicts"):  # polars
        return table.to_dicts()
    if hasattr(table, "to_pylist"):  # Arrow
        return table.to_pylist(maps_as_pydicts="strict")
    if not hasattr(table, "iterrows"):
        return table
    check_names([str(name) for name in table.columns], "data")
    return table.to_dict("records")


def _add(digest: Any, row: DataRow | BadRow) -> None:
    """Adds a row to a hash."""
    if isinstance(row, BadRow):
        digest.update(row.reason.encode())
        return
    arrays = {name: x for name, x in row.record.items() if isinstance(x, np.ndarray)}
    for name, x in arrays.items():
        digest.update(f"{name} {x.dtype} {x.shape}".encode() + x.tobytes())
    digest.update(json_of({name: x for name, x in row.record.items() if name not in arrays}) + b"\n")
