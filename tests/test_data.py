"""The data pipeline: the same samples in the same order whatever the batch, the machine or the interruption."""

import contextlib
import itertools
import json
import math
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from surojax import data
from surojax.corpus import read_documents
from surojax.data import Corpus, batches, check_length, evaluation_batches, load_corpora, samples_per_epoch
from surojax.errors import ConfigError
from surojax.tokenizer import ByteTokenizer, load_tokenizer

BYTES = ByteTokenizer()
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
        "import numpy as np; from surojax.data import Corpus, batches\n"
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


# --- corpora ---------------------------------------------------------------------------------------------------------


def documents_in(corpus: Corpus) -> list[str]:
    """The texts of a byte corpus."""
    assert corpus.tokens[-1] == BYTES.eos_id
    ends = np.flatnonzero(corpus.tokens == BYTES.eos_id)
    starts = [0, *(ends[:-1] + 1)]
    return [BYTES.decode(corpus.tokens[start:end]) for start, end in zip(starts, ends, strict=True)]


def write_jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def numbered(count):
    return [f"document {i} – ünïcode 🎈\r\n" for i in range(count)]


@pytest.fixture(scope="module")
def stdlib():
    return load_corpora("stdlib", tokenizer=BYTES)


def test_stdlib_is_split_by_file(stdlib):
    train, held_out = stdlib
    assert train.tokens.dtype == held_out.tokens.dtype == np.uint16
    assert train.num_bytes > 5e6 and 0.01 < held_out.num_bytes / train.num_bytes < 0.10
    training_files, held_out_files = documents_in(train), documents_in(held_out)
    assert not set(training_files) & set(held_out_files)
    assert 0.02 < len(held_out_files) / len(training_files) < 0.10
    assert sum(len(text.encode()) for text in held_out_files) == held_out.num_bytes
    assert held_out.bytes_per_token == held_out.num_bytes / (held_out.num_bytes + len(held_out_files))
    everything = set(training_files) | set(held_out_files)
    with open(json.__file__, encoding="utf-8") as file:
        assert file.read() in everything
    with open(pytest.__file__, encoding="utf-8") as file:  # site-packages
        assert file.read() not in everything


def test_stdlib_split_depends_on_the_relative_path_alone(tmp_path, monkeypatch):
    """Another machine, another prefix, another Python with more files: a file stays on its side."""
    keys = {}
    for root, text in ((tmp_path / "usr", "one"), (tmp_path / "opt", "two")):
        monkeypatch.setattr("sysconfig.get_paths", lambda root=root: {"stdlib": str(root)})
        for name in ("os.py", "json/tool.py", "test/test_os.py", "site-packages/numpy.py", "json/tests/test_tool.py"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(f"{name} {text}")
        (root / "latin1.py").write_bytes(b"# \xe9")
        keys[root] = {document.text.split()[0]: document.key for document in read_documents("stdlib", "text")}
    first, second = keys.values()
    assert first == second == {"json/tool.py": 0xE8D19BDBC7AD60E3, "os.py": 0xF19DB6A54FEDE009}

    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path / "nothing")})
    assert "stdlib" in error_of("stdlib")


def test_corpora_are_the_same_every_time(tmp_path, stdlib):
    path = write_jsonl(tmp_path / "a.jsonl", numbered(500))
    for first, second in zip(
        load_corpora(str(path), tokenizer=BYTES), load_corpora(str(path), tokenizer=BYTES), strict=True
    ):
        assert first.fingerprint == second.fingerprint and len(first.fingerprint) == 16
        np.testing.assert_array_equal(first.tokens, second.tokens)
    assert len({corpus.fingerprint for corpus in (*stdlib, *load_corpora(str(path), tokenizer=BYTES))}) == 4


def test_held_out_documents_do_not_depend_on_order_or_company(tmp_path):
    texts = numbered(2000)
    train, held_out = load_corpora(str(write_jsonl(tmp_path / "a.jsonl", texts)), tokenizer=BYTES)
    assert sorted(documents_in(train) + documents_in(held_out)) == sorted(texts)
    assert not set(documents_in(train)) & set(documents_in(held_out))
    assert 5 <= len(documents_in(held_out)) <= 50  # 1 % of 2000, and it is always the same number

    mixed = [*texts, *(f"other {i}" for i in range(500)), *texts[:100]]
    random.Random(0).shuffle(mixed)
    train_2, held_out_2 = load_corpora(str(write_jsonl(tmp_path / "b.jsonl", mixed)), tokenizer=BYTES)
    assert set(documents_in(held_out)) == set(documents_in(held_out_2)) & set(texts)
    assert not set(documents_in(train_2)) & set(documents_in(held_out_2))  # copies stay on one side


@pytest.mark.parametrize("count", [2, 3, 10])
def test_few_documents_hold_out_exactly_one(tmp_path, count):
    texts = numbered(count)
    train, held_out = load_corpora(str(write_jsonl(tmp_path / "a.jsonl", texts)), tokenizer=BYTES)
    assert sorted(documents_in(train) + documents_in(held_out)) == sorted(texts)
    assert len(documents_in(held_out)) == 1


def test_one_document_holds_out_its_end(tmp_path):
    path = tmp_path / "a.txt"
    lines = [f"line {i} é\r\n" for i in range(1000)]
    path.write_bytes("".join(lines).encode())
    train, held_out = load_corpora(str(path), tokenizer=BYTES)
    (beginning,), (end,) = documents_in(train), documents_in(held_out)
    assert beginning + end == "".join(lines) and end.startswith("line ")
    assert 0.045 < len(end) / len(beginning + end) < 0.055
    assert train.num_bytes + held_out.num_bytes == path.stat().st_size

    path.write_text("é" * 1000, encoding="utf-8")  # no line end near: cut between characters
    train, held_out = load_corpora(str(path), tokenizer=BYTES)
    assert documents_in(train) == ["é" * 950] and documents_in(held_out) == ["é" * 50]


def test_sources(tmp_path):
    (tmp_path / "sub" / ".cache").mkdir(parents=True)
    (tmp_path / "sub" / "b.txt").write_text("bee")
    (tmp_path / "sub" / ".cache" / "hidden.txt").write_text("hidden")
    (tmp_path / "sub" / "README.md").write_text("not data")
    (tmp_path / "a.TXT").write_bytes(b"\xef\xbb\xbfay")  # with byte order mark
    write_jsonl(tmp_path / "c.jsonl", ["sea", "see"], field="content")
    with (tmp_path / "c.jsonl").open("a") as file:
        file.write("\n  \n")

    def texts(source):
        return [document.text for document in read_documents(source, "content")]

    assert texts(f"{tmp_path}") == ["ay", "sea", "see", "bee"]
    assert texts(f"{tmp_path}/sub/b.txt, {tmp_path}/a.TXT") == ["ay", "bee"]
    assert texts(f"{tmp_path}/**/*.txt") == ["bee"]
    assert texts(f"{tmp_path}/su*") == ["bee"]
    assert texts(f"{tmp_path}/a.TXT,{tmp_path}/?.TXT") == ["ay"]  # each file once


def test_eval_source_leaves_the_training_text_whole(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", numbered(300))
    (tmp_path / "eval.txt").write_text("held out by hand")
    train, evaluation = load_corpora(str(path), eval_source=str(tmp_path / "eval.txt"), tokenizer=BYTES)
    assert documents_in(train) == numbered(300) and documents_in(evaluation) == ["held out by hand"]


def test_tokenizer_json_corpus_in_groups_and_pieces(tmp_path, monkeypatch):
    """Grouping documents for speed and cutting long ones for memory leave the text, the order and the eos in place."""
    from test_tokenizer import save_bpe

    tokenizer = load_tokenizer(str(save_bpe(tmp_path / "tokenizer.json")))
    texts = [f"the cat {i} sat\non the mat {'x' * (i % 50)}\n" * 3 for i in range(60)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "eval.txt").write_text("the dog")
    whole, _ = load_corpora(str(path), eval_source=str(tmp_path / "eval.txt"), tokenizer=tokenizer)
    expected = np.concatenate([np.append(tokenizer.encode(text), tokenizer.eos_id) for text in texts])
    np.testing.assert_array_equal(whole.tokens, expected)
    assert whole.num_bytes == sum(map(len, texts)) and whole.bytes_per_token > 1.2

    monkeypatch.setattr(data, "_PIECE_CHARS", 40)
    monkeypatch.setattr(data, "_GROUP_CHARS", 500)
    cut, _ = load_corpora(str(path), eval_source=str(tmp_path / "eval.txt"), tokenizer=tokenizer)
    ends = np.flatnonzero(cut.tokens == tokenizer.eos_id)
    decoded = [tokenizer.decode(part) for part in np.split(cut.tokens, ends[:-1] + 1)]
    assert decoded == texts


def test_large_vocabulary_gets_wider_tokens(tmp_path):
    class Wide(ByteTokenizer):
        vocab_size = 2**16 + 1
        eos_id = 2**16

    (tmp_path / "a.txt").write_text("some text " * 100)
    train, _ = load_corpora(str(tmp_path / "a.txt"), tokenizer=Wide())
    assert train.tokens.dtype == np.uint32 and train.tokens[-1] == 2**16


# --- errors ----------------------------------------------------------------------------------------------------------


def error_of(source, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        load_corpora(str(source), tokenizer=BYTES, **options)
    message = str(caught.value)
    assert "\n" not in message and "expected" in message and "got" in message and ";" in message
    return message


def test_errors_of_sources(tmp_path):
    assert "nowhere.txt: expected a file" in error_of(tmp_path / "nowhere.txt")
    assert "*.txt" in error_of(tmp_path / "*.txt")
    assert ".jsonl or .txt" in error_of(tmp_path)  # an empty folder
    assert "empty one" in error_of("")
    (tmp_path / "a.csv").write_text("a,b")
    unsupported = error_of(tmp_path / "a.csv")
    assert "a.csv" in unsupported and ".jsonl or .txt" in unsupported and "'.csv'" in unsupported
    (tmp_path / "a.txt").write_text("fine " * 100)
    assert "empty one" in error_of(f"{tmp_path}/a.txt,")
    assert "nowhere" in error_of(tmp_path / "a.txt", eval_source=str(tmp_path / "nowhere"))


def test_errors_of_txt_files(tmp_path):
    path = tmp_path / "a.txt"
    for empty in ("", " \n\t\n"):
        path.write_text(empty)
        assert "a.txt: expected text, got an empty file" in error_of(path)
    path.write_bytes("line one\nzwei ü\nthr".encode() + b"\xffee\n")
    message = error_of(path)
    assert "a.txt:3: expected UTF-8" in message and "0xff at byte offset 20" in message
    path.write_text("x")
    assert "two different documents" in error_of(path)


JSON_ERRORS = {
    '{"text": "unclosed': "no JSON",
    '["text"]': "got a list",
    '{"txt": "a", "id": 1}': "got 'txt', 'id'",
    "{}": "got no fields",
    '{"text": 5}': "as a string, got a int",
    '{"text": null}': "as a string, got a NoneType",
    '{"text": ""}': "got an empty one",
    '{"text": "half \\ud83d"}': "surrogate pair (\\ud83d)",
    "[" * 100_000: "no JSON",
}


@pytest.mark.parametrize("line", JSON_ERRORS, ids=map(str, range(len(JSON_ERRORS))))
def test_errors_of_jsonl_lines(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    message = error_of(path)
    assert "a.jsonl:3: expected" in message and JSON_ERRORS[line] in message and "'text'" in message


def test_errors_of_jsonl_files(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n")
    assert "got an empty file" in error_of(path)
    path.write_bytes(b'{"text": "fine"}\n{"text": "\xe9"}\n')
    message = error_of(path)
    assert "a.jsonl:2: expected UTF-8" in message and "0xe9 at byte offset 27" in message
    write_jsonl(path, ["the same"] * 5)
    assert "two different documents" in error_of(path)
    write_jsonl(path, ["a", "b"], field="body")
    assert "'body'" in error_of(path)
    assert "expected" in error_of(path, text_field="missing")
