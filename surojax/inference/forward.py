"""Forward passes without gradients: for new positions after cached ones, and for whole sequences.

Shape suffixes: B batch, S new positions, L layers, V vocabulary, D hidden size.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from surojax.memory.host import parts, read, write_layer
from surojax.models.model import Cache, Model, Segment, Variant
from surojax.numerics import base_formats
from surojax.numerics.quantized import dequantise_all
from surojax.placement.param import OUTER
from surojax.resources import FreeMemory, free_memory
from surojax.step.outer import first_input
from surojax.step.passes import Lane
from surojax.step.stream import Flight, Layer, Stream, over
from surojax.step.weights import loops_over


def each_layer(model: Model, weights, dtype, layer: Callable, carry):
    """Computes carry = layer(segment, l, weights of its layer l, Variant of that layer, carry) for all layers.

    weights: by section, in any memory, quantised or not; `layer` gets a layer's dequantised, in `dtype`.
    """

    def body_of(segment: Segment) -> Callable:
        def body(place: Layer, values, carry, flights):
            w = base_formats.dequantise_all(dequantise_all(values["weights"], dtype), dtype)
            return layer(segment, place.index, w, place.variant, carry), {}, flights

        return body

    for stretch in model.stretches:
        stacks = {segment.name: parts(weights[segment.name]) for segment in stretch}
        bodies = {segment.name: body_of(segment) for segment in stretch}
        for loop in loops_over(stretch, stacks):
            own = {name: next(x for x in stacks[name] if of.start < x.stop) for name, of in loop.layers.items()}
            lanes = {
                name: {"weights": Stream(Lane("weights", reads=True), lambda l, part=part: l - part.start)}
                for name, part in own.items()
            }
            flights = {name: {"weights": Flight(part.stack)} for name, part in own.items()}
            carry, _ = over(loop, lanes, bodies, carry, flights)
    return carry


def empty_cache(model: Model, batch: int, length: int, dtype) -> dict[str, Any]:
    """Makes the states of all layers before the first of `length` positions: zeros `[L, ...]` for each segment."""

    def zeros(segment: Segment) -> Any:
        state = segment.mixer.decode_state(batch, length, dtype)
        return jax.tree.map(lambda x: jnp.zeros((segment.num_layers, *x.shape), x.dtype), state)

    return {segment.name: zeros(segment) for segment in model.segments}


def check_cache_room(model: Model, rows: int, new: int, cached: int = 0, dtype="float32") -> None:
    """Raises ValueError if the scores of XLA's attention and the cache cannot fit the first device's memory.

    new: positions of each row that are computed together. cached: positions of its cache, in numbers of `dtype`.
    """

    def state_bytes(segment: Segment) -> int:
        state = jax.tree.leaves(segment.mixer.decode_state(rows, cached, dtype))
        return segment.num_layers * sum(math.prod(x.shape) * x.dtype.itemsize for x in state)

    need = sum(map(state_bytes, model.segments)) if cached else 0
    need += rows * max(segment.mixer.decode_bytes(new, max(new, cached)) for segment in model.segments)
    free = free_bytes(jax.local_devices()[0])
    if need > free.size:
        of = f" of {free.limit}" if free.limit else ""
        raise ValueError(
            f"expected texts whose attention scores and cache fit the {free.size / 2**30:,.1f} GiB that are free{of}, "
            f"got {rows} x {new:,} tokens{f' and {cached - new:,} new ones' if cached else ''}, which need "
            f"{need / 2**30:,.1f} GiB; shorten them"
        )


def free_bytes(device: Any) -> FreeMemory:
    """Returns the free memory of a device; for a CPU, the host memory that is free for this process."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return FreeMemory(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return free_memory()


def cached_logits(model: Model, weights, tokens_BS: jax.Array, cache, start: jax.Array | int, first_B=None):
    """Returns (float32 logits `[B, V]` of the last of S new positions, the cache with all S new positions).

    start: number of positions that are already in the cache. first_B: where the texts of the rows begin, see `Cache`.
    """
    return routed_logits(model, weights, tokens_BS, cache, start, first_B)[:2]


def routed_logits(model: Model, weights, tokens_BS: jax.Array, cache, start: jax.Array | int, first_B=None):
    """Returns `cached_logits`, and the experts that the new positions were sent to, int32 `[layers, B, S, k]`.

    Layers without a router have zeros, and k is 0 if no layer has one.
    """
    choices = max(segment.choices for segment in model.segments)
    x_BSD = first_input(model, weights[OUTER], tokens_BS)
    routes_LBSk = jnp.zeros((model.num_layers, *tokens_BS.shape, choices), jnp.int32)

    def layer(segment: Segment, l, w, variant: Variant, carry):
        x_BSD, cache, routes_LBSk = carry
        stacks = cache[segment.name]
        before = Cache(read(stacks, l), start, first_B)
        x_BSD, after = segment.cached_block(w, x_BSD, before, variant)
        if after.decided is not None:
            number = jnp.asarray(segment.numbers)[l]
            routes_LBSk = routes_LBSk.at[number].set(after.decided.astype(jnp.int32))
        return x_BSD, cache | {segment.name: write_layer(stacks, after.state, l)}, routes_LBSk

    x_BSD, extended, routes_LBSk = each_layer(model, weights, x_BSD.dtype, layer, (x_BSD, cache, routes_LBSk))
    return model.logits(weights[OUTER], x_BSD[:, -1]), extended, routes_LBSk


def hidden(model: Model, weights, tokens_BS: jax.Array) -> jax.Array:
    """Computes the last block's output `[B, S, D]` for whole sequences, without the final norm."""
    x_BSD = first_input(model, weights[OUTER], tokens_BS)

    def layer(segment: Segment, l, w, variant: Variant, x_BSD):
        return segment.block(w, x_BSD, None, variant)[0]

    return each_layer(model, weights, x_BSD.dtype, layer, x_BSD)
