"""Reads, tokenises and caches: from a source of text or an entry of `datasets` to corpora of mapped files.

Reading and writing happen in the calling thread, encoding in two others, each with a group of documents or rows. A
Hugging Face tokenizer uses all cores within a group; while one group's ids become an array, the other is encoded. At
most four groups are in memory.

A source has an entry of the cache (`surojax.data.cache`) under the names, sizes and times of its files and all else
that its tokens depend on. If a part of it is held out, the entry has both parts.
"""

import functools
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from surojax.data import datasets, docstrings, files
from surojax.data.cache import HELD_OUT, NO_ROOM, TRAIN, Corpus, Entry, Files, NoRoom, PartWriter, cached, identify
from surojax.data.corpus import (
    HELD_OUT_FILES,
    HELD_OUT_STDLIB,
    STDLIB,
    Document,
    hold_out,
    key_of,
    read_documents,
    source_files,
    split_document,
    split_text,
    stdlib_files,
)
from surojax.data.datasets import Dataset
from surojax.data.examples import Encoder, Example
from surojax.data.readers import SUFFIXES
from surojax.data.rows import BadRow, Row
from surojax.data.tokenizer import Tokenizer
from surojax.errors import ConfigError

DATA_CACHE = "~/.cache/surojax"

# A Hugging Face tokenizer needs about 50 times the memory of the text and uses one core per text. Long documents are
# therefore split at line ends into pieces, and each group holds pieces for half of the cores, since two are encoded at
# a time.
_PIECE_CHARS = 1 << 20
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_GROUP_CHARS = max(1, _CORES // 2) << 20
_ENCODING = 2  # groups that are encoded at a time


def load_corpora(
    source: str,
    *,
    eval_source: str = "",
    tokenizer: Tokenizer,
    text_field: str = "text",
    data_cache: str = DATA_CACHE,
    say: Callable[[str], None] = print,
) -> tuple[Corpus, Corpus]:
    """Reads and tokenises `source`, or finds it in the cache; returns the training and the evaluation corpus.

    source: "stdlib" (write "./stdlib" for a folder with that name), or one or more files, folders or globs, separated
      by commas. A .txt file is one document; a .jsonl file has one document per line, in the field `text_field`.
      Folders are searched recursively for files with these extensions. Hidden files and blank .jsonl lines are skipped.
    eval_source: source of the evaluation corpus, in the same form. If it is empty, about 1 % of the documents of
      `source` (5 % for "stdlib"), but at least one, are held out for evaluation. If `source` is a single document, its
      last 5 % is held out.

    Raises ConfigError, which names the file and line, if a source is missing, empty, or not text.
    """

    def load(source: str, fraction: float) -> Entry:
        sources = identify(source_files(source))
        key = {
            "stdlib": source == STDLIB,
            "files": sources,
            "text_field": text_field,
            "tokenizer": [tokenizer.name, tokenizer.vocab_size, tokenizer.eos_id, *_bos_ids(tokenizer)],
            "piece_chars": _PIECE_CHARS,
            "held_out": fraction,
        }
        write = functools.partial(
            _write_documents,
            source=source,
            text_field=text_field,
            tokenizer=tokenizer,
            fraction=fraction,
            sources=sources,
        )
        return _report(cached(data_cache, key, write, name=source, say=say), say)

    if eval_source:
        return load(source, 0.0).corpora[TRAIN], load(eval_source, 0.0).corpora[TRAIN]
    found = load(source, HELD_OUT_STDLIB if source == STDLIB else HELD_OUT_FILES)
    return found.corpora[TRAIN], found.corpora[HELD_OUT]


class Prepared(NamedTuple):
    """A dataset's corpora. held_out: None if nothing was. is_text: its examples are plain text."""

    train: Corpus
    held_out: Corpus | None
    is_text: bool


def load_dataset(
    dataset: Dataset,
    encoder: Encoder,
    vocab_size: int,
    *,
    holds_out: bool,
    on_bad_row: str = "error",
    data_cache: str = DATA_CACHE,
    say: Callable[[str], None] = print,
) -> Prepared:
    """Reads and encodes the rows of a dataset whose type is decided, or finds them in the cache.

    vocab_size: of the tokenizer. holds_out: about 1 % of the rows, but at least one, are held out for evaluation.
    on_bad_row: "error" raises ConfigError with the file and line of a row that cannot be used; "skip" leaves such rows
    out and says how many they are. Raises ConfigError as well if no row remains.
    """
    sources = identify(_files_of(dataset))
    settings = {key: value for key, value in asdict(dataset).items() if key not in ("path", "weight")}
    fraction = HELD_OUT_FILES if holds_out else 0.0
    key = {
        "dataset": settings,
        "files": sources,
        "sets": datasets.fingerprints_of_sets(dataset),
        "encoder": encoder.fingerprint,
        "vocab_size": vocab_size,
        "held_out": fraction,
        "on_bad_row": on_bad_row,
    }
    write = functools.partial(
        _write_rows,
        dataset=dataset,
        encoder=encoder,
        vocab_size=vocab_size,
        fraction=fraction,
        on_bad_row=on_bad_row,
        sources=sources,
    )
    entry = _report(cached(data_cache, key, write, name=dataset.name, say=say), say)
    if skipped := entry.info["skipped"]:
        first = entry.info["first_skipped"]
        say(f"data: {dataset.name}: {skipped:,} rows cannot be used and are skipped; the first: {first}")
    return Prepared(entry.corpora[TRAIN], entry.corpora.get(HELD_OUT), dataset.type == "text")


def _bos_ids(tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that a document begins with: the beginning-of-sequence token, or none."""
    if not tokenizer.adds_bos:
        return []
    assert tokenizer.bos_id is not None, "a tokenizer that adds the token has it"
    return [tokenizer.bos_id]


def _files_of(dataset: Dataset) -> list[Path]:
    """Returns the files that the rows are read from; a set of the `datasets` library has none here."""
    found: list[Path] = []
    for item in dataset.path:
        found += stdlib_files() if item == docstrings.NAME else files.find(item, SUFFIXES) or ()
    first_spellings = {path.resolve(): path for path in reversed(found)}  # rows are read once of each file
    return [path for path in found if first_spellings[path.resolve()] is path]


def _report(entry: Entry, say: Callable[[str], None]) -> Entry:
    """Says where the tokens are."""
    tokens = sum(len(corpus.tokens) for corpus in entry.corpora.values())
    say(f"data: {tokens:,} tokens {'from' if entry.reused else 'into'} the cache {entry.folder}")
    return entry


class _Parts:
    """Writers for the parts of an entry, with a progress bar on a terminal. A context manager."""

    def __init__(self, folder: Path, vocab_size: int, *, name: str, holds_out: bool, source_bytes: int):
        dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
        names = (TRAIN, HELD_OUT) if holds_out else (TRAIN,)
        self.source_bytes = source_bytes
        self.bytes_read = 0
        self.parts = {part: PartWriter(folder / part, dtype) for part in names}
        self.bar = tqdm(desc=f"tokenising {name}", unit=" tokens", unit_scale=True, leave=False, disable=None)

    def __enter__(self) -> "_Parts":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.bar.close()
        for part in self.parts.values():
            part.close()
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise NoRoom(error, self._needed()) from error

    def __getitem__(self, is_held_out: bool) -> PartWriter:
        return self.parts[HELD_OUT if is_held_out else TRAIN]

    def append(self, is_held_out: bool, ids: np.ndarray, trained: np.ndarray | None = None) -> None:
        """Adds tokens to the current example of a part."""
        self[is_held_out].append(ids, trained)
        self.bar.update(len(ids))

    def finish(self) -> dict[str, Any]:
        """Completes all files; returns the meta data of the parts."""
        return {name: part.finish() for name, part in self.parts.items()}

    def _needed(self) -> str:
        """How much room the entry takes, from the share of the source that was read before the disk was full."""
        written = sum(part.num_bytes_written for part in self.parts.values())
        share = min(self.bytes_read / self.source_bytes, 1.0) if self.source_bytes else 0.0
        return f"about {written / share / 2**20:,.1f} MiB" if share else f"more than {written / 2**20:,.1f} MiB"


# -- Documents of text ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    text: str
    is_held_out: bool
    is_first: bool  # of its document
    ends: Document | None  # the document, if this is its last piece


def _write_documents(
    folder: Path,
    *,
    source: str,
    text_field: str,
    tokenizer: Tokenizer,
    fraction: float,
    sources: Files,
) -> dict[str, Any]:
    """Tokenises documents into `folder`, with the tokens that begin and end a document; returns the meta data."""
    documents = read_documents(source, text_field)
    marked = (
        hold_out(documents, fraction, split_document) if fraction else ((document, False) for document in documents)
    )
    bos = np.array(_bos_ids(tokenizer), np.int32)
    eos = np.array([tokenizer.eos_id])
    groups = _groups(_pieces(marked), lambda piece: len(piece.text))
    with _Parts(
        folder, tokenizer.vocab_size, name=source, holds_out=bool(fraction), source_bytes=sources.num_bytes
    ) as parts:
        for group, encoded in _in_threads(groups, lambda group: tokenizer.encode_batch([x.text for x in group])):
            for piece, ids in zip(group, encoded, strict=True):
                if piece.is_first:
                    parts.append(piece.is_held_out, bos)
                parts.append(piece.is_held_out, ids)
                if piece.ends is not None:
                    parts.append(piece.is_held_out, eos)
                    parts[piece.is_held_out].end_example(piece.ends.num_bytes)
                    parts.bytes_read += piece.ends.num_bytes
        found = parts.finish()
    for part, purpose in ((TRAIN, "train on"), (HELD_OUT, "evaluate on")) if fraction else ():
        if not found[part]["bytes"]:
            raise ConfigError(
                f"{source}: expected at least two different documents, or a longer one, to train on one part and "
                f"evaluate on the other, got nothing to {purpose}; add text or set a source for evaluation"
            )
    return {"parts": found}


def _pieces(marked: Iterable[tuple[Document, bool]]) -> Iterator[_Piece]:
    """Splits documents into pieces of at most _PIECE_CHARS characters, after a line end if the piece has one."""
    for document, is_held_out in marked:
        text = document.text
        start = 0
        while len(text) - start > _PIECE_CHARS:
            stop = text.rfind("\n", start, start + _PIECE_CHARS) + 1 or start + _PIECE_CHARS
            yield _Piece(text[start:stop], is_held_out, start == 0, None)
            start = stop
        yield _Piece(text[start:], is_held_out, start == 0, document)


# -- Rows of datasets -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Keyed:
    """A row with the hash of its record, which decides whether it is held out. num_bytes: about its size in a file."""

    row: Row | BadRow
    key: int
    num_bytes: int


def _write_rows(
    folder: Path,
    *,
    dataset: Dataset,
    encoder: Encoder,
    vocab_size: int,
    fraction: float,
    on_bad_row: str,
    sources: Files,
) -> dict[str, Any]:
    """Encodes rows into `folder`; returns the meta data."""
    rows = map(_keyed, datasets.read(dataset))
    split = functools.partial(_split_row, text_field=dataset.text_field if dataset.type == "text" else None)
    marked = hold_out(rows, fraction, split) if fraction else ((row, False) for row in rows)
    groups = _groups(marked, lambda item: item[0].num_bytes)
    skipped: list[BadRow] = []
    num_skipped = 0
    with _Parts(
        folder, vocab_size, name=dataset.name, holds_out=bool(fraction), source_bytes=sources.num_bytes
    ) as parts:
        for group, encoded in _in_threads(groups, lambda group: encoder.encode([keyed.row for keyed, _ in group])):
            for (keyed, is_held_out), example in zip(group, encoded, strict=True):
                parts.bytes_read += keyed.num_bytes
                if isinstance(example, BadRow):
                    if on_bad_row == "error":
                        raise ConfigError(f"{example.where}: {example.reason}")
                    num_skipped += 1
                    skipped = skipped or [example]
                    continue
                _append_example(parts, is_held_out, example, _text_bytes(keyed.row, dataset))
        found = parts.finish()
    numbers = [part["examples"] for part in found.values()]
    if not all(numbers):
        first = f" ({skipped[0].where}: {skipped[0].reason})" if skipped else ""
        if not any(numbers):
            raise ConfigError(
                f"{dataset.name}: expected rows that can be used, got none, {num_skipped:,} skipped{first}; correct "
                "them"
            )
        raise ConfigError(
            f"{dataset.name}: expected at least two different rows that can be used, to train on one part and evaluate "
            f"on the other, got {found[TRAIN]['examples']:,} to train on and {found[HELD_OUT]['examples']:,} to "
            f"evaluate on, {num_skipped:,} skipped{first}; add or correct rows, or set validation_datasets"
        )
    first_skipped = f"{skipped[0].where}: {skipped[0].reason}" if skipped else ""
    return {"parts": found, "skipped": num_skipped, "first_skipped": first_skipped}


def _append_example(parts: _Parts, is_held_out: bool, example: Example, num_bytes: int) -> None:
    parts.append(is_held_out, example.ids, example.trained)
    parts[is_held_out].end_example(num_bytes)


def _text_bytes(row: Row | BadRow, dataset: Dataset) -> int:
    """Length of a row's text in UTF-8; 0 if the row is not plain text."""
    text = row.record.get(dataset.text_field) if isinstance(row, Row) and dataset.type == "text" else None
    return len(text.encode("utf-8")) if isinstance(text, str) else 0


def _split_row(keyed: _Keyed, text_field: str | None) -> tuple[_Keyed, _Keyed] | None:
    """Splits a row of text, as `split_document` splits a document; None if the row is something else."""
    row = keyed.row
    if isinstance(row, BadRow) or text_field is None or not isinstance(row.record.get(text_field), str):
        return None
    first, second = (Row({**row.record, text_field: part}, row.where) for part in split_text(row.record[text_field]))
    return _keyed(first), _keyed(second)


def _keyed(row: Row | BadRow) -> _Keyed:
    content = row.reason if isinstance(row, BadRow) else json.dumps(row.record, sort_keys=True, default=str)
    encoded = content.encode("utf-8", "backslashreplace")
    return _Keyed(row, key_of(encoded), len(encoded))


# -- Groups and threads -----------------------------------------------------------------------------------------------


def _groups[T](items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Collects consecutive items into groups of at least _GROUP_CHARS characters; the last group may be smaller."""
    group: list[T] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= _GROUP_CHARS:
            yield group
            group = []
            total = 0
    if group:
        yield group


def _in_threads[T, R](groups: Iterable[T], encode: Callable[[T], Sequence[R]]) -> Iterator[tuple[T, Sequence[R]]]:
    """Yields each group with what `encode` returns for it, in order; the next groups are encoded meanwhile."""
    with ThreadPoolExecutor(_ENCODING) as threads:
        pending: deque[tuple[T, Any]] = deque()
        try:
            for group in groups:
                pending.append((group, threads.submit(encode, group)))
                if len(pending) > _ENCODING:
                    first, encoded = pending.popleft()
                    yield first, encoded.result()
            while pending:
                first, encoded = pending.popleft()
                yield first, encoded.result()
        finally:
            for _, encoded in pending:
                encoded.cancel()
