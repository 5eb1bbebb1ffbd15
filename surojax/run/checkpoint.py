"""Checkpoints: orbax, written in the background, atomic, verified, restorable onto any mesh.

A checkpoint is the folder `<output_dir>/checkpoints/<step>` with the items `master` (weights), `moments` (optimizer
state), `history` (of recipe fp8_hybrid) and `meta` (JSON: step, data position, config). Orbax writes into a temporary
folder and renames it when all is written, so a killed run leaves either a whole checkpoint or none. Work weights are
`master` cast, so they are not written; random numbers are derived from the seed in the config and the positions in
`meta`.

Shapes, not placements, are stored: the plan given to `restore` says which device gets which part. Stacks of layers are
cut into chunks of a layer (of one shard), so that those which rest in a file (nvme.py) are written and read a layer at
a time; they are written in the background too, and the next update waits for it.

Damage is found in two ways, because orbax itself hands out a flipped byte as another number without a word. The list
`files.json` has the size of every file, and checksums of the small ones: it is compared before anything is compiled,
and names the file. What the large ones hold is checked by array: `meta` has a checksum of each, taken on the devices,
which `restore` takes again of the arrays it returns. That covers disk, file format and the new sharding, and costs one
pass over the devices' memory, where reading the files once more would cost minutes. Both are written before the rename.
"""

import contextlib
import importlib.metadata
import json
import logging
import math
import re
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import psutil
import tensorstore as ts
from orbax.checkpoint import type_handlers

from surojax.errors import CheckpointError, ConfigError
from surojax.memory.host import put
from surojax.memory.nvme import THREADS, InFile, NvmeError, store_of
from surojax.placement.home import DEVICE, HOST
from surojax.placement.param import OUTER
from surojax.run.checksum import checksums, name_of
from surojax.step.state import (
    TrainState,
    cast,
    fill_layers,
    segment_names,
    shardings,
    work_dtype,
    work_function,
    work_weights,
)

FOLDER = "checkpoints"
FILES = "files.json"
SMALL = 1 << 20  # bytes; larger files are only measured, not read
WRITE_TIMEOUT_S = 24 * 3600  # orbax gives up after 20 minutes by itself, which a terabyte exceeds
logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax logs with tracebacks what it raises anyway


def find(path: str | Path) -> Path | None:
    """The checkpoint folder that a path means: itself, or the newest one of a run's folder; None when there is none."""
    path = Path(path).expanduser().absolute()
    if (path / "meta").is_dir():
        return path
    steps = steps_in(path / FOLDER if (path / FOLDER).is_dir() else path)
    return steps[-1] if steps else None


def steps_in(folder: Path) -> list[Path]:
    """Finished checkpoints of a folder, oldest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((p for p in found if p.name.isdigit() and p.is_dir()), key=lambda p: int(p.name))


def read_meta(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself. Raises CheckpointError when a file is damaged or missing."""
    with _readable(path):
        _check_files(path)
        return json.loads((path / "meta" / "metadata").read_text())


def written_by(meta: dict[str, Any]) -> str:
    """The version of surojax that wrote a checkpoint, for errors."""
    version = f"version {meta['version']} of surojax" if "version" in meta else "a version of surojax before 0.2"
    return f"{version}, which wrote it"


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Fields of two nested dicts that differ: dotted name -> (old, new)."""
    found = {}
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found[prefix + key] = (a, b)
    return found


class Checkpoints:
    """The checkpoints of one run; a context manager that waits for the last write.

    `last` is the newest one; it may still be in the writing.
    """

    def __init__(self, output_dir: Path, *, save_total_limit: int):
        self.folder = output_dir / FOLDER
        self.last = find(self.folder)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=save_total_limit,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(
                timeout_secs=WRITE_TIMEOUT_S, post_finalization_callback=lambda: _list_files(self.folder)
            ),
        )
        with _Translate(lambda e: f"cannot keep checkpoints in {self.folder} ({e}); choose another output_dir"):
            self.manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=_item_handlers())

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            self.wait()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(str(failed))  # what ended the run comes first
        finally:
            with contextlib.suppress(Exception):  # `wait` has reported what went wrong
                self.manager.close()

    def save(self, state: TrainState, meta: dict[str, Any]) -> None:
        """Copy the state off the devices and start writing; an earlier write is waited for. Where host memory has no
        room for a copy of what rests in it, all is written before this returns.

        Raises CheckpointError, leaving every earlier checkpoint as it was, when the state holds NaN or infinity, when
        there is no room, or when a write failed; NvmeError when a file of the state is not what was written to it.
        """
        self.wait()
        if store := store_of(state):
            store.settle()
        step = meta["step"]
        sums, bad = checksums(weights=state.weights, master=state.master, moments=state.moments)
        if bad:
            raise CheckpointError(
                f"no checkpoint of step {step} was written: {bad[0]} holds NaN or infinity, as do {len(bad) - 1} other "
                f"arrays; lower learning_rate; last checkpoint: {self.last}"
            )
        check_room(self.folder, state, f"the checkpoint of step {step}", f"; last checkpoint: {self.last}")
        copied = room_to_copy(state)
        apart = _apart if copied else lambda tree: tree
        history = {} if state.history is None else {"history": ocp.args.PyTreeSave({"amax": state.history})}
        items = ocp.args.Composite(
            **history,
            master=ocp.args.PyTreeSave(apart(state.master), save_args=_by_layer(state.master)),
            moments=ocp.args.PyTreeSave(apart(state.moments), save_args=_by_layer(state.moments)),
            meta=ocp.args.JsonSave({**meta, "version": importlib.metadata.version("surojax"), "checksums": sums}),
        )
        assert step not in self.manager.all_steps(), f"the checkpoint of step {step} would be written twice"
        self.last = self.folder / str(step)
        with self._writing():
            self.manager.save(step, args=items, force=True)
            if not copied:
                self.manager.wait_until_finished()

    def check(self) -> None:
        """Raises CheckpointError when the write in the background has failed; costs nothing, so ask every step."""
        if not self.manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Until everything is on disk. Raises CheckpointError when a write failed."""
        with self._writing():
            self.manager.wait_until_finished()

    def _writing(self):
        def message(reason):
            what, self.last = self.last, find(self.folder)
            return f"could not write checkpoint {what} ({reason}); the disk may be full; last checkpoint: {self.last}"

        return _Translate(message)


def restore(path: Path, plan: TrainState) -> TrainState:
    """The state in a checkpoint, each array straight into the plan's sharding, or into its files.

    Raises CheckpointError, and NvmeError or ConfigError for a file of the plan that cannot be written.
    """
    meta = read_meta(path)
    with _readable(path):
        _check_moments(path, plan.moments, meta)
        loaded = _load(path, {"master": plan.master, "moments": plan.moments})
        weights = _work_weights(loaded["master"], plan)
        step = jax.device_put(jnp.int32(meta["step"]), plan.step.sharding)
        state = TrainState(step, weights, loaded["master"], loaded["moments"], _history(path, plan))
        _verify(meta, master=state.master, moments=state.moments)
    return state


def _history(path: Path, plan: TrainState):
    """The history of a checkpoint, cut or filled with zeros to the planned length; zeros where it has none."""
    if plan.history is None:
        return None
    amax = np.zeros(plan.history.shape, plan.history.dtype)
    if (path / "history").is_dir():
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            options = {"amax": ocp.RestoreArgs(restore_type=np.ndarray)}  # its length may be another than the plan's
            saved = reader.restore(path / "history", args=ocp.args.PyTreeRestore(restore_args=options))["amax"]
        n = min(amax.shape[-1], saved.shape[-1])
        amax[..., :n] = saved[..., :n]
    return jax.device_put(amax, plan.history.sharding)


def _work_weights(master, plan: TrainState):
    """The work weights of restored master weights."""
    if not any(isinstance(x, InFile) for x in jax.tree.leaves(master)):
        return jax.jit(lambda master: work_weights(master, plan), out_shardings=shardings(plan.weights))(master)
    planned = plan.weights[OUTER]
    outer = jax.jit(lambda x: cast(put(x, DEVICE), planned), out_shardings=shardings(planned))(master[OUTER])
    (name,) = segment_names(master)  # `state_plan` refuses several
    files, structure = jax.tree.flatten(master[name])
    work = jax.jit(work_function(plan.weights[name], work_dtype(plan)))

    def on_device(file: InFile, l: int) -> jax.Array:
        return jax.device_put(file.read(l), file.layer_sharding(DEVICE))

    def layer(l: int):
        return work(structure.unflatten([on_device(file, l) for file in files])), ()

    stacks, _ = fill_layers(plan.weights[name], (), layer)
    return {name: stacks, OUTER: outer}


def restore_weights(path: Path, plan: dict) -> dict:
    """Only the weights in a checkpoint, in the dtype and sharding of `plan`. Raises CheckpointError."""
    meta = read_meta(path)
    with _readable(path):
        weights = _load(path, {"master": plan})["master"]
        _verify(meta, weights=weights)
    return weights


def _check_moments(path: Path, moments, meta: dict[str, Any]) -> None:
    """Raises CheckpointError unless the optimizer's state was written by the same optimizer, in blocks of one size."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        metadata: Any = reader.metadata(path / "moments")
    stored = jax.tree_util.tree_leaves_with_path(metadata.item_metadata.tree)
    found = {name_of(keys): tuple(x.shape) for keys, x in stored if hasattr(x, "shape")}
    planned = {name_of(keys): tuple(x.shape) for keys, x in jax.tree_util.tree_leaves_with_path(moments)}
    if found.keys() != planned.keys():
        name = sorted(found.keys() ^ planned.keys())[0]
        whose = "this run" if name in planned else "the checkpoint"
        raise CheckpointError(
            f"checkpoint {path}: expected the state of the same optimizer, got that of another one (only {whose} has "
            f"{name}); set optimizer to the one it was written with, use {written_by(meta)} if it is that one, or "
            "start anew (resume_from_checkpoint='no')"
        )
    for name, shape in planned.items():
        if name.endswith("_scale") and found[name] != shape:  # blocks end where shards of a row do
            raise CheckpointError(
                f"checkpoint {path}: expected {name} of shape {shape}, for the 8-bit blocks of shards of rows on this "
                f"number of GPUs, got {found[name]}; use a dp_shard_size as it was written with, or another that "
                f"divides {shape[-2]}, so that whole rows are sharded"
            )


def _apart(tree):
    """Arrays that the next step does not touch: orbax copies from devices, but reads host memory while it writes."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False) if _in_host(x) else x, tree)


def _in_host(x) -> bool:
    return isinstance(x, jax.Array) and x.sharding.memory_kind == HOST.memory_kind


def _load(path: Path, items: dict) -> dict:
    """The arrays as planned; a stack that is planned for a file is written to it, a layer at a time."""
    found = {}
    for name, plan in items.items():
        in_memory = jax.tree.map(lambda x: ... if isinstance(x, InFile) else x, plan)
        options = ocp.checkpoint_utils.construct_restore_args(in_memory)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            arrays = reader.restore(path / name, args=ocp.args.PyTreeRestore(in_memory, restore_args=options))
        leaves = [(name_of(keys), x) for keys, x in jax.tree_util.tree_leaves_with_path(plan)]
        with ThreadPoolExecutor(THREADS) as pool:
            loading = [pool.submit(_load_file, path / name, key, x) for key, x in leaves if isinstance(x, InFile)]
            [one.result() for one in loading]
        found[name] = jax.tree.map(lambda p, x: p if isinstance(p, InFile) else x, plan, arrays)
    return found


def _load_file(item: Path, name: str, file: InFile) -> None:
    """One stack of an item into a file. Of chunks that hold several layers, these are in memory together."""
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": f"file://{item}", "path": f"{name}/"}}
    array: Any = ts.open(spec, open=True, read=True).result()
    if array.shape != file.shape:
        raise ValueError(f"{item.name}/{name}: expected shape {file.shape}, got {array.shape}")
    layers = array.chunk_layout.read_chunk.shape[0]
    for start in range(0, file.shape[0], layers):
        for i, layer in enumerate(array[start : min(start + layers, file.shape[0])].read().result()):
            file.write(start + i, np.asarray(layer).astype(file.dtype))


def _item_handlers() -> dict[str, ocp.CheckpointHandler]:
    arrays = (jax.Array, type_handlers.get_type_handler(jax.Array))
    registry = type_handlers.create_type_handler_registry(arrays, (InFile, _FileHandler(deepcopy_host_arrays=False)))
    of_state = lambda: ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    arrays = {name: of_state() for name in ("master", "moments", "history")}
    return {**arrays, "meta": ocp.JsonCheckpointHandler()}


class _FileHandler(type_handlers.NumpyHandler):
    """Writes an `InFile` as orbax writes a numpy array, but a layer at a time; no update begins before it is read."""

    async def serialize(self, values: Any, infos, args=None):
        self.holds = {**getattr(self, "holds", {}), id(values[0]): values[0].store.hold()}
        return await super().serialize(values, infos, args)

    async def _background_serialize(self, values: Any, infos, args=None):
        try:
            return await super()._background_serialize(values, infos, args)
        finally:
            self.holds.pop(id(values[0])).set_result(None)

    async def _open_and_write(self, value: Any, tspec, ts_context):
        array = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
        for l in range(value.shape[0]):
            await array[l].write(value.read(l))


def _by_layer(tree):
    """Options for saving: stacks of layers in chunks of one layer (of one shard)."""

    def options(path, x):
        if name_of(path[:1]) == OUTER:
            return ocp.SaveArgs()
        shard = x.shape if isinstance(x, InFile) else x.sharding.shard_shape(x.shape)
        return ocp.SaveArgs(chunk_byte_size=math.prod(shard[1:]) * x.dtype.itemsize, shard_axes=(0,))

    return jax.tree_util.tree_map_with_path(options, tree)


def room_to_copy(state: TrainState) -> bool:
    """Whether the machine has memory free for a second copy of what of the state rests there, and some to spare."""
    leaves = [x for x in jax.tree.leaves((state.master, state.moments)) if _in_host(x)]
    copy = sum(shard.data.nbytes for x in leaves for shard in x.addressable_shards)
    return 1.1 * copy < psutil.virtual_memory().available


def check_room(folder: Path, state: TrainState, what: str = "a checkpoint", more: str = "") -> None:
    """Raises CheckpointError when the disk of a folder, which need not exist yet, has no room for a state or a plan."""
    there = next(f for f in (folder, *folder.absolute().parents) if f.exists())
    need, free = bytes_on_disk(state), shutil.disk_usage(there).free
    if need > free:
        raise CheckpointError(
            f"no room for {what} in {folder}: it needs {need / 2**20:,.1f} MiB, {free / 2**20:,.1f} MiB are free; "
            f"free some, or move output_dir{more}"
        )


def bytes_on_disk(state: TrainState) -> int:
    """Bytes of the arrays that a checkpoint holds, before compression."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.master, state.moments)))


def _verify(meta: dict[str, Any], **trees) -> None:
    """Raises ValueError unless the arrays are the saved ones; one that was cast on the way is not compared."""
    sums, _ = checksums(**trees)
    saved = meta["checksums"]
    if bad := [name for name, value in sums.items() if saved.get(name, value) != value]:
        others = f" and {len(bad) - 1} other arrays are" if len(bad) > 1 else " is"
        raise ValueError(f"{bad[0]}{others} damaged: not the checksum it was written with")


def _list_files(folder: Path) -> None:
    """Write the list of a checkpoint's files. Orbax calls this when all are written, and then renames the folder."""
    (unfinished,) = folder.glob("*.orbax-checkpoint-tmp")
    files = {str(p.relative_to(unfinished)): _measure(p) for p in unfinished.glob("*/**/*") if p.is_file()}
    (unfinished / FILES).write_text(json.dumps(files, indent=1))


def _check_files(path: Path) -> None:
    """Raises ValueError or FileNotFoundError unless every file is there, as long as it was, and if small the same."""
    for name, written in json.loads((path / FILES).read_text()).items():
        if (now := _measure(path / name)) != written:
            sizes = f"{written['bytes']} bytes were written, {now['bytes']} are there"
            raise ValueError(
                f"{name} is damaged: {sizes if now['bytes'] != written['bytes'] else 'its content changed'}"
            )


def _measure(file: Path) -> dict[str, int]:
    size = file.stat().st_size
    return {"bytes": size} | ({"crc32": zlib.crc32(file.read_bytes())} if size <= SMALL else {})


class _Translate:
    """Turn whatever the file libraries raise into one CheckpointError."""

    def __init__(self, message):
        self.message = message

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, Exception) and not isinstance(error, CheckpointError | ConfigError | NvmeError):
            raise CheckpointError(self.message(_reason(error))) from error


def _reason(error: BaseException) -> str:
    """The first cause in one line; of a long one the start (what was done) and the end (why it failed)."""
    while error.__cause__:
        error = error.__cause__
    text = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
    text = " ".join(re.sub(r"\[(tensorstore_spec|source locations).*", "", text, flags=re.DOTALL).split())
    return text if len(text) <= 400 else f"{text[:150]} ... {text[-230:]}"


def _readable(path: Path) -> _Translate:
    others = [p for p in steps_in(path.parent) if p != path]
    change = f"to continue from {others[-1]}, move it away" if others else "there is no other beside it"
    return _Translate(lambda e: f"checkpoint {path} cannot be read ({e}); {change}")
