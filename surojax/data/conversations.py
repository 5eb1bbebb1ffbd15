"""Reads a row's fields by its dataset's type: a text, a prompt with its completion, a preference or a conversation.

Roles and fields may have the names of ShareGPT's format; afterwards they have those of OpenAI's, which chat templates
read. Each function raises NotARow if a field is missing or holds something else.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from surojax.data.data_rows import NotARow
from surojax.data.datasets import INSTRUCTION_FIELDS, MESSAGES, PROMPT_FIELDS, Dataset, field_names
from surojax.data.rendering import Message
from surojax.declared import LARGEST_FLOAT
from surojax.errors import shown
from surojax.untrusted import parse_json

ROLES = ("system", "user", "assistant", "tool")
OTHER_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "function": "tool", "observation": "tool"}


class PromptCompletion(NamedTuple):
    """A prompt and the completion to learn.

    system: "" if there is none. seam: what stands between the two if there is no chat template.
    """

    system: str
    prompt: str
    completion: str
    seam: str

    @property
    def messages(self) -> list[Message]:
        """The pair as a conversation."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [
            *system,
            {"role": "user", "content": self.prompt},
            {"role": "assistant", "content": self.completion},
        ]


class Conversation(NamedTuple):
    """Messages, each with a role of ROLES and a text as its content. tools: descriptions of callable tools, or None."""

    messages: list[Message]
    tools: list[Any] | None


def text_of_row(record: Mapping[str, Any], text_field: str) -> str:
    """Returns the text of a row."""
    return _filled(record, text_field, "the text", "set text_field to the field that holds the text")


def prompt_completion(record: Mapping[str, Any], dataset: Dataset, system_prompt: str) -> PromptCompletion:
    """Returns the prompt and completion of an instruction; an input follows its instruction after a blank line."""
    system = _system(record, dataset) or dataset.system_prompt or system_prompt
    if _reads_prompt(record, dataset):
        prompt = _filled(record, dataset.prompt_field, "the prompt")
        return PromptCompletion(system, prompt, _filled(record, dataset.completion_field, "the completion"), "")
    if dataset.instruction_field not in record:
        raise NotARow(
            f"expected the prompt in {dataset.prompt_field!r} or the instruction in {dataset.instruction_field!r}, got "
            f"{field_names(record)}; name the fields in the dataset, or correct the row"
        )
    instruction = _filled(record, dataset.instruction_field, "the instruction")
    more = _optional(record, dataset.input_field, "the input")
    prompt = f"{instruction}\n\n{more}" if more else instruction
    return PromptCompletion(system, prompt, _filled(record, dataset.output_field, "the output"), "\n\n")


def _reads_prompt(record: Mapping[str, Any], dataset: Dataset) -> bool:
    """True for a prompt and completion, False for an instruction: by the dataset's field names, else by the row's."""
    if dataset.differing(*PROMPT_FIELDS) or dataset.differing(*INSTRUCTION_FIELDS):
        return bool(dataset.differing(*PROMPT_FIELDS))
    is_whole = dataset.completion_field in record or dataset.instruction_field not in record
    return dataset.prompt_field in record and is_whole


def is_desirable(record: Mapping[str, Any], dataset: Dataset) -> bool:
    """Returns the label of an unpaired row: True if its answer is a good one."""
    label = record.get(dataset.label_field)
    if not isinstance(label, bool):
        got = repr(label) if dataset.label_field in record else field_names(record)
        raise NotARow(
            f"expected true (a good answer) or false in {dataset.label_field!r}, got {got}; name the label_field in "
            "the dataset, or correct the row"
        )
    return label


def conversation(record: Mapping[str, Any], dataset: Dataset, system_prompt: str) -> Conversation:
    """Returns the messages and tools of a row. A system prompt becomes the first message if the row has none."""
    names = (dataset.messages_field,) if dataset.messages_field else MESSAGES
    message_lists = [record[name] for name in names if record.get(name) is not None]
    if not message_lists:
        raise NotARow(
            f"expected messages in {' or '.join(map(repr, names))}, got {field_names(record)}; name the field in the "
            "dataset, or correct the row"
        )
    if not isinstance(message_lists[0], list):
        raise NotARow(f"expected a list of messages, got a {type(message_lists[0]).__name__}; correct the row")
    return _of_messages(message_lists[0], record, dataset, system_prompt)


def _of_messages(raw: list[Any], record: Mapping[str, Any], dataset: Dataset, system_prompt: str) -> Conversation:
    """Makes a conversation from a row's raw messages, tools and system prompt."""
    if not raw:
        raise NotARow("expected messages, got an empty list; remove the row")
    messages = [_message(message, number, dataset) for number, message in enumerate(raw, start=1)]

    system = _system(record, dataset)
    if messages[0]["role"] != "system":
        system = system or dataset.system_prompt or system_prompt
        messages = [{"role": "system", "content": system}, *messages] if system else messages
    elif system and system != messages[0]["content"]:
        raise NotARow(
            f"expected one system prompt, got one in {dataset.system_field!r} and another in the messages; remove one"
        )
    return Conversation(messages, _tools(record, dataset))


def preference(
    record: Mapping[str, Any], dataset: Dataset, system_prompt: str
) -> tuple[PromptCompletion, PromptCompletion] | tuple[Conversation, Conversation]:
    """Returns a prompt with the chosen answer, and with the rejected one.

    Answers are texts, beside a prompt that is a text or a list of messages; or lists of messages, each the answer alone
    or the whole conversation.
    """
    chosen, rejected = record.get(dataset.chosen_field), record.get(dataset.rejected_field)
    prompt = record.get(dataset.prompt_field)
    if isinstance(chosen, list) and isinstance(rejected, list):
        chosen, rejected = _whole(prompt, chosen, dataset), _whole(prompt, rejected, dataset)
    elif isinstance(chosen, list) or isinstance(rejected, list):
        raise NotARow(
            f"expected both answers as texts or both as lists of messages, got a {type(chosen).__name__} in "
            f"{dataset.chosen_field!r} and a {type(rejected).__name__} in {dataset.rejected_field!r}; correct the row"
        )
    else:
        answers = (
            _filled(record, dataset.chosen_field, "the chosen answer"),
            _filled(record, dataset.rejected_field, "the rejected answer"),
        )
        if answers[0] == answers[1]:
            raise NotARow(_TIE)
        if not isinstance(prompt, list):
            system = _system(record, dataset) or dataset.system_prompt or system_prompt
            prompt = _filled(record, dataset.prompt_field, "the prompt")
            chosen, rejected = (PromptCompletion(system, prompt, answer, "") for answer in answers)
            return chosen, rejected
        chosen, rejected = ([*prompt, _said("assistant", answer, dataset)] for answer in answers)
    better = _of_messages(chosen, record, dataset, system_prompt)
    worse = _of_messages(rejected, record, dataset, system_prompt)
    if better.messages == worse.messages:
        raise NotARow(_TIE)
    are_answers = all(conversation.messages[-1]["role"] == "assistant" for conversation in (better, worse))
    if not are_answers or better.messages[:-1] != worse.messages[:-1]:
        raise NotARow(
            "expected two conversations that differ in the last message, an answer of the assistant, got others; "
            "correct or remove the row"
        )
    return better, worse


def margin(record: Mapping[str, Any], dataset: Dataset) -> float:
    """Returns the margin of a preference, by how much the chosen answer is better; 0 if the row has none.

    Raises NotARow.
    """
    value = record.get(dataset.margin_field)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_FLOAT:
        raise NotARow(f"expected a finite number in {dataset.margin_field!r}, got {shown(value)}; correct the row")
    return float(value)


_TIE = "expected two answers of which one is better, got the same text for both; remove the row"


def _whole(prompt: Any, messages: list[Any], dataset: Dataset) -> list[Any]:
    """Prepends the prompt's messages to an answer's messages, unless these begin with them."""
    if isinstance(prompt, list):
        return messages if messages[: len(prompt)] == prompt else [*prompt, *messages]
    if not isinstance(prompt, str) or not prompt or not messages:
        return messages
    is_answer = _message(messages[0], 1, dataset)["role"] == "assistant"
    return [_said("user", prompt, dataset), *messages] if is_answer else messages


def _said(role: str, content: str, dataset: Dataset) -> dict[str, str]:
    """Renames a message's fields from the dataset's names to `role` and `content`."""
    return {dataset.role_field or "role": role, dataset.content_field or "content": content}


def _message(message: Any, number: int, dataset: Dataset) -> Message:
    """Returns a message with `role` and `content`, and its other fields that are not null."""
    if not isinstance(message, dict):
        raise NotARow(f"expected message {number} as an object, got a {type(message).__name__}; correct the row")
    role_field = dataset.role_field or ("role" if "role" in message else "from")
    content_field = dataset.content_field or ("content" if "content" in message else "value")
    if role_field not in message:
        raise NotARow(
            f"expected message {number} with its role in {role_field!r}, got {field_names(message)}; name the "
            "role_field in the dataset, or correct the row"
        )
    role = message[role_field]
    role = OTHER_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise NotARow(
            f"expected message {number} with a role of {', '.join((*ROLES, *OTHER_ROLES))}, got {role!r}; correct the "
            "row"
        )
    others = {k: v for k, v in message.items() if v is not None and k not in (role_field, content_field)}
    content = _content(message, content_field, number)
    if role == "assistant" and not content.strip() and not others.get("tool_calls"):
        raise NotARow(f"expected an answer as message {number}, got an empty one; correct or remove the row")
    return others | {"role": role, "content": content}


def _content(message: Mapping[str, Any], content_field: str, number: int) -> str:
    """Returns the content of a message. Parts that are all text are joined; beside tool_calls it may be missing."""
    content = message.get(content_field)
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, str):
        return content
    got = f"a {type(content).__name__}" if content_field in message else field_names(message)
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if texts and len(texts) == len(parts):
            return "".join(texts)
        kinds = {str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in content}
        got = f"a list of {', '.join(sorted(kinds)) or 'nothing'}"
    raise NotARow(f"expected message {number} with text in {content_field!r}, got {got}; correct or remove the row")


def _tools(record: Mapping[str, Any], dataset: Dataset) -> list[Any] | None:
    """Returns the tools of a row, which may be written as JSON; None if there are none."""
    tools = record.get(dataset.tools_field)
    if isinstance(tools, str):
        try:
            tools = parse_json(tools) if tools.strip() else None
        except ValueError as error:
            raise NotARow(
                f"expected a JSON list of tools in {dataset.tools_field!r}, got a string that is no JSON ({error}); "
                "correct the row, or set another tools_field"
            ) from None
    if tools is not None and not isinstance(tools, list):
        raise NotARow(
            f"expected a list of tools in {dataset.tools_field!r}, got a {type(tools).__name__}; correct the row, or "
            "set another tools_field"
        )
    return tools or None


def _system(record: Mapping[str, Any], dataset: Dataset) -> str:
    return _optional(record, dataset.system_field, "the system prompt")


def _optional(record: Mapping[str, Any], field: str, what: str) -> str:
    """Returns the text of a field, "" if it is missing or null."""
    value = record.get(field)
    if value is not None and not isinstance(value, str):
        raise NotARow(f"expected {what} in {field!r} as a string, got a {type(value).__name__}; correct the row")
    return value or ""


def _filled(record: Mapping[str, Any], field: str, what: str, advice: str = "name the field in the dataset") -> str:
    """Returns the text of a required field. Raises NotARow if it is missing or blank."""
    expected = f"expected {what} in {field!r}"
    if field not in record:
        raise NotARow(f"{expected}, got {field_names(record)}; {advice}, or correct the row")
    value = record[field]
    if not isinstance(value, str):
        raise NotARow(f"{expected} as a string, got a {type(value).__name__}; correct or remove the row")
    if not value or value.isspace():
        raise NotARow(f"{expected}, got an empty one; remove the row")
    return value
