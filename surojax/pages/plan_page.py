"""Makes a plan's page: memory by tensor class, one step on a time line, possible changes, and the command.

All numbers are fields of the `Plan`; those of the time line are events of `prediction.trace`.
"""

import dataclasses
from typing import Any

import surojax
from surojax.pages.template import COLOURS, fill, script_data
from surojax.placement.home import HOMES
from surojax.planner.amounts import gib, memory_unit
from surojax.planner.costs import ATTENTION, DEVICE_COPY, GATHER, HOST_IN, HOST_OUT, PASS, PRODUCT, REDUCE
from surojax.planner.gpus import GPUS
from surojax.planner.plan_text import exposed_rows, memory_rows, plan_table, time_lines, verdict
from surojax.planner.prediction import milliseconds
from surojax.planner.rates import DISKS, WORDS
from surojax.planner.run_plan import Plan
from surojax.planner.timeline import WAITS

KINDS = {  # of events, in the order of their colours
    PRODUCT: "matrix products",
    HOST_IN: "host to device",
    GATHER: "gathers",
    REDUCE: "reductions",
    ATTENTION: "attention",
    HOST_OUT: "device to host",
    PASS: "passes over device memory",
    DEVICE_COPY: "copies on the device",
    DISKS: "files",
}


def page(p: Plan, command: str, trace: dict[str, Any] | None = None) -> str:
    """Makes the HTML page of a plan. command: the command that made the plan. trace: see `prediction.trace`."""
    events = timeline(trace) if trace else None
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
        tiers=[tier(p, home.name) for home in HOMES],
        times=time_lines(p),
        kinds=events["kinds"] if events else [],
        timeline=script_data(events) if events else None,
        exposed=exposed_rows(p) if p.predicted_step_s is not None else {},
        ends=[(WORDS.get(name, name), *map(milliseconds, both)) for name, both in p.step_at_ends_s.items()],
        text=plan_table(p),
        **memory_table(p),
    )


def facts(p: Plan) -> list[tuple[str, str, str]]:
    """Makes the page's key figures: (name, value, note) each."""
    figures = [("device memory", gib(p.device_bytes), f"of {gib(p.device_limit_bytes)} on each GPU")]
    gpus = f"of a machine, {p.gpus_per_node} GPU{'s'[: p.gpus_per_node != 1]}"
    figures.append(("host memory", gib(p.gpus_per_node * p.host_bytes), gpus))
    if p.nvme_bytes:
        figures.append(("files", gib(p.nvme_bytes), "per GPU"))
    if p.predicted_step_s is None or p.predicted_range_s is None:
        return [*figures, ("a step takes at least", f"{1e3 * p.step_time_bound_s:,.1f} ms", f"bound by {p.bound_by}")]
    low, high = map(milliseconds, p.predicted_range_s)
    rate = p.tokens_per_s_per_gpu or 0.0
    return [
        *figures,
        ("a step, predicted", f"{milliseconds(p.predicted_step_s)} ms", f"{low} to {high} ms"),
        ("tokens/s, predicted", f"{p.gpus * rate:,.0f}", f"{rate:,.0f} per GPU"),
        ("MFU, predicted", f"{p.mfu:.1%}", "model FLOPs of the peak"),
    ]


def memory_table(p: Plan) -> dict[str, Any]:
    """Makes the template's table of memory: unit, columns and rows."""
    by_name = memory_rows(p)
    unit, size = memory_unit(max(by_name["total"]))
    rows = [
        {
            "name": name,
            "colour": None if name == "total" else number % COLOURS,
            "cells": [{"bytes": n, "text": f"{n / size:,.2f}" if n else "-"} for n in sizes],
        }
        for number, (name, sizes) in enumerate(by_name.items())
    ]
    return {"unit": unit, "homes": [home.name for home in HOMES], "rows": rows}


def tier(p: Plan, home: str) -> dict[str, Any]:
    """Makes the template's bar of a memory tier: parts in percent of the bar, and the position of the limit."""
    column = [x.name for x in HOMES].index(home)
    sizes = {name: row[column] for name, row in memory_rows(p).items()}
    total = sizes.pop("total")
    host = p.host_limit_bytes // p.gpus_per_node if p.host_limit_bytes is not None else None
    limit = {"device": p.device_limit_bytes, "host": host}.get(home)
    length = max(total, limit or 0, 1)
    parts = [
        {"name": name, "percent": round(100 * n / length, 3), "colour": number % COLOURS, "text": gib(n)}
        for number, (name, n) in enumerate(sizes.items())
        if n
    ]
    of = f" of {gib(limit)}" if limit is not None else ""
    return {
        "name": home,
        "text": f"{gib(total)}{of}",
        "parts": parts,
        "limit_percent": round(100 * limit / length, 3) if limit is not None and limit < total else None,
    }


def timeline(trace: dict[str, Any]) -> dict[str, list]:
    """Converts a trace for timeline.js, times in microseconds: each name once, events refer to names by position."""
    threads = [x for x in trace["traceEvents"] if x["name"] == "thread_name"]
    rows = {x["tid"]: x["args"]["name"] for x in threads}
    events = [x for x in trace["traceEvents"] if x["ph"] == "X"]
    used = sorted({x["tid"] for x in events})
    kinds = [kind for kind in KINDS if any(x["cat"] == kind for x in events)]
    kinds += sorted({x["cat"] for x in events} - KINDS.keys())
    names = {name: number for number, name in enumerate(dict.fromkeys(x["name"] for x in events))}
    loops = {name: number for number, name in enumerate(dict.fromkeys(x["args"]["loop"] for x in events))}
    return {
        "rows": ["exposed: compute waits" if rows[tid] == WAITS else rows[tid] for tid in used],
        "kinds": [KINDS.get(kind, kind) for kind in kinds],
        "names": list(names),
        "loops": list(loops),
        "events": [
            [
                used.index(x["tid"]),
                kinds.index(x["cat"]),
                names[x["name"]],
                loops[x["args"]["loop"]],
                round(x["ts"], 3),
                round(x["dur"], 3),
                round(x["args"]["MB"], 3),
            ]
            for x in events
        ],
    }
