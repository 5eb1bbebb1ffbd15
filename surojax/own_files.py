"""Files of JSON that surojax writes and reads again: written whole or not at all, and read with their form checked.

What is read may be damaged, or be another program's: a file that does not have the form which its writer gives it
raises `ValueError`, and the caller says what that means: a cache is made anew, a checkpoint is refused.
"""

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from surojax.errors import shown
from surojax.untrusted import SMALL, parse_json, read_bytes

WHOLE = range(2**63)  # a form: whole numbers that are at least 0

# A form is one of
#   str, bool, int   a JSON value of this type; true and false are no int
#   float            a finite number, with or without a fraction
#   range            a whole number in it
#   [form]           a list of any length
#   (form, ...)      a list with one element for each form
#   {str: form}      an object with any keys
#   {"a": form, ...} an object with these keys at least; those of `Optional` may be missing
type Form = type | range | list | tuple | dict | Optional


class Optional(NamedTuple):
    """A form: the value of a key that may be missing."""

    form: Any


def check_form(value: Any, form: Form, where: str = "") -> None:
    """Raises ValueError if a parsed JSON value does not have this form. where: the value's place, for the message."""
    if isinstance(form, list):
        _expect(isinstance(value, list), where, "a list", value)
        if form[0] in (str, int, bool) and all(type(element) is form[0] for element in value):
            return  # quickly, since vocabularies have 262,144 tokens
        for i, element in enumerate(value):
            check_form(element, form[0], f"{where}[{i}]")
    elif isinstance(form, tuple):
        _expect(isinstance(value, list) and len(value) == len(form), where, f"a list of {len(form)}", value)
        for i, element in enumerate(value):
            check_form(element, form[i], f"{where}[{i}]")
    elif isinstance(form, dict):
        _expect(isinstance(value, dict), where, "an object", value)
        forms: dict[str, Any] = dict.fromkeys(value, form[str]) if str in form else form
        for key, one in forms.items():
            place = f"{where}.{key}" if where else key
            if isinstance(one, Optional):
                if key in value:
                    check_form(value[key], one.form, place)
                continue
            _expect(key in value, place, "a value", None)
            check_form(value[key], one, place)
    elif isinstance(form, range):
        _expect(
            type(value) is int and value in form, where, f"a whole number from {form.start} to {form.stop - 1}", value
        )
    elif form is float:
        is_number = type(value) is float or (type(value) is int and abs(value) < 2**63)
        _expect(is_number and math.isfinite(value), where, "a finite number", value)
    else:
        _expect(type(value) is form, where, f"a JSON {form.__name__}", value)


def _expect(ok: bool, where: str, expected: str, value: Any) -> None:
    if not ok:
        raise ValueError(f"{where or 'content'}: expected {expected}, got {shown(value, 80)}")


def read_own(path: Path, form: Form, most: int = SMALL) -> Any:
    """Reads a file of JSON that surojax wrote. most: limit of its size, bytes.

    Raises OSError if it cannot be read, ValueError if it is no JSON, repeats a key, or does not have this form.
    """
    value = parse_json(read_bytes(path, most))
    check_form(value, form)
    return value


def write_whole(path: Path, value: Any, *, lasts: bool = False, indent: int | None = None) -> None:
    """Writes a value as JSON in place of a file: a kill leaves the old file or the new one.

    lasts: waits until the disk keeps it, so that a failure of power leaves one of them too. A symbolic link of that
    name is replaced, not followed. Raises OSError with the name of the file.
    """
    write_bytes(path, json.dumps(value, indent=indent).encode(), lasts=lasts)


def write_bytes(path: Path, content: bytes, *, lasts: bool = False) -> None:
    """Writes bytes in place of a file, see `write_whole`."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)  # of a process that was killed
        with open(new, "xb", opener=_opener) as file:
            file.write(content)
            file.flush()
            if lasts:
                os.fsync(file.fileno())
        new.replace(path)
        if lasts:
            sync_folder(path.parent)
    except OSError as error:
        error.filename = str(path)
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def _opener(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW, 0o666)


def sync_folder(folder: Path) -> None:
    """Waits until the disk keeps the names in a folder. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
