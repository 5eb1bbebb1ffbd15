"""Writes a config as a Python file like those of configs/: the fields that differ from the defaults."""

import json
import os
from pathlib import Path
from typing import Any

from surojax.config.fields import DEFAULTS, FIELDS, Config, flat
from surojax.errors import ConfigError


def config_file(c: Config, description: str, *, commented: bool = False) -> str:
    """Writes the text of a config file that yields `c`, with this docstring. It imports no other config file.

    commented: above each field stands its help.
    """
    values = flat(c)
    differ = [name for name, default in DEFAULTS.items() if values[name] != default]
    lines = []
    for name in differ:
        lines += [f"    # {FIELDS[name].comment}"] * commented
        lines.append(f"    c.{name} = {_literal(values[name])}")
    return "\n".join(
        [
            f'"""{description}"""',
            "",
            "from surojax.config import default_config",
            "",
            "",
            "def get_config():",
            "    c = default_config()",
            *lines,
            "    return c",
            "",
        ]
    )


def check_new(option: str, file: Path) -> None:
    """Raises ConfigError if a config file cannot be written at a path, or the path exists."""
    change = "choose another name, or delete it"
    if file.suffix != ".py":
        raise ConfigError(f"{option}: expected a name that ends with .py, got {str(file)!r}; --config takes such files")
    if file.exists(follow_symlinks=False):
        raise ConfigError(f"{option}: expected a new file, got {str(file)!r}, which exists; {change}")
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise ConfigError(f"{option}: expected a folder that can be written, got {str(file.parent)!r}; {change}")


def _literal(value: Any) -> str:
    """Formats a value as Python source, with double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
