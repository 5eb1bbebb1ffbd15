"""Finds the fastest settings of a run on a GPU: searches by estimate, then compiles and simulates the best few.

They are compiled in the order of estimated time, except that candidates which differ in microbatches only wait until
the best of each other kind was compiled, since they are nearly equal. One whose estimate exceeds the best prediction by
more than `BAND` is not compiled.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterator

from surojax.config.fields import Config, flat, gpus_per_sequence
from surojax.errors import ConfigError
from surojax.planner import advice, aot, choices, footprint, layouts, search, seen
from surojax.planner.advice import GiB, changed, differing, flags, gib
from surojax.planner.choices import ALLOWED
from surojax.planner.gpu_names import named
from surojax.planner.gpus import GB, Gpu, with_nodes
from surojax.planner.plan import Plan, checked, plan
from surojax.planner.search import Candidate, Found, Limits, Need, device_limit

MOST_COMPILED = 10
RETRIES = 2  # of a candidate that does not fit as compiled, each with fewer resident layers
LARGER = (2, 4, 8)  # times the tokens of a step
DOMINATES = 0.3  # part of a step that the update takes when a larger one is looked at
WORTH = 0.01  # relative; what saves less time is not worth other numbers
BAND = 0.1  # relative; roofline.py's estimates were at most so much above the predicted time


@dataclasses.dataclass(frozen=True)
class Row:
    """Settings that were compiled, or only estimated if there is no compiler for GPUs.

    change: the fields that differ from the given config. plan: None if it was not compiled. fits: with the reserve of
    `search.device_limit`.
    """

    config: Config
    change: dict
    estimated_s: float
    estimated: Need
    plan: Plan | None
    fits: bool

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step, estimated ones if nothing was predicted."""
        predicted = self.plan.predicted_step_s if self.plan else None
        return self.estimated_s if predicted is None else predicted

    @property
    def tokens(self) -> int:
        """Tokens of a step on each GPU."""
        c = self.config
        return c.per_device_batch_size * c.sequence_len * c.gradient_accumulation_steps // gpus_per_sequence(c)

    @property
    def device_bytes(self) -> int:
        """Bytes on each GPU, as compiled if it was."""
        return self.plan.device_bytes if self.plan else self.estimated.device

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of a machine, as compiled if it was."""
        return self.plan.gpus_per_node * self.plan.host_bytes if self.plan else self.estimated.host


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a search. rows: settings that fit, the fastest first. refuted: settings that fit by estimate only.

    as_given: the given config, with its own files if there is no limit for files; None if it does not fit by estimate.
    refused: why the given config cannot run at all, as `train` would say it; "" if it can. nearest: if nothing fits,
    what comes closest. left_out: for each setting that changes numbers, was not allowed and is worth it, the estimated
    seconds of the best row with it. larger: estimated tokens/s per GPU by sequences of a step, if larger steps pay:
    see `_larger`. remedies: if nothing fits, what would, each with its flags.
    """

    gpu: str
    gpus: int
    limits: Limits
    rows: list[Row]
    refuted: list[Row]
    as_given: Row | None
    refused: str
    found: Found
    nearest: Candidate | None
    left_out: dict[str, float]
    larger: dict[int, float]
    remedies: list[tuple[str, str]]
    search_s: float
    compile_s: float


def fastest(
    config: Config,
    gpu: str,
    *,
    host_memory: float | None = None,
    gpus_per_node: int | None = None,
    host_bandwidth: float | None = None,
    nvme: float | None = None,
    allow: Collection[str] = (),
    keep: Collection[str] = (),
    most: int = MOST_COMPILED,
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """The fastest settings of `config.gpus` GPUs of this kind; the effective batch and the model stay as they are.

    gpu: what `gpu_names.named` takes. host_memory: of a machine, in GiB; None: as much as needed. gpus_per_node: GPUs
    in a machine; None: as usual. host_bandwidth: of its host memory, in GB/s; None: see `Gpu.host_memory`. nvme: room
    for files in GB, on the drives of all machines together; None: no files. allow: words of
    `choices.ALLOWED`. keep: fields that are not changed. most: settings that are compiled. say: told what goes on.

    Raises ConfigError for what `train` refuses, and for a GPU whose rates are not known.
    """
    started = time.perf_counter()
    gpu = named(gpu)
    c = checked(config, gpu)
    facts = seen.corrected(with_nodes(gpu, gpus_per_node, host_bandwidth), c.rates_file)
    if aot.available():
        aot.usable(gpu)  # before anything else: what it sets for XLA's log counts from the first use of XLA
    if facts.rates is None:
        raise ConfigError(f"--gpu: expected a GPU with rates in surojax/planner/gpus.csv, got {gpu!r}; add them there")
    for word in allow:
        try:
            checked(changed(config, ALLOWED[word]), gpu)
        except ConfigError as error:
            raise ConfigError(f"--allow {word}: {error}") from error
    host = math.inf if host_memory is None else search.host_limit(host_memory * GiB)
    limits = Limits(device_limit(facts), host, (nvme or 0.0) * 1e9)
    found = search.search(c, facts, limits, allow=allow, keep=keep)
    searched = time.perf_counter()
    if not found.families:
        raise ConfigError(f"--keep: expected fields that leave settings to try, got {', '.join(keep)}; keep fewer")
    say(
        f"estimated {found.tried:,} settings of {found.families:,} kinds in {searched - started:.0f} s; "
        f"candidates that fit: {len(found.candidates)}"
    )
    if facts.seen.note:
        say(facts.seen.note)
    rows = []
    refuted = []
    refusal = None  # of the compiler or of the checks that come with it
    compiled = 0
    for candidate in in_order(found.candidates):
        own = differing(c, candidate.change)  # without what "auto" stands for, which is no change of the given config
        candidate = dataclasses.replace(candidate, change=own)
        best = min((row.seconds for row in rows if row.plan), default=math.inf)
        if (compiled >= most and (rows or compiled >= 2 * most)) or candidate.seconds > best * (1 + BAND):
            continue
        try:
            for row in _until_it_fits(config, candidate, gpu, facts, limits):
                compiled += row.plan is not None
                (rows if row.fits else refuted).append(row)
                if row.plan:
                    verdict = f"{1e3 * row.seconds:,.0f} ms" if row.fits else f"{_most(row, limits)}: does not fit"
                    say(f"compiled {compiled}: {flags(row.change) or 'as given'}: {verdict}")
        except ConfigError as error:  # what only compiling shows, such as a kernel that does not take these shapes
            refusal = error
    if refusal is not None and not rows and not refuted:
        raise refusal
    own_files = limits if nvme is not None else limits._replace(files=math.inf)
    as_given = next((row for row in (*rows, *refuted) if not row.change), None)
    refused = ""
    if as_given is None:
        try:
            as_given = _given(config, c, gpu, facts, own_files)
        except ConfigError as error:
            refused = str(error)
    rows.sort(key=lambda row: row.seconds)
    return Result(
        gpu=gpu,
        gpus=c.gpus,
        limits=limits,
        rows=rows,
        refuted=refuted,
        as_given=as_given,
        refused=refused,
        found=found,
        nearest=None if rows or refuted else _nearest(c, found, facts, limits, allow, keep),
        left_out=_left_out(c, rows[0], gpu, facts, allow) if rows else {},
        larger=_larger(c, rows[0], facts, limits, allow, keep) if rows else {},
        remedies=[] if rows else _remedies(c, found, facts, limits, allow, keep),
        search_s=searched - started,
        compile_s=time.perf_counter() - searched,
    )


def in_order(candidates: list[Candidate]) -> list[Candidate]:
    """Candidates in the order in which to compile them: the fastest of each kind, the second fastest, and so on."""
    ranks: dict[tuple, int] = {}
    ranked = []
    for candidate in candidates:
        of_kind = search.kind(candidate, "lmhead_chunks", *choices.BATCH_FIELDS)
        ranks[of_kind] = ranks.get(of_kind, -1) + 1
        ranked.append((ranks[of_kind], candidate.seconds, candidate))
    return [candidate for *_, candidate in sorted(ranked, key=lambda x: x[:2])]


def _row(config: Config, candidate: Candidate, gpu: str, facts: Gpu, limits: Limits) -> Row:
    """The row of a candidate, compiled if there is a compiler."""
    change = differing(config, candidate.change)
    c = changed(config, change)
    if not aot.available():
        return Row(c, change, candidate.seconds, candidate.need, None, True)
    bandwidth = facts.host_memory_bandwidth and facts.host_memory_bandwidth / GB
    p = plan(c, gpu, gpus_per_node=facts.gpus_per_node, host_bandwidth=bandwidth, advise=False)
    need = Need(p.device_bytes, p.gpus_per_node * p.host_bytes, p.gpus * p.nvme_bytes)
    return Row(c, change, candidate.seconds, candidate.need, p, need.fits(limits))


def _most(row: Row, limits: Limits) -> str:
    """The memory of a compiled row beyond its limit."""
    over = row.device_bytes > limits.device
    return f"{gib(row.device_bytes)} on each GPU" if over else f"{gib(row.host_bytes)} of host memory"


def _until_it_fits(config: Config, candidate: Candidate, gpu: str, facts: Gpu, limits: Limits) -> Iterator[Row]:
    """The row of a candidate. While it does not fit a GPU as compiled: with fewer resident layers, if it has any."""
    for _ in range(1 + RETRIES):
        row = _row(config, candidate, gpu, facts, limits)
        yield row
        resident = candidate.config.resident_layers
        if row.fits or row.plan is None or not resident or row.device_bytes <= limits.device:
            return
        fewer = changed(candidate.config, {"resident_layers": resident - 1})
        of_layer = max(1, search.estimate(candidate.config, facts)[0].device - search.estimate(fewer, facts)[0].device)
        resident = max(0, resident - math.ceil((row.device_bytes - limits.device) / of_layer))
        change = candidate.change | {"resident_layers": resident}
        fewer = changed(candidate.config, {"resident_layers": resident})
        need, phases = search.estimate(fewer, facts)
        candidate = Candidate(fewer, change, sum(phases.values()), need, phases)


def _given(config: Config, c: Config, gpu: str, facts: Gpu, limits: Limits) -> Row | None:
    """The row of the given config; None if it does not fit by estimate. c: the checked config.

    Raises ConfigError if its settings do not go together.
    """
    need, phases = search.estimate(c, facts)
    if not need.fits(limits):
        return None
    seconds = sum(phases.values())
    try:
        return _row(config, Candidate(c, {}, seconds, need, phases), gpu, facts, limits)
    except ConfigError:  # what only compiling shows
        return Row(config, {}, seconds, need, None, False)


def _nearest(
    c: Config, found: Found, gpu: Gpu, limits: Limits, allow: Collection[str], keep: Collection[str]
) -> Candidate | None:
    """The candidate that comes closest if nothing fits; one that the host memory holds, if there is one."""
    if found.nearest is not None or limits.host == math.inf:
        return found.nearest
    unlimited = limits._replace(host=math.inf)
    more = search.search(c, gpu, unlimited, allow=allow, keep=keep, num_candidates=1, within=found.layouts)
    return next(iter(more.candidates), more.nearest)


def _left_out(c: Config, best: Row, gpu: str, facts: Gpu, allow: Collection[str]) -> dict[str, float]:
    """Estimated seconds of the best row with each setting that changes numbers, was not allowed and is worth it."""
    found = {}
    for word, change in ALLOWED.items():
        if word in allow or not differing(changed(c, best.change), change):
            continue
        try:
            tried = checked(changed(c, best.change, change), gpu)
            seconds = sum(search.estimate(tried, facts)[1].values())
        except ConfigError:  # such as fp8 with settings or on a GPU that it is not for
            continue
        if seconds < best.estimated_s * (1 - WORTH):
            found[word] = seconds
    return found


def _larger(
    c: Config, best: Row, gpu: Gpu, limits: Limits, allow: Collection[str], keep: Collection[str]
) -> dict[int, float]:
    """Estimated tokens/s per GPU of steps with `LARGER` times the sequences, by their number; empty if none pays.

    Looked at if the update, which takes as long for any number of tokens, is `DOMINATES` of the best step or more.
    """
    if set(choices.BATCH_FIELDS[:2]) & set(keep):
        return {}
    phases = search.estimate(changed(c, best.change), gpu)[1]
    if phases["update"] < DOMINATES * best.estimated_s:
        return {}
    now = best.tokens / best.estimated_s
    layout = {name: best.config[name] for name in layouts.layout(c, 1, 1, 1)}
    found = {}
    for times in LARGER:
        more = changed(c, {"gradient_accumulation_steps": times * c.gradient_accumulation_steps})
        fitting = search.search(more, gpu, limits, allow=allow, keep=keep, num_candidates=1, within=[layout]).candidates
        if fitting and times * best.tokens / fitting[0].seconds > now * (1 + DOMINATES * (1 - 1 / times)):
            sequences = more.per_device_batch_size * more.gradient_accumulation_steps
            found[sequences * c.gpus // gpus_per_sequence(c)] = times * best.tokens / fitting[0].seconds
    return found


def _remedies(
    c: Config, found: Found, gpu: Gpu, limits: Limits, allow: Collection[str], keep: Collection[str]
) -> list[tuple[str, str]]:
    """What would fit if nothing does, each as (text, flags): the fastest settings, of host memory the least, too."""

    def best(limit: Limits, words: Collection[str] = allow, fixed: Collection[str] = keep, *, least_host: bool = False):
        """The best candidate with other limits, words or fields."""
        again = search.search(
            c, gpu, limit, allow=words, keep=fixed, num_candidates=1, within=found.layouts, least_host=least_host
        )
        return next(iter(again.candidates), None)

    options: list[tuple[str, Candidate | None]] = []
    if limits.host < math.inf:
        least = best(limits._replace(host=math.inf), least_host=True)
        fastest = best(limits._replace(host=math.inf)) if least else None
        options.append(("more host memory", least))
        if least and fastest and fastest.seconds < least.seconds * (1 - BAND):
            options.append(("more of it, for a faster step", fastest))
    if limits.files < math.inf:
        what = "more files (--nvme)" if limits.files else "files (--nvme)"
        options.append((what, best(limits._replace(files=math.inf))))
    options += [(f"--allow {word}", best(limits, (*allow, word))) for word in ALLOWED if word not in allow]
    options += [("without --keep", best(limits, fixed=()))] if keep else []
    lines = [
        (f"{what}: {x.need.text()}, estimated {1e3 * x.seconds:,.0f} ms", flags(differing(c, x.change)))
        for what, x in options
        if x is not None
    ]
    return lines + _further(c, found, gpu, limits, keep) or [
        ("a smaller model or sequence_len, or GPUs with more memory", "")
    ]


def _further(c: Config, found: Found, gpu: Gpu, limits: Limits, keep: Collection[str]) -> list[tuple[str, str]]:
    """All changes of the config with which it would fit, found by advice.py from what comes closest, if any do."""
    kept = {name: flat(c)[name] for name in keep}

    def needs(tried: Config, n: int) -> advice.Memory:
        if differing(tried, kept):
            raise ConfigError("--keep: expected fields that stay as they are, got another value; try another change")
        return footprint.needs(tried, n, "gpu", in_a_machine=gpu.in_a_machine(n))

    begin = c if found.nearest is None else found.nearest.config
    memory = advice.Memory(int(limits.device), limits.host)
    helps = advice.changes_that_help(begin, c.gpus, memory, "gpu", needs)
    if not helps or any(advice.missing(helps[-1][1], memory)):
        return []
    end = changed(begin, *(change for change, _ in helps))
    need, phases = search.estimate(end, gpu)
    text = f"all of these: {need.text()}, estimated {1e3 * sum(phases.values()):,.0f} ms"
    return [(text, flags(differing(c, flat(end))))]
