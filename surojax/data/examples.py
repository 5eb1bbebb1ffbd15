"""Encodes rows as examples: token ids, and a mask of the tokens that the loss counts.

A row becomes pieces of text, each trained or not: a prompt and its completion are two; in a conversation the answers
are trained, and what is between them is not. An answer begins where the chat template's
generation prompt ends, so the model learns to go on from exactly the tokens that sampling will show it: no token
crosses the seam of two pieces. It ends with the token that ends a turn.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from surojax.data import conversations, pieces
from surojax.data.conversations import Conversation, PromptCompletion
from surojax.data.data_rows import BadRow, DataRow, NotARow, half_a_pair
from surojax.data.datasets import Dataset
from surojax.data.fitting import fitted
from surojax.data.items import Item, Unit, item_key, json_of, key_of_bad, new_hash
from surojax.data.pieces import DocumentPiece
from surojax.data.row_fields import CHATS, SEGMENTS
from surojax.data.seams import closed, encode_pieces, ends_with_special
from surojax.data.templates import Template
from surojax.data.texts import TextFile
from surojax.data.tokenizer import Tokenizer
from surojax.errors import ConfigError

TRAIN_ON = ("assistant", "last", "all")
DESIRABLE = "desirable"  # the array that says whether an unpaired answer is a good one, by its sign
MARGIN = "margin"  # the array with the margin of a preference, at the first token of the chosen answer
_FORMAT = 2  # part of every fingerprint; to be raised if the same row and settings would give other ids or masks
# "if_open": if the last piece has no token that ends an answer.
type Eos = Literal["always", "if_open", "never"]


class Example(NamedTuple):
    """One document, or two of a pair, one after the other.

    ids: int32 [tokens]. trained: bool [tokens], token i is a target of the loss; None: all are. ends: the number of
    tokens of the first of two; (): there is one. numbers: see `entries.Corpus`.
    """

    ids: np.ndarray
    trained: np.ndarray | None
    ends: tuple[int, ...] = ()
    numbers: Mapping[str, np.ndarray] = MappingProxyType({})


@dataclass(frozen=True)
class _Draft:
    """A document before it is tokenised.

    has_bos: whether the beginning-of-sequence token precedes the pieces. eos: when the end-of-sequence token follows.
    """

    pieces: tuple[DocumentPiece, ...]
    has_bos: bool
    eos: Eos


class Encoder:
    """Encodes the rows of one dataset. It can be pickled, so processes can share the work.

    dataset: with its type decided (`datasets.resolve`). template: None if the tokenizer has none and none is chosen.
    train_on: one of TRAIN_ON. system_prompt: for rows and datasets without one of their own.

    fingerprint: hash of all that ids and trained depend on besides the rows.
    note: one line for the user about what the template does to a conversation, or to prompts and answers that are
      texts; "": nothing to say.

    Raises ConfigError if the dataset holds conversations, or is to be written as such, and there is no template, or
    train_on is unknown.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Tokenizer,
        template: Template | None = None,
        *,
        train_on: str = "assistant",
        system_prompt: str = "",
    ):
        assert dataset.type in CHATS, "auto: resolve it first; text: see documents.TextEncoder"
        if train_on not in TRAIN_ON:
            raise ConfigError(f"train_on: expected one of {', '.join(TRAIN_ON)}, got {train_on!r}; choose one of them")
        if dataset.type == SEGMENTS and train_on != "assistant":
            raise ConfigError(
                f"train_on: expected assistant for {dataset.name}, whose segments say what is trained, got "
                f"{train_on!r}; leave it out"
            )
        if (dataset.type == "conversation" or dataset.prompt_as == "chat") and template is None:
            raise ConfigError(
                f"{dataset.name}: expected a chat template for its conversations, got a tokenizer ({tokenizer.name}) "
                "without one; set chat_template, for example to chatml"
            )
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._template = template
        self._train_on = "last" if dataset.type in ("preference", "unpaired") else train_on
        self._system_prompt = system_prompt
        self._is_stop = np.zeros(tokenizer.vocab_size, bool)
        self._is_stop[list(tokenizer.stop_ids)] = True
        self.note: str = self._note(template, train_on) if template else ""
        self.fingerprint: str = self._fingerprint()

    def _note(self, template: Template, train_on: str) -> str:
        if self._dataset.type == SEGMENTS:
            return ""
        if self._dataset.type == "conversation":
            return pieces.trained_parts_note(template, train_on) or self._open_turns_note(template, train_on)
        texts = f"{self._dataset.name}: prompts and answers that are texts"
        if self._dataset.prompt_as == "plain":
            return f"{texts} are joined as they are, without {template.source}, as prompt_as='plain' says"
        return f"{texts} become messages of {template.source}; prompt_as='plain' in datasets joins them as they are"

    def _open_turns_note(self, template: Template, train_on: str) -> str:
        """Returns one line if the template writes no token at the end of an answer that another turn follows."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        (parts,) = template.pieces([Conversation(turns * 2, None)], "assistant")
        if train_on != "assistant" or isinstance(parts, NotARow):
            return ""
        first = next(piece.text for piece in closed(parts, self._tokenizer) if piece.trained)
        if ends_with_special(first, self._tokenizer):
            return ""
        return f"{template.source} writes no token at the end of earlier answers: only the last one learns where to end"

    def _fingerprint(self) -> str:
        dataset = self._dataset
        tokenizer = self._tokenizer
        template = self._template and (self._template.text, self._template.with_tools, tokenizer.bos, tokenizer.eos)
        fields = [name for name in sorted(vars(dataset)) if name.endswith("_field")]
        fields += ["roles", "prompt_as", "ignored_fields"]
        parts = {
            "format": _FORMAT,
            "tokenizer": [tokenizer.name, tokenizer.eos_id, tokenizer.bos_id if tokenizer.adds_bos else None],
            "stop_ids": sorted(tokenizer.stop_ids),
            "type": dataset.type,
            "fields": {name: getattr(dataset, name) for name in fields},
            "template": template,
            "train_on": self._train_on,
            "system_prompt": dataset.system_prompt or self._system_prompt,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8")).hexdigest()[:16]

    is_text = False

    def split(self, item: Item[DataRow]) -> None:
        """Returns None: a row cannot be split."""

    def units(self, item: Item[DataRow]) -> tuple[Unit[DataRow]]:
        """Returns one unit, the row."""
        return (Unit(item.content, item.num_bytes, True),)

    def encode(self, rows: Iterable[DataRow | BadRow]) -> list[Example | BadRow]:
        """Returns the rows' examples, in their order; a row that cannot be used is a BadRow. Uses all cores.

        Holds all rows in memory, and for long texts about 50 times their size: pass some megabytes at a time.
        """
        rows = list(rows)
        read = [self._read(row) for row in rows]
        if self._dataset.type == "unpaired":
            read = self._with_other_answers(rows, read)
        contents = [(row, content) for row, row_contents in zip(rows, read, strict=True) for content in row_contents]
        drafts = self._drafts([row for row, _ in contents], [content for _, content in contents])
        encoded = iter(encode_pieces([draft.pieces for draft in drafts if isinstance(draft, _Draft)], self._tokenizer))
        examples = iter(
            [self._example(draft, next(encoded)) if isinstance(draft, _Draft) else draft for draft in drafts]
        )
        is_preference = self._dataset.type == "preference"
        joined = [
            _of_row(row, [next(examples) for _ in row_contents], is_preference=is_preference)
            for row, row_contents in zip(rows, read, strict=True)
        ]
        with_numbers = {"unpaired": self._labelled, "preference": self._with_margin}.get(self._dataset.type)
        return [*map(with_numbers, rows, joined)] if with_numbers else joined

    def _with_other_answers(self, rows: list[DataRow | BadRow], read: "list[tuple[_Content, ...]]"):
        """Appends to each unpaired row's content its prompt with another row's answer.

        The other row is half of all rows away, so that answers to one prompt, which are often neighbours, do not meet.
        """
        good = [i for i, (content,) in enumerate(read) if not isinstance(content, BadRow | NotARow)]
        contents = list(read)
        for k, i in enumerate(good):
            own, other = (self._prompt_completion(rows[j]) for j in (i, good[(k + len(good) // 2) % len(good)]))
            contents[i] = (*read[i], self._content(conversations.with_answer(own, other)))
        return contents

    def _labelled(self, row: DataRow | BadRow, example: Example | BadRow) -> Example | BadRow:
        """Adds the array `DESIRABLE` to an unpaired row's example: 1 at all tokens, or -1 if the answer is bad."""
        if isinstance(example, BadRow) or isinstance(row, BadRow):
            return example
        sign = 1.0 if conversations.is_desirable(row.record, self._dataset) else -1.0
        return example._replace(numbers={DESIRABLE: np.full(len(example.ids), sign, np.float32)})

    def _with_margin(self, row: DataRow | BadRow, example: Example | BadRow) -> Example | BadRow:
        """Adds the array `MARGIN` to a preference's example: the margin at the first label, zeros elsewhere."""
        if isinstance(example, BadRow) or isinstance(row, BadRow):
            return example
        assert example.trained is not None, "a prompt is not trained"
        margins = np.zeros(len(example.ids), np.float32)
        margins[np.argmax(example.trained)] = conversations.margin(row.record, self._dataset)
        return example._replace(numbers={MARGIN: margins})

    def _drafts(self, rows: list[DataRow | BadRow], contents: "list[_Content]") -> list[_Draft | BadRow]:
        """Makes a draft, text pieces before tokenisation, of each content; all conversations are rendered together."""
        talks = {i: content for i, content in enumerate(contents) if isinstance(content, Conversation)}
        rendered: dict[int, tuple[DocumentPiece, ...] | NotARow] = {}
        if talks:
            assert self._template is not None, "checked by __init__"
            where = [rows[i].where for i in talks]
            rendered = dict(zip(talks, self._template.pieces([*talks.values()], self._train_on, where), strict=True))
        return [
            self._draft(row, self._draft_of(content, rendered[i]) if isinstance(content, Conversation) else content)
            for i, (row, content) in enumerate(zip(rows, contents, strict=True))
        ]

    def _draft(self, row: DataRow | BadRow, content: _Draft | BadRow | NotARow) -> _Draft | BadRow:
        if isinstance(content, _Draft):
            content = _bad_unicode(content) or content
        return BadRow(row.where, str(content)) if isinstance(content, NotARow) else content

    def _read(self, row: DataRow | BadRow) -> "tuple[_Content, ...]":
        """Parses a row into a conversation to render, or the draft of an instruction, or the reason to reject the row.

        A preference yields two: one with the chosen answer and one with the rejected answer.
        """
        if isinstance(row, BadRow):
            return (row,)
        dataset = self._dataset
        try:
            if dataset.type == SEGMENTS:
                parts = conversations.segments(row.record)
                return (_Draft(tuple(DocumentPiece(*part) for part in parts), False, "never"),)
            if dataset.type == "conversation":
                return (self._content(conversations.conversation(row.record, dataset, self._system_prompt)),)
            if dataset.type == "preference":
                pair = conversations.preference(row.record, dataset, self._system_prompt)
                conversations.margin(row.record, dataset)
                return tuple(map(self._content, pair))
            if dataset.type == "unpaired":
                conversations.is_desirable(row.record, dataset)
            return (self._content(self._prompt_completion(row)),)
        except NotARow as error:
            return (error,)

    def _prompt_completion(self, row: DataRow | BadRow) -> PromptCompletion | Conversation:
        """Returns the prompt and completion of a row that can be read. Raises NotARow."""
        assert isinstance(row, DataRow)
        return conversations.prompt_completion(row.record, self._dataset, self._system_prompt)

    def _content(self, content: PromptCompletion | Conversation) -> "_Content":
        if isinstance(content, Conversation):
            if self._template is None:
                raise NotARow(
                    "expected texts, since there is no chat template for conversations, got messages; set "
                    "chat_template, for example to chatml"
                )
            return fitted(content, self._template)
        if self._template is not None and self._dataset.prompt_as != "plain":
            return fitted(Conversation(content.messages, content.tools, variables=content.variables), self._template)
        for name in ("history", "tools", "variables"):
            if getattr(content, name):
                raise NotARow(
                    f"expected a prompt and its completion alone, since they are joined without a chat template, got "
                    f"{name} too; set chat_template or prompt_as, or name the field in ignored_fields of the dataset"
                )
        return _Draft(pieces.plain_pieces(content, self._train_on), self._tokenizer.adds_bos, "always")

    def _draft_of(self, conversation: Conversation, parts: tuple[DocumentPiece, ...] | NotARow) -> _Draft | NotARow:
        if isinstance(parts, NotARow):
            return parts
        ends_with_answer = self._train_on != "all" or conversation.messages[-1]["role"] == "assistant"
        parts = closed(parts, self._tokenizer) if self._train_on != "all" else parts
        return _Draft(parts, False, "if_open" if ends_with_answer else "never")

    def _example(self, draft: _Draft, ids_of_pieces: list[np.ndarray]) -> Example:
        """Returns the example of a draft; ids_of_pieces: int32 [tokens] of each piece."""
        stops = [self._is_stop[ids] for ids in ids_of_pieces]
        is_open = not stops[-1].any()
        has_eos = draft.eos == "always" or (draft.eos == "if_open" and is_open)
        bos = np.array([self._tokenizer.bos_id] if draft.has_bos else [], np.int32)
        eos = np.array([self._tokenizer.eos_id] if has_eos else [], np.int32)
        ids = np.concatenate([bos, *ids_of_pieces, eos])
        if all(piece.trained for piece in draft.pieces):
            return Example(ids, None)
        masks = [np.full(len(part), piece.trained) for piece, part in zip(draft.pieces, ids_of_pieces, strict=True)]
        if draft.eos == "if_open" and self._train_on != "all":
            masks = [mask & _to_the_last(is_stop) for mask, is_stop in zip(masks, stops, strict=True)]
        return Example(
            ids, np.concatenate([np.zeros(len(bos), bool), *masks, np.full(len(eos), draft.pieces[-1].trained)])
        )


type _Content = Conversation | _Draft | BadRow | NotARow


def _of_row(row: DataRow | BadRow, examples: list[Example | BadRow], *, is_preference: bool) -> Example | BadRow:
    """Joins a row's documents (two of a pair) to one example; returns a `BadRow` if one document cannot be used."""
    if bad := next((example for example in examples if isinstance(example, BadRow)), None):
        return bad
    good = [example for example in examples if isinstance(example, Example)]
    if len(good) == 1:
        return good[0]
    chosen, rejected = good
    if is_preference and np.array_equal(chosen.ids, rejected.ids):
        return BadRow(row.where, "expected two answers with other tokens, got the same ones for both; remove the row")
    assert chosen.trained is not None and rejected.trained is not None, "a prompt is not trained"
    trained = np.concatenate([chosen.trained, rejected.trained])
    return Example(np.concatenate([chosen.ids, rejected.ids]), trained, (len(chosen.ids),))


def items(rows: Iterable[DataRow | BadRow]) -> Iterator[Item[DataRow]]:
    """Yields each row with the hash of its record."""
    for row in rows:
        if isinstance(row, DataRow) and any(isinstance(value, TextFile) for value in row.record.values()):
            row = BadRow(
                row.where,
                "expected instructions or conversations, got a text file; leave it out, or give it an entry of its own "
                "in datasets",
            )
        if isinstance(row, BadRow):
            yield Item(row, key_of_bad(row), 0)
        else:
            content = json_of(row.record)
            yield Item(row, item_key(new_hash(content)), len(content))


def _to_the_last(is_stop: np.ndarray) -> np.ndarray:
    """Returns a mask of the tokens up to the last stop token, or of all tokens if there is no stop token."""
    last = np.flatnonzero(is_stop)[-1:]
    return np.arange(len(is_stop)) <= (last[0] if len(last) else len(is_stop))


def _bad_unicode(draft: _Draft) -> NotARow | None:
    """Returns the reason to reject a draft with half a surrogate pair, which UTF-8 cannot encode; else None."""
    for piece in draft.pieces:
        try:
            piece.text.encode("utf-8")
        except UnicodeEncodeError as error:
            return NotARow(half_a_pair(error))
    return None
