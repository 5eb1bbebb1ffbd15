"""Packing, mixing and resuming: every example once, none beyond its row, and a stream that starts anywhere."""

import contextlib
import dataclasses
import itertools
import mmap
import time
from collections import Counter
from pathlib import Path

import grain
import numpy as np
import pytest
from small import quick_at

from surojax.data import packing, samples
from surojax.data.batches import Mixture, evaluation_batches, training_batches
from surojax.data.cache import Corpus
from surojax.data.samples import ExampleRows, Windows, check_length, concatenated, windows_or_rows
from surojax.errors import ConfigError


def lengths_like_text(count: int, sequence_len: int, seed: int = 0) -> np.ndarray:
    """Log-normal, as lengths of documents are, cut to a row."""
    drawn = np.random.default_rng(seed).lognormal(np.log(sequence_len / 6), 1.0, count)
    return np.clip(drawn.astype(np.int64), 1, sequence_len)


def free_spaces_one_by_one(lengths: np.ndarray, sequence_len: int) -> list[int]:
    """Best fit decreasing as its definition says it, in quadratic time: the free space of each row, sorted."""
    free: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [row for row in range(len(free)) if free[row] >= length]
        if fitting:
            free[min(fitting, key=lambda row: free[row])] -= length
        else:
            free.append(sequence_len - length)
    return sorted(free)


CASES = [
    ("like text", lengths_like_text(500, 64), 64),
    ("all alike", np.full(100, 10), 64),
    ("all of a row's length", np.full(7, 64), 64),
    ("short ones", np.random.default_rng(1).integers(1, 5, 300), 64),
    ("long ones", np.random.default_rng(2).integers(30, 65, 300), 64),
    ("one", np.array([3]), 64),
    ("rows of one token", np.full(5, 1), 1),
    ("each length", np.arange(1, 129), 128),
]


@pytest.mark.parametrize(("name", "lengths", "sequence_len"), CASES, ids=[case[0] for case in CASES])
def test_the_plan_is_best_fit_decreasing(name, lengths, sequence_len):
    plan = packing.best_fit(lengths, sequence_len)
    assert sorted(plan.members.tolist()) == list(range(len(lengths)))
    rows = [plan.row(r).tolist() for r in range(len(plan))]
    assert all(row == sorted(row) and row for row in rows)
    free = [sequence_len - int(lengths[row].sum()) for row in rows]
    assert sorted(free) == free_spaces_one_by_one(lengths, sequence_len) and min(free) >= 0
    again = packing.best_fit(lengths.copy(), sequence_len)
    np.testing.assert_array_equal(plan.members, again.members)
    np.testing.assert_array_equal(plan.bounds, again.bounds)


@pytest.mark.full
def test_padding_is_at_most_that_of_a_streaming_packer():
    """grain's, with 64 rows open at a time; it packs what it reads, this one all lengths."""
    lengths = lengths_like_text(4000, 128)
    source = grain.MapDataset.source([{"x": np.ones(n, np.int32)} for n in lengths]).shuffle(0).to_iter_dataset()
    packed = grain.experimental.BestFitPackIterDataset(source, length_struct={"x": 128}, num_packing_bins=64)
    theirs = sum(1 for _ in packed)
    ours = len(packing.best_fit(lengths, 128))
    assert lengths.sum() / 128 <= ours <= theirs


def test_the_plan_of_a_million_examples_takes_seconds():
    lengths = lengths_like_text(1_000_000, 2048)
    started = time.process_time()
    plan = packing.best_fit(lengths, 2048)
    assert time.process_time() - started < 10 and lengths.sum() > 0.99 * len(plan) * 2048


def test_the_plan_is_the_same_in_blocks_of_any_size(monkeypatch):
    """Spans against a loop over the examples; orders against numpy's stable sort."""
    lengths = np.random.default_rng(3).integers(0, 40, 200)
    offsets = np.cumsum([0, *lengths])
    spans = [
        (start + first, min(length - first, 16))
        for start, length in zip(offsets.tolist(), lengths.tolist(), strict=False)
        for first in range(0, length, 16)
    ]
    whole = packing.best_fit(np.array([length for _, length in spans]), 16)
    for block in (1, 7, 64):
        monkeypatch.setattr(packing, "_BLOCK", block)
        found = packing.row_pieces(offsets, 16, on_long="cut", continues=True)
        assert list(zip(found.starts.tolist(), found.lengths.tolist(), strict=True)) == spans
        assert (found.num_long, found.num_examples) == ((lengths > 16).sum(), (lengths > 0).sum())
        keys = found.lengths[::-1]
        order = packing._stable_order(keys, np.bincount(keys))
        np.testing.assert_array_equal(order, np.argsort(keys, kind="stable"))
        plan = packing.best_fit(found.lengths, 16)
        np.testing.assert_array_equal(plan.members, whole.members)
        np.testing.assert_array_equal(plan.bounds, whole.bounds)
    assert plan.members.dtype == found.lengths.dtype == np.int32


def test_long_examples_are_cut_or_dropped():
    offsets = np.array([0, 3, 3, 13, 17, 26])  # lengths 3, 0, 10, 4, 9; rows of 4
    cut = packing.row_pieces(offsets, 4, on_long="cut", continues=True)
    assert list(zip(cut.starts.tolist(), cut.lengths.tolist(), strict=True)) == [
        (0, 3), (3, 4), (7, 4), (11, 2), (13, 4), (17, 4), (21, 4), (25, 1)
    ]  # fmt: skip
    assert cut.num_long == 2
    ended = packing.row_pieces(offsets, 4, on_long="cut", continues=False)
    assert ended.starts.tolist() == [0, 3, 13, 17] and ended.lengths.tolist() == [3, 4, 4, 4] and ended.num_long == 2
    dropped = packing.row_pieces(offsets, 4, on_long="drop", continues=True)
    assert dropped.starts.tolist() == [0, 13] and dropped.lengths.tolist() == [3, 4] and dropped.num_long == 2


# --- rows ------------------------------------------------------------------------------------------------------------


def corpus_of(examples: list[list[int]], trained: list[list[int]] | None = None, name: str = "made up") -> Corpus:
    offsets = np.cumsum([0, *map(len, examples)])
    flags = None if trained is None else np.concatenate(trained).astype(np.bool_)
    tokens = np.concatenate(examples).astype(np.uint16)
    return Corpus(tokens, 0, f"{name}{tokens.tolist()}", name, offsets, flags)


def test_a_packed_row_by_hand():
    """Label: the next token of the same document, if it is trained; a document ends with no label."""
    corpus = corpus_of([[11, 12, 13], [21, 22, 23, 24]], [[0, 1, 1], [1, 0, 1, 0]])
    rows = windows_or_rows(corpus, 9, packed=True, is_text=False)
    assert len(rows) == 1
    row = {name: array.tolist() for name, array in rows[0].items()}
    assert row == {
        "inputs": [11, 12, 13, 21, 22, 23, 24, 0, 0],
        "labels": [12, 13, -1, -1, 23, -1, -1, -1, -1],
        "starts": [0, 0, 0, 3, 3, 3, 3, 7, 7],
    }
    assert all(array.dtype == np.int32 for array in rows[0].values())


def test_numbers_of_labels_by_hand():
    """Each position has the number of its label, the next token; 0 where none counts."""
    corpus = corpus_of([[11, 12, 13], [21, 22, 23, 24]], [[0, 1, 1], [1, 0, 1, 0]])
    corpus = dataclasses.replace(corpus, numbers={"value": np.float32([1, 2, 3, 4, 5, 6, 7])})
    rows = windows_or_rows(corpus, 9, packed=True, is_text=False)
    assert rows[0]["value"].dtype == np.float32
    assert rows[0]["labels"].tolist() == [12, 13, -1, -1, 23, -1, -1, -1, -1]
    assert rows[0]["value"].tolist() == [2, 3, 0, 0, 6, 0, 0, 0, 0]


def test_rows_of_one_example_by_hand():
    corpus = corpus_of([[11, 12, 13], [21, 22, 23, 24, 25]], [[0, 1, 1], [0, 0, 1, 1, 1]])
    said = []
    rows = windows_or_rows(corpus, 4, packed=False, is_text=False, say=said.append)
    assert [{k: v.tolist() for k, v in rows[i].items()} for i in range(len(rows))] == [
        {"inputs": [11, 12, 13, 0], "labels": [12, 13, -1, -1]},
        {"inputs": [21, 22, 23, 24], "labels": [-1, 23, 24, 25]},  # the label after the cut is known
    ]
    assert said[0] == "data: made up: 1 of 2 examples are longer than sequence_len=4 and are cut at their end"
    assert said[1] == "data: made up: 2 examples in 2 rows of 4 tokens, 12.5% padding"
    said.clear()
    assert len(windows_or_rows(corpus, 4, packed=False, is_text=False, on_long="drop", say=said.append)) == 1
    assert "1 of 2 examples are longer than sequence_len=4 and are left out" in said[0]
    with pytest.raises(ConfigError, match="made up: expected examples of at most sequence_len=2 tokens, got none"):
        windows_or_rows(corpus, 2, packed=True, is_text=False, on_long="drop", say=said.append)


def test_pieces_of_examples_that_were_cut_are_called_so():
    """7 + 3 tokens in rows of 4: 2 pieces and 1 whole example."""
    for on_long, expected in (("cut", "3 pieces of examples in 3 rows"), ("drop", "1 examples in 1 rows")):
        said = []
        corpus = corpus_of([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3]])
        windows_or_rows(corpus, 4, packed=True, on_long=on_long, say=said.append)
        assert said[1].startswith(f"data: made up: {expected} of 4 tokens")


def test_what_has_no_trained_token_left_after_a_cut_is_left_out():
    corpus = corpus_of([[1, 2, 3, 4, 5, 6], [1, 2, 3]], [[0, 0, 0, 0, 0, 1], [0, 1, 1]])
    said = []
    rows = windows_or_rows(corpus, 4, packed=False, is_text=False, say=said.append)
    assert len(rows) == 1 and rows[0]["inputs"].tolist() == [1, 2, 3, 0]
    assert "1 of 2 examples are longer" in said[0] and said[0].endswith("1 without a trained token are left out")


def test_the_trained_tokens_of_cut_answers_are_counted():
    """Those of an answer with a weight of 0 are not among them."""
    examples = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6], [1, 2, 3]]
    said = []
    masks = [[0, 0, 1, 1, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0], [0, 1, 1]]
    windows_or_rows(corpus_of(examples, masks), 4, packed=False, is_text=False, say=said.append)
    assert said[0].endswith("cut at their end, which leaves 2 trained tokens out")  # 6 and 8; the label 5 is kept
    windows_or_rows(corpus_of(examples), 4, packed=False, is_text=False, say=said.append)
    assert said[2].endswith("cut at their end, which leaves 4 trained tokens out")


def test_which_cut_examples_have_a_label_left(monkeypatch):
    """Counted one by one, in blocks that end anywhere."""
    rng = np.random.default_rng(4)
    examples = [rng.integers(1, 60_000, n).tolist() for n in rng.integers(1, 20, 300)]
    flags = [(rng.random(len(example)) < 0.1).astype(int).tolist() for example in examples]
    expected = [e[:8] for e, f in zip(examples, flags, strict=True) if len(e) < 8 or any(f[1:9])]
    assert 0 < len(expected) < 300
    for block in (1, 7, 1 << 20):
        monkeypatch.setattr(samples, "_BLOCK", block)
        rows = windows_or_rows(corpus_of(examples, flags), 8, packed=False, is_text=False, say=lambda _: None)
        assert [rows[i]["inputs"][: len(e)].tolist() for i, e in enumerate(expected)] == expected
        assert len(rows) == len(expected)


def test_memory_is_given_back_while_labels_are_counted(tmp_path):
    """Resident pages of mapped files, from the system: all of them are read, few at a time."""
    size = 32 << 20
    (tmp_path / "trained").write_bytes(b"\1" * size)
    (tmp_path / "tokens").write_bytes(bytes(size * 2))
    mappings = []
    for name in ("trained", "tokens"):
        with (tmp_path / name).open("rb") as file:
            mappings.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    tokens = np.frombuffer(mappings[1], np.uint16)
    offsets = np.arange(0, size + 1, 1 << 13)
    resident = []

    class Watched(Corpus):
        def release(self):
            resident.append(resident_of_files())
            super().release()

    corpus = Watched(tokens, 0, "", "", offsets, np.frombuffer(mappings[0], np.bool_), tuple(mappings))
    before = resident_of_files()
    windows_or_rows(corpus, 1 << 12, packed=True, is_text=False, say=lambda _: None)
    assert max([*resident, resident_of_files()]) - before < 8 << 20


def resident_of_files() -> int:
    """Bytes of mapped files that are resident in this process."""
    return int(Path("/proc/self/statm").read_text().split()[2]) * mmap.PAGESIZE


def test_every_token_of_packed_text_is_there_once_and_predicted_from_its_document_alone():
    """Read back from inputs, labels and starts alone."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 60_000, n).tolist() for n in lengths_like_text(300, 200, seed=3)]
    rows = windows_or_rows(corpus_of(documents), 64, packed=True, say=lambda _: None)
    found = Counter()
    predicted = Counter()
    for i in range(len(rows)):
        inputs, labels, starts = (rows[i][name].tolist() for name in ("inputs", "labels", "starts"))
        for start in sorted(set(starts)):
            here = [j for j in range(64) if starts[j] == start]
            assert here == list(range(start, start + len(here)))
            tokens = [inputs[j] for j in here]
            if tokens == [0] * len(here):
                assert all(labels[j] == -1 for j in here) and here[-1] == 63
                continue
            found[tuple(tokens)] += 1
            predicted.update((inputs[j], labels[j]) for j in here if labels[j] != -1)
    pieces = [tuple(d[i : i + 64]) for d in documents for i in range(0, len(d), 64)]
    assert found == Counter(pieces)
    assert predicted == Counter(pair for d in documents for pair in itertools.pairwise(d))


# --- order, mixtures, resuming ---------------------------------------------------------------------------------------


def numbered_rows(count: int, first: int, packed: bool = False) -> ExampleRows | Windows:
    """Samples that can be told apart: example i consists of the token `first` + i, of 3 to 7 times."""
    examples = [[first + i] * (3 + i % 5) for i in range(count)]
    return windows_or_rows(corpus_of(examples), 8, packed=packed, is_text=False, say=lambda _: None)


def stream(source, count: int, *, batch_size: int = 1, accumulation: int = 1, **options) -> list[tuple]:
    """The first `count` samples, as tuples of everything that is in them."""
    options = {"seed": 5} | options
    with contextlib.closing(
        training_batches(source, batch_size=batch_size, accumulation=accumulation, **options)
    ) as steps:
        found = []
        for batch in itertools.islice(steps, -(-count // (batch_size * accumulation))):
            flat = [batch[name].reshape(-1, 8) for name in sorted(batch)]
            found += [tuple(map(tuple, sample)) for sample in zip(*(x.tolist() for x in flat), strict=True)]
    return found[:count]


MIXTURES = {
    "one": lambda packed: Mixture([numbered_rows(23, 100, packed)]),
    "by size": lambda packed: Mixture([numbered_rows(n, 100 * n, packed) for n in (23, 11)]),
    "by weight": lambda packed: Mixture([numbered_rows(n, 100 * n, packed) for n in (23, 11, 3)], [0.5, 0.2, 0.3]),
}


@pytest.mark.parametrize(
    ("name", "packed"), quick_at([(name, packed) for name in MIXTURES for packed in (False, True)], 2, 5)
)
def test_resume_at_any_sample_with_any_batch_size(name, packed):
    make = MIXTURES[name]
    mixture = make(packed)
    whole = stream(mixture, 100)
    assert len(set(whole)) >= 10 and whole != stream(mixture, 120, seed=6)
    for start, (batch_size, accumulation) in ((0, (2, 1)), (1, (3, 2)), (22, (4, 1)), (57, (2, 3))):
        found = stream(make(packed), 40, batch_size=batch_size, accumulation=accumulation, start_sample=start)
        assert found == whole[start : start + 40]


def test_without_weights_an_epoch_has_each_sample_once():
    mixture = Mixture([numbered_rows(23, 100), numbered_rows(11, 500)])
    order = [sample[0][0] for sample in stream(mixture, 68)]
    everything = [*range(100, 123), *range(500, 511)]
    assert len(mixture) == 34 and mixture.shares() == [1, 1]
    assert sorted(order[:34]) == sorted(order[34:]) == everything and order[:34] != order[34:]
    assert {x // 500 for x in order[:17]} == {0, 1}  # shuffled together
    assert len(stream(mixture, 1000, num_epochs=2)) == 68


def test_with_weights_each_source_has_its_share_and_epochs_of_its_own():
    mixture = Mixture([numbered_rows(20, 100), numbered_rows(10, 500)], weights=[1, 3])
    order = [sample[0][0] for sample in stream(mixture, 80)]
    first, second = ([x for x in order if x // 500 == side] for side in (0, 1))
    assert (len(first), len(second)) == (20, 60)
    for start in range(0, 80, 8):
        assert 1 <= sum(x < 500 for x in order[start : start + 8]) <= 3  # spread evenly
    assert sorted(first) == list(range(100, 120))
    epochs = [second[i : i + 10] for i in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(500, 510)) for epoch in epochs) and len(set(map(tuple, epochs))) > 4
    assert mixture.shares() == [0.25 * 30 / 20, 0.75 * 30 / 10]
    assert len(stream(mixture, 1000, num_epochs=2)) == 60  # as many samples as both have


def test_the_identity_of_a_mixture_depends_on_all_that_changes_its_samples():
    def fingerprint(counts=(23, 11), weights=(1, 2), packed=False):
        return Mixture([numbered_rows(n, 100 * n, packed) for n in counts], weights).fingerprint

    found = [
        fingerprint(), fingerprint((11, 23)), fingerprint((23, 12)), fingerprint(weights=None),
        fingerprint(weights=(2, 1)), fingerprint(packed=True),
    ]  # fmt: skip
    assert len(set(found)) == len(found) and fingerprint() == found[0]


def test_a_step_needs_as_many_samples_as_it_takes():
    rows = numbered_rows(5, 100)
    check_length(rows, 5)
    with pytest.raises(ConfigError, match="made up: expected at least 6 samples for one step, got 5; add data"):
        training_batches(rows, batch_size=3, accumulation=2, seed=0)


def test_evaluation_of_packed_rows_fills_up_with_what_counts_nothing():
    samples = concatenated([numbered_rows(3, 100, True), numbered_rows(2, 500, True)], "both")
    found = list(evaluation_batches(samples, batch_size=3))
    assert {name for batch in found for name in batch} == {"inputs", "labels", "starts"}
    inputs = np.concatenate([batch["inputs"] for batch in found])
    assert Counter(inputs[inputs > 0].tolist()) == Counter({100: 3, 101: 4, 102: 5, 500: 3, 501: 4})
    labels = np.concatenate([batch["labels"] for batch in found])
    assert (labels[len(samples) :] == -1).all() and inputs[len(samples) :].sum() == 0
