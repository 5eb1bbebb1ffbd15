"""The chat template that a model was trained with, and the tokens that end its answers, in the small files of a folder.

transformers, vLLM, llama.cpp and surojax itself format conversations as these files say, and stop at
`generation_config.json`'s tokens. So an export has the trained template in place of all that came with the tokenizer.
"""

import copy
import json
from collections.abc import Collection
from typing import Any

from surojax.data.data_rows import NotARow
from surojax.data.templates import Template, load_template
from surojax.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from surojax.data.tokenizer_files import TEMPLATES, one_line
from surojax.errors import ConfigError
from surojax.untrusted import parse_json

TEMPLATE = "chat_template.jinja"
NAMED_TEMPLATES = f"{TEMPLATES}/"  # a path in the folder of templates for conversations with tools, for example
IN_PROCESSOR = "chat_template.json"  # where older versions of transformers have it
TOKENIZER_CONFIG = "tokenizer_config.json"
_QUESTION, _ANSWER = "Question?", "Answer!"
_TURNS = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]


def turn_ends(template: Template | None, tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens with which a template ends an answer, the last one's first; [] if there are none.

    An answer may end in two ways: as the last turn, and where another turn begins. A text that is no token of its own
    ends none: after it comes the end of the document.
    """
    if template is None:
        return []
    ends = []
    for turns in (_TURNS, [*_TURNS, _TURNS[0]]):
        try:
            _, shown, after = template.render(turns).rpartition(_ANSWER)
        except (NotARow, ConfigError):
            continue
        starts = tokenizer.section_starts(after) if shown else []
        tokens = [int(tokenizer.encode(after[start:])[0]) for start in starts]
        ends += [token for token in tokens if tokenizer.token_text(token).strip()][:1]
    return list(dict.fromkeys(ends))


def own_turn_ends(tokenizer: Tokenizer) -> list[int]:
    """Returns the `turn_ends` of a tokenizer's own template; [] if that cannot be used."""
    try:
        return turn_ends(load_template("", tokenizer), tokenizer)
    except ConfigError:
        return []


def stopping_at_turn_ends(tokenizer: Tokenizer, template: Template | None) -> Tokenizer:
    """Returns the tokenizer with a template's `turn_ends` among its `stop_ids`."""
    ends = turn_ends(template, tokenizer)
    if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.stop_ids.issuperset(ends):
        return tokenizer
    stopping = copy.copy(tokenizer)
    stopping.stop_ids = tokenizer.stop_ids.union(ends)
    return stopping


def with_template(files: dict[str, bytes], template: str) -> dict[str, bytes]:
    """Returns a folder's small files with this chat template in place of all others.

    Raises ConfigError if tokenizer_config.json is no JSON object.
    """
    kept = {
        name: content
        for name, content in files.items()
        if name != IN_PROCESSOR and not name.startswith(NAMED_TEMPLATES)
    }
    if TOKENIZER_CONFIG in kept:  # where versions of transformers before 4.51 read it
        kept[TOKENIZER_CONFIG] = _encoded(_settings(kept[TOKENIZER_CONFIG]) | {"chat_template": template})
    return kept | {TEMPLATE: template.encode()}


def generation_config(source: dict[str, Any], config: dict[str, Any], ends: Collection[int]) -> dict[str, Any]:
    """Makes generation_config.json, in which all of a model's stop tokens are `eos_token_id`.

    source: that of the source model; {}: it has none. config: config.json, which says tokens that the former does not,
    as transformers reads it. ends: tokens that end an answer.
    """
    tokens = {name: config[name] for name in ("bos_token_id", "pad_token_id") if config.get(name) is not None}
    stops = list(dict.fromkeys([*_listed(source.get("eos_token_id")), *_listed(config.get("eos_token_id")), *ends]))
    said = {"eos_token_id": stops[0] if len(stops) == 1 else stops} if stops else {}
    return (source or tokens) | said


def _settings(content: bytes) -> dict[str, Any]:
    try:
        said = parse_json(content.decode())
        if not isinstance(said, dict):
            raise ValueError(f"got a {type(said).__name__}")
    except ValueError as error:
        raise ConfigError(
            f"{TOKENIZER_CONFIG}: expected a JSON object, got a file that is none ({one_line(error)}); download "
            "it again"
        ) from None
    return said


def _listed(ids: Any) -> list[int]:
    """Returns an entry of token ids, which may be one id, several or none, as a list."""
    return [id_ for id_ in (ids if isinstance(ids, list) else [ids]) if type(id_) is int]


def _encoded(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
