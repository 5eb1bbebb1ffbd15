"""Writes a commented config for a model and a GPU, with the settings that are fastest by estimate.

    surojax new my_run --model llama7b --gpu rtx4090
    surojax new my_run --model MODEL --gpu h100 --gpus 8 --data chats.jsonl
    surojax new my_run --model MODEL --gpu rtx4090 --qlora --config.sequence_len=4096

Nothing is compiled: 7B takes 7 s of a core for one GPU, 34 s for four.
`surojax fit` compiles the best settings and knows more.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from surojax import command_line
from surojax.config import flags
from surojax.config.changes import changed
from surojax.config.fields import FIELDS, Config
from surojax.config.write import check_new, config_file
from surojax.errors import ConfigError, ending, ends_with_code, need, refusing, short_exit_codes
from surojax.planner.amounts import gib
from surojax.planner.candidate import Candidate, memory_limits
from surojax.planner.gpus import GPUS, gpu_key, with_nodes
from surojax.planner.remedies import adapter_candidates
from surojax.planner.run_plan import checked
from surojax.planner.search import Space, best
from surojax.sizes import MOST_GPUS

DATA = "data/*.jsonl"  # what stands for the data if none is named,
EXAMPLE = "stdlib"  # but for a config that reads Python's own source


def given(
    model: str, gpus: int, data: str, output_dir: str, overrides: Sequence[tuple[str, str | None]] = ()
) -> Config:
    """Returns the config to begin with.

    model: a name in `command_line.configs`, or a value of `model_path`. overrides: fields and texts of their values.
    Raises ConfigError.
    """
    c = flags.config_of_model(model, "--model", lora=flags.trains_adapters(overrides))
    c.gpus = gpus
    if not data:
        data = DATA if c.model_path or c.data != EXAMPLE else EXAMPLE
    c.data = data
    c.output_dir = output_dir
    flags.override_all(c, overrides)
    return c


def fastest_estimated(c: Config, gpu: str, host_memory: float) -> Candidate:
    """Finds the settings that fit and are fastest by estimate.

    host_memory: GiB of a machine. Raises ConfigError if none do.
    """
    facts = with_nodes(gpu, None, None)
    space = Space(checked(c, gpu), facts, memory_limits(facts, host_memory))
    fastest = best(space)
    if fastest is None:
        found = adapter_candidates(space.of(few=True))
        fits = [f"{what} need {candidate.need.text()}" for what, candidate in found if candidate]
        raise ConfigError(
            f"--gpu: expected {c.gpus} x {GPUS[gpu].label} to hold it, got no settings with which they do; "
            f"{'; '.join([*fits, 'surojax fit says what would change it'])}"
        )
    return fastest


def config_docstring(name: str, model: str, gpu: str, gpus: int, fastest: Candidate) -> str:
    """Makes the docstring of the config."""
    host = f" and {gib(fastest.need.host)} of host memory" if fastest.need.host else ""
    return "\n".join(
        [
            f"{model} on {gpus} x {GPUS[gpu].label}.",
            "",
            f"    surojax plan --config {name}.py --gpu {gpu}",
            f"    surojax train --config {name}.py",
            "",
            f"Estimated, not compiled: {gib(fastest.need.device)} on each GPU{host}, {fastest.seconds:.3g} s a step.",
            f"`surojax fit --config {name}.py --gpu {gpu}` compiles the best settings.",
            "",
        ]
    )


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command's options."""
    made = argparse.ArgumentParser(prog="surojax new", description=(__doc__ or "").partition("\n")[0])
    made.add_argument("name", metavar="NAME", help="the config is written to NAME.py, its run to runs/NAME")
    made.add_argument(
        "--model",
        required=True,
        help="a name of configs/, whose sizes are taken, or a Hugging Face folder or name, .gguf",
    )
    made.add_argument("--gpu", metavar="NAME", required=True, help="the GPU, as `surojax plan` takes it: rtx4090, H100")
    made.add_argument("--gpus", metavar="N", type=int, default=1, help="number of GPUs (default: 1)")
    made.add_argument(
        "--data",
        metavar="FILES",
        default="",
        help="text, instructions or conversations; left out: the config has what stands for it",
    )
    made.add_argument(
        "--host-memory", metavar="GIB", type=float, default=math.inf, help="of a machine; unlimited if left out"
    )
    made.epilog = short_exit_codes()

    return refusing(made)


def main(argv: list[str] | None = None) -> None:
    """Parses the command line, searches and writes. An error ends it with one line (`errors.ending`)."""
    jax.config.update("jax_platforms", "cpu")  # the search needs no GPU, and should not occupy one
    try:
        own = parser()
        rest, overrides = command_line.split_flags(sys.argv[1:] if argv is None else argv, own, FIELDS)
        args = own.parse_args(rest)
        need(args.name.isidentifier(), "NAME", "letters, digits and _", args.name, "choose another name")
        need(1 <= args.gpus <= MOST_GPUS, "--gpus", f"1 to {MOST_GPUS:,}", args.gpus, "correct it")
        need(args.host_memory > 0, "--host-memory", "GiB, more than 0", args.host_memory, "leave it out")
        file = Path(f"{args.name}.py")
        check_new("NAME", file)
        gpu = gpu_key(args.gpu)
        c = given(args.model, args.gpus, args.data, f"runs/{args.name}", overrides)
        fastest = fastest_estimated(c, gpu, args.host_memory)
        text = config_docstring(args.name, args.model, gpu, c.gpus, fastest)
        file.write_text(config_file(changed(c, fastest.change), text, commented=True), encoding="utf-8")
        print(f"written: {file}; surojax train --config {file}")
        if c.data == DATA:
            print(f"  set data in it: {DATA!r} stands for it")
        if c.tokenizer == "bytes" and not c.model_path:
            print("  add c.tokenizer to it, unless the model is to read bytes")
    except (ConfigError, OSError) as error:
        raise ending("new", error) from error


if __name__ == "__main__":
    ends_with_code(main)
