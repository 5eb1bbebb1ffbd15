"""Forward and backward, written out layer by layer: fetch the weights, compute, push the gradients.

    for each group of microbatches:
        each:                         x = embed(tokens)
        for l in layers:              w = fetch(l);  each: save x;  x = block(w, x)
        each:                         loss, dx = head(x)
        for l in reversed(layers):    w = fetch(l);  each: dw, dx = vjp(block)(w, saved x)(dx);  sums += dw
                                      push(l, sums)
        each:                         push(embedding, dx)
    finish: sum over devices the gradients that are still local: embedding, final norm and head

The layers are those of one segment of the model after another. The head computes in slices of tokens, and adds its
gradient to the accumulators. Two groups may be peeled off the loop: the first, which need not read accumulators in host
memory, and the last, in which push also sums over devices what the others leave local. The loops over layers are in
blocks.py, fetch in weights.py, save in residuals.py, push and finish in gradients.py, embedding and head in outer.py.

A group has `microbatches_per_fetch` microbatches. A layer's weights are fetched once for all of them, and so are its
accumulators if they are in host memory: fewer transfers, more residuals. Gradients are added in the same order with
groups of any size, so results are the same to the bit, but for a head that is also the embedding: its matrix gets the
gradients of all heads of a group before those of its embeddings. The microbatches of a group are unrolled in the loops
over layers: XLA keeps no all-gather in flight across an inner loop (docs/LOG.md, 2026-11-22). A microbatch's gradients
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
import jax.numpy as jnp

from surojax.models.model import Model, Segment
from surojax.numerics.fp8 import extended, new_observed
from surojax.objectives.objective import Sums
from surojax.parallel import collectives
from surojax.parallel.collectives import Squares, varying
from surojax.placement.mesh import AXES
from surojax.step.batch import Batch, Group, Microbatch, recipe_inputs_of
from surojax.step.blocks import Backward, Blocks, in_turn, reference_block, residuals_of
from surojax.step.gradients import (
    Accumulators,
    add,
    finish,
    outer_sums,
    peels_last_group,
    starts_in_first_group,
)
from surojax.step.outer import OuterLayers
from surojax.step.spec import Engine
from surojax.step.state import TensorState
from surojax.step.step_metrics import Finite, all_finite, and_activations, and_gradients
from surojax.step.stream import Flight, Layer
from surojax.step.weights import Layers

__all__ = ["Engine", "Gradients", "evaluate", "loss_and_gradients"]


class Gradients(NamedTuple):
    """The results of forward and backward passes that the update reads.

    means: "loss" in nats per label over all microbatches and devices, and the objective's other sums by name, divided
    by the number of its terms too.
    grads: as `gradients.finish` leaves them. norm: the global norm of these. history: of recipe fp8_hybrid, else None.
    statistics: by segment with routers `[L, ...]`, sums over all tokens that count. auxiliary: `Engine.auxiliary` of
    these, None without it.
    updated: by segment, the TensorState after the update of `updating`; None without it. finite: see `metrics`.
    """

    means: Sums
    grads: dict
    norm: jax.Array
    history: Any
    statistics: dict[str, Any]
    auxiliary: jax.Array | None = None
    updated: dict[str, TensorState] | None = None
    finite: Finite | None = None

    @property
    def loss(self) -> jax.Array:
        """The loss among the means."""
        return self.means["loss"]


class GroupCarry(NamedTuple):
    """The carry of the loop over groups of microbatches.

    flights: by segment, those of the lanes "weights" (prefetched for the next forward pass), "residuals" (stacks, which
    every group writes anew) and "grads". d_outer: accumulators of the outer layers. sums: of the objective so far, on
    this device; statistics: likewise, by segment. squares: of the accumulators, complete after the last group.
    observed: largest magnitudes so far, for delayed scales. finite: see `metrics`.
    """

    flights: dict[str, dict[str, Any]]
    d_outer: dict
    sums: Sums
    statistics: dict[str, Any]
    squares: Squares
    observed: Any
    finite: Finite | None


class Groups:
    """The groups of microbatches of a step: forward and backward passes over all layers for each.

    batch, recipe_inputs: of the whole step. outer: the outer layers. blocks: by segment. scale: of the loss in the
    gradients.
    """

    def __init__(self, engine: Engine, weights, batch: Batch, history, step):
        """weights: by section. history, step: see `loss_and_gradients`."""
        microbatches = batch.microbatches
        self.size = engine.microbatches_per_fetch
        self.number, left_over = divmod(microbatches, self.size)
        assert not left_over, f"expected a multiple of {self.size} microbatches, got {microbatches}"
        self.engine = engine
        self.batch = batch
        self.scale = batch.scale()
        self.outer = OuterLayers.of(engine, weights)
        layers = self.layers_of(weights)
        self.recipe_inputs = recipe_inputs_of(engine.model, history, step, microbatches, self.scale)
        first = self.microbatch(0)
        self.blocks = {
            name: Blocks(engine, segment_layers, residuals_of(engine, segment_layers, self.outer, first))
            for name, segment_layers in layers.items()
        }

    def first_carry(self, history, used: dict[str, Any] | None) -> GroupCarry:
        """Makes the carry before the first group: zeroed accumulators and prefetched weights.

        history: see `loss_and_gradients`. used: by segment, see `Sums.new`.
        """
        sums = {name: blocks.new_sums(used and used[name]) for name, blocks in self.blocks.items()}
        d_outer = outer_sums(self.engine, self.outer.weights)
        flights = {
            name: {
                "weights": blocks.layers.first(),
                "residuals": Flight(blocks.residuals.stacks(self.size)),
                "grads": sums[name],
            }
            for name, blocks in self.blocks.items()
        }
        return GroupCarry(
            flights=flights,
            d_outer=d_outer,
            sums=no_sums(self.engine),
            statistics=no_statistics(self.engine.model),
            squares=collectives.no_squares(),
            observed=varying(new_observed(history), AXES),
            finite=all_finite(self.engine),
        )

    def layers_of(self, weights) -> dict[str, Layers]:
        """The `Layers` of each segment. weights: by section."""
        segments = self.engine.model.segments
        return {segment.name: Layers(self.engine, segment, weights[segment.name]) for segment in segments}

    def with_layers(self, layers: dict[str, Any], batch: Batch | None = None) -> "Groups":
        """Copies the groups with other `Layers` for the segments. batch: in place of the one that there is."""
        new = copy.copy(self)
        new.blocks = {name: blocks.with_layers(layers[name]) for name, blocks in self.blocks.items()}
        new.batch = batch or self.batch
        return new

    def microbatch(self, a: jax.Array | int) -> Microbatch:
        """Microbatch a."""
        return self.batch.microbatch(a, self.recipe_inputs)

    def group(self, g: jax.Array | int, *, first: bool, last: bool) -> Group:
        """Group g of microbatches."""
        return Group(g, [self.microbatch(g * self.size + i) for i in range(self.size)], first, last)

    def both(self, g: jax.Array | int, carry: GroupCarry, *, first: bool = False, last: bool) -> GroupCarry:
        """Runs forward and backward of group g. first, last: group of the step."""
        group = self.group(g, first=first, last=last)
        return self.backward(group, *self.forward(group, carry))

    def updating(self, layers: dict[str, Any], carry: GroupCarry, *, last: bool):
        """(the carry after the first group, the new TensorState by segment).

        layers: by segment, `overlap.UpdatingLayers`, which the forward pass updates.
        """
        group = self.group(0, first=True, last=last)
        carry, xs_BSD = self.with_layers(layers).forward(group, carry)
        updated: dict[str, TensorState] = {name: flights["weights"] for name, flights in carry.flights.items()}
        new = self.layers_of({name: state.weights for name, state in updated.items()})
        prefetched = {name: {"weights": segment_layers.first(reverse=True)} for name, segment_layers in new.items()}
        carry = carry._replace(flights={name: flights | prefetched[name] for name, flights in carry.flights.items()})
        return self.with_layers(new).backward(group, carry, xs_BSD), updated

    def forward(self, group: Group, carry: GroupCarry) -> tuple[GroupCarry, list[jax.Array]]:
        """(the carry, results of the last layer) after the forward pass of each segment.

        With a reference its results follow those of the microbatches.
        """
        xs_BSD = [self.outer.embed(each.inputs_BS) for each in group.microbatches]
        if self.engine.reference is not None:
            xs_BSD = [*xs_BSD, *xs_BSD]  # embeddings are frozen with the blocks
        zeros = no_statistics(self.engine.model)
        done = {}
        for name, blocks in self.blocks.items():
            flights = carry.flights[name]
            moving = {
                "weights": blocks.layers.turn(flights["weights"], group.number, reverse=False),
                "residuals": blocks.residuals.before_forward(flights["residuals"].stack),
            }
            if name in zeros:
                moving["statistics"] = Flight(zeros[name])
            xs_BSD, moving = blocks.forward(xs_BSD, group, moving)
            if name in zeros:
                zeros[name] = moving.pop("statistics").stack
            done[name] = flights | moving
        return carry._replace(flights=done, statistics=add(carry.statistics, zeros)), xs_BSD

    def d_statistics(self, carry: GroupCarry) -> dict[str, Any]:
        """By segment, gradients of the statistics `[L, ...]`; nothing without an auxiliary loss."""
        if self.engine.auxiliary is None:
            return {}
        assert self.number == 1, "an auxiliary loss is of all tokens of a step: config/checks.py refuses several groups"
        return varying(auxiliary_loss(self.engine, carry.statistics, self.batch)[1], AXES)

    def heads(self, group: Group, carry: GroupCarry, xs_BSD: list[jax.Array]) -> tuple[GroupCarry, list[jax.Array]]:
        """(the carry with losses and the heads' gradients, gradients of xs_BSD: the results of the last layer)."""
        sums = carry.sums
        dxs_BSD = []
        d_outer = carry.d_outer
        microbatches = [
            each._replace(targets=self.outer.with_reference(each.targets, x_BSD))
            for each, x_BSD in zip_longest(group.microbatches, xs_BSD[self.size :])
        ]
        for each, x_BSD in zip(microbatches, xs_BSD, strict=False):
            more, dx_BSD, d_outer = self.outer.head(d_outer, x_BSD, each.targets, self.scale)
            sums = add(sums, more)
            dxs_BSD.append(dx_BSD)
        finite = and_activations(carry.finite, xs_BSD[: self.size])
        return carry._replace(d_outer=d_outer, sums=sums, finite=finite), dxs_BSD

    def backward(self, group: Group, carry: GroupCarry, xs_BSD: list[jax.Array]) -> GroupCarry:
        """The carry after heads, the blocks of all segments in reverse, and the embedding's gradients."""
        d_statistics = self.d_statistics(carry)
        carry, dxs_BSD = self.heads(group, carry, xs_BSD)
        done = Backward(dxs_BSD, collectives.no_squares(), carry.observed)
        flights_of = {}
        for name, blocks in reversed(self.blocks.items()):
            flights = carry.flights[name]
            moving = {
                "weights": blocks.layers.turn(flights["weights"], group.number, reverse=True),
                "residuals": blocks.residuals.before_backward(flights["residuals"]),
                "grads": blocks.sums.before_backward(flights["grads"], group.number, first=group.first),
            }
            if name in d_statistics:
                moving["statistics"] = Flight(d_statistics[name])
            done, moving = blocks.backward(done, group, moving)
            moving.pop("statistics", None)
            flights_of[name] = moving | {"residuals": Flight(moving["residuals"].stack)}
        d_outer = carry.d_outer
        for each, dx_BSD in zip(group.microbatches, done.dxs_BSD, strict=True):
            d_outer = self.outer.push_embed(d_outer, each.inputs_BS, dx_BSD)
        finite = and_gradients(carry.finite, done.dxs_BSD)
        return carry._replace(
            flights=flights_of, d_outer=d_outer, squares=done.squares, observed=done.observed, finite=finite
        )


def no_sums(engine: Engine) -> Sums:
    """Zeros to add the objective's sums to, on this device."""
    return varying({name: jnp.float32(0) for name in engine.sums}, AXES)


def means_of(sums: Sums, scale: jax.Array) -> Sums:
    """Sums the objective's terms over all devices and multiplies them by the scale of the loss."""
    return jax.tree.map(lambda x: collectives.add_up(x, *AXES) * scale, sums)


def no_statistics(model: Model) -> dict[str, Any]:
    """Zeros `[L, ...]` for the statistics of each segment that has them."""

    def zeros(segment: Segment):
        return jax.tree.map(lambda x: jnp.zeros((segment.num_layers, *x.shape), x.dtype), segment.statistics)

    return varying({s.name: zeros(s) for s in model.segments if s.statistics is not None}, AXES)


def auxiliary_loss(engine: Engine, statistics: dict[str, Any], batch: Batch) -> tuple[jax.Array, dict[str, Any]]:
    """Returns (the auxiliary loss of a step, its gradients). statistics: sums over this device's tokens, by segment."""
    return loss_of_statistics(engine, collectives.add_up(statistics, *AXES), batch)


def loss_of_statistics(engine: Engine, statistics: dict[str, Any], batch: Batch) -> tuple[jax.Array, dict[str, Any]]:
    """Returns (the auxiliary loss of a step, its gradients). statistics: sums over all tokens, by segment."""
    assert engine.auxiliary is not None
    return jax.value_and_grad(engine.auxiliary)(statistics, batch.terms().astype(jnp.float32))


def loss_and_gradients(
    engine: Engine,
    weights,
    *batch_ABS: jax.Array,
    history=None,
    step=0,
    updating: dict[str, Any] | None = None,
) -> Gradients:
    """Loss and gradients of all microbatches and devices.

    batch_ABS: the arrays `[A, B, S]` of `Engine.batch_arrays`. The loss is divided by the number of its terms on all
    devices, so the result does not depend on how a batch is split into microbatches.
    history: largest magnitudes in the last steps, see `fp8.history_shape`, which this step adds its own to; None for
    recipes that have none. step: number of the step, int32, which random numbers of a recipe follow from.
    updating: by segment, `overlap.UpdatingLayers`, which the first group's forward pass updates; None if `weights` are
    up to date.
    """
    groups = Groups(engine, weights, Batch.of(engine, batch_ABS), history, step)
    carry = groups.first_carry(history, updating and {name: layers.grads for name, layers in updating.items()})
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
    means = means_of(carry.sums, groups.scale)
    auxiliary = auxiliary_loss(engine, carry.statistics, groups.batch)[0] if engine.auxiliary else None
    statistics = collectives.add_up(carry.statistics, *AXES)
    sums_of = {name: blocks.sums for name, blocks in groups.blocks.items()}
    sums = Accumulators({name: flights["grads"] for name, flights in carry.flights.items()}, carry.d_outer)
    grads, norm = finish(engine, sums_of, sums, carry.squares)
    history = extended(history, collectives.largest_of_devices(carry.observed))
    return Gradients(means, grads, norm, history, statistics, auxiliary, updated, carry.finite)


def evaluate(engine: Engine, weights, *batch_BS: jax.Array):
    """(the objective's sums, number of its terms) over all devices; forward only, without auxiliary losses.

    batch_BS: the arrays `[B, S]` of `Engine.batch_arrays`.
    """
    batch = Batch.of(engine, batch_BS)
    each = batch.on_device(lambda l: None)
    outer = OuterLayers.of(engine, weights)
    xs_BSD = [outer.embed(each.inputs_BS)] * (1 if engine.reference is None else 2)
    for segment in engine.model.segments:
        layers = Layers(engine, segment, weights[segment.name])
        reference = reference_block(engine, segment)

        def block(layer: Layer, values, xs_BSD, flights, segment=segment, reference=reference):
            x_BSD, _ = segment.block(values["weights"], xs_BSD[0], None, layer.variant, each.starts_BS)
            others = [reference(values["weights"], x_BSD, layer, each) for x_BSD in xs_BSD[1:]]
            return [x_BSD, *others], {}, flights

        xs_BSD, _ = layers.over(block, xs_BSD, {}, {"weights": layers.first()})
    sums = outer.loss(xs_BSD[0], outer.with_reference(each.targets, *xs_BSD[1:]))
    return collectives.add_up(sums, *AXES), batch.terms()
