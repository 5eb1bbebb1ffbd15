"""Reads OpenAI's format of preferences: a conversation with its tools in `input`, and the messages of two answers."""

from collections.abc import Mapping
from typing import Any

from surojax.data.data_rows import NotARow
from surojax.data.row_fields import has_content
from surojax.data.tool_calls import decoded
from surojax.errors import shown

INPUT, PREFERRED, OTHER = FIELDS = ("input", "preferred_output", "non_preferred_output")


def is_pair(record: Mapping[str, Any]) -> bool:
    """Returns True for a row with the three fields of the format."""
    return record.keys() >= set(FIELDS)


def as_pair(record: Mapping[str, Any], prompt: str, chosen: str, rejected: str, tools: str) -> dict[str, Any]:
    """Returns a row of the format with the fields of other preferences, by these names; "": without tools.

    Other keys of `input` become fields of the row. Raises NotARow if `input` has no messages, or if the row has another
    value under one of the names.
    """
    given = decoded(record[INPUT])
    messages = decoded(given.get("messages")) if isinstance(given, Mapping) else None
    if not isinstance(messages, list):
        raise NotARow(
            f"expected an object with messages in {INPUT!r} beside {PREFERRED!r}, got {shown(record[INPUT], 40)}; "
            "correct the row"
        )
    pair = {name: value for name, value in given.items() if name not in ("messages", "tools")}
    pair |= {prompt: messages, chosen: decoded(record[PREFERRED]), rejected: decoded(record[OTHER])}
    pair |= {tools: given.get("tools")} if tools and has_content(given.get("tools")) else {}
    beside = {name: value for name, value in record.items() if name not in FIELDS}
    for name, value in beside.items():
        if name in pair and has_content(value) and value != pair[name]:
            raise NotARow(
                f"expected no {name!r} beside {INPUT!r} and {PREFERRED!r}, which say the same, got {shown(value, 40)}; "
                "remove one, or name it in ignored_fields of the dataset"
            )
    return beside | pair
