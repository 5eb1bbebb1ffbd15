"""Declares what a parameter is: said once, where its weight is made (models/layers.py), and read everywhere else."""

import dataclasses
import enum

OUTER = "outer"  # the section of embedding, final norm and head in a tree of parameters; the others are of layers


class Kind(enum.Enum):
    """What a parameter is used as; the optimizer's rule and the recipe follow from it."""

    MATRIX = "matrix"  # of a block, [out, in]: feeds a matrix product
    TABLE = "table"  # embedding or head: a row for each word
    VECTOR = "vector"  # a norm's scale, a bias


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter of a model.

    name: path in the tree of parameters, "attention.wq".
    shape: of one layer; of the whole for the outer layers (embedding, final norm, head).
    axes: logical names of its dimensions, see `layout.MESH_AXES`.
    product: the number of the matrix product that it feeds among those of its block, from which the product's random
    numbers follow (nvfp4); None: no product of a recipe.
    stream: number of its random stream; no other parameter of the model has it.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    kind: Kind
    product: int | None = None
    stream: int = 0
