"""What the planner says about the time of a step: predicted seconds and tokens/s, what is exposed, and a trace.

timeline.py simulates the compiled step; benchmarks/calibrate.py holds its model of time against published rows.
"""

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from surojax.assembly import Assembly
from surojax.placement.mesh import devices_per_sequence, pipeline_stages
from surojax.planner import costs, hlo, traffic
from surojax.planner.costs import MAIN, STREAMS, TRANSFERS
from surojax.planner.gpus import Gpu
from surojax.planner.hlo import Module
from surojax.planner.stages import in_lockstep
from surojax.planner.timeline import WAITS, Timeline, program, simulate

ERROR = 0.10  # relative, of a prediction: that of the worst row of benchmarks/calibrate.py


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Fields of the `Plan` about time, per step and GPU; None where no time is predicted.

    predicted_range_s: from what the step would take if copy engines did all host transfers, less `ERROR`, to
    `predicted_step_s` plus `ERROR`.
    """

    predicted_step_s: float | None = None
    predicted_range_s: list[float] | None = None
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None  # model FLOPs, each at the peak rate of its dtype, as in `train`
    exposed_s: dict[str, float] = dataclasses.field(default_factory=dict)  # by kind of transfer
    exposed_by_loop_s: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    host_transfers: dict[str, int] = dataclasses.field(default_factory=dict)  # in loops: {"copy_engine", "kernel"}
    not_predicted: str = ""  # why


def predict(module: Module, gpu: Gpu, mesh_shape: Mapping[str, int], *, tokens: int, compute_time: float) -> Prediction:
    """Predicts the time of a step.

    tokens: of a step on each GPU. compute_time: seconds of their model FLOPs at the GPU's peak rates.
    """
    transfers = costs.host_transfers(module)
    if gpu.rates is None:
        reason = f"what a {gpu.name} reaches of its peaks is not in surojax/planner/gpus.py"
        return Prediction(host_transfers=transfers, not_predicted=reason)
    found = simulate(program(module, gpu, mesh_shape))
    if compute_time > found.seconds:  # our attention kernel counts as a pass over memory: its rate was never measured
        reason = "most of its FLOPs are in our attention kernel, whose speed was never measured"
        return Prediction(host_transfers=transfers, not_predicted=reason)
    least = simulate(program(module, gpu, mesh_shape, copies_only=True)).seconds
    exposed = dict.fromkeys(TRANSFERS, 0.0)
    by_loop: dict[str, dict[str, float]] = {}
    for (loop, kind), seconds in found.exposed.items():
        exposed[kind] = exposed.get(kind, 0.0) + seconds
        by_loop.setdefault(loop, {})[kind] = seconds
    return Prediction(
        predicted_step_s=found.seconds,
        predicted_range_s=[least * (1 - ERROR), found.seconds * (1 + ERROR)],
        tokens_per_s_per_gpu=tokens / found.seconds,
        mfu=compute_time / found.seconds,
        exposed_s=exposed,
        exposed_by_loop_s=by_loop,
        host_transfers=transfers,
    )


def of_compiled(text: str, run: Assembly, batch: traffic.Batch, gpu: Gpu) -> Prediction:
    """The `Prediction` of a compiled step of a run. text: its HLO, `jax.stages.Compiled.as_text()`."""
    return of_module(hlo.parse(text), run, batch, gpu)


def of_module(module: Module, run: Assembly, batch: traffic.Batch, gpu: Gpu) -> Prediction:
    """The `Prediction` of a step from its parsed program; with stages an estimate, see `stages.in_lockstep`."""
    module = in_lockstep(module, run, batch.microbatches)
    tokens = batch.tokens * batch.microbatches // (devices_per_sequence(run.mesh) * pipeline_stages(run.mesh))
    compute_time = tokens * traffic.compute_time(gpu, traffic.token_flops(run, batch.sequence_len))
    return predict(module, gpu, run.mesh.shape, tokens=tokens, compute_time=compute_time)


def comparison(predicted: Prediction, durations_s: Sequence[float], tokens: int) -> str:
    """A line with measured beside predicted tokens/s of all GPUs; "" if nothing was predicted or measured.

    durations_s: of steps; their median is compared, without the first one if there are others. tokens: of a step.
    """
    if predicted.predicted_step_s is None or predicted.predicted_range_s is None or not durations_s:
        return ""
    seconds = statistics.median(durations_s[1:] or durations_s)
    low, high = (tokens / t for t in reversed(predicted.predicted_range_s))
    expected = tokens / predicted.predicted_step_s
    ratio = tokens / seconds / expected
    return (
        f"tok/s: measured {tokens / seconds:,.0f}, predicted {expected:,.0f} ({low:,.0f} to {high:,.0f}), "
        f"measured / predicted {ratio:.2f}"
    )


def write_trace(file: Path, module: Module, gpu: Gpu, mesh_shape: Mapping[str, int], title: str) -> None:
    """Writes a trace of a simulated step, for https://ui.perfetto.dev or chrome://tracing: see `trace`."""
    found = simulate(program(module, gpu, mesh_shape), events=True)
    file.write_text(json.dumps(trace(found, title)) + "\n")


def trace(timeline: Timeline, title: str) -> dict:
    """The events of a timeline in Chrome's trace format, in order of their beginning; a row for each stream."""
    rows = (MAIN, WAITS, *(stream for stream in STREAMS if stream != MAIN))
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
