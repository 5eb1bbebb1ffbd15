"""The passes of a step over the layers of a model, and what moves in them: declared once, without arrays.

A pass computes one layer after another. Its lanes are classes of tensors that a layer reads, writes, or both, and say
how many layers early they are read, how many late they are written, and what happens on the way. blocks.py and
update.py run them, stream.py moves what they move, and the planner adds up bytes and seconds of the same declarations.

    of a group of microbatches:  forward   reads weights, writes residuals
                                 backward  in reverse order: reads weights and residuals, reads and writes gradients
    of a step:                   update    reads gradients, reads and writes master weights and moments, writes weights

With `Engine.overlap_update` the first group's forward pass is also the update of the step before: each layer is updated
a layer before it computes, and its weights come from there.
"""

import enum
from typing import NamedTuple

from surojax.placement.home import Home
from surojax.placement.table import Placement, TensorClass
from surojax.step.spec import Engine


class LaneAction(enum.Enum):
    """Copies and collectives that a lane applies to a layer's tensors as they arrive or leave."""

    COPY_IN = "from host memory to the device"
    GATHER = "from shards to all of a layer, over dp_shard x cp"
    REDUCE = "the sum of gradients over dp_shard x cp, or this device's shards of it"
    REDUCE_REPLICAS = "the sum of gradients over dp_replicate"
    COPY_OUT = "from the device to host memory"


class Lane(NamedTuple):
    """Describes how a pass moves one tensor class.

    row: its name in the placement table. reads, writes: whether a layer does. arriving, leaving: what happens before
    the layer computes and after it, in order. ahead: how many layers earlier arriving begins; behind: how many later
    leaving ends. Between them, that many layers are in device memory besides the one that computes.
    of_microbatch: a group's microbatches have tensors of their own; else a layer moves once for all of them.
    accumulates: the first pass of a step begins with zeros, which it does not read. last: what happens besides after
    the last microbatch of a step.
    """

    row: str
    reads: bool = False
    writes: bool = False
    arriving: tuple[LaneAction, ...] = ()
    leaving: tuple[LaneAction, ...] = ()
    ahead: int = 0
    behind: int = 0
    of_microbatch: bool = False
    accumulates: bool = False
    last: tuple[LaneAction, ...] = ()


class Pass(NamedTuple):
    """A loop over all layers. reverse: from the last one to the first. updates: layers are updated in it."""

    name: str
    lanes: tuple[Lane, ...]
    reverse: bool = False
    updates: bool = False

    def lane(self, row: str) -> Lane:
        """The lane of a row of the placement table. Raises KeyError."""
        return {lane.row: lane for lane in self.lanes}[row]


def copy_actions(home: Home, stage: LaneAction) -> tuple[LaneAction, ...]:
    """Returns (stage,), a copy, if the tensors are stored in host memory, else ()."""
    return (stage,) if home.streamed else ()


def gather_actions(row: TensorClass) -> tuple[LaneAction, ...]:
    """(`GATHER`,) if the tensors are sharded, else ()."""
    return (LaneAction.GATHER,) if row.sharded else ()


def fetched(table: Placement) -> Lane:
    """Describes the weights' lane: each stage (copy in, all-gather) runs one layer ahead of the next."""
    home = table.quants.home if table.quants.home.streamed else table.weights.home
    arriving = (*copy_actions(home, LaneAction.COPY_IN), *gather_actions(table.weights))
    return Lane("weights", reads=True, arriving=arriving, ahead=len(arriving))


def updated(table: Placement, *, ahead: int) -> tuple[Lane, ...]:
    """The lanes of an update. ahead: layers that tensors in host memory are read early.

    Beside lanes in host memory, those on the device move as early and as late in a program (`update.sweep_part`).
    """

    def lane(name: str, *, reads: bool, writes: bool) -> Lane:
        row: TensorClass = getattr(table, name)
        into, out = copy_actions(row.home, LaneAction.COPY_IN), copy_actions(row.home, LaneAction.COPY_OUT)
        return Lane(
            name,
            reads=reads,
            writes=writes,
            arriving=into if reads else (),
            leaving=out if writes else (),
            ahead=ahead * bool(into and reads),
            behind=bool(out and writes),
        )

    weights = lane("weights", reads=False, writes=True)
    if not table.weights.sharded:
        weights = weights._replace(leaving=(LaneAction.GATHER, *weights.leaving))
    return (
        lane("grads", reads=True, writes=False),
        lane("master", reads=True, writes=True),
        lane("moments", reads=True, writes=True),
        weights,
    )


def forward_pass(table: Placement, *, updates: bool = False) -> Pass:
    """The forward pass of a group of microbatches. updates: it is also the update of the step before."""
    out = copy_actions(table.residuals.home, LaneAction.COPY_OUT)
    residuals = Lane("residuals", writes=True, leaving=out, behind=len(out), of_microbatch=True)
    if not updates:
        return Pass("forward", (fetched(table), residuals))
    *state, weights = updated(table, ahead=2)
    weights = weights._replace(arriving=gather_actions(table.weights))  # from the update, shards of them
    return Pass("forward", (*state, weights, residuals), updates=True)


def backward_pass(table: Placement, *, stages: int = 1) -> Pass:
    """The backward pass of a group of microbatches. stages: with several, sums begin as stored zeros."""
    into = copy_actions(table.residuals.home, LaneAction.COPY_IN)
    residuals = Lane("residuals", reads=True, arriving=into, ahead=len(into), of_microbatch=True)
    home = table.grads.home
    out = copy_actions(home, LaneAction.COPY_OUT)
    # Sums are needed when a layer's first gradient is there, late enough to be read in the same layer.
    reduced = (LaneAction.REDUCE,) if table.grads.sharded else ()
    grads = Lane(
        "grads",
        reads=True,
        writes=True,
        arriving=copy_actions(home, LaneAction.COPY_IN),
        leaving=(*reduced, *out),
        behind=len(out),
        accumulates=stages == 1,
        last=(LaneAction.REDUCE_REPLICAS,) if reduced else (LaneAction.REDUCE, LaneAction.REDUCE_REPLICAS),
    )
    return Pass("backward", (fetched(table), residuals, grads), reverse=True)


def update(table: Placement) -> Pass:
    """Describes the update of all layers after the last group."""
    return Pass("update", updated(table, ahead=1), updates=True)


def around_ticks(table: Placement, *, sums_are_local: bool) -> list[Pass]:
    """Returns the passes of pipeline stages that zero accumulators before the first tick and read them after the last.

    sums_are_local: they are summed over devices then, and written back.
    """
    out = copy_actions(table.grads.home, LaneAction.COPY_OUT)
    grads = Lane("grads", writes=True, leaving=out, behind=len(out))
    return [Pass("zeros", (grads,)), Pass("norm", (grads._replace(reads=True, writes=sums_are_local, behind=0),))]


def passes_of_step(
    engine: Engine, groups: int, *, stages: int = 1, sums_are_local: bool = False
) -> list[tuple[Pass, int]]:
    """(pass, how often it runs) in a step of so many groups of microbatches, and stages of pipeline parallelism."""
    table = engine.table
    counted_passes = [(forward_pass(table), groups), (backward_pass(table, stages=stages), groups), (update(table), 1)]
    if engine.overlap_update:
        counted_passes = [
            (forward_pass(table, updates=True), 1),
            (forward_pass(table), groups - 1),
            (backward_pass(table), groups),
        ]
    if stages > 1:
        counted_passes += [(one, 1) for one in around_ticks(table, sums_are_local=sums_are_local)]
    return [(one, times) for one, times in counted_passes if times]
