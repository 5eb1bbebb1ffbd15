"""Exports a model to a GGUF file, the format of llama.cpp, with the names and keys that gguf_metadata.py reads.

Metadata is written if that reads the same model from it, and refused else: a key that llama.cpp would need and that
is not written, such as one of a sliding window, is noticed so. Tensors are read, quantised and written one at a time.
Vectors, such as weights of norms, stay in float32: llama.cpp has no other products with them.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np

from surojax.errors import ConfigError, nearest_name
from surojax.exchange import config_json
from surojax.exchange.export import problem_beside, unfinished_beside
from surojax.exchange.gguf import is_permuted, parts_of, permuted, transform_of
from surojax.exchange.gguf_file import FAMILIES, OF_FAMILY, Contents, GgufEntry, gguf_of
from surojax.exchange.gguf_metadata import (
    FREQUENCIES,
    HEAD_DIM,
    MAGNITUDE,
    ROTATED,
    SCALING,
    SCALING_TYPE,
    SIZES,
    WINDOWED,
    implied_magnitude,
    metadata_config,
    rope_divisors,
)
from surojax.exchange.huggingface import model_fields
from surojax.exchange.joined_rows import part_of_rows, shape_of_all
from surojax.exchange.model_tensors import Tensors, params, shapes
from surojax.families import registry
from surojax.families.family import TENSOR_NAMES, Gguf
from surojax.families.names import renamed
from surojax.families.registry import tensor_names
from surojax.families.window_keys import SLIDING
from surojax.models.decoder_config import channels
from surojax.models.kinds.targets import WITHOUT_EXPERTS
from surojax.models.model import Model
from surojax.models.rotary import PROPORTIONAL
from surojax.placement.param import Kind as ParamKind, base
from surojax.untrusted import expanded

Kind = gguf.GGMLQuantizationType
# The types of a file's matrices, and what general.file_type says of such a file.
DTYPES = {
    "bfloat16": (Kind.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "float16": (Kind.F16, gguf.LlamaFileType.MOSTLY_F16),
    "float32": (Kind.F32, gguf.LlamaFileType.ALL_F32),
    "q8_0": (Kind.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (Kind.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
HALF = 65504.0  # the largest float16, in which scales are too
LARGEST = {Kind.F32: float(np.finfo(np.float32).max), Kind.BF16: 3.3895313892515355e38}  # of others: HALF


def check_dtype(dtype: str) -> None:
    """Raises ConfigError if GGUF files are not written with this type."""
    if dtype not in DTYPES:
        change = nearest_name(dtype, DTYPES, "choose one")
        raise ConfigError(f"--dtype: expected one of {', '.join(DTYPES)} for a .gguf file, got {dtype!r}; {change}")


def modelfile_of(path: Path) -> Path:
    """The path of the Modelfile beside a GGUF file."""
    return path.with_suffix(".Modelfile")


def check_gguf_path(file: str | Path) -> Path:
    """Checks the path of a GGUF file to write, and returns it absolute.

    Raises ConfigError if it exists, or cannot be made.
    """
    path = expanded(file).absolute()
    try:
        there = [path for path in (path, modelfile_of(path)) if path.exists(follow_symlinks=False)]
        problem = f"{there[0].name} exists" if there else problem_beside(path)
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise ConfigError(f"export: expected a file that can be made, got {str(file)!r} ({problem}); choose another")
    return path


def export_gguf(
    tensors: Tensors,
    model: Model,
    source: dict[str, Any],
    tokenizer: dict[str, Any],
    file: str | Path,
    *,
    modelfile: str,
    dtype: str = "bfloat16",
) -> Path:
    """Writes a GGUF file and its Modelfile, and returns the file's path.

    tensors: of which those of `model` are written. source: config.json of the model. tokenizer: metadata of its
    tokenizer. modelfile: the content of the Modelfile. dtype: of the matrices, one of DTYPES; with q4_0, the head, or
    the embedding if it is the head, is q8_0.

    Raises ConfigError for a model that such files do not describe, a row that is not a whole number of blocks, a number
    beyond the type, and if a file exists or cannot be written; what reading the tensors raises. Nothing is left then.
    """
    check_dtype(dtype)
    path = check_gguf_path(file)
    metadata, vectors, config = gguf_metadata(source, path)
    kinds = _kinds(model, dtype)
    family = FAMILIES[metadata["general.architecture"]]
    table = _table_of(model, family)
    stored_as = {renamed(name, table, family.names): name for name in kinds}
    if unnamed := sorted(stored_as.keys() & kinds.keys()):
        raise ConfigError(
            f"export: expected a model whose tensors GGUF files of {family.architecture} have, got {unnamed[0]}; "
            "export a folder, which llama.cpp's convert_hf_to_gguf.py may convert"
        )
    expected = shapes(model)
    of_head = metadata[f"{metadata['general.architecture']}.{HEAD_DIM[0]}"]

    writer = gguf.GGUFWriter(None, metadata["general.architecture"])
    about = {
        "general.type": "model",
        "general.name": path.stem,
        "general.file_type": int(DTYPES[dtype][1]),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
    }
    for key, value in (about | metadata | tokenizer).items():
        if key != "general.architecture":  # the writer's own
            writer.add_key_value(key, value, _value_type(value))
    size = 0
    for name, vector in vectors.items():
        writer.add_tensor_info(name, vector.shape, vector.dtype, vector.nbytes)
    in_files: dict[str, list[str]] = {}  # ours, of which several may be the rows of one
    for name, ours in sorted(stored_as.items(), key=lambda pair: ((x := part_of_rows(pair[0])) and x.part) or 0):
        part = part_of_rows(name)
        in_files.setdefault(part.name if part else name, []).append(ours)
    for name, ours in in_files.items():
        part = part_of_rows(ours[0])
        kind = kinds[ours[0]]
        shape = expected[ours[0]]
        shape = shape_of_all(part, shape, len(ours), convolution=False) if part else shape
        if transform := transform_of(name, family):
            shape = transform.shape_in_file(shape)
        stored = [(name, shape)]
        if in_parts := parts_of(name, family):
            stored = list(zip(in_parts[1], in_parts[0].shapes(config), strict=True))
        for of_file, shape_in_file in stored:
            _check_rows(shape_in_file, kind, of_file, dtype)
            bytes_ = _bytes(shape_in_file, kind)
            writer.add_tensor_info(of_file, shape_in_file, np.dtype(np.float32), bytes_, raw_dtype=kind)
            size += bytes_

    def arrays() -> Iterator[np.ndarray]:
        yield from vectors.values()
        for name, ours in in_files.items():
            kind = kinds[ours[0]]
            part = part_of_rows(ours[0])
            if part and part.axis:  # a table of all layers, which is large: its blocks are within a layer's columns
                yield np.concatenate([gguf.quants.quantize(_read(tensors, x, kind, dtype), kind) for x in ours], 1)
                continue
            numbers = np.concatenate([_read(tensors, part, kind, dtype) for part in ours])
            rows = permuted(numbers, of_head) if is_permuted(name, family) else numbers
            transform = transform_of(name, family)
            rows = transform.to_file(rows, config) if transform else rows
            in_parts = parts_of(name, family)
            for stored in in_parts[0].divide(rows, config) if in_parts else [rows]:
                yield gguf.quants.quantize(stored, kind)

    with unfinished_beside(path, size) as unfinished, unfinished_beside(modelfile_of(path), 0) as small:
        small.write_text(modelfile, encoding="utf-8")
        try:
            writer.write_header_to_file(unfinished)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for array in arrays():
                writer.write_tensor_data(array)
        finally:
            writer.close()
    return path


def gguf_metadata(source: dict[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]:
    """Makes (metadata, vectors that say settings, config.json) for a model with this config.json.

    path: of the file, for messages. Raises ConfigError unless gguf_metadata.py reads the same model from them.
    """
    fields = model_fields(source)
    families = {name: registry.FAMILIES[name] for name in OF_FAMILY}
    positions = source.get("max_position_embeddings")
    if not isinstance(positions, int):
        raise ConfigError(
            f"model_path: config.json: max_position_embeddings: expected a number for a .gguf file, got {positions!r}; "
            "add it"
        )
    try:
        said = config_json.made(fields, positions, {}, families, with_class=False)
        metadata, vectors = _metadata(said, source)
        family = gguf_of(said)
        names = family.names
        entry = GgufEntry(Kind.F32, (said["vocab_size"], said["hidden_size"]), 0, 0)
        outer = ["embed", "norm"] + ([] if said["tie_word_embeddings"] else ["head"])
        entries = {names[ours]: entry for ours in outer}
        entries |= {names[ours].format(l=0): entry for key, ours in family.present.items() if said[key]}
        layers_with = {ours: family.before_writing(said)[key] for key, ours in family.layers_with.items()}
        entries |= {names[ours].format(l=l): entry for ours, layers in layers_with.items() for l in layers}
        entries |= dict.fromkeys(vectors, entry)
        back = _comparable(model_fields(metadata_config(Contents(path, metadata, entries), vectors)))
        wanted = _comparable(fields)
        lost = [f"{key}={wanted[key]!r}" for key in wanted if not _is_same(wanted[key], back[key])]
        problem = f"{said['model_type']} does not have {', '.join(lost)}" if lost else ""
    except ConfigError as error:
        problem = str(error).rpartition(": ")[2]
    if problem:
        raise ConfigError(
            f"export: expected a model that GGUF files of {', '.join(FAMILIES)} describe, got {source['model_type']} "
            f"({problem}); export a folder, which llama.cpp's convert_hf_to_gguf.py may convert"
        )
    return metadata, vectors, said


def _comparable(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the `model` fields that a trained model's results depend on."""
    complete = config_json.normal(fields)
    del complete["initializer_range"]
    if complete["rope_scaling"] == PROPORTIONAL:  # files say it as the number of rotated pairs of channels
        h = complete["global_head_dim"] or complete["head_dim"]
        complete["rope_partial_rotary_factor"] = int(complete["rope_partial_rotary_factor"] * h // 2)
    return complete


def _is_same(wanted: Any, back: Any) -> bool:
    """True if a value is what comes back, floats as float32 or as follows from one."""
    if type(wanted) is float and type(back) is float:
        return math.isclose(wanted, back, rel_tol=2.0**-22)
    return wanted == back


def _metadata(said: dict[str, Any], source: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Translates a config.json to a file's metadata and vectors: frequencies' divisors [h / 2], `filled` ones [h].

    source: the model's own config.json.
    """
    family = gguf_of(said)
    architecture = family.architecture
    with_sizes = family.before_writing(said)
    keys = {ours: with_sizes[theirs] for ours, theirs in {**SIZES, **family.sizes}.items()}
    if family.window_period and with_sizes["sliding_window"]:
        keys[WINDOWED] = [kind == SLIDING for kind in said["layer_types"]]
    h = channels(said)
    keys = {key: value for key, value in keys.items() if value is not None}
    keys |= (
        {key: h for key in HEAD_DIM if key not in family.sizes}
        | {"vocab_size": said["vocab_size"]}
        | dict(family.fixed)
        | {key: value(said, source) if callable(value) else value for key, value in family.unread.items()}
    )
    if family.partial_rotary:
        keys[ROTATED] = int(h * said["partial_rotary_factor"])
    scaling: dict[str, Any] = said.get("rope_scaling") or {"rope_type": "none"}
    vectors = {
        name.format(l=l): np.full(h, said[key] if key else 1, np.float32)
        for l in range(said["num_hidden_layers"])
        for name, key in family.filled.items()
    }
    if family.divisors and (divisors := family.divisors(said)) is not None:
        vectors[FREQUENCIES] = divisors
    if scaling["rope_type"] == "llama3":
        vectors[FREQUENCIES] = rope_divisors(scaling, said["rope_theta"], h).astype(np.float32)
    elif scaling["rope_type"] != "none":
        keys |= {SCALING_TYPE: scaling["rope_type"]}
        keys |= {ours: scaling[theirs] for ours, theirs in SCALING.items() if theirs in scaling}
        own = scaling.get("attention_factor")
        if own and "mscale_all_dim" not in scaling:  # llama.cpp computes it from that one
            keys[MAGNITUDE] = own / implied_magnitude(scaling["factor"])
    floats = {
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scaling.factor",
        MAGNITUDE,
    }
    floats |= {key for key in family.sizes if key.endswith(("scale", "log_multiplier", "softcapping"))}
    typed = {key: float(value) if key in floats else value for key, value in keys.items()}
    return {"general.architecture": architecture} | {f"{architecture}.{k}": v for k, v in typed.items()}, vectors


def _table_of(model: Model, family: Gguf) -> dict[str, str]:
    """Our names and Hugging Face's of those tensors of a family that the model's layers have, and of outer ones."""
    own = {param.name for segment in model.segments for param in jax.tree.leaves(base(segment.params))}
    table = tensor_names(family.names.keys())
    return {
        name: theirs for name, theirs in table.items() if "." not in name or name.removeprefix(WITHOUT_EXPERTS) in own
    }


def _kinds(model: Model, dtype: str) -> dict[str, Kind]:
    """Chooses the GGUF type of each tensor, by our name.

    Raises ConfigError if a row is not a whole number of blocks.
    """
    wanted, _ = DTYPES[dtype]
    head = Kind.Q8_0 if wanted == Kind.Q4_0 else wanted  # llama.cpp's own files have more bits there too
    kinds = {}
    for name, param in params(model).items():
        shape = param.shape
        whole = param.kind in (ParamKind.VECTOR, ParamKind.ROUTER)  # which llama.cpp does not quantise
        kinds[name] = Kind.F32 if whole else head if name == TENSOR_NAMES[model.head] else wanted
        _check_rows(shape, kinds[name], name, dtype)
    return kinds


def _check_rows(shape: tuple[int, ...], kind: Kind, name: str, dtype: str) -> None:
    """Raises ConfigError if a row of a tensor is not a whole number of blocks of its type."""
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ConfigError(
            f"--dtype: expected rows of a multiple of {block} numbers for {dtype}, got {shape[-1]} in {name}; use "
            "bfloat16, float16 or float32"
        )


def _bytes(shape: tuple[int, ...], kind: Kind) -> int:
    block, bytes_ = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block * bytes_


def _read(tensors: Tensors, name: str, kind: Kind, dtype: str) -> np.ndarray:
    """Reads a tensor in float32. Raises ConfigError if a number is beyond the type."""
    numbers = np.asarray(tensors.read(name), np.float32)
    if not max(numbers.max(), -numbers.min()) <= LARGEST.get(kind, HALF):  # false for NaN too
        raise ConfigError(
            f"--dtype: expected numbers within {dtype}, got larger ones in {name}, or NaN; "
            + ("use float32" if dtype != "float32" else "train again: what is exported is not finite")
        )
    return numbers


def _value_type(value: Any) -> gguf.GGUFValueType:
    types = gguf.GGUFValueType
    return {bool: types.BOOL, int: types.UINT32, float: types.FLOAT32, str: types.STRING, list: types.ARRAY}[
        type(value)
    ]
