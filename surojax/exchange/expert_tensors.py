"""Experts' matrices in files: one tensor for each expert, or one of all, with gate and up apart or together.

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

NUMBER = re.compile(r"(?<=\.experts\.)(\d+)\.")
HALVES = ("gate_proj", "up_proj")  # of the outputs of a tensor with both, in order
DOWN = "down_proj"
KINDS = {".weight": "", ".bias": "_bias"}  # ends of our names, and of those of tensors of all experts


class ExpertTensor(NamedTuple):
    """The place of a tensor of all experts in files.

    names: of the tensors, one for each expert, or one of all. half: which of two parts of its outputs, None: all of
    them. files: how a tensor of all experts is stored.
    """

    names: tuple[str, ...]
    half: int | None = None
    files: ExpertFiles = BY_EXPERT

    @property
    def is_of_all(self) -> bool:
        """True if the file's tensor has all experts."""
        return not NUMBER.search(self.names[0])

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor of all experts. stored: that of the first of the files' tensors."""
        if not self.is_of_all:
            return (len(self.names), *stored)
        count, *sizes = stored
        outputs, *inputs = sizes[::-1] if self.files.transposed else sizes
        return (count, outputs if self.half is None else outputs // 2, *inputs)

    def tensor(self, stored: Iterable[np.ndarray]) -> np.ndarray:
        """The tensor of all experts. stored: the files' tensors, in the order of `names`."""
        if not self.is_of_all:
            return np.stack(list(stored))
        (of_all,) = stored
        return self.rows(_transposed(of_all) if self.files.transposed else of_all)

    def rows(self, of_all: np.ndarray) -> np.ndarray:
        """This part of an array `[experts, outputs of the file's tensor, ...]`."""
        if self.half is None:
            return of_all
        return of_all[:, self.half :: 2] if self.files.interleaved else np.split(of_all, 2, axis=1)[self.half]


def _transposed(of_all: np.ndarray) -> np.ndarray:
    """Matrices [experts, out, in] from [experts, in, out], or the other way round; biases as they are."""
    return of_all.swapaxes(1, 2) if of_all.ndim == 3 else of_all


def has_all_experts(name: str) -> bool:
    """True for our name of a tensor of all experts."""
    return ".experts." in name


def of_expert(name: str, expert: int) -> str:
    """The name of one expert's matrix, from that of all."""
    return name.replace(".experts.", f".experts.{expert}.")


def names_together(
    shapes: dict[str, tuple[int, ...]], files: ExpertFiles
) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """By name in files with one tensor of all experts: (names of the tensors here, its shape). shapes: by name here."""
    found = {}
    for name, shape in shapes.items():
        before, is_of_experts, last = name.rpartition(EXPERTS)
        if not is_of_experts:
            found[name] = ((name,), shape)
            continue
        matrix, _, kind = last.rpartition(".")
        end, (count, outputs, *inputs) = KINDS[f".{kind}"], shape
        if matrix == HALVES[0]:
            names = tuple(f"{before}{EXPERTS}{half}.{kind}" for half in HALVES)
            found[before + files.gate_up + end] = (names, _stored(files, count, 2 * outputs, *inputs))
        elif matrix == DOWN:
            found[before + files.down + end] = ((name,), _stored(files, count, outputs, *inputs))
    return found


def _stored(files: ExpertFiles, count: int, *sizes: int) -> tuple[int, ...]:
    """The shape of a tensor of so many experts in files."""
    return (count, *(sizes[::-1] if files.transposed else sizes))


def join_experts(parts: list[np.ndarray], files: ExpertFiles) -> np.ndarray:
    """The tensor of all experts as it is stored, from one of ours, or from those of gate and up."""
    of_all = parts[0]
    if len(parts) > 1:
        count, outputs, *inputs = parts[0].shape
        axis = 2 if files.interleaved else 1
        of_all = np.stack(parts, axis=axis).reshape(count, len(parts) * outputs, *inputs)
    return _transposed(of_all) if files.transposed else of_all


def of_each(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with one for each expert in place of those of all."""
    found = {}
    for name, tensor in tensors.items():
        found |= {of_expert(name, e): x for e, x in enumerate(tensor)} if has_all_experts(name) else {name: tensor}
    return found


def without_number(name: str) -> tuple[str, int | None]:
    """(the name of the matrix of all experts, number of the expert); a name without a number stays, with None."""
    number = NUMBER.search(name)
    return (name, None) if number is None else (name[: number.start()] + name[number.end() :], int(number[1]))


def parts_in(
    names: Iterable[str], files: ExpertFiles, field: str = "model_path", fix: str = "fetch the model again"
) -> dict[str, ExpertTensor]:
    """{name of a tensor of all experts: its place} among the names of tensors in files.

    field, fix: of the message. Raises ConfigError if one of the experts is missing.
    """
    numbers: dict[str, set[int]] = {}
    found: dict[str, ExpertTensor] = {}
    for name in names:
        of_all, number = without_number(name)
        if number is not None:
            numbers.setdefault(of_all, set()).add(number)
        for kind, end in KINDS.items():
            if name.endswith(files.gate_up + end):
                before = name.removesuffix(files.gate_up + end) + EXPERTS
                found |= {f"{before}{half}{kind}": ExpertTensor((name,), i, files) for i, half in enumerate(HALVES)}
            elif name.endswith(files.down + end):
                found[name.removesuffix(files.down + end) + EXPERTS + DOWN + kind] = ExpertTensor((name,), None, files)
    for name, experts in numbers.items():
        if missing := sorted(set(range(len(experts))) - experts):
            raise ConfigError(
                f"{field}: expected {of_expert(name, missing[0])} beside that of expert {max(experts)}, got no such "
                f"tensor; {fix}"
            )
        found[name] = ExpertTensor(tuple(of_expert(name, expert) for expert in range(len(experts))))
    return found
