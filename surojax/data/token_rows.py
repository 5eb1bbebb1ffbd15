"""Reads rows of token ids; each row is a document without further encoding."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from surojax.data import row_fields
from surojax.data.data_rows import BadRow, BlankRow, DataRow, NotARow
from surojax.data.examples import Example
from surojax.data.given import TOKENS
from surojax.data.items import Item, Unit, item_key, key_of_bad, new_hash
from surojax.data.row_fields import LABELS
from surojax.data.values import array_of


@dataclass(frozen=True)
class TokenEncoder:
    """Makes documents from rows of token ids, without changing them; see `cache_writer.ItemEncoder`."""

    vocab_size: int

    is_text = True

    @property
    def fingerprint(self) -> str:
        return "token ids"

    def item(self, row: DataRow | BadRow) -> Item[np.ndarray] | BlankRow:
        """Reads the ids of a row, or returns a `BadRow`; a `BlankRow` for no ids, which an empty text becomes."""
        if isinstance(row, BadRow):
            return Item(row, key_of_bad(row), 0)
        if isinstance(given := row.record.get(TOKENS), list | tuple | np.ndarray) and np.array_equal(given, []):
            return BlankRow(row.where)
        try:
            row_fields.check_fields(row.record, "tokens", (TOKENS,))
        except NotARow as error:
            return self.item(BadRow(row.where, str(error)))
        ids = array_of(row.record.get(TOKENS, ()))
        if ids is None:  # lists of different lengths, numbers beyond 64 bits, true among numbers
            ids = np.zeros(0)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            got = f"{ids.dtype} {[*ids.shape]}"
            bad = BadRow(row.where, f"expected token ids, integers [tokens], got {got}; correct or remove the row")
        elif ids.min() < 0 or ids.max() >= self.vocab_size:
            got = f"{int(ids.min())} to {int(ids.max())}"
            bad = BadRow(row.where, f"expected ids below the tokenizer's {self.vocab_size}, got {got}; correct the row")
        elif (name := row_fields.masked_field(row.record)) or not _are_all_trained(row.record.get(LABELS), ids):
            bad = BadRow(
                row.where,
                f"expected token ids that are all trained, got {(name or LABELS)!r} that leaves some out; give texts "
                "or messages, or name it in ignored_fields of the dataset",
            )
        else:
            ids = ids.astype(np.int32)
            return Item(ids, item_key(new_hash(ids.tobytes())), 0)
        return Item(bad, key_of_bad(bad), 0)

    def split(self, item: Item[np.ndarray]) -> tuple[Item[np.ndarray], Item[np.ndarray]] | None:
        """Splits the ids into the first 95 % and the rest."""
        if isinstance(item.content, BadRow) or len(item.content) < 2:
            return None
        at = int(0.95 * len(item.content))
        return Item(item.content[:at], 0, 0), Item(item.content[at:], 0, 0)

    def units(self, item: Item[np.ndarray]) -> Iterable[Unit[np.ndarray]]:
        """Returns one unit with all ids."""
        return (Unit(item.content, 0, True),)

    def encode(self, units: list[np.ndarray | BadRow]) -> list[Example | BadRow]:
        """Returns each unit's ids as a document."""
        return [x if isinstance(x, BadRow) else Example(x, None) for x in units]


def _are_all_trained(labels: Any, ids: np.ndarray) -> bool:
    """Returns True if there are no labels, or they are the ids."""
    return not isinstance(labels, list | tuple | np.ndarray) or list(labels) == ids.tolist()
