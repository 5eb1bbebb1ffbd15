"""What a step is made of: a model, where its tensors are stored, and how a step spends its memory."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from surojax.models.model import Model
from surojax.objectives.objective import (
    FLOATS,
    REFERENCE,
    STARTS,
    CrossEntropy,
    Objective,
    OfLogProbabilities,
    WithWidths,
)
from surojax.placement.layout import Layouts
from surojax.placement.param import OUTER
from surojax.placement.table import Placement

CROSS_ENTROPY = CrossEntropy()


@dataclasses.dataclass(frozen=True)
class Engine:
    """Static settings of a step: model, placement, layouts, objective and memory options.

    layouts: of the model's parameters. recompute_block: the backward pass computes each block again from its input.
    lmhead_chunks: slices of tokens in head and loss. objective: what is minimised. packed: rows hold several documents,
    and a batch says where they start. microbatches_per_fetch: a layer is fetched once for so many microbatches, a
    divisor of a step's. auxiliary: a loss of what routers count, which is added to the objective: ({segment: statistics
    `[L, ...]`, sums over all tokens of a step}, number of tokens that count) -> float32 []; all microbatches are one
    group then. overlap_update: a step leaves its update to the next step's first forward pass, see `overlap`.
    reference: the model without its adapters, whose log-probabilities each pass computes beside those of the model with
    them, from the same fetched layers; None: a batch has them, if the objective reads any.
    pp_schedule: see `parallel.schedule`. locates_nonfinite: the metrics say which devices had finite values, see
    `totals.Finite`.
    """

    model: Model
    table: Placement
    layouts: Layouts
    recompute_block: bool = True
    lmhead_chunks: int = 1
    objective: Objective | OfLogProbabilities = CROSS_ENTROPY
    packed: bool = False
    microbatches_per_fetch: int = 1
    auxiliary: Callable | None = None
    reference: Model | None = None
    overlap_update: bool = False
    pp_schedule: str = "gpipe"
    locates_nonfinite: bool = False

    @property
    def params(self) -> dict:
        """The model's `Param`s by section."""
        return self.model.params

    @property
    def trained_params(self) -> dict:
        """The model's trainable `Param`s by section."""
        return self.model.trained_params

    @property
    def vocabulary_axes(self) -> tuple[str, ...]:
        """The mesh axes over which rows of the embedding and of the head are sharded; () if they are replicated."""
        return self.layouts.weights[OUTER]["embed"].computed_axes

    @property
    def batch_arrays(self) -> tuple[str, ...]:
        """The names of a batch's arrays `[A, B, S]`, in the order in which a step takes them."""
        targets = [name for name in self.objective.targets if name != REFERENCE or self.reference is None]
        return ("inputs", *targets, *((STARTS,) if self.packed else ()))

    def planned_batch(self, shape: tuple[int, ...], sharding: jax.NamedSharding | None) -> list[jax.ShapeDtypeStruct]:
        """The plan of a batch's arrays: int32, or float32 if `objective.FLOATS` names them. shape: without widths."""
        widths = self.objective.widths if isinstance(self.objective, WithWidths) else {}

        def planned(name: str) -> jax.ShapeDtypeStruct:
            whole = (*shape, widths[name]) if name in widths else shape
            return jax.ShapeDtypeStruct(whole, jnp.float32 if name in FLOATS else jnp.int32, sharding=sharding)

        return [planned(name) for name in self.batch_arrays]

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of the sums over the objective's terms."""
        others = self.objective.metrics if isinstance(self.objective, OfLogProbabilities) else ()
        return ("loss", *others)
