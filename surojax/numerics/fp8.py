"""Matrix products in float8: scales, products, and the histories of delayed scaling.

The format is e4m3 forward (3 bits of mantissa, up to 448) and e5m2 backward (2 bits, up to 57344, a much wider range),
as in Micikevicius et al. 2022 (arXiv:2209.05433). x is stored as clip(x / scale) with one float32 scale per tensor:

    scale = the smallest power of two with absmax / scale <= largest number of the format

Scales are powers of two because division by a power of two is exact, and so is the cast of the scale to 16 bits. e4m3
and e5m2 are floating-point formats, so their precision is the same in all binades of their range. Rounding the scale up
costs at most one of the 17 (e4m3) or 31 (e5m2) binades.

absmax is the largest magnitude of the tensor itself ("current scaling"), or the largest of the last steps ("delayed
scaling"). The latter is known before the tensor, so the operation that computes the tensor can also cast it, in one
pass. The absmax of a weight is always its own. It is known before the step and is equal on all devices that have a
shard of the weight, so the shards can be all-gathered in 8 bits.

A product is `dot(a8, b8) * scale_a * scale_b`, contracted over the last dimension of both operands. This is the only
layout in which float8 tensor cores read operands (sm_89, sm_90). XLA compiles the product, and a following addition, to
one cuBLASLt call. The callers of `product` transpose operands where needed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from surojax.numerics.quantized import Quantized, scale_for

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2

# The largest magnitudes that the first step assumes, because nothing was observed yet: of inputs, and of gradients as a
# multiple of the scale of the loss in them. Measured: gradients have 0.004 to 200 times that scale.
FIRST_INPUT = 16.0
FIRST_GRADIENT = 1024.0


class Sites(NamedTuple):
    """Names of the tensors of a block that are quantised. A history has a row for each.

    inputs: operands of products, in e4m3. gradients: gradients of the products' results, in e5m2.
    """

    inputs: tuple[str, ...]
    gradients: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all sites, in the order of a history's rows."""
        return *self.inputs, *self.gradients

    @property
    def number(self) -> int:
        """The number of sites."""
        return len(self.inputs) + len(self.gradients)


def product(a: Quantized, b: Quantized, dtype, *, plus: jax.Array | None = None) -> jax.Array:
    """a b^T + plus: `[rows of a, rows of b]` in `dtype`, accumulated in float32.

    plus: an array of that shape, or one row. It is the right operand of the sum: then XLA leaves the sum to cuBLASLt,
    also in a chain of products. Below Precision.HIGHEST, XLA allows cuBLASLt to accumulate in the tensor cores'
    accumulators, which have fewer than 24 bits.
    """
    scale = (a.scales * b.scales).astype(dtype)
    options = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": dtype}
    y = jax.lax.dot_general(a.values, b.values, (((1,), (1,)), ((), ())), **options) * scale
    return y if plus is None else y + plus


def history_shape(num_layers: int, sites: Sites, length: int) -> tuple[int, int, int]:
    """The shape of a history, `[layers, sites, steps]`.

    A history has the largest magnitude of each site of each layer in the last `length` steps, float32, the newest
    first; 0: none was observed.
    """
    return num_layers, sites.number, length


def new_observed(num_layers: int, sites: Sites) -> jax.Array:
    """Zeros `[layers, sites]`, in which a step records the largest magnitudes."""
    return jnp.zeros((num_layers, sites.number), jnp.float32)


def delayed_scales(history: jax.Array, sites: Sites, margin: int, loss_scale: jax.Array) -> jax.Array:
    """Scales `[layers, sites]` for the next step, from a history.

    If nothing was observed at a site, its absmax is assumed to be `FIRST_INPUT` for inputs and `FIRST_GRADIENT` times
    `loss_scale` for gradients. Too large a guess costs binades, of which e5m2 has 31; too small a one clips the largest
    values, which are most of a gradient's norm. The next step has an observed absmax. docs/precision.md has figures.

    loss_scale: of the loss in the gradients, 1 / the number of tokens.
    """
    is_input = jnp.arange(sites.number) < len(sites.inputs)
    first = jnp.where(is_input, FIRST_INPUT, FIRST_GRADIENT * loss_scale)
    top = jnp.max(history, axis=-1)
    top = jnp.where(top == 0, first[None, :], top)
    n = len(sites.inputs)
    return jnp.concatenate([scale_for(top[:, :n], E4M3, margin), scale_for(top[:, n:], E5M2, margin)], axis=1)


def extended(history: jax.Array | None, newest: jax.Array | None) -> jax.Array | None:
    """The history with the newest magnitudes `[layers, sites]` in front and without the oldest ones."""
    if history is None or newest is None:
        return None
    return jnp.concatenate([newest[..., None], history[..., :-1]], axis=-1)
