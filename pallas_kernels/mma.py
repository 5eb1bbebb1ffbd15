"""Matrix products of tiles in registers, for kernels that multiply on tensor cores of every GPU since sm_80.

Tensor cores read their second operand with neighbours of the summed dimension in one register, so both operands of a
product are read from arrays in which the summed dimension is the last one.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels import tiles

f32 = jnp.float32
i32 = jnp.int32
ROWS = 64  # of a program's tile: 16 for each of its four warps

# For kernels that pass nothing between threads and read nothing that they have written. Layouts of products are only
# accepted as they are by the semantics of single lanes.
WITHOUT_BARRIERS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


FLOAT8 = {jnp.dtype(jnp.float8_e4m3fn): "e4m3", jnp.dtype(jnp.float8_e5m2): "e5m2"}  # formats' names in PTX


def _plus_tile(instruction: str, total, left, right):
    """total + left @ right of one tile by an instruction of each warp.

    A thread has 4 registers of 32 bits of the sums, 4 of left, and 2 of right.
    """
    word, number = ir.IntegerType.get_signless(32), ir.F32Type.get()
    pair = ir.VectorType.get((2,), number)
    pairs = list(total.registers.flat)
    sums = [vector.extract(x, dynamic_position=[], static_position=[i]) for x in pairs for i in range(2)]
    words = [utils.bitcast(x, word) for operand in (left, right) for x in operand.registers.flat]
    assert (len(words), len(sums)) == (6, 4), (len(words), len(sums))
    names = iter(f"${i}" for i in range(14))
    operands = ", ".join(f"{{{', '.join(itertools.islice(names, length))}}}" for length in (4, 4, 2, 4))
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    kind = llvm.StructType.get_literal([number] * 4)
    found = llvm.inline_asm(kind, [*words, *sums], f"{instruction} {operands};", constraints, has_side_effects=False)
    new = [llvm.extractvalue(number, found, [i]) for i in range(4)]
    registers = np.empty(len(pairs), dtype=object)
    registers[:] = [vector.from_elements(pair, new[:2]), vector.from_elements(pair, new[2:])]
    return mosaic.FragmentedArray(
        _registers=registers.reshape(total.registers.shape), _layout=total.layout, _is_signed=total.is_signed
    )


class Products:
    """Matrix products of tiles in registers by the instruction that every GPU since sm_80 has (mma.sync).

    dtype: of both operands. right_dtype: of the right one, if its format of 8 bits is another (since sm_89). A
    product's result has the layout `sums`, its operands have layouts of their own. Pallas' interpreter has neither
    these layouts nor the instruction, and computes the same in float32.
    """

    def __init__(self, dtype: Any, interpret: bool, right_dtype: Any = None):
        self.dtype = jnp.dtype(dtype)
        self.right_dtype = jnp.dtype(right_dtype or dtype)
        self.interpret = interpret
        self.left = plgpu.Layout.MMA_LHS(self.dtype)
        self.right = plgpu.Layout.MMA_RHS(self.right_dtype)
        self.sums = plgpu.Layout.MMA_ACC(self.dtype)

    def filled(self, value: float, *shape: int) -> jax.Array:
        """A float32 tile `[rows, columns]`, or a vector `[rows]`, of one value."""
        layout = self.sums if len(shape) == 2 else self.sums.reduce(1)
        x = jnp.full(shape, value, f32)
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def index(self, shape: tuple[int, int], axis: int) -> jax.Array:
        """Indices along an axis of a tile, int32."""
        if self.interpret:
            return jax.lax.broadcasted_iota(i32, shape, axis)
        return plgpu.broadcasted_iota(i32, shape, axis, layout=self.sums)

    def rows(self, ref, at) -> jax.Array:
        """The tile ref[at] `[rows, summed]` as a left operand."""
        return tiles.load(ref, at, self.left)

    def columns(self, ref, at) -> jax.Array:
        """The tile ref[at] `[columns, summed]` as a right operand `[summed, columns]`."""
        if self.interpret:
            return ref[at].T
        return plgpu.load(ref.at[at].transpose((1, 0)), layout=self.right, optimized=False)

    def vector(self, ref, at, axis: int) -> jax.Array:
        """A vector with a value for each row (axis 0) or column (axis 1) of a tile."""
        return tiles.load(ref, at, self.sums.reduce(1 - axis))

    def plus(self, total, left, right) -> jax.Array:
        """total + left @ right, float32."""
        if self.interpret:
            return total + jnp.dot(left.astype(f32), right.astype(f32))
        if self.dtype != self.right_dtype:
            return self._plus_of_two_formats(total, left, right)
        return plgpu.mma(total, left, right)

    def _plus_of_two_formats(self, total, left, right) -> jax.Array:
        """total + left @ right for operands of two 8-bit formats, which `plgpu.mma` does not take."""
        out = plgpu.ShapeDtypeStruct(total.shape, jnp.dtype(f32), layout=self.sums)
        instruction = f"mma.sync.aligned.m16n8k32.row.col.f32.{FLOAT8[self.dtype]}.{FLOAT8[self.right_dtype]}.f32"

        @plgpu.inline_mgpu(arg_types=(self.sums, self.left, self.right), return_type=out)
        def all_tiles(_, total, left, right):
            sums = total.copy()
            (rows, depth), columns = left.layout.base_tile_shape, right.layout.base_tile_shape[1]
            corners = (
                range(0, size, step)
                for size, step in zip((*left.shape, right.shape[1]), (rows, depth, columns), strict=True)
            )
            for i, k, j in itertools.product(*corners):
                at = slice(i, i + rows), slice(j, j + columns)
                summed = slice(k, k + depth)
                sums[at] = _plus_tile(instruction, sums[at], left[at[0], summed], right[summed, at[1]])
            return sums

        return all_tiles(total, left, right)  # pyright: ignore[reportCallIssue]

    def operand(self, x) -> jax.Array:
        """A result of a product, rounded, as a left operand. Each thread has the same numbers in the same order."""
        x = x.astype(self.dtype)
        if self.interpret:
            return x

        @plgpu.inline_mgpu(
            arg_types=(self.sums,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=self.left)
        )
        def as_left(_, array):
            layout = self.left.to_mgpu()
            registers = array.registers.reshape(layout.registers_shape(array.shape))
            return mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=array.is_signed)

        return as_left(x)  # pyright: ignore[reportCallIssue]
