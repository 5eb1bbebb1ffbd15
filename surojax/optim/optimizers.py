"""The optimizers by the name that a config calls them."""

from collections.abc import Callable

from surojax.optim.normuon import normuon
from surojax.optim.optimizer import Optimizer, adamw, adamw8bit

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adamw": adamw, "adamw8bit": adamw8bit, "normuon": normuon}
