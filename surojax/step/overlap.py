"""The update of layer l while the next step's first forward pass computes layer l - 1 (`overlap_update`).

If master weights and moments are in host memory, the update keeps the host link busy and the GPU idle; a forward pass
does the opposite. So a step leaves its gradients pending, and the next step applies them:

    update embedding, final norm and head
    first group's forward pass, for l in layers:
        copy out layer l as updated; update layer l + 1; copy in layer l + 2;   each: x = block(weights of layer l, x)
    then as in engine.py; the new gradients are pending

The weights of that pass come from the update itself, so they are not read from host memory. Three layers of master
weights, moments and gradients are in device memory meanwhile. The accumulators are free when the first backward pass
begins: it writes the new sums over the pending gradients.

`OverlappedStep.finish` applies what is pending without a forward pass. Whoever reads the state needs it before:
evaluation, checkpoints, the end. No arithmetic differs from that of a step with its update, so results are the same to
the bit. Layers in files have the same by programs of one layer: file_step.py.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.host import exchange, join_parts, parts, read, write_layer
from surojax.models.model import Segment, Variant
from surojax.models.order import LayerLoop
from surojax.optim.optimizer import Scalars, UpdateContext
from surojax.placement.param import OUTER
from surojax.step.several_programs import Program, SeveralPrograms
from surojax.step.state import TensorState, TrainState, from_sections, section
from surojax.step.step_parts import StepParts
from surojax.step.stream import Flight, Layer, comes_in_pairs, hides_transfers, over
from surojax.step.update import Update
from surojax.step.verbs import Gradients
from surojax.step.weights import Gather, loops_over


class Pending(NamedTuple):
    """A training state with the gradients of its last step, which are not yet applied.

    state: as before the update, but its history is that after the step. grads, norm: see `verbs.Gradients`.
    """

    state: TrainState
    grads: Any
    norm: Any


@dataclasses.dataclass(frozen=True)
class UpdatedWeights:
    """Moves the weights in a pass that updates a run of layers: its lane "weights".

    Its flight when layer l begins: stack: of work weights, and of (master weights, moments), up to date for the layers
    before l. early: layer l's weights; ((master weights, moments), gradients) of layer l + 1. late: layer l as updated,
    to be written.

    begin: the number of the first layer in the stack of work weights. in_order: a layer of the state is written before
    another one is read. reads: the state of another layer is left to be read.
    """

    layers: "UpdatingSegment"
    begin: int
    in_order: bool
    reads: bool = True

    def arrive(self, flight: Flight, layer: Layer) -> tuple[Any, Flight]:
        """Returns (the updated layer's weights, the flight while it computes), writes it and updates the next layer."""
        (work, state), (w, old), updated = flight
        layers = self.layers
        l = layer.index
        following = layers.update(old, l + 1)
        work = write_layer(work, updated.weights, l - self.begin)
        new = (updated.master, updated.moments)
        # Beyond the last layer the last one is updated in vain; it is read in vain if it is in this loop.
        if not self.reads:
            state = write_layer(state, new, l)
            after = old
        elif self.in_order:
            # `exchange` keeps both directions busy, but the scheduler has products wait for its first reads.
            state = write_layer(state, new, l)
            after = layers.read(state, l + 2)
        else:
            state, read_state = exchange(state, new, l, l + 2)
            after = (read_state, read(layers.grads, l + 2))
        return w, Flight((work, state), (layers.gathered(following, layer.variant), after), following)


class UpdatingSegment:
    """The state of a segment whose layers a forward pass updates one after another.

    state, grads: before the update.
    """

    def __init__(self, gather: Gather, update: Update, segment: Segment, state: TensorState, grads, scalars: Scalars):
        self.segment = segment
        self.state = state
        self.grads = grads
        self.scalars = scalars
        self.update_layer = functools.partial(update.layer, segment.name)
        self.gather = gather

    def read(self, state: tuple, l) -> tuple:
        """Reads ((master weights, moments), gradients) of layer l."""
        return read(state, l), read(self.grads, l)

    def update(self, old: tuple, l) -> TensorState:
        """Updates layer l in device memory."""
        (master, moments), grads = old
        return self.update_layer(
            TensorState(self.state.weights, master, moments), grads, UpdateContext(self.scalars, l)
        )

    def gathered(self, updated: TensorState, variant: Variant):
        """All-gathers an updated layer's weights to what products read."""
        return self.gather.all_gather(self.gather.to_gather(updated.weights, variant))

    def loops(self, loop: LayerLoop) -> list[tuple[LayerLoop, bool]]:
        """Cuts a loop over this segment alone; returns whether a further layer's state is still to be read in each.

        The last two layers, for which nothing is left, are a loop of their own: copy engines copy in loops only, so
        neither loop may have one round. With sharded weights that takes more memory (docs/performance.md).
        """
        layers = loop.layers[self.segment.name]
        is_last = layers.stop == self.segment.num_layers
        if not is_last or loop.period > 1 or len(layers) in (1, 3) or self.gather.table.weights.sharded:
            return [(loop, True)]
        loops = [(loop.part(0, len(layers) - 2), True)] if len(layers) > 2 else []
        return [*loops, (loop.part(len(layers) - 2, len(layers)), False)]


class Updating(NamedTuple):
    """A segment on its way through a pass that updates it.

    number: of the part of the work weights that the pass is in. work: the parts' stacks. state: stacks of (master
    weights, moments). following: ((master weights, moments), gradients) of the layer after the updated one.
    """

    number: int
    work: list
    state: tuple
    updated: TensorState
    following: tuple


class UpdatingLayers:
    """Updates the layers of a stretch one after another in a forward pass; takes the place of `weights.Layers`."""

    def __init__(self, segments: Sequence[UpdatingSegment]):
        self.of = {x.segment.name: x for x in segments}

    @property
    def grads(self) -> dict[str, Any]:
        """The gradients by segment, before the update."""
        return {name: x.grads for name, x in self.of.items()}

    def first(self) -> None:
        """Prefetches nothing: `over` begins with copies of each segment's first two layers."""

    def begin_pass(self, segment: str, prefetched: None, counter: jax.Array | int, *, reverse: bool) -> None:
        """See `first`."""

    def over(
        self,
        bodies: dict[str, Callable],
        carry: Any,
        lanes: dict[str, dict[str, Any]],
        flights: dict[str, dict[str, Any]],
        *,
        tokens: int = 0,
        counter: jax.Array | int = 0,
    ) -> tuple[Any, dict[str, dict[str, Any]]]:
        """Like `Layers.over`, but updates each layer first and returns the new TensorState in place of "weights".

        tokens: see there; they decide the order of transfers. counter: of the loop around, which there is none of.
        """
        in_order = hides_transfers(tokens)
        flights = dict(flights)
        on_way = {name: self._begun(x) for name, x in self.of.items()}
        of_segments = {name: parts(x.state.weights) for name, x in self.of.items()}
        for loop in loops_over([x.segment for x in self.of.values()], of_segments):
            own = {name: flights[name] for name in loop.layers}
            lane_of = {}
            for name, layers in loop.layers.items():
                number = next(i for i, part in enumerate(of_segments[name]) if layers.start < part.stop)
                now = on_way[name] = on_way[name]._replace(number=number)
                w = self.of[name].gathered(now.updated, loop.variant(name))
                stacks = now.work[number], now.state
                own[name] = own[name] | {"weights": Flight(stacks, (w, now.following), now.updated)}
                lane_of[name] = UpdatedWeights(self.of[name], of_segments[name][number].start, in_order)
            one = self.of[next(iter(loop.layers))]
            for piece, reads in one.loops(loop) if loop.has_one_kind else [(loop, True)]:
                of_piece = {
                    name: {"weights": dataclasses.replace(lane, reads=reads)} | lanes[name]
                    for name, lane in lane_of.items()
                }
                # Two layers in the body of a loop, as in `Layers.over`.
                in_pairs = piece.has_one_kind and reads and comes_in_pairs(len(piece.kinds), piece.period)
                carry, own = over(piece, of_piece, bodies, carry, own, in_body=2 if in_pairs else None)
            for name in own:
                stacks, (_, following), updated = own[name]["weights"]
                # The next loop reads what this one wrote. If XLA (0.12) sees that, it crashes.
                work, state = jax.lax.optimization_barrier(stacks)
                before = on_way[name]
                all_work = [work if i == before.number else x for i, x in enumerate(before.work)]
                on_way[name] = Updating(before.number, all_work, state, updated, following)
            flights |= own
        return carry, {name: flights[name] | {"weights": self._ended(on_way[name])} for name in flights}

    @staticmethod
    def _begun(segment: UpdatingSegment) -> Updating:
        """Reads a segment's first two layers and updates the first one."""
        state = (segment.state.master, segment.state.moments)
        updated = segment.update(segment.read(state, 0), 0)
        work = [part.stack for part in parts(segment.state.weights)]
        return Updating(0, work, state, updated, segment.read(state, 1))

    @staticmethod
    def _ended(on_way: Updating) -> TensorState:
        """The state after the update of all layers."""
        return TensorState(join_parts(on_way.work), *on_way.state)


class OverlappedStep(SeveralPrograms):
    """The step of `train_step.make_train_step` with `Engine.overlap_update`; it has three programs.

    gradients: (weights, progress, *batch) -> (gradients, norm, progress, metrics), a step when nothing is pending.
    step: (Pending, *batch) -> (Pending, metrics), a step that applies what is pending.
    update: (state, gradients, norm) -> state, which applies what is pending and computes no gradients.
    """

    def __init__(self, parts: StepParts):
        super().__init__(parts.mesh, parts.plan)
        self.parts = parts
        norm = jax.ShapeDtypeStruct((), jnp.float32, sharding=parts.plan.step.sharding)
        self.pending = Pending(parts.plan, parts.planned_gradients, norm)
        self.functions = {"gradients": self._gradients(), "step": self._step(), "update": self._update()}

    def __call__(self, state: TrainState | Pending, *batch) -> tuple[Pending, dict]:
        """Runs a step, which leaves its own update pending."""
        if isinstance(state, Pending):
            return self.run("step", state, *batch)
        grads, norm, progress, metrics = self.run("gradients", state.weights, state.progress, *batch)
        return Pending(state._replace(**progress._asdict()), grads, norm), metrics

    def finish(self, pending: Pending) -> TrainState:
        """Applies the pending update and returns the state; what is pending is donated."""
        return self.run("update", *pending)

    def programs(self, *batch) -> list[Program]:
        """See `SeveralPrograms`. Most steps run "step" alone."""
        state = self.plan
        gradients = Program(self.functions["gradients"], (state.weights, state.progress, *batch), 0)
        step = Program(self.functions["step"], (self.pending, *batch), 1)
        return [gradients, step, Program(self.functions["update"], self.pending, 0)]

    def as_text(self) -> str:
        """The text of the program that runs in most steps."""
        return self.functions["step"].as_text()

    def memory_analysis(self) -> Any:
        """The memory of the program that runs in most steps, which needs the most."""
        return self.functions["step"].memory_analysis()

    def _gradients(self):
        """The jitted program `gradients`."""
        plan = self.parts.plan

        def per_device(weights, progress, *batch):
            gradients = self.parts.gradients(weights, *batch, progress=progress)
            return gradients.grads, gradients.norm, gradients.progress, self._metrics(gradients)

        results = (self.pending.grads, self.pending.norm, plan.progress, self.parts.metrics)
        return self.parts.program(per_device, (plan.weights, plan.progress), results)

    def _step(self):
        """The jitted program `step`."""
        engine = self.parts.engine
        update = self.parts.update

        def per_device(pending: Pending, *batch):
            state, grads, norm = pending
            scalars = update.scalars(state.step, norm)
            largest = update.largest_in_layer(grads)
            outer = update.outer(section(state, OUTER), grads[OUTER], scalars, largest=largest)

            def of_segment(segment: Segment) -> UpdatingSegment:
                old = section(state, segment.name)
                gather = Gather.of(engine, segment)
                return UpdatingSegment(gather, update, segment, old, grads[segment.name], scalars)

            updating = [UpdatingLayers([of_segment(x) for x in stretch]) for stretch in engine.model.stretches]
            weights = state.weights | {OUTER: outer.weights}
            gradients = self.parts.gradients(weights, *batch, progress=state.progress.next(), updating=updating)
            new = from_sections(gradients.progress, gradients.updated | {OUTER: outer})
            return Pending(new, gradients.grads, gradients.norm), self._metrics(gradients)

        return self.parts.program(per_device, (self.pending,), (self.pending, self.parts.metrics), donated=(0,))

    def _update(self):
        """The jitted program `update`."""
        update = self.parts.update

        def per_device(state: TrainState, grads, norm):
            return update.everything(state, grads, update.scalars(state.step, norm), state.progress)

        return self.parts.program(per_device, self.pending, self.parts.plan, batch=False, donated=(0,))

    def _metrics(self, gradients: Gradients) -> dict[str, jax.Array]:
        """Metrics of a step."""
        return gradients.reported(self.parts.update.scalars(gradients.progress.step, gradients.norm)["lr"])
