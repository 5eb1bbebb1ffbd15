"""Launches kernels of Pallas' Triton backend, for what Pallas' Mosaic does not multiply on every GPU since sm_80.

JAX has announced that it will remove this backend. AVAILABLE is False where it is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import for_nvidia_gpu
from pallas_kernels.manual_axes import mark_same, mark_varying, varying_axes

try:
    from jax.experimental.pallas import triton as backend
except ImportError:
    backend: Any = None
AVAILABLE = backend is not None


def launch(
    kernel: Callable,
    operands: Sequence[jax.Array],
    *,
    op: str,
    name: str,
    inputs: Sequence[pl.BlockSpec],
    out: Sequence[jax.ShapeDtypeStruct],
    outputs: Sequence[pl.BlockSpec],
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    flops: int,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Runs the kernel `name` of an op over a grid.

    inputs, outputs: blocks of operands and results. out: shapes of the results. warps: of a program. stages: of loops,
    which load for so many iterations at a time. flops: of all programs' products; the compiled program has this number
    beside the call, where plans read it.

    Inside `jax.shard_map(check_vma=True)` all results vary over the mesh axes that any operand varies over. Raises
    Unserved if it runs on, or is lowered for, a device that is not an NVIDIA GPU.
    """
    varying = frozenset().union(*map(varying_axes, operands))
    operands = [mark_same(x, varying) for x in operands]
    if not interpret:
        operands[0] = for_nvidia_gpu(operands[0], op)
    same = jax.sharding.ManualAxisType(varying=frozenset())
    out = [jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=same) for s in out]
    params = None if interpret else backend.CompilerParams(num_warps=warps, num_stages=stages)
    run = pl.pallas_call(
        kernel, grid=grid, in_specs=list(inputs), out_specs=list(outputs), out_shape=out, interpret=interpret,
        compiler_params=params, name=f"{op}_{name}", metadata={"flops": str(flops)},
    )  # fmt: skip
    with jax.named_scope(op):
        results = run(*operands)
    return tuple(mark_varying(x, varying) for x in results)
