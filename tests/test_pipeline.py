"""Pipeline parallelism: the engine equals `jax.grad` of the plain model on one device, whatever the schedule.

The oracle and the bound are those of tests/test_engine.py, with more microbatches than are in flight.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from small import CONFIG, Small, plain_loss, quick_at, tokens, worst_relative
from test_engine import GEMMA, ORDER_OF_SUMS, QWEN, engine_gradients
from test_models import ToyConfig, build as toy  # two kinds of layers

from surojax.config import checks
from surojax.config.fields import default_config
from surojax.errors import ConfigError
from surojax.models import llama
from surojax.placement.layout import layouts, specs
from surojax.placement.mesh import PIPELINE, SHARD, abstract_mesh, mesh_shape
from surojax.placement.table import place
from surojax.run.checkpoint import Checkpoints, find, restore
from surojax.step.pipeline import of_stage

OFFLOADS = ("offload_residual", "offload_optimizer", "offload_master", "offload_grads", "offload_weights")
ALL: dict[str, Any] = dict.fromkeys(OFFLOADS, True)
FOUR = dataclasses.replace(CONFIG, num_hidden_layers=4)
TIED = dataclasses.replace(QWEN, num_hidden_layers=4)
WINDOWS = dataclasses.replace(GEMMA, num_hidden_layers=4)
