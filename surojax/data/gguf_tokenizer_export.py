"""Makes the metadata of a GGUF file's tokenizer from a Hugging Face `tokenizer.json`; gguf_tokenizer.py reads it."""

import json
from typing import Any

from surojax.data import gguf_pieces
from surojax.data.chat_files import own_turn_ends
from surojax.data.gguf_pieces import CONTROL, NORMAL, UNUSED, USER_DEFINED
from surojax.data.gguf_tokenizer import BYTE_LEVEL, FILLER, OF_MERGED_PIECES, OF_PIECES, byte_level
from surojax.data.tokenizer import Tokenizer
from surojax.errors import ConfigError

# The names that files get: of several with one rule, one that llama.cpp's own converter writes.
WRITTEN = ("smollm", "llama-bpe", "dbrx", "qwen2", "qwen35", "gpt-4o", "tekken", "deepseek-v3", "gpt-2")
FOLDER = "export a folder, which llama.cpp's convert_hf_to_gguf.py may convert"


def tokenizer_metadata(tokenizer: Tokenizer, text: str, source: str, size: int) -> dict[str, Any]:
    """Makes the metadata from which `read_gguf_tokenizer` reads this tokenizer.

    text: its tokenizer.json. source: where that comes from, for messages. size: rows of the model's embedding, which
    has so many tokens in a file. Of several stop tokens, those with which the chat template ends an answer come first.

    Raises ConfigError for a tokenizer that is neither byte-level BPE nor SentencePiece's, that splits text by a rule
    without a name, or whose merges do not follow from scores.
    """
    from tokenizers import Tokenizer as Library

    library = Library.from_str(text)
    content = json.loads(library.to_str())  # with every field of the library's version
    _check_added(content, source)
    added = {token["id"]: token for token in content["added_tokens"]}
    texts = {id_: text for text, id_ in content["model"]["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    kinds = {i: CONTROL if token["special"] else USER_DEFINED for i, token in added.items()}
    tokens = [texts.get(i, FILLER.format(i)) for i in range(size)]
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
    types = [kinds.get(i, NORMAL) if i in texts else UNUSED for i in range(size)]
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
    if gguf_pieces.is_of_pieces(content):
        own = _pieces(library, content, tokens, types, pairs, source)
        ids |= {"unknown": content["model"]["vocab"].get(content["model"]["unk_token"])}
    else:
        rule = _rule(content, source)
        own = {"model": BYTE_LEVEL, "pre": rule, "token_type": types, "merges": [" ".join(pair) for pair in pairs]}
    metadata = own | {"tokens": tokens, "add_bos_token": tokenizer.adds_bos}
    metadata |= {f"{name}_token_id": id_ for name, id_ in ids.items() if id_ is not None}
    template = {"tokenizer.chat_template": tokenizer.chat_template} if tokenizer.chat_template else {}
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()} | template


def _check_added(content: dict[str, Any], source: str) -> None:
    """Raises ConfigError for another model than BPE, and for added tokens that no file describes."""
    if content["model"]["type"] != "BPE":
        raise ConfigError(
            f"{source}: expected BPE, byte-level or SentencePiece's, for a .gguf file, got {content['model']['type']}; "
            f"{FOLDER}"
        )
    for token in content["added_tokens"]:
        for flag in ("single_word", "lstrip", "rstrip"):
            if token[flag]:
                raise ConfigError(
                    f"{source}: expected added tokens without {flag}, which a .gguf file does not say, got "
                    f"{token['content']!r}; {FOLDER}"
                )


def _pieces(
    library: Any, content: dict[str, Any], tokens: list[str], types: list[int], merges: list[tuple], source: str
) -> dict[str, Any]:
    """Makes the metadata of SentencePiece's BPE: scores if the merges follow from them, else the merges.

    library: `tokenizers.Tokenizer` of this content. Raises ConfigError if llama.cpp would make other tokens.
    """
    unknown = content["model"]["unk_token"]
    kinds = [
        gguf_pieces.UNKNOWN
        if token == unknown
        else gguf_pieces.BYTE
        if token in gguf_pieces.BYTES and kind == NORMAL
        else kind
        for token, kind in zip(tokens, types, strict=True)
    ]
    prefix = gguf_pieces.has_prefix(content)
    if prefix is None:
        raise ConfigError(
            f"{source}: expected a space before each text and each special token's next, or none, as llama.cpp has it, "
            f"got another rule; {FOLDER}"
        )
    normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind == NORMAL}
    used = [pair for pair in merges if "".join(pair) in normal]  # text is searched for others before it is split
    scores = gguf_pieces.scores_of(tokens, used)
    follows = gguf_pieces.by_token(gguf_pieces.merges_of(tokens, scores, kinds)) == gguf_pieces.by_token(used)
    has_bytes = gguf_pieces.BYTE in kinds
    if has_bytes and not follows and not prefix and gguf_pieces.keeps_newlines_apart(library, merges):
        said = {"model": OF_MERGED_PIECES, "token_type": kinds, "merges": [" ".join(pair) for pair in merges]}
        return said | {"add_space_prefix": False}
    if not follows or not has_bytes:
        raise ConfigError(
            f"{source}: expected merges that follow from scores of the tokens, and a token for each byte, got others; "
            f"{FOLDER}"
        )
    said = {"model": OF_PIECES, "pre": "default", "token_type": kinds, "scores": scores}
    return said | {"add_space_prefix": prefix}


def _rule(content: dict[str, Any], source: str) -> str:
    """Returns llama.cpp's name of the rule by which a tokenizer.json splits text. Raises ConfigError if it has none."""
    said = _splitting(content)
    for rule in WRITTEN:
        if said == _splitting(json.loads(byte_level(["a"], [], rule).to_str())):
            return rule
    raise ConfigError(
        f"{source}: expected a tokenizer that splits text as {', '.join(WRITTEN)} of llama.cpp, got another; {FOLDER}"
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
