"""Compares fields that mean a row's conversation with the one that is read: they repeat it, or the row is refused.

Published rows have the first question as `prompt` beside `messages`, or all of it as `text`; such fields say nothing
new. Of two that differ, nobody knows which is to be trained.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from surojax.data import tool_calls
from surojax.data.data_rows import NotARow
from surojax.data.datasets import MESSAGES, Dataset
from surojax.data.messages import read_messages
from surojax.data.row_fields import SPEAKERS, has_content
from surojax.data.values import texts_in
from surojax.errors import shown

# The settings of a dataset that name such fields, beside MESSAGES.
_SETTINGS = (
    *("prompt_field", "completion_field", "instruction_field", "input_field", "output_field"),
    *("chosen_field", "text_field"),
)

type Said = Sequence[tuple[str, str]]  # (role, content) of each message


def said_in(messages: list[Any], dataset: Dataset) -> list[tuple[str, str]]:
    """Returns the roles and contents of raw messages, without metadata. Raises NotARow."""
    return [(message["role"], message["content"]) for message in read_messages(messages, dataset).messages]


def check_repeats(record: Mapping[str, Any], dataset: Dataset, read: Collection[str], said: Said) -> None:
    """Raises NotARow for an unread field that means the conversation and differs from `said`.

    read: names of the fields that are read. A dataset that names its fields leaves out all others.
    """
    if dataset.differing(*_SETTINGS, "messages_field"):
        return
    names = [*MESSAGES, "conversation", *(getattr(dataset, setting) for setting in _SETTINGS)]
    for name in names:
        if name not in read and name in record:
            check_repeated(record[name], name, dataset, said)


def check_repeated(value: Any, name: str, dataset: Dataset, said: Said) -> None:
    """Raises NotARow if the value of a field is not empty and differs from `said`."""
    if has_content(value) and not _repeats(value, dataset, said, is_prompt=name == dataset.prompt_field):
        raise NotARow(
            f"expected one conversation in a row, got another in {name!r} ({shown(value, 40)}); remove one of them, or "
            f"name {name!r} in ignored_fields of the dataset"
        )


def _repeats(value: Any, dataset: Dataset, said: Said, *, is_prompt: bool) -> bool:
    if isinstance(value, str):
        if _text_repeats(value, said, is_prompt=is_prompt):
            return True
        value = tool_calls.decoded(value)
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, list):
        return False
    try:
        other = _without_system(said_in(messages, dataset))
    except NotARow:  # turns in another form, as Capybara's
        return all(text in SPEAKERS or _text_repeats(text, said, is_prompt=False) for text in texts_in(messages))
    ours = _without_system(said)
    return any(ours[i : i + len(other)] == other for i in range(len(ours) - len(other) + 1))


def _text_repeats(text: str, said: Said, *, is_prompt: bool) -> bool:
    """Returns True if a text is one of the contents, a part of one, or what a template made of them.

    is_prompt: a part of one is not enough, and neither is an answer.
    """
    text = _words(text)
    roles, contents = [role for role, _ in said], [_words(content) for _, content in said]
    if is_prompt:
        first = roles.index("assistant") if "assistant" in roles else len(roles)
        questions = {content for role, content in zip(roles, contents, strict=True) if role != "assistant"}
        return text in questions or (first > 0 and all(content in text for content in contents[:first]))
    return any(
        text in content or (role == "assistant" and content in text)
        for role, content in zip(roles, contents, strict=True)
    )


def _words(text: str) -> str:
    return " ".join(text.split())


def _without_system(said: Said) -> list[tuple[str, str]]:
    return [(role, content) for role, content in said if role not in ("system", "developer")]
