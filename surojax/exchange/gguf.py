"""The tensors of GGUF files, the format of llama.cpp, under Hugging Face's names, dequantised to float32 when read.

llama.cpp rotates neighbouring channels of a head (0 and 1, 2 and 3), Hugging Face those half a head apart (0 and h/2).
Files of some families (`families.family.Gguf`) therefore have the rows of queries and keys in another order: row
2 i + j of a head is row i + j h/2 of Hugging Face. Others keep Hugging Face's order.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from surojax.errors import ConfigError
from surojax.exchange import joined_rows
from surojax.exchange.expert_tensors import ExpertTensor
from surojax.exchange.gguf_file import AGAIN, FAMILIES, check_type, open_file, read_numbers
from surojax.exchange.gguf_metadata import FREQUENCIES, FURTHER, metadata_config
from surojax.exchange.naming import LAYER
from surojax.families.family import Gguf, GgufParts, GgufTransform
from surojax.families.names import LAYER_NUMBER, by_our_name, find_tensor, renamed
from surojax.families.registry import FAMILIES as BY_MODEL_TYPE, tensor_names

# Newer files have one tensor in place of two: for each expert the rows of gate, then those of up.
GATE_UP, OF_GATE_UP = "ffn_gate_up_exps.weight", ("ffn_gate_exps.weight", "ffn_up_exps.weight")


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

    left_aside: names in the file of tensors that predict further tokens, or that transformers does not read either.
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
        self.left_aside = sorted(
            name
            for name in self._contents.tensors
            if _layer_of(name) in further or self._is_unread(renamed(name, self._family.names, to))
        )
        read = {name.format(l=l) for name in self._family.filled for l in range(first)}
        names = [name for name in self._contents.tensors if name not in {FREQUENCIES, *read, *self.left_aside}]
        self._joined = _joined_parts(names, self._family, to)
        self._halves = _halves(names, self._family, to)
        of_parts = {name for _, parts in self._joined.values() for name in parts}
        of_parts |= {name for half in self._halves.values() for name in half.names}
        names = [name for name in names if name not in of_parts]
        self._theirs = by_our_name(names, lambda name: renamed(name, self._family.names, to), f"model_path: {path}")
        if twice := sorted((self._joined.keys() | self._halves.keys()) & self._theirs.keys()):
            raise ConfigError(f"model_path: {path}: expected {twice[0]} whole or in parts, got both; {AGAIN}")
        for name in (*names, *of_parts):
            check_type(path, name, self._contents.tensors[name].kind)
        self._parts = joined_rows.parts_in(self._theirs, to, first)

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        whole = set(self._theirs) - {part.name for part in self._parts.values()}
        return whole | self._parts.keys() | self._joined.keys() | self._halves.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        if part := self._parts.get(name):
            return part.shape(self.shape(part.name))
        if name in self._joined:
            return self._joined_shape(name)
        if name in self._halves:
            half = self._halves[name]
            return half.shape(self._contents.tensors[half.names[0]].shape)
        theirs = self._theirs[name]
        stored, transform = self._contents.tensors[theirs].shape, transform_of(theirs, self._family)
        return transform.shape(stored) if transform else stored

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor in float32."""
        if part := self._parts.get(name):
            if part.axis:
                return read_numbers(self._contents, self._theirs[part.name], (part.part, part.parts))
            return part.tensor([self.read(part.name)])
        if name in self._joined:
            parts, theirs = self._joined[name]
            self._joined_shape(name)
            return parts.join([read_numbers(self._contents, part) for part in theirs], self._config)
        if name in self._halves:
            half = self._halves[name]
            return half.tensor([read_numbers(self._contents, half.names[0])])
        theirs = self._theirs[name]
        numbers = read_numbers(self._contents, theirs)
        if transform := transform_of(theirs, self._family):
            return transform.from_file(numbers, self._config)
        return unpermuted(numbers, self._config["head_dim"]) if is_permuted(theirs, self._family) else numbers

    def _is_unread(self, name: str) -> bool:
        """True if transformers does not read this tensor of a layer either."""
        is_unread, number = BY_MODEL_TYPE[self._config["model_type"]].is_unread, LAYER.search(name)
        return bool(is_unread and number and is_unread(int(number[1]), name[number.end() :], self._config))

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


def _halves(names: Iterable[str], family: Gguf, to: Mapping[str, str]) -> dict[str, ExpertTensor]:
    """Finds the tensors with gate and up of all experts: {our name: which half it is of a tensor in the file}."""
    has_both = set(OF_GATE_UP) <= {x.rpartition("}.")[2] for x in family.names.values()}
    found = {}
    for name in names:
        if name.endswith(GATE_UP) and has_both:
            for half, theirs in enumerate(OF_GATE_UP):
                found[renamed(name.replace(GATE_UP, theirs), family.names, to)] = ExpertTensor((name,), half)
    return found


def _layer_of(name: str) -> int | None:
    """The number of a tensor's layer; None outside of layers."""
    number = LAYER_NUMBER.search(name)
    return number and int(number.group())
