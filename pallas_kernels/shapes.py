"""Sizes of real models, by name; the kernels are tested, compiled and timed with them.

Every op's file ends with `cases(sizes, tokens)`: calls of its kernels with the shapes of a model of these sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax


class Sizes(NamedTuple):
    """The model sizes that determine kernel shapes."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


MODELS: dict[str, Sizes] = {
    "gpt2": Sizes(768, 3072, 12, 12, 64, 50257),
    "llama1b": Sizes(2048, 8192, 32, 8, 64, 128256),
    "llama7b": Sizes(4096, 11008, 32, 32, 128, 32000),
    "qwen7b": Sizes(3584, 18944, 28, 4, 128, 152064),
    "qwen32b": Sizes(5120, 27648, 40, 8, 128, 151936),
    "llama70b": Sizes(8192, 28672, 64, 8, 128, 128256),
}
TOKENS = (2048, 8192)  # of a microbatch on one device


class Case(NamedTuple):
    """A call of a kernel.

    run: (arrays, implementation=, interpret=) -> results. args: shapes and dtypes of the arrays. bytes: the least that
    the call must read and write. donated: indices of the arguments that are updated in place.
    """

    name: str
    run: Callable
    args: tuple[jax.ShapeDtypeStruct, ...]
    bytes: int
    donated: tuple[int, ...] = ()
