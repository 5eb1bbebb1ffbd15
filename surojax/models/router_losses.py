"""Auxiliary losses of routers (load balance, z-loss), and the sums over tokens that they are computed from.

They are of a whole optimizer step: of all its microbatches and devices, and of the tokens that count. A block returns
its `RouterStatistics` and the engine adds them up, so that losses do not depend on how a batch is divided.

Shape suffixes: L layers, E experts.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class RouterStatistics(NamedTuple):
    """A router's sums over tokens, float32.

    chosen_E: how many tokens chose each expert. probability_E: of each expert's probability before the choice, which is
    its part of the sum of all scores if these are sigmoids (DeepSeek-V3, eq. 19).
    squared_logsumexp: of the squared logarithm of the softmax' denominator.
    """

    chosen_E: Any
    probability_E: Any
    squared_logsumexp: Any


def planned_statistics(experts: int) -> RouterStatistics:
    """Shapes and dtypes of one layer's statistics."""
    per_expert = jax.ShapeDtypeStruct((experts,), jnp.float32)
    return RouterStatistics(per_expert, per_expert, jax.ShapeDtypeStruct((), jnp.float32))


@dataclasses.dataclass(frozen=True)
class RouterLosses:
    """The routers' losses, averaged over layers; used as `Engine.auxiliary`.

    balance: weight of E sum over experts of (choices per token) x (mean probability), which is k if the experts are
    used alike (Fedus et al. 2021, arXiv:2101.03961, eq. 4; for k choices as in transformers). z: weight of the mean of
    logsumexp(logits)^2 (Zoph et al. 2022, arXiv:2202.08906, eq. 5).
    """

    balance: float = 0.0
    z: float = 0.0

    def __call__(self, statistics: dict[str, RouterStatistics], tokens: jax.Array) -> jax.Array:
        """Computes the loss, float32 []. statistics: by segment `[L, ...]`, sums over `tokens` tokens."""
        n = jnp.maximum(tokens, 1)
        layer_losses = []
        for chosen_LE, probability_LE, squared_L in statistics.values():
            chosen_LE = jax.lax.stop_gradient(chosen_LE)
            balance_L = chosen_LE.shape[1] * jnp.sum((chosen_LE / n) * (probability_LE / n), axis=1)
            layer_losses.append(self.balance * balance_L + self.z * squared_L / n)
        return jnp.mean(jnp.concatenate(layer_losses))
