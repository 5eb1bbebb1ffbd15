"""How a tile of an array is spread over the 128 threads of a program: the register layouts of the row-wise kernels.

Mosaic's default layout (WG_STRIDED) wants a multiple of 128 elements and reduces a tile only to one number. A tiled
layout says for each dimension how many warps and lanes share it, and how many neighbours in the last one a thread
holds in a vector. So rows go to their own warps where they are short (no barrier in a reduction over a row), loads are
16 bytes wide where the width allows it, and widths such as 80, 576 or 1000 need neither masks nor tails.
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
MOST = 128  # float32 values of a row that a thread can hold and still have registers to compute with
COMFORTABLE = 32  # from here on more programs fit on a multiprocessor than are needed to hide the memory's latency


class Rows(NamedTuple):
    """A tile of whole rows: `[rows, width]`, its layout, and the number of tiles that cover the array."""

    rows: int
    layout: Any
    tiles: int


def layout(warps: Sequence[int], lanes: Sequence[int], vector: int):
    """The layout in which dimension i is shared by warps[i] warps and lanes[i] lanes, each with vectors in the last.

    A tile's dimensions are multiples of warps[i] * lanes[i], the last one of that times vector.
    """
    inner = (*lanes[:-1], lanes[-1] * vector)
    outer = tuple(w * n for w, n in zip(warps, inner, strict=True))
    tiling = plgpu.Tiling((outer, inner, (vector,))).canonicalize()
    # Mosaic takes the canonical form only, which drops some dimensions of size 1: find the places of the others.
    kept = list(tiling.tile_shape(outer)[len(outer) :])
    places, last = [], len(kept)
    for size in reversed((*warps, *lanes, vector)):
        if last and kept[last - 1] == size:
            last -= 1
            places.append(last - len(kept))
        else:
            places.append(None)
    places = places[::-1]
    shared = lambda sizes, at: tuple(p for p, size in zip(at, sizes, strict=True) if size > 1)
    n = len(warps)
    return plgpu.Layout.TILED(tiling, shared(warps, places[:n]), shared(lanes, places[n : 2 * n]), places[-1])


def rows(op: str, count: int, width: int, dtype, added: bool = False) -> Rows:
    """How `[count, width]` is cut. Raises Unserved where no layout serves it.

    As few warps share a row as leave each thread at most COMFORTABLE values, and short rows share a warp. added: the
    rows of a tile are added up in float32, which Mosaic does across warps for vectors of at most 4.
    """
    found = []
    for vector in (2**i for i in range(5) if 2**i * jnp.dtype(dtype).itemsize <= 16):
        for warps in (1, 2, 4):
            lanes = math.gcd(LANES, width // (warps * vector)) if width % (warps * vector) == 0 else 0
            if not lanes or (warps > 1 and lanes < LANES):
                continue
            if added and warps < WARPS and vector > 4:
                continue
            each, held = WARPS // warps * (LANES // lanes), width // (warps * lanes)
            if held <= MOST and each <= count:
                found.append((held > MOST // 2, -vector, max(held, COMFORTABLE), warps, lanes, each, held))
    if not found:
        kind = jnp.dtype(dtype).name
        raise Unserved(
            f"{op}: expected a width that 128 threads can share and more rows, got {count} rows of {width} {kind}"
        )
    _, vector, _, warps, lanes, each, held = min(found)
    more = 1
    while held * more * 2 <= COMFORTABLE and each * more * 2 <= count:
        more *= 2
    how = layout((WARPS // warps, warps), (LANES // lanes, lanes), -vector)
    return Rows(each * more, how, -(-count // (each * more)))


class Heads(NamedTuple):
    """A tile of several heads of several positions, `[positions, heads, width]`: `heads` of one tensor times `more`."""

    positions: int
    heads: int
    layout: Any
    more: int


def heads(op: str, length: int, counts: Sequence[int], width: int, dtype) -> Heads:
    """How tensors `[length, count, width]` with these counts of heads are cut. Raises Unserved if not.

    Threads that the width leaves over go to heads first, then to neighbouring positions. Heads that the last tile of a
    position does again cost time, many positions leave few programs, narrow vectors need more instructions.
    """
    found = []
    for vector in (2**i for i in range(5) if 2**i * jnp.dtype(dtype).itemsize <= 16 and width % 2**i == 0):
        lanes = math.gcd(LANES, width // vector)
        spare = LANES // lanes
        for each in (2**i for i in range(8) if 2**i <= min(*counts, WARPS * spare)):
            positions, held = WARPS * spare // each, width // lanes
            if positions <= length and held <= COMFORTABLE:
                again = sum(-(-n // each) * each for n in counts) / sum(counts)
                found.append((again * (1 + positions / 32) * (1 + 1 / vector), vector, lanes, spare, each, positions))
    if not found:
        raise Unserved(
            f"{op}: expected more positions or heads for 128 threads, got {length} positions, {tuple(counts)} heads of "
            f"2 x {width} {jnp.dtype(dtype).name}"
        )
    _, vector, lanes, spare, each, positions = min(found)
    of_lanes = min(spare, each)
    how = layout((positions * of_lanes // spare, each // of_lanes, 1), (spare // of_lanes, of_lanes, lanes), vector)
    return Heads(positions, each, how, max(1, COMFORTABLE // 2 * lanes // width))


def try_cut(implementation: Implementation, cut: Callable, op: str, *sizes):
    """cut(op, *sizes), or None where no layout serves them: see `dispatch.left_to_xla`."""
    try:
        return cut(op, *sizes)
    except Unserved as error:
        dispatch.left_to_xla(implementation, error)
        return None


def load(ref, at, how) -> jax.Array:
    """What ref holds at an index of its leading dimensions."""
    return plgpu.load(ref.at[at], layout=how, optimized=False)


def store(ref, at, value) -> None:
    """Write value to ref at an index; jax 0.12 wants to be told that a warp may write less than a sector."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref.at[at], value, optimized=False)
    else:  # jax 0.11
        ref[at] = value


def tile_at(i, size: int, count: int):
    """Where tile i begins and its slice. The last one is moved up to end with the array: it does rows again."""
    start = jnp.minimum(i * size, count - size)
    return start, pl.ds(start, size)
