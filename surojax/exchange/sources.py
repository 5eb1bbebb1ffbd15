"""Where a model comes from: a folder of Hugging Face, a GGUF file, or a name on the hub.

A run keeps the small files of its model (settings, tokenizer, chat template) in the folder `model` of its output_dir.
What comes after the first step needs nothing else of the model: when the original is gone, these take its place.
"""

import copy
from pathlib import Path
from typing import Any

from surojax.errors import ConfigError
from surojax.exchange import gguf, hub
from surojax.exchange.huggingface import read_config, settings
from surojax.exchange.weights import Tensors, Weights, check
from surojax.models.model import Model

KEPT = "model"  # folder in the output_dir of a run


def kept_in(output_dir: str | Path) -> Path:
    """The folder that keeps the small files of a run's model."""
    return Path(output_dir).expanduser() / KEPT


def locate(model_path: str | Path, *, weights: bool, kept: Path | None = None) -> Path:
    """The folder or GGUF file of a model; one on the hub is fetched, or found in the cache.

    weights: fetch the weights as well. kept: a folder that takes the model's place if there is no such model. Raises
    ConfigError if there is no such model.
    """
    path = Path(model_path).expanduser()
    if path.exists():
        return path
    if kept is not None and (kept / "config.json").is_file():
        return kept
    return hub.fetch(str(model_path), weights=weights)


def config_of(path: Path) -> dict[str, Any]:
    """The config.json of a folder, or what a GGUF file says in its words. Raises ConfigError."""
    return gguf.config(gguf.open_file(path)) if gguf.is_gguf(path) else read_config(path)


def tensors_of(path: Path) -> Tensors:
    """The tensors of a folder or a GGUF file. Raises ConfigError if a file is missing or damaged."""
    return gguf.GgufTensors(path) if gguf.is_gguf(path) else Weights(path)


def resolved(c: Any) -> Any:
    """A config with the `model` fields, and the tokenizer if it is the default, of the model at `model_path`.

    c: a ConfigDict; the same one if it names no model. Raises ConfigError for a folder without a model that is known.
    """
    if not c.model_path:
        if c.from_scratch:
            raise ConfigError("from_scratch: expected false without a model_path, got True; leave it out")
        return c
    path = locate(c.model_path, weights=False, kept=kept_in(c.output_dir))
    found = copy.deepcopy(c)
    found.model.update(settings(config_of(path)))
    if c.tokenizer == "bytes" and (gguf.is_gguf(path) or (path / "tokenizer.json").is_file()):
        found.tokenizer = str(path)
    return found


def open_weights(c: Any, model: Model) -> Tensors | None:
    """The weights that a config starts from, opened and checked; None if it draws new ones. Raises ConfigError."""
    if not c.model_path or c.from_scratch:
        return None
    weights = tensors_of(locate(c.model_path, weights=True))
    check(weights, model)
    return weights
