"""Prepares a source of text or an entry of `datasets` as corpora in mapped files.

A source has an entry of the cache (`surojax.data.cache`) under the names, sizes and times of its files and all else
that its tokens depend on; `surojax.data.cache_writer` makes those that are missing. If a part of it is held out, the
entry has both parts.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import NamedTuple

from surojax.data import corpus, datasets, docstrings, examples
from surojax.data.cache import CacheEntry, cached, identify
from surojax.data.cache_writer import ItemEncoder, write_entry
from surojax.data.cells import decoded
from surojax.data.data_rows import BlankRow
from surojax.data.datasets import Dataset
from surojax.data.documents import TextEncoder, read_documents
from surojax.data.entries import HELD_OUT, TRAIN, Corpus
from surojax.data.examples import Encoder
from surojax.data.items import Item, Source
from surojax.data.readers import OpenSet, open_set
from surojax.data.rollouts import RolloutEncoder
from surojax.data.token_rows import TokenEncoder
from surojax.data.tokenizer import Tokenizer

DATA_CACHE = "~/.cache/surojax"
HELD_OUT_STDLIB = 0.05  # fraction of its few hundred files, about half a megabyte, and of its 2,500 docstrings
HELD_OUT_FILES = 0.01  # fraction of the documents or rows of other sources


def load_corpora(
    source: str,
    *,
    eval_source: str = "",
    tokenizer: Tokenizer,
    text_field: str = "text",
    on_bad_row: str = "error",
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
    on_bad_row: see `load_dataset`. Documents without text are left out, and a line says how many.

    Raises ConfigError, which names the file and line, if a source is missing, empty, or not text.
    """

    load = functools.partial(
        _load,
        encoder=TextEncoder(tokenizer, cuts_at_special=False),
        vocab_size=tokenizer.vocab_size,
        on_bad_row=on_bad_row,
        data_cache=data_cache,
        say=say,
    )
    documents = corpus.source(source, text_field)
    if eval_source:
        evaluated = corpus.source(eval_source, text_field)
        return load(documents, fraction=0.0).corpora[TRAIN], load(evaluated, fraction=0.0).corpora[TRAIN]
    corpora = load(documents, fraction=HELD_OUT_STDLIB if source == corpus.STDLIB else HELD_OUT_FILES).corpora
    return corpora[TRAIN], corpora[HELD_OUT]


class Prepared(NamedTuple):
    """A dataset's corpora. held_out: None if nothing is held out. is_text: examples are plain text."""

    train: Corpus
    held_out: Corpus | None
    is_text: bool


def load_dataset(
    dataset: Dataset,
    encoder: Encoder | TextEncoder | TokenEncoder | RolloutEncoder,
    vocab_size: int,
    *,
    holds_out: bool,
    on_bad_row: str = "error",
    data_cache: str = DATA_CACHE,
    open_set: OpenSet = open_set,
    say: Callable[[str], None] = print,
) -> Prepared:
    """Reads and encodes a dataset's rows, or finds them in the cache. The dataset's type is decided.

    vocab_size: of the tokenizer. holds_out: about 1 % of the rows (5 % of the sets made from the standard library), but
    at least one, are held out for evaluation.
    on_bad_row: "error" raises ConfigError with the file and line of a row that cannot be used; "skip" leaves such rows
    out and says how many they are. A row of plain text without any is left out and counted with both.
    Raises ConfigError as well if no row remains.
    """
    fraction = HELD_OUT_STDLIB if docstrings.SETS.keys() >= set(dataset.path) else HELD_OUT_FILES
    entry = _load(
        _source(dataset, encoder, open_set),
        encoder,
        vocab_size=vocab_size,
        fraction=fraction if holds_out else 0.0,
        on_bad_row=on_bad_row,
        data_cache=data_cache,
        say=say,
    )
    return Prepared(entry.corpora[TRAIN], entry.corpora.get(HELD_OUT), encoder.is_text)


def _source(dataset: Dataset, encoder: ItemEncoder, open_set: OpenSet) -> Source:
    """Makes the `Source` of a dataset's rows."""

    def items(with_keys: bool) -> Iterator[Item | BlankRow]:
        rows = decoded(datasets.read_dataset(dataset, open_set), dataset)
        if dataset.type == "text":
            return read_documents(rows, dataset.text_field, by_record=True, with_keys=with_keys)
        if isinstance(encoder, TokenEncoder | RolloutEncoder):
            return map(encoder.item, rows)
        return examples.items(rows)

    settings = {key: value for key, value in asdict(dataset).items() if key not in ("path", "weight")}
    found = datasets.files_of(dataset)
    return Source(
        dataset.name,
        found.files,
        {"dataset": settings, "sets": datasets.fingerprints_of_sets(dataset, open_set)},
        items,
        what="rows",
        instead="validation_datasets",
        other_splits=found.other_splits,
    )


def _load(
    source: Source,
    encoder: ItemEncoder,
    *,
    vocab_size: int,
    fraction: float,
    on_bad_row: str,
    data_cache: str,
    say: Callable[[str], None],
) -> CacheEntry:
    """Returns a source's entry in the cache, after writing it if missing; prints its folder, and what was left out."""
    identity = identify(source.files)
    key = {
        **source.key,
        "files": identity,
        "encoder": encoder.fingerprint,
        "vocab_size": vocab_size,
        "held_out": fraction,
        "on_bad_row": on_bad_row,
    }
    make_entry = functools.partial(
        write_entry,
        source=source,
        encoder=encoder,
        vocab_size=vocab_size,
        fraction=fraction,
        on_bad_row=on_bad_row,
        source_bytes=identity.num_bytes,
    )
    entry = cached(data_cache, key, make_entry, name=source.name, say=say)
    tokens = sum(len(corpus.tokens) for corpus in entry.corpora.values())
    if others := list(dict.fromkeys(source.other_splits)):
        say(
            f"data: {source.name}: read without the files of {', '.join(others)}; an entry of datasets or "
            "validation_datasets reads them with split"
        )
    say(f"data: {tokens:,} tokens {'from' if entry.reused else 'into'} the cache {entry.folder}")
    for count, first, fate in (
        ("skipped", "first_skipped", "cannot be used and are skipped"),
        ("blank", "first_blank", "have no text and are left out"),
    ):
        if number := entry.info[count]:
            say(f"data: {source.name}: {number:,} {source.what} {fate}; the first: {entry.info[first]}")
    return entry
