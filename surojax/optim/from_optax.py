"""Any elementwise optimizer of optax, with the learning rate and the clipping of a config.

Every shard of every tensor is updated by itself, so what reads more than one element at a time (a norm, a row) would
depend on the sharding. That is tried out on small arrays and refused. Counts of steps are not stored: they are those of
the step. A weight decay is the transformation's own, and is of vectors too unless it is masked.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from surojax.errors import ConfigError
from surojax.optim import optimizer as optim
from surojax.optim.learning_rate import Schedule
from surojax.optim.optimizer import Optimizer, Scalars

type MakeTransformation = Callable[[Any], optax.GradientTransformation]  # of a learning rate, such as optax.adamw

ADVICE = "give a function of the learning rate that returns an elementwise one, such as optax.lion"
TRIED = (4, 6)  # shape of the array on which a transformation is tried out
TRIED_STEPS = 3


def from_optax(make: MakeTransformation, schedule: Schedule, *, max_grad_norm: float = 1.0) -> Optimizer:
    """Makes an optimizer of the transformation that `make` returns. Raises ConfigError for one that cannot be sharded.

    max_grad_norm: gradients are scaled down to it first; 0 means no clipping.
    """
    is_count = counts(make)

    def without_counts(state):
        leaves, structure = jax.tree.flatten(state)
        return structure.unflatten([None if count else x for x, count in zip(leaves, is_count, strict=True)])

    def init(params):
        return without_counts(make(1.0).init(params))

    def update(updates, state, params=None, **extra: Any):
        scalars: Scalars = extra["scalars"]
        chain = optax.with_extra_args_support(make(scalars["lr"]))
        stored = iter(jax.tree.leaves(state))
        done = scalars["step"] - 1
        structure = jax.tree.structure(jax.eval_shape(chain.init, params))
        whole = structure.unflatten([done if count else next(stored) for count in is_count])
        new, whole = chain.update(scalars["clip"] * updates, whole, params)
        return new, without_counts(whole)

    def scalars(done: jax.Array, grad_norm: jax.Array) -> Scalars:
        clip = optim.clip_factor(max_grad_norm, grad_norm)
        return {"step": done + 1, "clip": clip, "lr": jnp.float32(schedule(done))}

    rule = optim.by_optax(optax.GradientTransformationExtraArgs(init, update))
    return Optimizer(matrices=rule, tables=rule, vectors=rule, factors=rule, scalars=scalars)


def counts(make: MakeTransformation) -> list[bool]:
    """True for each leaf of a state of optax that counts steps. Raises ConfigError if it cannot be sharded."""
    try:
        chain = make(0.1)
        whole, states = _updates(chain, ())
    except Exception as error:  # of whatever the caller gave
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"optimizer: expected a function of the learning rate, got {type(error).__name__} ({reason}); {ADVICE}"
        ) from error
    leaves = list(zip(*map(jax.tree.leaves, states), strict=True))
    is_count = [[float(np.mean(x)) for x in values_by_step] == [*range(TRIED_STEPS + 1)] for values_by_step in leaves]
    is_count = [count and np.ndim(x[0]) == 0 for count, x in zip(is_count, leaves, strict=True)]
    stored = [values_by_step for values_by_step, count in zip(leaves, is_count, strict=True) if not count]
    for values_by_step in stored:
        if np.shape(values_by_step[0]) != TRIED or np.any(values_by_step[0]):
            raise ConfigError(
                f"optimizer: expected a state of zeros in the shape of the weights, {[*TRIED]}, got "
                f"{[*np.shape(values_by_step[0])]} with the mean {float(np.mean(values_by_step[0])):.3g}; {ADVICE}"
            )
    for part in (np.s_[:2, :3], np.s_[2:, 3:]):
        alone, _ = _updates(chain, part)
        if not np.allclose(alone, [update[part] for update in whole], rtol=1e-5, atol=1e-7):
            raise ConfigError(f"optimizer: expected updates that read one element, got others of a part; {ADVICE}")
    return is_count


def _updates(chain: optax.GradientTransformation, part) -> tuple[list[np.ndarray], list[Any]]:
    """The updates of a part of an array over a few steps, and the states before, between and after them."""
    rng = np.random.default_rng(0)
    p = jnp.asarray(rng.normal(size=TRIED)[part], jnp.float32)
    state = chain.init(p)
    updates = []
    states = [state]
    for _ in range(TRIED_STEPS):
        update, state = chain.update(jnp.asarray(10 * rng.normal(size=TRIED)[part], jnp.float32), state, p)
        updates.append(np.asarray(update))
        states.append(state)
        p = optax.apply_updates(p, update)
    return updates, states
