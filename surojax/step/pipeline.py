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
from surojax.models.model import NO_INPUTS, Model, Segment
from surojax.parallel import collectives, stage_collectives
from surojax.parallel.collectives import Squares, varying
from surojax.parallel.schedule import NONE, SCHEDULES, Schedule, layers_of_stage
from surojax.parallel.stage_collectives import collect, own_part, spread
from surojax.placement.mesh import AXES
from surojax.step import verbs
from surojax.step.batch import Batch, Group, Microbatch, recipe_inputs_of
from surojax.step.blocks import Blocks, infer, residuals_of
from surojax.step.gradients import GRADS, add, leaves_sums_local, outer_sums
from surojax.step.outer import OuterLayers
from surojax.step.passes import Lane
from surojax.step.spec import Engine
from surojax.step.stage_layers import StageLayers, first_layer_of_stage, inputs_of_stage, stage_engine, when_any
from surojax.step.state import BEGINNING, Progress
from surojax.step.stream import Flight, Stream, sweep
from surojax.step.totals import BACKWARD, FORWARD, OverLayers, Totals, auxiliary_loss, sum_of_devices
from surojax.step.verbs import Gradients, LayerVerbs


class TickCarry(NamedTuple):
    """The loop carry from tick to tick.

    x_BSD, dx_BSD: received from the stage before, and from the stage after. from_head: gradients of the last stage's
    results, this stage's part of them `[slots, B, s, D]`. saved: by segment, residuals of the microbatches in flight,
    stacks. grads: by segment, of this stage's layers, the flight of their lane. d_statistics: gradients of the totals'
    statistics, None without a loss of them. totals: all that this device adds up besides; of layers, for those of this
    stage `[layers, ...]`.
    """

    x_BSD: jax.Array
    dx_BSD: jax.Array
    from_head: jax.Array
    saved: dict[str, list[jax.Array]]
    grads: dict[str, Flight]
    d_statistics: dict[str, Any] | None
    totals: Totals


class PipelineStage:
    """One stage's part of a step; see the module's docstring.

    Methods take the number of a microbatch, which is the same on all stages for what they do together.
    """

    def __init__(self, model: Model, engine: Engine, weights, batch: Batch, schedule: Schedule, progress: Progress):
        """model: whole. engine: of one stage. batch: of the step. progress: see `engine.loss_and_gradients`."""
        self.segments = {segment.name: segment for segment in engine.model.segments}
        self.model = model
        self.engine = engine
        self.schedule = schedule
        self.scale = batch.scale()
        self.auxiliary_loss = functools.partial(auxiliary_loss, engine, batch=batch)
        self.of_model = recipe_inputs_of(model, progress, batch.microbatches, self.scale)
        self.batch = batch._replace(arrays=varying(batch.arrays, AXES))
        self.number, self.stages = stage_collectives.stage()
        self.outer = OuterLayers.of(engine, weights)
        self.layers = StageLayers(model, engine, weights)
        first_layers = self.layers.of_patterns[0]
        each, variants = self.microbatch(0), self.layers.variants
        self.residuals = {
            name: residuals_of(engine, first_layers, segment, self.outer, each, variants[name])
            for name, segment in self.segments.items()
        }
        self.blocks = [Blocks(engine, layers, self.residuals) for layers in self.layers.of_patterns]
        self.of_layer = self.blocks[0].of
        self.sums = {name: of_layer.sums for name, of_layer in self.of_layer.items()}
        streamed = engine.table.residuals.home.streamed
        self.entries = {name: segment.num_layers + streamed for name, segment in self.segments.items()}  # of a slot
        self.slots = int(schedule.in_flight.max())
        self.last = {name: segment.num_layers - 1 for name, segment in self.segments.items()}
        self.head_slots = int(schedule.in_flight[-1])

    def first(self) -> TickCarry:
        """Makes the carry before the first tick."""
        engine = self.engine
        inputs_BS = self.microbatch(0).inputs_BS
        x = jax.ShapeDtypeStruct((*inputs_BS.shape, engine.model.channels.all), engine.table.outer.dtype)
        batch, length, width = x.shape
        x_BSD = varying(jnp.zeros(x.shape, x.dtype), AXES)
        from_head = varying(jnp.zeros((self.head_slots, batch, length // self.stages, width), x.dtype), AXES)
        saved = {}
        for name, residuals in self.residuals.items():
            saved[name] = allocate(residuals.zeros(self.slots * self.entries[name]), engine.table.residuals.home)
        sums = {name: of_layer.new_sums() for name, of_layer in self.of_layer.items()}
        d_outer = outer_sums(engine, self.outer.weights)
        grads = {name: zeros_in_host_memory(segment, sums[name]) for name, segment in self.segments.items()}
        totals = Totals.zeros(engine, d_outer)._replace(squares=None)  # see `push_all`
        d_statistics = totals.statistics if engine.auxiliary else None
        return TickCarry(x_BSD, x_BSD, from_head, saved, grads, d_statistics, totals)

    def microbatch(self, a: jax.Array | int) -> Microbatch:
        """Selects microbatch a."""

        def recipe_inputs(a, l):
            number = first_layer_of_stage(self.engine) + l
            return inputs_of_stage(self.model, number, self.of_model(a, number))

        return self.batch.microbatch(a, recipe_inputs)._replace(first=first_layer_of_stage(self.engine))

    def entries_of(self, a) -> dict[str, Callable]:
        """Returns functions from a layer to its entry in the residual stacks of several microbatches, by segment.

        In host memory, a microbatch's entries begin with one that belongs to no layer: these stacks lag by one layer,
        so the first layer writes and reads there.
        """

        def of_segment(entries: int, layers: int) -> Callable:
            begin = a % self.slots * entries + entries - layers
            return lambda l: begin + l

        return {name: of_segment(self.entries[name], segment.num_layers) for name, segment in self.segments.items()}

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
        """All stages: compute a microbatch's embeddings, which become x of stage 0."""
        ids_Bs = own_part(self.microbatch(a).inputs_BS)
        x_BSD = collect(self.outer.embed(ids_Bs))
        return carry._replace(x_BSD=jnp.where(self.number == 0, x_BSD, carry.x_BSD))

    def forward(self, pattern: int, a, carry: TickCarry) -> TickCarry:
        """This stage: runs its layers forward. pattern: see `StageLayers.when_any`."""
        blocks = self.blocks[pattern]
        entries = self.entries_of(a)
        group = Group(a, [self.microbatch(a)], first=False, last=False)
        flights = {
            name: {"weights": early, "residuals": self.residuals[name].before_forward([carry.saved[name]])}
            for name, early in self.layers.early(pattern).items()
        }
        xs_BSD, of_layers, after = blocks.forward(
            [carry.x_BSD], carry.totals.only(FORWARD), group, flights, entries.__getitem__
        )
        saved = {}
        for name, of_layer in self.of_layer.items():
            stream = Stream(of_layer.forward_lanes.lane("residuals"), entries[name])
            (saved[name],) = stream.end(after[name]["residuals"], self.last[name])
        totals = carry.totals.updated(of_layers).after_forward(xs_BSD)
        return carry._replace(x_BSD=xs_BSD[0], saved=saved, totals=totals)

    def head(self, a, carry: TickCarry) -> TickCarry:
        """All stages: compute head and loss of the last stage's x."""
        x_BsD = spread(carry.x_BSD, self.stages - 1)
        targets = {name: own_part(array) for name, array in self.microbatch(a).targets.items()}
        dx_BsD, totals = verbs.head(self.outer, x_BsD, targets, self.scale, carry.totals)
        return carry._replace(from_head=write_layer(carry.from_head, dx_BsD, a % self.head_slots), totals=totals)

    def auxiliary(self, _, carry: TickCarry) -> TickCarry:
        """All stages: compute the gradients of routers' statistics of all microbatches."""
        statistics = over_stages(self.model)(sum_of_devices, carry.totals.statistics)
        _, gradients = self.auxiliary_loss(statistics)
        own = jax.tree.map(stage_entries, varying(gradients, AXES))
        return carry._replace(d_statistics=own)

    def from_head(self, a, carry: TickCarry) -> TickCarry:
        """All stages: gather the gradient of the last stage's x, which becomes dx of that stage."""
        dx_BSD = collect(read(carry.from_head, a % self.head_slots))
        return carry._replace(dx_BSD=jnp.where(self.number == self.stages - 1, dx_BSD, carry.dx_BSD))

    def backward(self, pattern: int, a, carry: TickCarry) -> TickCarry:
        """This stage: runs its layers backward, from the residuals in the microbatch's slot."""
        blocks = self.blocks[pattern]
        group = Group(a, [self.microbatch(a)], first=False, last=False)
        entries = self.entries_of(a)
        flights = {}
        for name, early in self.layers.early(pattern, reverse=True).items():
            stream = Stream(self.of_layer[name].backward_lanes.lane("residuals"), entries[name])
            flights[name] = {
                "weights": early,
                "residuals": stream.begin([carry.saved[name]], self.last[name]),
                "grads": begin_backward(self.segments[name], carry.grads[name]),
            }
        of_layers = carry.totals.only(BACKWARD)
        done = blocks.backward([carry.dx_BSD], of_layers, group, flights, carry.d_statistics or {}, entries.__getitem__)
        dxs_BSD, of_layers, after = done
        totals = carry.totals.updated(of_layers).after_backward(dxs_BSD)
        grads = {name: of_segment["grads"] for name, of_segment in after.items()}
        return carry._replace(dx_BSD=dxs_BSD[0], grads=grads, totals=totals)

    def push_embed(self, a, carry: TickCarry) -> TickCarry:
        """All stages: add the embedding's gradient from dx of stage 0."""
        ids_Bs = own_part(self.microbatch(a).inputs_BS)
        return carry._replace(totals=verbs.end(self.outer, ids_Bs, spread(carry.dx_BSD, 0), carry.totals))

    def send_forward(self, _, carry: TickCarry) -> TickCarry:
        """All stages: send x to the next stage."""
        return carry._replace(x_BSD=stage_collectives.to_next(carry.x_BSD))

    def send_backward(self, _, carry: TickCarry) -> TickCarry:
        """All stages: send dx to the previous stage."""
        return carry._replace(dx_BSD=stage_collectives.to_previous(carry.dx_BSD))

    def push_all(self, grads: dict[str, Flight]) -> tuple[dict[str, Flight], Squares]:
        """`push` of all segments."""
        pushed = {name: self.push(name, flight) for name, flight in grads.items()}
        squares = functools.reduce(add, [squares for _, squares in pushed.values()])
        return {name: flight for name, (flight, _) in pushed.items()}, squares

    def push(self, name: str, grads: Flight) -> tuple[Flight, Squares]:
        """Sums over devices what is still local in each layer's accumulators; returns (accumulators, their Squares)."""
        of_sums, segment = self.sums[name], self.segments[name]
        lane = Stream(self.of_layer[name].backward_lanes.lane("grads"))
        stack = lane.end(grads, 0)  # the backward pass ends with layer 0
        local = leaves_sums_local(self.engine.table)
        if not local and of_sums.in_place:  # `gradients.reduced` computes the Squares
            return Flight(stack), collectives.no_squares()

        def body(values, squares: Squares) -> tuple[Squares, dict]:
            if not local:
                return add(squares, collectives.sum_of_squares(values["grads"], of_sums.of_shards)), {}
            sums, layer_squares = of_sums.push(values["grads"], last=True)
            return add(squares, layer_squares), {"grads": sums}

        if not local:
            lane = GRADS
        flights = {"grads": lane.begin(stack, self.last[name], -1)}
        layers = range(segment.num_layers)
        squares, flights = sweep(layers, {"grads": lane}, body, collectives.no_squares(), flights, reverse=True)
        return Flight(lane.end(flights["grads"], 0)), squares


def begin_backward(segment: Segment, sums: Flight) -> Flight:
    """`Sums.before_backward` inside a loop of one round or none, whose transfers need halves."""
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


def loss_and_gradients(engine: Engine, weights, *batch_ABS: jax.Array, progress: Progress = BEGINNING) -> Gradients:
    """Like `engine.loss_and_gradients`, for layers that are divided over `pp`."""
    model = engine.model
    batch = Batch.of(engine, batch_ABS)
    schedule = SCHEDULES[engine.pp_schedule](batch.microbatches, stage_collectives.stage()[1])
    engine = stage_engine(engine)
    stage = PipelineStage(model, engine, weights, batch, schedule, progress)
    done = jax.lax.fori_loop(0, schedule.ticks, stage.tick, stage.first())
    grads, squares = stage.push_all(done.grads)
    totals = done.totals._replace(squares=squares)
    return verbs.finish(engine, stage.sums, grads, totals, batch, stage.scale, progress, over_stages(model))


def over_stages(model: Model) -> OverLayers:
    """`totals.OverLayers` of stages: each has its own layers' arrays, and all of them take part in the reduction."""

    def over_layers(reduce: Callable, stacks: Any) -> Any:
        everywhere = reduce(jax.tree.map(among_all_stages, stacks))
        return jax.tree.map(lambda x: x[: model.num_layers], everywhere)

    return over_layers


def among_all_stages(own: jax.Array) -> jax.Array:
    """Scatters this stage's entries `[layers of a stage, ...]` into zeros for all stages' layers."""
    entries = len(own) * stage_collectives.stage()[1]
    zeros = varying(jnp.zeros((entries, *own.shape[1:]), own.dtype), AXES)
    return jax.lax.dynamic_update_slice_in_dim(zeros, own, collectives.first_layer(len(own)), 0)


def stage_entries(all_layers: jax.Array) -> jax.Array:
    """Slices this stage's entries from `[layers, ...]` of a segment, padded with zeros."""
    stages = stage_collectives.stage()[1]
    layers = layers_of_stage(len(all_layers), stages)
    padding = stages * layers - len(all_layers)
    entries = jnp.pad(all_layers, ((0, padding), *[(0, 0)] * (all_layers.ndim - 1)))
    return jax.lax.dynamic_slice_in_dim(entries, collectives.first_layer(layers), layers, 0)


def evaluate(engine: Engine, weights, *batch_BS: jax.Array):
    """Like `engine.evaluate`, for layers that are divided over `pp`: one stage after another, as one microbatch."""
    model = engine.model
    batch = Batch.of(engine, batch_BS)
    each = batch.on_device()
    starts_BS = varying(each.starts_BS, AXES)
    engine = stage_engine(engine)
    _, stages = stage_collectives.stage()
    outer = OuterLayers.of(engine, weights)
    layers = StageLayers(model, engine, weights)
    x_BsD = outer.embed(own_part(each.inputs_BS))

    def blocks(pattern: int, _, x_BSD):
        def inputs(l):
            return inputs_of_stage(model, first_layer_of_stage(engine) + l, NO_INPUTS)

        pattern_layers = layers.of_patterns[pattern]
        of_stage = each._replace(starts_BS=starts_BS, recipe_inputs=inputs, first=first_layer_of_stage(engine))
        verbs_of = {name: LayerVerbs.of(engine, segment) for name, segment in pattern_layers.segments.items()}
        (x_BSD,) = infer(pattern_layers, verbs_of, [x_BSD], of_stage)
        return x_BSD

    def of_stage(i, x_BSD):
        microbatches = jnp.where(jnp.arange(stages) == i, 0, NONE)  # of each stage: one goes through all
        x_BSD = layers.when_any(microbatches, blocks, x_BSD)
        return jax.lax.cond(i == stages - 1, lambda x: x, stage_collectives.to_next, x_BSD)

    x_BSD = jax.lax.fori_loop(0, stages, of_stage, varying(collect(x_BsD), AXES))
    targets = {name: own_part(array) for name, array in each.targets.items()}
    sums = outer.loss(spread(x_BSD, stages - 1), targets)
    return sum_of_devices(sums), batch.terms()
