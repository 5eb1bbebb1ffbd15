"""Draws the charts of runs as a PNG file, by matplotlib (`pip install 'surojax[png]'`)."""

import math
from collections.abc import Sequence
from pathlib import Path

from surojax.errors import ConfigError
from surojax.pages import runs
from surojax.pages.runs import Planned, RunRecords

SIZE = (12, 4)  # inches of two charts, of 100 pixels


def write_figure(file: Path, run_records: Sequence[RunRecords], plan: Planned | None) -> None:
    """Writes the charts of `runs.charts_of`, two in a row. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--png: expected the package matplotlib, got none; pip install 'surojax[png]', or use --html"
        ) from error
    charts = runs.charts_of(run_records, plan)
    lines = math.ceil(len(charts) / 2)
    figure = Figure((SIZE[0], lines * SIZE[1]), layout="constrained")
    for position, chart in enumerate(charts, 1):
        axes = figure.add_subplot(lines, 2, position)
        axes.set_title(chart.title)
        axes.set_xlabel("step")
        axes.set_ylabel(chart.unit)
        axes.grid(alpha=0.3)
        for label, points in chart.curves.items():
            if points:  # a value that is not finite is a gap
                axes.plot(*zip(*points, strict=True), "-", label=label)
        for _, label, points in chart.labelled_marks():
            axes.plot(*zip(*points, strict=True), "o--", label=label)
        if chart.plan is not None:
            axes.axhline(chart.plan, linestyle=":", color="black", label="plan")
        if axes.get_legend_handles_labels()[1]:
            axes.legend(loc="upper right")  # "best" compares it with every point
    figure.savefig(file, format="png", dpi=100)
