"""Plans a run without the GPUs: the memory and traffic that it needs, and the predicted time of a step.

    python -m surojax.plan --config configs/llama7b.py --gpu rtx4090 --config.gpus=4 [--json FILE] [--host-memory GIB] \
        [--trace FILE] [--tokens N [--price PER_GPU_HOUR]] [--host-bandwidth GB]

`surojax.planner.plan.plan(config, gpu)` is the function behind this command.
"""

import argparse
import dataclasses
import json
import math
import tempfile
from pathlib import Path

import jax

from surojax.config.flags import parse
from surojax.errors import ConfigError, ending, ends_with_code, short_exit_codes
from surojax.planner.gpus import GPUS
from surojax.planner.plan import plan
from surojax.planner.report import cost, table
from surojax.untrusted import expanded


def check_path(option: str, path: str) -> Path:
    """Returns the file to write. Raises ConfigError if it cannot be written, before any work is done."""
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
    """Adds the options about cost, and about the host memory of a machine, that `plan` and `fit` share."""
    parser.add_argument("--tokens", metavar="N", type=float, help="say how many hours so many tokens take: 1e9")
    parser.add_argument("--price", metavar="MONEY", type=float, help="of a GPU hour: say what --tokens cost")
    parser.add_argument(
        "--host-bandwidth",
        metavar="GB",
        type=float,
        help="GB/s that the host memory of a machine moves, reads and writes; assumed if left out",
    )


def check_cost(args: argparse.Namespace) -> None:
    """Raises ConfigError for values of `add_cost`'s options that make no sense."""
    for option, value in (
        ("--tokens", args.tokens),
        ("--price", args.price),
        ("--host-bandwidth", args.host_bandwidth),
    ):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{option}: expected more than 0, got {value}; leave it out")
    if args.price is not None and args.tokens is None:
        raise ConfigError("--price: expected --tokens as well, whose cost it says; add --tokens 1e9, for example")


def main(argv: list[str] | None = None) -> None:
    """Parse the command line, plan, and print the plan. An error ends it with one line (`errors.ending`)."""
    jax.config.update("jax_platforms", "cpu")  # the plan needs no GPU, and should not occupy one
    description = f"{(__doc__ or '').partition(chr(10))[0]}\n\n{short_exit_codes()}"
    parser = argparse.ArgumentParser(prog="python -m surojax.plan", description=description)
    parser.add_argument("--gpu", metavar="NAME", help=f"the GPU to plan for: {', '.join(GPUS)}")
    parser.add_argument("--json", metavar="FILE", help="write the plan there, as JSON")
    parser.add_argument(
        "--trace", metavar="FILE", help="write a trace of the simulated step there, for ui.perfetto.dev"
    )
    parser.add_argument("--host-memory", metavar="GIB", type=float, help="host memory of a machine, to check as well")
    parser.add_argument("--gpus-per-node", metavar="N", type=int, help="GPUs in a machine (8 of most)")
    add_cost(parser)
    try:
        c, args = parse(argv, parser)
        file = check_path("--json", args.json) if args.json is not None else None
        trace = check_path("--trace", args.trace) if args.trace is not None else None
        if args.gpu is None:
            raise ConfigError(f"no GPU given: pass --gpu NAME, one of {', '.join(GPUS)}")
        if args.host_memory is not None and not 0 < args.host_memory < float("inf"):
            raise ConfigError(f"--host-memory: expected GiB, more than 0, got {args.host_memory}; leave it out")
        check_cost(args)
        found = plan(
            c,
            args.gpu,
            host_memory=args.host_memory,
            gpus_per_node=args.gpus_per_node,
            host_bandwidth=args.host_bandwidth,
            trace=str(trace) if trace else None,
        )
        print(table(found))
        if args.tokens is not None and found.tokens_per_s_per_gpu and found.predicted_range_s:
            tokens = found.gpus * found.tokens_per_s_per_gpu * (found.predicted_step_s or math.nan)
            steps = (found.predicted_step_s, *found.predicted_range_s)
            print(cost(args.tokens, args.price, found.gpus, [s / tokens for s in steps if s is not None]))
        elif args.tokens is not None:
            print("no cost is said: no time is predicted")
        if file:
            file.write_text(json.dumps(dataclasses.asdict(found), indent=2) + "\n")
        for written in filter(None, (file, trace)):
            print(f"written: {written}")
    except (ConfigError, OSError) as error:
        raise ending("plan", error) from error


if __name__ == "__main__":
    ends_with_code(main)
