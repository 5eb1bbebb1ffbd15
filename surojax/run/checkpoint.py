"""Checkpoints: written with orbax in the background, atomic, verified, and restorable onto any mesh.

A checkpoint is the folder `<output_dir>/checkpoints/<step>` with the items `master` (master weights), `moments`
(optimizer state), `history` (recipe fp8_hybrid only) and `meta` (JSON: step, data position, config). Orbax writes into
a temporary folder and renames it after the last write, so a killed run leaves either a complete checkpoint or none.
Work weights are not stored, because they are `master` cast to the work dtype. The state of random numbers is not stored
either: they are derived from the seed in the config and the positions in `meta`.

A checkpoint stores shapes, not placements: the plan that `restore` takes says which device gets which shard. Stacks of
layers are stored in chunks of one layer (of one shard). A stack that the run stores in a file (nvme.py) is therefore
written and read one layer at a time. It is also written in the background, and the next update waits for that write.

Orbax does not detect a damaged file: it returns a flipped byte as another number. Two checks find damage:

* `files.json` has the size of every file, and the checksum of small files. It is compared before anything is compiled,
  and the error names the file.
* `meta` has a checksum of every array, computed on the devices. `restore` computes the checksums of the arrays that it
  returns, and compares. This check covers disk, file format and the new sharding. It costs one pass over the devices'
  memory; reading the files a second time would take minutes.

Both are written before the folder is renamed.

If the last stage of `pp` is not full, stacks end with padding (step/padding.py): zeros, whose chunks are not written.
`meta` then says how many `layers` each segment has. Another layout reads those, and pads with zeros itself if it has
to; zeros add nothing to a checksum.
"""

import contextlib
import dataclasses
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
import numpy as np
import orbax.checkpoint as ocp
import psutil
import tensorstore as ts
from orbax.checkpoint import type_handlers

from surojax.errors import CheckpointError, ConfigError
from surojax.memory.host import put
from surojax.memory.nvme import THREADS, InFile, NvmeError, store_of
from surojax.optim.optimizer import Moments8bit
from surojax.optim.reblock import reblocked
from surojax.parallel.feed import from_host
from surojax.placement.home import DEVICE, HOST
from surojax.placement.param import OUTER, part_of, with_part
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
SMALL = 1 << 20  # bytes; `files.json` has only the size of larger files, not their checksum
WRITE_TIMEOUT_S = 24 * 3600  # orbax's default is 20 minutes, and a terabyte takes longer
logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax also logs the errors that it raises, with tracebacks


def find(path: str | Path) -> Path | None:
    """Returns `path` if it is a checkpoint, else the newest checkpoint of the run in that folder, or None."""
    path = Path(path).expanduser().absolute()
    if (path / "meta").is_dir():
        return path
    steps = steps_in(path / FOLDER if (path / FOLDER).is_dir() else path)
    return steps[-1] if steps else None


def steps_in(folder: Path) -> list[Path]:
    """Finished checkpoints of a folder, oldest first."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted((p for p in entries if p.name.isdigit() and p.is_dir()), key=lambda p: int(p.name))


def read_meta(path: Path) -> dict[str, Any]:
    """Returns the item `meta` of a checkpoint. Raises CheckpointError if a file is damaged or missing."""
    with readable(path):
        _check_files(path)
        return json.loads((path / "meta" / "metadata").read_text())


def written_by(meta: dict[str, Any]) -> str:
    """The version of surojax that wrote a checkpoint, for errors."""
    version = f"version {meta['version']} of surojax" if "version" in meta else "a version of surojax before 0.2"
    return f"{version}, which wrote it"


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Returns the fields in which two nested dicts differ, as {dotted name: (old value, new value)}."""
    found = {}
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found[prefix + key] = (a, b)
    return found


class Checkpoints:
    """The checkpoints of one run; a context manager that waits for the last write when it exits.

    `last`: the newest checkpoint, which may not be completely written yet; None if there is none.
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
            error.add_note(str(failed))  # the error that ended the run is the one to raise
        finally:
            with contextlib.suppress(Exception):  # `wait` has already raised the error of a write
                self.manager.close()

    def save(self, state: TrainState, meta: dict[str, Any]) -> None:
        """Wait for an earlier write, copy the state from the devices, and start to write it in the background.

        Arrays in pinned host memory are copied within host memory first. If it has no room for that copy, this function
        returns after the write.

        Raises CheckpointError if the state contains NaN or infinity, if the disk has no room, or if a write failed;
        earlier checkpoints are not changed. Raises NvmeError if a file of the state does not contain what was written.
        """
        self.wait()
        if store := store_of(state):
            store.settle()
        step = meta["step"]
        sums, bad = checksums(weights=part_of(state.weights, state.master), master=state.master, moments=state.moments)
        if bad:
            raise CheckpointError(
                f"no checkpoint of step {step} was written: {bad[0]} holds NaN or infinity, as do {len(bad) - 1} other "
                f"arrays; lower learning_rate; last checkpoint: {self.last}"
            )
        check_room(self.folder, state, f"the checkpoint of step {step}", f"; last checkpoint: {self.last}")
        copied = room_to_copy(state)
        master = _apart(state.master) if copied else state.master
        moments = _apart(state.moments) if copied else state.moments
        history = {} if state.history is None else {"history": ocp.args.PyTreeSave({"amax": state.history})}
        items = ocp.args.Composite(
            **history,
            master=ocp.args.PyTreeSave(master, save_args=_by_layer(state.master)),
            moments=ocp.args.PyTreeSave(moments, save_args=_by_layer(state.moments)),
            meta=ocp.args.JsonSave({**meta, "version": importlib.metadata.version("surojax"), "checksums": sums}),
        )
        assert step not in self.manager.all_steps(), f"the checkpoint of step {step} would be written twice"
        self.last = self.folder / str(step)
        with self._writing():
            self.manager.save(step, args=items, force=True)
            if not copied:
                self.manager.wait_until_finished()

    def check(self) -> None:
        """Raises CheckpointError if the write in the background has failed. Does not wait, so call it every step."""
        if not self.manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until everything is on disk. Raises CheckpointError if a write failed."""
        with self._writing():
            self.manager.wait_until_finished()

    def _writing(self):
        """Translates errors of a write; after one, `last` is the newest complete checkpoint."""

        def message(reason):
            failed = self.last
            self.last = find(self.folder)
            return f"could not write checkpoint {failed} ({reason}); the disk may be full; last checkpoint: {self.last}"

        return _Translate(message)


def restore(
    path: Path, plan: TrainState, layers: dict[str, int] | None = None, *, base: dict | None = None
) -> TrainState:
    """Returns the state in a checkpoint. Each array is read directly into its planned sharding, or into its file.

    layers: how many entries of a segment's planned stacks are layers; None: all of them. base: work weights, of which
    those that are not trained, and so not in the checkpoint, are taken; None: all are. Raises CheckpointError if the
    checkpoint cannot be used, NvmeError or ConfigError if a file of the plan cannot be written.
    """
    meta = read_meta(path)
    with readable(path):
        stored = _stored_moments(path, plan.moments, meta)
        loaded = _load(path, {"master": plan.master, "moments": stored}, meta, layers or {})
        of_trained = plan._replace(weights=part_of(plan.weights, plan.master))
        weights = with_part(base or {}, _work_weights(loaded["master"], of_trained))
        step = from_host(np.int32(meta["step"]), plan.step.sharding)
        state = TrainState(step, weights, loaded["master"], loaded["moments"], _history(path, plan))
        _verify(meta, master=state.master, moments=state.moments)
    return state._replace(moments=_reblocked(state.moments, plan.moments))


def _history(path: Path, plan: TrainState):
    """Returns the history of a checkpoint, truncated or padded with zeros to the planned length.

    It is all zeros if the checkpoint has no history, and None if the plan has none.
    """
    if plan.history is None:
        return None
    amax = np.zeros(plan.history.shape, plan.history.dtype)
    if (path / "history").is_dir():
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            options = {"amax": ocp.RestoreArgs(restore_type=np.ndarray)}  # its length may differ from the plan's
            saved = reader.restore(path / "history", args=ocp.args.PyTreeRestore(restore_args=options))["amax"]
        n = min(amax.shape[-1], saved.shape[-1])
        amax[..., :n] = saved[..., :n]
    return from_host(amax, plan.history.sharding)


def _work_weights(master, plan: TrainState):
    """Casts restored master weights to work weights; those in files are read one layer at a time."""
    if not any(isinstance(x, InFile) for x in jax.tree.leaves(master)):
        return jax.jit(lambda master: work_weights(master, plan), out_shardings=shardings(plan.weights))(master)
    planned = plan.weights[OUTER]
    outer = jax.jit(lambda x: cast(put(x, DEVICE), planned), out_shardings=shardings(planned))(master[OUTER])
    (name,) = segment_names(master)  # `state_plan` refuses several
    files, structure = jax.tree.flatten(master[name])
    work = jax.jit(work_function(plan.weights[name], work_dtype(plan)))

    def layer(l: int):
        return work(structure.unflatten([file.on_every_stage(l) for file in files])), ()

    stacks, _ = fill_layers(plan.weights[name], (), layer)
    return {name: stacks, OUTER: outer}


def restore_weights(path: Path, plan: dict) -> dict:
    """Returns only the weights in a checkpoint, in the dtype and sharding of `plan`. Raises CheckpointError."""
    meta = read_meta(path)
    with readable(path):
        weights = _load(path, {"master": plan}, meta, {})["master"]
        _verify(meta, weights=weights)
    return weights


def _stored_moments(path: Path, moments, meta: dict[str, Any]):
    """The plan of the moments with the scales of 8-bit blocks as they are stored, if these have another size.

    Raises CheckpointError if another optimizer wrote the state, or if such scales are planned in a file.
    """
    found = _stored_shapes(path / "moments")
    planned = {name_of(keys): tuple(x.shape) for keys, x in jax.tree_util.tree_leaves_with_path(moments)}
    if found.keys() != planned.keys():
        name = sorted(found.keys() ^ planned.keys())[0]
        whose = "this run" if name in planned else "the checkpoint"
        raise CheckpointError(
            f"checkpoint {path}: expected the state of the same optimizer, got that of another one (only {whose} has "
            f"{name}); set optimizer to the one it was written with, use {written_by(meta)} if it is that one, or "
            "start anew (resume_from_checkpoint='no')"
        )

    def as_stored(keys, x):
        name = name_of(keys)
        length = 0 if name_of(keys[:1]) == OUTER else 1  # of a stack, which may be padded
        if not name.endswith("_scale") or found[name][length:] == x.shape[length:]:
            return x
        if isinstance(x, InFile):
            raise CheckpointError(
                f"checkpoint {path}: expected {name} of shape {x.shape}, for the 8-bit blocks of shards of rows on "
                f"this number of GPUs, got {found[name]}; use the sizes of the mesh as it was written with, or set "
                "offload_optimizer=True"
            )
        rows = x.sharding.update(spec=jax.P(*x.sharding.spec[: len(x.shape) - 1]))  # no shard has a part of a row
        return jax.ShapeDtypeStruct((*x.shape[:length], *found[name][length:]), x.dtype, sharding=rows)

    return jax.tree_util.tree_map_with_path(as_stored, moments)


def _reblocked(moments, planned):
    """The moments in 8-bit blocks of the planned sizes."""

    def is_state(x) -> bool:
        return isinstance(x, Moments8bit)

    def one(old, plan):
        if not is_state(old) or old.m_scale.shape == plan.m_scale.shape:
            return old
        blocks = plan.m_scale.shape[-1]
        new = jax.jit(lambda old: cast(reblocked(put(old, DEVICE), blocks), plan))(old)
        return jax.device_put(new, shardings(plan))

    return jax.tree.map(one, moments, planned, is_leaf=is_state)


def _apart(tree):
    """Copies the arrays in pinned host memory, so that the next step cannot overwrite them while orbax writes.

    Orbax itself copies arrays in device memory before it starts, but reads arrays in host memory during the write.
    """
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False) if _in_host(x) else x, tree)


def _in_host(x) -> bool:
    return isinstance(x, jax.Array) and x.sharding.memory_kind == HOST.memory_kind


def _stored_shapes(item: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of an item's arrays by name."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        metadata: Any = reader.metadata(item)
    leaves = jax.tree_util.tree_leaves_with_path(metadata.item_metadata.tree)
    return {name_of(keys): tuple(x.shape) for keys, x in leaves if hasattr(x, "shape")}


def _restore_args(item: Path, plan, meta: dict[str, Any], layers: dict[str, int]):
    """Returns orbax's options to read an item as planned: stacks of as many layers may differ in their padding.

    layers: of the plan, see `restore`. Raises ValueError if the numbers of layers differ.
    """
    stored = _stored_shapes(item)

    def one(keys, x, option):
        if x is ... or name_of(keys[:1]) == OUTER:
            return option
        section, shape = name_of(keys[:1]), stored[name_of(keys)]
        there, here = meta.get("layers", {}).get(section, shape[0]), layers.get(section, x.shape[0])
        if there != here:
            raise ValueError(f"{name_of(keys)}: expected {here} layers, got {there}")
        return dataclasses.replace(option, strict=shape[0] == x.shape[0] or shape[1:] != x.shape[1:])

    options = ocp.checkpoint_utils.construct_restore_args(plan)
    return jax.tree_util.tree_map_with_path(one, plan, options)


def _load(path: Path, items: dict, meta: dict[str, Any], layers: dict[str, int]) -> dict:
    """Reads the items of a checkpoint as planned; a stack that is planned in a file is copied to it layer by layer.

    layers: see `restore`.
    """
    loaded = {}
    for name, plan in items.items():
        in_memory = jax.tree.map(lambda x: ... if isinstance(x, InFile) else x, plan)
        options = _restore_args(path / name, in_memory, meta, layers)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            arrays = reader.restore(path / name, args=ocp.args.PyTreeRestore(in_memory, restore_args=options))
        leaves = [(name_of(keys), x) for keys, x in jax.tree_util.tree_leaves_with_path(plan)]
        with ThreadPoolExecutor(THREADS) as pool:
            loading = [pool.submit(_load_file, path / name, key, x) for key, x in leaves if isinstance(x, InFile)]
            [one.result() for one in loading]
        loaded[name] = jax.tree.map(lambda p, x: p if isinstance(p, InFile) else x, plan, arrays)
    return loaded


def _load_file(item: Path, name: str, file: InFile) -> None:
    """Copies one stack of an item to its file, one chunk at a time, which may be several layers."""
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": f"file://{item}", "path": f"{name}/"}}
    array: Any = ts.open(spec, open=True, read=True).result()
    layers = file.store.num_layers
    if array.shape[0] < layers or array.shape[1:] != file.shape[1:]:
        raise ValueError(f"{item.name}/{name}: expected shape {file.shape}, got {array.shape}")
    of_chunk = array.chunk_layout.read_chunk.shape[0]
    for start in range(0, layers, of_chunk):
        numbers = range(start, min(start + of_chunk, layers))
        whole = array[numbers.start : numbers.stop].read().result() if file.parts is None else None
        for l in numbers:
            if l in file.store.records:
                layer = array[l] if whole is None else whole[l - start]  # of array[l], only the parts are read
                file.write(l, file.stored_of(l, layer).astype(file.dtype))


def _item_handlers() -> dict[str, ocp.CheckpointHandler]:
    in_memory = (jax.Array, type_handlers.get_type_handler(jax.Array))
    in_files = (InFile, _FileHandler(deepcopy_host_arrays=False))
    registry = type_handlers.create_type_handler_registry(in_memory, in_files)
    state_items = ("master", "moments", "history")
    handlers = {name: ocp.PyTreeCheckpointHandler(type_handler_registry=registry) for name in state_items}
    return {**handlers, "meta": ocp.JsonCheckpointHandler()}


class _FileHandler(type_handlers.NumpyHandler):
    """Writes an `InFile` in the format of an array, one layer at a time; each process the parts that it stores first.

    The next update of the file waits until the last layer has been read.
    """

    async def serialize(self, values: Any, infos, args=None):
        self.holds = {**getattr(self, "holds", {}), id(values[0]): values[0].store.hold()}
        return await super().serialize(values, infos, args)

    async def _background_serialize(self, values: Any, infos, args=None):
        try:
            for file, info, options in zip(values, infos, args or [None] * len(values), strict=True):
                await info.await_path_creation()
                await self._write(file, info, options)
        finally:
            self.holds.pop(id(values[0])).set_result(None)

    async def _write(self, file: InFile, info, options) -> None:
        spec = type_handlers.get_json_tspec_write(
            info,
            use_ocdbt=info.is_ocdbt_checkpoint,
            global_shape=file.shape,
            local_shape=_shard_of(file),
            dtype=file.dtype,
            process_index=jax.process_index() if info.is_ocdbt_checkpoint else None,
            arg=options,
        )
        array: Any = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
        for l in range(file.shape[0]):  # and padding: readers of as many entries expect all chunks
            if file.parts is not None and not file.parts[file.stage(l)]:
                continue
            stored = file.read(l)
            if file.parts is None:
                await array[l].write(stored)
                continue
            for part in file.parts[file.stage(l)].values():
                if part.first:
                    await array[l][part.index].write(stored[part.number])


def _by_layer(tree):
    """Returns orbax's options for saving: stacks of layers are stored in chunks of one layer (of one shard)."""

    def options(path, x):
        if name_of(path[:1]) == OUTER:
            return ocp.SaveArgs()
        shard = _shard_of(x) if isinstance(x, InFile) else x.sharding.shard_shape(x.shape)
        return ocp.SaveArgs(chunk_byte_size=math.prod(shard[1:]) * x.dtype.itemsize, shard_axes=(0,))

    return jax.tree_util.tree_map_with_path(options, tree)


def _shard_of(file: InFile) -> tuple[int, ...]:
    """The shape of the parts that a process writes of a stack in a file, with all layers."""
    layer = file.shape[1:]
    return (file.shape[0], *(layer if file.parts is None else file.layer_sharding(DEVICE).shard_shape(layer)))


def room_to_copy(state: TrainState) -> bool:
    """Whether host memory has room for a copy of the state's arrays in pinned host memory, with 10 % to spare."""
    leaves = [x for x in jax.tree.leaves((state.master, state.moments)) if _in_host(x)]
    copy_bytes = sum(shard.data.nbytes for x in leaves for shard in x.addressable_shards)
    return 1.1 * copy_bytes < psutil.virtual_memory().available


def check_room(folder: Path, state: TrainState, what: str = "a checkpoint", more: str = "") -> None:
    """Raises CheckpointError if the disk of `folder`, which need not exist yet, has no room for a checkpoint.

    state: a state or its plan. what, more: parts of the error message.
    """
    existing = next(f for f in (folder, *folder.absolute().parents) if f.exists())
    need = bytes_on_disk(state)
    free = shutil.disk_usage(existing).free
    if need > free:
        raise CheckpointError(
            f"no room for {what} in {folder}: it needs {need / 2**20:,.1f} MiB, {free / 2**20:,.1f} MiB are free; "
            f"free some, or move output_dir{more}"
        )


def bytes_on_disk(state: TrainState) -> int:
    """Bytes of the arrays in a checkpoint, before compression."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.master, state.moments)))


def _verify(meta: dict[str, Any], **trees) -> None:
    """Raises ValueError if the checksum of an array is not the saved one.

    An array that was cast to another dtype has no saved checksum, so it is not compared.
    """
    sums, _ = checksums(**trees)
    saved = meta["checksums"]
    if bad := [name for name, value in sums.items() if saved.get(name, value) != value]:
        others = f" and {len(bad) - 1} other arrays are" if len(bad) > 1 else " is"
        raise ValueError(f"{bad[0]}{others} damaged: not the checksum it was written with")


def _list_files(folder: Path) -> None:
    """Writes `files.json`. Orbax calls this after all files are written and before it renames the folder.

    With several processes, the first one does it; the others pass the next barrier after it.
    """
    if jax.process_index() != 0:
        return
    (unfinished,) = folder.glob("*.orbax-checkpoint-tmp")
    files = {str(p.relative_to(unfinished)): _measure(p) for p in unfinished.glob("*/**/*") if p.is_file()}
    (unfinished / FILES).write_text(json.dumps(files, indent=1))


def _check_files(path: Path) -> None:
    """Raises FileNotFoundError if a file is missing, ValueError if its size or its checksum (small files) changed."""
    for name, written in json.loads((path / FILES).read_text()).items():
        if (now := _measure(path / name)) != written:
            sizes = f"{written['bytes']} bytes were written, {now['bytes']} are there"
            raise ValueError(
                f"{name} is damaged: {sizes if now['bytes'] != written['bytes'] else 'its content changed'}"
            )


def _measure(file: Path) -> dict[str, int]:
    """Size of a file, and its CRC-32 if it is small."""
    size = file.stat().st_size
    return {"bytes": size} | ({"crc32": zlib.crc32(file.read_bytes())} if size <= SMALL else {})


class _Translate:
    """Context manager that turns any exception of the file libraries into a CheckpointError.

    message: function of the reason, in one line, that returns the error message.
    """

    def __init__(self, message):
        self.message = message

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, Exception) and not isinstance(error, CheckpointError | ConfigError | NvmeError):
            raise CheckpointError(self.message(_reason(error))) from error


def _reason(error: BaseException) -> str:
    """Returns the first cause in one line. A long line keeps its start (the operation) and its end (the reason)."""
    while error.__cause__:
        error = error.__cause__
    text = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
    text = " ".join(re.sub(r"\[(tensorstore_spec|source locations).*", "", text, flags=re.DOTALL).split())
    return text if len(text) <= 400 else f"{text[:150]} ... {text[-230:]}"


def readable(path: Path) -> _Translate:
    """Translates the errors of reading a checkpoint."""
    others = [p for p in steps_in(path.parent) if p != path]
    change = f"to continue from {others[-1]}, move it away" if others else "there is no other beside it"
    return _Translate(lambda e: f"checkpoint {path} cannot be read ({e}); {change}")
