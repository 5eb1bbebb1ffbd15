"""Where everything lives: the one table that the settings fill, and nothing else reads those settings.

| class     | what it is                                              | sharded over dp_shard by          |
|-----------|---------------------------------------------------------|-----------------------------------|
| weights   | work copy of the block weights                          | zero_level >= 3 / shard_weights   |
| outer     | embedding, final norm, head: work copies                | never: one gradient sum per step  |
| grads     | gradient accumulators of the blocks                     | zero_level >= 2 / shard_gradients |
| master    | the weights the optimizer updates                       | always (ZeRO-1)                   |
| moments   | optimizer state                                         | always (ZeRO-1)                   |
| residuals | what the forward pass saves for the backward pass       | by batch                          |

`state_plan` turns the table into a shape, dtype and sharding for every array of the training state, building none.
Initialisation, the step, checkpoint restore and the memory report all read that plan.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from surojax.collectives import WHOLE
from surojax.mesh import DATA, SHARD
from surojax.optim import init_moments
from surojax.state import TrainState


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor class: its dtype and whether `dp_shard` divides it. Home is the device."""

    dtype: str
    sharded: bool


@dataclasses.dataclass(frozen=True)
class Placement:
    """The table. `moments` has no dtype of its own: the optimizer chose it."""

    weights: Row
    outer: Row
    grads: Row
    master: Row


def place(
    *,
    zero_level: int = 1,
    shard_gradients: bool | None = None,
    shard_weights: bool | None = None,
    model_dtype: str = "bfloat16",
    accum_dtype: str = "float32",
    master_dtype: str = "float32",
) -> Placement:
    """The table of these settings. Raises ValueError for a level other than 1, 2, 3."""
    if zero_level not in (1, 2, 3):
        raise ValueError(f"zero_level: expected 1, 2 or 3, got {zero_level}")
    shard_gradients = zero_level >= 2 if shard_gradients is None else shard_gradients
    shard_weights = zero_level >= 3 if shard_weights is None else shard_weights
    return Placement(
        weights=Row(model_dtype, shard_weights),
        outer=Row(model_dtype, False),
        grads=Row(accum_dtype, shard_gradients),
        master=Row(master_dtype, True),
    )


def shard_dims(params: dict, mesh: jax.sharding.Mesh) -> dict:
    """For each leaf the dimension that `dp_shard` divides: the first one that it can, without counting the layer axis.

    WHOLE when none divides evenly or there is one shard only.

    The first, because sharding the last dimension makes XLA keep a transposed copy of a whole stack.
    """
    n = mesh.shape[SHARD]

    def dim(shape):
        return next((i for i, size in enumerate(shape) if n > 1 and size % n == 0), WHOLE)

    return {
        "blocks": jax.tree.map(lambda p: dim(p.shape[1:]), params["blocks"]),
        "outer": jax.tree.map(lambda p: dim(p.shape), params["outer"]),
    }


def kept_whole(params: dict, dims: dict) -> dict[str, tuple[int, ...]]:
    """Matrices kept whole, by name with their shapes: their state costs its whole size on every device."""
    leaves, marks = jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(dims)
    pairs = zip(leaves, marks, strict=True)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): p.shape
        for (path, p), d in pairs
        if d == WHOLE and p.ndim > 1
    }


def specs(dims: dict, sharded: bool) -> dict:
    """PartitionSpecs of `{"blocks": [L, ...], "outer": ...}`, split over `dp_shard` along `dims` if `sharded`."""

    def spec(d, lead):
        return jax.P(*[None] * (d + lead), SHARD) if sharded and d != WHOLE else jax.P()

    return {
        "blocks": jax.tree.map(lambda d: spec(d, 1), dims["blocks"]),
        "outer": jax.tree.map(lambda d: spec(d, 0), dims["outer"]),
    }


def state_plan(
    params: dict, placement: Placement, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> TrainState:
    """A TrainState of `jax.ShapeDtypeStruct`, each with its sharding; `params` are shapes, see `abstract_params`."""
    dims = shard_dims(params, mesh)
    sharded, whole = specs(dims, True), specs(dims, False)
    work = {"blocks": (sharded if placement.weights.sharded else whole)["blocks"], "outer": whole["outer"]}

    def leaf(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))

    def tree(row: Row, spec: dict):
        return jax.tree.map(lambda p, s: leaf(p.shape, row.dtype, s), params, spec)

    moments = jax.eval_shape(
        lambda: init_moments(optimizer, jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params))
    )
    moments = {
        part: optax.tree_map_params(
            optimizer,
            lambda m, s: leaf(m.shape, m.dtype, s),
            moments[part],
            sharded[part],
            transform_non_params=lambda m: leaf(m.shape, m.dtype, jax.P()),
        )
        for part in ("blocks", "outer")
    }
    return TrainState(
        step=leaf((), jnp.int32, jax.P()),
        weights=tree(placement.weights, work),
        master=tree(placement.master, sharded),
        moments=moments,
    )


def batch_sharding(mesh: jax.sharding.Mesh, *, accumulated: bool = True) -> jax.NamedSharding:
    """Of tokens `[accumulation, batch, S]`, or `[batch, S]` in evaluation: the batch is split over all devices."""
    return jax.NamedSharding(mesh, jax.P(None, DATA) if accumulated else jax.P(DATA))


def bytes_per_device(plan) -> int:
    """Bytes that the arrays of a plan (any tree of ShapeDtypeStructs with shardings) take on one device."""
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(plan))
