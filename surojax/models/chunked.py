"""A block computed chunk by chunk of the sequence (`sequence_chunks`), exactly: intermediates of one chunk in memory.

    forward:    for c in chunks:            y[c], own = body(x[c], handed on by the chunks before c)
    backward:   for c in chunks:            own[c] = handed_on(x[c], those of the chunks before c)
                for c in reversed(chunks):  dx[c], d of those before c, dw = vjp(body)(dy[c], d_own[c])

A chunk of attention hands on its keys and values, which all later chunks read (`Appended`). One of a recurrence or of a
convolution hands on the state after its last token, which the next chunk reads (`Replaced`).

What a block needs of the whole sequence is the residual stream, its gradient, what chunks hand on, and the gradients of
these. Everything else, above all the MLP's values, is of one chunk: the backward pass computes it again from x, so a
block saves its input alone. Computed twice in the backward pass is only what chunks hand on.

Over the devices of `cp` and `tp` each chunk is divided, not the sequence: a device's activations are its part of the
first chunk, then of the second, and so on (`context.of_each_chunk`). Keys and values have whole chunks, of this
device's heads: over `cp` by ulysses, which sends those of a chunk once forward and, as they are computed twice, twice
backward. Their gradients go back once. All devices of `cp` have the same states between chunks.

The loops over chunks are unrolled, since the number of keys that a chunk attends to is a shape: no chunk multiplies
keys that causality hides from all its queries, and FLOPs are those of the block in one piece, and the products for what
chunks hand on once more. Barriers keep one chunk after the other, or XLA may have the values of several in memory.

A chunk's gradients of weights, keys and values have the dtype that they have without chunks; they are added in float32,
and the sums rounded to that dtype.

Shape suffixes: B batch, S this device's part of the sequence, C its part of a chunk, D hidden size.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.manual_axes import mark_varying
from surojax.models.model import PLAIN, ROUTES, Cache, Earlier, Routed, Routing, Variant
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
        """Returns the chunk's range of tokens in whole rows; this device has a part of each row."""
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


class Appended:
    """Chunks hand on keys and values: a chunk reads those of all chunks before it, an `Earlier`."""

    first = Earlier()

    @staticmethod
    def argument(earlier: Earlier, row: Chunk) -> Earlier:
        """Makes the argument of `body` from the values before a chunk. row: its `Chunk.in_row`."""
        return earlier

    @staticmethod
    def result(own: Earlier) -> Earlier:
        """Selects the arrays that `body` returns for later chunks."""
        return own

    @staticmethod
    def after(earlier: Earlier, own: Any) -> Earlier:
        """Returns the values after a chunk, from those before it and its own."""
        return Earlier(*earlier.with_own(*own))

    @staticmethod
    def before(each: list[Earlier], i: int, row: Chunk) -> Earlier:
        """Selects the values before chunk i. each: those before every chunk; the last one's have all."""
        return Earlier() if row.start == 0 else jax.tree.map(lambda x: x[:, : row.start], each[-1])

    @staticmethod
    def d_own(d_later: Any, own: Earlier, row: Chunk) -> Earlier:
        """Returns the gradient of a chunk's own values, from the sum over all later chunks."""
        return jax.tree.map(lambda d, x: row.of(d).astype(x.dtype), d_later, own)

    @staticmethod
    def d_before(d_later: Any, d_earlier: Earlier, row: Chunk) -> Any:
        """Returns the gradient of the values before a chunk, summed over this and all later chunks in float32."""
        before = None if d_later is None else jax.tree.map(lambda d: d[:, : row.start], d_later)
        return _plus(before, d_earlier)


class Replaced:
    """Chunks hand on a state, that of a `Cache`: a chunk reads the one that the chunk before left. See `Appended`."""

    first = None

    @staticmethod
    def argument(state: Any, row: Chunk) -> Cache:
        return Cache(state, row.start)

    @staticmethod
    def result(own: Cache) -> Any:
        return own.state

    @staticmethod
    def after(state: Any, own: Any) -> Any:
        return own

    @staticmethod
    def before(each: list[Any], i: int, row: Chunk) -> Any:
        return each[i]

    @staticmethod
    def d_own(d_later: Any, own: Any, row: Chunk) -> Any:
        return d_later

    @staticmethod
    def d_before(d_later: Any, d_earlier: Any, row: Chunk) -> Any:
        return d_earlier


def block_functions(
    body: Callable, handed_on: Callable, number: int, trained: Any, between: type[Appended | Replaced] = Appended
) -> tuple[Callable, Callable, Callable]:
    """Functions `block`, `block_forward` and `block_backward` for a `Segment`, which process `number` chunks in turn.

    body: (weights, x `[B, C, D]`, `between.argument`, Variant, starts, Routing) -> (block of x, the chunk's own values
    for later chunks, Routed or None). handed_on: (weights, x, `between.argument`, Variant, starts) -> the second of
    these alone. between: how chunks hand on values. starts: of the whole chunk. trained: the `Param`s of which
    gradients are computed.
    """

    def block(w, x_BSD, recipe_inputs=None, variant: Variant = PLAIN, starts_BS=None, routing: Routing = ROUTES):
        earlier: Any = between.first
        out_BSD = x_BSD
        routed_chunks = []
        for chunk in chunks_of(x_BSD.shape[1], number):
            row = chunk.in_row
            x_BCD, out_BSD, earlier = jax.lax.optimization_barrier((chunk.of(out_BSD), out_BSD, earlier))
            before = between.argument(earlier, row)
            y_BCD, own, routed = body(w, x_BCD, before, variant, row.of(starts_BS), chunk.routing(routing))
            routed_chunks.append(routed)
            earlier = between.after(earlier, between.result(own))
            out_BSD = chunk.replaced(out_BSD, y_BCD)
        return out_BSD, _of_all(routed_chunks)

    def block_forward(w, x_BSD, recipe_inputs=None, variant: Variant = PLAIN, *token_arrays):
        y_BSD, routed = block(w, x_BSD, recipe_inputs, variant, *token_arrays)
        return (y_BSD, routed), (x_BSD, routed and routed.decided)

    def before_each(w, x_BSD, variant: Variant, starts_BS) -> list[Any]:
        """Computes the values before each chunk, one chunk after another."""
        each: list[Any] = [between.first]
        for chunk in chunks_of(x_BSD.shape[1], number)[:-1]:
            row = chunk.in_row
            x_BCD, earlier = jax.lax.optimization_barrier((chunk.of(x_BSD), each[-1]))
            own = handed_on(w, x_BCD, between.argument(earlier, row), variant, row.of(starts_BS))
            each.append(between.after(earlier, between.result(own)))
        return each

    def block_backward(
        w, saved, d_result, recipe_inputs=None, variant: Variant = PLAIN, starts_BS=None, routing: Routing = ROUTES
    ):
        x_BSD, decided = saved
        routing = routing._replace(decided=decided)
        chunks = chunks_of(x_BSD.shape[1], number)
        each_before = before_each(w, x_BSD, variant, starts_BS)
        # Parameters that all devices of a group have: one sum of their gradients instead of one for each chunk.
        w_trained, sum_over_group = jax.vjp(_of_each_device, part_of(w, trained))
        d_stream, d_statistics = d_result
        d_later = None  # gradient of the values after the chunks that are not differentiated yet
        dw = None
        for i, chunk in reversed(list(enumerate(chunks))):
            x_BCD, dy_BCD, d_stream, d_later, dw = jax.lax.optimization_barrier(
                (chunk.of(x_BSD), chunk.of(d_stream), d_stream, d_later, dw)
            )
            row = chunk.in_row
            earlier = between.before(each_before, i, row)

            def run(w_trained, x_BCD, earlier, row=row, chunk=chunk):
                w_all = with_part(w, w_trained)
                token_arrays = row.of(starts_BS), chunk.routing(routing)
                y_BCD, own, routed = body(w_all, x_BCD, between.argument(earlier, row), variant, *token_arrays)
                return y_BCD, between.result(own), routed and routed.statistics

            (_, own, statistics), vjp = jax.vjp(run, w_trained, x_BCD, earlier)
            if d_statistics is None:
                d_statistics = jax.tree.map(jnp.zeros_like, statistics)
            d_own = jax.tree.map(jnp.zeros_like, own)
            if d_later is not None:
                d_own = between.d_own(d_later, own, row)
            dw_of_chunk, dx_BCD, d_earlier = vjp((dy_BCD, d_own, d_statistics))
            dw = _plus(dw, dw_of_chunk)
            if i > 0:
                d_later = between.d_before(d_later, d_earlier, row)
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
