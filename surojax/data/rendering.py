"""Renders chat templates without limits of time and memory; `templates.Template` calls this in a limited child process.

A template is a Jinja program that a model brings along, so it runs in a sandbox. A template may ask for today's date;
here it gets the same day always, so that a run's tokens are those of every other day.
"""

import datetime
import functools
import json
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from surojax.data.data_rows import NotARow

DATE = datetime.datetime(2024, 7, 26)  # the day that Llama 3's own template names if it is told none

type Message = dict[str, Any]


@dataclass(frozen=True)
class TemplateProgram:
    """A Jinja chat template. source: its origin, for messages. bos, eos: texts of tokens that the template may use."""

    text: str
    source: str
    bos: str = ""
    eos: str = ""

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
        except MemoryError:
            raise
        except Exception as error:  # whatever the operators of a template raise for values they were not written for
            raise NotARow(
                f"expected a conversation that {self.source} takes, got '{_one_line(error)}'; correct the row, or "
                "choose another chat_template"
            ) from None


def rendered(program: tuple[str, ...], request: tuple[list[Message], list[Any] | None, bool]) -> dict[str, str]:
    """Renders a conversation: {"text"}, or {"refused": reason}. program: fields of a `TemplateProgram`."""
    messages, tools, prompts = request
    try:
        return {"text": TemplateProgram(*program).render(messages, tools, add_generation_prompt=prompts)}
    except NotARow as error:
        return {"refused": str(error)}


def checked_template(text: str) -> dict[str, Any]:
    """Compiles a template: {"shows_tools"}, or {"refused": reason, "line"} if it cannot be compiled."""
    try:
        _compiled(text)
        return {"shows_tools": "tools" in meta.find_undeclared_variables(_environment().parse(text))}
    except jinja2.TemplateSyntaxError as error:
        return {"refused": f"a syntax error ({_one_line(error)})", "line": error.lineno}
    except MemoryError:
        raise
    except Exception as error:  # of Python's compiler, or for what can be computed before there is a conversation
        return {"refused": f"one that cannot be compiled ({type(error).__name__}: {_one_line(error)})", "line": 1}


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
    """Writes JSON without the escapes for HTML that Jinja's own filter adds."""
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


@functools.lru_cache(maxsize=16)
def _compiled(text: str) -> jinja2.Template:
    return _environment().from_string(text)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
