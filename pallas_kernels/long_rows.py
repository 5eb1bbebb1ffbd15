"""Splits long rows of any width into vectors that a GPU loads with one instruction.

One program passes over a row. It has several warp groups if the row is long. Then few rows are in flight at once, and
in a second pass most of the row is still in the second-level cache. 16-byte loads fault if they are not aligned, and
the rows of a [N, 50257] array of bfloat16 are not: vectors begin at the first aligned word of a row. Both ends of the
row, less than a round of vectors, are loaded as single words, masked where they overlap. A word is an element.

The compiler (LLVM) must be able to prove that an address is a multiple of 16 bytes. If not, it splits every load into
2-byte loads, which is correct and many times slower. It can prove it if the start of the row is a constant multiple and
the index of the word is a product. So rows of odd width are viewed as `vec` rows side by side, and positions are
counted in vectors until the last operation.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import LANES

GROUPS = 4  # warp groups of a program for rows of MANY words or more; one for shorter rows
MANY = 16384
UNROLL = 4  # vectors that a thread has in flight


class Cut(NamedTuple):
    """How a row is split: rounds of aligned vectors, one for each thread, and edges of single words for the rest."""

    V: int
    vec: int  # words in a vector of 16 bytes
    groups: int  # warp groups of a program
    rounds: int  # number of rounds
    edges: int  # parts of single words at the end of the row; one more is at its start if rows > 1
    rows: int  # rows side by side in the view [N / rows, rows V], in which every line begins at an aligned word

    @property
    def span(self) -> int:
        """Words of a round."""
        return self.groups * LANES * self.vec


def cut(N: int, V: int, itemsize: int) -> Cut:
    """How N rows of V >= LANES words are split."""
    vec = 16 // itemsize
    groups = GROUPS if V >= MANY else 1
    aligned = V % vec == 0
    rounds = (V - (0 if aligned else vec - 1)) // (groups * LANES * vec)
    edges = -(-(V - rounds * groups * LANES * vec) // (groups * LANES))
    return Cut(V, vec, groups, rounds, edges, 1 if aligned or not rounds else N if N % vec else vec)


class ProgramRow:
    """The row of a program (grid axis "rows", thread axis "group") in the view [N / rows, rows V] of an array.

    A part of it is (index of its first word within the line, its length, its layout).
    """

    def __init__(self, c: Cut, x_ref):
        self.c = c
        self.x_ref = x_ref
        self.r, self.group = jax.lax.axis_index("rows"), jax.lax.axis_index("group")
        self.line, self.first = (self.r // c.rows, self.r % c.rows * c.V) if c.rows > 1 else (self.r, 0)
        self.begin = (self.first + c.vec - 1) & -c.vec  # the first aligned word

    def round(self, j):
        """This group's part of round j."""
        n = LANES * self.c.vec
        layout = plgpu.Layout.WG_STRIDED((n,), vec_size=self.c.vec)
        vectors = self.begin // self.c.vec + (j * self.c.groups + self.group) * LANES
        return vectors * self.c.vec, n, layout  # a product, from which the compiler infers the alignment

    def edge(self, start):
        """This group's part of the single words from `start`, one for each thread of all groups."""
        return start + self.group * LANES, LANES, plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)

    def load(self, part):
        """The words of a part, float32."""
        start, n, layout = part
        return plgpu.layout_cast(self.x_ref[self.line, pl.ds(start, n)], layout).astype(jnp.float32)

    def edges(self):
        """[(part, values, mask of the words that are in no other part)] for both ends of the row."""
        c = self.c
        parts = []
        words = c.groups * LANES
        end = self.begin + c.rounds * c.span
        for k in reversed(range(c.edges)):  # side by side; the edge furthest from the row's end may overlap a round
            stop = self.first + c.V - k * words
            part = self.edge(jnp.maximum(stop - words, self.first))
            parts.append((part, self.load(part), (columns(part) >= end) & (columns(part) < stop)))
        if c.rows > 1:
            part = self.edge(self.first)
            parts.append((part, self.load(part), columns(part) < self.begin))
        return parts

    def over_rounds(self, body, carry, *, backwards: bool = False):
        """Runs carry = body(parts, carry) over the parts of all rounds, UNROLL rounds at a time; returns carry."""
        full, rest = divmod(self.c.rounds, UNROLL)

        def parts(first, n: int):
            return [self.round(first + k) for k in range(n)]

        def unrolled(i, carry):
            return body(parts((full - 1 - i if backwards else i) * UNROLL, UNROLL), carry)

        def remainder(carry):
            return body(parts(full * UNROLL, rest), carry) if rest else carry

        carry = remainder(carry) if backwards else carry
        carry = jax.lax.fori_loop(0, full, unrolled, carry) if full else carry
        return carry if backwards else remainder(carry)


def columns(part):
    """The indices of the words of a part within their line."""
    start, n, layout = part
    return start + plgpu.broadcasted_iota(jnp.int32, (n,), 0, layout=layout)
