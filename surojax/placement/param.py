"""The declaration of a parameter: made once with its weight (models/layers.py), and read everywhere else."""

import dataclasses
import enum
from typing import Any

OUTER = "outer"  # the section of embedding, final norm and head in a tree of parameters; other sections are of layers

VOCABULARY = "vocab"  # the logical axis of the rows of embedding and head
EXPERTS = "experts"  # the logical axis of matrices of experts, which devices may share
ROUTED = "routed"  # that of what a router knows of each expert, on every device


class Kind(enum.Enum):
    """The use of a parameter, which determines the optimizer's rule and whether the recipe applies."""

    MATRIX = "matrix"  # of a block, [out, in], or one for each expert [experts, out, in]: operands of products
    TABLE = "table"  # embedding or head: a row for each entry of the vocabulary
    VECTOR = "vector"  # a norm's scale, a bias
    ROUTER = "router"  # of a router [experts, in], a head [labels, in]: a small matrix, which no recipe rounds
    FACTOR = "factor"  # of an adapter (models/lora.py): a small matrix, which no recipe rounds


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter of a model.

    name: path in the section's tree of parameters, "attention.wq".
    shape: of one layer, without the layer axis; of the entire array for the outer layers.
    axes: logical names of its dimensions, see `layout.MESH_AXES`.
    stream: number of its random stream in stochastic rounding (optim/optimizer.py), unique in the model.
    trainable: if not, it is only read: it has no gradient, accumulator, moments or master weights.
    adapter: it belongs to an adapter, or to a teacher, which the files of a model do not have.
    used: the fraction of tokens that it multiplies; below 1 for experts, of which a token has a few.
    dtype: of the work weights; "": the tensor class's dtype. learning_rate_factor: factor of the updates.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    kind: Kind
    stream: int = 0
    trainable: bool = True
    adapter: bool = False
    used: float = 1.0
    dtype: str = ""
    learning_rate_factor: float = 1.0

    @property
    def of_experts(self) -> bool:
        """True for a matrix of each of several experts: products read them one by one."""
        return self.kind is Kind.MATRIX and len(self.shape) > 2


def trainable(params: dict) -> dict:
    """The `Param`s of a tree that are trainable; a branch without any is left out."""
    return _where(params, lambda param: param.trainable)


def base(params: dict) -> dict:
    """The `Param`s of a tree that belong to no adapter."""
    return _where(params, lambda param: not param.adapter)


def _where(params: dict, wanted) -> dict:
    kept = {}
    for name, branch_or_param in params.items():
        if isinstance(branch_or_param, dict):
            if branch := _where(branch_or_param, wanted):
                kept[name] = branch
        elif wanted(branch_or_param):
            kept[name] = branch_or_param
    return kept


def part_of(tree: Any, like: Any) -> Any:
    """Selects the part of a tree of dicts that has the names of `like`, another tree of dicts; any leaves."""
    return {name: part_of(tree[name], like[name]) for name in like} if isinstance(like, dict) else tree


def with_part(tree: Any, new: Any) -> Any:
    """Replaces leaves of a tree of dicts by the leaves of `new`, a tree with some of its names."""
    if not isinstance(new, dict):
        return new
    return tree | {name: with_part(tree.get(name, {}), value) for name, value in new.items()}
