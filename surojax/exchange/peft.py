"""Adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

Every adapted matrix has two tensors, or three with DoRA, under its module's name in the wrapped model:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight           [rank, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight           [out, rank]
    base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector   [out]

An embedding or head that is trained whole is stored whole: base_model.model.lm_head.weight. PEFT and transformers read
these names.

These are the names of most families. Others, and a model of several parts, have their own there (naming.py), and so do
experts (peft_experts.py).

An adapter means something only beside the model that it was trained on. What is written here names that model by its
`fingerprint`, in the metadata of the safetensors file, which others skip; and the format that the frozen matrices had.
PEFT's own adapters say neither: they are known by their shapes alone.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from surojax.errors import ConfigError
from surojax.exchange import adapter_config, missing, peft_experts, shards
from surojax.exchange.adapter_config import CONFIG, modules, modules_of_experts, target_of
from surojax.exchange.expert_tensors import has_all_experts
from surojax.exchange.export import encoded
from surojax.exchange.finite import is_finite
from surojax.exchange.model_tensors import shapes
from surojax.exchange.naming import Naming
from surojax.exchange.peft_experts import AdapterTensor
from surojax.exchange.small_files import Files, write_small_files
from surojax.families.family import TENSOR_NAMES
from surojax.families.names import by_our_name
from surojax.models.lora import Lora, adapters as declared
from surojax.models.model import Model, Segment
from surojax.numerics.base_formats import FORMATS
from surojax.placement.param import OUTER, with_part
from surojax.untrusted import expanded

TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
FACTOR_A, FACTOR_B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
SUFFIXES = {"a": FACTOR_A, "b": FACTOR_B, "magnitude": MAGNITUDE}
STORED = "stored"  # frozen matrices as their files have them
# Or dequantised: (the format that they rested in, the dtype of their numbers).
BASE_FORMATS = {f"{name} {dtype}": (name, dtype) for name in FORMATS for dtype in ("bfloat16", "float32")}
OF_MOST_FAMILIES = Naming()
FINGERPRINT, BASE_FORMAT = "surojax.base", "surojax.base_format"  # keys of the metadata


class AdapterArrays(NamedTuple):
    """An adapter's settings and arrays.

    matrices: {a target of `Lora`: {"a": [L, rank, in], "b": [L, out, rank], with DoRA "magnitude": [L, out]}}, of all
    layers that have the matrix; those of experts have a second axis, of the experts. Of layers whose matrices have
    several sizes they are `[L]` of objects, see `of_layers`. saved: {our name of an outer
    layer: array}. base: `fingerprint` of the model that it was trained on; "": not known. base_format: `STORED`, or a
    name in `BASE_FORMATS`.
    """

    lora: Lora
    matrices: dict[str, dict[str, np.ndarray]]
    saved: dict[str, np.ndarray]
    base: str = ""
    base_format: str = STORED


def of_layers(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Stacks the arrays of layers; those of several shapes as an array `[L]` of objects."""
    if len({x.shape for x in arrays}) == 1:
        return np.stack(arrays)
    stacked = np.empty(len(arrays), object)
    for l, x in enumerate(arrays):
        stacked[l] = x
    return stacked


def tensor_shapes(lora: Lora, model: Model) -> dict[str, tuple[int, ...]]:
    """The shapes of an adapter's tensors, by our names."""
    base_shapes = shapes(model)
    module_names = modules(model)
    by_name = {}
    for module in (module for target in lora.targets for module in module_names[target]):
        *experts, rows, columns = base_shapes[f"{module}.weight"]
        by_name[PREFIX + module + FACTOR_A] = (*experts, lora.rank, columns)
        by_name[PREFIX + module + FACTOR_B] = (*experts, rows, lora.rank)
        if lora.magnitudes:
            by_name[PREFIX + module + MAGNITUDE] = (rows,)
    return by_name | {PREFIX + TENSOR_NAMES[name]: base_shapes[TENSOR_NAMES[name]] for name in lora.saved}


def save_adapter(
    adapter: AdapterArrays,
    model: Model,
    folder: str | Path,
    *,
    base_name: str = "",
    naming: Naming = OF_MOST_FAMILIES,
    files: Files | None = None,
) -> Path:
    """Writes an adapter in float32, replacing one in the folder, and returns the folder.

    base_name: what others load the base model by. naming: of the base model's files. files: further ones of the folder.
    Raises ConfigError if the folder cannot be written.
    """
    path = expanded(folder)
    float32 = np.dtype(np.float32)
    in_file = peft_experts.of_file(_by_name(adapter, model), naming.expert_files)
    arrays = {_written(name, naming): array for name, array in in_file.items()}
    expected = {name: shards.StoredTensor(array.shape, float32) for name, array in arrays.items()}
    metadata = {BASE_FORMAT: adapter.base_format} | ({FINGERPRINT: adapter.base} if adapter.base else {})
    unfinished = path / f".{TENSORS}"  # of a killed process, the next one replaces it
    try:
        path.mkdir(parents=True, exist_ok=True)
        shards.write_shard(unfinished, expected, (arrays[name].astype(float32) for name in expected), metadata)
        unfinished.replace(path / TENSORS)
        content = adapter_config.adapter_config_of(adapter.lora, model, base_name, naming)
        write_small_files(path, (files or {}) | {CONFIG: encoded(content)})
    except OSError as error:
        raise ConfigError(f"adapter: cannot write {path} ({error.strerror or error}); choose another folder") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _written(name: str, naming: Naming) -> str:
    """Translates our name of an adapter's tensor to the file's."""
    return PREFIX + naming.in_adapters(name.removeprefix(PREFIX))


def _ours(name: str, naming: Naming) -> str:
    """Translates a file's name of a tensor, in either spelling, to ours: the inverse of `_written`."""
    return PREFIX + naming.ours(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else name


def _by_name(adapter: AdapterArrays, model: Model) -> dict[str, np.ndarray]:
    """Flattens an adapter to arrays by our names of tensors."""
    module_names = modules(model)
    arrays = {PREFIX + TENSOR_NAMES[name]: array for name, array in adapter.saved.items()}
    for target, stacks in adapter.matrices.items():
        for l, module in enumerate(module_names[target]):
            arrays |= {PREFIX + module + SUFFIXES[factor]: stack[l] for factor, stack in stacks.items()}
    return arrays


def read_adapter(folder: str | Path, model: Model, naming: Naming = OF_MOST_FAMILIES) -> AdapterArrays:
    """Reads an adapter of this model, in float32. naming: of the model's files.

    Raises ConfigError if it belongs to another model, adapts other matrices than ours, is damaged, or is not finite.
    """
    path = expanded(folder)
    lora, described = adapter_config.read_adapter_config(path, model, naming)
    factors = [name for name in SUFFIXES if name != "magnitude" or lora.magnitudes]
    try:
        file = shards.Shard(path / TENSORS)
        theirs = by_our_name(file.entries, lambda name: _ours(name, naming), f"adapter: {file.path}")
        stored = {
            ours: AdapterTensor(name, file.entries[name].shape, functools.partial(file.read, name))
            for ours, name in theirs.items()
        }
        if described.targets or not any(has_all_experts(name) for name in stored):
            lora = _without_unnamed_experts(lora, model, described.targets)
        shapes_of_experts = {name: x for name, x in tensor_shapes(lora, model).items() if has_all_experts(name)}
        stored = peft_experts.of_experts(stored, shapes_of_experts, described, lora.rank, naming.expert_files)
        _check_tensors(path, {name: x.shape for name, x in stored.items()}, lora, model)

        def tensor(name: str) -> np.ndarray:
            array = stored[name].read().astype(np.float32)
            if not is_finite(array):
                raise ConfigError(
                    f"adapter: {path / TENSORS}: expected finite numbers, got NaN or infinity in {stored[name].name}; "
                    "give another adapter"
                )
            return array

        def stack(target: str, suffix: str) -> np.ndarray:
            return of_layers([tensor(PREFIX + module + suffix) for module in modules(model)[target]])

        matrices = {target: {name: stack(target, SUFFIXES[name]) for name in factors} for target in lora.targets}
        saved = {name: tensor(PREFIX + TENSOR_NAMES[name]) for name in lora.saved}
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(
            f"adapter: cannot read {path / TENSORS} ({reason}); save the adapter again{missing.adapter_instead(path)}"
        ) from error
    base_format = file.metadata.get(BASE_FORMAT, STORED)
    if base_format not in (STORED, *BASE_FORMATS):
        raise ConfigError(
            f"adapter: {path / TENSORS}: {BASE_FORMAT}: expected one of {', '.join((STORED, *BASE_FORMATS))}, got "
            f"{base_format!r}; give another adapter"
        )
    return AdapterArrays(lora, matrices, saved, file.metadata.get(FINGERPRINT, ""), base_format)


def _without_unnamed_experts(lora: Lora, model: Model, named: Collection[str]) -> Lora:
    """Leaves out experts that only names of modules select which MLPs beside them have too.

    Such a name is of every expert in transformers 4, and of none in transformers 5, whose files name the experts'
    parameters. named: targets that a file names so.
    """
    others = {target.rpartition(".")[2] for target in lora.targets if target not in modules_of_experts(model)}
    kept = [
        target
        for target in lora.targets
        if target not in modules_of_experts(model) or target in named or target.rpartition(".")[2] not in others
    ]
    return dataclasses.replace(lora, targets=tuple(kept))


def digest(adapter: AdapterArrays) -> str:
    """Returns SHA-256 of the scale, base format and arrays, which determine what an adapter adds to its base."""
    sha256 = hashlib.sha256(f"{adapter.lora.scale!r} {adapter.base_format}\n".encode())
    arrays = {f"{target}.{factor}": x for target, stacks in adapter.matrices.items() for factor, x in stacks.items()}
    for name, array in sorted((arrays | adapter.saved).items()):
        for part in array if array.dtype == object else [array]:
            sha256.update(f"{name} {[*part.shape]}\n".encode() + part.astype("<f4").tobytes())
    return sha256.hexdigest()


def _check_tensors(path: Path, stored: dict[str, tuple[int, ...]], lora: Lora, model: Model) -> None:
    """Raises ConfigError unless a file has exactly an adapter's tensors, in the shapes of this model."""
    expected = tensor_shapes(lora, model)
    where = f"adapter: {path / TENSORS}"
    if lacking := sorted(expected.keys() - stored.keys()):
        got = missing.named_instead(lacking[0], stored.keys(), "save the adapter again")
        raise ConfigError(f"{where}: expected {lacking[0]}, {got}")
    if unused := sorted(stored.keys() - expected.keys()):
        raise ConfigError(
            f"{where}: expected the tensors that {CONFIG} names in a model of {model.num_layers} layers, got "
            f"{unused[0]}; give an adapter of this model"
        )
    for name, shape in expected.items():
        actual = stored[name]
        ranks = {FACTOR_A: actual[-2:-1], FACTOR_B: actual[-1:]}
        if any(name.endswith(suffix) and rank != (lora.rank,) for suffix, rank in ranks.items()):
            raise ConfigError(
                f"{where}: {name}: expected rank {lora.rank}, as {CONFIG} says, got {[*actual]}; save the adapter again"
            )
        if actual != shape:
            raise ConfigError(f"{where}: {name}: expected {[*shape]}, got {[*actual]}; give an adapter of this model")


# -- In a run ---------------------------------------------------------------------------------------------------------


def of_state(model: Model, lora: Lora, master: dict) -> tuple[dict, dict]:
    """Copies a state's master weights to host memory as (matrices, saved) of an `AdapterArrays`."""
    parts: dict[str, dict[str, list[np.ndarray]]] = {}
    for segment in model.segments:
        for matrix, names in declared(segment.params):
            factors = parts.setdefault(target_of(matrix, segment, model), {})
            for factor, name in names._asdict().items():
                if name is not None:
                    stack = np.asarray(_at(master[segment.name], name))
                    factors.setdefault(factor, []).append(stack[: segment.num_layers])  # without padding
    matrices = {
        matrix: {factor: of_layers([x for stack in stacks for x in stack]) for factor, stacks in factors.items()}
        for matrix, factors in parts.items()
    }
    return matrices, {name: np.asarray(master[OUTER][name]) for name in lora.saved}


def _at(tree: dict, name: str):
    """Returns the leaf of nested dicts at a dotted path."""
    for key in name.split("."):
        tree = tree[key]
    return tree


def with_adapter(layer: Callable, outer: Callable, adapter: AdapterArrays, model: Model) -> tuple[Callable, Callable]:
    """Wraps a base's `model_tensors.readers` so that they also return an adapter's arrays."""
    first: dict[tuple[str, str], int] = {}  # the number of a segment's first layer among those with a target
    layers: dict[str, int] = {}
    for segment in model.segments:
        for matrix, _ in declared(segment.params):
            target = target_of(matrix, segment, model)
            first[segment.name, matrix] = layers.get(target, 0)
            layers[target] = layers.get(target, 0) + segment.num_layers

    def layer_with(segment: Segment, l: int):
        weights = layer(segment, l)
        for matrix, names in declared(segment.params):
            stacks = adapter.matrices[target_of(matrix, segment, model)]
            for factor, name in names._asdict().items():
                if name is not None:
                    weights = with_part(weights, _nested(name, stacks[factor][first[segment.name, matrix] + l]))
        return weights

    def outer_with(model: Model) -> dict:
        return outer(model) | adapter.saved

    return layer_with, outer_with


def _nested(name: str, leaf: np.ndarray) -> dict:
    """Makes nested dicts with one leaf, at a dotted path."""
    first, _, rest = name.partition(".")
    return {first: _nested(rest, leaf) if rest else leaf}


# What a run's adapter settings must have in common with an adapter's: {setting: field of `Lora`}.
CONTINUED = {
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_target_modules": "targets",
    "modules_to_save": "saved",
    "use_rslora": "rank_stabilised",
    "use_dora": "magnitudes",
}


def check_continues(adapter: AdapterArrays, lora: Lora, base: str, path: str) -> None:
    """Raises ConfigError if an adapter does not fit a run's adapter settings and the fingerprint of the run's base.

    path: of the adapter, for the message.
    """
    for name, field in CONTINUED.items():
        theirs, ours = (getattr(settings, field) for settings in (adapter.lora, lora))
        if isinstance(ours, tuple):  # names, in any order
            theirs, ours = set(theirs), set(ours)
        if theirs != ours:
            expected, got = (", ".join(sorted(x)) or "none" if isinstance(x, set) else repr(x) for x in (theirs, ours))
            raise ConfigError(f"{name}: expected {expected}, as lora_adapter {path} has it, got {got}; set it so")
    if adapter.base and adapter.base != base:
        raise ConfigError(
            f"lora_adapter: expected one that was trained on model_path, whose hash begins with {base[:12]}, got "
            f"{path} of {adapter.base[:12]}; give another, or its base"
        )
