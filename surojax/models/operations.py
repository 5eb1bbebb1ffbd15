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
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.rms_norm import rms_norm as kernel_rms_norm
from pallas_kernels.rope import rope as kernel_rope
from pallas_kernels.swiglu import swiglu as kernel_swiglu
from surojax.models.attention import attend
from surojax.models.model import DEFAULT, PLAIN, Cache, Compute, Variant
from surojax.numerics.blockscaled import mxfp8_linear, nvfp4_linear
from surojax.numerics.recipes import Precision

# --- linear layers ----------------------------------------------------------------------------------------------------


def times(x_BSi: jax.Array, w_oi: jax.Array) -> jax.Array:
    """x w^T in the dtype of both."""
    return jax.lax.dot_general(x_BSi, w_oi, (((x_BSi.ndim - 1,), (1,)), ((), ())))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def times_in(x_BSi: jax.Array, w_oi: jax.Array, dtype: str, gradient_dtype: str) -> jax.Array:
    """x w^T of operands in `dtype`, in the dtype of x; its gradients from operands in `gradient_dtype`."""
    return times(x_BSi.astype(dtype), w_oi.astype(dtype)).astype(x_BSi.dtype)


def _times_in_backward(dtype, gradient_dtype, saved, dy_BSo):
    x_BSi, w_oi = saved
    x, w, dy = (v.astype(gradient_dtype) for v in (x_BSi, w_oi, dy_BSo))
    lead = tuple(range(dy.ndim - 1))
    dw_oi = jax.lax.dot_general(dy, x, ((lead, lead), ((), ())))
    return (dy @ w).astype(x_BSi.dtype), dw_oi.astype(w_oi.dtype)


times_in.defvjp(lambda x, w, *dtypes: (times_in(x, w, *dtypes), (x, w)), _times_in_backward)


def recipe_product(precision: Precision, seed: jax.Array | None) -> Callable:
    """The function (x, w, number) -> x w^T of a recipe. number: of the product among those of a block.

    seed: uint32 [], of this block's random numbers (nvfp4), which differ from product to product; None if there is no
    backward pass.
    """
    how: Any = {"emulate": precision.emulate, "implementation": precision.implementation}
    if precision.recipe == "mxfp8":
        return lambda x, w, number: mxfp8_linear(x, w, **how)
    if precision.recipe == "nvfp4":
        seed = jnp.uint32(0) if seed is None else seed
        return lambda x, w, number: nvfp4_linear(x, w, seed, salt=number, **how)
    if not (precision.matmul_dtype or precision.gradient_dtype):
        return lambda x, w, number: times(x, w)

    def cast(x, w, number):
        dtype = precision.matmul_dtype or str(x.dtype)
        return times_in(x, w, dtype, precision.gradient_dtype or dtype)

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


@functools.partial(save_inputs_only, static_argnums=2)
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last dimension, computed in float32 (Zhang and Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (y * jnp.expand_dims(scale.astype(jnp.float32), tuple(range(x.ndim - 1)))).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than the model was first trained on.

    kind: "none", "linear" (all frequencies divided by `factor`; Chen et al. 2023, Position Interpolation) or "llama3"
    (only wavelengths longer than the original context are; Llama 3.1 model card and transformers' rope utilities).
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


# The sizes of a RopeScaling that each kind uses.
ROPE_USES: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


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
    return freq


def rope_angles(head_dim: int, positions: jax.Array, theta: float, scaling: RopeScaling):
    """(cosines, sines) of position x frequency, float32 `[S, head_dim / 2]`, or `[B, S, head_dim / 2]` if each row has
    its own positions."""
    position = positions.astype(jnp.float32)[..., None]
    angle = position * jnp.expand_dims(rope_frequencies(head_dim, theta, scaling), tuple(range(positions.ndim)))
    return jnp.cos(angle), jnp.sin(angle)


def positions_in_documents(starts_BS: jax.Array) -> jax.Array:
    """The position of each token in its document, int32 `[B, S]`; see `Operations.starts`."""
    return jnp.arange(starts_BS.shape[1], dtype=jnp.int32)[None, :] - starts_BS


@functools.partial(save_inputs_only, static_argnums=(2, 3))
def rope(x_BSHh: jax.Array, positions: jax.Array, theta: float, scaling: RopeScaling) -> jax.Array:
    """Rotate channel pairs (i, i + h/2) by position x frequency, in float32. positions: `[S]` or `[B, S]`."""
    angles = rope_angles(x_BSHh.shape[-1], positions, theta, scaling)
    cos, sin = (x[..., None, :] if x.ndim == 3 else x[None, :, None, :] for x in angles)
    first, second = jnp.split(x_BSHh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BSHh.dtype)


@save_inputs_only
def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up (Shazeer 2020)."""
    return jax.nn.silu(gate) * up


# --- what a block calls -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Operations:
    """The operations of one layer, computed as `compute` and its variant say.

    seed: uint32 [], of the recipe's random numbers (nvfp4). starts: int32 `[B, S]`, for each token the index in its row
    at which its document starts; None: a row is one document. Residuals that follow from starts are made again in the
    backward pass.
    """

    compute: Compute = DEFAULT
    variant: Variant = PLAIN
    seed: jax.Array | None = None
    starts: jax.Array | None = None

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
        return recipe_product(precision, self.seed)

    def linear(self, x: jax.Array, weight: nnx.Param, bias: nnx.Param | None = None) -> jax.Array:
        """x w^T (+ b) in the recipe's numbers."""
        product = functools.partial(self._product, number=weight.get_metadata("product"))
        return linear(x, weight[...], None if bias is None else bias[...], product)

    def linears(self, x: jax.Array, weights: Sequence, biases: Sequence, norm: Callable | None) -> list[jax.Array]:
        """Several `linear` of x, or of norm(x), which the backward pass then computes again."""

        def project(x):
            y = norm(x) if norm else x
            return [self.linear(y, weight, bias) for weight, bias in zip(weights, biases, strict=True)]

        return recomputed(project, norm is not None)(x)

    def norm(self, x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
        """`rms_norm`."""
        if self._by_xla:
            return rms_norm(x, scale, eps)
        y: Any = kernel_rms_norm(x, scale, eps=eps, **self._kernel_options)
        return y

    def add_and_norm(
        self, x: jax.Array, residual: jax.Array, scale: jax.Array, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """(`norm` of the sum, x + residual): one pass of the kernel."""
        if self._by_xla:
            total = x + residual
            return self.norm(total, scale, eps), total
        found: Any = kernel_rms_norm(x, scale, residual, eps=eps, **self._kernel_options)
        return found

    def rotate(
        self, q_BSHh: jax.Array, k_BSKh: jax.Array, positions_S: jax.Array, theta: float, scaling: RopeScaling
    ) -> tuple[jax.Array, jax.Array]:
        """`rope` of queries and keys; positions begin anew with each document of a row."""

        def rotated(q_BSHh, k_BSKh, starts_BS):
            positions = positions_S if starts_BS is None else positions_in_documents(starts_BS)
            if self._by_xla:
                return rope(q_BSHh, positions, theta, scaling), rope(k_BSKh, positions, theta, scaling)
            tables = rope_angles(q_BSHh.shape[-1], positions, theta, scaling)
            return kernel_rope(q_BSHh, k_BSKh, *tables, **self._kernel_options)

        return recomputed(rotated, self.starts is not None)(q_BSHh, k_BSKh, self.starts)

    def gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """silu(gate) * up."""
        return gated(gate, up) if self._by_xla else kernel_swiglu(gate, up, **self._kernel_options)

    def attend(
        self, q_BSHh: jax.Array, k_BSKh: jax.Array, v_BSKh: jax.Array, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        """(causal attention `[B, S, H, h]` within the window, over the cached positions too; the extended cache)."""
        window = self.variant.window
        if cache is None:
            how = self.compute.attention
            return attend(q_BSHh, k_BSKh, v_BSKh, starts=self.starts, window=window, implementation=how), None
        keys = jax.lax.dynamic_update_slice_in_dim(cache.keys, k_BSKh, cache.start, 1)
        values = jax.lax.dynamic_update_slice_in_dim(cache.values, v_BSKh, cache.start, 1)
        y_BSHh = attend(q_BSHh, keys, values, start=cache.start, window=window, implementation="xla")
        return y_BSHh, Cache(keys, values, cache.start)
