"""The planner's prediction of the time of a step: predicted seconds and tokens/s, what is exposed, and a trace.

timeline.py simulates the compiled step; benchmarks/calibrate.py holds its model of time against published rows.

A prediction has a range. The step is simulated again with each rate at its ends (rates.py), and as if copy engines did
every host transfer. Rates err independently, so their deviations add up as the root of the sum of their squares, faster
and slower ones apart. A step that was measured here with the same settings is known to `AGAIN`.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surojax.assembly import xla_options
from surojax.assembly.assemble import Assembly
from surojax.own_files import read_own
from surojax.placement.mesh import devices_per_sequence, pipeline_stages
from surojax.planner import products, traffic
from surojax.planner.costs import GATHER, HOST_IN, HOST_OUT, MAIN, REDUCE, STREAMS, TRANSFERS
from surojax.planner.disks import ASSUMED_DISKS, Disks
from surojax.planner.file_time import SimulatedStep
from surojax.planner.gpus import Gpu
from surojax.planner.hlo import Module
from surojax.planner.rates import CALIBRATED, DISKS, UNCERTAIN
from surojax.planner.stages import with_rounds
from surojax.planner.timeline import WAITS, Timeline
from surojax.step.several_programs import Program

TRACE_FORM = {"traceEvents": [dict]}
MOST_TRACE_BYTES = 1 << 30
LAUNCHES_END = 2.0  # times as long as launches are taken to last, at the slow end
AGAIN = 0.03  # relative, of a step that was measured with the same settings: clocks, temperature, other machines
# Kinds of work without which a rate changes nothing.
NEEDED = {
    "host": {HOST_IN, HOST_OUT},
    "duplex": {HOST_IN, HOST_OUT},
    "dram": {HOST_IN, HOST_OUT, GATHER, REDUCE},
    "link": {GATHER, REDUCE},
    "network": {GATHER, REDUCE},
    "collective_sms": {GATHER, REDUCE},
}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Fields of the `Plan` about time, per step and GPU; None where no time is predicted.

    predicted_range_s: what follows from what is known of the rates, see above. step_at_ends_s: for each rate that
    matters, the predicted step with it at its fast and at its slow end.
    """

    predicted_step_s: float | None = None
    predicted_range_s: list[float] | None = None
    step_at_ends_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    hangs_on: str = ""  # the rate with the largest part in the range, with its ends and where they come from
    calibrated: bool = False  # whether there are published rows of this GPU
    uncorrected_s: float | None = None  # `predicted_step_s` without the factor that was measured here
    corrected: str = ""  # what was measured here, and the file that says so
    replaced: list[str] = dataclasses.field(default_factory=list)  # rates that were measured here
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None  # model FLOPs, each at the peak rate of its dtype, as in `train`
    exposed_s: dict[str, float] = dataclasses.field(default_factory=dict)  # by kind of transfer
    exposed_by_loop_s: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    exposed_in_files_s: dict[str, float] = dataclasses.field(default_factory=dict)  # of disks, by tensor class
    host_transfers: dict[str, int] = dataclasses.field(default_factory=dict)  # in loops: {"copy_engine", "kernel"}
    launches_s: float | None = None  # of the host's thread, see `costs.launch_seconds`; None: CUDA graphs launch them
    not_predicted: str = ""  # why

    @property
    def launch_bound(self) -> bool:
        """Whether the host takes longer to launch the step than it runs."""
        return bool(self.launches_s and self.predicted_step_s and self.launches_s >= self.predicted_step_s)


def predict(step: SimulatedStep, gpu: Gpu, *, tokens: int, compute_time: float, has_graphs: bool = True) -> Prediction:
    """Predicts the time of a step: of its simulation, or of its launches if these take longer.

    tokens: of a step on each GPU. compute_time: seconds of their model FLOPs at the GPU's peak rates. has_graphs:
    whether XLA may launch kernels by CUDA graphs, whose launches are taken to cost nothing.
    """
    transfers = step.host_transfers
    found = step.timeline(gpu)
    launches = None if has_graphs else gpu.seen.factor * step.launches(gpu)
    if compute_time > found.seconds:  # our attention kernel counts as a pass over memory: its rate was never measured
        reason = "most of its FLOPs are in our attention kernel, whose speed was never measured"
        return Prediction(host_transfers=transfers, not_predicted=reason)
    ends = at_ends(step, gpu, found)
    exposed = dict.fromkeys(TRANSFERS, 0.0)
    by_loop: dict[str, dict[str, float]] = {}
    for (loop, kind), seconds in found.exposed.items():
        exposed[kind] = exposed.get(kind, 0.0) + seconds
        by_loop.setdefault(loop, {})[kind] = seconds
    seconds = max(found.seconds, launches or 0.0)
    low, high = _range(gpu, found.seconds, ends)
    return Prediction(
        predicted_step_s=seconds,
        predicted_range_s=[low, max(high, LAUNCHES_END * (launches or 0.0))],
        step_at_ends_s=ends,
        hangs_on=_hangs_on(gpu, ends),
        calibrated=gpu.products_from == CALIBRATED,
        uncorrected_s=seconds / gpu.seen.factor,
        corrected=gpu.seen.note,
        replaced=list(gpu.seen.replaced),
        tokens_per_s_per_gpu=tokens / seconds,
        mfu=compute_time / seconds,
        exposed_s=exposed,
        exposed_by_loop_s=by_loop,
        exposed_in_files_s=found.exposed_rows,
        host_transfers=transfers,
        launches_s=launches,
    )


def at_ends(step: SimulatedStep, gpu: Gpu, found: Timeline) -> dict[str, list[float]]:
    """Seconds of a step with each rate at its ends, {rate: [fast, slow]}; rates that change nothing are left out.

    found: the step as it is predicted. "copies" are host transfers by kernels, if copy engines did them.
    """

    def seconds(name: str, end: float) -> float:
        other = dataclasses.replace(gpu, rates=gpu.rates.with_end(name, end))
        return step.timeline(other).seconds

    ends = {
        name: [seconds(name, span.fast), seconds(name, span.slow)]
        for name, span in gpu.spans().items()
        if not NEEDED.get(name) or NEEDED[name] & found.busy.keys()
    }
    ends["copies"] = [step.timeline(gpu, copies_only=True).seconds, found.seconds]
    if step.parts:
        disks = [step.disks.times(end) for end in (step.disks.span.fast, step.disks.span.slow)]
        ends[DISKS] = [dataclasses.replace(step, disks=x).timeline(gpu).seconds for x in disks]
    return {name: both for name, both in ends.items() if both[1] - both[0] > 1e-3 * found.seconds}


def _range(gpu: Gpu, step: float, ends: Mapping[str, Sequence[float]]) -> list[float]:
    """The range of a step of so many seconds, [fast, slow]."""
    if gpu.seen.same:
        return [step * (1 - AGAIN), step * (1 + AGAIN)]
    faster = math.hypot(*(max(0.0, step - fast) for fast, _ in ends.values()))
    slower = math.hypot(*(max(0.0, slow - step) for _, slow in ends.values()))
    shipped = step / gpu.seen.factor  # what other steps took says less of this one
    return [min(step - faster, shipped), max(step + slower, shipped)]


def milliseconds(seconds: float) -> str:
    """Milliseconds as text, with one decimal below 100."""
    return f"{1e3 * seconds:,.{0 if seconds >= 0.1 else 1}f}"


def duration(seconds: float) -> str:
    """Seconds as text, in milliseconds below 10 s."""
    return f"{milliseconds(seconds)} ms" if seconds < 10 else f"{seconds:,.1f} s"


def _hangs_on(gpu: Gpu, ends: Mapping[str, Sequence[float]]) -> str:
    """Names the rate that widens the range most, with the times at its ends; "" if there is no range."""
    if gpu.seen.same or not ends:
        return ""
    name = max(ends, key=lambda name: ends[name][1] - ends[name][0])
    fast, slow = map(milliseconds, ends[name])
    if name == "copies":
        return f"whether copy engines do the host transfers that are kernels in this program: {fast} to {slow} ms"
    if name == DISKS:
        return f"{name}: {fast} to {slow} ms"
    span = gpu.spans()[name]
    word, _, fields = UNCERTAIN[name]
    value = getattr(gpu.rates, fields[0])
    known = "half to twice" if name == "latencies" else f"{value * span.slow:.2f} to {value * span.fast:.2f}"
    return f"{word} ({known}, {span.source}): {fast} to {slow} ms"


def simulated_step(
    modules: Sequence[Module],
    run: Assembly,
    batch: traffic.BatchShape,
    parts: Sequence[Program] = (),
    machines: int = 1,
    disks: Disks = ASSUMED_DISKS,
) -> SimulatedStep:
    """The simulated step of parsed programs; with stages an estimate, see `stages.with_rounds`.

    parts, machines, disks: see `SimulatedStep`.
    """
    in_lockstep = [with_rounds(module, run, batch, lockstep=True) for module in modules]
    return SimulatedStep(in_lockstep, run.mesh.shape, parts, machines, disks)


def step_prediction(step: SimulatedStep, run: Assembly, batch: traffic.BatchShape, gpu: Gpu) -> Prediction:
    """The `Prediction` of a step of a run."""
    if run.engine.table.in_files and pipeline_stages(run.mesh) > 1:
        return Prediction(not_predicted="state in files, and stages that wait for each other")
    tokens = batch.tokens * batch.microbatches // (devices_per_sequence(run.mesh) * pipeline_stages(run.mesh))
    compute_time = tokens * products.compute_time(gpu, products.token_flops(run, batch.sequence_len))
    has_graphs = xla_options.has_graphs(run)
    return predict(step, gpu, tokens=tokens, compute_time=compute_time, has_graphs=has_graphs)


def write_trace(file: Path, timeline: Timeline, title: str) -> None:
    """Writes a timeline with its events, for https://ui.perfetto.dev or chrome://tracing: see `trace`."""
    file.write_text(json.dumps(trace(timeline, title)) + "\n")


def read_trace(file: Path) -> dict[str, Any] | None:
    """Reads what `write_trace` wrote; None if there is no file. Raises OSError and ValueError, see `read_own`."""
    return read_own(file, TRACE_FORM, MOST_TRACE_BYTES) if file.exists() else None


def trace(timeline: Timeline, title: str) -> dict:
    """The events of a timeline in Chrome's trace format, in order of their beginning; a row for each stream."""
    rows = (MAIN, WAITS, *(stream for stream in STREAMS if stream != MAIN), DISKS)
    names = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"{title}, simulated"}}]
    for number, row in enumerate(rows):
        names.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": row}})
        names.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}})
    events = [
        {
            "ph": "X",
            "pid": 0,
            "tid": rows.index(event.stream),
            "name": event.name,
            "cat": event.kind,
            "ts": 1e6 * event.begin,
            "dur": 1e6 * (event.end - event.begin),
            "args": {"loop": event.loop, "MB": event.bytes / 1e6},
        }
        for event in sorted(timeline.events, key=lambda event: event.begin)
    ]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}
