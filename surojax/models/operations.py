"""The operations that a block is written in: linear layers, RMSNorm, rotary embedding, SwiGLU, attention.

`Operations` is what a block's mathematics calls. Training, sampling and the reference compute the same block with
different `Operations`: in another recipe, by XLA or by fused kernels, with parts that are recomputed.

Shape suffixes: B batch, S sequence, D hidden size, F intermediate size, H query heads, K key/value heads,
h head dimension, T cached positions.

Weights are stored [out, in]. That is the layout of published checkpoints, ZeRO shards its leading dimension (sharding
the last one makes XLA keep a transposed copy of the stack), and FP8 tensor cores read it without a transpose.
`linear` contracts the last dimensions directly: with `x @ w.T` the transposed weight would be an intermediate value
that reverse mode saves, a copy of every weight when blocks are not recomputed.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.manual_axes import mark_varying, varying_axes
from pallas_kernels.quantize import random_bits
from pallas_kernels.rms_norm import rms_norm as kernel_rms_norm
from pallas_kernels.rope import rope as kernel_rope
from surojax.models.attention import attend, attend_in_context
from surojax.models.model import DEFAULT, PLAIN, Cache, Compute, Earlier, Variant
from surojax.numerics.blockscaled import mxfp8_linear, nvfp4_linear
from surojax.numerics.recipes import Precision
from surojax.numerics.rounding import materialised
from surojax.parallel import context
from surojax.parallel.operands import operand_parts, summed_before_rounding
from surojax.parallel.tensor import all_gather_sequence, is_divided, reduce_scatter_sequence

# --- linear layers ----------------------------------------------------------------------------------------------------


def times(x_BSi: jax.Array, w_oi: jax.Array) -> jax.Array:
    """x w^T in the dtype of both."""
    return jax.lax.dot_general(x_BSi, w_oi, (((x_BSi.ndim - 1,), (1,)), ((), ())))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def times_in(x_BSi: jax.Array, w_oi: jax.Array, dtype: str, gradient_dtype: str, frozen: bool = False) -> jax.Array:
    """x w^T of operands in `dtype`, in the dtype of x; its gradients from operands in `gradient_dtype`.

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


def recipe_product(precision: Precision, seed: jax.Array | None, frozen: bool = False) -> Callable:
    """The function (x, w, number, axes) -> x w^T of a recipe.

    number: of the product among those of a block. axes: the logical axes of w, which say what several devices have
    parts of.
    seed: uint32 [], of this block's random numbers (nvfp4), which differ from product to product; None if there is no
    backward pass. frozen: w has no gradient.
    """
    how: Any = {"frozen": frozen, "emulate": precision.emulate, "implementation": precision.implementation}
    if precision.recipe == "mxfp8":
        return lambda x, w, number, axes: summed_before_rounding(mxfp8_linear(x, w, **how), axes)
    if precision.recipe == "nvfp4":
        seed = jnp.uint32(0) if seed is None else seed

        def in_nvfp4(x, w, number, axes):
            y = nvfp4_linear(x, w, seed, salt=number, parts=operand_parts(w.shape, axes), **how)
            return summed_before_rounding(y, axes)

        return in_nvfp4
    if not (precision.matmul_dtype or precision.gradient_dtype):
        return lambda x, w, number, axes: times(x, w)

    def cast(x, w, number, axes):
        dtype = precision.matmul_dtype or str(x.dtype)
        w = mark_varying(w, varying_axes(x))  # some devices of a tensor-parallel group may share it: sums its gradient
        return times_in(x, w, dtype, precision.gradient_dtype or dtype, frozen)

    return cast


def linear(x_BSi: jax.Array, w_oi: jax.Array, b_o: jax.Array | None = None, product: Callable = times) -> jax.Array:
    """x w^T (+ b): `[..., in]`, `[out, in]` -> `[..., out]`, in the dtype of x."""
    y_BSo = product(x_BSi, w_oi)
    return y_BSo if b_o is None else y_BSo + jnp.expand_dims(b_o, tuple(range(x_BSi.ndim - 1)))


# --- what XLA fuses ---------------------------------------------------------------------------------------------------

# For values that are cheap to compute again: only their inputs are saved for the backward pass. If a whole block is
# recomputed anyway, the compiler sees the operation twice in one loop body and keeps one (`prevent_cse=False` lets it).
save_inputs_only = functools.partial(jax.checkpoint, prevent_cse=False)


def recomputed(f: Callable, enabled: bool = True) -> Callable:
    """f; the backward pass computes its values again from its inputs, if enabled, but not twice its result."""
    return save_inputs_only(f) if enabled else f


@functools.partial(save_inputs_only, static_argnums=(2, 3))
def rms_norm(x: jax.Array, weight: jax.Array, eps: float, plus_one: bool = False) -> jax.Array:
    """x / rms(x) * scale over the last dimension, computed in float32 (Zhang and Sennrich 2019).

    The scale is the weight, or 1 + weight (Gemma).
    """
    scale = weight.astype(jnp.float32)
    scale = 1 + scale if plus_one else scale
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (y * jnp.expand_dims(scale, tuple(range(x.ndim - 1)))).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """What a rotary embedding has in addition to its base; the names are those of Hugging Face's `rope_parameters`.

    kind: how the frequencies are stretched for contexts longer than the model was first trained on: "none", "linear"
    (all frequencies divided by `factor`; Chen et al. 2023, Position Interpolation), "llama3" (only wavelengths longer
    than the original context are; Llama 3.1 model card and transformers' rope utilities) or "yarn" (those that make
    fewer turns in the original context than `beta_fast`, entirely from `beta_slow` on; Peng et al. 2023,
    arXiv:2309.00071).

    attention_factor: yarn multiplies the rotated queries and keys by it; 0: by 0.1 ln(factor) + 1, its authors' choice.
    truncate: yarn rounds the bounds between its bands to whole pairs of channels. partial_rotary_factor: the fraction
    of a head's channels, its first ones, that rotate. llama_4_scaling_beta: queries at position p are multiplied by
    1 + beta ln(1 + floor(p / original length)) (Llama 4, Ministral 3).
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    llama_4_scaling_beta: float = 0.0

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        return self.attention_factor or 0.1 * math.log(self.factor) + 1

    def channels(self, head_dim: int) -> int:
        """Number of a head's channels that rotate."""
        return int(head_dim * self.partial_rotary_factor)


# The sizes of a RopeScaling that each kind uses.
ROPE_USES: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"),
}
# Turns nothing: every angle is 0. Layers without rotary embedding save the same residuals as the others with it.
NO_ROTATION = RopeScaling("linear", factor=math.inf)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> jax.Array:
    """Angle per position of each pair of channels, `[head_dim / 2]`, radians, float32 (Su et al. 2021)."""
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
    return freq


def yarn_bounds(head_dim: int, theta: float, scaling: RopeScaling) -> tuple[float, float]:
    """The pairs of channels between which YaRN blends: those before are kept, those after are stretched."""

    def pair(turns: float) -> float:
        """The pair, not rounded, that makes so many turns in the original context."""
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
    """(cosines, sines) of position x frequency, float32 `[..., head_dim / 2]` for positions `[S]` or `[B, S]`.

    Both are times `scaling.magnitude`.
    """
    position = positions.astype(jnp.float32)[..., None]
    angle = position * jnp.expand_dims(rope_frequencies(head_dim, theta, scaling), tuple(range(positions.ndim)))
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return (cos, sin) if scaling.magnitude == 1 else (scaling.magnitude * cos, scaling.magnitude * sin)


def positions_of(
    tokens: int, starts_BS: jax.Array | None = None, first: jax.Array | int = 0, cp_method: context.Method = "ulysses"
) -> jax.Array:
    """The positions of this device's tokens, int32: `[S]`, or `[B, S]` in the documents that start there.

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
    """x; its gradient is written to memory once. Else XLA writes the halves of rope's apart, and joins them twice."""
    return x


gradient_in_one_pass.defvjp(lambda x: (x, None), lambda _, dx: (materialised(dx),))


@functools.partial(save_inputs_only, static_argnums=(2, 3))
def rope(x_BSHh: jax.Array, positions: jax.Array, theta: float, scaling: RopeScaling) -> jax.Array:
    """Rotate channel pairs (i, i + h/2) by position x frequency, in float32. positions: `[S]` or `[B, S]`."""
    angles = rope_angles(x_BSHh.shape[-1], positions, theta, scaling)
    cos, sin = (x[..., None, :] if x.ndim == 3 else x[None, :, None, :] for x in angles)
    first, second = jnp.split(gradient_in_one_pass(x_BSHh).astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BSHh.dtype)


def scale_by_position(q_BSHh: jax.Array, positions: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Queries times 1 + beta ln(1 + floor(position / original length)). positions: `[S]` or `[B, S]`."""
    lengths = jnp.floor(positions.astype(jnp.float32) / scaling.original_max_position_embeddings)
    scale = (1 + scaling.llama_4_scaling_beta * jnp.log(1 + lengths)).astype(q_BSHh.dtype)
    return q_BSHh * (scale[..., None, None] if scale.ndim == 2 else scale[None, :, None, None])


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


@functools.partial(save_inputs_only, static_argnums=2)
def gated(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
    """activation(gate) * up (Shazeer 2020).

    XLA computes it whatever `kernels` says: if it is recomputed, one fusion writes it and both gradients, where two
    kernels would read gate and up twice.
    """
    return ACTIVATIONS[activation](gate) * up


@functools.partial(save_inputs_only, static_argnums=1)
def softcapped(x: jax.Array, cap: float) -> jax.Array:
    """cap tanh(x / cap), computed in float32: x, smoothly limited to less than the cap (Gemma 2)."""
    return (cap * jnp.tanh(x.astype(jnp.float32) / cap)).astype(x.dtype)


# --- what a block calls -----------------------------------------------------------------------------------------------


class Projection(NamedTuple):
    """A matrix, its bias, and its adapter (lora.py)."""

    weight: nnx.Param
    bias: nnx.Param | None = None
    adapter: Callable | None = None


@dataclasses.dataclass(frozen=True)
class Operations:
    """The operations of one layer, computed as `compute` and its variant say.

    seed: uint32 [], of the random numbers of the recipe (nvfp4) or of the adapters (dropout). starts: int32 `[B, S]`,
    for each token of whole rows the index in its row at which its document starts; None: a row is one document.
    Residuals that follow from starts are made again in the backward pass. frozen: the matrices have no gradient.
    """

    compute: Compute = DEFAULT
    variant: Variant = PLAIN
    seed: jax.Array | None = None
    starts: jax.Array | None = None
    frozen: bool = False

    @property
    def _by_xla(self) -> bool:
        return self.compute.precision.kernels == "xla"

    @property
    def _kernel_options(self) -> Any:
        return {"implementation": self.compute.precision.implementation}

    @functools.cached_property
    def _product(self) -> Callable:
        precision = self.compute.precision
        if not self.variant.recipe_enabled:
            precision = dataclasses.replace(precision, recipe="bf16")
        return recipe_product(precision, self.seed, self.frozen)

    def _seed_of(self, number: int) -> jax.Array | None:
        """The seed of a product's random numbers; None if there are none."""
        return None if self.seed is None else random_bits(self.seed, jnp.uint32(number))

    def linear(self, x: jax.Array, projection: Projection) -> jax.Array:
        """x w^T (+ b) in the recipe's numbers, and what its adapter adds; of this device's part of the sequence if a
        group divides the inputs."""
        weight, bias, adapter = projection
        number = weight.get_metadata("product")
        axes = weight.get_metadata("out_sharding")
        *_, inputs = axes

        def product(x, w):
            y = self._product(x, w, number=number, axes=axes)
            y = y if adapter is None else adapter(x, w, y, inputs, self._seed_of(number))
            return reduce_scatter_sequence(y) if is_divided(inputs) else y

        return linear(x, weight[...], None if bias is None else bias[...], product)

    def linears(self, x: jax.Array, projections: Sequence[Projection], norm: Callable | None) -> list[jax.Array]:
        """Several `linear` of x, or of norm(x), which the backward pass then computes again.

        In a tensor-parallel group x is this device's part of the sequence, and the results are of all of it.
        """

        def project(x):
            y = all_gather_sequence(norm(x) if norm else x)
            return [self.linear(y, projection) for projection in projections]

        return recomputed(project, norm is not None)(x)

    def norm(self, x: jax.Array, weight: jax.Array, eps: float, plus_one: bool = False) -> jax.Array:
        """`rms_norm`."""
        if self._by_xla:
            return rms_norm(x, weight, eps, plus_one)
        scale = 1 + weight.astype(jnp.float32) if plus_one else weight
        y: Any = kernel_rms_norm(x, scale, eps=eps, **self._kernel_options)
        return y

    def add_and_norm(
        self, x: jax.Array, residual: jax.Array, weight: jax.Array, eps: float, plus_one: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """(`norm` of the sum, x + residual): one pass of the kernel."""
        if self._by_xla:
            total = x + residual
            return self.norm(total, weight, eps, plus_one), total
        scale = 1 + weight.astype(jnp.float32) if plus_one else weight
        found: Any = kernel_rms_norm(x, scale, residual, eps=eps, **self._kernel_options)
        return found

    def rotate(
        self, q_BSHh: jax.Array, k_BSKh: jax.Array, first: jax.Array | int, theta: float, scaling: RopeScaling
    ) -> tuple[jax.Array, jax.Array]:
        """`rope` of queries and keys, of the channels that rotate; queries scaled by their position.

        first: index of the first token in its row. Positions begin anew with each document of a row.
        """
        h = q_BSHh.shape[-1]
        turned = scaling.channels(h)

        def rotated(q_BSHh, k_BSKh, starts_BS):
            positions = positions_of(q_BSHh.shape[1], starts_BS, first, self.compute.cp_method)
            if turned == h:
                q, k = self._turned(q_BSHh, k_BSKh, positions, theta, scaling)
            else:
                q, k = self._turned(q_BSHh[..., :turned], k_BSKh[..., :turned], positions, theta, scaling)
                q = jnp.concatenate([q, q_BSHh[..., turned:]], axis=-1)
                k = jnp.concatenate([k, k_BSKh[..., turned:]], axis=-1)
            return (scale_by_position(q, positions, scaling) if scaling.llama_4_scaling_beta else q), k

        return recomputed(rotated, self.starts is not None)(q_BSHh, k_BSKh, self.starts)

    def _turned(self, q, k, positions: jax.Array, theta: float, scaling: RopeScaling) -> tuple[jax.Array, jax.Array]:
        """`rope` of queries and keys with all their channels."""
        if self._by_xla:
            return rope(q, positions, theta, scaling), rope(k, positions, theta, scaling)
        return kernel_rope(q, k, *rope_angles(q.shape[-1], positions, theta, scaling), **self._kernel_options)

    def of_whole_chunk(self, *xs_BSHh: jax.Array) -> Sequence[jax.Array]:
        """Queries, keys or values of the chunk of which x is this device's part, of its part of the heads."""
        if not context.is_divided():
            return xs_BSHh
        assert self.compute.cp_method == "ulysses", "config/checks.py refuses the other methods with chunks"
        return context.scatter_heads(*xs_BSHh)

    def attend(
        self,
        q_BSHh: jax.Array,
        k_BSKh: jax.Array,
        v_BSKh: jax.Array,
        cache: Cache | Earlier | None = None,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
    ) -> tuple[jax.Array, Cache | Earlier | None]:
        """(causal attention `[B, S, H, h]` within the window, over the cached or earlier positions too; what is new).

        new: with a Cache the extended one; with an Earlier this chunk's own keys and values; else None.
        scale, softcap: of the scores, see `attention.attend`.
        """
        scores: Any = {"scale": scale, "softcap": softcap}
        window = self.variant.window
        how = self.compute.attention
        starts = self.starts
        if isinstance(cache, Earlier):
            q_BSHh, k_BSKh, v_BSKh = self.of_whole_chunk(q_BSHh, k_BSKh, v_BSKh)
            keys, values = cache.with_own(k_BSKh, v_BSKh)
            out_of_sight = max(0, cache.start + 1 - window) if window else 0
            if out_of_sight:
                keys, values = keys[:, out_of_sight:], values[:, out_of_sight:]
                starts = None if starts is None else jnp.maximum(starts - out_of_sight, 0)
            y_BSHh = attend(q_BSHh, keys, values, starts=starts, window=window, implementation=how, **scores)
            y_BSHh = context.gather_heads(y_BSHh) if context.is_divided() else y_BSHh
            return y_BSHh, Earlier(k_BSKh, v_BSKh)
        if cache is None:
            scores |= {"starts": starts, "window": window, "implementation": how}
            if context.is_divided():
                return attend_in_context(q_BSHh, k_BSKh, v_BSKh, self.compute.cp_method, **scores), None
            return attend(q_BSHh, k_BSKh, v_BSKh, **scores), None
        keys = jax.lax.dynamic_update_slice_in_dim(cache.keys, k_BSKh, cache.start, 1)
        values = jax.lax.dynamic_update_slice_in_dim(cache.values, v_BSKh, cache.start, 1)
        places: Any = {"start": cache.start, "starts": self.starts, "window": window}
        y_BSHh = attend(q_BSHh, keys, values, implementation="xla", **places, **scores)
        return y_BSHh, cache._replace(keys=keys, values=values)
