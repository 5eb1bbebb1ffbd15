"""Tables of names and numbers, each row by what it does: the rows are written here again, from those who publish them.

A test that takes its cases from the table itself does not notice a row that is missing.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import types
from typing import Any

import pytest
import tokenizers

from surojax import ConfigError, default_config
from surojax.assembly.from_config import model as model_of
from surojax.cluster import rendezvous
from surojax.cluster.early import leave_closed_terminal
from surojax.data import cache, conversations, fitting, gguf_tokenizer, repeats, run_data, samples, splits
from surojax.data.cells import decoded
from surojax.data.conversations import Conversation
from surojax.data.data_rows import BadRow, DataRow, NotARow
from surojax.data.datasets import Dataset
from surojax.data.files import NotText, find_files, stdlib_files
from surojax.data.messages import read_messages, text_of_parts
from surojax.data.rollouts import RolloutEncoder
from surojax.data.templates import Template
from surojax.exchange import adapter_config, gguf, huggingface, missing, parts, small_files, sources
from surojax.exchange.naming import Naming
from surojax.families.registry import FAMILIES
from surojax.inference.sample import check_options
from surojax.own_files import check_form
from surojax.planner import amounts, costs, drives, gpus
from surojax.run import console, metrics, on_disk
from surojax.training import evaluation, safe

# -- data -------------------------------------------------------------------------------------------------------------


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


SPLITS = {  # of "It's 12345 a", by the name of a rule in a GGUF file
    "It |'s| 12345| a": ("default", "gpt-2"),
    "It |'s| |1|2|3|4|5| a": ("smollm",),
    "It |'s| |123|45| a": ("llama-bpe", "llama3", "llama-v3"),
    "It |'s| |1|2|3|4|5 | a": ("qwen2", "deepseek-r1-qwen"),
}


@pytest.mark.parametrize("name, split", [(name, split) for split, names in SPLITS.items() for name in names])
def test_rules_for_splitting_of_gguf_tokenizers(name, split):
    letters = [*tokenizers.pre_tokenizers.ByteLevel.alphabet()]
    text = gguf_tokenizer._tokenizer(letters, [1] * len(letters), [], name, "")
    made = tokenizers.Tokenizer.from_str(text)
    assert made.pre_tokenizer is not None
    pieces = [piece.replace("Ġ", " ") for piece, _ in made.pre_tokenizer.pre_tokenize_str("It's 12345 a")]
    assert [piece for piece in pieces if piece.strip()] and "".join(pieces) == "It's 12345 a"
    assert [p.strip() for p in pieces if p.strip()] == [p.strip() for p in split.split("|") if p.strip()]
    assert (made.normalizer is not None) == (name in ("qwen2", "deepseek-r1-qwen"))
    assert set(gguf_tokenizer.RULES) == {name for names in SPLITS.values() for name in names}
    assert all(
        of in names for of, names in zip(("gpt-2", "smollm", "llama-bpe", "qwen2"), SPLITS.values(), strict=True)
    )


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


# -- exchange ---------------------------------------------------------------------------------------------------------

# adapter_config.json as PEFT 0.21 writes it, and keys of earlier versions.
PEFT: dict = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers.models.llama"},
    "base_model_name_or_path": "a/b",
    "bias": "none",
    "corda_config": {"a": 1},
    "ensure_weight_tying": False,
    "eva_config": {"rho": 2.0},
    "exclude_modules": None,
    "fan_in_fan_out": True,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {"loftq_bits": 4},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.1,
    "lora_ga_config": {"a": 1},
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 4,
    "rank_pattern": {},
    "revision": "main",
    "runtime_config": {"ephemeral_gpu_offload": False},
    "target_modules": ["q_proj", "down_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}


def _read_adapter_config(folder, **changes):
    c = default_config()
    c.model.update({"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64})
    c.model.update({"num_attention_heads": 2, "num_key_value_heads": 2})
    content = {key: value for key, value in (PEFT | changes).items() if value != "left out"}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return adapter_config.read_adapter_config(folder, model_of(c), Naming())[0]


def test_an_adapter_config_with_all_that_peft_writes(tmp_path):
    found = _read_adapter_config(tmp_path)
    assert (found.rank, found.alpha, found.targets) == (4, 8.0, ("attention.wq", "mlp.w_down"))
    assert not (found.saved or found.rank_stabilised or found.magnitudes)


# Odd shapes of one, with the settings that change; None: it is refused by the key's name.
ODD = {
    "no base": ({"base_model_name_or_path": None}, {}),
    "no key of a base": ({"base_model_name_or_path": "left out"}, {}),
    "nothing saved": ({"modules_to_save": []}, {}),
    "no key of what is saved": ({"modules_to_save": "left out"}, {}),
    "a head": ({"modules_to_save": ["lm_head"]}, {"saved": ("head",)}),
    "a regular expression": ({"target_modules": r".*\.(q_proj|v_proj)"}, {"targets": ("attention.wq", "attention.wv")}),
    "all layers": ({"target_modules": "all-linear"}, {"targets": None}),
    "a wrong expression": ({"target_modules": r".*\.(q_proj"}, None),
    "an expression without a match": ({"target_modules": r"nothing"}, None),
    "no targets": ({"target_modules": None}, None),
    "one layer": ({"target_modules": r"model\.layers\.1\.self_attn\.q_proj"}, None),
    "ranks by module": ({"rank_pattern": {"q_proj": 8}}, None),
    "alphas by module": ({"alpha_pattern": {"q_proj": 16}}, None),
    "patterns of null": ({"rank_pattern": None, "alpha_pattern": None}, {}),
    "no patterns": ({"rank_pattern": "left out", "alpha_pattern": "left out"}, {}),
    "some layers": ({"layers_to_transform": [0]}, None),
    "left out modules": ({"exclude_modules": ["down_proj"]}, None),
    "a bias": ({"bias": "all"}, None),
    "no bias": ({"bias": None}, {}),
    "drawn by pissa": ({"init_lora_weights": "pissa"}, None),
    "drawn by a gaussian": ({"init_lora_weights": "gaussian"}, {}),
    "orthogonal": ({"init_lora_weights": "orthogonal"}, {}),
    "drawn by eva": ({"init_lora_weights": "eva"}, {}),
    "DoRA": ({"use_dora": True}, {"magnitudes": True}),
    "rsLoRA": ({"use_rslora": True}, {"rank_stabilised": True}),
    "QA-LoRA": ({"use_qalora": True}, None),
    "rank as a text": ({"r": "4"}, None),
    "a rank of 0": ({"r": 0}, None),
    "the largest rank": ({"r": 2**16}, {"rank": 2**16}),
    "a rank too large": ({"r": 2**16 + 1}, None),
    "half an alpha": ({"lora_alpha": 0.5}, {"alpha": 0.5}),
    "no alpha": ({"lora_alpha": 0}, None),
    "an alpha too large": ({"lora_alpha": 2**31}, None),
    "another kind": ({"peft_type": "LOHA"}, None),
    "a later key": ({"some_later_key": 1}, None),
}


@pytest.mark.parametrize("case", ODD)
def test_adapter_configs_of_odd_shapes(tmp_path, case):
    changes, settings = ODD[case]
    if settings is None:
        with pytest.raises(ConfigError, match=rf"adapter_config\.json: {next(iter(changes))}: expected ") as error:
            _read_adapter_config(tmp_path, **changes)
        assert "\n" not in str(error.value)
        return
    plain = {"rank": 4, "alpha": 8.0, "targets": ("attention.wq", "mlp.w_down"), "saved": ()}
    plain |= {"rank_stabilised": False, "magnitudes": False}
    found = _read_adapter_config(tmp_path, **changes)
    for name, value in (plain | settings).items():
        if value is not None:
            assert getattr(found, name) == value, name
    assert settings.get("targets", 1) or len(found.targets) == 7


def test_names_of_tensors_in_image_text_models():
    """In files (transformers 4), and as the modules of transformers 5 are called."""
    assert parts.alone("language_model.model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert parts.alone("language_model.lm_head.weight") == "lm_head.weight"
    assert parts.alone("model.language_model.norm.weight") == "model.norm.weight"
    assert parts.alone("lm_head.weight") == "lm_head.weight"
    assert parts.in_whole("model.norm.weight") == "model.language_model.norm.weight"
    assert parts.in_whole("lm_head.weight") == "lm_head.weight"
    for start in ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."):
        assert parts.is_of_images(f"{start}a.weight")
    assert not parts.is_of_images("language_model.model.norm.weight")


GEMMA_IMAGES = {  # config.json of google/gemma-3-4b-it, and keys that other versions write
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "image_token_id": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "multimodal_projector_bias": True,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {"hidden_size": 2560, "model_type": "gemma3_text", "architectures": None, "num_hidden_layers": 34},
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152},
    "vision_feature_layer": -1,
}


def test_the_language_model_of_an_image_text_model():
    found = parts.text_config(GEMMA_IMAGES)
    assert found == {
        "hidden_size": 2560,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "torch_dtype": "bfloat16",
        "eos_token_id": [1, 106],
    }
    beside = {"bos_token_id": 2, "pad_token_id": 0, "dtype": "float32", "quantization_config": {"quant_method": "x"}}
    assert parts.text_config(GEMMA_IMAGES | beside) == found | beside
    assert parts.text_config(GEMMA_IMAGES | dict.fromkeys(beside)) == found
    assert parts.text_config(GEMMA_IMAGES | {"tie_word_embeddings": True}) == found
    assert parts.text_config(GEMMA_IMAGES | {"tie_word_embeddings": False})["tie_word_embeddings"] is False
    assert parts.text_config(GEMMA_IMAGES | {"rope_interleaved": False, "some_later_key": None}) == found
    for key, value in {"some_later_key": 1, "rope_interleaved": True}.items():
        with pytest.raises(ConfigError, match=f"config.json has {key}, which may change what the model computes"):
            parts.text_config(GEMMA_IMAGES | {key: value})
    with pytest.raises(ConfigError, match="expected model_type gemma3_text in text_config of gemma3, got 'llama'"):
        parts.text_config(GEMMA_IMAGES | {"text_config": {"model_type": "llama"}})
    with pytest.raises(ConfigError, match="expected an object as text_config of gemma3, got None"):
        parts.text_config({"model_type": "gemma3"})


NAME = "model.norm.weight"


@pytest.mark.parametrize(
    "start, advice",
    [
        ("_orig_mod.", "save the model that torch.compile wraps"),
        ("module.", "save the model that DistributedDataParallel wraps"),
        ("base_model.model.", r"merge the adapter before saving \(merge_and_unload\)"),
        ("_fsdp_wrapped_module.", "save the full state dict of the model that FSDP wraps"),
        ("other.", "save the model by itself"),
    ],
)
def test_names_with_a_wrappers_beginning(start, advice):
    text = missing.named_instead(NAME, [start + NAME], "fetch it again")
    assert re.fullmatch(
        rf"got '{re.escape(start + NAME)}'; {advice}, or remove '{re.escape(start)}' from the names", text
    )


def test_names_that_files_have_instead():
    assert missing.named_instead(NAME, [], "fetch it again") == "got no tensors at all; fetch it again"
    text = missing.named_instead(NAME, ["a", "model.norm.wight", "b" * 9], "fetch it again")
    assert text == "got no such tensor among 3, the most similar being 'model.norm.wight'; fetch it again"
    many = [f"a.{i}" for i in range(3000)]
    assert missing.named_instead(NAME, many, "x").startswith("got no such tensor among 3,000, the most similar being ")


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin.index.json", "pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.pth"]
)
def test_folders_of_pickled_weights(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    assert missing.held_instead(tmp_path).startswith(f"{name}, which may run code and is not read; save the model ")


def test_folders_of_something_else(tmp_path):
    assert missing.held_instead(tmp_path) == "" == missing.adapter_instead(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        expected = "one in the folder a in it; give that folder" if name == "a" else ""  # none of two is meant
        assert missing.held_instead(tmp_path) == expected
    (tmp_path / "b/adapter_config.json").write_text("{}")
    assert missing.adapter_instead(tmp_path) == ", such as the one in its folder b"
    (tmp_path / "m.gguf").write_bytes(b"")
    assert missing.held_instead(tmp_path) == "m.gguf; give this file as model_path"
    (tmp_path / "adapter_config.json").write_text("{}")
    assert missing.held_instead(tmp_path).startswith("an adapter in PEFT's format; give the model that it belongs to")
    assert missing.adapter_instead(tmp_path) == ""
    (tmp_path / "config.json").write_text("{}")
    assert missing.adapter_instead(tmp_path) == "; it has a whole model, for model_path"
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    assert missing.adapter_instead(tmp_path).startswith(
        "; it has adapter_model.bin, which may run code and is not read"
    )


SMALL = (
    "config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json "
    "tokenizer.model vocab.json merges.txt chat_template.jinja chat_template.json LICENSE LICENSE.txt LICENSE.md "
    "NOTICE NOTICE.txt"
).split()


def test_small_files_of_a_folder(tmp_path):
    for name in (*SMALL, "model.safetensors", "README.md"):
        (tmp_path / name).write_text(name)
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("tool_use.jinja", "notes.txt"):
        (tmp_path / "additional_chat_templates" / name).write_text(name)
    assert small_files.read_small_files(tmp_path, small_files.SMALL_FILES) == {n: n.encode() for n in SMALL}
    of_tokenizer = small_files.read_tokenizer_files(tmp_path)
    assert set(of_tokenizer) == {*SMALL[2:11], "additional_chat_templates/tool_use.jinja"}
    for name in "hbdfacge":
        (tmp_path / f"additional_chat_templates/{name}.jinja").write_text(name)
    named = [*small_files.read_tokenizer_files(tmp_path)][len(SMALL[2:11]) :]
    assert named == [f"additional_chat_templates/{name}.jinja" for name in (*"abcdefgh", "tool_use")]
    out = tmp_path / "out"
    out.mkdir()
    of_tokenizer = small_files.read_tokenizer_files(tmp_path)
    small_files.write_small_files(out, of_tokenizer)
    assert small_files.read_tokenizer_files(out) == of_tokenizer


def test_metadata_of_gguf_files():
    """The keys of llama.cpp's `convert_hf_to_gguf.py`, and theirs in config.json."""
    assert gguf.SIZES == {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
    }
    heads = {"attention.key_length", "attention.value_length", "rope.dimension_count"}
    scaling = {"rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"}
    others = {"rope.scaling.finetuned", "vocab_size", "expert_count", "expert_used_count"}
    assert heads | scaling | others == gguf.OTHERS and set(gguf.HEAD_DIM) == heads


# The fields of `model` that are the same in all models of a family, as its code in transformers has them.
GEMMA = {"norm_plus_one": True, "sandwich_norms": True, "scale_embedding": True, "hidden_act": "gelu_pytorch_tanh"}
OF_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"qk_norm": True},
    "glm4_moe": {"scoring_func": "sigmoid"},
    "gpt_oss": {
        "attention_bias": True,
        "attention_out_bias": True,
        "attention_sinks": True,
        "expert_bias": True,
        "hidden_act": "clamped_swiglu",
        "norm_topk_prob": True,
    },
    "granitemoe": {"norm_topk_prob": True},
    "mixtral": {"norm_topk_prob": True},
    "olmoe": {"qk_norm_whole": True},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_options_of_a_family(family):
    expected = OF_FAMILIES.get(family, {})
    assert FAMILIES[family].options == expected
    assert {name: type(value) for name, value in FAMILIES[family].options.items()} == {
        name: type(default_config().model[name]) for name in expected
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("used", [True, False])
def test_layers_with_a_window_of_no_size(family, used):
    """The message names what leaves it out: a switch of some families' configs, or no number."""
    types = ["sliding_attention", "full_attention"]
    config = {"model_type": family, "num_hidden_layers": 2, "layer_types": types, "sliding_window": None}
    if family in ("gemma2", "gemma3_text", "gpt_oss"):
        got = "None; leave it out, or say full_attention of every layer"
    elif family in ("qwen2", "qwen3", "qwen3_moe", "smollm3") and not used:
        got = "use_sliding_window false; fetch it again"
    else:
        got = "no such number; fetch it again"
    with pytest.raises(ConfigError, match=rf"config\.json: sliding_window: expected a number, .*, got {got}"):
        huggingface.model_fields(config | {"use_sliding_window": used})


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("exists", [False, True])
def test_files_of_a_run_whose_originals_are_gone(tmp_path, monkeypatch, exists, is_kept):
    """The run's copy is read then; a chat template's is read in any case, since the original may have changed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    kept = sources.kept_in(tmp_path / "run")
    kept.mkdir(parents=True)
    for name in ("tokenizer.json", "chat_template.jinja") if is_kept else ():
        (kept / name).write_text("{}")
    if exists:
        (tmp_path / "own").mkdir()
    c = default_config()
    for own in (str(tmp_path / "own"), "~/own"):
        c.update({"tokenizer": own, "chat_template": own})
        assert sources.tokenizer_of(c, tmp_path / "run") == (str(kept) if is_kept and not exists else own)
        assert sources.template_of(c, tmp_path / "run") == (str(kept / "chat_template.jinja") if is_kept else own)
    c.update({"tokenizer": "bytes", "chat_template": ""})
    assert sources.tokenizer_of(c, tmp_path / "run") == "bytes" and sources.template_of(c, tmp_path / "run") == ""


@pytest.mark.parametrize("has_tokenizer", [False, True])
@pytest.mark.parametrize("is_gone", [False, True])
def test_the_tokenizer_of_a_model_that_may_be_gone(tmp_path, is_gone, has_tokenizer):
    """None set: the model's own, or the run's copy of it. One that is gone is replaced only with the model gone."""
    model, run = tmp_path / "model", tmp_path / "run"
    folder = sources.kept_in(run) if is_gone else model
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    (folder / sources.SOURCE).write_text(json.dumps({"model_path": str(model)}))
    if has_tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    (tmp_path / "other").mkdir()
    c = default_config()
    for tokenizer, replaced in (("bytes", True), (str(tmp_path / "gone"), is_gone), (str(tmp_path / "other"), False)):
        c.update({"model_path": str(model), "output_dir": str(run), "tokenizer": tokenizer})
        found = sources.resolved(c)
        assert found.model.hidden_size == 64 and c.model.hidden_size != 64
        assert found.tokenizer == (str(folder) if replaced and has_tokenizer else tokenizer), tokenizer


# -- the planner, and errors of a step --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, reason", [("Tesla V100", "sm_70"), ("p100", "sm_60"), ("RTX 2080 Ti", "sm_75"), ("T4", "sm_75")]
)
def test_cards_without_bfloat16(name, reason):
    with pytest.raises(
        ConfigError, match=rf"^--gpu: expected a GPU that computes in bfloat16, got '{name}' \({reason}"
    ):
        gpus.gpu_key(name)


@pytest.mark.parametrize(
    "name, read, write, tbw",
    [
        ("980pro", 7.0, 1.5, 600),
        ("nm790", 7.4, 1.45, 1500),
        ("t500", 7.4, 0.64, 1200),
        ("sn850x", 7.3, 3.4, 1200),
        ("9400pro", 7.0, 7.0, 7.68 * 365 * 5),
        ("pm9d3a", 12.0, 6.8, 7.68 * 365 * 5),
    ],
)
def test_drives_by_name(name, read, write, tbw):
    """Makers' sheets, and what a full cache left; of the last two one write of the drive a day for five years."""
    for count in (1, 3):
        found = drives.disks(f"{name}:{count}" if count > 1 else name)
        assert (found.read, found.write) == (count * read * 1e9, count * write * 1e9)
        assert found.tbw == pytest.approx(count * tbw)


# A message of each option's failure, and the option that it names, if all are in use.
FAILURES = {
    "attention": ("No cuDNN plan", "flash support", "FMHA failed", "cudnn: bad param"),
    "kernels": ("Mosaic GPU lowering", "pallas_call"),
    "block_scaled_products": ("block_scaled dot", "BlockScaled", "scaled-dot is not supported", "scaled dot"),
    "copy_engines": ("symmetric memory", "put_signal", "memcpy-local", "P2P access", "MemcpyLocal"),
    "xla_options": (
        *("unknown xla_gpu_foo", "compile option", "compile_options", "latency-hiding", "PGLE", "profile"),
        "scheduler failed",
    ),
    "cuda_graphs": ("command buffer", "command_buffer", "CUDA graph", "cuda-graph", "CommandBuffer"),
}


@pytest.mark.parametrize("name, message", [(name, text) for name, texts in FAILURES.items() for text in texts])
def test_the_option_that_a_message_names(name, message):
    c = default_config()
    c.update({"kernels": "mosaic", "recipe": "mxfp8", "memcpy_all_gather": True, "cuda_graphs": "on"})
    assert {x.name for x in safe.OPTIONS if x.in_safe and x.in_use(c)} == set(FAILURES)
    option = safe.BY_NAME[name]
    assert safe.advice(c, message).startswith(f"most likely {option.does}, which the message names: go on without it")


@pytest.mark.parametrize("word", ["MoveToHost", "MoveToDevice", "Sharding", "AllocateBuffer"])
def test_calls_without_a_kernel(word):
    assert word in costs.NO_KERNEL


def test_bytes_of_another_encoding():
    """By the first bytes of a file: UTF-16 of either order, what is compressed, and others."""
    advice = {
        b"\xff\xfea\x00": "iconv -f utf-16",
        b"\xfe\xff\x00a": "iconv -f utf-16",
        b"\x1f\x8b\x08\x00": "end in .gz",
        b"\x28\xb5\x2f\xfd": "end in .zst",
        b"BZh\xe9": "end in .bz2",
        b"\xfd7zXZ\x00": "end in .xz",
        b"caf\xe9": "iconv -f latin1",
    }
    for content, words in advice.items():
        with pytest.raises(UnicodeDecodeError) as raised:
            content.decode("utf-8")
        assert words in str(NotText(content, raised.value.start, 0)), content
        assert "iconv -f latin1" in str(NotText(content, raised.value.start, 5))  # not at the beginning


# -- Limits, from both sides ------------------------------------------------------------------------------------------

STEP, SAMPLES, ANY = 2**31 - 1, 2**63 - 1, 2**32 - 1
META = {"step": 0, "checksums": {}}
OF_A_RUN = {"step": 0, "samples": 0, "config": {"resume_from_checkpoint": ""}, "tokenizer": "", "data": ""}
HELLO = {"id": 0, "of": 1, "host": "", "nonce": ""}
FORMS = [  # (form, a value that has it, a key with a number, its smallest and largest number)
    (on_disk.META, META, "step", 0, STEP),
    (on_disk.META, META, "samples", 0, SAMPLES),
    (on_disk.META, META, "samples_per_step", 1, STEP),
    (on_disk.META, META, "layers.a", 0, STEP),
    (on_disk.META, META, "checksums.a", 0, ANY),
    (on_disk.OF_A_RUN, OF_A_RUN, "step", 0, STEP),
    (on_disk.OF_A_RUN, OF_A_RUN, "samples", 0, SAMPLES),
    (on_disk.OF_A_RUN, OF_A_RUN, "layers.a", 0, STEP),
    (metrics.RECORD, {"log": ""}, "step", 0, STEP),
    (rendezvous.HELLO_BODY, HELLO, "of", 1, STEP),
]


@pytest.mark.parametrize("form, value, key, low, high", FORMS, ids=lambda x: x if isinstance(x, str) else "")
def test_numbers_in_own_files_and_messages(form, value, key, low, high):
    def with_number(number):
        name, _, inner = key.partition(".")
        return value | {name: {inner: number} if inner else number}

    for number in (low, high):
        check_form(with_number(number), form)
    for number in (low - 1, high + 1, True, float(low), str(low), None):
        with pytest.raises(ValueError, match=rf"^{re.escape(key)}: expected a whole number from {low} to {high}, got "):
            check_form(with_number(number), form)


@pytest.mark.parametrize(
    "form, value, texts, optional",
    [
        (on_disk.META, META, "version block base", True),
        (on_disk.OF_A_RUN, OF_A_RUN, "tokenizer data", False),
        (metrics.RECORD, {"log": "", "step": 0}, "log", False),
        (rendezvous.HELLO_BODY, HELLO, "host nonce", False),
        (rendezvous.GREETING, {"hello": "", "nonce": ""}, "hello nonce", False),
        (rendezvous.SEALED, {"run": "", "body": "", "proof": ""}, "run body proof", False),
        (rendezvous.ANSWER_BODY, {}, "error", True),
    ],
)
def test_texts_in_own_files_and_messages(form, value, texts, optional):
    check_form(value, form)
    for name in texts.split():
        check_form(value | {name: "a"}, form)
        with pytest.raises(ValueError, match=f"^{name}: expected a JSON str"):
            check_form(value | {name: 1}, form)
        without = {key: x for key, x in value.items() if key != name}
        if optional:
            check_form(without, form)
            continue
        with pytest.raises(ValueError, match=f"^{name}: expected a value"):
            check_form(without, form)


@pytest.mark.parametrize(
    "name, allowed, refused",
    [
        ("max_tokens", (0, 1, 2**24), (-1, 2**24 + 1)),
        ("temperature", (0, 0.5, 1e30), (-0.1, math.inf, math.nan)),
        ("top_p", (1e-9, 0.5, 1), (0, 1.000001, math.nan)),
        ("seed", (0, 2**31 - 1), (-1, 2**31)),
    ],
)
def test_options_of_sampling(name, allowed, refused):
    plain: dict[str, Any] = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "seed": 0}
    for value in allowed:
        check_options(**plain | {name: value})
    for value in refused:
        with pytest.raises(ConfigError, match=rf"^{name}: expected "):
            check_options(**plain | {name: value})


@pytest.mark.parametrize(
    "size, text",
    [(0, "0.0 MiB"), (2**30 - 1, "1024.0 MiB"), (2**30, "1.0 GiB"), (3 * 2**29, "1.5 GiB"), (2**20, "1.0 MiB")],
)
def test_sizes_as_text(size, text):
    assert amounts.gib(size) == text


def test_amounts_of_memory():
    limits = amounts.Memory(4 * 2**30, 2 * 2**30, 5 * 10**9)
    assert limits.fits(limits) and limits.beyond(limits) == (0, 0, 0)
    for i, one in enumerate(limits):
        more = limits._replace(**{limits._fields[i]: one + 1})
        assert not more.fits(limits) and limits.fits(more)
        assert more.beyond(limits) == tuple(int(j == i) for j in range(3))
    assert amounts.Memory(1).fits(amounts.Memory(1)) and amounts.Memory(1).host == math.inf
    assert limits.text() == "4.0 GiB on each GPU, 2.0 GiB of host memory, 5.0 GB of files"
    assert amounts.Memory(2**20, 0, 0).text("device") == "1.0 MiB on each device"
    assert amounts.Memory(0, 2**20, 0).text() == "1.0 MiB of host memory"
    parts = {"weights": 3 * 2**29, "nothing": 0, "master": 2**29}
    assert amounts.summed(parts, 1) == "2.0 GiB (weights 1.5, master 0.5)"
    assert amounts.summed({"a": 2**19, "b": 2**19}, 2) == "1.00 MiB (a 0.50, b 0.50)"


LARGEST = 3.4028234663852886e38  # float32


def test_numbers_that_float32_holds_are_margins_of_preferences():
    margin = lambda value: conversations.margin({"margin": value}, Dataset("x", type="preference"))
    for value in (0, 1, -2, 0.5, LARGEST, -LARGEST):
        assert margin(value) == value
    assert conversations.margin({}, Dataset("x", type="preference")) == 0.0 == margin(None)
    for bad in (3.5e38, -3.5e38, math.inf, -math.inf, math.nan, True, False, "1", [1]):
        with pytest.raises(NotARow, match=r"^expected a finite number in 'margin', got "):
            margin(bad)


@pytest.mark.parametrize("name", ["logprobs", "rewards", "advantages"])
def test_numbers_that_float32_holds_are_those_of_rollouts(name):
    """Log-probabilities are at most 0, but for rounding."""
    row = {"prompt_ids": [1], "completion_ids": [[2], [3]], "logprobs": [[-1.0], [-2.0]], "advantages": [1.0, -1.0]}
    encoder = RolloutEncoder(8)

    def found(value):
        changes = {name: [[value], [-2.0]] if name == "logprobs" else [value, 0.5]}
        without = {key: x for key, x in row.items() if key != "advantages" or name == "logprobs"}
        return encoder.item(DataRow(without | changes, "row 1")).content

    assert not isinstance(found(-LARGEST), BadRow) and not isinstance(found(0.0), BadRow)
    assert isinstance(found(LARGEST), BadRow) == (name == "logprobs")
    for bad in (-3.5e38, 3.5e38, math.inf, -math.inf, math.nan):
        example = found(bad)
        assert isinstance(example, BadRow) and f"{name}" in example.reason and "finite" in example.reason, bad


@pytest.mark.parametrize("value", [5, -5, 2.5, 2**62, -(2**62), 0])
def test_numbers_of_records(value):
    assert evaluation._number({"loss": value}, "loss") == value


@pytest.mark.parametrize("value", [2**63, -(2**63), True, None, "1", [1]])
def test_numbers_of_records_that_are_none(value):
    assert math.isnan(evaluation._number({"loss": value}, "loss"))


@pytest.mark.parametrize("key", ["initializer_range", "rms_norm_eps"])
def test_the_largest_number_of_a_config(key):
    """Of either sign, a number whose square float32 cannot hold."""
    for value in (1e15, -1e15):
        with contextlib.suppress(ConfigError):  # another check may refuse it, but not this one
            huggingface.model_fields({"model_type": "llama", key: value})
        for beyond in (1.1 * value, 1e300 * math.copysign(1, value)):
            with pytest.raises(ConfigError, match=rf"config\.json: {key}: expected at most 1e\+15, got "):
                huggingface.model_fields({"model_type": "llama", key: beyond})


def test_the_line_about_a_runs_data():
    """Each part of it, by itself."""
    some = [types.SimpleNamespace(name=name) for name in ("a", "b")]
    plain: dict[str, Any] = {"all": types.SimpleNamespace(name="a, b", num_tokens=12345), "sources": some}
    held_out = types.SimpleNamespace(tokens=range(1000))

    def said(names=("",), **changes) -> str:
        train = types.SimpleNamespace(**plain | {"weights": None, "shares": lambda: (0.5, 2.0)} | changes)
        evaluated = [types.SimpleNamespace(name=name) for name in names]
        return run_data.Data(train, evaluated, held_out).describe()  # type: ignore[arg-type]

    line = "data: a, b, 12,345 tokens for training"
    assert said() == f"{line}, 1,000 held out"
    assert said(("x",)) == f"{line}; evaluated on x" and said(("x", "y")) == f"{line}; evaluated on x, y"
    assert said(("", "y")) == f"{line}, 1,000 held out; evaluated on y"
    assert said(("x",), weights=(1, 4)) == f"{line}; evaluated on x; an epoch has a 0.50 times, b 2.00 times"
    windows = [samples.Windows(types.SimpleNamespace(tokens=range(n)), 8) for n in (20, 25)]  # type: ignore[arg-type]
    left_out = " (3 at the end, which fill no row, are left out), 1,000 held out"
    assert said(sources=windows) == line + left_out and said(sources=windows[1:]) == f"{line}, 1,000 held out"


def test_an_open_terminal_is_not_left():
    assert not leave_closed_terminal()
    with pytest.raises(OSError, match="another error"), console._unless_closed():
        raise OSError("another error")
