"""Reads a checkpoint into another run's plan: other GPUs, dtypes, memory tiers or padding.

A checkpoint stores shapes, not placements: the plan that `restore` takes says which device gets which shard. `meta` has
a checksum of every array, computed on the devices that wrote it. `restore` computes the checksums of the arrays that it
returns, and compares. This check covers disk, file format and the new sharding. It costs one pass over the devices'
memory; reading the files a second time would take minutes.

If the last stage of `pp` is not full, stacks end with padding (step/padding.py): zeros, whose chunks are
written from files only. `meta` then says how many `layers` each segment has. Another layout reads those, and pads with
zeros itself if it has to; zeros add nothing to a checksum.
"""

import asyncio
import collections
import dataclasses
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import type_handlers

from surojax.errors import CheckpointError
from surojax.memory.by_host import by_host
from surojax.memory.host import put
from surojax.memory.in_file import InFile, InFiles, TableInFile, home_of
from surojax.memory.layer_file import THREADS
from surojax.optim.adamw8bit import Moments8bit
from surojax.optim.reblock import reblocked
from surojax.parallel.feed import from_host
from surojax.placement.home import DEVICE
from surojax.placement.param import OUTER, part_of, with_part
from surojax.run.checksum import checksums, name_of
from surojax.run.on_disk import array_spec, read_meta, readable, written_by
from surojax.step.first_state import work_weights
from surojax.step.state import TrainState, cast_to_plan, shardings


def restore(
    path: Path, plan: TrainState, layers: dict[str, int] | None = None, *, base: dict | None = None
) -> TrainState:
    """Reads the state in a checkpoint, each array directly into its planned sharding or file.

    layers: number of entries in a segment's planned stacks that are layers, not padding; None: all. base: work weights;
    the untrained ones, which the checkpoint does not have, are taken; None: all weights are trained.
    Raises CheckpointError if the checkpoint cannot be used, NvmeError or ConfigError if a file cannot be written.
    """
    meta = read_meta(path)
    with readable(path):
        stored = _stored_moments(path, plan.moments, meta)
        loaded = _load(path, {"master": plan.master, "moments": stored}, meta, layers or {})
        trained_plan = plan._replace(weights=part_of(plan.weights, plan.master))
        weights = with_part(base or {}, work_weights(loaded["master"], trained_plan))
        step = from_host(np.int32(meta["step"]), plan.step.sharding)
        state = TrainState(step, weights, loaded["master"], loaded["moments"], _history(path, plan))
        _verify(meta, master=state.master, moments=state.moments)
    return state._replace(moments=_reblocked(state.moments, plan.moments))


def check_restorable(path: Path, plan: TrainState, layers: dict[str, int] | None = None) -> None:
    """Raises CheckpointError if `restore` would refuse a checkpoint for this plan; reads no array.

    It takes milliseconds, so it is done before anything is compiled. plan, layers: as for `restore`.
    """
    meta = read_meta(path)
    with readable(path):
        for name, planned in (("master", plan.master), ("moments", _stored_moments(path, plan.moments, meta))):
            _check_shapes(path / name, planned, meta, layers or {})
        if plan.history is not None and (path / "history").is_dir():
            (stored,) = _stored_shapes(path / "history").values()
            if stored[:-1] != plan.history.shape[:-1]:
                raise ValueError(f"history: expected layers x sites {plan.history.shape[:-1]}, got {stored[:-1]}")


def _check_shapes(item: Path, plan, meta: dict[str, Any], layers: dict[str, int]) -> None:
    """Raises ValueError if names or shapes of an item's arrays differ from the plan, except in padding."""
    stored = _stored_shapes(item)
    for keys, x in jax.tree_util.tree_leaves_with_path(plan):
        name = name_of(keys)
        if name not in stored:
            raise ValueError(f"{item.name}: expected {name}, got none")
        section = name_of(keys[:1])
        stacked = section != OUTER
        there = meta.get("layers", {}).get(section, stored[name][0]) if stacked else 0
        here = layers.get(section, x.shape[0]) if stacked else 0
        if there != here:
            raise ValueError(f"{item.name}/{name}: expected {here} layers, got {there}")
        if stored[name][stacked:] != tuple(x.shape[stacked:]):
            raise ValueError(f"{item.name}/{name}: expected shape {tuple(x.shape)}, got {stored[name]}")


def restore_weights(path: Path, plan: dict) -> dict:
    """Returns only the weights in a checkpoint, in the dtype and sharding of `plan`. Raises CheckpointError."""
    meta = read_meta(path)
    with readable(path):
        weights = _load(path, {"master": plan}, meta, {})["master"]
        _verify(meta, weights=weights)
    return weights


class _Waits:
    """Reads as orbax's handlers do, and after an error waits for what is still being read.

    The results would arrive when orbax has closed its event loop, and print a traceback each.
    """

    async def deserialize(self, *arguments: Any, **keywords: Any) -> Any:
        return await self._all(super().deserialize(*arguments, **keywords))  # type: ignore[misc]

    async def metadata(self, *arguments: Any, **keywords: Any) -> Any:
        return await self._all(super().metadata(*arguments, **keywords))  # type: ignore[misc]

    async def _all(self, reading: Coroutine[Any, Any, Any]) -> Any:
        before = asyncio.all_tasks()
        try:
            return await reading
        except BaseException:
            await asyncio.gather(*(asyncio.all_tasks() - before), return_exceptions=True)
            raise


class _ArrayReader(_Waits, type_handlers.ArrayHandler):
    """Reads arrays onto devices."""


class _NumpyReader(_Waits, type_handlers.NumpyHandler):
    """Reads arrays into host memory."""


def _reader() -> ocp.Checkpointer:
    """Makes a reader of an item of a checkpoint."""
    handlers = (jax.Array, _ArrayReader()), (np.ndarray, _NumpyReader())
    registry = type_handlers.create_type_handler_registry(*handlers)
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry))


def _load(path: Path, items: dict, meta: dict[str, Any], layers: dict[str, int]) -> dict:
    """Reads the items of a checkpoint as planned; stacks that are planned in files are copied to them layer by layer.

    layers: see `restore`.
    """
    loaded = {}
    for name, plan in items.items():
        in_files = InFiles(plan)
        files = in_files.files(plan)
        in_memory = in_files.joined(in_files.in_memory(plan), [...] * len(files))
        options = _restore_args(path / name, in_memory, meta, layers)
        with _reader() as reader:
            arrays = reader.restore(path / name, args=ocp.args.PyTreeRestore(in_memory, restore_args=options))
        names = jax.tree_util.tree_map_with_path(lambda keys, _: name_of(keys), plan)
        named = list(zip(in_files.files(names), files, strict=True))
        together = collections.defaultdict(list)  # stacks of a segment's layers, and tables of equally many pieces
        for stack_name, file in named:
            together[type(file), file.segment].append((stack_name, file))
        for stacks in together.values():
            _load_files(path / name, stacks)
        loaded[name] = in_files.joined(in_files.in_memory(arrays), files)
    return loaded


def _load_files(item: Path, named: list[tuple[str, InFile]]) -> None:
    """Copies an item's stacks to their files; at a time one layer of all stacks, or the layers of the largest chunk.

    named: (name, file), all stacks of layers, or all tables, of which a piece is copied at a time.
    """
    if not named:
        return
    files = [file for _, file in named]
    arrays = [_stored_array(item, name) for name, _ in named]
    layers = files[0].layers
    are_tables = isinstance(files[0], TableInFile)
    for (name, file), array in zip(named, arrays, strict=True):
        too_few = array.shape[0] != file.shape[0] if are_tables else array.shape[0] < layers
        if too_few or array.shape[1:] != file.shape[1:]:
            raise ValueError(f"{item.name}/{name}: expected shape {file.shape}, got {array.shape}")
    chunk_layers = 1 if are_tables else max(array.chunk_layout.read_chunk.shape[0] for array in arrays)

    def read(start: int) -> list:
        numbers = range(start, min(start + chunk_layers, layers))
        return list(pool.map(lambda file, array: file.stored_in(array, numbers), files, arrays))

    def write(_: int, stored: list) -> None:
        for file, layers_read in zip(files, stored, strict=True):
            for l, layer in layers_read.items():
                file.write(l, layer.astype(file.dtype))

    with ThreadPoolExecutor(THREADS) as pool:
        by_host(range(0, layers, chunk_layers), read, lambda _, stored: stored, write)


def _stored_array(item: Path, name: str) -> Any:
    """Opens an array of an item, without reading it."""
    return ts.open(array_spec(item, name), open=True, read=True).result()


def _restore_args(item: Path, plan, meta: dict[str, Any], layers: dict[str, int]):
    """Returns orbax's options to read an item as planned; stacks with equal layers may differ in padding.

    layers: of the plan, see `restore`. Raises ValueError if the numbers of layers differ.
    """
    stored = _stored_shapes(item)

    def one(keys, x, option):
        if x is ... or name_of(keys[:1]) == OUTER:
            return option
        section = name_of(keys[:1])
        shape = stored[name_of(keys)]
        there = meta.get("layers", {}).get(section, shape[0])
        here = layers.get(section, x.shape[0])
        if there != here:
            raise ValueError(f"{name_of(keys)}: expected {here} layers, got {there}")
        return dataclasses.replace(option, strict=shape[0] == x.shape[0] or shape[1:] != x.shape[1:])

    options = ocp.checkpoint_utils.construct_restore_args(plan)
    return jax.tree_util.tree_map_with_path(one, plan, options)


def _stored_shapes(item: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of an item's arrays by name."""
    with _reader() as reader:
        metadata: Any = reader.metadata(item)
    if metadata.item_metadata is None:
        raise ValueError(f"{item.name}: the names and shapes of its arrays are missing or damaged")
    leaves = jax.tree_util.tree_leaves_with_path(metadata.item_metadata.tree)
    return {name_of(keys): tuple(x.shape) for keys, x in leaves if hasattr(x, "shape")}


def _history(path: Path, plan: TrainState):
    """Reads a checkpoint's history of largest magnitudes, truncated or padded with zeros to the planned length.

    It is all zeros if the checkpoint has no history, and None if the plan has none.
    """
    if plan.history is None:
        return None
    amax = np.zeros(plan.history.shape, plan.history.dtype)
    if (path / "history").is_dir():
        with _reader() as reader:
            options = {"amax": ocp.RestoreArgs(restore_type=np.ndarray)}  # its length may differ from the plan's
            saved = reader.restore(path / "history", args=ocp.args.PyTreeRestore(restore_args=options))["amax"]
        n = min(amax.shape[-1], saved.shape[-1])
        amax[..., :n] = saved[..., :n]
    return from_host(amax, plan.history.sharding)


def _stored_moments(path: Path, moments, meta: dict[str, Any]):
    """Returns the plan of the moments, but with the stored shapes of 8-bit blocks' scales if these differ.

    Raises CheckpointError if another optimizer wrote the state, or if such scales are planned in a file.
    """
    stored = _stored_shapes(path / "moments")
    planned = {name_of(keys): tuple(x.shape) for keys, x in jax.tree_util.tree_leaves_with_path(moments)}
    if stored.keys() != planned.keys():
        name = sorted(stored.keys() ^ planned.keys())[0]
        whose = "this run" if name in planned else "the checkpoint"
        raise CheckpointError(
            f"checkpoint {path}: expected the state of the same optimizer, got that of another one (only {whose} has "
            f"{name}); set optimizer to the one it was written with, use {written_by(meta)} if it is that one, or "
            "start anew in another output_dir"
        )

    def as_stored(keys, x):
        name = name_of(keys)
        length = 0 if name_of(keys[:1]) == OUTER else 1  # of a stack, which may be padded
        if not name.endswith("_scale") or stored[name][length:] == x.shape[length:]:
            return x
        if home_of(x).in_file:
            raise CheckpointError(
                f"checkpoint {path}: expected {name} of shape {x.shape}, for the 8-bit blocks of shards of rows on "
                f"this number of GPUs, got {stored[name]}; use the sizes of the mesh as it was written with, or set "
                "offload_optimizer=True"
            )
        rows = x.sharding.update(spec=jax.P(*x.sharding.spec[: len(x.shape) - 1]))  # no shard has a part of a row
        return jax.ShapeDtypeStruct((*x.shape[:length], *stored[name][length:]), x.dtype, sharding=rows)

    return jax.tree_util.tree_map_with_path(as_stored, moments)


def _reblocked(moments, planned):
    """Requantises 8-bit moments to the planned block sizes."""

    def is_state(x) -> bool:
        return isinstance(x, Moments8bit)

    def one(old, plan):
        if not is_state(old) or old.m_scale.shape == plan.m_scale.shape:
            return old
        blocks = plan.m_scale.shape[-1]
        new = jax.jit(lambda old: cast_to_plan(reblocked(put(old, DEVICE), blocks), plan))(old)
        return jax.device_put(new, shardings(plan))

    return jax.tree.map(one, moments, planned, is_leaf=is_state)


def _verify(meta: dict[str, Any], **trees) -> None:
    """Raises ValueError if the checksum of an array is not the saved one, or if a number is NaN or infinite.

    An array that was cast to another dtype has no saved checksum, so it is not compared.
    """
    sums, not_finite = checksums(**trees)
    saved = meta["checksums"]
    if bad := [name for name, value in sums.items() if saved.get(name, value) != value]:
        others = f" and {len(bad) - 1} more are" if len(bad) > 1 else " is"
        raise ValueError(f"{bad[0]}{others} damaged: not the checksum it was written with")
    if not_finite:
        raise ValueError(f"{not_finite[0]} holds NaN or infinity")
