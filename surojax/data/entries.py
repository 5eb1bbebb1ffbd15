"""Opens an entry of the cache: maps its files, and compares them with what was written.

Hashing takes a second for about a GB, so it is done once: an entry remembers the sizes and times of its files, and
those that have others since are compared again. Damage that changes neither, as of a disk's own, is not found.
"""

import contextlib
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from surojax.untrusted import check_file, read_json

META = "meta.json"
DTYPES = {
    "tokens": np.dtype(np.uint16),
    "trained": np.dtype(np.bool_),
    "offsets": np.dtype(np.int64),
}  # others: float32
ROUTES = "routes"  # experts that a token was sent to, see rollouts.py
OF_INPUTS = (ROUTES,)  # arrays of numbers that are about inputs, and have several for each token
TRAIN = "train"
HELD_OUT = "held_out"
CHECKED = "checked.json"
_BLOCK = 1 << 24  # bytes hashed at a time


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised examples, one after the other. The arrays may be mapped files.

    tokens: uint16 [tokens], or uint32 if the vocabulary has more than 65,536 ids. Documents end with end-of-sequence.
    num_bytes: length of the documents' text in UTF-8, without the end-of-sequence tokens; 0 if they are not plain text.
    fingerprint: first 16 hexadecimal digits of the SHA-256 of tokens, then trained and offsets if not all are trained.
    name: source of the examples, for messages.
    offsets: int64 [examples + 1], where each example starts and the last one ends; None: one example.
    trained: bool [tokens], whether a token is a target of the loss; None: all are.
    numbers: further arrays by name, float32: [tokens] about a token as a label, [tokens, width] about it as an input if
    OF_INPUTS names them.
    """

    tokens: np.ndarray
    num_bytes: int
    fingerprint: str
    name: str
    offsets: np.ndarray | None = None
    trained: np.ndarray | None = None
    mappings: tuple[mmap.mmap, ...] = ()
    numbers: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def num_examples(self) -> int:
        """Number of documents, conversations or other examples."""
        return len(self.bounds) - 1

    @property
    def bounds(self) -> np.ndarray:
        """Where each example starts and the last one ends, int64 [examples + 1], also for a corpus of one example."""
        return np.array([0, len(self.tokens)]) if self.offsets is None else self.offsets

    def release(self) -> None:
        """Frees the memory of mapped pages. They are read again from the system's file cache."""
        for mapping in self.mappings:
            mapping.madvise(mmap.MADV_DONTNEED)


def open_entry(
    target: Path, name: str, say: Callable[[str], None] | None = None
) -> tuple[dict[str, Corpus], dict[str, Any]] | None:
    """Opens an entry; returns its parts and meta data, or None if it is missing, incomplete or damaged.

    name: of the data. say: prints why an entry is not used although it is there.
    """
    try:
        meta = read_json(target / META)
        if meta.pop("digest") != meta_digest(meta):
            raise ValueError(f"{META} is not as it was written")
        if TRAIN not in meta["parts"]:
            raise ValueError(f"{META} has no {TRAIN}")
        checked = _remembered(target)
        corpora = {part: _open_part(target, part, info, name, checked) for part, info in meta["parts"].items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if say and os.path.lexists(target):  # else it is below a file
            say(f"data: {target} is damaged ({' '.join(str(error).split())[:200]}) and is written anew")
        return None
    if any(checked.get(file) != now for file, now in _times(target, meta).items()):
        remember(target, meta)
    return corpora, meta


def meta_digest(meta: Mapping[str, Any]) -> str:
    """Hashes an entry's meta data, which have the digests of its files."""
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def remember(target: Path, meta: Mapping[str, Any]) -> None:
    """Writes the sizes and times that an entry's files have now, which are as they were written."""
    unfinished = target / f"{CHECKED}.{os.getpid()}.tmp"
    with contextlib.suppress(OSError):  # a cache that cannot be written is compared each time
        unfinished.write_text(json.dumps(_times(target, meta)))
        unfinished.replace(target / CHECKED)


def _remembered(target: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        checked = read_json(target / CHECKED)
        return checked if isinstance(checked, dict) else {}
    return {}


def _times(target: Path, meta: Mapping[str, Any]) -> dict[str, list[int]]:
    """Returns [bytes, time of the last change, of it or of what is known about it] of each file, times in ns."""
    files = [f"{part}/{file}.bin" for part, info in meta["parts"].items() for file in info["sizes"]]
    status = {file: (target / file).stat() for file in files}
    return {file: [x.st_size, x.st_mtime_ns, x.st_ctime_ns] for file, x in status.items()}


def _open_part(target: Path, part: str, info: dict[str, Any], name: str, checked: Mapping[str, Any]) -> Corpus:
    """Maps the files of a part. Raises ValueError if one is not as it was written."""
    dtypes = DTYPES | {"tokens": np.dtype(info["dtype"])}
    widths = info.get("widths", {})
    arrays = {}
    mappings = []
    for file, size in info["sizes"].items():
        path = target / part / f"{file}.bin"
        check_file(path)
        with path.open("rb") as opened:
            status = os.fstat(opened.fileno())
            if status.st_size != size:
                raise ValueError(f"{path} has another size than {size}")
            content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
            now = [size, status.st_mtime_ns, status.st_ctime_ns]
            if checked.get(f"{part}/{file}.bin") != now and _digest(content) != info["digests"][file]:
                raise ValueError(f"{path} has other content")
        if isinstance(content, mmap.mmap):
            mappings.append(content)
        arrays[file] = np.frombuffer(content, dtypes.get(file, np.dtype(np.float32)))
    return Corpus(
        arrays["tokens"],
        info["bytes"],
        info["fingerprint"],
        f"{name} (held out)" if part == HELD_OUT else name,
        arrays["offsets"],
        arrays.get("trained"),
        tuple(mappings),
        {
            name: x.reshape(-1, widths[name]) if name in widths else x
            for name, x in arrays.items()
            if name not in DTYPES
        },
    )


def _digest(content: mmap.mmap | bytes) -> str:
    """Hashes a mapped file, of which a block at a time is in memory."""
    digest = hashlib.sha256()
    for start in range(0, len(content), _BLOCK):
        digest.update(content[start : start + _BLOCK])
        if isinstance(content, mmap.mmap):
            content.madvise(mmap.MADV_DONTNEED)
    return digest.hexdigest()
