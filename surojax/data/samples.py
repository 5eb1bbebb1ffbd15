"""Samples of a corpus, each a row of S positions: windows of text, examples in rows of their own, or packed examples.

A sample is a dict of int32 arrays [S]: "inputs"; "labels", the next token or IGNORED; and in packed rows "starts", for
each position the index in its row at which its document starts. A label is the next token of the same document if that
token is a target of the loss. A corpus with further numbers has float32 arrays, [S] of the labels, [S, width] of the
inputs. Documents of which the last token is scored have "scored", 1 there and 0 elsewhere. The rest of a row is
padding: input 0, label IGNORED, numbers 0, a document of its own.

Documents that belong to each other, as both answers of a preference, are in samples next to each other; in packed rows
at the same position in each of them, where the shorter one is followed by padding up to the end of the longer one.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from surojax.data import packing
from surojax.data.entries import OF_INPUTS, Corpus
from surojax.errors import ConfigError

type Sample = dict[str, np.ndarray]

IGNORED = -1  # label of a position that the loss ignores
_BLOCK = 1 << 20  # tokens read at a time


class Samples(Protocol):
    """A source of samples. name, fingerprint: for messages and checkpoints. num_tokens: tokens that training sees."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def together(self) -> int:
        """So many samples, one after the other, stay next to each other in every order: 2 of a preference."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def release(self) -> None:
        """Frees the memory of mapped pages that were read."""
        ...


@dataclass(frozen=True)
class Windows:
    """Windows of S + 1 tokens over the concatenated documents: inputs are the first S of them, labels the last S.

    Consecutive windows share one token. A rest that does not fill a window is left out, unless `with_rest`: then it is
    padded.
    """

    corpus: Corpus
    sequence_len: int
    with_rest: bool = False
    together: int = 1

    @property
    def name(self) -> str:
        return self.corpus.name

    @property
    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    @property
    def num_tokens(self) -> int:
        return len(self.corpus.tokens)

    @property
    def num_left_out(self) -> int:
        """The number of tokens at the end that are no label of a window."""
        return max(len(self.corpus.tokens) - 1, 0) - self.num_labels

    @property
    def num_labels(self) -> int:
        """The number of labels of text: one for each token but the first, without a rest that is left out."""
        num_labels = max(len(self.corpus.tokens) - 1, 0)
        return num_labels if self.with_rest else len(self) * self.sequence_len

    def __len__(self) -> int:
        num_labels = max(len(self.corpus.tokens) - 1, 0)
        return -(-num_labels // self.sequence_len) if self.with_rest else num_labels // self.sequence_len

    def __getitem__(self, index: int) -> Sample:
        start = index * self.sequence_len
        tokens = self.corpus.tokens[start : start + self.sequence_len + 1]
        window = np.full(self.sequence_len + 1, IGNORED, np.int32)
        window[: len(tokens)] = tokens
        return {"inputs": np.maximum(window[:-1], 0), "labels": window[1:]}

    def release(self) -> None:
        self.corpus.release()


@dataclass(frozen=True)
class ExampleRows:
    """Rows of whole examples, by a plan. packed: samples have "starts". together: see `Samples`.

    plan: of pieces, or of groups of so many pieces as belong together: a row of the plan is as many samples.
    padding: samples have "scored", at the last token of a document that is not this one, as transformers' models for
    sequence classification find it; None: they have not.
    """

    corpus: Corpus
    sequence_len: int
    pieces: packing.Pieces
    plan: packing.PackingPlan
    fingerprint: str
    packed: bool
    together: int = 1
    padding: int | None = None

    @property
    def name(self) -> str:
        return self.corpus.name

    @property
    def num_tokens(self) -> int:
        return int(self.pieces.lengths.sum(dtype=np.int64))

    @property
    def num_labels(self) -> int:
        """The number of labels in rows of text: one for each token but the first of each document."""
        return self.num_tokens - self.pieces.num_examples

    def __len__(self) -> int:
        return len(self.plan) * self.together

    def __getitem__(self, index: int) -> Sample:
        row, member = divmod(index, self.together)
        inputs = np.zeros(self.sequence_len, np.int32)
        labels = np.full(self.sequence_len, IGNORED, np.int32)
        starts = np.empty(self.sequence_len, np.int32)
        scored = np.zeros(self.sequence_len, np.int32)
        numbers = {
            name: np.zeros((self.sequence_len, *values.shape[1:]), np.float32)
            for name, values in self.corpus.numbers.items()
        }
        position = 0
        for group in self.plan.row(row).tolist():
            first_piece = group * self.together
            piece = first_piece + member
            length = int(self.pieces.lengths[piece])
            here = slice(position, position + length)
            first = int(self.pieces.starts[piece])
            inputs[here], labels[here] = _inputs_and_labels(self.corpus, first, length)
            for name, values in self.corpus.numbers.items():
                if name in OF_INPUTS:
                    numbers[name][here] = values[first : first + length]
                    continue
                label_values = values[first + 1 : first + 1 + length]
                numbers[name][position : position + len(label_values)] = label_values
                numbers[name][here][labels[here] == IGNORED] = 0
            starts[here] = position
            if self.padding is not None:
                others = np.flatnonzero(inputs[here] != self.padding)
                scored[position + (others[-1] if len(others) else 0)] = 1
            end = position + int(self.pieces.lengths[first_piece : first_piece + self.together].max())
            starts[position + length : end] = position + length
            position = end
        starts[position:] = position
        sample = {"inputs": inputs, "labels": labels} | numbers
        sample |= {} if self.padding is None else {"scored": scored}
        return sample | {"starts": starts} if self.packed else sample

    def release(self) -> None:
        self.corpus.release()


@dataclass(frozen=True)
class Concatenated:
    """The samples of several sources, one source after the other."""

    sources: tuple[Samples, ...]
    name: str

    @property
    def together(self) -> int:
        (together,) = {source.together for source in self.sources}
        return together

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(source.fingerprint for source in self.sources)

    @property
    def num_tokens(self) -> int:
        return sum(source.num_tokens for source in self.sources)

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def __getitem__(self, index: int) -> Sample:
        for source in self.sources:
            if index < len(source):
                return source[index]
            index -= len(source)
        raise IndexError(index)

    def release(self) -> None:
        for source in self.sources:
            source.release()


@dataclass(frozen=True, eq=False)
class DerivedSamples:
    """Base of classes that derive each sample from a sample of `samples`; a subclass defines `__getitem__`."""

    samples: Samples

    @property
    def name(self) -> str:
        return self.samples.name

    @property
    def fingerprint(self) -> str:
        return self.samples.fingerprint

    @property
    def num_tokens(self) -> int:
        return self.samples.num_tokens

    @property
    def together(self) -> int:
        return self.samples.together

    def __len__(self) -> int:
        return len(self.samples)

    def release(self) -> None:
        self.samples.release()


@dataclass(frozen=True, eq=False)
class WithNumbers(DerivedSamples):
    """Samples with an additional float32 array `[S]`, see `at_labels`.

    array: its name. numbers: float32 [samples, 1], or [samples, S].
    """

    array: str
    numbers: np.ndarray

    def __getitem__(self, index: int) -> Sample:
        sample = self.samples[index]
        labels = sample["labels"]
        return sample | {self.array: at_labels(labels[None], self.numbers[index : index + 1])[0]}


def at_labels(labels: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Places numbers at the positions of labels, float32 [rows, S].

    The one number of a row is at its first label, with zeros elsewhere. labels: int [rows, S]. numbers: float32
    [rows, S], or [rows, 1].
    """
    if numbers.shape == labels.shape:
        return np.asarray(numbers)
    array = np.zeros(labels.shape, np.float32)
    array[np.arange(len(labels)), np.argmax(labels != IGNORED, axis=1)] = numbers[:, 0]
    return array


def windows_or_rows(
    corpus: Corpus,
    sequence_len: int,
    *,
    packed: bool,
    is_text: bool = True,
    together: int = 1,
    on_long: str = "cut",
    padding: int | None = None,
    instead: str = "",
    say: Callable[[str], None] = print,
) -> Windows | ExampleRows:
    """Makes the samples of a corpus: windows of text without packing, else rows of examples.

    is_text: the examples are plain text, so a long one continues in another row; else its end is cut off. together: so
    many examples, one after the other, belong to each other, as both answers of a preference: all are left out if one
    is. padding: see `ExampleRows`. instead: the setting that can name other examples, for a message; "": none.

    Says how many examples are longer than a row, and how much of packed rows is padding. Raises ConfigError if no
    example remains.
    """
    if is_text and not packed:
        return Windows(corpus, sequence_len)
    # The pieces of all examples that belong together are needed to know which are whole.
    on_piece = "cut" if together > 1 else on_long
    pieces = packing.row_pieces(corpus.bounds, sequence_len, on_long=on_piece, continues=is_text)
    corpus.release()
    drops_long = together > 1 and on_long == "drop"
    pieces, num_untrained = _with_labels(corpus, pieces, sequence_len, together, drops_long=drops_long)
    if pieces.num_long:
        fate = "left out" if on_long == "drop" else "cut into several" if is_text else "cut at their end"
        if not is_text and on_long == "cut" and (num_cut := _num_cut(corpus, sequence_len)):
            fate += f", which leaves {num_cut:,} trained tokens out"
        untrained = f", {num_untrained} without a trained token are left out" if num_untrained else ""
        say(
            f"data: {corpus.name}: {pieces.num_long:,} of {corpus.num_examples:,} examples are longer than "
            f"sequence_len={sequence_len} and are {fate}{untrained}"
        )
    if not len(pieces.starts):
        drops = on_long == "drop"
        expected = "examples of at most" if drops else "examples with a token to train on within"
        advice = ["raise sequence_len", *(["set on_long='cut'"] if drops else [])]
        advice += [f"name other examples in {instead}"] if instead else []
        raise ConfigError(
            f"{corpus.name}: expected {expected} sequence_len={sequence_len} tokens, got none among "
            f"{corpus.num_examples:,}; {', or '.join(advice)}"
        )
    arrange = packing.best_fit if packed else packing.one_per_row
    plan = arrange(pieces.lengths.reshape(-1, together).max(1), sequence_len)
    num_rows = len(plan) * together
    share_of_padding = 1 - int(pieces.lengths.sum(dtype=np.int64)) / (num_rows * sequence_len)
    noun = "pieces of examples" if pieces.num_long and on_long == "cut" and is_text else "examples"
    say(
        f"data: {corpus.name}: {len(pieces.starts):,} {noun} in {num_rows:,} rows of {sequence_len} tokens, "
        f"{share_of_padding:.1%} padding"
    )
    settings = (f"packed={packed}", f"on_long={on_long if pieces.num_long else None}")
    fingerprint = fingerprint_of((corpus.fingerprint, *settings, *(["pairs"] if together > 1 else [])))
    return ExampleRows(corpus, sequence_len, pieces, plan, fingerprint, packed, together, padding)


def _inputs_and_labels(corpus: Corpus, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (tokens of a piece, their labels), int32 [length] each."""
    example = int(np.searchsorted(corpus.bounds, start, side="right"))
    end = int(corpus.bounds[example])  # of the piece's document
    tokens = corpus.tokens[start : min(start + length + 1, end)].astype(np.int32)
    labels = np.full(length, IGNORED, np.int32)
    labels[: len(tokens) - 1] = tokens[1:]
    if corpus.trained is not None:
        labels[: len(tokens) - 1][~corpus.trained[start + 1 : start + len(tokens)]] = IGNORED
    return tokens[:length], labels


def _with_labels(
    corpus: Corpus, pieces: packing.Pieces, sequence_len: int, together: int = 1, *, drops_long: bool = False
) -> tuple[packing.Pieces, int]:
    """Drops cut pieces without a label; returns the other pieces and the number of dropped ones.

    together: pieces that are dropped together. drops_long: pieces that were cut are dropped too, and not counted.
    """
    if corpus.trained is None:
        return pieces, 0
    full = np.flatnonzero(pieces.lengths == sequence_len)  # what was cut is as long as a row
    starts = pieces.starts[full]
    ends = np.asarray(corpus.bounds)[np.searchsorted(corpus.bounds, starts, side="right")]  # of their documents
    bounds = np.stack([starts + 1, np.minimum(starts + sequence_len + 1, ends)], axis=1)  # first, and one past last
    counts = _trained_before(corpus, bounds.reshape(-1)).reshape(-1, 2)
    kept = np.ones(len(pieces.lengths), np.bool_)
    kept[full] = counts[:, 1] > counts[:, 0]
    kept = kept.reshape(-1, together).all(1).repeat(together)
    left_out = int((~kept).sum())
    if drops_long:
        is_whole = np.diff(np.asarray(corpus.bounds)) <= sequence_len
        kept &= is_whole.reshape(-1, together).all(1).repeat(together)
        left_out = 0
    pieces = pieces._replace(
        starts=pieces.starts[kept], lengths=pieces.lengths[kept], num_examples=pieces.num_examples - int((~kept).sum())
    )
    return pieces, left_out


def _num_cut(corpus: Corpus, sequence_len: int) -> int:
    """Counts the trained tokens of long examples that are no label of their row."""
    bounds = np.asarray(corpus.bounds)
    is_long = np.diff(bounds) > sequence_len
    cuts = np.stack([np.minimum(bounds[:-1] + sequence_len + 1, bounds[1:]), bounds[1:]], axis=1)[is_long]
    before = cuts.reshape(-1) if corpus.trained is None else _trained_before(corpus, cuts.reshape(-1))
    return int(np.diff(before.reshape(-1, 2)).sum())


def _trained_before(corpus: Corpus, positions: np.ndarray) -> np.ndarray:
    """Counts the trained tokens before each position, int64 [positions]; frees mapped memory while reading.

    positions: int64 [positions], ascending, at most the number of tokens.
    """
    assert corpus.trained is not None, "all tokens are trained"
    counts = np.zeros(len(positions), np.int64)
    before = 0
    done = 0
    for start in range(0, len(corpus.trained), _BLOCK):
        up_to = before + np.append(0, np.cumsum(corpus.trained[start : start + _BLOCK]))
        stop = int(np.searchsorted(positions, start + len(up_to) - 1, side="right"))
        counts[done:stop] = up_to[positions[done:stop] - start]
        before = int(up_to[-1])
        done = stop
        corpus.release()
    return counts


def fingerprint_of(parts: Iterable[str]) -> str:
    """Returns 16 hexadecimal digits that depend on every part and on their order."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def check_length(samples: Samples, batch: int) -> None:
    """Raises ConfigError if there are fewer samples than `batch`, the number in one step."""
    if isinstance(samples, Windows):
        check_tokens(samples.corpus, samples.sequence_len, batch)
    elif len(samples) < batch:
        raise ConfigError(
            f"{samples.name}: expected at least {batch:,} samples for one step, got {len(samples):,}; add data, or "
            "lower gradient_accumulation_steps or per_device_batch_size"
        )


def check_tokens(corpus: Corpus, sequence_len: int, batch: int) -> None:
    """Raises ConfigError if the corpus has fewer windows than `batch`, the number of samples in one step."""
    needed = batch * sequence_len + 1
    if len(corpus.tokens) < needed:
        raise ConfigError(
            f"{corpus.name}: expected at least {needed:,} tokens for one step of {batch} samples with sequence_len "
            f"{sequence_len}, got {len(corpus.tokens):,}; add text, or lower "
            "sequence_len, gradient_accumulation_steps or per_device_batch_size"
        )


def concatenated(sources: Sequence[Samples], name: str) -> Samples:
    """Returns the samples of all sources; a single source as it is."""
    return sources[0] if len(sources) == 1 else Concatenated(tuple(sources), name)
