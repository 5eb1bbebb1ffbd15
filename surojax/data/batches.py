"""Token arrays, and the batches that a training step consumes.

A corpus is one array of token ids in memory: each document is tokenised and appended, followed by the end-of-sequence
token. A token takes two bytes (four if the vocabulary has more than 65,536 ids), so a billion tokens take 2 GB. A
corpus that one machine can train on therefore needs no index files and no preprocessing step.

A sample is a window of S+1 tokens: the first S are the inputs, the last S are the labels. The order of the samples over
all epochs is a pure function of (corpus, S, seed), which grain computes index by index. A step takes the next samples
in that order, whatever its batch size. The state of the data pipeline is therefore one integer, the number of samples
consumed, and a resumed run starts at that sample without replaying the earlier ones.

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

IGNORED = -1  # label of a position that the loss ignores

# A Hugging Face tokenizer needs about 50 times the memory of the text and uses one core per text. Long documents are
# therefore split at line ends into pieces, and each call tokenises a group of pieces that keeps all cores busy.
_PIECE_CHARS = 1 << 20
_GROUP_CHARS = 1 << 22


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised documents, each followed by end-of-sequence, in one array.

    tokens: uint16 [tokens], or uint32 if the vocabulary has more than 65,536 ids.
    num_bytes: length of the documents' text in UTF-8, without the end-of-sequence tokens.
    fingerprint: first 16 hexadecimal digits of the SHA-256 of the tokens; identifies the data.
    name: source of the documents, for messages.
    """

    tokens: np.ndarray
    num_bytes: int
    fingerprint: str
    name: str

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes per token, which converts nats per token to bits per byte: `loss / log(2) / bytes_per_token`."""
        return self.num_bytes / len(self.tokens)


def load_corpora(
    source: str, *, eval_source: str = "", tokenizer: Tokenizer, text_field: str = "text"
) -> tuple[Corpus, Corpus]:
    """Reads and tokenises `source`; returns the training corpus and the evaluation corpus.

    source: "stdlib" (write "./stdlib" for a folder with that name), or one or more files, folders or globs, separated
      by commas. A .txt file is one document; a .jsonl file has one document per line, in the field `text_field`.
      Folders are searched recursively for files with these extensions. Hidden files and blank .jsonl lines are skipped.
    eval_source: source of the evaluation corpus, in the same form. If it is empty, about 1 % of the documents of
      `source` (5 % for "stdlib"), but at least one, are held out for evaluation. If `source` is a single document, its
      last 5 % is held out.

    Raises ConfigError, which names the file and line, if a source is missing, empty, or not text.
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
    """A corpus under construction. Ids are appended to one buffer of bytes, since Python integers need more memory."""

    dtype: type[np.generic]
    num_bytes: int = 0
    buffer: bytearray = field(default_factory=bytearray)

    def append(self, ids: np.ndarray) -> None:
        self.buffer += ids.astype(self.dtype).tobytes()

    def finish(self, name: str) -> Corpus:
        tokens = np.frombuffer(self.buffer, self.dtype)
        return Corpus(tokens, self.num_bytes, hashlib.sha256(self.buffer).hexdigest()[:16], name)


def _tokenise(marked: Iterable[tuple[Document, bool]], tokenizer: Tokenizer, name: str) -> tuple[Corpus, Corpus]:
    """Returns two corpora: the documents marked False and the documents marked True, each in the order of `marked`."""
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
    ends: Document | None  # the document, if this is its last piece


def _pieces(marked: Iterable[tuple[Document, bool]]) -> Iterator[_Piece]:
    """Splits documents into pieces of at most _PIECE_CHARS characters, after a line end if the piece has one."""
    for document, is_held_out in marked:
        text = document.text
        start = 0
        while len(text) - start > _PIECE_CHARS:
            stop = text.rfind("\n", start, start + _PIECE_CHARS) + 1 or start + _PIECE_CHARS
            yield _Piece(text[start:stop], is_held_out, None)
            start = stop
        yield _Piece(text[start:], is_held_out, document)


def _groups(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Collects consecutive pieces into groups of at least _GROUP_CHARS characters; the last group may be smaller."""
    group = []
    chars = 0
    for piece in pieces:
        group.append(piece)
        chars += len(piece.text)
        if chars >= _GROUP_CHARS:
            yield group
            group = []
            chars = 0
    if group:
        yield group


def samples_per_epoch(corpus: Corpus, sequence_len: int) -> int:
    """Number of windows of `sequence_len` + 1 tokens in the corpus; consecutive windows share one token."""
    return max(len(corpus.tokens) - 1, 0) // sequence_len


def check_length(corpus: Corpus, sequence_len: int, batch: int) -> None:
    """Raises ConfigError if the corpus has fewer windows than `batch`, the number of samples in one step."""
    needed = batch * sequence_len + 1
    if len(corpus.tokens) < needed:
        raise ConfigError(
            f"{corpus.name}: expected at least {needed:,} tokens for one step of {batch} samples with sequence_len "
            f"{sequence_len}, got {len(corpus.tokens):,}; add text, or lower sequence_len or the batch size"
        )


@dataclass(frozen=True)
class _Windows:
    """The corpus as a grain data source: item i is a view of the S+1 tokens of window i."""

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
    """Iterates over shuffled batches {"inputs", "labels"}, each int32 [A, B, S].

    A step takes the next A*B samples; their order does not depend on A and B. Each epoch contains every window once, in
    a new order. A step may span two epochs.

    start_sample: number of samples to skip, counted from the start of the run.
    num_epochs: the iterator ends after the last full step of these epochs; None: it never ends.
    prefetch: number of steps that a background thread prepares in advance; 0: no thread. The thread starts in this
      call. It ends with the iterator or at its `close()`, so `contextlib.closing` works.

    Raises ConfigError if the corpus has fewer tokens than one step needs, or a number is out of range.
    """
    numbers = {"sequence_len": sequence_len, "batch_size": batch_size, "accumulation": accumulation}
    _require(1, **numbers, num_epochs=1 if num_epochs is None else num_epochs)
    _require(0, seed=seed, start_sample=start_sample, prefetch=prefetch)
    check_length(corpus, sequence_len, accumulation * batch_size)

    def to_batch(windows: Sequence[np.ndarray]) -> Batch:
        tokens = np.stack(windows).astype(np.int32).reshape(accumulation, batch_size, sequence_len + 1)
        return _inputs_and_labels(tokens)

    # grain shuffles epoch e with seed + e. With seeds 0 and 1, epoch 0 of one run would have the order of epoch 1 of
    # the other, so the seed is hashed first.
    spread_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    dataset = grain.MapDataset.source(_Windows(corpus, sequence_len)).shuffle(spread_seed).repeat(num_epochs)
    dataset = dataset[start_sample:].batch(accumulation * batch_size, drop_remainder=True, batch_fn=to_batch)
    # One thread is enough, since the tokens are in memory; more threads would compete for the interpreter's lock.
    options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
    iterator = iter(dataset.to_iter_dataset(options))
    iterator.start_prefetch()
    return iterator


def evaluation_batches(
    corpus: Corpus, *, sequence_len: int, batch_size: int, max_batches: int | None = None
) -> Iterator[Batch]:
    """Returns batches {"inputs", "labels"}, each int32 [B, S], in the order of the corpus; every call returns the same.

    Without `max_batches`, or if the windows fit into `max_batches` batches, the batches contain every window, and every
    token but the first is predicted once. Otherwise they contain `max_batches` * B windows, evenly spread over the
    corpus. The last window and the last batch are padded with input 0 and label IGNORED (-1), so that all batches have
    one shape.

    Raises ConfigError if the corpus has less than two tokens, or a number is out of range.
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
    """Splits tokens [..., S+1] into inputs (the first S) and labels (the last S), each [..., S]."""
    return {"inputs": tokens[..., :-1].copy(), "labels": tokens[..., 1:].copy()}


def _require(minimum: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < minimum:
            raise ConfigError(f"{name}: expected at least {minimum}, got {number}; raise it to {minimum} or more")
