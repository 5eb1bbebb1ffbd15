"""What training minimises, as a function of the last hidden states and of a batch's arrays beside its inputs.

An objective names these arrays and computes loss and gradients for a slice of tokens, so that the logits of one slice
are in memory at a time (step/outer.py has the loop). Nothing else in a step reads labels. An `Objective` is a sum
over tokens. An `OfLogProbabilities` is a function of the log-probabilities of all labels, and an `OfSequences` of their
sums over sequences: a first sweep over the slices computes them, and its gradient by them is a weight for each token of
the cross-entropy, whose gradients a second sweep computes. Another head has another number of each token in place of
the log-probability (rewards.py). objectives.py has those that a config can name.

A sequence of such a loss is a row of a batch, or with `STARTS` one of the documents of a packed row. What is of
sequences has the shape `[B, n]`: n = 1, or n = S, where a document's number is at its first position and all others
are 0. Groups of sequences (both answers of a pair) are in rows next to each other, at the same positions.

The head's matrix is replicated, or its rows are sharded over mesh axes, see step/outer.py. Shape suffixes: N tokens of
a slice on this device, M tokens of a slice on all devices of the vocabulary's axes, D hidden size, V vocabulary, v rows
of the vocabulary on one device, B rows, n sequences of a row, S positions of whole rows, s of this device's part.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from pallas_kernels import cross_entropy as kernel
from pallas_kernels.manual_axes import mark_varying, varying_axes
from surojax.models.linear import linear
from surojax.models.loss import sharded_cross_entropy, sharded_logprob
from surojax.models.model import Model
from surojax.models.operations import softcapped
from surojax.numerics.ordered_sums import add_rows
from surojax.parallel.collectives import add_up, device_number, varying
from surojax.placement.mesh import AXES, BATCH, CONTEXT, PIPELINE, TENSOR

type Axes = tuple[str, ...]  # mesh axes over which the vocabulary is sharded; () if every device has all of it
type Targets = dict[str, jax.Array]  # an objective's arrays by name, an entry for each token, or a row of several
type Sums = dict[str, jax.Array]  # "loss", and what else an objective adds up over its terms, float32

LABELS = "labels"
WEIGHTS = "weights"  # a factor of each token's term in the gradients, float32; not an array of a batch
REFERENCE = "reference"  # log-probabilities of the labels by another model; or their sum over a sequence at one of them
TEACHER = "teacher"  # log-probabilities of `TEACHER_IDS` by a teacher, and last of all other tokens together
TEACHER_IDS = "teacher_ids"
TEACHER_STATES = "teacher_states"  # a teacher's last hidden states, normed for its head
DESIRABLE = "desirable"  # of an answer that is rated alone: above 0 a good one, below 0 a bad one
SAMPLED = "sampled"  # log-probability of a label by the model that sampled it
ROUTES = "routes"  # numbers of the experts that a token was sent to, for each layer of the model; not of a label
ADVANTAGE = "advantage"  # of a label: by how much its completion is better than others of its prompt
SCORED = "scored"  # 1 at the last token of a sequence, 0 elsewhere
STARTS = "starts"  # position in its row at which each token's document starts, in packed rows; of no objective's names
MARGIN = "margin"  # by how much the chosen answer of a pair is better, at one of its labels
# Arrays of a batch that are float32; all others are int32.
FLOATS = (REFERENCE, TEACHER, TEACHER_STATES, DESIRABLE, SAMPLED, ADVANTAGE, MARGIN, ROUTES)
ONE_SEQUENCE = (PIPELINE, CONTEXT, *TENSOR)  # axes whose devices have parts of the same sequences


class Objective(Protocol):
    """A loss that is a sum over tokens, divided by the number of its terms."""

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the arrays `[A, B, S]` of a batch that the loss reads."""
        ...

    def counted(self, targets: Targets) -> jax.Array:
        """Whether each token has a term, bool, of the arrays' shape."""
        ...

    def count(self, targets: Targets) -> jax.Array:
        """The number of terms, int32 []."""
        ...

    def loss_and_gradients(
        self, model: Model, used: dict, trained: Sequence[str], x_ND: jax.Array, targets: Targets, scale, axes: Axes
    ) -> tuple[jax.Array, dict, jax.Array]:
        """(summed loss that is reported, gradients of `trained`, gradient of x) of a slice of tokens.

        used: the outer parameters that the head reads, of which `trained` are trained. scale: the gradients are of this
        times the loss. If the vocabulary is sharded, the loss is this device's term of the sum over all devices.
        """
        ...

    def loss(self, model: Model, outer: dict, x_ND: jax.Array, targets: Targets, axes: Axes) -> jax.Array:
        """The summed loss of `loss_and_gradients`, forward only."""
        ...


@runtime_checkable
class WithWidths(Protocol):
    """The member of an `Objective` some of whose arrays have several numbers for each token."""

    @property
    def widths(self) -> Mapping[str, int]:
        """Names the arrays `[A, B, S, width]`, with their widths; all others are `[A, B, S]`."""
        ...


class OfLabels:
    """Members of an `Objective` whose terms are tokens with a label >= 0, as those of most are."""

    def counted(self, targets: Targets) -> jax.Array:
        """See `Objective`."""
        return targets[LABELS] >= 0

    def count(self, targets: Targets) -> jax.Array:
        """See `Objective`."""
        return jnp.sum(self.counted(targets), dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class CrossEntropy(OfLabels):
    """Cross-entropy of the next token, in nats. Labels < 0 are ignored and not counted.

    With an array of `WEIGHTS` among the targets, the gradients are those of a weighted sum; the loss is without them.
    z_loss: weight of logsumexp(logits)^2 per token, in the gradients and not in the reported loss (PaLM).
    """

    z_loss: float = 0.0
    targets: tuple[str, ...] = ("labels",)

    def loss_and_gradients(
        self, model: Model, used: dict, trained: Sequence[str], x_ND: jax.Array, targets: Targets, scale, axes: Axes
    ) -> tuple[jax.Array, dict, jax.Array]:
        """See `Objective`."""

        def of_logits(logits: jax.Array, tokens: Slice) -> tuple[jax.Array, jax.Array]:
            labels = tokens.targets[LABELS]
            if axes:
                loss, d_logits_Mv = sharded_cross_entropy(logits, labels, tokens.mine, axes, self.z_loss)
                return loss, d_logits_Mv * scale
            implementation = model.precision.implementation
            out = kernel.loss_and_gradient(
                logits, labels, scale, z_loss=self.z_loss, in_place=True, implementation=implementation
            )
            return -jnp.sum(out.logprob), out.d_logits

        return through_head(model, used, trained, x_ND, targets, axes, of_logits)

    def loss(self, model: Model, outer: dict, x_ND: jax.Array, targets: Targets, axes: Axes) -> jax.Array:
        """See `Objective`."""
        if not axes:
            return -jnp.sum(self.value(model, outer, x_ND, targets, axes))
        logits_Mv, tokens = logits_of(model, outer, x_ND, targets, axes)
        return sharded_cross_entropy(logits_Mv, tokens.targets[LABELS], tokens.mine, axes)[0]

    def value(self, model: Model, outer: dict, x_ND: jax.Array, targets: Targets, axes: Axes) -> jax.Array:
        """See `OfTokens`: the log-probability of each label, 0 of those ignored."""
        logits, tokens = logits_of(model, outer, x_ND, targets, axes)
        labels = tokens.targets[LABELS]
        if axes:
            device_logprob_M = sharded_logprob(logits, labels, tokens.mine, axes)
            return jax.lax.psum_scatter(device_logprob_M, axes, scatter_dimension=0, tiled=True)
        return kernel.logprob(logits, labels, implementation=model.precision.implementation)


@dataclasses.dataclass(frozen=True)
class LossOfLogits(OfLabels):
    """An objective made of a function of each token's logits, which JAX differentiates.

    Tokens whose label is below 0 are not counted, and their loss is 0.

    of_tokens: (float32 logits `[N, V]`, labels `[N]`, at least 0) -> losses `[N]`. The vocabulary is not sharded.
    """

    of_tokens: Callable[[jax.Array, jax.Array], jax.Array]
    targets: tuple[str, ...] = ("labels",)

    def loss_and_gradients(
        self, model: Model, used: dict, trained: Sequence[str], x_ND: jax.Array, targets: Targets, scale, axes: Axes
    ) -> tuple[jax.Array, dict, jax.Array]:
        """See `Objective`."""
        loss, vjp = jax.vjp(lambda used, x_ND: self.loss(model, used, x_ND, targets, axes), used, x_ND)
        d_used, dx_ND = vjp(scale + jnp.zeros_like(loss))
        return loss, {name: d_used[name] for name in trained}, dx_ND

    def loss(self, model: Model, outer: dict, x_ND: jax.Array, targets: Targets, axes: Axes) -> jax.Array:
        """See `Objective`."""
        assert not axes, "a sharded vocabulary is refused by from_config.check_objective"
        labels_N = targets["labels"]
        logits_NV, _ = logits_of(model, outer, x_ND, targets, axes)
        losses_N = self.of_tokens(logits_NV.astype(jnp.float32), jnp.maximum(labels_N, 0))
        return jnp.sum(jnp.where(labels_N >= 0, losses_N, 0.0))


class Sequences(NamedTuple):
    """The sequences of a microbatch that are on this device, `[B, n]` each, float32.

    logprob: the sum over all labels of a sequence. tokens: the number of its labels; 0 of what is none, or only fills
    up a batch. reference: as logprob, by another model; None if the objective reads none. desirable: likewise, the sum
    of `DESIRABLE`.
    """

    logprob: jax.Array
    tokens: jax.Array
    reference: jax.Array | None = None
    desirable: jax.Array | None = None


class SequenceLoss(Protocol):
    """A loss of sequences: a frozen dataclass, equal to another one that computes the same.

    per_term: sequences of a term, in as many rows of a microbatch next to each other: 2 of a pair. metrics: the names
    of what it reports besides the loss. reads: the arrays of a batch besides its labels, which are members of
    `Sequences`.
    """

    @property
    def per_term(self) -> int: ...

    @property
    def metrics(self) -> tuple[str, ...]: ...

    @property
    def reads(self) -> tuple[str, ...]: ...

    def __call__(self, sequences: Sequences) -> Sums:
        """The sums over the terms: "loss", whose gradient by `Sequences.logprob` is computed, and the metrics."""
        ...


class OfTokens(Protocol):
    """A number of each token, whose gradients are weighted: `CrossEntropy`, of log-probabilities of labels."""

    def value(self, model: Model, outer: dict, x_ND: jax.Array, targets: Targets, axes: Axes) -> jax.Array:
        """The number of each token of a slice of this device's tokens, float32 `[N]`."""
        ...

    def loss_and_gradients(
        self, model: Model, used: dict, trained: Sequence[str], x_ND: jax.Array, targets: Targets, scale, axes: Axes
    ) -> tuple[jax.Array, dict, jax.Array]:
        """As `Objective.loss_and_gradients`, of the sum of the numbers' negatives times `WEIGHTS`."""
        ...


class OfLogProbabilities(OfLabels, abc.ABC):
    """An objective that is a function of the log-probabilities of all labels: two sweeps over the slices, see above.

    of_tokens: what computes the log-probabilities, or other numbers of the tokens in their place.
    """

    of_tokens: ClassVar[OfTokens] = CrossEntropy()
    reads_reference_of_tokens: ClassVar[bool] = False  # `REFERENCE` of each token is read, not the sum of a sequence

    @property
    @abc.abstractmethod
    def targets(self) -> tuple[str, ...]:
        """See `Objective`."""

    @property
    @abc.abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """The names of the sums besides the loss."""

    @abc.abstractmethod
    def sums(self, logprob_BS: jax.Array, targets: Targets) -> Sums:
        """This device's terms of the sums over all devices. Differentiable by the log-probabilities."""

    def sums_and_weights(self, logprob_BS: jax.Array, targets: Targets) -> tuple[Sums, jax.Array]:
        """Returns (`sums`, weights `[B, S]` with which the tokens' cross-entropies have the loss's gradients)."""

        def loss(logprob_BS: jax.Array) -> tuple[jax.Array, Sums]:
            sums = self.sums(logprob_BS, targets)
            return sums["loss"], sums

        d_logprob_BS, sums = jax.grad(loss, has_aux=True)(varying(logprob_BS, AXES))
        return sums, -d_logprob_BS


@dataclasses.dataclass(frozen=True)
class OfSequences(OfLogProbabilities):
    """An objective that is a sum over groups of whole sequences. A group is on one device of the data-parallel ones."""

    loss: SequenceLoss

    @property
    def targets(self) -> tuple[str, ...]:
        """See `Objective`."""
        return (LABELS, *self.loss.reads)

    @property
    def metrics(self) -> tuple[str, ...]:
        """See `OfLogProbabilities`."""
        return self.loss.metrics

    def count(self, targets: Targets) -> jax.Array:
        """See `Objective`: groups, without those that only fill up a batch."""
        return num_groups(self.counted(targets), targets, self.loss.per_term)

    def sums(self, logprob_BS: jax.Array, targets: Targets) -> Sums:
        """See `OfLogProbabilities`."""
        return once(self.loss(self._sequences(logprob_BS, targets)))

    def _sequences(self, logprob_BS: jax.Array, targets: Targets) -> Sequences:
        """Computes the `Sequences` of a microbatch: sums over tokens, reduced over devices that share a sequence."""
        rows: dict[str, Any] = {"logprob": logprob_BS, "tokens": self.counted(targets)}
        rows |= {name: targets[name] for name in self.loss.reads}
        return Sequences(**{name: of_sequences(x_BS, targets) for name, x_BS in rows.items()})


@dataclasses.dataclass(frozen=True)
class LogProbabilities:
    """A `SequenceLoss` that reports each row's log-probability, for evaluations: `ROWS`, `[B]` of all devices.

    A row is one sequence.
    """

    ROWS: ClassVar[str] = "rows"
    per_term: int = 1
    metrics: tuple[str, ...] = (ROWS,)
    reads: tuple[str, ...] = ()

    def __call__(self, sequences: Sequences) -> Sums:
        """See `SequenceLoss`. A device has zeros for the sequences of others, so that the sum over devices has all."""
        number, devices = device_number(*BATCH)
        device_logprob_B = sequences.logprob[:, 0]
        rows = jnp.zeros(devices * device_logprob_B.size, jnp.float32)
        rows = jax.lax.dynamic_update_slice_in_dim(
            varying(rows, BATCH), device_logprob_B, number * device_logprob_B.size, 0
        )
        return {"loss": -jnp.sum(device_logprob_B), self.ROWS: rows}


@dataclasses.dataclass(frozen=True)
class LogProbabilitiesOfTokens(OfLogProbabilities):
    """Reports the log-probability of each label, for evaluations: `LogProbabilities.ROWS`, `[B, sequence_len]`."""

    POSITION: ClassVar[str] = "position"  # the array of a batch that has the place of each token in its sequence
    sequence_len: int
    targets: tuple[str, ...] = (LABELS, POSITION)
    metrics: tuple[str, ...] = (LogProbabilities.ROWS,)

    def sums(self, logprob_BS: jax.Array, targets: Targets) -> Sums:
        """See `OfLogProbabilities`. A device has zeros for the tokens of others."""
        number, devices = device_number(*BATCH)
        B = len(logprob_BS)
        zeros = varying(jnp.zeros((devices * B, self.sequence_len), jnp.float32), AXES)
        row_B1 = number * B + jnp.arange(B)[:, None]
        rows = zeros.at[row_B1, targets[self.POSITION]].set(logprob_BS, unique_indices=True)
        return {"loss": -jnp.sum(varying(logprob_BS, AXES)), LogProbabilities.ROWS: rows}


class ObjectiveChoice(NamedTuple):
    """An objective that a config can name.

    make: a function of its options {name: value} that returns it. reads: the names of these options. rows: the type of
    rows that it is of; "": of any other type. together: so many sequences of a row stay next to each other, 2 of a
    pair. num_labels: of the models that it is of, see `DecoderConfig`.
    """

    make: Callable[[dict[str, Any]], "Objective | OfLogProbabilities"]
    reads: tuple[str, ...]
    rows: str = ""
    together: int = 1
    num_labels: int = 0


def num_groups(counted_BS: jax.Array, targets: Targets, per_term: int) -> jax.Array:
    """The number of groups of so many sequences in which a token counts, int32 [].

    counted_BS: of whole rows `[..., B, S]`, as all of the targets.
    """
    counts = _sums_of_rows(counted_BS, targets.get(STARTS))
    groups = jnp.any(counts.reshape(-1, per_term, counts.shape[-1]), axis=1)
    return jnp.sum(groups, dtype=jnp.int32)


def of_sequences(x_Bs: jax.Array, targets: Targets) -> jax.Array:
    """Sums `[B, n]` over each sequence's tokens, equal on all devices that share a row.

    targets: of the same tokens.
    """
    starts_Bs = targets.get(STARTS)
    device_sums_Bn = _sums_of_rows(x_Bs, starts_Bs, device_number(*ONE_SEQUENCE)[1])
    return add_up(varying(device_sums_Bn, AXES), *ONE_SEQUENCE)


def at_tokens(x_Bn: jax.Array, targets: Targets) -> jax.Array:
    """The number of each token's sequence `[B, s]`, or `[B, 1]` if that is the row, of numbers of sequences."""
    return jnp.take_along_axis(x_Bn, targets[STARTS], axis=-1) if STARTS in targets else x_Bn


def _sums_of_rows(x: jax.Array, starts: jax.Array | None, devices: int = 1) -> jax.Array:
    """Float32 sums `[..., n]` over the sequences of rows `[..., s]`.

    devices: that have parts of a row, each of this length.
    """
    if starts is None:
        return jnp.sum(x, axis=-1, keepdims=True, dtype=jnp.float32)
    rows = x.reshape(-1, x.shape[-1])
    places = devices * x.shape[-1]
    sequences = starts.reshape(rows.shape) + places * jnp.arange(len(rows), dtype=starts.dtype)[:, None]
    zeros = mark_varying(jnp.zeros((len(rows) * places, 1), jnp.float32), varying_axes(x))
    return add_rows(zeros, sequences.reshape(-1), rows.reshape(-1, 1)).reshape(*x.shape[:-1], -1)


def sums_where(counted: jax.Array, metrics: Sequence[str], numbers: Iterable[jax.Array]) -> Sums:
    """Sums of a loss and of metrics over the terms that count. metrics: names of all numbers but the first."""
    sums = (jnp.sum(jnp.where(counted, x, 0.0)) for x in numbers)
    return dict(zip(("loss", *metrics), sums, strict=True))


def once(sums: Sums) -> Sums:
    """Zeroes sums on all but one of the devices that share a sequence, so that a sum over devices counts them once."""
    number, devices = device_number(*ONE_SEQUENCE)
    return sums if devices == 1 else jax.tree.map(lambda x: jnp.where(number == 0, x, 0.0), sums)


class Slice(NamedTuple):
    """The tokens of a slice at the head, on all devices that have parts of the vocabulary.

    targets: of these tokens `[M, ...]`. mine: which of them are this device's own `[M]`.
    """

    targets: Targets
    mine: jax.Array

    @classmethod
    def gathered(cls, y_ND: jax.Array, targets: Targets, axes: Axes) -> "tuple[jax.Array, Slice]":
        """Returns (activations `[M, D]`, the slice) from those of this device's tokens."""
        if not axes:
            return y_ND, cls(targets, jnp.ones(len(y_ND), bool))
        y_MD, of_all = jax.tree.map(lambda x: jax.lax.all_gather(x, axes, axis=0, tiled=True), (y_ND, targets))
        owner_M = jnp.arange(len(y_MD)) // len(y_ND)
        return y_MD, cls(of_all, owner_M == device_number(*axes)[0])


def head_logits(model: Model, y_ND: jax.Array, table_VD: jax.Array) -> tuple[jax.Array, Callable]:
    """Returns (logits `[N, V]`, a function from their gradient to the gradient of y times the head's matrix)."""
    product_NV = linear(y_ND, table_VD)
    if not model.logit_softcap:
        return product_NV, lambda d_logits_NV: d_logits_NV
    logits_NV, vjp = jax.vjp(lambda z_NV: softcapped(z_NV, model.logit_softcap), product_NV)
    return logits_NV, lambda d_logits_NV: vjp(d_logits_NV)[0]


def logits_of(model: Model, outer: dict, x_ND: jax.Array, targets: Targets, axes: Axes) -> tuple[jax.Array, Slice]:
    """Returns (this device's logits `[M, v]` of a slice of tokens, the slice)."""
    y_MD, tokens = Slice.gathered(model.final(outer, x_ND), targets, axes)
    return head_logits(model, y_MD, outer[model.head])[0], tokens


def through_head(
    model: Model,
    used: dict,
    trained: Sequence[str],
    x_ND: jax.Array,
    targets: Targets,
    axes: Axes,
    of_logits: Callable[[jax.Array, Slice], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, dict, jax.Array]:
    """Computes loss and gradients of a slice of tokens as `Objective.loss_and_gradients`, of a function of its logits.

    of_logits: (logits `[M, v]`, the slice) -> (this device's term of the loss, scale times its gradient by the logits).
    `WEIGHTS` among the targets multiply the gradients of tokens, behind the products with d_logits, which are not read
    once more for them.
    """
    table_vD = used[model.head]
    of_final = {name: used[name] for name in trained if name != model.head}
    y_ND, final_vjp = jax.vjp(lambda w, x_ND: model.final(used | w, x_ND), of_final, x_ND)
    y_MD, tokens = Slice.gathered(y_ND, targets, axes)
    logits_Mv, capped_vjp = head_logits(model, y_MD, table_vD)
    loss, d_logits_Mv = of_logits(logits_Mv, tokens)
    d_logits_Mv = capped_vjp(d_logits_Mv.astype(table_vD.dtype))

    def weighted(x_MD: jax.Array) -> jax.Array:
        return (x_MD * tokens.targets[WEIGHTS][:, None]).astype(x_MD.dtype) if WEIGHTS in tokens.targets else x_MD

    d_table = {}
    if model.head in trained:
        d_table[model.head] = jax.lax.dot_general(d_logits_Mv, weighted(y_MD), (((0,), (0,)), ((), ())))
    dy_MD = weighted(d_logits_Mv @ table_vD)
    dy_ND = jax.lax.psum_scatter(dy_MD, axes, scatter_dimension=0, tiled=True) if axes else dy_MD
    d_final, dx_ND = final_vjp(dy_ND)
    grads = d_final | d_table
    return loss, {name: grads[name] for name in trained}, dx_ND
