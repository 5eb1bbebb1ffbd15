"""surojax: train language models that are larger than the GPUs they run on, in JAX.

The README names the files to read, in the order in which a run calls them.
"""

import warnings

# `python -m surojax.train` loads that module a second time, as __main__; it holds no state, so that is harmless.
warnings.filterwarnings("ignore", ".*found in sys.modules after import of package 'surojax'.*", RuntimeWarning)

from surojax.config import default_config
from surojax.errors import CheckpointError, ConfigError
from surojax.models.llama import Llama, LlamaConfig
from surojax.run.metrics import NonFiniteLoss, read_metrics
from surojax.step.engine import Engine
from surojax.train import Result, train

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Engine",
    "Llama",
    "LlamaConfig",
    "NonFiniteLoss",
    "Result",
    "default_config",
    "read_metrics",
    "train",
]
