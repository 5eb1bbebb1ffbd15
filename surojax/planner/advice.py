"""Advice for a run that does not fit into memory: changes of settings, found by trying them on an estimate.

Changes are tried in the order of `_changes`, from mild to strong, each on top of those accepted before it. A change is
accepted if device or host memory gets closer to its limit, and neither gets further beyond it. GPUs are added last: the
smallest number with which the run fits, after more of the same changes. Finally changes that are not needed are removed
again, mild ones first.
"""

import bisect
import copy
import math
import shlex
import textwrap
from collections.abc import Callable, Iterator
from typing import NamedTuple

from surojax.config.checks import REFUSALS
from surojax.config.fields import DEFAULTS, RECOMPUTE_PARTS, Config, flat, gpus_per_sequence
from surojax.errors import ConfigError
from surojax.optim.optimizers import OPTIMIZERS
from surojax.refusals import refuse
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
LINE = 110  # characters of a line of flags
FOLDER = "FOLDER"  # placeholder for a folder on an NVMe disk, which only the user knows


class Memory(NamedTuple):
    """Bytes that a run needs or that there are: on each device, and in the host memory of a machine."""

    device: int
    host: float = math.inf


def missing(need: Memory, limit: Memory) -> Memory:
    """How many bytes a need exceeds the limit by."""
    return Memory(max(0, need.device - limit.device), max(0, need.host - limit.host))


Needs = Callable[[Config, int], Memory]  # memory for a config on n devices; raises ConfigError if it is impossible
Change = dict  # fields of the config and their new values


def changes_that_help(c: Config, n: int, limit: Memory, platform: str, needs: Needs) -> list[tuple[Change, Memory]]:
    """Changes to a config on n devices, each on top of those before it, with the memory that it then needs.

    With the last change the run fits, or if nothing fits, comes closest to it. The effective batch does not change
    unless GPUs are added.
    """

    known: dict[tuple, Memory | None] = {}  # missing memory, by the values of the config's fields

    def over(steps: list[Change]) -> Memory | None:
        """The missing memory after these changes, None if they are impossible."""
        tried = changed(c, *steps)
        key = tuple(flat(tried).values())
        if key not in known:
            try:
                refuse(flat(tried), DEFAULTS, REFUSALS)
                known[key] = missing(needs(tried, tried.gpus or n), limit)
            except ConfigError:  # refused, or a vocabulary that so many GPUs do not divide
                known[key] = None
        return known[key]

    def improved(steps: list[Change]) -> list[Change]:
        """Adds changes that reduce the missing memory until the run fits.

        Tries each change twice, because one may make another possible.
        """
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
    """Removes changes that are not needed to fit, or if nothing fits, change the missing memory by less than 1 %."""
    goal = over(steps)
    for step in list(steps):
        rest = [other for other in steps if other is not step]
        left = over(rest)
        if goal and left and left.device <= 1.01 * goal.device and left.host <= 1.01 * goal.host:
            steps = rest
    return steps


def _numbered(c: Config, n: int, steps: list[Change], needs: Needs) -> list[tuple[Change, Memory]]:
    """Each step with the fields that it actually changes, and the memory needed after it."""
    found = []
    for step in steps:
        change = differing(c, step)
        c = changed(c, step)
        if change:
            found.append((change, needs(c, c.gpus or n)))
    return found


def _back(c: Config) -> Iterator[Change]:
    """Changes that move tensors back from host memory, those with the most traffic first."""
    return ({f"offload_{name}": False} for name in reversed(OFFLOADS) if c[f"offload_{name}"] is True)


LONG_SEQUENCE = 8192  # tokens on a device; chunks of shorter ones save little


def _changes(c: Config, n: int, platform: str, scarce: bool) -> Iterator[Change]:
    """Changes from mild to strong, for n devices; scarce: whether host memory has a limit."""
    tokens_per_chunk = c.per_device_batch_size * c.sequence_len // c.lmhead_chunks
    limit = min(tokens_per_chunk, 1024)  # smaller chunks are not needed

    def chunks(tokens: int) -> int:
        return divisor(tokens // gpus_per_sequence(c), math.ceil(tokens / limit))

    if not c.recompute_block:
        yield {"recompute_norm": True, "recompute_swiglu": True}
    yield {"recompute_block": True} | dict.fromkeys(RECOMPUTE_PARTS, False)
    yield {"microbatches_per_fetch": 1}
    if c.pp_size > 1:
        yield {"pp_schedule": "1f1b"}
    yield {"lmhead_chunks": chunks(c.per_device_batch_size * c.sequence_len)}
    yield {
        "per_device_batch_size": 1,
        "gradient_accumulation_steps": c.per_device_batch_size * c.gradient_accumulation_steps,
        "lmhead_chunks": chunks(c.sequence_len),
    }
    length = c.sequence_len // (c.cp_size * c.tp_size)
    if length > LONG_SEQUENCE:
        yield {"sequence_chunks": max(c.sequence_chunks, divisor(length, length // LONG_SEQUENCE))}
    if platform != "cpu":
        yield {"model_dtype": "bfloat16"}
    moments = OPTIMIZERS[c.optimizer].reads & {"opt_m_dtype", "opt_v_dtype"}
    yield dict.fromkeys((*sorted(moments), "accum_dtype"), "bfloat16")
    if n > 1:
        yield SHARDED
    if platform != "cpu":  # on CPUs device memory is host memory
        yield from _offloads(c, n, scarce)


OFFLOADS = ("residual", "optimizer", "master", "grads", "weights")  # cheapest traffic per byte first


def _offloads(c: Config, n: int, scarce: bool) -> Iterator[Change]:
    """Changes that move tensors to host memory or to files, and one that shards the outer layers by words."""
    sharded = SHARDED if n > 1 else {}  # replicated gradients and weights would cross every GPU's host link
    moved = {name: {f"offload_{name}": True} | (sharded if name in ("grads", "weights") else {}) for name in OFFLOADS}
    if c.persistent_quants:
        moved["quants"] = {"offload_quants": True}
    yield from moved.values()
    if n > 1:
        yield {"shard_outer": True} | SHARDED
    if scarce:
        folder = {"nvme_path": c.nvme_path or FOLDER}
        yield from ({f"offload_{name}": "nvme"} | folder for name in ("optimizer", "master"))
        files = dict.fromkeys(("offload_optimizer", "offload_master"), "nvme") | folder
        for name in ("grads", "weights"):  # into the host memory that the files free
            yield files | moved[name]
            files |= moved[name]


def differing(c: Config, change: Change) -> Change:
    """The fields of a change whose values differ from those of the config."""
    return {name: value for name, value in change.items() if c[name] != value}


def changed(c: Config, *changes: Change) -> Config:
    """A copy of a config with these changes."""
    c = copy.deepcopy(c)  # copy_and_resolve_references would forget the types of fields with words (declared.py)
    for change in changes:
        c.update(change)
    return c


def lines(found: list[tuple[Change, Memory]], limit: Memory) -> list[str]:
    """A line for each of a chain of changes: its flags, the memory that the run then needs, and whether it fits."""

    def line(change: Change, need: Memory) -> str:
        host = f", {gib(need.host)} of host memory" if need.host and limit.host < math.inf else ""
        fits = "" if any(missing(need, limit)) else " (fits)"
        return f"{flags(change)} -> {gib(need.device)}{host}{fits}"

    return [f"{'then ' if i else ''}{line(change, need)}" for i, (change, need) in enumerate(found)]


def flags(change: Change) -> str:
    """The fields of a change as flags, to be pasted behind a command."""
    values = {name: "unset" if value is None else str(value) for name, value in change.items()}
    return " ".join(shlex.quote(f"--config.{name}={value}") for name, value in values.items())


def wrapped(flags: str, indent: str) -> list[str]:
    """Lines of at most `LINE` characters with these flags, which can be pasted together."""
    if not flags:
        return []
    lines = textwrap.wrap(flags, LINE - 2, break_long_words=False, break_on_hyphens=False)
    joined = " \\\n".join(lines)
    return [f"{indent}{line}" for line in joined.split("\n")]


def memory_unit(largest: float) -> tuple[str, int]:
    """(name, bytes) of the unit for sizes up to `largest` bytes: MiB if that is less than a GiB, else GiB."""
    return ("GiB", GiB) if largest >= GiB else ("MiB", MiB)


def gib(size: float) -> str:
    """Bytes as text, in GiB or in MiB."""
    name, unit = memory_unit(size)
    return f"{size / unit:.1f} {name}"


def summed(sizes: dict[str, int], digits: int) -> str:
    """The sum of sizes and its parts as text in one unit: "2.1 GiB (weights 1.5, master 0.6)"."""
    name, unit = memory_unit(sum(sizes.values()))
    parts = ", ".join(f"{part} {size / unit:.{digits}f}" for part, size in sizes.items())
    return f"{sum(sizes.values()) / unit:.{digits}f} {name} ({parts})"
