"""Exports a model to a folder that transformers loads: safetensors files, config.json and the model's small files.

Tensors are read, cast and written one at a time. The folder is made in a hidden one beside the path that was asked for,
and moved there at the end, so a run that is killed leaves nothing that looks like a model; the next export to that path
deletes what it left.
"""

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np

from surojax.errors import ConfigError, nearest_name
from surojax.exchange import compressed, expert_tensors, shards, small_files, stored_mxfp4
from surojax.exchange.beside import Beside
from surojax.exchange.finite import is_finite
from surojax.exchange.joined_rows import joined, part_of_rows, shape_of_all
from surojax.exchange.model_tensors import INDEX, SINGLE, Tensors, Weights, shapes, tensor_name
from surojax.exchange.naming import Naming, naming_of
from surojax.exchange.shards import StoredTensor
from surojax.exchange.small_files import Files
from surojax.families.family import LAYER, SHARED_EXPERT_TENSOR_NAMES, ExpertFiles
from surojax.models.kinds.gated_delta import GatedDelta
from surojax.models.kinds.mamba2 import Mamba2
from surojax.models.model import Model
from surojax.numerics import base_formats
from surojax.untrusted import expanded

DTYPES: dict[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
# Ends of names of tensors that are float32 in files of any dtype: the bias of a router's choice, decays and D.
IN_FLOAT32 = (
    SHARED_EXPERT_TENSOR_NAMES["mlp.b_choice"].removeprefix(LAYER),
    *(GatedDelta.tensors[name].safetensors for name in ("A_log", "dt_bias")),
    *(Mamba2.tensors[name].safetensors for name in ("A_log", "dt_bias", "D")),
)
SHARD_BYTES = 5 * 10**9
UNFINISHED = "unfinished"  # end of the name of the hidden folder that is written


def check_dtype(dtype: str) -> None:
    """Raises ConfigError if exports do not support this dtype."""
    known = [*DTYPES, *compressed.FORMATS]
    if dtype not in known:
        raise ConfigError(
            f"--dtype: expected one of {', '.join(known)}, got {dtype!r}; {nearest_name(dtype, known, 'choose one')}"
        )


def check_folder(folder: str | Path) -> Path:
    """Returns the absolute path of a folder to export to, links to folders resolved. Writes nothing.

    Raises ConfigError if it exists and is not empty, or cannot be made.
    """
    path = expanded(folder).absolute()
    change = "choose another folder"
    try:
        path = path.resolve() if path.is_dir() else path  # a link cannot be replaced by a folder
        if path.is_dir() and any(path.iterdir()):
            raise ConfigError(f"export: expected a folder that is new or empty, got {str(folder)!r}; {change}")
        is_file = path.exists(follow_symlinks=False) and not path.is_dir()
        problem = "it is a file" if is_file else problem_beside(path)
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise ConfigError(f"export: expected a folder that can be made, got {str(folder)!r} ({problem}); {change}")
    return path


def problem_beside(path: Path) -> str | None:
    """The reason why no file can be created at this path, in a folder that may not exist yet; None if one can.

    Raises OSError.
    """
    nearest = next(p for p in (path.parent, *path.parent.parents) if p.exists(follow_symlinks=False))
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    return None if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written"


@contextlib.contextmanager
def unfinished_beside(path: Path, size: int) -> Iterator[Path]:
    """Yields a temporary path to write to, renamed to `path` at the end and deleted after an error.

    size: bytes that will be written. What killed exports to `path` left is deleted first. Raises ConfigError if there
    is no room, or for OSError, and then removes the folders that it made.
    """
    new_parents = [parent for parent in path.parents if not parent.exists()]  # innermost first
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_over(path)
        _check_room(path, size)
        folder = Path(tempfile.mkdtemp(f".{UNFINISHED}", f".{path.name}.", path.parent))
        try:
            with _locked(folder):
                yield folder / path.name
                (folder / path.name).replace(path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"export: cannot write {path} ({error.strerror or error}); choose another folder") from error
    finally:
        if not path.exists():
            with contextlib.suppress(OSError):  # someone else put something into it
                for parent in new_parents:
                    parent.rmdir()


def _remove_left_over(path: Path) -> None:
    """Deletes what killed exports to this path left: hidden folders beside it that no process holds the lock of."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[a-z0-9_]+\.{UNFINISHED}")
    for left in [x for x in path.parent.iterdir() if name.fullmatch(x.name)]:
        if not left.is_dir():
            left.unlink(missing_ok=True)
            continue
        with contextlib.suppress(BlockingIOError), _locked(left):  # else another process is writing
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder, which the system releases if the process is killed. Raises BlockingIOError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def export(
    tensors: Tensors,
    model: Model,
    config: dict,
    files: Files,
    folder: str | Path,
    *,
    dtype: str = "bfloat16",
    experts_together: bool = False,
    beside: Beside | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes a model's folder, and returns its path.

    tensors: of which those of `model` are written, in `dtype`, or matrices of blocks in that of `compressed.FORMATS`.
    config: the content of config.json, which says the dtype as well (`config_json`). experts_together: one tensor has
    all experts of a layer, see expert_tensors.py. files: what else the folder has. beside: further tensors, which are
    written as they are. shard_bytes: largest size of a safetensors file, unless one tensor is larger.

    Raises ConfigError if the folder is not empty, cannot be written or has no room, if a number is beyond the dtype, or
    if the model has matrices that cannot be in it; what reading the tensors raises. Neither the folder nor parents made
    for it exist then.
    """
    check_dtype(dtype)
    path = check_folder(folder)
    naming = naming_of(config)
    pieces = _pieces(model, naming, together=experts_together)
    if dtype in compressed.FORMATS:
        if joint := next((name for name in shapes(model) if part_of_rows(name)), ""):
            raise ConfigError(
                f"--dtype: expected matrices that are tensors of their own for {dtype}, got {joint}, a part of one; "
                f"use {compressed.OTHERS}"
            )
        compressed.check_matrices(dtype, model, naming.expert_files, together=experts_together)
        pieces = _with_shared_scales(pieces, model, dtype)
    planned = {name: _planned(name, piece, dtype) for name, piece in pieces.items()}
    numbers = DTYPES.get(dtype, DTYPES[compressed.OTHERS])
    further = {} if beside is None else beside.planned(numbers)
    planned |= {name: {name: stored} for name, stored in further.items()}
    parts = _parts(planned, shard_bytes)
    with unfinished_beside(path, sum(stored.bytes for of in planned.values() for stored in of.values())) as unfinished:
        unfinished.mkdir()
        for file, names in parts.items():
            part = {name: stored for piece in names for name, stored in planned[piece].items()}
            arrays = _cast(tensors, [pieces[name] for name in names if name in pieces], naming.expert_files, dtype)
            kept = (beside.read(name, numbers) for name in names if name in further) if beside else ()
            shards.write_shard(unfinished / file, part, itertools.chain(arrays, kept))
        if len(parts) > 1:
            parameters = [stored.shape for stored in further.values()] + [piece.shape for piece in pieces.values()]
            (unfinished / INDEX).write_text(_index(parts, sum(map(math.prod, parameters)), planned))
        small_files.write_small_files(unfinished, files | {small_files.CONFIG: encoded(config)})
    return path


def in_files(tensors: Mapping[str, np.ndarray], model: Model, naming: Naming) -> dict[str, np.ndarray]:
    """Makes of a model's tensors, or their gradients, those of its files, by their names there.

    Each expert has tensors of its own, but in families whose files never have those. tensors: by our names; some may be
    missing. Those returned are contiguous: of others, safetensors' `save_file` writes the numbers in another order.
    """
    pieces = _pieces(model, naming, together=False)
    return {
        name: np.ascontiguousarray(_made(piece, [tensors[ours] for ours in piece.names], naming.expert_files))
        for name, piece in pieces.items()
        if tensors.keys() >= {*piece.names}
    }


def encoded(content: dict) -> bytes:
    """Encodes the content of a small JSON file."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _check_room(path: Path, need: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if need > free:
        raise ConfigError(
            f"export: expected {need / 2**20:,.1f} MiB free for {path}, got {free / 2**20:,.1f} MiB; free some, or "
            "choose another folder"
        )


def _parts(planned: dict[str, dict[str, StoredTensor]], shard_bytes: int) -> dict[str, list[str]]:
    """Distributes the pieces' names over files of at most `shard_bytes`, in order: {file: names}."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, stored_tensors in planned.items():
        more = sum(stored.bytes for stored in stored_tensors.values())
        if parts[-1] and size + more > shard_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += more
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{i:05}-of-{len(parts):05}.safetensors": names for i, names in enumerate(parts, start=1)}


def _index(parts: dict[str, list[str]], parameters: int, planned: dict[str, dict[str, StoredTensor]]) -> str:
    """Makes the JSON index of which file has which tensor."""
    total = {
        "total_size": sum(stored.bytes for stored_tensors in planned.values() for stored in stored_tensors.values()),
        "total_parameters": parameters,
    }
    weight_map = {name: file for file, names in parts.items() for piece in names for name in planned[piece]}
    return json.dumps({"metadata": total, "weight_map": weight_map}, indent=2) + "\n"


class _Piece(NamedTuple):
    """Our tensors that a tensor in files is made from. expert: one expert is taken; of_all: all experts are joined.

    sharing: our names of the matrices that share a scale in `compressed.FORMATS`; empty: not stored in such a format.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    expert: int | None = None
    of_all: bool = False
    sharing: tuple[str, ...] = ()


def _pieces(model: Model, naming: Naming, *, together: bool) -> dict[str, _Piece]:
    """{name in a model's files: the source of the tensor}."""
    ours = shapes(model)
    ours, pieces_of_rows = _without_parts_of_rows(ours, naming)
    if together or naming.expert_files.only:
        sources = expert_tensors.names_together(ours, naming.expert_files)
        pieces = {}
        for name, (names, shape) in sources.items():
            of_all = expert_tensors.has_all_experts(names[0])  # then it has the files' name already
            pieces[naming.placed(name) if of_all else naming.in_files(name)] = _Piece(names, shape, of_all=of_all)
        return pieces | pieces_of_rows
    pieces = {}
    for name, shape in ours.items():
        if not expert_tensors.has_all_experts(name):
            pieces[naming.in_files(name)] = _Piece((name,), shape)
            continue
        for e in range(shape[0]):
            pieces[expert_tensors.of_expert(naming.in_files(name), e)] = _Piece((name,), shape[1:], e)
    return pieces | pieces_of_rows


def _without_parts_of_rows(
    ours: dict[str, tuple[int, ...]], naming: Naming
) -> tuple[dict[str, tuple[int, ...]], dict[str, _Piece]]:
    """Splits shapes by our name into (whole tensors of files, pieces by the name of the tensor in files)."""
    parts: dict[str, list[str]] = {}
    for name in ours:
        if part := part_of_rows(name):
            parts.setdefault(part.name, []).append(name)
    pieces = {}
    for name, names in parts.items():
        in_order = sorted(names, key=_number_of_part)
        part = part_of_rows(in_order[0])
        assert part is not None
        shape = shape_of_all(part, ours[in_order[0]], len(in_order), convolution=True)
        pieces[naming.placed(name)] = _Piece(tuple(in_order), shape)
    return {name: shape for name, shape in ours.items() if part_of_rows(name) is None}, pieces


def _number_of_part(name: str) -> int:
    """The number of the part of another tensor that our name stands for; 0 for a tensor of its own."""
    part = part_of_rows(name)
    return part.part if part else 0


def _with_shared_scales(pieces: dict[str, _Piece], model: Model, dtype: str) -> dict[str, _Piece]:
    """Sets `sharing` of the blocks' matrices: the matrices with one global scale."""
    sharing: dict[str, tuple[str, ...]] = {}
    for segment in model.segments:
        for l in range(segment.num_layers):
            names = {param.name: tensor_name(param, segment, l) for param in compressed.matrices(dtype, segment)}
            groups = [[names[name] for name in group if name in names] for group in compressed.SHARING]
            alone = [[name] for key, name in names.items() if not any(key in group for group in compressed.SHARING)]
            sharing |= {name: tuple(group) for group in (*groups, *alone) for name in group}
    return {name: piece._replace(sharing=sharing.get(piece.names[0], ())) for name, piece in pieces.items()}


def _planned(name: str, piece: _Piece, dtype: str) -> dict[str, StoredTensor]:
    """Plans the tensors in files that a piece becomes."""
    if piece.sharing:
        planned = compressed.FORMATS[dtype].planned(piece.shape)
        return {name.removesuffix("weight") + part: stored for part, stored in planned.items()}
    return {name: StoredTensor(piece.shape, _stored_dtype(piece, dtype))}


def _stored_dtype(piece: _Piece, dtype: str) -> np.dtype:
    """The dtype of a tensor that is not quantised."""
    in_float32 = piece.names[0].endswith(IN_FLOAT32)
    return DTYPES["float32"] if in_float32 else DTYPES.get(dtype, DTYPES[compressed.OTHERS])


def _cast(tensors: Tensors, pieces: list[_Piece], files: ExpertFiles, dtype: str) -> Iterator[np.ndarray]:
    """Yields the pieces' tensors in this dtype. Raises ConfigError if a number is too large for the dtype."""
    largest: dict[tuple[str, ...], np.ndarray] = {}  # magnitudes in matrices that share a scale, of each expert
    names: tuple[str, ...] = ()
    read: list[np.ndarray] = []
    for piece in pieces:
        name = piece.names[0]
        if piece.sharing and piece.of_all:
            yield from _of_experts(tensors, piece, files, dtype)
            continue
        if names != piece.names:  # all experts of a tensor are read at once, and follow each other
            names, read = piece.names, [tensors.read(name) for name in piece.names]
        tensor = _made(piece, read, files)
        stored = np.dtype(np.float32) if piece.sharing else _stored_dtype(piece, dtype)
        if tensor.dtype != stored:
            with np.errstate(over="ignore"):  # reported below
                tensor = tensor.astype(stored)
        _check_finite(tensor, name, dtype)
        if not piece.sharing:
            yield tensor
            continue
        if piece.sharing not in largest:
            magnitudes = [np.abs(tensors.read(other)).max((-2, -1)) for other in piece.sharing]
            largest[piece.sharing] = np.max(magnitudes, axis=0)
        most = largest[piece.sharing][() if piece.expert is None else piece.expert]
        yield from compressed.compressed_matrix(dtype, tensor, float(most))


def _made(piece: _Piece, tensors: list[np.ndarray], files: ExpertFiles) -> np.ndarray:
    """Makes a piece from `tensors`: our tensors of `piece.names`, in that order."""
    if part := part_of_rows(piece.names[0]):
        return joined(tensors, part, piece.shape)
    tensor = expert_tensors.join_experts(tensors, files) if piece.of_all else tensors[0]
    return tensor if piece.expert is None else tensor[piece.expert]


def _of_experts(tensors: Tensors, piece: _Piece, files: ExpertFiles, dtype: str) -> Iterable[np.ndarray]:
    """Quantises a matrix of all experts to a format's tensors; copies them if the source is in the same format."""
    rows_first = files._replace(transposed=False)
    if isinstance(tensors, Weights) and all(tensors.format_of(name) == dtype for name in piece.names):
        planned = base_formats.FORMATS[dtype].planned
        parts = [tensors.read_coded(name, planned(tensors.shape(name))) for name in piece.names]
        return stored_mxfp4.file_arrays(
            jax.tree.map(lambda *arrays: expert_tensors.join_experts([*arrays], rows_first), *parts)
        )
    matrix = expert_tensors.join_experts([tensors.read(name) for name in piece.names], rows_first)
    _check_finite(matrix, piece.names[0], dtype)
    return compressed.compressed_matrix(dtype, matrix, 0.0)


def _check_finite(tensor: np.ndarray, name: str, dtype: str) -> None:
    """Raises ConfigError if a tensor, cast to the export's dtype, is not finite."""
    if not is_finite(tensor):
        raise ConfigError(
            f"--dtype: expected numbers within {dtype}, got larger ones in {name}, or NaN; "
            + ("use float32" if dtype != "float32" else "train again: what is exported is not finite")
        )
