"""Translates our names of tensors to the names in a model's files, and back.

Everywhere else tensors have the names of `model_tensors.tensor_name`, which most families also have in their files. A
family may have others, and a model of several parts (parts.py) has them under a prefix.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from surojax.exchange import expert_tensors, parts
from surojax.families.family import BY_EXPERT, ExpertFiles, ModelFamily
from surojax.families.names import NUMBER, TensorName, find_tensor, renamed
from surojax.families.registry import FAMILIES, tensor_names

MODULES = "model."  # the start of names in modules of transformers 5


class Naming(NamedTuple):
    """The names in a model's files.

    family: None: the names of most families. in_whole: it is part of an image-text model.
    """

    family: ModelFamily | None = None
    in_whole: bool = False

    @property
    def expert_files(self) -> ExpertFiles:
        """The layout of a layer's experts in the files."""
        return BY_EXPERT if self.family is None else self.family.expert_files

    def alone(self, name: str) -> str:
        """Translates our name of a tensor or module to its name in files of the language model alone."""
        return name if self.family is None else renamed(name, self._ours, self.family.tensors)

    def in_files(self, name: str) -> str:
        """Translates our name of a tensor or module to its name in the model's files, or its adapters'."""
        return self.placed(self.alone(name))

    def placed(self, name: str) -> str:
        """Translates a name in files of the language model alone to that in the model's files."""
        return parts.in_whole(name) if self.in_whole else name

    def in_adapters(self, name: str) -> str:
        """Translates our name of a tensor or module to its name in adapters' files: that of transformers' modules."""
        name = self.in_files(name)
        root = MODULES if self.family is None else self.family.root
        return MODULES + name.removeprefix(root) if name.startswith(root) else name

    def ours(self, name: str) -> str:
        """Translates a file's name of a tensor to ours: the inverse of `alone` and `in_files`.

        Unknown names stay unchanged. So does a module's name without ".weight": a tensor of all experts is called
        otherwise (`ExpertFiles`), and transformers reads no such name.
        """
        name, number = expert_tensors.without_number(parts.alone(name))
        if self.family and name.startswith(MODULES):
            in_files = self.family.root + name.removeprefix(MODULES)
            name = in_files if self._find(in_files) else name
        for in_modules, in_files in self.family.spellings.items() if self.family else ():
            if name.endswith(f".{in_modules}"):
                name = name.removesuffix(in_modules) + in_files
        if self.family and (place := self._find(name)) and place.rest:
            name = renamed(name, self.family.tensors, self._ours)
        return name if number is None else expert_tensors.of_expert(name, number)

    def _find(self, name: str) -> TensorName | None:
        """Finds a file's tensor in the family's table.

        A module that has the experts' may have tensors there, whose ends are none of the experts' (Nemotron-H's mixer).
        """
        assert self.family is not None
        place = find_tensor(name, self.family.tensors)
        return None if place and expert_tensors.has_all_experts(place.rest) else place

    @property
    def canonical(self) -> Mapping[str, str]:
        """The table of our names of parameters, and ours of tensors, that the files' tensors are translated to."""
        return {} if self.family is None else self._ours

    @property
    def _ours(self):
        assert self.family is not None
        return tensor_names(self.family.tensors.keys())


LAYER = re.compile(rf"(?:^|\.)layers\.({NUMBER})\.")


def is_no_part(name: str, config: dict[str, Any]) -> bool:
    """True for tensors that the model does not compute with. config: config.json.

    They predict further tokens, such as those of layers behind the last, or are what transformers does not read either.
    """
    config = parts.text_config(config) if parts.has_parts(config) else config
    family = FAMILIES.get(str(config.get("model_type")))
    if family and family.further_tensors and name.startswith(family.further_tensors):
        return True
    number = LAYER.search(name)
    if family is None or number is None:
        return False
    given = family.defaults | config
    if family.is_unread and family.is_unread(int(number[1]), name[number.end() :], given):
        return True
    if not family.further_layers:
        return False
    first = given["num_hidden_layers"]
    return first <= int(number[1]) < first + (given[family.further_layers] or 0)


def number_of_layers(config: dict[str, Any]) -> int:
    """The number of layers of a model with this config.json, alone or as part of an image-text model; 0: not known."""
    config = parts.text_config(config) if parts.has_parts(config) else config
    family = FAMILIES.get(str(config.get("model_type")))
    layers = ((family.defaults if family else {}) | config).get("num_hidden_layers")
    return layers if isinstance(layers, int) else 0


def naming_of(config: dict[str, Any]) -> Naming:
    """Returns the `Naming` of a model with this config.json, alone or as part of an image-text model."""
    in_whole = parts.has_parts(config)
    name = (parts.text_config(config) if in_whole else config).get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    standard = family is None or (
        family.canonical is None
        and family.tensors == tensor_names(family.tensors.keys())
        and family.expert_files == BY_EXPERT
    )
    return Naming(None if standard else family, in_whole)
