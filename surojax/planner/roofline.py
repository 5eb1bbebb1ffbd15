"""Estimates the time of a step from shapes, phase by phase: each phase takes as long as its busiest resource.

This ranks settings before anything is compiled (search.py). timeline.py predicts the time of a compiled step.

The phases of a step, with what happens at the same time in each:

* forward, for every microbatch and layer: products, attention and passes over activations; residuals are written to
  host memory. For every fetch, which serves `microbatches_per_fetch` of them: weights are all-gathered and read from
  host memory.
* backward, for every microbatch and layer: products for two gradients, and the forward ones again if the block is
  recomputed; gradients are reduced; residuals are read. For every fetch: weights once more; accumulators are written to
  host memory, and read but for the first time.
* head, for every microbatch: three products for each slice of tokens, passes over logits.
* update, once a step: master weights, moments and gradients are read, master weights, moments and weights are written.
* between: collectives that happen once a step and overlap with nothing.

Collectives over `tp` and `cp` are part of a layer: the next product waits for them, so they add to the time in which a
phase computes. They also wait for gathers that were started before them, of which `HELD` is taken to be exposed then.
Stages of `pp` go from tick to tick together: for k microbatches and p stages each of them takes the time of k + p - 1,
and fetches its layers as often. Their residuals move by kernels, since the place of a microbatch is not linear in a
loop's counter, so products wait for them.

Products take what costs.product_time says and flash attention what costs.attention_time says; attention by XLA takes
its products and the passes over its scores. Passes take the bytes of the residuals times a
factor, transfers their bytes at what `Rates` reaches of a link. Directions of the host link slow each other by
`Rates.duplex`; GPUs without a link of their own share PCI Express between collectives and host copies.

A setting that stores something elsewhere changes only the bytes of transfers. So `Work` holds what does not depend on
where tensors are stored, and `phases` adds the transfers for a choice of memories.

FORWARD_PASSES and BACKWARD_PASSES are fitted to the timelines of compiled steps: 7B, 1.2B and 134M on RTX 4090 and
H100. `surojax.fit` prints estimated beside predicted time for each step that it compiles.
"""

import dataclasses
import functools
import math
from collections.abc import Collection

import jax
import jax.numpy as jnp

from surojax.assembly import Assembly
from surojax.models.lora import adapters
from surojax.models.model import Segment
from surojax.parallel.schedule import SCHEDULES, layers_of_stage
from surojax.placement.home import DEVICE, HOST, NVME
from surojax.placement.mesh import (
    CONTEXT,
    SHARD,
    TENSOR,
    devices_per_sequence,
    pipeline_stages,
    tensor_parallel,
)
from surojax.placement.param import OUTER, Kind, Param, part_of
from surojax.planner import footprint, links, traffic
from surojax.planner.advice import OFFLOADS
from surojax.planner.costs import BACKWARD_FLOPS, attention_time, product_time
from surojax.planner.gpus import Gpu, Rates
from surojax.step.state_plan import bytes_per_device

FORWARD_PASSES = 1.6  # bytes that passes move per byte of residuals of a block with nothing recomputed, forward
BACKWARD_PASSES = 3.2
LOGIT_PASSES = 4  # times that logits are read or written
SCORE_PASSES = 4  # times that attention scores are, forward; twice as often backward
IN_A_LAYER = 10  # collectives over tp, or over cp: the inputs and results of attention and MLP, both ways and again
HELD = 0.5  # of the other collectives, if products wait for some; compiled steps of 405B on 64 and 128 H100 have more
FORWARD_WAITS = 1 / 3  # of the time of such collectives: the part of the forward pass
HLO_DTYPES = {"bfloat16": "bf16", "float32": "f32", "float8": "f8e4m3fn", "float4": "f4e2m1fn"}


@dataclasses.dataclass(frozen=True)
class Work:
    """A step on one GPU, wherever its tensors are stored. Seconds of a microbatch, bytes of a step or a microbatch.

    Bytes of collectives between machines are those that would take as long within one (links.py).
    """

    gpu: Gpu
    rates: Rates
    microbatches: int
    rounds: int  # times that a stage's layers take the time of a microbatch, in each direction
    fetches: int  # times that each layer's weights and accumulators are fetched in each direction
    forward: float  # seconds of a microbatch in the blocks of a stage
    backward: float
    waits: float  # seconds of a microbatch in collectives that products wait for
    head: float
    update_bytes: int  # in device memory
    gathered: float  # bytes that a GPU sends to gather the blocks' weights once, for one pass
    reduced: float  # bytes that a GPU sends to reduce the gradients of a microbatch
    once: float  # bytes of collectives that happen once a step
    sizes: dict[str, int]  # see `stored_bytes`


def stored_bytes(run: Assembly, rows: dict[str, dict[str, int]], microbatches: int) -> dict[str, int]:
    """Bytes per GPU of what each of OFFLOADS moves, in whichever memory; residuals: of one microbatch.

    updated weights: those of the blocks that are trained. residuals at once: of all microbatches that are in memory.
    rows: `footprint.by_class` of the run, which does not count files.
    """
    both = {name: sum(row.values()) for name, row in rows.items()}
    outer = {k: v for k, v in run.plan.weights.items() if k == OUTER}
    trained = part_of(run.plan.weights, run.plan.master)
    blocks = both["weights"] + both.get("quants", 0) - sum(bytes_per_device(outer, home) for home in (DEVICE, HOST))
    itemsize = jnp.dtype(run.engine.table.grads.dtype).itemsize
    outer_size = sum(math.prod(w.sharding.shard_shape(w.shape)) for w in jax.tree.leaves(trained[OUTER]))
    updated = {k: v for k, v in trained.items() if k != OUTER}
    at_once = both["activations"]
    stages = pipeline_stages(run.mesh)
    in_flight = run.engine.microbatches_per_fetch
    if stages > 1:
        in_flight = max(SCHEDULES[run.engine.pp_schedule](microbatches, stages).in_flight.tolist())
    return {
        "residual": at_once // in_flight,
        "residuals at once": at_once,
        "optimizer": both["moments"] + bytes_per_device((run.plan.moments, run.plan.history), NVME),
        "master": both["master"] + bytes_per_device(run.plan.master, NVME),
        "grads": both["gradients"] - itemsize * outer_size,
        "weights": blocks,
        "updated weights": sum(bytes_per_device(updated, home) for home in (DEVICE, HOST)),
    }


def step_work(run: Assembly, batch: traffic.Batch, gpu: Gpu, sizes: dict[str, int]) -> Work:
    """The `Work` of a step. sizes: see `stored_bytes`."""
    rates = _rates(gpu)
    k = batch.microbatches
    bandwidth = gpu.memory_bandwidth * rates.memory
    grads = sizes["grads"] / bandwidth
    forward, backward = (sum(x) for x in zip(*(_segment(run, s, batch, gpu) for s in run.model.segments), strict=True))
    per_fetch = run.engine.microbatches_per_fetch
    once, with_a_fetch = (
        _as_within_a_machine(run, gpu, traffic.collective_bytes(run, dataclasses.replace(batch, microbatches=n)))
        for n in (0, per_fetch)
    )
    of_fetch = {key: size - once.get(key, 0) for key, size in with_a_fetch.items()}
    of_shards = {op: size for (op, axes), size in of_fetch.items() if axes == traffic.axes_of_shards(run)}
    gathers = of_shards.get("all-gather", 0.0) if run.engine.table.weights.sharded else 0.0
    of_groups = (sum(of_fetch.values()) - sum(of_shards.values())) / per_fetch  # of a microbatch, over tp, cp and pp
    stages = pipeline_stages(run.mesh)
    return Work(
        gpu=gpu,
        rates=rates,
        microbatches=k,
        rounds=k + stages - 1,
        fetches=k + stages - 1 if stages > 1 else k // run.engine.microbatches_per_fetch,
        forward=forward,
        backward=backward + 2 * grads,  # accumulators are read and written
        waits=of_groups / (gpu.link_bandwidth * rates.link) + _latencies(run, gpu),
        head=_head(run, batch, gpu),
        update_bytes=2 * (sizes["master"] + sizes["optimizer"]) + sizes["grads"] + sizes["updated weights"],
        gathered=gathers / 2,
        reduced=(sum(of_shards.values()) - gathers) / per_fetch,
        once=sum(once.values()),
        sizes=sizes,
    )


def _latencies(run: Assembly, gpu: Gpu) -> float:
    """Seconds of a microbatch in which collectives over `tp` and `cp` have not sent a byte yet."""
    shape = run.mesh.shape
    hops = IN_A_LAYER * sum(
        links.hops(gpu, shape, "all-gather", "+".join(axis for axis in axes if axis in shape))
        for axes in (TENSOR, (CONTEXT,))
    )
    return hops * _layers(run) * _rates(gpu).hop


def _layers(run: Assembly) -> int:
    """Layers of a full stage."""
    stages = pipeline_stages(run.mesh)
    return sum(layers_of_stage(segment.num_layers, stages) for segment in run.model.segments)


def _as_within_a_machine(run: Assembly, gpu: Gpu, found: dict[tuple[str, str], int]) -> dict[tuple[str, str], float]:
    """Returns the bytes that would take as long as a collective's, if all GPUs were in one machine."""
    shape = run.mesh.shape
    within = gpu.link_bandwidth * _rates(gpu).link
    return {(op, axes): size * within / links.rate(gpu, shape, op, axes) for (op, axes), size in found.items()}


def phases(
    work: Work, offloaded: Collection[str], resident: float = 0.0, *, overlap_update: bool = False
) -> dict[str, float]:
    """Estimated seconds of each phase of a step.

    offloaded: those of OFFLOADS that are in host memory. resident: the fraction of layers whose weights are in
    device memory all the same. overlap_update: the update's phase has the first group's forward pass in it.
    """
    host = {name: work.sizes[name] * (name in offloaded) for name in OFFLOADS}
    weights = host["weights"] * (1 - resident)
    k = work.microbatches
    rounds = work.rounds
    by_kernel = rounds > k  # stages
    residuals = by_kernel * k * host["residual"] / (work.gpu.pcie_bandwidth * work.rates.host)
    under_update = overlap_update / work.fetches  # fraction of the forward passes
    apart = 1 - under_update
    forward = _phase(
        work,
        seconds=apart * rounds * work.forward + residuals,
        waits=apart * rounds * FORWARD_WAITS * work.waits,
        link=apart * work.fetches * work.gathered,
        read=apart * work.fetches * weights,
        written=apart * k * host["residual"],
    )
    backward = _phase(
        work,
        seconds=rounds * work.backward + residuals,
        waits=rounds * (1 - FORWARD_WAITS) * work.waits,
        link=work.fetches * work.gathered + k * work.reduced,
        read=work.fetches * weights + (work.fetches - 1) * host["grads"] + k * host["residual"],
        written=work.fetches * host["grads"],
    )
    state = host["master"] + host["optimizer"]
    update = _phase(
        work,
        seconds=work.update_bytes / (work.gpu.memory_bandwidth * work.rates.memory) + under_update * k * work.forward,
        waits=under_update * k * FORWARD_WAITS * work.waits,
        link=under_update * work.fetches * work.gathered,
        read=state + host["grads"],
        written=state
        + work.sizes["updated weights"] * ("weights" in offloaded) * (1 - resident)
        + under_update * k * host["residual"],
    )
    between = work.once / (work.gpu.link_bandwidth * work.rates.link)
    return {"forward": forward, "head": k * work.head, "backward": backward, "update": update, "between": between}


def _phase(work: Work, *, seconds: float, waits: float, link: float, read: float, written: float) -> float:
    """Seconds of a phase that computes and waits for so many seconds while it transfers these bytes."""
    rates, gpu = work.rates, work.gpu
    host_rate = gpu.pcie_bandwidth * rates.host
    one_way = abs(read - written) / host_rate
    both_ways = min(read, written) / (host_rate * rates.duplex)
    host = one_way + both_ways
    collectives = link / (gpu.link_bandwidth * rates.link)
    slowed = seconds + rates.collective_sms * min(collectives, seconds) + waits + HELD * collectives * (waits > 0)
    collectives += waits
    return max(slowed, host + collectives if gpu.shares_pcie else max(host, collectives))


def _segment(run: Assembly, segment: Segment, batch: traffic.Batch, gpu: Gpu) -> tuple[float, float]:
    """Seconds that a full stage's layers of a segment compute in a microbatch: (forward, backward)."""
    model, engine = run.model, run.engine
    rates = _rates(gpu)
    dtype = jnp.dtype(engine.table.weights.dtype)
    length = batch.sequence_len // devices_per_sequence(run.mesh)
    x = jax.ShapeDtypeStruct((batch.sequences, length, model.hidden_size), dtype)
    tokens = batch.tokens // run.mesh.shape.get(CONTEXT, 1)  # of a product: a tensor-parallel group has the same
    whole = model.rebuild(dataclasses.replace(model.compute, sequence_chunks=1))
    sizes = footprint.segment_bytes(dataclasses.replace(run, model=whole), segment, x, "gpu")
    bandwidth = gpu.memory_bandwidth * rates.memory
    passes = sizes.saved / bandwidth
    flops = segment.attention_flops(batch.sequence_len) * batch.tokens / segment.num_layers  # of a layer, for a group
    attended, attended_back = _attention(gpu, flops / devices_per_sequence(run.mesh), sizes.scores)
    again = engine.recompute_block or model.compute.recompute.att
    params, layouts = (jax.tree.leaves(tree) for tree in (segment.params, engine.layouts.weights[segment.name]))
    matrices = [
        (p, jax.NamedSharding(run.mesh, layout.computed).shard_shape(p.shape))
        for p, layout in zip(params, layouts, strict=True)
        if p.kind in (Kind.MATRIX, Kind.FACTOR)
    ]
    coded = {p.name: traffic.coded_bytes(run, segment, p) for p, _ in matrices}
    forward = 0.0
    backward = 0.0
    of_last = traffic.last_layer_once(run) and segment is model.segments[-1]
    for l, variant in enumerate(segment.variants):
        repeats = not (of_last and l == segment.num_layers - 1)
        of_recipe = traffic.operands(model.precision, variant.recipe_enabled, str(dtype))
        forward += FORWARD_PASSES * passes + attended
        backward += BACKWARD_PASSES * passes + attended_back + attended * again * repeats
        backward += repeats * FORWARD_PASSES * passes * (1 - sizes.kept / sizes.saved)  # what was not kept
        for p, (rows, columns) in matrices:
            in_words = (p.dtype or str(dtype),) * 2 if p.kind is Kind.FACTOR else of_recipe
            low, low_back = (HLO_DTYPES[x] for x in in_words)
            ahead = _product(gpu, tokens, rows, columns, low)
            if coded[p.name]:  # codes are read and numbers written, in each pass
                moved = rows * columns * (coded[p.name] + dtype.itemsize)
                forward += moved / bandwidth
                backward += moved / bandwidth
            forward += ahead
            backward += _product(gpu, tokens, columns, rows, low_back)
            backward += p.trainable * _product(gpu, rows, columns, tokens, low_back)
            backward += repeats * ahead * _repeated(run, segment, p)
    lengths = segment.num_layers * _row_lengths(run, segment, gpu, dtype)
    of_stage = layers_of_stage(segment.num_layers, pipeline_stages(run.mesh)) / segment.num_layers
    return of_stage * (forward + lengths), of_stage * (backward + lengths * again)


def _row_lengths(run: Assembly, segment: Segment, gpu: Gpu, dtype) -> float:
    """Seconds in which a layer's DoRA adapters compute their lengths of rows: a float32 product and a pass for each."""
    rates = _rates(gpu)
    by_name = {p.name: p for p in jax.tree.leaves(segment.params)}
    of_device = dict(zip(by_name, jax.tree.leaves(run.engine.layouts.weights[segment.name]), strict=True))
    seconds = 0.0
    for matrix, names in adapters(segment.params):
        if names.magnitude:
            rows, columns = jax.NamedSharding(run.mesh, of_device[matrix].computed).shard_shape(by_name[matrix].shape)
            seconds += _product(gpu, rows, by_name[names.a].shape[0], columns, HLO_DTYPES["float32"])
            seconds += rows * columns * jnp.dtype(dtype).itemsize / (gpu.memory_bandwidth * rates.memory)
    return seconds


def _repeated(run: Assembly, segment: Segment, p: Param) -> bool:
    """True if the backward pass computes the product with a matrix again."""
    if run.engine.recompute_block:
        return all(p.name != last.name for last in segment.last_products)
    recompute = run.model.compute.recompute
    return (recompute.ffn and p.axes[0] == "mlp") or (recompute.att and p.axes[0] in ("heads", "kv_heads"))


def _attention(gpu: Gpu, flops: float, scores: int) -> tuple[float, float]:
    """Seconds of the attention of one layer on one GPU, (forward, backward).

    flops: of its forward pass there. scores: bytes of the scores there; 0: flash attention, which stores none.
    """
    rates = _rates(gpu)
    if not scores:
        back = attention_time(gpu, rates, BACKWARD_FLOPS * flops, backward=True)
        return attention_time(gpu, rates, flops, backward=False), back
    squares = 2 * flops / (gpu.bf16_flops * rates.products)  # XLA multiplies the masked half too
    moved = SCORE_PASSES * scores / (gpu.memory_bandwidth * rates.memory)
    return squares + moved, BACKWARD_FLOPS * (squares + moved)


def _head(run: Assembly, batch: traffic.Batch, gpu: Gpu) -> float:
    """Seconds of head and loss in a microbatch: three products and several passes for each slice of tokens."""
    rates = _rates(gpu)
    model, table = run.model, run.engine.table
    chunks = run.engine.lmhead_chunks
    shards = run.mesh.shape[SHARD] if table.outer.sharded else 1
    of_group = batch.tokens // run.mesh.shape.get(CONTEXT, 1)
    tokens = of_group * shards // chunks  # sharded: each GPU has a part of the vocabulary, and all tokens
    vocabulary = model.vocab_size // (shards * tensor_parallel(run.mesh) * pipeline_stages(run.mesh))
    dtype = str(jnp.dtype(table.outer.dtype))
    sizes = ((tokens, vocabulary, model.hidden_size), (tokens, model.hidden_size, vocabulary))
    trained = model.outer_params[model.head].trainable
    sizes += ((vocabulary, model.hidden_size, tokens),) * trained
    products = sum(_product(gpu, *size, HLO_DTYPES[dtype]) for size in sizes)
    accumulator = trained * vocabulary * model.hidden_size * jnp.dtype(table.grads.dtype).itemsize
    passes = LOGIT_PASSES * tokens * vocabulary * jnp.dtype(dtype).itemsize + accumulator
    return chunks * (products + passes / (gpu.memory_bandwidth * rates.memory))


@functools.cache
def _product(gpu: Gpu, m: int, n: int, k: int, dtype: str) -> float:
    """Seconds of a product `[m, k] x [k, n]`."""
    rates = _rates(gpu)
    return product_time(gpu, rates, m, n, k, dtype=dtype) + rates.launch


def _rates(gpu: Gpu) -> Rates:
    """The rates of a GPU. Raises ValueError if they are not known."""
    if gpu.rates is None:
        raise ValueError(f"roofline: expected a GPU with rates in planner/gpus.py, got {gpu.name}; add them there")
    return gpu.rates
