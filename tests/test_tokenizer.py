"""Tokenizers: what goes in comes out, nothing is cut or added, and every bad file is one clear line."""

import json
import subprocess
import sys
import types

import numpy as np
import pytest

from surojax.data.data_rows import DataRow
from surojax.data.datasets import Dataset
from surojax.data.examples import Encoder, Example
from surojax.data.templates import Template
from surojax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer
from surojax.data.tokenizer_files import TokenizerFiles
from surojax.errors import ConfigError

TEXT = "def greet(name):\r\n\treturn f'Grüße, {name} 👋🏽'  # 你好\n\x00"


def save_bpe(path, *, special=("<unk>", "<s>", "</s>"), vocab_size=270, prepare=lambda tokenizer: None):
    """A tiny byte-level BPE trained here; `prepare` may spoil it before it is saved."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the dog sat on the log"] * 20, trainer)
    prepare(tokenizer)
    tokenizer.save(str(path))
    return path


def test_bytes_round_trip_and_ids():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.int32 and ids.tolist() == list(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.name) == (257, 256, "bytes")
    assert tokenizer.encode("").shape == (0,)
    for one, batched in zip(("a", "", "ü"), tokenizer.encode_batch(["a", "", "ü"]), strict=True):
        np.testing.assert_array_equal(batched, tokenizer.encode(one))


def test_bytes_decode_leaves_out_eos_and_padded_vocabulary_and_survives_broken_utf8():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([104, 256, 105, 257, 383, -1]) == "hi"
    assert tokenizer.decode(np.array([0xC3, 104], np.int64)) == "\ufffdh"  # a sample may stop inside a character
    assert tokenizer.decode([]) == ""


@pytest.fixture(scope="module")
def bpe_file(tmp_path_factory):
    return save_bpe(tmp_path_factory.mktemp("bpe") / "tokenizer.json")


def test_hugging_face_round_trip(bpe_file):
    tokenizer = load_tokenizer(str(bpe_file))
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.int32 and tokenizer.decode(ids) == TEXT
    assert len(tokenizer.encode("the cat sat")) < len("the cat sat")  # merges are used
    assert ids.max() < tokenizer.vocab_size == 270
    assert tokenizer.eos_id == 2
    texts = ["the cat", "", "sat on ü"]
    for text, batched in zip(texts, tokenizer.encode_batch(texts), strict=True):
        np.testing.assert_array_equal(batched, tokenizer.encode(text))


def test_half_a_surrogate_pair_is_a_value_error_of_both(bpe_file):
    for tokenizer in (ByteTokenizer(), load_tokenizer(str(bpe_file))):
        with pytest.raises(UnicodeEncodeError):
            tokenizer.encode("a \ud83d")


def test_hugging_face_decode_leaves_out_special_and_unknown_ids(bpe_file):
    tokenizer = load_tokenizer(str(bpe_file))
    ids = tokenizer.encode("the cat").tolist()
    assert tokenizer.decode([1, *ids, tokenizer.eos_id, 270, 100_000, -1]) == "the cat"


def test_hugging_face_name_is_the_content(bpe_file, tmp_path):
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(bpe_file.read_bytes())
    assert load_tokenizer(str(copy)).name == load_tokenizer(str(bpe_file)).name
    assert load_tokenizer(str(tmp_path)).name == load_tokenizer(str(copy)).name  # the folder that holds it
    other = save_bpe(tmp_path / "other.json", vocab_size=265)
    assert load_tokenizer(str(other)).name != load_tokenizer(str(copy)).name
    assert load_tokenizer(str(other)).name.startswith("tokenizer.json:")


def test_hugging_face_stored_truncation_padding_and_template_are_not_applied(bpe_file, tmp_path):
    """Published files carry the settings of their last use; applied, they would cut the corpus without a word."""
    from tokenizers import processors

    def spoil(tokenizer):
        tokenizer.enable_truncation(max_length=4)
        tokenizer.enable_padding(length=400)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )

    spoilt = load_tokenizer(str(save_bpe(tmp_path / "tokenizer.json", prepare=spoil)))
    np.testing.assert_array_equal(spoilt.encode(TEXT), load_tokenizer(str(bpe_file)).encode(TEXT))


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>"])
def test_hugging_face_eos_names(tmp_path, name):
    assert load_tokenizer(str(save_bpe(tmp_path / "tokenizer.json", special=("<pad>", name)))).eos_id == 1


def test_hugging_face_eos_prefers_special_tokens_over_ordinary_ones(tmp_path):
    path = save_bpe(tmp_path / "tokenizer.json", special=("<|im_end|>",), prepare=lambda t: t.add_tokens(["</s>"]))
    assert load_tokenizer(str(path)).eos_id == 0


def test_vocab_size_covers_ids_with_holes(tmp_path):
    path = save_bpe(tmp_path / "tokenizer.json")
    content = json.loads(path.read_text())
    content["model"]["vocab"]["far away"] = 999
    path.write_text(json.dumps(content))
    assert load_tokenizer(str(path)).vocab_size == 1000


def error_of(spec) -> str:
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(str(spec))
    message = str(caught.value)
    assert "\n" not in message and "expected" in message and "got" in message
    return message


def test_errors(tmp_path):
    assert "'bytes'" in error_of("byte")
    assert "''" in error_of("")
    assert "nowhere" in error_of(tmp_path / "nowhere" / "tokenizer.json")
    assert "without that file" in error_of(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x00\x01")
    assert "save_pretrained" in error_of(tmp_path / "tokenizer.model")
    for name, content in {
        "no.json": b"{",
        "other.json": b'{"a": 1}',
        "binary.json": b"\xff\xfe",
        "empty.json": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
        assert name in error_of(tmp_path / name)
    no_eos = error_of(save_bpe(tmp_path / "tokenizer.json", special=("<unk>",)))
    assert "end-of-sequence" in no_eos and "</s>" in no_eos and "add_special_tokens" in no_eos
    (tmp_path / "model" / "tokenizer.json").mkdir(parents=True)
    assert "readable" in error_of(tmp_path / "model")


def test_both_are_tokenizers_and_bytes_need_no_library(bpe_file):
    both: list[Tokenizer] = [
        ByteTokenizer(),
        HuggingFaceTokenizer(TokenizerFiles(bpe_file.read_text()), ""),
    ]  # pyright checks the protocol here
    assert all(0 <= tokenizer.eos_id < tokenizer.vocab_size for tokenizer in both)
    code = (
        "import sys; from surojax.data.tokenizer import load_tokenizer; load_tokenizer('bytes'); "
        "assert 'tokenizers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- The files of a model's folder ------------------------------------------------------------------------------------


def save_folder(folder, files, special=("<unk>", "<s>", "</s>", "<|im_end|>", "<|eot_id|>"), prepare=lambda t: None):
    """A model's folder with a tokenizer and these files: text, or what is written as JSON."""
    folder.mkdir()
    save_bpe(folder / "tokenizer.json", special=special, prepare=prepare)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(folder)


CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"


@pytest.mark.parametrize(
    "files, eos",
    [
        ({}, 2),  # </s>, by its name
        ({CONFIG: {"eos_token": "<|im_end|>"}}, 3),
        ({CONFIG: {"eos_token": {"content": "<|im_end|>", "special": True}}}, 3),
        ({CONFIG: {"eos_token": None}, "config.json": {"eos_token_id": 4}}, 4),
        ({"config.json": {"eos_token_id": [4, 3]}}, 4),
        ({GENERATION: {"eos_token_id": 3}}, 3),
        ({CONFIG: {"eos_token": "<|eot_id|>"}, GENERATION: {"eos_token_id": 3}, "config.json": {"eos_token_id": 2}}, 4),
        ({"special_tokens_map.json": {"eos_token": "<|im_end|>"}}, 3),
        # transformers reads the map after the settings, unless these list the added tokens.
        ({"special_tokens_map.json": {"eos_token": "<|im_end|>"}, CONFIG: {"eos_token": "<|eot_id|>"}}, 3),
        (
            {
                "special_tokens_map.json": {"eos_token": "<|im_end|>"},
                CONFIG: {"eos_token": "<|eot_id|>", "added_tokens_decoder": {"4": {"content": "<|eot_id|>"}}},
            },
            4,
        ),
        ({GENERATION: {"eos_token_id": 50_000}}, 2),  # a row that pads the embedding
    ],
)
def test_eos_is_what_the_files_say(tmp_path, files, eos):
    tokenizer = load_tokenizer(save_folder(tmp_path / "model", files))
    assert tokenizer.eos_id == eos and tokenizer.eos == ["<unk>", "<s>", "</s>", "<|im_end|>", "<|eot_id|>"][eos]
    lone = load_tokenizer(str(tmp_path / "model" / "tokenizer.json"))
    assert lone.name == tokenizer.name and lone.eos_id == 2  # as before the other files were read


def test_tokens_that_only_the_settings_have_are_added(tmp_path):
    """As AutoTokenizer of transformers 5.24 does: the ids are its ids."""
    lone = load_tokenizer(save_folder(tmp_path / "lone", {}))
    size = lone.vocab_size
    special = {"content": "<tool>", "special": True, "normalized": False}
    added = {"4": {"content": "<|eot_id|>"}, str(size): special, str(size + 1): {"content": "greet"}}
    backwards = dict(reversed(added.items()))  # ids count, their order does not
    both = load_tokenizer(save_folder(tmp_path / "both", {CONFIG: {"added_tokens_decoder": backwards}}))
    assert both.encode("<tool>greet").tolist() == [size, size + 1] and both.vocab_size == size + 2
    assert both.name != lone.name and size not in lone.encode("<tool>greet")
    for i, bad in enumerate(
        ({str(size + 7): special}, {"x": special}, {"9": "<tool>"}, [special], {"9": {"content": 5}})
    ):
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json") as error:
            load_tokenizer(save_folder(tmp_path / str(i), {CONFIG: {"added_tokens_decoder": bad}}))
        assert "\n" not in str(error.value)


def test_answers_end_with_eos_and_with_ends_of_turns(tmp_path):
    plain = load_tokenizer(save_folder(tmp_path / "plain", {}, special=("</s>", "<a>", "<b>")))
    assert plain.stop_ids == {0}
    ordinary = lambda t: t.add_tokens(["<|im_end|>"])  # not a special one: a text may spell it
    assert load_tokenizer(save_folder(tmp_path / "o", {}, special=("</s>",), prepare=ordinary)).stop_ids == {0}
    listed = {GENERATION: {"eos_token_id": [1, 2]}, "config.json": {"eos_token_id": 0}}
    assert load_tokenizer(save_folder(tmp_path / "listed", listed, special=("</s>", "<a>", "<b>"))).stop_ids == {
        0,
        1,
        2,
    }
    assert load_tokenizer(save_folder(tmp_path / "turns", {})).stop_ids == {2, 3, 4}
    assert ByteTokenizer().stop_ids == {256}


def test_bos_is_added_if_the_tokenizer_adds_it(tmp_path):
    from tokenizers import processors

    def adds(tokenizer):
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])

    def bos(name, files, prepare=lambda t: None):
        tokenizer = load_tokenizer(save_folder(tmp_path / name, files, prepare=prepare))
        return tokenizer.bos_id, tokenizer.adds_bos

    assert bos("none", {}, adds) == (None, False)
    assert bos("null", {CONFIG: {"bos_token": None}}, adds) == (None, False)
    assert bos("named", {CONFIG: {"bos_token": "<s>"}}) == (1, False)
    assert bos("added", {CONFIG: {"bos_token": "<s>"}}, adds) == (1, True)
    assert bos("asked", {CONFIG: {"bos_token": "<s>", "add_bos_token": True}}) == (1, True)
    assert bos("refused", {CONFIG: {"bos_token": "<s>", "add_bos_token": False}}, adds) == (1, False)
    assert bos("other", {CONFIG: {"bos_token": "<unk>"}}, adds) == (0, False)  # it adds another one


def test_a_post_processor_that_adds_bos_twice_adds_one(tmp_path):
    """To documents; a chat template that writes it says where it is."""
    from tokenizers import processors

    def adds(tokenizer):
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> <s> $A", special_tokens=[("<s>", 1)])

    tokenizer = load_tokenizer(save_folder(tmp_path / "twice", {CONFIG: {"bos_token": "<s>"}}, prepare=adds))
    assert tokenizer.adds_bos and tokenizer.encode("<s>").tolist() == [1]
    template = Template("{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}", "", bos=tokenizer.bos)
    talk = {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "ab"}]}
    text = {"prompt": "ab", "completion": "ab"}
    for kind, record, begin in (("conversation", talk, [1, 1]), ("instruction", text, [1])):
        (example,) = Encoder(
            Dataset(("-",), type=kind), tokenizer, template if kind == "conversation" else None
        ).encode([DataRow(record, "row 1")])
        assert isinstance(example, Example)
        ids = example.ids.tolist()
        assert ids[: len(begin)] == begin and ids.count(1) == len(begin), kind


def test_chat_templates_of_a_folder(tmp_path):
    """As AutoTokenizer of transformers 5.24 reads them, and without any, a processor's file."""

    def templates(name, files):
        tokenizer = load_tokenizer(save_folder(tmp_path / name, files))
        return ({"default": tokenizer.chat_template} if tokenizer.chat_template else {}) | tokenizer.named_templates

    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    file, more = {"chat_template.json": {"chat_template": "b"}}, {"additional_chat_templates/rag.jinja": "r"}
    both = {"default": "plain", "tool_use": "tools"}
    assert templates("none", {}) == {}
    assert templates("config", {CONFIG: {"chat_template": "a"}}) == {"default": "a"}
    assert templates("several", {CONFIG: {"chat_template": several}}) == both
    assert templates("object", {CONFIG: {"chat_template": both}}) == both
    assert templates("no default", {CONFIG: {"chat_template": several[:1]}}) == {"tool_use": "tools"}
    assert templates("json", {CONFIG: {"chat_template": "a"}} | file) == {"default": "a"}
    assert (
        templates("only json", file) == templates("empty", {CONFIG: {"chat_template": ""}} | file) == {"default": "b"}
    )
    assert templates("null", {CONFIG: {"chat_template": [*several, {"name": "rag", "template": None}]}}) == both
    jinja = {CONFIG: {"chat_template": several}, "chat_template.jinja": "ü"}
    assert templates("jinja", jinja | file) == {"default": "ü"}
    assert templates("files", jinja | more) == {"default": "ü", "rag": "r"}
    assert templates("additional", more) == {"rag": "r"}


def test_errors_of_a_folder(tmp_path):
    def message(name, files):
        return error_of(save_folder(tmp_path / name, files))

    assert "expected the eos token '<end>'" in message("eos", {CONFIG: {"eos_token": "<end>"}})
    assert "expected the bos token '<start>'" in message("bos", {CONFIG: {"bos_token": "<start>"}})
    assert f"{CONFIG}: expected JSON" in message("broken", {CONFIG: "{"})
    assert f"{GENERATION}: expected a JSON object, got a list" in message("list", {GENERATION: []})


def test_a_gguf_file_has_a_reader_of_its_own(tmp_path, bpe_file, monkeypatch):
    """The reader is replaced: what counts here is that its files become a tokenizer, and that nothing else is read."""
    read = lambda path: TokenizerFiles(bpe_file.read_text(), "template", bos="<s>", eos="</s>", adds_bos=True)
    monkeypatch.setitem(sys.modules, "surojax.data.gguf_tokenizer", types.SimpleNamespace(read_gguf_tokenizer=read))
    monkeypatch.setattr("surojax.data.gguf_tokenizer", types.SimpleNamespace(read_gguf_tokenizer=read), raising=False)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos, tokenizer.chat_template) == (1, 2, True, "template")
    assert tokenizer.bos == "<s>" and tokenizer.name == load_tokenizer(str(bpe_file)).name


def test_token_texts(bpe_file):
    tokenizer = load_tokenizer(str(bpe_file))
    ids = tokenizer.encode("the cat\n")
    assert "".join(map(tokenizer.token_text, ids)) == "the cat\n"
    assert tokenizer.token_text(2) == "</s>" and tokenizer.token_text(9999) == ""
    assert [tokenizer.token_text(i) for i in tokenizer.encode("ü")] == [
        "Ã",
        "¼",
    ]  # halves, as the tokenizer writes them
    assert [ByteTokenizer().token_text(i) for i in (104, 195, 256, 300)] == ["h", "\\xc3", "<end>", ""]


# The token that ends a document in published families, and the one that ends a turn of theirs: transformers 5.24 and
# the folders of the models. The first ones are names of pre-training, which come before those of chats.
ENDS = (
    ["</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|end▁of▁sentence|>", "<｜end▁of▁sentence｜>", "<|eos|>"],
    ["<|im_end|>", "<|eot_id|>"],
)
OF_TURNS = ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<turn|>"]


@pytest.mark.parametrize("name", [*ENDS[0], *ENDS[1]])
def test_every_name_of_a_token_that_ends_a_document_is_known(tmp_path, name):
    """Alone, and before a name of chats; an ordinary token of that name counts where no special one is there."""
    others = [other for other in ENDS[1] if other != name] if name in ENDS[0] else []
    for special in ((name,), ("<x>", *others, name)):
        (tmp_path / "special").mkdir(exist_ok=True)
        found = load_tokenizer(str(save_bpe(tmp_path / "special" / "tokenizer.json", special=special)))
        assert (found.eos, found.eos_id) == (name, special.index(name))
    ordinary = lambda tokenizer: tokenizer.add_tokens([name])
    found = load_tokenizer(str(save_bpe(tmp_path / "tokenizer.json", special=("<x>",), prepare=ordinary)))
    assert found.eos == name


@pytest.mark.parametrize("name", OF_TURNS)
def test_every_name_of_a_token_that_ends_a_turn_stops_an_answer(tmp_path, name):
    special = ("</s>", "<a>", name)
    assert load_tokenizer(save_folder(tmp_path / "model", {}, special=special)).stop_ids == {0, 2}
