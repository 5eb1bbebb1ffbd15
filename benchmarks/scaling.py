"""Plans 7B, 70B and 405B on 8 to 4,096 GPUs, and other steps, for docs/scaling.md: predicted time, and what binds it.

    python benchmarks/scaling.py [--only TEXT] [--results FILE] [--again] [--picture FILE]

A row is a model on some GPUs under one layout, planned as by `surojax plan` with the settings that it shows,
which needs the compiler for GPUs and no GPU. Results are kept in docs/scaling.json: a row that it has is compiled only
with `--again`. `--only` takes the rows with this text in their settings. `--picture` draws the rows of the first table.
"""

import argparse
import dataclasses
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import jax

from surojax.config.fields import Config
from surojax.config.flags import parse_flags
from surojax.planner.amounts import GiB
from surojax.planner.rates import DISKS
from surojax.planner.run_plan import Plan, plan

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "scaling.json"
CONFIGS = {"7B": "llama7b", "8B": "llama8b_long", "32B": "qwen32b", "70B": "llama70b", "405B": "llama405b"}
CLASSES = ("residual", "optimizer", "master", "grads", "weights")
ALL = " ".join(f"offload_{x}" for x in CLASSES)
ALL_IN_FILES = " ".join(f"offload_{x}=nvme" for x in CLASSES) + " nvme_path=FOLDER overlap_update"
SHARDED = "zero_level=3 shard_outer"
BOUND = 0.1  # of a step: what takes less time than this does not bind it

GROWING = "From 8 to 4,096 GPUs"
LAYOUTS = "Layouts beside each other"
LONG = "Long sequences"
FILES = "Every class in files"
PUBLISHED = "Beside published rows"


@dataclasses.dataclass(frozen=True)
class Row:
    """A model on GPUs of one kind under a layout. settings: of the config, separated by spaces.

    published: tokens/s of each GPU that others measured with these settings; source: where. disk: of a machine, what
    `--disk` takes; "" without files.
    """

    table: str
    model: str
    gpu: str
    gpus: int
    settings: str
    published: float | None = None
    source: str = ""
    disk: str = ""

    @property
    def key(self) -> str:
        """The key of the row in the results."""
        return f"{self.model} {self.gpus} x {self.gpu} {self.settings}{self.disk and f' on {self.disk}'}"

    def loaded(self) -> Config:
        """The config of this row."""
        changes = [name if "=" in name else f"{name}=true" for name in shlex.split(self.settings)]
        flags = [f"--config.{change}" for change in (f"gpus={self.gpus}", *changes)]
        config = str(ROOT / f"configs/{CONFIGS[self.model]}.py")
        return parse_flags(["--config", config, *flags], argparse.ArgumentParser())[0]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a plan says of a row. Bytes of each GPU; seconds of a step; spent: of these, by what a GPU waits for.

    written_bytes: to files, a step.
    """

    fits: bool
    device_bytes: int
    host_bytes: int
    seconds: float | None
    tokens_per_s: float | None  # of each GPU
    mfu: float | None
    spent: dict[str, float]
    between_machines: list[str]
    file_bytes: int = 0
    written_bytes: int = 0

    @property
    def bound_by(self) -> str:
        """The class that takes the most time besides computing, with its part; "compute" if that is little."""
        if not self.seconds or not self.spent:
            return "-"
        what, seconds = max(self.spent.items(), key=lambda item: item[1])
        part = seconds / self.seconds
        return f"{what} {part:.0%}" if part >= BOUND else "compute"


def result(p: Plan) -> Result:
    """The `Result` of a plan."""
    spent = {
        "collectives": sum(p.exposed_s.get(kind, 0.0) for kind in ("gather", "reduce")),
        "host copies": sum(p.exposed_s.get(kind, 0.0) for kind in ("host in", "host out")),
        "bubble": p.bubble * (p.predicted_step_s or 0.0),
        "files": p.exposed_s.get(DISKS, 0.0),
    }
    return Result(
        fits=p.fits,
        device_bytes=p.device_bytes,
        host_bytes=p.host_bytes,
        seconds=p.predicted_step_s,
        tokens_per_s=p.tokens_per_s_per_gpu,
        mfu=p.mfu,
        spent=spent,
        between_machines=p.between_machines,
        file_bytes=p.nvme_bytes,
        written_bytes=p.nvme_write_bytes,
    )


OF_8B = "sequence_len=8192 sequence_chunks=1 offload_residual=false offload_optimizer=false offload_master=false"
OF_8B += " offload_grads=false offload_weights=false opt_m_dtype=float32 opt_v_dtype=float32"
OF_8B += " recompute_block=false lmhead_chunks=16 per_device_batch_size=2"
SELECTIVE = "recompute_norm recompute_swiglu"
FP8 = "recipe=fp8_current"
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
LONG_8B = "sequence_chunks=1 offload_residual=false offload_optimizer=false offload_master=false offload_grads=false"
LONG_8B += " offload_weights=false"
OF_STAGES = "tp_size=8 pp_size=2 pp_schedule=1f1b"

OF_ONE = "per_device_batch_size=1 gradient_accumulation_steps"
SMALL_STATE = "optimizer=adamw8bit master_dtype=bfloat16"
QLORA = "lora qlora_bnb offload_weights=nvme offload_residual nvme_path=FOLDER"

SAVED = "recompute_block=false recompute_norm recompute_swiglu"

ROWS = (
    Row(GROWING, "7B", "h100", 8, f"zero_level=3 {SAVED} per_device_batch_size=8"),
    Row(GROWING, "7B", "h100", 64, f"zero_level=3 {SAVED} per_device_batch_size=8 dp_replicate_size=2"),
    Row(GROWING, "7B", "h100", 512, f"zero_level=3 {SAVED} per_device_batch_size=8 dp_replicate_size=16"),
    Row(GROWING, "7B", "h100", 4096, f"zero_level=3 {SAVED} per_device_batch_size=8 dp_replicate_size=128"),
    Row(GROWING, "70B", "h100", 8, f"{SHARDED} offload_residual offload_optimizer per_device_batch_size=8"),
    Row(GROWING, "70B", "h100", 64, "zero_level=3 per_device_batch_size=8"),
    Row(GROWING, "70B", "h100", 512, "zero_level=3 per_device_batch_size=8 dp_replicate_size=8"),
    Row(GROWING, "70B", "h100", 4096, "zero_level=3 per_device_batch_size=8 dp_replicate_size=64"),
    Row(GROWING, "405B", "h100", 8, f"{SHARDED} {ALL} per_device_batch_size=1"),
    Row(GROWING, "405B", "h100", 64, f"{SHARDED} offload_residual offload_optimizer per_device_batch_size=1"),
    Row(GROWING, "405B", "h100", 512, f"{SHARDED} offload_residual per_device_batch_size=1 dp_replicate_size=4"),
    Row(GROWING, "405B", "h100", 4096, f"{SHARDED} offload_residual per_device_batch_size=1 dp_replicate_size=32"),
    Row(LAYOUTS, "70B", "rtx4090", 8, f"{SHARDED} {ALL} per_device_batch_size=8"),
    Row(LAYOUTS, "70B", "rtx4090", 8, f"zero_level=3 {ALL} tp_size=2 per_device_batch_size=16"),
    Row(
        LAYOUTS,
        "70B",
        "rtx4090",
        8,
        f"zero_level=3 {ALL} pp_size=8 pp_schedule=1f1b per_device_batch_size=8 gradient_accumulation_steps=8",
    ),
    Row(
        LAYOUTS,
        "70B",
        "rtx4090",
        8,
        f"zero_level=3 {ALL} pp_size=8 pp_schedule=1f1b per_device_batch_size=4 gradient_accumulation_steps=16",
    ),
    Row(LAYOUTS, "405B", "h100", 64, f"zero_level=3 {OF_STAGES} gradient_accumulation_steps=16 optimizer=adamw8bit"),
    Row(LAYOUTS, "405B", "h100", 64, f"zero_level=3 {OF_STAGES} gradient_accumulation_steps=16 offload_residual"),
    Row(LAYOUTS, "405B", "h100", 128, "zero_level=3 tp_size=8 per_device_batch_size=1"),
    Row(LAYOUTS, "405B", "h100", 128, "zero_level=3 tp_size=8 offload_residual per_device_batch_size=4"),
    Row(LONG, "8B", "h200", 8, f"zero_level=3 cp_size=8 sequence_len=1048576 {LONG_8B}"),
    Row(LONG, "8B", "rtx4090", 1, "sequence_len=131072 sequence_chunks=8"),
    Row(FILES, "70B", "rtx4090", 1, f"{ALL_IN_FILES} {OF_ONE}=32", disk="2x7/6"),
    Row(FILES, "70B", "rtx4090", 1, f"{ALL_IN_FILES} {OF_ONE}=32 {SMALL_STATE} device_memory=3", disk="2x7/6"),
    Row(FILES, "32B", "rtx4090", 1, f"{ALL_IN_FILES} {OF_ONE}=32", disk="2x7/6"),
    Row(FILES, "7B", "rtx4060", 1, f"{ALL_IN_FILES} {OF_ONE}=16", disk="7/6"),
    Row(FILES, "405B", "h100", 8, f"{SHARDED} {ALL_IN_FILES} {OF_ONE}=32", disk="8x7/6"),
    Row(FILES, "70B", "rtx4090", 1, f"{QLORA} {OF_ONE}=8", disk="7/6"),
    Row(PUBLISHED, "8B", "h100", 8, f"{SHARDED} {OF_8B} {SELECTIVE}", 6667, f"{TITAN}, table 1"),
    Row(PUBLISHED, "8B", "h100", 8, f"{SHARDED} {OF_8B} {FP8}", 8532, f"{TITAN}, table 1"),
    Row(PUBLISHED, "8B", "h100", 128, f"zero_level=3 {OF_8B} {SELECTIVE}", 6514, f"{TITAN}, table 3"),
    Row(PUBLISHED, "8B", "h100", 128, f"zero_level=3 {OF_8B} {FP8}", 8380, f"{TITAN}, table 3"),
    Row(
        PUBLISHED,
        "7B",
        "h100",
        8,
        f"zero_level=3 {SAVED} sequence_len=4096 opt_m_dtype=float32 opt_v_dtype=float32",
        11361,
        "JAX-Toolbox, docs/frameworks/maxtext/README.md: MaxText, FSDP 8, minimal_flash, 0.721 s a step",
    ),
    Row(
        PUBLISHED,
        "70B",
        "h100",
        256,
        "zero_level=3 tp_size=8 sequence_len=8192 per_device_batch_size=16 lmhead_chunks=64 recipe=fp8_current "
        "opt_m_dtype=float32 opt_v_dtype=float32",
        829,
        f"{TITAN}, table 4; with async TP 876",
    ),
    Row(
        PUBLISHED,
        "405B",
        "h100",
        512,
        "zero_level=3 tp_size=8 pp_size=8 pp_schedule=1f1b gradient_accumulation_steps=32 recipe=fp8_current "
        "opt_m_dtype=float32 opt_v_dtype=float32",
        100,
        f"{TITAN}, table 5; interleaved 128",
    ),
)

OF_PLANS = "settings, GiB of each GPU, GiB of host memory for each, step (s), tokens/s per GPU, MFU"
OF_PLANS += ", GPU hours per 10^9 tokens, bound by, between machines"
OF_PUBLISHED = (
    "settings, GiB of each GPU, predicted tokens/s per GPU, published, predicted / published, bound by, source"
)
OF_FILES = "settings, disks of a machine (GB/s read/written), GiB of each GPU, GiB of host memory for each"
OF_FILES += ", GiB of files in all, step (s), tokens/s in all, MFU, GB written a step, bound by"


def head(row: Row) -> str:
    """The two header lines of the Markdown table of a row."""
    columns = OF_FILES if row.disk else OF_PUBLISHED if row.published else OF_PLANS
    names = ["model", "GPUs", *columns.split(", ")]
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def line(row: Row, planned: Result) -> str:
    """A row of a Markdown table: a planned layout and its result."""
    cells = [row.model, f"{row.gpus:,} x {row.gpu}", f"`{row.settings}`"]
    cells.append(f"{planned.device_bytes / GiB:.1f}{'' if planned.fits else ' (does not fit)'}")
    rate = planned.tokens_per_s
    if row.disk:
        cells.insert(3, row.disk)
        cells += [f"{planned.host_bytes / GiB:.1f}", f"{row.gpus * planned.file_bytes / GiB:,.0f}"]
        if rate and planned.seconds and planned.mfu:
            cells += [f"{planned.seconds:.0f}", f"{row.gpus * rate:,.0f}", f"{planned.mfu:.3f}"]
        else:
            cells += ["-"] * 3
        cells += [f"{row.gpus * planned.written_bytes / 1e9:,.0f}", planned.bound_by]
    elif row.published:
        cells += [f"{rate:,.0f}" if rate else "-", f"{row.published:,.0f}"]
        cells += [f"{rate / row.published:.2f}" if rate else "-", planned.bound_by, row.source]
    else:
        cells.append(f"{planned.host_bytes / GiB:.0f}")
        if rate and planned.seconds and planned.mfu:
            cells += [f"{planned.seconds:.2f}", f"{rate:,.0f}", f"{planned.mfu:.3f}", f"{1e9 / rate / 3600:,.0f}"]
        else:
            cells += ["-"] * 4
        cells += [planned.bound_by, ", ".join(planned.between_machines) or "-"]
    return f"| {' | '.join(cells)} |"


def tables(rows: tuple[Row, ...], results: dict[str, Result]) -> Iterator[str]:
    """Yields the lines of the tables, with the rows that have a result."""
    for table in dict.fromkeys(row.table for row in rows):
        table_rows = [row for row in rows if row.table == table and row.key in results]
        if table_rows:
            yield from ("", f"## {table}", "", head(table_rows[0]))
            yield from (line(row, results[row.key]) for row in table_rows)


def load(file: Path) -> dict[str, Result]:
    """The results in a file; none if there is no file."""
    return {key: Result(**fields) for key, fields in json.loads(file.read_text()).items()} if file.exists() else {}


def picture(rows: tuple[Row, ...], results: dict[str, Result], file: Path) -> None:
    """Draws MFU and cost over the number of GPUs, a line for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    mfu_ax, cost_ax = figure.subplots(1, 2)
    for model in dict.fromkeys(row.model for row in rows if row.table == GROWING):
        model_rows = [row for row in rows if (row.table, row.model) == (GROWING, model) and row.key in results]
        points = [(row.gpus, results[row.key]) for row in model_rows if results[row.key].tokens_per_s]
        gpus = [n for n, _ in points]
        mfu_ax.plot(gpus, [point.mfu for _, point in points], marker="o", label=model)
        cost_ax.plot(gpus, [1e9 / point.tokens_per_s / 3600 for _, point in points if point.tokens_per_s], marker="o")
    mfu_ax.set(ylabel="MFU", ylim=(0, None))
    cost_ax.set(ylabel="GPU hours per 10$^9$ tokens", yscale="log")
    for axes in (mfu_ax, cost_ax):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("H100 GPUs")
        axes.grid(alpha=0.3)
    mfu_ax.legend()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    """Parse the command line, plan what has no result, print the tables and draw the picture."""
    jax.config.update("jax_platforms", "cpu")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="rows with this text in their settings")
    parser.add_argument("--results", metavar="FILE", type=Path, default=RESULTS, help="JSON of what was found")
    parser.add_argument("--again", action="store_true", help="compile rows that have a result, too")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="draw this picture: .svg or .png")
    args = parser.parse_args()
    results = load(args.results)
    rows = tuple(row for row in ROWS if args.only in f"{row.table} {row.key}")
    for row in rows:
        if args.again or row.key not in results:
            results[row.key] = result(plan(row.loaded(), row.gpu, disk=row.disk or None, advise=False))
            print(f"planned: {row.key}", flush=True)
            fields = {key: dataclasses.asdict(x) for key, x in results.items()}
            args.results.write_text(json.dumps(fields, indent=1) + "\n")
    print("\n".join(tables(rows, results)))
    if args.picture:
        picture(rows, results, args.picture)


if __name__ == "__main__":
    main()
