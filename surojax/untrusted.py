"""Reads untrusted files with limits: on their kind (no pipes), their size, and the depth of JSON."""

import collections
import difflib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from surojax.errors import ConfigError, shown

MiB = 1 << 20
SMALL = 16 * MiB  # bytes of a file of settings
TRAINED = "a checkpoint, a run's output_dir, a Hugging Face folder or a GGUF file"  # that a command opens
POINTER = b"version https://git-lfs.github.com/spec/"  # the beginning of a file that Git LFS has not fetched
MAX_DEPTH = 100  # of lists and objects in each other


def expanded(path: str | Path) -> Path:
    """Expands "~" in a path to the home folder; returns the path unchanged if there is no such user.

    Raises ConfigError if no file can have that name.
    """
    full_path = os.path.expanduser(path)
    try:
        os.lstat(full_path)
    except (OSError, ValueError) as error:  # ValueError: a character that no name has
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"expected a path, got {shown(str(path), 80)} ({reason}); correct it") from None
    return Path(full_path)


def check_there(option: str, path: str | Path, expected: str, otherwise: str = "correct it") -> None:
    """Raises ConfigError if nothing has this path; its line ends with the nearest name beside it, or `otherwise`."""
    full_path = expanded(path)
    if not os.path.lexists(full_path):
        beside = os.listdir(full_path.parent) if full_path.parent.is_dir() else []
        near = difflib.get_close_matches(full_path.name, beside, n=1, cutoff=0.6)
        change = f"did you mean {Path(path).parent / near[0]}?" if near else otherwise
        raise ConfigError(f"{option}: expected {expected}, got {str(path)!r} (No such file or directory); {change}")


def check_file(path: Path) -> int:
    """Checks that a path is a regular file, and returns its size in bytes.

    Raises OSError if it is a pipe, a device or a folder, is not there, or was not fetched by Git LFS.
    """
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device; save it first", str(path))
    if is_pointer(path):
        raise OSError(errno.EINVAL, "it is a pointer of Git LFS; run git lfs pull in its folder", str(path))
    return status.st_size


def is_pointer(path: Path) -> bool:
    """Returns True for a file that Git LFS has not fetched, and so names its content. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(POINTER)) == POINTER


def read_bytes(path: Path, most: int = SMALL) -> bytes:
    """Reads a file. most: limit of its size, bytes. Raises OSError if it is no such file."""
    if (size := check_file(path)) > most:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, where at most {most:,} are read", str(path))
    with path.open("rb") as file:
        return file.read(most)


class RepeatedKey(ValueError):
    """Raised for a JSON object with a repeated key, whose last value Python's parser would take."""


def parse_json(text: str | bytes) -> Any:
    """Parses a JSON text. Raises ValueError if it is none, is deeper than MAX_DEPTH, or repeats a key (RepeatedKey)."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(_DEEPER) from None
    brackets = text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    if brackets > MAX_DEPTH:  # else it cannot be
        check_depth(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object with these keys and values. Raises RepeatedKey if a key is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, _), *_ = (collections.Counter(key for key, _ in pairs) - collections.Counter(list(found))).items()
        raise RepeatedKey(f"the key {shown(key, 80)} is there twice")
    return found


_DEEPER = f"lists and objects are nested deeper than {MAX_DEPTH}"
_decode = json.JSONDecoder(object_pairs_hook=_unique).raw_decode
_decode_any = json.JSONDecoder().raw_decode


def parse_first(text: str, start: int) -> tuple[Any, int]:
    """Parses the JSON value that begins at `start`; returns the value and its end.

    Of a value that repeats a key, returns the RepeatedKey. Raises ValueError as `parse_json`.
    """
    try:
        try:
            value, end = _decode(text, start)
        except RepeatedKey as error:
            value, end = error, _decode_any(text, start)[1]
    except RecursionError:
        raise ValueError(_DEEPER) from None
    if text.count("[", start, end) + text.count("{", start, end) > MAX_DEPTH:
        check_depth(value)
    return value, end


def check_depth(parsed: Any) -> None:
    """Raises ValueError if lists and objects are nested deeper than MAX_DEPTH."""
    level = [parsed]
    for _ in range(MAX_DEPTH):
        inner = (x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list))
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    if level:
        raise ValueError(_DEEPER)


def read_json(path: Path, most: int = SMALL) -> Any:
    """Reads and parses a file of JSON. Raises OSError if it cannot be read, ValueError if it is no such JSON."""
    return parse_json(read_bytes(path, most))
