"""Links of a collective: which axes of a mesh cross machines, and the rate that their collectives have then.

Devices are numbered machine by machine, and the last axis of a mesh is the innermost. So the devices of a group are in
one machine as long as its axes, with all axes inside of them, have no more devices than a machine.

Within a machine GPUs have `Gpu.link_bandwidth`. Between machines each GPU has `Gpu.network_bandwidth`: a group of
which m GPUs are in a machine sends over the m adapters of these, so each of its GPUs reaches m times that, and at most
the rate within a machine (NCCL makes a ring for each adapter). A permute sends from one GPU to one.
"""

import math
from collections.abc import Mapping

import numpy as np

from surojax.planner.gpus import Gpu


def crossing(gpu: Gpu, mesh_shape: Mapping[str, int]) -> list[str]:
    """Returns the axes whose groups have GPUs in several machines."""
    return [axis for axis in mesh_shape if _in_a_machine(gpu, mesh_shape, axis)[0] > 1]


def bandwidth(gpu: Gpu, mesh_shape: Mapping[str, int], op: str, axes: str) -> float:
    """Returns B/s per direction and GPU of a collective. axes: names joined by "+"; "": one device."""
    machines, in_one = _in_a_machine(gpu, mesh_shape, axes)
    if machines == 1:
        return gpu.link_bandwidth
    adapters = 1 if op == "collective-permute" else in_one
    return min(gpu.link_bandwidth, adapters * gpu.network_bandwidth)


def rate(gpu: Gpu, mesh_shape: Mapping[str, int], op: str, axes: str) -> float:
    """Returns what programs reach of `bandwidth`. Raises ValueError if that is not known of this GPU."""
    if gpu.rates is None:
        raise ValueError(f"links: expected a GPU with rates in planner/gpus.py, got {gpu.name}; add them there")
    within = gpu.link_bandwidth * gpu.rates.link
    if _in_a_machine(gpu, mesh_shape, axes)[0] == 1:
        return within
    return min(within, bandwidth(gpu, mesh_shape, op, axes) * gpu.rates.network)


def _in_a_machine(gpu: Gpu, mesh_shape: Mapping[str, int], axes: str) -> tuple[int, int]:
    """Returns (machines of a group, most GPUs of it that are in one machine)."""
    names = axes.split("+")
    sizes = tuple(mesh_shape.values())
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    whole = tuple(slice(None) if name in names else 0 for name in mesh_shape)
    _, counts = np.unique(numbers[whole] // gpu.gpus_per_node, return_counts=True)
    return len(counts), int(counts.max())
