"""Data-parallel communication of parameter trees, inside `shard_map`.

A layout (placement/layout.py) says which dimension of an array is sharded over `dp_shard x cp`. An array without such a
dimension is replicated. The devices of `cp` have other tokens of the same sequences: for a matrix that is the same as
other sequences.

Mesh axes of one device are skipped: values are not marked as varying over them and no collective names them. So a
program for one device has no collectives. Collectives of tensor and context parallelism within a block are in tensor.py
and context.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.manual_axes import mark_same, mark_varying, varying_axes
from surojax.errors import ConfigError
from surojax.numerics.base_formats import is_coded, map_arrays
from surojax.numerics.quantized import Quantized, dequantise, has_one_scale, is_quantized, quantise
from surojax.numerics.rounding import materialised
from surojax.placement.layout import Layout
from surojax.placement.mesh import AXES, PIPELINE, SHARDS, TENSOR, TOKENS
from surojax.placement.param import Kind, Param
from surojax.placement.table import Reduce

# Settings that let a GPU's copy engines move data between the GPUs of one machine, so that no multiprocessor is taken
# from the matrix products. Each setting has the XLA options that a step is compiled with.
# memcpy_all_gather: each device writes its shard into the memory of the others with the one-sided ncclPutSignal, which
# NCCL (2.29 and later) runs on the copy engines over NVLink or PCIe (openxla/xla pull requests 41492 and 40594).
# memcpy_send_recv: all-to-all and permute are peer-to-peer copies, if one process drives the GPUs.
COPY_ENGINE: dict[str, dict[str, str | bool]] = {
    "memcpy_all_gather": {"xla_gpu_all_gather_mode": "COLLECTIVES_SYMMETRIC_MEMORY"},
    "memcpy_send_recv": {"xla_gpu_use_memcpy_local_p2p": True},
}


STATE = (PIPELINE, *SHARDS, *TENSOR)  # axes whose devices may store different parts of a tensor


def copy_engine_flags(settings: tuple[str, ...]) -> dict[str, str | bool]:
    """XLA options for these settings of COPY_ENGINE: the argument of `compile(compiler_options=...)` of a step."""
    return {name: value for setting in settings for name, value in COPY_ENGINE[setting].items()}


def check_copy_engine(settings: tuple[str, ...], platform: str) -> None:
    """Raises ConfigError for a setting of COPY_ENGINE that the platform or the installed jax does not support."""
    for setting in settings:
        if platform != "gpu":
            raise ConfigError(f"{setting}: expected false on {platform}, got True; only GPUs have copy engines to use")
        try:
            jax.jit(lambda: 0).lower().compile(compiler_options=copy_engine_flags((setting,)))
        except jax.errors.JaxRuntimeError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{setting}: expected a jax that can do it, got {jax.__version__} ({reason}); leave it out, or install "
                "a version that constraints.txt names"
            ) from error


def active(*axes: str) -> tuple[str, ...]:
    """The axes among these that have more than one device; none outside `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(a for a in axes if a in mesh.manual_axes and mesh.shape[a] > 1)


def device_number(*axes: str) -> tuple[jax.Array | int, int]:
    """(index of this device among the devices of the axes, number of these devices)."""
    number = 0
    count = 1
    for axis in active(*axes):
        number = number * jax.lax.axis_size(axis) + jax.lax.axis_index(axis)
        count = count * jax.lax.axis_size(axis)
    return number, count


def first_layer(layers: int) -> jax.Array | int:
    """The number of the first layer of this device's stage; layers: of each stage."""
    return device_number(PIPELINE)[0] * layers


def varying(tree, axes: tuple[str, ...] = TOKENS):
    """Marks values as varying over the axes, so that reverse mode keeps gradients local instead of summing them."""
    return jax.tree.map(lambda x: mark_varying(x, active(*axes)), tree)


def add_up(tree, *axes: str):
    """Sums each value over the axes among these that it varies over; the sum is equal on all devices of the axes."""

    def summed(x):
        names = tuple(a for a in axes if a in varying_axes(x))
        return jax.lax.psum(x, names) if names else x

    return jax.tree.map(summed, tree)


def same(tree, *axes: str):
    """Types values as equal on all devices of these axes, which the caller guarantees: the opposite of `varying`.

    Needed for sums that were written into an array whose type says that it varies.
    """
    return jax.tree.map(lambda x: mark_same(x, axes), tree)


def behind(x, tree):
    """Returns the arrays of a tree; on several CPU devices, collectives of them wait until x is computed.

    XLA:CPU (jaxlib 0.12) respects an optimization barrier when it schedules a program, but not when it runs it. While
    the collectives of a loop still run, it starts a collective after the loop that does not depend on the loop's
    results. JAX gives all collectives the same channel, so two all-gathers that run at once can receive each other's
    tensors. Here every array is made to depend on x: it is replaced by zeros if x begins with a certain NaN, which no
    arithmetic produces. On GPUs, on one device, and if x has no arrays, the tree is returned unchanged.
    """
    if jax.sharding.get_abstract_mesh().size == 1 or not jax.tree.leaves(x):
        return tree

    def chosen(first, *leaves):
        never = jax.lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32) == 0x7FC0DEAD
        return [jnp.where(mark_varying(never, varying_axes(leaf)), jnp.zeros_like(leaf), leaf) for leaf in leaves]

    first = jax.tree.leaves(x)[0].ravel()[0]
    first = mark_same(first, varying_axes(first))
    leaves, structure = jax.tree.flatten(tree)
    leaves = jax.lax.platform_dependent(first, *leaves, cpu=chosen, default=lambda first, *leaves: list(leaves))
    return structure.unflatten(leaves)


def all_gather(tree, layouts):
    """All-gathers shards over `dp_shard x cp` into the arrays that are computed with.

    A Quantized is sent in 8 bits, a Coded as it rests.
    """

    def gathered(x: jax.Array, layout: Layout) -> jax.Array:
        return jax.lax.all_gather(x, active(*layout.shards), axis=layout.sharded_dim or 0, tiled=True)

    def gathered_as_bits(x: jax.Array, layout: Layout) -> jax.Array:
        return from_bits(gathered(as_bits(x), layout), x.dtype) if x.dtype.itemsize == 1 else gathered(x, layout)

    def gathered_array(layout: Layout, x):
        if layout.sharded_dim is None:
            return x
        if is_quantized(x):
            scales = x.scales if has_one_scale(x) else gathered(x.scales, layout)
            return Quantized(gathered_as_bits(x.values, layout), scales)
        if is_coded(x):
            return map_arrays(x, lambda array: gathered_as_bits(array, layout))
        return gathered(x, layout)

    return varying(jax.tree.map(gathered_array, layouts, tree))


def as_bits(x: jax.Array) -> jax.Array:
    """8-bit numbers as uint8, which no backend converts to a wider dtype to send it."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8)


def from_bits(x: jax.Array, dtype) -> jax.Array:
    """The inverse of `as_bits`."""
    return jax.lax.bitcast_convert_type(x, dtype)


def largest_of_shards(x: jax.Array) -> jax.Array:
    """The elementwise maximum over `dp_shard x cp` and the tensor-parallel group, along the axes that x varies over."""
    return _largest(x, (*SHARDS, *TENSOR))


def largest_of_devices(tree):
    """The elementwise maximum over all devices, equal on every device."""
    return jax.tree.map(lambda x: _largest(x, AXES), tree)


def _largest(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The elementwise maximum over the axes, among these, that x varies over."""
    names = tuple(a for a in axes if a in varying_axes(x))
    return jax.lax.pmax(x, names) if names else x


def reshard(x: jax.Array, stored: Layout, wanted: Layout) -> jax.Array:
    """All-gathers x from its layout `stored` if the layout `wanted` is stored differently.

    A gathered array is typed as equal on all devices of `dp_shard x cp`.
    """
    dim = stored.sharded_dim
    if stored.stored == wanted.stored or dim is None:
        return x
    return jax.lax.all_gather(x, active(*stored.shards), axis=dim, tiled=True, to="invarying")


def reduce_scatter(tree, params, layouts, reduce: Reduce = "reduce_scatter"):
    """Sums arrays over `dp_shard x cp`. Each device keeps its shard of a sharded array, or a replicated one's sum.

    reduce_scatter: one collective that sums in the array's dtype. all_to_all: each device receives the terms of its
    shard from all devices and sums them in float32. int8: all_to_all with matrices sent in 8 bits (ZeRO++'s qgZ in one
    hop).
    """

    def sum_shard(x: jax.Array, layout: Layout):
        dim = layout.sharded_dim
        if dim is None:
            return add_up(x, *layout.shards)
        return jax.lax.psum_scatter(x, active(*layout.shards), scatter_dimension=dim, tiled=True)

    if reduce == "reduce_scatter":
        return jax.tree.map(sum_shard, tree, layouts)

    def terms(x: jax.Array, param: Param, layout: Layout):
        """The terms to send, `[devices, ...]`: number i goes to device i. None for a replicated array."""
        dim = layout.sharded_dim
        if dim is None:
            return None
        shape = (*x.shape[:dim], jax.lax.axis_size(active(*layout.shards)), -1, *x.shape[dim + 1 :])
        parts = jnp.moveaxis(x.reshape(shape), dim, 0)
        if reduce == "int8":
            # Vectors are sent as float32, the dtype of the scales, so that both are one transfer.
            return parts.astype(jnp.float32) if param.kind is Kind.VECTOR else quantise(parts, jnp.int8)
        return parts

    def add_terms(x: jax.Array, layout: Layout, sent):
        if layout.sharded_dim is None:
            return add_up(x, *layout.shards)
        sent = dequantise(sent, jnp.float32) if is_quantized(sent) else sent.astype(jnp.float32)
        return jnp.sum(sent, axis=0).astype(x.dtype)

    def sent(x: jax.Array, param: Param, layout: Layout):
        return _exchange(terms(x, param, layout), layout.shards)

    return jax.tree.map(add_terms, tree, layouts, jax.tree.map(sent, tree, params, layouts))


def reduced_in_order(leaves: Sequence[jax.Array]) -> list[int]:
    """The indices of a layer's gradients in the order in which they are reduced: the largest first."""
    return sorted(range(len(leaves)), key=lambda i: -leaves[i].size)


def reduce_scatter_in_turn(tree, params, layouts, reduce: Reduce):
    """`reduce_scatter` of a layer's gradients, one matrix after another, the largest first.

    Each is in flight while the gradients of the next are computed. The last one has nothing to overlap with, so the
    smallest goes last. Without an order XLA joins some of them, and the last is the one that it computes last.
    """
    leaves, structure = jax.tree.flatten(tree)
    declared = list(zip(jax.tree.leaves(params), jax.tree.leaves(layouts), strict=True))
    reduced: dict[int, jax.Array] = {}
    previous = None
    for i in reduced_in_order(leaves):
        x = leaves[i]
        param, layout = declared[i]
        if previous is not None and param.kind is not Kind.VECTOR:
            x, reduced[previous] = jax.lax.optimization_barrier((x, reduced[previous]))
        reduced[i] = reduce_scatter(x, param, layout, reduce)
        previous = i
    return structure.unflatten([reduced[i] for i in range(len(leaves))])


def _exchange(tree, axes: tuple[str, ...]):
    """All-to-all of arrays `[devices, ...]`: sends part i to device i and receives its part; one transfer per dtype."""
    leaves, structure = jax.tree.flatten(tree)
    received = list(leaves)
    for dtype in sorted({x.dtype for x in leaves}, key=str):
        indices = [i for i, x in enumerate(leaves) if x.dtype == dtype]
        packed = jnp.concatenate([leaves[i].reshape(leaves[i].shape[0], -1) for i in indices], axis=1)
        packed = jax.lax.all_to_all(packed, active(*axes), split_axis=0, concat_axis=0, tiled=True)
        ends = np.cumsum([leaves[i].size // leaves[i].shape[0] for i in indices])
        for i, part in zip(indices, jnp.split(packed, ends[:-1], axis=1), strict=True):
            received[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, received)


class Squares(NamedTuple):
    """Sums of squares of this device's part of a tree, float32: of sharded and of replicated arrays. See `norm`."""

    of_shards: jax.Array
    of_replicated: jax.Array


def sum_of_squares(tree, layouts, *, in_memory: bool = False) -> Squares:
    """The `Squares` of a tree of arrays that are stored with these layouts.

    in_memory: the arrays, or the stacks that they are slices of, are in memory already; else a barrier sees to it.
    """
    tree = tree if in_memory else materialised(tree)
    squares = materialised(jax.tree.map(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))), tree))
    pairs = list(zip(jax.tree.leaves(squares), jax.tree.leaves(layouts), strict=True))
    start = no_squares()
    sharded = sum(_counted_once(square, layout) for square, layout in pairs if active(*_different(layout)))
    replicated = sum(square for square, layout in pairs if not active(*_different(layout)))
    return Squares(start.of_shards + sharded, start.of_replicated + replicated)


def _different(layout: Layout) -> tuple[str, ...]:
    """The mesh axes whose devices store different parts of a tensor, or different layers of its stack."""
    return *layout.layers, *layout.stored_axes


def _counted_once(square: jax.Array, layout: Layout) -> jax.Array:
    """The squared norm of a shard; 0 on all but the first device of those that store the same shard."""
    number, copies = device_number(*(axis for axis in STATE if axis not in _different(layout)))
    return square if copies == 1 else jnp.where(number == 0, square, 0.0)


def no_squares() -> Squares:
    """The `Squares` of an empty tree: zeros."""
    return Squares(varying(jnp.float32(0), STATE), jnp.float32(0))


def norm(squares: Squares) -> jax.Array:
    """The global norm from `Squares`, equal on all devices that store shards of the same replica."""
    return jnp.sqrt(add_up(squares.of_shards, *STATE) + squares.of_replicated)
