"""Estimates the time of a step from shapes, phase by phase: each phase takes as long as its busiest resource, or its
longest chain of works that wait for each other.

This ranks settings before anything is compiled (search.py). timeline.py predicts the time of a compiled step.

The phases are the passes of a step (step/passes.py), each with the bytes that its lanes copy, the head, and what
happens between them. Products and passes over activations are in products.py, collectives in traffic.py; host transfers
take their bytes at what `Rates` reaches of a link. Directions of the host link slow each other by `Rates.duplex`; GPUs
without a link of their own share PCI Express between collectives and host copies, and all of them share host memory
(timeline.py).

XLA runs one collective at a time, and the works of a layer follow from that (`_chains`):

* The gather of the next layer hides behind the forward pass. In the backward pass it hides only until the first
  gradient of a matrix is there, because that is reduced, which waits for the gather: behind the repetition of the
  forward pass. If nothing is repeated, the gather comes last, and with it the sum over replicas, and all wait for them.
  Of weights in host memory the gather begins when they have arrived, so it shares the gradients' products with the
  reductions.
* Collectives over `tp` and `cp` are part of the forward pass, whose products wait for them. A gather then hides behind
  the longest part of the layer between two of them.
* Reductions, and the collectives over `tp` and `cp` in reverse mode, hide behind the products of gradients, but for the
  last reduction of a layer, behind which nothing is left. Of the four over `tp`, products wait for the first; each
  of the others has the gradient of a matrix for itself (`covering`), behind which no reduction hides. If no gradients
  are reduced, XLA leaves their products to the last of the four, and the others are waited for, too.
* What was fetched is copied once, into the loop's carry.

Layers whose weights are resident and those whose weights are streamed are loops of their own, and so are their phases
forward and backward. Residuals that are written to host memory have left their buffers before the next layer's are
computed: if blocks are not recomputed, nothing is left to be written while a layer computes its last product.

Stages of `pp` go from tick to tick together: for k microbatches and p stages each of them takes the time of k + p - 1,
and fetches its layers as often. Their residuals move by kernels, since the place of a microbatch is not linear in a
loop's counter, so products wait for them.

A setting that stores something elsewhere changes only the bytes of transfers. So `Work` holds what does not depend on
where tensors are stored, and `phases` adds the transfers for a choice of memories. `surojax.fit` prints estimated
beside predicted time for each step that it compiles.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping

import jax

from surojax.assembly import Assembly
from surojax.placement.home import DEVICE, HOST, NVME
from surojax.placement.mesh import CONTEXT, pipeline_stages, tensor_parallel
from surojax.placement.param import OUTER, Kind, part_of
from surojax.planner import links, products, sizes, traffic
from surojax.planner.gpus import Gpu, Rates, known_rates
from surojax.planner.products import IN_A_PASS, Seconds
from surojax.planner.sizes import itemsize
from surojax.planner.traffic import Batch
from surojax.step import passes
from surojax.step.passes import Pass
from surojax.step.spec import Engine
from surojax.step.state_plan import bytes_per_device

ROWS = {"residual": "residuals", "optimizer": "moments"}  # of the placement table, where an `offload_` has another name


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """Seconds of collectives on one GPU, of all layers of a full stage where layers send something.

    gathered: of weights, once for a forward pass. reduced: of a microbatch's gradients. reduced_once: of accumulators
    and over replicas, once a step. smallest: the part of reductions that is of the smallest matrix of each layer.
    updated: gathers of updated weights. forward, again, backward: of a microbatch over tp and cp, in the forward pass,
    its repetition, and reverse mode; backward_tensor: of that, over tp. vocabulary: of a microbatch's tokens. ticks:
    between stages in a step. once: of outer layers and whole matrices, once a step.
    """

    gathered: float
    reduced: float
    reduced_once: float
    smallest: float
    updated: float
    forward: float
    again: float
    backward: float
    backward_tensor: float
    vocabulary: float
    ticks: float
    once: float


def collective_time(run: Assembly, batch: Batch, gpu: Gpu) -> CollectiveTime:
    """The `CollectiveTime` of a step: bytes at the rate of the slowest link, and hops in which no byte has arrived.

    XLA joins the gathers of a layer into one; each matrix has a reduction of its own.
    """
    shape, hop = run.mesh.shape, known_rates(gpu).hop
    seconds = dict.fromkeys((field.name for field in dataclasses.fields(CollectiveTime)), 0.0)
    for x in traffic.transfers(run, batch):
        late = x.number * links.hops(gpu, shape, x.op, x.axes) * hop if x.number else 0.0
        time = late + (x.size / links.rate(gpu, shape, x.op, x.axes) if x.size else 0.0)
        seconds[x.part] += time * (x.times if x.part in ("ticks", "once") else 1)
    seconds["backward"] += seconds["backward_tensor"]
    return CollectiveTime(**seconds | {"smallest": _smallest(run)})


def _smallest(run: Assembly) -> float:
    """The part of the elements of a stage's trained matrices that the smallest matrix of each layer has."""
    matrices = [t for t in sizes.blocks(run, trained=True) if t.param.kind is not Kind.VECTOR]
    smallest = (
        min((t.size for t in matrices if t.section == segment.name), default=0) for segment in run.model.segments
    )
    return sum(smallest) / max(sum(t.size for t in matrices), 1)


@dataclasses.dataclass(frozen=True)
class Work:
    """A step on one GPU, wherever its tensors are stored. Seconds of a microbatch, bytes of a step or a microbatch."""

    engine: Engine
    gpu: Gpu
    rates: Rates
    host_memory: float  # B/s of host memory that programs reach for this GPU
    microbatches: int
    rounds: int  # times that a stage's layers take the time of a microbatch, in each direction
    fetches: int  # times that each layer's weights and accumulators are fetched in each direction
    layers: int  # of a stage
    blocks: Seconds  # that they compute
    collectives: CollectiveTime
    hides_forward: float  # of the forward pass, what a gather can hide behind: of the longest part between collectives
    hides_again: float  # of its repetition
    recomputed: bool  # whether the backward pass begins with the forward pass of a block
    head: float
    update_bytes: int  # in device memory
    layer_bytes: int  # of the blocks' weights in the device memory of a GPU while they are computed
    sizes: dict[str, int]  # see `stored_bytes`


def stored_bytes(run: Assembly, rows: dict[str, dict[str, int]], microbatches: int) -> dict[str, int]:
    """Bytes per GPU of what each of OFFLOADS moves, in whichever memory; residuals: of one microbatch.

    updated weights: those of the blocks that are trained. residuals at once: of all microbatches that are in memory.
    rows: `footprint.by_class` of the run, which does not count files.
    """
    both = {name: sum(row.values()) for name, row in rows.items()}

    def in_memory(tree) -> int:
        return sum(bytes_per_device(tree, home) for home in (DEVICE, HOST))

    outer = run.plan.weights[OUTER]
    outer_shapes = [w.sharding.shard_shape(w.shape) for w in jax.tree.leaves(part_of(outer, run.plan.master[OUTER]))]
    trained = part_of(run.plan.weights, run.plan.master)
    several = pipeline_stages(run.mesh) > 1
    in_flight = sizes.slots(run, microbatches) if several else run.engine.microbatches_per_fetch
    return {
        "residual": both["activations"] // in_flight,
        "residuals at once": both["activations"],
        "optimizer": both["moments"] + bytes_per_device((run.plan.moments, run.plan.history), NVME),
        "master": both["master"] + bytes_per_device(run.plan.master, NVME),
        "grads": both["gradients"] - itemsize(run, "grads") * sum(map(math.prod, outer_shapes)),
        "weights": both["weights"] + both.get("quants", 0) - in_memory(outer),
        "updated weights": in_memory({name: of for name, of in trained.items() if name != OUTER}),
    }


def step_work(run: Assembly, batch: Batch, gpu: Gpu, stored: dict[str, int]) -> Work:
    """The `Work` of a step. stored: see `stored_bytes`."""
    rates = known_rates(gpu)
    k = batch.microbatches
    grads = stored["grads"] / (gpu.memory_bandwidth * rates.memory)
    blocks = products.of_blocks(run, batch, gpu)
    blocks = blocks._replace(backward=blocks.backward + 2 * grads)  # accumulators are read and written
    rounds = k + pipeline_stages(run.mesh) - 1
    hides_forward, hides_again = _hiding(run, blocks)
    return Work(
        engine=run.engine,
        gpu=gpu,
        rates=rates,
        host_memory=gpu.host_memory(run.mesh.size) * rates.dram,
        microbatches=k,
        rounds=rounds,
        fetches=rounds // run.engine.microbatches_per_fetch,
        layers=sizes.layers_of(run),
        blocks=blocks,
        collectives=collective_time(run, batch, gpu),
        hides_forward=hides_forward,
        hides_again=hides_again,
        recomputed=run.engine.recompute_block,
        head=products.of_head(run, batch, gpu),
        update_bytes=2 * (stored["master"] + stored["optimizer"]) + stored["grads"] + stored["updated weights"],
        layer_bytes=itemsize(run, "weights") * sum(t.size for t in sizes.blocks(run)),
        sizes=stored,
    )


def _hiding(run: Assembly, blocks: Seconds) -> tuple[float, float]:
    """Seconds of the forward pass, and of its repetition, in which no collective over `tp` or `cp` is waited for.

    Over tp attention or MLP, whichever takes longer. Over cp what follows attention, but forward under ulysses, which
    sends its results on, attention itself.
    """
    if run.mesh.shape.get(CONTEXT, 1) > 1:
        by_heads = run.model.compute.cp_method == "ulysses"
        return blocks.of_attention if by_heads else blocks.of_mlp, blocks.mlp_again
    if tensor_parallel(run.mesh) > 1:
        attention = blocks.forward - blocks.of_mlp
        again = blocks.again - blocks.mlp_again
        return max(attention, blocks.of_mlp), max(again, blocks.mlp_again)
    return blocks.forward, blocks.again


def phases(
    work: Work, offloaded: Collection[str], resident: float = 0.0, *, overlap_update: bool = False
) -> dict[str, float]:
    """Estimated seconds of each phase of a step.

    offloaded: those of OFFLOADS that are in host memory. resident: the fraction of layers whose weights are in
    device memory all the same. overlap_update: the update's phase has the first group's forward pass in it.
    """
    stored = {ROWS.get(name, name): float(work.sizes[name]) for name in offloaded}
    stored["weights"] = stored.get("weights", 0.0) * (1 - resident)
    # Of a group of microbatches. A stage has residuals of its microbatches only, however many rounds it waits for.
    stored["residuals"] = stored.get("residuals", 0.0) * work.microbatches / work.fetches
    all_weights = max(work.sizes["weights"], 1)
    updated = work.sizes["updated weights"] / all_weights
    # Loops over parts of the layers, each with the fraction of streamed weights that it has.
    parts = [(resident, 0.0), (1 - resident, 1.0)] if stored["weights"] else [(1.0, 0.0)]
    sent = work.collectives
    per_fetch = work.rounds // work.fetches
    by_kernel = work.rounds > work.microbatches  # stages
    forward, backward, with_the_last = _chains(work, per_fetch, from_host=stored["weights"] / all_weights)
    reduced = work.microbatches * sent.reduced + sent.reduced_once
    # By pass: seconds of the chain of works and of collectives, each time and once a step.
    computed = {
        "forward": (forward, sent.gathered + per_fetch * sent.forward, 0.0, 0.0),
        "backward": (backward, sent.gathered + per_fetch * (sent.again + sent.backward), with_the_last, reduced),
        "update": (0.0, 0.0, 0.0, 0.0),
    }
    waits = 0.0 if work.recomputed or by_kernel or not stored["residuals"] else per_fetch * work.blocks.first
    seconds = {"forward": 0.0, "head": work.microbatches * (work.head + sent.vocabulary)}
    engine = dataclasses.replace(work.engine, overlap_update=overlap_update)
    for step_pass, times in passes.of_step(engine, work.fetches):
        chain, link, chain_once, link_once = computed[step_pass.name]
        chain, link = times * chain + chain_once, times * link + link_once
        if step_pass.updates:
            loops = len([part for part, _ in parts if part])
            seconds["update"] = _update(work, step_pass, chain, link, stored, updated, loops)
            continue
        read, written = traffic.copied(step_pass, times, stored, updated)
        if by_kernel:
            chain += times * stored["residuals"] / (work.gpu.pcie_bandwidth * work.rates.host)
        weights = times * stored["weights"]
        seconds[step_pass.name] = sum(
            _phase(
                work,
                chain=part * chain,
                link=part * link,
                read=streamed * weights + part * (read - weights),
                written=part * written,
                waits=part * times * waits * (not step_pass.reverse),
            )
            for part, streamed in parts
        )
    return seconds | {"between": sent.once + sent.ticks + sent.gathered / work.layers}


def _chains(work: Work, per_fetch: int, *, from_host: float) -> tuple[float, float, float]:
    """Seconds of works of the layers that wait for each other: (forward and backward of a fetch, more in the last one).

    per_fetch: microbatches of a fetch. from_host: the fraction of weights that are read from host memory before they
    are gathered.
    """
    blocks = work.blocks
    sent = work.collectives
    slowed = work.rates.collective_sms  # of the products behind which a collective runs

    def behind(collectives: float, products: float) -> float:
        """Seconds of collectives and products at the same time."""
        return max(collectives, products + slowed * min(collectives, products))

    fetched = 1.0 if sent.gathered else from_host
    copied = fetched * 2 * work.layer_bytes / (work.gpu.memory_bandwidth * work.rates.memory)
    gathered = sent.gathered
    waits = sent.forward > 0
    hides = work.hides_forward if waits else per_fetch * blocks.forward
    forward = per_fetch * (blocks.forward + sent.forward) - hides + behind(gathered, hides) + copied
    repeated = per_fetch * (blocks.again + blocks.first + sent.again)
    hides = work.hides_again + blocks.first if work.recomputed else 0.0
    waited = sent.backward_tensor * (1 / IN_A_PASS if sent.reduced else 1 - 1 / IN_A_PASS)
    hidden = sent.backward_tensor - waited
    covering = blocks.columns if sent.reduced and hidden else 0.0
    of_one = sent.backward - (sent.backward_tensor if covering else waited) + sent.reduced
    products = blocks.backward - blocks.first - covering

    def gradients(more: float) -> float:
        """Seconds of the gradients of a microbatch, with more collectives behind them."""
        return behind(of_one + more, products) + covering * (1 + slowed) + waited + sent.smallest * sent.reduced

    backward = repeated - hides + behind(gathered, hides) + per_fetch * gradients(0.0)
    if from_host:
        backward = max(backward, repeated + (per_fetch - 1) * gradients(0.0) + gradients(gathered))
    with_the_last = sent.reduced_once
    if work.recomputed:
        with_the_last = gradients(sent.reduced_once) - gradients(0.0) + sent.smallest * sent.reduced_once
    return forward, backward + copied, with_the_last


def _update(
    work: Work, step_pass: Pass, chain: float, link: float, stored: Mapping[str, float], updated: float, loops: int
) -> float:
    """Seconds of a pass that updates layers, with the `chain` and `link` seconds of what else is in it.

    stored, updated: see `traffic.copied`. loops: over parts of the layers. Each begins with reads and ends with writes
    that nothing runs beside: master weights and moments of a layer are read twice and written once, or under a forward
    pass two layers are read and two are written.
    """
    bandwidth = work.gpu.memory_bandwidth * work.rates.memory
    gathered = work.collectives.updated
    copied = 2 * work.layer_bytes / bandwidth * (gathered > 0)
    chain += work.update_bytes / bandwidth + copied + gathered
    read, written = traffic.copied(step_pass, 1, stored, updated)
    in_loops = _phase(work, chain=chain, link=gathered + link, read=read, written=written)
    host_rate = work.gpu.pcie_bandwidth * work.rates.host
    if step_pass.name == "forward":
        part = min(1.0, 2 / work.layers)
        return (1 - part) * in_loops + part * (read + written - stored["residuals"]) / host_rate
    again = stored.get("master", 0.0) + stored.get("moments", 0.0)
    return in_loops + loops * (again + read + written) / work.layers / host_rate


def _phase(work: Work, *, chain: float, link: float, read: float, written: float, waits: float = 0.0) -> float:
    """Seconds of a phase with a chain of works while collectives take `link` seconds and these bytes cross the host
    link. waits: seconds of the chain beside which nothing is left to be written.
    """
    rates = work.rates
    gpu = work.gpu
    host_rate = gpu.pcie_bandwidth * rates.host
    one_way = abs(read - written) / host_rate
    both_ways = min(read, written) / (host_rate * rates.duplex)
    host = one_way + both_ways
    staged = link * min(2 * gpu.link_bandwidth * rates.link, work.host_memory) if gpu.staged else 0.0
    in_host_memory = (read + written + staged) / work.host_memory
    return max(chain, host + waits + (link if gpu.shares_pcie else 0.0), in_host_memory)


def bounds(
    gpu: Gpu,
    *,
    flops: dict[str, float],
    device_bytes: int,
    link_bytes: int,
    h2d: int,
    d2h: int,
    link_seconds: float | None = None,
) -> dict[str, float]:
    """Least seconds that each resource is busy in a step. flops: by dtype, from `step_flops`.

    Each resource alone, at its peak rate. link_seconds: those of the collectives, each at the bandwidth of its link;
    None: all are within a machine.

    If GPUs communicate over PCI Express, collectives and host copies share it. Then each direction carries the bytes of
    both that a GPU sends, or receives.
    """
    return {
        "compute": products.compute_time(gpu, flops),
        "device memory": device_bytes / gpu.memory_bandwidth,
        "link": link_bytes / gpu.link_bandwidth if link_seconds is None else link_seconds,
        "pcie": (max(h2d, d2h) + (link_bytes if gpu.shares_pcie else 0)) / gpu.pcie_bandwidth,
    }
