"""Rows from files of every format, and one line for everything that can be wrong with an entry, a file or a row."""

import dataclasses
import json
import os
import sys
import types

import pyarrow
import pyarrow.parquet
import pytest

from surojax.data import datasets, files, readers, texts
from surojax.data.data_rows import BadRow, DataRow
from surojax.data.datasets import Dataset, parse_dataset, read_dataset, resolve
from surojax.data.items import Item, hold_out, item_key, new_hash
from surojax.data.readers import read_file
from surojax.errors import ConfigError

TEXTS = ['one, "two"', "zwei\nlines ü 🎈", "x" * 200_000]


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content, encoding="utf-8")
    return path


def rows(path, **settings):
    return list(read_dataset(parse_dataset({"path": str(path)} | settings)))


def error_of(function, *arguments, **keywords) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*arguments, **keywords)
    message = str(caught.value)
    assert "\n" not in message and "expected" in message and "got" in message and ";" in message
    return message


def reason_of(row) -> str:
    assert isinstance(row, BadRow)
    assert row.reason.startswith("expected ") and ", got " in row.reason and ";" in row.reason
    assert "\n" not in row.reason
    return row.reason


# -- Formats ----------------------------------------------------------------------------------------------------------


def save_jsonl(path):
    write(path, "".join(json.dumps({"id": i, "text": text}) + "\n\n" for i, text in enumerate(TEXTS)))
    return [f"{path}:{line}" for line in (1, 3, 5)]


def save_json_list(path):
    write(path, "\n " + json.dumps([{"id": i, "text": text} for i, text in enumerate(TEXTS)], indent=1))
    return [f"{path}, row {row}" for row in (1, 2, 3)]


def save_parquet(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"id": [0, 1, 2], "text": TEXTS})
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    return [f"{path}, row {row}" for row in (1, 2, 3)]


def save_csv(path):
    quoted = ['"' + text.replace('"', '""') + '"' for text in TEXTS]
    write(path, "\ufeffid,text\r\n" + "\r\n".join(f"{i},{text}" for i, text in enumerate(quoted)))
    return [f"{path}:{line}" for line in (2, 3, 5)]  # the second text has two lines


@pytest.mark.parametrize(
    "name, save",
    [
        ("a.jsonl", save_jsonl),
        ("lines.json", save_jsonl),
        ("list.json", save_json_list),
        ("a.parquet", save_parquet),
        ("a.CSV", save_csv),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path, name, save):
    where = save(tmp_path / name)
    found = rows(tmp_path / name)
    assert [row.record["text"] for row in found] == TEXTS
    assert [int(row.record["id"]) for row in found] == [0, 1, 2]
    assert [row.where for row in found] == where
    assert len(rows(tmp_path / name, samples=2)) == 2


def test_a_text_file_is_one_row(tmp_path):
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\n\r\ntwo \xc3\xbc")
    (row,) = rows(path, text_field="body")
    assert row.where == str(path) and "".join(texts.text_parts(row.record["body"])) == "one\r\n\r\ntwo ü"


def test_folders_globs_and_lists(tmp_path, monkeypatch):
    for name in ("b/2.txt", "b/deep/3.txt", "a/1.txt", ".hidden/4.txt", "b/.5.txt", "b/readme.md"):
        write(tmp_path / name, name)
    names = lambda found: ["".join(texts.text_parts(row.record["text"])) for row in found]
    assert names(rows(tmp_path)) == ["a/1.txt", "b/2.txt", "b/deep/3.txt"]
    assert names(rows(tmp_path / "*" / "*.txt")) == ["a/1.txt", "b/2.txt"]
    both = [str(tmp_path / "b"), str(tmp_path / "a/1.txt"), str(tmp_path / "**/*.txt")]
    assert names(read_dataset(parse_dataset({"path": both}))) == [
        "b/2.txt",
        "b/deep/3.txt",
        "a/1.txt",
    ]  # none of them twice
    monkeypatch.chdir(tmp_path / "a")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a/1.txt")
    spellings = ["1.txt", "./1.txt", str(tmp_path / "a/1.txt"), "../a/1.txt", str(tmp_path / "link.txt")]
    assert names(read_dataset(parse_dataset({"path": spellings}))) == ["a/1.txt"]
    assert names(rows("**/*.txt")) == names(rows(tmp_path / "a/**")) == ["a/1.txt"]
    assert "'.md'" in error_of(rows, tmp_path / "b/**")  # which the glob names, as b/* does
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names(rows("~/a")) == ["a/1.txt"]
    (row,) = rows(write(tmp_path / "c/state.json", '{"text": "a"}').parent)  # no file about Arrow files, without any
    assert row.record == {"text": "a"}


def test_parquet_is_read_in_parts(tmp_path):
    """Of a file with 20 row groups of 1 MB, less than eight are in memory."""
    path = tmp_path / "a.parquet"
    texts = pyarrow.table({"text": [f"{i:010}" * 1000 for i in range(2000)]})
    pyarrow.parquet.write_table(texts, path, row_group_size=100, compression=None, use_dictionary=False)
    assert path.stat().st_size > 20e6
    del texts
    before = pyarrow.total_allocated_bytes()
    allocated = []
    for row in read_dataset(parse_dataset({"path": str(path)})):
        assert isinstance(row, DataRow) and len(row.record["text"]) == 10_000
        allocated.append(pyarrow.total_allocated_bytes() - before)
    assert len(allocated) == 2000 and 0 < max(allocated) < 8e6


# -- Sets of the hub --------------------------------------------------------------------------------------------------


@pytest.fixture
def library(monkeypatch):
    """A stand-in for the `datasets` library, which is not installed: it knows one set."""
    asked = []

    def load_dataset(name, subset, *, split):
        asked.append((name, subset, split))
        if name != "known/set":
            raise FileNotFoundError(f"no set\n{name}")
        return [{"text": "one"}, {"text": "two"}]

    config = types.SimpleNamespace(HF_DATASETS_CACHE="/the/cache")
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset, config=config))
    return asked


def test_a_name_that_is_no_path_is_a_set_of_the_library(library):
    found = rows("known/set", split="train[:2]", subset="en")
    assert found[1] == DataRow({"text": "two"}, "known/set (train[:2]), row 2")
    rows("known/set")
    assert library == [("known/set", "en", "train[:2]"), ("known/set", None, "train")]
    message = error_of(rows, "unknown/set")
    assert "unknown/set" in message and "/the/cache" in message and "no set unknown/set" in message


def test_a_set_that_cannot_be_read_to_its_end(library, monkeypatch):
    def broken(name, subset, *, split):
        yield {"text": "one"}
        raise ImportError("to decode sound,\ninstall a decoder")

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", broken)
    message = error_of(rows, "known/set")
    assert message.startswith("known/set (train): expected rows") and "to decode sound, install a decoder" in message


def test_a_path_that_does_not_exist_is_no_set(tmp_path, library):
    names = (tmp_path / "nowhere", "nowhere/*.txt", "./some/set", "~/set", "data/train.jsonl", "a/b/c", "train.parquet")
    for name in names:
        message = error_of(rows, name)
        assert f"{name}: expected a file, a folder or a glob that matches" in message and "library" not in message
    assert library == []


def test_without_the_library_the_error_says_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    message = error_of(rows, "some/set")
    assert str(tmp_path) in message and "some/set" in message and "pip install datasets" in message


# -- Entries ----------------------------------------------------------------------------------------------------------


def test_entries():
    assert parse_dataset({"path": "a.txt"}) == Dataset(("a.txt",))
    entry = {"path": ["a", "b"], "type": "text", "samples": 3, "weight": 2, "text_field": "body"}
    assert parse_dataset(entry) == Dataset(("a", "b"), type="text", samples=3, weight=2, text_field="body")


def test_names_of_other_programs():
    axolotl = {"path": "a", "type": "conversation", "field_messages": "turns", "field_tools": "t", "field_system": "s"}
    axolotl |= {"message_property_mappings": {"role": "from", "content": "value"}, "name": "en"}
    expected = Dataset(("a",), type="conversation", messages_field="turns", tools_field="t", system_field="s")
    assert parse_dataset(axolotl) == Dataset(
        **vars(expected) | dict(role_field="from", content_field="value", subset="en")
    )


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("field", "text_field"),
        ("field_system", "system_field"),
        ("field_instruction", "instruction_field"),
        ("field_input", "input_field"),
        ("field_output", "output_field"),
        ("field_messages", "messages_field"),
        ("field_tools", "tools_field"),
        ("system_prompt_field", "system_field"),
        ("message_field_role", "role_field"),
        ("message_field_content", "content_field"),
        ("name", "subset"),
    ],
)
def test_a_name_of_axolotl_or_surogate_sets_one_field(theirs, ours):
    assert parse_dataset({"path": "a", theirs: "x"}) == dataclasses.replace(Dataset(("a",)), **{ours: "x"})


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"type": "text"}, {"text", "x"}),
        ({"type": "conversation"}, {"messages", "conversations", "", "system", "tools", "x"}),
        ({"type": "conversation", "messages_field": "turns"}, {"turns", "", "system", "tools", "x"}),
        ({"type": "rollout"}, {"x"}),
    ],
)
def test_the_fields_that_a_set_reads(settings, expected):
    dataset = Dataset(("a",), **settings)
    assert datasets.fields_read(dataset, "x") - {""} == expected - {""}


@pytest.mark.parametrize("through", ["linked", "linked/back"])
def test_a_glob_follows_links_and_enters_each_folder_once(tmp_path, through):
    write(tmp_path / "real/a.txt", "a")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/linked").symlink_to(tmp_path / "real")
    if through == "linked/back":
        (tmp_path / "real/back").symlink_to(tmp_path / "data")
    write(tmp_path / "data/.hidden/b.txt", "b")
    found = files.find_files(str(tmp_path / "data/**/*.txt"), (".txt",))
    assert found == [tmp_path / "data/linked/a.txt"]


def test_files_of_the_standard_library_are_sorted(tmp_path, monkeypatch):
    for name in "cab":
        write(tmp_path / f"{name}.py", "")
    monkeypatch.setattr(files, "walk", lambda *_, **__: (tmp_path / name for name in ("c.py", "a.py", "x.py", "b.py")))
    assert [path.name for path in files.stdlib_files()] == ["a.py", "b.py", "c.py"]


# The settings that rows of a type read, besides path, type, samples and the like.
READS = {
    "text": "text_field",
    "instruction": "prompt_field prompt_as completion_field instruction_field input_field output_field role_field "
    "content_field tools_field roles system_field system_prompt",
    "preference": "prompt_field prompt_as chosen_field rejected_field margin_field role_field content_field "
    "tools_field roles system_field system_prompt",
    "unpaired": "prompt_field prompt_as completion_field label_field role_field content_field tools_field roles "
    "system_field system_prompt",
    "conversation": "messages_field role_field content_field tools_field roles system_field system_prompt",
    "rollout": "",
    "tokens": "",
}


@pytest.mark.parametrize("row_type", READS)
def test_the_settings_that_a_type_of_rows_reads(row_type):
    assert {name for name, types in datasets.USES.items() if row_type in types} == set(READS[row_type].split())
    assert datasets.USES.keys() == {name for names in READS.values() for name in names.split()}


ENTRY_ERRORS = [
    ({"path": "a", "typ": "text"}, "'typ'; did you mean type?"),
    ({"path": "a", "zzz": 1}, "'zzz'; remove it"),
    ({}, "path: expected a file"),
    ({"path": []}, "path: expected a file"),
    ({"path": ["a", " "]}, "path: expected a file"),
    ({"path": ["a", 5]}, "path: expected a file"),
    ({"path": 5}, "path: expected a file"),
    (
        {"path": "a", "type": "chat"},
        "type: expected one of auto, text, instruction, conversation, preference, unpaired, segments, rollout, got 'c",
    ),
    ({"path": "a", "samples": -1}, "samples: expected a number of rows"),
    ({"path": "a", "samples": True}, "samples: expected a number of rows"),
    ({"path": "a", "samples": 1.5}, "samples: expected a number of rows"),
    ({"path": "a", "weight": 0}, "weight: expected a number above 0"),
    ({"path": "a", "weight": True}, "weight: expected a number above 0"),
    ({"path": "a", "weight": "2"}, "weight: expected a number above 0"),
    ({"path": "a", "weight": float("inf")}, "weight: expected a number above 0"),
    ({"path": "a", "weight": float("nan")}, "weight: expected a number above 0"),
    ({"path": "a", "split": None}, "split: expected a string, got None"),
    ({"path": "a", "text_field": ["a"]}, "text_field: expected a string"),
    ({"path": "a", "field": "a", "text_field": "b"}, "text_field: expected one value, got two"),
    ({"path": "a", "message_property_mappings": {"roles": "r"}}, "expected names for role and content"),
    ({"path": "a", "message_property_mappings": "role"}, "expected names for role and content"),
    ({"path": "a", "type": "text", "messages_field": "m"}, "messages_field: expected rows of type conversation"),
    ({"path": "a", "type": "text", "system_prompt": "m"}, "expected rows of type instruction or conversation"),
    ({"path": "a", "prompt_field": "q", "output_field": "a"}, "got prompt_field and output_field"),
    ("a.txt", "write dict(path='a.txt')"),
]


@pytest.mark.parametrize("entry, said", ENTRY_ERRORS, ids=map(str, range(len(ENTRY_ERRORS))))
def test_errors_of_entries(entry, said):
    assert said in error_of(parse_dataset, entry)


# -- The type of a dataset --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record, expected",
    [
        ({"text": "a"}, "text"),
        ({"text": "a", "messages": []}, "conversation"),
        ({"conversations": [], "id": 1}, "conversation"),
        ({"prompt": "a", "completion": "b", "text": "c"}, "instruction"),
        ({"instruction": "a", "input": "", "output": "b", "text": "c"}, "instruction"),
    ],
)
def test_the_first_row_decides_the_type(tmp_path, record, expected):
    path = write(tmp_path / "a.jsonl", "{broken\n" + json.dumps(record) + "\n" + json.dumps({"text": "a"}))
    assert resolve(parse_dataset({"path": str(path)})).type == expected
    assert resolve(parse_dataset({"path": str(path), "type": "text"})).type == "text"


@pytest.mark.parametrize("kind, fields", [
    ("conversation", ["messages"]), ("instruction", ["prompt", "completion"]), ("preference", ["chosen", "rejected"]),
    ("rollout", ["prompt_ids", "completion_ids"]), ("tokens", ["input_ids"]), ("segments", ["segments"]),
])  # fmt: skip
def test_a_row_with_the_fields_of_several_types_is_of_the_wanted_one(tmp_path, kind, fields):
    """As UltraFeedback's, which has the chosen conversation as `messages` too."""
    others = ["messages", "prompt", "completion", "chosen", "rejected", "text", "input_ids"]
    every = parse_dataset(
        {"path": str(write(tmp_path / "a.jsonl", json.dumps(dict.fromkeys([*others, *fields], "a"))))}
    )
    assert resolve(every, wanted=kind).type == kind
    assert resolve(every).type == resolve(every, wanted="text of another kind").type == "conversation"
    alone = parse_dataset({"path": str(write(tmp_path / "b.jsonl", json.dumps(dict.fromkeys(fields, "a"))))})
    assert resolve(alone, wanted="text").type == kind


def test_a_type_that_cannot_be_decided(tmp_path):
    path = write(tmp_path / "a.jsonl", "{broken\n" + json.dumps({"prompt": "a", "body": "b"}))
    message = error_of(resolve, parse_dataset({"path": str(path)}))
    assert f"{path}:2: expected a field messages or conversations" in message and "got 'prompt', 'body'" in message
    assert "prompt and completion" in message and "or the dataset's type and the names of its fields" in message
    assert resolve(parse_dataset({"path": str(path), "completion_field": "body"})).type == "instruction"
    only_text = write(tmp_path / "b.jsonl", json.dumps({"text": "a"}))
    message = error_of(resolve, parse_dataset({"path": str(only_text), "messages_field": "turns"}))
    assert f"{only_text}:1: messages_field: expected rows of type conversation" in message and "type text" in message
    bad = parse_dataset({"path": str(write(tmp_path / "c.jsonl", "{\n[]\n")), "ignored_fields": "a"})
    assert f"{tmp_path / 'c.jsonl'}:1: " in error_of(resolve, bad)  # the first of the lines, each of which is none


# -- Bad files and rows -----------------------------------------------------------------------------------------------


def test_bad_lines_do_not_end_the_file(tmp_path):
    lines = [b'{"text": "fine"}', b'{"text": ', b"[1]", b"  ", b'{"text": "\xe9"}', b"[" * 100_000, b'{"text": "end"}']
    path = write(tmp_path / "a.jsonl", b"\n".join(lines))
    found = rows(path)
    assert [row.where for row in found] == [f"{path}:{line}" for line in (1, 2, 3, 5, 6, 7)]
    assert found[0].record == {"text": "fine"} and found[5].record == {"text": "end"}
    assert "a line that is no JSON" in reason_of(found[1]) and "got a list" in reason_of(found[2])
    assert "expected UTF-8 text, got the byte 0xe9 at byte offset 44" in reason_of(found[3])
    assert "a line that is no JSON" in reason_of(found[4])


def test_bad_items_of_a_list(tmp_path):
    path = write(tmp_path / "a.json", '[{"text": "a"}, 5]')
    assert "got a int" in reason_of(rows(path)[1]) and rows(path)[1].where == f"{path}, row 2"
    for content in ('[{"text": "a"}, ', b'[{"text": "\xff"}]', "[" * 100_000):
        message = error_of(rows, write(path, content))
        assert str(path) in message and "expected a JSON list of objects" in message


def test_bad_csv_rows(tmp_path):
    path = write(tmp_path / "a.csv", b'a,b\n1,2\n\n1,2,3\n"x"y,2\n\xff,2\n5,6\n"never closed,1\n')
    found = rows(path)
    assert [row.where for row in found] == [f"{path}:{line}" for line in (2, 4, 5, 6, 7, 8)]
    assert found[0].record == {"a": "1", "b": "2"} and found[4].record == {"a": "5", "b": "6"}
    assert "expected 2 cells as in the header, got 3" in reason_of(found[1])
    assert "expected comma-separated cells" in reason_of(found[2])
    assert "expected UTF-8 text in 'a'" in reason_of(found[3])
    assert "expected comma-separated cells" in reason_of(found[5])
    assert "a header with different names, got a, a" in error_of(rows, write(path, "a,a\n1,2\n"))
    assert "a header with different names, got a, , " in error_of(rows, write(path, "a,,\n1,2,3\n"))
    for mark in (";", "\t", "|"):
        message = error_of(rows, write(path, f"prompt{mark}completion\na{mark}b, c\n"))
        assert f"{path}:1: expected a header with commas" in message and f"in place of {mark!r}" in message
    (indexed,) = rows(write(path, ",text\n0,a;b\n"))  # pandas writes its index into a column without a name
    assert indexed.record == {readers.INDEX: "0", "text": "a;b"}


def test_a_damaged_parquet_file(tmp_path):
    path = tmp_path / "a.parquet"
    save_parquet(path)
    content = path.read_bytes()
    for names in (["text", "text"], ["text", ""]):
        same = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=names)
        pyarrow.parquet.write_table(same, tmp_path / "same.parquet")
        assert f"different names, got {', '.join(names)}" in error_of(rows, tmp_path / "same.parquet")
    for broken in (content[: len(content) // 2], b"", b"not parquet"):
        message = error_of(rows, write(path, broken))
        assert str(path) in message and "expected a Parquet file" in message


def test_errors_of_files(tmp_path):
    assert "got none" in error_of(rows, write(tmp_path / "a.jsonl", "\n\n"))
    assert "got none" in error_of(rows, write(tmp_path / "a.csv", "a,b\n"))
    assert "'.md'" in error_of(rows, write(tmp_path / "a.md", "text"))
    for name in ("lfs.jsonl", "lfs.parquet", "lfs.txt"):
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
        assert "a pointer of Git LFS; run git lfs pull" in error_of(rows, write(tmp_path / name, pointer))
    over_lines = rows(write(tmp_path / "over_lines.json", json.dumps({"text": "a", "b": {}}, indent=1)))
    assert reason_of(over_lines[0]).endswith("; write each object on one line")
    os.mkfifo(tmp_path / "pipe.txt")
    assert "got a pipe or a device" in error_of(rows, tmp_path / "pipe.txt")
    (tmp_path / "empty").mkdir()
    assert "expected a folder with .csv or .json" in error_of(rows, tmp_path / "empty")
    (tmp_path / "folder.txt").mkdir()
    assert "got none" in error_of(rows, tmp_path / "folder.txt")
    path = write(tmp_path / "a.txt", "text")
    assert "expected no split, which only folders" in error_of(rows, path, split="train")
    assert "expected no subset" in error_of(rows, path, subset="en")


def test_a_damaged_footer_of_parquet_is_said_to_be_one(tmp_path):
    """A bit of every fifth byte flipped: pyarrow raises errors of many kinds, some of the system without a number."""
    good = tmp_path / "good.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["abc", "def"] * 50}), good)
    content = good.read_bytes()
    said = set()
    for place in range(len(content) - 300, len(content), 5):
        bad = bytearray(content)
        bad[place] ^= 1 << place % 8
        (tmp_path / "bad.parquet").write_bytes(bad)
        try:
            list(read_file(tmp_path / "bad.parquet", "text"))
        except ConfigError as error:
            said.add(str(error))
    assert any("expected a Parquet file, got one that cannot be read (" in text for text in said)
    assert not any("'None'" in text for text in said), said


@pytest.mark.parametrize(
    "rows, expected", [(2, 1), (9, 1), (11, 2), (60, 6), (100, 10), (500, 10), (1000, 11), (20_000, 219)]
)
def test_ten_items_or_a_tenth_of_them_are_held_out_at_least(rows, expected):
    """The same ones in any order; above, a hundredth of all."""
    made = [Item(str(i), item_key(new_hash(str(i).encode())), 1) for i in range(rows)]
    held_out = [
        {item.content for item, is_out in hold_out(of, 0.01, lambda _: None) if is_out} for of in (made, made[::-1])
    ]
    assert held_out[0] == held_out[1] and len(held_out[0]) == expected


@pytest.mark.parametrize("bad_at", (0, 1, 2, 7))
def test_rows_that_cannot_be_read_are_not_held_out(bad_at):
    """Wherever they are, and beside a single row, which is split, as beside many."""
    for rows in (1, 12):
        made: list[Item] = [Item(str(i), item_key(new_hash(str(i).encode())), 1) for i in range(rows)]
        made.insert(bad_at, Item(BadRow("x", "damaged"), 0, 1))
        found = list(hold_out(made, 0.01, lambda item: (item, item)))
        assert [is_out for item, is_out in found if isinstance(item.content, BadRow)] == [False]
        assert sum(is_out for _, is_out in found) == {1: 1, 12: 2}[rows]


def test_copies_are_on_one_side():
    """Also if they are more than a tenth, unless nothing else could be held out."""
    texts = ["a"] * 3 + ["b"] * 3 + [str(i) for i in range(34)]
    made = [Item(text, item_key(new_hash(text.encode())), 1) for text in texts]
    sides = {
        text: {is_out for item, is_out in hold_out(made, 0.01, lambda _: None) if item.content == text}
        for text in texts
    }
    assert all(len(side) == 1 for side in sides.values())
