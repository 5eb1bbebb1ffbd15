"""The matrices of a model's layers that may have adapters, and their names in PEFT's target_modules."""

from collections.abc import Collection, Iterable

from surojax.models.kinds.sublayer import LayerKinds, Mlp, Target

SHARED_EXPERTS = "shared"  # before our names of the experts that every token uses
ALL_LINEAR = "all-linear"  # here every matrix but those of experts; PEFT 0.21 adds these, and routers, in some families
WITHOUT_EXPERTS = "without_experts."  # before our names of the MLP of layers without experts, if others have experts


def adaptable(kinds: Collection[LayerKinds]) -> list[Target]:
    """Lists the matrices that may have adapters. kinds: of the layers of each segment.

    Adapters are drawn in this order within a layer, and written in it: those of experts that every token uses are last.
    """
    mlps = sorted((layer.mlp for layer in kinds), key=lambda mlp: not mlp.has_experts)
    of_both = len({mlp.has_experts for mlp in mlps}) > 1
    targets = [target for layer in kinds for target in layer.mixer.targets()]
    of_mlps: list[Target] = []
    for mlp in mlps:
        before = WITHOUT_EXPERTS if of_both and not mlp.has_experts else ""
        of_mlps += [target._replace(matrix=before + target.matrix) for target in mlp.targets()]
    of_mlps.sort(key=lambda target: target.matrix.startswith(f"{Mlp.name}.{SHARED_EXPERTS}."))
    of_inputs = [target for layer in kinds if layer.own_input for target in layer.own_input.targets()]
    return list(dict.fromkeys([*targets, *of_mlps, *of_inputs]))


def named(name: str, targets: Iterable[Target]) -> list[Target]:
    """Selects the matrices whose modules' names end with this name, as PEFT does; `ALL_LINEAR`: all but experts'."""
    if name == ALL_LINEAR:
        return [target for target in targets if not target.of_experts]
    return [target for target in targets if f".{target.module}".endswith(f".{name}")]


def target_names(names: str, kinds: Collection[LayerKinds]) -> tuple[str, ...]:
    """Translates a comma-separated list of PEFT's target modules to our names of matrices.

    kinds: of the layers of each segment. A name that no module ends with selects none.
    """
    targets = adaptable(kinds)
    return tuple(dict.fromkeys(found.matrix for name in names.split(",") for found in named(name.strip(), targets)))


def is_of_mlp(name: str) -> bool:
    """True if our name of a matrix is one of an MLP's, False if it is a mixer's."""
    return name.removeprefix(WITHOUT_EXPERTS).startswith(f"{Mlp.name}.")


def names_in_layers(names: Iterable[str], *, with_experts: bool) -> tuple[str, ...]:
    """Selects our names of the matrices in layers with experts, or in those without, of a model that has both.

    The names returned are those of the layer's own matrices.
    """
    of_others = [name for name in names if name.startswith(WITHOUT_EXPERTS)]
    own = [name for name in names if name not in of_others]
    if not with_experts:
        own = [name for name in own if not is_of_mlp(name)]
        own += [name.removeprefix(WITHOUT_EXPERTS) for name in of_others]
    return tuple(own)
