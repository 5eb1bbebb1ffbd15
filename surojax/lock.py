"""Folders that one run at a time may use: two processes that write the same checkpoints or layers ruin both."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from surojax.errors import ConfigError


@contextlib.contextmanager
def locked(file: Path, setting: str) -> Iterator[None]:
    """Within it `file`, made where it is not there, is this process's: its folder is what a setting names.

    The system lets go of it when the process ends, however that is. Raises ConfigError when another run holds it; some
    network file systems have no locks, and there nobody does.
    """
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(fd, 20).decode(errors="replace").strip()
            raise ConfigError(
                f"{setting}: {file.parent} is used by another run (process {holder or 'unknown'}); choose another "
                "folder, or wait for it"
            ) from error
        except OSError:  # no locks here
            pass
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(fd)
