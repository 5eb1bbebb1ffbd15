"""One command for all of surojax.

    surojax train --config tiny
    surojax plan --config llama7b --gpu rtx4090
    surojax --help | --version
    surojax VERB --help

Imports neither JAX nor the verb's module before it knows the verb.
"""

import difflib
import errno
import importlib.metadata
import os
import platform
import runpy
import signal
import sys
from typing import NamedTuple

import surojax
from surojax.command_line import NO_COMMAND
from surojax.errors import REFUSED, ConfigError
from surojax.option_names import help_or_error
from surojax.refused_early import refuse_early


class Verb(NamedTuple):
    """A verb of the command. does: one line for the help. examples: command lines without `surojax VERB`."""

    does: str
    examples: tuple[str, ...]


GROUPS = {
    "before there is a GPU": {
        "new": Verb(
            "a commented config for a model and a GPU, by estimate",
            ("my_run --model llama7b --gpu rtx4090",
             "my_run --model MODEL --gpu h100 --gpus 8 --data chats.jsonl"),
        ),
        "plan": Verb(
            "memory, traffic and predicted time of a step on a GPU",
            ("--config llama7b --gpu rtx4090 --config.gpus=4 --config.zero_level=3",
             "--config llama1b --gpu h100 --tokens 1e9 --price 2.5 --html plan.html"),
        ),
        "studio": Verb(
            "a page in the browser: choose a model and a machine, see what fits and how fast",
            ("--port 8000",
             "runs/tiny"),
        ),
        "fit": Verb(
            "the fastest settings that fit, as a config file",
            ("--config llama7b --gpu rtx4090 --config.gpus=4",
             "--config.model_path=MODEL --gpu rtx4090 --host-memory 64"),
        ),
    },
    "train": {
        "train": Verb(
            "a run, from a config; the same command goes on with it",
            ("--config tiny",
             "--config.model_path=MODEL --config.data=chats.jsonl",
             "--config llama1b --config.gpus=0 --config.data='text/*.jsonl' --config.tokenizer=tokenizer.json"),
        ),
        "data": Verb(
            "prepares a config's data without training, and shows rows as the model sees them",
            ("--config tiny --debug 2",),
        ),
        "distill": Verb(
            "labels a data set with a larger model's next tokens, from which a run learns",
            ("--config.model_path=MODEL --config.data=chats.jsonl --config.distill_path=labels",),
        ),
        "launch": Verb(
            "several processes of a run, started again after errors",
            ("-n 2 --restarts 3 -- surojax train --config tiny --config.gpus=0",),
        ),
    },
    "after it": {
        "report": Verb(
            "loss, norm, tokens/s and memory of runs, side by side",
            ("runs/tiny",
             "runs/first runs/second --plan plan.json --html report.html"),
        ),
        "generate": Verb(
            "continues texts, or answers messages",
            ('--checkpoint runs/tiny --prompt "def main("',
             "--checkpoint runs/chat --chat"),
        ),
        "evaluate": Verb(
            "multiple choice, or tasks of the LM Evaluation Harness",
            ("--checkpoint runs/tiny --questions questions.jsonl",
             "--checkpoint runs/tiny --tasks arc_easy,hellaswag --limit 100"),
        ),
        "convert": Verb(
            "writes a model as a Hugging Face folder or a GGUF file; merges adapters",
            ("--checkpoint runs/tiny --out FOLDER",
             "merge BASE ADAPTER FOLDER",
             "--check FOLDER"),
        ),
    },
    "checks and shell": {
        "doctor": Verb(
            "what this machine's GPU, link, memory and disk do, in minutes",
            ("--output doctor.md",
             "--nvme-path /mnt/nvme --only disk,offloads"),
        ),
        "verify": Verb(
            "trains a small model under every setting, and compares",
            ("--config verify --only 'offload_*'",
             "--config verify --list"),
        ),
        "completion": Verb(
            "a script that completes verbs, options and fields in a shell",
            ("bash > ~/.local/share/bash-completion/completions/surojax",),
        ),
    },
}  # fmt: skip
VERBS = {name: verb for verbs in GROUPS.values() for name, verb in verbs.items()}


def version() -> str:
    """Formats the versions of surojax and of the packages that a bug report needs."""
    try:
        jax = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        jax = "unknown"
    return f"surojax {surojax.__version__} (jax {jax}, Python {platform.python_version()}, {platform.machine()})"


def overview() -> str:
    """Makes the help of the command: every verb in one line."""
    lines = ["usage: surojax VERB ...", "", (surojax.__doc__ or "").partition("\n")[0], ""]
    for title, verbs in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<12}{verb.does}" for name, verb in verbs.items()), ""]
    return "\n".join(
        [*lines, "`surojax VERB --help` lists options and examples, `surojax --version` says the version."]
    )


def examples(name: str) -> str:
    """Formats the examples of a verb, which end `surojax VERB --help`."""
    return "\n".join(["", "examples:", *(f"  surojax {name} {line}" for line in VERBS[name].examples)])


def run_verb(name: str, arguments: list[str]) -> None:
    """Runs a verb as `python -m` runs its module. Its help, and what `refuse_early` refuses, need no such import."""
    sys.argv[1:] = arguments
    dashes = arguments.index("--") if "--" in arguments else len(arguments)
    text, error = help_or_error(name, arguments[:dashes])
    if not text and not error:
        try:
            refuse_early(name, arguments[:dashes])
            if name == "launch" and not arguments[dashes + 1 :]:
                raise ConfigError(NO_COMMAND)
        except ConfigError as refused:
            error = str(refused)
    if error:
        print(f"surojax.{name}: error: {error}", file=sys.stderr)
        sys.exit(REFUSED)
    if text:
        print(f"{text}{examples(name)}")
        return
    runpy.run_module(f"surojax.{name}", run_name="__main__", alter_sys=True)


def open_closed_streams() -> None:
    """Opens /dev/null in place of standard streams that are closed, as services may have them.

    Else the next file that is opened, such as one of a run's state, gets the descriptor, and what libraries print.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r"))


def main() -> None:
    """Runs the command, which ends without a word if whoever reads its output has ended, as `head` does."""
    open_closed_streams()
    try:
        run_arguments()
        sys.stdout.flush()
    except BrokenPipeError:
        forget_output()
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.filename or error.errno not in NOT_WRITTEN:
            raise
        forget_output()
        print(f"surojax: error: could not write the output ({error.strerror})", file=sys.stderr)
        sys.exit(1)


NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


def forget_output() -> None:
    """Replaces standard output, which Python flushes once more when it ends, by /dev/null."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_arguments() -> None:
    """Runs the verb of the command line, or lists the verbs if none is given. A wrong one exits with REFUSED."""
    name, *arguments = sys.argv[1:] or [""]
    if name == "help" and arguments[:1] and arguments[0] in VERBS:
        name, arguments = arguments[0], ["--help"]
    if name in VERBS:
        run_verb(name, arguments)
    elif name in ("", "-h", "--help", "help"):
        print(overview())
    elif name in ("-V", "--version"):
        print(version())
    else:
        near = difflib.get_close_matches(name, VERBS, n=1, cutoff=0.5)
        hint = f"did you mean surojax {near[0]}?" if near else "see surojax --help"
        print(f"surojax: error: expected a verb of {', '.join(VERBS)}, got {name!r}; {hint}", file=sys.stderr)
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
