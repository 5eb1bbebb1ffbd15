"""Homes: the memories that a tensor can be stored in between its uses."""

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Home:
    """One memory.

    name: in reports and records of a run. memory_kind: JAX's name; None: JAX does not know this memory, layers are in
    files (memory/in_file.py). space: the memory space in the type of an array in this memory; None for files.
    """

    name: str
    memory_kind: str | None
    space: Any

    @property
    def streamed(self) -> bool:
        """True if layers are copied to device memory before they are used, and written back if they change."""
        return self != DEVICE

    @property
    def in_file(self) -> bool:
        """True if layers are stored in a file, and are in host memory only while they are used."""
        return self.memory_kind is None


DEVICE = Home("device", "device", jax.memory.Space.Device)
HOST = Home("host", "pinned_host", jax.memory.Space.Host)  # pinned host memory
NVME = Home("nvme", None, None)  # a file on an NVMe disk
HOMES = (DEVICE, HOST, NVME)
