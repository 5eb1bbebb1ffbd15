"""How evenly a step's tokens used the experts of each layer: figures for the log, and layers that use too few."""

from typing import Any, NamedTuple

import numpy as np

EVENLY = 1.5  # a layer has collapsed if it uses fewer experts than this times those that a token chooses


class Usage(NamedTuple):
    """The use of experts in a step.

    tokens_LE: how many tokens chose each expert, of each layer with experts. chosen: experts of a token.
    """

    tokens_LE: np.ndarray
    chosen: int

    @classmethod
    def of(cls, statistics: dict[str, Any]) -> "Usage":
        """From a step's metrics: `RouterStatistics` by segment, in host memory."""
        tokens_LE = np.concatenate([of_segment.chosen_E for of_segment in statistics.values()])
        tokens = sum(of_segment.probability_E.sum() for of_segment in statistics.values())  # of all layers
        return cls(tokens_LE, round(float(tokens_LE.sum() / max(tokens, 1))))

    @property
    def largest_share_L(self) -> np.ndarray:
        """Of each layer, the share of all choices that fell on the expert with the most: 1 / experts if used evenly."""
        return self.tokens_LE.max(axis=1) / np.maximum(self.tokens_LE.sum(axis=1), 1)

    @property
    def used_L(self) -> np.ndarray:
        """Of each layer, how many experts would have the same entropy if they were used evenly."""
        shares_LE = self.tokens_LE / np.maximum(self.tokens_LE.sum(axis=1, keepdims=True), 1)
        terms_LE = shares_LE * np.log(np.where(shares_LE > 0, shares_LE, 1))
        return np.exp(-terms_LE.sum(axis=1))

    @property
    def collapsed(self) -> list[int]:
        """The indices in `tokens_LE` of layers in which nearly all tokens choose the same experts of many."""
        most = EVENLY * self.chosen
        if self.tokens_LE.shape[1] < 2 * most or not self.tokens_LE.any():
            return []
        return [int(l) for l in np.flatnonzero(self.used_L < most)]
