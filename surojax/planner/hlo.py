"""Reads the text of a compiled program: collectives between GPUs, copies to and from host memory, and operations that
XLA rematerialises.

The text is XLA's optimised HLO: `aot.Compiled.text` or `jax.stages.Compiled.as_text()`. An instruction is counted as
often as it runs: the product of the known trip counts of the loops around it. Host memory is memory space 5, `S(5)` in
an array's layout.

Bytes of a collective are those that one GPU sends; it receives as many. They are for the algorithms with the least
traffic (rings; Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH"). For n GPUs with an
operand of b bytes each: all-gather (n - 1) b, reduce-scatter and all-to-all (n - 1) / n b, all-reduce 2 (n - 1) / n b,
permute b.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

WIRE = {  # bytes that a GPU sends, from the number of GPUs n and the bytes of its operands b
    "all-gather": lambda n, b: (n - 1) * b,
    "reduce-scatter": lambda n, b: (n - 1) * b / n,
    "all-to-all": lambda n, b: (n - 1) * b / n,
    "all-reduce": lambda n, b: 2 * (n - 1) * b / n,
    "collective-permute": lambda n, b: b,
}
# Instructions that rename or allocate a value, or call other instructions: they transfer nothing themselves.
NAMES_ONLY = {"parameter", "tuple", "get-tuple-element", "bitcast", "custom-call", "while", "conditional", "call"}


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an HLO shape."""

    bytes: int
    rank: int
    on_host: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An HLO instruction: one line."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


CALLS = "to_apply|calls|branch_computations|true_computation|false_computation"  # attributes, see `called`
TRIPS = re.compile(r'"known_trip_count":\{"n":"([\d/]+)"')

# name = shape opcode(operands), attributes
LINE = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)")

# Computations by name, each with its instructions by name. The name of the entry computation is "".
type Module = dict[str, dict[str, Instruction]]
type Programs = Sequence[tuple[Module, int]]  # of a step, and how often each runs in it


def parse_module(text: str) -> Module:
    """The computations in the text of an HLO module."""
    module = {}
    current = None
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            current = module.setdefault("" if head[1] else head[2], {})
        elif current is not None and (match := LINE.match(line)):
            name, shape, opcode, rest = match.groups()
            inputs, _, attributes = rest.partition(")")
            current[name] = Instruction(name, shape, opcode, tuple(re.findall(r"%([\w.\-]+)", inputs)), attributes)
    return module


@functools.lru_cache(2**14)  # a simulated step asks for the same ones again and again
def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of an HLO shape; nested tuples are flattened."""

    def one(dtype, dims, layout):
        sizes = [int(d) for d in dims.split(",") if d]
        return Array(math.ceil(math.prod(sizes) * _bits(dtype) / 8), len(sizes), "S(5)" in (layout or ""))

    return tuple(one(*found) for found in re.findall(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?", shape))


def _bits(dtype: str) -> int:
    """Bits of a number of a dtype by its HLO name: f32, bf16, s4, f8e4m3fn, pred."""
    number = re.match(r"[a-z]+(\d+)", dtype)
    return int(number[1]) if number else 8


def with_rounds(module: Module, rounds: Callable[[list[Instruction]], Fraction | None]) -> Module:
    """The module with a trip count in each loop that has none: rounds of the instructions of its body, a mean.

    None: the loop stays as it is.
    """

    def known(i: Instruction) -> Instruction:
        if i.opcode != "while" or TRIPS.search(i.attributes):
            return i
        mean = rounds(list(module[called(i, "body")[0]].values()))
        if mean is None:
            return i
        return dataclasses.replace(i, attributes=f'{i.attributes}, "known_trip_count":{{"n":"{mean}"')

    return {name: {n: known(i) for n, i in instructions.items()} for name, instructions in module.items()}


def executed(
    module: Module, computation: str = "", times: int | Fraction = 1
) -> Iterator[tuple[Instruction, Any, dict]]:
    """Yields (instruction, how often it runs, its computation), without the instructions inside fusions.

    It runs a whole number of times, or a fraction as a mean, see `with_rounds`.

    All branches of a conditional count. Raises ValueError for a loop without a known trip count.
    """
    instructions = module[computation]
    for i in instructions.values():
        yield i, times, instructions
        if i.opcode == "while":
            yield from executed(module, called(i, "body")[0], times * trips(i))
        elif i.opcode in ("conditional", "call", "async-start"):
            for name in called(i, CALLS):
                yield from executed(module, name, times)


def executed_in_step(programs: Programs) -> Iterator[tuple[Instruction, Any, dict]]:
    """Yields what `executed` does, for all programs of a step."""
    for module, times in programs:
        yield from executed(module, times=times)


def trips(loop: Instruction) -> int | Fraction:
    """The trip count of a loop; a fraction if it is a mean over rounds of the loop around it, see `with_rounds`."""
    known = TRIPS.search(loop.attributes)
    if not known:
        raise ValueError(f"loop {loop.name}: expected a known trip count, got none; give it a constant length")
    return Fraction(known[1]) if "/" in known[1] else int(known[1])


def called(i: Instruction, attribute: str) -> list[str]:
    """Names of the computations in an attribute of an instruction; attribute: a regular expression."""
    matches = re.findall(rf"\b(?:{attribute})=(?:\{{([^}}]*)\}}|(%?[\w.\-]+))", i.attributes)
    return [name for several, one in matches for name in re.findall(r"%?([\w.\-]+)", several or one)]


def operands(i: Instruction, computation: Mapping[str, Instruction]) -> list[Array]:
    """The arrays of an instruction's operands."""
    return [a for name in i.operands for a in arrays(computation[name].shape)]


@dataclasses.dataclass(frozen=True)
class CollectiveTotal:
    """Collectives of one kind over one axis of the mesh, per step and GPU."""

    op: str
    axis: str  # names joined by "+" if it spans several axes
    count: int
    bytes: int  # that a GPU sends


def collectives(programs: Programs, mesh_shape: Mapping[str, int]) -> list[CollectiveTotal]:
    """The collectives of a step by kind and axis. mesh_shape: axes in the order in which devices are numbered."""
    counts, sizes = collections.Counter[tuple[str, str]](), collections.Counter[tuple[str, str]]()
    for i, times, computation in executed_in_step(programs):
        op = i.opcode.removesuffix("-start")
        if op in WIRE:
            axis, n = group(i, mesh_shape)
            counts[op, axis] += times
            sizes[op, axis] += times * WIRE[op](n, sum(a.bytes for a in operands(i, computation)))
    return [CollectiveTotal(op, axis, round(counts[op, axis]), round(sizes[op, axis])) for op, axis in sorted(counts)]


def group(i: Instruction, mesh_shape: Mapping[str, int]) -> tuple[str, int]:
    """(mesh axes of a collective, number of devices in a group)."""
    if named := re.search(r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}", i.attributes):
        axes = re.findall(r"'(\w+)'", named[1])
        return "+".join(axes), math.prod(mesh_shape[a] for a in axes)
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", i.attributes):
        group = [int(d) for d in listed[1].split(",")]
    elif iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", i.attributes):
        shape = [int(x) for x in iota[3].split(",")]
        permutation = [int(x) for x in iota[4].split(",")] if iota[4] else None
        ids = np.arange(math.prod(shape)).reshape(shape)
        group = list(ids.transpose(permutation).reshape(int(iota[1]), int(iota[2]))[0])
    else:  # all devices
        group = list(range(math.prod(mesh_shape.values())))
    coordinates = np.array(np.unravel_index(group, tuple(mesh_shape.values())))
    axes = [name for name, row in zip(mesh_shape, coordinates, strict=True) if len(set(row.tolist())) > 1]
    return "+".join(axes), len(group)


def host_copies(programs: Programs) -> dict[str, int]:
    """Bytes per step and GPU that are copied: {"h2d_bytes", "d2h_bytes", "within_host_bytes"}.

    Copies of arrays, and of layers that are read from or written to stacks in host memory.
    """
    moved: dict[str, Any] = {"h2d": 0, "d2h": 0, "within": 0}
    for i, times, computation in executed_in_step(programs):
        if (copy := host_copy(i, computation)) is not None:
            kind, size = copy
            moved[kind] += times * size
    return {f"{'within_host' if kind == 'within' else kind}_bytes": round(size) for kind, size in moved.items()}


def host_copy(i: Instruction, computation: Mapping[str, Instruction]) -> tuple[str, int] | None:
    """("h2d", "d2h" or "within" host memory, bytes) of a host copy; None for another instruction."""
    if i.opcode in NAMES_ONLY or i.opcode.endswith("-done"):
        return None
    sources = operands(i, computation)
    results = arrays(result(i))
    from_host, to_host = (any(a.on_host for a in side) for side in (sources, results))
    if i.opcode in ("copy", "copy-start"):
        kind = "within" if from_host and to_host else "d2h" if to_host else "h2d"
        return (kind, sources[0].bytes) if from_host or to_host else None
    if to_host:  # a layer is written into a stack; scalar operands are the layer's index
        return "d2h", sum(a.bytes for a in sources if not a.on_host and a.rank)
    return ("h2d", sum(a.bytes for a in results if a.rank)) if from_host else None


def result(i: Instruction) -> str:
    """The shape of an instruction's results. The shape of an asynchronous instruction starts with operands: skipped."""
    if i.opcode == "copy-start":  # (result, operand, context)
        return i.shape.split(", ")[0]
    if not i.opcode.endswith("-start") or not i.shape.startswith("(("):
        return i.shape
    depth = 0
    for end, letter in enumerate(i.shape[1:], 1):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return i.shape[end + 1 :]
    raise AssertionError(i.shape)


def rematerialised(programs: Programs) -> dict[str, Any]:
    """Results that XLA recomputes because memory is short: {"count", "bytes", "largest"}, per step.

    count: instructions that run. bytes: of their results. largest: the instruction with most bytes; "" if none.

    They are found by the names of their instructions, which have `.remat`. Those without operands are left out: zeros
    that are written a second time instead of kept.
    """
    recomputed_results = [
        (times * sum(a.bytes for a in arrays(i.shape)), times, i.name)
        for i, times, _ in executed_in_step(programs)
        if ".remat" in i.name and i.operands and i.opcode not in NAMES_ONLY
    ]
    return {
        "count": round(sum(times for _, times, _ in recomputed_results)),
        "bytes": round(sum(size for size, *_ in recomputed_results)),
        "largest": max(recomputed_results, default=(0, 0, ""))[2],
    }


def collective(module: Module, i: Instruction) -> Instruction | None:
    """The collective that an instruction is, or starts as an asynchronous computation; else None."""
    inside = [x for name in called(i, "calls") for x in module[name].values()] if i.opcode == "async-start" else []
    return next((x for x in (i, *inside) if x.opcode.removesuffix("-start") in WIRE), None)
