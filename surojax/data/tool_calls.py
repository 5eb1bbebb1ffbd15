"""Reads tools and calls of tools: JSON texts in place of objects, and the older `function_call` of OpenAI's format.

Chat templates differ in what they take: most write a call's arguments as JSON themselves, so they need an object;
some join a text that is JSON already. Which, a rendered call shows.
"""

import json
from collections.abc import Mapping
from typing import Any

from surojax.data.data_rows import NotARow
from surojax.data.rendering import Message, TemplateProgram
from surojax.errors import shown
from surojax.untrusted import RepeatedKey, parse_json

CALL = "function_call"  # of a message, beside its content: OpenAI's older name, one call
CALLS = "tool_calls"
# Keys of a tool, or of a call, with an object that may be written as JSON.
_OBJECTS = ("function", "parameters", "properties")


def decoded(value: Any) -> Any:
    """Returns the object or list that a text is the JSON of, also if it was encoded twice; else the value itself.

    Raises NotARow if an object repeats a key.
    """
    found = value
    for _ in range(3):
        if not isinstance(found, str):
            return found
        try:
            found = parse_json(found)
        except RepeatedKey as error:
            raise NotARow(f"expected each key of an object once, got one twice ({error}); remove one") from None
        except ValueError:
            return value
    return value


def read_tools(value: Any, field: str) -> list[Any] | None:
    """Returns a row's tools as objects, None if there are none. Raises NotARow if they are no list of objects."""
    tools = value
    if isinstance(value, str):
        try:
            tools = parse_json(value) if value.strip() else None
        except ValueError as error:
            raise NotARow(
                f"expected a JSON list of tools in {field!r}, got a string that is no JSON ({error}); "
                "correct the row, or set another tools_field"
            ) from None
    if tools is not None and not isinstance(tools, list):
        raise NotARow(
            f"expected a list of tools in {field!r}, got a {type(tools).__name__}; correct the row, or "
            "set another tools_field"
        )
    return [_object(tool, f"a tool in {field!r}") for tool in tools or () if tool is not None] or None


def as_tools(functions: list[Any] | None) -> list[Any] | None:
    """Returns functions in the older form of OpenAI's format as tools."""
    return functions and [{"type": "function", "function": function} for function in functions]


def read_calls(message: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """Returns the calls of a message, with arguments as objects if they are JSON of one, else as they are.

    place: of the message, for errors. Raises NotARow if its calls are no list of objects.
    """
    calls = decoded(message.get(CALLS))
    calls = [calls] if isinstance(calls, dict) else calls
    if calls is not None and not isinstance(calls, list) and calls != "":
        raise NotARow(
            f"expected a list of calls in {CALLS!r} of {place}, got {shown(calls, 40)}; correct or remove the row"
        )
    found = [_call(call, f"a call in {CALLS!r} of {place}") for call in calls or () if call is not None]
    old = decoded(message.get(CALL))
    if not (isinstance(old, dict) and not any(old.values())) and old:
        if found:
            raise NotARow(
                f"expected calls in {CALLS!r} or {CALL!r} of {place}, got both; remove one of them from the row"
            )
        found = [{"type": "function", "function": _call(old, f"an object in {CALL!r} of {place}")}]
    return found


def calls_of_text(content: str, place: str) -> list[dict[str, Any]]:
    """Returns the calls that are the JSON content of a message of the role `function_call`, one or a list of them.

    Raises NotARow if it is something else.
    """
    calls = decoded(content)
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) for call in calls):
        raise NotARow(
            f"expected {place}, of a role that calls tools, with the JSON of a name and arguments, got "
            f"{shown(content, 40)}; correct the row, or map the role in roles of the dataset"
        )
    objects = [_call(call, place) for call in calls]
    return [call if "function" in call else {"type": "function", "function": call} for call in objects]


def with_arguments_as(calls: list[dict[str, Any]], *, as_text: bool) -> list[dict[str, Any]]:
    """Returns calls with their arguments as JSON texts, or as objects.

    Raises NotARow for arguments that are a text, but no JSON, where objects are needed.
    """
    return [_with_arguments_as(call, as_text) for call in calls]


def _with_arguments_as(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_arguments_as(call["function"], as_text)}
    arguments = call["arguments"]
    if as_text:
        is_text = isinstance(arguments, str)
        return call | {"arguments": arguments if is_text else json.dumps(arguments, ensure_ascii=False)}
    if isinstance(arguments, str):
        raise NotARow(
            f"expected the arguments of a call of {call.get('name')!r} as a JSON object, got {shown(arguments, 40)}, "
            "a text that is no JSON; correct or remove the row"
        )
    return call


def _call(value: Any, what: str) -> dict[str, Any]:
    """Returns a call, or the function of one, as an object whose arguments are decoded; {} for missing arguments.

    Raises NotARow if it has no name.
    """
    call = _object(value, what)
    function = call["function"] if isinstance(call.get("function"), dict) else call
    if not isinstance(function.get("name"), str) or not function["name"].strip():
        raise NotARow(f"expected {what} with the name of a function, got {shown(value, 40)}; correct or remove the row")
    arguments = function.get("arguments", function.pop("parameters", None))  # Llama 3's name
    is_missing = arguments is None or (isinstance(arguments, str) and not arguments.strip())
    found = {} if is_missing else decoded(arguments)
    function["arguments"] = {} if found is None else found
    return call


def _object(value: Any, what: str) -> dict[str, Any]:
    """Returns a copy of an object that may be written as JSON, and so the objects of `_OBJECTS` in it."""
    found = decoded(value)
    if not isinstance(found, dict):
        raise NotARow(f"expected {what} as an object, got {shown(value, 40)}; correct or remove the row")
    return {k: _decoded_object(v) if k in _OBJECTS else v for k, v in found.items()}


def _decoded_object(value: Any) -> Any:
    found = decoded(value)
    return _object(found, "") if isinstance(found, dict) else value


# -- What a template takes --------------------------------------------------------------------------------------------

_ARGUMENTS = {"city": "Oslo"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}},
    },
}


def takes_text(program: tuple[str, ...], has_tools: bool) -> bool:
    """Returns True if a template joins a call's arguments as a text that is JSON. program: fields of a template.

    False if it writes an object as JSON, or in a form of its own, or shows no call at all.
    """
    template = TemplateProgram(*program)
    tools = [_TOOL] if has_tools else None
    objects = _shown_calls(template, _ARGUMENTS, tools)
    if any("Oslo" in text and "'city'" not in text for text in objects):  # 'city': Python's form of an object
        return False
    as_text = json.dumps(_ARGUMENTS)
    return any(as_text in text for text in _shown_calls(template, as_text, tools))


def _shown_calls(template: TemplateProgram, arguments: Any, tools: list[Any] | None) -> list[str]:
    """Renders a conversation with a call, in several forms; returns the texts of those that the template takes."""
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": arguments}}
    asked: list[Message] = [{"role": "user", "content": "Where?"}]
    answered: list[Message] = [
        {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "Here."},
        {"role": "assistant", "content": "There."},
    ]
    texts = []
    for system in ([], [{"role": "system", "content": "Be brief."}]):
        for content in ("", None, "Let me see."):
            said = {"role": "assistant", "content": content, CALLS: [call]}
            for rest in ([], answered):
                try:
                    texts.append(template.render([*system, *asked, said, *rest], tools))
                except NotARow:
                    continue
    return texts
