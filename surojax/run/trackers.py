"""Reports a run's numbers to trackers: TensorBoard, Weights & Biases, Trackio and MLflow.

`start_trackers` opens a record with each tracker that `report_to` names. A tracker has a thread of its own, so one that
waits for its server delays no step. What it raises is said once and ends nothing: metrics.jsonl has everything.

A resumed run continues its records: their ids are in `trackers.json` in its folder. Steps that were reported after the
checkpoint are then reported again, which TensorBoard hides and the others show twice.

A class here knows a package: it is imported when the class is used, and is an extra of pyproject.toml by the same name.
"""

import contextlib
import importlib.util
import itertools
import os
import queue
import re
import shlex
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from surojax.declared import Range
from surojax.errors import ConfigError
from surojax.own_files import read_own, write_whole
from surojax.run.console import say

PROJECT = "surojax"  # where the tracker's own environment variable names no other
IDS_FILE = "trackers.json"
TENSORBOARD_DIR = "tensorboard"
TENSORBOARD_FLUSH_S = 10
FORBIDDEN = re.compile(r"[^\w\-./: ]")  # by MLflow in names of metrics, which have those of validation sets
WAITING = 10_000  # reports that wait for a tracker; of more, the newest are not reported
MOST = 100  # reports that a tracker takes at once; MLflow takes 1,000 numbers
CLOSE_S = 60.0  # the end of a run waits so long for a tracker to finish


class TrackedValues(NamedTuple):
    """Numbers of a step, such as "train/loss". time: seconds since 1970."""

    step: int
    time: float
    values: Mapping[str, float]


class Record(NamedTuple):
    """A run's description, which a tracker receives when its record begins.

    folder: of the run. first_step: steps that are done. settings: the config's fields. id: of the record that is
    continued; "": a new one.
    """

    folder: Path
    first_step: int
    settings: Mapping[str, Any]
    id: str


class Tracker(Protocol):
    """A record of a run at one tracker, begun by `__init__`. Methods may raise whatever the package raises.

    package: imported by it. id: what a resumed run continues it by, "" if it needs none. where: a line for the user.
    """

    package: ClassVar[str]
    id: str
    where: str

    def __init__(self, record: Record): ...

    def log(self, reports: Sequence[TrackedValues]) -> None: ...

    def close(self, failed: bool) -> None: ...


class TensorBoard:
    """Writes TensorBoard's event files in the run's folder, without TensorFlow."""

    package: ClassVar[str] = "tensorboardX"

    def __init__(self, record: Record):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event: Any = event_pb2
        self._summary: Any = summary_pb2
        folder = record.folder / TENSORBOARD_DIR
        folder.mkdir(parents=True, exist_ok=True)
        # File names contain the time in seconds; the suffix keeps a restart in the same second from overwriting a file.
        self._writer = EventsWriter(str(folder / "events"), filename_suffix=f".from-{record.first_step}")
        # With this event, TensorBoard hides the events of earlier runs in this folder from this step on.
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        step = record.first_step + 1 if record.first_step else 0
        self._writer.write_event(self._event.Event(wall_time=time.time(), step=step, session_log=start))
        self._flush_at = 0.0
        self.id = ""
        install = "" if importlib.util.find_spec("tensorboard") else "pip install tensorboard; "
        see = f"{install}tensorboard --logdir {shlex.quote(str(folder))}"
        self.where = f"TensorBoard events: {folder}; to see them: {see}"

    def log(self, reports: Sequence[TrackedValues]) -> None:
        for step, wall_time, values in reports:
            scalars = [self._summary.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            summary = self._summary.Summary(value=scalars)
            self._writer.write_event(self._event.Event(wall_time=wall_time, step=step, summary=summary))
        if time.monotonic() >= self._flush_at:
            self._writer.flush()
            self._flush_at = time.monotonic() + TENSORBOARD_FLUSH_S

    def close(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, whose variables WANDB_* count; its own counter of steps is not used: it only grows."""

    package: ClassVar[str] = "wandb"

    def __init__(self, record: Record):
        import wandb  # pyright: ignore[reportMissingImports]

        self.id = record.id or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or record.folder.name,
            id=self.id,
            resume="allow",
            dir=record.folder,
            config=dict(record.settings),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.where = f"Weights & Biases: {self._run.url or f'offline, run {self.id} in {record.folder / "wandb"}'}"

    def log(self, reports: Sequence[TrackedValues]) -> None:
        for report in reports:
            self._run.log({**report.values, "step": report.step})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run of Trackio, found by its name; on this machine, or where its variables TRACKIO_* say."""

    package: ClassVar[str] = "trackio"

    def __init__(self, record: Record):
        import trackio  # pyright: ignore[reportMissingImports]

        self.id = record.id or f"{record.folder.name}-{uuid.uuid4().hex[:6]}"
        self._run = trackio.init(project=PROJECT, name=self.id, resume="allow", config=dict(record.settings))
        self.where = f"Trackio: run {self.id}; to see it: trackio show --project {PROJECT}"

    def log(self, reports: Sequence[TrackedValues]) -> None:
        for report in reports:
            self._run.log(dict(report.values), step=report.step)

    def close(self, failed: bool) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow at MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME."""

    package: ClassVar[str] = "mlflow"

    def __init__(self, record: Record):
        import mlflow  # pyright: ignore[reportMissingImports]

        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient()
        if record.id:
            self.id = record.id
            self._client.update_run(self.id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            experiment = self._client.get_experiment_by_name(name)
            id_ = experiment.experiment_id if experiment else self._client.create_experiment(name)
            self.id = self._client.create_run(id_, run_name=record.folder.name).info.run_id
            params = (self._entities.Param(key, str(value)) for key, value in record.settings.items())
            for some in itertools.batched(params, 100):
                self._client.log_batch(self.id, params=some)
        self.where = f"MLflow: run {self.id} at {mlflow.get_tracking_uri()}"

    def log(self, reports: Sequence[TrackedValues]) -> None:
        metrics = [
            self._entities.Metric(FORBIDDEN.sub("_", key), value, int(1e3 * report.time), report.step)
            for report in reports
            for key, value in report.values.items()
        ]
        self._client.log_batch(self.id, metrics=metrics)

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    "mlflow": MLflow,
}


def names(report_to: str) -> list[str]:
    """Splits the field `report_to` into names of trackers."""
    return [name.strip() for name in report_to.split(",") if name.strip()]


_NAME = rf"\s*(?:{'|'.join(TRACKERS)})\s*"
KNOWN = Range(
    f"a comma list of {', '.join(TRACKERS)}",
    'correct it, or use "" for none',
    pattern=rf"(?!.*\b(\w+)\b.*\b\1\b)(?:{_NAME}(?:,{_NAME})*)?",  # none of them twice
)


def check_packages(report_to: str) -> None:
    """Imports the trackers' packages. Raises ConfigError for a package that is not installed."""
    for name in names(report_to):
        try:
            importlib.import_module(TRACKERS[name].package)
        except ImportError as error:
            raise ConfigError(
                f"report_to: expected the package {TRACKERS[name].package}, got none that can be imported ({error}); "
                f"pip install 'surojax[{name}]'"
            ) from error


class Sender:
    """Sends reports to a tracker from another thread, and prints once if that fails. name: of the tracker."""

    def __init__(self, name: str, tracker: Tracker):
        self._name = name
        self._tracker = tracker
        self._reports: queue.Queue[TrackedValues | None] = queue.Queue(WAITING)
        self._has_warned = False
        self._failed = False
        self._thread = threading.Thread(target=self._send, name=f"surojax-{name}", daemon=True)
        self._thread.start()

    def log(self, report: TrackedValues) -> None:
        """Queues a report for the thread."""
        try:
            self._reports.put_nowait(report)
        except queue.Full:
            self._warn(f"more than {WAITING:,} reports wait for it")

    def close(self, failed: bool) -> None:
        """Waits until the tracker has all reports and is closed, CLOSE_S at most.

        failed: the run ended with an error.
        """
        self._failed = failed
        until = time.monotonic() + CLOSE_S
        with contextlib.suppress(queue.Full):
            self._reports.put(None, timeout=CLOSE_S)
            self._thread.join(until - time.monotonic())
        if self._thread.is_alive():
            self._warn(f"it has not finished after {CLOSE_S:.0f} s")

    def _send(self) -> None:
        ends = False
        while not ends:
            reports = [self._reports.get()]
            with contextlib.suppress(queue.Empty):
                while reports[-1] is not None and len(reports) < MOST:
                    reports.append(self._reports.get_nowait())
            ends = reports[-1] is None
            try:
                if some := [report for report in reports if report is not None]:
                    self._tracker.log(some)
                if ends:
                    self._tracker.close(self._failed)
            except Exception as error:  # whatever a package or its server comes up with
                self._warn(error_in_words(error))

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            say(f"note: {self._name} misses some of this run: {problem}; metrics.jsonl has all of it")


class Trackers:
    """A run's trackers, as a context manager. where: a line for each tracker with the way to its record."""

    def __init__(self, senders: Sequence[Sender] = (), where: Sequence[str] = ()):
        self._senders = tuple(senders)
        self.where = tuple(where)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Reports a step's numbers. Does not wait, and raises nothing."""
        for sender in self._senders:
            sender.log(TrackedValues(step, time.time(), values))

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for sender in self._senders:
            sender.close(failed=kind is not None)


def start_trackers(report_to: str, folder: Path, *, first_step: int, settings: Mapping[str, Any]) -> Trackers:
    """Opens a record with each tracker; prints which trackers fail, and goes on without them.

    folder: of the run, which exists. first_step: steps that are done: if it is 0, the records are new ones. settings:
    the config's fields by name. Raises OSError if the ids cannot be written.
    """
    file = folder / IDS_FILE
    ids: dict[str, str] = {}
    if first_step:
        with contextlib.suppress(OSError, ValueError):
            ids = read_own(file, {str: str})
    senders = []
    where = []
    for name in names(report_to):
        try:
            tracker = TRACKERS[name](Record(folder, first_step, settings, ids.get(name, "")))
        except Exception as error:  # whatever a package or its server comes up with
            say(f"note: nothing is reported to {name}: {error_in_words(error)}; metrics.jsonl has all of the run")
            continue
        senders.append(Sender(name, tracker))
        where.append(tracker.where)
        ids |= {name: tracker.id} if tracker.id else {}
    if ids:
        write_whole(file, ids)
    else:
        file.unlink(missing_ok=True)
    return Trackers(senders, where)


def error_in_words(error: Exception) -> str:
    """Formats a package's error in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
