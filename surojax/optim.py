"""The optimizer as one optax chain, applied tensor by tensor to shards.

A tensor's update sees that tensor's gradient, so what needs all of them, the global norm, is computed beforehand and
handed to the chain as the extra argument `grad_norm`. Everything else in the chain is elementwise and needs no
communication: a shard of a matrix is updated as the whole would be.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

Schedule = optax.Schedule


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


def clip_by_given_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scale updates by min(1, max_norm / grad_norm), `grad_norm` being that of all layers and devices."""

    def update(updates, state, params=None, *, grad_norm: jax.Array, **_):
        factor = jnp.minimum(1.0, max_norm / jnp.maximum(grad_norm, 1e-12))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: NoState(), update)  # type: ignore[arg-type]


def scale_by_adam(b1: float, b2: float, eps: float, m_dtype: str, v_dtype: str) -> optax.GradientTransformation:
    """optax.scale_by_adam with a dtype for each moment; arithmetic in float32 (Kingma and Ba 2015)."""

    def init(params):
        zeros = lambda dtype: jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params)
        return optax.ScaleByAdamState(count=jnp.zeros([], jnp.int32), mu=zeros(m_dtype), nu=zeros(v_dtype))

    def update(grads, state, params=None):
        count = state.count + 1
        mix = lambda decay, old, new: decay * old.astype(jnp.float32) + (1 - decay) * new
        m = jax.tree.map(lambda m, g: mix(b1, m, g), state.mu, grads)
        v = jax.tree.map(lambda v, g: mix(b2, v, g * g), state.nu, grads)
        c1, c2 = (1 - jnp.float32(b) ** count for b in (b1, b2))
        updates = jax.tree.map(lambda m, v: (m / c1) / (jnp.sqrt(v / c2) + eps), m, v)
        cast = lambda tree, dtype: jax.tree.map(lambda x: x.astype(dtype), tree)
        return updates, optax.ScaleByAdamState(count, cast(m, m_dtype), cast(v, v_dtype))

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def adamw(
    schedule: Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    max_grad_norm: float = 1.0,
    m_dtype: str = "float32",
    v_dtype: str = "float32",
) -> optax.GradientTransformationExtraArgs:
    """AdamW with decoupled decay on matrices only (Loshchilov and Hutter 2019); `update` takes `grad_norm=`."""
    matrices = lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)
    return optax.with_extra_args_support(
        optax.chain(
            clip_by_given_norm(max_grad_norm) if max_grad_norm else optax.identity(),
            scale_by_adam(b1, b2, eps, m_dtype, v_dtype),
            optax.add_decayed_weights(weight_decay, mask=matrices),
            optax.scale_by_learning_rate(schedule),
        )
    )


def transpose(tree, tuples, n: int) -> tuple:
    """n trees like `tree` from one that holds a tuple of n where `tree` has a leaf."""
    take = lambda i: jax.tree.map(lambda _, found: found[i], tree, tuples)
    return tuple(take(i) for i in range(n))


def init(optimizer: optax.GradientTransformation, params):
    """Optimizer state of a tree of tensors: a tree with a state of its own for each, see `apply`."""
    return jax.tree.map(optimizer.init, params)


def init_moments(optimizer: optax.GradientTransformation, params: dict):
    """Optimizer state of `{"blocks": stacked, "outer": ...}`.

    Every leaf of the blocks' part has the layer axis, the step counters too, so that layer l of it is read like layer l
    of the weights.
    """
    blocks = jax.tree.map(jax.vmap(optimizer.init), params["blocks"])
    return {"blocks": blocks, "outer": init(optimizer, params["outer"])}


def apply(optimizer: optax.GradientTransformationExtraArgs, grads, moments, master, grad_norm: jax.Array):
    """One optimizer step for a tree of tensors of one layer, or of the outer layers: (new moments, new master).

    The optimizer sees one tensor at a time, so that the state of one tensor at a time needs to be on the device.
    """

    def one(p, g, m):
        update, m = optimizer.update(g.astype(jnp.float32), m, p, grad_norm=grad_norm)
        return m, (p.astype(jnp.float32) + update).astype(p.dtype)

    return transpose(master, jax.tree.map(one, master, grads, moments), 2)
