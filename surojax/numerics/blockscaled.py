"""Linear layers whose three products are block-scaled: MXFP8 and NVFP4, the formats of Blackwell's tensor cores.

A block is 32 (MXFP8) or 16 (NVFP4) neighbours along the dimension that a product sums over, with one scale. So every
operand is quantised along the dimension that its product contracts: for y = x w^T, x and w along the inputs; for
dx = g w, g and w^T along the outputs; for dw = g^T x, g^T and x^T along the tokens. Tokens are padded with zeros to
full blocks, which changes no sum. Products accumulate in float32.

MXFP8 (OCP Microscaling Formats 1.0; Mishra et al. 2025, arXiv:2506.08027): e4m3 values, for gradients too, and
power-of-two scales (e8m0). The scale is the smallest with which no value of the block exceeds 448. This rounds it up,
as in arXiv:2506.08027; the specification's floor would clip values. Values are rounded to nearest.

NVFP4 (NVIDIA 2025, arXiv:2509.25149): e2m1 values (0, 0.5, 1, 1.5, 2, 3, 4, 6), an e4m3 scale per block, and a float32
scale per tensor that makes its largest block scale 448. From that paper:
- Weights are in blocks of 16 x 16, rounded once for y and dx: both use the same weights, so the chain rule holds.
- Gradients are rounded stochastically, everything else to nearest. Block scales of gradients are rounded up here, not
  to nearest as in the paper: a scale rounded down clips the block's largest value, which would bias it.
- Before dw, x^T and g^T are multiplied in groups of 16 tokens by the same random Hadamard matrix, diag(signs) H / 4. It
  is orthogonal, so the exact product does not change, and outliers of a block are spread over the block.
From XLA all arrays are float32 numbers that the format can represent, so that the casts in `product` change none: they
are rounded by arithmetic, because XLA may drop a cast to fewer bits and back. `pallas_kernels.mx` and `nvfp4` return
the dtypes of the format.

Random numbers are hashes of a seed, a number of the layer (`salt`) and a position, so none is stored.

On GPUs the products are `jax.nn.scaled_matmul`, which XLA compiles to cuDNN's block-scaled GEMM on compute capabilities
10.0 to 12.1; on other devices it would compile to a slow decomposition. `emulate=True` multiplies the same numbers as
float32. The operands are quantised by XLA or, to the same bits, by the kernels of `pallas_kernels.mx` and
`pallas_kernels.nvfp4_quantize`. For NVFP4 the code for XLA is the reference in `pallas_kernels.nvfp4_format`.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import fp8_format, mx, nvfp4_format, nvfp4_quantize
from pallas_kernels.dispatch import Implementation
from pallas_kernels.manual_axes import mark_varying, varying_axes
from pallas_kernels.nvfp4_format import WHOLE, OperandPart
from pallas_kernels.quantize import random_bits
from surojax.numerics.quantized import Quantized

# Dimensions that products sum over are multiples of it: full blocks, and multiples of 16 bytes, the hardware's unit.
WIDTHS = 32
MX_BLOCK = 32
EXPONENT = 23  # position of the exponent in the bits of a float32
E4M3_EXPONENT = 8  # 448 = 1.75 * 2^8


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


# -- Quantisation -----------------------------------------------------------------------------------------------------


def quantise_mxfp8(x: jax.Array) -> Quantized:
    """Quantises x `[n, k]`, k a multiple of 32, in blocks along k. A block with NaN or infinity becomes NaN."""
    blocks = x.astype(jnp.float32).reshape(x.shape[0], -1, MX_BLOCK)
    largest = _bits(jnp.max(jnp.abs(blocks), axis=-1, keepdims=True))
    exponent = (largest >> EXPONENT).astype(jnp.int32)
    mantissa = largest & 0x7FFFFF
    biased = exponent - E4M3_EXPONENT + (mantissa > 0x600000)  # 0x600000 is the mantissa of 1.75
    biased = jnp.maximum(biased, 1).astype(jnp.uint32)  # not 2^-127: some devices flush that float32 to zero
    values = fp8_format.to_e4m3(blocks * fp8_format.power_of_two(254 - biased))
    scales = jnp.where(exponent == 255, jnp.nan, fp8_format.power_of_two(biased))
    return Quantized(values.reshape(x.shape), scales[..., 0])


def quantise_nvfp4(x: jax.Array, seed: jax.Array | None = None, part: OperandPart = WHOLE) -> Quantized:
    """Quantises x `[n, k]`, k a multiple of 16, in blocks along k. A seed selects stochastic rounding, scales up."""
    return Quantized(*nvfp4_format.reference(x, seed, part))


def quantise_nvfp4_weights(w: jax.Array, part: OperandPart = WHOLE) -> tuple[Quantized, Quantized]:
    """Quantises w `[out, in]`, multiples of 16, in blocks of 16 x 16; returns (w, w^T), which are the same numbers."""
    rows, columns = nvfp4_format.reference_weights(w, part)
    return Quantized(*rows), Quantized(*columns)


# -- Products ---------------------------------------------------------------------------------------------------------


def dequantise(q: Quantized) -> jax.Array:
    """values * scales, exact in float32; without the tensor scale."""
    return (q.values.reshape(*q.scales.shape, q.block) * q.scales[..., None]).reshape(q.values.shape)


def _e8m0(scales: jax.Array) -> jax.Array:
    """Casts powers of two to e8m0, which is the exponent of a float32; NaN stays NaN."""
    if scales.dtype == jnp.float8_e8m0fnu:
        return scales
    return lax.bitcast_convert_type((_bits(scales) >> EXPONENT & 0xFF).astype(jnp.uint8), jnp.float8_e8m0fnu)


def product(a: Quantized, b: Quantized, dtype, emulate: bool) -> jax.Array:
    """a b^T: `[m, k]`, `[n, k]` -> `[m, n]` in dtype, accumulated in float32. emulate: multiply as float32."""
    mxfp8 = a.tensor_scale is None
    if emulate:
        options = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
        y = lax.dot_general(dequantise(a), dequantise(b), (((1,), (1,)), ((), ())), **options)
    else:
        value_dtype = jnp.float8_e4m3fn if mxfp8 else jnp.float4_e2m1fn
        values = (q.values.astype(value_dtype)[None] for q in (a, b))
        scales = ((_e8m0(q.scales) if mxfp8 else q.scales.astype(jnp.float8_e4m3fn))[None] for q in (a, b))
        # Float32 for NVFP4: its tensor scales are applied below, so that the result is rounded to 16 bits once.
        y = jax.nn.scaled_matmul(*values, *scales, preferred_element_type=dtype if mxfp8 else jnp.float32)[0]
        y = _vary_alike(y, a.values)[0]  # scaled_matmul types its result as equal on all devices
    if a.tensor_scale is not None and b.tensor_scale is not None:
        y = y * (a.tensor_scale * b.tensor_scale)
    return y.astype(dtype)


def _vary_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Within `shard_map`: marks all arrays as varying over the mesh axes that any of them varies over."""
    axes = frozenset().union(*map(varying_axes, arrays))
    return [mark_varying(x, axes) for x in arrays]


def _full_blocks(x: jax.Array, tokens: int = WIDTHS) -> jax.Array:
    """Pads x `[n, k]` with rows of zeros to a multiple of `tokens` rows."""
    return jnp.pad(x, ((0, -x.shape[0] % tokens), (0, 0)))


# -- Linear layers ----------------------------------------------------------------------------------------------------


def mxfp8_linear(
    x: jax.Array,
    w: jax.Array,
    *,
    frozen: bool = False,
    emulate: bool = False,
    implementation: Implementation = "xla",
) -> jax.Array:
    """x w^T in MXFP8: `[..., in]`, `[out, in]` -> `[..., out]` in x's dtype. Gradients are MXFP8 products too.

    frozen: w has no gradient, so that x is not saved for it. emulate: multiply the same numbers as float32, on any
    device. implementation: as in `pallas_kernels`, of the quantisation of operands that are not emulated; all give the
    same bits. Raises ValueError unless `in` and `out` are multiples of 32.
    """
    _check("mxfp8_linear", x, w)
    rows, w = _vary_alike(x.reshape(-1, x.shape[-1]), w)
    implementation = "xla" if emulate else implementation
    return _mxfp8(rows, w, frozen, emulate, implementation).reshape(*x.shape[:-1], w.shape[0])


class Parts(NamedTuple):
    """This device's shards of a linear layer's input, weights and output gradient (`outputs`)."""

    inputs: OperandPart = WHOLE
    matrix: OperandPart = WHOLE
    outputs: OperandPart = WHOLE


ALL_WHOLE = Parts()


def nvfp4_linear(
    x: jax.Array,
    w: jax.Array,
    seed: jax.Array,
    *,
    salt: int = 0,
    parts: Parts = ALL_WHOLE,
    frozen: bool = False,
    emulate: bool = False,
    implementation: Implementation = "xla",
) -> jax.Array:
    """x w^T in NVFP4: `[..., in]`, `[out, in]` -> `[..., out]` in x's dtype. Gradients are NVFP4 products too.

    seed: uint32 or int32 `[]`, different for each step, microbatch, layer, and device with different tokens. salt:
    different for linear layers with the same seed. Only gradients depend on seed and salt. parts: what x and w are of
    operands that several devices have. frozen, emulate, implementation: as in `mxfp8_linear`. Raises ValueError unless
    `in` and `out` are multiples of 32.
    """
    _check("nvfp4_linear", x, w)
    seed = jnp.asarray(seed)
    if seed.shape or seed.dtype not in (jnp.uint32, jnp.int32):
        raise ValueError(f"nvfp4_linear: seed: expected a uint32 or int32 of shape [], got {seed.dtype}{[*seed.shape]}")
    rows, w = _vary_alike(x.reshape(-1, x.shape[-1]), w)
    implementation = "xla" if emulate else implementation
    y = _nvfp4(rows, w, random_bits(seed, jnp.uint32(salt)), parts, frozen, emulate, implementation)
    return y.reshape(*x.shape[:-1], w.shape[0])


def _check(name: str, x: jax.Array, w: jax.Array) -> None:
    """Raises ValueError for shapes that a linear layer cannot multiply in blocks."""
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"{name}: expected x [..., in] and w [out, in], got {[*x.shape]} and {[*w.shape]}")
    if w.shape[0] % WIDTHS or w.shape[1] % WIDTHS:
        raise ValueError(f"{name}: w: expected multiples of {WIDTHS} as out and in, got {[*w.shape]}")


def _mxfp8_forward(x, w, frozen, emulate, implementation):
    y = product(_by_row(x, implementation), _by_row(w, implementation), x.dtype, emulate)
    return y, (None if frozen else x, w)


def _mxfp8_backward(frozen, emulate, implementation, saved, g):
    x, w = saved
    if frozen:
        return product(_by_row(g, implementation), _by_column(w, implementation), g.dtype, emulate), None
    full = functools.partial(_full_blocks, tokens=WIDTHS if implementation == "xla" else mx.ROWS)
    if implementation == "xla" or full(g).shape != g.shape:
        g_by_row = _by_row(g, implementation)
        g_by_token = _by_column(full(g), implementation)
    else:  # one kernel, which reads g once
        g_by_row, g_by_token = itertools.starmap(Quantized, mx.quantize_both(g, implementation=implementation))
    dx = product(g_by_row, _by_column(w, implementation), x.dtype, emulate)
    return dx, product(g_by_token, _by_column(full(x), implementation), w.dtype, emulate)


def _by_row(x, implementation: Implementation) -> Quantized:
    """Quantises x in MXFP8 blocks along its rows."""
    if implementation == "xla":
        return quantise_mxfp8(x)
    return Quantized(*mx.quantize(x, implementation=implementation))


def _by_column(x, implementation: Implementation) -> Quantized:
    """Quantises x^T in MXFP8 blocks along the columns of x."""
    if implementation == "xla":
        return quantise_mxfp8(x.T)
    return Quantized(*mx.quantize_transposed(x, implementation=implementation))


def _nvfp4_forward(x, w, seed, parts: Parts, frozen, emulate, implementation):
    if implementation == "xla":
        operands = quantise_nvfp4(x, part=parts.inputs), quantise_nvfp4_weights(w, parts.matrix)[0]
    else:
        x_by_row = nvfp4_quantize.quantize(x, part=parts.inputs, implementation=implementation)
        w_by_row = nvfp4_quantize.quantize_weights(w, part=parts.matrix, implementation=implementation)
        operands = Quantized(*x_by_row), Quantized(*w_by_row)
    return product(*operands, x.dtype, emulate), (None if frozen else x, w, seed)


def _nvfp4_backward(parts: Parts, frozen, emulate, implementation, saved, g):
    x, w, seed = saved
    rounding = tuple(random_bits(seed, jnp.uint32(i)) for i in (1, 2))
    if frozen:
        return product(*_nvfp4_of_frozen(parts, w, g, rounding[0], implementation), g.dtype, emulate), None, None
    quantised = _nvfp4_by_xla if implementation == "xla" else functools.partial(_nvfp4_by_kernels, implementation)
    g_by_row, w_by_column, g_by_token, x_by_token = quantised(parts, x, w, g, seed, rounding)
    dx = product(g_by_row, w_by_column, x.dtype, emulate)
    return dx, product(g_by_token, x_by_token, w.dtype, emulate), None


def _nvfp4_of_frozen(parts: Parts, w, g, rounding, implementation: Implementation) -> tuple[Quantized, Quantized]:
    """Operands of the backward pass without a gradient of w: g in blocks along its rows, and w^T."""
    if implementation == "xla":
        return quantise_nvfp4(g, rounding, parts.outputs), quantise_nvfp4_weights(w, parts.matrix)[1]
    g_by_row = nvfp4_quantize.quantize(g, rounding, part=parts.outputs, implementation=implementation)
    w_by_column = nvfp4_quantize.quantize_weights_transposed(w, part=parts.matrix, implementation=implementation)
    return Quantized(*g_by_row), Quantized(*w_by_column)


def _nvfp4_by_xla(parts: Parts, x, w, g, seed, rounding) -> tuple[Quantized, ...]:
    """Operands of the backward pass: g in blocks along its rows, w^T, and rotated g^T and x^T in blocks of tokens."""
    g_by_row = quantise_nvfp4(g, rounding[0], parts.outputs)
    g_by_token = nvfp4_format.reference_rotated(_full_blocks(g), seed, rounding[1], parts.outputs)
    x_by_token = nvfp4_format.reference_rotated(_full_blocks(x), seed, part=parts.inputs)
    _, w_by_column = quantise_nvfp4_weights(w, parts.matrix)
    return g_by_row, w_by_column, Quantized(*g_by_token), Quantized(*x_by_token)


def _nvfp4_by_kernels(implementation: Implementation, parts: Parts, x, w, g, seed, rounding) -> tuple[Quantized, ...]:
    """`_nvfp4_by_xla` with kernels. Random numbers are hashes of positions in g, so that padding changes none."""
    how: Any = {"part": parts.outputs, "implementation": implementation}
    full = functools.partial(_full_blocks, tokens=nvfp4_quantize.ROWS)
    if full(g).shape == g.shape:
        g_by_row, g_by_token = nvfp4_quantize.quantize_both(g, seed, rounding, **how)
    else:
        g_by_row = nvfp4_quantize.quantize(g, rounding[0], **how)
        g_by_token = nvfp4_quantize.quantize_rotated(full(g), seed, rounding[1], **how)
    x_by_token = nvfp4_quantize.quantize_rotated(full(x), seed, part=parts.inputs, implementation=implementation)
    w_by_column = nvfp4_quantize.quantize_weights_transposed(w, part=parts.matrix, implementation=implementation)
    return tuple(Quantized(*q) for q in (g_by_row, w_by_column, g_by_token, x_by_token))


def _with_vjp(forward, backward, *static: int):
    """A function with this forward pass (result, saved) and backward pass; static: numbers of its static arguments."""
    f = jax.custom_vjp(lambda *args: forward(*args)[0], nondiff_argnums=static)
    f.defvjp(forward, backward)
    return f


_mxfp8 = _with_vjp(_mxfp8_forward, _mxfp8_backward, 2, 3, 4)
_nvfp4 = _with_vjp(_nvfp4_forward, _nvfp4_backward, 3, 4, 5, 6)
