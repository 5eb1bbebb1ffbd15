"""Bytes that a step moves between memories: copies over the host link, reads and writes of files.

What layers of each tensor class move is read from the lanes of the passes (step/passes.py): a pass that runs k times
moves each of its lanes k times.
"""

import dataclasses
from collections.abc import Mapping

import jax

from surojax.assembly.assemble import Assembly
from surojax.config.fields import Config
from surojax.memory.in_file import has_room
from surojax.placement.home import NVME
from surojax.placement.layout import batch_sharding
from surojax.placement.mesh import REPLICATE, data_parallel, pipeline_stages
from surojax.placement.param import part_of
from surojax.planner import layer_sizes
from surojax.step import passes
from surojax.step.passes import Pass
from surojax.step.state_plan import bytes_per_device, leaf_bytes


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """The tokens of a step on one GPU, or on one group of GPUs that share sequences."""

    sequences: int  # per microbatch
    sequence_len: int
    microbatches: int

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.sequences * self.sequence_len


def batch_of(c: Config) -> BatchShape:
    """The `BatchShape` of a config."""
    return BatchShape(c.per_device_batch_size, c.sequence_len, c.gradient_accumulation_steps)


def batch_arrays(run: Assembly, batch: BatchShape) -> list[jax.ShapeDtypeStruct]:
    """The planned arrays of a step's batch, `[microbatches, sequences of all groups, sequence_len]` each."""
    shape = (batch.microbatches, batch.sequences * data_parallel(run.mesh), batch.sequence_len)
    return run.engine.planned_batch(shape, batch_sharding(run.mesh.abstract_mesh))


def copied_bytes(step_pass: Pass, times: int, stored: Mapping[str, float], updated: float = 1.0) -> tuple[float, float]:
    """(bytes to the device, bytes back) of a pass that runs so many times.

    stored: bytes of each row of the placement table that are in host memory; of residuals, of one group of
    microbatches. updated: the fraction of the weights that an update writes.
    """
    read = written = 0.0
    for lane in step_pass.lanes:
        size = stored.get(lane.row, 0)
        read += (times - lane.accumulates) * lane.reads * size
        written += times * lane.writes * size * (updated if lane.row == "weights" else 1)
    return read, written


def host_bytes(run: Assembly, batch: BatchShape, rows: dict[str, dict[str, int]]) -> tuple[int, int]:
    """(host to device, device to host) bytes per step and GPU; rows: bytes by class of tensors and by memory.

    What is in files passes through host memory. With stages, residuals in flight are in memory together; layers that a
    pass begins with are copied in once a step, and every pass writes a layer late, which the next one reads.
    """
    groups = layer_sizes.groups_of(run, batch.microbatches)
    stored: dict[str, float] = {name: row["host"] + row["nvme"] for name, row in rows.items()}
    stored["weights"] += stored.pop("quants", 0) + read_from_master(run)
    stages = pipeline_stages(run.mesh)
    if stages > 1:
        stored["residuals"] /= layer_sizes.slots(run, batch.microbatches)
    updated = updated_part(run)
    totals = [0.0, 0.0]
    sums_are_local = run.mesh.shape[REPLICATE] > 1
    for step_pass, times in passes.passes_of_step(run.engine, groups, stages=stages, sums_are_local=sums_are_local):
        moved = copied_bytes(step_pass, times, stored, updated)
        totals = [a + b for a, b in zip(totals, moved, strict=True)]
        for lane in step_pass.lanes if stages > 1 else ():
            layer_bytes = stored[lane.row] // layer_sizes.layers_of(run)
            if lane.row == "weights":
                totals[0] += lane.ahead * layer_bytes
            if lane.row == "grads":
                totals[0] += times * lane.behind * lane.reads * layer_bytes
                totals[1] += times * lane.behind * lane.writes * layer_bytes
    read, written = map(round, totals)
    return read, written


def file_bytes(run: Assembly, batch: BatchShape, rows: dict[str, dict[str, int]]) -> tuple[int, int]:
    """(bytes read from files, bytes written) per step and GPU; rows: as for `host_bytes`."""
    stored: dict[str, float] = {name: row["nvme"] for name, row in rows.items()}
    master = rows["master"]
    from_master = read_from_master(run) * master["nvme"] / max(master["host"] + master["nvme"], 1)
    stored["weights"] += from_master
    written = max(0.0, updated_part(run) - from_master / max(stored["weights"], 1))
    step_passes = passes.passes_of_step(run.engine, layer_sizes.groups_of(run, batch.microbatches))
    moved = [copied_bytes(step_pass, times, stored, written) for step_pass, times in step_passes]
    read, written = map(sum, zip(*moved, strict=True))
    return round(read), round(written)


def updated_part(run: Assembly, dtype: str | None = None) -> float:
    """The fraction of the bytes of the layers' work weights that a step updates: those that are trained.

    dtype: only weights of this dtype are counted; None: all.
    """
    names = [segment.name for segment in run.model.segments]
    stored = {name: run.plan.weights[name] for name in names}
    trained = part_of(stored, {name: run.plan.master[name] for name in names})
    updated = sum(leaf_bytes(x) for x in jax.tree.leaves(trained) if dtype in (None, x.dtype))
    return updated / sum(map(leaf_bytes, jax.tree.leaves(stored)))


def read_from_master(run: Assembly) -> int:
    """Bytes per GPU of the layers' work weights that are read from where master weights are in files."""
    weights = [run.plan.weights[segment.name] for segment in run.model.segments]
    return bytes_per_device([x for x in jax.tree.leaves(weights) if not has_room(x)], NVME)
