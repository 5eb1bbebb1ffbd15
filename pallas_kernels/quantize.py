"""Quantisation: absmax, casts to FP8 (with the transposed copy), block-wise 8 bits, stochastic rounding to bfloat16.

Per tensor:  x8 = clip(x * (1 / scale), -max, max) in e4m3 (max 448) or e5m2 (max 57344); scale is a float32 [], known
             before the cast. absmax is that of x before the cast, for the scale of the next step.
Transposed:  FP8 products of cuBLASLt contract the last dimension of both operands. So the product of a weight's
             gradient needs the transpose of x8 too: `cast_transpose` reads x once and writes both.
Block-wise:  `block` neighbours of the last dimension share a float32 scale, absmax / max of the dtype (127 for int8);
             NaN or infinity makes all numbers of its block not finite.
Stochastic:  16 random bits are added below the mantissa of a bfloat16, then the low half is dropped: the expectation of
             the result is x.

dtype promise: arithmetic is float32; results are rounded once, to nearest even; NaN stays NaN. A function gives the
same bits in its reference and in its kernel on the same device: `1 / scale` is a correctly rounded division of float32
on a CPU, and the GPU's reciprocal (one unit in the last place) on a GPU, for XLA and Mosaic alike. There is no vjp: the
functions are called inside hand-written vjps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, elementwise, fp8_format, shapes, tiles, transposing
from pallas_kernels.dispatch import Implementation, expect
from pallas_kernels.fp8_format import FP8

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

f32, u32 = jnp.float32, jnp.uint32
FLOATS = (jnp.bfloat16, jnp.float16, f32)
BLOCK = 128


class Cast(NamedTuple):
    """Results of `cast_transpose`."""

    values: jax.Array  # [M, N]
    transposed: jax.Array  # [N, M]
    absmax: jax.Array  # float32 [], of x


class BlockQuantized(NamedTuple):
    """Numbers in 8 bits: number i of a row is values[i] * scales[i // block]."""

    values: jax.Array  # [..., n]
    scales: jax.Array  # float32 [..., n / block]


# --- reference --------------------------------------------------------------------------------------------------------


def _quantize_blocks_xla(x, dtype, block: int) -> BlockQuantized:
    """The reference of `quantize_blocks`.

    All code in this file multiplies with reciprocals, because XLA rewrites divisions by constants and by broadcasts so.
    """
    shape = x.shape
    x = x.astype(f32).reshape(*x.shape[:-1], x.shape[-1] // block, block)
    scales = _scale(fp8_format.absmax(x, axis=-1), dtype)
    x = x * (1 / scales)[..., None]
    x = jnp.round(x) if dtype == jnp.int8 else x
    return BlockQuantized(x.astype(dtype).reshape(shape), scales)


def _scale(top, dtype):
    """Scales of blocks with these largest magnitudes. A lower bound keeps scales of (nearly) zero blocks above 0."""
    largest = 127.0 if dtype == jnp.int8 else dispatch.largest(dtype)
    return jnp.maximum(top * f32(1 / largest), jnp.finfo(f32).tiny)


def _dequantize_blocks_xla(values, scales, dtype):
    """The reference of `dequantize_blocks`."""
    x = values.astype(f32).reshape(*scales.shape, values.shape[-1] // scales.shape[-1])
    return (x * scales[..., None]).reshape(values.shape).astype(dtype)


def random_bits(seed: Int[Array, ""], index: Int[Array, "*b"]) -> Int[Array, "*b"]:
    """32 random bits (uint32) for every index, a counter; the same bits on every device, inside and outside of kernels.

    Two rounds of a mixing function with low bias (Wellons, "Prospecting for hash functions", 2018). The seed is added
    before each round, so the streams of two seeds are not permutations of each other. seed, index: int32 or uint32.
    """
    seed, index = seed.astype(u32), index.astype(u32)
    first = _mix(seed + u32(0x9E3779B9))
    return _mix(_mix(index + first) + _mix(first ^ u32(0x85EBCA6B)))


def _mix(x):
    """The mixing function, a bijection of uint32."""
    x = (x ^ (x >> u32(16))) * u32(0x7FEB352D)
    x = (x ^ (x >> u32(15))) * u32(0x846CA68B)
    return x ^ (x >> u32(16))


def round_with(x: Float[Array, "*b"], bits: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """float32 x as bfloat16, rounded stochastically: adds the upper half of the random `bits` to the 16 bits dropped.

    Usable inside kernels. NaN and infinity do not change; numbers above the largest bfloat16 may become infinity.
    """
    raw = jax.lax.bitcast_convert_type(x, u32)
    rounded = (raw + (bits >> u32(16))) & u32(0xFFFF0000)
    finite = (raw & u32(0x7F800000)) != u32(0x7F800000)
    return jnp.where(finite, jax.lax.bitcast_convert_type(rounded, f32), x).astype(jnp.bfloat16)


# --- kernels ----------------------------------------------------------------------------------------------------------


def _cast_transpose_mosaic(x, scale, dtype, op: str, interpret: bool) -> Cast:
    def body(tile, numbers):
        tile = tile.astype(f32)
        return fp8_format.encode(tile, 1 / numbers[0], dtype), tile

    flat = x.reshape(-1, x.shape[-1])
    (values, top), words = transposing.run(body, flat, (scale,), fp8_format.store_dtype(dtype), op, interpret)
    values = values if values.dtype == dtype else jax.lax.bitcast_convert_type(values, dtype)
    return Cast(values.reshape(x.shape), transposing.as_matrix(words, dtype), top)


def _transpose_mosaic(x8, op: str, interpret: bool):
    bits = jax.lax.bitcast_convert_type(x8, jnp.uint8)
    _, words = transposing.run(lambda tile, _: (tile, None), bits, (), None, op, interpret)
    return transposing.as_matrix(words, x8.dtype)


def _rows_of_blocks(n: int) -> tuple[int, Any]:
    """(blocks per program, their layout): 16 lanes per block with 8 numbers each, so its maximum takes 4 shuffles."""
    layout = plgpu.Layout.TILED(plgpu.Tiling(((8, BLOCK), (2, BLOCK), (8,))), (-5,), (-3, -2), -1)
    return next(rows for rows in (32, 16, 8) if n % rows == 0), layout


def _quantize_blocks_mosaic(x, dtype, op: str, interpret: bool) -> BlockQuantized:
    n = x.size // BLOCK
    rows, layout = _rows_of_blocks(n)

    def kernel(x_ref, values_ref, scales_ref):
        at = pl.ds(jax.lax.axis_index("blocks") * rows, rows)
        x = plgpu.load(x_ref.at[at], layout=layout, optimized=False).astype(f32)
        scales = _scale(fp8_format.absmax(x, axis=1), dtype)
        inverse = jax.lax.broadcast_in_dim(1 / scales, (rows, BLOCK), (0,))
        values = jnp.round(x * inverse).astype(dtype) if dtype == jnp.int8 else fp8_format.encode(x, inverse, dtype)
        tiles.store(values_ref, at, values)
        tiles.store(scales_ref, at, scales)

    stored = dtype if dtype == jnp.int8 else fp8_format.store_dtype(dtype)
    out = [jax.ShapeDtypeStruct((n, BLOCK), stored), jax.ShapeDtypeStruct((n,), f32)]
    values, scales = dispatch.launch(
        kernel, (x.reshape(n, BLOCK),), op=op, out=out, grid=(n // rows,), names=("blocks",), interpret=interpret
    )
    values = values if stored == dtype else jax.lax.bitcast_convert_type(values, dtype)
    return BlockQuantized(values.reshape(x.shape), scales.reshape(*x.shape[:-1], -1))


def _dequantize_blocks_mosaic(values, scales, dtype, op: str, interpret: bool):
    n = scales.size
    kind = values.dtype
    rows, layout = _rows_of_blocks(n)

    def kernel(values_ref, scales_ref, out_ref):
        at = pl.ds(jax.lax.axis_index("blocks") * rows, rows)
        values = plgpu.load(values_ref.at[at], layout=layout, optimized=False)
        values = values.astype(f32) if kind == jnp.int8 else fp8_format.decode(values, kind)
        scales = plgpu.load(scales_ref.at[at], layout=layout.reduce(1), optimized=False)
        out = (values * jax.lax.broadcast_in_dim(scales, (rows, BLOCK), (0,))).astype(dtype)
        tiles.store(out_ref, at, out)

    stored = values if kind == jnp.int8 else fp8_format.as_stored(values)
    out = jax.ShapeDtypeStruct((n, BLOCK), dtype)
    operands = (stored.reshape(n, BLOCK), scales.reshape(n))
    y = dispatch.launch(kernel, operands, op=op, out=out, grid=(n // rows,), names=("blocks",), interpret=interpret)
    return y.reshape(values.shape)


# --- public -----------------------------------------------------------------------------------------------------------


def absmax(
    x: Float[Array, "*b"], *, implementation: Implementation = None, interpret: bool = False
) -> Float[Array, ""]:
    """Largest magnitude of x, float32 []; NaN if x has one."""
    op = "quantize.absmax"
    _check(op, x)
    if not _flat(op, implementation, x):
        return fp8_format.absmax(x)
    return elementwise.run(lambda v, *_: ([], v), (x,), (), [], 1, op, interpret)[1][0]


def cast(
    x: Float[Array, "*b"],
    scale: Float[Array, ""],
    dtype,
    *,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Float[Array, "*b"]:
    """clip(x / scale, -max, max) in e4m3 or e5m2; scale: float32 []."""
    op = "quantize.cast"
    dtype = jnp.dtype(dtype)
    _check(op, x, dtype, FP8, scale)
    if not _flat(op, implementation, x):
        return fp8_format.reference(x, scale, dtype)

    def body(values, scalars, _):
        return [fp8_format.encode(values[0].astype(f32), 1 / scalars[0], dtype)], []

    (y,), _ = elementwise.run(body, (x,), (scale,), [fp8_format.store_dtype(dtype)], 0, op, interpret)
    return y if y.dtype == dtype else jax.lax.bitcast_convert_type(y, dtype)


def cast_transpose(
    x: Float[Array, "*M N"],
    scale: Float[Array, ""],
    dtype,
    *,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Cast:
    """`cast` of x, its transpose, and the absmax of x; the kernel reads x once. Leading dimensions are flattened to M.

    The kernel needs M and N in multiples of 64; with multiples of 128 it writes full cache lines of the transpose.
    """
    op = "quantize.cast_transpose"
    dtype = jnp.dtype(dtype)
    _check(op, x, dtype, FP8, scale)
    expect(x.ndim > 1, op, "x", "[..., N] of two dimensions or more", x.shape)
    if _tiled(op, implementation, x):
        return _cast_transpose_mosaic(x, scale, dtype, op, interpret)
    values = fp8_format.reference(x, scale, dtype)
    return Cast(values, values.reshape(-1, x.shape[-1]).T, fp8_format.absmax(x))


def transpose(
    x8: Float[Array, "M N"], *, implementation: Implementation = None, interpret: bool = False
) -> Float[Array, "N M"]:
    """The transpose of a matrix of 8-bit numbers. The kernel needs M and N in multiples of 64."""
    op = "quantize.transpose"
    expect(x8.ndim == 2 and x8.dtype.itemsize == 1, op, "x8", "[M, N] of 8 bits", f"{x8.dtype} {x8.shape}")
    return _transpose_mosaic(x8, op, interpret) if _tiled(op, implementation, x8) else x8.T


def quantize_blocks(
    x: Float[Array, "*b n"],
    dtype,
    block: int = BLOCK,
    *,
    implementation: Implementation = None,
    interpret: bool = False,
) -> BlockQuantized:
    """Quantises x to int8, e4m3 or e5m2 with a float32 scale for every `block` numbers of a row.

    The kernel supports blocks of 128. Empty leading dimensions are allowed.
    """
    op = "quantize.quantize_blocks"
    dtype = jnp.dtype(dtype)
    kinds = (jnp.dtype(jnp.int8), *FP8)
    expect(x.dtype in FLOATS, op, "dtype of x", "bfloat16, float16 or float32", x.dtype)
    expect(dtype in kinds, op, "dtype", f"one of {', '.join(map(str, kinds))}", dtype)
    expect(block > 0 and x.ndim > 0 and x.shape[-1] % block == 0, op, "block", f"a divisor of n, {x.shape[-1:]}", block)
    if _blocked(op, implementation, x, block):
        return _quantize_blocks_mosaic(x, dtype, op, interpret)
    return _quantize_blocks_xla(x, dtype, block)


def dequantize_blocks(
    blocks: BlockQuantized, dtype, *, implementation: Implementation = None, interpret: bool = False
) -> Float[Array, "*b n"]:
    """The numbers of blocks in `dtype` (bfloat16, float16, float32); values and scales are multiplied in float32."""
    op = "quantize.dequantize_blocks"
    dtype = jnp.dtype(dtype)
    values, scales = blocks
    expect(dtype in FLOATS, op, "dtype", "bfloat16, float16 or float32", dtype)
    expect(values.dtype in (jnp.int8, *FP8), op, "dtype of values", "int8, e4m3 or e5m2", values.dtype)
    fits = values.ndim == scales.ndim > 0 and values.shape[:-1] == scales.shape[:-1] and scales.shape[-1] > 0
    fits = fits and values.shape[-1] % scales.shape[-1] == 0 and scales.dtype == f32
    got = f"{scales.dtype} {scales.shape} for {values.shape}"
    expect(fits, op, "scales", "float32 [..., n / block] for values [..., n]", got)
    if _blocked(op, implementation, values, values.shape[-1] // scales.shape[-1]):
        return _dequantize_blocks_mosaic(values, scales, dtype, op, interpret)
    return _dequantize_blocks_xla(values, scales, dtype)


def stochastic_round(
    x: Float[Array, "*b"],
    seed: Int[Array, ""],
    offset: int | Int[Array, ""] = 0,
    *,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Float[Array, "*b"]:
    """float32 x as bfloat16, rounded up or down at random so that the expectation is x.

    Number i of the flattened x uses `random_bits(seed, i + offset)`; seed: int32 or uint32 [].
    """
    op = "quantize.stochastic_round"
    expect(x.dtype == f32 and x.size > 0, op, "x", "float32, not empty", f"{x.dtype} {x.shape}")
    kinds = (jnp.int32, u32)
    expect(jnp.shape(seed) == () and getattr(seed, "dtype", None) in kinds, op, "seed", "int32 or uint32 []", seed)
    offset = jnp.asarray(offset, None if isinstance(offset, jax.Array) else u32)
    if not _flat(op, implementation, x):
        return round_with(x, random_bits(seed, jax.lax.iota(u32, x.size).reshape(x.shape) + offset.astype(u32)))

    def body(values, scalars, index):
        seed, offset = scalars
        return [round_with(values[0], random_bits(seed, index() + offset.astype(u32)))], []

    return elementwise.run(body, (x,), (seed, offset), [jnp.bfloat16], 0, op, interpret)[0][0]


def _check(op: str, x, dtype=None, dtypes=(), scale=None) -> None:
    """Raises ValueError for wrong dtypes and shapes."""
    expect(x.dtype in FLOATS and x.size > 0, op, "x", "bfloat16, float16 or float32, not empty", f"{x.dtype} {x.shape}")
    expect(dtype is None or dtype in dtypes, op, "dtype", f"one of {', '.join(map(str, dtypes))}", dtype)
    if scale is not None:
        expect(fp8_format.is_scale(scale), op, "scale", "float32 []", fp8_format.dtype_and_shape(scale))


def _flat(op: str, implementation: Implementation, x) -> bool:
    """Whether the elementwise kernel runs."""
    return dispatch.runs_kernel(op, implementation, elementwise.serves(x), elementwise.NEEDS, x.shape)


def _tiled(op: str, implementation: Implementation, x) -> bool:
    """Whether the transposing kernel runs."""
    m = x.size // x.shape[-1] if x.size else 0
    n = x.shape[-1]
    needs = f"expected other sizes: the kernel needs [M, N] in multiples of {transposing.TILE}, below 2^31"
    return dispatch.runs_kernel(op, implementation, transposing.serves(m, n), needs, (m, n))


def _blocked(op: str, implementation: Implementation, x, block: int) -> bool:
    """Whether the block-wise kernel runs."""
    fits = block == BLOCK and x.size % (8 * BLOCK) == 0 and 0 < x.size < elementwise.LARGEST
    needs = (
        f"expected other blocks: the kernel needs blocks of {BLOCK}, eight of them or a multiple, below 2^31 numbers"
    )
    return dispatch.runs_kernel(op, implementation, fits, needs, f"blocks of {block} in {x.shape}")


def cases(sizes: shapes.Sizes, tokens: int) -> list[shapes.Case]:
    """Casts of activations, gradients and weights, block-wise copies of weights, rounded weights."""
    shape = jax.ShapeDtypeStruct
    case = shapes.Case
    n = tokens * sizes.hidden
    weight = sizes.intermediate * sizes.hidden
    x = shape((tokens, sizes.hidden), jnp.bfloat16)
    w = shape((sizes.intermediate, sizes.hidden), jnp.bfloat16)
    scale = shape((), f32)
    seed = shape((), jnp.int32)
    scales = shape((w.shape[0], w.shape[1] // BLOCK), f32)
    e4m3, e5m2 = FP8

    def bind(f, *last):
        return lambda *arrays, **how: f(*arrays, *last, **how)

    def dequantize(values, scales, **how):
        return dequantize_blocks(BlockQuantized(values, scales), jnp.bfloat16, **how)

    return [
        case("absmax", absmax, (x,), 2 * n),
        case("cast_e4m3", bind(cast, e4m3), (x, scale), 3 * n),
        case("cast_e5m2", bind(cast, e5m2), (x, scale), 3 * n),
        case("cast_transpose_e4m3", bind(cast_transpose, e4m3), (x, scale), 4 * n),
        case("cast_transpose_e5m2", bind(cast_transpose, e5m2), (x, scale), 4 * n),
        case("transpose", transpose, (shape(w.shape, e4m3),), 2 * weight),
        case("quantize_blocks_int8", bind(quantize_blocks, jnp.int8), (w,), 3 * weight),
        case("quantize_blocks_e4m3", bind(quantize_blocks, e4m3), (w,), 3 * weight),
        case("dequantize_blocks_int8", dequantize, (shape(w.shape, jnp.int8), scales), 3 * weight),
        case("dequantize_blocks_e4m3", dequantize, (shape(w.shape, e4m3), scales), 3 * weight),
        case("stochastic_round", stochastic_round, (shape(w.shape, f32), seed), 6 * weight),
    ]
