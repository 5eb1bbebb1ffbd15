"""Translates names of tensors from one table of names to another.

A table has, for our name of a tensor, the name in a kind of files, with `{l}` for the number of the layer. What follows
a module's name (".weight", ".bias", the parts of a quantised or adapted matrix) stays as it is.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from surojax.errors import ConfigError, shown

# A number in a name as it is written: ASCII digits without leading zeros, so that two names never have the same one.
NUMBER = r"(?:0|[1-9][0-9]{0,8})"
LAYER_NUMBER = re.compile(rf"(?<=\.){NUMBER}(?=\.)")


class TensorName(NamedTuple):
    """The parts of a tensor's name.

    ours: our name of the tensor in its module. l: the number of its layer, "" outside of layers. rest: the name's end.
    """

    ours: str
    l: str
    rest: str


def find_tensor(name: str, table: Mapping[str, str]) -> TensorName | None:
    """Splits the name of a tensor that the table has; None if the table does not have the tensor."""
    l = ""
    if number := LAYER_NUMBER.search(name):
        l = number.group()
        name = f"{name[: number.start()]}{{l}}{name[number.end() :]}"
    matching = [ours for ours, theirs in table.items() if f"{name}.".startswith(f"{module(theirs)}.")]
    if not matching:
        return None
    # Of several, the tensor of this very name, or the whole module's name.
    ours = max(matching, key=lambda ours: (table[ours] == name, len(module(table[ours]))))
    return TensorName(ours, l, name.removeprefix(module(table[ours])))


def module(name: str) -> str:
    """The name of the module that has this tensor."""
    return name.rpartition(".")[0]


def by_our_name(names: Iterable[str], ours: Callable[[str], str], where: str) -> dict[str, str]:
    """Returns {our name: the file's}. ours: translates a name. where: the field and file, for the message.

    Raises ConfigError if two names of the file are spellings of one of ours.
    """
    found: dict[str, str] = {}
    for name in names:
        other = found.setdefault(ours(name), name)
        if other != name:
            raise ConfigError(
                f"{where}: expected one tensor for {shown(ours(name), 120)}, got {shown(other, 120)} and "
                f"{shown(name, 120)}; remove one of them"
            )
    return found


def renamed(name: str, table: Mapping[str, str], to: Mapping[str, str]) -> str:
    """Translates a name of one table to another table's; a name that either table lacks is returned as it is."""
    place = find_tensor(name, table)
    if place is None or place.ours not in to:
        return name
    if table[place.ours].format(l=place.l) == name:
        return to[place.ours].format(l=place.l)
    return module(to[place.ours]).format(l=place.l) + place.rest
