"""Matrix products in float8: scales, quantised weights, and the histories of delayed scaling.

Values are e4m3 forward (3 bits of mantissa, up to 448) and e5m2 backward (2 bits, up to 57344, a much wider range), as
in Micikevicius et al. 2022 (arXiv:2209.05433). x is stored as clip(x / scale) with one float32 scale for a tensor:

    scale = the smallest power of two with absmax / scale <= largest number of the format

Powers of two on purpose: dividing by one is exact, so is its cast to 16 bits, and e4m3 and e5m2 are floating point,
whose precision does not depend on where in its range a tensor lies; what it costs is up to one of 17 (31) binades.

absmax is that of the tensor itself ("current"), or the largest of the last steps ("delayed"), known before the
tensor is: then what makes the tensor can cast it in the same pass. A weight's is always its own: it is known before the
step, and the same on every device that holds a shard of it, so the shards can travel in 8 bits.

A product is `dot(a8, b8) * scale_a * scale_b`, contracted over the last dimensions of both: the one layout in which
float8 tensor cores read their operands (sm_89, sm_90), and a pattern that XLA turns into one cuBLASLt product with what
is added to it. So `product` takes its operands transposed where needed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from surojax.numerics.quantize import Quantized, scale_for

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2

FIRST_INPUT = 16.0  # absmax of inputs that the first step reckons with, when nothing was observed yet


class Sites(NamedTuple):
    """Names of the tensors of a block that are quantised, each in one place. An amax history has a row for each.

    inputs: operands of products, e4m3. gradients: of the products' results, e5m2.
    """

    inputs: tuple[str, ...]
    gradients: tuple[str, ...]

    @property
    def number(self) -> int:
        return len(self.inputs) + len(self.gradients)


def product(a: Quantized, b: Quantized, dtype, *, plus: jax.Array | None = None) -> jax.Array:
    """a b^T `[rows of a, rows of b]` in `dtype`, added up in float32, plus a matrix or row of that shape.

    `product(...) + plus` in this order: so XLA leaves the sum to cuBLASLt, also for a chain of products. At less than
    the highest precision XLA lets it add up with the tensor cores' own accumulators, which hold fewer than 24 bits.
    """
    scale = (a.scales * b.scales).astype(dtype)
    options = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": dtype}
    y = jax.lax.dot_general(a.values, b.values, (((1,), (1,)), ((), ())), **options) * scale
    return y if plus is None else y + plus


def history_shape(num_layers: int, sites: Sites, length: int) -> tuple[int, int, int]:
    """The shape of a history: the largest magnitudes of every layer's sites in the last steps, newest first, float32;
    0: none was observed."""
    return num_layers, sites.number, length


def unobserved(sites: Sites) -> jax.Array:
    """The magnitudes `[sites]` that a block observes if it does not compute in float8."""
    return jnp.zeros(sites.number, jnp.float32)


def new_observed(history: jax.Array | None) -> jax.Array | None:
    """Where a step notes the largest magnitudes `[layers, sites]`; None without a history."""
    return None if history is None else jnp.zeros(history.shape[:2], jnp.float32)


def delayed_scales(history: jax.Array, sites: Sites, margin: int, first_gradient: jax.Array) -> jax.Array:
    """Scales `[layers, sites]` of the next step from a history.

    Where nothing was observed, inputs are reckoned to stay below `FIRST_INPUT` and gradients below `first_gradient`;
    both formats have binades enough for a guess that is far off, and what is too large is clipped, in one step.
    """
    first = jnp.where(jnp.arange(sites.number) < len(sites.inputs), FIRST_INPUT, first_gradient)
    top = jnp.max(history, axis=-1)
    top = jnp.where(top == 0, first[None, :], top)
    n = len(sites.inputs)
    return jnp.concatenate([scale_for(top[:, :n], E4M3, margin), scale_for(top[:, n:], E5M2, margin)], axis=1)


def extended(history: jax.Array | None, newest: jax.Array | None) -> jax.Array | None:
    """The history with what this step observed `[layers, sites]` in front, the oldest dropped."""
    if history is None or newest is None:
        return None
    return jnp.concatenate([newest[..., None], history[..., :-1]], axis=-1)
