"""Plain text of any size: a file that is read in parts has the tokens of its text at once, in little memory."""

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_examples import TOKENIZERS

from surojax.data import texts
from surojax.data.cache import Corpus
from surojax.data.data_rows import BadRow, BlankRow, DataRow
from surojax.data.documents import TextEncoder, read_documents
from surojax.data.items import Item, Unit
from surojax.data.prepare import load_corpora
from surojax.data.run_data import Settings, load_data, parse_entries
from surojax.data.texts import TextPiece, open_text, split, text_parts, text_pieces
from surojax.data.tokenizer import ByteTokenizer
from surojax.errors import ConfigError

BYTES = ByteTokenizer()
WORDS = (
    "the cat",
    " ",
    "\n",
    "\n\n",
    "\r\n",
    "<|im_end|>",
    "<s>",
    "ü👋🏽",
    "is it",
    "<|im_",
    "end|>",
    "\x00",
    "\u2028",
    "é",
)


def random_text(seed: int, count: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) for _ in range(count)) + "x"


def item_of(row, by_record=True, with_keys=True) -> Item:
    (item,) = read_documents([row], "text", by_record=by_record, with_keys=with_keys)
    return item


def tokens_of(text, encoder: TextEncoder) -> list[int]:
    (item,) = read_documents([DataRow({"text": text}, "1")], "text", by_record=True, with_keys=False)
    units = list(encoder.units(item))
    assert [unit.is_last for unit in units] == [False] * (len(units) - 1) + [True]
    assert sum(unit.num_bytes for unit in units) == item.num_bytes
    return np.concatenate([x.ids for x in encoder.encode([unit.content for unit in units])]).tolist()


@pytest.fixture
def small_parts(monkeypatch):
    """Files are read three bytes at a time, and tokenised in pieces of 60 characters."""
    monkeypatch.setattr(texts, "READ", 3)
    monkeypatch.setattr(texts, "PIECE_CHARS", 60)


# -- Files in parts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "bom"])
def test_a_file_is_its_text(tmp_path, small_parts, mark):
    path = tmp_path / "a.txt"
    for seed, count in enumerate((0, 1, 40, 400)):
        text = random_text(seed, count)
        path.write_bytes(mark + text.encode())
        file = open_text(path)
        assert "".join(text_parts(file)) == "".join(text_parts(text)) == text
        length = len(text)
        middle = text.rfind("\n", int(length * 0.9), int(length * 0.95)) + 1 or int(length * 0.95)
        assert split(text) == (text[:middle], text[middle:])
        assert ["".join(text_parts(part)) for part in split(file)] == [text[:middle], text[middle:]]
        for section_starts in (None, TOKENIZERS["byte_level"].section_starts):
            assert list(text_pieces(file, section_starts)) == list(text_pieces(text, section_starts))


def test_keys_are_hashes_of_the_text_or_the_record(tmp_path, small_parts):
    text = random_text(1, 90)
    (tmp_path / "a.txt").write_text(text, newline="")
    hashed = lambda content: int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "big")
    for value in (text, open_text(tmp_path / "a.txt")):
        row = DataRow({"text": value}, "a.txt")
        assert item_of(row, by_record=False) == Item(value, hashed(text), len(text.encode()))
        assert item_of(row) == Item(value, hashed(json.dumps({"text": text})), len(text.encode()))
    both = {"text": text, "id": [1, None]}
    assert item_of(DataRow(both, "1")).key == hashed(json.dumps(both, sort_keys=True))
    assert item_of(DataRow({"text": text}, "1"), with_keys=False).key == 0


def test_bytes_that_are_no_text_are_named_by_their_line(tmp_path, small_parts):
    path = tmp_path / "a.txt"
    for content, line, byte, offset in (
        (b"one\nzwei \xfc and more", 2, 0xFC, 9),
        (b"\xef\xbb\xbf\n\nabcdef\xe2\x82", 3, 0xE2, 11),  # a character that is cut off
        (b"\n" * 7 + b"\x80x", 8, 0x80, 7),
    ):
        path.write_bytes(content)
        bad = item_of(DataRow({"text": open_text(path)}, str(path))).content
        assert isinstance(bad, BadRow) and bad.where == f"{path}:{line}"
        assert bad.reason.startswith(f"expected UTF-8 text, got the byte 0x{byte:02x} at byte offset {offset};")


def test_a_file_that_is_cut_off_while_it_is_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text " * 9)
    file = open_text(path)
    path.write_text("text")
    with pytest.raises(ConfigError, match=r"a\.txt: expected 45 bytes until it is read, got 4; start again"):
        list(text_parts(file))
    path.unlink()
    with pytest.raises(ConfigError, match=r"a\.txt: expected a readable file"):
        list(text_parts(file))


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        ("text".encode("utf-16"), "iconv -f utf-16"),
        (b"\x1f\x8b\x08", "end in .gz, or decompress"),
        (b"ab\xff\xfe", "iconv -f latin1"),
    ],
)
def test_what_a_file_seems_to_be_decides_the_advice(tmp_path, content, advice):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    bad = item_of(DataRow({"text": open_text(path)}, str(path))).content
    assert isinstance(bad, BadRow) and advice in bad.reason


@pytest.mark.parametrize("content", [b"", b" \n\t\n", b"\xef\xbb\xbf \r\n"])
def test_a_file_without_text(tmp_path, content):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert item_of(DataRow({"text": open_text(path)}, str(path))) == BlankRow(str(path))


@pytest.mark.parametrize("content", ["a" + " " * 9, " " * 9 + "a", "    a    ", "\n" * 9])
def test_a_file_has_text_if_any_part_of_it_has(tmp_path, monkeypatch, content):
    monkeypatch.setattr(texts, "READ", 4)
    path = tmp_path / "a.txt"
    path.write_text(content)
    found = item_of(DataRow({"text": open_text(path)}, str(path)))
    assert isinstance(found, BlankRow) == (not content.strip())


@pytest.mark.parametrize("text", ["", " \n", "\u3000\u2028", None])
def test_a_row_without_text(text):
    assert item_of(DataRow({"text": text}, "a.jsonl:7")) == BlankRow("a.jsonl:7")


BAD_TEXTS = [
    ({"body": "a", "id": 1}, "the text in 'text', got 'body', 'id'; set text_field"),
    ({"text": 5}, "as a string, got a int"),
    ({"text": "half \ud83d"}, "half a surrogate pair (\\ud83d)"),
]


@pytest.mark.parametrize("record, said", BAD_TEXTS, ids=map(str, range(len(BAD_TEXTS))))
def test_bad_texts(record, said):
    bad = item_of(DataRow(record, "a.jsonl:7")).content
    assert isinstance(bad, BadRow) and bad.where == "a.jsonl:7" and said in bad.reason


# -- Tokens -----------------------------------------------------------------------------------------------------------


def test_a_text_is_a_document():
    assert tokens_of("a ü", TextEncoder(BYTES, True)) == [*"a ü".encode(), 256]
    tokenizer = TOKENIZERS["metaspace"]  # it adds bos itself
    assert tokens_of("the cat", TextEncoder(tokenizer, True)) == [1, *tokenizer.encode("the cat"), 2]
    assert not TOKENIZERS["byte_level"].adds_bos


def test_bad_rows_are_passed_on_in_their_place():
    bad = BadRow("1", "expected more")
    (unit,) = TextEncoder(BYTES, True).units(Item(bad, 0, 0))
    assert unit == Unit(bad, 0, True)
    found = TextEncoder(BYTES, True).encode([TextPiece("a", True, True), bad, TextPiece("b", False, False)])
    assert found[1] is bad and [x.ids.tolist() for x in found[::2]] == [[97, 256], [98]]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_long_texts_are_cut_where_no_token_changes(tmp_path, monkeypatch, name):
    """At special tokens the ids are those of the whole; else pieces end with a line, or where they have to."""
    tokenizer = TOKENIZERS[name]
    text = "".join(f"the cat {i} sat\non the mat<s>{'x' * (i % 40)}\n" for i in range(40))
    whole = tokens_of(text, TextEncoder(tokenizer, True))
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(texts, "PIECE_CHARS", 80)
    assert tokens_of(text, TextEncoder(tokenizer, True)) == whole
    assert tokens_of(open_text(tmp_path / "a.txt"), TextEncoder(tokenizer, True)) == whole
    at_lines = [piece.text for piece in text_pieces(text + "y" * 200)]
    assert "".join(at_lines) == text + "y" * 200 and max(map(len, at_lines)) == 80
    assert all(piece.endswith("\n") for piece in at_lines[:-3]) and len(at_lines) > 10
    assert not any(piece.endswith("\n") for piece in at_lines[-3:])


def test_both_ways_to_name_a_file_give_its_tokens(tmp_path, small_parts):
    text = random_text(3, 500)
    (tmp_path / "a.txt").write_bytes(text.encode())
    settings = Settings(8, data_cache=str(tmp_path / "cache"), eval_batches=1)
    dataset = load_data(
        parse_entries([{"path": str(tmp_path / "a.txt")}], ()), settings, BYTES, eval_batch_size=1, say=lambda _: None
    )
    train, held_out = load_corpora(str(tmp_path / "a.txt"), tokenizer=BYTES, data_cache=str(tmp_path / "cache"))
    first, second = split(text)
    for corpora in ((train, held_out), (dataset.train.sources[0].corpus, dataset.held_out)):  # type: ignore[attr-defined]
        for corpus, expected in zip(corpora, (first, second), strict=True):
            assert isinstance(corpus, Corpus) and corpus.tokens.tolist() == [*str(expected).encode(), 256]
            assert corpus.num_bytes == len(str(expected).encode()) and corpus.num_examples == 1


# -- Memory -----------------------------------------------------------------------------------------------------------

PEAK = """
import contextlib, re, sys
from pathlib import Path
from surojax.data.batches import training_batches
from surojax.data.run_data import Settings, load_data, parse_entries
from surojax.data.tokenizer import ByteTokenizer
from surojax.errors import ConfigError

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**10  # MiB

kind, *files = sys.argv[1:]
for file in files:  # the first one fills each queue: what the second takes beyond it grows with its length
    before = peak()
    entries = parse_entries([{"path": file}] if kind == "datasets" else [], [])
    settings = Settings(8192, data=file, data_cache=file + ".cache", eval_batches=2, sample_packing=kind == "datasets")
    found = load_data(entries, settings, ByteTokenizer(), eval_batch_size=2, say=lambda _: None)
    batches = training_batches(found.train, batch_size=8, accumulation=1, seed=0, num_epochs=1)
    with contextlib.closing(batches) as stream:
        count = sum(batch["inputs"].size for batch in stream)
print(peak() - before, count)
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's peak memory of a process")
@pytest.mark.parametrize(
    "kind, line",
    [
        pytest.param("data", "\n", id="data"),
        pytest.param("datasets", " ", id="datasets-one-line", marks=pytest.mark.full),
    ],
)
def test_a_large_text_file_takes_no_more_memory_than_a_small_one(tmp_path, kind, line):
    """Through the tokenizer and an epoch of training. All at once, 94 MB took 270 MiB by data, 1.4 GB by datasets."""
    block = "".join(f"some words {i} of no meaning,{line}" for i in range(40_000))
    for name, size in (("small.txt", 12), ("large.txt", 48)):
        with (tmp_path / name).open("w") as file:
            for _ in range(size * 10**6 // len(block) + 1):
                file.write(block)
    command = [sys.executable, "-c", PEAK, kind, str(tmp_path / "small.txt"), str(tmp_path / "large.txt")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr
    added, tokens = map(float, found.stdout.split())
    assert tokens > 44e6 and added < 36, found.stdout  # the text read at once takes 36 MB by itself
