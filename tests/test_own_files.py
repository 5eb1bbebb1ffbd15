"""Files that surojax writes and reads again: their forms, and how they are written."""

import json
import os

import pytest

from surojax.own_files import WHOLE, Optional, check_form, read_own, write_whole

RIGHT = [
    (str, ""), (bool, False), (int, -(10**30)), (float, 1), (float, -0.5), (WHOLE, 2**63 - 1), (range(1, 3), 2),
    ([int], []), ([[str]], [["a"], []]), ((int, str), [1, "a"]), ({str: int}, {"a": 1, "": 2}), ({}, {"a": 1}),
    ({"a": int}, {"a": 1, "b": None}), ({"a": Optional(int)}, {}), ({"a": Optional({"b": str})}, {"a": {"b": "c"}}),
    (dict, {}), (list, [1]),
]  # fmt: skip
WRONG = [
    (str, None, "content: expected a JSON str, got None"), (str, 1, ""), (bool, 1, ""), (int, True, ""), (int, 1.0, ""),
    (float, float("nan"), "a finite number"), (float, float("inf"), ""), (float, True, ""), (float, "1", ""),
    (float, 10**400, "a finite number"), (WHOLE, -1, "a whole number from 0 to"), (WHOLE, 2**63, ""), (WHOLE, 0.0, ""),
    (WHOLE, False, ""), ([int], {}, "a list"), ([int], [1, "a"], r"\[1\]: expected a JSON int"), ([int], "ab", ""),
    (float, 2**63, "a finite number"), ((str, str), "ab", "a list of 2"),
    ((int, str), [1], "a list of 2"), ((int, str), [1, "a", 2], ""), ({str: int}, [], "an object"),
    ({str: int}, {"a": None}, "a: expected a JSON int"), ({"a": int}, {}, "a: expected a value, got None"),
    ({"a": Optional(int)}, {"a": None}, ""), ({"a": {"b": int}}, {"a": {"b": "x" * 10**6}}, "a.b: .*characters"),
]  # fmt: skip


@pytest.mark.parametrize("form, value", RIGHT, ids=range(len(RIGHT)))
def test_what_has_a_form(form, value):
    check_form(value, form)


@pytest.mark.parametrize("form, value, said", WRONG, ids=range(len(WRONG)))
def test_what_has_it_not(form, value, said):
    with pytest.raises(ValueError, match=said or "expected") as caught:
        check_form(value, form)
    assert len(str(caught.value)) < 300


NOT_OURS = (
    "", "{", "[1]", "null", '{"a": 1, "a": 1}', '{"a": {"b": 1, "b": 2}}', '{"a": NaN}', '{"a": Infinity}', "\xff",
    '{"a": 1e999}', '{"a": ' + "9" * 5000 + "}", '{"a": ' + "[" * 100_000, '{"a": 1}\0',
)  # fmt: skip


@pytest.mark.parametrize("text", NOT_OURS, ids=range(len(NOT_OURS)))
def test_what_is_no_file_of_ours(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"expected|nested|twice|digits|Expecting|Extra data"):
        read_own(tmp_path / "a.json", {"a": float})
    os.truncate(tmp_path / "a.json", 2**25)
    with pytest.raises(OSError, match="where at most"):
        read_own(tmp_path / "a.json", {"a": float})


def test_a_file_is_written_whole_and_no_link_is_followed(tmp_path):
    mine, file = tmp_path / "mine", tmp_path / "a.json"
    mine.write_text("my own")
    file.symlink_to(mine)
    (tmp_path / "a.json.new").symlink_to(mine)
    write_whole(file, {"a": 1}, lasts=True)
    assert json.loads(file.read_text()) == {"a": 1} and mine.read_text() == "my own"
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.json", "mine"]
    with pytest.raises(OSError, match=r"none/a\.json"):
        write_whole(tmp_path / "none" / "a.json", 1)
