"""A checkpoint's master weights under Hugging Face's names, and its adapters."""

from pathlib import Path

import jax
import numpy as np

from surojax.exchange import peft
from surojax.exchange.model_tensors import tensor_name
from surojax.models.lora import Lora
from surojax.models.model import Model
from surojax.placement.param import OUTER, base
from surojax.run.stored import StoredMaster


class CheckpointTensors:
    """The master weights in a checkpoint of this model, as `model_tensors.Tensors`."""

    def __init__(self, path: Path, model: Model):
        self.path = path
        self._master = StoredMaster(path)
        self._ours: dict[str, tuple[str, int | None]] = {
            tensor_name(param): (f"{OUTER}.{param.name}", None) for param in jax.tree.leaves(model.outer_params)
        }
        for segment in model.segments:
            for param in jax.tree.leaves(base(segment.params)):
                for l in range(segment.num_layers):
                    self._ours[tensor_name(param, segment, l)] = (f"{segment.name}.{param.name}", l)

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._ours)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        ours, l = self._ours[name]
        shape = self._master.shape(ours)
        return shape if l is None else shape[1:]

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor in the dtype of the master weights."""
        return self._master.read(*self._ours[name])


def stored_adapter(path: Path, model: Model, lora: Lora, base: str, base_format: str) -> peft.AdapterArrays:
    """Reads the adapters in a checkpoint of a model that has them. base, base_format: see `peft.AdapterArrays`."""
    master = StoredMaster(path)

    def read(section: str, num_layers: int | None, params: dict, prefix: str = "") -> dict:
        """Reads the trained arrays of a section, as nested dicts; a segment's are `[num_layers, ...]`."""
        arrays = {}
        for key, param in params.items():
            name = f"{prefix}{key}"
            if isinstance(param, dict):
                arrays[key] = read(section, num_layers, param, f"{name}.")
            elif num_layers is None:
                arrays[key] = master.read(f"{section}.{name}", None)
            else:
                arrays[key] = np.stack([master.read(f"{section}.{name}", l) for l in range(num_layers)])
        return arrays

    layers: dict[str, int | None] = {segment.name: segment.num_layers for segment in model.segments}
    trained = {name: read(name, layers.get(name), params) for name, params in model.trained_params.items()}
    return peft.AdapterArrays(lora, *peft.of_state(model, lora, trained), base, base_format)
