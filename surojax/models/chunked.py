"""A block computed chunk by chunk of the sequence (`sequence_chunks`), exactly: intermediates of one chunk in memory.

    forward:    for c in chunks:            y[c], keys[c], values[c] = body(x[c], keys and values before c)
    backward:   for c in chunks:            keys[c], values[c] = keys_values(x[c])
                for c in reversed(chunks):  dx[c], dkeys[:c], dvalues[:c], dw = vjp(body)(dy[c], dkeys[c], dvalues[c])

What a block needs of the whole sequence is the residual stream, its gradient, keys and values, and the gradients of
these. Everything else, above all the MLP's values, is of one chunk: the backward pass computes it again from x, so a
block saves its input alone. Computed twice in the backward pass are only keys and values.

Over the devices of `cp` and `tp` each chunk is divided, not the sequence: a device's activations are its part of the
first chunk, then of the second, and so on (`context.of_each_chunk`). Keys and values have whole chunks, of this
device's heads: over `cp` by ulysses, which sends those of a chunk once forward and, as they are computed twice, twice
backward. Their gradients go back once.

The loops over chunks are unrolled, since the number of keys that a chunk attends to is a shape: no chunk multiplies
keys that causality hides from all its queries, and FLOPs are those of the block in one piece, and the products for keys
and values once more. Barriers keep one chunk after the other, or XLA may have the values of several in memory.

A chunk's gradients of weights, keys and values have the dtype that they have without chunks; they are added in float32,
and the sums rounded to that dtype.

Shape suffixes: B batch, S this device's part of the sequence, C its part of a chunk, D hidden size, K key/value heads,
h head dimension.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.manual_axes import mark_varying
from surojax.models.model import PLAIN, ROUTES, Earlier, Routed, Routing, Variant
from surojax.parallel.collectives import active, device_number
from surojax.placement.mesh import CONTEXT, TENSOR
from surojax.placement.param import part_of, with_part


class Chunk(NamedTuple):
    """Tokens `start` to `stop` - 1 of a sequence."""

    start: int
    stop: int

    def of(self, x: jax.Array | None) -> Any:
        """Slices the chunk out of an array `[B, S, ...]`; returns None for None."""
        return None if x is None else x[:, self.start : self.stop]

    def replaced(self, x_BSD: jax.Array, new_BCD: jax.Array) -> jax.Array:
        """Returns x with this chunk's tokens replaced by `new`, in place if the compiler can."""
        return jax.lax.dynamic_update_slice_in_dim(x_BSD, new_BCD, self.start, axis=1)

    def routing(self, routing: Routing) -> Routing:
        """Slices the chunk out of a router's arguments."""
        return Routing(*map(self.of, routing))

    @property
    def in_row(self) -> "Chunk":
        """The chunk's tokens in whole rows, of which this device has a part."""
        _, devices = device_number(CONTEXT, *TENSOR)
        return Chunk(devices * self.start, devices * self.stop)


def chunks_of(length: int, number: int) -> list[Chunk]:
    """Splits a sequence of `length` tokens into `number` equal chunks.

    Raises ValueError if the length is no multiple.
    """
    if length % number:
        raise ValueError(f"sequence_chunks: expected a divisor of {length} tokens, got {number}; choose another")
    size = length // number
    return [Chunk(start, start + size) for start in range(0, length, size)]


def block_functions(
    body: Callable, keys_values: Callable, number: int, trained: Any
) -> tuple[Callable, Callable, Callable]:
    """Functions `block`, `block_forward` and `block_backward` for a `Segment`, which process `number` chunks in turn.

    body: (weights, x `[B, C, D]`, Earlier, Variant, starts, Routing) -> (block of x, Earlier with the chunk's own keys
    and values, Routed or None). keys_values: (weights, x, index of the chunk's first token, Variant, starts) -> that
    Earlier alone. starts: of the whole chunk. trained: the `Param`s of which gradients are computed.
    """

    def block(w, x_BSD, recipe_inputs=None, variant: Variant = PLAIN, starts_BS=None, routing: Routing = ROUTES):
        earlier = Earlier()
        out_BSD = x_BSD
        routed_chunks = []
        for chunk in chunks_of(x_BSD.shape[1], number):
            x_BCD, out_BSD, earlier = jax.lax.optimization_barrier((chunk.of(out_BSD), out_BSD, earlier))
            y_BCD, own, routed = body(w, x_BCD, earlier, variant, chunk.in_row.of(starts_BS), chunk.routing(routing))
            routed_chunks.append(routed)
            earlier = Earlier(*earlier.with_own(*own))
            out_BSD = chunk.replaced(out_BSD, y_BCD)
        return out_BSD, _of_all(routed_chunks)

    def block_forward(w, x_BSD, recipe_inputs=None, variant: Variant = PLAIN, *token_arrays):
        y_BSD, routed = block(w, x_BSD, recipe_inputs, variant, *token_arrays)
        return (y_BSD, routed), (x_BSD, routed and routed.decided)

    def block_backward(
        w, saved, d_result, recipe_inputs=None, variant: Variant = PLAIN, starts_BS=None, routing: Routing = ROUTES
    ):
        x_BSD, decided = saved
        routing = routing._replace(decided=decided)
        chunks = chunks_of(x_BSD.shape[1], number)
        everything = _keys_values(keys_values, chunks[:-1], w, x_BSD, variant, starts_BS)
        # Parameters that all devices of a group have: one sum of their gradients instead of one for each chunk.
        w_trained, sum_over_group = jax.vjp(_of_each_device, part_of(w, trained))
        d_stream, d_statistics = d_result
        d_later = Earlier()  # gradients of keys and values of all chunks that are not differentiated yet, float32
        dw = None
        for chunk in reversed(chunks):
            x_BCD, dy_BCD, d_stream, d_later, dw = jax.lax.optimization_barrier(
                (chunk.of(x_BSD), chunk.of(d_stream), d_stream, d_later, dw)
            )
            row = chunk.in_row
            first = row.start == 0
            earlier = Earlier() if first else jax.tree.map(lambda x, row=row: x[:, : row.start], everything)

            def run(w_trained, x_BCD, earlier, row=row, chunk=chunk):
                w_all = with_part(w, w_trained)
                token_arrays = row.of(starts_BS), chunk.routing(routing)
                y_BCD, own, routed = body(w_all, x_BCD, earlier, variant, *token_arrays)
                return y_BCD, own, routed and routed.statistics

            (_, own, statistics), vjp = jax.vjp(run, w_trained, x_BCD, earlier)
            if statistics is not None and d_statistics is None:
                d_statistics = jax.tree.map(jnp.zeros_like, statistics)
            d_own = jax.tree.map(jnp.zeros_like, own)
            if d_later.keys is not None:
                d_own = jax.tree.map(lambda d, x, row=row: row.of(d).astype(x.dtype), d_later, own)
            dw_of_chunk, dx_BCD, d_earlier = vjp((dy_BCD, d_own, d_statistics))
            dw = _plus(dw, dw_of_chunk)
            if not first:
                before = None if d_later.keys is None else jax.tree.map(lambda d, row=row: d[:, : row.start], d_later)
                d_later = _plus(before, d_earlier)
            d_stream = chunk.replaced(d_stream, dx_BCD)
        (dw,) = sum_over_group(jax.tree.map(lambda d, x: d.astype(x.dtype), dw, w_trained))
        return dw, d_stream, None

    return block, block_forward, block_backward


def _of_all(routed_chunks: list[Routed | None]) -> Routed | None:
    """Joins the `Routed` of a block's chunks: statistics added up, decisions concatenated; None without a router."""
    routed = [chunk for chunk in routed_chunks if chunk is not None]
    if not routed:
        return None
    statistics = functools.reduce(_sum, [chunk.statistics for chunk in routed])
    return Routed(statistics, jnp.concatenate([chunk.decided for chunk in routed], axis=1))


def _sum(a, b):
    return jax.tree.map(jnp.add, a, b)


def _of_each_device(w):
    """Types weights as varying over the devices of a tensor-parallel group, each with gradients of its own."""
    return jax.tree.map(lambda x: mark_varying(x, active(*TENSOR)), w)


def _plus(total, more):
    """Adds a tree to the float32 total; total: None before the first tree."""
    more = jax.tree.map(lambda x: x.astype(jnp.float32), more)
    return more if total is None else jax.tree.map(jnp.add, total, more)


def _keys_values(keys_values: Callable, chunks: list[Chunk], w, x_BSD, variant: Variant, starts_BS) -> Earlier:
    """Computes keys and values of these chunks, one after another, `[B, T, K, h]`."""
    earlier = Earlier()
    for chunk in chunks:
        x_BCD, earlier = jax.lax.optimization_barrier((chunk.of(x_BSD), earlier))
        row = chunk.in_row
        own = keys_values(w, x_BCD, row.start, variant, row.of(starts_BS))
        earlier = Earlier(*earlier.with_own(*own))
    return earlier
