"""Bytes that the collectives of a step send, by the textbook. The planner prints them next to the compiled step's.

Collectives are those of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054). For n GPUs of `dp_shard x cp`, k
microbatches, and blocks whose work weights have P bytes, each GPU sends per step:

| sharded            | forward and backward                                | end of step                            |
|--------------------|-----------------------------------------------------|----------------------------------------|
| master and moments |                                                     | reduce-scatter P', all-gather P        |
| + gradients        | reduce-scatter k P                                  | all-gather P                           |
| + weights          | all-gather 2 k P, reduce-scatter k P                |                                        |

times (n - 1) / n. P' is the size of the blocks in the dtype of the gradient accumulators. With `microbatches_per_fetch`
g, weights are gathered for k / g groups: 2 P k / g. `use_all_to_all_reduce` sends the same bytes in an
all-to-all. In 8 bits (`zero_quantized_weights`, `zero_quantized_gradients`, weights of recipes fp8_*) P has 1 byte for
each number of a matrix and 4 bytes for the scale of each of its blocks; fp8_* have no blocks. Vectors stay in the work
dtype, gradients of vectors are float32 (ZeRO++, Wang et al. 2023, arXiv:2306.10209; its gradients in one hop).

Of a base that is frozen, below adapters, weights are gathered like others, and gradients and updates are those of the
adapters alone.

Replicated outer layers add a reduce-scatter and an all-gather once per step. Sharded outer layers transfer tokens
instead (`vocabulary`); for what NorMuon sends see `whole_matrices`. In all else, with tensor parallelism P is what a
device of a group has; `tensor` says what its groups send besides, and `context` what attention sends over `cp`. With
pipeline parallelism P is what a full stage has of that, and each pass gathers one layer more (step/pipeline.py); with a
ring there are as many passes as `stages.layer_passes` says. `stage_bytes` says what stages send. Groups of
`dp_replicate` all-reduce their shards once per step. Scalars (loss, label count, norm: a few bytes) are left out.

Each part of a step has a function, which roofline.py asks for the time of that part: `Sent` is bytes that each GPU
sends, by (collective, axis).
"""

import collections
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from surojax.assembly import Assembly
from surojax.models.model import Segment
from surojax.numerics.quantize import block_size
from surojax.placement.layout import Layout, mesh_axes
from surojax.placement.mesh import (
    CONTEXT,
    KV_HEADS,
    PIPELINE,
    REPLICATE,
    SAME_KV_HEADS,
    SHARD,
    TENSOR,
    devices_per_sequence,
    pipeline_stages,
    shard_axes,
    shards,
    tensor_parallel,
)
from surojax.placement.param import OUTER, Kind, Param
from surojax.planner import shares
from surojax.planner.stages import layer_passes
from surojax.planner.traffic import Batch, attention_again, groups_of

type Sent = dict[tuple[str, str], float]


class Passes(NamedTuple):
    """Bytes that blocks send in a group: forward, in the forward pass that the backward pass repeats, and backward."""

    forward: Sent
    again: Sent
    backward: Sent


def collective_bytes(run: Assembly, batch: Batch) -> dict[tuple[str, str], int]:
    """Bytes that each GPU sends per step, by (collective, axis)."""
    over_shards = axes_of_shards(run)
    ops = "all-gather", "reduce-scatter", "all-to-all", "all-reduce"
    sent = collections.defaultdict[tuple[str, str], float](float)
    sent |= dict.fromkeys([*((op, over_shards) for op in ops), ("all-reduce", REPLICATE)], 0.0)
    parts = [
        weights(run, batch),
        gradients(run, batch),
        outer(run),
        vocabulary(run, batch),
        *tensor(run, batch),
        *context(run, batch),
        stage_bytes(run, batch),
        whole_matrices(run),
        replicas(run, *shares.segment_names(run), OUTER),
    ]
    for part in parts:
        for key, size in part.items():
            sent[key] += size
    return {key: round(size) for key, size in sent.items() if size}


def axes_of_shards(run: Assembly) -> str:
    """The axes over which state is sharded, as `collective_bytes` names them."""
    return _joined(run, shard_axes(run.mesh)) or SHARD


def weights(run: Assembly, batch: Batch) -> Sent:
    """All-gathers of the blocks' weights: two for each group of microbatches, or of what was updated once a step."""
    gathered = _gathered_bytes(run)
    if run.engine.table.weights.sharded:
        gathered *= 2 * layers_gathered(run) / shares.layers_of(run, *run.model.segments) * groups_of(run, batch)
    return {("all-gather", axes_of_shards(run)): _ring(run) * gathered}


def layers_gathered(run: Assembly) -> int:
    """Layers whose weights a pass over a group gathers, if they are sharded: all of its own, with stages one more."""
    return shares.layers_of(run, *run.model.segments) + (pipeline_stages(run.mesh) > 1)


def gradients(run: Assembly, batch: Batch) -> Sent:
    """Reductions of the blocks' gradients over the shards: for every microbatch, or of accumulators once a step."""
    table = run.engine.table
    over_shards = axes_of_shards(run)
    work, accum = (jnp.dtype(row.dtype).itemsize for row in (table.weights, table.grads))
    rounds, itemsize = (layer_passes(run, batch.microbatches), work) if table.grads.sharded else (1, accum)
    blocks, replicated = shares.elements_of(run, *shares.segment_names(run))
    reduced = _in_8_bits(run, run.engine.layouts.master, vectors=4) if table.reduce == "int8" else itemsize * blocks
    return {
        (_reduction(run), over_shards): _ring(run) * reduced * rounds,
        ("all-reduce", over_shards): 2 * _ring(run) * itemsize * replicated * rounds,
    }


def outer(run: Assembly) -> Sent:
    """Gathers of updated outer weights and reductions of their gradients, once a step, where each GPU has all of them.

    Weights that are stored as shards are neither gathered nor reduced here.
    """
    table = run.engine.table
    over_shards = axes_of_shards(run)
    work, accum = (jnp.dtype(row.dtype).itemsize for row in (table.weights, table.grads))
    moved = sum(
        shares.elements(run, p, master)
        for p, master, weights in shares.trained(run, OUTER)
        if master.sharded_dim is not None and weights.stored != master.stored
    )
    replicated = shares.elements_of(run, OUTER)[1]
    return {
        ("all-gather", over_shards): _ring(run) * work * moved,
        (_reduction(run), over_shards): _ring(run) * accum * moved,
        ("all-reduce", over_shards): 2 * _ring(run) * accum * replicated,
    }


def vocabulary(run: Assembly, batch: Batch) -> Sent:
    """Bytes that embedding, head and loss send for tokens, and of sums of their gradients that devices share.

    Embedding: gathers ids, scatters rows; its gradient: gathers rows. Head: gathers activations and labels, scatters
    the activations' gradient.
    """
    sent = collections.defaultdict[tuple[str, str], float](float)
    work = jnp.dtype(run.engine.table.weights.dtype).itemsize
    k = batch.microbatches
    if axes := run.engine.vocabulary_axes:
        tokens = batch.tokens // (devices_per_sequence(run.mesh) * pipeline_stages(run.mesh))
        x = tokens * run.model.hidden_size * work
        ids = tokens * 4
        along = _joined(run, axes)
        others = math.prod(run.mesh.shape[axis] for axis in axes) - 1
        sent["all-gather", along] += k * others * (2 * x + 2 * ids)
        sent["reduce-scatter", along] += k * others * 2 * x
        sent["all-reduce", along] += k * 2 * others * 2 * ids  # largest logit and sum of exponentials, float32
    for p, layout, _ in shares.trained(run, OUTER):
        _add_shared(run, sent, p, layout, k * run.engine.lmhead_chunks * work)
    return sent


def tensor(run: Assembly, batch: Batch) -> Passes:
    """Bytes that the blocks send within a tensor-parallel group.

    A pass over a block gathers the inputs of attention and MLP and scatters their results; reverse mode scatters where
    the block gathers. A recomputed block does it again, except for a result that no gradient needs. With chunks it
    gathers the inputs of attention once more, for the keys and values of all chunks but the last. Recipes fp8_* gather
    in 8 bits. Largest magnitudes, a number for each operand of fp8_* and nvfp4, are left out.
    """
    axes = tuple(axis for axis in TENSOR if axis in run.mesh.shape)
    forward, again, backward = sent = Passes(*(collections.defaultdict(float) for _ in range(3)))
    if not axes:
        return sent
    work = jnp.dtype(run.engine.table.weights.dtype).itemsize
    k = layer_passes(run, batch.microbatches)
    n = tensor_parallel(run.mesh)
    x = (n - 1) / n * batch.tokens / run.mesh.shape.get(CONTEXT, 1) * run.model.hidden_size * work
    sharers = run.mesh.shape.get(SAME_KV_HEADS, 1)  # of keys and values
    along = _joined(run, axes)
    for segment in run.model.segments:
        layers = shares.layers_of(run, segment)
        gathers_again, results_again = tensor_again(run, segment)
        enabled = sum(variant.recipe_enabled for variant in segment.variants) / segment.num_layers
        in_recipe = layers * enabled  # of a stage, on average
        in_fp8 = run.model.precision.fp8 * in_recipe
        gathers = layers - in_fp8 + in_fp8 / work  # of layers, in the work dtype
        of_passes = (forward, 2, 2), (again, gathers_again, results_again), (backward, 2, 2)
        for of_pass, gathered, scattered in of_passes:
            of_pass["all-gather", along] += k * gathers * gathered * x
            of_pass["reduce-scatter", along] += k * layers * scattered * x
        if sharers > 1:
            # Of gradients of keys and values before they are rounded; in bf16 those of their matrices alone are summed.
            width = segment.heads.key_value * segment.heads.channels * sharers // n
            keys_and_values = 2 * batch.tokens * width * work
            rounded = in_recipe * (run.model.precision.recipe != "bf16")
            backward["all-reduce", SAME_KV_HEADS] += k * rounded * 2 * (sharers - 1) / sharers * keys_and_values
        for p, layout, _ in shares.trained(run, segment.name):
            _add_shared(run, backward, p, layout, k * (layers - in_fp8) * work)
            if not any(axis in layout.computed_axes for axis in TENSOR):  # scales of norms
                _add_shared(run, backward, p, layout, k * in_fp8 * 4)
    return sent


def tensor_again(run: Assembly, segment: Segment) -> tuple[float, int]:
    """How often the backward pass of a block gathers inputs and scatters results of attention and MLP again."""
    if run.engine.recompute_block:
        return 2 + _of_earlier_chunks(run), 1 if segment.last_products else 2
    recompute = run.model.compute.recompute
    return (recompute.norm or recompute.att) + (recompute.norm or recompute.ffn), 0


def context(run: Assembly, batch: Batch) -> Passes:
    """Bytes that attention sends over the devices of `cp`.

    ulysses: queries, keys and values of one pass, and its results; so are their gradients. With chunks, the backward
    pass sends keys and values of all chunks but the last once more. Others: a pass gets keys and values of all others;
    reverse mode gets them again, and XLA joins that with what a recomputed block gets. Gradients of them are float32,
    until ring sends them home in one hop more.
    """
    n = run.mesh.shape.get(CONTEXT, 1)
    forward, again, backward = sent = Passes(*(collections.defaultdict(float) for _ in range(3)))
    if n == 1:
        return sent
    engine = run.engine
    method = run.model.compute.cp_method
    work = jnp.dtype(engine.table.weights.dtype).itemsize
    tokens = batch.tokens / n
    for segment in run.model.segments:
        passes = layer_passes(run, batch.microbatches) * shares.layers_of(run, segment)
        heads = segment.heads
        queries = heads.query // tensor_parallel(run.mesh) * heads.channels * tokens
        of_group = heads.key_value // run.mesh.shape.get(KV_HEADS, 1)
        if method == "ulysses":
            keys = max(of_group, n) * heads.channels * tokens
            attended = (n - 1) / n * passes * (2 * queries + 2 * keys) * work
            forward["all-to-all", CONTEXT] += attended
            if attention_again(run):
                again["all-to-all", CONTEXT] += attended
            earlier = _of_earlier_chunks(run) * 2 * keys
            again["all-to-all", CONTEXT] += (n - 1) / n * passes * earlier * work
            backward["all-to-all", CONTEXT] += attended
            continue
        block = 2 * of_group * heads.channels * tokens
        to_others, home = ("all-gather", "reduce-scatter") if method == "allgather" else ("collective-permute",) * 2
        forward[to_others, CONTEXT] += (n - 1) * passes * block * work
        again[to_others, CONTEXT] += (n - 1) * passes * block * work
        backward[home, CONTEXT] += passes * block * ((n - 1) * 4 + (work if method == "ring" else 0))
    return sent


def _of_earlier_chunks(run: Assembly) -> float:
    """The fraction of a sequence before its last chunk, whose keys and values the backward pass computes twice."""
    return 1 - 1 / run.model.compute.sequence_chunks


def stage_bytes(run: Assembly, batch: Batch) -> Sent:
    """Bytes that stages send each other, besides those of the vocabulary.

    Between ticks activations move forward and their gradients backward, also those of microbatches that have left the
    last stage. Embeddings and gradients of the head are gathered, their reverses scattered.
    """
    stages = pipeline_stages(run.mesh)
    if stages == 1:
        return {}
    k = batch.microbatches
    work = jnp.dtype(run.engine.table.weights.dtype).itemsize
    x = batch.tokens // devices_per_sequence(run.mesh) * run.model.hidden_size * work
    others = (stages - 1) / stages
    return {
        ("collective-permute", PIPELINE): 2 * (k + stages - 1) * x,
        ("all-gather", PIPELINE): 2 * k * others * x,
        ("reduce-scatter", PIPELINE): 2 * k * others * x,
    }


def replicas(run: Assembly, *sections: str) -> Sent:
    """The sums of gradients of these sections of the model over the groups of `dp_replicate`, once a step."""
    number = run.mesh.shape[REPLICATE]
    n = shards(run.mesh)
    accum = jnp.dtype(run.engine.table.grads.dtype).itemsize
    sharded, replicated = shares.elements_of(run, *sections)
    return {("all-reduce", REPLICATE): 2 * (number - 1) / number * accum * (sharded / n + replicated)}


def whole_matrices(run: Assembly) -> Sent:
    """Bytes that an optimizer sends that needs whole matrices."""
    sent = collections.defaultdict[tuple[str, str], float](float)
    if run.optimizer.matrices.apply_to_group:
        for segment in run.model.segments:
            for p, master, _ in shares.trained(run, segment.name):
                if p.kind is Kind.MATRIX:
                    _add_whole(run, sent, segment, p, master)
    return sent


def _ring(run: Assembly) -> float:
    """The part of an array that each of its shards' GPUs sends to gather it or to scatter its sum."""
    n = shards(run.mesh)
    return (n - 1) / n


def _reduction(run: Assembly) -> str:
    """The collective that sums gradients over the shards."""
    return "reduce-scatter" if run.engine.table.reduce == "reduce_scatter" else "all-to-all"


def _add_shared(run: Assembly, sent: dict[tuple[str, str], float], p: Param, layout: Layout, itemsize: float) -> None:
    """Adds the sum over a group's devices of the gradient of a parameter that some of them share.

    It is in the loops over microbatches and slices of the head. For GPUs, XLA adds up the terms of the final norm on
    each device and sums them over devices once, behind the loops: of Llama-7B with pp_size=4, 0.40 MiB of all-reduces
    over pp are left of 1.88 MiB. On CPUs it does not.
    """
    divided = (*layout.layers, *layout.computed_axes)
    axes = tuple(axis for axis in (PIPELINE, *TENSOR) if axis in run.mesh.shape and axis not in divided)
    n = math.prod(run.mesh.shape[axis] for axis in axes)
    if n > 1:
        sent["all-reduce", _joined(run, axes)] += 2 * (n - 1) / n * itemsize * shares.elements(run, p, layout)


def _add_whole(run: Assembly, sent: dict[tuple[str, str], float], segment: Segment, p: Param, layout: Layout) -> None:
    """Adds what an optimizer sends that needs whole matrices (optim/normuon.py), one dimension after another.

    Momentum in the work dtype, to the device that has a layer of a group, and the float32 result back; then the rows'
    second moments. A layer that is updated alone is gathered by every device.
    """
    work = jnp.dtype(run.engine.table.weights.dtype).itemsize
    together = shares.layers_together(run, segment, layout)
    groups = shares.layers_of(run, segment) // together
    whole = math.prod(p.shape)
    gathered = math.prod(jax.NamedSharding(run.mesh, layout.stored).shard_shape(p.shape))
    rows = p.shape[0]
    axes_of_dims = [[axis for axis in entry if run.mesh.shape[axis] > 1] for entry in map(mesh_axes, layout.stored)]
    devices = math.prod(run.mesh.shape[axis] for axes in axes_of_dims for axis in axes)
    for axes in axes_of_dims:
        n = math.prod(run.mesh.shape[axis] for axis in axes)
        if axes:  # named by `hlo.collectives` in this order
            along = "+".join(axes)
            if together == 1:
                sent["all-gather", along] += groups * work * gathered * (n - 1)
            else:
                sent["all-to-all", along] += groups * (work + 4) * whole * (n - 1) / n
                sent["all-gather", along] += groups * 4 * rows * devices * (n - 1) / n
        gathered *= n
        devices //= n


def _joined(run: Assembly, axes: tuple[str, ...]) -> str:
    """The names of mesh axes as `hlo.collectives` joins them."""
    return "+".join(axis for axis in run.mesh.shape if axis in axes)


def _gathered_bytes(run: Assembly) -> float:
    """Bytes of the layers' work weights that are gathered: of all of them in a pass, else of those that are updated."""
    table = run.engine.table
    layouts = run.engine.layouts
    work = jnp.dtype(table.weights.dtype).itemsize
    if table.weights.sharded:
        return _in_8_bits(run, layouts.weights, vectors=work, matrices=0 if table.quants.dtype else work)
    return _in_8_bits(run, layouts.master, vectors=work, matrices=work)


def _in_8_bits(run: Assembly, of_class: dict, vectors: int, matrices: int = 0) -> float:
    """Bytes of the layers' parameters that are sharded in a class, with matrices in 8 bits and their scales.

    vectors, matrices: bytes per number; of matrices 0 means 8 bits.
    """
    total = 0.0
    for segment in run.model.segments:
        for p, layout in shares.with_layouts(run, segment.name, of_class):
            if layout.sharded_dim is None:
                continue
            row = jax.NamedSharding(run.mesh, layout.stored).shard_shape(p.shape)[-1]
            scale = 0 if run.engine.table.one_scale else 4 / block_size(row)  # one scale per matrix is not gathered
            number = (matrices or 1 + scale) if p.kind is Kind.MATRIX else vectors
            number = jnp.dtype(p.dtype).itemsize if p.dtype else number
            number = shares.coded_bytes(run, segment, p) or number
            total += shares.layers_of(run, segment) * shares.elements(run, p, layout) * number
    return total
