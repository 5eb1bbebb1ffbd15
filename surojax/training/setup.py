"""What can be known before anything is read of the data: settings, devices, memory, and what there is to start from."""

from pathlib import Path
from typing import NamedTuple

import jax

from surojax.assembly import from_config
from surojax.config import checks, fields as configs
from surojax.config.fields import Config
from surojax.data import run_data as data
from surojax.exchange.model_tensors import Tensors
from surojax.exchange.sources import open_weights
from surojax.memory import nvme
from surojax.memory.in_file import store_of
from surojax.models.model import Model
from surojax.placement.mesh import find_devices, make_mesh
from surojax.planner.check_fit import check_fit
from surojax.run import checkpoint, on_disk


class Setup(NamedTuple):
    """The result of `set_up`: all that is known of a run before its data is read.

    need: bytes per device of each class. newest: checkpoint in output_dir. continues: whether the run continues from a
    checkpoint. initial: weights to start from, or, with adapters, the base; None: new ones, or those of a checkpoint.
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


def set_up(c: Config) -> Setup:
    """Checks everything that can be checked without data; writes nothing. Raises ConfigError and CheckpointError."""
    checks.check(c)
    output_dir = checks.check_output_dir(c.output_dir)
    devices = find_devices(c.gpus)
    mesh = make_mesh(devices, **configs.mesh_sizes(c))
    run = from_config(c, mesh, total_steps=1)
    need = check_fit(c, run, devices)
    nvme.check(store_of(run.plan))
    entries = data.parse_entries(c.datasets, c.validation_datasets)
    newest = on_disk.find(output_dir / on_disk.FOLDER)
    continues = newest is not None or c.resume_from_checkpoint not in ("auto", "no")
    initial = None if continues and not c.lora else open_weights(c, run.model)
    checkpoint.check_room(output_dir, run.plan)
    return Setup(output_dir, devices, mesh, run.model, need, entries, newest, continues, initial)
