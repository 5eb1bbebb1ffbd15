"""Splits of a folder's files, as the `datasets` library names them: only one is read, by default the training split.

A folder that `DatasetDict.save_to_disk` wrote lists its splits, each a folder. In others, files are of the split that
their name, or a folder's, has as a word: `data/train-00000-of-00002.parquet`, `test.jsonl`, `validation/a.jsonl`.
"""

import re
from pathlib import Path
from typing import NamedTuple

from surojax.errors import ConfigError
from surojax.untrusted import read_json

TRAIN = "train"
SAVED = "dataset_dict.json"  # of a folder of splits
_WORDS = {
    TRAIN: "train|training",
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation",
}
_PATTERNS = {name: re.compile(rf"(?:^|[-._ 0-9])(?:{words})(?:[-._ 0-9]|$)", re.I) for name, words in _WORDS.items()}


class FolderSplit(NamedTuple):
    """The files of one split of a folder, and the names of its other splits, which are not read."""

    files: set[Path]
    others: list[str]


def split_of(folder: Path, files: set[Path], name: str) -> FolderSplit:
    """Chooses the files of a split. name: of the split; "": the training split, or all files if there is none.

    Raises ConfigError if there is no such split.
    """
    found = _by_split(folder, files)
    wanted = name or TRAIN
    if not (name or found.keys() & {TRAIN} or (folder / SAVED).is_file()):
        return FolderSplit(files, [])
    if wanted not in found:
        names = ", ".join(sorted(x for x in found if x)) or "files without a split in their names"
        raise ConfigError(
            f"{folder}: expected a split {wanted!r}, got {names}; set split in an entry of datasets, or name the files"
        )
    chosen = found.pop(wanted) | (found.pop("", set()) if wanted == TRAIN else set())
    found.pop("", None)
    return FolderSplit(chosen, sorted(found))


def _by_split(folder: Path, files: set[Path]) -> dict[str, set[Path]]:
    """Returns the files by the name of their split; "": of none."""
    saved = _saved_splits(folder)
    found: dict[str, set[Path]] = {}
    for file in files:
        parts = file.relative_to(folder).parts
        if saved is None:
            words = [word for part in parts for word, pattern in _PATTERNS.items() if pattern.search(part)]
            found.setdefault(words[0] if words else "", set()).add(file)
        elif parts[0] in saved:
            found.setdefault(parts[0], set()).add(file)
    return found


def _saved_splits(folder: Path) -> list[str] | None:
    """Returns the splits that a folder of `datasets` lists; None if it is another folder. Raises ConfigError."""
    file = folder / SAVED
    if not file.is_file():
        return None
    try:
        names = read_json(file)["splits"]
        if not isinstance(names, list):
            raise TypeError(f"got splits {names!r:.80}")
        return names
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{file}: expected the names of splits, got a file without ({type(error).__name__}: {error!s:.80}); save "
            "the set again, or name the folder of one split"
        ) from None
