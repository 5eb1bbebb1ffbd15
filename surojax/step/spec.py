"""What a step is made of: a model's functions, where its tensors live, and how its memory is spent."""

import dataclasses

from surojax.models.llama import ModelFunctions
from surojax.placement.layout import Layouts
from surojax.placement.table import Placement


@dataclasses.dataclass(frozen=True)
class Engine:
    """Everything that forward, backward and update read beside arrays.

    params: the model's `Param`s, a tree `{"blocks", "outer"}`; layouts: theirs. recompute_block: the backward pass
    computes each block again from its input. lmhead_chunks: slices of tokens in head and loss. z_loss: weight of
    logsumexp(logits)^2 in the gradients, not in the loss.
    """

    model: ModelFunctions
    params: dict
    table: Placement
    layouts: Layouts
    recompute_block: bool = True
    lmhead_chunks: int = 1
    z_loss: float = 0.0
