"""The optimizer: an update rule for each kind of tensor, applied tensor by tensor to shards.

A tensor's update reads that tensor's gradient only. Values shared by all tensors (learning rate, clip factor, bias
corrections) are computed once per step (`scalars`) and passed to the rules. AdamW is elementwise, and in 8 bits within
blocks of a row, so it needs no communication: a shard gets the update that it would get within the full matrix. NorMuon
(normuon.py) needs the full matrix, each on one of the devices that share it. optimizers.py lists all of them.

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

from pallas_kernels import adamw8bit as kernel
from pallas_kernels.quantize import random_bits, round_with
from surojax.declared import BELOW_1, FLOATS, POSITIVE, declare
from surojax.numerics.rounding import materialised, mix
from surojax.parallel.collectives import device_number
from surojax.placement.layout import Layout
from surojax.placement.param import Kind, Param
from surojax.sizes import largest_divisor

Schedule = optax.Schedule
SCHEDULES = ("cosine", "linear", "wsd")
Scalars = dict[str, jax.Array]  # values shared by all updates of one step: see `adam_scalars`


@functools.cache
def learning_rate_schedule(
    kind: str,
    *,
    peak: float,
    total_steps: int,
    warmup_steps: int = 0,
    cooldown_steps: int = 0,
    final_fraction: float = 0.0,
) -> Schedule:
    """Learning rate of steps 0 to total_steps - 1: linear warmup to `peak`, then a decay of this kind.

    cosine, linear: from the peak to peak * final_fraction at the last step. wsd: constant at the peak, then linear over
    the last `cooldown_steps` (Hu et al. 2024, MiniCPM). Raises ValueError for another kind.
    """
    final = peak * final_fraction
    after = max(total_steps - warmup_steps - 1, 1)
    if kind == "cosine":
        main = optax.cosine_decay_schedule(peak, after, alpha=final_fraction)
    elif kind == "linear":
        main = optax.linear_schedule(peak, final, after)
    elif kind == "wsd":
        stable = total_steps - warmup_steps - cooldown_steps
        cooldown = optax.linear_schedule(
            peak + (final - peak) / max(cooldown_steps, 1), final, max(cooldown_steps - 1, 1)
        )
        main = optax.join_schedules([optax.constant_schedule(peak), cooldown], [stable])
    else:
        raise ValueError(f"lr_scheduler_type: expected one of {', '.join(SCHEDULES)}, got {kind!r}")
    if not warmup_steps:
        return main
    warmup = optax.linear_schedule(peak / warmup_steps, peak, max(warmup_steps - 1, 1))
    return optax.join_schedules([warmup, main], [warmup_steps])


@dataclasses.dataclass(frozen=True)
class MomentSettings:
    """The dtypes of moments, for the optimizers that read them."""

    # first moments (adamw8bit: only those of vectors) and the momentum of normuon
    opt_m_dtype: str = declare("float32", choices=FLOATS)
    # second moments (adamw8bit: only those of vectors; normuon: only those of adamw)
    opt_v_dtype: str = declare("float32", choices=FLOATS)


@dataclasses.dataclass(frozen=True)
class AdamSettings:
    """The options of AdamW, of every optimizer that has its rule for some tensors."""

    # decay of the first moment
    adamw_beta1: float = declare(0.9, BELOW_1)
    # decay of the second moment
    adamw_beta2: float = declare(0.95, BELOW_1)
    # added to the square root of the second moment
    adamw_epsilon: float = declare(1e-8, POSITIVE)


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
        factor = scalar(scalars)
        return jax.tree.map(lambda u: u * factor.astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: NoState(), update)  # type: ignore[arg-type]


class Moments(NamedTuple):
    """State of AdamW: two trees with the structure of the parameters."""

    m: Any
    v: Any


def scale_by_adam(
    b1: float, b2: float, eps: float, m_dtype: str, v_dtype: str
) -> optax.GradientTransformationExtraArgs:
    """optax.scale_by_adam (Kingma and Ba 2015) with a dtype for each moment and arithmetic in float32.

    `update` reads the bias corrections from `scalars=` and does not count steps.
    """

    def init(params):
        def zeros(dtype):
            return jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params)

        return Moments(zeros(m_dtype), zeros(v_dtype))

    def cast(tree, dtype):
        return jax.tree.map(lambda x: x.astype(dtype), tree)

    def update(grads, state, params=None, *, scalars: Scalars, **_):
        m = jax.tree.map(lambda m, g: mix(b1, m.astype(jnp.float32), g), state.m, grads)
        v = jax.tree.map(lambda v, g: mix(b2, v.astype(jnp.float32), g * g), state.v, grads)
        unbias_m = scalars["unbias_m"]
        unbias_v = scalars["unbias_v"]
        updates = jax.tree.map(lambda m, v: m * unbias_m / (jnp.sqrt(v * unbias_v) + eps), m, v)
        return updates, Moments(cast(m, m_dtype), cast(v, v_dtype))

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


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


class Rule(NamedTuple):
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
    flops: shape of a matrix -> FLOPs of its update, 0 if negligible.
    """

    init: Callable
    state_layout: Callable[[Layout], Any]
    apply: Callable
    apply_to_stack: Callable = lambda p, state: None
    apply_to_group: Callable | None = None
    flops: Callable[[tuple[int, ...]], int] = lambda shape: 0


class Optimizer(NamedTuple):
    """The update rules for a model's tensors. factors: of adapters.

    scalars: (steps done, norm of all gradients) -> the values that the rules need. It has "lr" for the log, and "step"
    (1 in the first step) for the seeds.
    """

    matrices: Rule
    tables: Rule
    vectors: Rule
    factors: Rule
    scalars: Callable[[jax.Array, jax.Array], Scalars]

    def rule(self, param: Param) -> Rule:
        """The rule for this kind of parameter."""
        rules = {Kind.MATRIX: self.matrices, Kind.TABLE: self.tables, Kind.VECTOR: self.vectors}
        return (rules | {Kind.ROUTER: self.tables, Kind.FACTOR: self.factors})[param.kind]


def scalars(optimizer: Optimizer, done: jax.Array, grad_norm: jax.Array) -> Scalars:
    """Values shared by all tensors of a step: learning rate, clip factor, bias corrections.

    done: number of steps before this one, int32. Barriers enclose the computation: without them XLA would fuse powers
    and cosines into the loops over elements, and round them differently there.
    """
    return materialised(optimizer.scalars(*materialised((done, grad_norm))))


def adam_scalars(schedule: Schedule, b1: float, b2: float, max_grad_norm: float):
    """`Optimizer.scalars` of AdamW.

    The function returns step (1 in the first step), clip (the factor of the gradients), lr (the learning rate), c1 and
    c2 (the bias corrections 1 - b1^step and 1 - b2^step), unbias_m and unbias_v (their reciprocals).

    Moments are multiplied with the reciprocals, because XLA rewrites two successive divisions in one of several ways
    that round differently (numerics/rounding.py).
    """

    def scalars(done: jax.Array, grad_norm: jax.Array) -> Scalars:
        step = done + 1
        c1, c2 = (1 - jnp.float32(b) ** step for b in (b1, b2))
        clip = clip_factor(max_grad_norm, grad_norm)
        shared = {"step": step, "clip": clip, "lr": jnp.float32(schedule(done)), "c1": c1, "c2": c2}
        return shared | {"unbias_m": 1 / c1, "unbias_v": 1 / c2}

    return scalars


def rounded(new: jax.Array, dtype, tensor: TensorContext) -> jax.Array:
    """Casts new float32 master weights to the dtype that they are stored in; bfloat16 is rounded stochastically."""
    if dtype != jnp.bfloat16:
        return new.astype(dtype)
    seed, first = tensor.seed
    return round_with(new, random_bits(seed, first + jax.lax.iota(jnp.uint32, new.size).reshape(new.shape)))


def by_optax(chain: optax.GradientTransformationExtraArgs) -> Rule:
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

    return Rule(init, state_layout, apply, lambda p, state: apply_to_stack)


def adamw(
    schedule: Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    weight_decay: float = 0.1,
    max_grad_norm: float = 1.0,
    **settings,
) -> Optimizer:
    """AdamW for every tensor; settings: other arguments of `adamw_chain`. max_grad_norm: 0 means no clipping.

    Decoupled weight decay applies to all but vectors (Loshchilov and Hutter 2019).
    """
    decayed = by_optax(adamw_chain(b1=b1, b2=b2, weight_decay=weight_decay, **settings))
    vectors = by_optax(adamw_chain(b1=b1, b2=b2, weight_decay=0.0, **settings))
    return Optimizer(decayed, decayed, vectors, decayed, adam_scalars(schedule, b1, b2, max_grad_norm))


def adamw_chain(
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    m_dtype: str = "float32",
    v_dtype: str = "float32",
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW as an optax chain; `update` takes the `scalars=` of `adam_scalars`.

    mask: a function from the tree of parameters to a tree of bools, True for parameters with weight decay; None: all.
    """
    decay = [optax.add_decayed_weights(weight_decay, mask=mask)] if weight_decay else []
    chain = optax.chain(
        scale_by_given(lambda scalars: scalars["clip"]),
        scale_by_adam(b1, b2, eps, m_dtype, v_dtype),
        *decay,
        scale_by_given(lambda scalars: -scalars["lr"]),
    )
    return optax.with_extra_args_support(chain)


class Moments8bit(NamedTuple):
    """State of a matrix under `adamw8bit`; pallas_kernels/adamw8bit.py defines the codes."""

    m: Any  # int8, the shape of the matrix
    m_scale: Any  # float32 [..., n / block]
    v: Any  # uint8, the shape of the matrix
    v_scale: Any  # float32 [..., n / block]


def adamw8bit(
    schedule: Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    max_grad_norm: float = 1.0,
    implementation: Any = "xla",
    **vectors,
) -> Optimizer:
    """AdamW with the moments of matrices and tables in 8 bits; vectors: m_dtype and v_dtype of all other moments.

    A block never spans two shards: its size divides the length of a shard's row.
    """
    plain = adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm, **vectors)

    def init(shape, shards):
        return Moments8bit(*kernel.init(shape, kernel.block_size(shape[-1] // shards)))

    def state_layout(layout: Layout) -> Moments8bit:
        return Moments8bit(layout, layout, layout, layout)

    def apply(p, g, state: Moments8bit, tensor: TensorContext, dtype):
        how = {"work_dtype": dtype, "in_place": True, "implementation": implementation}
        new = kernel.adamw8bit(p, g, *state, tensor.scalars["hyper"], tensor.seed, **how)
        return new.work, new.p, Moments8bit(new.m, new.m_scale, new.v, new.v_scale)

    def apply_to_stack(p, state: Moments8bit):
        # XLA's reference needs memory for a second stack; the kernel updates the stack in place.
        return apply if kernel.serves(p.size // state.m_scale.size, implementation) else None

    def scalars(done: jax.Array, grad_norm: jax.Array) -> Scalars:
        shared = plain.scalars(done, grad_norm)
        lr, c1, c2, clip = (shared[name] for name in ("lr", "c1", "c2", "clip"))
        return shared | {"hyper": kernel.Hyper(lr, b1, b2, eps, weight_decay, c1, c2, clip).vector()}

    layer_by_layer = Rule(init, state_layout, apply)
    in_one_pass = layer_by_layer._replace(apply_to_stack=apply_to_stack)
    return plain._replace(matrices=in_one_pass, tables=layer_by_layer, scalars=scalars)


COMMON = {"weight_decay": "weight_decay", "max_grad_norm": "max_grad_norm"}
ADAM = {"b1": "adamw_beta1", "b2": "adamw_beta2", "eps": "adamw_epsilon"}
MOMENTS = {"m_dtype": "opt_m_dtype", "v_dtype": "opt_v_dtype"}
ADAMW = OptimizerChoice(adamw, COMMON | ADAM | MOMENTS, options=AdamSettings)
ADAMW8BIT = OptimizerChoice(
    adamw8bit,
    COMMON | ADAM | MOMENTS | {"implementation": "implementation"},
    summary="8-bit moments of matrices",
)


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


def layers_together(rule: Rule, parts: Iterable[int], devices: int) -> int:
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
