"""Estimates from shapes how long the collectives of a step take, part by part.

A part takes its textbook bytes (textbook.py) at what programs reach of the slowest link that they cross, and for each
of its collectives, one after another, the hops in which no byte has arrived (links.py). XLA joins the gathers of a
layer into one; each matrix has a reduction of its own, and is gathered on its own after an update.
"""

import dataclasses
from collections.abc import Callable, Mapping

from surojax.assembly import Assembly
from surojax.placement.mesh import CONTEXT, REPLICATE, TENSOR
from surojax.placement.param import OUTER, Kind
from surojax.planner import links, shares, textbook
from surojax.planner.gpus import Gpu, known_rates
from surojax.planner.stages import layer_passes
from surojax.planner.traffic import Batch, attention_again, groups_of

IN_A_SLICE = ("all-gather", "all-reduce", "all-reduce", "reduce-scatter")  # of the head: tokens, loss, gradient
IN_A_PASS = 4  # over tp: attention and MLP each gather their inputs and scatter their results
OF_EMBEDDING = ("all-gather", "reduce-scatter", "all-gather")  # ids, rows, gradients of rows


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """Seconds of collectives on one GPU, of all layers of a full stage where layers send something.

    gathered: of weights, once for a forward pass. reduced: of a microbatch's gradients. reduced_once: of accumulators
    and over replicas, once a step. smallest: the part of reductions that is of the smallest matrix of each layer.
    updated: gathers of updated weights. forward, again, backward: of a microbatch over tp and cp, in the passes of
    textbook.Passes; backward_tensor: of that, over tp. vocabulary: of a microbatch's tokens. ticks: between stages in a
    step. once: of outer layers and whole matrices, once a step.
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


def of_step(run: Assembly, batch: Batch, gpu: Gpu) -> CollectiveTime:
    """The `CollectiveTime` of a step of a run."""
    k = batch.microbatches
    passes = layer_passes(run, k)
    table = run.engine.table
    over_shards = textbook.axes_of_shards(run)
    matrices, smallest = _matrices(run)

    def seconds(sent: Mapping[tuple[str, str], float]) -> float:
        """Seconds of bytes, without latency."""
        return sum(size / links.rate(gpu, run.mesh.shape, *key) for key, size in sent.items() if size)

    def latency(op: str, axes: str) -> float:
        """Seconds before the last byte of a collective can arrive, however few there are."""
        return links.hops(gpu, run.mesh.shape, op, axes) * known_rates(gpu).hop

    weights = seconds(textbook.weights(run, batch))
    gathered = updated = 0.0
    if table.weights.sharded:
        in_pass = textbook.layers_gathered(run)
        of_group = 2 * in_pass
        gathered = in_pass * (weights / (of_group * groups_of(run, batch)) + latency("all-gather", over_shards))
    else:
        updated = weights + matrices * latency("all-gather", over_shards)
    gradients = textbook.gradients(run, batch)
    once_for = passes if table.grads.sharded else 1
    of_one = latency("reduce-scatter", over_shards)
    reduced = seconds(gradients) / once_for + matrices * of_one
    names = shares.segment_names(run)
    of_replicas = matrices * latency("all-reduce", REPLICATE) if run.mesh.shape[REPLICATE] > 1 else 0.0
    of_replicas += seconds(textbook.replicas(run, *names))
    of_tensor, of_context = (
        [seconds(sent) / passes + late for sent, late in zip(of_passes, latencies, strict=True)]
        for of_passes, latencies in zip(
            (textbook.tensor(run, batch), textbook.context(run, batch)), _latencies(run, latency), strict=True
        )
    )
    forward, again, backward = (a + b for a, b in zip(of_tensor, of_context, strict=True))
    outer = (textbook.outer(run), textbook.replicas(run, OUTER), textbook.whole_matrices(run))
    return CollectiveTime(
        gathered=gathered,
        reduced=reduced if table.grads.sharded else 0.0,
        reduced_once=of_replicas + (0.0 if table.grads.sharded else reduced),
        smallest=smallest,
        updated=updated,
        forward=forward,
        again=again,
        backward=backward,
        backward_tensor=of_tensor[2],
        vocabulary=seconds(textbook.vocabulary(run, batch)) / k + _of_slices(run, latency),
        ticks=seconds(textbook.stage_bytes(run, batch)),
        once=sum(map(seconds, outer)),
    )


def _matrices(run: Assembly) -> tuple[int, float]:
    """(trained matrices of a stage, the part of their elements that the smallest one of each layer has)."""
    number = elements = smallest = 0
    for segment in run.model.segments:
        layers = shares.layers_of(run, segment)
        trained = [(p, master) for p, master, _ in shares.trained(run, segment.name) if p.kind is not Kind.VECTOR]
        sizes = [shares.elements(run, p, master) for p, master in trained]
        number += layers * len(sizes)
        elements += layers * sum(sizes)
        smallest += layers * min(sizes, default=0)
    return number, smallest / max(elements, 1)


def _latencies(run: Assembly, latency: Callable[[str, str], float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of a microbatch before first bytes arrive over tp, and over cp: of each (forward, again, backward).

    latency: of a collective over axes. A block gathers and scatters attention and MLP over tp. Over cp ulysses sends
    what attention gets, and its results; others pass keys and values on, and bring their gradients home.
    """
    shape = run.mesh.shape
    over_tensor = "+".join(axis for axis in TENSOR if axis in shape)
    of_tensor = latency("all-gather", over_tensor) if over_tensor else 0.0
    method = run.model.compute.cp_method
    of_context = latency("all-to-all", CONTEXT) if shape.get(CONTEXT, 1) > 1 else 0.0  # n - 1 hops of a ring, too
    times = 2 if method == "ulysses" else 1
    repeats = attention_again(run) or method != "ulysses"
    layers = shares.layers_of(run, *run.model.segments)
    tensor_again = sum(
        shares.layers_of(run, segment) * sum(textbook.tensor_again(run, segment)) for segment in run.model.segments
    )
    of_layer = times * of_context
    context_again = repeats * layers
    return (
        (layers * IN_A_PASS * of_tensor, tensor_again * of_tensor, layers * IN_A_PASS * of_tensor),
        (layers * of_layer, context_again * of_layer, layers * of_layer),
    )


def _of_slices(run: Assembly, latency: Callable[[str, str], float]) -> float:
    """Seconds of a microbatch before first bytes arrive for embedding, head and loss, slice by slice."""
    axes = "+".join(axis for axis in run.mesh.shape if axis in run.engine.vocabulary_axes)
    if not axes:
        return 0.0
    of_slice, of_embedding = (sum(latency(op, axes) for op in ops) for ops in (IN_A_SLICE, OF_EMBEDDING))
    return run.engine.lmhead_chunks * of_slice + of_embedding
