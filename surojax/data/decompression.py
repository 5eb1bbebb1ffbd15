"""Opens files as streams of bytes, and decompresses files with the suffix of a compressed format.

What is decompressed is never held as a whole. A file that unfolds to implausibly many bytes is refused on the way.
"""

import io
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from surojax.errors import ConfigError

UNFOLDS = 1000  # times as many bytes as a file has; text compresses to a third or a tenth
SMALL = 16 << 20  # bytes that any file may unfold to
_BUFFER = 1 << 18


def _open_gzip(path: Path) -> Any:
    import gzip

    return gzip.open(path)


def _open_bzip2(path: Path) -> Any:
    import bz2

    return _Members(path, bz2.BZ2Decompressor)


def _open_xz(path: Path) -> Any:
    import lzma

    return _Members(path, lzma.LZMADecompressor)


def _open_zstd(path: Path) -> Any:
    import pyarrow  # Python has zstd from 3.14 on

    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")


# By the end of a file's name. Modules are imported when they are used: a Python may have been built without one.
COMPRESSIONS: dict[str, Callable[[Path], Any]] = {
    ".gz": _open_gzip,
    ".zst": _open_zstd,
    ".bz2": _open_bzip2,
    ".xz": _open_xz,
}
MARKS = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".bz2": b"BZh", ".xz": b"\xfd7zXZ\x00"}  # of the files
COMPRESSIBLE = (".csv", ".json", ".jsonl", ".txt")  # formats that are read from their beginning to their end


def format_of(name: str | PurePath) -> str:
    """Returns the end of a file's name that says its format, in small letters: ".jsonl" of a.jsonl and of A.jsonl.gz.

    The end itself if it is that of a compressed file of another format, which cannot be read.
    """
    path = PurePath(str(name).lower())
    inner = PurePath(path.stem).suffix
    return inner if path.suffix in COMPRESSIONS and inner in COMPRESSIBLE else path.suffix


def stem(path: str) -> str:
    """Returns a file's name without the ends that say its format and its compression."""
    name = PurePath(path)
    return PurePath(name.stem).stem if name.suffix.lower() != format_of(name) else name.stem


def open_bytes(path: Path) -> BinaryIO:
    """Opens a file, decompressing it if its name ends in one of COMPRESSIONS.

    Raises OSError if it cannot be opened. Reading raises ConfigError where a compressed file is damaged or incomplete,
    or has more bytes than UNFOLDS and SMALL allow.
    """
    if path.suffix.lower() not in COMPRESSIONS:
        return path.open("rb")
    return io.BufferedReader(_Decompressed(path), _BUFFER)


def size_of(path: Path) -> int:
    """Counts the bytes of a file, decompressed. Raises as `open_bytes`."""
    if path.suffix.lower() not in COMPRESSIONS:
        return path.stat().st_size
    with open_bytes(path) as file:
        return sum(map(len, iter(lambda: file.read(_BUFFER), b"")))


def skip(file: BinaryIO, count: int) -> None:
    """Skips the next `count` bytes, or those that are left, of a stream that may not be able to seek."""
    if file.seekable():
        file.seek(count, io.SEEK_CUR)
        return
    while count and (passed := len(file.read(min(count, _BUFFER)))):
        count -= passed


class _Members:
    """The bytes of compressed members, one after the other. The modules' own files ignore a member that is damaged.

    decompressor: makes one for each member.
    """

    def __init__(self, path: Path, decompressor: Callable[[], Any]):
        self._file = path.open("rb")
        self._make = decompressor
        self._member = decompressor()

    def read(self, most: int) -> bytes:
        """Returns the next bytes, at most so many, b"" at the end. Raises EOFError if the last member is incomplete."""
        while True:
            more = b""
            if self._member.eof:
                rest = (self._member.unused_data or self._file.read(_BUFFER)).lstrip(b"\0")  # padding of a member
                if not rest:
                    return b""
                self._member, more = self._make(), rest
            elif self._member.needs_input and not (more := self._file.read(_BUFFER)):
                raise EOFError("it ends too early")
            if content := self._member.decompress(more, most):
                return content

    def close(self) -> None:
        self._file.close()


class _Decompressed(io.RawIOBase):
    """The bytes of a compressed file."""

    def __init__(self, path: Path):
        self._path = path
        self._kind = path.suffix.lower()
        self._most = max(UNFOLDS * path.stat().st_size, SMALL)
        self._count = 0
        self._stream = self._checked(self._open)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        content = self._checked(lambda: self._stream.read(len(buffer)))
        self._count += len(content)
        if self._count > self._most:
            raise ConfigError(
                f"{self._path}: expected a compressed file of at most {self._most:,} bytes, {UNFOLDS} times as many as "
                "it has, got more; remove rows that repeat, or decompress it"
            )
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        if not self.closed and hasattr(self, "_stream"):
            self._stream.close()
        super().close()

    def _open(self) -> Any:
        if not self._path.stat().st_size:
            raise EOFError("it is empty")
        return COMPRESSIONS[self._kind](self._path)

    def _checked(self, call: Callable[[], Any]) -> Any:
        """Calls a function of the decompressor. Raises ConfigError for what it raises of damaged files."""
        try:
            return call()
        except ImportError as error:
            reason, advice = f"a Python without it ({error})", "decompress the file"
        except Exception as error:  # zlib.error, EOFError, LZMAError, pyarrow's; OSError without a number
            if isinstance(error, OSError) and error.errno:
                raise
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            reason, advice = f"one that cannot be read ({reason})", "write or download it again"
            if not self._may_be_compressed():
                advice = f"remove {self._kind} from its name if it is not compressed"
        raise ConfigError(f"{self._path}: expected a complete {self._kind} file, got {reason}; {advice}") from None

    def _may_be_compressed(self) -> bool:
        mark = MARKS[self._kind]
        with self._path.open("rb") as file:
            return mark.startswith(file.read(len(mark)))
