"""The specification of a step: a model, where its tensors are stored, and how the step spends memory."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from surojax.declared import AT_LEAST_1, Facts, computed, declare
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
from surojax.parallel.schedule import SCHEDULES
from surojax.placement.layout import Layouts
from surojax.placement.param import OUTER
from surojax.placement.table import Placement

CROSS_ENTROPY = CrossEntropy()
# Values of the field xla_options; assembly/xla_options.py has their XLA options, `SCHEDULE` and `PINNED`.
OVERLAP = "overlap"
EXACT = "exact"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How a step spends memory and time, and what it minimises.

    objective: what is minimised. auxiliary: a loss of what routers count, which is added to the objective: ({segment:
    statistics `[L, ...]`, sums over all tokens of a step}, number of tokens that count) -> float32 []; all microbatches
    are one group then. reference: the model without its adapters, whose log-probabilities each pass computes beside
    those of the model with them, from the same fetched layers; None: a batch has them, if the objective reads any.
    locates_nonfinite: the metrics say which devices had finite values, see `totals.Finite`.
    """

    # several documents in a row, separated by attention masks and positions
    packed: bool = declare(False, facts=Facts.COST_AND_IDENTITY, name="sample_packing")
    # save only each block's input and recompute the block in the backward pass
    recompute_block: bool = declare(True, facts=Facts.COST)
    # microbatches that each fetch of a layer serves; divides gradient_accumulation_steps
    microbatches_per_fetch: int = declare(1, AT_LEAST_1, facts=Facts.COST)
    # update a layer under the next step's first forward pass; for state in host memory or files; unset = if gradients,
    # residuals or weights are in files
    overlap_update: bool | None = declare(None, facts=Facts.COST)
    # chunks of the tokens in head and loss; more chunks = less memory for logits
    lmhead_chunks: int = declare(1, AT_LEAST_1, facts=Facts.COST)
    # of the step on GPUs: "overlap" = copies overlap with products, "default" = XLA's own, "exact" = as
    # "overlap", with one kernel for a product in every program, so that offloads should change no bit; untried on GPUs
    xla_options: str = declare(OVERLAP, choices=(OVERLAP, EXACT, "default"), facts=Facts.COST)
    # CUDA graphs of a step on GPUs: "auto" = "none" if something is copied or sent beside products, else XLA's own;
    # "small" = of kernels, without loops and copies; "concurrent" = of all, in the order that data asks for; untimed
    cuda_graphs: str = declare("auto", choices=("auto", "none", "small", "concurrent"), facts=Facts.COST)
    # gpipe (all microbatches forward, then backward) or 1f1b (fewer in flight)
    pp_schedule: str = declare("gpipe", choices=tuple(SCHEDULES), facts=Facts.COST)
    objective: Objective | OfLogProbabilities = computed(CROSS_ENTROPY)
    auxiliary: Callable | None = computed(None)
    reference: Model | None = computed(None)
    locates_nonfinite: bool = computed(False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine(StepSettings):
    """Settings and functions that the forward pass, the backward pass and the update read beside arrays.

    layouts: of the model's parameters.
    """

    model: Model
    table: Placement
    layouts: Layouts

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
