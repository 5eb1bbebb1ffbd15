"""Refuses a command line before JAX is loaded: missing and bad options, values of fields, and paths that do not exist.

What it raises, the verb would raise too, from the same declarations: help.json has the options of every verb, and the
type and range of every field. What it cannot judge it passes.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surojax.command_line import NO_CONFIG, field_value, file_of_config, parsed_options, split_flags
from surojax.data import files
from surojax.declared import DeclaredField
from surojax.errors import ConfigError, refusing
from surojax.exchange.hub import FOLDER, OF_MODEL, is_model_name
from surojax.option_names import MERGE, read_stored
from surojax.planner.gpus import gpu_key
from surojax.untrusted import TRAINED, check_there

TYPES = {"int": int, "float": float}  # types of options, by name
ACTIONS = {argparse._StoreTrueAction: "store_true", argparse._AppendAction: "append"}
KEPT = "model/source.json"  # in an output_dir: the run has copies of its model's small files
RUN = "the folder of a run, with metrics.jsonl"
OF_DATA = ("train", "data", "distill")  # verbs that read data
BUILT_IN = "stdlib"  # names of data sets that begin so are no files


def stored_options(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Returns the options of a parser as JSON holds them; `made_parser` makes a parser of them."""
    options = []
    for action in parser._actions:
        if action.dest == "help":
            continue
        how: dict[str, Any] = {"action": ACTIONS.get(type(action), "store"), "metavar": action.metavar}
        how["default"] = None if isinstance(action.default, (int, float)) else action.default
        if how["action"] in ("store", "append"):
            kind = getattr(action.type, "__name__", None)
            how |= {"type": kind, "nargs": action.nargs, "choices": action.choices and list(action.choices)}
        if action.option_strings:
            how |= {"dest": action.dest, "required": action.required}
        options.append(
            [action.option_strings or [action.dest], {k: v for k, v in how.items() if v not in (None, False)}]
        )
    groups = parser._mutually_exclusive_groups
    either = {action.dest: group.required for group in groups for action in group._group_actions}
    return {"options": options, "either": either}


def made_parser(verb: str, stored: Mapping[str, Any]) -> argparse.ArgumentParser:
    """Makes a parser that takes the options that `stored_options` returned, and raises ConfigError."""
    parser = refusing(argparse.ArgumentParser(prog=f"surojax {verb}", add_help=False))
    parser.allow_abbrev = not stored["takes_fields"]
    either = stored["either"]
    group = parser.add_mutually_exclusive_group(required=any(either.values())) if either else parser
    for names, how in stored["options"]:
        to = group if how.get("dest") in either else parser
        kind = {"type": TYPES[how["type"]]} if "type" in how else {}
        to.add_argument(*names, **how | kind)
    return parser


def refuse_early(verb: str, words: Sequence[str]) -> None:
    """Raises ConfigError for a command line that is wrong whatever the files that it names hold.

    words: of the verb, up to `--`. Unknown options and fields are not looked for, see `option_names.help_or_error`.
    """
    known = read_stored()
    if verb == "convert" and words[:1] == [MERGE]:
        verb, words = f"{verb} {MERGE}", words[1:]
    stored = known["verbs"][verb]
    parser = made_parser(verb, stored)
    fields = {name: DeclaredField.restored(name, of) for name, of in known["fields"].items()}
    takes_fields = stored["takes_fields"]
    rest, overrides = split_flags(list(words), parser, fields) if takes_fields else (list(words), [])
    of_config = "--config" in parser._option_string_actions
    args = vars(parsed_options(parser, rest, fields) if of_config else parser.parse_args(rest))
    values = {name: field_value(fields, name, text) for name, text in overrides}
    for name, value in values.items():
        if value is not None:
            fields[name].check_type(value)
            fields[name].check(value)
    if args.get("config"):
        file_of_config(args["config"])
    elif of_config and "model_path" not in values and not args.get("list"):
        raise ConfigError(NO_CONFIG)
    if "gpu" in args:
        gpu_key(args["gpu"])
    _check_paths(args, values)
    if of_config and not args["config"] and verb in OF_DATA and not (values.get("data") or values.get("datasets")):
        raise ConfigError(files.NO_DATA)


def _check_paths(args: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a path that does not exist. args: options by name. values: fields' by name."""
    if (checkpoint := args.get("checkpoint")) and not is_model_name(checkpoint):
        check_there("--checkpoint", checkpoint, TRAINED)
    for name in args.get("runs") or ():
        check_there("RUN", name, RUN)
    for source in (values.get("data"), values.get("eval_data")):
        if source and not source.startswith(BUILT_IN):
            _check_data(source)
    if args.get("config"):  # it may name the folder where a run has copies of a model that is gone
        return
    output_dir = Path(values.get("output_dir", "runs/finetune"))
    model = values.get("model_path", "")
    if model and not is_model_name(model) and not (output_dir / KEPT).exists():
        check_there("model_path", model, FOLDER, OF_MODEL)


def _check_data(source: str) -> None:
    """Raises ConfigError if an entry of a list of files, folders and globs matches nothing and names no set."""
    from surojax.data.readers import SUFFIXES, check_set_name  # loads numpy

    for item in files.split_names(source):
        if item and files.find_with_splits(item, SUFFIXES) is None:
            check_set_name(item)
