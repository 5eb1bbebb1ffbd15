"""Plans a run without the GPUs: the memory and traffic that it needs, and the predicted time of a step.

    python -m surojax.plan --config configs/llama7b.py --gpu rtx4090 --config.gpus=4 [--json FILE] [--host-memory GIB] \
        [--trace FILE]

`surojax.planner.plan.plan(config, gpu)` is the function behind this command.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import jax

from surojax.config.flags import parse
from surojax.errors import ConfigError
from surojax.planner.gpus import GPUS
from surojax.planner.plan import plan
from surojax.planner.report import table
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


def main(argv: list[str] | None = None) -> None:
    """Parse the command line, plan, and print the plan. An error prints one line and exits with code 1."""
    jax.config.update("jax_platforms", "cpu")  # the plan needs no GPU, and should not occupy one
    parser = argparse.ArgumentParser(prog="python -m surojax.plan", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpu", metavar="NAME", help=f"the GPU to plan for: {', '.join(GPUS)}")
    parser.add_argument("--json", metavar="FILE", help="write the plan there, as JSON")
    parser.add_argument(
        "--trace", metavar="FILE", help="write a trace of the simulated step there, for ui.perfetto.dev"
    )
    parser.add_argument("--host-memory", metavar="GIB", type=float, help="host memory of a machine, to check as well")
    parser.add_argument("--gpus-per-node", metavar="N", type=int, help="GPUs in a machine (8)")
    try:
        c, args = parse(argv, parser)
        file = check_path("--json", args.json) if args.json is not None else None
        trace = check_path("--trace", args.trace) if args.trace is not None else None
        if args.gpu is None:
            raise ConfigError(f"no GPU given: pass --gpu NAME, one of {', '.join(GPUS)}")
        if args.host_memory is not None and not 0 < args.host_memory < float("inf"):
            raise ConfigError(f"--host-memory: expected GiB, more than 0, got {args.host_memory}; leave it out")
        nodes = args.gpus_per_node
        found = plan(
            c, args.gpu, host_memory=args.host_memory, gpus_per_node=nodes, trace=str(trace) if trace else None
        )
        print(table(found))
        if file:
            file.write_text(json.dumps(dataclasses.asdict(found), indent=2) + "\n")
        for written in filter(None, (file, trace)):
            print(f"written: {written}")
    except (ConfigError, OSError) as error:
        sys.exit(f"surojax.plan: error: {error}")


if __name__ == "__main__":
    main()
