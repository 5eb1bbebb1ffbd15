"""Reads and writes adapter_config.json, PEFT's file of settings beside an adapter's tensors.

A key that may change the arithmetic is refused with its name, unless it is off.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax

from surojax import limited
from surojax.errors import ConfigError, shown
from surojax.exchange import missing, peft_experts
from surojax.exchange.expert_tensors import has_all_experts
from surojax.exchange.model_tensors import tensor_name
from surojax.exchange.naming import Naming
from surojax.exchange.parts import in_whole
from surojax.models.kinds.targets import ALL_LINEAR, WITHOUT_EXPERTS, is_of_mlp
from surojax.models.lora import SAVED, Lora
from surojax.models.model import Model, Segment
from surojax.placement.param import Kind
from surojax.untrusted import expanded, read_json

CONFIG = "adapter_config.json"

# Keys that are read, and keys that say nothing about a trained adapter.
READ = {"peft_type", "r", "lora_alpha", "target_modules", "modules_to_save", "use_rslora", "use_dora"}
READ |= {"target_parameters", "rank_pattern", "alpha_pattern"}  # by peft_experts.py
UNUSED = {
    "auto_mapping",  # the class of the base, which PEFT writes in place of task_type
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "fan_in_fan_out",  # of GPT-2's layers: PEFT turns it off for all that are here
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
# PEFT writes this name beside "score" for every model for sequence classification; other families have such a head.
OTHER_CLASSIFIERS = "classifier"
# Values that leave the arithmetic as it is, besides null, false and what is empty.
OFF: dict[str, tuple] = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal", "eva")}


def target_of(matrix: str, segment: Segment, model: Model) -> str:
    """Returns the name by which `Lora.targets` has a segment's matrix."""
    is_dense = segment.statistics is None and bool(model.layers_with_experts)
    return WITHOUT_EXPERTS + matrix if is_dense and is_of_mlp(matrix) else matrix


def modules(model: Model) -> dict[str, list[str]]:
    """Lists for each matrix, by its name as a target, the names of its modules in all layers that have it, in order.

    For experts these are our names of their matrices (exchange/expert_tensors.py), which name no module.
    """
    module_names: dict[str, list[str]] = {}
    for segment in model.segments:
        for param in jax.tree.leaves(segment.params):
            if param.kind is Kind.MATRIX or param.name in segment.targets:
                names = (tensor_name(param, segment, l).removesuffix(".weight") for l in range(segment.num_layers))
                module_names.setdefault(target_of(param.name, segment, model), []).extend(names)
    return module_names


def modules_of_experts(model: Model) -> dict[str, list[str]]:
    """Returns the entries of `modules` for experts' matrices."""
    return {ours: names for ours, names in modules(model).items() if all(map(has_all_experts, names))}


def matrices_without_adapters(model: Model, targets: Collection[str]) -> list[str]:
    """Lists the last parts of the names of modules that can have no adapters, but experts. targets: those that can."""
    firsts = (names[0] for target, names in modules(model).items() if target not in targets)
    left = (name.partition(".weight")[0] for name in firsts if not has_all_experts(name))
    return list(dict.fromkeys(name.rpartition(".")[2] for name in left))


def adapter_config_of(lora: Lora, model: Model, base_name: str, naming: Naming) -> dict[str, Any]:
    """Makes the content of adapter_config.json.

    base_name: the name or path by which others load the base model. naming: of the base model's files.

    In an image-text model other parts have modules of the same names, so a regular expression selects the language
    model's.
    """
    expert_modules = modules_of_experts(model)
    module_names = {target: naming.alone(names[0]).split(".") for target, names in modules(model).items()}
    of_modules = [target for target in lora.targets if target not in expert_modules]
    # PEFT 0.21 reads the name of a module that ends as an expert's, such as up_proj, as the experts' parameter.
    of_parameters = [target for target in of_modules if expert_modules and is_of_mlp(target)]
    endings = [_ending(target, module_names) for target in of_modules if target not in of_parameters]
    parameters = [f"{_ending(target, module_names)}.weight" for target in of_parameters]
    theirs = {ours: name for name, ours in SAVED.items()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.has_logits else "SEQ_CLS",
        "base_model_name_or_path": base_name or None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": rf"model\.language_model\..*\.({'|'.join(endings)})" if naming.in_whole else endings or None,
        "modules_to_save": [theirs[name] for name in lora.saved] or None,
        "use_rslora": lora.rank_stabilised,
        "use_dora": lora.magnitudes,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "rank_pattern": {},
        "alpha_pattern": {},
    } | peft_experts.keys_of(expert_modules.keys() & set(lora.targets), lora, naming.expert_files.module, parameters)


def _ending(target: str, module_names: Mapping[str, list[str]]) -> str:
    """Returns the shortest end of a module's name that identifies its matrix.

    module_names: the words of one module's name for each target.
    """
    words = module_names[target]
    for n in range(1, len(words)):
        if [of_target[-n:] for of_target in module_names.values()].count(words[-n:]) == 1:
            return ".".join(words[-n:])
    raise AssertionError(f"two matrices are called {'.'.join(words)}")


def read_adapter_config(folder: Path, model: Model, naming: Naming) -> tuple[Lora, peft_experts.Described]:
    """Reads a folder's adapter_config.json: the adapters' settings for this model, and the keys about experts.

    naming: of the model's files.

    Raises ConfigError if the file is missing, has settings that are not implemented, or names modules that the model
    does not have.
    """
    file = folder / CONFIG
    content = _content(folder)

    def need(ok: bool, key: str, expected: str, change: str = "give another adapter") -> None:
        if not ok:
            raise ConfigError(f"adapter: {file}: {key}: expected {expected}, got {shown(content.get(key))}; {change}")

    need(content.get("peft_type") == "LORA", "peft_type", "'LORA'")
    for key, value in sorted(content.items()):
        allowed = OFF.get(key, ())
        expected = repr(allowed[0]) if allowed else "it off"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)  # 0 may be that of a layer
        is_off = key in READ | UNUSED or (not is_number and value in (None, False, {}, [], *allowed))
        need(is_off, key, expected, "nothing else is computed here")
    rank: Any = content.get("r")
    alpha: Any = content.get("lora_alpha")
    need(type(rank) is int and 0 < rank <= 2**16, "r", "a whole number from 1 to 65,536")
    need(type(alpha) in (int, float) and 0 < alpha < 2**31, "lora_alpha", "a number more than 0")
    for key in ("use_rslora", "use_dora"):
        need(isinstance(content.get(key), bool | None), key, "true or false")
    saved = content.get("modules_to_save") or []
    if not model.has_logits and isinstance(saved, list):
        saved = [name for name in saved if name != OTHER_CLASSIFIERS]
    known = [] if model.head == "embed" else [name for name, ours in SAVED.items() if ours in model.outer_params]
    expected = f"names among {', '.join(known)}" if known else "none for a model whose head is its embedding"
    need(isinstance(saved, list) and all(name in known for name in saved), "modules_to_save", expected)
    target_modules = content.get("target_modules")
    described = peft_experts.described_modules(content, modules_of_experts(model), naming.expert_files.module, need)
    names: Any = [target_modules] if isinstance(target_modules, str) else target_modules
    targets = described.targets
    if described.modules:
        targets = (*_targets(file, "target_parameters", list(described.modules), model, naming), *targets)
    if targets and not names:
        names = []
    need(isinstance(names, list) and all(isinstance(name, str) for name in names), "target_modules", "names of modules")
    if names or not targets:
        is_expression = isinstance(target_modules, str)
        targets = (*_targets(file, "target_modules", names, model, naming, is_expression=is_expression), *targets)
    lora = Lora(
        rank=rank,
        alpha=float(alpha),
        targets=tuple(dict.fromkeys(targets)),
        saved=tuple(SAVED[name] for name in saved),
        rank_stabilised=bool(content.get("use_rslora")),
        magnitudes=bool(content.get("use_dora")),
    )
    return lora, described


def labels_of_adapter(folder: str | Path) -> int:
    """The number of labels of the model that a folder's adapter belongs to; 0: a language model."""
    content = _content(expanded(folder))
    base = content.get("auto_mapping")
    base_class = str(base.get("base_model_class")) if isinstance(base, dict) else ""
    is_classifier = content.get("task_type") == "SEQ_CLS" or base_class.endswith("ForSequenceClassification")
    return 1 if is_classifier else 0


def _content(folder: Path) -> dict[str, Any]:
    try:
        content = read_json(folder / CONFIG)
        if not isinstance(content, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"adapter: expected a folder with {CONFIG}, got {str(folder)!r} ({reason}); give one that PEFT or a run "
            f"wrote{missing.adapter_instead(folder)}"
        ) from error
    return content


def _targets(
    file: Path, key: str, names: list[str], model: Model, naming: Naming, *, is_expression: bool = False
) -> tuple[str, ...]:
    """Returns our names of the adapted matrices.

    key: of the file, for messages. names: ends of modules' names, or one regular expression. Raises ConfigError if one
    matches no matrix, or if a matrix is adapted in some layers only.
    """
    module_names = {target: [naming.alone(name) for name in names] for target, names in modules(model).items()}
    if is_expression and names == [ALL_LINEAR]:
        return tuple(target for target in module_names if target not in modules_of_experts(model))
    given = set(names)
    matched = _matched(file, names[0], module_names) if is_expression else set()

    def matching(module: str) -> list[str]:
        if is_expression:
            return names if module in matched else []
        parts = module.split(".")
        return [name for i in range(len(parts)) if (name := ".".join(parts[i:])) in given]

    used = set()
    targets = []
    for target, layer_modules in module_names.items():
        matches = {module: matching(module) for module in layer_modules}
        used.update(*matches.values())
        without = [module for module, matching_names in matches.items() if not matching_names]
        if not without:
            targets.append(target)
        elif len(without) < len(layer_modules):
            raise ConfigError(
                f"adapter: {file}: {key}: expected {target} in every layer or in none, got none for "
                f"{without[0]}; give another adapter"
            )
    if unknown := sorted(set(names) - used) or (not names and ["none"]):
        endings = sorted(layer_modules[0].split(".")[-1] for layer_modules in module_names.values())
        raise ConfigError(
            f"adapter: {file}: {key}: expected modules among {', '.join(endings)}, got {shown(unknown[0])}; "
            "give an adapter of this model"
        )
    return tuple(targets)


def _matched(file: Path, expression: str, module_names: dict[str, list[str]]) -> set[str]:
    """Returns the modules whose name, in the language model alone or in the whole model, matches.

    Raises ConfigError.
    """
    spelled = {
        name: module
        for layer_modules in module_names.values()
        for module in layer_modules
        for name in (module, in_whole(module))
    }
    where = f"adapter: {file}: target_modules: expected a regular expression"
    try:
        (answer,) = limited.map_in_child("surojax.exchange.patterns", "matching", (expression,), [list(spelled)])
    except limited.OverLimit as error:
        raise ConfigError(
            f"{where} that can be matched, got one that takes {error}; give the names of modules"
        ) from None
    if "refused" in answer:
        raise ConfigError(f"{where}, got {shown(expression, 80)} ({answer['refused']}); give the names of modules")
    return {spelled[name] for name in answer["names"]}
