"""Chat templates: a conversation's messages to one text."""

from dataclasses import dataclass

from surojax.data.tokenizer import Tokenizer

NAMES = ("chatml", "gemma", "llama3", "mistral")


@dataclass(frozen=True)
class Template:
    """A Jinja chat template. source: where it comes from, for messages. bos, eos: texts of tokens that it may name."""

    text: str
    source: str
    bos: str = ""
    eos: str = ""


def load_template(spec: str, tokenizer: Tokenizer) -> Template | None:
    """Returns the template that `spec` names: one of NAMES, a file, or "": the tokenizer's own, None if it has none.

    Raises ConfigError if there is no such template, or it has a syntax error.
    """
    raise NotImplementedError
