"""Documents from files to tokens: the same corpus on every machine, and one-line errors that name file and line."""

import json
import random

import numpy as np
import pytest

from surojax.data import cache_writer, texts
from surojax.data.cache import Corpus
from surojax.data.corpus import source
from surojax.data.prepare import load_corpora
from surojax.data.tokenizer import ByteTokenizer, load_tokenizer
from surojax.errors import ConfigError

BYTES = ByteTokenizer()


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
    assert len(held_out.tokens) == held_out.num_bytes + len(held_out_files)
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
        keys[root] = {item.content.split()[0]: item.key for item in source("stdlib", "text").items(True)}
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


def test_sources(tmp_path, monkeypatch):
    (tmp_path / "sub" / ".cache").mkdir(parents=True)
    (tmp_path / "sub" / "b.txt").write_text("bee")
    (tmp_path / "sub" / ".cache" / "hidden.txt").write_text("hidden")
    (tmp_path / "sub" / "README.md").write_text("not data")
    (tmp_path / "a.TXT").write_bytes(b"\xef\xbb\xbfay")  # with byte order mark
    write_jsonl(tmp_path / "c.jsonl", ["sea", "see"], field="content")
    with (tmp_path / "c.jsonl").open("a") as file:
        file.write("\n  \n")

    def read(name):
        return ["".join(texts.text_parts(item.content)) for item in source(name, "content").items(True)]

    assert read(f"{tmp_path}") == ["ay", "sea", "see", "bee"]
    assert read(f"{tmp_path}/sub/b.txt, {tmp_path}/a.TXT") == ["ay", "bee"]
    assert read(f"{tmp_path}/**/*.txt") == ["bee"]
    assert read(f"{tmp_path}/su*") == ["bee"]
    assert read(f"{tmp_path}/a.TXT,{tmp_path}/?.TXT") == ["ay"]  # each file once
    monkeypatch.chdir(tmp_path / "sub")
    (tmp_path / "link.txt").symlink_to(tmp_path / "sub" / "b.txt")
    assert sorted(read(f"b.txt, ./b.txt, ../sub/b.txt, {tmp_path}/link.txt, ../a.TXT")) == ["ay", "bee"]


def test_eval_source_leaves_the_training_text_whole(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", numbered(300))
    (tmp_path / "eval.txt").write_text("held out by hand")
    train, evaluation = load_corpora(str(path), eval_source=str(tmp_path / "eval.txt"), tokenizer=BYTES)
    assert documents_in(train) == numbered(300) and documents_in(evaluation) == ["held out by hand"]


def test_tokenizer_json_corpus_in_groups_and_pieces(tmp_path, monkeypatch):
    """Grouping documents for speed and cutting long ones for memory leave the text, the order and the eos in place."""
    from test_tokenizer import save_bpe

    tokenizer = load_tokenizer(str(save_bpe(tmp_path / "tokenizer.json")))
    given = [f"the cat {i} sat\non the mat {'x' * (i % 50)}\n" * 3 for i in range(60)]
    path = write_jsonl(tmp_path / "a.jsonl", given)
    (tmp_path / "eval.txt").write_text("the dog")
    whole, _ = load_corpora(str(path), eval_source=str(tmp_path / "eval.txt"), tokenizer=tokenizer)
    expected = np.concatenate([np.append(tokenizer.encode(text), tokenizer.eos_id) for text in given])
    np.testing.assert_array_equal(whole.tokens, expected)
    assert whole.num_bytes == sum(map(len, given)) > 1.2 * len(whole.tokens)

    monkeypatch.setattr(texts, "PIECE_CHARS", 40)
    monkeypatch.setattr(cache_writer, "_GROUP_BYTES", 500)
    cut, _ = load_corpora(str(path), eval_source=str(tmp_path / "eval.txt"), tokenizer=tokenizer)
    ends = np.flatnonzero(cut.tokens == tokenizer.eos_id)
    decoded = [tokenizer.decode(part) for part in np.split(cut.tokens, ends[:-1] + 1)]
    assert decoded == given


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
        assert "got none, 0 skipped, 1 without text" in error_of(path)
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
    '{"text": "half \\ud83d"}': "surrogate pair (\\ud83d)",
    "[" * 100_000: "no JSON",
}


@pytest.mark.parametrize("line", JSON_ERRORS, ids=map(str, range(len(JSON_ERRORS))))
def test_errors_of_jsonl_lines(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    message = error_of(path)
    assert "a.jsonl:3: expected" in message and JSON_ERRORS[line] in message


def test_errors_of_jsonl_files(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n")
    assert "expected documents that can be used, got none" in error_of(path)
    path.write_bytes(b'{"text": "fine"}\n{"text": "\xe9"}\n')
    message = error_of(path)
    assert "a.jsonl:2: expected UTF-8" in message and "0xe9 at byte offset 27" in message
    write_jsonl(path, ["the same"] * 5)
    assert "two different documents" in error_of(path)
    write_jsonl(path, ["a", "b"], field="body")
    assert "'body'" in error_of(path)
    assert "expected" in error_of(path, text_field="missing")
