"""Sizes of a call of the kernels of gated_delta_chunks.py, and the blocks of arrays that their programs have.

Shape suffixes: see gated_delta_chunks.py. A program of the kernels over all chunks at once has a chunk of a key head
with all its value heads; one of those that go from chunk to chunk has some columns of the values of a value head.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import dispatch, triton

COLUMNS = 64  # columns of the values in one program; half of these if there would be fewer programs than FEW
FEW = 128
ROOMY = ((8, 0), (9, 0), (10, 0), (10, 3))  # GPUs with shared memory for the loads of two chunks, 132 KB; others: 99


class Tokens(NamedTuple):
    """The rule's inputs: q, k `[B, T, K, k]`, v `[B, T, K, r, v]`; g (log of the decay), beta `[B, T, K, r]`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


class DeltaCall(NamedTuple):
    """Sizes of a call, the dtypes of its numbers, and the blocks of its arrays that a program has.

    dtype: of operands of products, and of what is stored between kernels. wide: of state, decays and sums.
    """

    B: int
    T: int
    K: int
    r: int
    k: int
    v: int
    C: int
    dtype: Any
    wide: Any
    interpret: bool

    @classmethod
    def of(cls, tokens: Tokens, chunk: int, wide, interpret: bool) -> DeltaCall:
        """The sizes and dtypes of these tokens."""
        B, T, K, r, v = tokens.v.shape
        return cls(B, T, K, r, tokens.k.shape[-1], v, chunk, tokens.v.dtype, wide, interpret)

    @property
    def N(self) -> int:
        """The number of chunks."""
        return self.T // self.C

    @property
    def V(self) -> int:
        """The number of value heads."""
        return self.K * self.r

    def dot(self, a, b) -> jax.Array:
        """a b of operands in `dtype`, summed in `wide`."""
        precision = None if self.dtype.itemsize == 2 else jax.lax.Precision.HIGHEST
        a, b = a.astype(self.dtype), b.astype(self.dtype)
        return jnp.dot(a, b, precision=precision, preferred_element_type=self.wide)

    def wide_dot(self, a, b) -> jax.Array:
        """a b of operands in `wide`: tf32 on a GPU."""
        exact = self.interpret or self.dtype.itemsize > 2
        precision = jax.lax.Precision.HIGHEST if exact else jax.lax.DotAlgorithmPreset.TF32_TF32_F32
        return jnp.dot(a, b, precision=precision, preferred_element_type=self.wide)

    def at_once(self, kernel, name: str, operands, results, warps: int, flops: int) -> tuple[jax.Array, ...]:
        """Runs a kernel over all chunks. operands: (array, its block); results: (shape, its block)."""
        return self._run(kernel, name, operands, results, (self.N, self.K, self.B), warps, 1, flops)

    def in_order(self, kernel, name: str, operands, results, flops: int) -> tuple[jax.Array, ...]:
        """Runs a kernel whose programs go from chunk to chunk. operands, results: see `at_once`."""
        stages = 2 if dispatch.capability(dispatch.target()) in ROOMY else 1
        return self._run(kernel, name, operands, results, (self.v // self.columns, self.V, self.B), 4, stages, flops)

    def _run(self, kernel, name, operands, results, grid, warps, stages, flops):
        arrays, inputs = zip(*operands, strict=True)
        out, outputs = zip(*results, strict=True)
        flops *= self.B * self.T * self.V
        how: dict[str, Any] = {
            "grid": grid,
            "warps": warps,
            "stages": stages,
            "flops": flops,
            "interpret": self.interpret,
        }
        how |= {"op": "gated_delta", "name": name, "inputs": inputs, "out": out, "outputs": outputs}
        return triton.launch(kernel, arrays, **how)

    # Results.

    @property
    def values(self) -> jax.ShapeDtypeStruct:
        """Values of all tokens."""
        return jax.ShapeDtypeStruct((self.B, self.T, self.V, self.v), self.dtype)

    @property
    def squares(self) -> jax.ShapeDtypeStruct:
        """A number for each pair of tokens of a chunk."""
        return jax.ShapeDtypeStruct((self.B, self.V, self.T, self.C), self.dtype)

    @property
    def states(self) -> jax.ShapeDtypeStruct:
        """A state for each chunk."""
        return jax.ShapeDtypeStruct((self.B, self.V, self.N, self.k, self.v), self.dtype)

    @property
    def state(self) -> jax.ShapeDtypeStruct:
        """One state."""
        return jax.ShapeDtypeStruct((self.B, self.V, self.k, self.v), self.wide)

    # Blocks of `at_once`: chunk n of key head h, row b.

    @property
    def keys_of_chunk(self) -> pl.BlockSpec:
        """`[C, k]` of `[B, T, K, k]`."""
        return pl.BlockSpec((None, self.C, None, self.k), lambda n, h, b: (b, n, h, 0))

    @property
    def values_of_chunk(self) -> pl.BlockSpec:
        """`[C, r, v]` of `[B, T, V, v]`."""
        return pl.BlockSpec((None, self.C, self.r, self.v), lambda n, h, b: (b, n, h, 0))

    @property
    def square_of_chunk(self) -> pl.BlockSpec:
        """`[r, C, C]` of `[B, V, T, C]`."""
        return pl.BlockSpec((None, self.r, self.C, self.C), lambda n, h, b: (b, h, n, 0))

    @property
    def states_of_chunk(self) -> pl.BlockSpec:
        """`[r, k, v]` of `[B, V, N, k, v]`."""
        return pl.BlockSpec((None, self.r, None, self.k, self.v), lambda n, h, b: (b, h, n, 0, 0))

    @property
    def vector_of_chunk(self) -> pl.BlockSpec:
        """`[r, C]` of `[B, V, T]`."""
        return pl.BlockSpec((None, self.r, self.C), lambda n, h, b: (b, h, n))

    @property
    def key_vector_of_chunk(self) -> pl.BlockSpec:
        """`[C]` of `[B, K, T]`."""
        return pl.BlockSpec((None, None, self.C), lambda n, h, b: (b, h, n))

    @property
    def number_of_chunk(self) -> pl.BlockSpec:
        """`[r]` of `[B, V, N]`."""
        return pl.BlockSpec((None, self.r, None), lambda n, h, b: (b, h, n))

    def starts_of_chunk(self, rows: int) -> pl.BlockSpec:
        """`[C]` of `[rows, T]`, where rows is B or 1."""
        return pl.BlockSpec((None, self.C), lambda n, h, b: (b if rows > 1 else 0, n))

    # Blocks of `in_order`: columns c of value head h, row b.

    @property
    def columns(self) -> int:
        """Columns of values that a program has."""
        programs = self.B * self.V * self.v // COLUMNS
        return math.gcd(self.v, COLUMNS if programs >= FEW else COLUMNS // 2)

    @property
    def all_keys(self) -> pl.BlockSpec:
        """`[T, k]` of `[B, T, K, k]`."""
        return pl.BlockSpec((None, self.T, None, self.k), lambda c, h, b: (b, 0, h // self.r, 0))

    @property
    def all_values(self) -> pl.BlockSpec:
        """`[T, columns]` of `[B, T, V, v]`."""
        return pl.BlockSpec((None, self.T, None, self.columns), lambda c, h, b: (b, 0, h, c))

    @property
    def all_squares(self) -> pl.BlockSpec:
        """`[T, C]` of `[B, V, T, C]`."""
        return pl.BlockSpec((None, None, self.T, self.C), lambda c, h, b: (b, h, 0, 0))

    @property
    def all_states(self) -> pl.BlockSpec:
        """`[N, k, columns]` of `[B, V, N, k, v]`."""
        return pl.BlockSpec((None, None, self.N, self.k, self.columns), lambda c, h, b: (b, h, 0, 0, c))

    @property
    def one_state(self) -> pl.BlockSpec:
        """`[k, columns]` of `[B, V, k, v]`."""
        return pl.BlockSpec((None, None, self.k, self.columns), lambda c, h, b: (b, h, 0, c))

    @property
    def all_numbers(self) -> pl.BlockSpec:
        """`[T]` of `[B, V, T]`."""
        return pl.BlockSpec((None, None, self.T), lambda c, h, b: (b, h, 0))

    @property
    def all_chunks(self) -> pl.BlockSpec:
        """`[N]` of `[B, V, N]`."""
        return pl.BlockSpec((None, None, self.N), lambda c, h, b: (b, h, 0))
