"""Host memory for reads and writes past the page cache, which need addresses and sizes that are multiples of a page.

New memory costs as much CPU time as filling it, so buffers are used again.
"""

import collections
import mmap
import weakref

import numpy as np

ALIGN = 4096  # bytes: a page of memory, and the most that disks ask for


def aligned(size: int) -> int:
    """The smallest multiple of `ALIGN` that is not below this size."""
    return -(-size // ALIGN) * ALIGN


class Buffers:
    """Buffers that can be taken again once nothing refers to them any more."""

    def __init__(self):
        self._free: dict[int, list[mmap.mmap]] = collections.defaultdict(list)

    def take(self, size: int) -> np.ndarray:
        """An array of so many bytes, a multiple of `ALIGN`, with any content; free again when it and its views are."""
        try:
            memory = self._free[size].pop()
        except IndexError:
            memory = mmap.mmap(-1, size)
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._free[size].append, memory).atexit = False
        return array
