"""Converts values that tables and other libraries hold to those that JSON has, so that a row means the same in each."""

import datetime
import decimal
import sys
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np


def plain(value: Any, *, drops_nulls: bool = False) -> Any:
    """Converts a value, and those in it, to None, bool, int, float, str, list and dict, where they stand for such.

    What JSON has nothing for stays as it is. drops_nulls: of mappings, as Arrow adds a null for each field that only
    other rows have.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, Mapping):
        pairs = ((name, x) for name, x in value.items() if not (drops_nulls and x is None))
        return {str(name): plain(x, drops_nulls=drops_nulls) for name, x in pairs}
    if isinstance(value, list | tuple):
        return [plain(x, drops_nulls=drops_nulls) for x in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist(), drops_nulls=drops_nulls)
    return plain_scalar(value)


def plain_row(row: Mapping[str, Any], *, drops_nulls: bool) -> dict[str, Any]:
    """Converts the values of a row; an array of numbers, such as token ids, stays one.

    drops_nulls: see `plain`; of the objects in the row, not of the row itself, as in a file.
    """
    return {str(name): x if _has_numbers(x) else plain(x, drops_nulls=drops_nulls) for name, x in row.items()}


def _has_numbers(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "iuf"


def plain_scalar(value: Any) -> Any:
    """Converts a single value, see `plain`: a date to ISO 8601's text, bytes that are UTF-8 to text."""
    if isinstance(value, np.generic):
        item = value.item()
        return item if isinstance(item, np.generic) else plain_scalar(item)
    if is_missing(value):
        return None
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return value
    if isinstance(value, decimal.Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    return str(value) if isinstance(value, datetime.timedelta | uuid.UUID) else value


def number_of(value: Any) -> int | float | None:
    """Returns the number that a value is, or that it is the text of; None if it is none. True and false are 1 and 0."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        text = value.strip().lower()
        try:
            return float(text) if text not in ("true", "false") else int(text == "true")
        except ValueError:
            return None
    return value if isinstance(value, bool | int | float) else None


def array_of(values: Any) -> np.ndarray | None:
    """Converts a list of numbers to an array; None if it is ragged, has numbers beyond 64 bits, or bools among numbers.

    NumPy alone would convert such bools to 0 and 1.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):
        return None
    if array.dtype == np.bool_ or isinstance(values, np.ndarray):
        return array
    return None if _has_bool(values) else array


def _has_bool(values: Any) -> bool:
    """Returns True if there is a bool in nested lists."""
    if isinstance(values, list | tuple):
        kinds = set(map(type, values))
        return bool(kinds - {int, float}) and any(map(_has_bool, values))
    return isinstance(values, bool | np.bool_)


def texts_in(value: Any) -> list[str]:
    """Returns the texts in nested lists and objects."""
    if isinstance(value, Mapping | list):
        return [text for part in (value.values() if isinstance(value, Mapping) else value) for text in texts_in(part)]
    return [value] if isinstance(value, str) else []


def is_missing(value: Any) -> bool:
    """Returns True for what stands for no value: None, and pandas' NaN, NA and NaT."""
    if value is None or (isinstance(value, float) and value != value):
        return True
    pandas = sys.modules.get("pandas")  # not among surojax's dependencies
    return pandas is not None and (value is pandas.NA or value is pandas.NaT)
