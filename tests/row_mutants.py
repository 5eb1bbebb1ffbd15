"""Tests the verification by mutants: rows of the table without one of their collectives.

Each mutant must fail, or the row does not test the collective. A row that passes says that its program is right; its
mutants say whether the row would notice if it were not. A collective is a line of the source that communicates over
some mesh axes (removal.py), in whatever loop it runs. It is taken out of the first row that has it. It is found if the
program cannot be traced (`check_vma=True` refuses a value that differs between devices where it must not), or if losses
and gradient norms are too far from the row's reference.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from removal import Collective, watching

from surojax.config import Config
from surojax.errors import ConfigError
from surojax.verification.bounds import Curve, expected_bounds, judge
from surojax.verification.rows import Curves
from surojax.verification.settings import Setting, chosen_rows
from surojax.verification.training import Built, compiled_step, lowered, training_curve

AT_TRACE = "at trace"
BY_PARITY = "by parity"
NOT_FOUND = "NOT FOUND"
STEPS = 3  # a moment of the first step is read in the second, whose weights are read in the third
# How JAX says that a type varies over a mesh axis that it must not vary over.
VARIES = re.compile(r"vary|\{V:|manual axes|replicated over|check_vma", re.IGNORECASE)


class Mutant(NamedTuple):
    """A row without one of its collectives."""

    setting: Setting
    removed: Collective


class Outcome(NamedTuple):
    """How a mutant was found: at trace time or by parity, with the reason, or not at all."""

    mutant: Mutant
    found: str  # AT_TRACE, BY_PARITY or NOT_FOUND
    why: str  # the first line of the error, or how far losses and gradient norms are
    seconds: float


def collectives_of(row: Built):
    """Lowers a row's step; returns it with its collectives in the order of the trace."""
    collectives: dict[Collective, None] = {}

    def keep(collective: Collective) -> bool:
        collectives[collective] = None
        return False

    with watching(keep):
        step = lowered(row)
    return step, list(collectives)


def outcome(curves: Curves, mutant: Mutant, row: Built) -> Outcome:
    """Traces a mutant of a row, and, if that succeeds, trains it until it differs too much from the row."""
    started = time.perf_counter()

    def result(noticed: str, why: str) -> Outcome:
        return Outcome(mutant, noticed, why, time.perf_counter() - started)

    try:
        with watching(mutant.removed.__eq__):
            step = lowered(row)
    except (TypeError, ValueError) as error:
        if not VARIES.search(str(error)):
            raise  # not what taking out a collective may cause
        return result(AT_TRACE, str(error).partition("\n")[0])
    trained: Curve = []
    for figures in training_curve(row, compiled_step(row, step), curves.first.of(row), curves.batches):
        trained.append(figures)
        status, loss, grad_norm, why = judge_mutant(curves, mutant.setting, trained)
        if status == "FAIL" and (loss or grad_norm):  # nan too; an approximate row may begin without a difference
            break
    off = f"loss off by {loss:.0e}, gradient norm by {grad_norm:.0e}, in step {len(trained)}"
    return result(NOT_FOUND, off) if status == "pass" else result(BY_PARITY, off if "far" in why else why)


def keep_whole(curves: Curves, s: Setting, row: Built, step) -> None:
    """Trains a row with all of its collectives and keeps the curve. Raises ConfigError if the row fails."""
    curves.keep(s, list(training_curve(row, compiled_step(row, step), curves.first.of(row), curves.batches)))
    if why := judge_mutant(curves, s, curves.of(s))[3]:
        raise ConfigError(f"--only: expected rows that pass, got {s.name}: {why}; its mutants would show nothing")


def judge_mutant(curves: Curves, s: Setting, trained: Curve) -> tuple[str, float, float, str]:
    """Compares the first steps of a row without a collective with the row's reference, see `judge`."""
    return judge(trained, curves.of(curves.table[s.like])[: len(trained)], expected_bounds(curves.config)[s.expect])


def verify_mutants(
    config: Config,
    *,
    steps: int = STEPS,
    only: Sequence[str] | None = None,
    devices: Sequence | None = None,
    report: Callable[[Outcome], None] = lambda outcome: None,
    skipped: Callable[[Setting, str], None] = lambda setting, why: None,
) -> list[Outcome]:
    """Removes each collective of the rows, one at a time, and returns the outcomes.

    steps: at most; a mutant's training ends with the first step that is too far. only, devices: as for `verify`.
    report: called with each outcome as soon as it is known. skipped: called with each row that cannot run here, and
    why.

    Raises ConfigError as `verify`, and for a row that fails with all of its collectives.
    """
    with Curves(config, steps, devices) as curves:
        curves.of_plain()
        return list(_outcomes(curves, chosen_rows(curves.table, only), report, skipped))


def _outcomes(
    curves: Curves,
    rows: Sequence[Setting],
    report: Callable[[Outcome], None],
    skipped: Callable[[Setting, str], None],
) -> Iterator[Outcome]:
    """Yields the `Outcome` of each mutant of the rows; see `verify_mutants`."""
    known: set[Collective] = set()
    for s in rows:
        if s.devices == 1:
            continue
        with contextlib.ExitStack() as until_end:
            try:
                row = until_end.enter_context(curves.built(s))
                step, collectives = collectives_of(row)
            except ConfigError as error:
                skipped(s, str(error))
                continue
            new = [collective for collective in collectives if collective not in known]
            if not new:
                continue
            known.update(new)
            keep_whole(curves, s, row, step)
            for collective in new:
                result = outcome(curves, Mutant(s, collective), row)
                report(result)
                yield result
