"""Reads rows of rollouts: token ids of a prompt and of sampled completions, with rewards or advantages.

    {"prompt_ids": [5, 6], "completion_ids": [[7, 2], [8, 9, 2]], "logprobs": [[-0.1, -0.3], [-1.2, -0.4, -0.1]],
     "rewards": [1.0, 0.0]}

logprobs: of each token of a completion, when it was sampled, in nats. rewards: of each completion, numbers, or true and
false, which are 1 and 0. Those of a row are a group: an advantage is (reward - mean) / (standard deviation + 1e-4),
with n - 1, as in TRL. Or `advantages`: these, computed by whoever wrote the row. Names are those that TRL's rollouts
have.

routed_experts, with `router_replay`: for each completion the experts that its prompt's and its own tokens were sent to,
all but the last token, which no program reads: lists [tokens - 1][layers][choices], or as SGLang writes them the int32
numbers in base64.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from surojax.data import row_fields
from surojax.data.data_rows import BadRow, DataRow, NotARow
from surojax.data.datasets import COMPLETIONS, PROMPT, field_names
from surojax.data.entries import OF_INPUTS, ROUTES
from surojax.data.examples import Example
from surojax.data.items import Item, Unit, item_key, json_of, key_of_bad, new_hash
from surojax.data.values import array_of
from surojax.declared import LARGEST_FLOAT
from surojax.errors import shown

LOGPROBS = "logprobs"
REWARDS = "rewards"
ADVANTAGES = "advantages"
ROUTED = "routed_experts"
SAMPLED, ADVANTAGE = "sampled", "advantage"  # names of the arrays of an example, beside ROUTES
ROUNDING = 1e-2  # by which a log-probability may be above 0


class TokenRoutes(NamedTuple):
    """The sizes of what rows say of experts: in each layer of the model a token chooses some of all experts.

    with_experts: the numbers of the layers that have experts; what rows say of others is not read.
    """

    layers: int
    choices: int
    experts: int
    with_experts: tuple[int, ...]

    @classmethod
    def of(cls, c: Any, with_experts: Iterable[int]) -> "TokenRoutes | None":
        """Reads the sizes in a config whose model is known; None without router_replay."""
        sizes = c.model.num_hidden_layers, c.model.num_experts_per_tok, c.model.num_experts
        return cls(*sizes, tuple(with_experts)) if c.router_replay else None

    def read(self, value: Any, tokens: int, name: str) -> np.ndarray:
        """Returns a completion's choices, float32 [tokens, layers * choices]. Raises NotARow.

        Those of its last token and of layers without experts are 0.
        """
        shape = (tokens - 1, self.layers, self.choices)
        expected = f"numbers of experts {[*shape]} (tokens but the last, layers, choices)"
        numbers = _from_base64(value) if isinstance(value, str) else array_of(value)
        if isinstance(value, str) and numbers is not None and numbers.size == np.prod(shape):
            numbers = numbers.reshape(shape)
        if numbers is None or numbers.dtype.kind not in "iu" or numbers.shape != shape:
            got = shown(value, 40) if numbers is None else f"{numbers.dtype} {[*numbers.shape]}"
            raise NotARow(f"{name}: expected {expected}, got {got}")
        chosen = numbers[:, self.with_experts]
        if chosen.size and (chosen.min() < 0 or chosen.max() >= self.experts):
            raise NotARow(
                f"{name}: expected experts 0 to {self.experts - 1}, got {chosen.min()} to {chosen.max()}; replay the "
                "choices of a model with the same experts"
            )
        twice = np.argwhere((np.diff(np.sort(chosen, axis=-1), axis=-1) == 0).any(axis=-1))
        if len(twice):
            token, place = twice[0].tolist()
            raise NotARow(
                f"{name}: expected {self.choices} different experts of each token, got {chosen[token, place].tolist()} "
                f"of token {token} in layer {self.with_experts[place]}; have the sampler return those of all tokens"
            )
        found = np.zeros((tokens, self.layers, self.choices), np.float32)
        found[:-1, self.with_experts] = chosen
        return found.reshape(tokens, -1)


@dataclass(frozen=True)
class RolloutEncoder:
    """Makes an example of each row, with a document for each completion; see `cache_writer.ItemEncoder`.

    routes: the sizes of `routed_experts`, which each row must have; None: tokens choose their experts anew.
    """

    vocab_size: int
    routes: TokenRoutes | None = None

    is_text = False

    @property
    def fingerprint(self) -> str:
        return "rollouts 1" if self.routes is None else f"rollouts 1, experts of {[*self.routes[:3]]}"

    def item(self, row: DataRow | BadRow) -> Item[Example]:
        """Makes the example of a row, or a `BadRow` with the reason why not."""
        if isinstance(row, DataRow):
            try:
                example = self._example(row.record)
                size = 16 * len(example.ids) + sum(x.nbytes for name, x in example.numbers.items() if name in OF_INPUTS)
                return Item(example, item_key(new_hash(json_of(row.record))), size)
            except NotARow as error:
                advice = "" if ";" in str(error) else "; correct or remove the row"
                row = BadRow(row.where, f"{error}{advice}")
        return Item(row, key_of_bad(row), 0)

    def split(self, item: Item[Example]) -> None:
        """Returns None: a row cannot be split."""

    def units(self, item: Item[Example]) -> Iterable[Unit[Example]]:
        """Returns one unit, the row."""
        return (Unit(item.content, item.num_bytes, True),)

    def encode(self, units: list[Example | BadRow]) -> list[Example | BadRow]:
        """Returns the examples unchanged, as `item` has encoded them."""
        return units

    def _example(self, record: Mapping[str, Any]) -> Example:
        """Makes the example of a record. Raises NotARow."""
        row_fields.check_fields(record, "rollout", ())
        if name := row_fields.masked_field(record):
            raise NotARow(f"{name}: expected tokens that are all trained, got a mask that leaves some out")
        prompt = self._ids(record.get(PROMPT), PROMPT, record)
        completions = _lists(record, COMPLETIONS)
        logprobs = _lists(record, LOGPROBS)
        _check_length(logprobs, completions, LOGPROBS, "lists", "completions")
        routed = self._routed(record, completions)
        documents, trained, sampled = [], [], []
        for i, (completion, logprob) in enumerate(zip(completions, logprobs, strict=True)):
            ids = self._ids(completion, f"{COMPLETIONS}[{i}]", record)
            numbers = _numbers(logprob, f"{LOGPROBS}[{i}]")
            _check_length(numbers, ids, f"{LOGPROBS}[{i}]", "numbers", "tokens")
            if numbers.max() > ROUNDING:
                raise NotARow(f"{LOGPROBS}[{i}]: expected log-probabilities, at most 0, got {numbers.max():.4g}")
            documents.append(np.concatenate([prompt, ids]))
            trained.append(np.arange(len(documents[-1])) >= len(prompt))
            sampled.append(np.concatenate([np.zeros(len(prompt), np.float32), numbers]))
        lengths = np.array([len(ids) for ids in documents])
        numbers = {SAMPLED: np.concatenate(sampled), ADVANTAGE: np.repeat(_advantages(record, completions), lengths)}
        if self.routes is not None:
            each = zip(routed, lengths.tolist(), strict=True)
            read = [self.routes.read(value, tokens, f"{ROUTED}[{i}]") for i, (value, tokens) in enumerate(each)]
            numbers[ROUTES] = np.concatenate(read)
        ends = tuple(np.cumsum(lengths)[:-1].tolist())
        return Example(np.concatenate(documents), np.concatenate(trained), ends, numbers)

    def _routed(self, record: Mapping[str, Any], completions: list[Any]) -> list[Any]:
        """Returns the field's value for each completion; nothing if experts are not replayed. Raises NotARow."""
        if self.routes is None:
            if row_fields.has_content(record.get(ROUTED)):
                advice = "set router_replay to send tokens to them again"
                raise NotARow(row_fields.refusal("experts of tokens", ROUTED, record[ROUTED], advice))
            return []
        routed = _lists(record, ROUTED)
        _check_length(routed, completions, ROUTED, "lists", "completions")
        return routed

    def _ids(self, values: Any, name: str, record: Mapping[str, Any]) -> np.ndarray:
        """Checks a list of token ids and returns int32 `[tokens]`. Raises NotARow."""
        if values is None:
            raise NotARow(f"expected token ids in {name!r}, got {field_names(record)}")
        ids = array_of(values)
        if ids is None or ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size:
            if ids is None:
                got = "lists of other lengths, or true among numbers"
            else:
                got = f"{ids.dtype} {[*ids.shape]}" if ids.size else "none"
            raise NotARow(f"{name}: expected token ids, integers [tokens], got {got}")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            got = f"{ids.min()} to {ids.max()}"
            raise NotARow(f"{name}: expected ids below the tokenizer's {self.vocab_size}, got {got}")
        return ids.astype(np.int32)


def _advantages(record: Mapping[str, Any], completions: list[Any]) -> np.ndarray:
    """Returns the advantage of each completion, float32, if need be from rewards. Raises NotARow."""
    given = [name for name in (REWARDS, ADVANTAGES) if record.get(name) is not None]
    if not given:
        raise NotARow(f"expected {REWARDS!r} or {ADVANTAGES!r} of the completions, got {field_names(record)}")
    name = given[-1]
    values = _numbers(record[name], name)
    _check_length(values, completions, name, "numbers", "completions")
    if name == ADVANTAGES:
        return values.astype(np.float32)
    if len(values) == 1:
        raise NotARow(f"{REWARDS}: expected those of two or more completions to compare, got one; give {ADVANTAGES!r}")
    advantages = ((values - values.mean()) / (values.std(ddof=1) + 1e-4)).astype(np.float32)
    if len(set(values.tolist())) > 1 and not advantages.any():
        raise NotARow(
            f"{REWARDS}: expected rewards whose differences are above rounding, got {shown(record[name], 80)}"
        )
    return advantages


def _lists(record: Mapping[str, Any], name: str) -> list[Any]:
    """Returns a field's lists, one for each completion. Raises NotARow."""
    values = record.get(name)
    if values is None:
        raise NotARow(f"expected {name!r}, a list for each completion, got {field_names(record)}")
    if not isinstance(values, list | tuple | np.ndarray) or not len(values):
        raise NotARow(f"{name}: expected a list for each completion, got {type(values).__name__} without any")
    return list(values)


def _numbers(values: Any, name: str) -> np.ndarray:
    """Checks that numbers are finite in float32 and returns float64 `[n]`. Raises NotARow."""
    if name == REWARDS and isinstance(values, list | tuple | np.ndarray):  # right and wrong
        values = [int(x) if isinstance(x, bool | np.bool_) else x for x in values]
    numbers = array_of(values)
    if numbers is None or numbers.ndim != 1 or numbers.dtype.kind not in "fiu":
        raise NotARow(f"{name}: expected a list of numbers, got {shown(values, 80)}")
    numbers = numbers.astype(np.float64)
    if not (fits := np.abs(numbers) <= LARGEST_FLOAT).all():
        raise NotARow(f"{name}: expected finite numbers, which float32 can hold, got {numbers[~fits][0]}")
    return numbers


def _from_base64(text: str) -> np.ndarray | None:
    """Decodes little-endian int32 numbers; None if the text has none in base64."""
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), np.dtype("<i4"))
    except (binascii.Error, ValueError):
        return None


def _check_length(values: Any, expected: Any, name: str, units: str, of: str) -> None:
    """Raises NotARow if two lengths differ."""
    if len(values) != len(expected):
        raise NotARow(f"{name}: expected {len(expected)} {units}, as many as {of}, got {len(values)}")
