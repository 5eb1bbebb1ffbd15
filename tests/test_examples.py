"""Rows to token ids and the mask of those that are trained.

Against transformers' ids and masks (fixtures/chat_reference.json), and against what sampling will see: the ids of a
prompt are those of its text alone.
"""

import dataclasses
import itertools
import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest

import surojax.data.seams as seams
from surojax.data import texts
from surojax.data.data_rows import BadRow, DataRow
from surojax.data.datasets import Dataset
from surojax.data.examples import TRAIN_ON, Encoder, Example
from surojax.data.pieces import DocumentPiece
from surojax.data.show import sample_table
from surojax.data.templates import Template, load_template
from surojax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from surojax.data.tokenizer_files import TokenizerFiles
from surojax.errors import ConfigError

REFERENCE = json.loads((Path(__file__).parent / "fixtures" / "chat_reference.json").read_text(encoding="utf-8"))
TOKENIZERS = {
    name: HuggingFaceTokenizer(TokenizerFiles(**files), name) for name, files in REFERENCE["tokenizers"].items()
}
BYTES = ByteTokenizer()
CHATML = load_template("chatml", BYTES)
assert CHATML is not None
TALK = Dataset(("talk",), type="conversation")
PAIRS = Dataset(("pairs",), type="instruction")


def talk(*contents, system=""):
    """A row of a user and an assistant in turn."""
    messages = [{"role": "system", "content": system}] if system else []
    roles = itertools.cycle(["user", "assistant"])
    return {"messages": messages + [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}


def encode(record, dataset=TALK, tokenizer=BYTES, template=CHATML, **options):
    (found,) = Encoder(dataset, tokenizer, template, **options).encode([DataRow(record, "a.jsonl:7")])
    return found


def example(*arguments, **options) -> Example:
    found = encode(*arguments, **options)
    assert isinstance(found, Example), found
    assert found.ids.dtype == np.int32
    assert found.trained is None or (found.trained.dtype == bool and found.trained.shape == found.ids.shape)
    return found


def trained_text(found: Example, tokenizer=BYTES) -> str:
    """The text whose tokens are trained."""
    return "".join(tokenizer.token_text(i) for i in found.ids[found.trained])


def reason_of(record, dataset=TALK, **options) -> str:
    found = encode(record, dataset, **options)
    assert isinstance(found, BadRow) and found.where == "a.jsonl:7"
    assert found.reason.startswith("expected ") and ", got " in found.reason and ";" in found.reason
    assert "\n" not in found.reason
    return found.reason


# -- Against transformers ---------------------------------------------------------------------------------------------


def case_id(case) -> str:
    return f"{case['tokenizer']}-{case['template']}"


def of_case(case, train_on) -> Example:
    tokenizer = TOKENIZERS[case["tokenizer"]]
    template = Template(REFERENCE["templates"][case["template"]], "", bos="<s>", eos="</s>")
    record = {"messages": case["messages"], "tools": case["tools"]}
    return example(record, tokenizer=tokenizer, template=template, train_on=train_on)


CASES = [case for case in REFERENCE["cases"] if case["template"] != "features"]
# The byte-level tokenizer writes "\n\n" before a word as two tokens and at the end of a prompt as one, so there
# tokenising a prompt with its answer, as transformers does, is not what sampling sees.
SAME = [case for case in CASES if (case["tokenizer"], case["template"]) != ("byte_level", "llama3")]


@pytest.mark.parametrize("case", SAME, ids=case_id)
def test_ids_and_mask_equal_transformers(case):
    found = of_case(case, "assistant")
    assert found.trained is not None
    is_open = case["template"] == "glm4_7"  # the token after an answer ends it: the next turn's, or the document's
    last = [TOKENIZERS[case["tokenizer"]].eos_id] * is_open
    assert found.ids.tolist() == case["ids"] + last
    mask = np.array(case["mask"] + [False] * is_open, bool)
    if is_open:
        mask[1:] |= mask[:-1]
    if case["template"] == "thinking":  # the first answer lost its thinking, and is not what sampling would give
        mask[: len(case["prompts"][-1])] = False
        assert len(case["prompts"]) == 2 and sum(case["mask"]) > mask.sum()
    assert found.trained.tolist() == mask.tolist()
    assert of_case(case, "all").trained is None and of_case(case, "all").ids.tolist() == case["ids"] + last


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_prompt_has_the_ids_that_sampling_sees(case):
    last = of_case(case, "last")
    assert last.trained is not None
    prompt = case["prompts"][-1]
    assert last.ids[: len(prompt)].tolist() == prompt
    assert not last.trained[: len(prompt)].any() and last.trained[len(prompt)]
    if case["template"] != "thinking":
        every = of_case(case, "assistant")
        first = case["prompts"][0]
        assert every.trained is not None
        assert every.ids[: len(first)].tolist() == first
        assert not every.trained[: len(first)].any() and every.trained[len(first)]


# -- Seams ------------------------------------------------------------------------------------------------------------


def random_texts(seed, parts, count=300):
    rng = random.Random(seed)
    return ["".join(rng.choices(parts, k=rng.randrange(1, 9))) for _ in range(count)]


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_sections_are_tokenised_as_the_whole(tokenizer):
    parts = ["the cat", " ", "\n", "\n\n", "<|im_end|>", "<s>", "[INST]", "ü👋🏽", "is it", "  ", "<|im_", "end|>"]
    for text in random_texts(0, parts):
        cuts = sorted({0, *tokenizer.section_starts(text), len(text)})
        ids = [tokenizer.encode(text[a:b]) for a, b in itertools.pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(ids), tokenizer.encode(text))
    assert tokenizer.section_starts("a<s>b[INST]<|im_end|>c") == [1, 5, 11]


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_no_token_crosses_a_seam(tokenizer):
    """The rule on the whole texts: ids of both that begin with those of the first, or each alone."""
    parts = ["the", " ", "\n", " cat", "\n\n", "ca", "t", "<|im_end|>", "<|im", "_end|>", "ü"]
    crossed = 0
    for first, second in zip(random_texts(1, parts), random_texts(2, parts), strict=True):
        (ids,) = seams.encode_pieces([(DocumentPiece(first, False), DocumentPiece(second, True))], tokenizer)
        prompt = tokenizer.encode(first)
        np.testing.assert_array_equal(ids[0], prompt)
        both = tokenizer.encode(first + second)
        if both[: len(prompt)].tolist() == prompt.tolist():
            np.testing.assert_array_equal(ids[1], both[len(prompt) :])
        else:
            crossed += 1
            np.testing.assert_array_equal(ids[1], tokenizer.encode(second))
    assert crossed > 10


def test_pieces_keep_their_text():
    tokenizer = TOKENIZERS["byte_level"]
    texts = random_texts(3, ["the", " ", "\n", " cat", "<|im_end|>", "<|im", "_end|>", "t"], count=200)
    documents = [tuple(DocumentPiece(text, False) for text in texts[i : i + 4]) for i in range(0, 200, 4)]
    for pieces, ids in zip(documents, seams.encode_pieces(documents, tokenizer), strict=True):
        shown = ["".join(tokenizer.token_text(token) for token in part) for part in ids]
        assert shown == [piece.text for piece in pieces]


def test_bytes_are_the_rendered_text():
    """Special tokens are spelled out; the last answer ends with the end of the document, where sampling stops."""
    found = example(talk("Hi ü", "Yo", "2", "3", system="Be."))
    text = (
        "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nHi ü<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
        "<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
    )
    assert found.ids.tolist() == [*text.encode(), BYTES.eos_id]
    assert trained_text(found) == "Yo<|im_end|>\n3<|im_end|>\n<end>"
    assert trained_text(example(talk("Hi", "Yo", "2", "3"), train_on="last")) == "3<|im_end|>\n<end>"
    assert example(talk("Hi", "Yo"), train_on="all").trained is None


def test_what_follows_the_last_answer():
    """It is left out, unless everything is trained; then nothing ends the document, since nobody answered."""
    cut = example(talk("Hi", "Yo", "and?"))
    assert cut.ids.tolist() == example(talk("Hi", "Yo")).ids.tolist()
    everything = example(talk("Hi", "Yo", "and?"), train_on="all")
    assert BYTES.decode(everything.ids).endswith("and?<|im_end|>\n") and everything.ids[-1] != BYTES.eos_id


def test_a_spelled_end_of_turn_does_not_end_an_answer_early():
    tokenizer = TOKENIZERS["byte_level"]
    template = load_template("chatml", tokenizer)
    found = example(talk("Hi", "a<|im_end|>b"), tokenizer=tokenizer, template=template)
    assert trained_text(found, tokenizer) == "a<|im_end|>b<|im_end|>"
    assert tokenizer.token_text(found.ids[-1]) == "\n"  # after the answer; sampling never gets there


# -- Conversations ----------------------------------------------------------------------------------------------------


def test_names_of_sharegpt():
    record = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}], "system": "Be."}
    assert example(record).ids.tolist() == example(talk("Hi", "Yo", system="Be.")).ids.tolist()


def test_names_of_fields_are_settings():
    dataset = dataclasses.replace(
        TALK, messages_field="turns", role_field="who", content_field="what", system_field="rules", tools_field="can"
    )
    turns = [{"who": "user", "what": "Hi"}, {"who": "model", "what": "Yo"}]
    found = example({"turns": turns, "rules": "Be.", "system": "not read"}, dataset)
    assert found.ids.tolist() == example(talk("Hi", "Yo", system="Be.")).ids.tolist()
    assert "<tools>" in BYTES.decode(example({"turns": turns, "can": [{"name": "look"}]}, dataset).ids)


def test_the_system_prompt_is_that_of_the_row_the_dataset_or_the_run():
    dataset = dataclasses.replace(TALK, system_prompt="dataset's")

    def shown(record, dataset):
        return BYTES.decode(example(record, dataset, system_prompt="run's").ids).split("<|im_end|>")[0]

    assert shown(talk("a", "b", system="row's"), dataset) == "<|im_start|>system\nrow's"
    assert shown(talk("a", "b") | {"system": "row's"}, dataset) == "<|im_start|>system\nrow's"
    assert shown(talk("a", "b"), dataset) == "<|im_start|>system\ndataset's"
    assert shown(talk("a", "b"), TALK) == "<|im_start|>system\nrun's"
    both = talk("a", "b", system="one")
    assert example(both | {"system": "one"}).ids.tolist() == example(both).ids.tolist()
    assert "expected one system prompt" in reason_of(both | {"system": "two"})


@pytest.mark.parametrize(
    "kind, row",
    [
        ("instruction", {"prompt": "a", "completion": "b"}),
        ("instruction", {"prompt": [{"role": "user", "content": "a"}], "completion": "b"}),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "c"}),
    ],
)
def test_the_system_prompt_of_a_prompt_too(kind, row):
    def shown(record, of_dataset=""):
        dataset = Dataset(("rows",), type=kind, system_prompt=of_dataset)
        return BYTES.decode(example(record, dataset, system_prompt="run's").ids).split("<|im_end|>")[0]

    assert shown(row | {"system": "row's"}, "dataset's") == "<|im_start|>system\nrow's"
    assert shown(row, "dataset's") == "<|im_start|>system\ndataset's"
    assert shown(row) == "<|im_start|>system\nrun's"


def test_parts_of_text_tools_as_json_and_nulls():
    """Parquet files fill what a record lacks with nulls, and tools come as JSON where their fields differ."""
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    record = talk(parts, "Yo")
    for message in record["messages"]:
        message |= {"tool_calls": None, "name": None}
    record |= {"tools": None, "system": None, "conversations": None}
    assert example(record).ids.tolist() == example(talk("Hi", "Yo")).ids.tolist()
    tools = [{"name": "look"}]
    as_json = example(talk("Hi", "Yo") | {"tools": json.dumps(tools)})
    assert as_json.ids.tolist() == example(talk("Hi", "Yo") | {"tools": tools}).ids.tolist()


def test_calls_of_tools_are_trained_and_their_results_are_not():
    call = {"function": {"name": "look", "arguments": {"at": "it"}}}
    messages = [
        {"role": "user", "content": "see?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "a cat"},
        {"role": "assistant", "content": "a cat."},
    ]
    said = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call><|im_end|>\na cat.<|im_end|>\n<end>'
    assert trained_text(example({"messages": messages})) == said


BAD_TALKS = [
    ({}, "messages in 'messages' or 'conversations', got no fields"),
    ({"text": "a"}, "got 'text'"),
    ({"messages": None}, "got null; remove the row"),
    ({"messages": "Hi"}, "a list of messages, got a str"),
    ({"messages": []}, "got an empty list"),
    ({"messages": ["Hi"]}, "message 1 as an object, got a str"),
    ({"messages": [{"content": "Hi"}]}, "message 1 with its role in 'from', got 'content'"),
    ({"messages": [{"role": "bot", "content": "Hi"}]}, "role of system, user, assistant, tool, human, prompter, gpt"),
    ({"messages": [{"role": ["user"], "content": "Hi"}]}, "got ['user']"),
    ({"messages": [{"role": "user"}]}, "message 1 with text in 'value', got 'role'"),
    ({"messages": [{"role": "user", "content": None}]}, "text in 'content', got a NoneType"),
    ({"messages": [{"role": "user", "content": 5}]}, "got a int"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "got a list of image"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]}, "image, text"),
    ({"messages": [{"role": "user", "content": []}]}, "got a list of nothing"),
    (talk("Hi", " "), "an answer as message 2, got an empty one"),
    (talk("Hi"), "a message of the assistant to train on, got none"),
    (talk("Hi \ud83d", "Yo"), "half a surrogate pair (\\ud83d)"),
    (talk("Hi", "Yo") | {"tools": "[{"}, "a string that is no JSON"),
    (talk("Hi", "Yo") | {"tools": {"a": 1}}, "a list of tools in 'tools', got a dict"),
    (talk("Hi", "Yo") | {"system": 5}, "the system prompt in 'system' as a text, got 5"),
]


@pytest.mark.parametrize("record, said", BAD_TALKS, ids=map(str, range(len(BAD_TALKS))))
def test_bad_conversations(record, said):
    assert said in reason_of(record)


def test_a_bad_row_leaves_the_others_alone():
    broken = BadRow("a.jsonl:2", "expected JSON, got none; remove it")
    rows = [DataRow(talk("Hi", "Yo"), "1"), broken, DataRow({}, "3"), DataRow(talk("2", "3"), "4")]
    found = Encoder(TALK, BYTES, CHATML).encode(rows)
    assert found[1] is broken and isinstance(found[2], BadRow) and found[2].where == "3"
    assert isinstance(found[0], Example) and isinstance(found[3], Example)
    assert found[3].ids.tolist() == example(talk("2", "3")).ids.tolist()
    assert Encoder(TALK, BYTES, CHATML).encode([broken]) == [broken]
    assert Encoder(TALK, BYTES, CHATML).encode([]) == []


# -- Templates that do not simply go on -------------------------------------------------------------------------------


def template(text) -> Template:
    return Template(text, "t.jinja", bos="<s>", eos="</s>")


def test_a_template_that_rewrites_earlier_answers_is_said():
    thinking = template(REFERENCE["templates"]["thinking"])
    assert Encoder(TALK, BYTES, CHATML).note == ""
    note = Encoder(TALK, BYTES, thinking).note
    assert "t.jinja rewrites earlier answers with <think>" in note and "\n" not in note
    assert Encoder(TALK, BYTES, thinking, train_on="last").note == ""
    plain = example(talk("a", "b", "c", "d"), template=thinking)  # no thinking, nothing to rewrite
    assert trained_text(plain) == "b<|im_end|>\nd<|im_end|>\n<end>"
    always = template("{% for m in messages %}{{ m.content }}{{ '!' if loop.last and m.role != 'user' }}.{% endfor %}")
    assert "rewrites earlier answers once" in Encoder(TALK, BYTES, always).note
    assert trained_text(example(talk("a", "b", "c", "d"), template=always)) == "d!.<end>"


def test_an_eos_after_the_last_message_is_no_part_of_earlier_answers():
    ends = template(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}.{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% else %}{{ eos_token }}{% endif %}"
    )
    assert trained_text(example(talk("a", "b", "c", "d"), template=ends)) == "b.d.</s><end>"
    assert Encoder(TALK, BYTES, ends).note.endswith("only the last one learns where to end")


def test_a_generation_prompt_that_does_not_begin_the_answer():
    thinks = template(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}.{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
    )
    reason = reason_of(talk("a", "b"), template=thinks)
    assert "the generation prompt of t.jinja, got 'b.' in place of '<think>'; choose another" in reason
    of_choice = template(
        "{% for m in messages %}[{{ m.role }}]{{ '</think>' if m.role == 'assistant' }}{{ m.content }}.{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{{ '<think>' if enable_thinking | default(true) else '</think>' }}"
        "{% endif %}"
    )
    reason = reason_of(talk("a", "b"), template=of_choice)
    assert "in place of 'think>'; write enable_thinking=false into the row, or choose another" in reason
    row = talk("a", "b") | {"enable_thinking": False}
    assert trained_text(example(row, template=of_choice)) == "b.<end>"
    assert example(talk("a", "b"), template=thinks, train_on="all").trained is None


def test_a_template_that_leaves_something_out():
    users = template("{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    assert "without that of the system, 'Be.'" in reason_of(talk("a", "b", system=" Be. "), template=users)
    assert isinstance(encode(talk("a", "b"), template=users), Example)
    questions = template("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    for train_on in ("assistant", "last", "all"):
        reason = reason_of(talk("a", "b"), template=questions, train_on=train_on)
        assert "every part of an answer, got a text without the content of message 2, 'b'; write it" in reason
        assert "to show the answer, got a text without it" in reason_of(
            talk("", "!"), template=template("{{ '' }}"), train_on=train_on
        )
    tools = talk("a", "b") | {"tools": [{"name": "look"}]}
    assert "expected no tools, which t.jinja does not show, got 1" in reason_of(tools, template=users)
    assert isinstance(encode(tools, dataclasses.replace(TALK, tools_field=""), template=users), Example)


def test_a_template_that_leaves_out_calls_of_tools_or_their_results():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look_up", "arguments": {}}}]}
    result = {"role": "tool", "content": "It is warm."}
    rows = {"messages": [*talk("Weather?")["messages"], call, result, {"role": "assistant", "content": "Warm."}]}
    only_content = template("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    assert "t.jinja to show every call of a tool, got a text without that of 'look_up'" in reason_of(
        rows, template=only_content
    )
    bare = {"role": "assistant", "content": "", "tool_calls": [{"name": "look_up"}]}
    assert "'look_up'" in reason_of({"messages": [*talk("a")["messages"], bare]}, template=only_content)
    no_results = template(
        "{% for m in messages if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    )
    assert "without that of the tool, 'It is warm.'" in reason_of(rows, template=no_results)
    as_json = template("{% for m in messages %}[{{ m.role }}]{{ m.content | tojson }}{{ m.tool_calls }}{% endfor %}")
    quoted = {"messages": [{**m, "content": 'It is "warm",\nhe said.'} if m is result else m for m in rows["messages"]]}
    assert isinstance(encode(quoted, template=as_json), Example)  # as Llama 3.1 writes results
    assert "look_up" in "".join(BYTES.token_text(i) for i in example(rows).ids)


def test_roles_that_do_not_alternate():
    gemma = load_template("gemma", BYTES)
    record = {"messages": [*talk("a")["messages"], *talk("b", "c")["messages"]]}
    assert "gemma takes, got 'this template takes a system message" in reason_of(record, template=gemma)


# -- Instructions and texts -------------------------------------------------------------------------------------------


def test_instructions_with_a_template_are_conversations():
    expected = example(talk("Q\n\nmore", "A", system="Be.")).ids.tolist()
    alpaca = {"instruction": "Q", "input": "more", "output": "A", "system": "Be."}
    assert example(alpaca, PAIRS).ids.tolist() == expected
    assert example({"prompt": "Q\n\nmore", "completion": "A", "system": "Be."}, PAIRS).ids.tolist() == expected
    assert example(alpaca | {"input": "", "system": None}, PAIRS).ids.tolist() == example(talk("Q", "A")).ids.tolist()
    assert "got another in 'prompt' ('shown to people')" in reason_of(alpaca | {"prompt": "shown to people"}, PAIRS)
    both = {"prompt": "Q", "completion": "A", "ask": "no", "instruction": "no", "output": "no"}
    assert "got another in 'instruction' ('no')" in reason_of(both, PAIRS)
    asked = Dataset(("x",), type="instruction", instruction_field="ask")
    assert example(both, asked).ids.tolist() == example(talk("no", "no")).ids.tolist()
    assert "got 'prompt', 'completion'" in reason_of({"prompt": "Q", "completion": "A"}, asked)
    named = Dataset(("x",), type="instruction", prompt_field="q", completion_field="a")
    assert (
        example({"q": "Q", "a": "A", "instruction": "no"}, named).ids.tolist() == example(talk("Q", "A")).ids.tolist()
    )


@pytest.mark.parametrize("tokenizer", [BYTES, *TOKENIZERS.values()], ids=["bytes", *TOKENIZERS])
def test_instructions_without_a_template(tokenizer):
    found = example({"prompt": "the cat", "completion": " sat", "system": "is"}, PAIRS, tokenizer, None)
    bos = [1] if tokenizer is TOKENIZERS["metaspace"] else []
    prompt = [*bos, *tokenizer.encode("is\n\nthe cat")]
    assert found.ids[: len(prompt)].tolist() == prompt and found.ids[-1] == tokenizer.eos_id
    assert found.trained is not None
    assert found.trained.tolist() == [False] * len(prompt) + [True] * (len(found.ids) - len(prompt))
    assert tokenizer.decode(found.ids).endswith("the cat sat")
    alpaca = example({"instruction": "Q", "input": "more", "output": "A"}, PAIRS, tokenizer, None)
    assert tokenizer.decode(alpaca.ids) == "Q\n\nmore\n\nA"
    assert example({"prompt": "a", "completion": "b"}, PAIRS, tokenizer, None, train_on="all").trained is None


BAD_PAIRS = [
    ({"a": 1}, "the prompt in 'prompt' or the instruction in 'instruction', got 'a'"),
    ({"prompt": "a"}, "the completion in 'completion', got 'prompt'"),
    ({"prompt": "a", "completion": None}, "as a string, got a NoneType"),
    ({"prompt": [{"role": "user"}], "completion": "b"}, "message 1 with text in 'value', got 'role'"),
    ({"prompt": 5, "completion": "b"}, "the prompt in 'prompt' as a string, got a int"),
    ({"prompt": "a", "completion": "\n"}, "the completion in 'completion', got an empty one"),
    ({"instruction": "a"}, "the output in 'output', got 'instruction'"),
    ({"instruction": "a", "input": 5, "output": "b"}, "the input in 'input' as a string, got a int"),
]


@pytest.mark.parametrize("record, said", BAD_PAIRS, ids=map(str, range(len(BAD_PAIRS))))
def test_bad_instructions(record, said):
    assert said in reason_of(record, PAIRS)


def test_long_answers_are_tokenised_in_pieces(monkeypatch):
    """Each of whole lines, so that the ids are those of the whole."""
    tokenizer = TOKENIZERS["byte_level"]
    row = {"prompt": "the cat", "completion": "".join(f"the cat {i} sat\non the mat\n" for i in range(40))}
    expected = example(row, PAIRS, tokenizer, None)
    given = []
    encode_batch = tokenizer.encode_batch
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: given.extend(texts) or encode_batch(texts))
    monkeypatch.setattr(texts, "PIECE_CHARS", 80)
    monkeypatch.setattr(tokenizer, "section_starts", lambda text: [0])
    found = example(row, PAIRS, tokenizer, None)
    assert max(map(len, given)) <= 80 and len(given) > 10
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.trained, expected.trained)


# -- Encoders ---------------------------------------------------------------------------------------------------------


def test_errors_of_encoders():
    with pytest.raises(ConfigError, match="talk: expected a chat template for its conversations, got a tokenizer"):
        Encoder(TALK, BYTES)
    with pytest.raises(ConfigError, match="train_on: expected one of assistant, last, all, got 'user'"):
        Encoder(TALK, BYTES, CHATML, train_on="user")


def test_the_fingerprint_covers_all_that_ids_depend_on():
    class Other(ByteTokenizer):
        name = "other"

    class OtherEos(ByteTokenizer):
        stop_ids = frozenset({256, 10})

    assert CHATML is not None
    different = [
        Encoder(TALK, BYTES, CHATML),
        Encoder(TALK, Other(), CHATML),
        Encoder(TALK, OtherEos(), CHATML),
        Encoder(TALK, BYTES, dataclasses.replace(CHATML, text=CHATML.text + " ")),
        *(Encoder(TALK, BYTES, CHATML, train_on=train_on) for train_on in TRAIN_ON[1:]),
        Encoder(TALK, BYTES, CHATML, system_prompt="a"),
        Encoder(dataclasses.replace(TALK, system_prompt="b"), BYTES, CHATML),
        Encoder(dataclasses.replace(TALK, messages_field="turns"), BYTES, CHATML),
        Encoder(dataclasses.replace(TALK, tools_field=""), BYTES, CHATML),
        Encoder(PAIRS, BYTES, CHATML),
        Encoder(PAIRS, BYTES, None),
    ]
    assert len({encoder.fingerprint for encoder in different}) == len(different)
    rows = dataclasses.replace(TALK, path=("other",), samples=3, weight=2.0)
    assert Encoder(rows, BYTES, CHATML).fingerprint == different[0].fingerprint


@pytest.mark.parametrize("tokenizer", [BYTES, TOKENIZERS["byte_level"]], ids=["bytes", "byte_level"])
def test_an_encoder_can_be_sent_to_another_process(tokenizer):
    encoder = Encoder(TALK, tokenizer, CHATML)
    copy = pickle.loads(pickle.dumps(encoder))
    rows = [DataRow(talk("Hi", "Yo"), "1")]
    assert copy.fingerprint == encoder.fingerprint
    assert copy.encode(rows)[0].ids.tolist() == encoder.encode(rows)[0].ids.tolist()


# -- The table of --debug ---------------------------------------------------------------------------------------------


def test_the_table_shows_tokens_labels_and_documents():
    inputs = np.array([[*b"Hi\n", 256, 0xC3, 0]])
    labels = np.array([[-1, 10, 256, -1, 65, -1]])
    starts = np.array([[0, 0, 0, 3, 3, 5]])
    lines = list(sample_table(inputs, labels, starts, BYTES, color=False))
    assert lines[0] == "row 0: 2 documents, 3 of 6 tokens have a label, 1 padding"
    fields = [line.split() for line in lines[2:]]
    assert [int(f[0]) for f in fields] == [0, 1, 2, 0, 1, 0]
    assert [f[1] for f in fields] == ["0", "0", "0", "1", "1", "-"]
    assert [int(f[2]) for f in fields] == [72, 105, 10, 256, 195, 0]
    assert [f[3] for f in fields] == ["'H'", "'i'", "'\\n'", "'<end>'", "'\\\\xc3'", "padding"]
    assert [" ".join(f[4:]) for f in fields] == ["ignored", "10 '\\n'", "256 '<end>'", "ignored", "65 'A'", "ignored"]


def test_padding_after_an_example_in_a_row_of_its_own():
    """A token 0 that is a label is none; neither is one in a document of a packed row that goes on."""
    inputs, labels = np.array([5, 0, 6, 0, 0]), np.array([-1, 6, 0, -1, -1])
    lines = list(sample_table(inputs, labels, None, BYTES, color=False))
    assert lines[0] == "row 0: 1 documents, 2 of 5 tokens have a label, 1 padding"
    assert [line.split()[3] for line in lines[2:]] == ["'\\x05'", "'\\x00'", "'\\x06'", "'\\x00'", "padding"]
    whole = list(sample_table(inputs, labels, np.array([0, 0, 0, 0, 0]), BYTES, color=False))
    assert whole[0] == "row 0: 1 documents, 2 of 5 tokens have a label" and "padding" not in "".join(whole)


def test_the_table_has_colours_and_rows():
    inputs = np.zeros((2, 1, 3), np.int32)
    labels = np.array([[[1, -1, 1]], [[-1, -1, -1]]], np.int32)
    lines = list(sample_table(inputs, labels, None, BYTES, color=True))
    assert len(lines) == 2 * 5 and lines[5].startswith("row 1: 0 documents, 0 of 3")
    assert lines[2].startswith("\x1b[32m") and lines[3].startswith("\x1b[2m") and lines[2].endswith("\x1b[0m")
    assert "\x1b" not in "".join(sample_table(inputs, labels, None, BYTES, color=False))
