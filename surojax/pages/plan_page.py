"""Makes a plan's page: its key figures, memory by tensor class, one step on a time line, and possible changes.

All numbers are fields of the `Plan`; those of the time line are events of `prediction.trace`.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import surojax
from surojax.config.changes import flags
from surojax.config.fields import Config, not_default, sequences_of_step, tokens_of_step
from surojax.pages.step_view import memory_values, step_values
from surojax.pages.template import fill
from surojax.planner.amounts import Memory, gib
from surojax.planner.gpus import GPUS
from surojax.planner.plan_text import memory_rows, plan_table, time_lines, verdict
from surojax.planner.prediction import duration
from surojax.planner.run_plan import Plan

SOME_TOKENS = 1e9  # whose hours are said if no number of tokens was given


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """What was planned. name: of the model. tokens: to train on. price: of a GPU hour."""

    name: str
    config: Config
    tokens: float | None = None
    price: float | None = None


def model_name(c: Config, config_file: str) -> str:
    """Returns a model's name for people: the last part of `model_path`, or of the config file's name."""
    return Path(c.model_path or config_file).stem


def page(
    p: Plan, command: str, trace: dict[str, Any] | None = None, *, request: PlanRequest, framed: bool = False
) -> str:
    """Makes the HTML page of a plan.

    command: the command that made the plan. trace: see `prediction.trace`. framed: for the studio, which shows the key
    figures itself.
    """
    host = p.host_limit_bytes // p.gpus_per_node if p.host_limit_bytes is not None else None
    source = "estimated from shapes, nothing was compiled" if p.estimate else "read from the compiled step"
    mesh = " x ".join(f"{name}={size}" for name, size in p.mesh.items() if size > 1)
    return fill(
        "plan.html.jinja",
        title=f"{request.name}, {p.parameters / 1e6:,.1f}M parameters, on {p.gpus} x {GPUS[p.gpu].name}",
        subtitle="; ".join(filter(None, [mesh, source])),
        command=command,
        version=surojax.__version__,
        framed=framed,
        plan=p,
        facts=facts(p, request),
        settings=settings(request.config),
        verdict=verdict(dataclasses.replace(p, changes=[])),
        text=plan_table(p),
        **memory_values(memory_rows(p), {"device": p.device_limit_bytes, "host": host}),
        **step_values(p, time_lines(p), trace),
    )


def settings(c: Config) -> list[str]:
    """Formats the fields that differ from the defaults, without those of the model's sizes."""
    change = {name: value for name, value in not_default(c).items() if not name.startswith("model.")}
    return flags(change).replace("--config.", "").split(" ") if change else []


def fact(name: str, value: str, note: str = "", exact: float | None = None) -> dict[str, Any]:
    """Makes a key figure. exact: the figure before it was rounded, in bytes or seconds."""
    return {"name": name, "value": value, "note": note, "exact": exact}


def facts(p: Plan, request: PlanRequest) -> list[dict[str, Any]]:
    """Makes the key figures of a plan."""
    host = math.inf if p.host_limit_bytes is None else p.host_limit_bytes
    limits = Memory(p.device_limit_bytes, host, math.inf if p.nvme_bytes else 0)
    figures = given_facts(request.config, p.need, limits)
    if p.predicted_step_s is None or p.predicted_range_s is None:
        if p.estimated_step_s is not None:
            figures.append(fact("a step", duration(p.estimated_step_s), "estimated", p.estimated_step_s))
        return figures
    low, high = map(duration, p.predicted_range_s)
    rate = p.gpus * (p.tokens_per_s_per_gpu or 0.0)
    figures += [
        fact("a step", duration(p.predicted_step_s), f"{low} to {high}, predicted", p.predicted_step_s),
        fact("tokens/s", f"{rate:,.0f}", f"{rate / p.gpus:,.0f} per GPU; MFU {p.mfu:.0%}", rate),
    ]
    return [*figures, *costs(p, request, rate)]


def given_facts(c: Config, need: Memory, limits: Memory) -> list[dict[str, Any]]:
    """Makes the figures of what a step needs beside what there is, and of its tokens."""

    def memory(name: str, size: float, limit: float) -> dict[str, Any]:
        return fact(name, gib(size), f"of {gib(limit)}" if limit < math.inf else "", size)

    figures = [
        memory("memory of each GPU", need.device, limits.device),
        memory("host memory of a machine", need.host, limits.host),
    ]
    if need.files or limits.files:
        figures.append(memory("files", need.files, limits.files))
    tokens = tokens_of_step(c)
    step = f"{sequences_of_step(c):,} x {c.sequence_len:,}"
    return [*figures, fact("tokens of a step", f"{tokens:,}", step, tokens)]


def costs(p: Plan, request: PlanRequest, rate: float) -> list[dict[str, Any]]:
    """Makes the key figures of hours and, if there is a price, of money. rate: tokens/s of all GPUs."""
    wanted = request.tokens or SOME_TOKENS
    step, (low, high) = p.predicted_step_s or 0.0, p.predicted_range_s or [0.0, 0.0]
    hours = [wanted / rate * seconds / step / 3600 for seconds in (step, low, high)]
    name = f"{wanted / 1e9:g} billion tokens" if wanted >= 1e9 else f"{wanted:,.0f} tokens"
    found = [fact(name, f"{hours[0]:,.1f} h", f"{hours[1]:,.1f} to {hours[2]:,.1f} h", hours[0])]
    if request.price is not None:
        money, cheap, dear = (hour * p.gpus * request.price for hour in hours)
        found.append(fact("they cost", f"{money:,.2f}", f"{cheap:,.2f} to {dear:,.2f}, {request.price:g} a GPU hour"))
    return found
