"""The time of a step with tensor classes in files, whose programs the host runs one after another (step/by_host.py).

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

from surojax.planner import costs
from surojax.planner.costs import HOST_IN, ProgramOnGpu
from surojax.planner.disks import ASSUMED_DISKS, Disks
from surojax.planner.gpus import Gpu
from surojax.planner.hlo import Module
from surojax.planner.layer_sizes import size
from surojax.planner.rates import DISKS
from surojax.planner.timeline import Timeline, simulate
from surojax.step.step_parts import Program

UPDATE = "update"  # the pass whose first layer is read before it begins


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
