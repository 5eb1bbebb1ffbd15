"""The batches that a training step consumes, and their order.

A source of samples (`surojax.data.samples`) gives sample i as a dict of int32 arrays [S]. The order of the samples over
all epochs is a pure function of (sources, weights, seed), which grain computes index by index. A step takes the next
samples in that order, whatever its batch size. The state of the data pipeline is therefore one integer, the number of
samples consumed, and a resumed run starts at that sample without replaying the earlier ones.

Samples that stay together (the two answers of a preference) are one element of that order; a batch has a multiple of
them.

Several sources without weights are one: each epoch contains every sample of all of them once, shuffled together. With
weights, every source is shuffled and repeated by itself, and grain takes samples of each in proportion to its weight.
An epoch is then as many samples as all sources have together: it has a source with a large weight more than once, and
another one not completely.

Legend: A accumulation steps, B batch, S sequence.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import grain
import numpy as np

from surojax.data.samples import IGNORED, DerivedSamples, Sample, Samples, check_length, concatenated, fingerprint_of
from surojax.errors import ConfigError

type Batch = dict[str, np.ndarray]


class Mixture:
    """Training samples of one or several sources, see above.

    weights: one for each source, positive; None: by their sizes. name: for messages. Raises ConfigError if a source
    with a weight is empty.
    """

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float] | None = None, name: str = ""):
        self.sources = tuple(sources)
        self.weights = None if weights is None or len(sources) == 1 else tuple(weights)
        self.all = concatenated(self.sources, name or self.sources[0].name)
        for source in self.sources if self.weights else ():
            check_length(source, 1)

    def __len__(self) -> int:
        """Number of samples in an epoch."""
        return len(self.all)

    @property
    def fingerprint(self) -> str:
        """Identifies the samples, their sources and weights."""
        if self.weights is None:
            return self.all.fingerprint
        return fingerprint_of([self.all.fingerprint, *map(repr, self.weights)])

    def shares(self) -> list[float]:
        """Returns for each source how often an epoch repeats its samples, on average."""
        if self.weights is None:
            return [1.0] * len(self.sources)
        total = sum(self.weights)
        return [w / total * len(self) / len(x) for w, x in zip(self.weights, self.sources, strict=True)]

    def rows_of(self, seed: int, first: int, last: int) -> list[np.ndarray]:
        """Returns each source's rows among the run's samples `first` to `last` - 1: ascending indices, int64.

        All rows of all sources if these samples are an epoch or more.
        """
        if self.weights is None and last - first >= len(self):
            return [np.arange(len(source)) for source in self.sources]
        numbered = [_Numbered(source, i) for i, source in enumerate(self.sources)]
        order = Mixture(numbered, self.weights).order(seed, None)
        rows_by_source: list[set[int]] = [set() for _ in self.sources]
        for i in range(first, last):
            sample = order[i]
            assert sample is not None  # only a filtered data set has gaps
            rows_by_source[int(sample["source"])].add(int(sample["row"]))
        return [np.array(sorted(rows), np.int64) for rows in rows_by_source]

    def order(self, seed: int, num_epochs: int | None) -> grain.MapDataset[Sample]:
        """Returns the run's samples in order, for `num_epochs` epochs; None: without end."""
        # grain shuffles epoch e with seed + e. With seeds 0 and 1, epoch 0 of one run would have the order of epoch 1
        # of the other, so the seed is hashed first.
        together = self.all.together
        if self.weights is None:
            spread_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
            return _apart(_together(self.all).shuffle(spread_seed).repeat(num_epochs), together)
        spread_seeds = np.random.SeedSequence(seed).generate_state(len(self.sources))
        shuffled = [
            _together(source).shuffle(int(spread_seed)).repeat()
            for source, spread_seed in zip(self.sources, spread_seeds, strict=True)
        ]
        mixed = grain.MapDataset.mix(shuffled, self.weights)
        return _apart(mixed if num_epochs is None else mixed[: num_epochs * len(self) // together], together)


def training_batches(
    samples: Samples | Mixture,
    *,
    batch_size: int,
    accumulation: int,
    seed: int,
    start_sample: int = 0,
    num_epochs: int | None = None,
    prefetch: int = 2,
    rows: np.ndarray | None = None,
) -> grain.DatasetIterator[Batch]:
    """Iterates over shuffled batches {"inputs", "labels"}, and "starts" if rows are packed, each int32 [A, B, S].

    A step takes the next A*B samples; their order does not depend on A and B. A step may span two epochs.

    start_sample: number of samples to skip, counted from the start of the run.
    num_epochs: the iterator ends after the last full step of these epochs; None: it never ends.
    prefetch: number of steps that a background thread prepares in advance; 0: no thread. The thread starts in this
      call. It ends with the iterator or at its `close()`, so `contextlib.closing` works.

    rows: of B, the only ones to read, in ascending order; None: all. Batches are then [A, number of rows, S].

    Raises ConfigError if there are fewer samples than one step needs, or a number is out of range.
    """
    _require(1, batch_size=batch_size, accumulation=accumulation, num_epochs=1 if num_epochs is None else num_epochs)
    _require(0, seed=seed, start_sample=start_sample, prefetch=prefetch)
    mixture = samples if isinstance(samples, Mixture) else Mixture([samples])
    check_length(mixture.all, accumulation * batch_size)

    here = batch_size if rows is None else len(rows)

    def to_batch(drawn: Sequence[Sample]) -> Batch:
        batch = {name: np.stack([row[name] for row in drawn]) for name in drawn[0]}
        mixture.all.release()
        return {name: x.reshape(accumulation, here, *x.shape[1:]) for name, x in batch.items()}

    dataset = mixture.order(seed, num_epochs)[start_sample:]
    if rows is not None:
        dataset = grain.MapDataset.source(_Part(dataset, batch_size, rows))
    dataset = dataset.batch(accumulation * here, drop_remainder=True, batch_fn=to_batch)
    # One thread is enough, since the tokens are in mapped files; more would compete for the interpreter's lock.
    options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
    iterator = iter(dataset.to_iter_dataset(options))
    iterator.start_prefetch()
    return iterator


@dataclass(frozen=True, eq=False)
class _Numbered(DerivedSamples):
    """Samples that hold only the number of their source and their row in the source."""

    source: int

    def __getitem__(self, index: int) -> Sample:
        return {"source": np.array(self.source), "row": np.array(index)}


def _together(samples: Samples) -> grain.MapDataset:
    """Groups samples that stay together into lists, the elements of the data set; single samples stay as they are."""
    return grain.MapDataset.source(samples) if samples.together == 1 else grain.MapDataset.source(_Together(samples))


def _apart(dataset: grain.MapDataset, together: int) -> grain.MapDataset[Sample]:
    """Flattens a data set of lists of `together` samples to samples."""
    return dataset if together == 1 else grain.MapDataset.source(_Apart(dataset, together))


class _Together:
    """A data source of lists of samples that stay together."""

    def __init__(self, samples: Samples):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples) // self.samples.together

    def __getitem__(self, index: int) -> list[Sample]:
        together = self.samples.together
        return [self.samples[i] for i in range(index * together, (index + 1) * together)]


class _Apart:
    """A data source of the samples in a data set of lists of `together` samples."""

    def __init__(self, dataset: grain.MapDataset, together: int):
        self.dataset = dataset
        self.together = together

    def __len__(self) -> int:
        return min(len(self.dataset) * self.together, sys.maxsize)  # more than len() can say, if there is no end

    def __getitem__(self, index: int) -> Sample:
        samples = self.dataset[index // self.together]
        assert samples is not None  # only a filtered data set has gaps
        return samples[index % self.together]


class _Part:
    """A data source of the samples at these rows of every batch of `batch_size`."""

    def __init__(self, dataset: grain.MapDataset[Sample], batch_size: int, rows: np.ndarray):
        self.dataset = dataset
        self.batch_size = batch_size
        self.rows = rows

    def __len__(self) -> int:
        return len(self.dataset) // self.batch_size * len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        batch, i = divmod(index, len(self.rows))
        sample = self.dataset[batch * self.batch_size + int(self.rows[i])]
        assert sample is not None  # only a filtered data set has gaps
        return sample


def evaluation_batches(samples: Samples, *, batch_size: int, max_batches: int | None = None) -> Iterator[Batch]:
    """Returns batches {"inputs", "labels"}, and "starts" if rows are packed, each int32 [B, S]; always the same.

    Without `max_batches`, or if the samples fit into `max_batches` batches, the batches contain every sample in order.
    Otherwise they contain `max_batches` * B samples, evenly spread. The last batch is padded with input 0 and label
    IGNORED (-1), so that all batches have one shape.

    Raises ConfigError if there is no sample, or a number is out of range.
    """
    _require(1, batch_size=batch_size, max_batches=1 if max_batches is None else max_batches)
    if not len(samples):
        raise ConfigError(f"{samples.name}: expected data to evaluate on, got less than two tokens; add some")
    together = samples.together
    count = min(len(samples), len(samples) if max_batches is None else max_batches * batch_size) // together
    firsts = np.arange(count) * (len(samples) // together) // count * together
    indices = (firsts[:, None] + np.arange(together)).reshape(-1).tolist()
    return (
        padded_batch(samples, indices[first : first + batch_size], batch_size)
        for first in range(0, len(indices), batch_size)
    )


class SampleRows(Protocol):
    """The members of `Samples` that a batch needs."""

    def __getitem__(self, index: int) -> Sample: ...

    def release(self) -> None: ...


def padded_batch(samples: SampleRows, indices: list[int], batch_size: int) -> Batch:
    """Returns the batch of these samples, with rows of padding behind them if they are fewer than `batch_size`."""
    rows = [samples[index] for index in indices]
    samples.release()
    padding = {name: np.full_like(x, IGNORED if name == "labels" else 0) for name, x in rows[0].items()}
    rows += [padding] * (batch_size - len(rows))
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _require(minimum: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < minimum:
            raise ConfigError(f"{name}: expected at least {minimum}, got {number}; raise it to {minimum} or more")
