"""Reads a checkpoint's master weights, one layer of one array at a time, without a plan or devices."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from surojax.run.on_disk import Held, array_spec, read_meta, readable

PIECE = 1 << 22  # words of which the checksum is computed at a time


class StoredMaster:
    """Master weights by name, "blocks.attention.wq" or "outer.embed"; see `checkpoint` for the files.

    Raises CheckpointError if a file is damaged or missing. The checksum of an array is compared when the last of its
    layers is read.
    """

    def __init__(self, path: Path):
        self.path = path
        self._held = Held(path)
        self.meta = read_meta(path)
        self._arrays: dict[str, Any] = {}
        self._sums: dict[str, dict[int, int]] = {}

    def _array(self, name: str) -> Any:
        """Opens an array, without reading it."""
        if name not in self._arrays:
            self._arrays[name] = ts.open(array_spec(self.path / "master", name), open=True, read=True).result()
        return self._arrays[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array; segments' arrays begin with the number of layers."""
        with readable(self.path):
            return (self._layers(name), *self._array(name).shape[1:])

    def _layers(self, name: str) -> int:
        """The first size of an array's shape, without the padding of stages (step/padding.py)."""
        return self.meta.get("layers", {}).get(name.partition(".")[0], self._array(name).shape[0])

    def read(self, name: str, l: int | None) -> np.ndarray:
        """Reads layer l of a segment's array, or an outer array (l is None), in the dtype of the master weights."""
        with readable(self.path):
            array = self._array(name)
            values = np.asarray((array if l is None else array[l]).read().result())
            start = 0 if l is None else l * math.prod(array.shape[1:])
            sums = self._sums.setdefault(name, {})
            sums[l or 0] = _sum(values, start)
            key = f"master/{name.replace('.', '/')} {values.dtype}"
            complete = l is None or len(sums) == self._layers(name)
            if complete and self.meta["checksums"][key] != sum(sums.values()) % 2**32:
                raise ValueError(f"{key} is damaged: not the checksum it was written with")
            return values


def _sum(x: np.ndarray, start: int) -> int:
    """Computes these words' terms of an array's checksum (see checksum.py). start: index of the first word."""
    words = np.ascontiguousarray(x).reshape(-1).view(f"u{x.dtype.itemsize}")
    total = 0
    for i in range(0, words.size, PIECE):
        piece = words[i : i + PIECE].astype(np.uint32)
        index = np.arange(start + i, start + i + piece.size, dtype=np.uint64).astype(np.uint32)
        total += int(np.sum(piece * (2 * index + 1), dtype=np.uint32))
    return total % 2**32
