"""Writes what is made from declarations: pages, addresses in notebooks, and types of the config's fields for editors.

    python docs/pages.py

tests/test_pages.py compares them with what this would write.
"""

import argparse
import functools
import json
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from surojax.__main__ import GROUPS, VERBS
from surojax.completion import OF_CONFIG, own_parser
from surojax.config import checks
from surojax.config.fields import DEFAULTS, FIELDS, SECTIONS
from surojax.config.flags import add_options, describe_fields
from surojax.convert import merge_parser
from surojax.declared import DeclaredField
from surojax.errors import EXIT_CODES
from surojax.option_names import MERGE, STORED
from surojax.refusals.refusal import refusals_page
from surojax.refused_early import stored_options

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "benchmarks"))

import silicon  # noqa: E402  of benchmarks/

TYPED = FOLDER.parent / "surojax" / "config" / "typed.pyi"
TAKEN = ("data", "optimizer", "objective")  # fields whose names `train` gives more meaning
TYPED_HEAD = '''"""The config as editors see it, by `python docs/pages.py`. When it runs it is a ConfigDict."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

class Section:
    def __contains__(self, key: str) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, key: str) -> Any: ...
    def __setitem__(self, key: str, value: Any) -> None: ...
    def get(self, key: str, default: Any = None) -> Any: ...
    def keys(self) -> Iterable[str]: ...
    def items(self, preserve_field_references: bool = False) -> Iterable[tuple[str, Any]]: ...
    def to_dict(self, visit_map: Any = None, preserve_field_references: bool = False) -> dict[str, Any]: ...
    def copy_and_resolve_references(self) -> Config: ...
    def lock(self) -> Config: ...
    def update_from_flattened_dict(self, flattened_dict: Mapping[str, Any]) -> None: ...
'''
CAMPAIGN = """# A GPU for ten minutes

```sh
python benchmarks/silicon.py --seconds 570 --out results
```

measures what a machine without a GPU can only predict, the most valuable first, and writes `results/silicon.md`:
measured beside predicted. Each item runs alone, for at most twice its estimate; the next one is the first whose
estimate times 1.3 fits into what is left. The first eight are estimated at {first} s. A second call goes on with
`--done results/silicon.json`; `--only NAME,...` chooses. Items whose names end with `-plugin` are for machines with the
CUDA plugin 0.11, and need `--plugin DIR` with a newer one:

```sh
pip install --no-deps --target DIR jax-cuda13-pjrt==0.12.0.1
```

An issue of the form *It ran on a GPU* with that table is the most useful contribution. The list is made from
benchmarks/silicon.py by `python docs/pages.py`.

{items}
"""
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
        "Of a config file as `c.FIELD = VALUE`, on a command line as `--config.FIELD=VALUE`. "
        f"`surojax train --help fields` prints the same list. What does not go together is in "
        f"[another table](refusals.md). {MADE}",
    ]
    for title, section in SECTIONS.items():
        lines += ["", f"## {title}", "", "| field | default | values | what it does |", "|---|---|---|---|"]
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
    return ["| option | what it does |", "|---|---|", *rows] if rows else ["It has no options of its own."]


def commands() -> str:
    """Every verb of the command, with its options and examples."""
    lines = [
        "# Every command",
        "",
        f"`surojax VERB --help` prints what is here, and `surojax --version` the version. {MADE}",
        "",
        "| verb | what it does |",
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
    lines += ["", "## Exit codes", "", "Only `train` and `launch` exit with 75.", "", "| code | meaning |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    return "\n".join([*lines, ""])


def campaign() -> str:
    """Makes the page of the items that the GPU campaign measures."""
    first = sum(item.seconds for item in silicon.ITEMS[:8])
    return CAMPAIGN.format(first=first, items=silicon.items_table())


def literal(choices: Iterable[str | int]) -> str:
    """The type of these values as source."""
    return f"Literal[{', '.join(f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices)}]"


def type_of(field: DeclaredField) -> str:
    """The type of a field's values as source: the choices if there are any, which editors complete."""
    if field.choices:
        return literal(field.choices)
    if field.kind is tuple:
        return "Sequence[dict[str, Any]]"
    words = [literal(field.words)] if field.words else []
    return " | ".join([field.kind.__name__, *words, *(["None"] if field.default is None else [])])


def typed_class(name: str, fields: dict[str, DeclaredField]) -> Iterator[str]:
    """The lines of a class with these fields, each with its help as a docstring, which an editor shows."""
    yield from ("", f"class {name}(Section):")
    for attribute, field in fields.items():
        yield f"    {attribute}: {type_of(field)}"
        yield from textwrap.wrap(f'r"""{field.comment}."""', 116, initial_indent="    ", subsequent_indent="    ")


def keywords(name: str, base: str, fields: dict[str, DeclaredField], without: Collection[str] = ()) -> Iterator[str]:
    """The lines of a TypedDict with these fields, as keywords of a function."""
    yield from ("", f"class {name}({base}, total=False):")
    yield from (f"    {name}: {type_of(field)}" for name, field in fields.items() if name not in without)


def typed() -> str:
    """The classes of the config for editors and type checkers."""
    model, others = {}, {}
    for name, field in FIELDS.items():
        (model if name.startswith("model.") else others)[name.removeprefix("model.")] = field
    update = "    def update(self, *other: Mapping[str, Any] | Section, **fields: Unpack[{}]) -> None: ..."
    lines = [*typed_class("ModelFields", model), update.format("Sizes"), *typed_class("Config", others)]
    lines += ["    model: ModelFields", update.format("Fields")]
    lines += [*keywords("Sizes", "TypedDict", model), *keywords("FieldsOfTrain", "TypedDict", others, TAKEN)]
    lines += ["    model: Sizes", *keywords("Fields", "FieldsOfTrain", {name: others[name] for name in TAKEN})]
    return TYPED_HEAD + "\n".join([*lines, ""])


def stored_help() -> str:
    """The help, options and fields of all verbs, as `surojax.option_names` reads them."""
    verbs = {}
    for name, parser in {**{name: own_parser(name) for name in VERBS}, f"convert {MERGE}": merge_parser()}.items():
        if name in OF_CONFIG:
            add_options(parser)
        parser.formatter_class = functools.partial(parser.formatter_class, width=100)
        about = {"help": parser.format_help(), "takes_fields": name in (*OF_CONFIG, "new"), **stored_options(parser)}
        verbs[name] = about
    known = {
        "fields": {name: field.stored() for name, field in FIELDS.items()},
        "field_help": describe_fields(),
        "verbs": verbs,
    }
    return json_of_lines(known, depth=3) + "\n"


def json_of_lines(value: Any, depth: int) -> str:
    """Formats nested objects as JSON with a line for each of their values, down to a depth."""
    if not depth or not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    lines = (f"{json.dumps(name)}: {json_of_lines(inner, depth - 1)}" for name, inner in value.items())
    return "{\n" + ",\n".join(lines) + "\n}"


def pages() -> dict[Path, str]:
    """The text of each page, and of the types of fields, by its path."""
    texts = {
        "fields.md": fields(),
        "commands.md": commands(),
        "refusals.md": refusals_page(checks.REFUSALS, DEFAULTS),
        "silicon.md": campaign(),
    }
    return {FOLDER / name: text for name, text in texts.items()} | {TYPED: typed(), STORED: stored_help()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
