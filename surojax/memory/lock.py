"""Locks for folders: two processes that write the same checkpoints or layers would ruin both."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from surojax.errors import ConfigError

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # on some network file systems


@contextlib.contextmanager
def locked(file: Path, setting: str) -> Iterator[None]:
    """Locks `file` for this run, within a `with` statement; creates it if it does not exist.

    setting: the name of the setting that chose the file's folder, for errors. The system releases the lock when the
    process and any children that it forked have ended, for whatever reason. Raises ConfigError if another run has the
    lock or the file cannot be opened. On a file system without locks nothing is locked.
    """
    change = "choose another folder"
    try:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"{setting}: expected {file} to be writable, got: {error.strerror}; {change}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                what = f"{file.parent} is used by another run (process {_holder(fd)})"
                raise ConfigError(f"{setting}: {what}; {change}, or wait for it") from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a forked child has the file open too
        os.close(fd)


def share(file: Path) -> int | None:
    """Opens a file with a lock that others may have too; it ends when the descriptor is closed.

    Returns None if the file cannot be opened. On a file system without locks nothing is locked.
    """
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def is_shared(file: Path) -> bool:
    """Returns True if a process has locked the file by `share`."""
    try:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in NO_LOCKS
    finally:
        os.close(fd)
    return False


def _holder(fd: int) -> str:
    """The process id that the run with the lock wrote into the file."""
    with contextlib.suppress(OSError):  # on some systems a locked file cannot be read
        return os.read(fd, 20).decode(errors="replace").strip() or "unknown"
    return "unknown"
