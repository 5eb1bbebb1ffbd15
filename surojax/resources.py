"""What this process may use of its machine: host memory and processors.

The machine's own numbers are those of the host, also within a container, a job or a shell with limits, where a process
that uses more is killed or throttled. So the limits are read too: those of the process's control groups, which Linux
has in two versions (cgroups(7)), and of itself (setrlimit(2), a shell's `ulimit`). Whoever asks for memory or for a
number of threads asks here.

A limit on memory also counts file cache, which the kernel gives up when memory is short. Swap is not counted as memory.
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

MiB, GiB = 2**20, 2**30
UNLIMITED = 2**60  # bytes; setrlimit writes "no limit" as a number beyond this
# Address space and private memory that Python, JAX and XLA's threads reserve, measured with 1 to 32 threads: to start,
# for each core, and beyond what `psutil` counts when a run is checked, for threads and the compiler.
START = {"ulimit -v": 2 * GiB, "ulimit -d": 400 * MiB}
EACH_CORE = {"ulimit -v": 64 * MiB, "ulimit -d": 40 * MiB}
RESERVED = {"ulimit -v": GiB, "ulimit -d": 300 * MiB}


class FreeMemory(NamedTuple):
    """Host memory that this process may use. size: bytes. limit: text with the limit that it is left of; "": none."""

    size: int
    limit: str = ""


class Limit(NamedTuple):
    """A limit on memory, in bytes, what is left of it, and what sets it."""

    size: int
    left: int
    name: str

    @property
    def text(self) -> str:
        """Describes the limit: "the 1.00 GiB that /sys/fs/cgroup/memory.max allows"."""
        return f"the {self.size / GiB:,.2f} GiB that {self.name} allows"


def free_memory(processes: int = 1, *, compiles: bool = False) -> FreeMemory:
    """Returns the host memory that is free for this process, one of so many that share the machine's equally.

    It is the least of what the machine has, what the control groups leave, and what the process's own limits leave.
    compiles: the process has yet to compile its programs, whose threads reserve address space too.
    """
    free = [FreeMemory(psutil.virtual_memory().available // processes)]
    free += [FreeMemory(limit.left // processes, limit.text) for limit in group_limits()]
    for limit in own_limits():
        free.append(FreeMemory(max(0, limit.left - RESERVED[limit.name] * compiles), limit.text))
    return min(free, key=lambda memory: memory.size)


def total_memory() -> int:
    """Returns the bytes of host memory that processes like this one can have together."""
    return min([psutil.virtual_memory().total, *(limit.size for limit in group_limits())])


def visible_cores() -> int:
    """Returns the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores(root: Path = Path("/")) -> int:
    """Returns the number of processors that this process may keep busy: by its affinity and its groups' quotas.

    root: of the file system that is read, for tests.
    """
    count = visible_cores()
    for folder, version in _groups("cpu", root):
        if version == 2:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if (time := _number(quota)) is not None and (of := _number(period)):
            count = min(count, math.ceil(time / of))
    return max(1, count)


def too_little_to_start() -> str:
    """Says which limit of this process is too low for JAX to start; "" if none is."""
    for limit in own_limits():
        least = START[limit.name] + EACH_CORE[limit.name] * cores()
        if limit.size < least:
            return _low(limit, least)
    return ""


def too_little_to_compile() -> str:
    """Says which limit of this process leaves too little for programs to be compiled; "" if none does."""
    for limit in own_limits():
        if limit.left <= RESERVED[limit.name]:
            return _low(limit, limit.size - limit.left + RESERVED[limit.name])
    return ""


def _low(limit: Limit, least: int) -> str:
    return f"expected {limit.name} of more than {least / GiB:.2f} GiB, got {limit.size / GiB:.2f} GiB; raise that limit"


def own_limits() -> Iterator[Limit]:
    """Yields the limits of this process on its address space and its private memory."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    used = psutil.Process().memory_info()
    for name, number, size in (
        ("ulimit -v", resource.RLIMIT_AS, used.vms),
        ("ulimit -d", resource.RLIMIT_DATA, getattr(used, "data", 0)),
    ):
        soft, _ = resource.getrlimit(number)
        if 0 <= soft < UNLIMITED:
            yield Limit(soft, max(0, soft - size), name)


def group_limits(root: Path = Path("/")) -> Iterator[Limit]:
    """Yields the memory limits of this process's control groups, from its own to the outermost that it sees.

    root: of the file system that is read, for tests.
    """
    for folder, version in _groups("memory", root):
        stat = dict(re.findall(r"^(\w+) (\d{1,18})$", _text(folder / "memory.stat"), re.MULTILINE | re.ASCII))
        prefix, mapped = ("", "file_mapped") if version == 2 else ("total_", "mapped_file")
        inactive, active, in_use = (int(stat.get(prefix + x, 0)) for x in ("inactive_file", "active_file", mapped))
        cache = inactive + max(0, active - in_use)
        for of, current in _FILES[version]:
            if (size := _number(_text(folder / of))) is not None:
                used = _number(_text(folder / current)) or 0
                yield Limit(size, max(0, size - max(0, used - cache)), f"/{(folder / of).relative_to(root)}")


_FILES = {  # of a memory limit, and of what is used of it. memory.high throttles what is above it to a near stop.
    2: (("memory.max", "memory.current"), ("memory.high", "memory.current")),
    1: (
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
    ),
}


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Yields (folder, version) of this process's control groups for a controller, and of those around them.

    A container may see the host's hierarchy, its own group as the root of it, or only a part of the path.
    """
    paths: dict[str, str] = {}  # of this process's group, by controller; "": version 2
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        paths |= dict.fromkeys(names.split(","), path)
    for line in _text(root / "proc/self/mountinfo").splitlines():  # proc_pid_mountinfo(5)
        place, _, source = line.partition(" - ")
        fields, (kind, *options) = place.split(" "), source.split(" ")
        version = {"cgroup2": 2, "cgroup": 1}.get(kind, 0)
        if len(fields) < 5 or not version or (version == 1 and controller not in (options or [""])[-1].split(",")):
            continue
        mounted, top = map(_unescaped, fields[3:5])
        path = PurePosixPath(paths.get(controller if version == 1 else "", "/"))
        inside = path.relative_to(mounted) if path.is_relative_to(mounted) else PurePosixPath()
        folder = inside if ".." not in inside.parts else PurePosixPath()
        for part in (folder, *folder.parents):
            yield root / top.lstrip("/") / part, version


def _unescaped(text: str) -> str:
    """Replaces the octal escapes of a path in mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _text(file: Path) -> str:
    """Reads a file of /proc or /sys; "" if it cannot be read."""
    try:
        return file.read_text(errors="replace").strip()
    except (OSError, ValueError):  # ValueError: a name that no file has
        return ""


def _number(text: str) -> int | None:
    """Reads a limit; None if it is "max", -1, no number, or one of 19 digits, as version 1 writes "no limit"."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None
