"""The tensors of a model's folder that are no part of its language model, kept as they are for an export.

These are an image encoder, and layers that predict further tokens. They are not trained: an export has those of the
source, byte for byte and under its names; its config.json is the whole one, with the language model in `text_config`.
Only matrices in float8 are written as numbers, since the export's config.json no longer says how they are scaled.
"""

from typing import Any, NamedTuple

import numpy as np

from surojax.errors import ConfigError
from surojax.exchange import parts
from surojax.exchange.huggingface import read_whole_config
from surojax.exchange.model_tensors import FLOAT8, Weights, dequantised
from surojax.exchange.shards import Shard, StoredTensor


class Beside(NamedTuple):
    """The tensors of a folder that are no part of its language model.

    config: the whole config.json of an image-text model; None: the folder has a language model alone. shards: {name of
    a tensor: the file that has it}. weights: of the folder.
    """

    config: dict[str, Any] | None
    shards: dict[str, Shard]
    weights: Weights

    def planned(self, dtype: np.dtype) -> dict[str, StoredTensor]:
        """The shapes and dtypes of the tensors to write. dtype: of matrices that were in float8."""
        stored = {name: shard.entries[name] for name, shard in self.shards.items() if not self._scales(name)}
        return {
            name: StoredTensor(entry.shape, dtype if entry.dtype in FLOAT8 else entry.dtype)
            for name, entry in stored.items()
        }

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Reads a tensor of `planned`. Raises ConfigError if it cannot be read."""
        try:
            array = self.shards[name].read(name)
            if array.dtype not in FLOAT8:
                return array
            scales = name + self.weights.scales.suffix
            numbers = dequantised(array, self.shards[scales].read(scales).astype(np.float32), self.weights.scales.block)
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"model_path: cannot read {name} in {self.weights.path} ({reason})") from error
        return numbers.astype(dtype)

    def _scales(self, name: str) -> bool:
        """True for the scales of a matrix in float8."""
        suffix = self.weights.scales.suffix
        matrix = name.removesuffix(suffix) if suffix else name
        return matrix != name and matrix in self.shards and self.shards[matrix].entries[matrix].dtype in FLOAT8

    @property
    def modules(self) -> list[str]:
        """The first words of the tensors' names, up to the number of a layer: what no export quantises."""
        return sorted({".".join(parts.first_words(name)) for name in self.shards})

    def whole_config(self, text: dict[str, Any]) -> dict[str, Any]:
        """Returns the config.json of the export. text: the language model's."""
        return text if self.config is None else parts.with_text(self.config, text)


def tensors_beside(weights: Weights) -> Beside | None:
    """Finds what a folder has beside its language model; None if it has nothing.

    Raises ConfigError for tensors in codes, which mean nothing beside an export's config.json.
    """
    config = read_whole_config(weights.path)
    if not weights.left_aside and not parts.has_parts(config):
        return None
    shards = weights.open_left_aside()
    for name, shard in shards.items():
        if name not in shard.entries:
            raise ConfigError(f"model_path: {weights.path}: the index names {name}, which its file does not have")
        if shard.entries[name].dtype == np.uint8:
            raise ConfigError(
                f"model_path: {weights.path}: expected {name}, which is kept as it is, as numbers, got codes; fetch "
                "the model before it was quantised"
            )
    return Beside(config if parts.has_parts(config) else None, shards, weights)
