"""Reads rows from a file, by its format, or from a set that the `datasets` library finds.

A row that is broken on its own (a line that is no JSON, a byte that is no text) is a `BadRow`, and the next one is
read. A file whose further rows cannot be found (a damaged Parquet file) is a ConfigError.
"""

import csv
import importlib
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from surojax.data.arrow_files import LONGEST, SHORT, SPLIT, check_names, read_arrow, read_parquet
from surojax.data.data_rows import BadRow, DataRow
from surojax.data.decompression import format_of, open_bytes
from surojax.data.files import NotText, decode_utf8, unreadable
from surojax.data.given import GivenRows
from surojax.data.texts import READ, open_text, text_parts
from surojax.data.values import plain_row
from surojax.errors import ConfigError, shown
from surojax.untrusted import RepeatedKey, parse_first, parse_json

_WORD = 16  # characters, more than the longest word or escape of JSON has
_SPACE = re.compile(r"[ \t\n\r]*")  # between the values of a JSON list
INDEX = "Unnamed: 0"  # pandas' name of the index, which it writes into CSV as a first column without a name
_NO_OBJECT = "expected a JSON object with the fields of a row"


def read_file(path: Path, text_field: str) -> Iterator[DataRow | BadRow]:
    """Yields the rows of a file in one of the formats of SUFFIXES, see `format_of`.

    text_field: names the one field of a .txt file's row, a `TextFile`, which is read by who needs it.
    Raises ConfigError if the file cannot be read to its end.
    """
    suffix = format_of(path)
    try:
        yield from [DataRow({text_field: open_text(path)}, str(path))] if suffix == ".txt" else _READERS[suffix](path)
    except OSError as error:
        raise unreadable(path, error) from None


def _read_jsonl(path: Path) -> Iterator[DataRow | BadRow]:
    """Yields a row for each line that is not blank. Holds one line at a time."""
    offset = number = 0
    with open_bytes(path) as lines:
        while line := lines.readline(LONGEST + 1):
            number += 1
            where = f"{path}:{number}"
            if len(line) > LONGEST:
                yield BadRow(where, f"expected {SHORT}, got a longer line; {SPLIT}")
                while not line.endswith(b"\n") and (more := lines.readline(LONGEST)):
                    offset += len(line)
                    line = more
            elif not line.isspace():
                yield _parse_line(line, where, offset)
            offset += len(line)


def _parse_line(line: bytes, where: str, offset: int) -> DataRow | BadRow:
    try:
        # Files that were joined have the mark of each of them.
        return _row_of(parse_json(decode_utf8(line, offset).removeprefix("\ufeff")), where)
    except NotText as error:
        return BadRow(where, str(error))
    except RepeatedKey as error:
        return _row_of(error, where)
    except ValueError as error:
        is_longer = isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc.rstrip())
        advice = "write each object on one line" if is_longer else "correct or remove the line"
        return BadRow(where, f"{_NO_OBJECT}, got a line that is no JSON ({error}); {advice}")


def _row_of(record: Any, where: str) -> DataRow | BadRow:
    if isinstance(record, dict):
        return DataRow(record, where)
    if isinstance(record, RepeatedKey):
        return BadRow(where, f"{_NO_OBJECT}, each once, got one twice ({record}); remove one of them")
    return BadRow(where, f'{_NO_OBJECT}, got a {type(record).__name__}; write {{"field": value, ...}}')


def _read_json(path: Path) -> Iterator[DataRow | BadRow]:
    """Yields the rows of one JSON list, or of JSON lines if the file begins without "[". Holds one row at a time."""
    with open_bytes(path) as file:
        first = file.read(1 << 12).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if first != b"[":
        yield from _read_jsonl(path)
        return
    number = 0
    try:
        for number, record in enumerate(_elements(text_parts(open_text(path))), start=1):
            yield _row_of(record, f"{path}, row {number}")
    except (NotText, ValueError) as error:
        where = f"{path}:{error.line}" if isinstance(error, NotText) else path
        reason = getattr(error, "msg", None) or error
        raise ConfigError(
            f"{where}: expected a JSON list of objects, got a file that is none ({reason}, after {number:,} rows); "
            "correct it, or write one object per line into a .jsonl file"
        ) from None


def _elements(parts: Iterator[str]) -> Iterator[Any]:
    """Yields the values of a JSON list whose text comes in parts. Raises ValueError if it is none."""
    text = next(parts)
    place = text.index("[") + 1
    before = ""  # what stands before the next value
    while True:
        try:
            element, end = _next_value(text, place, before)
        except ValueError as error:
            if not _may_go_on(error, len(text)):
                raise
            rest = len(text) - place
            if rest > LONGEST:
                raise ValueError(f"expected {SHORT}, got a longer one") from None
            if not (more := list(itertools.islice(parts, 1 + rest // READ))):  # so that no text is read often
                raise
            text, place = text[place:] + "".join(more), 0
            continue
        if element is None:
            if text[end:].strip() or any(part.strip() for part in parts):
                raise ValueError("more follows the end of the list")
            return
        yield element[0]
        place, before = end, ","


def _next_value(text: str, place: int, before: str) -> tuple[tuple[Any] | None, int]:
    """Returns (a list's next value, or None at its end, and the place after it). Raises ValueError if there is none."""
    place = _skip(text, place)
    if text.startswith("]", place):
        return None, place + 1
    value, end = parse_first(text, _skip(text, place + len(before)))
    end = _skip(text, end)
    if not text.startswith((",", "]"), end):  # a number may go on in the next part
        raise json.JSONDecodeError("expected a comma or the end of the list", text, end)
    return (value,), end


def _may_go_on(error: ValueError, length: int) -> bool:
    """True if a text of this length, refused as JSON, may become JSON when more text follows. error: the decoder's."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos > length - _WORD


def _skip(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place


def _read_csv(path: Path) -> Iterator[DataRow | BadRow]:
    """Yields the rows under the header; a row whose number of cells differs from the header's is a `BadRow`."""
    csv.field_size_limit(LONGEST)  # its own limit is shorter than a document
    # A byte that is not UTF-8 becomes a surrogate, so that only its own row is bad.
    opened = io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", errors="surrogateescape", newline="")
    with opened as lines:
        reader = csv.reader(_short_lines(lines, path), strict=True)
        header = None
        while True:
            where = f"{path}:{reader.line_num + 1}"
            try:
                cells = next(reader, None)
            except csv.Error as error:
                yield BadRow(where, f"expected comma-separated cells, got a row that is none ({error}); correct it")
                continue
            if cells is None:
                return
            if not cells:
                continue
            if header is None:
                if not all(map(str.isprintable, cells)):
                    _check_begin(path)
                cells[0] = cells[0] or INDEX
                header = check_names(cells, where)
                if len(header) == 1 and (other := next((mark for mark in ";\t|" if mark in header[0]), None)):
                    raise ConfigError(
                        f"{where}: expected a header with commas between its cells, got {shown(header[0], 80)}; write "
                        f"the file with commas in place of {other!r}"
                    )
                continue
            yield _row_of_cells(header, cells, where)


def _check_begin(path: Path) -> None:
    """Raises ConfigError if a file does not begin with UTF-8, and says what it seems to be."""
    with open_bytes(path) as file:
        line = file.readline(LONGEST)
    try:
        decode_utf8(line)
    except NotText as error:
        raise ConfigError(f"{path}:1: {error}") from None


def _short_lines(lines: TextIO, path: Path) -> Iterator[str]:
    """Yields a file's lines. Raises ConfigError for a line that is too long."""
    number = 0
    while line := lines.readline(LONGEST + 1):
        number += 1
        if len(line) > LONGEST:
            raise ConfigError(f"{path}:{number}: expected {SHORT}, got a longer line; {SPLIT}")
        yield line


def _row_of_cells(header: list[str], cells: list[str], where: str) -> DataRow | BadRow:
    if len(cells) != len(header):
        return BadRow(where, f"expected {len(header)} cells as in the header, got {len(cells)}; correct the row")
    for name, cell in zip(header, cells, strict=True):
        try:
            cell.encode("utf-8")
        except UnicodeEncodeError:
            return BadRow(where, f"expected UTF-8 text in {name!r}, got other bytes; convert the file")
    return DataRow(dict(zip(header, cells, strict=True)), where)


_READERS = {
    ".csv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
}
SUFFIXES = (*_READERS, ".txt")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


type OpenSet = Callable[[str, str, str], Iterable[Any] | GivenRows]  # of a set's name, subset and split


def read_set(rows: Iterable[Any] | GivenRows, name: str) -> Iterator[DataRow | BadRow]:
    """Yields the rows of a set that the `datasets` library has opened. Raises ConfigError if it cannot read them."""
    if isinstance(rows, GivenRows):
        yield from rows.read()
        return
    try:
        for number, record in enumerate(rows, start=1):
            yield DataRow(plain_row(record, drops_nulls=True), f"{name}, row {number}")
    except Exception as error:  # those of damaged files, and of decoders of images and sound that are not installed
        raise ConfigError(
            f"{name}: expected rows from the datasets library, got {type(error).__name__} ({_one_line(error)}); "
            "download the set again, or download its files and name them"
        ) from None


def check_set_name(name: str) -> None:
    """Raises ConfigError if this, which is no file, folder or glob that matches, cannot name a set either."""
    if not _HUB_NAME.fullmatch(name) or format_of(name) in SUFFIXES:
        expected = f"{name}: expected a file, a folder or a glob that matches"
        raise ConfigError(f"{expected}, got nothing of that name in {Path.cwd()}; correct the path")


def open_set(name: str, subset: str, split: str) -> Iterable[Any]:
    """Opens a split of a set that the `datasets` library finds, on the hub or in its cache.

    Raises ConfigError, which says where it looked, if `name` is a path, or that library is not installed or finds
    nothing.
    """
    check_set_name(name)
    nothing = f"got nothing of that name in {Path.cwd()}"
    expected = f"{name}: expected a file, folder or glob, or a set that the datasets library finds"
    try:
        library = importlib.import_module("datasets")  # not among surojax's dependencies
    except ImportError:
        raise ConfigError(
            f"{expected}, {nothing}, and that library is not installed; correct the path, or pip install datasets"
        ) from None
    try:
        return library.load_dataset(name, subset or None, split=split)
    except Exception as error:  # its own, those of the network, and those of the files
        cache = library.config.HF_DATASETS_CACHE
        raise ConfigError(
            f"{expected}, {nothing}, and from that library (cache {cache}): {_one_line(error)}; correct the name, "
            "subset or split, or download the set's files and name them"
        ) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
