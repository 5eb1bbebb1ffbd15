"""What to change when a run does not fit: settings from mild to strong, found by trying them on an estimate.

Changes are taken in the order of `_changes`, each on top of those before it, if they bring device or host memory nearer
to its limit and neither further beyond it. GPUs are added last: the fewest with which, and some more of the same
changes, it fits. What then turns out not to be needed is left out again, mild changes first.
"""

import bisect
import copy
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from surojax.config.fields import RECOMPUTE_PARTS, Config, flat
from surojax.errors import ConfigError
from surojax.sizes import divisor

GiB, MiB = 2**30, 2**20
SHARDED = {
    "zero_level": 3,
    "shard_weights": None,
    "shard_gradients": None,
    "dp_replicate_size": 1,
    "dp_shard_size": -1,
}
MORE_GPUS = (2, 4, 8, 16, 32, 64)
FOLDER = "FOLDER"  # stands for a folder on an NVMe disk, which only the user knows


class Memory(NamedTuple):
    """Bytes on each device, and in host memory for all of them: what a run needs, or what there is."""

    device: int
    host: float = math.inf


def missing(need: Memory, limit: Memory) -> Memory:
    """What is needed beyond what there is."""
    return Memory(max(0, need.device - limit.device), max(0, need.host - limit.host))


Needs = Callable[[Config, int], Memory]  # of a config on n devices; raises ConfigError for what is impossible
Change = dict  # fields of the config and their new values


def changes_that_help(c: Config, n: int, limit: Memory, platform: str, needs: Needs) -> list[tuple[Change, Memory]]:
    """Changes to a config on n devices, each on top of those before it, with the memory that they lead to.

    The last one fits, unless nothing does: then it is the best that was found. The effective batch stays as it is,
    except where GPUs are added.
    """

    known: dict[tuple, Memory | None] = {}  # what is missing, by the values of the config's fields

    def over(steps: list[Change]) -> Memory | None:
        """What is missing after these changes, None where they are impossible."""
        tried = changed(c, *steps)
        key = tuple(flat(tried).values())
        if key not in known:
            try:
                known[key] = missing(needs(tried, tried.gpus or n), limit)
            except ConfigError:  # such as a vocabulary that so many GPUs do not divide
                known[key] = None
        return known[key]

    def improved(steps: list[Change]) -> list[Change]:
        """With changes on top that bring it nearer, until it fits; twice, since one may make room for another."""
        left = over(steps)
        for _ in range(2):
            now = changed(c, *steps)
            back = _back(now) if left and left.host else ()
            for change in [*back, *_changes(c, now.gpus or n, platform, limit.host < math.inf)]:
                if left is None or not any(left):
                    return steps
                then = over([*steps, change]) if differing(changed(c, *steps), change) else None
                if then is not None and then != left and then.device <= left.device and then.host <= left.host:
                    steps, left = [*steps, change], then
        return steps

    steps = improved([])
    if platform != "cpu" and any(over(steps) or ()):
        added = [[*steps, {"gpus": more} | SHARDED] for more in MORE_GPUS if more > n]
        added = [more for more in added if over(more) is not None]
        fewest = bisect.bisect_left(added, True, key=lambda more: not any(over(improved(more)) or ()))
        steps = improved(added[min(fewest, len(added) - 1)]) if added else steps
    return _numbered(c, n, _pruned(steps, over), needs)


def _pruned(steps: list[Change], over: Callable[[list[Change]], Memory | None]) -> list[Change]:
    """Without what is not needed, or saves less than 1 % of what is missing in the end where that is not nothing."""
    goal = over(steps)
    for step in list(steps):
        rest = [other for other in steps if other is not step]
        left = over(rest)
        if goal and left and left.device <= 1.01 * goal.device and left.host <= 1.01 * goal.host:
            steps = rest
    return steps


def _numbered(c: Config, n: int, steps: list[Change], needs: Needs) -> list[tuple[Change, Memory]]:
    """Each step as what it changes then, with what is needed after it."""
    found = []
    for step in steps:
        change, c = differing(c, step), changed(c, step)
        found += [(change, needs(c, c.gpus or n))] if change else []
    return found


def _back(c: Config) -> Iterator[Change]:
    """What may come back from host memory, the most traffic first."""
    return ({f"offload_{name}": False} for name in reversed(OFFLOADS) if c[f"offload_{name}"] is True)


def _changes(c: Config, n: int, platform: str, scarce: bool) -> Iterator[Change]:
    """From mild to strong, for n devices; scarce: whether host memory has a limit."""
    slice_now = c.per_device_batch_size * c.sequence_len // c.lmhead_chunks
    limit = min(slice_now, 1024)  # tokens of a slice: no smaller ones are needed
    slices = lambda tokens: divisor(tokens, math.ceil(tokens / limit))
    if not c.recompute_block:
        yield {"recompute_norm": True, "recompute_swiglu": True}
    yield {"recompute_block": True} | dict.fromkeys(RECOMPUTE_PARTS, False)
    yield {"lmhead_chunks": slices(c.per_device_batch_size * c.sequence_len)}
    yield {
        "per_device_batch_size": 1,
        "gradient_accumulation_steps": c.per_device_batch_size * c.gradient_accumulation_steps,
        "lmhead_chunks": slices(c.sequence_len),
    }
    if platform != "cpu":
        yield {"model_dtype": "bfloat16"}
    yield dict.fromkeys(("opt_m_dtype", "opt_v_dtype", "accum_dtype"), "bfloat16")
    if n > 1:
        yield SHARDED
    if platform != "cpu":  # there host memory is the devices'
        yield from _offloads(c, n, scarce)


OFFLOADS = ("residual", "optimizer", "master", "grads", "weights")  # cheapest traffic per byte first


def _offloads(c: Config, n: int, scarce: bool) -> Iterator[Change]:
    """What to move to host memory or to files, and the outer layers cut by words."""
    whole = SHARDED if n > 1 else {}  # whole gradients and weights would cross every GPU's host link
    moved = {name: {f"offload_{name}": True} | (whole if name in ("grads", "weights") else {}) for name in OFFLOADS}
    if c.persistent_quants:
        moved["quants"] = {"offload_quants": True}
    yield from moved.values()
    if n > 1:
        yield {"shard_outer": True} | SHARDED
    if scarce:
        folder = {"nvme_path": c.nvme_path or FOLDER}
        yield from ({f"offload_{name}": "nvme"} | folder for name in ("optimizer", "master"))
        files = dict.fromkeys(("offload_optimizer", "offload_master"), "nvme") | folder
        for name in ("grads", "weights"):  # into the room that this makes
            yield files | moved[name]
            files |= moved[name]


def differing(c: Config, change: Change) -> Change:
    """The part of a change that is one."""
    return {name: value for name, value in change.items() if c[name] != value}


def changed(c: Config, *changes: Change) -> Config:
    """A copy with other values."""
    c = copy.deepcopy(c)  # copy_and_resolve_references would forget which types `config.either` lets in
    for change in changes:
        c.update(change)
    return c


def lines(found: list[tuple[Change, Memory]], limit: Memory) -> list[str]:
    """A line for each change: as flags, and what it leads to."""
    host = lambda need: f", {gib(need.host)} of host memory" if need.host and limit.host < math.inf else ""
    fits = lambda need: "" if any(missing(need, limit)) else " (fits)"
    return [f"{flags(change)} -> {gib(need.device)}{host(need)}{fits(need)}" for change, need in found]


def flags(change: Change) -> str:
    """Changed fields as they are written on a command line, without `--config.`."""
    return " ".join(f"{name}={'unset' if value is None else value}" for name, value in change.items())


def memory_unit(largest: float) -> tuple[str, int]:
    """(name, bytes) of the unit that numbers up to this one are told in: MiB where all are less than a GiB."""
    return ("GiB", GiB) if largest >= GiB else ("MiB", MiB)


def gib(size: float) -> str:
    """Bytes in GiB, or in MiB."""
    name, unit = memory_unit(size)
    return f"{size / unit:.1f} {name}"


def summed(sizes: dict[str, int], digits: int) -> str:
    """Bytes and what they are made of, all in one unit: "2.1 GiB (weights 1.5, master 0.6)"."""
    name, unit = memory_unit(sum(sizes.values()))
    parts = ", ".join(f"{part} {size / unit:.{digits}f}" for part, size in sizes.items())
    return f"{sum(sizes.values()) / unit:.{digits}f} {name} ({parts})"
