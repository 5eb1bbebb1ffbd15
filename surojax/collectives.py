"""Data-parallel communication of parameter trees, inside `shard_map`.

`dims` is a tree like the parameters: for each leaf the dimension that is sharded over `dp_shard`, or WHOLE when the
leaf is kept whole on every device (there is one device, or no dimension divides).
"""

import jax
import jax.numpy as jnp

from surojax.mesh import DATA, REPLICATE, SHARD

WHOLE = -1


def varying(tree, axes: tuple[str, ...] = DATA):
    """Mark values as free to differ between devices, so that reverse mode keeps gradients local instead of summing."""

    def mark(x):
        missing = tuple(a for a in axes if a not in jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def gather(tree, dims):
    """Whole arrays from shards, for use in one device's own computation."""

    def one(x, d):
        return x if d == WHOLE else jax.lax.all_gather(x, SHARD, axis=d, tiled=True)

    return varying(jax.tree.map(one, tree, dims))


def gather_same(tree, dims):
    """Whole arrays from shards, known to be the same on every device of `dp_shard`."""

    def one(x, d):
        return x if d == WHOLE else jax.lax.all_gather(x, SHARD, axis=d, tiled=True, to="invarying")

    return jax.tree.map(one, tree, dims)


def scatter(tree, dims):
    """Sum over `dp_shard`, each device keeping its shard; leaves kept whole stay unsummed."""

    def one(x, d):
        return x if d == WHOLE else jax.lax.psum_scatter(x, SHARD, scatter_dimension=d, tiled=True)

    return jax.tree.map(one, tree, dims)


def sum_rest(tree, dims):
    """The sums that `scatter` left: over `dp_replicate`, and over `dp_shard` for leaves that are kept whole."""
    return jax.tree.map(lambda x, d: jax.lax.psum(x, DATA if d == WHOLE else REPLICATE), tree, dims)


def sum_of_squares(tree, dims) -> jax.Array:
    """Sum of squares over a tree of shards and whole leaves, float32, the same on every device."""
    squares = jax.tree.map(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))), tree)
    pairs = list(zip(jax.tree.leaves(squares), jax.tree.leaves(dims), strict=True))
    sharded = [s for s, d in pairs if d != WHOLE]
    whole = sum((s for s, d in pairs if d == WHOLE), start=jnp.float32(0))
    return whole + (jax.lax.psum(sum(sharded), SHARD) if sharded else 0)
