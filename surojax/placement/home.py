"""Homes: the memories that a tensor may be stored in between its uses."""

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Home:
    """One memory.

    name: as reports and records of a run call it. memory_kind: JAX's name of it; None: not in any memory that JAX
    knows, but in files (memory/nvme.py). space: the same in an array's type.
    """

    name: str
    memory_kind: str | None
    space: Any

    @property
    def streamed(self) -> bool:
        """Whether layers are copied to device memory when they are needed, and back."""
        return self != DEVICE

    @property
    def in_file(self) -> bool:
        """Whether layers go through host memory only, by way of a file."""
        return self.memory_kind is None


DEVICE = Home("device", "device", jax.memory.Space.Device)
HOST = Home("host", "pinned_host", jax.memory.Space.Host)  # pinned host memory
NVME = Home("nvme", None, None)  # a file on an NVMe disk
HOMES = (DEVICE, HOST, NVME)
