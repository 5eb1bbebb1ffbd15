"""Folders that one run at a time may use: two processes that write the same checkpoints or layers ruin both."""

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
    """Within it `file`, made where it is not there, is this run's: its folder is what a setting names.

    The system lets go of it when the process ends, however that is (and its children, where it has forked any). Raises
    ConfigError when another run holds it, or it cannot be opened. Where there are no locks, nobody holds it.
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
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked in between has it open too
        os.close(fd)


def _holder(fd: int) -> str:
    with contextlib.suppress(OSError):  # some systems keep others from reading what is locked
        return os.read(fd, 20).decode(errors="replace").strip() or "unknown"
    return "unknown"
