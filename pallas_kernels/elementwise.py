"""Shared code of elementwise kernels, which may also return the largest magnitudes of their values.

Arrays are flattened and split into chunks, one per program. Every thread starts its loads of all arrays before it
computes, each 16 bytes of the widest dtype. So the memory is equally busy for 8192 rows or one, for D = 768 or 28672.
The kernel takes a maximum per program; XLA takes the maximum of those, which are less than a thousandth of the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, fp8_format

LARGEST = 2**31  # numbers in an array: chunks are addressed in int32


def serves(x) -> bool:
    """Whether an array can be split into chunks for 128 threads."""
    return 0 < x.size < LARGEST and x.size % dispatch.LANES == 0


NEEDS = f"expected other sizes: the kernel needs a multiple of {dispatch.LANES} numbers, fewer than 2^31"


def run(
    body: Callable,
    arrays: Sequence[jax.Array],
    scalars: Sequence[jax.Array],
    dtypes: Sequence,
    maxima: int,
    op: str,
    interpret: bool,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Runs an elementwise kernel; returns (results, maxima).

    body: (values, scalars, index) -> (results, arrays whose largest magnitudes are wanted), of one chunk. index() is
    the flat index of every number, uint32. results: of the shape of the arrays, with these dtypes. maxima: float32 []
    each; the argument `maxima` is their number.
    """
    shape = arrays[0].shape
    n = arrays[0].size
    chunk, vector = _chunk_and_load(n, max(jnp.dtype(x.dtype).itemsize for x in arrays), 4 if len(arrays) == 1 else 2)
    layout = plgpu.Layout.WG_STRIDED((chunk,), vec_size=vector)

    def kernel(*refs):
        i = jax.lax.axis_index("chunks")
        at = pl.ds(i * chunk, chunk)
        inputs, refs = refs[: len(arrays)], refs[len(arrays) :]
        numbers, refs = refs[: len(scalars)], refs[len(scalars) :]

        def index():
            within = plgpu.broadcasted_iota(jnp.uint32, (chunk,), 0, layout=layout)
            return within + (i * chunk).astype(jnp.uint32)

        values = [plgpu.load(ref.at[at], layout=layout, optimized=False) for ref in inputs]
        results, tops = body(values, [ref[0] for ref in numbers], index)
        for ref, result in zip(refs[: len(dtypes)], results, strict=True):
            ref[at] = result
        for ref, top in zip(refs[len(dtypes) :], tops, strict=True):
            ref[i] = jnp.max(fp8_format.ordered(top))

    grid = (n // chunk,)
    out = [jax.ShapeDtypeStruct((n,), dtype) for dtype in dtypes] + [jax.ShapeDtypeStruct(grid, jnp.int32)] * maxima
    operands = (*(x.reshape(n) for x in arrays), *(x.reshape(1) for x in scalars))
    outputs = dispatch.launch(kernel, operands, op=op, out=out, grid=grid, names=("chunks",), interpret=interpret)
    results = outputs[: len(dtypes)]
    tops = outputs[len(dtypes) :]
    return [y.reshape(shape) for y in results], [fp8_format.from_ordered(jnp.max(top)) for top in tops]


def _chunk_and_load(n: int, itemsize: int, loads: int) -> tuple[int, int]:
    """(numbers per chunk, numbers per load of a thread): 16 bytes per load if n can be divided so."""
    vector = 16 // itemsize
    chunk = vector * loads * dispatch.LANES
    while n % chunk:
        chunk //= 2
    return chunk, min(vector, chunk // dispatch.LANES)
