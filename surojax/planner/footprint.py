"""Estimates the memory of a run before anything is compiled.

The bytes of the state are exact: they are read from its plan. What a step allocates in addition is computed from
shapes: gradient accumulators, saved activations, and a working space. The working space is the largest of three: the
backward pass of one block, one slice of logits, and the optimizer update of one layer.

Ratio of the estimate to `compiled.memory_analysis()` of the real step (arguments and temporaries; jax 0.12, 2026-11):

* XLA's GPU compiler, on a machine without a GPU: configs/llama{1b,7b}.py and qwen32b.py on RTX 4090, llama70b.py on
  H100, on 1 to 8 GPUs, ZeRO 1 and 3, with nothing, one class, the state, or everything offloaded, one to four
  microbatches a step and one or two a fetch: 15 variants, 0.97 to 1.09. With sequence_chunks, 7B and 8B at 32,768 to
  131,072 tokens in 4 to 32 chunks: 8 variants, 0.93 to 1.15; 8B at 1,048,576 tokens in 8 chunks on 8 H200, divided
  over cp (packed or not), tp, or both: 4 variants, 0.96 to 1.16.
* CPU, 32 variants of a 5M-parameter model on 1 and 4 virtual devices: 0.95 to 1.24. tests/test_footprint.py compares
  nine of them with the present engine: between 0.9 and 1.4.

Not counted: cuDNN's workspaces and fragmentation (a few hundred MiB on a GPU), and the copy of master weights and
moments in host memory while a checkpoint is written.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax import assembly
from surojax.config import fields as configs
from surojax.config.fields import Config
from surojax.memory.host import parts
from surojax.models.attention import chosen
from surojax.models.model import Model, Recompute, Segment, runs
from surojax.numerics import quantize
from surojax.numerics.base_formats import is_coded, map_arrays
from surojax.numerics.quantize import is_quantized
from surojax.parallel.schedule import SCHEDULES, layers_of_stage
from surojax.placement.home import DEVICE, HOMES, HOST, NVME, Home
from surojax.placement.layout import Layout
from surojax.placement.mesh import abstract_mesh, devices_per_sequence, pipeline_stages, shards, tensor_parallel
from surojax.placement.param import OUTER, Kind, Param, part_of
from surojax.placement.table import Mesh
from surojax.planner.advice import Memory
from surojax.planner.shares import layers_together
from surojax.planner.stages import patterns, slots
from surojax.planner.traffic import Batch, batch_of, last_layer_once
from surojax.step.stage_layers import in_lockstep
from surojax.step.state_plan import bytes_per_device
from surojax.step.weights import comes_in_pairs, quantise_with_one_scale

POOL = 0.95  # largest fraction of a GPU's memory that JAX can use: the driver needs the remainder
DEFAULT_POOL = 0.75  # fraction that JAX uses by default
POOL_SETTING = f"XLA_PYTHON_CLIENT_MEM_FRACTION={POOL}"  # environment variable that sets the fraction
NVME_LAYERS = 4  # most layers in host memory: a prefetched one, the current one before and after its update, a written


def estimate(run: assembly.Assembly, batch: Batch, *, platform: str = "gpu") -> dict[str, int]:
    """Bytes in device memory per device and class.

    See `estimate_host` for host memory. platform: "gpu" or "cpu". On CPUs XLA multiplies in float32 and fuses less, and
    host memory is also the devices' memory, so both are counted.
    """
    homes = (DEVICE, HOST) if platform == "cpu" else (DEVICE,)
    return {k: sum(v[home.name] for home in homes) for k, v in by_class(run, batch, platform).items()}


def estimate_host(run: assembly.Assembly, batch: Batch) -> dict[str, int]:
    """Bytes of pinned host memory per GPU and class; empty if nothing is offloaded."""
    found = {k: v[HOST.name] for k, v in by_class(run, batch, "gpu").items()}
    return {k: size for k, size in found.items() if size}


def host_temporaries(run: assembly.Assembly, batch: Batch) -> int:
    """Bytes of pinned host memory per GPU that a step allocates: gradient accumulators and saved activations."""
    need = by_class(run, batch, "gpu")
    return need["gradients"][HOST.name] + need["activations"][HOST.name]


def by_class(run: assembly.Assembly, batch: Batch, platform: str) -> dict[str, dict[str, int]]:
    """Bytes per device of each class in each memory: {class: {"device": bytes, "host": bytes}}."""
    plan = run.plan
    engine = run.engine
    model = run.model
    table = engine.table
    work = table.weights
    grads = table.grads
    tensor = tensor_parallel(run.mesh)
    stages = pipeline_stages(run.mesh)
    per_sequence = devices_per_sequence(run.mesh)
    x = jax.ShapeDtypeStruct((batch.sequences, batch.sequence_len // per_sequence, model.hidden_size), work.dtype)
    x_bytes = _bytes(x)
    segments = [segment_bytes(run, segment, x, platform) for segment in model.segments]
    layer_bytes = max(segment.weights for segment in segments)
    gradient_bytes = max(segment.gradients for segment in segments)
    fetched = max(segment.fetched for segment in segments)
    kept = max(segment.kept for segment in segments)
    block_grads = sum(segment.grads for segment in segments)
    # Accumulators of outer layers are sharded like their work weights.
    outer = jax.tree.leaves(part_of(plan.weights[OUTER], plan.master[OUTER]))
    outer_size = sum(math.prod(w.sharding.shard_shape(w.shape)) for w in outer)
    outer_grads = jnp.dtype(grads.dtype).itemsize * outer_size

    itemsize = 4 if platform == "cpu" else jnp.dtype(work.dtype).itemsize
    logits = itemsize * (batch.tokens // engine.lmhead_chunks) * model.vocab_size // (per_sequence * stages)
    capped = logits if model.logit_softcap else 0  # the logits before the softcap are in memory too
    vocabulary = model.vocab_size // (tensor * stages) // (shards(run.mesh) if table.outer.sharded else 1)
    head_gradient = itemsize * vocabulary * model.hidden_size * model.outer_params[model.head].trainable
    head = (
        capped + logits + max(logits, head_gradient)
    )  # first the logits with their gradient, then with the head's gradient
    group = engine.microbatches_per_fetch
    activations = group * sum(segment.activations for segment in segments)
    if stages > 1:  # step/pipeline.py; a stack in host memory has an entry more
        activations = slots(run, batch.microbatches) * (activations + table.residuals.home.streamed * kept)
        activations += in_lockstep(model) * (1 + table.residuals.home.streamed) * kept

    def by_home(tree) -> dict[str, int]:
        """Bytes of a planned tree in each memory."""
        return {home.name: bytes_per_device(tree, home) for home in (DEVICE, HOST)}

    def only_in(home: Home, size: int) -> dict[str, int]:
        """Bytes in each memory of a class that is stored in one of them."""
        return {DEVICE.name: 0, HOST.name: 0} | {home.name: size}

    in_file = bytes_per_device(plan, NVME)
    layer_state = max(segment.layer_state for segment in segments)
    layers = [layers_of_stage(segment.num_layers, stages) for segment in model.segments]
    layer_grads = [segment.grads // n for segment, n in zip(segments, layers, strict=True)]
    saved_on_device = 0 if table.residuals.home.streamed else activations
    if platform == "cpu" and run.mesh.size > 1 and not (grads.sharded and table.outer.sharded):
        # XLA's CPU compiler allocates separate activations for the last group (gradients.peels_last_group).
        activations *= 2
    quants = [x for x in jax.tree.leaves(plan.weights, is_leaf=is_quantized) if is_quantized(x)]
    # Bytes in flight while the head computes: the prefetched weights of a layer.
    during_head = fetched if work.sharded or table.streams_weights else 0
    # Bytes in flight while a layer computes: its weights, and the prefetched weights of the next layer.
    during_layer = 2 * during_head
    during_head += segments[-1].saved if last_layer_once(run) else 0
    # Every other loop over layers has prefetched weights of its own.
    # Of the patterns of stages (step/stage_layers.py), each stage runs the loops of one.
    of_patterns = [[runs(pattern) for pattern in patterns(run, segment).patterns] for segment in model.segments]
    loops = sum(max(map(len, of_segment)) for of_segment in of_patterns) + bool(work.resident)
    during_layer += (loops - 1) * fetched if during_head else 0
    during_layer += layer_bytes if table.base_format else 0  # the numbers of its weights, beside their codes
    in_loops = [x for of_segment in of_patterns for of_pattern in of_segment for x in of_pattern]
    if work.home.streamed and not work.sharded and any(comes_in_pairs(x.stop - x.start, x.period) for x in in_loops):
        during_layer += 3 * group * x_bytes  # activations of the other layer of a backward body
    # Shards of the layer after the next are copied from the host before they are all-gathered.
    during_layer += fetched // shards(run.mesh) if work.sharded and table.streams_weights else 0
    if table.quants.dtype and platform == "cpu":  # the 8-bit matrices that the weights are dequantised from
        during_layer += max(segment.size for segment in model.segments)
    exchanged = {"reduce_scatter": 0, "all_to_all": 2 * gradient_bytes, "int8": gradient_bytes}[table.reduce]
    exchanged = exchanged if shards(run.mesh) > 1 else 0  # gradients of a layer, sent and received
    if grads.home.streamed:
        # In flight: accumulators of the previous layer to the host, and of the last layer of every other segment. Those
        # of this layer that come to the device take their place, or that of gradients before they are reduced.
        during_layer += sum(layer_grads)
        if batch.microbatches > group:  # while the head computes: those of the previous microbatch
            during_layer += max(layer_grads) if grads.sharded else 0
            during_head += sum(layer_grads)
    elif group > 1:  # the sums of a layer between two microbatches
        during_layer += max(layer_grads)
    if table.residuals.home.streamed:
        # Residuals of this layer and of the next, of each microbatch of a group. The input of a recomputed block takes
        # the place of the one before it. If a block is not recomputed, `saved` below includes those of a microbatch.
        in_flight = 1 + group if engine.recompute_block else 2 * group if group > 1 else 1
        during_layer += in_flight * kept
    # The backward pass of a block first has all values of its forward pass in memory, then all its gradients. If
    # gradients are sharded, each is freed when it is reduced. The factors are fitted to the measurements above.
    recompute_factor = (2 if platform == "cpu" else 1.1) if engine.recompute_block else 1
    values = max(segment.values(recompute_factor) for segment in segments)
    # The layer's weights are freed by then. A gradient is freed when it is reduced, or added to sums on the device.
    gradients = max(gradient_bytes // (2 if grads.sharded or grads.home.streamed else 1), exchanged)
    block = values + layer_bytes + gradient_bytes if platform == "cpu" else max(values, gradients)
    update = _update_bytes(run, layer_state) - saved_on_device
    if in_file:  # all tensors of a layer are updated by one program, after the update of the outer layers
        update = layer_state + layer_bytes - outer_grads - saved_on_device
    if engine.overlap_update:
        update = _overlapped_update_bytes(segments)
    working_space = max(block + during_layer, head + during_head, update) + 2 * x_bytes
    if stages > 1:  # activations and gradients that come from the neighbours, and gradients from the head
        head_slots = int(SCHEDULES[engine.pp_schedule](batch.microbatches, stages).in_flight[-1])
        working_space += 2 * x_bytes + head_slots * x_bytes // stages
        if table.streams_weights:  # what each loop begins with, in both directions: a layer, or shards of two
            begins = {l for x in in_loops for l in (x.start, x.stop - 1)}
            working_space += len(begins) * (2 * fetched // shards(run.mesh) if work.sharded else fetched)
    unquantised = [x for x in jax.tree.leaves(plan.weights, is_leaf=is_quantized) if not is_quantized(x)]
    of_grads = only_in(grads.home, block_grads)
    of_grads[DEVICE.name] += outer_grads
    found = {"weights": by_home(unquantised)}
    if quants:
        found["quants"] = by_home(quants)
    found |= {
        "master": by_home(plan.master),
        "moments": by_home((plan.moments, plan.history)),
        "gradients": of_grads,
        "activations": only_in(table.residuals.home, activations),
        "working space": only_in(DEVICE, working_space),
    }
    if in_file:
        found["layers from files"] = only_in(HOST, NVME_LAYERS * in_file // layers_of_stage(model.num_layers, stages))
    return found


class SegmentBytes(NamedTuple):
    """Bytes of a segment on each device."""

    weights: int  # weights of one layer, in the dtype that products compute with
    gradients: int  # gradients of one layer, in that dtype
    fetched: int  # weights of one layer, as they are all-gathered or copied to the device
    kept: int  # residuals of one layer, from the forward pass to the backward pass
    saved: int  # residuals of one layer if nothing is recomputed
    attention: int  # what attention needs besides in the backward pass of one layer
    scores: int  # attention scores, which are part of that; 0: flash attention
    # With chunks of the sequence: keys and values of all of it, less its input, which is changed in place. In a
    # tensor-parallel group also a whole chunk's term of the input's gradient, before it is reduce-scattered.
    sequence: int
    sums: int  # with chunks: gradients of keys and values, their float32 sums, and the copy that a chunk reads
    layer_state: int  # master weights, moments and gradient accumulators of one layer, in whichever memory
    grads: int  # gradient accumulators of all layers
    activations: int  # residuals of all layers

    def values(self, recompute_factor: float) -> int:
        """Bytes of values while a block is differentiated. With chunks, the MLP's and the attention's come in turn."""
        return max(int(recompute_factor * self.saved) + self.attention, self.sums) + self.sequence


def segment_bytes(run: assembly.Assembly, segment: Segment, x: jax.ShapeDtypeStruct, platform: str) -> SegmentBytes:
    """The `SegmentBytes` of a segment whose layers have an input like x."""
    engine = run.engine
    layers = layers_of_stage(segment.num_layers, pipeline_stages(run.mesh))
    compute = run.model.compute
    layer = _in_products(run, segment)
    fetched = _in_fp8(segment.params, layer) if engine.table.one_scale else layer
    fetched = _in_base_format(run, segment, layer) if engine.table.base_format else fetched
    packed = engine.packed
    chunks = compute.sequence_chunks
    # The backward pass has all residuals of a layer, or of one chunk, in memory at once, even if they are recomputed.
    plain = run.model.rebuild(dataclasses.replace(compute, recompute=Recompute(), sequence_chunks=1))
    B, S, D = x.shape
    chunk = jax.ShapeDtypeStruct((B, S // chunks, D), x.dtype)
    of_chunk = _block_bytes(run, plain, segment, chunk, platform, packed, chunks)
    saved = of_chunk.saved
    if plain is not run.model and not engine.recompute_block:
        saved = _block_bytes(run, run.model, segment, x, platform, packed).saved
    itemsize = x.dtype.itemsize
    keys = max(segment.heads.key_value, devices_per_sequence(run.mesh))  # devices that share a head have it each
    numbers = 2 * B * S * keys * segment.heads.channels  # of keys and values
    tensor = tensor_parallel(run.mesh)
    of_group = tensor * _bytes(chunk) if tensor > 1 else 0
    kept = _bytes(x) if engine.recompute_block else saved
    sizes = _shard_sizes(run, engine.layouts.grads[segment.name], segment)
    grads = jnp.dtype(engine.table.grads.dtype).itemsize * layers * sum(sizes)
    state = run.plan.master[segment.name], run.plan.moments[segment.name]
    return SegmentBytes(
        weights=_bytes(layer),
        gradients=_bytes(part_of(layer, segment.trained_params)),
        fetched=_bytes(fetched),
        kept=kept,
        saved=of_chunk.saved,
        attention=of_chunk.attention,
        scores=of_chunk.scores,
        sequence=itemsize * numbers - _bytes(x) + of_group if chunks > 1 else 0,
        sums=(4 + 3 * itemsize) * numbers if chunks > 1 else 0,
        layer_state=(sum(bytes_per_device(state, home) for home in HOMES) + grads) // layers,
        grads=grads,
        activations=layers * kept,
    )


def _update_bytes(run: assembly.Assembly, layer_state: int) -> int:
    """Bytes that an update of one layer at a time takes.

    Its largest tensor is in memory before and after the update. If part of its state is copied from the host, so are
    the next one, on its way to the device, and the one before, on its way back. If all layers are updated at once, in
    place, less is needed. layer_state: bytes of a layer's master weights, moments and gradients on this device.
    """
    segments = run.model.segments
    sizes = [_shard_sizes(run, run.engine.layouts.master[segment.name], segment) for segment in segments]
    table = run.engine.table
    moved = any(row.home.streamed and not row.home.in_file for row in (table.master, table.moments, table.grads))
    together = 1
    if run.optimizer.matrices.apply_to_group:
        together = max(
            layers_together(run, segment, layout)
            for segment in segments
            for layout in jax.tree.leaves(run.engine.layouts.master[segment.name])
        )
    size = max((4 if moved else 2) * together * layer_state * max(of_layer) // sum(of_layer) for of_layer in sizes)
    if run.optimizer.matrices.apply_to_group:
        # The whole matrix in the work dtype, three float32 copies of it, and three float32 square matrices.
        params = jax.tree.leaves([segment.params for segment in segments])
        largest = max((p.shape for p in params if p.kind is Kind.MATRIX), key=math.prod)
        size += math.prod(largest) * (12 + jnp.dtype(table.weights.dtype).itemsize) + 3 * 4 * min(largest) ** 2
    return size


def _overlapped_update_bytes(segments: list["SegmentBytes"]) -> int:
    """Bytes that a forward pass takes which updates the layers.

    Layers in flight: one on its way back, one updated, one to update, one on its way to the device. The factors are
    fitted to compiled steps of 7B on an RTX 4090 and an H200.
    """
    return max(int(3.5 * segment.layer_state + 0.7 * segment.saved) for segment in segments)


class BlockBytes(NamedTuple):
    """Bytes of one block on each device. See `SegmentBytes`."""

    saved: int  # residuals, without its weights
    attention: int
    scores: int


def _block_bytes(
    run: assembly.Assembly,
    model: Model,
    segment: Segment,
    x: jax.ShapeDtypeStruct,
    platform: str,
    packed: bool,
    chunks: int = 1,
) -> BlockBytes:
    """The `BlockBytes` of a segment's block.

    chunks: x is one of so many equal parts of a sequence, which attends to all of it.
    """
    B, S, _ = x.shape
    itemsize = x.dtype.itemsize
    compute = model.compute
    heads_of = segment.heads
    tensor = tensor_parallel(run.mesh)
    per_sequence = devices_per_sequence(run.mesh)
    shapes, structure = jax.tree.flatten(jax.tree.map(lambda w: w.shape, _in_products(run, segment)), is_leaf=_is_shape)
    mesh = run.mesh if per_sequence > 1 else None
    saved = _traced_residuals(model, segment, tuple(shapes), structure, mesh, x.shape, x.dtype)
    heads = B * S * heads_of.query  # in a group: of whole sequences, a part of the heads
    kind: Any = {"gpu": platform != "cpu", "packed": packed, "softcap": heads_of.softcapped}
    if in_pieces := per_sequence > tensor and compute.cp_method != "ulysses":
        kind |= {"piece": S * tensor // 2, "window": any(v.window for v in segment.variants)}
    flash = chosen(compute.attention, x.dtype, heads_of.channels, **kind)
    if flash != "xla" and in_pieces:
        # Sums of results and of gradients are float32; a block of keys and values comes while one is computed with. Our
        # kernel also has float32 gradients of a pair, and reads transposed copies.
        keys = max(heads_of.key_value, tensor)
        more = 2 * (heads_of.query + keys) * (itemsize + 4) if flash == "mosaic" else 0
        sums = 2 * heads_of.query * 4 + 4 * keys * (itemsize + 4)
        return BlockBytes(saved, B * S * (sums + more) * heads_of.channels, scores=0)
    if flash != "xla":
        # Flash attention saves its output and one float32 sum per row, and no scores. Ours reads transposed copies of
        # queries, keys and the gradient of its output.
        keys = chunks * max(heads_of.key_value, tensor if chunks == 1 else per_sequence)
        copied = (2 * heads_of.query + keys) * heads_of.channels if flash == "mosaic" else 0
        kept = 0 if compute.recompute.att else heads * (heads_of.channels * itemsize + 4)
        return BlockBytes(saved + kept, B * S * copied * itemsize, scores=0)
    keys = S * chunks * per_sequence
    if in_pieces:
        keys = 2 * S * tensor  # scores of four pairs, four pieces each (compiled for an H100: 16 to 17 pieces)
    scores = (4 if platform == "cpu" else 2) * heads * keys * 4
    return BlockBytes(saved, scores, scores)


@functools.lru_cache(maxsize=1024)
def _traced_residuals(
    model: Model, segment: Segment, weights: tuple, structure, mesh: Mesh | None, shape: tuple[int, ...], dtype
) -> int:
    """Bytes of a block's residuals without its weights, for an input of this shape. Traces the block, so it is cached.

    weights, structure: shapes of the tree of weights on one device. mesh: None if devices have whole sequences.

    Families build the same model for the same settings once, so models can be keys.
    """
    compute = model.compute
    # Residuals are the same with every kernel. "auto" never raises; `check_kernels` reports what is not supported.
    kernels = "xla" if compute.precision.kernels == "xla" else "auto"
    precision = dataclasses.replace(compute.precision, kernels=kernels)
    traced = model.rebuild(dataclasses.replace(compute, attention="xla", precision=precision))
    forward = next(s for s in traced.segments if s.name == segment.name).block_forward
    layer = structure.unflatten([jax.ShapeDtypeStruct(of_weight, dtype) for of_weight in weights])
    layer = _in_fp8(segment.params, layer) if precision.fp8 else layer
    variant = next((v for v in segment.variants if v.recipe_enabled), segment.variants[0])
    x = jax.ShapeDtypeStruct(shape, dtype)

    def residuals(w, x):
        return forward(w, x, None, variant)[1]

    if mesh is not None:  # for the shapes on one device, which are all that is asked
        specs: Any = {"in_specs": jax.P(), "out_specs": jax.P()}
        residuals = jax.shard_map(residuals, mesh=mesh, check_vma=False, **specs)
    return _bytes(jax.eval_shape(residuals, layer, x))


def _in_products(run: assembly.Assembly, segment: Segment):
    """The shapes of a layer's weights on one device, as products read them."""

    def one(param: Param, layout: Layout) -> jax.ShapeDtypeStruct:
        shape = jax.NamedSharding(run.mesh, layout.computed).shard_shape(param.shape)
        return jax.ShapeDtypeStruct(shape, param.dtype or run.engine.table.weights.dtype)

    return jax.tree.map(one, segment.params, run.engine.layouts.weights[segment.name])


def _is_shape(x) -> bool:
    return isinstance(x, tuple)


def needs(c: Config, n: int, platform: str, *, in_a_machine: int | None = None) -> Memory:
    """The `Memory` that a run on n devices needs; nothing is built. On CPUs all of it counts as device memory.

    in_a_machine: the devices that share host memory; None: all n.
    """
    mesh = abstract_mesh(n, **configs.mesh_sizes(c) | {"dp_shard_size": -1})
    rows = by_class(assembly.from_config(c, mesh, total_steps=1000), batch_of(c), platform)
    device, host = (sum(row[home] for row in rows.values()) for home in ("device", "host"))
    return Memory(device + host, 0) if platform == "cpu" else Memory(device, (in_a_machine or n) * host)


def needed(c: Config, n: int, platform: str) -> int:
    """Bytes of device memory that a run needs on each of n devices."""
    return needs(c, n, platform).device


def _in_fp8(params, layer):
    """The shapes of a layer after its matrices are quantised to float8 with one scale each."""
    return jax.eval_shape(lambda w: quantise_with_one_scale(params, w, quantize.DTYPES["fp8"]), layer)


def _in_base_format(run: assembly.Assembly, segment: Segment, layer):
    """The shapes of a layer's weights on one device when they are gathered, frozen matrices in the base's format."""
    stack = parts(run.plan.weights[segment.name])[0].stack

    def one(x: jax.ShapeDtypeStruct, planned, layout: Layout):
        if not is_coded(planned):
            return x
        computed = jax.NamedSharding(run.mesh, layout.computed)

        def on_device(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(computed.shard_shape(array.shape[1:]), array.dtype)

        return map_arrays(planned, on_device, lambda array: jax.ShapeDtypeStruct((), array.dtype))

    return jax.tree.map(one, layer, stack, run.engine.layouts.weights[segment.name])


def _shard_sizes(run: assembly.Assembly, of_class, segment: Segment) -> list[int]:
    """Number of elements on one device of each trained parameter of one layer. of_class: the layouts of a class."""
    pairs = zip(jax.tree.leaves(segment.trained_params), jax.tree.leaves(of_class), strict=True)
    return [math.prod(jax.NamedSharding(run.mesh, layout.stored).shard_shape(p.shape)) for p, layout in pairs]


def _bytes(tree) -> int:
    """Bytes of a tree of shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
