"""Makes a plan's page: memory by tensor class, one step on a time line, possible changes, and the command.

All numbers are fields of the `Plan`; those of the time line are events of `prediction.trace`.
"""

import dataclasses
from typing import Any

import surojax
from surojax.pages.step_view import memory_values, step_values
from surojax.pages.template import fill
from surojax.planner.amounts import gib
from surojax.planner.gpus import GPUS
from surojax.planner.plan_text import memory_rows, plan_table, time_lines, verdict
from surojax.planner.prediction import duration
from surojax.planner.run_plan import Plan


def page(p: Plan, command: str, trace: dict[str, Any] | None = None) -> str:
    """Makes the HTML page of a plan. command: the command that made the plan. trace: see `prediction.trace`."""
    host = p.host_limit_bytes // p.gpus_per_node if p.host_limit_bytes is not None else None
    source = "estimated from shapes, nothing was compiled" if p.estimate else "of the compiled step"
    return fill(
        "plan.html.jinja",
        title=f"{p.parameters / 1e6:,.1f}M parameters on {p.gpus} x {GPUS[p.gpu].name}",
        subtitle=f"{' x '.join(f'{name}={size}' for name, size in p.mesh.items())}; {source}",
        command=command,
        version=surojax.__version__,
        plan=p,
        facts=facts(p),
        verdict=verdict(dataclasses.replace(p, changes=[])),
        text=plan_table(p),
        **memory_values(memory_rows(p), {"device": p.device_limit_bytes, "host": host}),
        **step_values(p, time_lines(p), trace),
    )


def facts(p: Plan) -> list[tuple[str, str, str]]:
    """Makes the page's key figures: (name, value, note) each."""
    figures = [("device memory", gib(p.device_bytes), f"of {gib(p.device_limit_bytes)} on each GPU")]
    gpus = f"of a machine, {p.gpus_per_node} GPU{'s'[: p.gpus_per_node != 1]}"
    figures.append(("host memory", gib(p.gpus_per_node * p.host_bytes), gpus))
    if p.nvme_bytes:
        figures.append(("files", gib(p.nvme_bytes), "per GPU"))
    if p.predicted_step_s is None or p.predicted_range_s is None:
        return [*figures, ("a step takes at least", duration(p.step_time_bound_s), f"bound by {p.bound_by}")]
    low, high = map(duration, p.predicted_range_s)
    rate = p.tokens_per_s_per_gpu or 0.0
    return [
        *figures,
        ("a step, predicted", duration(p.predicted_step_s), f"{low} to {high}"),
        ("tokens/s, predicted", f"{p.gpus * rate:,.0f}", f"{rate:,.0f} per GPU"),
        ("MFU, predicted", f"{p.mfu:.1%}", "model FLOPs of the peak"),
    ]
