"""Forward and backward under pipeline parallelism: every stage runs the engine on its own layers, tick by tick.

    for each tick of the schedule:            what all stages do together     what each stage does by itself
        if none went backward before:         gradients of what routers count
        if a microbatch enters stage 0:       embed it
        if this stage has one forward:                                        blocks.forward of its layers
        if one leaves the last stage:         head and loss
        if this stage has one backward:                                       blocks.backward of its layers
        if one has left stage 0 backward:     push the embedding's gradient
        move activations to the next stage, their gradients to the previous one
    for each layer:                           push: sum over devices what is still local
    finish, as in engine.py

What all stages do together has collectives over `pp` (parallel/stage_collectives.py), and every stage takes part. What
a stage does by itself has none over `pp`: the gradients and weights that it communicates over `dp_shard`,
`dp_replicate` and `tp` are those of its own layers (stage_layers.py).

Whether something happens in a tick is read from the schedule's tables (parallel/schedule.py). It happens in a loop of
one round or none (`when_any`).

Residuals are those of the microbatches in flight, microbatch a in slot a modulo their number. A layer's weights are
fetched for each microbatch. Each pass ends by prefetching one layer more than it needs, since the next pass may go
either way. Gradients that are local to a device until the last microbatch are summed over devices after the last tick:
which tick is a stage's last is known only when the program runs.

What routers count is added up over microbatches. A loss of these sums is of all tokens of a step, so that its gradients
need a schedule which goes backward when all microbatches have gone forward (gpipe).

Arrays are one device's part. Shape suffixes: A microbatches, B local batch, S sequence (of the stages: this device's
part of it, if it is tensor parallel), D hidden size.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from surojax.memory.host import allocate, exchange_in_halves, read, write_layer
from surojax.models.model import Model, Segment
from surojax.numerics.fp8 import extended, new_observed
from surojax.objectives.objective import Sums
from surojax.parallel import collectives, stage_collectives
from surojax.parallel.collectives import Squares, varying
from surojax.parallel.schedule import NONE, SCHEDULES, Schedule, stacked_layers
from surojax.parallel.stage_collectives import collect, own_part, spread
from surojax.placement.mesh import AXES
from surojax.step.batch import Batch, Group, Microbatch, recipe_inputs_of
from surojax.step.blocks import Backward, Blocks, residuals_of
from surojax.step.engine import Gradients, loss_of_statistics, means_of, no_statistics, no_sums
from surojax.step.gradients import GRADS, Accumulators, add, finish, leaves_sums_local, outer_sums
from surojax.step.outer import OuterLayers
from surojax.step.passes import Lane
from surojax.step.spec import Engine
from surojax.step.stage_layers import StageLayers, first_layer_of_stage, inputs_of_stage, stage_engine, when_any
from surojax.step.step_metrics import Finite, all_finite, and_activations, and_gradients
from surojax.step.stream import Flight, Layer, Stream, sweep


class TickCarry(NamedTuple):
    """The loop carry from tick to tick.

    x_BSD, dx_BSD: received from the stage before, and from the stage after. from_head: gradients of the last stage's
    results, this stage's part of them `[slots, B, s, D]`. saved: residuals of the microbatches in flight, stacks. sums:
    of the objective so far, on this device. statistics: of this stage's layers so far, `[layers, ...]`; d_statistics:
    their gradients, None without a loss of them. observed: largest magnitudes so far in this stage's layers, for
    delayed scales. finite: see `metrics`.
    """

    x_BSD: jax.Array
    dx_BSD: jax.Array
    from_head: jax.Array
    saved: list[jax.Array]
    grads: Accumulators
    sums: Sums
    statistics: dict[str, Any]
    d_statistics: dict[str, Any] | None
    observed: jax.Array | None
    finite: Finite | None


class PipelineStage:
    """One stage's part of a step, and its part of what all stages do together; see the module's docstring.

    Methods take the number of a microbatch, which is the same on all stages for what they do together.
    """

    def __init__(self, model: Model, engine: Engine, weights, batch: Batch, schedule: Schedule, history, step):
        """model: whole. engine: of one stage. batch: of the step. history, step: see `engine.loss_and_gradients`."""
        (self.segment,) = engine.model.segments
        self.model = model
        self.engine = engine
        self.schedule = schedule
        self.scale = batch.scale()
        self.auxiliary_loss = functools.partial(loss_of_statistics, engine, batch=batch)
        self.of_model = recipe_inputs_of(model, history, step, batch.microbatches, self.scale)
        self.batch = batch._replace(arrays=varying(batch.arrays, AXES))
        self.number, self.stages = stage_collectives.stage()
        self.outer = OuterLayers.of(engine, weights)
        self.layers = StageLayers(model, engine, weights[self.segment.name])
        first_layers = self.layers.of_patterns[0]
        self.residuals = residuals_of(engine, first_layers, self.outer, self.microbatch(0), self.layers.variants)
        self.blocks = [Blocks(engine, layers, self.residuals) for layers in self.layers.of_patterns]
        self.sums = self.blocks[0].sums
        self.entries = self.segment.num_layers + self.residuals.home.streamed  # of a slot
        self.unused = 1 + self.residuals.home.streamed  # entries for the residuals of no microbatch
        self.slots = int(schedule.in_flight.max())
        self.last = self.segment.num_layers - 1
        self.head_slots = int(schedule.in_flight[-1])

    def first(self, history) -> TickCarry:
        """Makes the carry before the first tick."""
        engine = self.engine
        inputs_BS = self.microbatch(0).inputs_BS
        x = jax.ShapeDtypeStruct((*inputs_BS.shape, engine.model.hidden_size), engine.table.outer.dtype)
        batch, length, width = x.shape
        x_BSD = varying(jnp.zeros(x.shape, x.dtype), AXES)
        from_head = varying(jnp.zeros((self.head_slots, batch, length // self.stages, width), x.dtype), AXES)
        entries = self.slots * self.entries + self.layers.in_lockstep * self.unused
        saved = allocate(self.residuals.zeros(entries), engine.table.residuals.home)
        sums = self.blocks[0].new_sums()
        d_outer = outer_sums(engine, self.outer.weights)
        grads = Accumulators({self.segment.name: zeros_in_host_memory(self.segment, sums)}, d_outer)
        observed = None if history is None else new_observed(history[: self.segment.num_layers])
        statistics = no_statistics(engine.model)
        return TickCarry(
            x_BSD,
            x_BSD,
            from_head,
            saved,
            grads,
            no_sums(engine),
            statistics,
            statistics if engine.auxiliary else None,
            varying(observed, AXES),
            all_finite(engine),
        )

    def microbatch(self, a: jax.Array | int, computes: jax.Array | bool = True) -> Microbatch:
        """Microbatch a. computes: see `StageLayers.when_any`."""

        def recipe_inputs(a, l):
            number = first_layer_of_stage(self.engine) + l
            return inputs_of_stage(self.model, number, self.of_model(a, number), computes)

        return self.batch.microbatch(a, recipe_inputs)

    def entry_of(self, a, computes: jax.Array | bool) -> Callable:
        """Returns a function from a layer to its entry in the residual stacks, which hold several microbatches.

        In host memory, a microbatch's entries begin with one that belongs to no layer: these stacks lag by one layer,
        so the first layer writes and reads there. In lockstep, the layers of a stage that has no microbatch all write
        to one entry, which nothing needs.
        """
        begin = a % self.slots * self.entries
        step = 1
        if self.layers.in_lockstep:
            begin = jnp.where(computes, begin, self.slots * self.entries)
            step = jnp.where(computes, 1, 0)
        begin = begin + self.entries - self.segment.num_layers
        return lambda l: begin + l * step

    def tick(self, t, carry: TickCarry) -> TickCarry:
        """Runs one tick of the schedule."""
        forwards, backwards = (jnp.asarray(table)[t] for table in (self.schedule.forward, self.schedule.backward))
        carry = when_any(forwards[0], self.embed, carry)
        carry = self.layers.when_any(forwards, self.forward, carry)
        carry = when_any(forwards[-1], self.head, carry)
        if self.engine.auxiliary:
            first = np.flatnonzero((self.schedule.backward != NONE).any(axis=1))[0]
            carry = when_any(jnp.where(t == first, 0, NONE), self.auxiliary, carry)
        carry = when_any(backwards[-1], self.from_head, carry)
        carry = self.layers.when_any(backwards, self.backward, carry)
        carry = when_any(backwards[0], self.push_embed, carry)
        carry = when_any(jnp.max(forwards), self.send_forward, carry)
        return when_any(jnp.max(backwards), self.send_backward, carry)

    def embed(self, a, carry: TickCarry) -> TickCarry:
        """All stages: the embeddings of a microbatch, which become x of stage 0."""
        ids_Bs = own_part(self.microbatch(a).inputs_BS)
        x_BSD = collect(self.outer.embed(ids_Bs))
        return carry._replace(x_BSD=jnp.where(self.number == 0, x_BSD, carry.x_BSD))

    def forward(self, pattern: int, a, computes: jax.Array | bool, carry: TickCarry) -> TickCarry:
        """This stage: its layers forward. pattern, computes: see `StageLayers.when_any`."""
        blocks = self.blocks[pattern]
        entry = self.entry_of(a, computes)
        group = Group(a, [self.microbatch(a, computes)], first=False, last=False)
        moving = {
            "weights": self.layers.early(pattern),
            "residuals": self.residuals.before_forward([carry.saved]),
        }
        statistics = no_statistics(self.engine.model)
        if statistics:
            moving["statistics"] = Flight(statistics[self.segment.name])
        xs_BSD, moving = blocks.forward([carry.x_BSD], group, moving, entry)
        if statistics:
            statistics = {self.segment.name: moving["statistics"].stack}
        (saved,) = Stream(blocks.forward_lanes.lane("residuals"), entry).end(moving["residuals"], self.last)
        finite = self.if_computed(computes, and_activations(carry.finite, xs_BSD), carry.finite)
        return carry._replace(x_BSD=xs_BSD[0], saved=saved, statistics=add(carry.statistics, statistics), finite=finite)

    def head(self, a, carry: TickCarry) -> TickCarry:
        """All stages: head and loss of the last stage's x."""
        x_BsD = spread(carry.x_BSD, self.stages - 1)
        targets = {name: own_part(array) for name, array in self.microbatch(a).targets.items()}
        more, dx_BsD, d_outer = self.outer.head(carry.grads.outer, x_BsD, targets, self.scale)
        from_head = write_layer(carry.from_head, dx_BsD, a % self.head_slots)
        return carry._replace(
            from_head=from_head, grads=carry.grads._replace(outer=d_outer), sums=add(carry.sums, more)
        )

    def auxiliary(self, _, carry: TickCarry) -> TickCarry:
        """All stages: the gradients of the statistics of all microbatches."""
        statistics = of_all_stages(self.model, carry.statistics)
        _, gradients = self.auxiliary_loss(statistics)
        own = jax.tree.map(functools.partial(stage_entries, self.engine), varying(gradients, AXES))
        return carry._replace(d_statistics=own)

    def from_head(self, a, carry: TickCarry) -> TickCarry:
        """All stages: the gradient of the last stage's x, which becomes dx of the last stage."""
        dx_BSD = collect(read(carry.from_head, a % self.head_slots))
        return carry._replace(dx_BSD=jnp.where(self.number == self.stages - 1, dx_BSD, carry.dx_BSD))

    def backward(self, pattern: int, a, computes: jax.Array | bool, carry: TickCarry) -> TickCarry:
        """This stage: its layers backward, from the residuals in the microbatch's slot."""
        blocks = self.blocks[pattern]
        group = Group(a, [self.microbatch(a, computes)], first=False, last=False)
        entry = self.entry_of(a, computes)
        name = self.segment.name
        moving = {
            "weights": self.layers.early(pattern, reverse=True),
            "residuals": Stream(blocks.backward_lanes.lane("residuals"), entry).begin([carry.saved], self.last),
            "grads": begin_backward(self.segment, carry.grads.layers[name]),
        }
        if carry.d_statistics:
            moving["statistics"] = Flight(carry.d_statistics[name])
        before = Backward([carry.dx_BSD], collectives.no_squares(), carry.observed)
        done, moving = blocks.backward(before, group, moving, entry)
        grads = carry.grads._replace(layers={name: moving["grads"]})
        finite = self.if_computed(computes, and_gradients(carry.finite, done.dxs_BSD), carry.finite)
        return carry._replace(dx_BSD=done.dxs_BSD[0], grads=grads, observed=done.observed, finite=finite)

    def if_computed(self, computes: jax.Array | bool, new: Finite | None, old: Finite | None) -> Finite | None:
        """`new` if this stage has a microbatch, else `old`."""
        return jax.tree.map(lambda x, y: jnp.where(computes, x, y), new, old) if self.layers.in_lockstep else new

    def push_embed(self, a, carry: TickCarry) -> TickCarry:
        """All stages: the embedding's gradient from dx of stage 0."""
        ids_Bs = own_part(self.microbatch(a).inputs_BS)
        d_outer = self.outer.push_embed(carry.grads.outer, ids_Bs, spread(carry.dx_BSD, 0))
        return carry._replace(grads=carry.grads._replace(outer=d_outer))

    def send_forward(self, _, carry: TickCarry) -> TickCarry:
        """All stages: x goes to the next stage."""
        return carry._replace(x_BSD=stage_collectives.to_next(carry.x_BSD))

    def send_backward(self, _, carry: TickCarry) -> TickCarry:
        """All stages: dx goes to the previous stage."""
        return carry._replace(dx_BSD=stage_collectives.to_previous(carry.dx_BSD))

    def push_all(self, grads: Accumulators) -> tuple[Accumulators, Squares]:
        """(accumulators, their Squares) after the sums of every layer that are still local are summed over devices."""
        name = self.segment.name
        lane = Stream(self.blocks[0].backward_lanes.lane("grads"))
        stack = lane.end(grads.layers[name], 0)  # the backward pass ends with layer 0
        local = leaves_sums_local(self.engine.table)
        if not local and self.sums.in_place:  # `finish` computes the Squares
            return grads._replace(layers={name: Flight(stack)}), collectives.no_squares()

        def body(values, squares: Squares) -> tuple[Squares, dict]:
            if not local:
                return add(squares, collectives.sum_of_squares(values["grads"], self.sums.of_shards)), {}
            sums, layer_squares = self.sums.push(values["grads"], last=True)
            return add(squares, layer_squares), {"grads": sums}

        if not local:
            lane = GRADS
        flights = {"grads": lane.begin(stack, self.last, -1)}
        layers = range(self.segment.num_layers)
        squares, flights = sweep(layers, {"grads": lane}, body, collectives.no_squares(), flights, reverse=True)
        return grads._replace(layers={name: Flight(lane.end(flights["grads"], 0))}), squares


def begin_backward(segment: Segment, sums: Flight) -> Flight:
    """`gradients.begin_backward` in a loop of one round or none."""
    last = segment.num_layers - 1
    if sums.late is None or last == 0:
        return sums
    stack, last_sums = exchange_in_halves(sums.stack, sums.late, 0, last)
    return Flight(stack, late=last_sums)


def zeros_in_host_memory(segment: Segment, sums: Flight) -> Flight:
    """Zeroes accumulators in host memory too, since tracing cannot know which tick is a stage's first."""
    if sums.late is None:
        return sums

    def body(_, carry: None) -> tuple[None, dict]:
        return carry, {"grads": sums.late}

    lane = Stream(Lane("grads", writes=True))
    _, flights = sweep(range(segment.num_layers), {"grads": lane}, body, None, {"grads": Flight(sums.stack)})
    return sums._replace(stack=flights["grads"].stack)


def loss_and_gradients(engine: Engine, weights, *batch_ABS: jax.Array, history=None, step=0) -> Gradients:
    """`engine.loss_and_gradients`, for layers that are divided over `pp`."""
    model = engine.model
    batch = Batch.of(engine, batch_ABS)
    schedule = SCHEDULES[engine.pp_schedule](batch.microbatches, stage_collectives.stage()[1])
    engine = stage_engine(engine)
    stage = PipelineStage(model, engine, weights, batch, schedule, history, step)
    done = jax.lax.fori_loop(0, schedule.ticks, stage.tick, stage.first(history))
    grads, squares = stage.push_all(done.grads)
    grads, norm = finish(engine, {stage.segment.name: stage.sums}, grads, squares)
    means = means_of(done.sums, stage.scale)
    history = extended(history, largest_of_stages(model, done.observed))
    statistics = of_all_stages(model, done.statistics)
    auxiliary = stage.auxiliary_loss(statistics)[0] if engine.auxiliary else None
    return Gradients(means, grads, norm, history, statistics, auxiliary, finite=done.finite)


def largest_of_stages(model: Model, observed: jax.Array | None) -> jax.Array | None:
    """All-gathers the largest magnitudes of each stage's layers to `[layers, sites]` on all devices."""
    if observed is None:
        return None
    return collectives.largest_of_devices(among_all_stages(model, observed))[: model.num_layers]


def of_all_stages(model: Model, statistics: dict[str, Any]) -> dict[str, Any]:
    """Sums what routers counted over the devices that have a layer, `[layers, ...]` of all stages on all devices."""
    everywhere = collectives.add_up(jax.tree.map(functools.partial(among_all_stages, model), statistics), *AXES)
    return jax.tree.map(lambda x: x[: model.num_layers], everywhere)


def among_all_stages(model: Model, own: jax.Array) -> jax.Array:
    """This stage's entries `[layers of a stage, ...]` among those of all stages, which are zeros."""
    entries = stacked_layers(model.num_layers, stage_collectives.stage()[1])
    zeros = varying(jnp.zeros((entries, *own.shape[1:]), own.dtype), AXES)
    return jax.lax.dynamic_update_slice_in_dim(zeros, own, collectives.first_layer(len(own)), 0)


def stage_entries(engine: Engine, all_layers: jax.Array) -> jax.Array:
    """This stage's entries of an array `[layers, ...]` of the model, then zeros. engine: of one stage."""
    layers = engine.model.num_layers
    padding = stacked_layers(len(all_layers), stage_collectives.stage()[1]) - len(all_layers)
    entries = jnp.pad(all_layers, ((0, padding), *[(0, 0)] * (all_layers.ndim - 1)))
    return jax.lax.dynamic_slice_in_dim(entries, collectives.first_layer(layers), layers, 0)


def evaluate(engine: Engine, weights, *batch_BS: jax.Array):
    """`engine.evaluate`, for layers that are divided over `pp`: one stage after another, as one microbatch."""
    model = engine.model
    batch = Batch.of(engine, batch_BS)
    each = batch.on_device(lambda l: None)
    starts_BS = varying(each.starts_BS, AXES)
    engine = stage_engine(engine)
    (segment,) = engine.model.segments
    _, stages = stage_collectives.stage()
    outer = OuterLayers.of(engine, weights)
    layers = StageLayers(model, engine, weights[segment.name])
    x_BsD = outer.embed(own_part(each.inputs_BS))

    def blocks(pattern: int, _, computes, x_BSD):
        def block(layer: Layer, values, x_BSD, flights):
            inputs = inputs_of_stage(model, first_layer_of_stage(engine) + layer.index, None, computes)
            return segment.block(values["weights"], x_BSD, inputs, layer.variant, starts_BS)[0], {}, flights

        pattern_layers = layers.of_patterns[pattern]
        return pattern_layers.over(block, x_BSD, {}, {"weights": pattern_layers.first()})[0]

    def of_stage(i, x_BSD):
        turn = jnp.where(jnp.arange(stages) == i, 0, NONE)  # of one microbatch
        x_BSD = layers.when_any(turn, blocks, x_BSD)
        return jax.lax.cond(i == stages - 1, lambda x: x, stage_collectives.to_next, x_BSD)

    x_BSD = jax.lax.fori_loop(0, stages, of_stage, varying(collect(x_BsD), AXES))
    targets = {name: own_part(array) for name, array in each.targets.items()}
    sums = outer.loss(spread(x_BSD, stages - 1), targets)
    return collectives.add_up(sums, *AXES), batch.terms()
