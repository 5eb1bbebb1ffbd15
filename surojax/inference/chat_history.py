"""A conversation with a model: its turns, without the oldest if all would exceed the model's context length."""

from typing import Any

import numpy as np

from surojax.errors import ConfigError
from surojax.inference.prompts import conversation_ids
from surojax.inference.trained_model import Trained


class ChatHistory:
    """The messages of a conversation, each with a `role` and its `content`.

    system: the first message, which is never cut; "": none. max_tokens: of an answer. length: tokens of prompt and
    answer together; None: any number. left_out: messages that were cut so far.
    """

    def __init__(self, trained: Trained, system: str, max_tokens: int):
        self.trained = trained
        self.system = [{"role": "system", "content": system}] if system else []
        self.length = trained.length
        # An answer gets the room that it may take, at most half of the length.
        self._longest = None if self.length is None else self.length - min(max_tokens, self.length // 2)
        self.turns: list[dict[str, Any]] = []
        self.left_out = 0

    def ask(self, message: str) -> np.ndarray:
        """Adds a message, drops the oldest turns until the conversation fits, and returns its token ids.

        Raises ConfigError, and leaves the conversation as it was, if the message does not fit alone, or if the model
        has no chat template.
        """
        turns = [*self.turns, {"role": "user", "content": message}]
        ids = conversation_ids(self.trained, self.system + turns)
        while self._longest is not None and ids.size > self._longest:
            if len(turns) == 1:
                raise ConfigError(
                    f"message: expected at most {self._longest:,} tokens, with what the template adds, got "
                    f"{ids.size:,}: the model's length is {self.length:,}; shorten it"
                )
            turns = turns[2:]  # a question and its answer
            ids = conversation_ids(self.trained, self.system + turns)
        self.left_out += len(self.turns) + 1 - len(turns)
        self.turns = turns
        return ids

    def answer(self, text: str) -> None:
        """Adds the model's answer to the last message."""
        self.turns.append({"role": "assistant", "content": text})

    def reset(self) -> None:
        """Forgets all turns."""
        self.turns = []
        self.left_out = 0
