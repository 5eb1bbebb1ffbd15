"""Searches the settings of memory, mesh and microbatches for the fastest step that fits.

What is searched: layout (`tp_size`, `cp_size`, `pp_size`), mesh (`zero_level`, `dp_replicate_size`, `shard_outer`),
placement (every `offload_*`, `resident_layers`, `overlap_update`, state in files), recomputation, the split of the
effective batch into microbatches, `microbatches_per_fetch`, `lmhead_chunks`, and of settings that change numbers those
that are allowed (`choices.ALLOWED`).

There are too many combinations to try all. Four rules make few of them enough.

* A layout is tried with a few families first (`choices.SAMPLED`). The `MOST_LAYOUTS` fastest are searched, but for
  those that take more than `FAR` longer than the fastest one.

* Storing a class of tensors in host memory never makes a step faster. So settings that differ in placement only are a
  `Family`, and of each family only the fastest placement that fits can be the best. Placements are tried in the order
  of their estimated time; the first that fits ends the search of the family, but for ties with it that do not offload
  all that it does. A placement that would not fit even if working space did not grow is passed over. If weights are
  offloaded, as many layers stay resident as fit.
* With nothing offloaded a family is as fast as it can be. Families are taken in the order of that time. As soon as it
  exceeds the time of the `KEPT`-th best placement found, no other family can have a better one, and the search ends.
* Files are slower than host memory. They are tried only if nothing fits without them.

Memory is estimated by footprint.py, time by roofline.py, so a rule holds as far as these do. fastest.py then compiles
and simulates the best few.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

from surojax.assembly import Assembly, from_config
from surojax.config import checks
from surojax.config.fields import DEFAULTS, Config, flat, mesh_sizes
from surojax.errors import ConfigError
from surojax.parallel.schedule import layers_of_stage
from surojax.placement.home import NVME
from surojax.placement.mesh import abstract_mesh
from surojax.planner import choices, footprint, layouts, roofline
from surojax.planner.advice import FOLDER, OFFLOADS, Change, changed, differing, flags, gib, wrapped
from surojax.planner.gpus import Gpu
from surojax.planner.traffic import batch_of
from surojax.refusals import about, refused
from surojax.step.state_plan import bytes_per_device

ALTERNATIVES = 3  # that are proposed for settings that do not fit
TIE = 0.01  # relative; placements of a family that the estimate cannot tell apart, as classes of equal size
MOST_LAYOUTS = 3  # that are searched
FAR = 0.15  # relative; layouts whose sample is so much slower are not searched
KEPT = 32  # candidates that the estimate keeps
RESERVE = 512 * 2**20  # bytes of a GPU left for cuDNN's workspaces and fragmentation, which no estimate counts
# Fields that the parts of a run do not depend on.
IRRELEVANT = (*choices.BATCH_FIELDS[:2], "datasets", "validation_datasets")


class Limits(NamedTuple):
    """Bytes that there are: on each GPU, in the host memory of a machine, and in files for all GPUs."""

    device: float
    host: float = math.inf
    files: float = 0.0


class Need(NamedTuple):
    """Bytes that a run needs: on each GPU, in the host memory of a machine, and in files for all GPUs."""

    device: int
    host: int
    files: int

    def fits(self, limits: Limits) -> bool:
        return all(need <= limit for need, limit in zip(self, limits, strict=True))

    def text(self) -> str:
        """As text: "1.0 GiB on each GPU, 2.0 GiB of host memory, 3 GB of files", without what is 0."""
        sizes = (
            f"{gib(self.device)} on each GPU",
            f"{gib(self.host)} of host memory",
            f"{self.files / 1e9:,.1f} GB of files",
        )
        return ", ".join(text for text, size in zip(sizes, self, strict=True) if size > 0)

    def beyond(self, limits: Limits) -> "Need":
        """The bytes that exceed the limits."""
        return Need(*(math.ceil(max(0, need - limit)) for need, limit in zip(self, limits, strict=True)))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings that fit by estimate.

    change: of the config that the search began with. seconds: estimated, of a step; phases: of each part of it.
    """

    config: Config
    change: Change
    seconds: float
    need: Need
    phases: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search. candidates: the fastest that fit, by estimated time.

    nearest: if nothing fits, the settings that miss the least memory, within the host memory that there is.
    layouts: that were searched. sampled: of each layout that fits, the estimated seconds of the fastest of a few
    families, if there are several layouts. not_tried: why an axis has no other size, by its name.
    """

    candidates: list[Candidate]
    families: int
    tried: int  # settings whose memory was estimated
    nearest: Candidate | None
    layouts: list[Change]
    sampled: list[tuple[Change, float]]
    not_tried: dict[str, str]


def device_limit(gpu: Gpu) -> int:
    """Bytes of a GPU that a candidate may need."""
    return int(footprint.POOL * gpu.memory_bytes) - RESERVE


def host_limit(size: float) -> float:
    """Bytes that a candidate may need of a host memory of this size."""
    return footprint.HOST_POOL * size


class Family(NamedTuple):
    """Settings that differ in placement only. floor: seconds of a step with nothing offloaded."""

    change: Change
    work: roofline.Work
    floor: float


def search(
    c: Config,
    gpu: Gpu,
    limits: Limits,
    *,
    allow: Collection[str] = (),
    keep: Collection[str] = (),
    num_candidates: int = KEPT,
    within: list[Change] | None = None,
    least_host: bool = False,
) -> Found:
    """The fastest settings that fit, for a checked config (`plan.checked`) and a GPU with rates.

    allow: words of `choices.ALLOWED`. keep: fields that are not changed. within: layouts to search; None: the best by
    samples. least_host: those that need the least host memory, instead of the fastest.
    """
    return Search(c, gpu, limits, allow, keep, num_candidates, within, least_host).run()


class Search:
    """One search: what was estimated so far."""

    def __init__(
        self,
        c: Config,
        gpu: Gpu,
        limits: Limits,
        allow: Collection[str],
        keep: Collection[str],
        num_candidates: int,
        within: list[Change] | None,
        least_host: bool = False,
    ):
        self.c = c
        self.values = flat(c)
        self.gpu = gpu
        self.limits = limits
        self.allow = allow
        self.keep = {name: self.values[name] for name in keep}
        self.num_candidates = num_candidates
        self.within = within
        self.least_host = least_host
        self.assemblies: dict[tuple, Assembly] = {}
        self.tried = 0
        self.nearest: Candidate | None = None
        self.sampled: list[tuple[Change, float]] = []
        self.refused: dict[str, str] = {}  # why the checks refuse an axis, by its name

    def run(self) -> Found:
        searched, not_tried = self.layouts()
        families = sorted((x for of in searched for x in self.families(of)), key=lambda family: family.floor)
        found: list[Candidate] = []
        for in_files in (False, True) if self.limits.files else (False,):
            for family in families:
                enough = len(found) >= self.num_candidates and not self.least_host
                if enough and family.floor > found[self.num_candidates - 1].seconds:
                    break
                more = [*found, *self.fastest(family, in_files)]
                in_order = sorted(more, key=lambda x: x.need.host) if self.least_host else but_for_slices(more)
                found = in_order[: self.num_candidates]
            if found:
                break
        nearest = None if found else self.nearest
        return Found(found, len(families), self.tried, nearest, searched, self.sampled, not_tried)

    def layouts(self) -> tuple[list[Change], dict[str, str]]:
        """(the layouts to search, why an axis is not tried). If nothing fits: the config's own, and the nearest."""
        if self.within:
            return self.within, {}
        possible, not_tried = layouts.layouts(self.c, self.gpu, self.keep)
        if len(possible) == 1:
            return possible, not_tried
        accepted: set[str] = set()  # axes of which the checks accept another size
        for of in possible:
            families = sorted(self.families(of, sampled=True), key=lambda family: family.floor)
            accepted |= {axis for axis in layouts.AXES if families and of[axis] != self.c[axis]}
            best = math.inf
            for family in families:
                if family.floor > best:
                    break
                best = min([best, *(x.seconds for x in self.fastest(family, in_files=False))])
            if best < math.inf:
                self.sampled.append((of, best))
        not_tried |= {axis: reason for axis, reason in self.refused.items() if axis not in accepted}
        self.sampled.sort(key=lambda x: x[1])
        near = [of for of, seconds in self.sampled if seconds <= (1 + FAR) * self.sampled[0][1]]
        of_nearest = [of for of in possible[1:] if self.nearest and not differing(self.nearest.config, of)]
        return near[:MOST_LAYOUTS] or [possible[0], *of_nearest], not_tried

    def families(self, layout: Change, *, sampled: bool = False) -> Iterator[Family]:
        """All families of a layout that the checks accept; sampled: a few of them."""
        meshes = layouts.meshes(self.c, self.gpu, layout, self.keep, few=sampled)
        again = choices.recomputations(self.c)
        splits = choices.batches(self.c, layout)
        if sampled:
            again = [x for x in again if any(kind.items() <= x.items() for kind in choices.SAMPLED)]
            splits = choices.sample(splits)
        for of_part in itertools.product([layout], choices.numbers(self.c, self.allow), meshes, again, splits):
            change = {name: value for part in of_part for name, value in part.items()}
            if self.changes_kept(change):
                continue
            change |= {f"offload_{name}": False for name in OFFLOADS} | {"resident_layers": 0, "nvme_path": ""}
            change["overlap_update"] = False
            if self.c.persistent_quants:
                change["offload_quants"] = False
            if row := refused(self.values | change, DEFAULTS, checks.REFUSALS):
                self.note_refusal(layout, row.message(self.values | change, DEFAULTS))
                continue
            try:
                tried = self.changed(change)
                run = self.assembly(tried)
            except ConfigError as error:  # sizes that do not divide
                self.note_refusal(layout, str(error))
                continue
            rows = footprint.by_class(run, batch_of(tried), "gpu")
            work = work_of(tried, run, rows, self.gpu)
            yield Family(change, work, sum(roofline.phases(work, ()).values()))

    def note_refusal(self, layout: Change, message: str) -> None:
        """Remembers why a layout is refused, for each axis that it changes and that has no reason yet."""
        for axis in layouts.AXES:
            if layout[axis] != self.c[axis]:
                self.refused.setdefault(axis, message)

    def allows(self, field: str, change: Change) -> bool:
        """Whether the table of refusals has no row about this field that refuses a change."""
        return refused(self.values | change, DEFAULTS, about(field, checks.REFUSALS)) is None

    def may_overlap(self, family: Family, offloaded: Collection[str], in_files: bool) -> list[bool]:
        """The values of `overlap_update` to try with these in host memory."""
        stored = {name: "nvme" if in_files and name in ("optimizer", "master") else True for name in offloaded}
        placed = family.change | {f"offload_{name}": value for name, value in stored.items()}
        return [x for x in (False, True) if self.allows("overlap_update", placed | {"overlap_update": x})]

    def fastest(self, family: Family, in_files: bool) -> list[Candidate]:
        """The fastest placement of a family that fits, and those that take as long within `TIE`; empty if none fits."""
        layers = layers_of_stage(self.c.model.num_hidden_layers, family.change["pp_size"])
        sizes = family.work.sizes
        stored = sizes | {"residual": sizes["residuals at once"]}  # bytes that are in a memory, not those that move
        least = self.needed(self.changed(family.change)).device  # with nothing offloaded

        def placed(offloaded: tuple[str, ...], resident: int, overlaps: bool) -> tuple:
            """An entry of the queue: bytes of host memory if the least are asked for, estimated seconds, the number of
            classes, and the arguments."""
            found = roofline.phases(family.work, offloaded, resident / layers, overlap_update=overlaps)
            in_host = self.least_host * sum(stored[name] for name in offloaded)
            in_host -= self.least_host * ("weights" in offloaded) * stored["weights"] * resident / layers
            return in_host, sum(found.values()), len(offloaded), offloaded, resident, overlaps

        def room_for(needed: float) -> int:
            """Layers whose weights fit into what `needed` bytes leave; less than 0 if these do not fit."""
            return math.floor((self.limits.device - needed) * layers / max(1, sizes["weights"]))

        queue = []
        offloads = tuple(x for x in OFFLOADS if self.allows(f"offload_{x}", family.change | {f"offload_{x}": True}))
        for offloaded in choices.subsets(offloads):
            room = room_for(least - sum(stored[name] for name in offloaded))
            first = family.change | {"offload_weights": "weights" in offloaded, "resident_layers": 1}
            streams = self.allows("resident_layers", first)
            resident = min(max(room, 0), layers - 1) if streams else 0
            resident = self.keep.get("resident_layers", resident)
            overlapping = self.may_overlap(family, offloaded, in_files)
            if room >= 0 or len(offloaded) == len(offloads):
                queue += [placed(offloaded, resident, overlaps) for overlaps in overlapping]
        heapq.heapify(queue)
        found: list[Candidate] = []
        placements: list[set[str]] = []  # of what was found
        while queue and not (found and (self.least_host or queue[0][1] > found[0].seconds * (1 + TIE))):
            _, seconds, _, offloaded, resident, overlaps = heapq.heappop(queue)
            if any(fewer < set(offloaded) for fewer in placements):
                continue
            candidates = self.stored(family, offloaded, resident, in_files, seconds, overlaps)
            if best := next((x for x in candidates if x.need.fits(self.limits)), None):
                found.append(best)
                placements.append(set(offloaded))
                continue
            for x in candidates:
                if x.need.host <= self.limits.host and (not self.nearest or self.beyond(x) < self.beyond(self.nearest)):
                    self.nearest = x
            # Working space has grown.
            if candidates and resident and candidates[0].need.device > self.limits.device:
                then = resident + min(-1, room_for(candidates[0].need.device))
                heapq.heappush(queue, placed(offloaded, max(0, then), overlaps))
        return found

    def stored(
        self,
        family: Family,
        offloaded: tuple[str, ...],
        resident: int,
        in_files: bool,
        seconds: float,
        overlaps: bool,
    ) -> list[Candidate]:
        """The candidates of a placement that the checks accept: in host memory, or each choice of what is in files."""
        found = []
        for files in choices.stored_in_files(offloaded) if in_files else [()]:
            in_host = sum(family.work.sizes[name] for name in offloaded if name not in (*files, "weights"))
            if self.gpu.in_a_machine(self.c.gpus) * in_host > self.limits.host:
                continue
            change = family.change | {f"offload_{name}": "nvme" if name in files else True for name in offloaded}
            change |= {"resident_layers": resident, "overlap_update": overlaps}
            if "weights" in offloaded and self.c.persistent_quants:
                change["offload_quants"] = True
            if files:
                change["nvme_path"] = self.c.nvme_path or FOLDER
            if self.changes_kept(change):
                continue
            try:
                tried = self.changed(change)
                need = self.needed(tried)
            except ConfigError:
                continue
            resident_part = resident / layers_of_stage(self.c.model.num_hidden_layers, tried.pp_size)
            phases = roofline.phases(family.work, offloaded, resident_part, overlap_update=overlaps)
            found.append(Candidate(tried, change, seconds, need, phases))
        return found

    def beyond(self, candidate: Candidate) -> int:
        """Bytes that a candidate needs beyond the limits, of any memory."""
        return sum(candidate.need.beyond(self.limits))

    def changes_kept(self, change: Change) -> bool:
        """Whether a change has another value for a field that is to be kept."""
        return any(name in change and change[name] != value for name, value in self.keep.items())

    def changed(self, change: Change) -> Config:
        """The config with a change. Raises ConfigError if the checks refuse it."""
        tried = changed(self.c, change)
        checks.check(tried)
        return tried

    def assembly(self, c: Config) -> Assembly:
        """The parts of a run of this config."""
        key = tuple((k, v) for k, v in flat(c).items() if k not in IRRELEVANT)
        if key not in self.assemblies:
            self.assemblies[key] = assembly(c)
        return self.assemblies[key]

    def needed(self, c: Config) -> Need:
        """Estimated bytes that a config needs."""
        self.tried += 1
        run = self.assembly(c)
        return needed(c, run, footprint.by_class(run, batch_of(c), "gpu"), self.gpu)


def alternatives(c: Config, gpu: Gpu, limits: Limits) -> list[str]:
    """The fastest settings that fit, by estimate: their memory, their time, and their flags on lines of their own."""

    def text(candidate: Candidate) -> str:
        need = candidate.need
        host = f", {gib(need.host)} of host memory" if need.host and limits.host < math.inf else ""
        time = f"estimated {1e3 * candidate.seconds:,.0f} ms a step, not compiled"
        options = flags(differing(c, candidate.change))
        return "\n".join([f"{gib(need.device)}{host} (fits), {time}:", *wrapped(options, "    ")])

    found = search(c, gpu, limits, keep=layouts.AXES, num_candidates=ALTERNATIVES).candidates
    return [f"{'or ' if i else ''}{text(candidate)}" for i, candidate in enumerate(found)]


def but_for_slices(candidates: list[Candidate]) -> list[Candidate]:
    """The fastest of candidates that differ in slices of the head only, in the order of time."""
    fastest: dict[tuple, Candidate] = {}
    for candidate in sorted(candidates, key=lambda x: x.seconds):
        fastest.setdefault(kind(candidate, "lmhead_chunks"), candidate)
    return list(fastest.values())


def kind(candidate: Candidate, *without: str) -> tuple:
    """The changes of a candidate but for some fields, to tell candidates apart."""
    return tuple((name, value) for name, value in candidate.change.items() if name not in without)


def estimate(c: Config, gpu: Gpu) -> tuple[Need, dict[str, float]]:
    """(estimated bytes, estimated seconds of each phase of a step) of a checked config on a GPU with rates."""
    run = assembly(c)
    rows = footprint.by_class(run, batch_of(c), "gpu")
    offloaded = [name for name in OFFLOADS if c[f"offload_{name}"]]
    if c.offload_quants and "weights" not in offloaded:
        offloaded.append("weights")
    resident = c.resident_layers / layers_of_stage(run.model.num_layers, c.pp_size)
    phases = roofline.phases(work_of(c, run, rows, gpu), offloaded, resident, overlap_update=c.overlap_update)
    return needed(c, run, rows, gpu), phases


def assembly(c: Config) -> Assembly:
    """The parts of a run of a config. Raises ConfigError if its settings do not go together."""
    return from_config(c, abstract_mesh(c.gpus, **mesh_sizes(c)), total_steps=1000)


def work_of(c: Config, run: Assembly, rows: dict[str, dict[str, int]], gpu: Gpu) -> roofline.Work:
    """The `Work` of a config's step. rows: `footprint.by_class` of the run."""
    batch = batch_of(c)
    return roofline.step_work(run, batch, gpu, roofline.stored_bytes(run, rows, batch.microbatches))


def needed(c: Config, run: Assembly, rows: dict[str, dict[str, int]], gpu: Gpu) -> Need:
    """Estimated bytes that a run of a config needs. rows: `footprint.by_class` of the run."""
    device, host = (sum(row[home] for row in rows.values()) for home in ("device", "host"))
    return Need(device, gpu.in_a_machine(c.gpus) * host, c.gpus * bytes_per_device(run.plan, NVME))
