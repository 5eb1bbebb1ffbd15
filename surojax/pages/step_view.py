"""The parts of a page that show a step: memory by tensor class as bars and a table, and its time, on a time line.

A plan's page has them of the planned step, a run's page of the step that ran. The time line's events are those of
`prediction.trace`.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from surojax.pages.template import COLOURS, packed_data
from surojax.placement.home import HOMES
from surojax.planner.amounts import gib, memory_unit
from surojax.planner.costs import ATTENTION, DEVICE_COPY, GATHER, HOST_IN, HOST_OUT, PASS, PRODUCT, REDUCE
from surojax.planner.plan_text import exposed_rows, files_text
from surojax.planner.prediction import Prediction, milliseconds
from surojax.planner.rates import DISKS, UNCERTAIN
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
    bars = [memory_bar(name, sizes, limits.get(name)) for name, size in zip(names, sizes["total"], strict=True) if size]
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
    """Makes the values of step.html.jinja. lines: about the step's time. trace: see `prediction.trace`.

    Kinds and loops of which nothing is exposed are left out.
    """
    events = timeline(trace) if trace else None
    kinds = [kind for kind, seconds in p.exposed_s.items() if seconds]
    number = {kind: position for position, kind in enumerate(p.exposed_s)}
    rows = exposed_rows(p) if kinds and p.predicted_step_s is not None else {}
    loops = {name for name, of_loop in p.exposed_by_loop_s.items() if any(of_loop.values())}
    words = {name: rate.word for name, rate in UNCERTAIN.items()}
    return {
        "times": [*lines, *(["Compute waits for no transfer."] if p.predicted_step_s and not kinds else [])],
        "kinds": events["kinds"] if events else [],
        "timeline": packed_data(events) if events else None,
        "transfers": kinds,
        "exposed": {
            name: [cells[number[kind]] for kind in kinds]
            for name, cells in rows.items()
            if name in loops or name == "total"
        },
        "files": files_text(p) if p.exposed_in_files_s else "",
        "ends": [(words.get(name, name), *map(milliseconds, both)) for name, both in p.step_at_ends_s.items()],
    }


def timeline(trace: Mapping[str, Any]) -> dict[str, list]:
    """Converts a trace for timeline.js: each name once, and events in columns, in order of their beginning.

    Times are whole multiples of 10 ns, of which a beginning is counted from the one before.
    """
    threads = [x for x in trace["traceEvents"] if x["name"] == "thread_name"]
    rows = {x["tid"]: x["args"]["name"] for x in threads}
    events = sorted((x for x in trace["traceEvents"] if x["ph"] == "X"), key=lambda x: x["ts"])
    used = sorted({x["tid"] for x in events})
    kinds = [kind for kind in KINDS if any(x["cat"] == kind for x in events)]
    kinds += sorted({x["cat"] for x in events} - KINDS.keys())
    names = {name: number for number, name in enumerate(dict.fromkeys(x["name"] for x in events))}
    loops = {name: number for number, name in enumerate(dict.fromkeys(x["args"]["loop"] for x in events))}
    begins = [round(100 * x["ts"]) for x in events]
    return {
        "rows": ["exposed: compute waits" if rows[tid] == WAITS else rows[tid] for tid in used],
        "kinds": [KINDS.get(kind, kind) for kind in kinds],
        "names": list(names),
        "loops": list(loops),
        "columns": [
            [used.index(x["tid"]) for x in events],
            [kinds.index(x["cat"]) for x in events],
            [names[x["name"]] for x in events],
            [loops[x["args"]["loop"]] for x in events],
            [now - before for before, now in itertools.pairwise([0, *begins])],
            [round(100 * (x["ts"] + x["dur"])) - now for x, now in zip(events, begins, strict=True)],
            [round(x["args"]["MB"], 3) for x in events],
        ],
    }
