"""The header and the numbers of a GGUF file, the format of llama.cpp, and the families whose files are known.

gguf_metadata.py makes a config.json of the header, gguf.py has the tensors, and gguf_export.py writes such files.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from surojax.errors import ConfigError
from surojax.exchange.finite import is_finite
from surojax.families import registry
from surojax.families.family import Gguf
from surojax.own_files import Optional, check_form
from surojax.untrusted import check_file

OF_FAMILY = {  # by model_type
    name: [x._replace(architecture=x.architecture or name) for x in (family.gguf, *family.further_gguf)]
    for name, family in registry.FAMILIES.items()
    if family.gguf is not None
}
MODEL_TYPE_OF = {x.architecture: name for name, all_ in OF_FAMILY.items() for x in all_}
FAMILIES = {x.architecture: x for all_ in OF_FAMILY.values() for x in all_}  # by architecture
AGAIN = "fetch the file again"
# Types of the metadata's values that are read before those of an architecture, see own_files.py.
FORM = {"general.architecture": Optional(str), "split.count": Optional(range(2**16))}


class GgufEntry(NamedTuple):
    """Type, shape and position of one tensor in a file. shape: Hugging Face's [out, in]."""

    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    bytes: int


class Contents(NamedTuple):
    """A file's header: metadata by key, and each tensor's entry by its name in the file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufEntry]


def gguf_of(config: dict[str, Any]) -> Gguf:
    """The files of models with this config.json. Raises ConfigError if no architecture has such models."""
    described = [x for x in OF_FAMILY[config["model_type"]] if x.describes(config)]
    if not described:
        raise ConfigError(f"export: no architecture of {config['model_type']} has layers of all these kinds")
    return described[0]


def is_gguf(path: Path) -> bool:
    """True if a path ends as a GGUF file's; the file need not exist."""
    return path.suffix == ".gguf"


def open_file(path: Path) -> Contents:
    """Reads the header of a GGUF file. Raises ConfigError if the file is damaged or of an unknown family."""
    try:
        check_file(path)
        contents = _parsed(path, path.stat().st_mtime_ns)
        check_form(contents.metadata, FORM)
    except Exception as error:  # the library raises what a damaged file happens to cause
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"model_path: cannot read {path} as GGUF ({reason[:200]}); {AGAIN}") from error
    architecture = contents.metadata.get("general.architecture")
    if architecture not in FAMILIES:
        raise ConfigError(
            f"model_path: {path}: expected general.architecture {', '.join(FAMILIES)}, got {architecture!r}; "
            "other architectures are not known"
        )
    if contents.metadata.get("split.count", 1) > 1:
        raise ConfigError(
            f"model_path: {path}: expected a file with the entire model, got one of "
            f"{contents.metadata['split.count']} parts; join them (llama-gguf-split --merge)"
        )
    return contents


@functools.lru_cache(maxsize=1)
def _parsed(path: Path, modified: int) -> Contents:
    """Parses a file's header, in seconds; cached. modified: the file's time, so that a changed file is parsed again."""
    reader = gguf.GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items() if field.types}
    tensors = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        tensors[tensor.name] = GgufEntry(tensor.tensor_type, shape, int(tensor.data_offset), int(tensor.n_bytes))
    return Contents(path, metadata, tensors)


def read_numbers(contents: Contents, name: str, columns: tuple[int, int] = (0, 1)) -> np.ndarray:
    """Reads a tensor, dequantised to float32, in the file's row order.

    columns: (i, n): of the n equal parts of its columns the i-th alone. Raises ConfigError if unreadable or not finite.
    """
    stored = contents.tensors[name]
    i, n = columns
    block, _ = gguf.GGML_QUANT_SIZES[stored.kind]
    size = stored.shape[-1] // n
    apart = size % block == 0  # else a block has numbers of two parts
    try:
        raw = np.memmap(contents.path, np.uint8, "r", stored.offset, (stored.bytes,)).reshape(*stored.shape[:-1], -1)
        raw = np.split(raw, n, -1)[i] if apart else raw
        numbers = gguf.quants.dequantize(np.array(raw), stored.kind).reshape(*stored.shape[:-1], -1)
        numbers = numbers if apart else np.split(numbers, n, -1)[i]
    except (OSError, ValueError) as error:
        raise ConfigError(f"model_path: cannot read {name} in {contents.path} ({error}); {AGAIN}") from error
    if not is_finite(numbers):
        raise ConfigError(
            f"model_path: {contents.path}: expected finite numbers, got NaN or infinity in {name}; {AGAIN}"
        )
    return numbers


def check_type(path: Path, name: str, kind: gguf.GGMLQuantizationType) -> None:
    """Raises ConfigError if tensors of this type cannot be dequantised."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError as error:
        raise ConfigError(
            f"model_path: {path} has {name} as {kind.name}, which is not read; fetch the model in another "
            "quantisation, such as Q8_0"
        ) from error
