"""Reads config files and command lines, `--config FILE --config.FIELD=VALUE ...`, and prints help for every field."""

import argparse
import inspect
import itertools
import runpy
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn, cast

import ml_collections

from surojax.command_line import (
    NO_CONFIG,
    WORDS,
    config_named,
    field_value,
    file_of_config,
    is_config_name,
    parsed_options,
    split_flags,
)
from surojax.config.fields import FIELDS, SECTIONS, Config
from surojax.errors import ConfigError
from surojax.exchange.sources import resolved
from surojax.option_names import ALL_FIELDS, HELP

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


def describe_fields() -> str:
    """Returns the help for every field, `--config.field=default  comment`, by section."""
    lines = []
    for title, fields in SECTIONS.items():
        lines.append(f"\n{title}")
        lines += [f"  --config.{field.name}={field.default_text}\n        {field.comment}" for field in fields]
    return "\n".join(lines)


def parse_flags(
    argv: list[str] | None, parser: argparse.ArgumentParser, otherwise: str = ""
) -> tuple[Config, argparse.Namespace]:
    """Parses a command line; returns the config, and the command's own options, which the caller added to `parser`.

    `--config FILE` names a Python file with `get_config()`, or one of `configs()`; a `model_path` without it takes
    config/finetune.py.
    `--config.FIELD=VALUE` overrides one of its fields, and so does `--FIELD VALUE` unless the command has an option of
    that name; if a field is set twice, the last value counts. `--help` prints the options and the usual fields,
    `--help fields` every field, and exits.

    otherwise: the config if the command line names none; "": it has to name one.

    Raises ConfigError for a bad option, and for a `model` field that contradicts the model at `model_path`.
    """
    add_options(parser)
    argv = sys.argv[1:] if argv is None else argv
    if any(word in HELP and after == ALL_FIELDS for word, after in itertools.pairwise(argv)):
        print(describe_fields())
        sys.exit()
    rest, overrides = split_flags(argv, parser, FIELDS)
    args = parsed_options(parser, rest, FIELDS)
    if not args.config and "model_path" in dict(overrides):
        args.config = str(FINETUNE)
    args.config = args.config or otherwise
    if not args.config:
        raise ConfigError(NO_CONFIG)
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


def load_config(path: str, *, lora: bool = False) -> Config:
    """Returns `get_config()` of a Python file, or of a config by its name, such as "llama7b".

    lora: whether adapters will be trained, which a `get_config(lora)` is told, so that values may depend on it.
    Raises ConfigError if there is no such file or it returns no config.
    """
    path = str(file_of_config(path))
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


def config_of_model(model: str, option: str, *, lora: bool) -> Config:
    """Returns the config that a model begins with: a name of `configs`, or a value of `model_path`, to fine-tune.

    option: that named the model. lora: see `load_config`. Raises ConfigError.
    """
    if is_config_name(model):
        named = config_named(model, option, "a Hugging Face folder or name, or a .gguf file")
        return load_config(str(named), lora=lora)
    config = load_config(str(FINETUNE), lora=lora)
    config.model_path = model
    return config


def _in_words(error: BaseException) -> str:
    """Describes an error of a config file in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, ConfigError):
        return text
    return f"{type(error).__name__}: {text[:200]}"


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
    value = field_value(FIELDS, name, text)
    owner = config.model if name.startswith("model.") else config
    owner[name.removeprefix("model.")] = value
