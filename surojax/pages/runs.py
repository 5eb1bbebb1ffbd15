"""Compares runs with each other and with a plan: a table, and a page of curves (loss, norm, tokens/s, memory).

All numbers are those of the runs' `metrics.jsonl`. A value that was not finite is null there, and a gap in its curve.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import surojax
from surojax.errors import ConfigError, need, shown
from surojax.pages.step_view import memory_values, step_values
from surojax.pages.template import COLOURS, fill
from surojax.placement.home import HOMES
from surojax.planner.amounts import GiB
from surojax.planner.footprint import Rows
from surojax.planner.gpus import GPUS
from surojax.planner.prediction import Prediction
from surojax.run.metrics import METRICS_FILE, read_metrics
from surojax.untrusted import check_file, expanded, read_json

POINTS = 1000  # of a curve; of more steps, the least and the largest value of each group of steps are drawn
Curve = list[tuple[int, float | None]]  # (step, value), None for a value that was not finite
LARGEST = 2.0**60  # of a plan's numbers
HEAD = ("run", "steps", "tokens", "first loss", "last loss", "evaluated", "last norm", "tokens/s", "peak GiB")


@dataclasses.dataclass(frozen=True)
class RunRecords:
    """A run's name, and the records of its steps and evaluations, see `run.metrics.MetricsLog`."""

    name: str
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    def curve(self, key: str, unit: float = 1.0) -> Curve:
        """Returns (step, value) of each step that has the key. unit: divisor of the values."""
        return curve(self.steps, key, unit)

    def speeds(self) -> Curve:
        """Returns (step, tokens/s) of each step but the first, which compiles, unless it is the only one."""
        points = self.curve("tokens_per_second")
        return points[1:] or points

    def row(self) -> list[str]:
        """Makes the run's row under `HEAD`. tokens/s: the median."""
        losses, norms = ([y for _, y in self.curve(key)] for key in ("loss", "norm"))
        peaks = [y for _, y in self.curve("peak_memory_bytes") if y is not None]
        speeds = [y for _, y in self.speeds() if y is not None]
        evaluated = [y for _, y in curve(self.evaluations, "loss")]
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
    """What a run knows of its step when it ends.

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
        raise ConfigError(
            f"RUN: expected the folder of a run, with {METRICS_FILE}, got {name!r} ({error.strerror}); correct it"
        ) from error
    steps = [x for x in records if x.get("log") == "step"]
    need(bool(steps), "RUN", f"{METRICS_FILE} with at least one step", name, "wait for the first step of the run")
    return RunRecords(name, steps, [x for x in records if x.get("log") == "eval" and not x.get("name")])


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
    """Makes the table of runs and plan, with its head."""
    return [list(HEAD), *(run.row() for run in runs), *([plan.row()] if plan else [])]


def table_text(runs: Sequence[RunRecords], plan: Planned | None) -> str:
    """Formats the table as text."""
    table = rows(runs, plan)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(x.rjust(n) for x, n in zip(row[1:], widths[1:], strict=True))])
        for row in table
    )


class ChartCurves(NamedTuple):
    """The curves of a chart by name, others that are dashed, and a planned value to draw as a line; None: no plan."""

    title: str
    curves: Mapping[str, Curve]
    dashed: Mapping[str, Curve] = MappingProxyType({})
    plan: float | None = None


def charts_of(runs: Sequence[RunRecords], plan: Planned | None) -> list[ChartCurves]:
    """Selects what the charts of runs show."""
    return [
        ChartCurves(
            "Loss, in nats per token",
            {run.name: run.curve("loss") for run in runs},
            {f"{run.name}, evaluated": curve(run.evaluations, "loss") for run in runs},
        ),
        ChartCurves("Norm of the gradient", {run.name: run.curve("norm") for run in runs}),
        ChartCurves("Tokens/s", {run.name: run.speeds() for run in runs}, plan=plan and plan.tokens_per_s),
        ChartCurves(
            "Peak memory of a device, GiB",
            {run.name: run.curve("peak_memory_bytes", GiB) for run in runs},
            plan=plan and plan.device_bytes / GiB,
        ),
    ]


def page(
    runs: Sequence[RunRecords],
    plan: Planned | None,
    command: str,
    step: TrainedStep | None = None,
) -> str:
    """Makes the HTML page of runs. command: the command that made the page. step: of a run that has just ended."""
    return fill(
        "runs.html.jinja",
        title="1 run" if len(runs) == 1 else f"{len(runs)} runs",
        command=command,
        version=surojax.__version__,
        table=rows(runs, plan),
        colours=[number % COLOURS for number in range(len(runs) + 1)],
        charts=[chart(*of) for of in charts_of(runs, plan)],
        has_step=step is not None,
        **(step.values() if step else {}),
    )


def chart(
    title: str, curves: Mapping[str, Curve], dashed: Mapping[str, Curve] | None = None, plan: float | None = None
) -> dict[str, Any]:
    """Makes the template's chart: curves as paths in a box of 1000 x 1000, and ticks in percent.

    plan: a value to draw as a dashed line, in the colour after the last curve's.
    """
    both = {**curves, **(dashed or {})}
    drawn = {name: points for name, points in both.items() if any(y is not None for _, y in points)}
    if not drawn:
        return {"title": title, "curves": []}
    steps = [step for points in drawn.values() for step, _ in points]
    left, right = min(steps), max(max(steps), min(steps) + 1)
    colours = {name: number % COLOURS for number, name in enumerate(curves)}
    colours |= {name: (len(curves) + 1 + number) % COLOURS for number, name in enumerate(dashed or {})}
    if plan is not None:
        drawn["plan"] = [(left, plan), (right, plan)]
        colours["plan"] = len(curves) % COLOURS
    values = [y for points in drawn.values() for _, y in points if y is not None]
    margin = 0.05 * (max(values) - min(values)) or 0.05 * abs(max(values)) or 1.0
    low, high = min(values) - margin, max(values) + margin
    return {
        "title": title,
        "curves": [
            {
                "name": name,
                "colour": colours[name],
                "dashed": name not in curves,
                "path": path(thinned(points), left, right, low, high),
            }
            for name, points in drawn.items()
        ],
        "x": ticks(left, right),
        "y": ticks(low, high),
    }


def thinned(points: Curve) -> Curve:
    """Reduces a curve to about `POINTS` points: each group's smallest and largest, and one that is not finite."""
    if len(points) <= POINTS:
        return points
    kept = []
    for group in itertools.batched(points, math.ceil(2 * len(points) / POINTS)):
        finite = sorted((x for x in group if x[1] is not None), key=lambda x: x[1] or 0.0)
        kept += sorted({*finite[:1], *finite[-1:], *[x for x in group if x[1] is None][:1]}, key=lambda x: x[0])
    return kept


def path(points: Curve, left: float, right: float, low: float, high: float) -> str:
    """Converts points to an SVG path, with a gap for each None."""
    words = []
    pen = "M"
    for step, y in points:
        if y is None:
            pen = "M"
            continue
        place = f"{1000 * (step - left) / (right - left):.1f} {1000 * (high - y) / (high - low):.1f}"
        words.append(f"{pen}{place}" + "h.1" * (pen == "M"))  # a point between two gaps is a dot
        pen = "L"
    return "".join(words)


def ticks(low: float, high: float) -> list[dict[str, Any]]:
    """Chooses round numbers between low and high, as text and in percent of the distance."""
    unit = 10.0 ** math.floor(math.log10((high - low) / 2))
    step = next(n * unit for n in (5, 2, 1) if (high - low) / (n * unit) >= 2)
    digits = max(0, -math.floor(math.log10(step)))
    numbers = [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [{"percent": round(100 * (x - low) / (high - low), 2), "text": f"{x:,.{digits}f}"} for x in numbers]
