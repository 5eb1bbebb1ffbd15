"""Answers what needs no verb's module, and so no JAX: `--help`, and options and fields of unknown names.

help.json has every verb's help and options; `python docs/pages.py` writes it from their parsers, and a test compares.
"""

import difflib
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

SHORT = {"lr": ("learning_rate",), "qlora": ("lora", "qlora_bnb")}  # other names of fields; the second sets two
STORED = Path(__file__).with_name("help.json")
ALL_FIELDS = "fields"  # `--help fields`
HELP = {"-h", "--help"}
MERGE = "merge"  # `convert merge` has options of its own


def read_stored() -> dict[str, Any]:
    """Reads {"fields": {name: `DeclaredField.stored`}, "field_help": text, "verbs": {verb: about it}}.

    About a verb: "help": text, "takes_fields", and "options" and "either" of `refused_early.stored_options`.
    """
    return json.loads(STORED.read_text(encoding="utf-8"))


def no_field(name: str, fields: Iterable[str]) -> str:
    """Returns the error message for an unknown field, with the field that was probably meant."""
    names = list(fields)
    near = difflib.get_close_matches(name, [*names, *(n.removeprefix("model.") for n in names)], n=1, cutoff=0.67)
    full = near and (near[0] if near[0] in names else f"model.{near[0]}")
    hint = f"did you mean {full!r}?" if full else f"--help {ALL_FIELDS} lists every field"
    return f"config has no field {name!r}: {hint}"


def unknown_option(word: str, options: Iterable[str], fields: Collection[str], configs: Collection[str] = ()) -> str:
    """Returns the error message for an unknown word of a command line.

    options: of the command, with dashes. fields: names that it takes as well; none if it takes no config. configs:
    names, of which one may have been given without --config.
    """
    name = word.partition("=")[0]
    known = [*(option.lstrip("-").replace("-", "_") for option in options), *fields, *(SHORT if fields else ())]
    near = difflib.get_close_matches(name.strip("-").replace("-", "_"), known, n=1, cutoff=0.67)
    written = near and (near[0] if near[0] in fields or near[0] in SHORT else near[0].replace("_", "-"))
    meant = f"did you mean --{written}?" if written else "see --help"
    if fields and (word.endswith(".py") or word in configs):
        meant = f"did you mean --config {word}?"
    expected = ": fields are set with --FIELD=VALUE" if fields else ""
    return f"unknown option {word!r}{expected}; {meant}"


def help_or_error(verb: str, words: list[str]) -> tuple[str, str]:
    """Returns (help to print, "") if a command line asks for it, ("", error) for an unknown option, else ("", "").

    words: of the verb, up to `--`.
    """
    if verb == "convert" and words[:1] == [MERGE]:
        verb, words = f"{verb} {MERGE}", words[1:]
    known = read_stored()
    of_verb = known["verbs"][verb]
    fields = list(known["fields"]) if of_verb["takes_fields"] else []
    options = ["--help", *(name for names, _ in of_verb["options"] for name in names if name.startswith("--"))]
    for number, word in enumerate(words):
        if word in HELP:
            lists_fields = fields and words[number + 1 : number + 2] == [ALL_FIELDS]
            return (known["field_help"] if lists_fields else of_verb["help"]), ""
        name = word.partition("=")[0]
        if not name.startswith("--") or name == "--" or " " in name:
            continue
        if name.startswith("--config.") and fields:
            if (field := name.removeprefix("--config.")) not in fields and not _holds(field, fields):
                return "", no_field(field, fields)
        elif not _is_known(name, options, fields):
            return "", unknown_option(word, options, fields)
    return "", ""


def _is_known(option: str, options: Collection[str], fields: Collection[str]) -> bool:
    """True if a verb has this option; without fields the beginning of a name is enough, as argparse has it."""
    if fields and ((field := option.removeprefix("--").replace("-", "_")) in fields or field in SHORT):
        return True
    return option in options or (not fields and any(known.startswith(option) for known in options))


def _holds(name: str, fields: Iterable[str]) -> bool:
    """True if a name is a section, such as `model`; it is refused with a list of its fields."""
    return any(field.startswith(f"{name}.") for field in fields)
