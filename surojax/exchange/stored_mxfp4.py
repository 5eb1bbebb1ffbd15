"""Reads and writes experts' matrices in MXFP4, as codes and scales: see numerics/mxfp4.py.

A matrix of all experts `name` [experts, in, out] has, rows by row of its transpose,

    name_blocks    uint8 [experts, out, in / 32, 16], two codes in a byte
    name_scales    uint8 [experts, out, in / 32]
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from surojax.errors import ConfigError
from surojax.numerics import mxfp4

BLOCKS, SCALES = "_blocks", "_scales"
# The `quantization_config` of published models.
CONFIG: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def matrices(names: set[str]) -> set[str]:
    """Selects the names of MXFP4 matrices among names of tensors."""
    with_blocks = {name.removesuffix(BLOCKS) for name in names if name.endswith(BLOCKS)}
    return {name for name in with_blocks if name + SCALES in names}


def file_arrays(q: mxfp4.Mxfp4) -> tuple[Any, Any]:
    """Reorders codes and scales to files' layout: (blocks, scales). q: of all experts, rows by row."""
    return q.codes.reshape(*q.scales.shape, mxfp4.BLOCK // 2), q.scales


def parts_of(matrices: set[str]) -> set[str]:
    """The names of the tensors that hold codes and scales of MXFP4 matrices."""
    return {name + part for name in matrices for part in (BLOCKS, SCALES)}


def stored_shape(name: str, shape_of: Callable[[str], tuple[int, ...]]) -> tuple[int, int, int]:
    """Returns (experts, in, out) of a stored MXFP4 matrix.

    Raises ConfigError if codes and scales do not have the shapes above.
    """
    blocks, scales = shape_of(name + BLOCKS), shape_of(name + SCALES)
    if len(blocks) != 4 or blocks[:-1] != scales or blocks[-1] != mxfp4.BLOCK // 2:
        raise ConfigError(
            f"model_path: {name}: expected blocks [experts, out, in / 32, 16] and their scales, got {[*blocks]} and "
            f"{[*scales]}; fetch the model again"
        )
    experts, out, row_blocks, _ = blocks
    return experts, mxfp4.BLOCK * row_blocks, out


def read_mxfp4(name: str, rows: Callable[[np.ndarray], np.ndarray], read: Callable[[str], np.ndarray]) -> mxfp4.Mxfp4:
    """Reads experts' matrices, or some of their rows, as codes and scales.

    Raises ConfigError for scales of no finite numbers.
    """
    scales = np.ascontiguousarray(rows(read(name + SCALES)))
    codes = rows(read(name + BLOCKS))
    if scales.max(initial=0) > mxfp4.LARGEST_SCALE:
        raise ConfigError(
            f"model_path: {name + SCALES}: expected finite numbers, got the scale 2^{int(scales.max()) - 127}; fetch "
            "the model again"
        )
    return mxfp4.Mxfp4(np.ascontiguousarray(codes).reshape(*codes.shape[:2], -1), scales)
