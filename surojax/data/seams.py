"""Tokenises documents that consist of pieces, so that no token crosses the seam of two pieces.

A tokenizer that gets a prompt together with its answer may merge the end of one with the beginning of the other, or
split the end of the prompt differently because of what follows. Sampling gives the model the tokens of the prompt
alone, so these are the ones to train with.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from surojax.data import texts
from surojax.data.pieces import DocumentPiece
from surojax.data.tokenizer import Tokenizer

LONGEST_TOKEN = 64  # characters of a special token


class _Section(NamedTuple):
    """A part of a document that is tokenised separately. ends: (end, index) of each piece in the section."""

    text: str
    ends: list[tuple[int, int]]


def encode_pieces(documents: Sequence[tuple[DocumentPiece, ...]], tokenizer: Tokenizer) -> list[list[np.ndarray]]:
    """Tokenises the pieces of documents on all cores: int32 [tokens] for each piece of each document.

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


def _sections(pieces: tuple[DocumentPiece, ...], tokenizer: Tokenizer) -> list[_Section]:
    """Splits a document where no token can cross, so that little has to be encoded twice."""
    seams = list(itertools.accumulate((len(piece.text) for piece in pieces), initial=0))
    # Each piece is asked alone, since the two sides of a seam may together spell a special token, which is none then.
    cuts = {0, seams[-1]}
    for piece, start in zip(pieces, seams, strict=False):
        cuts.update(start + offset for offset in tokenizer.section_starts(piece.text))
    whole = "".join(piece.text for piece in pieces)
    sections = []
    index = 0
    for start, stop in itertools.pairwise(sorted(cuts)):
        ends = []
        while seams[index + 1] < stop:
            if seams[index + 1] > start:
                ends.append((seams[index + 1] - start, index))
            index += 1
        sections.append(_Section(whole[start:stop], [*ends, (stop - start, index)]))
    return sections


def _texts(section: _Section) -> list[str]:
    """Returns the texts to encode for a section: up to each seam; without seams, parts of limited length."""
    if len(section.ends) == 1:
        return [piece.text for piece in texts.text_pieces(section.text)]
    return [section.text[:end] for end, _ in section.ends]


def _chunks(section: _Section, ids_of: Mapping[str, np.ndarray], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Returns the token ids of each piece in a section."""
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


def closed(pieces: tuple[DocumentPiece, ...], tokenizer: Tokenizer) -> tuple[DocumentPiece, ...]:
    """Lets each trained answer end with the special token that follows it, if it ends with none itself.

    In some chat templates a turn ends where the next one begins, with a token of that: a model stops there.
    """
    found = list(pieces)
    for i, (answer, rest) in enumerate(itertools.pairwise(pieces)):
        if not answer.trained or rest.trained or ends_with_special(answer.text, tokenizer):
            continue
        start = len(rest.text) - len(rest.text.lstrip())
        if token := tokenizer.special_token_at(rest.text, start):
            end = start + len(token)
            found[i] = answer._replace(text=answer.text + rest.text[:end])
            found[i + 1] = rest._replace(text=rest.text[end:])
    return tuple(piece for piece in found if piece.text)


def ends_with_special(text: str, tokenizer: Tokenizer) -> bool:
    """Returns True if a text, without spaces at its end, ends with a special token."""
    text = text.rstrip()
    longest = text[-LONGEST_TOKEN:]
    return any(tokenizer.special_token_at(longest, i) == longest[i:] for i in range(len(longest)))
