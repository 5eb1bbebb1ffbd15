"""Writes checkpoints with orbax in the background, atomic and verified; restore.py reads them onto any mesh.

A checkpoint is the folder `<output_dir>/checkpoints/<step>` with the items `master` (master weights), `moments`
(optimizer state), `history` (recipe fp8_hybrid only) and `meta` (JSON: step, data position, config, the checksum of
every array). Orbax writes into a temporary folder and renames it after the last write, so a killed run leaves either a
complete checkpoint or none (on_disk.py). Work weights are not stored, because they are `master` cast to the work dtype.
The state of random numbers is not stored either: they are derived from the seed in the config and the positions in
`meta`.

Stacks of layers are stored in chunks of one layer (of one shard). A stack that the run stores in a file (nvme.py) is
therefore written and read one layer at a time. It is also written in the background, and the next update waits for that
write. Where the file system can share blocks (XFS, Btrfs), nothing of the file is written again: each chunk is a file
of its own, not compressed, that has the blocks of the run's file until the next update replaces them there.
"""

import asyncio
import contextlib
import errno
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import type_handlers
from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

import surojax
from surojax.cluster.hosts import processes_here
from surojax.errors import CheckpointError
from surojax.memory.by_host import by_host
from surojax.memory.in_file import InFile, InFiles, home_of, part_shape
from surojax.memory.layer_file import Store
from surojax.placement.home import HOST
from surojax.placement.param import OUTER, part_of
from surojax.resources import free_memory
from surojax.run.checksum import checksums, name_of
from surojax.run.on_disk import FOLDER, Translate, find, is_held, list_files
from surojax.step.state import TrainState

UNFINISHED = ".orbax-checkpoint-tmp"  # behind the name of a folder that is written; one whose write failed stays
TABLE_CHUNK = 256 << 20  # most bytes of a chunk of embedding and head
WRITE_TIMEOUT_S = 24 * 3600  # orbax's default is 20 minutes, and a terabyte takes longer


class Checkpoints:
    """The checkpoints of one run; a context manager that waits for the last write when it exits.

    `last`: the newest checkpoint, which may not be completely written yet; None if there is none. `shares_blocks`:
    whether checkpoints have the blocks of the run's file, see above.
    """

    def __init__(self, output_dir: Path, *, save_total_limit: int, store: Store | None = None):
        """store: the run's file, whose blocks are shared if the file system can."""
        ignore_closed_loop()
        self.folder = output_dir / FOLDER
        self.last = find(self.folder)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(
                [policies.LatestN(save_total_limit), _Held(self.folder)]
            ),
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(
                timeout_secs=WRITE_TIMEOUT_S,
                post_finalization_callback=lambda: list_files(Path(f"{self.last}{UNFINISHED}")),
            ),
        )
        with Translate(lambda e: f"cannot keep checkpoints in {self.folder} ({e}); choose another output_dir"):
            self.folder.mkdir(parents=True, exist_ok=True)
            alone = jax.process_count() == 1
            self.shares_blocks = store is not None and alone and store.shares_blocks_with(self.folder)
            handlers = _item_handlers(share=self.shares_blocks)
            self.manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

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
        """Waits for an earlier write, copies the state from the devices, and starts to write it in the background.

        Arrays in pinned host memory are copied within host memory first. If it has no room for that copy, this function
        returns after the write.

        Raises CheckpointError if the state contains NaN or infinity, if the disk has no room, or if a write failed;
        earlier checkpoints are not changed. Raises NvmeError if a file of the state does not contain what was written.
        """
        self.wait()
        InFiles(state).store.settle()
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
            meta=ocp.args.JsonSave({**meta, "version": surojax.__version__, "checksums": sums}),
        )
        assert step not in self.manager.all_steps(), f"the checkpoint of step {step} would be written twice"
        self.last = self.folder / str(step)
        with self._writing():
            self.manager.save(step, args=items, force=True)
            if not copied:
                self.manager.wait_until_finished()

    def check(self) -> None:
        """Raises CheckpointError if the background write has failed. Does not wait, so call it every step."""
        if not self.manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until the checkpoint is on disk. Raises CheckpointError if a write failed."""
        with self._writing():
            self.manager.wait_until_finished()

    def _writing(self):
        """Translates errors of a write to CheckpointError; after an error, `last` is the newest complete checkpoint."""

        def message(reason):
            failed = self.last
            self.last = find(self.folder)
            many = os.strerror(errno.EMFILE) in reason
            change = "raise the limit that `ulimit -n` shows" if many else "the disk or a quota may be full"
            return f"could not write checkpoint {failed} ({reason}); {change}; last checkpoint: {self.last}"

        return Translate(message)


CLOSED_LOOP = "Event loop is closed"


def ignore_closed_loop() -> None:
    """Stops threads of tensorstore from printing tracebacks behind the line about a write that failed.

    Orbax closes its event loop with the first of a checkpoint's writes that fails; the others then report to it, and
    asyncio logs the errors that nobody awaits.
    """
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    if not isinstance(sys.unraisablehook, _OtherErrors):
        sys.unraisablehook = _OtherErrors(sys.unraisablehook)


class _OtherErrors:
    """Passes errors that nothing can raise to another hook, but those of a closed event loop."""

    def __init__(self, before: Callable[["sys.UnraisableHookArgs"], Any]):
        self.before = before

    def __call__(self, raised: "sys.UnraisableHookArgs") -> None:
        if raised.exc_type is not RuntimeError or str(raised.exc_value) != CLOSED_LOOP:
            self.before(raised)


class _Held(policies.PreservationPolicy):
    """Preserves checkpoints that a process is reading."""

    def __init__(self, folder: Path):
        self.folder = folder

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        return [is_held(self.folder / str(info.step)) for info in checkpoints]


def _apart(tree):
    """Copies the arrays in pinned host memory, so that the next step cannot overwrite them while orbax writes.

    Orbax itself copies arrays in device memory before it starts, but reads arrays in host memory during the write.
    """
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False) if home_of(x) == HOST else x, tree)


def _item_handlers(*, share: bool) -> dict[str, ocp.CheckpointHandler]:
    """share: an array is a folder, with a file for each chunk; else a few files have all arrays of an item."""
    in_memory = (jax.Array, type_handlers.get_type_handler(jax.Array))
    in_files = (InFile, _FileHandler(deepcopy_host_arrays=False))
    registry = type_handlers.create_type_handler_registry(in_memory, in_files)
    state_items = ("master", "moments", "history")
    handlers = {
        name: ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_ocdbt=not share) for name in state_items
    }
    return {**handlers, "meta": ocp.JsonCheckpointHandler()}


class _FileHandler(type_handlers.NumpyHandler):
    """Writes an `InFile` as orbax writes an array, one layer or piece at a time.

    Each process writes the parts of which it stores the first copy.

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
            local_shape=file.local_shape,
            dtype=file.dtype,
            process_index=jax.process_index() if info.is_ocdbt_checkpoint else None,
            arg=options,
        )
        if not info.is_ocdbt_checkpoint:
            spec["metadata"]["compressor"] = None  # so that a chunk is what the run's file has
        array: Any = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
        shares = not info.is_ocdbt_checkpoint and array.chunk_layout.write_chunk.shape == file.chunk_shape
        separator = array.spec().to_json()["metadata"]["dimension_separator"]

        def read(l: int) -> np.ndarray | None:
            """Layer l, or None if its chunk has its blocks."""
            chunk = separator.join(map(str, (l, *(0 for _ in file.chunk_shape[1:]))))
            return None if shares and file.share(l, Path(info.parent_dir) / info.name / chunk) else file.read(l)

        def write(l: int, stored: np.ndarray | None) -> None:
            for index, values in file.first_pieces(l, stored) if stored is not None else ():
                array[index].write(values).result()

        await asyncio.to_thread(by_host, file.own_entries, read, lambda l, stored: stored, write)


def _by_layer(tree):
    """Returns orbax's options for saving: chunks of one layer's shard for stacks, and of some rows for tables."""

    def options(path, x):
        if isinstance(x, InFile) and x.parts is None:
            return ocp.SaveArgs(chunk_byte_size=math.prod(x.chunk_shape) * x.dtype.itemsize, shard_axes=(0,))
        if name_of(path[:1]) == OUTER:
            return ocp.SaveArgs(chunk_byte_size=TABLE_CHUNK, shard_axes=(0,) if x.shape else ())
        return ocp.SaveArgs(chunk_byte_size=math.prod(part_shape(x)) * x.dtype.itemsize, shard_axes=(0,))

    return jax.tree_util.tree_map_with_path(options, tree)


def room_to_copy(state: TrainState) -> bool:
    """True if host memory has room for a copy of the state's arrays in pinned host memory, with 10 % to spare."""
    leaves = [x for x in jax.tree.leaves((state.master, state.moments)) if home_of(x) == HOST]
    copy_bytes = sum(shard.data.nbytes for x in leaves for shard in x.addressable_shards)
    return 1.1 * copy_bytes < free_memory(processes_here()).size


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
