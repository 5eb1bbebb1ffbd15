"""Finds files by path, folder or glob, and decodes their text."""

import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from surojax.data import splits
from surojax.data.decompression import MARKS, format_of
from surojax.errors import ConfigError
from surojax.untrusted import is_pointer

_OTHER_FORMATS = {  # by the first bytes of a file
    b"\xff\xfe": "convert the file (iconv -f utf-16 -t utf-8)",
    b"\xfe\xff": "convert the file (iconv -f utf-16 -t utf-8)",
    **{mark: f"let the file's name end in {end}, or decompress it" for end, mark in MARKS.items()},
}
NO_DATA = (
    "data: expected files to train on, got none; --config.data=FILES of text, instructions or conversations (.jsonl, "
    ".txt, .parquet, .csv), or --config.data=stdlib for a trial on Python's own source"
)
_ABOUT = ("dataset_info.json", "state.json", splits.SAVED)
_MOST_JOINED = 32  # parts between commas that one name may have
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "idlelib", "lib2to3"}


def walk(root: Path, *suffixes: str, skip: Iterable[str] = ()) -> Iterator[Path]:
    """Yields the files below `root` whose format (`format_of`) is one of `suffixes`.

    Skips hidden files and the folders in `skip`.
    """
    for folder, subfolders, names in os.walk(root, onerror=_raise_unreadable):
        subfolders[:] = [name for name in subfolders if name not in skip and not name.startswith(".")]
        for name in names:
            if format_of(name) in suffixes and not name.startswith("."):
                yield Path(folder, name)


def split_names(names: str) -> list[str]:
    """Splits a list of paths at its commas, and strips them. A name that exists as it is stays whole, commas too."""
    parts = names.split(",")
    paths = []
    while parts:
        for count in range(min(len(parts), _MOST_JOINED), 0, -1):
            joined = ",".join(parts[:count])
            known = [name for name in (joined, joined.strip()) if os.path.lexists(os.path.expanduser(name))]
            if known or count == 1:
                paths.append(known[0] if known else joined.strip())
                del parts[:count]
                break
    return paths


class FoundFiles(NamedTuple):
    """Files, sorted, and the splits of a folder that are not read, see splits.py."""

    files: list[Path]
    other_splits: list[str]


def find_files(item: str, suffixes: tuple[str, ...]) -> list[Path] | None:
    """Returns the files of `find_with_splits`; None if nothing has that name."""
    found = find_with_splits(item, suffixes)
    return found and found.files


def find_with_splits(item: str, suffixes: tuple[str, ...], split: str = "") -> FoundFiles | None:
    """Finds the files that a path, folder or glob names; None if nothing has that name.

    A path that exists is no glob. split: of a folder; "": the training split, or all files if there is none. Raises
    ConfigError if a folder has no such split or no file of a format (`format_of`) among `suffixes`, a file is of
    another, or it is a pipe.
    """
    path = item if os.path.exists(item) else os.path.expanduser(item)
    matches = [Path(path)] if os.path.exists(path) else [Path(match) for match in _glob(_existing_escaped(path))]
    if not matches:
        return None
    files = {file for match in matches for file in (_data_files(match, suffixes) if match.is_dir() else [match])}
    others: list[str] = []
    if files and matches == [Path(path)] and matches[0].is_dir():
        files, others = splits.split_of(matches[0], files, split)
    elif split:
        raise ConfigError(
            f"{item}: expected no split, which only folders and sets of the datasets library have, got {split!r}; name "
            "the files in path"
        )
    if not files:
        raise ConfigError(
            f"{item}: expected a folder with {' or '.join(suffixes)} files, got none; add some or name another"
        )
    for file in sorted(files):
        if file.exists() and not file.is_file():
            raise ConfigError(
                f"{file}: expected a file, got a pipe or a device, which cannot be read twice; save it first"
            )
        if os.access(file, os.R_OK) and is_pointer(file):
            raise ConfigError(f"{file}: expected data, got a pointer of Git LFS; run git lfs pull in its folder")
        if format_of(file) not in suffixes:
            raise ConfigError(
                f"{file}: expected a file ending in {' or '.join(suffixes)}, got '{file.suffix}'; "
                "convert it (.jsonl: one JSON object with a text field per line) or leave it out"
            )
    return FoundFiles(sorted(files), others)


def _data_files(folder: Path, suffixes: tuple[str, ...]) -> set[Path]:
    """Returns the files with data below a folder, without those that `datasets` saves about its Arrow files."""
    files = set(walk(folder, *suffixes))
    saved = {file.parent for file in files if file.suffix.lower() == ".arrow"}
    return {file for file in files if not (file.name in _ABOUT and saved & {file.parent, *file.parent.glob("*/")})}


def _existing_escaped(pattern: str) -> str:
    """Escapes the leading folders of a glob that exist under their literal names, such as "[1]"."""
    parts = pattern.split(os.sep)
    for count in range(len(parts)):
        if not os.path.lexists(os.sep.join(parts[: count + 1]) or os.sep):
            return os.sep.join([*map(glob.escape, parts[:count]), *parts[count:]])
    return glob.escape(pattern)


def _glob(pattern: str) -> Iterator[str]:
    """Yields the paths that a glob matches. `**` enters every folder once, also where links lead back to it."""
    parts = pattern.replace(os.sep, "/").split("/")
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    place = parts.index("**")
    after = "/".join(parts[place + 1 :]) or "*"
    for root in sorted(glob.iglob("/".join(parts[:place]) or "/")) if place else ["."]:
        seen: set[str] = set()
        for folder, subfolders, _ in os.walk(root, followlinks=True):
            if os.path.realpath(folder) in seen:
                subfolders.clear()
                continue
            seen.add(os.path.realpath(folder))
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            name = os.path.normpath(folder)
            yield from _glob(os.path.join(glob.escape(name), after) if name != "." else after)


def stdlib_files() -> list[Path]:
    """Lists the source files of the interpreter's standard library, sorted, without tests and installed packages."""
    files = walk(Path(sysconfig.get_paths()["stdlib"]), ".py", skip=_NOT_LIBRARY)
    return sorted(path for path in files if path.is_file())


def unseen(paths: Iterable[Path], seen: set[Path]) -> list[Path]:
    """Returns the files that are not in `seen`, whatever the spelling of their paths, and adds them to `seen`."""
    new_paths = []
    for path in paths:
        target = Path(os.path.realpath(path))  # `resolve` fails for links in a circle
        if target not in seen:
            seen.add(target)
            new_paths.append(path)
    return new_paths


def decode_utf8(content: bytes, offset: int = 0) -> str:
    """Decodes UTF-8 without the byte order mark; line ends are unchanged. `offset`: position of `content` in the file.

    Raises NotText.
    """
    try:
        return content.decode("utf-8").removeprefix("\ufeff" if offset == 0 else "")
    except UnicodeDecodeError as error:
        raise NotText(content, error.start, offset) from None


class NotText(ValueError):
    """Raised if bytes are not UTF-8. The message says what was expected; line: number of the line, from 1.

    position: of the byte in `content`, which begins at byte `offset` of the file, after `lines` line ends.
    """

    def __init__(self, content: bytes, position: int, offset: int, lines: int = 0):
        self.line = lines + content.count(b"\n", 0, position) + 1
        begins = [advice for mark, advice in _OTHER_FORMATS.items() if offset == 0 and content.startswith(mark)]
        super().__init__(
            f"expected UTF-8 text, got the byte 0x{content[position]:02x} at byte offset {offset + position}; "
            f"{begins[0] if begins else 'convert the file (iconv -f latin1 -t utf-8)'} or leave it out"
        )


def unreadable(path: Path | str, error: OSError) -> ConfigError:
    """Makes the error for a file or folder that the operating system does not let us read."""
    reason = error.strerror or " ".join(str(error).split())[:200]
    return ConfigError(f"{path}: expected a readable file or folder, got '{reason}'; correct its path or permissions")


def _raise_unreadable(error: OSError) -> None:
    raise unreadable(error.filename, error)
