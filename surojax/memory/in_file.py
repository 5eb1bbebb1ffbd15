"""File-backed stacks of layers and tables, with one layer or one piece of rows in memory at a time.

The plan and the state have an `InFile` in place of such an array; a `TableInFile` if it is a table, whose pieces are
handled as layers of a stack are. `InFiles` tells them apart in a tree, and reads and writes a layer of all of them.
They share a file (memory/layer_file.py), so that a layer is one record. It stores unsharded layers, whatever the number
of devices. With several processes each has a file, with records of the layers of the process's stages, of the parts
that its devices hold: no layer crosses the network to be stored. All stages of `pp` update a layer at a time together,
which is a *round*: layer r of every stage.
"""

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from surojax.memory.host import move
from surojax.memory.layer_file import Store
from surojax.memory.places import Place
from surojax.parallel.schedule import layers_of_stage
from surojax.placement.home import DEVICE, HOMES, HOST, NVME, Home
from surojax.placement.mesh import PIPELINE, pipeline_stages


class FilePart(NamedTuple):
    """A shard of a layer. index: its slices of the layer. first: no process of a lower number has the shard too."""

    number: int
    index: tuple[slice, ...]
    first: bool


type Index = tuple[slice | int, ...]


class InFile:
    """A stack `[L, ...]` in a file, in place of an array in the plan and in the state.

    shape, dtype: of the stack. segment: the numbers of its layers in the model. Its last entries are padding if stages
    of `pp` are not all full (step/padding.py); no file has them, and they are read as zeros. sharding: the one that the
    stack would have on the devices; a layer there has it without the layer axis. entries: of each stage. parts: for
    each stage, where this process's parts `[parts, ...]` are in a layer, which are what its file stores; None with one
    process, which stores whole layers. The file can be read as long as no other run uses the folder. place: the room
    for it in the store, which may keep a part in host memory; row: of the placement table. source: a stack with
    the same values, whose place this one reads and never writes; None: it has a place of its own.
    """

    def __init__(
        self,
        store: Store,
        row: str,
        shape: tuple[int, ...],
        dtype: Any,
        sharding: jax.NamedSharding,
        first: int = 0,
        source: Any = None,
    ):
        """first: number of the stack's first layer in the model.

        source: a stack with the same values but for the rounding to its dtype, in a file or in memory; None: there is
        none. It is used if it is in a file and has this stack's dtype and layers.
        """
        self.store = store
        self.row = row
        self.stack_shape = shape
        self.segment = range(first, min(first + shape[0], store.num_layers))
        self.dtype = np.dtype(dtype)
        self.sharding = sharding
        self.spec = jax.P(*sharding.spec[1:])  # of a layer
        self.stages = pipeline_stages(sharding.mesh) if sharding.spec and sharding.spec[0] else 1
        self.entries = shape[0] // self.stages
        self.parts = self._own_parts() if jax.process_count() > 1 else None
        whole = self.parts is None and isinstance(source, InFile)
        alike = whole and (source.dtype, source.segment) == (self.dtype, self.segment)
        self.source: InFile | None = source if alike else None
        self.place = self.source.place if self.source else self._reserved(row)

    def __repr__(self):
        return f"InFile(shape={self.shape}, dtype={self.dtype}, file={self.store.path})"

    def _reserved(self, row: str) -> Place:
        """Room for the stack in its store."""
        return self.store.places.reserve(self.layer_bytes, row, self.segment)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that this is in place of."""
        return self.stack_shape

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The shape of one layer."""
        return self.stack_shape[1:]

    @property
    def layers(self) -> int:
        """The number of entries of the stack that are no padding."""
        return len(self.segment)

    @property
    def ndim(self) -> int:
        """Number of dimensions, the layer axis included."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the stack."""
        return math.prod(self.shape)

    @property
    def layer_bytes(self) -> int:
        """Bytes that the file has room for in each layer's record."""
        shapes = [self.stored_shape(stage * self.entries) for stage in range(self.stages)]
        return max(math.prod(shape) for shape in shapes) * self.dtype.itemsize

    @property
    def round_file_bytes(self) -> int:
        """Bytes of a round that are in files, of all processes together."""
        whole = self.stages * math.prod(self.layer_shape) * self.dtype.itemsize
        return whole * self.place.in_file // self.place.size

    def stored_shape(self, l: int) -> tuple[int, ...]:
        """The shape of layer l in the file."""
        if self.parts is None:
            return self.layer_shape
        return (len(self.parts[self.stage(l)]), *self.layer_sharding(DEVICE).shard_shape(self.layer_shape))

    def stage(self, l: int) -> int:
        """The stage that has layer l."""
        return l // self.entries

    def layer_sharding(self, home: Home) -> jax.NamedSharding:
        """Sharding of one layer `[...]` in this memory. Every stage has all of it."""
        return jax.NamedSharding(self.sharding.mesh, self.spec, memory_kind=home.memory_kind)

    def round_sharding(self, home: Home) -> jax.NamedSharding:
        """Sharding of a round `[stages, ...]` in this memory: a layer of every stage, each on its stage's devices."""
        return jax.NamedSharding(self.sharding.mesh, self.sharding.spec, memory_kind=home.memory_kind)

    def read(self, l: int) -> np.ndarray:
        """The stored arrays of layer l; zeros if it is padding. Raises NvmeError."""
        if l >= self.layers:
            return np.zeros(self.stored_shape(l), self.dtype)
        return self.store.read(l, self.place, self.stored_shape(l), self.dtype)

    def write(self, l: int, stored: np.ndarray) -> None:
        """Writes the stored arrays of layer l. Raises NvmeError."""
        assert not self.source, "its source is written"
        assert stored.shape == self.stored_shape(l) and stored.dtype == self.dtype, (self, stored.shape, stored.dtype)
        self.store.write(l, self.place, stored)

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """The shape of the largest part of a layer that is contiguous in the array."""
        return (1, *self.layer_shape)

    def share(self, l: int, path: Path) -> bool:
        """Makes a file of layer l, all of it, that takes no room; False if that cannot be, see `Store.share`."""
        is_whole = self.parts is None and l < self.layers
        is_chunk = self.place.size == math.prod(self.chunk_shape) * self.dtype.itemsize
        return is_whole and is_chunk and self.store.share(l, self.place, path)

    @property
    def own_entries(self) -> list[int]:
        """Lists the entries of the stack that this process stores parts of, and padding, which is read as zeros."""
        return [l for l in range(self.stack_shape[0]) if self.parts is None or self.parts[self.stage(l)]]

    def _own_parts(self) -> list[dict[tuple[int, ...], FilePart]]:
        """Maps, for each stage, where a layer's parts on this process's devices start to their places in the file."""
        indices = self.round_sharding(DEVICE).devices_indices_map((self.stages, *self.layer_shape))
        mine = jax.process_index()
        parts_by_stage = []
        for stage in range(self.stages):
            index_by_device = {device: index[1:] for device, index in indices.items() if self._stage_at(index) == stage}
            own = {
                self._start(index): index for device, index in index_by_device.items() if device.process_index == mine
            }
            starts_on_lower_processes = {
                self._start(index) for device, index in index_by_device.items() if (device.process_index or 0) < mine
            }
            parts_by_stage.append(
                {
                    start: FilePart(i, own[start], start not in starts_on_lower_processes)
                    for i, start in enumerate(sorted(own))
                }
            )
        return parts_by_stage

    def _stage_at(self, index: tuple[slice, ...]) -> int:
        """The stage that a device with this part of a round is in."""
        return index[0].indices(self.stages)[0]

    def _start(self, index: tuple[slice, ...]) -> tuple[int, ...]:
        """Returns the start of a part in its layer."""
        return tuple(part.indices(size)[0] for part, size in zip(index, self.layer_shape, strict=True))

    def read_own(self, layers: Iterable[int]) -> dict[int, np.ndarray]:
        """Reads the parts of these layers that this process's file stores, by number. Raises NvmeError."""
        return {l: self.read(l) for l in layers if l in self.place.records}

    # -- In checkpoints: the array that this is in place of ------------------------------------------------------------

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what this process writes of the array."""
        return (self.shape[0], *part_shape(self))

    def first_pieces(self, l: int, stored: np.ndarray) -> list[tuple[Index, np.ndarray]]:
        """(index in the array, values) of what is stored of layer l, without what a process before this one has too."""
        whole: Index = (slice(None),) * len(self.layer_shape)
        parts = [(whole, stored)]
        if self.parts is not None:
            parts = [(part.index, stored[part.number]) for part in self.parts[self.stage(l)].values() if part.first]
        return [piece for index, values in parts for piece in self._in_array(l, index, values)]

    def _in_array(self, l: int, index: Index, values: np.ndarray) -> list[tuple[Index, np.ndarray]]:
        """(index in the array, values) of these values of layer l, which are at this index in it."""
        return [((l, *index), values)]

    def stored_in(self, array: Any, layers: range) -> dict[int, np.ndarray]:
        """The parts of these layers for this process's file, by number.

        array: what this is in place of, with any padding: a numpy array, or a tensorstore of which only that is read.
        """
        whole = np.asarray(array[layers.start : layers.stop]) if self.parts is None else None
        own = [l for l in layers if l in self.place.records]
        return {l: self.stored_of(l, array[l] if whole is None else whole[l - layers.start]) for l in own}

    def stored_of(self, l: int, layer: Any) -> np.ndarray:
        """Returns this process's parts of the whole layer l: an array, or a tensorstore of which only that is read."""
        if self.parts is None:
            return np.asarray(layer)
        return np.stack([np.asarray(layer[part.index]) for part in self.parts[self.stage(l)].values()])

    @property
    def blocks(self) -> tuple[int, int]:
        """Returns (number of contiguous parts of a layer in the array, elements from one part to the next)."""
        return 1, 0

    def first_element(self, l: int) -> int:
        """Index in the array of the first element of layer l."""
        return l * math.prod(self.layer_shape)

    # -- On devices ----------------------------------------------------------------------------------------------------

    def on_devices(self, layers: dict[int, np.ndarray], home: Home) -> jax.Array:
        """A round in this memory of the devices, from what each process has stored of its layers. No process sends any.

        layers: by number, at most one of each stage. A stage has zeros if no process has its layer.
        """
        sharding = self.round_sharding(home)
        layer_by_stage = {self.stage(l): stored for l, stored in layers.items()}

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            stage = self._stage_at(index)
            if stage not in layer_by_stage:
                return np.zeros((1, *sharding.shard_shape((self.stages, *self.layer_shape))[1:]), self.dtype)
            if self.parts is None:
                return layer_by_stage[stage][index[1:]][None]
            return layer_by_stage[stage][self.parts[stage][self._start(index[1:])].number][None]

        return jax.make_array_from_callback((self.stages, *self.layer_shape), sharding, part)

    def from_devices(self, layers: jax.Array, numbers: Iterable[int]) -> list[np.ndarray]:
        """Returns this process's parts of the layers with these numbers, of a round as `round_sharding` shards it."""
        if self.parts is None:
            whole = jax.device_get(layers)
            return [whole[self.stage(l)] for l in numbers]
        shards_by_stage: dict[int, dict] = {}
        for shard in layers.addressable_shards:
            stage_shards = shards_by_stage.setdefault(self._stage_at(shard.index), {})
            stage_shards[self._start(shard.index[1:])] = shard.data[0]
        return [self._stacked(l, shards_by_stage[self.stage(l)]) for l in numbers]

    def _stacked(self, l: int, arrays_by_start: dict[tuple[int, ...], Any]) -> np.ndarray:
        """The parts of layer l that this process stores, from arrays by where they start."""
        assert self.parts is not None
        return np.stack([np.asarray(arrays_by_start[start]) for start in self.parts[self.stage(l)]])


class TableInFile(InFile):
    """A table `[V, ...]` in a file, in place of an array in the plan and in the state.

    Piece k of n, which is handled as a layer is, has part k of n of each shard's rows, so that every device has rows of
    each piece: `table.reshape(shards, n, -1, ...)[:, k]`.
    """

    def __init__(self, store: Store, row: str, shape: tuple[int, ...], dtype: Any, sharding: jax.NamedSharding, n: int):
        """sharding: of the table. n: number of pieces, a divisor of the rows of a shard."""
        self.row_shards = shape[0] // sharding.shard_shape(shape)[0]
        self.rows = shape[0] // self.row_shards // n  # of a piece, in each shard
        of_pieces = jax.NamedSharding(sharding.mesh, jax.P(None, *sharding.spec))
        super().__init__(store, row, (n, shape[0] // n, *shape[1:]), dtype, of_pieces)
        self.segment = range(n)

    def _reserved(self, row: str) -> Place:
        return self.store.places.reserve_pieces(self.layer_bytes, row, self.layers)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the table."""
        n, rows, *others = self.stack_shape
        return (n * rows, *others)

    @property
    def layers(self) -> int:
        """The number of pieces."""
        return self.stack_shape[0]

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """See `InFile.chunk_shape`: of a piece, the rows of one shard."""
        return (self.rows, *self.shape[1:])

    @property
    def planned_table(self) -> jax.ShapeDtypeStruct:
        """The plan of the table on the devices."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.layer_sharding(DEVICE))

    def piece_of(self, table: jax.Array, k: Any) -> jax.Array:
        """A round with piece k of a table, all of it. Inside `jit`."""
        blocks = table.reshape(self.row_shards, self.layers, self.rows, *self.shape[1:])
        piece = jax.lax.dynamic_index_in_dim(blocks, k, 1, keepdims=False)
        return piece.reshape(1, *self.layer_shape)

    def with_piece(self, table: jax.Array, piece: jax.Array, k: Any) -> jax.Array:
        """A table with this piece `[rows, ...]` in place of its piece k. Inside `jit`."""
        blocks = table.reshape(self.row_shards, self.layers, self.rows, *self.shape[1:])
        piece = piece.reshape(self.row_shards, self.rows, *self.shape[1:])
        return jax.lax.dynamic_update_index_in_dim(blocks, piece, k, 1).reshape(table.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what this process writes of the table, contiguously."""
        return self.shape if self.parts is None else self.layer_sharding(DEVICE).shard_shape(self.shape)

    def _in_array(self, l: int, index: Index, values: np.ndarray) -> list[tuple[Index, np.ndarray]]:
        return [(of_table, values[rows]) for rows, of_table in self._rows(l, index)]

    def stored_in(self, array: Any, layers: range) -> dict[int, np.ndarray]:
        """See `InFile.stored_in`. layers: pieces."""

        def values(k: int, index: Index) -> np.ndarray:
            return np.concatenate([np.asarray(array[of_table]) for _, of_table in self._rows(k, index)])

        if self.parts is None:
            return {k: values(k, (slice(None),) * len(self.layer_shape)) for k in layers}
        return {k: np.stack([values(k, part.index) for part in self.parts[0].values()]) for k in layers}

    def _rows(self, k: int, index: Index) -> list[tuple[slice, Index]]:
        """(rows of the values at this index in piece k, their index in the table): one for each shard of its rows."""
        assert isinstance(index[0], slice)
        begin, end, _ = index[0].indices(self.layer_shape[0])
        found: list[tuple[slice, Index]] = []
        for at in range(begin, end, self.rows):
            first = (at // self.rows * self.layers + k) * self.rows
            found.append((slice(at - begin, at - begin + self.rows), (slice(first, first + self.rows), *index[1:])))
        return found

    @property
    def blocks(self) -> tuple[int, int]:
        """See `InFile.blocks`."""
        return self.row_shards, self.layers * self.rows * math.prod(self.shape[1:])

    def first_element(self, l: int) -> int:
        """Index in the table of the first element of piece l."""
        return l * self.rows * math.prod(self.shape[1:])


class InFiles:
    """The leaves of a tree of stacks that are in files; the others are in memory.

    stacks: these leaves. store: what the files share; an empty one if no leaf is in a file.
    """

    def __init__(self, tree: Any):
        leaves, self.structure = jax.tree.flatten(tree)
        self.are_in_file = [isinstance(x, InFile) for x in leaves]
        self.stacks: list[InFile] = self.files(tree)
        self.store = self.stacks[0].store if self.stacks else Store("", 0)

    def files(self, tree: Any) -> list:
        """The leaves of a tree of this structure that belong to files."""
        return [x for x, in_file in zip(self.structure.flatten_up_to(tree), self.are_in_file, strict=True) if in_file]

    def in_memory(self, tree: Any) -> list:
        """The other leaves of a tree of this structure."""
        leaves = zip(self.structure.flatten_up_to(tree), self.are_in_file, strict=True)
        return [x for x, in_file in leaves if not in_file]

    def joined(self, in_memory: Iterable, files: Iterable) -> Any:
        """Builds the tree from leaves in memory and leaves from files."""
        memory_leaves, file_leaves = iter(in_memory), iter(files)
        return self.structure.unflatten(
            [next(file_leaves if in_file else memory_leaves) for in_file in self.are_in_file]
        )

    # -- Rounds: a layer of every stage ------------------------------------------------------------------------------

    def layers_of_round(self, r: int) -> range:
        """The numbers of layer r of every stage that are in files."""
        return range(r, self.stacks[0].stack_shape[0], self.stacks[0].entries) if self.stacks else range(0)

    @property
    def round_read(self) -> Counter[str]:
        """Bytes of a round that are read from files, of all processes together, by row of the placement table."""
        return self._bytes_by_row(self.stacks)

    @property
    def round_written(self) -> Counter[str]:
        """Bytes of a round that are written to files, as `round_read`."""
        return self._bytes_by_row(file for file in self.stacks if not file.source)

    @staticmethod
    def _bytes_by_row(stacks: "Iterable[InFile]") -> Counter[str]:
        total = Counter[str]()
        for file in stacks:
            total[file.row] += file.round_file_bytes
        return total

    def planned_round(self, home: Home) -> list[jax.ShapeDtypeStruct]:
        """A planned round of each stack, `[stages, ...]`, in this memory."""
        return [
            jax.ShapeDtypeStruct((file.stages, *file.layer_shape), file.dtype, sharding=file.round_sharding(home))
            for file in self.stacks
        ]

    def planned_leaving(self) -> list[jax.ShapeDtypeStruct]:
        """A planned round of each stack where a program leaves it: in host memory on its way to a file, or on the
        device if no file is written for it (`InFile.source`)."""
        rounds = zip(self.stacks, self.planned_round(HOST), self.planned_round(DEVICE), strict=True)
        return [on_device if file.source else in_host for file, in_host, on_device in rounds]

    def written(self, rounds: list) -> list:
        """Returns the rounds that go to files, with None in place of the others (`InFile.source`)."""
        return [None if file.source else x for file, x in zip(self.stacks, rounds, strict=True)]

    def read(self, layers: Iterable[int]) -> list[jax.Array]:
        """A round of each stack in pinned host memory with these layers, at most one of each stage. Raises NvmeError.

        Stages of which there is none, or padding, have zeros.
        """
        return list(self.store.of_arrays[0].map(lambda file: file.on_devices(file.read_own(layers), HOST), self.stacks))

    def write(self, layers: Iterable[int], rounds: list) -> None:
        """Writes these layers, at most one of each stage, from a round of each stack. Raises NvmeError.

        rounds: of all stacks; those that `written` leaves out may be None.
        """
        own = [l for l in layers if self.stacks and l in self.stacks[0].place.records]

        def write(pair: tuple[InFile, jax.Array]) -> None:
            file, x = pair
            if file.source:
                return
            for l, stored in zip(own, file.from_devices(x, own), strict=True):
                file.write(l, stored)

        list(self.store.of_arrays[1].map(write, zip(self.stacks, rounds, strict=True)))

    def on_every_stage(self, rounds: list[jax.Array]) -> list[jax.Array]:
        """Copies the only layer of rounds to the devices of every stage. Inside `jit`."""
        return [only_layer(x, file.layer_sharding(DEVICE)) for x, file in zip(rounds, self.stacks, strict=True)]

    def repeated(self, layer: list[jax.Array]) -> list[jax.Array]:
        """Rounds in which every stage has this layer. Inside `jit`."""
        return [jnp.broadcast_to(x, (file.stages, *x.shape)) for x, file in zip(layer, self.stacks, strict=True)]


def only_layer(layers: jax.Array, sharding: jax.NamedSharding) -> jax.Array:
    """Extracts the only layer that is not zeros from a round, to the bit, in this sharding. Inside `jit`."""
    number = jnp.dtype(f"uint{8 * layers.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(move(layers, DEVICE.space), number).astype(jnp.uint32)
    layer = jax.lax.bitcast_convert_type(jnp.sum(bits, 0, dtype=jnp.uint32).astype(number), layers.dtype)
    return jax.lax.with_sharding_constraint(layer, sharding)


def own_layers(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, num_layers: int) -> list[int]:
    """Returns the numbers of the layers whose state this process's devices hold: all, or its `pp` stages' layers."""
    stages = pipeline_stages(mesh)
    if stages == 1 or jax.process_count() == 1:
        return list(range(num_layers))
    assert not isinstance(mesh, jax.sharding.AbstractMesh), "several processes have devices"
    devices_by_stage = np.moveaxis(mesh.devices, mesh.axis_names.index(PIPELINE), 0)
    own = [
        any(device.process_index == jax.process_index() for device in stage_devices.flat)
        for stage_devices in devices_by_stage
    ]
    layers_per_stage = layers_of_stage(num_layers, stages)
    return [l for l in range(num_layers) if own[l // layers_per_stage]]


def home_of(x: Any) -> Home:
    """Returns the memory of an array or a planned array."""
    if isinstance(x, InFile):
        return NVME
    kind = x.sharding.memory_kind or DEVICE.memory_kind
    return next(home for home in HOMES if home.memory_kind == kind)


def has_room(x: Any) -> bool:
    """False for a stack that takes no room in its file, since it is read from the place of its `InFile.source`."""
    return not isinstance(x, InFile) or x.source is None


def part_shape(x: Any) -> tuple[int, ...]:
    """The shape of what a process writes at once of a layer of a stack `[L, ...]`: a shard, or what its file stores."""
    if not isinstance(x, InFile):
        return x.sharding.shard_shape(x.shape)[1:]
    return x.layer_shape if x.parts is None else x.sharding.shard_shape(x.stack_shape)[1:]
