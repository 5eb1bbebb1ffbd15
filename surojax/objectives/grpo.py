"""GRPO (Shao et al. 2024, arXiv:2402.03300): completions that a model sampled before, with how good each of them is.

With a completion's advantage A, and r = the probability of a token over that when it was sampled, a token's loss is

    -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + grpo_beta KL        KL = exp(d) - d - 1

as in TRL, where d = the log-probability under a reference, the model before training, less that under the model: the
estimator k3 (Schulman 2020). The ratio of a sequence (GSPO, arXiv:2507.18071) is the geometric mean of those of its
tokens. The losses of tokens are added up by `grpo_loss_type`:

    dapo      mean over all tokens of a step (DAPO, arXiv:2503.14476, eq. 8)
    grpo      mean over completions of the mean over their tokens
    dr_grpo   sum over tokens / max_completion_length, mean over completions (Dr. GRPO, arXiv:2503.20783)

With `router_replay` a model with experts sends each token to the experts that it was sent to when it was sampled (Ma et
al. 2025, arXiv:2510.11370), since another program may round a router's scores otherwise. Their weights are computed
anew. A reference chooses for itself.

Sampling is no part of a step, and advantages are the data's: data/rollouts.py.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from surojax.declared import AT_LEAST_0, AT_LEAST_1, BELOW_1, Facts, built, declare, names_of
from surojax.objectives.objective import (
    ADVANTAGE,
    LABELS,
    REFERENCE,
    ROUTES,
    SAMPLED,
    ObjectiveChoice,
    OfLogProbabilities,
    Sums,
    Targets,
    at_tokens,
    num_groups,
    of_sequences,
    sums_where,
)
from surojax.parallel.collectives import varying
from surojax.placement.mesh import AXES

LARGEST_LOGRATIO = 20.0  # beyond it, ratios are constant, so that they are finite


@dataclasses.dataclass(frozen=True)
class GrpoSettings:
    """The options of GRPO, by TRL's names; with grpo_ before those that dpo has for another default."""

    # grpo: by how much the probability of a token may fall below that when it was sampled, as a fraction of it
    epsilon: float = declare(0.2, BELOW_1, facts=Facts.NOTHING)
    # grpo: likewise, by how much it may rise (DAPO: 0.28); 0 = epsilon
    epsilon_high: float = declare(0.0, AT_LEAST_0, facts=Facts.NOTHING)
    # grpo: weight of the divergence from the model before training; 0 = no reference is computed
    grpo_beta: float = declare(0.0, AT_LEAST_0, facts=Facts.COST)
    # grpo: mean over "dapo" = all tokens; "grpo" = completions' means; "dr_grpo" = sums / max_completion_length
    grpo_loss_type: str = declare("dapo", choices=("dapo", "grpo", "dr_grpo"), facts=Facts.NOTHING)
    # grpo: ratios of probabilities are of each "token", or of a whole "sequence" (GSPO)
    importance_sampling_level: str = declare("token", choices=("token", "sequence"), facts=Facts.NOTHING)
    # grpo, grpo_loss_type dr_grpo: tokens that a completion has at most
    max_completion_length: int = declare(256, AT_LEAST_1, facts=Facts.NOTHING)
    # grpo, models with experts: send tokens to the experts that routed_experts of the rows name
    router_replay: bool = declare(False, facts=Facts.COST)


@dataclasses.dataclass(frozen=True)
class Grpo(OfLogProbabilities):
    """The objective of these options.

    Metrics are means over tokens with dapo, else over completions of the means over their tokens: which part of the
    ratios was clipped below and above, advantages, and the divergence.

    layers, choices: of the model, and how many experts a token is sent to in one; read with router_replay alone.
    """

    settings: GrpoSettings = GrpoSettings()
    layers: int = 0
    choices: int = 0
    reads_reference_of_tokens = True

    @property
    def targets(self) -> tuple[str, ...]:
        """See `Objective`."""
        s = self.settings
        replayed = (ROUTES,) if s.router_replay else ()
        return (LABELS, SAMPLED, ADVANTAGE, *((REFERENCE,) if s.grpo_beta else ()), *replayed)

    @property
    def widths(self) -> Mapping[str, int]:
        """See `objective.WithWidths`."""
        return {ROUTES: self.layers * self.choices}

    @property
    def metrics(self) -> tuple[str, ...]:
        """See `OfLogProbabilities`."""
        names = ("clip_ratio/low_mean", "clip_ratio/high_mean", "advantages")
        return (*names, "kl") if self.settings.grpo_beta else names

    def count(self, targets: Targets) -> jax.Array:
        """See `Objective`: tokens with dapo, else completions."""
        if self.settings.grpo_loss_type == "dapo":
            return super().count(targets)
        return num_groups(self.counted(targets), targets, 1)

    def sums(self, logprob_BS: jax.Array, targets: Targets) -> Sums:
        """See `OfLogProbabilities`."""
        s = self.settings
        targets = varying(targets, AXES)
        counted_BS = self.counted(targets)
        # Numbers of a token's whole completion, at each token, or once for a row: [B, S] or [B, 1].
        tokens = at_tokens(jnp.maximum(of_sequences(counted_BS, targets), 1.0), targets)
        advantage_BS = targets[ADVANTAGE]
        logratio_BS = jnp.where(counted_BS, logprob_BS - targets[SAMPLED], 0.0)
        if s.importance_sampling_level == "sequence":
            mean = at_tokens(of_sequences(logratio_BS, targets), targets) / tokens
            logratio_BS = jnp.broadcast_to(mean, logratio_BS.shape)
        ratio_BS = _exp(logratio_BS)
        least, most = 1 - s.epsilon, 1 + (s.epsilon_high or s.epsilon)
        low_BS = (ratio_BS < least) & (advantage_BS < 0)
        high_BS = (ratio_BS > most) & (advantage_BS > 0)
        clipped_BS = jnp.where(low_BS, least, jnp.where(high_BS, most, ratio_BS))
        losses_BS = -clipped_BS * advantage_BS
        numbers = [low_BS, high_BS, advantage_BS]
        if s.grpo_beta:
            d_BS = jnp.where(counted_BS, targets[REFERENCE] - logprob_BS, 0.0)
            kl_BS = _exp(d_BS) - d_BS - 1
            losses_BS += s.grpo_beta * kl_BS
            numbers.append(kl_BS)
        if s.grpo_loss_type == "dapo":
            tokens = 1.0
        divisor = s.max_completion_length if s.grpo_loss_type == "dr_grpo" else tokens
        return sums_where(counted_BS, self.metrics, [losses_BS / divisor, *(x_BS / tokens for x_BS in numbers)])


def _exp(x: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(x, -LARGEST_LOGRATIO, LARGEST_LOGRATIO))


def _make(values: dict[str, Any]) -> Grpo:
    """GRPO with these options."""
    return Grpo(built(GrpoSettings, values), values[LAYERS], values[CHOICES])


LAYERS, CHOICES = "model.num_hidden_layers", "model.num_experts_per_tok"
GRPO = ObjectiveChoice(_make, (*names_of(GrpoSettings), "precompute_ref_log_probs", LAYERS, CHOICES), rows="rollout")
