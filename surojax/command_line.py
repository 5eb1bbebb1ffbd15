"""Reads command lines without JAX: config files by name, and the texts that set fields."""

import argparse
import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from surojax.declared import KINDS, DeclaredField
from surojax.errors import ConfigError, nearest_name, need
from surojax.option_names import SHORT, no_field, unknown_option
from surojax.untrusted import expanded, parse_json

PACKAGE = Path(__file__).parent
WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
NO_CONFIG = (
    "no config given: pass --config NAME or FILE, for example --config tiny, or --config.model_path=MODEL to fine-tune "
    "a model; see --help"
)

COMMAND = "surojax train ..."  # that `launch` starts
NO_COMMAND = f"expected -- and a command behind the options, like -- {COMMAND}, got none; write it"

type Fields = Mapping[str, DeclaredField]


def configs() -> dict[str, Path]:
    """The config files that come with surojax, by name: those in configs/, which a wheel has in the package."""
    folders = (PACKAGE / "configs", PACKAGE.parent / "configs")
    folder = next((folder for folder in folders if (folder / "tiny.py").is_file()), folders[0])
    return {file.stem: file for file in sorted(folder.glob("*.py"))}


def is_config_name(path: str) -> bool:
    """True if a text is meant as a name of `configs`, not as a path. Raises ConfigError if no file can be called so."""
    return re.fullmatch(r"\w+", path) is not None and not expanded(path).exists()


def config_named(name: str, option: str, otherwise: str) -> Path:
    """Returns the file of `configs` with this name. Raises ConfigError if there is none.

    option: that gave the name. otherwise: what else the option takes.
    """
    hint = nearest_name(name, configs(), f"choose one, or {otherwise}")
    need(name in configs(), option, f"a name of {', '.join(configs())}", name, hint)
    return configs()[name]


def file_of_config(path: str) -> Path:
    """Returns the file of a config, by a name of `configs` or a path. Raises ConfigError if there is none."""
    if is_config_name(path):
        return config_named(path, "--config", "a Python file")
    file = expanded(path)
    if not file.is_file() or file.suffix != ".py":
        near = difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.py")], n=1)
        hint = f"see configs/ for examples, or take one by its name: {', '.join(configs())}"
        hint = f"did you mean {file.parent / near[0]}?" if near else hint
        is_what = "another kind of file" if file.is_file() else "a folder" if file.is_dir() else "nothing there"
        raise ConfigError(f"--config: expected a Python file with get_config(), got {path!r} ({is_what}); {hint}")
    return file


def parsed_options(
    parser: argparse.ArgumentParser, words: Sequence[str], fields: Collection[str]
) -> argparse.Namespace:
    """Parses a command's own options, `--config` among them.

    words: without those that set fields. fields: their names. Raises ConfigError for other words, and for two configs.
    """
    args, unknown = parser.parse_known_args(words)
    if unknown:
        raise ConfigError(unknown_option(unknown[0], parser._option_string_actions, fields, configs()))
    number = sum(word.partition("=")[0] == "--config" for word in words)
    need(number <= 1, "--config", "one config", number, "leave one out, or let one file change what another returns")
    return args


def split_flags(
    argv: list[str], parser: argparse.ArgumentParser, known: Fields
) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Splits arguments into (those that set no field, [(field, text of its value or None)] for those that set one).

    known: every field.

    Fields may be written without `config.` where the parser has no option of that name.
    """
    rest = []
    overrides = []
    argv = list(argv)
    while argv:
        name, equals, text = argv.pop(0).partition("=")
        fields = _fields_of(name, parser, known)
        if not fields:
            rest.append(name + equals + text)
        elif equals:
            overrides += [(field, text) for field in fields]
        else:
            follows = argv and not argv[0].startswith("--") and _is_value(known.get(fields[0]), argv[0])
            value = argv.pop(0) if follows else None
            overrides += [(field, value) for field in fields]
    return rest, overrides


def _fields_of(option: str, parser: argparse.ArgumentParser, known: Fields) -> tuple[str, ...]:
    """Returns the fields that an option sets, none if it is the command's own or unknown."""
    if option.startswith("--config."):
        return (option.removeprefix("--config."),)
    field = option.removeprefix("--").replace("-", "_")
    if not option.startswith("--") or option in parser._option_string_actions:
        return ()
    return SHORT.get(field, (field,) if field in known else ())


def _is_value(field: DeclaredField | None, text: str) -> bool:
    """Returns whether the word behind an option is its value: behind a switch, only a word of `WORDS` or its own."""
    return field is None or type(field.default) is not bool or text.lower() in (*WORDS, *field.words)


def field_value(known: Fields, name: str, text: str | None) -> Any:
    """Converts the text that a command line gives a field to the field's type. Raises ConfigError.

    known: every field.
    """
    if inside := [field for field in known if field.startswith(f"{name}.")]:
        raise ConfigError(f"--config.{name} holds several fields: set one of {', '.join(inside)}")
    if name not in known:
        raise ConfigError(no_field(name, known))
    field = known[name]
    if field.kind is tuple:
        return _entries(name, text)
    optional = field.default is None
    try:
        word = text.lower() if text and text.lower() in field.words else None
        return word or _value(field.kind, text, optional)
    except (KeyError, TypeError, ValueError, OverflowError):
        expected = KINDS[field.kind] + (" or unset" if optional else "")
        expected += "".join(f" or {word}" for word in field.words)
        got = "no value" if text is None else repr(text)
        raise ConfigError(f"--config.{name}: expected {expected}, got {got}; write --config.{name}=VALUE") from None


def _entries(name: str, text: str | None) -> tuple[dict, ...]:
    """Parses the entries of a list like `datasets` from JSON. Raises ConfigError."""
    try:
        entries, reason = parse_json(text or ""), ""
    except ValueError as error:
        entries, reason = None, f" ({error})"
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        got = "no value" if text is None else f"{text[:100]!r}{reason}"
        example = f"""--config.{name}='[{{"path": "chats.jsonl"}}]'"""
        raise ConfigError(f"--config.{name}: expected a JSON list of objects, got {got}; for example {example}")
    return tuple(entries)


def _value(kind: type, text: str | None, optional: bool) -> bool | int | float | str | None:
    """Converts a text to `kind`. Raises KeyError, TypeError, ValueError or OverflowError if that is not possible."""
    if kind is bool:
        if text is None:
            return True  # --config.recompute_block without a value means True
        return None if optional and text.lower() == "unset" else WORDS[text.lower()]
    if text is None:
        raise ValueError
    if kind is int and "e" in text.lower() and float(text).is_integer():  # 1e3
        return int(float(text))
    return kind(text)
