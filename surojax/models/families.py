"""The families of models, by the name that a Hugging Face `config.json` calls them (`model_type`)."""

from collections.abc import Callable
from typing import Any, NamedTuple

from surojax.models import llama
from surojax.models.model import Compute, Model


class Family(NamedTuple):
    """A family of models.

    architecture: from the `model` fields of a config to frozen sizes. build: from these to a `Model`.
    """

    architecture: Callable[[dict[str, Any]], Any]
    build: Callable[[Any, Compute], Model]


FAMILIES: dict[str, Family] = {"llama": Family(llama.from_settings, llama.build)}
