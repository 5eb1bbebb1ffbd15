"""From texts and messages to ids, and from ids to answers."""

import dataclasses
import io

import pytest
from commands import generate
from small import CONFIG, drawn_params

from surojax import ConfigError
from surojax.data.templates import load_template
from surojax.data.tokenizer import ByteTokenizer
from surojax.inference.chat_history import ChatHistory
from surojax.inference.prompts import answer_message, complete, conversation_ids, message_ids, text_ids
from surojax.inference.sample import generate as generate_ids
from surojax.inference.trained_model import Trained
from surojax.models import decoder_model

WORDS = ByteTokenizer()
BYTES = dataclasses.replace(CONFIG, vocab_size=320)


def trained(template: str = "chatml") -> Trained:
    params = drawn_params(BYTES, 1, times=3)
    return Trained(decoder_model.build(BYTES), params, WORDS, load_template(template, WORDS))


def test_texts_begin_as_the_tokenizer_says():
    assert text_ids(WORDS, "ab").tolist() == [97, 98] and text_ids(WORDS, "").tolist() == [256]
    begins = ByteTokenizer()
    begins.bos_id, begins.adds_bos = 7, True
    assert text_ids(begins, "ab").tolist() == [7, 97, 98] and text_ids(begins, "").tolist() == [7]
    assert text_ids(begins, "\x07b").tolist() == [7, 98]  # it is there already
    for bos, adds in ((7, False), (None, True)):
        begins.bos_id, begins.adds_bos = bos, adds
        assert text_ids(begins, "ab").tolist() == [97, 98] and text_ids(begins, "").tolist() == [256]


def test_messages_are_written_by_the_template():
    turn = "<|im_start|>{}\n{}<|im_end|>\n"
    asked = turn.format("user", "Hi") + "<|im_start|>assistant\n"
    assert bytes(message_ids(trained(), "Hi").tolist()).decode() == asked
    with_system = turn.format("system", "Be brief.") + asked
    assert bytes(message_ids(trained(), "Hi", "Be brief.").tolist()).decode() == with_system
    with pytest.raises(ConfigError, match="chat_template: expected one, since the model has none of its own"):
        message_ids(trained()._replace(template=None), "Hi")


def test_an_answer_continues_the_conversation():
    """As the text would be continued, up to the end of the turn."""
    model = trained()
    asked = bytes(message_ids(model, "Hi").tolist()).decode()
    found = answer_message(model, "Hi", max_tokens=8, temperature=0)
    assert found == complete(model, asked, max_tokens=8, temperature=0)
    first = next(generate_ids(model.model, model.weights, message_ids(model, "Hi"), max_tokens=1, temperature=0))
    stops = ByteTokenizer()
    stops.stop_ids = frozenset({first})
    assert answer_message(model._replace(tokenizer=stops), "Hi", max_tokens=8, temperature=0) == ""


def test_the_command_answers(capsys, monkeypatch):
    asked = []

    def load(checkpoint, tokenizer, template):
        asked.append((checkpoint, tokenizer, template))
        return trained()

    monkeypatch.setattr(generate, "load_trained", load)
    flags = ["--checkpoint", "X", "--max-tokens", "5", "--temperature", "0", "--prompt", "Hi", "--prompt", "So"]
    generate.main([*flags, "--chat", "--system", "Be brief.", "--chat-template", "chatml"])
    options = {"max_tokens": 5, "temperature": 0}
    expected = [answer_message(trained(), message, "Be brief.", **options) for message in ("Hi", "So")]
    assert capsys.readouterr().out == expected[0] + "\n---\n" + expected[1] + "\n"
    assert asked == [("X", "", "chatml")]
    with pytest.raises(SystemExit, match=r"error: --samples: expected --rollouts with it"):
        generate.main([*flags, "--samples", "3"])
    for none in (["--samples", "0"], ["--max-tokens", "0"]):
        with pytest.raises(SystemExit, match=r"error: --samples: expected 1 to .* of 1 token or more, got"):
            generate.main([*flags, "--rollouts", "x.jsonl", *none])
    for wrong in (["--system", "x"], ["--chat-template", "chatml"]):
        with pytest.raises(SystemExit, match=r"error: --system, --chat-template: expected --chat with them"):
            generate.main([*flags, *wrong])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def typed(monkeypatch, capsys, stdin: io.StringIO, *options: str) -> tuple[list[str], str]:
    """(what a model that is loaded once is asked, what is printed) for these lines; it answers "é" and a number."""
    asked = []
    loads = []

    def sampled(model, weights, ids, *, seed, **options):
        assert (options["max_tokens"], options["temperature"], options["multiple_of"]) == (4, 0.5, 64)
        assert options["stop_ids"] == WORDS.stop_ids and seed == 7 + len(asked)
        asked.append(bytes(ids.tolist()).decode())
        yield from f"é{len(asked)}".encode()

    monkeypatch.setattr(generate, "generate", sampled)
    monkeypatch.setattr(generate, "load_trained", lambda *_: loads.append(1) or MODEL)
    monkeypatch.setattr("sys.stdin", stdin)
    generate.main(["--checkpoint", "X", "--max-tokens", "4", "--temperature", "0.5", "--seed", "7", *options])
    assert loads == [1]
    return asked, capsys.readouterr().out


MODEL = Trained(decoder_model.build(BYTES), {}, WORDS, load_template("chatml", WORDS))


def test_lines_without_a_prompt_are_a_conversation(capsys, monkeypatch):
    """Each answer follows from all that was said; blank lines are none; Ctrl-D ends it."""
    system, user, assistant = ({"role": role} for role in ("system", "user", "assistant"))
    messages = [system | {"content": "Be brief."}, user | {"content": "Hi"}]
    expected = [conversation_ids(MODEL, messages)]
    messages += [assistant | {"content": "é1"}, user | {"content": "And that?"}]
    expected = [bytes(ids.tolist()).decode() for ids in (*expected, conversation_ids(MODEL, messages))]
    chat = ["--chat", "--system", "Be brief."]
    assert typed(monkeypatch, capsys, io.StringIO("Hi\n\nAnd that?\n"), *chat) == (expected, "é1\n---\né2\n")
    assert typed(monkeypatch, capsys, Terminal("Hi\nAnd that?"), *chat) == (expected, "> é1\n> é2\n> ")


def test_lines_without_a_prompt_are_continued(capsys, monkeypatch):
    printed = "abé1\n---\nc dé2\n"
    assert typed(monkeypatch, capsys, io.StringIO("ab\nc d\n")) == (["ab", "c d"], printed)
    with pytest.raises(SystemExit, match="error: --prompt: expected one, or lines on the standard input, got neither"):
        typed(monkeypatch, capsys, io.StringIO("\n"))


def test_ctrl_c_ends_an_answer_and_not_the_conversation(capsys, monkeypatch):
    def interrupted(*_, **options):
        yield ord("a")
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "load_trained", lambda *_: MODEL)
    monkeypatch.setattr(generate, "generate", interrupted)
    monkeypatch.setattr("sys.stdin", Terminal("Hi\nWhat?\n"))
    generate.main(["--checkpoint", "X", "--chat"])
    assert capsys.readouterr().out == "> a\n> a\n> "
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\nWhat?\n"))
    with pytest.raises(SystemExit) as end:
        generate.main(["--checkpoint", "X", "--chat"])
    assert end.value.code == 130


def test_a_conversation_begins_anew_and_quits(capsys, monkeypatch):
    """Of a terminal; Ctrl-C at the prompt discards what was typed, and what has the words elsewhere is a message."""
    asked, _ = typed(monkeypatch, capsys, Terminal("Hi\n/reset\nIs /quit it?\n/quit\nMore\n"), "--chat")
    users = [[{"role": "user", "content": text}] for text in ("Hi", "Is /quit it?")]
    assert asked == [bytes(conversation_ids(MODEL, messages).tolist()).decode() for messages in users]
    typing = iter([KeyboardInterrupt, "Hi", EOFError])

    def ask(_):
        what = next(typing)
        if isinstance(what, str):
            return what
        raise what

    monkeypatch.setattr("builtins.input", ask)
    assert typed(monkeypatch, capsys, Terminal(), "--chat")[0] == asked[:1]


def test_an_answer_takes_half_of_the_length_at_most():
    size = message_ids(MODEL, "Hi").size
    assert ChatHistory(MODEL._replace(length=2 * size), "", max_tokens=10**6).ask("Hi").size == size
    with pytest.raises(ConfigError, match=f"message: expected at most {size - 1} tokens, .*, got {size}"):
        ChatHistory(MODEL._replace(length=2 * size - 2), "", max_tokens=10**6).ask("Hi")


def test_the_oldest_turns_are_cut_at_the_models_length(capsys, monkeypatch):
    """With the system message kept; an answer ends at the length; a message that is too long alone is not taken."""
    system = {"role": "system", "content": "Be brief."}
    turns = [
        {"role": role, "content": text}
        for role, text in zip(["user", "assistant"] * 2, ["Hi", "é1", "And that?", "é2"], strict=True)
    ]
    first, second, third = ([system, *turns[:1]], [system, *turns[:3]], [system, turns[2]])
    size = {n: conversation_ids(MODEL, messages).size for n, messages in enumerate((first, second, third), start=1)}
    assert size[2] > size[3] + 3 > size[1]
    model = MODEL._replace(length=size[3] + 3)
    asked = []
    monkeypatch.setattr(generate, "load_trained", lambda *_: model)

    def sampled(model, weights, ids, **options):
        asked.append(bytes(ids.tolist()).decode())
        yield from b"abcdef"

    monkeypatch.setattr(generate, "generate", sampled)
    monkeypatch.setattr("sys.stdin", Terminal("Hi\n" + "x" * 200 + "\nAnd that?\n"))
    generate.main(["--checkpoint", "X", "--max-tokens", "3", "--chat", "--system", "Be brief."])
    assert asked == [bytes(conversation_ids(MODEL, messages).tolist()).decode() for messages in (first, third)]
    printed = capsys.readouterr()
    assert printed.out.split("> ")[3] == "abc\n"  # the room that is left
    assert f"note: message: expected at most {size[3]} tokens" in printed.err
    assert f"note: the model's length is {size[3] + 3} tokens: the first 2 messages are left out" in printed.err
