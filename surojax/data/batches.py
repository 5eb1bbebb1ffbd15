"""Token arrays and the batches a training step eats.

A corpus is one array of token ids in memory: every document is tokenised, followed by the end-of-sequence token, and
appended. At two bytes per token (four for vocabularies above 65,536) a billion tokens take 2 GB, so the sizes one
machine trains on need no index files and no preprocessing step.

A sample is a window of S+1 tokens: S inputs and, one further, S labels. The order of samples over all epochs is a pure
function of (corpus, S, seed), computed by grain index by index; a step takes the next samples of it, whatever its batch
size. To resume is therefore to start counting elsewhere: nothing is replayed, and the state of the data pipeline is one
integer, the number of samples consumed.

Legend: A accumulation steps, B batch, S sequence.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import grain
import numpy as np

from surojax.data.corpus import HELD_OUT_FILES, HELD_OUT_STDLIB, STDLIB, Document, hold_out, read_documents
from surojax.data.tokenizer import Tokenizer
from surojax.errors import ConfigError

type Batch = dict[str, np.ndarray]

IGNORED = -1  # a label that counts for nothing

# A tokenizer.json needs about 50 times the memory of its text while it works, and one core per text: long documents are
# tokenised in pieces cut at line ends, and pieces in groups that keep the cores busy.
_PIECE_CHARS = 1 << 20
_GROUP_CHARS = 1 << 22


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised documents, each followed by end-of-sequence, in one array.

    tokens: uint16 [tokens], or uint32 where the vocabulary needs it.
    num_bytes: length of their text in UTF-8, without the end-of-sequence tokens.
    fingerprint: 16 hexadecimal digits of the SHA-256 of the tokens; equal exactly for equal data.
    name: where it came from, for messages.
    """

    tokens: np.ndarray
    num_bytes: int
    fingerprint: str
    name: str

    @property
    def bytes_per_token(self) -> float:
        """Turns a loss in nats per token into bits per byte: `loss / log(2) / bytes_per_token`."""
        return self.num_bytes / len(self.tokens)


def load_corpora(
    source: str, *, eval_source: str = "", tokenizer: Tokenizer, text_field: str = "text"
) -> tuple[Corpus, Corpus]:
    """Reads and tokenises `source`; returns the training corpus and the one for evaluation.

    source: "stdlib" (write "./stdlib" for a folder of that name), or a path, folder or glob, or several separated by
      commas, of .txt files (one document each) and .jsonl files (one document per line, in `text_field`). Folders are
      searched recursively for these extensions, hidden files left out; blank lines of .jsonl files are skipped.
    eval_source: the same for evaluation. Empty: about 1 % of the documents (5 % of the standard library's) are held
      out, at least one; of a single document the last 5 %.

    Raises ConfigError, naming file and line, when a source is missing, empty, or not text.
    """
    documents = read_documents(source, text_field)
    if eval_source:
        train, _ = _tokenise(((document, False) for document in documents), tokenizer, source)
        documents = read_documents(eval_source, text_field)
        evaluation, _ = _tokenise(((document, False) for document in documents), tokenizer, eval_source)
        return train, evaluation
    fraction = HELD_OUT_STDLIB if source == STDLIB else HELD_OUT_FILES
    train, evaluation = _tokenise(hold_out(documents, fraction), tokenizer, source)
    for corpus, purpose in ((train, "train on"), (evaluation, "evaluate on")):
        if not corpus.num_bytes:
            raise ConfigError(
                f"{source}: expected at least two different documents, or a longer one, to train on one part and "
                f"evaluate on the other, got nothing to {purpose}; add text or set a source for evaluation"
            )
    return train, evaluation


@dataclass
class _Growing:
    """A corpus under construction: ids are appended to one buffer, never kept as Python integers."""

    dtype: type[np.generic]
    num_bytes: int = 0
    buffer: bytearray = field(default_factory=bytearray)

    def append(self, ids: np.ndarray) -> None:
        self.buffer += ids.astype(self.dtype).tobytes()

    def finish(self, name: str) -> Corpus:
        tokens = np.frombuffer(self.buffer, self.dtype)
        return Corpus(tokens, self.num_bytes, hashlib.sha256(self.buffer).hexdigest()[:16], name)


def _tokenise(marked: Iterable[tuple[Document, bool]], tokenizer: Tokenizer, name: str) -> tuple[Corpus, Corpus]:
    """Two corpora: of the documents marked False and of those marked True, in the order they come."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    sides = (_Growing(dtype), _Growing(dtype))
    eos = np.array([tokenizer.eos_id])
    for group in _groups(_pieces(marked)):
        for piece, ids in zip(group, tokenizer.encode_batch([piece.text for piece in group]), strict=True):
            side = sides[piece.is_held_out]
            side.append(ids)
            if piece.ends is not None:
                side.append(eos)
                side.num_bytes += piece.ends.num_bytes
    return sides[0].finish(name), sides[1].finish(f"{name} (held out)")


@dataclass(frozen=True)
class _Piece:
    text: str
    is_held_out: bool
    ends: Document | None  # the document whose last piece this is


def _pieces(marked: Iterable[tuple[Document, bool]]) -> Iterator[_Piece]:
    """The documents in parts of at most a million characters, cut after a line where there is one."""
    for document, is_held_out in marked:
        text, start = document.text, 0
        while len(text) - start > _PIECE_CHARS:
            stop = text.rfind("\n", start, start + _PIECE_CHARS) + 1 or start + _PIECE_CHARS
            yield _Piece(text[start:stop], is_held_out, None)
            start = stop
        yield _Piece(text[start:], is_held_out, document)


def _groups(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Consecutive pieces together until they have a few million characters."""
    group, chars = [], 0
    for piece in pieces:
        group.append(piece)
        chars += len(piece.text)
        if chars >= _GROUP_CHARS:
            yield group
            group, chars = [], 0
    if group:
        yield group


def samples_per_epoch(corpus: Corpus, sequence_len: int) -> int:
    """Windows of `sequence_len` inputs and labels in the corpus; consecutive ones share one token."""
    return max(len(corpus.tokens) - 1, 0) // sequence_len


def check_length(corpus: Corpus, sequence_len: int, batch: int) -> None:
    """Raises ConfigError when the corpus holds less than `batch` (the samples of one step) windows."""
    needed = batch * sequence_len + 1
    if len(corpus.tokens) < needed:
        raise ConfigError(
            f"{corpus.name}: expected at least {needed:,} tokens for one step of {batch} samples with sequence_len "
            f"{sequence_len}, got {len(corpus.tokens):,}; add text, or lower sequence_len or the batch size"
        )


@dataclass(frozen=True)
class _Windows:
    """grain's view of a corpus: item i is the S+1 tokens of window i, not copied."""

    corpus: Corpus
    sequence_len: int

    def __len__(self) -> int:
        return samples_per_epoch(self.corpus, self.sequence_len)

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self.sequence_len
        return self.corpus.tokens[start : start + self.sequence_len + 1]


def batches(
    corpus: Corpus,
    *,
    sequence_len: int,
    batch_size: int,
    accumulation: int,
    seed: int,
    start_sample: int = 0,
    num_epochs: int | None = None,
    prefetch: int = 2,
) -> grain.DatasetIterator[Batch]:
    """Shuffled batches {"inputs", "labels"}, each int32 [A, B, S], from the absolute sample `start_sample` on.

    A step takes the next A*B samples, the same ones in the same order however they are split into A and B. Every epoch
    is shuffled anew and has each window once; a step may span two epochs. Ends after the last full step of
    `num_epochs`, or never (None). A background thread prepares `prefetch` steps ahead (0: none), from now on; it ends
    with the iterator or at its `close()` (`contextlib.closing` works).

    Raises ConfigError when the corpus is shorter than one step, or a number is out of range.
    """
    numbers = {"sequence_len": sequence_len, "batch_size": batch_size, "accumulation": accumulation}
    _require(1, **numbers, num_epochs=1 if num_epochs is None else num_epochs)
    _require(0, seed=seed, start_sample=start_sample, prefetch=prefetch)
    check_length(corpus, sequence_len, accumulation * batch_size)

    def to_batch(windows: Sequence[np.ndarray]) -> Batch:
        tokens = np.stack(windows).astype(np.int32).reshape(accumulation, batch_size, sequence_len + 1)
        return _inputs_and_labels(tokens)

    # grain shuffles epoch e with seed + e, so nearby seeds would be the same run shifted by an epoch: spread them.
    spread_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    dataset = grain.MapDataset.source(_Windows(corpus, sequence_len)).shuffle(spread_seed).repeat(num_epochs)
    dataset = dataset[start_sample:].batch(accumulation * batch_size, drop_remainder=True, batch_fn=to_batch)
    # One thread: the tokens are in memory, more would only compete for the interpreter's lock.
    options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
    iterator = iter(dataset.to_iter_dataset(options))
    iterator.start_prefetch()
    return iterator


def evaluation_batches(
    corpus: Corpus, *, sequence_len: int, batch_size: int, max_batches: int | None = None
) -> Iterator[Batch]:
    """Batches {"inputs", "labels"}, each int32 [B, S], in the order of the corpus, the same every time.

    All windows of the corpus, the last one cut short, or where these are more than `max_batches` batches as many evenly
    spread over it. What fills up the last window and the last batch has label IGNORED (-1) and input 0, so that every
    token but the first is predicted once and shapes are constant.

    Raises ConfigError when the corpus has less than two tokens, or a number is out of range.
    """
    _require(1, sequence_len=sequence_len, batch_size=batch_size, max_batches=1 if max_batches is None else max_batches)
    check_length(corpus, 1, 1)
    num_windows = math.ceil((len(corpus.tokens) - 1) / sequence_len)
    count = min(num_windows, num_windows if max_batches is None else max_batches * batch_size)
    starts = np.arange(count) * num_windows // count * sequence_len
    return (
        _evaluation_batch(corpus, starts[first : first + batch_size], sequence_len, batch_size)
        for first in range(0, count, batch_size)
    )


def _evaluation_batch(corpus: Corpus, starts: np.ndarray, sequence_len: int, batch_size: int) -> Batch:
    tokens = np.full((batch_size, sequence_len + 1), IGNORED, np.int32)
    for row, start in zip(tokens, starts.tolist(), strict=False):
        window = corpus.tokens[start : start + sequence_len + 1]
        row[: len(window)] = window
    batch = _inputs_and_labels(tokens)
    np.maximum(batch["inputs"], 0, out=batch["inputs"])
    return batch


def _inputs_and_labels(tokens: np.ndarray) -> Batch:
    """[..., S+1] to two arrays [..., S], the labels one further."""
    return {"inputs": tokens[..., :-1].copy(), "labels": tokens[..., 1:].copy()}


def _require(minimum: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < minimum:
            raise ConfigError(f"{name}: expected at least {minimum}, got {number}; raise it to {minimum} or more")
