"""The language model in an image-text model: its section of config.json, and its tensors' names in the files.

Both spellings of the names are read: the one in files (`language_model.model.`), and the one of the modules of
transformers 5 (`model.language_model.`). What an image passes through before it becomes embeddings is not trained; an
export has it as it is (beside.py).
"""

from typing import Any

from surojax.errors import ConfigError, shown
from surojax.families.neutral import OFF, UNREAD, is_empty
from surojax.families.registry import IMAGE_TEXT_FAMILIES

# Keys beside text_config that say how images and sounds become embeddings, or nothing that is computed.
OF_IMAGES = frozenset(
    "vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index image_token_id "
    "projector_hidden_act vision_feature_layer multimodal_projector_bias spatial_merge_size video_token_id "
    "vision_start_token_id vision_end_token_id language_model_only out_hidden_size projector_hidden_size "
    "audio_config audio_token_id boi_token_id eoi_token_id boa_token_id eoa_token_index".split()
)
OF_THE_FILE = frozenset(("initializer_range", "tie_word_embeddings"))
# Keys beside text_config that count for the language model, if they are not null.
OF_BOTH = ("quantization_config", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
TEXT = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."}
IMAGES = ("vision_tower.", "vision_adapter.", "vision_projection.", "multi_modal_projector.", "visual.")
IMAGES += ("vision_embedder.", "embed_vision.", "audio_tower.", "embed_audio.")
IMAGES += tuple(f"model.{name}" for name in IMAGES)


def has_parts(config: dict[str, Any]) -> bool:
    """True if this config.json describes an image-text model whose language model is of a known family."""
    family = config.get("model_type")
    return isinstance(family, str) and family in IMAGE_TEXT_FAMILIES


def placeholders(config: dict[str, Any]) -> list[int]:
    """The token ids that stand for images and sounds, for which transformers may have other embeddings than the file's.

    config: a config.json, of an image-text model or not.
    """
    keys = (key for key in OF_IMAGES if key.endswith(("token_id", "token_index")))
    return [config[key] for key in keys if isinstance(config.get(key), int)]


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the language model alone.

    Its head is tied if both places say so; one that says nothing agrees. Raises ConfigError for a language model that
    is not known, and for a key beside it that is not known.
    """
    family = config["model_type"]
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(
            f"model_path: config.json: expected an object as text_config of {family}, got {text!r}; fetch it again"
        )
    known = IMAGE_TEXT_FAMILIES[family].text_types
    model_type = text.get("model_type", known[0])
    if model_type not in known:
        raise ConfigError(
            f"model_path: config.json: expected model_type {' or '.join(known)} in text_config of {family}, got "
            f"{model_type!r}; other language models are not known there"
        )
    off = {key for key, value in config.items() if is_empty(value) or (key in OFF and value in OFF[key])}
    if unknown := sorted(config.keys() - {"text_config", *OF_IMAGES, *OF_THE_FILE, *UNREAD, *off}):
        raise ConfigError(
            f"model_path: config.json has {', '.join(unknown)}, which may change what the model computes and is not "
            f"known for {family}"
        )
    tied = config.get("tie_word_embeddings")
    if not isinstance(tied, bool | None):
        raise ConfigError(
            "model_path: config.json: tie_word_embeddings: expected true or false beside text_config, got "
            f"{shown(tied)}; fetch it again"
        )
    IMAGE_TEXT_FAMILIES[family].check_text(text | {"model_type": model_type})
    text_keys = {key: value for key, value in text.items() if key not in ("architectures", "transformers_version")}
    text_keys |= {key: config[key] for key in OF_BOTH if config.get(key) is not None}
    if tied is False:
        text_keys["tie_word_embeddings"] = False
    return text_keys | {"model_type": model_type}


def with_text(whole: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """Returns an image-text model's config.json with another language model: the inverse of `text_config`.

    text: its config.json alone, whose dtype and quantisation are said of the whole model.
    """
    inner = {key: value for key, value in text.items() if key not in ("architectures", "quantization_config")}
    of_both = {key: text[key] for key in ("quantization_config", "dtype", "torch_dtype") if key in text}
    if "tie_word_embeddings" in text:
        of_both["tie_word_embeddings"] = text["tie_word_embeddings"]
    kept = {key: value for key, value in whole.items() if key != "quantization_config"}
    return kept | {"text_config": inner} | of_both


def first_words(name: str) -> list[str]:
    """The words of a tensor's name that say which part of the model it is in: "model.visual", "model.layers.46"."""
    words = name.split(".")
    first = 1 if words[0] != "model" else 2
    return words[: first + 1] if words[first - 1] == "layers" else words[:first]


def is_of_images(name: str) -> bool:
    """True if an image-text model's tensor is in an encoder of images or sounds, or between one and the text model."""
    return name.startswith(IMAGES)


def in_whole(name: str) -> str:
    """Translates a name in the language model alone to the image-text model's name, as transformers 5 spells it."""
    return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name


def alone(name: str) -> str:
    """Translates an image-text model's name of a tensor to the name in the language model alone."""
    for start, text_start in TEXT.items():
        if name.startswith(start):
            return text_start + name.removeprefix(start)
    return name
