"""From rows to examples: token ids, and which of them the loss counts."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from surojax.data.datasets import BadRow, Dataset, Row
from surojax.data.templates import Template
from surojax.data.tokenizer import Tokenizer

TRAIN_ON = ("assistant", "last", "all")


class Example(NamedTuple):
    """One document. ids: int32 [tokens]. trained: bool [tokens], token i is a target of the loss; None: all are."""

    ids: np.ndarray
    trained: np.ndarray | None


class Encoder:
    """Encodes the rows of one dataset. It can be pickled, so processes can share the work.

    dataset: with its type decided (`datasets.resolve`). template: None if the tokenizer has none and none is chosen.
    train_on: one of TRAIN_ON. system_prompt: for rows and datasets without one of their own.

    fingerprint: hash of all that ids and trained depend on besides the rows.
    note: one line for the user about what the template does to a conversation; "": nothing to say.

    Raises ConfigError if the dataset holds conversations and there is no template.
    """

    fingerprint: str
    note: str

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Tokenizer,
        template: Template | None = None,
        *,
        train_on: str = "assistant",
        system_prompt: str = "",
    ):
        raise NotImplementedError

    def encode(self, rows: Iterable[Row | BadRow]) -> list[Example | BadRow]:
        """Returns the rows' examples, in their order; a row that cannot be used is a BadRow. Uses all cores.

        Holds all rows in memory, and for long texts about 50 times their size: pass some megabytes at a time.
        """
        raise NotImplementedError
