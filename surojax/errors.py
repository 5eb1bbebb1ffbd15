"""Errors that end a run on purpose; commands print them as one line and exit non-zero.

A message may repeat what a file or another library says: it becomes one line, without its middle if it is too long.
"""

import contextlib
import difflib
import io
import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from surojax.resources import MiB, free_memory

LONGEST = 3000  # characters of a message: advice has a line of flags for each of seven ways


class ConfigError(ValueError):
    """The user asked for something impossible: the message says what was expected, what was given, what to change."""

    def __init__(self, message: str):
        super().__init__(_one_line(message))


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; nothing was overwritten."""

    def __init__(self, message: str):
        super().__init__(_one_line(message))


class StepError(RuntimeError):
    """A step failed to compile or to run on a GPU: the message says how to go on without what may be at fault."""

    def __init__(self, message: str):
        super().__init__(_one_line(message))


def _one_line(message: str) -> str:
    line = re.sub(r"\s*[\r\n]\s*", " ", message)
    gap = " ... "
    half = (LONGEST - len(gap)) // 2
    return line if len(line) <= LONGEST else line[:half] + gap + line[-half:]


def need(ok: bool, field: str, expected: str, got, change: str) -> None:
    """Raises ConfigError if `ok` is false."""
    if not ok:
        raise ConfigError(f"{field}: expected {expected}, got {shown(got)}; {change}")


def shown(value, most: int = 400) -> str:
    """Returns repr(value), cut after `most` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write integers of more than 4300 digits
        return f"a {type(value).__name__} with too many digits to show"
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def nearest_name(text: str, names: Iterable[str], otherwise: str = "correct it") -> str:
    """Returns "did you mean NAME?" with the name that is most like a text; `otherwise` if none is."""
    near = difflib.get_close_matches(text, list(names), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else otherwise


@contextlib.contextmanager
def in_words_of(option: str) -> Iterator[None]:
    """Names a command's option in the ConfigErrors about the `model_path` that it stands for."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        if not text.startswith("model_path: "):
            raise
        raise ConfigError(option + text.removeprefix("model_path")) from error


NO_THREAD = "can't start new thread"  # in Python's error
REFUSED = 2  # exit code: the command line or the settings are wrong, and the same command is refused again


class Refused(SystemExit):
    """Ends a command with a line; with the exit code REFUSED under `ends_with_code`."""


def ending(command: str, error: Exception) -> SystemExit:
    """Makes the exception that ends a command, such as "plan", with an error's line: `Refused` for a ConfigError."""
    line = f"surojax.{command}: error: {error}"
    return Refused(line) if isinstance(error, ConfigError) else SystemExit(line)


def refusing(parser: ArgumentParser) -> ArgumentParser:
    """Makes a parser raise ConfigError where argparse would end the process, and returns the parser."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")

    parser.error = refuse  # type: ignore[method-assign]
    return parser


def ends_with_code(main: Callable[[], None]) -> None:
    """Runs a command; if it raises ConfigError, prints the message and ends the process with REFUSED.

    Ends it with a line, too, if memory cannot be allocated or no thread can be started.
    Letters that the terminal's encoding lacks are printed as their codes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python does for sys.stderr
    try:
        main()
    except Refused as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(REFUSED)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and NO_THREAD not in str(error):
            raise
        free = free_memory()
        of = f" of {free.limit}" if free.limit else ""
        reason = str(error) or "MemoryError"
        sys.exit(f"surojax: error: out of memory ({reason}), where {free.size / MiB:,.0f} MiB are free{of}")


# What commands exit with, 75 only `train` and `launch`. Others, 128 + a signal's number, are those of processes that a
# signal ended.
EXIT_CODES = {
    0: "finished, or nothing was left to do",
    1: "an error, said in a line: mend it and start the same command again",
    REFUSED: "settings or a command line that are refused: change them, the same command is refused again",
    75: "asked to stop (SIGTERM, SIGUSR1, SIGUSR2, SIGHUP, Ctrl-C, --max-minutes) and saved, not finished: start the "
    "same command again",
    130: "Ctrl-C where nothing is saved any more or yet: start the same command again",
}


def short_exit_codes(*others: str) -> str:
    """Describes the exit codes of commands that cannot be continued, for `--help`.

    others: other causes of exit code 1.
    """
    failed = ", ".join([*others, "any other error"])
    return f"Exit codes: 0, done; 1, {failed}; {REFUSED}, settings or a command line that are refused."


def exit_codes() -> str:
    """Describes the exit codes of `train` and `launch`, as lines for `--help`."""
    return "\n".join(["exit codes:", *(f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items())])
