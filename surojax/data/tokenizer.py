"""Text to token ids and back: plain bytes, or a Hugging Face `tokenizer.json`.

Bytes need no file and no training, lose nothing, and make losses comparable between models (bits per byte), so they
are what the built-in examples use. Real models bring their own `tokenizer.json`, read by the `tokenizers` library,
which is imported only then.

An encoder adds no special tokens by itself: who builds a corpus puts one end-of-sequence token after each document.
Text that spells a special token ("<|endoftext|>") becomes that token in a Hugging Face tokenizer, as its authors meant.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from surojax.errors import ConfigError

# End of a document, by the names the published model families give it; pre-training names before chat names.
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
        """Smallest size of an embedding table that covers every id this tokenizer can produce."""
        ...

    @property
    def eos_id(self) -> int:
        """The token that ends a document; below `vocab_size`."""
        ...

    @property
    def name(self) -> str:
        """Identity that is equal exactly when ids mean the same; stored with checkpoints."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, int32 [tokens], without special tokens added."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of every text, in order; in parallel where the tokenizer can."""
        ...

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Text of `ids` (any integers); special tokens and ids outside the vocabulary are left out."""
        ...


class ByteTokenizer:
    """The bytes of the UTF-8 encoding as ids 0..255, and 256 for the end of a document."""

    vocab_size: int = 257
    eos_id: int = 256
    name: str = "bytes"

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, int32 [bytes]. Raises UnicodeEncodeError (a ValueError) for lone surrogates."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of every text, in order."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Text of `ids`; broken UTF-8 becomes U+FFFD.

        Ids from 256 on are left out: 256 is the end of a document, and a model whose vocabulary is padded to a
        round size can sample larger ones.
        """
        values = _to_array(ids)
        return values[(values >= 0) & (values < 256)].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json` as every Hugging Face model folder holds one.

    Raises ConfigError when the file is missing or is no tokenizer, or when no end-of-sequence token is found.
    """

    def __init__(self, path: str | Path):
        import tokenizers  # here, so that runs on bytes neither need nor load it

        content = _read(Path(path))
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception for everything
            raise ConfigError(
                f"{path}: expected a Hugging Face tokenizer.json, got a file the tokenizers library cannot read "
                f"({_one_line(error)}); download the model's tokenizer.json again"
            ) from None
        # Some published files carry the truncation and padding of their last use, which would silently cut the corpus.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = 1 + max(vocabulary.values(), default=0)
        self.eos_id: int = self._find_eos(vocabulary, path)
        self.name: str = f"tokenizer.json:{hashlib.sha256(content).hexdigest()[:16]}"

    def _find_eos(self, vocabulary: dict[str, int], path: str | Path) -> int:
        special = {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special}
        for names in (special, vocabulary):  # an ordinary piece of text may look like "</s>": special tokens first
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
        """`encode` of every text, in order, on all CPU cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Text of `ids`; special tokens and ids outside the vocabulary are left out."""
        values = _to_array(ids)
        return self._tokenizer.decode(values[(values >= 0) & (values < self.vocab_size)].tolist())


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names: "bytes", a tokenizer.json, or a folder that holds one.

    Raises ConfigError when there is no such tokenizer or its file cannot be used.
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
