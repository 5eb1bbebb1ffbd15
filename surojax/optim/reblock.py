"""Moments in 8 bits in blocks of another size, for a checkpoint that was written under another layout.

No block spans two shards of a row (`optimizer.adamw8bit`), so where tensor parallelism divides rows, blocks have other
sizes. A block's scale is its largest magnitude. Smaller blocks within the old ones keep the scale: no number changes,
and blocks with equal scales joined again have the codes that they had. A new block that overlaps several old ones has
the largest of their scales, and the codes of the others are rounded to nearest: by at most half a step of the new code.
A v that is not 0 keeps at least code 1.
"""

import jax
import jax.numpy as jnp

from surojax.optim.adamw8bit import Moments8bit


def reblocked(old: Moments8bit, blocks: int) -> Moments8bit:
    """The moments `[..., n]` quantised again to this number of blocks per row."""
    m, m_scale = _codes(old.m, old.m_scale, blocks)
    v, v_scale = _codes(old.v, old.v_scale, blocks)
    v = jnp.where((old.v > 0) & (v == 0), 1, v)  # never 0, which m would be divided by
    return Moments8bit(m.astype(old.m.dtype), m_scale, v.astype(old.v.dtype), v_scale)


def _codes(codes: jax.Array, scales: jax.Array, blocks: int) -> tuple[jax.Array, jax.Array]:
    """(float32 codes, scales) in other blocks of the numbers code |code| x scale; a code is proportional to a root."""
    n = codes.shape[-1]
    number_scales = jnp.repeat(scales, n // scales.shape[-1], axis=-1)
    new = jnp.max(number_scales.reshape(*scales.shape[:-1], blocks, n // blocks), axis=-1)
    largest = jnp.repeat(new, n // blocks, axis=-1)
    root = jnp.where(number_scales == largest, 1.0, jnp.sqrt(number_scales / largest))
    return jnp.round(codes * root), new
