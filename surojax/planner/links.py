"""Links of a collective: which axes of a mesh cross machines, the rate that their collectives have then, and the hops.

Devices are numbered machine by machine, and the last axis of a mesh is the innermost. So the devices of a group are in
one machine as long as its axes, with all axes inside of them, have no more devices than a machine. If their number does
not divide a machine, groups differ. All of them take part in a step, so the slowest group counts.

Within a machine GPUs have `Gpu.link_bandwidth`. Between machines each GPU has `Gpu.network_bandwidth`: a group with at
least m GPUs in each of its machines sends over m adapters of each, so each of its GPUs reaches m times that, and at
most the rate within a machine (NCCL makes a ring for each adapter). A permute sends from one GPU to one.

The first byte has arrived everywhere after some hops. A ring of n GPUs has n - 1 to gather or to scatter, and twice as
many to sum. NCCL sums over many machines along a tree: up and down through the GPUs of a machine and log2 of the
machines (`src/graph/tuning.cc` of github.com/NVIDIA/nccl has these numbers of steps).
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from surojax.planner.gpus import Gpu


class SlowestGroup(NamedTuple):
    """The slowest group of a collective. in_one: its GPUs in the machine that has the fewest of the group's GPUs."""

    gpus: int
    machines: int
    in_one: int


def crossing(gpu: Gpu, mesh_shape: Mapping[str, int]) -> list[str]:
    """Returns the axes of which a group has GPUs in several machines."""
    return [axis for axis in mesh_shape if group(gpu, mesh_shape, axis).machines > 1]


def bandwidth(gpu: Gpu, mesh_shape: Mapping[str, int], op: str, axes: str) -> float:
    """Returns B/s per direction and GPU of a collective. axes: names joined by "+"; "": one device."""
    slowest = group(gpu, mesh_shape, axes)
    if slowest.machines == 1:
        return gpu.link_bandwidth
    adapters = 1 if op == "collective-permute" else slowest.in_one
    return min(gpu.link_bandwidth, adapters * gpu.network_bandwidth)


def rate(gpu: Gpu, mesh_shape: Mapping[str, int], op: str, axes: str) -> float:
    """Returns what programs reach of `bandwidth`."""
    rates = gpu.rates
    within = gpu.link_bandwidth * rates.link
    if gpu.staged:  # what is written to host memory is read from there
        within = min(within, gpu.host_memory(math.prod(mesh_shape.values())) * rates.dram / 2)
    if group(gpu, mesh_shape, axes).machines == 1:
        return within
    return min(within, bandwidth(gpu, mesh_shape, op, axes) * rates.network)


def hops(gpu: Gpu, mesh_shape: Mapping[str, int], op: str, axes: str) -> int:
    """Returns how many hops one after another a collective takes at least, however few its bytes are."""
    slowest = group(gpu, mesh_shape, axes)
    if op == "collective-permute":
        return 1
    if op != "all-reduce":
        return slowest.gpus - 1
    within = math.ceil(slowest.gpus / slowest.machines) - 1
    return 2 * (within + math.ceil(math.log2(slowest.machines)))


def group(gpu: Gpu, mesh_shape: Mapping[str, int], axes: str) -> SlowestGroup:
    """Returns the slowest group of devices along these axes."""
    return _slowest(gpu.gpus_per_node, tuple(mesh_shape.items()), axes)


@functools.lru_cache
def _slowest(gpus_per_node: int, mesh_shape: tuple[tuple[str, int], ...], axes: str) -> SlowestGroup:
    """Returns the group over the most machines; among several, the one with the fewest GPUs in one machine."""
    names = axes.split("+")
    sizes = tuple(size for _, size in mesh_shape)
    along = [i for i, (name, _) in enumerate(mesh_shape) if name in names]
    others = [i for i in range(len(sizes)) if i not in along]
    gpus = math.prod(sizes[i] for i in along)
    groups = np.arange(math.prod(sizes)).reshape(sizes).transpose(others + along).reshape(-1, gpus) // gpus_per_node
    counts = [np.unique(machines, return_counts=True)[1] for machines in np.unique(groups, axis=0)]
    machine_groups = [SlowestGroup(gpus, len(of_machine), int(of_machine.min())) for of_machine in counts]
    return max(machine_groups, key=lambda x: (x.machines > 1, -x.in_one, x.machines))
