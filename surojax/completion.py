"""Prints a script that completes verbs, options, fields and names of configs of the command `surojax` in a shell.

    surojax completion bash > ~/.local/share/bash-completion/completions/surojax
    surojax completion zsh > "${fpath[1]}/_surojax"
    surojax completion fish > ~/.config/fish/completions/surojax.fish

The script is static: it starts no Python at a TAB. shtab, of the extra `completion`, writes it.
"""

import argparse
import importlib
from collections.abc import Iterable
from typing import Any

from surojax import command_line
from surojax.__main__ import VERBS
from surojax.config import flags
from surojax.config.fields import FIELDS
from surojax.errors import ConfigError, ending, ends_with_code, refusing, short_exit_codes
from surojax.planner.gpus import GPUS

SHELLS = ("bash", "zsh", "fish")
OF_CONFIG = ("train", "distill", "plan", "fit", "verify", "data")  # verbs with --config and fields
FILES = ("FILE", "DIR", "MODEL", "BASE", "ADAPTER", "RUN")  # metavars of paths
PATHS = ("checkpoint", "questions", "include_path", "tokenizer", "json")  # options of paths without such a metavar


def own_parser(name: str) -> argparse.ArgumentParser:
    """Returns the parser of a verb's own options."""
    return importlib.import_module("surojax.data.__main__" if name == "data" else f"surojax.{name}").parser()


def options(name: str) -> argparse.ArgumentParser:
    """Returns the parser of a verb without its help; if the verb takes a config, with an option for each field."""
    with_fields = own_parser(name)
    for action in with_fields._actions:
        if {"--gpu", "--plan"} & set(action.option_strings):
            action.choices = tuple(GPUS)
    if name in OF_CONFIG:
        flags.add_options(with_fields)
        for field in FIELDS.values():
            choices = [str(x) for x in field.choices if str(x)] or None
            with_fields.add_argument(f"--config.{field.name}", choices=choices, help=field.comment)
    return with_fields


def names_or_files(names: Iterable[str]) -> dict[str, Any]:
    """Returns the completion of a name of a config, or a file, in the form that shtab takes."""
    function, words = "_surojax_configs", " ".join(names)
    preamble = {
        "bash": f'{function}() {{ compgen -W "{words}" -- "$1"; compgen -f -- "$1"; }}',
        "zsh": f"{function}() {{ compadd {words}; _files }}",
        "fish": f"function {function}; printf '%s\\n' {words}; __fish_complete_path (commandline -ct); end",
    }
    return {"bash": function, "zsh": function, "fish": f"({function})", "preamble": preamble}


def script(shell: str) -> str:
    """Makes the completion script for a shell. Raises ConfigError if shtab is not installed."""
    try:
        import shtab  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            "completion: expected the package shtab, got none; pip install 'surojax[completion]'"
        ) from error
    command = argparse.ArgumentParser(prog="surojax", description="Train language models larger than the GPUs.")
    command.add_argument("--version", action="store_true", help="print the version")
    verbs = command.add_subparsers()
    for name, verb in VERBS.items():
        verb_options = options(name)
        for action in verb_options._actions:
            if action.metavar in FILES or action.dest in PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            if action.dest == "config":
                action.complete = names_or_files(command_line.configs())  # type: ignore[attr-defined]
        verbs.add_parser(name, parents=[verb_options], help=verb.does, add_help=False, conflict_handler="resolve")
    return shtab.complete(command, shell)


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command's options."""
    arguments = argparse.ArgumentParser(prog="surojax completion", description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("shell", choices=SHELLS, help="the shell that is to complete")
    arguments.epilog = short_exit_codes()

    return refusing(arguments)


def main(argv: list[str] | None = None) -> None:
    """Parses the command line and prints the script. An error ends it with one line (`errors.ending`)."""
    try:
        print(script(parser().parse_args(argv).shell))
    except ConfigError as error:
        raise ending("completion", error) from error


if __name__ == "__main__":
    ends_with_code(main)
