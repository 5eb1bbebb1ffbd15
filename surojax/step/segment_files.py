"""The layers of a segment between the programs of one layer that the host runs: weights, gradients, residuals."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp

from surojax.memory.in_file import InFile
from surojax.models.model import Segment
from surojax.step.between import LayerKind, LayerStore, SegmentLayer
from surojax.step.spec import Engine
from surojax.step.state import TrainState
from surojax.step.verbs import LayerVerbs
from surojax.step.weights import Gather
from surojax.step.work_weights import WorkWeights


class StacksInFiles(NamedTuple):
    """File-backed stacks of gradients and residuals, by segment. Those of missing segments are in memory.

    grads: sharded as master weights `[L, ...]`. residuals: `[L, devices, A, ...]`, of what each device saves.
    """

    grads: Mapping[str, Any] = MappingProxyType({})
    residuals: Mapping[str, list[InFile]] = MappingProxyType({})


NO_FILES = StacksInFiles()


class SegmentFiles:
    """A segment, with its layers' weights, gradients and residuals between two programs.

    verbs: what a layer computes. kinds: of its layers.
    """

    def __init__(self, engine: Engine, plan: TrainState, segment: Segment, files: StacksInFiles = NO_FILES):
        """plan: of the training state. files: of gradients and residuals."""
        self.segment = segment
        self.verbs = LayerVerbs.of(engine, segment)
        self.gather = Gather.of(engine, segment)
        self.weights = WorkWeights(plan.weights[segment.name])
        self.grads = LayerStore(files.grads.get(segment.name))
        self.residuals = LayerStore(files.residuals.get(segment.name))
        self.kinds = [LayerKind(segment.name, *x) for x in zip(self.weights.part_of, segment.variants, strict=True)]

    def fetch(self, kind: LayerKind, work: Any, l: Any) -> Any:
        """All-gathers layer l's weights to what products read, inside a program. work: see `WorkWeights.planned`."""
        return self.gather.of_layer(self.weights.layer(kind.part, work, l), kind.variant)

    def index(self, number: Any) -> Any:
        """Converts a layer's number in the model to its index in the segment."""
        numbers = self.segment.numbers
        first = numbers[0]
        if numbers[-1] - first == len(numbers) - 1:
            return number - first if first else number
        return jnp.searchsorted(jnp.asarray(numbers), number)

    def number(self, index: Any) -> Any:
        """Converts a layer's index in the segment to its number in the model."""
        numbers = self.segment.numbers
        first = numbers[0]
        return first + index if numbers[-1] - first == len(numbers) - 1 else jnp.asarray(numbers)[index]


def layers_in_order(segments: dict[str, SegmentFiles]) -> dict[SegmentLayer, LayerKind]:
    """The kind of each layer of these segments, from the first layer to the last."""
    layers = {
        number: (SegmentLayer(name, l), kind)
        for name, x in segments.items()
        for l, (number, kind) in enumerate(zip(x.segment.numbers, x.kinds, strict=True))
    }
    return dict(layers[number] for number in sorted(layers))
