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

from surojax.data.batches import evaluation_batches, training_batches
from surojax.data.cache import Corpus
from surojax.data.samples import Windows, check_length
from surojax.errors import ConfigError
from surojax.training.start import steps_of

S = 4


def windows(tokens: np.ndarray, name: str = "", with_rest: bool = False) -> Windows:
    """The windows of S tokens of a samples."""
    return Windows(Corpus(tokens, len(tokens), "", name), S, with_rest)


def counting(num_windows: int, extra: int = 0, with_rest: bool = False) -> Windows:
    """Token i is i, so that a window tells which one it is."""
    return windows(np.arange(num_windows * S + 1 + extra, dtype=np.uint32), "counting", with_rest)


def windows_of(batch) -> list[int]:
    """Window numbers of a batch, in order; checks that inputs and labels belong together."""
    inputs, labels = batch["inputs"].reshape(-1, S), batch["labels"].reshape(-1, S)
    np.testing.assert_array_equal(labels, inputs + 1)
    np.testing.assert_array_equal(inputs, inputs[:, :1] + np.arange(S))
    assert (inputs[:, 0] % S == 0).all()
    return (inputs[:, 0] // S).tolist()


def sample_order(samples, count, *, batch_size=2, accumulation=1, seed=7, **options) -> list[int]:
    """The first `count` window numbers that `training_batches` gives."""
    stream = training_batches(samples, batch_size=batch_size, accumulation=accumulation, seed=seed, **options)
    with contextlib.closing(stream):
        steps = math.ceil(count / (batch_size * accumulation))
        return [window for batch in itertools.islice(stream, steps) for window in windows_of(batch)][:count]


# --- batches ---------------------------------------------------------------------------------------------------------


def test_batch_shapes_and_dtypes():
    with contextlib.closing(training_batches(counting(50), batch_size=3, accumulation=2, seed=0)) as stream:
        batch = next(stream)
    assert set(batch) == {"inputs", "labels"}
    for array in batch.values():
        assert array.shape == (2, 3, S) and array.dtype == np.int32 and array.flags.c_contiguous


def test_order_is_a_function_of_the_seed():
    samples = counting(101)
    assert sample_order(samples, 300) == sample_order(samples, 300)
    assert sample_order(samples, 300, prefetch=0) == sample_order(samples, 300, prefetch=5)
    assert sample_order(samples, 300) != sample_order(samples, 300, seed=8)
    assert sample_order(samples, 101) != sorted(sample_order(samples, 101))


def test_every_epoch_has_each_window_once_in_a_new_order():
    samples = counting(101, extra=S - 1)  # the extra tokens do not fill a window
    order = sample_order(samples, 303, batch_size=5)
    epochs = [order[:101], order[101:202], order[202:]]
    for epoch in epochs:
        assert sorted(epoch) == list(range(101))
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_seeds_next_to_each_other_are_not_the_same_run_an_epoch_later():
    samples = counting(101)
    assert sample_order(samples, 202, seed=1)[:101] != sample_order(samples, 202, seed=0)[101:]


def test_resume_at_any_sample_with_any_batch_size():
    samples = counting(23)
    order = sample_order(samples, 200)
    for start, (batch_size, accumulation) in itertools.product((0, 1, 22, 23, 24, 100), ((2, 1), (3, 2), (7, 1))):
        resumed = sample_order(samples, 60, batch_size=batch_size, accumulation=accumulation, start_sample=start)
        assert resumed == order[start : start + 60]


def test_resume_replays_nothing(monkeypatch):
    samples = counting(50)
    read = []
    original = Windows.__getitem__
    monkeypatch.setattr(Windows, "__getitem__", lambda self, i: read.append(self) or original(self, i))
    sample_order(samples, 2, batch_size=2, start_sample=10**12, prefetch=0)
    assert sum(other is samples for other in read) == 2  # a thread of the test before may still read its own


def test_accumulation_only_splits_a_step():
    samples = counting(40)
    whole = training_batches(samples, batch_size=8, accumulation=1, seed=3)
    split = training_batches(samples, batch_size=2, accumulation=4, seed=3)
    with contextlib.closing(whole), contextlib.closing(split):
        for one, four in itertools.islice(zip(whole, split, strict=True), 12):
            assert one["inputs"].shape == (1, 8, S) and four["inputs"].shape == (4, 2, S)
            for key in one:
                np.testing.assert_array_equal(one[key].reshape(8, S), four[key].reshape(8, S))


def test_num_epochs_ends_after_the_last_full_step():
    samples = counting(10)
    endless = sample_order(samples, 20, batch_size=4)
    order = sample_order(samples, 1000, batch_size=4, num_epochs=2)
    assert order == endless and len(order) == 20  # steps span epochs
    assert sample_order(samples, 1000, batch_size=3, num_epochs=1) == endless[:9]
    assert sample_order(samples, 1000, batch_size=3, num_epochs=1, start_sample=5) == endless[5:8]
    for finished in (8, 10, 500):
        assert sample_order(samples, 1000, batch_size=3, num_epochs=1, start_sample=finished) == []


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_last_step_trains_on_the_rest(num_processes):
    """Each epoch has every window, however many fill a step, also after a resume, in several processes together."""
    rows = np.array_split(np.arange(4), num_processes)
    for count, start in itertools.product((4, 5, 7, 11), (0, 4, 6)):
        seen = [*sample_order(counting(count), start)]
        steps = steps_of(2 * count - start, 4)
        streams = [
            training_batches(counting(count), batch_size=4, accumulation=1, seed=7, start_sample=start, rows=part)
            for part in rows
        ]
        for stream in streams:
            with contextlib.closing(stream):
                seen += [window for batch in itertools.islice(stream, steps) for window in windows_of(batch)]
        times = np.bincount(seen, minlength=count)
        assert len(times) == count and times.min() >= 2 and times.sum() < 2 * count + 4


def test_threads_start_before_the_first_batch_is_asked_for_and_end_with_the_iterator():
    def threads():
        return {thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")}

    def wait_until(condition):
        deadline = time.monotonic() + 5
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        return condition()

    before = threads()
    closed, dropped = (training_batches(counting(50), batch_size=2, accumulation=1, seed=0) for _ in range(2))
    assert len(threads() - before) == 2
    next(dropped)
    closed.close()
    del dropped
    assert wait_until(lambda: not threads() - before)
    with pytest.raises(ValueError, match="closed"):
        next(closed)


def test_interpreter_exits_cleanly_and_silently_with_a_live_iterator():
    code = (
        "import numpy as np; from surojax.data.batches import training_batches; from surojax.data.cache import Corpus\n"
        "from surojax.data.samples import Windows\n"
        "windows = Windows(Corpus(np.arange(99, dtype=np.uint16), 99, '', ''), 4)\n"
        "stream = training_batches(windows, batch_size=2, accumulation=1, seed=0)\n"
        "next(stream)\n"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, timeout=60, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_too_little_text_says_how_much_is_needed():
    samples = counting(5)
    assert len(samples) == 5 and len(counting(5, extra=S - 1)) == 5
    check_length(samples, 5)
    with pytest.raises(ConfigError, match=r"at least 25 tokens .* 6 samples .* got 21; .*lower"):
        check_length(samples, 6)
    with pytest.raises(ConfigError, match="at least 25 tokens"):
        training_batches(samples, batch_size=3, accumulation=2, seed=0)
    assert len(windows(np.empty(0, np.uint16))) == len(windows(np.empty(0, np.uint16), with_rest=True)) == 0


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"accumulation": 0}, {"seed": -1}, {"start_sample": -1}, {"num_epochs": 0},
              {"prefetch": -1}]
)  # fmt: skip
def test_numbers_out_of_range(wrong):
    options = {"batch_size": 2, "accumulation": 1, "seed": 0} | wrong
    with pytest.raises(ConfigError, match=rf"{next(iter(wrong))}: expected at least \d, got"):
        training_batches(counting(10), **options)


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_evaluation_covers_every_token_once_with_constant_shapes():
    samples = counting(6, extra=2, with_rest=True)  # 7 windows, the last of 2 labels; 3 batches of 3
    got = list(evaluation_batches(samples, batch_size=3, max_batches=10))
    assert [batch["inputs"].shape for batch in got] == [(3, S)] * 3
    inputs = np.concatenate([batch["inputs"] for batch in got]).ravel()
    labels = np.concatenate([batch["labels"] for batch in got]).ravel()
    assert inputs.dtype == labels.dtype == np.int32
    counted = labels != -1
    np.testing.assert_array_equal(labels[counted], np.arange(1, 27))
    np.testing.assert_array_equal(inputs[counted], np.arange(26))
    assert (labels[26:] == -1).all() and inputs.min() == 0  # padding inputs stay inside the vocabulary
    assert len(list(evaluation_batches(samples, batch_size=3))) == 3


def test_evaluation_spreads_over_a_long_corpus():
    samples = counting(100, with_rest=True)
    got = list(evaluation_batches(samples, batch_size=5, max_batches=2))
    starts = [window for batch in got for window in windows_of(batch)]
    assert starts == list(range(0, 100, 10))
    again = list(evaluation_batches(samples, batch_size=5, max_batches=2))
    for one, other in zip(got, again, strict=True):
        np.testing.assert_array_equal(one["labels"], other["labels"])


def test_evaluation_of_a_short_corpus():
    two = windows(np.array([7, 8], np.uint16), "short", with_rest=True)
    (batch,) = evaluation_batches(two, batch_size=2, max_batches=3)
    assert batch["labels"].tolist() == [[8, -1, -1, -1], [-1] * 4]
    assert batch["inputs"].tolist() == [[7, 8, 0, 0], [0] * 4]
    with pytest.raises(ConfigError, match=r"short: expected .* less than two tokens"):
        evaluation_batches(windows(np.array([7], np.uint16), "short", with_rest=True), batch_size=2)
    with pytest.raises(ConfigError, match="max_batches"):
        evaluation_batches(two, batch_size=2, max_batches=0)
