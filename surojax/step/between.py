"""Values between the programs of a step that the host runs one after another (layer_gradients.py).

A program's results are arrays of the whole mesh. A value that differs from device to device is an array
`[devices, ...]`; a layer's arrays that may rest in files are rounds `[1, ...]`, see `in_file.InFiles`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.manual_axes import varying_axes
from surojax.memory.host import put
from surojax.memory.in_file import InFiles
from surojax.parallel import collectives
from surojax.parallel.collectives import varying
from surojax.placement.home import DEVICE, Home
from surojax.placement.mesh import AXES


@dataclasses.dataclass(frozen=True)
class Left:
    """The type of a value that left a program. equal: the mesh axes over which it does not differ."""

    shape: tuple[int, ...]
    dtype: Any
    equal: tuple[str, ...]


class OfDevices:
    """Values of which each device has its own, as results and arguments of programs: arrays `[devices, ...]`.

    Inside `shard_map`, a type says over which mesh axes a value may differ. It is recorded where the value leaves a
    program and restored where it enters one, so programs are traced in the order in which they run.
    """

    def __init__(self, mesh):
        self.mesh = mesh
        self.axes = tuple(axis for axis in AXES if mesh.shape.get(axis, 1) > 1)
        self.number = math.prod(mesh.shape[axis] for axis in self.axes)
        self._left: dict[str, Any] = {}

    def leave(self, name: str, tree):
        """Results of a program: these values, by a name under which other programs take them."""

        def left(x) -> Left:
            return Left(x.shape, x.dtype, tuple(sorted(frozenset(self.axes) - varying_axes(x))))

        self._left[name] = jax.tree.map(left, tree)
        return jax.tree.map(lambda x: varying(x, AXES)[None], tree)

    def enter(self, name: str, tree):
        """The inverse of `leave`."""
        return jax.tree.map(lambda x, left: collectives.same(x[0], *left.equal), tree, self._left[name])

    def any_of(self, home: Home = DEVICE) -> jax.ShapeDtypeStruct:
        """In place of the plan of any such arrays in this memory: it has their sharding."""
        sharding = jax.NamedSharding(self.mesh, jax.P(self.axes), memory_kind=home.memory_kind)
        return jax.ShapeDtypeStruct((self.number,), jnp.float32, sharding=sharding)

    def planned(self, name: str, home: Home = DEVICE):
        """The plan of the results by this name, in this memory."""
        sharding = self.any_of(home).sharding
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((self.number, *x.shape), x.dtype, sharding=sharding), self._left[name]
        )


class Resting:
    """The arrays of each layer between two programs: in files, or where the program left them."""

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
        """The arrays of layer l, once. Raises NvmeError."""
        return self.files.joined((), self.files.read([l])) if self.in_files else self.layers.pop(l)


def in_rounds(tree):
    """Arrays of a layer as rounds `[1, ...]`, see `InFiles`."""
    return jax.tree.map(lambda x: x[None], tree)


def of_round(tree):
    """The arrays of a layer in device memory, from rounds. XLA (0.12) reshapes nothing in host memory."""
    return jax.tree.map(lambda x: x[0], put(tree, DEVICE))


def in_round(planned: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The plan of an array as a round."""
    spec = jax.P(None, *planned.sharding.spec)
    return jax.ShapeDtypeStruct((1, *planned.shape), planned.dtype, sharding=planned.sharding.update(spec=spec))
