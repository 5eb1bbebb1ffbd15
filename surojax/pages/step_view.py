"""The parts of a page that show a step: memory by tensor class as bars and a table, and its time, on a time line.

A plan's page has them of the planned step, a run's page of the step that ran. The time line's events are those of
`prediction.trace`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from surojax.pages.template import COLOURS, script_data
from surojax.placement.home import HOMES
from surojax.planner.amounts import gib, memory_unit
from surojax.planner.costs import ATTENTION, DEVICE_COPY, GATHER, HOST_IN, HOST_OUT, PASS, PRODUCT, REDUCE
from surojax.planner.plan_text import exposed_rows, files_text
from surojax.planner.prediction import Prediction, milliseconds
from surojax.planner.rates import DISKS, WORDS
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

type Sizes = Mapping[str, Sequence[int]]  # bytes in each of `HOMES`, by tensor class, and their "total"


def memory_values(sizes: Sizes, limits: Mapping[str, int | None]) -> dict[str, Any]:
    """Makes the values of memory.html.jinja. limits: bytes that there are, by the memory's name."""
    unit, size = memory_unit(max(sizes["total"]))
    rows = [
        {
            "name": name,
            "colour": None if name == "total" else number % COLOURS,
            "cells": [{"bytes": n, "text": f"{n / size:,.2f}" if n else "-"} for n in row],
        }
        for number, (name, row) in enumerate(sizes.items())
    ]
    names = [home.name for home in HOMES]
    bars = [memory_bar(name, sizes, limits.get(name)) for name in names]
    return {"unit": unit, "homes": names, "rows": rows, "bars": bars}


def memory_bar(home: str, sizes: Sizes, limit: int | None) -> dict[str, Any]:
    """Makes the bar of a memory: parts in percent of the bar, and the position of the limit."""
    column = [x.name for x in HOMES].index(home)
    of_class = {name: row[column] for name, row in sizes.items()}
    total = of_class.pop("total")
    length = max(total, limit or 0, 1)
    parts = [
        {"name": name, "percent": round(100 * n / length, 3), "colour": number % COLOURS, "text": gib(n)}
        for number, (name, n) in enumerate(of_class.items())
        if n
    ]
    of = f" of {gib(limit)}" if limit is not None else ""
    return {
        "name": home,
        "text": f"{gib(total)}{of}",
        "parts": parts,
        "limit_percent": round(100 * limit / length, 3) if limit is not None and limit < total else None,
    }


def step_values(p: Prediction, lines: Sequence[str], trace: Mapping[str, Any] | None) -> dict[str, Any]:
    """Makes the values of step.html.jinja. lines: about the step's time. trace: see `prediction.trace`."""
    events = timeline(trace) if trace else None
    return {
        "times": lines,
        "kinds": events["kinds"] if events else [],
        "timeline": script_data(events) if events else None,
        "transfers": list(p.exposed_s),
        "exposed": exposed_rows(p) if p.predicted_step_s is not None else {},
        "files": files_text(p) if p.exposed_in_files_s else "",
        "ends": [(WORDS.get(name, name), *map(milliseconds, both)) for name, both in p.step_at_ends_s.items()],
    }


def timeline(trace: Mapping[str, Any]) -> dict[str, list]:
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
