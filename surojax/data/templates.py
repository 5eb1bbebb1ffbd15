"""Renders a conversation's messages to one text with a chat template, as transformers does.

A template is a Jinja program that a model brings along: `rendering.py` runs it in a sandbox, here in a child process
with limits of time and memory (`surojax.limited`). Four are shipped with surojax for tokenizers without one.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from surojax import limited
from surojax.data.conversations import Conversation
from surojax.data.data_rows import NotARow, half_a_pair
from surojax.data.pieces import DocumentPiece
from surojax.data.rendering import Message, TemplateProgram
from surojax.data.tokenizer import Tokenizer
from surojax.data.tokenizer_files import one_line
from surojax.errors import ConfigError
from surojax.untrusted import MiB, read_bytes

# The templates shipped with surojax, each with the control tokens that it writes.
CONTROL_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
}
NAMES = tuple(CONTROL_TOKENS)
TOOL_USE = "tool_use"  # the name of a tokenizer's template for conversations with tools
LONGEST = MiB  # bytes of a template; published ones have at most some ten thousand
_FOLDER = Path(__file__).with_name("templates")


class Template(TemplateProgram):
    """A chat template that is rendered within the limits of `surojax.limited`."""

    @property
    def shows_tools(self) -> bool:
        """True if the template reads the tools that a conversation may use. Raises ConfigError for a syntax error."""
        return self.has_variable("tools", True)

    def has_variable(self, name: str, has_tools: bool) -> bool:
        """Returns True if the template of conversations with or without tools reads a variable."""
        return name in self._checked[has_tools]["variables"]

    def reads(self, word: str, has_tools: bool) -> bool:
        """Returns True if the template of conversations with or without tools has a field or constant `word`."""
        return word in self._checked[has_tools]["words"]

    def takes_text(self, has_tools: bool) -> bool:
        """Returns True if the template takes a call's arguments as a JSON text, not as an object."""
        return self._takes_text[has_tools]

    @functools.cached_property
    def _checked(self) -> tuple[dict[str, list[str]], ...]:
        """Checks the templates for conversations without tools and with tools; returns `checked_template` of each.

        Raises ConfigError if one is no template.
        """
        texts = (self.text, self.with_tools or self.text)
        answers = self._each("surojax.data.rendering", "checked_template", (), texts)
        if bad := next((answer for answer in answers if "refused" in answer), None):
            raise ConfigError(
                f"{self.source}:{bad['line']}: expected a Jinja template, got {bad['refused']}; correct it, or "
                f"choose another chat_template, such as {', '.join(NAMES)}"
            )
        return tuple(answers)

    @functools.cached_property
    def _takes_text(self) -> tuple[bool, ...]:
        return tuple(self._each("surojax.data.tool_calls", "takes_text", (self._fields,), [False, True]))

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
        fails, ConfigError if it takes more than the limits.
        """
        request = (messages, tools, add_generation_prompt, dict(variables))
        (answer,) = self._each("surojax.data.rendering", "rendered", (self._fields,), [request])
        if "refused" in answer:
            raise NotARow(answer["refused"])
        try:
            answer["text"].encode("utf-8")
        except UnicodeEncodeError as error:
            raise NotARow(half_a_pair(error)) from error
        return answer["text"]

    def pieces(
        self, conversations: Sequence[Conversation], train_on: str, where: Sequence[str] = ()
    ) -> list[tuple[DocumentPiece, ...] | NotARow]:
        """Splits each conversation by `pieces.conversation_pieces`; returns `NotARow` for refused ones.

        where: each one's file and line, for messages. Raises ConfigError if one takes more than the limits.
        """
        items = [tuple(conversation) for conversation in conversations]
        answers = self._each("surojax.data.pieces", "in_limits", (self._fields, train_on), items, where)
        return [
            NotARow(answer["refused"])
            if "refused" in answer
            else tuple(DocumentPiece(*piece) for piece in answer["pieces"])
            for answer in answers
        ]

    @property
    def _fields(self) -> tuple[str, ...]:
        return self.text, self.source, self.bos, self.eos, self.with_tools

    def _each(self, module: str, function: str, common: tuple, items: Sequence[Any], where: Sequence[str] = ()) -> list:
        try:
            return limited.map_in_child(module, function, common, items)
        except limited.OverLimit as error:
            row = f" for {where[error.index]}" if where else ""
            raise ConfigError(
                f"{self.source}: expected a chat template that needs at most {limited.SECONDS} seconds of processor "
                f"time and {limited.MEMORY >> 20} MiB, got {error}{row}; choose another chat_template"
            ) from None


def load_template(spec: str, tokenizer: Tokenizer) -> Template | None:
    """Loads the template `spec`: one of NAMES, of the tokenizer's named ones, or a file.

    "": the tokenizer's own, and with tools its template named `tool_use` if it has one; None if it has none. Raises
    ConfigError if there is no such template, or it has a syntax error.
    """
    path = Path(os.path.expanduser(spec))
    named = tokenizer.named_templates
    with_tools = ""
    if not spec:
        text = tokenizer.chat_template
        with_tools = named.get(TOOL_USE, "")
        source = "the tokenizer's chat template"
        if not (text or with_tools):
            if not named:
                return None
            raise ConfigError(
                f"chat_template: expected a name, since the tokenizer ({tokenizer.name}) has templates of several "
                f"names and none is the default, got ''; set it to one of {', '.join(named)}"
            )
    elif spec in named:
        text = named[spec]
        source = f"the tokenizer's chat template {spec}"
    elif spec in NAMES:
        text = (_FOLDER / f"{spec}.jinja").read_text(encoding="utf-8")
        source = f"chat_template {spec}"
    elif path.is_file():
        text = _read(path)
        source = str(path)
    else:
        raise ConfigError(
            f"chat_template: expected one of {', '.join((*NAMES, *named))}, or a file, got {spec!r}, which does not "
            "exist; correct it, or leave it empty for the tokenizer's own"
        )
    if (length := max(len(text), len(with_tools))) > LONGEST:
        raise ConfigError(
            f"{source}: expected a chat template of at most {LONGEST:,} characters, got {length:,}; choose another"
        )
    template = Template(text, source, tokenizer.bos, tokenizer.eos, with_tools)
    _ = template.shows_tools  # which compiles it
    return template


def template_note(spec: str, tokenizer: Tokenizer) -> str:
    """Returns a warning if the tokenizer splits a named template's control tokens into several tokens; else "".

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
        return read_bytes(path, LONGEST).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template: expected a readable Jinja template, got {path} ({one_line(error)}); correct the path"
        ) from None
