"""Operands of block-scaled products of which each device has a part: its columns with tensor parallelism, its tokens
with context parallelism.

Blocks and rotated groups of tokens lie within a part, but two things belong to the whole operand. NVFP4 has one float32
scale for it, which is made of the largest magnitude on any device. And its random numbers are those of places in it, so
that devices with other columns of a gradient do not repeat them. (Devices with other tokens have other seeds.)

With fewer key/value heads than devices, some devices have the same matrix, and each has the gradient that comes from
its own queries. `summed_before_rounding` adds these up before they are rounded.

Shape suffixes as in tensor.py.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import fp8_format
from pallas_kernels.nvfp4_format import OperandPart
from surojax.numerics.blockscaled import Parts
from surojax.parallel.collectives import active, device_number
from surojax.placement.layout import MESH_AXES
from surojax.placement.mesh import CONTEXT, TENSOR


def operand_parts(shape: tuple[int, ...], axes: tuple[str, ...], *, of_one_expert: bool = False) -> Parts:
    """This device's shards of a product's inputs, matrix and outputs.

    shape: `[out, in]` of this device's part of the matrix. axes: its logical axes. of_one_expert: the inputs are rows
    of one expert, and other devices of `cp` have rows of another one meanwhile, or none.
    """
    outputs, inputs = (active(*MESH_AXES[axis]) for axis in axes)
    tokens = () if of_one_expert else active(CONTEXT)
    rows, columns = shape
    return Parts(
        inputs=_part(tokens, inputs, columns),
        matrix=_part(outputs, inputs, columns),
        outputs=_part(tokens, outputs, rows),
    )


def _part(across_rows: tuple[str, ...], across_columns: tuple[str, ...], columns: int) -> OperandPart:
    """This device's shard of an operand whose rows and columns are divided by these axes; columns: of the shard."""
    axes = (*across_rows, *across_columns)
    if not axes:
        return OperandPart()
    return OperandPart(
        functools.partial(_largest, axes),
        columns=columns * device_number(*across_columns)[1],
        first=lambda: jnp.uint32(columns) * jnp.asarray(device_number(*across_columns)[0], jnp.uint32),
    )


def _largest(axes: tuple[str, ...], absmax: jax.Array) -> jax.Array:
    """The elementwise maximum over these axes, NaN if one device has it: as integers, since maxima of floats may lose
    it. `pcast` refuses to trace numbers that still differ between devices.
    """
    bits = jax.lax.pcast(jax.lax.pmax(fp8_format.ordered(absmax), axes), axes, to="varying")
    return fp8_format.from_ordered(bits)


def summed_before_rounding(y: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns y, a product with a matrix of these logical axes; its gradient is summed over devices before rounding.

    If several devices of a group have the same y, the first one's gradient of y is their sum, the others' are zeros.

    The gradients of the product's inputs and of the matrix are summed over the group afterwards.
    """
    outputs, inputs = (MESH_AXES[axis] for axis in axes)
    sharers = tuple(axis for axis in active(*TENSOR) if axis not in outputs)
    return y if active(*inputs) or not sharers else _summed(y, sharers)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _summed(y: jax.Array, sharers: tuple[str, ...]) -> jax.Array:
    return y


def _summed_backward(sharers: tuple[str, ...], _, dy: jax.Array) -> tuple[jax.Array]:
    number, _ = device_number(*sharers)
    return (jnp.where(number == 0, jax.lax.psum(dy, sharers), 0),)


_summed.defvjp(lambda y, sharers: (y, None), _summed_backward)
