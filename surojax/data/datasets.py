"""Datasets: what an entry of `datasets` says, and the rows of its files.

A row is a record of named fields, with the place it comes from for messages. A row that cannot be read is a `BadRow`,
in its place among the others: whether it ends the run or is counted is the caller's decision. What makes a whole
dataset unusable (a path that does not exist, a damaged Parquet file) is a ConfigError.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

TYPES = ("auto", "text", "instruction", "conversation")


class Row(NamedTuple):
    """One record. where: its file and line (or row), for messages."""

    record: dict[str, Any]
    where: str


class BadRow(NamedTuple):
    """A row that cannot be used. reason: "expected ..., got ...; what to do", so `where: reason` is a whole message."""

    where: str
    reason: str


@dataclass(frozen=True)
class Dataset:
    """One entry of `datasets`. Settings that end in `_field` name the fields of its rows.

    path: files, folders, globs, or one name of a set that the `datasets` library finds.
    type: what a row is, one of TYPES; "auto": the fields of the first row decide.
    split, subset: of a set that the `datasets` library finds; "": its training split, its only configuration.
    samples: number of rows to read, from the first on; 0: all.
    weight: relative share in a mixture of datasets.
    prompt_field, completion_field: of an instruction; if a row has no such prompt, instruction_field, input_field (may
      be missing or empty) and output_field are read.
    messages_field: of a conversation; "": "messages", else "conversations".
    role_field, content_field: of a message; "": "role", else "from"; "content", else "value".
    system_field: system prompt of an instruction or conversation; may be missing.
    tools_field: tools that a conversation's system prompt describes; may be missing.
    system_prompt: for rows without one of their own; "": none.
    """

    path: tuple[str, ...]
    type: str = "auto"
    split: str = ""
    subset: str = ""
    samples: int = 0
    weight: float = 1.0
    text_field: str = "text"
    prompt_field: str = "prompt"
    completion_field: str = "completion"
    instruction_field: str = "instruction"
    input_field: str = "input"
    output_field: str = "output"
    messages_field: str = ""
    role_field: str = ""
    content_field: str = ""
    system_field: str = "system"
    tools_field: str = "tools"
    system_prompt: str = ""


def parse(entry: Mapping[str, Any]) -> Dataset:
    """Returns the Dataset of an entry of `datasets`. Raises ConfigError for unknown fields or values."""
    raise NotImplementedError


def resolve(dataset: Dataset) -> Dataset:
    """Returns the dataset with its type decided, by its first row if it is "auto". Raises ConfigError if it is not."""
    raise NotImplementedError


def read(dataset: Dataset) -> Iterator[Row | BadRow]:
    """Yields the rows, file by file. Raises ConfigError if files are missing or unreadable, or there is no row."""
    raise NotImplementedError
