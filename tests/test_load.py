"""From the entries of a config to the data of a run: datasets of every type, validation, what is held out, refused."""

import contextlib
import itertools
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from test_examples import TOKENIZERS

from surojax.data import examples, prepare
from surojax.data.batches import training_batches
from surojax.data.run_data import Data, Entries, Settings, _check_uses, load_data, parse_entries
from surojax.data.tokenizer import ByteTokenizer
from surojax.errors import ConfigError

BYTES = ByteTokenizer()


def write(path: Path, rows: list) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def texts(count: int, word: str = "text") -> list[dict]:
    return [{"text": f"{word} number {i} and so on"} for i in range(count)]


def questions(count: int) -> list[dict]:
    return [{"prompt": f"What is {i} + {i}?", "completion": f"It is {2 * i}."} for i in range(count)]


def chats(count: int) -> list[dict]:
    turns = lambda i: [("user", f"Hello {i}"), ("assistant", f"Hi {i}!"), ("user", "Bye"), ("assistant", "See you.")]
    return [{"messages": [{"role": role, "content": text} for role, text in turns(i)]} for i in range(count)]


def load_entries(tmp_path, entries, validation=(), said=None, **settings) -> Data:
    settings = {"sequence_len": 64, "eval_batches": 50, "data_cache": str(tmp_path / "cache")} | settings
    say = (said if said is not None else []).append
    return load_data(parse_entries(entries, validation), Settings(**settings), BYTES, eval_batch_size=4, say=say)


def documents_of(samples) -> list[str]:
    """The documents of rows, by where their inputs begin and end; one in a row that is not packed."""
    found = []
    for i in range(len(samples)):
        sample = samples[i]
        starts = sample.get("starts", np.zeros(len(sample["inputs"]), np.int32))
        for start in sorted(set(starts.tolist())):
            ids = sample["inputs"][starts == start]
            if ids.any():
                found.append(BYTES.decode(ids[ids > 0]))
    return found


def trained_of(sample) -> str:
    labels = sample["labels"]
    return BYTES.decode(labels[labels >= 0])


def test_a_set_of_the_hub_is_tokenised_anew_if_it_changed(tmp_path, monkeypatch):
    class Set(list):
        _fingerprint = "first"

    rows = Set(questions(4))
    opened = []
    library = types.SimpleNamespace(load_dataset=lambda name, subset, *, split: opened.append(split) or rows)
    monkeypatch.setitem(sys.modules, "datasets", library)
    entries = [{"path": "known/set"}]
    fingerprint = lambda: load_entries(tmp_path, entries, entries).train.fingerprint
    first = fingerprint()
    assert opened == ["train"]  # although it is two datasets, each with a type, a fingerprint and rows
    rows.extend(questions(9))
    assert fingerprint() == first  # found again by the set's own fingerprint, not by its rows
    rows._fingerprint = "second"
    assert fingerprint() != first


@pytest.mark.parametrize(
    "unused",
    [{"train_on": "all"}, {"chat_template": "chatml"}, {"system_prompt": "Be."}, {"on_long": "drop"}],
    ids=lambda unused: next(iter(unused)),
)
def test_settings_that_no_row_reads_are_refused(tmp_path, unused):
    text = [{"path": write(tmp_path / "texts.jsonl", texts(30))}]
    question = [{"path": write(tmp_path / "questions.jsonl", questions(3))}]
    (name,) = unused
    packed = [{"sample_packing": True}] if name != "on_long" else []
    for options in ({}, *packed):
        with pytest.raises(
            ConfigError, match=rf"^{name}: expected '[a-z]*' without rows of [^\n]*; leave it out, [^\n]*$"
        ):
            load_entries(tmp_path, text, text, **unused, **options)
    assert not (tmp_path / "cache").exists()
    load_entries(tmp_path, text, question, **unused)
    load_entries(tmp_path, question, text, **unused)
    if not packed:
        load_entries(tmp_path, text, text, **unused, sample_packing=True)


@pytest.mark.parametrize("packed", [False, True])
def test_each_kind_of_row_becomes_samples(tmp_path, packed):
    """Nothing is held out if there are validation datasets. The loss is on completions and answers alone."""
    entries = [
        {"path": write(tmp_path / "texts.jsonl", texts(30))},
        {"path": write(tmp_path / "questions.jsonl", questions(20))},
        {"path": write(tmp_path / "chats.jsonl", chats(10))},
    ]
    validation = [{"path": entries[1]["path"], "samples": 3}]
    options = {"sample_packing": packed, "chat_template": "chatml", "sequence_len": 256}
    found = load_entries(tmp_path, entries, validation, **options)
    text, question, chat = found.train.sources
    if packed:
        assert sorted(documents_of(text)) == sorted(row["text"] for row in texts(30))
    else:
        windows = [BYTES.decode(text[i]["inputs"]) for i in range(len(text))]
        assert "".join(windows).startswith("text number 0 and so ontext number 1 and so on")
    trained = [trained_of(question[i]) for i in range(len(question))]
    assert sum(text.count("It is") for text in trained) == 20 and not any("What" in text for text in trained)
    assert sum(document.count("Hello") for document in documents_of(chat)) == 10
    answers = "".join(trained_of(chat[i]) for i in range(len(chat)))
    assert answers.count("Hi") == 10 and answers.count("See you.") == 10 and "Hello" not in answers
    assert (len(question) < 20) == packed and ("starts" in chat[0]) == packed
    (evaluated,) = found.evaluated
    assert evaluated.name == "questions" and evaluated.bytes_per_label is None
    labels = np.concatenate([batch["labels"] for batch in evaluated.batches])
    assert BYTES.decode(labels[labels >= 0]).count("It is") == 3


def test_without_validation_a_part_of_each_dataset_is_held_out(tmp_path):
    entries = [
        {"path": write(tmp_path / "a.jsonl", texts(500))},
        {"path": write(tmp_path / "b.jsonl", questions(300))},
    ]
    found = load_entries(tmp_path, entries, sequence_len=128, sample_packing=True)
    trained = [document for source in found.train.sources for document in documents_of(source)]
    (evaluated,) = found.evaluated
    assert evaluated.name == "" and evaluated.bytes_per_label is None  # not all of it is text
    inputs = BYTES.decode(np.concatenate([batch["inputs"] for batch in evaluated.batches]))
    held_out_texts, held_out_questions = inputs.count("text number"), inputs.count("What is")
    assert 1 <= held_out_texts <= 20 and 1 <= held_out_questions <= 15
    assert len(trained) == 800 - held_out_texts - held_out_questions
    again = load_entries(tmp_path, [entries[0]], sequence_len=128, sample_packing=True)
    assert sorted(documents_of(again.train.sources[0])) == sorted(x for x in trained if x.startswith("text"))
    assert again.evaluated[0].bytes_per_label == 1  # of each document its end is predicted and its first byte is not
    book = tmp_path / "book.txt"
    book.write_text("".join(f"line {i}\n" for i in range(1000)))
    one = load_entries(tmp_path, [{"path": str(book)}], sequence_len=128)
    prompt = BYTES.decode(one.held_out.tokens[:64])
    assert prompt.startswith("line 9") and one.train.sources[0].num_tokens > 18 * len(one.held_out.tokens)


@pytest.mark.parametrize(
    "options", [{}, {"sample_packing": True}, {"sample_packing": True, "on_long": "drop"}], ids=str
)
def test_bits_per_byte_are_of_the_labels_that_are_counted(tmp_path, options):
    """Documents of 5 to 9 bytes, and one of 90; the labels are those of the batches, which have every document."""
    rows = [{"text": f"x{10**i}é"} for i in range(2, 7)] * 20 + [{"text": "y" * 90}]
    path = write(tmp_path / "a.jsonl", rows)
    found = load_entries(tmp_path, (), [{"path": path}], sequence_len=32, data=path, **options)
    (evaluated,) = (one for one in found.evaluated if one.name == "a")
    labels = sum(int((batch["labels"] >= 0).sum()) for batch in evaluated.batches)
    kept = rows[:-1] if "on_long" in options else rows
    num_bytes = sum(len(row["text"].encode()) for row in kept)
    num_tokens = num_bytes + len(kept)
    assert labels == num_tokens - (len(kept) if options else 1)
    # Of what is left out, the bytes are taken to be as many a token as of all.
    assert evaluated.bytes_per_label == pytest.approx(num_bytes / labels, rel=0.02 if "on_long" in options else 1e-12)


def test_control_tokens_that_are_spelled_are_said_once(tmp_path):
    """Of a named template, once for all datasets; not if all are text, or the tokenizer has the tokens."""
    entries = [{"path": write(tmp_path / f"{i}.jsonl", questions(9))} for i in "ab"]
    notes = []
    for tokenizer in (BYTES, TOKENIZERS["byte_level"]):
        settings = Settings(256, chat_template="chatml", data_cache=str(tmp_path / "cache"))
        said = []
        load_data(parse_entries(entries, entries[:1]), settings, tokenizer, eval_batch_size=1, say=said.append)
        notes.append([line for line in said if line.startswith("note: chat_template")])
    (note,) = notes[0]
    assert "chatml writes <|im_start|>, <|im_end|>, which this tokenizer (bytes) has not" in note and not notes[1]
    said = []
    text = [{"path": write(tmp_path / "texts.jsonl", texts(30))}]
    load_entries(tmp_path, text, entries[:1], said, chat_template="gemma", sequence_len=256)
    load_entries(tmp_path, text, text, said)
    assert sum("note: chat_template gemma" in line for line in said) == 1


def test_held_out_text_and_validation_datasets_beside_data(tmp_path):
    path = write(tmp_path / "v.jsonl", texts(5))
    validation = [{"path": path}, {"path": path, "name": "again"}]
    found = load_entries(tmp_path, (), validation, data="stdlib")
    assert [x.name for x in found.evaluated] == ["", "v", "again"]
    assert found.train.all.name == "stdlib" and len(found.held_out.tokens) > 1e5
    for one in found.evaluated:
        assert one.bytes_per_label is not None and 0.9 < one.bytes_per_label <= 1
    documents = "".join(row["text"] + " " for row in texts(5))  # with its end, each has one token more
    labels = np.concatenate([batch["labels"] for batch in found.evaluated[1].batches])
    assert (labels >= 0).sum() == len(documents) - 1  # every token but the first is predicted once


@pytest.mark.parametrize("rows", [questions, chats])
def test_data_of_rows_is_an_entry_of_datasets(tmp_path, rows):
    """The same samples, held out likewise; evaluated on `eval_data` as on rows of its own."""
    path = write(tmp_path / "a.jsonl", rows(200))
    other = write(tmp_path / "b.jsonl", questions(7))
    settings = {"chat_template": "chatml", "sequence_len": 256}
    entry = load_entries(tmp_path, [{"path": path}], **settings)
    found = load_entries(tmp_path, (), data=path, **settings)
    assert found.train.fingerprint == entry.train.fingerprint
    assert [x.name for x in found.evaluated] == [""] and len(found.held_out.tokens) == len(entry.held_out.tokens)
    both = load_entries(tmp_path, (), data=path, eval_data=other, **settings)
    assert [x.name for x in both.evaluated] == [""] and len(both.train) == len(both.train.all) == 200
    assert sum(batch["inputs"].any(axis=1).sum() for batch in both.evaluated[0].batches) == 7


def test_data_in_a_folder_with_other_files_is_text_as_before(tmp_path):
    """Only a kind of rows that the text files do not have, or a name of another format, makes it anything else."""
    folder = tmp_path / "text"
    folder.mkdir()
    write(folder / "b.jsonl", [{"text": row["text"], "body": row["text"][::-1]} for row in texts(30)])
    write(folder / "about.json", [{"about": "these texts"}])
    found = load_entries(tmp_path, (), data=str(folder), sequence_len=8)
    bodies = load_entries(tmp_path, (), data=str(folder), sequence_len=8, text_field="body")
    assert len(found.train) == len(bodies.train) > 0 and found.train.fingerprint != bodies.train.fingerprint
    as_table = write(tmp_path / "a.csv", ["text", *(row["text"] for row in texts(30))])
    assert len(load_entries(tmp_path, (), data=as_table, sequence_len=8).train) > 0


def test_a_run_without_data_asks_for_it(tmp_path):
    with pytest.raises(ConfigError, match=r"^data: expected files to train on, got none; --config\.data=FILES"):
        load_entries(tmp_path, ())


def test_a_text_file_among_questions_is_said(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    entry = {"path": str(tmp_path / "a.txt"), "type": "instruction", "prompt_field": "text"}
    with pytest.raises(ConfigError, match=r"a\.txt: expected instructions or conversations, got a text file; "):
        load_entries(tmp_path, [entry])


@pytest.mark.parametrize("as_entry", [False, True])
def test_paths_with_rows_of_several_types_are_refused(tmp_path, as_entry):
    """The error names the file whose rows are others, and what it says to do works."""
    text, asked = tmp_path / "a.txt", write(tmp_path / "b.jsonl", questions(20))
    text.write_text("One paragraph. " * 40)
    paths = [str(text), asked]
    names = {} if as_entry else {"data": ",".join(paths)}
    with pytest.raises(ConfigError, match=r"^/.*b\.jsonl: expected rows of type text, as in /.*a\.txt, got .* instr"):
        load_entries(tmp_path, [{"path": paths}] if as_entry else [], **names)
    assert len(load_entries(tmp_path, [{"path": str(text)}, {"path": asked}]).train) > 0


def test_rows_that_cannot_be_used_end_the_run_or_are_counted(tmp_path):
    path = write(tmp_path / "a.jsonl", [*questions(9), {"prompt": "no answer"}, "no json", *questions(20)[9:]])
    with pytest.raises(ConfigError, match=r"a\.jsonl:1[01]: expected"):  # the first one that is not held out
        load_entries(tmp_path, [{"path": path}])
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]
    for _ in range(2):  # tokenised, and from the cache
        said = []
        found = load_entries(tmp_path, [{"path": path}], [{"path": path}], said, on_bad_row="skip")
        assert len(found.train) == 20
        line = next(line for line in said if "skipped" in line)
        assert line.startswith(f"data: {path}: 2 rows cannot be used and are skipped; the first: {path}:10: expected")
    with pytest.raises(ConfigError, match=r"a\.jsonl:10: expected"):  # not from the cache of the other setting
        load_entries(tmp_path, [{"path": path}], [{"path": path}])


@pytest.mark.parametrize("as_entry", [False, True])
def test_rows_without_text_are_left_out_and_counted(tmp_path, as_entry):
    """As between the paragraphs of wikitext, with and without `on_bad_row`, the first row too, and never held out."""
    blank = [{"text": ""}, {"text": " \n"}, {"text": None}]
    whole = write(tmp_path / "whole.jsonl", texts(20))
    (folder := tmp_path / "rows").mkdir()
    path = write(folder / "a.jsonl", [*blank, *texts(20), *blank])
    (folder / "b.txt").write_text("\n")
    data = lambda name: {"entries": [{"path": name}]} if as_entry else {"entries": (), "data": name}
    expected = load_entries(tmp_path, **data(whole)).train.fingerprint
    what = "rows" if as_entry else "documents"
    for name, number in ((path, 6), (str(folder), 7)):
        for _ in range(2):  # tokenised, and from the cache
            said = []
            assert load_entries(tmp_path, said=said, **data(name)).train.fingerprint == expected
            assert f"data: {name}: {number} {what} have no text and are left out; the first: {path}:1" in said
    broken = write(tmp_path / "b.jsonl", [*blank, "no json", {"text": 5}, *texts(20)])
    with pytest.raises(ConfigError, match=r"b\.jsonl:4: expected"):
        load_entries(tmp_path, **data(broken))
    said = []
    assert load_entries(tmp_path, said=said, on_bad_row="skip", **data(broken)).train.fingerprint == expected
    assert any(": 2 " in line and "cannot be used and are skipped; the first: " in line for line in said)
    empty = write(tmp_path / "c.jsonl", blank)
    with pytest.raises(ConfigError, match=rf"got none, 0 skipped, 3 without text \({empty}:1\); correct them"):
        load_entries(tmp_path, **data(empty))


def test_an_answer_that_is_empty_is_a_fault(tmp_path):
    path = write(tmp_path / "a.jsonl", [*questions(9), {"prompt": "Why?", "completion": " "}])
    with pytest.raises(ConfigError, match=r"a\.jsonl:10: expected the completion .* got an empty one"):
        load_entries(tmp_path, (), data=path)
    said = []
    assert len(load_entries(tmp_path, (), said=said, data=path, on_bad_row="skip").train) > 5
    assert any("1 rows cannot be used" in line for line in said)


def test_a_held_out_row_that_cannot_be_used_names_the_way_out(tmp_path, monkeypatch):
    """The row that is held out alone, whatever its hash: broken; too long; cut before its answer."""
    way_out = r"got none among 1; raise sequence_len{}, or name other examples in validation_datasets$"
    long = {"prompt": "Why" * 50, "completion": "So."}
    monkeypatch.setattr(examples, "new_hash", lambda content: content)
    monkeypatch.setattr(examples, "item_key", lambda x: 0 if b"Why" in x or b"no answer" in x else 2**63)
    path = write(tmp_path / "a.jsonl", [*questions(9), long])
    with pytest.raises(
        ConfigError, match="held out.: expected examples of at most .*" + way_out.format(", or set on_.*")
    ):
        load_entries(tmp_path, [{"path": path}], on_long="drop")
    with pytest.raises(ConfigError, match="expected examples with a token to train on .*" + way_out.format("")):
        load_entries(tmp_path, [{"path": path}])
    path = write(tmp_path / "b.jsonl", [*questions(9), {"prompt": "no answer"}])
    message = (
        r"got 9 to train on and 0 to evaluate on, 1 skipped \(.*b\.jsonl:10: .*\); .*, or set validation_datasets$"
    )
    with pytest.raises(ConfigError, match=message):
        load_entries(tmp_path, [{"path": path}], on_bad_row="skip")


def test_sets_that_are_empty_are_refused(tmp_path):
    good = [{"path": write(tmp_path / "good.jsonl", questions(9))}]
    bad = [{"path": write(tmp_path / "bad.jsonl", [{"prompt": 1, "completion": "x"}] * 3), "type": "instruction"}]
    expected = r"bad\.jsonl: expected rows that can be used, got none, 3 skipped \(.*bad\.jsonl:1: expected"
    with pytest.raises(ConfigError, match=expected):
        load_entries(tmp_path, bad, on_bad_row="skip")
    with pytest.raises(ConfigError, match=expected):
        load_entries(tmp_path, good, bad, on_bad_row="skip")
    one = [{"path": write(tmp_path / "one.jsonl", questions(1))}]
    with pytest.raises(
        ConfigError,
        match=r"one\.jsonl: expected at least two different rows.* got 1 to train on and 0 .*; add .*, or set",
    ):
        load_entries(tmp_path, one)
    pair = [{"path": write(tmp_path / "pair.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])}]
    settings = Settings(sequence_len=64, eval_batches=1, data_cache="")
    with pytest.raises(ConfigError, match=r"two different rows.* got 1 to train on and 0 to evaluate on"):
        load_data(parse_entries(pair, ()), settings, BYTES, eval_batch_size=4, rows="preference", together=2)
    same = [{"path": write(tmp_path / "same.jsonl", questions(1) * 9)}]
    with pytest.raises(ConfigError, match=r"two different rows .* got 0 to train on and 9 to evaluate on, 0 skipped; "):
        load_entries(tmp_path, same)
    with pytest.raises(ConfigError, match=r"expected examples of at most sequence_len=8 tokens, got none among 9"):
        load_entries(tmp_path, good, good, sequence_len=8, on_long="drop")


def test_what_the_policy_changes_is_tokenised_anew(tmp_path, monkeypatch):
    """And a cached dataset is not read again, but for its first row, which decides its type."""
    entries = [{"path": write(tmp_path / "chats.jsonl", chats(10))}]
    folders = lambda: {p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()}
    found = set()
    for number, options in enumerate(
        [{}, {"train_on": "last"}, {"chat_template": "llama3"}, {"system_prompt": "Be brief."}], start=1
    ):
        options = {"chat_template": "chatml", "sequence_len": 256} | options
        found.add(load_entries(tmp_path, entries, entries, **options).train.fingerprint)
        assert len(folders()) == len(found) == number
    file = tmp_path / "mine.jinja"
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    file.write_text(template + "{% if add_generation_prompt %}<assistant>{% endif %}")
    load_entries(tmp_path, entries, entries, chat_template=str(file), sequence_len=256)
    file.write_text(template.replace("/", "-") + "{% if add_generation_prompt %}<assistant>{% endif %}")
    load_entries(tmp_path, entries, entries, chat_template=str(file), sequence_len=256)
    assert len(folders()) == 6
    monkeypatch.setattr(prepare, "write_entry", lambda *_, **__: pytest.fail("read again"))
    load_entries(tmp_path, entries, entries, chat_template=str(file), sequence_len=256)
    load_entries(tmp_path, [{**entries[0], "weight": 3}], entries, chat_template=str(file), sequence_len=256)


def test_a_stream_of_weighted_packed_datasets_goes_on_anywhere(tmp_path):
    """With all that is between files and batches."""
    entries = [
        {"path": write(tmp_path / "a.jsonl", texts(200)), "weight": 0.7},
        {"path": write(tmp_path / "b.jsonl", questions(100)), "weight": 0.3},
    ]
    said = []

    def stream(start: int, count: int, batch_size: int, accumulation: int) -> np.ndarray:
        found = load_entries(tmp_path, entries, said=said, sample_packing=True)
        with contextlib.closing(
            training_batches(found.train, batch_size=batch_size, accumulation=accumulation, seed=3, start_sample=start)
        ) as steps:
            taken = itertools.islice(steps, count // (batch_size * accumulation))
            rows = [np.concatenate([x[name].reshape(-1, 64) for name in sorted(x)], axis=1) for x in taken]
        return np.concatenate(rows)

    whole = stream(0, 120, 1, 1)
    np.testing.assert_array_equal(stream(24, 96, 4, 2), whole[24:])
    np.testing.assert_array_equal(stream(30, 90, 3, 1), whole[30:])
    assert sum("into the cache" in line for line in said) == 2


WRONG = [
    ([{"path": "a", "wieght": 1}], (), r"datasets\[0\]: expected settings .*'wieght'; did you mean weight"),
    ([{"path": "a", "weight": 1}, {"path": "b"}], (), r"datasets\[1\]: expected a weight"),
    ([{"path": "a", "weight": 0}], (), r"datasets\[0\]: weight: expected a number above 0, got 0"),
    ([], [{"path": "a", "name": ""}], r"validation_datasets\[0\]: expected a name that no other entry has, got ''"),
    ([], [{"path": "a", "name": " "}], r"validation_datasets\[0\]: expected a name that no other entry has, got ' '"),
    ([], [{"path": "a", "name": 5}], r"validation_datasets\[0\]: expected a name that no other entry has, got 5"),
    ([], [{"path": "x/a.jsonl"}, {"path": "y/a.txt"}], r"validation_datasets\[1\]: expected a name .*'a'; set name="),
    ([], [{"path": "a", "weight": 2}], r"validation_datasets\[0\]: expected no weight"),
    ([], [{"type": "text"}], r"validation_datasets\[0\]: path: expected a file"),
]


@pytest.mark.parametrize(("entries", "validation", "message"), WRONG, ids=range(len(WRONG)))
def test_entries_that_are_wrong_are_named(entries, validation, message):
    with pytest.raises(ConfigError, match=message):
        parse_entries(entries, validation)


# Settings of rows, and the types of rows that read them; of texts, on_long is read if they are packed.
OF_MESSAGES = ("instruction", "conversation", "preference", "unpaired")
READ_BY = {
    "train_on": ("last", OF_MESSAGES),
    "chat_template": ("chatml", OF_MESSAGES),
    "system_prompt": ("Be brief.", OF_MESSAGES),
    "on_long": ("drop", (*OF_MESSAGES, "rollout")),
}


@pytest.mark.parametrize("where", ["datasets", "validation"])
@pytest.mark.parametrize("kind", [*OF_MESSAGES, "rollout", "text", "tokens"])
@pytest.mark.parametrize("name", READ_BY)
def test_a_setting_of_rows_is_refused_without_rows_that_read_it(name, kind, where):
    value, kinds = READ_BY[name]
    dataset = types.SimpleNamespace(type=kind)
    entries = Entries(datasets=(dataset,)) if where == "datasets" else Entries(validation={"x": dataset})  # type: ignore
    for packed in (False, True):
        settings = Settings(64, sample_packing=packed, **{name: value})
        if kind in kinds or (name == "on_long" and packed):
            _check_uses(entries, settings)
        else:
            with pytest.raises(ConfigError, match=rf"^{name}: expected .* without rows of instructions or conver"):
                _check_uses(entries, settings)
        _check_uses(entries, Settings(64, sample_packing=packed))
