"""Reward models (Ouyang et al. 2022, arXiv:2203.02155): how good an answer is, as one number.

The model has a head of one number (`num_labels`). The reward of a prompt with its answer is this number at the last
token. With r and r' = the rewards of the chosen and of the rejected answer, the loss of a pair is

    -log sigmoid(r - r' - margin) + center_rewards_coefficient (r + r')^2

as in TRL. margin is the row's, by how much better the chosen answer is; 0 if rows have none. The second term keeps
rewards near 0 (Eisenstein et al. 2023, arXiv:2312.09244), since the first one knows their difference alone.

Shape suffixes: N tokens of a slice on this device, D hidden size, B rows, P pairs of rows, n sequences of a row, S
positions.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from surojax.declared import AT_LEAST_0, Facts, declare, names_of
from surojax.models.model import Model
from surojax.objectives.objective import (
    LABELS,
    MARGIN,
    SCORED,
    WEIGHTS,
    Axes,
    ObjectiveChoice,
    OfLogProbabilities,
    Sums,
    Targets,
    num_groups,
    of_sequences,
    once,
)
from surojax.objectives.preferences import METRICS, pair_sums

REWARD = "reward"


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    """The options of a reward model's loss, by TRL's names."""

    # reward: weight of the square of the sum of both rewards, which keeps them near 0 (0.01 is usual)
    center_rewards_coefficient: float = declare(0.0, AT_LEAST_0, facts=Facts.NOTHING)


class RewardHead:
    """The `OfTokens` of a head of one number: this number, computed in float32 of y and the head's matrix."""

    def value(self, model: Model, outer: dict, x_ND: jax.Array, targets: Targets, axes: Axes) -> jax.Array:
        """See `OfTokens`. The head is on all devices, also if rows of the vocabulary are sharded over these axes."""
        y_ND = model.final(outer, x_ND)
        over_channels = (((1,), (1,)), ((), ()))
        scores_N1 = jax.lax.dot_general(y_ND, outer[model.head], over_channels, preferred_element_type=jnp.float32)
        return scores_N1[:, 0]

    def loss_and_gradients(
        self, model: Model, used: dict, trained: Sequence[str], x_ND: jax.Array, targets: Targets, scale, axes: Axes
    ) -> tuple[jax.Array, dict, jax.Array]:
        """See `OfTokens`."""
        value_N, vjp = jax.vjp(lambda used, x_ND: self.value(model, used, x_ND, targets, axes), used, x_ND)
        d_used, dx_ND = vjp(-scale * targets[WEIGHTS])
        return -jnp.sum(value_N), {name: d_used[name] for name in trained}, dx_ND


@dataclasses.dataclass(frozen=True)
class Reward(OfLogProbabilities):
    """The objective of these options. Metrics are means over pairs, as for preferences."""

    settings: RewardSettings = RewardSettings()
    targets: tuple[str, ...] = (LABELS, SCORED, MARGIN)
    metrics: tuple[str, ...] = METRICS
    of_tokens = RewardHead()

    def count(self, targets: Targets) -> jax.Array:
        """See `Objective`: pairs, without those that only fill up a batch."""
        return num_groups(self.counted(targets), targets, 2)

    def sums(self, score_BS: jax.Array, targets: Targets) -> Sums:
        """See `OfLogProbabilities`, of scores in place of log-probabilities."""
        reward_Bn = of_sequences(jnp.where(targets[SCORED] > 0, score_BS, 0.0), targets)
        margin_Bn = of_sequences(targets[MARGIN], targets)
        tokens_Bn = of_sequences(self.counted(targets), targets)
        chosen_Pn, rejected_Pn = reward_Bn[::2], reward_Bn[1::2]
        losses_Pn = -jax.nn.log_sigmoid(chosen_Pn - rejected_Pn - margin_Bn[::2])
        losses_Pn += self.settings.center_rewards_coefficient * (chosen_Pn + rejected_Pn) ** 2
        return once(pair_sums(losses_Pn, chosen_Pn, rejected_Pn, (tokens_Bn[::2] > 0) | (tokens_Bn[1::2] > 0)))


def _make(values: dict[str, Any]) -> Reward:
    """The objective with these options."""
    return Reward(RewardSettings(**values))


CHOICE = ObjectiveChoice(_make, names_of(RewardSettings), rows="preference", together=2, num_labels=1)
