"""The optimizer: an update rule for each kind of tensor, applied tensor by tensor to shards.

A tensor's update reads that tensor's gradient only. Values shared by all tensors (learning rate, clip factor, bias
corrections) are computed once per step (`scalars`) and passed to the rules. An elementwise rule (`by_optax`) needs no
communication: a shard gets the update that it would get within the full matrix. NorMuon (normuon.py) needs the full
matrix, each on one of the devices that share it. optimizers.py lists all optimizers, a file each.

The state of every rule starts as zeros. It has a layer axis if the tensor has one. All rules round bfloat16 master
weights stochastically: nearly all updates are smaller than half the distance to the neighbouring number, and would be
lost if rounded to nearest.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pallas_kernels.quantize import random_bits, round_with
from surojax.declared import FLOATS, Facts, declare
from surojax.numerics.rounding import materialised
from surojax.parallel.collectives import device_number
from surojax.placement.layout import Layout
from surojax.placement.param import Kind, Param
from surojax.sizes import largest_divisor

Scalars = dict[str, jax.Array]  # values shared by all updates of one step: see `adam_scalars`


@dataclasses.dataclass(frozen=True)
class MomentSettings:
    """The dtypes of moments, for the optimizers that read them."""

    # first moments (adamw8bit: only those of vectors) and the momentum of normuon
    opt_m_dtype: str = declare("float32", choices=FLOATS, facts=Facts.COST)
    # second moments (adamw8bit: only those of vectors; normuon: only those of adamw)
    opt_v_dtype: str = declare("float32", choices=FLOATS, facts=Facts.COST)


@dataclasses.dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer as a config chooses it: a row of `optimizers.OPTIMIZERS`.

    make: (schedule of the learning rate, **arguments) -> Optimizer.
    arguments: the arguments and the settings that they are: fields of the config, or "implementation" (of kernels).
    Fields of `options` that are not among them are refused by name.
    peaks: arguments that are schedules, and the fields that are their peaks; 0 = learning_rate.
    options: a frozen dataclass of the fields that it brings, see declared.py; None if it brings none.
    summary: what stands behind its name in the help.
    """

    make: Callable[..., "Optimizer"]
    arguments: Mapping[str, str]
    peaks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: type | None = None
    summary: str = ""
    whole_matrices: bool = False  # it needs whole matrices, which are on one device or all-gathered

    @property
    def reads(self) -> frozenset[str]:
        """The fields of the config that the optimizer reads."""
        return frozenset((*self.arguments.values(), *self.peaks.values()))


class NoState(NamedTuple):
    """State of a stateless transformation."""


def clip_factor(max_norm: float, grad_norm: jax.Array) -> jax.Array:
    """The factor that makes the norm of the gradients `max_norm` at most; 1 if max_norm is 0 (no clipping)."""
    return jnp.minimum(1.0, max_norm / jnp.maximum(grad_norm, 1e-12)) if max_norm else jnp.float32(1)


def scale_by_given(scalar: Callable[[Scalars], jax.Array]) -> optax.GradientTransformationExtraArgs:
    """A transformation that multiplies updates with scalar(scalars), the argument `scalars=` of `update`."""

    def update(updates, state, params=None, *, scalars: Scalars, **_):
        return jax.tree.map(lambda u: u * scalar(scalars), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: NoState(), update)  # type: ignore[arg-type]


class UpdateContext(NamedTuple):
    """Inputs of an update that do not depend on the tensor.

    scalars: of the step, see `adam_scalars`. layer: index of the layer, int32, or of all layers `[L]` for
    `stack_context`. part: (k, n) for part k of n equal parts of each shard's rows.
    """

    scalars: Scalars
    layer: Any = 0
    part: tuple[Any, int] = (0, 1)


class TensorContext(NamedTuple):
    """Inputs of a rule for one tensor.

    layout: of its master weights. seed: uint32 `[2]`: a seed for this tensor in this layer and step, and the index of
    this device's first element within the tensor (exact if its leading dimension is sharded).
    """

    scalars: Scalars
    layout: Layout
    seed: jax.Array


class UpdateRule(NamedTuple):
    """How one tensor is updated.

    init: (shape, number of shards of its last dimension) -> its state, zeros.
    state_layout: layout of the moments -> a tree with the structure of the state and the layout of each array.
    apply: (p, float32 or bfloat16 gradient, state, TensorContext, work dtype) -> (p in the work dtype, new p, new
    state).
    apply_to_stack: (stack, its state) -> a function like `apply` that updates all layers in one pass, takes seeds
    `[L, 2]`, and returns None as its first result if the work dtype is None. Or None, if one pass would need memory for
    more than the results.
    apply_to_group: a function like `apply` for stacks of layers that are updated together, with seeds `[layers, 2]`,
    or None. Of the devices that share a matrix, each does the work of one layer, so a group has no more layers than
    these. If there is one, `apply` all-gathers the matrix in the work dtype.
    """

    init: Callable
    state_layout: Callable[[Layout], Any]
    apply: Callable
    apply_to_stack: Callable = lambda p, state: None
    apply_to_group: Callable | None = None


class Optimizer(NamedTuple):
    """The update rules for a model's tensors. factors: of adapters.

    scalars: (steps done, norm of all gradients) -> the values that the rules need. It has "lr" for the log, and "step"
    (1 in the first step) for the seeds.
    """

    matrices: UpdateRule
    tables: UpdateRule
    vectors: UpdateRule
    factors: UpdateRule
    scalars: Callable[[jax.Array, jax.Array], Scalars]

    def rule(self, param: Param) -> UpdateRule:
        """The rule for this kind of parameter."""
        rules = {Kind.MATRIX: self.matrices, Kind.TABLE: self.tables, Kind.VECTOR: self.vectors}
        return (rules | {Kind.ROUTER: self.tables, Kind.FACTOR: self.factors})[param.kind]


def scalars(optimizer: Optimizer, done: jax.Array, grad_norm: jax.Array) -> Scalars:
    """Values shared by all tensors of a step: learning rate, clip factor, bias corrections.

    done: number of steps before this one, int32. Barriers enclose the computation: without them XLA would fuse powers
    and cosines into the loops over elements, and round them differently there.
    """
    return materialised(optimizer.scalars(*materialised((done, grad_norm))))


def rounded(new: jax.Array, dtype, tensor: TensorContext) -> jax.Array:
    """Casts new float32 master weights to the dtype that they are stored in; bfloat16 is rounded stochastically."""
    if dtype != jnp.bfloat16:
        return new.astype(dtype)
    seed, first = tensor.seed
    return round_with(new, random_bits(seed, first + jax.lax.iota(jnp.uint32, new.size).reshape(new.shape)))


def by_optax(chain: optax.GradientTransformationExtraArgs) -> UpdateRule:
    """A rule that adds the updates of an elementwise optax chain. Its state is `Moments`; `update` takes `scalars=`."""

    def init(shape, shards):
        return chain.init(jnp.zeros(shape, jnp.float32))

    @functools.cache
    def state_of_number():
        """The state's shapes for a tensor of one number."""
        return jax.eval_shape(lambda: init((), 1))

    def state_layout(layout: Layout):
        return jax.tree.map(lambda _: layout, state_of_number())

    def apply(p, g, state, tensor: TensorContext, dtype):
        old = p.astype(jnp.float32)  # optax would round the weight decay's factor to bfloat16
        update, state = chain.update(g.astype(jnp.float32), state, old, scalars=tensor.scalars)
        new = rounded(old + update, p.dtype, tensor)
        return None if dtype is None else new.astype(dtype), new, state

    def apply_to_stack(p, g, state, tensor: TensorContext, dtype):
        def apply_to_layer(p, g, state, seed):
            return apply(p, g, state, tensor._replace(seed=seed), dtype)

        return jax.vmap(apply_to_layer)(p, g, state, tensor.seed)

    return UpdateRule(init, state_layout, apply, lambda p, state: apply_to_stack)


COMMON = {"weight_decay": "weight_decay", "max_grad_norm": "max_grad_norm"}


def init(optimizer: Optimizer, params, masters, plan):
    """Optimizer state (zeros) of each tensor of one layer, or of the outer layers.

    params: their `Param`s; masters: their master weights; plan: the plan of the master weights, whose shardings say how
    rows are sharded.
    """

    def init_tensor(param: Param, p, planned):
        shards = planned.shape[-1] // planned.sharding.shard_shape(planned.shape)[-1]
        return optimizer.rule(param).init(p.shape, shards)

    return jax.tree.map(init_tensor, params, masters, plan)


def apply(optimizer: Optimizer, param: Param, layout: Layout, p, g, state, context: UpdateContext, dtype):
    """Updates one tensor of one layer, or of the outer layers; returns (master in `dtype`, new master, new state).

    p, g, state: this device's shards of master weights, gradient and optimizer state; layout: of the master weights.
    """
    tensor = TensorContext(_scalars_of(param, context), layout, _seed(param, layout, context, p.size))
    return optimizer.rule(param).apply(p, g, state, tensor, dtype)


def layers_together(rule: UpdateRule, parts: Iterable[int], devices: int) -> int:
    """The number of layers that are updated together: 1 if the rule has no `apply_to_group`.

    parts: numbers of layers of the stacks that a segment's weights are stored in; a group is within one of them.
    devices: number of devices that share a matrix.
    """
    return largest_divisor(math.gcd(*parts), devices) if rule.apply_to_group else 1


def apply_to_group(optimizer: Optimizer, param: Param, layout: Layout, p, g, state, context: UpdateContext, dtype):
    """`apply` for stacks of layers that are updated together; context.layer: their numbers."""
    rule = optimizer.rule(param)
    assert rule.apply_to_group is not None
    return rule.apply_to_group(p, g, state, stack_context(param, layout, context, p.size // len(p)), dtype)


def stack_context(param: Param, layout: Layout, context: UpdateContext, size: int) -> TensorContext:
    """The context of a rule for all layers `context.layer`; size: of one layer on this device."""
    seeds = jax.vmap(lambda l: _seed(param, layout, context._replace(layer=l), size))(context.layer)
    return TensorContext(_scalars_of(param, context), layout, seeds)


def _scalars_of(param: Param, context: UpdateContext) -> Scalars:
    """The step's scalars with the learning rate of this parameter."""
    factor = param.learning_rate_factor
    return context.scalars if factor == 1 else context.scalars | {"lr": factor * context.scalars["lr"]}


def _seed(param: Param, layout: Layout, context: UpdateContext, size: int) -> jax.Array:
    """`TensorContext.seed` of a tensor; size: number of its elements on this device."""

    def unsigned(x) -> jax.Array:
        return jnp.asarray(x).astype(jnp.uint32)

    k, n = context.part
    shard, _ = device_number(*layout.stored_axes)
    tensor_term = jnp.uint32(param.stream) * jnp.uint32(0x85EBCA77)
    layer_term = unsigned(context.layer) * jnp.uint32(0xC2B2AE3D)
    step_term = unsigned(context.scalars["step"]) * jnp.uint32(0x9E3779B1)
    first = (unsigned(shard) * jnp.uint32(n) + unsigned(k)) * jnp.uint32(size % 2**32)
    return jnp.stack([tensor_term + layer_term + step_term, first])
