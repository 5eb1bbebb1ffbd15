"""The tokenizers of Llama 2, Mistral and Gemma in GGUF files: SentencePiece's BPE, with bytes for unknown characters.

GGUF files have a score for each piece: pieces with greater scores are merged earlier. A tokenizer.json has merges:
every pair of pieces that makes another piece, in the order of that piece's score. Each follows from the other if the
tokenizer.json has all such pairs (`merges_of`). Spaces are written as "▁". llama.cpp puts a space before each text and
behind each special token, or adds none; in a tokenizer.json each of these is a normalizer.

Gemma 4's files ("gemma4") have the merges themselves, and never a space before a text. llama.cpp merges no newline with
anything but newlines there, and takes several of them for one token if there is one.
"""

import itertools
from typing import Any

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of tokens
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, _REPLACE]}
# It splits nothing, since the normalizer has replaced all spaces.
_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


def byte_token(byte: int) -> str:
    """The token of a byte of a character that has no token."""
    return f"<0x{byte:02X}>"


BYTES = frozenset(map(byte_token, range(256)))


def is_of_pieces(content: dict[str, Any]) -> bool:
    """True if a tokenizer.json is SentencePiece's BPE."""
    return content["model"]["type"] == "BPE" and bool(content["model"]["byte_fallback"])


def has_prefix(content: dict[str, Any]) -> bool | None:
    """Returns whether a space is put before each text of a tokenizer.json; None: in another way than llama.cpp does."""
    normalizer, pre = content["normalizer"], content["pre_tokenizer"]
    if normalizer is None and pre and pre["type"] == "Metaspace" and pre["replacement"] == SPACE and not pre["split"]:
        return {"always": True, "never": False}.get(pre["prepend_scheme"])
    if pre not in (None, _SPLIT):
        return None
    return True if normalizer == _PREPEND else False if normalizer == _REPLACE else None


def merges_of(tokens: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Makes the merges of a tokenizer.json: all pairs that make a token, by descending score, then by their ids."""
    ids = {token: i for i, token in enumerate(tokens) if kinds[i] == NORMAL}
    pairs = []
    for token, i in ids.items():
        halves = ((token[:k], token[k:]) for k in range(1, len(token)))
        of_token = [(ids[left], ids[right]) for left, right in halves if left in ids and right in ids]
        pairs += [(-scores[i], *pair) for pair in of_token]
    pairs.sort()
    return [(tokens[left], tokens[right]) for _, left, right in pairs]


def by_token(merges: list[tuple[str, str]]) -> list[tuple[str, set[tuple[str, str]]]]:
    """Groups adjacent merges by the token that they make. Within a group their order does not count."""
    groups = itertools.groupby(merges, key="".join)
    return [(token, set(pairs)) for token, pairs in groups]


def scores_of(tokens: list[str], merges: list[tuple[str, str]]) -> list[float]:
    """Makes a score for each token: the earlier a merge makes it, the greater; tokens that no merge makes come last."""
    found: dict[str, float] = {}
    for left, right in merges:
        found.setdefault(left + right, -float(len(found)))
    return [found.get(token, -float(len(found) + i)) for i, token in enumerate(tokens)]


def keeps_newlines_apart(tokenizer: Any, merges: list[tuple[str, str]]) -> bool:
    """True if a `tokenizers.Tokenizer` has newlines in tokens as llama.cpp has them in files with merges."""
    mixed = any("\n" in left + right and (left + right).strip("\n") for left, right in merges)
    lines = [token for token in tokenizer.get_vocab() if token and not token.strip("\n")]
    return not mixed and all(len(tokenizer.encode(token, add_special_tokens=False).ids) == 1 for token in lines)


def piece_tokenizer(tokens: list[str], merges: list[tuple[str, str]], kinds: list[int], *, prefix: bool) -> Any:
    """Makes a `tokenizers.Tokenizer` without added tokens. prefix: a space is put before each text."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=list(merges), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    replace: Any = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    parts: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return tokenizer
