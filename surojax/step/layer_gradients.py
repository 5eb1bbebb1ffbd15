"""Loss and gradients by programs of one layer, which the host runs one after another (memory/by_host.py).

A layer's residuals and gradients are results of one program and arguments of another. So they need not stay in memory:
between the two they rest where the placement table says, in files too.

    begin                        all:  x = embed(tokens)
    forward,   l in layers       w = fetch(l);  all: save x;  x = block(w, x)
    head                         all:  loss, dx = head(x)
    backward,  l reversed        w = fetch(l);  all: dw, dx = vjp(block)(w, saved x)(dx);  sums += dw;  push(l, sums)
    finish                       all:  push(embedding, dx);  the global norm, and the update of outer layers in memory

It is the step of engine.py with all microbatches in one group, in the same order, and equal to it to the bit. Weights
are fetched twice a step, and no accumulators are read. The activations of all microbatches are in device memory.
Weights that rest in files come to the device a layer early; those in host memory are copied when their layer begins.
With `Engine.overlap_update` the forward pass has w = update(l) of the step before in place of fetch(l).

Shape suffixes: A microbatches, B local batch, S sequence (or its part, see outer.py), D hidden size.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from surojax.memory.by_host import by_host
from surojax.memory.host import put
from surojax.memory.in_file import InFile
from surojax.memory.layer_file import Store
from surojax.models.model import Segment, Variant
from surojax.parallel.collectives import varying
from surojax.placement.home import HOST, Home
from surojax.placement.layout import batch_sharding
from surojax.placement.mesh import AXES
from surojax.placement.param import OUTER
from surojax.step import verbs
from surojax.step.batch import Batch, recipe_inputs_of
from surojax.step.between import (
    NO_FILES,
    LayerKind,
    OfDevices,
    SegmentFiles,
    SegmentLayer,
    StacksInFiles,
    in_round,
    in_rounds,
    layers_in_order,
    of_round,
)
from surojax.step.file_step import UpdatingRounds
from surojax.step.gradients import Sums, outer_sums
from surojax.step.outer import OuterLayers
from surojax.step.residuals import Residuals
from surojax.step.several_programs import Program
from surojax.step.state import Progress, TensorState, section
from surojax.step.state_plan import bytes_per_device
from surojax.step.step_gradients import StepGradients
from surojax.step.step_parts import StepParts
from surojax.step.tables import without_tables
from surojax.step.totals import BACKWARD, FORWARD, LayerTotals, Totals, auxiliary_loss, sum_of_devices

LAYERS_IN_FLIGHT = 3  # of a class in files, in host memory: one that is read, the one of the program, one written


class Carried(NamedTuple):
    """Values that one program hands on to the next, besides activations or their gradients.

    l: number of the layer that the next program computes. totals: before the head all but the gradients of embedding
    and head, after it those that `totals.BACKWARD` names; `finish` gets the others. d_statistics: after the head the
    gradients of the totals' statistics, {} without an auxiliary loss.
    """

    l: jax.Array
    totals: Totals
    d_statistics: dict[str, Any]


class LayerGradients(StepGradients):
    """Computes the gradients of a `file_step.FileStep` layer by layer, and updates its embedding and head."""

    def __init__(self, step: StepParts, files: StacksInFiles):
        super().__init__(step, {})
        engine = self.engine = step.engine
        self.segments = {x.name: SegmentFiles(engine, step.plan, x, files) for x in engine.model.segments}
        self.layers = layers_in_order(self.segments)
        self.saved_as: dict[tuple[str, Variant], Any] = {}  # structure of what a block saves
        self.of_devices = OfDevices(step.plan.step.sharding.mesh)
        self.kinds = list(self.layers.values())
        kinds = dict.fromkeys(self.kinds)
        described = {
            "begin": self._begin(),
            **{("forward", kind): self._forward(kind) for kind in kinds},
            "head": self._head(),
            **{("backward", kind): self._backward(kind) for kind in kinds},
            "finish": self._finish(),
        }
        self.functions = {name: step.program(*x) for name, x in described.items()}

    def __call__(self, run: Callable, outer: TensorState, progress: Progress, weights, *batch):
        """Computes a step's gradients and updates the outer layers; returns what `file_step.FileStep` says.

        run: `SeveralPrograms.run`. outer, progress: donated. weights: by segment; or `UpdatingRounds`, which the
        forward pass updates. Raises NvmeError.
        """
        segments, order = self.segments, list(self.layers)
        if isinstance(weights, UpdatingRounds):
            late, stacks = weights, weights.work
        else:
            late, stacks = None, {name: x.weights.in_memory(weights[name]) for name, x in segments.items()}
        activations, carried = run("begin", outer.weights, progress, *batch)

        def forward(layer: SegmentLayer, w):
            nonlocal activations, carried
            kind = self.layers[layer]
            arguments = (stacks[kind.segment][kind.part], w), activations, carried, progress, *batch
            activations, carried, saved = run(("forward", kind), *arguments)
            return saved

        def backward(layer: SegmentLayer, arrived):
            nonlocal activations, carried
            kind = self.layers[layer]
            w, saved = arrived
            arguments = (stacks[kind.segment][kind.part], w), saved, activations, carried, progress, *batch
            activations, carried, grads = run(("backward", kind), *arguments)
            return grads

        def update_and_forward(layer: SegmentLayer, arrived):
            assert late
            to_files, weights = late.update(layer, arrived)
            return to_files, forward(layer, segments[layer.segment].weights.on_device(layer.l, weights))

        def read_weights(layer: SegmentLayer):
            return segments[layer.segment].weights.read(layer.l)

        def read_saved(layer: SegmentLayer):
            return read_weights(layer), segments[layer.segment].residuals.read(layer.l)

        def write_saved(layer: SegmentLayer, saved) -> None:
            segments[layer.segment].residuals.write(layer.l, saved)

        def write(layer: SegmentLayer, left) -> None:
            assert late
            to_files, saved = left
            late.write(layer, to_files)
            write_saved(layer, saved)

        def write_grads(layer: SegmentLayer, grads) -> None:
            segments[layer.segment].grads.write(layer.l, grads)

        if late:
            late.over_all(update_and_forward, write)
        else:
            by_host(order, read_weights, forward, write_saved)
        activations, carried, totals = run("head", outer.weights, activations, carried, *batch)
        by_host(order[::-1], read_saved, backward, write_grads)
        return run("finish", outer, progress, activations, carried, totals, *batch)

    def read(self, layer: SegmentLayer):
        """Reads a layer's gradients for its update, a round of each stack, and forgets them. Raises NvmeError."""
        return self.segments[layer.segment].grads.read(layer.l)

    def of_layer(self, segment: str, update_inputs, layer, l):
        """Converts the result of `read` to a layer's gradients in device memory. Inside `jit`."""
        return of_round(layer)

    # -- Plans -------------------------------------------------------------------------------------------------------

    def programs(self, outer: TensorState, progress: Progress, weights, *batch) -> list[Program]:
        """Plans the programs in the order in which they first run. See `__call__`."""
        functions, kinds = self.functions, dict.fromkeys(self.kinds)
        work = {kind: self.segments[kind.segment].weights.planned(kind.part) for kind in kinds}
        files = {kind: self.segments[kind.segment].weights.files[kind.part] for kind in kinds}
        fetched = {kind: of_kind.planned_round(HOST) for kind, of_kind in files.items()}
        every = [(x.weights, number) for x in self.segments.values() for number in range(len(x.weights.parts))]
        arriving = max((weights.arriving(number) for weights, number in every), key=bytes_per_device)
        step_inputs = (progress, *batch)
        begin = Program(functions["begin"], (outer.weights, *step_inputs), 1)
        jax.eval_shape(begin.function, *begin.arguments)
        activations, carried = self.of_devices.planned("forward")
        forward, backward = [], []
        for kind in kinds:
            arguments = (work[kind], activations, carried, *step_inputs)
            program = Program(functions["forward", kind], arguments, self.kinds.count(kind), (), "forward")
            jax.eval_shape(program.function, *arguments)
            if self.engine.overlap_update:  # weights come from the update, not from files
                program = program._replace(put=files[kind].written(fetched[kind]))
            else:
                program = program._replace(read=files[kind].round_read, put=fetched[kind])
            forward.append(program)
        head_arguments = outer.weights, activations, carried, *batch
        head = Program(functions["head"], head_arguments, 1, self._stored("residuals"))
        jax.eval_shape(head.function, *head.arguments)
        activations, carried = self.of_devices.planned("backward")
        totals = self.of_devices.planned("totals")
        saved_bytes = {name: x.residuals.files.round_written for name, x in self.segments.items()}
        for i, kind in enumerate(kinds):
            others = self._stored("residuals", kind.segment), arriving
            forward[i] = forward[i]._replace(others=others, written=saved_bytes[kind.segment])
        for kind in kinds:
            name = kind.segment
            arguments = (work[kind], self.planned_saved(name), activations, carried, *step_inputs)
            others = self._stored("residuals", name), self.others_of_update(name), arriving, totals
            read = files[kind].round_read + saved_bytes[name]
            numbers = self.kinds.count(kind), others, "backward", read, self.file_bytes(name)
            backward.append(Program(functions["backward", kind], arguments, *numbers, put=fetched[kind]))
        grads = self._stored("grads", self.kinds[0].segment)
        end_arguments = outer, progress, activations, carried, totals, *batch
        end = Program(functions["finish"], end_arguments, 1, grads)
        return [begin, *forward, head, *backward, end]

    def planned_saved(self, segment: str) -> list[jax.ShapeDtypeStruct]:
        """Plans a layer's residuals, a round of each array; needs the traced forward program."""
        return jax.tree.map(in_round, self.of_devices.planned(f"saved {segment}", self.memory_of("residuals")))

    def memory_of(self, row: str) -> Home:
        """Memory of a program's results in this tensor class: host memory if they go on to a file."""
        home = getattr(self.engine.table, row).home
        return HOST if home.in_file else home

    def planned_grads(self, segment: str):
        """Plans a layer's gradients, a round of each stack."""
        stacks = self.step.planned_gradients[segment]
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype, sharding=x.sharding), stacks)

    def file_bytes(self, segment: str) -> Counter[str]:
        """Bytes of a layer's gradients that are in files, by row."""
        return self.segments[segment].grads.files.round_written

    def others_of_update(self, segment: str) -> list:
        """Plans the gradients of other layers that are in memory while a layer is updated."""
        return self._stored("grads", segment)

    def in_memory(self) -> list:
        """Plans all layers' gradients in memory."""
        return self._stored("grads")

    def _stored(self, row: Literal["grads", "residuals"], segment: str = "") -> list:
        """Plans the layers' arrays of a tensor class that are in memory, layer by layer.

        segment: of the layer whose arrays are left out; "": none are. Of a row in files, as many layers as are in
        flight, each as large as the largest.
        """
        plans = {
            name: {"grads": self.planned_grads, "residuals": self.planned_saved}[row](name) for name in self.segments
        }
        if getattr(self.engine.table, row).home.in_file:
            largest = max(plans.values(), key=lambda plan: bytes_per_device(plan, HOST))
            return [largest] * (LAYERS_IN_FLIGHT - bool(segment))
        return [plans[name] for name, x in self.segments.items() for _ in range(len(x.kinds) - (name == segment))]

    # -- Programs, as the arguments of `StepParts.program` ------------------------------------------------------------

    def batch(self, arrays, progress: Progress) -> tuple[Batch, Callable, jax.Array]:
        """Makes (the batch, its `recipe_inputs`, scale of the loss) inside a program."""
        batch = Batch.of(self.engine, arrays)
        scale = batch.scale()
        return batch, recipe_inputs_of(self.engine.model, progress, batch.microbatches, scale), scale

    def enter(self, pass_name: str, activations, carried) -> tuple[jax.Array, Carried]:
        """Returns this device's (activations `[A, B, S, D]` or their gradients, carried values), inside a program.

        pass_name: of the pass whose programs handed them on, "forward" or "backward".
        """
        return self.of_devices.enter(pass_name, (activations, carried))

    def leave(self, pass_name: str, xs_ABSD: jax.Array, carried: Carried) -> tuple:
        """A program's results from the values of one device, for `enter`."""
        return self.of_devices.leave(pass_name, (xs_ABSD, carried))

    def _begin(self) -> tuple:
        def per_device(outer, progress, *arrays):
            batch, recipe_inputs, _ = self.batch(arrays, progress)
            layers = OuterLayers.of(self.engine, {OUTER: outer})

            def embed(_, a):
                return _, layers.embed(batch.microbatch(a, recipe_inputs).inputs_BS)

            _, xs_ABSD = jax.lax.scan(embed, None, jnp.arange(batch.microbatches))
            carried = Carried(jnp.int32(0), Totals.zeros(self.engine), {})
            return self.leave("forward", xs_ABSD, carried)

        plan = self.step.plan
        any_of = self.of_devices.any_of
        return per_device, (plan.weights[OUTER], plan.progress), (any_of(), any_of())

    def _forward(self, kind: LayerKind) -> tuple:
        """The program of the forward pass of one layer."""
        name, part, variant = kind
        layers = self.segments[name]

        def per_device(work, activations, carried, progress, *arrays):
            batch, recipe_inputs, _ = self.batch(arrays, progress)
            xs_ABSD, (number, totals, d_statistics) = self.enter("forward", activations, carried)
            l = layers.index(number)
            w = layers.fetch(kind, work, l)

            def microbatch(of_layers: Totals, row):
                a, x_BSD = row
                each = batch.microbatch(a, recipe_inputs)
                x_BSD, saved, more = layers.verbs.forward(w, x_BSD, number, variant, each)
                self.saved_as[name, variant] = jax.tree.structure(saved)
                return of_layers.plus(more, name, l, number), (x_BSD, Residuals.arrays(saved))

            rows = (jnp.arange(batch.microbatches), xs_ABSD)
            of_layers, (xs_ABSD, saved) = jax.lax.scan(microbatch, totals.only(FORWARD), rows)
            carried = Carried(number + 1, totals.updated(of_layers), d_statistics)
            kept = put(in_rounds(self.of_devices.leave(f"saved {name}", saved)), self.memory_of("residuals"))
            return *self.leave("forward", xs_ABSD, carried), kept

        plan = self.step.plan
        any_of = self.of_devices.any_of
        arguments = (layers.weights.planned(part), any_of(), any_of(), plan.progress)
        results = (any_of(), any_of(), in_round(any_of(self.memory_of("residuals"))))
        return per_device, arguments, results, (1, 2)

    def _head(self) -> tuple:
        def per_device(outer, activations, carried, *arrays):
            batch = Batch.of(self.engine, arrays)
            scale = batch.scale()
            xs_ABSD, (number, totals, _) = self.enter("forward", activations, carried)
            layers = OuterLayers.of(self.engine, {OUTER: outer})
            totals = totals._replace(d_outer=outer_sums(self.engine, outer))

            def microbatch(of_head: Totals, row):
                a, x_BSD = row
                targets = batch.microbatch(a, lambda a, l: None).targets
                dx_BSD, of_head = verbs.head(layers, x_BSD, targets, scale, of_head)
                return of_head, dx_BSD

            rows = (jnp.arange(batch.microbatches), xs_ABSD)
            of_head, dxs_ABSD = jax.lax.scan(microbatch, totals.only(("d_outer", "sums")), rows)
            totals = totals.updated(of_head).after_forward([xs_ABSD])
            d_statistics = {}
            if self.engine.auxiliary:
                d_statistics = auxiliary_loss(self.engine, sum_of_devices(totals.statistics), batch)[1]
            carried = Carried(number - 1, totals.only(BACKWARD), varying(d_statistics, AXES))
            others = self.of_devices.leave("totals", totals.without(BACKWARD))
            return *self.leave("backward", dxs_ABSD, carried), others

        any_of = self.of_devices.any_of
        arguments = (self.step.plan.weights[OUTER], any_of(), any_of())
        return per_device, arguments, (any_of(),) * 3, (1, 2)

    def _backward(self, kind: LayerKind) -> tuple:
        """The program of the backward pass of one layer."""
        name, part, variant = kind
        layers = self.segments[name]

        def per_device(work, kept, activations, carried, progress, *arrays):
            batch, recipe_inputs, _ = self.batch(arrays, progress)
            dxs_ABSD, (number, totals, d_statistics) = self.enter("backward", activations, carried)
            saved = self.of_devices.enter(f"saved {name}", of_round(kept))
            l = layers.index(number)
            w = layers.fetch(kind, work, l)
            accumulator = Sums(self.engine, layers.segment)
            d_counted = jax.tree.map(lambda x: x[l], d_statistics.get(name))

            def microbatch(carry, row):
                sums, of_layers = carry
                a, arrays, dx_BSD = row
                saved = self.saved_as[name, variant].unflatten(arrays)
                each = batch.microbatch(a, recipe_inputs)
                dw, dx_BSD, more = layers.verbs.backward(w, saved, dx_BSD, d_counted, number, variant, each)
                return (accumulator.accumulated(sums, dw), of_layers.plus(more, name, l, number)), dx_BSD

            rows = (jnp.arange(batch.microbatches), saved, dxs_ABSD)
            (sums, totals), dxs_ABSD = jax.lax.scan(microbatch, (accumulator.of_layer(w), totals), rows)
            sums, squares = accumulator.push(sums, last=True)
            totals = totals.plus(LayerTotals(squares=squares), name, l, number)
            grads = put(in_rounds(accumulator.shards_of_layer(sums)), self.memory_of("grads"))
            carried = Carried(number - 1, totals, d_statistics)
            return *self.leave("backward", dxs_ABSD, carried), grads

        plan = self.step.plan
        any_of = self.of_devices.any_of
        kept = in_round(any_of(self.memory_of("residuals")))
        arguments = (layers.weights.planned(part), kept, any_of(), any_of(), plan.progress)
        return per_device, arguments, (any_of(), any_of(), self.planned_grads(name)), (2, 3)

    def _finish(self) -> tuple:
        def per_device(outer, progress, activations, carried, others, *arrays):
            batch, recipe_inputs, scale = self.batch(arrays, progress)
            dxs_ABSD, (_, of_layers, _) = self.enter("backward", activations, carried)
            totals = self.of_devices.enter("totals", others).updated(of_layers)
            layers = OuterLayers.of(self.engine, {OUTER: outer.weights})

            def microbatch(of_end: Totals, row):
                a, dx_BSD = row
                tokens_BS = batch.microbatch(a, recipe_inputs).inputs_BS
                return verbs.end(layers, tokens_BS, dx_BSD, of_end), None

            rows = (jnp.arange(batch.microbatches), dxs_ABSD)
            of_end, _ = jax.lax.scan(microbatch, totals.only(("d_outer",)), rows)
            totals = totals.updated(of_end).after_backward([dxs_ABSD])
            done = verbs.finish(self.engine, {}, {}, totals, batch, scale, progress)
            return self.finished(outer, done)

        any_of = self.of_devices.any_of
        arguments = (*self.donated, any_of(), any_of(), any_of())
        return per_device, arguments, self.results, (0, 1)


def planned_files(step: StepParts, store: Store, batch: tuple[int, int, int] | None) -> StacksInFiles:
    """Plans the gradients and residuals that a step keeps in files, and reserves room for them in the store.

    batch: (microbatches, sequences of a microbatch, sequence length) of a step, of all devices together; residuals in
    files need it.
    """
    table = step.engine.table
    if not table.by_layer:
        return NO_FILES
    gradients = LayerGradients(step, NO_FILES)

    def stacks(row: str, planned: Callable[[str], Any]) -> dict[str, Any]:
        """Plans, for each segment, file-backed stacks with room for every layer's arrays."""

        def of_segment(segment: Segment):
            def stack(x: jax.ShapeDtypeStruct) -> InFile:
                sharding = jax.NamedSharding(x.sharding.mesh, x.sharding.spec)
                return InFile(store, row, (segment.num_layers, *x.shape[1:]), x.dtype, sharding, segment.start)

            return jax.tree.map(stack, planned(segment.name))

        return {segment.name: of_segment(segment) for segment in step.engine.model.segments}

    grads = stacks("grads", gradients.planned_grads) if table.grads.home.in_file else {}
    residuals = {}
    if table.residuals.home.in_file:
        assert batch is not None, "residuals in files are planned for a batch"
        plan = step.plan
        arrays = step.engine.planned_batch(batch, batch_sharding(plan.step.sharding.mesh))
        gradients.programs(without_tables(section(plan, OUTER)), plan.progress, plan.weights, *arrays)
        residuals = stacks("residuals", gradients.planned_saved)
    return StacksInFiles(grads, residuals)
