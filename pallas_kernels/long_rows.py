"""Long rows of any width, cut into vectors that a GPU loads whole.

One program passes over a row: of several warp groups where the row is long, so that few rows are on their way at once
and a second pass finds in the second-level cache what the first one read. 16-byte loads fault where they are not
aligned, and the rows of a [N, 50257] array of bfloat16 are not: vectors begin at the first aligned word of a row, and
both its ends, less than a round of vectors, go in single words, masked where they overlap.

The compiler (LLVM) must see that an address is a multiple of 16 bytes, or it cuts every load into 2-byte ones, which is
right and many times slower. It does where the row's beginning is a constant multiple and the word a product: rows of
odd width are viewed `vec` at a time, side by side, and positions are counted in vectors until the last operation.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import LANES

GROUPS, MANY = 4, 16384  # warp groups of a program, for rows of so many words; shorter ones: one
UNROLL = 4  # vectors that a thread has on their way at once


class Cut(NamedTuple):
    """How a row is cut: `rounds` of aligned vectors, one for each thread, and `edges` of single words for the rest."""

    V: int
    vec: int  # words of a vector, 16 bytes
    groups: int
    rounds: int
    edges: int
    rows: int  # rows side by side in the view [N / rows, rows V] whose every row begins at an aligned word

    @property
    def span(self) -> int:
        """Words of a round."""
        return self.groups * LANES * self.vec


def cut(N: int, V: int, itemsize: int) -> Cut:
    """The cut of N rows of V >= LANES words."""
    vec, groups = 16 // itemsize, GROUPS if V >= MANY else 1
    aligned = V % vec == 0
    rounds = (V - (0 if aligned else vec - 1)) // (groups * LANES * vec)
    edges = -(-(V - rounds * groups * LANES * vec) // (groups * LANES))
    return Cut(V, vec, groups, rounds, edges, 1 if aligned or not rounds else N if N % vec else vec)


class Row:
    """The row of a program (grid axis "rows", thread axis "group") in the view [N / rows, rows V] of an array.

    A part is (its first word within the line, its length, its layout).
    """

    def __init__(self, c: Cut, x_ref):
        self.c, self.x_ref = c, x_ref
        self.r, self.group = jax.lax.axis_index("rows"), jax.lax.axis_index("group")
        self.line, self.first = (self.r // c.rows, self.r % c.rows * c.V) if c.rows > 1 else (self.r, 0)
        self.begin = (self.first + c.vec - 1) & -c.vec if c.rows > 1 else 0  # the first aligned word

    def round(self, j):
        """This group's part of round j."""
        n = LANES * self.c.vec
        layout = plgpu.Layout.WG_STRIDED((n,), vec_size=self.c.vec)
        vectors = self.begin // self.c.vec + (j * self.c.groups + self.group) * LANES
        return vectors * self.c.vec, n, layout  # a product in sight: else the compiler does not see the alignment

    def edge(self, start):
        """This group's part of single words from `start`, one for each thread of all groups."""
        return start + self.group * LANES, LANES, plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)

    def load(self, part):
        """The words of a part, float32."""
        start, n, layout = part
        return plgpu.layout_cast(self.x_ref[self.line, pl.ds(start, n)], layout).astype(jnp.float32)

    def edges(self):
        """[(part, values, which of its words no other part has)]: both ends of the row."""
        c, found = self.c, []
        words = c.groups * LANES
        end = self.begin + c.rounds * c.span
        for k in reversed(range(c.edges)):  # side by side; the one that is furthest from the row's end overlaps
            stop = self.first + c.V - k * words
            part = self.edge(jnp.maximum(stop - words, self.first))
            found.append((part, self.load(part), (columns(part) >= end) & (columns(part) < stop)))
        if c.rows > 1:
            part = self.edge(self.first)
            found.append((part, self.load(part), columns(part) < self.begin))
        return found

    def over_rounds(self, body, carry, *, backwards: bool = False):
        """carry = body(parts, carry) over all rounds, UNROLL at a time."""
        c = self.c
        full, rest = divmod(c.rounds, UNROLL)
        parts = lambda j, n: [self.round(j + k) for k in range(n)]
        some = lambda i, carry: body(parts((full - 1 - i if backwards else i) * UNROLL, UNROLL), carry)
        last = lambda carry: body(parts(full * UNROLL, rest), carry) if rest else carry
        carry = last(carry) if backwards else carry
        carry = jax.lax.fori_loop(0, full, some, carry) if full else carry
        return carry if backwards else last(carry)


def columns(part):
    """The words of a part, as they are counted within their line."""
    start, n, layout = part
    return start + plgpu.broadcasted_iota(jnp.int32, (n,), 0, layout=layout)
