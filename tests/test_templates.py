"""Chat templates against transformers' rendering (fixtures/chat_reference.json), and errors in one line."""

import json
from pathlib import Path

import pytest

import surojax.data.templates as templates
from surojax.data.data_rows import NotARow
from surojax.data.templates import Template, load_template
from surojax.data.tokenizer import ByteTokenizer
from surojax.errors import ConfigError

REFERENCE = json.loads((Path(__file__).parent / "fixtures" / "chat_reference.json").read_text(encoding="utf-8"))
CASES = [case for case in REFERENCE["cases"] if case["tokenizer"] != "metaspace"]
SHIPPED = Path(templates.__file__).with_name("templates")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["template"])
def test_equals_transformers(case):
    template = Template(REFERENCE["templates"][case["template"]], "", bos="<s>", eos="</s>")
    assert template.render(case["messages"], case["tools"]) == case["text"]


@pytest.mark.parametrize("name", templates.NAMES)
def test_the_shipped_templates_are_those_that_transformers_rendered(name):
    """Where not: run fixtures/make_chat_reference.py after a change of a template."""
    loaded = load_template(name, ByteTokenizer())
    assert loaded is not None and loaded.text == REFERENCE["templates"][name]
    assert sorted(path.stem for path in SHIPPED.glob("*.jinja")) == sorted(templates.NAMES)


# The conversation of llama.cpp's tests of chat templates, and the texts that models of these families were trained on.
TALK = [
    ("system", "You are a helpful assistant"),
    ("user", "Hello"),
    ("assistant", "Hi there"),
    ("user", "Who are you"),
]
DOCUMENTED = {
    "chatml": "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    "<|im_start|>assistant\nHi there<|im_end|>\n<|im_start|>user\nWho are you<|im_end|>\n<|im_start|>assistant\n",
    "gemma": "<bos><start_of_turn>user\nYou are a helpful assistant\n\nHello<end_of_turn>\n<start_of_turn>model\n"
    "Hi there<end_of_turn>\n<start_of_turn>user\nWho are you<end_of_turn>\n<start_of_turn>model\n",
    "llama3": "<bos><|start_header_id|>system<|end_header_id|>\n\nYou are a helpful assistant<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "Hi there<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nWho are you<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<bos>[INST] You are a helpful assistant\n\nHello[/INST] Hi there</s>[INST] Who are you[/INST]",
}


@pytest.mark.parametrize("name", templates.NAMES)
def test_the_shipped_templates_write_the_documented_format(name):
    template = Template((SHIPPED / f"{name}.jinja").read_text(), name, bos="<bos>", eos="</s>")
    messages = [{"role": role, "content": content} for role, content in TALK]
    assert template.render(messages, add_generation_prompt=True) == DOCUMENTED[name]


def test_a_template_is_the_tokenizers_own_a_name_or_a_file(tmp_path):
    class WithTemplate(ByteTokenizer):
        chat_template = "own"

    assert load_template("", ByteTokenizer()) is None
    own = load_template("", WithTemplate())
    assert own is not None and own.render([]) == "own"
    path = tmp_path / "mine.jinja"
    path.write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", encoding="utf-8")
    mine = load_template(str(path), WithTemplate())
    assert mine is not None and mine.render([{"role": "user", "content": "ü"}]) == "<s>ü</s>" and not mine.shows_tools
    chatml = load_template("chatml", WithTemplate())
    assert chatml is not None and chatml.shows_tools


def test_the_date_is_the_same_every_day():
    assert Template("{{ strftime_now('%d %b %Y') }}", "").render([]) == "26 Jul 2024"


def error_of(spec) -> str:
    with pytest.raises(ConfigError) as caught:
        load_template(str(spec), ByteTokenizer())
    message = str(caught.value)
    assert "\n" not in message and "expected" in message and "got" in message and ";" in message
    return message


def test_errors_of_templates(tmp_path):
    path = tmp_path / "broken.jinja"
    for text in ("line one\n{% for m in messages %}", "\n{{ a b }}", "\n{% generation %}x", "\n{% unknown %}"):
        path.write_text(text, encoding="utf-8")
        message = error_of(path)
        assert f"{path}:2: expected a Jinja template, got a syntax error" in message and "chatml" in message
    assert "chatml, gemma, llama3, mistral" in error_of("chatm1") and "'chatm1'" in error_of("chatm1")
    path.write_bytes(b"\xff")
    assert "broken.jinja" in error_of(path)


ROW_ERRORS = {
    "{{ raise_exception('Roles must\nalternate') }}": "'Roles must alternate'",
    "{{ messages[0].content + 1 }}": "can only concatenate str",
    "{{ messages[5].content }}": "",
    "{{ messages.append(1) }}": "unsafe",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{% for i in range(1000000000) %}{% endfor %}": "Range too big",
}


@pytest.mark.parametrize("text", ROW_ERRORS, ids=map(str, range(len(ROW_ERRORS))))
def test_what_a_template_refuses(text):
    with pytest.raises(NotARow) as caught:
        Template(text, "t.jinja").render([{"role": "user", "content": "a"}])
    message = str(caught.value)
    assert message.startswith("expected a conversation that t.jinja takes, got '") and "\n" not in message
    assert ROW_ERRORS[text] in message and "choose another chat_template" in message


@pytest.mark.parametrize("name", ["gemma", "mistral"])
@pytest.mark.parametrize("roles", ["assistant", "user user", "user assistant assistant", "user tool", "user system"])
def test_roles_that_do_not_alternate(name, roles):
    template = load_template(name, ByteTokenizer())
    assert template is not None
    with pytest.raises(NotARow, match="user and assistant in turn"):
        template.render([{"role": role, "content": "a"} for role in roles.split()])


def test_no_template_leaves_out_a_call_of_a_tool():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    talk = [{"role": "user", "content": "a"}, call]
    for name in templates.NAMES:
        template = load_template(name, ByteTokenizer())
        assert template is not None
        if name == "chatml":
            assert '{"name": "look", "arguments": {}}' in template.render(talk)
        else:
            with pytest.raises(NotARow, match="tool_calls"):
                template.render(talk)


def test_half_a_surrogate_pair_is_a_reason_and_no_traceback():
    """In a template, as in a spoiled tokenizer_config.json: found by tests/test_fuzz.py."""
    with pytest.raises(NotARow, match=r"half a surrogate pair \(\\ud83d\)"):
        Template("{{ messages[0].content }}\ud83d", "a template").render([{"role": "user", "content": "hi"}])
