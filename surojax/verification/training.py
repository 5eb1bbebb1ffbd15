"""Trains a config's model under a row's settings, on batches that all rows share."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import jax

from surojax.assembly.assemble import Assembly
from surojax.assembly.from_config import from_config
from surojax.assembly.xla_options import compiler_options
from surojax.config import Config, checks, default_config, fields as configs
from surojax.errors import ConfigError
from surojax.memory import nvme
from surojax.memory.layer_file import folders
from surojax.objectives import objectives
from surojax.objectives.objective import REFERENCE
from surojax.placement.layout import batch_sharding
from surojax.placement.mesh import make_mesh
from surojax.placement.table import Mesh
from surojax.planner.check_fit import check_fit
from surojax.step.state import TrainState
from surojax.verification.bounds import Curve
from surojax.verification.row_batches import Batch
from surojax.verification.settings import RESET, Setting


class Built(NamedTuple):
    """A row that is ready to be traced.

    shape: of a batch, (microbatches, sequences of a microbatch, sequence length).
    """

    run: Assembly
    mesh: Mesh
    shape: tuple[int, int, int]
    devices: Sequence
    seed: int


def config_of_row(c: Config, s: Setting, steps: int, sequences: int, microbatches: int) -> Config:
    """Returns the config of a row. Raises ConfigError if its fields contradict each other.

    A reference's numbers are in the batch, unless the row says otherwise: not all rows can compute them in a step.
    """
    new = checks.restored_config(c.to_dict())
    defaults = default_config()
    new.update({name: defaults[name] for name in RESET})
    new.update({"lr_scheduler_type": "cosine", "warmup_steps": 0, "warmup_ratio": 0.0, "cooldown_steps": 0})
    new.update({"max_steps": steps, "num_epochs": 1, "gpus": s.devices})
    new.gradient_accumulation_steps = microbatches
    new.precompute_ref_log_probs = REFERENCE in objectives.build_objective(configs.flat(new)).targets
    new.update_from_flattened_dict(s.changes)
    new.per_device_batch_size = sequences * configs.gpus_per_sequence(new) // (microbatches * s.devices)
    checks.check(new)
    return new


@contextlib.contextmanager
def build_row(c: Config, s: Setting, batches: list[Batch], microbatches: int, devices: Sequence) -> Iterator[Built]:
    """Yields a row that is ready to be traced; files of the row exist until the end of the context.

    Raises ConfigError if the row cannot run here.
    """
    if s.devices > len(devices):
        raise ConfigError(f"needs {s.devices} devices, there {'is' if len(devices) == 1 else 'are'} {len(devices)}")
    sequences = len(batches[0]["inputs"])
    devices = devices[: s.devices]
    with contextlib.ExitStack() as until_end:
        if "nvme" in s.changes.values():  # in a folder of its own: another run may be using nvme_path
            inside = folders(c.nvme_path)[0] if c.nvme_path else None
            folder = until_end.enter_context(tempfile.TemporaryDirectory(prefix="verify", dir=inside))
            s = s._replace(changes=s.changes | {"nvme_path": folder})
        c = config_of_row(c, s, len(batches), sequences, microbatches)
        mesh = make_mesh(devices, **configs.mesh_sizes(c))
        run = from_config(c, mesh, total_steps=len(batches))
        check_fit(c, run, devices)
        until_end.enter_context(nvme.claim(run.store))
        yield Built(run, mesh, (microbatches, sequences // microbatches, c.sequence_len), devices, c.seed)


def lowered(row: Built):
    """Traces and lowers a row's step."""
    planned = row.run.engine.planned_batch(row.shape, batch_sharding(row.mesh))
    return row.run.train_step().lower(row.run.plan, *planned)


def on_devices(row: Built, batch: Batch) -> list[jax.Array]:
    """Puts the arrays of a batch that a row's step reads on its devices, in the step's order."""
    microbatches, sequences, _ = row.shape
    arrays = [batch[name] for name in row.run.engine.batch_arrays]
    each = [x.reshape(microbatches, sequences, *x.shape[1:]) for x in arrays]
    return jax.block_until_ready(jax.device_put(each, batch_sharding(row.mesh)))


def compiled_step(row: Built, step, on_gpu: dict[str, Any] | None = None):
    """Compiles a row's lowered step. on_gpu: options of XLA on a GPU, besides the run's."""
    platform = row.devices[0].platform
    options = compiler_options(row.run, platform)
    return step.compile(options | (on_gpu or {}) if platform == "gpu" else options)


def training_curve(row: Built, step, state: TrainState, batches: list[Batch]) -> Iterator[tuple[float, float]]:
    """Trains with a compiled step; yields the loss and the gradient norm of each step. The first state is consumed."""
    for batch in batches:
        # One step at a time: programs with collectives in flight can block each other on virtual CPU devices.
        state, metrics = jax.block_until_ready(step(state, *on_devices(row, batch)))
        yield float(metrics["loss"]), float(metrics["grad_norm"])


class FirstStates:
    """First states of rows: drawn once, and copied for rows with the same arrays in any memory or sharding.

    Drawing takes as long to compile as a step. tests/test_bits.py has that a placement draws the same numbers.
    """

    def __init__(self):
        self._drawn: dict[Any, TrainState] = {}  # in host memory, by structure, shapes and dtypes

    def of(self, row: Built) -> TrainState:
        """Returns the first state of a row. A state of which some is in files is drawn for itself."""
        if not row.run.store.is_empty:
            return row.run.init_state(row.seed)
        arrays, structure = jax.tree.flatten(row.run.plan)
        key = (row.seed, structure, *((x.shape, x.dtype) for x in arrays))
        if key not in self._drawn:
            self._drawn[key] = jax.device_get(row.run.init_state(row.seed))
        shardings = jax.tree.map(lambda x: x.sharding, row.run.plan)
        return jax.device_put(self._drawn[key], shardings, may_alias=False)


class Started:
    """A row whose step is lowered, and compiles in a thread of `compiler`.

    Raises ConfigError if the row cannot run here. Its files are there until `trained` returns, or `close` is called.
    """

    def __init__(
        self,
        c: Config,
        s: Setting,
        batches: list[Batch],
        microbatches: int,
        devices: Sequence,
        compiler: Executor,
        on_gpu: dict[str, Any] | None = None,
    ):
        """on_gpu: see `compiled_step`."""
        self.batches = batches
        with contextlib.ExitStack() as until_end:
            self.row = until_end.enter_context(build_row(c, s, batches, microbatches, devices))
            self.step = compiler.submit(compiled_step, self.row, lowered(self.row), on_gpu)
            self.close = until_end.pop_all().close

    def trained(self, first: FirstStates) -> Curve:
        """Trains the row and returns its losses and gradient norms."""
        try:
            return list(training_curve(self.row, self.step.result(), first.of(self.row), self.batches))
        finally:
            self.close()
