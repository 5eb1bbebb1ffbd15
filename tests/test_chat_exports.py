"""The chat template that a model was trained with is in what is exported, and the tokens that end its answers.

That transformers' tokenizer formats conversations so is recorded by fixtures/check_chat_exports.py.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from commands import convert, generate
from test_adapters import save, theirs
from test_gguf_export import folder_of, tokenizer_json
from test_huggingface import config as config_of
from tokenizers import AddedToken, Tokenizer

from surojax import ConfigError, train
from surojax.data.chat_files import turn_ends
from surojax.data.templates import NAMES, Template, load_template
from surojax.data.tokenizer import ByteTokenizer, load_tokenizer
from surojax.exchange.export import encoded
from surojax.inference import model_folder

OLD = "{% for m in messages %}old {{ m.content }}{% endfor %}"
MINE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '<stop>' if m.role == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIAL += ["<|eot_id|>", "[INST]", "[/INST]", "<stop>"]
ENDS = {"chatml": "<|im_end|>", "gemma": "<end_of_turn>", "llama3": "<|eot_id|>", "mistral": "<|end|>", "": "<stop>"}
CHATS = json.loads((Path(__file__).parent / "fixtures" / "chat_reference.json").read_text(encoding="utf-8"))
OF_FAMILIES = {"granite4": "</s>", "kimi_k2": "<|im_end|>", "glm4_7": "<|user|>", "deepseek_v3": "</s>"}
OF_FAMILIES |= {"nemotron3": "<|im_end|>", "gemma4": "<turn|>"}


def chat_folder(path: Path, **said) -> Path:
    """A model's folder whose tokenizer has control tokens, and an old template in every place that one may be in."""
    folder = folder_of(path, "llama", template=OLD)
    tokenizer = Tokenizer.from_str(tokenizer_json())
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "chat_template.jinja").write_text(OLD)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": OLD}))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(OLD)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "temperature": 0.5} | said))
    (folder / "LICENSE").write_text("Of the source.")
    return folder


def template_of(tmp_path: Path, name: str) -> str:
    """The setting `chat_template` of a case: a name, or a file of its own."""
    (tmp_path / "mine.jinja").write_text(MINE)
    return name or str(tmp_path / "mine.jinja")


def chats(tmp_path: Path) -> Path:
    answered = lambda i: [{"role": "user", "content": f"the {i}"}, {"role": "assistant", "content": "cat"}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": answered(i)}) + "\n" for i in range(200)))
    return tmp_path / "chats.jsonl"


def chat_config(tmp_path: Path, folder: Path, name: str):
    """The resolved config of a run on conversations that are formatted by this template."""
    return config_of(folder, chat_template=template_of(tmp_path, name), data=str(chats(tmp_path)))


def text_of(name: str, tokenizer) -> str:
    template = load_template(name, tokenizer)
    assert template is not None
    return template.text


@pytest.mark.parametrize("name", ENDS)
def test_the_trained_template_and_its_stop_tokens_are_exported(tmp_path, name):
    """In every file that a reader may take a template from; the tokens that the source stops at stay."""
    folder = chat_folder(tmp_path / "in")
    c = chat_config(tmp_path, folder, name)
    config, files = model_folder.folder_files(c)
    tokenizer = load_tokenizer(str(folder))
    expected = text_of(c.chat_template, tokenizer)
    templates = {key: x for key, x in files.items() if "template" in key}
    assert templates == {"chat_template.jinja": expected.encode()}
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == expected
    assert files["LICENSE"] == b"Of the source."
    stop = tokenizer.encode(ENDS[name])
    assert len(stop) == 1
    said = json.loads(files["generation_config.json"])
    of_source = [1, config["eos_token_id"]]
    assert said == {"temperature": 0.5, "eos_token_id": list(dict.fromkeys([*of_source, int(stop[0])]))}
    assert OLD.encode() not in b"".join(files.values())
    read = model_folder.tokenizer_in(files, config)
    assert read.chat_template == expected and stop[0] in read.stop_ids


@pytest.mark.parametrize("name", ENDS)
def test_a_gguf_file_has_the_trained_template_and_its_end_of_turn(tmp_path, name):
    folder = chat_folder(tmp_path / "in")
    c = chat_config(tmp_path, folder, name)
    metadata, modelfile = convert.gguf_tokenizer_of(*model_folder.folder_files(c), tmp_path / "x.gguf")
    tokenizer = load_tokenizer(str(folder))
    assert metadata["tokenizer.chat_template"] == text_of(c.chat_template, tokenizer)
    stop = int(tokenizer.encode(ENDS[name])[0])
    role = "eos" if stop == tokenizer.eos_id else "eot"
    assert metadata[f"tokenizer.ggml.{role}_token_id"] == stop
    assert f'PARAMETER stop "{ENDS[name]}"\n' in modelfile
    assert ("TEMPLATE" in modelfile) == (name in ("chatml", "llama3"))


def test_a_run_that_keeps_the_tokenizers_template_stops_at_its_turns_too(tmp_path):
    """As base models are published: with a template, and a generation config that knows the end of a document only."""
    folder = chat_folder(tmp_path / "in")
    chatml = text_of("chatml", ByteTokenizer())
    (folder / "chat_template.jinja").write_text(chatml)
    _, files = model_folder.folder_files(config_of(folder))
    stop = int(load_tokenizer(str(folder)).encode("<|im_end|>")[0])
    assert json.loads(files["generation_config.json"])["eos_token_id"][-1] == stop
    assert files["chat_template.jinja"] == chatml.encode()
    assert "additional_chat_templates/tool_use.jinja" in files  # of the same tokenizer


def test_a_folder_that_is_converted_keeps_its_files(tmp_path):
    """Nothing was trained."""
    folder = chat_folder(tmp_path / "in")
    out = convert.convert(folder, tmp_path / "out")
    names = ["chat_template.jinja", "chat_template.json", "generation_config.json", "LICENSE", "tokenizer_config.json"]
    for name in [*names, "additional_chat_templates/tool_use.jinja"]:
        assert (out / name).read_bytes() == (folder / name).read_bytes(), name


def test_a_merged_model_has_its_adapters_template_and_tokenizer(tmp_path):
    """As TRL and runs of surojax write them beside an adapter; a template alone counts as well."""
    folder = chat_folder(tmp_path / "in")
    kept = {name: array for name, array in theirs("lora").items() if "lora_" in name}
    adapter = save(tmp_path / "adapter", "lora", kept, modules_to_save=None)
    (adapter / "chat_template.jinja").write_text(MINE)
    out = convert.merge(folder, [adapter], tmp_path / "alone")
    stop = int(load_tokenizer(str(folder)).encode("<stop>")[0])
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        assert MINE in (out / name).read_text() or encoded({"": MINE})[6:-4] in (out / name).read_bytes()
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"][-1] == stop
    assert not (out / "additional_chat_templates").exists()

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<new>", normalized=False, special=True)])
    (adapter / "tokenizer.json").write_text(tokenizer.to_str())
    (adapter / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<new>"}))
    (adapter / "chat_template.jinja").write_text(MINE.replace("<stop>", "<new>"))
    out = convert.merge(folder, [adapter], tmp_path / "with_tokenizer")
    new = tokenizer.token_to_id("<new>")
    assert (
        load_tokenizer(str(out)).eos_id
        == new
        in json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    )
    fields = gguf.GGUFReader(convert.merge(folder, [adapter], tmp_path / "x.gguf")).fields
    assert fields["tokenizer.ggml.eos_token_id"].contents() == new
    again = convert.merge(folder, [adapter], tmp_path / "own", tokenizer=str(folder))
    assert load_tokenizer(str(again)).eos == "<|end|>"

    tokenizer.add_special_tokens([f"<{i}>" for i in range(200)])
    (adapter / "tokenizer.json").write_text(tokenizer.to_str())
    with pytest.raises(
        ConfigError, match=r"^adapter: .*: expected a tokenizer of at most 384 tokens, as the model has"
    ):
        convert.merge(folder, [adapter], tmp_path / "larger")
    assert not (tmp_path / "larger").exists()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja: expected UTF-8 text"),
        ("tokenizer.json", b"{", r"adapter/tokenizer\.json: expected a Hugging Face tokenizer\.json"),
        ("adapter_config.json", b"[]", "adapter"),
    ],
)
def test_a_damaged_file_beside_an_adapter_is_refused(tmp_path, name, content, message):
    folder = chat_folder(tmp_path / "in")
    kept = {name: array for name, array in theirs("lora").items() if "lora_" in name}
    adapter = save(tmp_path / "adapter", "lora", kept, modules_to_save=None)
    (adapter / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        convert.merge(folder, [adapter], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "eos, expected",
    [(1, [1, 2, 266]), ([1, 266], [1, 266, 2]), (None, [2, 266]), ("</s>", [2, 266]), ([[1], 3, True], [3, 2, 266])],
)
def test_stop_tokens_of_the_source_stay(tmp_path, eos, expected):
    """Those that are token ids."""
    folder = chat_folder(tmp_path / "in", eos_token_id=eos)
    _, files = model_folder.folder_files(chat_config(tmp_path, folder, "chatml"))
    assert json.loads(files["generation_config.json"])["eos_token_id"] == expected


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff"])
def test_settings_beside_a_lone_tokenizer_that_are_damaged_are_refused(tmp_path, content):
    """`tokenizer` names the file, beside which others are copied."""
    folder = chat_folder(tmp_path / "in")
    c = chat_config(tmp_path, folder, "chatml")
    c.tokenizer = str(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^tokenizer_config\.json: expected a JSON object, got a file that is none"):
        model_folder.folder_files(c)


@pytest.mark.parametrize(
    "template, ends",
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", []),  # the end of the document only
        ("{% for m in messages %}<|im_start|>{{ m.content }}\n{% endfor %}", ["<|im_start|>"]),  # the next turn
        ("{% for m in messages %}{{ m.content }}<tool>{{ '<stop>' if loop.last else '<|im_end|>' }}{% endfor %}", None),
        ("{% for m in messages %}{{ m.content }}{{ '<stop>' if loop.last else '<|im_end|>' }}{% endfor %}", None),
        ("{{ raise_exception('never') }}", []),
        ("{{ messages[0].content }}", []),  # shows no answer
        ("{% for m in messages %}{{ m.content }}<|not_a_token|>{% endfor %}", []),
    ],
)
def test_which_tokens_end_an_answer(tmp_path, template, ends):
    tokenizer = load_tokenizer(str(chat_folder(tmp_path / "in")))
    ends = (["<tool>"] if "<tool>" in template else ["<stop>", "<|im_end|>"]) if ends is None else ends
    found = turn_ends(Template(template, "x"), tokenizer)
    assert [tokenizer.token_text(token) for token in found] == ends


@pytest.mark.parametrize("family, end", OF_FAMILIES.items())
def test_answers_end_as_their_family_ends_them(tmp_path, family, end):
    """Turns in the style of a family, as fixtures/make_chat_reference.py had transformers render them."""
    (tmp_path / "tokenizer.json").write_text(CHATS["tokenizers"]["of_families"]["tokenizer"])
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    found = turn_ends(Template(CHATS["templates"][family], "x", bos="<s>", eos="</s>"), tokenizer)
    assert [tokenizer.token_text(token) for token in found] == [end]


def test_stop_tokens_are_added_once():
    """A file that has them is left as it is, and a classifier stops at none."""
    files = {model_folder.GENERATION: b'{"eos_token_id":   [1, 2]}'}
    assert model_folder.with_stops(files, {}, [2]) == files
    classifier = {"architectures": ["LlamaForSequenceClassification"]}
    assert model_folder.with_stops(files, classifier, [3]) == files
    added = model_folder.with_stops(files, {}, [3])[model_folder.GENERATION]
    assert json.loads(added) == {"eos_token_id": [1, 2, 3]}


def test_bytes_have_no_end_of_turn():
    for name in NAMES:
        assert turn_ends(load_template(name, ByteTokenizer()), ByteTokenizer()) == []


def run_config(tmp_path: Path, folder: Path, **changes):
    c = chat_config(tmp_path, folder, "")
    c.update({"output_dir": str(tmp_path / "run"), "sequence_len": 64, "max_steps": 1})
    c.update({"data_cache": str(tmp_path / "cache"), "sample_tokens": 0, "eval_batches": 1} | changes)
    return c


def test_a_run_exports_the_template_that_it_was_trained_with(tmp_path):
    """Not what its file says later, nor that of the tokenizer's folder; and the model stops at its end of turn."""
    folder = chat_folder(tmp_path / "in")
    c = run_config(tmp_path, folder)
    train(c)
    (tmp_path / "mine.jinja").write_text("changed")
    out = convert.convert(tmp_path / "run", tmp_path / "out")
    assert (out / "chat_template.jinja").read_text() == MINE
    stop = int(load_tokenizer(str(folder)).encode("<stop>")[0])
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [1, 2, stop]
    for path in (tmp_path / "run", out):
        trained = generate.load_trained(path)
        assert trained.template is not None and trained.template.text == MINE
        assert stop in trained.tokenizer.stop_ids
    fields = gguf.GGUFReader(convert.convert(tmp_path / "run", tmp_path / "x.gguf")).fields
    assert fields["tokenizer.chat_template"].contents() == MINE
    (tmp_path / "mine.jinja").unlink()
    assert (convert.convert(tmp_path / "run", tmp_path / "again") / "chat_template.jinja").read_text() == MINE


@pytest.mark.full
def test_an_adapter_has_the_template_that_it_was_trained_with(tmp_path):
    folder = chat_folder(tmp_path / "in")
    train(run_config(tmp_path, folder, lora=True))
    adapter = tmp_path / "run" / "adapter"
    assert (adapter / "chat_template.jinja").read_text() == MINE
    assert (adapter / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    out = convert.merge(folder, [adapter], tmp_path / "out")
    assert (out / "chat_template.jinja").read_text() == MINE
    np.testing.assert_equal(load_tokenizer(str(out)).chat_template, MINE)
