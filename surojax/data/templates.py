"""Chat templates: a conversation's messages to one text, as transformers renders them.

A template is a Jinja program that a model brings along, so it runs in a sandbox. Four are shipped with surojax for
tokenizers without one. A template may ask for today's date; here it gets the same day always, so that a run's tokens
are those of every other day.
"""

import datetime
import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from surojax.data.rows import NotARow
from surojax.data.tokenizer import Tokenizer
from surojax.errors import ConfigError

# The templates shipped with surojax, each with the control tokens that it writes.
CONTROL_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
}
NAMES = tuple(CONTROL_TOKENS)
DATE = datetime.datetime(2024, 7, 26)  # the day that Llama 3's own template names if it is told none
_FOLDER = Path(__file__).with_name("templates")

type Message = dict[str, Any]


@dataclass(frozen=True)
class Template:
    """A Jinja chat template. source: where it comes from, for messages. bos, eos: texts of tokens that it may name."""

    text: str
    source: str
    bos: str = ""
    eos: str = ""

    @property
    def shows_tools(self) -> bool:
        """True if the template reads the tools that a conversation may use."""
        environment = _environment()
        return "tools" in meta.find_undeclared_variables(environment.parse(self.text))

    def render(
        self, messages: list[Message], tools: list[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """Returns the text of a conversation; with `add_generation_prompt`, the beginning of an answer follows.

        Raises NotARow if the template refuses the conversation or fails.
        """
        try:
            return _compiled(self.text).render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos,
                eos_token=self.eos,
            )
        except Exception as error:  # whatever the operators of a template raise for values they were not written for
            raise NotARow(
                f"expected a conversation that {self.source} takes, got '{_one_line(error)}'; correct the row, or "
                "choose another chat_template"
            ) from None


def load_template(spec: str, tokenizer: Tokenizer) -> Template | None:
    """Returns the template that `spec` names: one of NAMES, a file, or "": the tokenizer's own, None if it has none.

    Raises ConfigError if there is no such template, or it has a syntax error.
    """
    path = Path(os.path.expanduser(spec))
    if not spec:
        if not tokenizer.chat_template:
            return None
        text = tokenizer.chat_template
        source = "the tokenizer's chat template"
    elif spec in NAMES:
        text = (_FOLDER / f"{spec}.jinja").read_text(encoding="utf-8")
        source = f"chat_template {spec}"
    elif path.is_file():
        text = _read(path)
        source = str(path)
    else:
        raise ConfigError(
            f"chat_template: expected one of {', '.join(NAMES)}, or a file, got {spec!r}, which does not exist; "
            "correct it, or leave it empty for the tokenizer's own"
        )
    try:
        _compiled(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{source}:{error.lineno}: expected a Jinja template, got a syntax error ({_one_line(error)}); correct it, "
            f"or choose another chat_template, such as {', '.join(NAMES)}"
        ) from None
    return Template(text, source, bos=tokenizer.bos, eos=tokenizer.eos)


def note(spec: str, tokenizer: Tokenizer) -> str:
    """Returns one line if a named template writes control tokens that are several tokens of the tokenizer; else "".

    No error: a model can learn them as text, as Mistral's first did, and an answer then ends with end-of-sequence.
    """
    spelled = [token for token in CONTROL_TOKENS.get(spec, ()) if len(tokenizer.encode(token)) != 1]
    if not spelled:
        return ""
    return (
        f"note: chat_template {spec} writes {', '.join(spelled)}, which this tokenizer ({tokenizer.name}) has not as "
        "single tokens: they are learned as text; a model that knows them needs its own tokenizer"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template: expected a readable Jinja template, got {path} ({_one_line(error)}); correct the path"
        ) from None


class _Generation(Extension):
    """Accepts `{% generation %}` ... `{% endgeneration %}`, with which some templates mark the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON without the escapes for HTML that Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = DATE.strftime
    return environment


@functools.cache
def _compiled(text: str) -> jinja2.Template:
    return _environment().from_string(text)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
