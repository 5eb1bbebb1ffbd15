"""Documents from text files, and which of them are held out for evaluation.

Held out is decided per document by a hash, of the path for the built-in corpus and of the content for files, never by
position or by chance: the split is the same on every machine and in every run, adding a document moves no other, and
copies of a document end up on the same side.

`surojax.data` turns these documents into token arrays and batches.
"""

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from surojax.errors import ConfigError

STDLIB = "stdlib"  # the source code of the interpreter's own standard library: real text, no download
SUPPORTED = (".jsonl", ".txt")
HELD_OUT_STDLIB = 0.05  # of its few hundred files, so that evaluation sees about half a megabyte
HELD_OUT_FILES = 0.01
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "idlelib", "lib2to3"}


@dataclass(frozen=True)
class Document:
    """One text. num_bytes: its length in UTF-8. key: 64 bits of a hash, which decide the side it is on."""

    text: str
    num_bytes: int
    key: int


def read_documents(source: str, text_field: str) -> Iterator[Document]:
    """The documents of `source` (see `surojax.data.load_corpora`), files sorted by path.

    Raises ConfigError, naming file and line, when something is missing, empty, or not text.
    """
    if source == STDLIB:
        yield from _read_stdlib()
        return
    for path in _expand(source):
        yield from _read_jsonl(path, text_field) if path.suffix.lower() == ".jsonl" else _read_txt(path)


def hold_out(documents: Iterable[Document], fraction: float) -> Iterator[tuple[Document, bool]]:
    """Each document with True where it is held out: its key is below `fraction` of the range.

    Where no key is, the document with the smallest one (and its copies) is held out; of a single document the end.
    """
    documents = iter(documents)
    first = list(islice(documents, 2))
    if len(first) == 1:
        yield from zip(_split(first[0].text), (False, True), strict=True)
        return
    threshold = int(fraction * 2**64)
    found = False
    smallest: list[Document] = []  # kept back until it is certain that another one is held out
    for document in chain(first, documents):
        if document.key < threshold:
            found = True
            yield document, True
        elif found:
            yield document, False
        elif not smallest or document.key < smallest[0].key:
            yield from ((other, False) for other in smallest)
            smallest = [document]
        elif document.key == smallest[0].key:
            smallest.append(document)
        else:
            yield document, False
    yield from ((document, not found) for document in smallest)


def _split(text: str) -> tuple[Document, Document]:
    """The first 95 % and the rest, cut after a line where one ends nearby."""
    cut = int(len(text) * 0.95)
    cut = text.rfind("\n", int(len(text) * 0.90), cut) + 1 or cut
    return _document(text[:cut]), _document(text[cut:])


def _document(text: str, key: str | None = None) -> Document:
    """Raises UnicodeEncodeError where `text` holds what UTF-8 cannot encode."""
    content = text.encode("utf-8")
    digest = hashlib.blake2b(content if key is None else key.encode("utf-8"), digest_size=8).digest()
    return Document(text, len(content), int.from_bytes(digest, "big"))


def _read_stdlib() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()  # a few files are copies of others and would end up on both sides
    for path in sorted(_walk(root, ".py", skip=_NOT_LIBRARY)):
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


def _walk(root: Path, *suffixes: str, skip: Iterable[str] = ()) -> Iterator[Path]:
    """Files below `root` that end in `suffixes`; hidden ones and folders in `skip` left out."""
    for folder, subfolders, names in os.walk(root, onerror=_stop):
        subfolders[:] = [name for name in subfolders if name not in skip and not name.startswith(".")]
        for name in names:
            if name.lower().endswith(suffixes) and not name.startswith("."):
                yield Path(folder, name)


def _expand(source: str) -> list[Path]:
    """The files that `source` names, sorted, each once."""
    paths: set[Path] = set()
    for item in (part.strip() for part in source.split(",")):
        if not item:
            raise ConfigError(
                f"data source: expected '{STDLIB}' or paths separated by commas, got an empty one in {source!r}; "
                "name a file or remove the extra comma"
            )
        path = os.path.expanduser(item)
        matches = [Path(path)] if os.path.exists(path) else list(map(Path, glob.glob(path, recursive=True)))
        if not matches:
            raise ConfigError(
                f"{item}: expected a file, a folder or a glob that matches, got nothing of that name in {Path.cwd()}; "
                f"correct the path, or use '{STDLIB}' for the built-in corpus"
            )
        files = [file for match in matches for file in (_walk(match, *SUPPORTED) if match.is_dir() else [match])]
        if not files:
            raise ConfigError(
                f"{item}: expected a folder with {' or '.join(SUPPORTED)} files, got none; add some or name another"
            )
        paths.update(files)
    for path in sorted(paths):
        if path.suffix.lower() not in SUPPORTED:
            raise ConfigError(
                f"{path}: expected a file ending in {' or '.join(SUPPORTED)}, got '{path.suffix}'; "
                "convert it (.jsonl: one JSON object with a text field per line) or leave it out"
            )
    return sorted(paths)


def _read_txt(path: Path) -> Iterator[Document]:
    """The whole file as one document."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None
    text = _decode(content, path)
    if not text or text.isspace():
        raise ConfigError(f"{path}: expected text, got an empty file; remove it from the source or fill it")
    yield _document(text)


def _read_jsonl(path: Path, text_field: str) -> Iterator[Document]:
    """One document per line that is not blank, read line by line."""
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
        raise _unreadable(path, error) from None
    if not found:
        raise ConfigError(
            f"{path}: expected one JSON object per line, got an empty file; remove it from the source or fill it"
        )


def _parse(line: str, where: str, text_field: str) -> Document:
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
    """UTF-8 to text, line ends as they are, without a byte order mark. `offset`: where in the file `content` starts."""
    try:
        return content.decode("utf-8").removeprefix("\ufeff" if offset == 0 else "")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1 if line is None else line
        raise ConfigError(
            f"{path}:{number}: expected UTF-8 text, got the byte 0x{content[error.start]:02x} at byte offset "
            f"{offset + error.start}; convert the file (iconv -f latin1 -t utf-8) or leave it out"
        ) from None


def _stop(error: OSError) -> None:
    raise _unreadable(error.filename, error)


def _unreadable(path: Path | str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path}: expected a readable file or folder, got '{error.strerror}'; correct its path or permissions"
    )
