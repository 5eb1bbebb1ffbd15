"""Caches tokenised data in files: written once, identified by a hash of their inputs, mapped into memory.

An entry of the cache is a folder, named by a hash of everything that its tokens depend on. It has `meta.json` and a
folder for each part ("train", "held_out"):

    tokens.bin    uint16, or uint32 if the vocabulary has more than 65,536 ids
    trained.bin   a byte per token: 1 if the token is a target of the loss; exists only if a token is untrained
    offsets.bin   int64 [examples + 1]: example i is tokens[offsets[i] : offsets[i + 1]]
    NAME.bin      float32 [tokens] or [tokens, width]: further numbers of the tokens, by any other name

    checked.json  the size and times of each file when its content was last compared with the digest in meta.json

An entry is written into a temporary folder beside it, `meta.json` last, flushed to the disk and renamed. A process that
is killed therefore leaves a complete entry or none. A process that writes holds the entry's lock file; a second one
waits for it and then uses what the first has written. A temporary folder whose lock is free was left by a process that
ended, and the next run that writes removes it. An entry that is damaged is written anew (`entries`). Entries may be
deleted at any time.

Pages of a mapped file count as memory of the process until they are given back. `Corpus.release` does that, so a corpus
of any size takes as much memory as one batch of it.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from surojax.data.entries import DTYPES, META, OF_INPUTS, Corpus, meta_digest, open_entry, remember
from surojax.errors import ConfigError
from surojax.untrusted import expanded

FORMAT = 3  # of the files; an entry of another format is written anew, under another name
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # on some network file systems
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class CacheEntry(NamedTuple):
    """An entry of the cache. info: the writer's return value. reused: the entry existed before."""

    corpora: dict[str, Corpus]
    info: dict[str, Any]
    folder: Path
    reused: bool


@dataclass
class PartWriter:
    """Writes one part of an entry. `trained` is written only if a token is untrained, and then for all tokens."""

    folder: Path
    dtype: type[np.generic]
    num_tokens: int = 0
    num_examples: int = 0
    num_bytes: int = 0
    _files: dict[str, BinaryIO] = field(default_factory=dict)
    _hashes: dict[str, Any] = field(default_factory=dict)
    _widths: dict[str, int] = field(default_factory=dict)  # numbers for each token, by name, of arrays in OF_INPUTS

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self._append("tokens", np.zeros(0, self.dtype))
        self._append("offsets", np.zeros(1, np.int64))

    def append(
        self,
        ids: np.ndarray,
        trained: np.ndarray | None = None,
        *,
        ends: np.ndarray | None = None,
        num_bytes: int = 0,
        numbers: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Appends tokens. trained: bool [tokens]; None: all are. numbers: see `Corpus`, as in all calls.

        ends: int [examples], how many of these tokens precede the end of each example that ends here; None: the last
        example goes on. num_bytes: length in UTF-8 of the texts that end here, if they are plain text.
        """
        if trained is not None and "trained" not in self._files:
            for start in range(0, self.num_tokens, 1 << 20):
                self._append("trained", np.ones(min(1 << 20, self.num_tokens - start), np.bool_))
        if trained is not None or "trained" in self._files:
            self._append("trained", np.ones(len(ids), np.bool_) if trained is None else trained.astype(np.bool_))
        self._append("tokens", ids.astype(self.dtype))
        for name, values in (numbers or {}).items():
            self._append(name, values.astype(np.float32))
            if name in OF_INPUTS:
                self._widths[name] = values.shape[1]
        if ends is not None:
            self._append("offsets", self.num_tokens + ends.astype(np.int64))
            self.num_examples += len(ends)
        self.num_tokens += len(ids)
        self.num_bytes += num_bytes

    @property
    def num_bytes_written(self) -> int:
        """Bytes in the files, including those that are still buffered."""
        numbers = sum(self._widths.get(name, 1) for name in self._files.keys() - DTYPES.keys())
        size = np.dtype(self.dtype).itemsize + ("trained" in self._files) + 4 * numbers
        return self.num_tokens * size + (self.num_examples + 1) * 8

    def finish(self) -> dict[str, Any]:
        """Flushes the files to the disk; returns the part's entry in the meta data, which `open_entry` reads."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.close()
        digests = {name: file_hash.hexdigest() for name, file_hash in self._hashes.items()}
        digest = self._hashes["tokens"]
        numbers = sorted(self._files.keys() - DTYPES.keys())
        for name in ("trained", "offsets", *numbers) if "trained" in self._files else numbers:
            digest.update(self._hashes[name].digest())
        sizes = {name: (self.folder / f"{name}.bin").stat().st_size for name in self._files}
        return {
            "dtype": np.dtype(self.dtype).name,
            "tokens": self.num_tokens,
            "examples": self.num_examples,
            "bytes": self.num_bytes,
            "fingerprint": digest.hexdigest()[:16],
            "sizes": sizes,
            "digests": digests,
        } | ({"widths": self._widths} if self._widths else {})

    def close(self) -> None:
        """Closes the files, even if the part is incomplete."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # the error of the write that failed is the one to raise
                file.close()

    def _append(self, name: str, values: np.ndarray) -> None:
        if name not in self._files:
            self._files[name] = (self.folder / f"{name}.bin").open("wb", buffering=1 << 18)
            self._hashes[name] = hashlib.sha256()
        content = values.tobytes()
        self._files[name].write(content)
        self._hashes[name].update(content)


def cached(
    folder: str | Path,
    key: Mapping[str, Any],
    write: Callable[[Path], dict[str, Any]],
    *,
    name: str,
    say: Callable[[str], None] = print,
) -> CacheEntry:
    """Returns the cache's entry for `key`, after writing the entry if the cache lacks it.

    folder: of the cache; created if it does not exist. key: everything that the entry depends on, as JSON. write: fills
    a folder with parts and returns {"parts": {name: what its `finish` returned}, ...}. name: of the data, for messages.

    Raises ConfigError if the folder cannot be written, or the disk is full; nothing remains then.
    """
    root = expanded(folder).absolute()
    text = json.dumps({"format": FORMAT, **key}, sort_keys=True)
    target = root / hashlib.sha256(text.encode()).hexdigest()[:20]
    if corpora := open_entry(target, name, say):
        return CacheEntry(*corpora, target, True)
    with _writable(root):
        root.mkdir(parents=True, exist_ok=True)
        wait = functools.partial(_say_waiting, say, name)
        with _locked(root / f"{target.name}.lock", wait) as is_locked:
            if is_locked:
                _remove_leftovers(root, target.name)
            if corpora := open_entry(target, name):
                return CacheEntry(*corpora, target, True)
            _write(target, text, write)
            corpora = open_entry(target, name)
    assert corpora, f"{target} was written and cannot be opened"
    return CacheEntry(*corpora, target, False)


def _write(target: Path, key: str, write: Callable[[Path], dict[str, Any]]) -> None:
    """Writes an entry into a temporary folder and renames it."""
    temporary = target.with_name(f"{target.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        meta = {**write(temporary), "key": json.loads(key)}
        remember(temporary, meta)
        with (temporary / META).open("w") as file:
            json.dump(meta | {"digest": meta_digest(meta)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if open_entry(target, "") is None:  # without locks, another process may have been faster
            shutil.rmtree(target, ignore_errors=True)  # one that is damaged; a run that has it mapped keeps its pages
            target.unlink(missing_ok=True)  # a file of that name
            temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class FilesDigest(NamedTuple):
    """A key of files' content. digest: of absolute paths, sizes and times of the last change."""

    digest: str
    count: int
    num_bytes: int


def identify(paths: list[Path]) -> FilesDigest:
    """Hashes the paths, sizes and times of files, in this order. Raises ConfigError if one cannot be read."""
    digest = hashlib.sha256()
    num_bytes = 0
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise ConfigError(
                f"{path}: expected a readable file, got {error.strerror!r}; correct its path or permissions"
            ) from None
        digest.update(f"{path.absolute()}\n{stat.st_size}\n{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
        num_bytes += stat.st_size
    return FilesDigest(digest.hexdigest(), len(paths), num_bytes)


# -- Locks and errors -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(file: Path, wait: Callable[[str], None]) -> Iterator[bool]:
    """Holds the lock of a file in a `with` statement; if another process has it, calls `wait` with its id and waits.

    The system releases the lock when the process has ended, for whatever reason. Yields False on a file system without
    locks, where nothing is locked. An error within removes the file while it is locked; who waited then makes another.
    """
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            is_locked = _wait_for_lock(descriptor, wait)
            if is_locked and not _is_at(descriptor, file):
                continue
            try:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                yield is_locked
            except BaseException:
                if is_locked:
                    file.unlink(missing_ok=True)
                raise
            return
        finally:
            _close_lock(descriptor)


def _wait_for_lock(descriptor: int, wait: Callable[[str], None]) -> bool:
    """Locks an open file, see `_locked`; returns False on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return False
        wait(os.read(descriptor, 20).decode(errors="replace").strip() or "unknown")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return True


def _is_at(descriptor: int, file: Path) -> bool:
    """True if an open file still has its name. The lock of a file that another process removed protects nothing."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _close_lock(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough: a forked child has the file open too
    os.close(descriptor)


def _remove_leftovers(root: Path, own: str) -> None:
    """Removes temporary folders of ended processes: their entry's lock is free, or held by this process (`own`)."""
    for folder in root.glob("*.tmp"):
        entry = folder.name.partition(".")[0]
        if entry == own:
            shutil.rmtree(folder, ignore_errors=True)
            continue
        file = root / f"{entry}.lock"
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, file):
                shutil.rmtree(folder, ignore_errors=True)
                file.unlink()
        except OSError:
            pass  # a live process writes there
        finally:
            _close_lock(descriptor)


def _say_waiting(say: Callable[[str], None], name: str, holder: str) -> None:
    say(f"data: process {holder} is tokenising {name} at the moment; waiting for it")


@contextlib.contextmanager
def _writable(root: Path) -> Iterator[None]:
    """Context manager that turns an OSError of the cache's own files into a ConfigError in one line."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM and isinstance(error, NoRoom):
            need = error.needed
        elif error.errno in NO_ROOM:
            need = "more room"
        else:
            raise ConfigError(
                f"data_cache: expected a folder that can be written, got {str(root)!r} ({error.strerror or error}); "
                "choose another one"
            ) from error
        free = shutil.disk_usage(next(p for p in (root, *root.parents) if p.exists())).free
        full = f"a full disk ({free / 2**20:,.1f} MiB free without what was written)"
        got = error.strerror if error.errno == errno.EDQUOT else full
        raise ConfigError(
            f"data_cache: expected {need} in {root}, got {got}; free some, or choose another folder"
        ) from error


class NoRoom(OSError):
    """Raised if the disk is full. needed: the room that the whole entry takes, in words."""

    def __init__(self, error: OSError, needed: str):
        super().__init__(error.errno, error.strerror)
        self.needed = needed
