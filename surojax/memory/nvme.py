"""Training state in a file: stacks of layers stored on an NVMe disk, with one layer at a time in memory.

    <nvme_path>/layers.bin     one record per layer: all its tensors that are stored here (master weights, moments)
    <nvme_path>/layers.json    state of the last run: {"step": n, "state": "updating" or "clean"}
    <nvme_path>/layers.lock    locked while a run uses the folder

The plan and the state have an `InFile` in place of such an array. A layer is one record, so that it is one read and one
write. Each is split into pieces for several threads, since a disk needs several requests in flight to be fast. The file
stores unsharded layers, whatever the number of devices. Several processes have a folder <nvme_path>/process-<i> each,
with records of the layers of the process's stages, of the parts that its devices hold: no layer crosses the network to
be stored. All stages of `pp` update a layer at a time together, which is a *round*: layer r of every stage.

**The file is never trusted at start.** It is updated in place, so a run that is killed within an update leaves a
mixture of two steps. The next start rewrites all of it, from the last checkpoint or from the seed; layers.json only
serves to say what happened.

**Page cache.** Reads and writes go through it. Writes are forced to the disk after each update, while the next
gradients are computed: an error of the disk is seen before anything builds on the data, and at most one step's writes
are in memory and not on the disk. Pages that are on the disk cost nothing: the kernel frees them when memory is needed.
As long as there is enough memory, reads come from the page cache and the disk is only written to.
"""

import contextlib
import functools
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from surojax.errors import ConfigError
from surojax.memory.lock import locked
from surojax.parallel.hosts import processes_here
from surojax.parallel.schedule import layers_of_stage
from surojax.placement.home import DEVICE, Home
from surojax.placement.mesh import PIPELINE, pipeline_stages

FILE, MARKER, LOCK = "layers.bin", "layers.json", "layers.lock"
ALIGN = 4096  # bytes, a page of the disk: records start at multiples of it, arrays within one at multiples of 64
PIECE = 16 << 20  # bytes of one request
THREADS = 4  # requests in flight, in each direction
SLOW_MIB_S = 500  # slower disks are reported as slow; SATA disks reach this, NVMe disks 1,000 and more
UNUSABLE_S = 3600  # an update that takes longer than this is refused
GiB, MiB = 2**30, 2**20
MAKE_ROOM = (
    "free some, choose another folder, or keep one of both in host memory (offload_optimizer=True, "
    "offload_master=True); what is stored in 16 bits takes half, but that is another training (opt_m_dtype, "
    "opt_v_dtype, and last master_dtype)"
)


class NvmeError(OSError):
    """The file cannot be read or written any more. Its content is lost, the checkpoints are not."""


class Part(NamedTuple):
    """A part of a layer. index: where in the layer. first: no process of a lower number has the part too."""

    number: int
    index: tuple[slice, ...]
    first: bool


class InFile:
    """A stack `[L, ...]` in a file, in place of an array in the plan and in the state.

    shape, dtype: of the stack. Its last entries are padding if stages of `pp` are not all full (step/padding.py); no
    file has them, and they are read as zeros. sharding: the one that the stack would have on the devices; a layer there
    has it without the layer axis. entries: of each stage. parts: for each stage, where this process's parts
    `[parts, ...]` are in a layer, which are what its file stores; None with one process, which stores whole layers. The
    file can be read as long as no other run uses the folder.
    """

    def __init__(self, store: "Store", shape: tuple[int, ...], dtype: Any, sharding: jax.NamedSharding):
        self.store = store
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.sharding = sharding
        self.spec = jax.P(*sharding.spec[1:])  # of a layer
        self.stages = pipeline_stages(sharding.mesh) if sharding.spec and sharding.spec[0] else 1
        self.entries = shape[0] // self.stages
        self.parts = self._own_parts() if jax.process_count() > 1 else None
        self.offset = store.reserve(self.layer_bytes)

    def __repr__(self):
        return f"InFile(shape={self.shape}, dtype={self.dtype}, file={self.store.path})"

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

    def stored_shape(self, l: int) -> tuple[int, ...]:
        """The shape of what the file stores of layer l."""
        if self.parts is None:
            return self.shape[1:]
        return (len(self.parts[self.stage(l)]), *self.layer_sharding(DEVICE).shard_shape(self.shape[1:]))

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
        if l >= self.store.num_layers:
            return np.zeros(self.stored_shape(l), self.dtype)
        return self.store.read(l, [self])[0]

    def write(self, l: int, stored: np.ndarray) -> None:
        """Replaces what is stored of layer l. Raises NvmeError."""
        self.store.write(l, [self], [stored])

    def _own_parts(self) -> list[dict[tuple[int, ...], Part]]:
        """For each stage, the places of a layer's parts on this process's devices, by where they start."""
        indices = self.round_sharding(DEVICE).devices_indices_map((self.stages, *self.shape[1:]))
        mine = jax.process_index()
        of_stages = []
        for stage in range(self.stages):
            of_stage = {device: index[1:] for device, index in indices.items() if self._stage_at(index) == stage}
            own = {self._start(index): index for device, index in of_stage.items() if device.process_index == mine}
            of_lower = {self._start(index) for device, index in of_stage.items() if (device.process_index or 0) < mine}
            of_stages.append({start: Part(i, own[start], start not in of_lower) for i, start in enumerate(sorted(own))})
        return of_stages

    def _stage_at(self, index: tuple[slice, ...]) -> int:
        """The stage that a device with this part of a round is in."""
        return index[0].indices(self.stages)[0]

    def _start(self, index: tuple[slice, ...]) -> tuple[int, ...]:
        """Returns the start of a part in its layer."""
        return tuple(part.indices(size)[0] for part, size in zip(index, self.shape[1:], strict=True))

    def stored_of(self, l: int, layer: Any) -> np.ndarray:
        """Returns this process's parts of the whole layer l: an array, or a tensorstore of which only that is read."""
        if self.parts is None:
            return np.asarray(layer)
        return np.stack([np.asarray(layer[part.index]) for part in self.parts[self.stage(l)].values()])

    def on_devices(self, layers: dict[int, np.ndarray], home: Home) -> jax.Array:
        """A round in this memory of the devices, from what each process has stored of its layers. No process sends any.

        layers: by number, at most one of each stage. A stage has zeros if no process has its layer.
        """
        sharding = self.round_sharding(home)
        of_stages = {self.stage(l): stored for l, stored in layers.items()}

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            stage = self._stage_at(index)
            if stage not in of_stages:
                return np.zeros((1, *sharding.shard_shape((self.stages, *self.shape[1:]))[1:]), self.dtype)
            if self.parts is None:
                return of_stages[stage][index[1:]][None]
            return of_stages[stage][self.parts[stage][self._start(index[1:])].number][None]

        return jax.make_array_from_callback((self.stages, *self.shape[1:]), sharding, part)

    def from_devices(self, layers: jax.Array, numbers: Iterable[int]) -> list[np.ndarray]:
        """Returns this process's parts of the layers with these numbers, of a round as `round_sharding` shards it."""
        if self.parts is None:
            whole = jax.device_get(layers)
            return [whole[self.stage(l)] for l in numbers]
        of_stages: dict[int, dict] = {}
        for shard in layers.addressable_shards:
            of_stage = of_stages.setdefault(self._stage_at(shard.index), {})
            of_stage[self._start(shard.index[1:])] = shard.data[0]
        return [self._stacked(l, of_stages[self.stage(l)]) for l in numbers]

    def from_every_stage(self, l: int, layer: jax.Array) -> np.ndarray:
        """Returns this process's parts of layer l, which is sharded as `layer_sharding` says."""
        if self.parts is None:
            return jax.device_get(layer)
        return self._stacked(l, {self._start(x.index): x.data for x in layer.addressable_shards})

    def _stacked(self, l: int, found: dict[tuple[int, ...], Any]) -> np.ndarray:
        """The parts of layer l that this process stores, from arrays by where they start."""
        assert self.parts is not None
        return np.stack([np.asarray(found[start]) for start in self.parts[self.stage(l)]])

    def on_every_stage(self, l: int) -> jax.Array:
        """Layer l in device memory, sharded as `layer_sharding` says; zeros if it is padding. Raises NvmeError.

        The stages that do not store it are sent it.
        """
        own = {l: self.read(l)} if l in self.store.records else {}
        one = jax.jit(_only_layer, out_shardings=self.layer_sharding(DEVICE))(self.on_devices(own, DEVICE))
        return jax.block_until_ready(one) if self.stages > 1 else one


def _only_layer(layers: jax.Array) -> jax.Array:
    """The layer of a round of which all others are zeros, to the bit."""
    number = jnp.dtype(f"uint{8 * layers.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(layers, number).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(jnp.sum(bits, 0, dtype=jnp.uint32).astype(number), layers.dtype)


class Store:
    """The file of a run, see the docstring of this module. The first use opens it; it stays open until `close`.

    records: by the number of a layer of which the file has a record, the number of that record.
    """

    def __init__(self, folder: str | Path, num_layers: int, layers: Iterable[int] | None = None):
        """layers: those of which this process stores parts, see `own_layers`; None: all."""
        self.folder = Path(folder).expanduser().absolute()
        if jax.process_count() > 1:
            self.folder /= f"process-{jax.process_index()}"
        self.num_layers = num_layers
        self.records = {l: i for i, l in enumerate(range(num_layers) if layers is None else layers)}
        self.path = self.folder / FILE
        self.record = 0
        self._made = False
        self._synced: Future | None = None
        self._copied: list[Future] = []

    def reserve(self, size: int) -> int:
        """Reserves `size` bytes in each record; returns their offset within it."""
        offset = self.record
        self.record += -(-size // 64) * 64
        return offset

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return len(self.records) * self._stride

    @property
    def _stride(self) -> int:
        """Bytes from the start of one record to the start of the next."""
        return -(-self.record // ALIGN) * ALIGN

    @functools.cached_property
    def _pools(self) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
        """(threads that read, threads that write)."""
        return ThreadPoolExecutor(THREADS, "nvme-read"), ThreadPoolExecutor(THREADS, "nvme-write")

    @functools.cached_property
    def fd(self) -> int:
        """The open file. The first open allocates its full size, so that a full disk is found. Raises ConfigError."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"nvme_path: cannot open {self.path} ({error.strerror}); choose another folder"
            ) from error
        if self._made:  # opened again after `close`: another run may use the file by now
            return fd
        try:
            os.ftruncate(fd, self.bytes)
            os.posix_fallocate(fd, 0, self.bytes)
            self._made = True
        except OSError as error:
            os.ftruncate(fd, 0)
            os.close(fd)
            raise ConfigError(
                f"nvme_path: expected room for {gib(self.bytes)} in {self.folder}, got: {error.strerror}; {MAKE_ROOM}"
            ) from error
        return fd

    def close(self) -> None:
        """Waits for requests in flight and closes the file; a later read opens it again."""
        for pool in self.__dict__.pop("_pools", ()):
            pool.shutdown()
        if "fd" in self.__dict__:
            os.close(self.__dict__.pop("fd"))

    # -- Layers ------------------------------------------------------------------------------------------------------

    def read(self, l: int, leaves: Iterable[InFile]) -> list[np.ndarray]:
        """The stored layer l of these stacks. Raises NvmeError."""
        return [self._read_one(leaf, l) for leaf in leaves]

    def _read_one(self, leaf: InFile, l: int) -> np.ndarray:
        shape = leaf.stored_shape(l)
        raw = np.empty(math.prod(shape) * leaf.dtype.itemsize, np.uint8)

        def piece(start: int) -> None:
            view = memoryview(raw)[start : start + PIECE]
            offset = self._start(leaf, l) + start
            while view:
                n = os.preadv(self.fd, [view], offset)
                if n == 0:
                    raise OSError("it is shorter than it was made: something else wrote to it")
                view = view[n:]
                offset += n

        self._each_piece(0, piece, raw.size, "read")
        return raw.view(leaf.dtype).reshape(shape)

    def write(self, l: int, leaves: Iterable[InFile], layers: Iterable[np.ndarray]) -> None:
        """Replaces what is stored of layer l of these stacks. Raises NvmeError."""
        for leaf, layer in zip(leaves, layers, strict=True):
            assert layer.shape == leaf.stored_shape(l) and layer.dtype == leaf.dtype, (leaf, layer.shape, layer.dtype)
            raw = np.ascontiguousarray(layer).reshape(-1).view(np.uint8)

            def piece(start: int, raw=raw, leaf=leaf) -> None:
                view = memoryview(raw)[start : start + PIECE]
                offset = self._start(leaf, l) + start
                while view:
                    n = os.pwrite(self.fd, view, offset)
                    view = view[n:]
                    offset += n

            self._each_piece(1, piece, raw.size, "write")

    def _start(self, leaf: InFile, l: int) -> int:
        """Offset in the file of layer l of a stack."""
        if l not in self.records:
            raise IndexError(f"layer: expected one of {list(self.records)}, got {l}")
        return self.records[l] * self._stride + leaf.offset

    def _each_piece(self, pool: int, piece, size: int, what: str) -> None:
        """Calls piece(start) for every PIECE of `size` bytes, by the threads of _pools[pool] if there are several."""
        with self._explained(what):
            if size <= PIECE:
                piece(0)
            else:
                list(self._pools[pool].map(piece, range(0, size, PIECE)))

    @contextlib.contextmanager
    def _explained(self, what: str):
        """Turns an error of the disk into an NvmeError that names the file and what is not lost."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise NvmeError(
                f"nvme_path: could not {what} {self.path} ({reason}); its content is lost, but no checkpoint is: "
                "the next start continues from the last one"
            ) from error

    # -- Steps -------------------------------------------------------------------------------------------------------

    def begin_update(self, step: int) -> None:
        """Waits until the last update is on the disk and no checkpoint reads the file, then marks it as updating."""
        self.settle()
        while self._copied:
            self._copied.pop().exception()  # a checkpoint that could not be written says so itself
        self._mark(step, "updating")

    def end_update(self, step: int) -> None:
        """Marks the file as clean (all of it is from this step) and begins to force it to the disk."""
        self._mark(step, "clean")
        self._synced = self._pools[1].submit(os.fdatasync, self.fd)

    def settle(self) -> None:
        """Waits until the last update is on the disk. Raises NvmeError if it cannot be written there."""
        synced, self._synced = self._synced, None
        if synced is not None:
            with self._explained("write"):
                synced.result()

    def hold(self) -> Future:
        """A future that the caller completes when it has read the file; no update begins before."""
        self._copied.append(Future())
        return self._copied[-1]

    def _mark(self, step: int, state: str) -> None:
        """Writes layers.json."""
        with self._explained("write"):
            new = self.folder / f"{MARKER}.new"
            new.write_text(json.dumps({"step": step, "state": state}))
            new.replace(self.folder / MARKER)  # atomic: a kill leaves the old file or the new one

    def interrupted(self) -> int | None:
        """The step in whose update the last run was interrupted, None if it was not."""
        try:
            last = json.loads((self.folder / MARKER).read_text())
            return int(last["step"]) if last["state"] == "updating" else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def own_layers(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, num_layers: int) -> list[int]:
    """The layers of a model of which this process's devices hold state: all, or those of its stages of `pp`."""
    stages = pipeline_stages(mesh)
    if stages == 1 or jax.process_count() == 1:
        return list(range(num_layers))
    assert not isinstance(mesh, jax.sharding.AbstractMesh), "several processes have devices"
    of_stages = np.moveaxis(mesh.devices, mesh.axis_names.index(PIPELINE), 0)
    own = [any(device.process_index == jax.process_index() for device in of_stage.flat) for of_stage in of_stages]
    of_stage = layers_of_stage(num_layers, stages)
    return [l for l in range(num_layers) if own[l // of_stage]]


def store_of(plan: Any) -> Store | None:
    """The store of the layers of a plan or a state that are in a file; None if all layers are in memory."""
    return next((x.store for x in jax.tree.leaves(plan) if isinstance(x, InFile)), None)


def check(store: Store | None) -> None:
    """Checks the folder and its free space before anything is built; leaves no file there. Raises ConfigError.

    Every process has to call it: those of one machine may share a disk, which has to have room for all of them.
    """
    if store is None:
        return
    several = jax.process_count() > 1
    folder = store.folder.parent if several else store.folder
    change = "choose a folder on an NVMe disk"
    sharing = processes_here()
    if not folder.is_dir():
        what = "a file" if folder.exists() else "nothing there"
        raise ConfigError(f"nvme_path: expected a folder, got {str(folder)!r} ({what}); create it, or {change}")
    try:
        store.folder.mkdir(exist_ok=True)
        tempfile.TemporaryFile(dir=store.folder).close()
        reused = os.stat(store.path).st_blocks * 512 if store.path.exists() else 0  # the file of an earlier run
        free = shutil.disk_usage(folder).free + reused * sharing
    except OSError as error:
        raise ConfigError(
            f"nvme_path: expected a folder that can be written, got {str(folder)!r} ({error.strerror}); {change}"
        ) from error
    if store.bytes * sharing > free:
        of = f" for {sharing} processes" if sharing > 1 else ""
        raise ConfigError(
            f"nvme_path: needs {gib(store.bytes * sharing)}{of} in {folder}, where {gib(free)} are free; {MAKE_ROOM}"
        )


@contextlib.contextmanager
def claim(store: Store):
    """Locks the folder and allocates the file, within a `with` statement; yields a line about the disk to print.

    Raises ConfigError if another run uses the folder, the disk is full, or it is too slow to be of use.
    """
    check(store)
    if jax.process_count() > 1:  # none takes room on a disk that they share before all have measured what is free
        multihost_utils.sync_global_devices("surojax: room for nvme_path is measured")
    with locked(store.folder / LOCK, "nvme_path"), contextlib.closing(store):
        yield describe(store, write_rate(store))


def describe(store: Store, rate: float) -> str:
    """A line that says how long an update takes at `rate` bytes/s. Raises ConfigError if it is more than an hour."""
    seconds = 2 * store.bytes / rate
    text = f"nvme: {gib(store.bytes)} in {store.folder}, written at {rate / MiB:,.0f} MiB/s"
    if seconds > UNUSABLE_S:
        raise ConfigError(
            f"nvme_path: expected a disk that is fast enough, got {rate / MiB:,.1f} MiB/s in {store.folder}, where an "
            f"update reads and writes {gib(store.bytes)} each: {seconds / 3600:,.1f} hours a step; choose another disk"
        )
    text += f": updates take {seconds:,.1f} s a step, unless the page cache holds it"
    slow = rate < SLOW_MIB_S * MiB and seconds > 1
    return f"warning: slow disk, {text}; gradient_accumulation_steps makes them rarer" if slow else text


def write_rate(store: Store, limit: int = 256 * MiB, seconds: float = 2.0) -> float:
    """Bytes per second written to the disk, measured with up to `limit` bytes at the start of the file."""
    data = memoryview(np.random.default_rng(0).bytes(min(PIECE, store.bytes)))
    written = 0
    start = time.perf_counter()
    with store._explained("write"):
        while written < min(limit, store.bytes) and time.perf_counter() - start < seconds:
            written += os.pwrite(store.fd, data[: store.bytes - written], written)
            os.fdatasync(store.fd)
    return written / (time.perf_counter() - start)


def gib(size: int) -> str:
    """Bytes as text, in GiB."""
    return f"{size / GiB:,.2f} GiB"
