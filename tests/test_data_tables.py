"""Tables of the data room, each row by what it does.

The rows are written here again, from those who publish them: a test that takes its cases from the table itself does not
notice a row that is missing.
"""

import datetime
import decimal
import errno
import fcntl
import json
import os
import uuid

import numpy as np
import pytest

from surojax import ConfigError
from surojax.data import cache, fitting, repeats, splits, values
from surojax.data.cells import decoded
from surojax.data.conversations import Conversation
from surojax.data.data_rows import DataRow, NotARow
from surojax.data.datasets import Dataset
from surojax.data.files import find_files, stdlib_files
from surojax.data.messages import read_messages, text_of_parts
from surojax.data.templates import Template


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", None])
def test_parts_of_a_content_that_are_text(kind):
    """Those of chat completions, of OpenAI's responses, and without a type."""
    assert text_of_parts([{"type": kind, "text": "a"}, "b", {"text": "c"}]) == "abc"
    assert text_of_parts([{"type": "image_url", "text": "a"}]) is None
    for media in ("image", "image_url", "video", "audio", "audio_url", "pixel_values", "video_path", "image_paths"):
        assert text_of_parts([{"type": kind, "text": "a", media: "x.png"}]) is None
        assert text_of_parts([{"type": kind, "text": "a", media: ""}]) == "a"
    assert text_of_parts([]) is None
    assert text_of_parts([{"type": kind, "text": 5}]) is None


@pytest.mark.parametrize(
    "name, what",
    [(name, "media") for name in ("image", "images", "video", "audio", "files", "image_url", "audio_path", "objects")]
    + [("refusal", "refusal beside the content")]
    + [(name, "weights of parts of an answer") for name in ("train_detail", "training_detail")],
)
def test_fields_of_a_message_that_are_refused(name, what):
    raw = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "some"}]
    with pytest.raises(NotARow, match=rf"^expected no {what}.*, got '{name}' of message 2 \('some'\); "):
        read_messages(raw, Dataset("x", type="conversation"))
    ignored = Dataset("x", type="conversation", ignored_fields=(name,))
    assert read_messages(raw, ignored).messages[1] == {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    "other, role",
    [("human", "user"), ("prompter", "user"), ("gpt", "assistant"), ("model", "assistant"), ("system", "system")]
    + [(name, "tool") for name in ("function", "observation", "ipython", "tool_response", "tool")],
)
def test_other_names_of_roles(other, role):
    found = read_messages([{"from": other, "value": "a"}], Dataset("x", type="conversation"))
    assert found.messages == [{"role": role, "content": "a"}] and found.weights == [None]


@pytest.mark.parametrize("name", ["function_call", "tool_call", "tool_calls"])
def test_roles_of_calls(name):
    call = json.dumps({"name": "f", "arguments": {"a": 1}})
    (message,) = read_messages([{"from": name, "value": call}], Dataset("x", type="conversation")).messages
    assert message["role"] == "assistant" and message["tool_calls"][0]["function"]["name"] == "f"


@pytest.mark.parametrize("name", ["tool", "ipython", "observation", "function"])
def test_the_role_of_a_tools_result_is_that_of_the_template(name):
    """A template that reads none of these names gets "tool"."""
    template = Template(
        "{% for m in messages %}{% if m.role == '" + name + "' %}!{{ m.content }}{% endif %}{% endfor %}", "t.jinja"
    )
    talk = Conversation([{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}], None)
    found = fitting.fitted(talk, template).messages[1]["role"]
    assert found == ("tool" if name == "function" else name)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"])
def test_variables_that_a_row_cannot_set(name):
    template = Template("{{ " + name + " }}{{ own }}", "t.jinja")
    talk = Conversation([{"role": "user", "content": "a"}], None)
    with pytest.raises(
        NotARow, match=rf"^expected variables of a template's own in 'chat_template_kwargs', got '{name}'"
    ):
        fitting.fitted(talk._replace(variables={name: "x"}), template)
    assert fitting.fitted(talk._replace(variables={"own": "x"}), template).variables == {"own": "x"}


# (type of rows, fields whose text in a table's cell is a value, fields of which it stays a text)
CELLS = [
    ("conversation", "messages conversations tools", "prompt margin label"),
    ("preference", "margin tools", "messages label"),
    ("unpaired", "label", "messages margin tools"),
    (
        "rollout",
        "prompt_ids completion_ids logprobs rewards advantages attention_mask loss_mask completion_mask "
        "assistant_masks assistant_mask response_mask tool_mask env_mask",
        "labels messages",
    ),
    (
        "tokens",
        "input_ids labels position_ids seq_lengths seq_lens sequence_lengths attention_mask loss_mask "
        "completion_mask assistant_masks assistant_mask response_mask tool_mask env_mask",
        "rewards messages",
    ),
    ("segments", "segments", "labels"),
    ("instruction", "", "prompt completion input_ids"),
    ("text", "", "text input_ids"),
]


@pytest.mark.parametrize("kind, values, texts", CELLS, ids=[case[0] for case in CELLS])
def test_cells_that_are_values(kind, values, texts):
    record = dict.fromkeys((*values.split(), *texts.split()), "[1, 2]")
    (row,) = decoded([DataRow(record, "row 1")], Dataset("x", type=kind))
    assert isinstance(row, DataRow)
    assert row.record == {name: [1, 2] for name in values.split()} | dict.fromkeys(texts.split(), "[1, 2]")


@pytest.mark.parametrize("kind", ["instruction", "preference", "unpaired", "conversation", "text"])
@pytest.mark.parametrize("name", ["prompt", "completion", "chosen", "rejected"])
def test_cells_that_are_texts_or_messages(kind, name):
    talk = [{"role": "user", "content": "a"}]
    rows = [DataRow({name: json.dumps(value)}, "row 1") for value in (talk, talk[0], [1], {"role": "x"}, [])]
    found = [row.record[name] for row in decoded(rows, Dataset("x", type=kind)) if isinstance(row, DataRow)]
    as_messages = (
        [talk, talk[0]]
        if kind in ("instruction", "preference", "unpaired")
        else ['[{"role": "user", "content": "a"}]', '{"role": "user", "content": "a"}']
    )
    assert found == [*as_messages, "[1]", '{"role": "x"}', "[]"]


@pytest.mark.parametrize(
    "text, value",
    [
        *(("True", True), ("TRUE", True), ("False", False), ("FALSE", False), ("Tea", "Tea"), ("true", True)),
        *((" 2 ", 2), ("", None), (" ", None), ("null", None), ("half", "half"), ('"a"', "a"), ("F", "F")),
    ],
)
def test_what_a_cell_means(text, value):
    (row,) = decoded([DataRow({"label": text}, "row 1")], Dataset("x", type="unpaired"))
    assert isinstance(row, DataRow) and row.record["label"] == value and type(row.record["label"]) is type(value)


def test_a_cell_that_is_not_read_may_have_any_form():
    """Python's form of messages is refused where messages are read only."""
    record = {"label": "true", "notes": "[{'role': 'user'}]"}
    (row,) = decoded([DataRow(record, "row 1")], Dataset("x", type="unpaired"))
    assert isinstance(row, DataRow) and row.record == record | {"label": True}


@pytest.mark.parametrize("number", ["ENOLCK", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EINVAL"])
def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch, number):
    def refuse(descriptor, kind):
        raise OSError(getattr(errno, number), "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with cache._locked(tmp_path / "a.lock", lambda holder: pytest.fail(f"waits for {holder}")) as is_locked:
        assert not is_locked


def test_leftovers_of_ended_processes_end_no_run(tmp_path, monkeypatch):
    """Also those that cannot be removed; a live process' folder stays."""
    for entry in ("own", "other", "live"):
        (tmp_path / f"{entry}.host-1.tmp").mkdir()
    (tmp_path / "kept").mkdir()
    with (tmp_path / "live.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rmdir", lambda *_, **__: (_ for _ in ()).throw(PermissionError()))
            cache._remove_leftovers(tmp_path, "own")
        assert len(list(tmp_path.glob("*.tmp"))) == 3
        cache._remove_leftovers(tmp_path, "own")
        assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"live.host-1.tmp", "kept"}
    cache._remove_leftovers(tmp_path, "own")
    assert not list(tmp_path.glob("*.tmp"))


def test_of_several_files_that_are_not_read_the_first_is_named(tmp_path):
    for number in range(30):
        (tmp_path / f"{number:02}.bad").write_text("")
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/00.bad: expected a file ending in .jsonl, got '.bad'"):
        find_files(str(tmp_path / "*.bad"), (".jsonl",))
    for number in range(30):
        (tmp_path / f"{number:02}.jsonl").write_text("")
    assert find_files(str(tmp_path), (".jsonl",)) == [tmp_path / f"{number:02}.jsonl" for number in range(30)]


def test_the_standard_library_without_its_tests():
    """Nor packages that are installed beside it."""
    folders = {part for path in stdlib_files() for part in path.parent.parts[len(path.parts) - 6 :]}
    assert "json" in folders
    assert not folders & {"site-packages", "__pycache__", "test", "tests", "idle_test", "idlelib", "lib2to3"}


SPLIT_WORDS = {
    "train": "train training",
    "validation": "validation valid val dev",
    "test": "test testing eval evaluation",
}


@pytest.mark.parametrize("word, split", [(w, split) for split, words in SPLIT_WORDS.items() for w in words.split()])
def test_words_of_splits_in_names(tmp_path, word, split):
    """Of a file or a folder, in any case, between signs or digits, and not within another word."""
    found = [f"{word}.jsonl", f"a-{word}_1.jsonl", f"{word.upper()}/x.jsonl", f"my {word}/x.jsonl", f"00{word}.csv"]
    others = [f"x{word}.jsonl", f"{word}er.jsonl"]
    paths = {name: tmp_path / name for name in (*found, *others, "other/train.csv", "other/test.csv", "other/val.csv")}
    chosen = splits.split_of(tmp_path, set(paths.values()), split)
    of_others = {"other/train.csv": "train", "other/test.csv": "test", "other/val.csv": "validation"}
    beside = {paths[name] for name in others} if split == "train" else set()
    own = {paths[name] for name, of in of_others.items() if of == split}
    assert chosen.files == {paths[name] for name in found} | own | beside
    assert chosen.others == sorted({"train", "validation", "test"} - {split})


ANYTHING = object()
PLAIN = [  # a value in a table, and what JSON has for it
    *((np.int64(5), 5), (np.float32(0.5), 0.5), (np.bool_(True), True), (np.str_("a"), "a"), (np.uint8(0), 0)),
    *((decimal.Decimal("2.0"), 2), (decimal.Decimal("2.5"), 2.5), (datetime.date(2026, 1, 2), "2026-01-02")),
    *((datetime.datetime(2026, 1, 2, 3, 4, 5), "2026-01-02T03:04:05"), (datetime.time(3, 4), "03:04:00")),
    *((datetime.timedelta(hours=1), "1:00:00"), (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001")),
    *((np.datetime64("2026-01-02"), "2026-01-02"), (np.datetime64("NaT", "D"), None)),
    *((np.float64(0.5), 0.5), (decimal.Decimal("Infinity"), float("inf")), ({"a": None}, {"a": None})),
    *((b"ab", "ab"), (b"\xff", b"\xff"), (ANYTHING, ANYTHING), (None, None), ({1: (np.int8(1),)}, {"1": [1]})),
]


@pytest.mark.parametrize("value, expected", PLAIN, ids=range(len(PLAIN)))
def test_values_of_tables_are_those_of_json(value, expected):
    found = values.plain(value)
    assert found == expected and type(found) is type(expected)


# The settings that name fields of a whole conversation, and a row of each type of rows that reads others.
REPEATS = "prompt completion instruction input output chosen text conversation conversations".split()


@pytest.mark.parametrize("name", REPEATS)
def test_fields_that_repeat_a_conversation(name):
    """A text of it, or all of it, says nothing new; another one is refused, unless the dataset names its fields."""
    talk = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
    dataset = Dataset("x", type="conversation")
    record = {"messages": talk}
    said = [("user", "a b"), ("assistant", "c d")]
    for same in ("a  b", talk, "", None, json.dumps(talk), talk[:1]):
        repeats.check_repeats(record | {name: same}, dataset, ["messages"], said)
    for other in ("b a", [{"role": "user", "content": "e"}], {"role": "user", "content": "e"}, talk[::-1]):
        with pytest.raises(NotARow, match=rf"^expected one conversation in a row, got another in '{name}' \("):
            repeats.check_repeats(record | {name: other}, dataset, ["messages"], said)
        repeats.check_repeats(record | {name: other}, dataset, ["messages", name], said)
    own = Dataset("x", type="conversation", messages_field="messages")
    repeats.check_repeats(record | {name: "e"}, own, ["messages"], said)


@pytest.mark.parametrize(
    "text, is_repeated, is_prompt",
    [
        *(("a b", True, True), ("c d", True, False), ("a", True, False), ("user a b assistant c d", True, True)),
        *(("system s user a b", False, True), ("b a", False, False), ("e", False, False), ("c d more", True, False)),
    ],
)
def test_texts_that_repeat_a_conversation(text, is_repeated, is_prompt):
    """A prompt is a question, or all that comes before the first answer; other fields are any part of it."""
    said = [("user", "a b"), ("assistant", "c d"), ("user", "f g")]
    dataset = Dataset("x", type="conversation")
    for name, expected in (("text", is_repeated), ("prompt", is_prompt)):
        try:
            repeats.check_repeated(text, name, dataset, said)
            found = True
        except NotARow:
            found = False
        assert found == expected, name
