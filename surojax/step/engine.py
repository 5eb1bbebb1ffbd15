"""Forward and backward, written out layer by layer: fetch the weights, compute, push the gradients.

    for each group of microbatches:
        each:                         x = embed(tokens)
        for l in layers:              w = fetch(l);  each: save x;  x = block(w, x)
        each:                         loss, dx = head(x)
        for l in reversed(layers):    w = fetch(l);  each: dw, dx = vjp(block)(w, saved x)(dx);  sums += dw
                                      push(l, sums)
        each:                         push(embedding, dx)
    finish: sum over devices the gradients that are still local: embedding, final norm and head

The layers are those of one stretch of the model after another, in which layers of segments alternate. The head computes
in slices of tokens, and adds its gradient to the accumulators. Two groups may be peeled off the loop: the first, which
need not read accumulators in host memory, and the last, in which push also sums over devices what the others leave
local. The loops over layers are in blocks.py, fetch in weights.py, save in residuals.py, push and finish in
gradients.py, embedding and head in outer.py.

A group has `microbatches_per_fetch` microbatches. A layer's weights are fetched once for all of them, and so are its
accumulators if they are in host memory: fewer transfers, more residuals. Gradients are added in the same order with
groups of any size, so results are the same to the bit, but for a head that is also the embedding: its matrix gets the
gradients of all heads of a group before those of its embeddings. The microbatches of a group are unrolled in the loops
over layers: XLA keeps no all-gather in flight across an inner loop (docs/log, 2026-11-22). A microbatch's gradients
are reduced while the next one's block is recomputed.

Why not `jax.grad` of the whole model: it holds all gathered weights, or a whole tree of gradients, at once. Here one
layer's weights and gradients exist at a time, whatever the placement.

Without recomputation the residuals are those of the block's own reverse mode, except the weights, which are fetched
again: `jax.vjp(saveable_args=...)` leaves them out. What moves, how early and how late, is declared in passes.py, and
stream.py has the loop that moves it. A transfer that depends on a layer's computation cannot overlap all of that
computation, so only the reduce-scatter of its gradients depends on it.

Everything here runs inside `jax.shard_map` over all mesh axes: arrays are one device's part. Data-parallel
communication is only in `fetch`, `push` and `finish`; that of tensor and context parallelism is only in blocks
(parallel/tensor.py, parallel/context.py) and in outer.py.

Shape suffixes: A microbatches, B local batch, S sequence (or its part, see outer.py), D hidden size, N tokens.
"""

import copy
import functools
from itertools import zip_longest
from typing import Any, NamedTuple

import jax

from surojax.parallel import collectives
from surojax.parallel.collectives import varying
from surojax.placement.mesh import AXES
from surojax.step import verbs
from surojax.step.batch import Batch, Group, Microbatch, recipe_inputs_of
from surojax.step.blocks import Blocks, SegmentBlocks, in_turn, infer, residuals_of
from surojax.step.gradients import outer_sums, peels_last_group, starts_in_first_group
from surojax.step.outer import OuterLayers
from surojax.step.spec import Engine
from surojax.step.state import BEGINNING, Progress, TensorState
from surojax.step.stream import Flight
from surojax.step.totals import BACKWARD, FORWARD, Totals, auxiliary_loss, sum_of_devices
from surojax.step.verbs import Gradients, LayerVerbs
from surojax.step.weights import Layers


class GroupCarry(NamedTuple):
    """The carry of the loop over groups of microbatches.

    flights: by segment, those of the lanes "weights" (prefetched for the next forward pass), "residuals" (stacks, which
    every group writes anew) and "grads". totals: all that a step adds up besides.
    """

    flights: dict[str, dict[str, Any]]
    totals: Totals


class Groups:
    """The groups of microbatches of a step: forward and backward passes over all layers for each.

    batch, recipe_inputs: of the whole step. outer: the outer layers. blocks: by stretch. scale: of the loss in the
    gradients.
    """

    def __init__(self, engine: Engine, weights, batch: Batch, progress: Progress):
        """weights: by section. progress: see `loss_and_gradients`."""
        microbatches = batch.microbatches
        self.size = engine.microbatches_per_fetch
        self.number, left_over = divmod(microbatches, self.size)
        assert not left_over, f"expected a multiple of {self.size} microbatches, got {microbatches}"
        self.engine = engine
        self.batch = batch
        self.scale = batch.scale()
        self.outer = OuterLayers.of(engine, weights)
        layers = self.layers_of(weights)
        self.recipe_inputs = recipe_inputs_of(engine.model, progress, microbatches, self.scale)
        first = self.microbatch(0)
        self.blocks = [
            Blocks(
                engine,
                of_stretch,
                {
                    name: residuals_of(engine, of_stretch, segment, self.outer, first)
                    for name, segment in of_stretch.segments.items()
                },
            )
            for of_stretch in layers
        ]

    def first_carry(self, used: dict[str, Any] | None) -> GroupCarry:
        """Makes the carry before the first group: zeroed accumulators and prefetched weights.

        used: by segment, see `Sums.new`.
        """
        sums = {name: blocks.new_sums(used and used[name]) for name, blocks in self.of_segments.items()}
        d_outer = outer_sums(self.engine, self.outer.weights)
        flights = {}
        for blocks in self.blocks:
            weights = blocks.layers.first()
            for name, of_segment in blocks.of.items():
                residuals = Flight(of_segment.residuals.stacks(self.size))
                flights[name] = {"weights": weights[name], "residuals": residuals, "grads": sums[name]}
        return GroupCarry(flights, Totals.zeros(self.engine, d_outer))

    @property
    def of_segments(self) -> dict[str, SegmentBlocks]:
        """The `SegmentBlocks` of all stretches, by segment."""
        return {name: of_segment for blocks in self.blocks for name, of_segment in blocks.of.items()}

    def layers_of(self, weights) -> list[Layers]:
        """Makes the `Layers` of each stretch. weights: by section."""
        return [Layers(self.engine, stretch, weights) for stretch in self.engine.model.stretches]

    def with_layers(self, layers: list[Any], batch: Batch | None = None) -> "Groups":
        """Copies the groups with other `Layers` for the stretches, and another batch if one is given."""
        new = copy.copy(self)
        new.blocks = [blocks.with_layers(of_stretch) for blocks, of_stretch in zip(self.blocks, layers, strict=True)]
        new.batch = batch or self.batch
        return new

    def microbatch(self, a: jax.Array | int) -> Microbatch:
        """Selects microbatch a."""
        return self.batch.microbatch(a, self.recipe_inputs)

    def group(self, g: jax.Array | int, *, first: bool, last: bool) -> Group:
        """Selects group g of microbatches."""
        return Group(g, [self.microbatch(g * self.size + i) for i in range(self.size)], first, last)

    def both(self, g: jax.Array | int, carry: GroupCarry, *, first: bool = False, last: bool) -> GroupCarry:
        """Runs forward and backward of group g. first, last: whether it is the step's first, or last, group."""
        group = self.group(g, first=first, last=last)
        return self.backward(group, *self.forward(group, carry))

    def updating(self, layers: list[Any], carry: GroupCarry, *, last: bool):
        """Runs the first group, whose forward pass updates the layers; returns (carry, new TensorState by segment).

        layers: by stretch, `overlap.UpdatingLayers`, which the forward pass updates.
        """
        group = self.group(0, first=True, last=last)
        carry, xs_BSD = self.with_layers(layers).forward(group, carry)
        updated: dict[str, TensorState] = {name: flights["weights"] for name, flights in carry.flights.items()}
        new = self.layers_of({name: state.weights for name, state in updated.items()})
        prefetched = {
            name: early for of_stretch in new for name, early in of_stretch.first(reverse=True, after=xs_BSD).items()
        }
        flights = {name: flights | {"weights": prefetched[name]} for name, flights in carry.flights.items()}
        carry = carry._replace(flights=flights)
        return self.with_layers(new).backward(group, carry, xs_BSD), updated

    def forward(self, group: Group, carry: GroupCarry) -> tuple[GroupCarry, list[jax.Array]]:
        """Runs the forward pass of each stretch; returns (carry, outputs of the last layer).

        With a reference its results follow those of the microbatches.
        """
        xs_BSD = [self.outer.embed(each.inputs_BS) for each in group.microbatches]
        if self.engine.reference is not None:
            xs_BSD = [*xs_BSD, *xs_BSD]  # embeddings are frozen with the blocks
        totals = carry.totals.only(FORWARD)
        after = {}
        for blocks in self.blocks:
            before = {name: carry.flights[name] for name in blocks.of}
            flights = {
                name: {
                    "weights": blocks.layers.begin_pass(name, before[name]["weights"], group.number, reverse=False),
                    "residuals": of_segment.residuals.before_forward(before[name]["residuals"].stack),
                }
                for name, of_segment in blocks.of.items()
            }
            xs_BSD, totals, flights = blocks.forward(xs_BSD, totals, group, flights)
            after |= {name: before[name] | flights[name] for name in before}
        totals = carry.totals.updated(totals).after_forward(xs_BSD[: self.size])
        return GroupCarry(after, totals), xs_BSD

    def d_statistics(self, totals: Totals) -> dict[str, Any]:
        """Computes the gradients of routers' statistics `[L, ...]` by segment; {} without an auxiliary loss."""
        if self.engine.auxiliary is None:
            return {}
        assert self.number == 1, "an auxiliary loss is of all tokens of a step: config/checks.py refuses several groups"
        return varying(auxiliary_loss(self.engine, sum_of_devices(totals.statistics), self.batch)[1], AXES)

    def heads(self, group: Group, totals: Totals, xs_BSD: list[jax.Array]) -> tuple[Totals, list[jax.Array]]:
        """Runs the heads; returns (totals with losses and heads' gradients, gradients of the last layer's outputs)."""
        dxs_BSD = []
        targets = [
            self.outer.with_reference(each.targets, x_BSD)
            for each, x_BSD in zip_longest(group.microbatches, xs_BSD[self.size :])
        ]
        for i, of_microbatch in enumerate(targets):
            dx_BSD, totals = verbs.head(self.outer, xs_BSD[i], of_microbatch, self.scale, totals)
            dxs_BSD.append(dx_BSD)
            if self.size > 1 and self.engine.lmhead_chunks == 1:
                # A loop of one slice is straight-line code: XLA joined it with the next microbatch's, and left products
                # with logits until the layers were done, so that logits of all, and their gradients, were in memory.
                dxs_BSD, xs_BSD, totals = jax.lax.optimization_barrier((dxs_BSD, xs_BSD, totals))
        return totals, dxs_BSD

    def backward(self, group: Group, carry: GroupCarry, xs_BSD: list[jax.Array]) -> GroupCarry:
        """Runs heads, the blocks of all stretches in reverse, and the embedding's gradients."""
        d_statistics = self.d_statistics(carry.totals)
        totals, dxs_BSD = self.heads(group, carry.totals, xs_BSD)
        of_layers = totals._replace(squares=collectives.no_squares()).only(BACKWARD)
        after = {}
        for blocks in reversed(self.blocks):
            before = {name: carry.flights[name] for name in blocks.of}
            flights = {
                name: {
                    "weights": blocks.layers.begin_pass(name, before[name]["weights"], group.number, reverse=True),
                    "residuals": of_segment.residuals.before_backward(before[name]["residuals"]),
                    "grads": of_segment.sums.before_backward(before[name]["grads"], group.number, first=group.first),
                }
                for name, of_segment in blocks.of.items()
            }
            dxs_BSD, of_layers, flights = blocks.backward(dxs_BSD, of_layers, group, flights, d_statistics)
            after |= {name: x | {"residuals": Flight(x["residuals"].stack)} for name, x in flights.items()}
        totals = totals.updated(of_layers)
        for each, dx_BSD in zip(group.microbatches, dxs_BSD, strict=True):
            totals = verbs.end(self.outer, each.inputs_BS, dx_BSD, totals)
        return GroupCarry(after, totals.after_backward(dxs_BSD))


def loss_and_gradients(
    engine: Engine,
    weights,
    *batch_ABS: jax.Array,
    progress: Progress = BEGINNING,
    updating: list[Any] | None = None,
) -> Gradients:
    """Computes loss and gradients of all microbatches and devices.

    batch_ABS: the arrays `[A, B, S]` of `Engine.batch_arrays`. The loss is divided by the number of its terms on all
    devices, so the result does not depend on how a batch is split into microbatches.
    progress: before this step, which adds to its history and counts nothing.
    updating: by stretch, `overlap.UpdatingLayers`, which the first group's forward pass updates; None if `weights` are
    up to date.
    """
    groups = Groups(engine, weights, Batch.of(engine, batch_ABS), progress)
    used = {name: x for layers in updating for name, x in layers.grads.items()} if updating else None
    carry = groups.first_carry(used)
    updated = None
    only = groups.number == 1
    begin = 0
    if starts_in_first_group(engine.table):
        if updating:
            carry, updated = groups.updating(updating, carry, last=only)
        else:
            carry = groups.both(0, carry, first=True, last=only)
        weights = weights | {name: state.weights for name, state in (updated or {}).items()}
        # Without a loop, XLA would fetch for the next group during this one: 0.16 GiB for 7B on four GPUs.
        carry, (arrays, weights) = in_turn(carry, (groups.batch.arrays, weights))
        groups = groups.with_layers(groups.layers_of(weights), groups.batch._replace(arrays=arrays))
        begin = 1
    peeled = peels_last_group(engine.table)
    end = max(begin, groups.number - peeled)
    if begin < end:
        carry = jax.lax.fori_loop(begin, end, functools.partial(groups.both, last=not peeled), carry)
    if end < groups.number:
        carry = groups.both(groups.number - 1, carry, last=True)
    sums_of = {name: blocks.sums for name, blocks in groups.of_segments.items()}
    accumulators = {name: flights["grads"] for name, flights in carry.flights.items()}
    done = verbs.finish(engine, sums_of, accumulators, carry.totals, groups.batch, groups.scale, progress)
    return done._replace(updated=updated)


def evaluate(engine: Engine, weights, *batch_BS: jax.Array):
    """Returns (the objective's sums, number of its terms) over all devices; without auxiliary losses.

    batch_BS: the arrays `[B, S]` of `Engine.batch_arrays`.
    """
    batch = Batch.of(engine, batch_BS)
    each = batch.on_device()
    outer = OuterLayers.of(engine, weights)
    xs_BSD = [outer.embed(each.inputs_BS)] * (1 if engine.reference is None else 2)
    for stretch in engine.model.stretches:
        verbs_of = {segment.name: LayerVerbs.of(engine, segment) for segment in stretch}
        xs_BSD = infer(Layers(engine, stretch, weights), verbs_of, xs_BSD, each)
    sums = outer.loss(xs_BSD[0], outer.with_reference(each.targets, *xs_BSD[1:]))
    return sum_of_devices(sums), batch.terms()
