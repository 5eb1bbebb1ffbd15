"""Reads GGUF files, the format of llama.cpp, as a config.json and tensors under Hugging Face's names.

`metadata_config` makes a config.json of the metadata, which `huggingface.model_fields` reads as any other, with its
refusals. The tensors appear under Hugging Face's names, dequantised to float32 when they are read.

llama.cpp rotates neighbouring channels of a head (0 and 1, 2 and 3), Hugging Face those half a head apart (0 and h/2).
Files of some families (`families.family.Gguf`) therefore have the rows of queries and keys in another order: row
2 i + j of a head is row i + j h/2 of Hugging Face. Others keep Hugging Face's order.

gguf_export.py writes such files, with the tables here.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from surojax.errors import ConfigError
from surojax.exchange import joined_rows
from surojax.exchange.finite import is_finite
from surojax.families import registry
from surojax.families.family import Gguf, GgufParts, GgufTransform
from surojax.families.names import LAYER_NUMBER, by_our_name, find_tensor, renamed
from surojax.families.registry import tensor_names
from surojax.families.window_keys import FULL, SLIDING
from surojax.models.decoder_config import channels
from surojax.own_files import Optional, check_form
from surojax.sizes import check_largest
from surojax.untrusted import check_file

ARCHITECTURE_OF = {  # by model_type
    name: family.gguf.architecture or name for name, family in registry.FAMILIES.items() if family.gguf is not None
}
MODEL_TYPE_OF = {architecture: name for name, architecture in ARCHITECTURE_OF.items()}
FAMILIES = {  # by architecture
    ARCHITECTURE_OF[name]: family.gguf for name, family in registry.FAMILIES.items() if family.gguf is not None
}
AGAIN = "fetch the file again"
# Types of the metadata's values that are read before those of an architecture, see own_files.py.
FORM = {"general.architecture": Optional(str), "split.count": Optional(range(2**16))}
FREQUENCIES = "rope_freqs.weight"  # what a rotary embedding of the type llama3 divides each frequency by
# Keys of the metadata after the architecture's name, and theirs in config.json.
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
ROTATED = "rope.dimension_count"  # of a head's channels
HEAD_DIM = ("attention.key_length", "attention.value_length", ROTATED)  # all are a head's channels
SCALING_TYPE = "rope.scaling.type"
# Factors of rotated channels: llama.cpp multiplies the factor that yarn implies by the first one. The second one is
# that of config.json, which llama.cpp reads in few architectures.
MAGNITUDE = "rope.scaling.attn_factor"
SAID_MAGNITUDE = "rope.scaling.yarn_attn_factor"
# Keys of the stretched positions, and theirs in rope_scaling.
SCALING = {"rope.scaling.factor": "factor", "rope.scaling.original_context_length": "original_max_position_embeddings"}
WINDOWED = "attention.sliding_window_pattern"  # a list of the layers that have the window, or n: each n-th has none
FURTHER = "nextn_predict_layers"  # layers for further tokens, which block_count includes
# Keys whose value must be this in families that have none of it.
OFF = {
    "expert_count": 0,
    "rope.scaling.yarn_beta_fast": 32,
    "rope.scaling.yarn_beta_slow": 1,
    "rope.scaling.yarn_ext_factor": 1,
}
OTHERS = frozenset(
    (
        *HEAD_DIM,
        SCALING_TYPE,
        *SCALING,
        MAGNITUDE,
        SAID_MAGNITUDE,
        *OFF,
        "rope.scaling.finetuned",
        "vocab_size",
        "expert_used_count",
    )
)


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


def metadata_config(contents: Contents, numbers: Mapping[str, np.ndarray] | None = None) -> dict[str, Any]:
    """Translates a file's metadata to a config.json. Raises ConfigError for a key that is missing or not known.

    numbers: of `FREQUENCIES` and the family's `filled` vectors, of a file that is not written yet.
    """
    read = functools.partial(_read, contents) if numbers is None else numbers.__getitem__
    metadata = contents.metadata
    architecture = metadata["general.architecture"]
    given = {
        key.removeprefix(f"{architecture}."): shortest(value)
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    family = FAMILIES[architecture]
    all_sizes = {**SIZES, **family.sizes}
    known = {*all_sizes, *family.fixed, *family.unread, *OTHERS, *([WINDOWED] if family.window_period else [])}
    if unknown := sorted(given.keys() - known):
        raise ConfigError(
            f"model_path: {contents.path} has {', '.join(unknown)}, which may change what the model computes and is "
            f"not known for {architecture}"
        )
    given.setdefault("attention.head_count_kv", given.get("attention.head_count"))
    by_layer = _layer_types(contents, given, family.without_heads) if family.without_heads else {}
    by_layer |= _windows(contents, given, family.window_period) if family.window_period else {}
    given = {"rope.freq_base": 10000.0, **family.defaults} | given
    further = given.get(FURTHER, 0) if family.further_layers else 0
    if isinstance(given.get("block_count"), int) and isinstance(further, int):
        given["block_count"] -= further
    missing = [key for key in all_sizes if given.get(key) is None]
    names = family.names
    missing += [names[ours] for ours in ("embed", "norm") if names[ours] not in contents.tensors]
    if missing:
        raise ConfigError(f"model_path: expected {missing[0]} in {contents.path}, got none; {AGAIN}")
    sizes = {theirs: given[ours] for ours, theirs in all_sizes.items()}
    if several := [
        x for x in (given["attention.head_count"], given["attention.head_count_kv"]) if not isinstance(x, int)
    ]:
        raise ConfigError(f"model_path: {contents.path}: expected equal layers, got head counts {several[0]}")
    for ours, theirs in all_sizes.items():
        value = sizes[theirs]
        if not (isinstance(value, int | float) and (value > 0 or (value == 0 and ours in family.sizes))):
            raise ConfigError(
                f"model_path: {contents.path}: {ours}: expected a positive number, got {value!r}; {AGAIN}"
            )
    head_dim = given.get(HEAD_DIM[0]) or channels(sizes)
    check_largest(sizes | {"head_dim": head_dim}, f"model_path: {contents.path}: ")
    if family.partial_rotary:
        sizes["partial_rotary_factor"] = given.pop(ROTATED, head_dim) / head_dim
    for key, expected in (dict.fromkeys(HEAD_DIM, head_dim) | OFF | dict(family.fixed)).items():
        if key not in family.sizes and given.get(key, expected) != expected:
            raise ConfigError(f"model_path: {contents.path}: {key}: expected {expected}, got {given[key]}")
    tokens = {f"{name}_token_id": metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return family.after_reading(
        sizes
        | tokens
        | dict(family.implied)
        | {key: names[ours].format(l=0) in contents.tensors for key, ours in family.present.items()}
        | _filled(contents, family, sizes["num_hidden_layers"], head_dim, read)
        | by_layer
        | {
            "model_type": MODEL_TYPE_OF[architecture],
            "head_dim": head_dim,
            "vocab_size": contents.tensors[names["embed"]].shape[0],
            "tie_word_embeddings": names["head"] not in contents.tensors,
            "rope_scaling": _rope_scaling(contents, read, given, sizes, head_dim),
        }
    )


def _windows(contents: Contents, given: dict[str, Any], period: int) -> dict[str, list[str]]:
    """Reads `layer_types` of layers with and without a window. period: each n-th has none if the file says nothing.

    Raises ConfigError for something else than a truth value for each layer, or a number of at least 1.
    """
    layers, said = given.get("block_count"), given.get(WINDOWED, period)
    layers = layers if isinstance(layers, int) else 0
    slides = [bool((l + 1) % said) for l in range(layers)] if type(said) is int and said > 0 else said
    if not given.get("attention.sliding_window"):
        slides = [False] * layers
    if not isinstance(slides, list) or len(slides) != layers:
        raise ConfigError(
            f"model_path: {contents.path}: {WINDOWED}: expected true or false for each of {layers} layers, got "
            f"{str(said)[:200]}; {AGAIN}"
        )
    return {"layer_types": [SLIDING if x else FULL for x in slides]}


def _layer_types(contents: Contents, given: dict[str, Any], without_heads: str) -> dict[str, list[str]]:
    """Reads `layer_types` from the key/value heads of each layer, in whose place `given` has those of attention.

    without_heads: the type of layers that have none. Raises ConfigError for layers with different numbers of them.
    """
    layers, heads = given.get("block_count"), given["attention.head_count_kv"]
    of_layers = heads if isinstance(heads, list) else [heads] * (layers or 0)
    different = sorted({n for n in of_layers if n})
    if len(of_layers) != layers or len(different) > 1:
        raise ConfigError(
            f"model_path: {contents.path}: attention.head_count_kv: expected a number for each of {layers} layers, the "
            f"same or 0, got {str(heads)[:200]}; {AGAIN}"
        )
    given["attention.head_count_kv"] = different[0] if different else given.get("attention.head_count")
    return {"layer_types": ["full_attention" if n else without_heads for n in of_layers]}


def _filled(
    contents: Contents, family: Gguf, layers: int, head_dim: int, read: Callable[[str], np.ndarray]
) -> dict[str, float]:
    """Reads the keys of config.json that vectors of one number say, the same in all layers.

    Raises ConfigError for other vectors, or none.
    """
    found = {}
    for name, key in family.filled.items():
        vectors = [name.format(l=l) for l in range(layers)]
        if missing := next((vector for vector in vectors if vector not in contents.tensors), None):
            raise ConfigError(f"model_path: expected {missing} in {contents.path}, got none; {AGAIN}")
        numbers = np.stack([read(vector) for vector in vectors])
        if numbers.shape != (layers, head_dim) or (numbers != (numbers[0, 0] if key else 1)).any():
            expected = "one number" if key else "ones"
            raise ConfigError(
                f"model_path: {contents.path}: expected {expected} in every {name.format(l='N')}, got others; such a "
                "model is not computed"
            )
        found |= {key: shortest(float(numbers[0, 0]))} if key else {}
    return found


def shortest(value: Any) -> Any:
    """Returns the number with the fewest digits that rounds to this float32: 1e-5 instead of 9.99999975e-06."""
    return float(str(np.float32(value))) if type(value) is float else value


def _rope_scaling(
    contents: Contents, read: Callable[[str], np.ndarray], given: dict, sizes: dict, head_dim: int
) -> dict[str, Any] | None:
    """Translates the metadata to the rope_scaling of a config.json; None without scaling."""
    if FREQUENCIES in contents.tensors:
        return _from_divisors(contents, read(FREQUENCIES), sizes["rope_theta"], head_dim)
    is_scaled = given.get("rope.scaling.factor") not in (None, 0, 1)
    kind = given.get(SCALING_TYPE, "linear" if is_scaled else "none")  # as llama.cpp takes a factor without a type
    if kind == "none":
        return None
    scaling = {theirs: given.get(ours) for ours, theirs in SCALING.items()}
    if kind == "linear" or scaling["original_max_position_embeddings"] is None:
        del scaling["original_max_position_embeddings"]
    implied = FAMILIES[contents.metadata["general.architecture"]].implied_rope
    return {"rope_type": kind} | scaling | _magnitude(contents, given, scaling["factor"]) | dict(implied)


def implied_magnitude(factor: float) -> float:
    """The factor of rotated channels that YaRN implies by the factor of positions."""
    return 0.1 * math.log(max(factor, 1)) + 1


def _magnitude(contents: Contents, given: dict[str, Any], factor: float | None) -> dict[str, float]:
    """Reads YaRN's attention_factor, if it is another than the implied one.

    Raises ConfigError if the file says one that llama.cpp does not read there.
    """
    implied = implied_magnitude(factor or 1)
    said, times = given.get(SAID_MAGNITUDE, implied), given.get(MAGNITUDE, 1)
    if not math.isclose(said, implied, rel_tol=1e-5):
        raise ConfigError(
            f"model_path: {contents.path}: {SAID_MAGNITUDE}: expected {implied:.7g}, which follows from the factor "
            f"{factor}, got {said}, which llama.cpp does not compute; fetch the model as safetensors"
        )
    return {} if times == 1 else {"attention_factor": round(times * implied, 6)}


def rope_divisors(scaling: Mapping[str, float], theta: float, head_dim: int) -> np.ndarray:
    """Returns the numbers `[head_dim / 2]` by which rotary scaling of type llama3 divides the frequencies."""
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    wavelengths_F = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    kept_F = np.clip((scaling["original_max_position_embeddings"] / wavelengths_F - low) / (high - low), 0, 1)
    return 1 / (kept_F + (1 - kept_F) / scaling["factor"])


def _from_divisors(contents: Contents, divisors_F: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Finds the `llama3` rope_scaling whose frequency divisors equal the file's.

    Files have these numbers only. The family says the parameters; the factor is the largest divisor. Raises ConfigError
    if the divisors do not follow from them, or if the family has no such models.
    """
    architecture = contents.metadata["general.architecture"]
    known = FAMILIES[architecture].llama3_rope
    if known is None:
        raise ConfigError(
            f"model_path: {contents.path}: expected no {FREQUENCIES} in a model of {architecture}, got one; fetch the "
            "model as safetensors"
        )
    divisors_F = divisors_F.reshape(-1)
    factor = float(divisors_F.max())
    expected_F = rope_divisors({"factor": factor, **known}, theta, head_dim)
    if expected_F.shape != divisors_F.shape or not np.allclose(divisors_F, expected_F, rtol=1e-4):
        listed = ", ".join(f"{name} {value}" for name, value in known.items())
        raise ConfigError(
            f"model_path: {contents.path}: expected {FREQUENCIES} of {architecture} ({listed}), got others; fetch the "
            "model as safetensors"
        )
    return {"rope_type": "llama3", "factor": factor, **known}


def _read(contents: Contents, name: str) -> np.ndarray:
    """Reads a tensor, dequantised to float32, in the file's row order.

    Raises ConfigError if unreadable or not finite.
    """
    stored = contents.tensors[name]
    try:
        with contents.path.open("rb") as file:
            raw = np.fromfile(file, np.uint8, stored.bytes, offset=stored.offset)
        numbers = gguf.quants.dequantize(raw.reshape(*stored.shape[:-1], -1), stored.kind).reshape(stored.shape)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model_path: cannot read {name} in {contents.path} ({error}); {AGAIN}") from error
    if not is_finite(numbers):
        raise ConfigError(
            f"model_path: {contents.path}: expected finite numbers, got NaN or infinity in {name}; {AGAIN}"
        )
    return numbers


def unpermuted(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders rows of queries or keys `[heads x head_dim, ...]` from neighbouring pairs to Hugging Face's halves."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def permuted(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders rows from Hugging Face's halves to neighbouring pairs: the inverse of `unpermuted`."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def is_permuted(name: str, family: Gguf) -> bool:
    """True if a tensor's rows, in files of this family, are not in Hugging Face's order, see `unpermuted`."""
    place = find_tensor(name, family.names)
    return family.neighbours and place is not None and place.ours in ("attention.wq", "attention.wk")


def parts_of(name: str, family: Gguf) -> tuple[GgufParts, tuple[str, ...]] | None:
    """Returns how files of this family have a tensor in parts, and their names; None if they have it whole."""
    place = find_tensor(name, family.names)
    parts = family.parts.get(place.ours) if place else None
    return (parts, tuple(part.format(l=place.l) for part in parts.names)) if place and parts else None


def transform_of(name: str, family: Gguf) -> GgufTransform | None:
    """The transform of a tensor in files of this family; None if they have it as it is."""
    place = find_tensor(name, family.names)
    return family.transforms.get(place.ours) if place else None


class GgufTensors:
    """The tensors of a GGUF file under Hugging Face's names. Raises ConfigError if one cannot be dequantised.

    left_aside: names in the file of tensors that predict further tokens.
    """

    def __init__(self, path: Path):
        self.path = path
        self._contents = open_file(path)
        self._config = metadata_config(self._contents)
        self._family = FAMILIES[self._contents.metadata["general.architecture"]]
        to = tensor_names(self._family.names.keys())
        first = self._config["num_hidden_layers"]
        architecture = self._contents.metadata["general.architecture"]
        further = range(first, first + self._contents.metadata.get(f"{architecture}.{FURTHER}", 0))
        self.left_aside = sorted(name for name in self._contents.tensors if _layer_of(name) in further)
        read = {name.format(l=l) for name in self._family.filled for l in range(first)}
        names = [name for name in self._contents.tensors if name not in {FREQUENCIES, *read, *self.left_aside}]
        self._joined = _joined_parts(names, self._family, to)
        of_parts = {name for _, parts in self._joined.values() for name in parts}
        names = [name for name in names if name not in of_parts]
        self._theirs = by_our_name(names, lambda name: renamed(name, self._family.names, to), f"model_path: {path}")
        if twice := sorted(self._joined.keys() & self._theirs.keys()):
            raise ConfigError(f"model_path: {path}: expected {twice[0]} whole or in parts, got both; {AGAIN}")
        for name in (*names, *of_parts):
            _check_type(path, name, self._contents.tensors[name].kind)
        self._parts = joined_rows.parts_in(self._theirs, to)

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        whole = set(self._theirs) - {part.name for part in self._parts.values()}
        return whole | self._parts.keys() | self._joined.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        if part := self._parts.get(name):
            return part.shape(self.shape(part.name))
        if name in self._joined:
            return self._joined_shape(name)
        theirs = self._theirs[name]
        stored, transform = self._contents.tensors[theirs].shape, transform_of(theirs, self._family)
        return transform.shape(stored) if transform else stored

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor in float32."""
        if part := self._parts.get(name):
            return part.tensor([self.read(part.name)])
        if name in self._joined:
            parts, theirs = self._joined[name]
            self._joined_shape(name)
            return parts.join([_read(self._contents, part) for part in theirs], self._config)
        theirs = self._theirs[name]
        numbers = _read(self._contents, theirs)
        if transform := transform_of(theirs, self._family):
            return transform.from_file(numbers, self._config)
        return unpermuted(numbers, self._config["head_dim"]) if is_permuted(theirs, self._family) else numbers

    def _joined_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of several parts. Raises ConfigError if theirs do not fit the sizes of the model."""
        parts, theirs = self._joined[name]
        for part, shape in zip(theirs, parts.shapes(self._config), strict=True):
            if (stored := self._contents.tensors[part].shape) != shape:
                raise ConfigError(f"model_path: {self.path}: {part}: expected shape {shape}, got {stored}; {AGAIN}")
        return parts.shape(self._config)


def _joined_parts(
    names: Iterable[str], family: Gguf, to: Mapping[str, str]
) -> dict[str, tuple[GgufParts, tuple[str, ...]]]:
    """Finds the tensors of ours that a file has in parts: {our name: (how, names of the parts in the file)}."""
    there, found = set(names), {}
    for ours, parts in family.parts.items():
        for l in sorted({l for name in there if (l := _layer_of(name)) is not None}):
            theirs = tuple(name.format(l=l) for name in parts.names)
            if there.issuperset(theirs):
                found[to[ours].format(l=l)] = parts, theirs
    return found


def _layer_of(name: str) -> int | None:
    """The number of a tensor's layer; None outside of layers."""
    number = LAYER_NUMBER.search(name)
    return number and int(number.group())


def _check_type(path: Path, name: str, kind: gguf.GGMLQuantizationType) -> None:
    """Raises ConfigError if tensors of this type cannot be dequantised."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError as error:
        raise ConfigError(
            f"model_path: {path} has {name} as {kind.name}, which is not read; fetch the model in another "
            "quantisation, such as Q8_0"
        ) from error
