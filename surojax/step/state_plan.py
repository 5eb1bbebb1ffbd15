"""The plan of the training state: a shape, dtype and sharding for every array, building none.

Initialisation, the step, checkpoint restore and the memory report all read it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from surojax.errors import ConfigError
from surojax.memory.host import MEMORY_KIND, joined
from surojax.memory.nvme import InFile, Store
from surojax.numerics import quantize
from surojax.optim.optimizer import Optimizer
from surojax.placement.layout import Layout, Layouts, stacked
from surojax.placement.param import Kind, Param
from surojax.placement.table import Home, Mesh, Placement
from surojax.step.state import TrainState


def state_plan(
    params: dict,
    num_layers: int,
    table: Placement,
    layouts: Layouts,
    optimizer: Optimizer,
    mesh: Mesh,
    *,
    history: tuple[int, ...] | None = None,
) -> TrainState:
    """A TrainState of `jax.ShapeDtypeStruct`s, each with its sharding, for the `Param`s of a model.

    Stacks of layers whose home is nvme are `InFile`s of one store. history: see `fp8.history_shape`, if there is one.
    The work weights of the blocks are a `host.Split` if some of their layers stay on the device. Raises ConfigError
    when `resident_layers` leaves no other.
    """
    if table.weights.resident >= num_layers:
        raise ConfigError(
            f"resident_layers: expected fewer than the {num_layers} layers, got {table.weights.resident}; "
            "leave it out with offload_weights=False to keep all on the device"
        )
    store = Store(table.master.folder, num_layers)

    def array(shape, dtype, spec: jax.P, home: Home) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec, memory_kind=MEMORY_KIND[home]))

    def stack(shape, dtype, layout: Layout, layers: int = num_layers):
        """Of `layers` layers, each of this shape and layout."""
        shape, spec = (layers, *shape), stacked(layout.stored)
        if layout.home == "nvme":
            return InFile(store, shape, dtype, jax.NamedSharding(mesh, spec))
        return array(shape, dtype, spec, layout.home)

    def whole(shape, dtype, layout: Layout):
        """An array of the outer layers."""
        return array(shape, dtype, layout.stored, layout.home)

    def quants(param: Param, layout: Layout, work: Any):
        """The 8-bit copy of a matrix; vectors stay as they are."""
        if param.kind is not Kind.MATRIX:
            return work
        shape = (num_layers, *param.shape)
        spec = stacked(layout.stored)
        block = 0 if table.one_scale else quantize.block_size(jax.NamedSharding(mesh, spec).shard_shape(shape)[-1])
        planned = quantize.planned(jax.ShapeDtypeStruct(shape, table.weights.dtype), table.quants.dtype, block)
        values = array(planned.values.shape, planned.values.dtype, spec, layout.home)
        if table.one_scale:
            return quantize.Quantized(values, array(planned.scales.shape, planned.scales.dtype, jax.P(), "device"))
        return quantize.Quantized(values, array(planned.scales.shape, planned.scales.dtype, spec, layout.home))

    def work_stack(layers: int, home: Home | None):
        """Work weights of so many layers, all of them in this memory, or where their layouts say."""

        def one(param: Param, layout: Layout):
            layout = layout if home is None else dataclasses.replace(layout, home=home)
            return stack(param.shape, table.weights.dtype, layout, layers)

        return jax.tree.map(one, params["blocks"], layouts.weights["blocks"])

    resident = table.weights.resident
    split = [work_stack(resident, "device")] if resident else []
    work = joined([*split, work_stack(num_layers - resident, None)])
    if table.persistent_quants:
        work = jax.tree.map(quants, params["blocks"], layouts.quants["blocks"], work)

    def of_state(make, part: str):
        """(master weights, moments) of the blocks or of the outer layers; make: `stack` or `whole`."""

        def moments(param: Param, master_layout: Layout, layout: Layout):
            rule = optimizer.rule(param)
            last = param.shape[-1] // jax.NamedSharding(mesh, master_layout.stored).shard_shape(param.shape)[-1]
            shapes = jax.eval_shape(lambda: rule.init(param.shape, last))
            return jax.tree.map(lambda x, at: make(x.shape, x.dtype, at), shapes, rule.state_layout(layout))

        at = layouts.master[part]
        master = jax.tree.map(lambda param, l: make(param.shape, table.master.dtype, l), params[part], at)
        return master, jax.tree.map(moments, params[part], at, layouts.moments[part])

    # The order in which stacks are made is the order of their places in a file's record.
    (master, moments), (outer_master, outer_moments) = of_state(stack, "blocks"), of_state(whole, "outer")
    work_outer = jax.tree.map(
        lambda param, l: whole(param.shape, table.outer.dtype, l), params["outer"], layouts.weights["outer"]
    )
    return TrainState(
        step=array((), jnp.int32, jax.P(), "device"),
        weights={"blocks": work, "outer": work_outer},
        master={"blocks": master, "outer": outer_master},
        moments={"blocks": moments, "outer": outer_moments},
        history=array(history, jnp.float32, jax.P(), "device") if history else None,
    )


def bytes_per_device(plan, home: Home = "device") -> int:
    """Bytes that a plan (any tree of ShapeDtypeStructs with shardings) takes in this memory, per device.

    nvme: an equal part of the files, which hold everything once.
    """
    leaves = jax.tree.leaves(plan)
    if home == "nvme":
        return sum(x.size * x.dtype.itemsize // x.sharding.mesh.size for x in leaves if isinstance(x, InFile))
    return sum(
        leaf_bytes(x) for x in leaves if not isinstance(x, InFile) and x.sharding.memory_kind == MEMORY_KIND[home]
    )


def leaf_bytes(x: jax.ShapeDtypeStruct) -> int:
    """Bytes that one planned array takes on each device."""
    assert x.sharding is not None
    return int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
