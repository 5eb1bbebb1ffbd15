"""The evaluation of a batch by programs of one layer, for weights that rest in files."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from surojax.memory.by_host import by_host
from surojax.parallel import collectives
from surojax.placement.home import HOST
from surojax.placement.mesh import AXES
from surojax.placement.param import OUTER
from surojax.placement.table import Mesh
from surojax.step.batch import Batch
from surojax.step.between import LayerKind, OfDevices, SegmentFiles, SegmentLayer, layers_in_order
from surojax.step.outer import OuterLayers
from surojax.step.several_programs import Program, SeveralPrograms
from surojax.step.spec import Engine
from surojax.step.state import TrainState
from surojax.step.step_parts import jitted


class LayerEvaluation(SeveralPrograms):
    """The step of `train_step.make_eval_step` with weights in files.

    Its programs are "begin": (outer weights, *batch) -> activations; for each `LayerKind` (layer's weights as
    `WorkWeights.planned`, number of the layer in the model, activations, *batch) -> activations; and "end": (outer
    weights, activations, *batch) -> (the objective's sums, number of its terms).
    """

    def __init__(self, engine: Engine, plan: TrainState, mesh: Mesh):
        super().__init__(mesh, plan.weights)
        self.engine = engine
        self.number = plan.step
        self.segments = {segment.name: SegmentFiles(engine, plan, segment) for segment in engine.model.segments}
        self.layers = layers_in_order(self.segments)
        self.of_devices = OfDevices(plan.step.sharding.mesh)
        of_layers = {kind: self._layer(kind) for kind in self.layers.values()}
        self.functions = {"begin": self._begin(), **of_layers, "end": self._end()}

    def __call__(self, weights, *batch):
        """({"loss": summed, in nats, ...}, number of labels). Raises NvmeError."""
        return self.each(weights, [batch])[0]

    def each(self, weights, batches: Sequence[tuple]) -> list[tuple]:
        """Evaluates several batches, whose layers are read once; returns a call's result for each. Raises NvmeError."""
        stacks = {name: x.weights.in_memory(weights[name]) for name, x in self.segments.items()}
        xs = [self.run("begin", weights[OUTER], *batch) for batch in batches]

        def compute(layer: SegmentLayer, arrived) -> None:
            kind = self.layers[layer]
            number = self.segments[kind.segment].segment.numbers[layer.l]
            for i, batch in enumerate(batches):
                xs[i] = self.run(kind, (stacks[kind.segment][kind.part], arrived), number, xs[i], *batch)

        by_host(list(self.layers), lambda layer: self.segments[layer.segment].weights.read(layer.l), compute)
        return [self.run("end", weights[OUTER], x, *batch) for x, batch in zip(xs, batches, strict=True)]

    def programs(self, *batch) -> list[Program]:
        """See `SeveralPrograms`; `times` are those of one planned batch."""
        outer = self.plan[OUTER]
        begin = Program(self.functions["begin"], (outer, *batch), 1)
        jax.eval_shape(begin.function, *begin.arguments)
        x = self.of_devices.planned("x")
        kinds = list(self.layers.values())

        def layers(kind: LayerKind) -> Program:
            weights = self.segments[kind.segment].weights
            files = weights.files[kind.part]
            arguments = self._weights(kind), self.number, x, *batch
            others = outer, weights.arriving(kind.part)
            numbers = kinds.count(kind), others, "layers", files.round_read
            return Program(self.functions[kind], arguments, *numbers, put=files.planned_round(HOST))

        of_layers = [layers(kind) for kind in dict.fromkeys(kinds)]
        return [begin, *of_layers, Program(self.functions["end"], (outer, x, *batch), 1)]

    def _begin(self):
        def per_device(outer, *batch_BS):
            each = Batch.of(self.engine, batch_BS).on_device()
            return self.of_devices.leave("x", OuterLayers.of(self.engine, {OUTER: outer}).embed(each.inputs_BS))

        return self._program(per_device, (self.plan[OUTER],), self.of_devices.any_of())

    def _weights(self, kind: LayerKind) -> tuple:
        """The plan of the weights of a layer of this kind."""
        return self.segments[kind.segment].weights.planned(kind.part)

    def _layer(self, kind: LayerKind):
        layers = self.segments[kind.segment]

        def per_device(work, number, x, *batch_BS):
            each = Batch.of(self.engine, batch_BS).on_device()
            w = layers.fetch(kind, work, layers.index(number))
            x_BSD = layers.verbs.infer(w, self.of_devices.enter("x", x), number, kind.variant, each)
            return self.of_devices.leave("x", x_BSD)

        x = self.of_devices.any_of()
        return self._program(per_device, (self._weights(kind), self.number, x), x)

    def _end(self):
        def per_device(outer, x, *batch_BS):
            batch = Batch.of(self.engine, batch_BS)
            layers = OuterLayers.of(self.engine, {OUTER: outer})
            sums = layers.loss(self.of_devices.enter("x", x), batch.on_device().targets)
            return collectives.add_up(sums, *AXES), batch.terms()

        return self._program(per_device, (self.plan[OUTER], self.of_devices.any_of()))

    def _program(self, per_device: Callable, arguments: tuple, results: Any = None):
        arrays = len(self.engine.batch_arrays)
        return jitted(per_device, self.mesh, arguments, results, batch_arrays=arrays, accumulated=False)
