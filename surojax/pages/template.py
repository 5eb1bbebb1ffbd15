"""Renders the templates of this folder. Styles and scripts are inside of the page, and data are escaped."""

import base64
import json
import zlib
from typing import Any

import jinja2

COLOURS = 10  # of style.css: --c0 to --c9


def fill(name: str, **values: Any) -> str:
    """Renders a template of this folder. values: by their names in the template; text in them is escaped.

    framed: for a frame of another page, without the command and the version.
    """
    loader = jinja2.PackageLoader("surojax.pages", ".")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name).render({"framed": False} | values).lstrip()


def script_data(value: Any) -> str:
    """Encodes a value as JSON that can stand in a script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def packed_data(value: Any) -> str:
    """Encodes a value as JSON in base64 after zlib, a quarter of its size; page scripts inflate it."""
    return base64.b64encode(zlib.compress(json.dumps(value, separators=(",", ":"), allow_nan=False).encode())).decode()
