"""Estimates the time of a step from shapes: a walk of its passes, whose lanes take turns at a GPU's resources.

This ranks settings before anything is compiled (search.py). timeline.py predicts the time of a compiled step.

A pass (step/passes.py) takes as long as its busiest resource, or as its longest chain of works that wait for each
other:

* The host link copies the bytes of its lanes (`traffic.copied_bytes`). Directions slow each other by `Rates.duplex`.
  In a pass that updates layers, nothing hides the first and the last layer of each lane.
* The disks of a machine read and write what its lanes have in files, one direction at a time, beside all else but the
  first layer that a pass reads and the last one that it writes (file_time.py). The state of embedding and head there
  is updated before the layers, while nothing else happens.
* The link between GPUs has the collectives of its lanes and of its blocks (step_collectives.py). GPUs without a link
  of their own share PCI Express between them and host copies, and all share host memory (timeline.py).
* The chain has products and passes over activations (products.py), copies of what was fetched into the loop's carry,
  and the collectives that nothing hides. XLA runs one collective at a time, so these rules follow. Products wait for
  collectives over `tp` and `cp`. The gather of the next layer hides behind the forward pass, or if there are such
  collectives behind the part between two of them; in the backward pass behind the repetition of the forward pass,
  because the reduction of the first gradient waits for the gather. Reductions hide behind the products of gradients,
  but for the last one of a layer, which is of its smallest matrix. The sum over replicas, and that of gradients which
  are not sharded, comes last.

Stages of `pp` go from tick to tick together: for k microbatches and p stages each of them takes the time of k + p - 1,
and fetches its layers as often. Their residuals in host memory are in the chain, see `_by_kernels`.

A setting that stores something elsewhere changes only the bytes of transfers. So `StepWork` holds what does not depend
on where tensors are stored, and `phases` adds the transfers for a choice of memories. `surojax.fit` prints estimated
beside predicted time for each step that it compiles. Of 38 compiled steps (docs/performance.md and scaling.json) the
estimates are 3.8 % off on average, 13.5 % at worst.
"""

import collections
import dataclasses
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from surojax.assembly.assemble import Assembly
from surojax.offloads import BY_LAYER, TO_DEVICE
from surojax.placement.mesh import devices_per_sequence, pipeline_stages
from surojax.placement.param import Kind
from surojax.placement.table import kept_in_memory
from surojax.planner import layer_sizes, links, products, step_collectives, traffic
from surojax.planner.disks import ASSUMED_DISKS, Disks
from surojax.planner.file_time import UPDATE
from surojax.planner.footprint import Rows
from surojax.planner.gpus import Gpu, Rates
from surojax.planner.products import Seconds
from surojax.planner.step_collectives import LaneStage
from surojax.planner.traffic import BatchShape
from surojax.step import passes
from surojax.step.passes import Pass
from surojax.step.spec import Engine
from surojax.step.stream import hides_transfers

BETWEEN = 0.4  # of a layer's products, those between two of its collectives that a gather hides behind


class StorageTiers(NamedTuple):
    """Places of tensors: rows of the placement table in host memory, or in files; other rows are on the device.

    files: those of the rows that are in files, but for in_memory bytes of them (`Placement.files_in_memory`, of each
    GPU). resident: layers of a stage whose weights are on the device all the same. overlaps: `Engine.overlap_update`.
    on_device: bytes of each of `TO_DEVICE` that are on each device, though offloaded (`Placement.device_memory`).
    """

    offloaded: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    resident: int = 0
    overlaps: bool = False
    in_memory: float = 0.0
    on_device: tuple[float, ...] = ()


ON_DEVICE = StorageTiers()


@dataclasses.dataclass(frozen=True)
class StepWork:
    """A step on one GPU, wherever its tensors are stored. Seconds of a microbatch, bytes of a step or a microbatch."""

    engine: Engine
    gpu: Gpu
    host_memory: float  # B/s of host memory that programs reach for this GPU
    microbatches: int
    rounds: int  # times that a stage's layers take the time of a microbatch, in each direction
    layers: int  # of a stage
    segments: int  # an update is a loop over layers for each of them
    blocks: Seconds  # that they compute
    sent: Mapping[str | LaneStage, float]  # seconds of collectives, by `StepCollective.part`
    smallest: float  # the part of a layer's reductions that is of its smallest matrix
    head: float
    update_bytes: float  # in device memory
    layer_bytes: int  # the weights of all blocks, in the format in which they are fetched
    fetched_again: int  # the weights that a pass fetches once more where its loops begin
    sizes: Mapping[str, float]  # of rows of the placement table, in whichever memory, without outer layers' gradients
    tables: Mapping[str, float]  # what embedding and head have of these
    slots: int  # microbatches whose residuals a stage has room for; 1: those of a group
    in_order: bool  # an update beside a forward pass writes a layer's state before it reads the next one
    updated: float  # the part of the weights that an update writes
    as_master: float  # the part of the weights that has the dtype of master weights: not written if both are in files
    disks: Disks  # what this GPU has of its machine's

    @property
    def rates(self) -> Rates:
        """The rates of the GPU's peaks that programs reach."""
        return self.gpu.rates

    @property
    def has_stages(self) -> bool:
        """True if layers are divided into stages of `pp`, which take turns at microbatches."""
        return self.rounds > self.microbatches

    @property
    def fetches(self) -> int:
        """Times that each layer's weights and accumulators are fetched in each direction."""
        return self.rounds // self.engine.microbatches_per_fetch

    def by_layer(self) -> "StepWork":
        """The step by programs of one layer each, which fetch it for all microbatches (`Placement.by_layer`)."""
        times = self.microbatches // self.engine.microbatches_per_fetch
        engine = dataclasses.replace(self.engine, microbatches_per_fetch=self.microbatches)
        larger = {**self.sizes, "residuals": times * self.sizes["residuals"]}
        return dataclasses.replace(self, engine=engine, sizes=larger, fetched_again=0)


def step_work(run: Assembly, batch: BatchShape, gpu: Gpu, rows: Rows, disks: Disks = ASSUMED_DISKS) -> StepWork:
    """The `StepWork` of a step. rows: `footprint.by_class` of the run. disks: of a machine."""
    rates = gpu.rates
    stored = {name: float(sum(of.values())) for name, of in rows.items()}
    stored["weights"] += stored.pop("quants", 0.0) + traffic.read_from_master(run)
    stored["grads"] -= layer_sizes.outer_gradients(run)
    blocks = products.of_blocks(run, batch, gpu)
    accumulated = 2 * stored["grads"] / (gpu.memory_bandwidth * rates.memory)  # read and written
    updated = traffic.updated_part(run)
    stages = pipeline_stages(run.mesh)
    return StepWork(
        engine=run.engine,
        gpu=gpu,
        host_memory=gpu.host_memory(run.mesh.size) * rates.dram,
        microbatches=batch.microbatches,
        rounds=batch.microbatches + stages - 1,
        layers=layer_sizes.layers_of(run),
        segments=len(run.model.segments),
        blocks=blocks._replace(backward=blocks.backward + accumulated),
        sent=collective_seconds(run, batch, gpu),
        smallest=_smallest(run),
        head=products.of_head(run, batch, gpu),
        update_bytes=2 * (stored["master"] + stored["moments"]) + stored["grads"] + updated * stored["weights"],
        layer_bytes=sum(layer_sizes.layers_of(run, s) * layer_sizes.fetched_bytes(run, s) for s in run.model.segments),
        fetched_again=layer_sizes.fetched_again(run),
        sizes=stored,
        tables={row: float(layer_sizes.outer_state(run, row)) for row in ("master", "moments")},
        slots=layer_sizes.slots(run, batch.microbatches) if stages > 1 else 1,
        in_order=hides_transfers(run.engine.microbatches_per_fetch * batch.tokens // devices_per_sequence(run.mesh)),
        updated=updated,
        as_master=traffic.updated_part(run, run.engine.table.master.dtype),
        disks=disks.times(1 / gpu.in_a_machine(run.mesh.size)),
    )


def collective_seconds(run: Assembly, batch: BatchShape, gpu: Gpu) -> Mapping[str | LaneStage, float]:
    """Seconds of collectives by `StepCollective.part`, each time; of "ticks" and "once" in a step.

    Their bytes at the rate of the slowest link, and hops in which none arrives.
    """
    shape, hop = run.mesh.shape, gpu.rates.hop
    seconds = collections.defaultdict[str | LaneStage, float](float)
    for x in step_collectives.transfers(run, batch):
        late = x.number * links.hops(gpu, shape, x.op, x.axes) * hop if x.number else 0.0
        time = late + (x.size / links.rate(gpu, shape, x.op, x.axes) if x.size else 0.0)
        seconds[x.part] += time * (x.times if x.part in ("ticks", "once") else 1)
    return seconds


def _smallest(run: Assembly) -> float:
    """The part of the elements of a stage's trained matrices that the smallest matrix of each layer has."""
    matrices = [
        [t.size for t in layer_sizes.blocks(run, segment, trained=True) if t.param.kind is not Kind.VECTOR]
        for segment in run.model.segments
    ]
    return sum(min(of_segment, default=0) for of_segment in matrices) / max(sum(map(sum, matrices)), 1)


def phases(work: StepWork, stored: StorageTiers = ON_DEVICE) -> dict[str, float]:
    """Estimated seconds of each phase of a step.

    With `StorageTiers.overlaps` the update's phase has the first group's forward pass in it.
    """
    by_layer = not set(stored.files).isdisjoint(BY_LAYER)
    if by_layer:
        work = work.by_layer()
    moved = {row: float(work.sizes[row]) for row in stored.offloaded}
    resident = stored.resident / work.layers
    if "weights" in moved:
        moved["weights"] *= 1 - resident
    if "residuals" in moved:  # a stage has those of its microbatches only, however many rounds it waits for
        moved["residuals"] *= work.microbatches / (work.slots * work.rounds)
    for row, size in zip(TO_DEVICE, stored.on_device, strict=False):
        if row in moved:
            moved[row] -= min(moved[row], size)
    sent = work.sent
    as_master = work.as_master if {"weights", "master"} <= {*stored.files} and not resident else 0.0
    sizes = {row: round(moved[row] * (1 - as_master * (row == "weights"))) for row in stored.files}
    kept = kept_in_memory(stored.in_memory, sizes)
    in_files = {row: float(size - kept[row]) for row, size in sizes.items()}
    if as_master:
        in_files["weights"] += as_master * moved["weights"] * in_files["master"] / sizes["master"]
    of_tables = {row: min(size, work.tables.get(row, 0.0)) for row, size in in_files.items()}  # kept after the layers
    in_files = {row: size - of_tables[row] for row, size in in_files.items()}
    seconds = {"forward": 0.0, "head": work.microbatches * (work.head + sent["vocabulary"])}
    engine = dataclasses.replace(work.engine, overlap_update=stored.overlaps)
    for step_pass, times in passes.passes_of_step(engine, work.fetches):
        name = "update" if step_pass.updates else step_pass.name
        of_weights = resident if moved.get("weights") else 0.0
        apart = by_layer or bool(stored.files and step_pass.updates)
        on_link = _seconds(work, step_pass, times, moved, of_weights, stored.files if apart else None)
        on_disk, ends = _disk_seconds(work, step_pass, times, in_files, work.updated - as_master)
        seconds[name] = max(on_link, on_disk) + ends
        if step_pass.updates:  # before the pass, where nothing hides them
            seconds[name] += work.disks.seconds(sum(of_tables.values()), sum(of_tables.values()))
    return seconds | {"between": sent["once"] + sent["ticks"]}


def _disk_seconds(
    work: StepWork, step_pass: Pass, times: int, in_files: Mapping[str, float], updated: float
) -> tuple[float, float]:
    """Returns (seconds that disks are busy in a pass that runs so many times, seconds that no other work hides).

    in_files: bytes by row. updated: the part of the weights that is written. The first layer of the update is read
    while gradients are computed.
    """
    read, written = traffic.copied_bytes(step_pass, times, in_files, updated)
    first = 0.0 if step_pass.name == UPDATE else read
    return work.disks.seconds(read, written), work.disks.seconds(first, written) / work.layers


def _seconds(
    work: StepWork,
    step_pass: Pass,
    times: int,
    stored: Mapping[str, float],
    resident: float,
    files: Collection[str] | None,
) -> float:
    """Seconds of a pass that runs so many times. stored: bytes of rows in host memory. resident: part of the layers.

    files: the rows in files of a pass that has programs of one layer each, which copy what they read and write before
    and after they compute, but for weights in files, which the host puts on the device; None: the pass is a loop.

    Nothing hides layers that are fetched where loops begin, nor, beside a forward pass, the update of the outer layers.
    Layers whose weights are resident and those whose weights are streamed are loops of their own.
    """
    host_rate = work.gpu.pcie_bandwidth * work.rates.host
    weights = times * stored.get("weights", 0.0) * step_pass.lane("weights").reads
    chain, link = _works(work, step_pass, times, streams="weights" in stored)
    chain += _by_kernels(work, step_pass, times, stored)
    chain += times * work.fetched_again / host_rate if weights else 0.0
    outer, in_order = 0.0, False
    if step_pass.updates and step_pass.name != UPDATE and files is None:
        tables = {row: min(size, stored.get(row, 0.0)) for row, size in work.tables.items()}
        stored = {row: size - tables.get(row, 0.0) for row, size in stored.items()}
        outer = _busiest(work, 0.0, 0.0, sum(tables.values()), sum(tables.values()))
        in_order = work.in_order
    read, written = traffic.copied_bytes(step_pass, times, stored, work.updated)
    if files is not None:
        put = weights if "weights" in files else 0.0
        return _busiest(work, chain + (read - put + written) / host_rate, link, put, 0.0)
    loops = [(part, streamed) for part, streamed in ((resident, 0.0), (1 - resident, 1.0)) if part]
    ends = step_pass.updates * work.segments * len(loops) * (read + written) / work.layers
    return (
        outer
        + ends / host_rate
        + sum(
            _busiest(
                work,
                part * chain,
                part * link,
                streamed * weights + part * (read - weights),
                part * written,
                in_order=in_order,
            )
            for part, streamed in loops
        )
    )


def _by_kernels(work: StepWork, step_pass: Pass, times: int, stored: Mapping[str, float]) -> float:
    """Seconds of the host copies of a pass that kernels do, while products wait.

    In stages those are the residuals', whose place depends on the microbatch and on the layer: copy engines follow one
    loop's counter (docs/performance.md). All stages wait for them in each tick.
    """
    if not work.has_stages:
        return 0.0
    moved = sum(traffic.copied_bytes(step_pass, times, {"residuals": stored.get("residuals", 0.0)}))
    return moved * work.rounds / work.microbatches / (work.gpu.pcie_bandwidth * work.rates.host)


def _works(work: StepWork, step_pass: Pass, times: int, *, streams: bool) -> tuple[float, float]:
    """(seconds of a pass's works that wait for each other, seconds of its collectives).

    streams: weights come from host memory.
    """
    blocks, sent = work.blocks, work.sent
    slowed = work.rates.collective_sms  # of the products behind which a collective runs
    bandwidth = work.gpu.memory_bandwidth * work.rates.memory

    def behind(collectives: float, products: float) -> float:
        """Seconds of collectives and products at the same time."""
        return max(collectives, products + slowed * min(collectives, products))

    def of_lanes(when: Literal["arriving", "leaving", "last"]) -> float:
        """Seconds of the collectives that the pass's lanes declare, each time."""
        stages = [LaneStage(lane.row, x, when) for lane in step_pass.lanes for x in getattr(lane, when)]
        return sum(sent[x] for x in stages)

    group = work.engine.microbatches_per_fetch
    arriving, leaving, last = of_lanes("arriving"), of_lanes("leaving"), of_lanes("last")
    carried = 2 * work.layer_bytes / bandwidth
    copied = carried * (streams or arriving > 0)
    chain = link = 0.0
    if step_pass.updates:
        chain = work.update_bytes / bandwidth + leaving + carried * (leaving > 0)
        link = leaving
    if step_pass.name == "update":
        chain += arriving
        link += arriving
    if step_pass.name == "forward":
        hides = BETWEEN * blocks.forward if sent["forward"] else group * blocks.forward
        chain += times * (group * (blocks.forward + sent["forward"]) - hides + behind(arriving, hides) + copied)
        link += times * (arriving + group * sent["forward"])
    if step_pass.name == "backward":
        again = blocks.again * (BETWEEN if sent["again"] else 1)
        hides = again + blocks.first if work.engine.recompute_block else 0.0
        waited = sent["again"] + sent["backward"]
        repeated = group * (blocks.again + blocks.first + waited) - hides + behind(arriving, hides)
        gradients = group * (behind(leaving, blocks.backward - blocks.first) + work.smallest * leaving)
        chain += times * (repeated + gradients + copied) + last
        link += times * (arriving + group * (waited + leaving)) + last
    return chain, link


def _busiest(
    work: StepWork, chain: float, link: float, read: float, written: float, *, in_order: bool = False
) -> float:
    """Seconds of a chain of works while collectives take `link` seconds and these bytes cross the host link.

    in_order: one direction after the other.
    """
    gpu, rates = work.gpu, work.rates
    host_rate = gpu.pcie_bandwidth * rates.host
    host = abs(read - written) / host_rate + min(read, written) / (host_rate * rates.duplex)
    if in_order:
        host = (read + written) / host_rate
    staged = link * min(2 * gpu.link_bandwidth * rates.link, work.host_memory) if gpu.staged else 0.0
    in_host_memory = (read + written + staged) / work.host_memory
    return max(chain, host + (link if gpu.shares_pcie else 0.0), in_host_memory)
