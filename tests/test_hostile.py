"""Files that someone made to harm who reads them, and sizes that no model has: refused with one line, in seconds.

tests/test_fuzz.py has what is made at random.
"""

import json
import os
import random
import resource
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import test_adapters
import test_huggingface
from commands import convert, evaluate
from small import CONFIG

from surojax import limited
from surojax.config import checks, flags
from surojax.config.fields import default_config
from surojax.data import datasets, readers, texts
from surojax.data.conversations import Conversation
from surojax.data.data_rows import BadRow, DataRow, NotARow
from surojax.data.datasets import parse_dataset
from surojax.data.examples import Encoder, Example
from surojax.data.files import find_files
from surojax.data.pieces import conversation_pieces
from surojax.data.rendering import TemplateProgram
from surojax.data.templates import Template, load_template
from surojax.data.tokenizer import ByteTokenizer, load_tokenizer
from surojax.errors import LONGEST, ConfigError
from surojax.exchange import peft
from surojax.exchange.expert_tensors import ExpertTensor
from surojax.exchange.gguf_file import FAMILIES, Contents
from surojax.exchange.gguf_metadata import _filled
from surojax.exchange.joined_rows import RowsOf
from surojax.exchange.model_tensors import INDEX, SINGLE, Weights
from surojax.exchange.shards import Shard
from surojax.families.family import ExpertFiles
from surojax.inference.forward import check_cache_room
from surojax.inference.sample import check_options
from surojax.inference.trained_model import load_trained
from surojax.models import decoder_model
from surojax.run import on_disk
from surojax.untrusted import MAX_DEPTH, RepeatedKey, expanded, parse_first, parse_json, read_bytes

DEEP = 100_000
NESTED = "[" * DEEP + "]" * DEEP
TRANSPOSED = ExpertFiles(transposed=True)

# -- Chat templates ---------------------------------------------------------------------------------------------------

FOR_EVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}" + (
    "{% endfor %}{% endfor %}"
)
LARGE = {
    "a product": "{{ 'x' * 3000000000 }}",
    "a filter": "{{ 'x' | center(3000000000) }}",
    "a format": "{{ '%3000000000d' % 1 }}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
}
DEEP_TEMPLATES = {
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "brackets": "{{ " + "(" * DEEP + "1" + ")" * DEEP + " }}",
    "blocks": "{% if 1 %}" * 500 + "{% endif %}" * 500,
}


@pytest.fixture
def half_a_second(monkeypatch):
    """Half a second of processor time for an item."""
    monkeypatch.setattr(limited, "SECONDS", 0.5)


@pytest.mark.usefixtures("half_a_second")
def test_a_template_that_never_ends():
    template = Template(FOR_EVER, "t.jinja")
    assert not template.shows_tools
    with pytest.raises(ConfigError, match=r"^t\.jinja: expected a chat template .* got more than 0\.5 seconds of proc"):
        template.render([])
    assert Template("{{ 1 + 1 }}", "").render([]) == "2"  # by a new child


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_a_template_that_takes_gigabytes(text):
    """Also one that could be computed when it is compiled; this process takes none of it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        ConfigError, match=r"^t\.jinja: expected a chat template .* 1024 MiB, got more memory than that"
    ):
        Template(text, "t.jinja").render([])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


@pytest.mark.parametrize("text", DEEP_TEMPLATES.values(), ids=DEEP_TEMPLATES)
def test_a_template_that_recurses(text, tmp_path):
    (tmp_path / "t.jinja").write_text(text)
    with pytest.raises((ConfigError, NotARow), match="recursion depth") as caught:
        template = load_template(str(tmp_path / "t.jinja"), ByteTokenizer())
        assert template is not None
        template.render([])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.usefixtures("half_a_second")
def test_a_row_that_a_template_cannot_end_is_named():
    """Its limits are of each row: those before it are rendered."""
    text = "{% for m in messages %}{{ m.content }}{% if 'x' in m.content %}" + FOR_EVER + "{% endif %}{% endfor %}"
    encoder = Encoder(parse_dataset({"path": "a", "type": "conversation"}), ByteTokenizer(), Template(text, "t.jinja"))
    rows = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": said}] for said in ("a", "b", "x")]
    with pytest.raises(ConfigError, match=r"got more than 0\.5 seconds of processor time for a\.jsonl:3;"):
        encoder.encode([DataRow({"messages": row}, f"a.jsonl:{i}") for i, row in enumerate(rows, start=1)])
    assert all(isinstance(one, Example) for one in encoder.encode([DataRow({"messages": rows[0]}, "")] * 3))


def test_conversations_are_rendered_as_without_limits():
    """Also what a child's answer in JSON could change: half a surrogate pair, other characters, values of tools."""
    chatml = load_template("chatml", ByteTokenizer())
    assert chatml is not None
    program = TemplateProgram(chatml.text, chatml.source, chatml.bos, chatml.eos)
    for content in ("plain", "é\u2028\U0001f600", "\ud800", "a\r\nb\0c", "</s>"):
        talk = [{"role": "user", "content": content}, {"role": "assistant", "content": f"{content}!"}] * 2
        conversation = Conversation(talk, [{"name": "look", "default": 1.5e300}])
        assert chatml.pieces([conversation], "assistant") == [conversation_pieces(conversation, program, "assistant")]
        if content == "\ud800":  # a prompt, which no tokenizer reads
            with pytest.raises(NotARow, match="half a surrogate pair"):
                chatml.render(talk)
        else:
            assert chatml.render(talk) == program.render(talk)


def test_one_child_serves_all_calls():
    Template("{{ 1 }}", "").render([])
    child = limited._child
    assert child is not None
    Template("{{ 2 }}", "").render([])
    assert limited._child is child
    child.process.kill()  # as a machine without memory does
    child.process.wait()
    assert Template("{{ 3 }}", "").render([]) == "3"


# -- JSON, pipes and files elsewhere ----------------------------------------------------------------------------------


def in_every_file(folder: Path) -> dict[str, tuple]:
    """{file: (what reads it, its start in JSON)} of a model, an adapter and questions."""
    model = test_huggingface.write(folder / "model", "llama", shards=2)
    test_huggingface.save_tokenizer(model / "tokenizer.json")
    (model / "tokenizer_config.json").write_text("{}")
    base = convert.open_model(model).model
    adapter = test_adapters.save(folder / "adapter", "lora")
    (folder / "questions.jsonl").write_text("{}")
    read_model = lambda: convert.open_model(model)
    return {
        "model/config.json": read_model,
        f"model/{INDEX}": read_model,
        "model/model-00001-of-00002.safetensors": read_model,
        "model/tokenizer.json": lambda: load_tokenizer(str(model)),
        "model/tokenizer_config.json": lambda: load_tokenizer(str(model)),
        "adapter/adapter_config.json": lambda: peft.read_adapter(adapter, base),
        "adapter/adapter_model.safetensors": lambda: peft.read_adapter(adapter, base),
        "questions.jsonl": lambda: evaluate.read_questions(folder / "questions.jsonl"),
    }  # fmt: skip


def test_json_that_is_nested_and_pipes_in_every_file(tmp_path):
    for name, read in in_every_file(tmp_path).items():
        file = tmp_path / name
        content = file.read_bytes()
        nested = ('{"a": ' + NESTED + "}").encode()
        start = len(nested).to_bytes(8, "little") if name.endswith("safetensors") else b""
        file.write_bytes(start + nested)
        with pytest.raises(ConfigError, match=r"nested deeper|tokenizers library cannot read") as caught:
            read()
        assert len(str(caught.value)) <= LONGEST
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(ConfigError, match=r"pipe or a device|index\.json too|got neither|which holds none"):
            read()  # which would wait for ever
        file.unlink()
        file.write_bytes(content)


def test_the_depth_of_json():
    nested = lambda depth: "[" * depth + "]" * depth
    assert parse_json(nested(MAX_DEPTH)) and parse_json(f'{{"a": {nested(MAX_DEPTH - 1)}}}')
    assert parse_json(json.dumps({"a": "[" * DEEP})) == {"a": "[" * DEEP}
    for text in (nested(MAX_DEPTH + 1), f'{{"a": {nested(MAX_DEPTH)}}}', NESTED, '{"a":' * DEEP):
        for kind in (text, text.encode()):
            with pytest.raises(ValueError, match="nested deeper than 100"):
                parse_json(kind)
    for text in (nested(MAX_DEPTH), nested(MAX_DEPTH) + nested(MAX_DEPTH)):
        assert parse_first(text, 0)[1] == 2 * MAX_DEPTH
    with pytest.raises(ValueError, match="nested deeper than 100"):
        parse_first(nested(MAX_DEPTH + 1), 0)


def test_a_file_is_read_up_to_its_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path / "a", 5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes, where at most 4 are read"):
        read_bytes(tmp_path / "a", 4)
    (tmp_path / "a").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(OSError, match="a pointer of Git LFS; run git lfs pull in its folder"):
        read_bytes(tmp_path / "a")


@pytest.mark.parametrize("path", ["a\0b", "a" * 300], ids=["null", "long"])
def test_a_path_that_no_file_can_have(path):
    with pytest.raises(ConfigError, match=r"^expected a path, got '.*; correct it$"):
        expanded(path)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "..", "", "a/b.safetensors"])
def test_an_index_names_files_of_its_folder(tmp_path, name):
    model = test_huggingface.write(tmp_path / "model", "llama", shards=2)
    test_huggingface.write(tmp_path / "other", "llama")
    said = json.loads((model / INDEX).read_text())
    said["weight_map"]["lm_head.weight"] = name
    (model / INDEX).write_text(json.dumps(said))
    with pytest.raises(ConfigError, match="expected names of files in its folder, got"):
        Weights(model)


@pytest.mark.parametrize("spans", [[(0, 4), (0, 4)], [(0, 4), (2, 6)], [(0, 4), (8, 12)], [(4, 8)]])
def test_tensors_that_overlap_or_leave_holes(tmp_path, spans):
    """As the safetensors library refuses them."""
    said = {f"t{i}": {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]} for i, (a, b) in enumerate(spans)}
    header = json.dumps(said).encode()
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(max(b for _, b in spans)))
    with pytest.raises(ValueError, match=r"begins at byte .* end at"):
        Shard(tmp_path / SINGLE)


@pytest.mark.parametrize("template", [["a"], [None], [{"name": []}], [{"name": "default", "template": 1}], 1])
def test_a_chat_template_that_is_no_text(tmp_path, template):
    test_huggingface.save_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(str(tmp_path)).chat_template == ""


def test_a_stop_token_that_no_tokenizer_has(tmp_path):
    test_huggingface.save_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 2**64, 10**30, 1]}))
    assert load_tokenizer(str(tmp_path)).eos_id == 1


@pytest.mark.parametrize("stored", [(), (4,), (4, 7, 6)])
def test_experts_in_one_tensor_without_two_halves(stored):
    """One that has the shape of a half is none, as [4, 7, 6] if an expert has seven outputs of gate."""
    half = ExpertTensor(("mlp.experts.gate_up_proj",), half=0)
    assert half.shape((4, 8, 6)) == (4, 4, 6) and half.shape((4, 8)) == (4, 4)
    for tensor, shape in ((half, stored), (half._replace(files=TRANSPOSED), stored[:1] + stored[:0:-1])):
        with pytest.raises(
            ConfigError, match=r"gate_up_proj: expected a matrix of each expert, with as many outputs of"
        ):
            tensor.shape(shape)


def test_rows_that_are_no_equal_parts():
    part = RowsOf("conv.in_proj.weight", part=1, parts=3)
    assert part.shape((12, 4)) == (4, 4)
    # An axis of one channel is dropped (taps of a convolution are stored [channels, 1, taps]), but not the only one.
    assert [part.shape(x) for x in ((12, 1, 2), (12, 2, 5), (12, 1))] == [(4, 2), (4, 2, 5), (4, 1)]
    for stored in ((4, 4), ()):
        with pytest.raises(ConfigError, match=r"conv\.in_proj\.weight: expected 3 equal parts along axis 0, got \["):
            part.shape(stored)


@pytest.mark.parametrize("sizes", [(8, 4), (0, 0), ((1, 8), 8), (8, 8)])
def test_vectors_of_one_number_have_the_size_of_a_head(sizes):
    """In GGUF files of Muse-Glimmer, by the layers' numbers; of right sizes, one number of all is another."""
    family, names = FAMILIES["muse-glimmer"], ("blk.{l}.attn_q_norm.weight", "blk.{l}.attn_k_norm.weight")
    numbers = {name.format(l=l): np.ones(8, np.float32) for name in names for l in range(2)}
    contents = Contents(Path("x.gguf"), {}, dict.fromkeys(numbers))  # type: ignore[arg-type]
    assert _filled(contents, family, 2, 8, numbers.__getitem__) == {"qk_scale_factor": 1.0}
    numbers |= {f"blk.{l}.attn_q_norm.weight": np.ones(size, np.float32) for l, size in enumerate(sizes)}
    numbers["blk.1.attn_q_norm.weight"][-1:] = 2
    with pytest.raises(ConfigError, match=r"expected one number in every blk\.N\.attn_q_norm\.weight, got others"):
        _filled(contents, family, 2, 8, numbers.__getitem__)


# -- Adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("half_a_second")
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"target_modules": r"(.*.*.*.*.*.*.*.*)*!"}, r"got one that takes more than 0\.5 seconds of processor time"),
        ({"target_modules": "(q_proj"}, r"expected a regular expression, got '\(q_proj' \(missing \)"),
        ({"target_modules": "x{99999999999999999999}"}, "expected a regular expression, got"),
        ({"use_rslora": "false"}, "use_rslora: expected true or false, got 'false'"),
        ({"use_dora": 1}, "use_dora: expected true or false, got 1"),
        ({"lora_alpha": float("inf")}, "lora_alpha: expected a number more than 0"),
        ({"lora_alpha": 10**400}, "lora_alpha: expected a number more than 0"),
        ({"layers_to_transform": 0}, "layers_to_transform: expected it off, got 0; nothing else"),
        ({"r": 10**9}, "r: expected a whole number from 1 to 65,536, got 1000000000"),
        ({"target_modules": ["q_proj"] * 10**6 + ["x"]}, "target_modules: expected modules among"),
    ],
)
def test_adapters_that_are_refused(tmp_path, changes, message):
    model = test_adapters.base_of(tmp_path, "lora").model
    with pytest.raises(ConfigError, match=message) as caught:
        peft.read_adapter(test_adapters.save(tmp_path / "adapter", "lora", **changes), model)
    assert len(str(caught.value)) <= LONGEST


def test_settings_that_are_a_word_where_true_or_false_belongs(tmp_path):
    for key in ("tie_word_embeddings", "use_sliding_window"):
        model = test_huggingface.write(tmp_path / key, "qwen2", **{key: "false"})
        with pytest.raises(ConfigError, match=f"{key}: expected true or false, got 'false'"):
            convert.open_model(model)


# -- Data -------------------------------------------------------------------------------------------------------------


def rows_of(path: Path) -> list:
    return list(datasets.read_dataset(parse_dataset({"path": str(path), "type": "text"})))


def test_a_line_that_is_too_long_is_one_bad_row(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONGEST", 1000)
    long = json.dumps({"text": "x" * 5000})
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n{long}\n{{"text": "b"}}\n{{"text": "\xe9')
    first, bad, after, broken = rows_of(tmp_path / "a.jsonl")
    assert first.record == {"text": "a"} and after.record == {"text": "b"} and after.where.endswith(":3")
    assert isinstance(bad, BadRow) and bad.where.endswith(":2") and "rows of at most 64 MiB, got a longer" in bad.reason
    assert isinstance(broken, BadRow) and broken.where.endswith(":4")
    monkeypatch.setattr(texts, "READ", 100)
    (tmp_path / "a.json").write_text(f'[{{"text": "a"}}, {long}]')
    with pytest.raises(ConfigError, match="rows of at most 64 MiB, got a longer one, after 1 rows"):
        rows_of(tmp_path / "a.json")
    (tmp_path / "a.csv").write_text(f'text\na\n"{"x" * 5000}"\n')
    with pytest.raises(ConfigError, match=r"a\.csv:3: expected rows of at most 64 MiB"):
        rows_of(tmp_path / "a.csv")


def value(r: random.Random, depth: int = 0):
    """A random JSON value."""
    kind = r.randrange(6 if depth < 4 else 4)
    if kind == 0:
        return r.choice([None, True, 0, -1.5e-7, 123456789, 1e300])
    if kind < 4:
        return "".join(r.choice('a\\"é\n]},[{:') for _ in range(r.randrange(20)))
    if kind == 4:
        return [value(r, depth + 1) for _ in range(r.randrange(4))]
    return {str(i): value(r, depth + 1) for i in range(r.randrange(4))}


def test_a_json_list_in_parts_is_what_it_is_in_one():
    """Cut anywhere, spoiled or not: as the json library has it, but for elements that repeat a key."""
    twice = "a key is there twice"

    def unique(pairs):
        return dict(pairs) if len(dict(pairs)) == len(pairs) else twice

    r = random.Random(0)
    for _ in range(400):
        expected = [value(r) for _ in range(r.randrange(5))]
        text = json.dumps(expected, indent=r.choice((None, 1)), ensure_ascii=r.random() < 0.5)
        if r.random() < 0.5:
            at = r.randrange(1, len(text))
            text = text[:at] + r.choice(("", "x", "]", ",", "1")) + text[at + 1 :]
        cuts = sorted(r.randrange(1, len(text) + 1) for _ in range(r.randrange(6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        try:
            expected = json.loads(text, object_pairs_hook=unique)
        except ValueError:
            with pytest.raises(ValueError):
                list(readers._elements(iter(pieces)))
        else:
            found = list(readers._elements(iter(pieces)))
            assert [twice in repr(x) for x in expected] == [isinstance(x, RepeatedKey) for x in found]
            assert [x for x in expected if twice not in repr(x)] == [x for x in found if not isinstance(x, RepeatedKey)]


def test_parquet_that_unfolds(tmp_path):
    """Some hundred bytes for a billion rows, or for gigabytes."""

    def write(text: str, rows: int) -> Path:
        table = pyarrow.table({"text": pyarrow.DictionaryArray.from_arrays(np.zeros(rows, np.int32), [text])})
        pyarrow.parquet.write_table(
            table, tmp_path / "a.parquet", compression="zstd", dictionary_pagesize_limit=1 << 30
        )
        return tmp_path / "a.parquet"

    assert len(rows_of(write("x" * 1000, 100))) == 100
    for text, rows in (("x" * 1000, 300_000), ("x" * (18 << 20), 800)):
        path = write(text, rows)
        assert path.stat().st_size < 50_000
        with pytest.raises(ConfigError, match=rf"expected at most a row for each of its .* got {rows:,} rows of"):
            rows_of(path)


def test_parquet_with_bytes_that_are_no_text(tmp_path):
    column = pyarrow.array([b"a", b"\x80", b"c"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    first, bad, last = rows_of(tmp_path / "a.parquet")
    assert (first.record, last.record) == ({"text": "a"}, {"text": "c"})
    assert isinstance(bad, BadRow) and bad.where.endswith("row 2") and "can't decode byte 0x80" in bad.reason


def test_links_that_lead_back(tmp_path):
    """2^40 paths otherwise; and a link to itself is no file."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.txt").write_text("one")
    for name in ("up", "again"):
        (tmp_path / "a" / name).symlink_to("..", target_is_directory=True)
    (tmp_path / "self.txt").symlink_to("self.txt")
    assert find_files(str(tmp_path / "**/1.txt"), (".txt",)) == [tmp_path / "a" / "1.txt"]
    with pytest.raises(ConfigError, match="Too many levels of symbolic links"):
        rows_of(tmp_path)


# -- Sizes ------------------------------------------------------------------------------------------------------------

SIZES = {
    "num_hidden_layers": 10**6,
    "hidden_size": 10**9,
    "vocab_size": 2**40,
    "head_dim": 10**9,
    "num_attention_heads": 10**7,
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_no_model_has(tmp_path, name):
    begin = time.process_time()
    model = test_huggingface.write(tmp_path / "model", "llama", **{name: SIZES[name]})
    with pytest.raises(ConfigError, match=rf"config\.json: {name}: expected at most [\d,]+, as models have, got"):
        convert.open_model(model)
    c = default_config()
    c.model[name] = min(SIZES[name], 2**31 - 1)
    with pytest.raises(ConfigError, match=rf"^model\.{name}: expected at most [\d,]+, as models have, got"):
        checks.check(c)
    assert time.process_time() - begin < 2


def test_layers_before_the_first_with_a_window(tmp_path):
    """A number below 0 is no longer a list of as many layers."""
    changes = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": -(10**9), "layer_types": "absent"}
    test_huggingface.write(tmp_path / "model", "qwen2", **changes)
    assert test_huggingface.config(tmp_path / "model").model.sliding_window == 8


def test_numbers_and_names_that_are_too_long(tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint: expected the fields of this version, .* too large"):
        checks.restored_config(default_config().to_dict() | {"learning_rate": 10**400})
    for read in (flags.load_config, convert.open_model, load_trained, on_disk.find):
        with pytest.raises(ConfigError, match=r"expected a path, got 'aaa.* \(File name too long\); correct it"):
            read("a" * 5000)


def test_rows_of_a_data_set():
    for samples in (10**30, 2**63, -1):
        with pytest.raises(ConfigError, match=r"samples: expected a number of rows below 2\^48, 0 for all, got"):
            parse_dataset({"path": "a", "samples": samples})


def test_what_is_sampled():
    for options, message in (
        ((10**12, 1.0, 1.0), "max_tokens: expected a whole number from 0 to 16,777,216, got 1000000000000"),
        ((-1, 1.0, 1.0), "max_tokens: expected a whole number from 0 to 16,777,216, got -1"),
        ((1, float("nan"), 1.0), "temperature: expected a number, 0 or more, got nan"),
        ((1, -1.0, 1.0), "temperature: expected a number, 0 or more, got -1.0"),
        ((1, 1.0, 0.0), "top_p: expected a number above 0, 1 at most, got 0.0"),
        *(((1, 1.0, 1.0, seed), r"seed: expected a whole number from 0 to 2\^31 - 1") for seed in (2**31, 10**30, -1)),
    ):
        with pytest.raises(ConfigError, match=message):
            check_options(*options)


def test_texts_that_do_not_fit_memory():
    model = decoder_model.build(CONFIG)
    check_cache_room(model, 1, 2000, 2200)
    for sizes in ((1, 200_000, 200_200), (1, 1, 10**9), (64, 100_000)):
        with pytest.raises(ValueError, match=r"expected texts whose attention scores and cache fit the .* shorten"):
            check_cache_room(model, *sizes)


@pytest.mark.parametrize("longer", (0, 1, 1000))
def test_a_message_is_a_line_with_its_beginning_and_its_end(longer):
    message = "a: expected b, got " + "c" * (LONGEST + longer - 29) + "; lower\n it"
    found = str(ConfigError(message))
    assert len(found) in (LONGEST - 1, LONGEST) and (" ... " in found) == (longer > 0)
    assert found.startswith("a: expected b, got c") and found.endswith("c; lower it")
