"""Kernels of operations on every number by itself, with the largest magnitudes of some: what such ops share.

Arrays are flattened and cut into chunks, one a program. Every thread has its loads of all arrays under way before it
computes, each 16 bytes of the widest dtype: 8192 rows or one, D = 768 or 28672, the memory is kept as busy. A maximum
is taken per program; the maximum of those is outside, over less than a thousandth of the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, fp8

LARGEST = 2**31  # numbers in an array: chunks are addressed in int32


def chosen(op: str, implementation: dispatch.Implementation, fits: bool, needs: str, got) -> bool:
    """Whether the kernel runs. What it cannot do goes to the reference, or is refused if the kernel was asked for.

    Raises Unserved then.
    """
    if dispatch.choose(op, implementation) == "xla" or fits:
        return dispatch.choose(op, implementation) == "mosaic"
    if implementation == "mosaic":
        expected = f"expected other sizes: the kernel needs {needs}"
        raise dispatch.Unserved(f"{op}: {expected}, got {got}; use implementation=None or 'xla'")
    return False


def serves(x) -> bool:
    """Whether an array can be cut into chunks of 128 threads."""
    return 0 < x.size < LARGEST and x.size % dispatch.LANES == 0


NEEDS = f"a multiple of {dispatch.LANES} numbers, fewer than 2^31"


def run(
    body: Callable,
    arrays: Sequence[jax.Array],
    scalars: Sequence[jax.Array],
    dtypes: Sequence,
    maxima: int,
    interpret: bool,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """(results, maxima): arrays of the shape of the first with these dtypes, and float32 [].

    body(values, scalars, index) gives one chunk's results and the arrays whose largest magnitudes are wanted; index()
    is the flat index of every number, uint32.
    """
    shape, n = arrays[0].shape, arrays[0].size
    chunk, vector = _cut(n, max(jnp.dtype(x.dtype).itemsize for x in arrays), 4 if len(arrays) == 1 else 2)
    layout = plgpu.Layout.WG_STRIDED((chunk,), vec_size=vector)

    def kernel(*refs):
        i = jax.lax.axis_index("chunks")
        at = pl.ds(i * chunk, chunk)
        inputs, refs = refs[: len(arrays)], refs[len(arrays) :]
        numbers, refs = refs[: len(scalars)], refs[len(scalars) :]
        index = lambda: plgpu.broadcasted_iota(jnp.uint32, (chunk,), 0, layout=layout) + (i * chunk).astype(jnp.uint32)
        values = [plgpu.load(ref.at[at], layout=layout, optimized=False) for ref in inputs]
        results, tops = body(values, [ref[0] for ref in numbers], index)
        for ref, result in zip(refs[: len(dtypes)], results, strict=True):
            ref[at] = result
        for ref, top in zip(refs[len(dtypes) :], tops, strict=True):
            ref[i] = jnp.max(fp8.ordered(top))

    grid = (n // chunk,)
    out = [jax.ShapeDtypeStruct((n,), dtype) for dtype in dtypes] + [jax.ShapeDtypeStruct(grid, jnp.int32)] * maxima
    operands = (*(x.reshape(n) for x in arrays), *(x.reshape(1) for x in scalars))
    found = dispatch.launch(kernel, operands, out=out, grid=grid, names=("chunks",), interpret=interpret)
    results, tops = found[: len(dtypes)], found[len(dtypes) :]
    return [y.reshape(shape) for y in results], [fp8.from_ordered(jnp.max(top)) for top in tops]


def _cut(n: int, itemsize: int, loads: int) -> tuple[int, int]:
    """(numbers of a chunk, of one load of a thread): 16 bytes a load where n can be divided so."""
    vector = 16 // itemsize
    chunk = vector * loads * dispatch.LANES
    while n % chunk:
        chunk //= 2
    return chunk, min(vector, chunk // dispatch.LANES)
