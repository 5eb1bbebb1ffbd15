"""Writes what is made from declarations: docs/fields.md, docs/commands.md, docs/refusals.md, addresses in notebooks.

    python docs/pages.py

tests/test_pages.py compares them with what this would write.
"""

import argparse
import re
import tomllib
from pathlib import Path

from surojax.__main__ import GROUPS, VERBS
from surojax.completion import OF_CONFIG, own_parser
from surojax.config import checks
from surojax.config.fields import DEFAULTS, SECTIONS
from surojax.convert import merge_parser
from surojax.declared import DeclaredField
from surojax.errors import EXIT_CODES
from surojax.refusals.refusal import refusals_page

FOLDER = Path(__file__).parent
MADE = "It is made by `python docs/pages.py`; a test compares it with the program."


def cell(text: str) -> str:
    """A text as a cell of a table in Markdown."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def values(field: DeclaredField) -> str:
    """The values that a field may have."""
    if field.choices:
        return ", ".join(f"`{choice}`" if str(choice) else '`""`' for choice in field.choices)
    return cell(", ".join([field.kind_in_words, *(within.expected for within in field.ranges)]))


def fields() -> str:
    """Every field of the config, by section."""
    lines = [
        "# Every field",
        "",
        "Of a config file as `c.FIELD = VALUE`, on a command line as `--config.FIELD=VALUE`. `surojax train --help` "
        f"prints the same list. What does not go together is in [another table](refusals.md). {MADE}",
    ]
    for title, section in SECTIONS.items():
        lines += ["", f"## {title}", "", "| field | default | values | |", "|---|---|---|---|"]
        lines += [f"| `{f.name}` | `{f.default_text}` | {values(f)} | {cell(f.comment)} |" for f in section]
    return "\n".join([*lines, ""])


def options(parser: argparse.ArgumentParser) -> list[str]:
    """The options of a parser as rows of a table."""
    rows = []
    formatter = argparse.HelpFormatter("")
    for action in parser._actions:
        if action.help != argparse.SUPPRESS and action.dest != "help":
            name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
            value = f" {action.metavar or action.dest.upper()}" if action.option_strings and action.nargs != 0 else ""
            rows.append(f"| `{name}{value}` | {cell(formatter._expand_help(action))} |")
    return ["| option | |", "|---|---|", *rows] if rows else ["It has no options of its own."]


def commands() -> str:
    """Every verb of the command, with its options and examples."""
    lines = [
        "# Every command",
        "",
        "`surojax VERB ...` is `python -m surojax.VERB ...`. `surojax VERB --help` prints what is here, and "
        f"`surojax --version` the version. {MADE}",
        "",
        "| verb | |",
        "|---|---|",
        *(f"| [{name}](#{name}) | {verb.does} |" for name, verb in VERBS.items()),
    ]
    for verbs in GROUPS.values():
        for name, verb in verbs.items():
            lines += ["", f"## {name}", "", f"{verb.does[0].upper()}{verb.does[1:]}.", "", "```sh"]
            lines += [*(f"surojax {name} {line}" for line in verb.examples), "```", ""]
            if name in OF_CONFIG:
                lines += [
                    "Takes `--config FILE`, a Python file or a name of configs/, and [every field](fields.md).",
                    "",
                ]
            lines += options(own_parser(name))
            if name == "convert":
                lines += ["", "`convert merge BASE ADAPTER [ADAPTER ...] DIR`:", "", *options(merge_parser())]
    lines += ["", "## Exit codes", "", "Only `train` and `launch` exit with 75.", "", "| code | |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    return "\n".join([*lines, ""])


def notebooks() -> dict[Path, str]:
    """The notebooks by their paths, with the repository of pyproject.toml in their Colab buttons and install cells."""
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
    repository = project["urls"]["Repository"].removeprefix("https://github.com/")
    address = re.compile(r"(colab\.research\.google\.com/github/|git\+https://github\.com/)[\w.-]+/[\w.-]+")
    paths = sorted((FOLDER.parent / "notebooks").glob("*.ipynb"))
    return {path: address.sub(rf"\g<1>{repository}", path.read_text()) for path in paths}


def pages() -> dict[Path, str]:
    """The text of each page, and of each notebook, by its path."""
    texts = {"fields.md": fields(), "commands.md": commands(), "refusals.md": refusals_page(checks.REFUSALS, DEFAULTS)}
    return {FOLDER / name: text for name, text in texts.items()} | notebooks()


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
