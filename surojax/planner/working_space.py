"""The working space of a step: the largest of the backward pass of one block, the head, and an update.

Beside the first two there is what is in flight: the weights of the next layer, gradients of the one before, residuals.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from surojax.assembly import Assembly
from surojax.models.model import runs
from surojax.parallel.schedule import SCHEDULES, layers_of_stage
from surojax.placement.home import NVME
from surojax.placement.mesh import devices_per_sequence, pipeline_stages, shards, tensor_parallel
from surojax.placement.param import Kind
from surojax.planner.segment_bytes import SegmentBytes, shard_sizes
from surojax.planner.shares import layers_together
from surojax.planner.stages import patterns
from surojax.planner.traffic import Batch
from surojax.step.state_plan import bytes_per_device
from surojax.step.weights import comes_in_pairs


def working_space(
    run: Assembly,
    batch: Batch,
    platform: str,
    segments: list[SegmentBytes],
    *,
    x_bytes: int,
    kept_bytes: int,
    outer_grads: int,
) -> int:
    """Bytes that a step allocates on each device beside gradient accumulators and saved activations.

    segments: of the model. x_bytes: of the input of a layer. kept_bytes: of the activations that are saved in device
    memory; they are gone when layers are updated. outer_grads: of the accumulators of outer layers.
    """
    engine = run.engine
    stages = pipeline_stages(run.mesh)
    in_flight = InFlight.sum(
        _weights_in_flight(run, platform, segments, engine.microbatches_per_fetch * x_bytes),
        _gradients_in_flight(run, batch, segments),
        InFlight(0, _residuals_in_flight(run, segments)),
    )
    layer_state = max(segment.layer_state for segment in segments)
    if engine.overlap_update:
        update = _overlapped_update_bytes(segments)
    elif bytes_per_device(run.plan, NVME):
        # All tensors of a layer are updated by one program, after the update of the outer layers.
        update = layer_state + max(segment.weights for segment in segments) - outer_grads - kept_bytes
    else:
        update = _update_bytes(run, layer_state) - kept_bytes
    block = _block_backward(run, platform, segments)
    found = max(block + in_flight.layer, _head(run, batch, platform) + in_flight.head, update) + 2 * x_bytes
    return found + (_of_stages(run, batch, segments, x_bytes) if stages > 1 else 0)


class InFlight(NamedTuple):
    """Bytes that are on their way while the head, or a layer, computes."""

    head: int
    layer: int

    @staticmethod
    def sum(*terms: "InFlight") -> "InFlight":
        """The terms together."""
        return InFlight(sum(term.head for term in terms), sum(term.layer for term in terms))


def _head(run: Assembly, batch: Batch, platform: str) -> int:
    """Bytes of one slice of logits: first with their gradient, then with the head's gradient."""
    model = run.model
    table = run.engine.table
    stages = pipeline_stages(run.mesh)
    itemsize = 4 if platform == "cpu" else jnp.dtype(table.weights.dtype).itemsize
    tokens = batch.tokens // run.engine.lmhead_chunks
    logits = itemsize * tokens * model.vocab_size // (devices_per_sequence(run.mesh) * stages)
    capped = logits if model.logit_softcap else 0  # the logits before the softcap are in memory too
    words = model.vocab_size // (tensor_parallel(run.mesh) * stages) // (shards(run.mesh) if table.outer.sharded else 1)
    gradient = itemsize * words * model.hidden_size * model.outer_params[model.head].trainable
    return capped + logits + max(logits, gradient)


def _block_backward(run: Assembly, platform: str, segments: list[SegmentBytes]) -> int:
    """Bytes of the backward pass of one block, which first has all values of its forward pass, then all its gradients.

    If gradients are sharded, each is freed when it is reduced. The factors are fitted to what footprint.py names.
    """
    table = run.engine.table
    weights = max(segment.weights for segment in segments)
    of_layer = max(segment.gradients for segment in segments)
    exchanged = {"reduce_scatter": 0, "all_to_all": 2 * of_layer, "int8": of_layer}[table.reduce]
    exchanged = exchanged if shards(run.mesh) > 1 else 0  # gradients of a layer, sent and received
    recompute_factor = (2 if platform == "cpu" else 1.1) if run.engine.recompute_block else 1
    values = max(segment.values(recompute_factor) for segment in segments)
    if platform == "cpu":
        return values + weights + of_layer
    # The layer's weights are freed by then. A gradient is freed when it is reduced, or added to sums on the device.
    return max(values, of_layer // (2 if table.grads.sharded or table.grads.home.streamed else 1), exchanged)


def _loops(run: Assembly) -> list[list[list]]:
    """The loops over layers: of each segment, and there of each pattern (step/stage_layers.py), the loops' runs.

    Each stage runs the loops of one pattern.
    """
    return [[runs(pattern) for pattern in patterns(run, segment).patterns] for segment in run.model.segments]


def _weights_in_flight(run: Assembly, platform: str, segments: list[SegmentBytes], xs_bytes: int) -> InFlight:
    """Weights that are fetched ahead, and what comes with them. xs_bytes: of the inputs of a layer, of a group."""
    table = run.engine.table
    work = table.weights
    fetched = max(segment.fetched for segment in segments)
    if not (work.sharded or table.streams_weights):
        ahead = layer = 0
    else:
        ahead = fetched  # of the next layer
        loops = sum(max(map(len, of_segment)) for of_segment in _loops(run)) + bool(work.resident)
        layer = (1 + loops) * fetched  # of this layer and the next; every other loop has prefetched weights of its own
    layer += max(segment.weights for segment in segments) if table.base_format else 0  # numbers, beside their codes
    in_loops = [x for of_segment in _loops(run) for of_pattern in of_segment for x in of_pattern]
    if work.home.streamed and not work.sharded and any(comes_in_pairs(x.stop - x.start, x.period) for x in in_loops):
        layer += 3 * xs_bytes  # activations of the other layer of a backward body
    if work.sharded and table.streams_weights:
        layer += fetched // shards(run.mesh)  # of the layer after the next, copied from the host before it is gathered
    if table.quants.dtype and platform == "cpu":
        layer += max(segment.size for segment in run.model.segments)  # in 8 bits, which weights are dequantised from
    return InFlight(ahead, layer)


def _gradients_in_flight(run: Assembly, batch: Batch, segments: list[SegmentBytes]) -> InFlight:
    """Accumulators on their way to host memory and back, or sums between the microbatches of a group."""
    grads = run.engine.table.grads
    group = run.engine.microbatches_per_fetch
    stages = pipeline_stages(run.mesh)
    layers = [layers_of_stage(segment.num_layers, stages) for segment in run.model.segments]
    of_layers = [segment.grads // n for segment, n in zip(segments, layers, strict=True)]
    if not grads.home.streamed:
        return InFlight(0, max(of_layers) if group > 1 else 0)
    # Accumulators of the previous layer to the host, and of the last layer of every other segment. Those of this layer
    # that come to the device take their place, or that of gradients before they are reduced.
    layer = sum(of_layers)
    if batch.microbatches <= group:
        return InFlight(0, layer)
    # While the head computes: those of the previous microbatch.
    return InFlight(sum(of_layers), layer + (max(of_layers) if grads.sharded else 0))


def _residuals_in_flight(run: Assembly, segments: list[SegmentBytes]) -> int:
    """Residuals on their way from host memory."""
    engine = run.engine
    if not engine.table.residuals.home.streamed:
        return 0
    # Residuals of this layer and of the next, of each microbatch of a group. The input of a recomputed block takes the
    # place of the one before it. If a block is not recomputed, `saved` includes those of a microbatch.
    group = engine.microbatches_per_fetch
    count = 1 + group if engine.recompute_block else 2 * group if group > 1 else 1
    return count * max(segment.kept for segment in segments)


def _of_stages(run: Assembly, batch: Batch, segments: list[SegmentBytes], x_bytes: int) -> int:
    """With pp: activations and gradients from the neighbours, gradients from the head, and what loops begin with."""
    stages = pipeline_stages(run.mesh)
    head_slots = int(SCHEDULES[run.engine.pp_schedule](batch.microbatches, stages).in_flight[-1])
    found = 2 * x_bytes + head_slots * x_bytes // stages
    table = run.engine.table
    if table.streams_weights:  # what each loop begins with, in both directions: a layer, or shards of two
        fetched = max(segment.fetched for segment in segments)
        in_loops = [x for of_segment in _loops(run) for of_pattern in of_segment for x in of_pattern]
        begins = {l for x in in_loops for l in (x.start, x.stop - 1)}
        found += len(begins) * (2 * fetched // shards(run.mesh) if table.weights.sharded else fetched)
    return found


def _update_bytes(run: Assembly, layer_state: int) -> int:
    """Bytes that an update of one layer at a time takes.

    Its largest tensor is in memory before and after the update. If part of its state is copied from the host, so are
    the next one, on its way to the device, and the one before, on its way back. If all layers are updated at once, in
    place, less is needed. layer_state: bytes of a layer's master weights, moments and gradients on this device.
    """
    segments = run.model.segments
    sizes = [shard_sizes(run, run.engine.layouts.master[segment.name], segment) for segment in segments]
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


def _overlapped_update_bytes(segments: list[SegmentBytes]) -> int:
    """Bytes that a forward pass takes which updates the layers.

    Layers in flight: one on its way back, one updated, one to update, one on its way to the device. The factors are
    fitted to compiled steps of 7B on an RTX 4090 and an H200.
    """
    return max(int(3.5 * segment.layer_state + 0.7 * segment.saved) for segment in segments)
