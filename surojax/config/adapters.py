"""Checks the adapters' settings (models/lora.py): names of matrices, ranks and sizes."""

from collections.abc import Collection, Iterable

from surojax.config.fields import Config, kinds
from surojax.errors import need
from surojax.models.kinds.experts import Experts
from surojax.models.kinds.sublayer import Target
from surojax.models.kinds.targets import ALL_LINEAR, adaptable, is_of_mlp, named, names_in_layers, target_names
from surojax.models.lora import SAVED


def check_adapters(c: Config) -> None:
    """Raises ConfigError for a wrong name of a matrix, or a wrong rank of adapters."""
    if not c.lora:
        return
    layers = kinds(c).values()
    known = adaptable(layers)
    modules = dict.fromkeys(target.module.rpartition(".")[2] for target in known)
    if c.lora_target_modules != ALL_LINEAR:
        expected = f"names among {', '.join(modules)}, or {ALL_LINEAR!r}"
        for name in (name.strip() for name in c.lora_target_modules.split(",")):
            is_known = bool(named(name, known)) and name != ALL_LINEAR
            change = "use it alone, or leave it out" if name == ALL_LINEAR else "correct it"
            need(is_known, "lora_target_modules", expected, name, change)
    for name in c.modules_to_save.split(",") if c.modules_to_save else ():
        need(name.strip() in SAVED, "modules_to_save", f"names among {', '.join(SAVED)}", name.strip(), "correct it")
    names = target_names(c.lora_target_modules, layers)
    _check_rank(c, (target for target in known if target.matrix in names))
    has_experts = any(layer.mlp.has_experts for layer in layers)
    for layer in layers if len(layers) > 1 else ():
        expected = "a matrix of every layer, whatever its mixer, with experts and without"
        own = {target.matrix: target.module.rpartition(".")[2] for target in adaptable([layer])}
        of_layer = names_in_layers(names, with_experts=layer.mlp.has_experts) if has_experts else names
        change = f"add one of {', '.join(dict.fromkeys(own.values()))}"
        if c.lora_target_modules == ALL_LINEAR:  # it leaves out experts, and no name may stand beside it
            change = f"name all matrices: {','.join(modules)}"
        need(bool(own.keys() & {*of_layer}), "lora_target_modules", expected, c.lora_target_modules, change)
    if has_experts and (of_mlps := [name for name in names if is_of_mlp(name)]):
        _check_beside_experts(c, of_mlps, known)


def _check_beside_experts(c: Config, targets: Collection[str], known: Iterable[Target]) -> None:
    """Raises ConfigError for adapters of a model's experts, and of MLPs beside them, that PEFT does not have.

    It has one adapter for gate and up of an expert. It adapts these MLPs as parameters, without DoRA and dropout.
    known: the matrices that may have adapters.
    """
    pair = {target.matrix for target in known} & {f"{Experts.name}.{matrix}" for matrix in Experts.adapted_together}
    together = "gate_proj and up_proj together, since PEFT has one adapter of both"
    is_whole = len(pair & set(targets)) in (0, len(pair))
    need(is_whole, "lora_target_modules", together, c.lora_target_modules, "name both")
    for field, off in {"use_dora": False, "lora_dropout": 0.0}.items():
        expected = f"{off} with adapters of the MLPs of a model with experts, as in PEFT"
        need(c[field] == off, field, expected, c[field], "leave it out, or name those of the attention alone")


def _check_rank(c: Config, targets: Iterable[Target]) -> None:
    """Raises ConfigError for a rank above the smaller side of every adapted matrix.

    Of some it may be more, as in PEFT: of gates with a row for each head, beside matrices with thousands.
    """
    sides: dict[str, int] = {}
    for target in targets:  # of a module whose size depends on the layer the largest
        sides[target.module] = max(sides.get(target.module, 0), min(c.model.hidden_size, target.width))
    module = max(sides, key=lambda name: sides[name])
    expected = f"at most {sides[module]}, the smaller side of {module}"
    need(c.lora_rank <= sides[module], "lora_rank", expected, c.lora_rank, "lower it")
