"""Checkpoints: orbax, written in the background, atomic, restorable onto any mesh.

A checkpoint is the folder `<output_dir>/checkpoints/<step>` with the items `master` (weights), `moments` (optimizer
state) and `meta` (JSON: step, data position, config). Orbax writes into a temporary folder and renames it when all is
on disk, so a killed run leaves either a whole checkpoint or none. Work weights are `master` cast, so they are not
written; random numbers are derived from the seed in the config and the positions in `meta`.

Shapes, not placements, are stored: the plan given to `restore` says which device gets which part.
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from surojax.errors import CheckpointError
from surojax.state import TrainState, shardings, work_weights

FOLDER = "checkpoints"
logging.getLogger("absl").setLevel(logging.ERROR)  # orbax warns about choices that are ours to make


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
    """What a checkpoint says of itself. Raises CheckpointError when it cannot be read."""
    with _readable(path):
        return json.loads((path / "meta" / "metadata").read_text())


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
    """The checkpoints of one run; a context manager that waits for the last write."""

    def __init__(self, output_dir: Path, *, save_total_limit: int):
        self.folder = output_dir / FOLDER
        options = ocp.CheckpointManagerOptions(max_to_keep=save_total_limit, cleanup_tmp_directories=True)
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            self.wait()
        self.manager.close()

    @property
    def last(self) -> Path | None:
        """The newest finished checkpoint."""
        return find(self.folder)

    def save(self, state: TrainState, meta: dict[str, Any]) -> None:
        """Copy the state off the devices and start writing; an earlier write is waited for.

        Raises CheckpointError, leaving every earlier checkpoint as it was, when there is no room or a write failed.
        """
        self.wait()
        need, free = bytes_on_disk(state), shutil.disk_usage(self.folder).free
        if need > free:
            raise CheckpointError(
                f"no room for the checkpoint of step {meta['step']} in {self.folder}: it needs {need / 2**30:.3f} GiB, "
                f"{free / 2**30:.3f} GiB are free; free some, or move output_dir; last checkpoint: {self.last}"
            )
        items = ocp.args.Composite(
            master=ocp.args.StandardSave(state.master),
            moments=ocp.args.StandardSave(state.moments),
            meta=ocp.args.JsonSave(meta),
        )
        with self._writing(meta["step"]):
            self.manager.save(meta["step"], args=items)

    def wait(self) -> None:
        """Until everything is on disk. Raises CheckpointError when a write failed."""
        with self._writing(None):
            self.manager.wait_until_finished()

    def _writing(self, step):
        what = f"the checkpoint of step {step}" if step is not None else "the last checkpoint"
        return _Translate(lambda e: f"could not write {what} in {self.folder} ({e}); last whole one: {self.last}")


def restore(path: Path, plan: TrainState) -> TrainState:
    """The state in a checkpoint, each array straight into the plan's sharding. Raises CheckpointError."""
    meta = read_meta(path)
    loaded = _load(path, {"master": plan.master, "moments": plan.moments})

    def build(step, master, moments):
        return TrainState(step, work_weights(master, plan), master, moments)

    # Through jit, so that the arrays are XLA's own: on CPU restored ones can alias memory of the reader.
    assemble = jax.jit(build, out_shardings=shardings(plan))
    return assemble(jnp.int32(meta["step"]), loaded["master"], loaded["moments"])


def restore_weights(path: Path, plan: dict) -> dict:
    """Only the weights in a checkpoint, in the dtype and sharding of `plan`. Raises CheckpointError."""
    return _load(path, {"master": plan})["master"]


def _load(path: Path, items: dict) -> dict:
    with _readable(path), ocp.StandardCheckpointer() as reader:
        return {name: reader.restore(path / name, plan) for name, plan in items.items()}


def bytes_on_disk(state: TrainState) -> int:
    """Bytes of the arrays that a checkpoint holds, before compression."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.master, state.moments)))


class _Translate:
    """Turn whatever the file libraries raise into one CheckpointError."""

    def __init__(self, message):
        self.message = message

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, Exception) and not isinstance(error, CheckpointError):
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise CheckpointError(self.message(reason[:300])) from error


def _readable(path: Path) -> _Translate:
    others = ", ".join(str(p) for p in steps_in(path.parent) if p != path) or "none"
    return _Translate(
        lambda e: (
            f"checkpoint {path} cannot be read ({e}); resume from another (there are: {others}) with "
            "resume_from_checkpoint=PATH, or delete it"
        )
    )
