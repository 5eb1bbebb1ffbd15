"""Rows in other tools' formats: what carries meaning is trained as transformers renders it, or refused by name.

Texts are those of transformers (fixtures/rows_reference.json).
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from surojax.data import row_fields
from surojax.data.cells import decoded
from surojax.data.conversations import text_of_row
from surojax.data.data_rows import BadRow, DataRow, NotARow
from surojax.data.datasets import Dataset, parse_dataset
from surojax.data.documents import read_documents
from surojax.data.examples import Encoder, Example
from surojax.data.items import hold_out
from surojax.data.openai_pairs import as_pair
from surojax.data.rollouts import RolloutEncoder
from surojax.data.row_fields import MEANINGS, has_content
from surojax.data.templates import Template, load_template
from surojax.data.token_rows import TokenEncoder
from surojax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from surojax.data.tokenizer_files import TokenizerFiles
from surojax.errors import ConfigError

FIXTURES = Path(__file__).parent / "fixtures"
REFERENCE = json.loads((FIXTURES / "rows_reference.json").read_text(encoding="utf-8"))
TOKENIZERS = json.loads((FIXTURES / "chat_reference.json").read_text(encoding="utf-8"))["tokenizers"]
BYTES = ByteTokenizer()
CHATML = load_template("chatml", BYTES)
assert CHATML is not None
TALK = Dataset(("talk",), type="conversation")
PROMPTS = Dataset(("prompts",), type="instruction")
PAIRS = Dataset(("pairs",), type="preference")
RATED = Dataset(("rated",), type="unpaired")


def found(
    record, dataset=TALK, template: Template | None = CHATML, tokenizer: Tokenizer = BYTES, **options
) -> Example | BadRow:
    (example,) = Encoder(dataset, tokenizer, template, **options).encode([DataRow(record, "a.jsonl:7")])
    return example


def reason(record, dataset=TALK, template: Template | None = CHATML, **options) -> str:
    example = found(record, dataset, template, **options)
    assert isinstance(example, BadRow), record
    assert example.reason.startswith("expected ") and ", got " in example.reason and ";" in example.reason
    assert "\n" not in example.reason
    return example.reason


def text(record, dataset=TALK, template: Template | None = CHATML, **options) -> str:
    example = found(record, dataset, template, **options)
    assert isinstance(example, Example), example
    return BYTES.decode(example.ids)


def trained(record, dataset=TALK, template: Template | None = CHATML, tokenizer: Tokenizer = BYTES, **options) -> str:
    example = found(record, dataset, template, tokenizer, **options)
    assert isinstance(example, Example), example
    mask = np.ones(len(example.ids), bool) if example.trained is None else example.trained
    return "".join(tokenizer.token_text(i) for i in example.ids[mask])


def says(role, content, **others):
    return {"role": role, "content": content, **others}


def talk(*contents, **others):
    """A row of a user and an assistant in turn; others: of the last message."""
    messages = [says("assistant" if i % 2 else "user", content) for i, content in enumerate(contents)]
    messages[-1] |= others
    return {"messages": messages}


# -- Calls, tools, roles and reasoning, against transformers ----------------------------------------------------------


def template_of(name: str) -> Template:
    texts = REFERENCE["templates"][name]
    if isinstance(texts, str):
        return Template(texts, "t.jinja", "<s>", "</s>")
    return Template(texts["default"], "t.jinja", "<s>", "</s>", texts["tool_use"])


def with_each_call(messages, change):
    """Messages with `change` made of each call."""
    return [
        m | {"tool_calls": [change(call) for call in m["tool_calls"]]} if "tool_calls" in m else m for m in messages
    ]


def decoded_call(call):
    function = call["function"]
    arguments = function["arguments"]
    return call | {
        "function": function | {"arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}
    }


def arguments_as(change):
    return lambda call: call | {"function": call["function"] | {"arguments": change(call["function"]["arguments"])}}


def calls_in_roles(messages):
    """LLaMA-Factory's form: a message of `function_call` for each call, results of `observation`."""
    rows = []
    for m in messages:
        rows += [{"from": "function_call", "value": json.dumps(call["function"])} for call in m.get("tool_calls", ())]
        roles = {"user": "human", "assistant": "gpt", "tool": "observation"}
        others = {name: value for name, value in m.items() if name not in ("role", "content")}
        rows += [] if "tool_calls" in m else [{"from": roles.get(m["role"], m["role"]), "value": m["content"]} | others]
    return rows


def with_nulls(messages):
    """As Parquet files fill up structs."""
    names = {name for m in messages for name in m} | {"function_call", "weight", "images", "name", "reasoning"}
    return [dict.fromkeys(sorted(names)) | m for m in messages]


SPELLINGS = {
    "objects": lambda messages: messages,
    "texts": lambda messages: with_each_call(messages, arguments_as(json.dumps)),
    "compact texts": lambda messages: with_each_call(
        messages, arguments_as(lambda a: json.dumps(a, separators=(",", ":")))
    ),
    "texts twice": lambda messages: with_each_call(messages, arguments_as(lambda a: json.dumps(json.dumps(a)))),
    "functions as texts": lambda messages: with_each_call(
        messages, lambda c: c | {"function": json.dumps(c["function"])}
    ),
    "calls as texts": lambda messages: with_each_call(messages, json.dumps),
    "all calls as a text": lambda messages: [
        m | {"tool_calls": json.dumps(m["tool_calls"])} if "tool_calls" in m else m for m in messages
    ],
    "empty arguments": lambda messages: with_each_call(messages, arguments_as(lambda a: a or "")),
    "roles": calls_in_roles,
    "nulls": with_nulls,
    "no content": lambda messages: [m | {"content": None} if "tool_calls" in m else m for m in messages],
    "parts": lambda messages: [
        m | {"content": [{"type": "text", "text": part} for part in m["content"]]} if m["content"] else m
        for m in messages
    ],
}
TOOLS = {
    "objects": lambda tools: tools,
    "a text": json.dumps,
    "texts": lambda tools: [json.dumps(tool) for tool in tools],
    "a text of texts": lambda tools: json.dumps([json.dumps(tool) for tool in tools]),
    "functions as texts": lambda tools: [tool | {"function": json.dumps(tool["function"])} for tool in tools],
    "parameters as texts": lambda tools: [
        tool | {"function": tool["function"] | {"parameters": json.dumps(tool["function"]["parameters"])}}
        for tool in tools
    ],
}


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: f"{case['template']}-{bool(case['tools'])}")
def test_every_spelling_of_a_row_is_what_transformers_renders(case):
    template = template_of(case["template"])
    record = {"chat_template_kwargs": case["variables"]}
    objects = with_each_call(case["messages"], decoded_call)
    for name, spelled in SPELLINGS.items():
        record["messages"] = spelled(objects)
        record["tools"] = case["tools"]
        assert text(record, template=template, train_on="all") == case["text"], name
    if case["tools"]:
        for name, spelled in TOOLS.items():
            given = record | {"messages": objects, "tools": spelled(case["tools"])}
            assert text(given, template=template, train_on="all") == case["text"], name
        functions = [tool["function"] for tool in case["tools"]]
        given = record | {"messages": objects, "tools": None, "functions": functions}
        assert text(given, template=template, train_on="all") == case["text"]


def test_an_older_call_is_a_call():
    """OpenAI's `function_call` with or without content, and results of the role `function`."""
    new = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    old = {"name": "look", "arguments": '{"at": "it"}'}
    for content in ("", "Let me see."):
        rows = [
            {
                "messages": [
                    says("user", "a"),
                    says("assistant", content or None, **call),
                    says(role, "b"),
                    says("assistant", "c"),
                ]
            }
            for call, role in (({"tool_calls": [new]}, "tool"), ({"function_call": old}, "function"))
        ]
        assert trained(rows[0]) == trained(rows[1]) and '"look"' in trained(rows[0])
    both = talk("a", "b", function_call=old, tool_calls=[new])
    assert "expected calls in 'tool_calls' or 'function_call' of message 2, got both" in reason(both)
    assert "'tools' or 'functions', got both" in reason(talk("a", "b") | {"tools": [new], "functions": [{"name": "f"}]})
    asks = {"messages": [says("user", "a", tool_calls=[new]), says("assistant", "b")]}
    assert "expected calls of tools of the assistant only, got them in message 1" in reason(asks)
    llama = talk("a", "b", tool_calls=[{"name": "look", "parameters": {"at": "it"}}])
    assert text(llama) == text(talk("a", "b", tool_calls=[{"name": "look", "arguments": {"at": "it"}}]))
    nulls = talk("a", "b", function_call={"name": None, "arguments": None})
    assert text(nulls) == text(talk("a", "b", tool_calls="")) == text(talk("a", "b"))
    one = talk("a", "b", tool_calls=[{"name": "look"}])
    for same in ({"name": "look"}, [None, {"name": "look", "arguments": "null"}]):
        assert text(talk("a", "b", tool_calls=same)) == text(one)
    for tools in (" ", [None]):
        assert text(talk("a", "b") | {"tools": tools}) == text(talk("a", "b"))
    without = {"name": "look", "parameters": None}
    assert '"parameters": null' in text(talk("a", "b") | {"tools": [{"type": "function", "function": without}]})


@pytest.mark.parametrize(
    "calls",
    ["x", 5, [5], ["x"], [{}], [{"function": {"name": " "}}], [{"function": {"name": "f", "arguments": "{'a': 1}"}}]],
)
def test_calls_that_are_none_are_refused(calls):
    message = reason(talk("a", "b", tool_calls=calls))
    assert "call" in message and ("correct the row" in message or "correct or remove the row" in message)


def test_arguments_that_are_no_json_are_kept_where_the_template_takes_texts():
    row = talk("a", "", tool_calls=[{"function": {"name": "run", "arguments": "print(1)"}}])
    assert "run print(1)</call>" in text(row, template=template_of("text"))
    assert "the arguments of a call of 'run' as a JSON object, got 'print(1)'" in reason(row)
    assert "'x', a text" in reason(talk("a", "", tool_calls=[{"name": "run", "arguments": "x"}]))


# -- Roles ------------------------------------------------------------------------------------------------------------


def test_roles_of_other_tools():
    plain = text(
        {
            "messages": [
                says("system", "s"),
                says("user", "a"),
                says("assistant", "b"),
                says("tool", "c"),
                says("assistant", "d"),
            ]
        }
    )
    for system, result in (("developer", "ipython"), ("system", "observation"), ("developer", "tool_response")):
        names = [system, "human", "gpt", result, "model"]
        row = {"messages": [says(role, content) for role, content in zip(names, "sabcd", strict=True)]}
        assert text(row) == plain
    calls = [says("user", "a"), says("assistant", "b"), says("tool_call", '[{"name": "f", "arguments": {}}]')]
    merged = talk("a", "b", tool_calls=[{"name": "f", "arguments": {}}])
    assert text({"messages": calls}) == text(merged)
    calls[2] = says("tool_call", '{"type": "function", "function": {"name": "f"}}')
    assert text({"messages": calls}) == text(merged)
    for none in ("look it up", "[]"):
        said = {"messages": [says("user", "a"), says("function_call", none)]}
        assert "of a role that calls tools, with the JSON of a name" in reason(said)
    weights = [says("user", "a"), says("assistant", "b", weight=0), says("function_call", '{"name": "f"}')]
    assert "with the weight of the answer before it" in reason({"messages": weights})


def test_a_dataset_maps_roles():
    named = parse_dataset({"path": "a", "type": "conversation", "roles": {"assistant": "bot", "user": ["me", "you"]}})
    assert named.roles == (("bot", "assistant"), ("me", "user"), ("you", "user"))
    row = {"messages": [says("me", "a"), says("bot", "b"), says("you", "c"), says("gpt", "d")]}
    assert text(row, named) == text(talk("a", "b", "c", "d"))
    assert "map it in roles of the dataset" in reason(row)
    prompt = dataclasses.replace(named, type="instruction")
    assert text({"prompt": [says("me", "a")], "completion": "b"}, prompt) == text(talk("a", "b"))
    swapped = dataclasses.replace(TALK, roles=(("user", "assistant"), ("assistant", "user")))
    assert trained({"messages": [says("assistant", "a"), says("user", "b")]}, swapped).startswith("b")
    asked = {"prompt": "a", "completion": [says("user", "b")]}  # the text is a message of the same names
    assert text(asked, dataclasses.replace(swapped, type="instruction")) == text(talk("a", "b"))


def test_a_dataset_names_the_fields_of_messages():
    """Others beside them are metadata: they need not agree, and the text may be in a field that means something."""
    named = dataclasses.replace(PROMPTS, role_field="who", content_field="refusal")
    answer = {"who": "gpt", "refusal": "b", "role": "bot", "from": "x", "content": "y", "value": "z"}
    assert text({"prompt": "a", "completion": [answer]}, named).endswith("assistant\nb<|im_end|>\n")
    cells = {"prompt": '[{"who": "user", "refusal": "a"}]', "completion": '{"who": "gpt", "refusal": "b"}'}
    (row,) = decoded([DataRow(cells, "a.csv:2")], named)
    assert isinstance(row, DataRow) and text(row.record, named) == text(talk("a", "b"))


BAD_ENTRIES = [
    ({"roles": {"bot": "assistant"}}, "expected system, user, assistant, tool as keys, got 'bot'"),
    ({"roles": "bot"}, "roles: expected a mapping, got 'bot'"),
    ({"roles": {"user": 5}}, "roles: expected names for user, got 5"),
    ({"roles": {"user": ["a", 5]}}, "roles: expected names for user, got ['a', 5]"),
    ({"roles": {"user": ""}}, "roles: expected names for user, got ('',)"),
    ({"roles": {"user": "a", "tool": ["a"]}}, "roles: expected one role for 'a', got user and tool"),
    ({"ignored_fields": 5}, "ignored_fields: expected names of fields, got 5"),
    ({"ignored_fields": [""]}, "ignored_fields: expected names of fields"),
    ({"ignored_fields": [5]}, "ignored_fields: expected names of fields"),
    ({"prompt_as": "text"}, "prompt_as: expected one of auto, chat, plain, got 'text'"),
    ({"type": "text", "roles": {"user": "a"}}, "roles: expected rows of type instruction or conversation"),
    ({"type": "conversation", "prompt_as": "chat"}, "prompt_as: expected rows of type instruction"),
]


@pytest.mark.parametrize("entry, said", BAD_ENTRIES, ids=map(str, range(len(BAD_ENTRIES))))
def test_errors_of_entries(entry, said):
    with pytest.raises(ConfigError) as error:
        parse_dataset({"path": "a"} | entry)
    assert said in str(error.value) and "\n" not in str(error.value)


# -- Weights of messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", row_fields.WEIGHTS)
@pytest.mark.parametrize("zero, one", [(0, 1), (False, True), (0.0, 1.0), ("0", "1"), ("false", "True")])
def test_an_answer_with_a_weight_of_0_is_not_trained(name, zero, one):
    def row(*weights):
        messages = talk("a", "b", "c", "d")["messages"]
        answers = iter(weights)
        return {"messages": [m | {name: next(answers)} if m["role"] == "assistant" else m for m in messages]}

    plain = talk("a", "b", "c", "d")
    assert trained(row(one, None)) == trained(row(one, one)) == trained(plain)
    assert trained(row(zero, one)) == "d<|im_end|>\n<end>" and text(row(zero, one)) == text(plain)
    assert trained(row(one, zero)) == trained(talk("a", "b"))  # what follows the last trained answer is left out
    assert trained(row(one, zero), train_on="all").split("assistant\n")[-1] == ""
    assert trained(row(zero, one), train_on="all") == trained(plain, train_on="all").replace("b<|im_end|>\n", "", 1)
    assert trained(row(zero, one), train_on="last") == trained(plain, train_on="last")
    assert "expected the last answer, which is the one to train" in reason(row(one, zero), train_on="last")
    assert "expected an answer to train, got 2 with a weight of 0" in reason(row(zero, zero))
    for bad in (0.5, 2, -1, "0.5", "yes", "", [0], float("nan")):
        assert f"expected a weight of 0 or 1, true or false, in {name!r} of message 2" in reason(row(bad, one))


def test_weights_of_other_messages_and_of_pairs():
    asked = {"messages": [says("user", "a", weight=1), says("assistant", "b")]}
    assert "for answers only, got it for message 1, of the user" in reason(asked)
    assert text(asked, train_on="all") == text(talk("a", "b"), train_on="all")
    silent = {"messages": [says("user", "a", weight=0), says("assistant", "b", weight=1)]}
    assert trained(silent) == trained(talk("a", "b"))
    assert "since train_on is all, got it for message 1" in reason(silent, train_on="all")
    assert "expected one weight of message 2" in reason(talk("a", "b", weight=1, train=False))
    pair = {"chosen": talk("a", "b")["messages"], "rejected": talk("a", "c")["messages"]}
    assert isinstance(found(pair, PAIRS), Example)
    assert trained(talk("a", "b", weight=np.int64(1))) == trained(talk("a", "b", train=np.bool_(True)))
    alone = {"prompt": [says("user", "a")], "chosen": says("assistant", "b"), "rejected": {"from": "gpt", "value": "c"}}
    assert text(alone, PAIRS) == text(pair, PAIRS)  # LLaMA-Factory's
    pair["chosen"][-1]["weight"] = 0
    assert "the one to train, with a weight of 1" in reason(pair, PAIRS)
    for name, value in (("mask", 1), ("masked", False), ("train_detail", [{"begin_offset": 0}])):
        assert f"got {name!r} of message 2" in reason(talk("a", "b", **{name: value}))


def test_rewritten_answers_with_a_weight_of_0():
    """A template that drops the thinking of earlier answers cannot show where those begin."""
    thinks = Template(
        "{% for m in messages %}[{{ m.role }}]{% if loop.last %}{{ m.content }}{% else %}"
        "{{ m.content.split('</think>')[-1] }}{% endif %}.{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
        "t.jinja",
    )
    row = talk("a", "<think>b</think>c", "d", "e")
    row["messages"][1]["weight"] = 0
    assert trained(row, template=thinks) == "e.<end>"
    assert "that t.jinja does not rewrite, since its weight is 0, got message 2" in reason(
        row, template=thinks, train_on="all"
    )


# -- Fields that mean something ---------------------------------------------------------------------------------------

ROWS = {
    "conversation": (TALK, talk("a", "b")),
    "instruction": (PROMPTS, {"prompt": "a", "completion": "b"}),
    "preference": (PAIRS, {"prompt": "a", "chosen": "b", "rejected": "c"}),
    "unpaired": (RATED, {"prompt": "a", "completion": "b", "label": True}),
}
NAMES = [(kind, name) for meaning in MEANINGS for kind in meaning.types for name in meaning.names if kind in ROWS]
READ = {("functions", kind) for kind in ROWS} | {
    ("history", "instruction"),
    ("history", "unpaired"),
    ("rejected", "preference"),
}


# What published rows call them: a name that a table loses is dropped from rows in silence.
PUBLISHED = {
    "MEDIA": "image images rejected_image rejected_images pixel_values video videos audio audios",
    "MEDIA_PLACES": "image_path image_paths image_url image_urls video_path video_paths video_url audio_path "
    "audio_paths audio_url objects",
    "REASONING": "reasoning_content thinking reasoning reasoning_text thoughts thought chain_of_thought cot "
    "rationale "
    "Complex_CoT reasoning_trace thinking_trajectories",
    "WEIGHTS": "weight train training trainable loss loss_scale loss_mask loss_weight",
    "WEIGHTS_OF_ROWS": "weight weights sample_weight sample_weights loss_weight loss_weights loss_scale loss_mask "
    "train training trainable",
    "WEIGHTS_OF_DOCUMENTS": "sample_weight sample_weights loss_weight loss_weights token_weights weights",
    "MASKS": "attention_mask loss_mask completion_mask assistant_masks assistant_mask response_mask tool_mask env_mask",
    "LENGTHS": "seq_lengths seq_lens sequence_lengths",
    "SPEAKERS": "user human prompter assistant gpt bot model system tool function",
}
IN_ROWS = {
    "conversation": "history chat_history conversation_history previous_messages past_turns system_prompt "
    "system_message system_instruction systemInstruction functions available_tools rejected_response "
    "rejected_responses rejected_messages rejected_answer rejected mask label kto_tag positive_messages "
    "negative_messages",
    "instruction": "history chat_history conversation_history previous_messages past_turns system_prompt "
    "system_message system_instruction systemInstruction functions available_tools context rejected_response "
    "rejected_responses rejected_messages rejected_answer rejected mask label kto_tag positive_messages "
    "negative_messages reflection corrected",
    "preference": "history chat_history conversation_history previous_messages past_turns system_prompt "
    "system_message system_instruction systemInstruction functions available_tools context rejected_response "
    "rejected_responses rejected_messages rejected_answer rejected mask positive_messages negative_messages",
}
IN_ROWS["unpaired"] = IN_ROWS["preference"] + " reflection corrected ref_logps ref_KL_logps reference_logps "
IN_ROWS["unpaired"] += "reference_KL_logps"
IN_ROWS["preference"] += " ref_chosen_logps ref_rejected_logps reference_chosen_logps reference_rejected_logps"


def test_every_published_name_is_known():
    for table, names in PUBLISHED.items():
        assert set(names.split()) == set(getattr(row_fields, table)), table
    every = {*PUBLISHED["MEDIA"].split(), *PUBLISHED["REASONING"].split(), *PUBLISHED["WEIGHTS_OF_ROWS"].split()}
    for kind, names in IN_ROWS.items():
        known = [name for of, name in NAMES if of == kind]
        assert set(names.split()) | every | set(PUBLISHED["MEDIA_PLACES"].split()) == set(known), kind
        assert len(known) == len(set(known)), kind
    media = {*PUBLISHED["MEDIA"].split(), *PUBLISHED["WEIGHTS_OF_DOCUMENTS"].split()}
    packed = "seq_lengths seq_lens sequence_lengths cu_seqlens cu_seq_lens segment_ids document_ids sequence_ids"
    beside = {"text": "role from speaker segments", "tokens": f"position_ids {packed}"}
    for kind, names in beside.items():
        assert {name for meaning in MEANINGS for name in meaning.names if kind in meaning.types} == media | {
            *names.split()
        }


@pytest.mark.parametrize("kind", ROWS)
def test_a_field_that_means_something_is_refused_unless_it_is_empty(kind):
    dataset, record = ROWS[kind]
    for name in (name for of_kind, name in NAMES if of_kind == kind and (name, kind) not in READ):
        value = {"label": False, "kto_tag": "False"}.get(name, "some content")
        value = 0.5 if name in row_fields.WEIGHTS_OF_ROWS else "-12.5" if "_logps" in name else value
        message = reason(record | {name: value}, dataset)
        assert f"got {name!r}" in message and "ignored_fields of the dataset" in message
        for empty in (None, "", " ", [], {}, [None], {"a": None}, "[]", "null"):
            assert isinstance(found(record | {name: empty}, dataset), Example), (name, empty)


@pytest.mark.parametrize(
    "dataset, row, advice",
    [
        (PAIRS, {"prompt": {"messages": [says("user", "a")]}}, "as a text or a list of messages"),
        (PAIRS, {"prompt": 5}, "as a text or a list of messages"),
        (PAIRS, {"prompt": "a", "input": "x"}, "; join it to the prompt"),
        (PAIRS, {"prompt": "a", "context": "x"}, "; join it to the prompt"),
        (PROMPTS, {"prompt": "a", "context": "x"}, "; set instruction_field, input_field (to it) and output_field"),
        (PROMPTS, {"prompt": "a", "input": "x"}, "; set instruction_field, input_field and output_field"),
        (RATED, {"prompt": "a", "input": "x", "label": 1}, "; join it to the prompt"),
    ],
)
def test_what_belongs_to_a_prompt_is_refused(dataset, row, advice):
    for answers in (["b", "c"], [[says("assistant", "b")], [says("assistant", "c")]]):
        if dataset is not PAIRS and isinstance(answers[0], list):
            continue
        record = row | dict(zip(("chosen", "rejected"), answers, strict=True))
        record = record if dataset is PAIRS else row | {"completion": answers[0]}
        if isinstance(row["prompt"], str) or isinstance(answers[0], list):
            assert advice in reason(record, dataset)
        else:
            assert isinstance(found(record, dataset), BadRow)
    named = dataclasses.replace(PROMPTS, instruction_field="prompt", input_field="context", output_field="completion")
    assert text({"prompt": "a", "context": "x", "completion": "b"}, named) == text(talk("a\n\nx", "b"))
    asked = dataclasses.replace(PROMPTS, prompt_field="input", completion_field="output")
    assert text({"input": "a", "output": "b"}, asked) == text(talk("a", "b"))
    made = {"instruction": "a", "input": "x", "prompt": "a: x", "chosen": "b", "rejected": "c"}
    assert isinstance(found(made, PAIRS), Example)
    alpaca = dataclasses.replace(PAIRS, prompt_field="instruction")
    assert "expected no input in 'input' beside a prompt" in reason(made | {"prompt": None}, alpaca)


def test_a_prompt_that_begins_a_conversation_is_not_said_twice():
    pair = {"chosen": talk("a", "b")["messages"], "rejected": talk("a", "c")["messages"]}
    for prompt in ([says("user", "a", id=1)], [{"from": "human", "value": "a"}]):
        assert text(pair | {"prompt": prompt}, PAIRS) == text(pair, PAIRS)


def test_a_row_that_is_not_to_be_trained_is_refused():
    for value in (False, 0, "false", "False", "0", "0.0", [1, 0], [[1], [0.5]]):
        assert "expected no weight of the row, got 'train'" in reason(
            {"prompt": "a", "completion": "b", "train": value}, PROMPTS
        )
    assert text(talk("a", "b") | {"weights": [1, 1], "loss_mask": [True]}) == text(talk("a", "b"))


def test_labels_of_answers():
    """1 and 0 are true and false to objectives of rated answers; to others a bad answer is none to train."""
    row = {"prompt": "a", "completion": "b"}
    for good in (True, 1, 1.0):
        for label, sign in ((good, 1), (1 - good, -1)):
            example = found(row | {"label": label}, RATED)
            assert isinstance(example, Example) and np.all(example.numbers["desirable"] == sign)
        assert text(row | {"label": good}, PROMPTS) == text(row, PROMPTS)
    for other in (2, 0.5, "yes", None, np.ones(1), np.ones(2)):
        assert "or 1 or 0, in 'label'" in reason(row | {"label": other}, RATED)
    assert text(talk("a", "b") | {"label": 0}) == text(talk("a", "b"))  # a class


def test_every_tool_is_shown():
    shows = "{% for t in tools or [] %}[{{ t.function.name if t.function else '' }}]{% endfor %}"
    flat, whole = {"name": "look_up"}, {"type": "function", "function": {"name": "look_up"}}
    template = Template(shows + template_of("variables").text.partition("{%- for m in messages -%}")[2].join(
        ["{%- for m in messages -%}", ""]), "t.jinja")  # fmt: skip
    assert "[look_up]" in text(talk("a", "b") | {"tools": [whole]}, template=template)
    message = reason(talk("a", "b") | {"tools": [flat]}, template=template)
    assert "to show every tool, got a text without 'look_up'" in message and "'function': {...}}" in message


PARTS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson(ensure_ascii=True) }})"
    "{% endfor %}.{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
LEFT_OUT = {  # habits of published templates, and what is refused of them
    "Llama 3.1": ("{{ m.content }}", "{{ '' if m.tool_calls else m.content }}", "content of message 2, 'Let me see.'"),
    "gpt-oss": ("m.tool_calls or []", "(m.tool_calls or [])[:1]", "every call of a tool, got a text without that of"),
    "LFM2": ("m.tool_calls or []", "[]", "every call of a tool, got a text without that of 'look' in message 2"),
    "Gemma 4": ("if m.reasoning_content", "if m.reasoning_content and m.tool_calls", "reasoning of message 4"),
    "DeepSeek-R1": ("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}", "content of message 4, '<think>Mild"),
    "only called": ("{{ t | tojson }}", "{{ t.name }}", "to show every tool, got a text without 'look'"),
}  # fmt: skip


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_every_part_of_an_answer_is_shown(train_on):
    """Also what the text has elsewhere: a function's name in the tools, a tool's in the calls."""
    calls = [{"type": "function", "function": {"name": "look", "arguments": {"at": at}}} for at in ("Tromsø", "Rome")]
    row = {
        "messages": [
            says("user", "Weather?"),
            says("assistant", "Let me see.", tool_calls=calls),
            says("tool", "Warm."),
            says("assistant", "<think>Mild means warm.</think>It is warm.", reasoning_content="It said so."),
        ],
        "tools": [{"type": "function", "function": {"name": "look"}}],
    }
    shown = trained(row, template=Template(PARTS, "t.jinja"), train_on=train_on)
    assert shown.endswith("<think>It said so.</think><think>Mild means warm.</think>It is warm..<end>")
    for name, (part, instead, said) in LEFT_OUT.items():
        assert said in reason(row, template=Template(PARTS.replace(part, instead), "t.jinja"), train_on=train_on), name
    calls[0]["function"]["arguments"] |= {"days": 3, "unit": None}  # only texts are looked for
    as_texts = Template(PARTS.replace("| tojson(ensure_ascii=True)", "['at']"), "t.jinja")
    assert trained(row, template=as_texts, train_on=train_on).endswith("It is warm..<end>")
    row["messages"][1]["reasoning_content"] = "Where?"  # of earlier answers, templates leave it out
    last = Template(PARTS.replace("if m.reasoning_content", "if m.reasoning_content and loop.last"), "t.jinja")
    assert trained(row, template=last, train_on="last") == trained(row, template=last, train_on="assistant")


def test_a_content_of_another_name_has_advice_that_helps():
    row = {"messages": [{"role": "user", "parts": [{"text": "a"}]}, {"role": "model", "parts": [{"text": "b"}]}]}
    assert "name the content_field in the dataset" in reason(row)
    assert text(row, dataclasses.replace(TALK, content_field="parts")) == text(talk("a", "b"))


def test_a_field_of_metadata_is_not_refused():
    metadata = {
        **dict(id=5, source="web", category="chat", score=0.5, timestamp="2026", language="en", model="m", tokens=[1]),
        **dict(
            prompt_id="a",
            url="u",
            tags=["a"],
            reasoning="on",
            thinking=True,
            images=0,
            weight=1,
            num_turns=2,
            loss=0.53,
        ),
        **dict(
            enable_thinking=None, context=None, history=[], label=None, uuid="x", license="mit", dataset="d", train=True
        ),
        **dict(
            parallel_tool_calls=False,
            tool_choice="auto",
            metadata={"image": "a.png"},
            score_chosen=1.0,
            loss=0.5,
            train=True,
        ),
    }
    for kind, (dataset, record) in ROWS.items():
        assert text(metadata | record, dataset) == text(record, dataset), kind
    message = dict(name="Bo", id="m1", tool_call_id="c", timestamp=5, prefix=False, annotations=[], model="m", tokens=3)
    assert text(talk("a", "b", **message)) == text(talk("a", "b"))


def test_media_are_refused_in_messages_and_texts_and_parts():
    llava = {"image": "a.jpg", "conversations": [says("human", "<image>\nWhat?"), says("gpt", "A cat.")]}
    assert "expected no media, since texts are trained, got 'image' ('a.jpg'); remove the row" in reason(llava)
    assert isinstance(found(llava | {"image": None}), Example)
    as_json = json.dumps(talk("a", "b")["messages"])  # as in a cell of a CSV file
    for messages in (as_json, [json.dumps(message) for message in talk("a", "b")["messages"]]):
        assert text({"messages": messages}) == text(talk("a", "b"))
    assert "got 'images' of message 2" in reason(talk("a", "b", images=["a.png"]))
    assert "got 'audio' of message 2" in reason(talk("a", "b", audio={"id": "x"}))
    for part in ({"type": "image"}, {"type": "image_url", "text": "a"}, {"type": "text", "text": "a", "image": "b"}):
        assert "with text in 'content', got a list of" in reason(talk([part, {"type": "text", "text": "a"}], "b"))
    assert text(talk([{"type": "text", "text": "a", "image": None}], [{"text": "b"}])) == text(talk("a", "b"))
    (item,) = read_documents(
        [DataRow({"text": "a <image>", "images": ["a.png"]}, "w")], "text", by_record=True, with_keys=True
    )
    assert isinstance(item.content, BadRow) and "got 'images'" in item.content.reason
    assert text_of_row({"text": "news", "image_url": "u", "loss": 0.5}, "text") == "news"  # of the web


def test_masks_of_token_ids_are_refused_if_they_leave_tokens_out():
    ids = {"input_ids": [5, 6, 7]}
    weights = [(name, [0, 0.5, 1]) for name in row_fields.WEIGHTS_OF_DOCUMENTS]
    masks = [(name, [0, 1, 1]) for name in row_fields.MASKS]
    for name, value in [*weights, *masks, ("labels", [-100, 6, 7]), ("images", ["a"])]:
        item = TokenEncoder(99).item(DataRow(ids | {name: value}, "w"))
        assert isinstance(item.content, BadRow) and repr(name) in item.content.reason
    for row in (
        {},
        {"attention_mask": [1, 1, 1], "labels": [5, 6, 7]},
        {"labels": None, "loss_mask": None},
        {"label": 0},
    ):
        assert np.array_equal(np.asarray(TokenEncoder(99).item(DataRow(ids | row, "w")).content), [5, 6, 7])
    for true in (True, np.bool_(True)):  # which NumPy makes 1 beside numbers
        assert isinstance(TokenEncoder(99).item(DataRow({"input_ids": [5, true, 7]}, "w")).content, BadRow)
    for none in ([[5], [6, 7]], [[5, 6]], None):
        bad = TokenEncoder(99).item(DataRow({"input_ids": none}, "w")).content
        assert isinstance(bad, BadRow) and "expected token ids, integers [tokens]" in bad.reason
    for beyond in ([5, 99], [-1, 5]):
        bad = TokenEncoder(99).item(DataRow({"input_ids": beyond}, "w")).content
        assert isinstance(bad, BadRow) and "expected ids below the tokenizer's 99, got" in bad.reason
    rollout = {"prompt_ids": [5], "completion_ids": [[6, 7], [8]], "logprobs": [[-1, -1], [-1]], "rewards": [0, 1]}
    assert isinstance(RolloutEncoder(99).item(DataRow(rollout | {"env_mask": [[1, 1], [1]]}, "w")).content, Example)
    bad = RolloutEncoder(99).item(DataRow(rollout | {"env_mask": [[1, 0], [1]]}, "w")).content
    assert isinstance(bad, BadRow) and bad.reason.startswith("env_mask: expected tokens that are all trained")


def test_ignored_fields_are_left_out_of_rows_and_messages(tmp_path):
    ignoring = dataclasses.replace(TALK, ignored_fields=("image", "refusal", "thinking"))
    row = talk("a", "b", refusal="no", thinking="hm hm")
    assert text(row, ignoring) == text(talk("a", "b"))
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"image": "a", "text": "b"}))
    from surojax.data.datasets import read_dataset

    (read,) = read_dataset(parse_dataset({"path": str(path), "ignored_fields": "image"}))
    assert isinstance(read, DataRow) and read.record == {"text": "b"}


def test_has_content():
    for empty in (None, 0, 1.5, True, "", "\n", "[]", " {} ", "null", [], {}, [None, ""], {"a": [None]}, (), b""):
        assert not has_content(empty), empty
    assert not has_content(np.zeros(0))
    for full in ("a", ["a"], [[0, 255]], [{"begin_offset": 0}], {"a": "b"}, [{"a": "b"}], b"a", np.ones(2), object()):
        assert has_content(full), full


@pytest.mark.parametrize("name", row_fields.REASONING)
def test_reasoning_beside_the_content(name):
    """Whatever its name is, it is shown under the one that the template reads."""
    row = talk("a", "b", **{name: "first\nthen"})
    for template in ("reasoning_content", "thinking"):
        assert "<think>first\nthen</think>b<|im_end|>" in trained(row, template=template_of(template))
    message = reason(row)
    assert "no reasoning beside the content of message 2, which chat_template chatml does not read" in message
    assert "<think>" in message and "ignored_fields" in message
    assert text(talk("a", "b", **{name: ""})) == text(talk("a", "b"))
    others = {"reasoning_content": "one", "thinking": "two"}
    assert "as one text" in reason(talk("a", "b", **others))
    assert "as one text" in reason(talk("a", "b", **{name: ["one"]}))


@pytest.mark.parametrize("name", ["prompt_field", "completion_field", "chosen_field", "rejected_field"])
def test_a_cell_with_messages_in_it(name):
    """Of a field that holds a text or messages; a text of a role's name alone is one."""
    dataset = PAIRS if name in ("chosen_field", "rejected_field") else PROMPTS
    field = getattr(dataset, name)
    for cell, value in (
        ('[{"role": "user", "content": "a"}]', [says("user", "a")]),
        ('{"from": "gpt", "value": "b"}', {"from": "gpt", "value": "b"}),
        ('{"messages": []}', {"messages": []}),
        ('["role"]', '["role"]'),
        ('{"role": "x"}', '{"role": "x"}'),
        ("[1, 2", "[1, 2"),
    ):
        (row,) = decoded([DataRow({field: cell}, "a.csv:2")], dataset)
        assert isinstance(row, DataRow) and row.record == {field: value}
    other = Dataset(("talk",), type="conversation", **{name: field})
    (row,) = decoded([DataRow({field: '[{"role": "user", "content": "a"}]'}, "a.csv:2")], other)
    assert isinstance(row, DataRow) and isinstance(row.record[field], str)


def test_conversations_of_a_pair_differ_in_their_last_message():
    differ = {"chosen": talk("a", "b")["messages"], "rejected": talk("x", "c")["messages"]}
    assert "two conversations that differ in the last message" in reason(differ, PAIRS)
    asked = {"chosen": talk("a", "b", "c")["messages"], "rejected": talk("a", "b", "d")["messages"]}
    assert "two conversations that differ in the last message" in reason(asked, PAIRS)
    alone = {"prompt": [], "chosen": [says("assistant", "b")], "rejected": [says("assistant", "c")]}
    openai = {"input": {"messages": []}, "preferred_output": alone["chosen"], "non_preferred_output": alone["rejected"]}
    for row in (alone, as_pair(openai, "prompt", "chosen", "rejected", "tools")):
        assert "expected messages before the two answers, got none" in reason(row, PAIRS)
    anthropic = {"chosen": "Human: a Assistant: b", "rejected": "Human: a Assistant: c"}
    assert "or write what both answers begin with into it" in reason(anthropic, PAIRS)
    same = {"chosen": talk("a", "b")["messages"], "rejected": talk("a", "b")["messages"]}
    assert "two answers of which one is better, got the same text" in reason(same, PAIRS)


def test_ids_are_int32():
    rollout = {"prompt_ids": [1, 2], "completion_ids": [[3, 4], [5]], "logprobs": [[-0.5, -1], [-2]]}
    for more in ({"rewards": [0, 1]}, {"advantages": [0.5, -0.5]}):
        example = RolloutEncoder(99).item(DataRow(rollout | more, "w")).content
        assert isinstance(example, Example) and example.ids.dtype == np.int32
    assert np.asarray(TokenEncoder(99).item(DataRow({"input_ids": [1, 2, 3]}, "w")).content).dtype == np.int32
    example = found(talk("a", "b"))
    assert isinstance(example, Example) and example.ids.dtype == BYTES.encode("a").dtype == np.int32


@pytest.mark.parametrize(
    "tokens, parts", [(1, [(1, False)]), (2, [(1, False), (1, True)]), (100, [(95, False), (5, True)])]
)
def test_a_single_row_of_ids_is_divided(tokens, parts):
    encoder = TokenEncoder(99)
    rows = [encoder.item(DataRow({"input_ids": [1] * tokens}, "w"))]
    assert [(len(item.content), is_out) for item, is_out in hold_out(rows, 0.01, encoder.split)] == parts


def test_earlier_turns_beside_a_prompt():
    row = {"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "s"}
    assert trained(row, PROMPTS) == trained({"messages": [says("system", "s"), *talk("a", "b", "c", "d")["messages"]]})
    assert text(row | {"history": json.dumps([["a", "b"]])}, PROMPTS) == text(row, PROMPTS)
    assert "got history too" in reason(row, PROMPTS, None)
    for history in ("a", [["a"]], [["a", None]], [["a", " "]], [{"role": "user", "content": "a"}]):
        assert "as pairs of a prompt and its completion" in reason(row | {"history": history}, PROMPTS)


def test_tools_in_a_message():
    """Some templates read them there (GLM-4's); others would leave them out."""
    row = {"messages": [says("system", "s", tools=[{"name": "look"}]), *talk("a", "b")["messages"]]}
    reads = Template(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m['tools'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
        "t.jinja",
    )
    assert "look" in text(row, template=reads)
    assert "expected no 'tools' in a message, since chat_template chatml does not read it there" in reason(row)
    row["messages"][0]["tools"] = []
    assert isinstance(found(row), Example)
    for name in ("channel", "recipient"):  # of OpenAI's harmony format
        assert f"expected no {name!r} in a message" in reason(talk("a", "b", **{name: "analysis"}))


def test_variables_of_a_template():
    template = template_of("variables")
    row = talk("a", "b") | {
        "chat_template_kwargs": {"enable_thinking": True, "unset": None},
        "documents": [{"text": "d"}],
    }
    assert text(row, template=template).startswith("think[d]")
    assert text(talk("a", "b") | {"enable_thinking": True}, template=template).startswith("think<")
    for unset in (False, "", float("nan")):
        assert text(talk("a", "b") | {"enable_thinking": unset}) == text(talk("a", "b"))
    asked = row | {"prompt": "a", "completion": "b", "messages": None}
    assert text(asked, PROMPTS, template).startswith("think[d]") and "got variables too" in reason(asked, PROMPTS, None)
    assert "expected no 'enable_thinking', which chat_template chatml does not read" in reason(row)
    assert "name documents in ignored_fields" in reason(talk("a", "b") | {"documents": [{"text": "d"}]})
    assert text(talk("a", "b") | {"chat_template_kwargs": [None]}) == text(talk("a", "b"))
    for variables, said in (({"messages": [1]}, "got 'messages'"), ("x", "expected an object"), (5, "got 5")):
        assert said in reason(talk("a", "b") | {"chat_template_kwargs": variables}, template=template)


# -- Prompts and completions ------------------------------------------------------------------------------------------

PROMPT = [says("system", "s"), says("user", "a"), says("assistant", "b"), says("user", "c")]


@pytest.mark.parametrize("prompt", ["c", PROMPT], ids=["text", "messages"])
@pytest.mark.parametrize(
    "completion", ["d", [says("assistant", "d")], [{"from": "gpt", "value": "d"}]], ids=["text", "list", "gpt"]
)
def test_a_prompt_and_its_completion_may_be_messages(prompt, completion):
    """As in TRL: of a prompt nothing is trained, also no answer in it."""
    messages = [*(prompt if isinstance(prompt, list) else [says("user", prompt)]), says("assistant", "d")]
    row = {"prompt": prompt, "completion": completion}
    assert text(row, PROMPTS) == text({"messages": messages})
    assert trained(row, PROMPTS) == "d<|im_end|>\n<end>"
    assert trained(row, PROMPTS, train_on="last") == "d<|im_end|>\n<end>"
    assert trained(row, PROMPTS, train_on="all") == trained({"messages": messages}, train_on="all")
    if prompt is PROMPT:
        assert "set chat_template" in reason(row, PROMPTS, None)


def test_completions_of_several_messages():
    calls = says("assistant", None, tool_calls=[{"name": "look", "arguments": "{}"}])
    row = {"prompt": [says("user", "a")], "completion": [calls, says("tool", "b"), says("assistant", "c")]}
    assert trained(row, PROMPTS).count("<|im_end|>") == 2
    assert "to train on in the completion, got none" in reason(
        {"prompt": PROMPT, "completion": [says("user", "c")]}, PROMPTS
    )
    for empty in ("prompt", "completion"):
        assert f"in {empty!r}, got an empty list" in reason({"prompt": "a", "completion": "b"} | {empty: []}, PROMPTS)
    tools = [{"name": "look"}]
    assert '{"name": "look"}' in text({"prompt": "a", "completion": "b", "tools": tools}, PROMPTS)
    assert "got tools too" in reason({"prompt": "a", "completion": "b", "tools": tools}, PROMPTS, None)
    assert "got 'images'" in reason(row | {"images": ["a"]}, PROMPTS)
    assert text(row | {"system": "s"}, PROMPTS).startswith("<|im_start|>system\ns<|im_end|>")


def test_rated_answers_may_be_messages():
    """The same tokens as of rows with texts, the prompt with another row's answer behind it too."""
    texts = [{"prompt": f"{i}?", "completion": f"{i}!", "label": i % 2 == 0} for i in range(5)]
    lists = [
        {"prompt": [says("user", r["prompt"])], "completion": [says("assistant", r["completion"])], "label": r["label"]}
        for r in texts
    ]
    mixed = [lists[i] if i % 2 else texts[i] for i in range(5)]
    encoder = Encoder(RATED, BYTES, CHATML)
    expected, *others = [encoder.encode([DataRow(r, "w") for r in rows]) for rows in (texts, lists, mixed)]
    for examples in others:
        for one, other in zip(expected, examples, strict=True):
            assert isinstance(one, Example) and isinstance(other, Example)
            np.testing.assert_array_equal(one.ids, other.ids)
            np.testing.assert_array_equal(one.trained, other.trained)
    asks = {"prompt": "a", "completion": [says("user", "b")], "label": True}
    assert "that ends with an answer of the assistant, got a message of the user" in reason(asks, RATED)


def test_texts_with_a_template_are_messages_or_plain_and_a_line_says_which():
    row = {"prompt": "a", "completion": "b"}
    plain = dataclasses.replace(PROMPTS, prompt_as="plain")
    chat = dataclasses.replace(PROMPTS, prompt_as="chat")
    assert text(row, PROMPTS) == text(row, chat) == text(talk("a", "b")) and text(row, plain) == "ab"
    assert text(row, plain) == text(row, PROMPTS, None)
    assert "become messages of chat_template chatml" in Encoder(PROMPTS, BYTES, CHATML).note
    assert "without chat_template chatml" in Encoder(plain, BYTES, CHATML).note
    assert Encoder(PROMPTS, BYTES, None).note == ""
    with pytest.raises(ConfigError, match="expected a chat template"):
        Encoder(chat, BYTES, None)
    fingerprints = {Encoder(dataset, BYTES, CHATML).fingerprint for dataset in (PROMPTS, plain)}
    assert len(fingerprints) == 2
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert text(pair, dataclasses.replace(PAIRS, prompt_as="plain")) == "abac"


# -- Templates --------------------------------------------------------------------------------------------------------


class Named(ByteTokenizer):
    """A tokenizer with these chat templates."""

    def __init__(self, default="", **named):
        self.chat_template = default
        self.named_templates = named


def test_a_template_is_chosen_by_tools_or_by_name():
    tokenizer = Named("plain", tool_use="{{ tools | length }} tools", rag="{{ messages[0].content }}")
    template = load_template("", tokenizer)
    assert template is not None and template.shows_tools
    user = [says("user", "a")]
    assert template.render(user) == "plain" and template.render(user, [{"name": "f"}]) == "1 tools"
    rag = load_template("rag", tokenizer)
    assert rag is not None and rag.render(user) == "a" and not rag.shows_tools
    only = load_template("", Named(tool_use="tools"))
    assert only is not None and only.render(user, [{}]) == "tools"
    assert "with tools only, got none; set chat_template" in reason(talk("a", "b"), template=only)
    with pytest.raises(ConfigError, match="set it to one of rag"):
        load_template("", Named(rag="a"))
    with pytest.raises(ConfigError, match="mistral, rag, or a file, got 'rags'"):
        load_template("rags", Named("a", rag="a"))
    with pytest.raises(ConfigError, match="syntax error"):
        load_template("", Named("a", tool_use="{% if %}"))


# -- Turns that end where the next one begins -------------------------------------------------------------------------

GLM = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LATE = (
    "{% for m in messages %}{{ '' if loop.first else 'END' }}[INST]{{ m.role }}[/INST]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'END' }}[INST]assistant[/INST]{% endif %}"
)
LAST = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}{{ eos_token }}{% else %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize(
    "template, expected",
    [
        (GLM, ["b<|user|>", "d</s>"]),
        (LATE.replace("END", "</s>"), ["b</s>", "d</s>"]),
        (LATE.replace("END", "\n<|im_end|>\n"), ["b\n<|im_end|>", "d</s>"]),
        (LATE.replace("END", ""), ["b[INST]", "d</s>"]),
        (LAST, ["b<|im_end|>", "d</s>"]),
        (
            LATE.replace("END", "").replace("{{ m.content }}", "{{ m.content }}<|im_end|>\n"),
            ["b<|im_end|>", "d<|im_end|>"],
        ),
        (LATE.replace("END", " and"), ["b", "d</s>"]),
    ],
)
def test_the_end_of_a_turn_is_trained_also_where_the_next_one_begins(template, expected):
    files = json.loads(TOKENIZERS["byte_level"]["tokenizer"])
    first = max(token["id"] for token in files["added_tokens"]) + 1
    names = ["<|user|>", "<|assistant|>"]
    for i, name in enumerate(names):  # in place of two ordinary tokens, which no text here needs
        others = {key: id for key, id in files["model"]["vocab"].items() if id != 300 + i}
        files["model"]["vocab"] = others
        files["added_tokens"].append(files["added_tokens"][0] | {"id": 300 + i, "content": name})
    files["model"]["merges"] = []
    assert first < 300
    tokenizer = HuggingFaceTokenizer(TokenizerFiles(json.dumps(files), bos="<s>", eos="</s>"), "t")
    made = Template(template, "t.jinja", "<s>", "</s>")
    example = found(talk("a", "b", "c", "d"), TALK, made, tokenizer)
    assert isinstance(example, Example) and example.trained is not None
    runs = np.flatnonzero(np.diff(example.trained.astype(int), prepend=0, append=0)).reshape(-1, 2)
    assert ["".join(tokenizer.token_text(i) for i in example.ids[a:b]) for a, b in runs] == expected
    assert bool(Encoder(TALK, tokenizer, made).note) == (expected[0] == "b")
    whole = example.ids.tolist()
    rendered = made.render(talk("a", "b", "c", "d")["messages"])
    assert whole[: len(tokenizer.encode(rendered))] == tokenizer.encode(rendered).tolist()


# -- Fields of one meaning --------------------------------------------------------------------------------------------

ASKED, OTHER = talk("Where is it?", "Here.")["messages"], talk("Who is it?", "She.")["messages"]
PAIR = {"chosen": ASKED, "rejected": [ASKED[0], says("assistant", "There.")]}
WORDS = {"prompt": "Where is it?", "completion": "Here."}
ALPACA = {"instruction": "Translate.", "input": "Bonjour", "output": "Good day"}
SHAREGPT = [{"from": "human", "value": "Where is it?"}, {"from": "gpt", "value": "Here."}]
REPEATED = [  # rows, the fields that repeat them, and those that say something else
    (TALK, {"messages": ASKED}, "conversations", (ASKED, SHAREGPT, json.dumps(ASKED)), (OTHER, "x", ["a"])),
    (TALK, {"messages": [says("system", "s"), *ASKED]}, "conversations", (SHAREGPT,), ([*ASKED, *OTHER],)),
    (TALK, {"messages": ASKED}, "prompt", ("Where  is it?", "<user>Where is it?<bot>", ASKED[:1]), ("Here.", "Where")),
    (TALK, {"messages": ASKED}, "conversation", ([{"in": "Where is it?", "out": "Here."}],), ([{"in": "No"}],)),
    (TALK, {"messages": ASKED}, "completion", ("Here.", ASKED[1:]), ("She.", OTHER[1:])),
    (TALK, {"messages": ASKED}, "text", ("User: Where is it? Bot: Here.", "Where is it?"), ("a news story",)),
    (TALK, {"messages": [*ASKED, *OTHER]}, "prompt", ("Who is it?", "Where is it?"), ("Where is it? Who?!",)[1:]),
    (PROMPTS, WORDS, "messages", (ASKED, ASKED[:1]), (OTHER, [*ASKED, *OTHER])),
    (PROMPTS, WORDS, "instruction", ("Where is it?",), ("Translate.",)),
    (PROMPTS, {"prompt": ASKED[:1], "completion": ASKED[1:]}, "messages", (ASKED,), (OTHER,)),
    (PROMPTS, ALPACA, "text", ("### Translate. ### Bonjour ### Good day",), ("a passage",)),
    (PROMPTS, ALPACA, "prompt", ("Translate.", "### Translate. ### Bonjour"), ("### Translate.", "Bonjour!")),
    (PAIRS, PAIR, "prompt", ("Where is it?", "Human: Where is it?", ASKED[:1]), ("Who is it?", "Here.", OTHER[:1])),
    (PAIRS, PAIR, "messages", (ASKED, SHAREGPT), (OTHER,)),
    (PAIRS, {"prompt": "a b", "chosen": "c", "rejected": "d"}, "messages", (talk("a b", "c")["messages"],), (OTHER,)),
    (RATED, WORDS | {"label": True}, "conversations", (SHAREGPT,), (OTHER,)),
]  # fmt: skip


@pytest.mark.parametrize("dataset, row, name, same, others", REPEATED, ids=map(str, range(len(REPEATED))))
def test_a_field_that_means_the_conversation_too_repeats_it_or_is_refused(dataset, row, name, same, others):
    for value in (*same, None, "", []):
        assert text(row | {name: value}, dataset) == text(row, dataset), value
    for value in others:
        assert f"got another in {name!r}" in reason(row | {name: value}, dataset), value
        ignoring = dataclasses.replace(dataset, ignored_fields=(name,))
        assert text({k: v for k, v in row.items() if k != name}, ignoring) == text(row, dataset)


def test_the_first_filled_field_is_the_conversation():
    assert text({"messages": [], "conversations": ASKED}) == text({"messages": None, "conversations": ASKED})
    named = dataclasses.replace(TALK, messages_field="conversations")
    assert text({"messages": OTHER, "conversations": ASKED}, named) == text({"messages": ASKED})
    both = {"role": "user", "from": "user", "content": None, "value": "Where is it?"}
    assert text({"messages": [both, ASKED[1]]}) == text({"messages": ASKED})
    assert "'content' or 'value' in message 1, got two that differ" in reason({"messages": [both | {"content": "?"}]})
    assert "'role' or 'from' in message 1" in reason({"messages": [both | {"from": "assistant"}]})


def test_a_prompt_before_answers_or_within_conversations():
    """A system message may be in one of the two only; a completion may begin with its prompt."""
    system = says("system", "s")
    whole = PAIR | {"chosen": [system, *PAIR["chosen"]], "rejected": [system, *PAIR["rejected"]]}
    answers = PAIR | {"chosen": PAIR["chosen"][1:], "rejected": PAIR["rejected"][1:]}
    for row in (
        whole | {"prompt": ASKED[:1]},
        PAIR | {"prompt": [system, ASKED[0]]},
        answers | {"prompt": [system, ASKED[0]]},
    ):
        assert text(row, PAIRS) == text(whole, PAIRS)
    assert text({"prompt": ASKED[:1], "completion": ASKED}, PROMPTS) == text({"messages": ASKED})
    assert "got another in 'prompt'" in reason(PAIR | {"prompt": [system, OTHER[0]]}, PAIRS)
    assert "expected messages, got an empty list" in reason({"prompt": "a", "chosen": [], "rejected": []}, PAIRS)


def test_a_weight_of_1_in_a_prompt_is_refused():
    prompt = [says("user", "a"), says("assistant", "b", weight=1), says("user", "c")]
    row = {"prompt": prompt, "completion": "d"}
    assert "expected no weight of 1 in the prompt, of which nothing is trained, got it for message 2" in reason(
        row, PROMPTS
    )
    assert "of message 2" not in trained(row, PROMPTS, train_on="all")
    assert trained(row | {"prompt": [*prompt[:1], says("assistant", "b", weight=0), prompt[2]]}, PROMPTS) == trained(
        {"prompt": "c", "completion": "d"}, PROMPTS
    )


# -- Segments, system prompts, variables ------------------------------------------------------------------------------

SEGMENTED = Dataset(("segments",), type="segments")


def test_segments_are_trained_by_their_labels():
    """As Axolotl reads them: every text as it is, no token added."""
    parts = [{"label": True, "text": "Hi "}, {"label": False, "text": "you"}, {"label": "true", "text": "!"}]
    for row in ({"segments": parts}, {"segments": json.dumps(parts)}, {"segments": [*parts, {"label": 0, "text": ""}]}):
        for template in (CHATML, None):
            assert text(row, SEGMENTED, template) == "Hi you!" and trained(row, SEGMENTED, template) == "Hi !"
    for bad in ("x", [], ["a"], [{"text": "a"}], [{"label": 2, "text": "a"}], [{"label": True}], {"label": True}, None):
        assert "segment" in reason({"segments": bad}, SEGMENTED), bad
    assert "expected a segment to train" in reason({"segments": parts[1:2]}, SEGMENTED)
    assert "got 'system' ('s')" in reason({"segments": parts, "system": "s"}, SEGMENTED)
    with pytest.raises(ConfigError, match="train_on: expected assistant for segments"):
        Encoder(SEGMENTED, BYTES, None, train_on="all")


def test_a_system_prompt_may_be_a_list_of_parts():
    plain = text(talk("a", "b") | {"system": "Be brief."})
    for parts in (["Be brief."], [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]):
        for value in (parts, json.dumps(parts)):
            assert text(talk("a", "b") | {"system": value}) == plain
    for empty in (None, "", [], "[]", "null", "None"):
        assert text(talk("a", "b") | {"system": empty}) == text(talk("a", "b"))
    for bad in ({"a": "b"}, [1], [{"type": "image"}], "[1]"):
        assert "the system prompt in 'system' as a text" in reason(talk("a", "b") | {"system": bad})


def test_variables_are_used_or_refused():
    template = template_of("variables")
    for yes in (True, 1, "true", "True"):
        assert text(talk("a", "b") | {"enable_thinking": yes}, template=template).startswith("think<")
    said = {"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True}
    twice = {"chat_template_kwargs": {"enable_thinking": 2}, "enable_thinking": 2}
    for bad in ({"enable_thinking": "auto"}, {"enable_thinking": 2}, said, twice):
        assert "true or false in 'enable_thinking'" in reason(talk("a", "b") | bad, template=template)
    assert "a list of documents" in reason(talk("a", "b") | {"documents": "all of them"}, template=template)


def test_documents_that_are_parts_of_something_are_refused():
    """OASST's messages in rows of their own, packed token ids, weights of texts, labelled segments beside a text."""
    oasst = {"message_id": "1", "parent_id": "0", "text": "Hi", "role": "prompter", "lang": "en"}
    for row, said in (
        (oasst, "got 'role' ('prompter'); join the messages of a conversation (OASST's: by parent_id)"),
        ({"text": "a", "from": "Human"}, "got 'from'"),
        ({"text": "a", "sample_weight": 0.5}, "weight of the row"),
        ({"text": "a", "segments": [{"label": True, "text": "a"}]}, "labelled segments"),
        ({"text": "a", "segments": '[{"label": true, "text": "a"}]'}, "labelled segments"),  # as in a CSV file
    ):
        with pytest.raises(NotARow) as error:
            text_of_row(row, "text")
        assert said in str(error.value)
    for fine in (
        {"from": "bo@example.org"},
        {"role": "engineer"},
        {"sample_weight": 1},
        {"segments": [{"start": 0.5}]},
        {"role": 5, "from": None, "segments": 5},
        {"segments": ["label"]},
    ):
        assert text_of_row({"text": "a"} | fine, "text") == "a"
    for name, bad, good in (
        ("position_ids", [0, 1, 0], [0, 1, 2]),
        ("seq_lengths", [2, 1], [3]),
        ("cu_seqlens", [0, 2, 3], [0, 3]),
        ("segment_ids", [1, 1, 2], [1, 1, 1]),
    ):
        ids = {"input_ids": [5, 6, 7]}
        item = TokenEncoder(99).item(DataRow(ids | {name: bad}, "w"))
        assert isinstance(item.content, BadRow) and repr(name) in item.content.reason
        for fine in (good, None, 3):
            assert not isinstance(TokenEncoder(99).item(DataRow(ids | {name: fine}, "w")).content, BadRow)
    rollout = {"prompt_ids": [5], "completion_ids": [[6], [8]], "logprobs": [[-1], [-1]], "rewards": [0, 1]}
    for name, value in (("images", ["a.png"]), ("sample_weight", 0.5)):
        bad = RolloutEncoder(99).item(DataRow(rollout | {name: value}, "w")).content
        assert isinstance(bad, BadRow) and repr(name) in bad.reason and bad.reason.count(";") == 1
