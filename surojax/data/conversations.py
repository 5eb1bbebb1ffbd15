"""Reads a row's fields by its dataset's type: a text, a prompt with its completion, a preference or a conversation.

Roles and fields may have the names of ShareGPT's format; afterwards they have those of OpenAI's, which chat templates
read. Each function raises NotARow if a field is missing or holds something else, or if the row has a field that means
something and that its dataset does not read (`row_fields`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from surojax.data import tool_calls
from surojax.data.data_rows import NotARow
from surojax.data.datasets import INSTRUCTION_FIELDS, MESSAGES, PROMPT_FIELDS, Dataset, field_names, fields_read
from surojax.data.messages import as_message, read_messages, text_of_parts
from surojax.data.rendering import Message
from surojax.data.repeats import Said, check_repeated, check_repeats, said_in
from surojax.data.row_fields import (
    DOCUMENTS,
    FUNCTIONS,
    HISTORY,
    SEGMENTS,
    THINKS,
    VARIABLES,
    check_fields,
    has_content,
)
from surojax.data.values import is_missing, number_of
from surojax.declared import LARGEST_FLOAT
from surojax.errors import shown

SYSTEM_ROLES = ("system", "developer")


class PromptCompletion(NamedTuple):
    """A prompt and the completion to learn.

    system: "" if there is none. seam: what stands between the two if there is no chat template. history: earlier
    (prompt, completion). tools: descriptions of callable tools, or None. variables: further ones of a chat template.
    """

    system: str
    prompt: str
    completion: str
    seam: str
    history: tuple[tuple[str, str], ...] = ()
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = {}

    @property
    def messages(self) -> list[Message]:
        """The pair as a conversation."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for prompt, completion in (*self.history, (self.prompt, self.completion)):
            messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return messages


class Conversation(NamedTuple):
    """Messages, each with a role of ROLES and a text as its content. tools: descriptions of callable tools, or None.

    weights: of each message, True to train it, False not to, None if it has none; (): no message has one.
    prompt_length: number of messages that are a prompt, whose answers are not trained.
    variables: further variables of the chat template.
    """

    messages: list[Message]
    tools: list[Any] | None
    weights: tuple[bool | None, ...] = ()
    prompt_length: int = 0
    variables: Mapping[str, Any] = {}


def text_of_row(record: Mapping[str, Any], text_field: str) -> str:
    """Returns the text of a row."""
    check_fields(record, "text", (text_field,))
    return _filled(record, text_field, "the text", "set text_field to the field that holds the text")


def prompt_completion(
    record: Mapping[str, Any], dataset: Dataset, system_prompt: str
) -> PromptCompletion | Conversation:
    """Returns the prompt and completion of an instruction; an input follows its instruction after a blank line.

    Lists of messages in place of texts make it a conversation, whose prompt is not trained.
    """
    reads_prompt = _reads_prompt(record, dataset)
    reads = {getattr(dataset, name) for name in (PROMPT_FIELDS if reads_prompt else INSTRUCTION_FIELDS)}
    parts = [_as_list(record.get(name)) for name in (dataset.prompt_field, dataset.completion_field)]
    if reads_prompt and any(isinstance(part, list) for part in parts):
        return _of_lists(record, dataset, system_prompt)
    check_fields(record, dataset.type, fields_read(dataset, HISTORY, FUNCTIONS))
    system = _system(record, dataset) or dataset.system_prompt or system_prompt
    more = {"history": _history(record), "tools": _tools(record, dataset), "variables": _variables(record)}
    if reads_prompt:
        _check_input(record, dataset)
        prompt = _filled(record, dataset.prompt_field, "the prompt")
        completion = _filled(record, dataset.completion_field, "the completion")
        check_repeats(record, dataset, reads, [("user", prompt), ("assistant", completion)])
        return PromptCompletion(system, prompt, completion, "", **more)
    if dataset.instruction_field not in record:
        raise NotARow(
            f"expected the prompt in {dataset.prompt_field!r} or the instruction in {dataset.instruction_field!r}, got "
            f"{field_names(record)}; name the fields in the dataset, or correct the row"
        )
    instruction = _filled(record, dataset.instruction_field, "the instruction")
    input_text = _optional(record, dataset.input_field, "the input")
    prompt = f"{instruction}\n\n{input_text}" if input_text else instruction
    completion = _filled(record, dataset.output_field, "the output")
    parts = [("user", part) for part in (instruction, input_text) if part]
    check_repeats(record, dataset, reads, [*parts, ("assistant", completion)])
    return PromptCompletion(system, prompt, completion, "\n\n", **more)


def _of_lists(record: Mapping[str, Any], dataset: Dataset, system_prompt: str) -> Conversation:
    """Makes a conversation of a prompt and a completion, at least one of which is a list of messages."""
    parts = []
    for field, role, what in (
        (dataset.prompt_field, "user", "the prompt"),
        (dataset.completion_field, "assistant", "the completion"),
    ):
        value = _as_list(record.get(field))
        part = value if isinstance(value, list) else [as_message(role, _filled(record, field, what), dataset)]
        if not part:
            raise NotARow(f"expected messages as {what} in {field!r}, got an empty list; remove the row")
        parts.append(part)
    prompt, completion = parts
    if (said := said_in(prompt, dataset)) == said_in(completion, dataset)[: len(said)]:
        completion = completion[len(prompt) :]  # the completion repeats the prompt
    conversation = _of_messages([*prompt, *completion], record, dataset, system_prompt)
    added = len(conversation.messages) - len(read_messages(completion, dataset).messages)
    check_repeats(record, dataset, {dataset.prompt_field, dataset.completion_field}, _said_by(conversation))
    if dataset.type == "unpaired" and conversation.messages[-1]["role"] != "assistant":
        raise NotARow(
            f"expected a completion in {dataset.completion_field!r} that ends with an answer of the assistant, got a "
            f"message of the {conversation.messages[-1]['role']}; correct or remove the row"
        )
    return conversation._replace(prompt_length=added)


def _check_input(record: Mapping[str, Any], dataset: Dataset) -> None:
    """Raises NotARow for an input beside a prompt, unless the prompt seems to be made of an instruction and it."""
    is_part = dataset.instruction_field in record and dataset.prompt_field != dataset.instruction_field
    value = None if dataset.input_field == dataset.prompt_field or is_part else record.get(dataset.input_field)
    if has_content(value):
        others = "set instruction_field, input_field and output_field, or " if dataset.type == "instruction" else ""
        raise NotARow(
            f"expected no input in {dataset.input_field!r} beside a prompt, got {shown(value, 40)}; {others}join it to "
            "the prompt, or name it in ignored_fields of the dataset"
        )


def with_answer(
    own: PromptCompletion | Conversation, other: PromptCompletion | Conversation
) -> PromptCompletion | Conversation:
    """Returns a row's prompt with the answer of another row; both are as `prompt_completion` returns them."""
    if isinstance(own, PromptCompletion) and isinstance(other, PromptCompletion):
        return own._replace(completion=other.completion)
    if isinstance(own, PromptCompletion):
        own = Conversation(own.messages, own.tools, variables=own.variables)
    return own._replace(messages=[*own.messages[:-1], other.messages[-1]])


def _reads_prompt(record: Mapping[str, Any], dataset: Dataset) -> bool:
    """True for a prompt and completion, False for an instruction: by the dataset's field names, else by the row's."""
    if dataset.differing(*PROMPT_FIELDS) or dataset.differing(*INSTRUCTION_FIELDS):
        return bool(dataset.differing(*PROMPT_FIELDS))
    is_whole = dataset.completion_field in record or dataset.instruction_field not in record
    return dataset.prompt_field in record and is_whole


def is_desirable(record: Mapping[str, Any], dataset: Dataset) -> bool:
    """Returns the label of an unpaired row: True if its answer is a good one."""
    label = record.get(dataset.label_field)
    if not isinstance(label, bool | int | float) or label not in (0, 1):
        got = shown(label, 40) if dataset.label_field in record else field_names(record)
        raise NotARow(
            f"expected true (a good answer) or false, or 1 or 0, in {dataset.label_field!r}, got {got}; name the "
            "label_field in the dataset, or correct the row"
        )
    return bool(label)


def conversation(record: Mapping[str, Any], dataset: Dataset, system_prompt: str) -> Conversation:
    """Returns the messages and tools of a row. A system prompt becomes the first message if the row has none."""
    names = (dataset.messages_field,) if dataset.messages_field else MESSAGES
    given = [name for name in names if record.get(name) is not None]
    given = [name for name in given if has_content(record[name])] or given
    if not given:
        expected = f"expected messages in {' or '.join(map(repr, names))}"
        if any(name in record for name in names):
            raise NotARow(f"{expected}, got null; remove the row")
        raise NotARow(f"{expected}, got {field_names(record)}; name the field in the dataset, or correct the row")
    messages = tool_calls.decoded(record[given[0]])
    if not isinstance(messages, list):
        raise NotARow(f"expected a list of messages, got a {type(messages).__name__}; correct the row")
    found = _of_messages(messages, record, dataset, system_prompt)
    check_repeats(record, dataset, given[:1], _said_by(found))
    return found


def _of_messages(raw: list[Any], record: Mapping[str, Any], dataset: Dataset, system_prompt: str) -> Conversation:
    """Makes a conversation from a row's raw messages, tools and system prompt."""
    if not raw:
        raise NotARow("expected messages, got an empty list; remove the row")
    check_fields(record, dataset.type, fields_read(dataset, FUNCTIONS))
    messages, weights = read_messages(raw, dataset)

    system = _system(record, dataset)
    if messages[0]["role"] not in SYSTEM_ROLES:
        system = system or dataset.system_prompt or system_prompt
        if system:
            messages, weights = [{"role": "system", "content": system}, *messages], [None, *weights]
    elif system and system != messages[0]["content"]:
        raise NotARow(
            f"expected one system prompt, got one in {dataset.system_field!r} and another in the messages; remove one"
        )
    said_weights = () if weights.count(None) == len(weights) else tuple(weights)
    return Conversation(messages, _tools(record, dataset), said_weights, variables=_variables(record))


def _said_by(conversation: Conversation) -> Said:
    return [(message["role"], message["content"]) for message in conversation.messages]


def preference(
    record: Mapping[str, Any], dataset: Dataset, system_prompt: str
) -> tuple[PromptCompletion, PromptCompletion] | tuple[Conversation, Conversation]:
    """Returns a prompt with the chosen answer, and with the rejected one.

    Answers are texts, beside a prompt that is a text or a list of messages; or lists of messages, each the answer alone
    or the whole conversation.
    """
    chosen, rejected = (_as_list(record.get(name)) for name in (dataset.chosen_field, dataset.rejected_field))
    prompt = record.get(dataset.prompt_field)
    reads = {dataset.prompt_field, dataset.chosen_field, dataset.rejected_field}
    _check_input(record, dataset)
    if isinstance(chosen, list) and isinstance(rejected, list):
        if prompt is not None and not isinstance(prompt, str | list):
            raise NotARow(
                f"expected the prompt in {dataset.prompt_field!r} as a text or a list of messages, got "
                f"{shown(prompt, 40)}; correct the row"
            )
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
            check_fields(record, dataset.type, fields_read(dataset, FUNCTIONS))
            system = _system(record, dataset) or dataset.system_prompt or system_prompt
            advice = "name the field in the dataset, or write what both answers begin with into it"
            prompt = _filled(record, dataset.prompt_field, "the prompt", advice)
            more = {"tools": _tools(record, dataset), "variables": _variables(record)}
            check_repeats(record, dataset, reads, [("user", prompt), *(("assistant", answer) for answer in answers)])
            chosen, rejected = (PromptCompletion(system, prompt, answer, "", **more) for answer in answers)
            return chosen, rejected
        chosen, rejected = ([*prompt, as_message("assistant", answer, dataset)] for answer in answers)
    better = _of_messages(chosen, record, dataset, system_prompt)
    worse = _of_messages(rejected, record, dataset, system_prompt)
    if better.messages == worse.messages:
        raise NotARow(_TIE)
    if len(better.messages) == len(worse.messages) == 1:
        raise NotARow("expected messages before the two answers, got none; add the prompt, or remove the row")
    are_answers = all(conversation.messages[-1]["role"] == "assistant" for conversation in (better, worse))
    if not are_answers or better.messages[:-1] != worse.messages[:-1]:
        raise NotARow(
            "expected two conversations that differ in the last message, an answer of the assistant, got others; "
            "correct or remove the row"
        )
    check_repeats(record, dataset, reads, [*_said_by(better), *_said_by(worse)[-1:]])
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


def _as_list(value: Any) -> Any:
    """Returns a message alone, as LLaMA-Factory's pairs have it, as a list, and any other value itself."""
    return [value] if isinstance(value, Mapping) else value


def _whole(prompt: Any, messages: list[Any], dataset: Dataset) -> list[Any]:
    """Prepends the prompt's messages to an answer's messages, unless these are a conversation that begins with them.

    Raises NotARow if they are one that does not.
    """
    if not has_content(prompt) or not messages:
        return messages
    said = said_in(messages, dataset)
    begin = [as_message("user", prompt, dataset)] if isinstance(prompt, str) else prompt
    asked = said_in(begin, dataset)
    if said[: len(asked)] == asked:
        return messages
    if said[0][0] in ("assistant", "tool"):
        return [*begin, *messages]
    if asked[0][0] in SYSTEM_ROLES and said[: len(asked) - 1] == asked[1:]:
        return [begin[0], *messages]
    check_repeated(prompt, dataset.prompt_field, dataset, said[:-1])
    return messages


def _tools(record: Mapping[str, Any], dataset: Dataset) -> list[Any] | None:
    """Returns the tools of a row, under OpenAI's older name too; None if there are none."""
    tools = tool_calls.read_tools(record.get(dataset.tools_field), dataset.tools_field)
    functions = tool_calls.read_tools(record.get(FUNCTIONS), FUNCTIONS) if dataset.tools_field else None
    if tools and functions:
        raise NotARow(
            f"expected tools in {dataset.tools_field!r} or {FUNCTIONS!r}, got both; remove one, or name it in "
            "ignored_fields of the dataset"
        )
    return tools or tool_calls.as_tools(functions)


def _history(record: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Returns the earlier turns of a row, pairs of a prompt and its completion."""
    turns = tool_calls.decoded(record.get(HISTORY))
    if not has_content(turns):
        return ()
    are_pairs = isinstance(turns, list) and all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in turns)
    if not are_pairs or not all(isinstance(text, str) and text.strip() for turn in turns for text in turn):
        raise NotARow(
            f"expected earlier turns in {HISTORY!r} as pairs of a prompt and its completion, got {shown(turns, 40)}; "
            "write all turns as messages, or name it in ignored_fields of the dataset"
        )
    return tuple((prompt, completion) for prompt, completion in turns)


def segments(record: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Returns (text, whether it is trained) of each segment of a row, of those that are not empty."""
    check_fields(record, SEGMENTS, (SEGMENTS,))
    parts = tool_calls.decoded(record.get(SEGMENTS))
    found = []
    for number, part in enumerate(parts if isinstance(parts, list) else [parts], start=1):
        text, label = (part.get(name) if isinstance(part, Mapping) else None for name in ("text", "label"))
        if not isinstance(text, str) or number_of(label) not in (0, 1):
            raise NotARow(
                f"expected segment {number} in {SEGMENTS!r} with a text and a label, true or false, got "
                f"{shown(part, 40)}; correct the row"
            )
        found += [(text, bool(number_of(label)))] if text else []
    if not any(label for _, label in found):
        raise NotARow(f"expected a segment to train, with the label true, got none in {SEGMENTS!r}; remove the row")
    return found


def _variables(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row's variables of its chat template, verl's `enable_thinking` and documents among them."""
    found = tool_calls.decoded(record.get(VARIABLES))
    if not isinstance(found, Mapping) and (isinstance(found, int | float) or has_content(found)):
        raise NotARow(f"expected an object in {VARIABLES!r}, got {shown(found, 40)}; correct the row")
    found = found if isinstance(found, Mapping) else {}
    variables = {name: value for name, value in found.items() if value is not None}
    thinks = record.get(THINKS)
    if not is_missing(thinks) and thinks != "":
        said = variables.setdefault(THINKS, bool(number_of(thinks)))
        if number_of(thinks) not in (0, 1) or number_of(thinks) != said:
            raise NotARow(
                f"expected true or false in {THINKS!r}, the same as {VARIABLES!r} has, got {shown(thinks, 40)}; "
                "correct the row, or name it in ignored_fields of the dataset"
            )
    documents = tool_calls.decoded(record.get(DOCUMENTS))
    if not has_content(documents):
        return variables
    if not isinstance(documents, list):
        raise NotARow(
            f"expected a list of documents in {DOCUMENTS!r}, got {shown(documents, 40)}; correct the row, or name it "
            "in ignored_fields of the dataset"
        )
    return variables | {DOCUMENTS: documents}


def _system(record: Mapping[str, Any], dataset: Dataset) -> str:
    """Returns the system prompt of a row, "" if there is none. It may be a list of parts, also written as JSON."""
    value = record.get(dataset.system_field)
    parts = tool_calls.decoded(value)
    if isinstance(parts, list):
        value = text_of_parts(parts) if has_content(parts) else ""
        value = parts if value is None else value
    if value is None or isinstance(value, str):
        return value if value and has_content(value) else ""
    raise NotARow(
        f"expected the system prompt in {dataset.system_field!r} as a text, got {shown(value, 40)}; correct the row"
    )


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
