"""A file in stripes over several folders: on several disks it is as fast as the disks together."""

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from surojax.memory.aligned import aligned
from surojax.memory.lock import check_regular

STRIPE = 16 << 20  # bytes, and the most that one request reads or writes
SHARE_RANGE = 0x4020940D  # FICLONERANGE of Linux: (descriptor, offset, bytes, offset in the other file)


class Busy:
    """Measures for how long at least one of several threads was within its `with` statements."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._lock = threading.Lock()
        self._threads = 0
        self._since = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._threads:
                self._since = time.perf_counter()
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                self._ended_s += time.perf_counter() - self._since

    @property
    def seconds(self) -> float:
        """Seconds until now."""
        with self._lock:
            return self._ended_s + (time.perf_counter() - self._since if self._threads else 0.0)


class StripedFile:
    """Files in several folders that are read and written as one.

    Stripe i of the whole, of `STRIPE` bytes, is in file i modulo their number, behind those with lower numbers. One
    file is the whole itself.

    is_direct: whether all are read and written past the page cache; known once they are open. busy: how long they have
    been read or written.
    """

    def __init__(self, paths: Sequence[Path]):
        self.paths = list(paths)
        self.is_direct = False
        self.busy = Busy()
        self._fds: list[int] = []

    def sizes(self, size: int) -> list[int]:
        """Bytes of each file if the whole has so many."""
        n = len(self.paths)
        stripes, rest = divmod(size, STRIPE)
        return [STRIPE * (stripes // n + (i < stripes % n)) + rest * (i == stripes % n) for i in range(n)]

    def spans(self, begin: int, size: int) -> list[tuple[int, int]]:
        """Splits a range of bytes into requests: (offset from `begin`, bytes) of each."""
        first = STRIPE - (begin % STRIPE if len(self.paths) > 1 else 0)
        starts = [0, *range(first, size, STRIPE)]
        return [(start, end - start) for start, end in zip(starts, [*starts[1:], size], strict=True)]

    @property
    def is_open(self) -> bool:
        """True from `open` to `close`."""
        return bool(self._fds)

    def open(self, size: int, *, takes_room: bool) -> None:
        """Opens the files, past the page cache if the file system can. size: of the whole.

        takes_room: all of it is allocated now, so that a full disk is found. Raises OSError with the name of the file;
        then none is open, and none has room.
        """
        opened: list[int] = []
        self.is_direct = hasattr(os, "O_DIRECT")
        for path, share in zip(self.paths, self.sizes(size), strict=True):
            try:
                opened.append(self._open(path))
                if takes_room:
                    os.ftruncate(opened[-1], share)
                    if share:
                        os.posix_fallocate(opened[-1], 0, share)
            except OSError as error:
                for fd in opened:
                    if takes_room:
                        os.ftruncate(fd, 0)
                    os.close(fd)
                error.filename = str(path)
                raise
        self._fds = opened

    def _open(self, path: Path) -> int:
        check_regular(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self.is_direct = False
        return os.open(path, flags, 0o600)

    def check_unchanged(self, size: int) -> None:
        """Raises OSError with the name of a file that was removed, replaced by another, or made shorter or longer.

        size: of the whole.
        """
        for path, fd, share in zip(self.paths, self._fds, self.sizes(size), strict=True):
            own = os.fstat(fd)
            try:
                there = os.lstat(path)
            except OSError as error:
                raise OSError(errno.EIO, "something removed it", str(path)) from error
            if (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
                raise OSError(errno.EIO, "something put another file in its place", str(path))
            if own.st_size != share:
                size_now = f"it has {own.st_size:,} bytes in place of {share:,}"
                raise OSError(errno.EIO, f"{size_now}: something else wrote to it", str(path))

    def paths_of(self, begin: int, size: int) -> list[Path]:
        """The files that have a range of bytes of the whole."""
        stripes = range(begin // STRIPE, -(-(begin + size) // STRIPE))
        numbers = sorted({stripe % len(self.paths) for stripe in stripes[: len(self.paths)]})
        return [self.paths[number] for number in numbers]

    def read(self, view: memoryview, at: int) -> None:
        """Reads the bytes at this offset of the whole file, one of `spans`, into a view. Raises OSError."""
        with self.busy:
            self._all(view, at, self._read)

    def _read(self, fd: int, view: memoryview, at: int) -> int:
        n = os.preadv(fd, [view], at)
        self._leave_cache(fd, at, n)
        return n

    def write(self, view: memoryview, at: int) -> None:
        """Writes a view at this offset of the whole file, one of `spans`. Raises OSError."""
        with self.busy:
            self._all(view, at, os.pwrite)

    def _all(self, view: memoryview, at: int, some: Callable[[int, memoryview, int], int]) -> None:
        """Calls some(descriptor, rest of the view, offset in the file), which returns how much it did, until all is."""
        stripe, inside = divmod(at, STRIPE)
        behind, number = divmod(stripe, len(self.paths))
        at = behind * STRIPE + inside
        try:
            while view:
                n = some(self._fds[number], view, at)
                if n == 0:
                    raise OSError(errno.EIO, "it is shorter than it was made: something else wrote to it")
                view = view[n:]
                at += n
        except OSError as error:
            error.filename = str(self.paths[number])
            raise

    def share(self, at: int, size: int, path: Path) -> bool:
        """Makes a file of the bytes at this offset of the whole, which takes no room: both files have the same blocks
        until one of them is written to.

        Returns False, and leaves no file, where that cannot be: with several folders, on another file system, or on
        one without shared blocks. XFS and Btrfs have them. at: a multiple of `ALIGN`.
        """
        if len(self.paths) > 1:
            return False
        with path.open("xb") as new:
            try:
                fcntl.ioctl(new, SHARE_RANGE, struct.pack("qQQQ", self._fds[0], at, aligned(size), 0))
                new.truncate(size)
                os.fsync(new)
                return True
            except OSError:
                path.unlink()
                return False

    def sync(self) -> None:
        """Waits until the disks keep what was written. Raises OSError."""
        for path, fd in zip(self.paths, self._fds, strict=True):
            try:
                os.fdatasync(fd)
            except OSError as error:
                error.filename = str(path)
                raise
            self._leave_cache(fd, 0, 0)

    def _leave_cache(self, fd: int, at: int, size: int) -> None:
        """Takes bytes out of the page cache, where a file that is not direct would push out all else; size 0: to its
        end."""
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, at, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Closes the files."""
        while self._fds:
            os.close(self._fds.pop())
