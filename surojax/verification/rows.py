"""Verifies the rows of the table: trains each row and its reference, and compares losses and gradient norms."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from surojax.config import Config, checks
from surojax.config.changes import changed
from surojax.errors import ConfigError
from surojax.exchange.sources import resolved
from surojax.memory.layer_file import folders
from surojax.placement.mesh import find_devices
from surojax.resources import cores
from surojax.step.spec import EXACT, OVERLAP
from surojax.verification.bounds import Bound, Curve, expected_bounds, judge
from surojax.verification.row_batches import make_batches
from surojax.verification.settings import OWN, SEQUENCE_LEN, SIZES, Setting, chosen_rows, rows_of_config
from surojax.verification.training import Built, FirstStates, Started, build_row

MOST_STEPS = 10_000  # all batches are in memory
MOST_COMPILERS = 8  # more than tracing, which is one thread's, keeps busy


class VerifiedSetting(NamedTuple):
    """The result of verifying a row."""

    setting: Setting
    status: str  # "pass", "FAIL" or "skipped"
    loss: float | None  # largest relative difference over the steps; None if skipped
    grad_norm: float | None  # as `loss`, over the steps that the bound compares
    bound: Bound
    why: str  # reason if it failed or was skipped, else ""
    seconds: float  # since the row before; other rows compile meanwhile


class Curves:
    """Losses and gradient norms of rows, each row trained once, on equal batches."""

    def __init__(self, config: Config, steps: int, devices: Sequence | None, on_gpu: dict[str, Any] | None = None):
        """steps: of the training of each row. devices: None for all devices of JAX. on_gpu: see `compiled_step`.

        Raises ConfigError, as `verify`.
        """
        if not 1 <= steps <= MOST_STEPS:
            raise ConfigError(f"--steps: expected 1 to {MOST_STEPS:,}, got {steps}; correct it")
        self.config = resolved(config)
        checks.check(self.config)
        self.devices = find_devices(0) if devices is None else devices
        for folder in folders(config.nvme_path) if config.nvme_path else ():
            if not folder.is_dir():
                raise ConfigError(f"nvme_path: expected a folder, got {str(folder)!r}; create it, or choose another")
        self.table = {s.name: s for s in rows_of_config(self.config, len(self.devices))}
        self.batches, self.microbatches = make_batches(self.config, len(self.devices), steps)
        self.first = FirstStates()
        self.on_gpu = on_gpu
        # A program compiles mostly on one core, so on CPUs the next rows compile meanwhile. On GPUs, where compiling
        # measures kernels, nothing else runs.
        compilers = min(cores(), MOST_COMPILERS) if self.devices[0].platform == "cpu" else 1
        self._compiler = ThreadPoolExecutor(compilers, "verify-compile")
        self._ahead = compilers if compilers > 1 else 0  # rows
        self._planned: deque[Setting] = deque()
        self._started: dict[str, Started | ConfigError] = {}
        self._found: dict[str, Curve | ConfigError] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        """Waits for programs that compile, and removes the files of rows that were not trained."""
        self._compiler.shutdown(cancel_futures=True)
        for started in self._started.values():
            if not isinstance(started, ConfigError):
                started.close()

    def microbatches_of(self, s: Setting) -> int:
        """Returns the number of microbatches of a row's step."""
        return self.microbatches * s.split

    def built(self, s: Setting) -> contextlib.AbstractContextManager[Built]:
        """Returns the context manager `training.build_row` of a row."""
        return build_row(self.config, s, self.batches, self.microbatches_of(s), self.devices)

    def keep(self, s: Setting, curve: Curve) -> None:
        """Stores the curve of a row that was trained elsewhere."""
        self._found[s.name] = curve

    def plan(self, rows: Sequence[Setting]) -> None:
        """Announces the order in which rows' curves, each with its reference's, will be requested."""
        self._planned.extend(x for s in rows for x in (s, self.table[s.like]))

    def _start(self, s: Setting) -> None:
        """Lowers a row and begins to compile it, unless that was done."""
        if s.name in self._started or s.name in self._found:
            return
        try:
            microbatches = self.microbatches_of(s)
            started = Started(self.config, s, self.batches, microbatches, self.devices, self._compiler, self.on_gpu)
        except ConfigError as error:
            started = error
        self._started[s.name] = started

    def of(self, s: Setting) -> Curve:
        """Returns the curve of a row. Raises ConfigError, in every call, if the row cannot run."""
        if s.name not in self._found:
            self._start(s)
            while self._planned and len(self._started) <= self._ahead:
                self._start(self._planned.popleft())
            started = self._started.pop(s.name)
            self._found[s.name] = started if isinstance(started, ConfigError) else started.trained(self.first)
        curve = self._found[s.name]
        if isinstance(curve, ConfigError):
            raise curve
        return curve

    def of_plain(self) -> Curve:
        """Returns the curve of the first row. Raises ConfigError if the model does not fit on one device."""
        try:
            return self.of(self.table["plain"])
        except ConfigError as error:
            raise ConfigError(f"{error}; or verify a smaller model: --config.model.num_hidden_layers=2") from error


def refused_sizes(
    config: Config, *, steps: int = 1, only: Sequence[str] | None = None, devices: Sequence | None = None
) -> dict[str, str]:
    """Returns {row that the config's sizes do not allow, but `SIZES` do: reason}, before anything is compiled.

    steps, only, devices: as for `verify`. Raises ConfigError, as it does.
    """
    curves = Curves(config, steps, devices)
    sized = checks.restored_config(curves.config.to_dict())
    sized.model.update(SIZES)
    sized.sequence_len = SEQUENCE_LEN
    in_sizes = Curves(sized, 1, devices)

    def refusal(curves: Curves, s: Setting) -> str:
        try:
            with curves.built(s):
                return ""
        except ConfigError as error:
            return str(error)

    rows = [s for s in chosen_rows(curves.table, only) if s.name != OWN]
    refused = {s.name: refusal(curves, s) for s in rows}
    return {s.name: refused[s.name] for s in rows if refused[s.name] and not refusal(in_sizes, s)}


def to_the_bit(config: Config, devices: Sequence) -> Config:
    """Returns the config with which rows can be equal to the bit: on a GPU with xla_options "exact" for "overlap".

    With "overlap" XLA takes other kernels for the same product in other programs.
    """
    exact = devices[0].platform == "gpu" and config.xla_options == OVERLAP
    return changed(config, {"xla_options": EXACT}) if exact else config


def verify(
    config: Config,
    *,
    steps: int = 5,
    only: Sequence[str] | None = None,
    devices: Sequence | None = None,
    report: Callable[[VerifiedSetting], None] = lambda row: None,
) -> list[VerifiedSetting]:
    """Trains under each setting in turn and returns the rows.

    steps: optimizer steps of each row.
    only: names of rows, or patterns such as `offload_*`; None: all rows.
    devices: the devices to use; None: all devices of JAX. A row that needs more devices is skipped, and so is a row
      that the config does not allow.
    report: called with each row as soon as it is done.

    Raises ConfigError for settings that `train` would refuse, an unknown name, a missing nvme_path, or a plain run that
    does not fit on one device. Raises OSError if a disk fails.
    """
    rows = []
    devices = find_devices(0) if devices is None else devices
    with Curves(to_the_bit(config, devices), steps, devices) as curves:
        settings_of_rows = chosen_rows(curves.table, only)
        if any(s.like == "plain" and s.devices <= len(curves.devices) for s in settings_of_rows):
            curves.of_plain()  # first, as it may not fit
        curves.plan(settings_of_rows)
        for s in settings_of_rows:
            rows.append(judge_row(curves, s))
            report(rows[-1])
    return rows


def judge_row(curves: Curves, s: Setting) -> VerifiedSetting:
    """Trains a row and its reference, unless already trained, and compares them; a row that cannot run is skipped.

    Raises ConfigError if the config's own row cannot run.
    """
    started = time.perf_counter()
    bound = expected_bounds(curves.config)[s.expect]
    try:
        status, loss, grad_norm, why = judge(curves.of(s), curves.of(curves.table[s.like]), bound)
    except ConfigError as error:
        if s.name == OWN and s.devices <= len(curves.devices):
            raise
        status, loss, grad_norm, why = "skipped", None, None, str(error)
    return VerifiedSetting(s, status, loss, grad_norm, bound, why, time.perf_counter() - started)
