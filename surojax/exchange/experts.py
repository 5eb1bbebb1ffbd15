"""Experts' matrices in files: one tensor for each expert, or one of all, with gate and up apart or together.

Everywhere else the matrices of a layer's experts are one tensor, `NAME.experts.gate_proj.weight` [experts, out, in].
Files of transformers 4, and of most published models, have `NAME.experts.17.gate_proj.weight` [out, in] for each
expert. The modules of transformers 5 have `NAME.experts.gate_up_proj` [experts, 2 out, in], gate before up, and
`NAME.experts.down_proj`.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from surojax.errors import ConfigError

NUMBER = re.compile(r"(?<=\.experts\.)(\d+)\.")
TOGETHER = "gate_up_proj"
HALVES = ("gate_proj", "up_proj")  # of the rows of that, in order


class Part(NamedTuple):
    """The place of a tensor of all experts in files.

    names: of the tensors, one for each expert, or one of all. half: which of two parts of its rows, None: all of them.
    """

    names: tuple[str, ...]
    half: int | None = None

    @property
    def is_of_all(self) -> bool:
        """True if the file's tensor has all experts."""
        return not NUMBER.search(self.names[0])

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor of all experts. stored: that of the first of the files' tensors."""
        of_all = stored if self.is_of_all else (len(self.names), *stored)
        return of_all if self.half is None else (of_all[0], of_all[1] // 2, *of_all[2:])

    def tensor(self, stored: Iterable[np.ndarray]) -> np.ndarray:
        """The tensor of all experts. stored: the files' tensors, in the order of `names`."""
        if not self.is_of_all:
            return np.stack(list(stored))
        (of_all,) = stored
        return of_all if self.half is None else np.split(of_all, 2, axis=1)[self.half]


def has_all_experts(name: str) -> bool:
    """True for our name of a tensor of all experts."""
    return ".experts." in name


def of_expert(name: str, expert: int) -> str:
    """The name of one expert's matrix, from that of all."""
    return name.replace(".experts.", f".experts.{expert}.")


def together(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """By name in files with one tensor of all experts: (names of the tensors here, its shape). shapes: by name here.

    Gate and up are one tensor there, one after the other.
    """
    found = {}
    for name, shape in shapes.items():
        before, is_of_experts, last = name.rpartition(".experts.")
        half = last.removesuffix(".weight")
        if not is_of_experts:
            found[name] = ((name,), shape)
        elif half == HALVES[0]:
            names = tuple(f"{before}.experts.{half}.weight" for half in HALVES)
            found[f"{before}.experts.{TOGETHER}"] = (names, (shape[0], 2 * shape[1], *shape[2:]))
        elif half not in HALVES:
            found[f"{before}.experts.{half}"] = ((name,), shape)
    return found


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


def parts_in(names: Iterable[str]) -> dict[str, Part]:
    """{name of a tensor of all experts: its place} among the names of tensors in files.

    Raises ConfigError if one of the experts is missing.
    """
    numbers: dict[str, set[int]] = {}
    found: dict[str, Part] = {}
    for name in names:
        before, is_of_experts, last = name.rpartition(".experts.")
        of_all, number = without_number(name)
        if number is not None:
            numbers.setdefault(of_all, set()).add(number)
        elif is_of_experts and last == TOGETHER:
            found |= {f"{before}.experts.{half}.weight": Part((name,), i) for i, half in enumerate(HALVES)}
        elif is_of_experts and last == "down_proj":
            found[f"{name}.weight"] = Part((name,))
    for name, experts in numbers.items():
        if missing := sorted(set(range(len(experts))) - experts):
            raise ConfigError(
                f"model_path: expected {of_expert(name, missing[0])} beside that of expert {max(experts)}, got no such "
                "tensor; fetch the model again"
            )
        found[name] = Part(tuple(of_expert(name, expert) for expert in range(len(experts))))
    return found
