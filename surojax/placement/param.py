"""The declaration of a parameter: made once with its weight (models/layers.py), and read everywhere else."""

import dataclasses
import enum

OUTER = "outer"  # the section of embedding, final norm and head in a tree of parameters; other sections are of layers


class Kind(enum.Enum):
    """The use of a parameter, which determines the optimizer's rule and whether the recipe applies."""

    MATRIX = "matrix"  # of a block, [out, in]: an operand of a matrix product
    TABLE = "table"  # embedding or head: a row for each entry of the vocabulary
    VECTOR = "vector"  # a norm's scale, a bias


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter of a model.

    name: path in the section's tree of parameters, "attention.wq".
    shape: of one layer, without the layer axis; of the entire array for the outer layers.
    axes: logical names of its dimensions, see `layout.MESH_AXES`.
    stream: number of its random stream in stochastic rounding (optim/optimizer.py), unique in the model.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    kind: Kind
    stream: int = 0
