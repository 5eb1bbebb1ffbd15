"""Adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

Every adapted matrix has two tensors, or three with DoRA, under its module's name in the wrapped model:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight           [rank, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight           [out, rank]
    base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector   [out]

An embedding or head that is trained whole is stored whole: base_model.model.lm_head.weight. PEFT, transformers and vLLM
read these names.

An adapter means something only beside the model that it was trained on. What is written here names that model by its
`fingerprint`, in the metadata of the safetensors file, which others skip; and the format that the frozen matrices had.
PEFT's own adapters say neither: they are known by their shapes alone.
"""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from surojax.errors import ConfigError
from surojax.exchange import adapter_config, shards
from surojax.exchange.adapter_config import CONFIG, Lora, modules
from surojax.exchange.export import encoded
from surojax.exchange.families import NAMES
from surojax.exchange.weights import Tensors, shapes
from surojax.models.model import Model

TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
FACTOR_A, FACTOR_B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
SUFFIXES = {"a": FACTOR_A, "b": FACTOR_B, "magnitude": MAGNITUDE}
STORED, NF4 = "stored", "nf4"  # frozen matrices as their files have them, or dequantised from NF4
FINGERPRINT, BASE_FORMAT = "surojax.base", "surojax.base_format"  # keys of the metadata
SAMPLES = 4096  # numbers of a tensor in a fingerprint


class Adapter(NamedTuple):
    """An adapter of a model.

    matrices: {our name of a matrix: {"a": [L, rank, in], "b": [L, out, rank], with DoRA "magnitude": [L, out]}}, of all
    layers of the model. saved: {our name of an outer layer: array}. base: `fingerprint` of the model that it was
    trained on; "": not known. base_format: `STORED` or `NF4`.
    """

    lora: Lora
    matrices: dict[str, dict[str, np.ndarray]]
    saved: dict[str, np.ndarray]
    base: str = ""
    base_format: str = STORED


def tensor_shapes(lora: Lora, model: Model) -> dict[str, tuple[int, ...]]:
    """The shapes of an adapter's tensors by name."""
    of_base = shapes(model)
    of_matrices = modules(model)
    found = {}
    for module in (module for target in lora.targets for module in of_matrices[target]):
        rows, columns = of_base[f"{module}.weight"]
        found[PREFIX + module + FACTOR_A] = (lora.rank, columns)
        found[PREFIX + module + FACTOR_B] = (rows, lora.rank)
        if lora.magnitudes:
            found[PREFIX + module + MAGNITUDE] = (rows,)
    return found | {PREFIX + NAMES[name]: of_base[NAMES[name]] for name in lora.saved}


def fingerprint(base: Tensors, model: Model) -> str:
    """A hash of a model: of its tensors' names and shapes, and of numbers of its first, middle and last layer.

    Numbers are taken in float32, so a copy in another dtype that has the same numbers is the same model.
    """
    digest = hashlib.sha256()
    layers = model.num_layers
    sampled = tuple(f".layers.{l}." for l in (0, layers // 2, layers - 1))
    for name, shape in shapes(model).items():
        digest.update(f"{name} {[*shape]}\n".encode())
        if any(layer in name for layer in sampled):
            numbers = base.read(name).reshape(-1)
            step = -(-numbers.size // SAMPLES)
            digest.update(numbers[::step].astype("<f4").tobytes())
    return digest.hexdigest()


def write(adapter: Adapter, model: Model, folder: str | Path, *, base_name: str = "", dropout: float = 0.0) -> Path:
    """Writes an adapter of a model in float32, and returns its folder; an adapter there is replaced.

    base_name: what others load the base model by. Raises ConfigError if the folder cannot be written.
    """
    path = Path(folder).expanduser()
    expected = tensor_shapes(adapter.lora, model)
    arrays = _by_name(adapter, model)
    metadata = {BASE_FORMAT: adapter.base_format} | ({FINGERPRINT: adapter.base} if adapter.base else {})
    float32 = np.dtype(np.float32)
    unfinished = path / f".{TENSORS}.{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        shards.write(unfinished, expected, float32, (arrays[name].astype(float32) for name in expected), metadata)
        unfinished.replace(path / TENSORS)
        (path / CONFIG).write_bytes(encoded(adapter_config.written(adapter.lora, base_name, dropout)))
    except OSError as error:
        raise ConfigError(f"adapter: cannot write {path} ({error.strerror or error}); choose another folder") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _by_name(adapter: Adapter, model: Model) -> dict[str, np.ndarray]:
    """The arrays of an adapter by the names of their tensors."""
    of_matrices = modules(model)
    found = {PREFIX + NAMES[name]: array for name, array in adapter.saved.items()}
    for target, stacks in adapter.matrices.items():
        for l, module in enumerate(of_matrices[target]):
            found |= {PREFIX + module + SUFFIXES[which]: stack[l] for which, stack in stacks.items()}
    return found


def read(folder: str | Path, model: Model) -> Adapter:
    """Reads an adapter of this model, its arrays in float32.

    Raises ConfigError if it is of another model, adapts what is not adapted here, or is damaged.
    """
    path = Path(folder).expanduser()
    lora = adapter_config.read(path, model)
    which = [name for name in SUFFIXES if name != "magnitude" or lora.magnitudes]
    try:
        file = shards.Shard(path / TENSORS)
        _check_tensors(path, {name: entry.shape for name, entry in file.entries.items()}, lora, model)

        def stack(target: str, suffix: str) -> np.ndarray:
            arrays = (file.read(PREFIX + module + suffix) for module in modules(model)[target])
            return np.stack([array.astype(np.float32) for array in arrays])

        matrices = {target: {name: stack(target, SUFFIXES[name]) for name in which} for target in lora.targets}
        saved = {name: file.read(PREFIX + NAMES[name]).astype(np.float32) for name in lora.saved}
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"adapter: cannot read {path / TENSORS} ({reason}); save the adapter again") from error
    return Adapter(lora, matrices, saved, file.metadata.get(FINGERPRINT, ""), file.metadata.get(BASE_FORMAT, STORED))


def _check_tensors(path: Path, found: dict[str, tuple[int, ...]], lora: Lora, model: Model) -> None:
    """Raises ConfigError unless a file has exactly an adapter's tensors, in the shapes of this model."""
    expected = tensor_shapes(lora, model)
    where = f"adapter: {path / TENSORS}"
    if missing := sorted(expected.keys() - found.keys()):
        raise ConfigError(f"{where}: expected {missing[0]}, got no such tensor; save the adapter again")
    if unused := sorted(found.keys() - expected.keys()):
        raise ConfigError(
            f"{where}: expected the tensors that {CONFIG} names in a model of {model.num_layers} layers, got "
            f"{unused[0]}; give an adapter of this model"
        )
    for name, shape in expected.items():
        got = found[name]
        ranks = {FACTOR_A: got[:1], FACTOR_B: got[1:]}
        if any(name.endswith(suffix) and rank != (lora.rank,) for suffix, rank in ranks.items()):
            raise ConfigError(
                f"{where}: {name}: expected rank {lora.rank}, as {CONFIG} says, got {[*got]}; save the adapter again"
            )
        if got != shape:
            raise ConfigError(f"{where}: {name}: expected {[*shape]}, got {[*got]}; give an adapter of this model")
