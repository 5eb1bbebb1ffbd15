"""KTO (Ethayarajh et al. 2024, arXiv:2402.01306): answers that are rated alone, each as desirable or not.

With r = the log-ratio of an answer to its reference, and z = the mean log-ratio of answers to prompts that are not
theirs, at least 0, of which no gradient is computed,

    desirable_weight (1 - sigmoid(beta (r - z)))        of a desirable answer
    undesirable_weight (1 - sigmoid(beta (z - r)))      of another one

as in TRL. z estimates the divergence from the reference. A microbatch has an answer in a row and in the next row the
same prompt with the answer of another example, so z is the mean over the second rows of all devices' microbatch.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from surojax.declared import POSITIVE, Facts, declare
from surojax.objectives.objective import DESIRABLE, REFERENCE, ObjectiveChoice, OfSequences, Sequences, Sums, sums_where
from surojax.parallel.collectives import add_up
from surojax.placement.mesh import BATCH


@dataclasses.dataclass(frozen=True)
class KtoSettings:
    """The options of KTO besides beta, by TRL's names."""

    # kto: factor of the losses of desirable answers; it and undesirable_weight balance how many of each there are
    desirable_weight: float = declare(1.0, POSITIVE, facts=Facts.NOTHING)
    # kto: factor of the losses of other answers
    undesirable_weight: float = declare(1.0, POSITIVE, facts=Facts.NOTHING)


@dataclasses.dataclass(frozen=True)
class KtoLoss:
    """A `SequenceLoss` of an answer and, in the next row, a mismatched one.

    Metrics are means over answers: the divergence z; by how much beta r is on the right side of beta z, and how often.
    """

    beta: float = 0.1
    settings: KtoSettings = KtoSettings()
    per_term: int = 2
    metrics: tuple[str, ...] = ("kl", "rewards/margins", "rewards/accuracies")
    reads: tuple[str, ...] = (REFERENCE, DESIRABLE)

    def __call__(self, sequences: Sequences) -> Sums:
        """See `SequenceLoss`."""
        assert sequences.reference is not None and sequences.desirable is not None
        logratio_B = sequences.logprob - sequences.reference
        is_answer_P = sequences.tokens[::2] > 0
        kl = _mean(jax.lax.stop_gradient(logratio_B[1::2]), sequences.tokens[1::2] > 0)
        kl = jnp.maximum(kl, 0.0)
        is_desirable_P = sequences.desirable[::2] > 0
        margins_P = jnp.where(is_desirable_P, 1.0, -1.0) * self.beta * (logratio_B[::2] - kl)
        weights_P = jnp.where(is_desirable_P, self.settings.desirable_weight, self.settings.undesirable_weight)
        losses_P = weights_P * jax.nn.sigmoid(-margins_P)  # 1 - sigmoid(x) = sigmoid(-x)
        numbers = (losses_P, jnp.broadcast_to(kl, losses_P.shape), margins_P, margins_P > 0)
        return sums_where(is_answer_P, self.metrics, numbers)


def _mean(x_P: jax.Array, counted_P: jax.Array) -> jax.Array:
    """The mean of the entries that are counted, of all devices; 0 if there is none."""
    total, count = add_up((jnp.sum(jnp.where(counted_P, x_P, 0.0)), jnp.sum(counted_P, dtype=jnp.float32)), *BATCH)
    return total / jnp.maximum(count, 1.0)


def _make(values: dict[str, Any]) -> OfSequences:
    """KTO with these options."""
    settings = KtoSettings(values["desirable_weight"], values["undesirable_weight"])
    return OfSequences(KtoLoss(values["beta"], settings))


KTO = ObjectiveChoice(
    _make, ("beta", "desirable_weight", "undesirable_weight", "precompute_ref_log_probs"), rows="unpaired", together=2
)
