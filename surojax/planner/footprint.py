"""Estimates the memory of a run before anything is compiled.

The bytes of the state are exact: they are read from its plan. What a step allocates in addition is computed from
shapes: gradient accumulators, saved activations, and a working space. The working space is the largest of four: the
backward pass of one block, one slice of logits, a sharded embedding, and the optimizer update of one layer.

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

import math

import jax

from surojax.assembly.assemble import Assembly
from surojax.assembly.from_config import from_config
from surojax.config import fields as configs
from surojax.config.fields import Config
from surojax.memory.in_file import has_room
from surojax.models.order import repeating
from surojax.numerics.quantized import is_quantized
from surojax.objectives.teacher_states import TEACHER_HEAD
from surojax.offloads import IN_SLOTS, TO_FILES
from surojax.parallel.schedule import SCHEDULES
from surojax.placement.home import DEVICE, HOMES, HOST, NVME, Home
from surojax.placement.mesh import abstract_mesh, devices_per_sequence, pipeline_stages, shards, tensor_parallel
from surojax.placement.param import OUTER
from surojax.placement.table import kept_in_memory
from surojax.planner import layer_sizes
from surojax.planner.amounts import Memory
from surojax.planner.gpus import POOL
from surojax.planner.layer_sizes import SegmentBytes, itemsize, segment_bytes, shard_sizes, size
from surojax.planner.traffic import BatchShape, batch_of
from surojax.step import passes
from surojax.step.layer_gradients import LAYERS_IN_FLIGHT
from surojax.step.state_plan import bytes_per_device
from surojax.step.stream import comes_in_pairs

DEFAULT_POOL = 0.75  # fraction that JAX uses by default
POOL_SETTING = f"XLA_PYTHON_CLIENT_MEM_FRACTION={POOL}"  # environment variable that sets the fraction
HOST_POOL = 0.9  # largest part of a machine's host memory to pin: the rest is for the system, data, and checkpoints
NVME_LAYERS = 4  # most layers in host memory: a prefetched one, the current one before and after its update, a written

type Rows = dict[str, dict[str, int]]  # bytes per device by class of tensors and by memory, see `by_class`


def assembly(c: Config, n: int | None = None) -> Assembly:
    """The parts of a run of a config, on n devices; None: on those that it names. Nothing is built.

    Raises ConfigError if its settings do not go together.
    """
    axes = configs.mesh_sizes(c) if n is None else configs.mesh_sizes(c) | {"dp_shard_size": -1}
    return from_config(c, abstract_mesh(n or c.gpus, **axes), total_steps=1000)


def needs(c: Config, n: int, platform: str, *, in_a_machine: int | None = None) -> Memory:
    """The `Memory` that a run on n devices needs. in_a_machine: the devices that share host memory; None: all n."""
    return memory(by_class(assembly(c, n), batch_of(c), platform), n, in_a_machine or n, platform)


def memory(rows: Rows, n: int, in_a_machine: int, platform: str) -> Memory:
    """The `Memory` that classes of tensors take on n devices. On CPUs host memory counts as device memory."""
    device, host, files = (sum(row[home.name] for row in rows.values()) for home in HOMES)
    return Memory(device + host, 0, n * files) if platform == "cpu" else Memory(device, in_a_machine * host, n * files)


def estimate(run: Assembly, batch: BatchShape, *, platform: str = "gpu") -> dict[str, int]:
    """Bytes in device memory per device and class.

    See `estimate_host` for host memory. platform: "gpu" or "cpu". On CPUs XLA multiplies in float32 and fuses less, and
    host memory is also the devices' memory, so both are counted.
    """
    homes = (DEVICE, HOST) if platform == "cpu" else (DEVICE,)
    return {k: sum(v[home.name] for home in homes) for k, v in by_class(run, batch, platform).items()}


def estimate_host(run: Assembly, batch: BatchShape) -> dict[str, int]:
    """Bytes of pinned host memory per GPU and class; empty if nothing is offloaded."""
    sizes = {k: v[HOST.name] for k, v in by_class(run, batch, "gpu").items()}
    return {k: size for k, size in sizes.items() if size}


def host_temporaries(run: Assembly, batch: BatchShape) -> int:
    """Bytes of pinned host memory per GPU that a step allocates: gradient accumulators and saved activations."""
    rows = by_class(run, batch, "gpu")
    return rows["grads"][HOST.name] + rows["residuals"][HOST.name]


def results(run: Assembly, batch: BatchShape) -> int:
    """Bytes of device memory that a program of a step returns beside its arguments: sums of gradients, which other
    programs read if state is in files."""
    table = run.engine.table
    return by_class(run, batch, "gpu")["grads"][DEVICE.name] if table.in_files and not table.by_layer else 0


def by_class(run: Assembly, batch: BatchShape, platform: str) -> Rows:
    """Bytes per device of each class of tensors in each memory: {class: {"device", "host", "nvme": bytes}}.

    Classes are the rows of the placement table, and what is on no row: "working space", and "layers from files", which
    pass through host memory. Rows of the state are read from its plan.
    """
    plan = run.plan
    table = run.engine.table
    model = run.model
    sequence_len = batch.sequence_len // devices_per_sequence(run.mesh)
    x = jax.ShapeDtypeStruct((batch.sequences, sequence_len, model.channels.all), table.weights.dtype)
    segments = [segment_bytes(run, segment, x, platform) for segment in model.segments]
    outer_grads = layer_sizes.outer_gradients(run)
    residuals = _residuals(run, batch, segments)
    on_device = 0 if table.residuals.home.streamed else residuals
    space = working_space(
        run, batch, platform, segments, x_bytes=size(x), kept_bytes=on_device, outer_grads=outer_grads
    )
    if platform == "cpu" and run.mesh.size > 1 and not (table.grads.sharded and table.outer.sharded):
        # XLA's CPU compiler allocates separate activations for the last group (gradients.peels_last_group).
        residuals *= 2
    weights = dict(plan.weights)
    outer = weights.pop(OUTER)
    work = jax.tree.leaves(weights, is_leaf=is_quantized)
    grads = _in(DEVICE, outer_grads)
    for segment in model.segments:
        for home, stored in layer_sizes.accumulators(run, segment):
            grads[home.name] += stored
    rows = {
        "weights": _by_home([x for x in work if not is_quantized(x) and has_room(x)]),
        "quants": _by_home([x for x in work if is_quantized(x)]),
        "outer": _by_home(outer),
        "grads": grads,
        "master": _by_home(plan.master),
        "moments": _by_home((plan.moments, plan.history)),
        "residuals": _in(table.residuals.home, residuals),
        "working space": _in(DEVICE, space),
    }
    tables = bytes_per_device((plan.master[OUTER], plan.moments[OUTER]), NVME)
    in_flight = [NVME_LAYERS * tables // layer_sizes.pieces_of_tables(run)]
    for segment, sizes in zip(model.segments, segments, strict=True):
        state = bytes_per_device([tree[segment.name] for tree in (plan.weights, plan.master, plan.moments)], NVME)
        grads = sum(stored for home, stored in layer_sizes.accumulators(run, segment) if home.in_file)
        share = sizes.activations / sum(x.activations for x in segments)
        of_step = grads + round(share * rows["residuals"][NVME.name])
        of_layers = NVME_LAYERS * state + LAYERS_IN_FLIGHT * of_step
        in_flight.append(of_layers // layer_sizes.layers_of(run, segment))
    rows["layers from files"] = _in(HOST, max(in_flight))
    in_slots = IN_SLOTS if table.slots > 1 else ()
    stored = {name: rows[name][NVME.name] for name in TO_FILES if name not in in_slots}
    for name, kept in kept_in_memory(table.files_in_memory / run.mesh.size, stored).items():
        rows[name][NVME.name] -= kept
        rows[name][HOST.name] += kept
    for name, outer in zip(in_slots, (plan.moments[OUTER], plan.master[OUTER]), strict=False):
        in_memory = bytes_per_device(outer, DEVICE) + bytes_per_device(outer, HOST)
        rows[name][NVME.name] = table.slots * (rows[name][NVME.name] + in_memory)
    if not table.quants.dtype:
        del rows["quants"]
    return rows


def _residuals(run: Assembly, batch: BatchShape, segments: list[SegmentBytes]) -> int:
    """Bytes of the residuals of all layers: of a group of microbatches, or of all that a stage has in flight."""
    engine = run.engine
    residual_bytes = engine.microbatches_per_fetch * sum(segment.activations for segment in segments)
    if pipeline_stages(run.mesh) == 1:
        return residual_bytes
    kept = max(segment.kept for segment in segments)  # step/pipeline.py; a stack in host memory has an entry more
    in_host = engine.table.residuals.home.streamed
    return layer_sizes.slots(run, batch.microbatches) * (residual_bytes + in_host * kept)


def _by_home(tree) -> dict[str, int]:
    """Bytes of a planned tree in each memory."""
    return {home.name: bytes_per_device(tree, home) for home in HOMES}


def _in(home: Home, size: int) -> dict[str, int]:
    """Bytes in each memory of a class that is stored in this one."""
    return {each.name: size * (each == home) for each in HOMES}


def working_space(
    run: Assembly,
    batch: BatchShape,
    platform: str,
    segments: list[SegmentBytes],
    *,
    x_bytes: int,
    kept_bytes: int,
    outer_grads: int,
) -> int:
    """Bytes that a step allocates on each device beside gradient accumulators and saved activations: the most of the
    backward pass of one block, of the head and of the embedding, each with what is in flight then, and of the update.

    segments: of the model. x_bytes: of the input of a layer. kept_bytes: of the activations that are saved in device
    memory; they are gone when layers are updated. outer_grads: of the accumulators of outer layers.
    """
    engine = run.engine
    in_layer, of_stages, prefetched = _in_flight(run, batch, platform, segments, x_bytes)
    layer_state = max(segment.layer_state for segment in segments)
    if engine.overlap_update and not engine.table.in_files:
        # Layers in flight: one on its way back, one updated, one to update, one on its way to the device. The factors
        # are fitted to compiled steps of 7B on an RTX 4090 and an H200.
        update = max(int(3.5 * segment.layer_state + 0.7 * segment.saved) for segment in segments)
        update += _other_kinds(run, segments)
    elif bytes_per_device(run.plan, NVME):
        # All tensors of a layer are updated by one program, after the update of the outer layers.
        update = layer_state + max(segment.weights for segment in segments) - outer_grads - kept_bytes
    else:
        update = _update_bytes(run, layer_state) - kept_bytes
    block = _block_backward(run, platform, segments)
    embedding = _embedding(run, segments, x_bytes)
    early = min(engine.table.device_memory, layer_state) if engine.table.in_files else 0  # file_step.on_their_way
    head = _head(run, batch, platform) + prefetched
    return max(block + in_layer, head, embedding, update) + 2 * x_bytes + of_stages + early


def _other_kinds(run: Assembly, segments: list[SegmentBytes]) -> int:
    """Bytes of layers of the other segments of a stretch while one's are updated, with `overlap_update`.

    Each has layers of its own on their way (step/overlap.py): one with its state before the update, one with that after
    it, and the gathered weights of that one.
    """
    on_way = {s.name: 2 * x.layer_state + x.fetched for s, x in zip(run.model.segments, segments, strict=True)}
    of_stretches = [[on_way[segment.name] for segment in stretch] for stretch in run.model.stretches]
    return max(sum(sizes) - max(sizes) for sizes in of_stretches)


def _in_flight(
    run: Assembly, batch: BatchShape, platform: str, segments: list[SegmentBytes], x_bytes: int
) -> tuple[int, int, int]:
    """Bytes on their way while a layer computes, at any time between stages, and while the head computes: the weights
    that each loop begins with, and the accumulators that a backward pass does. By the lanes of the backward pass.

    A lane has a layer for each stage of its way: weights read ahead, gradients written late, residuals read ahead.
    """
    table = run.engine.table
    group = run.engine.microbatches_per_fetch
    stages = pipeline_stages(run.mesh)
    declared = passes.backward_pass(run.engine.table)
    weights, grads, residuals = (declared.lane(row) for row in ("weights", "grads", "residuals"))
    largest = max(segments, key=lambda segment: segment.fetched)
    # The loops over layers of each segment, and there of each pattern (step/stage_layers.py); a stage runs one pattern.
    loops = [
        [repeating(pattern) for pattern in layer_sizes.patterns(run, segment).patterns]
        for segment in run.model.segments
    ]
    all_loops = [loop for of_segment in loops for of_pattern in of_segment for loop in of_pattern]
    layer = prefetched = 0
    if weights.ahead:
        # This layer and the next; every other loop has prefetched weights of its own.
        prefetched = bool(table.weights.resident) * largest.fetched
        prefetched += sum(max(map(len, of_segment)) * x.fetched for of_segment, x in zip(loops, segments, strict=True))
        # Of layers further ahead, shards that are still to be gathered.
        layer += largest.fetched + prefetched + (weights.ahead - 1) * (largest.fetched // shards(run.mesh))
    paired = any(comes_in_pairs(loop.stop - loop.start, loop.period) for loop in all_loops)
    if table.base_format:
        layer += max(segment.weights for segment in segments)  # numbers, beside their codes
        in_turn = len(run.model.stretches) < len(segments)
        if table.weights.home.streamed and not (table.weights.sharded or paired or in_turn):
            layer -= largest.fetched  # the next layer's codes take the place of those that were decoded
    if table.weights.home.streamed and not table.weights.sharded and paired:
        layer += 3 * group * x_bytes  # activations of the other layer of a backward body
    if table.quants.dtype and platform == "cpu":
        layer += max(segment.size for segment in run.model.segments)  # in 8 bits, which weights are dequantised from
    of_layer = [
        x.grads // layer_sizes.layers_of(run, segment) for x, segment in zip(segments, run.model.segments, strict=True)
    ]
    if grads.behind:
        # Accumulators of the previous layer, and of the last layer of every other segment. Those of this layer that
        # come to the device take their place, or that of gradients before they are reduced.
        layer += sum(of_layer)
        if batch.microbatches > group:
            layer += max(of_layer) * table.grads.sharded
            prefetched += sum(of_layer)
    if residuals.ahead:
        # Of this layer and of the next, of each microbatch of a group. The input of a recomputed block takes the place
        # of the one before it. If a block is not recomputed, `saved` includes those of a microbatch.
        number = 1 + group if run.engine.recompute_block else 2 * group if group > 1 else 1
        layer += number * max(segment.kept for segment in segments)
    of_stages = 0
    if stages > 1:  # activations and gradients from the neighbours, gradients from the head, and what loops begin with
        slots = int(SCHEDULES[run.engine.pp_schedule](batch.microbatches, stages).in_flight[-1])
        of_stages = 2 * x_bytes + slots * x_bytes // stages
        if table.streams_weights:  # in both directions: a layer, or shards of two
            first_layers = {l for loop in all_loops for l in (loop.start, loop.stop - 1)}
            of_stages += len(first_layers) * (
                weights.ahead * largest.fetched // (shards(run.mesh) if table.weights.sharded else 1)
            )
    return layer, of_stages, prefetched


def _head(run: Assembly, batch: BatchShape, platform: str) -> int:
    """Bytes of one slice of logits: first with their gradient, then with the head's gradient; and of a teacher's."""
    model = run.model
    stages = pipeline_stages(run.mesh)
    number = 4 if platform == "cpu" else itemsize(run, "weights")
    tokens = batch.tokens // run.engine.lmhead_chunks
    logits = number * tokens * model.head_rows // (devices_per_sequence(run.mesh) * stages)
    capped = logits if model.logit_softcap else 0  # the logits before the softcap are in memory too
    teacher_logits = logits * 4 // number if TEACHER_HEAD in model.outer_params else 0  # in float32
    divided = shards(run.mesh) if run.engine.table.outer.sharded else 1
    words = model.head_rows // (tensor_parallel(run.mesh) * stages) // divided
    gradient = number * words * model.hidden_size * model.outer_params[model.head].trainable
    return teacher_logits + capped + logits + max(logits, gradient)


def _embedding(run: Assembly, segments: list[SegmentBytes], x_bytes: int) -> int:
    """Bytes of a sharded embedding: activations, or their gradients, of all devices that share its rows, at once.

    Each device adds up its rows for the tokens of all of them (step/outer.py), beside the layer that was read ahead.
    """
    devices = layer_sizes.devices(run, run.engine.vocabulary_axes)
    if devices == 1:
        return 0
    prefetched = max(segment.fetched for segment in segments) * (
        passes.backward_pass(run.engine.table).lane("weights").ahead > 0
    )
    return devices * x_bytes // pipeline_stages(run.mesh) + prefetched


def _block_backward(run: Assembly, platform: str, segments: list[SegmentBytes]) -> int:
    """Bytes of the backward pass of one block, which first has all values of its forward pass, then all its gradients.

    If gradients are sharded, each is freed when it is reduced. The factors are fitted to what is named above.
    """
    table = run.engine.table
    gradients = max(segment.gradients for segment in segments)
    recompute_factor = (2 if platform == "cpu" else 1.1) if run.engine.recompute_block else 1
    values = max(segment.values(recompute_factor) for segment in segments)
    if platform == "cpu":
        return values + max(segment.weights for segment in segments) + gradients
    # The layer's weights are freed by then. A gradient is freed when it is reduced, or added to sums on the device.
    values += max(segment.expert_gradients for segment in segments)
    return max(values, gradients // (2 if table.grads.sharded or table.grads.home.streamed else 1))


def _update_bytes(run: Assembly, layer_state: int) -> int:
    """Bytes that an update of one layer at a time takes.

    Its largest tensor is in memory before and after the update. If part of its state is copied from the host, so are
    the next one, on its way to the device, and the one before, on its way back. If all layers are updated at once, in
    place, less is needed. layer_state: bytes of a layer's master weights, moments and gradients on this device.
    """
    table = run.engine.table
    moved = any(row.home.streamed and not row.home.in_file for row in (table.master, table.moments, table.grads))
    shares = []
    for segment in run.model.segments:
        elements = shard_sizes(run, run.engine.layouts.master, segment)
        shares.append((max(elements), sum(elements)))
    whole = run.optimizer.matrices.apply_to_group
    matrices = [t for t in layer_sizes.blocks(run) if t.is_matrix]
    together = 1
    if whole:
        together = max(layer_sizes.matrix_layers_together(run, t) for t in layer_sizes.blocks(run, trained=True))
    number = (4 if moved else 2) * together
    size = max(number * layer_state * largest // every for largest, every in shares)
    if whole:
        # The whole matrix in the work dtype, three float32 copies of it, and three float32 square matrices.
        *of_experts, rows, columns = max((t.param.shape for t in matrices), key=math.prod)
        elements = rows * columns * (12 + itemsize(run, "weights")) + 3 * 4 * min(rows, columns) ** 2
        size += math.prod(of_experts) * elements
    return size
