"""Tokenised once: found again by all it depends on, and whole whatever ended the process that wrote it."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from small import quick_at

from surojax.data import cache, cache_writer, corpus as sources, entries as entries_module, texts
from surojax.data.cache import Corpus, PartWriter, cached
from surojax.data.prepare import load_corpora
from surojax.data.tokenizer import ByteTokenizer
from surojax.errors import ConfigError

BYTES = ByteTokenizer()


@pytest.fixture
def source(tmp_path) -> Path:
    """Forty documents of a kilobyte."""
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i} " + "abc " * 250}) + "\n" for i in range(40)))
    return path


def expected_tokens(source: Path) -> list[int]:
    """Every document's bytes and 256, in the order of the file."""
    texts = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    return [token for text in texts for token in [*text.encode(), 256]]


def load(source: Path, folder: Path, tokenizer=BYTES, **options) -> tuple[Corpus, list[str]]:
    """The corpus without anything held out, and what was said."""
    said = []
    corpus, _ = load_corpora(
        str(source), eval_source=str(source), tokenizer=tokenizer, data_cache=str(folder), say=said.append, **options
    )
    return corpus, said


def entries(folder: Path) -> set[str]:
    """Names in the cache, without locks."""
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def test_it_is_found_again_without_reading(source, tmp_path, monkeypatch):
    first, said = load(source, tmp_path / "cache")
    assert first.tokens.tolist() == expected_tokens(source) and first.num_examples == 40
    assert first.offsets is not None and np.diff(first.offsets).sum() == len(first.tokens) and first.trained is None
    assert [line.partition(" the cache ")[0] for line in said] == [
        f"data: {len(first.tokens):,} tokens into", f"data: {len(first.tokens):,} tokens from"
    ]  # fmt: skip
    monkeypatch.setattr(sources, "read_file", lambda *_: pytest.fail("read again"))
    started = time.perf_counter()
    second, said = load(source, tmp_path / "cache")
    assert time.perf_counter() - started < 1
    assert said[0].endswith(str(tmp_path / "cache" / next(iter(entries(tmp_path / "cache")))))
    np.testing.assert_array_equal(first.tokens, second.tokens)
    assert (first.fingerprint, first.num_bytes, first.name) == (second.fingerprint, second.num_bytes, second.name)
    with pytest.raises(ValueError, match="read-only"):
        second.tokens[0] = 0


def test_the_fingerprint_tells_where_examples_end_and_what_is_trained(tmp_path):
    """Of the same ten tokens. Where all are trained, documents end with a token of their own."""

    def fingerprint(ends, trained) -> str:
        writer = PartWriter(tmp_path / f"{len(list(tmp_path.iterdir()))}", np.uint16)
        writer.append(np.arange(10), np.isin(np.arange(10), trained), ends=np.array(ends))
        return writer.finish()["fingerprint"]

    found = [fingerprint((4, 10), (3, 9)), fingerprint((6, 10), (3, 9)), fingerprint((4, 10), (3, 8))]
    assert len(set(found)) == 3 and fingerprint((4, 10), (3, 9)) == found[0]


def test_a_document_begins_with_bos_if_the_tokenizer_adds_it(source, tmp_path, monkeypatch):
    class WithBos(ByteTokenizer):
        vocab_size = 258
        bos_id = 257
        adds_bos = True

    monkeypatch.setattr(texts, "PIECE_CHARS", 100)  # ten pieces a document, and one token at its beginning
    folder = tmp_path / "cache"
    without, _ = load(source, folder)
    corpus, _ = load(source, folder, tokenizer=WithBos())
    expected = expected_tokens(source)
    assert without.tokens.tolist() == expected
    assert corpus.tokens.tolist() == [257, *(new for t in expected for new in ([256, 257] if t == 256 else [t]))][:-1]
    assert corpus.num_examples == 40 and corpus.num_bytes == without.num_bytes


def test_it_depends_on_all_that_changes_tokens(source, tmp_path, monkeypatch):
    class Other(ByteTokenizer):
        name = "other"

    folder = tmp_path / "cache"
    load(source, folder)
    assert len(entries(folder)) == 1
    load(source, folder, tokenizer=Other())
    assert len(entries(folder)) == 2
    renamed = tmp_path / "renamed.jsonl"
    renamed.write_text(source.read_text())
    load(renamed, folder)
    assert len(entries(folder)) == 3
    stat = source.stat()
    source.write_text(source.read_text().replace("abc", "xyz"))
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))  # as soon after as a clock can tell
    changed, _ = load(source, folder)
    assert len(entries(folder)) == 4 and changed.tokens.tolist() == expected_tokens(source)
    load_corpora(str(source), tokenizer=BYTES, data_cache=str(folder))  # a part of it held out
    assert len(entries(folder)) == 5
    monkeypatch.setattr(cache, "FORMAT", 99)
    load(source, folder)
    assert len(entries(folder)) == 6


@pytest.mark.parametrize("file", ["tokens.bin", "offsets.bin"])
def test_an_entry_that_is_not_whole_is_written_anew(source, tmp_path, file):
    folder = tmp_path / "cache"
    load(source, folder)
    (entry,) = folder.glob("*/train")
    with (entry / file).open("r+b") as damaged:
        damaged.truncate(100)
    again, said = load(source, folder)
    assert "is damaged" in said[0] and "into" in said[1] and again.tokens.tolist() == expected_tokens(source)


def changed_meta(entry: Path, change) -> None:
    """Changes the meta data as a program would that writes them whole, with their digest."""
    meta = json.loads((entry / "meta.json").read_text())
    change(meta)
    meta.pop("digest", None)
    (entry / "meta.json").write_text(json.dumps(meta | {"digest": entries_module.meta_digest(meta)}))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x80
    path.write_bytes(content)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "a token": lambda entry: flip(entry / "train" / "tokens.bin"),
    "a token, with the old time": lambda entry: with_old_time(entry / "train" / "tokens.bin"),
    "an offset": lambda entry: flip(entry / "train" / "offsets.bin"),
    "the meta data": lambda entry: flip(entry / "meta.json"),
    "a number in them": lambda entry: (entry / "meta.json").write_text(
        (entry / "meta.json").read_text().replace('"examples": 40', '"examples": 41')
    ),
    "their size": lambda entry: (entry / "meta.json").write_text("{}" + " " * (17 << 20)),
    "their depth": lambda entry: (entry / "meta.json").write_text("[" * 100_000),
    "their digits": lambda entry: (entry / "meta.json").write_text("1" * 5000),
    "a list": lambda entry: (entry / "meta.json").write_text("[]"),
    "latin letters": lambda entry: (entry / "meta.json").write_bytes(b'{"parts": "\xe9"}'),
    "parts": lambda entry: changed_meta(entry, lambda meta: meta.update(parts=[1])),
    "no parts": lambda entry: changed_meta(entry, lambda meta: meta.update(parts={})),
    "sizes": lambda entry: changed_meta(entry, lambda meta: meta["parts"]["train"].update(sizes={"tokens": None})),
    "a dtype": lambda entry: changed_meta(entry, lambda meta: meta["parts"]["train"].update(dtype="O")),
    "pipes": lambda entry: replace_by_pipe(entry / "meta.json"),
    "a pipe of tokens": lambda entry: replace_by_pipe(entry / "train" / "tokens.bin"),
    "a folder of tokens": lambda entry: (
        (entry / "train" / "tokens.bin").unlink(),
        (entry / "train" / "tokens.bin").mkdir(),
    ),
    "a file": lambda entry: (shutil.rmtree(entry), entry.write_text("")),
}


def with_old_time(path: Path) -> None:
    status = path.stat()
    flip(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_written_anew(source, tmp_path, damage):
    folder = tmp_path / "cache"
    load(source, folder)
    (name,) = entries(folder)
    DAMAGE[damage](folder / name)
    again, said = load(source, folder)
    assert again.tokens.tolist() == expected_tokens(source) and again.offsets is not None
    assert "is damaged" in said[0] and said[0].endswith("and is written anew") and "into" in said[1]
    assert "from" in load(source, folder)[1][0] and entries(folder) == {name}


def test_files_are_hashed_again_only_if_their_times_differ(source, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    load(source, folder)
    (entry,) = folder.glob("*/train")
    hashed = []
    digest = entries_module._digest
    monkeypatch.setattr(entries_module, "_digest", lambda content: hashed.append(len(content)) or digest(content))
    load(source, folder)
    assert not hashed
    os.utime(entry / "tokens.bin")
    for _ in range(2):
        assert "from" in load(source, folder)[1][0]
    assert hashed == [(entry / "tokens.bin").stat().st_size]
    (entry.parent / "checked.json").write_text("[" * 1000)
    load(source, folder)
    assert len(hashed) == 3


def test_parts_with_tokens_that_are_not_trained(tmp_path):
    """The first example is trained as a whole, and it is not known yet that another one is not."""

    def write(folder: Path) -> dict:
        part = PartWriter(folder / "train", np.uint16)
        for ids, trained in (([1, 2, 3], None), ([4, 5], [False, True]), ([6], None)):
            flags = None if trained is None else np.array(trained)
            part.append(np.array(ids), flags, ends=np.array([len(ids)]))
        return {"parts": {"train": part.finish()}}

    entry = cached(tmp_path, {"a": 1}, write, name="x")
    corpus = entry.corpora["train"]
    assert corpus.tokens.tolist() == [1, 2, 3, 4, 5, 6] and corpus.bounds.tolist() == [0, 3, 5, 6]
    assert corpus.trained is not None and corpus.trained.tolist() == [True, True, True, False, True, True]
    assert not entry.reused and cached(tmp_path, {"a": 1}, write, name="x").reused
    corpus.release()  # what is mapped is read again
    assert corpus.tokens.tolist() == [1, 2, 3, 4, 5, 6]


# --- ended in the middle ---------------------------------------------------------------------------------------------

LOAD = """
import errno, fcntl, os, signal, sys, time
from surojax.data import cache_writer
from surojax.data.cache import PartWriter
from surojax.data.prepare import load_corpora
from surojax.data.tokenizer import ByteTokenizer

cache_writer._GROUP_BYTES = 1  # one document is written at a time
plain = PartWriter.append
def append(self, *args, **keywords):
    plain(self, *args, **keywords)
    if self.num_examples == 20:
        {moment}
PartWriter.append = append
def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")

source, folder, locks = sys.argv[1:]
if not int(locks):
    fcntl.flock = no_locks
load_corpora(source, eval_source=source, tokenizer=ByteTokenizer(), data_cache=folder)
"""


def command(moment: str, source: Path, folder: Path, locks: bool = True) -> list[str]:
    return [sys.executable, "-u", "-c", LOAD.format(moment=moment), str(source), str(folder), str(int(locks))]


def test_a_kill_leaves_nothing_that_is_used_and_the_next_run_cleans_up(source, tmp_path):
    folder = tmp_path / "cache"
    killed = subprocess.run(command("os.kill(os.getpid(), signal.SIGKILL)", source, folder), timeout=60)
    assert killed.returncode == -signal.SIGKILL
    (leftover,) = entries(folder)
    assert leftover.endswith(".tmp")
    corpus, said = load(source, folder)
    assert "into" in said[0] and corpus.tokens.tolist() == expected_tokens(source)
    assert entries(folder) == {leftover.partition(".")[0]}


def test_leftovers_of_other_sources_go_too_but_not_those_of_a_live_process(source, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    for name in ("dead", "live"):
        (folder / f"{name}.123.tmp").mkdir(parents=True)
    taken = []
    monkeypatch.setattr(
        cache, "_close_lock", lambda descriptor, close=cache._close_lock: taken.append(close(descriptor))
    )
    with (folder / "live.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        load(source, folder)
    assert {name for name in entries(folder) if name.endswith(".tmp")} == {"live.123.tmp"}
    assert (folder / "live.lock").exists() and not (folder / "dead.lock").exists()
    assert len(taken) == 3  # of both, and of the entry that was written


def test_two_processes_at_once(source, tmp_path):
    """The second waits, says so, and then uses what the first has written."""
    folder = tmp_path / "cache"
    go = tmp_path / "go"
    moment = f"print('in the middle', flush=True)\n        while not os.path.exists({str(go)!r}): time.sleep(0.01)"
    pipe = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command(moment, source, folder), **pipe) as first:
        try:
            assert first.stdout is not None and first.stdout.readline() == "in the middle\n"
            with subprocess.Popen(command("pass", source, folder), **pipe) as second:
                assert second.stdout is not None
                waits = second.stdout.readline()
                assert waits == f"data: process {first.pid} is tokenising {source} at the moment; waiting for it\n"
                go.touch()
                assert "from the cache" in second.stdout.read()
            assert "into the cache" in first.stdout.read()
        finally:
            go.touch()
    assert (first.returncode, second.returncode, len(entries(folder))) == (0, 0, 1)


def test_without_locks_the_slower_process_takes_what_the_faster_one_wrote(source, tmp_path, monkeypatch):
    folder = tmp_path / "cache"

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    plain = PartWriter.finish
    inner = []

    def finish(part):
        if not inner:
            inner.append("another process")
            subprocess.run(command("pass", source, folder, locks=False), check=True, stdout=subprocess.DEVNULL)
        return plain(part)

    monkeypatch.setattr(PartWriter, "finish", finish)
    corpus, _ = load(source, folder)
    assert inner and corpus.tokens.tolist() == expected_tokens(source)
    assert len(entries(folder)) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_how_much_is_needed_and_leaves_nothing(source, tmp_path, monkeypatch, number):
    """The write fails when 20 of 40 documents are written, so twice as much is needed."""
    folder = tmp_path / "cache"
    plain = PartWriter._append

    def fail(part, name, values):
        if part.num_examples == 20:
            raise OSError(number, os.strerror(number))
        plain(part, name, values)

    monkeypatch.setattr(PartWriter, "_append", fail)
    monkeypatch.setattr(cache_writer, "_GROUP_BYTES", 1)  # one document is written at a time
    with pytest.raises(ConfigError) as caught:
        load(source, folder)
    needed = 2 * len(expected_tokens(source)) / 2**20
    got = "a full disk (" if number == errno.ENOSPC else "Disk quota exceeded; free some"
    message = str(caught.value)
    assert message.startswith(f"data_cache: expected about {needed:.1f} MiB in {folder}, got {got}")
    assert "\n" not in message and not list(folder.iterdir())
    monkeypatch.undo()
    assert load(source, folder)[0].tokens.tolist() == expected_tokens(source)


def test_a_folder_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"data_cache: expected a folder that can be written, got '.*file/cache'"):
        load(source, tmp_path / "file" / "cache")
    assert entries_module.open_entry(tmp_path / "file" / "a", "a", pytest.fail) is None  # and not damaged


def test_bad_data_leaves_nothing(source, tmp_path):
    with source.open("a") as file:
        file.write("no json\n")
    with pytest.raises(ConfigError, match=r"text\.jsonl:41: expected"):
        load(source, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_who_waited_for_a_write_that_failed_locks_another_file(tmp_path):
    """Else a third one could make the file anew and write at the same time."""
    file = tmp_path / "entry.lock"
    waits = threading.Event()
    found = []

    def second():
        with cache._locked(file, lambda holder: waits.set()):
            with file.open() as third, pytest.raises(BlockingIOError):
                fcntl.flock(third, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append(file.read_text())

    thread = threading.Thread(target=second)
    with pytest.raises(ValueError, match="failed"), cache._locked(file, lambda holder: None):
        thread.start()
        assert waits.wait(60)
        raise ValueError("failed")
    thread.join(60)
    assert found == [str(os.getpid())] and file.exists()


# --- memory ----------------------------------------------------------------------------------------------------------

RESIDENT = """
import contextlib, re, sys
import numpy as np
from surojax.data.batches import training_batches
from surojax.data.prepare import load_corpora
from surojax.data.samples import windows_or_rows
from surojax.data.tokenizer import ByteTokenizer

def peak():
    status = open("/proc/self/status").read()  # getrusage counts the process that started this one, too
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) / 2**10  # MiB

source, folder, packed = sys.argv[1:]
for warm in ("small.jsonl", source):  # imports and threads are not data
    before = peak()
    corpus, _ = load_corpora(warm, eval_source="small.jsonl", tokenizer=ByteTokenizer(), data_cache=folder)
    samples = windows_or_rows(corpus, 8192, packed=packed == "packed")
    with contextlib.closing(training_batches(samples, batch_size=8, accumulation=1, seed=0, num_epochs=1)) as stream:
        total = sum(int(batch["inputs"].astype(np.int64).sum()) for batch in stream)
print(peak() - before, len(corpus.tokens))
"""


RUNS = [(60, 60, "windows"), (500, 300, "packed")]


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's peak memory of a process")
@pytest.mark.parametrize(("megabytes", "most", "packed"), quick_at(RUNS, 0))
def test_resident_memory_while_tokenising_and_training(tmp_path, megabytes, most, packed):
    """All pages of the tokens are read: 120 MB of them with 60 MB of text, and 1 GB with 500 MB."""
    line = json.dumps({"text": "some words of no meaning, " * 400}) + "\n"
    for name, size in (("small.jsonl", 0.2), ("large.jsonl", megabytes)):
        with (tmp_path / name).open("w") as file:
            for _ in range(int(size * 10**6) // len(line)):
                file.write(line)
    arguments = ["large.jsonl", str(tmp_path / "cache"), packed]
    found = subprocess.run(
        [sys.executable, "-c", RESIDENT, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=900
    )
    assert found.returncode == 0, found.stderr
    added, tokens = map(float, found.stdout.splitlines()[-1].split())
    assert tokens > 0.95e6 * megabytes and added < most, found.stdout


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files")
def test_a_lock_leaves_no_file_open_and_has_the_process_in_it(tmp_path):
    file = tmp_path / "a.lock"

    def taken() -> None:
        with cache._locked(file, lambda pid: pytest.fail(f"{pid} has it")) as is_locked:
            assert is_locked and file.read_text() == str(os.getpid())

    def failing() -> None:
        with cache._locked(file, lambda pid: pytest.fail(f"{pid} has it")):
            raise OSError("full")

    file.write_text("12345678901")  # of a process that has ended
    before = len(os.listdir("/proc/self/fd"))
    taken()
    with pytest.raises(OSError, match="full"):
        failing()
    assert not file.exists()
    taken()
    assert len(os.listdir("/proc/self/fd")) == before
