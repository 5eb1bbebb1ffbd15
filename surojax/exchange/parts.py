"""The language model of a model that sees images as well: its config.json, and its names among those of all tensors.

Both spellings of the names are read: the one in files (`language_model.model.`), and the one of the modules of
transformers 5 (`model.language_model.`). What an image passes through before it becomes embeddings is left aside.
"""

from collections.abc import Iterable
from typing import Any

from surojax.errors import ConfigError

# The families of whole models, each with those of its language model; the first is the one that nothing is said of.
FAMILIES: dict[str, tuple[str, ...]] = {"gemma3": ("gemma3_text",), "mistral3": ("mistral", "ministral3")}
# Keys beside text_config that say how images become embeddings, or nothing that is computed.
OF_IMAGES = frozenset(
    "vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index image_token_id "
    "projector_hidden_act vision_feature_layer multimodal_projector_bias spatial_merge_size".split()
)
OF_THE_FILE = frozenset("model_type architectures transformers_version initializer_range tie_word_embeddings".split())
# Keys beside text_config that count for the language model, if they are not null.
OF_BOTH = ("quantization_config", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
TEXT = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."}
IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def has_parts(config: dict[str, Any]) -> bool:
    """True if this config.json describes a model of several parts, whose language model is of a known family."""
    family = config.get("model_type")
    return isinstance(family, str) and family in FAMILIES


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json that the language model would have alone.

    Its head is tied if both places say so; one that says nothing agrees. Raises ConfigError for a language model that
    is not known, and for a key beside it that is not known.
    """
    family = config["model_type"]
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(
            f"model_path: config.json: expected an object as text_config of {family}, got {text!r}; fetch it again"
        )
    known = FAMILIES[family]
    of_text = text.get("model_type", known[0])
    if of_text not in known:
        raise ConfigError(
            f"model_path: config.json: expected model_type {' or '.join(known)} in text_config of {family}, got "
            f"{of_text!r}; other language models are not known there"
        )
    if unknown := sorted(config.keys() - {"text_config", *OF_IMAGES, *OF_THE_FILE, *OF_BOTH}):
        raise ConfigError(
            f"model_path: config.json has {', '.join(unknown)}, which may change what the model computes and is not "
            f"known for {family}"
        )
    if text.get("final_logit_softcapping"):
        raise ConfigError(
            f"model_path: config.json: text_config: expected final_logit_softcapping None, got "
            f"{text['final_logit_softcapping']!r}, which transformers does not compute for {family}; remove it if the "
            "model was trained without it"
        )
    types = text.get("layer_types")
    if of_text == "mistral" and types and text.get("sliding_window", 4096) and "full_attention" in types:
        raise ConfigError(
            "model_path: config.json: text_config: layer_types: expected sliding_attention in every layer, got "
            f"full_attention, which transformers does not read for {family}; remove it if every layer has the window"
        )
    found = {key: value for key, value in text.items() if key not in ("architectures", "transformers_version")}
    found |= {key: config[key] for key in OF_BOTH if config.get(key) is not None}
    if config.get("tie_word_embeddings") is False:
        found["tie_word_embeddings"] = False
    return found | {"model_type": of_text}


def text_names(names: Iterable[str]) -> dict[str, str]:
    """The names of a whole model's tensors by the names that they would have in the language model alone.

    Tensors of other parts are left out; names that are of neither stay, for who reads them to refuse.
    """
    return {alone(name): name for name in names if not name.startswith(IMAGES)}


def in_whole(name: str) -> str:
    """The name that transformers 5 gives to a module of the language model, or to a tensor, in the whole model."""
    return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name


def alone(name: str) -> str:
    """The name of a tensor in the language model alone."""
    for start, of_text in TEXT.items():
        if name.startswith(start):
            return of_text + name.removeprefix(start)
    return name
