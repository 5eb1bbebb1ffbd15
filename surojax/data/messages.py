"""Reads the messages of a conversation: their roles, contents, calls of tools and weights.

Other formats' names of roles and fields become those of OpenAI's format, which chat templates read. What a message
means does not depend on the template yet; `fitting.py` adapts it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from surojax.data import row_fields, tool_calls
from surojax.data.data_rows import NotARow
from surojax.data.datasets import ROLES, Dataset, field_names
from surojax.data.rendering import Message
from surojax.data.row_fields import MEDIA, MEDIA_PLACES, REASONING, WEIGHTS, has_content
from surojax.data.values import number_of
from surojax.errors import shown

CALLING = "function_call"  # the role of a message whose content is the JSON of calls, in ShareGPT's format
DEVELOPER = "developer"  # OpenAI's newer name of the system role, which some templates tell apart
OTHER_ROLES = {
    **{"human": "user", "prompter": "user", "gpt": "assistant", "model": "assistant"},
    **{"function": "tool", "observation": "tool", "ipython": "tool", "tool_response": "tool"},
    **{"tool_call": CALLING, "tool_calls": CALLING},
}
TEXT_PARTS = ("text", "input_text", "output_text")  # types of content parts that are text
# Fields of a message that mean something and that no setting reads.
_UNREAD = {
    **dict.fromkeys((*MEDIA, *MEDIA_PLACES, "files"), ("media, since texts are trained", "remove the row")),
    "refusal": ("refusal beside the content", "write it into the content"),
    "train_detail": ("weights of parts of an answer", "give the whole message a weight of 0 or 1"),
    "training_detail": ("weights of parts of an answer", "give the whole message a weight of 0 or 1"),
}
_AMBIGUOUS = ("mask", "masked")  # in some tools' rows 1 is a message to train, in others one to leave out


class Messages(NamedTuple):
    """Messages, and of each its weight: True to train it, False not to, None if it has none."""

    messages: list[Message]
    weights: list[bool | None]


def read_messages(raw: list[Any], dataset: Dataset) -> Messages:
    """Reads a list of messages; each call of a tool joins the answer before it. Raises NotARow."""
    found = Messages([], [])
    for number, raw_message in enumerate(raw, start=1):
        message, weight = _message(raw_message, number, dataset)
        if message["role"] == CALLING:
            message = _answer_of_calls(message, number)
            if found.messages and found.messages[-1]["role"] == "assistant":
                if weight != found.weights[-1]:
                    raise NotARow(
                        f"expected a call of a tool with the weight of the answer before it, got another as message "
                        f"{number}; correct the row"
                    )
                before = found.messages[-1]
                calls = [*before.get(tool_calls.CALLS, ()), *message[tool_calls.CALLS]]
                found.messages[-1] = before | {tool_calls.CALLS: calls}
                continue
        found.messages.append(message)
        found.weights.append(weight)
    return found


def as_message(role: str, content: str, dataset: Dataset) -> dict[str, str]:
    """Makes a message with the dataset's names of fields, as if it stood in a row."""
    names = (name for name, ours in dataset.roles if ours == role)
    name = next(names, role) if role in dict(dataset.roles) else role
    return {dataset.role_field or "role": name, dataset.content_field or "content": content}


def _message(message: Any, number: int, dataset: Dataset) -> tuple[Message, bool | None]:
    """Returns a message with `role`, `content` and its other fields that are not null, and its weight.

    message: an object, or the JSON of one.
    """
    message = tool_calls.decoded(message)
    if not isinstance(message, Mapping):
        raise NotARow(f"expected message {number} as an object, got a {type(message).__name__}; correct the row")
    message = {name: value for name, value in message.items() if name not in dataset.ignored_fields}
    role_field = dataset.role_field or _filled_one(message, ("role", "from"), number)
    content_field = dataset.content_field or _filled_one(message, ("content", "value"), number)
    if role_field not in message:
        raise NotARow(
            f"expected message {number} with its role in {role_field!r}, got {field_names(message)}; name the "
            "role_field in the dataset, or correct the row"
        )
    role = _role(message[role_field], number, dataset)
    place = f"message {number}"
    for name, (what, advice) in _UNREAD.items():
        if name in message and name != content_field and has_content(message[name]):
            raise NotARow(row_fields.refusal(what, name, message[name], advice, place))
    weight = _weight(message, place)
    calls = tool_calls.read_calls(message, place)
    reasoning = _reasoning(message, place)
    for name, value in (("calls of tools", calls), ("reasoning", reasoning)):
        if value and role not in ("assistant", CALLING):
            raise NotARow(
                f"expected {name} of the assistant only, got them in {place}, of the {role}; correct the row, or name "
                "their field in ignored_fields of the dataset"
            )
    left_out = {role_field, content_field, tool_calls.CALLS, tool_calls.CALL, *WEIGHTS, *REASONING, *_AMBIGUOUS}
    others = {name: x for name, x in message.items() if x is not None and name not in left_out} | reasoning
    others |= {tool_calls.CALLS: calls} if calls else {}
    content = _content(message, content_field, number, bool(calls))
    if role == "assistant" and not content.strip() and not calls:
        raise NotARow(f"expected an answer as message {number}, got an empty one; correct or remove the row")
    return others | {"role": role, "content": content}, weight


def _filled_one(message: Mapping[str, Any], names: tuple[str, str], number: int) -> str:
    """Returns which of two fields of one meaning a message has. Raises NotARow if both are filled, and differ."""
    first, second = names
    values = [message.get(name) for name in names]
    if None not in values and values[0] != values[1]:
        raise NotARow(
            f"expected {first!r} or {second!r} in message {number}, got two that differ; remove one, or name it in "
            "ignored_fields of the dataset"
        )
    return first if values[0] is not None or (first in message and values[1] is None) else second


def _role(role: Any, number: int, dataset: Dataset) -> str:
    mapped = dict(dataset.roles)
    found = mapped.get(role, OTHER_ROLES.get(role, role)) if isinstance(role, str) else ""
    if found not in (*ROLES, DEVELOPER, CALLING):
        raise NotARow(
            f"expected message {number} with a role of {', '.join((*ROLES, *OTHER_ROLES, DEVELOPER, CALLING))}, got "
            f"{shown(role, 40)}; map it in roles of the dataset, as in dict(assistant='bot'), or correct the row"
        )
    return found


def _weight(message: Mapping[str, Any], place: str) -> bool | None:
    """Returns whether a message is to be trained; None if it does not say."""
    for name in _AMBIGUOUS:
        if number_of(message.get(name)) is not None:
            advice = "write weight: 1 to train the message, or weight: 0"
            raise NotARow(row_fields.refusal("mask, which has two meanings", name, message[name], advice, place))
    found = {name: message[name] for name in WEIGHTS if message.get(name) is not None}
    for name, value in found.items():
        if number_of(value) not in (0, 1):
            raise NotARow(
                f"expected a weight of 0 or 1, true or false, in {name!r} of {place}, got {shown(value, 40)}; correct "
                "the row, or name it in ignored_fields of the dataset"
            )
    weights = {bool(number_of(value)) for value in found.values()}
    if len(weights) > 1:
        raise NotARow(f"expected one weight of {place}, got {shown(found, 80)}; correct the row")
    return weights.pop() if weights else None


def _reasoning(message: Mapping[str, Any], place: str) -> dict[str, str]:
    """Returns a message's reasoning as `reasoning_content`; {} if it has none."""
    found = {name: message[name] for name in REASONING if has_content(message.get(name))}
    if not found:
        return {}
    text = next(iter(found.values()))
    if not isinstance(text, str) or any(other != text for other in found.values()):
        raise NotARow(
            f"expected the reasoning of {place} as one text, got {shown(found, 80)}; correct the row, or name one in "
            "ignored_fields of the dataset"
        )
    return {REASONING[0]: text}


def _answer_of_calls(message: Message, number: int) -> Message:
    calls = tool_calls.calls_of_text(message["content"], f"message {number}")
    return message | {"role": "assistant", "content": "", tool_calls.CALLS: calls}


def _content(message: Mapping[str, Any], content_field: str, number: int, has_calls: bool) -> str:
    """Returns the content of a message. Parts that are all text are joined; beside calls it may be missing."""
    content = message.get(content_field)
    if content is None and has_calls:
        return ""
    if isinstance(content, str):
        return content
    if content_field not in message:
        raise NotARow(
            f"expected message {number} with text in {content_field!r}, got {field_names(message)}; name the "
            "content_field in the dataset, or correct the row"
        )
    got = f"a {type(content).__name__}"
    if isinstance(content, list):
        if (text := text_of_parts(content)) is not None:
            return text
        kinds = {str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__ for part in content}
        got = f"a list of {', '.join(sorted(kinds)) or 'nothing'}"
    raise NotARow(f"expected message {number} with text in {content_field!r}, got {got}; correct or remove the row")


def text_of_parts(parts: list[Any]) -> str | None:
    """Joins the parts of a content; returns None if there are none, or one is no text."""
    texts = [_text_of_part(part) for part in parts]
    return "".join(map(str, texts)) if texts and None not in texts else None


def _text_of_part(part: Any) -> str | None:
    """Returns the text of a part of a content; None if it is something else, or has media too."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type", "text") not in (*TEXT_PARTS, None):
        return None
    if any(has_content(part.get(name)) for name in (*MEDIA, *MEDIA_PLACES)) or not isinstance(part.get("text"), str):
        return None
    return part["text"]
