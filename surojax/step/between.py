"""Values between the programs of a step that the host runs one after another (layer_gradients.py).

A program's results are arrays of the whole mesh. A value that differs from device to device is an array
`[devices, ...]`; a layer's arrays that may rest in files are rounds `[1, ...]`, see `in_file.InFiles`.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.manual_axes import varying_axes
from surojax.memory.host import put
from surojax.memory.in_file import InFiles
from surojax.models.model import Variant
from surojax.parallel import collectives
from surojax.parallel.collectives import varying
from surojax.placement.home import DEVICE, Home
from surojax.placement.mesh import AXES


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
