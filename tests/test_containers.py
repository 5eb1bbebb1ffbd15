"""A row means the same in every file: the same examples from each format, or the same refusal."""

import bz2
import contextlib
import csv
import datetime
import decimal
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from test_load import BYTES, questions, texts

from surojax.data import decompression, readers
from surojax.data.cells import decoded
from surojax.data.data_rows import BadRow, DataRow
from surojax.data.datasets import parse_dataset, read_dataset, resolve
from surojax.data.decompression import format_of, stem
from surojax.data.documents import TextEncoder
from surojax.data.examples import Encoder
from surojax.data.files import find_files, find_with_splits, split_names
from surojax.data.given import GivenRows
from surojax.data.items import Item
from surojax.data.prepare import _source, load_corpora
from surojax.data.readers import read_file
from surojax.data.rollouts import RolloutEncoder
from surojax.data.splits import FolderSplit, split_of
from surojax.data.templates import Template
from surojax.data.texts import READ
from surojax.data.token_rows import TokenEncoder
from surojax.errors import ConfigError

type Rows = list[dict[str, Any]]


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(content)
    return sink.getvalue().to_pybytes()


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


def lines_of(rows: Rows, end: str = "\n") -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)


def csv_of(rows: Rows) -> str:
    """A table whose cells are texts, and JSON where a value is none."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    file = io.StringIO()
    table = csv.writer(file)
    table.writerow(names)
    cell = lambda value: "" if value is None else value if isinstance(value, str) else json.dumps(value)
    table.writerows([cell(row.get(name)) for name in names] for row in rows)
    return file.getvalue()


def table_of(rows: Rows) -> pa.Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})


def stream_of(rows: Rows, make: Callable) -> bytes:
    sink = io.BytesIO()
    table = table_of(rows)
    with make(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def parquet_of(rows: Rows, **options: Any) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table_of(rows), sink, **options)
    return sink.getvalue()


def feather_of(rows: Rows) -> bytes:
    sink = io.BytesIO()
    pyarrow.feather.write_feather(table_of(rows), sink, compression="lz4")
    return sink.getvalue()


FILES: dict[str, Callable[[Rows], bytes]] = {
    "lines.jsonl": lambda rows: lines_of(rows).encode(),
    "bom.jsonl": lambda rows: b"\xef\xbb\xbf" + lines_of(rows).encode(),
    "crlf.jsonl": lambda rows: lines_of(rows, "\r\n").encode(),
    "ascii.jsonl": lambda rows: "".join(json.dumps(row) + "\n" for row in rows).encode(),
    "joined.jsonl": lambda rows: b"".join(b"\xef\xbb\xbf" + lines_of([row]).encode() for row in rows),
    "list.json": lambda rows: json.dumps(rows, indent=1).encode(),
    "lines.json": lambda rows: lines_of(rows).encode(),
    "cells.csv": lambda rows: csv_of(rows).encode(),
    "bom.csv": lambda rows: b"\xef\xbb\xbf" + csv_of(rows).encode(),
    "table.parquet": parquet_of,
    "gzipped.parquet": lambda rows: parquet_of(rows, compression="gzip", row_group_size=1),
    "file.arrow": lambda rows: stream_of(rows, pa.ipc.new_file),
    "stream.arrow": lambda rows: stream_of(rows, pa.ipc.new_stream),
    "table.feather": feather_of,
    **{f"lines.jsonl{end}": lambda rows, end=end: COMPRESS[end](lines_of(rows).encode()) for end in COMPRESS},
    **{f"list.json{end}": lambda rows, end=end: COMPRESS[end](json.dumps(rows).encode()) for end in COMPRESS},
    **{f"cells.csv{end}": lambda rows, end=end: COMPRESS[end](csv_of(rows).encode()) for end in COMPRESS},
}


def call(name: str, arguments: dict) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def said(role: str, content: str, **more: Any) -> dict:
    return {"role": role, "content": content, **more}


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {"type": "object", "properties": {"zone": {"type": "number", "enum": [0, 1]}}},
    },
}
ROLLOUTS = [
    {"prompt_ids": [5, 6], "completion_ids": [[7, 2], [8, 9, 2]], "logprobs": [[-0.1, -0.3], [-1.2, -0.4, -0.1]],
     "rewards": [1.0, 0.0]},
    {"prompt_ids": [5], "completion_ids": [[7], [8]], "logprobs": [[-0.1], [-1.2]], "rewards": [2, 0.5]},
]  # fmt: skip
# Rows, and a template's text if they are conversations.
SAME: dict[str, Rows] = {
    "texts": [*texts(3), {"text": 'ü\u2028\u0085\x1c 🎈 "quoted", and\r\n\nlines\t'}, {"text": "1"}, {"text": "true"}],
    "texts without": [{"text": ""}, *texts(2), {"text": " \n"}, {"text": "NaN"}, {"text": "null"}],
    "texts that are null": [{"text": None, "n": 1}, {"text": "a", "n": 2}],
    "questions": [*questions(3), {"prompt": "1 + 1", "completion": "2"}, {"prompt": "so?", "completion": "false"}],
    "instructions": [
        {"instruction": "Add.", "input": "1, 2", "output": "3"},
        {"instruction": "Greet.", "input": None, "output": "[1]"},
        {"instruction": "Ask.", "input": "", "output": "Why?", "system": "Be brief."},
    ],
    "instructions beside a column of nulls": [
        {"messages": None, "prompt": "a", "completion": "b"},
        {"messages": None, "prompt": "c", "completion": "d"},
    ],
    "conversations": [
        {"messages": [said("user", "ü"), said("assistant", "b")]},
        {"messages": [said("system", "c"), said("user", "", name="x"), said("assistant", "d")]},
    ],
    "ShareGPT": [
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]},
    ],
    "tools": [
        {
            "messages": [
                said("user", "a"),
                said("assistant", "", tool_calls=[call("weather", {"city": "Paris"})]),
                said("tool", "18", name="weather"),
                said("assistant", "mild"),
            ],
            "tools": [WEATHER],
        },
        {
            "messages": [
                said("user", "b"),
                said("assistant", "x", tool_calls=[call("clock", {"zone": 1}), call("weather", {"city": "Rome"})]),
                said("assistant", "late"),
            ],
            "tools": [CLOCK, WEATHER],
        },
        {"messages": [said("user", "c"), said("assistant", "d")], "tools": None},
    ],
    "preferences": [
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5},
        {"prompt": "d", "chosen": "1", "rejected": "0", "margin": None},
        {"prompt": "d", "chosen": "1", "rejected": "0", "margin": 2},
    ],
    "preferences of messages": [
        {"prompt": [said("user", "a")], "chosen": [said("assistant", "b")], "rejected": [said("assistant", "c")]},
        {"prompt": [said("user", "d")], "chosen": [said("assistant", "[1]")], "rejected": [said("assistant", "f")]},
    ],
    "rated": [
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": "c", "completion": "d", "label": False},
    ],
    "rated by numbers": [
        {"prompt": "a", "completion": "b", "label": 1},
        {"prompt": "c", "completion": "d", "label": 0},
    ],
    "preferences of a message each": [
        {"prompt": "a", "chosen": said("assistant", "b"), "rejected": said("assistant", "c")},
        {"prompt": "d", "chosen": {"role": "assistant", "content": "e"}, "rejected": said("assistant", "f")},
    ],
    "rollouts": ROLLOUTS,
    "token ids": [{"input_ids": [1, 2, 3]}, {"input_ids": []}, {"input_ids": [255]}],
    "segments": [{"segments": [{"label": True, "text": "a"}, {"label": False, "text": "b"}]}],
    "a system prompt in parts": [{"prompt": "a", "completion": "b", "system": ["Be brief."]}],
    "an empty answer": [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "  "}],
    "an answer of another type": [{"messages": [said("user", "a"), {"role": "assistant", "content": 1}]}],
    "a label that is none": [{"prompt": "a", "completion": "b", "label": "maybe"}],
    "a margin that is none": [{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "large"}],
    "a log-probability above 0": [ROLLOUTS[0], ROLLOUTS[1] | {"logprobs": [[0.5], [-1.0]]}],
    "preferences with a prompt in an object": [
        {
            "prompt": {"messages": [said("user", "a")]},
            "chosen": [said("assistant", "b")],
            "rejected": [said("assistant", "c")],
        },
    ],
    "masked token ids": [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}],
    "token ids with a mask": [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}],
    "two conversations": [{"messages": [said("user", "a")], "conversations": [said("user", "b")], "text": None}],
    "no completion": [ROLLOUTS[1] | {"completion_ids": [[7], []], "logprobs": [[-0.1], []]}],
}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ m.keys() | list | sort }}</>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
REFUSED = list(SAME)[list(SAME).index("an empty answer") :]
TYPES = {"rated": "unpaired", "rated by numbers": "unpaired", "a label that is none": "unpaired"}


def meaning(rows: Path | GivenRows | Rows, type_: str = "auto") -> list[Any]:
    """The examples of rows, as lists, or the reasons why a row is none, or the message of what ends a run."""
    opened = lambda *_: rows
    path = str(rows) if isinstance(rows, Path) else "the rows given"
    dataset = resolve(parse_dataset({"path": path, "type": type_}), opened)
    encoders = {"text": TextEncoder(BYTES, True), "tokens": TokenEncoder(256), "rollout": RolloutEncoder(256)}
    template = Template(TEMPLATE, "the test's") if dataset.type not in encoders else None
    encoder = encoders.get(dataset.type) or Encoder(dataset, BYTES, template)
    items = list(_source(dataset, encoder, opened).items(True))
    units = [unit.content for item in items if isinstance(item, Item) for unit in encoder.units(item)]
    found: list[Any] = [[type(item).__name__ for item in items]]
    for example in encoder.encode(units):
        if isinstance(reason := getattr(example, "reason", None), str):
            found.append(reason)
        else:
            arrays = [example.ids, example.trained, *example.numbers.values()]
            found.append((*[None if x is None else np.asarray(x).tolist() for x in arrays], example.ends))
    return found


@pytest.mark.parametrize("kind", SAME)
def test_a_row_means_the_same_in_every_file(tmp_path, kind):
    rows = SAME[kind]
    expected = None
    for name, write in FILES.items():
        path = tmp_path / name
        try:
            path.write_bytes(write(rows))
        except pa.ArrowException:  # values of two types
            continue
        found = meaning(path, TYPES.get(kind, "auto"))
        expected = expected or found
        assert found == expected, name
    assert meaning(GivenRows(rows), TYPES.get(kind, "auto")) == expected
    with contextlib.suppress(pa.ArrowException):
        table = table_of(rows)
        for given in (GivenRows(table), table.to_pylist()):  # the latter as a set of the `datasets` library
            assert meaning(given, TYPES.get(kind, "auto")) == expected
    assert expected and (kind in REFUSED) == any(isinstance(x, str) for x in expected)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
@pytest.mark.parametrize(
    "content, advice", [("text\na\n".encode("utf-16"), "iconv -f utf-16"), (gzip.compress(b"a", mtime=0), ".gz")]
)
def test_files_in_other_encodings_say_which(tmp_path, name, content, advice):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name}:1: expected UTF-8 text, got .*{advice}"):
        if isinstance(found := meaning(tmp_path / name, "text")[1], str):
            raise ConfigError(f"{name}:1: {found}")


# -- Values that a table has, and JSON has not ------------------------------------------------------------------------

STRUCT = pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])
DAY = datetime.date(2026, 11, 28)
VALUES = [
    (pa.array(["a"], pa.large_string()), "a"),
    (pa.array(["a"], pa.string_view()), "a"),
    (pa.array(["a", "a"]).dictionary_encode(), "a"),
    (pa.array([b"\xc3\xbc"]), "ü"),
    (pa.array([b"\xff"]), b"\xff"),
    (pa.array([decimal.Decimal("1.50")]), 1.5),
    (pa.array([decimal.Decimal("7.00")]), 7),
    (pa.array([2**63], pa.uint64()), 2**63),
    (pa.array([np.float16(0.5)], pa.float16()), 0.5),
    (pa.array([0.1], pa.float32()), float(np.float32(0.1))),
    (pa.array([DAY]), "2026-11-28"),
    (pa.array([datetime.datetime(2026, 11, 28, 1, 2, 3)], pa.timestamp("us")), "2026-11-28T01:02:03"),
    (pa.array([datetime.datetime(2026, 11, 28)], pa.timestamp("s", tz="UTC")), "2026-11-28T00:00:00+00:00"),
    (pa.array([datetime.timedelta(seconds=61)]), "0:01:01"),
    (pa.array([[("k", 1), ("l", None)]], pa.map_(pa.string(), pa.int32())), {"k": 1, "l": None}),
    (pa.array([[[DAY], []]]), [["2026-11-28"], []]),
    (pa.array([[1, 2]], pa.list_(pa.int8(), 2)), [1, 2]),
    (pa.array([[DAY]], pa.large_list(pa.date32())), ["2026-11-28"]),
    (pa.array([DAY, DAY]).dictionary_encode(), "2026-11-28"),
    (pa.array([None], pa.list_(pa.date32())), None),
    (pa.array([None], pa.map_(pa.string(), pa.int32())), None),
    (pa.array([[None, "a"]]), [None, "a"]),
    (pa.array([{"role": "user", "content": "a"}], STRUCT), {"role": "user", "content": "a"}),
    (pa.array([[{"role": "user"}, None]], pa.list_(STRUCT)), [{"role": "user"}, None]),
    (pa.array([None], STRUCT), None),
    (pa.array([{"f": {"x": None, "when": DAY}}]), {"f": {"when": "2026-11-28"}}),
    (pa.array([None]), None),
]


@pytest.mark.parametrize("values, expected", VALUES, ids=[f"{i} {x.type}" for i, (x, _) in enumerate(VALUES)])
@pytest.mark.parametrize("name", ["a.parquet", "a.feather"])
def test_values_of_tables(tmp_path, values, expected, name):
    write = pyarrow.parquet.write_table if name == "a.parquet" else pyarrow.feather.write_feather
    try:
        write(pa.table({"x": values}), str(tmp_path / name))
    except pa.ArrowNotImplementedError:
        pytest.skip("not written by this pyarrow")
    row, *_ = read_file(tmp_path / name, "text")
    assert row.record == {"x": expected} and type(row.record["x"]) is type(expected)


def test_rows_of_python():
    """Messages as a row or in an array, as pandas reads them from Parquet; texts and token ids in arrays."""
    talk = [said("user", "a"), said("assistant", "b")]
    for same in ([talk], [{"messages": np.array(talk, object)}]):
        assert meaning(GivenRows(same)) == meaning(GivenRows([{"messages": talk}]))
    assert meaning(GivenRows(np.array(["a", "b"]))) == meaning(GivenRows(["a", "b"]))
    assert meaning(GivenRows(np.array([5, 6]))) == meaning(GivenRows([[5, 6]]))
    for bad in ([], ["a"], 5):
        (row,) = GivenRows([bad]).read()
        assert isinstance(row, BadRow) and "a list of messages, or token ids, got" in row.reason
    for none, got in (
        (5, "got int; put it in a list"),
        ({"train": ["a"]}, "got dict of train; give one of its values"),
    ):
        with pytest.raises(ConfigError, match=f"data: expected an iterable of rows, {got}"):
            GivenRows(none)


@pytest.mark.parametrize("field", ["messages", "prompt"])
def test_an_object_with_a_key_twice_is_a_bad_row(tmp_path, field):
    """Python's parser would take the last value of it."""
    twice = '[{"role": "user", "content": "a", "content": "b"}]'
    fine = {"prompt": "a", "completion": "b"}
    row = f'{{"{field}": {twice}, "completion": "b"}}'
    file = io.StringIO()
    csv.writer(file).writerows([[field, "completion"], [twice, "b"]])
    files = {
        "a.jsonl": f"{row}\n{json.dumps(fine)}\n",
        "a.json": f"[{row}, {json.dumps(fine)}]",
        "in_parts.json": f"[{row[:-1]}{' ' * READ}}}, {json.dumps(fine)}]",
        "a.csv": file.getvalue(),
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        kind = "conversation" if field == "messages" else "instruction"
        dataset = parse_dataset({"path": str(tmp_path / name), "type": kind})
        bad, *others = decoded(read_file(tmp_path / name, "text"), dataset)
        assert isinstance(bad, BadRow) and "got one twice (the key 'content' is there twice); remove" in bad.reason, (
            name
        )
        assert [other.record for other in others] == ([] if name == "a.csv" else [fine])


def test_a_list_in_the_form_of_python_is_a_bad_row(tmp_path):
    """As pandas writes it into a CSV file: it is no text to train."""
    pandas = pytest.importorskip("pandas")
    rows = [{"prompt": [said("user", "a")], "completion": "[{'a': 1}]"}]
    pandas.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
    _, reason = meaning(tmp_path / "a.csv")
    assert "expected JSON of messages in 'prompt', got" in reason and "json.dumps" in reason


def test_a_map_with_a_key_twice_is_a_bad_row(tmp_path):
    maps = pa.array([[("k", 1)], [("k", 1), ("k", 2)], [("l", 3)]], pa.map_(pa.string(), pa.int32()))
    pyarrow.parquet.write_table(pa.table({"x": maps}), str(tmp_path / "a.parquet"))
    first, bad, last = read_file(tmp_path / "a.parquet", "text")
    assert first.record == {"x": {"k": 1}} and last.record == {"x": {"l": 3}} and "expected values that" in bad.reason


def test_the_null_of_pandas_is_no_value(tmp_path):
    pandas = pytest.importorskip("pandas")
    rows = [{"instruction": "a", "input": "b", "output": "1"}, {"instruction": "c", "output": "2"}]
    frame = pandas.DataFrame(rows)
    expected = meaning(GivenRows(rows))
    frame.to_parquet(tmp_path / "a.parquet")
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    (tmp_path / "nan.json").write_text(json.dumps(frame.to_dict("records")))
    assert "NaN" in (tmp_path / "nan.json").read_text()
    for path in sorted(tmp_path.iterdir()):
        assert meaning(path) == expected, path
    missing = pandas.DataFrame({"instruction": ["a", "c"], "input": ["b", pandas.NA], "output": ["1", "2"]})
    for given in (frame, frame.to_dict("records"), missing, missing.convert_dtypes(), pa.table(frame)):
        assert meaning(GivenRows(given)) == expected
    with_null = pandas.DataFrame({"text": pandas.array(["a", None], dtype="string"), "n": [1, 2]})
    for given in (with_null, with_null.convert_dtypes(dtype_backend="pyarrow"), pa.table(with_null)):
        assert meaning(GivenRows(given))[0] == ["Item", "BlankRow"]
    odd = [{"messages": [{"role": np.ones(2), "from": "user", "content": np.array(["a"], object)}]}]
    assert "'role' or 'from' in message 1, got two that differ" in meaning(GivenRows(odd))[1]
    with pytest.raises(ConfigError, match="data: expected an iterable of rows, got set; put it in a list"):
        GivenRows({"a", "b"})
    with pytest.raises(ConfigError, match="data: expected a header with different names, got a, a; "):
        GivenRows(pandas.DataFrame([[1, 2]], columns=["a", "a"]))
    series = pandas.Series(["a", None, float("nan"), "b"])
    assert meaning(GivenRows(series))[0] == ["Item", "BlankRow", "BlankRow", "Item"]
    for null in (pandas.NA, pandas.NaT):
        assert meaning(GivenRows([{"text": "a"}, {"text": null}]))[0] == ["Item", "BlankRow"]


# -- Compressed files -------------------------------------------------------------------------------------------------

BODY = lines_of(texts(2000)).encode()


@pytest.mark.parametrize("end", COMPRESS)
def test_damaged_files_are_one_line(tmp_path, end):
    path = tmp_path / f"a.jsonl{end}"
    good = COMPRESS[end](BODY)
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 0x55
    cases = {
        b"": "it is empty.*; write or download it again",
        good[:3]: "; write or download it again",
        good[: len(good) // 2]: "; write or download it again",
        good[:-1]: "; write or download it again",
        good + good[: len(good) // 2]: "; write or download it again",
        good + b"more": "; write or download it again",
        BODY: f"; remove {end} from its name if it is not compressed",
        **({} if end == ".zst" else {bytes(flipped): "; write or download it again"}),  # has no sum from this writer
    }
    for content, advice in cases.items():
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"a\.jsonl\{end}: expected a complete \{end} file, got .*{advice}$"):
            list(read_file(path, "text"))
    path.write_bytes(good + good)
    assert len(list(read_file(path, "text"))) == 4000


@pytest.mark.parametrize("end", COMPRESS)
def test_a_file_that_unfolds_to_a_lot_is_refused_on_the_way(tmp_path, end, monkeypatch):
    monkeypatch.setattr(decompression, "SMALL", 1 << 20)
    monkeypatch.setattr(decompression, "UNFOLDS", 50)
    for name in (f"a.jsonl{end}", f"a.txt{end}", f"a.csv{end}", f"a.json{end}"):
        (tmp_path / name).write_bytes(COMPRESS[end](b"[" + b" " * (2 << 20)))
        with pytest.raises(
            ConfigError, match="expected a compressed file of at most 1,048,576 bytes, 50 times as many"
        ):
            list(read_file(tmp_path / name, "text"))


@pytest.mark.parametrize("end", COMPRESS)
def test_a_text_is_read_in_parts(tmp_path, end, monkeypatch):
    monkeypatch.setattr("surojax.data.texts.READ", 1000)
    text = "".join(f"line {i} ü\r\n" for i in range(999))
    encoder = TextEncoder(BYTES, True)
    (tmp_path / f"a.txt{end}").write_bytes(COMPRESS[end](b"\xef\xbb\xbf" + text.encode()))
    (tmp_path / "a.txt").write_bytes(text.encode())
    whole, packed = (
        next(_source(parse_dataset({"path": str(tmp_path / name), "type": "text"}), encoder, lambda *_: ()).items(True))
        for name in ("a.txt", f"a.txt{end}")
    )
    assert packed.key == whole.key and packed.num_bytes == len(text.encode())
    for item, other in zip(encoder.split(whole), encoder.split(packed), strict=True):
        assert [unit.content.text for unit in encoder.units(item)] == [x.content.text for x in encoder.units(other)]


def test_the_ends_of_names():
    formats = {"a.jsonl": ".jsonl", "A.JSONL.GZ": ".jsonl", "b.c.txt.zst": ".txt", "a.parquet.gz": ".gz", "a.gz": ".gz"}
    formats["a.txt.bak"] = ".bak"
    assert {name: format_of(name) for name in formats} == formats
    assert [stem(name) for name in ("x/a.b.jsonl.gz", "a.jsonl", "a.tar.gz", "a")] == ["a.b", "a", "a.tar", "a"]


# -- Names ------------------------------------------------------------------------------------------------------------

NAMES = [
    "a,b",
    "[1]",
    "a*",
    "what?",
    "#1",
    "a b",
    " a ",
    "ü 数",
    "-x",
    "a:b",
    "{a}",
    "~a",
    "a'b\"c",
    "$HOME",
    "a,b,,c",
    "é\u0301",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_exists_is_none_but_itself(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other,a.jsonl").write_text("")
    for folder in (tmp_path, tmp_path / name):
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}.jsonl"
        path.write_text(lines_of(texts(1)))
        for given in (str(path), str(path.relative_to(tmp_path))):
            assert split_names(given) == [given]
            assert split_names(f"none.txt, {given},other,a.jsonl") == ["none.txt", given.strip(), "other,a.jsonl"]
            assert [x.resolve() for x in find_files(given, readers.SUFFIXES) or ()] == [path]
    assert [x.resolve() for x in find_files(f"{name}/*.jsonl", (".jsonl",)) or ()] == [path]
    assert [x.resolve() for x in find_files(f"{tmp_path / name}/**/*.jsonl", (".jsonl",)) or ()] == [path]


def saved_splits(folder: Path, *names: str) -> Path:
    """As `DatasetDict.save_to_disk` writes them, rows of each split with its name."""
    for name in names:
        (folder / name).mkdir(parents=True)
        rows = [{"text": f"{name} {i}"} for i in range(2)]
        (folder / name / "data-00000-of-00001.arrow").write_bytes(stream_of(rows, pa.ipc.new_stream))
        (folder / name / "state.json").write_text("{}")
        (folder / name / "dataset_info.json").write_text("{}")
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": names}))
    return folder


def read_texts(path: Path, split: str = "") -> list[str]:
    rows = read_dataset(parse_dataset({"path": str(path), "split": split, "type": "text"}))
    return [row.record["text"].split()[0] for row in rows if isinstance(row, DataRow)]


def test_one_split_of_a_saved_set_is_read(tmp_path):
    folder = saved_splits(tmp_path / "a", "train", "validation", "later")
    assert read_texts(folder) == ["train"] * 2 and read_texts(folder, "later") == ["later"] * 2
    assert read_texts(folder / "validation") == ["validation"] * 2
    found = find_with_splits(str(folder), readers.SUFFIXES)
    assert found is not None and found.other_splits == ["later", "validation"]
    for split, given in (("test", folder), ("", saved_splits(tmp_path / "b", "train_sft", "test_sft"))):
        with pytest.raises(ConfigError, match=r"expected a split '(test|train)', got .*; set split"):
            read_texts(given, split)
    for content in ("{}", "[", '{"splits": 5}'):
        (folder / "dataset_dict.json").write_text(content)
        with pytest.raises(ConfigError, match="expected the names of splits"):
            read_texts(folder)


SPLIT_NAMES = {
    "train": ["data/train-00000-of-00002.parquet", "TRAIN.jsonl", "train/a.jsonl", "gsm8k_train.jsonl", "training.csv"],
    "validation": ["data/validation-00000-of-00001.parquet", "dev.jsonl", "val/a.jsonl", "a.valid.jsonl"],
    "test": ["data/test-00000-of-00001.parquet", "test.jsonl", "test/train.jsonl", "eval_1.csv", "x/testing/a.jsonl"],
    "": ["a.jsonl", "latest.jsonl", "trained.jsonl", "contest/a.jsonl", "devices.csv"],
}


def test_files_are_of_the_split_that_their_names_say(tmp_path):
    """As the `datasets` library takes them; files of no split are trained too."""
    files = {tmp_path / name for names in SPLIT_NAMES.values() for name in names}
    of = {split: {tmp_path / name for name in names} for split, names in SPLIT_NAMES.items()}
    assert split_of(tmp_path, files, "") == FolderSplit(of["train"] | of[""], ["test", "validation"])
    for split in ("validation", "test"):
        assert split_of(tmp_path, files, split).files == of[split]
    without = files - of["train"]
    assert split_of(tmp_path, without, "") == FolderSplit(without, [])  # there is nothing else to train on
    with pytest.raises(ConfigError, match="expected a split 'train', got test, validation; set split in an entry"):
        split_of(tmp_path, without, "train")


def test_a_line_names_the_splits_that_are_not_read(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(lines_of([{"text": f"{split} {i}"} for i in range(3)]))
    lines: list[str] = []
    train, held_out = load_corpora(str(tmp_path), tokenizer=BYTES, data_cache=str(tmp_path / "cache"), say=lines.append)
    assert "test" not in BYTES.decode(np.concatenate([train.tokens, held_out.tokens]))
    assert f"data: {tmp_path}: read without the files of test; an entry of datasets or" in lines[0]


@pytest.mark.parametrize("name", ["a.arrow", "a.feather", "a.parquet"])
@pytest.mark.parametrize("content", [b"", b"ARROW1", b"PAR1", b"FEA1" + bytes(20), b"x" * 100, bytes(100)])
def test_tables_that_are_none(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"expected an? (Arrow|Parquet) file, got one that cannot be read \(.*; write it"
    ):
        list(read_file(tmp_path / name, "text"))


@pytest.mark.parametrize("make", [pa.ipc.new_file, pa.ipc.new_stream])
def test_damaged_arrow_files(tmp_path, make):
    """Any damage gives rows or a line."""
    good = stream_of(texts(40), make)
    random = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(good[: random.integers(1, len(good))] if random.random() < 0.3 else good)
        for place in random.integers(0, len(damaged), 3):
            damaged[place] = random.integers(0, 256)
        (tmp_path / "a.arrow").write_bytes(damaged)
        try:
            list(read_file(tmp_path / "a.arrow", "text"))
        except ConfigError as error:
            assert "\n" not in str(error)
