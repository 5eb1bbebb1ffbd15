"""The data pipeline: the same samples in the same order whatever the batch, the machine or the interruption."""

import contextlib
import itertools
import math
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from surojax.data import batches as data
from surojax.data.batches import Corpus, batches, check_length, evaluation_batches, samples_per_epoch
from surojax.errors import ConfigError

S = 4


def counting_corpus(num_windows: int, extra: int = 0) -> Corpus:
    """Token i is i, so that a window tells which one it is."""
    tokens = np.arange(num_windows * S + 1 + extra, dtype=np.uint32)
    return Corpus(tokens=tokens, num_bytes=len(tokens), fingerprint="", name="counting")


def windows_of(batch) -> list[int]:
    """Window numbers of a batch, in order; checks that inputs and labels belong together."""
    inputs, labels = batch["inputs"].reshape(-1, S), batch["labels"].reshape(-1, S)
    np.testing.assert_array_equal(labels, inputs + 1)
    np.testing.assert_array_equal(inputs, inputs[:, :1] + np.arange(S))
    assert (inputs[:, 0] % S == 0).all()
    return (inputs[:, 0] // S).tolist()


def sample_order(corpus, count, *, batch_size=2, accumulation=1, seed=7, **options) -> list[int]:
    """The first `count` window numbers that `batches` gives."""
    stream = batches(corpus, sequence_len=S, batch_size=batch_size, accumulation=accumulation, seed=seed, **options)
    with contextlib.closing(stream):
        steps = math.ceil(count / (batch_size * accumulation))
        return [window for batch in itertools.islice(stream, steps) for window in windows_of(batch)][:count]


# --- batches ---------------------------------------------------------------------------------------------------------


def test_batch_shapes_and_dtypes():
    with contextlib.closing(
        batches(counting_corpus(50), sequence_len=S, batch_size=3, accumulation=2, seed=0)
    ) as stream:
        batch = next(stream)
    assert set(batch) == {"inputs", "labels"}
    for array in batch.values():
        assert array.shape == (2, 3, S) and array.dtype == np.int32 and array.flags.c_contiguous


def test_order_is_a_function_of_the_seed():
    corpus = counting_corpus(101)
    assert sample_order(corpus, 300) == sample_order(corpus, 300)
    assert sample_order(corpus, 300, prefetch=0) == sample_order(corpus, 300, prefetch=5)
    assert sample_order(corpus, 300) != sample_order(corpus, 300, seed=8)
    assert sample_order(corpus, 101) != sorted(sample_order(corpus, 101))


def test_every_epoch_has_each_window_once_in_a_new_order():
    corpus = counting_corpus(101, extra=S - 1)  # the extra tokens do not fill a window
    order = sample_order(corpus, 303, batch_size=5)
    epochs = [order[:101], order[101:202], order[202:]]
    for epoch in epochs:
        assert sorted(epoch) == list(range(101))
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_seeds_next_to_each_other_are_not_the_same_run_an_epoch_later():
    corpus = counting_corpus(101)
    assert sample_order(corpus, 202, seed=1)[:101] != sample_order(corpus, 202, seed=0)[101:]


def test_resume_at_any_sample_with_any_batch_size():
    corpus = counting_corpus(23)
    order = sample_order(corpus, 200)
    for start, (batch_size, accumulation) in itertools.product((0, 1, 22, 23, 24, 100), ((2, 1), (3, 2), (7, 1))):
        resumed = sample_order(corpus, 60, batch_size=batch_size, accumulation=accumulation, start_sample=start)
        assert resumed == order[start : start + 60]


def test_resume_replays_nothing(monkeypatch):
    corpus = counting_corpus(50)
    read = []
    original = data._Windows.__getitem__
    monkeypatch.setattr(data._Windows, "__getitem__", lambda self, i: read.append(self.corpus) or original(self, i))
    sample_order(corpus, 2, batch_size=2, start_sample=10**12, prefetch=0)
    assert sum(other is corpus for other in read) == 2  # a thread of the test before may still read its own


def test_accumulation_only_splits_a_step():
    corpus = counting_corpus(40)
    whole = batches(corpus, sequence_len=S, batch_size=8, accumulation=1, seed=3)
    split = batches(corpus, sequence_len=S, batch_size=2, accumulation=4, seed=3)
    with contextlib.closing(whole), contextlib.closing(split):
        for one, four in itertools.islice(zip(whole, split, strict=True), 12):
            assert one["inputs"].shape == (1, 8, S) and four["inputs"].shape == (4, 2, S)
            for key in one:
                np.testing.assert_array_equal(one[key].reshape(8, S), four[key].reshape(8, S))


def test_num_epochs_ends_after_the_last_full_step():
    corpus = counting_corpus(10)
    endless = sample_order(corpus, 20, batch_size=4)
    order = sample_order(corpus, 1000, batch_size=4, num_epochs=2)
    assert order == endless and len(order) == 20  # steps span epochs
    assert sample_order(corpus, 1000, batch_size=3, num_epochs=1) == endless[:9]
    assert sample_order(corpus, 1000, batch_size=3, num_epochs=1, start_sample=5) == endless[5:8]
    for finished in (8, 10, 500):
        assert sample_order(corpus, 1000, batch_size=3, num_epochs=1, start_sample=finished) == []


def test_threads_start_before_the_first_batch_is_asked_for_and_end_with_the_iterator():
    def threads():
        return {thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")}

    def wait_until(condition):
        deadline = time.monotonic() + 5
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        return condition()

    before = threads()
    closed, dropped = (
        batches(counting_corpus(50), sequence_len=S, batch_size=2, accumulation=1, seed=0) for _ in range(2)
    )
    assert len(threads() - before) == 2
    next(dropped)
    closed.close()
    del dropped
    assert wait_until(lambda: not threads() - before)
    with pytest.raises(ValueError, match="closed"):
        next(closed)


def test_interpreter_exits_cleanly_and_silently_with_a_live_iterator():
    code = (
        "import numpy as np; from surojax.data.batches import Corpus, batches\n"
        "corpus = Corpus(np.arange(99, dtype=np.uint16), 99, '', '')\n"
        "stream = batches(corpus, sequence_len=4, batch_size=2, accumulation=1, seed=0)\n"
        "next(stream)\n"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, timeout=60, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_too_little_text_says_how_much_is_needed():
    corpus = counting_corpus(5)
    assert samples_per_epoch(corpus, S) == 5 and samples_per_epoch(counting_corpus(5, extra=S - 1), S) == 5
    check_length(corpus, S, 5)
    with pytest.raises(ConfigError, match=r"at least 25 tokens .* 6 samples .* got 21; .*lower"):
        check_length(corpus, S, 6)
    with pytest.raises(ConfigError, match="at least 25 tokens"):
        batches(corpus, sequence_len=S, batch_size=3, accumulation=2, seed=0)
    assert samples_per_epoch(Corpus(np.empty(0, np.uint16), 0, "", ""), S) == 0


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"accumulation": 0}, {"sequence_len": 0}, {"seed": -1}, {"start_sample": -1},
              {"num_epochs": 0}, {"prefetch": -1}]
)  # fmt: skip
def test_numbers_out_of_range(wrong):
    options = {"sequence_len": S, "batch_size": 2, "accumulation": 1, "seed": 0} | wrong
    with pytest.raises(ConfigError, match=rf"{next(iter(wrong))}: expected at least \d, got"):
        batches(counting_corpus(10), **options)


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_evaluation_covers_every_token_once_with_constant_shapes():
    corpus = counting_corpus(6, extra=2)  # 7 windows, the last of 2 labels; 3 batches of 3
    got = list(evaluation_batches(corpus, sequence_len=S, batch_size=3, max_batches=10))
    assert [batch["inputs"].shape for batch in got] == [(3, S)] * 3
    inputs = np.concatenate([batch["inputs"] for batch in got]).ravel()
    labels = np.concatenate([batch["labels"] for batch in got]).ravel()
    assert inputs.dtype == labels.dtype == np.int32
    counted = labels != -1
    np.testing.assert_array_equal(labels[counted], np.arange(1, 27))
    np.testing.assert_array_equal(inputs[counted], np.arange(26))
    assert (labels[26:] == -1).all() and inputs.min() == 0  # padding inputs stay inside the vocabulary
    assert len(list(evaluation_batches(corpus, sequence_len=S, batch_size=3))) == 3


def test_evaluation_spreads_over_a_long_corpus():
    corpus = counting_corpus(100)
    got = list(evaluation_batches(corpus, sequence_len=S, batch_size=5, max_batches=2))
    starts = [window for batch in got for window in windows_of(batch)]
    assert starts == list(range(0, 100, 10))
    again = list(evaluation_batches(corpus, sequence_len=S, batch_size=5, max_batches=2))
    for one, other in zip(got, again, strict=True):
        np.testing.assert_array_equal(one["labels"], other["labels"])


def test_evaluation_of_a_short_corpus():
    two = Corpus(np.array([7, 8], np.uint16), 2, "", "short")
    (batch,) = evaluation_batches(two, sequence_len=S, batch_size=2, max_batches=3)
    assert batch["labels"].tolist() == [[8, -1, -1, -1], [-1] * 4]
    assert batch["inputs"].tolist() == [[7, 8, 0, 0], [0] * 4]
    with pytest.raises(ConfigError, match="short: expected at least 2 tokens"):
        evaluation_batches(Corpus(np.array([7], np.uint16), 1, "", "short"), sequence_len=S, batch_size=2)
    with pytest.raises(ConfigError, match="max_batches"):
        evaluation_batches(two, sequence_len=S, batch_size=2, max_batches=0)
