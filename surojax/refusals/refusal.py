"""Features of a config, refusals of pairs of features, and functions that search and print a table of refusals.

A `Feature` is a choice that a config makes, such as "pp_size > 1" or "lora=False". A `Refusal` says that one feature is
not possible with another. `config.checks.check` refuses a config by the table (pairs.py), `placement.table.place` its
own settings, and the planner's searches leave out what it refuses. docs/refusals.md is `refusals_page()`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from surojax.errors import ConfigError, shown

Settings = Mapping[str, Any]  # {name of a field of the config: its value}, some of them or all


@dataclasses.dataclass(frozen=True)
class Feature:
    """A choice that a config makes, for example a field that is set.

    name: for readers of the table. fields: that decide it; a message names the first.
    holds: (settings, defaults of the fields) -> whether the config makes this choice.
    clause: settings -> the choice as it follows "expected VALUE" in a message.
    instead: what the field is without this choice, in words; "": its default.
    example: settings that make the choice, and what they need; all others have their defaults.
    """

    name: str
    fields: tuple[str, ...]
    holds: Callable[[Settings, Settings], bool]
    clause: Callable[[Settings], str]
    instead: str
    example: Mapping[str, Any]

    @property
    def field(self) -> str:
        """The first field, which messages name."""
        return self.fields[0]


def clause_of(field: str) -> Callable[[Settings], str]:
    """Makes a `Feature.clause` from a field's name and value."""
    return lambda s: f"with {field.removeprefix('model.')}={s[field]!r}"


def is_on(field: str, **needs) -> Feature:
    """Feature: the field is true, or not empty."""
    return Feature(
        f"{field}=True", (field,), lambda s, _: bool(s[field]), clause_of(field), "False", {**needs, field: True}
    )


def is_off(field: str, **needs) -> Feature:
    """Feature: the field is false."""
    example = {**needs, field: False}
    return Feature(f"{field}=False", (field,), lambda s, _: not s[field], clause_of(field), "True", example)


def is_above(field: str, least: int, **needs) -> Feature:
    """Feature: the field's number is above `least`."""
    example = {**needs, field: least + 1}
    return Feature(f"{field} > {least}", (field,), lambda s, _: s[field] > least, clause_of(field), str(least), example)


def is_one_of(field: str, *values, instead: str = "", needs: Settings | None = None) -> Feature:
    """Feature: the field has one of these values."""
    name = f"{field}={' or '.join(map(str, values))}" if values != ("",) else f"{field}=''"
    example = {**(needs or {}), field: values[0]}
    return Feature(name, (field,), lambda s, _: s[field] in values, clause_of(field), instead, example)


def is_other_than(field: str, value, example, needs: Settings | None = None) -> Feature:
    """Feature: the field has another value than this."""
    name = f"{field} other than {value!r}"
    example = {**(needs or {}), field: example}
    return Feature(name, (field,), lambda s, _: s[field] != value, clause_of(field), repr(value), example)


def is_set(field: str, example, needs: Settings | None = None) -> Feature:
    """Feature: the field differs from its default."""
    example = {**(needs or {}), field: example}
    return Feature(f"{field} set", (field,), lambda s, d: s[field] != d[field], clause_of(field), "", example)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A row of the table: a feature that is not possible with another feature.

    reason: a clause that follows the other feature's, or "". change: what to do, in the imperative.
    when_placed: refused when state is placed, not before: `verify` and `fit` read the setting for what they try.
    """

    feature: Feature
    other: Feature
    reason: str
    change: str | Callable[[Settings], str] = "leave one of them out"
    when_placed: bool = False

    @functools.cached_property
    def fields(self) -> frozenset[str]:
        """The fields that both features depend on."""
        return frozenset((*self.feature.fields, *self.other.fields))

    def holds(self, settings: Settings, defaults: Settings) -> bool:
        """Returns True if the settings make both choices."""
        return self.feature.holds(settings, defaults) and self.other.holds(settings, defaults)

    def message(self, settings: Settings, defaults: Settings) -> str:
        """Makes the error message: what was expected, why, what was given, and what to change."""
        field = self.feature.field
        expected = f"{self.feature.instead or repr(defaults[field])} {self.other.clause(settings)}"
        reason = f", {self.reason}" if self.reason else ""
        change = self.change if isinstance(self.change, str) else self.change(settings)
        return f"{field}: expected {expected}{reason}, got {shown(settings[field])}; {change}"


def refuse_each(features: Iterable[Feature], other: Feature, reason: str, change: str) -> list[Refusal]:
    """Makes a row for each of these features, with the same other feature."""
    return [Refusal(feature, other, reason, change) for feature in features]


def refusals_page(table: Iterable[Refusal], defaults: Settings) -> str:
    """Makes the page docs/refusals.md, a table of the features that do not go together."""
    lines = [
        "# What does not go together",
        "",
        "Settings are refused before anything is built, by this table of all pairs. On the site, the box above finds",
        "rows by both names. It is made by `python docs/pages.py`; a test compares it with the program. Sizes that",
        "must divide each other, and what a device cannot do, are refused by their numbers.",
        "",
        "| refused | with | why | what to change |",
        "|---|---|---|---|",
    ]
    for row in table:
        change = row.change if isinstance(row.change, str) else row.change(defaults)
        cells = f"`{row.feature.name}`", row.other.name.removeprefix("with "), row.reason, change
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def about(field: str, table: Iterable[Refusal]) -> tuple[Refusal, ...]:
    """Selects the rows that depend on a field."""
    return tuple(row for row in table if field in row.fields)


def refused(
    settings: Settings, defaults: Settings, table: Iterable[Refusal], *, placed: bool = False
) -> Refusal | None:
    """Returns the first row that refuses these settings, or None; skips rows with fields that are not in `settings`.

    placed: whether state is placed by these settings.
    """
    known = settings.keys()
    rows = (row for row in table if row.fields <= known and (placed or not row.when_placed))
    return next((row for row in rows if row.holds(settings, defaults)), None)


def refuse(settings: Settings, defaults: Settings, table: Iterable[Refusal], *, placed: bool = False) -> None:
    """Raises ConfigError if two of the settings do not go together. Arguments: see `refused`."""
    if row := refused(settings, defaults, table, placed=placed):
        raise ConfigError(row.message(settings, defaults))
