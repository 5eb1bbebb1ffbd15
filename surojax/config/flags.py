"""Reads config files and command lines, `--config FILE --config.FIELD=VALUE ...`, and prints help for every field."""

import argparse
import difflib
import inspect
import itertools
import re
import runpy
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn, cast

import ml_collections

from surojax.config.fields import DEFAULTS, FIELDS, SECTIONS, Config
from surojax.declared import KINDS
from surojax.errors import ConfigError
from surojax.exchange.sources import resolved
from surojax.option_names import ALL_FIELDS, HELP, SHORT, no_field, unknown_option
from surojax.untrusted import expanded, parse_json

PACKAGE = Path(__file__).parents[1]
# fields that `--help` shows; `--help fields` shows all
USUAL = (
    "model_path",
    "data",
    "output_dir",
    "lora",
    "learning_rate",
    "num_epochs",
    "max_steps",
    "sequence_len",
    "per_device_batch_size",
    "gradient_accumulation_steps",
    "gpus",
    "zero_level",
    "offload_optimizer",
    "offload_weights",
)
FINETUNE = Path(__file__).with_name("finetune.py")  # the config of a command line that names only a model
WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def describe_fields() -> str:
    """Returns the help for every field, `--config.field=default  comment`, by section."""
    lines = []
    for title, fields in SECTIONS.items():
        lines.append(f"\n{title}")
        lines += [f"  --config.{field.name}={field.default_text}\n        {field.comment}" for field in fields]
    return "\n".join(lines)


def parse_flags(argv: list[str] | None, parser: argparse.ArgumentParser) -> tuple[Config, argparse.Namespace]:
    """Parses a command line; returns the config, and the command's own options, which the caller added to `parser`.

    `--config FILE` names a Python file with `get_config()`, or one of `configs()`; a `model_path` without it takes
    config/finetune.py.
    `--config.FIELD=VALUE` overrides one of its fields, and so does `--FIELD VALUE` unless the command has an option of
    that name; if a field is set twice, the last value counts. `--help` prints the options and the usual fields,
    `--help fields` every field, and exits.
    Raises ConfigError for a bad option, and for a `model` field that contradicts the model at `model_path`.
    """
    add_options(parser)
    argv = sys.argv[1:] if argv is None else argv
    if any(word in HELP and after == ALL_FIELDS for word, after in itertools.pairwise(argv)):
        print(describe_fields())
        sys.exit()
    rest, overrides = split_flags(argv, parser)
    args, unknown = parser.parse_known_args(rest)
    if unknown:
        raise ConfigError(unknown_option(unknown[0], parser._option_string_actions, FIELDS, configs()))
    if not args.config and "model_path" in dict(overrides):
        args.config = str(FINETUNE)
    if not args.config:
        raise ConfigError(
            "no config given: pass --config NAME or FILE, for example --config tiny, or --config.model_path=MODEL "
            "to fine-tune a model; see --help"
        )
    config = load_config(args.config, lora=trains_adapters(overrides))
    override_all(config, overrides)
    return config, args


def trains_adapters(overrides: Iterable[tuple[str, str | None]]) -> bool:
    """Returns whether the pairs (name, text) of a command line set `lora`."""
    text = dict(overrides).get("lora", "false")
    return text is None or WORDS.get(text.lower(), False)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--config`, and the help of the usual fields, to the parser of a command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    written = "--FIELD VALUE or --config.FIELD=VALUE"
    lines = [f"  --{name:<28} {FIELDS[name].comment}" for name in USUAL]
    lines.insert(USUAL.index("lora") + 1, f"  --{'qlora':<28} the same of a base in 4 bits (lora and qlora_bnb)")
    more = f"`{parser.prog} --help {ALL_FIELDS}` lists all {len(FIELDS)} fields with their defaults."
    parser.epilog = "\n".join([f"fields ({written} overrides the config file's value):", *lines, "", more])
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="Python file whose get_config() returns the config, or a name of configs/, such as llama7b; left out with "
        "--config.model_path: fine-tuning",
    )
    parser.allow_abbrev = False
    parser.error = _refuse  # argparse's own `error` prints the usage and exits


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message}; see --help")


def configs() -> dict[str, Path]:
    """The config files that come with surojax, by name: those in configs/, which a wheel has in the package."""
    folders = (PACKAGE / "configs", PACKAGE.parent / "configs")
    folder = next((folder for folder in folders if (folder / "tiny.py").is_file()), folders[0])
    return {file.stem: file for file in sorted(folder.glob("*.py"))}


def is_config_name(path: str) -> bool:
    """True if a text is meant as a name of `configs`, not as a path. Raises ConfigError if no file can be called so."""
    return re.fullmatch(r"\w+", path) is not None and not expanded(path).exists()


def load_config(path: str, *, lora: bool = False) -> Config:
    """Returns `get_config()` of a Python file, or of a config by its name, such as "llama7b".

    lora: whether adapters will be trained, which a `get_config(lora)` is told, so that values may depend on it.
    Raises ConfigError if there is no such file or it returns no config.
    """
    if is_config_name(path):
        if path not in configs():
            near = difflib.get_close_matches(path, configs(), n=1)
            hint = f"did you mean {near[0]}?" if near else "choose one, or a Python file"
            raise ConfigError(f"--config: expected a name of {', '.join(configs())}, got {path!r}; {hint}")
        path = str(configs()[path])
    file = expanded(path)
    if not file.is_file() or file.suffix != ".py":
        near = difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.py")], n=1)
        hint = f"see configs/ for examples, or take one by its name: {', '.join(configs())}"
        hint = f"did you mean {file.parent / near[0]}?" if near else hint
        is_what = "another kind of file" if file.is_file() else "a folder" if file.is_dir() else "nothing there"
        raise ConfigError(f"--config: expected a Python file with get_config(), got {path!r} ({is_what}); {hint}")
    try:
        get_config = runpy.run_path(path).get("get_config")
        if get_config is None:
            raise ConfigError("expected a function get_config(), got none; see configs/tiny.py")
        config = get_config(lora=lora) if "lora" in inspect.signature(get_config).parameters else get_config()
        if not isinstance(config, ml_collections.ConfigDict):
            got = type(config).__name__
            raise ConfigError(f"expected get_config() to return default_config() with changes, got {got}; return it")
    except (Exception, SystemExit) as error:
        frames = reversed(traceback.extract_tb(error.__traceback__))
        line = next((f.lineno for f in frames if f.filename == path), getattr(error, "lineno", None))
        raise ConfigError(f"{path}{f':{line}' if line else ''}: {_in_words(error)}") from error
    return cast(Config, config)


def _in_words(error: BaseException) -> str:
    """Describes an error of a config file in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, ConfigError):
        return text
    return f"{type(error).__name__}: {text[:200]}"


def split_flags(argv: list[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Splits arguments into (those that set no field, [(field, text of its value or None)] for those that set one).

    Fields may be written without `config.` where the parser has no option of that name.
    """
    rest = []
    overrides = []
    argv = list(argv)
    while argv:
        name, equals, text = argv.pop(0).partition("=")
        fields = _fields_of(name, parser)
        if not fields:
            rest.append(name + equals + text)
        elif equals:
            overrides += [(field, text) for field in fields]
        else:
            follows = argv and not argv[0].startswith("--") and _is_value(fields[0], argv[0])
            value = argv.pop(0) if follows else None
            overrides += [(field, value) for field in fields]
    return rest, overrides


def _fields_of(option: str, parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """Returns the fields that an option sets, none if it is the command's own or unknown."""
    if option.startswith("--config."):
        return (option.removeprefix("--config."),)
    field = option.removeprefix("--").replace("-", "_")
    if not option.startswith("--") or option in parser._option_string_actions:
        return ()
    return SHORT.get(field, (field,) if field in DEFAULTS else ())


def _is_value(field: str, text: str) -> bool:
    """Returns whether the word behind an option is its value: behind a switch that is only one of `WORDS`."""
    return type(DEFAULTS.get(field)) is not bool or text.lower() in WORDS


def override_all(config: Config, overrides: Iterable[tuple[str, str | None]]) -> None:
    """Sets fields from pairs (name, text), see `override`.

    Raises ConfigError, also for a `model` field that contradicts the model at `model_path`.
    """
    overrides = list(overrides)
    for name, text in overrides:
        override(config, name, text)
    if model_fields := [name.removeprefix("model.") for name, _ in overrides if name.startswith("model.")]:
        resolved(config, fixed=model_fields)  # sizes of a file give way to those of model_path; those of flags do not


def override(config: Config, name: str, text: str | None) -> None:
    """Sets one field from the text of a command line, converted to the field's type. Raises ConfigError."""
    defaults = DEFAULTS
    if inside := [field for field in defaults if field.startswith(f"{name}.")]:
        raise ConfigError(f"--config.{name} holds several fields: set one of {', '.join(inside)}")
    if name not in defaults:
        raise ConfigError(no_field(name, FIELDS))
    if type(defaults[name]) is tuple:
        config[name] = _entries(name, text)
        return
    optional = defaults[name] is None
    words = FIELDS[name].words
    kind = bool if optional else type(defaults[name])
    owner = config.model if name.startswith("model.") else config
    try:
        word = text.lower() if text and text.lower() in words else None
        owner[name.removeprefix("model.")] = word or _value(kind, text, optional)
    except (KeyError, TypeError, ValueError, OverflowError):
        expected = KINDS[kind] + (" or unset" if optional else "")
        expected += "".join(f" or {word}" for word in words)
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
