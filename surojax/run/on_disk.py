"""Checkpoints as folders: found, listed, and held against what was written.

Orbax does not detect a damaged file: it returns a flipped byte as another number. `files.json` has the size of every
file, and the checksum of small files. It is written before the folder is renamed, and compared before anything is
compiled; the error names the file. Damage of large files is found by the checksums of arrays (restore.py).
"""

import json
import logging
import re
import zlib
from pathlib import Path
from typing import Any

import jax

from surojax.errors import CheckpointError, ConfigError
from surojax.memory.layer_file import NvmeError
from surojax.untrusted import check_file, expanded, read_json

FOLDER = "checkpoints"
FILES = "files.json"
SMALL = 1 << 20  # bytes; `files.json` has only the size of larger files, not their checksum
MOST_FILES = 1 << 28  # bytes of `files.json`
logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax also logs the errors that it raises, with tracebacks


def find(path: str | Path) -> Path | None:
    """Returns `path` if it is a checkpoint, else the newest checkpoint of the run in that folder, or None."""
    path = expanded(path).absolute()
    if (path / "meta").is_dir():
        return path
    steps = steps_in(path / FOLDER if (path / FOLDER).is_dir() else path)
    return steps[-1] if steps else None


def steps_in(folder: Path) -> list[Path]:
    """Finished checkpoints of a folder, oldest first."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted((p for p in entries if p.name.isdigit() and p.is_dir()), key=lambda p: int(p.name))


def read_meta(path: Path) -> dict[str, Any]:
    """Returns the item `meta` of a checkpoint. Raises CheckpointError if a file is damaged or missing."""
    with readable(path):
        _check_files(path)
        return read_json(path / "meta" / "metadata")


def written_by(meta: dict[str, Any]) -> str:
    """The version of surojax that wrote a checkpoint, for errors."""
    version = f"version {meta['version']} of surojax" if "version" in meta else "a version of surojax before 0.2"
    return f"{version}, which wrote it"


def list_files(folder: Path) -> None:
    """Writes `files.json`. Orbax calls this after all files are written and before it renames the folder.

    With several processes, the first one does it; the others pass the next barrier after it.
    """
    if jax.process_index() != 0:
        return
    (unfinished,) = folder.glob("*.orbax-checkpoint-tmp")
    files = {str(p.relative_to(unfinished)): _measure(p) for p in unfinished.glob("*/**/*") if p.is_file()}
    (unfinished / FILES).write_text(json.dumps(files, indent=1))


def _check_files(path: Path) -> None:
    """Raises FileNotFoundError if a file is missing, ValueError if its size or its checksum (small files) changed."""
    for name, written in read_json(path / FILES, MOST_FILES).items():
        if (now := _measure(path / name)) != written:
            sizes = f"{written['bytes']} bytes were written, {now['bytes']} are there"
            raise ValueError(
                f"{name} is damaged: {sizes if now['bytes'] != written['bytes'] else 'its content changed'}"
            )


def _measure(file: Path) -> dict[str, int]:
    """Size of a file, and its CRC-32 if it is small."""
    size = check_file(file)
    return {"bytes": size} | ({"crc32": zlib.crc32(file.read_bytes())} if size <= SMALL else {})


class Translate:
    """Context manager that turns any exception of the file libraries into a CheckpointError.

    message: function of the reason, in one line, that returns the error message.
    """

    def __init__(self, message):
        self.message = message

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, Exception) and not isinstance(error, CheckpointError | ConfigError | NvmeError):
            raise CheckpointError(self.message(_reason(error))) from error


def _reason(error: BaseException) -> str:
    """Returns the first cause in one line. A long line keeps its start (the operation) and its end (the reason)."""
    while error.__cause__:
        error = error.__cause__
    text = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
    text = " ".join(re.sub(r"\[(tensorstore_spec|source locations).*", "", text, flags=re.DOTALL).split())
    return text if len(text) <= 400 else f"{text[:150]} ... {text[-230:]}"


def readable(path: Path) -> Translate:
    """Translates the errors of reading a checkpoint."""
    others = [p for p in steps_in(path.parent) if p != path]
    change = f"to continue from {others[-1]}, move it away" if others else "there is no other beside it"
    return Translate(lambda e: f"checkpoint {path} cannot be read ({e}); {change}")
