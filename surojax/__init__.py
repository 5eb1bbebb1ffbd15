"""surojax: train language models that are larger than the GPUs they run on, in JAX.

The README names the files to read, in the order in which a run calls them.

Names are imported when they are first used, so that `import surojax` loads neither checkpoints nor data loaders.
"""

import importlib
import sys
import types

_HOMES = {
    "CheckpointError": "surojax.errors",
    "Compute": "surojax.models.model",
    "ConfigError": "surojax.errors",
    "Engine": "surojax.step.spec",
    "Llama": "surojax.models.llama",
    "LlamaConfig": "surojax.models.llama",
    "Model": "surojax.models.model",
    "NonFiniteLoss": "surojax.run.nonfinite",
    "Result": "surojax.train",
    "assemble": "surojax.assembly",
    "default_config": "surojax.config",
    "read_metrics": "surojax.run.metrics",
    "train": "surojax.train",
}
__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'surojax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


class _Package(types.ModuleType):
    """`surojax.train` is the function, also after Python has set the module of that name on the package."""

    @property
    def train(self):
        return __getattr__("train")

    @train.setter
    def train(self, module):
        pass


sys.modules[__name__].__class__ = _Package
