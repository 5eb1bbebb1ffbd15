"""Continues texts and answers messages with a model: texts in, texts out."""

from typing import Any

import numpy as np

from surojax.data.templates import NAMES as TEMPLATES
from surojax.data.tokenizer import Tokenizer
from surojax.errors import ConfigError
from surojax.inference.sample import generate
from surojax.inference.trained_model import Trained


def text_ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Encodes a text to continue; an empty text starts a document."""
    ids = tokenizer.encode(text)
    if tokenizer.bos_id is not None and tokenizer.adds_bos and ids[:1].tolist() != [tokenizer.bos_id]:
        return np.concatenate([[tokenizer.bos_id], ids])
    return ids if ids.size else np.array([tokenizer.eos_id])


def message_ids(trained: Trained, message: str, system: str = "") -> np.ndarray:
    """Encodes a conversation of one message, up to where its answer begins. system: system message; "": none.

    Raises ConfigError if the model has no chat template.
    """
    messages = [{"role": "system", "content": system}] if system else []
    return conversation_ids(trained, [*messages, {"role": "user", "content": message}])


def conversation_ids(trained: Trained, messages: list[dict[str, Any]]) -> np.ndarray:
    """Encodes messages, each with a `role` and its `content`, up to where the next answer begins.

    Raises ConfigError if the model has no chat template.
    """
    if trained.template is None:
        raise ConfigError(
            "chat_template: expected one, since the model has none of its own, got none; give "
            f"{', '.join(TEMPLATES)} or a Jinja file"
        )
    return trained.tokenizer.encode(trained.template.render(messages, add_generation_prompt=True))


def complete(trained: Trained, text: str, **options) -> str:
    """Returns a text's continuation. options: of `sample.stream`."""
    return continue_ids(trained, text_ids(trained.tokenizer, text), **options)


def answer_message(trained: Trained, message: str, system: str = "", **options) -> str:
    """Returns the answer to a message.

    options: of `sample.stream`. Raises ConfigError if the model has no chat template.
    """
    return continue_ids(trained, message_ids(trained, message, system), **options)


def continue_ids(trained: Trained, prompt: np.ndarray, **options) -> str:
    """Returns the text that continues token ids, int32 [T]. options: of `sample.stream`."""
    model, weights, tokenizer = trained[:3]
    limits = {"stop_ids": tokenizer.stop_ids, "vocab_size": tokenizer.vocab_size}
    return tokenizer.decode(list(generate(model, weights, prompt, **limits, **options)))
