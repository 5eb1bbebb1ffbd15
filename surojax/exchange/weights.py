"""Weights in safetensors files, read tensor by tensor into a training state of any placement."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors

from surojax.errors import ConfigError
from surojax.exchange.families import NAMES, tensor_names
from surojax.models.model import Model, Segment
from surojax.placement.param import OUTER, Param

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Weights:
    """The tensors of a folder with safetensors files; each is read from the disk when it is asked for.

    Raises ConfigError if a file of the index is missing or damaged, and if a tensor is not there.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        files = self._files()
        self._handles: dict[str, Any] = {name: self._open(name) for name in sorted(set(files.values()))}
        tensors = {name: set(handle.keys()) for name, handle in self._handles.items()}
        self._handle_of = {}
        for tensor, file in files.items():
            if tensor not in tensors[file]:
                raise ConfigError(f"model_path: {INDEX} names {tensor} in {file}, which does not have it; {AGAIN}")
            self._handle_of[tensor] = self._handles[file]

    def _files(self) -> dict[str, str]:
        """The file of each tensor."""
        index = self.folder / INDEX
        if index.is_file():
            try:
                return dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"model_path: cannot read {index} ({error!r}); {AGAIN}") from error
        if not (self.folder / SINGLE).is_file():
            raise ConfigError(f"model_path: expected {SINGLE} or {INDEX} in {self.folder}, got neither; {AGAIN}")
        return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)

    def _open(self, name: str):
        try:
            return safetensors.safe_open(self.folder / name, framework="numpy")
        except (OSError, safetensors.SafetensorError) as error:
            raise ConfigError(f"model_path: cannot read {self.folder / name} ({error}); {AGAIN}") from error

    @property
    def names(self) -> set[str]:
        return set(self._handle_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle_of[name].get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """A tensor in the dtype that it is stored in."""
        try:
            return self._handle_of[name].get_tensor(name)
        except safetensors.SafetensorError as error:
            raise ConfigError(f"model_path: cannot read {name} in {self.folder} ({error}); {AGAIN}") from error


AGAIN = "fetch the model again"


def name_of(param: Param, layer: int | None, names: dict[str, str] = NAMES) -> str:
    """The name of a parameter in the files; layer: its number in the model, None for an outer one."""
    return names[param.name].format(l=layer)


def check(weights: Weights, model: Model) -> None:
    """Raises ConfigError unless the files have exactly the model's tensors, in its shapes."""
    expected = {name_of(param, None): param.shape for param in jax.tree.leaves(model.outer_params)}
    for segment in model.segments:
        names = tensor_names(segment.params)
        for l in range(segment.start, segment.start + segment.num_layers):
            expected |= {name_of(param, l, names): param.shape for param in jax.tree.leaves(segment.params)}
    if missing := sorted(expected.keys() - weights.names):
        raise ConfigError(f"model_path: expected {missing[0]} in {weights.folder}, got no such tensor; {AGAIN}")
    # A tied head is the embedding, and the frequencies of old checkpoints follow from rope_theta.
    unused = {name for name in weights.names - expected.keys() if not name.endswith("rotary_emb.inv_freq")}
    if model.head == "embed":
        unused.discard(NAMES["head"])
    if unused:
        raise ConfigError(
            f"model_path: {weights.folder} has {min(unused)}, which a model with this config.json does not use"
        )
    for name, shape in expected.items():
        if weights.shape(name) != shape:
            raise ConfigError(
                f"model_path: {name}: expected {[*shape]}, as config.json says, got {[*weights.shape(name)]}"
            )


def open_weights(c: Any, model: Model) -> Weights | None:
    """The weights that a config starts from, opened and checked; None if it draws new ones. Raises ConfigError."""
    if not c.model_path or c.from_scratch:
        return None
    weights = Weights(c.model_path)
    check(weights, model)
    return weights


def readers(weights: Weights) -> tuple[Callable[[Segment, int], Any], Callable[[Model], dict]]:
    """Functions (segment, l) -> the arrays of its layer l, and model -> those of the outer layers."""

    def layer(segment: Segment, l: int):
        names = tensor_names(segment.params)
        return jax.tree.map(lambda param: weights.read(name_of(param, segment.start + l, names)), segment.params)

    def outer(model: Model) -> dict:
        return jax.tree.map(lambda param: weights.read(name_of(param, None)), model.params[OUTER])

    return layer, outer
