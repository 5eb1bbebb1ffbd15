"""A checkpoint's master weights under Hugging Face's names."""

from pathlib import Path

import jax
import numpy as np

from surojax.exchange.model_tensors import tensor_name
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
