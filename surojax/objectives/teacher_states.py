"""Distillation from a teacher's last hidden states: the divergence of the whole distributions of the next token.

A token's label is the teacher's last hidden state, after the final norm. The step has the matrix `[V, E]` of the
teacher's head beside the student's outer layers: sharded over the vocabulary as the student's head, and not trained. It
computes the logits of both models for a slice of tokens. So a label takes E numbers, whatever the vocabulary, and the
temperature need not be known when labels are made. The loss is that of `Distillation`, with a class for each token of
the vocabulary.

Shape suffixes as in `objective.py`; E channels of the teacher.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from surojax.declared import names_of
from surojax.models.linear import linear
from surojax.models.model import Model
from surojax.objectives.distillation import Compared, Distillation, DistillSettings, is_label, lse, summed_over
from surojax.objectives.objective import LABELS, TEACHER_STATES, Axes, ObjectiveChoice, Slice, Targets
from surojax.placement.param import VOCABULARY, Kind, Param

TEACHER_HEAD = "teacher_head"  # the name of the matrix among the outer parameters


def with_teacher_head(model: Model, channels: int) -> Model:
    """Returns the model with a teacher's head `[V, channels]`, frozen, among its outer parameters; zeros at first."""
    shape = (model.vocab_size, channels)
    param = Param(TEACHER_HEAD, shape, (VOCABULARY, "embed"), Kind.TABLE, trainable=False, adapter=True)
    return dataclasses.replace(
        model,
        outer_params=model.outer_params | {TEACHER_HEAD: param},
        head_uses=(*model.head_uses, TEACHER_HEAD),
        init_outer=lambda seed: model.init_outer(seed) | {TEACHER_HEAD: jnp.zeros(shape)},
        rebuild=lambda compute: with_teacher_head(model.rebuild(compute), channels),
    )


@dataclasses.dataclass(frozen=True)
class StateDistillation(Distillation):
    """A `Distillation` of whole distributions. channels: E; top_k is not read."""

    channels: int = 0
    targets: tuple[str, ...] = (LABELS, TEACHER_STATES)

    @property
    def widths(self) -> Mapping[str, int]:
        """See `objective.WithWidths`."""
        return {TEACHER_STATES: self.channels}

    def loss_and_gradients(
        self, model: Model, used: dict, trained: Sequence[str], x_ND: jax.Array, targets: Targets, scale, axes: Axes
    ) -> tuple[jax.Array, dict, jax.Array]:
        """See `Objective`."""
        return super().loss_and_gradients(model, used, trained, x_ND, _as_sent(targets, used), scale, axes)

    def loss(self, model: Model, outer: dict, x_ND: jax.Array, targets: Targets, axes: Axes) -> jax.Array:
        """See `Objective`."""
        return super().loss(model, outer, x_ND, _as_sent(targets, outer), axes)

    def compared(self, logits_Mv: jax.Array, outer: dict, tokens: Slice, axes: Axes) -> Compared:
        """Compares the student's distributions with the teacher's. outer: with the teacher's head."""
        z_Mv = logits_Mv.astype(jnp.float32)
        of_teacher_Mv = linear(tokens.targets[TEACHER_STATES], outer[TEACHER_HEAD]).astype(jnp.float32)
        log_p, log_s = (_log_softmax(x / self.temperature, axes) for x in (of_teacher_Mv, z_Mv))
        s_Mv = jnp.exp(log_s)
        if self.kl == "forward":
            kl_M = _over_vocabulary(jnp.exp(log_p) * (log_p - log_s), axes)
            d_kl_Mv = s_Mv - jnp.exp(log_p)
        else:
            kl_M = _over_vocabulary(s_Mv * (log_s - log_p), axes)
            d_kl_Mv = s_Mv * (log_s - log_p - kl_M[:, None])
        logprobs_Mv = log_s if self.temperature == 1 else _log_softmax(z_Mv, axes)
        is_label_Mv = is_label(z_Mv, tokens.targets[LABELS], axes)
        nats_M = -_over_vocabulary(jnp.where(is_label_Mv, logprobs_Mv, 0.0), axes)
        return Compared(nats_M, jnp.exp(logprobs_Mv) - is_label_Mv, kl_M, d_kl_Mv)


def _as_sent(targets: Targets, outer: dict) -> Targets:
    """The targets with states in the dtype of the teacher's head, in which devices send them to each other."""
    return targets | {TEACHER_STATES: targets[TEACHER_STATES].astype(outer[TEACHER_HEAD].dtype)}


def _log_softmax(z_Mv: jax.Array, axes: Axes) -> jax.Array:
    return z_Mv - lse(z_Mv, axes)[:, None]


def _over_vocabulary(x_Mv: jax.Array, axes: Axes) -> jax.Array:
    """The sum `[M]` over the vocabulary."""
    return summed_over(jnp.sum(x_Mv, axis=1), axes)


def last_states(model: Model, outer: dict, x_ND: jax.Array) -> dict[str, jax.Array]:
    """A teacher's labels of a slice of tokens: `TEACHER_STATES` `[N, E]`, normed for its head."""
    return {TEACHER_STATES: model.final(outer, x_ND)}


def _make(values: Mapping[str, Any]) -> Distillation:
    """The objective of these options: of likely tokens, or of last hidden states."""
    s = DistillSettings(**values)
    options = s.distill_weight, s.distill_temperature, s.distill_kl, s.distill_top_k
    if s.distill_hidden_size:
        return StateDistillation(*options, channels=s.distill_hidden_size)  # pyright: ignore
    return Distillation(*options)  # pyright: ignore


CHOICE = ObjectiveChoice(_make, names_of(DistillSettings))
