"""The collectives of a step, and the bytes that each GPU sends in them.

Those of layers' tensors are read from the lanes of the passes (step/passes.py): a pass that runs k times moves each of
its lanes k times. This file adds what is no lane: collectives inside of a block (tensor parallelism, attention over
`cp`, tokens on their way to experts), of embedding and head, between stages, and of optimizers that need whole
matrices.

A GPU of a ring of n sends (n - 1) / n of what is gathered or scattered, and twice that to all-reduce it. So ZeRO
(Rajbhandari et al. 2020, arXiv:1910.02054) on n GPUs with k groups of microbatches and blocks of P bytes sends

| sharded            | forward and backward                   | end of a step                 |
|--------------------|----------------------------------------|-------------------------------|
| master and moments |                                        | reduce-scatter P, all-gather P|
| + gradients        | reduce-scatter P for each microbatch   | all-gather P                  |
| + weights          | also all-gather 2 k P                  |                               |

In 8 bits P has a byte for each number of a matrix, and 4 for the scale of each of its blocks (ZeRO++, Wang et al. 2023,
arXiv:2306.10209; its gradients in one hop). Scalars (loss, label count, norm, largest magnitudes) are left out.
"""

import collections
import math
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import jax

from surojax.assembly.assemble import Assembly
from surojax.models.kinds.experts import choices_of
from surojax.models.model import Segment
from surojax.numerics.quantized import block_size
from surojax.parallel import expert_dispatch
from surojax.parallel.context import pieces_per_device
from surojax.placement.layout import Layout, mesh_axes
from surojax.placement.mesh import (
    CONTEXT,
    EXPERT,
    PIPELINE,
    REPLICATE,
    SAME_KV_HEADS,
    SHARD,
    TENSOR,
    devices_per_sequence,
    pipeline_stages,
    tensor_parallel,
)
from surojax.placement.param import Kind
from surojax.planner import layer_sizes
from surojax.planner.layer_sizes import TensorOnGpu, itemsize
from surojax.planner.traffic import BatchShape
from surojax.step import passes
from surojax.step.passes import LaneAction


class LaneStage(NamedTuple):
    """A stage of a lane: what tensors of a row of the placement table go through, and when (step/passes.py)."""

    row: str
    stage: LaneAction
    when: Literal["arriving", "leaving", "last"]


class StepCollective(NamedTuple):
    """A collective of a step, of all layers of a full stage if it is one of layers.

    part: what sends it: a lane, or "forward", "again", "backward": a microbatch over `tp`, `cp`, `ep`, in the forward
    pass, its repetition, and reverse mode; "vocabulary": a microbatch's embedding, head and loss; "ticks": between
    stages; "once": outer layers and whole matrices.
    op, axes: as `hlo.collectives` names them. size: bytes that each GPU sends each time. times: in a step. number: of
    collectives, one after another, that send them.
    """

    part: str | LaneStage
    op: str
    axes: str
    size: float
    times: float = 1
    number: float = 0


def collective_bytes(run: Assembly, batch: BatchShape) -> dict[tuple[str, str], int]:
    """Bytes that each GPU sends per step, by (collective, axis)."""
    sent = collections.defaultdict[tuple[str, str], float](float)
    for x in transfers(run, batch):
        sent[x.op, x.axes] += x.times * x.size
    return {key: round(size) for key, size in sent.items() if size}


def transfers(run: Assembly, batch: BatchShape) -> Iterator[StepCollective]:
    """All collectives of a step."""
    yield from _of_lanes(run, batch)
    yield from _outer_layers(run)
    yield from _vocabulary(run, batch)
    for segment in run.model.segments:
        if tensor_parallel(run.mesh) > 1:
            yield from _tensor_parallel(run, batch, segment)
        if run.mesh.shape.get(CONTEXT, 1) > 1:
            yield from _context(run, batch, segment)
        if run.mesh.shape.get(EXPERT, 1) > 1 and segment.statistics:
            yield from _tokens_to_experts(run, batch, segment)
    yield from _between_stages(run, batch)
    if run.optimizer.matrices.apply_to_group:
        for t in layer_sizes.blocks(run, trained=True):
            yield from _whole_matrix(run, t) if t.is_matrix else ()


def _of_lanes(run: Assembly, batch: BatchShape) -> Iterator[StepCollective]:
    """All-gathers and reductions of the blocks' tensors, as the lanes of the passes declare them."""
    number = collections.Counter[LaneStage]()  # of times in a step
    for step_pass, times in passes.passes_of_step(run.engine, layer_sizes.groups_of(run, batch.microbatches)):
        for lane in step_pass.lanes:
            for stage in lane.arriving:
                number[LaneStage(lane.row, stage, "arriving")] += times
            for stage in lane.leaving:  # gradients of each microbatch are reduced
                each = run.engine.microbatches_per_fetch if stage is LaneAction.REDUCE else 1
                number[LaneStage(lane.row, stage, "leaving")] += times * each
            for stage in lane.last:
                number[LaneStage(lane.row, stage, "last")] += 1
    trained = layer_sizes.blocks(run, trained=True)
    for part, times in number.items():
        if part.stage is LaneAction.GATHER:
            for x in _gathers(run, part):
                yield x._replace(times=times)
        if part.stage is LaneAction.REDUCE:
            summed = itemsize(run, "grads" if part.when == "last" else "weights")
            for x in _reductions(run, part, trained, summed, each=True):
                yield x._replace(times=times)
        if part.stage is LaneAction.REDUCE_REPLICAS:
            yield from _over_replicas(run, part, trained, _matrices(trained))


def _matrices(tensors: Iterable[TensorOnGpu]) -> int:
    """The number of matrices among these tensors, in all layers; each is gathered and reduced by itself."""
    return sum(t.layers for t in tensors if t.param.kind is not Kind.VECTOR)


def _by_shards(run: Assembly, tensors: Iterable[TensorOnGpu]) -> Iterator[tuple[str, float, list[TensorOnGpu]]]:
    """Groups tensors by the axes that shard their state: (axes, `_ring` of the axes, tensors)."""
    groups = collections.defaultdict[tuple[str, ...], list[TensorOnGpu]](list)
    for t in tensors:
        groups[t.shards].append(t)
    for axes, of_group in groups.items():
        yield _joined(run, axes) or SHARD, _ring(run, axes), of_group


def _gathers(run: Assembly, part: LaneStage) -> Iterator[StepCollective]:
    """The all-gathers of a class of tensors in a pass.

    A layer's weights are gathered together when it is fetched, and with stages those of a layer more.
    """
    layers = layer_sizes.layers_of(run)
    if part.row == "weights" and part.when == "arriving":
        fetched = layers + (pipeline_stages(run.mesh) > 1)
        dtype = "8 bits" if run.engine.table.quantises_shards else ""
        for along, ring, tensors in _by_shards(run, layer_sizes.blocks(run)):
            gathered = [t for t in tensors if t.weights.sharded_dim is not None]
            size = fetched / layers * sum(t.size * _number_bytes(run, t, t.weights, dtype) for t in gathered)
            yield StepCollective(part, "all-gather", along, ring * size, number=fetched)
        return
    of_row = 0 if part.row == "weights" else itemsize(run, part.row)
    for along, ring, tensors in _by_shards(run, layer_sizes.blocks(run, trained=True)):
        sharded = [t for t in tensors if t.state_is_sharded]
        size = sum(t.size * (of_row or _number_bytes(run, t, t.master)) for t in sharded)
        yield StepCollective(part, "all-gather", along, ring * size, number=_matrices(tensors))


def _reductions(
    run: Assembly, part: str | LaneStage, trained: list[TensorOnGpu], number_bytes: int, *, each: bool = False
) -> Iterator[StepCollective]:
    """Reductions of gradients over `dp_shard x cp`: reduce-scatters, and all-reduces if the state is replicated.

    each: one matrix after another.
    """
    table = run.engine.table
    op = "reduce-scatter" if table.reduce == "reduce_scatter" else "all-to-all"
    for along, ring, tensors in _by_shards(run, trained):
        sharded = [t for t in tensors if t.state_is_sharded]
        size = number_bytes * sum(t.size for t in sharded)
        if table.reduce == "int8" and part != "once":
            size = sum(t.size * _number_bytes(run, t, t.master, "8 bits", vectors=4) for t in sharded)
        yield StepCollective(part, op, along, ring * size, number=each * _matrices(tensors))
        replicated = number_bytes * sum(t.size for t in tensors if not t.state_is_sharded)
        yield StepCollective(part, "all-reduce", along, 2 * ring * replicated)


def _over_replicas(
    run: Assembly, part: str | LaneStage, trained: list[TensorOnGpu], matrices: int = 0
) -> Iterator[StepCollective]:
    """All-reduces of gradients over the groups of `dp_replicate`."""
    number = run.mesh.shape[REPLICATE]
    if number > 1:
        size = sum(t.size / (layer_sizes.devices(run, t.shards) if t.state_is_sharded else 1) for t in trained)
        sent = 2 * (number - 1) / number * itemsize(run, "grads") * size
        yield StepCollective(part, "all-reduce", REPLICATE, sent, number=matrices)


def _outer_layers(run: Assembly) -> Iterator[StepCollective]:
    """All-gathers of updated outer weights and reductions of their gradients, if each GPU has whole outer weights."""
    trained = layer_sizes.outer(run, trained=True)
    moved = [t for t in trained if not (t.state_is_sharded and t.weights.stored == t.master.stored)]
    for along, ring, tensors in _by_shards(run, moved):
        gathered = itemsize(run, "weights") * sum(t.size for t in tensors if t.state_is_sharded)
        yield StepCollective("once", "all-gather", along, ring * gathered)
    yield from _reductions(run, "once", moved, itemsize(run, "grads"))
    yield from _over_replicas(run, "once", trained)


def _vocabulary(run: Assembly, batch: BatchShape) -> Iterator[StepCollective]:
    """The collectives of embedding, head and loss for tokens, if rows of the vocabulary are sharded.

    Embedding: gathers ids, scatters rows; its gradient: gathers rows. Head, for each slice of tokens: gathers
    activations and labels, scatters the activations' gradient. Also sums of gradients that devices share.
    """
    k, chunks = batch.microbatches, run.engine.lmhead_chunks
    if axes := run.engine.vocabulary_axes:
        tokens = batch.tokens // (devices_per_sequence(run.mesh) * pipeline_stages(run.mesh))
        others = layer_sizes.devices(run, axes) - 1
        x = others * tokens * run.model.hidden_size * itemsize(run, "weights")
        ids = others * tokens * 4
        sums = 2 * 2 * ids  # largest logit and sum of exponentials, float32
        along = _joined(run, axes)
        yield StepCollective("vocabulary", "all-gather", along, x + ids, k, 2)
        yield StepCollective("vocabulary", "reduce-scatter", along, x, k, 1)
        if run.model.has_logits:  # another head is on every device
            yield StepCollective("vocabulary", "all-gather", along, x + ids, k, chunks)
            yield StepCollective("vocabulary", "reduce-scatter", along, x, k, chunks)
            yield StepCollective("vocabulary", "all-reduce", along, sums, k, 2 * chunks)
    for t in layer_sizes.outer(run, trained=True):
        yield from _shared(run, "vocabulary", t, chunks * itemsize(run, "weights"), k)


def _tensor_parallel(run: Assembly, batch: BatchShape, segment: Segment) -> Iterator[StepCollective]:
    """The collectives of a segment's blocks within a tensor-parallel group.

    A pass over a block gathers the inputs of attention and MLP and scatters their results; reverse mode scatters where
    the block gathers. A recomputed block does it again, except for a result that no gradient needs. With chunks it
    gathers the inputs of attention once more, for the keys and values of all chunks but the last. Recipes fp8_* gather
    in 8 bits, but for the inputs of experts.
    """
    work = itemsize(run, "weights")
    k = batch.microbatches
    n = tensor_parallel(run.mesh)
    x = (n - 1) / n * batch.tokens / run.mesh.shape.get(CONTEXT, 1) * run.model.hidden_size * work
    along = _joined(run, TENSOR)
    layers = layer_sizes.layers_of(run, segment)
    in_recipe = layers * sum(variant.recipe_enabled for variant in segment.variants) / segment.num_layers
    in_fp8 = run.model.precision.fp8 * in_recipe * (0.5 if segment.statistics else 1)
    gathers_again, results_again = tensor_again(run, segment)
    for part, gathers, results in ("forward", 2, 2), ("again", gathers_again, results_again), ("backward", 2, 2):
        in_words = layers - in_fp8 + in_fp8 / work  # of layers, in the work dtype
        yield StepCollective(part, "all-gather", along, in_words * gathers * x, k, layers * gathers)
        yield StepCollective(part, "reduce-scatter", along, layers * results * x, k, layers * results)
    sharers = run.mesh.shape.get(SAME_KV_HEADS, 1)  # of keys and values
    if sharers > 1 and run.model.precision.recipe != "bf16":
        # Of gradients of keys and values before they are rounded; in bf16 those of their matrices alone are summed.
        width = sum(width.part(n).size for width in segment.mixer.widths() if width.shared)
        size = in_recipe * 2 * (sharers - 1) / sharers * 2 * batch.tokens * width * work
        yield StepCollective("backward", "all-reduce", SAME_KV_HEADS, size, k)
    for t in layer_sizes.blocks(run, segment, trained=True):
        yield from _shared(run, "backward", t, layers * work, k)


def tensor_again(run: Assembly, segment: Segment) -> tuple[float, int]:
    """Counts how often the backward pass of a block repeats (the gathers of inputs, the scatters of results)."""
    if run.engine.recompute_block:
        return 2 + _earlier_chunks(run), 1 if segment.last_products else 2
    recompute = run.model.compute.recompute
    return (recompute.norm or recompute.att) + (recompute.norm or recompute.ffn), 0


def _context(run: Assembly, batch: BatchShape, segment: Segment) -> Iterator[StepCollective]:
    """The collectives of a segment's mixers over the devices of `cp`.

    ulysses: queries, keys and values of one pass, and its results; so are their gradients. With chunks, the backward
    pass sends keys and values of all chunks but the last once more. Others: a pass gets keys and values of all others;
    reverse mode gets them again, and XLA joins that with what a recomputed block gets. Gradients of them are float32,
    until ring sends them home in one hop more. Convolutions and recurrences gather a halo and maps of each chunk's
    pieces, and those of all chunks but the last once more.
    """
    n = run.mesh.shape[CONTEXT]
    method = run.model.compute.cp_method
    work = itemsize(run, "weights")
    numbers = segment.mixer.context_numbers(tensor_parallel(run.mesh), n)
    times = batch.microbatches
    layers = layer_sizes.layers_of(run, segment)
    tokens = layers * batch.tokens / n

    def transfer(part: str, op: str, size: float, number: float) -> StepCollective:
        return StepCollective(part, op, CONTEXT, size, times, layers * number)

    if numbers.halo:
        chunks = run.model.compute.sequence_chunks
        others = (n - 1) * layers * chunks * batch.sequences * pieces_per_device(method)
        halo, maps = others * numbers.halo * work, others * numbers.maps * 4
        each = chunks * (1 + (maps > 0))
        again = layer_sizes.attention_again(run) + _earlier_chunks(run)
        yield transfer("forward", "all-gather", halo + maps, each)
        yield transfer("again", "all-gather", again * (halo + maps), again * each)
        yield transfer("backward", "all-gather", maps, chunks * (maps > 0))
        yield transfer("backward", "reduce-scatter", halo, chunks)
        return
    if method == "ulysses":
        again = layer_sizes.attention_again(run)
        sent = (n - 1) / n * tokens * work
        whole = sent * (numbers.exchanged + numbers.keys)
        yield transfer("forward", "all-to-all", whole, 2)
        yield transfer("again", "all-to-all", again * whole + _earlier_chunks(run) * sent * numbers.keys, 2 * again)
        yield transfer("backward", "all-to-all", whole, 2)
        return
    others, home, hops = ("all-gather", "reduce-scatter", 1)
    if method == "ring":
        others, home, hops = "collective-permute", "collective-permute", n - 1
    keys = numbers.pieces * tokens
    yield transfer("forward", others, (n - 1) * keys * work, hops)
    yield transfer("again", others, (n - 1) * keys * work, hops)
    yield transfer("backward", home, keys * ((n - 1) * 4 + (work if method == "ring" else 0)), hops)


def _tokens_to_experts(run: Assembly, batch: BatchShape, segment: Segment) -> Iterator[StepCollective]:
    """Yields what a segment's blocks send over `ep`, if tokens choose experts evenly (parallel/expert_dispatch.py).

    A pass sends tokens and gets sums back; reverse mode sends gradients of the sums and gets those of the tokens; a
    recomputed block sends tokens once more. What the routers chose and its weights are gathered.
    """
    n = run.mesh.shape[EXPERT]
    experts, chosen = choices_of(segment)
    tokens = batch.tokens // run.mesh.shape.get(CONTEXT, 1)
    rounds = expert_dispatch.even_rounds(experts, chosen, n, tokens)
    rows = rounds * expert_dispatch.rows_of_round(tokens)
    x = (n - 1) * rows * run.model.hidden_size * itemsize(run, "weights")
    number = 4 * (n - 1) * tokens * chosen  # an int32 or a float32 of each choice
    times = batch.microbatches
    layers = layer_sizes.layers_of(run, segment)
    again = run.engine.recompute_block
    for part, sent in ("forward", 2), ("again", again), ("backward", 2):
        yield StepCollective(part, "all-to-all", EXPERT, layers * sent * x, times, layers * sent * rounds)
    for part, gathered in ("forward", 2), ("again", 2 * again):
        yield StepCollective(part, "all-gather", EXPERT, layers * gathered * number, times, layers * gathered)
    yield StepCollective("backward", "reduce-scatter", EXPERT, layers * number, times, layers)


def _earlier_chunks(run: Assembly) -> float:
    """The fraction of a sequence before its last chunk, whose keys and values the backward pass computes twice."""
    return 1 - 1 / run.model.compute.sequence_chunks


def _between_stages(run: Assembly, batch: BatchShape) -> Iterator[StepCollective]:
    """The collectives between stages, without the vocabulary's collectives.

    Between ticks activations move forward and their gradients backward, also those of microbatches that have left the
    last stage. Embeddings and gradients of the head are gathered, their reverses scattered.
    """
    stages, k = pipeline_stages(run.mesh), batch.microbatches
    if stages > 1:
        tokens = batch.tokens // devices_per_sequence(run.mesh)
        x = tokens * run.model.channels.all * itemsize(run, "weights")
        yield StepCollective("ticks", "collective-permute", PIPELINE, 2 * x, k + stages - 1)
        for op in ("all-gather", "reduce-scatter"):
            yield StepCollective("ticks", op, PIPELINE, 2 * (stages - 1) / stages * x, k)


def _shared(run: Assembly, part: str, t: TensorOnGpu, number_bytes: float, times: int) -> Iterator[StepCollective]:
    """All-reduces of the gradient of a parameter that several devices of a group share.

    It is in the loops over microbatches and slices of the head. For GPUs, XLA adds up the terms of the final norm on
    each device and sums them over devices once, behind the loops: of Llama-7B with pp_size=4, 0.40 MiB of all-reduces
    over pp are left of 1.88 MiB. On CPUs it does not.
    """
    divided = (*t.master.layers, *t.master.computed_axes)
    axes = tuple(axis for axis in (PIPELINE, *TENSOR) if axis in run.mesh.shape and axis not in divided)
    n = layer_sizes.devices(run, axes)
    if n > 1:
        yield StepCollective(part, "all-reduce", _joined(run, axes), 2 * (n - 1) / n * number_bytes * t.elements, times)


def _whole_matrix(run: Assembly, t: TensorOnGpu) -> Iterator[StepCollective]:
    """The collectives of an optimizer that needs whole matrices (optim/normuon.py), one dimension after another.

    Momentum in the work dtype, to the device that has a layer of a group, and the float32 result back; then the rows'
    second moments. A layer that is updated alone is gathered by every device.
    """
    work = itemsize(run, "weights")
    shape, stored = t.param.shape, t.master.stored
    together = layer_sizes.matrix_layers_together(run, t)
    groups = t.layers // together
    gathered = math.prod(jax.NamedSharding(run.mesh, stored).shard_shape(shape))
    axes_of_dims = [[axis for axis in entry if run.mesh.shape[axis] > 1] for entry in map(mesh_axes, stored)]
    devices = math.prod(run.mesh.shape[axis] for axes in axes_of_dims for axis in axes)
    for axes in axes_of_dims:
        n = layer_sizes.devices(run, axes)
        along = "+".join(axes)  # named by `hlo.collectives` in this order
        if axes and together == 1:
            yield StepCollective("once", "all-gather", along, groups * work * gathered * (n - 1))
        elif axes:
            yield StepCollective("once", "all-to-all", along, groups * (work + 4) * math.prod(shape) * (n - 1) / n)
            yield StepCollective(
                "once", "all-gather", along, groups * 4 * math.prod(shape[:-1]) * devices * (n - 1) / n
            )
        gathered *= n
        devices //= n


def _number_bytes(run: Assembly, t: TensorOnGpu, layout: Layout, dtype: str = "", vectors: int = 0) -> float:
    """Bytes of a number on its way between devices, of matrices in 8 bits with their scales if dtype is "8 bits".

    vectors: bytes of each number of a vector; 0: as of the work weights.
    """
    if t.coded or t.param.dtype:
        return t.coded or t.itemsize
    if not t.is_matrix or not dtype or (t.param.of_experts and run.engine.table.one_scale):
        return vectors or t.itemsize
    row = jax.NamedSharding(run.mesh, layout.stored).shard_shape(t.param.shape)[-1]
    return 1 + (0 if run.engine.table.one_scale else 4 / block_size(row))  # one scale per matrix is not gathered


def _ring(run: Assembly, axes: Iterable[str]) -> float:
    """The part of an array that each of its shards' GPUs along these axes sends to gather it or to scatter its sum."""
    return 1 - 1 / layer_sizes.devices(run, axes)


def _joined(run: Assembly, axes: Iterable[str]) -> str:
    """The names of mesh axes as `hlo.collectives` joins them."""
    return "+".join(axis for axis in run.mesh.shape if axis in axes)
