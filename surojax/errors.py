"""The two ways a run ends early on purpose; commands print them as one line and exit non-zero."""

import sys
from collections.abc import Callable


class ConfigError(ValueError):
    """The user asked for something impossible: the message says what was expected, what was given, what to change."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; nothing was overwritten."""


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


REFUSED = 2  # exit code: the command line or the settings are wrong, and the same command is refused again


class Refused(SystemExit):
    """Ends a command with a line; with the exit code REFUSED under `ends_with_code`."""


def ends_with_code(main: Callable[[], None]) -> None:
    """Runs a command; what it refuses is printed, and ends the process with REFUSED."""
    try:
        main()
    except Refused as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(REFUSED)
