"""Declares fields of the config next to the code that reads them: a frozen dataclass is a section of the config.

    @dataclasses.dataclass(frozen=True)
    class Mesh:
        # number of replicas of the sharded state
        dp_replicate_size: int = declare(1, AT_LEAST_1, facts=Facts.COST)

The comment above a field is its help. `declare` adds the values that it may have, and its `Facts`; a field without it
may have every value of its type, and change everything. `declared(Mesh)` lists the fields, from which config/fields.py
makes the config; `built(Mesh, values)` makes the section of a config's values.
"""

import dataclasses
import difflib
import enum
import functools
import inspect
import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, Self

from surojax.errors import need

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", tuple: "a list of dicts"}
FLOATS = ("bfloat16", "float32")  # dtypes
LARGEST_FLOAT = 3.4028234663852886e38  # of float32, which devices compute with
SMALLEST_FLOAT = 1.1754943508222875e-38  # they take smaller ones for 0


class Range(NamedTuple):
    """The allowed values of a field, as data, which help.json holds too.

    expected: the range in words. change: advice. least, most: of a number, both allowed; None: no bound. besides: one
    more number that is allowed. pattern: a regular expression that a whole text matches; "": of numbers.
    """

    expected: str
    change: str
    least: float | None = None
    most: float | None = None
    besides: float | None = None
    pattern: str = ""

    def holds(self, value: Any) -> bool:
        """Returns whether a value is in the range."""
        if self.pattern:
            return re.fullmatch(self.pattern, value, re.DOTALL) is not None
        above = self.least is None or value >= self.least
        return (above and (self.most is None or value <= self.most)) or value == self.besides


AT_LEAST_1 = Range("1 or more", "raise it", least=1)
AT_LEAST_0 = Range("0 or more", "--help says what 0 means", least=0)
POSITIVE = Range("more than 0 in float32", "--help shows the default", least=SMALLEST_FLOAT)
FRACTION = Range("a fraction from 0 to 1", "divide a percentage by 100", least=0, most=1)
# float32 rounds 1 - 2^-25 to 1, and what is smaller to less than 1.
BELOW_1 = Range(
    "0 or more and below 1 in float32", "--help shows the default", least=0, most=math.nextafter(1 - 2**-25, 0)
)
NOT_EMPTY = Range("text that is not empty", "leave it out for the default of --help", pattern=r".*\S.*")


def at_most(most: int, words: str = "") -> Range:
    """Makes the `Range` of numbers up to this one. words: the number in words."""
    return Range(f"at most {words or f'{most:,}'}", "lower it", most=most)


class Facts(enum.Flag):
    """The effects that a field may have. A field that declares none may have all of them, so that forgetting is safe.

    TIME: how long a step takes. MEMORY: what a step needs of any memory. NUMBERS: what the model computes of given
    tokens before it is trained, apart from the files of its weights and from the order of sums. IDENTITY: which run it
    is; a run continues with the same value only.
    """

    NOTHING = 0
    TIME = enum.auto()
    MEMORY = enum.auto()
    NUMBERS = enum.auto()
    IDENTITY = enum.auto()
    COST = TIME | MEMORY
    COST_AND_NUMBERS = COST | NUMBERS
    COST_AND_IDENTITY = COST | IDENTITY
    ALL = TIME | MEMORY | NUMBERS | IDENTITY


def declare(
    default,
    *ranges: Range,
    choices: tuple = (),
    words: tuple[str, ...] = (),
    facts: Facts = Facts.ALL,
    name: str = "",
    row: Any = None,
) -> Any:
    """Declares a dataclass field.

    choices: the allowed values; words: texts that it accepts besides True and False. name: of the field in the config,
    if it is another than in the dataclass. row: the `offloads.Row` that it moves.
    """
    about = {"ranges": ranges, "choices": choices, "words": words, "facts": facts, "row": row}
    return dataclasses.field(default=default, metadata={"name": name, "declared": about})


def section_of(of: type, prefix: str = "") -> Any:
    """Declares a dataclass field that is a section itself; its fields have this prefix in the config."""
    return dataclasses.field(default_factory=of, metadata={"section": of, "prefix": prefix})


def same_as(other: type, name: str) -> Any:
    """Declares a dataclass field that is a field of another section, with its default, help and values."""
    (field,) = (field for field in dataclasses.fields(other) if field.name == name)
    in_config = field.metadata.get("name") or name
    about = {**field.metadata, "name": in_config, "comment_of": (other, name)}
    return dataclasses.field(default=field.default, metadata=about)


def computed(default: Any = dataclasses.MISSING) -> Any:
    """Declares a dataclass field that is no field of the config: whoever builds the section computes its value."""
    return dataclasses.field(default=default, metadata={"computed": True})


class DeclaredField(NamedTuple):
    """A field of the config. comment: the help text. default: None for a field that is true, false or unset."""

    name: str
    default: Any
    comment: str
    ranges: tuple[Range, ...] = ()
    choices: tuple = ()
    words: tuple[str, ...] = ()
    facts: Facts = Facts.ALL
    row: Any = None

    def stored(self) -> list:
        """Returns the field as JSON holds it, without its name, help and facts; `restored` makes it of that."""
        return [self.default, self.ranges, self.choices, self.words]

    @classmethod
    def restored(cls, name: str, stored: list) -> Self:
        """Makes a field of what `stored` returned, read from JSON; without help and facts."""
        default, ranges, choices, words = stored
        default = tuple(default) if isinstance(default, list) else default
        return cls(name, default, "", tuple(Range(*values) for values in ranges), tuple(choices), tuple(words))

    @property
    def kind(self) -> type:
        """The type of the field's values; words are text."""
        return bool if self.default is None else type(self.default)

    @property
    def kind_in_words(self) -> str:
        return KINDS[self.kind] + "".join(f" or {word!r}" for word in self.words)

    @property
    def other_value(self) -> Any:
        """A value that is not the default, for examples."""
        if self.choices:
            return next(value for value in self.choices if value != self.default)
        by_kind = {bool: True, float: 0.25, str: "other", tuple: ({"path": "rows.jsonl"},)}
        return self.default + 1 if self.kind is int else by_kind[self.kind]

    @property
    def default_text(self) -> str:
        """The default as Python source, as in a config file."""
        if self.default is None:
            return "unset"
        if isinstance(self.default, str):
            return json.dumps(self.default)
        if isinstance(self.default, float) and 0 < self.default < 1e-3:
            return re.sub(r"\.?0*e-0*", "e-", f"{self.default:e}")
        return repr(self.default)

    def check_type(self, value) -> None:
        """Raises ConfigError for a value of another type, or a number that devices cannot represent."""
        if (self.default is None and value is None) or (type(value) is str and value in self.words):
            return
        is_integer_for_float = self.kind is float and type(value) is int
        has_type = type(value) is self.kind or is_integer_for_float
        if not has_type:
            need(False, self.name, self.kind_in_words, value, f"its type is {self._kind_name}")
        if isinstance(value, str):
            newlines = self.name == "sample_prompt"
            bad = any((ord(char) < 32 and not newlines) or 0xD800 <= ord(char) < 0xE000 for char in value)
            expected = "text without control characters, in UTF-8"
            need(not bad, self.name, expected, value, "remove those that show as codes")
        elif isinstance(value, tuple):
            for i, entry in enumerate(value):
                need(isinstance(entry, dict), f"{self.name}[{i}]", "a dict", entry, "write dict(path=...)")
        elif self.kind is float:
            is_finite = abs(value) <= LARGEST_FLOAT
            need(is_finite, self.name, "a finite number in float32", value, "--help shows the default")
        else:
            need(value < 2**31, self.name, "less than 2^31", value, "lower it")

    @property
    def _kind_name(self) -> str:
        return self.kind.__name__ + "".join(f" or {word!r}" for word in self.words)

    def check(self, value) -> None:
        """Raises ConfigError for a value of the right type that is not allowed."""
        for within in self.ranges:
            need(within.holds(value), self.name, within.expected, value, within.change)
        if self.choices and value not in self.choices:
            near = difflib.get_close_matches(str(value), map(str, self.choices), n=1, cutoff=0.4)
            change = f"did you mean {near[0]!r}?" if near else "choose one of them"
            expected = f"one of {', '.join(str(choice) or repr(choice) for choice in self.choices)}"
            need(False, self.name, expected, value, change)


@functools.cache
def declared(section: type, prefix: str = "") -> tuple[DeclaredField, ...]:
    """Lists the fields of a section and of the sections within it, in order. prefix: before their names."""
    found: list[DeclaredField] = []
    for field, name in _config_fields(section, prefix):
        if inner := field.metadata.get("section"):
            found += declared(inner, name)
            continue
        commented, attribute = field.metadata.get("comment_of", (section, field.name))
        about = field.metadata.get("declared", {})
        found.append(DeclaredField(name, field.default, _comments(commented)[attribute], **about))
    return tuple(found)


class Values(Protocol):
    """Values by the names of fields: a config, a part of one, or a mapping."""

    def __getitem__(self, name: str, /) -> Any: ...


def names_of(section: type) -> tuple[str, ...]:
    """The names of a section's fields in the config."""
    return tuple(field.name for field in declared(section))


def built[Section](section: type[Section], values: Values, prefix: str = "", **computed: Any) -> Section:
    """Makes a section of a config's values, {name of a field: its value}, which may have others besides.

    prefix: before the fields' names. computed: the values of fields that are no fields of the config.
    """
    for field, name in _config_fields(section, prefix):
        inner = field.metadata.get("section")
        computed[field.name] = built(inner, values, name) if inner else values[name]
    return section(**computed)


def _config_fields(section: Any, prefix: str) -> Iterator[tuple[dataclasses.Field, str]]:
    """Yields the fields of a section that are in the config, with their names there; of a section in it, the prefix."""
    for field in dataclasses.fields(section):
        if not field.metadata.get("computed"):
            inner = "section" in field.metadata
            name = field.metadata["prefix"] if inner else field.metadata.get("name") or field.name
            yield field, prefix + name


@functools.cache
def _comments(section: type) -> dict[str, str]:
    """Reads the comments above a section's fields, by the names in the dataclass."""
    comments = {}
    for part in reversed(section.__mro__[:-1]):
        comment: list[str] = []
        for line in inspect.getsource(part).splitlines():
            if text := re.fullmatch(r"    # (.+)", line):
                comment.append(text[1])
            elif name := re.match(r"    (\w+): ", line):
                comments[name[1]] = " ".join(comment)
                comment = []
    return comments
