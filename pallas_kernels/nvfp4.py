"""NVFP4: e2m1 values, an e4m3 scale for every 16 neighbours along the dimension that a product sums over, and a float32
scale for the tensor.

x[i, k] = values[i, k] * scales[i, k / 16] * tensor_scale (NVIDIA 2025, arXiv:2509.25149). The tensor scale makes the
largest block scale 448. A block's scale is its largest magnitude / 6, so that this number becomes 6, e2m1's largest.
With a seed, values are rounded stochastically and block scales are rounded up, since a scale rounded down would clip
the largest number. NaN or infinity anywhere makes the tensor scale not finite, and so every number.

`quantize` makes blocks along rows. `quantize_rotated` first multiplies groups of 16 rows by diag(signs) H / 4, a random
Hadamard matrix. Then it makes blocks along columns and writes them as rows of the transpose. The matrix is orthogonal:
it does not change the product of two such operands, and spreads outliers over a block. Numbers from 2^124 on may
overflow in it. `quantize_both`, for gradients, makes both. `quantize_weights` and `quantize_weights_transposed` have
one scale for 16 x 16 numbers, so that a matrix and its transpose are the same numbers. Each function reads x twice, the
first time for the tensor's largest magnitude.

Kernels: two neighbours of a row are read as a 32-bit word and become one byte. Blocks along a row are 2 or 4 lanes. For
columns a program has 128 rows and 64 columns. Rows 16 i + r are read into an array for each r, so that one thread has
all 16 numbers of a block: it computes their rotation (a Walsh-Hadamard butterfly of additions) and their largest
magnitude, and joins them to two words. Words and scales go through shared memory; a program writes 64 bytes of words
and 8 bytes of scales to each row of the transpose.

dtype promise: arithmetic is float32. Rotations are additions in one order and rounding consists of exact steps. Instead
of divisions there are products with reciprocals: those of e4m3 are from a table, those of tensor scales are computed
outside of kernels. So there is nothing that a GPU approximates or a compiler may contract, and kernels and references
are equal to the bit. Random numbers are hashes of the seed and the position of a pair of numbers, 16 bits for each:
expectations are right within 2^-17 of a step. There is no vjp: the functions are called inside hand-written vjps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, elementwise, fp8, quantize as plain, shapes, tiles
from pallas_kernels.dispatch import Implementation, need
from pallas_kernels.fp8 import E4M3

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

f32, i32, u32, u8 = jnp.float32, jnp.int32, jnp.uint32, jnp.uint8
FLOATS = (jnp.bfloat16, jnp.float16, f32)
E2M1 = jnp.dtype(jnp.float4_e2m1fn)
BLOCK = 16
WORDS = BLOCK // 2  # words of two numbers in a block
ROWS, COLUMNS = 8 * BLOCK, 4 * BLOCK  # of a program that has a tile of a matrix
E4M3_MAX, E2M1_MAX = 448.0, 6.0
INFINITE = 0x7F800000  # `fp8.ordered` of infinity; NaN is above it
RECIPROCALS = [8 / (8 + m) for m in range(8)]  # of e4m3's mantissas
# Mosaic's other lowering infers layouts, which takes half a minute for these kernels of some thousand operations.
LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
MAGIC = np.float32(1.5 * 2**23)  # its last bit is 1, and so is that of numbers near it


class NVFP4(NamedTuple):
    """An NVFP4 array: number (i, k) is values[i, k] * scales[i, k / 16] * tensor_scale."""

    values: jax.Array  # e2m1 [..., n]; float32 from the references
    scales: jax.Array  # e4m3 [..., n / 16]; float32 from the references
    tensor_scale: jax.Array  # float32 []


# --- arithmetic of references and kernels -----------------------------------------------------------------------------


def hadamard(rows: list) -> list:
    """16 arrays multiplied by H / 4, H[i][j] = (-1)^popcount(i & j), in float32: four rounds of additions."""
    for distance in (1, 2, 4, 8):
        below = [rows[i - distance] if i & distance else rows[i] for i in range(BLOCK)]
        above = [rows[i] if i & distance else rows[i + distance] for i in range(BLOCK)]
        rows = [a - b if i & distance else a + b for i, (a, b) in enumerate(zip(below, above, strict=True))]
    return [row * f32(0.25) for row in rows]


def _signed(x, signs, row: int):
    """x, negated if bit `row` of signs is 1."""
    return fp8.from_ordered(_bits(x) ^ (((signs >> u32(row)) & u32(1)) << u32(31)))


def _bits(x):
    return jax.lax.bitcast_convert_type(x, u32)


def _factors(absmax):
    """(tensor scale, factor from a block's largest magnitude to its scale, reciprocal of the tensor scale).

    A lower bound of absmax keeps them finite for tensors of zeros.
    """
    scale = jnp.maximum(absmax, f32(2.0**-100)) * f32(1 / (E4M3_MAX * E2M1_MAX))
    finite = absmax < jnp.inf
    return scale, jnp.where(finite, 1 / (f32(E2M1_MAX) * scale), 0), jnp.where(finite, 1 / scale, 0)


def _scale(top, factor, up: bool):
    """Scales of blocks as float32 that e4m3 can represent. top: `fp8.ordered` largest magnitudes; up: round up."""
    top = fp8.from_ordered(jnp.where(top < i32(INFINITE), top, i32(0)))
    ideal = jnp.minimum(top * factor, f32(E4M3_MAX))
    return fp8.up_to_e4m3(ideal) if up else fp8.to_e4m3(ideal)


def _inverse(scale, reciprocal):
    """1 / (scale * tensor scale); 0 if the scale is 0: all numbers of such a block become 0."""
    bits = _bits(scale)
    found = f32(RECIPROCALS[0])
    mantissa = bits & u32(7 << 20)
    for m, value in enumerate(RECIPROCALS[1:], 1):
        found = jnp.where(mantissa == u32(m << 20), f32(value), found)
    inverse = found * fp8.power_of_two(u32(254) - (bits >> u32(23))) * reciprocal
    return jnp.where(scale == f32(0), f32(0), inverse)


def _steps(x, inverse, dither):
    """(|x * inverse|, at most 6, in steps of its binade, before rounding but with dither; the binade's exponent)."""
    size = jnp.abs(x * inverse)
    size = jnp.where(size < f32(E2M1_MAX), size, f32(E2M1_MAX))
    exponent = jnp.maximum(_bits(size) >> u32(23), u32(127))  # below 1 steps are those of [1, 2), 0.5
    steps = size * fp8.power_of_two(u32(255) - exponent)
    return (steps if dither is None else steps + dither), exponent


def _value(x, inverse, dither):
    """x * inverse rounded to e2m1, as float32."""
    steps, exponent = _steps(x, inverse, dither)
    size = jnp.abs(fp8.nearest(steps)) * fp8.power_of_two(exponent - u32(1))
    return jnp.where(_negative(x), -size, size)


def _negative(x):
    """Whether the sign bit of x is set; False for NaN, whose sign differs between devices."""
    return _bits(x) - u32(1 << 31) <= u32(INFINITE)


def _code(x, inverse, dither):
    """The four bits of x * inverse rounded to e2m1, as uint32."""
    steps, exponent = _steps(x, inverse, dither)
    size = _bits(steps + MAGIC) + (exponent + exponent - u32(int(MAGIC.view(np.uint32)) + 2 * 127))
    return jnp.where(_negative(x), size + u32(8), size)


def _dithers(seed, index):
    """Two random numbers for each index of a pair of numbers: see `_dither`."""
    random = plain.random_bits(seed, index)
    return _dither(random & u32(0xFFFF)), _dither(random >> u32(16))


def _dither(random):
    """A random number from (-1/2, 1/2), to add to steps before they are rounded to nearest. random: 16 random bits.

    It is an odd multiple of 2^-17.
    """
    return fp8.from_ordered((random << u32(7)) | u32(0x3F800040)) - f32(1.5)


# --- reference --------------------------------------------------------------------------------------------------------


def reference(x: Float[Array, "*M N"], seed: Int[Array, ""] | None = None) -> NVFP4:
    """`quantize` with results in float32 that the formats can represent: a cast to them changes no number."""
    blocks = x.astype(f32).reshape(-1, x.shape[-1] // BLOCK, BLOCK)
    number = jax.lax.broadcasted_iota(u32, (blocks.shape[0], x.shape[-1]), 0) * u32(x.shape[-1])
    number = number + jax.lax.broadcasted_iota(u32, number.shape, 1)
    q = _in_blocks(blocks, seed, (number >> u32(1)).reshape(blocks.shape), number.reshape(blocks.shape))
    return NVFP4(q.values.reshape(x.shape), q.scales.reshape(*x.shape[:-1], -1), q.tensor_scale)


def reference_rotated(x: Float[Array, "M N"], rotation: Int[Array, ""], seed: Int[Array, ""] | None = None) -> NVFP4:
    """`quantize_rotated` with results in float32, as `reference`."""
    blocks = rotate(x, rotation).reshape(x.shape[1], -1, BLOCK)
    row, column = (jax.lax.broadcasted_iota(u32, x.shape[::-1], axis).reshape(blocks.shape) for axis in (0, 1))
    q = _in_blocks(blocks, seed, (column >> u32(1)) * u32(x.shape[1]) + row, column)
    return NVFP4(q.values.reshape(x.shape[::-1]), q.scales, q.tensor_scale)


def reference_weights(w: Float[Array, "M N"]) -> tuple[NVFP4, NVFP4]:
    """(`quantize_weights`, `quantize_weights_transposed`) with results in float32, as `reference`."""
    m, n = w.shape
    scale, factor, reciprocal = _factors(fp8.absmax(w))
    blocks = w.astype(f32).reshape(m // BLOCK, BLOCK, n // BLOCK, BLOCK)
    scales = _scale(jnp.max(fp8.ordered(blocks), axis=(1, 3)), factor, False)
    inverse = _inverse(scales, reciprocal)

    def quantized(w, scales, inverse):
        blocks = w.astype(f32).reshape(scales.shape[0], BLOCK, -1, BLOCK)
        values = _value(blocks, inverse[:, None, :, None], None).reshape(w.shape)
        return NVFP4(values, jnp.repeat(scales, BLOCK, axis=0), scale)

    return quantized(w, scales, inverse), quantized(_transposed(w), scales.T, inverse.T)


def rotate(x: Float[Array, "M N"], rotation: Int[Array, ""]) -> Float[Array, "N M"]:
    """Multiplies each group of 16 rows of x by diag(signs) H / 4 and transposes; float32.

    The signs are 16 random bits of the seed `rotation`, uint32 or int32 [].
    """
    shape = x.shape[1], x.shape[0] // BLOCK, BLOCK
    place = jax.lax.broadcasted_iota(u32, shape, 2)
    y = _transposed(x).astype(f32).reshape(shape)
    y = fp8.from_ordered(_bits(y) ^ (((_signs(rotation) >> place) & u32(1)) << u32(31)))
    for distance in (1, 2, 4, 8):  # `hadamard`, written so that XLA compiles it to two loops
        other = jnp.flip(y.reshape(*shape[:2], -1, 2, distance), axis=3).reshape(shape)
        y = jnp.where((place & u32(distance)) == u32(0), y + other, other - y)
        # On GPUs XLA stores y here anyway; on CPUs, without a barrier, every reader would compute all 15 additions.
        y = jax.lax.optimization_barrier(y) if distance == 2 else y
    return (y * f32(0.25)).reshape(x.shape[::-1])


def _transposed(x):
    """x^T, transposed in memory too; otherwise XLA reads columns of x in every loop that follows."""
    return with_layout_constraint(x.T, Layout(major_to_minor=(0, 1)))


def _signs(rotation):
    """The random bits that a rotation takes its signs from, uint32 []."""
    return plain.random_bits(rotation, u32(0))


def _in_blocks(blocks, seed, pair, place) -> NVFP4:
    """Quantises float32 blocks along the last axis.

    pair: index of the pair of each number, for random numbers; place: its last bit says which of the pair it is.
    """
    scale, factor, reciprocal = _factors(fp8.absmax(blocks))
    scales = _scale(jnp.max(fp8.ordered(blocks), axis=-1), factor, seed is not None)
    dither = None
    if seed is not None:
        dither = _dither((plain.random_bits(seed, pair) >> ((place & u32(1)) << u32(4))) & u32(0xFFFF))
    inverse = _inverse(scales, reciprocal)[..., None]
    return NVFP4(_value(blocks, inverse, dither), scales, scale)


def _narrow(q: NVFP4) -> NVFP4:
    """The result of a reference in the dtypes of the format."""
    return NVFP4(q.values.astype(E2M1), q.scales.astype(E4M3), q.tensor_scale)


# --- kernels ----------------------------------------------------------------------------------------------------------


def _pairs(x, shape):
    """x as words of two neighbours, uint32 of this shape. A float32 x gets another dimension of 2 instead. No copy."""
    if x.dtype == f32:
        return x.reshape(*shape, 2)
    return jax.lax.bitcast_convert_type(x.reshape(*shape, 2), u32)


def _load(ref, at, layout, dtype):
    """(first numbers, second numbers) of the pairs at an index, float32; dtype: of the numbers."""
    if dtype == f32:
        return tuple(tiles.load(ref, (*at, second), layout) for second in (0, 1))
    word = tiles.load(ref, at, layout)
    if dtype == jnp.bfloat16:
        return fp8.from_ordered(word << u32(16)), fp8.from_ordered(word & u32(0xFFFF0000))

    def half(bits):
        return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), dtype).astype(f32)

    return half(word & u32(0xFFFF)), half(word >> u32(16))


def _byte(pair, inverse, dither):
    """Pairs rounded to e2m1, joined to bytes."""
    first, second = (_code(x, inverse, d) for x, d in zip(pair, dither, strict=True))
    return (first | (second << u32(4))).astype(u8)


def _top(*numbers):
    """The elementwise maximum of the magnitudes of arrays, `fp8.ordered`."""
    found = [fp8.ordered(x) for x in numbers]
    while len(found) > 1:
        found = [jnp.maximum(*found[i : i + 2]) if i + 1 < len(found) else found[i] for i in range(0, len(found), 2)]
    return found[0]


def _stored(scale):
    """Scales as bytes of e4m3."""
    return fp8.same_bits(fp8.encode(scale, f32(1), E4M3), u8)


def _absmax(x, op: str, interpret: bool):
    """The largest magnitude of x, float32 []."""
    return elementwise.run(lambda v, *_: ([], v), (x,), (), [], 1, op, interpret)[1][0]


def _rows_mosaic(x, seed, op: str, interpret: bool) -> NVFP4:
    """The kernel of `quantize`."""
    n = x.size // BLOCK
    dtype = x.dtype
    rows = next(rows for rows in (256, 128, 64) if n % rows == 0)
    lanes, vector = ((4, 8), 1) if dtype == f32 else ((16, 2), 4)
    layout = tiles.layout((4, 1), lanes, vector)
    shape = (rows, WORDS)
    tensor_scale, *scalars = _factors(_absmax(x, op, interpret))
    scalars += [] if seed is None else [seed]

    def kernel(x_ref, *refs):
        factor, reciprocal, *seed = (ref[0] for ref in refs[:-2])
        values_ref, scales_ref = refs[-2:]
        start = jax.lax.axis_index("blocks") * rows
        at = (pl.ds(start, rows),)
        pair = _load(x_ref, (*at, slice(None)), layout, dtype)
        dither = None, None
        if seed:

            def iota(axis: int):
                return plgpu.broadcasted_iota(u32, shape, axis, layout=layout)

            dither = _dithers(seed[0], (iota(0) + start.astype(u32)) * u32(WORDS) + iota(1))
        scale = _scale(jnp.max(_top(*pair), axis=1), factor, bool(seed))
        inverse = jax.lax.broadcast_in_dim(_inverse(scale, reciprocal), shape, (0,))
        tiles.store(values_ref, at, _byte(pair, inverse, dither))
        tiles.store(scales_ref, at, _stored(scale))

    out = [jax.ShapeDtypeStruct((n, WORDS), u8), jax.ShapeDtypeStruct((n,), u8)]
    operands = (_pairs(x, (n, WORDS)), *(s.reshape(1) for s in scalars))
    values, scales = dispatch.launch(
        kernel, operands, op=op, out=out, grid=(n // rows,), names=("blocks",), interpret=interpret
    )
    values = fp8.same_bits(values, E2M1).reshape(x.shape)
    scales = fp8.same_bits(scales, E4M3).reshape(*x.shape[:-1], -1)
    return NVFP4(values, scales, tensor_scale)


def _tiled_layout(dtype):
    """The layout of [blocks of 16 rows, blocks of 16 columns, words]: 8 or 4 lanes per block with 1 or 2 words each."""
    return tiles.layout((4, 1, 1), (1, 4, 8), 1) if dtype == f32 else tiles.layout((4, 1, 1), (2, 4, 4), 2)


def _tile_of() -> tuple:
    """(the program's blocks of rows, its blocks of columns), as slices."""
    i, j = jax.lax.axis_index("rows"), jax.lax.axis_index("columns")
    return pl.ds(i * (ROWS // BLOCK), ROWS // BLOCK), pl.ds(j * (COLUMNS // BLOCK), COLUMNS // BLOCK)


def _absmax_mosaic(x, rotation, plain_too: bool, op: str, interpret: bool) -> list:
    """[absmax of x if plain_too, absmax of `rotate`]; the kernel reads x once."""
    m, n = x.shape
    dtype = x.dtype
    width = COLUMNS // 2
    high = ROWS // BLOCK
    layout = plgpu.Layout.WG_STRIDED((high, width), vec_size=1 if dtype == f32 else 2)
    grid = (m // ROWS, n // COLUMNS)

    def kernel(x_ref, signs_ref, *refs):
        i, j = jax.lax.axis_index("rows"), jax.lax.axis_index("columns")
        down, across = pl.ds(i * high, high), pl.ds(j * width, width)
        signs = signs_ref[0]
        loaded = [_load(x_ref, (down, r, across), layout, dtype) for r in range(BLOCK)]
        tops = [_top(*(number for pair in loaded for number in pair))] if plain_too else []
        rotated = [hadamard([_signed(pair[p], signs, r) for r, pair in enumerate(loaded)]) for p in (0, 1)]
        for ref, top in zip(refs, [*tops, _top(*rotated[0], *rotated[1])], strict=True):
            ref[i, j] = jnp.max(top)

    out = [jax.ShapeDtypeStruct(grid, i32)] * (1 + plain_too)
    operands = _pairs(x, (m // BLOCK, BLOCK, n // 2)), _signs(rotation).reshape(1)
    found = dispatch.launch(kernel, operands, op=op, out=out, grid=grid, names=("rows", "columns"), interpret=interpret)
    return [fp8.from_ordered(jnp.max(top)) for top in found]


def _columns_mosaic(x, rotation, columns, rows, op: str, interpret: bool) -> list[NVFP4]:
    """[x in blocks along rows if `rows`, rotated x^T]; rows, columns: (absmax, seed or None) of either."""
    n = x.shape[1]
    dtype = x.dtype
    layout = _tiled_layout(dtype)
    wanted = ([rows] if rows else []) + [columns]
    factors = [_factors(absmax) for absmax, _ in wanted]
    seeded = [seed is not None for _, seed in wanted]
    scalars = [_signs(rotation)]
    for (_, *two), (_, seed) in zip(factors, wanted, strict=True):
        scalars += [*two, jnp.uint32(0) if seed is None else seed.astype(u32)]

    def kernel(x_ref, *refs):
        signs, *row_and_column_scalars = [ref[0] for ref in refs[: len(scalars)]]
        *by_row, words_ref, scales_ref, words, scales = refs[len(scalars) :]
        down, across = _tile_of()
        loaded = [_load(x_ref, (down, r, across, slice(None)), layout, dtype) for r in range(BLOCK)]
        shape = loaded[0][0].shape

        def iota(axis: int):
            return plgpu.broadcasted_iota(u32, shape, axis, layout=layout)

        block = iota(0) + down.start.astype(u32)
        word = (iota(1) + across.start.astype(u32)) * u32(WORDS) + iota(2)
        if rows:
            factor, reciprocal, seed = row_and_column_scalars[:3]
            for r, pair in enumerate(loaded):
                scale = _scale(jnp.max(_top(*pair), axis=2), factor, seeded[0])
                inverse = _repeated(_inverse(scale, reciprocal), shape, layout)
                index = (block * u32(BLOCK) + u32(r)) * u32(n // 2) + word
                dither = _dithers(seed, index) if seeded[0] else (None, None)
                tiles.store(by_row[0], (down, r, across), _byte(pair, inverse, dither))
                tiles.store(by_row[1], (down, r, across), _stored(scale))
        factor, reciprocal, seed = row_and_column_scalars[-3:]
        for p in (0, 1):
            numbers = hadamard([_signed(pair[p], signs, r) for r, pair in enumerate(loaded)])
            scale = _scale(_top(*numbers), factor, seeded[-1])
            inverse = _inverse(scale, reciprocal)
            dither = [None] * BLOCK
            if seeded[-1]:
                column = word * u32(2) + u32(p)
                pairs = [(block * u32(WORDS) + u32(t)) * u32(n) + column for t in range(WORDS)]
                dither = [d for index in pairs for d in _dithers(seed, index)]
            _put(words, scales, p, [_code(x, inverse, d) for x, d in zip(numbers, dither, strict=True)], scale)
        _write(words_ref, scales_ref, words, scales, down, across)

    return _by_tiles(kernel, x, scalars, bool(rows), True, factors, op, interpret)


def _weights_mosaic(w, transposed: bool, op: str, interpret: bool) -> NVFP4:
    """The kernel of `quantize_weights`, or of `quantize_weights_transposed`."""
    dtype = w.dtype
    layout = _tiled_layout(dtype)
    factors = _factors(_absmax(w, op, interpret))

    def kernel(w_ref, factor_ref, reciprocal_ref, *refs):
        down, across = _tile_of()
        loaded = [_load(w_ref, (down, r, across, slice(None)), layout, dtype) for r in range(BLOCK)]
        shape = loaded[0][0].shape
        top = jnp.max(_top(*(number for pair in loaded for number in pair)), axis=2)
        scale = _scale(top, factor_ref[0], False)
        inverse = _repeated(_inverse(scale, reciprocal_ref[0]), shape, layout)
        if transposed:
            words, scales = refs[2:]
            for p in (0, 1):
                codes = [_code(pair[p], inverse, None) for pair in loaded]
                _put(words, scales, p, codes, _repeated(scale, shape, layout))
            _write(refs[0], refs[1], words, scales, down, across)
        else:
            for r, pair in enumerate(loaded):
                tiles.store(refs[0], (down, r, across), _byte(pair, inverse, (None, None)))
                tiles.store(refs[1], (down, r, across), _stored(scale))

    return _by_tiles(kernel, w, factors[1:], not transposed, transposed, [factors], op, interpret)[0]


def _repeated(blocks, shape, layout):
    """Values of blocks [i, j], repeated for all words of the blocks."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(blocks, shape, (0, 1)), layout)


def _put(words, scales, p: int, codes: list, scale) -> None:
    """Writes columns 2 i + p to shared memory: the codes of 16 rows as two words, and their scale."""
    turned = (1, 0, 2)
    for half in (0, 1):
        word = codes[8 * half]
        for k in range(1, 8):
            word = word | (codes[8 * half + k] << u32(4 * k))
        tiles.store(words.at[p, half].transpose(turned), (), word)
    tiles.store(scales.at[p].transpose(turned), (), _stored(scale).astype(u32))


def _write(words_ref, scales_ref, words, scales, down, across) -> None:
    """Copies words and scales from shared memory to rows of the transpose, 32 and 8 bytes at a time."""
    every = slice(None)
    layout = tiles.layout((4, 1, 1, 1, 1), (1, 4, 1, 4, 2), 1)
    loaded = plgpu.load(words.transpose((2, 4, 0, 3, 1)), layout=layout, optimized=False)
    tiles.store(words_ref, (across, every, every, down), loaded)
    layout = tiles.layout((4, 1, 1, 1), (1, 4, 1, 8), 1)
    loaded = plgpu.load(scales.transpose((1, 3, 0, 2)), layout=layout, optimized=False)
    tiles.store(scales_ref, (across, every, every, down), loaded.astype(u8))


def _by_tiles(kernel, x, scalars, rows: bool, columns: bool, factors, op: str, interpret: bool) -> list[NVFP4]:
    """Runs a kernel over tiles of x: [blocks along rows if rows, along columns if columns].

    factors: of each result, for its tensor scale.
    """
    m, n = x.shape
    high = m // BLOCK
    wide = n // BLOCK
    shape = jax.ShapeDtypeStruct
    out = []
    sizes = []
    memory = []
    if rows:
        out += [shape((high, BLOCK, wide, WORDS), u8), shape((high, BLOCK, wide), u8)]
        sizes += [(m, n)]
    if columns:
        out += [shape((wide, WORDS, 2, high, 2), u32), shape((wide, WORDS, 2, high), u8)]
        sizes += [(n, m)]
        tile = COLUMNS // BLOCK, ROWS // BLOCK, WORDS
        memory = [plgpu.SMEM((2, 2, *tile), u32), plgpu.SMEM((2, *tile), u32)]
    operands = (_pairs(x, (high, BLOCK, wide, WORDS)), *(s.reshape(1) for s in scalars))
    found = dispatch.launch(
        kernel, operands, op=op, out=out, grid=(m // ROWS, n // COLUMNS), names=("rows", "columns"),
        interpret=interpret, scratch_types=memory, compiler_params=LANE,
    )  # fmt: skip
    return [
        NVFP4(fp8.same_bits(values, E2M1).reshape(size), fp8.same_bits(scales, E4M3).reshape(size[0], -1), scale)
        for values, scales, size, (scale, *_) in zip(found[::2], found[1::2], sizes, factors, strict=True)
    ]


# --- public -----------------------------------------------------------------------------------------------------------


def quantize(
    x: Float[Array, "*M N"],
    seed: Int[Array, ""] | None = None,
    *,
    implementation: Implementation = None,
    interpret: bool = False,
) -> NVFP4:
    """Quantises x in blocks along its rows: values e2m1 [..., N], scales e4m3 [..., N / 16], tensor scale float32 [].

    x: bfloat16, float16 or float32, not empty. seed: int32 or uint32 [], of stochastic rounding; None rounds to
    nearest. The kernel supports sizes that 1024 divides. Raises ValueError unless 16 divides N.
    """
    op = "nvfp4.quantize"
    _check(op, x, x.ndim > 0 and x.shape[-1] % BLOCK == 0, f"[..., N], N a multiple of {BLOCK}", seed=seed)
    fits = x.size % (64 * BLOCK) == 0 and x.size < elementwise.LARGEST
    needs = f"expected other sizes: the kernel needs a multiple of {64 * BLOCK} numbers, fewer than 2^31"
    if dispatch.chosen(op, implementation, fits, needs, x.shape):
        return _rows_mosaic(x, seed, op, interpret)
    return _narrow(reference(x, seed))


def quantize_rotated(
    x: Float[Array, "M N"],
    rotation: Int[Array, ""],
    seed: Int[Array, ""] | None = None,
    *,
    implementation: Implementation = None,
    interpret: bool = False,
) -> NVFP4:
    """Rotates groups of 16 rows of x; quantises x^T in these blocks: values e2m1 [N, M], scales e4m3 [N, M / 16].

    rotation: the seed of the rotation's signs, int32 or uint32 []. x, seed: as in `quantize`. The kernel supports
    multiples of 128 as M and of 64 as N. Raises ValueError unless 16 divides M.
    """
    op = "nvfp4.quantize_rotated"
    fits = x.ndim == 2 and x.shape[0] % BLOCK == 0
    _check(op, x, fits, f"[M, N], M a multiple of {BLOCK}", seed=seed, rotation=rotation)
    if _tiled(op, implementation, x):
        (absmax,) = _absmax_mosaic(x, rotation, False, op, interpret)
        return _columns_mosaic(x, rotation, (absmax, seed), None, op, interpret)[0]
    return _narrow(reference_rotated(x, rotation, seed))


def quantize_both(
    x: Float[Array, "M N"],
    rotation: Int[Array, ""],
    seeds: tuple[Int[Array, ""], Int[Array, ""]],
    *,
    implementation: Implementation = None,
    interpret: bool = False,
) -> tuple[NVFP4, NVFP4]:
    """(`quantize`, `quantize_rotated`) of x, each rounded stochastically with its own seed.

    The kernels read x twice, for both largest magnitudes and for both results, and support the sizes of
    `quantize_rotated`. Raises ValueError unless 16 divides M and N.
    """
    op = "nvfp4.quantize_both"
    fits = x.ndim == 2 and x.shape[0] % BLOCK == x.shape[-1] % BLOCK == 0
    _check(op, x, fits, f"[M, N], multiples of {BLOCK}", rotation=rotation, first=seeds[0], second=seeds[1])
    if _tiled(op, implementation, x):
        tops = _absmax_mosaic(x, rotation, True, op, interpret)
        wanted = list(zip(tops, seeds, strict=True))
        rows, columns = _columns_mosaic(x, rotation, wanted[1], wanted[0], op, interpret)
        return rows, columns
    return _narrow(reference(x, seeds[0])), _narrow(reference_rotated(x, rotation, seeds[1]))


def quantize_weights(
    w: Float[Array, "M N"], *, implementation: Implementation = None, interpret: bool = False
) -> NVFP4:
    """Quantises w in blocks of 16 x 16, to nearest: values e2m1 [M, N], scales e4m3 [M, N / 16] (each for 16 rows).

    The kernel supports multiples of 128 as M and of 64 as N. Raises ValueError unless 16 divides M and N.
    """
    return _weights(w, False, implementation, interpret)


def quantize_weights_transposed(
    w: Float[Array, "M N"], *, implementation: Implementation = None, interpret: bool = False
) -> NVFP4:
    """The transpose of `quantize_weights`, the same numbers: values e2m1 [N, M], scales e4m3 [N, M / 16].

    The supported sizes and the errors are those of `quantize_weights`.
    """
    return _weights(w, True, implementation, interpret)


def _weights(w, transposed: bool, implementation: Implementation, interpret: bool) -> NVFP4:
    op = "nvfp4.quantize_weights" + "_transposed" * transposed
    fits = w.ndim == 2 and w.shape[0] % BLOCK == w.shape[-1] % BLOCK == 0
    _check(op, w, fits, f"[M, N], multiples of {BLOCK}", name="w")
    if _tiled(op, implementation, w):
        return _weights_mosaic(w, transposed, op, interpret)
    return _narrow(reference_weights(w)[transposed])


def _check(op: str, x, fits: bool, expected: str, name: str = "x", **seeds) -> None:
    """Raises ValueError for a wrong dtype or shape of the array or of a seed."""
    need(x.dtype in FLOATS and x.size > 0, op, name, "bfloat16, float16 or float32, not empty", fp8.described(x))
    need(fits, op, name, expected, x.shape)
    for what, seed in seeds.items():
        ok = seed is None or (jnp.shape(seed) == () and getattr(seed, "dtype", None) in (jnp.int32, u32))
        need(ok, op, what, "int32 or uint32 []", fp8.described(seed))


def _tiled(op: str, implementation: Implementation, x) -> bool:
    """Whether a kernel over tiles runs."""
    fits = x.shape[0] % ROWS == x.shape[1] % COLUMNS == 0 and x.size < elementwise.LARGEST
    needs = f"expected other sizes: the kernel needs M in multiples of {ROWS}, N of {COLUMNS}, M N below 2^31"
    return dispatch.chosen(op, implementation, fits, needs, x.shape)


def cases(sizes: shapes.Sizes, tokens: int) -> list[shapes.Case]:
    """Activations and gradients along rows and rotated along columns; weights and their transpose."""
    case = shapes.Case
    x = jax.ShapeDtypeStruct((tokens, sizes.hidden), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((sizes.intermediate, sizes.hidden), jnp.bfloat16)
    seed = jax.ShapeDtypeStruct((), u32)

    def moved(s: jax.ShapeDtypeStruct, results: int) -> int:
        return 4 * s.size + results * (s.size // 2 + s.size // BLOCK)  # 16-bit numbers are read twice

    def both(x, rotation, *seeds, **how):
        return quantize_both(x, rotation, seeds, **how)

    return [
        case("quantize", quantize, (x,), moved(x, 1)),
        case("quantize_stochastic", quantize, (x, seed), moved(x, 1)),
        case("quantize_rotated", quantize_rotated, (x, seed), moved(x, 1)),
        case("quantize_both", both, (x, seed, seed, seed), moved(x, 2)),
        case("quantize_weights", quantize_weights, (w,), moved(w, 1)),
        case("quantize_weights_transposed", quantize_weights_transposed, (w,), moved(w, 1)),
    ]
