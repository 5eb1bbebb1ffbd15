"""The base of a run that trains adapters: its checkpoints have the adapters, and say which base they belong to."""

import hashlib

from surojax.errors import CheckpointError
from surojax.exchange.weights import Tensors, shapes
from surojax.models.model import Model

SAMPLES = 4096  # numbers of a tensor in a fingerprint


def fingerprint(tensors: Tensors, model: Model) -> str:
    """SHA-256 of the names and shapes of all tensors, and of numbers of the first, the middle and the last layer.

    Two models of one family that were trained differently differ there. Reading all of a model would take as long as
    loading it. Numbers are taken in float32, so a copy in another dtype that has the same numbers is the same model.
    """
    digest = hashlib.sha256()
    layers = model.num_layers
    sampled = tuple(f".layers.{l}." for l in (0, layers // 2, layers - 1))
    for name, shape in shapes(model).items():
        digest.update(f"{name} {[*shape]}\n".encode())
        if any(layer in name for layer in sampled):
            numbers = tensors.read(name).reshape(-1)
            step = -(-numbers.size // SAMPLES)
            digest.update(numbers[::step].astype("<f4").tobytes())
    return digest.hexdigest()


def check_base(found: str, expected: str, path: str) -> None:
    """Raises CheckpointError if a base is another one than the adapters of a checkpoint were trained on."""
    if found != expected:
        raise CheckpointError(
            f"model_path: expected the base that the adapters were trained on (fingerprint {expected[:12]}), got "
            f"{path} ({found[:12]}); give that one"
        )
