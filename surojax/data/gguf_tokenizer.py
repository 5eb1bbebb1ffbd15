"""Converts the tokenizer of a GGUF file to a Hugging Face `tokenizer.json`; back: gguf_tokenizer_export.py.

GGUF stores tokens, merges and kinds of tokens, and names the rule by which text is split before the merges apply
(`tokenizer.ggml.pre`). The rules are those of the models' own tokenizer.json. Files are of byte-level BPE ("gpt2"), or
of SentencePiece's (gguf_pieces.py), with scores in place of merges and a rule ("llama"), or with merges ("gemma4").
"""

from pathlib import Path
from typing import Any, NamedTuple

from surojax.data import gguf_pieces
from surojax.data.gguf_pieces import CONTROL, NORMAL, UNUSED, USER_DEFINED
from surojax.data.tokenizer_files import TokenizerFiles
from surojax.errors import ConfigError
from surojax.own_files import Optional, check_form
from surojax.untrusted import check_file


class Rule(NamedTuple):
    """How a tokenizer splits text before it merges bytes.

    steps: regular expressions, or "gpt2", that of the tokenizers library itself, or "digits", each digit alone; each
    step splits the pieces of the one before. composes: text is brought into the normal form NFC first. whole: a piece
    that is a token is one, whatever the merges say. begins: texts begin with BOS if the file does not say.
    """

    steps: tuple[str, ...]
    composes: bool = False
    whole: bool = False
    begins: bool = False


# The regular expressions of published files of tokenizer.json.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_ENDS}"
QWEN2 = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_ENDS}"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+X|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*X"
_O200K_ENDS = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_ENDS}"
O200K = _WORDS.replace("X", f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}" + _O200K_ENDS
TEKKEN = _WORDS.replace("X", "") + r"|\p{N}" + _O200K_ENDS
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    + _ENDS,
)
BYTE_LEVEL, OF_PIECES, OF_MERGED_PIECES = "gpt2", "llama", "gemma4"  # values of tokenizer.ggml.model
FILLER = "[PAD{}]"  # the text of a row of the embedding that is no token, by its id; of kind UNUSED
NAMED = "tokenizer.chat_template."  # before the names of further chat templates, in keys
_ID = Optional(range(2**32))
# Types of the metadata's values that are read, see own_files.py.
FORM = {
    "tokenizer.chat_template": Optional(str),
    "tokenizer.ggml.model": Optional(str),
    "tokenizer.ggml.pre": Optional(str),
    "tokenizer.ggml.tokens": Optional([str]),
    "tokenizer.ggml.token_type": Optional([int]),
    "tokenizer.ggml.merges": Optional([str]),
    "tokenizer.ggml.scores": Optional([float]),
    "tokenizer.ggml.add_bos_token": Optional(bool),
    "tokenizer.ggml.add_eos_token": Optional(bool),
    "tokenizer.ggml.add_space_prefix": Optional(bool),
    **{f"tokenizer.ggml.{name}_token_id": _ID for name in ("bos", "eos", "eot", "eom")},
}
# By the name in files.
GPT2, LLAMA3 = Rule(("gpt2",)), Rule((CL100K,), whole=True, begins=True)
RULES = {
    "default": GPT2,
    "gpt-2": GPT2,
    "smollm": Rule(("digits", "gpt2")),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "lfm2": LLAMA3,
    "dbrx": Rule((CL100K,)),
    "glm4": Rule((CL100K,)),
    "chatglm-bpe": Rule((CL100K,)),
    "qwen2": Rule((QWEN2,), composes=True),
    "deepseek-r1-qwen": Rule((QWEN2,), composes=True),
    "qwen35": Rule((QWEN35,), composes=True),
    "gpt-4o": Rule((O200K,)),
    "tekken": Rule((TEKKEN,), whole=True),
    "deepseek-v3": Rule(DEEPSEEK3),
}


def read_gguf_tokenizer(path: str | Path) -> TokenizerFiles:
    """Reads the tokenizer of a GGUF file. Raises ConfigError if it is damaged, or of a kind that is not read."""
    metadata = _metadata(Path(path))
    kind = metadata.get("tokenizer.ggml.model")
    rule = metadata.get("tokenizer.ggml.pre", "default")
    change = "set tokenizer to the model's tokenizer.json"
    if kind not in (BYTE_LEVEL, OF_PIECES, OF_MERGED_PIECES):
        expected = f"{BYTE_LEVEL!r} (byte-level BPE), {OF_PIECES!r} or {OF_MERGED_PIECES!r} (SentencePiece's)"
        raise ConfigError(f"{path}: expected tokenizer.ggml.model {expected}, got {kind!r}; {change}")
    if metadata.get("tokenizer.ggml.add_eos_token"):
        raise ConfigError(
            f"{path}: expected tokenizer.ggml.add_eos_token false, got true: texts do not end with a token here unless "
            f"they are documents; {change}"
        )
    if kind == BYTE_LEVEL and rule not in RULES:
        raise ConfigError(f"{path}: expected tokenizer.ggml.pre {', '.join(RULES)}, got {rule!r}; {change}")
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    kinds = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    merges = metadata.get("tokenizer.ggml.merges") or []
    pairs = [tuple(merge.split(" ")) for merge in merges]
    scores = metadata.get("tokenizer.ggml.scores") or []
    counts = {len(kinds)} | ({len(scores)} if kind == OF_PIECES else set())
    if not tokens or counts != {len(tokens)} or any(len(pair) != 2 for pair in pairs):
        needed = "scores" if kind == OF_PIECES else "merges of two"
        raise ConfigError(f"{path}: expected tokens, their kinds and {needed}, got others; fetch the file again")
    size = len(tokens)
    while size and kinds[size - 1] == UNUSED and tokens[size - 1] == FILLER.format(size - 1):
        size -= 1
    tokens, kinds, scores = tokens[:size], kinds[:size], scores[:size]

    def text_of(name: str) -> str:
        """Returns the text of a special token that the metadata names; "" if there is none."""
        id_ = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[id_] if id_ is not None and id_ < len(tokens) else ""

    bos = text_of("bos")
    begins = RULES[rule].begins if kind == BYTE_LEVEL else True
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", begins) is True
    starts_with = bos if adds_bos else ""
    try:
        if kind == OF_PIECES:
            prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
            of_scores = gguf_pieces.merges_of(tokens, scores, kinds)
            made = gguf_pieces.piece_tokenizer(tokens, of_scores, kinds, prefix=prefix)
        elif kind == OF_MERGED_PIECES:
            made = gguf_pieces.piece_tokenizer(tokens, pairs, kinds, prefix=False)
        else:
            made = byte_level(tokens, pairs, rule)
        tokenizer = _with_added(made, tokens, kinds, starts_with)
    except Exception as error:  # the library raises plain Exception for everything
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}: expected a tokenizer, got one that is inconsistent ({reason}); {change}") from None
    stops = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return TokenizerFiles(
        tokenizer,
        chat_template=metadata.get("tokenizer.chat_template", ""),
        bos=bos,
        eos=text_of("eos"),
        stop_ids=tuple(dict.fromkeys(stop for stop in stops if stop is not None)),
        adds_bos=adds_bos,
        named_templates={key.removeprefix(NAMED): text for key, text in metadata.items() if key.startswith(NAMED)},
    )


def _metadata(path: Path) -> dict[str, Any]:
    """Reads the metadata of a GGUF file that describes its tokenizer, by key.

    Raises ConfigError if it cannot be read.
    """
    import gguf  # imported here, as `tokenizers` is: other runs neither need nor load it

    try:
        check_file(path)
        fields = gguf.GGUFReader(path).fields
        metadata = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
        check_form(metadata, FORM | {key: str for key in metadata if key.startswith(NAMED)})
        return metadata
    except Exception as error:  # the library raises what a damaged file happens to cause
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{path}: expected a GGUF file, got another ({reason[:200]}); fetch it again") from None


def byte_level(tokens: list[str], merges: list[tuple], rule: str) -> Any:
    """Makes a `tokenizers.Tokenizer` of byte-level BPE without added tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(tokens)}
    steps, composes, whole, _ = RULES[rule]
    model: Any = models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=whole)
    tokenizer = Tokenizer(model)
    if composes:
        tokenizer.normalizer = normalizers.NFC()
    known: dict[str, Any] = {
        "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "digits": pre_tokenizers.Digits(individual_digits=True),
    }
    splits = [known.get(step) or pre_tokenizers.Split(Regex(step), behavior="isolated") for step in steps]
    if "gpt2" not in steps:
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _with_added(tokenizer: Any, tokens: list[str], kinds: list[int], starts_with: str) -> str:
    """Adds the tokens that text is searched for, and makes the text of a tokenizer.json.

    starts_with: the special token before every text, "" if there is none.
    """
    from tokenizers import AddedToken, processors

    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in _of_kind(CONTROL, tokens, kinds)])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in _of_kind(USER_DEFINED, tokens, kinds)])
    if starts_with:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{starts_with} $A",
            pair=f"{starts_with} $A {starts_with}:1 $B:1",
            special_tokens=[(starts_with, tokens.index(starts_with))],
        )
    return tokenizer.to_str()


def _of_kind(kind: int, tokens: list[str], kinds: list[int]) -> list[str]:
    return [token for token, token_kind in zip(tokens, kinds, strict=True) if token_kind == kind]
