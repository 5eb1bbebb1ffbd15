"""The optimizer: an update rule for each kind of tensor, applied tensor by tensor to shards.

A tensor's update sees that tensor's gradient. What is the same for all tensors of a step, such as the learning rate and
what clips by the global norm, is computed once (`scalars`) and handed to the rules. AdamW in its two forms is
elementwise, or within blocks of a row, and needs no communication: a shard of a matrix is updated as the whole would
be. NorMuon (muon.py) gathers the matrix.

| optimizer | matrices of the blocks | embedding, head | vectors | state of a matrix, bytes per parameter          |
|-----------|------------------------|-----------------|---------|-------------------------------------------------|
| adamw     | AdamW                  | AdamW           | AdamW   | 8, or 4 with opt_m_dtype=opt_v_dtype=bfloat16   |
| adamw8bit | AdamW in 8 bits        | AdamW in 8 bits | AdamW   | 2 + 8 / block, block up to 256 (pallas_kernels) |
| normuon   | NorMuon                | AdamW           | AdamW   | 4, or 2, and 4 a row                            |

The state of every rule starts as zeros, and has the layer axis where the tensors have it. All rules round master
weights in bfloat16 stochastically: nearly all updates are smaller than half the distance to a neighbour, and rounded to
nearest they would change nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pallas_kernels import adamw8bit as kernel
from pallas_kernels.quantize import random_bits, round_with
from surojax.collectives import WHOLE
from surojax.mesh import SHARD
from surojax.rounding import materialised, mix

Schedule = optax.Schedule
Scalars = dict[str, jax.Array]  # what all updates of one step are given: see `adam_scalars`


def learning_rate_schedule(
    kind: str,
    *,
    peak: float,
    total_steps: int,
    warmup_steps: int = 0,
    cooldown_steps: int = 0,
    final_fraction: float = 0.0,
) -> Schedule:
    """Learning rate of step 0, 1, ..., total_steps - 1: linear warmup, then `kind`.

    cosine, linear: from the peak to `final_fraction` of it at the last step. wsd: constant at the peak, then linear
    over the last `cooldown_steps` (Hu et al. 2024, MiniCPM). Raises ValueError for another kind.
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
        raise ValueError(f"lr_scheduler_type: expected cosine, linear or wsd, got {kind!r}")
    if not warmup_steps:
        return main
    warmup = optax.linear_schedule(peak / warmup_steps, peak, max(warmup_steps - 1, 1))
    return optax.join_schedules([warmup, main], [warmup_steps])


class NoState(NamedTuple):
    """State of a transformation that has none."""


def clip_factor(max_norm: float, grad_norm: jax.Array) -> jax.Array:
    """What gradients are multiplied with so that their norm is `max_norm` at most; 0 = 1, never clipped."""
    return jnp.minimum(1.0, max_norm / jnp.maximum(grad_norm, 1e-12)) if max_norm else jnp.float32(1)


def scale_by_given(scalar: Callable[[Scalars], jax.Array]) -> optax.GradientTransformationExtraArgs:
    """Multiply updates with a number made of `scalars=`."""

    def update(updates, state, params=None, *, scalars: Scalars, **_):
        factor = scalar(scalars)
        return jax.tree.map(lambda u: u * factor.astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: NoState(), update)  # type: ignore[arg-type]


class Moments(NamedTuple):
    """State of AdamW: trees like that of the parameters."""

    m: Any
    v: Any


def scale_by_adam(
    b1: float, b2: float, eps: float, m_dtype: str, v_dtype: str
) -> optax.GradientTransformationExtraArgs:
    """optax.scale_by_adam (Kingma and Ba 2015) with a dtype for each moment, in float32 arithmetic; `update` takes
    `scalars=` and counts no steps itself."""

    def init(params):
        zeros = lambda dtype: jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params)
        return Moments(zeros(m_dtype), zeros(v_dtype))

    def update(grads, state, params=None, *, scalars: Scalars, **_):
        m = jax.tree.map(lambda m, g: mix(b1, m.astype(jnp.float32), g), state.m, grads)
        v = jax.tree.map(lambda v, g: mix(b2, v.astype(jnp.float32), g * g), state.v, grads)
        of_m, of_v = scalars["unbias_m"], scalars["unbias_v"]
        updates = jax.tree.map(lambda m, v: m * of_m / (jnp.sqrt(v * of_v) + eps), m, v)
        cast = lambda tree, dtype: jax.tree.map(lambda x: x.astype(dtype), tree)
        return updates, Moments(cast(m, m_dtype), cast(v, v_dtype))

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


class At(NamedTuple):
    """What `apply` is told of the tensors beside their shards.

    part: "blocks" or "outer". scalars: those of the step. dims: a tree like theirs of the dimensions that `dp_shard`
    divides, or WHOLE. layer: their number, or those of all layers (`apply_at_once`). cut: (k, n) for the k-th of n
    equal parts of each shard's rows. first: the number of the first tensor among those of a layer.
    """

    part: str
    scalars: Scalars
    dims: Any
    layer: Any = 0
    cut: tuple[Any, int] = (0, 1)
    first: int = 0


class Tensor(NamedTuple):
    """What a rule is told of one tensor: `At` for it.

    dim: that `dp_shard` divides, or WHOLE. seed: uint32 `[2]`: of this tensor in this layer and step, and the number
    that the first element here has in it, if its leading dimension is divided.
    """

    scalars: Scalars
    dim: int
    seed: jax.Array


class Rule(NamedTuple):
    """How one tensor is updated. gathers: by its whole matrix in the work dtype, gathered over `dp_shard`.

    init: (shape or array p, shards) -> its state, zeros; shards: how many devices divide p's last dimension.
    apply: (p, float32 or bfloat16 gradient, state, Tensor, work dtype) -> (p in the work dtype, new p, new state).
    at_once: (stack, its state) -> `apply` for all layers in one pass, with seeds `[L, 2]`, and without the first result
    for None as the work dtype; None where that would need memory for more than the results.
    """

    init: Callable
    apply: Callable
    at_once: Callable = lambda p, state: None
    gathers: bool = False
    flops: Callable = lambda stacks: 0  # of a step for these stacks of matrices, where they count


class Optimizer(NamedTuple):
    """The rules of a model's tensors: matrices of the blocks, matrices of the outer layers, vectors of both.

    scalars: (steps done, norm of all gradients) -> what the rules need of them. "lr" goes into the log, and "step", 1
    in the first, into the seeds.
    """

    blocks: Rule
    outer: Rule
    vectors: Rule
    scalars: Callable[[jax.Array, jax.Array], Scalars]

    def rule(self, part: str, ndim: int) -> Rule:
        """Of a tensor of that part, "blocks" or "outer", with so many dimensions, the layer axis not counted."""
        return self.vectors if ndim < 2 else self.blocks if part == "blocks" else self.outer


def scalars(optimizer: Optimizer, done: jax.Array, grad_norm: jax.Array) -> Scalars:
    """What the updates of the step after `done` others are given: int32 `[]`, float32 `[]`.

    Behind a barrier: XLA would fuse powers and cosines into the loops over elements, and round them differently there.
    """
    return materialised(optimizer.scalars(*materialised((done, grad_norm))))


def adam_scalars(schedule: Schedule, b1: float, b2: float, max_grad_norm: float):
    """`Optimizer.scalars` of AdamW: `step` is 1 in the first, `clip` what gradients are multiplied with, `lr` the
    learning rate, `c1` and `c2` the bias corrections 1 - b^step, `unbias_m` and `unbias_v` their reciprocals.

    Moments are multiplied with these: XLA makes that, or one quotient, of two divisions in a row, as it finds them.
    """

    def scalars(done: jax.Array, grad_norm: jax.Array) -> Scalars:
        step = done + 1
        c1, c2 = (1 - jnp.float32(b) ** step for b in (b1, b2))
        clip = clip_factor(max_grad_norm, grad_norm)
        found = {"step": step, "clip": clip, "lr": jnp.float32(schedule(done)), "c1": c1, "c2": c2}
        return found | {"unbias_m": 1 / c1, "unbias_v": 1 / c2}

    return scalars


def rounded(new: jax.Array, dtype, tensor: Tensor) -> jax.Array:
    """New master weights, float32, in the dtype that they are stored in: bfloat16 stochastically."""
    if dtype != jnp.bfloat16:
        return new.astype(dtype)
    seed, first = tensor.seed
    return round_with(new, random_bits(seed, first + jax.lax.iota(jnp.uint32, new.size).reshape(new.shape)))


def by_optax(chain: optax.GradientTransformationExtraArgs) -> Rule:
    """The rule that adds the updates of an elementwise chain, which is given `scalars=`."""

    def apply(p, g, state, tensor: Tensor, dtype):
        update, state = chain.update(g.astype(jnp.float32), state, p, scalars=tensor.scalars)
        new = rounded(p.astype(jnp.float32) + update, p.dtype, tensor)
        return None if dtype is None else new.astype(dtype), new, state

    def at_once(p, g, state, tensor: Tensor, dtype):
        layer = lambda p, g, state, seed: apply(p, g, state, tensor._replace(seed=seed), dtype)
        return jax.vmap(layer)(p, g, state, tensor.seed)

    return Rule(lambda p, shards: chain.init(p), apply, lambda p, state: at_once)


def adamw(
    schedule: Schedule, *, b1: float = 0.9, b2: float = 0.95, max_grad_norm: float = 1.0, **settings
) -> Optimizer:
    """The rule of `adamw_chain`, with its settings, for every tensor. max_grad_norm: 0 never clips."""
    rule = by_optax(adamw_chain(b1=b1, b2=b2, **settings))
    return Optimizer(rule, rule, rule, adam_scalars(schedule, b1, b2, max_grad_norm))


def adamw_chain(
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    m_dtype: str = "float32",
    v_dtype: str = "float32",
) -> optax.GradientTransformationExtraArgs:
    """AdamW with decoupled decay on matrices only (Loshchilov and Hutter 2019); `update` takes `scalars=`, those of
    `adam_scalars`."""
    matrices = lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)
    chain = optax.chain(
        scale_by_given(lambda scalars: scalars["clip"]),
        scale_by_adam(b1, b2, eps, m_dtype, v_dtype),
        optax.add_decayed_weights(weight_decay, mask=matrices),
        scale_by_given(lambda scalars: -scalars["lr"]),
    )
    return optax.with_extra_args_support(chain)


class Moments8bit(NamedTuple):
    """State of a matrix under `adamw8bit`: see pallas_kernels/adamw8bit.py for what the codes mean."""

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
    """AdamW whose moments of matrices are in 8 bits; `vectors`: m_dtype and v_dtype of the others, as in `adamw`.

    A block never spans two shards: its size is a divisor of the shard's row.
    """
    plain = adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm, **vectors)

    def init(p, shards):
        return Moments8bit(*kernel.init(p.shape, kernel.block_size(p.shape[-1] // shards)))

    def apply(p, g, state: Moments8bit, tensor: Tensor, dtype):
        how = {"work_dtype": dtype, "in_place": True, "implementation": implementation}
        new = kernel.adamw8bit(p, g, *state, tensor.scalars["hyper"], tensor.seed, **how)
        return new.work, new.p, Moments8bit(new.m, new.m_scale, new.v, new.v_scale)

    def at_once(p, state: Moments8bit):  # what XLA makes of a stack needs memory for all of it
        return apply if kernel.serves(p.size // state.m_scale.size, implementation) else None

    def scalars(done: jax.Array, grad_norm: jax.Array) -> Scalars:
        found = plain.scalars(done, grad_norm)
        lr, c1, c2, clip = (found[name] for name in ("lr", "c1", "c2", "clip"))
        return found | {"hyper": kernel.Hyper(lr, b1, b2, eps, weight_decay, c1, c2, clip).vector()}

    return plain._replace(blocks=Rule(init, apply, at_once), outer=Rule(init, apply), scalars=scalars)


def transpose(tree, tuples, n: int) -> tuple:
    """n trees like `tree` from one that holds a tuple of n where `tree` has a leaf."""
    take = lambda i: jax.tree.map(lambda _, found: found[i], tree, tuples)
    return tuple(take(i) for i in range(n))


def init(optimizer: Optimizer, part: str, params, plan=None):
    """Optimizer state of the tensors of a layer, or of the outer layers: a tree with a state of its own for each.

    plan: that of the master weights; without one nothing is divided.
    """

    def one(p, planned):
        shards = planned.shape[-1] // planned.sharding.shard_shape(planned.shape)[-1] if plan is not None else 1
        return optimizer.rule(part, p.ndim).init(p, shards)

    return jax.tree.map(one, params, params if plan is None else plan)


def init_moments(optimizer: Optimizer, params: dict, plan: dict | None = None):
    """Optimizer state of `{"blocks": stacked, "outer": ...}`.

    Every leaf of the blocks' part has the layer axis, so that layer l of it is read like layer l of the weights.
    """
    blocks, outer = (None, None) if plan is None else (plan["blocks"], plan["outer"])
    blocks = jax.vmap(lambda p: init(optimizer, "blocks", p, blocks))(params["blocks"])
    return {"blocks": blocks, "outer": init(optimizer, "outer", params["outer"], outer)}


def apply(optimizer: Optimizer, grads, moments, master, at: At, dtype="float32"):
    """One optimizer step for a tree of tensors of one layer, or of the outer layers: (master in `dtype`, new moments,
    new master).

    Each rule sees one tensor at a time, so that the state of one tensor at a time needs to be on the device.
    """
    leaves, structure = jax.tree.flatten(master)
    others = map(structure.flatten_up_to, (grads, moments, at.dims))
    done = []
    for i, (p, g, m, dim) in enumerate(zip(leaves, *others, strict=True), at.first):
        tensor = Tensor(at.scalars, dim, _seed(at, i, dim, p.size))
        work, p, m = optimizer.rule(at.part, p.ndim).apply(p, g, m, tensor, dtype)
        done.append((work, m, p))
    return tuple(structure.unflatten(column) for column in zip(*done, strict=True))


def apply_at_once(optimizer: Optimizer, grads, moments, master, at: At, dtype):
    """`apply` of a tensor of all layers `at.layer`, int32 `[L]`, in place; None where its rule wants one at a time."""
    run = optimizer.rule(at.part, master.ndim - 1).at_once(master, moments)
    if run is None:
        return None
    seeds = jax.vmap(lambda l: _seed(at._replace(layer=l), at.first, at.dims, master.size // len(master)))(at.layer)
    work, master, moments = run(master, grads, moments, Tensor(at.scalars, at.dims, seeds), dtype)
    return work, moments, master


def _seed(at: At, number: int, dim: int, size: int) -> jax.Array:
    """`Tensor.seed` of a tensor of which `size` elements are here."""
    unsigned = lambda x: jnp.asarray(x).astype(jnp.uint32)
    k, n = at.cut
    shard = 0 if dim == WHOLE else jax.lax.axis_index(SHARD)
    of_tensor = jnp.uint32(number * 2 + (at.part == "outer")) * jnp.uint32(0x85EBCA77)
    of_layer = unsigned(at.layer) * jnp.uint32(0xC2B2AE3D)
    of_step = unsigned(at.scalars["step"]) * jnp.uint32(0x9E3779B1)
    first = (unsigned(shard) * jnp.uint32(n) + unsigned(k)) * jnp.uint32(size % 2**32)
    return jnp.stack([of_tensor + of_layer + of_step, first])
