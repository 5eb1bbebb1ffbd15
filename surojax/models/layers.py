"""The parts of a decoder block: RMSNorm, rotary embedding, attention with grouped queries, SwiGLU.

Shape suffixes: B batch, S sequence, D hidden size, F intermediate size, H query heads, K key/value heads,
h head dimension, V vocabulary, T cached positions.

Weights are stored [out, in]. That is the layout of published checkpoints, ZeRO shards its leading dimension (sharding
the last one makes XLA keep a transposed copy of the whole stack), and FP8 tensor cores read it without a transpose.
`linear` contracts the last dimensions directly: with `x @ w.T` the transposed weight would be an intermediate value
that reverse mode saves, a copy of every weight when blocks are not recomputed.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.rms_norm import rms_norm as kernel_rms_norm
from pallas_kernels.rope import rope as kernel_rope
from pallas_kernels.swiglu import swiglu as kernel_swiglu
from surojax.models.attention import attend
from surojax.numerics.blockscaled import mxfp8_linear, nvfp4_linear
from surojax.numerics.recipes import Precision
from surojax.placement.param import Kind


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


@dataclasses.dataclass(frozen=True)
class Recompute:
    """What a block's backward pass computes again instead of reading what the forward pass saved.

    norm: the outputs of both RMSNorms. swiglu: silu(gate) * up. ffn: that, and the gate and up projections. att:
    queries, keys, values and the output of attention. Only `ffn` and `att` repeat products with weights.
    """

    norm: bool = False
    swiglu: bool = False
    ffn: bool = False
    att: bool = False


def parameter(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], initializer, kind: Kind = Kind.MATRIX
) -> nnx.Param:
    """A float32 parameter, declared by the logical names of its axes and its kind: layouts follow from these."""
    named = nnx.with_partitioning(initializer, axes, eager_sharding=False)
    return nnx.Param(named(rngs.params(), shape, jnp.float32), kind=kind)


def vector(rngs: nnx.Rngs, size: int, axis: str, initializer) -> nnx.Param:
    """A bias or a norm's scale."""
    return parameter(rngs, (size,), (axis,), initializer, Kind.VECTOR)


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


def products(precision: Precision, seed: jax.Array | None) -> Callable[[str], Callable]:
    """From the name of a block's matrix to the function (x, w) -> x w^T that the recipe computes it with.

    seed: uint32 [], of this block's random numbers (nvfp4), which differ from matrix to matrix; None where there is no
    backward pass.
    """
    how: Any = {"emulate": precision.emulate, "implementation": precision.implementation}
    if precision.recipe == "mxfp8":
        product = functools.partial(mxfp8_linear, **how)
        return lambda name: product
    if precision.recipe == "nvfp4":
        seed = jnp.uint32(0) if seed is None else seed
        salt = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down").index
        return lambda name: functools.partial(nvfp4_linear, seed=seed, salt=salt(name), **how)
    if not (precision.matmul_dtype or precision.gradient_dtype):
        return lambda name: times

    def cast(x, w):
        dtype = precision.matmul_dtype or str(x.dtype)
        return times_in(x, w, dtype, precision.gradient_dtype or dtype)

    return lambda name: cast


def linear(x_BSi: jax.Array, w_oi: jax.Array, b_o: jax.Array | None = None, product: Callable = times) -> jax.Array:
    """x w^T (+ b): `[..., in]`, `[out, in]` -> `[..., out]`, in the dtype of x."""
    y_BSo = product(x_BSi, w_oi)
    return y_BSo if b_o is None else y_BSo + jnp.expand_dims(b_o, tuple(range(x_BSi.ndim - 1)))


# For what is cheap to compute again: only its inputs are saved for the backward pass. Where a whole block is recomputed
# anyway, the compiler sees the same operation twice in one loop body and keeps one (`prevent_cse=False` lets it).
save_inputs_only = functools.partial(jax.checkpoint, prevent_cse=False)


def computed_again(again: bool, f: Callable) -> Callable:
    """f, saving only its inputs where `again`. What of f only its own result needs is not computed twice."""
    return save_inputs_only(f) if again else f


def projections(x_BSD: jax.Array, weights, biases, products, norm: Callable | None) -> tuple[jax.Array, ...]:
    """Several `linear` of x, or of norm(x), which is then computed again in the backward pass instead of saved."""

    def project(x_BSD):
        y_BSD = norm(x_BSD) if norm else x_BSD
        return tuple(linear(y_BSD, *one) for one in zip(weights, biases, products, strict=True))

    return computed_again(norm is not None, project)(x_BSD)


def normed(x: jax.Array, scale: jax.Array, config) -> jax.Array:
    """`rms_norm` as the model's config says: by a fused kernel, or by operations that XLA fuses."""
    if config.precision.kernels == "xla":
        return rms_norm(x, scale, config.rms_norm_eps)
    y: Any = kernel_rms_norm(x, scale, eps=config.rms_norm_eps, implementation=config.precision.implementation)
    return y


def added_and_normed(x: jax.Array, residual: jax.Array, scale: jax.Array, config) -> tuple[jax.Array, jax.Array]:
    """(`normed` of the sum, x + residual): one pass of the kernel."""
    if config.precision.kernels == "xla":
        total = x + residual
        return normed(total, scale, config), total
    how: Any = {"eps": config.rms_norm_eps, "implementation": config.precision.implementation}
    found: Any = kernel_rms_norm(x, scale, residual, **how)
    return found


@functools.partial(save_inputs_only, static_argnums=2)
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last dimension, computed in float32 (Zhang and Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (y * jnp.expand_dims(scale.astype(jnp.float32), tuple(range(x.ndim - 1)))).astype(x.dtype)


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


def rope_angles(head_dim: int, positions_S: jax.Array, theta: float, scaling: RopeScaling):
    """(cosines, sines) of position x frequency, `[S, head_dim / 2]`, float32."""
    angle = positions_S.astype(jnp.float32)[:, None] * rope_frequencies(head_dim, theta, scaling)[None, :]
    return jnp.cos(angle), jnp.sin(angle)


@functools.partial(save_inputs_only, static_argnums=(2, 3))
def rope(x_BSHh: jax.Array, positions_S: jax.Array, theta: float, scaling: RopeScaling) -> jax.Array:
    """Rotate channel pairs (i, i + h/2) by position x frequency, in float32."""
    cos, sin = (x[None, :, None, :] for x in rope_angles(x_BSHh.shape[-1], positions_S, theta, scaling))
    first, second = jnp.split(x_BSHh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BSHh.dtype)


def rotated(q_BSHh: jax.Array, k_BSKh: jax.Array, positions_S: jax.Array, config) -> tuple[jax.Array, jax.Array]:
    """`rope` of queries and keys as the model's config says."""
    theta, scaling = config.rope_theta, config.rope_scaling
    if config.precision.kernels == "xla":
        return rope(q_BSHh, positions_S, theta, scaling), rope(k_BSKh, positions_S, theta, scaling)
    cos_sin = rope_angles(config.head_dim, positions_S, theta, scaling)
    return kernel_rope(q_BSHh, k_BSKh, *cos_sin, implementation=config.precision.implementation)


def gated_up(gate: jax.Array, up: jax.Array, config) -> jax.Array:
    """`gated` as the model's config says."""
    if config.precision.kernels == "xla":
        return gated(gate, up)
    return kernel_swiglu(gate, up, implementation=config.precision.implementation)


@save_inputs_only
def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up."""
    return jax.nn.silu(gate) * up


class Attention(nnx.Module):
    """Causal self-attention with grouped key/value heads, optional QKV bias (Qwen2) and per-head QK-norm (Qwen3)."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        c, D, q, kv = config, config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        normal, h = nnx.initializers.normal(c.initializer_range), c.head_dim
        out = nnx.initializers.normal(c.initializer_range / math.sqrt(2 * c.num_hidden_layers))
        self.config = c
        self.wq = parameter(rngs, (q * h, D), ("heads", "embed"), normal)
        self.wk = parameter(rngs, (kv * h, D), ("kv_heads", "embed"), normal)
        self.wv = parameter(rngs, (kv * h, D), ("kv_heads", "embed"), normal)
        self.wo = parameter(rngs, (D, q * h), ("embed", "heads"), out)
        if c.attention_bias:
            self.bq = vector(rngs, q * h, "heads", nnx.initializers.zeros)
            self.bk = vector(rngs, kv * h, "kv_heads", nnx.initializers.zeros)
            self.bv = vector(rngs, kv * h, "kv_heads", nnx.initializers.zeros)
        if c.qk_norm:
            self.q_norm = vector(rngs, h, "head_dim", nnx.initializers.ones)
            self.k_norm = vector(rngs, h, "head_dim", nnx.initializers.ones)

    def project(self, x_BSD: jax.Array, positions_S: jax.Array, product: Callable, norm: Callable | None = None):
        """Queries `[B, S, H, h]`, keys and values `[B, S, K, h]`; queries and keys normed and rotated."""
        c, (B, S, _) = self.config, x_BSD.shape
        bias = (self.bq[...], self.bk[...], self.bv[...]) if c.attention_bias else (None, None, None)
        weights = (self.wq[...], self.wk[...], self.wv[...])
        products = [product(name) for name in ("wq", "wk", "wv")]
        q, k, v = (y.reshape(B, S, -1, c.head_dim) for y in projections(x_BSD, weights, bias, products, norm))
        if c.qk_norm:
            q, k = normed(q, self.q_norm[...], c), normed(k, self.k_norm[...], c)
        return *rotated(q, k, positions_S, c), v

    def __call__(self, x_BSD: jax.Array, product: Callable, norm: Callable | None = None) -> jax.Array:
        """Attention of x, or of norm(x); see `projections`. product: see `products`."""
        B, S, _ = x_BSD.shape
        q, k, v = self.project(x_BSD, jnp.arange(S), product, norm)
        y_BSHh = attend(q, k, v, implementation=self.config.attention)
        return linear(y_BSHh.reshape(B, S, -1), self.wo[...], None, product("wo"))

    def cached(self, x_BSD: jax.Array, cache: tuple[jax.Array, jax.Array], start: jax.Array):
        """Attention of S new positions, the first at `start`, over keys and values `[B, T, K, h]`, which it extends."""
        B, S, _ = x_BSD.shape
        q, k, v = self.project(x_BSD, start + jnp.arange(S), lambda name: times)
        keys, values = (jax.lax.dynamic_update_slice_in_dim(c, n, start, 1) for c, n in zip(cache, (k, v), strict=True))
        visible_ST = jnp.arange(keys.shape[1])[None, :] <= start + jnp.arange(S)[:, None]
        y_BSHh = attend(q, keys, values, mask=visible_ST[None, None], implementation="xla")
        return linear(y_BSHh.reshape(B, S, -1), self.wo[...]), (keys, values)


class SwiGLU(nnx.Module):
    """(silu(x Wg^T) * x Wu^T) Wd^T (Shazeer 2020)."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        c, D, F = config, config.hidden_size, config.intermediate_size
        normal = nnx.initializers.normal(c.initializer_range)
        out = nnx.initializers.normal(c.initializer_range / math.sqrt(2 * c.num_hidden_layers))
        self.config = c
        self.w_gate = parameter(rngs, (F, D), ("mlp", "embed"), normal)
        self.w_up = parameter(rngs, (F, D), ("mlp", "embed"), normal)
        self.w_down = parameter(rngs, (D, F), ("embed", "mlp"), out)

    def __call__(self, x_BSD: jax.Array, product: Callable, norm: Callable | None = None) -> jax.Array:
        """The MLP of x, or of norm(x); see `projections`. product: see `products`."""
        weights, chosen = (self.w_gate[...], self.w_up[...]), [product("w_gate"), product("w_up")]
        gate_BSF, up_BSF = projections(x_BSD, weights, (None, None), chosen, norm)
        down = lambda gate_BSF, up_BSF: linear(
            gated_up(gate_BSF, up_BSF, self.config), self.w_down[...], None, product("w_down")
        )
        return computed_again(self.config.recompute.swiglu, down)(gate_BSF, up_BSF)
