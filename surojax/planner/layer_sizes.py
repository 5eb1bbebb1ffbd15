"""Sizes on one GPU: layers of its stage, shards of its tensor-parallel group, bytes of one layer."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.mma import ROWS
from surojax.assembly.assemble import Assembly
from surojax.memory.host import parts
from surojax.memory.in_file import InFiles
from surojax.models.grouped import blocks_in_piece, choice_pieces, number_of_blocks, rows_of_block, why_by_loop
from surojax.models.kinds.experts import choices_of
from surojax.models.kinds.sublayer import KernelBytes, OnGpu
from surojax.models.lora import adapters
from surojax.models.model import Model, Recompute, Segment
from surojax.models.order import loops_of
from surojax.numerics import quantized
from surojax.numerics.base_formats import bytes_per_number
from surojax.optim import optimizer as optim
from surojax.parallel.schedule import SCHEDULES, Patterns, layers_of_stage, patterns_of_stages
from surojax.placement.home import HOMES, Home
from surojax.placement.layout import MESH_AXES, Layout
from surojax.placement.mesh import EXPERT, devices_per_sequence, pipeline_stages, tensor_parallel
from surojax.placement.param import EXPERTS, OUTER, Kind, Param, part_of
from surojax.placement.table import Mesh
from surojax.step.stage_layers import layer_patterns, of_stage
from surojax.step.state_plan import bytes_per_device
from surojax.step.weights import quantise_with_one_scale


@dataclasses.dataclass(frozen=True)
class TensorOnGpu:
    """A parameter on a GPU whose stage is full.

    mesh: of the run. section: that it belongs to. layers: of the section on this stage; 1 for the outer layers.
    trained: it has master weights, else it is frozen. weights, master: layouts of work weights and master weights; of a
    frozen one both are those of work weights. itemsize: bytes of each number of the work weights; coded: if it rests in
    the format of a frozen base, else 0.
    """

    param: Param
    mesh: Mesh
    section: str
    layers: int
    trained: bool
    weights: Layout
    master: Layout
    itemsize: int
    coded: float = 0.0

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of one layer, or of an outer layer, on a GPU while it computes."""
        return jax.NamedSharding(self.mesh, self.weights.computed).shard_shape(self.param.shape)

    @property
    def elements(self) -> int:
        """Elements of one layer that a GPU computes with, without what of outer layers is shared over shards."""
        axes = [axis for name in self.param.axes for axis in MESH_AXES[name] if axis in self.mesh.shape]
        return math.prod(self.param.shape) // math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def shards(self) -> tuple[str, ...]:
        """The mesh axes of several GPUs over which its state is sharded, if it is, and its gradient is summed."""
        return tuple(axis for axis in self.master.shards if self.mesh.shape.get(axis, 1) > 1)

    @property
    def size(self) -> int:
        """Elements in all layers."""
        return self.layers * self.elements

    @property
    def is_matrix(self) -> bool:
        """True for a matrix of a block's products; False for adapters, vectors and tables."""
        return self.param.kind is Kind.MATRIX

    @property
    def state_is_sharded(self) -> bool:
        """True if the state, and so the sum of gradients, is sharded over `dp_shard x cp`; else it is replicated."""
        return self.master.sharded_dim is not None


def blocks(run: Assembly, *segments: Segment, trained: bool = False) -> list[TensorOnGpu]:
    """The `TensorOnGpu`s of these segments, or of all; trained: only those with master weights."""
    tensors = (t for segment in segments or run.model.segments for t in _section(run, segment.name, segment))
    return [t for t in tensors if t.trained >= trained]


def outer(run: Assembly, *, trained: bool = False) -> list[TensorOnGpu]:
    """The `TensorOnGpu`s of the outer layers; trained: only those with master weights."""
    return [t for t in _section(run, OUTER) if t.trained >= trained]


def _section(run: Assembly, name: str, segment: Segment | None = None) -> Iterator[TensorOnGpu]:
    """The `TensorOnGpu`s of a section. segment: of its layers, if it has any."""
    master = {p.name: layout for p, layout in with_layouts(run, name, run.engine.layouts.master)}
    for p, weights in with_layouts(run, name, run.engine.layouts.weights):
        coded = run.coded(segment, p) if segment else None
        yield TensorOnGpu(
            param=p,
            mesh=run.mesh,
            section=name,
            layers=layers_of(run, segment) if segment else 1,
            trained=p.name in master,
            weights=weights,
            master=master.get(p.name, weights),
            itemsize=jnp.dtype(p.dtype).itemsize if p.dtype else itemsize(run, "weights"),
            coded=0.0 if coded is None else bytes_per_number(coded, (coded.codes.shape[0], *p.shape)),
        )


def with_layouts(run: Assembly, section: str, of_class: dict) -> list[tuple[Param, Layout]]:
    """(param, layout) for each parameter of a section that a class has."""
    layouts = of_class[section]
    return list(zip(jax.tree.leaves(part_of(run.params[section], layouts)), jax.tree.leaves(layouts), strict=True))


def layers_of(run: Assembly, *segments: Segment) -> int:
    """Layers of these segments, or of all, on a GPU whose stage is full."""
    stages = pipeline_stages(run.mesh)
    return sum(layers_of_stage(segment.num_layers, stages) for segment in segments or run.model.segments)


def outer_gradients(run: Assembly) -> int:
    """Bytes of the accumulators of the outer layers, which are sharded like their work weights."""
    weights = part_of(run.plan.weights[OUTER], run.plan.master[OUTER])
    shapes = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(weights)]
    return itemsize(run, "grads") * sum(map(math.prod, shapes))


def outer_state(run: Assembly, row: Literal["master", "moments"]) -> int:
    """Bytes of the outer layers' master weights or moments on each device, in whichever memory."""
    return sum(bytes_per_device(getattr(run.plan, row)[OUTER], home) for home in HOMES)


def pieces_of_tables(run: Assembly) -> int:
    """The number of pieces of embedding and head in files; 1 if they are not there."""
    tables = InFiles((run.plan.master[OUTER], run.plan.moments[OUTER])).stacks
    return tables[0].layers if tables else 1


def matrix_layers_together(run: Assembly, t: TensorOnGpu) -> int:
    """The number of layers of a trained matrix that are updated together."""
    if run.engine.table.in_files:
        return 1
    layers_by_part = [part.stop - part.start for part in parts(run.plan.weights[t.section])]
    devices = math.prod(run.mesh.shape[axis] for axis in t.master.stored_axes)
    layers_per_stage = [layers // pipeline_stages(run.mesh) for layers in layers_by_part]
    return optim.layers_together(run.optimizer.matrices, layers_per_stage, devices)


def devices(run: Assembly, axes: Iterable[str]) -> int:
    """GPUs along these mesh axes."""
    return math.prod(run.mesh.shape[axis] for axis in axes)


def itemsize(run: Assembly, row: str) -> int:
    """Bytes of a number in a row of the placement table."""
    return jnp.dtype(getattr(run.engine.table, row).dtype).itemsize


def patterns(run: Assembly, segment: Segment | None = None) -> Patterns:
    """The variants of a segment's layers on each stage, or the kinds and variants of all layers."""
    layers = segment.variants if segment else layer_patterns(run.model)
    return patterns_of_stages(layers, pipeline_stages(run.mesh))


@functools.lru_cache(maxsize=1024)
def resident_in_rounds(model: Model, stages: int, resident: int) -> int:
    """The most of so many resident layers of a stage that cut no round of layers of several kinds in turn.

    Where a kind's weights leave the device within a round, each layer of that round is a loop of its own: unrolled, and
    with prefetched weights of its own.
    """
    stage = of_stage(model, stages)
    kinds = [{segment.name for segment in stretch} for stretch in stage.stretches]
    if len(kinds) == len(stage.segments):
        return resident
    orders = [[layer for layer in stage.order if layer.kind in of_stretch] for of_stretch in kinds]

    def loops(resident: int) -> int:
        """Counts the loops over layers."""
        ends = {segment.name: [resident - segment.start] for segment in stage.segments}
        return sum(len(loops_of(order, ends)) for order in orders)

    return next(n for n in range(resident, -1, -1) if loops(n) <= loops(0) + 1)


def groups_of(run: Assembly, microbatches: int) -> int:
    """Groups of microbatches in a step; for each, a layer's weights and accumulators are fetched once a pass."""
    return microbatches // run.engine.microbatches_per_fetch


def slots(run: Assembly, microbatches: int) -> int:
    """The number of microbatches whose residuals every stage has room for."""
    return int(SCHEDULES[run.engine.pp_schedule](microbatches, pipeline_stages(run.mesh)).in_flight.max())


def attention_again(run: Assembly) -> bool:
    """True if the backward pass computes attention again."""
    return run.engine.recompute_block or run.model.compute.recompute.att


def expert_tensors(run: Assembly, segment: Segment) -> list[TensorOnGpu]:
    """The matrices and adapters of a segment's experts, matrices first."""
    found = [t for t in blocks(run, segment) if t.param.axes[0] == EXPERTS and len(t.shape) == 3]
    return sorted(found, key=lambda t: t.param.kind is not Kind.MATRIX)


def experts_by_loop(run: Assembly, segment: Segment, t: TensorOnGpu, recipe_enabled: bool) -> str:
    """Why a scan over blocks multiplies a matrix of a segment's experts, and no kernel; see `grouped.why_by_loop`."""
    adapted = any(matrix == t.param.name for matrix, _ in adapters(segment.params))
    kind = run.model.precision, recipe_enabled, run.engine.table.weights.dtype, t.shape
    return why_by_loop(*kind, adapted=adapted, sent=run.mesh.shape.get(EXPERT, 1) > 1)


def expert_rows(run: Assembly, segment: Segment, tokens: int, *, by_loop: bool) -> tuple[int, int]:
    """(rows of a block, blocks) of a GPU's experts for so many tokens of each GPU, if tokens choose experts evenly.

    by_loop: a loop multiplies them, see `experts_by_loop`.
    """
    experts = expert_tensors(run, segment)[0].shape[0]
    choices = tokens * choices_of(segment)[1]  # of a GPU with a part of the experts, of the tokens of all
    rows = rows_of_block(choices, experts) if by_loop else ROWS
    if run.mesh.shape.get(EXPERT, 1) > 1:
        return rows, choice_pieces(choices, experts) * blocks_in_piece(choices, experts)
    return rows, number_of_blocks(choices, experts, rows)


class SegmentBytes(NamedTuple):
    """Bytes of a segment on each device."""

    weights: int  # weights of one layer, in the dtype that products compute with
    gradients: int  # gradients of one layer, in that dtype
    fetched: int  # weights of one layer, as they are all-gathered or copied to the device
    kept: int  # residuals of one layer, from the forward pass to the backward pass
    saved: int  # residuals of one layer if nothing is recomputed
    attention: int  # what attention needs besides in the backward pass of one layer
    scores: int  # attention scores, which are part of that; 0: flash attention
    # With chunks of the sequence: keys and values of all of it, less its input, which is changed in place.
    sequence: int
    received: int  # tokens of all GPUs that share experts, for which each of them has room; in `saved`
    received_sums: int  # their gradients, and float32 sums
    rows: int  # results of all rows of experts, which become sums of tokens
    expert_gradients: int  # of one layer's experts, which a loop fills while all values are in memory
    layer_state: int  # master weights, moments and gradient accumulators of one layer, in whichever memory
    grads: int  # gradient accumulators of all layers
    activations: int  # residuals of all layers

    def values(self, recompute_factor: float) -> int:
        """Bytes of values while a block is differentiated."""
        of_experts = self.received_sums + self.rows  # gone when attention is differentiated
        return int(recompute_factor * self.saved) + max(self.attention + self.sequence, of_experts)


def segment_bytes(run: Assembly, segment: Segment, x: jax.ShapeDtypeStruct, platform: str) -> SegmentBytes:
    """The `SegmentBytes` of a segment whose layers have an input like x."""
    engine = run.engine
    layers = layers_of(run, segment)
    compute = run.model.compute
    tensors = blocks(run, segment)
    packed = engine.packed
    chunks = compute.sequence_chunks
    # The backward pass has all residuals of a layer, or of one chunk, in memory at once, even if they are recomputed.
    plain = run.model.rebuild(dataclasses.replace(compute, recompute=Recompute(), sequence_chunks=1))
    B, S, D = x.shape
    chunk = jax.ShapeDtypeStruct((B, S // chunks, D), x.dtype)
    chunk_block = _block_bytes(run, plain, segment, chunk, platform, packed, chunks)
    saved = chunk_block.saved
    if plain is not run.model and not engine.recompute_block:
        saved = _block_bytes(run, run.model, segment, x, platform, packed).saved
    number = x.dtype.itemsize
    handed_on = segment.mixer.bytes_between_chunks(_on_gpu(run, chunk, chunks))
    senders = run.mesh.shape.get(EXPERT, 1) if segment.statistics else 1
    received = senders * tensor_parallel(run.mesh) * math.prod(chunk.shape) if senders > 1 else 0
    experts = expert_tensors(run, segment)
    rows = 0
    if experts and not received:  # else they are added up at once
        by_loop = any(experts_by_loop(run, segment, experts[0], v.recipe_enabled) for v in segment.variants)
        tokens = tensor_parallel(run.mesh) * math.prod(chunk.shape[:2])
        rows = number * chunk.shape[2] * math.prod(expert_rows(run, segment, tokens, by_loop=by_loop))
    kept = size(x) if engine.recompute_block else saved
    grads = sum(stored for _, stored in accumulators(run, segment))
    state = run.plan.master[segment.name], run.plan.moments[segment.name]
    return SegmentBytes(
        weights=sum(t.elements * t.itemsize for t in tensors),
        gradients=sum(t.elements * t.itemsize for t in tensors if t.trained),
        fetched=fetched_bytes(run, segment),
        kept=kept,
        saved=chunk_block.saved,
        attention=chunk_block.working,
        scores=chunk_block.scores,
        sequence=handed_on - size(x) if chunks > 1 else 0,
        received=number * received,
        received_sums=(number + 4) * received,
        rows=rows,
        expert_gradients=sum(math.prod(t.shape) * t.itemsize for t in experts if t.trained),
        layer_state=(sum(bytes_per_device(state, home) for home in HOMES) + grads) // layers,
        grads=grads,
        activations=layers * kept,
    )


def fetched_bytes(run: Assembly, segment: Segment) -> int:
    """Bytes of a layer's weights on each device, as they are all-gathered or copied there."""
    tensors = blocks(run, segment)
    # With one scale a byte a number, and the scale.
    one_scale = run.engine.table.one_scale and run.engine.table.quantises_shards
    low = [t for t in tensors if one_scale and t.is_matrix and not t.param.of_experts]
    fetched = sum(t.elements * (t.coded or t.itemsize) for t in tensors if t not in low)
    return round(fetched + sum(t.elements + 4 for t in low))


def fetched_again(run: Assembly) -> int:
    """Bytes of the layers that a pass fetches at the beginnings of its loops, forward and backward.

    Of each kind of layer, the first one of every loop but that at which a pass begins; the weights of that one were
    prefetched by the pass in the other direction.
    """
    stage = of_stage(run.model, pipeline_stages(run.mesh))
    size = 0
    for stretch in stage.stretches:
        of_stretch = {segment.name for segment in stretch}
        loops = loops_of([layer for layer in stage.order if layer.kind in of_stretch])
        for segment in stretch:
            size += (sum(segment.name in loop.layers for loop in loops) - 1) * fetched_bytes(run, segment)
    return size


def _block_bytes(
    run: Assembly,
    model: Model,
    segment: Segment,
    x: jax.ShapeDtypeStruct,
    platform: str,
    packed: bool,
    chunks: int = 1,
) -> KernelBytes:
    """The `KernelBytes` of a segment's mixer, with all residuals of its block but for its weights as saved.

    chunks: x is one of so many equal parts of a sequence, which attends to all of it.
    """
    shapes = tuple(t.shape for t in blocks(run, segment))
    structure = jax.tree.structure(segment.params)
    mesh = run.mesh if devices_per_sequence(run.mesh) > 1 or EXPERT in run.mesh.shape else None
    saved = _traced_residuals(model, segment, shapes, structure, mesh, x.shape, x.dtype)
    space = kernel_bytes(run, model, segment, x, platform, packed, chunks)
    return space._replace(saved=saved + space.saved)


def kernel_bytes(
    run: Assembly,
    model: Model,
    segment: Segment,
    x: jax.ShapeDtypeStruct,
    platform: str,
    packed: bool,
    chunks: int = 1,
) -> KernelBytes:
    """The `KernelBytes` of a segment's mixer. chunks: see `_block_bytes`."""
    window = any(variant.window for variant in segment.variants)
    how: Any = {"gpu": platform != "cpu", "packed": packed, "window": window}
    return segment.mixer.space(model.compute, _on_gpu(run, x, chunks), **how)


def _on_gpu(run: Assembly, x: jax.ShapeDtypeStruct, chunks: int) -> OnGpu:
    """The `OnGpu` of an input like x, one of so many equal parts of a sequence."""
    rows, tokens, _ = x.shape
    return OnGpu(rows, tokens, x.dtype, tensor_parallel(run.mesh), devices_per_sequence(run.mesh), chunks)


@functools.lru_cache(maxsize=1024)
def _traced_residuals(
    model: Model, segment: Segment, weights: tuple, structure, mesh: Mesh | None, shape: tuple[int, ...], dtype
) -> int:
    """Bytes of a block's residuals without its weights, for an input of this shape. Traces the block, so it is cached.

    weights, structure: shapes of the tree of weights on one device. mesh: None if devices have whole sequences, and all
    experts.

    Families build the same model for the same settings once, so models can be keys.
    """
    compute = model.compute
    # Residuals are the same with every kernel. "auto" never raises; `check_kernels` reports what is not supported.
    kernels = "xla" if compute.precision.kernels == "xla" else "auto"
    precision = dataclasses.replace(compute.precision, kernels=kernels)
    traced = model.rebuild(dataclasses.replace(compute, attention="xla", precision=precision))
    forward = next(s for s in traced.segments if s.name == segment.name).block_forward
    layer = structure.unflatten([jax.ShapeDtypeStruct(of_weight, dtype) for of_weight in weights])
    if precision.fp8:  # matrices are quantised to float8 with one scale each
        quantise = functools.partial(quantise_with_one_scale, segment.params, dtype=quantized.DTYPES["fp8"])
        layer = jax.eval_shape(quantise, layer)
    variant = next((v for v in segment.variants if v.recipe_enabled), segment.variants[0])
    x = jax.ShapeDtypeStruct(shape, dtype)

    def residuals(w, x):
        return forward(w, x, None, variant)[1]

    if mesh is not None:  # for the shapes on one device, which are all that is asked
        specs: Any = {"in_specs": jax.P(), "out_specs": jax.P()}
        residuals = jax.shard_map(residuals, mesh=mesh, check_vma=False, **specs)
    return size(jax.eval_shape(residuals, layer, x))


def shard_sizes(run: Assembly, of_class: dict, segment: Segment) -> list[int]:
    """Number of elements on one device of each parameter of one layer. of_class: the layouts of a class."""
    pairs = with_layouts(run, segment.name, of_class)
    return [math.prod(jax.NamedSharding(run.mesh, layout.stored).shard_shape(p.shape)) for p, layout in pairs]


def accumulators(run: Assembly, segment: Segment) -> list[tuple[Home, int]]:
    """(home, bytes on each device) of the accumulators of each trained parameter, of all layers."""
    layouts = run.engine.layouts.grads
    bytes_per_element = itemsize(run, "grads") * layers_of(run, segment)
    homes = [layout.home for _, layout in with_layouts(run, segment.name, layouts)]
    return [(home, bytes_per_element * n) for home, n in zip(homes, shard_sizes(run, layouts, segment), strict=True)]


def size(tree) -> int:
    """Bytes of a tree of shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
