"""Schedules of pipeline parallelism: which microbatch each stage computes at each tick, and in which direction.

In a tick, every stage computes at most one microbatch forward and then at most one backward. Results move to the
neighbours between ticks. A microbatch goes forward through one stage per tick; the loss follows the last stage in the
same tick, and so may its backward pass. For p stages and m microbatches:

| schedule | forward of a in stage s | backward of a in stage s    | ticks        | microbatches in flight |
|----------|-------------------------|-----------------------------|--------------|------------------------|
| gpipe    | s + a                   | m + p - 1 + (p - 1 - s) + a | 2 (m + p - 1) | m                     |
| 1f1b     | s + a                   | p - 1 + (p - 1 - s) + a     | m + 2 (p - 1) | 2 (p - 1 - s) + 1     |

(gpipe: Huang et al. 2019, arXiv:1811.06965; 1f1b: Narayanan et al. 2019, PipeDream.) In both, p - 1 ticks at the
beginning are forward only and p - 1 at the end backward only, so a stage idles (p - 1) / (m + p - 1) of the time.

The program of all stages is one, so stages go from tick to tick together, and a tick takes as long as its slowest
stage. The classic 1f1b has p - s microbatches in flight, because neighbours compute in opposite directions; here each
of its ticks would take as long as a backward pass, three or four forward passes with recomputed blocks: 1.5 times the
step. With both directions in every tick, all stages have the same work, and residuals of p - 1 more microbatches are in
memory. Every stage has room for those of the first, at most 2 p - 1.

Layers are divided in order: L layers over p stages are n = ceil(L / p) for each stage, and the rest for the last one.
126 layers over 4, 8, 16 stages: 32, 16, 8 for each, and 30, 14, 6 for the last. Another division of the rest would gain
nothing, since a tick takes as long as its slowest stage, and memory has to hold n layers on some stage anyway. In
exchange, layer l of the model is entry l of the stacks `[p n, ...]` of all stages, as without stages; the last p n - L
entries are padding (step/padding.py).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from surojax.errors import ConfigError

NONE = -1  # no microbatch


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Tables `[ticks, stages]` int32: the microbatch that a stage computes in this direction, or NONE."""

    forward: np.ndarray
    backward: np.ndarray

    @property
    def ticks(self) -> int:
        return len(self.forward)

    @functools.cached_property
    def in_flight(self) -> np.ndarray:
        """For each stage, the largest number of microbatches of which it keeps residuals at once."""
        begun = np.cumsum(self.forward != NONE, axis=0)
        ended = np.cumsum(self.backward != NONE, axis=0)
        ended_before = np.concatenate([np.zeros_like(ended[:1]), ended[:-1]])
        return (begun - ended_before).max(axis=0)

    def bubble(self, forward: float = 1.0, backward: float = 2.0) -> float:
        """The fraction of the time that a stage idles, if a microbatch takes it so long forward and backward."""
        forwards = self.forward != NONE
        backwards = self.backward != NONE
        busy = forward * forwards.sum() + backward * backwards.sum()
        elapsed = forward * forwards.any(axis=1).sum() + backward * backwards.any(axis=1).sum()
        return float(1 - busy / (elapsed * forwards.shape[1]))


def gpipe(microbatches: int, stages: int) -> Schedule:
    """GPipe: all microbatches forward, then all backward."""
    return _staggered(microbatches, stages, first_backward=microbatches + stages - 1)


def one_forward_one_backward(microbatches: int, stages: int) -> Schedule:
    """1F1B: each microbatch goes backward as soon as it has left the last stage."""
    return _staggered(microbatches, stages, first_backward=stages - 1)


SCHEDULES = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def _staggered(microbatches: int, stages: int, *, first_backward: int) -> Schedule:
    """A schedule with microbatches one tick apart. first_backward: the last stage's first tick that goes backward."""
    stage = np.arange(stages)
    tick = np.arange(first_backward + stages - 1 + microbatches)[:, None]
    forward = tick - stage
    backward = tick - first_backward - (stages - 1 - stage)

    def table(numbers: np.ndarray) -> np.ndarray:
        return np.where((numbers >= 0) & (numbers < microbatches), numbers, NONE).astype(np.int32)

    return Schedule(table(forward), table(backward))


def layers_of_stage(layers: int, stages: int) -> int:
    """The capacity of a stage in layers, which all stages but the last fill."""
    return -(-layers // stages)


def stacked_layers(layers: int, stages: int) -> int:
    """The number of entries in the stacks of all stages: the layers, then padding."""
    return stages * layers_of_stage(layers, stages)


def check_stages(layers: int, stages: int) -> None:
    """Raises ConfigError if a stage would have no layer."""
    needed = -(-layers // layers_of_stage(layers, stages))
    if needed < stages:
        raise ConfigError(
            f"pp_size: expected at most {needed}, since so many stages of {layers_of_stage(layers, stages)} have all "
            f"{layers} layers, got {stages}; use {needed}, which takes as long"
        )


def check_counts(kinds: Sequence[str], stages: int) -> None:
    """Raises ConfigError if stages would have other numbers of layers of a kind, of several. kinds: of each layer.

    Layers of a kind are one stack, of which each stage has an equal part.
    """
    counts = _counts(kinds, stages)
    if len(set(kinds)) > 1 and len(counts) > 1:
        fits = max(n for n in range(1, stages) if len(kinds) % n == 0 and len(_counts(kinds, n)) == 1)
        found = ", others ".join(" and ".join(f"{n} of {kind}" for kind, n in count) for count in counts[:2])
        raise ConfigError(
            f"pp_size: expected stages with as many layers of each kind, got {stages} stages, of which some have "
            f"{found}; use {fits}"
        )


def _counts(kinds: Sequence[str], stages: int) -> list[tuple[tuple[str, int], ...]]:
    """The numbers of layers of each kind that stages have, without repetitions."""
    n = layers_of_stage(len(kinds), stages)
    parts = [kinds[stage * n : (stage + 1) * n] for stage in range(stages)]
    return list(dict.fromkeys(tuple((kind, part.count(kind)) for kind in dict.fromkeys(kinds)) for part in parts))


class Patterns(NamedTuple):
    """The pattern of each stage: the kinds of its layers in order. Stages with equal patterns run the same loops.

    patterns: those that differ, each with a kind for every entry of a stage. of_stages: for each stage, the index of
    its pattern.
    """

    patterns: tuple[tuple, ...]
    of_stages: tuple[int, ...]


def patterns_of_stages(kinds: Sequence, stages: int) -> Patterns:
    """The `Patterns` of stages. kinds: of each layer of the model, anything that can be compared.

    Padding behind the last layer has the kinds of a full stage that begins like the last one, if there is one.
    """
    n = layers_of_stage(len(kinds), stages)
    patterns: list[tuple] = []
    indices = []
    for stage in range(stages):
        own = tuple(kinds[stage * n : (stage + 1) * n])
        pattern = next((full for full in patterns if full[: len(own)] == own), own + own[-1:] * (n - len(own)))
        if pattern not in patterns:
            patterns.append(pattern)
        indices.append(patterns.index(pattern))
    return Patterns(tuple(patterns), tuple(indices))
