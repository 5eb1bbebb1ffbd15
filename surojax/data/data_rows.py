"""The rows that reading a dataset yields, usable or not."""

from typing import Any, NamedTuple


class DataRow(NamedTuple):
    """One record. where: its file and line (or row), for messages."""

    record: dict[str, Any]
    where: str


class BadRow(NamedTuple):
    """A row that cannot be used. reason: "expected ..., got ...; what to do", so `where: reason` is a whole message."""

    where: str
    reason: str


class BlankRow(NamedTuple):
    """A row of plain text that has none, as an empty line between paragraphs: it is left out and counted, as no fault.

    where: as of a `DataRow`.
    """

    where: str


class NotARow(ValueError):
    """Raised for a record that cannot be used; the message is the reason of a `BadRow`."""


def half_a_pair(error: UnicodeEncodeError) -> str:
    """Returns the reason to reject a row with half a surrogate pair, which UTF-8 cannot encode."""
    escape = f"\\u{ord(error.object[error.start]):04x}"
    return f"expected text, got half a surrogate pair ({escape}) in it; correct or remove the row"
