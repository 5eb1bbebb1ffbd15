"""Distillation: a student learns the next-token distributions of a teacher, which labelled its data before.

A label of a token has the teacher's most likely next tokens, their log-probabilities, and that of all other tokens
together. Divergences are between distributions of so many tokens and one class for the rest, so that they are 0 only
if the student agrees on each of them and on the rest's sum; if a label has the whole vocabulary they are exact.

With logits z of the student, T = distill_temperature, w = distill_weight, p the teacher's label, which was made from
its logits / T, and s = softmax(z / T) summed up over the same classes:

    loss = (1 - w) CE(softmax(z), next token) + w T^2 KL        T^2: Hinton et al. 2015, arXiv:1503.02531, section 2
    forward  KL(p, s) = sum p (log p - log s)      d / d(z / T) of token j in class c:  s_j - p_c (s_j / s_c)
    reverse  KL(s, p) = sum s (log s - log p)                                           s_j (log s_c - log p_c - KL)

forward: the student covers all that its teacher would say (generalised KD's beta = 0 in TRL); reverse: it keeps to
what is likely for the teacher (MiniLLM, Gu et al. 2023, arXiv:2306.08543; beta = 1).

Loss and gradients are computed for one slice of tokens at a time, see `objective.py`, whose shape suffixes these are;
K tokens of a label.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from surojax.declared import AT_LEAST_0, AT_LEAST_1, FRACTION, POSITIVE, Facts, at_most, declare
from surojax.models.model import Model
from surojax.objectives.objective import (
    LABELS,
    TEACHER,
    TEACHER_IDS,
    Axes,
    CrossEntropy,
    OfLabels,
    Slice,
    Sums,
    Targets,
    logits_of,
    through_head,
)
from surojax.parallel.collectives import device_number, varying
from surojax.placement.mesh import AXES, BATCH

NOTHING = -1e30  # logarithm of the probability of no token, finite, so that 0 times it is 0


@dataclasses.dataclass(frozen=True)
class DistillSettings:
    """The options of distillation."""

    # distill: folder of a teacher's labels, see docs/distillation.md
    distill_path: str = declare("", facts=Facts.NOTHING)
    # distill: the loss is this x KL x temperature^2 + (1 - this) x cross-entropy
    distill_weight: float = declare(0.5, FRACTION, facts=Facts.NOTHING)
    # distill: teacher's and student's logits are divided by this; labels are made for one
    distill_temperature: float = declare(1.0, POSITIVE, facts=Facts.NOTHING)
    # distill: "forward" = KL(teacher, student); "reverse" = KL(student, teacher)
    distill_kl: str = declare("forward", choices=("forward", "reverse"), facts=Facts.COST)
    # distill: most likely tokens in a label of a token, beside one class for all others
    distill_top_k: int = declare(64, AT_LEAST_1, at_most(2**20), facts=Facts.COST)
    # distill: the teacher's hidden_size: labels are its last hidden states, not likely tokens; 0: likely tokens
    distill_hidden_size: int = declare(0, AT_LEAST_0, at_most(2**20), facts=Facts.COST)


@dataclasses.dataclass(frozen=True)
class Distillation(OfLabels):
    """An `Objective`: cross-entropy mixed with a divergence from a teacher, of the tokens with a label >= 0.

    weight, temperature: w and T, see above. top_k: K.
    """

    weight: float = 0.5
    temperature: float = 1.0
    kl: Literal["forward", "reverse"] = "forward"
    top_k: int = 64
    targets: tuple[str, ...] = (LABELS, TEACHER_IDS, TEACHER)

    @property
    def evaluated(self) -> CrossEntropy:
        """The objective of evaluations: cross-entropy, which needs no labels and compares with other runs."""
        return CrossEntropy()

    @property
    def widths(self) -> Mapping[str, int]:
        """See `objective.WithWidths`."""
        return {TEACHER_IDS: self.top_k, TEACHER: self.top_k + 1}

    def loss_and_gradients(
        self, model: Model, used: dict, trained: Sequence[str], x_ND: jax.Array, targets: Targets, scale, axes: Axes
    ) -> tuple[jax.Array, dict, jax.Array]:
        """See `Objective`."""

        def of_logits(logits_Mv: jax.Array, tokens: Slice) -> tuple[jax.Array, jax.Array]:
            x = self.compared(logits_Mv, used, tokens, axes)
            d_Mv = (1 - self.weight) * x.d_cross_entropy + self.weight * self.temperature * x.d_divergence
            return self._summed(x, tokens), jnp.where((tokens.targets[LABELS] >= 0)[:, None], d_Mv, 0.0) * scale

        return through_head(model, used, trained, x_ND, targets, axes, of_logits)

    def loss(self, model: Model, outer: dict, x_ND: jax.Array, targets: Targets, axes: Axes) -> jax.Array:
        """See `Objective`."""
        logits_Mv, tokens = logits_of(model, outer, x_ND, targets, axes)
        return self._summed(self.compared(logits_Mv, outer, tokens, axes), tokens)

    def _summed(self, x: "Compared", tokens: Slice) -> jax.Array:
        """This device's term of the summed loss."""
        losses_M = (1 - self.weight) * x.cross_entropy + self.weight * self.temperature**2 * x.divergence
        return jnp.sum(jnp.where(tokens.mine & (tokens.targets[LABELS] >= 0), losses_M, 0.0))

    def compared(self, logits_Mv: jax.Array, outer: dict, tokens: Slice, axes: Axes) -> "Compared":
        """Compares the student's distributions with the teacher's labels, by the classes of these. outer: not read."""
        labels_M, ids_MK, log_p = (tokens.targets[name] for name in (LABELS, TEACHER_IDS, TEACHER))
        z_Mv = logits_Mv.astype(jnp.float32)
        words = z_Mv.shape[1]
        first = first_column(z_Mv, axes)
        here_MK = (ids_MK >= first) & (ids_MK < first + words)
        columns_MK = jnp.where(here_MK, ids_MK - first, words + jnp.arange(here_MK.shape[1]))  # no two are equal
        of_ids_MK = jnp.take_along_axis(z_Mv, jnp.minimum(columns_MK, words - 1), axis=1)
        of_ids_MK = summed_over(jnp.where(here_MK, of_ids_MK, 0.0), axes) / self.temperature
        scaled_Mv = z_Mv / self.temperature
        lse_of_rest_M = lse(_with_values(scaled_Mv, columns_MK, jnp.full_like(of_ids_MK, NOTHING)), axes)
        lse_M = jnp.logaddexp(jax.nn.logsumexp(of_ids_MK, axis=1), lse_of_rest_M)
        # Log-probabilities of the classes.
        log_s = jnp.concatenate([of_ids_MK, lse_of_rest_M[:, None]], axis=1) - lse_M[:, None]
        s_Mv = jnp.exp(scaled_Mv - lse_M[:, None])
        if self.kl == "forward":
            kl_M = -jnp.sum(jnp.exp(log_p) * (log_s - log_p), axis=1)
            d_rest_Mv = s_Mv - jnp.exp(scaled_Mv - (lse_of_rest_M - log_p[:, -1])[:, None])
            d_ids_MK = (jnp.exp(log_s) - jnp.exp(log_p))[:, :-1]
        else:
            kl_M = jnp.sum(jnp.exp(log_s) * (log_s - log_p), axis=1)
            d_rest_Mv = s_Mv * (log_s - log_p - kl_M[:, None])[:, -1:]
            d_ids_MK = (jnp.exp(log_s) * (log_s - log_p - kl_M[:, None]))[:, :-1]
        d_kl_Mv = _with_values(d_rest_Mv, columns_MK, d_ids_MK)
        lse_of_logits_M = lse_M if self.temperature == 1 else lse(z_Mv, axes)
        is_label_Mv = is_label(z_Mv, labels_M, axes)
        nats_M = lse_of_logits_M - summed_over(jnp.sum(jnp.where(is_label_Mv, z_Mv, 0.0), axis=1), axes)
        return Compared(nats_M, jnp.exp(z_Mv - lse_of_logits_M[:, None]) - is_label_Mv, kl_M, d_kl_Mv)


class Compared(NamedTuple):
    """A student's distributions of a slice of tokens beside its teacher's, float32.

    cross_entropy, divergence: a number for each token `[M]`. d_cross_entropy: the gradient of cross_entropy by this
    device's logits `[M, v]`. d_divergence: the gradient of divergence by logits / temperature `[M, v]`.
    """

    cross_entropy: jax.Array
    d_cross_entropy: jax.Array
    divergence: jax.Array
    d_divergence: jax.Array


def is_label(z_Mv: jax.Array, labels_M: jax.Array, axes: Axes) -> jax.Array:
    """Marks the column of each token's label in this device's part of the vocabulary, bool `[M, v]`."""
    return jax.lax.broadcasted_iota(jnp.int32, z_Mv.shape, 1) == (labels_M - first_column(z_Mv, axes))[:, None]


def first_column(z_Mv: jax.Array, axes: Axes) -> jax.Array | int:
    """The number in the vocabulary of this device's first column."""
    return device_number(*axes)[0] * z_Mv.shape[1] if axes else 0


def _with_values(x_Mv: jax.Array, columns_MK: jax.Array, values_MK: jax.Array) -> jax.Array:
    rows_M1 = jnp.arange(x_Mv.shape[0])[:, None]
    return x_Mv.at[rows_M1, columns_MK].set(values_MK, mode="drop", unique_indices=True)


def summed_over(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum over the devices of these axes."""
    return jax.lax.psum(x, axes) if axes else x


def lse(x_Mv: jax.Array, axes: Axes) -> jax.Array:
    """Log-sum-exp `[M]` over the vocabulary."""
    top_M = jnp.max(x_Mv, axis=1)
    top_M = jax.lax.pmax(top_M, axes) if axes else top_M
    return top_M + jnp.log(summed_over(jnp.sum(jnp.exp(x_Mv - top_M[:, None]), axis=1), axes))


def label(logits_NV: jax.Array, top_k: int, temperature: float) -> tuple[jax.Array, jax.Array]:
    """A teacher's labels of a slice of tokens: (`TEACHER_IDS` int32 `[N, K]`, `TEACHER` float32 `[N, K + 1]`)."""
    z_NV = logits_NV.astype(jnp.float32) / temperature
    logits_NK, ids_NK = jax.lax.top_k(z_NV, top_k)
    lse_of_rest_N = lse(_with_values(z_NV, ids_NK, jnp.full_like(logits_NK, NOTHING)), ())
    lse_N = jnp.logaddexp(jax.nn.logsumexp(logits_NK, axis=1), lse_of_rest_N)
    return ids_NK, jnp.concatenate([logits_NK, lse_of_rest_N[:, None]], axis=1) - lse_N[:, None]


def likely_tokens(top_k: int, temperature: float, model: Model, outer: dict, x_ND: jax.Array) -> dict[str, jax.Array]:
    """A teacher's labels of a slice of tokens, from its last hidden states: `TEACHER_IDS`, `TEACHER`, see `label`."""
    logits_NV, _ = logits_of(model, outer, x_ND, {}, ())
    return dict(zip((TEACHER_IDS, TEACHER), label(logits_NV, top_k, temperature), strict=True))


@dataclasses.dataclass(frozen=True)
class Labelling(OfLabels):
    """In an evaluation in place of an `Objective`: a teacher's labels of each token, by the names of their arrays.

    of_slice: (model, weights of its outer layers, x `[N, D]`) -> labels `[N, ...]` of a slice of tokens by name. The
    vocabulary is whole on each device, and so are sequences.
    """

    of_slice: Callable[[Model, dict, jax.Array], dict[str, jax.Array]]
    targets: tuple[str, ...] = (LABELS,)

    def sums(self, model: Model, outer: dict, x_BSD: jax.Array, chunks: int) -> Sums:
        """Labels `[B, S, ...]` of all devices' sequences; a device has zeros for the other devices' sequences."""
        x_CND = x_BSD.reshape(chunks, -1, x_BSD.shape[-1])
        number, devices = device_number(*BATCH)
        rows = x_BSD.shape[0]

        def of_all_devices(x: jax.Array) -> jax.Array:
            mine = x.reshape(rows, x_BSD.shape[1], -1)
            zeros = varying(jnp.zeros((devices * rows, *mine.shape[1:]), mine.dtype), AXES)
            return jax.lax.dynamic_update_slice_in_dim(zeros, varying(mine, AXES), number * rows, 0)

        of_slices = jax.lax.map(lambda x_ND: self.of_slice(model, outer, x_ND), x_CND)
        return jax.tree.map(of_all_devices, of_slices)


DISTILL = "distill"
