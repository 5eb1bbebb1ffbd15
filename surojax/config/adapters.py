"""Checks the adapters' settings (models/lora.py): names of matrices, ranks and sizes."""

from collections.abc import Collection

from surojax.config.fields import Config, head_dim, mlp_widths, mlps
from surojax.errors import need
from surojax.models.lora import ALL_LINEAR, OF_MLP, SAVED, WITHOUT_EXPERTS, target_names


def check_adapters(c: Config) -> None:
    """Raises ConfigError for a wrong name of a matrix, or a wrong rank of adapters."""
    if not c.lora:
        return
    kinds = mlps(c)
    if c.lora_target_modules != ALL_LINEAR:
        modules = dict.fromkeys(name.rpartition(".")[2] for name in kinds.modules())
        expected = f"names among {', '.join(modules)}, or {ALL_LINEAR!r}"
        for name in (name.strip() for name in c.lora_target_modules.split(",")):
            is_known = bool(kinds.named(name)) and name != ALL_LINEAR
            need(is_known, "lora_target_modules", expected, name, "correct it")
    for name in c.modules_to_save.split(",") if c.modules_to_save else ():
        need(name.strip() in SAVED, "modules_to_save", f"names among {', '.join(SAVED)}", name.strip(), "correct it")
    targets = target_names(c.lora_target_modules, kinds)
    _check_rank(c, targets)
    if kinds.dense_first:
        _check_every_layer(c, targets)
    if kinds.experts and (of_mlps := [name for name in targets if not name.startswith("attention.")]):
        _check_beside_experts(c, of_mlps)


def _check_every_layer(c: Config, targets: Collection[str]) -> None:
    """Raises ConfigError if the layers with experts, or those without, have no adapter."""
    of_all = any(name.startswith("attention.") for name in targets)
    of_first = any(name.startswith(WITHOUT_EXPERTS) for name in targets)
    of_others = any(name.startswith("mlp.") for name in targets)
    expected = "a matrix of every layer, those with experts and those without"
    need(of_all or (of_first and of_others), "lora_target_modules", expected, c.lora_target_modules, "name one of each")


def _check_beside_experts(c: Config, targets: Collection[str]) -> None:
    """Raises ConfigError for adapters of a model's experts, and of MLPs beside them, that PEFT does not have.

    It has one adapter for gate and up of an expert. It adapts these MLPs as parameters, without DoRA and dropout.
    """
    pair = {OF_MLP["gate_proj"], OF_MLP["up_proj"]}
    together = "gate_proj and up_proj together, since PEFT has one adapter of both"
    need(len(pair & set(targets)) != 1, "lora_target_modules", together, c.lora_target_modules, "name both")
    for field, off in {"use_dora": False, "lora_dropout": 0.0}.items():
        expected = f"{off} with adapters of the MLPs of a model with experts, as in PEFT"
        need(c[field] == off, field, expected, c[field], "leave it out, or name those of the attention alone")


def _check_rank(c: Config, targets: Collection[str]) -> None:
    m = c.model
    key_rows = m.num_key_value_heads * head_dim(c)
    heads = m.num_attention_heads * head_dim(c)
    widths = {"attention.wq": heads, "attention.wk": key_rows, "attention.wv": key_rows, "attention.wo": heads}
    of_mlps = {kind: width for kind, (_, width) in mlp_widths(c).items()}
    for module, name in mlps(c).modules().items():
        if name in targets:
            kind = module.rpartition(".")[0]
            smaller = min(m.hidden_size, of_mlps[kind] if kind in of_mlps else widths[name])
            expected = f"at most {smaller}, the smaller side of {module}"
            need(c.lora_rank <= smaller, "lora_rank", expected, c.lora_rank, "lower it")
