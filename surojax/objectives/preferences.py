"""Losses of pairs of answers to one prompt, of which one is preferred: DPO, IPO, ORPO and SimPO.

Each is a function of the log-probabilities of both answers under the model that is trained (the policy), and of DPO and
IPO also under a reference, the model before training. Names of options and of metrics are TRL's. A microbatch has the
chosen answer of a pair in a row, with its prompt, and the rejected one in the next row; labels are the answers' tokens.

To add one: a function from `Pairs` and `PreferenceSettings` to `Scores`, and its row in `PREFERENCES`.

P pairs of a microbatch on this device.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.declared import POSITIVE, Facts, Range, declare
from surojax.objectives.objective import REFERENCE, ObjectiveChoice, OfSequences, Sequences, Sums, sums_where

BELOW_HALF = Range(
    "0 or more and below 0.5", "0.5 says nothing about which answer is better", least=0, most=math.nextafter(0.5, 0)
)
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


@dataclasses.dataclass(frozen=True)
class PreferenceSettings:
    """The options of objectives of pairs, by TRL's names."""

    # dpo, ipo, kto, orpo, simpo: how far the model may leave its reference; less = further; the weight of orpo's odds
    beta: float = declare(0.1, POSITIVE, facts=Facts.NOTHING)
    # dpo: "sigmoid" (Rafailov et al. 2023), "hinge" (SLiC) or "ipo"
    loss_type: str = declare("sigmoid", choices=("sigmoid", "hinge", "ipo"), facts=Facts.NOTHING)
    # dpo, loss_type sigmoid: probability that a pair's answers are the wrong way round (conservative DPO)
    label_smoothing: float = declare(0.0, BELOW_HALF, facts=Facts.NOTHING)
    # dpo, ipo: the reference takes all answers for equally likely, and is not computed
    reference_free: bool = declare(False, facts=Facts.COST)
    # dpo, ipo, kto, grpo with lora: reference computed once before training, not in each step; without lora always
    precompute_ref_log_probs: bool = declare(False, facts=Facts.COST)
    # simpo: by how much the mean log-probability of the chosen answer is to be larger, times beta
    simpo_gamma: float = declare(0.5, Range("0 or more", "0 is no margin", least=0), facts=Facts.NOTHING)


class Side(NamedTuple):
    """One answer of each pair, `[P]` each.

    logprob: of the answer. tokens: of it. reference: its log-probability under the reference; 0 without one.
    """

    logprob: jax.Array
    tokens: jax.Array
    reference: jax.Array

    @property
    def logratio(self) -> jax.Array:
        """The logarithm of its probability over that under the reference."""
        return self.logprob - self.reference

    def per_token(self, x_P: jax.Array) -> jax.Array:
        """A sum over the tokens as their mean."""
        return x_P / jnp.maximum(self.tokens, 1.0)


class Scores(NamedTuple):
    """Loss of each pair, and rewards of its answers, `[P]` each. Rewards are reported only."""

    losses: jax.Array
    chosen: jax.Array
    rejected: jax.Array


def dpo(chosen: Side, rejected: Side, s: PreferenceSettings) -> Scores:
    """DPO (Rafailov et al. 2023, arXiv:2305.18290), with m = the difference of the answers' log-ratios:

    sigmoid:  -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)        e = label_smoothing
    hinge:    max(0, 1 - beta m)                                           SLiC (arXiv:2305.10425)
    ipo:      (m - 1 / (2 beta))^2, of log-ratios per token                IPO (arXiv:2310.12036, eq. 17), as in TRL
    """
    margin = chosen.logratio - rejected.logratio
    if s.loss_type == "ipo":
        margin = chosen.per_token(chosen.logratio) - rejected.per_token(rejected.logratio)
        losses = (margin - 1 / (2 * s.beta)) ** 2
    elif s.loss_type == "hinge":
        losses = jax.nn.relu(1 - s.beta * margin)
    else:
        losses = -(1 - s.label_smoothing) * jax.nn.log_sigmoid(s.beta * margin)
        losses -= s.label_smoothing * jax.nn.log_sigmoid(-s.beta * margin)
    return Scores(losses, s.beta * chosen.logratio, s.beta * rejected.logratio)


def ipo(chosen: Side, rejected: Side, s: PreferenceSettings) -> Scores:
    """DPO with loss_type ipo."""
    return dpo(chosen, rejected, dataclasses.replace(s, loss_type="ipo"))


def orpo(chosen: Side, rejected: Side, s: PreferenceSettings) -> Scores:
    """ORPO (Hong et al. 2024, arXiv:2403.07691, eq. 6): with p the probability of an answer's tokens, geometric mean,

    -log p(chosen) - beta log sigmoid(log odds(chosen) - log odds(rejected))        odds = p / (1 - p)
    """
    logprob_chosen, logprob_rejected = (side.per_token(side.logprob) for side in (chosen, rejected))
    log_odds = logprob_chosen - logprob_rejected - (log1mexp(logprob_chosen) - log1mexp(logprob_rejected))
    losses = -logprob_chosen - s.beta * jax.nn.log_sigmoid(log_odds)
    return Scores(losses, s.beta * logprob_chosen, s.beta * logprob_rejected)


def simpo(chosen: Side, rejected: Side, s: PreferenceSettings) -> Scores:
    """SimPO (Meng et al. 2024, arXiv:2405.14734, eq. 6): -log sigmoid(beta (difference of means per token) - gamma)."""
    logprob_chosen, logprob_rejected = (side.per_token(side.logprob) for side in (chosen, rejected))
    losses = -jax.nn.log_sigmoid(s.beta * (logprob_chosen - logprob_rejected) - s.simpo_gamma)
    return Scores(losses, s.beta * logprob_chosen, s.beta * logprob_rejected)


def log1mexp(x: jax.Array) -> jax.Array:
    """log(1 - exp(x)) of x < 0 (Maechler 2012); x so close to 0 that it is 1 in float32 is taken for the next below."""
    x = jnp.minimum(x, -jnp.finfo(jnp.float32).eps)
    is_near_0 = x > -jnp.log(2.0)
    near, far = jnp.where(is_near_0, x, -1.0), jnp.where(is_near_0, -1.0, x)
    return jnp.where(is_near_0, jnp.log(-jnp.expm1(near)), jnp.log1p(-jnp.exp(far)))


@dataclasses.dataclass(frozen=True)
class PairLoss:
    """A `SequenceLoss` of pairs. scores: one of the functions above."""

    scores: Callable[[Side, Side, PreferenceSettings], Scores]
    settings: PreferenceSettings = PreferenceSettings()
    reads: tuple[str, ...] = ()
    per_term: int = 2
    metrics: tuple[str, ...] = METRICS

    def __call__(self, sequences: Sequences) -> Sums:
        """See `SequenceLoss`."""
        reference = jnp.zeros_like(sequences.logprob) if sequences.reference is None else sequences.reference
        chosen, rejected = (Side(sequences.logprob[i::2], sequences.tokens[i::2], reference[i::2]) for i in (0, 1))
        scores = self.scores(chosen, rejected, self.settings)
        return pair_sums(*scores, is_pair_P=(chosen.tokens > 0) | (rejected.tokens > 0))


def pair_sums(losses_P: jax.Array, chosen_P: jax.Array, rejected_P: jax.Array, is_pair_P: jax.Array) -> Sums:
    """The sums of losses and `METRICS` from the rewards of both answers. is_pair_P: False of what fills up a batch."""
    margins_P = chosen_P - rejected_P
    numbers = (losses_P, chosen_P, rejected_P, margins_P, margins_P > 0)
    return sums_where(is_pair_P, METRICS, numbers)


def choice(scores: Callable[..., Scores], *options: str, has_reference: bool = False) -> ObjectiveChoice:
    """Makes the `ObjectiveChoice` of a loss of pairs. options: fields of `PreferenceSettings` that the loss reads."""

    def make(values: dict[str, Any]) -> OfSequences:
        settings = PreferenceSettings(**values)
        reads = (REFERENCE,) if has_reference and not settings.reference_free else ()
        return OfSequences(PairLoss(scores, settings, reads))

    return ObjectiveChoice(make, options, rows="preference", together=2)


OF_REFERENCE = ("reference_free", "precompute_ref_log_probs")
PREFERENCES = {
    "dpo": choice(dpo, "beta", "loss_type", "label_smoothing", *OF_REFERENCE, has_reference=True),
    "ipo": choice(ipo, "beta", *OF_REFERENCE, has_reference=True),
    "orpo": choice(orpo, "beta"),
    "simpo": choice(simpo, "beta", "simpo_gamma"),
}
