"""Checks what can be checked before data is read: settings, devices, memory, initial weights and checkpoints."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from surojax.assembly.from_config import NOTHING, Brought, from_config
from surojax.config import checks, fields as configs
from surojax.config.fields import Config
from surojax.data import run_data as data
from surojax.data.given import NAME, GivenRows
from surojax.errors import ConfigError
from surojax.exchange.model_tensors import Tensors
from surojax.exchange.sources import open_weights
from surojax.memory import nvme
from surojax.models.model import Model
from surojax.placement.mesh import find_devices, make_mesh
from surojax.planner.check_fit import check_fit
from surojax.run import checkpoint, on_disk
from surojax.run.shared import is_first
from surojax.run.trackers import check_packages
from surojax.training.resume import check_unfinished


class Setup(NamedTuple):
    """The result of `set_up`: a run's devices, mesh, model and sources, known before its data is read.

    need: bytes per device of each class. newest: checkpoint in output_dir. continues: whether the run continues from a
    checkpoint. initial: weights to start from, or, with adapters, the base; None: new ones, or those of a checkpoint.
    brought: of the caller. in_files: the progress of the run whose state nvme_path has complete, if it is laid out as
    this run's.
    """

    output_dir: Path
    devices: list
    mesh: jax.sharding.Mesh
    model: Model
    need: dict[str, int]
    entries: data.Entries
    newest: Path | None
    continues: bool
    initial: Tensors | None
    brought: Brought
    in_files: dict[str, Any] | None


def naming_rows(c: Config, rows: Iterable[Any] | None) -> Config:
    """Adds an entry of `datasets` for a caller's rows to a config. Raises ConfigError if the config has other data."""
    if rows is None:
        return c
    if other := [name for name in ("data", "datasets") if c[name]]:
        raise ConfigError(f"{other[0]}: expected none in the config beside rows given, got some; leave one of them out")
    completed = copy.deepcopy(c)
    completed.datasets = [{"path": NAME}]
    return completed


def set_up(c: Config, brought: Brought = NOTHING, rows: Iterable[Any] | None = None) -> Setup:
    """Checks everything that can be checked without data, and writes nothing. Raises ConfigError and CheckpointError.

    brought: of the caller, in place of what the config says. rows: of `naming_rows`.
    """
    checks.check(c)
    output_dir = checks.check_output_dir(c.output_dir)
    devices = find_devices(c.gpus)
    if is_first():
        check_packages(c.report_to)
    mesh = make_mesh(devices, **configs.mesh_sizes(c))
    run = from_config(c, mesh, total_steps=1, brought=brought)
    need = check_fit(c, run, devices)
    nvme.check_folders(run.store)
    entries = data.parse_entries(c.datasets, c.validation_datasets)
    if rows is not None:
        entries = entries._replace(rows=GivenRows(rows))
    check_unfinished(run.store, output_dir)
    newest = on_disk.find(output_dir / on_disk.FOLDER)
    continues = newest is not None or c.resume_from_checkpoint not in ("auto", "no")
    initial = None if continues and not c.lora else open_weights(c, run.model)
    checkpoint.check_room(output_dir, run.plan)
    in_files = run.store.kept_progress()
    return Setup(output_dir, devices, mesh, run.model, need, entries, newest, continues, initial, brought, in_files)
