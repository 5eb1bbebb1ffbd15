"""Reads and writes files in the safetensors format: a JSON header with every tensor's place, then the tensors.

    8 bytes    length of the header, little endian
    header     JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}}, offsets from the end of the header
    the rest   the tensors' bytes, row by row, little endian

Tensors are read and written one at a time, with plain reads and writes. What is read through a memory map stays in
resident memory, and the safetensors library gives numpy no float8.
"""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from surojax.untrusted import check_file, parse_json

NUMPY_DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
NAMES_OF_DTYPES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
PIECE_BYTES = 64 << 20  # bytes read at a time to take a part of the columns from rows
MAX_HEADER = 32 << 20  # bytes, of 200,000 tensors


class TensorEntry(NamedTuple):
    """One tensor's entry in a file's header. start: offset of the tensor's bytes in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int


class Shard:
    """A safetensors file, open for reading. Raises OSError if it cannot be read, ValueError if it is damaged.

    entries: by name. metadata: what the file says beside its tensors.
    """

    def __init__(self, path: Path):
        self.path = path
        self.entries: dict[str, TensorEntry] = {}
        size = check_file(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise ValueError(f"its header says {length} bytes, the file has {size}")
            header = parse_json(file.read(length))
        if not isinstance(header, dict):
            raise ValueError(f"its header is {type(header).__name__}, not an object")
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        if not isinstance(self.metadata, dict):
            raise ValueError(f"__metadata__ of its header is {type(self.metadata).__name__}, not an object")
        spans = []
        for name, entry in header.items():
            self.entries[name], after = _entry(name, entry, 8 + length)
            spans.append((self.entries[name].start, after, name))
        end = max((after for _, after, _ in spans), default=8 + length)
        if end != size:
            raise ValueError(f"its header says {end} bytes, the file has {size}")
        end = 8 + length
        for start, after, name in sorted(spans):
            if start != end:
                raise ValueError(f"{name} begins at byte {start}, where the tensors before it end at {end}")
            end = after

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor in the dtype that it is stored in.

        Raises OSError, or ValueError if the file became shorter.
        """
        dtype, shape, start = self.entries[name]
        with self.path.open("rb") as file:
            numbers = np.fromfile(file, dtype, math.prod(shape), offset=start)
        return numbers.reshape(shape)

    def read_part(self, name: str, part: int, parts: int, axis: int) -> np.ndarray:
        """Reads one of so many equal parts of a tensor along its first or second axis.

        To take columns, all rows are read piece by piece. Raises as `read` does.
        """
        dtype, shape, start = self.entries[name]
        size = shape[axis] // parts
        if axis == 0:
            count = size * math.prod(shape[1:])
            with self.path.open("rb") as file:
                numbers = np.fromfile(file, dtype, count, offset=start + part * count * dtype.itemsize)
            return numbers.reshape(size, *shape[1:])
        rows, *of_row = shape
        found = np.empty((rows, size, *of_row[1:]), dtype)
        numbers_of_row = math.prod(of_row)
        step = max(1, PIECE_BYTES // max(1, numbers_of_row * dtype.itemsize))
        with self.path.open("rb") as file:
            file.seek(start)
            for first in range(0, rows, step):
                n = min(step, rows - first)
                piece = np.fromfile(file, dtype, n * numbers_of_row).reshape(n, *of_row)
                found[first : first + n] = piece[:, part * size : (part + 1) * size]
        return found


def _entry(name: str, entry: dict, data: int) -> tuple[TensorEntry, int]:
    """Reads a tensor's entry in the header: (its place, offset of its end). data: offset of the first tensor."""
    try:
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        given = entry["dtype"]
        if not (isinstance(given, str) and all(type(number) is int for number in (*shape, begin, end))):
            raise ValueError(f"{given!r}, {shape} and {begin!r}, {end!r} are not a dtype, sizes and offsets")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its header says nothing useful of {name}: {error!r}") from error
    if given not in NUMPY_DTYPES:
        raise ValueError(f"{name} has the dtype {given}, which is not known")
    dtype = NUMPY_DTYPES[given]
    if min(begin, *shape, 0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} of shape {[*shape]} in {given} has {end - begin} bytes")
    return TensorEntry(dtype, shape, data + begin), data + end


class StoredTensor(NamedTuple):
    """Shape and dtype of a tensor to write."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        """The tensor's size in a file, bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_shard(
    path: Path, planned: dict[str, StoredTensor], tensors: Iterable[np.ndarray], metadata: dict[str, str] | None = None
) -> None:
    """Writes a file with these tensors. Raises OSError.

    planned: by name. tensors: in the same order, as planned; the next one is asked for when the last one is written.
    metadata: what the file says beside its tensors.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"} | (metadata or {})}
    end = 0
    for name, (shape, dtype) in planned.items():
        begin, end = end, end + planned[name].bytes
        header[name] = {"dtype": NAMES_OF_DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for (name, stored), tensor in zip(planned.items(), tensors, strict=True):
            assert StoredTensor(tensor.shape, tensor.dtype) == stored, (name, tensor.shape, tensor.dtype)
            file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8))
        file.flush()
        os.fsync(file.fileno())
