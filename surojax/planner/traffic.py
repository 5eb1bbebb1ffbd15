"""Textbook figures of a step, computed from shapes: bytes that it must transfer, and FLOPs. The planner prints them
next to the figures of the compiled step.

Collectives are those of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054), as in DESIGN section 3. For n GPUs of
`dp_shard x cp`, k microbatches, and blocks whose work weights have P bytes, each GPU sends per step:

| sharded            | forward and backward                                | end of step                            |
|--------------------|-----------------------------------------------------|----------------------------------------|
| master and moments |                                                     | reduce-scatter P', all-gather P        |
| + gradients        | reduce-scatter k P                                  | all-gather P                           |
| + weights          | all-gather 2 k P - k P_l, reduce-scatter k P        |                                        |

times (n - 1) / n. P_l is the last layer's part of P if that layer is computed once (step/weights.py). P' is the size of
the blocks in the dtype of the gradient accumulators. With `microbatches_per_fetch` g, weights are gathered for k / g
groups: 2 P k / g. `use_all_to_all_reduce` sends the same bytes in an all-to-all. In 8 bits (`zero_quantized_weights`,
`zero_quantized_gradients`, weights of recipes fp8_*) P has 1 byte for each number of a matrix and 4 bytes for the scale
of each of its blocks; fp8_* have no blocks. Vectors stay in the work dtype, gradients of vectors are float32 (ZeRO++,
Wang et al. 2023, arXiv:2306.10209; its gradients in one hop).

Of a base that is frozen, below adapters, weights are gathered like others, and gradients and updates are those of the
adapters alone.

Replicated outer layers add a reduce-scatter and an all-gather once per step. Sharded outer layers transfer tokens
instead: see `collective_bytes`, and for what NorMuon sends `_add_whole`. In all else, with tensor parallelism P is
what a device of a group has; `tensor_bytes` says what its groups send besides, and `context_bytes` what attention sends
over `cp`. With pipeline parallelism P is what a full stage has of that, and each pass gathers one layer more
(step/pipeline.py); `stage_bytes` says what stages send. Groups of `dp_replicate` all-reduce their shards once per step.
Scalars (loss, label count, norm: a few bytes) are left out.

Times are lower bounds: each resource alone, at its peak rate, perfectly overlapped with all others.
"""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp

from surojax.assembly import Assembly
from surojax.config.fields import Config
from surojax.memory.host import parts
from surojax.models.model import Segment
from surojax.numerics.base_formats import bytes_per_number
from surojax.numerics.quantize import block_size
from surojax.numerics.recipes import BLOCK_SCALED, Precision
from surojax.optim import optimizer as optim
from surojax.parallel.schedule import SCHEDULES, layers_of_stage
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
from surojax.placement.param import OUTER, Kind, Param, part_of
from surojax.planner.gpus import Gpu
from surojax.step.state_plan import leaf_bytes
from surojax.step.weights import computes_last_layer_once


@dataclasses.dataclass(frozen=True)
class Batch:
    """The tokens of a step on one GPU, or on one group of GPUs that share sequences."""

    sequences: int  # per microbatch
    sequence_len: int
    microbatches: int

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.sequences * self.sequence_len


def batch_of(c: Config) -> Batch:
    """The `Batch` of a config."""
    return Batch(c.per_device_batch_size, c.sequence_len, c.gradient_accumulation_steps)


def collective_bytes(run: Assembly, batch: Batch) -> dict[tuple[str, str], int]:
    """Bytes that each GPU sends per step, by (collective, axis)."""
    table = run.engine.table
    n = shards(run.mesh)
    over_shards = axes_of_shards(run)
    replicas = run.mesh.shape[REPLICATE]
    k = batch.microbatches
    groups = _groups(run, batch)
    ops = "all-gather", "reduce-scatter", "all-to-all", "all-reduce"
    sent = collections.defaultdict[tuple[str, str], float](float)
    sent |= dict.fromkeys([*((op, over_shards) for op in ops), ("all-reduce", REPLICATE)], 0.0)
    work, accum = (jnp.dtype(row.dtype).itemsize for row in (table.weights, table.grads))
    ring = (n - 1) / n
    blocks, replicated_blocks = _sizes(run, *_segments(run))
    gathered = _gathered_bytes(run)
    stages = pipeline_stages(run.mesh)
    if stages > 1 and table.weights.sharded:  # 2 passes over n layers fetch 2 (n + 1)
        gathered += gathered / _layers(run, *run.model.segments)
    in_passes = 2 * gathered - last_layer_once(run) * gathered / _layers(run, *run.model.segments)
    sent["all-gather", over_shards] += ring * (groups * in_passes if table.weights.sharded else gathered)
    rounds, itemsize = (k, work) if table.grads.sharded else (1, accum)
    reduce = "reduce-scatter" if table.reduce == "reduce_scatter" else "all-to-all"
    reduced = _in_8_bits(run, run.engine.layouts.master, vectors=4) if table.reduce == "int8" else itemsize * blocks
    sent[reduce, over_shards] += ring * reduced * rounds
    sent["all-reduce", over_shards] += 2 * ring * itemsize * replicated_blocks * rounds

    outer = sum(  # weights that are stored as shards are not gathered
        _size(run, p, master)
        for p, master, weights in _with_layouts(run, OUTER)
        if master.sharded_dim is not None and weights.stored != master.stored
    )
    sent["all-gather", over_shards] += ring * work * outer
    sent[reduce, over_shards] += ring * accum * outer
    sharded_outer, replicated_outer = _sizes(run, OUTER)
    sent["all-reduce", over_shards] += 2 * ring * accum * replicated_outer
    if axes := run.engine.vocabulary_axes:
        tokens = batch.tokens // (devices_per_sequence(run.mesh) * stages)
        x = tokens * run.model.hidden_size * work
        ids = tokens * 4
        along = _joined(run, axes)
        others = math.prod(run.mesh.shape[axis] for axis in axes) - 1
        # Embedding: gathers ids, scatters rows; its gradient: gathers rows. Head: gathers activations and labels,
        # scatters the activations' gradient.
        sent["all-gather", along] += k * others * (2 * x + 2 * ids)
        sent["reduce-scatter", along] += k * others * 2 * x
        sent["all-reduce", along] += k * 2 * others * 2 * ids  # largest logit and sum of exponentials, float32
    for of_blocks in (tensor_bytes(run, batch), context_bytes(run, batch), stage_bytes(run, batch)):
        for key, size in of_blocks.items():
            sent[key] += size
    for p, layout, _ in _with_layouts(run, OUTER):
        _add_shared(run, sent, p, layout, k * run.engine.lmhead_chunks * work)
    if run.optimizer.matrices.apply_to_group:
        for segment in run.model.segments:
            for p, master, _ in _with_layouts(run, segment.name):
                if p.kind is Kind.MATRIX:
                    _add_whole(run, sent, segment, p, master)
    parameters = blocks / n + replicated_blocks + sharded_outer / n + replicated_outer
    sent["all-reduce", REPLICATE] += 2 * (replicas - 1) / replicas * accum * parameters
    return {key: round(size) for key, size in sent.items() if size}


def axes_of_shards(run: Assembly) -> str:
    """The axes over which state is sharded, as `collective_bytes` names them."""
    return _joined(run, shard_axes(run.mesh)) or SHARD


def tensor_bytes(run: Assembly, batch: Batch) -> dict[tuple[str, str], float]:
    """Bytes that each GPU sends per step within its tensor-parallel group, by (collective, axis), for the blocks.

    A pass over a block gathers the inputs of attention and MLP and scatters their results; reverse mode scatters where
    the block gathers. A recomputed block does it again, except for a result that no gradient needs. Recipes fp8_*
    gather in 8 bits; their largest magnitudes, a number for each site, are left out.
    """
    axes = tuple(axis for axis in TENSOR if axis in run.mesh.shape)
    sent = collections.defaultdict[tuple[str, str], float](float)
    if not axes:
        return sent
    engine = run.engine
    recompute = run.model.compute.recompute
    work = jnp.dtype(engine.table.weights.dtype).itemsize
    k = batch.microbatches
    n = tensor_parallel(run.mesh)
    x = (n - 1) / n * batch.tokens / run.mesh.shape.get(CONTEXT, 1) * run.model.hidden_size * work
    sharers = run.mesh.shape.get(SAME_KV_HEADS, 1)  # of keys and values
    along = _joined(run, axes)
    for segment in run.model.segments:
        layers = _layers(run, segment)
        parts = (recompute.norm or recompute.att) + (recompute.norm or recompute.ffn)  # whose inputs are gathered again
        again = 2 if engine.recompute_block else parts
        results = (1 if segment.last_products else 2) if engine.recompute_block else 0
        in_fp8 = run.model.precision.fp8 * sum(variant.recipe_enabled for variant in segment.variants[:layers])
        gathers = layers - in_fp8 + in_fp8 / work  # of layers, in the work dtype
        sent["all-gather", along] += k * gathers * (4 + again) * x
        sent["reduce-scatter", along] += k * layers * (4 + results) * x
        if sharers > 1:
            # Of keys and values before they are quantised; reverse mode sums their matrices' gradients instead.
            width = segment.heads.key_value * segment.heads.channels * sharers // n
            keys_and_values = 2 * batch.tokens * width * work
            sent["all-reduce", SAME_KV_HEADS] += k * in_fp8 * 2 * (sharers - 1) / sharers * keys_and_values
        for p, layout, _ in _with_layouts(run, segment.name):
            _add_shared(run, sent, p, layout, k * (layers - in_fp8) * work)
            if not any(axis in layout.computed_axes for axis in TENSOR):  # scales of norms
                _add_shared(run, sent, p, layout, k * in_fp8 * 4)
    return sent


def context_bytes(run: Assembly, batch: Batch) -> dict[tuple[str, str], float]:
    """Bytes that each GPU sends per step for attention over the devices of `cp`, by (collective, axis).

    ulysses: queries, keys and values of one pass, and its results; so are their gradients. Others: a pass gets keys and
    values of all others; reverse mode gets them again, and XLA joins that with what a recomputed block gets. Gradients
    of them are float32, until ring sends them home in one hop more.
    """
    n = run.mesh.shape.get(CONTEXT, 1)
    sent = collections.defaultdict[tuple[str, str], float](float)
    if n == 1:
        return sent
    engine = run.engine
    method = run.model.compute.cp_method
    work = jnp.dtype(engine.table.weights.dtype).itemsize
    tokens = batch.tokens / n
    for segment in run.model.segments:
        passes = batch.microbatches * _layers(run, segment)
        again = engine.recompute_block or run.model.compute.recompute.att
        heads = segment.heads
        queries = heads.query // tensor_parallel(run.mesh) * heads.channels * tokens
        of_group = heads.key_value // run.mesh.shape.get(KV_HEADS, 1)
        if method == "ulysses":
            keys = max(of_group, n) * heads.channels * tokens
            sent["all-to-all", CONTEXT] += (n - 1) / n * passes * (3 if again else 2) * (2 * queries + 2 * keys) * work
            continue
        block = 2 * of_group * heads.channels * tokens
        to_others, home = ("all-gather", "reduce-scatter") if method == "allgather" else ("collective-permute",) * 2
        sent[to_others, CONTEXT] += (n - 1) * passes * 2 * block * work
        sent[home, CONTEXT] += passes * block * ((n - 1) * 4 + (work if method == "ring" else 0))
    return sent


def stage_bytes(run: Assembly, batch: Batch) -> dict[tuple[str, str], float]:
    """Bytes that each GPU sends per step to other stages, by (collective, axis), besides those of the vocabulary.

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
        sent["all-reduce", _joined(run, axes)] += 2 * (n - 1) / n * itemsize * _size(run, p, layout)


def _add_whole(run: Assembly, sent: dict[tuple[str, str], float], segment: Segment, p: Param, layout: Layout) -> None:
    """Adds what an optimizer sends that needs whole matrices (optim/normuon.py), one dimension after another.

    Momentum in the work dtype, to the device that has a layer of a group, and the float32 result back; then the rows'
    second moments. A layer that is updated alone is gathered by every device.
    """
    work = jnp.dtype(run.engine.table.weights.dtype).itemsize
    together = layers_together(run, segment, layout)
    groups = _layers(run, segment) // together
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


def layers_together(run: Assembly, segment: Segment, layout: Layout) -> int:
    """The number of layers of a matrix whose master weights have this layout that are updated together."""
    if run.engine.table.master.home.in_file:
        return 1
    of_parts = [part.stop - part.start for part in parts(run.plan.weights[segment.name])]
    devices = math.prod(run.mesh.shape[axis] for axis in layout.stored_axes)
    of_stage = [layers // pipeline_stages(run.mesh) for layers in of_parts]
    return optim.layers_together(run.optimizer.matrices, of_stage, devices)


def _joined(run: Assembly, axes: tuple[str, ...]) -> str:
    """The names of mesh axes as `hlo.collectives` joins them."""
    return "+".join(axis for axis in run.mesh.shape if axis in axes)


def _size(run: Assembly, p: Param, layout: Layout) -> int:
    """Elements of a parameter on each device of a stage's tensor-parallel group, shared over `dp_shard x cp`."""
    divided = math.prod(run.mesh.shape[axis] for axis in (PIPELINE, *TENSOR) if axis in layout.computed_axes)
    return math.prod(p.shape) // divided


def _groups(run: Assembly, batch: Batch) -> int:
    """Groups of microbatches in a step; for each, a layer's weights and accumulators are fetched once a pass."""
    return batch.microbatches // run.engine.microbatches_per_fetch


def _layers(run: Assembly, *segments: Segment) -> int:
    """Layers of these segments on a GPU whose stage is full, each of which it computes, gathers and updates."""
    stages = pipeline_stages(run.mesh)
    return sum(layers_of_stage(segment.num_layers, stages) for segment in segments)


def _segments(run: Assembly) -> list[str]:
    return [segment.name for segment in run.model.segments]


def _with_layouts(run: Assembly, section: str) -> list[tuple[Param, Layout, Layout]]:
    """(param, layout of its master weights, layout of its work weights) for each trained parameter of a section."""
    layouts = run.engine.layouts
    master = layouts.master[section]
    trees = part_of(run.params[section], master), master, part_of(layouts.weights[section], master)
    return list(zip(*map(jax.tree.leaves, trees), strict=True))


def _sizes(run: Assembly, *sections: str) -> tuple[int, int]:
    """(trained parameters whose state is sharded, those whose state is replicated) of sections of the model."""
    layers = {segment.name: _layers(run, segment) for segment in run.model.segments} | {OUTER: 1}
    sharded = 0
    replicated = 0
    for section in sections:
        for p, master, _ in _with_layouts(run, section):
            size = layers[section] * _size(run, p, master)
            if master.sharded_dim is None:
                replicated += size
            else:
                sharded += size
    return sharded, replicated


def last_layer_once(run: Assembly) -> bool:
    """True if the last layer is computed once, and not again in the backward pass."""
    return computes_last_layer_once(run.engine) and pipeline_stages(run.mesh) == 1


def _gathered_bytes(run: Assembly) -> float:
    """Bytes of the layers' work weights that are gathered: of all of them in a pass, else of those that are updated."""
    table, layouts = run.engine.table, run.engine.layouts
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
        for p, layout in _pairs(run, segment.name, of_class):
            if layout.sharded_dim is None:
                continue
            row = jax.NamedSharding(run.mesh, layout.stored).shard_shape(p.shape)[-1]
            scale = 0 if run.engine.table.one_scale else 4 / block_size(row)  # one scale per matrix is not gathered
            number = (matrices or 1 + scale) if p.kind is Kind.MATRIX else vectors
            number = jnp.dtype(p.dtype).itemsize if p.dtype else number
            number = coded_bytes(run, segment, p) or number
            total += _layers(run, segment) * _size(run, p, layout) * number
    return total


def coded_bytes(run: Assembly, segment: Segment, p: Param) -> float:
    """Bytes of each number of a parameter that rests in the base's format; 0 if it does not."""
    planned = run.coded(segment, p)
    return 0.0 if planned is None else bytes_per_number(planned, (planned.codes.shape[0], *p.shape))


def _pairs(run: Assembly, section: str, of_class: dict) -> list[tuple[Param, Layout]]:
    """(param, layout) for each parameter of a section that a class has."""
    layouts = of_class[section]
    return list(zip(jax.tree.leaves(part_of(run.params[section], layouts)), jax.tree.leaves(layouts), strict=True))


def token_flops(run: Assembly, sequence_len: int, *, again: bool = False) -> dict[str, float]:
    """FLOPs of training on one token, by the dtype that is multiplied: "bfloat16", "float32", "float8" or "float4".

    Products with the blocks' matrices have the recipe's dtypes in the layers with the recipe; attention and head have
    model_dtype. again: include the second forward pass of recomputed blocks, in which XLA drops the products that no
    gradient needs (`Segment.last_products`), unless the last layer is computed once.
    """
    model = run.model
    work_dtype = run.engine.table.weights.dtype
    found = collections.defaultdict[str, float](float)
    attention = sum(segment.attention_flops(sequence_len) for segment in model.segments)
    # One pass forward, two backward: gradients of inputs, and of what is trained.
    total = 2.0 * (2 * model.num_matmul_params + model.trained_matmul_params) + 3 * attention
    last = model.segments[-1]
    once = last_layer_once(run)
    total += attention - once * last.attention_flops(sequence_len) / last.num_layers if again else 0
    for segment in model.segments:
        for l, variant in enumerate(segment.variants):
            repeated = again and not (once and segment is last and l == last.num_layers - 1)
            forward, backward = operands(model.precision, variant.recipe_enabled, work_dtype)
            recomputed = segment.recomputed_matmul_size if repeated else 0
            factors = segment.factor_size  # in model_dtype: among what is left below
            found[forward] += 2 * (segment.matmul_size - factors + recomputed - factors * repeated)
            found[backward] += 2 * (segment.matmul_size + segment.trained_matmul_size - 2 * factors)
            total += 2 * recomputed
    found[work_dtype] += total - sum(found.values())
    return dict(found)


def operands(precision: Precision, recipe_enabled: bool, dtype: str) -> tuple[str, str]:
    """Dtypes of the factors of a block's matrix products, (forward, backward). dtype: that of the work weights."""
    if not recipe_enabled or precision.recipe == "bf16":
        forward = precision.matmul_dtype or dtype
        return forward, precision.gradient_dtype or forward
    emulated = precision.recipe in BLOCK_SCALED and precision.emulate
    low = "float32" if emulated else "float4" if precision.recipe == "nvfp4" else "float8"
    return low, low


def step_flops(run: Assembly, batch: Batch) -> dict[str, float]:
    """FLOPs of a step on each GPU by dtype, as in `token_flops`, with recomputed blocks and the optimizer."""
    per_token = token_flops(run, batch.sequence_len, again=run.engine.recompute_block)
    tokens = batch.tokens * batch.microbatches / (devices_per_sequence(run.mesh) * pipeline_stages(run.mesh))
    found = {dtype: size * tokens for dtype, size in per_token.items()}
    for segment in run.model.segments:
        for p, master, _ in _with_layouts(run, segment.name):
            if p.kind is Kind.MATRIX:
                groups = _layers(run, segment) // layers_together(run, segment, master)
                found[run.engine.table.weights.dtype] += groups * run.optimizer.matrices.flops(p.shape)
    return found


def compute_time(gpu: Gpu, flops: dict[str, float]) -> float:
    """Seconds that FLOPs take at the peak rate of their dtype; for float32 the tensor cores' TF32 rate."""
    peak = {
        "bfloat16": gpu.bf16_flops,
        "float32": gpu.tf32_flops,
        "float8": gpu.fp8_flops or gpu.bf16_flops,
        "float4": gpu.fp4_flops or gpu.bf16_flops,
    }
    return sum(size / peak[dtype] for dtype, size in flops.items())


def device_traffic(run: Assembly, batch: Batch) -> int:
    """Least bytes that a step reads from and writes to device memory on each GPU: weights, state and residuals."""
    model = run.model
    weights_of = run.engine.layouts.weights
    engine = run.engine
    n = shards(run.mesh)
    k = batch.microbatches
    table = engine.table
    work, accum = (jnp.dtype(row.dtype).itemsize for row in (table.weights, table.grads))
    trained = sum(_sizes(run, *_segments(run)))
    stored = 1 if table.persistent_quants else work

    def read(segment: Segment, p: Param) -> float:
        """Bytes of a number in a pass. In a base's format codes are read, and numbers written and read."""
        coded = coded_bytes(run, segment, p)
        return coded + 2 * work if coded else stored

    blocks = sum(
        _layers(run, segment) * _size(run, p, layout) * read(segment, p)
        for segment in model.segments
        for p, layout in _pairs(run, segment.name, weights_of)
    )
    outer = sum(_size(run, *pair) for pair in _pairs(run, OUTER, weights_of))
    passes = 3 if engine.recompute_block else 2
    weights = k * (passes * blocks + 3 * work * outer / (n if table.outer.sharded else 1))
    gradients = 2 * k * accum * trained / (n if table.grads.sharded else 1)
    state = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves((run.plan.master, run.plan.moments))
    )
    tokens = batch.tokens // devices_per_sequence(run.mesh)
    layers = _layers(run, *run.model.segments)
    residuals = 2 * k * layers * tokens * run.model.hidden_size * work
    return round(weights + gradients + 2 * state + residuals)


def host_bytes(run: Assembly, batch: Batch, rows: dict[str, dict[str, int]]) -> tuple[int, int]:
    """(host to device, device to host) bytes per step and GPU; rows: bytes by class of tensors and by memory.

    Weights, or their persistent 8-bit copies, are read twice a group of microbatches; with overlap_update the first
    group's forward pass has them from the update. Those that are trained are written once a step. Gradients are written
    once a group, and read by the next group or the update. Residuals are written and read once a microbatch. Master
    weights and moments are read and written once a step; those in files pass through host memory.
    """
    groups = _groups(run, batch)
    host = {name: row["host"] + row["nvme"] for name, row in rows.items()}
    weights = host["weights"] + host.get("quants", 0)
    state = host["master"] + host["moments"]
    residuals = groups * host["residuals"]  # a group's are in host memory together
    grads = groups * host["grads"]
    fetched = (2 * groups - run.engine.overlap_update) * weights
    stages = pipeline_stages(run.mesh)
    if stages > 1:
        # Residuals in flight are there together. Every pass reads a layer more, and of accumulators writes one more.
        # These begin as zeros there, and after the last tick there is one more pass over them.
        layers = _layers(run, *run.model.segments)
        residuals //= max(SCHEDULES[run.engine.pp_schedule](groups, stages).in_flight.tolist())
        fetched += fetched // layers
        grads = (groups + 1) * (host["grads"] + host["grads"] // layers) + host["grads"]
    read = fetched + grads + residuals + state
    written = round(_updated_part(run) * weights) + grads + residuals + state
    return read, written


def _updated_part(run: Assembly) -> float:
    """The fraction of the bytes of the layers' work weights that a step updates: those that are trained."""
    names = _segments(run)
    stored = {name: run.plan.weights[name] for name in names}
    trained = part_of(stored, {name: run.plan.master[name] for name in names})
    updated, whole = (sum(map(leaf_bytes, jax.tree.leaves(tree))) for tree in (trained, stored))
    return updated / whole


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

    link_seconds: those of the collectives, each at the bandwidth of its link; None: all are within a machine.

    If GPUs communicate over PCI Express, collectives and host copies share it. Then each direction carries the bytes of
    both that a GPU sends, or receives.
    """
    return {
        "compute": compute_time(gpu, flops),
        "device memory": device_bytes / gpu.memory_bandwidth,
        "link": link_bytes / gpu.link_bandwidth if link_seconds is None else link_seconds,
        "pcie": (max(h2d, d2h) + (link_bytes if gpu.shares_pcie else 0)) / gpu.pcie_bandwidth,
    }
