"""Searches what may change (choices.py) for the fastest step that fits, and for what would make it fit.

`search` is behind `fit`, and behind the changes that `plan` and `train` propose for settings that do not fit. There are
too many combinations to try all. Four rules make few of them enough.

* A layout is tried with a few families first (`choices.SAMPLED`). The `MOST_LAYOUTS` fastest are searched, but for
  those that take more than `FAR` longer than the fastest one.

* Storing a class of tensors in host memory never makes a step faster. So settings that differ in placement only are a
  `Family`, and of each family only the fastest placement that fits can be the best. Placements are tried in the order
  of their estimated time; the first that fits ends the search of the family, but for ties with it that do not offload
  all that it does. A placement that would not fit even if working space did not grow is passed over. If weights are
  offloaded, as many layers stay resident as fit, of layers of several kinds in turn whole rounds.
* With nothing offloaded a family is as fast as it can be. Families are taken in the order of that time. As soon as it
  exceeds the time of the `KEPT`-th best placement found, no other family can have a better one, and the search ends.
* Files are slower than host memory. They are tried only if nothing fits without them, and the host memory that is left
  keeps a part of them.

Memory is estimated by footprint.py, time by roofline.py, so a rule holds as far as these do. fastest.py then compiles
and simulates the best few.
"""

import dataclasses
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from surojax.assembly.assemble import Assembly
from surojax.config import checks
from surojax.config.changes import Change, changed, differing
from surojax.config.fields import Config, flat, names_with
from surojax.config.sections import BatchSettings
from surojax.declared import Facts, names_of
from surojax.errors import ConfigError
from surojax.offloads import TO_DEVICE
from surojax.placement.mesh import pipeline_stages
from surojax.planner import choices, roofline
from surojax.planner.amounts import GiB, Memory
from surojax.planner.candidate import Candidate, estimated, needed, storage_tiers
from surojax.planner.disks import ASSUMED_DISKS, Disks
from surojax.planner.footprint import Rows, assembly, by_class
from surojax.planner.gpus import Gpu
from surojax.planner.layer_sizes import resident_in_rounds
from surojax.planner.roofline import StorageTiers
from surojax.planner.traffic import batch_of
from surojax.run.console import progress

TIE = 0.01  # relative; placements of a family that the estimate cannot tell apart, as classes of equal size
MOST_LAYOUTS = 3  # that are searched
FAR = 0.15  # relative; layouts whose sample is so much slower are not searched
KEPT = 32  # candidates that the estimate keeps
STEPS = 4  # of a GiB: in whole ones, the host memory of a 7B model on one RTX 4090 was missed by 0.1 GiB
UNCERTAIN = 0.05  # relative; what estimates of memory may be short by, which budgets do not fill
RELEVANT = names_with(Facts.COST)  # fields that the parts of a run depend on
# Those that they do not depend on unless a step has programs of one layer, with all microbatches inside.
OF_BATCH = frozenset(names_of(BatchSettings))


class Family(NamedTuple):
    """Settings that differ in placement only. run, floor, least: the parts of a run, seconds of a step, and bytes of a
    device, with nothing offloaded."""

    change: Change
    run: Assembly
    work: roofline.StepWork
    floor: float
    least: float


@dataclasses.dataclass(frozen=True)
class Space:
    """The choices of a search. config: checked (`plan.checked`). gpu: with rates.

    allow: words of `choices.NUMBERS`. keep: fields that are not changed. layouts: to search; None: the best by samples.
    few: a few families of each layout. platform: "gpu" or "cpu"; on CPUs nothing is offloaded, and all memory counts as
    that of the device. disks: of a machine, for files.
    """

    config: Config
    gpu: Gpu
    limits: Memory
    allow: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    layouts: tuple[Change, ...] | None = None
    few: bool = False
    platform: str = "gpu"
    disks: Disks = ASSUMED_DISKS
    # Families, placements and parts of runs by what they are of; shared by spaces that differ in limits and words.
    known: dict[tuple, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def of(self, **changes: Any) -> "Space":
        """Returns this space with other values of some fields."""
        return dataclasses.replace(self, **changes, **({"known": {}} if "config" in changes else {}))

    def estimated(self, c: Config, change: Change | None = None) -> Candidate:
        """A checked config as a candidate on the GPUs and disks of this space, whether it fits or not."""
        return estimated(c, self.gpu, change, self.disks)


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search. candidates: the fastest that fit, by estimated time.

    nearest: if nothing fits, the settings that miss the least memory, within the host memory that there is. tried:
    settings whose memory was estimated. layouts: that were searched. sampled: of each layout that fits, the estimated
    seconds of the fastest of a few families, if there are several layouts. not_tried: why an axis has no other size.
    """

    candidates: list[Candidate]
    families: int
    tried: int
    nearest: Candidate | None
    layouts: tuple[Change, ...]
    sampled: list[tuple[Change, float]]
    not_tried: dict[str, str]


def search(
    space: Space, most: int = KEPT, *, least_host: bool = False, status: Callable[[str], None] = lambda text: None
) -> Found:
    """Returns the fastest settings that fit, at most so many; least_host: those that need the least host memory.

    status: shows which layout is at work.
    """
    return _Search(space, most, least_host, status).run()


def best(space: Space, *, least_host: bool = False) -> Candidate | None:
    """Returns the fastest settings that fit, or None; least_host: those that need the least host memory."""
    return next(iter(search(space, 1, least_host=least_host).candidates), None)


class _Search:
    """One search: what was estimated so far."""

    def __init__(self, space: Space, most: int, least_host: bool, status: Callable[[str], None]):
        self.space = space
        self.status = status
        self.most = most
        self.least_host = least_host
        own = flat(space.config)
        self.keep = {name: own[name] for name in space.keep}
        self.tried = 0
        self.nearest: Candidate | None = None
        self.sampled: list[tuple[Change, float]] = []
        self.refused: dict[str, str] = {}  # why the checks refuse an axis, by its name

    def run(self) -> Found:
        """Searches the layouts."""
        layouts, not_tried = self.layouts()
        families = [family for of in layouts for family in self.families(of, sampled=self.space.few)]
        if self.space.few and not families:  # a field that is kept has none of their values
            families = [family for of in layouts for family in self.families(of)]
        families.sort(key=lambda family: family.least if self.least_host else family.floor)
        candidates: list[Candidate] = []
        for in_files in (False, True) if self.space.limits.files else (False,):
            for number, family in enumerate(families, 1):
                self.status(f"estimating settings: kind {number} of {len(families)} at most")
                if len(candidates) == self.most and self.cannot_improve(family, candidates[-1]):
                    break
                more = [*candidates, *self.fastest(family, in_files)]
                ordered = sorted(more, key=lambda x: x.need.host) if self.least_host else but_for_slices(more)
                candidates = ordered[: self.most]
            if candidates:
                break
        nearest = None if candidates else self.nearest
        return Found(candidates, len(families), self.tried, nearest, tuple(layouts), self.sampled, not_tried)

    def cannot_improve(self, family: Family, last: Candidate) -> bool:
        """Whether no placement of a family is better than a candidate: what does not fit a GPU is in host memory."""
        if not self.least_host:
            return family.floor > last.seconds
        gpus = self.space.gpu.in_a_machine(self.space.config.gpus)
        return gpus * (family.least - self.space.limits.device) > last.need.host

    def layouts(self) -> tuple[tuple[Change, ...], dict[str, str]]:
        """(the layouts to search, why an axis is not tried). If nothing fits: the config's own, and the nearest."""
        c = self.space.config
        if self.space.layouts:
            return self.space.layouts, {}
        possible, not_tried = choices.mesh_layouts(c, self.space.gpu, self.keep)
        if len(possible) == 1:
            return tuple(possible), not_tried
        accepted: set[str] = set()  # axes of which the checks accept another size
        started = time.perf_counter()
        for number, layout in enumerate(possible):
            at_work = progress(number + 1, len(possible), number / len(possible), time.perf_counter() - started)
            self.status(f"estimating layouts of GPUs: {at_work}")
            families = sorted(self.families(layout, sampled=True), key=lambda family: family.floor)
            accepted |= {axis for axis in choices.AXES if families and layout[axis] != c[axis]}
            seconds = math.inf
            for family in families:
                if family.floor > seconds:
                    break
                seconds = min([seconds, *(x.seconds for x in self.fastest(family, in_files=False))])
            if seconds < math.inf:
                self.sampled.append((layout, seconds))
        not_tried |= {axis: reason for axis, reason in self.refused.items() if axis not in accepted}
        self.sampled.sort(key=lambda x: x[1])
        near = tuple(layout for layout, seconds in self.sampled if seconds <= (1 + FAR) * self.sampled[0][1])
        of_nearest = [x for x in possible[1:] if self.nearest and not differing(self.nearest.config, x)]
        return near[:MOST_LAYOUTS] or (possible[0], *of_nearest), not_tried

    def families(self, layout: Change, *, sampled: bool = False) -> Iterator[Family]:
        """All families of a layout that the checks accept; sampled: a few of them."""
        c = self.space.config
        outer = self.space.few or not sampled
        meshes = choices.meshes(c, self.space.gpu, layout, self.keep, few=sampled, outer=outer)
        recomputations = choices.recomputations(c)
        batches = choices.batches(c, layout)
        if sampled:
            recomputations = [x for x in recomputations if any(kind.items() <= x.items() for kind in choices.SAMPLED)]
            smallest = [choices.smallest(batches)] * self.space.few
            batches = [*choices.sample_batches(batches), *smallest]
        parts = ([layout], choices.numbers(c, self.space.allow), meshes, recomputations, batches)
        for of_part in itertools.product(*parts, choices.chunks(c, layout)):
            change = {name: value for part in of_part for name, value in part.items()}
            if self.changes_kept(change):
                continue
            change |= choices.nothing_offloaded(c)
            family = self.known(("family", *change.items()), lambda change=change: self.family(change))
            if isinstance(family, Family):
                yield family
                continue
            for axis in choices.AXES:
                if layout[axis] != c[axis]:
                    self.refused.setdefault(axis, family)

    def family(self, change: Change) -> Family | str:
        """The family of a change, or why the checks refuse it."""
        space = self.space
        try:
            tried, run, rows = self.run_of(change)
        except ConfigError as error:
            return str(error)
        work = roofline.step_work(run, batch_of(tried), space.gpu, rows, space.disks)
        least = needed(tried, rows, space.gpu, space.platform).device
        return Family(change, run, work, sum(roofline.phases(work).values()), least)

    def fastest(self, family: Family, in_files: bool) -> list[Candidate]:
        """The fastest placement of a family that fits, and those that take as long within `TIE`; empty if none fits."""
        c, limits = self.space.config, self.space.limits
        sizes, layers = family.work.sizes, family.work.layers

        def queued(x: StorageTiers) -> tuple:
            """An entry of the queue: bytes of host memory if the least are asked for, estimated seconds at best, the
            number of classes that are moved, and the placement."""
            in_host = sum(sizes[row] for row in x.offloaded if row not in x.files)
            in_host -= ("weights" in x.offloaded) * sizes["weights"] * x.resident / layers
            seconds = sum(roofline.phases(family.work, x._replace(on_device=kept(x))).values())
            return self.least_host * in_host, seconds, len(x.offloaded) + len(x.files), x

        def left(x: StorageTiers) -> float:
            """Bytes of `TO_DEVICE` that the device has room for at most."""
            room = limits.device - family.least + sum(sizes[row] for row in x.offloaded)
            room -= sizes["weights"] * x.resident / layers
            return 0.0 if x.files else max(0.0, min(room, sum(sizes[row] for row in TO_DEVICE if row in x.offloaded)))

        def kept(x: StorageTiers) -> tuple[float, ...]:
            """What `left` leaves room for, of each of `TO_DEVICE`."""
            room = left(x)
            parts = []
            for row in TO_DEVICE:
                parts.append(min(room, sizes[row] if row in x.offloaded else 0.0))
                room -= parts[-1]
            return tuple(parts)

        def room_for(need: float) -> int:
            """Layers whose weights fit into what `need` bytes leave; less than 0 if these do not fit."""
            return math.floor((limits.device - need) * layers / max(1, sizes["weights"]))

        def in_rounds(resident: int) -> int:
            return resident_in_rounds(family.run.model, pipeline_stages(family.run.mesh), resident)

        queue = []
        offloads = self.known(("offloads",), lambda: choices.offloadable(c) if self.space.platform == "gpu" else ())
        for x in self.known(("placements", in_files), lambda: choices.placements(c, offloads, in_files)):
            in_host = sum(sizes[row] for row in x.offloaded if row not in (*x.files, "weights")) - left(x)
            if self.space.gpu.in_a_machine(c.gpus) * in_host > limits.host:
                continue
            room = room_for(family.least - sum(sizes[row] for row in x.offloaded))
            streams = "weights" in x.offloaded and "weights" not in x.files and not c.persistent_quants
            resident = self.keep.get("resident_layers", in_rounds(min(max(room, 0), layers - 1)) if streams else 0)
            if room >= 0 or len(x.offloaded) == len(offloads):
                queue.append(queued(x._replace(resident=resident)))
                if resident and "resident_layers" not in self.keep and not set(x.offloaded).isdisjoint(TO_DEVICE):
                    queue.append(queued(x))  # the room for `device_memory` instead
        heapq.heapify(queue)
        fastest: list[Candidate] = []
        moved: list[set[str]] = []  # by `fastest`
        while queue and not (fastest and (self.least_host or queue[0][1] > fastest[0].seconds * (1 + TIE))):
            stored = heapq.heappop(queue)[-1]
            moves = {*stored.offloaded, *(f"{row} in files" for row in stored.files)}
            if any(fewer < moves for fewer in moved):
                continue
            x = self.candidate(family, stored)
            if x is None:
                continue
            if x.need.fits(limits):
                fastest.append(x)
                moved.append(moves)
                continue
            if x.need.host <= limits.host and (not self.nearest or self.over(x) < self.over(self.nearest)):
                self.nearest = x
            # Working space has grown.
            if stored.resident and x.need.device > limits.device:
                fewer_resident = in_rounds(max(0, stored.resident + min(-1, room_for(x.need.device))))
                heapq.heappush(queue, queued(stored._replace(resident=fewer_resident)))
        return fastest

    def candidate(self, family: Family, stored: StorageTiers) -> Candidate | None:
        """The candidate of a placement; None if the checks refuse it."""
        change = family.change | choices.placement(self.space.config, stored)
        if "device_memory" in self.keep:
            change |= {"device_memory": self.keep["device_memory"]}
        if self.changes_kept(change):
            return None
        placed = self.known(("placed", *change.items()), lambda: self.placed(change))
        if placed is None:
            return None
        tried, run, need = placed
        if stored.files and "files_in_memory" not in self.keep and (gibs := self.room_in_memory(need)):
            change |= {"files_in_memory": gibs}  # the same run, with so many bytes elsewhere
            tried = changed(tried, {"files_in_memory": gibs})
            placed = tried, run, Memory(need.device, need.host + gibs * GiB, need.files - gibs * GiB)
        tries = [(change, placed)]
        if "device_memory" not in self.keep and (gibs := self.room_on_device(family, stored, need)):
            # Whole tensors are kept, of one class after the other: with more of them a step may take longer.
            budgets = [gibs - i / STEPS for i in range(STEPS) if gibs > i / STEPS]
            tries = [(x, self.placed(x)) for x in (change | {"device_memory": budget} for budget in budgets)]
        found = [self.with_budget(family, *x) for x in tries]
        return min(found, key=lambda x: (not x.need.fits(self.space.limits), x.seconds))

    def with_budget(self, family: Family, change: Change, placed: tuple[Config, Assembly, Memory] | None) -> Candidate:
        """The candidate of a placement with its `device_memory` or `files_in_memory`. placed: the result for it."""
        assert placed is not None, "a budget is refused"
        tried, run, need = placed
        return Candidate(tried, change, need, roofline.phases(family.work, storage_tiers(tried, run)))

    def room_in_memory(self, need: Memory) -> float:
        """GiB of host memory that a placement with files leaves, at most what it has in files.

        0 on several machines, whose processes have a part of the files each.
        """
        if math.isinf(self.space.limits.host) or self.space.config.gpus > self.space.gpu.gpus_per_node:
            return 0.0
        left = self.space.limits.host - (1 + UNCERTAIN) * need.host
        return in_steps(min(left, need.files))

    def room_on_device(self, family: Family, stored: StorageTiers, need: Memory) -> float:
        """GiB of device memory that a placement leaves, at most what it has of `TO_DEVICE` in host memory."""
        if stored.files:
            return 0.0
        left = self.space.limits.device - (1 + UNCERTAIN) * need.device
        return in_steps(min(left, sum(family.work.sizes[row] for row in TO_DEVICE if row in stored.offloaded)))

    def placed(self, change: Change) -> tuple[Config, Assembly, Memory] | None:
        """(the config with a change, the parts of its run, the bytes that it needs by estimate).

        None if the checks refuse it.
        """
        self.tried += 1
        try:
            tried, run, rows = self.run_of(change)
        except ConfigError:
            return None
        return tried, run, needed(tried, rows, self.space.gpu, self.space.platform)

    def run_of(self, change: Change) -> tuple[Config, Assembly, Rows]:
        """(the config with a change, the parts of its run, `footprint.by_class` of it).

        Raises ConfigError if the checks refuse it.
        """
        tried = changed(self.space.config, change)
        checks.check(tried)
        values = flat(tried)
        relevant = RELEVANT if "nvme" in values.values() else RELEVANT - OF_BATCH
        key = ("run", *((name, value) for name, value in values.items() if name in relevant))
        run = self.known(key, lambda: assembly(tried))
        return tried, run, by_class(run, batch_of(tried), self.space.platform)

    def over(self, candidate: Candidate) -> float:
        """Bytes that a candidate needs beyond the limits, of any memory."""
        return sum(candidate.need.beyond(self.space.limits))

    def changes_kept(self, change: Change) -> bool:
        """True if a change sets a kept field to another value."""
        return any(name in change and change[name] != value for name, value in self.keep.items())

    def known(self, key: tuple, compute) -> Any:
        """Returns a value of this space by its key, computed the first time."""
        if key not in self.space.known:
            self.space.known[key] = compute()
        return self.space.known[key]


def in_steps(size: float) -> float:
    """GiB of so many bytes, rounded down to a multiple of 1 / STEPS, 0 at least."""
    return max(0.0, math.floor(STEPS * size / GiB) / STEPS)


def but_for_slices(candidates: list[Candidate]) -> list[Candidate]:
    """The fastest of candidates that differ in slices of the head only, in the order of time."""
    fastest: dict[tuple, Candidate] = {}
    for candidate in sorted(candidates, key=lambda x: x.seconds):
        fastest.setdefault(kind(candidate, "lmhead_chunks"), candidate)
    return list(fastest.values())


def kind(candidate: Candidate, *without: str) -> tuple:
    """The changes of a candidate but for some fields, to tell candidates apart."""
    return tuple((name, value) for name, value in candidate.change.items() if name not in without)
