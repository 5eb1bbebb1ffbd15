"""Compiles and simulates the steps whose time the project has goals for, and prints a Markdown table of them.

    python benchmarks/performance.py [--only TEXT] [--also DIR] [--triton]

A row is a step on a GPU: its settings, what is read of its plan, that figure before (commit f3d3e47, 2026-11-22), and
the goal. It is planned as by `surojax plan` with the settings that the row shows, which needs the compiler
for GPUs and no GPU. A second table has the steps that were measured on a GPU, and the errors of their predictions.
`--only` takes the rows with this text in their name. `--also` compiles each by another version of XLA as well, that of
the plugin in a folder:

    pip install --no-deps --target DIR jax==0.11.2 jaxlib==0.11.2 jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2

`--triton` compiles with XLA's own products allowed and 0.11's fusions with slices, as the measured steps were; the step
of the second table that was not measured is there for that comparison.

docs/performance.md holds the tables. Exits with 1 if a goal is missed that was reached before.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
from calibrate import MODELS, SEQUENCE_LEN

from surojax.assembly import xla_options
from surojax.config.fields import Config
from surojax.config.flags import parse_flags
from surojax.placement import cuda_plugin
from surojax.planner import aot
from surojax.planner.amounts import GiB
from surojax.planner.run_plan import Plan, plan

ROOT = Path(__file__).parents[1]
FIVE = "offload_residual offload_optimizer offload_master offload_grads offload_weights"


@dataclasses.dataclass(frozen=True)
class Measure:
    """A figure of a plan. less: whether less is better. digits: behind the point."""

    unit: str
    of: Callable[[Plan], float | None]
    less: bool = False
    digits: int = 0

    def reached(self, value: float, goal: float) -> bool:
        """Whether a value is as good as a goal."""
        return value <= goal if self.less else value >= goal

    def text(self, value: float) -> str:
        """A value as the table prints it."""
        return f"{value:,.{self.digits}f}"


def milliseconds(planned: Plan) -> float | None:
    """Predicted milliseconds of a step."""
    return None if planned.predicted_step_s is None else 1e3 * planned.predicted_step_s


TIME = Measure("ms", milliseconds, less=True)
SPEED = Measure("tokens/s per GPU", lambda planned: planned.tokens_per_s_per_gpu)
MFU = Measure("MFU", lambda planned: planned.mfu, digits=3)
MEMORY = Measure("GiB of device memory", lambda planned: planned.device_bytes / GiB, less=True, digits=2)
RATIO = Measure("x tokens/s of recipe bf16", SPEED.of, digits=2)


@dataclasses.dataclass(frozen=True)
class Row:
    """A step. settings: of the command line, without their "--config.". base: a ratio's other step, by its settings."""

    name: str
    gpu: str
    measure: Measure
    before: float
    goal: float
    settings: str
    base: str | None = None
    config: str = "configs/llama7b.py"

    def flags(self, settings: str, config: str) -> list[str]:
        """Arguments of a command that set the config."""
        return ["--config", config, *(f"--config.{setting}" for setting in settings.split())]

    def loaded(self, settings: str) -> Config:
        """The config with these settings."""
        return parse_flags(self.flags(settings, str(ROOT / self.config)), argparse.ArgumentParser())[0]

    def figure(self, settings: str) -> float:
        """The figure of the step with these settings. Raises ValueError if it is not predicted."""
        planned = plan(self.loaded(settings), self.gpu)
        value = self.measure.of(planned)
        if value is None:
            raise ValueError(f"{self.name}: expected a predicted step, got none: {planned.not_predicted}")
        return value

    def now(self) -> float:
        """The figure of the row."""
        value = self.figure(self.settings)
        return value if self.base is None else value / self.figure(self.base)

    def command(self) -> str:
        """What follows `surojax plan` to plan the step."""
        return " ".join(["--gpu", self.gpu, *self.flags(self.settings, self.config)])


def qwen(name: str) -> str:
    """Settings of a Qwen2.5 model as LLMQ trains it in benchmarks/calibrate.py: bf16, with bf16 master weights."""
    sizes = MODELS[name]
    settings = {
        "model.hidden_size": sizes.hidden,
        "model.intermediate_size": sizes.intermediate,
        "model.num_hidden_layers": sizes.layers,
        "model.num_attention_heads": sizes.heads,
        "model.num_key_value_heads": sizes.key_value_heads,
        "model.vocab_size": sizes.vocabulary,
        "model.tie_word_embeddings": sizes.tied,
        "model.attention_bias": True,
        "sequence_len": SEQUENCE_LEN,
        "master_dtype": "bfloat16",
    }
    return " ".join(f"{field}={value}" for field, value in settings.items())


def batch(sequences: int, microbatches: int) -> str:
    """Settings of the batch of a GPU."""
    return f"per_device_batch_size={sequences} gradient_accumulation_steps={microbatches}"


def memory(name: str, gpu: str, before: float, settings: str, config: str = "configs/llama7b.py") -> Row:
    """A row of the table of device memory in docs/larger-than-the-gpu.md: at most 3 % more than before."""
    return Row(f"memory: {name}", gpu, MEMORY, before, 1.03 * before, f"{batch(1, 2)} {settings}", config=config)


PARTS_AGAIN = "recompute_block=False recompute_norm recompute_swiglu"
STATE = "offload_residual offload_optimizer offload_master"
FP8 = f"{batch(4, 64)} master_dtype=bfloat16"
LLMQ_1_5B = f"{qwen('1.5B')} {PARTS_AGAIN} lmhead_chunks=4"
FIVE_OUTER = f"zero_level=3 shard_outer {FIVE}"
ROWS = (
    Row(
        "LLMQ: Qwen2.5 7B, 1 x RTX 4090",
        "rtx4090",
        SPEED,
        2658,
        2777,
        f"{qwen('7B')} {batch(32, 16)} microbatches_per_fetch=8 {FIVE} overlap_update",
    ),
    Row(
        "LLMQ: Qwen2.5 7B, 4 x RTX 4090",
        "rtx4090",
        SPEED,
        2561,
        2725,
        f"{qwen('7B')} {batch(32, 4)} gpus=4 zero_level=3 {STATE}",
    ),
    Row("LLMQ: Qwen2.5 1.5B, 1 x RTX 4090", "rtx4090", SPEED, 12261, 14100, f"{LLMQ_1_5B} {batch(4, 128)}"),
    Row("LLMQ: Qwen2.5 1.5B, 1 x H100", "h100", SPEED, 52983, 58900, f"{LLMQ_1_5B} {batch(32, 16)}"),
    Row("LLMQ: Qwen2.5 1.5B, 1 x H200", "h200", SPEED, 57308, 58900, f"{LLMQ_1_5B} {batch(32, 16)}"),
    Row(
        "Llama 7B, 1 x RTX 4090, weights on the device, 2 x 2048",
        "rtx4090",
        TIME,
        5353,
        5000,
        f"{batch(2, 1)} {PARTS_AGAIN} lmhead_chunks=1 {STATE} offload_grads overlap_update",
    ),
    Row(
        "Llama 7B, 1 x RTX 4090, five offloads, 2 microbatches of 2048",
        "rtx4090",
        TIME,
        7163,
        5000,
        f"{batch(1, 2)} {FIVE} microbatches_per_fetch=2 overlap_update",
    ),
    Row(
        "Llama 7B, 1 x RTX 4090, five offloads, 8 x 2048",
        "rtx4090",
        TIME,
        9652,
        8600,
        f"{batch(8, 1)} {FIVE} overlap_update",
    ),
    Row("Llama 7B, 4 x RTX 4090, ZeRO-3, 2 x 2048", "rtx4090", TIME, 3011, 2900, f"{batch(2, 1)} gpus=4 zero_level=3"),
    Row(
        "Llama 7B, 1 x H200, five offloads, 8 x 2048",
        "h200",
        TIME,
        3137,
        2900,
        f"{batch(8, 1)} {FIVE} overlap_update",
    ),
    Row("Llama 7B, 1 x H200, blocks recomputed", "h200", MFU, 0.468, 0.55, batch(4, 2)),
    Row("Llama 7B, 1 x H200, norms recomputed", "h200", MFU, 0.567, 0.55, f"{batch(4, 2)} {PARTS_AGAIN}"),
    Row(
        "Llama 7B, 1 x H200, norms recomputed, 8 microbatches", "h200", MFU, 0.594, 0.6, f"{batch(4, 8)} {PARTS_AGAIN}"
    ),
    Row("Llama 7B, 1 x H100, fp8_hybrid", "h100", RATIO, 1.54, 1.35, f"{FP8} recipe=fp8_hybrid", base=FP8),
    Row("Llama 7B, 1 x H100, fp8_current", "h100", RATIO, 1.47, 1.35, f"{FP8} recipe=fp8_current", base=FP8),
    memory("Llama 7B, 1 x RTX 4090", "rtx4090", 76.30, "zero_level=3"),
    memory("Llama 7B, 1 x RTX 4090, state offloaded", "rtx4090", 25.58, f"zero_level=3 {STATE}"),
    memory("Llama 7B, 1 x RTX 4090, five offloads", "rtx4090", 2.68, FIVE_OUTER),
    memory("Llama 7B, 4 x RTX 4090", "rtx4090", 20.73, "gpus=4 zero_level=3"),
    memory("Llama 7B, 4 x RTX 4090, five offloads", "rtx4090", 1.58, f"gpus=4 {FIVE_OUTER}"),
    memory(
        "Qwen 32B sizes, 4 x RTX 4090, five offloads", "rtx4090", 4.50, f"gpus=4 {FIVE_OUTER}", "configs/qwen32b.py"
    ),
    memory(
        "Llama 70B sizes, 8 x H100, state offloaded",
        "h100",
        37.05,
        f"gpus=8 zero_level=3 shard_outer {STATE}",
        "configs/llama70b.py",
    ),
    memory("Llama 70B sizes, 8 x H100, five offloads", "h100", 5.76, f"gpus=8 {FIVE_OUTER}", "configs/llama70b.py"),
)


# Steps that ran on a GPU, with their milliseconds there (benchmarks/results/h200.md, XLA of the plugin 0.11.2), and one
# that did not.
MEASURED: tuple[tuple[Row, int | None], ...] = (
    (
        Row("Llama 7B, 4 x 4 x 2048, blocks recomputed", "h200", TIME, 0, 0, f"{batch(4, 4)} master_dtype=bfloat16"),
        2936,
    ),
    (Row("Llama 7B, 2 x 4 x 2048, norms recomputed", "h200", TIME, 0, 0, f"{batch(4, 2)} {PARTS_AGAIN}"), 1253),
    (Row("Qwen2.5 1.5B, 4 x 32 x 1024", "h200", TIME, 0, 0, f"{LLMQ_1_5B} {batch(32, 4)}"), 2402),
    (
        Row(
            "Llama 7B, 4 x 4 x 2048, fp8_hybrid",
            "h200",
            TIME,
            0,
            0,
            f"{batch(4, 4)} master_dtype=bfloat16 recipe=fp8_hybrid",
        ),
        None,
    ),
)


class Compilers:
    """The versions of XLA that rows are compiled by: the one that is installed, and that of a folder.

    folder: what `pip install --target` made of another version of JAX and its CUDA plugin; None: there is none.
    triton: as in `as_measured`, for the other version.
    """

    def __init__(self, folder: Path | None, triton: bool = False):
        self.folder = folder
        self.options = ["--triton"] * triton
        self.versions = [cuda_plugin.plugin_version_text()]
        if folder is not None:
            code = "from surojax.placement import cuda_plugin; print(cuda_plugin.plugin_version_text())"
            self.versions.append(self.elsewhere(["-c", code]).strip())

    def elsewhere(self, arguments: list[str]) -> str:
        """The output of a Python process with the folder's version. Raises RuntimeError if it fails."""
        paths = [str(self.folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "JAX_PLATFORMS": "cpu"}
        ran = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(f"{self.folder}: {ran.stderr[-2000:]}")
        return ran.stdout

    def figures(self, row: Row) -> list[float]:
        """The figure of a row by each version."""
        if self.folder is None:
            return [row.now()]
        printed = self.elsewhere([__file__, "--figure", row.name, *self.options])
        return [row.now(), json.loads(printed.splitlines()[-1])]


def goals(compilers: Compilers, only: str) -> bool:
    """Prints the table of goals; returns True if a goal is missed that was reached before."""
    others = "".join(f" by {version} |" for version in compilers.versions[1:])
    print(f"| step | before | now |{others} goal | reached | `surojax plan` |")
    print(f"|---|---|---|{'---|' * others.count('|')}---|---|---|")
    lost = False
    for row in ROWS:
        if only not in row.name:
            continue
        now, *other = compilers.figures(row)
        text = row.measure.text
        reached = row.measure.reached(now, row.goal)
        lost = lost or (not reached and row.measure.reached(row.before, row.goal))
        figures = [text(row.before), f"{text(now)} {row.measure.unit}", *map(text, other), text(row.goal)]
        figures += ["yes" if reached else "no", f"`{row.command()}`"]
        print(f"| {row.name} | {' | '.join(figures)} |", flush=True)
    return lost


def errors(compilers: Compilers, only: str) -> None:
    """Prints the table of measured steps: predicted milliseconds, and by how much of the measured ones they are off."""
    columns = "".join(f" by {version} | off by |" for version in compilers.versions)
    print(f"\n| measured on an H200 | ms |{columns}\n|---|---|{'---|---|' * len(compilers.versions)}")
    for row, measured in MEASURED:
        if only in row.name:
            found = "".join(f" {x:,.0f} | {error(x, measured)} |" for x in compilers.figures(row))
            print(f"| {row.name} | {f'{measured:,}' if measured else '-'} |{found}", flush=True)


def error(predicted: float, measured: int | None) -> str:
    """By how much a prediction is off, as text; "-" for a step that was not measured."""
    return "-" if measured is None else f"{100 * (predicted / measured - 1):+.1f} %"


def as_measured() -> None:
    """Compiles with the options that the measured steps had: XLA's own products, and 0.11's fusions with slices."""
    xla_options.PRODUCTS["xla_gpu_enable_triton_gemm"] = True
    aot.XLA_OPTIONS["xla_gpu_enable_triton_gemm"] = True
    xla_options.UNFUSED_SLICES.clear()


def main(argv: list[str] | None = None) -> int:
    """Prints the tables; returns the exit code."""
    jax.config.update("jax_platforms", "cpu")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="rows with this text in their name")
    parser.add_argument("--also", metavar="DIR", type=Path, help="a folder with another version of JAX's CUDA plugin")
    parser.add_argument("--figure", metavar="NAME", help="print the figure of the row of this name alone")
    parser.add_argument("--triton", action="store_true", help="with the options that the measured steps had")
    arguments = parser.parse_args(argv)
    if arguments.triton:
        as_measured()
    if arguments.figure is not None:
        row = next(row for row in (*ROWS, *(row for row, _ in MEASURED)) if row.name == arguments.figure)
        print(json.dumps(row.now()))
        return 0
    compilers = Compilers(arguments.also and arguments.also.resolve(), arguments.triton)
    print(f"Compiled by XLA of the CUDA plugin {' and of '.join(compilers.versions)}.\n")
    lost = goals(compilers, arguments.only)
    errors(compilers, arguments.only)
    return int(lost)


if __name__ == "__main__":
    sys.exit(main())
