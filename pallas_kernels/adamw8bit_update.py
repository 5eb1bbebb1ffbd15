"""AdamW with moments in 8 bits: one pass over parameters, gradient and both moments of a matrix, block by block.

    g' = f g                                  m' = b1 m + (1 - b1) g'        v' = b2 v + (1 - b2) g'^2
    p' = p - lr (m' / c1 / (sqrt(v' / c2) + eps) + decay p)       (Kingma and Ba 2015; Loshchilov and Hutter 2019)

with f the factor of gradient clipping and c1, c2 the bias corrections 1 - b1^t and 1 - b2^t. Between steps m and v take
2 bytes a parameter and 8 bytes a block: codes, and a float32 scale of each for every block of a row
(`moment_block_size`), as in Dettmers et al. 2021 (arXiv:2110.02861), who use other code books:

    m         sign(k) (k / 127)^2 x largest |m| of the block,           k int8, -127 to 127
    sqrt(v)          (k / 255)^2 x largest sqrt(v) of the block,        k uint8, 0 to 255

Because of the squares, the steps between codes grow with the number: 0.8 % (sqrt(v)) and 1.6 % (m) of the number near
the block's largest, 8 % and 16 % at a hundredth of the largest, over 4 (m) and nearly 5 (sqrt(v)) decimal orders. The
codes are computed with a root and a product and need no table.

They were chosen by the relative error of AdamW's update, compared with float32 moments of the same gradients
(0.9M-parameter llama, steps 20 to 100, blocks of 256; first the matrices of the blocks, then embedding and head):

    squares, stochastic        0.028  0.028      linear, nearest        0.030  0.023      logarithmic, stochastic
    squares, m to nearest      0.023  0.023      linear, stochastic     0.043  0.025          (12 octaves)  0.061  0.070
    squares, both to nearest   0.020  0.027      e4m3, nearest          0.078  0.141
    blocks of 128 instead of 256 change none of these by more than 0.001.

* Both are rounded stochastically, without bias, although rounding to nearest is as good in the table. Rounded to
  nearest, a moment that changes by less than half a step does not change at all, and one that should vanish does not:
  after its gradients end, m stays at 0.6 % of the block's largest while v decays, and their ratio grows to hundreds.
  Rounding to nearest also freezes sqrt(v) if b2 is 0.999, because a step changes it by (1 - b2) / 2 of itself at most.
* A v that is not 0 is stored as at least 1 / 255^2 of the largest sqrt(v), never as 0: an m that is not 0 would be
  divided by eps if its v were 0. So codes of 1 give a step of 4 lr x the largest |m| / the largest sqrt(v) of the
  block. For exact moments that ratio is at most 1.2 (b1 = 0.9, b2 = 0.95).
* A block whose gradients have all been 0 has scale 0 and codes 0. Only the decay changes its parameters.

dtype promise: arithmetic in float32. float32 p is rounded to nearest. bfloat16 p is rounded stochastically: most
updates are less than half a step of its 8 bits of mantissa and would be lost. NaN or infinity in a gradient makes its
own number of p and both scales of its block not finite, and in the next step all of p in that block.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, fp8_format
from pallas_kernels.dispatch import Implementation
from pallas_kernels.quantize import random_bits, round_with
from pallas_kernels.shapes import Case, Sizes

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, UInt8

OP = "adamw8bit"
f32, u32 = jnp.float32, jnp.uint32
M_TOP, V_TOP = 127.0, 255.0
BLOCK, SMALLEST_BLOCK = 256, 32
FLOATS = (jnp.float32, jnp.bfloat16)


class Hyper(NamedTuple):
    """Scalars of a step, in the order in which `adamw8bit` takes them as one float32 vector."""

    lr: jax.Array | float
    b1: jax.Array | float
    b2: jax.Array | float
    eps: jax.Array | float
    decay: jax.Array | float  # decoupled: p loses lr x decay of itself
    c1: jax.Array | float  # 1 - b1^t for step t = 1, 2, ...
    c2: jax.Array | float  # 1 - b2^t
    grad_factor: jax.Array | float  # factor of the gradient: clipping

    def vector(self) -> jax.Array:
        """float32 `[8]`."""
        return jnp.stack([jnp.asarray(x, f32) for x in self])


class UpdateResult(NamedTuple):
    """Results of `adamw8bit`, with the shapes and dtypes of the arguments."""

    p: jax.Array
    m: jax.Array
    m_scale: jax.Array
    v: jax.Array
    v_scale: jax.Array
    work: jax.Array | None  # p in `work_dtype`


def moment_block_size(n: int) -> int:
    """Numbers per block in rows of n numbers: 256 or 128 if one divides n; the kernel supports these.

    Else the largest divisor of n from 32 to 255, or n if there is none.
    """
    sizes = (BLOCK, dispatch.LANES, *range(BLOCK - 1, SMALLEST_BLOCK - 1, -1))
    return next((b for b in sizes if n % b == 0), n)


def zero_moments(shape: tuple[int, ...], block: int | None = None) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(m, m_scale, v, v_scale) before the first update: zeros."""
    scales = jnp.zeros((*shape[:-1], shape[-1] // (block or moment_block_size(shape[-1]))), f32)
    return jnp.zeros(shape, jnp.int8), scales, jnp.zeros(shape, jnp.uint8), scales


def decode(code: jax.Array, scale: jax.Array, top: float) -> jax.Array:
    """The numbers of codes -top to top, float32; a negative code stands for a negative number."""
    x = code * (1 / top)
    return x * jnp.abs(x) * scale


def encode(x: jax.Array, scale: jax.Array, top: float, random: jax.Array) -> jax.Array:
    """Codes 0.0 to top of numbers x from 0 to scale, rounded stochastically: their expectation is x.

    random: numbers from 0 up to, not including, 1. If scale is 0, the codes are 0.
    """
    y = x * jnp.where(scale > 0, top * top / scale, f32(0))
    low = jnp.sqrt(y).astype(jnp.int32).astype(f32)
    # The numbers of the codes low and low + 1 are low^2 and low^2 + 2 low + 1.
    return jnp.minimum(low + jnp.where(y - low * low > random * (2 * low + 1), f32(1), f32(0)), top)


def moments(g, m, v, h) -> tuple[jax.Array, jax.Array]:
    """(m, v) after a step, float32; h: the eight scalars of `Hyper`."""
    g = g * h[7]
    return _decayed(m, h[1]) + (1 - h[1]) * g, _decayed(v, h[2]) + (1 - h[2]) * (g * g)


def _decayed(x, decay) -> jax.Array:
    """decay x, selected by a condition that changes no value.

    A compiler contracts one of the products in a x + b y into a fused multiply-add, and not the same one in every
    kernel. It cannot contract this product, so it always contracts the other one.
    """
    return jnp.where(x == 0, x, decay * x)


def stepped(p, m, root, h, kept) -> jax.Array:
    """p after a step, float32. root: sqrt(v); kept: the factor of p with decay, 1 - h[0] h[4]."""
    update = m * (h[0] / h[5]) / (root * jax.lax.rsqrt(h[6]) + h[3])
    return p * kept - update


def fractions(bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two random numbers from 0 to 1 of 8 bits each, from the half of the bits that `round_with` does not use."""

    def fraction(shift: int) -> jax.Array:
        return ((bits >> u32(shift)) & u32(255)).astype(jnp.int32).astype(f32) * (1 / 256) + (1 / 512)

    return fraction(0), fraction(8)


def adamw8bit_xla(p, g, m, m_scale, v, v_scale, h, seed, work_dtype=None) -> UpdateResult:
    """The reference of `adamw8bit`, for any size of blocks."""
    if seed.ndim > 1:
        return jax.vmap(functools.partial(adamw8bit_xla, work_dtype=work_dtype), (0,) * 6 + (None, 0))(
            p, g, m, m_scale, v, v_scale, h, seed
        )

    def in_blocks(x):
        return x.reshape(*m_scale.shape, -1)

    def as_stored(x, dtype):
        return x.astype(dtype).reshape(p.shape)

    index = seed[1].astype(u32) + jax.lax.iota(u32, p.size).reshape(p.shape)
    bits = random_bits(seed[0], index)
    root = decode(in_blocks(v), v_scale[..., None], V_TOP)
    m, v = moments(in_blocks(g), decode(in_blocks(m), m_scale[..., None], M_TOP), root * root, h)
    root = jnp.sqrt(v)
    m_scale = fp8_format.absmax(m, axis=-1)
    v_scale = fp8_format.absmax(root, axis=-1)
    m_code, v_code = _moment_codes(m, root, (m_scale[..., None], v_scale[..., None]), in_blocks(bits))
    kept = jax.lax.optimization_barrier(1 - h[0] * h[4])  # so that it is rounded alike in every program
    new = stepped(in_blocks(p).astype(f32), m, root, h, kept).reshape(p.shape)
    new = round_with(new, bits) if p.dtype == jnp.bfloat16 else new
    work = None if work_dtype is None else new.astype(work_dtype)
    return UpdateResult(new, as_stored(m_code, jnp.int8), m_scale, as_stored(v_code, jnp.uint8), v_scale, work)


def _moment_codes(m, root, scales, bits) -> tuple[jax.Array, jax.Array]:
    """Rounds moments to codes 0.0 to their top, float32: (of m, of root = sqrt(v)). scales: of m and of root."""
    m_fraction, v_fraction = fractions(bits)
    m_code = encode(jnp.abs(m), scales[0], M_TOP, m_fraction)
    v_code = encode(root, scales[1], V_TOP, v_fraction)
    return jnp.where(m < 0, -m_code, m_code), jnp.where(root > 0, jnp.maximum(v_code, f32(1)), v_code)


def _body(n: int, per_layer: int, in_place: bool, work: bool):
    """The kernel; a program updates one block of n numbers, and reads and writes every array once.

    per_layer: number of blocks with the same seed.

    A program has one block, because the block's scales must be known before its codes can be written; 256 numbers are
    two for each of 128 threads. The number of programs on a multiprocessor (16) hides latency, not their size.
    """

    def kernel(g_ref, h_ref, seed_ref, p_ref, m_ref, ms_ref, v_ref, vs_ref, *outs):
        refs = (p_ref, m_ref, ms_ref, v_ref, vs_ref) if in_place else outs[:5]
        p_out, m_out, ms_out, v_out, vs_out = refs
        i = jax.lax.axis_index("blocks")
        layer = i // per_layer
        block = i % per_layer
        h = [h_ref[j] for j in range(len(Hyper._fields))]
        layout = plgpu.Layout.WG_STRIDED((n,), vec_size=n // dispatch.LANES)
        number = plgpu.broadcasted_iota(jnp.int32, (n,), 0, layout=layout)
        first = seed_ref[layer, 1].astype(jnp.int32) + block * n
        bits = random_bits(seed_ref[layer, 0], number + first)
        root = decode(v_ref[i], vs_ref[i], V_TOP)
        m, v = moments(g_ref[i], decode(m_ref[i], ms_ref[i], M_TOP), root * root, h)
        root = jnp.sqrt(v)
        scales = jnp.max(jnp.abs(m)), jnp.max(root)
        ms_out[i], vs_out[i] = scales
        m_code, v_code = _moment_codes(m, root, scales, bits)
        m_out[i], v_out[i] = m_code.astype(jnp.int8), v_code.astype(jnp.uint8)
        new = stepped(p_ref[i].astype(f32), m, root, h, 1 - h[0] * h[4])
        new = round_with(new, bits) if p_out.dtype == jnp.bfloat16 else new
        p_out[i] = new
        if work:
            outs[-1][i] = new.astype(outs[-1].dtype)

    return kernel


def adamw8bit_mosaic(
    p, g, m, m_scale, v, v_scale, h, seed, work_dtype=None, in_place=False, interpret=False
) -> UpdateResult:
    """Runs the kernel; blocks are multiples of 128."""
    blocks = m_scale.size
    n = p.size // m_scale.size

    def rows(x):
        return x.reshape(blocks, n)

    state = [rows(p), rows(m), m_scale.reshape(blocks), rows(v), v_scale.reshape(blocks)]
    out = [] if in_place else [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state]
    out += [] if work_dtype is None else [jax.ShapeDtypeStruct((blocks, n), work_dtype)]
    layers = seed.shape[0] if seed.ndim > 1 else 1
    operands = rows(g), h, seed.reshape(layers, 2), *state
    results = dispatch.launch(
        _body(n, blocks // layers, in_place, work_dtype is not None), operands, over=range(3, 8) if in_place else (),
        op=OP, out=tuple(out), grid=(blocks,), names=("blocks",), interpret=interpret,
    )  # fmt: skip
    new = (x.reshape(y.shape) for x, y in zip(results, (p, m, m_scale, v, v_scale, p), strict=False))
    return UpdateResult(*new, *[None] * (6 - len(results)))


def adamw8bit(
    p: Float[Array, "*b n"],
    g: Float[Array, "*b n"],
    m: Int[Array, "*b n"],
    m_scale: Float[Array, "*b k"],
    v: UInt8[Array, "*b n"],
    v_scale: Float[Array, "*b k"],
    h: Float[Array, " 8"],
    seed: Int[Array, "*l 2"],
    *,
    work_dtype=None,
    in_place: bool = False,
    implementation: Implementation = None,
    interpret: bool = False,
) -> UpdateResult:
    """Updates a matrix whose rows have k blocks each. p, g: float32 or bfloat16. h: `Hyper(...).vector()`.

    seed: uint32 (seed, index of the first number), or one such row for each matrix of a stack. Number i of the
    flattened p takes the random bits of i + index, so that a shard gets the same bits as within the full matrix.
    work_dtype: also return the new p in this dtype. in_place: the kernel writes over p and the moments; this saves a
    copy only if the caller donates them. XLA runs blocks whose size is not a multiple of 128. Raises ValueError for
    shapes and dtypes that do not fit together, and dispatch.Unserved for such blocks with implementation="mosaic".
    """
    _check(p, g, m, m_scale, v, v_scale, h, seed)
    arrays = p, g, m, m_scale, v, v_scale, h, seed
    if serves(p.size // m_scale.size, implementation):
        return adamw8bit_mosaic(*arrays, work_dtype, in_place, interpret)
    return adamw8bit_xla(*arrays, work_dtype)


def serves(n: int, implementation: Implementation) -> bool:
    """True if `adamw8bit` runs the kernel for blocks of n numbers; else see `dispatch.runs_kernel`."""
    expected = f"block: expected a multiple of {dispatch.LANES} for the kernel"
    return dispatch.runs_kernel(OP, implementation, n % dispatch.LANES == 0, expected, n)


def _check(p, g, m, m_scale, v, v_scale, h, seed) -> None:
    """Raises ValueError for arguments that do not fit together."""

    def need(ok, what, expected, got):
        dispatch.expect(ok, OP, what, expected, got)

    need(p.ndim >= 1 and p.size > 0, "p", "a matrix that is not empty", p.shape)
    need(p.dtype in FLOATS, "p", "float32 or bfloat16", p.dtype)
    need(g.dtype in FLOATS, "g", "float32 or bfloat16", g.dtype)
    for name, x, dtype in (("g", g, g.dtype), ("m", m, jnp.int8), ("v", v, jnp.uint8)):
        need(x.shape == p.shape, name, f"the shape of p, {p.shape}", x.shape)
        need(x.dtype == dtype, name, jnp.dtype(dtype).name, x.dtype)
    n = p.shape[-1]
    k = m_scale.shape[-1] if m_scale.ndim else 0
    for name, x in (("m_scale", m_scale), ("v_scale", v_scale)):
        need(x.dtype == f32, name, "float32", x.dtype)
        fits = x.shape == (*p.shape[:-1], k) and k > 0 and n % k == 0
        need(fits, name, f"one for each block of a row: {(*p.shape[:-1], f'a divisor of {n}')}", x.shape)
    need(h.shape == (len(Hyper._fields),) and h.dtype == f32, "h", "float32 [8]: Hyper(...).vector()", h)
    fits = seed.dtype == u32 and seed.shape in ((2,), (p.shape[0], 2))
    need(fits, "seed", f"uint32 [2] or [{p.shape[0]}, 2]", f"{seed.dtype} {seed.shape}")


def cases(sizes: Sizes, tokens: int) -> list[Case]:
    """The update of the gate's weights: of two layers at once with float32 master and bfloat16 work weights, and of one
    layer. tokens: not used."""
    block = moment_block_size(sizes.hidden)
    array = jax.ShapeDtypeStruct

    def case(name, dtype, *stack: int, **options):
        shape = (*stack, sizes.intermediate, sizes.hidden)
        scales = array((*shape[:-1], sizes.hidden // block), f32)
        moments = array(shape, jnp.int8), scales, array(shape, jnp.uint8), scales
        hyper = array((len(Hyper._fields),), f32)
        seed = array((*stack, 2), u32)
        run = functools.partial(adamw8bit, in_place=True, **options)
        p = array(shape, dtype)
        work_bytes = 2 if options else 0
        moved = p.size * (3 * p.dtype.itemsize + 4 + work_bytes) + 16 * scales.size
        return Case(f"adamw8bit.{name}", run, (p, p, *moments, hyper, seed), moved, (0, 2, 3, 4, 5))

    return [
        case("stack", f32, 2, work_dtype=jnp.bfloat16),
        case("float32", f32),
        case("bfloat16", jnp.bfloat16),
    ]
