"""Amounts of memory: bytes that a run needs, bytes that a machine has, and sizes as text."""

import math
from typing import NamedTuple

GiB, MiB = 2**30, 2**20


class Memory(NamedTuple):
    """Bytes that a run needs or that there are: on each device, in the host memory of a machine, in files of all GPUs.

    As what there is, host memory may be unlimited (`math.inf`).
    """

    device: int
    host: float = math.inf
    files: float = 0

    def fits(self, limits: "Memory") -> bool:
        """Returns True if no memory needs more than its limit."""
        return not any(self.beyond(limits))

    def beyond(self, limits: "Memory") -> "Memory":
        """Returns the bytes that exceed the limits."""
        return Memory(
            max(0, self.device - limits.device), max(0, self.host - limits.host), max(0, self.files - limits.files)
        )

    def text(self, device: str = "GPU") -> str:
        """As text: "1.0 GiB on each GPU, 2.0 GiB of host memory, 3.0 GB of files", without what is 0."""
        sizes = (
            f"{gib(self.device)} on each {device}",
            f"{gib(self.host)} of host memory",
            f"{self.files / 1e9:,.1f} GB of files",
        )
        return ", ".join(text for text, size in zip(sizes, self, strict=True) if size > 0)


def memory_unit(largest: float) -> tuple[str, int]:
    """(name, bytes) of the unit for sizes up to `largest` bytes: MiB if that is less than a GiB, else GiB."""
    return ("GiB", GiB) if largest >= GiB else ("MiB", MiB)


def gib(size: float) -> str:
    """Bytes as text, in GiB or in MiB."""
    name, unit = memory_unit(size)
    return f"{size / unit:.1f} {name}"


def summed(sizes: dict[str, int], digits: int) -> str:
    """The sum of sizes and its parts that are not 0 as text in one unit: "2.1 GiB (weights 1.5, master 0.6)"."""
    name, unit = memory_unit(sum(sizes.values()))
    parts = ", ".join(f"{part} {size / unit:.{digits}f}" for part, size in sizes.items() if size)
    return f"{sum(sizes.values()) / unit:.{digits}f} {name} ({parts})"
