"""Layouts: for each parameter and tensor class, how it is sharded while it is stored and while it is computed with.

A layout follows from two rules. `MESH_AXES` says over which mesh axes a logical axis is sharded in every product. The
ZeRO rule also shards stored tensors: along the first dimension that `dp_shard` divides evenly. It is the first, because
sharding the last dimension makes XLA keep a transposed copy of the entire stack of layers.

PartitionSpecs in this file have an entry for each dimension of one layer; `stacked` adds the layer axis in front.
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

# Logical axis of a parameter -> the mesh axes that it is sharded over in every product.
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
    """How one tensor class of one parameter is sharded.

    stored: PartitionSpec in its home. computed: PartitionSpec while it is computed with.
    """

    stored: jax.P
    computed: jax.P
    home: Home = DEVICE

    @property
    def sharded_dim(self) -> int | None:
        """The dimension that is sharded over `dp_shard` in `stored` but not in `computed`; None if there is none."""
        for dim, axis in enumerate(self.stored):
            computed = self.computed[dim] if dim < len(self.computed) else None
            if axis == SHARD != computed:
                return dim
        return None


class Layouts(NamedTuple):
    """The layouts of a model by tensor class. Each is a dict by section, of trees with the structure of its parameters.

    weights: work weights. quants: their 8-bit copies, if they are persistent. grads: gradient accumulators. master,
    moments: the optimizer's state, which ZeRO-1 always shards.
    """

    weights: Any
    quants: Any
    grads: Any
    master: Any
    moments: Any


def layouts(params: dict, table: Placement, mesh: Mesh) -> Layouts:
    """The layouts of these parameters. Raises ConfigError if `dp_shard` does not divide a sharded vocabulary."""

    def layers(row: Row) -> dict[str, Any]:
        """The layouts of all segments in this class."""
        segments = {name: of_segment for name, of_segment in params.items() if name != OUTER}
        return jax.tree.map(lambda param: _zero(param, row, mesh), segments)

    def state(row: Row) -> dict[str, Any]:
        """The layouts of master weights or moments."""
        # Files store layers only. The outer layers are as large as a few layers and stay in pinned host memory.
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
    """The PartitionSpec of a parameter in products."""
    entries = [MESH_AXES[axis] or None for axis in param.axes]
    return jax.P(*entries) if any(entries) else jax.P()


def _zero(param: Param, row: Row, mesh: Mesh) -> Layout:
    """The ZeRO rule: shards along the first dimension that `dp_shard` divides evenly, if the class is sharded."""
    computed = _computed(param)
    n = mesh.shape[SHARD]
    dim = next((i for i, size in enumerate(param.shape) if n > 1 and size % n == 0), None)
    if not row.sharded or dim is None:
        return Layout(computed, computed, row.home)
    return Layout(jax.P(*[None] * dim, SHARD), computed, row.home)


def _outer(param: Param, row: Row, mesh: Mesh) -> Layout:
    """The layout of an outer parameter.

    With `shard_outer`, rows of the embedding and of the head are sharded, and computed with as they are stored.
    """
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
    """The PartitionSpec of a stack of layers, from the one of a layer. The layer axis is not sharded."""
    return jax.P(None, *spec) if spec else spec


def specs(of_class: dict) -> dict:
    """PartitionSpecs of stored arrays, from the layouts of a class; segments have stacks `[L, ...]`."""

    def spec(name: str, layout: Layout) -> jax.P:
        return layout.stored if name == OUTER else stacked(layout.stored)

    return {name: jax.tree.map(functools.partial(spec, name), layouts) for name, layouts in of_class.items()}


def replicated_matrices(params: dict, of_class: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of matrices and tables that are not sharded: every device stores all of their state."""
    found = {}
    for section, of_section in params.items():
        for param, layout in zip(jax.tree.leaves(of_section), jax.tree.leaves(of_class[section]), strict=True):
            if layout.sharded_dim is None and param.kind is not Kind.VECTOR:
                found[f"{section}.{param.name}"] = param.shape
    return found


def batch_sharding(mesh: Mesh, *, accumulated: bool = True) -> jax.NamedSharding:
    """The sharding of tokens `[accumulation, batch, S]`, or of `[batch, S]` if not accumulated (evaluation).

    The batch is sharded over all devices.
    """
    axes = tuple(a for a in DATA if mesh.shape[a] > 1)
    return jax.NamedSharding(mesh, jax.P(None, axes or None) if accumulated else jax.P(axes or None))
