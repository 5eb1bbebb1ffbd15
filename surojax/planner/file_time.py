"""The time of a step with tensor classes in files, whose programs the host runs one after another (step/by_host.py).

A pass over layers takes as long as its programs, as its files, or as what the host puts on the device for it, whichever
takes longest: those of a layer overlap with those of the layers beside it. Nothing hides the first layer that a pass
reads, but for the update's, which comes while gradients are computed, and the last one that it writes. The update of
embedding and head is a pass over their pieces. A disk does one direction at a time: reading and writing at once takes
as long as one after the other (docs/LOG.md, 2026-11-24).

Not modelled: the CPU time of file access, checkpoints that are written meanwhile, and programs that are not of a layer
while files are read.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from surojax.errors import ConfigError
from surojax.planner import costs
from surojax.planner.costs import HOST_IN, ProgramOnGpu
from surojax.planner.gpus import GB, Gpu
from surojax.planner.hlo import Module
from surojax.planner.layer_sizes import size
from surojax.planner.rates import ASSUMED, DISKS, HERE, SHEET, Span
from surojax.planner.timeline import Timeline, simulate
from surojax.step.step_parts import Program

UPDATE = "update"  # the pass whose first layer is read before it begins
TB = 1e12
DRIVE_TBW = 1200  # TB that the makers of 2 TB consumer drives warrant (Samsung 990 PRO, 980 PRO)
# Disks that nobody said: at the fast end of a PCIe 4.0 drive, at the slow end what consumer drives write once their
# cache is full (techpowerup.com's reviews of write intensive usage: 0.5 to 2 GB/s).
UNKNOWN = Span(0.25, 1.1, ASSUMED)
SAID = Span(0.8, 1.05, SHEET)
MEASURED_HERE = Span(0.25, 1.05, HERE)  # at the start of a run; the slow end is that of a full cache, as above
FORM = re.compile(r"(?:(\d{1,4})x)?(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Disks:
    """The disks of a machine that hold the files of a run, together.

    read, write: B/s, one direction at a time. span: how far they are known.
    """

    read: float = 7e9
    write: float = 6e9
    span: Span = UNKNOWN

    def seconds(self, read: float, written: float, end: float = 1.0) -> float:
        """Seconds that so many bytes take. end: a multiple of the rates."""
        return (read / self.read + written / self.write) / end

    def shared_by(self, gpus: int) -> "Disks":
        """The share of each of so many GPUs in these disks."""
        return dataclasses.replace(self, read=self.read / gpus, write=self.write / gpus)

    def __str__(self) -> str:
        source = "assumed; --disk says what there is" if self.span is UNKNOWN else "as given"
        return f"{self.read / GB:g} GB/s read, {self.write / GB:g} written ({source})"


ASSUMED_DISKS = Disks()


def disks(text: str | None) -> Disks:
    """What `--disk` says: "7.4/6.9", GB/s read and written, or "2x7.4/6.9". Raises ConfigError for anything else."""
    if text is None:
        return ASSUMED_DISKS
    match = FORM.fullmatch(text)
    number, read, write = (float(x or 1) for x in match.groups()) if match else (0.0, 0.0, 0.0)
    if not 0 < min(number, read, write) <= max(read, write) < 1e4:
        raise ConfigError(f"--disk: expected GB/s read and written, as 7.4/6.9 or 2x7.4/6.9, got {text!r}; correct it")
    return Disks(number * read * GB, number * write * GB, SAID)


def wear(written: float) -> str:
    """A line about what so many bytes written a step and machine do to a drive."""
    if not written:
        return "nothing is written to files"
    after = f"{DRIVE_TBW:,} TB, which a 2 TB consumer drive is made for, after {DRIVE_TBW * TB / written:,.0f} steps"
    return f"{written / GB:,.1f} GB written to files a step: {after}"


def moved(parts: Sequence[Program]) -> tuple[int, int]:
    """(bytes read from files, bytes written to files) of a step, of all machines together."""
    return sum(part.times * part.read for part in parts), sum(part.times * part.written for part in parts)


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

    def timeline(self, gpu: Gpu, *, copies_only: bool = False, end: float = 1.0) -> Timeline:
        """The step on this GPU. copies_only: as if copy engines did all host transfers. end: a multiple of the disks'
        rates."""
        simulated = [simulate(ProgramOnGpu(x, gpu, self.mesh_shape, copies_only)) for x in self.modules]
        if not self.parts:
            return simulated[0]
        busy = collections.defaultdict[str, float](float)
        exposed = collections.defaultdict[tuple[str, str], float](float)
        seconds = 0.0
        link = gpu.pcie_bandwidth * gpu.rates.host
        gpus = math.prod(self.mesh_shape.values())
        for name in dict.fromkeys(part.name for part in self.parts):
            label = name or "outside loops"
            programs = on_disk = put = ends = 0.0
            for part, of_program in zip(self.parts, simulated, strict=True):
                if part.name != name:
                    continue
                read, written = part.read / self.machines, part.written / self.machines
                of_layer = self.disks.seconds(read, written, end)
                programs += part.times * of_program.seconds
                on_disk += part.times * of_layer
                put += part.times * size(part.put) / gpus / link
                ends = max(ends, self.disks.seconds(0.0, written, end) if name == UPDATE else of_layer)
                for kind, s in of_program.busy.items():
                    busy[kind] += part.times * s
                for (_, kind), s in of_program.exposed.items():
                    exposed[label, kind] += part.times * s
            longest = max(programs, on_disk, put)
            exposed[label, DISKS if on_disk >= put else HOST_IN] += longest - programs
            exposed[label, DISKS] += ends
            busy[DISKS] += on_disk
            seconds += longest + ends
        return Timeline(seconds, dict(busy), dict(exposed), [])

    def at_disk_ends(self, gpu: Gpu) -> dict[str, list[float]]:
        """Seconds with the disks at their ends, as `prediction.at_ends` returns them; empty without files."""
        ends = (self.disks.span.fast, self.disks.span.slow) if self.parts else ()
        return {DISKS: [self.timeline(gpu, end=end).seconds for end in ends]} if ends else {}
