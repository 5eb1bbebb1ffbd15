"""Prints batches for people to read: each token with its document and its label.

Legend: S sequence.
"""

from collections.abc import Iterator

import numpy as np

from surojax.data.tokenizer import Tokenizer

_GREEN = "\x1b[32m"
_DIM = "\x1b[2m"
_PLAIN = "\x1b[0m"


def sample_table(
    inputs: np.ndarray, labels: np.ndarray, starts: np.ndarray | None, tokenizer: Tokenizer, color: bool
) -> Iterator[str]:
    """Yields a table's lines: for each row a heading and one line per token, as the model will see them.

    inputs, labels: integers [..., S], a label below 0 is ignored. starts: integers [..., S], the index at which the
    document of each token begins; None: each row is one document. color: green where the loss counts, dim elsewhere.
    What fills up a row is shown as padding, and is no document.
    """
    length = inputs.shape[-1]
    find_padding = _end_of_example if starts is None else _end_of_documents
    starts = np.zeros_like(inputs) if starts is None else starts
    rows = zip(inputs.reshape(-1, length), labels.reshape(-1, length), starts.reshape(-1, length), strict=True)
    for number, (inputs_S, labels_S, starts_S) in enumerate(rows):
        documents_S = np.cumsum(np.append(0, np.diff(starts_S) != 0))
        trained = np.count_nonzero(labels_S >= 0)
        end = find_padding(inputs_S, labels_S, starts_S)
        num_documents = len(np.unique(documents_S[:end]))
        padding = f", {length - end} padding" if end < length else ""
        yield f"row {number}: {num_documents} documents, {trained} of {length} tokens have a label{padding}"
        yield f"{'position':>8} {'document':>8} {'token':>7} {'text':<20} label"
        for index in range(length):
            label = int(labels_S[index])
            document = documents_S[index] if index < end else "-"
            text = _escaped(inputs_S[index], tokenizer) if index < end else "padding"
            line = f"{index - starts_S[index]:>8} {document:>8} {inputs_S[index]:>7} {text:<20} " + (
                f"{label} {_escaped(label, tokenizer)}" if label >= 0 else "ignored"
            )
            yield f"{_GREEN if label >= 0 else _DIM}{line}{_PLAIN}" if color else line


def _end_of_documents(inputs_S: np.ndarray, labels_S: np.ndarray, starts_S: np.ndarray) -> int:
    """Returns where the padding of a packed row begins: its last document, if it has only tokens 0 and no label."""
    last = slice(int(starts_S[-1]), None)
    return len(inputs_S) if inputs_S[last].any() or (labels_S[last] >= 0).any() else int(starts_S[-1])


def _end_of_example(inputs_S: np.ndarray, labels_S: np.ndarray, _starts_S: np.ndarray) -> int:
    """Returns where the padding of a row with one example begins: after its last token that is not 0 or is a label."""
    ends = np.append(np.flatnonzero(inputs_S) + 1, np.flatnonzero(labels_S >= 0) + 2)
    return min(int(ends.max(initial=0)), len(inputs_S))


def _escaped(token: int, tokenizer: Tokenizer) -> str:
    """Returns a token's text in quotes, with characters that a terminal would not show escaped."""
    return repr(tokenizer.token_text(int(token)))
