"""Forward and backward under pipeline parallelism: every stage runs the engine on its own layers, tick by tick.

    for each tick of the schedule:            what all stages do together     what each stage does by itself
        if a microbatch enters stage 0:       embed it
        if this stage has one forward:                                        engine.forward of its layers
        if one leaves the last stage:         head and loss
        if this stage has one backward:                                       engine.backward of its layers
        if one has left stage 0 backward:     push the embedding's gradient
        move activations to the next stage, their gradients to the previous one
    for each layer:                           push: sum over devices what is still local
    finish, as in engine.py

What all stages do together has collectives over `pp` (parallel/pipeline.py), and every stage takes part. What a stage
does by itself has none over `pp`: the gradients and weights that it communicates over `dp_shard`, `dp_replicate` and
`tp` are those of its own layers, and all devices of these axes are in the same stage.

Whether something happens in a tick is read from the schedule's tables (parallel/schedule.py). It happens in a loop of
one round or none (`when_any`): a loop updates its carry in place, the branches of a conditional may copy it.

Residuals are those of the microbatches in flight, microbatch a in slot a modulo their number. A layer's weights are
fetched for each microbatch. Each pass ends by prefetching one layer more than it needs, since the next pass may go
either way. Gradients that are local to a device until the last microbatch are summed over devices after the last tick:
which tick is a stage's last is known only when the program runs.

Arrays are one device's part. Shape suffixes: A microbatches, B local batch, S sequence (of the stages: this device's
part of it, if it is tensor parallel), D hidden size.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from surojax.errors import ConfigError
from surojax.memory.host import allocate, read, write
from surojax.models.model import Model, Segment
from surojax.parallel import collectives, pipeline, tensor
from surojax.parallel.collectives import Squares, varying
from surojax.parallel.pipeline import collect, own_part, spread
from surojax.parallel.schedule import NONE, SCHEDULES, Schedule, check_stages
from surojax.placement.mesh import AXES
from surojax.placement.param import OUTER
from surojax.step.engine import (
    BackwardCarry,
    Forward,
    ForwardCarry,
    Gradients,
    Microbatch,
    backward,
    count,
    forward,
    residuals_of,
)
from surojax.step.gradients import (
    Accumulators,
    accumulators,
    add,
    begin_backward,
    finish,
    push,
    read_accumulator,
)
from surojax.step.outer import embed, head, loss, push_embed
from surojax.step.residuals import Kept, Residuals
from surojax.step.spec import Engine
from surojax.step.weights import Layer, Layers


class Slot(Residuals):
    """The residuals of one microbatch in flight, in stacks with those of all of them: see `Residuals`.

    In host memory, a slot begins with an entry that belongs to no layer: these stacks lag by one layer, so the first
    layer writes and reads there.
    """

    def __init__(self, residuals: Residuals, start: jax.Array):
        """residuals: of a stage's layers. start: index of the first one in the stacks."""
        vars(self).update(vars(residuals))
        self.start = start

    def begin_backward(self, stack: list[jax.Array]) -> Kept:
        """The residuals in the carry before the last layer, which the forward pass has left in the stacks."""
        last = self.start + self.num_layers - 1
        return Kept(stack, read(stack, last) if self.home.streamed else None)

    def end_forward(self, kept: Kept) -> list[jax.Array]:
        """The stacks, with the last layer's residuals too."""
        last = self.start + self.num_layers - 1
        return kept.stack if kept.deferred is None else write(kept.stack, kept.deferred, last)

    def keep(self, kept: Kept, values, l) -> Kept:
        return super().keep(kept, values, self.start + l)

    def take(self, kept: Kept, l, variant):
        return super().take(kept, self.start + l, variant)


class TickCarry(NamedTuple):
    """The loop carry from tick to tick.

    x_BSD, dx_BSD: received from the stage before, and from the stage after. from_head: gradients of the last stage's
    results, this stage's part of them `[slots, B, s, D]`. saved: residuals of the microbatches in flight, stacks. loss:
    summed so far, on this device.
    """

    x_BSD: jax.Array
    dx_BSD: jax.Array
    from_head: jax.Array
    saved: list[jax.Array]
    grads: Accumulators
    loss: jax.Array


def of_stage(model: Model, stages: int) -> Model:
    """The model that one stage computes, without embedding and head: as many layers of every kind, in the same order.

    Raises ConfigError if stages would differ in more than the weights of their layers, or if blocks have a loss.
    """
    check_stages(model.num_layers, stages)
    segment, *others = model.segments
    if others or segment.has_auxiliary_loss:
        names = ", ".join(segment.name for segment in model.segments)
        raise ConfigError(
            f"pp_size: expected 1 for several kinds of layers or an auxiliary loss ({names}), for which more is not "
            f"built yet, got {stages}; leave it out"
        )
    layers = model.num_layers // stages
    variants = segment.variants[:layers]
    if variants * stages != segment.variants:
        raise ConfigError(
            f"pp_size: expected stages whose windows and rotary embeddings repeat, got {stages} stages of {layers} "
            "layers; choose one for which the layers of a stage are a multiple of the pattern"
        )
    return dataclasses.replace(model, segments=(dataclasses.replace(segment, variants=variants),))


def stage_engine(engine: Engine) -> Engine:
    """The engine of one stage."""
    return dataclasses.replace(engine, model=of_stage(engine.model, pipeline.stage()[1]))


class Stage:
    """One stage's part of a step, and its part of what all stages do together; see the module's docstring.

    Methods take the number of a microbatch, which is the same on all stages for what they do together.
    """

    def __init__(self, engine: Engine, weights, batch, schedule: Schedule, scale: jax.Array):
        """engine: of one stage. batch: inputs, labels and starts `[A, B, S]`. scale: of the loss in the gradient."""
        (self.segment,) = engine.model.segments
        self.engine = engine
        self.batch = varying(batch, AXES)
        self.schedule = schedule
        self.scale = scale
        self.number, self.stages = pipeline.stage()
        self.outer = varying(weights[OUTER])
        self.layers = Layers(engine, self.segment, weights[self.segment.name])
        self.residuals = residuals_of(engine, self.layers, self.outer, self.microbatch(0))
        self.entries = self.segment.num_layers + self.residuals.home.streamed  # of a slot
        self.slots = int(schedule.in_flight.max())
        self.head_slots = int(schedule.in_flight[-1])

    def first(self, weights) -> TickCarry:
        """The carry before the first tick."""
        engine = self.engine
        inputs_BS = self.microbatch(0).inputs_BS
        x = jax.ShapeDtypeStruct((*inputs_BS.shape, engine.model.hidden_size), engine.table.outer.dtype)
        batch, length, width = x.shape
        x_BSD = varying(jnp.zeros(x.shape, x.dtype), AXES)
        from_head = varying(jnp.zeros((self.head_slots, batch, length // self.stages, width), x.dtype), AXES)
        saved = allocate(self.residuals.zeros(self.slots * self.entries), engine.table.residuals.home)
        grads = zeros_in_host_memory(self.segment, accumulators(engine, weights))
        return TickCarry(x_BSD, x_BSD, from_head, saved, grads, varying(jnp.float32(0), AXES))

    def microbatch(self, a) -> Microbatch:
        inputs_BS, labels_BS, starts_BS = read(self.batch, a)
        return Microbatch(tensor.own_part(inputs_BS), tensor.own_part(labels_BS), starts_BS, lambda l: None)

    def slot(self, a) -> Slot:
        begin = a % self.slots * self.entries
        return Slot(self.residuals, begin + self.entries - self.segment.num_layers)

    def tick(self, t, carry: TickCarry) -> TickCarry:
        """The carry after one tick of the schedule."""
        forwards, backwards = (jnp.asarray(table)[t] for table in (self.schedule.forward, self.schedule.backward))
        carry = when_any(forwards[0], self.embed, carry)
        carry = when_any(forwards[self.number], self.forward, carry)
        carry = when_any(forwards[-1], self.head, carry)
        carry = when_any(backwards[-1], self.from_head, carry)
        carry = when_any(backwards[self.number], self.backward, carry)
        carry = when_any(backwards[0], self.push_embed, carry)
        carry = when_any(jnp.max(forwards), self.send_forward, carry)
        return when_any(jnp.max(backwards), self.send_backward, carry)

    def embed(self, a, carry: TickCarry) -> TickCarry:
        """All stages: the embeddings of a microbatch, which become x of stage 0."""
        ids_Bs = own_part(self.microbatch(a).inputs_BS)
        x_BsD = embed(self.outer, ids_Bs, self.engine.vocabulary_axes, self.engine.model.embedding_scale)
        x_BSD = collect(x_BsD)
        return carry._replace(x_BSD=jnp.where(self.number == 0, x_BSD, carry.x_BSD))

    def forward(self, a, carry: TickCarry) -> TickCarry:
        """This stage: its layers forward."""
        kept = self.residuals.first(carry.saved)
        early = self.layers.first()
        slot = self.slot(a)
        passed = forward(self.engine, self.layers, [carry.x_BSD], early, [self.microbatch(a)], slot, [kept])
        (done,) = passed.microbatches
        return carry._replace(x_BSD=done.x_BSD, saved=slot.end_forward(done.kept))

    def head(self, a, carry: TickCarry) -> TickCarry:
        """All stages: head and loss of the last stage's x."""
        engine = self.engine
        value, dx_BsD, d_outer = head(
            engine.model,
            self.outer,
            carry.grads.outer,
            spread(carry.x_BSD, self.stages - 1),
            own_part(self.microbatch(a).labels_BS),
            self.scale,
            chunks=engine.lmhead_chunks,
            axes=engine.vocabulary_axes,
            z_loss=engine.z_loss,
        )
        from_head = write(carry.from_head, dx_BsD, a % self.head_slots)
        return carry._replace(from_head=from_head, grads=carry.grads._replace(outer=d_outer), loss=carry.loss + value)

    def from_head(self, a, carry: TickCarry) -> TickCarry:
        """All stages: the gradient of the last stage's x, which becomes dx of the last stage."""
        dx_BSD = collect(read(carry.from_head, a % self.head_slots))
        return carry._replace(dx_BSD=jnp.where(self.number == self.stages - 1, dx_BSD, carry.dx_BSD))

    def backward(self, a, carry: TickCarry) -> TickCarry:
        """This stage: its layers backward, from the residuals in the microbatch's slot."""
        each = self.microbatch(a)
        slot = self.slot(a)
        kept = slot.begin_backward(carry.saved)
        passed = Forward([ForwardCarry(carry.dx_BSD, None, kept)], slot, self.layers.first(reverse=True))
        grads = begin_backward(self.segment, carry.grads, a, first=False)
        before = BackwardCarry([carry.dx_BSD], None, grads, collectives.no_squares(), [], None)
        done, _ = backward(self.engine, self.layers, before, passed, [each], first=False, last=False)
        return carry._replace(dx_BSD=done.dxs_BSD[0], grads=done.grads)

    def push_embed(self, a, carry: TickCarry) -> TickCarry:
        """All stages: the embedding's gradient from dx of stage 0."""
        ids_Bs = own_part(self.microbatch(a).inputs_BS)
        dx_BsD = spread(carry.dx_BSD, 0)
        engine = self.engine
        d_outer = push_embed(carry.grads.outer, ids_Bs, dx_BsD, engine.vocabulary_axes, engine.model.embedding_scale)
        return carry._replace(grads=carry.grads._replace(outer=d_outer))

    def send_forward(self, _, carry: TickCarry) -> TickCarry:
        """All stages: x goes to the next stage."""
        return carry._replace(x_BSD=pipeline.to_next(carry.x_BSD))

    def send_backward(self, _, carry: TickCarry) -> TickCarry:
        """All stages: dx goes to the previous stage."""
        return carry._replace(dx_BSD=pipeline.to_previous(carry.dx_BSD))

    def push_all(self, grads: Accumulators) -> tuple[Accumulators, Squares]:
        """(accumulators, their Squares) after the sums of every layer that are still local are summed over devices."""
        segment = self.segment
        last = segment.num_layers - 1

        def push_layer(i, carry):
            grads, squares = carry
            grads, sums = read_accumulator(segment, grads, last - i, first=False)
            layer = Layer(last - i, last - i, segment.variants[0], None)
            grads, of_layer = push(self.engine, segment, grads, sums, layer, last=True)
            return grads, add(squares, of_layer)

        grads = begin_backward(segment, grads, 0, first=False)
        return jax.lax.fori_loop(0, segment.num_layers, push_layer, (grads, collectives.no_squares()))


def zeros_in_host_memory(segment: Segment, grads: Accumulators) -> Accumulators:
    """Accumulators that begin with zeros in host memory too, since which tick is a stage's first is known too late."""
    sums = grads.layers[segment.name]
    if sums.deferred is None:
        return grads

    def layer(l, stack):
        return write(stack, sums.deferred, l)

    return grads.with_layers(segment.name, stack=jax.lax.fori_loop(0, segment.num_layers, layer, sums.stack))


def when_any(a: jax.Array, function: Callable, carry: TickCarry) -> TickCarry:
    """function(a, carry) if a is a microbatch, else carry. All devices of function's collectives have the same a."""
    return jax.lax.fori_loop(0, (a != NONE).astype(jnp.int32), lambda _, carry: function(a, carry), carry)


def loss_and_gradients(
    engine: Engine, weights, inputs_ABS: jax.Array, labels_ABS: jax.Array, starts_ABS=None, *, history=None, step=0
) -> Gradients:
    """`engine.loss_and_gradients`, for layers that are divided over `pp`."""
    assert history is None, "recipes with a history are refused with pp_size"
    engine = stage_engine(engine)
    schedule = SCHEDULES[engine.pp_schedule](inputs_ABS.shape[0], pipeline.stage()[1])
    scale = 1.0 / jnp.maximum(count(labels_ABS), 1).astype(jnp.float32)
    stage = Stage(engine, weights, (inputs_ABS, labels_ABS, starts_ABS), schedule, scale)
    done = jax.lax.fori_loop(0, schedule.ticks, stage.tick, stage.first(weights))
    grads, squares = stage.push_all(done.grads)
    grads, norm = finish(engine, grads, squares)
    return Gradients(collectives.add_up(done.loss, *AXES) * scale, grads, norm, None)


def evaluate(engine: Engine, weights, inputs_BS: jax.Array, labels_BS: jax.Array, starts_BS=None):
    """`engine.evaluate`, for layers that are divided over `pp`: one stage after another, as one microbatch."""
    engine = stage_engine(engine)
    model = engine.model
    (segment,) = model.segments
    number, stages = pipeline.stage()
    outer = varying(weights[OUTER])
    axes = engine.vocabulary_axes
    layers = Layers(engine, segment, weights[segment.name])
    starts_BS = varying(starts_BS, AXES)
    x_BsD = embed(outer, own_part(tensor.own_part(inputs_BS)), axes, model.embedding_scale)

    def block(layer: Layer, prefetched, x_BSD):
        return segment.block(layer.weights, x_BSD, None, layer.variant, starts_BS)[0], prefetched

    def blocks(_, x_BSD):
        return layers.loop(block, x_BSD, layers.first())[0]

    def of_stage(i, x_BSD):
        x_BSD = jax.lax.fori_loop(0, (number == i).astype(jnp.int32), blocks, x_BSD)
        return jax.lax.cond(i == stages - 1, lambda x: x, pipeline.to_next, x_BSD)

    x_BSD = jax.lax.fori_loop(0, stages, of_stage, varying(collect(x_BsD), AXES))
    labels_Bs = own_part(tensor.own_part(labels_BS))
    total = loss(model, outer, spread(x_BSD, stages - 1), labels_Bs, chunks=engine.lmhead_chunks, axes=axes)
    return collectives.add_up(total, *AXES), count(labels_BS)
