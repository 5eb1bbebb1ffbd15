"""Labels of samples by a teacher, in a folder, from which a run with objective="distill" learns.

    FOLDER/teacher.json                    whose labels they are: model, tokenizer, sizes
    FOLDER/DIGEST OF SAMPLES/00000000      labels of samples 0 to 15: ids int32 [16, S, K], then log-probabilities
                                           float32 [16, S, K + 1]; the last file has the rest of the samples

If labels are last hidden states, a file has these [16, S, E], and there is

    FOLDER/head                            the matrix of the teacher's head [V, E], in the dtype of the hidden states

A file appears when it is complete and on the disk, so that labelling which is killed goes on with the next one. The
digest is of tokens, documents and sequence_len: other data, or another tokenizer or template, has no labels.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from surojax.data.batches import Mixture
from surojax.data.samples import DerivedSamples, Sample, Samples, fingerprint_of
from surojax.errors import ConfigError
from surojax.untrusted import expanded, parse_json, read_bytes

TEACHER_FILE = "teacher.json"
HEAD_FILE = "head"
PER_FILE = 16  # samples
MOST_BYTES = 2**16  # of teacher.json
STATE_DTYPES = ("float32", "bfloat16")  # of hidden states
PAGE = "docs/distillation.md says how to make them"


class Teacher(NamedTuple):
    """The teacher that made a folder's labels: its identity and the labels' settings.

    teacher: digest of the model and of the settings that its numbers depend on. name: of the model, for messages.
    tokenizer: its name with a digest. vocab_size: V of the teacher. top_k, temperature: see `step.distillation`; both
    are 0 if labels are last hidden states. hidden_size: E of these, else 0. dtype: of these.
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
        """Reads the labels of a sample: arrays [S, width], int32 or float32."""
        number, row = divmod(index, PER_FILE)
        rows = len(self.files[number])
        arrays, begin = [], 0
        for dtype, width in self.arrays:
            sample_numbers = self.sequence_len * width
            offset = begin + row * sample_numbers * dtype.itemsize
            x = np.fromfile(self._path(number), dtype, sample_numbers, offset=offset).reshape(self.sequence_len, width)
            arrays.append(x if dtype == np.int32 else x.astype(np.float32))
            begin += rows * sample_numbers * dtype.itemsize
        return tuple(arrays)

    def write(self, number: int, *arrays: np.ndarray) -> None:
        """Writes a file of arrays [samples, S, width]."""
        path = self._path(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        pairs = zip(arrays, self.arrays, strict=True)
        _write(path, [np.ascontiguousarray(x, dtype).tobytes() for x, (dtype, _) in pairs])

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}"

    def _is_there(self, number: int, rows: int) -> bool:
        path = self._path(number)
        token_bytes = sum(dtype.itemsize * width for dtype, width in self.arrays)
        return path.exists() and path.stat().st_size == rows * self.sequence_len * token_bytes


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
        return self.samples[index] | dict(zip(self.names, self.labels[index], strict=True))


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
    path.mkdir(parents=True, exist_ok=True)
    _write(path / TEACHER_FILE, [json.dumps(teacher._asdict(), indent=1).encode() + b"\n"])
    return path


def write_head(folder: Path, head: np.ndarray) -> None:
    """Writes the matrix `[V, E]` of a teacher's head."""
    _write(folder / HEAD_FILE, [np.ascontiguousarray(head).tobytes()])


def read_head(folder: str) -> np.ndarray:
    """Reads the head `[V, E]` of a folder's teacher. Raises ConfigError if the file is missing or incomplete."""
    teacher = read_teacher(folder)
    path = expanded(folder) / HEAD_FILE
    shape = (teacher.vocab_size, teacher.hidden_size)
    try:
        return np.fromfile(path, np.dtype(teacher.dtype)).reshape(shape)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"distill_path: expected a matrix {[*shape]} of {teacher.dtype or 'numbers'} in {path} ({error}); {PAGE}"
        ) from None


def read_teacher(folder: str) -> Teacher:
    """Reads the `Teacher` of a folder's labels. Raises ConfigError if the folder has none."""
    path = expanded(folder) / TEACHER_FILE
    try:
        values = parse_json(read_bytes(path, MOST_BYTES).decode())
        teacher = Teacher(**values)
        if any(type(value) is not kind for value, kind in zip(teacher, Teacher.__annotations__.values(), strict=True)):
            raise ValueError("a value of another type")
        sizes = (teacher.vocab_size, teacher.top_k + teacher.hidden_size)
        if not all(0 < size < 2**31 for size in sizes) or min(teacher.top_k, teacher.hidden_size) < 0:
            raise ValueError("sizes that no labels have")
        if teacher.dtype not in (STATE_DTYPES if teacher.hidden_size else ("",)):
            raise ValueError(f"dtype {teacher.dtype!r}, which labels do not have")
        return teacher
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"distill_path: expected a folder with a teacher's labels, got {folder!r} ({error}); {PAGE}"
        ) from None


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
