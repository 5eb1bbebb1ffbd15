"""Plans 7B, 70B and 405B on 8 to 1,024 GPUs, and prints a Markdown table: memory, predicted time, what is exposed.

    python benchmarks/scaling.py [--only TEXT]

A row is a model on some GPUs under one layout, planned as by `python -m surojax.plan` with the settings that it shows,
which needs the compiler for GPUs and no GPU. `--only` takes the rows with this text in their settings.
docs/scaling.md holds the table.
"""

import argparse
import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path

import jax

from surojax.config.fields import Config
from surojax.config.flags import parse
from surojax.planner.advice import GiB
from surojax.planner.plan import Plan, plan

ROOT = Path(__file__).parents[1]
ALL = "offload_residual offload_optimizer offload_master offload_grads offload_weights"
SHARDED = "zero_level=3 shard_outer"
HEAD = (
    "| model | GPUs | settings | GiB of each GPU | GiB of host memory for each | step, s | tokens/s per GPU | MFU "
    "| exposed collectives, s | exposed host copies, s | between machines |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A model on GPUs of one kind under a layout. settings: of the config, separated by spaces."""

    model: str
    gpu: str
    gpus: int
    settings: str

    def loaded(self) -> Config:
        """The config of this row."""
        changes = [name if "=" in name else f"{name}=true" for name in shlex.split(self.settings)]
        flags = [f"--config.{change}" for change in (f"gpus={self.gpus}", *changes)]
        config = str(ROOT / f"configs/llama{self.model.lower()}.py")
        return parse(["--config", config, *flags], argparse.ArgumentParser())[0]

    def line(self, p: Plan) -> str:
        """The row of the table."""
        cells = [self.model, f"{self.gpus:,} x {self.gpu}", f"`{self.settings}`"]
        cells += [f"{p.device_bytes / GiB:.1f}{'' if p.fits else ' (does not fit)'}", f"{p.host_bytes / GiB:.0f}"]
        if p.predicted_step_s is None or p.tokens_per_s_per_gpu is None or p.mfu is None:
            cells += ["-", "-", "-", "-", "-"]
        else:
            of_collectives = sum(p.exposed_s[kind] for kind in ("gather", "reduce"))
            of_copies = sum(p.exposed_s[kind] for kind in ("host in", "host out"))
            cells += [f"{p.predicted_step_s:.2f}", f"{p.tokens_per_s_per_gpu:,.0f}", f"{p.mfu:.3f}"]
            cells += [f"{of_collectives:.2f}", f"{of_copies:.2f}"]
        return f"| {' | '.join([*cells, ', '.join(p.between_machines) or '-'])} |"


ROWS = (
    Row("7B", "h100", 8, f"{SHARDED} per_device_batch_size=4"),
    Row("7B", "h100", 64, f"{SHARDED} dp_replicate_size=8 per_device_batch_size=4"),
    Row("7B", "h100", 1024, f"{SHARDED} dp_replicate_size=128 per_device_batch_size=4"),
    Row("70B", "rtx4090", 8, f"{SHARDED} {ALL} per_device_batch_size=8"),
    Row("70B", "rtx4090", 8, f"zero_level=3 {ALL} tp_size=2 per_device_batch_size=16"),
    Row("70B", "h100", 8, f"{SHARDED} offload_residual offload_optimizer offload_master per_device_batch_size=4"),
    Row("70B", "h100", 16, f"{SHARDED} offload_residual per_device_batch_size=4"),
    Row("70B", "h100", 64, f"{SHARDED} offload_residual per_device_batch_size=4"),
    Row("70B", "h100", 512, f"{SHARDED} dp_replicate_size=8 offload_residual per_device_batch_size=4"),
    Row("405B", "h200", 8, f"{SHARDED} {ALL} per_device_batch_size=1"),
    Row("405B", "h100", 128, "zero_level=3 tp_size=8 offload_residual per_device_batch_size=4"),
    Row("405B", "h100", 1024, "zero_level=3 tp_size=8 offload_residual per_device_batch_size=4"),
)


def lines(only: str) -> Iterator[str]:
    """Yields the lines of the table, each as soon as its step is compiled."""
    yield HEAD
    for row in ROWS:
        if only in f"{row.model} {row.gpu} {row.gpus} {row.settings}":
            yield row.line(plan(row.loaded(), row.gpu, advise=False))


def main() -> None:
    """Parse the command line and print the table."""
    jax.config.update("jax_platforms", "cpu")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="rows with this text in their settings")
    for line in lines(parser.parse_args().only):
        print(line, flush=True)


if __name__ == "__main__":
    main()
