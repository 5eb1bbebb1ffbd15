"""Mutants: rows of the table without one of their collectives. Each must fail, or the row does not test it.

A row that passes says that its program is right; its mutants say whether the row would notice if it were not. A
collective is a line of the source that communicates over some mesh axes (removal.py), in whatever loop it runs. It is
taken out of the first row that has it. It is found if the program cannot be traced (`check_vma=True` refuses a value
that differs between devices where it must not), or if losses and gradient norms are too far from the row's reference.
"""

import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from surojax.config import Config
from surojax.errors import ConfigError
from surojax.verification import training
from surojax.verification.bounds import Curve, bounds, judge
from surojax.verification.removal import Collective, watching
from surojax.verification.rows import Curves
from surojax.verification.settings import Setting, chosen

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
    """Where a mutant was found, and by what."""

    mutant: Mutant
    found: str  # AT_TRACE, BY_PARITY or NOT_FOUND
    why: str  # the first line of the error, or how far losses and gradient norms are
    seconds: float


def mutants_of(curves: Curves, s: Setting) -> list[Mutant]:
    """Returns the mutants of a row, in the order of its trace. Raises ConfigError if the row cannot run."""
    found: dict[Collective, None] = {}

    def keep(collective: Collective) -> bool:
        found[collective] = None
        return False

    with _built(curves, s) as row, watching(keep):
        training.lowered(row)
    return [Mutant(s, collective) for collective in found]


def outcome(curves: Curves, mutant: Mutant) -> Outcome:
    """Traces a mutant, and trains it if it can be traced."""
    started = time.perf_counter()
    s = mutant.setting

    def done(found: str, why: str) -> Outcome:
        return Outcome(mutant, found, why, time.perf_counter() - started)

    with _built(curves, s) as row:
        try:
            with watching(mutant.removed.__eq__):
                step = training.lowered(row)
        except (TypeError, ValueError) as error:
            if not VARIES.search(str(error)):
                raise  # not what taking out a collective may cause
            return done(AT_TRACE, str(error).partition("\n")[0])
        status, loss, grad_norm, why = judged(curves, s, training.curve(row, step, curves.batches))
    off = f"loss off by {loss:.0e}, gradient norm by {grad_norm:.0e}"
    return done(NOT_FOUND, off) if status == "pass" else done(BY_PARITY, off if "far" in why else why)


def judged(curves: Curves, s: Setting, found: Curve) -> tuple[str, float, float, str]:
    """Returns what `judge` says of a curve, as that of a row."""
    return judge(found, curves.of(curves.table[s.like]), bounds(curves.config)[s.expect])


def _built(curves: Curves, s: Setting):
    """Returns the context `training.built` of a row."""
    return training.built(curves.config, s, curves.batches, curves.microbatches_of(s), curves.devices)


def verify_mutants(
    config: Config,
    *,
    steps: int = STEPS,
    only: Sequence[str] | None = None,
    devices: Sequence | None = None,
    report: Callable[[Outcome], None] = lambda outcome: None,
    skipped: Callable[[Setting, str], None] = lambda setting, why: None,
) -> list[Outcome]:
    """Takes out every collective of the rows, one at a time, and returns what became of each.

    steps, only, devices: as for `verify`. report: called with each outcome as soon as it is known. skipped: called with
    each row that cannot run here, and why.

    Raises ConfigError as `verify`, and for a row that fails with all of its collectives.
    """
    curves = Curves(config, steps, devices)
    curves.of_plain()
    known: set[Collective] = set()
    found = []
    for s in chosen(curves.table, only):
        try:
            new = [mutant for mutant in mutants_of(curves, s) if mutant.removed not in known] if s.devices > 1 else []
        except ConfigError as error:
            skipped(s, str(error))
            continue
        known.update(mutant.removed for mutant in new)
        if new and (why := judged(curves, s, curves.of(s))[3]):
            raise ConfigError(f"--only: expected rows that pass, got {s.name}: {why}; its mutants would show nothing")
        for mutant in new:
            found.append(outcome(curves, mutant))
            report(found[-1])
    return found
