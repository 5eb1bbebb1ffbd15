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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.declared import names_of
from surojax.models.linear import linear
from surojax.models.model import Model
from surojax.objectives.distillation import Distillation, DistillSettings, lse
from surojax.objectives.objective import (
    LABELS,
    TEACHER_STATES,
    Axes,
    ObjectiveChoice,
    Targets,
    final_gradients,
    final_norm,
    gather_slice,
    head_gradients,
    head_logits,
)
from surojax.parallel.collectives import device_number
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
        student_weights = {name: w for name, w in used.items() if name != TEACHER_HEAD}
        y_ND, final_vjp, table_vD = final_norm(model, student_weights, x_ND)
        teacher, y_MD = _TeacherSlice.gathered(y_ND, used[TEACHER_HEAD], targets, axes)
        logits_Mv, capped_vjp = head_logits(model, y_MD, table_vD)
        both = _Both.of(self, logits_Mv, teacher, axes)
        d_logits_Mv = capped_vjp((both.d_logits(self, teacher) * scale).astype(table_vD.dtype))
        d_table, dy_MD = head_gradients(model, trained, d_logits_Mv, y_MD, table_vD, None)
        return both.loss(self, teacher), *final_gradients(final_vjp, d_table, dy_MD, trained, axes)

    def loss(self, model: Model, outer: dict, x_ND: jax.Array, targets: Targets, axes: Axes) -> jax.Array:
        """See `Objective`."""
        teacher, y_MD = _TeacherSlice.gathered(model.final(outer, x_ND), outer[TEACHER_HEAD], targets, axes)
        logits_Mv, _ = head_logits(model, y_MD, outer[model.head])
        return _Both.of(self, logits_Mv, teacher, axes).loss(self, teacher)


class _TeacherSlice(NamedTuple):
    """A slice of tokens: of all devices that have parts of the vocabulary.

    labels: `[M]`. logits: the teacher's, of this device's part of the vocabulary, float32 `[M, v]`. mine: which of the
    tokens are of this device, `[M]`.
    """

    labels: jax.Array
    logits: jax.Array
    mine: jax.Array

    @classmethod
    def gathered(
        cls, y_ND: jax.Array, head_vE: jax.Array, targets: Targets, axes: Axes
    ) -> "tuple[_TeacherSlice, jax.Array]":
        """(the slice, the student's activations `[M, D]`)."""
        labels_N, states_NE = targets[LABELS], targets[TEACHER_STATES].astype(head_vE.dtype)
        if not axes:
            return cls(labels_N, _logits(states_NE, head_vE), jnp.ones(labels_N.shape, bool)), y_ND
        y_MD, labels_M, mine_M = gather_slice(axes, y_ND, labels_N)
        states_ME = jax.lax.all_gather(states_NE, axes, axis=0, tiled=True)
        return cls(labels_M, _logits(states_ME, head_vE), mine_M), y_MD


class _Both(NamedTuple):
    """The student's distributions of a slice of tokens beside the teacher's, float32.

    logp, logs: log-probabilities of teacher and student at the temperature, of this device's part of the vocabulary,
    `[M, v]`. divergence: of whole distributions `[M]`. probs: the student's probabilities without the temperature
    `[M, v]`. is_label: whether a column is the token's label `[M, v]`. cross_entropy: of the student, in nats `[M]`.
    """

    logp: jax.Array
    logs: jax.Array
    divergence: jax.Array
    probs: jax.Array
    is_label: jax.Array
    cross_entropy: jax.Array

    @classmethod
    def of(cls, objective: StateDistillation, logits_Mv: jax.Array, teacher: _TeacherSlice, axes: Axes) -> "_Both":
        """Computes the distributions from the logits of student and teacher."""
        z_Mv = logits_Mv.astype(jnp.float32)
        logp_Mv, logs_Mv = (_log_softmax(x / objective.temperature, axes) for x in (teacher.logits, z_Mv))
        a_Mv, b_Mv = (logp_Mv, logs_Mv) if objective.kl == "forward" else (logs_Mv, logp_Mv)
        divergence_M = _sum(jnp.exp(a_Mv) * (a_Mv - b_Mv), axes)
        logprobs_Mv = logs_Mv if objective.temperature == 1 else _log_softmax(z_Mv, axes)
        words = z_Mv.shape[1]
        first = device_number(*axes)[0] * words if axes else 0
        is_label_Mv = jax.lax.broadcasted_iota(jnp.int32, z_Mv.shape, 1) == (teacher.labels - first)[:, None]
        nats_M = -_sum(jnp.where(is_label_Mv, logprobs_Mv, 0.0), axes)
        return cls(logp_Mv, logs_Mv, divergence_M, jnp.exp(logprobs_Mv), is_label_Mv, nats_M)

    def loss(self, objective: StateDistillation, teacher: _TeacherSlice) -> jax.Array:
        """This device's term of the summed loss."""
        losses_M = (1 - objective.weight) * self.cross_entropy
        losses_M += objective.weight * objective.temperature**2 * self.divergence
        return jnp.sum(jnp.where(teacher.mine & (teacher.labels >= 0), losses_M, 0.0))

    def d_logits(self, objective: StateDistillation, teacher: _TeacherSlice) -> jax.Array:
        """The gradient of the sum of losses by this device's logits, float32 `[M, v]`."""
        s_Mv = jnp.exp(self.logs)
        if objective.kl == "forward":
            d_kl_Mv = s_Mv - jnp.exp(self.logp)
        else:
            d_kl_Mv = s_Mv * (self.logs - self.logp - self.divergence[:, None])
        d_Mv = (1 - objective.weight) * (self.probs - self.is_label)
        d_Mv += objective.weight * objective.temperature * d_kl_Mv
        return jnp.where((teacher.labels >= 0)[:, None], d_Mv, 0.0)


def _logits(states_ME: jax.Array, head_vE: jax.Array) -> jax.Array:
    return linear(states_ME, head_vE).astype(jnp.float32)


def _log_softmax(z_Mv: jax.Array, axes: Axes) -> jax.Array:
    return z_Mv - lse(z_Mv, axes)[:, None]


def _sum(x_Mv: jax.Array, axes: Axes) -> jax.Array:
    """The sum `[M]` over the vocabulary."""
    x_M = jnp.sum(x_Mv, axis=1)
    return jax.lax.psum(x_M, axes) if axes else x_M


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
