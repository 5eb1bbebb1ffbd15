"""Matrix products of tiles in registers, for kernels that multiply on tensor cores of every GPU since sm_80.

Tensor cores read their second operand with neighbours of the summed dimension in one register, so both operands of a
product are read from arrays in which the summed dimension is the last one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tiles

f32 = jnp.float32
i32 = jnp.int32
ROWS = 64  # of a program's tile: 16 for each of its four warps

# For kernels that pass nothing between threads and read nothing that they have written. Layouts of products are only
# accepted as they are by the semantics of single lanes.
WITHOUT_BARRIERS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


class Products:
    """Matrix products of tiles in registers by the instruction that every GPU since sm_80 has (mma.sync).

    A product's result has the layout `sums`, its operands have layouts of their own. Pallas' interpreter has neither
    these layouts nor the instruction, and computes the same in float32.
    """

    def __init__(self, dtype, interpret: bool):
        self.dtype = dtype
        self.interpret = interpret
        self.left = plgpu.Layout.MMA_LHS(dtype)
        self.right = plgpu.Layout.MMA_RHS(dtype)
        self.sums = plgpu.Layout.MMA_ACC(dtype)

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
        return plgpu.mma(total, left, right)

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
