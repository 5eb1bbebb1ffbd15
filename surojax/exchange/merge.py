"""Merges an adapter into a model's weights, tensor by tensor: w + scale b a, in float32.

With DoRA every row of that is stretched to its magnitude. A base that was frozen in few bits is dequantised here too,
since the adapter was trained beside those numbers. As `model_tensors.Tensors`, the result can be exported, merged with
another adapter, or be the base of a run; no more than one tensor is in memory.
"""

import functools

import jax
import numpy as np

from surojax.errors import ConfigError
from surojax.exchange.adapter_config import modules
from surojax.exchange.base import DerivedTensors, fingerprint
from surojax.exchange.model_tensors import Tensors, Weights, read_dequantised, tensor_name
from surojax.exchange.peft import BASE_FORMATS, AdapterArrays, digest
from surojax.families.family import TENSOR_NAMES
from surojax.models.model import Model
from surojax.numerics.base_formats import FORMATS, dequantise, quantise
from surojax.placement.table import has_format


class InBaseFormat(DerivedTensors):
    """The tensors of a base frozen in a quantised format, with the blocks' matrices dequantised.

    name: of the format. dtype: of the numbers, before and after. What the base stores in that format is read as it is;
    a copy of it in more bits is quantised again, and may have other scales.
    """

    def __init__(self, base: Tensors, model: Model, name: str, dtype: str):
        super().__init__(base, f"{name} {dtype}")
        self._format = name
        self._dtype = dtype
        self._matrices = {
            tensor_name(param, segment, l)
            for segment in model.segments
            for param in jax.tree.leaves(segment.params)
            for l in range(segment.num_layers)
            if has_format(param, name)
        }

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor: a block's matrix quantised, dequantised and in `dtype`; another tensor as the base has it."""
        if name not in self._matrices:
            return self.base.read(name)
        if isinstance(self.base, Weights) and self.base.format_of(name) == self._format:
            return read_dequantised(self.base, name, self._dtype)
        return there_and_back(self.base.read(name), self._format, self._dtype)


class Merged(DerivedTensors):
    """The tensors of a model merged with an adapter; those that the adapter changes are float32.

    Raises ConfigError if the adapter was trained on another model.
    """

    def __init__(self, base: Tensors, adapter: AdapterArrays, model: Model):
        super().__init__(base, digest(adapter))
        frozen = BASE_FORMATS.get(adapter.base_format)
        self._frozen: Tensors = InBaseFormat(base, model, *frozen) if frozen else base
        self._adapter = adapter
        self._layers = {
            f"{module}.weight": (target, l)
            for target, layer_modules in modules(model).items()
            for l, module in enumerate(layer_modules)
        }
        self._saved = {TENSOR_NAMES[name]: array for name, array in adapter.saved.items()}
        if adapter.base and (actual := fingerprint(base, model)) != adapter.base:
            raise ConfigError(
                f"adapter: expected the model that it was trained on, whose hash begins with {adapter.base[:12]}, got "
                f"{base.path} with {actual[:12]}; give that model, and before this adapter those that it was trained on"
            )

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor: merged in float32 if adapted, else as the base has it, dequantised if frozen in a format."""
        if name in self._saved:
            return self._saved[name]
        w = self._frozen.read(name)
        target, l = self._layers.get(name, ("", 0))
        stacks = self._adapter.matrices.get(target)
        if stacks is None:
            return w
        magnitude = stacks["magnitude"][l] if "magnitude" in stacks else None
        return merged_matrix(w, stacks["a"][l], stacks["b"][l], magnitude, self._adapter.lora.scale)


def merged_matrix(
    w: np.ndarray, a: np.ndarray, b: np.ndarray, magnitude: np.ndarray | None, scale: float
) -> np.ndarray:
    """Returns w + scale b a in float32; with `magnitude` (DoRA) its rows are rescaled to these lengths."""
    merged = w.astype(np.float32) + np.float32(scale) * (b.astype(np.float32) @ a.astype(np.float32))
    if magnitude is None:
        return merged
    lengths = np.maximum(np.linalg.norm(merged, axis=1, keepdims=True), np.finfo(np.float32).tiny)  # of zeros: zeros
    return merged * (magnitude.astype(np.float32)[:, None] / lengths)


def there_and_back(w: np.ndarray, name: str, dtype: str) -> np.ndarray:
    """Quantises a matrix, or all experts' matrices, to the base format `name` and dequantises to `dtype`."""
    return np.asarray(_there_and_back(w.astype(dtype), name))


@functools.partial(jax.jit, static_argnums=1)
def _there_and_back(w: jax.Array, name: str) -> jax.Array:
    return dequantise(quantise(w, FORMATS[name].planned(w.shape)), w.dtype)
