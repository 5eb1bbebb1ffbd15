"""What the reading of a dataset yields: rows, and rows that cannot be used."""

from typing import Any, NamedTuple


class Row(NamedTuple):
    """One record. where: its file and line (or row), for messages."""

    record: dict[str, Any]
    where: str


class BadRow(NamedTuple):
    """A row that cannot be used. reason: "expected ..., got ...; what to do", so `where: reason` is a whole message."""

    where: str
    reason: str


class NotARow(ValueError):
    """A record cannot be used; the message is the reason of a `BadRow`."""
