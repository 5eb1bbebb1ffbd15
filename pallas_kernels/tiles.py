"""Register layouts of the row-wise kernels: how a tile of an array is divided among the 128 threads of a program.

Mosaic's default layout (WG_STRIDED) needs a multiple of 128 elements, and can only reduce a tile to one number. A tiled
layout says for each dimension how many warps and lanes share it, and for the last dimension how many neighbours a
thread has in a vector. So a short row can belong to one warp (a reduction over it needs no barrier), loads are 16 bytes
if the width allows it, and widths such as 80, 576 or 1000 need neither masks nor remainders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation, Unserved

WARPS, LANES = 4, 32  # of a program
MOST = 128  # most float32 values of a row per thread that leave enough registers for the computation
COMFORTABLE = 32  # with so many or fewer, enough programs fit on a multiprocessor to hide the latency of memory


class RowTile(NamedTuple):
    """A tile of full rows `[rows, width]`: its height, its layout, and the number of tiles that cover the array."""

    rows: int
    layout: Any
    tiles: int


def layout(warps: Sequence[int], lanes: Sequence[int], vector: int):
    """The layout in which warps[i] warps with lanes[i] lanes each share dimension i; vector: length in the last one.

    Dimension i of a tile is a multiple of warps[i] * lanes[i], the last one of warps[i] * lanes[i] * vector.
    """
    inner = (*lanes[:-1], lanes[-1] * vector)
    outer = tuple(w * n for w, n in zip(warps, inner, strict=True))
    tiling = plgpu.Tiling((outer, inner, (vector,))).canonicalize()
    # Mosaic accepts the canonical form only, which drops some dimensions of size 1: find the others in it.
    kept = list(tiling.tile_shape(outer)[len(outer) :])
    places = []
    last = len(kept)
    for size in reversed((*warps, *lanes, vector)):
        if last and kept[last - 1] == size:
            last -= 1
            places.append(last - len(kept))
        else:
            places.append(None)
    places = places[::-1]

    def shared(sizes, positions):
        return tuple(p for p, size in zip(positions, sizes, strict=True) if size > 1)

    n = len(warps)
    return plgpu.Layout.TILED(tiling, shared(warps, places[:n]), shared(lanes, places[n : 2 * n]), places[-1])


def row_tiles(op: str, count: int, width: int, dtype, added: bool) -> RowTile:
    """The tiles of an array `[count, width]`. Raises Unserved if there is no layout for it.

    The fewest warps share a row with which a thread has at most COMFORTABLE values of it; short rows share a warp.
    added: the kernel sums the rows of a tile in float32, which Mosaic does across warps for vectors of at most 4 only.
    """
    fits = []
    for vector in (2**i for i in range(5) if 2**i * jnp.dtype(dtype).itemsize <= 16):
        for warps in (1, 2, 4):
            lanes = math.gcd(LANES, width // (warps * vector)) if width % (warps * vector) == 0 else 0
            if not lanes or (warps > 1 and lanes < LANES):
                continue
            if added and warps < WARPS and vector > 4:
                continue
            height = WARPS // warps * (LANES // lanes)  # rows that the threads have at once
            values = width // (warps * lanes)  # of a row in each thread
            if values <= MOST and height <= count:
                fits.append((values > MOST // 2, -vector, max(values, COMFORTABLE), warps, lanes, height, values))
    if not fits:
        kind = jnp.dtype(dtype).name
        raise Unserved(
            f"{op}: expected a width that 128 threads can share and more rows, got {count} rows of {width} {kind}"
        )
    _, vector, _, warps, lanes, height, values = min(fits)
    more = 1
    while values * more * 2 <= COMFORTABLE and height * more * 2 <= count:
        more *= 2
    how = layout((WARPS // warps, warps), (LANES // lanes, lanes), -vector)
    return RowTile(height * more, how, -(-count // (height * more)))


class HeadTile(NamedTuple):
    """A tile `[positions, heads, width]` of one tensor; it can have up to `more` times as many heads."""

    positions: int
    heads: int
    layout: Any
    more: int


def heads(op: str, length: int, counts: Sequence[int], width: int, dtype) -> HeadTile:
    """The tile of tensors `[length, count, width]` for these counts of heads. Raises Unserved if there is none.

    Threads that the width does not use are used for heads first, then for neighbouring positions. The choice weighs
    three costs: heads that the last tile of a position computes again; many positions per program, which leave few
    programs; and narrow vectors, which need more instructions.
    """
    fits = []
    for vector in (2**i for i in range(5) if 2**i * jnp.dtype(dtype).itemsize <= 16 and width % 2**i == 0):
        lanes = math.gcd(LANES, width // vector)
        spare = LANES // lanes
        for group in (2**i for i in range(8) if 2**i <= min(*counts, WARPS * spare)):
            positions = WARPS * spare // group
            if positions <= length and width // lanes <= COMFORTABLE:
                again = sum(-(-n // group) * group for n in counts) / sum(counts)
                fits.append((again * (1 + positions / 32) * (1 + 1 / vector), vector, lanes, spare, group, positions))
    if not fits:
        raise Unserved(
            f"{op}: expected more positions or heads for 128 threads, got {length} positions, {tuple(counts)} heads of "
            f"2 x {width} {jnp.dtype(dtype).name}"
        )
    _, vector, lanes, spare, group, positions = min(fits)
    across = min(spare, group)
    how = layout((positions * across // spare, group // across, 1), (spare // across, across, lanes), vector)
    return HeadTile(positions, group, how, max(1, COMFORTABLE // 2 * lanes // width))


def try_cut(implementation: Implementation, cut: Callable, op: str, *sizes):
    """cut(op, *sizes), or None if there is no layout for these sizes: see `dispatch.left_to_xla`."""
    try:
        return cut(op, *sizes)
    except Unserved as error:
        dispatch.left_to_xla(implementation, error)
        return None


def load(ref, at, how) -> jax.Array:
    """Reads ref at an index of its leading dimensions, in a layout."""
    return plgpu.load(ref.at[at], layout=how, optimized=False)


def store(ref, at, value) -> None:
    """Writes value to ref at an index; jax 0.12 must be told that a warp may write less than a sector of memory."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref.at[at], value, optimized=False)
    else:  # jax 0.11
        ref[at] = value


def tile_at(i, size: int, count: int):
    """(start of tile i, its slice). The last tile ends with the array, so it may overlap the one before."""
    start = jnp.minimum(i * size, count - size)
    return start, pl.ds(start, size)
