"""surojax: train language models that are larger than the GPUs they run on, in JAX.

docs/house.md names the files to read, in the order in which a run calls them.

Names are imported when they are first used, so that `import surojax` loads neither checkpoints nor data loaders.
"""

import importlib
import importlib.util
import os
import sys
import types
from typing import TYPE_CHECKING

__version__ = "0.2.0"

_NEEDED = "jax flax optax orbax tensorstore chex ml_collections grain tokenizers jinja2 pyarrow huggingface_hub gguf"
_NEEDED += " ml_dtypes tensorboardX tqdm psutil"


def _cannot_run() -> str:
    """Returns the reason why surojax cannot be imported here, or "".

    Files beside this one may have syntax newer than this Python's.
    """
    if sys.version_info < (3, 12):  # noqa: UP036
        version = ".".join(map(str, sys.version_info[:2]))
        return f"expected Python 3.12 or newer, got {version}; .python-version selects one for pyenv and uv"
    if sys.platform == "win32":
        return "expected Linux or macOS, got Windows, where JAX has no GPUs either; use WSL 2"
    missing = [name for name in _NEEDED.split() if importlib.util.find_spec(name) is None]
    if missing:
        return f"expected the package {missing[0]}, got none; pip install -e . (in the folder with pyproject.toml)"
    return ""


def _too_little_memory() -> str:
    """Returns the reason why limits of this process do not let JAX start, or ""."""
    return importlib.import_module("surojax.resources").too_little_to_start()


_is_command = sys.argv[:1] == ["-m"] or [os.path.basename(name) for name in sys.argv[:1]] == ["surojax"]
if _reason := _cannot_run() or (_too_little_memory() if _is_command else ""):
    # One line instead of a traceback: while `python -m surojax.train` looks for the module, and of the command surojax.
    if _is_command:
        sys.exit(f"surojax: error: {_reason}")
    raise ImportError(f"surojax: {_reason}")

_HOMES = {
    "Block": "surojax.models.decoder",
    "Callback": "surojax.run.callbacks",
    "CheckpointError": "surojax.errors",
    "Compute": "surojax.models.model",
    "ConfigError": "surojax.errors",
    "EarlyStopping": "surojax.run.callbacks",
    "Engine": "surojax.step.spec",
    "Event": "surojax.run.callbacks",
    "Guard": "surojax.run.guard",
    "LossOfLogits": "surojax.objectives.objective",
    "Decoder": "surojax.models.decoder",
    "DecoderConfig": "surojax.models.decoder_config",
    "Model": "surojax.models.model",
    "NonFiniteLoss": "surojax.run.nonfinite",
    "Objective": "surojax.objectives.objective",
    "OwnLoop": "surojax.training.own_loop",
    "Result": "surojax.train",
    "StepSettings": "surojax.step.spec",
    "TrainState": "surojax.step.state",
    "assemble": "surojax.assembly.assemble",
    "default_config": "surojax.config",
    "read_metrics": "surojax.run.metrics",
    "train": "surojax.train",
}
__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


if TYPE_CHECKING:  # for editors, which complete these names and show their types
    from surojax.assembly.assemble import assemble as assemble
    from surojax.config import default_config as default_config
    from surojax.errors import CheckpointError as CheckpointError, ConfigError as ConfigError
    from surojax.models.decoder import Block as Block, Decoder as Decoder
    from surojax.models.decoder_config import DecoderConfig as DecoderConfig
    from surojax.models.model import Compute as Compute, Model as Model
    from surojax.objectives.objective import LossOfLogits as LossOfLogits, Objective as Objective
    from surojax.run.callbacks import Callback as Callback, EarlyStopping as EarlyStopping, Event as Event
    from surojax.run.guard import Guard as Guard
    from surojax.run.metrics import read_metrics as read_metrics
    from surojax.run.nonfinite import NonFiniteLoss as NonFiniteLoss
    from surojax.step.spec import Engine as Engine, StepSettings as StepSettings
    from surojax.step.state import TrainState as TrainState
    from surojax.train import Result as Result, train as train
    from surojax.training.own_loop import OwnLoop as OwnLoop


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
