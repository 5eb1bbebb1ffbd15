"""Documents: reads rows of plain text, and makes tokens of them.

A document of any size takes as much memory as a few of its pieces. A file is read twice: for its hash and its length,
which also finds a byte that is no text before any token is written; then to be tokenised.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from surojax.data import texts
from surojax.data.conversations import text_of_row as text_of
from surojax.data.data_rows import BadRow, BlankRow, DataRow, NotARow, half_a_pair
from surojax.data.examples import Example
from surojax.data.files import NotText
from surojax.data.items import Item, Unit, item_key, json_of, key_of_bad, new_hash
from surojax.data.texts import TextFile, TextPiece
from surojax.data.tokenizer import Tokenizer
from surojax.data.values import is_missing

type Text = str | TextFile


def read_documents(
    rows: Iterable[DataRow | BadRow], text_field: str, *, by_record: bool, with_keys: bool
) -> Iterator[Item[Text] | BlankRow]:
    """Yields the text of each row, or a `BadRow`, or a `BlankRow`: a text or a file that is empty, or white space.

    by_record: keys are hashes of all fields of a row; otherwise of its text. with_keys: False if nothing is held out.
    """
    for row in rows:
        if isinstance(row, BadRow):
            yield Item(row, key_of_bad(row), 0)
        elif isinstance(file := row.record.get(text_field), TextFile):
            yield _of_file(file, text_field if by_record else None, with_keys)
        else:
            yield _of_row(row, text_field, by_record, with_keys)


def _of_row(row: DataRow, text_field: str, by_record: bool, with_keys: bool) -> Item[Text] | BlankRow:
    if text_field in row.record and is_blank(row.record[text_field]):
        return BlankRow(row.where)
    key = item_key(new_hash(json_of(row.record))) if with_keys and by_record else 0
    try:
        text = text_of(row.record, text_field)
        encoded = text.encode("utf-8")
    except NotARow as error:
        return Item(BadRow(row.where, str(error)), key, 0)
    except UnicodeEncodeError as error:
        return Item(BadRow(row.where, half_a_pair(error)), key, 0)
    return Item(text, item_key(new_hash(encoded)) if with_keys and not by_record else key, len(encoded))


def is_blank(text: Any) -> bool:
    """Returns True for a text without a letter or sign, and for a null, as tables hold in place of one."""
    return is_missing(text) or (isinstance(text, str) and not text.strip())


def _of_file(file: TextFile, field: str | None, with_keys: bool) -> Item[Text] | BlankRow:
    """Makes an item of a file. field: compute the key of a record with the text in this field; None: of the text."""
    digest = new_hash(json_of({field: ""})[:-2] if field else b"")
    num_bytes = 0
    has_text = False
    try:
        for part in texts.text_parts(file):
            encoded = part.encode("utf-8")
            num_bytes += len(encoded)
            has_text = has_text or bool(part.strip())
            if with_keys:
                digest.update(json.dumps(part)[1:-1].encode("ascii") if field else encoded)
    except NotText as error:
        return _bad(f"{file.path}:{error.line}", str(error))
    if not has_text:
        return BlankRow(str(file.path))
    digest.update(b'"}' if field else b"")
    return Item(file, item_key(digest) if with_keys else 0, num_bytes)


def _bad(where: str, reason: str) -> Item[Text]:
    row = BadRow(where, reason)
    return Item(row, key_of_bad(row), 0)


@dataclass(frozen=True)
class TextEncoder:
    """Encodes texts as documents, in pieces: beginning-of-sequence if the tokenizer adds one, text, end-of-sequence.

    cuts_at_special: long texts are cut at special tokens first, where a cut changes no token; otherwise at line ends.
    """

    tokenizer: Tokenizer
    cuts_at_special: bool

    is_text = True

    @property
    def fingerprint(self) -> str:
        """A key of everything that the tokens depend on, except the texts."""
        tokenizer = self.tokenizer
        bos = tokenizer.bos_id if tokenizer.adds_bos else None
        parts = [tokenizer.name, tokenizer.vocab_size, tokenizer.eos_id, bos, texts.PIECE_CHARS, self.cuts_at_special]
        return json.dumps(parts)

    def split(self, item: Item[Text]) -> tuple[Item[Text], Item[Text]] | None:
        """Splits a text into its beginning and its end; None if one would be empty, or if the item is a `BadRow`."""
        if isinstance(item.content, BadRow):
            return None
        first, second = texts.split(item.content)
        sizes = [sum(len(part.encode("utf-8")) for part in texts.text_parts(text)) for text in (first, second)]
        return (Item(first, 0, sizes[0]), Item(second, 0, sizes[1])) if all(sizes) else None

    def units(self, item: Item[Text]) -> Iterable[Unit[TextPiece]]:
        """Returns the pieces of a text."""
        content = item.content
        if isinstance(content, BadRow):
            return (Unit(content, 0, True),)
        if isinstance(content, str) and len(content) <= texts.PIECE_CHARS:
            return (Unit(TextPiece(content, True, True), item.num_bytes, True),)
        section_starts = self.tokenizer.section_starts if self.cuts_at_special else None
        return (
            Unit(piece, len(piece.text.encode()), piece.is_last) for piece in texts.text_pieces(content, section_starts)
        )

    def encode(self, pieces: Sequence[TextPiece | BadRow]) -> list[Example | BadRow]:
        """Returns the tokens of each piece, with the special tokens that begin and end a document."""
        encoded = iter(self.tokenizer.encode_batch([piece.text for piece in pieces if isinstance(piece, TextPiece)]))
        nothing = np.empty(0, np.int32)
        bos = np.array([self.tokenizer.bos_id], np.int32) if self.tokenizer.adds_bos else nothing
        eos = np.array([self.tokenizer.eos_id], np.int32)

        def example(piece: TextPiece) -> Example:
            ends = (bos if piece.is_first else nothing, next(encoded), eos if piece.is_last else nothing)
            return Example(np.concatenate(ends), None)

        return [example(piece) if isinstance(piece, TextPiece) else piece for piece in pieces]
