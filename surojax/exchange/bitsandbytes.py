"""Reads codes and scales of matrices that bitsandbytes stored in NF4, without dequantising, see numerics/nf4.py.

A matrix `name` has its codes under that name, [out x in / 2, 1], and beside it:

    name.absmax, name.nested_absmax            8-bit codes of the blocks' absmax, and the groups' scales of them
    name.quant_map, name.nested_quant_map      the numbers that codes of 4 and of 8 bits stand for
    name.quant_state.bitsandbytes__nf4         JSON: shape, dtype of the numbers, sizes of blocks and groups, offset
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from surojax.errors import ConfigError
from surojax.numerics import nf4
from surojax.own_files import check_form
from surojax.untrusted import parse_json

STATE = ".quant_state.bitsandbytes__nf4"
PARTS = (".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map", STATE)
# What is read; another size of blocks, or scales that are not quantised, are another layout.
EXPECTED: dict[str, Any] = {"quant_type": "nf4", "blocksize": nf4.BLOCK, "nested_blocksize": nf4.GROUP}
FORM = {
    "quant_type": str,
    "blocksize": int,
    "nested_blocksize": int,
    "nested_offset": float,
    "dtype": str,
    "shape": [int],
}
DTYPES = ("bfloat16", "float16", "float32")


class Nf4Entry(NamedTuple):
    """Shape and types of a stored NF4 matrix, from its metadata. dtype: of the numbers after dequantisation."""

    shape: tuple[int, int]
    dtype: str
    offset: float


def matrices(names: set[str]) -> set[str]:
    """Selects the names of NF4 matrices among names of tensors."""
    return {name.removesuffix(STATE) for name in names if name.endswith(STATE)}


def parts_of(matrices: set[str]) -> set[str]:
    """The names of the tensors that hold scales and tables of NF4 matrices."""
    return {name + part for name in matrices for part in PARTS}


def stored(name: str, names: set[str], read: Callable[[str], np.ndarray]) -> Nf4Entry:
    """Reads the metadata of a stored NF4 matrix. Raises ConfigError for another layout than that of numerics/nf4.py.

    names: of all tensors. read: a tensor by its name.
    """
    if missing := [part for part in PARTS if name + part not in names]:
        raise ConfigError(
            f"model_path: expected {name + missing[0]} beside {name}, got no such tensor; quantise the model with "
            "bnb_4bit_use_double_quant=True"
        )
    try:
        state = parse_json(read(name + STATE).tobytes())
        check_form(state, FORM)
    except ValueError as error:
        raise ConfigError(f"model_path: {name + STATE}: {error}; fetch the file again, or quantise it again") from error
    for key, value in EXPECTED.items():
        if state[key] != value:
            raise ConfigError(f"model_path: {name}: {key}: expected {value!r}, got {state[key]!r}; quantise it so")
    if state["dtype"] not in DTYPES or len(state["shape"]) != 2 or state["shape"][1] % nf4.BLOCK:
        raise ConfigError(
            f"model_path: {name}: expected a matrix with rows of a multiple of {nf4.BLOCK} numbers, got "
            f"{state['dtype']} of {state['shape']}; fetch the model before it was quantised"
        )
    return Nf4Entry(tuple(state["shape"]), state["dtype"], float(state["nested_offset"]))


def read_nf4(name: str, of: Nf4Entry, read: Callable[[str], np.ndarray], parts: int = 1) -> nf4.Nf4:
    """Reads a matrix as codes and scales; parts: shards of a row. Raises ConfigError for other tables of numbers."""
    for part, numbers in ((".quant_map", nf4.NUMBERS), (".nested_quant_map", nf4.DYNAMIC)):
        if not np.array_equal(read(name + part), numbers):
            raise ConfigError(f"model_path: {name + part}: expected the numbers of bitsandbytes' nf4, got others")
    absmax = read(f"{name}.absmax").reshape(-1)
    group_absmax = read(f"{name}.nested_absmax").reshape(-1)
    codes = read(name).reshape(-1).view(np.uint8)  # some store the same bytes as other numbers
    expected = (math.prod(of.shape) // 2, math.prod(of.shape) // nf4.BLOCK)
    if (codes.size, absmax.size) != expected:
        raise ConfigError(
            f"model_path: {name}: expected {expected[0]} bytes and {expected[1]} scales, got {codes.size} and "
            f"{absmax.size}; fetch the file again"
        )
    return nf4.from_flat(codes, absmax, group_absmax, np.float32(of.offset), of.shape, parts)
