"""The layers of a decoder block as Flax modules: attention with grouped queries, and SwiGLU.

A module holds sizes and weights, and says once what is computed with them; an `Operations` says how.

Shape suffixes: B batch, S sequence, D hidden size, F intermediate size, H query heads, K key/value heads,
h head dimension.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from surojax.models.model import ROUTES, Cache, Earlier, Routing
from surojax.models.operations import Operations, Projection
from surojax.models.recompute import recomputed
from surojax.placement.param import Kind


def parameter(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    initializer,
    kind: Kind = Kind.MATRIX,
    product: int | None = None,
    **declared: Any,
) -> nnx.Param:
    """Makes a float32 parameter that declares its logical axes, its kind, and the matrix product that reads it.

    product: the number of its matrix product in the block, from which that product's random numbers follow (nvfp4).
    declared: other fields of its `Param`, which `model.collect_params` makes. Everything else follows from axes and
    kind.
    """
    named = nnx.with_partitioning(initializer, axes, eager_sharding=False)
    return nnx.Param(named(rngs.params(), shape, jnp.float32), kind=kind, product=product, declared=declared)


def vector(rngs: nnx.Rngs, size: int, axis: str, initializer) -> nnx.Param:
    """Makes the parameter `[size]` of a bias or a norm."""
    return parameter(rngs, (size,), (axis,), initializer, Kind.VECTOR)


def norm_weight(rngs: nnx.Rngs, config, size: int, axis: str) -> nnx.Param:
    """Makes the weight `[size]` of an RMSNorm whose initial scale is 1."""
    initial = nnx.initializers.zeros if config.norm_plus_one else nnx.initializers.ones
    return vector(rngs, size, axis, initial)


ADAPTER = "_lora"  # appended to the name of a matrix: the name of its adapter (lora.py) in the same module


def projection(module: nnx.Module, weight: str, bias: str = "") -> Projection:
    """Collects a module's matrix, bias and adapter as a `Projection`; None for a bias or adapter that is missing."""
    adapter = getattr(module, weight + ADAPTER, None)
    return Projection(getattr(module, weight), getattr(module, bias, None), adapter)


class Attention(nnx.Module):
    """Causal self-attention with grouped key/value heads; optional: biases, norms of queries and keys, sinks."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        c = config
        D = c.hidden_size
        q = c.num_attention_heads * c.head_dim
        kv = c.num_key_value_heads * c.head_dim
        normal = nnx.initializers.normal(c.initializer_range)
        out = nnx.initializers.normal(c.initializer_range / math.sqrt(2 * c.num_hidden_layers))
        self.config = c
        self.wq = parameter(rngs, (q, D), ("heads", "embed"), normal, product=0)
        self.wk = parameter(rngs, (kv, D), ("kv_heads", "embed"), normal, product=1)
        self.wv = parameter(rngs, (kv, D), ("kv_heads", "embed"), normal, product=2)
        self.wo = parameter(rngs, (D, q), ("embed", "heads"), out, product=3)
        if c.attention_bias:
            self.bq = vector(rngs, q, "heads", nnx.initializers.zeros)
            self.bk = vector(rngs, kv, "kv_heads", nnx.initializers.zeros)
            self.bv = vector(rngs, kv, "kv_heads", nnx.initializers.zeros)
        if c.attention_out_bias:
            self.bo = vector(rngs, D, "embed", nnx.initializers.zeros)
        if c.attention_sinks:
            self.sinks = vector(rngs, c.num_attention_heads, "heads", normal)
        if c.qk_norm_whole:
            self.q_norm = norm_weight(rngs, c, q, "heads")
            self.k_norm = norm_weight(rngs, c, kv, "kv_heads")
        if c.qk_norm:
            self.q_norm = norm_weight(rngs, c, c.head_dim, "head_dim")
            self.k_norm = norm_weight(rngs, c, c.head_dim, "head_dim")

    def heads(
        self, x_BSD: jax.Array, ops: Operations, norm: Callable | None, first: jax.Array | int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Computes queries, keys and values `[B, S, heads, h]` of x or norm(x).

        first: index of the first token in its row.
        """
        c = self.config
        projections = [projection(self, f"w{name}", f"b{name}") for name in "qkv"]
        projected = ops.linears(x_BSD, projections, norm)
        if c.qk_norm_whole:
            q, k, v = projected
            projected = (
                ops.norm_of_all_heads(q, self.q_norm[...], "heads", c.rms_norm_eps),
                ops.norm_of_all_heads(k, self.k_norm[...], "kv_heads", c.rms_norm_eps),
                v,
            )
        B, S, _ = projected[0].shape
        q, k, v = (y.reshape(B, S, -1, c.head_dim) for y in projected)
        if c.qk_norm:
            q = ops.norm(q, self.q_norm[...], c.rms_norm_eps, c.norm_plus_one)
            k = ops.norm(k, self.k_norm[...], c.rms_norm_eps, c.norm_plus_one)
        return *ops.rotate(q, k, first, *c.rotary(ops.variant)), v

    def __call__(
        self, x_BSD: jax.Array, ops: Operations, norm: Callable | None = None, cache: Cache | Earlier | None = None
    ) -> tuple[jax.Array, Cache | Earlier | None]:
        """Returns (attention of x `[B, S, D]` or norm(x), which is recomputed; `new` of `Operations.attend`)."""
        c = self.config
        q, k, v = self.heads(x_BSD, ops, norm, 0 if cache is None else cache.start)
        scale = c.query_pre_attn_scalar**-0.5 if c.query_pre_attn_scalar else None
        sinks = self.sinks[...] if c.attention_sinks else None
        y_BSHh, cache = ops.attend(q, k, v, cache, scale=scale, softcap=c.attn_logit_softcapping, sinks=sinks)
        return ops.linear(y_BSHh.reshape(*y_BSHh.shape[:2], -1), projection(self, "wo", "bo")), cache


class SwiGLU(nnx.Module):
    """(silu(x Wg^T) * x Wu^T) Wd^T (Shazeer 2020), or with another activation in place of silu."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        c = config
        D = c.hidden_size
        F = c.intermediate_size
        normal = nnx.initializers.normal(c.initializer_range)
        out = nnx.initializers.normal(c.initializer_range / math.sqrt(2 * c.num_hidden_layers))
        self.activation = c.hidden_act
        self.w_gate = parameter(rngs, (F, D), ("mlp", "embed"), normal, product=4)
        self.w_up = parameter(rngs, (F, D), ("mlp", "embed"), normal, product=5)
        self.w_down = parameter(rngs, (D, F), ("embed", "mlp"), out, product=6)

    def __call__(
        self, x_BSD: jax.Array, ops: Operations, norm: Callable | None = None, routing: Routing = ROUTES
    ) -> tuple[jax.Array, None]:
        """Returns (the MLP of x `[B, S, D]` or norm(x), which is recomputed; None in place of a router's `Routed`)."""
        gate_BSF, up_BSF = ops.linears(x_BSD, [projection(self, name) for name in ("w_gate", "w_up")], norm)

        def down(gate_BSF, up_BSF):
            hidden_BSF = ops.gated(gate_BSF, up_BSF, self.activation, self.w_down.get_metadata("product"))
            return ops.linear(hidden_BSF, projection(self, "w_down"))

        return recomputed(down, ops.compute.recompute.swiglu)(gate_BSF, up_BSF), None
