"""Tensors of files that hold several of ours.

`in_proj` of a short convolution has B, C and x: everywhere else each is a tensor of its own, so that tensor parallelism
divides the rows of each. A table of Gemma 4 E4B has a part for each layer: everywhere else a layer has its own. The
name says which part it is:

    NAME[1/3]           the second of three equal parts of the rows of NAME
    NAME[0/1]           all of NAME without its axes of size 1 behind the first one, as convolutions have them
    NAME[layer 5]       of the equal parts of its rows that the layers have, that of layer 5
    NAME[:, layer 5]    likewise of its columns

A sublayer's `FileNames` declare such names.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from surojax.errors import ConfigError
from surojax.families.names import LAYER_NUMBER, NUMBER

PART = re.compile(r"(?P<name>.+)\[(?P<part>\d)/(?P<parts>\d)\]")
OF_LAYER = re.compile(rf"(?P<name>.+)\[(?P<columns>:, )?layer (?P<layer>{NUMBER}|{{l}})\]")


class RowsOf(NamedTuple):
    """Our tensor, which is part `part` of `parts` equal parts of the tensor `name` in files.

    parts: 0: as many as the model has layers, which is not known. axis: along which they are: 0 of rows, 1 of columns.
    """

    name: str
    part: int
    parts: int
    axis: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the tensor in files."""
        return (self.name,)

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of our tensor. stored: that of the tensor in files. Raises ConfigError if it has no such parts."""
        if len(stored) <= self.axis or stored[self.axis] % self.parts:
            raise ConfigError(
                f"model_path: {self.name}: expected {self.parts} equal parts along axis {self.axis}, got {[*stored]}; "
                "fetch the model again"
            )
        first, *others = (size // self.parts if i == self.axis else size for i, size in enumerate(stored))
        return (first, *(size for size in others if size > 1 or len(others) == 1))

    def tensor(self, stored: Iterable[np.ndarray]) -> np.ndarray:
        """Makes our tensor of that in files."""
        (whole,) = stored
        return np.split(whole, self.parts, self.axis)[self.part].reshape(self.shape(whole.shape))


def part_of_rows(name: str) -> RowsOf | None:
    """The part of another tensor that our name of a tensor stands for; None if it is a tensor of its own."""
    if place := OF_LAYER.fullmatch(name):
        return RowsOf(place["name"], int(place["layer"]), 0, 1 if place["columns"] else 0)
    place = PART.fullmatch(name)
    return place and RowsOf(place["name"], int(place["part"]), int(place["parts"]))


def parts_in(names: Iterable[str], table: Mapping[str, str], layers: int = 0) -> dict[str, RowsOf]:
    """Finds the tensors of files that have several of ours: {our name, or that of a table: `RowsOf`}.

    table: our names and theirs, with `{l}` for the number of a layer. layers: of the model, which may share a tensor.
    """
    parts_of: dict[str, list[RowsOf]] = {}
    found: dict[str, RowsOf] = {}
    names = set(names)
    for theirs in table.values():
        if (place := OF_LAYER.fullmatch(theirs)) and place["name"] in names:
            for l in range(layers):
                part = part_of_rows(theirs.format(l=l))
                assert part is not None
                found[theirs.format(l=l)] = part._replace(parts=layers)
        elif not place and (part := part_of_rows(theirs)):
            parts_of.setdefault(part.name, []).append(part)
    for name in names if parts_of else ():
        for part in parts_of.get(LAYER_NUMBER.sub("{l}", name, count=1), ()):
            found[f"{name}[{part.part}/{part.parts}]"] = part._replace(name=name)
    return found


def joined(parts: list[np.ndarray], part: RowsOf, shape: tuple[int, ...]) -> np.ndarray:
    """Makes the tensor of this shape in files from our tensors, its parts in order. part: one of them."""
    return np.concatenate(parts, part.axis).reshape(shape)


def shape_of_all(part: RowsOf, shape: tuple[int, ...], parts: int, *, convolution: bool) -> tuple[int, ...]:
    """The shape of the tensor in files. shape: of our tensor, one of so many parts.

    convolution: its kernel has an axis of input channels.
    """
    first, *others = (size * parts if i == part.axis else size for i, size in enumerate(shape))
    between = (1,) if part.parts == 1 and convolution else ()
    return (first, *between, *others)
