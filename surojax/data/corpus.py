"""Finds the text that `data` names: files, or the standard library of this Python.

A hash decides which documents are held out: of its path for a file of the standard library, else of its text.
"""

import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from surojax.data.data_rows import BlankRow
from surojax.data.documents import Text, read_documents
from surojax.data.files import FoundFiles, find_with_splits, split_names, stdlib_files, unseen
from surojax.data.items import Item, Source, item_key, new_hash
from surojax.data.readers import read_file
from surojax.errors import ConfigError

STDLIB = "stdlib"  # the source code of the interpreter's own standard library: real text that needs no download
SUPPORTED = (".jsonl", ".txt")


def source(name: str, text_field: str) -> Source:
    """Returns the documents of a source (see `surojax.data.prepare.load_corpora`), with the files sorted by path.

    Raises ConfigError if something is missing.
    """
    is_stdlib = name == STDLIB
    found = FoundFiles(stdlib_files(), []) if is_stdlib else expand(name)
    items = _read_stdlib if is_stdlib else functools.partial(_read_files, found.files, text_field)
    key = {"stdlib": is_stdlib, "text_field": text_field}
    return Source(name, found.files, key, items, what="documents", instead="eval_data", other_splits=found.other_splits)


def _read_files(files: list[Path], text_field: str, with_keys: bool) -> Iterator[Item[Text] | BlankRow]:
    rows = (row for path in files for row in read_file(path, text_field))
    return read_documents(rows, text_field, by_record=False, with_keys=with_keys)


def _read_stdlib(with_keys: bool = True) -> Iterator[Item[Text]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()  # a few files are copies of others; since paths are hashed, they could be on both sides
    for path in stdlib_files():
        try:
            content = path.read_bytes()
            text = content.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text and text not in seen:
            seen.add(text)
            yield Item(text, item_key(new_hash(path.relative_to(root).as_posix().encode())), len(content))
    if not seen:
        raise ConfigError(
            f"stdlib: expected Python source files below {root}, got none (an interpreter shipped without them); "
            "use your own .txt or .jsonl files"
        )


def expand(source: str) -> FoundFiles:
    """Returns the files that `source` names, sorted and without duplicates."""
    paths: set[Path] = set()
    others: list[str] = []
    for item in split_names(source):
        if not item:
            raise ConfigError(
                f"data source: expected '{STDLIB}' or paths separated by commas, got an empty one in {source!r}; "
                "name a file or remove the extra comma"
            )
        found = find_with_splits(item, SUPPORTED)
        if found is None:
            raise ConfigError(
                f"{item}: expected a file, a folder or a glob that matches, got nothing of that name in {Path.cwd()}; "
                f"correct the path, or use '{STDLIB}' for the built-in corpus"
            )
        paths.update(found.files)
        others += found.other_splits
    return FoundFiles(unseen(sorted(paths), set()), others)
