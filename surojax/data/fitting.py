"""Adapts conversations to what their chat template reads: roles, reasoning, the form of calls, variables.

A template drops silently what it does not read. What it cannot show in any form is refused by its name.
"""

from typing import Any

from surojax.data import tool_calls
from surojax.data.conversations import Conversation
from surojax.data.data_rows import NotARow
from surojax.data.messages import DEVELOPER
from surojax.data.rendering import Message
from surojax.data.row_fields import DOCUMENTS, FUNCTIONS, REASONING, VARIABLES, has_content
from surojax.data.templates import Template
from surojax.errors import shown

_RESULTS = ("tool", "ipython", "observation")  # names that templates have for the role of a tool's result
# Fields that some templates read in messages: those of a row, and those of OpenAI's harmony format.
BESIDE_MESSAGES = ("tools", FUNCTIONS, DOCUMENTS, "channel", "recipient")
_RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")


def fitted(conversation: Conversation, template: Template) -> Conversation:
    """Returns a conversation as a template reads it. Raises NotARow if it cannot show a part that means something."""
    has_tools = bool(conversation.tools)
    if has_tools and not template.has_variable("tools", has_tools):
        raise NotARow(
            f"expected no tools, which {template.source} does not show, got {len(conversation.tools or ())}; "
            "choose another chat_template, or tools_field='' to leave them out"
        )
    for name, value in conversation.variables.items():
        if name in _RESERVED:
            raise NotARow(f"expected variables of a template's own in {VARIABLES!r}, got {name!r}; correct the row")
        if value and not template.has_variable(name, has_tools):
            raise NotARow(
                f"expected no {name!r}, which {template.source} does not read, got {shown(value, 40)}; choose another "
                f"chat_template, or name {name if name == DOCUMENTS else VARIABLES} in ignored_fields of the dataset"
            )
    messages = [
        _fitted(message, f"message {number}", template, has_tools)
        for number, message in enumerate(conversation.messages, start=1)
    ]
    return conversation._replace(messages=messages)


def _fitted(message: Message, place: str, template: Template, has_tools: bool) -> Message:
    changes: dict[str, Any] = {}
    if message["role"] == DEVELOPER and not template.reads(DEVELOPER, has_tools):
        changes["role"] = "system"
    for name in BESIDE_MESSAGES:
        if has_content(message.get(name)) and not template.reads(name, has_tools):
            raise NotARow(
                f"expected no {name!r} in a message, since {template.source} does not read it there, got some in "
                f"{place}; correct the row, or name it in ignored_fields of the dataset"
            )
    if message["role"] == "tool":
        changes["role"] = next((name for name in _RESULTS if template.reads(name, has_tools)), "tool")
    if calls := message.get(tool_calls.CALLS):
        as_text = template.takes_text(has_tools)
        changes[tool_calls.CALLS] = tool_calls.with_arguments_as(calls, as_text=as_text)
    if reasoning := message.get(REASONING[0]):
        name = next((name for name in REASONING if template.reads(name, has_tools)), None)
        if name is None:
            raise NotARow(
                f"expected no reasoning beside the content of {place}, which {template.source} does not read, got "
                f"{shown(reasoning, 40)}; write it into the content, such as <think>...</think>, choose another "
                "chat_template, or name it in ignored_fields of the dataset"
            )
        changes[name] = reasoning
        message = {name: value for name, value in message.items() if name != REASONING[0]}
    return message | changes if changes else message
