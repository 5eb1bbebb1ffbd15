"""Files that others made, read with limits: of kind (no pipes), of size, and of the depth of JSON."""

import errno
import json
import stat
from pathlib import Path
from typing import Any

MiB = 1 << 20
SMALL = 16 * MiB  # bytes of a file of settings
MAX_DEPTH = 100  # of lists and objects in each other


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
    deeper = f"lists and objects are nested deeper than {MAX_DEPTH}"
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(deeper) from None
    brackets = text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    if brackets > MAX_DEPTH:  # else it cannot be
        level = [found]
        for _ in range(MAX_DEPTH + 1):
            level = [value for outer in level for value in _values(outer) if isinstance(value, dict | list)]
        if level:
            raise ValueError(deeper)
    return found


def _values(outer: Any) -> Any:
    return outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ()


def read_json(path: Path, most: int = SMALL) -> Any:
    """Returns what a file of JSON says. Raises OSError if it cannot be read, ValueError if it is no such JSON."""
    return parse_json(read_bytes(path, most))
