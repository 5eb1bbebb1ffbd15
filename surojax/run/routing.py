"""Statistics of how evenly a step's tokens use each layer's experts, and the layers that use too few."""

from typing import Any, NamedTuple

import numpy as np

EVENLY = 1.5  # a layer has collapsed if it uses fewer experts than this times those that a token chooses


class Usage(NamedTuple):
    """The experts that the tokens of a step chose.

    tokens_LE: how many tokens chose each expert, of each layer with experts. chosen: experts of a token.
    """

    tokens_LE: np.ndarray
    chosen: int

    @classmethod
    def of(cls, statistics: dict[str, Any]) -> "Usage":
        """Makes a `Usage` from a step's `RouterStatistics` by segment, in host memory.

        `chosen` is 0 if a router's probabilities are NaN or infinite; the step's loss is not finite either then.
        """
        tokens_LE = np.concatenate([of_segment.chosen_E for of_segment in statistics.values()])
        tokens = sum(of_segment.probability_E.sum() for of_segment in statistics.values())  # of all layers
        return cls(tokens_LE, round(float(tokens_LE.sum() / max(tokens, 1))) if np.isfinite(tokens) else 0)

    @property
    def largest_share_L(self) -> np.ndarray:
        """Each layer's largest share of choices for one expert, 1 / experts if used evenly."""
        return self.tokens_LE.max(axis=1) / np.maximum(self.tokens_LE.sum(axis=1), 1)

    @property
    def used_L(self) -> np.ndarray:
        """Each layer's effective number of experts, exp(entropy of the choices)."""
        shares_LE = self.tokens_LE / np.maximum(self.tokens_LE.sum(axis=1, keepdims=True), 1)
        terms_LE = shares_LE * np.log(np.where(shares_LE > 0, shares_LE, 1))
        return np.exp(-terms_LE.sum(axis=1))

    @property
    def collapsed(self) -> list[int]:
        """Indices in `tokens_LE` of layers where nearly all tokens choose the same few experts."""
        most = EVENLY * self.chosen
        if self.tokens_LE.shape[1] < 2 * most or not self.tokens_LE.any():
            return []
        return [int(l) for l in np.flatnonzero(self.used_L < most)]
