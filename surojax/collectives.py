"""Data-parallel communication of parameter trees, inside `shard_map`.

`dims` is a tree like the parameters: for each leaf the dimension that is sharded over `dp_shard`, or WHOLE when the
leaf is kept whole on every device (there is one device, or no dimension divides).

An axis of one device takes part in nothing: values are not marked as varying over it and no collective names it, so a
program for one device has none.
"""

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from surojax.mesh import DATA, SHARD

WHOLE = -1


def active(*axes: str) -> tuple[str, ...]:
    """Those of the axes that have more than one device."""
    return tuple(a for a in axes if jax.lax.axis_size(a) > 1)


def varying(tree, axes: tuple[str, ...] = DATA):
    """Mark values as free to differ between devices, so that reverse mode keeps gradients local instead of summing."""

    def mark(x):
        missing = tuple(a for a in active(*axes) if a not in jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def add_up(tree, *axes: str):
    """Sums over those of the mesh axes on which a value differs; it is then the same on every device of them."""

    def one(x):
        names = tuple(a for a in axes if a in jax.typeof(x).manual_axis_type.varying)
        return jax.lax.psum(x, names) if names else x

    return jax.tree.map(one, tree)


def same(tree, *axes: str):
    """Values that the caller knows to be equal on all devices of these axes, now typed so: the opposite of `varying`.

    It moves nothing. For sums written over what was summed, in an array whose type says that it varies.
    """

    def one(x):
        names = frozenset(axes) & jax.typeof(x).manual_axis_type.varying
        return _same.bind(x, axes=names) if names else x

    return jax.tree.map(one, tree)


def _type_of_same(x, *, axes: frozenset[str]):
    left = x.manual_axis_type.varying - axes
    return x.update(manual_axis_type=jax.sharding.ManualAxisType(varying=left))


_same = Primitive("same")
_same.def_abstract_eval(_type_of_same)
mlir.register_lowering(_same, lambda context, x, *, axes: [x])


def gather(tree, dims):
    """Whole arrays from shards, for use in one device's own computation."""

    def one(x, d):
        return x if d == WHOLE else jax.lax.all_gather(x, SHARD, axis=d, tiled=True)

    return varying(jax.tree.map(one, tree, dims))


def gather_same(tree, dims, resting):
    """Arrays cut as `resting` says from shards cut as `dims` says; whole ones are the same on every device."""

    def one(x, d, r):
        return x if d == r else jax.lax.all_gather(x, SHARD, axis=d, tiled=True, to="invarying")

    return jax.tree.map(one, tree, dims, resting)


def scatter(tree, dims):
    """Sums over `dp_shard`: each device keeps its shard, and all of a leaf that is kept whole."""

    def one(x, d):
        return add_up(x, SHARD) if d == WHOLE else jax.lax.psum_scatter(x, SHARD, scatter_dimension=d, tiled=True)

    return jax.tree.map(one, tree, dims)


def sum_of_squares(tree, dims) -> tuple[jax.Array, ...]:
    """(of shards, of whole leaves): sums of squares of this device's part of a tree, float32; see `norm`."""
    squares = jax.tree.map(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))), tree)
    pairs = list(zip(jax.tree.leaves(squares), jax.tree.leaves(dims), strict=True))
    of_shards, of_whole = ([s for s, d in pairs if (d == WHOLE) == whole] for whole in (False, True))
    return tuple(a + sum(b) for a, b in zip(no_squares(), (of_shards, of_whole), strict=True))


def no_squares() -> tuple[jax.Array, jax.Array]:
    """Where a sum of `sum_of_squares` starts."""
    return varying(jnp.float32(0), (SHARD,)), jnp.float32(0)


def norm(of_shards: jax.Array, of_whole: jax.Array) -> jax.Array:
    """The global norm from sums of squares, the same on every device of `dp_shard`."""
    return jnp.sqrt(add_up(of_shards, SHARD) + of_whole)
