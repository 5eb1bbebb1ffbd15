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
    "Accuracy": "surojax.evaluate",
    "Block": "surojax.models.decoder",
    "Callback": "surojax.run.callbacks",
    "CheckpointError": "surojax.errors",
    "Compute": "surojax.models.model",
    "Config": "surojax.config",
    "ConfigError": "surojax.errors",
    "EarlyStopping": "surojax.run.callbacks",
    "Engine": "surojax.step.spec",
    "Estimate": "surojax.api",
    "Event": "surojax.run.callbacks",
    "Fit": "surojax.api",
    "Guard": "surojax.run.guard",
    "LoadedModel": "surojax.api",
    "LossOfLogits": "surojax.objectives.objective",
    "Decoder": "surojax.models.decoder",
    "DecoderConfig": "surojax.models.decoder_config",
    "Model": "surojax.models.model",
    "NonFiniteLoss": "surojax.run.nonfinite",
    "Objective": "surojax.objectives.objective",
    "OwnLoop": "surojax.training.own_loop",
    "Plan": "surojax.planner.run_plan",
    "Result": "surojax.train",
    "StepSettings": "surojax.step.spec",
    "TrainState": "surojax.step.state",
    "assemble": "surojax.assembly.assemble",
    "convert": "surojax.api",
    "default_config": "surojax.config",
    "distill": "surojax.api",
    "estimate": "surojax.api",
    "evaluate": "surojax.api",
    "fit": "surojax.api",
    "generate": "surojax.api",
    "load": "surojax.api",
    "load_config": "surojax.api",
    "plan": "surojax.api",
    "quantised": "surojax.api",
    "read_metrics": "surojax.run.metrics",
    "train": "surojax.api",
}
__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


if TYPE_CHECKING:  # for editors, which complete these names and show their types
    from surojax.api import (
        Estimate as Estimate,
        Fit as Fit,
        LoadedModel as LoadedModel,
        convert as convert,
        distill as distill,
        estimate as estimate,
        evaluate as evaluate,
        fit as fit,
        generate as generate,
        load as load,
        load_config as load_config,
        plan as plan,
        quantised as quantised,
        train as train,
    )
    from surojax.assembly.assemble import assemble as assemble
    from surojax.config import Config as Config, default_config as default_config
    from surojax.errors import CheckpointError as CheckpointError, ConfigError as ConfigError
    from surojax.evaluate import Accuracy as Accuracy
    from surojax.models.decoder import Block as Block, Decoder as Decoder
    from surojax.models.decoder_config import DecoderConfig as DecoderConfig
    from surojax.models.model import Compute as Compute, Model as Model
    from surojax.objectives.objective import LossOfLogits as LossOfLogits, Objective as Objective
    from surojax.planner.run_plan import Plan as Plan
    from surojax.run.callbacks import Callback as Callback, EarlyStopping as EarlyStopping, Event as Event
    from surojax.run.guard import Guard as Guard
    from surojax.run.metrics import read_metrics as read_metrics
    from surojax.run.nonfinite import NonFiniteLoss as NonFiniteLoss
    from surojax.step.spec import Engine as Engine, StepSettings as StepSettings
    from surojax.step.state import TrainState as TrainState
    from surojax.train import Result as Result
    from surojax.training.own_loop import OwnLoop as OwnLoop


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'surojax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Function:
    """A function that has the name of a module, also after Python has set that module on the package."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, package, owner):
        return __getattr__(self.name)

    def __set__(self, package, module):
        pass


class _Package(types.ModuleType):
    train = _Function("train")
    plan = _Function("plan")
    fit = _Function("fit")
    convert = _Function("convert")
    generate = _Function("generate")
    evaluate = _Function("evaluate")
    distill = _Function("distill")


sys.modules[__name__].__class__ = _Package
