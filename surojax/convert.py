"""Writes a model as a Hugging Face folder: a run's, a checkpoint's, another folder's, or a GGUF file's.

    python -m surojax.convert --checkpoint runs/tiny --out FOLDER [--dtype float32]
    python -m surojax.convert --check FOLDER [--python INTERPRETER]

The second compares logits and losses with those of transformers, if an interpreter has it with torch.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from surojax import assembly
from surojax.config import checks
from surojax.config.fields import Config, default_config
from surojax.data import gguf_tokenizer
from surojax.data.tokenizer import load_tokenizer
from surojax.errors import CheckpointError, ConfigError
from surojax.exchange import config_json, gguf, small_files
from surojax.exchange.export import DTYPES, check_dtype, check_folder, encoded, export
from surojax.exchange.small_files import CONFIG, GENERATION, TOKENIZER_FILES, Files
from surojax.exchange.sources import KEPT, config_of, kept_in, locate, resolved, tensors_of
from surojax.exchange.stored import CheckpointTensors
from surojax.exchange.weights import Tensors, check
from surojax.models.model import Model
from surojax.run import checkpoint

SOURCE = "source.json"  # in the folder that a run keeps: where its model came from


class Opened(NamedTuple):
    """A model that can be exported. config, files: of its folder; config as for the weights' own dtype."""

    model: Model
    tensors: Tensors
    config: dict[str, Any]
    files: Files


def keep(c: Config) -> None:
    """Keeps the small files of the model at `model_path` in the output_dir of a run; see `sources`. Raises OSError.

    c: a resolved config, whose tokenizer is kept with them.
    """
    kept = kept_in(c.output_dir)
    source = locate(c.model_path, weights=False)
    files = model_files(source) | tokenizer_files(c.tokenizer)
    kept.mkdir(parents=True, exist_ok=True)
    (kept / SOURCE).unlink(missing_ok=True)  # until everything else is there
    small_files.write(kept, files)
    small_files.write(kept, {SOURCE: encoded({"model_path": c.model_path})})
