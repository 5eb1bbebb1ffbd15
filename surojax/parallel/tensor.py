"""Tensor parallelism inside a block: the two collectives between products whose matrices are divided over devices.

The devices of a tensor-parallel group have the same sequences. Each has a part of the heads and of the MLP's width,
and between the products, where norms and residual additions are, a part of every sequence (Megatron-LM: Shoeybi et al.
2019, arXiv:1909.08053; sequence parallelism: Korthikanti et al. 2022, arXiv:2205.05198):

    x `[B, s, D]` --all-gather--> `[B, S, D]` --wq, wk, wv, w_gate, w_up--> this device's heads or width
      --wo, w_down--> this device's term of the sum, `[B, S, D]` --reduce-scatter--> `[B, s, D]`

Reverse mode of each is the other. Parameters that all devices of a group share (norms, and the keys' and values'
matrices with fewer heads than devices) do not vary over it in the types of `jax.shard_map(check_vma=True)`. So reverse
mode sums their gradients over the group, and no sum is written by hand.

Products in float8 (models/linear_fp8.py) gather operands in 8 bits, quantised with one scale for the group: that of the
largest magnitude on any of its devices, as on one device.

Outside of a mesh with these axes nothing is communicated. Shape suffixes: B batch, S sequence, s this device's part of
the sequence, D hidden size.
"""

import jax

from pallas_kernels.manual_axes import varying_axes
from surojax.parallel.collectives import active, as_bits, device_number, from_bits
from surojax.placement.layout import MESH_AXES
from surojax.placement.mesh import TENSOR


def is_divided(axis: str) -> bool:
    """True if each device computes products with a part of this logical axis of a matrix."""
    return bool(active(*MESH_AXES[axis]))


def own_part(x_BS: jax.Array) -> jax.Array:
    """This device's part of sequences that all devices of its group have: `[B, s]`."""
    number, devices = device_number(*TENSOR)
    if devices == 1:
        return x_BS
    length = x_BS.shape[1] // devices
    return jax.lax.dynamic_slice_in_dim(x_BS, number * length, length, 1)


def all_gather_sequence(x_BsD: jax.Array) -> jax.Array:
    """All-gathers whole sequences from the parts of a tensor-parallel group's devices."""
    axes = active(*TENSOR)
    return jax.lax.all_gather(x_BsD, axes, axis=1, tiled=True) if axes else x_BsD


def reduce_scatter_sequence(y_BSD: jax.Array) -> jax.Array:
    """Reduce-scatters over a tensor-parallel group: this device's part of the summed sequences."""
    axes = active(*TENSOR)
    return jax.lax.psum_scatter(y_BSD, axes, scatter_dimension=1, tiled=True) if axes else y_BSD


def all_gather_bits(x_BsD: jax.Array) -> jax.Array:
    """All-gathers sequences of 8-bit numbers, typed as equal on all devices of the group."""
    axes = active(*TENSOR)
    if not axes:
        return x_BsD
    bits = jax.lax.all_gather(as_bits(x_BsD), axes, axis=1, tiled=True, to="invarying")
    return from_bits(bits, x_BsD.dtype)


def in_group() -> bool:
    """True if devices share the products of a sequence."""
    return bool(active(*TENSOR))


def largest_of_group(x: jax.Array) -> jax.Array:
    """The elementwise maximum over the devices of a group that x varies over."""
    axes = tuple(a for a in TENSOR if a in varying_axes(x))
    return jax.lax.pmax(x, axes) if axes else x
