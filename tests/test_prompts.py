"""From texts and messages to ids, and from ids to answers."""

import dataclasses

import jax
import pytest
from small import CONFIG, drawn_params

from surojax import ConfigError, generate
from surojax.data.templates import load_template
from surojax.data.tokenizer import ByteTokenizer
from surojax.inference.load import Trained
from surojax.inference.prompts import answer, complete, message_ids, text_ids
from surojax.inference.sample import generate as generate_ids
from surojax.models import llama

WORDS = ByteTokenizer()
BYTES = dataclasses.replace(CONFIG, vocab_size=320)


def trained(template: str = "chatml") -> Trained:
    params = jax.tree.map(lambda w: 3 * w, drawn_params(BYTES, 1))
    return Trained(llama.build(BYTES), params, WORDS, load_template(template, WORDS))


def test_texts_begin_as_the_tokenizer_says():
    assert text_ids(WORDS, "ab").tolist() == [97, 98] and text_ids(WORDS, "").tolist() == [256]
    begins = ByteTokenizer()
    begins.bos_id, begins.adds_bos = 7, True
    assert text_ids(begins, "ab").tolist() == [7, 97, 98] and text_ids(begins, "").tolist() == [7]
    assert text_ids(begins, "\x07b").tolist() == [7, 98]  # it is there already


def test_messages_are_written_by_the_template():
    turn = "<|im_start|>{}\n{}<|im_end|>\n"
    asked = turn.format("user", "Hi") + "<|im_start|>assistant\n"
    assert bytes(message_ids(trained(), "Hi").tolist()).decode() == asked
    with_system = turn.format("system", "Be brief.") + asked
    assert bytes(message_ids(trained(), "Hi", "Be brief.").tolist()).decode() == with_system
    with pytest.raises(ConfigError, match="expected a chat template, which the model does not have"):
        message_ids(trained()._replace(template=None), "Hi")


def test_an_answer_continues_the_conversation():
    """As the text would be continued, up to the end of the turn."""
    model = trained()
    asked = bytes(message_ids(model, "Hi").tolist()).decode()
    found = answer(model, "Hi", max_tokens=8, temperature=0)
    assert found == complete(model, asked, max_tokens=8, temperature=0)
    first = next(generate_ids(model.model, model.weights, message_ids(model, "Hi"), max_tokens=1, temperature=0))
    stops = ByteTokenizer()
    stops.stop_ids = frozenset({first})
    assert answer(model._replace(tokenizer=stops), "Hi", max_tokens=8, temperature=0) == ""


def test_the_command_answers(capsys, monkeypatch):
    asked = []

    def load(checkpoint, tokenizer, template):
        asked.append((checkpoint, tokenizer, template))
        return trained()

    monkeypatch.setattr(generate, "load", load)
    flags = ["--checkpoint", "X", "--max-tokens", "5", "--temperature", "0", "--prompt", "Hi", "--prompt", "What?"]
    generate.main([*flags, "--chat", "--system", "Be brief.", "--chat-template", "chatml"])
    options = {"max_tokens": 5, "temperature": 0}
    expected = [answer(trained(), message, "Be brief.", **options) for message in ("Hi", "What?")]
    assert capsys.readouterr().out == expected[0] + "\n---\n" + expected[1] + "\n"
    assert asked == [("X", "", "chatml")]
    for wrong in (["--system", "x"], ["--chat-template", "chatml"]):
        with pytest.raises(SystemExit, match=r"error: --system, --chat-template: expected --chat with them"):
            generate.main([*flags, *wrong])
