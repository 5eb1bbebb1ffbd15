"""Draws rows of settings by a seed, such that as many pairs of choices as possible meet that nothing refuses.

A list by hand has the combinations that its author thought of. `pytest --drawn-by SEED` draws other rows.
"""

import functools
import itertools
import random
from collections.abc import Mapping
from typing import Any

from surojax.config import Config, checks
from surojax.config.fields import DEFAULTS, default_config, mesh_sizes
from surojax.errors import ConfigError
from surojax.placement.mesh import abstract_mesh, shards
from surojax.refusals.refusal import refused

type Choices = Mapping[str, Mapping[str, Mapping[str, Any]]]  # {part: {choice: {field of the config: value}}}
type Row = dict[str, str]  # {part: choice}

TRIES = 3  # rows begun with a new pair of choices; the row with the most new pairs is taken
STEPS = 60  # choices that are drawn again before a pair is given up


def fields_of(choices: Choices, row: Row) -> dict[str, Any]:
    """The fields of a row; later parts overwrite earlier ones."""
    return {name: value for part, choice in row.items() for name, value in choices[part][choice].items()}


def config_of(fields: Mapping[str, Any]) -> Config:
    """A config with these fields, unchecked."""
    c = default_config()
    c.update_from_flattened_dict(dict(fields))
    return c


def is_allowed(fields: Mapping[str, Any]) -> bool:
    """Returns True if neither the table nor any other check refuses these fields."""
    c = config_of(fields)
    try:
        num_shards = shards(_mesh(c.gpus, **mesh_sizes(c)))
        if refused({**DEFAULTS, **fields, "num_shards": num_shards}, DEFAULTS, checks.REFUSALS, placed=True):
            return False
        checks.check(c)
    except ConfigError:
        return False
    return True


_mesh = functools.cache(abstract_mesh)


def drawn(choices: Choices, count: int, seed: int, sizes: Mapping[str, Any]) -> list[Row]:
    """Returns `count` allowed rows, each with many pairs of choices that no row before it has.

    sizes: fields that are the same in all rows, for the checks. Raises ValueError if no row can be completed.
    """
    rng = random.Random(seed)
    left = [
        {one: a, other: b}
        for one, other in itertools.combinations(choices, 2)
        for a, b in itertools.product(choices[one], choices[other])
    ]
    rng.shuffle(left)
    rows: list[Row] = []
    while len(rows) < count:
        tries: list[Row] = []
        while left and len(tries) < TRIES:
            if row := _completed(left.pop(), choices, rng, sizes):
                tries.append(row)
        best = max(
            tries or [_completed({}, choices, rng, sizes)], key=lambda row: sum(_has(row, pair) for pair in left)
        )
        if not best:
            raise ValueError("no row of these choices is allowed")
        rows.append(best)
        left = [pair for pair in left if not _has(best, pair)]
    return rows


def _has(row: Row, pair: Row) -> bool:
    return pair.items() <= row.items()


def _completed(pair: Row, choices: Choices, rng: random.Random, sizes: Mapping[str, Any]) -> Row:
    """Completes a pair of choices to an allowed row, drawing one other choice again at each step; {} if that fails."""
    others = [part for part in choices if part not in pair]
    row = {part: pair.get(part) or rng.choice([*choices[part]]) for part in choices}
    for _ in range(STEPS):
        fields = {**sizes, **fields_of(choices, row)}
        if is_allowed(fields):
            return row
        part = rng.choice(others)
        row[part] = rng.choice([*choices[part]])
    return {}
