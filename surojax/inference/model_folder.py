"""Makes the small files of a trained model's folder: config.json, tokenizer, chat template, generation config."""

import tempfile
from pathlib import Path
from typing import Any

from surojax.config import checks
from surojax.config.fields import Config
from surojax.data import chat_files, gguf_tokenizer
from surojax.data.chat_files import NAMED_TEMPLATES, TEMPLATE, TOKENIZER_CONFIG
from surojax.data.templates import load_template
from surojax.data.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from surojax.data.tokenizer_files import read_folder, read_text
from surojax.errors import ConfigError
from surojax.exchange import config_json, small_files
from surojax.exchange.export import encoded
from surojax.exchange.gguf_file import is_gguf, open_file
from surojax.exchange.gguf_metadata import metadata_config
from surojax.exchange.huggingface import labels_of, read_config
from surojax.exchange.small_files import CONFIG, GENERATION, LICENSES, PROCESSORS, Files
from surojax.exchange.sources import locate, run_config_json
from surojax.untrusted import expanded, parse_json


def folder_files(c: Config, *, is_trained: bool = True) -> tuple[dict[str, Any], Files]:
    """Makes (config.json, the other small files) for a model with a resolved config's `model` fields and tokenizer.

    They are those of the model at `model_path`, if it says the same, else they are made. A trained model has the chat
    template that it was trained with, and stops at the tokens with which that ends an answer; another one keeps the
    source's files as they are. Raises ConfigError if the model is of no family of Hugging Face, if the tokenizer
    cannot be read or has more ids than the model, and if there is no such template.
    """
    fields = c.model.to_dict()
    tokenizer = load_tokenizer(c.tokenizer)
    # transformers scores the last token that is no padding; a model that classifies already says what that is.
    padding = {"pad_token_id": tokenizer.pad_id} if c.model.num_labels else {}
    if c.tokenizer != "bytes":  # which is also said by a model without a tokenizer
        checks.check_vocabulary(c, tokenizer.vocab_size, tokenizer.name)
    files = tokenizer_files(c.tokenizer)
    config = None
    tokens: dict[str, Any] = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    positions = c.sequence_len
    if c.model_path:
        source = locate(c.model_path, weights=False)
        if is_gguf(source):
            said = metadata_config(open_file(source))
            tokens = {key: said[key] for key in ("bos_token_id", "eos_token_id")}
            positions = said["max_position_embeddings"]
            files |= {GENERATION: encoded({key: id_ for key, id_ in tokens.items() if id_ is not None})}
        else:
            source_config = run_config_json(c, read_config(source))
            if config_json.agrees(source_config, fields):
                is_classifier = labels_of(read_config(source))
                config = {**padding, **source_config} if is_classifier else source_config | padding
                files |= small_files.read_small_files(source, (GENERATION, *LICENSES, *PROCESSORS))
    config = config or config_json.made(fields, positions, tokens | padding)
    return config, trained_files(c, config, files, tokenizer) if is_trained else files


def trained_files(c: Config, config: dict[str, Any], files: Files, tokenizer: Tokenizer) -> Files:
    """Returns a run's small files with its chat template, and with the stop tokens of that in generation_config.json.

    Raises ConfigError if there is no template of this name.
    """
    if not c.chat_template:
        return with_stops(files, config, chat_files.own_turn_ends(tokenizer))
    template = load_template(c.chat_template, tokenizer)
    assert template is not None
    return with_stops(chat_files.with_template(files, template.text), config, chat_files.turn_ends(template, tokenizer))


def with_stops(files: Files, config: dict[str, Any], ends: list[int]) -> Files:
    """Returns small files whose generation_config.json has these tokens among those that end a text.

    ends: []: returns the files unchanged, and so for a model that classifies. Raises ConfigError if the file there is
    no JSON object.
    """
    if not ends or labels_of(config):
        return files
    try:
        source = parse_json(files.get(GENERATION, b"{}").decode())
        if not isinstance(source, dict):
            raise ValueError(f"expected an object, got {type(source).__name__}")
    except ValueError as error:
        raise ConfigError(f"model_path: cannot read {GENERATION} ({str(error)[:200]}); fetch it again") from error
    said = chat_files.generation_config(source, config, ends)
    return files if said == source else files | {GENERATION: encoded(said)}


def tokenizer_files(spec: str) -> Files:
    """Returns the tokenizer's files for a model's folder, from the config's field `tokenizer`; none for bytes.

    A tokenizer without tokenizer_config.json gets one that says how surojax uses it.
    """
    if spec == "bytes":
        return {}
    path = expanded(spec)
    if is_gguf(path):
        files = {"tokenizer.json": gguf_tokenizer.read_gguf_tokenizer(path).tokenizer.encode()}
    elif path.is_dir() or path.name == "tokenizer.json":
        files = small_files.read_tokenizer_files(path if path.is_dir() else path.parent)
    else:
        files = {"tokenizer.json": path.read_bytes()}
    if TOKENIZER_CONFIG in files:
        return files
    tokenizer = load_tokenizer(spec)
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # else transformers takes the class of the model's family
        "bos_token": tokenizer.bos or None,
        "eos_token": tokenizer.eos or None,
        "add_bos_token": tokenizer.adds_bos,
        "clean_up_tokenization_spaces": False,
    }
    files |= {TOKENIZER_CONFIG: encoded(said)}
    has_template = is_gguf(path) and tokenizer.chat_template
    return chat_files.with_template(files, tokenizer.chat_template) if has_template else files


def of_adapter(folder: str | Path, config: dict[str, Any], files: Files, *, own_tokenizer: bool) -> Files:
    """Returns a base model's small files with an adapter's tokenizer and chat template, and the stop tokens of that.

    config: config.json of the base. own_tokenizer: the tokenizer of `files` was asked for, and stays. Raises
    ConfigError if the adapter's tokenizer or template cannot be read, or has more tokens than the model.
    """
    path = expanded(folder)
    theirs = small_files.read_tokenizer_files(path)
    templates = {name: x for name, x in theirs.items() if name == TEMPLATE or name.startswith(NAMED_TEMPLATES)}
    if "tokenizer.json" in theirs and not own_tokenizer:
        load_tokenizer(str(path))  # raises with this path
        files = {name: x for name, x in files.items() if name in (CONFIG, GENERATION)} | theirs
    elif TEMPLATE in templates:
        files = chat_files.with_template(files, read_text(path / TEMPLATE)) | templates
    if "tokenizer.json" not in files:
        return files
    tokenizer = tokenizer_in(files, config)
    if tokenizer.vocab_size > config["vocab_size"]:
        raise ConfigError(
            f"adapter: {folder}: expected a tokenizer of at most {config['vocab_size']} tokens, as the model has, got "
            f"{tokenizer.vocab_size}; remove its tokenizer.json to keep the model's tokenizer"
        )
    return with_stops(files, config, chat_files.own_turn_ends(tokenizer))


def tokenizer_in(files: Files, config: dict[str, Any]) -> Tokenizer:
    """Loads the tokenizer of a model's small files. config: config.json, which names tokens too."""
    with tempfile.TemporaryDirectory() as folder:
        small_files.write_small_files(Path(folder), files | {CONFIG: encoded(config)})
        return HuggingFaceTokenizer(read_folder(Path(folder)), "tokenizer.json")
