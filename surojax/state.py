"""The training state: what a step takes and returns."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from surojax.models.llama import LlamaConfig, init_params
from surojax.optim import init_moments


class TrainState(NamedTuple):
    """Everything that changes from step to step; `weights` and `master` are `{"blocks": [L, ...], "outer": ...}`.

    `weights` is always `master` cast to the work dtype, so checkpoints hold `master` only. Randomness has no state:
    every draw is derived from the run's seed (weights, order of the data) and a position that is stored.
    """

    step: Any  # int32 scalar: optimizer steps done
    weights: Any
    master: Any
    moments: Any


def work_weights(master, plan: TrainState):
    """The work copy of master weights."""
    return jax.tree.map(lambda m, w: m.astype(w.dtype), master, plan.weights)


def shardings(plan):
    """The shardings of a plan's leaves."""
    return jax.tree.map(lambda x: x.sharding, plan)


def init_state(config: LlamaConfig, plan: TrainState, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """A new state, each array created in its own sharding: what is planned in shards is never whole on a device."""

    def build(seed):
        master = jax.tree.map(lambda p, m: p.astype(m.dtype), init_params(config, seed), plan.master)
        return TrainState(jnp.int32(0), work_weights(master, plan), master, init_moments(optimizer, master))

    return jax.jit(build, out_shardings=shardings(plan))(seed)
