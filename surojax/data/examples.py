"""From rows to examples: token ids, and which of them the loss counts.

A row becomes pieces of text, each trained or not: a text is one piece; a prompt and its completion are two; in a
conversation the answers are trained, and what is between them is not. An answer begins where the chat template's
generation prompt ends, so the model learns to go on from exactly the tokens that sampling will show it: no token
crosses the seam of two pieces. It ends with the token that ends a turn.

Where an answer begins and ends follows from rendering the conversation up to it, without and with it. Some templates
write an answer differently once the conversation goes on (they leave out its thinking): such an answer is part of the
later prompts, and not trained.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from surojax.data import conversations
from surojax.data.conversations import Conversation, Pair
from surojax.data.datasets import Dataset
from surojax.data.rows import BadRow, NotARow, Row
from surojax.data.templates import Message, Template
from surojax.data.tokenizer import Tokenizer
from surojax.errors import ConfigError

TRAIN_ON = ("assistant", "last", "all")
_FORMAT = 1  # of the ids and trained that the same row, tokenizer and settings give

# A Hugging Face tokenizer needs about 50 times the memory of the text and uses one core per text, so long texts are
# split at line ends.
_LONGEST = 1 << 20  # characters


class Example(NamedTuple):
    """One document. ids: int32 [tokens]. trained: bool [tokens], token i is a target of the loss; None: all are."""

    ids: np.ndarray
    trained: np.ndarray | None


class Piece(NamedTuple):
    """A part of a document's text. trained: whether the loss counts its tokens."""

    text: str
    trained: bool


@dataclass(frozen=True)
class Draft:
    """A document before it is tokenised.

    starts: whether the beginning-of-sequence token precedes the pieces. ends: whether the end-of-sequence token follows
    them; None: only if the last piece has no token that ends an answer.
    """

    pieces: tuple[Piece, ...]
    starts: bool
    ends: bool | None


class Encoder:
    """Encodes the rows of one dataset. It can be pickled, so processes can share the work.

    dataset: with its type decided (`datasets.resolve`). template: None if the tokenizer has none and none is chosen.
    train_on: one of TRAIN_ON. system_prompt: for rows and datasets without one of their own.

    fingerprint: hash of all that ids and trained depend on besides the rows.
    note: one line for the user about what the template does to a conversation; "": nothing to say.

    Raises ConfigError if the dataset holds conversations and there is no template, or train_on is unknown.
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
        assert dataset.type != "auto", "resolve the dataset first"
        if train_on not in TRAIN_ON:
            raise ConfigError(f"train_on: expected one of {', '.join(TRAIN_ON)}, got {train_on!r}; choose one of them")
        if dataset.type == "conversation" and template is None:
            raise ConfigError(
                f"{dataset.name}: expected a chat template for its conversations, got a tokenizer ({tokenizer.name}) "
                "without one; set chat_template, for example to chatml"
            )
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._template = template
        self._train_on = train_on
        self._system_prompt = system_prompt
        talks = dataset.type != "text" and template is not None
        self._shows_tools = template is not None and template.shows_tools
        self.note: str = _note(template, train_on) if talks and template else ""
        self.fingerprint: str = self._fingerprint()

    def _fingerprint(self) -> str:
        dataset = self._dataset
        tokenizer = self._tokenizer
        text_only = dataset.type == "text"
        template = None if text_only or self._template is None else (self._template.text, tokenizer.bos, tokenizer.eos)
        fields = [name for name in sorted(vars(dataset)) if name.endswith("_field")]
        parts = {
            "format": _FORMAT,
            "tokenizer": [tokenizer.name, tokenizer.eos_id, tokenizer.bos_id if tokenizer.adds_bos else None],
            "stop_ids": sorted(tokenizer.stop_ids),
            "type": dataset.type,
            "fields": {name: getattr(dataset, name) for name in fields},
            "template": template,
            "train_on": None if text_only else self._train_on,
            "system_prompt": None if text_only else dataset.system_prompt or self._system_prompt,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8")).hexdigest()[:16]

    def encode(self, rows: Iterable[Row | BadRow]) -> list[Example | BadRow]:
        """Returns the rows' examples, in their order; a row that cannot be used is a BadRow. Uses all cores.

        Holds all rows in memory, and for long texts about 50 times their size: pass some megabytes at a time.
        """
        drafts = [self._draft(row) for row in rows]
        encoded = iter(encode_pieces([draft.pieces for draft in drafts if isinstance(draft, Draft)], self._tokenizer))
        return [self._example(draft, next(encoded)) if isinstance(draft, Draft) else draft for draft in drafts]

    def _draft(self, row: Row | BadRow) -> Draft | BadRow:
        if isinstance(row, BadRow):
            return row
        try:
            draft = self._draft_of(row)
            _check_unicode(draft)
            return draft
        except NotARow as error:
            return BadRow(row.where, str(error))

    def _draft_of(self, row: Row) -> Draft:
        dataset = self._dataset
        starts = self._tokenizer.adds_bos
        if dataset.type == "text":
            return Draft((Piece(conversations.text(row.record, dataset), True),), starts, True)
        if dataset.type == "conversation":
            return self._talk(conversations.conversation(row.record, dataset, self._system_prompt))
        pair = conversations.pair(row.record, dataset, self._system_prompt)
        if self._template is not None:
            return self._talk(Conversation(pair.messages, None))
        return Draft(plain_pieces(pair, self._train_on), starts, True)

    def _talk(self, conversation: Conversation) -> Draft:
        template = self._template
        assert template is not None, "checked by __init__"
        if conversation.tools and not self._shows_tools:
            raise NotARow(
                f"expected no tools, which {template.source} does not show, got {len(conversation.tools)}; choose "
                "another chat_template, or tools_field='' to leave them out"
            )
        pieces = conversation_pieces(conversation, template, self._train_on)
        return Draft(pieces, False, None if conversation.messages[-1]["role"] == "assistant" else False)

    def _example(self, draft: Draft, ids_of_pieces: list[np.ndarray]) -> Example:
        """Returns the example of a draft; ids_of_pieces: int32 [tokens] of each piece."""
        stop_ids = np.array(sorted(self._tokenizer.stop_ids), np.int32)
        ends = draft.ends
        if ends is None:
            ends = not np.isin(ids_of_pieces[-1], stop_ids).any()
        first = np.array([self._tokenizer.bos_id] if draft.starts else [], np.int32)
        last = np.array([self._tokenizer.eos_id] if ends else [], np.int32)
        ids = np.concatenate([first, *ids_of_pieces, last])
        if all(piece.trained for piece in draft.pieces):
            return Example(ids, None)
        last_trained = stop_ids if draft.ends is not True else np.empty(0, np.int32)
        masks = [
            _to_the_last(last_trained, part) if piece.trained else np.zeros(len(part), bool)
            for piece, part in zip(draft.pieces, ids_of_pieces, strict=True)
        ]
        return Example(ids, np.concatenate([np.zeros(len(first), bool), *masks, np.ones(len(last), bool)]))


def _to_the_last(stop_ids: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Returns a mask of the ids up to the last one that ends an answer, after which sampling stops; else of all."""
    stops = np.flatnonzero(np.isin(ids, stop_ids))
    return np.arange(len(ids)) <= (stops[-1] if len(stops) else len(ids))


def _check_unicode(draft: Draft) -> None:
    """Raises NotARow if a text contains half a surrogate pair, which UTF-8 cannot encode."""
    for piece in draft.pieces:
        try:
            piece.text.encode("utf-8")
        except UnicodeEncodeError as error:
            escape = f"\\u{ord(piece.text[error.start]):04x}"
            raise NotARow(
                f"expected text, got half a surrogate pair ({escape}) in it; correct or remove the row"
            ) from None


# -- From messages to pieces ------------------------------------------------------------------------------------------


def plain_pieces(pair: Pair, train_on: str) -> tuple[Piece, ...]:
    """Returns a prompt and its completion as pieces, for a tokenizer without a chat template."""
    system = f"{pair.system}\n\n" if pair.system else ""
    return Piece(system + pair.prompt + pair.seam, train_on == "all"), Piece(pair.completion, True)


def conversation_pieces(conversation: Conversation, template: Template, train_on: str) -> tuple[Piece, ...]:
    """Returns the rendered conversation as pieces; the answers that `train_on` asks for, or all pieces, are trained.

    What follows the last answer is left out, unless everything is trained. Raises NotARow if there is no answer, the
    template refuses the conversation or leaves out a message, or its generation prompt does not begin an answer.
    """
    messages, tools = conversation
    everything = train_on == "all"
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not everything:
        if not answers:
            raise NotARow("expected a message of the assistant to train on, got none; remove the row")
        messages = messages[: answers[-1] + 1]
    whole = template.render(messages, tools)
    _check_shown(messages, whole, template)

    pieces = []
    done = 0
    for i in answers[-1:] if train_on == "last" else answers:
        after = whole if i == len(messages) - 1 else template.render(messages[: i + 1], tools)
        if not whole.startswith(after):
            after = after.removesuffix(template.eos)  # some templates end the last message with it, whoever speaks
        if not whole.startswith(after):
            continue
        before = template.render(messages[:i], tools, add_generation_prompt=True)
        if not after.startswith(before) or len(before) < done:
            if everything:
                continue
            same = next((k for k, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
            raise NotARow(
                f"expected an answer to begin with the generation prompt of {template.source}, got "
                f"{after[same : same + 30]!r} in place of {before[same : same + 30]!r}; choose another chat_template"
            )
        pieces += [Piece(whole[done : len(before)], everything), Piece(whole[len(before) : len(after)], True)]
        done = len(after)
    pieces.append(Piece(whole[done:], everything))
    return tuple(piece for piece in pieces if piece.text)


def _check_shown(messages: list[Message], whole: str, template: Template) -> None:
    """Raises NotARow if the template leaves out what a user or the system prompt says."""
    for message in messages:
        if message["role"] in ("system", "user") and message["content"].strip() not in whole:
            raise NotARow(
                f"expected {template.source} to show every message, got a text without that of the {message['role']}, "
                f"{message['content'].strip()[:30]!r}; choose another chat_template"
            )


def _note(template: Template, train_on: str) -> str:
    """Returns one line if the template rewrites earlier answers, so that they are not trained; else ""."""
    if train_on != "assistant":
        return ""
    for answer, which in (("b", "earlier answers"), ("<think>a</think>b", "earlier answers with <think>")):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
        try:
            pieces = conversation_pieces(Conversation(turns * 2, None), template, train_on)
        except NotARow:
            return ""
        if sum(piece.trained for piece in pieces) < 2:
            return f"{template.source} rewrites {which} once a conversation goes on: only the last one is trained"
    return ""


# -- From pieces to ids -----------------------------------------------------------------------------------------------


class _Section(NamedTuple):
    """A part of a document that is tokenised on its own. ends: for each piece in it, where it ends, and its index."""

    text: str
    ends: list[tuple[int, int]]


def encode_pieces(documents: Sequence[tuple[Piece, ...]], tokenizer: Tokenizer) -> list[list[np.ndarray]]:
    """Returns int32 [tokens] for each piece of each document, on all cores.

    The ids of the pieces up to any seam are those of their joined text, so a prompt has the ids that sampling gives it.
    They are continued by those of the text with the next piece, if these begin with them; else a token would cross the
    seam, and the piece is encoded alone.
    """
    sections = [_sections(pieces, tokenizer) for pieces in documents]
    texts = dict.fromkeys(text for part in sections for section in part for text in _texts(section))
    ids_of = dict(zip(texts, tokenizer.encode_batch(list(texts)), strict=True))
    encoded = []
    for pieces, part in zip(documents, sections, strict=True):
        chunks: list[list[np.ndarray]] = [[np.empty(0, np.int32)] for _ in pieces]
        for section in part:
            for (_, index), ids in zip(section.ends, _chunks(section, ids_of, tokenizer), strict=True):
                chunks[index].append(ids)
        encoded.append([np.concatenate(chunk) for chunk in chunks])
    return encoded


def _sections(pieces: tuple[Piece, ...], tokenizer: Tokenizer) -> list[_Section]:
    """Splits a document where tokens cannot cross anyway, which leaves little to encode twice."""
    seams = list(itertools.accumulate(len(piece.text) for piece in pieces))
    sections = []
    start = 0
    index = 0
    for text in tokenizer.sections("".join(piece.text for piece in pieces)):
        stop = start + len(text)
        ends = []
        while seams[index] < stop:
            if seams[index] > start:
                ends.append((seams[index] - start, index))
            index += 1
        sections.append(_Section(text, [*ends, (len(text), index)]))
        start = stop
    return sections


def _texts(section: _Section) -> list[str]:
    """Returns the texts to encode for a section: up to each seam, or if it has none, parts that are not too long."""
    if len(section.ends) == 1:
        return _split(section.text)
    return [section.text[:end] for end, _ in section.ends]


def _chunks(section: _Section, ids_of: Mapping[str, np.ndarray], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Returns the ids of each piece in a section."""
    encoded = [ids_of[text] for text in _texts(section)]
    if len(section.ends) == 1:
        return [np.concatenate(encoded)]
    chunks = []
    known = np.empty(0, np.int32)
    start = 0
    for (end, _), ids in zip(section.ends, encoded, strict=True):
        if not np.array_equal(ids[: len(known)], known):
            ids = np.concatenate([known, tokenizer.encode(section.text[start:end])])
        chunks.append(ids[len(known) :])
        known = ids
        start = end
    return chunks


def _split(text: str) -> list[str]:
    """Splits a text into parts of at most _LONGEST characters, after a line end if there is one."""
    parts = []
    start = 0
    while len(text) - start > _LONGEST:
        stop = text.rfind("\n", start, start + _LONGEST) + 1 or start + _LONGEST
        parts.append(text[start:stop])
        start = stop
    return [*parts, text[start:]]
