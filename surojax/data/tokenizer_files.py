"""Reads a tokenizer's files, before a tokenizer is built from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from surojax.errors import ConfigError
from surojax.untrusted import MiB, parse_json, read_bytes

DEFAULT = "default"  # the name of the chat template that is used if none is named
TEMPLATES = "additional_chat_templates"  # a folder of further ones
LARGEST = 256 * MiB  # of a file; a tokenizer.json with 262,144 tokens has 33 MB
ADDED = "added_tokens_decoder"
ADDED_FIELDS = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of a tokenizer's files.

    tokenizer: JSON text of a tokenizer.json. chat_template: Jinja text; "": none. named_templates: further ones by
    name. bos, eos: texts of the tokens that begin and end a document; pad: of that which fills up a batch; "": unknown.
    stop_ids: tokens that end a sampled answer, as far as they are known. adds_bos: whether documents begin with bos;
    None: the post-processor in `tokenizer` decides. added: (id, fields of an AddedToken) of tokens in the settings;
    `tokenizer` may have them too.
    """

    tokenizer: str
    chat_template: str = ""
    bos: str = ""
    eos: str = ""
    pad: str = ""
    stop_ids: tuple[int, ...] = ()
    adds_bos: bool | None = None
    named_templates: Mapping[str, str] = MappingProxyType({})
    added: tuple[tuple[int, dict[str, Any]], ...] = ()


def read_folder(folder: Path) -> TokenizerFiles:
    """Reads tokenizer.json and the optional files beside it."""
    settings = _read_json(folder / "tokenizer_config.json")
    in_map = _read_json(folder / "special_tokens_map.json")
    # transformers reads the map only if the settings do not list the added tokens, and then before the settings.
    settings = in_map | settings if ADDED in settings else settings | in_map
    stop_ids = []
    for name in ("config.json", "generation_config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        stop_ids += [id for id in (ids if isinstance(ids, list) else [ids]) if isinstance(id, int)]
    adds_bos = settings.get("add_bos_token")
    templates = _read_templates(folder, settings.get("chat_template"))
    return TokenizerFiles(
        read_text(folder / "tokenizer.json"),
        chat_template=templates.pop(DEFAULT, ""),
        named_templates=templates,
        bos=_token_text(settings.get("bos_token")),
        eos=_token_text(settings.get("eos_token")),
        pad=_token_text(settings.get("pad_token")),
        stop_ids=tuple(dict.fromkeys(stop_ids)),
        adds_bos=adds_bos if isinstance(adds_bos, bool) else None,
        added=_added(settings.get(ADDED), str(folder / "tokenizer_config.json")),
    )


def _added(tokens: Any, source: str) -> tuple[tuple[int, dict[str, Any]], ...]:
    """Reads `added_tokens_decoder`, in the order of the ids. source: for the message. Raises ConfigError."""
    if not tokens:
        return ()
    try:
        found = [(int(id), {key: token[key] for key in ADDED_FIELDS if key in token}) for id, token in tokens.items()]
        if not all(isinstance(token["content"], str) and token["content"] for _, token in found):
            raise ValueError("a token without content")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{source}: {ADDED}: expected tokens with content by their id, got others ({one_line(error)}); download it "
            "again"
        ) from None
    return tuple(sorted(found, key=lambda entry: entry[0]))


def _read_templates(folder: Path, in_settings: Any) -> dict[str, str]:
    """Reads the chat templates by name from files of their own, else from tokenizer_config.json, as transformers does.

    Without either, they are those of a processor's chat_template.json.
    """
    found = {}
    if (file := folder / "chat_template.jinja").exists():
        found[DEFAULT] = read_text(file)
    for file in sorted((folder / TEMPLATES).glob("*.jinja")):
        found[file.stem] = read_text(file)
    if DEFAULT in found:
        return found
    stored = _by_name(in_settings) or _by_name(_read_json(folder / "chat_template.json").get("chat_template"))
    return stored | found


def _by_name(templates: Any) -> dict[str, str]:
    """Returns chat templates by name: one alone is the default, several are a list of entries or an object."""
    if isinstance(templates, str):
        return {DEFAULT: templates} if templates else {}
    if isinstance(templates, list):
        entries = [entry for entry in templates if isinstance(entry, dict)]
        templates = {entry["name"]: entry.get("template") for entry in entries if isinstance(entry.get("name"), str)}
    if not isinstance(templates, dict):
        return {}
    return {name: text for name, text in templates.items() if isinstance(text, str) and text}


def _token_text(token: Any) -> str:
    """Returns a token's text from its entry in tokenizer_config.json: a string, an object with `content`, or null."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _read_json(path: Path) -> dict[str, Any]:
    """Reads a file's JSON object; {} if there is no such file."""
    if not path.exists():
        return {}
    try:
        content = parse_json(read_text(path))
    except ValueError as error:
        raise ConfigError(
            f"{path}: expected JSON, got a file that is none ({one_line(error)}); download it again"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, got a {type(content).__name__}; download it again")
    return content


def read_text(path: Path) -> str:
    try:
        return read_bytes(path, LARGEST).decode("utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: expected a readable {path.name}, got {error.strerror}; correct the path or its permissions"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: expected UTF-8 text, got the byte 0x{error.object[error.start]:02x} at byte offset "
            f"{error.start}; download the file again"
        ) from None


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
