"""Layers and values between the programs of a step that the host runs one after another (layer_gradients.py).

A program's results are arrays of the whole mesh. A value that differs from device to device is an array
`[devices, ...]`; a layer's arrays that may rest in files are rounds `[1, ...]`, see `in_file.InFiles`.

A stack of work weights in memory is an argument, whatever part of it a program uses. Of a stack in files a program gets
one layer, as a round. The update and the makers of states return it the same way.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.manual_axes import varying_axes
from surojax.memory.host import LayerStack, join_parts, parts, put, read, write_layer
from surojax.memory.in_file import InFile, InFiles
from surojax.models.model import Segment, Variant
from surojax.parallel import collectives
from surojax.parallel.collectives import varying
from surojax.placement.home import DEVICE, HOST, Home
from surojax.placement.mesh import AXES
from surojax.step.spec import Engine
from surojax.step.state import TrainState
from surojax.step.verbs import LayerVerbs
from surojax.step.weights import Gather


@dataclasses.dataclass(frozen=True)
class Left:
    """The type of a program's result `[devices, ...]` on one device. equal: mesh axes over which devices agree."""

    shape: tuple[int, ...]
    dtype: Any
    equal: tuple[str, ...]


class OfDevices:
    """Passes values that differ from device to device between programs, as arrays `[devices, ...]`.

    Inside `shard_map`, a type says over which mesh axes a value may differ. It is recorded where the value leaves a
    program and restored where it enters one, so programs are traced in the order in which they run.
    """

    def __init__(self, mesh):
        self.mesh = mesh
        self.axes = tuple(axis for axis in AXES if mesh.shape.get(axis, 1) > 1)
        self.number = math.prod(mesh.shape[axis] for axis in self.axes)
        self._left: dict[str, Any] = {}

    def leave(self, name: str, tree):
        """Returns a program's results from per-device values, and records their types under `name` for `enter`."""

        def left(x) -> Left:
            return Left(x.shape, x.dtype, tuple(sorted(frozenset(self.axes) - varying_axes(x))))

        self._left[name] = jax.tree.map(left, tree)
        return jax.tree.map(lambda x: varying(x, AXES)[None], tree)

    def enter(self, name: str, tree):
        """Returns the per-device values, inside a program, from the arrays that `leave` returned under this name."""
        return jax.tree.map(lambda x, left: collectives.same(x[0], *left.equal), tree, self._left[name])

    def any_of(self, home: Home = DEVICE) -> jax.ShapeDtypeStruct:
        """Returns a planned array with the sharding of every array of `leave`, stored in this memory."""
        sharding = jax.NamedSharding(self.mesh, jax.P(self.axes), memory_kind=home.memory_kind)
        return jax.ShapeDtypeStruct((self.number,), jnp.float32, sharding=sharding)

    def planned(self, name: str, home: Home = DEVICE):
        """Returns the plan of the arrays that `leave` returned under this name, stored in this memory."""
        sharding = self.any_of(home).sharding
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((self.number, *x.shape), x.dtype, sharding=sharding), self._left[name]
        )


class SegmentLayer(NamedTuple):
    """Layer l of a segment, or of its part in every stage of `pp`. segment: its name."""

    segment: str
    l: int


class LayerKind(NamedTuple):
    """Identifies layers that share a program.

    segment: its name. part: the number of the part of its work weights that the layer is in.
    """

    segment: str
    part: int
    variant: Variant


class LayerStore:
    """Keeps each layer's arrays between two programs: in files, or in the memory of the first program's results."""

    def __init__(self, files: Any = None):
        """files: a tree of `InFile`s; None: none are in files."""
        self.in_files = files is not None
        self.files = InFiles(files)
        self.layers: dict[int, Any] = {}

    def write(self, l: int, layer) -> None:
        """Keeps the arrays of layer l. Raises NvmeError."""
        if self.in_files:
            self.files.write([l], jax.tree.leaves(layer))
        else:
            self.layers[l] = layer

    def read(self, l: int):
        """Returns the arrays of layer l, and forgets those in memory. Raises NvmeError."""
        return self.files.joined((), self.files.read([l])) if self.in_files else self.layers.pop(l)


def in_rounds(tree):
    """Adds a leading axis of 1 to a layer's arrays: rounds `[1, ...]`, see `InFiles`."""
    return jax.tree.map(lambda x: x[None], tree)


def of_round(tree):
    """Removes the leading axis of rounds, in device memory: XLA (0.12) reshapes nothing in host memory."""
    return jax.tree.map(lambda x: x[0], put(tree, DEVICE))


def in_round(planned: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the plan of a round `[1, ...]` from the plan of an array `[...]`."""
    spec = jax.P(None, *planned.sharding.spec)
    return jax.ShapeDtypeStruct((1, *planned.shape), planned.dtype, sharding=planned.sharding.update(spec=spec))


class WorkWeights:
    """The parts of a segment's work weights (`host.parts`), planned or built.

    parts: of the plan. layers: of each part, those of each stage of `pp`. part_of: number of the part of each of them.
    Weights in files have one stage.
    """

    def __init__(self, weights: Any, stages: int = 1):
        """weights: the segment's plan."""
        self.parts: list[LayerStack] = parts(weights)
        self.files = [InFiles(part.stack) for part in self.parts]
        self.layers = [range(part.start // stages, part.stop // stages) for part in self.parts]
        self.part_of = [i for i, layers in enumerate(self.layers) for _ in layers]

    @property
    def in_files(self) -> bool:
        """True if some are in files."""
        return any(files.stacks for files in self.files)

    # -- State ---------------------------------------------------------------------------------------------------------

    def in_memory(self, weights: Any) -> list[list]:
        """The stacks in memory of each part of weights."""
        return [files.in_memory(part.stack) for files, part in zip(self.files, parts(weights), strict=True)]

    def joined(self, in_memory: list[list]) -> Any:
        """Returns the segment's work weights with these stacks in memory."""
        return join_parts([self.like(number, stacks) for number, stacks in enumerate(in_memory)])

    def read(self, l: int) -> list[jax.Array]:
        """Reads layer l from files and starts its copy to device memory, a round of each stack. Raises NvmeError."""
        number = self.part_of[l]
        return self.on_device(l, self.files[number].read([l - self.layers[number].start]))

    def on_device(self, l: int, rounds: list[jax.Array]) -> list[jax.Array]:
        """Starts the copy of layer l's rounds to device memory."""
        return jax.device_put(rounds, [file.round_sharding(DEVICE) for file in self.files[self.part_of[l]].stacks])

    def write(self, l: int, rounds: list) -> None:
        """Writes the rounds of layer l that `replaced` returned to files. Raises NvmeError."""
        number = self.part_of[l]
        self.files[number].write([l - self.layers[number].start], rounds)

    # -- Programs ------------------------------------------------------------------------------------------------------

    def planned(self, number: int) -> tuple[list, list[jax.ShapeDtypeStruct]]:
        """The plan of a program's arguments for layers of a part: (stacks in memory, rounds)."""
        files = self.files[number]
        return files.in_memory(self.parts[number].stack), files.planned_round(DEVICE)

    def arriving(self, number: int) -> list[jax.ShapeDtypeStruct]:
        """Plans the arrays of the next layer from files, which arrives while a layer of this part computes."""
        return [*self.files[number].planned_round(HOST), *self.files[number].planned_round(DEVICE)]

    def layer(self, number: int, arguments: tuple[list, list], l: jax.Array | int):
        """Layer l of the segment, which is in this part, in device memory. Inside `jit`."""
        in_memory, rounds = arguments
        return self.files[number].joined(read(in_memory, l - self.layers[number].start), of_round(rounds))

    def like(self, number: int, in_memory: list) -> Any:
        """Returns a part's tree with these stacks in memory, and plans in place of stacks in files."""
        files = self.files[number]
        return files.joined(in_memory, files.files(self.parts[number].stack))

    def replaced(self, number: int, in_memory: list, layer: Any, l: jax.Array | int) -> tuple[list, list]:
        """Returns (in-memory stacks with layer l replaced, arrays to write to files). Inside `jit`."""
        files = self.files[number]
        stacks = write_layer(in_memory, files.in_memory(layer), l - self.layers[number].start)
        return stacks, in_rounds(files.files(layer))


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
            return number - first
        return jnp.searchsorted(jnp.asarray(numbers), number)


def layers_in_order(segments: dict[str, SegmentFiles]) -> dict[SegmentLayer, LayerKind]:
    """The kind of each layer of these segments, from the first layer to the last."""
    layers = {
        number: (SegmentLayer(name, l), kind)
        for name, x in segments.items()
        for l, (number, kind) in enumerate(zip(x.segment.numbers, x.kinds, strict=True))
    }
    return dict(layers[number] for number in sorted(layers))
