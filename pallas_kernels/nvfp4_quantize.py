"""Kernels that quantise to NVFP4, the format of nvfp4_format.py.

`quantize` makes blocks along rows. `quantize_rotated` first multiplies groups of 16 rows by a random Hadamard matrix.
Then it makes blocks along columns and writes them as rows of the transpose. `quantize_both`, for gradients, makes both.
`quantize_weights` and `quantize_weights_transposed` have one scale for 16 x 16 numbers. Each function reads x twice,
the first time for the tensor's largest magnitude.

Kernels: two neighbours of a row are read as a 32-bit word and become one byte. Blocks along a row are 2 or 4 lanes. For
columns a program has 128 rows and 64 columns. Rows 16 i + r are read into an array for each r, so that one thread has
all 16 numbers of a block: it computes their rotation (a Walsh-Hadamard butterfly of additions) and their largest
magnitude, and joins them to two words. Words and scales go through shared memory; a program writes 64 bytes of words
and 8 bytes of scales to each row of the transpose.

dtype promise: arithmetic is float32, and kernels and references are equal to the bit. There is no vjp: the functions
are called inside hand-written vjps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, elementwise, fp8_format, nvfp4_format as form, shapes, tiles
from pallas_kernels.dispatch import Implementation, expect
from pallas_kernels.fp8_format import E4M3
from pallas_kernels.nvfp4_format import BLOCK, E2M1, NVFP4, WHOLE, OperandPart

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

f32, i32, u32, u8 = jnp.float32, jnp.int32, jnp.uint32, jnp.uint8
FLOATS = (jnp.bfloat16, jnp.float16, f32)
WORDS = BLOCK // 2  # words of two numbers in a block
ROWS, COLUMNS = 8 * BLOCK, 4 * BLOCK  # of a program that has a tile of a matrix
# Mosaic's other lowering infers layouts, which takes half a minute for these kernels of some thousand operations.
LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)

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
        return fp8_format.from_ordered(word << u32(16)), fp8_format.from_ordered(word & u32(0xFFFF0000))

    def half(bits):
        return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), dtype).astype(f32)

    return half(word & u32(0xFFFF)), half(word >> u32(16))


def _byte(pair, inverse, dither):
    """Pairs rounded to e2m1, joined to bytes."""
    first, second = (form.codes(x, inverse, d) for x, d in zip(pair, dither, strict=True))
    return (first | (second << u32(4))).astype(u8)


def _largest_magnitudes(*numbers):
    """The elementwise maximum of the magnitudes of arrays, `fp8.ordered`."""
    tops = [fp8_format.ordered(x) for x in numbers]
    while len(tops) > 1:
        tops = [jnp.maximum(*tops[i : i + 2]) if i + 1 < len(tops) else tops[i] for i in range(0, len(tops), 2)]
    return tops[0]


def _stored(scale):
    """Scales as bytes of e4m3."""
    return fp8_format.same_bits(fp8_format.encode(scale, f32(1), E4M3), u8)


def _absmax(x, op: str, interpret: bool):
    """The largest magnitude of x, float32 []."""
    return elementwise.run(lambda v, *_: ([], v), (x,), (), [], 1, op, interpret)[1][0]


def _rows_mosaic(x, seed, part: OperandPart, op: str, interpret: bool) -> NVFP4:
    """The kernel of `quantize`."""
    n = x.size // BLOCK
    dtype = x.dtype
    rows = next(rows for rows in (256, 128, 64) if n % rows == 0)
    lanes, vector = ((4, 8), 1) if dtype == f32 else ((16, 2), 4)
    layout = tiles.layout((4, 1), lanes, vector)
    shape = (rows, WORDS)
    tensor_scale, *scalars = form.factors(part.largest(_absmax(x, op, interpret)))
    scalars += [] if seed is None else [seed, part.first()]
    row_blocks = x.shape[-1] // BLOCK
    others = (part.columns or x.shape[-1]) // BLOCK - row_blocks  # blocks of a row that other parts have

    def kernel(x_ref, *refs):
        factor, reciprocal, *seed_and_first = (ref[0] for ref in refs[:-2])
        values_ref, scales_ref = refs[-2:]
        start = jax.lax.axis_index("blocks") * rows
        at = (pl.ds(start, rows),)
        pair = _load(x_ref, (*at, slice(None)), layout, dtype)
        dither = None, None
        if seed_and_first:
            seed, first = seed_and_first

            def iota(axis: int):
                return plgpu.broadcasted_iota(u32, shape, axis, layout=layout)

            block = iota(0) + start.astype(u32)
            block = block + block // u32(row_blocks) * u32(others) if others else block
            dither = form.dithers(seed, block * u32(WORDS) + iota(1) + (first >> u32(1)))
        scale = form.block_scales(jnp.max(_largest_magnitudes(*pair), axis=1), factor, bool(seed_and_first))
        inverse = jax.lax.broadcast_in_dim(form.inverses(scale, reciprocal), shape, (0,))
        tiles.store(values_ref, at, _byte(pair, inverse, dither))
        tiles.store(scales_ref, at, _stored(scale))

    out = [jax.ShapeDtypeStruct((n, WORDS), u8), jax.ShapeDtypeStruct((n,), u8)]
    operands = (_pairs(x, (n, WORDS)), *(s.reshape(1) for s in scalars))
    values, scales = dispatch.launch(
        kernel, operands, op=op, out=out, grid=(n // rows,), names=("blocks",), interpret=interpret
    )
    values = fp8_format.same_bits(values, E2M1).reshape(x.shape)
    scales = fp8_format.same_bits(scales, E4M3).reshape(*x.shape[:-1], -1)
    return NVFP4(values, scales, tensor_scale)


def _tiled_layout(dtype):
    """The layout of [blocks of 16 rows, blocks of 16 columns, words]: 8 or 4 lanes per block with 1 or 2 words each."""
    return tiles.layout((4, 1, 1), (1, 4, 8), 1) if dtype == f32 else tiles.layout((4, 1, 1), (2, 4, 4), 2)


def _tile_of() -> tuple:
    """(the program's blocks of rows, its blocks of columns), as slices."""
    i = jax.lax.axis_index("rows")
    j = jax.lax.axis_index("columns")
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
        i = jax.lax.axis_index("rows")
        j = jax.lax.axis_index("columns")
        down = pl.ds(i * high, high)
        across = pl.ds(j * width, width)
        signs = signs_ref[0]
        loaded = [_load(x_ref, (down, r, across), layout, dtype) for r in range(BLOCK)]
        tops = [_largest_magnitudes(*(number for pair in loaded for number in pair))] if plain_too else []
        rotated = [form.hadamard([form.signed(pair[p], signs, r) for r, pair in enumerate(loaded)]) for p in (0, 1)]
        for ref, top in zip(refs, [*tops, _largest_magnitudes(*rotated[0], *rotated[1])], strict=True):
            ref[i, j] = jnp.max(top)

    out = [jax.ShapeDtypeStruct(grid, i32)] * (1 + plain_too)
    operands = _pairs(x, (m // BLOCK, BLOCK, n // 2)), form.signs(rotation).reshape(1)
    peaks = dispatch.launch(kernel, operands, op=op, out=out, grid=grid, names=("rows", "columns"), interpret=interpret)
    return [fp8_format.from_ordered(jnp.max(top)) for top in peaks]


def _columns_mosaic(x, rotation, columns, rows, part: OperandPart, op: str, interpret: bool) -> list[NVFP4]:
    """[x in blocks along rows if `rows`, rotated x^T]; rows, columns: (absmax, seed or None) of either."""
    n = part.columns or x.shape[1]
    dtype = x.dtype
    layout = _tiled_layout(dtype)
    directions = ([rows] if rows else []) + [columns]
    factors = [form.factors(absmax) for absmax, _ in directions]
    seeded = [seed is not None for _, seed in directions]
    scalars = [form.signs(rotation), part.first()]
    for (_, *two), (_, seed) in zip(factors, directions, strict=True):
        scalars += [*two, jnp.uint32(0) if seed is None else seed.astype(u32)]

    def kernel(x_ref, *refs):
        signs, first, *row_and_column_scalars = [ref[0] for ref in refs[: len(scalars)]]
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
                scale = form.block_scales(jnp.max(_largest_magnitudes(*pair), axis=2), factor, seeded[0])
                inverse = _repeated(form.inverses(scale, reciprocal), shape, layout)
                index = (block * u32(BLOCK) + u32(r)) * u32(n // 2) + (first >> u32(1)) + word
                dither = form.dithers(seed, index) if seeded[0] else (None, None)
                tiles.store(by_row[0], (down, r, across), _byte(pair, inverse, dither))
                tiles.store(by_row[1], (down, r, across), _stored(scale))
        factor, reciprocal, seed = row_and_column_scalars[-3:]
        for p in (0, 1):
            numbers = form.hadamard([form.signed(pair[p], signs, r) for r, pair in enumerate(loaded)])
            scale = form.block_scales(_largest_magnitudes(*numbers), factor, seeded[-1])
            inverse = form.inverses(scale, reciprocal)
            dither = [None] * BLOCK
            if seeded[-1]:
                column = first + word * u32(2) + u32(p)
                pairs = [(block * u32(WORDS) + u32(t)) * u32(n) + column for t in range(WORDS)]
                dither = [d for index in pairs for d in form.dithers(seed, index)]
            _put(words, scales, p, [form.codes(x, inverse, d) for x, d in zip(numbers, dither, strict=True)], scale)
        _write(words_ref, scales_ref, words, scales, down, across)

    return _by_tiles(kernel, x, scalars, bool(rows), True, factors, op, interpret)


def _weights_mosaic(w, transposed: bool, part: OperandPart, op: str, interpret: bool) -> NVFP4:
    """The kernel of `quantize_weights`, or of `quantize_weights_transposed`."""
    dtype = w.dtype
    layout = _tiled_layout(dtype)
    factors = form.factors(part.largest(_absmax(w, op, interpret)))

    def kernel(w_ref, factor_ref, reciprocal_ref, *refs):
        down, across = _tile_of()
        loaded = [_load(w_ref, (down, r, across, slice(None)), layout, dtype) for r in range(BLOCK)]
        shape = loaded[0][0].shape
        top = jnp.max(_largest_magnitudes(*(number for pair in loaded for number in pair)), axis=2)
        scale = form.block_scales(top, factor_ref[0], False)
        inverse = _repeated(form.inverses(scale, reciprocal_ref[0]), shape, layout)
        if transposed:
            words, scales = refs[2:]
            for p in (0, 1):
                codes = [form.codes(pair[p], inverse, None) for pair in loaded]
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
    outputs = dispatch.launch(
        kernel, operands, op=op, out=out, grid=(m // ROWS, n // COLUMNS), names=("rows", "columns"),
        interpret=interpret, scratch_types=memory, compiler_params=LANE,
    )  # fmt: skip
    return [
        NVFP4(
            fp8_format.same_bits(values, E2M1).reshape(size),
            fp8_format.same_bits(scales, E4M3).reshape(size[0], -1),
            scale,
        )
        for values, scales, size, (scale, *_) in zip(outputs[::2], outputs[1::2], sizes, factors, strict=True)
    ]


# --- public -----------------------------------------------------------------------------------------------------------


def quantize(
    x: Float[Array, "*M N"],
    seed: Int[Array, ""] | None = None,
    *,
    part: OperandPart = WHOLE,
    implementation: Implementation = None,
    interpret: bool = False,
) -> NVFP4:
    """Quantises x in blocks along its rows: values e2m1 [..., N], scales e4m3 [..., N / 16], tensor scale float32 [].

    x: bfloat16, float16 or float32, not empty. seed: int32 or uint32 [], of stochastic rounding; None rounds to
    nearest. part: what x is of a matrix that several devices have. The kernel supports sizes that 1024 divides. Raises
    ValueError unless 16 divides N.
    """
    op = "nvfp4.quantize"
    _check(op, x, x.ndim > 0 and x.shape[-1] % BLOCK == 0, f"[..., N], N a multiple of {BLOCK}", seed=seed)
    fits = x.size % (64 * BLOCK) == 0 and x.size < elementwise.LARGEST
    needs = f"expected other sizes: the kernel needs a multiple of {64 * BLOCK} numbers, fewer than 2^31"
    if dispatch.runs_kernel(op, implementation, fits, needs, x.shape):
        return _rows_mosaic(x, seed, part, op, interpret)
    return form.narrow(form.reference(x, seed, part))


def quantize_rotated(
    x: Float[Array, "M N"],
    rotation: Int[Array, ""],
    seed: Int[Array, ""] | None = None,
    *,
    part: OperandPart = WHOLE,
    implementation: Implementation = None,
    interpret: bool = False,
) -> NVFP4:
    """Rotates groups of 16 rows of x; quantises x^T in these blocks: values e2m1 [N, M], scales e4m3 [N, M / 16].

    rotation: the seed of the rotation's signs, int32 or uint32 []. x, seed, part: as in `quantize`. The kernel supports
    multiples of 128 as M and of 64 as N. Raises ValueError unless 16 divides M.
    """
    op = "nvfp4.quantize_rotated"
    fits = x.ndim == 2 and x.shape[0] % BLOCK == 0
    _check(op, x, fits, f"[M, N], M a multiple of {BLOCK}", seed=seed, rotation=rotation)
    if _tiled(op, implementation, x):
        (absmax,) = _absmax_mosaic(x, rotation, False, op, interpret)
        return _columns_mosaic(x, rotation, (part.largest(absmax), seed), None, part, op, interpret)[0]
    return form.narrow(form.reference_rotated(x, rotation, seed, part))


def quantize_both(
    x: Float[Array, "M N"],
    rotation: Int[Array, ""],
    seeds: tuple[Int[Array, ""], Int[Array, ""]],
    *,
    part: OperandPart = WHOLE,
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
        tops = part.largest(jnp.stack(_absmax_mosaic(x, rotation, True, op, interpret)))
        directions = list(zip(tops, seeds, strict=True))
        rows, columns = _columns_mosaic(x, rotation, directions[1], directions[0], part, op, interpret)
        return rows, columns
    rows = form.reference(x, seeds[0], part)
    return form.narrow(rows), form.narrow(form.reference_rotated(x, rotation, seeds[1], part))


def quantize_weights(
    w: Float[Array, "M N"],
    *,
    part: OperandPart = WHOLE,
    implementation: Implementation = None,
    interpret: bool = False,
) -> NVFP4:
    """Quantises w in blocks of 16 x 16, to nearest: values e2m1 [M, N], scales e4m3 [M, N / 16] (each for 16 rows).

    The kernel supports multiples of 128 as M and of 64 as N. Raises ValueError unless 16 divides M and N.
    """
    return _weights(w, False, part, implementation, interpret)


def quantize_weights_transposed(
    w: Float[Array, "M N"],
    *,
    part: OperandPart = WHOLE,
    implementation: Implementation = None,
    interpret: bool = False,
) -> NVFP4:
    """The transpose of `quantize_weights`, the same numbers: values e2m1 [N, M], scales e4m3 [N, M / 16].

    The supported sizes and the errors are those of `quantize_weights`.
    """
    return _weights(w, True, part, implementation, interpret)


def _weights(w, transposed: bool, part: OperandPart, implementation: Implementation, interpret: bool) -> NVFP4:
    op = "nvfp4.quantize_weights" + "_transposed" * transposed
    fits = w.ndim == 2 and w.shape[0] % BLOCK == w.shape[-1] % BLOCK == 0
    _check(op, w, fits, f"[M, N], multiples of {BLOCK}", name="w")
    if _tiled(op, implementation, w):
        return _weights_mosaic(w, transposed, part, op, interpret)
    return form.narrow(form.reference_weights(w, part)[transposed])


def _check(op: str, x, fits: bool, expected: str, name: str = "x", **seeds) -> None:
    """Raises ValueError for a wrong dtype or shape of the array or of a seed."""
    expect(
        x.dtype in FLOATS and x.size > 0,
        op,
        name,
        "bfloat16, float16 or float32, not empty",
        fp8_format.dtype_and_shape(x),
    )
    expect(fits, op, name, expected, x.shape)
    for seed_name, seed in seeds.items():
        ok = seed is None or (jnp.shape(seed) == () and getattr(seed, "dtype", None) in (jnp.int32, u32))
        expect(ok, op, seed_name, "int32 or uint32 []", fp8_format.dtype_and_shape(seed))


def _tiled(op: str, implementation: Implementation, x) -> bool:
    """Returns True if the kernel over tiles of ROWS x COLUMNS runs for x `[M, N]`."""
    fits = x.shape[0] % ROWS == x.shape[1] % COLUMNS == 0 and x.size < elementwise.LARGEST
    needs = f"expected other sizes: the kernel needs M in multiples of {ROWS}, N of {COLUMNS}, M N below 2^31"
    return dispatch.runs_kernel(op, implementation, fits, needs, x.shape)


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
