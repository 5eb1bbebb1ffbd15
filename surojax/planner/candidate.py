"""Estimates the memory and the time of one config on a GPU, and the memory that it may need there."""

import dataclasses
import math

from surojax.assembly.assemble import Assembly
from surojax.config.changes import Change
from surojax.config.fields import Config
from surojax.offloads import TO_DEVICE
from surojax.placement.home import DEVICE, HOST
from surojax.planner import choices, roofline
from surojax.planner.amounts import GiB, Memory
from surojax.planner.disks import ASSUMED_DISKS, Disks
from surojax.planner.footprint import HOST_POOL, Rows, assembly, by_class, memory
from surojax.planner.gpus import Gpu
from surojax.planner.layer_sizes import accumulators
from surojax.planner.roofline import StorageTiers
from surojax.planner.traffic import batch_of
from surojax.step.state_plan import bytes_per_device

RESERVE = 512 * 2**20  # bytes of a GPU left for cuDNN's workspaces and fragmentation, which no estimate counts


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings and what they need by estimate. change: of the config that the search began with.

    phases: estimated seconds of each part of a step.
    """

    config: Config
    change: Change
    need: Memory
    phases: dict[str, float]

    @property
    def seconds(self) -> float:
        """Estimated seconds of a step."""
        return sum(self.phases.values())


def device_limit(gpu: Gpu) -> int:
    """Bytes of a GPU that a candidate may need."""
    return gpu.pool_bytes - RESERVE


def memory_limits(gpu: Gpu, host_memory: float | None, files: float = 0.0) -> Memory:
    """The `Memory` that a candidate may need.

    host_memory: GiB of a machine; None: unlimited. files: bytes on the drives of all machines.
    """
    host = math.inf if host_memory is None else HOST_POOL * host_memory * GiB
    return Memory(device_limit(gpu), host, files)


def estimated(c: Config, gpu: Gpu, change: Change | None = None, disks: Disks = ASSUMED_DISKS) -> Candidate:
    """A checked config as a candidate, with the bytes and the time that it needs on a GPU with rates.

    disks: of a machine.
    """
    run = assembly(c)
    rows = by_class(run, batch_of(c), "gpu")
    work = roofline.step_work(run, batch_of(c), gpu, rows, disks)
    return Candidate(c, change or {}, needed(c, rows, gpu), roofline.phases(work, storage_tiers(c, run)))


def storage_tiers(c: Config, run: Assembly) -> StorageTiers:
    """Returns the memories in which the tensors of a config's run are stored.

    `files_in_memory` is of one process that has all GPUs, as in every plan.
    """
    table = run.engine.table
    streamed = [row for row in choices.OFFLOADS if getattr(table, row).home.streamed]
    offloaded = dict.fromkeys([*streamed, *["weights"] * table.streams_weights])
    return StorageTiers(
        offloaded=tuple(offloaded),
        files=tuple(row for row in streamed if getattr(table, row).home.in_file),
        resident=table.weights.resident,
        overlaps=bool(run.engine.overlap_update),
        in_memory=c.files_in_memory * GiB / c.gpus,
        on_device=kept_on_device(run),
    )


def kept_on_device(run: Assembly) -> tuple[float, ...]:
    """Bytes on each device of each of `TO_DEVICE` that are in host memory but for `device_memory`."""
    table, plan = run.engine.table, run.plan
    of_gradients = [of for segment in run.model.segments for of in accumulators(run, segment)]
    kept = {
        "master": bytes_per_device(plan.master),
        "moments": bytes_per_device(plan.moments),
        "grads": sum(size for home, size in of_gradients if home == DEVICE),
    }
    return tuple(float(kept[row]) if getattr(table, row).home == HOST else 0.0 for row in TO_DEVICE)


def needed(c: Config, rows: Rows, gpu: Gpu, platform: str = "gpu") -> Memory:
    """Estimated bytes that a run of a config needs. rows: `footprint.by_class` of the run."""
    return memory(rows, c.gpus, gpu.in_a_machine(c.gpus), platform)
