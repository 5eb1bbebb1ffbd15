"""The cost of each instruction of a compiled, scheduled program on a GPU: seconds of kernels, bytes of transfers.

Matrix products: the dtype's peak rate times `Rates.products`, for whole waves of tiles (256 x 128 and smaller ones,
which are slower; the k loop split over up to four blocks if that fills the multiprocessors), but at least the time of
their bytes in device memory. Attention by cuDNN and by our kernel: causal FLOPs at a fraction of the bf16 peak, which
is assumed of our kernel, as that of cuDNN. Everything else is bound
by device memory: the bytes that it reads and writes there, where a fusion that slices an array reads the slice, and one
that updates an array in place writes the update.

A transfer between host and device memory is done by a copy engine if it is a copy instruction, or a fusion that is
nothing but a slice whose offset XLA proves linear in the loop's counter: the fusion's root then has a
`dynamic_slice_config` (XLA's dynamic_slice_analysis.cc; the thunks that `--xla_dump_to` writes agree). Any other such
fusion is a kernel whose threads read or write host memory.
"""

import dataclasses
import functools
import math
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from pallas_kernels import flash_attention
from surojax.placement import cuda_plugin
from surojax.planner import hlo, links
from surojax.planner.gpus import Gpu
from surojax.planner.hlo import Instruction, Module

# Streams, as XLA assigns them (execution_stream_assignment.cc), and kinds of work. Each transfer's kind is its stream's
# or that of the collective.
MAIN = "compute"
SIDE = "compute, asynchronous"
HOST_IN = "host in"
HOST_OUT = "host out"
COLLECTIVES = "collectives"
STREAMS = (MAIN, HOST_IN, HOST_OUT, COLLECTIVES, SIDE)
IN_TURN = 4  # streams that XLA before 0.12 gives to asynchronous works in turn, whichever way they copy

PRODUCT = "product"
ATTENTION = "attention"
PASS = "pass"  # a kernel bound by device memory
DEVICE_COPY = "device copy"
GATHER = "gather"
REDUCE = "reduce"
TRANSFERS: tuple[str, ...] = (GATHER, REDUCE, HOST_IN, HOST_OUT)
OF_COLLECTIVE = {
    "all-gather": GATHER,
    "collective-permute": GATHER,
    "reduce-scatter": REDUCE,
    "all-reduce": REDUCE,
    "all-to-all": REDUCE,
}

# Seconds that the host's thread takes for each, if no CUDA graph does it. Assumed: nobody timed them here.
LAUNCH_KERNEL = 3e-6
LAUNCH_COPY = 4e-6
RECORD_EVENT = 1.5e-6

TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.80), (64, 64, 0.62))  # rows, columns, relative rate
SPLITS = (1, 2, 4)  # of the k loop
BACKWARD_FLOPS = 2.5  # of attention, relative to its forward pass: five products instead of two
FREE = hlo.NAMES_ONLY - {"custom-call", "while", "conditional", "call"} | {
    "constant",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
}
NO_KERNEL = {"AllocateBuffer", "MoveToHost", "MoveToDevice", "Sharding"}  # custom calls that run nothing
UPDATED_BY = {"dynamic-update-slice": 1, "scatter": 2}  # operand with the new part of an array changed in place
LOOPS = ("forward", "backward", "head", "update")  # `jax.named_scope`s in step/*


@dataclasses.dataclass(frozen=True)
class Work:
    """Something that takes time on a stream: first `latency`, then `seconds` of a kernel or `bytes` over a link.

    stream: the resource. queue: the stream that XLA assigns, whose works run one after another.
    """

    name: str
    kind: str
    stream: str
    latency: float = 0.0
    seconds: float = 0.0
    bytes: float = 0.0
    rate: float = 0.0  # B/s of a collective
    needs_sms: bool = False  # occupies the multiprocessors
    assigned: str = ""  # the queue, if it is not that of the stream

    @property
    def queue(self) -> str:
        return self.assigned or self.stream


@dataclasses.dataclass(frozen=True)
class Wait:
    """The main stream waits for the end of a work."""

    name: str


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop. label: one of LOOPS, or "microbatches" if there is a loop in it, or "other loops"."""

    label: str
    trips: int | Fraction  # a fraction is a mean, see `stages.with_rounds`
    body: tuple["Step", ...]
    has_loops: bool


type Step = Work | Wait | Loop  # of the main stream, which starts the work of other streams


@dataclasses.dataclass(frozen=True)
class ProgramOnGpu:
    """A parsed program and the machine that it runs on. copies_only: as if copy engines did every host transfer."""

    module: Module
    gpu: Gpu
    mesh_shape: Mapping[str, int]
    copies_only: bool = False

    @functools.cached_property
    def queues(self) -> Mapping[str, str]:
        """Queues of works by name, where XLA of the installed plugin does not assign one to each stream."""
        return {} if cuda_plugin.plugin_version() >= cuda_plugin.STREAMS_BY_DIRECTION else streams_in_turn(self.module)

    def steps(self, computation: str = "") -> tuple[Step, ...]:
        """Lists the steps of the main stream in a computation, in order."""
        instructions = self.module[computation]
        return tuple(step for i in instructions.values() for step in _steps(self, i, instructions))


def _steps(p: ProgramOnGpu, i: Instruction, computation: Mapping[str, Instruction]) -> Iterator[Step]:
    """Yields the steps of an instruction."""
    if i.opcode in FREE:
        return
    if i.opcode == "while":
        body = p.steps(hlo.called(i, "body")[0])
        has_loops = any(isinstance(step, Loop) for step in body)
        yield Loop(_label(i, has_loops), hlo.trips(i), body, has_loops)
    elif i.opcode in ("call", "conditional"):  # of a conditional all branches, as in hlo.executed
        for name in hlo.called(i, hlo.CALLS):
            yield from p.steps(name)
    elif i.opcode.endswith("-done"):
        yield Wait(i.operands[0])
    elif (work := _work(p, i, computation)) is not None:
        if work.stream != COLLECTIVES and i.name in p.queues:
            work = dataclasses.replace(work, assigned=p.queues[i.name])
        yield work
        if work.stream != MAIN and not i.opcode.endswith("-start"):
            yield Wait(i.name)


def launch_seconds(steps: Sequence[Step]) -> float:
    """Seconds that the host's thread takes to launch steps of the main stream, each kernel and copy by itself.

    What runs on another stream has an event before and behind it, a wait one.
    """
    total = 0.0
    for step in steps:
        if isinstance(step, Loop):
            total += float(step.trips) * launch_seconds(step.body)
        elif isinstance(step, Wait):
            total += RECORD_EVENT
        else:
            copies = step.stream in (HOST_IN, HOST_OUT) and not step.needs_sms
            total += LAUNCH_COPY if copies else LAUNCH_KERNEL
            total += 0.0 if step.stream == MAIN else 2 * RECORD_EVENT
    return total


def streams_in_turn(module: Module) -> dict[str, str]:
    """Queues of asynchronous works by name, as XLA of 0.11 assigns them: four in turn.

    Bodies of loops come after what is around them, and the copies of a computation before its slices. XLA goes through
    these in the order in which it made them, which numbers in their names tell of reads and of writes, but not of both
    together. A step of 7B with five offloads on an H200 takes 3,704 ms so, 3,825 on the streams that XLA wrote down for
    the same program, and 3,044 on two.
    """

    def made(i: Instruction) -> tuple[bool, int]:
        number = re.search(r"\.(\d+)", i.name)
        return i.opcode != "copy-start", int(number[1]) if number else 0

    queues: dict[str, str] = {}
    pending = deque([""])
    while pending:
        instructions = module[pending.popleft()].values()
        starts = [i for i in instructions if i.opcode.endswith("-start") and hlo.collective(module, i) is None]
        for i in sorted(starts, key=made):
            queues[i.name] = f"in turn {len(queues) % IN_TURN}"
        for i in instructions:
            if i.opcode in ("while", "call", "conditional"):
                pending.extendleft(hlo.called(i, f"body|{hlo.CALLS}"))
    return queues


def _label(loop: Instruction, has_loops: bool) -> str:
    """The label of a loop, from the scopes in its name."""
    name = re.search(r'op_name="([^"]*)"', loop.attributes)
    scopes = name[1].split("/") if name else []
    loop_scope = next((scope for scope in reversed(scopes) if scope in LOOPS), None)
    return loop_scope or ("microbatches" if has_loops else "other loops")


def _work(p: ProgramOnGpu, i: Instruction, computation: Mapping[str, Instruction]) -> Work | None:
    """The work of an instruction; None if it takes no time."""
    asynchronous = i.opcode.endswith("-start")
    inside = [p.module[name] for name in hlo.called(i, "calls")]
    if (collective := hlo.collective(p.module, i)) is not None:
        return _collective(p, i, collective, computation if collective is i else inside[0])
    if (transfer := hlo.host_copy(i, computation)) is not None and transfer[1]:
        return _host_transfer(p, i, *transfer)
    kind, seconds = _kernel(p, i, computation, inside)
    if not seconds:
        return None
    stream = SIDE if asynchronous else MAIN
    return Work(i.name, kind, stream, seconds=seconds, needs_sms=kind != DEVICE_COPY)


def _collective(p: ProgramOnGpu, i: Instruction, collective: Instruction, computation) -> Work:
    op = collective.opcode.removesuffix("-start")
    axes, n = hlo.group(collective, p.mesh_shape)
    sent = hlo.WIRE[op](n, sum(a.bytes for a in hlo.operands(collective, computation)))
    rate = links.rate(p.gpu, p.mesh_shape, op, axes)
    latency = links.hops(p.gpu, p.mesh_shape, op, axes) * p.gpu.rates.hop
    return Work(i.name, OF_COLLECTIVE[op], COLLECTIVES, latency=latency, bytes=sent, rate=rate)


def _host_transfer(p: ProgramOnGpu, i: Instruction, way: str, size: int) -> Work:
    by_kernel = not p.copies_only and not by_copy_engine(p.module, i)
    stream = HOST_OUT if way == "d2h" else HOST_IN
    latency = p.gpu.rates.launch if by_kernel else p.gpu.rates.copy
    return Work(i.name, stream, stream, latency=latency, bytes=size, needs_sms=by_kernel)


def by_copy_engine(module: Module, i: Instruction) -> bool:
    """Whether a copy engine does what an instruction transfers, and not a kernel."""
    if i.opcode in ("copy", "copy-start"):
        return True
    called = hlo.called(i, "calls")
    if not called:
        return False
    # Only slices and updates of slices have this attribute.
    return "dynamic_slice_config" in _root(module[called[0]]).attributes


def host_transfers(module: Module) -> dict[str, int]:
    """Host transfers in the bodies of a program's loops, {"copy_engine", "kernel"}: each is counted once."""
    transfers = {"copy_engine": 0, "kernel": 0}
    bodies = {name for i, *_ in hlo.executed(module) if i.opcode == "while" for name in hlo.called(i, "body")}
    for name in sorted(bodies):
        for i in module[name].values():
            copy = hlo.host_copy(i, module[name])
            if copy is not None and copy[1]:
                transfers["copy_engine" if by_copy_engine(module, i) else "kernel"] += 1
    return transfers


def _kernel(p: ProgramOnGpu, i: Instruction, computation, inside: list[dict[str, Instruction]]) -> tuple[str, float]:
    """(kind, seconds) of a kernel; 0 seconds if nothing runs."""
    if i.opcode in ("custom-call", "dot"):
        return _library_call(p, i, computation)
    if not inside:
        size = _bytes(i.shape) + sum(_bytes(computation[name].shape) for name in i.operands if name in computation)
        if i.opcode in ("copy", "copy-start"):
            return DEVICE_COPY, _pass_time(p, 2 * sum(a.bytes for a in hlo.arrays(hlo.result(i))))
        return PASS, _pass_time(p, size)
    # A fusion around a product by cuBLAS slices its operands or updates a stack with its result. XLA's own products
    # (Triton) are fusions around a dot.
    products = [_library_call(p, x, inside[0]) for x in inside[0].values() if x.opcode in ("custom-call", "dot")]
    if products:
        return products[0][0], sum(seconds for _, seconds in products)
    kind = DEVICE_COPY if by_copy_engine(p.module, i) else PASS
    return kind, _pass_time(p, _fusion_bytes(inside[0]))


def _pass_time(p: ProgramOnGpu, size: float) -> float:
    """Seconds of a kernel that reads and writes so many bytes of device memory."""
    return pass_time(p.gpu, size) + p.gpu.rates.launch


def _library_call(p: ProgramOnGpu, i: Instruction, computation) -> tuple[str, float]:
    """(kind, seconds) of a library's kernel, of one of ours, or of a product that XLA computes itself."""
    target = _attribute(i, r'custom_call_target="([^"]*)"') if i.opcode == "custom-call" else ""
    operands = [computation[name].shape for name in i.operands]
    if target in NO_KERNEL:
        return PASS, 0.0
    if i.opcode == "dot" or target.startswith("__cublas"):
        m, n, k, batch = product_sizes(i, computation)
        dtype = re.match(r"\(?(\w+)\[", operands[0])
        assert dtype is not None, operands[0]
        return PRODUCT, product_time(p.gpu, m, n, k, batch, dtype[1]) + p.gpu.rates.launch
    if "fmha" in target:
        flops, backward = attention_flops(i, operands[:3])
        return ATTENTION, attention_time(p.gpu, flops, backward=backward) + p.gpu.rates.launch
    if re.search(r'op_name="[^"]*\battention\)*/kernel\b', i.attributes):
        window = re.search(rf'op_name="[^"]*\b{flash_attention.WINDOW}(\d+)\b', i.attributes)
        flops, backward = kernel_attention_flops(operands, int(window[1]) if window else 0)
        return ATTENTION, attention_time(p.gpu, flops, backward=backward) + p.gpu.rates.launch
    in_passes = _pass_time(p, _bytes(i.shape) + sum(map(_bytes, operands)))
    if re.search(r'op_name="[^"]*\bgrouped_matmul\b', i.attributes):
        # Rows times one of several matrices, or transposed, sums of such products: the speed of attention is assumed,
        # whose kernels multiply in registers too.
        flops = 2 * math.prod(_dims(operands[0])) * _dims(operands[1])[-2]
        return PRODUCT, max(in_passes, attention_time(p.gpu, flops, backward=False) + p.gpu.rates.launch)
    if flops := said_flops(i):
        return PRODUCT, max(in_passes, attention_time(p.gpu, flops, backward=False) + p.gpu.rates.launch)
    return PASS, in_passes


def said_flops(i: Instruction) -> int:
    """FLOPs of products that one of our kernels says of itself (pallas_kernels/triton.py); 0 if it says none."""
    said = re.search(r"\\22flops\\22: \\22(\d+)\\22", i.attributes)
    return int(said[1]) if said else 0


def product_sizes(i: Instruction, computation: Mapping[str, Instruction]) -> tuple[int, int, int, int]:
    """(m, n, k, batch) of a matrix product by cuBLAS or by XLA, which write its dimensions differently."""

    def dims(key: str) -> list[int]:
        match = re.search(rf'"{key}_dimensions":\[([^\]]*)\]|{key}_dims={{([^}}]*)}}', i.attributes)
        return [int(x) for x in re.findall(r"\d+", match[1] or match[2] or "")] if match else []

    lhs, rhs = (_dims(computation[name].shape) for name in i.operands[:2])
    k = math.prod(lhs[d] for d in dims("lhs_contracting"))
    batch = math.prod(lhs[d] for d in dims("lhs_batch"))
    return math.prod(lhs) // (k * batch), math.prod(rhs) // (k * batch), k, batch


def attention_flops(i: Instruction, operands: Sequence[str]) -> tuple[float, bool]:
    """(FLOPs of an attention by cuDNN, whether it is the backward pass); operands: shapes of queries, keys, values."""
    scores = _attribute(i, r'"dimensions": ?\[([^\]]*)\]')
    rows, heads, queries, keys = (int(x) for x in re.findall(r"\d+", scores))
    pairs = rows * heads * queries * keys * (0.5 if "CAUSAL" in i.attributes else 1.0)
    if window := re.search(r'"sliding_window_length": ?(\d+)', i.attributes):
        pairs -= rows * heads * _outside(int(window[1]), queries, keys)
    backward = "Backward" in _attribute(i, r'custom_call_target="([^"]*)"')
    channels = _dims(operands[0])[-1] + _dims(operands[-1])[-1]
    return 2.0 * pairs * channels * (BACKWARD_FLOPS if backward else 1.0), backward


def _outside(window: int, queries: int, keys: int) -> float:
    """Pairs of a query and an earlier key that is outside of the window; the queries are the last of the positions."""
    if not 0 < window < keys:
        return 0.0
    return ((keys - window) ** 2 - (max(keys - queries, window) - window) ** 2) / 2


def kernel_attention_flops(operands: Sequence[str], window: int) -> tuple[float, bool]:
    """(FLOPs of a kernel of pallas_kernels/flash_attention.py, whether it is of the backward pass).

    operands: their shapes, q, k, v transposed and the first keys forward; q, do, k, k transposed, v, ... for dq; k, v,
    q, ... for dk and dv. Rows are taken to be one document each, which is the most that they can take. window: 0: none.
    """
    shapes = [_dims(shape) for shape in operands]
    if len(shapes) == 4:
        (rows, queries, heads, width), (_, keys, *_), (*_, of_values, _) = shapes[:3]
    elif len(shapes) == 8:
        (rows, queries, heads, width), (*_, of_values), (_, keys, *_) = shapes[:3]
    else:
        (_, keys, *_), (*_, of_values), (rows, queries, heads, width) = shapes[:3]
    scores = rows * heads * (queries * (keys - queries / 2) - _outside(window, queries, keys))
    forward, of_queries, of_keys = flash_attention.multiplied_channels(width, of_values)
    channels = {4: forward, 8: of_queries}.get(len(shapes), of_keys)
    return 2.0 * scores * channels, len(shapes) > 4


def product_time(gpu: Gpu, m: int, n: int, k: int, batch: int = 1, dtype: str = "bf16") -> float:
    """Seconds of `[m, k] x [k, n]`, `batch` times, on an idle GPU without the launch. dtype: HLO's name."""
    rates = gpu.rates
    peak = gpu.peak(dtype)
    if peak > gpu.bf16_flops:
        peak *= rates.eight_bit
    bandwidth = gpu.memory_bandwidth * rates.memory
    itemsize = {"f32": 4, "f8e4m3fn": 1, "f8e5m2": 1, "f4e2m1fn": 0.5}.get(dtype, 2)
    moved = (itemsize * (m * k + k * n) + 2 * m * n) * batch / bandwidth

    def tiled(rows: int, columns: int, rate: float, split: int) -> float:
        """Seconds with these tiles: every wave takes as long as a full one; partial sums are added in a pass."""
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * batch * split
        waves = math.ceil(tiles / gpu.sm_count)
        of_wave = 2.0 * rows * columns * (k / split) * gpu.sm_count / (peak * rates.products * rates.boost * rate)
        return waves * of_wave + (3 * m * n * 4 / bandwidth if split > 1 else 0)

    tiles = [(a, b, rate) for x, y, rate in TILES for a, b in ((x, y), (y, x))]
    at_most = 2.0 * m * n * k * batch / (peak * rates.products)  # by power, whatever the tiles
    return rates.ramp + max(moved, at_most, min(tiled(*tile, split) for tile in tiles for split in SPLITS))


@functools.cache
def product_call_time(gpu: Gpu, m: int, n: int, k: int, dtype: str) -> float:
    """Seconds of `product_time` with the launch."""
    return product_time(gpu, m, n, k, dtype=dtype) + gpu.rates.launch


def pass_time(gpu: Gpu, size: float) -> float:
    """Seconds in which so many bytes are read from or written to device memory, without the launch."""
    return size / (gpu.memory_bandwidth * gpu.rates.memory)


def attention_time(gpu: Gpu, flops: float, *, backward: bool) -> float:
    """Seconds of an attention on an idle GPU without the launch."""
    return flops / (gpu.bf16_flops * (gpu.rates.attention_backward if backward else gpu.rates.attention))


def _fusion_bytes(computation: dict[str, Instruction]) -> int:
    """Bytes that a fusion reads and writes in device memory; `computation`: what it fuses."""

    def source(name: str) -> str:
        return source(computation[name].operands[0]) if computation[name].opcode == "bitcast" else name

    users = defaultdict(list)
    for i in computation.values():
        for position, name in enumerate(i.operands):
            if name in computation and i.opcode != "bitcast":
                users[source(name)].append((i, position))

    def read(parameter: Instruction) -> int:
        """Bytes read of a parameter: of slices only their results, nothing of what is overwritten in place."""
        size = 0
        for user, position in users[parameter.name]:
            if user.opcode in UPDATED_BY and position == 0:
                continue
            sliced = user.opcode in ("dynamic-slice", "slice") or (user.opcode == "gather" and position == 0)
            size += _bytes((user if sliced else parameter).shape)
        return min(size, _bytes(parameter.shape))

    def written(result: Instruction) -> int:
        part = UPDATED_BY.get(result.opcode)
        return _bytes((result if part is None else computation[result.operands[part]]).shape)

    root = next(reversed(computation.values()))
    results = root.operands if root.opcode == "tuple" else (root.name,)
    parameters = (i for i in computation.values() if i.opcode == "parameter")
    return sum(map(read, parameters)) + sum(written(computation[source(name)]) for name in results)


def _root(computation: dict[str, Instruction]) -> Instruction:
    """The last instruction of a computation, or what it renames."""
    root = next(reversed(computation.values()))
    while root.opcode == "bitcast":
        root = computation[root.operands[0]]
    return root


def _bytes(shape: str) -> int:
    """Bytes of an HLO shape."""
    return sum(a.bytes for a in hlo.arrays(shape))


def _dims(shape: str) -> list[int]:
    """The sizes of the first array of an HLO shape."""
    match = re.search(r"\[([\d,]*)\]", shape)
    return [int(d) for d in match[1].split(",") if d] if match else []


def _attribute(i: Instruction, pattern: str) -> str:
    """The first group of a pattern in the attributes of an instruction."""
    match = re.search(pattern, i.attributes)
    assert match is not None, (pattern, i)
    return match[1]
