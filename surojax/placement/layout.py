"""Layouts: for each parameter and tensor class, how it is sharded while it is stored and while it is computed with.

A layout follows from two rules. `MESH_AXES` says over which mesh axes a logical axis is sharded in every product. The
ZeRO rule also shards stored tensors over `dp_shard x cp`: along the first dimension that these devices divide evenly.
Of these axes, experts are sharded over `ep` in every product already, so the rule takes the others for them.
It is the first, because sharding the last dimension makes XLA keep a transposed copy of the entire stack of layers. If
a product shards that dimension too, each of its devices' parts is divided once more, so that all-gathering over
`dp_shard x cp` restores the part.

PartitionSpecs in this file have an entry for each dimension of one layer; `stacked` adds the layer axis in front.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax

from surojax.errors import ConfigError
from surojax.placement.home import DEVICE, HOST, Home
from surojax.placement.mesh import BATCH, EXPERT, KV_HEADS, PIPELINE, SHARD, SHARDS, TENSOR, shard_axes
from surojax.placement.param import EXPERTS, OUTER, ROUTED, VOCABULARY, Kind, Param, trainable
from surojax.placement.table import Mesh, Placement, TensorClass

# Logical axis of a parameter -> the mesh axes that it is sharded over in every product.
MESH_AXES: dict[str, tuple[str, ...]] = {
    VOCABULARY: (PIPELINE, *TENSOR),
    "embed": (),
    "heads": TENSOR,
    "kv_heads": (KV_HEADS,),
    "channels": (),
    "conv": TENSOR,
    "mixed": (),
    "taps": (),
    "latent": (),
    "mlp": TENSOR,
    EXPERTS: (EXPERT,),
    ROUTED: (),
    "rank": (),
    "labels": (),
    "scalar": (),
    "rows": (),
}


def mesh_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec, which shard one dimension."""
    return (entry,) if isinstance(entry, str) else entry or ()


def _spec(dims: list[tuple[str, ...]]) -> jax.P:
    """A PartitionSpec of the mesh axes of each dimension, without entries for the last ones that have none."""
    while dims and not dims[-1]:
        dims = dims[:-1]
    return jax.P(*(axes[0] if len(axes) == 1 else axes or None for axes in dims))


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one tensor class of one parameter is sharded.

    stored: PartitionSpec in its home. computed: PartitionSpec while it is computed with. layers: the mesh axes that a
    stack's layers are divided over, which neither of the two names.
    """

    stored: jax.P
    computed: jax.P
    home: Home = DEVICE
    layers: tuple[str, ...] = ()

    @property
    def sharded_dim(self) -> int | None:
        """The dimension that `stored` shards over `dp_shard x cp` and `computed` does not; None if there is none."""
        for dim, axes in enumerate(map(mesh_axes, self.stored)):
            computed = mesh_axes(self.computed[dim]) if dim < len(self.computed) else ()
            if any(axis in axes and axis not in computed for axis in SHARDS):
                return dim
        return None

    @property
    def shards(self) -> tuple[str, ...]:
        """The axes of `dp_shard x cp` whose devices compute with equal values: they all-gather and reduce-scatter."""
        return tuple(axis for axis in SHARDS if axis not in self.computed_axes)

    @property
    def stored_axes(self) -> tuple[str, ...]:
        """The mesh axes whose devices store different parts of a layer."""
        return tuple(axis for entry in self.stored for axis in mesh_axes(entry))

    @property
    def computed_axes(self) -> tuple[str, ...]:
        """The mesh axes whose devices compute with different parts of a layer."""
        return tuple(axis for entry in self.computed for axis in mesh_axes(entry))


class Layouts(NamedTuple):
    """The layouts of a model by tensor class. Each is a dict by section, of trees with the structure of its parameters.

    weights: work weights. quants: their 8-bit copies, if they are persistent. grads: gradient accumulators. master,
    moments: the optimizer's state, which ZeRO-1 always shards. The last three have trainable parameters only.
    """

    weights: Any
    quants: Any
    grads: Any
    master: Any
    moments: Any


def layouts(params: dict, table: Placement, mesh: Mesh) -> Layouts:
    """The layouts of these parameters.

    Raises ConfigError if `tp` does not divide a dimension that it shards, or `dp_shard x cp` a sharded vocabulary.
    """

    stages = (PIPELINE,) if PIPELINE in mesh.shape else ()
    trained = {name: trainable(section) for name, section in params.items()}

    def layers(row: TensorClass, params: dict) -> dict[str, Any]:
        """The layouts of all segments in this class."""
        segments = {name: segment_params for name, segment_params in params.items() if name != OUTER}
        return jax.tree.map(lambda param: dataclasses.replace(_zero(param, row, mesh), layers=stages), segments)

    def state(row: TensorClass) -> dict[str, Any]:
        """The layouts of master weights or moments."""
        in_memory = dataclasses.replace(row, home=HOST) if row.home.in_file else row

        def outer_layout(param: Param) -> Layout:
            return _zero(param, row if VOCABULARY in param.axes[:1] else in_memory, mesh)

        return layers(row, trained) | {OUTER: jax.tree.map(outer_layout, trained[OUTER])}

    def outer(params: dict) -> dict[str, Any]:
        """The layouts of work weights and gradients of the outer layers."""
        return {OUTER: jax.tree.map(lambda param: _outer(param, table.outer, mesh), params[OUTER])}

    return Layouts(
        weights=layers(table.weights, params) | outer(params),
        quants=layers(table.quants, params) | outer(params),
        grads=layers(table.grads, trained) | outer(trained),
        master=state(table.master),
        moments=state(table.moments),
    )


def _computed(param: Param, mesh: Mesh) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension of a parameter in products. Raises ConfigError if they do not divide it."""
    dims = [tuple(axis for axis in MESH_AXES[name] if axis in mesh.shape) for name in param.axes]
    for size, axes, name in zip(param.shape, dims, param.axes, strict=True):
        if size % _devices(mesh, axes):
            names = {"pp_size": PIPELINE in axes, "ep_size": EXPERT in axes, "tp_size": any(a in TENSOR for a in axes)}
            sizes = " x ".join(name for name, named in names.items() if named)
            raise ConfigError(
                f"{sizes}: expected a divisor of {param.name}'s {size} {name}, got {_devices(mesh, axes)}; lower it"
            )
    return dims


def _devices(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _zero(param: Param, row: TensorClass, mesh: Mesh) -> Layout:
    """The ZeRO rule: shards along the first dimension that `dp_shard x cp` divides evenly, if the class is sharded."""
    dims = _computed(param, mesh)
    computed = _spec(dims)
    over = tuple(axis for axis in shard_axes(mesh) if not any(axis in axes for axes in dims))
    n = _devices(mesh, over)
    parts = [size // _devices(mesh, axes) for size, axes in zip(param.shape, dims, strict=True)]
    dim = next((i for i, size in enumerate(parts) if n > 1 and size % n == 0), None)
    if not row.sharded or dim is None:
        return Layout(computed, computed, row.home)
    stored = _spec([(*axes, *over) if i == dim else axes for i, axes in enumerate(dims)])
    return Layout(stored, computed, row.home)


def _outer(param: Param, row: TensorClass, mesh: Mesh) -> Layout:
    """The layout of an outer parameter.

    With `shard_outer`, rows of the embedding and of the head are sharded, and computed with as they are stored.
    """
    computed = _spec(_computed(param, mesh))
    if not row.sharded or param.kind is not Kind.TABLE:
        return Layout(computed, computed)
    layout = _zero(param, row, mesh)
    if layout.sharded_dim != 0:
        n = _devices(mesh, (*_computed(param, mesh)[0], *shard_axes(mesh)))
        data_devices = mesh.shape[SHARD] * mesh.shape.get(EXPERT, 1)
        divisor = "dp_shard_size" if n == data_devices else f"the number of GPUs of a replica, {n},"
        raise ConfigError(
            f"shard_outer: expected a vocabulary that {divisor} divides, got {param.shape[0]} words; pad it"
        )
    return Layout(layout.stored, layout.stored)


def stacked(layout: Layout) -> jax.P:
    """The PartitionSpec of a stored stack of layers, from the layout of a layer."""
    return _spec([layout.layers, *map(mesh_axes, layout.stored)])


def specs(class_layouts: dict) -> dict:
    """PartitionSpecs of stored arrays, from the layouts of a class; segments have stacks `[L, ...]`."""

    def spec(name: str, layout: Layout) -> jax.P:
        return layout.stored if name == OUTER else stacked(layout)

    return {name: jax.tree.map(functools.partial(spec, name), layouts) for name, layouts in class_layouts.items()}


def replicated_matrices(params: dict, class_layouts: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of matrices and tables that are not sharded over `dp_shard x cp`."""
    shapes = {}
    for section, section_params in params.items():
        for param, layout in zip(jax.tree.leaves(section_params), jax.tree.leaves(class_layouts[section]), strict=True):
            if layout.sharded_dim is None and param.kind is not Kind.VECTOR:
                shapes[f"{section}.{param.name}"] = param.shape
    return shapes


def batch_sharding(mesh: Mesh, *, accumulated: bool = True) -> jax.NamedSharding:
    """The sharding of tokens `[accumulation, batch, S]`, or of `[batch, S]` if not accumulated (evaluation).

    The batch is sharded over the data-parallel devices. All devices of `cp` and `tp` get whole sequences: which part is
    theirs is decided in the step, after labels were shifted and documents marked.
    """
    axes = tuple(a for a in BATCH if mesh.shape.get(a, 1) > 1)
    return jax.NamedSharding(mesh, jax.P(None, axes or None) if accumulated else jax.P(axes or None))
