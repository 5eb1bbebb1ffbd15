"""The batches on which all rows of a config train: random tokens, and what its objective reads of them.

Numbers that a model computes in a run (log-probabilities of a reference, of a sampler) are near those of a new model,
for which all tokens are about equally likely: further away, losses of answers would be constant.
"""

import math

import numpy as np

from surojax.config import Config, fields as configs
from surojax.objectives.objective import (
    ADVANTAGE,
    DESIRABLE,
    LABELS,
    MARGIN,
    REFERENCE,
    SAMPLED,
    SCORED,
    TEACHER,
    TEACHER_IDS,
    TEACHER_STATES,
    Objective,
    OfLogProbabilities,
    WithWidths,
)
from surojax.objectives.objectives import OBJECTIVES, build_objective

type Batch = dict[str, np.ndarray]  # the arrays of a step by name, `[B, S]`, or `[B, S, width]`


def make_batches(c: Config, devices: int, steps: int) -> tuple[list[Batch], int]:
    """Returns (the batch of each step, number of microbatches), used by every row.

    A batch has all that a row may read: inputs, labels, the objective's other arrays, and starts of documents. B is the
    config's sequences per step, rounded up so that each microbatch divides evenly over 8 devices, over the config's own
    groups of GPUs with the same sequences, and on one device into two; with an objective of pairs, into two pairs.
    """
    own_groups = max(1, (c.gpus or devices) // configs.gpus_per_sequence(c))
    microbatches = max(2, c.gradient_accumulation_steps)
    together = OBJECTIVES[c.objective].together
    multiple = math.lcm(8, own_groups) * together * microbatches
    sequences = -(-c.per_device_batch_size * c.gradient_accumulation_steps * own_groups // multiple) * multiple
    rng = np.random.default_rng(c.seed)
    document_rng = np.random.default_rng((c.seed, 1))
    target_rng = np.random.default_rng((c.seed, 2))
    objective = build_objective(configs.flat(c))
    shape = (sequences, c.sequence_len)

    def batch() -> Batch:
        # Some tokens are frequent. The model learns their frequencies in the first steps, so every update shows.
        inputs = (c.model.vocab_size * rng.random(shape) ** 3).astype(np.int32)
        labels = np.where(rng.random(shape) < 0.05, np.int32(-1), np.roll(inputs, -1, axis=-1))
        begins_here = document_rng.random((sequences // together, c.sequence_len)).repeat(together, axis=0) < 1 / 16
        begins = np.where(begins_here, np.arange(c.sequence_len, dtype=np.int32), 0)
        starts = np.maximum.accumulate(begins, axis=1, dtype=np.int32)
        targets = drawn_targets(objective, labels, starts, c.model.vocab_size, target_rng)
        return {"inputs": inputs, **targets, "starts": starts}

    return [batch() for _ in range(steps)], microbatches


def drawn_targets(
    objective: Objective | OfLogProbabilities,
    labels: np.ndarray,
    starts: np.ndarray,
    vocab_size: int,
    rng: np.random.Generator,
) -> Batch:
    """Returns the objective's arrays of documents with these labels and starts `[..., S]`, drawn but for the labels.

    A row of which the starts are not read has the numbers of several documents.
    """
    is_label = labels >= 0
    nats = math.log(vocab_size)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    def at(where: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        return np.where(where, numbers, 0).astype(np.float32)

    def of_documents() -> np.ndarray:
        return np.take_along_axis(normal(*labels.shape), starts, axis=-1)

    def at_label(number: int) -> np.ndarray:
        """Marks the first (0) or the last (-1) label of each document."""
        places = np.flatnonzero(is_label)[:: 1 + 2 * number]
        documents = places // labels.shape[-1] * labels.shape[-1] + starts.reshape(-1)[places]
        chosen = np.zeros(labels.size, bool)
        chosen[places[np.unique(documents, return_index=True)[1]]] = True
        return chosen.reshape(labels.shape)

    def of_teacher(name: str) -> np.ndarray:
        assert isinstance(objective, WithWidths)
        width = objective.widths[name]
        if name == TEACHER_IDS:  # different ones
            step = max(1, vocab_size // width)
            first = rng.integers(vocab_size, size=(*labels.shape, 1))
            return ((first + step * np.arange(width)) % vocab_size).astype(np.int32)
        logits = normal(*labels.shape, width)
        if name == TEACHER_STATES:
            return logits
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def drawn(name: str) -> np.ndarray:
        if name == LABELS:
            return labels
        if name == REFERENCE:  # lower, so that a divergence is above 0
            return at(is_label, 0.1 * normal(*labels.shape) - nats - 0.05)
        if name == SAMPLED:
            return at(is_label, 0.3 * normal(*labels.shape) - nats)
        if name == ADVANTAGE:
            return at(is_label, of_documents())
        if name == DESIRABLE:
            return at(is_label, np.sign(of_documents()))
        if name == MARGIN:
            return at(at_label(0), 0.5 * of_documents())
        if name == SCORED:
            return at_label(-1).astype(np.int32)
        assert name in (TEACHER, TEACHER_IDS, TEACHER_STATES), f"{name} of an objective is not drawn"
        return of_teacher(name)

    return {name: drawn(name) for name in objective.targets}
