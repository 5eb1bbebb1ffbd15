"""Renders a conversation's messages to one text with a chat template, as transformers does.

A template is a Jinja program that a model brings along: `rendering.py` runs it in a sandbox, here in a child process
with limits of time and memory (`surojax.limited`). Four are shipped with surojax for tokenizers without one.
"""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
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
LONGEST = MiB  # bytes of a template; published ones have at most some ten thousand
_FOLDER = Path(__file__).with_name("templates")


class Template(TemplateProgram):
    """A chat template that is rendered within the limits of `surojax.limited`."""

    @functools.cached_property
    def shows_tools(self) -> bool:
        """True if the template reads the tools that a conversation may use. Raises ConfigError for a syntax error."""
        (answer,) = self._each("surojax.data.rendering", "checked_template", (), [self.text])
        if "refused" in answer:
            raise ConfigError(
                f"{self.source}:{answer['line']}: expected a Jinja template, got {answer['refused']}; correct it, or "
                f"choose another chat_template, such as {', '.join(NAMES)}"
            )
        return answer["shows_tools"]

    def render(
        self, messages: list[Message], tools: list[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """Returns the text of a conversation; with `add_generation_prompt`, the beginning of an answer follows.

        Raises NotARow if the template refuses the conversation or fails, ConfigError if it takes more than the limits.
        """
        request = (messages, tools, add_generation_prompt)
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
        return self.text, self.source, self.bos, self.eos

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
    """Loads the template `spec`: one of NAMES, a file, or "" for the tokenizer's own, None if it has none.

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
    if len(text) > LONGEST:
        raise ConfigError(
            f"{source}: expected a chat template of at most {LONGEST:,} characters, got {len(text):,}; choose another"
        )
    template = Template(text, source, bos=tokenizer.bos, eos=tokenizer.eos)
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
