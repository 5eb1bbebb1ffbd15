"""The base of a run that trains adapters: its checkpoints have the adapters, and say which base they belong to."""

import hashlib

import jax
import numpy as np

from surojax.errors import CheckpointError
from surojax.exchange.weights import Tensors, name_of, shapes
from surojax.models.model import Model
from surojax.placement.param import base


def fingerprint(tensors: Tensors, model: Model) -> str:
    """SHA-256 of the names and shapes of all tensors, and of the values of the first and the last layer.

    Two models of one family that were trained differently differ there. Reading all of a model would take as long as
    loading it.
    """
    digest = hashlib.sha256(repr(sorted(shapes(model).items())).encode())
    for segment, l in ((model.segments[0], 0), (model.segments[-1], model.segments[-1].num_layers - 1)):
        for param in jax.tree.leaves(base(segment.params)):
            digest.update(np.ascontiguousarray(tensors.read(name_of(param, segment, l))).view(np.uint8).data)
    return digest.hexdigest()


def check_base(found: str, expected: str, path: str) -> None:
    """Raises CheckpointError if a base is another one than the adapters of a checkpoint were trained on."""
    if found != expected:
        raise CheckpointError(
            f"model_path: expected the base that the adapters were trained on (fingerprint {expected[:12]}), got "
            f"{path} ({found[:12]}); give that one"
        )
