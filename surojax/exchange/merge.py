"""A model with an adapter merged into its weights, tensor by tensor: w + scale b a, in float32.

With DoRA every row of that is stretched to its magnitude. A base that was frozen in NF4 is dequantised NF4 here too,
since the adapter was trained beside those numbers. As `weights.Tensors`, the result can be exported, merged with
another adapter, or be the base of a run; no more than one tensor is in memory.
"""

import functools
from pathlib import Path

import jax
import numpy as np

from surojax.errors import ConfigError
from surojax.exchange.adapter_config import modules
from surojax.exchange.adapters import NF4, Adapter
from surojax.exchange.base import fingerprint
from surojax.exchange.families import NAMES
from surojax.exchange.weights import Tensors, Weights, dequantised_nf4
from surojax.models.model import Model
from surojax.numerics import nf4


class InNf4:
    """The tensors of a base that is frozen in NF4, as its products read them: the blocks' matrices dequantised.

    dtype: of the numbers, before and after.
    """

    def __init__(self, base: Tensors, model: Model, dtype: str):
        self.path: Path = base.path
        self._base = base
        self._dtype = dtype
        self._matrices = {f"{module}.weight" for of_layers in modules(model).values() for module in of_layers}

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return self._base.names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._base.shape(name)

    def read(self, name: str) -> np.ndarray:
        """A tensor: a matrix of a block in `dtype`, another one as the base has it. What is stored in NF4 stays so."""
        if name not in self._matrices:
            return self._base.read(name)
        if isinstance(self._base, Weights) and name in self._base.in_nf4:
            return np.asarray(dequantised_nf4(self._base.read_nf4(name, 1), self._dtype))
        return through_nf4(self._base.read(name), self._dtype)


class Merged:
    """The tensors of a model merged with an adapter, in float32 if they differ from the base's.

    Raises ConfigError if the adapter was trained on another model.
    """

    def __init__(self, base: Tensors, adapter: Adapter, model: Model):
        self.path: Path = base.path
        in_nf4 = adapter.base_format in NF4
        self._base: Tensors = InNf4(base, model, NF4[adapter.base_format]) if in_nf4 else base
        self._adapter = adapter
        self._layers = {
            f"{module}.weight": (target, l)
            for target, of_layers in modules(model).items()
            for l, module in enumerate(of_layers)
        }
        self._saved = {NAMES[name]: array for name, array in adapter.saved.items()}
        if adapter.base and (found := fingerprint(base, model)) != adapter.base:
            raise ConfigError(
                f"adapter: expected the model that it was trained on, whose hash begins with {adapter.base[:12]}, got "
                f"{base.path} with {found[:12]}; give that model"
            )

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return self._base.names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._base.shape(name)

    def read(self, name: str) -> np.ndarray:
        """A tensor: in float32 if it is adapted or was frozen in NF4, else as the base has it."""
        if name in self._saved:
            return self._saved[name]
        w = self._base.read(name)
        target, l = self._layers.get(name, ("", 0))
        stacks = self._adapter.matrices.get(target)
        if stacks is None:
            return w
        magnitude = stacks["magnitude"][l] if "magnitude" in stacks else None
        return merged(w, stacks["a"][l], stacks["b"][l], magnitude, self._adapter.lora.scale)


def merged(w: np.ndarray, a: np.ndarray, b: np.ndarray, magnitude: np.ndarray | None, scale: float) -> np.ndarray:
    """w + scale b a in float32, its rows of length `magnitude` if that is given."""
    found = w.astype(np.float32) + np.float32(scale) * (b.astype(np.float32) @ a.astype(np.float32))
    if magnitude is None:
        return found
    lengths = np.linalg.norm(found, axis=1, keepdims=True)
    return found * (magnitude.astype(np.float32)[:, None] / lengths)


@functools.partial(jax.jit, static_argnums=1)
def _through_nf4(w: jax.Array, dtype: str) -> jax.Array:
    return nf4.dequantise(nf4.quantise(w.astype(dtype)), dtype)


def through_nf4(w: np.ndarray, dtype: str) -> np.ndarray:
    """A matrix quantised to NF4 from this dtype and back."""
    return np.asarray(_through_nf4(w, dtype))
