"""Experts' matrices in files: one tensor per expert, or one for all experts, with gate and up apart or together.

Everywhere else the matrices of a layer's experts are one tensor, `NAME.experts.gate_proj.weight` [experts, out, in],
and their biases another, `NAME.experts.gate_proj.bias` [experts, out]. Files of transformers 4, and of most published
models, have `NAME.experts.17.gate_proj.weight` [out, in] for each expert. The modules of transformers 5 have tensors of
all experts, and so do the files of some families, see `families.family.ExpertFiles`.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from surojax.errors import ConfigError
from surojax.families.family import BY_EXPERT, EXPERTS, ExpertFiles
from surojax.families.names import NUMBER

EXPERT = re.compile(rf"(?<=\.experts\.)({NUMBER})\.")
HALVES = ("gate_proj", "up_proj")  # of the outputs of a tensor with both, in order
DOWN = "down_proj"
KINDS = {".weight": "", ".bias": "_bias"}  # ends of our names, and of those of tensors of all experts


class ExpertTensor(NamedTuple):
    """Where and how files store our tensor of all experts.

    names: of the tensors, one for each expert, or one of all. half: which of two parts of its outputs, None: all of
    them. files: how a tensor of all experts is stored.
    """

    names: tuple[str, ...]
    half: int | None = None
    files: ExpertFiles = BY_EXPERT

    @property
    def is_of_all(self) -> bool:
        """True if one tensor of the files has all experts."""
        return not EXPERT.search(self.names[0])

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of our tensor of all experts. stored: the shape of the files' first tensor.

        Raises ConfigError for a tensor of all experts that does not have the outputs of both halves.
        """
        if not self.is_of_all:
            return (len(self.names), *stored)
        sizes = stored[:0:-1] if self.files.transposed else stored[1:]
        if not sizes or (self.half is not None and sizes[0] % 2):
            outputs = "outputs" if self.half is None else "as many outputs of gate as of up"
            raise ConfigError(
                f"model_path: {self.names[0]}: expected a matrix of each expert, with {outputs}, got {[*stored]}; "
                "fetch the model again"
            )
        count, (outputs, *inputs) = stored[0], sizes
        return (count, outputs if self.half is None else outputs // 2, *inputs)

    def tensor(self, stored: Iterable[np.ndarray]) -> np.ndarray:
        """Makes our tensor of all experts. stored: the files' tensors, in the order of `names`."""
        if not self.is_of_all:
            return np.stack(list(stored))
        (stacked,) = stored
        return self.rows(_transposed(stacked) if self.files.transposed else stacked)

    def rows(self, stacked: np.ndarray) -> np.ndarray:
        """Selects this matrix' rows from an array `[experts, outputs of the file's tensor, ...]`."""
        if self.half is None:
            return stacked
        return stacked[:, self.half :: 2] if self.files.interleaved else np.split(stacked, 2, axis=1)[self.half]


def _transposed(stacked: np.ndarray) -> np.ndarray:
    """Swaps the last two axes of matrices [experts, out, in]; returns biases unchanged."""
    return stacked.swapaxes(1, 2) if stacked.ndim == 3 else stacked


def has_all_experts(name: str) -> bool:
    """True if our name is one of a tensor with all experts."""
    return ".experts." in name


def of_expert(name: str, expert: int) -> str:
    """Inserts an expert's number into the name of the tensor of all experts."""
    return name.replace(".experts.", f".experts.{expert}.")


def names_together(
    shapes: dict[str, tuple[int, ...]], files: ExpertFiles
) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """{name in files with one tensor for all experts: (our names of its tensors, its shape)}. shapes: by our name.

    Raises ConfigError for experts without a gate, which no files have so.
    """
    sources = {}
    for name, shape in shapes.items():
        before, is_of_experts, last = name.rpartition(EXPERTS)
        if not is_of_experts:
            sources[name] = ((name,), shape)
            continue
        matrix, _, kind = last.rpartition(".")
        end, (count, outputs, *inputs) = KINDS[f".{kind}"], shape
        if matrix == HALVES[1] and f"{before}{EXPERTS}{HALVES[0]}.{kind}" not in shapes:
            raise ConfigError(f"--experts-together: expected experts with a gate, got {name} alone; leave it out")
        if matrix == HALVES[0]:
            names = tuple(f"{before}{EXPERTS}{half}.{kind}" for half in HALVES)
            sources[before + files.gate_up + end] = (names, _stored(files, count, 2 * outputs, *inputs))
        elif matrix == DOWN:
            sources[before + files.down + end] = ((name,), _stored(files, count, outputs, *inputs))
    return sources


def _stored(files: ExpertFiles, count: int, *sizes: int) -> tuple[int, ...]:
    """The shape of a tensor of `count` experts in files."""
    return (count, *(sizes[::-1] if files.transposed else sizes))


def join_experts(parts: list[np.ndarray], files: ExpertFiles) -> np.ndarray:
    """Makes the files' tensor of all experts from one of our tensors, or from gate and up."""
    stacked = parts[0]
    if len(parts) > 1:
        count, outputs, *inputs = parts[0].shape
        axis = 2 if files.interleaved else 1
        stacked = np.stack(parts, axis=axis).reshape(count, len(parts) * outputs, *inputs)
    return _transposed(stacked) if files.transposed else stacked


def without_number(name: str) -> tuple[str, int | None]:
    """Splits a name into (name of the matrix of all experts, number of the expert or None)."""
    number = EXPERT.search(name)
    return (name, None) if number is None else (name[: number.start()] + name[number.end() :], int(number[1]))


def parts_in(
    names: Iterable[str], files: ExpertFiles, field: str = "model_path", fix: str = "fetch the model again"
) -> dict[str, ExpertTensor]:
    """Finds the experts among names of tensors in files: {our name of a tensor of all experts: `ExpertTensor`}.

    field, fix: of the message. Raises ConfigError if one of the experts is missing, or if they are stored in both ways.
    """
    numbers: dict[str, set[int]] = {}
    places: dict[str, ExpertTensor] = {}
    for name in names:
        stacked_name, number = without_number(name)
        if number is not None:
            numbers.setdefault(stacked_name, set()).add(number)
        for kind, end in KINDS.items():
            if name.endswith(files.gate_up + end):
                before = name.removesuffix(files.gate_up + end) + EXPERTS
                places |= {f"{before}{half}{kind}": ExpertTensor((name,), i, files) for i, half in enumerate(HALVES)}
            elif name.endswith(files.down + end):
                places[name.removesuffix(files.down + end) + EXPERTS + DOWN + kind] = ExpertTensor((name,), None, files)
    for name, experts in numbers.items():
        if name in places:
            raise ConfigError(
                f"{field}: expected each expert's tensor or one of all, got {of_expert(name, min(experts))} and "
                f"{places[name].names[0]}; {fix}"
            )
        if missing := sorted(set(range(len(experts))) - experts):
            raise ConfigError(
                f"{field}: expected {of_expert(name, missing[0])} beside that of expert {max(experts)}, got no such "
                f"tensor; {fix}"
            )
        places[name] = ExpertTensor(tuple(of_expert(name, expert) for expert in range(len(experts))))
    return places
