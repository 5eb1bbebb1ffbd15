"""Draws the charts of runs as a PNG file, by matplotlib (`pip install 'surojax[png]'`)."""

from collections.abc import Sequence
from pathlib import Path

from surojax.errors import ConfigError
from surojax.pages import runs
from surojax.pages.runs import Planned, RunRecords

SIZE = (12, 8)  # inches, of 100 pixels


def write_figure(file: Path, run_records: Sequence[RunRecords], plan: Planned | None) -> None:
    """Writes the charts of `runs.charts_of`, two in a row. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--png: expected the package matplotlib, got none; pip install 'surojax[png]', or use --html"
        ) from error
    figure = Figure(SIZE, layout="constrained")
    for axes, chart in zip(figure.subplots(2, 2).flat, runs.charts_of(run_records, plan), strict=True):
        axes.set_title(chart.title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        for name, points in (*chart.curves.items(), *chart.dashed.items()):
            if points:  # a value that is not finite is a gap
                axes.plot(*zip(*points, strict=True), "--" if name in chart.dashed else "-", label=name)
        if chart.plan is not None:
            axes.axhline(chart.plan, linestyle=":", color="black", label="plan")
        if axes.get_legend_handles_labels()[1]:
            axes.legend(loc="upper right")  # "best" compares it with every point
    figure.savefig(file, format="png", dpi=100)
