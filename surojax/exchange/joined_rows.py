"""Tensors of files whose rows are several of our matrices: `in_proj` of a short convolution has B, C and x.

Everywhere else each is a tensor of its own, so that tensor parallelism divides the rows of each. Its name says which
part it is: `NAME[1/3]` is the second of three equal parts of the rows of NAME. `NAME[0/1]` is all of NAME without its
axes of size 1 behind the first one, as convolutions have them. A sublayer's `FileNames` declare such names.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from surojax.families.names import LAYER_NUMBER

PART = re.compile(r"(?P<name>.+)\[(?P<part>\d)/(?P<parts>\d)\]")


class RowsOf(NamedTuple):
    """Our tensor, which is part `part` of `parts` equal parts of the rows of the tensor `name` in files."""

    name: str
    part: int
    parts: int

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the tensor in files."""
        return (self.name,)

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of our tensor. stored: that of the tensor in files."""
        rows, *others = stored
        return (rows // self.parts, *(size for size in others if size > 1 or len(others) == 1))

    def tensor(self, stored: Iterable[np.ndarray]) -> np.ndarray:
        """Makes our tensor of that in files."""
        (whole,) = stored
        return np.split(whole, self.parts)[self.part].reshape(self.shape(whole.shape))


def part_of_rows(name: str) -> RowsOf | None:
    """The part of another tensor's rows that our name of a tensor stands for; None if it is a tensor of its own."""
    place = PART.fullmatch(name)
    return place and RowsOf(place["name"], int(place["part"]), int(place["parts"]))


def parts_in(names: Iterable[str], table: Mapping[str, str]) -> dict[str, RowsOf]:
    """Finds the tensors of files that have several of ours: {our name, or that of a table: `RowsOf`}.

    table: our names and theirs, with `{l}` for the number of a layer.
    """
    parts_of: dict[str, list[RowsOf]] = {}
    for theirs in table.values():
        if part := part_of_rows(theirs):
            parts_of.setdefault(part.name, []).append(part)
    found = {}
    for name in names if parts_of else ():
        for part in parts_of.get(LAYER_NUMBER.sub("{l}", name, count=1), ()):
            found[f"{name}[{part.part}/{part.parts}]"] = part._replace(name=name)
    return found


def joined(parts: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Makes the tensor of this shape in files from our tensors, the parts of its rows in order."""
    return np.concatenate(parts).reshape(shape)


def shape_of_all(part: RowsOf, shape: tuple[int, ...], *, convolution: bool) -> tuple[int, ...]:
    """The shape of the tensor in files. shape: of our tensor.

    convolution: its kernel has an axis of input channels.
    """
    rows, *others = shape
    between = (1,) if part.parts == 1 and convolution else ()
    return (rows * part.parts, *between, *others)
