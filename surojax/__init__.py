"""surojax: train language models that are larger than the GPUs they run on, in JAX.

The README names the files to read, in the order in which a run calls them.

Names are imported when they are first used, so that `import surojax` loads neither checkpoints nor data loaders.
"""

import importlib.util
import sys
import types

_NEEDED = "jax flax optax orbax tensorstore chex ml_collections grain tokenizers jinja2 pyarrow huggingface_hub gguf"
_NEEDED += " ml_dtypes tensorboardX tqdm psutil"


def _cannot_run() -> str:
    """Why surojax cannot be imported here, or "". Files beside this one may have syntax newer than this Python's."""
    if sys.version_info < (3, 12):  # noqa: UP036
        found = ".".join(map(str, sys.version_info[:2]))
        return f"expected Python 3.12 or newer, got {found}; .python-version selects one for pyenv and uv"
    if sys.platform == "win32":
        return "expected Linux or macOS, got Windows, where JAX has no GPUs either; use WSL 2"
    missing = [name for name in _NEEDED.split() if importlib.util.find_spec(name) is None]
    if missing:
        return f"expected the package {missing[0]}, got none; pip install -e . (in the folder with pyproject.toml)"
    return ""


if _reason := _cannot_run():
    if sys.argv[:1] == ["-m"]:  # while `python -m surojax.train` looks for the module: one line instead of a traceback
        sys.exit(f"surojax: error: {_reason}")
    raise ImportError(f"surojax: {_reason}")

_HOMES = {
    "CheckpointError": "surojax.errors",
    "Compute": "surojax.models.model",
    "ConfigError": "surojax.errors",
    "Engine": "surojax.step.spec",
    "Decoder": "surojax.models.decoder",
    "DecoderConfig": "surojax.models.decoder",
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
