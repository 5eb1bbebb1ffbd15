"""Layouts: for each parameter and tensor class, how it is cut over the devices where it is stored and computed with.

A layout follows from two things. `MESH_AXES` says which mesh axes divide a logical axis in every product. The ZeRO rule
says what is divided beyond that while it is stored: the first dimension that `dp_shard` divides evenly. The first,
because sharding the last dimension makes XLA keep a transposed copy of a whole stack.

PartitionSpecs here have an entry for each dimension of one layer; `stacked` puts the axis of layers in front.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax

from surojax.errors import ConfigError
from surojax.placement.home import DEVICE, HOST, Home
from surojax.placement.mesh import DATA, SHARD
from surojax.placement.param import OUTER, Kind, Param
from surojax.placement.table import Mesh, Placement, Row

# Logical axis of a parameter -> the mesh axes that divide it in every product.
MESH_AXES: dict[str, tuple[str, ...]] = {
    "vocab": (),
    "embed": (),
    "heads": (),
    "kv_heads": (),
    "head_dim": (),
    "mlp": (),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """One tensor class of one parameter: cut as `stored` in its home, as `computed` where it is computed with."""

    stored: jax.P
    computed: jax.P
    home: Home = DEVICE

    @property
    def sharded_dim(self) -> int | None:
        """The dimension that `dp_shard` divides in `stored` and not in `computed`; None if there is none."""
        for dim, axis in enumerate(self.stored):
            computed = self.computed[dim] if dim < len(self.computed) else None
            if axis == SHARD != computed:
                return dim
        return None


class Layouts(NamedTuple):
    """The layouts of a model by tensor class: dicts by section, of trees like its parameters.

    weights: work weights. quants: their 8-bit copies, if they are persistent. grads: gradient accumulators. master,
    moments: what the optimizer updates, which ZeRO-1 always shards.
    """

    weights: Any
    quants: Any
    grads: Any
    master: Any
    moments: Any


def layouts(params: dict, table: Placement, mesh: Mesh) -> Layouts:
    """The layouts of these parameters. Raises ConfigError when `shard_outer` cannot cut a vocabulary evenly."""

    def layers(row: Row) -> dict[str, Any]:
        """Of all segments."""
        segments = {name: of_segment for name, of_segment in params.items() if name != OUTER}
        return jax.tree.map(lambda param: _zero(param, row, mesh), segments)

    def state(row: Row) -> dict[str, Any]:
        # Files hold layers. The outer layers are a few layers' worth, and are kept in pinned host memory instead.
        outer_row = dataclasses.replace(row, home=HOST) if row.home.in_file else row
        return layers(row) | {OUTER: jax.tree.map(lambda param: _zero(param, outer_row, mesh), params[OUTER])}

    outer = {OUTER: jax.tree.map(lambda param: _outer(param, table.outer, mesh), params[OUTER])}
    return Layouts(
        weights=layers(table.weights) | outer,
        quants=layers(table.quants) | outer,
        grads=layers(table.grads) | outer,
        master=state(table.master),
        moments=state(table.moments),
    )


def _computed(param: Param) -> jax.P:
    """How products see a parameter."""
    entries = [MESH_AXES[axis] or None for axis in param.axes]
    return jax.P(*entries) if any(entries) else jax.P()


def _zero(param: Param, row: Row, mesh: Mesh) -> Layout:
    """The ZeRO rule: a class that is sharded is cut along the first dimension that `dp_shard` divides evenly."""
    computed = _computed(param)
    n = mesh.shape[SHARD]
    dim = next((i for i, size in enumerate(param.shape) if n > 1 and size % n == 0), None)
    if not row.sharded or dim is None:
        return Layout(computed, computed, row.home)
    return Layout(jax.P(*[None] * dim, SHARD), computed, row.home)


def _outer(param: Param, row: Row, mesh: Mesh) -> Layout:
    """With `shard_outer`, embedding and head are cut by words and computed with as they are stored."""
    replicated = _computed(param)
    if not row.sharded or param.kind is not Kind.TABLE:
        return Layout(replicated, replicated)
    stored = _zero(param, row, mesh).stored
    if stored != jax.P(SHARD):
        raise ConfigError(
            f"shard_outer: expected a vocabulary that dp_shard_size divides, got {param.shape[0]} words; pad it"
        )
    return Layout(stored, stored)


def stacked(spec: jax.P) -> jax.P:
    """The spec of a stack of layers, from that of one layer. The axis of layers is not cut."""
    return jax.P(None, *spec) if spec else spec


def specs(of_class: dict) -> dict:
    """PartitionSpecs as stored, of stacks `[L, ...]` for the segments, from the layouts of a class."""

    def spec(name: str, layout: Layout) -> jax.P:
        return layout.stored if name == OUTER else stacked(layout.stored)

    return {name: jax.tree.map(functools.partial(spec, name), layouts) for name, layouts in of_class.items()}


def replicated_matrices(params: dict, of_class: dict) -> dict[str, tuple[int, ...]]:
    """Matrices and tables that are not sharded, with their shapes: every device holds all of their state."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(of_class), strict=True)
    return {p.name: p.shape for p, layout in pairs if layout.sharded_dim is None and p.kind is not Kind.VECTOR}


def batch_sharding(mesh: Mesh, *, accumulated: bool = True) -> jax.NamedSharding:
    """Of tokens `[accumulation, batch, S]`, or `[batch, S]` in evaluation: the batch is split over all devices."""
    axes = tuple(a for a in DATA if mesh.shape[a] > 1)
    return jax.NamedSharding(mesh, jax.P(None, axes or None) if accumulated else jax.P(axes or None))
