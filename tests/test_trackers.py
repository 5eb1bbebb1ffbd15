"""Trackers: each gets what a run reports, a resumed run continues its record, and none can end or delay a run."""

import re
import struct
import sys
import threading
import types

import pytest
from tensorboardX.proto import event_pb2

from surojax import default_config, train
from surojax.config.checks import check
from surojax.errors import ConfigError
from surojax.run import trackers

SETTINGS = {"learning_rate": 3e-4, "model.hidden_size": 64}


def report(folder, report_to: str, first: int, last: int) -> trackers.Trackers:
    """A run of these steps."""
    with trackers.start_trackers(report_to, folder, first_step=first - 1, settings=SETTINGS) as found:
        for step in range(first, last + 1):
            found.log(step, {"train/loss": 1.0 / step})
        found.log(last, {"eval/what is asked?/loss": 2.0})
    return found


# -- TensorBoard ------------------------------------------------------------------------------------------------------


def tensorboard_events(file):
    """The events of one file; a TFRecord is a length, its checksum, the event, its checksum."""
    data, events = file.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        events.append(event_pb2.Event.FromString(data[12 : 12 + length]))  # pyright: ignore[reportAttributeAccessIssue]
        data = data[16 + length :]
    return events


def test_tensorboard_events(tmp_path):
    (line,) = report(tmp_path, "tensorboard", 1, 6).where
    assert line.endswith(f"tensorboard --logdir {tmp_path}/tensorboard")
    report(tmp_path, "tensorboard", 5, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]
    fresh, resumed = sorted((tmp_path / "tensorboard").iterdir(), key=lambda file: file.name[-1:])
    scalars = [(e.step, v.tag, v.simple_value) for e in tensorboard_events(fresh) for v in e.summary.value]
    assert [step for step, _, _ in scalars] == [*range(1, 7), 6] and scalars[1] == (2, "train/loss", 0.5)
    # TensorBoard hides what an earlier file says about step 5 and later.
    assert [e.step for e in tensorboard_events(resumed) if e.session_log.status] == [5]


# -- Packages, each replaced by what is used of its public interface ---------------------------------------------------


class Server:
    """What reached a tracker: `runs` by id, each with `settings`, its `points` and how it ended."""

    def __init__(self):
        self.runs: dict[str, dict] = {}

    def begin(self, id_: str, settings=None) -> dict:
        run = self.runs.setdefault(id_, {"settings": {}, "points": [], "ended": None})
        run["settings"].update(settings or {})
        return run


def fake_wandb(server: Server) -> types.ModuleType:
    class Run:
        url = None

        def __init__(self, run):
            self.run = run
            self.axes = {}

        def define_metric(self, name, step_metric=None):
            self.axes[name] = step_metric

        def log(self, data):
            assert self.axes == {"step": None, "*": "step"}  # before the first point
            self.run["points"] += [(data["step"], data["train/loss"])] if "train/loss" in data else []

        def finish(self, exit_code=None):
            self.run["ended"] = exit_code

    def init(*, project, name, id, resume, dir, config):
        assert (project, resume) == ("surojax", "allow") and dir.is_dir() and name == dir.name
        return Run(server.begin(id, config))

    found = types.ModuleType("wandb")
    found.init = init  # type: ignore[attr-defined]
    return found


def fake_trackio(server: Server) -> types.ModuleType:
    class Run:
        def __init__(self, run):
            self.run = run

        def log(self, metrics, step=None):
            self.run["points"] += [(step, metrics["train/loss"])] if "train/loss" in metrics else []

        def finish(self):
            self.run["ended"] = 0

    def init(*, project, name, resume, config):
        assert (project, resume) == ("surojax", "allow")
        return Run(server.begin(name, config))

    found = types.ModuleType("trackio")
    found.init = init  # type: ignore[attr-defined]
    return found


def fake_mlflow(server: Server) -> types.ModuleType:
    class MlflowClient:
        def get_experiment_by_name(self, name):
            assert name == "surojax"
            return types.SimpleNamespace(experiment_id="7") if server.runs else None

        def create_experiment(self, name):
            return "7"

        def create_run(self, experiment_id, run_name=None):
            assert experiment_id == "7"
            server.begin(f"run-{len(server.runs)}")
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"run-{len(server.runs) - 1}"))

        def update_run(self, run_id, status=None):
            server.runs[run_id]["ended"] = status

        def log_batch(self, run_id, metrics=(), params=()):
            assert len(metrics) <= 1000 and len(params) <= 100
            assert all(re.fullmatch(r"[\w./: -]+", key) for key, *_ in metrics)
            run = server.runs[run_id]
            run["points"] += [(step, value) for key, value, _, step in metrics if key == "train/loss"]
            run["settings"].update({key: type(SETTINGS[key])(value) for key, value in params})

        def set_terminated(self, run_id, status=None):
            server.runs[run_id]["ended"] = {"FINISHED": 0, "FAILED": 1}[status]

    found = types.ModuleType("mlflow")
    found.MlflowClient = MlflowClient  # type: ignore[attr-defined]
    found.get_tracking_uri = lambda: "sqlite:///mlflow.db"  # type: ignore[attr-defined]
    entities = types.SimpleNamespace(Metric=lambda *metric: metric, Param=lambda *param: param)
    found.entities = entities  # type: ignore[attr-defined]
    return found


FAKES = {"wandb": fake_wandb, "trackio": fake_trackio, "mlflow": fake_mlflow}


@pytest.fixture(params=FAKES)
def fake(request, monkeypatch):
    """(name, server) of a tracker whose package is replaced."""
    server = Server()
    monkeypatch.setitem(sys.modules, request.param, FAKES[request.param](server))
    for name in ("WANDB_PROJECT", "WANDB_NAME", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return request.param, server


def points(first: int, last: int) -> list[tuple[int, float]]:
    return [(step, 1.0 / step) for step in range(first, last + 1)]


def test_variables_of_trackers_count(monkeypatch, tmp_path):
    """For a new run; one that goes on is found by its id."""
    asked = []

    def init(**how):
        asked.append({name: how[name] for name in ("project", "name", "id")})
        return types.SimpleNamespace(url="https://wandb/x", define_metric=lambda *_, **__: None)

    client = types.SimpleNamespace(
        get_experiment_by_name=lambda name: asked.append(name) or None,
        create_experiment=lambda name: asked.append(name) or "7",
        create_run=lambda id_, run_name: types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"{run_name} {id_}")),
        log_batch=lambda *_, **__: None,
    )
    mlflow = types.SimpleNamespace(MlflowClient=lambda: client, entities=None, get_tracking_uri=lambda: "uri")
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    for name, value in {"WANDB_PROJECT": "p", "WANDB_NAME": "n", "MLFLOW_EXPERIMENT_NAME": "e"}.items():
        monkeypatch.setenv(name, value)
    record = trackers.Record(tmp_path / "run", 0, {}, "the id")
    found = trackers.WeightsAndBiases(record)
    assert asked == [{"project": "p", "name": "n", "id": "the id"}] and found.where.endswith(": https://wandb/x")
    asked.clear()
    found = trackers.MLflow(record._replace(id=""))
    assert asked == ["e", "e"] and found.id == "run 7"


def test_a_resumed_run_continues_its_record_and_a_new_one_begins_another(fake, tmp_path):
    name, server = fake
    (line,) = report(tmp_path, name, 1, 150).where
    report(tmp_path, f"tensorboard, {name}", 101, 200)
    (run,) = server.runs.values()
    assert run == {"settings": SETTINGS, "points": points(1, 150) + points(101, 200), "ended": 0}
    assert next(iter(server.runs)) in line
    report(tmp_path, name, 1, 3)
    assert [run["points"] for run in server.runs.values()][1:] == [points(1, 3)]
    (tmp_path / "trackers.json").write_text("[damaged")
    report(tmp_path, name, 4, 5)
    assert [run["points"] for run in server.runs.values()][2:] == [points(4, 5)]


def test_an_error_of_the_run_is_told(fake, tmp_path):
    name, server = fake
    with pytest.raises(OSError), trackers.start_trackers(name, tmp_path, first_step=0, settings=SETTINGS) as found:
        found.log(1, {"train/loss": 1.0})
        raise OSError("disk")
    (run,) = server.runs.values()
    assert run["points"] == [(1, 1.0)] and run["ended"] == (0 if name == "trackio" else 1)  # which has no such word


# -- Failures ---------------------------------------------------------------------------------------------------------


def test_a_package_that_is_missing_is_said_before_anything_is_written(tmp_path, monkeypatch):
    for name in FAKES:
        monkeypatch.setitem(sys.modules, name, None)
        c = default_config()
        c.data, c.model.vocab_size, c.output_dir, c.report_to = "stdlib", 320, str(tmp_path / "run"), name
        with pytest.raises(ConfigError, match=rf"report_to: .*package {name}, .*; pip install 'surojax\[{name}\]'"):
            train(c)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["wand", "tensorboard,", "wandb,wandb", "wandb mlflow"])
def test_names_that_are_no_trackers_are_refused(value):
    c = default_config()
    for good in ("", "mlflow, wandb", "tensorboard"):
        c.report_to = good
        check(c)
    c.report_to = value
    with pytest.raises(ConfigError, match="report_to: expected a comma list of tensorboard, wandb, trackio, mlflow"):
        check(c)


class Failing:
    """A tracker whose server is away at first, and at the end."""

    package = "sys"
    id = where = "failing"

    def __init__(self, record):
        self.steps: list[int] = []

    def log(self, reports):
        self.steps += [report.step for report in reports]
        if self.steps[0] == reports[0].step:
            raise ConnectionError("no route\nto host")

    def close(self, failed):
        raise TimeoutError


def test_a_tracker_that_fails_is_said_once(tmp_path, monkeypatch, capsys):
    """The others go on, and so does it when its server is back."""
    monkeypatch.setitem(trackers.TRACKERS, "trackio", Failing)
    found = report(tmp_path, "trackio,tensorboard", 1, 12)
    assert capsys.readouterr().out == (
        "note: trackio misses some of this run: ConnectionError: no route to host; metrics.jsonl has all of it\n"
    )
    assert found._senders[0]._tracker.steps == [*range(1, 13), 12]  # type: ignore[attr-defined]
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert tensorboard_events(file)[-1].step == 12


def test_a_tracker_that_cannot_begin_is_left_out(tmp_path, monkeypatch, capsys):
    def refuse(record):
        raise PermissionError("no key")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", refuse)
    (tmp_path / "trackers.json").write_text('{"wandb": "abc"}')
    assert report(tmp_path, "wandb", 5, 6).where == ()
    expected = "note: nothing is reported to wandb: PermissionError: no key; metrics.jsonl has all of the run\n"
    assert capsys.readouterr().out == expected
    assert (tmp_path / "trackers.json").read_text() == '{"wandb": "abc"}'  # the next start may continue it


def test_a_tracker_that_hangs_delays_nothing(tmp_path, monkeypatch, capsys):
    goes_on = threading.Event()

    class Hanging(Failing):
        def log(self, reports):
            goes_on.wait()

    monkeypatch.setitem(trackers.TRACKERS, "trackio", Hanging)
    monkeypatch.setattr(trackers, "CLOSE_S", 0.05)
    monkeypatch.setattr(trackers, "WAITING", 20)
    report(tmp_path, "trackio", 1, 10)
    assert "trackio misses some of this run: it has not finished after 0 s;" in capsys.readouterr().out
    report(tmp_path, "trackio", 1, 50)
    assert capsys.readouterr().out.count("misses some of this run: more than 20 reports wait for it;") == 1
    goes_on.set()
