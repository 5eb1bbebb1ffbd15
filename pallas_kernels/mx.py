"""MXFP8: e4m3 values and a power of two for every 32 neighbours along the dimension that a product sums over.

x[i, k] = values[i, k] * scales[i, k / 32] (OCP Microscaling Formats 1.0). The scale is the smallest power of two with
which no value of the block exceeds 448 (Mishra et al. 2025, arXiv:2506.08027), at least 2^-126. NaN or infinity in a
block makes its scale NaN. Products of a layer sum over rows of its operands, and in the backward pass over columns;
each needs blocks along its own dimension. `quantize` makes blocks along rows. `quantize_transposed` makes blocks along
columns and writes them as rows of the transpose. `quantize_both`, for gradients, makes both and reads x once.

Kernels: a block along a row is 4 lanes x 8 numbers. For columns a program has 128 rows and 64 columns, and each warp 32
of these rows, the height of a block. Rows 4i + k are read into an array for each k (see `transposing`). The 8 values of
i of a column are in 2 registers of 4 lanes, so that its largest number is found within a warp. The bytes of four rows
make a 32-bit word of the transpose. Words and scales go through shared memory and are written along rows of the
transpose, 32 and 4 bytes at a time.

dtype promise: exponents are integers and scales are powers of two, so the cast to e4m3 (to nearest even) is the only
rounding, and kernels and references are equal to the bit. There is no vjp: the functions are called inside hand-written
vjps.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, elementwise, fp8_format, shapes, tiles
from pallas_kernels.dispatch import Implementation, expect
from pallas_kernels.fp8_format import E4M3

if TYPE_CHECKING:
    from jaxtyping import Array, Float

f32, i32, u32, u8 = jnp.float32, jnp.int32, jnp.uint32, jnp.uint8
FLOATS = (jnp.bfloat16, jnp.float16, f32)
E8M0 = jnp.dtype(jnp.float8_e8m0fnu)
BLOCK = 32
ROWS, COLUMNS = 4 * BLOCK, 2 * BLOCK  # of a program with blocks along columns
PITCH = 12  # words between groups of 4 columns in shared memory: 8 such rows, and their transpose, use different banks
NAN = 255  # of e8m0, whose other bits are the exponent of a float32


class MX(NamedTuple):
    """An MXFP8 array: number (i, k) is values[i, k] * scales[i, k / 32]."""

    values: jax.Array  # e4m3 [..., n]
    scales: jax.Array  # e8m0 [..., n / 32]


# --- reference --------------------------------------------------------------------------------------------------------


def _scale(top):
    """(scale as bits of e8m0 in int32, 1 / scale in float32), from `fp8.ordered` largest magnitudes of blocks."""
    exponent = top >> 23
    # 448 = 1.75 * 2^8, and 0x600000 is the mantissa of 1.75. Not 2^-127: some devices flush that float32 to zero.
    code = jnp.maximum(exponent - jnp.where((top & i32(0x7FFFFF)) > i32(0x600000), i32(7), i32(8)), i32(1))
    return jnp.where(exponent == i32(255), i32(NAN), code), fp8_format.from_ordered((i32(254) - code) << 23)


def _quantize_xla(x) -> MX:
    blocks = x.astype(f32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    code, inverse = _scale(jnp.max(fp8_format.ordered(blocks), axis=-1))
    top = dispatch.largest(E4M3)
    values = jnp.clip(blocks * inverse[..., None], -top, top).astype(E4M3)
    return MX(values.reshape(x.shape), fp8_format.same_bits(code.astype(u8), E8M0))


# --- kernels ----------------------------------------------------------------------------------------------------------


def _quantize_mosaic(x, op: str, interpret: bool) -> MX:
    n = x.size // BLOCK
    rows = next(rows for rows in (128, 64, 32) if n % rows == 0)
    layout = plgpu.Layout.TILED(plgpu.Tiling(((32, BLOCK), (8, BLOCK), (8,))), (-5,), (-3, -2), -1)

    def kernel(x_ref, values_ref, scales_ref):
        at = pl.ds(jax.lax.axis_index("blocks") * rows, rows)
        x = plgpu.load(x_ref.at[at], layout=layout, optimized=False).astype(f32)
        code, inverse = _scale(jnp.max(fp8_format.ordered(x), axis=1))
        inverse = jax.lax.broadcast_in_dim(inverse, (rows, BLOCK), (0,))
        values_ref[at] = fp8_format.encode(x, inverse, E4M3)
        tiles.store(scales_ref, at, code.astype(u8))

    out = [jax.ShapeDtypeStruct((n, BLOCK), fp8_format.store_dtype(E4M3)), jax.ShapeDtypeStruct((n,), u8)]
    values, scales = dispatch.launch(
        kernel, (x.reshape(n, BLOCK),), op=op, out=out, grid=(n // rows,), names=("blocks",), interpret=interpret
    )
    return MX(
        fp8_format.same_bits(values, E4M3).reshape(x.shape),
        fp8_format.same_bits(scales, E8M0).reshape(*x.shape[:-1], -1),
    )


def _columns_mosaic(x, rows_too: bool, op: str, interpret: bool) -> list[MX]:
    """[x in blocks along rows if rows_too, x in blocks along columns].

    Works on tiles [block, i, column / 4, column % 4] of rows 4i + k, for each k.
    """
    m, n = x.shape
    high = m // BLOCK
    fours = COLUMNS // 4
    tile = (4, 8, 8, 4)
    layout = plgpu.Layout.TILED(plgpu.Tiling((tile, (4, 8, 4))), (-7,), (-2, -3), -1)
    word_layout = plgpu.Layout.WG_STRIDED((fours, 4, 4, 8), vec_size=1)
    scale_layout = plgpu.Layout.WG_STRIDED((fours, 4, 4), vec_size=1)

    def kernel(x_ref, *refs):
        i = jax.lax.axis_index("rows")
        j = jax.lax.axis_index("columns")
        down = pl.ds(4 * i, 4)
        across = pl.ds(j * fours, fours)
        parts = [pl.ds(j * fours + 8 * c, 8) for c in range(COLUMNS // BLOCK)]
        *by_row, words_ref, scales_ref, words, scales = refs

        def load(k, at):
            return plgpu.load(x_ref.at[down, :, k, at], layout=layout, optimized=False)

        loaded = [[load(k, at) for k in range(4)] for at in parts]
        row_scales = []
        for c, at in enumerate(parts):
            numbers = [rows.astype(f32) for rows in loaded[c]]
            tops = [fp8_format.ordered(rows) for rows in numbers]
            top = jnp.maximum(jnp.maximum(tops[0], tops[1]), jnp.maximum(tops[2], tops[3]))
            code, inverse = _scale(jnp.max(top, axis=1))
            inverse = jax.lax.broadcast_in_dim(inverse, tile, (0, 2, 3))
            word = _joined([fp8_format.same_bits(fp8_format.encode(rows, inverse, E4M3), u8) for rows in numbers])
            here = pl.ds(8 * c, 8)
            tiles.store(scales, (slice(None), here), code)
            tiles.store(words.transpose((0, 2, 1, 3)), (slice(None), slice(None), here, pl.ds(0, 4)), word)
            if by_row:
                scales_of = [_scale(jnp.max(jnp.max(top, axis=3), axis=2)) for top in tops]
                row_scales.append([code for code, _ in scales_of])
                for k, (rows, (_, inverse)) in enumerate(zip(numbers, scales_of, strict=True)):
                    inverse = jax.lax.broadcast_in_dim(inverse, tile, (0, 1))
                    tiles.store(by_row[0], (down, slice(None), k, at), fp8_format.encode(rows, inverse, E4M3))
        for k, codes in enumerate(zip(*row_scales, strict=True)):
            tiles.store(by_row[1], (down, slice(None), k, j), _joined(codes).astype(jnp.uint16))
        transposed = words.at[:, :, :, pl.ds(0, 4)].transpose((1, 0, 3, 2))
        word = plgpu.load(transposed, layout=word_layout, optimized=False)
        tiles.store(words_ref.transpose((0, 2, 1, 3)), (across, down), word)
        code = plgpu.load(scales.transpose((1, 2, 0)), layout=scale_layout, optimized=False)
        tiles.store(scales_ref, (across, slice(None), down), code.astype(u8))

    shape = jax.ShapeDtypeStruct
    out = [shape((n // 4, 4, high, 8), u32), shape((n // 4, 4, high), u8)]
    sizes = [(n, m)]
    if rows_too:
        values = shape((high, 8, 4, n // 4, 4), fp8_format.store_dtype(E4M3))
        out = [values, shape((high, 8, 4, n // COLUMNS), jnp.uint16), *out]
        sizes = [(m, n), (n, m)]
    outputs = dispatch.launch(
        kernel, (x.reshape(high, 8, 4, n // 4, 4),), op=op, out=out, grid=(m // ROWS, n // COLUMNS),
        names=("rows", "columns"), interpret=interpret,
        scratch_types=[plgpu.SMEM((4, fours, 8, PITCH), u32), plgpu.SMEM((4, fours, 4), i32)],
    )  # fmt: skip
    return [
        MX(fp8_format.same_bits(values, E4M3).reshape(size), fp8_format.same_bits(scales, E8M0).reshape(size[0], -1))
        for values, scales, size in zip(outputs[::2], outputs[1::2], sizes, strict=True)
    ]


def _joined(parts):
    """Words (uint32) that join arrays of numbers below 256; the first array has the lowest bits."""
    return functools.reduce(jnp.bitwise_or, [part.astype(u32) << u32(8 * k) for k, part in enumerate(parts)])


# --- public -----------------------------------------------------------------------------------------------------------


def quantize(x: Float[Array, "*M N"], *, implementation: Implementation = None, interpret: bool = False) -> MX:
    """Quantises x in blocks along its rows: values e4m3 [..., N], scales e8m0 [..., N / 32].

    x: bfloat16, float16 or float32. The kernel supports sizes that 1024 divides. Raises ValueError unless 32 divides N.
    """
    op = "mx.quantize"
    _check(op, x, x.ndim > 0 and x.shape[-1] % BLOCK == 0, f"[..., N], N a multiple of {BLOCK}")
    fits = x.size % (32 * BLOCK) == 0 and 0 < x.size < elementwise.LARGEST
    needs = f"expected other sizes: the kernel needs a multiple of {32 * BLOCK} numbers, fewer than 2^31"
    return (
        _quantize_mosaic(x, op, interpret)
        if dispatch.runs_kernel(op, implementation, fits, needs, x.shape)
        else _quantize_xla(x)
    )


def quantize_transposed(
    x: Float[Array, "M N"], *, implementation: Implementation = None, interpret: bool = False
) -> MX:
    """Quantises the transpose, in blocks along the columns of x: values e4m3 [N, M], scales e8m0 [N, M / 32].

    The kernel supports multiples of 128 as M and of 64 as N. Raises ValueError unless 32 divides M.
    """
    op = "mx.quantize_transposed"
    _check(op, x, x.ndim == 2 and x.shape[0] % BLOCK == 0, f"[M, N], M a multiple of {BLOCK}")
    if _tiled(op, implementation, x):
        return _columns_mosaic(x, False, op, interpret)[0]
    return _quantize_xla(x.T)


def quantize_both(
    x: Float[Array, "M N"], *, implementation: Implementation = None, interpret: bool = False
) -> tuple[MX, MX]:
    """(`quantize`, `quantize_transposed`) of x; the kernel reads x once and supports the sizes of the latter.

    Raises ValueError unless 32 divides M and N.
    """
    op = "mx.quantize_both"
    fits = x.ndim == 2 and x.shape[0] % BLOCK == x.shape[-1] % BLOCK == 0
    _check(op, x, fits, f"[M, N], multiples of {BLOCK}")
    if _tiled(op, implementation, x):
        rows, columns = _columns_mosaic(x, True, op, interpret)
        return rows, columns
    return _quantize_xla(x), _quantize_xla(x.T)


def _check(op: str, x, fits: bool, expected: str) -> None:
    """Raises ValueError for a wrong dtype or shape."""
    expect(x.dtype in FLOATS, op, "dtype of x", "bfloat16, float16 or float32", x.dtype)
    expect(fits, op, "x", expected, x.shape)


def _tiled(op: str, implementation: Implementation, x) -> bool:
    """Whether the kernel with blocks along columns runs."""
    fits = x.shape[0] % ROWS == x.shape[1] % COLUMNS == 0 < x.size < elementwise.LARGEST
    needs = f"expected other sizes: the kernel needs M in multiples of {ROWS}, N of {COLUMNS}, M N below 2^31"
    return dispatch.runs_kernel(op, implementation, fits, needs, x.shape)


def cases(sizes: shapes.Sizes, tokens: int) -> list[shapes.Case]:
    """Activations and weights along rows, weights along columns, gradients along both."""
    case = shapes.Case
    x = jax.ShapeDtypeStruct((tokens, sizes.hidden), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((sizes.intermediate, sizes.hidden), jnp.bfloat16)

    def mx_bytes(s: jax.ShapeDtypeStruct) -> int:
        return s.size + s.size // BLOCK

    return [
        case("quantize", quantize, (x,), 2 * x.size + mx_bytes(x)),
        case("quantize_weight", quantize, (w,), 2 * w.size + mx_bytes(w)),
        case("quantize_transposed", quantize_transposed, (x,), 2 * x.size + mx_bytes(x)),
        case("quantize_transposed_weight", quantize_transposed, (w,), 2 * w.size + mx_bytes(w)),
        case("quantize_both", quantize_both, (x,), 2 * x.size + 2 * mx_bytes(x)),
    ]
