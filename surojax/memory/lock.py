"""Locks for folders: two processes that write the same checkpoints or layers would ruin both."""

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from surojax.errors import ConfigError

CHANGE = "choose another folder"
CHECKS, CHECK_S = 5, 0.02  # how often a lock is tried again, and after how many seconds
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # on some network file systems


class Lock(NamedTuple):
    """A locked file. descriptor: of the open file."""

    file: Path
    descriptor: int

    def lost(self) -> str:
        """Returns "" while the file is there, "removed" if nothing has its name, and "replaced" if another file has."""
        try:
            there = os.stat(self.file)
        except FileNotFoundError:
            return "removed"
        except OSError:  # of a network file system, which may answer again
            return ""
        own = os.fstat(self.descriptor)
        return "" if (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino) else "replaced"


@contextlib.contextmanager
def locked(file: Path, setting: str) -> Iterator[Lock]:
    """Locks `file` for this run, within a `with` statement; creates it if it does not exist.

    setting: the name of the setting that chose the file's folder, for errors. The system releases the lock when the
    process and any children that it forked have ended, for whatever reason. Raises ConfigError if another run has the
    lock or the file cannot be opened. On a file system without locks nothing is locked.
    """
    try:
        check_regular(file)
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise ConfigError(f"{setting}: expected {file} to be writable, got: {error.strerror}; {CHANGE}") from error
    try:
        for others_may_check in (*[True] * CHECKS, False):  # `check_unlocked` has a lock for an instant
            try:
                _lock(fd, fcntl.LOCK_EX, file, setting)
                break
            except ConfigError:
                if not others_may_check:
                    raise
                time.sleep(CHECK_S)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield Lock(file, fd)
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a forked child has the file open too
        os.close(fd)


def check_unlocked(file: Path, setting: str) -> None:
    """Raises ConfigError if another run has locked `file`; creates and writes nothing. setting: see `locked`."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return  # there is none, or `locked` says what is wrong with it
    try:
        _lock(fd, fcntl.LOCK_SH, file, setting)
    finally:
        os.close(fd)


def _lock(fd: int, kind: int, file: Path, setting: str) -> None:
    """Locks an open file, without waiting. Raises ConfigError if another process has a lock that prevents it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            what = f"{file.parent} is used by another run (process {_holder(fd)})"
            raise ConfigError(f"{setting}: {what}; {CHANGE}, or wait for it") from error


def check_regular(path: Path) -> None:
    """Raises OSError unless there is nothing at this path, or a regular file: a symbolic link is not followed."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "it is a symbolic link, and what it leads to would be overwritten", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a folder, a pipe or a device", str(path))


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
        return os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
    return "unknown"
