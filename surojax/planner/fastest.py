"""Finds the fastest settings of a run on a GPU: searches by estimate, then compiles and simulates the best few.

They are compiled in the order of estimated time, except that candidates which differ in microbatches only wait until
the best of each other kind was compiled, since they are nearly equal. One whose estimate exceeds the best prediction by
more than `BAND` is not compiled.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterator

from surojax.config.changes import Change, changed, differing, flags
from surojax.config.fields import Config, sequences_of_step, tokens_of_step
from surojax.errors import ConfigError
from surojax.placement.mesh import pipeline_stages
from surojax.planner import aot, choices, remedies, seen
from surojax.planner.amounts import GiB, Memory, gib
from surojax.planner.candidate import Candidate, memory_limits
from surojax.planner.choices import NUMBERS
from surojax.planner.disks import Disks
from surojax.planner.drives import disks
from surojax.planner.footprint import assembly
from surojax.planner.gpus import GB, gpu_key, with_nodes
from surojax.planner.layer_sizes import resident_in_rounds
from surojax.planner.run_plan import Plan, checked, plan
from surojax.planner.search import Found, Space, best, kind, search
from surojax.run.console import progress

MOST_COMPILED = 10
RETRIES = 2  # of a candidate that does not fit as compiled, each with fewer resident layers
LARGER = (2, 4, 8)  # times the tokens of a step
DOMINATES = 0.3  # part of a step that the update takes when a larger one is looked at
WORTH = 0.01  # relative; what saves less time is not worth other numbers
BAND = 0.1  # relative; roofline.py's estimates were at most so much above the predicted time, but for fp8 with tp_size


@dataclasses.dataclass(frozen=True)
class Trial:
    """Settings that were compiled, or only estimated if there is no compiler for GPUs.

    change: the fields that differ from the given config. plan: None if it was not compiled. fits: with the reserve of
    `search.device_limit`.
    """

    config: Config
    change: Change
    estimate: Candidate
    plan: Plan | None
    fits: bool

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step, estimated ones if nothing was predicted."""
        predicted = self.plan.predicted_step_s if self.plan else None
        return self.estimate.seconds if predicted is None else predicted

    @property
    def tokens(self) -> int:
        """Tokens of a step on each GPU."""
        return tokens_of_step(self.config) // self.config.gpus

    @property
    def need(self) -> Memory:
        """What the run needs, as compiled if it was."""
        return self.plan.need if self.plan else self.estimate.need


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What `fastest` returns. rows: settings that fit, the fastest first. refuted: settings that fit by estimate only.

    as_given: the given config, with its own files if there is no limit for files; None if it does not fit by estimate.
    refused: why the given config cannot run at all, as `train` would say it; "" if it can. nearest: if nothing fits,
    what comes closest. left_out: for each setting that changes numbers, was not allowed and is worth it, the estimated
    seconds of the best row with it. disks: of a machine, for files. larger: estimated tokens/s per GPU by sequences of
    a step, if larger steps pay: see `_larger`. proposals: if nothing fits, what would.
    """

    gpu: str
    gpus: int
    limits: Memory
    rows: list[Trial]
    refuted: list[Trial]
    as_given: Trial | None
    refused: str
    found: Found
    nearest: Candidate | None
    left_out: dict[str, float]
    disks: Disks
    larger: dict[int, float]
    proposals: list[remedies.Proposal]


def fastest(
    config: Config,
    gpu: str,
    *,
    host_memory: float | None = None,
    gpus_per_node: int | None = None,
    host_bandwidth: float | None = None,
    nvme: float | None = None,
    disk: str | None = None,
    allow: Collection[str] = (),
    keep: Collection[str] = (),
    most: int = MOST_COMPILED,
    say: Callable[[str], None] = lambda text: None,
    status: Callable[[str], None] = lambda text: None,
) -> FitResult:
    """The fastest settings of `config.gpus` GPUs of this kind; the effective batch and the model stay as they are.

    gpu: what `gpus.gpu_key` takes. host_memory: of a machine, in GiB; None: as much as needed. gpus_per_node: GPUs
    in a machine; None: as usual. host_bandwidth: of its host memory, in GB/s; None: see `Gpu.host_memory`. nvme: room
    for files in GB, on the drives of all machines together; None: no files. disk: the disks of a machine, as
    `drives.disks` takes them; None: assumed. allow: words of `choices.NUMBERS`. keep: fields that are not changed.
    most: settings that are compiled. say: prints a line. status: shows what is at work, until the next call.

    Raises ConfigError for what `train` refuses, and for an unknown GPU.
    """
    started = time.perf_counter()
    gpu = gpu_key(gpu)
    c = checked(config, gpu)
    facts = seen.corrected(with_nodes(gpu, gpus_per_node, host_bandwidth), c.rates_file)
    if aot.available():
        aot.usable(gpu)  # before anything else: what it sets for XLA's log counts from the first use of XLA
    for word in allow:
        try:
            checked(changed(config, NUMBERS[word]), gpu)
        except ConfigError as error:
            raise ConfigError(f"--allow {word}: {error}") from error
    limits = memory_limits(facts, host_memory, (nvme or 0.0) * GB)
    space = Space(c, facts, limits, tuple(allow), tuple(keep), disks=disks(disk, c.rates_file))

    def compiled(c: Config) -> Plan:
        """The plan of a config, without changes that would make it fit."""
        return plan(c, gpu, gpus_per_node=gpus_per_node, host_bandwidth=host_bandwidth, disk=disk, advise=False)

    found = search(space, status=status)
    if not found.families:
        raise ConfigError(f"--keep: expected fields that leave settings to try, got {', '.join(keep)}; keep fewer")
    say(
        f"estimated {found.tried:,} settings of {found.families:,} kinds in {time.perf_counter() - started:.0f} s; "
        f"candidates that fit: {len(found.candidates)}"
    )
    if facts.seen.note:
        say(facts.seen.note)
    rows, refuted = _trials(config, space, found, compiled, most, say, status)
    status("")
    own_files = limits if nvme is not None else limits._replace(files=math.inf)
    as_given = next((row for row in (*rows, *refuted) if not row.change), None)
    refused = ""
    if as_given is None:
        try:
            as_given = _given(config, space.of(limits=own_files), compiled)
        except ConfigError as error:
            refused = str(error)
    rows.sort(key=lambda row: row.seconds)
    searched = space.of(layouts=found.layouts)
    proposals = [] if rows else remedies.with_limits_lifted(searched)
    nearest = found.nearest
    if nearest is None and not rows and not refuted and limits.host < math.inf:
        nearest = next((x.candidate for x in proposals if x.lifted == remedies.MORE_HOST), None)
        nearest = nearest or search(searched.of(limits=limits._replace(host=math.inf)), 1).nearest
    return FitResult(
        gpu=gpu,
        gpus=c.gpus,
        limits=limits,
        rows=rows,
        refuted=refuted,
        as_given=as_given,
        refused=refused,
        found=found,
        nearest=None if rows or refuted else nearest,
        left_out=_left_out(space, rows[0]) if rows else {},
        disks=space.disks,
        larger=_larger(space, rows[0]) if rows else {},
        proposals=proposals,
    )


def _trials(
    config: Config,
    space: Space,
    found: Found,
    compiled: Callable[[Config], Plan],
    most: int,
    say: Callable[[str], None],
    status: Callable[[str], None],
) -> tuple[list[Trial], list[Trial]]:
    """(rows of candidates that fit as compiled, rows of those that do not). Raises ConfigError if all are refused."""
    rows: list[Trial] = []
    refuted: list[Trial] = []
    refusal = None  # of the compiler or of the checks that come with it
    number = 0  # compiled rows so far
    started, total = time.perf_counter(), min(most, len(found.candidates))
    for candidate in in_order(found.candidates):
        own = differing(space.config, candidate.change)  # "auto" and what it stands for are no change
        candidate = dataclasses.replace(candidate, change=own)
        soonest = min((row.seconds for row in rows if row.plan), default=math.inf)
        if (number >= most and (rows or number >= 2 * most)) or candidate.seconds > soonest * (1 + BAND):
            continue
        if aot.available():
            total = max(total, number + 1)
            at_work = progress(number + 1, total, number / total, time.perf_counter() - started)
            status(f"compiling {at_work}, at most")
        try:
            for row in _until_it_fits(config, candidate, space, compiled):
                (rows if row.fits else refuted).append(row)
                if row.plan:
                    number += 1
                    too_much = f"{_most(row, space.limits)}: does not fit"
                    verdict = f"{1e3 * row.seconds:,.0f} ms" if row.fits else too_much
                    of = f"{number} of {max(total, number)} at most"
                    say(f"compiled {of}: {flags(row.change) or 'as given'}: {verdict}")
        except ConfigError as error:  # what only compiling shows, such as a kernel that does not take these shapes
            refusal = error
    if refusal is not None and not rows and not refuted:
        raise refusal
    return rows, refuted


def in_order(candidates: list[Candidate]) -> list[Candidate]:
    """Candidates in the order in which to compile them: the fastest of each kind, the second fastest, and so on."""
    ranks: dict[tuple, int] = {}
    ranked = []
    for candidate in candidates:
        of_kind = kind(candidate, "lmhead_chunks", *choices.BATCH_FIELDS)
        ranks[of_kind] = ranks.get(of_kind, -1) + 1
        ranked.append((ranks[of_kind], candidate.seconds, candidate))
    return [candidate for *_, candidate in sorted(ranked, key=lambda x: x[:2])]


def _row(config: Config, candidate: Candidate, space: Space, compiled: Callable[[Config], Plan]) -> Trial:
    """The row of a candidate, compiled if there is a compiler."""
    change = differing(config, candidate.change)
    c = changed(config, change)
    row = Trial(c, change, candidate, compiled(c) if aot.available() else None, True)
    return dataclasses.replace(row, fits=row.need.fits(space.limits))


def _most(row: Trial, limits: Memory) -> str:
    """The memory of a compiled row beyond its limit."""
    over = row.need.device > limits.device
    return f"{gib(row.need.device)} on each GPU" if over else f"{gib(row.need.host)} of host memory"


def _until_it_fits(
    config: Config, candidate: Candidate, space: Space, compiled: Callable[[Config], Plan]
) -> Iterator[Trial]:
    """The row of a candidate. While it does not fit as compiled: with fewer resident layers, or less of
    `device_memory`, if a GPU is too small, with less of the files in host memory if that is."""
    for _ in range(1 + RETRIES):
        row = _row(config, candidate, space, compiled)
        yield row
        c, over = candidate.config, row.need.beyond(space.limits)
        if row.fits or row.plan is None:
            return

        def changed_to(change: Change, candidate: Candidate = candidate) -> Candidate:
            return space.estimated(changed(candidate.config, change), candidate.change | change)

        budget, beyond = ("device_memory", over.device) if over.device else ("files_in_memory", over.host)
        if over.device and c.resident_layers:
            fewer = changed_to({"resident_layers": c.resident_layers - 1})
            of_layer = max(1, candidate.need.device - fewer.need.device)
            run = assembly(c)
            left = max(0, c.resident_layers - math.ceil(over.device / of_layer))
            left = resident_in_rounds(run.model, pipeline_stages(run.mesh), left)
            candidate = changed_to({"resident_layers": left})
        elif beyond and c[budget]:
            candidate = changed_to({budget: max(0.0, c[budget] - math.ceil(beyond / GiB))})
        else:
            return


def _given(config: Config, space: Space, compiled: Callable[[Config], Plan]) -> Trial | None:
    """The row of the given config; None if it does not fit by estimate. Raises ConfigError if it cannot run."""
    candidate = space.estimated(space.config)
    if not candidate.need.fits(space.limits):
        return None
    try:
        return _row(config, candidate, space, compiled)
    except ConfigError:  # what only compiling shows
        return Trial(config, {}, candidate, None, False)


def _left_out(space: Space, row: Trial) -> dict[str, float]:
    """Estimated seconds of a row with each setting that changes numbers, was not allowed and is worth it."""
    own = space.of(config=changed(space.config, row.change))
    words = [word for word in remedies.other_numbers(own) if word not in space.allow]
    seconds = {}
    for word in words:
        try:
            seconds[word] = space.estimated(changed(own.config, NUMBERS[word])).seconds
        except ConfigError:  # what only the parts of a run show
            continue
    return {word: s for word, s in seconds.items() if s < row.estimate.seconds * (1 - WORTH)}


def _larger(space: Space, row: Trial) -> dict[int, float]:
    """Estimated tokens/s per GPU of steps with `LARGER` times the sequences, by their number; empty if none pays.

    Looked at if the update, which takes as long for any number of tokens, is `DOMINATES` of the best step or more.
    """
    c = space.config
    if set(choices.BATCH_FIELDS[:2]) & set(space.keep):
        return {}
    if space.estimated(changed(c, row.change)).phases["update"] < DOMINATES * row.estimate.seconds:
        return {}
    now = row.tokens / row.estimate.seconds
    layout = {name: row.config[name] for name in choices.own_layout(c)}
    rates = {}
    for times in LARGER:
        more = changed(c, {"gradient_accumulation_steps": times * c.gradient_accumulation_steps})
        candidate = best(space.of(config=more, layouts=(layout,)))
        if candidate and times * row.tokens / candidate.seconds > now * (1 + DOMINATES * (1 - 1 / times)):
            rates[sequences_of_step(more)] = times * row.tokens / candidate.seconds
    return rates
