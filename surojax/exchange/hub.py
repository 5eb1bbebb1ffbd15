"""Downloads models from the Hugging Face hub to its cache, or finds them there without a network."""

import re
import textwrap
from pathlib import Path

from surojax.errors import ConfigError
from surojax.exchange.small_files import SMALL_FILES

FOLDER, OF_MODEL = "a folder with config.json", "give the folder of a Hugging Face model, or a .gguf file"  # for errors
NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_model_name(model_path: str) -> bool:
    """Returns True if model_path may be the name of a model, owner/name."""
    return NAME.fullmatch(model_path) is not None and not model_path.startswith(".")


def download(name: str, *, weights: bool) -> Path:
    """Returns the cache's folder with a model's small files, and its safetensors files if `weights`.

    name: owner/name. Raises ConfigError if the hub cannot be asked and the cache does not have them.
    """
    import huggingface_hub.constants  # imported here, so that runs without it do not wait for it

    patterns = [*SMALL_FILES, *(("model*.safetensors", "model.safetensors.index.json") if weights else ())]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the network library's own, the library's, OSError for a full disk
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        reason = textwrap.shorten(said, 300, placeholder=" ...")
        raise ConfigError(
            f"model_path: expected a model's folder or its name on the hub, got {name!r}: there is no such folder, "
            f"the cache {huggingface_hub.constants.HF_HUB_CACHE} does not have it, and the hub said: {reason}; "
            "fetch it where there is a network, and give its folder"
        ) from error
