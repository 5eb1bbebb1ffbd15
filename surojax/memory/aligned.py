"""Host memory for reads and writes past the page cache, which need addresses and sizes that are multiples of a page.

New memory costs as much CPU time as filling it, so buffers are used again.
"""

import collections
import ctypes
import mmap
import weakref

import numpy as np

ALIGN = 4096  # bytes: a page of memory, and the most that disks ask for
M_ARENA_MAX = -8  # of glibc's mallopt


def share_arenas() -> None:
    """Makes all threads share one arena of glibc's malloc; does nothing with another C library.

    Each thread has one of its own otherwise, which keeps what is freed. Threads that read and write layers allocate all
    the time: training 1.5B parameters in files took 5.5 GiB of resident memory, and 3.5 with one arena. To be called
    before JAX starts its threads: glibc decides when there are eight arenas.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)


def aligned(size: int) -> int:
    """The smallest multiple of `ALIGN` that is not below this size."""
    return -(-size // ALIGN) * ALIGN


class Buffers:
    """A pool of buffers, each reused once nothing refers to it any more.

    Their sizes are powers of two, so that there are few of them however many sizes are asked for. What is not used of
    a buffer takes no memory.
    """

    def __init__(self):
        self._free: dict[int, list[mmap.mmap]] = collections.defaultdict(list)

    def take(self, size: int) -> np.ndarray:
        """An array of so many bytes, a multiple of `ALIGN`, with any content; free again when it and its views are."""
        free = self._free[(size - 1).bit_length()]
        try:
            memory = free.pop()
        except IndexError:
            memory = mmap.mmap(-1, 1 << (size - 1).bit_length())
        array = np.frombuffer(memory, np.uint8, size)
        weakref.finalize(array, free.append, memory).atexit = False
        return array
