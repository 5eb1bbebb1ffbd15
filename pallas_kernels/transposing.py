"""Shared code of kernels that write the transpose of a matrix in 8 bits.

A program has 128 (or 64) rows and 64 columns. It reads rows 4i, 4i + 1, 4i + 2, 4i + 3 into four arrays [i, n] with the
same layout in registers. Their bytes are joined to a 32-bit word for every (i, n): four neighbours in a row of the
transpose. So bytes are exchanged within a thread, and words in shared memory. Words are written to it 16 bytes at a
time and read along columns. Rows are 4 words apart modulo 32, as 16-byte stores need, so 4 lanes use the same bank. A
warp reads 128 bytes of a row and writes 128 bytes of a row of the transpose: full cache lines in both directions.

It costs one store to and one load from shared memory for four numbers, and needs no instruction of a particular
architecture. (`ldmatrix`, `stmatrix` and TMA transpose units of 16 bits, or exist from 9.0 or 10.0 on only.)
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, elementwise, fp8_format

u32 = jnp.uint32
TILE = 64


def serves(m: int, n: int) -> bool:
    """Whether an [m, n] matrix can be split into tiles."""
    return m % TILE == 0 and n % TILE == 0 and 0 < m * n < elementwise.LARGEST


def run(body: Callable, x: jax.Array, scalars: tuple, stored, op: str, interpret: bool):
    """Runs the kernel: ([result in dtype `stored`, absmax], or [] if stored is None, and its transpose [N, M / 4]).

    The transpose consists of words of four 8-bit numbers.
    body: (tile of x, scalars) -> (8-bit result: FP8 or uint8, float32 values to take absmax of or None). x: [M, N],
    multiples of TILE.
    """
    m, n = x.shape
    rows = (128 if m % 128 == 0 else TILE) // 4
    wide = 2 * TILE if x.dtype.itemsize == 1 and n % (2 * TILE) == 0 else TILE
    layout = plgpu.Layout.WG_STRIDED((rows, wide), vec_size=4)

    def kernel(x_ref, *refs):
        i = jax.lax.axis_index("rows")
        j = jax.lax.axis_index("columns")
        down = pl.ds(i * rows, rows)
        across = pl.ds(j * wide, wide)
        numbers = refs[: len(scalars)]
        words = refs[-1]  # in shared memory
        refs = refs[len(scalars) : -1]
        tiles = [plgpu.load(x_ref.at[down, k, across], layout=layout, optimized=False) for k in range(4)]
        eights, tops = zip(*(body(tile, [ref[0] for ref in numbers]) for tile in tiles), strict=True)
        word = None
        for k, eight in enumerate(eights):
            byte = eight if eight.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(eight, jnp.uint8)
            part = byte.astype(u32) << u32(8 * k)
            word = part if word is None else word | part
        words[:, pl.ds(0, wide)] = word
        turned = plgpu.Layout.WG_STRIDED((wide, rows), vec_size=1)
        refs[-1][across, down] = plgpu.load(words.T.at[pl.ds(0, wide)], layout=turned, optimized=False)
        if stored is not None:
            for k, eight in enumerate(eights):
                refs[0][down, k, across] = eight
            tops = [fp8_format.ordered(top) for top in tops]
            top = jnp.maximum(jnp.maximum(tops[0], tops[1]), jnp.maximum(tops[2], tops[3]))
            refs[1][i, j] = jnp.max(top)

    shape = jax.ShapeDtypeStruct
    grid = (m // 4 // rows, n // wide)
    out = [] if stored is None else [shape((m // 4, 4, n), stored), shape(grid, jnp.int32)]
    operands = (x.reshape(m // 4, 4, n), *(s.reshape(1) for s in scalars))
    memory = [plgpu.SMEM((rows, wide + 4), u32)]
    *row_results, words = dispatch.launch(
        kernel, operands, op=op, out=[*out, shape((n, m // 4), u32)], grid=grid, names=("rows", "columns"),
        interpret=interpret, scratch_types=memory,
    )  # fmt: skip
    return (row_results and [row_results[0], fp8_format.from_ordered(jnp.max(row_results[1]))]), words


def as_matrix(words, dtype):
    """The matrix [N, M] of 8-bit numbers from words [N, M / 4]; no copy."""
    return jax.lax.bitcast_convert_type(words, dtype).reshape(words.shape[0], -1)
