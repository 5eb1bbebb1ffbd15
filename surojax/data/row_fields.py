"""Names of fields that carry meaning in a row, by what they mean; all others are metadata and are not read.

A field of this table is read by the settings of its dataset, or the row is refused by its name unless the field is
empty: what a row means is never dropped in silence. `ignored_fields` of a dataset leaves fields out on purpose.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from surojax.data.data_rows import NotARow
from surojax.data.values import number_of
from surojax.errors import shown

MEDIA = (
    *("image", "images", "rejected_image", "rejected_images", "pixel_values"),
    *("video", "videos", "audio", "audios"),
)
# Places of media; beside a text of the web they are metadata.
MEDIA_PLACES = (
    *("image_path", "image_paths", "image_url", "image_urls"),
    *("video_path", "video_paths", "video_url", "audio_path", "audio_paths", "audio_url"),
    "objects",  # ms-swift's, which stand for <bbox> and <ref-object> in a text
)
REASONING = (
    *("reasoning_content", "thinking", "reasoning", "reasoning_text", "thoughts", "thought"),
    *("chain_of_thought", "cot", "rationale", "Complex_CoT", "reasoning_trace", "thinking_trajectories"),
)
# Weights of messages: OpenAI's and Mistral's, Axolotl's, ms-swift's, verl's.
WEIGHTS = ("weight", "train", "training", "trainable", "loss", "loss_scale", "loss_mask", "loss_weight")
WEIGHTS_OF_DOCUMENTS = ("sample_weight", "sample_weights", "loss_weight", "loss_weights", "token_weights", "weights")
WEIGHTS_OF_ROWS = (  # without `loss`, which is metadata there
    *("weight", "train", "training", "trainable", "loss_scale", "loss_mask", "sample_weight", "sample_weights"),
    *("loss_weight", "loss_weights", "weights"),
)
# Masks of tokens, of rows of token ids: 0 leaves a token out.
MASKS = (
    *("attention_mask", "loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "response_mask"),
    *("tool_mask", "env_mask"),
)
LABELS = "labels"  # a label for each token id; -100 leaves the token out
HISTORY = "history"
FUNCTIONS = "functions"  # OpenAI's older name of tools
VARIABLES = "chat_template_kwargs"  # as TRL's: further variables of the chat template
THINKS = "enable_thinking"  # one of them, which rows of verl have beside the messages
DOCUMENTS = "documents"  # another, which transformers has an argument for
POSITIONS = "position_ids"  # of rows of token ids
# Of the documents that a row of token ids is made of: their lengths, where they begin and end, their number at each id.
LENGTHS = ("seq_lengths", "seq_lens", "sequence_lengths")
BORDERS = ("cu_seqlens", "cu_seq_lens")
DOCUMENT_IDS = ("segment_ids", "document_ids", "sequence_ids")
SEGMENTS = "segments"  # Axolotl's rows: texts, each with a label that says whether it is trained
SPEAKERS = ("user", "human", "prompter", "assistant", "gpt", "bot", "model", "system", "tool", "function")
PAIRS = ("instruction", "unpaired")  # types of rows that are a prompt and a completion
CHATS = ("conversation", "preference", SEGMENTS, *PAIRS)
DOCUMENT_TYPES = ("text", "tokens", "rollout")
ALL = (*DOCUMENT_TYPES, *CHATS)


def has_content(value: Any) -> bool:
    """Returns False for a number, which is metadata, for null and blank text, and for lists and objects of these."""
    return not isinstance(value, bool | int | float) and _is_filled(value)


def _is_filled(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip() not in ("", "[]", "{}", "null", "None", "nan")
    if isinstance(value, Mapping):
        return any(map(_is_filled, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_filled, value))
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def is_prose(value: Any) -> bool:
    """Returns True for content that is more than a word, such as "on"."""
    return has_content(value) and not (isinstance(value, str) and len(value.split()) < 2)


def is_weight(value: Any) -> bool:
    """Returns True for a number or truth value, or the text of one, that is not 1, and for a list with one."""
    if isinstance(value, list | tuple | np.ndarray):
        return any(map(is_weight, value))
    return number_of(value) not in (None, 1)


def has_numbers(value: Any) -> bool:
    """Returns True for a number, the text of one, or a list with one."""
    return number_of(value) is not None or (isinstance(value, list | tuple) and any(map(has_numbers, value)))


def is_speaker(value: Any) -> bool:
    """Returns True for the role of a message's speaker."""
    return isinstance(value, str) and value.strip().lower() in SPEAKERS


def has_labels(value: Any) -> bool:
    """Returns True for segments of a text that say whether they are trained."""
    if isinstance(value, str):
        return '"label"' in value
    return isinstance(value, list) and any(isinstance(part, Mapping) and "label" in part for part in value)


def begins_anew(positions: Any) -> bool:
    """Returns True for token positions other than 0, 1, 2, ..., such as those of several documents."""
    return isinstance(positions, list | tuple | np.ndarray) and list(positions) != [*range(len(positions))]


def has_several(lengths: Any, least: int = 2) -> bool:
    """Returns True for a list of `least` numbers or more."""
    return isinstance(lengths, list | tuple | np.ndarray) and len(lengths) >= least


def has_borders(places: Any) -> bool:
    """Returns True for the ends of several documents, after the 0 at which the first begins."""
    return has_several(places, 3)


def has_different(numbers: Any) -> bool:
    """Returns True for a list with two numbers that differ."""
    return has_several(numbers) and len(set(map(str, numbers))) > 1


def is_false(value: Any) -> bool:
    """Returns True for false, as a table's cell writes it too. A number is a class, or whatever its set says."""
    return value is False or (isinstance(value, str) and value.strip().lower() == "false")


def masked_field(record: Mapping[str, Any]) -> str | None:
    """Returns the name of a mask of tokens in a row of token ids that leaves tokens out; None if there is none."""
    return next((name for name in MASKS if name in record and _has_zero(record[name])), None)


def _has_zero(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_zero, value))
    return value is not None and not (value if isinstance(value, bool | int | float) else np.all(value))


class Meaning(NamedTuple):
    """Fields of one meaning.

    types: of the rows in which they mean it. advice: what to do with such rows. carries: whether a value means
    anything.
    """

    names: tuple[str, ...]
    what: str
    types: tuple[str, ...]
    advice: str
    carries: Callable[[Any], bool] = has_content


# By the type of rows: log-probabilities that TRL and verl keep with them.
OF_REFERENCES = {
    "preference": ("ref_chosen_logps", "ref_rejected_logps", "reference_chosen_logps", "reference_rejected_logps"),
    "unpaired": ("ref_logps", "ref_KL_logps", "reference_logps", "reference_KL_logps"),
    "rollout": ("ref_per_token_logps", "ref_logprobs", "ref_log_prob"),
}
MEANINGS = (
    Meaning(MEDIA, "media, since texts are trained", ALL, "remove the row"),
    Meaning(MEDIA_PLACES, "media, since texts are trained", CHATS, "remove the row"),
    Meaning(
        (HISTORY, "chat_history", "conversation_history", "previous_messages", "past_turns"),
        "earlier turns beside the messages",
        CHATS,
        "write all turns as messages",
    ),
    Meaning(REASONING, "reasoning beside the answer", CHATS, "write it into the answer or its message", is_prose),
    Meaning(
        ("system_prompt", "system_message", "system_instruction", "systemInstruction"),
        "system prompt of another name",
        CHATS,
        "set system_field to it",
    ),
    Meaning((FUNCTIONS, "available_tools"), "tools of another name", CHATS, "set tools_field to it"),
    Meaning(
        ("context",),
        "context beside the prompt",
        ("instruction",),
        "set instruction_field, input_field (to it) and output_field, or join it to the prompt",
    ),
    Meaning(("context",), "context beside the prompt", ("preference", "unpaired"), "join it to the prompt"),
    Meaning(
        ("rejected_response", "rejected_responses", "rejected_messages", "rejected_answer", "rejected"),
        "rejected answer, which is trained only beside a chosen one",
        CHATS,
        "write the row as a prompt, chosen and rejected",
    ),
    Meaning(WEIGHTS_OF_ROWS, "weight of the row", CHATS, "remove the row, or repeat it", is_weight),
    Meaning(WEIGHTS_OF_DOCUMENTS, "weight of the row", DOCUMENT_TYPES, "remove the row", is_weight),
    Meaning(
        ("role", "from", "speaker"),
        "role beside a text, which makes it a message",
        ("text",),
        "join the messages of a conversation (OASST's: by parent_id) in one row with a list of messages",
        is_speaker,
    ),
    Meaning(
        ("system", "tools"), "system prompt or tools beside segments", (SEGMENTS,), "write them into the first segment"
    ),
    Meaning((SEGMENTS,), "labelled segments beside a text", ("text",), "remove the text", has_labels),
    Meaning(
        (POSITIONS,), "positions that begin anew", ("tokens",), "give a row for each document, as a list", begins_anew
    ),
    Meaning(LENGTHS, "division into documents", ("tokens",), "give a row for each document", has_several),
    Meaning(BORDERS, "division into documents", ("tokens",), "give a row for each document", has_borders),
    Meaning(DOCUMENT_IDS, "division into documents", ("tokens",), "give a row for each document", has_different),
    Meaning(
        ("reflection", "corrected"), "further turns beside the answer", PAIRS, "write all turns as messages", is_prose
    ),
    Meaning(
        ("positive_messages", "negative_messages"), "messages to compare with", CHATS, "remove the row, or the field"
    ),
    *(
        Meaning(
            names,
            "log-probabilities of a reference, which this run computes itself",
            (kind,),
            "remove the field",
            has_numbers,
        )
        for kind, names in OF_REFERENCES.items()
    ),
    Meaning(("mask",), "mask of turns", CHATS, "give messages a weight of 0 or 1"),
    Meaning(
        ("label", "kto_tag"),
        "label of a bad answer, which is trained as one with objective='kto' only",
        ("instruction", "conversation"),
        "remove the row, or write such rows as prompt, completion and label for that objective",
        is_false,
    ),
)


def check_fields(record: Mapping[str, Any], row_type: str, read: Collection[str]) -> None:
    """Raises NotARow for a field that means something in rows of a type, is not empty, and is not read.

    read: names of the fields that the dataset's settings read.
    """
    for meaning in MEANINGS:
        if row_type not in meaning.types:
            continue
        for name in meaning.names:
            if name in record and name not in read and meaning.carries(record[name]):
                raise NotARow(refusal(meaning.what, name, record[name], meaning.advice))


def refusal(what: str, name: str, value: Any, advice: str, place: str = "") -> str:
    """Returns the reason to reject a row with a field that is not read. place: of the field, such as "message 2"."""
    return (
        f"expected no {what}, got {name!r}{place and f' of {place}'} ({shown(value, 40)}); {advice}, or name it in "
        "ignored_fields of the dataset"
    )
