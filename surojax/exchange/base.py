"""The frozen base model under adapters: checkpoints store adapters and the fingerprint of their base."""

import hashlib
from pathlib import Path

import numpy as np

from surojax.errors import CheckpointError, ConfigError
from surojax.exchange.model_tensors import Tensors, Weights, shapes
from surojax.models.model import Model
from surojax.numerics.base_formats import FORMATS

SAMPLES = 4096  # numbers of a tensor in a fingerprint


class DerivedTensors:
    """Tensors computed from a base's tensors; a subclass overrides `read` for those that differ.

    made_with: hashes of the other inputs of that computation.
    """

    def __init__(self, base: Tensors, *made_with: str):
        self.path: Path = base.path
        self.base = base
        self.made_with = made_with

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return self.base.names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self.base.shape(name)

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor."""
        return self.base.read(name)


def fingerprint(tensors: Tensors, model: Model) -> str:
    """Returns SHA-256 of all tensors' names and shapes, and of sampled numbers from the first, middle and last layer.

    Two models of one family that were trained differently differ there. Reading all of a model would take as long as
    loading it. Numbers are taken in float32, so a copy in another dtype that has the same numbers is the same model.
    Of `DerivedTensors` it is the SHA-256 of what they follow from, since their last bits depend on the order of sums.
    So an adapter of a merged base belongs to that base and adapter, not to a folder that they were exported to.
    """
    if isinstance(tensors, DerivedTensors):
        inputs = (fingerprint(tensors.base, model), *tensors.made_with)
        return hashlib.sha256("\n".join(inputs).encode()).hexdigest()
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


def check_base(actual: str, expected: str, path: str) -> None:
    """Raises CheckpointError if a base has another fingerprint than the base under a checkpoint's adapters."""
    if actual != expected:
        raise CheckpointError(
            f"model_path: expected the base that the adapters were trained on, got {path}, whose weights are others; "
            "give that one"
        )


def check_format(tensors: Tensors, model: Model, wanted: str) -> None:
    """Raises ConfigError if a base is stored in a quantised format other than `wanted`."""
    others = stored_formats(tensors, model) - {"", wanted}
    if others:
        setting = FORMATS[wanted].setting
        stored = min(others)
        fix = f"set {FORMATS[stored].setting}=True in its place" if stored in FORMATS else "fetch it in 16 bits"
        raise ConfigError(
            f"{setting}: expected a base in 16 or 32 bits or in {wanted}, got {stored} in {tensors.path}; {fix}"
        )


def stored_formats(tensors: Tensors, model: Model) -> set[str]:
    """The set of formats that a model's tensors are stored in, see `Weights.format_of`."""
    return {tensors.format_of(name) for name in shapes(model)} if isinstance(tensors, Weights) else {""}


def described_format(tensors: Tensors, model: Model, wanted: str) -> str:
    """Text for the end of a log line: how a base is converted to the format `wanted`, "" for none."""
    stored = stored_formats(tensors, model) - {""}
    if not wanted:
        return f", dequantised from {min(stored)}" if stored else ""
    if isinstance(tensors, DerivedTensors):
        after = " after an adapter is merged into it" if tensors.made_with else ""
        return f", quantised to {wanted}{after}"
    return f", in {wanted} as it is stored" if stored else f", quantised to {wanted}"
