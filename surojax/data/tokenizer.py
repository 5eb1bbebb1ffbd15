"""Converts text to token ids and back: plain bytes, or a Hugging Face `tokenizer.json`.

Bytes need no file and no training, encode any text without loss, and make losses comparable between models (bits per
byte), so the built-in examples use them. Published models have their own `tokenizer.json`. It is read with the
`tokenizers` library, which is imported only for that.

An encoder adds no special tokens: the code that builds a corpus appends one end-of-sequence token to each document. A
Hugging Face tokenizer encodes text that spells a special token ("<|endoftext|>") as that token, as its authors meant.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from surojax.errors import ConfigError

# Names of the end-of-document token in the published model families; pre-training names before chat names.
EOS_NAMES = (
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<eos>",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",
    "<|eos|>",
    "<|im_end|>",
    "<|eot_id|>",
)


class Tokenizer(Protocol):
    """What the data pipeline and sampling need from a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of embedding rows that this tokenizer needs: its largest id + 1."""
        ...

    @property
    def eos_id(self) -> int:
        """The token that ends a document; below `vocab_size`."""
        ...

    @property
    def name(self) -> str:
        """Identifies the mapping from text to ids; stored in checkpoints to detect another tokenizer."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, int32 [tokens], without special tokens added."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes every text, in order; in parallel if the tokenizer can."""
        ...

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Text of `ids` (any integers). Special tokens and ids outside the vocabulary are skipped."""
        ...


class ByteTokenizer:
    """Encodes each byte of the UTF-8 text as an id from 0 to 255; id 256 is the end of a document."""

    vocab_size: int = 257
    eos_id: int = 256
    bos_id: int | None = None
    stop_ids: tuple[int, ...] = (256,)
    name: str = "bytes"

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, int32 [bytes]. Raises UnicodeEncodeError (a ValueError) for lone surrogates."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes every text, in order."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Text of `ids`; invalid UTF-8 becomes U+FFFD.

        Ids of 256 and above are skipped: 256 is the end of a document, and a model whose vocabulary is padded to a
        round size can sample larger ids.
        """
        values = _to_array(ids)
        return values[(values >= 0) & (values < 256)].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """The tokenizer of a `tokenizer.json`, a file of every Hugging Face model folder.

    Raises ConfigError if the file is missing or is not a tokenizer, or if no end-of-sequence token is found.
    """

    def __init__(self, path: str | Path):
        import tokenizers  # imported here, so that byte-level runs neither need nor load it

        content = _read(Path(path))
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception for everything
            raise ConfigError(
                f"{path}: expected a Hugging Face tokenizer.json, got a file the tokenizers library cannot read "
                f"({_one_line(error)}); download the model's tokenizer.json again"
            ) from None
        # Some published files store the truncation and padding of their last use; truncation would silently drop text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = 1 + max(vocabulary.values(), default=0)
        self.eos_id: int = self._find_eos(vocabulary, path)
        self.name: str = f"tokenizer.json:{hashlib.sha256(content).hexdigest()[:16]}"

    def _find_eos(self, vocabulary: dict[str, int], path: str | Path) -> int:
        """Id of the first name of EOS_NAMES among the special tokens, or else in the vocabulary."""
        special = {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special}
        for names in (special, vocabulary):  # special tokens first, since an ordinary token may be spelled "</s>"
            for name in EOS_NAMES:
                if name in names:
                    return vocabulary[name]
        raise ConfigError(
            f"{path}: expected an end-of-sequence token named one of {', '.join(EOS_NAMES)}, got {len(vocabulary)} "
            "tokens without one; add it to the tokenizer (tokenizers: add_special_tokens) and save it again"
        )

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, int32 [tokens], without special tokens added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes every text, in order, on all CPU cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Text of `ids`. Special tokens and ids outside the vocabulary are skipped."""
        values = _to_array(ids)
        return self._tokenizer.decode(values[(values >= 0) & (values < self.vocab_size)].tolist())


def load_tokenizer(spec: str) -> Tokenizer:
    """Returns the tokenizer that `spec` names: "bytes", a tokenizer.json, or a folder that contains one.

    Raises ConfigError if there is no such tokenizer or its file cannot be used.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(os.path.expanduser(spec))
    expected = "expected 'bytes', the path of a tokenizer.json, or a folder that holds one"
    if not spec or not os.path.exists(path):
        raise ConfigError(f"tokenizer: {expected}, got {spec!r}, which does not exist; correct the path or use 'bytes'")
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.exists():
            raise ConfigError(
                f"tokenizer: {expected}, got the folder {spec!r} without that file; "
                "point to the model's folder, or save a fast tokenizer there (save_pretrained)"
            )
    elif path.suffix != ".json":
        raise ConfigError(
            f"tokenizer: {expected}, got {spec!r}; "
            "convert other formats (such as tokenizer.model) with transformers: AutoTokenizer(...).save_pretrained"
        )
    return HuggingFaceTokenizer(path)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: expected a readable tokenizer.json, got {error.strerror}; correct the path or its permissions"
        ) from None


def _to_array(ids: Iterable[int] | np.ndarray) -> np.ndarray:
    return np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64).reshape(-1)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
