"""Reads weights under Hugging Face's names, tensor by tensor, into a training state of any placement.

`Tensors` is what has them: a folder with safetensors files (`Weights`, here), a GGUF file (gguf.py), or a checkpoint
(checkpoint_tensors.py).
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np

from surojax.errors import ConfigError, shown
from surojax.exchange import bitsandbytes, compressed, joined_rows, missing, parts, stored_mxfp4
from surojax.exchange.expert_tensors import ExpertTensor, parts_in
from surojax.exchange.finite import is_finite, is_float
from surojax.exchange.huggingface import Float8Scales, float8_scales, read_config, read_whole_config
from surojax.exchange.joined_rows import RowsOf
from surojax.exchange.naming import is_no_part, naming_of, number_of_layers
from surojax.exchange.shards import Shard
from surojax.families.family import TENSOR_NAMES
from surojax.families.names import by_our_name
from surojax.families.registry import tensor_names
from surojax.models.kinds.targets import WITHOUT_EXPERTS
from surojax.models.model import Model, Segment
from surojax.numerics import base_formats, block_fp8, mxfp4, nf4, nvfp4
from surojax.numerics.base_formats import Coded, is_in
from surojax.placement.param import OUTER, Param, base
from surojax.untrusted import expanded, read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LARGEST_INDEX = 128 << 20  # bytes; 100,000 tensors take 10 MB
AGAIN = "fetch the model again"
FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))


class Tensors(Protocol):
    """Tensors under Hugging Face's names, each read on request. path: of their folder or file."""

    path: Path

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor, in any float dtype.

        Raises ConfigError or CheckpointError if it cannot be read, or is not finite.
        """
        ...


class Weights:
    """The tensors of a folder with safetensors files; float8 matrices are multiplied with their blocks' scales.

    Matrices that bitsandbytes stored in NF4, compressed-tensors in NVFP4, and experts in MXFP4, are dequantised too.
    `read_coded` reads all of them as they are.

    Of an image-text model these are the language model's tensors; `left_aside` has the names of the other tensors, of
    layers that predict further tokens, and of keys that no layer reads, see beside.py.

    Raises ConfigError if a file of the index is missing or damaged, if a tensor or its scales are not there, and if a
    tensor is stored as integers. Reading a tensor raises it if one of its numbers or scales is NaN or infinite.
    """

    def __init__(self, folder: str | Path):
        self.path = expanded(folder)
        files = self._files()
        config = read_whole_config(self.path)
        naming = naming_of(config)
        text_names = [
            name
            for name in files
            if not (naming.in_whole and parts.is_of_images(name)) and not is_no_part(name, config)
        ]
        self._stored_as = by_our_name(text_names, naming.ours, f"model_path: {self.path}")
        self.left_aside: list[str] = sorted(files.keys() - set(self._stored_as.values()))
        self._files_aside = {name: files[name] for name in self.left_aside}
        shards = {name: self._open(name) for name in sorted({files[name] for name in self._stored_as.values()})}
        self._shard_of: dict[str, Shard] = {}
        in_nf4 = bitsandbytes.matrices(set(self._stored_as))
        self._beside = bitsandbytes.parts_of(in_nf4)
        self._bytes = {name + part for name in in_nf4 for part in ("", bitsandbytes.STATE)}  # in any dtype
        in_nf4 |= self._beside
        self._in_mxfp4 = stored_mxfp4.matrices(set(self._stored_as))
        mxfp4_parts = stored_mxfp4.parts_of(self._in_mxfp4)
        self._beside |= mxfp4_parts
        self._bytes |= mxfp4_parts
        self._in_nvfp4 = compressed.packed(set(self._stored_as))
        self._beside |= compressed.parts_of(self._in_nvfp4)
        coded = in_nf4 | mxfp4_parts | compressed.parts_of(self._in_nvfp4)
        for tensor, name in self._stored_as.items():
            file = files[name]
            if name not in shards[file].entries:
                raise ConfigError(f"model_path: {INDEX} names {name} in {file}, which does not have it; {AGAIN}")
            self._shard_of[tensor] = shards[file]
            if (dtype := self._entry(tensor).dtype).kind in "biu" and tensor not in coded:
                raise ConfigError(
                    f"model_path: {self.path}: expected {tensor} in a float dtype, got {dtype}; fetch the model before "
                    "it was quantised"
                )
        in_float8 = {name for name in self._shard_of if self._entry(name).dtype in FLOAT8}
        self._in_float8 = in_float8 - compressed.parts_of(self._in_nvfp4)  # whose scales are in float8
        self._float8 = self._check_scales() if self._in_float8 else Float8Scales((1, 1), "")
        self._beside |= {scale_of_inputs(name) for name in self._in_float8}
        names = self._shard_of.keys()
        self.in_nf4 = {
            name: bitsandbytes.stored(name, set(names), self._read) for name in sorted(in_nf4 - self._beside)
        }
        self._parts: dict[str, ExpertTensor | RowsOf] = {
            **parts_in(self._in_files(), naming.expert_files),
            **joined_rows.parts_in(self._in_files(), naming.canonical, number_of_layers(config)),
        }

    def _files(self) -> dict[str, str]:
        """Returns the file of each tensor."""
        index = self.path / INDEX
        if (self.path / SINGLE).is_file():  # which transformers reads even if there is an index
            return dict.fromkeys(self._open(SINGLE).entries, SINGLE)
        if index.is_file():
            try:
                file_of = dict(read_json(index, LARGEST_INDEX)["weight_map"])
                for file in file_of.values():
                    if not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
                        raise ValueError(f"weight_map: expected names of files in its folder, got {shown(file, 80)}")
                return file_of
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"model_path: cannot read {index} ({error!r}); {AGAIN}") from error
        got = missing.held_instead(self.path) or missing.misnamed(self.path, INDEX) or f"neither; {AGAIN}"
        raise ConfigError(f"model_path: expected {SINGLE} or {INDEX} in {self.path}, got {got}")

    def _open(self, name: str) -> Shard:
        try:
            return Shard(self.path / name)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise ConfigError(f"model_path: cannot read {self.path / name} ({reason}); {AGAIN}") from error

    def open_left_aside(self) -> dict[str, Shard]:
        """Opens the files of the tensors in `left_aside`: {name: file}. Raises ConfigError if one is damaged."""
        shards = {file: self._open(file) for file in sorted(set(self._files_aside.values()))}
        return {name: shards[file] for name, file in self._files_aside.items()}

    @property
    def scales(self) -> Float8Scales:
        """The scales of matrices in float8, as config.json says; without a name if it says nothing."""
        return float8_scales(read_config(self.path)) or Float8Scales((1, 1), "")

    def _check_scales(self) -> Float8Scales:
        """Returns config.json's `Float8Scales`. Raises ConfigError unless every float8 matrix has scales."""
        said = float8_scales(read_config(self.path))
        for name in sorted(self._in_float8):
            if said is None:
                raise ConfigError(
                    f"model_path: {self.path} has {name} in float8, and config.json no quantization_config that says "
                    f"how it is scaled; {AGAIN}"
                )
            block, scales = said.block, name + said.suffix
            if scales not in self._shard_of:
                raise ConfigError(f"model_path: {self.path} has {name} in float8 without {scales}; {AGAIN}")
            shape = self._entry(name).shape
            stored = self._entry(scales).shape
            if block is None:
                if len(shape) not in (2, 3) or math.prod(stored) != math.prod(shape[:-2]):
                    raise ConfigError(
                        f"model_path: {scales}: expected one scale of each matrix for {[*shape]}, got {[*stored]}; "
                        f"{AGAIN}"
                    )
                continue
            if len(shape) != 2:
                raise ConfigError(
                    f"model_path: {scales}: expected a matrix to scale in blocks {[*block]}, got {[*shape]}; fetch the "
                    "model before it was quantised"
                )
            expected = tuple(-(-size // block_size) for size, block_size in zip(shape, block, strict=True))
            if stored != expected:
                raise ConfigError(
                    f"model_path: {scales}: expected {[*expected]} scales of blocks {[*block]} for "
                    f"{[*shape]}, got {[*stored]}; {AGAIN}"
                )
        assert said is not None
        return said

    def _entry(self, name: str):
        return self._shard_of[name].entries[self._stored_as[name]]

    def _in_files(self) -> set[str]:
        """The names of all tensors except scales and codes; experts stored apart have a name each."""
        scales = {name + self._float8.suffix for name in self._in_float8}
        return (self._shard_of.keys() - scales - self._beside) | self._in_mxfp4 | self._in_nvfp4

    @property
    def names(self) -> set[str]:
        """The names of all tensors except scales and codes."""
        stored_parts = {name for part in self._parts.values() for name in part.names}
        return (self._in_files() - stored_parts) | self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises ConfigError if experts' shapes differ."""
        if part := self._parts.get(name):
            first, *others = (self._shape_in_files(stored) for stored in part.names)
            for other, shape in zip(part.names[1:], others, strict=True):
                if shape != first:
                    raise ConfigError(f"model_path: {other}: expected {[*first]}, as expert 0, got {[*shape]}; {AGAIN}")
            return part.shape(first)
        return self._shape_in_files(name)

    def _shape_in_files(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of the files, dequantised."""
        if name in self._in_mxfp4:
            return stored_mxfp4.stored_shape(name, lambda stored: self._entry(stored).shape)
        if name in self._in_nvfp4:
            return compressed.packed_shape(name, lambda stored: self._entry(stored).shape)
        return self.in_nf4[name].shape if name in self.in_nf4 else self._entry(name).shape

    def format_of(self, name: str) -> str:
        """The format that a matrix is stored in: a key of `base_formats.FORMATS`, or a description; "": unquantised."""
        if name in self._in_mxfp4:
            return "mxfp4"
        if part := self._parts.get(name):
            if isinstance(part, RowsOf):
                return ""
            if part.is_of_all:
                return self.format_of(part.names[0])
            formats = set(map(self.format_of, part.names))
            return formats.pop() if len(formats) == 1 else ""
        if name in self.in_nf4:
            return "nf4"
        if name in self._in_nvfp4:
            return "nvfp4"
        if name not in self._in_float8:
            return ""
        dtype = self._entry(name).dtype
        if self._float8.block is None:
            return f"{dtype} with one scale"
        rows, columns = self._float8.block
        if dtype == ml_dtypes.float8_e4m3fn and rows == columns == block_fp8.BLOCK:
            return "fp8"
        return f"{dtype} in blocks of {rows} x {columns}"

    def read_coded(self, name: str, like: Coded) -> Coded:
        """Reads a matrix, or all experts' matrices, without dequantising, as codes and scales like `like`."""
        part = self._parts.get(name)
        assert not isinstance(part, RowsOf), "parts of rows are read as numbers"
        if isinstance(like, mxfp4.Mxfp4):
            assert part is not None, "matrices of experts alone are stored so"
            return stored_mxfp4.read_mxfp4(part.names[0], part.rows, self._read)
        if part:
            coded_experts = [self.read_coded(expert_name, like) for expert_name in part.names]
            return jax.tree.map(lambda *arrays: np.stack(arrays), *coded_experts)
        if isinstance(like, block_fp8.BlockFp8):
            return block_fp8.from_blocks(self._read(name), self._read_scales(name), like)
        if isinstance(like, nvfp4.Nvfp4):
            return compressed.read_nvfp4(name, self._read)
        assert isinstance(like, nf4.Nf4), "no other format is read from files"
        return bitsandbytes.read_nf4(name, self.in_nf4[name], self._read, like.shift.shape[-1])

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor in its stored dtype; dequantised if quantised, to float32 from float8 and NVFP4."""
        if part := self._parts.get(name):
            if self.format_of(name) == "mxfp4":
                return read_dequantised(self, name, "bfloat16")  # which is exact
            if isinstance(part, RowsOf) and self._is_plain(part.name):
                return self._read(part.name, part)
            return part.tensor(self.read(expert_name) for expert_name in part.names)
        if name in self.in_nf4:
            return read_dequantised(self, name, self.in_nf4[name].dtype)
        if name in self._in_nvfp4:
            return self._checked(name, read_dequantised(self, name, "float32"))
        if name not in self._in_float8:
            return self._read(name)
        with np.errstate(over="ignore"):  # reported by the check
            numbers = dequantised(self._read(name), self._read_scales(name), self._float8.block)
        return self._checked(name, numbers)

    def _read_scales(self, name: str) -> np.ndarray:
        """Reads the scales of a float8 matrix, as float32."""
        return self._read(name + self._float8.suffix).astype(np.float32)

    def _is_plain(self, name: str) -> bool:
        """True if a tensor's numbers are stored as they are."""
        return not self.format_of(name)

    def _read(self, name: str, part: RowsOf | None = None) -> np.ndarray:
        """Reads a tensor as it is stored, or a part of it. Raises ConfigError if it cannot be read or is not finite."""
        try:
            if part is None:
                array = self._shard_of[name].read(self._stored_as[name])
            else:
                array = self._shard_of[name].read_part(self._stored_as[name], part.part, part.parts, part.axis)
                array = array.reshape(part.shape(self._entry(name).shape))
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"model_path: cannot read {name} in {self.path} ({reason}); {AGAIN}") from error
        return array if name in self._bytes else self._checked(name, array)

    def _checked(self, name: str, array: np.ndarray) -> np.ndarray:
        """Returns the array; raises ConfigError if it holds a NaN or an infinity."""
        if is_float(array.dtype) and not is_finite(array):
            raise ConfigError(
                f"model_path: {self.path}: expected finite numbers, got NaN or infinity in {name}; {AGAIN}"
            )
        return array


def scale_of_inputs(name: str) -> str:
    """The name of the scale that rounds the inputs of a product with a float8 matrix; here they are not rounded."""
    module = name.removesuffix(".weight")
    return f"{module}{'_' if module == name else '.'}activation_scale"


def dequantised(matrix: np.ndarray, scales: np.ndarray, block: tuple[int, int] | None) -> np.ndarray:
    """Multiplies a float8 matrix, or a stack of experts' matrices, by its scales, in float32.

    block: rows and columns that share a scale; blocks at the ends may be smaller. None: each matrix has one scale.
    """
    numbers = matrix.astype(np.float32)
    if block is None:
        return numbers * scales.reshape(*matrix.shape[:-2], 1, 1)
    rows, columns = block
    for i, row_scales in enumerate(scales):
        numbers[i * rows : (i + 1) * rows] *= np.repeat(row_scales, columns)[: numbers.shape[1]]
    return numbers


def read_dequantised(weights: Weights, name: str, dtype: str) -> np.ndarray:
    """Reads and dequantises a matrix stored in one of `base_formats.FORMATS`."""
    like = base_formats.FORMATS[weights.format_of(name)].planned(weights.shape(name))
    return np.asarray(_dequantised(weights.read_coded(name, like), dtype))


@functools.partial(jax.jit, static_argnums=1)
def _dequantised(q: Coded, dtype: str) -> jax.Array:
    return base_formats.dequantise(q, dtype)


def describe_source(tensors: Tensors, *, kept: bool = False) -> str:
    """Describes in one line the path that tensors are read from, and the tensors and files that are not read.

    kept: an export has the tensors that are not the language model's as they are.
    """
    left_aside: list[str] = getattr(tensors, "left_aside", [])
    if (tensors.path / SINGLE).is_file() and (tensors.path / INDEX).is_file():
        return f"{tensors.path / SINGLE}, and not the files that {INDEX} beside it names, as transformers does"
    if not left_aside:
        return str(tensors.path)
    others = sorted({name.removeprefix("model.").partition(".")[0] for name in left_aside})
    number = f"{len(left_aside)} tensors of {', '.join(others)}"
    aside = f"{number} are {'kept as they are' if kept else 'left aside'}"
    return f"the language model in {tensors.path}; {aside}"


def tensor_name(param: Param, segment: Segment | None = None, l: int = 0) -> str:
    """Hugging Face's name of a parameter's tensor, in layer l of a segment or outside of the layers."""
    if segment is None:
        return TENSOR_NAMES[param.name]
    table = tensor_names({param.name for param in jax.tree.leaves(base(segment.params))})
    without_experts = WITHOUT_EXPERTS + param.name
    is_dense = segment.statistics is None and without_experts in table
    return table[without_experts if is_dense else param.name].format(l=segment.numbers[l])


def params(model: Model) -> dict[str, Param]:
    """Returns each tensor's `Param` by the tensor's name: embedding, layer after layer, then the others."""
    outer = {tensor_name(param): param for param in jax.tree.leaves(base(model.outer_params))}
    by_name = {TENSOR_NAMES["embed"]: outer.pop(TENSOR_NAMES["embed"])}
    for segment in model.segments:
        for l in range(segment.num_layers):
            by_name |= {tensor_name(param, segment, l): param for param in jax.tree.leaves(base(segment.params))}
    return by_name | outer


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors by name, in the order of `params`."""
    return {name: param.shape for name, param in params(model).items()}


def tensors_by_name(tree: dict, model: Model) -> dict[str, np.ndarray]:
    """Flattens a tree of master weights, or of their gradients, to tensors by our names.

    tree: arrays in host memory.
    """

    def one(param: Param, section: str) -> np.ndarray:
        return functools.reduce(lambda branch, key: branch[key], param.name.split("."), tree[section])

    tensors = {tensor_name(param): one(param, OUTER) for param in jax.tree.leaves(base(model.outer_params))}
    for segment in model.segments:
        for param in jax.tree.leaves(base(segment.params)):
            stack = one(param, segment.name)
            tensors |= {tensor_name(param, segment, l): stack[l] for l in range(segment.num_layers)}
    return tensors


def check_tensors(weights: Tensors, model: Model) -> None:
    """Raises ConfigError unless the files have exactly the model's tensors, in its shapes.

    A head beside an embedding that is tied to it has to be equal to it: transformers computes another one as it is.
    """
    expected = shapes(model)
    names = weights.names
    if lacking := sorted(expected.keys() - names):
        if lacking == [TENSOR_NAMES["head"]]:
            raise ConfigError(
                f"model_path: expected {lacking[0]} in {weights.path}, since tie_word_embeddings is not true in "
                f"config.json, or untied_head is set, got no such tensor; set tie_word_embeddings to true there, and "
                "untied_head=False, if its head is the embedding"
            )
        otherwise = f"{AGAIN}, or correct its config.json if that is of another model"
        part = joined_rows.part_of_rows(lacking[0])
        tensor = part.name if part else lacking[0]
        got = missing.named_instead(tensor, names, otherwise)
        raise ConfigError(f"model_path: expected {tensor} in {weights.path}, {got}")
    # A tied head is the embedding, and the frequencies of old checkpoints follow from rope_theta.
    unused = {name for name in names - expected.keys() if not name.endswith("rotary_emb.inv_freq")}
    tied_head = model.head == "embed" and TENSOR_NAMES["head"] in unused
    unused -= {TENSOR_NAMES["head"]} if tied_head else set()
    if unused:
        raise ConfigError(
            f"model_path: {weights.path} has {min(unused)[:200]}, which a model with this config.json does not use; "
            "correct that, or save the model by itself"
        )
    for name, shape in expected.items():
        if weights.shape(name) != shape:
            raise ConfigError(
                f"model_path: {name}: expected {[*shape]}, as config.json says, got {[*weights.shape(name)]}; correct "
                f"that, or {AGAIN}"
            )
    if tied_head and not np.array_equal(weights.read(TENSOR_NAMES["head"]), weights.read(TENSOR_NAMES["embed"])):
        raise ConfigError(
            f"model_path: {weights.path}: expected {TENSOR_NAMES['head']} equal to "
            f"{TENSOR_NAMES['embed']}, since config.json says "
            "tie_word_embeddings, got another; set untied_head=True to train it apart, or tie_word_embeddings to false "
            "in config.json"
        )


def readers(
    weights: Tensors, coded: Callable[[Segment, Param], Coded | None] | None = None
) -> tuple[Callable[[Segment, int], Any], Callable[[Model], dict]]:
    """Makes functions that read weights: (segment, l) -> arrays of a layer, and model -> arrays of the outer layers.

    coded: the planned arrays of a parameter that rests in a base's format, else None. Matrices that are stored in that
    format are read as they are.
    """

    def layer(segment: Segment, l: int):
        def read(param: Param):
            name = tensor_name(param, segment, l)
            like = coded(segment, param) if coded else None
            if like is not None and isinstance(weights, Weights) and is_in(like, weights.format_of(name)):
                return weights.read_coded(name, like)
            return weights.read(name)

        return jax.tree.map(read, base(segment.params))

    def outer(model: Model) -> dict:
        return jax.tree.map(lambda param: weights.read(tensor_name(param)), base(model.outer_params))

    return layer, outer


def stacks(weights: Tensors, model: Model, dtype: str, sharding: jax.sharding.Sharding) -> dict:
    """Reads all weights by section, in this dtype and sharding; a segment's weights are stacks `[L, ...]`.

    Host memory holds one stack at a time.
    """

    def stack(segment: Segment, param: Param) -> jax.Array:
        layers = np.empty((segment.num_layers, *param.shape), dtype)
        for l in range(segment.num_layers):
            layers[l] = weights.read(tensor_name(param, segment, l))
        return jax.device_put(layers, sharding)

    def outer(param: Param) -> jax.Array:
        return jax.device_put(weights.read(tensor_name(param)).astype(dtype), sharding)

    segments = {s.name: jax.tree.map(functools.partial(stack, s), base(s.params)) for s in model.segments}
    return segments | {OUTER: jax.tree.map(outer, base(model.outer_params))}
