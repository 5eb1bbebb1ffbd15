"""Formats that the frozen matrices of QLoRA rest in (Dettmers et al. 2023, arXiv:2305.14314).

A format is a way to quantise a matrix and back, the arrays that it rests in, and their shapes: a row of `FORMATS`. A
quantised matrix is a NamedTuple of these arrays, a `Coded`. Each array but those of `per_matrix` has a part for every
row and column of the matrix, so that whatever shards, copies or gathers a matrix does the same to each of its arrays.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from surojax.errors import ConfigError
from surojax.numerics import block_fp8, mxfp4, nf4, nvfp4

if TYPE_CHECKING:
    from _typeshed import SupportsGetItem

Coded = nf4.Nf4 | block_fp8.BlockFp8 | nvfp4.Nvfp4 | mxfp4.Mxfp4


class BaseFormat(NamedTuple):
    """A format of matrices [out, in].

    setting: the field of the config that chooses it. block: rows are in blocks of so many numbers, which are not
    divided. arrays: the NamedTuple of arrays; the first is `codes`. per_matrix: those with one number per matrix.

    of_experts: matrices of experts alone are stored so.

    planned: (shape `[..., out, in]`, parts that (rows, columns) are divided into) -> shapes and dtypes of the arrays.
    quantise: (w, arrays as planned) -> arrays. dequantise: (arrays or a shard of them, dtype) -> w.
    """

    setting: str
    block: int
    arrays: type
    per_matrix: tuple[str, ...]
    planned: Callable
    quantise: Callable
    dequantise: Callable
    of_experts: bool = False


FORMATS = {
    "nf4": BaseFormat("qlora_bnb", nf4.BLOCK, nf4.Nf4, ("offset",), nf4.planned, nf4.quantise, nf4.dequantise),
    "fp8": BaseFormat(
        "qlora_fp8", 1, block_fp8.BlockFp8, (), block_fp8.planned, block_fp8.quantise, block_fp8.dequantise
    ),
    "nvfp4": BaseFormat(
        "qlora_fp4", nvfp4.BLOCK, nvfp4.Nvfp4, ("tensor_scale",), nvfp4.planned, nvfp4.quantise, nvfp4.dequantise
    ),
    "mxfp4": BaseFormat(
        "qlora_mxfp4",
        mxfp4.BLOCK,
        mxfp4.Mxfp4,
        (),
        mxfp4.planned,
        mxfp4.quantise,
        mxfp4.dequantise,
        of_experts=True,
    ),
}
_OF_TYPE = {known.arrays: known for known in FORMATS.values()}


def chosen_format(settings: "SupportsGetItem[str, Any]") -> str:
    """The format that these fields of the config choose; "": none. Raises ConfigError if they choose several."""
    names = [name for name, candidate in FORMATS.items() if settings[candidate.setting]]
    if len(names) > 1:
        first, second = (FORMATS[name].setting for name in names[:2])
        raise ConfigError(f"{second}: expected False with {first}=True, got True; leave one of them out")
    return names[0] if names else ""


def is_coded(x) -> bool:
    """True if x is a Coded. As `is_leaf` it makes a Coded in a tree of weights one leaf, like an array."""
    return type(x) in _OF_TYPE


def is_in(q: Coded, name: str) -> bool:
    """True if a Coded is in the format of this name; False for names that are not in `FORMATS`."""
    return name in FORMATS and isinstance(q, FORMATS[name].arrays)


def has_whole_blocks(name: str, shape: tuple[int, ...], divided: tuple[int, int] = (1, 1)) -> bool:
    """True if matrices `[..., out, in]`, sharded into these numbers of parts by rows and columns, have whole blocks."""
    return shape[-1] % (FORMATS[name].block * divided[1]) == 0


def quantise(w: jax.Array, like: Coded) -> Coded:
    """Quantises a matrix `[..., out, in]`, each by itself, to the format and the shapes of `like`."""

    def one(w: jax.Array) -> Coded:
        return _OF_TYPE[type(like)].quantise(w, like)

    return _of_each(one, w.ndim)(w)


def dequantise(q: Coded, dtype) -> jax.Array:
    """Dequantises a Coded, or a shard of one, to `[..., out, in]` in `dtype`."""

    def one(q: Coded) -> jax.Array:
        return _OF_TYPE[type(q)].dequantise(q, dtype)

    return _of_each(one, q.codes.ndim)(q)


def _of_each(of_matrix: Callable, ndim: int) -> Callable:
    """Maps a function of one matrix over arrays with this many dimensions; all but the last two count matrices."""
    for _ in range(ndim - 2):
        of_matrix = jax.vmap(of_matrix)
    return of_matrix


def dequantise_all(tree, dtype):
    """Dequantises every Coded of a tree."""
    return jax.tree.map(lambda x: dequantise(x, dtype) if is_coded(x) else x, tree, is_leaf=is_coded)


def map_arrays(q: Coded, of_part: Callable, of_matrix: Callable = lambda x: x) -> Coded:
    """Returns a Coded with these functions applied to its arrays; of_matrix: to arrays with one number per matrix."""
    per_matrix = _OF_TYPE[type(q)].per_matrix
    return type(q)(*[(of_matrix if name in per_matrix else of_part)(x) for name, x in q._asdict().items()])


def bytes_per_number(q: Coded, shape: tuple[int, ...]) -> float:
    """Bytes per number of a planned Coded: its code and its share of the block scales, without arrays per matrix.

    shape: of the numbers.
    """
    per_matrix = _OF_TYPE[type(q)].per_matrix
    arrays = [x for name, x in q._asdict().items() if name not in per_matrix]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays) / math.prod(shape)
