"""Converts the tokenizer of a GGUF file to a Hugging Face `tokenizer.json`, and back.

GGUF stores tokens, merges and kinds of tokens, and names the rule by which text is split before the merges apply
(`tokenizer.ggml.pre`). The rules are those of the models' own tokenizer.json; only byte-level BPE is read.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from surojax.data.chat_files import own_turn_ends
from surojax.data.tokenizer import Tokenizer
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
    "tokenizer.ggml.add_bos_token": Optional(bool),
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
# The names that files get: of several with one rule, one that llama.cpp's own converter writes.
WRITTEN = ("smollm", "llama-bpe", "dbrx", "qwen2", "qwen35", "gpt-4o", "tekken", "deepseek-v3", "gpt-2")
NORMAL, UNUSED = 1, 5  # kinds of tokens: those of the merges, and rows of the embedding that no text has
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens that text is searched for before it is split


def read_gguf_tokenizer(path: str | Path) -> TokenizerFiles:
    """Reads the tokenizer of a GGUF file. Raises ConfigError if it is damaged, or of a kind that is not read."""
    metadata = _metadata(Path(path))
    kind = metadata.get("tokenizer.ggml.model")
    rule = metadata.get("tokenizer.ggml.pre", "default")
    change = "set tokenizer to the model's tokenizer.json"
    if kind != "gpt2":
        raise ConfigError(f"{path}: expected tokenizer.ggml.model 'gpt2' (byte-level BPE), got {kind!r}; {change}")
    if rule not in RULES:
        raise ConfigError(f"{path}: expected tokenizer.ggml.pre {', '.join(RULES)}, got {rule!r}; {change}")
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    kinds = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    merges = metadata.get("tokenizer.ggml.merges") or []
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if not tokens or len(kinds) != len(tokens) or any(len(pair) != 2 for pair in pairs):
        raise ConfigError(f"{path}: expected tokens, their kinds and merges of two, got others; fetch the file again")

    def text_of(name: str) -> str:
        """Returns the text of a special token that the metadata names; "" if there is none."""
        id_ = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[id_] if id_ is not None and id_ < len(tokens) else ""

    bos = text_of("bos")
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", RULES[rule].begins) is True
    starts_with = bos if adds_bos else ""
    try:
        tokenizer = _tokenizer(tokens, kinds, pairs, rule, starts_with)
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


def _tokenizer(tokens: list[str], kinds: list[int], merges: list[tuple], rule: str, starts_with: str) -> str:
    """Makes the text of a tokenizer.json. starts_with: the special token before every text, "" if there is none."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

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
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in _of_kind(CONTROL, tokens, kinds)])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in _of_kind(USER_DEFINED, tokens, kinds)])
    if starts_with:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{starts_with} $A",
            pair=f"{starts_with} $A {starts_with}:1 $B:1",
            special_tokens=[(starts_with, vocabulary[starts_with])],
        )
    return tokenizer.to_str()


def _of_kind(kind: int, tokens: list[str], kinds: list[int]) -> list[str]:
    return [token for token, token_kind in zip(tokens, kinds, strict=True) if token_kind == kind]


# -- The other way ----------------------------------------------------------------------------------------------------


def tokenizer_metadata(tokenizer: Tokenizer, text: str, source: str, size: int) -> dict[str, Any]:
    """Makes the metadata from which `read_gguf_tokenizer` reads this tokenizer.

    text: its tokenizer.json. source: where that comes from, for messages. size: rows of the model's embedding, which
    has so many tokens in a file. Of several stop tokens, those with which the chat template ends an answer come first.

    Raises ConfigError for a tokenizer that is not byte-level BPE, or that splits text by a rule without a name.
    """
    from tokenizers import Tokenizer as Library

    content = json.loads(Library.from_str(text).to_str())  # with every field of the library's version
    rule = _rule(content, source)
    added = {token["id"]: token for token in content["added_tokens"]}
    texts = {id_: text for text, id_ in content["model"]["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    kinds = {i: CONTROL if token["special"] else USER_DEFINED for i, token in added.items()}
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(size)]
    merges = content["model"]["merges"]
    if not merges or tokenizer.vocab_size > size:
        raise ConfigError(
            f"{source}: expected a tokenizer with merges and at most {size} tokens for a .gguf file, got {len(merges)} "
            f"and {tokenizer.vocab_size}; set tokenizer to the model's tokenizer.json"
        )
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    others = [id_ for id_ in own_turn_ends(tokenizer) if id_ != tokenizer.eos_id]
    others += sorted(tokenizer.stop_ids - {tokenizer.eos_id, *others})
    ids |= dict(zip(("eot", "eom"), others, strict=False))
    metadata = {
        "model": "gpt2",
        "pre": rule,
        "tokens": tokens,
        "token_type": [kinds.get(i, NORMAL) if i in texts else UNUSED for i in range(size)],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "add_bos_token": tokenizer.adds_bos,
    } | {f"{name}_token_id": id_ for name, id_ in ids.items() if id_ is not None}
    template = {"tokenizer.chat_template": tokenizer.chat_template} if tokenizer.chat_template else {}
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()} | template


def _rule(content: dict[str, Any], source: str) -> str:
    """Returns llama.cpp's name of the rule by which a tokenizer.json splits text. Raises ConfigError if it has none."""
    change = "export a folder, which llama.cpp's convert_hf_to_gguf.py may convert"
    if content["model"]["type"] != "BPE":
        raise ConfigError(
            f"{source}: expected byte-level BPE for a .gguf file, got {content['model']['type']}; {change}"
        )
    for token in content["added_tokens"]:
        for flag in ("single_word", "lstrip", "rstrip"):
            if token[flag]:
                raise ConfigError(
                    f"{source}: expected added tokens without {flag}, which a .gguf file does not say, got "
                    f"{token['content']!r}; {change}"
                )
    said = _splitting(content)
    for rule in WRITTEN:
        if said == _splitting(json.loads(_tokenizer(["a"], [NORMAL], [], rule, ""))):
            return rule
    raise ConfigError(
        f"{source}: expected a tokenizer that splits text as {', '.join(WRITTEN)} of llama.cpp, got another; {change}"
    )


def _splitting(content: dict[str, Any]) -> dict[str, Any]:
    """Selects the parts of a tokenizer.json that decide how text is split, except tokens and merges."""
    pre = content["pre_tokenizer"] or {}
    steps = pre["pretokenizers"] if pre.get("type") == "Sequence" else [pre]
    options = "dropout continuing_subword_prefix end_of_word_suffix byte_fallback ignore_merges".split()
    return {
        "normalizer": content["normalizer"],
        # trim_offsets is of where tokens were in the text, not of which they are.
        "steps": [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps],
        "decoder": (content["decoder"] or {}).get("type"),
        "model": {option: content["model"][option] or None for option in options},
    }
