"""Plans a run without the GPUs: the memory and traffic that it needs, and the predicted time of a step.

    surojax plan --config configs/llama7b.py --gpu rtx4090 --config.gpus=4 [--json FILE] [--host-memory GIB] \
        [--html FILE] [--trace FILE] [--tokens N [--price PER_GPU_HOUR]] [--host-bandwidth GB]

`surojax.planner.run_plan.plan(config, gpu)` is the function behind this command.
"""

import argparse
import dataclasses
import json
import math
import shlex
import sys
import tempfile
from pathlib import Path

import jax

from surojax.config.fields import Config
from surojax.config.flags import parse_flags
from surojax.errors import ConfigError, ending, ends_with_code, short_exit_codes
from surojax.pages.plan_page import PlanRequest, model_name, page
from surojax.planner.drives import DRIVES, disks
from surojax.planner.gpus import GPUS, gpu_key
from surojax.planner.plan_text import cost, plan_table
from surojax.planner.prediction import read_trace
from surojax.planner.run_plan import Plan, plan
from surojax.untrusted import expanded


def check_output(option: str, path: str) -> Path:
    """Checks the path of a file to write, and returns it.

    Raises ConfigError if it cannot be written, before any work is done.
    """
    file = expanded(path)
    problem = "a folder" if file.is_dir() else ""
    if not problem:
        try:
            tempfile.TemporaryFile(dir=file.parent).close()
            with file.open("a") if file.exists() else tempfile.TemporaryFile(dir=file.parent):
                pass
        except OSError as error:
            problem = error.strerror or str(error)
    if problem:
        raise ConfigError(
            f"{option}: expected a file that can be written, got {path!r} ({problem}); choose another path"
        )
    return file


def add_cost(parser: argparse.ArgumentParser) -> None:
    """Adds the options about cost, and about a machine's host memory, that `plan` and `fit` share."""
    parser.add_argument("--tokens", metavar="N", type=float, help="say how many hours so many tokens take: 1e9")
    parser.add_argument("--price", metavar="MONEY", type=float, help="of a GPU hour: say what --tokens cost")
    parser.add_argument(
        "--host-bandwidth",
        metavar="GB",
        type=float,
        help="GB/s that the host memory of a machine moves, reads and writes; assumed if left out",
    )


def add_disk(machine: argparse._ArgumentGroup) -> None:
    """Adds the option for the speed of a machine's disks."""
    machine.add_argument(
        "--disk",
        metavar="DISK",
        help="that holds files (offload_*=nvme): GB/s read and written, as 7.4/6.9, or 2x7.4/6.9 of two; a drive, as "
        f"{next(iter(DRIVES))}, or with :2 for two, of {', '.join(DRIVES)}; or a folder that surojax doctor has "
        "measured; assumed if left out",
    )


def check_cost(args: argparse.Namespace) -> None:
    """Raises ConfigError for invalid values of `add_cost`'s options."""
    for option, value in (
        ("--tokens", args.tokens),
        ("--price", args.price),
        ("--host-bandwidth", args.host_bandwidth),
    ):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{option}: expected more than 0, got {value}; leave it out")
    if args.price is not None and args.tokens is None:
        raise ConfigError("--price: expected --tokens as well, whose cost it says; add --tokens 1e9, for example")


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command's own options."""
    description = f"{(__doc__ or '').partition(chr(10))[0]}\n\n{short_exit_codes('a plan that does not fit')}"
    arguments = argparse.ArgumentParser(prog="surojax plan", description=description)
    machine = arguments.add_argument_group("the machine")
    machine.add_argument("--gpu", metavar="NAME", help=f"the GPU to plan for: {', '.join(GPUS)}")
    machine.add_argument("--host-memory", metavar="GIB", type=float, help="host memory of a machine, to check as well")
    machine.add_argument("--gpus-per-node", metavar="N", type=int, help="GPUs in a machine (8 of most)")
    add_disk(machine)
    output = arguments.add_argument_group("what is written")
    output.add_argument("--json", metavar="FILE", help="write the plan there, as JSON")
    output.add_argument("--html", metavar="FILE", help="write the plan there, as a page to open in a browser")
    output.add_argument(
        "--trace", metavar="FILE", help="write a trace of the simulated step there, for ui.perfetto.dev"
    )
    add_cost(arguments)
    return arguments


def html(p: Plan, trace: Path, argv: list[str], c: Config, args: argparse.Namespace) -> str:
    """Makes the plan's HTML page. trace: the file of its time line, which is missing if no time is predicted."""
    events = None if p.not_predicted else read_trace(trace)
    request = PlanRequest(model_name(c, args.config), c, args.tokens, args.price)
    return page(p, shlex.join(["surojax", "plan", *argv]), events, request=request)


def main(argv: list[str] | None = None) -> None:
    """Parses the command line, plans, and prints the plan. An error ends it with one line (`errors.ending`).

    Exits with 1 if the plan does not fit.
    """
    jax.config.update("jax_platforms", "cpu")  # the plan needs no GPU, and should not occupy one
    try:
        c, args = parse_flags(argv, parser())
        names = {option: getattr(args, option) for option in ("json", "html", "trace")}
        files = {option: check_output(f"--{option}", name) for option, name in names.items() if name is not None}
        args.gpu = gpu_key(args.gpu)
        if args.host_memory is not None and not 0 < args.host_memory < float("inf"):
            raise ConfigError(f"--host-memory: expected GiB, more than 0, got {args.host_memory}; leave it out")
        check_cost(args)
        disks(args.disk, c.rates_file)
        if sys.stderr.isatty():
            print(f"compiling the step for {args.gpu}, which takes a minute or two", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            trace = files.get("trace", Path(folder) / "trace.json")
            planned = plan(
                c,
                args.gpu,
                host_memory=args.host_memory,
                gpus_per_node=args.gpus_per_node,
                host_bandwidth=args.host_bandwidth,
                trace=str(trace) if {"trace", "html"} & files.keys() else None,
                disk=args.disk,
            )
            if "trace" in files and planned.not_predicted:
                raise ConfigError(
                    f"--trace: expected a step whose time is predicted, got {planned.not_predicted}; leave it out"
                )
            texts = {"json": lambda: json.dumps(dataclasses.asdict(planned), indent=2) + "\n"}
            texts["html"] = lambda: html(planned, trace, sys.argv[1:] if argv is None else argv, c, args)
            print(plan_table(planned))
            if args.tokens is not None and planned.tokens_per_s_per_gpu and planned.predicted_range_s:
                tokens = planned.gpus * planned.tokens_per_s_per_gpu * (planned.predicted_step_s or math.nan)
                steps = (planned.predicted_step_s, *planned.predicted_range_s)
                print(cost(args.tokens, args.price, planned.gpus, [s / tokens for s in steps if s is not None]))
            elif args.tokens is not None:
                print("no cost is said: no time is predicted")
            for option in files.keys() & texts.keys():
                files[option].write_text(texts[option](), encoding="utf-8")
        for written in files.values():
            print(f"written: {written}")
        if not planned.fits:
            sys.exit(1)
    except (ConfigError, OSError) as error:
        raise ending("plan", error) from error


if __name__ == "__main__":
    ends_with_code(main)
