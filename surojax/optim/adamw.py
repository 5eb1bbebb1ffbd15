"""AdamW for every tensor (Loshchilov and Hutter 2019), as a chain of optax with float32 arithmetic."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from surojax.declared import BELOW_1, POSITIVE, Facts, declare
from surojax.numerics.rounding import mix
from surojax.optim.learning_rate import Schedule
from surojax.optim.optimizer import COMMON, Optimizer, OptimizerChoice, Scalars, by_optax, clip_factor, scale_by_given


@dataclasses.dataclass(frozen=True)
class AdamSettings:
    """The options of AdamW, of every optimizer that has its rule for some tensors."""

    # decay of the first moment
    adamw_beta1: float = declare(0.9, BELOW_1, facts=Facts.NOTHING)
    # decay of the second moment
    adamw_beta2: float = declare(0.95, BELOW_1, facts=Facts.NOTHING)
    # added to the square root of the second moment
    adamw_epsilon: float = declare(1e-8, POSITIVE, facts=Facts.NOTHING)


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
        m = jax.tree.map(lambda m, g: mix(b1, m, g), state.m, grads)
        v = jax.tree.map(lambda v, g: mix(b2, v, g * g), state.v, grads)
        unbias_m = scalars["unbias_m"]
        unbias_v = scalars["unbias_v"]
        updates = jax.tree.map(lambda m, v: m * unbias_m / (jnp.sqrt(v * unbias_v) + eps), m, v)
        return updates, Moments(cast(m, m_dtype), cast(v, v_dtype))

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


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


ADAM = {"b1": "adamw_beta1", "b2": "adamw_beta2", "eps": "adamw_epsilon"}
MOMENTS = {"m_dtype": "opt_m_dtype", "v_dtype": "opt_v_dtype"}
ADAMW = OptimizerChoice(adamw, COMMON | ADAM | MOMENTS, options=AdamSettings)
