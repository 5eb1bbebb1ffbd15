"""Linear layers in float8 with one scale per tensor, as reverse mode sees them: recipes fp8_hybrid and fp8_current.

A linear layer has three products: y = x w^T, dx = dy w, dw = dy^T x. Each is contracted over the last dimension of both
operands (numerics/fp8.py). So x and dy are quantised in two forms, as they are and transposed, and w is transposed for
dx. Forward that is e4m3, backward e5m2.

A tensor in float8 has no derivative. So it comes with the same tensor in the model's dtype, of which `products` reads
the type alone: its gradient is what `products` returns. XLA leaves out what makes numbers that nobody reads. An
`Operand` is such a pair of an input, made by the fused kernel that computes it (`pallas_kernels`) if its scale is known
before; adapters read the 16-bit one. Of a matrix they are the `Quantized` that was fetched and what it stands for.

The largest magnitudes of tensors, of which the next steps make their scales, leave through the backward pass too: as
the gradients of `probes`, numbers that are added to nothing. (Flax' fp8_ops and Transformer Engine for JAX return new
histories as gradients of the old ones.)

In a tensor-parallel group (parallel/tensor.py) operands are quantised before they are gathered: inputs of column
products forward, gradients of row products backward. The scale of a tensor that is divided over the group follows from
its largest magnitude on all devices.

Shape suffixes: B batch, S sequence, s this device's part of it, N = B x S tokens, i inputs, o outputs.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import quantize, rms_norm, swiglu
from pallas_kernels.grouped_matmul import scaled_product, scaled_sums
from pallas_kernels.manual_axes import mark_varying, varying_axes
from pallas_kernels.mma import ROWS
from surojax.models.linear import Product
from surojax.numerics.fp8 import E4M3, E5M2, Sites, product, scale_for
from surojax.numerics.quantized import Quantized, largest_magnitude, quantise_whole
from surojax.parallel.tensor import all_gather_bits, in_group, largest_of_group, reduce_scatter_sequence


def sites_of(products: Iterable[Product]) -> Sites:
    """Names the tensors that are quantised for these products of a block: in the products' order, each once."""
    ordered = sorted((product for product in products if product.gradient), key=lambda product: product.number)
    inputs = dict.fromkeys(product.input for product in ordered)
    return Sites(tuple(inputs), tuple(dict.fromkeys(product.gradient for product in ordered)))


class Operand(NamedTuple):
    """An input of float8 products, in 16 bits and in e4m3.

    x: `[B, s, i]` in the model's dtype. values: of it in e4m3. scale, absmax: float32 [], absmax on this device.
    """

    x: jax.Array
    values: jax.Array
    scale: jax.Array
    absmax: jax.Array


def scale_of(absmax: jax.Array, dtype, known: jax.Array | None) -> jax.Array:
    """Returns the known (delayed) scale, or computes one from the tensor's largest magnitude on this device."""
    return scale_for(largest_of_group(absmax), dtype) if known is None else known


def _made(kernel, known: jax.Array | None, implementation) -> tuple[jax.Array, ...]:
    """Calls a kernel (out_dtype=, out_scale=) -> (values, absmax, ...); returns (e4m3 values, scale, absmax, ...)."""
    if known is not None:
        values, absmax, *others = kernel(out_dtype=E4M3, out_scale=known)
        return values, known, absmax, *others
    y, absmax, *others = kernel()
    scale = scale_of(absmax, E4M3, None)
    return quantize.cast(y, scale, E4M3, implementation=implementation), scale, absmax, *others


# --- inputs -----------------------------------------------------------------------------------------------------------


def normed(
    x: jax.Array, weight: jax.Array, residual: jax.Array | None, known: jax.Array | None, *, eps: float, implementation
) -> tuple[Operand, jax.Array]:
    """Returns (RMSNorm of x + residual as an `Operand`, x + residual).

    known: the scale; None: from the result's absmax.
    """
    weight = mark_varying(weight, varying_axes(x))  # so that its gradient is summed over the devices
    *operand, total = _normed(x, weight, residual, known, eps, implementation)
    return Operand(*operand), total


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _normed(x, weight, residual, known, eps: float, implementation):
    def kernel(**out):
        return rms_norm.forward(x, weight, residual, eps=eps, implementation=implementation, **out)

    values, scale, absmax, total = _made(kernel, known, implementation)
    y = rms_norm.forward(total, weight, eps=eps, implementation=implementation).y
    return y, values, scale, absmax, total


def _normed_forward(x, weight, residual, known, eps, implementation):
    results = _normed(x, weight, residual, known, eps, implementation)
    return results, (results[-1], weight, residual is not None)


def _normed_backward(eps, implementation, saved, cotangents):
    total, weight, has_residual = saved
    dy, *_, d_total = cotangents
    grads = rms_norm.backward(dy, total, weight, d_total, eps=eps, implementation=implementation)
    return grads.dx, grads.d_scale.astype(weight.dtype), grads.dx if has_residual else None, None


_normed.defvjp(_normed_forward, _normed_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _gated(gate, up, known, implementation):
    def kernel(**out):
        return swiglu.forward(gate, up, implementation=implementation, **out)

    values, scale, absmax = _made(kernel, known, implementation)
    return kernel().y, values, scale, absmax


def gated(gate: jax.Array, up: jax.Array, known: jax.Array | None, implementation) -> Operand:
    """Returns silu(gate) * up as an `Operand`. known: the scale; None: from the result's absmax."""
    return Operand(*_gated(gate, up, known, implementation))


def _gated_backward(implementation, saved, cotangents):
    grads = swiglu.backward(cotangents[0], *saved, implementation=implementation)
    return grads.d_gate, grads.d_up, None


_gated.defvjp(lambda gate, up, known, how: (_gated(gate, up, known, how), (gate, up)), _gated_backward)


# --- products ---------------------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """Delayed scales, known before the tensors are computed, and the tensors' probes, see `InFloat8`.

    The first number is of the input, the others are of the gradients of each result.
    """

    scales: tuple[jax.Array, ...]
    probes: tuple[jax.Array, ...] | None


class InFloat8(NamedTuple):
    """A layer's float8 matrices by their product, and delayed scales and probes of its tensors.

    sites: names of the tensors with scales. scales: float32 `[sites]`; None: each is made of its tensor. probes:
    numbers whose gradients are the largest magnitudes `[sites]`; None: these are not asked for.
    """

    matrices: dict[Product, Quantized]
    sites: Sites = Sites((), ())
    scales: jax.Array | None = None
    probes: Sequence[jax.Array] | None = None

    def scale_of(self, site: str) -> jax.Array | None:
        """The delayed scale of a tensor; None without delayed scales."""
        return None if self.scales is None else self.scales[self.sites.names.index(site)]

    def known(self, products: Sequence[Product]) -> Known | None:
        """Selects the delayed scales and probes of these products' common input and of each result's gradient."""
        if self.scales is None:
            return None
        names = (products[0].input, *(product.gradient for product in products))
        sites = [self.sites.names.index(name) for name in names]
        site_probes = None if self.probes is None else tuple(self.probes[site] for site in sites)
        return Known(tuple(self.scales[site] for site in sites), site_probes)


class ProductOptions(NamedTuple):
    """Static arguments of `products`.

    by_rows: a tensor-parallel group divides the inputs, else the outputs. frozen: matrices have no gradients, so that
    no operand is needed transposed. axes: the mesh axes that x varies over. parted: x, or with by_rows the result, is
    this device's part of the sequences.
    """

    by_rows: bool
    frozen: bool
    implementation: Any
    axes: frozenset[str]
    parted: bool = True

    @property
    def gathers_input(self) -> bool:
        """True if x is all-gathered, and its gradient reduce-scattered."""
        return self.parted and not self.by_rows

    @property
    def scatters_result(self) -> bool:
        """True if results are reduce-scattered, and their gradients all-gathered."""
        return self.parted and self.by_rows


def product_with_expert(x: jax.Array, w: jax.Array, *, frozen: bool, implementation) -> jax.Array:
    """Returns x w^T `[R, o]` for the rows x `[R, i]` of one expert, whose matrix `[out, in]` is quantised here.

    All scales are made of their tensors. If a tensor-parallel group divides the outputs or the inputs, so is the result
    divided, or a term of it.
    """
    how = ProductOptions(
        by_rows=False, frozen=frozen, implementation=implementation, axes=varying_axes(x), parted=False
    )
    fixed = jax.lax.stop_gradient(w)
    matrix = quantise_whole(fixed, E4M3, largest_of_group(largest_magnitude(fixed)))
    (y,) = products(how, x[None], [matrix], [w], None)
    return y[0]


def products_with_experts(
    x: jax.Array, w: jax.Array, experts: jax.Array, *, implementation=None, interpret: bool = False
) -> jax.Array:
    """Returns x w[e]^T `[R, o]` for the rows x `[R, i]` of all experts by a GPU kernel; w `[E, o, i]`.

    experts: int32, of each tile of rows, see pallas_kernels.grouped_matmul. An expert's rows have one scale, and its
    matrix has one, each made of its largest magnitude.
    """
    return _products_with_experts(x, w, experts, implementation, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _products_with_experts(x, w, experts, implementation, interpret):
    return _experts_forward(x, w, experts, implementation, interpret)[0]


def _experts_forward(x, w, experts, implementation, interpret):
    how: Any = {"dtype": x.dtype, "implementation": implementation, "interpret": interpret}
    rows = _quantised_rows(x, experts, len(w), E4M3)
    matrices = quantise_whole(w, E4M3, largest_of_group(largest_magnitude(w)))
    scale_T = (rows.scales * matrices.scales)[experts]
    return scaled_product(rows.values, matrices.values, experts, scale_T, **how), (rows, matrices, experts)


def _experts_backward(implementation, interpret, saved, dy):
    how: Any = {"dtype": dy.dtype, "implementation": implementation, "interpret": interpret}
    rows, matrices, experts = saved
    d_rows = _quantised_rows(dy, experts, len(matrices.scales), E5M2)
    scale_T = (d_rows.scales * matrices.scales)[experts]
    dx = scaled_product(d_rows.values, matrices.values.swapaxes(1, 2), experts, scale_T, **how)
    dw = scaled_sums(d_rows.values.T, rows.values.T, experts, d_rows.scales * rows.scales, **how)
    return dx, dw, None


_products_with_experts.defvjp(_experts_forward, _experts_backward)


def _quantised_rows(x: jax.Array, experts: jax.Array, number: int, dtype) -> Quantized:
    """Quantises the rows x `[R, n]`, each expert's with one scale: values `[R, n]`, scales `[E]`.

    experts: of each tile of rows. number: E.
    """
    tiles = x.reshape(len(experts), ROWS, -1)
    largest_E = jax.ops.segment_max(largest_magnitude(tiles), experts, number, indices_are_sorted=True)
    largest_E = largest_of_group(jnp.maximum(largest_E, 0))  # of an expert without rows: 0
    values = quantise_whole(tiles, dtype, largest_E[experts]).values
    return Quantized(values.reshape(x.shape), scale_for(largest_E, dtype))


def whole_input(x: jax.Array | Operand) -> jax.Array:
    """Returns the products' input in the model's dtype, whether it is quantised or not."""
    return x.x if isinstance(x, Operand) else x


def products(
    how: ProductOptions,
    x: jax.Array | Operand,
    matrices: Sequence[Quantized],
    wholes: Sequence[jax.Array],
    known: Known | None,
) -> tuple[jax.Array, ...]:
    """Returns x w^T for each matrix `[out, in]`: `[B, s, i]` -> `[B, S, o]`; with `by_rows` `[B, S, i]` -> `[B, s, o]`.

    wholes: the matrices in the model's dtype, whose gradients are those of the matrices. known: None: every scale is
    made of its tensor.
    """
    operand = x[1:] if isinstance(x, Operand) else None
    x = whole_input(x)
    wholes = tuple(mark_varying(w, how.axes) for w in wholes)
    scales, probes = (None, None) if known is None else known
    return _products(how, x, operand, tuple(matrices), wholes, scales, probes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(how: ProductOptions, x, operand, matrices, wholes, scales, probes):
    q, _, _ = _input(how, x, operand, scales, transposed=False)
    return tuple(_result(how, q, w, x) for w in matrices)


def _result(how: ProductOptions, q: Quantized, w: Quantized, x: jax.Array) -> jax.Array:
    y_NO = product(q, w, x.dtype)
    y = y_NO.reshape(x.shape[0], -1, y_NO.shape[-1])
    # Devices that share a matrix have the same y, but gradients of their own.
    return mark_varying(reduce_scatter_sequence(y) if how.scatters_result else y, how.axes)


def _input(
    how: ProductOptions, x, operand, scales, *, transposed: bool
) -> tuple[Quantized, Quantized | None, jax.Array | None]:
    """Returns (the quantised input, the quantised transpose or None, largest magnitude on this device)."""
    transposed = transposed and not how.frozen
    if operand is None:
        known = None if scales is None else scales[0]
        return _quantised(how, x, E4M3, known, gathers=how.gathers_input, transposed=transposed)
    values, scale, absmax = operand
    q = _rows(all_gather_bits(values) if how.gathers_input else values, scale)
    return q, _transposed(how, q) if transposed else None, absmax


def _quantised(how: ProductOptions, x_BSn: jax.Array, dtype, known, *, gathers: bool, transposed: bool):
    """Quantises a 16-bit tensor; returns (operand, transposed operand or None, largest magnitude on this device).

    gathers: the operands are of whole sequences, x of this device's part of them.
    """
    options: Any = {"implementation": how.implementation}
    x = x_BSn.reshape(-1, x_BSn.shape[-1])
    if transposed and not (gathers and in_group()):  # one pass
        scale = scale_of(quantize.absmax(x, **options), dtype, None) if known is None else known
        cast = quantize.cast_transpose(x, scale, dtype, **options)
        return Quantized(cast.values, scale), Quantized(cast.transposed, scale), cast.absmax
    absmax = quantize.absmax(x, **options)
    scale = scale_of(absmax, dtype, known)
    values = quantize.cast(x, scale, dtype, **options).reshape(x_BSn.shape)
    q = _rows(all_gather_bits(values) if gathers else values, scale)
    return q, _transposed(how, q) if transposed else None, absmax


def _rows(values_BSn: jax.Array, scale: jax.Array) -> Quantized:
    return Quantized(values_BSn.reshape(-1, values_BSn.shape[-1]), scale)


def _transposed(how: ProductOptions, q: Quantized) -> Quantized:
    return Quantized(quantize.transpose(q.values, implementation=how.implementation), q.scales)


def _products_forward(how: ProductOptions, x, operand, matrices, wholes, scales, probes):
    q, q_T, absmax = _input(how, x, operand, scales, transposed=True)
    results = tuple(_result(how, q, w, x) for w in matrices)
    return results, (q_T, matrices, scales, None if probes is None else absmax)


def _products_backward(how: ProductOptions, saved, cotangents):
    x_T, matrices, scales, absmax = saved
    dx_Ni: Any = None
    dws = []
    magnitudes = [absmax]
    for i, (w, dy) in enumerate(zip(matrices, cotangents, strict=True)):
        known = None if scales is None else scales[1 + i]
        d, d_T, top = _quantised(how, dy, E5M2, known, gathers=how.scatters_result, transposed=not how.frozen)
        magnitudes.append(top)
        dws.append(None if d_T is None else mark_varying(product(d_T, x_T, dy.dtype), how.axes))
        dx_Ni = product(d, _transposed(how, w), dy.dtype, plus=dx_Ni)
    dx = dx_Ni.reshape(len(cotangents[0]), -1, dx_Ni.shape[-1])
    dx = mark_varying(reduce_scatter_sequence(dx) if how.gathers_input else dx, how.axes)
    probes = None if absmax is None else tuple(mark_varying(top, how.axes) for top in magnitudes)
    return dx, None, None, tuple(dws), None, probes


_products.defvjp(_products_forward, _products_backward)
