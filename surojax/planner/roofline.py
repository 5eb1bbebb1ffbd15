"""Estimates the time of a step from shapes, phase by phase: each phase takes as long as its busiest resource, or its
longest chain of works that wait for each other.

This ranks settings before anything is compiled (search.py). timeline.py predicts the time of a compiled step.

The phases of a step, with what happens at the same time in each:

* forward, for every microbatch and layer: products, attention and passes over activations; residuals are written to
  host memory. For every fetch, which serves `microbatches_per_fetch` of them: weights are all-gathered and read from
  host memory.
* backward, for every microbatch and layer: the forward pass again if the block is recomputed, then products for two
  gradients; gradients are reduced; residuals are read. For every fetch: weights once more; accumulators are written to
  host memory, and read but for the first time.
* head, for every microbatch: three products for each slice of tokens, passes over logits, and the collectives of the
  vocabulary, which the products wait for.
* update, once a step: master weights, moments and gradients are read, master weights, moments and weights are written;
  then updated weights are gathered. A layer is written two layers after it was read, so at its begin and end only one
  direction of the host link is busy (`_update`).
* between: what happens once a step and overlaps with nothing: collectives of outer layers, the gather of the first
  layer, and what moves between stages.

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

compute.py has the seconds of products and passes, collective_time.py those of collectives. Host transfers take their
bytes at what `Rates` reaches of a link. Directions of the host link slow each other by `Rates.duplex`; GPUs without a
link of their own share PCI Express between collectives and host copies. All of them share host memory (timeline.py).

A setting that stores something elsewhere changes only the bytes of transfers. So `Work` holds what does not depend on
where tensors are stored, and `phases` adds the transfers for a choice of memories. `surojax.fit` prints estimated
beside predicted time for each step that it compiles.
"""

import dataclasses
import math
from collections.abc import Collection

import jax
import jax.numpy as jnp

from surojax.assembly import Assembly
from surojax.placement.home import DEVICE, HOST, NVME
from surojax.placement.mesh import CONTEXT, pipeline_stages, tensor_parallel
from surojax.placement.param import OUTER, part_of
from surojax.planner import collective_time, compute, shares, traffic
from surojax.planner.choices import OFFLOADS
from surojax.planner.collective_time import IN_A_PASS, CollectiveTime
from surojax.planner.compute import Seconds
from surojax.planner.gpus import Gpu, Rates, known_rates
from surojax.planner.stages import slots
from surojax.step.state_plan import bytes_per_device


@dataclasses.dataclass(frozen=True)
class Work:
    """A step on one GPU, wherever its tensors are stored. Seconds of a microbatch, bytes of a step or a microbatch."""

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
        in_flight = slots(run, microbatches)
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
    rates = known_rates(gpu)
    k = batch.microbatches
    grads = sizes["grads"] / (gpu.memory_bandwidth * rates.memory)
    blocks = compute.of_blocks(run, batch, gpu)
    blocks = blocks._replace(backward=blocks.backward + 2 * grads)  # accumulators are read and written
    stages = pipeline_stages(run.mesh)
    hides_forward, hides_again = _hiding(run, blocks)
    return Work(
        gpu=gpu,
        rates=rates,
        host_memory=gpu.host_memory(run.mesh.size) * rates.dram,
        microbatches=k,
        rounds=k + stages - 1,
        fetches=k + stages - 1 if stages > 1 else k // run.engine.microbatches_per_fetch,
        layers=shares.layers_of(run, *run.model.segments),
        blocks=blocks,
        collectives=collective_time.of_step(run, batch, gpu),
        hides_forward=hides_forward,
        hides_again=hides_again,
        recomputed=run.engine.recompute_block,
        head=compute.of_head(run, batch, gpu),
        update_bytes=2 * (sizes["master"] + sizes["optimizer"]) + sizes["grads"] + sizes["updated weights"],
        layer_bytes=_work_bytes(run),
        sizes=sizes,
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


def _work_bytes(run: Assembly) -> int:
    """Bytes of a stage's weights as its GPUs compute with them."""
    itemsize = jnp.dtype(run.engine.table.weights.dtype).itemsize
    return sum(
        itemsize * shares.layers_of(run, segment) * shares.elements(run, p, layout)
        for segment in run.model.segments
        for p, layout in shares.with_layouts(run, segment.name, run.engine.layouts.weights)
    )


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
    sent = work.collectives
    per_fetch = rounds // work.fetches
    by_kernel = rounds > k  # stages
    residuals = by_kernel * k * host["residual"] / (work.gpu.pcie_bandwidth * work.rates.host)
    waits = 0.0 if work.recomputed or by_kernel or not host["residual"] else rounds * work.blocks.first
    under_update = overlap_update / work.fetches  # fraction of the forward passes
    apart = 1 - under_update
    one_forward, one_backward, with_the_last = _chains(
        work, per_fetch, from_host=weights / max(work.sizes["weights"], 1)
    )
    in_loops = [(resident, 0.0), (1 - resident, weights)] if host["weights"] else [(1.0, 0.0)]  # parts of the layers
    forward = sum(
        _phase(
            work,
            chain=part * (apart * work.fetches * one_forward + residuals),
            link=part * apart * (work.fetches * sent.gathered + rounds * sent.forward),
            read=apart * work.fetches * streamed,
            written=part * apart * k * host["residual"],
            waits=part * apart * waits,
        )
        for part, streamed in in_loops
    )
    reduced = k * sent.reduced + sent.reduced_once
    link = work.fetches * sent.gathered + rounds * (sent.again + sent.backward) + reduced
    backward = sum(
        _phase(
            work,
            chain=part * (work.fetches * one_backward + with_the_last + residuals),
            link=part * link,
            read=work.fetches * streamed + part * ((work.fetches - 1) * host["grads"] + k * host["residual"]),
            written=part * work.fetches * host["grads"],
        )
        for part, streamed in in_loops
    )
    update = _update(
        work,
        chain=under_update * work.fetches * one_forward,
        link=under_update * (work.fetches * sent.gathered + rounds * sent.forward),
        state=host["master"] + host["optimizer"],
        grads=host["grads"],
        weights=work.sizes["updated weights"] * ("weights" in offloaded) * (1 - resident),
        residuals=under_update * k * host["residual"],
        loops=len([part for part, _ in in_loops if part]),
        overlap_update=overlap_update,
    )
    between = sent.once + sent.ticks + sent.gathered / work.layers
    head = k * (work.head + sent.vocabulary)
    return {"forward": forward, "head": head, "backward": backward, "update": update, "between": between}


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
    work: Work,
    *,
    chain: float,
    link: float,
    state: float,
    grads: float,
    weights: float,
    residuals: float,
    loops: int,
    overlap_update: bool,
) -> float:
    """Seconds of the update, and of the `chain` and `link` seconds of the forward pass beside it.

    state, grads, weights, residuals: bytes that cross the host link: state both ways, gradients to the device, the
    others from it. loops: over parts of the layers. Each begins with reads and ends with writes that nothing runs
    beside: a layer's state is read twice and written once (`host.sweep`), or under a forward pass two layers are read
    and two are written.
    """
    bandwidth = work.gpu.memory_bandwidth * work.rates.memory
    copied = 2 * work.layer_bytes / bandwidth * (work.collectives.updated > 0)
    read = state + grads
    written = state + weights
    in_loops = _phase(
        work,
        chain=work.update_bytes / bandwidth + copied + work.collectives.updated + chain,
        link=work.collectives.updated + link,
        read=read,
        written=written + residuals,
    )
    host_rate = work.gpu.pcie_bandwidth * work.rates.host
    if overlap_update:
        part = min(1.0, 2 / work.layers)
        return (1 - part) * in_loops + part * (read + written) / host_rate
    return in_loops + loops * (state + read + written) / work.layers / host_rate


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
