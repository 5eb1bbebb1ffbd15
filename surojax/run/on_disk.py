"""Checkpoints as folders: finds and lists them, and checks their files against `files.json`.

Orbax does not detect a damaged file: it returns a flipped byte as another number. `files.json` has the size of every
file, and the checksum of small files. It is written before the folder is renamed, and compared before anything is
compiled; the error names the file. Damage of large files is found by the checksums of arrays (restore.py).
"""

import logging
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from surojax.errors import CheckpointError, ConfigError
from surojax.memory.layer_file import NvmeError
from surojax.memory.lock import is_shared, share
from surojax.own_files import WHOLE, Optional, check_form, read_own, write_whole
from surojax.untrusted import check_file, expanded

FOLDER = "checkpoints"
FILES = "files.json"
BLOCK = "block"  # key of the meta data: which block of a caller was trained; none: the standard one
STEP = re.compile(r"0|[1-9][0-9]*")  # the name of a checkpoint
STEPS = range(2**31)
# What a checkpoint's meta data is, see own_files.py: of any, and of one that `train` wrote. `config.checks` checks the
# config itself.
META = {
    "step": STEPS,
    "samples": Optional(WHOLE),
    "samples_per_step": Optional(range(1, 2**31)),
    "layers": Optional({str: STEPS}),
    "version": Optional(str),
    "checksums": {str: range(2**32)},
    BLOCK: Optional(str),
    "base": Optional(str),
}
OF_A_RUN = {
    "step": STEPS,
    "samples": WHOLE,
    "layers": Optional({str: STEPS}),
    "config": {"resume_from_checkpoint": str},
    "tokenizer": str,
    "data": str,
}
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
    """Lists a folder's finished checkpoints, oldest first."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted((p for p in entries if STEP.fullmatch(p.name) and p.is_dir()), key=lambda p: int(p.name))


class Held:
    """A lock on a checkpoint: until `close`, the run that wrote the checkpoint does not prune it (checkpoint.py)."""

    def __init__(self, path: Path):
        self.path = path
        self._fd = share(path / FILES)  # None: the checkpoint is damaged or removed, as whoever reads it will say

    def close(self) -> None:
        """Releases the lock, so that the run may prune the checkpoint."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    __del__ = close


def is_held(path: Path) -> bool:
    """Returns True if a process holds a checkpoint, on this machine or on another that shares the disk."""
    return is_shared(path / FILES)


def hold(path: str | Path) -> Held | None:
    """Locks the checkpoint that `find` returns, which the run may replace at any time; None if there is none."""
    while checkpoint := find(path):
        held = Held(checkpoint)
        if find(path) == checkpoint:  # the run saw the lock, or has not decided yet to prune this one
            return held
        held.close()
    return None


def read_newest[T](path: str | Path, read: Callable[[Path], T]) -> T | None:
    """Locks the newest checkpoint and returns read(its path); None if there is no checkpoint.

    With save_total_limit=1, a run decides what to prune when it begins to write, so that a checkpoint which is found
    later may be removed while it is held: then `read` gets the newer one.
    """
    while held := hold(path):
        try:
            return read(held.path)
        except CheckpointError:
            if find(path) == held.path:
                raise
        finally:
            held.close()
    return None


def read_meta(path: Path) -> dict[str, Any]:
    """Returns the item `meta` of a checkpoint, of the form `META`.

    Raises CheckpointError if a file is damaged or missing.
    """
    with readable(path):
        _check_files(path)
        meta = read_own(path / "meta" / "metadata", META)
        if STEP.fullmatch(path.name) and meta["step"] != int(path.name):
            raise ValueError(f"step: expected {path.name}, the name of its folder, got {meta['step']}")
        return meta


def read_meta_of_run(path: Path) -> dict[str, Any]:
    """Returns what `read_meta` returns for a checkpoint that `train` wrote, with `OF_A_RUN`. Raises CheckpointError."""
    meta = read_meta(path)
    with readable(path):
        check_form(meta, OF_A_RUN, "meta/metadata")
    return meta


def array_spec(item: Path, name: str) -> dict[str, Any]:
    """Returns how tensorstore reads an array of an item of a checkpoint, in either of its forms (checkpoint.py)."""
    kvstore = {"driver": "file", "path": f"{item / name}/"}
    if (item / "manifest.ocdbt").exists():
        kvstore = {"driver": "ocdbt", "base": f"file://{item}", "path": f"{name}/"}
    return {"driver": "zarr", "kvstore": kvstore}


def written_by(meta: dict[str, Any]) -> str:
    """Names the version of surojax that wrote a checkpoint, for errors."""
    version = f"version {meta['version']} of surojax" if "version" in meta else "a version of surojax before 0.2"
    return f"{version}, which wrote it"


def list_files(unfinished: Path) -> None:
    """Writes `files.json`, the sizes and checksums of a checkpoint's files. unfinished: its temporary folder.

    Orbax calls this after all files are written and before it renames the folder. With several processes, the first
    one does it; the others pass the next barrier after it.
    """
    if jax.process_index() != 0:
        return
    files = {str(p.relative_to(unfinished)): _measure(p) for p in unfinished.glob("*/**/*") if p.is_file()}
    write_whole(unfinished / FILES, files, indent=1)


def _check_files(path: Path) -> None:
    """Raises FileNotFoundError if a file is missing, ValueError if its size or its checksum (small files) changed.

    Raises ValueError too for a pipe or a device, also one that `files.json` does not list: orbax would wait for it.
    """
    for file in path.rglob("*"):
        if file.exists() and not (file.is_dir() or file.is_file()):
            raise ValueError(f"{file.relative_to(path)} is a pipe or a device, and no file")
    for name, written in read_own(path / FILES, {str: {"bytes": WHOLE, "crc32": Optional(WHOLE)}}, MOST_FILES).items():
        if (now := _measure(path / name)) != written:
            sizes = f"{written['bytes']} bytes were written, {now['bytes']} are there"
            raise ValueError(
                f"{name} is damaged: {sizes if now['bytes'] != written['bytes'] else 'its content changed'}"
            )


def _measure(file: Path) -> dict[str, int]:
    """Returns a file's size in bytes, and for small files the CRC-32."""
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
    """Translates errors of reading a checkpoint to CheckpointError."""

    def message(reason: str) -> str:
        if not path.exists():
            newest = "read the newest of its run, which keeps the last save_total_limit ones"
            return f"checkpoint {path} is no longer there; {newest}"
        others = [p for p in steps_in(path.parent) if p != path]
        change = f"to continue from {others[-1]}, move it away" if others else "there is no other beside it"
        return f"checkpoint {path} cannot be read ({reason}); {change}"

    return Translate(message)
