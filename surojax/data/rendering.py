"""Renders chat templates without limits of time and memory; `templates.Template` calls this in a limited child process.

A template is a Jinja program that a model brings along, so it runs in a sandbox. A template may ask for today's date;
here it gets the same day always, so that a run's tokens are those of every other day.
"""

import datetime
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
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
    """A Jinja chat template.

    source: its origin, for messages. bos, eos: texts of tokens that the template may use. with_tools: the text of
    another template for conversations with tools; "": there is none.
    """

    text: str
    source: str
    bos: str = ""
    eos: str = ""
    with_tools: str = ""

    def render(
        self,
        messages: list[Message],
        tools: list[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Returns the text of a conversation; with `add_generation_prompt`, the beginning of an answer follows.

        variables: further ones that the template may read. Raises NotARow if the template refuses the conversation or
        fails.
        """
        text = (self.with_tools if tools else "") or self.text
        if not text:
            raise NotARow(
                f"expected tools, since {self.source} has a template for conversations with tools only, got none; set "
                "chat_template"
            )
        try:
            return _compiled(text).render(
                **({"documents": None} | dict(variables)),
                messages=messages,
                tools=tools,
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


def rendered(
    program: tuple[str, ...], request: tuple[list[Message], list[Any] | None, bool, Mapping[str, Any]]
) -> dict[str, str]:
    """Renders a conversation: {"text"}, or {"refused": reason}. program: fields of a `TemplateProgram`."""
    messages, tools, prompts, variables = request
    try:
        text = TemplateProgram(*program).render(messages, tools, add_generation_prompt=prompts, variables=variables)
        return {"text": text}
    except NotARow as error:
        return {"refused": str(error)}


def checked_template(text: str) -> dict[str, Any]:
    """Compiles a template, or returns {"refused": reason, "line"} if it cannot be compiled.

    Returns {"variables": names of variables that it reads, "words": names of fields and constants in it}.
    """
    try:
        _compiled(text)
        tree = _environment().parse(text)
        fields = {node.attr for node in tree.find_all(nodes.Getattr)}
        constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        words = {word for word in fields | constants if re.fullmatch(r"\w{1,40}", word)}
        return {"variables": sorted(meta.find_undeclared_variables(tree)), "words": sorted(words)}
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
