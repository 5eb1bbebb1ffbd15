"""Labels of samples by a teacher, in a folder, from which a run with objective="distill" learns.

    FOLDER/teacher.json                    whose labels they are: model, tokenizer, sizes
    FOLDER/DIGEST OF SAMPLES/00000000      labels of samples 0 to 15: ids int32 [16, S, K], then log-probabilities
                                           float32 [16, S, K + 1]; the last file has the rest of the samples
    FOLDER/DIGEST OF SAMPLES/sums/00000000 uint32 [16], the CRC-32 of each sample's labels in that file

If labels are last hidden states, a file has these [16, S, E], and there is

    FOLDER/head                            the matrix of the teacher's head [V, E], in the dtype of the hidden states
    FOLDER/sums/head                       uint32, its CRC-32

A file appears when it is complete and on the disk, so that labelling which is killed goes on with the next one. The
digest is of tokens, documents and sequence_len: other data, or another tokenizer or template, has no labels.

What is read is compared with its sum, if the folder has one, and its values are checked each time: 1 ms for a MB of
labels, which a thread reads while steps compute.
"""

import json
import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from surojax.data.batches import Mixture
from surojax.data.rollouts import ROUNDING
from surojax.data.samples import IGNORED, DerivedSamples, Sample, Samples, fingerprint_of
from surojax.errors import ConfigError, shown
from surojax.untrusted import check_file, expanded, parse_json, read_bytes

AGAIN = "remove that file and its sum, and run `surojax distill` again, which writes those that are missing"
DTYPES = ("float32", "bfloat16", "float16")  # a teacher's hidden states may have
TEACHER_FILE = "teacher.json"
HEAD_FILE = "head"
SUMS = "sums"
PER_FILE = 16  # samples
MOST_BYTES = 2**16  # of teacher.json
PAGE = "docs/distillation.md says how to make them"


class Teacher(NamedTuple):
    """The teacher that made a folder's labels: its identity and the labels' settings.

    teacher: digest of the model and of the settings that its numbers depend on. name: of the model, for messages.
    tokenizer: its name with a digest. vocab_size: V of the teacher. top_k, temperature: see `objectives.distillation`;
    both are 0 if labels are last hidden states. hidden_size: E of these, else 0. dtype: of these.
    """

    teacher: str
    name: str
    tokenizer: str
    vocab_size: int
    top_k: int
    temperature: float
    hidden_size: int = 0
    dtype: str = ""

    @property
    def arrays(self) -> "tuple[LabelArray, ...]":
        """Dtype and width of the arrays that are a token's label."""
        if self.hidden_size:
            return (LabelArray(np.dtype(self.dtype), self.hidden_size),)
        return LabelArray(np.dtype(np.int32), self.top_k), LabelArray(np.dtype(np.float32), self.top_k + 1)


class LabelArray(NamedTuple):
    """One array of labels. width: numbers per token."""

    dtype: np.dtype
    width: int


@dataclass(frozen=True)
class Labels:
    """The labels of one dataset's samples in a folder.

    sequence_len: S. count: number of samples. arrays: of a label.
    """

    folder: Path
    sequence_len: int
    arrays: tuple[LabelArray, ...]
    count: int

    @classmethod
    def of(cls, folder: Path, samples: Samples, sequence_len: int, teacher: Teacher) -> "Labels":
        """Locates the labels of these samples, written or not, in a teacher's folder."""
        digest = fingerprint_of([samples.fingerprint, str(sequence_len), str(len(samples))])
        return cls(folder / digest, sequence_len, teacher.arrays, len(samples))

    @property
    def files(self) -> list[range]:
        """The range of samples in each file."""
        return [range(i, min(i + PER_FILE, self.count)) for i in range(0, self.count, PER_FILE)]

    @property
    def missing(self) -> list[int]:
        """The numbers of files that are missing, or have a wrong size."""
        return [number for number, rows in enumerate(self.files) if not self._is_there(number, len(rows))]

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        """Reads the labels of a sample: arrays [S, width], int32 or float32.

        Raises ConfigError if they cannot be read, or are not those that were written.
        """
        number, row = divmod(index, PER_FILE)
        rows = min(PER_FILE, self.count - PER_FILE * number)
        arrays, begin, found = [], 0, 0
        for dtype, width in self.arrays:
            sample_numbers = self.sequence_len * width
            offset = begin + row * sample_numbers * dtype.itemsize
            x = self._read(number, dtype, sample_numbers, offset).reshape(self.sequence_len, width)
            found = zlib.crc32(x.view(np.uint8), found)
            arrays.append(x if dtype == np.int32 else x.astype(np.float32))
            begin += rows * sample_numbers * dtype.itemsize
        _check_sum(self._path(number), found, row, f"sample {index} in ")
        return tuple(arrays)

    def _read(self, number: int, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
        path = self._path(number)
        try:
            check_file(path)
            numbers = np.fromfile(path, dtype, count, offset=offset)
            if len(numbers) < count:
                raise OSError("the file is too short")
            return numbers
        except OSError as error:
            raise ConfigError(f"distill_path: expected labels in {path} ({error}); {AGAIN}") from None

    def write(self, number: int, *arrays: np.ndarray) -> None:
        """Writes a file of arrays [samples, S, width]."""
        path = self._path(number)
        pairs = zip(arrays, self.arrays, strict=True)
        arrays = tuple(np.ascontiguousarray(x, dtype) for x, (dtype, _) in pairs)
        sums = np.zeros(len(arrays[0]), np.uint32)
        for x in arrays:
            sums[:] = [zlib.crc32(row.view(np.uint8), before) for row, before in zip(x, sums.tolist(), strict=True)]
        _write_with_sums(path, [x.tobytes() for x in arrays], sums)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}"

    def _is_there(self, number: int, rows: int) -> bool:
        path = self._path(number)
        token_bytes = sum(dtype.itemsize * width for dtype, width in self.arrays)
        return path.is_file() and path.stat().st_size == rows * self.sequence_len * token_bytes


@dataclass(frozen=True, eq=False)
class WithLabels(DerivedSamples):
    """Samples with a teacher's labels. names: of the labels' arrays."""

    labels: Labels
    teacher: Teacher
    names: Sequence[str]

    @property
    def fingerprint(self) -> str:
        # A temperature is a float and a hidden size an int, so that labels of both kinds differ.
        which = self.teacher.hidden_size or self.teacher.temperature
        return fingerprint_of([self.samples.fingerprint, self.teacher.teacher, repr(which)])

    def __getitem__(self, index: int) -> Sample:
        """Returns a sample with its labels. Raises ConfigError if they are none."""
        sample, arrays = self.samples[index], self.labels[index]
        if reason := _wrong_values(arrays, sample["labels"] != IGNORED, self.teacher):
            raise ConfigError(
                f"distill_path: expected {reason} as the labels of sample {index} of {self.samples.name} in "
                f"{self.labels.folder}; label this data again: {PAGE}"
            )
        return sample | dict(zip(self.names, arrays, strict=True))


def _wrong_values(arrays: tuple[np.ndarray, ...], labelled: np.ndarray, teacher: Teacher) -> str:
    """Says what a sample's labels should be and are; "" if they are. labelled: bool [S], positions that are trained."""
    numbers = arrays[-1]
    low, high = float(numbers.min()), float(numbers.max())  # NaN if there is one
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"finite numbers, got {high if math.isfinite(low) else low}"
    if teacher.hidden_size:
        return ""
    if high > ROUNDING:
        return f"log-probabilities, at most 0, got {high:.4g}"
    ids = arrays[0][labelled]
    if ids.size and not (ids.min() >= 0 and ids.max() < teacher.vocab_size):
        return f"token ids below the teacher's vocab_size {teacher.vocab_size}, got {ids.min()} to {ids.max()}"
    return ""


def claim_folder(folder: str, teacher: Teacher) -> Path:
    """Returns the folder for a teacher's labels, with teacher.json. Raises ConfigError if it is another teacher's."""
    path = expanded(folder)
    if (path / TEACHER_FILE).exists():
        theirs = read_teacher(folder)
        if differing := [name for name in Teacher._fields if getattr(theirs, name) != getattr(teacher, name)]:
            name = differing[0]
            raise ConfigError(
                f"distill_path: expected a folder for labels with {name} {getattr(teacher, name)}, got {folder}, whose "
                f"labels are with {getattr(theirs, name)}; name another folder"
            )
        return path
    try:
        path.mkdir(parents=True, exist_ok=True)
        _write(path / TEACHER_FILE, [json.dumps(teacher._asdict(), indent=1).encode() + b"\n"])
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise ConfigError(
            f"distill_path: expected a folder that can be written, got {folder!r} ({error.strerror}); choose another"
        ) from error
    return path


def write_head(folder: Path, head: np.ndarray) -> None:
    """Writes the matrix `[V, E]` of a teacher's head."""
    content = np.ascontiguousarray(head).tobytes()
    _write_with_sums(folder / HEAD_FILE, [content], np.array([zlib.crc32(content)], np.uint32))


def read_head(folder: str) -> np.ndarray:
    """Reads the head `[V, E]` of a folder's teacher.

    Raises ConfigError if the file is missing, incomplete, not as it was written, or has numbers that are not finite.
    """
    teacher = read_teacher(folder)
    path = expanded(folder) / HEAD_FILE
    shape = (teacher.vocab_size, teacher.hidden_size)
    try:
        dtype = np.dtype(teacher.dtype)
        if (size := check_file(path)) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"it has {size:,} bytes")
        head = np.fromfile(path, dtype).reshape(shape)
        if not np.isfinite(head).all():
            raise ValueError("it has numbers that are not finite")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"distill_path: expected a matrix {[*shape]} of {teacher.dtype or 'numbers'} in {path} ({error}); {PAGE}"
        ) from None
    _check_sum(path, zlib.crc32(head.view(np.uint8)), 0)
    return head


def read_teacher(folder: str) -> Teacher:
    """Reads the `Teacher` of a folder's labels. Raises ConfigError if the folder has none."""
    path = expanded(folder) / TEACHER_FILE
    try:
        values = parse_json(read_bytes(path, MOST_BYTES).decode())
        teacher = Teacher(**values)
        if any(type(value) is not kind for value, kind in zip(teacher, Teacher.__annotations__.values(), strict=True)):
            raise ValueError("a value of another type")
        if reason := _wrong_numbers(teacher):
            raise ValueError(f"{TEACHER_FILE}: {reason}")
        return teacher
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"distill_path: expected a folder with a teacher's labels, got {folder!r} ({error}); {PAGE}"
        ) from None


def _wrong_numbers(teacher: Teacher) -> str:
    """Says which number or dtype of a teacher.json none of our folders has; "" if there is none."""
    states = teacher.hidden_size != 0
    fits = {
        "vocab_size": 0 < teacher.vocab_size < 2**31,
        "hidden_size": 0 <= teacher.hidden_size < 2**31,
        "top_k": teacher.top_k == 0 if states else 0 < teacher.top_k <= teacher.vocab_size,
        "temperature": teacher.temperature == 0 if states else 0 < teacher.temperature < math.inf,
        "dtype": teacher.dtype in (DTYPES if states else ("",)),
    }
    return ", ".join(f"{name} is {shown(getattr(teacher, name), 80)}" for name, fit in fits.items() if not fit)


def with_teacher_labels(
    train: Mixture,
    folder: str,
    *,
    sequence_len: int,
    tokenizer: str,
    vocab_size: int,
    top_k: int,
    temperature: float,
    hidden_size: int,
    names: Sequence[str],
) -> Mixture:
    """Adds a folder's labels to samples. vocab_size: of the student. names: of the labels' arrays.

    Raises ConfigError if the folder has no labels of all these samples, or those of another vocabulary, tokenizer,
    size or temperature.
    """
    teacher = read_teacher(folder)
    expected = {"hidden_size": hidden_size, "tokenizer": tokenizer, "vocab_size": vocab_size}
    expected |= {} if hidden_size else {"top_k": top_k, "temperature": temperature}
    for name, value in expected.items():
        theirs = getattr(teacher, name)
        if theirs != value:
            field = {"tokenizer": name, "vocab_size": f"model.{name}"}.get(name, f"distill_{name}")
            raise ConfigError(
                f"{field}: expected {theirs}, that of the teacher {teacher.name} in distill_path={folder}, got "
                f"{value}; set it so, or label the data again: {PAGE}"
            )
    sources = []
    for samples in train.sources:
        labels = Labels.of(expanded(folder), samples, sequence_len, teacher)
        if missing := len(labels.missing):
            raise ConfigError(
                f"distill_path: expected labels of all {len(samples):,} samples of {samples.name} in {folder}, got "
                f"{len(labels.files) - missing:,} of {len(labels.files):,} files; label this data, with this "
                f"sequence_len and template: {PAGE}"
            )
        sources.append(WithLabels(samples, labels, teacher, names))
    return Mixture(sources, train.weights, train.all.name)


def _check_sum(path: Path, found: int, row: int, of: str = "") -> None:
    """Raises ConfigError if a row's labels do not have their checksum. Folders of older versions have no sums."""
    file = path.parent / SUMS / path.name
    if not file.exists():
        return
    try:
        sums = np.frombuffer(read_bytes(file), np.uint32)
        if len(sums) > row and sums[row] == found:
            return
        got = "others: their sum differs"
    except (OSError, ValueError) as error:
        got = f"a sum that cannot be read ({error})"
    raise ConfigError(f"distill_path: expected {of}{path} as it was written, got {got}; {AGAIN}")


def _write_with_sums(path: Path, parts: list[bytes], sums: np.ndarray) -> None:
    """Writes a file's sums, then the file: a file that is there has them."""
    (path.parent / SUMS).mkdir(parents=True, exist_ok=True)
    _write(path.parent / SUMS / path.name, [sums.tobytes()])
    _write(path, parts)


def _write(path: Path, parts: list[bytes]) -> None:
    """Writes a file atomically: it has its name only when complete and on the disk."""
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("wb") as opened:
        opened.writelines(parts)
        opened.flush()
        os.fsync(opened.fileno())
    unfinished.rename(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Waits until a folder's entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
