"""Experts' adapters in PEFT's files: two tensors for all experts of a layer (PEFT's `ParamWrapper`).

The modules of transformers 5 have a layer's experts as two parameters, `gate_up_proj` [E, 2 F, D], gate before up, and
`down_proj` [E, D, F]. adapter_config.json names them in `target_parameters`. With rank R their adapters are

    model.layers.0.mlp.experts.base_layer.lora_A.weight   [E R, D]     of gate_up_proj, row e R + j
    model.layers.0.mlp.experts.base_layer.lora_B.weight   [2 F, R E]   column j E + e
    model.layers.0.mlp.experts.lora_A.weight              [E R, F]     of down_proj, which wraps the other
    model.layers.0.mlp.experts.lora_B.weight              [D, R E]

without `base_layer.` if only one of them is adapted. Gate and up have an adapter each here. So what is written of
gate_up_proj has the rank 2 r, A of both one after the other and B in two blocks; `rank_pattern` and `alpha_pattern` say
so. PEFT makes the same of adapters of each expert by itself. What PEFT trained has one A for gate and up, of rank r: it
is read as the A of both, and trained on as two.

Experts without a gate (Nemotron-H) have `up_proj` [E, F, D] in place of `gate_up_proj`, with an adapter like
down_proj's.

Files that were written with transformers 4 have an adapter for each expert, `experts.17.gate_proj.lora_A.weight`.

Shape suffixes: E experts, F width of an expert, D hidden size, R rank in a file.
"""

import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from surojax.errors import ConfigError
from surojax.exchange import expert_tensors
from surojax.exchange.expert_tensors import DOWN, HALVES, ExpertTensor, join_experts
from surojax.families.family import BY_EXPERT, ExpertFiles
from surojax.models.kinds.experts import Experts
from surojax.models.kinds.gated_mlp import SwiGLU
from surojax.models.lora import Lora

MODULE = BY_EXPERT.module  # in our names
TOGETHER = "gate_up_proj"
UP = HALVES[1]
# Parameters of transformers 5, and PEFT's names of the matrices in them; the first is of experts with a gate alone.
PARAMETERS: dict[str, tuple[str, ...]] = {TOGETHER: HALVES, UP: (UP,), DOWN: (DOWN,)}
OURS = (f"{Experts.name}.{matrix}" for matrix in SwiGLU.tensors)
MATRICES: dict[str, str] = dict(zip((*HALVES, DOWN), OURS, strict=True))
INNER = ".base_layer"
WEIGHT = ".weight"  # of a module, as the name of a parameter
FACTORS = (".lora_A.weight", ".lora_B.weight")


class AdapterTensor(NamedTuple):
    """A tensor in an adapter's file. name: the file's. read: function that returns the array."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


# -- adapter_config.json ----------------------------------------------------------------------------------------------


def _parameters(matrices: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Selects the entries of `PARAMETERS` of experts with these matrices (our names)."""
    other = UP if MATRICES[HALVES[0]] in matrices else TOGETHER
    return {name: parts for name, parts in PARAMETERS.items() if name != other}


def keys_of(targets: Collection[str], lora: Lora, module: str, others: Sequence[str]) -> dict[str, Any]:
    """Makes adapter_config.json's keys for the adapted experts' matrices (our names) and ranks; {} if none.

    module: `ExpertFiles.module`. others: further parameters that are adapted, by PEFT's names.
    """
    of_experts = _parameters(targets)
    parameters = [name for name, parts in of_experts.items() if {MATRICES[part] for part in parts} <= set(targets)]
    names = [*(f"{module}.{name}" for name in parameters), *others]
    keys: dict[str, Any] = {"target_parameters": names} if names else {}
    if TOGETHER in parameters:
        pattern = rf".*\.{TOGETHER}"
        alpha = lora.alpha * (math.sqrt(2) if lora.rank_stabilised else 2)  # leaves the scale as it is
        keys |= {"rank_pattern": {pattern: 2 * lora.rank}, "alpha_pattern": {pattern: alpha}}
    return keys


class Described(NamedTuple):
    """The content of adapter_config.json about experts.

    targets: our names of adapted matrices. twice: whether gate_up_proj's rank is twice that of the others. modules:
    ends of names of modules whose weights are named as parameters.
    """

    targets: tuple[str, ...]
    twice: bool
    modules: tuple[str, ...]


def described_modules(
    content: dict[str, Any], module_names: dict[str, list[str]], module: str, need: Callable
) -> Described:
    """Reads the keys that `keys_of` makes.

    module_names: of experts' matrices, by our names. module: `ExpertFiles.module`. need: see adapter_config.
    """
    names = content.get("target_parameters") or []
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    need(is_list, "target_parameters", "names of parameters")
    weights = [name for name in names if name.endswith(WEIGHT) and module_names]
    names = [name for name in names if name not in weights]
    parameters = []
    of_experts = _parameters(module_names)
    for parameter, parts in of_experts.items():
        modules = [name for part in parts for name in module_names.get(MATRICES[part], [])]
        full_names = {_theirs(f"{name.rpartition('.')[0]}.{parameter}", module) for name in modules}
        ends = {name for name in names if any(f".{full}".endswith(f".{name}") for full in full_names)}
        if ends:
            matched = {full for full in full_names if any(f".{full}".endswith(f".{name}") for name in ends)}
            need(matched == full_names, "target_parameters", f"{parameter} in every layer or in none")
            parameters.append(parameter)
        names = [name for name in names if name not in ends]
    adapted = [name for name, parts in of_experts.items() if {MATRICES[part] for part in parts} & module_names.keys()]
    known = f"names among {', '.join(f'{module}.{name}' for name in adapted)}"
    known = known if adapted else "none in a model without adapters of experts"
    need(not names, "target_parameters", known, "give an adapter of this model")
    patterns: dict[str, Any] = {}
    for key, of_all in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        pattern = content.get(key) or {}
        if isinstance(pattern, dict):  # without modules of which it says what is said of all
            pattern = {name: x for name, x in pattern.items() if x != content.get(of_all)}
        patterns[key] = pattern
        is_known = isinstance(pattern, dict) and len(pattern) < 2 and all(map(_is_of_both, pattern))
        expected = f"{TOGETHER} alone in it" if TOGETHER in parameters else "it off"
        need(is_known and (not pattern or TOGETHER in parameters), key, expected, "nothing else is computed here")
    rank: Any = content.get("r")
    alpha: Any = content.get("lora_alpha")
    (joint_rank,) = patterns["rank_pattern"].values() or (rank,)
    need(joint_rank in (rank, 2 * rank), "rank_pattern", f"{rank} or {2 * rank}", "nothing else is computed here")
    factor = (joint_rank / rank) ** (0.5 if content.get("use_rslora") else 1)
    (alpha_of_both,) = patterns["alpha_pattern"].values() or (alpha,)
    is_scaled = type(alpha_of_both) in (int, float) and abs(alpha_of_both - factor * alpha) < 1e-6 * alpha
    need(is_scaled, "alpha_pattern", f"{factor * alpha:g} for {TOGETHER}, the scale of the others", "give another")
    targets = tuple(MATRICES[part] for parameter in parameters for part in PARAMETERS[parameter])
    return Described(targets, joint_rank != rank, tuple(name.removesuffix(WEIGHT) for name in weights))


def _is_of_both(pattern: str) -> bool:
    """True if a key of rank_pattern selects gate_up_proj, as PEFT or this module spells it."""
    name = pattern.removeprefix(r".*\.").replace(r"\.", ".")
    return re.fullmatch(rf"(\w+\.)?(experts\.)?{TOGETHER}", name) is not None


def _theirs(name: str, module: str) -> str:
    """Returns our name of something in a layer's experts with the family's name of their module."""
    return name.replace(f".{MODULE}.", f".{module}.")


# -- tensors ----------------------------------------------------------------------------------------------------------


def of_file(tensors: dict[str, np.ndarray], files: ExpertFiles = BY_EXPERT) -> dict[str, np.ndarray]:
    """Converts an adapter's tensors, by our names, to PEFT's tensors of experts; other tensors are unchanged.

    tensors: by our names; those of experts are `[E, ...]`. files: says if the rows of gate and up alternate.
    """
    tensors_in_file: dict[str, np.ndarray] = {}
    for name, x in tensors.items():
        before, is_of_experts, last = name.rpartition(".experts.")
        part, _, factor = last.partition(".")
        if not is_of_experts:
            tensors_in_file[name] = x
            continue
        module = f"{before}.experts"
        factor = f".{factor}"
        is_inner = part in HALVES and f"{module}.{DOWN}{factor}" in tensors
        if part != UP or f"{module}.{HALVES[0]}{factor}" not in tensors:
            gate_and_up = [tensors[f"{module}.{half}{factor}"] for half in HALVES] if part == HALVES[0] else [x]
            in_file = _theirs(f"{module}{INNER * is_inner}{factor}", files.module)
            tensors_in_file[in_file] = _flat(factor, gate_and_up, files)
    return tensors_in_file


def _flat(factor: str, parts: list[np.ndarray], files: ExpertFiles) -> np.ndarray:
    """Flattens a factor of all experts, of one matrix or of gate and up, to PEFT's two dimensions."""
    if factor == FACTORS[0]:
        return np.concatenate(np.concatenate(parts, axis=1))  # for each expert gate's rows, then up's
    number, rows, rank = parts[0].shape
    blocks = [np.zeros((number, rows, rank * len(parts)), part.dtype) for part in parts]
    for i, part in enumerate(parts):
        blocks[i][:, :, i * rank : (i + 1) * rank] = part
    stacked = join_experts(blocks, files._replace(transposed=False))
    return stacked.transpose(1, 2, 0).reshape(rows * len(parts), -1)


def of_experts(
    stored: dict[str, AdapterTensor],
    shapes: dict[str, tuple[int, ...]],
    said: Described,
    rank: int,
    files: ExpertFiles = BY_EXPERT,
) -> dict[str, AdapterTensor]:
    """Converts a file's tensors of experts to our names and shapes `[E, ...]`: the inverse of `of_file`.

    shapes: by our name, of the tensors of experts that are expected. Those that the file does not have are left out.
    """
    tensors = dict(stored)
    names = (name for name in stored if name.endswith(FACTORS))
    for name, part in expert_tensors.parts_in(names, files, "adapter", "save the adapter again").items():
        if name in shapes:
            parts = [tensors.pop(part_name) for part_name in part.names]
            tensors[name] = AdapterTensor(parts[0].name, part.shape(parts[0].shape), _stacked(parts))
    if not said.targets:
        return tensors
    both_are_adapted = MATRICES[DOWN] in said.targets and MATRICES[UP] in said.targets
    has_gate = MATRICES[HALVES[0]] in said.targets
    used = set()
    for name, (number, *shape) in shapes.items():
        before, _, last = name.rpartition(".experts.")
        part, _, factor = last.partition(".")
        factor = f".{factor}"
        is_half = has_gate and part in HALVES
        source = _theirs(f"{before}.experts{INNER * (part != DOWN and both_are_adapted)}{factor}", files.module)
        if source not in stored:
            continue
        ranks = rank * (1 + (said.twice and is_half))
        rows, columns = shape
        expected = (number * ranks, columns) if factor == FACTORS[0] else (rows * (1 + is_half), ranks * number)
        _need_shape(stored[source], expected)
        place = ExpertTensor((source,), HALVES.index(part) if is_half else None, files)
        read = _reader(stored[source], factor, number, place, rank if said.twice and is_half else None)
        tensors[name] = AdapterTensor(stored[source].name, (number, *shape), read)
        used.add(source)
    return {name: x for name, x in tensors.items() if name not in used}


def _stacked(parts: list[AdapterTensor]) -> Callable[[], np.ndarray]:
    return lambda: np.stack([x.read() for x in parts])


def _need_shape(stored: AdapterTensor, expected: tuple[int, ...]) -> None:
    if stored.shape != expected:
        raise ConfigError(
            f"adapter: {stored.name}: expected {[*expected]}, got {[*stored.shape]}; give an adapter of this model"
        )


def _reader(
    stored: AdapterTensor, factor: str, number: int, place: ExpertTensor, rank: int | None
) -> Callable[[], np.ndarray]:
    """Makes the function that reads a factor `[E, ...]`. rank: of gate and of up, if they do not share columns."""
    half = place.half or 0

    def read_a() -> np.ndarray:
        stacked = stored.read().reshape(number, -1, stored.shape[-1])
        return stacked if rank is None else stacked[:, half * rank : (half + 1) * rank]

    def read_b() -> np.ndarray:
        stacked = stored.read().reshape(stored.shape[0], -1, number).transpose(2, 0, 1)
        rows = place.rows(stacked)
        if rank is None:
            return rows
        if np.any(rows[:, :, (1 - half) * rank : (2 - half) * rank]):
            raise ConfigError(
                f"adapter: {stored.name}: expected adapters of gate and up apart, as {TOGETHER}'s rank says, got some "
                "that share columns; give another adapter"
            )
        return rows[:, :, half * rank : (half + 1) * rank]

    return read_a if factor == FACTORS[0] else read_b
