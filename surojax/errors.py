"""The two ways a run ends early on purpose; commands print them as one line and exit non-zero.

A message may repeat what a file or another library says: it becomes one line, without its middle if it is too long.
"""

import re

LONGEST = 2000  # characters of a message


class ConfigError(ValueError):
    """The user asked for something impossible: the message says what was expected, what was given, what to change."""

    def __init__(self, message: str):
        super().__init__(_one_line(message))


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; nothing was overwritten."""

    def __init__(self, message: str):
        super().__init__(_one_line(message))


def _one_line(message: str) -> str:
    line = re.sub(r"\s*[\r\n]\s*", " ", message)
    half = LONGEST // 2
    return line if len(line) <= LONGEST else f"{line[:half]} ... {line[-half:]}"


def need(ok: bool, field: str, expected: str, got, change: str) -> None:
    """Raises ConfigError if `ok` is false."""
    if not ok:
        raise ConfigError(f"{field}: expected {expected}, got {shown(got)}; {change}")


def shown(value, most: int = 400) -> str:
    """Returns a value as Python writes it, its end cut off if that has more than `most` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write integers of more than 4300 digits
        return f"a {type(value).__name__} with too many digits to show"
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"
