"""Reads the fields that hold no text from texts, as a table's cells have them, so that a row means the same there.

A CSV file has texts only: `true` of a rated answer, `0.5` of a margin, a list of messages as JSON. Other files may hold
such texts too, and they mean the same. A text that is no JSON stays as it is, and is refused by who reads the field.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from surojax.data.data_rows import BadRow, DataRow, NotARow
from surojax.data.datasets import COMPLETIONS, MESSAGES, PROMPT, Dataset
from surojax.data.given import TOKENS
from surojax.data.row_fields import (
    BORDERS,
    DOCUMENT_IDS,
    LABELS,
    LENGTHS,
    MASKS,
    POSITIONS,
    SEGMENTS,
    WEIGHTS_OF_DOCUMENTS,
)
from surojax.data.values import is_missing
from surojax.errors import shown
from surojax.untrusted import RepeatedKey, parse_json

_PYTHON = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value|name|text|label|type)'\s*:")

# By the type of a row: settings that name fields which never hold a text, and fields that no setting names.
_VALUES = {
    "conversation": (("messages_field", "tools_field"), MESSAGES),
    "preference": (("margin_field", "tools_field"), ()),
    "unpaired": (("label_field",), ()),
    "rollout": ((), (PROMPT, COMPLETIONS, "logprobs", "rewards", "advantages", *MASKS)),
    "tokens": ((), (TOKENS, LABELS, POSITIONS, *LENGTHS, *BORDERS, *DOCUMENT_IDS, *MASKS, *WEIGHTS_OF_DOCUMENTS)),
    SEGMENTS: ((), (SEGMENTS,)),
}
# Settings that name fields which hold a text or a list of messages.
_TEXT_OR_MESSAGES = ("prompt_field", "completion_field", "chosen_field", "rejected_field")
_WITH_MESSAGES = ("instruction", "preference", "unpaired")


def decoded(rows: Iterable[DataRow | BadRow], dataset: Dataset) -> Iterator[DataRow | BadRow]:
    """Yields rows with values in place of texts that mean such, and None for NaN, pandas' word for no value.

    dataset: with its type decided.
    """
    settings, names = _VALUES.get(dataset.type, ((), ()))
    values = {*names, *(getattr(dataset, setting) for setting in settings)}
    either = {getattr(dataset, name) for name in _TEXT_OR_MESSAGES} if dataset.type in _WITH_MESSAGES else set()
    for row in rows:
        try:
            yield row if isinstance(row, BadRow) else row._replace(record=_decoded(row.record, dataset, values, either))
        except NotARow as error:
            yield BadRow(row.where, str(error))


def _decoded(record: dict[str, Any], dataset: Dataset, values: set[str], either: set[str]) -> dict[str, Any]:
    changed = {}
    for name, value in record.items():
        if isinstance(value, str):
            try:
                if name in values:
                    changed[name] = _value_of(value)
                elif name in either and _has_messages(value, dataset):
                    changed[name] = parse_json(value)
            except RepeatedKey as error:
                raise NotARow(f"expected each key of {name!r} once, got one twice ({error}); remove one") from None
            if name in (*values, *either) and _PYTHON.match(value):
                raise NotARow(
                    f"expected JSON of messages in {name!r}, got {shown(value, 40)}, Python's form of them, as pandas "
                    "writes it into CSV; write Parquet or JSON lines, or json.dumps of the list"
                )
        elif name != dataset.margin_field and is_missing(value):
            changed[name] = None
    return record | changed if changed else record


def _value_of(text: str) -> Any:
    """Returns the value that a text means, or the text if it means none. True and False are pandas' and Python's."""
    text = text.strip()
    if not text:
        return None
    try:
        return (
            {"True": True, "False": False, "TRUE": True, "FALSE": False}[text] if text[0] in "TF" else parse_json(text)
        )
    except RepeatedKey:
        raise
    except (KeyError, ValueError):
        return text


def _has_messages(text: str, dataset: Dataset) -> bool:
    """Returns True if a text is the JSON of a list of messages, or of one."""
    if not text.lstrip().startswith(("[", "{")):
        return False
    try:
        messages = parse_json(text)
    except RepeatedKey:
        raise
    except ValueError:
        return False
    if isinstance(messages, dict):  # an answer may be some other object, with a role in it
        content = {dataset.content_field} if dataset.content_field else {"content", "value"}
        if isinstance(messages.get("messages"), list):  # a conversation, which is refused in a field of messages
            return True
        messages = [messages] if content & messages.keys() else []
    role = {dataset.role_field} if dataset.role_field else {"role", "from"}
    return bool(messages) and all(isinstance(message, dict) and role & message.keys() for message in messages)
