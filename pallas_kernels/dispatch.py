"""Which implementation of an op runs, and how a Pallas Mosaic GPU kernel is started.

`implementation` of every public op is None, "mosaic" (the kernel) or "xla" (the reference, in jnp, on any device).
None takes the kernel where the program is for an NVIDIA GPU that the kernels serve (`jax.default_device`, which also
names the GPU that a machine without one compiles for, else the default backend), and the reference elsewhere; on
a GPU that they do not serve it says so once. ValueError is "the caller is wrong"; `Unserved`, which is one too, "this
kernel cannot", and is raised where the kernel was asked for.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

Implementation = Literal["mosaic", "xla"] | None
IMPLEMENTATIONS = (None, "mosaic", "xla")
OLDEST, NEWEST = (8, 0), (12, 1)  # compute capabilities that the kernels are compiled for in the tests
LANES = 128  # threads of a program, one warp group: vectors are cut into multiples of it


class Unserved(NotImplementedError, ValueError):
    """What the kernel of an op was asked for and cannot do: which op, what it expects and what it got."""


def choose(op: str, implementation: Implementation) -> Literal["mosaic", "xla"]:
    """The implementation to run. Raises ValueError for an unknown one."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: implementation: expected one of {IMPLEMENTATIONS}, got {implementation!r}")
    return implementation or automatic(jax.config.jax_default_device)  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def automatic(device: Any = None) -> Literal["mosaic", "xla"]:
    """What `implementation=None` means in programs for a device or platform; None: for the first device there is."""
    if device is None or isinstance(device, str):
        if (device or jax.default_backend()) not in ("gpu", "cuda"):
            return "xla"
        device = jax.devices(device)[0]
    elif device.platform != "gpu":
        return "xla"
    found = capability(device)
    if found and OLDEST <= found <= NEWEST:
        return "mosaic"
    warnings.warn(
        f"pallas_kernels: {device.device_kind} (compute capability {getattr(device, 'compute_capability', None)}) is "
        f"not one that the kernels serve ({OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}); using XLA's instead",
        stacklevel=3,
    )
    return "xla"


def capability(device: Any) -> tuple[int, int] | None:
    """(9, 0) of an NVIDIA GPU that says "9.0" or "9.0a"; None of any other device: CPUs, AMD's GPUs ("gfx942")."""
    found = re.fullmatch(r"(\d+)\.(\d+)[a-z]?", str(getattr(device, "compute_capability", None)))
    return (int(found[1]), int(found[2])) if found else None


def launch(
    kernel: Callable,
    operands: tuple,
    *,
    out: Any,
    grid: tuple[int, ...],
    names: tuple[str, ...],
    interpret: bool,
    **more,
):
    """Run a kernel over a grid, 128 threads a program; `operands` are arrays, or refs that it writes in place.

    out: `jax.ShapeDtypeStruct`s of what it returns. Inside `jax.shard_map(check_vma=True)` the results vary over the
    mesh axes that any operand varies over.
    """
    varying = frozenset().union(*(_varying(x) for x in operands))
    if varying:
        kind = jax.sharding.ManualAxisType(varying=varying)
        out = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=kind), out)
    params = more.pop("compiler_params", plgpu.CompilerParams())
    mode = plgpu.InterpretGPUParams() if interpret else None
    run = plgpu.kernel(
        kernel, out_type=out, grid=grid, grid_names=names, compiler_params=params, interpret=mode, **more
    )
    return jax.tree.map(lambda result: _vary(result, varying), run(*operands))


def _vary(x, axes: frozenset[str]):
    """x, varying over these mesh axes too: jax 0.12's `plgpu.kernel` drops what out_type says of it."""
    missing = tuple(sorted(axes - _varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _varying(x) -> frozenset[str]:
    return getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", None) or frozenset()


def need(ok: bool, op: str, what: str, expected: Any, got: Any) -> None:
    """Raises ValueError saying what was expected and what was given."""
    if not ok:
        raise ValueError(f"{op}: {what}: expected {expected}, got {got}")


def largest(dtype) -> float:
    """The largest finite number of a dtype that values are scaled to."""
    return float(jnp.finfo(dtype).max)
