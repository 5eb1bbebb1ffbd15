"""Converts text to token ids and back: plain bytes, or a Hugging Face `tokenizer.json`.

Bytes need no file and no training, encode any text without loss, and make losses comparable between models (bits per
byte), so the built-in examples use them. Published models have their own `tokenizer.json`. It is read with the
`tokenizers` library, which is imported only for that. The files beside it in a model's folder say which tokens begin
and end a document and how a conversation is written; a lone tokenizer.json does not, so there the names of its tokens
decide.

An encoder adds no special tokens: the code that builds documents does. A Hugging Face tokenizer encodes text that
spells a special token ("<|endoftext|>") as that token, as its authors meant.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from surojax.data.tokenizer_files import TokenizerFiles, one_line, read_folder, read_text
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
# Names of tokens with which a model ends its turn of a conversation, without ending the document.
END_OF_TURN_NAMES = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<turn|>")


class Tokenizer(Protocol):
    """The interface of a tokenizer for the data pipeline and sampling."""

    @property
    def vocab_size(self) -> int:
        """The number of embedding rows that this tokenizer needs: its largest id + 1."""
        ...

    @property
    def eos_id(self) -> int:
        """The token that ends a document; below `vocab_size`."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The token that begins a document, or None."""
        ...

    @property
    def adds_bos(self) -> bool:
        """True if documents of this tokenizer begin with `bos_id`."""
        ...

    @property
    def pad_id(self) -> int:
        """The token with which other programs pad a batch: the tokenizer's own, or `eos_id`."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end a sampled answer: `eos_id`, and the tokens that end a turn of a conversation."""
        ...

    @property
    def bos(self) -> str:
        """Text of `bos_id`, for chat templates; "": there is none."""
        ...

    @property
    def eos(self) -> str:
        """Text of `eos_id`, for chat templates."""
        ...

    @property
    def chat_template(self) -> str:
        """The Jinja template of the tokenizer's own conversations; "": there is none."""
        ...

    @property
    def named_templates(self) -> Mapping[str, str]:
        """Further Jinja templates of conversations, by name."""
        ...

    @property
    def name(self) -> str:
        """A name with a digest of the mapping from text to ids; checkpoints store it to detect another tokenizer."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, int32 [tokens], without special tokens added."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes every text, in order; in parallel if the tokenizer can."""
        ...

    def section_starts(self, text: str) -> list[int]:
        """Offsets at which `text` can be cut so that the parts' ids, concatenated, equal the ids of `text`."""
        ...

    def special_token_at(self, text: str, start: int) -> str:
        """The special token that `text` has at an offset; "" if there is none."""
        ...

    def token_text(self, token: int) -> str:
        """Text of one token, special ones included, for people to read."""
        ...

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Text of `ids` (any integers). Special tokens and ids outside the vocabulary are skipped."""
        ...


class ByteTokenizer:
    """Encodes each byte of the UTF-8 text as an id from 0 to 255; id 256 is the end of a document.

    Special tokens of a chat template are spelled out as bytes, `bos` and `eos` among them.
    """

    vocab_size: int = 257
    eos_id: int = 256
    bos_id: int | None = None
    adds_bos: bool = False
    pad_id: int = 256
    stop_ids: frozenset[int] = frozenset({256})
    bos: str = "<s>"
    eos: str = "</s>"
    chat_template: str = ""
    named_templates: Mapping[str, str] = MappingProxyType({})
    name: str = "bytes"

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, int32 [bytes]. Raises UnicodeEncodeError (a ValueError) for lone surrogates."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes every text, in order."""
        return [self.encode(text) for text in texts]

    def section_starts(self, text: str) -> list[int]:
        """Returns no offsets, since a text costs nothing to encode."""
        return []

    def special_token_at(self, text: str, start: int) -> str:
        """The text at an offset that spells `eos` or a token of END_OF_TURN_NAMES; "" if there is none."""
        return next((name for name in (self.eos, *END_OF_TURN_NAMES) if text.startswith(name, start)), "")

    def token_text(self, token: int) -> str:
        """The character of an ASCII byte, "\\x.." of another byte, "<end>" of the end of a document."""
        if token >= 256:
            return "<end>" if token == self.eos_id else ""
        return chr(token) if token < 128 else f"\\x{token:02x}"

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Text of `ids`; invalid UTF-8 becomes U+FFFD.

        Ids of 256 and above are skipped: 256 is the end of a document, and a model whose vocabulary is padded to a
        round size can sample larger ids.
        """
        values = _to_array(ids)
        return values[(values >= 0) & (values < 256)].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """The tokenizer of a `tokenizer.json` and the files beside it.

    source: where they come from, for messages.

    Raises ConfigError if the text is no tokenizer, a token that the files name is missing, or no end-of-sequence token
    is found.
    """

    def __init__(self, files: TokenizerFiles, source: str):
        import tokenizers  # imported here, so that byte-level runs neither need nor load it

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(files.tokenizer)
        except Exception as error:  # the library raises plain Exception for everything
            raise ConfigError(
                f"{source}: expected a Hugging Face tokenizer.json, got a file the tokenizers library cannot read "
                f"({one_line(error)}); download the model's tokenizer.json again"
            ) from None
        # Some published files store the truncation and padding of their last use; truncation would silently drop text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added_beside = _add(self._tokenizer, files, source)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: id for id, token in added.items() if token.special}
        ids = (token for token in files.stop_ids if 0 <= token < 2**32)  # what the library takes
        stops = [token for token in ids if self._tokenizer.id_to_token(token) is not None]

        self.vocab_size: int = 1 + max(vocabulary.values(), default=0)
        self.eos_id: int = _find_eos(files.eos, stops, special, vocabulary, source)
        self.eos: str = self._tokenizer.id_to_token(self.eos_id) or ""
        self.bos_id: int | None = _find(files.bos, "bos", vocabulary, source) if files.bos else None
        self.bos: str = files.bos
        self.adds_bos: bool = self.bos_id is not None and (
            self._tokenizer.encode("").ids[:1] == [self.bos_id] if files.adds_bos is None else files.adds_bos
        )
        pad_id = self._tokenizer.token_to_id(files.pad) if files.pad else None
        self.pad_id: int = self.eos_id if pad_id is None else pad_id
        ends_of_turn = [special[name] for name in END_OF_TURN_NAMES if name in special]
        self.stop_ids: frozenset[int] = frozenset([self.eos_id, *stops, *ends_of_turn])
        self.chat_template: str = files.chat_template
        self.named_templates: Mapping[str, str] = dict(files.named_templates)
        text = files.tokenizer + added_beside
        self.name: str = f"tokenizer.json:{hashlib.sha256(text.encode('utf-8')).hexdigest()[:16]}"
        # Text on the two sides of such a token is encoded separately. A token with `lstrip` takes spaces from its left.
        separate = [t.content for t in added.values() if not (t.lstrip or t.single_word or t.normalized)]
        longest_first = sorted(separate, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._special_texts = frozenset(special)

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, int32 [tokens], without special tokens added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes every text, in order, on all CPU cores. Raises UnicodeEncodeError as `ByteTokenizer.encode` does."""
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            for text in texts:
                text.encode("utf-8")
            raise
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def section_starts(self, text: str) -> list[int]:
        """Offsets of the special tokens in `text`; text before and after them is encoded separately."""
        return [match.start() for match in self._special.finditer(text)]

    def special_token_at(self, text: str, start: int) -> str:
        """The special token that `text` has at an offset; "" if there is none."""
        found = self._special.match(text, start)
        return found.group() if found and found.group() in self._special_texts else ""

    def token_text(self, token: int) -> str:
        """Text of one token, also of special tokens; part of a character is written as the tokenizer writes it."""
        raw = self._tokenizer.id_to_token(token) or ""
        if "▁" in raw:
            return raw.replace("▁", " ")  # decoding a first token leaves out its space
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return raw if "\ufffd" in text else text

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Text of `ids`. Special tokens and ids outside the vocabulary are skipped."""
        values = _to_array(ids)
        return self._tokenizer.decode(values[(values >= 0) & (values < self.vocab_size)].tolist())


def _add(tokenizer: Any, files: TokenizerFiles, source: str) -> str:
    """Adds the tokens that only the files beside a tokenizer.json have, as transformers does; returns them as a text.

    Raises ConfigError if one gets another id than the files say.
    """
    import tokenizers

    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    beside = [(id, fields) for id, fields in files.added if fields["content"] not in known]
    for id, fields in beside:
        tokenizer.add_tokens([tokenizers.AddedToken(**fields)])
        if (got := tokenizer.token_to_id(fields["content"])) != id:
            raise ConfigError(
                f"{source}: expected the token {fields['content']!r}, which tokenizer_config.json has as {id}, in "
                f"tokenizer.json, got none, and {got} as the next id; save the tokenizer again (save_pretrained)"
            )
    return repr(beside) if beside else ""


def _find(text: str, role: str, vocabulary: dict[str, int], source: str) -> int:
    if text not in vocabulary:
        raise ConfigError(
            f"{source}: expected the {role} token {text!r} in the tokenizer's vocabulary, got {len(vocabulary)} tokens "
            "without it; take tokenizer.json and tokenizer_config.json from the same model"
        )
    return vocabulary[text]


def _find_eos(text: str, stops: list[int], special: dict[str, int], vocabulary: dict[str, int], source: str) -> int:
    """Id of the token `text`; if "", the first of `stops`, else the id of the first known name in EOS_NAMES."""
    if text:
        return _find(text, "eos", vocabulary, source)
    if stops:
        return stops[0]
    for names in (special, vocabulary):  # special tokens first, since an ordinary token may be spelled "</s>"
        for name in EOS_NAMES:
            if name in names:
                return names[name]
    raise ConfigError(
        f"{source}: expected an end-of-sequence token named one of {', '.join(EOS_NAMES)}, got {len(vocabulary)} "
        "tokens without one; add it to the tokenizer (tokenizers: add_special_tokens) and save it again"
    )


def load_tokenizer(spec: str) -> Tokenizer:
    """Loads the tokenizer `spec`: "bytes", a model's folder, a lone tokenizer.json, or a GGUF file.

    Raises ConfigError if there is no such tokenizer or its files cannot be used.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(os.path.expanduser(spec))
    expected = "expected 'bytes', the path of a tokenizer.json or a .gguf file, or a folder with a tokenizer.json"
    if not spec or not os.path.exists(path):
        raise ConfigError(f"tokenizer: {expected}, got {spec!r}, which does not exist; correct the path or use 'bytes'")
    if path.is_dir():
        if not (path / "tokenizer.json").exists():
            raise ConfigError(
                f"tokenizer: {expected}, got the folder {spec!r} without that file; "
                "point to the model's folder, or save a fast tokenizer there (save_pretrained)"
            )
        return HuggingFaceTokenizer(read_folder(path), str(path / "tokenizer.json"))
    if path.suffix == ".gguf":
        from surojax.data import gguf_tokenizer  # imported here, since it needs the gguf library

        return HuggingFaceTokenizer(gguf_tokenizer.read_gguf_tokenizer(path), str(path))
    if path.suffix != ".json":
        raise ConfigError(
            f"tokenizer: {expected}, got {spec!r}; "
            "convert other formats (such as tokenizer.model) with transformers: AutoTokenizer(...).save_pretrained"
        )
    return HuggingFaceTokenizer(TokenizerFiles(read_text(path)), str(path))


def _to_array(ids: Iterable[int] | np.ndarray) -> np.ndarray:
    return np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64).reshape(-1)
