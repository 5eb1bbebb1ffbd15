"""Verdicts of checks, which `surojax doctor` prints and writes, one line each."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from surojax.errors import ConfigError
from surojax.training.safe import leave_off

OK, FAILED, SKIPPED = "ok", "failed", "skipped"


class Verdict(NamedTuple):
    """The result of one part of a check.

    status: OK, FAILED or SKIPPED, which shows nothing. said: what was seen, or the reason. without: the flags that
    leave off what failed; "" if there is none.
    """

    check: str
    part: str
    status: str
    said: str
    without: str = ""


class Asked(NamedTuple):
    """The command's arguments. nvme_path: the folder whose disk is measured. rates_file: as the config's field.

    sustained_s: seconds for which that disk is written before its rates count.
    """

    nvme_path: str
    rates_file: str
    sustained_s: float = 0.0


def ok(check: str, part: str, said: str) -> Verdict:
    """Makes the verdict on a part that is as it should be."""
    return Verdict(check, part, OK, said)


def failed(check: str, part: str, said: str, options: tuple[str, ...] = ()) -> Verdict:
    """Makes the verdict on a part that failed. options: names in `training.safe.OPTIONS` to leave off."""
    return Verdict(check, part, FAILED, said, leave_off(options))


def skipped(check: str, part: str, said: str) -> Verdict:
    """Makes the verdict on a part that could not be checked. said: the reason."""
    return Verdict(check, part, SKIPPED, said)


def attempt(
    check: str, part: str, judge: Callable[..., Verdict], *arguments: Any, options: tuple[str, ...] = ()
) -> Iterator[Verdict]:
    """Yields judge(*arguments); after a ConfigError the verdict `skipped`, after another error `failed`.

    options: see `failed`.
    """
    try:
        yield judge(*arguments)
    except ConfigError as error:
        yield skipped(check, part, str(error))
    except Exception as error:  # a report of what fails has no use for a check that ends it
        yield failed(check, part, in_a_line(error), options)


def in_a_line(error: BaseException) -> str:
    """Formats an error as a line of a table: its type and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
