"""The tokenizer of a GGUF file as the `tokenizer.json` that Hugging Face's libraries read.

GGUF stores tokens, merges and kinds of tokens, and names the rule by which text is split before the merges apply
(`tokenizer.ggml.pre`). The rules are those of the models' own tokenizer.json; only byte-level BPE is read.
"""

from pathlib import Path
from typing import Any

from surojax.data.tokenizer_files import TokenizerFiles
from surojax.errors import ConfigError
from surojax.untrusted import check_file

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# The rules for splitting, by the name in the file: "gpt2" is that of the tokenizers library itself, "digits" the same
# after every digit is split off, and the others are regular expressions.
RULES = {
    "default": "gpt2",
    "gpt-2": "gpt2",
    "smollm": "digits",
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
}
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens that text is searched for before it is split


def read_gguf_tokenizer(path: str | Path) -> TokenizerFiles:
    """The tokenizer of a GGUF file. Raises ConfigError if it is damaged, or of a kind that is not read."""
    metadata = _metadata(Path(path))
    kind = metadata.get("tokenizer.ggml.model")
    rule = metadata.get("tokenizer.ggml.pre", "default")
    change = "set tokenizer to the model's tokenizer.json"
    if kind != "gpt2":
        raise ConfigError(f"{path}: expected tokenizer.ggml.model 'gpt2' (byte-level BPE), got {kind!r}; {change}")
    if rule not in RULES:
        raise ConfigError(f"{path}: expected tokenizer.ggml.pre {', '.join(RULES)}, got {rule!r}; {change}")
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = metadata.get("tokenizer.ggml.merges") or []
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if not tokens or len(kinds) != len(tokens) or any(len(pair) != 2 for pair in pairs):
        raise ConfigError(f"{path}: expected tokens, their kinds and merges of two, got others; fetch the file again")

    def text_of(name: str) -> str:
        """The text of a token that the metadata names, "" if it names none."""
        id_ = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[id_] if id_ is not None and id_ < len(tokens) else ""

    bos = text_of("bos")
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", RULES[rule] == LLAMA3) is True
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
    )


def _metadata(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file that describes its tokenizer, by key. Raises ConfigError if it cannot be read."""
    import gguf  # imported here, as `tokenizers` is: other runs neither need nor load it

    try:
        check_file(path)
        fields = gguf.GGUFReader(path).fields
        return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
    except Exception as error:  # the library raises what a damaged file happens to cause
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{path}: expected a GGUF file, got another ({reason[:200]}); fetch it again") from None


def _tokenizer(tokens: list[str], kinds: list[int], merges: list[tuple], rule: str, starts_with: str) -> str:
    """The JSON text of a tokenizer. starts_with: the special token before every text, "" if there is none."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    vocabulary = {token: i for i, token in enumerate(tokens)}
    split = RULES[rule]
    model: Any = models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=split == LLAMA3)
    tokenizer = Tokenizer(model)
    if split == QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    if split == "gpt2":
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif split == "digits":
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        by_regex = pre_tokenizers.Split(Regex(split), behavior="isolated")
        steps = [by_regex, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
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
