"""The initial weights of a reward model: a language model's with a new head in place of its own."""

import jax
import numpy as np

from surojax.errors import ConfigError
from surojax.exchange.base import DerivedTensors
from surojax.exchange.model_tensors import Tensors
from surojax.families.family import TENSOR_NAMES
from surojax.models.model import Model


class WithNewHead(DerivedTensors):
    """The tensors of a language model, except for the head, which is `model`'s and drawn at random from the seed.

    Its `fingerprint` does not depend on the head: an adapter is stored with its own, and belongs to the language model.

    Raises ConfigError if there is such a head already, of which config.json says nothing.
    """

    def __init__(self, base: Tensors, model: Model, seed: int):
        super().__init__(base)
        self._name = TENSOR_NAMES[model.head]
        if self._name in base.names:
            raise ConfigError(
                f"model_path: expected no {self._name} in {base.path}, whose config.json names no class for sequence "
                "classification, got one; give that class in architectures"
            )
        self._model = model
        self._seed = seed

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return (self.base.names - {TENSOR_NAMES["head"]}) | {self._name}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._model.outer_params[self._model.head].shape if name == self._name else self.base.shape(name)

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor."""
        if name != self._name:
            return self.base.read(name)
        draw = jax.jit(lambda: self._model.init_outer(self._seed)[self._model.head])  # XLA drops the other tensors
        return np.asarray(draw())
