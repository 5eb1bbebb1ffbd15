"""The evaluation of a batch by programs of one layer, for weights that rest in files."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax

from surojax.parallel import collectives
from surojax.placement.home import HOST
from surojax.placement.mesh import AXES
from surojax.placement.param import OUTER
from surojax.placement.table import Mesh
from surojax.step.batch import Batch
from surojax.step.between import LayerKind, OfDevices, SegmentLayer
from surojax.step.by_host import by_host
from surojax.step.outer import OuterLayers
from surojax.step.spec import Engine
from surojax.step.state import TrainState
from surojax.step.step_parts import Program, jitted
from surojax.step.weights import Gather
from surojax.step.work_weights import WorkWeights


class LayerEvaluation:
    """The step of `train_step.make_eval_step`; it is lowered, compiled and called in the same way.

    begin: (outer weights, *batch) -> activations. layers: for each `LayerKind` of a layer, (layer's weights as
    `WorkWeights.planned`, number of the layer in its segment, activations, *batch) -> activations. end: (outer weights,
    activations, *batch) -> (the objective's sums, number of its terms).
    """

    def __init__(self, engine: Engine, plan: TrainState, mesh: Mesh):
        self.engine = engine
        self.plan = plan
        self.mesh = mesh
        self.segments = {segment.name: segment for segment in engine.model.segments}
        self.weights = {name: WorkWeights(plan.weights[name]) for name in self.segments}
        self.kinds = {
            SegmentLayer(name, l): LayerKind(name, *kind)
            for name, segment in self.segments.items()
            for l, kind in enumerate(zip(self.weights[name].part_of, segment.variants, strict=True))
        }
        self.of_devices = OfDevices(plan.step.sharding.mesh)
        self.begin: Any = self._begin()
        self.layers: dict[LayerKind, Any] = {kind: self._layer(kind) for kind in dict.fromkeys(self.kinds.values())}
        self.end: Any = self._end()

    def __call__(self, weights, *batch):
        """({"loss": summed, in nats, ...}, number of labels). Raises NvmeError."""
        return self.each(weights, [batch])[0]

    def each(self, weights, batches: Sequence[tuple]) -> list[tuple]:
        """What a call returns, for each of several batches. Their layers are read once. Raises NvmeError."""
        stacks = {name: x.in_memory(weights[name]) for name, x in self.weights.items()}

        def done(results):
            if jax.default_backend() == "cpu" and self.mesh.size > 1:
                jax.block_until_ready(results)  # several programs with collectives in flight can block each other
            return results

        xs = [done(self.begin(weights[OUTER], *batch)) for batch in batches]

        def compute(layer: SegmentLayer, arrived) -> None:
            kind = self.kinds[layer]
            for i, batch in enumerate(batches):
                work = stacks[kind.segment][kind.part], arrived
                xs[i] = done(self.layers[kind](work, layer.l, xs[i], *batch))

        by_host(list(self.kinds), lambda layer: self.weights[layer.segment].read(layer.l), compute)
        return [done(self.end(weights[OUTER], x, *batch)) for x, batch in zip(xs, batches, strict=True)]

    def lower(self, weights, *batch) -> "LayerEvaluation":
        """The evaluation with all programs lowered. weights: planned, those that it was made from."""
        begin = self.begin.lower(weights[OUTER], *batch)
        x = self.of_devices.planned("x")
        each = {kind: f.lower(self._planned(kind), 0, x, *batch) for kind, f in self.layers.items()}
        return self._with(begin, each, self.end.lower(weights[OUTER], x, *batch))

    def compile(self, compiler_options=None) -> "LayerEvaluation":
        """The lowered evaluation, compiled."""
        each = {kind: f.compile(compiler_options) for kind, f in self.layers.items()}
        return self._with(self.begin.compile(compiler_options), each, self.end.compile(compiler_options))

    def programs(self, *batch) -> list[Program]:
        """The programs with planned arguments, in the order in which they first run for one planned batch."""
        outer, number = self.plan.weights[OUTER], self.plan.step
        begin = Program(self.begin, (outer, *batch), 1)
        jax.eval_shape(self.begin, *begin.arguments)
        x = self.of_devices.planned("x")
        programs = [begin]
        for kind, function in self.layers.items():
            weights = self.weights[kind.segment]
            files = weights.files[kind.part]
            arguments = self._planned(kind), number, x, *batch
            others = outer, weights.arriving(kind.part)
            programs.append(
                Program(
                    function,
                    arguments,
                    list(self.kinds.values()).count(kind),
                    others,
                    "layers",
                    files.round_read,
                    put=files.planned_round(HOST),
                )
            )
        return [*programs, Program(self.end, (outer, x, *batch), 1)]

    def _with(self, begin, layers: dict, end) -> "LayerEvaluation":
        new = copy.copy(self)
        new.begin, new.layers, new.end = begin, layers, end
        return new

    def _begin(self):
        def per_device(outer, *batch_BS):
            each = Batch.of(self.engine, batch_BS).on_device(lambda l: None)
            return self.of_devices.leave("x", OuterLayers.of(self.engine, {OUTER: outer}).embed(each.inputs_BS))

        return self._program(per_device, (self.plan.weights[OUTER],), self.of_devices.any_of())

    def _planned(self, kind: LayerKind) -> tuple:
        """The plan of the weights of a layer of this kind."""
        return self.weights[kind.segment].planned(kind.part)

    def _layer(self, kind: LayerKind):
        segment = self.segments[kind.segment]
        weights, gather = self.weights[kind.segment], Gather.of(self.engine, segment)

        def per_device(work, l, x, *batch_BS):
            each = Batch.of(self.engine, batch_BS).on_device(lambda l: None)
            w = gather.of_layer(weights.layer(kind.part, work, l), kind.variant)
            x_BSD = self.of_devices.enter("x", x)
            x_BSD, _ = segment.block(w, x_BSD, None, kind.variant, each.starts_BS)
            return self.of_devices.leave("x", x_BSD)

        x = self.of_devices.any_of()
        return self._program(per_device, (self._planned(kind), self.plan.step, x), x)

    def _end(self):
        def per_device(outer, x, *batch_BS):
            batch = Batch.of(self.engine, batch_BS)
            layers = OuterLayers.of(self.engine, {OUTER: outer})
            sums = layers.loss(self.of_devices.enter("x", x), batch.on_device(lambda l: None).targets)
            return collectives.add_up(sums, *AXES), batch.terms()

        return self._program(per_device, (self.plan.weights[OUTER], self.of_devices.any_of()))

    def _program(self, per_device: Callable, arguments: tuple, results: Any = None):
        arrays = len(self.engine.batch_arrays)
        return jitted(per_device, self.mesh, arguments, results, batch_arrays=arrays, accumulated=False)
