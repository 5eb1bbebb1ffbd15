"""Linear layers: x w^T in the numbers of a recipe, and its gradients.

Shape suffixes: B batch, S sequence, i inputs, o outputs.

Weights are stored [out, in]. That is the layout of published checkpoints, ZeRO shards its leading dimension (sharding
the last one makes XLA keep a transposed copy of the stack), and FP8 tensor cores read it without a transpose.
`linear` contracts the last dimensions directly: with `x @ w.T` the transposed weight would be an intermediate value
that reverse mode saves, a copy of every weight when blocks are not recomputed.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.manual_axes import mark_varying, varying_axes
from surojax.numerics.blockscaled import mxfp8_linear, nvfp4_linear
from surojax.numerics.recipes import Precision
from surojax.parallel.operands import operand_parts, summed_before_rounding


@dataclasses.dataclass(frozen=True)
class Product:
    """The declaration of a matrix product of a block, made with the parameter of its matrix.

    number: which random numbers it rounds with (nvfp4) and drops with (adapters), unlike those of the block's other
    products. input, gradient: names of two tensors that float8 recipes quantise, its input and the gradient of its
    result; products of one input share its name.
    """

    number: int
    input: str = ""
    gradient: str = ""


def times(x_BSi: jax.Array, w_oi: jax.Array) -> jax.Array:
    """Returns x w^T `[..., o]`; both operands and the result have one dtype."""
    return jax.lax.dot_general(x_BSi, w_oi, (((x_BSi.ndim - 1,), (1,)), ((), ())))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def times_in(x_BSi: jax.Array, w_oi: jax.Array, dtype: str, gradient_dtype: str, frozen: bool) -> jax.Array:
    """Returns x w^T in x's dtype, multiplied in `dtype`; its gradients are multiplied in `gradient_dtype`.

    frozen: w has no gradient, so that x is not saved for it.
    """
    return times(x_BSi.astype(dtype), w_oi.astype(dtype)).astype(x_BSi.dtype)


def _times_in_forward(x_BSi, w_oi, dtype, gradient_dtype, frozen):
    return times_in(x_BSi, w_oi, dtype, gradient_dtype, frozen), (None if frozen else x_BSi, w_oi)


def _times_in_backward(dtype, gradient_dtype, frozen, saved, dy_BSo):
    x_BSi, w_oi = saved
    w, dy = (v.astype(gradient_dtype) for v in (w_oi, dy_BSo))
    dx_BSi = (dy @ w).astype(dy_BSo.dtype)
    if frozen:
        return dx_BSi, None
    lead = tuple(range(dy.ndim - 1))
    dw_oi = jax.lax.dot_general(dy, x_BSi.astype(gradient_dtype), ((lead, lead), ((), ())))
    return dx_BSi, dw_oi.astype(w_oi.dtype)


times_in.defvjp(_times_in_forward, _times_in_backward)


def recipe_product(
    precision: Precision, seed: jax.Array | None, frozen: bool = False, *, of_one_expert: bool = False
) -> Callable:
    """Makes the function (x, w, number, axes) -> x w^T that multiplies in a recipe's number formats.

    number: of the product among those of a block. axes: the logical axes of w, which say what several devices have
    parts of.
    seed: uint32 [], of this block's random numbers (nvfp4), which differ from product to product; None if there is no
    backward pass. frozen: w has no gradient. of_one_expert: see `operand_parts`.
    """
    how: Any = {"frozen": frozen, "emulate": precision.emulate, "implementation": precision.implementation}
    if precision.recipe == "mxfp8":
        return lambda x, w, number, axes: summed_before_rounding(mxfp8_linear(x, w, **how), axes)
    if precision.recipe == "nvfp4":
        seed = jnp.uint32(0) if seed is None else seed

        def in_nvfp4(x, w, number, axes):
            parts = operand_parts(w.shape, axes, of_one_expert=of_one_expert)
            y = nvfp4_linear(x, w, seed, salt=number, parts=parts, **how)
            return summed_before_rounding(y, axes)

        return in_nvfp4
    if not (precision.matmul_dtype or precision.gradient_dtype):
        return lambda x, w, number, axes: times(x, w)

    def cast(x, w, number, axes):
        dtype = precision.matmul_dtype or str(x.dtype)
        w = mark_varying(w, varying_axes(x))  # some devices of a tensor-parallel group may share it: sums its gradient
        return times_in(x, w, dtype, precision.gradient_dtype or dtype, frozen)

    return cast


def router_product(x_BSi: jax.Array, w_oi: jax.Array) -> jax.Array:
    """Returns a router's logits x w^T `[..., out]` in float32: rounded to 16 bits, close logits would tie."""
    how: Any = {"preferred_element_type": jnp.float32}
    return jax.lax.dot_general(x_BSi, w_oi, (((x_BSi.ndim - 1,), (1,)), ((), ())), **how)


def linear(x_BSi: jax.Array, w_oi: jax.Array, b_o: jax.Array | None = None, product: Callable = times) -> jax.Array:
    """Returns x w^T (+ b): `[..., in]`, `[out, in]` -> `[..., out]`, in the dtype of x."""
    y_BSo = product(x_BSi, w_oi)
    return y_BSo if b_o is None else y_BSo + jnp.expand_dims(b_o, tuple(range(x_BSi.ndim - 1)))
