"""A plan as text, as `surojax plan` prints it."""

from collections.abc import Iterable, Sequence

from pallas_kernels.flash_attention import HEADS
from surojax.placement import cuda_plugin
from surojax.placement.home import HOMES
from surojax.planner import aot
from surojax.planner.amounts import gib, memory_unit
from surojax.planner.candidate import RESERVE
from surojax.planner.disks import wear
from surojax.planner.footprint import DEFAULT_POOL, HOST_POOL, POOL_SETTING
from surojax.planner.gpus import GPUS, POOL
from surojax.planner.prediction import Prediction, milliseconds
from surojax.planner.run_plan import Plan

ATTENTION = {
    "mosaic": "flash attention within each (kernel of pallas_kernels), whose memory grows with S",
    "xla": f"attention by XLA, with S x S scores in memory; the kernel takes {HEADS}",
}


def documents(attention: str, cp_method: str = "ulysses") -> str:
    """A line that says how the documents of a packed row are separated, by this implementation of attention."""
    if cp_method != "ulysses":
        scores = "by XLA, with s/2 x s/2 scores in memory" if attention == "xla" else "by a kernel of pallas_kernels"
        return f"documents in a row: attention of pairs of pieces (cp_method={cp_method}) {scores}"
    return f"documents in a row: {ATTENTION[attention]}"


def plan_table(p: Plan) -> str:
    """The plan as text."""
    axes = " x ".join(f"{name}={size}" for name, size in p.mesh.items())
    lines = [f"plan: {p.parameters / 1e6:,.1f}M parameters on {p.gpus} x {GPUS[p.gpu].label} ({axes})"]
    if p.between_machines:
        lines.append(f"between machines: {', '.join(p.between_machines)}")
    if p.estimate:
        lines.append(f"ESTIMATE from shapes: no compiler for GPUs is installed here; to compile the step: {aot.EXTRA}")
    else:
        lines.append(f"compiled by XLA of the CUDA plugin {p.xla}; another version makes another program")
        if sum(p.host_transfers.values()) and (slow := cuda_plugin.copies_slowly()):
            lines.append(slow)
    if p.packed:
        lines += [documents(attention, p.cp_method) for attention in p.attention.split(", ")]
    lines += [p.experts] * bool(p.experts)
    rows = memory_rows(p)
    name, unit = memory_unit(max(rows["total"]))
    lines += ["", f"  {f'{name} per GPU':<16}" + "".join(f"{home.name:>10}" for home in HOMES)]
    lines += [f"  {kind:<16}{_cells(sizes, unit)}" for kind, sizes in rows.items()]
    recomputed = p.rematerialised
    what = f"{recomputed['count']:,} operations, {gib(recomputed['bytes'])} of results, most in {recomputed['largest']}"
    lines += [
        "",
        f"of that temporary: {gib(p.device_temp_bytes)} on the device, {gib(p.host_temp_bytes)} on the host",
        f"computed again by XLA to save memory: {what if recomputed['count'] else 'nothing'}",
        "",
    ]
    copies = {"host to device": p.h2d_bytes, "device to host": p.d2h_bytes}
    others = {
        "within host memory": p.within_host_bytes,
        "read from NVMe": p.nvme_read_bytes,
        "written to NVMe": p.nvme_write_bytes,
    }
    moved = copies | {name: size for name, size in others.items() if size}
    name, unit = memory_unit(max([*moved.values(), *(x["bytes"] for x in p.collectives)]))
    lines.append(f"  {'per step and GPU':<30}{'count':>8}{name:>10}{'textbook':>10}")
    for x in p.collectives:
        sizes = _cells([x["bytes"], x["textbook_bytes"]], unit)
        lines.append(f"  {x['op'] + ' over ' + x['axis']:<30}{x['count'] or '-':>8}{sizes}")
    lines += [f"  {name:<30}{'':>8}{_cells([size], unit)}" for name, size in moved.items()]
    if p.disks:
        lines += ["", f"disks: {p.disks}", wear(p.gpus_per_node * p.nvme_write_bytes, p.drive_tbw)]
    return "\n".join([*lines, *prediction_lines(p), "", *verdict(p)])


def memory_rows(p: Plan) -> dict[str, list[int]]:
    """Bytes per GPU in each of `HOMES`, by tensor class; then the working space, and the total."""
    totals = [p.device_bytes, p.host_bytes, p.nvme_bytes]
    rows = {kind: [sizes[home.name] for home in HOMES] for kind, sizes in p.classes.items()}
    rest = [t - sum(sizes[home.name] for sizes in p.classes.values()) for t, home in zip(totals, HOMES, strict=True)]
    return rows | {"working space": [max(0, r) for r in rest], "total": totals}


def _cells(sizes: Iterable[float], unit: float) -> str:
    """Sizes in a unit as cells of a row, "-" for 0."""
    return "".join(f"{size / unit:>10.2f}" if size else f"{'-':>10}" for size in sizes)


def prediction_lines(p: Plan) -> list[str]:
    """Lines of predicted time, exposed transfers, and what runs host transfers in loops; or why there are none."""
    lines = ["", *time_lines(p)]
    if p.predicted_step_s is None:
        return lines
    kinds = list(p.exposed_s)
    lines.append(f"  {'exposed ms':<17}" + "".join(f"{kind:>13}" for kind in kinds))
    lines += [f"  {loop:<17}" + "".join(f"{cell:>13}" for cell in cells) for loop, cells in exposed_rows(p).items()]
    if p.exposed_in_files_s:
        lines.append(f"  of disks: {files_text(p)}")
    if any(p.host_transfers.values()):
        engine = p.host_transfers["copy_engine"]
        kernel = p.host_transfers["kernel"]
        note = ", which occupy the multiprocessors" if kernel else ""
        lines.append(f"host transfers in loops: {engine} by copy engine, {kernel} by kernel{note}")
    return lines


def launches(p: Prediction) -> str:
    """A line that says that the host's launches take longer than the kernels."""
    return (
        f"  launch-bound: without CUDA graphs the host takes about {milliseconds(p.launches_s or 0.0)} ms to launch "
        "what runs for less; larger batches or models change it"
    )


def time_lines(p: Plan) -> list[str]:
    """The predicted time, its range, and how long stages idle; or why no time is said."""
    idle = [f"pipeline: a stage idles {p.bubble:.1%} of a step (bubble)"] if p.bubble else []
    if p.predicted_step_s is None or p.predicted_range_s is None:
        estimated = p.estimated_step_s
        about = f"; estimated from shapes: {milliseconds(estimated)} ms a step" if estimated is not None else ""
        return [f"no time is predicted: {p.not_predicted}{about}", *idle]
    low, high = map(milliseconds, p.predicted_range_s)
    rate = p.tokens_per_s_per_gpu or 0.0
    head = f"predicted: {1e3 * p.predicted_step_s:,.1f} ms a step ({low} to {high}), "
    lines = [
        head + f"{rate:,.0f} tokens/s per GPU, {p.gpus * rate:,.0f} in all, MFU {p.mfu:.3f}, by XLA {p.xla}",
        *range_lines(p),
    ]
    if p.launch_bound:
        lines.append(launches(p))
    return lines + [f"{line}; the predicted time is an estimate, of stages that go in lockstep" for line in idle]


def exposed_rows(p: Prediction) -> dict[str, list[str]]:
    """Exposed milliseconds as text, by loop and then in total, for each kind of `exposed_s`."""
    rows = p.exposed_by_loop_s | {"total": p.exposed_s}
    return {loop: [f"{1e3 * row.get(kind, 0.0):,.1f}" for kind in p.exposed_s] for loop, row in rows.items()}


def files_text(p: Prediction) -> str:
    """Exposed milliseconds of disks as text, by tensor class, the longest first."""
    by_class = sorted(p.exposed_in_files_s.items(), key=lambda row: -row[1])
    return ", ".join(f"{name} {1e3 * seconds:,.1f}" for name, seconds in by_class) + " ms exposed"


def range_lines(p: Plan) -> list[str]:
    """Lines that say where a GPU's rates come from, and which one a predicted time hangs on most."""
    source = f"not calibrated: no published row of this GPU; its products are {GPUS[p.gpu].products_from}"
    if p.calibrated:
        source = "its products are fitted to published rows of this GPU"
    return [f"  {p.corrected or source}"] + [f"  most of the range: {p.hangs_on}"] * bool(p.hangs_on)


def cost(tokens: float, price: float | None, gpus: int, seconds: Sequence[float]) -> str:
    """A line with the hours that so many tokens take, and the money. price: of a GPU hour.

    seconds: of a token on all GPUs: as predicted, and the ends of the range if there is one.
    """

    def all_of(unit: float, digits: int) -> str:
        found = [f"{s * tokens / unit:,.{digits}f}" for s in seconds]
        return found[0] + (f" ({found[1]} to {found[2]})" if len(found) == 3 else "")

    hours = f"{tokens:,.0f} tokens: {all_of(3600, 1)} hours on {gpus} GPU{'s' if gpus > 1 else ''}"
    money = f"; {all_of(3600 / (price * gpus), 2)} at {price:g} per GPU hour" if price is not None else ""
    return f"{hours}{money}; evaluations, checkpoints and time that is lost come on top"


def verdict(p: Plan) -> list[str]:
    """Lines that say whether the run fits into memory, and if not which changes make it fit."""
    name = GPUS[p.gpu].label
    device = f"{gib(p.device_bytes)} of {gib(p.device_limit_bytes)}"
    over = p.device_bytes > p.device_limit_bytes
    usable = f"{POOL:.0%} of each {name} but for {gib(RESERVE)}, which cuDNN's workspaces may take"
    lines = [f"{'does not fit' if over else 'fits'}: {device}, which is {usable}"]
    if not over and p.device_bytes > DEFAULT_POOL * GPUS[p.gpu].memory_bytes:
        lines.append(f"  with {POOL_SETTING} in the environment: JAX takes {DEFAULT_POOL} by itself")
    if p.host_limit_bytes is not None:
        needed = gib(p.need.host)
        limit = gib(p.host_limit_bytes)
        enough = p.need.host <= p.host_limit_bytes
        whose = "all" if p.gpus == p.gpus_per_node else f"{p.gpus_per_node}"
        fits = "fits" if enough else "does not fit"
        lines.append(f"{fits}: {needed} of {limit}, which is {HOST_POOL:.0%} of host memory, for {whose} GPUs")
    return lines + [f"  {'' if i else 'would change it: '}{change}" for i, change in enumerate(p.changes)]
