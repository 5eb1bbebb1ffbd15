"""The time of a step with tensor classes in files, whose programs the host runs one after another (memory/by_host.py).

A pass over layers takes as long as its programs, as its files, or as what the host puts on the device for it, whichever
takes longest: those of a layer overlap with those of the layers beside it. Nothing hides the first layer that a pass
reads, but for the update's, which comes while gradients are computed, and the last one that it writes. The update of
embedding and head is a pass over their pieces.

Not modelled: the CPU time of file access, checkpoints that are written meanwhile, and programs that are not of a layer
while files are read.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from surojax.planner import costs
from surojax.planner.costs import HOST_IN, MAIN, ProgramOnGpu
from surojax.planner.disks import ASSUMED_DISKS, Disks
from surojax.planner.gpus import Gpu
from surojax.planner.hlo import Module
from surojax.planner.layer_sizes import size
from surojax.planner.rates import DISKS
from surojax.planner.timeline import WAITS, Timeline, TimelineEvent, simulate
from surojax.step.several_programs import Program

UPDATE = "update"  # the pass whose first layer is read before it begins


def moved(parts: Sequence[Program]) -> tuple[int, int]:
    """(bytes read from files, bytes written to files) of a step, of all machines together."""
    read = sum(part.times * part.read.total() for part in parts)
    return read, sum(part.times * part.written.total() for part in parts)


class SimulatedPass(NamedTuple):
    """A pass over layers, in seconds.

    parts: its programs and their timelines. programs, on_disk, put: what these take, what their files take, by row of
    the placement table, and what the host puts on the device for them. first, last: of the first layer's read and the
    last one's write, which nothing hides.
    """

    name: str
    parts: list[tuple[Program, Timeline]]
    programs: float
    by_row: dict[str, float]
    put: float
    first: float
    last: float

    @property
    def on_disk(self) -> float:
        """Seconds of all files."""
        return sum(self.by_row.values())

    @property
    def exposed_on_disk(self) -> float:
        """Seconds in which programs wait for the disks."""
        return self.first + self.last + (self.longest - self.programs if self.on_disk >= self.put else 0.0)

    @property
    def exposed_on_link(self) -> float:
        """Seconds in which programs wait for what the host puts on the device."""
        return self.longest - self.programs if self.on_disk < self.put else 0.0

    @property
    def longest(self) -> float:
        """Seconds of what takes longest."""
        return max(self.programs, self.on_disk, self.put)


@dataclasses.dataclass(frozen=True)
class SimulatedStep:
    """A step on a mesh, of one program, or with files of several.

    modules: of the programs. parts: which programs these are; empty for one program without files. machines: that share
    the bytes of files, and the disks of each.
    """

    modules: Sequence[Module]
    mesh_shape: Mapping[str, int]
    parts: Sequence[Program] = ()
    machines: int = 1
    disks: Disks = ASSUMED_DISKS

    @property
    def host_transfers(self) -> dict[str, int]:
        """Host transfers in loops, {"copy_engine", "kernel"}."""
        transfers = collections.Counter[str]()
        for module in self.modules:
            transfers.update(costs.host_transfers(module))
        return dict(transfers)

    def launches(self, gpu: Gpu) -> float:
        """Seconds that the host's thread takes to launch the step's kernels and copies one by one."""
        programs = [ProgramOnGpu(x, gpu, self.mesh_shape) for x in self.modules]
        times = [part.times for part in self.parts] or [1]
        return sum(n * costs.launch_seconds(program.steps()) for n, program in zip(times, programs, strict=True))

    def timeline(self, gpu: Gpu, *, copies_only: bool = False, with_events: bool = False) -> Timeline:
        """The step on this GPU. copies_only: as if copy engines did all host transfers. with_events: see `simulate`,
        and `_events` for files."""
        programs = [ProgramOnGpu(x, gpu, self.mesh_shape, copies_only) for x in self.modules]
        simulated = [simulate(program, events=with_events) for program in programs]
        if not self.parts:
            return simulated[0]
        busy = collections.defaultdict[str, float](float)
        exposed = collections.defaultdict[tuple[str, str], float](float)
        of_rows = collections.defaultdict[str, float](float)
        passes = self._passes(simulated, gpu)
        for each in passes.values():
            label = each.name or "outside loops"
            for part, of_program in each.parts:
                for kind, s in of_program.busy.items():
                    busy[kind] += part.times * s
                for (_, kind), s in of_program.exposed.items():
                    exposed[label, kind] += part.times * s
            exposed[label, DISKS] += each.exposed_on_disk
            exposed[label, HOST_IN] += each.exposed_on_link
            busy[DISKS] += each.on_disk
            for row, s in each.by_row.items():
                of_rows[row] += each.exposed_on_disk * s / each.on_disk
        seconds = sum(each.longest + each.first + each.last for each in passes.values())
        events = self._events(passes) if with_events else []
        return Timeline(seconds, dict(busy), dict(exposed), events, dict(of_rows))

    def _passes(self, simulated: Sequence[Timeline], gpu: Gpu) -> dict[str, SimulatedPass]:
        """The passes of a step with files, by name. Programs that are of no layer are one without a name."""
        link = gpu.pcie_bandwidth * gpu.rates.host
        gpus = math.prod(self.mesh_shape.values())
        passes = {}
        for name in dict.fromkeys(part.name for part in self.parts):
            parts = [pair for pair in zip(self.parts, simulated, strict=True) if pair[0].name == name]
            reads = [self._seconds(part.read.total(), 0.0) for part, _ in parts]
            writes = [self._seconds(0.0, part.written.total()) for part, _ in parts]
            by_row = collections.defaultdict[str, float](float)
            for part, _ in parts:
                for row in part.read | part.written:
                    by_row[row] += part.times * self._seconds(part.read[row], part.written[row])
            at_ends = [0.0 if name == UPDATE else read + write for read, write in zip(reads, writes, strict=True)]
            number = at_ends.index(max(at_ends))
            passes[name] = SimulatedPass(
                name,
                parts,
                programs=sum(part.times * of_program.seconds for part, of_program in parts),
                by_row=dict(by_row),
                put=sum(part.times * size(part.put) for part, _ in parts) / gpus / link,
                first=0.0 if name == UPDATE else reads[number],
                last=max(writes) if name == UPDATE else writes[number],
            )
        return passes

    def _seconds(self, read: float, written: float) -> float:
        """Seconds that a machine's disks take for its share of these bytes."""
        return self.disks.seconds(read / self.machines, written / self.machines)

    def _events(self, passes: Mapping[str, SimulatedPass]) -> list[TimelineEvent]:
        """The events of a step with files, such that each pass takes as long as `timeline` says.

        Of each program those of its first layer are drawn, and its other layers as one event; files of a pass as one.
        """
        events: list[TimelineEvent] = []
        now = 0.0

        def draw(name: str, kind: str, stream: str, loop: str, begin: float, seconds: float, size: float = 0.0) -> None:
            if seconds:
                events.append(TimelineEvent(name, kind, stream, loop, begin, begin + seconds, size))

        for each in passes.values():
            in_files = sum(moved([part for part, _ in each.parts]))
            draw("files", DISKS, DISKS, each.name, now, each.on_disk, in_files)
            for part, of_program in each.parts:
                events += of_program.since(now)
                now += of_program.seconds
                others = part.times - 1
                draw(f"{others} more layers", "not simulated", MAIN, each.name, now, others * of_program.seconds)
                waited = now
                for (_, kind), seconds in of_program.exposed.items():
                    draw(f"wait for {kind}", kind, WAITS, each.name, waited, others * seconds)
                    waited += others * seconds
                now += others * of_program.seconds
            draw(f"wait for {DISKS}", DISKS, WAITS, each.name, now, each.exposed_on_disk)
            now += each.exposed_on_disk
            draw(f"wait for {HOST_IN}", HOST_IN, WAITS, each.name, now, each.exposed_on_link)
            now += each.exposed_on_link
        return events
