"""Rotary embedding (Su et al. 2021): positions, frequencies for long contexts, and the rotation by XLA.

Shape suffixes: B batch, S sequence, H heads, h head dimension.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from surojax.declared import AT_LEAST_0, AT_LEAST_1, POSITIVE, declare
from surojax.models.recompute import save_inputs_only
from surojax.numerics.rounding import materialised
from surojax.parallel import context

PROPORTIONAL = "proportional"
# The sizes of a RopeScaling that each kind uses.
ROPE_USES: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    PROPORTIONAL: ("factor",),
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Settings of a rotary embedding except its base, named as in Hugging Face's `rope_parameters`.

    kind: how the frequencies are stretched for contexts longer than the model was first trained on: "linear" (all
    frequencies divided by `factor`; Chen et al. 2023, Position Interpolation), "llama3" (only wavelengths longer than
    the original context are; Llama 3.1 model card and transformers' rope utilities) or "yarn" (those that make fewer
    turns in the original context than `beta_fast`, entirely from `beta_slow` on; Peng et al. 2023, arXiv:2309.00071).
    With "proportional" (Gemma 4) the channels of a head that do not rotate are the last ones of each half, and the
    frequencies are those of a whole head that rotates, divided by `factor`.
    """

    # "none", "linear" (position interpolation), "llama3", "yarn" or "proportional" (the slowest pairs do not rotate)
    kind: str = declare("none", choices=tuple(ROPE_USES), name="scaling")
    # how much longer the context becomes, for linear, llama3, yarn and proportional
    factor: float = 1.0
    # llama3: wavelengths above original length / this are stretched
    low_freq_factor: float = 1.0
    # llama3: wavelengths below original length / this are kept
    high_freq_factor: float = 4.0
    # llama3, yarn: context length before stretching
    original_max_position_embeddings: int = declare(8192, AT_LEAST_1)
    # yarn: multiplies queries and keys; 0 = 0.1 ln(rope_factor) + 1
    attention_factor: float = declare(0.0, AT_LEAST_0)
    # yarn: frequencies that turn more often in the original context are kept
    beta_fast: float = 32.0
    # yarn: frequencies that turn less often in it are stretched
    beta_slow: float = declare(1.0, POSITIVE)
    # yarn: the bounds between these are rounded to whole pairs of channels
    truncate: bool = True
    # fraction of a head's channels that rotate
    partial_rotary_factor: float = declare(1.0, POSITIVE)
    # queries grow by beta ln(1 + floor(position / original length)); 0 = not
    llama_4_scaling_beta: float = declare(0.0, AT_LEAST_0)
    # yarn with latent attention: scores grow by (0.1 x this x ln(rope_factor) + 1)^2; 0 = not
    mscale_all_dim: float = declare(0.0, AT_LEAST_0)

    @property
    def magnitude(self) -> float:
        """The factor that cosines and sines are multiplied by (attention scaling of YaRN)."""
        if self.kind != "yarn":
            return 1.0
        return self.attention_factor or 0.1 * math.log(self.factor) + 1

    @property
    def score_factor(self) -> float:
        """The factor of latent attention's scores that YaRN adds to `magnitude`'s."""
        return (0.1 * self.mscale_all_dim * math.log(max(self.factor, 1)) + 1) ** 2

    def channels(self, head_dim: int) -> int:
        """Number of a head's first channels, whose halves rotate together; PROPORTIONAL turns some of them by 0."""
        return head_dim if self.kind == PROPORTIONAL else int(head_dim * self.partial_rotary_factor)

    def turned_pairs(self, head_dim: int) -> int:
        """Number of the pairs of a head's channels that rotate."""
        return int(self.partial_rotary_factor * head_dim // 2)


# Turns nothing: every angle is 0. Layers without rotary embedding save the same residuals as the others with it.
NO_ROTATION = RopeScaling("linear", factor=math.inf)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> jax.Array:
    """Computes each channel pair's angle per position, `[head_dim / 2]`, radians, float32 (Su et al. 2021)."""
    freq = 1.0 / theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling.kind == "linear":
        return freq / scaling.factor
    if scaling.kind == "llama3":
        # Turns made within the original context: few = long wavelength = stretched; many = kept; blended between.
        turns = scaling.original_max_position_embeddings * freq / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        keep = jnp.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
        return keep * freq + (1 - keep) * freq / scaling.factor
    if scaling.kind == "yarn":
        first, last = yarn_bounds(head_dim, theta, scaling)
        stretched = jnp.clip((jnp.arange(head_dim // 2, dtype=jnp.float32) - first) / (last - first), 0.0, 1.0)
        return stretched * freq / scaling.factor + (1 - stretched) * freq
    if scaling.kind == PROPORTIONAL:
        turns = jnp.arange(head_dim // 2) < scaling.turned_pairs(head_dim)
        return jnp.where(turns, freq / scaling.factor, 0.0)
    return freq


def yarn_bounds(head_dim: int, theta: float, scaling: RopeScaling) -> tuple[float, float]:
    """The range of channel pairs that YaRN interpolates: pairs before are kept, pairs after are stretched."""

    def pair(turns: float) -> float:
        """The index, not rounded, of the channel pair that makes this number of turns in the original context."""
        original = scaling.original_max_position_embeddings
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = pair(scaling.beta_fast)
    last = pair(scaling.beta_slow)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, head_dim - 1)
    return first, last if last != first else last + 0.001


def rope_angles(head_dim: int, positions: jax.Array, theta: float, scaling: RopeScaling):
    """Returns (cosines, sines) of position x frequency, float32 `[..., head_dim / 2]` for positions `[S]` or `[B, S]`.

    Both are multiplied by `scaling.magnitude`.
    """
    frequencies = rope_frequencies(head_dim, theta, scaling)
    angle = positions[..., None] * jnp.expand_dims(frequencies, tuple(range(positions.ndim)))
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    return (cos, sin) if scaling.magnitude == 1 else (scaling.magnitude * cos, scaling.magnitude * sin)


def positions_of(
    tokens: int, starts_BS: jax.Array | None = None, first: jax.Array | int = 0, cp_method: context.Method = "ulysses"
) -> jax.Array:
    """Positions of this device's tokens, int32: `[S]` in their row, or `[B, S]` in their document if `starts` is given.

    Tokens are consecutive, unless a row or chunk is divided over devices. first: index in its row of the first token,
    of all devices. starts_BS: of whole rows, or of a whole chunk.
    """
    index_S = jnp.arange(tokens)
    if context.is_divided():
        index_S = context.own_index(tokens, cp_method)
        starts_BS = None if starts_BS is None else context.own_tokens(starts_BS, cp_method)
    index_S = first + index_S
    return index_S if starts_BS is None else index_S[None, :] - starts_BS


@jax.custom_vjp
def gradient_in_one_pass(x: jax.Array) -> jax.Array:
    """Returns x, and materialises its gradient in one pass over memory.

    XLA would write rope's halves apart and join them twice.
    """
    return x


gradient_in_one_pass.defvjp(lambda x: (x, None), lambda _, dx: (materialised(dx),))


@functools.partial(save_inputs_only, static_argnums=(2, 3))
def rope(x_BSHh: jax.Array, positions: jax.Array, theta: float, scaling: RopeScaling) -> jax.Array:
    """Rotates channel pairs (i, i + h/2) by position x frequency, in float32. positions: `[S]` or `[B, S]`."""
    angles = rope_angles(x_BSHh.shape[-1], positions, theta, scaling)
    cos, sin = (x[..., None, :] if x.ndim == 3 else x[None, :, None, :] for x in angles)
    first, second = jnp.split(gradient_in_one_pass(x_BSHh).astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BSHh.dtype)


def scale_by_position(q_BSHh: jax.Array, positions: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Multiplies queries by 1 + beta ln(1 + floor(position / original length)). positions: `[S]` or `[B, S]`."""
    lengths = jnp.floor(positions / scaling.original_max_position_embeddings)
    scale = (1 + scaling.llama_4_scaling_beta * jnp.log(1 + lengths)).astype(q_BSHh.dtype)
    return q_BSHh * (scale[..., None, None] if scale.ndim == 2 else scale[None, :, None, None])
