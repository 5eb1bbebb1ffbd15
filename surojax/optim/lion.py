"""Lion: the sign of a moving average of gradients (Chen et al. 2023, arXiv:2302.06675), with optax's formula.

    W' = W - lr (sign(b1 m + (1 - b1) g) + decay W)            m' = b2 m + (1 - b2) g

for every tensor; decay for all but vectors. Its state is one momentum, half of AdamW's. Every step moves every number
by the learning rate, so that the paper takes a third to a tenth of AdamW's, and three to ten times its decay.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from surojax.declared import BELOW_1, Facts, declare
from surojax.numerics.rounding import mix
from surojax.optim import optimizer as optim
from surojax.optim.learning_rate import Schedule
from surojax.optim.optimizer import Optimizer, OptimizerChoice, Scalars


@dataclasses.dataclass(frozen=True)
class LionSettings:
    """The options of Lion."""

    # lion: weight of the momentum in an update's sign
    lion_beta1: float = declare(0.9, BELOW_1, facts=Facts.NOTHING)
    # lion: decay of the momentum
    lion_beta2: float = declare(0.99, BELOW_1, facts=Facts.NOTHING)


class LionState(NamedTuple):
    """State of Lion: a tree with the structure of the parameters."""

    m: Any


def scale_by_lion(b1: float, b2: float, m_dtype: str) -> optax.GradientTransformation:
    """optax.scale_by_lion with arithmetic in float32 that is rounded alike in every program, and no count of steps."""

    def init(params):
        return LionState(jax.tree.map(lambda p: jnp.zeros(p.shape, m_dtype), params))

    def update(updates, state, params=None):
        signs = jax.tree.map(lambda m, g: jnp.sign(mix(b1, m, g)), state.m, updates)
        m = jax.tree.map(lambda m, g: mix(b2, m, g).astype(m_dtype), state.m, updates)
        return signs, LionState(m)

    return optax.GradientTransformation(init, update)


def lion(
    schedule: Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.1,
    max_grad_norm: float = 1.0,
    m_dtype: str = "float32",
) -> Optimizer:
    """Lion for every tensor. max_grad_norm: 0 means no clipping. m_dtype: of the momentum."""

    def rule(weight_decay: float):
        chain = optax.chain(
            optim.scale_by_given(lambda scalars: scalars["clip"]),
            scale_by_lion(b1, b2, m_dtype),
            optax.add_decayed_weights(weight_decay),
            optim.scale_by_given(lambda scalars: -scalars["lr"]),
        )
        return optim.by_optax(optax.with_extra_args_support(chain))

    def scalars(done: jax.Array, grad_norm: jax.Array) -> Scalars:
        clip = optim.clip_factor(max_grad_norm, grad_norm)
        return {"step": done + 1, "clip": clip, "lr": jnp.float32(schedule(done))}

    decayed = rule(weight_decay)
    return Optimizer(matrices=decayed, tables=decayed, vectors=rule(0.0), factors=decayed, scalars=scalars)


LION = OptimizerChoice(
    lion,
    optim.COMMON | {"b1": "lion_beta1", "b2": "lion_beta2", "m_dtype": "opt_m_dtype"},
    options=LionSettings,
    summary="the sign of a momentum",
)
