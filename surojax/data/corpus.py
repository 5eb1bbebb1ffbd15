"""Reads documents from text files and decides which of them are held out for evaluation.

A hash decides for each document: a hash of its path for the built-in corpus, a hash of its content for other files. The
split is therefore equal on every machine and in every run, adding a document does not change the side of another one,
and all copies of a document are on one side.

`surojax.data.prepare` turns these documents into tokens.
"""

import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Protocol

from surojax.data.files import NotText, decode, find, unreadable, walk
from surojax.errors import ConfigError

STDLIB = "stdlib"  # the source code of the interpreter's own standard library: real text that needs no download
SUPPORTED = (".jsonl", ".txt")
HELD_OUT_STDLIB = 0.05  # fraction of its few hundred files; about half a megabyte
HELD_OUT_FILES = 0.01  # fraction of the documents of other sources
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "idlelib", "lib2to3"}


@dataclass(frozen=True)
class Document:
    """One text. num_bytes: its length in UTF-8. key: 64-bit hash that decides whether it is held out."""

    text: str
    num_bytes: int
    key: int


def read_documents(source: str, text_field: str) -> Iterator[Document]:
    """Yields the documents of `source` (see `surojax.data.prepare.load_corpora`), with the files sorted by path.

    Raises ConfigError, which names the file and line, if something is missing, empty, or not text.
    """
    if source == STDLIB:
        yield from _read_stdlib()
        return
    for path in _expand(source):
        yield from _read_jsonl(path, text_field) if path.suffix.lower() == ".jsonl" else _read_txt(path)


class Keyed(Protocol):
    """Something with a 64-bit hash that decides whether it is held out."""

    @property
    def key(self) -> int: ...


def hold_out[T: Keyed](
    items: Iterable[T], fraction: float, split: Callable[[T], tuple[T, T] | None]
) -> Iterator[tuple[T, bool]]:
    """Yields each document with True if it is held out, which it is if its key is below `fraction` * 2^64.

    If no document has such a key, the one with the smallest key is held out, with its copies. If there is only one
    document, it is split and its end is held out. split: returns both parts, or None: then nothing is held out.
    """
    items = iter(items)
    first = list(islice(items, 2))
    if len(first) == 1:
        yield from zip(split(first[0]) or first, (False, True), strict=False)
        return
    threshold = int(fraction * 2**64)
    found = False
    smallest: list[T] = []  # not yielded before it is known whether another document is held out
    for item in chain(first, items):
        if item.key < threshold:
            found = True
            yield item, True
        elif found:
            yield item, False
        elif not smallest or item.key < smallest[0].key:
            yield from ((other, False) for other in smallest)
            smallest = [item]
        elif item.key == smallest[0].key:
            smallest.append(item)
        else:
            yield item, False
    yield from ((item, not found) for item in smallest)


def split_document(document: Document) -> tuple[Document, Document]:
    """Splits a document where `split_text` splits its text."""
    first, second = split_text(document.text)
    return _document(first), _document(second)


def split_text(text: str) -> tuple[str, str]:
    """Splits a text at 95 % of its length, or after the last line end between 90 % and 95 %."""
    split = int(len(text) * 0.95)
    split = text.rfind("\n", int(len(text) * 0.90), split) + 1 or split
    return text[:split], text[split:]


def key_of(content: bytes) -> int:
    """Returns the 64-bit hash that decides whether a document with this content is held out."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def _document(text: str, key: str | None = None) -> Document:
    """Returns the Document of a text. `key`: the string to hash instead of the text.

    Raises UnicodeEncodeError if `text` contains lone surrogates, which UTF-8 cannot encode.
    """
    content = text.encode("utf-8")
    return Document(text, len(content), key_of(content if key is None else key.encode("utf-8")))


def source_files(source: str) -> list[Path]:
    """Returns the files that `read_documents` reads, sorted. Raises ConfigError if something is missing."""
    return stdlib_files() if source == STDLIB else _expand(source)


def stdlib_files() -> list[Path]:
    """The source files of the interpreter's standard library, sorted; without tests and installed packages."""
    files = walk(Path(sysconfig.get_paths()["stdlib"]), ".py", skip=_NOT_LIBRARY)
    return sorted(path for path in files if path.is_file())


def _read_stdlib() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()  # a few files are copies of others; since paths are hashed, they could be on both sides
    for path in stdlib_files():
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text and text not in seen:
            seen.add(text)
            yield _document(text, key=path.relative_to(root).as_posix())
    if not seen:
        raise ConfigError(
            f"stdlib: expected Python source files below {root}, got none (an interpreter shipped without them); "
            "use your own .txt or .jsonl files"
        )


def _expand(source: str) -> list[Path]:
    """Returns the files that `source` names, sorted and without duplicates."""
    paths: set[Path] = set()
    for item in (part.strip() for part in source.split(",")):
        if not item:
            raise ConfigError(
                f"data source: expected '{STDLIB}' or paths separated by commas, got an empty one in {source!r}; "
                "name a file or remove the extra comma"
            )
        files = find(item, SUPPORTED)
        if files is None:
            raise ConfigError(
                f"{item}: expected a file, a folder or a glob that matches, got nothing of that name in {Path.cwd()}; "
                f"correct the path, or use '{STDLIB}' for the built-in corpus"
            )
        paths.update(files)
    return sorted(paths)


def _read_txt(path: Path) -> Iterator[Document]:
    """Yields the file as one document."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    text = _decode(content, path)
    if not text or text.isspace():
        raise ConfigError(f"{path}: expected text, got an empty file; remove it from the source or fill it")
    yield _document(text)


def _read_jsonl(path: Path, text_field: str) -> Iterator[Document]:
    """Yields one document per line that is not blank. Reads one line at a time."""
    found = False
    offset = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                text = _decode(line, path, number, offset)
                offset += len(line)
                if text.strip():
                    found = True
                    yield _parse(text, f"{path}:{number}", text_field)
    except OSError as error:
        raise unreadable(path, error) from None
    if not found:
        raise ConfigError(
            f"{path}: expected one JSON object per line, got an empty file; remove it from the source or fill it"
        )


def _parse(line: str, where: str, text_field: str) -> Document:
    """Returns the document of a .jsonl line. `where`: file and line number, for errors."""
    expected = f"{where}: expected a JSON object with the text in {text_field!r}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{expected}, got a line that is no JSON ({error}); correct or remove the line") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{expected}, got a {type(record).__name__}; wrap it: {{{json.dumps(text_field)}: ...}}")
    if text_field not in record:
        fields = ", ".join(map(repr, list(record)[:8])) or "no fields"
        raise ConfigError(f"{expected}, got {fields}; name the field that holds the text, or correct the line")
    text = record[text_field]
    if not isinstance(text, str):
        raise ConfigError(f"{expected} as a string, got a {type(text).__name__}; correct or remove the line")
    if not text or text.isspace():
        raise ConfigError(f"{expected}, got an empty one; remove the line")
    try:
        return _document(text)
    except UnicodeEncodeError as error:
        escape = f"\\u{ord(text[error.start]):04x}"
        raise ConfigError(f"{expected}, got half a surrogate pair ({escape}); correct or remove the line") from None


def _decode(content: bytes, path: Path, line: int | None = None, offset: int = 0) -> str:
    """Decodes UTF-8 (see `files.decode`). `line`: its number, for the error; None: counted from the start."""
    try:
        return decode(content, offset)
    except NotText as error:
        raise ConfigError(f"{path}:{line or error.line}: {error}") from None
