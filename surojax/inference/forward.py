"""Forward passes without gradients: of new positions after cached ones, and of whole sequences.

Shape suffixes: B batch, S new positions, T cached positions, L layers, K key/value heads, h head dimension,
V vocabulary, D hidden size.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import psutil

from surojax.memory.host import Part, parts, read, write
from surojax.models.model import Cache, Model, Segment, Variant, loop_over, runs
from surojax.numerics import base_formats
from surojax.numerics.quantize import dequantise_all
from surojax.placement.param import OUTER
from surojax.step.outer import embed


def each_layer(segment: Segment, stacks, dtype, layer: Callable, carry):
    """The carry after carry = layer(l, weights of layer l, its Variant, carry) for every layer l of a segment.

    stacks: the segment's weights in any memory, quantised or not; `layer` gets them dequantised, in `dtype`.
    """

    def one(part: Part, first: int, _, in_turn, variant: Variant, carry):
        l = first + in_turn
        w = dequantise_all(read(part.stack, l - part.start), dtype)
        return layer(l, base_formats.dequantise_all(w, dtype), variant, carry)

    for part in parts(stacks):
        variants = segment.variants[part.start : part.stop]
        for run in runs(variants):
            body = functools.partial(one, part, part.start + run.start)
            carry = loop_over(variants[run.start : run.stop], run.period, body, carry)
    return carry


def empty_cache(model: Model, batch: int, length: int, dtype) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Zeros for the keys and values of `length` positions: by segment, two arrays `[L, B, T, K, h]`."""

    def zeros(segment: Segment) -> jax.Array:
        heads = segment.heads
        return jnp.zeros((segment.num_layers, batch, length, heads.key_value, heads.channels), dtype)

    return {segment.name: (zeros(segment), zeros(segment)) for segment in model.segments}


def check_cache_room(model: Model, rows: int, new: int, cached: int = 0, itemsize: int = 0) -> None:
    """Raises ValueError if the scores of XLA's attention, and what is cached, cannot fit the first device's memory.

    new: positions of each row that are computed together. cached: positions of its cache, in numbers of `itemsize`
    bytes.
    """
    of_position = sum(2 * s.num_layers * s.heads.key_value * s.heads.channels for s in model.segments) * itemsize
    scores = max(s.heads.query for s in model.segments) * new * max(new, cached) * 8  # float32, and their softmax
    need = rows * (of_position * cached + scores)
    free = free_bytes(jax.local_devices()[0])
    if need > free:
        raise ValueError(
            f"expected texts whose attention scores and cache fit the {free / 2**30:,.1f} GiB that are free, got "
            f"{rows} x {new:,} tokens{f' and {cached - new:,} new ones' if cached else ''}, which need "
            f"{need / 2**30:,.1f} GiB; shorten them"
        )


def free_bytes(device: Any) -> int:
    """Free memory of a device; of a CPU, that of the machine."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return psutil.virtual_memory().available


def cached_logits(model: Model, weights, tokens_BS: jax.Array, cache, start: jax.Array | int, first_B=None):
    """(float32 logits `[B, V]` of the last of S new positions, the cache with all S new positions).

    start: number of positions that are already in the cache. first_B: where the texts of the rows begin, see `Cache`.
    """
    x_BSD = embed(weights[OUTER], tokens_BS, axes=(), scale=model.embedding_scale)
    extended = {}
    for segment in model.segments:

        def layer(l, w, variant: Variant, carry, segment=segment):
            x_BSD, stacks = carry
            keys, values = read(stacks, l)
            before = Cache(keys, values, start, first_B)
            x_BSD, after = segment.cached_block(w, x_BSD, before, variant)
            return x_BSD, write(stacks, (after.keys, after.values), l)

        carry = x_BSD, cache[segment.name]
        x_BSD, extended[segment.name] = each_layer(segment, weights[segment.name], x_BSD.dtype, layer, carry)
    return model.logits(weights[OUTER], x_BSD[:, -1]), extended


def hidden(model: Model, weights, tokens_BS: jax.Array) -> jax.Array:
    """The last block's output `[B, S, D]` for whole sequences; the final norm is not applied."""
    x_BSD = embed(weights[OUTER], tokens_BS, axes=(), scale=model.embedding_scale)
    for segment in model.segments:

        def layer(l, w, variant: Variant, x_BSD, segment=segment):
            return segment.block(w, x_BSD, None, variant)[0]

        x_BSD = each_layer(segment, weights[segment.name], x_BSD.dtype, layer, x_BSD)
    return x_BSD
