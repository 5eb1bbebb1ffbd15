"""Files that others made, read with limits: of kind (no pipes), of size, and of the depth of JSON."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from surojax.errors import ConfigError, shown

MiB = 1 << 20
SMALL = 16 * MiB  # bytes of a file of settings
MAX_DEPTH = 100  # of lists and objects in each other


def expanded(path: str | Path) -> Path:
    """Returns a path with "~" as the home folder; as it is if nobody has that name.

    Raises ConfigError if no file can have that name.
    """
    found = os.path.expanduser(path)
    try:
        os.lstat(found)
    except (OSError, ValueError) as error:  # ValueError: a character that no name has
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"expected a path, got {shown(str(path), 80)} ({reason}); correct it") from None
    return Path(found)


def check_file(path: Path) -> int:
    """Returns the bytes of a regular file. Raises OSError if it is a pipe, a device or a folder, or is not there."""
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device; save it first", str(path))
    return found.st_size


def read_bytes(path: Path, most: int = SMALL) -> bytes:
    """Returns the content of a file. most: bytes that it may have. Raises OSError if it is no such file."""
    if (size := check_file(path)) > most:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, where at most {most:,} are read", str(path))
    with path.open("rb") as file:
        return file.read(most)


def parse_json(text: str | bytes) -> Any:
    """Returns what a JSON text says. Raises ValueError if it is none, or deeper than MAX_DEPTH."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(_DEEPER) from None
    brackets = text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    if brackets > MAX_DEPTH:  # else it cannot be
        check_depth(found)
    return found


_DEEPER = f"lists and objects are nested deeper than {MAX_DEPTH}"
_decode = json.JSONDecoder().raw_decode


def parse_first(text: str, start: int) -> tuple[Any, int]:
    """Returns the JSON value that begins at `start`, and where it ends. Raises ValueError as `parse_json`."""
    try:
        found, end = _decode(text, start)
    except RecursionError:
        raise ValueError(_DEEPER) from None
    if text.count("[", start, end) + text.count("{", start, end) > MAX_DEPTH:
        check_depth(found)
    return found, end


def check_depth(found: Any) -> None:
    """Raises ValueError if lists and objects are nested deeper than MAX_DEPTH."""
    level = [found]
    for _ in range(MAX_DEPTH):
        inner = (x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list))
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    if level:
        raise ValueError(_DEEPER)


def read_json(path: Path, most: int = SMALL) -> Any:
    """Returns what a file of JSON says. Raises OSError if it cannot be read, ValueError if it is no such JSON."""
    return parse_json(read_bytes(path, most))
