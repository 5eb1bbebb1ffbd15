"""The operations that a block is written in: linear layers, RMSNorm, rotary embedding, SwiGLU, attention.

`Operations` is what a block's mathematics calls. Training, sampling and the reference compute the same block with
different `Operations`: in another recipe, by XLA or by fused kernels, with parts that are recomputed.

Shape suffixes: B batch, S sequence, D hidden size, F intermediate size, H query heads, K key/value heads,
h head dimension, T cached positions.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import dispatch
from pallas_kernels.manual_axes import varying_axes
from pallas_kernels.quantize import random_bits
from pallas_kernels.rms_norm import rms_norm as kernel_rms_norm
from pallas_kernels.rope import rope as kernel_rope
from surojax.models import grouped, linear_fp8
from surojax.models.attention import attend, attend_in_context
from surojax.models.linear import Product, linear, recipe_product, times
from surojax.models.linear_fp8 import InFloat8
from surojax.models.model import DEFAULT, PLAIN, Cache, Compute, Earlier, Variant
from surojax.models.recompute import recomputed, save_inputs_only
from surojax.models.rotary import RopeScaling, positions_of, rope, rope_angles, scale_by_position
from surojax.parallel import context
from surojax.parallel.collectives import active
from surojax.parallel.operands import summed_before_rounding
from surojax.parallel.tensor import all_gather_sequence, is_divided, reduce_scatter_sequence
from surojax.placement.layout import MESH_AXES
from surojax.placement.param import Kind


@functools.partial(save_inputs_only, static_argnums=(2, 3))
def rms_norm(x: jax.Array, weight: jax.Array, eps: float, plus_one: bool = False) -> jax.Array:
    """x / rms(x) * scale over the last dimension, computed in float32 (Zhang and Sennrich 2019).

    The scale is the weight, or 1 + weight.
    """
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (y * jnp.expand_dims(norm_scale(weight, plus_one), tuple(range(x.ndim - 1)))).astype(x.dtype)


def norm_scale(weight: jax.Array, plus_one: bool) -> jax.Array:
    """The scale of `rms_norm`."""
    return 1 + weight.astype(jnp.float32) if plus_one else weight


def normalised(x: jax.Array, eps: float) -> jax.Array:
    """Computes `rms_norm` without weights."""
    return rms_norm(x, jnp.ones(x.shape[-1], x.dtype), eps, False)


@functools.partial(save_inputs_only, static_argnums=(2, 3))
def norm_of_parts(x: jax.Array, weight: jax.Array, eps: float, axes: tuple[str, ...]) -> jax.Array:
    """Computes `rms_norm` over a dimension sharded over these mesh axes; x and weight are this device's shards."""
    x32 = x.astype(jnp.float32)
    square = jax.lax.pmean(jnp.mean(x32 * x32, axis=-1, keepdims=True), axes)
    scale = jnp.expand_dims(weight, tuple(range(x.ndim - 1)))
    return (x32 * jax.lax.rsqrt(square + eps) * scale).astype(x.dtype)


def clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns (up + 1) gate sigmoid(1.702 gate), with gate clamped to at most 7 and up to -7 .. 7 (gpt-oss)."""
    gate = jnp.minimum(gate, 7.0)
    return (jnp.clip(up, -7.0, 7.0) + 1) * gate * jax.nn.sigmoid(1.702 * gate)


# Functions of gate and up, by the name of the gate's activation.
ACTIVATIONS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu_pytorch_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "clamped_swiglu": clamped_swiglu,
}


RELU2 = "relu2"  # the activation of MLPs without a gate


@save_inputs_only
def squared_relu(x: jax.Array) -> jax.Array:
    """Returns the squares of the numbers that are positive, and 0 for the others."""
    return jnp.square(jax.nn.relu(x))


@functools.partial(save_inputs_only, static_argnums=2)
def gated(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
    """Returns activation(gate) * up (Shazeer 2020), or another row of `ACTIVATIONS`.

    XLA computes it whatever `kernels` says: if it is recomputed, one fusion writes it and both gradients, where two
    kernels would read gate and up twice.
    """
    return ACTIVATIONS[activation](gate, up)


@functools.partial(save_inputs_only, static_argnums=1)
def softcapped(x: jax.Array, cap: float) -> jax.Array:
    """Returns cap tanh(x / cap), computed in float32: x smoothly limited to -cap .. cap."""
    return (cap * jnp.tanh(x.astype(jnp.float32) / cap)).astype(x.dtype)


class Projection(NamedTuple):
    """A matrix, its bias, and its adapter (lora.py)."""

    weight: nnx.Param
    bias: nnx.Param | None = None
    adapter: Callable | None = None


def is_rounded(projection: Projection) -> bool:
    """True if the recipe's numbers are those of its product."""
    return projection.weight.get_metadata("kind") is Kind.MATRIX


@dataclasses.dataclass(frozen=True)
class Operations:
    """The operations of one layer, implemented according to `compute` and the layer's variant.

    seed: uint32 [], of the random numbers of the recipe (nvfp4) or of the adapters (dropout). starts: int32 `[B, S]`,
    for each token of whole rows the index in its row at which its document starts; None: a row is one document.
    Residuals that follow from starts are made again in the backward pass. frozen: the matrices have no gradient.
    in_float8: None: products are not in float8 with one scale per tensor. beside: what layers hand on beside the
    residual stream, by name (channels.py).
    """

    compute: Compute = DEFAULT
    variant: Variant = PLAIN
    seed: jax.Array | None = None
    starts: jax.Array | None = None
    frozen: bool = False
    in_float8: InFloat8 | None = None
    beside: Mapping[str, jax.Array] = MappingProxyType({})

    @property
    def _by_xla(self) -> bool:
        # Between products in float8 are the functions of pallas_kernels, by XLA or by Mosaic.
        return self.compute.precision.kernels == "xla" and self.in_float8 is None

    @property
    def kernel_options(self) -> Any:
        """The keyword arguments that all functions of pallas_kernels take."""
        return {"implementation": self.compute.precision.implementation}

    def groups_products(self, w_Eoi: jax.Array, *, adapted: bool) -> bool:
        """True if one kernel call multiplies all experts' rows with these matrices, or with their transposes."""
        precision = self.compute.precision
        kind = precision, self.variant.recipe_enabled, w_Eoi.dtype, w_Eoi.shape
        served = not grouped.why_by_loop(*kind, adapted=adapted)
        return served and dispatch.choose("grouped_matmul", precision.implementation) == "mosaic"

    def _product(self, *operands, of_one_expert: bool = False, **product) -> jax.Array:
        precision = self.compute.precision
        if not self.variant.recipe_enabled:
            precision = dataclasses.replace(precision, recipe="bf16")
        return recipe_product(precision, self.seed, self.frozen, of_one_expert=of_one_expert)(*operands, **product)

    def _seed_of(self, number: jax.Array | int) -> jax.Array | None:
        """The seed of a product's random numbers; None if there are none."""
        return None if self.seed is None else random_bits(self.seed, jnp.uint32(number))

    def product(self, x: jax.Array, w_oi: jax.Array, weight: nnx.Param) -> jax.Array:
        """Returns x w^T in the recipe's number formats. w: one expert's matrix in the parameter `weight`."""
        if self.in_float8 is not None:
            return linear_fp8.product_with_expert(x, w_oi, frozen=self.frozen, **self.kernel_options)
        axes = weight.get_metadata("out_sharding")[-2:]
        return self._product(x, w_oi, number=weight.get_metadata("product").number, axes=axes, of_one_expert=True)

    def of_block(self, number: jax.Array) -> "Operations":
        """Returns these operations with random numbers of their own for block `number` of the experts' rows."""
        return self if self.seed is None else dataclasses.replace(self, seed=self._seed_of(number))

    def linear(self, x: jax.Array, projection: Projection, *, gathers: bool = True) -> jax.Array:
        """Returns x w^T (+ b) in the recipe's number formats, plus the adapter's product.

        If a tensor-parallel group divides the inputs, the result is reduce-scattered over the sequence. gathers: False
        if it divides the outputs, and x are whole sequences.
        """
        if self.in_float8 is not None and is_rounded(projection):
            return self._products_in_float8(self.in_float8, x, [projection], gathers=gathers)[0]
        weight, bias, adapter = projection
        number = weight.get_metadata("product").number
        axes = weight.get_metadata("out_sharding")
        *_, inputs = axes

        def product(x, w):
            y = self._product(x, w, number=number, axes=axes) if is_rounded(projection) else times(x, w)
            y = y if adapter is None else adapter(x, w, y, inputs, self._seed_of(number))
            return reduce_scatter_sequence(y) if is_divided(inputs) else y

        return linear(x, weight[...], None if bias is None else bias[...], product)

    def linears(self, x: jax.Array, projections: Sequence[Projection], norm: Callable | None) -> list[jax.Array]:
        """Multiplies x, or norm(x), with several projections; the backward pass recomputes norm(x).

        In a tensor-parallel group x is this device's part of the sequence, and the results are of the whole sequence.
        """

        def project(x):
            y = norm(x) if norm else x
            if self.in_float8 is None:
                y = all_gather_sequence(y)
                return [self.linear(y, projection) for projection in projections]
            rounded = [projection for projection in projections if is_rounded(projection)]
            in_float8 = iter(self._products_in_float8(self.in_float8, y, rounded))
            if len(rounded) < len(projections):
                y = all_gather_sequence(linear_fp8.whole_input(y))
            return [next(in_float8) if is_rounded(one) else self.linear(y, one) for one in projections]

        return recomputed(project, norm is not None)(x)

    def _products_in_float8(
        self, in_float8: InFloat8, x, projections: Sequence[Projection], *, gathers: bool = True
    ) -> list[jax.Array]:
        """Computes `linear` for several projections of x that are sharded alike.

        x: this device's part, or its `Operand`. gathers: see `linear`.
        """
        declared = [projection.weight.get_metadata("product") for projection in projections]
        weight_axes = [projection.weight.get_metadata("out_sharding") for projection in projections]
        *_, inputs = weight_axes[0]
        whole_x = linear_fp8.whole_input(x)
        how = linear_fp8.ProductOptions(
            by_rows=is_divided(inputs),
            frozen=self.frozen,
            implementation=self.compute.precision.implementation,
            axes=varying_axes(whole_x),
            parted=gathers,
        )
        results = linear_fp8.products(
            how,
            x,
            [in_float8.matrices[product] for product in declared],
            [projection.weight[...] for projection in projections],
            in_float8.known(declared),
        )
        gathered = reduce_scatter_sequence if is_divided(inputs) else all_gather_sequence if gathers else None

        def whole(y, projection: Projection, axes, product: Product):
            y = summed_before_rounding(y, axes)
            if projection.adapter is not None:
                adapter_inputs = inputs, self._seed_of(product.number), gathered
                y = projection.adapter(whole_x, projection.weight[...], y, *adapter_inputs)
            return y if projection.bias is None else y + projection.bias[...][None, None, :]

        return [whole(*row) for row in zip(results, projections, weight_axes, declared, strict=True)]

    def norm(self, x: jax.Array, weight: jax.Array, eps: float, plus_one: bool = False) -> jax.Array:
        """Computes `rms_norm` by XLA or by the kernel."""
        if self._by_xla:
            return rms_norm(x, weight, eps, plus_one)
        y: Any = kernel_rms_norm(x, norm_scale(weight, plus_one), eps=eps, **self.kernel_options)
        return y

    def gated(self, gate: jax.Array, up: jax.Array, activation: str, site: str) -> Any:
        """Computes `gated` as the input of products. site: the name of this input, see `linear.Product`."""
        if self.in_float8 is None or activation != "silu":
            return gated(gate, up, activation)
        return linear_fp8.gated(gate, up, self.in_float8.scale_of(site), **self.kernel_options)

    def norm_of_all_heads(self, x: jax.Array, weight: jax.Array, axis: str, eps: float) -> jax.Array:
        """Computes RMSNorm over a last dimension that a tensor-parallel group may shard.

        axis: the logical axis of that dimension.
        """
        axes = active(*MESH_AXES[axis])
        if not axes:
            return self.norm(x, weight, eps)
        return norm_of_parts(x, weight, eps, axes)

    def add_and_norm(
        self, x: jax.Array, residual: jax.Array | None, weight: jax.Array, eps: float, plus_one: bool, site: str
    ) -> tuple[Any, jax.Array]:
        """Returns (`norm` of x + residual as the input of products, x + residual), in one pass of the kernel.

        residual: None: 0. site: the name of this input, see `linear.Product`.
        """
        scale = norm_scale(weight, plus_one)
        if self.in_float8 is not None:
            known = self.in_float8.scale_of(site)
            return linear_fp8.normed(x, scale, residual, known, eps=eps, **self.kernel_options)
        if self._by_xla or residual is None:
            total = x if residual is None else x + residual
            return self.norm(total, weight, eps, plus_one), total
        normed_and_sum: Any = kernel_rms_norm(x, scale, residual, eps=eps, **self.kernel_options)
        return normed_and_sum

    def rotate(
        self, q_BSHh: jax.Array, k_BSKh: jax.Array, first: jax.Array | int, theta: float, scaling: RopeScaling
    ) -> tuple[jax.Array, jax.Array]:
        """Applies `rope` to the channels of queries and keys that rotate, and scales queries by their position.

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

    def grown(self, q_BSHh: jax.Array, first: jax.Array | int, scaling: RopeScaling) -> jax.Array:
        """Scales queries by their position, as `rotate` does, if the rotary embedding asks for it."""
        if not scaling.llama_4_scaling_beta:
            return q_BSHh
        positions = positions_of(q_BSHh.shape[1], self.starts, first, self.compute.cp_method)
        return scale_by_position(q_BSHh, positions, scaling)

    def _turned(self, q, k, positions: jax.Array, theta: float, scaling: RopeScaling) -> tuple[jax.Array, jax.Array]:
        """Applies `rope` to all channels of queries and keys, by XLA or by the kernel."""
        if self._by_xla:
            return rope(q, positions, theta, scaling), rope(k, positions, theta, scaling)
        return kernel_rope(q, k, *rope_angles(q.shape[-1], positions, theta, scaling), **self.kernel_options)

    def of_whole_chunk(self, *xs_BSHh: jax.Array) -> Sequence[jax.Array]:
        """Exchanges all heads of this device's part of a chunk for its own heads of the whole chunk (all-to-all)."""
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
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | Earlier | None]:
        """Returns (causal attention `[B, S, H, h]` within the window, over cached or earlier positions too; `new`).

        new: with a Cache the extended one; with an Earlier this chunk's own keys and values; else None.
        scale, softcap, sinks: of the scores, see `attention.attend`.
        """
        scores: Any = {"scale": scale, "softcap": softcap, "sinks": sinks}
        window = self.variant.window
        how = self.compute.attention
        starts = self.starts
        if isinstance(cache, Earlier):
            q_BSHh, k_BSKh, v_BSKh = self.of_whole_chunk(q_BSHh, k_BSKh, v_BSKh)
            if sinks is not None and context.is_divided():
                scores["sinks"] = context.own_heads(sinks)
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
        keys, values = cache.state
        keys = jax.lax.dynamic_update_slice_in_dim(keys, k_BSKh, cache.start, 1)
        values = jax.lax.dynamic_update_slice_in_dim(values, v_BSKh, cache.start, 1)
        places: Any = {"start": cache.start, "starts": self.starts, "window": window}
        y_BSHh = attend(q_BSHh, keys, values, implementation="xla", **places, **scores)
        return y_BSHh, cache._replace(state=(keys, values))
