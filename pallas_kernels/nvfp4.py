"""NVFP4: e2m1 values, an e4m3 scale for every 16 neighbours along the dimension that a product sums over, and a float32
scale for the tensor.

x[i, k] = values[i, k] * scales[i, k / 16] * tensor_scale (NVIDIA 2025, arXiv:2509.25149). The tensor scale makes 448 of
the largest block's scale; a block's is its largest magnitude / 6, so that this becomes e2m1's largest number. With a
seed, rounding is stochastic and block scales are rounded up, since one rounded down would clip that number. NaN or
infinity anywhere makes the tensor scale not finite, and with it every number.

`quantize` makes blocks along rows. `quantize_rotated` makes them along columns, written as rows of the transpose, after
groups of 16 rows were multiplied by diag(signs) H / 4, a random Hadamard matrix: orthogonal, so that it leaves the
product of two such operands as it is, and spreads outliers over a block; numbers from 2^124 on may overflow in it.
`quantize_both`, for gradients, makes either from one read. `quantize_weights` and `quantize_weights_transposed` have
one scale for 16 x 16 numbers, so that a matrix and its transpose are the same numbers. Each reads x twice, the first
time for the tensor's largest magnitude.

Kernels: two neighbours of a row travel as a 32-bit word, of which each makes half a byte. Blocks along a row are 2 or 4
lanes. For columns a program takes 128 rows and 64 columns; row 16 i + r is read into an array for each r, so that the
rotation (a Walsh-Hadamard butterfly of additions), a block's largest number and the joining of its 16 numbers to two
words are a thread's own business. Words and scales go through shared memory and are written along rows of the
transpose, 64 and 8 bytes.

dtype promise: float32. Rotations are additions in one order, rounding is exact steps, and what would be divided is
multiplied by reciprocals, of e4m3 from a table, of tensors made outside of kernels: nothing that a GPU approximates or
a compiler may contract, so that kernels and references are equal to the bit. Random numbers are hashes of the seed and
the place of a pair of numbers, 16 bits for each: expectations are right within 2^-17 of a step. No vjp: they are called
inside hand-written ones.
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
WORDS = BLOCK // 2  # of two numbers, in a block
ROWS, COLUMNS = 8 * BLOCK, 4 * BLOCK  # of a program that takes tiles of a matrix
E4M3_MAX, E2M1_MAX = 448.0, 6.0
INFINITE = 0x7F800000  # `fp8.ordered` of what is not finite, at least
RECIPROCALS = [8 / (8 + m) for m in range(8)]  # of e4m3's mantissas
# Mosaic's other way through a kernel looks for layouts: half a minute for these kernels of some thousand operations.
LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
MAGIC = np.float32(1.5 * 2**23)  # its last bit is worth 1, above and below


class NVFP4(NamedTuple):
    """Number (i, k) is values[i, k] * scales[i, k / 16] * tensor_scale."""

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
    """x, negated where this bit of signs is 1."""
    return fp8.from_ordered(_bits(x) ^ (((signs >> u32(row)) & u32(1)) << u32(31)))


def _bits(x):
    return jax.lax.bitcast_convert_type(x, u32)


def _factors(absmax):
    """(tensor scale, what largest magnitudes are multiplied by to be scales, the tensor scale's reciprocal).

    The floor serves tensors of zeros.
    """
    scale = jnp.maximum(absmax, f32(2.0**-100)) * f32(1 / (E4M3_MAX * E2M1_MAX))
    finite = absmax < jnp.inf
    return scale, jnp.where(finite, 1 / (f32(E2M1_MAX) * scale), 0), jnp.where(finite, 1 / scale, 0)


def _scale(top, factor, up: bool):
    """float32 that e4m3 has, from `fp8.ordered` largest magnitudes of blocks."""
    top = fp8.from_ordered(jnp.where(top < i32(INFINITE), top, i32(0)))
    ideal = jnp.minimum(top * factor, f32(E4M3_MAX))
    return fp8.up_to_e4m3(ideal) if up else fp8.to_e4m3(ideal)


def _inverse(scale, reciprocal):
    """1 / (scale * tensor scale); 0 where the scale is 0, beside which the block is nothing."""
    bits = _bits(scale)
    found, mantissa = f32(RECIPROCALS[0]), bits & u32(7 << 20)
    for m, value in enumerate(RECIPROCALS[1:], 1):
        found = jnp.where(mantissa == u32(m << 20), f32(value), found)
    inverse = found * fp8.power_of_two(u32(254) - (bits >> u32(23))) * reciprocal
    return jnp.where(scale == f32(0), f32(0), inverse)


def _steps(x, inverse, dither):
    """(how many of its binade's steps |x * inverse|, at most 6, is, yet to be rounded; the binade's exponent)."""
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
    """Whether x has a sign, not counting NaN's, which every device chooses for itself."""
    return _bits(x) - u32(1 << 31) <= u32(INFINITE)


def _code(x, inverse, dither):
    """Its four bits, as uint32."""
    steps, exponent = _steps(x, inverse, dither)
    size = _bits(steps + MAGIC) + (exponent + exponent - u32(int(MAGIC.view(np.uint32)) + 2 * 127))
    return jnp.where(_negative(x), size + u32(8), size)


def _dithers(seed, index):
    """For each index of a pair of numbers two from (-1/2, 1/2), odd multiples of 2^-17: see `_dither`."""
    random = plain.random_bits(seed, index)
    return _dither(random & u32(0xFFFF)), _dither(random >> u32(16))


def _dither(random):
    """What is added to steps before they are rounded to nearest, from 16 random bits."""
    return fp8.from_ordered((random << u32(7)) | u32(0x3F800040)) - f32(1.5)


# --- reference --------------------------------------------------------------------------------------------------------


def reference(x: Float[Array, "*M N"], seed: Int[Array, ""] | None = None) -> NVFP4:
    """`quantize` in float32 numbers that the formats have: a cast changes none."""
    blocks = x.astype(f32).reshape(-1, x.shape[-1] // BLOCK, BLOCK)
    number = jax.lax.broadcasted_iota(u32, (blocks.shape[0], x.shape[-1]), 0) * u32(x.shape[-1])
    number = number + jax.lax.broadcasted_iota(u32, number.shape, 1)
    q = _in_blocks(blocks, seed, (number >> u32(1)).reshape(blocks.shape), number.reshape(blocks.shape))
    return NVFP4(q.values.reshape(x.shape), q.scales.reshape(*x.shape[:-1], -1), q.tensor_scale)


def reference_rotated(x: Float[Array, "M N"], rotation: Int[Array, ""], seed: Int[Array, ""] | None = None) -> NVFP4:
    """`quantize_rotated` in float32."""
    blocks = rotate(x, rotation).reshape(x.shape[1], -1, BLOCK)
    row, column = (jax.lax.broadcasted_iota(u32, x.shape[::-1], axis).reshape(blocks.shape) for axis in (0, 1))
    q = _in_blocks(blocks, seed, (column >> u32(1)) * u32(x.shape[1]) + row, column)
    return NVFP4(q.values.reshape(x.shape[::-1]), q.scales, q.tensor_scale)


def reference_weights(w: Float[Array, "M N"]) -> tuple[NVFP4, NVFP4]:
    """`quantize_weights` and `quantize_weights_transposed` in float32."""
    m, n = w.shape
    scale, factor, reciprocal = _factors(fp8.absmax(w))
    blocks = w.astype(f32).reshape(m // BLOCK, BLOCK, n // BLOCK, BLOCK)
    scales = _scale(jnp.max(fp8.ordered(blocks), axis=(1, 3)), factor, False)
    inverse = _inverse(scales, reciprocal)

    def layout(w, scales, inverse):
        blocks = w.astype(f32).reshape(scales.shape[0], BLOCK, -1, BLOCK)
        values = _value(blocks, inverse[:, None, :, None], None).reshape(w.shape)
        return NVFP4(values, jnp.repeat(scales, BLOCK, axis=0), scale)

    return layout(w, scales, inverse), layout(_transposed(w), scales.T, inverse.T)


def rotate(x: Float[Array, "M N"], rotation: Int[Array, ""]) -> Float[Array, "N M"]:
    """x transposed, float32, and each group of 16 of its rows multiplied by diag(signs) H / 4.

    The signs are 16 bits that are made of the seed `rotation`, uint32 or int32 [].
    """
    shape = x.shape[1], x.shape[0] // BLOCK, BLOCK
    place = jax.lax.broadcasted_iota(u32, shape, 2)
    y = _transposed(x).astype(f32).reshape(shape)
    y = fp8.from_ordered(_bits(y) ^ (((_signs(rotation) >> place) & u32(1)) << u32(31)))
    for distance in (1, 2, 4, 8):  # `hadamard`, written so that XLA makes two loops of it
        other = jnp.flip(y.reshape(*shape[:2], -1, 2, distance), axis=3).reshape(shape)
        y = jnp.where((place & u32(distance)) == u32(0), y + other, other - y)
        # Where XLA stores it on GPUs anyway; on CPUs it would compute all 15 additions for every reader.
        y = jax.lax.optimization_barrier(y) if distance == 2 else y
    return (y * f32(0.25)).reshape(x.shape[::-1])


def _transposed(x):
    """x^T, as rows in memory too: XLA would rather read columns in every loop that follows."""
    return with_layout_constraint(x.T, Layout(major_to_minor=(0, 1)))


def _signs(rotation):
    return plain.random_bits(rotation, u32(0))


def _in_blocks(blocks, seed, pair, place) -> NVFP4:
    """Blocks, float32, along the last axis; for random numbers each pair's index, and the place in it as last bit."""
    scale, factor, reciprocal = _factors(fp8.absmax(blocks))
    scales = _scale(jnp.max(fp8.ordered(blocks), axis=-1), factor, seed is not None)
    dither = None
    if seed is not None:
        dither = _dither((plain.random_bits(seed, pair) >> ((place & u32(1)) << u32(4))) & u32(0xFFFF))
    inverse = _inverse(scales, reciprocal)[..., None]
    return NVFP4(_value(blocks, inverse, dither), scales, scale)


def _narrow(q: NVFP4) -> NVFP4:
    return NVFP4(q.values.astype(E2M1), q.scales.astype(E4M3), q.tensor_scale)


# --- kernels ----------------------------------------------------------------------------------------------------------


def _pairs(x, shape):
    """x as words of two neighbours, uint32 of this shape; float32 as it is, with a dimension of 2 more.

    Nothing moves in memory.
    """
    if x.dtype == f32:
        return x.reshape(*shape, 2)
    return jax.lax.bitcast_convert_type(x.reshape(*shape, 2), u32)


def _load(ref, at, layout, dtype):
    """(first, second) of the pairs at an index, float32."""
    if dtype == f32:
        return tuple(tiles.load(ref, (*at, second), layout) for second in (0, 1))
    word = tiles.load(ref, at, layout)
    if dtype == jnp.bfloat16:
        return fp8.from_ordered(word << u32(16)), fp8.from_ordered(word & u32(0xFFFF0000))
    half = lambda bits: jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), dtype).astype(f32)
    return half(word & u32(0xFFFF)), half(word >> u32(16))


def _byte(pair, inverse, dither):
    first, second = (_code(x, inverse, d) for x, d in zip(pair, dither, strict=True))
    return (first | (second << u32(4))).astype(u8)


def _top(*numbers):
    found = [fp8.ordered(x) for x in numbers]
    while len(found) > 1:
        found = [jnp.maximum(*found[i : i + 2]) if i + 1 < len(found) else found[i] for i in range(0, len(found), 2)]
    return found[0]


def _stored(scale):
    """The bytes of scales."""
    return fp8.same_bits(fp8.encode(scale, f32(1), E4M3), u8)


def _absmax(x, op: str, interpret: bool):
    return elementwise.run(lambda v, *_: ([], v), (x,), (), [], 1, op, interpret)[1][0]


def _rows_mosaic(x, seed, op: str, interpret: bool) -> NVFP4:
    n, dtype = x.size // BLOCK, x.dtype
    rows = next(rows for rows in (256, 128, 64) if n % rows == 0)
    lanes, vector = ((4, 8), 1) if dtype == f32 else ((16, 2), 4)
    layout, shape = tiles.layout((4, 1), lanes, vector), (rows, WORDS)
    tensor_scale, *scalars = _factors(_absmax(x, op, interpret))
    scalars += [] if seed is None else [seed]

    def kernel(x_ref, *refs):
        (factor, reciprocal, *seed), (values_ref, scales_ref) = (ref[0] for ref in refs[:-2]), refs[-2:]
        start = jax.lax.axis_index("blocks") * rows
        at = (pl.ds(start, rows),)
        pair = _load(x_ref, (*at, slice(None)), layout, dtype)
        dither = None, None
        if seed:
            place = lambda axis: plgpu.broadcasted_iota(u32, shape, axis, layout=layout)
            dither = _dithers(seed[0], (place(0) + start.astype(u32)) * u32(WORDS) + place(1))
        scale = _scale(jnp.max(_top(*pair), axis=1), factor, bool(seed))
        inverse = jax.lax.broadcast_in_dim(_inverse(scale, reciprocal), shape, (0,))
        tiles.store(values_ref, at, _byte(pair, inverse, dither))
        tiles.store(scales_ref, at, _stored(scale))

    out = [jax.ShapeDtypeStruct((n, WORDS), u8), jax.ShapeDtypeStruct((n,), u8)]
    operands = (_pairs(x, (n, WORDS)), *(s.reshape(1) for s in scalars))
    values, scales = dispatch.launch(
        kernel, operands, op=op, out=out, grid=(n // rows,), names=("blocks",), interpret=interpret
    )
    values, scales = (
        fp8.same_bits(values, E2M1).reshape(x.shape),
        fp8.same_bits(scales, E4M3).reshape(*x.shape[:-1], -1),
    )
    return NVFP4(values, scales, tensor_scale)


def _tiled_layout(dtype):
    """Of [blocks of 16 rows, blocks of 16 columns, words]: a thread has 1 or 2 words, 8 or 4 lanes a block's row."""
    return tiles.layout((4, 1, 1), (1, 4, 8), 1) if dtype == f32 else tiles.layout((4, 1, 1), (2, 4, 4), 2)


def _tile_of() -> tuple:
    """(the program's blocks of rows, of columns)"""
    i, j = jax.lax.axis_index("rows"), jax.lax.axis_index("columns")
    return pl.ds(i * (ROWS // BLOCK), ROWS // BLOCK), pl.ds(j * (COLUMNS // BLOCK), COLUMNS // BLOCK)


def _absmax_mosaic(x, rotation, plain_too: bool, op: str, interpret: bool) -> list:
    """[absmax of x if plain_too, absmax of `rotate`] from one read."""
    (m, n), dtype, width = x.shape, x.dtype, COLUMNS // 2
    high = ROWS // BLOCK
    layout = plgpu.Layout.WG_STRIDED((high, width), vec_size=1 if dtype == f32 else 2)
    grid = (m // ROWS, n // COLUMNS)

    def kernel(x_ref, signs_ref, *refs):
        i, j = jax.lax.axis_index("rows"), jax.lax.axis_index("columns")
        down, across, signs = pl.ds(i * high, high), pl.ds(j * width, width), signs_ref[0]
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
    """[x by rows if rows, x^T rotated]; rows and columns: (absmax, seed or None)."""
    n, dtype, layout = x.shape[1], x.dtype, _tiled_layout(x.dtype)
    wanted = ([rows] if rows else []) + [columns]
    factors = [_factors(absmax) for absmax, _ in wanted]
    seeded = [seed is not None for _, seed in wanted]
    scalars = [_signs(rotation)]
    for (_, *two), (_, seed) in zip(factors, wanted, strict=True):
        scalars += [*two, jnp.uint32(0) if seed is None else seed.astype(u32)]

    def kernel(x_ref, *refs):
        (signs, *given), refs = [ref[0] for ref in refs[: len(scalars)]], refs[len(scalars) :]
        *by_row, words_ref, scales_ref, words, scales = refs
        down, across = _tile_of()
        loaded = [_load(x_ref, (down, r, across, slice(None)), layout, dtype) for r in range(BLOCK)]
        shape = loaded[0][0].shape
        place = lambda axis: plgpu.broadcasted_iota(u32, shape, axis, layout=layout)
        block = place(0) + down.start.astype(u32)
        word = (place(1) + across.start.astype(u32)) * u32(WORDS) + place(2)
        if rows:
            factor, reciprocal, seed = given[:3]
            for r, pair in enumerate(loaded):
                scale = _scale(jnp.max(_top(*pair), axis=2), factor, seeded[0])
                inverse = _repeated(_inverse(scale, reciprocal), shape, layout)
                index = (block * u32(BLOCK) + u32(r)) * u32(n // 2) + word
                dither = _dithers(seed, index) if seeded[0] else (None, None)
                tiles.store(by_row[0], (down, r, across), _byte(pair, inverse, dither))
                tiles.store(by_row[1], (down, r, across), _stored(scale))
        factor, reciprocal, seed = given[-3:]
        for p in (0, 1):
            numbers = hadamard([_signed(pair[p], signs, r) for r, pair in enumerate(loaded)])
            scale = _scale(_top(*numbers), factor, seeded[-1])
            inverse, dither = _inverse(scale, reciprocal), [None] * BLOCK
            if seeded[-1]:
                column = word * u32(2) + u32(p)
                pairs = [(block * u32(WORDS) + u32(t)) * u32(n) + column for t in range(WORDS)]
                dither = [d for index in pairs for d in _dithers(seed, index)]
            _put(words, scales, p, [_code(x, inverse, d) for x, d in zip(numbers, dither, strict=True)], scale)
        _write(words_ref, scales_ref, words, scales, down, across)

    return _by_tiles(kernel, x, scalars, bool(rows), True, factors, op, interpret)


def _weights_mosaic(w, transposed: bool, op: str, interpret: bool) -> NVFP4:
    """w, or its transpose, in blocks of 16 x 16."""
    dtype, layout = w.dtype, _tiled_layout(w.dtype)
    factors = _factors(_absmax(w, op, interpret))

    def kernel(w_ref, factor_ref, reciprocal_ref, *refs):
        down, across = _tile_of()
        loaded = [_load(w_ref, (down, r, across, slice(None)), layout, dtype) for r in range(BLOCK)]
        shape = loaded[0][0].shape
        whole = lambda scale: _repeated(scale, shape, layout)
        top = jnp.max(_top(*(number for pair in loaded for number in pair)), axis=2)
        scale = _scale(top, factor_ref[0], False)
        inverse = whole(_inverse(scale, reciprocal_ref[0]))
        if transposed:
            words, scales = refs[2:]
            for p in (0, 1):
                _put(words, scales, p, [_code(pair[p], inverse, None) for pair in loaded], whole(scale))
            _write(refs[0], refs[1], words, scales, down, across)
        else:
            for r, pair in enumerate(loaded):
                tiles.store(refs[0], (down, r, across), _byte(pair, inverse, (None, None)))
                tiles.store(refs[1], (down, r, across), _stored(scale))

    return _by_tiles(kernel, w, factors[1:], not transposed, transposed, [factors], op, interpret)[0]


def _repeated(blocks, shape, layout):
    """What holds for blocks [i, j], for all of their words."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(blocks, shape, (0, 1)), layout)


def _put(words, scales, p: int, codes: list, scale) -> None:
    """Column 2 i + p of every word: the codes of its 16 rows as two words, and its scale, into shared memory."""
    turned = (1, 0, 2)
    for half in (0, 1):
        word = codes[8 * half]
        for k in range(1, 8):
            word = word | (codes[8 * half + k] << u32(4 * k))
        tiles.store(words.at[p, half].transpose(turned), (), word)
    tiles.store(scales.at[p].transpose(turned), (), _stored(scale).astype(u32))


def _write(words_ref, scales_ref, words, scales, down, across) -> None:
    """What lies in shared memory, to where it belongs: along rows of the transpose, 32 and 8 bytes at a time."""
    every = slice(None)
    layout = tiles.layout((4, 1, 1, 1, 1), (1, 4, 1, 4, 2), 1)
    whole = plgpu.load(words.transpose((2, 4, 0, 3, 1)), layout=layout, optimized=False)
    tiles.store(words_ref, (across, every, every, down), whole)
    layout = tiles.layout((4, 1, 1, 1), (1, 4, 1, 8), 1)
    whole = plgpu.load(scales.transpose((1, 3, 0, 2)), layout=layout, optimized=False)
    tiles.store(scales_ref, (across, every, every, down), whole.astype(u8))


def _by_tiles(kernel, x, scalars, rows: bool, columns: bool, factors, op: str, interpret: bool) -> list[NVFP4]:
    """Runs a kernel over tiles of x: [by rows if rows, by columns if columns], with the tensor scales of factors."""
    m, n = x.shape
    high, wide, shape = m // BLOCK, n // BLOCK, jax.ShapeDtypeStruct
    out, sizes, memory = [], [], []
    if rows:
        out, sizes = [shape((high, BLOCK, wide, WORDS), u8), shape((high, BLOCK, wide), u8)], [(m, n)]
    if columns:
        out += [shape((wide, WORDS, 2, high, 2), u32), shape((wide, WORDS, 2, high), u8)]
        sizes += [(n, m)]
        held = COLUMNS // BLOCK, ROWS // BLOCK, WORDS
        memory = [plgpu.SMEM((2, 2, *held), u32), plgpu.SMEM((2, *held), u32)]
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
    """x in blocks along its rows: values e2m1 [..., N], scales e4m3 [..., N / 16], tensor scale float32 [].

    x: bfloat16, float16 or float32, not empty; seed: int32 or uint32 [], for stochastic rounding, else to nearest. The
    kernel serves multiples of 1024 numbers. ValueError unless 16 divides N.
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
    """x^T, with groups of 16 rows of x rotated, in blocks along them: values e2m1 [N, M], scales e4m3 [N, M / 16].

    rotation: the seed of the rotation's signs, int32 or uint32 []; the others as in `quantize`. The kernel serves M in
    multiples of 128 and N in multiples of 64. ValueError unless 16 divides M.
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
    """(`quantize`, `quantize_rotated`) of x, stochastically with a seed each, for sizes that the latter serves.

    Two reads make all: one both largest magnitudes, one both results. ValueError unless 16 divides M and N.
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
    """w in blocks of 16 x 16, rounded to nearest: values e2m1 [M, N], scales e4m3 [M, N / 16], each 16 times.

    The kernel serves M in multiples of 128 and N in multiples of 64. ValueError unless 16 divides both.
    """
    return _weights(w, False, implementation, interpret)


def quantize_weights_transposed(
    w: Float[Array, "M N"], *, implementation: Implementation = None, interpret: bool = False
) -> NVFP4:
    """The same numbers as those of `quantize_weights`, as rows of w^T: values e2m1 [N, M], scales e4m3 [N, M / 16].

    For the same sizes, with the same errors.
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
    """The errors of the caller."""
    need(x.dtype in FLOATS and x.size > 0, op, name, "bfloat16, float16 or float32, not empty", fp8.described(x))
    need(fits, op, name, expected, x.shape)
    for what, seed in seeds.items():
        ok = seed is None or (jnp.shape(seed) == () and getattr(seed, "dtype", None) in (jnp.int32, u32))
        need(ok, op, what, "int32 or uint32 []", fp8.described(seed))


def _tiled(op: str, implementation: Implementation, x) -> bool:
    fits = x.shape[0] % ROWS == x.shape[1] % COLUMNS == 0 and x.size < elementwise.LARGEST
    needs = f"expected other sizes: the kernel needs M in multiples of {ROWS}, N of {COLUMNS}, M N below 2^31"
    return dispatch.chosen(op, implementation, fits, needs, x.shape)


def cases(sizes: shapes.Sizes, tokens: int) -> list[shapes.Case]:
    """Activations and gradients along rows and rotated along columns, weights either way; x is read twice."""
    shape, case = jax.ShapeDtypeStruct, shapes.Case
    x, w = shape((tokens, sizes.hidden), jnp.bfloat16), shape((sizes.intermediate, sizes.hidden), jnp.bfloat16)
    seed, moved = shape((), u32), lambda s, results: 4 * s.size + results * (s.size // 2 + s.size // BLOCK)
    both = lambda x, rotation, *seeds, **how: quantize_both(x, rotation, seeds, **how)
    return [
        case("quantize", quantize, (x,), moved(x, 1)),
        case("quantize_stochastic", quantize, (x, seed), moved(x, 1)),
        case("quantize_rotated", quantize_rotated, (x, seed), moved(x, 1)),
        case("quantize_both", both, (x, seed, seed, seed), moved(x, 2)),
        case("quantize_weights", quantize_weights, (w,), moved(w, 1)),
        case("quantize_weights_transposed", quantize_weights_transposed, (w,), moved(w, 1)),
    ]
