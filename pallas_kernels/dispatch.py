"""Chooses the implementation of an op, and launches Pallas Mosaic GPU kernels.

`implementation` of every public op is None, "mosaic" (the kernel) or "xla" (the reference, in jnp, on any device). None
chooses the kernel if the program is for an NVIDIA GPU that the kernels support, else the reference. The program's
device is `jax.default_device`, which a machine without a GPU sets to the GPU that it compiles for, or else that of the
default backend. If the kernel does not support a GPU or a shape, None warns once. ValueError means "the caller is
wrong". Its subclass `Unserved` means "this kernel cannot do it", and is raised if the caller asked for the kernel.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from pallas_kernels.manual_axes import mark_same, mark_varying, varying_axes

Implementation = Literal["mosaic", "xla"] | None
IMPLEMENTATIONS = (None, "mosaic", "xla")
OLDEST, NEWEST = (8, 0), (12, 1)  # compute capabilities that the kernels are compiled for in the tests
LIBRARIES = tuple(os.path.dirname(file) for file in (__file__, jax.__file__))
LANES = 128  # threads of a program, one warp group: lengths of vectors are multiples of it


class Unserved(NotImplementedError, ValueError):
    """An op's kernel does not support the arguments; the message has the op, the expected and the actual value."""


def choose(op: str, implementation: Implementation) -> Literal["mosaic", "xla"]:
    """The implementation to run. Raises ValueError for an unknown one."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: implementation: expected one of {IMPLEMENTATIONS}, got {implementation!r}")
    return implementation or automatic(jax.config.jax_default_device)  # pyright: ignore[reportAttributeAccessIssue]


def target() -> Any:
    """The device that a program is for."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return jax.devices(device)[0] if device is None or isinstance(device, str) else device


@functools.cache
def automatic(device: Any = None) -> Literal["mosaic", "xla"]:
    """The implementation that `implementation=None` selects on a device or platform; None: on the first device."""
    if device is None or isinstance(device, str):
        if (device or jax.default_backend()) not in ("gpu", "cuda"):
            return "xla"
        device = jax.devices(device)[0]
    elif device.platform != "gpu":
        return "xla"
    version = capability(device)
    if version and OLDEST <= version <= NEWEST:
        return "mosaic"
    _say_once(
        f"pallas_kernels: {device.device_kind} (compute capability {getattr(device, 'compute_capability', None)}) is "
        f"not one that the kernels serve ({OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}); using XLA's instead"
    )
    return "xla"


def runs_kernel(op: str, implementation: Implementation, fits: bool, expected: str, got: Any) -> bool:
    """Returns True if the kernel runs; `left_to_xla` has what happens if its inputs do not fit.

    expected: "expected ...", the inputs that fit.
    """
    if choose(op, implementation) == "xla":
        return False
    if not fits:
        left_to_xla(implementation, Unserved(f"{op}: {expected}, got {got}"))
    return fits


def left_to_xla(implementation: Implementation, error: Unserved) -> None:
    """Warns once that the reference runs, and why; raises Unserved if the caller asked for the kernel."""
    if implementation == "mosaic":
        raise Unserved(f"{error}; use implementation=None or 'xla'") from None
    _say_once(f"{error}; using XLA's instead")


@functools.cache
def _say_once(message: str) -> None:
    """Warns about the caller's line, once per message."""
    warnings.warn(message, skip_file_prefixes=LIBRARIES)


def capability(device: Any) -> tuple[int, int] | None:
    """Compute capability: (9, 0) for an NVIDIA GPU's "9.0" or "9.0a"; None for CPUs and AMD's GPUs ("gfx942")."""
    match = re.fullmatch(r"(\d+)\.(\d+)[a-z]?", str(getattr(device, "compute_capability", None)))
    return (int(match[1]), int(match[2])) if match else None


def launch(
    kernel: Callable,
    operands: tuple,
    *,
    op: str,
    out: Any,
    grid: tuple[int, ...],
    names: tuple[str, ...],
    interpret: bool,
    over: Any = (),
    **more,
):
    """Runs an op's kernel over a grid, with 128 threads per program.

    out: `jax.ShapeDtypeStruct`s of the results. over: indices of the operands that the kernel writes over; the results
    are then a list that starts with their new values. Inside `jax.shard_map(check_vma=True)` all results vary over the
    mesh axes that any operand varies over. Raises Unserved if it runs on, or is lowered for, a device that is not an
    NVIDIA GPU.
    """
    if not interpret:
        operands = (for_nvidia_gpu(operands[0], op), *operands[1:])
    varying = frozenset().union(*(varying_axes(x) for x in operands))
    # JAX has no references to values that vary over mesh axes: such operands are typed as not varying, the results as
    # varying.
    refs = {i: jax.new_ref(mark_same(operands[i], varying)) for i in over}
    if varying:
        kind = jax.sharding.ManualAxisType(varying=varying)
        out = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=kind), out)
    params = more.pop("compiler_params", plgpu.CompilerParams())
    mode = plgpu.InterpretGPUParams() if interpret else None
    run = plgpu.kernel(
        kernel, out_type=out, grid=grid, grid_names=names, compiler_params=params, interpret=mode, **more
    )
    with jax.named_scope(op):
        results = run(*(refs.get(i, x) for i, x in enumerate(operands)))
    if refs:
        results = [*(ref[...] for ref in refs.values()), *(results or ())]
    # jax 0.12's `plgpu.kernel` drops the axes of out_type.
    return jax.tree.map(lambda x: mark_varying(x, varying), results)


# The identity of an array. If a program is lowered for a device without the kernels, it raises an error that names the
# op, which JAX's own error does not. Only lowering knows the device, since a program may be traced on another machine.
_for_gpu = Primitive("for_nvidia_gpu")
_for_gpu.def_abstract_eval(lambda x, *, op: x)
batching.defvectorized(_for_gpu)


def for_nvidia_gpu(x: jax.Array, op: str) -> jax.Array:
    """Returns x. Raises Unserved if the program runs on, or is lowered for, a device that is not an NVIDIA GPU."""
    return _for_gpu.bind(x, op=op)


@_for_gpu.def_impl
def _run_here(x, *, op: str):
    for device in jnp.asarray(x).devices():
        if capability(device) is None:
            raise _not_here(op, device.device_kind)
    return x


def _lower_elsewhere(context, x, *, op: str):
    raise _not_here(op, ", ".join(context.module_context.platforms))


def _not_here(op: str, got: str) -> Unserved:
    return Unserved(f"{op}: device: expected an NVIDIA GPU, or interpret=True for Pallas' interpreter, got {got}")


mlir.register_lowering(_for_gpu, _lower_elsewhere)
mlir.register_lowering(_for_gpu, lambda context, x, *, op: [x], platform="cuda")


def expect(ok: bool, op: str, what: str, expected: Any, got: Any) -> None:
    """Raises ValueError with the expected and the actual value unless `ok`."""
    if not ok:
        raise ValueError(f"{op}: {what}: expected {expected}, got {got}")


def largest(dtype) -> float:
    """The largest finite number of a dtype."""
    return float(jnp.finfo(dtype).max)
