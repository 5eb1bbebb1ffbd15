"""Models out: a folder that transformers loads, with safetensors files, config.json and the model's small files.

Tensors are read, cast and written one at a time. The folder is made under another name beside the one that was asked
for and renamed at the end, so a run that is killed leaves nothing that looks like a model.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from surojax.errors import ConfigError
from surojax.exchange import experts, shards, small_files
from surojax.exchange.finite import is_finite
from surojax.exchange.model_tensors import INDEX, SINGLE, Tensors, shapes
from surojax.exchange.naming import Naming, naming_of
from surojax.exchange.small_files import Files
from surojax.models.model import Model
from surojax.untrusted import expanded

DTYPES: dict[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
SHARD_BYTES = 5 * 10**9


def check_dtype(dtype: str) -> None:
    """Raises ConfigError if no export has this dtype."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}; choose one")


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
    """Why nothing can be made at this path, whose folder may not exist yet; None if it can. Raises OSError."""
    nearest = next(p for p in (path.parent, *path.parent.parents) if p.exists(follow_symlinks=False))
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    return None if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written"


@contextlib.contextmanager
def unfinished_beside(path: Path, size: int) -> Iterator[Path]:
    """Gives the path of a file or folder to write, which gets the name `path` at the end, and none after an error.

    size: bytes that will be written. Raises ConfigError if there is no room, or for OSError. Folders made for it do not
    stay then.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    new_parents = [parent for parent in path.parents if not parent.exists()]  # innermost first
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_room(path, size)
        try:
            yield unfinished
            unfinished.replace(path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"export: cannot write {path} ({error.strerror or error}); choose another folder") from error
    finally:
        if not path.exists():
            with contextlib.suppress(OSError):  # someone else put something into it
                for parent in new_parents:
                    parent.rmdir()


def export(
    tensors: Tensors,
    model: Model,
    config: dict,
    files: Files,
    folder: str | Path,
    *,
    dtype: str = "bfloat16",
    experts_together: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes a model's folder, and returns its path.

    tensors: of which those of `model` are written, in `dtype`. config: the content of config.json, which says the dtype
    as well (`config_json`). experts_together: one tensor has all experts of a layer, see experts.py. files: what else
    the folder has. shard_bytes: largest size of a safetensors file, unless one tensor is larger.

    Raises ConfigError if the folder is not empty, cannot be written or has no room, or if a number is beyond the dtype;
    what reading the tensors raises. Neither the folder nor parents made for it exist then.
    """
    check_dtype(dtype)
    path = check_folder(folder)
    pieces = _pieces(model, naming_of(config), together=experts_together)
    expected = {name: piece.shape for name, piece in pieces.items()}
    parts = _parts(expected, DTYPES[dtype].itemsize, shard_bytes)
    with unfinished_beside(path, sum(_bytes(shape, DTYPES[dtype]) for shape in expected.values())) as unfinished:
        unfinished.mkdir()
        for file, of_part in parts.items():
            part = {name: expected[name] for name in of_part}
            arrays = _cast(tensors, [pieces[name] for name in of_part], dtype)
            shards.write_shard(unfinished / file, part, DTYPES[dtype], arrays)
        if len(parts) > 1:
            (unfinished / INDEX).write_text(_index(parts, expected, DTYPES[dtype]))
        small_files.write_small_files(unfinished, files | {small_files.CONFIG: encoded(config)})
    return path


def encoded(content: dict) -> bytes:
    """A small JSON file."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _check_room(path: Path, need: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if need > free:
        raise ConfigError(
            f"export: expected {need / 2**20:,.1f} MiB free for {path}, got {free / 2**20:,.1f} MiB; free some, or "
            "choose another folder"
        )


def _parts(expected: dict[str, tuple[int, ...]], itemsize: int, shard_bytes: int) -> dict[str, list[str]]:
    """The names of the tensors in each file, in order; a file is full before the next one begins."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, shape in expected.items():
        more = math.prod(shape) * itemsize
        if parts[-1] and size + more > shard_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += more
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{i:05}-of-{len(parts):05}.safetensors": names for i, names in enumerate(parts, start=1)}


def _index(parts: dict[str, list[str]], expected: dict[str, tuple[int, ...]], dtype: np.dtype) -> str:
    """The index that says which file has a tensor."""
    total = {
        "total_size": sum(_bytes(shape, dtype) for shape in expected.values()),
        "total_parameters": sum(math.prod(shape) for shape in expected.values()),
    }
    weight_map = {name: file for file, names in parts.items() for name in names}
    return json.dumps({"metadata": total, "weight_map": weight_map}, indent=2) + "\n"


class _Piece(NamedTuple):
    """The source of a tensor in files: our tensors, joined along their second dimension; expert: one expert's part."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    expert: int | None = None


def _pieces(model: Model, naming: Naming, *, together: bool) -> dict[str, _Piece]:
    """{name in a model's files: the source of the tensor}."""
    ours = shapes(model)
    if together:
        return {naming.in_files(name): _Piece(names, shape) for name, (names, shape) in experts.together(ours).items()}
    found = {}
    for name, shape in ours.items():
        if not experts.has_all_experts(name):
            found[naming.in_files(name)] = _Piece((name,), shape)
            continue
        for e in range(shape[0]):
            found[experts.of_expert(naming.in_files(name), e)] = _Piece((name,), shape[1:], e)
    return found


def _cast(tensors: Tensors, pieces: list[_Piece], dtype: str) -> Iterator[np.ndarray]:
    """The tensors in this dtype, one after another. Raises ConfigError if a number is too large for it."""
    names, read = (), []
    for piece in pieces:
        name = piece.names[0]
        if names != piece.names:  # all experts of a tensor are read at once, and follow each other
            names, read = piece.names, [tensors.read(name) for name in piece.names]
        tensor = np.concatenate(read, axis=1) if len(read) > 1 else read[0]
        tensor = tensor if piece.expert is None else tensor[piece.expert]
        if tensor.dtype != DTYPES[dtype]:
            with np.errstate(over="ignore"):  # reported below
                tensor = tensor.astype(DTYPES[dtype])
        if not is_finite(tensor):
            raise ConfigError(
                f"--dtype: expected numbers within {dtype}, got larger ones in {name}, or NaN; "
                + ("use float32" if dtype != "float32" else "train again: what is exported is not finite")
            )
        yield tensor
