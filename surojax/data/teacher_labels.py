"""Labels of samples by a teacher, in a folder, from which a run with objective="distill" learns.

    FOLDER/teacher.json                    whose labels they are: model, tokenizer, sizes
    FOLDER/DIGEST OF SAMPLES/00000000      labels of samples 0 to 15: ids int32 [16, S, K], then log-probabilities
                                           float32 [16, S, K + 1]; the last file has the rest of the samples

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
PER_FILE = 16  # samples
MOST_BYTES = 2**16  # of teacher.json
PAGE = "docs/distillation.md says how to make them"


class Teacher(NamedTuple):
    """Whose labels are in a folder.

    teacher: digest of the model and of the settings that its numbers depend on. name: of the model, for messages.
    tokenizer: its name with a digest. vocab_size: of the teacher. top_k, temperature: see `step.distillation`.
    """

    teacher: str
    name: str
    tokenizer: str
    vocab_size: int
    top_k: int
    temperature: float


@dataclass(frozen=True)
class Labels:
    """The labels of samples in a folder. sequence_len: S. count: number of samples. top_k: K."""

    folder: Path
    sequence_len: int
    top_k: int
    count: int

    @classmethod
    def of(cls, folder: Path, samples: Samples, sequence_len: int, top_k: int) -> "Labels":
        """Returns the labels of these samples that are, or will be, in the folder of a teacher."""
        digest = fingerprint_of([samples.fingerprint, str(sequence_len), str(len(samples))])
        return cls(folder / digest, sequence_len, top_k, len(samples))

    @property
    def files(self) -> list[range]:
        """The numbers of the samples of each file."""
        return [range(i, min(i + PER_FILE, self.count)) for i in range(0, self.count, PER_FILE)]

    @property
    def missing(self) -> list[int]:
        """The files that are not there, or have another size."""
        return [number for number, rows in enumerate(self.files) if not self._is_there(number, len(rows))]

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 [S, K], log-probabilities float32 [S, K + 1]) of a sample."""
        number, row = divmod(index, PER_FILE)
        rows = len(self.files[number])
        wide = self.sequence_len * self.top_k
        wider = wide + self.sequence_len
        path = self._path(number)
        ids = np.fromfile(path, np.int32, wide, offset=4 * row * wide)
        logprobs = np.fromfile(path, np.float32, wider, offset=4 * (rows * wide + row * wider))
        return ids.reshape(self.sequence_len, -1), logprobs.reshape(self.sequence_len, -1)

    def write(self, number: int, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Writes a file. ids: int32 [samples, S, K]. logprobs: float32 [samples, S, K + 1]."""
        path = self._path(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        with unfinished.open("wb") as opened:
            opened.write(np.ascontiguousarray(ids, np.int32).tobytes())
            opened.write(np.ascontiguousarray(logprobs, np.float32).tobytes())
            opened.flush()
            os.fsync(opened.fileno())
        unfinished.rename(path)
        _sync(path.parent)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}"

    def _is_there(self, number: int, rows: int) -> bool:
        path = self._path(number)
        return path.exists() and path.stat().st_size == 4 * rows * self.sequence_len * (2 * self.top_k + 1)


@dataclass(frozen=True, eq=False)
class WithLabels(DerivedSamples):
    """Samples with a teacher's labels. ids, logprobs: the names of these arrays."""

    labels: Labels
    teacher: Teacher
    ids: str
    logprobs: str

    @property
    def fingerprint(self) -> str:
        return fingerprint_of([self.samples.fingerprint, self.teacher.teacher, repr(self.teacher.temperature)])

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index] | dict(zip((self.ids, self.logprobs), self.labels[index], strict=True))


def claim_folder(folder: str, teacher: Teacher) -> Path:
    """The folder for this teacher's labels, which has its teacher.json. Raises ConfigError if it is another one's."""
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
    unfinished = path / f"{TEACHER_FILE}.tmp"
    with unfinished.open("w") as opened:
        opened.write(json.dumps(teacher._asdict(), indent=1) + "\n")
        opened.flush()
        os.fsync(opened.fileno())
    unfinished.rename(path / TEACHER_FILE)
    _sync(path)
    return path


def read_teacher(folder: str) -> Teacher:
    """Whose labels are in a folder. Raises ConfigError if it has none."""
    path = expanded(folder) / TEACHER_FILE
    try:
        values = parse_json(read_bytes(path, MOST_BYTES).decode())
        found = Teacher(**values)
        if any(type(value) is not kind for value, kind in zip(found, Teacher.__annotations__.values(), strict=True)):
            raise ValueError("a value of another type")
        return found
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
    names: Sequence[str],
) -> Mixture:
    """The samples with the labels in a folder. vocab_size: of the student. names: of ids and log-probabilities.

    Raises ConfigError if the folder has no labels of all these samples, or those of another vocabulary, tokenizer,
    size or temperature.
    """
    teacher = read_teacher(folder)
    expected = {"tokenizer": tokenizer, "vocab_size": vocab_size, "top_k": top_k, "temperature": temperature}
    for name, value in expected.items():
        theirs = getattr(teacher, name)
        if theirs != value:
            field = {"tokenizer": name, "vocab_size": f"model.{name}"}.get(name, f"distill_{name}")
            raise ConfigError(
                f"{field}: expected {theirs}, that of the teacher {teacher.name} in distill_path={folder}, got "
                f"{value}; set it so, or label the data again: {PAGE}"
            )
    ids, logprobs = names
    sources = []
    for samples in train.sources:
        labels = Labels.of(expanded(folder), samples, sequence_len, top_k)
        if missing := len(labels.missing):
            raise ConfigError(
                f"distill_path: expected labels of all {len(samples):,} samples of {samples.name} in {folder}, got "
                f"{len(labels.files) - missing:,} of {len(labels.files):,} files; label this data, with this "
                f"sequence_len and template: {PAGE}"
            )
        sources.append(WithLabels(samples, labels, teacher, ids, logprobs))
    return Mixture(sources, train.weights, train.all.name)


def _sync(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
