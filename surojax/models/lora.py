"""Low-rank adapters of a block's matrices: LoRA (Hu et al. 2021, arXiv:2106.09685).

    y = x w^T + scale (x a^T) b^T        a [rank, in], b [out, rank], scale = alpha / rank

The matrix w is frozen; a and b are trained. b begins as zeros, so that training begins with the base model. Variants:
rsLoRA (Kalajdzievski 2023, arXiv:2312.03732) has scale alpha / sqrt(rank). DoRA (Liu et al. 2024, arXiv:2402.09353)
also trains the length of each row of the sum w + scale b a, `magnitude` [out]; the rows' own length, by which it
divides, counts as a constant in the backward pass, as in PEFT. LoRA+ (Hayou et al. 2024, arXiv:2402.12354) gives b a
larger learning rate.

The adapter of a matrix `module.name` is the branch `module.name_lora` of the block's tree of parameters: the adapter of
"attention.wq" has the parameters "attention.wq_lora.a", "attention.wq_lora.b" and, with DoRA,
"attention.wq_lora.magnitude". `adapters` lists them.

Placement follows from the axes. If a tensor-parallel group divides the outputs of w, it divides those of b, and every
device has a. If it divides the inputs, it divides those of a, every device has b, and what each adds is a term of the
same sum over the group as its term of x w^T.

The matrices of experts [experts, out, in] have an adapter for each expert: a [experts, rank, in], b [experts, out,
rank]. Only the rows of an expert are multiplied with its own (experts.py).

In settings a matrix is named as in PEFT, by the end of its module's name ("q_proj", "shared_experts.up_proj"), and
everywhere else as in this project ("attention.wq", "mlp.shared.w_up").
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.quantize import random_bits
from surojax.declared import AT_LEAST_1, BELOW_1, FLOATS, POSITIVE, Facts, at_most, computed, declare
from surojax.models.kinds.targets import names_in_layers
from surojax.models.layers import ADAPTER, parameter
from surojax.models.recompute import save_inputs_only
from surojax.parallel.collectives import add_up, device_number
from surojax.parallel.tensor import is_divided
from surojax.placement.layout import MESH_AXES
from surojax.placement.mesh import TENSOR
from surojax.placement.param import Kind, Param

# Names of outer layers in PEFT's modules_to_save, and here.
SAVED = {"embed_tokens": "embed", "lm_head": "head", "score": "score"}


@dataclasses.dataclass(frozen=True)
class Lora:
    """Settings of a model's LoRA or DoRA adapters.

    targets: names of the matrices that have one, see kinds/targets.py. saved: names of the outer parameters that are
    trained whole.
    """

    # columns and rows of an adapter's factors
    rank: int = declare(16, AT_LEAST_1, at_most(2**16), facts=Facts.COST_AND_IDENTITY, name="lora_rank")
    # an adapter's product is multiplied by this / lora_rank
    alpha: float = declare(32.0, POSITIVE, facts=Facts.IDENTITY, name="lora_alpha")
    targets: tuple[str, ...] = computed(())
    saved: tuple[str, ...] = computed(())
    # probability that training leaves a number out of an adapter's input
    dropout: float = declare(0.0, BELOW_1, facts=Facts.COST, name="lora_dropout")
    # adapters' work weights and products: bfloat16 or float32; "" = model_dtype
    dtype: str = declare("", choices=("", *FLOATS), facts=Facts.COST_AND_NUMBERS, name="lora_dtype")
    # an adapter's product is multiplied by lora_alpha / sqrt(lora_rank)
    rank_stabilised: bool = declare(False, facts=Facts.IDENTITY, name="use_rslora")
    # train also the length of each row of an adapted matrix
    magnitudes: bool = declare(False, facts=Facts.COST_AND_IDENTITY, name="use_dora")
    # learning rate of the factors b, which begin as zeros, over that of the others
    learning_rate_ratio: float = declare(1.0, POSITIVE, facts=Facts.NOTHING, name="lora_plus_ratio")

    def of_layers(self, *, with_experts: bool) -> "Lora":
        """Returns the settings for layers with experts, or for those without, in a model that has both."""
        return dataclasses.replace(self, targets=names_in_layers(self.targets, with_experts=with_experts))

    @property
    def scale(self) -> float:
        """The factor of an adapter's product with a and b."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


def saved_names(modules: str, *, num_labels: int) -> tuple[str, ...]:
    """Translates PEFT's modules_to_save to our outer layers, plus a reward model's head.

    Raises KeyError for another.
    """
    named = [SAVED[name.strip()] for name in modules.split(",") if modules]
    return tuple(dict.fromkeys([*named, *(["score"] if num_labels else [])]))


class Adapter(nnx.Module):
    """The adapter of one matrix; of experts' matrices a and b are stacked `[E, ...]`."""

    def __init__(self, lora: Lora, weight: nnx.Param, *, rngs: nnx.Rngs):
        *experts, out_features, in_features = weight[...].shape
        *expert_axes, out_axis, in_axis = weight.get_metadata("out_sharding")
        assert not (experts and lora.magnitudes), "config/adapters.py refuses it"
        # PEFT's kaiming_uniform_(a=sqrt(5)) is uniform between +-1 / sqrt(in).
        bound = 1 / math.sqrt(in_features)
        declared: Any = {"kind": Kind.FACTOR, "adapter": True, "dtype": lora.dtype}
        declared |= {name: value for name, value in weight.get_metadata("declared").items() if name == "used"}

        def uniform(key, shape, dtype):
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        self.lora = lora
        shape = (*experts, lora.rank, in_features)
        self.a = parameter(rngs, shape, (*expert_axes, "rank", in_axis), uniform, **declared)
        zeros = nnx.initializers.zeros
        ratio = lora.learning_rate_ratio
        shape = (*experts, out_features, lora.rank)
        self.b = parameter(rngs, shape, (*expert_axes, out_axis, "rank"), zeros, learning_rate_factor=ratio, **declared)
        if lora.magnitudes:
            # Steps are smaller than the distance of bfloat16 numbers, and the lengths it is divided by are float32.
            declared |= {"kind": Kind.VECTOR, "dtype": "float32"}
            self.magnitude = parameter(rngs, (out_features,), (out_axis,), zeros, **declared)
            self.magnitude.set_value(row_lengths(weight[...]))

    def __call__(
        self,
        x: jax.Array,
        w_oi: jax.Array,
        y: jax.Array,
        in_axis: str,
        seed: jax.Array | None,
        gathered: Callable | None = None,
    ) -> jax.Array:
        """Returns the product of x with the adapted matrix, given y = x w^T.

        in_axis: the logical axis of w's inputs. seed: uint32 [], of this product's dropout; None: nothing is dropped.
        gathered: from x a^T to what y is of, if a tensor-parallel group gathers or scatters the sequences within y.
        """
        a_ri = self.a[...]
        b_or = self.b[...]
        if seed is not None and self.lora.dropout:
            part, _ = device_number(*(TENSOR if gathered else MESH_AXES[in_axis]))
            x = dropped(x, random_bits(seed, jnp.uint32(part)), self.lora.dropout)
        low = low_rank(x, a_ri, b_or, self.lora.scale, gathered).astype(y.dtype)
        if not self.lora.magnitudes:
            return y + low
        length_o = self._row_lengths(jax.lax.stop_gradient(w_oi), in_axis)
        # Padding of uneven stages has rows of zeros, and magnitudes of 0.
        factor_o = self.magnitude[...] / jnp.maximum(length_o, jnp.finfo(jnp.float32).tiny)
        factor = jnp.expand_dims(factor_o, tuple(range(y.ndim - 1)))
        return (factor * (y + low)).astype(y.dtype)

    def _row_lengths(self, w_oi: jax.Array, in_axis: str) -> jax.Array:
        """Computes the lengths `[out]` of the rows of w + scale b a, float32, without the product b a; no gradient."""
        w, a, b = (jax.lax.stop_gradient(m).astype(jnp.float32) for m in (w_oi, self.a[...], self.b[...]))
        b = self.lora.scale * b
        squares_o = jnp.sum(w * w, axis=1) + jnp.sum((2 * _times(w, a) + _times(b, _times(a, a))) * b, axis=1)
        return jnp.sqrt(add_up(squares_o, *TENSOR) if is_divided(in_axis) else squares_o)


@functools.partial(save_inputs_only, static_argnums=2)
def dropped(x: jax.Array, seed: jax.Array, probability: float) -> jax.Array:
    """Applies dropout to x, and divides the other numbers by 1 - probability (Srivastava et al. 2014).

    The random numbers follow from the seed and the position in x, so that the backward pass makes them again.
    """
    index = jax.lax.iota(jnp.uint32, x.size).reshape(x.shape)
    kept = random_bits(seed, index) >= jnp.uint32(round(probability * 2**32))
    return jnp.where(kept, x * jnp.asarray(1 / (1 - probability), x.dtype), jnp.zeros_like(x))


def low_rank(
    x: jax.Array, a_ri: jax.Array, b_or: jax.Array, scale: float, gathered: Callable | None = None
) -> jax.Array:
    """Returns scale (x a^T) b^T in the dtype of a and b. gathered: function applied to x a^T, see `Adapter`."""
    low = _times(x.astype(a_ri.dtype), a_ri)
    return scale * _times(gathered(low) if gathered else low, b_or)


def _times(x: jax.Array, w_oi: jax.Array) -> jax.Array:
    """x w^T."""
    return jax.lax.dot_general(x, w_oi, (((x.ndim - 1,), (1,)), ((), ())))


def row_lengths(w: jax.Array) -> jax.Array:
    """Computes the lengths of a matrix' rows in float32: DoRA's initial magnitudes."""
    return jnp.sqrt(jnp.sum(jnp.square(w.astype(jnp.float32)), axis=-1))


def add_adapters(block: nnx.Module, lora: Lora | None, *, rngs: nnx.Rngs) -> None:
    """Adds adapters to a block's modules. They are drawn last, so the block's other random values do not change."""
    if lora is None:
        return
    for target in lora.targets:
        *path, name = target.split(".")
        if not hasattr(block, path[0]):  # of layers with another mixer
            continue
        module: Any = block
        for step in path:
            module = getattr(module, step)
        if not hasattr(module, name):  # of layers whose mixer has fewer matrices
            continue
        setattr(module, name + ADAPTER, Adapter(lora, getattr(module, name), rngs=rngs))


def frozen(params: dict, lora: Lora | None) -> dict:
    """Marks the `Param`s of a section as trainable only if they are adapters or saved layers."""
    if lora is None:
        return params

    def mark(param: Param) -> Param:
        return dataclasses.replace(param, trainable=param.adapter or param.name in lora.saved)

    return jax.tree.map(mark, params)


class Names(NamedTuple):
    """Names of an adapter's parameters; magnitude: None without DoRA."""

    a: str
    b: str
    magnitude: str | None


def adapters(params: dict, prefix: str = "") -> list[tuple[str, Names]]:
    """Lists (name of a matrix, names of its adapter's parameters) for each adapter in a segment's `Param`s."""
    named = []
    for name, branch in params.items():
        if not isinstance(branch, dict):
            continue
        path = f"{prefix}{name}"
        if name.endswith(ADAPTER):
            magnitude = f"{path}.magnitude" if "magnitude" in branch else None
            named.append((path.removesuffix(ADAPTER), Names(f"{path}.a", f"{path}.b", magnitude)))
        else:
            named += adapters(branch, f"{path}.")
    return named


def without_adapters(weights: dict) -> dict:
    """Removes the adapters from a layer's weights, for a model without adapters."""
    return {
        name: without_adapters(branch) if isinstance(branch, dict) else branch
        for name, branch in weights.items()
        if not name.endswith(ADAPTER)
    }


def with_adapters(base: dict, new: dict, numbers: dict) -> dict:
    """Adds new adapters to the arrays of a base model's layer.

    new: the adapters' branches, see `adapters`. numbers: the base's, as products read them.
    """
    arrays = dict(base)
    for name, branch in new.items():
        if not name.endswith(ADAPTER):
            arrays[name] = with_adapters(base[name], branch, numbers[name])
            continue
        arrays[name] = branch
        if "magnitude" in branch:
            arrays[name] = branch | {"magnitude": row_lengths(numbers[name.removesuffix(ADAPTER)])}
    return arrays
