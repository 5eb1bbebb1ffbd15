"""Log-probabilities of a run's answers under the reference, the model before training: computed once and cached.

The run's own evaluation computes them, so that weights in host memory or files are streamed as there, before the first
state of training is made. The cache has a file of them for each corpus, four bytes a sequence, or a token if the
objective reads those of tokens, named by a hash of the reference, the sequences and what numbers depend on. What the
steps of a run do not read is not computed: it is NaN there. Each batch is written when it is computed, so a run that is
killed, resumed or made longer computes what is missing.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from surojax.assembly.assemble import Assembly
from surojax.config.fields import Config, set_fields
from surojax.data.batches import Batch, Mixture, padded_batch
from surojax.data.run_data import Evaluated
from surojax.data.samples import Samples, WithNumbers, at_labels
from surojax.declared import Facts
from surojax.errors import ConfigError
from surojax.exchange import peft
from surojax.exchange.base import fingerprint
from surojax.exchange.model_tensors import Tensors
from surojax.exchange.sources import naming, open_weights
from surojax.memory.lock import locked
from surojax.objectives.objective import (
    LABELS,
    REFERENCE,
    STARTS,
    LogProbabilities,
    LogProbabilitiesOfTokens,
    OfLogProbabilities,
    OfSequences,
)
from surojax.parallel.feed import from_host
from surojax.placement.layout import batch_sharding
from surojax.run.console import say
from surojax.step import train_step
from surojax.training.initial_state import fresh_state
from surojax.training.program_options import program_options
from surojax.training.setup import Setup
from surojax.training.start import Start
from surojax.untrusted import expanded

FOLDER = "reference"  # in data_cache


def with_reference(c: Config, run: Assembly, setup: Setup, start: Start) -> Start:
    """Adds the reference's log-probabilities to a start's samples and batches, if the objective reads them.

    Raises ConfigError if the cache cannot be written, or the reference is no longer there and a number is missing.
    """
    if REFERENCE not in run.engine.batch_arrays:
        return start
    if jax.process_count() > 1:
        raise ConfigError(
            f"objective: expected one process with a reference, whose log-probabilities are cached by one, got "
            f"{jax.process_count()}; set reference_free=True or grpo_beta=0, or use objective='orpo' or 'simpo'"
        )
    reference = _Reference(c, run, setup, start)
    loaded = start.found
    last = start.total_steps * start.samples_per_step
    rows = loaded.train.rows_of(c.seed, start.position, last)
    sources = [
        WithNumbers(source, REFERENCE, reference.of_samples(source, needed, [source.fingerprint, c.sequence_len]))
        for source, needed in zip(loaded.train.sources, rows, strict=True)
    ]
    train = Mixture(sources, loaded.train.weights, loaded.train.all.name)
    evaluated = [one._replace(batches=reference.of_batches(one)) for one in loaded.evaluated]
    return start._replace(found=loaded._replace(train=train, evaluated=evaluated))


class _Reference:
    """A run's reference model; its weights are loaded when the cache lacks the first number."""

    def __init__(self, c: Config, run: Assembly, setup: Setup, start: Start):
        self.c = c
        assert isinstance(run.engine.objective, OfLogProbabilities), "no other one reads a reference"
        by_token = run.engine.objective.reads_reference_of_tokens or run.engine.packed
        self.width = c.sequence_len if by_token else 1  # numbers of a sample
        labelling = LogProbabilitiesOfTokens(c.sequence_len) if by_token else OfSequences(LogProbabilities())
        self.run = dataclasses.replace(run, engine=dataclasses.replace(run.engine, objective=labelling))
        self.batch_size = start.batch_size
        self.sharding = batch_sharding(setup.mesh, accumulated=False)
        self.initial: Tensors | None = setup.initial or open_weights(c, run.model)
        self.folder = expanded(c.data_cache) / FOLDER
        self.key = {"fields": set_fields(c, Facts.NUMBERS)}
        self.key |= {"model": self._name(), "adapter": _digest_of_adapter(c.lora_adapter)}

    def _name(self) -> str:
        """Returns a key of the weights before training."""
        if self.initial is not None:
            return fingerprint(self.initial, self.run.model)
        return f"seed {self.c.seed} of {json.dumps(self.c.model.to_dict(), sort_keys=True)}"

    def of_batches(self, evaluated: Evaluated) -> list[Batch]:
        """Adds the log-probability of each row to the batches of an evaluation."""
        samples = _SamplesOfBatches(evaluated)
        numbers = self.of_samples(samples, np.arange(len(samples)), [samples.fingerprint])
        each = np.split(numbers, np.cumsum([len(batch[LABELS]) for batch in evaluated.batches])[:-1])
        return [
            batch | {REFERENCE: at_labels(batch[LABELS], x)} for batch, x in zip(evaluated.batches, each, strict=True)
        ]

    def of_samples(self, samples: "Samples | _SamplesOfBatches", needed: np.ndarray, data: list[Any]) -> np.ndarray:
        """Returns log-probabilities, float32 [samples, width]: of needed samples, and of others if the cache has them.

        Other rows are NaN. needed: int64, ascending. data: what identifies the samples.
        """
        token_key = {} if self.width == 1 else {"tokens": self.width}
        key = json.dumps(self.key | {"data": data} | token_key, sort_keys=True)
        shape = (len(samples), self.width)
        file = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.float32"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(file.with_suffix(".lock"), "data_cache"):
                if not file.exists() or file.stat().st_size != 4 * len(samples) * self.width:
                    np.memmap(file, np.float32, "w+", shape=shape)[:] = np.nan
                missing = needed[np.isnan(np.memmap(file, np.float32, "r", shape=shape)[needed, 0])]
                if len(missing):
                    self._write(file, samples, missing, len(needed))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"data_cache: expected room for {file}, got {reason!r}; free some, or choose another folder"
            ) from error
        return np.memmap(file, np.float32, "r", shape=shape)

    def _write(self, file: Path, samples: "Samples | _SamplesOfBatches", missing: np.ndarray, needed: int) -> None:
        """Computes the missing log-probabilities, and writes them into the file batch by batch."""
        goes_on = f"; {needed - len(missing):,} more are in the cache" if len(missing) < needed else ""
        say(
            f"reference: log-probabilities of {len(missing):,} sequences of {samples.name} under the model before "
            f"training{goes_on}"
        )
        each = [missing[i : i + self.batch_size] for i in range(0, len(missing), self.batch_size)]
        batches = (padded_batch(samples, indices.tolist(), self.batch_size) for indices in each)
        with file.open("r+b") as opened:
            for indices, numbers in zip(each, self._computed(batches), strict=True):
                for index, number in zip(indices.tolist(), numbers, strict=False):  # the last batch is padded
                    opened.seek(4 * self.width * index)
                    opened.write(number.tobytes())
                opened.flush()
            os.fsync(opened.fileno())

    def _computed(self, batches: Iterable[Batch]) -> Iterator[np.ndarray]:
        """Yields the log-probabilities of each batch's rows, float32 [rows, width]."""
        step, weights = self._program
        arrays = self.run.engine.batch_arrays
        shape = (self.batch_size, self.c.sequence_len)
        position = {LogProbabilitiesOfTokens.POSITION: np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)}
        on_devices = (tuple(from_host((batch | position)[name], self.sharding) for name in arrays) for batch in batches)
        for sums, _ in train_step.evaluated(step, weights, on_devices):
            yield np.asarray(jax.device_get(sums[LogProbabilities.ROWS]), np.float32).reshape(-1, self.width)

    @functools.cached_property
    def _program(self) -> tuple[Any, Any]:
        """Returns (the compiled evaluation, the weights before training)."""
        c = self.c
        planned = self.run.engine.planned_batch((self.batch_size, c.sequence_len), self.sharding)
        options = program_options(c, self.run, next(iter(self.sharding.device_set)).platform)
        step = self.run.eval_step().lower(self.run.plan.weights, *planned).compile(options)
        adapter = peft.read_adapter(c.lora_adapter, self.run.model, naming(c)) if c.lora_adapter else None
        return step, fresh_state(c, self.run, self.initial, adapter).weights


class _SamplesOfBatches:
    """Presents the rows of an evaluation's batches as samples."""

    def __init__(self, evaluated: Evaluated):
        self.rows = [
            {name: x[i] for name, x in batch.items()} for batch in evaluated.batches for i in range(len(batch[LABELS]))
        ]
        self.name = evaluated.name or "held-out rows"
        digest = hashlib.sha256()
        for row in self.rows:
            for name in ("inputs", LABELS, *((STARTS,) if STARTS in row else ())):
                digest.update(row[name].tobytes())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.rows[index]

    def release(self) -> None:
        """Does nothing: no file is mapped."""


def _digest_of_adapter(folder: str) -> str:
    """Hashes an adapter's files; "" without an adapter."""
    files = sorted(expanded(folder).glob("adapter_*")) if folder else []
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest() if files else ""
