"""Mamba2 in GGUF files, as llama.cpp's converter writes it: decays as -exp(A_log), and vectors of heads as columns.

llama.cpp has no limits of the time steps, and does not load files without biases of the convolutions.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from surojax.errors import ConfigError
from surojax.families.family import GGUF_LAYER, GgufParts, in_gguf
from surojax.families.qwen3_5_gguf import DECAYS, ONE_INPUT
from surojax.models.kinds.mamba2 import Mamba2

INNER = "mamba_inner_size"  # channels of all heads; no key of config.json
NAMES = in_gguf(Mamba2)
TRANSFORMS = {"mamba.taps": ONE_INPUT}


def sizes(names: Mapping[str, str]) -> dict[str, str]:
    """The keys of the metadata, and theirs in config.json. names: {`model` field: key of config.json}."""
    return {
        "ssm.conv_kernel": names["mamba_d_conv"],
        "ssm.state_size": names["mamba_d_state"],
        "ssm.group_count": names["mamba_n_groups"],
        "ssm.time_step_rank": names["mamba_n_heads"],
        "ssm.inner_size": INNER,
    }


def before_writing(config: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Adds the key that only files have. names: as for `sizes`."""
    return config | {INNER: config[names["mamba_n_heads"]] * config[names["mamba_d_head"]]}


def after_reading(config: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Computes a head's channels. names: as for `sizes`. Raises ConfigError if heads do not divide those of all."""
    inner, heads = config[INNER], config[names["mamba_n_heads"]]
    if not heads or inner % heads:
        raise ConfigError(
            f"model_path: ssm.inner_size: expected a multiple of ssm.time_step_rank={heads}, got {inner}; fetch the "
            "file again"
        )
    return {key: x for key, x in config.items() if key != INNER} | {names["mamba_d_head"]: inner // heads}


def reshaped(names: Mapping[str, str]) -> dict[str, GgufParts]:
    """The vectors that files have in another shape. names: as for `sizes`."""
    heads, channels, groups = (names[name] for name in ("mamba_n_heads", "mamba_d_head", "mamba_n_groups"))

    def one(
        name: str,
        shape: Callable[[dict[str, Any]], tuple[int, ...]],
        change: Callable[[np.ndarray, dict[str, Any]], np.ndarray] = lambda x, config: x,
        back: Callable[[np.ndarray, dict[str, Any]], np.ndarray] = lambda x, config: x,
    ) -> GgufParts:
        return GgufParts(
            names=(GGUF_LAYER + name,),
            shape=lambda config: (int(np.prod(shape(config))),),
            shapes=lambda config: [shape(config)],
            divide=lambda x, config: [change(x, config).reshape(shape(config))],
            join=lambda stored, config: back(stored[0].reshape(-1), config),
        )

    def column(config: dict[str, Any]) -> tuple[int, int]:
        return config[heads], 1

    def by_group(config: dict[str, Any]) -> tuple[int, int]:
        return config[groups], config[heads] * config[channels] // config[groups]

    return {
        "mamba.A_log": one("ssm_a", column, DECAYS.change, DECAYS.back),
        "mamba.D": one("ssm_d", column),
        "mamba.norm": one("ssm_norm.weight", by_group),
    }
