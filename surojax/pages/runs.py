"""Compares runs with each other and with a plan: a table, and a page of curves, settings and samples.

All numbers are those of the runs' `metrics.jsonl`. A value that was not finite is null there, and a gap in its curve.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import surojax
from surojax.config.fields import FIELDS
from surojax.errors import ConfigError, need, shown
from surojax.pages.step_view import memory_values, step_values
from surojax.pages.template import COLOURS, fill, script_data
from surojax.placement.home import HOMES
from surojax.planner.amounts import GiB
from surojax.planner.footprint import Rows
from surojax.planner.gpus import GPUS
from surojax.planner.prediction import Prediction
from surojax.run.metrics import METRICS_FILE, read_metrics
from surojax.run.starts import read_starts
from surojax.untrusted import check_file, expanded, read_json

POINTS = 1000  # of a curve; of more steps, the least and the largest value of each group of steps are drawn
Curve = list[tuple[int, float | None]]  # (step, value), None for a value that was not finite
LARGEST = 2.0**60  # of a plan's numbers
ARROW = " \u2192 "
KNOWN = {  # keys of a step's record that have a chart, or none
    *("log", "step", "time", "tokens", "loss", "norm", "lr", "tokens_per_second", "duration_ms", "data_wait_ms", "mfu"),
    *("peak_memory_bytes", "disk_busy_ms", "largest_expert_share", "expert_tokens"),
}
HEAD = ("run", "steps", "tokens", "first loss", "last loss", "evaluated", "last norm", "tokens/s", "peak GiB")


@dataclasses.dataclass(frozen=True)
class RunRecords:
    """A run's name, and the records of its steps and evaluations, see `run.metrics.MetricsLog`."""

    name: str
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    path: str = ""
    starts: Sequence[dict[str, Any]] = ()  # see `run.starts`, and so are samples
    samples: Sequence[dict[str, Any]] = ()

    def setting(self, name: str) -> str:
        """Formats a field's values over the run's starts: "0.004, 0.002 after step 60" with an arrow between them."""
        values: list[str] = []
        for start in self.starts:
            value = str(start["settings"].get(name, FIELDS[name].default if name in FIELDS else "-"))
            if not values:
                values.append(value)
            elif value != values[-1].partition(" after step ")[0]:
                values.append(f"{value} after step {start['step']:,}")
        return ARROW.join(values) or "-"

    def curve(self, key: str, unit: float = 1.0) -> Curve:
        """Returns (step, value) of each step that has the key. unit: divisor of the values."""
        return curve(self.steps, key, unit)

    def evaluated(self) -> dict[str, Curve]:
        """Returns (step, loss) of the evaluations of each data set, by "evaluated" or "evaluated on NAME"."""
        of_sets: dict[str, list[dict[str, Any]]] = {}
        for record in self.evaluations:
            of_sets.setdefault(str(record.get("name") or ""), []).append(record)
        return {f"evaluated on {name}" if name else "evaluated": curve(x, "loss") for name, x in of_sets.items()}

    def speeds(self) -> Curve:
        """Returns (step, tokens/s) of each step but the first, which compiles, unless it is the only one."""
        points = self.curve("tokens_per_second")
        return points[1:] or points

    def row(self) -> list[str]:
        """Makes the run's row under `HEAD`. evaluated: of the first data set. tokens/s: the median."""
        losses, norms = ([y for _, y in self.curve(key)] for key in ("loss", "norm"))
        peaks = [y for _, y in self.curve("peak_memory_bytes") if y is not None]
        speeds = [y for _, y in self.speeds() if y is not None]
        evaluated = [y for _, y in next(iter(self.evaluated().values()), [])]
        tokens = [y for _, y in self.curve("tokens")]
        return [
            self.name,
            f"{self.steps[-1]['step']:,}",
            cell(tokens[-1:], "{:,.0f}"),
            cell(losses[:1], "{:.4f}"),
            cell(losses[-1:], "{:.4f}"),
            cell(evaluated[-1:], "{:.4f}"),
            cell(norms[-1:], "{:.3f}"),
            cell([statistics.median(speeds)] if speeds else [], "{:,.0f}"),
            cell([max(peaks)] if peaks else [], "{:.2f}", GiB),
        ]


@dataclasses.dataclass(frozen=True)
class Planned:
    """The figures of a plan that runs are compared with. tokens_per_s: of all GPUs; None if no time is predicted."""

    name: str
    device_bytes: int
    tokens_per_s: float | None

    def row(self) -> list[str]:
        """Makes the plan's row under `HEAD`."""
        speed = "-" if self.tokens_per_s is None else f"{self.tokens_per_s:,.0f}"
        return [self.name, *["-"] * 6, speed, f"{self.device_bytes / GiB:.2f}"]


class TrainedStep(NamedTuple):
    """A run's step as predicted and measured, known when the run ends.

    classes: estimated bytes, see `footprint.by_class`. lines: what was measured beside what was predicted. trace: the
    simulated step, see `prediction.trace`; None if the planner does not know the device.
    """

    classes: Rows
    predicted: Prediction
    lines: Sequence[str]
    trace: Mapping[str, Any] | None

    def values(self) -> dict[str, Any]:
        """Makes the values of the templates of memory and step."""
        sizes = {name: [of_class[home.name] for home in HOMES] for name, of_class in self.classes.items()}
        totals = [sum(column) for column in zip(*sizes.values(), strict=True)]
        reason = self.predicted.not_predicted
        lines = [*self.lines, *([f"no time is predicted: {reason}"] if reason else [])]
        return memory_values(sizes | {"total": totals}, {}) | step_values(self.predicted, lines, self.trace)


def number(value: Any) -> float | None:
    """Returns a record's value if it is a finite number, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None


def curve(records: Sequence[dict[str, Any]], key: str, unit: float = 1.0) -> Curve:
    """Returns (step, value / unit) of each record that has the key; None for values that are not finite."""
    numbers = ((record["step"], number(record[key])) for record in records if key in record)
    return [(step, None if y is None else y / unit) for step, y in numbers]


def cell(values: Sequence[float | None], form: str, unit: float = 1.0) -> str:
    """Formats the first value; "-" without values, "not finite" for None."""
    if not values:
        return "-"
    return "not finite" if values[0] is None else form.format(values[0] / unit)


def read_run(name: str) -> RunRecords:
    """Reads a run. name: its folder or its metrics.jsonl. Raises ConfigError if the file has no step."""
    path = expanded(name)
    file = path / METRICS_FILE if path.is_dir() else path
    try:
        check_file(file)
        records = read_metrics(file)
    except OSError as error:
        reason, change = error.strerror, "correct it"
        if path.is_dir() and not file.exists():
            around = [path.resolve().parent, *sorted(path.resolve().iterdir())]
            reason = f"{path.resolve()} has none"
            change = next((f"did you mean {near}?" for near in around if (near / METRICS_FILE).exists()), change)
        expected = f"the folder of a run, with {METRICS_FILE}"
        raise ConfigError(f"RUN: expected {expected}, got {name!r} ({reason}); {change}") from error
    steps = [x for x in records if x.get("log") == "step"]
    need(bool(steps), "RUN", f"{METRICS_FILE} with at least one step", name, "wait for the first step of the run")
    evaluations = [x for x in records if x.get("log") == "eval"]
    others = read_starts(file.parent)
    starts = [x for x in others if x["log"] == "start" and isinstance(x.get("settings"), dict)]
    samples = [x for x in others if x["log"] == "sample" and isinstance(x.get("text"), str)]
    return RunRecords(file.parent.resolve().name, steps, evaluations, name, starts, samples[-1:])


def read_runs(names: Sequence[str]) -> list[RunRecords]:
    """Reads runs, see `read_run`, each once; those whose folders are called alike get names that tell them apart."""
    found: dict[tuple[str, ...], RunRecords] = {}
    for run in map(read_run, names):
        path = Path(run.path).resolve()
        found.setdefault((path.parent if path.name == METRICS_FILE else path).parts, run)
    named = []
    for own, run in found.items():
        others = [of for of in found if of != own]
        length = next((n for n in range(1, len(own)) if all(of[-n:] != own[-n:] for of in others)), len(own))
        named.append(dataclasses.replace(run, name="/".join(own[-length:])))
    return named


def read_plan(name: str) -> Planned:
    """Reads a file of `surojax plan --json`. Raises ConfigError for other files."""
    try:
        plan = read_json(expanded(name))
        gpus, size, speed = (plan[name] for name in ("gpus", "device_bytes", "tokens_per_s_per_gpu"))
        numbers = [number(x) for x in (gpus, size, 0.0 if speed is None else speed)]
        if plan["gpu"] not in GPUS or not all(x is not None and 0 <= x < LARGEST for x in numbers):
            raise ValueError("numbers that no plan has")
        return Planned(f"plan, {gpus} x {plan['gpu']}", int(size), None if speed is None else gpus * float(speed))
    except OSError as error:
        problem = error.strerror or str(error)
    except (ValueError, KeyError, TypeError) as error:
        problem = shown(str(error), 80)
    raise ConfigError(f"--plan: expected a file of surojax plan --json, got {name!r} ({problem}); correct it")


def rows(runs: Sequence[RunRecords], plan: Planned | None) -> list[list[str]]:
    """Makes the table of runs and plan, with its head, without columns that nothing is known of."""
    cells = [run.row() for run in runs] + ([plan.row()] if plan else [])
    known = [number for number, column in enumerate(zip(*cells, strict=True)) if set(column) != {"-"}]
    return [[row[number] for number in known] for row in (list(HEAD), *cells)]


def table_text(runs: Sequence[RunRecords], plan: Planned | None) -> str:
    """Formats the table as text."""
    table = rows(runs, plan)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(x.rjust(n) for x, n in zip(row[1:], widths[1:], strict=True))])
        for row in table
    )


class Chart(NamedTuple):
    """A chart by step. unit: of its values, or "". curves: by run. marks: by run, see `RunRecords.evaluated`.

    plan: the planned value.
    """

    title: str
    unit: str
    curves: Mapping[str, Curve]
    marks: Mapping[str, Mapping[str, Curve]] = MappingProxyType({})
    plan: float | None = None

    def labelled_marks(self) -> list[tuple[str, str, Curve]]:
        """Lists (run, label, points) of the marks that there are."""
        every = [(run, what, points) for run, of_run in self.marks.items() for what, points in of_run.items()]
        return [(run, f"{run}, {what}", points) for run, what, points in every if points]


def charts_of(runs: Sequence[RunRecords], plan: Planned | None) -> list[Chart]:
    """Makes the charts of runs: of the numbers that all runs have, and of further ones that some have."""
    further = dict.fromkeys(key for run in runs for record in run.steps for key in record if key not in KNOWN)

    def of(title: str, unit: str, key: str, size: float = 1.0, plan: float | None = None) -> Chart:
        return Chart(title, unit, {run.name: run.curve(key, size) for run in runs}, plan=plan)

    marks = {run.name: run.evaluated() for run in runs}
    speeds = {run.name: run.speeds() for run in runs}
    charts = [
        of("Loss", "nats per token", "loss")._replace(marks=marks),
        of("Learning rate", "", "lr"),
        of("Norm of the gradient", "", "norm"),
        Chart("Speed", "tokens/s", speeds, plan=plan and plan.tokens_per_s),
        of("Peak memory of a device", "GiB", "peak_memory_bytes", GiB, plan and plan.device_bytes / GiB),
        *(of(key, "", key) for key in further),
    ]
    return [chart for chart in charts if any(y is not None for of_run in chart.curves.values() for _, y in of_run)]


def chart_data(chart: Chart, colours: Mapping[str, int]) -> dict[str, Any]:
    """Converts a chart for charts.js; colours: by run."""

    def series(run: str, label: str, points: Curve, is_mark: bool) -> dict[str, Any]:
        kept = points if is_mark else thinned(points)
        values = [None if y is None else float(f"{y:.6g}") for _, y in kept]
        return {
            "name": label,
            "colour": colours[run],
            "marks": is_mark,
            "points": [[step for step, _ in kept], values],
        }

    curves = [series(run, run, points, False) for run, points in chart.curves.items() if points]
    marks = [series(*of_run, True) for of_run in chart.labelled_marks()]
    return {"title": chart.title, "unit": chart.unit, "curves": [*curves, *marks], "plan": chart.plan}


def settings_rows(runs: Sequence[RunRecords]) -> list[dict[str, Any]]:
    """Makes a row for each field that some start of a run set, those that differ first: [{name, cells, differs}].

    A cell, one for each run, has the values of its starts, and the steps after which they changed.
    """
    names = dict.fromkeys(name for run in runs for start in run.starts for name in start["settings"])
    rows = []
    for name in names:
        cells = [run.setting(name) for run in runs]
        rows.append({"name": name, "cells": cells, "differs": len(set(cells)) > 1 or any(ARROW in x for x in cells)})
    return sorted(rows, key=lambda row: not row["differs"])


def page(
    runs: Sequence[RunRecords],
    plan: Planned | None,
    command: str,
    step: TrainedStep | None = None,
    *,
    framed: bool = False,
) -> str:
    """Makes the HTML page of runs. command: the command that made the page. step: of a run that has just ended.

    framed: for the studio.
    """
    colours = {run.name: number % COLOURS for number, run in enumerate(runs)}
    charts = [chart_data(of, colours) for of in charts_of(runs, plan)]
    return fill(
        "runs.html.jinja",
        title=" and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs",
        command=command,
        version=surojax.__version__,
        framed=framed,
        table=rows(runs, plan),
        paths=[run.path for run in runs],
        colours=[*colours.values(), len(runs) % COLOURS],
        charts=charts,
        charts_data=script_data({"charts": charts, "resumed": resumed(runs), "plan_colour": len(runs) % COLOURS}),
        runs=runs,
        settings=settings_rows(runs),
        has_step=step is not None,
        **(step.values() if step else {}),
    )


def resumed(runs: Sequence[RunRecords]) -> list[dict[str, Any]]:
    """Returns the steps after which runs went on from a checkpoint, with their names."""
    return [{"step": x["step"], "name": run.name} for run in runs for x in run.starts if x["step"]]


def thinned(points: Curve) -> Curve:
    """Reduces a curve to about `POINTS` points: each group's smallest and largest, and one that is not finite."""
    if len(points) <= POINTS:
        return points
    kept = []
    for group in itertools.batched(points, math.ceil(2 * len(points) / POINTS)):
        finite = sorted((x for x in group if x[1] is not None), key=lambda x: x[1] or 0.0)
        kept += sorted({*finite[:1], *finite[-1:], *[x for x in group if x[1] is None][:1]}, key=lambda x: x[0])
    return kept
