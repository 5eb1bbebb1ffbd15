"""Splits messages into pieces of text that are trained or not.

Where an answer begins and ends follows from rendering the conversation up to it, without and with it: it begins where
the chat template's generation prompt ends. Some templates write an answer differently once the conversation goes on
(they leave out its thinking): such an answer is part of the later prompts, and not trained.
"""

import functools
import json
import re
from collections import Counter
from typing import Any, NamedTuple

from surojax.data.conversations import Conversation, PromptCompletion
from surojax.data.data_rows import NotARow
from surojax.data.rendering import Message, TemplateProgram
from surojax.data.row_fields import REASONING, THINKS
from surojax.data.values import texts_in
from surojax.errors import shown


class DocumentPiece(NamedTuple):
    """A part of a document's text. trained: whether the loss counts its tokens."""

    text: str
    trained: bool


def plain_pieces(pair: PromptCompletion, train_on: str) -> tuple[DocumentPiece, ...]:
    """Returns a prompt and its completion as pieces, for a tokenizer without a chat template."""
    system = f"{pair.system}\n\n" if pair.system else ""
    return DocumentPiece(system + pair.prompt + pair.seam, train_on == "all"), DocumentPiece(pair.completion, True)


def conversation_pieces(
    conversation: Conversation, template: TemplateProgram, train_on: str
) -> tuple[DocumentPiece, ...]:
    """Splits a rendered conversation into pieces; the answers that `train_on` selects, or all pieces, are trained.

    Answers with a weight of 0 are not trained. What follows the last answer that is trained is left out, unless
    everything is trained. Raises NotARow if no answer is to be trained, the template refuses the conversation or leaves
    out a message or a part of an answer, or its generation prompt does not begin an answer.
    """
    messages, tools = conversation.messages, conversation.tools
    everything = train_on == "all"
    render = functools.partial(template.render, tools=tools, variables=conversation.variables)
    if everything:
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    else:
        answers = _trained_answers(conversation, train_on)
        messages = messages[: answers[-1] + 1]
    untrained = _untrained_answers(conversation) if everything else ()
    whole = render(messages)
    _check_shown(messages, whole, template)
    _check_tools(tools or [], messages, whole, template)

    pieces = []
    done = 0
    for i in answers:
        after = whole if i == len(messages) - 1 else render(messages[: i + 1])
        if not whole.startswith(after):
            after = after.removesuffix(template.eos)  # some templates end the last message with it, whoever speaks
        if not whole.startswith(after):
            if i in untrained:
                raise _rewritten(i, template)
            continue
        before = render(messages[:i], add_generation_prompt=True)
        if not after.startswith(before) or len(before) < done:
            if i in untrained:
                raise _rewritten(i, template)
            if everything:
                if i == len(messages) - 1:
                    _check_answer(messages[i], i, whole, template)
                continue
            is_choice = THINKS in template.text and THINKS not in conversation.variables
            other = f"write {THINKS}=false into the row, or " if is_choice else ""
            same = next((k for k, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
            raise NotARow(
                f"expected an answer to begin with the generation prompt of {template.source}, got "
                f"{after[same : same + 30]!r} in place of {before[same : same + 30]!r}; {other}choose another "
                "chat_template"
            )
        _check_answer(messages[i], i, whole[len(before) : len(after)], template)
        pieces += [
            DocumentPiece(whole[done : len(before)], everything),
            DocumentPiece(whole[len(before) : len(after)], i not in untrained),
        ]
        done = len(after)
    pieces.append(DocumentPiece(whole[done:], everything))
    filled = tuple(piece for piece in pieces if piece.text)
    if not any(piece.trained for piece in filled):
        raise NotARow(
            f"expected {template.source} to show the answer, got a text without it; choose another chat_template"
        )
    return filled


def _trained_answers(conversation: Conversation, train_on: str) -> list[int]:
    """Returns the indices of the answers that are trained with `train_on` "assistant" or "last", one at least."""
    messages, weights = conversation.messages, conversation.weights or [None] * len(conversation.messages)
    first = conversation.prompt_length
    answers = [i for i, message in enumerate(messages) if i >= first and message["role"] == "assistant"]
    if not answers:
        where = " in the completion" if first else ""
        raise NotARow(f"expected a message of the assistant to train on{where}, got none; remove the row")
    for i, (message, weight) in enumerate(zip(messages, weights, strict=True)):
        if weight and i < first:
            raise NotARow(
                f"expected no weight of 1 in the prompt, of which nothing is trained, got it for message {i + 1}; join "
                "prompt and completion to messages, or set train_on to all"
            )
        if weight and message["role"] != "assistant":
            raise NotARow(
                f"expected a weight of 1 for answers only, got it for message {i + 1}, of the {message['role']}; "
                "correct the row, or set train_on to all, which trains every message"
            )
    if train_on == "last":
        if weights[answers[-1]] is False:
            raise NotARow(
                "expected the last answer, which is the one to train, with a weight of 1, got 0; remove the row"
            )
        return answers[-1:]
    if not (trained := [i for i in answers if weights[i] is not False]):
        raise NotARow(f"expected an answer to train, got {len(answers)} with a weight of 0; remove the row")
    return trained


def _untrained_answers(conversation: Conversation) -> list[int]:
    """Returns the indices of the answers with a weight of 0, which are not trained where everything else is."""
    for i, (message, weight) in enumerate(zip(conversation.messages, conversation.weights, strict=False)):
        if weight is False and message["role"] != "assistant":
            raise NotARow(
                f"expected a weight of 0 for answers only, since train_on is all, got it for message {i + 1}, of the "
                f"{message['role']}; set train_on to assistant, or correct the row"
            )
    return [i for i, weight in enumerate(conversation.weights) if weight is False]


def _rewritten(i: int, template: TemplateProgram) -> NotARow:
    """Makes the reason to reject a row with an untrained answer that cannot be found in the text."""
    return NotARow(
        f"expected an answer that {template.source} does not rewrite, since its weight is 0, got message {i + 1}; set "
        "train_on to assistant, or choose another chat_template"
    )


def in_limits(program: tuple[str, ...], train_on: str, conversation: tuple) -> dict[str, Any]:
    """Runs in the child process of `limited`: `conversation_pieces` as {"pieces"}, or {"refused": reason}.

    program: fields of a template.
    """
    try:
        return {"pieces": conversation_pieces(Conversation(*conversation), TemplateProgram(*program), train_on)}
    except NotARow as error:
        return {"refused": str(error)}


def _check_shown(messages: list[Message], whole: str, template: TemplateProgram) -> None:
    """Raises NotARow if the template leaves out messages to the assistant, or parts of answers except their thoughts.

    Those are left out of earlier answers by many templates, as in sampling.
    """
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            _check_answer(message, i, whole, template, with_thoughts=False)
        elif not _is_shown(message["content"], whole, by_words=message["role"] == "tool"):
            raise NotARow(
                f"expected {template.source} to show every message, got a text without that of the {message['role']}, "
                f"{message['content'].strip()[:30]!r}; choose another chat_template"
            )


def _check_answer(
    message: Message, i: int, text: str, template: TemplateProgram, *, with_thoughts: bool = True
) -> None:
    """Raises NotARow if a text lacks the content of answer i, its reasoning or one of its calls.

    with_thoughts: whether the text has the answer's reasoning, which may be between tags in its content.
    """
    content = message["content"]
    parts = [("content", content if with_thoughts else content.rpartition("</think>")[2], "a message of its own")]
    if with_thoughts:
        parts += [("reasoning", message[name], "the content") for name in REASONING if name in message]
    for what, part, place in parts:
        if not _is_shown(part, text, by_words=True):
            raise NotARow(
                f"expected {template.source} to show every part of an answer, got a text without the {what} of message "
                f"{i + 1}, {shown(part.strip(), 40)}; write it into {place}, or choose another chat_template"
            )
    calls = _called(message)
    for name, count in Counter(_names(calls)).items():
        of_name = [call for call in calls if name in _names([call])]
        values = [value for call in of_name for value in texts_in((call.get("function") or call).get("arguments"))]
        if text.count(name) < count or not all(_is_shown(value, text, by_words=True) for value in values):
            raise NotARow(
                f"expected {template.source} to show every call of a tool, got a text without that of {name!r} in "
                f"message {i + 1}; choose another chat_template, or remove the row"
            )


def _check_tools(tools: list[Any], messages: list[Message], whole: str, template: TemplateProgram) -> None:
    """Raises NotARow if the template leaves out a tool, as one that reads OpenAI's form does with others."""
    called = Counter(name for message in messages for name in _names(_called(message)))
    for name in _names([tool for tool in tools if isinstance(tool, dict)]):
        if whole.count(name) <= called[name]:
            raise NotARow(
                f"expected {template.source} to show every tool, got a text without {name!r}; write tools as "
                "{'type': 'function', 'function': {...}}, choose another chat_template, or set tools_field='' to leave "
                "them out"
            )


def _is_shown(part: str, text: str, *, by_words: bool) -> bool:
    """Returns True if a text has a part of a message. by_words: each word of it is enough, as for text within JSON."""
    if part.strip() in text:
        return True
    words = re.findall(r"\w+", re.sub(r"</?think>", " ", part))
    return by_words and all(word in text or json.dumps(word)[1:-1] in text for word in words)


def _called(message: Message) -> list[dict[str, Any]]:
    """Returns a message's calls of functions."""
    return [call for call in message.get("tool_calls") or [] if isinstance(call, dict)]


def _names(objects: list[dict[str, Any]]) -> list[str]:
    """Returns the names of functions, of calls or tools, in OpenAI's form or without its outer object."""
    functions = [x.get("function") or x for x in objects]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return [name for name in names if isinstance(name, str)]


def trained_parts_note(template: TemplateProgram, train_on: str) -> str:
    """Returns one line if the template rewrites earlier answers, so that they are not trained; else ""."""
    if train_on != "assistant":
        return ""
    for answer, which in (("b", "earlier answers"), ("<think>a</think>b", "earlier answers with <think>")):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
        try:
            pieces = conversation_pieces(Conversation(turns * 2, None), template, train_on)
        except NotARow:
            return ""
        if sum(piece.trained for piece in pieces) < 2:
            return f"{template.source} rewrites {which} once a conversation goes on: only the last one is trained"
    return ""
